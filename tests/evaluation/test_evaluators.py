"""Evaluators run unchanged on an encoder that shares its rows out over ranks: their figures are those of
sentence-transformers on the bare model in one process."""

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState
from sentence_transformers import SentenceTransformer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hf_dist_ext.errors import RunError, UsageError
from hf_dist_ext.evaluation.encoder import dist_encoder
from hf_dist_ext.evaluation.evaluators import _figures_of, check_best_metric, named, prefix_once, run_evaluators
from hf_dist_ext.strategies import collectives
from hf_dist_ext.strategies.base import Strategy
from hf_dist_ext.strategies.gathering import Rows
from tests.distributed.forked import Run
from tests.evaluation import evaluators
from tests.evaluation.models import multi_vector_encoder, sentence_transformer
from tests.retrieval_data import texts


class Sharded(Strategy):
    forwards_are_collective = True


class Pairs(Sharded):
    """Two ranks hold the same rows."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = Rows(shared_by=2, peers=init_device_mesh("cpu", (2, 2)).get_group(0))


def encoder_of(model, kind: str, **more):
    """As a run under DDP or FSDP2 has it."""
    if kind == "single":
        return dist_encoder(model, model, Strategy(), "cpu", **more)
    if kind == "ddp":
        return dist_encoder(model, DistributedDataParallel(model), Strategy(), "cpu", **more)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model[0].model.encoder.layer:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return dist_encoder(model, model, Pairs() if kind == "pairs" else Sharded(), "cpu", **more)


def states() -> list:
    return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]


def on_all_ranks(mode: str, folder: Path, work: Callable[[], object]) -> list:
    """What `work` returns on every rank."""

    def run(say) -> str:
        torch.set_num_threads(1)
        PartialState(cpu=True)
        found = work()
        everyone = [found]
        if collectives.world_size() > 1:
            everyone = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, found)
        return json.dumps(everyone)

    return json.loads(Run(mode, folder / "log", run).result())


def settings(model) -> list:
    return [model.prompts, model.max_seq_length, getattr(model, "truncate_dim", None)]


def evaluate(model, kind: str, given, folder: Path) -> dict:
    """What a rank gets, how many batches its model has seen, and whether anything else has changed."""
    batches = []
    model.train()
    model[-1].eval()
    modes, before = [module.training for module in model.modules()], settings(model)
    encoder = encoder_of(model, kind, after_batch=lambda: batches.append(1))
    torch.manual_seed(collectives.rank()), random.seed(collectives.rank()), np.random.seed(collectives.rank())
    drawn = states()
    figures = run_evaluators(given, encoder, folder / "figures", epoch=1, steps=7, seed=3)
    return {
        "figures": figures, "num_batches": len(batches), "has_drawn": states() != drawn,
        "has_changed": [[module.training for module in model.modules()], settings(model)] != [modes, before],
    }  # fmt: skip


KINDS = {
    "vectors": (sentence_transformer, evaluators.of_dense),
    "tokens": (multi_vector_encoder, evaluators.of_token_vectors),
}


@pytest.mark.parametrize("kind, mode, of", [
    ("single", "single", "vectors"), ("ddp", "ddp", "vectors"), ("fsdp", "ddp", "vectors"),
    ("single", "single", "tokens"), ("ddp", "ddp-3", "tokens"), ("fsdp", "ddp", "tokens"),
    ("pairs", "hsdp-sharded", "tokens"),
])  # fmt: skip
def test_figures_are_those_of_one_process_on_every_rank(kind, mode, of, tmp_path):
    make, make_evaluators = KINDS[of]
    model = make()
    given = make_evaluators(model, tmp_path / "data")
    expected = evaluators_alone(given, model, tmp_path / "alone")
    assert len(expected) > 10 and len(set(expected.values())) > 8
    found = on_all_ranks(mode, tmp_path, partial(evaluate, model, kind, given, tmp_path))
    for of_rank in found:
        assert of_rank["figures"] == pytest.approx(expected, abs=1e-5)
        assert not of_rank["has_drawn"] and not of_rank["has_changed"]
    assert len({of_rank["num_batches"] for of_rank in found}) == 1, "a forward may be a collective"
    written = {path.name: len(path.read_text().splitlines()) for path in (tmp_path / "figures").iterdir()}
    assert written == {path.name: len(path.read_text().splitlines()) for path in (tmp_path / "alone").iterdir()}


def evaluators_alone(given: list, model, folder: Path) -> dict:
    folder.mkdir()
    found = {}
    for evaluator in given:
        found |= evaluator(model, str(folder), 1, 7)
    return found | {"sequential_score": found[evaluator.primary_metric]}


class Unruly:
    """An evaluator of a user: it draws, sets what it likes, and asks each rank for something else."""

    def __call__(self, model, output_path=None, epoch=-1, steps=-1):
        assert isinstance(model, SentenceTransformer) and collectives.rank() == 0
        model.train()
        model.max_seq_length, length = 4, model.max_seq_length
        short = model.encode(random.sample(texts(9, 1), 5), prompt_name="query")
        model.max_seq_length = length
        with model.truncate_embeddings(3):
            cut = model.encode_document(texts(2, 2))
        one = model.encode("read file")
        assert one.shape == (32,) and cut.shape == (2, 3) and len(model.encode([])) == 0
        return float(short.sum() + cut.sum() + one.sum() + np.random.rand())


def test_an_evaluator_may_do_what_it_likes(tmp_path):
    alone = run_evaluators(Unruly(), encoder_of(sentence_transformer(), "single"), seed=3)
    again = run_evaluators(Unruly(), encoder_of(sentence_transformer(), "single"), seed=4)
    assert alone.keys() == {"evaluator"} and alone != pytest.approx(again)
    found = on_all_ranks("ddp", tmp_path, partial(evaluate, sentence_transformer(), "ddp", Unruly(), tmp_path))
    for of_rank in found:
        assert of_rank["figures"] == pytest.approx(alone) and not of_rank["has_changed"] and not of_rank["has_drawn"]


# ---- errors ----


def fails(where: str, model) -> str:
    """What a rank raises, of an evaluation in which one rank fails."""
    encoder = encoder_of(model, "ddp")

    def evaluator(encoder, **others):
        if where == "evaluator":
            raise UsageError("no such answer")
        try:
            encoder.encode(texts(9, 1))
        except RunError:
            encoder.encode(texts(9, 1))  # too late
        return None

    is_broken = where == "rank 1" and collectives.rank() == 1
    forward, model[0].forward = model[0].forward, None if is_broken else model[0].forward
    with pytest.raises((RunError, UsageError, TypeError)) as raised:
        run_evaluators(evaluator, encoder)
    model[0].forward = forward
    assert run_evaluators([], encoder, seed=3) == {"sequential_score": 0.0}, "ranks are still in step"
    return f"{type(raised.value).__name__}: {raised.value}"


def test_an_error_of_one_rank_is_raised_on_all(tmp_path):
    model = sentence_transformer()
    first, second = on_all_ranks("ddp", tmp_path, partial(fails, "rank 1", model))
    assert "'NoneType' object is not callable" in second
    assert first == f"RunError: rank 1: {second.removeprefix('TypeError: ')}"
    first, second = on_all_ranks("ddp", tmp_path, partial(fails, "evaluator", model))
    assert (first, second) == ("UsageError: no such answer", "UsageError: rank 0: no such answer")
    first, second = on_all_ranks("ddp", tmp_path, partial(fails, "returns nothing", model))
    assert "has returned None" in first and "has returned None" in second


def fails_in_a_collective(model) -> None:
    encoder = encoder_of(model, "fsdp")
    if collectives.rank() == 1:
        model.preprocess = lambda *arguments, **options: 1 / 0
    run_evaluators(lambda model, **others: model.encode(texts(9, 1)).sum(), encoder)


def test_where_forwards_are_collectives_an_error_ends_its_process(tmp_path):
    with pytest.raises(AssertionError, match="ZeroDivisionError: division by zero"):
        on_all_ranks("ddp", tmp_path, partial(fails_in_a_collective, sentence_transformer()))


@pytest.mark.parametrize("options, words", [
    ({"device": "meta"}, "the processes of this run encode together"),
    ({"device": ["cpu", "cpu"]}, "start processes of their own"),
    ({"pool": {"input": None}}, "start processes of their own"),
])  # fmt: skip
def test_what_cannot_be_shared_is_refused(options, words):
    with pytest.raises(UsageError, match=words):
        encoder_of(sentence_transformer(), "single").encode(texts(3, 0), **options)


# ---- names ----


def test_figures_are_named_as_a_trainer_of_sentence_transformers_does():
    assert named({"sts_map": 1, "eval_own": 2}, "eval") == {"eval_sts_map": 1, "eval_own": 2}
    assert prefix_once("eval", None) == prefix_once("eval", [1]) == "eval"
    several = {"first": [], "second": []}
    assert [prefix_once(f"eval_{name}", several) for name in several] == ["eval", None]
    assert prefix_once("test", several) == "test"


def test_a_best_metric_that_no_evaluator_gives_is_refused():
    sts, unnamed = (evaluators.of_vectors.EmbeddingSimilarityEvaluator(["a"], ["b"], [1], name=n) for n in ("sts", ""))
    both = evaluators.of_vectors.SequentialEvaluator([sts, sts])
    for best, of in [("eval_sts_x", sts), ("sts_x", both), ("eval_sequential_score", both), ("loss", sts),
                     (None, sts), ("eval_any", unnamed), ("eval_loss", None), ("any", lambda: 1)]:  # fmt: skip
        check_best_metric(best, of, ["loss"])
    with pytest.raises(UsageError, match="Closest: loss. Others begin with eval_sts_."):
        check_best_metric("eval_los", sts, ["loss"])
    with pytest.raises(UsageError, match="Closest: loss.$"):
        check_best_metric("eval_los", None, ["loss"])


def test_figures_of_numpy_and_torch_are_numbers():
    """Else the first line that is logged can not be written."""
    give = lambda model, **given: {"a": np.float32(0.5), "b": torch.tensor(2.0), "c": "text"}  # noqa: E731
    found = _figures_of(give, None, None, 0, 0)
    assert json.loads(json.dumps(found)) == {"a": 0.5, "b": 2.0, "c": "text"}

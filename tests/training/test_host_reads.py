"""A training process reads next to nothing back from its tensors: a read waits for all that a device has queued.

Tensors without values (FakeTensorMode) raise where one is read, so that a step that runs on them reads nothing. What
`Trainer` and the guard read beside the step is counted. On a GPU torch itself tells (the `cuda` test). Neither does
the process look at rows one by one: a loader's worker has (training/ahead.py).
"""

import pickle
import sys
from collections import Counter
from datetime import timedelta
from unittest.mock import Mock

import datasets
import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hf_dist_ext.data.sentence_collator import ContrastiveCollator
from hf_dist_ext.engine import replay
from hf_dist_ext.engine.chunks import ChunkedBatch
from hf_dist_ext.engine.gradient_cache import cached_step
from hf_dist_ext.engine.layout import lay_out
from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.engine.replay import ReplayError
from hf_dist_ext.engine.rows import order_of_chunks
from hf_dist_ext.engine.tables import ChunkLimits, Table
from hf_dist_ext.failures import set_collective_timeout
from hf_dist_ext.strategies import collectives
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.health import Health
from hf_dist_ext.training.sizes import StepSizes
from hf_dist_ext.training.trainer import DistTrainer
from tests.distributed.forked import Run
from tests.tiny_models import WORDS, embedding_model, model_config, tiny_tokenizer
from tests.training.test_trainer import Tiny

COLUMNS = ("query", "positive", "negative")


def rows(count: int) -> list[dict]:
    def text(start: int, words: int) -> str:
        return " ".join(WORDS[(start + i) % len(WORDS)] for i in range(words))

    return [
        {"query": text(i, 1 + i % 5), "positive": text(i, 2 + i % 17), "negative": [text(i + 1, 3)] * (i % 3)}
        for i in range(count)
    ]


def collator_of(flat: bool) -> ContrastiveCollator:
    return ContrastiveCollator(tiny_tokenizer(), COLUMNS, id_column="query", flat=flat)


def without_values(mode: FakeTensorMode, value: object) -> object:
    if isinstance(value, dict):
        return {name: without_values(mode, one) for name, one in value.items()}
    return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value


class Packed(Tiny):
    def forward(self, input_ids, position_ids, packed_rows):
        hidden = (self.tokens(input_ids) + position_ids[..., None]).squeeze(0)
        return self.middle(torch.stack([row.mean(0) for row in hidden.split(packed_rows.lengths)]))


class Pictured(Tiny):
    def forward(self, pixel_values=None, **text):
        rows = super().forward(**text)
        return rows if pixel_values is None else rows + pixel_values.mean()


def with_pictures(features: dict, counts: list[int]) -> dict:
    return features | {"pixel_values": torch.rand(sum(counts), 3, 4, 4), "num_images": counts}


def batch_of(kind: str) -> dict:
    made = collator_of(kind in ("flat", "packed"))(rows(9))
    if kind == "pictures":
        made["positive"] = with_pictures(made["positive"], [1, 0, 2, 0, 0, 1, 1, 0, 3])
    return made


@pytest.mark.parametrize(
    "kind, model", [("flat", Tiny), ("packed", Packed), ("own collator", Tiny), ("pictures", Pictured)]
)
def test_a_step_runs_on_tensors_without_values(monkeypatch, kind, model):
    monkeypatch.setattr(replay, "_generators", dict)
    made = batch_of(kind)
    ids, limits = made.pop("ids"), ChunkLimits(max_tokens=60, packs=kind == "packed")
    cuts = pickle.loads(pickle.dumps(lay_out(made, limits).without_tensors()))
    assert sum(table.packed is not None for table in cuts.tables) == (kind == "packed")
    with FakeTensorMode() as mode:
        model, loss = model(), InfoNCELoss(learnable_temperature=True, symmetric=True)
        made, ids = without_values(mode, made), without_values(mode, ids)

        def step(chunked):
            cached_step(
                chunked,
                encode=lambda chunk: model(**chunk.features),
                score=lambda embeddings: tuple(loss(embeddings, ids=ids)),
                loss_parameters=loss.parameters(),
            )

        chunked = cuts.of_batch(made)
        assert len(chunked.chunks()) > 2
        step(chunked)
        assert model.tokens.weight.grad is not None and loss.log_inverse_temperature.grad is not None
        if kind in ("own collator", "pictures"):  # a padded batch that brings no cuts is asked for its mask
            with pytest.raises(DataDependentOutputException):
                lay_out(made, limits)


class Reads(TorchFunctionMode):
    """Counts what brings a tensor's values to the host, by the line that asks."""

    NAMES = frozenset(
        "item tolist numpy cpu __bool__ __int__ __float__ __index__ __array__ nonzero masked_select unique allclose"
        .split()
    )  # fmt: skip

    def __init__(self):
        super().__init__()
        self.lines = Counter()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") in self.NAMES:
            frame = sys._getframe(1)
            self.lines[f"{frame.f_code.co_filename}:{frame.f_lineno}"] += 1
        return function(*args, **(kwargs or {}))


class Lines:
    """Counts the lines of the package that this thread executes."""

    def __init__(self):
        self.lines = Counter()

    def __enter__(self):
        sys.settrace(self.begin)

    def __exit__(self, *error):
        sys.settrace(None)

    def begin(self, frame, event, argument):
        return self.one if "hf_dist_ext/" in frame.f_code.co_filename else None

    def one(self, frame, event, argument):
        if event == "line":
            self.lines[frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name] += 1
        return self.one


def counted_in_a_step(
    tmp_path, monkeypatch, count, batch: int, chunk: int, collator=None, data=rows, model=Pictured, **more
) -> tuple[int, Counter]:
    """The number of chunks, and what `count` sees of a whole update in the middle of a training, its loading included
    but for what the worker does."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    args = DistTrainingArguments(
        str(tmp_path), per_device_train_batch_size=batch, gradient_cache_chunk_size=chunk, max_steps=3, use_cpu=True,
        save_strategy="no", report_to=[], disable_tqdm=True, logging_steps=100, no_duplicates_in_batch=False,
        dataloader_num_workers=1, **more,
    )  # fmt: skip
    torch.manual_seed(0)
    trainer = DistTrainer(
        model=model(), args=args,
        loss=InfoNCELoss(learnable_temperature=True), data_collator=collator or collator_of(False),
        train_dataset=datasets.Dataset.from_list(data(3 * batch)),
    )  # fmt: skip
    run, counted = trainer.get_batch_samples, []

    def between(*arguments):
        if counted:
            counted[-1].__exit__(None, None, None)
        counted.append(count())
        counted[-1].__enter__()
        return run(*arguments)

    trainer.get_batch_samples = between
    try:
        trainer.train()
    finally:
        counted[-1].__exit__(None, None, None)
    return trainer.meter.usual_chunks, counted[1].lines


def of_users_own(rows: list[dict]) -> dict:
    return collator_of(False)(rows)


def of_pictures(rows: list[dict]) -> dict:
    batch = of_users_own(rows)
    return batch | {"positive": with_pictures(batch["positive"], [i % 3 for i in range(len(rows))])}


OF_ALL_KINDS = pytest.mark.parametrize(
    "collator", [collator_of(False), of_users_own, of_pictures], ids=["ours", "the user's own", "pictures"]
)


@OF_ALL_KINDS
def test_a_step_reads_as_often_for_many_chunks_as_for_few(tmp_path, monkeypatch, collator):
    sizes = ((6, 6), (16, 1))
    (few, first), (many, second) = (counted_in_a_step(tmp_path, monkeypatch, Reads, *both, collator) for both in sizes)
    assert many > 10 * few and first == second
    assert 1 <= first.total() <= 4, first  # which ids repeat; loss is a number; the guard's numbers


def rows_of_three_lengths(count: int) -> list[dict]:
    """As many chunks of each, however many rows there are."""
    lengths = {"query": 3, "positive": 9, "negative": 5}
    words = WORDS * 2
    return [{name: " ".join(words[i % 9 :][:n]) for name, n in lengths.items()} for i in range(count)]


OF_ALL_ROWS = {function.__name__ for function in (lay_out, order_of_chunks, ChunkedBatch._table_cuts, Table.pack)}


def small_encoder() -> nn.Module:
    return embedding_model(model_config("bert"), projection_dim=8)


@pytest.mark.parametrize("model, packs", [(Pictured, False), (small_encoder, True)], ids=["padded", "packed"])
def test_beside_a_worker_a_step_executes_as_many_lines_for_many_rows_as_for_few(tmp_path, monkeypatch, model, packs):
    monkeypatch.setattr(StepSizes, "_widening", lambda sizes: 2)  # of the pass without a graph
    (chunks, few), (as_many, many) = (
        counted_in_a_step(
            tmp_path, monkeypatch, Lines, batch, batch // 2, data=rows_of_three_lengths, model=model,
            gradient_cache_packing=packs,
        ) for batch in (4, 32)
    )  # fmt: skip
    assert chunks == as_many == 6
    assert few.total() > 1000 and few == many, many - few
    functions = {name for *_, name in few}
    assert ("_numbers" if packs else "_piece") in functions
    assert not functions & OF_ALL_ROWS


def test_ranks_of_accelerators_agree_over_one_group_of_cpus(tmp_path, monkeypatch):
    def target(say) -> str:
        PartialState(cpu=True)
        assert collectives._group_of_cpus() is None  # gloo is one
        monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
        made, make = [], dist.new_group
        monkeypatch.setattr(dist, "new_group", lambda **options: made.append(options) or make(**options))
        set_collective_timeout(77.0)
        everyone = [collectives.exchange([dist.get_rank(), number]) for number in (5, 2**60 + 1)]
        assert everyone == [[[0, 5], [1, 5]], [[0, 2**60 + 1], [1, 2**60 + 1]]]
        for lengths in ((0, 3), (31, 32), (100, 2), (70, 90)):  # the lists of two ranks
            wanted = [list(range(length)) for length in lengths]
            assert collectives.exchange(wanted[dist.get_rank()]) == wanted
        assert made == [{"backend": "gloo", "timeout": timedelta(seconds=77)}]
        monkeypatch.undo()
        collectives.leave_together()
        return "well"

    assert Run("ddp", tmp_path / "run", target).result() == "well"


class Copies(TorchDispatchMode):
    """Copies from the CPU to a device: whether each goes on without waiting."""

    def __init__(self):
        super().__init__()
        self.are_free: list[bool] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default and args[0].device.type == "cpu" != found.device.type:
            self.are_free.append(bool(kwargs.get("non_blocking")))
        return found


@pytest.mark.parametrize("kind", ["flat", "packed", "own collator"])
def test_cuts_go_to_a_device_without_waiting_in_a_few_copies_for_all_chunks(kind):
    made = batch_of(kind)
    del made["ids"]
    cuts = lay_out(made, ChunkLimits(max_tokens=30, packs=kind == "packed")).without_tensors()
    there = {
        name: {key: one.to("meta") if isinstance(one, torch.Tensor) else one for key, one in features.items()}
        for name, features in made.items()
    }
    with Copies() as copies:
        chunks = cuts.of_batch(there).chunks()
        found = [value for chunk in chunks for value in chunk.features.values() if isinstance(value, torch.Tensor)]
    assert len(chunks) > 4 and {value.device.type for value in found} == {"meta"}
    assert copies.are_free == [True]


def test_what_is_said_of_an_update_goes_to_a_device_without_waiting():
    """Of a CUDA device's tensors without values, which may be where there is none."""
    health = Mock(guard=None, stop=None, _loss_of_update=None, inputs=[], _replays=[], _allowed=0.0)
    health.bad_rows.of_rank = lambda: 2
    with FakeTensorMode(), Copies() as copies:
        again = ReplayError(torch.empty(5, device="cuda:0"), ["query"] * 5)
        loss = torch.empty((), device="cuda:0")
        assert Health.after_backward(health, loss, {}, True, again, 1e-6) is loss
    assert copies.are_free == [True] and health._answers().device == loss.device


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@OF_ALL_KINDS
def test_nothing_waits_for_a_gpu_between_a_batch_and_its_gradients(tmp_path, monkeypatch, collator):
    """The first steps may: memory is tried out, kernels are chosen."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    args = DistTrainingArguments(
        str(tmp_path), per_device_train_batch_size=16, gradient_cache_chunk_size=4, max_steps=6, logging_steps=100,
        save_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = DistTrainer(
        Pictured(), args, loss=InfoNCELoss(learnable_temperature=True), data_collator=collator,
        train_dataset=datasets.Dataset.from_list(rows(64)),
    )  # fmt: skip
    run, steps = trainer.step.train, []

    def watched(*arguments):
        steps.append(trainer.state.global_step)
        torch.cuda.set_sync_debug_mode("error" if len(steps) > 2 else "default")
        try:
            return run(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    trainer.step.train = watched
    before = trainer.model.tokens.weight.detach().clone()
    trainer.train()
    assert len(steps) == 6 and not torch.equal(before, trainer.model.tokens.weight)

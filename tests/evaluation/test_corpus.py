"""A corpus that a run is judged by: the figures are those of sentence-transformers on the same data, whatever the
processes, the chunks and the batches."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from PIL import Image
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from torch.distributed.tensor import distribute_tensor
from transformers import TrainerCallback

from hf_dist_ext.data import read_evaluations
from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.errors import UsageError
from hf_dist_ext.evaluation.evaluators import each_of
from hf_dist_ext.evaluation.from_files import evaluators_of
from hf_dist_ext.models import from_run
from hf_dist_ext.strategies import choose, collectives
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.health import LeaveEvaluation
from hf_dist_ext.training.trainer import DistTrainer
from tests.distributed.forked import Run
from tests.retrieval_data import PROMPTS, corpus, save_model, texts, write_beir, write_pictures

KS = dict(accuracy_at_k=[1, 5], precision_recall_at_k=[3, 10], mrr_at_k=[3, 10], ndcg_at_k=[5, 10], map_at_k=[7, 100])


def trainer(folder: Path, evaluations: list[dict], model: Path, callbacks=(), **more) -> DistTrainer:
    args = DistTrainingArguments(
        output_dir=str(folder), report_to=[], disable_tqdm=True, use_cpu=True, per_device_train_batch_size=4,
        prompts=PROMPTS,
        **{"per_device_eval_batch_size": 8, "gradient_cache_chunk_size": 3, "seed": 3} | more,
    )  # fmt: skip
    pairs = [{"query": a, "positive": b} for a, b in zip(texts(16, 5), texts(16, 6), strict=True)]
    ways = {"in_stages": choose.in_stages(args), "distributed_config": choose.launched_split(args)}
    similarity = model.name if model.name in ("cosine", "dot") else "cosine"
    model = load(model, **ways)
    given = read_evaluations(evaluations), model, list(PROMPTS), PROMPTS
    return DistTrainer(
        model, args, loss=InfoNCELoss(0.05, normalize=similarity == "cosine"), train_dataset=Dataset.from_list(pairs),
        evaluator=evaluators_of(*given, batch_size=args.per_device_eval_batch_size, similarity=similarity),
        callbacks=list(callbacks),
    )  # fmt: skip


def load(folder: Path, **ways) -> SentenceTransformer:
    is_cut = any(way is not None for way in ways.values())
    return from_run.build(folder, **ways) if is_cut else SentenceTransformer(str(folder), device="cpu")


def figures(evaluation: dict, name: str) -> dict[str, float]:
    """Of one evaluation, without its name."""
    prefix = f"eval_{name}_"
    return {key.removeprefix(prefix): value for key, value in evaluation.items() if key.startswith(prefix)}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with models and a corpus."""
    folder = tmp_path_factory.mktemp("evaluations")
    save_model(folder / "cosine")
    save_model(folder / "dot", normalize=False)
    save_model(folder / "deep", num_hidden_layers=3)
    save_model(folder / "decoder", "qwen3", num_attention_heads=2, num_key_value_heads=2)
    write_beir(folder / "corpus", *corpus())
    return folder


# ---- a corpus ----


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_retrieval_equals_that_of_sentence_transformers(similarity, made, tmp_path):
    queries, documents, right = corpus()
    options = KS | {"name": "c", "path": str(made / "corpus"), "corpus_chunk_size": 64}
    of = trainer(tmp_path, [{"type": "retrieval", **options}], made / similarity)
    found = figures(of.evaluate(), "c")
    evaluator = InformationRetrievalEvaluator(
        queries, documents, {query: set(of_query) for query, of_query in right.items()}, write_csv=False, **KS
    )
    model = SentenceTransformer(str(made / similarity), device="cpu")
    model.similarity_fn_name, model.prompts = similarity, {"query": PROMPTS["query"], "document": PROMPTS["positive"]}
    theirs = evaluator(model)
    assert found.keys() == theirs.keys() and len(found) == 12
    assert 0.02 < found[f"{similarity}_ndcg@10"] < 0.98 and len(set(found.values())) > 8
    assert found == pytest.approx(theirs, abs=1e-9)
    (part,) = each_of(of.evaluator)
    assert sorted(part.figure_names) == sorted(f"c_{name}" for name in found)


def processes(mode: str, folder: Path, evaluations: list[dict], model: Path, **more) -> tuple[int, dict]:
    """Of a run of one step that evaluates before it."""

    def run(say) -> str:
        torch.set_num_threads(1)
        of = trainer(folder / "run", evaluations, model, max_steps=1, eval_on_start=True, save_strategy="no", **more)
        of.train()
        return json.dumps([collectives.world_size(), of.state.log_history[0]])

    return tuple(json.loads(Run(mode, folder / "log", run).result()))


PIPELINE = {"pipeline_parallel_size": 2}
SLOW = [
    ("ddp", "cosine", {}), ("zero3", "cosine", {}), ("zero2", "cosine", {}), ("hsdp-sharded", "cosine", {}),
    ("multi_gpu_tp@2", "decoder", {}), ("multi_gpu_pp@3", "deep", {"pipeline_parallel_size": 3}),
    ("multi_gpu_pp@4", "cosine", PIPELINE), ("fsdp-full-3", "cosine", {"gradient_cache_chunk_size": None}),
]  # fmt: skip


@pytest.mark.parametrize("mode, model, more", [
    ("ddp-3", "cosine", {}), ("fsdp-full", "cosine", {}), ("multi_gpu_pp@2", "cosine", PIPELINE),
    *[pytest.param(*case, marks=pytest.mark.slow) for case in SLOW],
])  # fmt: skip
def test_figures_are_those_of_one_process(mode, model, more, made, tmp_path):
    """101 documents leave uneven shares in chunks of 40; batches are such that a process has none left while another
    one still encodes."""
    evaluations = [
        {"type": "retrieval", "path": str(made / "corpus"), "name": "c", "corpus_chunk_size": 40},
        {"type": "retrieval", "path": str(made / "corpus"), "name": "d", "truncate_dim": 5},
    ]
    alone = trainer(tmp_path / "alone", evaluations, made / model).evaluate()
    size = 13 if mode.endswith("3") else 10
    number, found = processes(mode, tmp_path, evaluations, made / model, per_device_eval_batch_size=size, **more)
    assert number == (int(mode[-1]) if mode[-2:] in ("-3", "@3", "@4") else 4 if "hsdp" in mode else 2)
    for name in ("c", "d"):
        expected = figures(alone, name)
        assert len(expected) == 15 and len(set(expected.values())) > 10
        assert figures(found, name) == pytest.approx(expected, abs=1e-6)


# ---- in a run ----


class Steps(TrainerCallback):
    """The second step has good weights, the others ones that map every text to one point."""

    def __init__(self, good: dict[str, torch.Tensor]):
        self.good = good

    @torch.no_grad()
    def on_step_end(self, args, state, control, model, **others):
        for name, tensor in model.state_dict().items():
            is_good = state.global_step == 2 or "linear" not in name
            whole = self.good[name] if is_good else torch.zeros_like(self.good[name])
            to = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            if to is not tensor:
                whole = distribute_tensor(whole, tensor.device_mesh, tensor.placements).to_local()
            to.copy_(whole)


def best(folder: Path, made: Path) -> dict:
    """A run that evaluates and saves after every step, and stops when two evaluations were no better."""
    good = load(made / "cosine").state_dict()
    more = dict(max_steps=9, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, logging_steps=1)
    more |= dict(load_best_model_at_end=True, metric_for_best_model="c_cosine_ndcg@10", save_total_limit=2)
    evaluations = [{"type": "retrieval", "name": "c", "path": str(made / "corpus")}]
    more |= dict(early_stopping_patience=2, learning_rate=1e-2)
    of = trainer(folder, evaluations, made / "cosine", callbacks=[Steps(good)], **more)
    of.train()
    weights = of.whole_weights()
    return {
        "stopped": of.state.global_step,
        "best": of.state.best_global_step,
        "figures": [line["eval_c_cosine_ndcg@10"] for line in of.state.log_history if "eval_c_cosine_ndcg@10" in line],
        "is_loaded": all(torch.equal(weights[name], good[name]) for name in good) if weights else None,
        "after": of.evaluate()["eval_c_cosine_ndcg@10"],
    }


@pytest.mark.parametrize("mode", ["single", *[pytest.param(m, marks=pytest.mark.slow) for m in ("fsdp-full", "ddp")]])
def test_the_best_weights_by_a_figure_are_those_of_the_end(mode, made, tmp_path):
    found = json.loads(Run(mode, tmp_path / "log", lambda say: json.dumps(best(tmp_path / "run", made))).result())
    assert found["best"] == 2 and found["stopped"] == 4 and len(found["figures"]) == 4
    assert found["figures"][1] > 0.2 > found["figures"][2] == found["figures"][3]
    assert found["is_loaded"] and found["after"] == pytest.approx(found["figures"][1], abs=1e-9)


def test_a_run_that_is_asked_to_stop_leaves_an_evaluation(made, tmp_path):
    evaluations, asked = [{"type": "retrieval", "path": str(made / "corpus")}], []
    of = trainer(tmp_path, evaluations, made / "cosine", max_steps=3, eval_on_start=True, preemptible=True)

    def stop(*arguments):
        asked.append(arguments)
        if len(asked) == 3:
            raise LeaveEvaluation

    of.health.on_prediction_step = stop
    of.train()
    assert len(asked) == 3 and of.state.global_step == 0


@pytest.mark.parametrize("options, words", [
    ({"metric_for_best_model": "c_cosine_ndcg@11"}, "ndcg@11. is no figure of this run. Closest: c_cosine_ndcg@10"),
    ({"load_best_model_at_end": True, "eval_strategy": "steps"}, 'metric_for_best_model="loss" is no figure'),
])  # fmt: skip
def test_a_best_metric_that_nobody_gives_is_refused(options, words, made, tmp_path):
    with pytest.raises(UsageError, match=words):
        trainer(
            tmp_path, [{"type": "retrieval", "name": "c", "path": str(made / "corpus")}], made / "cosine", **options
        )


def test_a_corpus_of_pictures_is_decoded_part_by_part(tmp_path):
    pictures, taken = [Image.new("RGB", (4, 4), (i, 0, 0)) for i in range(40)], []
    folder = write_pictures(tmp_path / "pictures", pictures, {"q": "red"}, {"q": ["1"]})
    given = read_evaluations([{"type": "retrieval", "path": str(folder), "corpus_chunk_size": 16}])

    class Encoder:
        similarity_fn_name = "cosine"
        model_card_data = SimpleNamespace(set_evaluation_metrics=lambda *figures: None)
        get_embedding_dimension = staticmethod(lambda: 2)
        encode_query = staticmethod(lambda rows, **options: torch.tensor([[0.0, 1.0]] * len(rows)))

        def encode_document(self, rows, **options):
            taken.append(len(rows))
            return torch.tensor([[1.0, float(one.getpixel((0, 0))[0] == 1)] for one in rows])

    (evaluator,) = evaluators_of(given, Encoder())
    assert evaluator(Encoder())["pictures_cosine_accuracy@1"] == 1 and taken == [16, 16, 8]

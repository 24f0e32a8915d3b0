"""`DistTrainer(evaluator=...)` where `SentenceTransformerTrainer(evaluator=...)` stood."""

import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from torch import nn

from hf_dist_ext.data.sentence_collator import ContrastiveCollator
from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.errors import UsageError
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.distributed.forked import Run
from tests.evaluation import evaluators
from tests.evaluation.models import sentence_transformer
from tests.retrieval_data import texts
from tests.tiny_models import tiny_tokenizer


def trainer(folder: Path, model, evaluator=None, **more) -> DistTrainer:
    pairs = [{"query": a, "positive": b} for a, b in zip(texts(32, 5), texts(32, 6), strict=True)]
    eval_dataset = more.pop("eval_dataset", None)
    args = DistTrainingArguments(**{
        "output_dir": str(folder), "report_to": [], "disable_tqdm": True, "use_cpu": True, "seed": 3, "max_steps": 3,
        "per_device_train_batch_size": 4, "gradient_cache_chunk_size": 3, "eval_strategy": "steps", "eval_steps": 1,
        "save_steps": 1, "eval_on_start": True, "learning_rate": 1e-2,
    } | more)  # fmt: skip
    return DistTrainer(
        model, args, loss=InfoNCELoss(0.05), train_dataset=Dataset.from_list(pairs), evaluator=evaluator,
        eval_dataset=eval_dataset, processing_class=tiny_tokenizer(max_length=24),
        data_collator=ContrastiveCollator(tiny_tokenizer(max_length=24), ["query", "positive"]),
    )  # fmt: skip


def sts(name: str = "sts") -> EmbeddingSimilarityEvaluator:
    return EmbeddingSimilarityEvaluator(texts(20, 1), texts(20, 2), [i % 7 for i in range(20)], name=name)


@pytest.mark.parametrize("mode", ["single", "ddp", "fsdp-full", "zero3"])
def test_figures_of_a_run_are_those_of_its_model(mode, tmp_path):
    model = sentence_transformer().float()
    given = [one for one in evaluators.of_dense(model, tmp_path / "data") if one.name not in ("int8", "mining")]
    expected = {f"eval_{name}": value for one in given for name, value in one(model).items()}

    def run(say) -> str:
        torch.set_num_threads(1)
        of = trainer(tmp_path / "run", model, given, save_strategy="no")
        of.train()
        return json.dumps([log for log in of.state.log_history if "eval_sts_pearson_cosine" in log])

    before, *others, after = json.loads(Run(mode, tmp_path / "log", run).result())
    assert len(others) == 2 and len(expected) > 60
    assert {name: before[name] for name in expected} == pytest.approx(expected, abs=1e-4)
    assert sum(after[name] != before[name] for name in expected) > 20
    rows = (tmp_path / "run" / "eval" / "similarity_evaluation_sts_results.csv").read_text().splitlines()
    assert [row.split(",")[1] for row in rows] == ["steps", "0", "1", "2", "3"]


def test_a_run_trains_the_same_with_an_evaluator(tmp_path):
    found = []
    draws = lambda model, *others: model.train().encode("read").sum() + torch.rand(1).item()  # noqa: E731
    for evaluator in (None, [sts(), draws]):
        model = sentence_transformer(hidden_dropout_prob=0.2)
        more = {} if evaluator else {"eval_strategy": "no", "eval_on_start": False}
        trainer(tmp_path / str(len(found)), model, evaluator, **more).train()
        found.append(list(model.parameters()))
    assert all(map(torch.equal, *found))
    assert not all(map(torch.equal, found[0], sentence_transformer().parameters()))


def test_of_several_datasets_the_evaluator_runs_with_the_first(tmp_path):
    rows = Dataset.from_list([{"query": a, "positive": b} for a, b in zip(texts(8, 7), texts(8, 8), strict=True)])
    of = trainer(tmp_path, sentence_transformer(), sts(), eval_dataset={"one": rows, "two": rows}, max_steps=1)
    of.train()
    named = [name for log in of.state.log_history for name in log if name.endswith("spearman_cosine")]
    assert named == ["eval_sts_spearman_cosine"] * 2  # before and after
    assert of.evaluate(rows, metric_key_prefix="test").keys() > {"test_sts_spearman_cosine", "test_loss"}


def test_a_model_without_an_encoder_is_refused(tmp_path):
    class Embeds(nn.Linear):
        def forward(self, input_ids, **others):
            return super().forward(input_ids.float())

    with pytest.raises(UsageError, match="evaluator=EmbeddingSimilarityEvaluator encodes with a SentenceTransformer"):
        trainer(tmp_path, Embeds(4, 4), sts())

"""Hard negatives that some rows, whole batches or whole processes do not have."""

import json

import datasets
import pytest
import torch

from hf_dist_ext.data.collator import ContrastiveCollator
from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.models.embedding_model import EmbeddingModel
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.distributed.forked import Run
from tests.tiny_models import WORDS, model_config, tiny_tokenizer

COLUMNS = ["query", "positive", "negative"]


def rows() -> datasets.Dataset:
    """24 rows: in the first 16 only rows 12 and 14 have negatives, in the last 8 none has."""
    negatives = {12: ["one"], 14: ["two", "three words here"]}
    return datasets.Dataset.from_list(
        [{"query": f"{WORDS[i % 9]} {i}", "positive": f"{WORDS[i % 7]} read {i}",
          "negative": negatives.get(i, [])} for i in range(24)]
    )  # fmt: skip


def train(folder, processes: int, chunk: int | None) -> str:
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    args = DistTrainingArguments(
        output_dir=str(folder), report_to=[], disable_tqdm=True, use_cpu=True, save_strategy="no", logging_steps=1,
        per_device_train_batch_size=16 // processes, num_train_epochs=1, train_sampling_strategy="sequential",
        gradient_cache_chunk_size=chunk,
    )  # fmt: skip
    config = model_config("bert") | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    trainer = DistTrainer(
        EmbeddingModel.from_config(config), args, train_dataset=rows(), processing_class=tokenizer,
        data_collator=ContrastiveCollator(tokenizer, COLUMNS), loss=InfoNCELoss(),
    )  # fmt: skip
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    return json.dumps([(line["loss"], line["grad_norm"]) for line in lines])


@pytest.mark.parametrize("chunk", [3, None])
@pytest.mark.parametrize("mode", ["ddp", "fsdp-full"])
def test_rows_without_negatives_train_as_on_one_process(tmp_path, mode, chunk):
    """Two processes: in step 1 the first one has no negative, in step 2 nobody has."""
    alone = json.loads(Run("single", tmp_path / "one", lambda say: train(tmp_path, 1, 3)).result())
    both = json.loads(Run(mode, tmp_path / "two", lambda say: train(tmp_path, 2, chunk)).result())
    assert len(alone) == 2 and min(norm for _, norm in alone) > 0
    torch.testing.assert_close(torch.tensor(both), torch.tensor(alone), rtol=1e-4, atol=0)

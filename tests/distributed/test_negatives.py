"""Hard negatives that some rows, whole batches or whole processes do not have."""

import json

import datasets
import pytest
import torch
from accelerate import PartialState

from hf_dist_ext.data.sentence_collator import ContrastiveCollator
from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.errors import UsageError
from hf_dist_ext.strategies.collectives import leave_together, rank
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.sizes import with_columns_of_all_ranks
from hf_dist_ext.training.trainer import DistTrainer
from tests.distributed.forked import Run
from tests.tiny_models import WORDS, embedding_model, model_config, tiny_tokenizer

COLUMNS = ["query", "positive", "negative"]


def rows() -> datasets.Dataset:
    """24 rows: in the first 16 only rows 12 and 14 have negatives, in the last 8 none has."""
    negatives = {12: ["one"], 14: ["two", "three words here"]}
    return datasets.Dataset.from_list(
        [{"query": f"{WORDS[i % 9]} {i}", "positive": f"{WORDS[i % 7]} read {i}",
          "negative": negatives.get(i, [])} for i in range(24)]
    )  # fmt: skip


def without_empty(dataset: datasets.Dataset) -> list[dict]:
    """A plain list, whose rows without negatives have no such key."""
    return [{name: value for name, value in row.items() if value} for row in dataset]


def train(folder, processes: int, chunk: int | None, of_list: bool = False) -> str:
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    args = DistTrainingArguments(
        output_dir=str(folder), report_to=[], disable_tqdm=True, use_cpu=True, save_strategy="no", logging_steps=1,
        per_device_train_batch_size=16 // processes, per_device_eval_batch_size=16 // processes, num_train_epochs=1,
        train_sampling_strategy="sequential",
        gradient_cache_chunk_size=chunk,
    )  # fmt: skip
    config = model_config("bert") | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    trainer = DistTrainer(
        model=embedding_model(config), args=args, processing_class=tokenizer,
        train_dataset=without_empty(rows()) if of_list else rows(),
        eval_dataset=without_empty(rows())[:16] if of_list else None,
        data_collator=ContrastiveCollator(tokenizer, COLUMNS), loss=InfoNCELoss(),
    )  # fmt: skip
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    found = [(line["loss"], line["grad_norm"]) for line in lines]
    if of_list:
        found.append((trainer.evaluate()["eval_loss"], 1.0))
    return json.dumps(found)


def test_ranks_complete_their_columns(tmp_path):
    """Their names in words, also more than go at once."""
    many = [f"negative {i} of this row" for i in range(40)]
    batches = [["query", "positive", *many], ["query", "positive", many[3]]]

    def target(say) -> str:
        PartialState(cpu=True)
        rows = {name: {"input_ids": torch.ones(2, 3)} for name in batches[rank()]}
        found = with_columns_of_all_ranks(rows)
        assert list(found) == batches[0]
        assert [len(found[name]["input_ids"]) for name in found] == [2 if name in rows else 0 for name in found]
        with pytest.raises(UsageError, match="The first two, anchor and positive, must be"):
            with_columns_of_all_ranks(rows if rank() else dict(reversed(rows.items())))
        leave_together()
        return "well"

    assert Run("ddp", tmp_path / "run", target).result() == "well"


@pytest.mark.parametrize("chunk, of_list", [(3, False), (3, True), (None, False)])
@pytest.mark.parametrize("mode", ["ddp", "fsdp-full"])
def test_rows_without_negatives_train_as_on_one_process(tmp_path, mode, chunk, of_list):
    """Two processes: in step 1 the first one has no negative, in step 2 nobody has."""
    alone = json.loads(Run("single", tmp_path / "one", lambda say: train(tmp_path, 1, 3, of_list)).result())
    both = json.loads(Run(mode, tmp_path / "two", lambda say: train(tmp_path, 2, chunk, of_list)).result())
    assert len(alone) == 2 + of_list and min(norm for _, norm in alone) > 0
    torch.testing.assert_close(torch.tensor(both), torch.tensor(alone), rtol=1e-4, atol=0)

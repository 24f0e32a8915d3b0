"""Generation while evaluating, on ranks whose answers differ in length, where every forward waits for the others."""

from __future__ import annotations

import json
import signal
from functools import partial
from pathlib import Path

import pytest
import torch

from hf_dist_ext.run import deepspeed_install
from hf_dist_ext.strategies.collectives import rank
from hf_dist_ext.tasks.generation import GeneratingTrainer
from hf_dist_ext.training.arguments import DistTrainingArguments
from tests.distributed.forked import Run, gather_everything, needs_deepspeed
from tests.tiny_vision_language import BlankPictures, collate, row, tiny_llava

LIMIT = 600  # seconds; ends a process that waits for others
NEW_TOKENS = 6


def prompt_of(rows: list[dict]) -> dict[str, torch.Tensor]:
    return {key: value for key, value in collate(rows).items() if key != "labels"}


def eval_batch(rows: list[dict]) -> dict:
    return collate(rows) | {"prompt": prompt_of(rows), "answers": collate(rows)["labels"][:, -NEW_TOKENS:]}


def generated(model, one: dict, **options) -> list[int]:
    prompt = prompt_of([one])
    tokens = model.generate(**prompt, max_new_tokens=NEW_TOKENS, do_sample=False, **options)
    return tokens[0, prompt["input_ids"].shape[1] :].tolist()


def evaluated(say, folder: Path, use_cpu: bool) -> str:
    signal.alarm(LIMIT)
    deepspeed_install.shutil.which = lambda name: None  # over gloo, without compiling communication of its own
    rows, model = [row(True, seed=1), row(False, seed=2)], tiny_llava().eval()  # one for each rank
    with torch.no_grad():
        first, second = (generated(model, one, eos_token_id=[10**6]) for one in rows)
        model.generation_config.eos_token_id = next(token for token in first if token not in second)
        wanted = [generated(model, one) for one in rows]
    seen = []
    args = DistTrainingArguments(
        output_dir=str(folder), per_device_eval_batch_size=1, report_to=[], disable_tqdm=True, use_cpu=use_cpu,
        remove_unused_columns=False, per_device_train_batch_size=1, max_steps=1, learning_rate=0.0, save_strategy="no",
        eval_strategy="steps", eval_steps=1,
    )  # fmt: skip
    trainer = GeneratingTrainer(
        model, args, train_dataset=rows, eval_dataset=rows, data_collator=collate, eval_collator=eval_batch,
        max_new_tokens=NEW_TOKENS, processing_class=BlankPictures(),
        compute_metrics=lambda found: seen.append(found.predictions) or {},
    )  # fmt: skip
    gather_everything(trainer)
    trainer.train()
    found = [[token for token in tokens if token >= 0] for tokens in seen[0].tolist()]
    return json.dumps({"wanted": wanted, "found": found, "rank": rank()})


@pytest.mark.parametrize("mode", ["fsdp-sharded", pytest.param("zero3", marks=needs_deepspeed)])
def test_answers_of_different_length_are_generated_on_all_ranks(mode, tmp_path):
    target = partial(evaluated, folder=tmp_path / "run", use_cpu=mode != "zero3")  # DeepSpeed finds the CPU itself
    done = json.loads(Run(mode, tmp_path / "run", target).result())
    lengths = [len(tokens) for tokens in done["wanted"]]
    assert lengths[0] < lengths[1] == NEW_TOKENS
    assert [tokens[:length] for tokens, length in zip(done["found"], lengths, strict=True)] == done["wanted"]

"""One process of the data-position test: which rows this rank was given, in order."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from hf_dist_ext.strategies.collectives import rank
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.data.test_position import Model, table


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--resume")
    options = parser.parse_args()
    model = Model()
    args = DistTrainingArguments(
        output_dir=options.folder, num_train_epochs=2, per_device_train_batch_size=4,
        save_strategy="steps", save_steps=2, report_to=[], disable_tqdm=True, use_cpu=True, logging_strategy="no",
    )  # fmt: skip
    trainer = DistTrainer(model, args, train_dataset=table(32))
    trainer.train(resume_from_checkpoint=options.resume)
    facts = {"seen": model.seen, "accumulation": args.gradient_accumulation_steps, "step": trainer.state.global_step}
    Path(f"{options.output}_{rank()}.json").write_text(json.dumps(facts))

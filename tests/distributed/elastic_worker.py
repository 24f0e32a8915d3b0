r"""One process of the elastic-restart tests: 2 epochs of 32 rows, 4 rows per process, a checkpoint after each update.

    accelerate launch --config_file configs/accelerate/multi_gpu_ddp.yaml --max_restarts 1 \
        tests/distributed/elastic_worker.py --folder run

`--dies`: who does, once; "machine" is every rank started with it, and its launcher too. Every life of a rank leaves a
file of its own: where it began, which rows each step was given.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path

from transformers import TrainerCallback

from hf_dist_ext.checkpoints import manifest
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.data.test_position import Model, table

DIES_BEFORE_STEP = 4


class Watch(TrainerCallback):
    def __init__(self, folder: Path, dies: str):
        self.folder, self.dies = folder, dies

    def on_train_begin(self, args, state, control, model, **others):
        self.facts = {"began_at": state.global_step, "world_size": args.world_size, "steps": {}}
        self.path = self.folder / f"life_{state.global_step}_{args.process_index}.json"

    def on_step_begin(self, args, state, control, **others):
        death, is_one = self.folder / "death", self.dies == "machine" or self.dies == f"rank{args.process_index}"
        if is_one and state.global_step + 1 == DIES_BEFORE_STEP and not death.exists():
            death.touch()
            if self.dies == "machine":
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    def on_step_end(self, args, state, control, model, **others):
        bare = getattr(model, "module", model)
        self.facts["steps"][state.global_step] = list(bare.seen)
        bare.seen.clear()
        self.path.write_text(json.dumps(self.facts))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--dies", choices=("rank1", "machine", "nobody"), default="rank1")
    options = parser.parse_args()
    output_dir = options.folder / "out"
    args = DistTrainingArguments(
        output_dir=str(output_dir), num_train_epochs=2, per_device_train_batch_size=4, save_strategy="steps",
        save_steps=1, report_to=[], disable_tqdm=True, use_cpu=True, logging_strategy="no", ddp_timeout=300,
    )  # fmt: skip
    watch = Watch(options.folder, options.dies)
    trainer = DistTrainer(Model(), args, train_dataset=table(32), callbacks=[watch])
    trainer.train(resume_from_checkpoint=bool(manifest.checkpoints_in(output_dir)))
    (options.folder / f"end_{args.process_index}.json").write_text(json.dumps(trainer.state.global_step))
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()

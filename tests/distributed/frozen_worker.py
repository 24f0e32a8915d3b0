r"""One process of the frozen-training tests: a tiny LLaVA, only its projector trains, half the rows have no image.

    accelerate launch --config_file configs/accelerate/multi_gpu_ddp.yaml tests/distributed/frozen_worker.py \
        --output found.json
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from transformers import TrainerCallback

from hf_dist_ext import launched
from hf_dist_ext.strategies.collectives import rank
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.launching import leave_together
from tests.tiny_models import CHECKPOINTING
from tests.tiny_vision_language import BlankPictures, collate, row, tiny_llava

STEPS, GLOBAL_BATCH = 3, 4


class Observe(TrainerCallback):
    """Bytes that DDP reduces per step, and what FSDP shards."""

    def __init__(self) -> None:
        self.trainer: DistTrainer | None = None
        self.reduced_bytes = 0
        self.dtypes: dict[str, str] = {}

    def on_step_begin(self, args, state, control, **more) -> None:
        wrapped = self.trainer.model_wrapped
        if state.global_step == 0 and hasattr(wrapped, "register_comm_hook"):
            wrapped.register_comm_hook(None, self._reduce)
        self.dtypes = {n: str(p.dtype) for n, p in self.trainer.model.named_parameters()}

    def _reduce(self, _, bucket):
        self.reduced_bytes += bucket.buffer().nbytes
        work = torch.distributed.all_reduce(bucket.buffer(), async_op=True).get_future()
        return work.then(lambda future: future.value()[0] / torch.distributed.get_world_size())


def whole(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        found[name] = full.detach().float().cpu().clone()
    return found


def train(folder: Path, name: str, **options) -> dict:
    model = tiny_llava()
    if options.get("bf16"):
        model = model.bfloat16()
    before = whole(model)
    # consecutive pairs go to one rank: (image, image), (text, text), ...
    rows = [row(has_image=i // 2 % 2 == 0, seed=i) for i in range(STEPS * GLOBAL_BATCH)]
    args = DistTrainingArguments(
        output_dir=str(folder / name), per_device_train_batch_size=GLOBAL_BATCH // launched.processes(),
        max_steps=STEPS, logging_steps=1, save_strategy="no", learning_rate=1e-2, lr_scheduler_type="constant",
        report_to=[], disable_tqdm=True, use_cpu=True, remove_unused_columns=False, dataloader_pin_memory=False,
        train_sampling_strategy="sequential", trainable_modules=["projector"], max_grad_norm=0.0, **options,
    )  # fmt: skip
    observe = Observe()
    trainer = DistTrainer(
        model, args, train_dataset=rows, data_collator=collate, processing_class=BlankPictures(), callbacks=[observe]
    )
    observe.trainer = trainer
    trainer.train()
    after = whole(trainer.model)
    trained = {n for n in after if "multi_modal_projector" in n}
    parameters = dict(trainer.model.named_parameters())
    return {
        "moved": max((after[n] - before[n]).abs().max().item() for n in trained),
        "frozen_equal": all(torch.equal(after[n], before[n]) for n in after if n not in trained),
        "projector": torch.cat([after[n].flatten() for n in sorted(trained)]).tolist(),
        "losses": [line["loss"] for line in trainer.state.log_history if "loss" in line],
        "reduced_bytes_per_step": observe.reduced_bytes / STEPS,
        "trainable_bytes": sum(4 * before[n].numel() for n in trained),
        "trained_dtypes": sorted({observe.dtypes[n] for n in trained}),
        "frozen_dtypes": sorted({dtype for n, dtype in observe.dtypes.items() if n not in trained}),
        "sharded_frozen": [n for n, p in parameters.items() if n not in trained and hasattr(p, "device_mesh")],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    features = {"frozen_feature_cache": str(options.folder / "features")}
    cases = {"plain": {}, "bf16": {"bf16": True}, "features": features}
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        cases["sharded"] = {"frozen_parts_fsdp": "shard"}
        cases["features, sharded"] = features | cases["sharded"]
    else:
        cases["checkpointing"] = {CHECKPOINTING: True}
    found = {name: train(options.folder, name, **more) for name, more in cases.items()}
    if rank() == 0:
        options.output.write_text(json.dumps({"world_size": launched.processes(), **found}))


if __name__ == "__main__":
    main()
    leave_together()

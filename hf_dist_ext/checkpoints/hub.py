"""What a push in the middle of a run takes to the hub.

Trainer copies the files whose names it knows from the checkpoint to output_dir, and pushes that folder. It knows no
pooling, dense and tower folders and no files of a part that was trained, so that the hub would serve another model.
Here every file of the checkpoint is copied that belongs to the model, and not only to going on with the run.
"""

from __future__ import annotations

import shutil
from fnmatch import fnmatch
from pathlib import Path

from transformers.utils import logging

from hf_dist_ext.checkpoints import manifest
from hf_dist_ext.checkpoints.trainable import FROZEN, WEIGHTS

logger = logging.get_logger(__name__)

TO_GO_ON = (  # files and folders at the top of a checkpoint
    "*optimizer*", "scheduler.pt", "scaler.pt", "rng_state*", "trainer_state.json", "loss.safetensors",
    "gradient_cache.json", "stream_position.json", "ddp_comm_hook_*", "global_step*", "latest", "zero_to_fp32.py",
    "pytorch_model_fsdp*", "trainable",
)  # fmt: skip


def copy_model(checkpoint: Path, output_dir: Path) -> None:
    """The model of a complete checkpoint, as `save_model` would write it to output_dir."""
    names = [
        name
        for name in manifest.files_in(checkpoint)
        if not any(fnmatch(name.partition("/")[0], pattern) for pattern in TO_GO_ON)
    ]
    if not any(name.endswith((".safetensors", ".bin")) and "training_args" not in name for name in names):
        logger.warning_once(
            "Checkpoints of this run hold their weights in shards, so only the push at its end holds weights."
        )
    for name in names:
        (output_dir / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(checkpoint / name, output_dir / name)
    if WEIGHTS in names:  # of a part that was trained: hf-dist merge wants to know of what
        known = manifest.read(checkpoint) or {}
        facts = {key: value for key, value in known.items() if key not in ("format", "saved_at", "files", "checksum")}
        manifest.commit(output_dir, manifest.record(output_dir, [WEIGHTS, FROZEN]), facts)

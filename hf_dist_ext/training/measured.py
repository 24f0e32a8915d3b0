"""What a run took: `measured.json` in the output folder, beside `plan.json`, for `hf-dist plan --compare RUN_DIR`.

The seconds are those of training/scaling.py: from the end of the first update on, evaluations and saves left out. The
memory is that of the process that needs most: on an accelerator what torch allocated and reserved at most, on a CPU
the most that a process held, libraries and the interpreter included.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.utils import logging

from hf_dist_ext.strategies import consensus
from hf_dist_ext.training.scaling import Scaling

logger = logging.get_logger(__name__)

NAME = "measured.json"


class MeasurementCallback(TrainerCallback):
    """Comes after `scaling` among the callbacks; a run of one update, or of none, writes nothing."""

    def __init__(self, scaling: Scaling):
        self.scaling = scaling

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        seconds = self.scaling.seconds_per_batch
        if seconds is None:
            return
        of_ranks = consensus.together(lambda: most_memory(args.device))
        if not state.is_world_process_zero:
            return
        content = {
            "seconds_per_step": round(seconds * args.gradient_accumulation_steps, 6),
            "processes": args.world_size,
            "device": device_name(args.device),
            "memory": {name: max(of_rank[name] for of_rank in of_ranks) for name in of_ranks[0]},
        }
        folder = Path(args.output_dir)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / NAME).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        except OSError as error:  # the model is still to be saved
            logger.warning(f"{NAME} is not written, and hf-dist plan --compare will lack it: {error}")


def device_name(device: torch.device) -> str:
    """What the driver calls it; "cpu" for the CPU."""
    if device.type == "cpu":
        return "cpu"
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if name is None else name(device)


def most_memory(device: torch.device) -> dict[str, int]:
    """Bytes, by what holds them."""
    module = None if device.type == "cpu" else torch.get_device_module(device)
    if not hasattr(module, "max_memory_allocated"):
        unit = 1 if sys.platform == "darwin" else 1024
        return {"process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    return {"allocated": module.max_memory_allocated(device), "reserved": module.max_memory_reserved(device)}

"""Which checkpoint a run continues from, and whether it holds all that continuing needs.

(1) the newest complete one, or the one that was named: sizes by every rank, hashes shared by the ranks
(2) strict: optimizer, schedule, scaler, this rank's random state and the loss's parameters must be there

Trainer goes on without most of (2) and says nothing; here it is an error on every rank. Without DistTrainingArguments
everything is Trainer's.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from transformers import set_seed
from transformers.utils import logging

from . import manifest
from .checkpointing import LOSS_OPTIMIZER, LOSS_WEIGHTS
from .errors import UsageError
from .run_folder import another, checkpoint_to_resume, missing_from_checkpoint

if TYPE_CHECKING:
    from .trainer import DistTrainer

logger = logging.get_logger(__name__)

# ---- (1) ----


def choose(trainer: DistTrainer, asked: bool | str | None) -> str | None:
    """What `train(resume_from_checkpoint=...)` means: the path of a complete checkpoint, or None."""
    output_dir, passed_over = Path(trainer.args.output_dir), {}
    while True:
        folder = checkpoint_to_resume(asked, output_dir, passed_over)
        if folder is None:
            return None
        broken = _altered(trainer, folder)
        if not broken:
            break
        if asked is not True:
            hint = another(folder, manifest.checkpoints_in(output_dir))
            raise UsageError(f"{folder} is incomplete: {', '.join(broken)}. {hint}")
        passed_over[folder] = ", ".join(broken)
    if trainer.is_world_process_zero():
        for path, reason in passed_over.items():
            logger.warning(f"{path} is passed over: {reason}.")
        if manifest.read(folder) is None:
            logger.warning(
                f"{folder} has no {manifest.MANIFEST} (the stock Trainer wrote it, or its save did not end): what is "
                "inside its files can not be checked."
            )
        logger.info(f"resuming from {folder}")
    _check_complete(trainer, folder)
    return str(folder)


def _altered(trainer: DistTrainer, folder: Path) -> list[str]:
    """What the hashes say, found by all ranks together; empty without a manifest."""
    args, content = trainer.args, manifest.read(folder)
    if content is None or not args.verify_checkpoint_hashes:
        return []
    share = slice(args.process_index, None, args.world_size)
    return _everyones(trainer, manifest.problems(folder, content, share=share))


def _everyones(trainer: DistTrainer, words: list[str]) -> list[str]:
    """The words of all ranks, each once, in order: what makes one rank stop must stop all."""
    if trainer.args.world_size == 1:
        return words
    shares: list[Any] = [None] * trainer.args.world_size
    dist.all_gather_object(shares, words)
    return list(dict.fromkeys(word for share in shares for word in share))


# ---- (2) ----


def _check_complete(trainer: DistTrainer, folder: Path) -> None:
    missing = missing_from_checkpoint(folder)
    needed = []
    if getattr(trainer.accelerator, "scaler", None) is not None:
        needed.append("scaler.pt")
    if trainer.loss is not None and trainer._loss_parameters():
        needed += [LOSS_WEIGHTS, LOSS_OPTIMIZER]
    if (world_size := saved_world_size(folder)) == trainer.args.world_size:
        needed.append(f"rng_state_{trainer.args.process_index}.pth" if world_size > 1 else "rng_state.pth")
    missing += [f"{name} is missing" for name in needed if not (folder / name).is_file()]
    if missing := _everyones(trainer, missing):
        raise UsageError(
            f"{folder} can not be continued: {', '.join(missing)}. With resume_weights_only its weights are taken and "
            "everything else starts anew."
        )


def saved_world_size(folder: Path) -> int:
    """Of how many processes a checkpoint is."""
    content = manifest.read(folder)
    return content["world_size"] if content else max(len(list(folder.glob("rng_state_*.pth"))), 1)


def draws_anew(trainer: DistTrainer, folder: str) -> bool:
    """Under another number of processes no random state fits; each rank then seeds with the run's seed, step and
    rank."""
    args = trainer.args
    if (before := saved_world_size(Path(folder))) == args.world_size:
        return False
    if trainer.is_world_process_zero():
        logger.warning(f"{folder} is of {before} processes, this run of {args.world_size}: random states start anew.")
    set_seed(hash((args.seed, trainer.state.global_step, args.process_index)) % 2**32)
    return True

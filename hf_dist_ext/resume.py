"""Which checkpoint a run continues from, and whether it holds all that continuing needs.

(1) the newest complete one, or the one that was named: sizes by every rank, hashes shared by the ranks
(2) strict: optimizer, schedule, scaler, this rank's random state and the loss's parameters must be there
(3) weights only, when that is asked for: from any form a checkpoint has, before anything is wrapped
(4) a run that starts afresh among checkpoints leaves them aside, for itself and for those that continue it

Trainer goes on without most of (2) and says nothing; here it is an error on every rank. Without DistTrainingArguments
everything is Trainer's.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from transformers import Trainer, set_seed
from transformers.utils import logging

from . import deepspeed_checkpoint, distributed, manifest, tensor_parallel, trainable_checkpoint, trusted
from .checkpointing import LOSS_OPTIMIZER, LOSS_WEIGHTS, load_loss
from .errors import UsageError
from .modeling import check_weights, load_weights
from .read_back import weights_in_memory_names
from .run_folder import another, checkpoint_to_resume, missing_from_checkpoint

if TYPE_CHECKING:
    from .trainer import DistTrainer

logger = logging.get_logger(__name__)

SHARDED_BY_FSDP = "pytorch_model_fsdp_0"  # what accelerate calls it

# ---- (1) ----


def choose(trainer: DistTrainer, asked: bool | str | None) -> str | None:
    """What `train(resume_from_checkpoint=...)` means: the path of a complete checkpoint, or None."""
    args, output_dir, passed_over = trainer.args, Path(trainer.args.output_dir), {}
    if args.resume_weights_only and asked in (None, False):
        raise UsageError("resume_weights_only=true says how to resume; give resume_from_checkpoint too.")
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
    trusted.check_metadata(folder, args.trust_checkpoint)
    if trainer.is_world_process_zero():
        for path, reason in passed_over.items():
            logger.warning(f"{path} is passed over: {reason}.")
        if manifest.read(folder) is None:
            logger.warning(
                f"{folder} has no {manifest.MANIFEST} (the stock Trainer wrote it, or its save did not end): what is "
                "inside its files can not be checked."
            )
        what = ": weights only, everything else starts anew" if args.resume_weights_only else ""
        logger.info(f"resuming from {folder}{what}")
    if args.resume_weights_only:
        load_weights_only(trainer, folder)
        return None
    _check_complete(trainer, folder)
    _check_split(trainer, folder)
    if trainer.is_deepspeed_enabled:
        deepspeed_checkpoint.check_processes(trainer, folder)
    if trainer._saves_trainable_only:
        trainable_checkpoint.check_frozen(folder, trainer._frozen_digests)
    elif trainable_checkpoint.has_trainable_weights(folder):
        raise UsageError(
            f"{folder} holds only what was trained, but nothing is frozen now. Give the trainable_modules or "
            "frozen_modules it was saved with, or resume_weights_only=true."
        )
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
    world_size = saved_world_size(folder)
    if (world_size, saved_tensor_parallel_size(folder)) == (trainer.args.world_size, distributed.ranks_per_rows()):
        needed.append(f"rng_state_{trainer.args.process_index}.pth" if world_size > 1 else "rng_state.pth")
    missing += [f"{name} is missing" for name in needed if not (folder / name).is_file()]
    if missing := _everyones(trainer, missing):
        raise UsageError(
            f"{folder} can not be continued: {', '.join(missing)}. With resume_weights_only its weights are taken and "
            "everything else starts anew."
        )


def _check_split(trainer: DistTrainer, folder: Path) -> None:
    """The optimizer's groups follow how a model is split: one for every mesh its parameters lie on."""
    content = manifest.read(folder) or {}
    before = content["sharding"] if content.get("tensor_parallel_size", 1) > 1 else ""
    now = "" if trainer._split is None else trainer._split.describe()
    if [bool(before), "fsdp" in before] != [bool(now), "fsdp" in now]:
        raise UsageError(
            f"{folder} was saved {_under(before)}, this run is {_under(now)}: the optimizer's groups are others. With "
            "resume_weights_only its weights are taken and everything else starts anew."
        )


def _under(sharding: str) -> str:
    return f"under tensor parallelism ({sharding})" if sharding else "without tensor parallelism"


def saved_world_size(folder: Path) -> int:
    """Of how many processes a checkpoint is."""
    content = manifest.read(folder)
    return content["world_size"] if content else max(len(list(folder.glob("rng_state_*.pth"))), 1)


def saved_tensor_parallel_size(folder: Path) -> int:
    return (manifest.read(folder) or {}).get("tensor_parallel_size", 1)


def draws_anew(trainer: DistTrainer, folder: str) -> bool:
    """Under another number of processes no random state fits; each rank then seeds with the run's seed, step and
    rank (under tensor parallelism its group's)."""
    args, share = trainer.args, distributed.ranks_per_rows()
    before, share_before = saved_world_size(Path(folder)), saved_tensor_parallel_size(Path(folder))
    if (before, share_before) == (args.world_size, share):
        return False
    if trainer.is_world_process_zero():
        groups = "" if share == share_before else f" (in groups of {share_before} and of {share} with the same rows)"
        logger.warning(
            f"{folder} is of {before} processes, this run of {args.world_size}{groups}: random states start anew."
        )
    set_seed(hash((args.seed, trainer.state.global_step, distributed.data_parallel_rank())) % 2**32)
    return True


# ---- (3) ----


def load_weights_only(trainer: DistTrainer, folder: Path) -> None:
    """The checkpoint's weights into the bare model; UsageError when they do not fit it."""
    model, trust = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False), trainer._trusts
    if trainable_checkpoint.has_trainable_weights(folder):
        stored = trainable_checkpoint.stored_weights(folder, trust)
        names = frozenset(stored.shapes)
        trainable_checkpoint.check_frozen(
            folder, trainable_checkpoint.frozen_digests(model, names & _parameters(model))
        )
        trainable_checkpoint.load_weights(model, None, folder, trust)
    elif trainer._split is not None:
        tensor_parallel.load_weights(model, folder)
    elif (weights := weights_in_memory_names(model, folder)) is not None:
        load_weights(model, weights, source=str(folder))
    elif hasattr(model, "peft_config") and list(folder.glob("**/adapter_model.*")):
        Trainer._load_from_checkpoint(trainer, str(folder), model)
    else:
        _load_whole(model, _whole_weights(model, folder, trust), folder)
    load_loss(trainer, str(folder))


def _parameters(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters()}


def _whole_weights(model: nn.Module, folder: Path, trust: bool) -> dict[str, torch.Tensor]:
    if (folder / SHARDED_BY_FSDP).is_dir():
        state = {"model": {name: value.clone() for name, value in model.state_dict().items()}}
        trusted.load(state, folder / SHARDED_BY_FSDP, trust)
        return state["model"]
    weights: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        weights |= load_file(path)
    for path in [] if weights else sorted(folder.glob("pytorch_model*.bin")):
        weights |= torch.load(path, map_location="cpu", weights_only=True)
    if not weights:
        raise UsageError(f"{folder} holds no weights that are known here.")
    return weights


def _load_whole(model: nn.Module, weights: dict[str, torch.Tensor], folder: Path) -> None:
    tied = set(getattr(model, "all_tied_weights_keys", None) or ()) | set(
        getattr(model, "_keys_to_ignore_on_save", None) or ()
    )
    own = model.state_dict()
    whole = {name: own[name] for name in tied & own.keys()} | weights
    check_weights(model, whole, source=str(folder))
    model.load_state_dict(weights, strict=False)
    if hasattr(model, "tie_weights"):
        model.tie_weights()


# ---- (4) ----


def leave_others_aside(trainer: DistTrainer, folder: str | None) -> None:
    """What else lies in output_dir when a run begins there; `folder` is what it resumes, None when it starts afresh.

    Without this, a run that is stopped before its first save would be continued from the run that it replaced.
    """
    args, output_dir = trainer.args, Path(trainer.args.output_dir)
    if not args.should_save or args.resume_weights_only or trainer.hp_search_backend is not None:
        return  # weights only: the next attempt shall take them from there too
    is_here = folder is not None and Path(folder).resolve().parent == output_dir.resolve()
    if is_here and not manifest.is_of_earlier_run(folder):
        return
    if others := manifest.set_aside(output_dir, but=folder):
        logger.warning(
            f"{output_dir} holds {', '.join(path.name for path in others)} of an earlier run. This one does not "
            f"resume or delete them ({manifest.EARLIER} lists them); a save of the same step takes their place."
        )

"""A save as one act: write in place, commit, only then rotate, only then push.

(1) before: is there room on the disk? Then the folder is emptied, should an earlier attempt have left it torn, and
    marked as unfinished
(2) Trainer writes its files, every rank its own; what it would delete or push meanwhile is put off
(3) all ranks are done: they share the reading, hashing and fsync of the files; rank 0 must see what every rank has
    written, and writes the manifest
(4) older complete checkpoints beyond the limit are deleted; the checkpoint is pushed

An error of one rank in any of them ends all ranks with it (strategies/agreed.py).

It holds for DistTrainer with DistTrainingArguments; with TrainingArguments a save is the stock one.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import platform
import re
import shutil
import socket
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.utils import logging

from hf_dist_ext.checkpoints import async_save, manifest, trainable
from hf_dist_ext.errors import RunError, UsageError
from hf_dist_ext.run import lease
from hf_dist_ext.strategies import agreed, collectives
from hf_dist_ext.strategies.tensors import num_elements

if TYPE_CHECKING:
    from hf_dist_ext.training.trainer import DistTrainer

logger = logging.get_logger(__name__)

# Files that every rank writes for itself.
OF_RANK = re.compile(
    r"(?:.*/)?(?:(?:rng_state|ddp_comm_hook)_(\d+)\.pth?|__(\d+)_\d+\.distcp"
    r"|(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_\d+_(?:model|optim)_states\.pt)"
)
SPARE = 1.1  # of the last checkpoint's size must be free: its trainer_state grows, and logs are written too
PACKAGES = ("torch", "transformers", "accelerate", "peft", "safetensors", "hf_dist_ext")


@contextlib.contextmanager
def committed(trainer: DistTrainer, trial: Any) -> Iterator[None]:
    """Around Trainer's own `_save_checkpoint`. With `save_async`, (3) and (4) happen while training goes on."""
    async_save.collect(trainer, wait=True)
    args = trainer.args
    output_dir = Path(trainer._get_output_dir(trial=trial))
    folder = output_dir / f"checkpoint-{trainer.state.global_step}"
    agreed.together(lease.check)
    needed = check_free_space(trainer, output_dir, folder)  # (1)
    is_async = args.save_async and async_save.fits(trainer, needed)
    with _full_disk_in_words(output_dir, folder):
        generation = agreed.together(lambda: _begin(args, output_dir, folder))[0]
    with contextlib.ExitStack() as entered:  # (2)
        pushes = entered.enter_context(put_off(trainer))
        entered.enter_context(_full_disk_in_words(output_dir, folder))
        entered.enter_context(agreed.ends_together(f"writing {folder.name}", args.ddp_timeout))
        writes = entered.enter_context(async_save.staged(folder)) if is_async else []
        yield
    run = {name: (trainer._run or manifest.new_run())[name] for name in ("run_id", "parent")}
    content = facts(trainer) | run | {"generation": generation} if args.should_save else {}
    best, limit = trainer.state.best_model_checkpoint, args.save_total_limit

    def end(group: Any = None) -> None:
        with _full_disk_in_words(output_dir, folder):
            together = functools.partial(agreed.together, group=group)
            together(lambda: async_save.make(writes, group))
            shares = together(lambda: manifest.record(folder, _share(args, manifest.files_in(folder))))  # (3)
            together(lambda: _commit(args, folder, shares, content))
        if args.should_save:  # (4)
            manifest.rotate(output_dir, limit, keep=[best])

    trainer._committed_step = trainer.state.global_step
    if is_async:
        async_save.begin(trainer, folder.name, end, pushes)
        return
    end()
    for push in pushes:
        push()


@contextlib.contextmanager
def put_off(trainer: DistTrainer) -> Iterator[list]:
    """Meanwhile Trainer deletes no checkpoint, and its pushes are collected instead of made."""
    args, limit, pushes = trainer.args, trainer.args.save_total_limit, []
    trainer._put_off, trainer._as_given, args.save_total_limit = pushes, {"save_total_limit": limit}, None
    try:
        yield pushes
    finally:
        trainer._put_off, trainer._as_given, args.save_total_limit = None, {}, limit


# ---- (1) ----


def check_free_space(trainer: DistTrainer, output_dir: Path, folder: Path) -> int:
    """The bytes of the next checkpoint; UsageError on every rank when they can not fit: the older ones stay as they
    are."""

    def look() -> int:
        if not trainer.is_world_process_zero():
            return 0
        output_dir.mkdir(parents=True, exist_ok=True)
        needed, free = int(SPARE * expected_bytes(trainer, output_dir)), shutil.disk_usage(output_dir).free
        if not folder.is_symlink():  # which is emptied first
            free += sum((folder / name).stat().st_size for name in manifest.files_in(folder))
        if free < needed:
            raise UsageError(
                f"{folder.name} needs about {_size(needed)} and the disk of {output_dir} has {_size(free)} free; "
                f"nothing was written. {newest(output_dir)} Free space or lower save_total_limit."
            )
        return needed

    return agreed.together(look)[0]


def _begin(args: Any, output_dir: Path, folder: Path) -> int:
    """The save's generation, of which rank 0's counts."""
    generation = manifest.History(output_dir).next_generation() if args.process_index == 0 else 0
    if args.should_save:
        manifest.begin(folder)
    return generation


def expected_bytes(trainer: DistTrainer, output_dir: Path) -> int:
    """The size of the newest committed checkpoint; before there is one, that of weights and optimizer state."""
    for path in reversed(manifest.checkpoints_in(output_dir)):
        with contextlib.suppress(UsageError):
            if content := manifest.read(path):
                return sum(entry["size"] for entry in content["files"].values())
    state = getattr(trainer.optimizer, "state", None) or {}
    tensors = [value for values in state.values() for value in values.values() if hasattr(value, "element_size")]
    weights = [p for p in trainer.model.parameters() if not trainer._saves_trainable_only or p.requires_grad]
    return sum(num_elements(tensor) * tensor.element_size() for tensor in [*tensors, *weights])


@contextlib.contextmanager
def _full_disk_in_words(output_dir: Path, folder: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if is_full_disk(error, output_dir):
            raise UsageError(
                f"the disk of {output_dir} ran full while {folder.name} was written, which is not complete now. "
                f"{newest(output_dir)} Free space, then resume."
            ) from error
        raise


def is_full_disk(error: Exception, folder: Path) -> bool:
    # torch.save and safetensors wrap what the system said, each in its own way; another rank's error is words
    found = (errno.ENOSPC, errno.EDQUOT)
    is_said = getattr(error, "errno", None) in found or any(os.strerror(number) in str(error) for number in found)
    return is_said or shutil.disk_usage(folder).free < 1 << 16


def newest(output_dir: Path) -> str:
    history = manifest.History(output_dir)
    complete = [path.name for path in history.paths if not history.why_passed_over(path)]
    return f"{complete[-1]} is complete and can be resumed." if complete else "There is no older checkpoint."


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count > 1 << 29 else f"{count / 2**20:.2f} MiB"


# ---- (3) ----


def _share(args: Any, files: list[str]) -> list[str]:
    """What this rank reads back: what it wrote itself, and its part of the rest, of its machine's or the first's."""
    here, of_rank = collectives.processes_here(), {}
    if args.world_size > 1:
        of_rank = {name: found for name in files if (found := OF_RANK.fullmatch(name))}
    names = [name for name in of_rank if _writer(of_rank[name]) % args.world_size == args.process_index]
    # Machines see each other's files sooner or later, so those do not count here.
    rest = [name for name in files if name not in of_rank]
    # Each machine has a copy of its own of what rank 0 writes when save_on_each_node is set.
    first = args.process_index // here * here if args.save_on_each_node else 0
    return names + [name for index, name in enumerate(rest) if first + index % here == args.process_index]


def _writer(of_rank: re.Match) -> int:
    return int(next(filter(None, of_rank.groups())))


def _commit(args: Any, folder: Path, shares: list[dict], content: dict[str, Any]) -> None:
    """The manifest of all ranks' records, on a rank that saves and sees all their files."""
    if not args.should_save:
        return
    if args.save_on_each_node:  # same names, other files: one's own machine counts
        here = collectives.processes_here()
        start = args.process_index // here * here
        shares = shares[start : start + here]
    files = {name: entry for share in shares for name, entry in share.items()}
    words = agreed.wait_until_well(lambda: ", ".join(manifest.problems(folder, {"files": files}, hashes=False)))
    if words:
        raise RunError(
            f"{folder} is not complete where rank {args.process_index} runs, on {socket.gethostname()}: {words}. "
            "Ranks on other machines wrote it. Give an output_dir that all machines share."
        )
    lease.check()  # writing took time, in which another run may have taken the folder over
    manifest.commit(folder, files, content)


def facts(trainer: DistTrainer) -> dict[str, Any]:
    """What the manifest tells of the run beside its files."""
    args, state = trainer.args, trainer.state
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    bare = model.get_base_model() if hasattr(model, "get_base_model") else model
    plan, digests = trainer.freeze_plan, trainer._frozen_digests
    return {
        "step": state.global_step,
        "epoch": state.epoch,
        **trainer.data_position.facts(trainer.health.bad_rows.of_epoch()),
        "world_size": args.world_size,
        "data_parallel_size": args.world_size // collectives.ranks_per_rows(),
        "tensor_parallel_size": collectives.ranks_per_rows(),
        "per_device_train_batch_size": trainer._train_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "seed": args.seed,
        "data_seed": args.data_seed,
        "sharding": _sharding(trainer),
        "model": _class_name(bare),
        "embedding": embedding_options(bare) if _class_name(bare) == "EmbeddingModel" else None,
        "towers": {name: _tower(tower) for name, tower in getattr(bare, "towers", {}).items()} or None,
        "dtype": dtype_of_base(bare),
        "base_model": base_model(model),
        "base_revision": getattr(getattr(bare, "config", None), "_commit_hash", None),
        "frozen_fingerprint": None if digests is None else trainable.fingerprint(digests),
        "stage": getattr(trainer, "stage", None),
        "trains": None if plan is None else plan.describe(),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
    }


def base_model(model: Any) -> str | None:
    """The folder or hub id that the weights came from; None for a model that was built from a configuration."""
    name = getattr(getattr(model, "config", None), "_name_or_path", None) or None
    return str(Path(name).resolve()) if name and Path(name).is_dir() else name


def _tower(tower: Any) -> dict[str, Any]:
    """Where a tower of a `TowerModel` came from, and its options when it is an `EmbeddingModel`."""
    name = getattr(tower.config, "_name_or_path", None) or None
    return {
        "base": str(Path(name).resolve()) if name and Path(name).is_dir() else name,
        "embedding": embedding_options(tower) if _class_name(tower) == "EmbeddingModel" else None,
    }


def _class_name(model: Any) -> str:
    """FSDP2 makes a class of its own of the model's, with a prefix."""
    return next(one.__name__ for one in type(model).__mro__ if not one.__name__.startswith("FSDP"))


def dtype_of_base(model: Any) -> str:
    """That of the first weights that do not train: what the base was loaded in."""
    parameters = sorted(model.parameters(), key=lambda parameter: parameter.requires_grad)
    return str(parameters[0].dtype).removeprefix("torch.") if parameters else "float32"


def embedding_options(model: Any) -> dict[str, Any]:
    """What an `EmbeddingModel` is beside its backbone, as arguments of its `from_pretrained`."""
    names = ("pooling", "normalize", "max_length", "prompts", "matryoshka_dims")
    has_bias = model.projection is not None and model.projection.bias is not None
    width = None if model.projection is None else model.projection.out_features
    return {name: getattr(model, name) for name in names} | {"projection_dim": width, "projection_bias": has_bias}


def commit_model(trainer: DistTrainer, folder: Path, names: Iterable[str]) -> None:
    """A manifest for what `save_model` wrote of a model of which a part was trained: `names`, which `hf-dist merge`
    can then read."""
    trainer.accelerator.wait_for_everyone()
    if trainer.args.should_save:
        names = [name for name in names if (folder / name).is_file()]
        manifest.commit(folder, manifest.record(folder, names), facts(trainer))
        logger.info(
            f"{folder} holds what was trained. hf-dist merge {folder} --output DIR makes the complete model; "
            "save_full_model=true does so at the end of a run."
        )


def _sharding(trainer: DistTrainer) -> str:
    if trainer.is_deepspeed_enabled:
        return "deepspeed"
    if trainer._split is not None:
        return trainer._split.describe()
    if trainer.is_fsdp_enabled:
        return f"fsdp {trainer.accelerator.state.fsdp_plugin.state_dict_type.name}"
    return "ddp" if trainer.args.world_size > 1 else "none"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None

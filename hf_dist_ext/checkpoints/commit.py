"""The two ends of a save, on all ranks: an empty folder, and is everything of it on the disk?

The folder is emptied, should an earlier attempt have left it torn, and marked as unfinished. When all ranks have
written their files, they share the reading, hashing and fsync of them. Rank 0 must see what every rank has written,
and writes the manifest. A disk that runs full is told in words.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers.utils import logging

from hf_dist_ext.checkpoints import manifest
from hf_dist_ext.errors import RunError, UsageError
from hf_dist_ext.strategies import collectives, consensus

logger = logging.get_logger(__name__)

# Files that every rank writes for itself.
OF_RANK = re.compile(
    r"(?:.*/)?(?:(?:rng_state|ddp_comm_hook)_(\d+)\.pth?|__(\d+)_\d+\.distcp"
    r"|(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_\d+_(?:model|optim)_states\.pt)"
)

# ---- before ----


def begin(args: Any, output_dir: Path, folder: Path) -> int:
    """The save's generation, of which rank 0's counts."""
    generation = manifest.History(output_dir).next_generation() if args.process_index == 0 else 0
    if args.should_save:
        manifest.begin(folder)
    return generation


@contextlib.contextmanager
def full_disk_in_words(output_dir: Path, folder: Path) -> Iterator[None]:
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


# ---- after ----


def share(args: Any, files: list[str]) -> list[str]:
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


def commit_when_all_wrote(
    args: Any, folder: Path, shares: list[dict], content: Mapping[str, Any], check_lease: Callable[[], None]
) -> None:
    """The manifest of all ranks' records, on a rank that saves and sees all their files."""
    if not args.should_save:
        return
    if args.save_on_each_node:  # same names, other files: one's own machine counts
        here = collectives.processes_here()
        start = args.process_index // here * here
        shares = shares[start : start + here]
    files = {name: entry for share in shares for name, entry in share.items()}
    words = consensus.wait_until_well(lambda: ", ".join(manifest.problems(folder, {"files": files}, hashes=False)))
    if words:
        raise RunError(
            f"{folder} is not complete where rank {args.process_index} runs, on {socket.gethostname()}: {words}. "
            "Ranks on other machines wrote it. Give an output_dir that all machines share."
        )
    check_lease()  # writing took time, in which another run may have taken the folder over
    manifest.commit(folder, files, content)


def commit_model(folder: Path, names: Iterable[str], content: Mapping[str, Any]) -> None:
    """A manifest for the files `names` that `save_model` wrote of a model of which a part was trained, which
    `hf-dist merge` can then read. On a rank that saves."""
    names = [name for name in names if (folder / name).is_file()]
    manifest.commit(folder, manifest.record(folder, names), content)
    logger.info(
        "what was trained is written. hf-dist merge FOLDER --output DIR makes the complete model of its folder; "
        "save_full_model=true does so at the end of a run."
    )


# ---- the model that a run ends with ----

CONFIG = "config.json"
SHARD = r"(?:-\d{5}-of-\d{5})?"
OF_WEIGHTS = re.compile(
    rf"(?:(?:model{SHARD}\.safetensors|pytorch_model{SHARD}\.bin)(?:\.index\.json)?"
    r"|adapter_model\.(?:safetensors|bin)|(?:adapter_)?config\.json|trainable\.safetensors|frozen\.json|manifest\.json)"
)
EARLIER = 60  # seconds: no clock of a file system is coarser


@contextlib.contextmanager
def replacing_model(folder: Path, base: str | None, saves: bool = True) -> Iterator[None]:
    """Around a save into a folder that may hold another model: what tells of its weights, and is not written again,
    goes when the new one is whole. Adapters beside whole weights, or those beside new adapters, would be loaded.
    `base`: where the weights below the model's own come from, which stay as they are. `saves`: this rank writes."""
    before = _of_weights(folder, base) if saves else {}
    yield
    left = [path for path, written in before.items() if path.exists() and path.stat().st_mtime_ns == written]
    of_models = {path.parent for path in left if path.name != CONFIG}
    if left := [path for path in left if path.parent in of_models]:  # a configuration alone may be anybody's
        for path in left:
            path.unlink(missing_ok=True)
        names = ", ".join(str(path.relative_to(folder)) for path in left)
        logger.warning(f"{folder} held another model. What was left of it is removed: {names}.")


def _of_weights(folder: Path, base: str | None) -> dict[Path, int]:
    """The files that say which weights the folder's model has, with those of the modules that it names; and their
    times, which lie back from here on, so that no clock is too coarse to tell those that are written again."""
    modules = []
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        modules = [one["path"] for one in json.loads((folder / "modules.json").read_text("utf-8"))]
    found = {}
    for below in dict.fromkeys([folder, *(folder / module for module in modules)]):
        places = [one for one in (folder, below) if one.exists()]  # a base has weights in its modules' folders too
        is_base = base is not None and Path(base).exists() and any(one.samefile(base) for one in places)
        if is_base or below.is_symlink() or not below.resolve().is_relative_to(folder.resolve()):
            continue
        for path in below.glob("*.*"):
            if OF_WEIGHTS.fullmatch(path.name) and path.is_file() and not path.is_symlink() and _is_of_run(path):
                with contextlib.suppress(OSError):
                    state = path.stat()
                    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns - EARLIER * 10**9))
                    found[path] = path.stat().st_mtime_ns
    return found


def _is_of_run(path: Path) -> bool:
    """Whether a file is none of somebody's who gave it a name as common as "manifest.json"."""
    if path.name == manifest.MANIFEST:
        with contextlib.suppress(UsageError, TypeError):
            return manifest.read(path.parent) is not None
        return False
    trained = ("trainable.safetensors", "adapter_model.safetensors")
    return path.name != "frozen.json" or any((path.parent / name).is_file() for name in trained)

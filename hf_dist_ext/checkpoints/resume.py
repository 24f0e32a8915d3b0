"""Which checkpoint a run continues from, and whether it holds all that continuing needs.

Rank 0 decides, once per start: it takes the newest complete checkpoint, or the one that was named. The others wait
until they see that very checkpoint; then all share the comparing of hashes. Optimizer, schedule, scaler, this rank's
random state and the loss's parameters must be there: Trainer goes on without most of them and says nothing, here that
is an error on every rank. With `resume_weights_only` the weights alone are taken, from any form that a checkpoint has,
before anything is wrapped.

A run that starts afresh among checkpoints, or from another one than the newest, ignores the others, and so do later
resumes of it.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import set_seed
from transformers.utils import logging

from hf_dist_ext.checkpoints import manifest, safe_reading, trainable, weights
from hf_dist_ext.checkpoints.folder import another, checkpoint_to_resume, missing_from_checkpoint
from hf_dist_ext.checkpoints.loss_state import LOSS_OPTIMIZER, LOSS_WEIGHTS, state_of
from hf_dist_ext.errors import RunError, UsageError
from hf_dist_ext.models.adapters import adapter_scales, adapters_of
from hf_dist_ext.strategies import collectives, consensus
from hf_dist_ext.strategies.base import Strategy
from hf_dist_ext.strategies.gathering import Rows
from hf_dist_ext.strategies.tensors import loss_parameters

logger = logging.get_logger(__name__)

OF_A_METRIC = {"reduce_lr_on_plateau", "greedy"}  # schedules with a state of their own; all others share one form

# ---- which one ----


def choose(args: Any, asked: bool | str | None) -> tuple[Path | None, bool | str | None]:
    """The complete checkpoint that `train(resume_from_checkpoint=...)` means, None for none, and what rank 0 was
    asked."""
    output_dir = Path(args.output_dir)
    _check_shared(args)
    asked = consensus.together(lambda: asked)[0]
    if args.resume_weights_only and asked in (None, False):
        raise UsageError("resume_weights_only=true says how to resume; give resume_from_checkpoint too.")
    passed_over: dict[Path, str] = {}
    while (folder := _decided(args, lambda: checkpoint_to_resume(asked, output_dir, passed_over))) is not None:
        broken = _altered(args, folder)
        if not broken:
            break
        if asked is not True:
            hint = another(folder, output_dir)
            raise UsageError(f"{folder} is incomplete: {', '.join(broken)}. {hint}")
        passed_over[folder] = ", ".join(broken)
    if folder is not None:
        safe_reading.check(folder, args.trust_checkpoint)
        if collectives.rank() == 0:
            _say(folder, passed_over, takes_weights_only(args, folder, asked))
    return folder, asked


def takes_weights_only(args: Any, folder: Path, asked: bool | str | None) -> bool:
    """`resume_weights_only` holds for the checkpoint that a run begins from, and for one that is named. The run's own
    checkpoints are resumed whole, or each start with the same arguments would begin anew."""
    begins_here = asked is not True or not (manifest.read(folder) or {}).get("began_from_weights")
    return args.resume_weights_only and begins_here


def _decided(args: Any, decide: Callable[[], Path | None]) -> Path | None:
    """The folder that `decide` names on rank 0, where this rank sees it."""
    output_dir = Path(args.output_dir)

    def on_first_rank() -> str | None:
        folder = decide() if args.process_index == 0 else None
        if folder is None:
            return None
        # machines may see the output folder under different paths
        return str(folder.relative_to(output_dir) if folder.is_relative_to(output_dir) else folder.absolute())

    name = consensus.together(on_first_rank)[0]
    if name is not None:
        wait_to_see(args, output_dir / name)
    return None if name is None else output_dir / name


def best_checkpoint(args: Any, best: str | None) -> str | None:
    """The best checkpoint as rank 0 knows it: Trainer lets every rank look whether its folder is there, and ends with
    the last weights where it is not. RunError where rank 0 does not find it either."""

    def look() -> Path | None:
        if best is not None and (broken := _broken(Path(best))):
            raise RunError(
                f"{best} had the best {args.metric_for_best_model} of this run, and was deleted or changed while the "
                f"run trained: {broken}. Resume with --load_best_model_at_end false to end with the last weights."
            )
        return None if best is None else Path(best)

    folder = _decided(args, look)
    return None if folder is None else str(folder)


def wait_to_see(args: Any, folder: Path) -> None:
    """Returns when all machines see this folder as rank 0 does, down to its manifest; UsageError when they do not."""
    wanted = consensus.together(lambda: _identity(folder, args) if args.process_index == 0 else None)[0]

    def look() -> str:
        try:
            found, broken = _identity(folder, args), ""
            if (folder / manifest.MANIFEST).is_file():
                broken = manifest.why_incomplete(folder)
        except (UsageError, OSError) as error:  # half of it may be there already
            return str(error)
        return broken if found == wanted else f"{found[0]} instead of {wanted[0]}"

    if words := consensus.unseen(look):
        raise UsageError(
            f"rank 0 goes on from {folder}, which other machines do not see as rank 0 does: {words}. Give an "
            "output_dir that all machines share."
        )


def _identity(folder: Path, args: Any) -> tuple[str, str]:
    """What a folder holds, in words and as a digest."""
    if not folder.is_dir():
        return f"no folder {folder.name}", ""
    content = manifest.read(folder)
    if content is None:
        sizes = [(name, (folder / name).stat().st_size) for name in manifest.files_in(folder)]
        return f"{len(sizes)} files without a {manifest.MANIFEST}", manifest.digest(sizes)
    known = [f"{name} {content[name]}" for name in ("step", "generation", "run_id") if name in content]
    if args.save_on_each_node:  # each machine's manifest names its own files
        return f"a {manifest.MANIFEST} of {', '.join(known)}", ""
    return f"a {manifest.MANIFEST} of {', '.join([*known, 'checksum ' + content['checksum'][:8]])}", content[
        "checksum"
    ]


def _check_shared(args: Any) -> None:
    """Found before training, not when the first checkpoint lacks what another machine wrote."""
    if collectives.processes_here() >= args.world_size or args.save_on_each_node:
        return

    def write() -> str | None:
        if args.process_index:
            return None
        Path(args.output_dir).mkdir(parents=True, exist_ok=True)
        probe = Path(args.output_dir, f".seen-by-all-{uuid.uuid4().hex}")
        probe.touch()
        return probe.name

    probe = Path(args.output_dir, consensus.together(write)[0])
    words = consensus.unseen(lambda: "" if probe.is_file() else f"no {probe.name}")
    if args.process_index == 0:
        probe.unlink()
    if words:
        raise UsageError(
            f"output_dir={args.output_dir} is not one folder for all machines. Rank 0 wrote a file there, and others "
            f"see: {words}. Give a folder that all machines share."
        )


def _say(folder: Path, passed_over: Mapping[Path, str], takes_weights_only: bool) -> None:
    for path, reason in passed_over.items():
        logger.warning(f"{path} is passed over: {reason}.")
    if manifest.read(folder) is None:
        logger.warning(
            f"{folder} has no {manifest.MANIFEST} (the stock Trainer wrote it, or its save did not end): what is "
            "inside its files can not be checked."
        )
    what = ": weights only, everything else starts anew" if takes_weights_only else ""
    logger.info(f"resuming from {folder}{what}")


def _altered(args: Any, folder: Path) -> list[str]:
    """What the hashes say, found by all ranks together; empty without a manifest."""
    share = slice(args.process_index, None, args.world_size)
    if args.save_on_each_node:  # each machine has files of its own
        here = collectives.processes_here()
        share = slice(args.process_index % here, None, here)

    def look() -> list[str]:
        content = manifest.read(folder) if args.verify_checkpoint_hashes else None
        return [] if content is None else manifest.problems(folder, content, share=share)

    return _everyones(look)


def _everyones(look: Callable[[], list[str]]) -> list[str]:
    """The words of all ranks, each once, in order: what makes one rank stop must stop all."""
    return list(dict.fromkeys(word for words in consensus.together(look) for word in words))


# ---- whether it holds all ----


def check_complete(
    args: Any, folder: Path, content: Mapping[str, Any], loss: Any, rows: Rows, has_scaler: bool
) -> None:
    """`content`, here and below: the manifest of the folder, empty without one."""
    needed = ["scaler.pt"] if has_scaler else []
    needed += [LOSS_WEIGHTS] if state_of(loss) else []
    needed += [LOSS_OPTIMIZER] if loss_parameters(loss) else []
    world_size, per_rows, _ = saved_spread(folder, content)
    if (world_size, per_rows) == (args.world_size, rows.shared_by):
        needed.append(f"rng_state_{args.process_index}.pth" if world_size > 1 else "rng_state.pth")

    def look() -> list[str]:
        return missing_from_checkpoint(folder) + [
            f"{name} is missing" for name in needed if not (folder / name).is_file()
        ]

    if missing := _everyones(look):
        raise UsageError(
            f"{folder} can not be continued: {', '.join(missing)}. With resume_weights_only its weights are taken and "
            "everything else starts anew."
        )


def check_frozen(folder: Path, digests: Mapping[str, str] | None) -> None:
    """`digests`: of the weights that this run leaves out of its checkpoints; None when it saves all of them."""
    if digests is not None:
        trainable.check_frozen(folder, digests)
    elif trainable.has_trainable_weights(folder):
        raise UsageError(
            f"{folder} holds only what was trained, but nothing is frozen now. Give the trainable_modules or "
            "frozen_modules it was saved with, or resume_weights_only=true and the path of the checkpoint."
        )


def check_base(folder: Path, content: Mapping[str, Any], model: Any, dtype: str, cast_to: str | None) -> None:
    """UsageError where adapters were trained on a base of another precision than `dtype`, which computes something
    else. `cast_to`: what an engine makes of it before it computes; None: nothing."""
    saved = content.get("dtype", dtype)
    if adapters_of(model) and saved not in (dtype, cast_to):
        raise UsageError(
            f'{folder}: its adapters were trained on a base in {saved}, which this run loads in {dtype}. Set "dtype": '
            f'"{saved}", or resume_weights_only to start anew from them.'
        )


def check_optimizer(args: Any, folder: Path, content: Mapping[str, Any], optimizer: str) -> None:
    """UsageError where the state of the optimizer or of the schedule is of another kind than this run's, which would
    end with a KeyError in its first step. `optimizer`: the class of this run's."""
    if (before := content.get("optimizer") or optimizer) != optimizer:
        raise UsageError(
            f'{folder} holds the state of {before} (optim="{content["optim"]}"), and this run trains with {optimizer} '
            f'(optim="{args.optim.value}"). Give the optim of the checkpoint, or resume_weights_only=true: it takes '
            "the weights, and everything else starts anew."
        )
    now = args.lr_scheduler_type.value
    before = content.get("lr_scheduler_type", now)
    if before != now and {before, now} & OF_A_METRIC:
        raise UsageError(
            f'{folder} holds a schedule of lr_scheduler_type="{before}", and this run has "{now}", whose state is '
            "another. Give that of the checkpoint, or resume_weights_only=true: it takes the weights, and everything "
            "else starts anew."
        )


def check_scales(folder: Path, content: Mapping[str, Any], model: Any) -> None:
    """UsageError where trained adapters would be multiplied by another number than in the checkpoint."""
    saved = content.get("adapter_scales", {})
    for adapter, now in adapter_scales(model).items():
        if (before := saved.get(adapter, now)) != now:
            raise UsageError(
                f"{folder}: its adapters were trained with {before}, and this run has {now}, which multiplies them by "
                "another number. Give what it was, or resume_weights_only=true and the path of the checkpoint to "
                "start anew from them."
            )


def best_checkpoint_of(args: Any, folder: Path, content: Mapping[str, Any]) -> str | None:
    """Where the best checkpoint lies of the run that `folder` is of. trainer_state.json has the path that it had when
    it was written. The run's folder may have been moved or copied since, so what lies beside `folder` comes first, as
    long as it is what the manifest of `folder` names. UsageError where the run is to end with it and it is gone."""
    identity = content.get("best")

    def look() -> Path | None:
        state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
        if not (named := state.get("best_model_checkpoint")):
            return None
        places = [folder.parent / Path(named).name, Path(named)]
        found = [place for place in places if place.is_dir()] or places[:1]
        best = next((place for place in found if not _is_another(place, identity)), found[0])
        broken = _broken(best) or _is_another(best, identity)
        if broken and args.load_best_model_at_end:
            raise UsageError(
                f"{best} had the best {args.metric_for_best_model} of this run ({state['best_metric']:.4g}) and can "
                f"not be used any more: {broken}. Put it back, or give --load_best_model_at_end false to end with the "
                "last weights."
            )
        return None if broken else best

    best = _decided(args, look)
    return None if best is None else str(best)


def identity_of_best(best: str | None, folder: Path, content: Mapping[str, Any]) -> dict[str, Any] | None:
    """For the manifest of `folder`, of which `content` is known: which checkpoint is the best by now."""
    if best is None:
        return None
    if Path(best).name == folder.name:
        return manifest.identity(content)
    other = manifest.read(best) if Path(best).is_dir() else None
    return None if other is None else manifest.identity(other) | {"checksum": other["checksum"]}


def _is_another(checkpoint: Path, identity: Mapping[str, Any] | None) -> str:
    """Why a checkpoint is not the one of that name that is looked for; empty when it is."""
    if identity is None or _broken(checkpoint):
        return ""
    content = manifest.read(checkpoint) or {}
    is_it = all(content.get(name) == value for name, value in identity.items())
    return "" if is_it else "another run has written a checkpoint of that name"


def _broken(checkpoint: Path) -> str:
    """Why the weights of a checkpoint can not be taken; the stock Trainer's has no manifest to look at."""
    if not checkpoint.is_dir():
        return "there is no such folder"
    return manifest.why_incomplete(checkpoint) if (checkpoint / manifest.MANIFEST).is_file() else ""


def saved_spread(folder: Path, content: Mapping[str, Any]) -> tuple[int, int, int]:
    """Of how many processes a checkpoint is, how many of them held the same rows, and how many parts of one layer."""
    if not content:
        return max(len(list(folder.glob("rng_state_*.pth"))), 1), 1, 1
    per_layer = content["tensor_parallel_size"]
    return content["world_size"], per_layer * content["pipeline_parallel_size"], per_layer


def draws_anew(args: Any, step: int, folder: str, content: Mapping[str, Any], strategy: Strategy) -> bool:
    """Under another number of processes no random state fits; what is drawn then follows from the run's seed and the
    step, as it follows from the seed at a start."""
    share = strategy.rows.shared_by
    before, share_before, per_layer = saved_spread(Path(folder), content)
    if (before, share_before, per_layer) == (args.world_size, share, strategy.ranks_per_layer):
        return False
    if collectives.rank() == 0:
        groups = "" if share == share_before else f" (in groups of {share_before} and of {share} with the same rows)"
        logger.warning(
            f"{folder} is of {before} processes, this run of {args.world_size}{groups}: random states start anew."
        )
    set_seed(seed := hash((args.seed, step)) % 2**32)
    strategy.seed(seed, args.device)
    return True


# ---- its weights alone ----


def load_weights_only(
    model: nn.Module,
    folder: Path,
    trust: bool,
    strategy: Strategy,
    load_adapters: Callable[[nn.Module, Path], None],
) -> None:
    """The checkpoint's weights into the bare model; UsageError when they do not fit it."""
    if trainable.has_trainable_weights(folder):
        trainable.load_on_base(model, folder, trust, strategy.elsewhere, strategy.said_by_parts)
    elif not weights.load(model, folder, trust, strategy):
        load_adapters(model, folder)


# ---- which run goes on ----


def begin_or_continue_run(
    args: Any, folder: Path | None, asked: bool | str | None, is_search: bool, has_weights_only: bool
) -> dict[str, Any]:
    """Which run the checkpoints of this start are of; `folder` is what it resumes, None when it starts afresh.

    Without this, a run that is stopped before its first save would be continued from the run that it replaced.
    """
    output_dir = Path(args.output_dir)

    def decide() -> tuple[dict[str, Any], bool]:
        if args.process_index or is_search:  # a search has a folder for each trial
            return manifest.new_run(), False
        history = manifest.History(output_dir)
        is_here = folder is not None and folder.resolve().parent == output_dir.resolve()
        whole = [path for path in history.paths if not history.why_passed_over(path)]
        is_newest = asked is True or (is_here and whole[-1:] == [output_dir / folder.name])
        if is_here and is_newest and history.run["run_id"] and not has_weights_only:
            return history.run, False
        return manifest.begin_run(output_dir, folder, has_weights_only), True

    run, is_new = consensus.together(decide)[0]
    if is_new:
        _write_on_each_node(args, run)
    history = manifest.History(output_dir) if is_new and collectives.rank() == 0 else None
    others = [] if history is None else [path.name for path in history.paths if history.is_of_earlier_run(path)]
    if others:
        logger.warning(
            f"{output_dir} holds {', '.join(others)} of an earlier run. This one does not resume or delete them "
            f"({manifest.RUN} says which run it is); a save of the same step takes their place."
        )
    return run


def go_back(args: Any, is_proved: bool) -> str:
    """Which checkpoint a run that ends on updates that are not finite goes on from, in words. `is_proved`: an update
    after the newest was finite. Where none was, the run goes back to the one before, which is proved by the newest."""
    output_dir = Path(args.output_dir)

    def decide() -> tuple[dict[str, Any] | None, str]:
        if args.process_index:
            return None, ""
        history = manifest.History(output_dir)
        *proved, newest = [None, *(path for path in history.paths if not history.why_passed_over(path))]
        if newest is None:
            return None, "There is no checkpoint yet."
        if is_proved:
            return None, f"{newest.name} is good: resume from it."
        ruined = f"No step after {newest.name} was finite, so its weights may be ruined"
        if proved[-1] is None:
            return None, f"{ruined}, and there is none before it. Start afresh if they are."
        words = f"{proved[-1].name} is good: resume from it. {ruined}: it is not resumed unless it is named."
        return manifest.begin_run(output_dir, proved[-1]), words

    run, words = consensus.together(decide)[0]
    if run is not None:
        _write_on_each_node(args, run)
    return words


def _write_on_each_node(args: Any, run: Mapping[str, Any]) -> None:
    if args.should_save and args.process_index:  # save_on_each_node
        manifest.write_run(args.output_dir, run)

"""What goes to the hub: the model of a folder, and not what goes on with its run.

(1) in the middle of a run Trainer copies the files whose names it knows from the checkpoint to output_dir, and pushes
    all of that folder. It knows no pooling, dense and tower folders and no files of a part that was trained, of which
    the hub would serve another model. Here every file of the checkpoint is copied that belongs to the model
(2) then, and at the end, the files by which a folder loads as it lies there go to the hub, with its card
    (checkpoints/model_names.py)
"""

from __future__ import annotations

import contextlib
import glob
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import CommitInfo, HfApi
from huggingface_hub.errors import HfHubHTTPError, HTTPError
from transformers.trainer_utils import HubStrategy
from transformers.utils import PushInProgress, logging

from hf_dist_ext.checkpoints import manifest, model_names
from hf_dist_ext.checkpoints.trainable import FROZEN, WEIGHTS
from hf_dist_ext.errors import UsageError

logger = logging.get_logger(__name__)

# (1) ---------------------------------------------------------------------------------------------------------------


def copy_model(checkpoint: Path, output_dir: Path) -> bool:
    """The model of a complete checkpoint, as `save_model` would write it to output_dir. Whether it has weights."""
    names = [name for name in model_names.of_model(checkpoint) if name != manifest.MANIFEST]
    has_weights = any(name.endswith((".safetensors", ".bin")) for name in names)
    if not has_weights:
        logger.warning_once(
            "Checkpoints of this run hold their weights in shards, so only the push at its end holds weights."
        )
    for name in names:
        if name == "README.md" and (output_dir / name).exists():  # peft writes a draft of one into every checkpoint
            continue
        (output_dir / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(checkpoint / name, output_dir / name)
    if WEIGHTS in names:  # of a part that was trained: hf-dist merge wants to know of what
        known = manifest.read(checkpoint) or {}
        facts = {key: value for key, value in known.items() if key not in ("format", "saved_at", "files", "checksum")}
        manifest.commit(output_dir, manifest.record(output_dir, [WEIGHTS, FROZEN]), facts)
    return has_weights


# (2) ---------------------------------------------------------------------------------------------------------------


def upload(
    folder: Path, repo_id: str, *, token: str | None, revision: str | None, message: str, blocking: bool
) -> CommitInfo | Future[CommitInfo]:
    """One commit with the model of the folder, to a repository that exists. A branch `revision` is made if need be."""
    names, api = model_names.of_model(folder), HfApi(token=token)
    if revision is not None and not revision.startswith("refs/"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    return api.upload_folder(
        repo_id=repo_id,
        folder_path=folder,
        allow_patterns=[glob.escape(name) for name in names],
        commit_message=message,
        revision=revision,
        run_as_future=not blocking,
    )


def push_saved(
    run: Any,
    commit_message: str | None,
    blocking: bool = True,
    token: str | None = None,
    revision: str | None = None,
    private: bool | None = None,
    **card: Any,
) -> Any:
    """Push what the output_dir of a `run`, a DistTrainer, holds of the model. A card that lies there stays; without
    one Trainer's is made, which says what `card` has."""
    args, folder = run.args, Path(run.args.output_dir)
    run.callback_handler.on_push_begin(args, run.state, run.control)
    if run.hub_model_id is None:
        run.init_hf_repo(token=token, private=private)
    if not run.is_world_process_zero():
        return None
    if not (folder / "README.md").exists():
        run.create_model_card(**card)
    run._finish_current_push()
    options = {"token": token or args.hub_token, "revision": revision or args.hub_revision, "blocking": blocking}
    return upload(folder, str(run.hub_model_id), message=commit_message or "End of training", **options)


def push_checkpoint(run: Any, folder: Path) -> None:
    """What Trainer pushes in the middle of a run, but of the model alone; `hub_strategy` may add the checkpoint."""
    args, before = run.args, run.push_in_progress
    is_busy = before is not None and not before.is_done()
    is_due = args.push_to_hub and args.hub_strategy != HubStrategy.END and (args.hub_always_push or not is_busy)
    if not is_due or not run.is_world_process_zero():
        return
    # An earlier push reads the files of output_dir, which are written anew here. Others wait for this rank meanwhile.
    patience = min(args.ddp_timeout, getattr(args, "step_timeout", None) or args.ddp_timeout) / 2
    if is_busy and wait(before.jobs, patience).not_done:
        logger.warning(f"{folder.name} is not pushed: the push before it has not ended within {patience:.0f} s.")
        return
    tell_failed(before)
    run.callback_handler.on_push_begin(args, run.state, run.control)
    output_dir, repo_id = Path(args.output_dir), str(run.hub_model_id)
    message, jobs = f"Training in progress, step {run.state.global_step}", []
    options: dict[str, Any] = {"token": args.hub_token, "revision": args.hub_revision}
    if copy_model(folder, output_dir):
        jobs.append(upload(output_dir, repo_id, blocking=False, message=message, **options))
    if args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
        path = "last-checkpoint" if args.hub_strategy == HubStrategy.CHECKPOINT else folder.name
        options |= {"run_as_future": True, "commit_message": f"{message}, checkpoint"}
        jobs.append(HfApi().upload_folder(repo_id=repo_id, folder_path=folder, path_in_repo=path, **options))
    run.push_in_progress = PushInProgress(jobs)


def tell_failed(push: PushInProgress | None) -> None:
    for error in filter(None, (job.exception() for job in push.jobs if job.done()) if push else ()):
        logger.warning(f"A push in the middle of the run failed: {error}. A later one sends the newer model.")


@contextlib.contextmanager
def reached(what: str, remedy: str, token: str | None, error: type[Exception] = UsageError) -> Iterator[None]:
    """Around what talks to the hub. `error` with the remedy is raised offline, without a token, and for what the hub
    or the connection to it says."""
    reason: Any = None
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        reason = "HF_HUB_OFFLINE is set, so the hub is not asked"
    elif not (token or huggingface_hub.get_token()):
        reason = "there is no token for the hub (HF_TOKEN, or hf auth login)"
    else:
        try:
            yield
            return
        except (HfHubHTTPError, HTTPError, OSError) as raised:
            reason = " ".join(str(raised).split())[:300].rstrip(".") or type(raised).__name__
    raise error(f"{what}: {reason}. {remedy}")

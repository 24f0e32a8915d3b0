"""A model's folder to the hub: `hf-dist push DIR REPO_ID`, and the end of a run with `push_to_hub`.

The card names the repository then, in the place of the folder.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import HfApi
from transformers.utils import logging

from hf_dist_ext.checkpoints import hub, trainable
from hf_dist_ext.errors import RunError, UsageError
from hf_dist_ext.training import model_card

if TYPE_CHECKING:
    from hf_dist_ext.training.trainer import DistTrainer

logger = logging.get_logger(__name__)


def main(
    folder: Path, repo_id: str, private: bool = False, revision: str | None = None, include: Sequence[str] = ()
) -> None:
    """Make the repository if need be, and push. `include`: patterns of files that are left out otherwise."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder. Give the one that a run ended with.")
    names = hub.files_of_model(folder, include)
    with hub.reached(f"{folder} was not pushed to {repo_id}", "The folder is as it was: push it again later.", None):
        HfApi().create_repo(repo_id, private=private or None, exist_ok=True)
        with _card_names(folder, repo_id):
            made = hub.upload(folder, repo_id, revision=revision, include=include, message="Push a trained model")
    if (folder / trainable.WEIGHTS).is_file():
        logger.warning(f"{folder} holds what was trained, without the rest: hf-dist merge makes the whole model.")
    print(f"{len(names)} files of {folder} are at {made.repo_url}" + (f", {revision}." if revision else "."))


def of_run(trainer: DistTrainer, folder: Path) -> None:
    """The end of a run with `push_to_hub`, on the first process. RunError names the command that pushes later."""
    args, repo_id = trainer.args, trainer.hub_model_id
    options = " --private" if args.hub_private_repo else ""
    options += f" --revision {args.hub_revision}" if args.hub_revision else ""
    remedy = f"The model and its card are in {folder}. Push them with: hf-dist push {folder} {repo_id}{options}"
    with hub.reached("the push at the end of the run failed", remedy, args.hub_token, RunError):
        with _card_names(folder, repo_id):
            hub.push_saved(trainer, "End of training", revision=args.hub_revision)
        print(f"pushed:   {repo_id}")


@contextlib.contextmanager
def _card_names(folder: Path, repo_id: str) -> Iterator[None]:
    """What is pushed says how to load it from the hub; where the push fails the folder's card is as it was."""
    path = folder / model_card.NAME
    before = path.read_bytes() if path.is_file() else None
    model_card.named(folder, repo_id)
    try:
        yield
    except BaseException:
        if before is not None:
            path.write_bytes(before)
        raise

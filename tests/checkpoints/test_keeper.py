"""A `Keeper` needs no trainer: it is given what is to be written, and makes one act of it."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from hf_dist_ext.checkpoints import manifest
from hf_dist_ext.checkpoints.keeper import Keeper
from hf_dist_ext.errors import RunError

ARGUMENTS = dict(
    save_async=False, ddp_timeout=10, should_save=True, save_total_limit=1, save_on_each_node=False, world_size=1,
    process_index=0,
)  # fmt: skip


def save(folder: Path, write, check_lease=lambda: None) -> None:
    """Of step 1."""
    state = SimpleNamespace(global_step=1, best_model_checkpoint=None)
    keeper = Keeper(SimpleNamespace(**ARGUMENTS), None, check_lease)
    keeper.save(folder, state, write, lambda: {"step": 1}, push=lambda checkpoint: None)


def test_what_fails_while_it_is_written_is_no_checkpoint(tmp_path):
    def write(folder: Path) -> None:
        (folder / "a.txt").write_text("half of it")
        raise OSError("the cable was pulled")

    with pytest.raises(OSError, match="cable"):
        save(tmp_path, write)
    assert manifest.is_unfinished(tmp_path / "checkpoint-1")


def test_a_run_that_lost_its_folder_writes_nothing_more(tmp_path):
    def lost() -> None:
        raise RunError("another run has this folder now")

    with pytest.raises(RunError, match="another run"):
        save(tmp_path, lambda folder: None, lost)
    assert not list(tmp_path.iterdir())

"""A `Keeper` needs no trainer: it is given what is to be written, and makes one act of it."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hf_dist_ext.checkpoints import manifest
from hf_dist_ext.checkpoints.keeper import Keeper
from hf_dist_ext.errors import RunError

ARGUMENTS = dict(
    ddp_timeout=10, should_save=True, save_total_limit=1, save_on_each_node=False, world_size=1, process_index=0
)


def saved(folder: Path, is_async: bool, write, check_lease=lambda: None, **attributes) -> tuple[Keeper, list]:
    """The keeper after saves of steps 1 and 2; what was pushed, each with the folders that were there."""
    keeper, pushed = Keeper(SimpleNamespace(save_async=is_async, **ARGUMENTS), None, check_lease), []
    vars(keeper).update(attributes)

    def push(checkpoint: Path) -> None:
        complete = [
            path.name for path in folder.glob("checkpoint-*") if not manifest.why_incomplete(path, hashes=True)
        ]
        pushed.append((checkpoint.name, complete))

    for step in (1, 2):
        state = SimpleNamespace(global_step=step, best_model_checkpoint=None)
        keeper.save(folder, state, write, lambda step=step: {"step": step}, push)
        keeper.background.collect(wait=True)
    return keeper, pushed


@pytest.mark.parametrize("is_async", [False, True])
def test_a_save_is_committed_then_rotated_then_pushed(tmp_path, is_async):
    keeper, pushed = saved(tmp_path, is_async, lambda folder: torch.save({"a": torch.ones(4)}, folder / "a.pt"))
    assert pushed == [("checkpoint-1", ["checkpoint-1"]), ("checkpoint-2", ["checkpoint-2"])]
    assert keeper.committed_step == 2 and manifest.read(tmp_path / "checkpoint-2")["step"] == 2
    assert torch.load(tmp_path / "checkpoint-2" / "a.pt")["a"].sum() == 4


@pytest.mark.parametrize("is_async", [False, True])
def test_the_last_proved_checkpoint_is_deleted_when_the_next_one_is_proved(tmp_path, is_async):
    keeper, _ = saved(tmp_path, is_async, lambda folder: torch.save(1, folder / "a.pt"), is_guarded=True)
    folders = lambda: sorted(path.name for path in tmp_path.glob("checkpoint-*"))  # noqa: E731
    keeper.prove(2, None)
    assert folders() == ["checkpoint-1", "checkpoint-2"], "step 2 made the weights of the second"
    keeper.prove(3, None)
    assert folders() == ["checkpoint-2"]


def test_what_fails_while_it_is_written_is_no_checkpoint(tmp_path):
    def write(folder: Path) -> None:
        (folder / "a.txt").write_text("half of it")
        raise OSError("the cable was pulled")

    with pytest.raises(OSError, match="cable"):
        saved(tmp_path, False, write)
    assert manifest.is_unfinished(tmp_path / "checkpoint-1")


def test_a_run_that_lost_its_folder_writes_nothing_more(tmp_path):
    def lost() -> None:
        raise RunError("another run has this folder now")

    with pytest.raises(RunError, match="another run"):
        saved(tmp_path, False, lambda folder: None, lost)
    assert not list(tmp_path.iterdir())

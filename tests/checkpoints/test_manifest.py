"""The commit record: what makes a folder a checkpoint, what is said of one that is none, what rotation deletes."""

import os
from pathlib import Path

import pytest

from hf_dist_ext.checkpoints import manifest
from hf_dist_ext.checkpoints.folder import missing_from_checkpoint, resume_or_start
from hf_dist_ext.errors import UsageError

FILES = {"model.safetensors": b"w" * 5000, "sub/__0_0.distcp": b"x" * 300, "rng_state.pth": b"r"}


def committed(folder: Path, step: int, **facts) -> Path:
    """A checkpoint of the current run; its generation is the next one unless `facts` give another."""
    path = folder / f"checkpoint-{step}"
    for name, content in FILES.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    history = manifest.History(folder)
    facts = {"step": step, "generation": history.next_generation(), "run_id": history.run["run_id"]} | facts
    manifest.commit(path, manifest.record(path, manifest.files_in(path)), facts)
    return path


def unmarked(folder: Path, step: int) -> Path:
    path = committed(folder, step)
    (path / manifest.MANIFEST).unlink()
    return path


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("name", FILES)
def test_a_missing_short_or_altered_file_is_named(tmp_path, name):
    path = committed(tmp_path, 3)
    target, content = path / name, (path / name).read_bytes()
    flipped = bytes([content[0] ^ 1]) + content[1:]
    for damage, words in ((None, "missing"), (content[:-1], "bytes instead of"), (flipped, "altered")):
        target.unlink() if damage is None else target.write_bytes(damage)
        assert manifest.why_incomplete(path, hashes=True).startswith(f"{name} ")
        assert words in manifest.why_incomplete(path, hashes=True)
    assert manifest.why_incomplete(path) == "", "a flipped bit has no other size"
    target.write_bytes(content)
    assert manifest.why_incomplete(path, hashes=True) == ""


def test_a_torn_or_altered_manifest_makes_no_checkpoint(tmp_path):
    path = committed(tmp_path, 3)
    whole = (path / manifest.MANIFEST).read_text()
    assert manifest.read(path)
    for cut in (0, 1, len(whole) // 2, len(whole) - 1):
        (path / manifest.MANIFEST).write_text(whole[:cut])
        assert "torn" in manifest.why_incomplete(path)
    (path / manifest.MANIFEST).write_text(whole.replace('"step": 3', '"step": 4'))
    assert "altered" in manifest.why_incomplete(path)
    (path / manifest.MANIFEST).write_text(whole.replace('"format": 1', '"format": 2'))
    with pytest.raises(UsageError, match="format 2"):
        manifest.read(path)
    (path / manifest.MANIFEST).unlink()
    assert manifest.read(path) is None and "no manifest.json" in manifest.why_incomplete(path)


def test_everything_is_on_the_disk_before_the_manifest_and_the_manifest_before_commit_returns(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync
    paths = lambda handle: os.readlink(f"/proc/self/fd/{handle}")  # noqa: E731
    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc")
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(Path(paths(handle)).name), fsync(handle)))
    committed(tmp_path, 3)
    assert set(synced[:3]) == {Path(name).name for name in FILES}
    assert set(synced[3:5]) == {"checkpoint-3", "sub"} and synced[5] == manifest.UNFINISHED
    assert synced[6:] == ["checkpoint-3", tmp_path.name], "the manifest has its name"


def test_rotation_keeps_the_limit_and_never_the_unmarked_the_best_or_the_newest(tmp_path):
    for step in (1, 2, 3, 4, 5):
        committed(tmp_path, step)
    for step in (6, 0):
        unmarked(tmp_path, step)
    torn = committed(tmp_path, 7)
    (torn / "rng_state.pth").unlink()
    deleted = manifest.rotate(tmp_path, 2, keep=[tmp_path / "checkpoint-2", None])
    assert {path.name for path in deleted} == {"checkpoint-1", "checkpoint-3", "checkpoint-4"}
    assert names(tmp_path) == {f"checkpoint-{step}" for step in (0, 2, 5, 6, 7)}
    assert manifest.rotate(tmp_path, 1, keep=[None]) and manifest.rotate(tmp_path, 1) == []
    assert names(tmp_path) == {f"checkpoint-{step}" for step in (0, 5, 6, 7)}
    for limit in (None, 0, -1):
        assert manifest.rotate(tmp_path, limit) == []


def test_an_interrupted_deletion_is_finished_by_the_next(tmp_path, monkeypatch):
    for step in (1, 2, 3):
        committed(tmp_path, step)
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "_empty", lambda path: (path / "rng_state.pth").unlink() or 1 / 0)
        with pytest.raises(ZeroDivisionError):
            manifest.rotate(tmp_path, 2)
    assert "no manifest.json" in manifest.why_incomplete(tmp_path / "checkpoint-1")
    manifest.rotate(tmp_path, 2)
    assert names(tmp_path) == {"checkpoint-2", "checkpoint-3"}


def test_an_older_checkpoint_that_cannot_be_deleted_is_a_warning_and_the_others_go(tmp_path, monkeypatch, caplog):
    for step in (1, 2, 3, 4):
        committed(tmp_path, step)
    replace = os.replace

    def refused(source, target):
        if "checkpoint-1" in str(source):
            raise PermissionError(13, "Permission denied")
        replace(source, target)

    monkeypatch.setattr(os, "replace", refused)
    assert [path.name for path in manifest.rotate(tmp_path, 1)] == ["checkpoint-2", "checkpoint-3"]
    (said,) = [record.message for record in caplog.records]
    assert "checkpoint-1 " in said and "cannot be deleted" in said and "Permission denied" in said
    assert names(tmp_path) == {"checkpoint-1", "checkpoint-4"}


def test_a_link_is_neither_deleted_nor_emptied(tmp_path):
    kept = committed(tmp_path / "elsewhere", 1)
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoint-1").symlink_to(kept)
    for step in (2, 3):
        committed(run, step)
    assert [path.name for path in manifest.rotate(run, 1)] == ["checkpoint-2"]
    assert names(run) == {"checkpoint-1", "checkpoint-3"} and not manifest.why_incomplete(run / "checkpoint-1")
    manifest.begin(run / "checkpoint-1")  # a save of the same step takes the link's place
    assert not (run / "checkpoint-1").is_symlink() and names(run / "checkpoint-1") == {manifest.UNFINISHED}
    assert not manifest.why_incomplete(kept, hashes=True)


def test_newest_is_what_was_committed_last_whatever_the_clock_says(tmp_path):
    committed(tmp_path, 9, saved_at=200.0)
    committed(
        tmp_path, 4, saved_at=100.0
    )  # somebody went back to step 3 and trained on, on a host whose clock is slow
    unmarked(tmp_path, 12)
    (tmp_path / "checkpoint-9.tmp").mkdir()
    os.utime(tmp_path / "checkpoint-12", (50.0, 50.0))
    order = [path.name for path in manifest.checkpoints_in(tmp_path)]
    assert order == ["checkpoint-9", "checkpoint-4", "checkpoint-12"]
    assert [path.name for path in manifest.rotate(tmp_path, 1)] == ["checkpoint-9"]


def test_a_branch_of_a_branch_goes_on_from_what_each_began_with(tmp_path):
    def run_from(parent: int | None, *steps: int) -> None:
        run = manifest.begin_run(tmp_path, parent and tmp_path / f"checkpoint-{parent}")
        for step in steps:
            committed(tmp_path, step, run_id=run["run_id"], parent=run["parent"])

    run_from(None, 1, 2, 3, 4)
    run_from(2, 5, 6, 7)
    run_from(6, 8)
    history = manifest.History(tmp_path)
    own = [path.name[11:] for path in history.paths if not history.is_of_earlier_run(path)]
    assert own == ["1", "2", "5", "6", "8"]
    assert "went back" in history.why_passed_over(tmp_path / "checkpoint-7")
    assert {path.name[11:] for path in manifest.rotate(tmp_path, 1)} == {"1", "2", "5", "6"}
    run_from(None)
    history = manifest.History(tmp_path)
    assert all(map(history.is_of_earlier_run, history.paths)) and manifest.rotate(tmp_path, 1) == []


def test_a_folder_is_marked_as_unfinished_until_its_manifest_is_there(tmp_path):
    path = committed(tmp_path, 3)
    manifest.begin(path)
    assert names(path) == {manifest.UNFINISHED} and manifest.is_unfinished(path) and manifest.files_in(path) == []
    assert manifest.why_incomplete(path) == "no manifest.json: the save did not end"
    committed(tmp_path, 3)
    assert manifest.UNFINISHED not in names(path) and not manifest.is_unfinished(path)
    manifest.begin(tmp_path / "checkpoint-99")
    assert manifest.is_unfinished(tmp_path / "checkpoint-99")


def test_only_a_torn_save_is_followed_by_a_fresh_start(tmp_path):
    """One of save_only_model, or without an optimizer that somebody deleted, is a checkpoint that was asked for."""
    whole, torn = committed(tmp_path / "whole", 3), unmarked(tmp_path / "torn", 3)
    assert all("optimizer state is missing" in missing_from_checkpoint(path) for path in (whole, torn))
    found = {path.parent.name: {"output_dir": str(path.parent)} for path in (whole, torn)}
    assert [resume_or_start(training) for training in found.values()] == [True, None]
    assert "overwrite_output_dir" not in found["whole"] and found["torn"]["overwrite_output_dir"]

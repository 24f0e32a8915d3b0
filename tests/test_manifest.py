"""The commit record: what makes a folder a checkpoint, what is said of one that is none, what rotation deletes."""

import os
from pathlib import Path

import pytest

from hf_dist_ext import manifest
from hf_dist_ext.errors import UsageError

FILES = {"model.safetensors": b"w" * 5000, "sub/__0_0.distcp": b"x" * 300, "rng_state.pth": b"r"}


def committed(folder: Path, step: int, saved_at: float | None = None) -> Path:
    path = folder / f"checkpoint-{step}"
    for name, content in FILES.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    facts = {"step": step} | ({} if saved_at is None else {"saved_at": saved_at})
    manifest.commit(path, manifest.record(path, manifest.files_in(path)), facts)
    return path


def unmarked(folder: Path, step: int) -> Path:
    path = committed(folder, step)
    (path / manifest.MANIFEST).unlink()
    return path


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_committed_folder_is_complete_and_names_every_file(tmp_path):
    path = committed(tmp_path, 3)
    content = manifest.read(path)
    assert set(content["files"]) == set(FILES) and content["step"] == 3 and content["format"] == 1
    assert content["files"]["model.safetensors"]["size"] == 5000
    assert manifest.why_incomplete(path, hashes=True) == ""


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
    assert set(synced[:3]) == {Path(name).name for name in FILES} and synced[3] == manifest.MANIFEST
    assert set(synced[4:]) == {"checkpoint-3", "sub", tmp_path.name}


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
        patch.setattr(manifest, "withdraw", lambda path: (path / "rng_state.pth").unlink() or 1 / 0)
        with pytest.raises(ZeroDivisionError):
            manifest.rotate(tmp_path, 2)
    assert "no manifest.json" in manifest.why_incomplete(tmp_path / "checkpoint-1")
    manifest.rotate(tmp_path, 2)
    assert names(tmp_path) == {"checkpoint-2", "checkpoint-3"}


def test_newest_is_what_was_committed_last(tmp_path):
    committed(tmp_path, 9, saved_at=100.0)
    committed(tmp_path, 4, saved_at=200.0)  # somebody went back to step 3 and trained on
    unmarked(tmp_path, 12)
    (tmp_path / "checkpoint-9.tmp").mkdir()
    order = [path.name for path in manifest.checkpoints_in(tmp_path)]
    assert order == ["checkpoint-9", "checkpoint-4", "checkpoint-12"]


def test_withdrawing_leaves_an_empty_folder_that_is_no_checkpoint(tmp_path):
    path = committed(tmp_path, 3)
    manifest.withdraw(path)
    assert names(path) == set()
    manifest.withdraw(tmp_path / "checkpoint-99")
    assert not (tmp_path / "checkpoint-99").exists()

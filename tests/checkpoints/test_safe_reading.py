"""A distributed checkpoint is read without running what it says."""

import io
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from hf_dist_ext.checkpoints import safe_reading
from hf_dist_ext.errors import UsageError


class Runs:
    """Unpickling it creates a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.fixture
def saved(tmp_path) -> Path:
    state = {"weight": torch.arange(6.0).view(2, 3), "half": torch.ones(2, dtype=torch.bfloat16)}
    rest = {"lr": 0.1, "betas": (0.9, 0.999), "name": "adam", "none": None, "list": [1, True]}
    dcp.save({"model": state, "rest": rest}, checkpoint_id=tmp_path / "saved")
    return tmp_path / "saved"


def load(folder: Path, trust: bool = False) -> dict:
    state = {"model": {"weight": torch.zeros(2, 3), "half": torch.zeros(2, dtype=torch.bfloat16)}}
    state["rest"] = {"lr": 0.0, "betas": (0.0, 0.0), "name": "", "none": 1, "list": [0, False]}
    safe_reading.load(state, folder, trust)
    return state


@pytest.mark.parametrize("trust", [False, True])
def test_what_torch_writes_is_read(saved, trust):
    state = load(saved, trust)
    assert torch.equal(state["model"]["weight"], torch.arange(6.0).view(2, 3))
    assert state["rest"] == {"lr": 0.1, "betas": (0.9, 0.999), "name": "adam", "none": None, "list": [1, True]}


@pytest.mark.parametrize("where", ["metadata", "value"])
def test_nothing_in_a_checkpoint_is_run(saved, tmp_path, where):
    proof = tmp_path / "ran"
    if where == "metadata":
        metadata = pickle.loads((saved / ".metadata").read_bytes())
        metadata.planner_data = Runs(proof)
        (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    else:
        dcp.save({"model": {}, "rest": {"lr": Runs(proof)}}, checkpoint_id=saved)
        with pytest.raises(UsageError, match="trust_checkpoint=true"):
            safe_reading.load({"rest": {"lr": 0.0}}, saved, trust=False)
        assert not proof.exists()
        safe_reading.load({"rest": {"lr": 0.0}}, saved, trust=True)
        assert proof.exists(), "the trap works"
        return
    with pytest.raises(UsageError, match="pathlib.*trust_checkpoint=true"):
        load(saved)
    assert not proof.exists()
    load(saved, trust=True)
    assert proof.exists(), "the trap works"


class Reads:
    """It is pickled as early releases of Python 3.11 pickle the members of enums."""

    def __init__(self, *what):
        self.what = what

    def __reduce__(self):
        return getattr, self.what


def test_getattr_reads_members_of_torchs_enum_and_nothing_else():
    encoding = dcp.metadata._MEM_FORMAT_ENCODING
    member = next(iter(encoding))
    written = pickle.dumps(Reads(encoding, member.name))
    assert safe_reading.MetadataUnpickler(io.BytesIO(written)).load() is member
    for what in ((Path, "touch"), (encoding, "__init__"), (torch.float32, "itemsize")):
        with pytest.raises(UsageError, match="trust_checkpoint=true"):
            safe_reading.MetadataUnpickler(io.BytesIO(pickle.dumps(Reads(*what)))).load()


def test_what_a_checkpoint_holds_below_is_looked_at_before_trainer_reads_it(saved, tmp_path):
    """accelerate makes a reader of its own, which runs what it finds."""
    safe_reading.check(tmp_path, trust=False)
    dcp.save({"rest": {"lr": Runs(proof := tmp_path / "ran")}}, checkpoint_id=saved)
    with pytest.raises(UsageError, match="rest.lr is no plain value.*trust_checkpoint=true"):
        safe_reading.check(tmp_path, trust=False)
    assert not proof.exists()
    safe_reading.check(tmp_path, trust=True)
    dcp.load({"rest": {"lr": 0.0}}, checkpoint_id=saved)
    assert proof.exists(), "the trap works"


def test_it_is_looked_at_behind_links_too(saved, tmp_path):
    dcp.save({"rest": {"lr": Runs(proof := tmp_path / "ran")}}, checkpoint_id=saved)
    checkpoint = tmp_path / "checkpoint-1"
    checkpoint.mkdir()
    (checkpoint / "optimizer_0").symlink_to(saved, target_is_directory=True)
    (checkpoint / "itself").symlink_to(checkpoint, target_is_directory=True)
    with pytest.raises(UsageError, match="rest.lr is no plain value"):
        safe_reading.check(checkpoint, trust=False)
    assert not proof.exists()

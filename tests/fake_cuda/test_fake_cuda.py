"""What a training does to a GPU, seen on one that is not there: whole updates of `DistTrainer` on tensors without
values that say they are on CUDA (device.py; cases.py has the trainings).

A training that mixes devices ends with the error that CUDA raises. Of an update that runs are asserted: where the host
waits for the device, copies that make it wait, casts of weights, and kernels. Counts do not depend on the machine.
"""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fake_cuda.build import COMPILER, build

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(COMPILER is None, reason="a C++ compiler: the fake CUDA device is built from source")
COUNTED_WITH = {"torch": "2.13", "transformers": "5.23", "sentence-transformers": "6.2"}

# Where the host waits for the device in an update -> how often at most, and why.
GUARD = "copy to the host hf_dist_ext/training/health.py:before_update"
TRAINER = "_local_scalar_dense transformers/trainer.py:"
IDS = "copy to the host hf_dist_ext/engine/false_negatives.py:__init__"
READS = {
    IDS: (1, "which texts of a batch are equal: asked before the first forward, waited for when the loss asks"),
    GUARD: (1, "an update that is not finite is dropped before the optimizer steps; all that ranks say goes with it"),
    TRAINER + "_run_epoch": (1, "Trainer leaves losses that are not finite out of its log"),
    TRAINER + "_finalize_training": (1, "the mean loss, at the end of a training"),
    TRAINER + "store_flos": (1, "several processes add up what they computed, at the end of a training"),
}  # fmt: skip


@pytest.fixture(scope="session")
def found(tmp_path_factory) -> dict[str, dict]:
    """Case -> what was noted of its last update."""
    folder = tmp_path_factory.mktemp("fake_cuda")
    library, output, log = folder / "device.so", folder / "found.json", folder / "log"
    build(library)
    with open(log, "w") as said:
        environment = os.environ | {"FAKE_CUDA_LIBRARY": str(library), "CUDA_VISIBLE_DEVICES": "0"}
        command = [sys.executable, "-m", "tests.fake_cuda.cases", str(output)]
        code = subprocess.run(command, env=environment, cwd=HERE.parent.parent, stdout=said, stderr=said).returncode
    assert code == 0, log.read_text()[-3000:]
    return json.loads(output.read_text())


def cases() -> list[str]:
    """The names in cases.py, which only a process with a fake device can import."""
    return re.findall(r'^    "([\w -]+)": Case\(', (HERE / "cases.py").read_text(), re.MULTILINE)


NAMES = cases()
MORE_READS: dict[str, dict[str, tuple[int, str]]] = {
    "gist": {
        "_local_scalar_dense transformers/masking_utils.py:_ignore_bidirectional_mask_sdpa": (
            2, "the guide looks for padding in each column, once per step")},
    "late interaction": {
        "copy to the host hf_dist_ext/engine/late_interaction.py:_real_tokens": (
            1, "real tokens of every row")},
    "accumulation": dict.fromkeys((IDS, TRAINER + "_run_epoch"), (2, "once for each micro-batch")),
    "ddp": {"copy to the host hf_dist_ext/strategies/ddp.py:begin_step": (
        2, "DDP orders its buckets anew, in the second step of a training")},
}  # fmt: skip
COPIES: dict[str, int] = {
    "blocking transformers/trainer_pt_utils.py:distributed_broadcast_scalars": 1,  # at the end of a training
    "pageable hf_dist_ext/strategies/ddp.py:begin_step": 2,  # as above
}
# Casts of one weight: frozen ones in every forward, as autocast keeps copies of what trains alone; of what trains one,
# and one for each of the graphs that go through the last backward together, which must not share a copy.
# FSDP2 casts its shards whenever it gathers them.
CASTS = {"clip": 4, "late interaction": 5, "frozen layers": 8, "frozen backbone": 4, "gist": 8, "accumulation": 2,
         "float32": 0, "fsdp2": 8, "hsdp": 8}  # fmt: skip
# Kernels of a forward without a graph, of a replay, and of the loss: the most of an update.
KERNELS = {
    "bert packed": (89, 233, 91),
    "bert padded": (123, 283, 91),
    "modernbert packed": (108, 247, 91),
    "modernbert padded": (177, 315, 91),
    "xlm-roberta packed": (100, 244, 91),
    "xlm-roberta padded": (131, 290, 91),
    "qwen3 packed": (169, 478, 91),
    "qwen3 padded": (218, 536, 91),
    "dense": (92, 239, 126),
    "dropout": (128, 293, 91),
    "clip": (119, 429, 91),
    "siglip": (89, 234, 99),
    "late interaction": (127, 442, 156),
    "cosent": (89, 230, 90),
    "gist": (94, 235, 168),
    "frozen layers": (92, 174, 91),
    "frozen backbone": (90, 0, 91),
    "kept graphs": (89, 233, 91),
    "no cache": (113, 0, 91),
    "float32": (115, 239, 91),
    "fp16": (89, 235, 91),
    "accumulation": (89, 234, 91),
    "ddp": (79, 297, 94),
    "fsdp2": (91, 253, 94),
    "hsdp": (91, 254, 91),
}
FORWARDS = ("a forward without a graph", "a forward whose graph lives until a later phase")
REPLAYS, LOSS = ("a forward and its backward",), ("the loss and its gradient with respect to the embeddings",)


@pytest.fixture
def update(found, name) -> dict:
    assert "error" not in found[name], found[name]["error"]
    return found[name]


@pytest.mark.parametrize("name", NAMES)
def test_a_step_waits_for_the_device_only_where_it_is_listed(update, name):
    listed = READS | MORE_READS.get(name, {})
    assert GUARD in update["reads"]
    assert {place: count for place, count in update["reads"].items() if count > listed.get(place, (0,))[0]} == {}


@pytest.mark.parametrize("name", NAMES)
def test_no_copy_to_the_device_waits(update, name):
    assert {place: count for place, count in update["copies"].items() if count > COPIES.get(place, 0)} == {}


@pytest.mark.parametrize("name", NAMES)
def test_a_weight_is_cast_once_per_step(update, name):
    assert update["casts"] <= CASTS.get(name, 1)
    assert (update["cast"] == 0) == (name == "float32")


@pytest.mark.parametrize("name", NAMES)
def test_kernels_are_at_most_those_that_were_counted(update, name):
    installed = {package: importlib.metadata.version(package) for package in COUNTED_WITH}
    if any(not installed[package].startswith(version) for package, version in COUNTED_WITH.items()):
        pytest.skip(f"kernels were counted with {COUNTED_WITH}")
    most = [max((n for kind in kinds for n in update["kernels"].get(kind, ())), default=0)
            for kinds in (FORWARDS, REPLAYS, LOSS)]  # fmt: skip
    assert all(now <= counted for now, counted in zip(most, KERNELS[name], strict=True)), most
    assert sum(most) > 0.9 * sum(KERNELS[name]), "fewer: write down the new count"


def test_rows_go_end_to_end_where_a_kernel_takes_them(found):
    packed = {name for name in NAMES if found[name].get("packs")}
    assert {name for name in NAMES if name.endswith(" packed")} | {"dense", "cosent", "siglip"} <= packed
    assert not packed & {"dropout", "float32", "clip", "late interaction"}


def test_the_device_notes_mistakes(found):
    noted, here = found["mistakes"], "tests/fake_cuda/cases.py:mistakes"
    assert noted["reads"] == {f"_local_scalar_dense {here}": 1, f"copy to the host {here}": 1}
    assert noted["copies"] == {f"blocking {here}": 1, f"pageable {here}": 1}
    assert "on the same device" in noted["error"]

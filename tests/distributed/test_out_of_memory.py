"""Memory that runs out on one of two processes: all end with the cause, and a resume goes on with smaller chunks."""

import pytest

from tests.distributed.memory_worker import PLACES, RESUMED, filled, with_lacks

# Where FSDP gathers and reduces, and smaller chunks help; the gather of the loss is DDP's.
OF_FSDP = ("pass 1", "replay", "reducing backward")


@pytest.mark.parametrize(
    "mode, places, kind",
    [
        ("ddp", PLACES, "speed"), ("fsdp-full", OF_FSDP, "speed"),
        pytest.param("fsdp-full", PLACES, "speed", marks=pytest.mark.slow),
        pytest.param("fsdp-full", PLACES, "memory", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_all_ranks_end_with_the_cause_wherever_one_runs_out_of_memory(tmp_path, mode, places, kind):
    found = with_lacks(mode, tmp_path, places, kind)
    for place, run in found.items():
        assert run["codes"] == [1, 1], (place, run)
        assert len(run["errors"]) == 2 and len(set(run["errors"])) == 1, (place, run)
        assert "step 3: rank 1 ran out of memory in" in run["errors"][0], (place, run)
        is_of_chunks = place in OF_FSDP
        helps = "--resume_from_checkpoint auto" if is_of_chunks else "per_device_train_batch_size"
        assert helps in run["errors"][0] and run["stored"]["chunk_halvings"] == is_of_chunks, (place, run)
    for place in RESUMED:
        assert found[place]["sizes"] and found[place]["difference"] < 1e-6, found[place]


@pytest.mark.parametrize("mode", ["single", "fsdp-full"])
def test_an_automatic_chunk_takes_what_the_device_has_left(tmp_path, mode):
    found = filled(mode, tmp_path, keeps_graphs=False)
    assert 0.85 * found["free"] < found["used"] <= found["free"], found
    assert found["weights"] == (3328 if mode == "single" else 1664), "of a model that two processes share, half"
    assert found["state"] >= 2 * found["weights"] and found["steps"] >= 3 and found["kept"] == 0


@pytest.mark.parametrize("mode", ["single", pytest.param("fsdp-full", marks=pytest.mark.slow)])
def test_kept_graphs_fill_what_chunk_gradients_and_loss_leave(tmp_path, mode):
    found = filled(mode, tmp_path, keeps_graphs=True)
    assert found["free"] - found["graph"] < found["used"] <= found["free"], found
    assert found["kept"] >= 2 and found["loss"] > found["graph"] / 2, "it would be another number without the loss"
    assert found["logged"] == found["kept"]

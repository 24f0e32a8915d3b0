"""Set before any test module is imported, and which tests are quick enough to run after every edit."""

import gc
import json
import logging
import os
import signal
import tempfile
from pathlib import Path

import pytest

# One thread for each process: two pytest workers and the processes of their launches share the machine's cores, and a
# process that is forked from one with a pool of OpenMP threads may crash in its first parallel region
# (tests/distributed/forked.py forks).
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# No test needs a network, and without one the hub is asked five times with waits between, 23 s in all.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Tests find nothing in the caches that earlier runs, other workers or the user have filled, and leave nothing there.
caches = tempfile.TemporaryDirectory(prefix="hf-home-", ignore_cleanup_errors=True)
os.environ["HF_HOME"] = caches.name

# A shell that starts pytest in the background has it ignore SIGINT, and all that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# `pytest -m fast`: files, and whole folders, whose tests start no processes and train little or nothing.
FAST = """
    engine/test_budget.py engine/test_chunks.py engine/test_gradient_cache.py engine/test_losses.py engine/test_rows.py
    checkpoints/test_manifest.py checkpoints/test_safe_reading.py
    data/test_image_text_collator.py data/test_sampling.py data/test_row_ids.py
    frozen/test_who_trains.py frozen/test_run_mode.py
    run/test_config.py run/test_presets.py run/test_stages.py
    strategies/test_layers.py
    training/test_metrics.py training/test_scaling.py
    test_cli.py
""".split()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        is_fast = item.path.relative_to(here).as_posix() in FAST if item.path.is_relative_to(here) else False
        if is_fast and item.get_closest_marker("slow") is None:
            item.add_marker(pytest.mark.fast)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Every end of a training collects garbage, which takes half a second when it looks at all that was imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def transformers_warns_as_before():
    """An audit that a test runs in this process has transformers say errors alone, and later tests read warnings."""
    of_transformers = logging.getLogger("transformers")
    before = of_transformers.level
    yield
    of_transformers.setLevel(before or logging.WARNING)


@pytest.fixture(autouse=True, scope="session")
def traces_in_this_process(tmp_path_factory: pytest.TempPathFactory):
    """A plan traces the model in a process of its own, whose imports take seconds: here it does in the test's, and
    keeps what it finds for all tests of the session. The value is the function whose place this takes."""
    from hf_dist_ext.planner import traced

    def in_place(run):
        from hf_dist_ext.tasks import trace

        return json.loads(json.dumps(trace.counted(run)))

    folder = tmp_path_factory.getbasetemp()
    shared = folder.parent if folder.name.startswith("popen-") else folder
    in_a_process = traced._trace
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traced, "_trace", in_place)
        patch.setattr(traced, "_folder", lambda: shared / "traces")
        yield in_a_process

"""The benchmarks run, at sizes of seconds, and write what they promise. What they measure is no test's business."""

import json
import math
import sys
import sysconfig
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.distributed.forked import by_launch, launch, run_python
from tests.launching import ROOT

CODE = Path(sysconfig.get_path("stdlib")) / "asyncio"  # a few hundred functions instead of the whole library
RATIOS = (
    "cached_over_plain",
    "cached_over_sentence_transformers_cached",
    "cached_peak_memory_over_sentence_transformers_cached",
    "cached_packed_over_padded",
    "fixed_no_graph_over_plain",
    "fixed_all_graphs_over_plain",
    "activation_memory_of_largest_over_smallest_batch",
)


def run(script: str, *options: object, code: int = 0) -> str:
    """What the script prints, run as the command would run it, in a process that has imported everything already."""
    return run_python(ROOT / "scripts" / script, *options, code=code)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory) -> dict:
    pytest.importorskip("sentence_transformers")
    folder = tmp_path_factory.mktemp("comparison")
    options = ("--preset", "smoke", "--turns", "1", "--code_root", CODE, "--output", folder)
    run("benchmark_gradient_cache.py", *options)
    return json.loads((folder / "results.json").read_text())


def test_the_comparison_writes_every_ratio(comparison):
    for name in RATIOS:
        assert math.isfinite(comparison["ratios"][name]) and comparison["ratios"][name] > 0, name


def test_the_comparison_keeps_every_raw_figure(comparison):
    for contestant in comparison["text"]["contestants"].values():
        assert len(contestant["seconds"]) == len(contestant["cpu_seconds"]) == 1
        assert contestant["peak_bytes"] > 0 and contestant["tokens"] > 0


def test_all_contestants_compute_the_plain_steps_gradient(comparison):
    errors = comparison["float64_gradient_error"]
    assert len(errors) == 4 and max(errors.values()) < 1e-10, errors


def test_activations_do_not_grow_with_the_batch(comparison):
    points = comparison["flat"]
    assert points[0]["pairs"] < points[-1]["pairs"]
    assert points[0]["activation_bytes"] == points[-1]["activation_bytes"] > 0


def test_packed_chunks_compute_real_tokens_only(comparison):
    text = comparison["text"]
    ours, padded = (text["contestants"][name]["tokens"] for name in ("ours", "ours, padded"))
    assert padded > ours == 2 * text["real_tokens"] > 0


def test_all_graphs_kept_compute_every_token_once(comparison):
    fixed = comparison["fixed"]["contestants"]
    assert fixed["ours, all graphs kept"]["tokens"] == fixed["plain"]["tokens"] > 0
    assert fixed["ours"]["tokens"] == 2 * fixed["plain"]["tokens"]


def scaling_of_forked_processes() -> None:
    """scripts/benchmark_scaling.py; what it would launch is forked."""
    sys.path.insert(0, str(ROOT / "scripts"))
    import benchmark_scaling as script

    def run(command: list[str], **options) -> SimpleNamespace:
        preset, processes = (command[command.index(name) + 1] for name in ("--config_file", "--num_processes"))
        words = command[command.index(script.__file__) + 1 :]
        launch(Path(preset).stem, int(processes), script.main, *words)
        return SimpleNamespace(returncode=0)

    script.subprocess = SimpleNamespace(run=run)
    script.main()


@by_launch
def test_scaling_counts_the_collectives_of_real_processes(tmp_path, is_launched):
    sizes = ("--pairs", 16, "--length", 8, "--chunk_rows", 8, "--width", 32, "--layers", 1, "--steps", 2)
    source = ROOT / "scripts" / "benchmark_scaling.py" if is_launched else scaling_of_forked_processes
    run_python(source, "--presets", "multi_gpu_ddp", "--repeats", 1, *sizes, "--output", tmp_path)
    report = json.loads((tmp_path / "results.json").read_text())
    alone, two = report["results"]
    assert (alone["processes"], two["processes"]) == (1, 2)
    assert two["wrapper"] == "DistributedDataParallel" and two["contrastive_batch"] == 32
    assert two["efficiency"] == pytest.approx(two["pairs_per_second"] / alone["pairs_per_second"] / 2)
    # One process sends nothing; two send at least the gradients of every weight.
    assert alone["collectives"] == {} and two["collectives"]["gloo:all_reduce"]["bytes"] > 4 * 3000 * 32


@pytest.mark.parametrize(
    "comparison", ["tiny", *[pytest.param(name, marks=pytest.mark.slow) for name in ("mnr", "cosent")]]
)
def test_trainers_that_are_compared_compute_the_same_losses(tmp_path, comparison):
    pytest.importorskip("sentence_transformers")
    sizes = ("--rows", 8, "--turns", 1, "--mini_batches", 4, "--mini_batch_tokens", "--chunk_tokens", 128)
    sizes += ("--kept_tokens", 64)
    options = ("--comparisons", comparison, "--code_root", CODE, "--output", tmp_path)
    output = run("benchmark_training.py", *sizes, *options)
    (result,) = json.loads((tmp_path / "results.json").read_text())["results"]
    (_, theirs), (_, ours), *kept = result["contestants"].items()
    if comparison in ("tiny", "mnr"):
        ((name, of_kept),) = kept
        assert name.endswith(" graphs kept") and of_kept["losses"] == pytest.approx(ours["losses"], abs=1e-4)
        assert of_kept["peak_bytes"] < 1.05 * theirs["peak_bytes"]
        if (number := name.split()[3]) != "all":
            assert int(number) > 1 and of_kept["peak_bytes"] > 0.8 * theirs["peak_bytes"]
    else:
        assert not kept
    assert len(ours["losses"]) == len(theirs["losses"]) == 3 and len(set(ours["losses"])) == 3
    assert ours["losses"] == pytest.approx(theirs["losses"], abs=1e-4) and result["losses_differ_by"] < 1e-4
    assert theirs["time"] == theirs["cpu_time"] == 1 and ours["time"] > 0
    assert min(one[key] for one in (ours, theirs) for key in ("peak_bytes", "grown_bytes", "rows_per_second")) > 0
    assert f"| {ours['time']:.2f} | {ours['cpu_time']:.2f} |" in output


def test_what_needs_a_gpu_says_so_in_one_line():
    said = run("gpu_check.py", code=2)
    assert "no CUDA device" in said and "Traceback" not in said


@pytest.mark.slow
@pytest.mark.parametrize("part", ["tests", "matrix", "benchmarks", "batch", "plan"])
def test_every_part_of_the_check_on_a_gpu_walks_through_on_a_cpu(tmp_path, part):
    run("gpu_check.py", "--dry_run", "--part", part, "--output", tmp_path)
    table = (tmp_path / f"{part}.md").read_text()
    assert table.startswith(f"## {part}: 0 failed") and "| ok |" in table
    assert table in (tmp_path / "page.md").read_text()
    if part == "matrix":
        cells = [line.split(" | ") for line in table.splitlines() if line.startswith("| bf16 |")]
        assert len(cells) == 6
        assert len({f"{float(cell[4]):.2f}" for cell in cells}) == 1  # alone, on two, sharded, compiled


def cells_that_fail() -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    import gpu_check as script

    folder = Path(sys.argv[1])
    part = script.Part("plan", script.TINY, folder, folder, devices=0)
    part.ends = time.monotonic() + 5  # time enough to start
    print(part.call("late", ["bash", "-c", "sleep 600 & echo $! > " + str(folder / "child") + "; wait"]))
    child = int((folder / "child").read_text())
    for _ in range(300):  # a process that was killed is there for a moment
        has_ended = not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
        if has_ended:
            break
        time.sleep(0.1)
    print("child ended", has_ended)
    part.ends = time.monotonic()
    print(part.call("never", ["touch", str(folder / "never")]))
    part.ends += 600
    failure, _ = part.call("broken", [sys.executable, "-c", "raise RuntimeError('too | large')"])
    part.row("broken", failure=failure)


def test_a_cell_that_fails_stands_on_the_page_and_none_starts_after_its_parts_time(tmp_path):
    output = run_python(cells_that_fail, tmp_path)
    assert "stopped after 5 s" in output and "child ended True" in output
    assert "no time was left for it" in output and not (tmp_path / "never").exists()
    page = (tmp_path / "plan.md").read_text()
    assert page.startswith("## plan: 1 failed") and "**FAILED**: exit code 1: RuntimeError: too \\| large |" in page

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

from hf_dist_ext import cli
from tests.distributed.forked import by_launch, launch, run_python, train_hf
from tests.launching import ROOT

CODE = Path(sysconfig.get_path("stdlib")) / "asyncio"  # a few hundred functions instead of the whole library
RATIOS = (
    "cached_over_plain",
    "cached_over_sentence_transformers_cached",
    "cached_peak_memory_over_sentence_transformers_cached",
    "loss_stage_over_sentence_transformers",
    "cached_packed_over_padded",
    "fixed_no_graph_over_plain",
    "fixed_all_graphs_over_plain",
    "activation_memory_16384_over_256",
)

pytest.importorskip("matplotlib")


def run(script: str, *options: object, code: int = 0) -> str:
    """What the script prints, run as the command would run it, in a process that has imported everything already."""
    return run_python(ROOT / "scripts" / script, *options, code=code)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory) -> tuple[dict, Path]:
    pytest.importorskip("sentence_transformers")
    folder = tmp_path_factory.mktemp("comparison")
    options = ("--preset", "smoke", "--turns", "1", "--code_root", CODE, "--output", folder)
    run("benchmark_gradient_cache.py", *options)
    return json.loads((folder / "results.json").read_text()), folder


def test_the_comparison_writes_every_ratio_and_its_plots(comparison):
    report, folder = comparison
    for name in RATIOS:
        assert math.isfinite(report["ratios"][name]) and report["ratios"][name] > 0, name
    for name in ("time_smoke.png", "memory_smoke.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG"), name


def test_the_comparison_keeps_every_raw_figure(comparison):
    report, _ = comparison
    (size,) = report["sizes"]
    for contestant in size["text"]["contestants"].values():
        assert len(contestant["seconds"]) == len(contestant["cpu_seconds"]) == 1
        assert contestant["peak_bytes"] > 0 and contestant["tokens"] > 0
    assert [point["pairs"] for point in size["curves"]] == [8, 16]


def test_all_contestants_compute_the_plain_steps_gradient(comparison):
    report, _ = comparison
    errors = report["sizes"][0]["float64_gradient_error"]
    assert len(errors) == 4 and max(errors.values()) < 1e-10, errors


def test_activations_do_not_grow_with_the_batch(comparison):
    report, _ = comparison
    points = report["sizes"][0]["flat"]
    assert points[0]["pairs"] < points[-1]["pairs"]
    assert points[0]["activation_bytes"] == points[-1]["activation_bytes"] > 0


def test_packed_chunks_compute_real_tokens_only(comparison):
    report, _ = comparison
    text = report["sizes"][0]["text"]
    ours, padded = (text["contestants"][name]["tokens"] for name in ("ours", "ours, padded"))
    assert padded > ours == 2 * text["real_tokens"] > 0


def test_all_graphs_kept_compute_every_token_once(comparison):
    report, _ = comparison
    fixed = report["sizes"][0]["fixed"]["contestants"]
    assert fixed["ours, all graphs kept"]["tokens"] == fixed["plain"]["tokens"] > 0
    assert fixed["ours"]["tokens"] == 2 * fixed["plain"]["tokens"]


def test_packed_chunks_are_compared_with_padded_ones():
    sizes = ("--models", "width 64, 1 layer", "--lengths", "64", "4 to 20", "--pairs", "4", "--turns", "1")
    *_, equal, ragged = run("benchmark_packing.py", *sizes, "--code_root", CODE).splitlines()
    assert " 0.000 " in equal and " 0.000 " not in ragged


@pytest.mark.slow
def test_compiled_steps_are_counted_and_compared_with_uncompiled_ones():
    sizes = "--width 16 --pairs 6 --rows 14 --length 32 --chunk_rows 4 --turns 1 --backend eager".split()
    said = run("benchmark_compile.py", *sizes, "--code_root", CODE).splitlines()
    counted = next(i for i, line in enumerate(said) if line.startswith("graphs"))
    any_shape, chosen, each = ([int(count) for count in line[30:].split()] for line in said[counted + 1 : counted + 4])
    assert any_shape == [2, 2] and 2 < chosen[-1] < each[-1]
    assert said[-1].split()[:3] == ["any", "shape", "2"] and len(said[-1].split()) == 7


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
    output = run_python(source, "--presets", "multi_gpu_ddp", "--repeats", 1, *sizes, "--output", tmp_path)
    report = json.loads((tmp_path / "results.json").read_text())
    alone, two = report["results"]
    assert (alone["processes"], two["processes"]) == (1, 2)
    assert two["wrapper"] == "DistributedDataParallel" and two["contrastive_batch"] == 32
    assert two["efficiency"] == pytest.approx(two["pairs_per_second"] / alone["pairs_per_second"] / 2)
    # One process sends nothing; two send at least the gradients of every weight.
    assert alone["collectives"] == {} and two["collectives"]["gloo:all_reduce"]["bytes"] > 4 * 3000 * 32
    assert report["what_limits"][0] in output
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


def test_the_order_is_numbered_once_and_drawn_by_every_process(tmp_path):
    output = run("benchmark_order.py", "--rows", 120_000, "--output", tmp_path / "results.json")
    report = json.loads((tmp_path / "results.json").read_text())
    first, later = report["results"]
    assert "120,000 rows, later start" in output and len(first["all"]) == len(later["all"]) == 2
    for found in (*first["all"], *later["all"]):
        assert found["file that all map, MB"] == 4 * 2 * 120_000 / 1e6 and found["order, CPU seconds"] > 0


every_training = pytest.mark.parametrize(
    "comparison", ["tiny", *[pytest.param(name, marks=pytest.mark.slow) for name in ("mnr", "cosent", "gist", "late")]]
)


@every_training
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


@pytest.mark.parametrize("words", [("benchmark_gradient_cache.py", "--preset", "gpu"), ("gpu_check.py",)])
def test_what_needs_a_gpu_says_so_in_one_line(words):
    said = run(*words, code=2)
    assert "no CUDA device" in said and "Traceback" not in said


def test_a_streams_workers_are_compared_side_by_side(tmp_path):
    sizes = ("--shards", 2, "--rows", 8, "--side", 32, "--batch", 4, "--batches", 2, "--turns", 1)
    sizes += ("--step", 0.05)  # beside which the waits of a busy machine are short
    output = run("benchmark_streams.py", "--workers", 0, 1, *sizes, "--folder", tmp_path)
    lines = [line.split("|")[1:4] for line in output.splitlines() if line.startswith("| ")]
    assert [int(workers) for workers, *_ in lines[1:]] == [0, 1] and all(float(ratio) > 0 for *_, ratio in lines[1:])


def check_of_forked_runs() -> None:
    """scripts/gpu_check.py; runs of one process are forked, and what has several or checkpointing fails."""
    sys.path.insert(0, str(ROOT / "scripts"))
    import gpu_check as script

    def started(command: list[str], more: dict, output: Path, log: Path, seconds: float) -> int:
        path = command[command.index("--config") + 1]
        fields = json.loads(Path(path).read_text())
        output.write_text("")
        log.write_text("a line\nRuntimeError: too | large\nand a later line\n")
        if "plan" in command:
            output.write_text(run_python(lambda: cli.main(command[3:])).partition("\n}")[0] + "\n}")
            return 0
        if fields.get("gradient_checkpointing") or fields["num_processes"] > 1:
            return 1
        launch("python", 1, train_hf, "--config", path)
        return 0

    script.started = started
    script.main()


def test_the_check_on_a_gpu_shows_what_failed_and_ends_with_1(tmp_path):
    output = run_python(check_of_forked_runs, "--dry_run", "--part", "plan", "--output", tmp_path, code=1)
    page = (tmp_path / "page.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| tiny |")]
    spreads, failed = ("one process", "DDP", "FSDP2"), "**FAILED**: exit code 1: RuntimeError: too \\| large"
    assert [row[1:3] for row in rows] == [[kind, one] for kind in ("plain", "checkpointing") for one in spreads]
    assert [row[-1] for row in rows] == ["ok", *[failed] * 5]
    assert all(float(row[3]) > 0 for row in rows) and {row[4] for row in rows} == {"not counted on a CPU"}
    assert "5 failed" in output and "5 failed" in page and "no figure here says anything about a GPU" in page
    assert "not installed: " in page and page.count("Not run.") == 4 and "## Large batches" in page


@pytest.mark.slow
@pytest.mark.parametrize("part", ["tests", "matrix", "benchmarks", "batch", "plan"])
def test_every_part_of_the_check_on_a_gpu_walks_through_on_a_cpu(tmp_path, part):
    run("gpu_check.py", "--dry_run", "--part", part, "--output", tmp_path)
    table = (tmp_path / f"{part}.md").read_text()
    assert " 0 failed." in table and "| ok |" in table.replace("skipped: needs a CUDA device", "ok")
    assert table in (tmp_path / "page.md").read_text()
    if part == "matrix":
        cells = [line.split(" | ") for line in table.splitlines() if line.startswith("| bf16 |")]
        assert len(cells) == 6 and "fp16 and FlashAttention need a GPU" in table
        assert len({f"{float(cell[4]):.2f}" for cell in cells}) == 1  # alone, on two, sharded, compiled


def cells_without_time() -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    import gpu_check as script

    folder = Path(sys.argv[1])
    part = script.Part("plan", "a machine", folder, folder, script.TINY, devices=1)
    print(part.call("late", ["bash", "-c", "sleep 600 & echo $!; wait"], 5.0))  # time enough to start
    child = int((folder / "logs" / "plan-late.out").read_text())
    for _ in range(300):  # a process that was killed is there for a moment
        has_ended = not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
        if has_ended:
            break
        time.sleep(0.1)
    print("child ended", has_ended)
    print("quick", sum(seconds for *_, seconds in script.PARTS.values()) * script.QUICK.share <= 600)
    part.began -= part.seconds
    print(part.call("never", ["touch", str(folder / "never")], 1.0))


def test_a_cell_of_the_check_ends_with_its_time_and_none_starts_after_its_parts(tmp_path):
    output = run_python(cells_without_time, tmp_path)
    assert "stopped after 5 s: " in output and "child ended True" in output
    assert "quick True" in output
    assert "not run: the 400 seconds of this part were over" in output and not (tmp_path / "never").exists()

"""A run from a file says a line per logged step, and all of it is in metrics.jsonl."""

import sys
from types import SimpleNamespace

import pytest

from hf_dist_ext.training import console
from tests.test_train_script import main, run_file  # noqa: F401


def test_each_logged_step_is_a_line_and_no_bar_is_drawn_where_there_is_no_terminal(main, run_file, capsys):  # noqa: F811
    main(["--config", run_file(), "--disable_tqdm", "false", "--eval_strategy", "epoch"])
    said = capsys.readouterr()
    lines = said.out.splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    trained = [line for line in steps if "evaluation" not in line]
    assert [line.split("  ")[0] for line in trained] == ["step 1/3", "step 2/3", "step 3/3"]
    assert all("loss " in line and "rows/s" in line and "left 0:" in line for line in trained)
    assert "evaluation: loss " in steps[0] and "mrr@10" in steps[0]
    assert max(map(len, steps)) < 120 and not any(line.startswith("{") for line in lines)
    assert {"data    32 rows, 8 to evaluate on", "chunks  5 rows in memory at a time"} <= set(lines)
    assert "losses  16 rows per device while training, 8 in evaluations: do not compare them" in lines
    assert "it/s" not in said.err and "model shards" not in said.err


@pytest.fixture
def told():
    """told(logs, is_first): the console after a run began, and one logged line of it."""
    args = SimpleNamespace(disable_tqdm=False, output_dir="out")

    def told(logs: dict, is_first: bool = True) -> console.Console:
        teller = console.Console(lambda: {"data": "3 rows"})
        state = SimpleNamespace(is_world_process_zero=is_first, global_step=5, max_steps=40, num_train_epochs=2)
        teller.on_train_begin(args, state, None)
        teller.on_log(args, state, None, logs=logs)
        return teller

    return told


def test_a_stream_without_a_length_has_no_number_of_epochs(told, capsys):
    state = SimpleNamespace(is_world_process_zero=True, global_step=0, max_steps=40, num_train_epochs=sys.maxsize)
    args = SimpleNamespace(disable_tqdm=True, output_dir="out")
    console.Console(lambda: {}).on_train_begin(args, state, None)
    assert "steps   40\n" in capsys.readouterr().out


def test_other_processes_are_silent(told, capsys):
    told({"loss": 1.0}, is_first=False)
    assert capsys.readouterr().out == ""


def test_many_figures_take_several_lines_and_figures_of_speed_none(told, capsys):
    told(
        {f"eval_figure{n}": n / 7 for n in range(8)}
        | {"eval_runtime": 3.0, "eval_steps_per_second": 2.0, "epoch": 1.0}
    )
    lines = capsys.readouterr().out.splitlines()[-2:]
    assert (
        lines[0].startswith("step  5/40  evaluation: figure0 0 ") and lines[1].lstrip() == "figure6 0.8571  figure7 1"
    )
    assert lines[1].index("figure6") == lines[0].index("figure0")
    told({"eval_runtime": 3.0})
    assert "evaluation" not in capsys.readouterr().out


def test_figures_that_are_hidden_are_not_printed(capsys):
    assert (
        console.evaluation_lines("step 1/2", {"eval_a": 1.0, "eval_b": 2.0}, "b".__eq__) == "step 1/2  evaluation: a 1"
    )
    assert console.evaluation_lines("step 1/2", {"eval_b": 2.0}, "b".__eq__) == ""


def test_one_bar_is_drawn_on_a_terminal(told, monkeypatch, capsys):
    monkeypatch.setattr(console.sys.stderr, "isatty", lambda: True)
    teller = told({"loss": 1.0})
    state = SimpleNamespace(global_step=6)
    teller.on_step_end(None, state, None)
    teller.on_prediction_step(None, state, None)
    assert (teller.bar.n, teller.bar.total, teller.bar.desc) == (6, 40, "evaluating: ")
    teller.on_step_end(None, state, None)
    assert teller.bar.desc == ""
    teller.on_train_end(None, state, None)
    assert teller.bar is None


@pytest.mark.parametrize("max_steps", [10**15, 10**30])
def test_a_run_without_an_end_in_sight_is_logged_too(max_steps, capsys):
    teller = console.Console(dict)
    state = SimpleNamespace(is_world_process_zero=True, global_step=0, max_steps=max_steps, num_train_epochs=2)
    teller.on_train_begin(SimpleNamespace(disable_tqdm=True, output_dir="out"), state, None)
    state.global_step = 1
    teller.on_log(None, state, None, logs={"loss": 1.0})
    assert "loss 1  left " in capsys.readouterr().out

"""A run says what makes it slow, by its own figures, and which field changes it."""

import re

import pytest

from hf_dist_ext.training import console
from hf_dist_ext.training.console import why_slow
from tests.test_train_script import main, run_file  # noqa: F401

GIB = 2**30
FACTS = {
    "workers": 2, "processes": 1, "device_bytes": 80 * GIB, "is_sharded": False, "trained_parameters": 10**10,
    "frozen_bytes": 0,
}  # fmt: skip
WELL = {
    "seconds_data": 0.01, "seconds_encode": 0.3, "seconds_loss": 0.05, "seconds_replay": 0.5,
    "seconds_last_backward": 0.07, "seconds_optimizer": 0.07, "num_chunks": 8.0, "tokens_per_chunk": 4096.0,
    "memory_share": 0.7, "padding_share": 0.1,
}  # fmt: skip


@pytest.mark.parametrize("figures, facts, words", [
    ({"seconds_data": 0.45}, {}, "waited for data in 31% of the time: raise dataloader_num_workers (now 2)"),
    ({"seconds_last_backward": 3.0}, {"processes": 8}, "reducing gradients took 75% of the time"),
    ({"seconds_last_backward": 3.0}, {}, None),
    ({"scaling_efficiency": 0.61}, {"processes": 8}, "scaling efficiency is 61%"),
    ({"scaling_efficiency": 0.9}, {"processes": 8}, None),
    ({}, {"is_sharded": True, "trained_parameters": 10**8}, "FSDP gathers a model that takes 1.5 GiB of the 80 GiB"),
    ({}, {"is_sharded": True}, None),
    ({}, {"is_sharded": True, "trained_parameters": 10**8, "device_bytes": 0}, None),
    ({"tokens_per_chunk": 100.0, "memory_share": 0.2}, {}, "chunks of 100 tokens leave the device idle, and 80% of"),
    ({"tokens_per_chunk": 100.0}, {}, None),
    ({"padding_share": 0.4}, {}, "40% of the computed tokens were padding"),
])  # fmt: skip
def test_a_figure_that_stands_out_is_told_with_the_field_that_changes_it(figures, facts, words):
    said = why_slow(WELL | figures, **FACTS | facts)
    assert len(said) == (words is not None)
    assert words is None or said[0].startswith(words)


def test_figures_that_a_run_does_not_log_say_nothing():
    assert why_slow({}, **FACTS) == why_slow({"loss": 1.0}, **FACTS | {"is_sharded": True}) == []


def test_a_run_says_at_its_end_what_made_it_slow(main, run_file, capsys, monkeypatch):  # noqa: F811
    monkeypatch.setattr(console, "SHORT", 0)
    monkeypatch.setattr(console, "WAITS", 0.0)
    main(["--config", run_file(), "--logging_steps", "1"])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("slow  ")]
    assert "waited for data in " in line and "dataloader_num_workers (now 0)" in line


def test_a_long_run_says_it_once_an_hour_of_the_figures_since_the_last_time(main, run_file, capsys, monkeypatch):  # noqa: F811
    heard = []
    monkeypatch.setattr(console, "HOUR", 0)
    monkeypatch.setattr(console, "SHORT", float("inf"))
    monkeypatch.setattr(console, "why_slow", lambda figures, **of: heard.append(figures.get("loss")) or ["too slow"])
    main(["--config", run_file(), "--logging_steps", "1", "--max_steps", "3"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("slow  ", "step "))]
    told = [
        (loss[1], after)
        for line, after in zip(lines, lines[1:], strict=False)
        if (loss := re.match(r"step +\d/3  loss (\S+)", line))
    ]
    assert len(told) == 3 and {line for _, line in told} == {"slow    too slow"}
    assert [loss for loss, _ in told] == [f"{loss:.4g}" for loss in heard if loss is not None], "a step's own figures"

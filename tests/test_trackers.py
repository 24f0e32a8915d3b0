"""Trackers: what arrives in them is what `metrics.jsonl` holds. Those that are not installed are left out, by name."""

import importlib
import importlib.util
import json
import re
import sqlite3
from collections import defaultdict
from pathlib import Path

import pytest

from hf_dist_ext.run.read import load_run
from hf_dist_ext.tasks.parts import make_arguments
from tests.test_train_script import main, run_file  # noqa: F401, fixtures

TRACKERS = ("tensorboard", "wandb", "trackio")
INSTALLED = [name for name in TRACKERS if importlib.util.find_spec(name)]
OF_THE_END = [f"train/{name}" for name in (
    "train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss", "total_flos",
)]  # fmt: skip
Figures = dict[str, list[tuple[int, float]]]


def by_name(rows: list[dict], step: str) -> Figures:
    found = defaultdict(list)
    for row in rows:
        for name, value in row.items():
            if name != step and not name.startswith("_") and isinstance(value, (int, float)):
                found[name].append((row[step], pytest.approx(value, rel=1e-6)))
    return dict(found)


def of_file(folder: Path) -> Figures:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    there = lambda name: f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}"  # noqa: E731
    return by_name([{there(name): value for name, value in row.items()} for row in rows], "train/step")


def of_tensorboard(folder: Path) -> Figures:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = defaultdict(list)
    for path in sorted(folder.rglob("events.out*")):
        events = EventAccumulator(str(path), {"scalars": 0}).Reload()
        for name in events.Tags()["scalars"]:
            found[name] += [(event.step, event.value) for event in events.Scalars(name)]
    return dict(found)


def of_wandb(folder: Path) -> Figures:
    """An offline run is a file of records, cut into parts at blocks of 32 KiB: checksum, length, kind, bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    data, at, parts, rows = path.read_bytes(), 7, b"", []
    while at < len(data):
        left = 32768 - at % 32768
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6 : at + 7]
        if left < 7 or kind in (b"", b"\0"):
            at += left
            continue
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (b"\1", b"\4"):  # whole, or the last part
            record, parts = Record.FromString(parts), b""
            items = [("/".join([item.key] if item.key else item.nested_key), item) for item in record.history.item]
            rows += [{name: json.loads(item.value_json) for name, item in items}] if items else []
    return by_name(rows, "train/global_step")


def of_trackio(folder: Path) -> Figures:
    with sqlite3.connect(folder / "notes.db") as file:
        rows = file.execute("select run_name, metrics from metrics order by id").fetchall()
    assert len({name for name, _ in rows}) == 1, "the evaluation after training belongs to the same run"
    return by_name([json.loads(row) for _, row in rows], "train/global_step")


@pytest.fixture
def reported(main, run_file, tmp_path, monkeypatch) -> Path:  # noqa: F811
    """The folder of a run that reports to all trackers that are installed."""
    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "TRACKIO_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    main(["--config", run_file(report_to=INSTALLED, project="notes", eval_strategy="steps", eval_steps=2)])
    for name in {"wandb", "trackio"} & set(INSTALLED):  # which write the rest when the process ends
        importlib.import_module(name).finish()
    return tmp_path


@pytest.mark.skipif("tensorboard" not in INSTALLED, reason="TensorBoard is not installed")
def test_what_arrives_in_trackers_is_what_the_file_holds(reported):
    written = of_file(reported / "out")
    assert len(written["train/loss"]) == 3 and len(written["eval/mrr@10"]) == 4 and written.keys() >= set(OF_THE_END)
    assert of_tensorboard(reported / "out") == written
    for name in OF_THE_END:  # of the summary, in the others
        del written[name]
    for name, figures in (("wandb", of_wandb), ("trackio", of_trackio)):
        if name in INSTALLED:
            assert figures(reported) == written, name


def test_figures_in_trackio_go_to_a_space_only_where_one_is_named(run_file):  # noqa: F811
    """Trainer's callback would make one, open to all, when the model is pushed."""
    named = {"run_name": "mine", "trackio_static_space_id": "me/figures"}
    alone, asked = (
        make_arguments(load_run(["--config", run_file(report_to="trackio", **more)])) for more in ({}, named)
    )
    assert alone.trackio_static_space_id is False and re.fullmatch(r"out-\d{8}-\d{6}", alone.run_name)
    assert (asked.trackio_static_space_id, asked.run_name) == ("me/figures", "mine")

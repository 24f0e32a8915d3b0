"""Causal language models with their own loss, in pipelines whose layers are split (tensor parallelism) or whose copies
shard their stages (FSDP2). What pipelines of them do alone is in test_causal_pipeline.py; here is that it holds so."""

import functools
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from tests.distributed import causal_pipeline_worker as worker
from tests.distributed.forked import launch
from tests.parity import causal_worker
from tests.parity.exactness_table import LAYOUTS, MESHES, measure_causal
from tests.tiny_models import needs_tensor_parallelism

pytestmark = needs_tensor_parallelism
slow = pytest.mark.slow
FOUR = [layout for layout, (_, processes, *_) in LAYOUTS.items() if processes == 4]


def check(errors: dict) -> None:
    assert not {name: found for name, found in errors.items() if not found["error"] <= found["tolerance"]}


def test_gradients_are_those_of_one_process():
    names = ["causal LM, tied word embeddings", "causal LM, LoRA"]
    errors = measure_causal("PP 2 x TP 2, 1f1b", *names)
    assert set(errors) == set(names)
    check(errors)


@slow
@pytest.mark.parametrize("run", MESHES)
def test_gradients_are_those_of_one_process_in_every_layout(run):
    errors = measure_causal(run)
    assert len(errors) == len(causal_worker.CASES)
    check(errors)


@functools.cache
def folder(layout: str) -> TemporaryDirectory:
    """Of the runs of the worker."""
    preset, processes, fields, _ = LAYOUTS[layout]
    made = TemporaryDirectory()
    parts = ["resumed", "elsewhere", "adapters", "frozen", "head", "compared", "not_finite", "drawn"]
    launch(preset, processes, worker.main, made.name, "--parts", *parts, "--fields", json.dumps(fields))
    if layout == "PP 2 x TP 2":
        launch("python", 1, worker.main, made.name, "--parts", "alone")
    return made


def found(layout: str, file: str = "found") -> dict:
    return json.loads(Path(folder(layout).name, f"{file}.json").read_text())


KINDS = [(layout, kind) for layout in FOUR for kind in ("resumed", "adapters")]


@slow
@pytest.mark.parametrize(("layout", "kind"), KINDS)
def test_a_resumed_run_ends_with_the_weights_of_the_uninterrupted_one(layout, kind):
    run = found(layout)[kind]
    assert run["moved"] > 1e-2
    assert run["equal"] and run["losses_equal"] and run["committed"] == ""


@slow
@pytest.mark.parametrize(("layout", "kind"), KINDS)
def test_the_folder_of_the_end_is_whole(layout, kind):
    run = found(layout)[kind]
    assert run["weights_equal"] and "lm_head.weight" not in run["keys"] and run["tied"]
    assert run["logits_differ"] < 1e-6 and run["unlabelled"]


@slow
@pytest.mark.parametrize("layout", FOUR)
def test_copies_of_a_tied_weight_are_one(layout):
    assert found(layout)["drawn"] == {"before": True, "after": True}
    assert found(layout)["compared"]["copies_equal"]


@slow
@pytest.mark.parametrize("layout", FOUR)
def test_checkpoints_of_frozen_parts_are_resumed_and_taken(layout):
    for kind in ("frozen", "head"):
        run = found(layout)[kind]
        assert run["equal"] and run["taken"] and run["moved"]
    assert found(layout)["head"]["saved"] == ["model.embed_tokens.weight"]


@slow
@pytest.mark.parametrize("layout", FOUR)
def test_a_checkpoint_is_read_by_processes_that_have_other_stages(layout):
    assert found(layout)["elsewhere"] == {"weights": True, "moments": True, "moved": True}


@slow
@pytest.mark.parametrize("layout", FOUR)
def test_an_update_whose_loss_is_not_finite_is_skipped_on_all(layout):
    assert found(layout)["not_finite"] == {"skipped_once": True, "is_finite": True}


@slow
def test_a_run_whose_layers_are_split_is_that_of_one_process():
    ours, alone = found("PP 2 x TP 2")["compared"], found("PP 2 x TP 2", file="alone")
    for name in ("eval_loss", "eval_target"):
        assert abs(alone["evaluation"][name]) > 0.01
        assert ours["evaluation"][name] == pytest.approx(alone["evaluation"][name], rel=1e-9)
    assert ours["tokens"] == alone["tokens"] > 0
    for mine, theirs in zip(ours["losses"], alone["losses"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6)  # Trainer adds losses up in float32
    mine, theirs = (torch.load(Path(folder("PP 2 x TP 2").name, of, "weights.pt")) for of in ("compared", "alone"))
    assert mine.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert (mine[name] - weight).abs().max() <= 1e-10, name

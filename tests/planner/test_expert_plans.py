"""Runs and machines for which an expert knows the answer: `tests/plans/*.json`, each with the reason in a sentence.

A case is a run file ("run", or "file" of configs/plan with "fields" changed), the machine as the command's options,
and what must come out: a strategy (null: nothing fits), a preset, fields to set, part of the command or of a reason.
"""

import json
from pathlib import Path

import pytest

from hf_dist_ext.planner.choose import make_plan
from hf_dist_ext.planner.devices import hardware_of
from tests.planner.test_choose import make_run  # noqa: F401, a fixture

ROOT = Path(__file__).parents[2]
CASES = sorted(ROOT.joinpath("tests", "plans").glob("*.json"))


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_the_plan_is_the_one_that_an_expert_gives(make_run, path):  # noqa: F811
    case = json.loads(path.read_text(encoding="utf-8"))
    content = case.get("run") or json.loads(ROOT.joinpath("configs", "plan", case["file"]).read_text(encoding="utf-8"))
    content |= case.get("fields", {})
    machine = {"memory_gib": None, **case["machine"]}
    plan = make_plan(make_run(content.pop("model_config"), **content), hardware_of(**machine))
    said = "\n".join([case["why"], *plan.reasons])
    if "strategy" in case:
        assert (plan.best and plan.best.strategy.name) == case["strategy"], said
    if "preset" in case:
        assert plan.best.preset == case["preset"], said
    for name, value in case.get("set", {}).items():
        assert plan.changes[name] == value, said
    for name in case.get("sets", []):
        assert name in plan.changes, said
    assert case.get("command", "") in (plan.command if plan.best else ""), said
    assert case.get("says", "") in "\n".join(plan.reasons)
    if plan.best is not None:
        assert plan.best.shown.total <= 0.92 * plan.hardware.memory_bytes
        assert case["why"].endswith(".") and plan.time.rows_per_second > 0

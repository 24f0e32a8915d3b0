"""Runs and machines for which an expert knows the answer: `tests/plans/*.json`, each with the reason in a sentence.

A case is a run file ("run", or "file" of configs/plan with "fields" changed; "files" says in which precision the
weights lie in a folder), the machine as the command's options, and what must come out: a strategy (null: none fits),
the GiB of a device to a tenth, fields to set, part of the command, and what the sentences say.
"""

import json
from pathlib import Path

import pytest

from hf_dist_ext.planner.catalog import GIB
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
    model = content.pop("model_config")
    if "files" in case:
        Path("model").mkdir()
        Path("model", "config.json").write_text(json.dumps(model | {"dtype": case["files"]}), encoding="utf-8")
        model, content["model_name_or_path"] = None, "model"
    machine = {"memory_gib": None, **case["machine"]}
    plan = make_plan(make_run(model, **content), hardware_of(**machine))
    reasons = "\n".join(plan.reasons)
    said = f"{case['why']}\n{reasons}"
    assert (plan.best and plan.best.strategy.name) == case["strategy"], said
    for part in case["says"]:
        assert part in reasons, said
    assert len(plan.reasons) >= 3 and case["why"].endswith(".")
    if plan.best is None:
        return
    assert plan.best.shown.total / GIB == pytest.approx(case["needs_gib"], rel=0.1), said
    assert plan.best.shown.total <= 0.92 * plan.hardware.memory_bytes and plan.time.rows_per_second > 0
    for name, value in case.get("set", {}).items():
        assert plan.changes[name] == value, said
    assert case.get("command", "") in plan.command, said

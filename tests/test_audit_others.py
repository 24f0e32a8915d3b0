"""What scripts/audit_others.py says of planted gradients, and that the page's table is of its making. No network."""

import math
import re
import sys

import pytest
import torch

import hf_dist_ext
from tests.launching import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

import audit_others  # noqa: E402

FULL = {
    "first": torch.tensor([[3.0, -1.0], [2.0, 0.5]], dtype=torch.double),
    "second": torch.tensor([1.0, 2.0, -4.0], dtype=torch.double),
    "scale": torch.tensor(0.25, dtype=torch.double),
    "rounding": torch.tensor([1e-15, -2e-15], dtype=torch.double),
    "frozen": None,
}
PLANTED = {
    "the same": ({}, 0.0, ""),
    "rounding": ({"rounding": torch.zeros(2)}, 1e-15, ""),
    "half of it": (
        {name: FULL[name] / 2 for name in ("first", "second", "scale")},
        0.5,
        "0.5 times the full gradient",
    ),
    "one parameter": ({"scale": FULL["scale"] * 3}, 2.0, "`scale`: 3 times the full gradient"),
    "all, and one": (
        {"first": FULL["first"] * 2, "second": FULL["second"] * 2},
        1.0,
        "`scale`: 1 times the full gradient; 2 times the full gradient",
    ),
    "rows swapped": ({"first": FULL["first"].flip(0)}, None, "most at `first`"),
    "one entry": ({"second": FULL["second"] + torch.tensor([0.0, 1e-6, 0.0])}, None, "most at `second`"),
    "not reached": ({"second": None}, 1.0, "`second`: 0 times the full gradient"),
    "reached": ({"frozen": torch.ones(2)}, None, "most at `frozen`"),
    "not finite": ({"first": FULL["first"] * math.nan}, math.inf, "most at `first`"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_gradients_are_told(fault):
    change, error, words = PLANTED[fault]
    difference = audit_others.compare({**FULL, **change}, FULL)
    assert difference.words == words
    assert (difference.error <= audit_others.EXACT) == (not words)
    assert error is None or difference.error == pytest.approx(error, abs=1e-12)


def test_nothing_to_compare_is_no_success():
    zeros = {name: gradient if gradient is None else gradient * 0 for name, gradient in FULL.items()}
    with pytest.raises(AssertionError, match="nothing to compare"):
        audit_others.compare(zeros, zeros)
    with pytest.raises(AssertionError, match="not in both: \\['second'\\]"):
        audit_others.compare({name: FULL[name] for name in FULL if name != "second"}, FULL)


def test_the_worst_step_stands_in_the_row():
    found = [audit_others.Difference(1e-15, ""), audit_others.Difference(0.5, "0.5 times the full gradient")]
    row = audit_others.row_of("library", "1.0", "DDP", 2, found, "by design")
    assert (
        audit_others.line_of(row) == "| library | 1.0 | DDP | 2 | 5.0e-01 | 0.5 times the full gradient; by design |"
    )


def version_of(library: str) -> str:
    asked = [re.fullmatch(r"[\w-]+(?:\[\w+\])?==(.+)", wanted) for wanted in audit_others.LIBRARIES[library]]
    return hf_dist_ext.__version__ if library == "hf_dist_ext" else asked[0].group(1)


def settings_of(cases, processes: int, monkeypatch) -> set[str]:
    monkeypatch.setattr(sys.modules["audit_others_cases"], "PROCESSES", processes)
    return {setting for setting, _, _ in cases()}


def test_the_pages_table_is_what_the_script_prints(monkeypatch):
    import audit_others_cases as cases

    page = (ROOT / "docs" / "exactness.md").read_text(encoding="utf-8")
    _, _, table = page.partition(f"{audit_others.table_of([])}\n")
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.partition("\n\n")[0].splitlines()]
    rows = [dict(zip(audit_others.COLUMNS, row, strict=True)) for row in cells]
    assert {row["library"] for row in rows} == set(audit_others.LIBRARIES)
    known = {
        (library, str(processes)): settings_of(made, processes, monkeypatch)
        for library, made in cases.CASES.items()
        if library in ("sentence-transformers", "hf_dist_ext")  # the others are not installed here
        for processes in (1, 2)
    }
    for row in rows:
        assert row["version"] == version_of(row["library"])
        row["largest relative error"] = float(row["largest relative error"])
        is_told = re.search(r"times the full gradient|most at `", row["remark"])
        assert (row["largest relative error"] > audit_others.EXACT) == bool(is_told), row
        assert row["setting"] in known.get((row["library"], row["processes"]), {row["setting"]}), row


def test_dropout_is_compared_with_the_masks_of_the_first_pass(monkeypatch, tmp_path):
    import audit_others_cases as cases

    monkeypatch.setitem(cases.FOLDERS, 0.1, str(tmp_path))
    cases.tiny_bert(0.1).save_pretrained(tmp_path)
    cases.tiny_tokenizer().save_pretrained(tmp_path)
    (measure,) = [measure for setting, measure, _ in cases.cases_of_ours() if setting == "dropout 0.1"]
    assert 0 < max(measure()).error < audit_others.EXACT

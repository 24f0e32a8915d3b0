"""The pictures beside a card: which points make which curve, and what is drawn."""

import importlib.util

import pytest

from hf_dist_ext.training import curves

HISTORY = [
    {"step": 0, "eval_mrr@10": 0.1, "eval_loss": 3.0, "eval_docs_cosine_ndcg@10": 0.2, "eval_once": 1.0},
    {"step": 4, "loss": 2.0},
    {"step": 4, "eval_mrr@10": 0.5, "eval_loss": 2.0, "eval_docs_cosine_ndcg@10": 0.6, "eval_hidden": 1.0},
    {"step": 8, "eval_mrr@10": 0.4, "eval_loss": 2.5, "eval_docs_cosine_ndcg@10": 0.5},
    {"step": 9, "train_runtime": 1.0},
    {"step": 9, "eval_mrr@10": 0.5, "eval_loss": 2.0, "eval_docs_cosine_ndcg@10": 0.6},
]
NAMES = ["loss", "mrr@10", "docs_cosine_ndcg@10", "once"]


@pytest.mark.parametrize("keeps_best", [False, True])
def test_each_set_is_a_panel_and_weights_of_an_earlier_step_are_no_point(keeps_best):
    panels = curves.panels_of(HISTORY, NAMES, ["docs"], keeps_best)
    last = [] if keeps_best else [(9, 0.5)]
    assert list(panels) == ["evaluation loss", "evaluation", "docs"]
    assert panels["evaluation"] == {"mrr@10": [(0, 0.1), (4, 0.5), (8, 0.4), *last]}
    assert list(panels["docs"]) == ["cosine_ndcg@10"] and list(panels["evaluation loss"]) == ["loss"]


def test_the_loss_of_a_set_is_not_drawn_beside_figures_between_0_and_1():
    history = [{"step": step, "eval_nli_loss": 3.0, "eval_nli_mrr@10": 0.5} for step in (0, 1)]
    assert curves.panels_of(history, ["nli_loss", "nli_mrr@10"], ["nli"], False) == {
        "nli loss": {"nli": [(0, 3.0), (1, 3.0)]},
        "nli": {"mrr@10": [(0, 0.5), (1, 0.5)]},
    }


def test_a_figure_stands_in_the_panel_of_its_own_set():
    history = [{"step": step, "eval_nq_mrr": 0.4, "eval_nq_hard_mrr": 0.2} for step in (0, 1)]
    assert curves.panels_of(history, ["nq_mrr", "nq_hard_mrr"], ["nq", "nq_hard"], False) == {
        "nq": {"mrr": [(0, 0.4), (1, 0.4)]},
        "nq_hard": {"mrr": [(0, 0.2), (1, 0.2)]},
    }


def test_a_figure_has_one_colour_in_all_panels_and_the_kept_step_a_line(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **more: drawn.append(figure))
    panels = {"evaluation": {"recall@1": [(0, 0.1), (4, 0.3)], "mrr@10": [(0, 0.2), (4, 0.5)]}}
    panels |= {f"docs{number}": {"cosine_mrr@10": [(0, 0.2), (4, 0.6)]} for number in range(3)}
    assert curves.draw_metrics(tmp_path, panels, {"docs1": 4, "evaluation": None})
    first, *others = drawn[0].axes
    assert [line.get_label() for line in first.lines] == ["mrr@10", "recall@1"], "as they end above each other"
    assert (
        {axes.lines[0].get_color() for axes in others} == {first.lines[0].get_color()} != {first.lines[1].get_color()}
    )
    assert [[line.get_label() for line in axes.lines[1:]] for axes in others] == [[], ["kept: step 4"], []]
    assert [axes.get_title() for axes in others] == ["docs0", "docs1", "docs2"]


@pytest.mark.parametrize("is_missing", [False, True])
def test_an_older_picture_goes_where_none_is_drawn(tmp_path, monkeypatch, is_missing):
    if is_missing:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in (curves.LOSS, curves.METRICS):
        (tmp_path / name).write_bytes(curves.MARK)
    points = [(0, 1.0), (1, 2.0)] if is_missing else [(0, 1.0)]
    assert not curves.draw_losses(tmp_path, {"": points})
    assert not curves.draw_metrics(tmp_path, {"evaluation": {"a": points}} if is_missing else {}, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("draw, name", [(curves.draw_losses, curves.LOSS), (curves.draw_metrics, curves.METRICS)])
def test_a_picture_that_somebody_put_there_is_neither_overwritten_nor_removed(tmp_path, caplog, draw, name):
    points = {"": [(0, 2.0), (4, 1.0)]}
    curve, more = (points, ()) if name == curves.LOSS else ({"evaluation": points}, ({},))
    assert draw(tmp_path, curve, *more) and draw(tmp_path, curve, *more), "the picture of an earlier run is replaced"
    assert not draw(tmp_path, {}, *more) and not (tmp_path / name).exists()
    (tmp_path / name).write_bytes(b"mine")
    assert not draw(tmp_path, curve, *more) and not draw(tmp_path, {}, *more)
    assert (tmp_path / name).read_bytes() == b"mine" and f"{name} is no picture of a run" in caplog.text

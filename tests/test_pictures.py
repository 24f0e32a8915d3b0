"""The pictures of README and the pages: drawn by scripts of the repository, from the figures that the pages show."""

import importlib.util
import json
import re

import pytest

from tests.launching import ROOT

pytest.importorskip("matplotlib")
IMAGES = sorted((ROOT / "docs" / "images").glob("*.png"))


def script(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pictures_are_small():
    assert len(IMAGES) > 2 and not [path.name for path in IMAGES if path.stat().st_size > 60_000]


def test_the_bars_are_the_figures_of_the_page():
    readme = script("plot_readme")
    page = readme.BENCHMARKS.read_text(encoding="utf-8")
    found = readme.cached_steps(page)
    assert set(readme.BARS) <= set(found) and len(set(found.values())) == len(found) > 4
    for name in readme.BARS:
        seconds, memory = re.search(
            rf"^\| {re.escape(name)} \| ([\d.]+) \|.*?\| \**([\d,.]+)\** \| [^|]*\|$", page, re.M
        ).groups()
        assert found[name] == (float(seconds), float(memory.replace(",", "")))


def test_the_curve_has_a_point_for_each_evaluation(tmp_path):
    readme = script("plot_readme")
    lines = [{"step": 0, "eval_mrr@10": 0.1}, {"step": 1, "loss": 2.0}, {"step": 6, "eval_mrr@10": 0.5}]
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert readme.retrieval(metrics) == ([0, 6], [0.1, 0.5])
    readme.main(["--metrics", str(metrics), "--output", str(tmp_path / "results.png")])
    assert (tmp_path / "results.png").stat().st_size > 10_000


def test_the_drawing_is_what_its_script_draws(tmp_path):
    from matplotlib import image

    drawn, kept = tmp_path / "gradient_cache.png", ROOT / "docs" / "images" / "gradient_cache.png"
    script("draw_gradient_cache").main(["--output", str(drawn)])
    ours, theirs = image.imread(drawn), image.imread(kept)
    assert ours.std() > 0.05 and ours.shape == theirs.shape
    assert abs(ours - theirs).mean() < 0.004  # another freetype shades the edges of letters otherwise

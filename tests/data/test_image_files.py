"""Names of pictures in the data: what they may name is confined to the folder of pictures."""

import json
from pathlib import Path

import datasets
import pytest
from PIL import Image

from hf_dist_ext.data.load import load_datasets
from hf_dist_ext.errors import UsageError
from hf_dist_ext.run.config import RunConfig


def load_pictures(tmp_path, names, max_bad_rows=0, **options):
    (tmp_path / "in").mkdir(exist_ok=True)
    for file in ("secret.png", "in/a.png", "in/b.png"):
        Image.new("RGB", (4, 4)).save(tmp_path / file)
    rows = [{"query": f"text {i}", "positive": name} for i, name in enumerate(names)]
    datasets.Dataset.from_list(rows).to_json(tmp_path / "rows.jsonl")
    run = RunConfig(
        dataset_name=str(tmp_path / "rows.jsonl"),
        image_columns=["positive"],
        image_folder=str(tmp_path / "in"),
        **options,
    )
    return load_datasets(run, max_bad_rows=max_bad_rows)


@pytest.mark.parametrize("folder, name", [("pictures", "a.png"), (None, "pictures/a.png"), (None, "~/pictures/a.png")])
def test_a_relative_name_is_the_picture_of_the_present_folder(tmp_path, monkeypatch, folder, name):
    rows = str(tmp_path / "rows.jsonl")
    Path(rows).write_text(json.dumps({"query": "text", "positive": name}))
    run = RunConfig(dataset_name=rows, image_columns=["positive"], image_folder=folder)
    for place, size in (("one", (1, 1)), ("two", (2, 2))):
        (tmp_path / place / "pictures").mkdir(parents=True)
        Image.new("RGB", size).save(tmp_path / place / "pictures" / "a.png")
        monkeypatch.chdir(tmp_path / place)
        monkeypatch.setenv("HOME", str(tmp_path / place))
        train, _ = load_datasets(run)
        monkeypatch.chdir(tmp_path)
        assert train[0]["positive"].size == size


@pytest.mark.parametrize("name", ["../secret.png", "{folder}/secret.png", "x/../../secret.png"])
def test_image_names_stay_inside_of_the_image_folder(tmp_path, name):
    name = name.format(folder=tmp_path)
    with pytest.raises(UsageError, match=r'row 1 \(counted from 0\), column "positive": .*outside of image_folder'):
        load_pictures(tmp_path, ["a.png", name])
    with pytest.raises(UsageError, match='column "positive": .*outside of image_folder'):
        stream, _ = load_pictures(tmp_path, ["a.png", name], streaming=True)
        list(stream)
    train, _ = load_pictures(tmp_path, ["a.png", f"{tmp_path}/in/b.png"])
    assert [row["positive"].size for row in train] == [(4, 4)] * 2


def test_a_missing_picture_is_one_of_max_bad_rows(tmp_path):
    with pytest.raises(UsageError, match=r"row 1 .*no image file"):
        load_pictures(tmp_path, ["a.png", "gone.png"])
    train, _ = load_pictures(tmp_path, ["a.png", "gone.png", "b.png"], max_bad_rows=1)
    assert len(train) == 3
    with pytest.raises(UsageError, match=r"cannot be used: 2 \(0, 1\), more than max_bad_rows=1"):
        load_pictures(tmp_path, ["gone.png", "gone too.png", "b.png"], max_bad_rows=1)


@pytest.mark.parametrize("streaming", [False, True])
def test_one_picture_is_not_in_training_and_in_evaluation(tmp_path, streaming):
    names = ["a.png", "b.png", "a.png", "a.png", "b.png"]
    train, evaluation = load_pictures(tmp_path, names, eval_holdout=3 if not streaming else 1, streaming=streaming)
    trained, held = ({row["query"] for row in part} for part in (train, evaluation))
    of = {name: {f"text {i}" for i, one in enumerate(names) if one == name} for name in names}
    assert trained and held and any(held <= rows and not trained & rows for rows in of.values())

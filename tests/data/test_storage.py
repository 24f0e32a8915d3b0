"""A file system that does not answer for a while is waited for; what the data may name is confined to its folder."""

import errno
import importlib.util
import json
import os
import subprocess
from pathlib import Path

import datasets
import pytest
import torch
from PIL import Image

from hf_dist_ext.data import storage
from hf_dist_ext.data.load import load_datasets
from hf_dist_ext.errors import StorageError, UsageError
from hf_dist_ext.failures import exit_on_usage_error
from hf_dist_ext.run.config import RunConfig
from tests.data.test_position import run
from tests.launching import ROOT
from tests.training.test_nonfinite import rows as regression_rows
from tests.training.test_nonfinite import train as train_regression


class Hanging(torch.utils.data.Dataset):
    """Row 4 cannot be read the first `times` times."""

    def __init__(self, times: int, number: int = errno.ESTALE):
        self.times, self.number = times, number

    def __len__(self):
        return 24

    def __getitem__(self, index):
        if index == 4 and self.times > 0:
            self.times -= 1
            raise OSError(self.number, os.strerror(self.number))
        return regression_rows({})[index]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(storage, "WAITS", (0.001, 0.002))


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_a_row_whose_storage_hangs_is_read_again_and_trained_on(tmp_path, number):
    found = train_regression(tmp_path, data=Hanging(2, number))
    expected = train_regression(tmp_path, data=Hanging(0))
    assert torch.equal(found.model.line.weight, expected.model.line.weight)


def test_a_storage_that_stays_silent_ends_the_run_with_a_code_of_its_own(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended, exit_on_usage_error():
        train_regression(tmp_path, data=Hanging(10**6), max_bad_rows=5)  # it is no bad row
    assert ended.value.code == 74 and "could not be read in 3 tries" in capsys.readouterr().err


def test_a_streams_block_is_read_again_from_its_state(tmp_path):
    failures = [3]

    def generate(shards):
        for shard in shards:
            for i in range(20):
                if (shard, i) == (1, 7) and failures[0]:
                    failures[0] -= 1
                    raise OSError(errno.EIO, "no answer")
                yield {"x": [float(20 * shard + i)]}

    def stream():
        return datasets.IterableDataset.from_generator(generate, gen_kwargs={"shards": [0, 1]})

    with pytest.raises(StorageError, match="reader 1 could not be read in 3 tries"):
        run(tmp_path, stream(), max_steps=10)
    failures[0] = 2
    assert sorted(run(tmp_path, stream(), max_steps=10).seen) == list(range(40)) and failures == [0]


def test_it_is_imported_and_reserves_where_linux_alone_has_a_call(tmp_path, monkeypatch):
    monkeypatch.delattr(errno, "EREMOTEIO")
    monkeypatch.delattr(os, "posix_fallocate")
    spec = importlib.util.spec_from_file_location("storage_of_macos", storage.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.reserve(tmp_path / "a", 8)
    assert module.is_passing(OSError(errno.EIO, "")) and not module.is_passing(OSError(errno.ENOENT, ""))


@pytest.mark.parametrize("code, is_queued", [(74, True), (75, True), (0, False), (1, False), (2, False)])
def test_the_slurm_script_requeues_a_job_whose_storage_hung(tmp_path, code, is_queued):
    for name, text in {"python": f"exit {code}", "scontrol": f'echo "$@" >> {tmp_path}/queued'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "17", "SLURM_SUBMIT_DIR": str(tmp_path)}
    done = subprocess.run(["bash", ROOT / "scripts/slurm/train.sbatch"], env=environment, timeout=300, check=False)
    assert done.returncode == code and (tmp_path / "queued").is_file() == is_queued


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

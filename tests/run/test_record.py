"""Run files to begin with train as they are, and an output_dir knows what its run was started with."""

import json
import os
import shutil
from functools import partial
from pathlib import Path

import pytest

from hf_dist_ext import cli, train
from hf_dist_ext.errors import UsageError
from hf_dist_ext.run import examples, record
from hf_dist_ext.run.read import load_run
from tests.distributed.forked import Run
from tests.run.test_config import make_checkpoint
from tests.tiny_models import model_config, tiny_pairs

QUIET = ["--disable_tqdm", "true", "--report_to", "none", "--use_cpu"]


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """begun(kind): the folder of an example, where this process is, without a launcher."""
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_", "WORLD_SIZE", "RANK"))]:
        monkeypatch.delenv(name)

    def begun(kind: str) -> Path:
        (tmp_path / kind).mkdir()
        monkeypatch.chdir(tmp_path / kind)
        cli.main(["init", kind])
        return tmp_path / kind

    return begun


def run_last_line(printed: str) -> None:
    """Run what a run says of its model at its end, as it is printed."""
    kind, _, command = printed.splitlines()[-1].partition(":")
    exec(compile(command.strip(), kind, "exec"), {})


@pytest.mark.parametrize("kind", [
    "text", pytest.param("image-text", marks=pytest.mark.slow), pytest.param("projector", marks=pytest.mark.slow)
])  # fmt: skip
def test_an_example_trains_as_it_is_and_goes_on_from_another_folder(begun, monkeypatch, tmp_path, capsys, kind):
    folder = begun(kind)
    rows = next(path for path in folder.glob("*.jsonl")).read_text(encoding="utf-8").splitlines()
    assert len(rows) == 10
    output = folder / "outputs" / f"{kind} of mine"
    cli.main(["train", "run.json", *QUIET, "--output_dir", str(output.relative_to(folder))])
    found = json.loads((output / "metrics.json").read_text(encoding="utf-8"))
    figure, sign = ("mrr@10", 1) if kind != "projector" else ("loss", -1)
    assert sign * found["after"][figure] > sign * found["before"][figure]
    run_last_line(capsys.readouterr().out)

    moved = tmp_path / "moved"
    shutil.copytree(output, moved)
    shutil.rmtree(moved / "checkpoint-40")
    (moved / "metrics.json").unlink()
    monkeypatch.chdir(tmp_path)
    cli.main(["resume", "moved", "--max_steps", "30", *QUIET])
    assert sorted(path.name for path in moved.glob("checkpoint-*")) == ["checkpoint-20", "checkpoint-30"]
    assert json.loads((moved / "metrics.json").read_text(encoding="utf-8"))["after"]
    assert Path.cwd() == folder


@pytest.mark.parametrize("kind", examples.KINDS)
def test_an_example_is_a_run_file_and_overwrites_nothing(begun, kind):
    begun(kind)
    assert load_run(["--config", "run.json"]).given["output_dir"] == f"outputs/{kind}"
    Path("run.json").write_text("mine", encoding="utf-8")
    Path("there").mkdir()
    Path("there", "run.json").write_text("mine", encoding="utf-8")
    with pytest.raises(SystemExit):
        cli.main(["init", kind, "there"])
    assert [path.name for path in Path("there").iterdir()] == ["run.json"]
    assert Path("there", "run.json").read_text(encoding="utf-8") == "mine"


def recorded(folder: Path, **fields) -> Path:
    given = {"dataset_name": "code-search", "model_config": {"model_type": "bert"}, "output_dir": str(folder)} | fields
    (folder.parent / "given.json").write_text(json.dumps(given), encoding="utf-8")
    record.write(load_run(["--config", str(folder.parent / "given.json")]))
    return folder


def test_what_cannot_be_resumed_is_refused_with_the_remedy(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match=r"no run\.json.*hf-dist train RUN\.json"):
        record.resume(tmp_path, [])
    (tmp_path / "runs").mkdir()
    with pytest.raises(UsageError, match="run does not exist.* Closest: .*runs"):
        record.resume(tmp_path / "run", [])
    (tmp_path / "start").mkdir()
    monkeypatch.chdir(tmp_path / "start")
    folder = recorded(tmp_path / "out", hub_token="secret")
    assert "secret" not in (folder / "run.json").read_text(encoding="utf-8")
    with pytest.raises(UsageError, match="hub_token is a secret"):
        record.resume(folder, [])
    monkeypatch.chdir(tmp_path)
    words = record.resume(Path("out"), ["--hub-token=secret"])
    assert Path.cwd() == tmp_path / "start" and str(folder) in words and words[-1] == "--hub-token=secret"
    monkeypatch.chdir(tmp_path)
    given = ["--hub_token=secret", "--output-dir", "other", "--resume_from_checkpoint=true"]
    assert record.resume(Path("out"), given) == ["--config", str(folder / "run.json"), *given], (
        "nothing is given twice"
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "start").rmdir()
    with pytest.raises(UsageError, match="which is gone"):
        record.resume(folder, ["--hub_token", "secret"])


def test_a_run_that_ended_before_its_first_checkpoint_begins_from_the_one_it_was_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_checkpoint(tmp_path / "first" / "checkpoint-2")
    folder = recorded(tmp_path / "out", resume_from_checkpoint="first/checkpoint-2", resume_weights_only=True)
    assert record.resume(folder, [])[-1] == "first/checkpoint-2"
    shutil.copytree(tmp_path / "first" / "checkpoint-2", folder / "checkpoint-2")
    assert record.resume(folder, [])[-1] == "auto"
    shutil.rmtree(folder / "checkpoint-2")
    content = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    (folder / "run.json").write_text(json.dumps(content | {"resume_from_checkpoint": True}))
    assert record.resume(folder, [])[-1] == "auto", "true is no path, but one of the folder, which has none any more"


def test_a_finished_run_without_a_checkpoint_is_not_begun_anew_by_a_resume(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = recorded(tmp_path / "out", save_strategy="no")
    assert record.resume(folder, [])[-1] == "auto", "it was killed before its end"
    (folder / "metrics.json").write_text("{}")
    with pytest.raises(UsageError, match="out has ended, and no checkpoint of it is there"):
        record.resume(folder, [])
    assert record.resume(folder, ["--overwrite_output_dir"])[-1] == "--overwrite_output_dir"


def start(say, run_file: Path) -> str:
    train.main(["--config", str(run_file)])
    return "ended well"


@pytest.mark.parametrize("mode, preset", [("ddp", "multi_gpu_ddp"), ("fsdp-full", None)])
def test_a_run_that_a_launcher_started_goes_on_with_as_many_processes(tmp_path, monkeypatch, mode, preset):
    monkeypatch.chdir(tmp_path)
    fields = tiny_pairs(tmp_path) | {
        "model_config": model_config("bert"), "per_device_train_batch_size": 4,
        "max_steps": 2, "report_to": "none", "use_cpu": True,
        "output_dir": str(tmp_path / "out"), "disable_tqdm": True, "save_strategy": "steps", "save_steps": 1,
    }  # fmt: skip
    (tmp_path / "given.json").write_text(json.dumps(fields))
    assert Run(mode, tmp_path / "log", partial(start, run_file=tmp_path / "given.json")).result() == "ended well"
    if preset is None:
        with pytest.raises(UsageError, match="as 2 processes .fsdp.* accelerate launch .* --num_processes 2 .*auto"):
            record.resume(tmp_path / "out", [])
    else:
        words = record.resume(tmp_path / "out", [])
        assert words[-4:] == ["--accelerate_config", preset, "--num_processes", "2"]
    given = ["--accelerate_config", "single_gpu", "--num_processes", "1"]
    assert record.resume(tmp_path / "out", given)[-4:] == given, "who says how is heard"


def test_env_shows_versions_and_no_secret(monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hidden")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    cli.main(["env"])
    said = capsys.readouterr().out
    assert "hidden" not in said and "HF_TOKEN: ***" in said and "NCCL_DEBUG: WARN" in said
    assert all(f"\n{name}: " in f"\n{said}" for name in ("torch", "transformers", "python", "visible GPUs"))

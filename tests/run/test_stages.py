"""Stages of a run file: what a stage may set, what errors say, and where a run goes on."""

import json
import shutil
from pathlib import Path

import pytest

from hf_dist_ext.checkpoints import manifest
from hf_dist_ext.checkpoints.folder import check_output_dir
from hf_dist_ext.errors import UsageError
from hf_dist_ext.run import record
from hf_dist_ext.run.read import load_run
from tests.run.test_config import make_checkpoint

STAGES = [
    {"name": "align", "trainable_modules": ["projector"], "learning_rate": 1e-3, "_": "a comment"},
    {"name": "tune", "trainable_modules": ["projector", "language"], "num_train_epochs": 2, "max_train_samples": 10},
]


@pytest.fixture
def plan(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def load(*words, stages=STAGES, **more):
        fields = {
            "task": "image-text-to-text", "model_name_or_path": "org/model", "dataset_name": "org/data",
            "learning_rate": 5e-4, "output_dir": "out", "stages": stages, **more,
        }  # fmt: skip
        Path("run.json").write_text(json.dumps(fields))
        return load_run(["--config", "run.json", *words])

    return load


def test_a_stage_sets_fields_over_the_file_and_the_command_line_over_both(plan):
    run = plan("--weight_decay", "0.5", "--max_train_samples", "7")
    align, tune = run.stages
    assert [stage.name for stage in run.stages] == ["align", "tune"]
    assert align.training["learning_rate"] == 1e-3 and tune.training["learning_rate"] == 5e-4
    assert tune.training["num_train_epochs"] == 2 and "num_train_epochs" not in align.training
    assert {stage.training["weight_decay"] for stage in run.stages} == {0.5}
    assert {stage.options.max_train_samples for stage in run.stages} == {7}
    assert [stage.training["output_dir"] for stage in run.stages] == ["out/stage_0_align", "out/stage_1_tune"]
    assert run.training["output_dir"] == "out" and align.options.stages is None
    assert plan("--output_dir", "elsewhere").stages[1].training["output_dir"] == "elsewhere/stage_1_tune"


@pytest.mark.parametrize("change, words", [
    ({"learning_rte": 1}, r'"learning_rte" in stage 1 "tune". Closest: "learning_rate"'),
    ({"learning_rate": -1}, r'learning_rate=-1 must be at least 0 .in stage 1 "tune"'),
    ({"temperature": 0.1}, r'stage 1 "tune": temperature=0.1 belongs to task "embedding"'),
    ({"bf16": True}, r'stage 1 "tune": bf16 holds for the whole run'),
    ({"stages": []}, r'stage 1 "tune": stages holds for the whole run'),
    ({"dataset_name": "data/gone.json"}, r'stage 1 "tune": dataset_name="data/gone.json": there is no such file'),
    ({"image_folder": "gone"}, r'stage 1 "tune": image_folder="gone": there is no such file or folder'),
    ({"eval_holdout": 3, "eval_split": "test"}, r'stage 1 "tune": eval_holdout takes rows'),
    ({"name": "a b"}, r'stages\[1\] has name="a b"'),
    ({"name": None}, r"stages\[1\] has name=null"),
    ({"name": "align"}, r'stages\[1\] is called "align", and so is stages\[0\]'),
])  # fmt: skip
def test_a_mistake_in_a_later_stage_names_it_before_anything_trains(plan, change, words):
    with pytest.raises(UsageError, match=words):
        plan(stages=[STAGES[0], STAGES[1] | change])


def test_stages_cannot_be_empty(plan):
    with pytest.raises(UsageError, match="stages=.* is empty"):
        plan(stages=[])


def finish(stage):
    folder = Path(stage.training["output_dir"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_text("weights")
    manifest.commit(folder, manifest.record(folder, ["model.safetensors"]), {})


def save(stage, step):
    make_checkpoint(Path(stage.training["output_dir"], f"checkpoint-{step}"), is_committed=True)


def test_a_run_goes_on_in_the_stage_where_it_stopped(plan):
    resumes = lambda run: [stage.training.get("resume_from_checkpoint") for stage in run.stages]  # noqa: E731
    resume = ("--resume_from_checkpoint", "true")
    with pytest.raises(UsageError, match="out holds no stage_"):
        plan(*resume)
    auto = ("--resume_from_checkpoint", "auto")
    assert resumes(plan(*auto)) == [None, None]
    Path("out/stage_0_align/checkpoint-2").mkdir(parents=True)  # torn
    assert resumes(plan(*auto)) == [None, None]
    check_output_dir(plan(*auto).training)
    save(plan().stages[0], 5)
    assert resumes(plan(*resume)) == resumes(plan(*auto)) == [True, None]
    check_output_dir(plan(*auto).training)
    finish(plan().stages[0])
    assert resumes(plan(*resume)) == [None, None], "the second stage has no checkpoint yet: it starts"
    torn = Path("out/stage_1_tune/checkpoint-2")
    save(plan().stages[1], 2)
    (torn / manifest.MANIFEST).rename(torn / manifest.UNFINISHED)
    assert resumes(plan(*resume)) == resumes(plan(*auto)) == [None, None], "its first save did not end: it starts"
    save(plan().stages[1], 3)
    assert resumes(plan(*resume)) == resumes(plan(*auto)) == [None, True]
    assert resumes(plan("--resume_from_checkpoint", "out/stage_1_tune/checkpoint-3")) == [
        None,
        "out/stage_1_tune/checkpoint-3",
    ]
    (Path("out/stage_0_align") / manifest.MANIFEST).unlink()
    with pytest.raises(UsageError, match='is of stage "tune", but stage "align" is not finished'):
        plan("--resume_from_checkpoint", "out/stage_1_tune/checkpoint-3")
    with pytest.raises(UsageError, match="lies in no stage of this run"):
        plan("--resume_from_checkpoint", "out/checkpoint-3")


@pytest.mark.parametrize("asked", ["true", "auto"])
def test_a_finished_stage_that_the_next_one_needs_and_that_is_gone_is_said(plan, asked):
    """Else the stage, and all after it, would be trained again over what they left."""
    resume = ("--resume_from_checkpoint", asked)
    first, second = plan(stages=[*STAGES, {"name": "end"}]).stages[:2]
    finish(first)
    save(second, 3)
    weights = Path("out/stage_0_align/model.safetensors")
    weights.unlink()
    with pytest.raises(
        UsageError, match='"align" was finished, .*: model.safetensors is missing. .*--overwrite_output'
    ):
        plan(*resume)
    save(first, 5)
    with pytest.raises(UsageError, match="give --resume_from_checkpoint out/stage_0_align/checkpoint-5 to end this"):
        plan(*resume)
    with pytest.raises(UsageError, match="model.safetensors is missing"):
        plan("--resume_from_checkpoint", "out/stage_1_tune/checkpoint-3")
    again = plan("--resume_from_checkpoint", "out/stage_0_align/checkpoint-5").stages
    assert [stage.is_done for stage in again] == [False, False]

    finish(second)
    run = plan(*resume, stages=[*STAGES, {"name": "end"}])
    assert [stage.is_done for stage in run.stages] == [True, True, False], "no later stage starts from the first"
    shutil.rmtree("out/stage_0_align")
    with pytest.raises(
        UsageError, match='"tune" is finished, but out/stage_0_align of stage "align" before it has no'
    ):
        plan(*resume)


def test_the_folder_of_a_staged_run_is_not_trained_into_by_another(plan):
    check_output_dir(plan().training)
    finish(plan().stages[0])
    with pytest.raises(UsageError, match="holds another run .stage_0_align.*--resume_from_checkpoint"):
        check_output_dir(plan().training)
    check_output_dir(plan("--resume_from_checkpoint", "true").training)
    check_output_dir(plan("--overwrite_output_dir").training)


def test_what_the_command_line_sets_over_stages_is_kept_by_a_resume(plan):
    first = plan("--learning_rate", "1e-5", "--num_train_epochs", "3")
    record.write(first)
    again = load_run(record.resume(Path("out"), []))
    of = lambda run: [(s.training["learning_rate"], s.training["num_train_epochs"]) for s in run.stages]  # noqa: E731
    assert of(again) == of(first) == [(1e-5, 3), (1e-5, 3)]
    assert "learning_rate" not in plan("--learning_rate", "null").stages[0].training
    with pytest.raises(UsageError, match="bf16 holds for the whole run"):
        plan("--bf16", stages=[STAGES[0] | {"bf16": True}])

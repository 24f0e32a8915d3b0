"""Stages as a user runs them: the handwritten digits in small, in this process and under FSDP."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import LlavaForConditionalGeneration

from hf_dist_ext import train
from hf_dist_ext.checkpoints import manifest
from hf_dist_ext.run.preemption import MARK, SIGNALS
from hf_dist_ext.tasks import stages
from hf_dist_ext.training.trainer import DistTrainer
from tests.distributed.forked import launch, train_hf
from tests.launching import ROOT
from tests.tiny_models import write_fields

CONFIG = ROOT / "configs" / "digits_projection.json"
EPOCHS = {"captions": 2, "align": 4, "tune": 1}


def write_config(folder: Path, **more) -> Path:
    own = {"logging_steps": 1000, "output_dir": str(folder / "out")}
    return write_fields(folder, **json.loads(CONFIG.read_text()) | own | more)


def main(*words) -> None:
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_", "WORLD_SIZE", "RANK"))]:
        del os.environ[name]
    train.main(["--config", *map(str, words)])


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return LlavaForConditionalGeneration.from_pretrained(folder).state_dict()


def changed(before: dict, after: dict) -> set[str]:
    """The parts of the model in which a weight differs."""
    assert before.keys() == after.keys()
    parts = ("vision", "projector", "language", "lm_head")
    part = {key: next(part for part in parts if part in key).replace("lm_head", "language") for key in before}
    return {part[key] for key in before if not torch.equal(before[key], after[key])}


LANGUAGE, PROJECTOR = {"language"}, {"projector"}
ON_DISK: list[str] = []  # by the run of `digits`: what was fsynced, and what got its name, in this order


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """configs/digits_projection.json with fewer epochs: its folder and metrics.json."""
    folder = tmp_path_factory.mktemp("digits")
    listed = json.loads(CONFIG.read_text())["stages"]
    listed = [stage | {"num_train_epochs": EPOCHS[stage["name"]]} for stage in listed]
    fsync, replace = os.fsync, os.replace
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: (ON_DISK.append(os.readlink(f"/proc/self/fd/{file}")), fsync(file)))
        patch.setattr(os, "replace", lambda *paths: (replace(*paths), ON_DISK.append(str(paths[1]))))
        main(write_config(folder, stages=listed, save_strategy="no"))
    return folder / "out", json.loads((folder / "out" / "metrics.json").read_text())


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_the_weights_of_every_stage_are_on_the_disk_before_its_mark(digits):
    out, report = digits
    names = [f"stage_{index}_{stage['name']}" for index, stage in enumerate(report["stages"])]
    for name in names:
        folder = out if name == names[-1] else out / name
        mark = ON_DISK.index(str(out / name / manifest.MANIFEST))
        files = [path for path in folder.iterdir() if path.suffix == ".safetensors" or path.name == "config.json"]
        assert len(files) >= 2
        for path in [*files, folder]:
            assert str(path) in ON_DISK[:mark], (name, path.name)


def test_a_finished_run_whose_model_is_gone_is_not_passed_off_as_finished(digits, tmp_path, capsys):
    out = tmp_path / "out"
    shutil.copytree(digits[0], out)
    shutil.copyfile(digits[0].parent / "run.json", tmp_path / "run.json")
    again = (tmp_path / "run.json", "--output_dir", str(out), "--resume_from_checkpoint", "auto")
    (out / "model.safetensors").unlink()
    with pytest.raises(SystemExit, match="2"):
        main(*again)
    assert 'stage "tune" was finished, but ' in (error := capsys.readouterr().err)
    assert "../model.safetensors is missing. Put it back" in error


def test_a_projector_alone_shows_pictures_to_a_frozen_language_model(digits):
    _, report = digits
    captions, align, tune = report["stages"]
    assert [stage["name"] for stage in report["stages"]] == ["captions", "align", "tune"]
    assert captions["after"]["answer_accuracy"] < 0.3, "no picture was seen yet"
    assert align["before"] == captions["after"] and tune["before"] == align["after"]
    assert align["after"]["answer_accuracy"] >= 0.6 and tune["after"]["answer_accuracy"] >= 0.6
    for stage in report["stages"]:
        assert stage["accuracy_after"] == stage["after"]["answer_accuracy"] and stage["seconds"] > 0
    assert align["trained_share"] < 0.06 < tune["trained_share"] < 0.6
    assert report["after"] == tune["after"] and all(stage["train_seconds"] > 0 for stage in report["stages"])


def test_a_stage_with_adapters_hands_on_the_merged_model(digits, tmp_path):
    """The projector alone, adapters in the language model beside it, and then the projector alone again."""
    lora = {"use_lora": True, "lora_r": 4, "learning_rate": 3e-3}
    listed = [{"trainable_modules": ["projector"], "max_steps": 3} | more for more in ({}, lora, {})]
    listed = [stage | {"name": name} for stage, name in zip(listed, ("first", "adapted", "last"), strict=True)]
    start = {"model_name_or_path": str(digits[0]), "model_config": None, "stages": listed, "save_strategy": "no"}
    main(write_config(tmp_path, **start))
    out = tmp_path / "out"
    first, adapted, last = weights(out / "stage_0_first"), weights(out / "stage_1_adapted"), weights(out)
    assert changed(first, adapted) == LANGUAGE | PROJECTOR and changed(adapted, last) == PROJECTOR
    carried = manifest.read(out / "stage_1_adapted")["carried"]
    assert any("q_proj" in name for name in carried) and not any("lora" in name for name in carried)


def test_what_a_stage_freezes_is_bit_identical_after_it(digits):
    out, _ = digits
    captions, align, tune = (weights(out / name) for name in ("stage_0_captions", "stage_1_align", "."))
    assert changed(captions, align) == PROJECTOR
    assert changed(align, tune) == PROJECTOR | LANGUAGE


def test_the_final_folder_answers_about_a_picture(digits):
    from transformers import AutoModelForImageTextToText, AutoProcessor

    from hf_dist_ext.data.digits import load_digits

    out, report = digits
    model, processor = AutoModelForImageTextToText.from_pretrained(out), AutoProcessor.from_pretrained(out)
    rows = load_digits()["test"].select(range(20))
    hits = 0
    for row in rows:
        said = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "which digit is this ?"}]}]
        text = processor.apply_chat_template(said, add_generation_prompt=True)
        inputs = processor(text=text, images=[row["image"].convert("RGB")], return_tensors="pt")
        new = model.generate(**inputs, max_new_tokens=6, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        answer = processor.decode(new, skip_special_tokens=True)
        hits += answer.strip() == row["conversations"][1]["value"]
    assert hits >= 10, report["after"]


SHORT = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "max_eval_samples": 40, "learning_rate": 1e-3}


def short_config(folder: Path, **more) -> Path:
    """Four steps per stage, checkpoints after two."""
    kept = ("name", "dataset_config_name", "trainable_modules")
    listed = [{k: v for k, v in stage.items() if k in kept} for stage in json.loads(CONFIG.read_text())["stages"]]
    return write_config(folder, stages=listed, **(SHORT | more))


@pytest.mark.slow
def test_a_killed_run_goes_on_in_its_stage_and_ends_with_the_same_weights(tmp_path, monkeypatch):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir(), cut.mkdir()
    main(short_config(whole))
    step, seen = DistTrainer.training_step, []

    def stops(self, *arguments, **options):
        seen.append(self.stage)
        if seen.count("align") == 4:
            raise KeyboardInterrupt
        return step(self, *arguments, **options)

    monkeypatch.setattr(DistTrainer, "training_step", stops)
    with pytest.raises(SystemExit, match="130"):  # as a shell says of Ctrl-C
        main(short_config(cut))
    monkeypatch.setattr(DistTrainer, "training_step", lambda self, *a: seen.append(self.stage) or step(self, *a))
    first = weights(cut / "out" / "stage_0_captions")
    seen.clear()
    main(cut / "run.json", "--resume_from_checkpoint", "true")
    assert seen == ["align"] * 2 + ["tune"] * 4, "the first stage is finished, the second goes on after step 2"
    assert changed(first, weights(cut / "out" / "stage_0_captions")) == set()
    for name in ("stage_1_align", "."):
        assert changed(weights(whole / "out" / name), weights(cut / "out" / name)) == set()
    assert changed(first, weights(cut / "out")) == PROJECTOR | LANGUAGE
    reports = [json.loads((folder / "out" / "metrics.json").read_text())["stages"] for folder in (whole, cut)]
    assert [[s["before"], s["after"]] for s in reports[0]] == [[s["before"], s["after"]] for s in reports[1]]
    checkpoint = manifest.read(cut / "out" / "stage_2_tune" / "checkpoint-4")
    assert checkpoint["stage"] == "tune" and checkpoint["step"] == 4

    seen.clear()
    main(cut / "run.json", "--resume_from_checkpoint", "true")
    assert seen == [], "everything is finished"
    monkeypatch.setattr(stages.logger, "warning", (said := []).append)
    main(cut / "run.json", "--resume_from_checkpoint", "true")
    fields = json.loads((cut / "run.json").read_text())
    fields["stages"][1] |= {"max_steps": 40, "_": "a comment"}
    (cut / "edited.json").write_text(json.dumps(fields))
    main(cut / "edited.json", "--resume_from_checkpoint", "true")
    assert seen == [] and len(said) == 1, "only what was edited is said"
    assert (
        'stage "align" is finished and not trained again, though it was edited since: max_steps None -> 40.' in said[0]
    )
    monkeypatch.setattr(DistTrainer, "training_step", stops)
    seen += ["align"] * 3
    short = ("--max_steps", "1", "--max_eval_samples", "4")
    with pytest.raises(SystemExit, match="130"):  # as a shell says of Ctrl-C
        main(cut / "run.json", "--overwrite_output_dir", *short)
    assert seen == ["align"] * 3 + ["captions", "align"], "a fresh start trusts no mark of an earlier run"
    monkeypatch.setattr(DistTrainer, "training_step", lambda self, *a: seen.append(self.stage) or step(self, *a))
    seen.clear()
    main(cut / "run.json", "--resume_from_checkpoint", "auto", *short)
    assert seen == ["align", "tune"], (
        "nor do those that continue it: the last stage's checkpoints are an earlier run's"
    )


def test_a_pattern_that_matches_nothing_in_a_later_stage_is_found_before_the_first_trains(tmp_path, capsys):
    path = short_config(tmp_path)
    fields = json.loads(path.read_text())
    fields["stages"][2]["trainable_modules"] = ["projecter"]
    path.write_text(json.dumps(fields))
    with pytest.raises(SystemExit):
        main(path)
    error = capsys.readouterr().err
    assert 'stage "tune": ' in error and "projecter" in error
    assert not list((tmp_path / "out").glob("stage_*/checkpoint-*"))


def test_weights_of_two_precisions_are_carried_bit_for_bit(tmp_path):
    """A frozen part in bfloat16 beside a trained one in float32: from_pretrained alone would make them one."""
    from hf_dist_ext.data.digits import build_processor
    from hf_dist_ext.run.read import load_run
    from hf_dist_ext.tasks.image_text import build_model

    run = load_run(["--config", str(short_config(tmp_path))])
    run.options.dtype = "bfloat16"
    model = build_model(run.options, build_processor())
    model.model.multi_modal_projector.float()
    with torch.no_grad():
        for parameter in model.model.multi_modal_projector.parameters():
            parameter.add_(torch.rand_like(parameter) * 1e-3)
    args = stages.make_arguments(run.stages[1])
    trainer = DistTrainer(model, args, processing_class=build_processor())
    folder = Path(run.stages[0].training["output_dir"])
    facts = stages.write_model(trainer, folder)
    manifest.commit(folder, manifest.record(folder, stages._own_files(folder)), facts)
    assert facts["dtype"] == "bfloat16"
    assert facts["carried"] and all("projector" in name for name in facts["carried"]), facts["carried"]
    stages._start_from(run.stages[1], run.stages[0])
    again = build_model(run.stages[1].options, build_processor())
    stages._carry(again, folder)
    expected = dict(model.named_parameters())
    assert {p.dtype for p in expected.values()} == {torch.float32, torch.bfloat16}
    for name, parameter in again.named_parameters():
        assert parameter.dtype == expected[name].dtype and torch.equal(parameter, expected[name]), name


@pytest.mark.slow
def test_sharded_weights_are_whole_in_the_next_stage(tmp_path):
    """Two FSDP processes of 32 rows against one process of 64: the same three batches in every stage."""
    folders = tmp_path / "sharded", tmp_path / "alone"
    fields = {"frozen_parts_fsdp": "shard", "save_strategy": "no", "max_steps": 3}
    for folder in folders:
        folder.mkdir()
    launch("multi_gpu_fsdp", 2, train_hf, "--config", short_config(folders[0], **fields))
    main(short_config(folders[1], per_device_train_batch_size=64, **fields))
    report, expected = (json.loads((folder / "out" / "metrics.json").read_text()) for folder in folders)
    assert report["world_size"] == 2 and expected["world_size"] == 1
    for name in ("stage_0_captions", "stage_1_align", "."):
        sharded, alone = (weights(folder / "out" / name) for folder in folders)
        for key, value in alone.items():
            torch.testing.assert_close(sharded[key], value, rtol=1e-3, atol=1e-4)
    for stage, other in zip(report["stages"], expected["stages"], strict=True):
        assert stage["trained_share"] == other["trained_share"] > 0
        for when in ("before", "after"):
            assert stage[when]["loss"] == pytest.approx(other[when]["loss"], rel=1e-3)
            assert stage[when]["answer_accuracy"] == pytest.approx(other[when]["answer_accuracy"], abs=0.051)
    captions, align, tune = (weights(folders[0] / "out" / name) for name in ("stage_0_captions", "stage_1_align", "."))
    assert changed(captions, align) == PROJECTOR and changed(align, tune) == PROJECTOR | LANGUAGE


def test_the_card_has_the_figures_and_the_losses_of_every_stage(digits):
    out, report = digits
    card, data = (out / "README.md").read_text(), ModelCard.load(out / "README.md").data
    assert (data.library_name, data.pipeline_tag) == ("transformers", "image-text-to-text")
    for stage in report["stages"]:
        name = stage["name"]
        assert f"| {name}: answer_accuracy | {stage['before']['answer_accuracy']:.4f} |" in card
        assert f"{name}: {stage['trained_share']:.2%} of the parameters ({stage['trained_parameters']:,} of" in card
    assert "AutoModelForImageTextToText.from_pretrained" in card


def test_a_signal_in_a_stage_leaves_its_mark_in_the_folder_of_the_run(tmp_path, monkeypatch):
    """Where scripts/slurm/train_nodes.sbatch looks for it; the launcher hides the exit code."""
    step = DistTrainer.training_step
    monkeypatch.setattr(
        DistTrainer, "training_step", lambda *given: (os.kill(os.getpid(), signal.SIGUSR1), step(*given))[1]
    )
    before = {one: signal.getsignal(one) for one in SIGNALS}  # a process that leaves ignores them
    try:
        with pytest.raises(SystemExit):
            main(write_config(tmp_path))
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    assert json.loads((tmp_path / "out" / MARK).read_text())["signal"] == "SIGUSR1"
    monkeypatch.undo()
    main(write_config(tmp_path), "--resume_from_checkpoint", "true", "--max_steps", "2")
    assert not (tmp_path / "out" / MARK).exists()

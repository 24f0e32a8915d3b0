"""Saving and resuming through DistTrainer in this process: order, damage, disks that are full, what resuming needs."""

import errno
import itertools
import logging
import os
import shutil
import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback, TrainingArguments

from hf_dist_ext.checkpoints import hub, manifest
from hf_dist_ext.checkpoints.folder import checkpoint_to_resume, resume_or_start
from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.errors import RunError, UsageError
from hf_dist_ext.training import final_model
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.tiny_models import embedding_model
from tests.training.test_trainer import Tiny, collate


def make(folder: Path, learnable: bool = True, **more) -> DistTrainer:
    torch.manual_seed(0)
    arguments = dict(max_steps=6, save_steps=2, logging_steps=1, per_device_train_batch_size=8) | more
    args = DistTrainingArguments(
        output_dir=str(folder), gradient_cache_chunk_size=3, report_to=[], disable_tqdm=True, use_cpu=True,
        **{"learning_rate": 1e-2} | arguments,
    )  # fmt: skip
    return DistTrainer(
        Tiny(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.2))), args, data_collator=collate,
        train_dataset=list(range(20)), eval_dataset=list(range(8)), loss=InfoNCELoss(learnable_temperature=learnable),
    )  # fmt: skip


def weights(trainer: DistTrainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in [*trainer.model.parameters(), *trainer.loss.parameters()]])


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, torch.Tensor]:
    """The folder of an uninterrupted run and the weights it ends with; tests that damage it work on a copy."""
    folder = tmp_path_factory.mktemp("whole")
    trainer = make(folder)
    start = weights(trainer)
    trainer.train()
    assert (weights(trainer) - start).abs().max() > 1e-3
    return folder, weights(trainer)


@pytest.fixture
def copied(whole, tmp_path) -> Path:
    folder = tmp_path / "run"
    subprocess.run(["cp", "-a", str(whole[0]), str(folder)], check=True)
    return folder


def test_the_manifest_says_what_the_run_was(whole):
    content = manifest.read(whole[0] / "checkpoint-4")
    assert content["step"] == 4 and content["world_size"] == 1 and content["per_device_train_batch_size"] == 8
    assert content["samples_seen"] == 20 + 8  # three steps are an epoch of 20 rows
    assert content["data_length"] == 20 and content["seed"] == 42 and content["sharding"] == "none"
    assert content["versions"]["torch"] and content["trains"] is None
    assert {"model.safetensors", "optimizer.pt", "loss.safetensors", "rng_state.pth"} <= set(content["files"])
    assert set(content["files"]) == set(manifest.files_in(whole[0] / "checkpoint-4"))


@pytest.mark.parametrize("damage", ["no manifest", "missing", "short", "flipped"])
def test_the_newest_complete_one_is_resumed_and_the_others_are_named(whole, copied, damage, caplog):
    for step in (4, 6):  # without a manifest the time of the last change says which is newer
        file = copied / f"checkpoint-{step}" / ("manifest.json" if damage == "no manifest" else "optimizer.pt")
        content = file.read_bytes()
        flipped = content[:700] + bytes([content[700] ^ 4]) + content[701:]
        file.unlink() if damage in ("no manifest", "missing") else file.write_bytes(
            content[:-9] if damage == "short" else flipped
        )
    resumed = make(copied)
    with caplog.at_level(logging.WARNING):
        resumed.train(resume_from_checkpoint=True)
    said = [record.message for record in caplog.records if "passed over" in record.message]
    assert len(said) == 2 and "checkpoint-6" in said[0] and "checkpoint-4" in said[1]
    assert all(("manifest.json" if damage == "no manifest" else "optimizer.pt") in line for line in said)
    assert torch.equal(weights(resumed), whole[1])
    assert manifest.why_incomplete(copied / "checkpoint-6", hashes=True) == ""


def test_a_run_that_starts_afresh_never_continues_or_deletes_what_an_earlier_one_left(copied, caplog):
    (copied / "checkpoint-99").mkdir()  # torn
    with caplog.at_level(logging.WARNING):
        make(copied, max_steps=1, save_strategy="no").train()  # ends before its first save
    (said,) = [record.message for record in caplog.records if "of an earlier run" in record.message]
    assert all(name in said for name in ("checkpoint-2", "checkpoint-4", "checkpoint-6", "checkpoint-99"))
    training = {"output_dir": str(copied)}
    assert resume_or_start(training) is None and training["overwrite_output_dir"]
    with pytest.raises(
        UsageError, match="checkpoint-6: of an earlier run.*Give --resume_from_checkpoint .*point-6 to"
    ):
        make(copied).train(resume_from_checkpoint=True)
    again = make(copied, max_steps=4, save_total_limit=1, learning_rate=2e-2)
    again.train()
    left = sorted(path.name for path in copied.glob("checkpoint-*"))
    assert left == ["checkpoint-2", "checkpoint-4", "checkpoint-6", "checkpoint-99"], "no step proved the last one"
    make(copied, max_steps=5, save_steps=5, save_total_limit=1).train(resume_from_checkpoint=True)
    left = sorted(path.name for path in copied.glob("checkpoint-*"))
    assert left == ["checkpoint-4", "checkpoint-5", "checkpoint-6", "checkpoint-99"], "step 2 took its place"
    shutil.rmtree(copied / "checkpoint-5")
    assert resume_or_start({"output_dir": str(copied)}) is True
    resumed = make(copied, max_steps=4, learning_rate=2e-2)
    resumed.train(resume_from_checkpoint=True)
    assert torch.equal(weights(resumed), weights(again))


def test_an_earlier_runs_checkpoint_that_is_named_is_continued_from_then_on(whole, copied):
    make(copied, max_steps=3, save_steps=3).train()
    assert checkpoint_to_resume(True, copied) == copied / "checkpoint-3"
    make(copied, max_steps=4, save_strategy="no").train(resume_from_checkpoint=str(copied / "checkpoint-4"))
    assert checkpoint_to_resume(True, copied) == copied / "checkpoint-4", "it was stopped before its first save"
    resumed = make(copied)
    resumed.train(resume_from_checkpoint=True)
    assert torch.equal(weights(resumed), whole[1])


def test_a_run_that_went_back_goes_on_from_there_also_before_its_first_save(whole, copied, caplog):
    make(copied, max_steps=3, save_strategy="no").train(resume_from_checkpoint=str(copied / "checkpoint-2"))
    assert checkpoint_to_resume(True, copied) == copied / "checkpoint-2", "it was stopped before its first save"
    with caplog.at_level(logging.WARNING):
        make(copied, max_steps=5, save_total_limit=1).train(resume_from_checkpoint=True)
    assert any("checkpoint-4 is passed over: the run went back" in record.message for record in caplog.records)
    left = sorted(path.name for path in copied.glob("checkpoint-*"))
    assert left == ["checkpoint-4", "checkpoint-5", "checkpoint-6"], "step 4 took the place of what it left there"
    assert checkpoint_to_resume(True, copied) == copied / "checkpoint-5"
    content, first = manifest.read(copied / "checkpoint-5"), manifest.read(whole[0] / "checkpoint-2")
    assert content["generation"] == 5 and [first["run_id"], first["generation"]] != [content["run_id"], 1]
    assert content["parent"] == {"run_id": first["run_id"], "generation": 1, "step": 2} and first["parent"] is None
    resumed = make(copied)
    resumed.train(resume_from_checkpoint=str(copied / "checkpoint-6"))
    assert torch.equal(weights(resumed), whole[1]), "the abandoned one can be named"


def test_weights_only_are_taken_again_by_the_next_attempt(copied):
    make(copied, max_steps=1, save_strategy="no", resume_weights_only=True).train(resume_from_checkpoint=True)
    assert checkpoint_to_resume(True, copied) == copied / "checkpoint-6"


def test_a_run_that_began_with_weights_only_goes_on_whole_under_the_same_arguments(copied, caplog):
    again = dict(resume_weights_only=True, learning_rate=2e-2)
    whole = make(copied, **again)
    whole.train(resume_from_checkpoint=True)
    assert whole.state.log_history[0]["step"] == 1
    shutil.rmtree(copied / "checkpoint-6")
    resumed = make(copied, **again)
    resumed.train(resume_from_checkpoint=True)
    assert [line["step"] for line in resumed.state.log_history if "loss" in line][-2:] == [5, 6]
    assert torch.equal(weights(resumed), weights(whole))
    named = make(copied, max_steps=1, **again)
    named.train(resume_from_checkpoint=str(copied / "checkpoint-4"))
    assert named.state.global_step == 1


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "rng_state.pth", "loss.safetensors"])
def test_a_damaged_checkpoint_that_is_named_is_an_error_that_names_the_file(copied, name):
    named, file = str(copied / "checkpoint-6"), copied / "checkpoint-6" / name
    content = file.read_bytes()
    for damaged in (None, content[:-1], content[:-1] + bytes([content[-1] ^ 1])):
        file.unlink() if damaged is None else file.write_bytes(damaged)
        with pytest.raises(UsageError, match=f"{name} .*checkpoint-4"):
            make(copied).train(resume_from_checkpoint=named)
    if name.endswith(".safetensors"):  # of which every bit may be another
        unverified = make(copied, verify_checkpoint_hashes=False, max_steps=6)
        unverified.train(resume_from_checkpoint=named)
        assert unverified.state.global_step == 6, "sizes are right, and hashes were not to be computed"
    with pytest.raises(UsageError, match="holds no checkpoint-N"):
        make(copied / "elsewhere").train(resume_from_checkpoint=True)


def test_a_checkpoint_of_the_stock_trainer_is_resumed_when_it_is_named(copied, caplog):
    for path in copied.glob("*/manifest.json"):
        path.unlink()
    with pytest.raises(UsageError, match="no complete checkpoint .*checkpoint-6"):
        make(copied).train(resume_from_checkpoint=True)
    with caplog.at_level(logging.WARNING):
        make(copied).train(resume_from_checkpoint=str(copied / "checkpoint-4"))
    assert sum("has no manifest.json" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("arguments", [DistTrainingArguments, TrainingArguments])
def test_a_rank_that_saves_nothing_leaves_the_card_alone(tmp_path, monkeypatch, arguments):
    """Another rank may be writing it."""
    args = arguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    trainer = DistTrainer(torch.nn.Linear(8, 8), args)
    card = tmp_path / "README.md"
    card.write_text("mine")
    written = []
    monkeypatch.setattr(Path, "write_bytes", lambda path, data: written.append(path))
    monkeypatch.setattr(arguments, "should_save", False)
    trainer.save_model()
    trainer.save_model(_internal_call=True)
    assert not written and [path.name for path in tmp_path.iterdir()] == [card.name]


def test_rotation_comes_after_the_commit_and_spares_what_was_not_committed(tmp_path, monkeypatch):
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "notes.txt").write_text("mine")
    events, commit_, rotate = [], manifest.commit, manifest.rotate
    folders = lambda: sorted(path.name for path in tmp_path.glob("checkpoint-*"))  # noqa: E731
    monkeypatch.setattr(manifest, "commit", lambda *a: (events.append(("commit", folders())), commit_(*a)))
    monkeypatch.setattr(manifest, "rotate", lambda *a, **k: (events.append(("rotate", folders())), rotate(*a, **k)))
    monkeypatch.setattr(hub, "push_checkpoint", lambda run, folder: events.append(("push", folder)))
    trainer = make(tmp_path, save_total_limit=1, max_steps=5)
    trainer.args.push_to_hub = True
    monkeypatch.setattr(DistTrainer, "init_hf_repo", lambda *a, **k: None)
    trainer.train()
    assert [name for name, _ in events] == ["commit", "rotate", "push", "rotate"] * 2 + ["commit", "rotate", "push"]
    assert events[4][1] == events[7][1] == ["checkpoint-1", "checkpoint-2", "checkpoint-4"]
    assert folders() == ["checkpoint-1", "checkpoint-4", "checkpoint-5"]
    assert trainer.args.save_total_limit == 1
    saved = torch.load(tmp_path / "checkpoint-4" / "training_args.bin", weights_only=False)
    assert saved.save_total_limit == 1, "what is pickled is what was given"


def test_the_best_checkpoint_and_the_newest_outlive_the_end_of_training(tmp_path):
    trainer = make(
        tmp_path, save_total_limit=1, load_best_model_at_end=True, eval_strategy="steps", eval_steps=2,
        metric_for_best_model="eval_loss",
    )  # fmt: skip
    losses = itertools.count(1.0)
    trainer.evaluate = lambda *a, **k: {"eval_loss": next(losses)}
    (tmp_path / "checkpoint-99").mkdir()
    trainer.train()
    left = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    assert left == ["checkpoint-2", "checkpoint-4", "checkpoint-6", "checkpoint-99"], "no step proved the last one"


LOSSES = {2: 3.0, 4: 1.0, 6: 2.0, 8: 1.5}  # of an evaluation after a step: step 4 is the best
BEST = dict(load_best_model_at_end=True, eval_strategy="steps", eval_steps=2, metric_for_best_model="eval_loss")


def evaluated(folder: Path, losses=LOSSES, **more) -> DistTrainer:
    trainer = make(folder, **BEST | more)

    def evaluate(*arguments, **options):
        found = {"eval_loss": losses[trainer.state.global_step]}
        trainer.log(found)
        return found

    trainer.evaluate = evaluate
    return trainer


def model_of(folder: Path) -> torch.Tensor:
    return torch.cat([value.flatten() for _, value in sorted(load_file(folder / "model.safetensors").items())])


def ends_with(trainer: DistTrainer) -> torch.Tensor:
    return torch.cat([value.flatten() for _, value in sorted(trainer.model.state_dict().items())])


@pytest.mark.parametrize("stays", [False, True])
@pytest.mark.parametrize("max_steps", [6, 8])
def test_the_best_checkpoint_is_that_of_the_folder_to_which_a_run_was_moved(tmp_path, stays, max_steps, caplog):
    """Where the old folder stays, as after a copy, its checkpoints may since be those of another run."""
    old, new = tmp_path / "old", tmp_path / "new"
    evaluated(old).train()
    best = model_of(old / "checkpoint-4")
    assert not torch.equal(best, model_of(old / "checkpoint-6"))
    shutil.copytree(old, new)
    if stays:
        shutil.copyfile(old / "checkpoint-2" / "model.safetensors", old / "checkpoint-4" / "model.safetensors")
    else:
        shutil.rmtree(old)
    trainer = evaluated(new, max_steps=max_steps, save_total_limit=2)
    with caplog.at_level(logging.WARNING):
        trainer.train(resume_from_checkpoint=True)
    assert torch.equal(ends_with(trainer), best)
    assert trainer.state.best_model_checkpoint == str(new / "checkpoint-4")
    assert ("the run's folder was moved, and it is " + str(new / "checkpoint-4") in caplog.text) is not stays
    assert (new / "checkpoint-4").is_dir(), "rotation spares it"


def test_a_run_that_goes_on_in_another_folder_ends_with_the_best_of_the_first(tmp_path):
    evaluated(tmp_path / "first").train()
    for max_steps, asked in ((8, str(tmp_path / "first" / "checkpoint-6")), (10, True)):
        trainer = evaluated(tmp_path / "second", LOSSES | {10: 1.2}, max_steps=max_steps)
        trainer.train(resume_from_checkpoint=asked)
        assert torch.equal(ends_with(trainer), model_of(tmp_path / "first" / "checkpoint-4"))


@pytest.mark.parametrize(
    "lost, words",
    [("checkpoint-4", "no such folder"), ("checkpoint-4/model.safetensors", "model.safetensors is miss")],
)
def test_a_best_checkpoint_that_is_gone_is_said_before_training(tmp_path, lost, words):
    evaluated(tmp_path).train()
    (shutil.rmtree if (tmp_path / lost).is_dir() else os.remove)(tmp_path / lost)
    with pytest.raises(UsageError, match=f"checkpoint-4 had the best eval_loss of this run .1.*{words}.*Put it back"):
        evaluated(tmp_path).train(resume_from_checkpoint=True)
    trainer = evaluated(tmp_path, load_best_model_at_end=False)
    trainer.train(resume_from_checkpoint=True)
    assert torch.equal(ends_with(trainer), model_of(tmp_path / "checkpoint-6"))


@pytest.mark.parametrize("loads", [True, False])
def test_a_checkpoint_of_another_run_is_not_taken_for_the_best_of_the_same_number(tmp_path, loads):
    """An earlier run is gone on with whose best one a later run has written over."""
    evaluated(tmp_path / "run").train()
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    evaluated(tmp_path / "run", max_steps=4, learning_rate=3e-2).train()
    resumed = evaluated(tmp_path / "run", max_steps=8, load_best_model_at_end=loads)
    asked = str(tmp_path / "run" / "checkpoint-6")
    if loads:
        with pytest.raises(UsageError, match="checkpoint-4 had the best eval_loss .*another run has written a checkp"):
            resumed.train(resume_from_checkpoint=asked)
    else:
        resumed.train(resume_from_checkpoint=asked)
        assert resumed.state.best_model_checkpoint is None
    moved = shutil.move(tmp_path / "run" / "checkpoint-6", tmp_path / "moved" / "checkpoint-6")
    shutil.rmtree(tmp_path / "run")
    shutil.move(tmp_path / "copy", tmp_path / "run")  # where trainer_state.json says that the best one is
    again = evaluated(tmp_path / "moved", max_steps=8)
    again.train(resume_from_checkpoint=str(moved))
    assert torch.equal(ends_with(again), model_of(tmp_path / "run" / "checkpoint-4"))


def test_a_best_checkpoint_that_is_deleted_during_training_is_an_error(tmp_path):
    class Deletes(TrainerCallback):
        def on_save(self, args, state, control, **others):
            if state.global_step == 6:
                shutil.rmtree(tmp_path / "checkpoint-4")

    trainer = evaluated(tmp_path)
    trainer.add_callback(Deletes())
    with pytest.raises(RunError, match="checkpoint-4 had the best eval_loss of this run, and was deleted"):
        trainer.train()


@pytest.mark.parametrize(
    "losses, kept", [({2: 1.0, 4: 3.0, 6: 3.0, 8: 3.0}, None), ({2: 3.0, 4: 2.0, 6: 1.0, 8: 3.0}, 4)]
)
def test_a_best_step_that_was_not_saved_is_said_and_not_passed_off_as_kept(tmp_path, losses, kept, caplog):
    trainer = evaluated(tmp_path, losses, max_steps=8, save_steps=4)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    which = "its last step" if kept is None else f"step {kept}"
    assert f"no checkpoint was saved there: the run ends with the weights of {which}." in caplog.text
    assert torch.equal(ends_with(trainer), model_of(tmp_path / f"checkpoint-{kept or 8}"))
    best = final_model.best_of(trainer.args, trainer.state)
    assert best == ({} if kept is None else {"step": kept, "figure": "loss", "value": losses[kept]})


@pytest.mark.parametrize("before, now, words", [
    ({}, {"optim": "sgd"}, r'the state of torch.optim.adamw.AdamW \(optim="adamw_torch_fused"\), and this run .*SGD'),
    ({"optim": "sgd"}, {"optim": "adafactor"}, r'state of torch.optim.sgd.SGD \(optim="sgd"\)'),
    ({"lr_scheduler_type": "reduce_lr_on_plateau"}, {}, 'lr_scheduler_type="reduce_lr_on_plateau", .* "linear"'),
    ({}, {"lr_scheduler_type": "reduce_lr_on_plateau"}, 'lr_scheduler_type="linear", .* "reduce_lr_on_plateau"'),
])  # fmt: skip
def test_the_state_of_another_optimizer_or_kind_of_schedule_is_refused(tmp_path, before, now, words):
    evaluation = dict(eval_strategy="steps", eval_steps=2)
    make(tmp_path, max_steps=2, **evaluation | before).train()
    with pytest.raises(UsageError, match=words):
        make(tmp_path, max_steps=4, **evaluation | now).train(resume_from_checkpoint=True)
    again = make(tmp_path, max_steps=4, resume_weights_only=True, **evaluation | now)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 4


@pytest.mark.parametrize("now", [{"optim": "adamw_torch"}, {"lr_scheduler_type": "cosine"}])
def test_the_same_state_under_another_name_goes_on(tmp_path, now):
    make(tmp_path, max_steps=2).train()
    again = make(tmp_path, max_steps=4, **now)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 4


def test_with_stock_arguments_a_save_is_the_stock_one(tmp_path):
    args = TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, save_steps=1, save_total_limit=1, report_to=[], use_cpu=True
    )
    rows = [{"x": torch.ones(2), "labels": torch.ones(2)}] * 8

    class Regression(torch.nn.Linear):
        def forward(self, x, labels):
            return {"loss": ((super().forward(x) - labels) ** 2).mean()}

    DistTrainer(Regression(2, 2), args, train_dataset=rows).train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    assert not (tmp_path / "checkpoint-2" / "manifest.json").exists()


@pytest.mark.parametrize(
    "lost", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "loss_optimizer.pt", "model.safetensors"]
)
def test_what_continuing_needs_is_not_done_without(copied, lost):
    folder = copied / "checkpoint-4"
    (folder / "manifest.json").unlink()
    (folder / lost).unlink()
    words = {"optimizer.pt": "optimizer state", "model.safetensors": "weights", "rng_state.pth": "rng_state"}
    with pytest.raises(UsageError, match=f"{words.get(lost, lost)} is missing"):
        make(copied).train(resume_from_checkpoint=str(folder))


def test_a_disk_that_fills_during_a_save_leaves_the_older_checkpoint(whole, tmp_path, monkeypatch):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=120k", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("a tmpfs can not be mounted here")
    try:
        with pytest.raises(UsageError, match="ran full .*checkpoint-[24] is complete"):
            make(disk).train()
        assert 0 < len(list(disk.glob("*/manifest.json"))) < 3
        names = sorted(path.name for path in disk.glob("checkpoint-*"))
        subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
        resumed = make(disk)
        resumed.train(resume_from_checkpoint=True)
        assert torch.equal(weights(resumed), whole[1]) and len(names) >= 2
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("is_full", [True, False])
def test_a_final_model_that_does_not_fit_takes_no_file_of_others_with_it(tmp_path, monkeypatch, is_full):
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "model.safetensors").write_text("of the run before")

    def save_model(folder: str) -> None:
        (tmp_path / "1_Pooling" / "index.bin").write_text("of another process, meanwhile")
        (tmp_path / "metrics.txt").write_text("also")
        for name in ("model.safetensors", "1_Pooling/config.json"):
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("of this run")
        if is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    args = SimpleNamespace(output_dir=str(tmp_path), should_save=True, push_to_hub=False)
    with pytest.raises(RunError, match="is full") if is_full else nullcontext():
        final_model.save(save_model, torch.nn.Linear(1, 1), args)
    left = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    others = {"1_Pooling/index.bin": "of another process, meanwhile", "metrics.txt": "also"}
    if is_full:
        assert left == others | {"model.safetensors": "of the run before"}
    else:
        assert left == others | {"model.safetensors": "of this run", "1_Pooling/config.json": "of this run"}


def test_adapters_go_on_from_a_checkpoint_of_an_engine_that_casts_the_base(tmp_path):
    """As DeepSpeed does under bf16, when the model is prepared."""
    from peft import LoraConfig

    from tests.parity.exactness_worker import BERT, Case
    from tests.parity.exactness_worker import collate as collate_texts

    class Casting(DistTrainer):
        def _prepare_for_training(self, *arguments, **options):
            self.model.to(torch.bfloat16)
            return super()._prepare_for_training(*arguments, **options)

    def make_adapted(base: torch.dtype) -> DistTrainer:
        torch.manual_seed(0)
        model = embedding_model(BERT).to(base)
        model.add_adapter(LoraConfig(r=2, target_modules=["query"]))
        args = DistTrainingArguments(
            output_dir=str(tmp_path), max_steps=2, save_steps=1, per_device_train_batch_size=4, report_to=[],
            disable_tqdm=True, use_cpu=True, gradient_cache_chunk_size=3,
        )  # fmt: skip
        return Casting(
            model, args, train_dataset=list(range(8)),
            data_collator=lambda rows: collate_texts(Case("cast"), rows, 0), loss=InfoNCELoss(),
        )  # fmt: skip

    first = tmp_path / "checkpoint-1"
    trainer = make_adapted(torch.float32)
    trainer.train()
    assert manifest.read(first)["dtype"] == "float32" and next(trainer.model.parameters()).dtype == torch.bfloat16
    trainer.train(resume_from_checkpoint=str(first))  # its model is cast by now
    make_adapted(torch.float32).train(resume_from_checkpoint=str(first))
    with pytest.raises(UsageError, match="on a base in float32, which this run loads in bfloat16"):
        make_adapted(torch.bfloat16).train(resume_from_checkpoint=str(first))

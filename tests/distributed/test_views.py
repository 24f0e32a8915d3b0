"""Two processes that pose as two machines: each sees the run's folder as a directory of its own. What one writes there
comes late on the other, as on network file systems with caches, or never. And errors that one process alone meets."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import signal
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

from hf_dist_ext import train as train_script
from hf_dist_ext.checkpoints import manifest, resume
from hf_dist_ext.strategies import consensus, tensors
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.distributed.forked import Run
from tests.tiny_models import WORDS, model_config, tiny_tokenizer

LIMIT_SECONDS = 300  # for processes that hang; none should


class Mirror(threading.Thread):
    """Carries files between two directories, each `delay` seconds after it was found in one alone; where both differ
    the first one is right. What `hidden` names is never carried, or not before `hidden_until` is there."""

    def __init__(self, views: list[Path], delay: float, hidden: str = "", hidden_until: Path | None = None):
        super().__init__(daemon=True)
        self.views, self.delay, self.hidden, self.hidden_until = views, delay, hidden, hidden_until
        self.since: dict[str, float] = {}
        self.known: dict[str, tuple] = {}  # name -> size and time of what both had
        self.ended = threading.Event()

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *error):
        self.ended.set()
        self.join()

    def run(self) -> None:
        while not self.ended.wait(0.05):
            if self.hidden_until is not None and self.hidden_until.exists():
                self.hidden = ""
            found = [self._files(view) for view in self.views]
            for name in found[0].keys() | found[1].keys():
                here = [name in files for files in found]
                if self.hidden and self.hidden in name:
                    continue
                if found[0].get(name) == found[1].get(name):
                    self.known[name] = found[0][name]
                    self.since.pop(name, None)
                elif all(here) or self.known.get(name) != found[0 if here[0] else 1][name]:
                    if time.monotonic() - self.since.setdefault(name, time.monotonic()) > self.delay:
                        self._carry(name, *(self.views if here[0] else self.views[::-1]))
                else:  # deleted, and not written anew by the other
                    del self.known[name]
                    (self.views[0 if here[0] else 1] / name).unlink(missing_ok=True)

    def _files(self, view: Path) -> dict[str, tuple]:
        found = {}
        for folder, _, names in os.walk(view):  # which passes over a folder that has just gone
            for path in (Path(folder, name) for name in names):
                with contextlib.suppress(OSError):  # and so has the file
                    found[str(path.relative_to(view))] = (path.stat().st_size, path.stat().st_mtime_ns)
        return found

    def _carry(self, name: str, source: Path, target: Path) -> None:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        staged = target.parent / f"{target.name}-staged"
        try:
            shutil.copy2(source / name, staged)
            os.replace(staged, target / name)
        except OSError:
            pass


def train(folder: Path, **options) -> DistTrainer:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2,
        attention_dropout=0.1,
    )  # fmt: skip
    rows = [{"input_ids": (ids := torch.randint(1, 60, (8,))), "labels": ids} for _ in range(12)]
    resumed = options.pop("resume", None)
    args = DistTrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=2, report_to=[], disable_tqdm=True, use_cpu=True, seed=5,
        learning_rate=1e-2, lr_scheduler_type="constant", logging_strategy="no",
        **{"max_steps": 4, "save_steps": 2} | options,
    )  # fmt: skip
    trainer = DistTrainer(LlamaForCausalLM(config), args, train_dataset=rows, eval_dataset=rows)
    trainer.began_at = None

    class Began(TrainerCallback):
        def on_train_begin(self, args, state, control, **others):
            trainer.began_at = state.global_step

    trainer.add_callback(Began())
    if args.load_best_model_at_end:
        losses = iter((1.0, 2.0, 3.0))
        trainer.evaluate = lambda *a, **k: {"eval_loss": next(losses)}
    trainer.train(resume_from_checkpoint=resumed)
    return trainer


def one_machine(say, views: list[Path], job, never: str) -> str:
    """What `job` ends with on this rank, in a file beside its view."""
    rank = int(os.environ["RANK"])
    if views[0] != views[1]:
        os.environ.update(LOCAL_WORLD_SIZE="1", LOCAL_RANK="0")
    consensus.TOLD_SECONDS, wait = 60, consensus.wait_until_well

    def wait_for_what_comes(look) -> str:
        consensus.SEEN_SECONDS = 1.5 if never and never in look() else LIMIT_SECONDS
        return wait(look)

    consensus.wait_until_well = wait_for_what_comes
    found = views[rank].parent / f"rank{rank}.json"
    try:
        trainer = job(views[rank])
        digest = hashlib.sha256()
        for parameter in trainer.model.parameters():
            with tensors.whole_under_zero(parameter):
                whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
                digest.update(whole.detach().numpy().tobytes())
        found.write_text(json.dumps({"began_at": trainer.began_at, "digest": digest.hexdigest()}))
    except Exception as error:
        found.write_text(json.dumps({"error": f"{type(error).__name__}: {error}"}))
    return "done"


def machines(views: list[Path], job, mode: str = "ddp", never: str = "") -> list[dict]:
    """What every rank ended with. A machine waits for what another wrote, but not for long where `never` is in the
    words for what it misses."""
    for view in views:
        view.mkdir(parents=True, exist_ok=True)
    run = Run(mode, views[0].parent / "log", partial(one_machine, views=views, job=job, never=never))
    limit = threading.Timer(LIMIT_SECONDS, lambda: [os.kill(pid, signal.SIGKILL) for pid in run.pids])
    limit.start()
    try:
        is_well = run.wait()
    finally:
        limit.cancel()
    logs = "\n".join(log.read_text()[-3000:] for log in run.logs)
    files = [view.parent / f"rank{rank}.json" for rank, view in enumerate(views)]
    assert is_well and all(file.exists() for file in files), logs
    return [json.loads(file.read_text()) for file in files]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, str]:
    """The folder of an uninterrupted run of six steps under DDP, with its checkpoints 2, 4, 6, and its weights."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    found = machines([folder, folder], partial(train, max_steps=6))
    assert found[0]["digest"] == found[1]["digest"] and found[0]["began_at"] == 0
    return folder, found[0]["digest"]


@pytest.fixture
def views(whole, tmp_path) -> list[Path]:
    """Both machines see checkpoints 2 and 4; on the second, 4 is not there, but what another run left in its place."""
    views = [tmp_path / "first", tmp_path / "second"]
    for view in views:
        shutil.copytree(whole[0], view)
        shutil.rmtree(view / "checkpoint-6")
    late = views[1] / "checkpoint-4"
    content = manifest.read(late)
    manifest.commit(late, content["files"], content | {"run_id": "another", "generation": 1})
    os.utime(late / manifest.MANIFEST, (1, 1))
    return views


# ---- what is resumed ----


def test_machines_wait_until_they_see_the_checkpoint_that_the_first_one_resumes(whole, views):
    (views[1] / "checkpoint-4" / "optimizer.pt").unlink()
    waits, looks = views[1].parent / "the second waits for a checkpoint", []

    def job(folder: Path) -> DistTrainer:
        wait = consensus.wait_until_well
        consensus.wait_until_well = lambda look: (looks.append(1), len(looks) == 2 and waits.touch(), wait(look))[2]
        return train(folder, max_steps=6, resume=True)

    with Mirror(views, delay=0.3, hidden="checkpoint-", hidden_until=waits):
        found = machines(views, job)
    assert [one["began_at"] for one in found] == [4, 4]
    assert [one["digest"] for one in found] == [whole[1]] * 2


def test_a_machine_that_never_sees_it_ends_all_with_what_it_sees(views):
    for asked in (True, str(views[0] / "checkpoint-4")):
        with Mirror(views, delay=0.1, hidden="checkpoint-"):
            found = machines(views, partial(train, max_steps=6, resume=asked), never=manifest.MANIFEST)
        for one in found:
            assert one["error"].startswith("UsageError: rank 0 goes on from"), found
            assert "rank 1 on " in one["error"] and "checkpoint-4, which other machines do not see" in one["error"]
            assert "run_id another" in one["error"] and "step 4, generation 2" in one["error"], found
    assert not (views[0] / "checkpoint-6").exists()


def test_all_machines_load_the_best_checkpoint_also_when_one_sees_it_late(whole, tmp_path):
    views, waits = [tmp_path / "first", tmp_path / "second"], tmp_path / "the second waits for the best checkpoint"

    def job(folder: Path) -> DistTrainer:
        best = resume.best_checkpoint
        resume.best_checkpoint = lambda *given: (waits.touch(), time.sleep(1.0), best(*given))[2]
        options = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2}
        return train(folder, metric_for_best_model="eval_loss", **options)

    with Mirror(views, delay=0.1, hidden="model.safetensors", hidden_until=waits):
        found = machines(views, job)
    assert "digest" in found[0], found
    best = LlamaForCausalLM.from_pretrained(views[0] / "checkpoint-2")
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in best.parameters())).hexdigest()
    assert [one.get("digest") for one in found] == [digest] * 2, found


def test_what_is_resumed_is_what_the_first_rank_was_asked(whole, views):
    def job(folder: Path) -> DistTrainer:
        return train(folder, max_steps=6, resume=True if os.environ["RANK"] == "0" else "auto")

    with Mirror(views, delay=0.1):
        found = machines(views, job)
    assert [one["digest"] for one in found] == [whole[1]] * 2


def staged(folder: Path, run_file: Path) -> SimpleNamespace:
    train_script.main(["--config", str(run_file), "--output_dir", str(folder), "--resume_from_checkpoint", "auto"])
    return SimpleNamespace(model=torch.nn.Identity(), began_at=None)


@pytest.mark.slow
def test_a_staged_run_goes_on_where_the_first_machine_sees_that_it_stopped(tmp_path):
    """It ended in its second stage; the other machine sees nothing of it yet, and would begin with the first."""
    rows = [{"query": f"{WORDS[i % 9]} {i}", "positive": f"{WORDS[i % 7]} read {i}"} for i in range(16)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    fields = {
        "model_config": model_config("bert"), "tokenizer_name": str(tmp_path / "tokenizer"), "disable_tqdm": True,
        "dataset_name": str(tmp_path / "rows.jsonl"), "per_device_train_batch_size": 4,
        "report_to": "none", "use_cpu": True,
        "save_steps": 2, "gradient_cache_chunk_size": 2, "max_steps": 3, "learning_rate": 1e-3,
        "stages": [{"name": "one"}, {"name": "two"}],
    }  # fmt: skip
    (tmp_path / "run.json").write_text(json.dumps(fields))
    job, views = partial(staged, run_file=tmp_path / "run.json"), [tmp_path / "first", tmp_path / "second"]
    machines([tmp_path / "whole"] * 2, job)
    first = tmp_path / "whole" / "stage_0_one"
    weights = [(path / "model.safetensors").read_bytes() for path in (first, tmp_path / "whole")]
    assert weights[0] != weights[1]
    shutil.copytree(tmp_path / "whole", views[0])
    for name in ("model.safetensors", "stage_1_two/manifest.json", "stage_1_two/checkpoint-3/manifest.json"):
        (views[0] / name).unlink()
    with Mirror(views, delay=1.0):
        machines(views, job)
    assert (views[0] / "model.safetensors").read_bytes() == weights[1]
    lines = map(json.loads, (views[0] / "stage_1_two" / "metrics.jsonl").read_text().splitlines())
    assert max(line["step"] for line in lines) == 3
    assert manifest.read(views[0] / "stage_1_two" / "checkpoint-3")["generation"] == 2


# ---- what is written ----


@pytest.mark.parametrize("is_async", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "async"])
def test_a_checkpoint_holds_what_another_machine_wrote_and_is_seen_late(tmp_path, is_async):
    views = [tmp_path / "first", tmp_path / "second"]
    with Mirror(views, delay=0.7):
        found = machines(views, partial(train, max_steps=2, save_async=is_async), mode="fsdp-sharded")
    assert "digest" in found[0] and found[0]["digest"] == found[1]["digest"], found
    names = manifest.read(views[0] / "checkpoint-2")["files"]
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= names.keys()
    assert len([name for name in names if "__1_" in name]) == 2 == len([name for name in names if "__0_" in name])
    assert not manifest.why_incomplete(views[0] / "checkpoint-2", hashes=True)


def test_a_file_of_another_machine_that_never_comes_ends_all_and_leaves_no_checkpoint(tmp_path):
    views = [tmp_path / "first", tmp_path / "second"]
    with Mirror(views, delay=0.1, hidden="rng_state_1"):
        found = machines(views, partial(train, max_steps=2), never="rng_state_1")
    for one in found:
        assert one["error"].startswith("RunError") and "rng_state_1.pth is missing" in one["error"], found
        assert "Give an output_dir that all machines share." in one["error"]
    assert manifest.is_unfinished(views[0] / "checkpoint-2")


def test_a_folder_that_machines_do_not_share_is_found_before_training(tmp_path):
    found = machines([tmp_path / "first", tmp_path / "second"], train, never="seen-by-all")
    for one in found:
        assert one["error"].startswith("UsageError: output_dir=") and "is not one folder for all" in one["error"]
        assert "rank 1 on " in one["error"]
    assert not list((tmp_path / "first").iterdir())


# ---- errors of one rank ----


def failing(folder: Path, where: str, rank: str) -> DistTrainer:
    """Rank `rank` alone has a full disk, from the moment `where` on."""

    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    if os.environ["RANK"] == rank:
        if where == "begin":
            manifest.begin = full
        elif where == "weights":
            DistTrainer._save = full  # under FSDP between two collectives
        elif where == "random state":
            save = torch.save
            torch.save = lambda content, target, *a, **k: (full if "rng_state" in str(target) else save)(
                content, target, *a, **k
            )
        elif where == "hashing":
            manifest.record = full
    return train(folder, max_steps=3)


@pytest.mark.parametrize(
    "mode, where, rank",
    [
        pytest.param("ddp", "begin", "0", marks=pytest.mark.slow),
        pytest.param("ddp", "weights", "0", marks=pytest.mark.slow),
        ("ddp", "random state", "1"),
        pytest.param("ddp", "hashing", "1", marks=pytest.mark.slow),
        ("fsdp-full", "weights", "0"),
        pytest.param("fsdp-sharded", "random state", "1", marks=pytest.mark.slow),
    ],
)
def test_a_disk_that_is_full_for_one_rank_ends_all_with_the_cause(tmp_path, mode, where, rank):
    found = machines([tmp_path / "run"] * 2, partial(failing, where=where, rank=rank), mode=mode)
    for one in found:
        assert one["error"].startswith("UsageError: the disk of") and "ran full while checkpoint-2" in one["error"], (
            found
        )
    assert not manifest.History(tmp_path / "run").next_generation() > 1, "nothing was committed"

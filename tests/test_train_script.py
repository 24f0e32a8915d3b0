"""scripts/train_hf.py as a user runs it, in this process: a small run on local files, and its one-line errors."""

import ctypes
import fcntl
import hashlib
import json
import os
import runpy
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from sentence_transformers import SentenceTransformer

from hf_dist_ext import cli, train
from hf_dist_ext.checkpoints import manifest
from hf_dist_ext.checkpoints.folder import missing_from_checkpoint
from hf_dist_ext.data.sentence_collator import ContrastiveCollator
from hf_dist_ext.models import from_run
from hf_dist_ext.run import lease
from tests.distributed.forked import Run, run_python
from tests.tiny_models import WORDS, embed, embedding_model, loaded, model_config, tiny_tokenizer, write_fields

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "train_hf.py"


@pytest.fixture
def main(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_", "WORLD_SIZE", "RANK"))]:
        monkeypatch.delenv(name)
    return train.main


@pytest.fixture
def run_file(tmp_path):
    """A function that writes a run file for a tiny model and 40 local rows; keyword arguments go over the defaults."""
    return writes_runs_in(tmp_path)


def writes_runs_in(tmp_path: Path):
    draw = torch.Generator().manual_seed(0)
    text = lambda n: " ".join(WORDS[i] for i in torch.randint(len(WORDS), (n,), generator=draw))  # noqa: E731
    rows = [{"question": f"{text(3)} {i}", "answer": f"{text(6)} {i}", "wrong": [text(4), text(5)]} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")

    def write(**more) -> str:
        fields = {
            "_": "a comment", "model_config": model_config("bert"), "tokenizer_name": str(tmp_path / "tokenizer"),
            "dataset_name": str(tmp_path / "rows.jsonl"), "eval_holdout": 8, "prompts": {"query": "search : "},
            "columns": {"query": "question", "positive": "answer", "negative": "wrong"},
            "per_device_train_batch_size": 16, "gradient_cache_chunk_size": 5, "max_steps": 3, "save_steps": 2,
            "output_dir": str(tmp_path / "out"), "learnable_temperature": True, "projection_dim": 16,
            "logging_steps": 1,
        }  # fmt: skip
        return str(write_fields(tmp_path, **fields | more))

    return write


def test_a_run_on_local_files_ends_with_a_model_others_load(main, run_file, tmp_path, capsys):
    main(["--config", run_file(), "--learning_rate", "1e-3"])
    printed = capsys.readouterr().out
    assert "import SentenceTransformer" in printed
    report = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert report["world_size"] == 1 and report["contrastive_batch_size"] == 16 and report["num_chunks"] == 13
    assert set(report["before"]) == set(report["after"]) == {"mrr@10", "ndcg@10", "recall@1", "recall@10"}
    assert report["train_seconds"] > 0 and all(0 <= value <= 1 for value in report["after"].values())

    model = loaded(tmp_path / "out")
    served = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    features = tiny_tokenizer()(["search : parse a date"], return_tensors="pt")
    with torch.no_grad():
        ours = embed(model, **features)
    theirs = served.encode(["parse a date"], prompt_name="query", convert_to_tensor=True)
    assert ours.shape == (1, 16) and torch.allclose(ours, theirs, atol=1e-6)


def as_trained(folder: Path, column: str, texts: list[str], **options) -> torch.Tensor:
    """The embeddings that a step computes of the column."""
    model = loaded(folder)
    features = ContrastiveCollator(tiny_tokenizer(), ["query", "positive"], **options).features(column, texts)
    with torch.no_grad():
        return embed(model, **features)


SHORT = {"max_steps": 1, "save_strategy": "no", "eval_holdout": ...}
TEXTS = ["parse a date from text read file into list of lines", "sort the numbers by key", "date"]


@pytest.mark.parametrize("given", [..., {"query": "find : ", "positive": "text : "}, {"query": "find : "}, {}])
def test_fine_tuning_keeps_the_prompt_names_of_the_folder(main, run_file, tmp_path, given):
    """They mean what was trained: no name serves a prompt that this run's queries or documents did not have."""
    own = {"query": "search : ", "passage": "file : ", "STS": "key : "}
    base = embedding_model(model_config("bert"))
    from_run.describe(base, prompts=own, default_prompt_name="STS")
    base.save_pretrained(str(tmp_path / "base"))
    assert SentenceTransformer(str(tmp_path / "base"), device="cpu").default_prompt_name == "STS"
    start = {"model_config": ..., "projection_dim": ..., "model_name_or_path": str(tmp_path / "base")} | SHORT
    main(["--config", run_file(**start, prompts=given)])
    served = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert {"query", "passage", "STS"} <= served.prompts.keys() and served.prompts["STS"] == "key : "
    trained = {"query": "search : ", "positive": "file : "} if given is ... else given
    by_default = as_trained(tmp_path / "out", "query", TEXTS, prompts={"query": "key : "})
    queries = as_trained(tmp_path / "out", "query", TEXTS, prompts=trained)
    documents = as_trained(tmp_path / "out", "positive", TEXTS, prompts=trained)
    for ours, theirs in (
        (queries, served.encode_query(TEXTS, convert_to_tensor=True)),
        (documents, served.encode_document(TEXTS, convert_to_tensor=True)),
        (documents, served.encode(TEXTS, prompt_name="passage", convert_to_tensor=True)),
        (by_default, served.encode(TEXTS, convert_to_tensor=True)),
    ):
        assert torch.allclose(ours, theirs, atol=1e-6)
    for column in trained:
        assert served.prompts[column] == trained[column]


@pytest.mark.parametrize("lengths", [{"query": 5, "positive": 9}, {"query": 9, "positive": 5}, {"query": 5}])
def test_texts_are_served_at_the_length_at_which_their_column_was_trained(main, run_file, tmp_path, lengths):
    main(["--config", run_file(max_length=lengths, prompts=..., **SHORT)])
    out = tmp_path / "out"
    served = SentenceTransformer(str(out), device="cpu")
    queries, documents = (as_trained(out, column, TEXTS, max_length=lengths) for column in ("query", "positive"))
    assert not torch.allclose(queries[0], documents[0], atol=1e-3)
    assert torch.allclose(served.encode_query(TEXTS, convert_to_tensor=True), queries, atol=1e-6)
    assert torch.allclose(served.encode_document(TEXTS, convert_to_tensor=True), documents, atol=1e-6)

    more = {"model_config": ..., "projection_dim": ..., "model_name_or_path": str(out), "tokenizer_name": ...} | SHORT
    main(["--config", run_file(**more, prompts=..., output_dir=str(tmp_path / "again"))])
    first, second = (loaded(folder)[0] for folder in (out, tmp_path / "again"))
    for name in ("query_length", "document_length", "max_seq_length"):
        assert getattr(second, name) == getattr(first, name)


def test_a_finished_run_that_is_started_again_keeps_the_figures_of_its_training(main, run_file, tmp_path):
    config = run_file(**SHORT | {"save_strategy": "steps", "save_steps": 1})
    main(["--config", config])
    metrics = tmp_path / "out" / "metrics.json"
    first = json.loads(metrics.read_text())
    main(["--config", config, "--resume_from_checkpoint", "auto"])
    assert json.loads(metrics.read_text()) == first and first["num_chunks"] > 0


@pytest.mark.parametrize("moment", ["record", "commit"])
def test_a_kill_in_the_first_save_is_followed_by_a_start_that_trains(main, run_file, tmp_path, moment):
    """While the files are hashed, and when only the manifest is missing."""

    def killed(say) -> str:
        setattr(manifest, moment, lambda *arguments: os.kill(os.getpid(), signal.SIGKILL))
        main(["--config", run_file()])
        return "not killed"

    assert not Run("single", tmp_path / "killed", killed).wait()
    torn = tmp_path / "out" / "checkpoint-2"
    assert not missing_from_checkpoint(torn) and not (torn / manifest.MANIFEST).exists()
    command = ["--config", run_file(), "--resume_from_checkpoint"]
    with pytest.raises(SystemExit):
        main([*command, "true"])
    main([*command, "auto"])
    for step in (2, 3):
        assert not manifest.why_incomplete(tmp_path / "out" / f"checkpoint-{step}", hashes=True)
    assert json.loads((tmp_path / "out" / "metrics.json").read_text())["num_chunks"] == 13
    with (tmp_path / "out" / "metrics.jsonl").open("a") as log:
        log.write('{"step": 4, "loss": 1.0}\n{"step": 5, "lo')  # a kill after the newest checkpoint
    main([*command, "auto", "--max_steps", "4"])
    lines = map(json.loads, (tmp_path / "out" / "metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4]


@pytest.mark.parametrize("change, words", [
    ({"report_to": "wandb"}, "needs the package wandb, which is not installed. Install it (pip install wandb)"),
    ({"output_dir": "/proc/self/out"}, "can not be written: No such file or directory"),
    ({"output_dir": "/dev/null/out"}, "can not be written: Not a directory"),
])  # fmt: skip
def test_what_can_not_work_is_found_before_anything_is_loaded(main, run_file, monkeypatch, capsys, change, words):
    import hf_dist_ext.tasks.parts

    monkeypatch.setattr(hf_dist_ext.tasks.parts, "make_arguments", lambda run: pytest.fail("the run has begun"))
    for launched in ({}, {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}):  # also under the user's own launcher
        for name, value in launched.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as exit_:
            main(["--config", run_file(num_processes=2 if not launched else None, **change)])
        assert exit_.value.code == 2 and words in the_error(capsys.readouterr().err)


MOUNTED = "mount -t tmpfs -o size=$SIZE none $OUT && mount -t tmpfs -o ro none $RO"
CLONE_NEWNS = 0x20000  # linux/sched.h


def on_small_disk(tmp_path: Path, run_file: str, size: str, code: int) -> str:
    """What the script says that ends with this exit code, with an output_dir on a disk of its own; what lies there
    comes to back/."""
    places = {"OUT": str(tmp_path / "out"), "RO": str(tmp_path / "read_only"), "SIZE": size}
    for name in ("OUT", "RO"):
        Path(places[name]).mkdir(exist_ok=True)

    def in_a_namespace_of_mounts() -> None:
        assert ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS) == 0, os.strerror(ctypes.get_errno())
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["sh", "-c", MOUNTED], check=True, env=os.environ | places)
        os.chdir(tmp_path)
        try:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        finally:
            shutil.copytree(places["OUT"], tmp_path / "back")

    return run_python(in_a_namespace_of_mounts, "--config", run_file, code=code)


def the_error(said: str) -> str:
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in said, said
    return line


may_mount = pytest.mark.skipif(
    not shutil.which("unshare")
    or subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode,
    reason="mounting is not allowed here",
)
LARGE = model_config("bert") | {"vocab_size": 20_000}


@may_mount
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_where_the_disk_has_no_room_for_the_model_the_checkpoint_stays_and_is_named(run_file, tmp_path, processes):
    weights = sum(p.numel() for p in embedding_model(LARGE).parameters()) * 4
    run_file = run_file(model_config=LARGE, max_steps=2, eval_holdout=..., num_processes=processes)
    line = the_error(on_small_disk(tmp_path, run_file, f"{int(3.6 * weights) >> 10}k", code=1))
    assert f"the disk of {tmp_path / 'out'} is full" in line and "checkpoint-2 is complete and can be resumed" in line
    left = {path.relative_to(tmp_path / "back").parts[0] for path in (tmp_path / "back").rglob("*.safetensors")}
    assert left == {"checkpoint-2"}, "what was cut short is removed"


@may_mount
def test_a_read_only_output_dir_is_one_line_before_anything_is_loaded(run_file, tmp_path):
    said = on_small_disk(tmp_path, run_file(output_dir=str(tmp_path / "read_only" / "out")), "100k", code=2)
    assert "can not be written: Read-only file system" in said and len(said.splitlines()) == 1, said


# A refused start -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(a folder with a finished run of three steps in out/, the function that writes its run file)"""
    folder = tmp_path_factory.mktemp("trained")
    write = writes_runs_in(folder)
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_", "WORLD_SIZE", "RANK"))]:
            patch.delenv(name)
        train.main(["--config", write()])
    return folder, write


def state_of(folder: Path) -> dict[str, tuple]:
    """Every file with its content and the time of its last change, and every folder."""
    return {
        str(path.relative_to(folder)): (
            (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns) if path.is_file() else ()
        )
        for path in folder.rglob("*")
    }


OLDER = ["--resume_from_checkpoint", "{out}/checkpoint-2"]
NEWEST, OVER = ["--resume_from_checkpoint", "true"], ["--overwrite_output_dir"]


@pytest.mark.parametrize("words, change, said", [
    (["--sed", "7"], {}, "Unknown field"),
    (["--seed", "seven"], {}, "seed"),
    ([], {}, "another run"),
    ([*NEWEST, "--seed", "7"], {}, "seed of the order"),
    ([*OLDER, "--seed", "7"], {}, "seed of the order"),
    ([*OLDER, "--optim", "sgd"], {}, "optim"),
    ([*OLDER, "--trainable_modules", ".*dense.*"], {}, "holds no trainable.safetensors"),
    ([*OVER, "--trainable_modules", "nothing"], {}, "matches no module"),
    (["--resume_from_checkpoint", "{out}/checkpoint-9"], {}, "no such folder"),
    (OVER, {"dataset_name": "nowhere.jsonl"}, "nowhere.jsonl"),
    (OVER, {"columns": {"query": "question", "positive": "anwser"}}, "answer"),
    ([*OVER, "--per_device_train_batch_size", "1000"], {}, "fewer than one global batch"),
    ([*OVER, "--tokenizer_name", "no/such/folder"], {}, "tokenizer"),
    (OVER, {"model_config": {"model_type": "bort"}}, "bort"),
    ([*OVER, "--report_to", "tensorboard", "trackio"], {}, "needs the package trackio"),
    ([*OVER, "--fsdp", "true"], {}, "does not shard"),
    ([*OVER, "--push_to_hub"], {}, "HF_HUB_OFFLINE"),
    ([*OVER, "--resume_weights_only"], {}, "has no effect without resume_from_checkpoint"),
    (OVER, {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 3}, "round multiple"),
])  # fmt: skip
def test_a_refused_start_leaves_every_file_of_the_folder_as_it_was(
    main, trained, monkeypatch, capsys, words, change, said
):
    folder, write = trained
    monkeypatch.chdir(folder)
    config = write(**change)
    before = state_of(folder)
    with pytest.raises(SystemExit) as exit_:
        main(["--config", config, *[word.format(out=folder / "out") for word in words]])
    assert exit_.value.code == 2 and said in the_error(capsys.readouterr().err)
    assert state_of(folder) == before


def test_a_folder_that_another_run_holds_is_left_as_it_was_and_said_to_be_in_use(main, trained, capsys):
    folder, write = trained
    held, config = folder / "out" / lease.NAME, write()
    held.write_text(json.dumps({"host": "elsewhere", "pid": 7, "token": "theirs"}))
    with held.open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        before = state_of(folder)
        for words in ([], NEWEST, OVER):
            with pytest.raises(SystemExit) as exit_:
                main(["--config", config, *words])
            error = capsys.readouterr().err
            assert exit_.value.code == 2 and "in use by process 7 on elsewhere" in error and "another run" not in error
        assert state_of(folder) == before
    held.unlink()


def test_a_refused_start_leaves_no_folder_of_its_own(main, trained, capsys):
    folder, write = trained
    before = state_of(folder)
    for change in ({"dataset_name": "nowhere.jsonl"}, {"per_device_train_batch_size": 1000}):
        with pytest.raises(SystemExit):
            main(["--config", write(output_dir=str(folder / "new" / "one"), **change)])
        write()
        assert state_of(folder).keys() == before.keys()


def test_after_a_refused_start_the_run_goes_on_from_its_newest_checkpoint(main, trained, tmp_path, capsys):
    folder, write = trained
    shutil.copytree(folder / "out", tmp_path / "out")
    config = write(output_dir=str(tmp_path / "out"))
    older = ["--resume_from_checkpoint", str(tmp_path / "out" / "checkpoint-2"), "--seed", "7"]
    with pytest.raises(SystemExit):
        main(["--config", config, *older])
    cli.main(["resume", str(tmp_path / "out"), "--max_steps", "4"])
    assert manifest.read(tmp_path / "out" / "checkpoint-4")["parent"] is None, "no branch was declared"

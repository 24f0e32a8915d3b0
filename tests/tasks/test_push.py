"""`hf-dist push` and `push_to_hub` at the end of a run, to a local server that stands in for the hub."""

import json
import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
import transformers.utils.hub
from huggingface_hub import HfApi, ModelCard, snapshot_download
from sentence_transformers import SentenceTransformer
from transformers import AutoModel

from hf_dist_ext import cli
from hf_dist_ext.checkpoints.hub import files_of_model
from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.from_run import describe
from hf_dist_ext.training import model_card
from hf_dist_ext.training.trainer import DistTrainer
from tests import hub_server
from tests.checkpoints import test_trainable
from tests.sentence_models import routed_model
from tests.test_train_script import TEXTS, main, run_file  # noqa: F401, fixtures
from tests.tiny_models import embedding_model, model_config

TOKEN, REPO = "hf_SECRET", "someone/model"
LEFT_OUT = [
    "checkpoint-2/model.safetensors",
    "checkpoint-2/optimizer.pt",
    "optimizer.pt",
    "rng_state.pth",
    "features/features-1.safetensors",  # a cache that was given a folder in here
    "mine/notes.txt",
    "smaller_chunks.json",
    "runs/x",
]
LEFT_OUT += ["index/1.safetensors", "_run.lease", "training_args.bin", "stage_0_a/model.safetensors"]


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with hub_server.running(TOKEN) as server:
        files = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        changes = {"HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True, "ENDPOINT": server.url}
        for name, value in (changes | {"HUGGINGFACE_CO_URL_TEMPLATE": files}).items():
            monkeypatch.setattr(huggingface_hub.constants, name, value)
        monkeypatch.setattr(transformers.utils.hub, "_hf_api", HfApi(endpoint=server.url))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)  # of the run file's own check
        yield server


@pytest.fixture
def folder(tmp_path) -> Path:
    """A model's folder as a run leaves it, with what goes on with the run."""
    torch.manual_seed(0)
    path = tmp_path / "out"
    model = embedding_model(model_config("bert"), projection_dim=16)
    describe(model, prompts={"query": "search : "})
    model.save_pretrained(str(path))
    (path / "README.md").write_text(f'---\nlicense: mit\n---\n{model_card.MARK}\nSentenceTransformer("{path}")\n')
    for name in LEFT_OUT:
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text("what goes on")
    return path


def download(server, tmp_path, revision=None) -> Path:
    options = {"endpoint": server.url, "token": TOKEN, "revision": revision}
    return Path(snapshot_download(REPO, cache_dir=tmp_path / f"cache-{revision}", **options))


def test_what_was_pushed_is_downloaded_and_loads_equal(hub, folder, tmp_path, capsys):
    cli.main(["push", str(folder), REPO, "--private"])
    assert "private" in json.dumps(hub.made) and REPO in capsys.readouterr().out
    again = download(hub, tmp_path)
    names = sorted(str(path.relative_to(again)) for path in again.rglob("*") if path.is_file())
    assert names == files_of_model(folder) and not set(names) & set(LEFT_OUT)
    assert len(hub.put) == 2, "the weights of backbone and projection by LFS"
    for name in set(names):
        assert (again / name).read_bytes() == (folder / name).read_bytes()
    here, there = (SentenceTransformer(str(path), device="cpu") for path in (folder, again))
    assert (here.encode_query(TEXTS) == there.encode_query(TEXTS)).all()
    assert f'SentenceTransformer("{REPO}")' in (again / "README.md").read_text()
    assert ModelCard.load(again / "README.md").data.license == "mit"


def test_another_branch_and_files_that_are_asked_for(hub, folder, tmp_path):
    cli.main(["push", str(folder), REPO, "--revision", "try", "--include", "runs/*", "checkpoint-2/*"])
    again = download(hub, tmp_path, "try")
    assert (again / "runs" / "x").is_file() and (again / "checkpoint-2" / "optimizer.pt").is_file()
    assert not (again / "optimizer.pt").exists() and hub.commits[hub.branches[REPO, "main"]] == {}


@pytest.mark.parametrize("change, words", [
    ("refused", "was not pushed to someone/model: .*you may not.* push it again later"),
    ("offline", "HF_HUB_OFFLINE is set"),
    ("no token", "there is no token for the hub"),
    ("no folder", "is no folder"),
    ("no weights", "holds no weights that could be pushed"),
    ("include", "fits no file"),
])  # fmt: skip
def test_what_cannot_be_pushed_is_one_line_and_leaves_the_folder_as_it_was(
    hub, folder, monkeypatch, capsys, change, words
):
    command, card = ["push", str(folder), REPO], (folder / "README.md").read_bytes()
    if change == "refused":
        hub.refuses.append("/commit/")
    elif change == "offline":
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    elif change == "no token":
        monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    elif change == "no folder":
        command[1] = str(folder / "nowhere")
    elif change == "no weights":
        for path in folder.rglob("model.safetensors"):
            path.unlink()
    else:
        command += ["--include", "nothing*"]
    with pytest.raises(UsageError, match=words):
        from hf_dist_ext.tasks import push

        push.main(Path(command[1]), REPO, include=command[4:])
    assert (folder / "README.md").read_bytes() == card and not hub.put or change == "refused"


RUN = {"push_to_hub": True, "hub_model_id": REPO, "projection_dim": None, "hub_strategy": "end"}


def test_a_run_ends_with_a_push_of_its_model_and_card(hub, main, run_file, tmp_path, capsys):  # noqa: F811
    main(["--config", run_file(**RUN)])
    again = download(hub, tmp_path)
    out = tmp_path / "out"
    assert (
        sorted(files_of_model(out)) == sorted(files_of_model(again)) and f"pushed:   {REPO}" in capsys.readouterr().out
    )
    card = ModelCard.load(again / "README.md")
    assert "loss:InfoNCELoss" in card.data.tags and f'SentenceTransformer("{REPO}")' in card.content
    here, there = (SentenceTransformer(str(path), device="cpu") for path in (out, again))
    assert (here.encode_query(TEXTS) == there.encode_query(TEXTS)).all()
    assert not [path for path in out.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]


def test_a_failed_push_at_the_end_names_the_command(hub, main, run_file, tmp_path, capsys):  # noqa: F811
    """And leaves the model and its card."""
    hub.refuses.append("/commit/")
    with pytest.raises(SystemExit) as stopped:
        main(["--config", run_file(**RUN, hub_private_repo=True, hub_revision="try")])
    said, out = capsys.readouterr().err, tmp_path / "out"
    assert stopped.value.code == 1 and "you may not" in said
    assert f"hf-dist push {out} {REPO} --private --revision try" in said
    assert f'SentenceTransformer("{out}")' in (out / "README.md").read_text()
    hub.refuses.clear()
    cli.main(["push", str(out), REPO, "--private", "--revision", "try"])
    assert torch.equal(*(AutoModel.from_pretrained(path).get_input_embeddings().weight
                         for path in (out, download(hub, tmp_path, "try"))))  # fmt: skip


def test_a_run_that_could_not_push_is_refused_before_it_trains(hub, main, run_file, monkeypatch, capsys):  # noqa: F811
    monkeypatch.setattr(DistTrainer, "train", lambda *a, **k: pytest.fail("trained"))
    changes = {
        "HF_HUB_OFFLINE is set. Unset": lambda: monkeypatch.setenv("HF_HUB_OFFLINE", "1"),
        "there is no token": lambda: (monkeypatch.delenv("HF_TOKEN"), monkeypatch.delenv("HF_HUB_OFFLINE")),
        "you may not": lambda: (monkeypatch.setenv("HF_TOKEN", TOKEN), hub.refuses.append("/repos/create")),
    }
    for words, change in changes.items():
        change()
        with pytest.raises(SystemExit) as stopped:
            main(["--config", run_file(**RUN)])
        said = capsys.readouterr().err
        assert stopped.value.code == 2 and words in said and "hf-dist push" in said and REPO in said, said


def test_from_python_a_card_that_somebody_wrote_is_pushed_as_it_is(hub, tmp_path):
    options = {"push_to_hub": True, "hub_model_id": REPO, "hub_strategy": "end"}
    trainer, out = test_trainable.make(tmp_path / "out", test_trainable.base(tmp_path), **options), tmp_path / "out"
    trainer.train()
    (out / "README.md").write_text("My own words.")
    trainer.push_to_hub()
    again = download(hub, tmp_path)
    assert (again / "README.md").read_text() == "My own words."
    assert (again / "trainable.safetensors").read_bytes() == (out / "trainable.safetensors").read_bytes()
    (out / "README.md").unlink()
    trainer.save_model()
    pushed = hub.commits[hub.branches[REPO, "main"]]
    assert b"generated_from_trainer" in pushed["README.md"], "Trainer's draft, where there is none"
    assert not [name for name in pushed if name.startswith(("checkpoint", "training_args"))]


def test_the_modules_of_every_route_are_pushed(tmp_path):
    model = routed_model(tmp_path / "parts")
    model.save_pretrained(str(tmp_path / "out"))
    (tmp_path / "out" / "features.safetensors").write_text("a cache")
    names = files_of_model(tmp_path / "out")
    for name in names:
        (tmp_path / "hub" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(tmp_path / "out" / name, tmp_path / "hub" / name)
    again = SentenceTransformer(str(tmp_path / "hub"), device="cpu")
    assert (again.encode_document(TEXTS) == model.encode_document(TEXTS)).all()
    assert (again.encode_query(TEXTS) == model.encode_query(TEXTS)).all() and "features.safetensors" not in names

"""`push_to_hub` at the end of a run, to a local server that stands in for the hub."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
import transformers.utils.hub
from huggingface_hub import HfApi, ModelCard, snapshot_download
from sentence_transformers import SentenceTransformer
from transformers import AutoModel

from hf_dist_ext.checkpoints.model_names import of_model
from hf_dist_ext.training.trainer import DistTrainer
from tests import hub_server
from tests.checkpoints import test_trainable
from tests.sentence_models import routed_model
from tests.test_train_script import TEXTS, main, run_file  # noqa: F401, fixtures

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
LEFT_OUT += ["_run.lease", "training_args.bin", "stage_0_a/model.safetensors"]


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


def download(server, tmp_path) -> Path:
    return Path(snapshot_download(REPO, cache_dir=tmp_path / "cache", endpoint=server.url, token=TOKEN))


RUN = {"push_to_hub": True, "hub_model_id": REPO, "projection_dim": None, "hub_strategy": "end"}


def test_a_run_ends_with_a_push_of_its_model_and_card(hub, main, run_file, tmp_path, capsys):  # noqa: F811
    main(["--config", run_file(**RUN)])
    out, again = tmp_path / "out", download(hub, tmp_path)
    for name in LEFT_OUT:
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("what goes on")
    names = [str(path.relative_to(again)) for path in again.rglob("*") if path.is_file()]
    assert sorted(names) == of_model(out) and not {*names} & {*LEFT_OUT}
    assert f"pushed:   {REPO}" in capsys.readouterr().out and hub.put, "the weights by LFS"
    assert all((again / name).read_bytes() == (out / name).read_bytes() for name in names)
    card = ModelCard.load(again / "README.md")
    assert "loss:InfoNCELoss" in card.data.tags and f'SentenceTransformer("{REPO}")' in card.content
    here, there = (SentenceTransformer(str(path), device="cpu") for path in (out, again))
    assert (here.encode_query(TEXTS) == there.encode_query(TEXTS)).all()
    assert not [path for path in out.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]


def test_a_failed_push_at_the_end_names_the_command(hub, main, run_file, tmp_path, capsys):  # noqa: F811
    """Which pushes the model and its card, and no checkpoint."""
    hub.refuses.append("/commit/")
    with pytest.raises(SystemExit) as stopped:
        main(["--config", run_file(**RUN, hub_private_repo=True, hub_revision="try")])
    said, out = capsys.readouterr().err, tmp_path / "out"
    assert stopped.value.code == 1 and "you may not" in said
    command = f"hf upload {REPO} {out} . --exclude 'checkpoint-*' --private --revision try"
    assert command in said and f'SentenceTransformer("{REPO}")' in (out / "README.md").read_text()
    (out / "checkpoint-1").mkdir()
    (out / "checkpoint-1" / "optimizer.pt").write_text("what goes on")
    hub.refuses.clear()
    own = {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1"}
    subprocess.run(shlex.split(command.partition(" --revision")[0]), env=os.environ | own, check=True)
    again = download(hub, tmp_path)
    assert torch.equal(*(AutoModel.from_pretrained(path).get_input_embeddings().weight for path in (out, again)))
    assert not list(again.glob("checkpoint-*"))


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
        assert stopped.value.code == 2 and words in said and f"hf upload {REPO}" in said, said


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
    names = of_model(tmp_path / "out")
    for name in names:
        (tmp_path / "hub" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(tmp_path / "out" / name, tmp_path / "hub" / name)
    again = SentenceTransformer(str(tmp_path / "hub"), device="cpu")
    assert (again.encode_document(TEXTS) == model.encode_document(TEXTS)).all()
    assert (again.encode_query(TEXTS) == model.encode_query(TEXTS)).all() and "features.safetensors" not in names

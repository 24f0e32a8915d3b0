"""Pushes in the middle of a run, to a local server that speaks the part of the hub's interface that they need."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
import transformers.utils.hub
from huggingface_hub import HfApi
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Router
from transformers import LlamaForCausalLM, TrainingArguments

from hf_dist_ext.checkpoints.merge import merge
from hf_dist_ext.data.collator import CONSTANTS
from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.checkpoints import test_trainable
from tests.tiny_models import WORDS, embedding_model, model_config

TOKEN = "hf_SECRET"


class Hub(BaseHTTPRequestHandler):
    """Routes of create_repo, upload_folder and the check of a model card; every file is sent inside of its commit."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        assert self.headers["Authorization"] == f"Bearer {TOKEN}" or "validate-yaml" in self.path
        answer = {"errors": [], "warnings": []}
        if self.path == "/api/repos/create":
            answer = {"url": f"{self.server.url}/someone/model"}
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            modes = {"uploadMode": "regular", "shouldIgnore": False}
            answer = {"files": [{"path": file["path"]} | modes for file in files]}
        elif "/commit/" in self.path:
            found = {}
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    found[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self.server.pushes.append(found)
            answer = {"commitUrl": f"{self.server.url}/someone/model/commit/{'a' * 40}", "commitOid": "a" * 40}
        self.answer(answer)

    def do_GET(self):
        self.answer({"sha": "a" * 40, "id": "someone/model", "siblings": []})

    def answer(self, content: dict) -> None:
        text = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *words):
        pass


@pytest.fixture
def server(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.url, server.pushes = f"http://127.0.0.1:{server.server_port}", []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
    monkeypatch.setattr(transformers.utils.hub, "_hf_api", HfApi(endpoint=server.url))
    yield server
    server.shutdown()
    server.server_close()


HUB = dict(push_to_hub=True, hub_model_id="someone/model", hub_token=TOKEN, hub_always_push=True)


def first_push(server, trainer: DistTrainer, folder: Path) -> Path:
    """The hub's folder after the push of the first checkpoint, which is kept beside it."""
    cache = Path(trainer.args.output_dir, "features", "features-1.safetensors")
    cache.parent.mkdir(parents=True)
    cache.write_bytes(b"of the training rows")
    trainer.train()
    trainer._finish_current_push()
    assert len(server.pushes) == 2, "one per checkpoint"
    for push in server.pushes:
        assert not [
            name
            for name in push
            if "features" in name or "lease" in name or "optimizer" in name or "rng_state" in name
        ], push.keys()
        assert not [name for name, content in push.items() if TOKEN.encode() in content]
    for name, content in server.pushes[0].items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def projected() -> SentenceTransformer:
    return embedding_model(model_config("bert"), pooling="cls", projection_dim=6)


def routes() -> SentenceTransformer:
    return SentenceTransformer(modules=[Router.for_query_document([*projected()], [*projected()])], device="cpu")


def collate(rows: list[int]) -> dict:
    draw = torch.Generator().manual_seed(sum(rows))
    ids = {name: torch.randint(1, 20, (len(rows), width), generator=draw) for name, width in WIDTHS.items()}
    batch = {name: {"input_ids": value, "attention_mask": torch.ones_like(value)} for name, value in ids.items()}
    return batch | {CONSTANTS: {"query": {"task": "query"}, "positive": {"task": "document"}}}


WIDTHS = {"query": 5, "positive": 9}


@pytest.mark.parametrize("make", [projected, routes])
def test_a_push_in_the_middle_of_a_run_is_the_model_of_its_checkpoint(tmp_path, server, make):
    args = DistTrainingArguments(
        output_dir=str(tmp_path / "out"), per_device_train_batch_size=4, max_steps=4, save_steps=2, report_to=[],
        use_cpu=True, disable_tqdm=True, learning_rate=1e-2, **HUB,
    )  # fmt: skip
    model = make()
    trainer = DistTrainer(model, args, loss=InfoNCELoss(), train_dataset=list(range(32)), data_collator=collate)
    pushed = SentenceTransformer(str(first_push(server, trainer, tmp_path / "hub")), device="cpu")
    saved = SentenceTransformer(str(tmp_path / "out" / "checkpoint-2"), device="cpu")
    for column in ("query", "document"):
        vectors, of_saved, of_end = (one.encode(WORDS, task=column) for one in (pushed, saved, model))
        assert (vectors == of_saved).all() and (vectors != of_end).any(), "training went on"


def test_a_push_of_what_was_trained_is_merged_as_its_checkpoint_is(tmp_path, server):
    base = test_trainable.base(tmp_path)
    trainer = test_trainable.make(tmp_path / "out", base, **HUB)
    merge(first_push(server, trainer, tmp_path / "hub"), tmp_path / "pushed")
    merge(tmp_path / "out" / "checkpoint-2", tmp_path / "saved")
    pushed, saved = (LlamaForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("pushed", "saved"))
    assert all(torch.equal(pushed[name], saved[name]) for name in saved)


def test_with_trainers_own_arguments_no_push_holds_the_token(tmp_path, server):
    args = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=4, max_steps=2, save_steps=1, report_to=[],
        use_cpu=True, disable_tqdm=True, **HUB,
    )  # fmt: skip
    rows = [{"input_ids": torch.arange(1, 9), "labels": torch.arange(1, 9)} for _ in range(8)]
    model = LlamaForCausalLM.from_pretrained(test_trainable.base(tmp_path))
    trainer = DistTrainer(model, args, train_dataset=rows)
    trainer.train()
    trainer._finish_current_push()
    pushed = [content for push in server.pushes for content in push.values()]
    assert server.pushes and args.hub_token == TOKEN
    assert not [content for content in pushed if TOKEN.encode() in content]


def test_a_push_takes_what_trainers_takes_by_place(tmp_path, server):
    trainer = test_trainable.make(tmp_path / "out", test_trainable.base(tmp_path), **HUB)
    trainer.push_to_hub("words", True, TOKEN, None, True, license="mit")
    assert len(server.pushes) == 1


def test_the_hub_token_is_in_no_file_of_a_run_that_pushes(tmp_path, server):
    trainer = test_trainable.make(tmp_path / "out", test_trainable.base(tmp_path), **HUB)
    trainer.train()
    trainer._finish_current_push()
    assert trainer.args.hub_token == TOKEN
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len([path for path in files if path.name == "training_args.bin"]) == 2, "of the checkpoints"
    assert not [path for path in files if TOKEN.encode() in path.read_bytes()]

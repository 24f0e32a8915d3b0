"""Pushes in the middle of a run, to a local server that speaks the part of the hub's interface that they need."""

from pathlib import Path

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Router
from transformers import LlamaForCausalLM, TrainingArguments

from hf_dist_ext.checkpoints.hub import copy_model
from hf_dist_ext.checkpoints.merge import merge
from hf_dist_ext.data.collator import CONSTANTS
from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.checkpoints import test_trainable
from tests.tasks.test_push import REPO, TOKEN, hub  # noqa: F401, a fixture
from tests.tiny_models import WORDS, embedding_model, model_config

HUB = dict(push_to_hub=True, hub_model_id=REPO, hub_token=TOKEN, hub_always_push=True)


def pushes_to(server) -> list[dict[str, bytes]]:
    """What lay in the repository after each push."""
    return [files for files in server.commits.values() if files]


def first_push(server, trainer: DistTrainer, folder: Path) -> Path:
    """The hub's folder after the push of the first checkpoint, which is kept beside it. The next checkpoint is saved
    while the hub still reads that push."""
    server.is_slow = True
    cache = Path(trainer.args.output_dir, "features", "features-1.safetensors")
    cache.parent.mkdir(parents=True)
    cache.write_bytes(b"of the training rows")
    trainer.train()
    trainer._finish_current_push()
    assert len(pushes_to(server)) == 2, "one per checkpoint, whole"
    for push in pushes_to(server):
        assert not [
            name
            for name in push
            if "features" in name or "lease" in name or "optimizer" in name or "rng_state" in name
        ], push.keys()
        assert not [name for name, content in push.items() if TOKEN.encode() in content]
    for name, content in pushes_to(server)[0].items():
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
def test_a_push_in_the_middle_of_a_run_is_the_model_of_its_checkpoint(tmp_path, hub, make):  # noqa: F811
    args = DistTrainingArguments(
        output_dir=str(tmp_path / "out"), per_device_train_batch_size=4, max_steps=4, save_steps=2, report_to=[],
        use_cpu=True, disable_tqdm=True, learning_rate=1e-2, **HUB,
    )  # fmt: skip
    model = make()
    trainer = DistTrainer(model, args, loss=InfoNCELoss(), train_dataset=list(range(32)), data_collator=collate)
    pushed = SentenceTransformer(str(first_push(hub, trainer, tmp_path / "hub")), device="cpu")
    saved = SentenceTransformer(str(tmp_path / "out" / "checkpoint-2"), device="cpu")
    for column in ("query", "document"):
        vectors, of_saved, of_end = (one.encode(WORDS, task=column) for one in (pushed, saved, model))
        assert (vectors == of_saved).all() and (vectors != of_end).any(), "training went on"


def test_a_push_of_what_was_trained_is_merged_as_its_checkpoint_is(tmp_path, hub):  # noqa: F811
    base = test_trainable.base(tmp_path)
    trainer = test_trainable.make(tmp_path / "out", base, **HUB)
    merge(first_push(hub, trainer, tmp_path / "hub"), tmp_path / "pushed")
    merge(tmp_path / "out" / "checkpoint-2", tmp_path / "saved")
    pushed, saved = (LlamaForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("pushed", "saved"))
    assert all(torch.equal(pushed[name], saved[name]) for name in saved)


def test_a_push_that_failed_in_the_middle_of_a_run_is_told(tmp_path, hub, caplog):  # noqa: F811
    hub.refuses.append("/commit/")
    test_trainable.make(tmp_path / "out", test_trainable.base(tmp_path), **HUB).train()
    assert len([line for line in caplog.messages if "push in the middle of the run failed" in line]) == 2


def test_a_checkpoint_is_not_pushed_while_the_push_before_it_does_not_end(tmp_path, hub, caplog):  # noqa: F811
    hub.is_slow = True
    trainer = test_trainable.make(tmp_path / "out", test_trainable.base(tmp_path), ddp_timeout=0.1, **HUB)
    trainer.train()
    assert "checkpoint-4 is not pushed" in caplog.text and len(pushes_to(hub)) == 1


def test_with_trainers_own_arguments_no_push_holds_the_token(tmp_path, hub):  # noqa: F811
    args = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=4, max_steps=2, save_steps=1, report_to=[],
        use_cpu=True, disable_tqdm=True, **HUB,
    )  # fmt: skip
    rows = [{"input_ids": torch.arange(1, 9), "labels": torch.arange(1, 9)} for _ in range(8)]
    model = LlamaForCausalLM.from_pretrained(test_trainable.base(tmp_path))
    trainer = DistTrainer(model, args, train_dataset=rows)
    trainer.train()
    trainer._finish_current_push()
    pushed = [content for push in pushes_to(hub) for content in push.values()]
    assert pushed and args.hub_token == TOKEN
    assert not [content for content in pushed if TOKEN.encode() in content]


def test_a_push_takes_what_trainers_takes_by_place(tmp_path, hub):  # noqa: F811
    trainer = test_trainable.make(tmp_path / "out", test_trainable.base(tmp_path), **HUB)
    trainer.push_to_hub("words", True, TOKEN, None, True, license="mit")
    assert len(pushes_to(hub)) == 1


def test_the_hub_token_is_in_no_file_of_a_run_that_pushes(tmp_path, hub):  # noqa: F811
    trainer = test_trainable.make(tmp_path / "out", test_trainable.base(tmp_path), **HUB)
    trainer.train()
    trainer._finish_current_push()
    assert trainer.args.hub_token == TOKEN
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len([path for path in files if path.name == "training_args.bin"]) == 2, "of the checkpoints"
    assert not [path for path in files if TOKEN.encode() in path.read_bytes()]


def test_a_push_leaves_a_card_that_lies_there(tmp_path):
    files = {"checkpoint-1/README.md": "draft", "checkpoint-1/adapter_model.safetensors": "", "README.md": "mine"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    copy_model(tmp_path / "checkpoint-1", tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"

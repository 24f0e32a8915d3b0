"""`gradient_cache_packing`: chunks are packed where that is asked for or pays, and what can not is said or refused."""

import json
import logging
import re
from types import SimpleNamespace

import pytest
import torch
from accelerate import PartialState
from sentence_transformers import SentenceTransformer

from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.errors import UsageError
from hf_dist_ext.strategies import collectives
from hf_dist_ext.strategies.base import Strategy
from hf_dist_ext.strategies.pipeline.strategy import Pipeline
from hf_dist_ext.strategies.zero import ZeRO
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.packing import may_pack
from hf_dist_ext.training.trainer import DistTrainer
from tests.distributed.forked import Run
from tests.sentence_models import picture_model, routed_model
from tests.tiny_models import embedding_model, loaded, model_config
from tests.training.test_trainer import Tiny

RAGGED, EQUAL = [3, 20, 7, 11, 14, 5, 17, 9], [8] * 8


def texts(lengths: list[int]):
    def collate(rows: list[int]) -> dict:
        of_row = torch.tensor([lengths[row % len(lengths)] for row in rows])
        mask = (torch.arange(int(of_row.max())) < of_row[:, None]).long()
        ids = (torch.arange(mask.shape[1]) + torch.tensor(rows)[:, None]) % 28 + 4
        return {name: {"input_ids": (ids + i) % 32 * mask, "attention_mask": mask} for i, name in enumerate("ab")}

    return collate


def trainer(folder, model=None, lengths=RAGGED, **more) -> DistTrainer:
    torch.manual_seed(0)
    arguments = {"per_device_train_batch_size": 8, "max_steps": 1, "logging_steps": 1, "save_strategy": "no"}
    arguments |= {"gradient_cache_chunk_size": 3, "use_cpu": True, "report_to": [], "disable_tqdm": True} | more
    args = DistTrainingArguments(output_dir=str(folder), **arguments)
    model = embedding_model(model_config("bert"), projection_dim=8) if model is None else model
    collator = lengths if callable(lengths) else texts(lengths)
    return DistTrainer(
        model=model, args=args, data_collator=collator, train_dataset=list(range(16)), loss=InfoNCELoss()
    )


@pytest.mark.parametrize("packing, lengths, is_packed", [
    ("auto", RAGGED, True), ("auto", EQUAL, False), (True, EQUAL, True), (False, RAGGED, False),
])  # fmt: skip
def test_chunks_are_packed_as_asked_or_where_padding_would_be_computed(tmp_path, packing, lengths, is_packed):
    run = trainer(tmp_path, lengths=lengths, gradient_cache_packing=packing)
    run.train()
    keys = {key for chunk in run.step.layout.chunked.chunks() for key in chunk.features}
    assert ("packed_rows" in keys) == is_packed and ("attention_mask" in keys) != is_packed
    share = next(line["padding_share"] for line in run.state.log_history if "padding_share" in line)
    assert (share > 0.05) == (lengths is RAGGED and not is_packed)


def test_what_is_saved_does_not_tell_that_chunks_were_packed(tmp_path):
    configs = []
    for packing in (True, False):
        run = trainer(tmp_path / str(packing), gradient_cache_packing=packing)
        run.train()
        run.save_model()
        configs.append(json.loads((tmp_path / str(packing) / "config.json").read_text()))
        for model in (loaded(tmp_path / str(packing)), run.model):
            assert model.transformers_model.config._attn_implementation == "sdpa"
    assert configs[0] == configs[1]


def bert(implementation=None) -> SentenceTransformer:
    return embedding_model(model_config("bert"), attn_implementation=implementation)


def with_prompt() -> SentenceTransformer:
    model = bert()
    model.peft_config = {"default": SimpleNamespace(is_prompt_learning=True)}
    return model


@pytest.mark.parametrize("build, more, words", [
    (lambda path: Tiny(), {}, "Tiny is no model of sentence-transformers"),
    (lambda path: embedding_model(model_config("mpnet")), {}, 'model type "mpnet"'),
    (lambda path: bert("eager"), {}, 'attn_implementation="eager"'),
    (lambda path: with_prompt(), {}, "tokens of their own"),
    (picture_model, {}, "its modules are not a Transformer, a Pooling"),
    (routed_model, {}, "its modules are not a Transformer, a Pooling"),
])  # fmt: skip
def test_a_run_that_can_not_pack_is_refused_and_pads_by_default(tmp_path, caplog, build, more, words):
    with pytest.raises(UsageError, match="gradient_cache_packing=true: .*" + words):
        trainer(tmp_path, build(tmp_path), gradient_cache_packing=True, **more)
    caplog.set_level(logging.DEBUG)
    logging.getLogger("hf_dist_ext").setLevel(logging.DEBUG)
    run = trainer(tmp_path, build(tmp_path), **more)
    assert not run.step.sizes.may_pack
    (line,) = [line for line in caplog.records if "not packed" in line.getMessage()]
    assert words in line.getMessage() and line.levelno == logging.DEBUG, "by default nobody asked for it"


def arguments(packing, device: str = "cpu", **more) -> SimpleNamespace:
    options = dict(uses_gradient_cache=True, process_index=0, bf16=False, fp16=False) | more
    return SimpleNamespace(gradient_cache_packing=packing, device=torch.device(device), **options)


@pytest.mark.parametrize("kind", [Pipeline, ZeRO])
def test_ways_of_running_that_need_padding_are_named(kind):
    model, strategy = bert(), SimpleNamespace(pads_rows=kind.pads_rows)
    assert kind.pads_rows and not may_pack(arguments("auto"), model, strategy)
    with pytest.raises(UsageError, match=kind.pads_rows):
        may_pack(arguments(True), model, strategy)


def test_neftune_whose_noise_follows_the_length_of_a_row_is_padded(tmp_path):
    """Its hook sees a packed chunk as one row, and would make the noise of many rows that much smaller."""
    seen = []

    def run(**more):
        made = trainer(tmp_path, model=bert(), lengths=texts(RAGGED), neftune_noise_alpha=5.0, max_steps=1, **more)
        made.model.get_input_embeddings().register_forward_pre_hook(lambda _, given: seen.append(given[0].shape))
        made.train()

    run()
    assert seen and all(rows > 1 for rows, _ in seen[:4])
    with pytest.raises(UsageError, match="neftune_noise_alpha"):
        run(gradient_cache_packing=True)


def qwen(**changes) -> SentenceTransformer:
    return embedding_model(model_config("qwen3", **changes))


@pytest.mark.parametrize("build, more, major, words", [
    (qwen, {"bf16": True}, 8, None),
    (qwen, {"fp16": True}, 9, None),
    (lambda: qwen().bfloat16(), {}, 8, None),
    (qwen, {}, 8, 'half precision ."bf16": true'),
    (qwen, {"fp16": True}, 7, "Ampere and later"),
    (bert, {"bf16": True}, 8, "no attention dropout, and the model's is 0.1"),
    (lambda: qwen(head_dim=20), {"bf16": True}, 8, "no heads of 20 dimensions"),
])  # fmt: skip
def test_on_a_gpu_rows_are_packed_where_one_call_takes_all_lengths(monkeypatch, build, more, major, words):
    """Others when asked, with a warning."""
    said: list[str] = []
    monkeypatch.setattr("hf_dist_ext.training.packing.logger.warning", said.append)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    model = build()
    assert may_pack(arguments("auto", "cuda", **more), model, Strategy()) == (words is None) and not said
    for process in (0, 1):
        assert may_pack(arguments(True, "cuda", process_index=process, **more), model, Strategy())
    assert len(said) == bool(words) and (not words or re.search(f"{words}.*flash_attention_2", said[0]))
    assert may_pack(arguments(True, **more), model, Strategy()) and len(said) == bool(words), "on a CPU it is as quick"
    model.transformers_model.config._attn_implementation = "flash_attention_2"
    assert may_pack(arguments("auto", "cuda"), model, Strategy())


def test_ranks_with_other_devices_pack_alike(tmp_path):
    def decide(say) -> str:
        rank = PartialState(cpu=True).process_index
        torch.cuda.get_device_capability = lambda device: (9 - 2 * rank, 0)
        packs = may_pack(arguments("auto", "cuda", bf16=True), qwen(), Strategy())
        return str(collectives.exchange([packs]))

    assert Run("ddp", tmp_path / "log", decide).result() == "[[0], [0]]"


def test_a_batch_that_can_not_be_packed_is_refused_when_packing_is_asked_for_and_else_padded(tmp_path):
    def with_hole(rows: list[int]) -> dict:
        batch = texts(RAGGED)(rows)
        batch["a"]["attention_mask"][batch["a"]["attention_mask"].sum(1).argmax(), 1] = 0
        return batch

    with pytest.raises(UsageError, match="leaves out tokens between real ones"):
        trainer(tmp_path, lengths=with_hole, gradient_cache_packing=True).train()
    run = trainer(tmp_path, lengths=with_hole)
    run.train()
    assert all("attention_mask" in chunk.features for chunk in run.step.layout.chunked.chunks())

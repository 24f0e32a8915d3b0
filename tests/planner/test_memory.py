"""What a plan foretells against what autograd and optimizers really hold, and the trace that it reads."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

from hf_dist_ext.engine.layout import lay_out
from hf_dist_ext.engine.tables import ChunkLimits
from hf_dist_ext.errors import UsageError
from hf_dist_ext.planner import choose
from hf_dist_ext.planner import traced as tracing
from hf_dist_ext.planner.catalog import GIB, STRATEGIES, Hardware
from hf_dist_ext.planner.from_run import workload_of
from hf_dist_ext.planner.memory import Case, Settings, activation_cost, estimate
from hf_dist_ext.planner.traced import traced
from hf_dist_ext.run.read import load_run
from hf_dist_ext.tasks import trace, trace_record
from hf_dist_ext.tasks import trace_pictures as pictures
from hf_dist_ext.tasks.readers import stand_in
from tests.distributed.forked import run_python
from tests.parity.memory_table import (
    BERT,
    CASES,
    CLIP,
    EXPERTS,
    GEMMA,
    LLAMA,
    LLAVA,
    ON_TWO,
    QWEN,
    T5,
    VISION_LANGUAGE,
    error,
    rows_of,
)
from tests.parity.memory_worker import PARTS, PICTURE, with_pictures
from tests.saved_bytes import saved_bytes
from tests.tiny_models import embed, embedding_model

SENTINELS = (
    "bert", "bert, no cache", "bert, LoRA", "bert, last layer and projection",
    "llama, bf16 autocast and checkpointing", "mixtral", "clip, image tower frozen", "bert, adafactor",
    "llava, pictures", "smolvlm, pictures", "qwen2_5_vl, pictures", "own code",
)  # fmt: skip
OTHERS = [case["name"] for case in CASES if case["name"] not in SENTINELS]
OFF = dict.fromkeys(PARTS, 0.02) | {"activations": 0.05}


@pytest.mark.parametrize("names", [SENTINELS, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["few", "others"])
def test_one_process_holds_what_was_predicted(names):
    rows = rows_of("single", [one for one in CASES if one["name"] in names])
    assert len(rows) == len(names)
    for row in rows:
        assert min(row["measured"].values()) > 1024 or "SGD" in row["name"]
        assert all(abs(error(row, part)) <= off for part, off in OFF.items()), row


@pytest.mark.slow
@pytest.mark.parametrize("way", ["DDP 2", "FSDP2 2"])
def test_each_of_two_processes_holds_what_was_predicted(way):
    rows = rows_of(way, ON_TWO[:3])
    assert len(rows) == 3
    for row in rows:
        assert {part: error(row, part) for part in PARTS} == pytest.approx(dict.fromkeys(PARTS, 0), abs=0.1), row


@pytest.fixture
def small_run(tmp_path):
    def make(model, **fields):
        content = {"dataset_name": "code-search", "model_config": model, "max_length": 64}
        content |= {"per_device_train_batch_size": 64, **fields}
        (tmp_path / "run.json").write_text(json.dumps(content), encoding="utf-8")
        return load_run(["--config", str(tmp_path / "run.json")])

    return make


def work_of(run):
    return workload_of(run, trace.complete_config(run.options))


# ---- chunks without padding ----


@pytest.mark.parametrize("config", [BERT, LLAMA], ids=["bert", "llama"])
def test_a_packed_chunk_holds_what_was_predicted(small_run, config):
    fields = {"max_length": 100, "gradient_cache_chunk_tokens": 300}
    run = small_run(config, **fields, gradient_cache_packing=True, per_device_train_batch_size=32)
    work = traced(run)
    model, lengths = embedding_model(config), torch.tensor([100, 100, 60, 40])
    mask = (torch.arange(100) < lengths[:, None]).long()
    rows = {"input_ids": torch.randint(3, 60, (4, 100)), "attention_mask": mask}
    (chunk,) = lay_out({"query": rows}, ChunkLimits(max_tokens=300, packs=True)).chunks()
    features = chunk.features
    with saved_bytes([*model.parameters(), *model.buffers(), *rows.values()]) as peak:
        embed(model, **features).sum().backward()
    joined = 4 * 300 * 64 * 4  # of each layer: a CPU attends length by length, and lays the results end to end
    found, packed, padded = (
        peak() - joined,
        activation_cost(Case(work)),
        activation_cost(Case(replace(work, packs=False))),
    )
    assert chunk.num_tokens == 300 and found > 2**20
    assert packed.saved == pytest.approx(found, rel=0.03) and padded.saved < 0.8 * found, "two rows of 104 tokens"


PACKED_RUN = {"attn_implementation": "flash_attention_2", "gradient_cache_chunk_tokens": 1000}


@pytest.mark.parametrize("is_packed, model, fields", [
    (True, BERT, PACKED_RUN),
    (False, BERT, PACKED_RUN | {"attn_implementation": "sdpa"}),
    (True, BERT, PACKED_RUN | {"attn_implementation": None, "bf16": True}),
    (False, BERT | {"attention_probs_dropout_prob": 0.1}, PACKED_RUN | {"attn_implementation": None, "bf16": True}),
    (True, BERT, PACKED_RUN | {"attn_implementation": "sdpa", "gradient_cache_packing": True}),
    (False, BERT, PACKED_RUN | {"gradient_cache_packing": False}),
    (False, BERT, PACKED_RUN | {"gradient_cache_chunk_tokens": None}),
    (True, BERT, PACKED_RUN | {"torch_compile": True}),
    (False, CLIP, PACKED_RUN),
    (False, EXPERTS, PACKED_RUN),
])  # fmt: skip
def test_chunks_are_counted_packed_where_an_accelerator_gets_them_packed(small_run, is_packed, model, fields):
    run = small_run(model, **fields)
    work = traced(run)
    assert work.packs == is_packed and any("chunks are packed" in note for note in work.notes) == is_packed
    of_each = {one.name: estimate(Case(work, one, Hardware(2))).activations for one in STRATEGIES}
    padded = {one.name: estimate(Case(replace(work, packs=False), one, Hardware(2))).activations for one in STRATEGIES}
    differ = {name for name in of_each if of_each[name] != padded[name]}
    assert differ == ({one.name for one in STRATEGIES if not one.is_deepspeed} if is_packed else set())


# ---- how many chunks ----


@pytest.mark.parametrize("size, tokens, batch", [
    (7, None, 24), (7, None, 64), (40, None, 24), (100, None, 24), (None, 300, 24), (None, 900, 64), (5, 300, 24),
    (None, 10000, 24),
])  # fmt: skip
def test_a_plan_has_the_chunks_that_a_batch_is_cut_into(small_run, size, tokens, batch):
    fields = {"columns": {"query": "q", "positive": "p", "negative": ["a", "b"]}, "per_device_train_batch_size": batch}
    lengths = {"query": 24, "positive": 48, "negative": 40}
    limits = {"gradient_cache_chunk_size": size, "gradient_cache_chunk_tokens": tokens}
    work = work_of(small_run(BERT, max_length=lengths, **fields, **limits))
    rows = {name: 2 * batch if name == "negative" else batch for name in lengths}
    ids = {name: torch.ones(rows[name], length, dtype=torch.long) for name, length in lengths.items()}
    features = {name: {"input_ids": one, "attention_mask": one} for name, one in ids.items()}
    chunks = lay_out(features, ChunkLimits(size, tokens)).chunks()
    assert work.num_chunks() == len(chunks)
    largest = max(work.held_rows(column) * column.length for column in work.columns)
    assert largest == max(chunk.num_tokens for chunk in chunks)
    assert {Case(work, one, Hardware(2), Settings()).num_chunks for one in STRATEGIES} == {len(chunks)}


# ---- pictures ----


SIZES = [(1, 1), (40, 3000), (3000, 40), (700, 650), (364, 364), (365, 365), (2000, 2000)]


@pytest.mark.parametrize("read", [-1, -2])
@pytest.mark.parametrize("depth", [3, 5])
def test_parameters_that_no_gradient_reaches_are_those_of_a_real_backward(small_run, read, depth):
    config = {**LLAVA, "vision_feature_layer": read}
    config["vision_config"] = {**LLAVA["vision_config"], "num_hidden_layers": depth}
    fields = {"image_columns": ["positive"], "max_length": {"query": 16, "positive": 32}}
    run = small_run(config, gradient_cache_chunk_size=8, **fields)
    work = traced(run)
    model, ids = embedding_model(config, tokenizer=stand_in(config)), torch.randint(3, 60, (2, 32))
    pixels = with_pictures(config, ids)["pixel_values"]
    embed(model, input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=pixels).sum().backward()
    without = {name for name, one in model.named_parameters() if one.grad is None}
    assert without == {name for name, one in work.parameters().items() if not one.gets_gradient}
    assert any(f"layers.{depth - 1}." in name for name in without) == (read == -2)
    assert not any(f"layers.{depth - 2}." in name for name in without)
    unused = sum(one.numel() for name, one in model.named_parameters() if name in without)
    of = {one.name: estimate(Case(work, one, Hardware(2))) for one in STRATEGIES}
    assert of["DDP"].gradients - of["single"].gradients == 4 * unused  # DDP gives them zeros
    assert of["DDP"].optimizer - of["single"].optimizer == 8 * unused
    assert of["ZeRO-3"].optimizer - of["FSDP memory"].optimizer == 4 * unused
    seeing = work.forward(work.columns[1]).layers
    assert [layer.name for layer in seeing if not layer.backward] == [seeing[depth - 1].name] * (read == -2)


@pytest.mark.parametrize("kind, model", [("llava", LLAVA), ("clip", CLIP)])
@pytest.mark.parametrize("patches, size, batch", [(100, None, 25), (100, 4, 25), (5, None, 6), (1000, 20, 25)])
def test_a_plan_has_the_chunks_that_patches_allow(small_run, kind, model, patches, size, batch):
    names = {"image_columns": ["positive"]} if kind == "llava" else {}
    fields = {"max_length": {"query": 16, "positive": 32}, "per_device_train_batch_size": batch, **names}
    limits = {"gradient_cache_chunk_size": size, "gradient_cache_chunk_patches": patches}
    work = work_of(small_run(model, **fields, **limits))
    query, ids = torch.ones(batch, 16, dtype=torch.long), torch.ones(batch, 32, dtype=torch.long)
    seen = with_pictures(LLAVA, ids)
    seen |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)} if kind == "llava" else {}
    features = {"query": {"input_ids": query, "attention_mask": query}, "positive": seen}
    config = AutoConfig.for_model(**model)
    config = config if kind == "llava" else {"query": config.text_config, "positive": config.vision_config}
    of_size = ChunkLimits(size, None, max_patches=patches)
    chunks = lay_out(features, of_size, shares_tower=kind == "llava", model_config=config).chunks()
    assert work.columns[1].patches == 16 and work.num_chunks() == len(chunks) > 1
    assert work.rows_of_chunk(work.columns[1]) == max(chunk.num_rows for chunk in chunks if chunk.has_vision)


@pytest.mark.parametrize("kind", ["llava", "llava_next", "idefics3", "internvl", "qwen2_vl"])
def test_patches_of_a_picture_are_those_that_a_batch_has(kind, monkeypatch):
    monkeypatch.setattr(pictures, "PICTURE", PICTURE)
    config = complete(VISION_LANGUAGE[kind])
    config |= {"tiles_of_picture": 5} if kind in ("idefics3", "internvl") else {}
    ids = torch.ones(3, 96, dtype=torch.long)
    rows = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **with_pictures(config, ids)}
    of_model = AutoConfig.for_model(**VISION_LANGUAGE[kind])
    (table,) = lay_out({"positive": rows}, ChunkLimits(max_patches=10**6), model_config=of_model).tables
    assert {entries * longest for entries, longest in table.patches} == {pictures.patches_of_picture(config)}


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("kind", ["idefics3", "internvl"])
def test_the_most_tiles_are_those_of_the_processors_file(tmp_path, kind, splits):
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    (tmp_path / "config.json").write_text(json.dumps(VISION_LANGUAGE[kind]))
    if kind == "idefics3":
        edges = {"size": {"longest_edge": 3 * 364}, "max_image_size": {"longest_edge": 364}}
        processor = Idefics3ImageProcessorPil(do_image_splitting=splits, **edges)
    else:
        size = {"height": 32, "width": 32}
        processor = GotOcr2ImageProcessorPil(crop_to_patches=splits, max_patches=6, size=size)
    processor.save_pretrained(tmp_path)
    counts = [processor.get_number_of_image_patches(height, width, {}) for height, width in SIZES]
    counts = [max(1, count[0] if isinstance(count, tuple) else count) for count in counts]  # 0: not cut
    config = complete(name=str(tmp_path))
    assert config["tiles_of_picture"] == max(counts) and (max(counts) > 1) == splits


# ---- configurations ----


def complete(config=None, name=None):
    fields = {"model_config": config, "model_name_or_path": name, "model_revision": None, "trust_remote_code": False}
    return trace.complete_config(SimpleNamespace(**fields))


def test_defaults_come_from_the_installed_transformers():
    assert complete({"model_type": "bert"})["hidden_size"] == AutoConfig.for_model("bert").hidden_size
    given = complete({"model_type": "distilbert", "hidden_size": 48})
    assert given["dim"] == given["hidden_size"] == 48 and given["hidden_dim"] == 4 * 768
    experts = complete({"model_type": "qwen3_moe", "num_experts": 4})
    assert experts["num_experts"] == experts["num_local_experts"] == 4


def test_a_configuration_is_read_from_a_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "hidden_size": 48}), encoding="utf-8")
    assert complete(name=str(tmp_path))["hidden_size"] == 48
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UsageError, match="model_type"):
        complete(name=str(tmp_path))


def test_a_model_that_is_nowhere_is_an_error_that_says_what_to_do(monkeypatch):
    with pytest.raises(UsageError, match="config.json.*model_config or a folder"):
        complete(name="nobody/has-this-model")
    with pytest.raises(UsageError, match='has model_type="bertt"'):
        complete({"model_type": "bertt"})


# ---- the trace ----


DEEP = {"num_hidden_layers": 8}


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (LLAMA | DEEP, {"bf16": True, "use_lora": True, "lora_r": 4}),
        (GEMMA | DEEP, {"gradient_checkpointing": True}),  # layers of two kinds in turn
        (T5 | {"num_layers": 5}, {}),  # the first layer makes what all take
        (QWEN | DEEP, {"trainable_modules": ["layers.5"]}),
    ],
    ids=str,
)
def test_a_layer_like_an_earlier_one_costs_what_it_costs_when_it_runs(small_run, monkeypatch, model, fields):
    """And is not run."""
    run = small_run(model, **fields)
    short, ran = trace.shape(run, work_of(run)), []
    monkeypatch.setattr(trace_record, "_likeness", lambda layer: ran.append(layer) or object())
    assert trace.shape(run, work_of(run)) == short and len(ran) > 8
    (column, *_) = short["whole"]["columns"].values()
    assert len({layer["name"] for layer in column["nothing"]["layers"]}) >= 5


def test_of_four_devices_that_share_layers_each_has_what_two_and_one_tell(small_run):
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 16}
    run = small_run(LLAMA | heads)
    work = traced(run)
    model, mode = trace.build(run, work), trace.FakeTensorMode(allow_non_fake_inputs=True)
    with trace.split_layers(model, 4):
        of_four = trace._found(mode, model, work)
    elements = {name: one.elements for name, one in work.parameters(4).items()}
    assert elements == {name: one[0] for name, one in of_four["parameters"].items()}
    for column in work.columns:
        ours, theirs = work.forward(column, "nothing", 4), of_four["columns"][column.name]["nothing"]
        whole = work.forward(column)
        for mine, found, undivided in zip(ours.layers, theirs["layers"], whole.layers, strict=True):
            assert 2**10 < mine.saved < undivided.saved
            for name in ("saved", "multiply_adds", "backward", "input"):
                assert getattr(mine, name) == pytest.approx(found[name])


def test_a_model_is_traced_once_for_all_machines(small_run, monkeypatch, tmp_path, traces_in_this_process):
    started = []

    def in_a_fork(command: list[str], **options) -> SimpleNamespace:
        started.append(command)
        words = command[command.index("hf_dist_ext.tasks.trace") + 1 :]
        return SimpleNamespace(returncode=0, stdout=run_python(lambda: trace.main(words)))

    # A process that is forked takes the place of a Python of its own, which is in the commands that the docs show.
    monkeypatch.setattr(tracing, "_trace", traces_in_this_process)
    monkeypatch.setattr(tracing, "subprocess", SimpleNamespace(run=in_a_fork))
    monkeypatch.setattr(tracing, "_folder", lambda: tmp_path / "traces")
    model = {
        "model_type": "electra", "hidden_size": 64, "num_attention_heads": 4, "embedding_size": 64,
        "num_hidden_layers": 2, "intermediate_size": 128,
    }  # fmt: skip
    # bf16: of a run in float32 both precisions are traced
    plan = choose.make_plan(small_run(model, bf16=True), Hardware(2, 8 * GIB))
    assert plan.as_dict()["parameters"] == 64 * (30522 + 512 + 2 + 2) + 2 * (
        4 * 64 * 65 + 64 * 129 + 128 * 65 + 4 * 64
    )
    assert plan.best.activations(False) > plan.best.activations(True) > 2**20
    choose.make_plan(small_run(model, bf16=True, per_device_train_batch_size=256), Hardware(4, 8 * GIB))
    assert len(started) == 1
    for kept in (tmp_path / "traces").iterdir():
        kept.write_text(kept.read_text()[:99])  # as a power cut leaves it
    choose.make_plan(small_run(model, bf16=True), Hardware(4, 8 * GIB))
    assert len(started) == 2
    choose.make_plan(small_run(model, bf16=True, trainable_modules=["layer.1"]), Hardware(4, 8 * GIB))
    assert len(started) == 3

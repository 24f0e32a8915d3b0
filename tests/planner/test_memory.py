"""The closed form against what autograd, optimizers and transformers really hold."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText

from hf_dist_ext.engine.chunks import ChunkLimits
from hf_dist_ext.engine.layout import lay_out
from hf_dist_ext.engine.peak import peak_bytes
from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.embedding_model import EmbeddingModel
from hf_dist_ext.planner.architectures import FAMILIES, TWO_TOWERS, embed, embed_tower, generate
from hf_dist_ext.planner.catalog import STRATEGIES, Hardware
from hf_dist_ext.planner.memory import Settings, estimate, held
from hf_dist_ext.planner.shape_config import read_model_config, with_defaults
from hf_dist_ext.planner.tape import Recipe, Tape
from hf_dist_ext.planner.text_architectures import Rows, bert
from hf_dist_ext.planner.vision_language import TOWERS, image_tokens
from hf_dist_ext.planner.who_trains import depth
from hf_dist_ext.planner.workload import workload_of
from hf_dist_ext.run.read import load_run
from hf_dist_ext.strategies.layers import is_multiplied
from tests.distributed.forked import run_python
from tests.parity.memory_table import BERT, CASES, CLIP, EXPERTS, GEMMA, LLAMA, MODERN, ON_TWO, QWEN, error, rows_of
from tests.parity.memory_worker import PARTS

NO_AUTO_MODEL = ("siglip_text_model",)


PICTURE = 64


@pytest.mark.parametrize("kind", [kind for kind in (*FAMILIES, *TWO_TOWERS) if kind not in NO_AUTO_MODEL])
def test_parameters_have_the_names_and_sizes_of_transformers(kind):
    """And are gathered in half precision by FSDP where the plan says so."""
    with torch.device("meta"):
        config = AutoConfig.for_model(kind)
        auto = AutoModelForImageTextToText if kind in TOWERS else AutoModel
        poolerless = {"add_pooling_layer": False} if FAMILIES.get(kind) is bert else {}
        model = auto.from_config(config, **poolerless)
    tape, full = Tape(), with_defaults({"model_type": kind})
    if kind in TOWERS:
        generate(tape, full, Rows(1, 600, 1))
    elif kind in TWO_TOWERS:
        embed_tower(tape, full, Rows(1, 64), is_image=False)
        embed_tower(tape, full, Rows(1, 64), is_image=True)
    else:
        embed(tape, full, Rows(1, 64))
    ours = {name.removeprefix("backbone."): (one.elements, one.is_multiplied) for name, one in tape.parameters.items()}
    theirs = {
        name: (one.numel(), is_multiplied(model.get_submodule(name.rpartition(".")[0]), one))
        for name, one in model.named_parameters()
        if not name.startswith("logit_")
    }
    assert len(theirs) > 20 and ours == theirs


SENTINELS = (
    "bert", "bert, no cache", "bert, LoRA", "bert, last layer and projection",
    "llama, bf16 autocast and checkpointing", "mixtral", "clip, image tower frozen", "bert, adafactor",
)  # fmt: skip
OTHERS = (
    "bert, chunk 8 and 2 graphs kept", "bert, checkpointing", "bert, projection only", "llama",
    "llama, first layer only", "clip",
)  # fmt: skip


@pytest.mark.parametrize("names", [SENTINELS, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["few", "others"])
def test_one_process_holds_what_was_predicted(names):
    rows = rows_of("single", [one for one in CASES if one["name"] in names])
    assert len(rows) == len(names)
    for row in rows:
        assert min(row["measured"].values()) > 1024
        assert {part: error(row, part) for part in PARTS} == pytest.approx(dict.fromkeys(PARTS, 0), abs=0.1), row


@pytest.mark.parametrize("config", [BERT, LLAMA], ids=["bert", "llama"])
def test_a_packed_chunk_holds_what_was_predicted(tmp_path, config):
    fields = {"model_config": config, "max_length": 100, "gradient_cache_chunk_tokens": 300}
    fields |= {"gradient_cache_packing": True, "per_device_train_batch_size": 32, "dataset_name": "code-search"}
    (tmp_path / "run.json").write_text(json.dumps(fields))
    work = workload_of(load_run(["--config", str(tmp_path / "run.json")]), with_defaults(config))
    model, lengths = EmbeddingModel.from_config(config), torch.tensor([100, 100, 60, 40])
    mask = (torch.arange(100) < lengths[:, None]).long()
    rows = {"input_ids": torch.randint(3, 60, (4, 100)), "attention_mask": mask}
    (chunk,) = lay_out({"query": rows}, ChunkLimits(max_tokens=300, packs=True)).chunks()
    features = chunk.features
    with peak_bytes(torch.device("cpu"), [*model.parameters(), *model.buffers(), *rows.values()]) as peak:
        model(**features).embeddings.sum().backward()
    joined = 4 * 300 * 64 * 4  # of each layer: a CPU attends length by length, and lays the results end to end
    found, packed, padded = peak() - joined, held(work.packed, Settings()), held(work, Settings())
    assert chunk.num_tokens == 300 and found > 2**20
    assert packed.saved == pytest.approx(found, rel=0.03) and padded.saved < 0.8 * found, "two rows of 104 tokens"


PACKED_RUN = {"attn_implementation": "flash_attention_2", "gradient_cache_chunk_tokens": 1000}


@pytest.mark.parametrize("is_packed, model, fields", [
    (True, BERT, PACKED_RUN),
    (False, BERT, PACKED_RUN | {"attn_implementation": "sdpa"}),
    (True, BERT, PACKED_RUN | {"attn_implementation": "sdpa", "gradient_cache_packing": True}),
    (False, BERT, PACKED_RUN | {"gradient_cache_packing": False}),
    (False, BERT, PACKED_RUN | {"gradient_cache_chunk_tokens": None}),
    (False, BERT, PACKED_RUN | {"torch_compile": True}),
    (False, BERT, PACKED_RUN | {"losses": [{"loss": "infonce"}, {"loss": "sparse"}, {"loss": "late_interaction"}]}),
    (False, CLIP, PACKED_RUN),
    (False, EXPERTS, PACKED_RUN),
])  # fmt: skip
def test_chunks_are_counted_packed_where_an_accelerator_gets_them_packed(tmp_path, is_packed, model, fields):
    content = {"model_config": model, "max_length": 64, "dataset_name": "code-search", **fields}
    (tmp_path / "run.json").write_text(json.dumps(content))
    work = workload_of(load_run(["--config", str(tmp_path / "run.json")]), with_defaults(model))
    assert work.packs == is_packed and any("chunks are packed" in note for note in work.notes) == is_packed
    of_each = {one.name: estimate(work, one, Hardware(2), Settings()).activations for one in STRATEGIES}
    padded = {
        one.name: estimate(replace(work, packs=False), one, Hardware(2), Settings()).activations for one in STRATEGIES
    }
    differ = {name for name in of_each if of_each[name] != padded[name]}
    assert differ == ({one.name for one in STRATEGIES if not one.is_deepspeed} if is_packed else set())


@pytest.mark.slow
@pytest.mark.parametrize("way", ["DDP 2", "FSDP2 2"])
def test_each_of_two_processes_holds_what_was_predicted(way):
    rows = rows_of(way, ON_TWO[:3])
    assert len(rows) == 3
    for row in rows:
        assert {part: error(row, part) for part in PARTS} == pytest.approx(dict.fromkeys(PARTS, 0), abs=0.1), row


TEXT = {**CLIP["text_config"], "num_key_value_heads": 2}
VISION = CLIP["vision_config"]
LLAVA = {
    "model_type": "llava",
    "vision_config": {**VISION, "model_type": "clip_vision_model"},
    "text_config": {**TEXT, "model_type": "llama"},
    "image_token_index": 63,
}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
QWEN_VISION = {"depth": 3, "num_heads": 4, "patch_size": 4, "hidden_size": 64, "out_hidden_size": 64}
TINY = {
    "llava": LLAVA,
    "llava_next": {**LLAVA, "model_type": "llava_next", "image_grid_pinpoints": [[32, 32]]},
    "idefics3": {
        "model_type": "idefics3", "vision_config": VISION, "text_config": {**TEXT, "model_type": "llama"},
        "image_token_id": 63,
    },
    "internvl": {
        "model_type": "internvl", "vision_config": VISION, "text_config": {**TEXT, "model_type": "qwen2"},
        "image_token_id": 63,
    },
    "qwen2_vl": {
        "model_type": "qwen2_vl", "vision_config": {**QWEN_VISION, "embed_dim": 48, "mlp_ratio": 3},
        "text_config": {**TEXT, "rope_parameters": ROPE}, "image_token_id": 63,
    },
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl", "text_config": {**TEXT, "rope_parameters": ROPE}, "image_token_id": 63,
        "vision_config": {**QWEN_VISION, "intermediate_size": 96, "fullatt_block_indexes": [1], "window_size": 32},
    },
    "qwen3_vl": {
        "model_type": "qwen3_vl", "image_token_id": 63,
        "text_config": {**TEXT, "head_dim": 16, "rope_parameters": ROPE},
        "vision_config": {
            **QWEN_VISION, "intermediate_size": 96, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1],
        },
    },
}  # fmt: skip


def picture_inputs(kind: str, config: dict, rows: int) -> tuple[dict, int]:
    """Random pictures, one per row, as the model takes them, and how many tokens each becomes."""
    side = 32
    if kind.startswith("qwen"):
        side = PICTURE // 8 * 8 // 4  # in patches
        grid = torch.tensor([[1, side, side]] * rows)
        return {"pixel_values": torch.randn(rows * side * side, 3 * 2 * 16), "image_grid_thw": grid}, side * side // 4
    full, more = image_tokens(with_defaults(config)), {}
    tiles = config.get("tiles_of_picture", 1)
    shape = (rows * tiles, 3, side, side)
    if kind == "llava_next":
        shape, more = (rows, 2, 3, side, side), {"image_sizes": torch.tensor([[side, side]] * rows)}
    if kind == "idefics3":
        shape = (rows, tiles, 3, side, side)
    return {"pixel_values": torch.randn(shape), **more}, full


@pytest.mark.parametrize(
    ("kind", "trained", "autocast"),
    [
        *(("llava", trained, autocast) for trained in ("", "projector", "language") for autocast in (None, 2)),
        *((kind, "", None) for kind in TINY if kind != "llava"),
        ("internvl", "", 2), ("qwen3_vl", "", 2), ("qwen2_5_vl", "language", None), ("idefics3", "projector", None),
    ],
)  # fmt: skip
def test_a_vision_language_model_saves_what_was_predicted(monkeypatch, kind, trained, autocast):
    monkeypatch.setattr("hf_dist_ext.planner.vision_language.PICTURE", PICTURE)
    check_saved_bytes(kind, TINY[kind], trained, autocast)


@pytest.mark.parametrize("kind", ["idefics3", "internvl"])
def test_tiles_of_a_picture_are_counted(kind):
    one, five = (check_saved_bytes(kind, {**TINY[kind], "tiles_of_picture": tiles}, "", None) for tiles in (1, 5))
    assert five > 2 * one


def check_saved_bytes(kind, shape, trained, autocast) -> float:
    torch.manual_seed(0)
    config = {name: value for name, value in shape.items() if name not in ("model_type", "tiles_of_picture")}
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(kind, **config)).train()
    trains = (lambda name: bool(depth([trained], name))) if trained else lambda name: True
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trains(name))
    pictures, count = picture_inputs(kind, shape, 8)
    ids = torch.randint(3, 60, (8, count + 24))
    ids[:, :count] = 63
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **pictures}
    if kind.startswith("qwen"):
        inputs["mm_token_type_ids"] = (ids == 63).int()
    known = [*model.parameters(), *model.buffers(), *inputs.values()]
    with peak_bytes(torch.device("cpu"), known) as peak, torch.autocast("cpu", enabled=autocast is not None):
        model(**inputs, labels=ids).loss.backward()
    tape = Tape(Recipe(trains=trains, autocast_bytes=autocast, mask_bytes=0))
    generate(tape, with_defaults(shape), Rows(8, count + 24, images=1))
    assert peak() > 2**18 and tape.cost().total == pytest.approx(peak(), rel=0.1)
    return peak()


SIZES = [(1, 1), (40, 3000), (3000, 40), (700, 650), (364, 364), (365, 365), (2000, 2000)]


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("kind", ["idefics3", "internvl"])
def test_the_most_tiles_are_those_of_the_processors_file(tmp_path, kind, splits):
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    (tmp_path / "config.json").write_text(json.dumps(TINY[kind]))
    if kind == "idefics3":
        edges = {"size": {"longest_edge": 3 * 364}, "max_image_size": {"longest_edge": 364}}
        processor = Idefics3ImageProcessorPil(do_image_splitting=splits, **edges)
    else:
        size = {"height": 32, "width": 32}
        processor = GotOcr2ImageProcessorPil(crop_to_patches=splits, max_patches=6, size=size)
    processor.save_pretrained(tmp_path)
    counts = [processor.get_number_of_image_patches(height, width, {}) for height, width in SIZES]
    counts = [max(1, count[0] if isinstance(count, tuple) else count) for count in counts]  # 0: not cut
    config = read_model_config(None, str(tmp_path))
    assert config["tiles_of_picture"] == max(counts) and (max(counts) > 1) == splits


@pytest.mark.parametrize("kind", TINY)
def test_parts_of_vision_language_models_are_those_that_freezing_finds(kind):
    from hf_dist_ext.frozen.groups import module_groups

    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(kind))
    names = [name for name, _ in model.named_parameters()]
    for part, group in module_groups(model).items():
        theirs = {name for name in names if group.depth(name)}
        assert theirs and {name for name in names if depth([part], name)} == theirs


def test_a_frozen_model_below_the_projection_saves_nothing_of_its_layers():
    tape = Tape(Recipe(trains=lambda name: name.startswith("projection")))
    embed(tape, with_defaults(BERT), Rows(8, 64), projection_dim=16)
    assert all(layer.saved == 0 for layer in tape.layers)
    assert 0 < tape.cost().total < 100 * 8 * 64
    assert tape.cost(lambda layer: True).total == tape.cost().total  # nothing to checkpoint either


def test_defaults_come_from_the_installed_transformers():
    assert with_defaults({"model_type": "bert"})["hidden_size"] == AutoConfig.for_model("bert").hidden_size
    given = with_defaults({"model_type": "distilbert", "hidden_size": 48})
    assert given["dim"] == given["hidden_size"] == 48 and given["hidden_dim"] == 4 * 768
    experts = with_defaults({"model_type": "qwen3_moe", "num_experts": 4})
    assert experts["num_experts"] == experts["num_local_experts"] == 4


def test_a_configuration_is_read_from_a_folder(tmp_path):

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "hidden_size": 48}), encoding="utf-8")
    assert read_model_config(None, str(tmp_path))["hidden_size"] == 48
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UsageError, match="model_type"):
        read_model_config(None, str(tmp_path))


def test_a_model_that_is_nowhere_is_an_error_that_says_what_to_do(monkeypatch):
    with pytest.raises(UsageError, match="config.json.*model_config or a folder"):
        read_model_config(None, "nobody/has-this-model")
    with pytest.raises(UsageError, match='"bertt" is not one of the installed'):
        with_defaults({"model_type": "bertt"})


# ---- the second engine ----


@pytest.fixture
def small_run(tmp_path):
    import json

    from hf_dist_ext.run.read import load_run

    def make(model, **fields):
        content = {"dataset_name": "code-search", "model_config": model, "max_length": 64}
        content |= {"per_device_train_batch_size": 64, **fields}
        (tmp_path / "run.json").write_text(json.dumps(content), encoding="utf-8")
        return load_run(["--config", str(tmp_path / "run.json")])

    return make


FROZEN = {"trainable_modules": ["1"]}
LORA = {"use_lora": True, "lora_r": 4}
GENERATING = {"task": "image-text-to-text", "max_length": 64}


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (BERT, LORA), (LLAMA, {"bf16": True}), (EXPERTS, {"bf16": True}), (TINY["llava"], GENERATING),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in [
            (BERT, {}), (BERT, {"bf16": True, **FROZEN}), (BERT, {"attn_implementation": "eager"}), (LLAMA, FROZEN),
            (LLAMA, {"bf16": True, "dtype": "bfloat16", **LORA}), (QWEN, {"bf16": True}), (GEMMA, {}), (MODERN, {}),
            (EXPERTS, {}), (EXPERTS, {"dtype": "bfloat16"}), (TINY["internvl"], GENERATING),
            (TINY["llava"], {**GENERATING, "trainable_modules": ["projector"], "bf16": True}),
        ]),
    ],
    ids=str,
)  # fmt: skip
def test_the_trace_of_a_forward_and_its_arithmetic_agree(small_run, model, fields):
    """Layer by layer, as it is and as FSDP and DeepSpeed cast it: two ways to the same numbers."""
    from hf_dist_ext.planner.traced import TracedWorkload
    from hf_dist_ext.tasks import trace

    run = small_run(model, **fields)
    work = workload_of(run, read_model_config(run.options.model_config, None))
    found = json.loads(json.dumps(trace.shape(run, work)))
    traced = TracedWorkload(**vars(work), found=found)
    theirs, ours = (
        {name: (one.elements, one.item, one.trains, one.layer) for name, one in each.parameters().items()}
        for each in (traced, work)
    )
    assert theirs == ours
    column = work.columns[0]
    for cast in ["nothing", work.gathered_as, "all"] if work.autocast_bytes else ["nothing"]:
        theirs, ours = traced.work(column, cast), work.work(column, cast)
        assert theirs.plain.total > 2**12
        for there, here in ((theirs.plain, ours.plain), (theirs.checkpointed, ours.checkpointed)):
            assert there.saved == pytest.approx(here.saved, rel=0.03, abs=2048), cast
            assert there.casts == pytest.approx(here.casts, rel=0.03, abs=4096), cast
        # a mask hides half of what a causal kernel would leave out
        assert theirs.forward == pytest.approx(ours.forward, rel=0.1)
        assert theirs.backward == pytest.approx(ours.backward, rel=0.2)


def test_a_model_without_arithmetic_is_traced_once_for_all_machines(small_run, monkeypatch, tmp_path):
    from hf_dist_ext.planner import choose
    from hf_dist_ext.planner import traced as tracing
    from hf_dist_ext.planner.catalog import GIB, Hardware
    from hf_dist_ext.tasks import trace

    started = []

    def in_a_fork(command: list[str], **options) -> SimpleNamespace:
        started.append(command)
        words = command[command.index("hf_dist_ext.tasks.trace") + 1 :]
        return SimpleNamespace(returncode=0, stdout=run_python(lambda: trace.main(words)))

    # A process that is forked takes the place of a Python of its own, which is in the commands that the docs show.
    monkeypatch.setattr(tracing, "subprocess", SimpleNamespace(run=in_a_fork))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = {
        "model_type": "electra", "hidden_size": 64, "num_attention_heads": 4, "embedding_size": 64,
        "num_hidden_layers": 2, "intermediate_size": 128,
    }  # fmt: skip
    plan = choose.make_plan(small_run(model), Hardware(2, 8 * GIB))
    assert "no closed form" in plan.notes[-1]
    assert plan.as_dict()["parameters"] == 64 * (30522 + 512 + 2 + 2) + 2 * (
        4 * 64 * 65 + 64 * 129 + 128 * 65 + 4 * 64
    )
    assert plan.best.unchecked.activations > plan.best.checkpointed.activations > 2**20
    choose.make_plan(small_run(model, per_device_train_batch_size=256), Hardware(4, 8 * GIB))
    assert len(started) == 1
    choose.make_plan(small_run(model, trainable_modules=["layer.1"]), Hardware(4, 8 * GIB))
    assert len(started) == 2

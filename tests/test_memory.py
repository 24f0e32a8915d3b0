"""The closed form against what autograd, optimizers and transformers really hold."""

import dataclasses

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText

from hf_dist_ext.architectures import FAMILIES, TWO_TOWERS, Rows, embed, embed_tower, generate
from hf_dist_ext.chunk_budget import peak_bytes
from hf_dist_ext.errors import UsageError
from hf_dist_ext.shape_config import read_model_config, with_defaults
from hf_dist_ext.tape import Recipe, Tape
from tests.parity.memory_table import BERT, CASES, CLIP, LLAMA, ON_TWO, error, rows_of
from tests.parity.memory_worker import PARTS

WHOLE = ("llava", "paligemma", "gemma3")
NO_AUTO_MODEL = ("siglip_text_model",)


@pytest.mark.parametrize("kind", [kind for kind in (*FAMILIES, *TWO_TOWERS) if kind not in NO_AUTO_MODEL])
def test_parameters_have_the_names_and_sizes_of_transformers(kind):
    with torch.device("meta"):
        config = AutoConfig.for_model(kind)
        auto = AutoModelForImageTextToText if kind in WHOLE else AutoModel
        poolerless = {"add_pooling_layer": False} if FAMILIES.get(kind) is FAMILIES["bert"] else {}
        model = auto.from_config(config, **poolerless)
    tape, full = Tape(), with_defaults({"model_type": kind})
    if kind in WHOLE:
        generate(tape, full, Rows(1, 600, 1))
    elif kind in TWO_TOWERS:
        embed_tower(tape, full, Rows(1, 64), is_image=False)
        embed_tower(tape, full, Rows(1, 64), is_image=True)
    else:
        embed(tape, full, Rows(1, 64))
    ours = {name.removeprefix("backbone."): one.elements for name, one in tape.parameters.items()}
    theirs = {name: one.numel() for name, one in model.named_parameters() if not name.startswith("logit_")}
    assert len(theirs) > 20 and ours == theirs


QUICK = (
    "bert", "bert, no cache", "bert, chunk 8 and 2 graphs kept", "bert, checkpointing", "bert, LoRA",
    "bert, last layer and projection", "llama", "llama, bf16 autocast and checkpointing", "llama, first layer only",
    "mixtral", "clip", "clip, image tower frozen", "bert, adafactor",
)  # fmt: skip


def test_one_process_holds_what_was_predicted():
    rows = rows_of("single", [one for one in CASES if one["name"] in QUICK])
    assert len(rows) == len(QUICK)
    for row in rows:
        assert min(row["measured"].values()) > 1024
        assert {part: error(row, part) for part in PARTS} == pytest.approx(dict.fromkeys(PARTS, 0), abs=0.1), row


@pytest.mark.parametrize("way", ["DDP 2", "FSDP2 2"])
def test_each_of_two_processes_holds_what_was_predicted(way):
    rows = rows_of(way, ON_TWO[:2])
    assert len(rows) == 2
    for row in rows:
        assert {part: error(row, part) for part in PARTS} == pytest.approx(dict.fromkeys(PARTS, 0), abs=0.1), row


VISION = {**CLIP["vision_config"], "model_type": "clip_vision_model"}
LLAVA = {
    "model_type": "llava",
    "vision_config": VISION,
    "text_config": {**CLIP["text_config"], "model_type": "llama", "num_key_value_heads": 2},
    "image_token_index": 63,
}


@pytest.mark.parametrize("trained", ["", "multi_modal_projector", "language_model"])
@pytest.mark.parametrize("autocast", [None, 2])
def test_a_vision_language_model_saves_what_was_predicted(trained, autocast):
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    torch.manual_seed(0)
    config = {name: value for name, value in LLAVA.items() if name != "model_type"}
    model = LlavaForConditionalGeneration(LlavaConfig(**config)).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    ids = torch.randint(3, 60, (8, 40))
    ids[:, :16] = 63  # the image's 4 x 4 patches
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.randn(8, 3, 32, 32)}
    known = [*model.parameters(), *model.buffers(), *inputs.values()]
    with peak_bytes(torch.device("cpu"), known) as peak, torch.autocast("cpu", enabled=autocast is not None):
        model(**inputs, labels=ids).loss.backward()
    tape = Tape(Recipe(trains=lambda name: trained in name, autocast_bytes=autocast, mask_bytes=0))
    generate(tape, with_defaults(LLAVA), Rows(8, 40, images=1))
    assert tape.cost().total == pytest.approx(peak(), rel=0.1)


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
    import json

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

    from hf_dist_ext.config import load_run

    def make(model, **fields):
        content = {"dataset_name": "code-search", "model_config": model, "max_length": 64, **fields}
        content |= {"per_device_train_batch_size": 64, "gradient_cache_chunk_size": 16}
        (tmp_path / "run.json").write_text(json.dumps(content), encoding="utf-8")
        return load_run(["--config", str(tmp_path / "run.json")])

    return make


@pytest.mark.parametrize("model", [BERT, LLAMA], ids=["bert", "llama"])
@pytest.mark.parametrize("fields", [{}, {"activation_checkpointing": True}, {"trainable_modules": ["0"]}], ids=str)
def test_torch_s_tracker_agrees_with_the_closed_form(small_run, model, fields):
    model = model | {"hidden_size": 128, "intermediate_size": 384}  # shaped like real ones, whose widest value leads
    from hf_dist_ext.memory_trace import compare
    from hf_dist_ext.workload import workload_of

    run = small_run(model, **fields)
    work = workload_of(run, read_model_config(run.run.model_config, None))
    found = compare(run, dataclasses.replace(work, mask_bytes=0, has_padding=False))
    assert found["traced"]["activations"] > 2**20
    for part in ("parameters", "gradients", "optimizer", "total"):
        assert found["closed_form"][part] == pytest.approx(found["traced"][part], rel=0.1, abs=4096), part
    assert found["closed_form"]["activations"] == pytest.approx(found["traced"]["activations"], rel=0.15)


def test_a_family_without_a_closed_form_is_traced(small_run):
    from hf_dist_ext.memory import GIB, Hardware
    from hf_dist_ext.planner import make_plan

    model = {"model_type": "electra", "hidden_size": 64, "num_attention_heads": 4, "embedding_size": 64}
    plan = make_plan(small_run({**model, "num_hidden_layers": 2, "intermediate_size": 128}), Hardware(2, 8 * GIB))
    assert "no closed form" in plan.notes[-1]
    assert plan.as_dict()["parameters"] == 64 * (30522 + 512 + 2 + 2) + 2 * (
        4 * 64 * 65 + 64 * 129 + 128 * 65 + 4 * 64
    )
    assert plan.best.unchecked.activations > plan.best.checkpointed.activations > 2**20

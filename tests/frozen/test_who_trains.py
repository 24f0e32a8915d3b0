"""Who trains: what names select, what is refused, and that nothing changes it unnoticed."""

import pytest
import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForImageTextToText,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
)

from hf_dist_ext.errors import UsageError, bytes_in_words
from hf_dist_ext.frozen.groups import module_groups
from hf_dist_ext.frozen.who_trains import plan_freezing, report
from tests.tiny_models import dual_encoder, embedding_model, model_config
from tests.tiny_vision_language import tiny_llava

# (vision, projector, language) of every family the guides name: a parameter that must be in the group
FAMILIES = {
    "llava": ("model.vision_tower", "model.multi_modal_projector", "model.language_model"),
    "llava_next": ("model.vision_tower", "model.image_newline", "model.language_model"),
    "qwen2_vl": ("model.visual.blocks", "model.visual.merger", "model.language_model"),
    "qwen2_5_vl": ("model.visual.blocks", "model.visual.merger", "model.language_model"),
    "qwen3_vl": ("model.visual.blocks", "model.visual.deepstack_merger_list", "model.language_model"),
    "paligemma": ("model.vision_tower", "model.multi_modal_projector", "model.language_model"),
    "gemma3": ("model.vision_tower", "model.multi_modal_projector", "model.language_model"),
    "idefics3": ("model.vision_model", "model.connector", "model.text_model"),
    "smolvlm": ("model.vision_model", "model.connector", "model.text_model"),
    "internvl": ("model.vision_tower", "model.multi_modal_projector", "model.language_model"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_of_a_vision_language_model_is_in_exactly_one_group(family):
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(CONFIG_MAPPING[family]())
    groups = module_groups(model)
    assert list(groups) == ["vision", "projector", "language"]
    inside = {name: [g for g, group in groups.items() if group.depth(name)] for name, _ in model.named_parameters()}
    assert all(len(found) == 1 for found in inside.values()), {n: g for n, g in inside.items() if len(g) != 1}
    for group, prefix in zip(groups, FAMILIES[family], strict=True):
        below = [found for name, found in inside.items() if name.startswith(prefix)]
        assert below and all(found == [group] for found in below), (group, prefix)
    head = [name for name in inside if name.startswith("lm_head")]
    assert all(inside[name] == ["language"] for name in head)


def test_groups_of_embedding_models_and_dual_encoders_are_their_parts():
    model = embedding_model(model_config("bert"), projection_dim=8)
    plan = plan_freezing(model, trainable_modules=["projection"])
    assert plan.trainable == {"projection.linear.weight"}
    frozen = plan_freezing(model, frozen_modules=["backbone"])
    assert frozen.trainable == plan.trainable
    dual = dual_encoder()
    assert list(module_groups(dual)) == ["text", "image"]
    for image, text in (("image", "text"), ("vision", "language")):  # as in vision-language models
        locked = plan_freezing(dual, trainable_modules=[text])
        assert {name.split(".")[2] for name in locked.trainable} == {"text_model", "text_projection"}
        freed = plan_freezing(dual, trainable_modules=[image]).trainable
        assert {name.split(".")[2] for name in freed} == {"vision_model", "visual_projection"}


def test_a_model_without_parts_has_no_groups_but_names_work():
    model = BertForSequenceClassification(BertConfig(**{**model_config("bert"), "num_labels": 2}))
    assert module_groups(model) == {} == module_groups(LlamaForCausalLM(LlamaConfig(**{**model_config("llama")})))
    assert plan_freezing(model, ["classifier"]).trainable == {"classifier.weight", "classifier.bias"}
    by_suffix = plan_freezing(model, ["layer.1.attention"]).trainable
    assert by_suffix and all(name.startswith("bert.encoder.layer.1.attention.") for name in by_suffix)
    biases = plan_freezing(model, r".*\.bias").trainable
    assert biases and all(name.endswith(".bias") for name in biases)


def test_a_suffix_never_matches_half_a_name():
    model = nn.ModuleDict({"proj": nn.Linear(2, 2), "my_proj": nn.Linear(2, 2)})
    assert plan_freezing(model, ["proj"]).trainable == {"proj.weight", "proj.bias"}


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"trainable_modules": ["projektor"]}, ["projektor", "projector", "matches no module"]),
        ({"trainable_modules": ["multi_modal_projektor"]}, ["model.multi_modal_projector"]),
        ({"trainable_modules": r".*\.multi_modal_projektor\..*"}, ['"model.multi_modal_projector"']),
        ({"trainable_modules": "projector"}, ["regular expression", "a group of modules", "'[\"projector\"]'"]),
        ({"trainable_modules": "linear_1"}, ["projector.linear_1", "--trainable_modules '[\"linear_1\"]'"]),
        ({"trainable_modules": "("}, ["no regular expression"]),
        ({"frozen_modules": ["vision", "projector", "language"]}, ["nothing is left to train"]),
        ({"trainable_modules": ["vision"], "frozen_modules": ["model.vision_tower"]}, ["both match"]),
        ({"trainable_modules": ["act"]}, ["has no parameters"]),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_way_out(fields, words):
    with pytest.raises(UsageError) as error:
        plan_freezing(tiny_llava(), **fields)
    assert all(word in str(error.value) for word in words), error.value


def test_where_both_fields_match_the_deeper_one_decides():
    model = tiny_llava()
    plan = plan_freezing(model, ["language"], ["model.language_model.embed_tokens"])
    assert "model.language_model.embed_tokens.weight" not in plan.trainable
    assert "lm_head.weight" in plan.trainable and "model.language_model.norm.weight" in plan.trainable
    inverse = plan_freezing(model, ["model.vision_tower.post_layernorm"], ["vision"])
    assert inverse.trainable == {f"model.vision_tower.post_layernorm.{kind}" for kind in ("weight", "bias")}


def test_a_tied_parameter_cannot_be_frozen_under_one_of_its_names():
    model = LlamaForCausalLM(LlamaConfig(**{**model_config("llama"), "tie_word_embeddings": True}))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with pytest.raises(UsageError, match="tied"):
        plan_freezing(model, ["lm_head"], ["embed_tokens"])
    assert len(plan_freezing(model, ["lm_head"]).trainable) == 1


def test_frozen_modules_alone_unfreezes_what_an_earlier_plan_froze():
    model = tiny_llava()
    plan_freezing(model, ["projector"]).apply(model)
    second = plan_freezing(model, frozen_modules=["vision"])
    second.apply(model)
    trains = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trains == second.trainable and any("language_model" in name for name in trains)


def test_what_the_model_keeps_frozen_itself_stays_frozen():
    model = nn.ModuleDict({"table": nn.Embedding(2, 2), "head": nn.Linear(2, 2), "rest": nn.Linear(2, 2)})
    model["table"].weight.requires_grad_(False)
    assert "table.weight" not in plan_freezing(model, frozen_modules=["rest"]).trainable
    assert "table.weight" in plan_freezing(model, ["table", "head"]).trainable  # asked for by name


def test_adapters_train_beside_the_named_modules():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny_llava(), LoraConfig(r=2, target_modules=["q_proj"]))
    plan = plan_freezing(model, ["projector"])
    adapters = {name for name in plan.trainable if "lora_" in name}
    others = plan.trainable - adapters
    assert adapters and others and all("multi_modal_projector" in name for name in others)
    without_base = plan_freezing(model, frozen_modules=["vision"]).trainable
    assert without_base and all("lora_" in name and "vision_tower" not in name for name in without_base)


def test_report_adds_up_to_the_model():
    model = tiny_llava().bfloat16()
    plan_freezing(model, ["projector"]).apply(model, has_autocast=True)
    lines = {line.split()[0]: line.replace(",", "").split() for line in report(model).splitlines()[1:]}
    count = sum(p.numel() for p in model.model.multi_modal_projector.parameters())
    total = sum(p.numel() for p in model.parameters())
    assert int(lines["projector"][2]) == int(lines["total"][2]) == count > 0 and int(lines["total"][1]) == total
    assert sum(int(line[1]) for line in lines.values()) == 2 * total
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    assert " ".join(lines["total"][-6:]) == " ".join(map(bytes_in_words, (size, 4 * count, 8 * count)))

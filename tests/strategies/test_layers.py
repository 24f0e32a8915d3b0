import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModel, CLIPConfig, CLIPModel, CLIPVisionConfig, LlamaConfig, LlavaConfig

from hf_dist_ext.strategies.layers import repeated_layer_classes
from tests.tiny_models import EXPERTS_CONFIG, TEXT_CONFIGS, model_config, tiny_towers

LAYER_CLASSES = {
    "bert": "BertLayer",
    "roberta": "RobertaLayer",
    "xlm-roberta": "XLMRobertaLayer",
    "modernbert": "ModernBertEncoderLayer",
    "distilbert": "TransformerBlock",
    "mpnet": "MPNetLayer",
    "deberta-v2": "DebertaV2Layer",
    "qwen3": "Qwen3DecoderLayer",
    "llama": "LlamaDecoderLayer",
}


def build(config):
    config = AutoConfig.for_model(**config) if isinstance(config, dict) else config
    with torch.device("meta"):
        return AutoModel.from_config(config)


@pytest.mark.parametrize("name", TEXT_CONFIGS)
def test_the_layers_of_text_models_are_found(name):
    model = build(model_config(name))
    assert repeated_layer_classes(model) == [LAYER_CLASSES[name]]
    found = [module for module in model.modules() if type(module).__name__ == LAYER_CLASSES[name]]
    assert len(found) == 2


@pytest.mark.parametrize("name", ["bert", "distilbert", "llama"])
def test_a_single_layer_is_found(name):
    config = AutoConfig.for_model(**model_config(name))
    config.num_hidden_layers = 1
    model = build(config)
    assert repeated_layer_classes(model) == [LAYER_CLASSES[name]]
    assert sum(type(module).__name__ == LAYER_CLASSES[name] for module in model.modules()) == 1


def test_both_towers_of_image_text_models_are_found():
    for family, name in (("clip", "CLIPEncoderLayer"), ("siglip", "SiglipEncoderLayer")):
        towers = tiny_towers(family)
        assert repeated_layer_classes(towers["text"]) == repeated_layer_classes(towers["image"]) == [name]
        assert repeated_layer_classes(nn.ModuleDict(towers)) == [name]
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    image = {**sizes, "image_size": 16, "patch_size": 8, "projection_dim": 8}
    clip = CLIPConfig(text_config={**sizes, "vocab_size": 32, "max_position_embeddings": 16}, vision_config=image)
    assert repeated_layer_classes(CLIPModel(clip)) == ["CLIPEncoderLayer"]
    text = LlamaConfig(**{**TEXT_CONFIGS["llama"], "intermediate_size": 96})
    llava = build(LlavaConfig(text_config=text, vision_config=CLIPVisionConfig(**image)))
    assert repeated_layer_classes(llava) == ["LlamaDecoderLayer", "CLIPEncoderLayer"]  # the larger stack first


def test_experts_inside_a_layer_are_not_listed():
    assert repeated_layer_classes(build(EXPERTS_CONFIG)) == ["Qwen3MoeDecoderLayer"]

    class Expert(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(Expert() for _ in range(3))
            self.feed_forward = nn.Sequential(Expert(), Expert())

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(Layer(), Layer())
            self.heads = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)])
            self.head = nn.Sequential(Expert(), nn.GELU(), Expert())
            self.wrapper = nn.Sequential(nn.ModuleDict({"inner": Expert()}))

    assert repeated_layer_classes(Model()) == ["Layer"]


def test_layers_of_two_classes_in_one_list_are_both_found():
    class Attention(nn.TransformerEncoderLayer):
        pass

    class Recurrent(nn.TransformerEncoderLayer):
        pass

    layers = nn.ModuleList([Recurrent(8, 2), Recurrent(8, 2), Attention(8, 2), nn.Identity()])
    assert repeated_layer_classes(nn.ModuleDict({"layers": layers})) == ["Recurrent", "Attention"]
    assert repeated_layer_classes(layers) == ["Recurrent", "Attention"]  # the stack may be the model itself


def test_adapters_are_seen_through():
    model = AutoModel.from_config(AutoConfig.for_model(**model_config("bert")))
    adapted = get_peft_model(model, LoraConfig(target_modules="all-linear"))
    assert any("lora_A" in name for name, _ in adapted.named_parameters())
    assert repeated_layer_classes(adapted) == ["BertLayer"]


def test_a_model_without_repeated_layers_has_none():
    assert repeated_layer_classes(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))) == []
    assert repeated_layer_classes(nn.Linear(4, 2)) == []

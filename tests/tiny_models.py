"""Configs that are built in milliseconds, and a tokenizer to match, for the tests of several files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModel,
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPProcessor,
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    SiglipConfig,
    SiglipImageProcessorPil,
    SiglipProcessor,
    SiglipTextConfig,
    SiglipTextModel,
    SiglipVisionConfig,
    SiglipVisionModel,
    TrainingArguments,
)

from hf_dist_ext.models import from_run
from hf_dist_ext.models.embedder import embedder_of
from hf_dist_ext.strategies import splitting

# The name of Trainer's field, and in those of models' methods. Remove when the minimum is transformers 5.23.
CHECKPOINTING = (
    "activation_checkpointing" if hasattr(TrainingArguments, "activation_checkpointing") else "gradient_checkpointing"
)
needs_tensor_parallelism = pytest.mark.skipif(
    not splitting.is_supported(), reason="tensor parallelism needs transformers 5.23"
)

WORDS = "parse a date from text read file into list of lines search : sort the numbers by key".split()
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
VOCAB = {word: index for index, word in enumerate([*SPECIAL, *dict.fromkeys(WORDS)])}

SMALL = {
    "vocab_size": 32,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
}
SPECIAL_IDS = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
TEXT_CONFIGS = {
    "bert": SMALL,
    "roberta": SMALL,
    "xlm-roberta": SMALL,
    "modernbert": {**SMALL, **SPECIAL_IDS, "cls_token_id": 2, "sep_token_id": 3},
    "distilbert": {
        "vocab_size": 32,
        "dim": 32,
        "n_layers": 2,
        "n_heads": 2,
        "hidden_dim": 48,
        "max_position_embeddings": 40,
    },
    "mpnet": SMALL,
    "deberta-v2": {
        **SMALL,
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False,
        "type_vocab_size": 0,
    },
    "qwen3": {**SMALL, **SPECIAL_IDS, "num_key_value_heads": 1, "head_dim": 16},
    "llama": {**SMALL, **SPECIAL_IDS, "num_key_value_heads": 1},
}

EXPERTS_CONFIG = {
    **TEXT_CONFIGS["qwen3"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}


def model_config(name: str, **changes) -> dict:
    return {"model_type": name, **TEXT_CONFIGS[name], **changes}


def tiny_tokenizer(padding_side: str = "right", max_length: int = 24) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel(VOCAB, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", VOCAB["[CLS]"]), ("[SEP]", VOCAB["[SEP]"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        padding_side=padding_side,
        model_max_length=max_length,
    )


def of_dual_encoder(family: str, width: int = 16) -> tuple[Any, Any]:
    """Configuration and processor of "clip" or "siglip", whose texts have `width` tokens at most."""
    layers = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**layers, "vocab_size": 32, "max_position_embeddings": width, "projection_size": 32, **SPECIAL_IDS}
    image = {**layers, "image_size": 16, "patch_size": 8}
    size, tokenizer = {"height": 16, "width": 16}, tiny_tokenizer(max_length=width)
    if family == "clip":
        config = CLIPConfig(text_config=text, vision_config=image, projection_dim=16)
        return config, CLIPProcessor(CLIPImageProcessorPil(size=size, crop_size=size), tokenizer)
    config = SiglipConfig(text_config=text, vision_config=image)
    return config, SiglipProcessor(SiglipImageProcessorPil(size=size), tokenizer)


def save_dual_encoder(family: str, folder: Path) -> None:
    """A folder as the hub has them."""
    torch.manual_seed(0)
    config, processor = of_dual_encoder(family)
    AutoModel.from_config(config).save_pretrained(folder)
    processor.save_pretrained(folder)


OF_DUAL = {"query": {"modality": "text"}, "positive": {"modality": "image"}}  # constants of its columns


def dual_encoder(family: str = "clip") -> Any:
    """The model that a run file makes of such a configuration."""
    config, processor = of_dual_encoder(family)
    return embedding_model(config, tokenizer=processor, normalize=False)


def tiny_towers(family: str = "clip") -> dict[str, PreTrainedModel]:
    """A text and an image tower that end in vectors of the same width."""
    layers = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**layers, "vocab_size": 32, "max_position_embeddings": 40, **SPECIAL_IDS}
    image = {**layers, "image_size": 16, "patch_size": 8}
    if family == "clip":
        return {
            "text": CLIPTextModelWithProjection(CLIPTextConfig(**text, projection_dim=8)),
            "image": CLIPVisionModelWithProjection(CLIPVisionConfig(**image, projection_dim=8)),
        }
    return {
        "text": SiglipTextModel(SiglipTextConfig(**text, projection_size=32)),
        "image": SiglipVisionModel(SiglipVisionConfig(**image)),
    }


def tiny_pairs(folder: Path, rows: int = 32) -> dict[str, str]:
    """The data fields of a run file: pairs of a local file, and a tokenizer beside it."""
    pairs = [{"query": f"{WORDS[i % 9]} {i}", "positive": f"{WORDS[i % 7]} read {i}"} for i in range(rows)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    tiny_tokenizer().save_pretrained(folder / "tokenizer")
    return {"dataset_name": str(folder / "rows.jsonl"), "tokenizer_name": str(folder / "tokenizer")}


def write_fields(folder: Path, **fields: Any) -> Path:
    """The run file run.json of these fields, which is quiet and on the CPU, without those whose value is `...`."""
    quiet = {"use_cpu": True, "disable_tqdm": True, "report_to": "none"}
    given = {name: value for name, value in (quiet | fields).items() if value is not ...}
    (folder / "run.json").write_text(json.dumps(given))
    return folder / "run.json"


# The file of a model with code of its own, whose embeddings a parameter scales.
OWN_CODE = """
import torch
from transformers import BertConfig, BertModel, PreTrainedModel


class OwnConfig(BertConfig):
    model_type = "own"


class OwnModel(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.inner = BertModel(config, add_pooling_layer=False)
        self.scale = torch.nn.Parameter(torch.ones(config.hidden_size))
        self.post_init()

    def get_input_embeddings(self):
        return self.inner.embeddings.word_embeddings

    def forward(self, input_ids=None, attention_mask=None, **more):
        output = self.inner(input_ids=input_ids, attention_mask=attention_mask)
        output.last_hidden_state = output.last_hidden_state * self.scale
        return output
"""


def embedding_model(config: Any, **options: Any) -> Any:
    """The model that a run file's `model_config` makes: a SentenceTransformer, or a MultiVectorEncoder of "tokens"."""
    return from_run.build(model_config=config, **{"tokenizer": tiny_tokenizer()} | options)


def loaded(folder: Any, **options: Any) -> Any:
    """The model that a run file's `model_name_or_path` loads."""
    return from_run.build(folder, **options)


def embed(model: torch.nn.Module, **features: torch.Tensor) -> torch.Tensor:
    """(rows, D) of a chunk's features, or a mapping of token vectors and their mask."""
    return embedder_of(model).call(model, features)


def around(backbone: Any, **options: Any) -> Any:
    """The same of a backbone that is there."""
    model = embedding_model(backbone.config, **options)
    model[0].model = backbone
    return model

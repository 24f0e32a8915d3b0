"""Tiny models of sentence-transformers, which need no download."""

from pathlib import Path
from unittest import mock

import torch
from PIL import Image
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Router, Transformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, StaticEmbedding
from transformers import (
    AutoConfig,
    AutoModel,
    AutoProcessor,
    BertConfig,
    BertModel,
    CLIPModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3Model,
)

from tests.tiny_models import SMALL, TEXT_CONFIGS, of_dual_encoder, tiny_tokenizer
from tests.tiny_processors import tiny_vision_language

# Without dropout, and with embeddings that are far apart.
CLEAR = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "initializer_range": 0.3}
CHAT = "{% for message in messages %}{{ message['role'] }} : {{ message['content'] }} {% endfor %}"


def transformer(folder: Path, model: torch.nn.Module, processor, **options) -> Transformer:
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return Transformer(str(folder), **options)


def bert(folder: Path, tokenizer: PreTrainedTokenizerFast | None = None, seed: int = 0, **options) -> Transformer:
    torch.manual_seed(seed)
    return transformer(folder, BertModel(BertConfig(**SMALL, **CLEAR)), tokenizer or tiny_tokenizer(), **options)


def text_model(folder: Path, **options) -> SentenceTransformer:
    first = bert(folder, **options)
    modules = [first, Pooling(first.get_embedding_dimension(), "mean"), Normalize()]
    return SentenceTransformer(modules=modules, device="cpu")


def chat_model(folder: Path) -> SentenceTransformer:
    tokenizer = tiny_tokenizer("left")
    tokenizer.chat_template = CHAT
    first = transformer(folder, Qwen3Model(Qwen3Config(**TEXT_CONFIGS["qwen3"])), tokenizer)
    return SentenceTransformer(modules=[first, Pooling(32, "lasttoken")], device="cpu")


def picture_model(folder: Path) -> SentenceTransformer:
    config, processor = of_dual_encoder("clip", width=24)
    return SentenceTransformer(modules=[transformer(folder, CLIPModel(config), processor)], device="cpu")


def vision_language_model(folder: Path, family: str) -> SentenceTransformer:
    torch.manual_seed(0)
    processor, config = tiny_vision_language(family)
    model = AutoModel.from_config(AutoConfig.for_model(**config))
    with mock.patch.object(AutoProcessor, "from_pretrained", lambda *args, **options: processor):  # without videos
        first = transformer(folder, model, processor)
    return SentenceTransformer(modules=[first, Pooling(32, "lasttoken")], device="cpu")


def static_model() -> SentenceTransformer:
    return SentenceTransformer(modules=[StaticEmbedding(tiny_tokenizer(), embedding_dim=4)], device="cpu")


def routed_model(folder: Path) -> SentenceTransformer:
    ways = [[bert(folder / name), Pooling(32, "mean")] for name in ("query", "document")]
    return SentenceTransformer(modules=[Router.for_query_document(*ways)], device="cpu")


def pictures(count: int) -> list[Image.Image]:
    return [Image.new("RGB", (16, 16), (17 * i % 256, 31 * i % 256, 0)) for i in range(count)]

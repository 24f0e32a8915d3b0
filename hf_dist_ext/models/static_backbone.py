"""A backbone without layers: every token has one vector, and a text is the mean of its tokens'.

It is sentence-transformers' StaticEmbedding (and model2vec's), in the form of a transformers model, so that all that
is here for backbones is here for it too. Its folder is that module's: `model.safetensors` with `embedding.weight`, and
`tokenizer.json`. Texts get no special tokens and are never cut.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.modeling_outputs import BaseModelOutput

from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.model_folder import STATIC

MODEL_TYPE = "static_embedding"


class StaticConfig(PreTrainedConfig):
    """`initializer_range` 1.0 is how sentence-transformers starts."""

    model_type = MODEL_TYPE
    vocab_size: int = 32000
    hidden_size: int = 256
    initializer_range: float = 1.0
    pad_token_id: int | None = None


class StaticBackbone(PreTrainedModel):
    config_class = StaticConfig
    base_model_prefix = ""
    main_input_name = "input_ids"

    def __init__(self, config: StaticConfig):
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embedding = value

    def forward(self, input_ids: torch.Tensor) -> BaseModelOutput:
        """(B, T) token numbers -> last_hidden_state (B, T, H)."""
        return BaseModelOutput(last_hidden_state=self.embedding(input_ids))


def register() -> None:
    """transformers' Auto classes know the model from now on."""
    AutoConfig.register(MODEL_TYPE, StaticConfig, exist_ok=True)
    AutoModel.register(StaticConfig, StaticBackbone, exist_ok=True)


def load(folder: Path, dtype: torch.dtype | str) -> StaticBackbone:
    """Of a StaticEmbedding module's folder; `dtype` "auto" is what its files hold."""
    if (folder / "model.safetensors").is_file():
        weights = load_file(folder / "model.safetensors")
    elif (folder / "pytorch_model.bin").is_file():
        weights = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
    else:
        raise UsageError(f"{folder} has no model.safetensors. Copy the whole folder again.")
    table = _table(folder, weights)
    table = table if dtype == "auto" else table.to(dtype)
    with torch.device("meta"):
        model = StaticBackbone(StaticConfig(vocab_size=table.shape[0], hidden_size=table.shape[1], dtype=table.dtype))
    model.load_state_dict({"embedding.weight": table}, assign=True)
    model.config._name_or_path = str(folder)
    return model.requires_grad_(True).eval()


def _table(folder: Path, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """(V, H). model2vec keeps rows that tokens share, and a weight for each token."""
    if "embedding.weight" in weights:
        return weights["embedding.weight"]
    if "embeddings" not in weights:
        raise UsageError(f"{folder}: its weights are {', '.join(weights)}, which are not those of a {STATIC}.")
    table = weights["embeddings"]
    if "mapping" in weights:
        table = table[weights["mapping"].long()]
    if "weights" in weights:
        table = (table.float() * weights["weights"].float()[:, None]).to(table.dtype)
    return table.contiguous()


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Of a module's folder."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UsageError(f"{path} is missing. Copy the whole folder again.")
    return without_special_tokens(PreTrainedTokenizerFast(tokenizer_file=str(path)))


def without_special_tokens(tokenizer: Any) -> Any:
    """The tokenizer, which adds no special tokens and cuts nothing from now on. It pads with its padding token, or
    else with its first one: the attention mask hides padding."""
    if not tokenizer.is_fast:
        raise UsageError(f"{type(tokenizer).__name__} has no tokenizer.json, which a {STATIC} needs. Use a fast one.")
    backend = tokenizer.backend_tokenizer
    backend.post_processor = None
    backend.no_truncation()
    if tokenizer.pad_token is None:
        tokenizer.pad_token = backend.id_to_token(0)
    tokenizer.model_max_length = int(1e30)
    return tokenizer

"""`HybridEmbeddingModel`: of each row one vector, a weight of each token and a vector of each token, as bge-m3.

    model = HybridEmbeddingModel.from_pretrained("BAAI/bge-m3")        # or any text encoder, with new heads

Above the backbone's token states (https://huggingface.co/papers/2402.03216, section 3.1), with the names that bge-m3's
own files have:

    dense     as `EmbeddingModel`: pooling, an optional projection, normalization
    sparse    sparse_linear to one number per token, negative ones cut to 0; special tokens are no terms
    tokens    colbert_linear to `token_dim` numbers per token but the first (cls); normalized as the dense one

The folder is that of the dense model, which sentence-transformers and the usual servers load, and beside it the two
files that FlagEmbedding and others look for in a folder of bge-m3: sparse_linear.pt and colbert_linear.pt.

Shapes: B rows, T tokens, H the backbone's width, D and D' the dimensions of the dense and the token vectors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.backbones import hidden_size, load_tokenizer
from hf_dist_ext.models.embedding_model import EmbeddingModel, pool_tokens
from hf_dist_ext.models.model_folder import resolve_folder
from hf_dist_ext.models.multi_vector import real_in_front
from hf_dist_ext.models.static_backbone import StaticBackbone
from hf_dist_ext.models.weights import load_weights
from hf_dist_ext.policy import TOKENS

HEADS = ("sparse_linear", "colbert_linear")  # of the model, and the files of their weights


@dataclass
class HybridOutput(ModelOutput):
    """Of B rows: `dense` (B, D), `vectors` (B, T, D'), `weights` (B, T), at least float32, and `terms` (B, T), the ids
    of the tokens. `vectors_mask` and `terms_mask` (B, T) are true where a token counts. `embeddings` holds them by the
    names that `SumOfLosses(outputs=...)` groups: "dense", "tokens", "sparse"."""

    dense: torch.Tensor | None = None
    vectors: torch.Tensor | None = None
    vectors_mask: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    terms: torch.Tensor | None = None
    terms_mask: torch.Tensor | None = None

    @property
    def embeddings(self) -> dict[str, torch.Tensor]:
        return {
            "dense": self.dense, "tokens.vectors": self.vectors, "tokens.mask": self.vectors_mask,
            "sparse.terms": self.terms, "sparse.weights": self.weights, "sparse.mask": self.terms_mask,
        }  # fmt: skip


class HybridEmbeddingModel(EmbeddingModel):
    """See the head of this file.

    `special_ids`: ids of tokens that are no terms, the tokenizer's `all_special_ids`. `token_dim` None is the
    backbone's width, as in bge-m3. `embedding_options` are those of `EmbeddingModel`.
    """

    gives_one_vector = False

    def __init__(
        self,
        backbone: PreTrainedModel,
        special_ids: Sequence[int],
        token_dim: int | None = None,
        **embedding_options: Any,
    ):
        super().__init__(backbone, **embedding_options)
        if self.pooling == TOKENS or isinstance(backbone, StaticBackbone):
            raise UsageError(
                "a model of several outputs per row pools its tokens to the dense one (mean, cls or last) and has "
                'layers below them; static embeddings and pooling="tokens" do not.'
            )
        if token_dim is not None and token_dim < 1:
            raise UsageError(f"token_dim={token_dim} must be at least 1; leave it out for the backbone's width.")
        width, place = hidden_size(backbone.config), {"device": backbone.device, "dtype": backbone.dtype}
        self.special_ids = sorted(special_ids)
        special = torch.tensor(self.special_ids, dtype=torch.long, device=backbone.device)
        self.register_buffer("special", special, persistent=False)
        self.token_dim = token_dim or width
        self.sparse_linear = nn.Linear(width, 1, **place)
        self.colbert_linear = nn.Linear(width, self.token_dim, **place)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        revision: str | None = None,
        special_ids: Sequence[int] | None = None,
        token_dim: int | None = None,
        **options: Any,
    ) -> HybridEmbeddingModel:
        """As `EmbeddingModel.from_pretrained`; heads that the folder does not have are new. `special_ids` None: those
        of the folder's tokenizer."""
        if given := [name for name in ("distributed_config", "in_stages") if options.get(name) is not None]:
            raise UsageError(
                f"a model of several outputs per row is not split or cut ({given[0]}). Use multi_gpu_fsdp."
            )
        folder = resolve_folder(name_or_path, revision)
        heads = {name: _read(_file(folder, name)) for name in HEADS}
        if heads["colbert_linear"] is not None:
            stored = len(heads["colbert_linear"]["weight"])
            if token_dim not in (None, stored):
                raise UsageError(
                    f"{name_or_path} has token vectors of {stored} dimensions, not {token_dim}. Leave token_dim out."
                )
            token_dim = stored
        if special_ids is None:
            special_ids = load_tokenizer(folder).all_special_ids
        options |= {"special_ids": special_ids, "token_dim": token_dim}
        model = super().from_pretrained(name_or_path, revision=revision, **options)
        for name, weights in heads.items():
            if weights is not None:
                load_weights(model.get_submodule(name), weights, source=f"{name}.pt of {name_or_path}")
        return model

    def describe(self) -> str:
        return f"{super().describe()}; term weights; token vectors of {self.token_dim} dimensions"

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **features: Any
    ) -> HybridOutput:
        """Features of B rows -> the three outputs. Without an attention mask every token counts; of terms and token
        vectors the real ones come first, whichever side the padding is on."""
        states = self.tokens(input_ids, attention_mask, **features)  # (B, T, H)
        dense = super().forward(pooled=pool_tokens(states, attention_mask, self.pooling)).embeddings
        states, is_real = real_in_front(states, attention_mask)
        terms, _ = real_in_front(input_ids[..., None], attention_mask)  # (B, T, 1)
        terms = terms.squeeze(2)
        states = states.to(self.sparse_linear.weight.dtype)
        wide = torch.promote_types(states.dtype, torch.float32)
        vectors = self.colbert_linear(states).to(wide)
        if self.normalize:
            vectors = nn.functional.normalize(vectors, dim=-1)
        vectors_mask = is_real.clone()
        vectors_mask[:, 0] &= is_real.sum(dim=1) < 2  # a row of one token keeps it: each has a token vector
        return HybridOutput(
            dense=dense,
            vectors=vectors,
            vectors_mask=vectors_mask,
            weights=self.sparse_linear(states).squeeze(2).relu().to(wide),
            terms=terms,
            terms_mask=is_real & ~torch.isin(terms, self.special),
        )

    def save_pretrained(
        self,
        save_directory: str | Path,
        is_main_process: bool = True,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        **options: Any,
    ) -> None:
        """As `EmbeddingModel.save_pretrained`, and the two heads."""
        if getattr(self, "_hf_peft_config_loaded", False):
            raise UsageError("adapters on a model of several outputs per row are not saved apart. Merge them first.")
        state_dict = dict(self.state_dict() if state_dict is None else state_dict)
        super().save_pretrained(save_directory, is_main_process, state_dict, **options)
        for name in HEADS if is_main_process else ():
            weights = {key: state_dict[f"{name}.{key}"] for key in ("weight", "bias")}
            # torch's own format, since that is what other programs read here; it holds tensors alone.
            torch.save(
                {key: value.detach().cpu().clone() for key, value in weights.items()}, _file(save_directory, name)
            )


def has_heads(folder: Path) -> bool:
    """Whether a folder holds the heads that were trained."""
    return all(_file(folder, name).is_file() for name in HEADS)


def _file(folder: str | Path, name: str) -> Path:
    return Path(folder, f"{name}.pt")


def _read(path: Path) -> dict[str, torch.Tensor] | None:
    return torch.load(path, map_location="cpu", weights_only=True) if path.is_file() else None

"""Rows of many vectors, one per real token, as ColBERT and ColPali have them: `EmbeddingModel(pooling="tokens")`.

(1) the vectors of real tokens stand at the front of their row, whichever side the padding is on: chunks of different
    widths then put a token at the same place
(2) the folder is one for `MultiVectorEncoder` of sentence-transformers 6.2, which scores by MaxSim

    modules.json, config.json, tokenizer.json, ...   as in models/model_folder.py
    1_Dense/                                         of every token vector; only if used
    2_MultiVectorMask/                               which tokens count: all real ones
    3_Normalize/                                     of every token vector; only if used

Shapes: B rows, T tokens, H the backbone's width.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils import ModelOutput

from hf_dist_ext.errors import UsageError

MASK = "MultiVectorMask"
STATE = "token_embeddings"  # what sentence-transformers calls tokens' vectors between its modules
STATES = {"module_input_name": STATE, "module_output_name": STATE}
SETTINGS = {"model_type": "MultiVectorEncoder", "similarity_fn_name": "maxsim"}
_PACKAGE = "sentence_transformers"
_TYPES = {
    "Transformer": f"{_PACKAGE}.base.modules.transformer.Transformer",
    "Dense": f"{_PACKAGE}.base.modules.dense.Dense",
    "Normalize": f"{_PACKAGE}.base.modules.normalize.Normalize",
    MASK: f"{_PACKAGE}.multi_vector_encoder.modules.multi_vector_mask.{MASK}",
}

# (1) ---------------------------------------------------------------------------------------------------------------


@dataclass
class TokenOutput(ModelOutput):
    """Of B rows: `vectors` (B, T, D), at least float32, and `mask` (B, T), true where a token is real; the real ones
    come first. `embeddings` holds both by name, as a loss over several outputs per row is given them."""

    vectors: torch.Tensor | None = None
    mask: torch.Tensor | None = None

    @property
    def embeddings(self) -> dict[str, torch.Tensor]:
        return {"vectors": self.vectors, "mask": self.mask}


def real_in_front(tokens: torch.Tensor, attention_mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, T, H) and (B, T) -> the same with each row's real tokens first, in their order; the mask is boolean."""
    if attention_mask is None:
        return tokens, torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
    if attention_mask.shape != tokens.shape[:2]:
        raise UsageError(
            f"attention_mask {tuple(attention_mask.shape)} must be (rows, tokens) = {tuple(tokens.shape[:2])} to tell "
            "which token vectors are real."
        )
    is_real = attention_mask.bool()
    order = is_real.int().argsort(dim=1, descending=True, stable=True)  # (B, T)
    return tokens.gather(1, order[..., None].expand_as(tokens)), is_real.gather(1, order)


# (2) ---------------------------------------------------------------------------------------------------------------


def write_modules(folder: Path, chain: Sequence[str]) -> None:
    """The configurations of the modules that have no weights."""
    contents = {MASK: {"skiplist_words": [], "skiplist_tasks": ["document"], "keep_only_token_ids": None}}
    for index, kind in enumerate(chain):
        if content := (contents | {"Normalize": STATES}).get(kind):
            path = folder / f"{index}_{kind}" / "config.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def type_of(kind: str, has_tokens: bool) -> str:
    """Of a module in modules.json. The older names stand for modules of a SentenceTransformer."""
    return _TYPES[kind] if has_tokens else f"{_PACKAGE}.models.{kind}"


def check(settings: Mapping[str, Any], folder: Path, modules: Sequence[tuple[str, Path]]) -> bool:
    """Whether a folder is one of token vectors. Raises UsageError for what does not treat all real tokens alike.

    settings: config_sentence_transformers.json. modules: of modules.json, (kind, folder).
    """
    if settings.get("model_type") == "ColBERT":
        raise UsageError(
            f"{folder} was saved by PyLate, whose markers and query expansion are not read here. Load it in "
            f"{_PACKAGE}.MultiVectorEncoder and use it there, or give the model that it was made from."
        )
    if settings.get("model_type") != SETTINGS["model_type"]:
        return False
    chain = [kind for kind, _ in modules]
    rest = [MASK] + ["Normalize"] * ("Normalize" in chain)
    if chain != ["Transformer"] + ["Dense"] * chain.count("Dense") + rest:
        raise UsageError(
            f"{folder} chains {' -> '.join(chain)}; supported is Transformer [-> Dense ...] -> {MASK} "
            "[-> Normalize]. EmbeddingModel.from_backbone takes the backbone only."
        )
    for kind, path in modules[1:]:
        config = path / "config.json"
        content = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
        for name in ("skiplist_words", "keep_only_token_ids"):
            if content.get(name):
                raise UsageError(
                    f"{path} leaves out tokens ({name}), which is not done here: every real token counts. Start from "
                    "the model that it was made from."
                )
        if kind == "Normalize" and any(content.get(name, STATE) != STATE for name in STATES):
            raise UsageError(f"{path} does not work on {STATE}: {content}.")
    return True


def check_lengths(folder: Path, lengths: Mapping[str, Any]) -> None:
    """Of sentence_bert_config.json. Raises UsageError."""
    if lengths.get("query_expansion"):
        raise UsageError(
            f"{folder} expands queries (query_expansion={lengths['query_expansion']}), which is not done here. Start "
            "from the model that it was made from."
        )

"""Search the standard library with a trained model: `hf-dist search --model DIR "parse a date string"`.

(1) embed every documented function of the running Python, longest first, so that a batch has little padding
(2) embed the question and print the functions with the highest scores
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_dist_ext.data.code_search import read_functions
from hf_dist_ext.data.collator import ContrastiveCollator
from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.model_folder import DOCUMENT_NAMES
from hf_dist_ext.policy import TOKENS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hf_dist_ext.models.embedding_model import EmbeddingModel

ROWS_PER_BATCH = 64
DOCUMENT_ROLE = (*DOCUMENT_NAMES, "positive")  # names of the prompt before documents, the first one found


def main(model_dir: str, query: str, top_k: int = 5) -> None:
    """Print the `top_k` functions that fit the query best. `model_dir`: a saved folder or hub id."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    show(query, search(model_dir, query, top_k))


def search(model_dir: str, query: str, top_k: int = 5, root: str | Path | None = None) -> list[tuple[float, dict]]:
    """(score, row) of the best functions below `root` (None: the standard library), the best first."""
    if top_k < 1:
        raise UsageError(f"top_k={top_k} asks for no result. Give 1 or more.")
    if not query.strip():
        raise UsageError("The query is empty. Describe what the function does, as a docstring would.")
    model, tokenizer = load(model_dir)
    rows = read_functions(root)
    documents = embed(model, tokenizer, [row["positive"] for row in rows], "document")  # (1): (M, D)
    question = embed(model, tokenizer, [query], "query")[0]  # (2): (D,)
    scores, indices = (documents @ question).topk(min(top_k, len(rows)))
    return [(score, rows[index]) for score, index in zip(scores.tolist(), indices.tolist(), strict=True)]


def load(model_dir: str) -> tuple[EmbeddingModel, PreTrainedTokenizerBase]:
    from hf_dist_ext.checkpoints.merge import whole_model
    from hf_dist_ext.models.backbones import load_tokenizer

    model = whole_model(model_dir)
    try:
        tokenizer = load_tokenizer(model_dir)
    except (OSError, ValueError) as error:
        raise UsageError(f"{model_dir} holds a model but no tokenizer. Save the tokenizer beside it.") from error
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer


def embed(
    model: EmbeddingModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: list[str],
    role: str,
    done: Callable[[int], Any] = lambda count: None,
) -> torch.Tensor:
    """(len(texts), D) float32 on the CPU, in the order of the texts, with the model's own prompt and length for a
    "query" or "document". `done` is told how many more texts are embedded."""
    names = DOCUMENT_ROLE if role == "document" else (role,)
    prompt = next((model.prompts[name] for name in names if name in model.prompts), "")
    return embed_after(prompt, model, tokenizer, texts, model.lengths.get(role, model.max_length), done)


@torch.inference_mode()
def embed_after(
    prompt: str,
    model: EmbeddingModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: list[str],
    length: int | None,
    done: Callable[[int], Any] = lambda count: None,
    rows_per_batch: int = ROWS_PER_BATCH,
) -> torch.Tensor:
    """As `embed`, with the prompt before each text, cut at `length` tokens; None: the tokenizer's limit."""
    if model.pooling == TOKENS:
        raise UsageError(
            "the model gives a vector of every token, and here texts are compared by one vector each. Use "
            "MultiVectorEncoder of sentence-transformers, which loads the folder."
        )
    limit = min(length or tokenizer.model_max_length, tokenizer.model_max_length)
    collator = ContrastiveCollator(tokenizer, ("query", "text"), {"text": prompt}, limit)
    longest_first = sorted(range(len(texts)), key=lambda row: -len(texts[row]))
    embeddings = torch.empty(len(texts), model.embedding_dim)
    for batch in torch.tensor(longest_first).split(rows_per_batch):
        features = collator.text_features("text", [texts[row] for row in batch])
        embeddings[batch] = model(**{k: v.to(model.device) for k, v in features.items()}).embeddings.float().cpu()
        done(len(batch))
    return embeddings


def show(query: str, results: list[tuple[float, dict]]) -> None:
    """Two lines per result, since names and places are too long for columns."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, soft_wrap=True)  # a place that is cut in two can not be clicked
    console.print(f'"{query}", in {sysconfig.get_path("stdlib")}:', style="dim")
    for score, row in results:
        console.print(f"{score:.3f}  {row['name']}  {row['path']}:{row['line']}", style="bold")
        console.print(f"       {row['query']}")

"""Search the standard library with a trained model: `hf-dist search --model DIR "parse a date string"`.

(1) embed every documented function of the running Python, longest first, so that a batch has little padding
(2) embed the question and print the functions with the highest scores
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hf_dist_ext.data.code_search import read_functions
from hf_dist_ext.errors import UsageError
from hf_dist_ext.tasks.serving import load_for_serving

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer


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
    model, rows = load_for_serving(model_dir), read_functions(root)
    documents = torch.as_tensor(model.encode_document([row["positive"] for row in rows]))  # (1): (M, D)
    return [(score, rows[index]) for score, index in best(model, query, documents, top_k)]  # (2)


def best(model: SentenceTransformer, question: object, documents: torch.Tensor, top_k: int) -> list[tuple[float, int]]:
    """(score, index) of the `documents` (M, D) that fit a text or picture best, the best first. Exact, and scored in
    parts, so that memory does not grow with the number of documents."""
    from sentence_transformers.util import semantic_search

    query = torch.as_tensor(model.encode_query([question]))  # (1, D)
    (found,) = semantic_search(query, documents, top_k=top_k, score_function=model.similarity)
    return [(one["score"], int(one["corpus_id"])) for one in found]


def show(query: str, results: list[tuple[float, dict]]) -> None:
    """Two lines per result, since names and places are too long for columns."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, soft_wrap=True)  # a place that is cut in two can not be clicked
    console.print(f'"{query}", in {sysconfig.get_path("stdlib")}:', style="dim")
    for score, row in results:
        console.print(f"{score:.3f}  {row['name']}  {row['path']}:{row['line']}", style="bold")
        console.print(f"       {row['query']}")

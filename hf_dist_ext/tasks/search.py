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
from hf_dist_ext.data.vision_language_collator import VisionLanguageCollator
from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.model_folder import DOCUMENT_NAMES, read_model_folder, reads_messages
from hf_dist_ext.policy import TOKENS
from hf_dist_ext.run.config import RunConfig
from hf_dist_ext.tasks.lengths import positions_of

if TYPE_CHECKING:
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
    model, processor = load(model_dir)
    rows = read_functions(root)
    documents = embed(model, processor, [row["positive"] for row in rows], "document")  # (1): (M, D)
    question = embed(model, processor, [query], "query")[0]  # (2): (D,)
    scores, indices = (documents @ question).topk(min(top_k, len(rows)))
    return [(score, rows[index]) for score, index in zip(scores.tolist(), indices.tolist(), strict=True)]


def sees_pictures(model_dir: str) -> bool:
    """Whether a folder holds a model that embeds texts and pictures alike."""
    folder = Path(model_dir)
    return (folder / "modules.json").is_file() and reads_messages(read_model_folder(folder).messages)


def load(model_dir: str) -> tuple[EmbeddingModel, Any]:
    """The model and its tokenizer, or its processor where it reads chat messages."""
    from hf_dist_ext.checkpoints.merge import whole_model
    from hf_dist_ext.models.backbones import load_tokenizer
    from hf_dist_ext.tasks.image_text import load_processor

    model = whole_model(model_dir)
    try:
        if reads_messages(model.messages):
            processor = load_processor(RunConfig(model_name_or_path=model_dir))
        else:
            processor = load_tokenizer(model_dir)
    except (OSError, ValueError) as error:
        raise UsageError(f"{model_dir} holds a model but no tokenizer. Save the tokenizer beside it.") from error
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), processor


def embed(
    model: EmbeddingModel,
    processor: Any,
    values: list,
    role: str,
    done: Callable[[int], Any] = lambda count: None,
) -> torch.Tensor:
    """(len(values), D) float32 on the CPU, in the order of the texts (or PIL images, where the model sees), with the
    model's own prompt and length for a "query" or "document". `done` is told how many more are embedded."""
    names = DOCUMENT_ROLE if role == "document" else (role,)
    prompt = next((model.prompts[name] for name in names if name in model.prompts), "")
    return embed_after(prompt, model, processor, values, model.lengths.get(role, model.max_length), done)


@torch.inference_mode()
def embed_after(
    prompt: str,
    model: EmbeddingModel,
    processor: Any,
    values: list,
    length: int | None,
    done: Callable[[int], Any] = lambda count: None,
    rows_per_batch: int = ROWS_PER_BATCH,
) -> torch.Tensor:
    """As `embed`, with the prompt before each text, cut at `length` tokens (None: the tokenizer's limit), and
    where the model's positions end."""
    if model.pooling == TOKENS:
        raise UsageError(
            "the model gives a vector of every token, and here texts are compared by one vector each. Use "
            "MultiVectorEncoder of sentence-transformers, which loads the folder."
        )
    tokenizer, make, options = getattr(processor, "tokenizer", processor), ContrastiveCollator, {}
    if reads_messages(model.messages):
        make = VisionLanguageCollator
        options = {"processor": processor, "processing_kwargs": model.messages.get("processing_kwargs")}
    limit = min(length or tokenizer.model_max_length, tokenizer.model_max_length)
    limit = min(limit, positions_of(model.backbone) or limit)
    collator = make(tokenizer, ("query", "text"), {"text": prompt}, limit, **options)
    longest_first = sorted(range(len(values)), key=lambda row: -len(values[row]) if _is_text(values[row]) else 0)
    embeddings = torch.empty(len(values), model.embedding_dim)
    for batch in torch.tensor(longest_first).split(rows_per_batch):
        features = collator.features("text", [values[row] for row in batch])
        features = {k: v.to(model.device) for k, v in features.items() if isinstance(v, torch.Tensor)}
        embeddings[batch] = model(**features).embeddings.float().cpu()
        done(len(batch))
    return embeddings


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def show(query: str, results: list[tuple[float, dict]]) -> None:
    """Two lines per result, since names and places are too long for columns."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, soft_wrap=True)  # a place that is cut in two can not be clicked
    console.print(f'"{query}", in {sysconfig.get_path("stdlib")}:', style="dim")
    for score, row in results:
        console.print(f"{score:.3f}  {row['name']}  {row['path']}:{row['line']}", style="bold")
        console.print(f"       {row['query']}")

"""Search with a trained model: `hf-dist search --model DIR [--data PATH] "parse a date string"`.

(1) what is searched: every picture below a folder, the texts of a file, a line or a row each, or without `--data`
    every documented function of the running Python
(2) the model: a dual encoder or a vision-language model for pictures, which a picture may ask too (`--image`); for
    texts any embedding model
(3) the vectors of `--data` are kept in the model's folder, in a file of `index/`. They are computed again when the
    model's files, those of the base of its adapters, or what is searched have changed; names, sizes and times of
    change tell, of texts the texts
"""

from __future__ import annotations

import contextlib
import hashlib
import sysconfig
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers.utils import logging

from hf_dist_ext.checkpoints.merge import folders_behind
from hf_dist_ext.data.code_search import read_functions
from hf_dist_ext.data.load import facts_of
from hf_dist_ext.errors import UsageError
from hf_dist_ext.tasks.rows import StoredRows, open_picture, read_rows
from hf_dist_ext.tasks.serving import load_for_serving

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

logger = logging.get_logger(__name__)

INDEX = "index"
# weights, configurations, tokenizers, chat templates, code
MODEL_FILES = (".safetensors", ".bin", ".json", ".txt", ".model", ".jinja", ".py")

PICTURES_AT_ONCE = 64


def main(
    model_dir: str,
    question: str,
    top_k: int = 5,
    data: str | None = None,
    image: str | None = None,
    column: str | None = None,
) -> None:
    """Print the `top_k` documents that fit the question best, or the picture `image` when one is given. `data`: None:
    functions of the standard library."""
    logging.disable_progress_bar()
    if data is None:
        found: Sequence = find_functions(model_dir, question, top_k)
        data = sysconfig.get_path("stdlib")
    else:
        found = find(model_dir, question, image, data, column, top_k)
    asked = image or f'"{question}"'
    show(f"{asked}, in {data}:", found)


def show(asked: str, found: Sequence[tuple[float, Any]]) -> None:
    """A line per text or picture, two per function, since names and places are too long for columns."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, soft_wrap=True)  # a path that is cut in two can not be clicked
    console.print(asked, style="dim")
    for score, one in found:
        if isinstance(one, str):
            console.print(f"{score:.3f}  {one}")
        else:
            console.print(f"{score:.3f}  {one['name']}  {one['path']}:{one['line']}", style="bold")
            console.print(f"       {one['query']}")


def find_functions(
    model_dir: str, question: str, top_k: int = 5, root: str | Path | None = None
) -> list[tuple[float, dict]]:
    """(score, row) of the best functions below `root` (None: the standard library), the best first."""
    if not question.strip():
        raise UsageError("The query is empty. Describe what the function does, as a docstring would.")
    model, rows = load_for_serving(model_dir), read_functions(root)
    documents = torch.as_tensor(model.encode_document([row["positive"] for row in rows]))  # (M, D)
    return [(score, rows[index]) for score, index in best(model, question, documents, top_k)]


def find(
    model_dir: str, question: str, image: str | None, data: str, column: str | None = None, top_k: int = 5
) -> list[tuple[float, str]]:
    """(score, text or path of a picture), the best first. `model_dir`: a saved folder; for texts also a hub id."""
    if (image is None) == (not question.strip()):
        raise UsageError("Ask with words or with --image, one of the two.")
    rows = read_rows(Path(data), column, may_lack=True)  # (1)
    values = rows.ids(0, rows.count) if rows.are_pictures else texts_of(rows, data)
    model = load_for_serving(model_dir)  # (2)
    if (rows.are_pictures or image is not None) and not model.supports("image"):
        raise UsageError(
            f"{model_dir} embeds no pictures: they need the folder of a run that trained a dual encoder, "
            "or a vision-language model that embeds both."
        )
    facts = _facts([Path(path) for path in values], Path(data)) if rows.are_pictures else _digest(values)
    embed = lambda: torch.cat(list(_embedded(rows, values, model.encode_document)))  # noqa: E731
    vectors = kept_vectors(Path(model_dir), data, facts, embed)  # (3): (M, D)
    found = best(model, open_picture(Path(image)) if image else question, vectors, top_k)
    return [(score, values[index]) for score, index in found]


def best(model: SentenceTransformer, question: object, documents: torch.Tensor, top_k: int) -> list[tuple[float, int]]:
    """(score, index) of the `documents` (M, D) that fit a text or picture best, the best first. Exact, and scored in
    parts, so that memory does not grow with the number of documents."""
    from sentence_transformers.util import semantic_search

    query = torch.as_tensor(model.encode_query([question]))  # (1, D)
    (found,) = semantic_search(query, documents, top_k=top_k, score_function=model.similarity)
    return [(one["score"], int(one["corpus_id"])) for one in found]


def texts_of(rows: StoredRows, data: str) -> list[str]:
    """Without those that are empty."""
    texts = [text for text in rows.take(0, rows.count) if text and text.strip()]
    if not texts:
        raise UsageError(f"--data {data} holds no text.")
    return texts


# ---- (3) ----


def kept_vectors(model: Path, data: str, facts: str, embed: Callable[[], torch.Tensor]) -> torch.Tensor:
    """(documents, D) of what `embed()` gives. The index of a model folder has one file for each place that was
    searched. `facts`: other where what is searched has changed."""
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file

    if not model.is_dir():  # a hub id
        return embed()
    facts = _digest([facts_of_model(model), facts])
    index = model / INDEX / f"{_digest([str(Path(data).resolve())])}.safetensors"
    with contextlib.suppress(FileNotFoundError, SafetensorError):  # torn, it is made again
        with safe_open(index, "pt") as file:
            if (file.metadata() or {}).get("facts") == facts:
                return file.get_tensor("vectors")
    vectors = embed()
    unfinished = index.with_suffix(f".{uuid.uuid4().hex}.unfinished")  # another search may be writing the same index
    try:
        index.parent.mkdir(exist_ok=True)
        save_file({"vectors": vectors.contiguous()}, unfinished, {"facts": facts})
        unfinished.replace(index)
    except OSError as error:
        logger.warning(f"the index {index} cannot be written ({error}): the next search computes the vectors again.")
    finally:
        with contextlib.suppress(OSError):  # it is the index by now, or could not be made
            unfinished.unlink()
    return vectors


def _embedded(rows: StoredRows, texts: list, encode: Callable[[list], Any]) -> Iterator[torch.Tensor]:
    if not rows.are_pictures:
        yield torch.as_tensor(encode(texts))
        return
    for first in range(0, rows.count, PICTURES_AT_ONCE):
        yield torch.as_tensor(encode(rows.take(first, first + PICTURES_AT_ONCE)))


def facts_of_model(folder: Path) -> str:
    """Other where a file of the model, of the base that it belongs to, or transformers' release has changed."""
    return _digest([transformers.__version__, *map(_facts_of_folder, folders_behind(folder))])


def _facts_of_folder(folder: Path) -> str:
    found = sorted(path for path in folder.rglob("*") if path.suffix in MODEL_FILES)
    return _facts([path for path in found if folder / INDEX not in path.parents], folder)


def _facts(paths: Sequence[Path], root: Path) -> str:
    found = [(path.relative_to(root), facts_of(path)) for path in paths]
    return _digest([f"{path} {' '.join(facts)}" for path, facts in found])


def _digest(texts: Sequence[str]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        digest.update(f"{len(text)} {text}".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()

"""Search pictures of a folder or texts of a file: `hf-dist search --model DIR --data PATH "greek small letter alpha"`.

(1) what is searched: every picture below a folder, or the texts of a file, a line or a row each
(2) the model: a dual encoder or a vision-language model for pictures, which a picture may ask too (`--image`); for
    texts any embedding model
(3) the vectors of what is searched are kept in the model's folder, in a file of `index/`. They are computed again when
    the model's files, those of the base of its adapters, or what is searched have changed; names, sizes and times of
    change tell, of texts the texts
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import logging

from hf_dist_ext.checkpoints.merge import folders_behind
from hf_dist_ext.data.columns import columns_of
from hf_dist_ext.data.encoding import refuse_other_encoding
from hf_dist_ext.data.image_files import require_pillow
from hf_dist_ext.data.load import FILE_FORMATS, facts_of, loading_errors, open_here
from hf_dist_ext.data.row_check import column_kind
from hf_dist_ext.errors import UsageError
from hf_dist_ext.tasks import search
from hf_dist_ext.tasks.serving import load_for_serving

logger = logging.get_logger(__name__)

INDEX = "index"
MODEL_FILES = (".safetensors", ".bin", ".json", ".txt", ".model")  # weights, configurations, tokenizers

PICTURES_AT_ONCE = 64


@dataclass(frozen=True)
class Documents:
    """What is searched. `values` are texts or paths of pictures; `facts` is other where anything has changed."""

    values: list[str]
    are_pictures: bool
    facts: str


def main(
    model_dir: str, question: str, image: str | None, data: str, column: str | None = None, top_k: int = 5
) -> None:
    """Print the `top_k` documents that fit the question best, or the picture `image` when one is given."""
    from rich.console import Console

    logging.disable_progress_bar()
    results = find(model_dir, question, image, data, column, top_k)
    console = Console(highlight=False, markup=False, soft_wrap=True)  # a path that is cut in two can not be clicked
    asked = image or f'"{question}"'
    console.print(f"{asked}, in {data}:", style="dim")
    for score, document in results:
        console.print(f"{score:.3f}  {document}")


def find(
    model_dir: str, question: str, image: str | None, data: str, column: str | None = None, top_k: int = 5
) -> list[tuple[float, str]]:
    """(score, text or path of a picture), the best first. `model_dir`: a saved folder; for texts also a hub id."""
    if top_k < 1:
        raise UsageError(f"top_k={top_k} asks for no result. Give 1 or more.")
    if (image is None) == (not question.strip()):
        raise UsageError("Ask with words or with --image, one of the two.")
    documents = pictures_below(Path(data)) if Path(data).is_dir() else texts_of(Path(data), column)  # (1)
    model = load_for_serving(model_dir)  # (2)
    if (documents.are_pictures or image is not None) and not model.supports("image"):
        raise UsageError(
            f"{model_dir} embeds no pictures: they need the folder of a run that trained a dual encoder, "
            "or a vision-language model that embeds both."
        )
    vectors = kept_vectors(Path(model_dir), data, documents, model.encode_document)  # (3): (M, D)
    found = search.best(model, open_picture(Path(image)) if image else question, vectors, top_k)
    return [(score, documents.values[index]) for score, index in found]


# ---- (1) ----


def pictures_below(folder: Path) -> Documents:
    require_pillow()
    from PIL import Image

    endings = {ending for ending, kind in Image.registered_extensions().items() if kind in Image.OPEN}
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in endings and path.is_file())
    if not paths:
        raise UsageError(f"there is no picture below {folder}. Give a folder with image files.")
    return Documents([str(path) for path in paths], True, _facts(paths, folder))


def texts_of(file: Path, column: str | None = None) -> Documents:
    """Lines of a text file, or a column of a data file; those that are empty are left out."""
    if not file.is_file():
        raise UsageError(f"--data {file}: there is no such file or folder. Paths start at {Path.cwd()}.")
    suffixes = [suffix for suffix in file.suffixes if suffix != ".gz"]
    if not suffixes or suffixes[-1] not in FILE_FORMATS:
        if column is not None:
            raise UsageError(f"--column {column}: {file} is read as lines of text and has no columns. Remove it.")
        try:
            with (gzip.open if file.suffix == ".gz" else open)(file, "rt", encoding="utf-8-sig") as lines:
                texts = [line.rstrip("\n") for line in lines]
        except (UnicodeDecodeError, EOFError, OSError):
            refuse_other_encoding(f"--data {file}", file)
            raise
    else:
        with loading_errors(str(file)):
            rows = open_here(file, streaming=False)["train"]
            texts = rows[column_of_texts(rows, column, f"--data {file}")][:]
    texts = [text for text in texts if text and text.strip()]
    if not texts:
        raise UsageError(f"--data {file} holds no text.")
    return Documents(texts, False, _digest(texts))


def column_of_texts(rows: Any, column: str | None, where: str) -> str:
    named = [name for name in columns_of(rows) if column_kind(rows.features[name]) == "text"]
    if column is None and len(named) != 1 or column is not None and column not in named:
        raise UsageError(f"{where} has the text columns {', '.join(named) or 'none'}. Name one as --column.")
    return column or named[0]


def open_picture(path: Path) -> Any:
    from PIL import Image

    try:
        return Image.open(path).convert("RGB")
    except OSError as error:  # Pillow's "cannot identify image file" is one
        raise UsageError(f"the picture {path} cannot be read: {error}. Remove it or give another.") from error


# ---- (3) ----


def kept_vectors(model: Path, data: str, documents: Documents, embed: Callable[[list], Any]) -> torch.Tensor:
    """(documents, D) of what `embed(values)` gives, a tensor or an array. The index of a model folder has one file for
    each place that was searched."""
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file

    if not model.is_dir():  # a hub id
        return torch.cat(list(_in_batches(documents, embed)))
    facts = _digest([facts_of_model(model), documents.facts])
    index = model / INDEX / f"{_digest([str(Path(data).resolve())])}.safetensors"
    with contextlib.suppress(FileNotFoundError, SafetensorError):  # torn, it is made again
        with safe_open(index, "pt") as file:
            if (file.metadata() or {}).get("facts") == facts:
                return file.get_tensor("vectors")
    vectors = torch.cat(list(_in_batches(documents, embed)))
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


def _in_batches(documents: Documents, embed: Callable[[list], Any]) -> Iterator[torch.Tensor]:
    if not documents.are_pictures:
        yield torch.as_tensor(embed(documents.values))
        return
    for first in range(0, len(documents.values), PICTURES_AT_ONCE):
        pictures = [open_picture(Path(path)) for path in documents.values[first : first + PICTURES_AT_ONCE]]
        yield torch.as_tensor(embed(pictures))


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

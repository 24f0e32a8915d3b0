"""Search with a trained model: `hf-dist search --model DIR [--data PATH] "parse a date string" "read a file"`.

What is searched: every picture below a folder, the texts of a file (a line or a row each), or without `--data` every
documented function of the running Python. `semantic_search` of sentence-transformers finds the best for every query.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import torch
from transformers.utils import logging

from hf_dist_ext.checkpoints.merge import is_part
from hf_dist_ext.data.code_search import read_functions
from hf_dist_ext.data.image_files import require_pillow
from hf_dist_ext.data.load import FILE_FORMATS, as_named, loading_errors, open_here
from hf_dist_ext.data.row_check import column_kind
from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.folders import read_json, resolve_folder

logger = logging.get_logger(__name__)
ID_COLUMNS, PICTURES_AT_ONCE = ("_id", "id"), 64  # pictures are large once they are decoded


def search(
    name: str, queries: list[str], data: Path | None, column: str | None, image: Path | None, top_k: int
) -> list[list[tuple[float, str]]]:
    """(score, document) of the best for every query, or for the picture `image`. Raises UsageError."""
    from sentence_transformers.util import semantic_search

    logging.disable_progress_bar()
    model, are_pictures = load(name), data is not None and data.is_dir()
    if (are_pictures or image) and not model.supports("image"):
        raise UsageError(f"{name} embeds no pictures: they need a dual encoder, or a vision-language model.")
    asked = model.encode_query([opened(image)] if image else queries, convert_to_tensor=True)  # (Q, D)
    if are_pictures:
        documents, vectors = pictures_below(data, model)
    elif data is not None:
        documents = texts_of(data, column)
        vectors = model.encode_document(documents, convert_to_tensor=True)  # (M, D)
    else:
        rows = read_functions()
        documents = [f"{row['name']}  {row['path']}:{row['line']}\n       {row['query']}" for row in rows]
        vectors = model.encode_document([row["positive"] for row in rows], convert_to_tensor=True)
    found = semantic_search(asked, vectors, top_k=top_k, score_function=model.similarity)
    return [[(one["score"], documents[one["corpus_id"]]) for one in best] for best in found]


def load(name: str) -> Any:
    from sentence_transformers import SentenceTransformer

    folder, own = resolve_folder(name), SentenceTransformer.__name__
    if is_part(folder):
        raise UsageError(f"{name} holds a trained part alone. Search with what hf-dist merge makes of it.")
    settings = read_json(folder / "config_sentence_transformers.json", missing_is_empty=True)
    if (kind := settings.get("model_type", own)) != own:  # it would be loaded with another pooling
        raise UsageError(f"{name} is a {kind}, and here one vector of a row is compared. Use {kind} itself.")
    try:
        return SentenceTransformer(str(folder))
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise UsageError(f'model "{name}" cannot be loaded: {error}') from error


def texts_of(path: Path, column: str | None) -> list[str]:
    """Without those that are empty."""
    if not path.is_file():
        raise UsageError(f"--data {path}: there is no such file or folder. Paths start at {Path.cwd()}.")
    with loading_errors(str(path)):
        if path.name.removesuffix(".gz").endswith(tuple(FILE_FORMATS)):
            rows = open_here(path, streaming=False)["train"]
        else:  # its lines are the column "text"
            files = as_named([str(path.absolute())])
            rows = datasets.load_dataset("text", data_files=files, encoding="utf-8-sig")["train"]
        names = [name for name, feature in rows.features.items() if column_kind(feature) == "text"]
        named = [name for name in names if name == column or column is None and name not in ID_COLUMNS]
        if len(named) != 1:
            raise UsageError(f"{path} has the text columns {', '.join(names) or 'none'}. Name one as --column.")
        if not (texts := [text for text in rows[named[0]] if text and text.strip()]):
            raise UsageError(f"--data {path} holds no text.")
    return texts


def pictures_below(folder: Path, model: Any) -> tuple[list[str], torch.Tensor]:
    """Paths of the pictures that can be read, and their vectors."""
    require_pillow()
    from PIL import Image

    endings = {ending for ending, kind in Image.registered_extensions().items() if kind in Image.OPEN}
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in endings and path.is_file())
    kept, vectors, errors = [], [], []
    for first in range(0, len(paths), PICTURES_AT_ONCE):
        pictures = {}
        for path in paths[first : first + PICTURES_AT_ONCE]:
            try:
                pictures[str(path)] = opened(path)
            except UsageError as error:
                errors.append(str(error))
        if pictures:
            kept += pictures
            vectors.append(model.encode_document([*pictures.values()], convert_to_tensor=True))
    if not kept:
        raise UsageError(errors[0] if errors else f"there is no picture below {folder}. Give a folder of pictures.")
    if errors:
        logger.warning(f"{len(errors)} of {len(paths)} pictures are left out of the search. The first: {errors[0]}")
    return kept, torch.cat(vectors)


def opened(path: Path) -> Any:
    from PIL import Image

    try:
        return Image.open(path).convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UsageError(f"the picture {path} cannot be read: {error}") from error

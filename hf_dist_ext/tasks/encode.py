"""Embeddings of the rows of a file or the pictures of a folder: `hf-dist encode --model DIR FILE --output FILE.npy`.

(1) the rows: a data file or the lines of a text file, which `datasets` maps from the disk, or pictures below a folder
(2) a window of rows at a time goes through the model's `encode`, and with `--devices` through its pool of processes
(3) the embeddings stand in an unfinished .npy beside the output, in the order of the rows, which is renamed in the
    end. What is quantised or written as .parquet is made of it in parts

So memory holds one window of rows, and the disk all embeddings in float32 while it runs. Letters: n rows, D the width
of their embeddings.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tqdm import tqdm

from hf_dist_ext import launched
from hf_dist_ext.errors import UsageError
from hf_dist_ext.tasks.rows import StoredRows, read_rows
from hf_dist_ext.tasks.serving import load_for_serving, not_written, require_devices, require_new

BATCHES_PER_WINDOW = 128  # of texts; of pictures, which are large once they are decoded, one for each process
ROWS_PER_GROUP = 16_384  # of a parquet file
DOCUMENT_ROLE = ("document", "passage", "corpus", "positive")  # prompts whose texts have the length of documents
OF_RANGES = ("int8", "uint8")
ENDINGS, CONTENT = (".npy", ".parquet"), "embeddings"


@dataclass(frozen=True)
class Encode:
    """What `hf-dist encode` was asked for.

    `data`: a file or folder. `prompt_name`: of the model's prompts; "query" and "document" also mean the length of
    that column. With neither it nor `prompt` the default prompt of the model's folder holds, if it has one. `dims`:
    leading dimensions to keep, of length 1 again where the model's are. `ranges`: a file of an earlier int8 or uint8
    output, whose steps this one shall have; None: the ranges of these embeddings. `devices`: one process for each
    name, such as cuda:0; None: this process.
    """

    model: str
    data: str
    output: str
    column: str | None = None
    id_column: str | None = None
    prompt_name: str | None = None
    prompt: str | None = None
    batch_size: int = 64
    dims: int | None = None
    precision: str = "float32"
    ranges: str | None = None
    devices: list[str] | None = None


def main(asked: Encode) -> None:
    """Encode and write. Raises UsageError before anything is embedded for what cannot be."""
    output = Path(asked.output)
    _check(asked, output)
    rows = read_rows(Path(asked.data), asked.column, asked.id_column)  # (1)
    with _encoder(asked, rows.are_pictures) as encode:
        width = encode(rows.take(0, 1)).shape[1]
        if asked.dims is not None and asked.dims > width:
            raise UsageError(f"--dims {asked.dims}: the embeddings of {asked.model} have {width} dimensions.")
        ranges = _given_ranges(asked, width)
        unfinished = output.with_name(f"{output.name}.unfinished")
        with _taken(output, unfinished):
            _reserve(unfinished, rows.count, width)
            at_once = len(asked.devices or [""]) if rows.are_pictures else BATCHES_PER_WINDOW
            _encode(rows, encode, unfinished, at_once * asked.batch_size)  # (2)
            try:
                _finish(unfinished, output, rows, asked.precision, ranges)  # (3)
            except OSError as error:
                raise not_written(output, error) from error
    print(f"{output}: {rows.count} rows, {width} dimensions, {asked.precision}.")


@contextmanager
def _taken(output: Path, unfinished: Path) -> Iterator[None]:
    """UsageError when another process writes this output, or has written it since `_check`; the system drops the lock
    with its holder. The file is removed at the end, where it is not the output by then."""
    try:
        file = unfinished.open("ab")
    except OSError as error:
        raise not_written(unfinished, error) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(
                f"--output {output} is being written by another hf-dist encode. Wait for it, or give another --output."
            ) from error
        except OSError:  # a file system without locks
            pass
        try:
            require_new(output, ENDINGS, CONTENT)
            yield
        finally:
            unfinished.unlink(missing_ok=True)


def _check(asked: Encode, output: Path) -> None:
    require_new(output, ENDINGS, CONTENT)
    for name in ("batch_size", "dims"):
        if (value := getattr(asked, name)) is not None and value < 1:
            raise UsageError(f"--{name} {value} is not a positive number.")
    if asked.prompt is not None and asked.prompt_name is not None:
        raise UsageError("--prompt and --prompt_name both say what stands before each text. Give one of them.")
    if asked.id_column is not None and output.suffix != ".parquet":
        raise UsageError(f"--id_column {asked.id_column}: a .npy file holds numbers alone. Give a .parquet --output.")
    ranges = output.with_suffix(".ranges.npy")
    if asked.precision in OF_RANGES and asked.ranges is None and ranges.exists():
        raise UsageError(
            f"{ranges} exists, of another output: --ranges {ranges} gives this one the same steps. Or give another "
            "--output, or remove it."
        )
    if asked.ranges is not None and asked.precision not in OF_RANGES:
        raise UsageError(f"--ranges goes with --precision {' or '.join(OF_RANGES)}, which divide them into steps.")
    require_devices("--devices", asked.devices or ())
    if launched.processes() > 1:
        raise UsageError(
            "hf-dist encode starts its own processes. Start it without a launcher, with --devices cuda:0 cuda:1, say."
        )


def _reserve(unfinished: Path, count: int, width: int) -> None:
    """Room on the disk for all embeddings: without it a full disk would end the process by a signal in the middle."""
    try:
        made = np.lib.format.open_memmap(unfinished, "w+", np.float32, (count, width))
        if hasattr(os, "posix_fallocate"):  # macOS has no such call
            with unfinished.open("rb+") as file:
                os.posix_fallocate(file.fileno(), 0, made.offset + made.nbytes)
    except OSError as error:
        raise not_written(unfinished, error) from error


# (2) ---------------------------------------------------------------------------------------------------------------


@contextmanager
def _encoder(asked: Encode, are_pictures: bool) -> Iterator[Callable[[list], np.ndarray]]:
    """encode(values) -> (n, D) float32, with the prompt, the length and the dimensions that were asked for."""
    model = load_for_serving(asked.model)
    if are_pictures and not model.supports("image"):
        raise UsageError(f"{asked.model} embeds no pictures, such as those of {asked.data}.")
    options = {"prompt": asked.prompt, "batch_size": asked.batch_size, "truncate_dim": asked.dims}
    options["normalize_embeddings"] = asked.dims is not None and gives_length_one(model)
    encode, name = model.encode, asked.prompt_name
    if name in ("query", "document"):
        encode = model.encode_query if name == "query" else model.encode_document
    elif name is not None:
        if name not in model.prompts:
            raise UsageError(f"--prompt_name {name}: the prompts of {asked.model} are {', '.join(model.prompts)}.")
        encode, options["prompt_name"] = model.encode_document if name in DOCUMENT_ROLE else model.encode, name
    pool = model.start_multi_process_pool(asked.devices) if asked.devices else None
    options["chunk_size"] = asked.batch_size if are_pictures else None
    try:
        yield partial(encode, pool=pool, show_progress_bar=False, **options)
    finally:
        if pool is not None:
            model.stop_multi_process_pool(pool)


def gives_length_one(model: torch.nn.Module) -> bool:
    from sentence_transformers.base.modules import Normalize

    return any(isinstance(module, Normalize) for module in model.modules())


def _encode(rows: StoredRows, encode: Callable[[list], np.ndarray], unfinished: Path, window: int) -> None:
    embeddings = np.lib.format.open_memmap(unfinished, "r+")
    with tqdm(total=rows.count, desc="embedding", unit=" rows", disable=None) as bar:  # None: where no terminal is
        for first in range(0, rows.count, window):
            found = encode(rows.take(first, first + window))
            embeddings[first : first + len(found)] = found
            bar.update(len(found))
    embeddings.flush()


# (3) ---------------------------------------------------------------------------------------------------------------


def _finish(unfinished: Path, output: Path, rows: StoredRows, precision: str, ranges: np.ndarray | None) -> None:
    embeddings = np.load(unfinished, mmap_mode="r")
    if has_own := precision in OF_RANGES and ranges is None:
        ranges = ranges_of(embeddings)
        np.save(output.with_suffix(".ranges.npy"), ranges)
    if output.suffix == ".npy" and precision == "float32":
        unfinished.replace(output)
        return
    first_of_all = quantized(embeddings[:1], precision, ranges)
    made = output.with_name(f"{output.name}.making")
    try:
        if output.suffix == ".npy":
            shape = (rows.count, first_of_all.shape[1])
            written = np.lib.format.open_memmap(made, "w+", first_of_all.dtype, shape)
            for first, part in _parts(embeddings):
                written[first : first + len(part)] = quantized(part, precision, ranges)
            written.flush()
        else:
            _write_parquet(made, embeddings, rows, precision, ranges)
        made.replace(output)
    finally:
        made.unlink(missing_ok=True)
        if has_own and not output.exists():  # else they would pass for those of another output
            output.with_suffix(".ranges.npy").unlink(missing_ok=True)


def _write_parquet(
    path: Path, embeddings: np.ndarray, rows: StoredRows, precision: str, ranges: np.ndarray | None
) -> None:
    writer = None
    try:
        for first, part in _parts(embeddings):
            values = quantized(part, precision, ranges)
            of_rows = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])
            ids = pa.array(rows.ids(first, first + len(part)))
            table = pa.table({rows.id_name: ids, "embedding": of_rows})
            writer = writer or pq.ParquetWriter(path, table.schema)
            writer.write_table(table.cast(writer.schema))
    finally:
        if writer is not None:
            writer.close()


def _parts(embeddings: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    for first in range(0, len(embeddings), ROWS_PER_GROUP):
        yield first, embeddings[first : first + ROWS_PER_GROUP]


def _given_ranges(asked: Encode, width: int) -> np.ndarray | None:
    if asked.ranges is None:
        return None
    if not Path(asked.ranges).is_file():
        raise UsageError(f"--ranges {asked.ranges}: there is no such file. An int8 output leaves one beside it.")
    ranges = np.load(asked.ranges)
    if ranges.shape != (2, width):
        raise UsageError(f"--ranges {asked.ranges} has the shape {ranges.shape}; these embeddings need (2, {width}).")
    return ranges


def ranges_of(embeddings: np.ndarray) -> np.ndarray:
    """(n, D) -> (2, D) float32: the lowest and the highest value of each dimension."""
    parts = [np.stack([part.min(axis=0), part.max(axis=0)]) for _, part in _parts(embeddings)]
    return np.stack([np.min(parts, axis=0)[0], np.max(parts, axis=0)[1]])


def quantized(rows: np.ndarray, precision: str, ranges: np.ndarray | None = None) -> np.ndarray:
    """(n, D) float32 -> (n, D) of the precision, or (n, D / 8) bytes of bits. `ranges`: (2, D), of int8 and uint8."""
    from sentence_transformers.util.quantization import quantize_embeddings

    return rows.astype(precision) if precision == "float16" else quantize_embeddings(rows, precision, ranges)

"""What a chunk encodes to: one tensor (b, D), or a mapping of tensors whose first axis is the row.

A mapping holds several outputs per row, such as token vectors with their mask. Its tensors are put back into the
batch's order key by key. The second axis may be as long as the chunk's longest row: shorter tensors are padded at the
end, so a row's entries must stand at the front. Only floating tensors have gradients; others, such as a mask, are
handed to the loss as they are.

Letters: b chunk rows, R rows of a column, T entries of the second axis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_dist_ext.engine.chunks import Chunk, ChunkedBatch

Output = Tensor | Mapping[str, Tensor]


class RowSize(NamedTuple):
    """numbers: those of a row of a chunk that have gradients. tokens: T; 0 for one vector per row."""

    numbers: int
    tokens: int


def row_size(output: Output) -> RowSize:
    if isinstance(output, Tensor):
        return RowSize(output.shape[1], 0)
    floating = [tensor for tensor in output.values() if tensor.is_floating_point()]
    tokens = max((tensor.shape[1] for tensor in output.values() if tensor.dim() > 2), default=0)
    return RowSize(sum(prod(tensor.shape[1:]) for tensor in floating), tokens)


def tensors_of(output: Output) -> list[Tensor]:
    return [output] if isinstance(output, Tensor) else list(output.values())


def each(output: Output, change: Callable[[Tensor], Tensor]) -> Output:
    """The output with all of its tensors changed."""
    return change(output) if isinstance(output, Tensor) else {key: change(one) for key, one in output.items()}


def detached(output: Output) -> Output:
    return each(output, Tensor.detach)


def to_columns(batch: ChunkedBatch, outputs: Sequence[Output], chunks: Sequence[Chunk]) -> Mapping[str, Output]:
    """Chunk outputs -> column -> (R, ...), or key -> (R, ...); a column is as wide as its widest chunk."""
    if isinstance(outputs[0], Tensor):
        return batch.to_columns(cast(Sequence[Tensor], outputs), chunks)
    mappings = cast(Sequence[Mapping[str, Tensor]], outputs)
    columns: dict[str, dict[str, Tensor]] = {name: {} for name in batch.row_counts()}
    for key in mappings[0]:
        tensors = [output[key] for output in mappings]
        widths = [tensor.shape[1] if tensor.dim() > 1 else 0 for tensor in tensors]
        # Of one width in all chunks: it is no number of tokens, and a column without rows has it too.
        is_fixed = len(set(widths)) == 1
        widest = dict.fromkeys(columns, widths[0]) if is_fixed else _widest(batch, widths, chunks)
        for name, rows in batch.to_columns(_as_wide(tensors), chunks).items():
            columns[name][key] = rows[:, : widest[name]] if rows.dim() > 1 else rows
    return columns


def to_chunks(batch: ChunkedBatch, columns: Mapping[str, Output], chunks: Sequence[Chunk]) -> Sequence[Output]:
    """Gradients of columns -> those of every chunk's output; zeros for an idle chunk."""
    first = next(iter(columns.values()))
    if isinstance(first, Tensor):
        return batch.to_chunks(cast(Mapping[str, Tensor], columns), chunks)
    mappings = cast(Mapping[str, Mapping[str, Tensor]], columns)
    of_chunks: list[dict[str, Tensor]] = [{} for _ in chunks]
    for key in first:
        names = list(columns)
        tensors = dict(zip(names, _as_wide([mappings[name][key] for name in names]), strict=True))
        for of_chunk, gradient in zip(of_chunks, batch.to_chunks(tensors, chunks), strict=True):
            of_chunk[key] = gradient
    return of_chunks


def leaves_of(embeddings: Mapping[str, Output]) -> tuple[dict[str, Output], list[Tensor]]:
    """The same embeddings to differentiate by, and those of them that are floating tensors."""
    found: list[Tensor] = []

    def leaf(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        # Half precision leaves would round the cache before the fp16 scale is applied; the plain step scales first.
        found.append((tensor.float() if tensor.dtype.itemsize < 4 else tensor.detach()).requires_grad_())
        return found[-1]

    made: dict[str, Output] = {
        name: leaf(output) if isinstance(output, Tensor) else {key: leaf(one) for key, one in output.items()}
        for name, output in embeddings.items()
    }
    return made, found


def gradients_of(leaves: Mapping[str, Output], gradients: Sequence[Tensor | None]) -> dict[str, Output]:
    """Gradients in the order of `leaves_of`, None where the loss did not use one, in the form of the leaves."""
    given = iter(gradients)

    def gradient_of(tensor: Tensor) -> Tensor:
        gradient = next(given)
        return torch.zeros_like(tensor) if gradient is None else gradient

    return {
        name: gradient_of(output)
        if isinstance(output, Tensor)
        else {key: gradient_of(one) for key, one in output.items() if one.is_floating_point()}
        for name, output in leaves.items()
    }


def inner_product(output: Output, gradients: Output) -> Tensor | None:
    """<output, its gradient>; None where nothing of the output trains."""
    if isinstance(output, Tensor):
        assert isinstance(gradients, Tensor)
        return (output * gradients).sum() if output.requires_grad else None
    assert isinstance(gradients, Mapping)
    terms = []
    for key, gradient in gradients.items():
        tensor = output[key]
        if tensor.requires_grad:
            if tensor.dim() > 1:  # what one has beyond the other is padding, whose gradient is zero
                width = min(tensor.shape[1], gradient.shape[1])
                tensor, gradient = tensor[:, :width], gradient[:, :width]
            terms.append((tensor * gradient).sum())
    return torch.stack(terms).sum() if terms else None


def _as_wide(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Padded at the end of the second axis with zeros, where their widths differ."""
    if tensors[0].dim() < 2:
        return list(tensors)
    widest = max(tensor.shape[1] for tensor in tensors)
    return [pad(t, (*(0, 0) * (t.dim() - 2), 0, widest - t.shape[1])) for t in tensors]


def _widest(batch: ChunkedBatch, widths: Sequence[int], chunks: Sequence[Chunk]) -> dict[str, int]:
    """Of every column, the width of its widest chunk; from host numbers."""
    widest = dict.fromkeys(batch.row_counts(), 0)
    for chunk, width in zip(chunks, widths, strict=True):
        for name in chunk.columns if not chunk.is_idle else ():
            widest[name] = max(widest[name], width)
    return widest

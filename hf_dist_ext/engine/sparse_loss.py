"""A loss over sparse rows: a weight of each of a text's tokens, where equal tokens count once, with the largest.

With weights w_i of a row's tokens t_i (https://huggingface.co/papers/2402.03216, section 3.1, lexical retrieval)

    v[term] = max over i with t_i = term of  w_i                         0 for a term that is not in the row
    score(q, d) = sum over terms of  v_q[term] v_d[term]
    loss = InfoNCE over scores / temperature: a query against everyone's positives and hard negatives

No vector as long as the vocabulary is made:

(1) only terms of own queries count. They get numbers from 0 to U, and what others hold of them is a list of entries:
    row, number of the term, weight
(2) entries of the same row and term become one by their maximum; equal ones share its gradient
(3) the queries of a tile as a matrix (U, b); every document's scores are a weighted sum of its rows (embedding_bag)
(4) the softmax of these scores gives loss, metrics and a weight per pair; autograd takes it back to the entries, tile
    by tile, and after the last tile through the maxima to the tokens

So memory is linear in tokens, and in U and documents times the rows of a tile. All sizes come to the host in one copy.

Letters: B own queries, N documents of a column, T tokens, E entries of a column, U terms of own queries, b tile rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag

from hf_dist_ext.engine.by_hand import with_gradients
from hf_dist_ext.engine.losses import LossOutput, keys_of
from hf_dist_ext.engine.tiled_infonce import softmax_of_tile
from hf_dist_ext.errors import UsageError

KEYS = ("terms", "weights", "mask")
Weighted = Mapping[str, Tensor]  # "terms": (rows, T) token ids; "weights": (rows, T); "mask": (rows, T), true if real


class SparseLoss(nn.Module):
    """InfoNCE over inner products of sparse rows, as bge-m3 trains its sparse output.

    The first column holds the queries, the second their positives, further ones hard negatives. Rows are mappings of
    "terms", "weights" (not below 0) and "mask", which leaves out padding and whatever else is no term of the text.

    temperature: divides the scores.
    cross_device_negatives: as of `InfoNCELoss`.
    mask_false_negatives: with `ids`, leaves out the pairs that `InfoNCELoss` leaves out.
    queries_per_tile: so many queries meet all documents at once.
    """

    similarity = "sparse"  # evaluations compare by another loss's output

    def __init__(
        self,
        temperature: float = 0.05,
        mask_false_negatives: bool = True,
        queries_per_tile: int = 64,
        cross_device_negatives: bool = True,
    ) -> None:
        super().__init__()
        if not 0 < temperature < math.inf:
            raise UsageError(f"temperature={temperature} must be a positive number, for example 0.05.")
        if queries_per_tile < 1:
            raise UsageError(f"queries_per_tile={queries_per_tile} must be at least 1.")
        self.temperature, self.mask_false_negatives = temperature, mask_false_negatives
        self.queries_per_tile, self.cross_device_negatives = queries_per_tile, cross_device_negatives

    def forward(
        self,
        own: Mapping[str, Weighted],
        everyone: Mapping[str, Weighted] | None = None,
        row_offset: int = 0,
        ids: Mapping[str, Tensor] | None = None,
    ) -> LossOutput:
        """The mean over own queries, and as metrics accuracy and masked_share.

        own: column -> {"terms": (rows, T) integers, "weights": (rows, T), "mask": (rows, T)}, T as long as the
        column's longest row; everyone: the same of all ranks, None = own. Own row i is everyone's row row_offset + i.
        ids: as of `InfoNCELoss`. A row without a real token has the score 0 with every other.
        """
        everyone = own if everyone is None else everyone
        anchor, positive, *negatives = names = _checked(own, everyone)
        sides = [own[anchor], *(everyone[name] for name in (positive, *negatives))]
        weights = [side["weights"] for side in sides]
        dtype = torch.promote_types(weights[0].dtype, torch.float32)
        heights = dict(zip((positive, *negatives), map(len, weights[1:]), strict=True))
        plan = _Plan(
            keys=keys_of(names, heights, ids, dtype) if ids and self.mask_false_negatives else [],
            row_offset=row_offset,
            inverse_temperature=1 / self.temperature,
            queries_per_tile=self.queries_per_tile,
            terms=[side["terms"] for side in sides],
            masks=[side["mask"].bool() for side in sides],
        )
        loss, metrics = with_gradients("SparseLoss", partial(_loss_and_gradients, plan), *weights)
        return LossOutput(loss, dict(zip(("accuracy", "masked_share"), metrics.unbind(), strict=True)))

    def extra_repr(self) -> str:
        return f"temperature={self.temperature}"


class _Plan(NamedTuple):
    keys: list[list[tuple[Tensor, Tensor]]]  # per column of documents: (key of each of N rows, key of each document)
    row_offset: int
    inverse_temperature: float
    queries_per_tile: int
    terms: list[Tensor]  # of the queries, then of every column of documents
    masks: list[Tensor]


class _Tokens(NamedTuple):
    """Of one side, rows * T of them: which entry each belongs to, before the number of entries is known."""

    entry_of: Tensor  # of tokens that do not count the number of entries
    terms: Tensor  # from 0 to U
    starts: Tensor  # (rows + 1,): where each row's entries begin, and where all end


class _Entries(NamedTuple):
    """Of one side, in the order of its rows."""

    starts: Tensor  # (rows + 1,): where each row's entries begin, and where all end
    terms: Tensor  # (E,), from 0 to U
    tokens: Tensor  # (E,) weights, with a graph to those of the tokens
    values: Tensor  # the same without; gradients are added up here


def _loss_and_gradients(
    plan: _Plan, *weights: Tensor, needs: list[bool]
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Loss, metrics (2,), and the gradients of the queries' weights and of every column's."""
    dtype = torch.promote_types(weights[0].dtype, torch.float32)
    leaves = [one.detach().to(dtype).requires_grad_(needed) for one, needed in zip(weights, needs, strict=True)]
    num_queries, num_documents = len(weights[0]), sum(map(len, weights[1:]))
    known = _numbered(torch.where(plan.masks[0], plan.terms[0], -1).flatten())  # -1: padding, which no token asks for
    sides = [_tokens(terms, mask, *known) for terms, mask in zip(plan.terms, plan.masks, strict=True)]
    begins = sides[0].starts[: num_queries : plan.queries_per_tile]  # of the tiles' entries
    num_terms, *sizes = _to_host([known[1][-1:] + 1, *(side.starts[-1:] for side in sides), begins])
    counts, ends = sizes[: len(sides)], [*sizes[len(sides) :], sizes[0]]
    with torch.set_grad_enabled(any(needs)):
        queries, *documents = (_entries(*one) for one in zip(leaves, sides, counts, strict=True))
    loss, metrics = leaves[0].new_zeros(()), leaves[0].new_zeros(2)
    for number, low in enumerate(range(0, num_queries, plan.queries_per_tile)):
        high, some = min(low + plan.queries_per_tile, num_queries), slice(*ends[number : number + 2])
        with torch.set_grad_enabled(any(needs)):
            scores = _scores(queries, some, low, high, documents, num_terms)  # (3): (N, b) of every column
        scaled = [one.detach().T.contiguous() * plan.inverse_temperature for one in scores]
        pairs = softmax_of_tile(scaled, plan.keys, plan.row_offset + low, loss, metrics)  # (4)
        if any(needs):
            factor = plan.inverse_temperature / num_queries
            torch.autograd.backward(scores, [pair.T * factor for pair in pairs])
    if num_queries:
        loss /= num_queries
        metrics /= num_queries
    metrics[1] /= max(num_documents - 1, 1)
    for side in (queries, *documents):
        if side.values.grad is not None:
            side.tokens.backward(side.values.grad)
    return loss, metrics, [_gradient(leaf) if needed else None for leaf, needed in zip(leaves, needs, strict=True)]


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _to_host(sizes: list[Tensor]) -> list[int]:
    return torch.cat(sizes).tolist()


def _numbered(values: Tensor) -> tuple[Tensor, Tensor]:
    """Values in order (n,), -1 among them, and of each how many other ones are smaller."""
    ordered, _ = torch.cat([values, values.new_full((1,), -1)]).sort()
    return ordered, _is_first(ordered).cumsum(dim=0) - 1


def _is_first(ordered: Tensor) -> Tensor:
    is_first = torch.ones_like(ordered, dtype=torch.bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    return is_first


def _tokens(terms: Tensor, mask: Tensor, known: Tensor, numbers: Tensor) -> _Tokens:
    """(1), and which tokens become one in (2); of terms (rows, T). known, numbers: of `_numbered`."""
    flat, (num_rows, width), most = terms.flatten(), terms.shape, len(known)
    places = torch.searchsorted(known, flat).clamp(max=most - 1)
    of_tokens, is_read = numbers[places], mask.flatten() & (known[places] == flat)
    rows = torch.arange(num_rows, device=terms.device).repeat_interleave(width, output_size=len(flat))
    # One number for each row and term; what is not read is an entry of its own, the last one.
    ordered, order = torch.where(is_read, rows * most + of_tokens, num_rows * most).sort()
    before = torch.zeros(len(flat) + 1, dtype=torch.long, device=terms.device)  # entries before a place in the order
    before[1:] = _is_first(ordered).cumsum(dim=0)
    entry_of = torch.empty_like(order).scatter_(0, order, before[1:] - 1)
    bounds = torch.arange(num_rows + 1, device=terms.device) * most
    return _Tokens(entry_of, of_tokens, before[torch.searchsorted(ordered, bounds)])


def _entries(weights: Tensor, tokens: _Tokens, count: int) -> _Entries:
    """(2), of weights (rows, T) in so many entries."""
    read = weights.flatten().masked_fill(tokens.entry_of == count, 0.0)  # padding may hold anything
    largest = weights.new_zeros(count + 1).scatter_reduce(0, tokens.entry_of, read, "amax", include_self=False)
    terms = tokens.terms.new_zeros(count + 1).scatter_(0, tokens.entry_of, tokens.terms)[:count]
    found = largest[:count]
    return _Entries(tokens.starts, terms, found, found.detach().requires_grad_(found.requires_grad))


def _scores(
    queries: _Entries, some: slice, low: int, high: int, documents: list[_Entries], num_terms: int
) -> list[Tensor]:
    """Of queries low to high, whose entries are `some`: (N, b) of every column."""
    counts = queries.starts[low + 1 : high + 1] - queries.starts[low:high]  # (b,)
    rows = torch.arange(high - low, device=counts.device).repeat_interleave(counts, output_size=some.stop - some.start)
    values = queries.values[some]
    matrix = values.new_zeros(num_terms, high - low).index_put((queries.terms[some], rows), values)  # (U, b)
    return [
        embedding_bag(
            one.terms, matrix, one.starts, mode="sum", per_sample_weights=one.values, include_last_offset=True
        )
        for one in documents
    ]


def _checked(own: Mapping[str, Weighted], everyone: Mapping[str, Weighted]) -> list[str]:
    names = list(own)
    if len(names) < 2 or set(everyone) != set(names):
        raise UsageError(
            f"the sparse loss needs a query and a positive column, the same in own and everyone; got {names} and "
            f"{list(everyone)}."
        )
    for name in names:
        for one in (own[name],) if name == names[0] else (own[name], everyone[name]):
            shapes = {key: tuple(one[key].shape) for key in KEYS if key in one} if isinstance(one, Mapping) else {}
            if len(shapes) < len(KEYS) or len(set(shapes.values())) > 1 or len(shapes["terms"]) != 2:
                raise UsageError(f'column "{name}" needs {", ".join(KEYS)}, each (rows, tokens); it has {shapes}.')
    return names

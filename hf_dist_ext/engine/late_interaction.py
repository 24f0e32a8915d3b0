"""Late interaction (ColBERT, ColPali) in tiles, gradient included: rows are many vectors, scores sums of best matches.

With token vectors q_t of a query and d_u of a document (https://huggingface.co/papers/2004.12832, section 3.3)

    score(q, d) = sum over real t of  max over real u of  <q_t, d_u>
    loss = InfoNCE over scores / temperature: a query against everyone's positives and hard negatives

(1) real tokens alone, end to end, of length 1 where asked; documents in order of length, the longest first
(2) for a tile of queries and one of documents, whose padding is that of its own longest: all token products, their
    maxima and where these are, the scores
(3) the softmax of the queries' scores: loss, metrics, and one weight per pair of query and document
(4) for each tile of documents: a matrix that has a pair's weight where a query's token has its best match, and zeros
    elsewhere. One product with the documents is the queries' gradient, one with the queries the documents'

A tile of token products is all that has tokens of both sides; scores and places of maxima of a tile of queries against
all documents are kept from (2) to (4). So memory is linear in documents. The rows' numbers of tokens are read from the
device, once.

Letters: B own queries, N documents of a column, T tokens of a row, D dimensions, b and n the rows of a tile, t the
real tokens of its queries, M all documents.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hf_dist_ext import policy
from hf_dist_ext.engine.false_negatives import keys_of
from hf_dist_ext.engine.losses import LossOutput
from hf_dist_ext.engine.manual_gradient import with_gradients
from hf_dist_ext.engine.real_tokens import RealTokens, best_matches
from hf_dist_ext.engine.tiled_infonce import gradient_of_raw, normalized, softmax_of_tile
from hf_dist_ext.errors import UsageError

Vectors = Mapping[str, Tensor]  # "vectors": (rows, T, D), "mask": (rows, T), true where a token is real


class LateInteractionLoss(nn.Module):
    """InfoNCE over late interaction's scores (ColBERT, https://huggingface.co/papers/2004.12832, section 3.3).

    A row is several vectors: a column is a mapping of "vectors" (rows, T, D) and "mask" (rows, T), true where a token
    is real. A query's score for a document is the sum, over its tokens, of the best match among the document's.

    The first column holds the queries, the second their positives, further ones hard negatives.

    Args:
        temperature: divides the scores, which are sums over a query's tokens; ColBERT's is 1.
        cross_device_negatives: as of `InfoNCELoss`.
        normalize: every token vector is L2-normalised here.
        mask_false_negatives: with `ids`, leaves out the pairs that `InfoNCELoss` leaves out.
        queries_per_tile: so many queries meet `documents_per_tile` documents, with all their tokens, at once.
        documents_per_tile: see `queries_per_tile`.
    """

    similarity = "maxsim"  # by which evaluations compare

    def __init__(
        self,
        temperature: float = 1.0,
        normalize: bool = True,
        mask_false_negatives: bool = True,
        queries_per_tile: int = policy.LATE_TILE[0],
        documents_per_tile: int = policy.LATE_TILE[1],
        cross_device_negatives: bool = True,
    ) -> None:
        super().__init__()
        if not 0 < temperature < math.inf:
            raise UsageError(f"temperature={temperature} must be a positive number, for example 1.")
        if min(queries_per_tile, documents_per_tile) < 1:
            raise UsageError(
                f"queries_per_tile={queries_per_tile}, documents_per_tile={documents_per_tile}: at least 1."
            )
        self.temperature, self.normalize, self.mask_false_negatives = temperature, normalize, mask_false_negatives
        self.queries_per_tile, self.documents_per_tile = queries_per_tile, documents_per_tile
        self.cross_device_negatives = cross_device_negatives

    def forward(
        self,
        own: Mapping[str, Vectors],
        everyone: Mapping[str, Vectors] | None = None,
        row_offset: int = 0,
        ids: Mapping[str, Tensor] | None = None,
    ) -> LossOutput:
        """The mean over own queries, and as metrics accuracy and masked_share.

        own: column -> {"vectors": (rows, T, D), "mask": (rows, T)}, T as long as the column's longest row; everyone:
        the same of all ranks, None = own. Own row i is everyone's row row_offset + i. ids: as of `InfoNCELoss`. Every
        row has a real token. What stands in padding changes nothing.
        """
        everyone = own if everyone is None else everyone
        anchor, positive, *negatives = names = _checked(own, everyone)
        queries, documents = own[anchor], [everyone[name] for name in (positive, *negatives)]
        dtype = torch.promote_types(queries["vectors"].dtype, torch.float32)
        heights = {name: len(one["mask"]) for name, one in zip((positive, *negatives), documents, strict=True)}
        plan = _MaxSimSetup(
            keys=keys_of(names, heights, ids, dtype) if ids and self.mask_false_negatives else [],
            row_offset=row_offset,
            inverse_temperature=1 / self.temperature,
            normalize=self.normalize,
            tile=(self.queries_per_tile, self.documents_per_tile),
            masks=[one["mask"].bool() for one in (queries, *documents)],
        )
        vectors = [one["vectors"] for one in (queries, *documents)]
        loss, metrics = with_gradients("LateInteractionLoss", partial(_loss_and_gradients, plan), *vectors)
        return LossOutput(loss, dict(zip(("accuracy", "masked_share"), metrics.unbind(), strict=True)))

    def extra_repr(self) -> str:
        return f"temperature={self.temperature}, normalize={self.normalize}"


class _MaxSimSetup(NamedTuple):
    keys: list[list[tuple[Tensor, Tensor]]]  # per column of documents: (key of each of N rows, key of each document)
    row_offset: int
    inverse_temperature: float
    normalize: bool
    tile: tuple[int, int]  # queries, documents
    masks: list[Tensor]  # of the queries, then of every column of documents


def _loss_and_gradients(
    plan: _MaxSimSetup, *vectors: Tensor, needs: list[bool]
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Loss, metrics (2,), and the gradients of the queries and of every column of documents."""
    dtype, needs_gradients = torch.promote_types(vectors[0].dtype, torch.float32), any(needs)
    queries, *documents = columns = _real_tokens(plan)  # (1)
    raw = [column.taken(of) for column, of in zip(columns, vectors, strict=True)]
    units = [normalized(rows, plan.normalize, dtype) for rows in raw]
    (of_queries, _), *of_documents = units
    buffers = [torch.zeros_like(unit) for unit, _ in units] if needs_gradients else []
    num_queries, num_documents = len(queries.lengths), sum(len(column.lengths) for column in documents)
    loss, metrics = of_queries.new_zeros(()), of_queries.new_zeros(2)
    for start in range(0, num_queries, plan.tile[0]):
        stop = min(start + plan.tile[0], num_queries)
        tokens = queries.places(start, stop)
        of_tile, owners = of_queries[tokens], queries.owners(start, stop).to(dtype)  # (t, D), (b, t)
        scores, places = [], []
        for column, (unit, _) in zip(documents, of_documents, strict=True):
            parts = [best_matches(of_tile, unit[tile.places], tile.mask) for tile in column.tiles]  # (2)
            best = torch.cat([of_part for of_part, _ in parts], dim=1) if parts else unit.new_zeros(len(of_tile), 0)
            scores.append((owners @ best).index_select(1, column.back) * plan.inverse_temperature)  # (b, N)
            places.append([place for _, place in parts])
        weights = softmax_of_tile(scores, plan.keys, plan.row_offset + start, loss, metrics)  # (3)
        if not needs_gradients:
            continue
        for column, (unit, _), weight, buffer, of_column in zip(
            documents, of_documents, weights, buffers[1:], places, strict=True
        ):  # (4)
            of_pairs = weight.index_select(1, column.order) * (plan.inverse_temperature / num_queries)
            of_tokens = owners.T @ of_pairs  # (t, N)
            for tile, place in zip(column.tiles, of_column, strict=True):
                matched = _at_matches(of_tokens[:, tile.rows], place, tile.mask.shape[1])  # (t, n * T)
                buffers[0][tokens].addmm_(matched, unit[tile.places])
                buffer[tile.places].addmm_(matched.T, of_tile)
    if num_queries:
        loss /= num_queries
        metrics /= num_queries
    metrics[1] /= max(num_documents - 1, 1)
    gradients: list[Tensor | None] = [None] * len(vectors)
    for index, buffer in enumerate(buffers):
        of_raw = gradient_of_raw([units[index]], [buffer], raw[index])
        gradients[index] = columns[index].padded(of_raw, vectors[index].shape[1])
    return loss, metrics, gradients


def _real_tokens(plan: _MaxSimSetup) -> list[RealTokens]:
    numbers = torch.cat([mask.sum(dim=1) for mask in plan.masks]).tolist()
    lengths = np.split(np.array(numbers, dtype=np.int64), np.cumsum([len(mask) for mask in plan.masks])[:-1])
    per_tile = [None] + [plan.tile[1]] * (len(plan.masks) - 1)
    return [RealTokens(*of_column) for of_column in zip(plan.masks, lengths, per_tile, strict=True)]


def _at_matches(weights: Tensor, place: Tensor, width: int) -> Tensor:
    """Weights (t, n) -> (t, n * T), zeros but where a token has its best match."""
    matched = weights.new_zeros(*place.shape, width)
    return matched.scatter_(2, place[..., None], weights[..., None]).flatten(1)


def _checked(own: Mapping[str, Vectors], everyone: Mapping[str, Vectors]) -> list[str]:
    names = list(own)
    if len(names) < 2 or set(everyone) != set(names):
        raise UsageError(
            f"late interaction needs a query and a positive column, the same in own and everyone; got {names} and "
            f"{list(everyone)}."
        )
    for name in names:
        for one in (own[name],) if name == names[0] else (own[name], everyone[name]):
            shapes = {key: tuple(one[key].shape) for key in ("vectors", "mask") if key in one}
            if len(shapes) < 2 or len(shapes["vectors"]) != 3 or shapes["mask"] != shapes["vectors"][:2]:
                raise UsageError(
                    f'column "{name}" needs "vectors" (rows, tokens, dimensions) and "mask" (rows, tokens); it has '
                    f"{shapes}."
                )
    return names

"""Late interaction (ColBERT, ColPali) in tiles, gradient included: rows are many vectors, scores sums of best matches.

With token vectors q_t of a query and d_u of a document (https://huggingface.co/papers/2004.12832, section 3.3)

    score(q, d) = sum over real t of  max over real u of  <q_t, d_u>
    loss = InfoNCE over scores / temperature: a query against everyone's positives and hard negatives

(1) real tokens alone, end to end, of length 1 where asked; documents in order of length, the longest first
(2) for a tile of queries and one of documents, whose padding is that of its own longest: all token products, their
    maxima and where these are, the scores
(3) the softmax of the queries' scores against all documents, the loss, and its backward (manual_gradient.py): for each
    tile of documents a matrix that has a pair's weight where a query's token has its best match, and zeros elsewhere,
    once times the documents and once times the queries

A tile of token products is all that has tokens of both sides; scores and places of maxima of a tile of queries against
all documents are kept from (2) to (3). So memory is linear in documents. The rows' numbers of tokens are read from the
device, once.

Letters: N documents of a column, T tokens of a row, D dimensions, b the queries of a tile, t their real tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from hf_dist_ext import policy
from hf_dist_ext.engine.false_negatives import keys_of
from hf_dist_ext.engine.losses import LossOutput, unit_vectors
from hf_dist_ext.engine.manual_gradient import sum_of_tiles
from hf_dist_ext.engine.real_tokens import RealTokens, best_matches
from hf_dist_ext.engine.tiled_infonce import lead_of_positives
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
        rows = [own[anchor], *(everyone[name] for name in (positive, *negatives))]
        dtype = torch.promote_types(rows[0]["vectors"].dtype, torch.float32)
        heights = {name: len(everyone[name]["mask"]) for name in (positive, *negatives)}
        keys = keys_of(names, heights, ids, dtype) if ids and self.mask_false_negatives else []
        lengths, columns = _real_tokens([one["mask"].bool() for one in rows], self.documents_per_tile)  # (1)
        units = [
            unit_vectors(column.taken(one["vectors"]), self.normalize, dtype)
            for column, one in zip(columns, rows, strict=True)
        ]
        size, documents = self.queries_per_tile, columns[1:]
        tokens_of_tiles = [int(columns[0].lengths[low : low + size].sum()) for low in range(0, len(lengths), size)]
        of_documents = [
            unit.split([tile.mask.numel() for tile in column.tiles])
            for unit, column in zip(units[1:], documents, strict=True)
        ]
        metrics = units[0].new_zeros(2)

        def tiles(queries: Sequence[Tensor], columns: Sequence[Sequence[Tensor]]) -> Iterator[Tensor]:
            for number, tokens in enumerate(queries):
                low = number * size
                scores = [
                    _scores(tokens, lengths[low : low + size], *found) / self.temperature  # (2)
                    for found in zip(documents, columns, strict=True)
                ]
                yield -logsigmoid(lead_of_positives(scores, keys, row_offset + low, metrics)).sum()  # (3)

        loss = sum_of_tiles("LateInteractionLoss", tiles, units[0].split(tokens_of_tiles), of_documents)
        metrics[1] /= max(sum(heights.values()) - 1, 1)
        metrics /= max(len(lengths), 1)
        values = dict(zip(("accuracy", "masked_share"), metrics.unbind(), strict=True))
        return LossOutput(loss / max(len(lengths), 1), values)

    def extra_repr(self) -> str:
        return f"temperature={self.temperature}, normalize={self.normalize}"


def _real_tokens(masks: list[Tensor], per_tile: int) -> tuple[Tensor, list[RealTokens]]:
    """Every query's number of real tokens; the real tokens of the queries and of each column of documents."""
    lengths = [mask.sum(dim=1) for mask in masks]
    numbers = np.array(torch.cat(lengths).tolist(), dtype=np.int64)
    of_columns = np.split(numbers, np.cumsum([len(mask) for mask in masks])[:-1])
    tiles = [None] + [per_tile] * (len(masks) - 1)
    return lengths[0], [RealTokens(*column) for column in zip(masks, of_columns, tiles, strict=True)]


def _scores(tokens: Tensor, lengths: Tensor, column: RealTokens, of_tiles: Sequence[Tensor]) -> Tensor:
    """(b, N), with their graph, of queries that have so many of the tokens (t, D) each."""
    best = [best_matches(tokens, one, tile.mask) for one, tile in zip(of_tiles, column.tiles, strict=True)]
    of_tokens = torch.cat([tokens.new_zeros(len(tokens), 0), *best], dim=1)  # (t, N)
    scores = torch.segment_reduce(of_tokens, "sum", lengths=lengths, axis=0, unsafe=True)  # else it asks the device
    return scores.index_select(1, column.back)


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

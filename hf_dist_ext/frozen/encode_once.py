"""The gradient cache over frozen parts: nothing frozen is encoded twice.

(1) a column whose part of the model is frozen trains nothing: its rows are encoded once and leave pass 3
    (Embedder.frozen_columns)
(2) a frozen backbone under a trainable projection is encoded once; its pooled vectors (R, H) become the features of a
    batch of their own, so that the cached step's chunks, graphs and replays are the projection's alone

Letters: R rows of a column, H the backbone's width.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from hf_dist_ext.engine.chunks import ChunkedBatch
from hf_dist_ext.engine.layout import lay_out
from hf_dist_ext.engine.tables import ChunkLimits
from hf_dist_ext.models.embedder import embedder_of


def has_frozen_backbone(model: nn.Module) -> bool:
    """Whether pooled vectors are constants of the run: the model goes on from them. Token vectors would take the
    memory that the cache saves."""
    return embedder_of(model).num_frozen is not None


def batch_of_pooled(pooled: Mapping[str, torch.Tensor]) -> ChunkedBatch:
    """Column -> (R, H), as one chunk: a projection holds no more per row than the embeddings themselves."""
    return lay_out({name: {"pooled": rows} for name, rows in pooled.items()}, ChunkLimits(), sort=False)

"""Numbers that a run uses and the planner must foretell, each once. Imports nothing, so both sides may read it."""

from __future__ import annotations

MOST_WIDENING = 8
KEPT_WHOLE_SHARE = 0.25  # of a device's memory, that weights or gradients may take whole where they could be sharded
LOSS_TILE_BYTES = 512 * 2**20  # of all buffers of a tile of scores together
LOSS_TILE_BUFFERS = 4  # logits, mask of known false negatives, two while false negatives are looked for
LOSS_TILE_ROWS = 1024  # enough rows to keep a device busy; more only take memory
EMBEDDING_COPIES = 4  # of a column's embeddings while the loss is computed: passed, leaf, gradient, normalised
SENT_SHARE = 0.01  # of a gradient's elements, by DDP's hooks top_k and random_k


def widening(num_layers: int | None, is_checkpointed: bool) -> int:
    """How many times larger the chunks without a graph may be: they hold two layers' activations, those with a graph
    all layers'. With activation checkpointing a chunk with a graph holds one layer's and little of the others."""
    return 1 if is_checkpointed else min(MOST_WIDENING, max(1, (num_layers or 1) // 2))


def loss_tile_rows(candidates: int, most: int = LOSS_TILE_ROWS, item: int = 4) -> int:
    """Rows that InfoNCE scores at once against all candidates: `most`, or as many as fit the bytes of a tile."""
    return max(1, min(most, LOSS_TILE_BYTES // (LOSS_TILE_BUFFERS * item * max(candidates, 1))))


def loss_stage_bytes(
    own_rows: int, all_rows: int, anchors: int, candidates: int, dimensions: int, tile_halvings: int = 0
) -> int:
    """What the loss holds beside the model: copies of the embeddings (of all columns: own rows, all processes' rows),
    and a tile of scores of this process's anchors against all candidates."""
    tile_rows = min(anchors, max(1, loss_tile_rows(candidates) >> tile_halvings))
    tile = LOSS_TILE_BUFFERS * 4 * tile_rows * candidates
    return int(EMBEDDING_COPIES * (own_rows + all_rows) * dimensions * 4 + tile)

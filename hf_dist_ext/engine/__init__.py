"""The gradient cache, in torch alone: a reader who knows torch understands it in one sitting.

Begin with `gradient_cache.py`, the three passes. `layout.py` lays a batch of columns into tables of sorted rows
(`tables.py`), `chunks.py` cuts these into chunks within `ChunkLimits` and puts their embeddings back into the batch's
order; `columns.py`, `rows.py` and `images.py` say which axis of a feature is the row, the token or the picture, and
`families.py` says what a model makes of one. `flat.py` reads rows that travel end to end. `losses.py` and
`tiled_infonce.py` hold the loss and its gradient, `sigmoid_loss.py` and `late_interaction.py` (over `real_tokens.py`)
other losses; `false_negatives.py` says which pairs they leave out. `manual_gradient.py` hands gradients that others
have computed to autograd, and frees those losses' graphs tile by tile. `combined_losses.py` adds several losses up.
`outputs.py` handles several tensors per row where a vector is not all. `packing.py` lays rows end to end without
padding. `replay.py` notes random states for the second forward of a chunk, compares what both give, and says what a
run is told where that differs. `budget.py` finds how large a chunk may be, from what an accelerator allocates.
"""

from typing import TYPE_CHECKING

from hf_dist_ext.lazy import handed_on

if TYPE_CHECKING:  # what an editor completes and a type checker reads
    from hf_dist_ext.engine.combined_losses import LossPerSource as LossPerSource
    from hf_dist_ext.engine.combined_losses import SumOfLosses as SumOfLosses
    from hf_dist_ext.engine.gradient_cache import cached_step as cached_step
    from hf_dist_ext.engine.late_interaction import LateInteractionLoss as LateInteractionLoss
    from hf_dist_ext.engine.layout import lay_out as lay_out
    from hf_dist_ext.engine.losses import InfoNCELoss as InfoNCELoss
    from hf_dist_ext.engine.sigmoid_loss import SigmoidLoss as SigmoidLoss
    from hf_dist_ext.engine.tables import ChunkLimits as ChunkLimits

_HOMES = {
    "ChunkLimits": "tables",
    "InfoNCELoss": "losses",
    "LateInteractionLoss": "late_interaction",
    "LossPerSource": "combined_losses",
    "SigmoidLoss": "sigmoid_loss",
    "SumOfLosses": "combined_losses",
    "cached_step": "gradient_cache",
    "lay_out": "layout",
}
__all__ = list(_HOMES)
__getattr__ = handed_on(__name__, _HOMES)

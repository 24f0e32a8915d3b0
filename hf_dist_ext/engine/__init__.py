"""The gradient cache, in torch alone: a reader who knows torch understands it in one sitting.

Begin with `gradient_cache.py`, the three passes. `layout.py` lays a batch of columns into tables of sorted rows,
`chunks.py` cuts these into chunks and puts their embeddings back into the batch's order; `columns.py`, `rows.py` and
`images.py` say which axis of a feature is the row, the token or the picture, and `families.py` what a model makes of a
picture. `losses.py` and `tiled_infonce.py` hold the loss and its gradient, `sigmoid_loss.py`, `late_interaction.py`
and `sparse_loss.py` other losses; `by_hand.py` hands their gradients to autograd and `combined_losses.py` adds several
up. `outputs.py` handles several tensors per row where a vector is not all. `budget.py` finds how large a chunk may be,
from what `peak.py` measures.
"""

from hf_dist_ext.lazy import handed_on

_HOMES = {
    "ChunkLimits": "chunks",
    "InfoNCELoss": "losses",
    "LateInteractionLoss": "late_interaction",
    "LossPerSource": "combined_losses",
    "SigmoidLoss": "sigmoid_loss",
    "SparseLoss": "sparse_loss",
    "SumOfLosses": "combined_losses",
    "cached_step": "gradient_cache",
    "lay_out": "layout",
}
__all__ = list(_HOMES)
__getattr__ = handed_on(__name__, _HOMES)

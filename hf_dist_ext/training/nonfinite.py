"""Steps whose loss or gradient is not a finite number: left out, counted, and after too many in a row the end.

An update is bad when some rank's loss, or the gradient norm, which is of all ranks, is not finite. A bad update is
skipped on every rank: its gradients are dropped, so that no optimizer moves a weight, decays one or touches its state;
the learning-rate schedule goes on, as it counts steps. Too many bad updates in a row stop the run with the step, the
ranks and their rows. Weights that are not finite are never saved. Finite ones may be ruined too: one update can make
them 1e30. So no checkpoint is written while updates are skipped, and the error names the newest one that is proved
(checkpoints/manifest.py).

fp16: a gradient that overflows while every loss is finite is how the scaler finds its scale. The scaler skips those
updates itself, so they are not reported, but they count as bad ones in a row: 20 of them halve the first scale, 65536,
to less than 0.1.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from itertools import islice

import torch

from hf_dist_ext.engine import flat
from hf_dist_ext.errors import RunError
from hf_dist_ext.strategies import collectives
from hf_dist_ext.strategies.tensors import held_here

logger = logging.getLogger(__name__)

LIMIT = 20  # "auto"
SHOWN_ROWS = 8
SHOWN_CHARACTERS = 60


class NonFiniteGuard:
    """Counts bad updates. `limit` in a row raise RunError."""

    def __init__(self, limit: int):
        self.limit = limit
        self.total = self.in_a_row = 0

    def count_update(self, losses: Sequence[float], norm: float, has_scaler: bool) -> bool:
        """Whether it is bad: every rank's loss and the gradient norm. Ranks are given the same and answer the same."""
        if all(map(math.isfinite, [*losses, norm])):
            self.in_a_row = 0
            return False
        self.in_a_row += 1
        self.total += bool(bad_ranks(losses)) or not has_scaler
        return True

    @property
    def is_over(self) -> bool:
        return self.in_a_row >= self.limit

    def report(
        self, step: int, losses: Sequence[float], norm: float, rows: str, has_scaler: bool = False, good: str = ""
    ) -> None:
        """Say what was skipped; raise when it was once too often. `rows` are those of the ranks of `bad_ranks`,
        `good` says which checkpoint is."""
        ranks, what = bad_ranks(losses), f"step {step}: the gradient norm is {norm}"
        if ranks:
            what = f"step {step}: the loss of rank {', '.join(map(str, ranks))} is {losses[ranks[0]]}"
        if self.is_over:
            raise RunError(
                f"{what}; {self.in_a_row} steps in a row were not finite (max_nonfinite_steps={self.limit}). "
                f"Their updates were skipped, and no checkpoint was written meanwhile. {good} Rows of this step: "
                f"{rows}. Look at these rows, lower learning_rate, or use bf16 in place of fp16."
            )
        if ranks or not has_scaler:
            logger.warning(f"{what}; update skipped on all ranks ({self.in_a_row} in a row). Rows: {rows}")


def bad_ranks(losses: Sequence[float]) -> list[int]:
    return [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]


def check_weights(named: Iterable[tuple[str, torch.nn.Parameter]], what: str) -> None:
    """Raises RunError, on every rank, when a trained weight is not finite on any. Called before `what` is saved.

    One pass over the weights where they are, one number to the host.
    """
    held = {name: held_here(p).detach() for name, p in named if p.requires_grad}
    trained = {name: weight for name, weight in held.items() if weight.numel()}
    groups: dict[tuple, list[torch.Tensor]] = {}
    for weight in trained.values():
        groups.setdefault((weight.device, weight.dtype), []).append(weight)
    # The largest magnitude of a tensor is finite exactly when all of it is; a sum of squares may overflow.
    largest = [torch.stack(torch._foreach_norm(group, math.inf)) for group in groups.values()]
    is_bad = not all(values.isfinite().all().item() for values in largest)
    ranks = [row[0] for row in collectives.exchange([int(is_bad)])]
    if not any(ranks):
        return
    names = [name for name, weight in trained.items() if not weight.isfinite().all()]
    named_here = f" ({names[0]!r}" + (f" and {len(names) - 1} more)" if names[1:] else ")") if names else ""
    raise RunError(
        f"{what} was not written: trained weights{named_here} are not finite on rank "
        f"{', '.join(str(rank) for rank, bad in enumerate(ranks) if bad)}. Earlier checkpoints are untouched: resume "
        "from the newest with a lower learning_rate."
    )


def describe_rows(inputs: object, tokenizer: object = None) -> str:
    """The rows of a batch in words: dataset indices where the batch carries them, else how their text begins."""
    ids = inputs.get("ids") if hasattr(inputs, "get") else None
    if ids is not None and "row" in ids:
        return f"dataset indices {_some(map(str, ids['row'].tolist()), len(ids['row']))}"
    columns = [part for part in inputs.values() if hasattr(part, "keys")] if hasattr(inputs, "values") else []
    features = next((part for part in (inputs, *columns) if "input_ids" in part), None)
    if features is None or not hasattr(tokenizer, "batch_decode"):
        return "not known"
    texts = tokenizer.batch_decode(flat.first_rows(features, SHOWN_ROWS), skip_special_tokens=True)
    return _some((repr(text[:SHOWN_CHARACTERS]) for text in texts), flat.num_rows(features))


def _some(words: Iterable[str], count: int) -> str:
    shown = list(islice(words, SHOWN_ROWS))
    return ", ".join(shown) + (f" and {count - len(shown)} more" if count > len(shown) else "")

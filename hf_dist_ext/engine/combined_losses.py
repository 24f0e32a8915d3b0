"""Several losses in a run: added up over the same rows, or one for each source of batches.

    SumOfLosses({"infonce": InfoNCELoss(), "cosent": other}, {"infonce": 1.0, "cosent": 0.3})
    LossPerSource({"nli": InfoNCELoss()}, InfoNCELoss(temperature=0.02))      # batches of "nli", and all others

Parameters of all of them train. How rows are compared in an evaluation is as the first loss says.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any

from torch import Tensor, nn

from hf_dist_ext.engine.losses import LossOutput, as_output
from hf_dist_ext.engine.outputs import Output, tensors_of
from hf_dist_ext.errors import UsageError

# What whoever runs a loss asks of it -> how the answers of several are one, and the answer of one that does not say.
_ASKED: dict[str, tuple[Callable[[list[Any]], Any], Any]] = {
    "normalize": (itemgetter(0), False),
    "similarity": (itemgetter(0), None),
    "reads_lengths": (any, False),
    "compares_all_pairs": (any, False),
    "takes_negatives_as_columns": (any, False),
    "symmetric": (any, False),
    "in_batch_negatives": (any, True),
    "cross_device_negatives": (any, True),
    "num_columns": (lambda numbers: None if None in numbers else max(numbers), None),  # None: all there are
}


class _Losses(nn.Module):
    """Of several losses. What one of them is asked (`_ASKED`), all are."""

    def __init__(self, losses: Mapping[str, nn.Module]) -> None:
        super().__init__()
        # A prefix, since a module can not be called as a method is.
        self.losses = nn.ModuleDict({f"of_{name}": loss for name, loss in losses.items()})

    @property
    def _all(self) -> list[Any]:
        return list(self.losses.values())

    def __getattr__(self, name: str) -> Any:
        if name not in _ASKED:
            return super().__getattr__(name)
        fold, default = _ASKED[name]
        return fold([getattr(loss, name, default) for loss in self._all])


class SumOfLosses(_Losses):
    """The sum of losses over the same rows, each times its weight.

    losses: name -> a loss as `InfoNCELoss`. weights: name -> factor; a loss that is not named has 1.
    """

    def __init__(self, losses: Mapping[str, nn.Module], weights: Mapping[str, float] | None = None) -> None:
        super().__init__(losses)
        if alien := [name for name in weights or () if name not in losses]:
            raise UsageError(f'weights has "{alien[0]}", which is none of the losses: {", ".join(losses)}.')
        self.refuse_two_guides()
        self.weights = {name: (weights or {}).get(name, 1.0) for name in losses}

    def refuse_two_guides(self) -> None:
        guided = [name.removeprefix("of_") for name, loss in self.losses.items() if hasattr(loss, "targets_of")]
        if len(guided) > 1:
            raise UsageError(
                f"{guided[0]} and {guided[1]} both have a guide that embeds the rows, and a row has the embedding of "
                "one guide. Keep one of them."
            )

    @property
    def rates_pairs(self) -> bool:
        return bool(getattr(self._all[0], "rates_pairs", False))

    def targets_of(
        self, batch: Mapping[str, Mapping[str, Tensor]], constants: Mapping[str, Mapping[str, Any]] | None = None
    ) -> dict[str, Tensor]:
        """What the losses want to know of the features themselves, and of what the model is told of each column."""
        found: dict[str, Tensor] = {}
        for loss in self._all:
            if hasattr(loss, "targets_of"):
                found |= loss.targets_of(batch, constants)
        return found

    def forward(
        self,
        own: Mapping[str, Tensor],
        everyone: Mapping[str, Tensor] | None = None,
        row_offset: int = 0,
        ids: Mapping[str, Tensor] | None = None,
        targets: Mapping[str, Tensor] | None = None,
    ) -> LossOutput:
        """Arguments as of `InfoNCELoss`; `targets` go to the losses that read them. As metrics each loss without its
        weight, `infonce_loss`, and its own with its name in front, `infonce_accuracy`."""
        total: Any = 0.0
        metrics: dict[str, Tensor] = {}
        for name, weight in self.weights.items():
            loss = self.losses[f"of_{name}"]
            given: tuple[Any, ...] = everyone, row_offset, ids, targets
            if everyone is not None and not getattr(loss, "cross_device_negatives", True):
                given = None, 0, *(_own_part(values, own, everyone, row_offset) for values in (ids, targets))
            all_rows, offset, part_ids, part_targets = given
            more = {"targets": part_targets} if targets and _reads_targets(loss) else {}
            value, own_metrics = as_output(loss(own, all_rows, row_offset=offset, ids=part_ids, **more))
            total = total + weight * value
            metrics[f"{name}_loss"] = value.detach()
            metrics |= {f"{name}_{metric}": one for metric, one in own_metrics.items()}
        return LossOutput(total, metrics)

    def extra_repr(self) -> str:
        return f"weights={self.weights}"


class LossPerSource(_Losses):
    """Batches of a source have its loss. A batch is of one source on every process.

    losses: source -> a loss. default: of all other sources.
    """

    def __init__(self, losses: Mapping[str, nn.Module], default: nn.Module | None = None) -> None:
        super().__init__(losses if default is None else {**losses, "": default})
        self.has_default = default is not None

    def of(self, source: str | None) -> nn.Module:
        """Raises UsageError for a source without a loss."""
        key = f"of_{source}"
        if key not in self.losses and not self.has_default:
            names = ", ".join(name.removeprefix("of_") for name in self.losses)
            whose = "rows that name no dataset" if source is None else f'rows of "{source}"'
            raise UsageError(
                f"a loss by dataset ({names}) has none for {whose}. Give these rows by such a name, as in "
                "evaluate({NAME: dataset}), or evaluate(NAME) those that the trainer has."
            )
        return self.losses["of_" if key not in self.losses else key]

    def forward(self, *arguments: Any, **options: Any) -> LossOutput:
        raise TypeError("a LossPerSource is of no one source: call of(source)")


def loss_of(loss: Any, source: str | None) -> Any:
    """The loss of a source's batches."""
    return loss.of(source) if isinstance(loss, LossPerSource) else loss


def num_columns_of(loss: Any) -> dict[str, int | None]:
    """Source -> how many columns of its batches its loss reads, None: all; "" stands for all other sources."""
    of_sources = loss.losses if isinstance(loss, LossPerSource) else {"of_": loss}
    return {key.removeprefix("of_"): getattr(one, "num_columns", None) for key, one in of_sources.items()}


def _own_part(
    values: Mapping[str, Tensor] | None, own: Mapping[str, Output], everyone: Any, row_offset: int
) -> dict[str, Tensor] | None:
    """Of what is said of all rows that of own ones. Keys that are no column say one thing per anchor."""
    if values is None:
        return None
    anchor, starts, found = next(iter(own)), getattr(everyone, "starts", None), {}
    num_rows = {name: len(tensors_of(output)[0]) for name, output in own.items()}
    for name, of_all in values.items():
        column = name if name in own else anchor
        if starts is None:  # every anchor has as many
            start = row_offset * num_rows[column] // num_rows[anchor]
        else:
            start = starts[column]
        found[name] = of_all[min(start, len(of_all) - num_rows[column]) :][: num_rows[column]]
    return found


def _reads_targets(loss: nn.Module) -> bool:
    return "targets" in inspect.signature(loss.forward).parameters

"""`losses` of a run file: several losses that are added up, each with a weight and loss fields over those of the file.

"losses": [{"loss": "infonce", "temperature": 0.02}, {"loss": "CoSENTLoss", "weight": 0.3, "loss_options": {...}}]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_dist_ext.errors import UsageError
from hf_dist_ext.run.config import RunConfig, fields_of_run_file
from hf_dist_ext.run.fields import Field, check_entry, show
from hf_dist_ext.run.losses import (
    INFONCE_FIELDS,
    LATE,
    OWN,
    check_loss,
    cuts_dimensions,
    label_column,
    reads_label,
    reads_pairs,
)

# What one of several losses, or a dataset, sets for itself; what all processes see is of the whole run.
OF_A_LOSS = ("loss", "loss_options", *(name for name in INFONCE_FIELDS if not name.startswith("cross_device_")))
OF_THE_RUN = ", or it holds for the whole run"
WEIGHT = {"weight": Field("weight", (("float", None),), bounds={"exclusiveMinimum": 0})}


@dataclass(frozen=True)
class Part:
    """`name`: of its figures in the log. `config`: of a run with this loss alone."""

    name: str
    weight: float
    config: RunConfig


def parts_of(config: RunConfig) -> list[Part]:
    """The losses of a run that was checked; one without `losses`."""
    if config.losses is None:
        return [Part(config.loss or "", 1.0, config)]
    parts: list[Part] = []
    for fields in config.losses:
        name, number = fields["loss"], 1 + sum(part.config.loss == fields["loss"] for part in parts)
        parts.append(
            Part(name if number == 1 else f"{name}_{number}", fields.get("weight", 1.0), with_loss(config, fields))
        )
    return parts


def with_loss(config: RunConfig, fields: Mapping[str, Any]) -> RunConfig:
    """The config with the loss that an entry of `losses` or `datasets` says."""
    own = {name: fields[name] for name in OF_A_LOSS if name in fields}
    if "loss" in own:
        own = {"losses": None, "loss_options": None} | own
    return dataclasses.replace(config, **own)


def label_column_of(config: RunConfig, available: Iterable[str]) -> str | None:
    """The column of labels among a dataset's, None where no loss reads one. Raises UsageError as `label_column`."""
    available = list(available)
    return next(filter(None, (label_column(part.config, available) for part in parts_of(config))), None)


def takes_negatives_as_columns(config: RunConfig) -> bool:
    """Whether a loss takes the first, second, ... negatives of all rows as a column each, or a row's own alone."""
    parts = [part.config for part in parts_of(config)]
    if any(p.loss == "infonce" and not p.in_batch_negatives for p in parts):
        return True
    return any(p.loss not in (None, "", *OWN) and not reads_pairs(p.loss, p.loss_options) for p in parts)


def check_parts(config: RunConfig, given: Mapping[str, Any]) -> None:
    """UsageError for the first thing that is wrong with the loss, or with `losses`. `given`: the run's fields, or
    those of one dataset."""
    if config.losses is None:
        check_loss(config, given, INFONCE_FIELDS)
        _check_columns(config)
        return
    if not config.losses:
        raise UsageError("losses=[] is empty. Give at least one, or loss.")
    for name in ("loss", "loss_options"):
        if given.get(name) is not None:
            raise UsageError(f"{name}={show(given[name])} beside losses: set it in the entries of losses.")
    if given.get("cross_device_negatives") is False:
        raise UsageError("cross_device_negatives=false with losses: all of them see the rows of all processes.")
    for index, fields in enumerate(config.losses):
        where = f"losses[{index}]"
        check_entry(fields, where, {name: fields_of_run_file()[name] for name in OF_A_LOSS} | WEIGHT, OF_THE_RUN)
        if not isinstance(fields.get("loss"), str) or fields["loss"] == "none":
            raise UsageError(f'{where} has no loss. Give its name, such as "infonce".')
    parts = parts_of(config)
    for part, fields in zip(parts, config.losses, strict=True):
        check_loss(dataclasses.replace(part.config, label_column=None), fields, INFONCE_FIELDS)
        cuts_dimensions(part.config)
    if config.label_column and not any(reads_label(part.config.loss, part.config.loss_options) for part in parts):
        raise UsageError(f"label_column={show(config.label_column)}: none of losses reads a label. Remove it.")
    check_rows_are_alike([part.config for part in parts], "losses")
    _check_columns(config)
    useless = [name for name in INFONCE_FIELDS if given.get(name) is not None]
    if useless and all(part.config.loss != "infonce" for part in parts):
        raise UsageError(f"{useless[0]}={show(given[useless[0]])} is an option of infonce, and losses has none.")


def _check_columns(config: RunConfig) -> None:
    """A third one that is named is read by a loss."""
    _, _, *more = *(config.columns or {}), None, None
    parts = [part.config for part in parts_of(config)]
    if more[:-2] and all(reads_pairs(part.loss, part.loss_options) for part in parts):
        raise UsageError(
            f'columns has "{more[0]}", and {parts[0].loss} reads a query and its positive only. Remove it.'
        )


def check_rows_are_alike(configs: Sequence[RunConfig], field: str) -> None:
    """A model gives one vector per row, or one per token, to all losses of a run."""
    others = [config.loss for config in configs if config.loss != LATE]
    if 0 < len(others) < len(configs):
        raise UsageError(
            f'{field}: "{LATE}" reads a vector of every token, and "{others[0]}" one of every row; a model gives one '
            "of the two. Train them apart."
        )

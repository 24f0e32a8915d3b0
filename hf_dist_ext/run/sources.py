"""`datasets` of a run file: the sources of its batches. Each sets data fields over those of the file.

"datasets": [{"dataset_name": "nli.jsonl", "weight": 2}, {"name": "code", "dataset_name": "code-search"}]
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hf_dist_ext.errors import UsageError, closest
from hf_dist_ext.run.config import Run, RunConfig, fields_of_run_file
from hf_dist_ext.run.fields import Field, check_entry, check_name, show
from hf_dist_ext.run.losses import INFONCE_FIELDS, cuts_dimensions, names_in
from hf_dist_ext.run.parts import (
    OF_A_LOSS,
    OF_THE_RUN,
    WEIGHT,
    Part,
    check_parts,
    check_rows_are_alike,
    parts_of,
    with_loss,
)

NUM_PAIR_COLUMNS = 2  # the anchor and its positive; every further column holds hard negatives
# The datasets that the package brings; data/ makes them.
CODE_SEARCH, GLYPH_SEARCH, DIGITS = BUILT_IN = ("code-search", "glyph-search", "digits")

OF_A_SOURCE = [
    *"dataset_name dataset_config_name train_split eval_split eval_dataset_name eval_holdout columns prompts".split(),
    *"id_column label_column max_train_samples max_eval_samples".split(),
    *OF_A_LOSS,
]
OF_ENTRY = {"name": Field("name", (("str", None),))} | WEIGHT
# What the file can not set for all of its sources.
OF_ONE = ("dataset_name", "dataset_config_name", "eval_dataset_name")


@dataclass(frozen=True)
class Source:
    """`config`: of a run on this source alone. `weight`: None where sources are drawn by size. `has_own_loss`: it sets
    fields of the loss, so that it is another one than the run's."""

    name: str
    weight: float | None
    config: RunConfig
    has_own_loss: bool = False


def query_column(columns: Container[str]) -> str:
    """A dataset's query where `columns` is not given: the column query, or anchor as sentence-transformers says."""
    return "anchor" if "anchor" in columns and "query" not in columns else "query"


def require_column(column: str, available: list[str], name: str, option: str) -> None:
    """Raises UsageError where the data called `name` lack a column that an option of the run reads."""
    if column not in available:
        columns = f"{', '.join(available)}.{closest(column, available)}"
        raise UsageError(f'{option}: {name} has no column "{column}". Columns: {columns}')


def refuse_no_pair(available: list[str], name: str) -> NoReturn:
    """Where `columns` is not given."""
    raise UsageError(
        f"{name} has the columns {', '.join(available)}, not query and positive. "
        'Map them: columns={"query": "...", "positive": "..."}.'
    )


def columns_of_evaluation(columns: Mapping[str, Any] | None, available: list[str]) -> dict[str, Any] | None:
    """`columns` of the training data, for a dataset to evaluate on: what it does not call as they do, it may call as
    the run does, and it may lack negatives."""
    found = dict(columns or {})
    for index, (name, source) in enumerate(list(found.items())):
        if set(names_in(source)) <= set(available):
            continue
        if name in available:
            found[name] = name
        elif index >= NUM_PAIR_COLUMNS:
            del found[name]
    return found or None


def sources_of(config: RunConfig) -> list[Source]:
    """The sources of a run that was checked."""
    names: list[str] = []
    for fields in config.datasets or ():
        # it stands in the log and in names of metrics
        last = re.sub(r"\W+", "_", Path(fields["dataset_name"].partition("@")[0]).stem)
        names.append(check_name(fields.get("name") or last, "datasets", names))
    return [
        Source(
            name,
            fields.get("weight"),
            dataclasses.replace(
                with_loss(config, fields),
                datasets=None,
                **{key: value for key, value in fields.items() if key in OF_A_SOURCE and key not in OF_A_LOSS},
            ),
            any(name in OF_A_LOSS for name in fields),
        )
        for name, fields in zip(names, config.datasets or (), strict=True)
    ]


def all_parts(config: RunConfig) -> list[Part]:
    """The losses of a run that was checked, of all of its sources."""
    configs = [source.config for source in sources_of(config)] or [config]
    return [part for one in configs for part in parts_of(one)]


def refuse_order(strategy: str) -> None:
    """UsageError for an order that several datasets do not have."""
    if strategy != "random":
        raise UsageError(
            f"train_sampling_strategy={str(strategy)!r} is an order over all rows, and with datasets each batch is of "
            "one source. Remove it."
        )


def check_sources(run: Run) -> None:
    """UsageError for the first thing that is wrong with `datasets`."""
    config, given = run.options, run.given
    if config.datasets is None:
        return
    if not config.datasets:
        raise UsageError("datasets=[] is empty. Give at least one, or dataset_name.")
    both = [name for name in OF_ONE if given.get(name) is not None]
    if both:
        raise UsageError(f"{both[0]}={show(given[both[0]])} beside datasets: of which of them? Set it in datasets.")
    if config.loss is None:
        raise UsageError('datasets needs a loss over embeddings, but loss is null. Set "loss": "infonce".')
    for name in ("image_columns", "frozen_feature_cache"):
        if given.get(name):
            raise UsageError(f"{name}={show(given[name])} does not work with datasets, which hold texts. Remove it.")
    refuse_order(given.get("train_sampling_strategy", "random"))
    for index, fields in enumerate(config.datasets):
        _check_fields(fields, f"datasets[{index}]")
    weights = [fields.get("weight") for fields in config.datasets]
    if None in weights and any(weight is not None for weight in weights):
        raise UsageError(
            f"datasets[{weights.index(None)}] has no weight, and others have one. Give every one a weight, or none."
        )
    if None not in weights and config.datasets_temperature is not None:
        raise UsageError(
            f"datasets_temperature={show(config.datasets_temperature)} draws by size, but datasets have weights. Keep "
            "one of the two."
        )
    if None in weights and config.streaming:
        raise UsageError("datasets with streaming=true: a stream has no size to draw by. Give every one a weight.")
    pairs, sources = [], sources_of(config)
    if given.get("loss") and all("loss" in fields for fields in config.datasets):
        raise UsageError(f"loss={show(given['loss'])}, but every one of datasets has a loss of its own. Remove it.")
    check_rows_are_alike([source.config for source in sources], "datasets")
    for source, fields in zip(sources, config.datasets, strict=True):
        if source.config.loss in (None, "none"):
            raise UsageError(f'datasets: "{source.name}" has no loss. Give its name, such as "infonce".')
        if source.has_own_loss or source.config.losses is None:
            own = {name: value for name, value in fields.items() if name in OF_A_LOSS}
            check_parts(source.config, own)
            cuts_dimensions(source.config)
        if source.config.eval_holdout and (source.config.eval_split or source.config.eval_dataset_name):
            raise UsageError(
                f'datasets: "{source.name}" has eval_holdout, which takes rows from its train split, and eval_split '
                "or eval_dataset_name too. Keep one."
            )
        pairs.append(list(source.config.columns or ("query", "positive"))[:2])
    useless = [name for name in INFONCE_FIELDS if given.get(name) is not None]
    if useless and all(part.config.loss != "infonce" for part in all_parts(config)):
        raise UsageError(
            f"{useless[0]}={show(given[useless[0]])} is an option of infonce, and no dataset has that loss."
        )
    if any(pair != pairs[0] for pair in pairs):
        other = next(pair for pair in pairs if pair != pairs[0])
        raise UsageError(
            f"datasets: one source has the columns {' and '.join(pairs[0])}, another {' and '.join(other)}. Call the "
            "query and its positive alike in the columns of each."
        )


def _check_fields(fields: Any, where: str) -> None:
    check_entry(fields, where, {name: fields_of_run_file()[name] for name in OF_A_SOURCE} | OF_ENTRY, OF_THE_RUN)
    if not fields.get("dataset_name"):
        raise UsageError(f"{where} has no dataset_name. Give a hub id or the path of a data file.")

"""The sources of a run file's `datasets`, loaded: a mixture to train on, evaluation rows and a collator for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from datasets import IterableDataset

from hf_dist_ext.data.columns import column_names
from hf_dist_ext.data.load import load_datasets
from hf_dist_ext.data.mixture import SOURCE, MixedStream, Mixture, Tagged, shares, tagged_stream
from hf_dist_ext.data.row_check import column_kind
from hf_dist_ext.data.sentence_collator import SentenceCollator
from hf_dist_ext.errors import UsageError
from hf_dist_ext.run.config import RunConfig
from hf_dist_ext.run.sources import Source, sources_of


@dataclass
class Loaded:
    """A source; `evaluation` is None where it names none."""

    source: Source
    train: Any
    evaluation: Any
    columns: list[str]


class LoadedSources:
    """All sources of a run.

    `columns` are those of all: query, positive, then every column of negatives. `train` is the mixture. `evaluation`
    maps names to evaluation rows, None where no source has any.
    """

    def __init__(self, config: RunConfig, max_bad_rows: int, seed: int | None):
        self.config = config
        self.loaded = [_load(source, max_bad_rows, seed) for source in sources_of(config)]
        self.columns = list(dict.fromkeys(column for one in self.loaded for column in one.columns))
        sizes = [None if isinstance(one.train, IterableDataset) else len(one.train) for one in self.loaded]
        weights = [one.source.weight for one in self.loaded]
        mixed = MixedStream if config.streaming else Mixture
        self.train = mixed(
            {one.source.name: one.train for one in self.loaded}, shares(weights, sizes, config.datasets_temperature)
        )
        self.evaluation = {one.source.name: _tagged(one) for one in self.loaded if one.evaluation is not None} or None

    def check_metric(self, metric: str | None) -> None:
        """Of `metric_for_best_model`: Trainer would look for it after hours of training."""
        if metric is None or self.evaluation is None:
            return
        if not any(metric.removeprefix("eval_").startswith(f"{name}_") for name in self.evaluation):
            name = next(iter(self.evaluation))
            raise UsageError(
                f'metric_for_best_model="{metric}" is a figure of all, and with datasets each is evaluated alone. '
                f'Put the name of one in front: "{name}_{metric.removeprefix("eval_")}".'
            )

    def metrics(self, of_one: Callable[[str], Sequence[str]]) -> tuple[str, ...]:
        """The names of an evaluation's figures, by source. `of_one`: those of a source."""
        return tuple(f"{name}_{metric}" for name in self.evaluation or () for metric in of_one(name))

    def collator(self, make: Callable[..., Any], prompts: Mapping[str, str], lengths: Any) -> SentenceCollator:
        """`prompts` and `lengths` are those of the whole run, or of the model; a source's own prompts win. `make`: of
        columns, prompts, lengths, and of a source its fields and rows."""
        collators = {}
        for one in self.loaded:
            own = one.source.config.prompts
            if own is None or own is self.config.prompts:
                own = _of_columns("prompts", prompts, one.columns, self.columns)
            own_lengths = _of_columns("max_length", lengths, one.columns, self.columns)
            collators[one.source.name] = make(one.columns, own, own_lengths, one.source.config, one.train)
        return make(self.columns, prompts, lengths).with_sources(collators)

    def prompts_to_keep(self) -> dict[str, str]:
        """The sources' own prompts under names of their own, for the model's folder: "nli_query"."""
        own = {one.source.name: one.source.config.prompts for one in self.loaded}
        return {
            f"{name}_{column}": text
            for name, prompts in own.items()
            if prompts is not self.config.prompts
            for column, text in (prompts or {}).items()
        }


def _load(source: Source, max_bad_rows: int, seed: int | None) -> Loaded:
    train, evaluation = load_datasets(source.config, max_bad_rows=max_bad_rows, seed=seed)
    columns = column_names(source.config, train)
    if SOURCE in (*columns, source.config.id_column):
        raise UsageError(
            f'datasets: "{source.name}" has a column called "{SOURCE}", which is the name of the row\'s dataset here. '
            "Map it to another name in columns."
        )
    for column in columns:
        if column_kind((train.features or {}).get(column)) in ("image", "both"):
            raise UsageError(f'datasets: column "{column}" of "{source.name}" holds pictures; sources are texts.')
    return Loaded(source, train, evaluation, columns)


def _tagged(one: Loaded) -> Any:
    tag = tagged_stream if isinstance(one.evaluation, IterableDataset) else Tagged
    return tag(one.source.name, one.evaluation)


def _of_columns(option: str, value: Any, columns: list[str], known: list[str]) -> Any:
    """What of a value for each column a source with fewer columns takes."""
    if not isinstance(value, Mapping):
        return value
    if alien := [column for column in value if column not in known]:
        raise UsageError(f'{option} has "{alien[0]}", which is no column of this run: {", ".join(known)}.')
    return {column: value[column] for column in value if column in columns}

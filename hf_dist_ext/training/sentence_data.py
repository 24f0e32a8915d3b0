"""What SentenceTransformerTrainer takes, made into what DistTrainer takes: arguments, datasets and their collator."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from transformers.utils import logging

from hf_dist_ext.data.collator import NUM_PAIR_COLUMNS
from hf_dist_ext.data.fingerprint import seed_of_order
from hf_dist_ext.data.mixture import SOURCE, Mixture, Tagged, shares, tagged_stream
from hf_dist_ext.data.order import PROPORTIONAL
from hf_dist_ext.data.sentence_collator import (
    LABELS,
    SentenceCollator,
    label_column,
    of_source,
    pads_to_all_positions,
)
from hf_dist_ext.errors import UsageError
from hf_dist_ext.training.arguments import DistTrainingArguments

logger = logging.get_logger(__name__)

# Their constructor sets these, whatever was given: their trainer computes nothing but the loss of an evaluation, and
# calls a model more than once per backward under DDP, which the gradient cache does in its own way.
SET_BY_THEM = ("prediction_loss_only", "ddp_broadcast_buffers")


# ---- arguments ----


def arguments_from(theirs: Any) -> DistTrainingArguments:
    """`DistTrainingArguments` with every value that the arguments of another trainer hold: Trainer's, or
    sentence-transformers' of a SentenceTransformer or MultiVectorEncoder.

    Raises:
        UsageError: a field that DistTrainer does not know has a value of its own.
    """
    is_theirs = hasattr(theirs, "batch_sampler")
    set_by_them = SET_BY_THEM if is_theirs else ()
    known, given = {field.name for field in dataclasses.fields(DistTrainingArguments) if field.init}, {}
    for field in dataclasses.fields(theirs):
        value = getattr(theirs, field.name)
        if not field.init or field.name in set_by_them or _is_default(field, value):
            continue
        if field.name not in known:
            raise UsageError(
                f"{field.name}={value!r} is a field of {type(theirs).__name__} that DistTrainer does not read. Leave "
                "it out, or give DistTrainingArguments."
            )
        given[field.name] = value
    if is_theirs:  # the default is none of ours
        given["batch_sampler"] = theirs.batch_sampler
    for name in ("prompts", "router_mapping", "learning_rate_mapping"):
        given[name] = given.get(name) or None
    if is_theirs and theirs.dataloader_drop_last and theirs.world_size > 1:
        logger.info("dataloader_drop_last=True, which sentence-transformers sets on several processes.")
    return DistTrainingArguments(**given)


def _is_default(field: dataclasses.Field, value: Any) -> bool:
    if field.default_factory is not dataclasses.MISSING:
        return bool(value == field.default_factory())
    return field.default is not dataclasses.MISSING and bool(value == field.default)


# ---- datasets ----


def prepare_sentence_data(
    model: Any, args: Any, train_dataset: Any, eval_dataset: Any
) -> tuple[Any, Any, SentenceCollator]:
    """(training set, evaluation set, collator) of a SentenceTransformer or MultiVectorEncoder.

    A DatasetDict, or a mapping name -> dataset, becomes a `Mixture` to train on, whose batches are of one dataset each
    as `args.multi_dataset_batch_sampler` says, and name -> dataset to evaluate on. One dataset or stream stays as it
    is; so does None.

    Raises:
        UsageError: a Router without router_mapping, prompts or routes of what no dataset has, a list of prompts that
            the model can not take, streams by name to train on, a column that is called as that of datasets' names,
            one that holds numbers and is not the label.
    """
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Router

    if args.train_sampling_strategy not in ("random", "sequential"):
        raise UsageError(
            f"train_sampling_strategy={str(args.train_sampling_strategy)!r} orders rows by a length that rows of "
            "texts do not have. Remove it: a gradient cache sorts the rows of a batch by length before it cuts them "
            "(gradient_cache_sort)."
        )
    if not args.router_mapping and any(isinstance(child, Router) for child in model.children()):
        raise UsageError(
            "router_mapping is missing: the model has a Router, which must know the route of every column. Give "
            'router_mapping={"COLUMN": "query", "OTHER COLUMN": "document"}.'
        )
    pads_to_all_positions(model[0], args.max_length)
    train, evaluation = _by_name("train_dataset", train_dataset), _by_name("eval_dataset", eval_dataset)
    columns: dict[str | None, list[str]] = {}
    for sources in (evaluation, train):
        columns |= {name: _embedded(dataset) for name, dataset in sources.items()}
    for option in ("prompts", "router_mapping"):
        _check_names(option, getattr(args, option), columns)
    collator = SentenceCollator(
        model.preprocess,
        columns[next(iter(train or evaluation))] if columns else (),
        prompts=args.prompts,
        routes=args.router_mapping,
        max_length=args.max_length,
        has_positions=isinstance(model, MultiVectorEncoder),
        tokenizer=getattr(model, "tokenizer", None),
        processor=getattr(model, "processor", None),
        seed=seed_of_order(args),
    )
    collator = collator.with_sources({name: collator.of_columns(own) for name, own in columns.items() if name})
    if collator.draws_prompts:
        _check_can_draw(model)
    if isinstance(train_dataset, Mapping):
        args.multi_dataset_batch_sampler = args.multi_dataset_batch_sampler or PROPORTIONAL
        train_dataset = Mixture(train, shares([None] * len(train), [len(one) for one in train.values()]))
    return train_dataset, evaluated(eval_dataset), collator


def evaluated(dataset: Any) -> Any:
    """A mapping name -> dataset, with rows that name their dataset; what else there is to evaluate on, as it is."""
    for one in dataset.values() if isinstance(dataset, Mapping) else [dataset]:
        _check_columns("eval_dataset", one)
    if not isinstance(dataset, Mapping):
        return dataset
    return {name: (Tagged if hasattr(one, "__len__") else tagged_stream)(name, one) for name, one in dataset.items()}


def _check_columns(which: str, dataset: Any) -> None:
    if SOURCE in (getattr(dataset, "column_names", None) or ()):
        raise UsageError(
            f'{which} has a column "{SOURCE}", where DistTrainer writes which of several datasets a row is of. Rename '
            "that column."
        )


def _check_texts(which: str, dataset: Any) -> None:
    """That no column of numbers would be read as text: an id, or a label under another name."""
    from datasets import ClassLabel, Value

    for name, feature in ({} if has_transform(dataset) else getattr(dataset, "features", None) or {}).items():
        is_number = isinstance(feature, Value | ClassLabel) and re.match("u?int|float|bool", feature.dtype)
        if is_number and name != label_column(dataset.column_names):
            raise UsageError(
                f'{which} has a column "{name}" of {feature.dtype}, and the model reads every column but one called '
                f"{', '.join(LABELS)} (the first of these). Remove the column, or rename it where it is the label."
            )


def nulls_of(dataset: Any) -> dict[str, int]:
    """Column -> rows without a value; nothing of a stream, or of what a transform makes."""
    table, indices = getattr(dataset, "data", None), getattr(dataset, "_indices", None)
    if table is None or has_transform(dataset):
        return {}
    nulls = {name: table.column(name).null_count for name in table.column_names}
    if indices is None:
        return nulls
    rows = indices.column(0)  # of a dataset that is filtered or selected, whose table has all rows
    return {
        name: table.column(name).is_null().take(rows).to_pylist().count(True) if nulls[name] else 0 for name in nulls
    }


def has_transform(dataset: Any) -> bool:
    """Whether the columns of a row are what a function of `with_transform` makes."""
    return (getattr(dataset, "format", None) or {}).get("type") == "custom"


def _check_values(which: str, dataset: Any) -> None:
    """That every row has the texts that every row needs; one without a negative is fine."""
    nulls = nulls_of(dataset)
    for name in _embedded(dataset)[:NUM_PAIR_COLUMNS] if any(nulls.values()) else ():
        if nulls.get(name):
            raise UsageError(
                f'{which}: column "{name}" has no value in {nulls[name]} of {len(dataset)} rows, and every row needs '
                f'one. Leave these out: dataset.filter(lambda row: row["{name}"] is not None).'
            )


def _by_name(which: str, dataset: Any) -> dict[Any, Any]:
    """Name -> dataset; None -> the only one, which has no name."""
    by_name = dict(dataset) if isinstance(dataset, Mapping) else {} if dataset is None else {None: dataset}
    for name, one in by_name.items():
        if not hasattr(one, "column_names"):
            raise UsageError(f"{which} is or holds a {type(one).__name__}. Give a Dataset, or several by name.")
        _check_columns(which, one)
        _check_texts(which, one)
        _check_values(which, one)
        if name is not None and which == "train_dataset" and not hasattr(one, "__len__"):
            raise UsageError(
                f"{which}[{name!r}] is a stream, and batches are of datasets in proportion to their rows, or until "
                "one is at its end. Give a Dataset, or interleave the streams into one."
            )
    return by_name


def _embedded(dataset: Any) -> list[str]:
    names = None if has_transform(dataset) else dataset.column_names
    names = list(names or next(iter(dataset)))  # a stream may know them once a row is read
    return [name for name in names if name != label_column(names)]


def _check_names(option: str, given: Any, columns: Mapping[str | None, list[str]]) -> None:
    """That the keys of a mapping are datasets, or columns of one."""
    for source in columns:
        of_source(given, source, option)  # raises
    if not isinstance(given, Mapping) or not given or not columns:
        return
    of_all = {name for own in columns.values() for name in own}
    unknown = [name for name in given if name not in of_all and name not in columns]
    unknown += [
        f"{source}.{name}"
        for source, own in given.items()
        for name in (own if isinstance(own, Mapping) and source in columns else ())
        if name not in columns[source]
    ]
    if unknown:
        words = f"{option} has {', '.join(unknown)}, which is no column and no dataset: {', '.join(sorted(of_all))}."
        if len(unknown) >= len(given):
            raise UsageError(f"{words} Correct the names.")
        logger.warning(words)


def _check_can_draw(model: Any) -> None:
    """A prompt of its own for every row goes before its text, and nobody knows where it ends."""
    modality = model.preprocess(["a text"], prompt="a prompt ").get("modality", "text")
    if modality != "text":
        raise UsageError(
            "prompts has a list, one of which is drawn for each row's text, and this model reads texts as a "
            f"{modality} (its chat template). Give one prompt per column."
        )
    if any(getattr(module, "include_prompt", True) is False for module in model.modules()):
        raise UsageError(
            "prompts has a list, and the model's pooling leaves the prompt out (include_prompt=False), for which all "
            "rows of a batch must have one. Give one prompt per column."
        )

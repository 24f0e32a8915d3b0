"""DistTrainer in the place of SentenceTransformerTrainer: its arguments, in its order, become those of DistTrainer.

(1) arguments of sentence-transformers are converted, and a loss, or what makes one, scores embeddings
(2) datasets get the collator that calls the model's own `preprocess`
(3) a loss with a gradient cache of its own says how large a chunk is, where the arguments do not
(4) the card of the model is sentence-transformers'; a callback of theirs collects what it says of the run
"""

from __future__ import annotations

import inspect
import random
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from datasets import DatasetDict
from torch import nn
from transformers import Trainer, set_seed
from transformers.utils import logging

from hf_dist_ext.engine.combined_losses import LossPerSource
from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.embedder import PACKAGE, is_of_sentence_transformers
from hf_dist_ext.strategies.base import Strategy, meanwhile
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.final_model import is_by_hand
from hf_dist_ext.training.sentence_data import arguments_from, nulls_of, prepare_sentence_data
from hf_dist_ext.training.sentence_losses import SentenceTransformersLoss, as_loss, asked_chunks, scores_embeddings

logger = logging.get_logger(__name__)

# The arguments of their trainer after `model` and `args`, which Trainer has in another order.
ORDER = (
    "train_dataset", "eval_dataset", "loss", "evaluator", "data_collator", "processing_class", "model_init",
    "compute_metrics", "callbacks", "optimizers", "optimizer_cls_and_kwargs", "preprocess_logits_for_metrics",
)  # fmt: skip

# What holds losses and is none itself.
AROUND_OTHERS = ("SentenceTransformersLoss", "SumOfLosses", "LossPerSource")
# Methods of their trainer that a subclass may have, and which DistTrainer never calls -> what says the same to it.
HOOKS = {
    "get_batch_sampler": "args.batch_sampler, a function that makes one",
    "get_multi_dataset_batch_sampler": "args.multi_dataset_batch_sampler, a function that makes one",
    "get_data_collator": "data_collator",
    **dict.fromkeys(("compute_loss", "collect_features", "track_loss_components"), "loss"),
    **dict.fromkeys(("prepare_loss", "get_default_loss", "override_model_in_loss"), "loss"),
    **dict.fromkeys(("preprocess_dataset", "add_dataset_name_column"), "train_dataset"),
}


def refuse_hooks(kind: type, base: type) -> None:
    """`kind`: of a trainer with a loss over embeddings, a subclass of `base` or itself.

    Raises:
        UsageError: it has a method which would not be called.
    """
    for name, instead in HOOKS.items():
        if getattr(kind, name, None) is not getattr(base, name, None):
            raise UsageError(
                f"{kind.__name__} has a method {name}, which DistTrainer with a loss over embeddings does not call. "
                f"Remove it, and give {instead}."
            )


def bound(model: Any, args: Any, more: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a trainer by name; `more` follow `model` and `args`, in the order of the model's trainer."""
    own = {name: options[name] for name in ("loss", "evaluator")}
    if more and (is_of_sentence_transformers(model) or _is_theirs(args)):
        options = dict(zip(ORDER, more, strict=False)) | {n: v for n, v in options.items() if n not in own}
        own = {name: given if (given := own[name]) is not None else options.pop(name, None) for name in own}
        more = ()
    if "tokenizer" in options:
        options = {"processing_class": options["tokenizer"], **options}
    rest = {name: value for name, value in options.items() if name not in (*own, "tokenizer")}
    return dict(inspect.signature(Trainer).bind_partial(model, args, *more, **rest).arguments) | own


def converted(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `bound`, as DistTrainer takes them; others than those of a model of sentence-transformers stay.

    Raises:
        UsageError: what can not be honoured.
    """
    args, loss, model = given.get("args"), given.get("loss"), given.get("model")
    refuse_other_encoder(model)
    is_theirs = _is_theirs(args)
    if args is None:
        args = DistTrainingArguments(output_dir="tmp_trainer")
    elif is_theirs or not (isinstance(args, DistTrainingArguments) or loss is None):
        args = arguments_from(args)
    given = {**given, "args": args}
    init = given.get("model_init")
    if model is None and init is not None and (is_theirs or (loss is not None and not scores_embeddings(loss))):
        set_seed(args.seed)
        model = Trainer.call_model_init(cast(Any, SimpleNamespace(model_init=init)))  # as theirs does
        refuse_other_encoder(model)
    if not is_of_sentence_transformers(model):
        return given
    if not isinstance(args, DistTrainingArguments):
        given["args"] = args = arguments_from(args)
    given["loss"] = _loss_of_sources(as_loss(loss, model), given)  # (1)
    given |= _data_of(model, args, given)
    _take_chunks(args, given["loss"])
    if given.get("processing_class") is None and hasattr(getattr(model, "processor", None), "save_pretrained"):
        given["processing_class"] = model.processor
    return given


def refuse_other_encoder(model: Any) -> None:
    """Raises UsageError for a model whose losses are other ones."""
    for name in ("CrossEncoder", "SparseEncoder"):
        if any(kind.__name__ == name and kind.__module__.startswith(f"{PACKAGE}.") for kind in type(model).__mro__):
            raise UsageError(
                f"model is a {type(model).__name__}, which DistTrainer does not train. Train it with {name}Trainer of "
                "sentence-transformers."
            )


def _is_theirs(given: Any) -> bool:
    return any(kind.__module__.startswith(f"{PACKAGE}.") for kind in type(given).__mro__)


def _loss_of_sources(loss: Any, given: Mapping[str, Any]) -> Any:
    for name in ("train_dataset", "eval_dataset") if isinstance(given.get("loss"), Mapping) else ():
        dataset = given.get(name)
        if dataset is None:
            continue
        if not isinstance(dataset, Mapping):
            raise UsageError(
                f"loss is by dataset ({', '.join(given['loss'])}), and {name} is one without a name. Give a "
                "DatasetDict of these names, or one loss."
            )
        if missing := sorted(dataset.keys() - given["loss"].keys()):
            raise UsageError(f'loss has none for the dataset "{missing[0]}" of {name}. Add one, or leave it out.')
    return loss


def _data_of(model: nn.Module, args: Any, given: Mapping[str, Any]) -> dict[str, Any]:  # (2)
    if (collator := given.get("data_collator")) is not None:
        if _is_theirs(collator):
            raise UsageError(
                f"data_collator is a {type(collator).__name__} of sentence-transformers, whose batches have no "
                "columns. Leave it out: prompts, router_mapping and max_length are fields of the arguments."
            )
        return {}
    datasets = given.get("train_dataset"), given.get("eval_dataset")
    names = "train_dataset", "eval_dataset", "data_collator"
    return dict(zip(names, prepare_sentence_data(model, args, *datasets), strict=True))


def _take_chunks(args: DistTrainingArguments, loss: Any) -> None:  # (3)
    rows, tokens = asked_chunks(loss)
    if not args.uses_gradient_cache:
        args.gradient_cache_chunk_size, args.gradient_cache_chunk_tokens = rows, tokens


# ---- (4) ----


def add_card(trainer: Any, given: Mapping[str, Any]) -> bool:
    """The callback of sentence-transformers that collects what a card says. False: the model is of another package.
    `given`: of `bound`, as it was given."""
    model = trainer.bare_model
    if not is_of_sentence_transformers(model):
        return False
    from sentence_transformers.base import model_card

    card, built = model.model_card_data, getattr(model, "_built_from", None)
    if built is not None:  # of a run file, which names the base: a path is not to be taken for a name on the hub
        card.first_save, name = False, built["model_name_or_path"]
        if name is not None and not Path(name).exists():
            card.base_model, card.base_model_revision = name, built["revision"]
    elif trainer.args.hub_model_id and not card.model_id:
        card.set_model_id(trainer.args.hub_model_id)
    defaults = DistTrainingArguments(output_dir="unused", accelerator_config={"use_configured_state": True})
    callback = model_card.BaseModelCardCallback(defaults.to_dict())
    args = SimpleNamespace(router_mapping=trainer.args.router_mapping or {})
    seen = SimpleNamespace(callback_handler=trainer.callback_handler, loss=_inner(trainer.loss))
    for name in ("train_dataset", "eval_dataset"):
        setattr(seen, name, _for_card(given.get(name)))
    trainer.add_callback(callback)
    drawn = random.getstate()  # examples are drawn; training draws the same with and without a card
    has_no_bar = trainer.args.disable_tqdm or not sys.stderr.isatty()
    with meanwhile(model_card, tqdm=_without_bar) if has_no_bar else nullcontext():
        try:
            callback.on_init_end(args, trainer.state, trainer.control, model=model, trainer=seen)
        except Exception as error:  # anything: rows that cannot be read are met here, before training skips them
            logger.warning(f"the model's card says nothing of the data: {type(error).__name__}: {error}")
            seen.train_dataset = seen.eval_dataset = None
            callback.on_init_end(args, trainer.state, trainer.control, model=model, trainer=seen)
        finally:
            random.setstate(drawn)
    _leave_pictures_out(card)
    card.set_losses(parts_of(trainer.loss))
    card.tags = [tag for tag in card.tags if tag.removeprefix("loss:") not in AROUND_OTHERS]
    return True


def parts_of(loss: Any) -> list[Any]:
    """The loss and those inside of it, without what only holds others; [] for None."""
    found: list[Any] = []
    waiting = [loss]
    while waiting:
        one = waiting.pop(0)
        if one is not None and one not in found:
            found.append(one)
            waiting = [*getattr(one, "losses", {}).values(), getattr(one, "loss", None), *waiting]
    return [one for one in found if type(one).__name__ not in AROUND_OTHERS]


def _without_bar(rows: Any, **options: Any) -> Any:
    return rows


def _for_card(dataset: Any) -> Any:
    """Rows of another class than those of `datasets`, or without a value somewhere, are not described."""
    dataset = getattr(dataset, "sources", dataset)  # of a mixture
    parts = dataset.values() if isinstance(dataset, Mapping) else [dataset]
    if not all(hasattr(part, "info") and not any(nulls_of(part).values()) for part in parts):
        return None
    return DatasetDict(dataset) if isinstance(dataset, Mapping) else dataset


def _leave_pictures_out(card: Any) -> None:
    """Of rows with a text and a picture in one column. The card takes such a value for a text by the name of a
    language, so it puts the picture into its YAML, which is then unreadable; and it encodes as an example what has
    no picture."""
    card.widget = [one for one in card.widget if all(_is_text(value) for value in one.values())]
    if any(one is None or (isinstance(one, Mapping) and None in one.values()) for one in card.usage_examples or ()):
        card.usage_examples = None  # its own texts
    for described in (*card.train_datasets, *card.eval_datasets):
        for column, values in described.get("examples", {}).items():
            described["examples"][column] = [_in_words(card, one) for one in values]


def _in_words(card: Any, value: Any) -> Any:
    """Else its table names the addresses of pictures inside of values."""
    if not isinstance(value, Mapping):
        return value
    return {
        key: one if _is_text(one) or one is None else card._format_example_value(one) for key, one in value.items()
    }


def _is_text(value: Any) -> bool:
    return all(isinstance(one, str) for one in (value if isinstance(value, list) else [value]))


def _inner(loss: Any) -> Any:
    """The user's objects, whose names and citations the card has."""
    if isinstance(loss, LossPerSource):
        named = {name.removeprefix("of_"): _inner(one) for name, one in loss.losses.items()}
        default = named.pop("", None)
        return named if default is None else defaultdict(lambda: default, named)
    return loss.loss if isinstance(loss, SentenceTransformersLoss) else loss


def write_card(model: Any, folder: Path, strategy: Strategy) -> None:
    """README.md of a folder of such a model, by its own template, unless somebody has written one. One rank calls it,
    so the template's example is encoded only where that rank has a whole model."""
    card = folder / "README.md"
    if is_by_hand(card):
        return
    is_whole = not (strategy.forwards_are_collective or strategy.split)
    data = type(model.model_card_data)
    with nullcontext() if is_whole else meanwhile(data, run_usage_snippet=lambda self: None):
        model._create_model_card(str(folder))  # private, and what their `save_pretrained` calls (6.2)

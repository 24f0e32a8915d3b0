"""Losses of sentence-transformers by name, options as a run file writes them, and what is wrong with one, in words."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from hf_dist_ext.errors import UsageError
from hf_dist_ext.run.losses import MATRYOSHKA, SEES_MODEL

OF_SHAPES = ("must match the size", "cannot be multiplied")  # what torch says of a teacher of another width


def made(name: str | type[nn.Module], options: Mapping[str, Any], model: Any) -> nn.Module:
    """The loss, with the options of `SentenceTransformersLoss`. `model`: what takes the place of one."""
    kind = name if isinstance(name, type) else _class_of(name)
    options = _resolved(kind, options)
    if kind.__name__ == MATRYOSHKA:
        inner, options["loss"] = options.pop("loss_options", {}), options.get("loss")
        if not isinstance(options["loss"], (str, type)):
            raise UsageError(f"{MATRYOSHKA} is around a loss: give loss, a name, and loss_options.")
        options["loss"] = made(options["loss"], inner, model)
    if "use_mini_batched_version" in _options_of(kind):
        options["use_mini_batched_version"] = False  # its own gradient cache; the trainer's is outside of the loss
    if isinstance(options.get("guide"), (str, os.PathLike)):
        options["guide"] = _load_guide(options["guide"])
    return guarded(kind.__name__, kind, model, **options)


def guarded(name: str, call: Callable, *arguments: Any, **options: Any) -> Any:
    """What sentence-transformers finds wrong, and what it asks of a model that a stand-in has not."""
    try:
        return call(*arguments, **options)
    except (AssertionError, AttributeError, KeyError) as error:
        raise UsageError(
            f"{name} must see the model itself, and here a loss sees embeddings only: {error}. Choose another one."
        ) from error
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(words in str(error) for words in OF_SHAPES):
            raise
        reason = str(error).rstrip(".")
        if expected := re.search(r"values to unpack \(expected (\d+)", reason):
            texts = f"{len(arguments[0])} texts of a row, of which every negative is one"
            reason = f"it reads {expected[1]}, and was given {texts}"
        raise UsageError(f"{name}: {reason}. docs/losses.md says what each loss needs.") from error


def library(module: str) -> Any:
    return importlib.import_module(f"sentence_transformers.{module}")


def _class_of(name: str) -> type[nn.Module]:
    if name in SEES_MODEL:
        raise UsageError(f"{name} can not be trained here: {SEES_MODEL[name]}.")
    losses = library("sentence_transformer.losses")
    found = getattr(losses, name, None)
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        known = [one for one in losses.__all__ if one.endswith("Loss") and one not in SEES_MODEL]
        raise UsageError(f"sentence-transformers has no loss called {name}. It has {', '.join(sorted(known))}.")
    return found


def _options_of(kind: type[nn.Module]) -> dict[str, inspect.Parameter]:
    _, _, *options = inspect.signature(kind.__init__).parameters.items()  # but self and the model
    return dict(options)


def _resolved(kind: type[nn.Module], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as the class takes them: functions and distances instead of their names."""
    taken = _options_of(kind)
    also = {"loss_options"} if kind.__name__ == MATRYOSHKA else set()
    for name in options:
        if name not in {*taken, *also}:
            raise UsageError(
                f"loss_options: {kind.__name__} has no option {name}. It has {', '.join(sorted({*taken, *also}))}."
            )
    return {name: _object_of(kind, name, value, taken.get(name)) for name, value in options.items()}


def _object_of(kind: type[nn.Module], option: str, value: Any, parameter: inspect.Parameter | None) -> Any:
    default = None if parameter is None else parameter.default
    if not isinstance(value, str) or not callable(default) or default is inspect.Parameter.empty:
        return value
    functions = _distances(kind) if option == "distance_metric" else vars(library("util"))
    found = functions.get(value)
    if not callable(found):
        known = sorted(functions) if option == "distance_metric" else [n for n in functions if n.endswith("_sim")]
        raise UsageError(
            f"loss_options: {option}={value!r} of {kind.__name__} is no name of such a function. There are "
            f"{', '.join(known)}; another one can be given from Python."
        )
    return found


@functools.cache
def _distances(kind: type[nn.Module]) -> dict[str, Any]:
    """Name -> function of the class of distances that stands beside a loss, such as TripletDistanceMetric."""
    beside = vars(importlib.import_module(kind.__module__)).items()
    classes = [one for name, one in beside if name.endswith(("DistanceMetric", "DistanceFunction"))]
    return {name: f for one in classes for name, f in vars(one).items() if callable(f) and not name.startswith("_")}


def name_of(function: Any) -> str:
    """A function's name, or the name under which a class of distances has it."""
    if isinstance(function, nn.Module):
        return type(function).__name__
    losses = library("sentence_transformer.losses")
    for kind in (losses.TripletDistanceMetric, losses.SiameseDistanceMetric):
        for name, one in vars(kind).items():
            if one is function:
                return name
    return getattr(function, "__name__", type(function).__name__)


def _load_guide(name: str | os.PathLike) -> nn.Module:
    try:
        return library("sentence_transformer").SentenceTransformer(str(name), device="cpu")
    except (OSError, ValueError) as error:
        raise UsageError(f"loss_options: the guide {str(name)!r} can not be loaded: {error}") from error

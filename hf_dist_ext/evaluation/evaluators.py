"""Runs evaluators of sentence-transformers or of a user on a model that is spread over the ranks of a run.

    figures = run_evaluators(evaluator, encoder, folder, epoch, step, seed)     # on every rank, which all get them

An evaluator is any code: it may draw random numbers, write files, or take another way on another rank. So it runs
once, on rank 0, while the other ranks serve its `encode`. An error of a rank is raised on all.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import set_seed
from transformers.trainer_utils import denumpify_detensorize
from transformers.utils import logging

from hf_dist_ext.engine.replay import RandomState
from hf_dist_ext.errors import UsageError
from hf_dist_ext.evaluation.encoder import SharedEncoder, asking, in_eval_mode
from hf_dist_ext.models.embedder import is_of_sentence_transformers
from hf_dist_ext.strategies import collectives
from hf_dist_ext.strategies.consensus import together

logger = logging.get_logger(__name__)

Evaluator = Callable[..., "float | Mapping[str, float]"]


@contextmanager
def drawing_apart(seed: int) -> Iterator[None]:
    """Around an evaluation: its random numbers are the same in each of them, and training's go on after it as if there
    had been none."""
    before = RandomState()
    set_seed(seed)
    try:
        yield
    finally:
        before.restore()


def as_one(evaluator: Evaluator | Sequence[Evaluator] | None) -> Evaluator | None:
    """A list of evaluators as the one that runs them in turn."""
    if evaluator is None or callable(evaluator):
        return evaluator
    from sentence_transformers.base.evaluation import SequentialEvaluator  # importing it takes seconds

    return SequentialEvaluator(evaluator)


def each_of(evaluator: Any) -> list[Any]:
    """Evaluators one by one, those inside of a SequentialEvaluator among them; of None none."""
    if evaluator is None:
        return []
    if any(kind.__name__ == "SequentialEvaluator" for kind in type(evaluator).__mro__):
        evaluator = evaluator.evaluators
    return [one for part in evaluator for one in each_of(part)] if isinstance(evaluator, Sequence) else [evaluator]


def run_evaluators(
    evaluator: Evaluator | Sequence[Evaluator],
    encoder: SharedEncoder,
    output_path: str | Path | None = None,
    epoch: float = -1,
    steps: int = -1,
    seed: int = 42,
) -> dict[str, Any]:
    """Figures as the evaluator names them; one that returns a number has the name "evaluator". Every rank calls it,
    and nothing is left in the model or its random numbers.

    Args:
        evaluator: called as (encoder, output_path=, epoch=, steps=), on rank 0.
        output_path: a folder for its files, made if need be; None: it writes none.
        epoch, steps: how far training is; -1: no training.
    """
    run, failure, figures = encoder.encoding, None, {}
    run.failure = None
    with drawing_apart(seed), in_eval_mode(run.model):
        try:
            if collectives.rank() == 0:
                with asking(encoder):
                    figures = _figures_of(as_one(evaluator), encoder, output_path, epoch, steps)
            else:
                encoder.serve()
        except Exception as error:
            failure = error
        if run.failure is not None:  # every rank has raised it, or this process ends the others with itself
            raise run.failure

        def of_rank() -> dict[str, Any]:
            if failure is not None:
                raise failure
            return figures

        return together(of_rank)[0]


def _figures_of(
    evaluator: Evaluator, encoder: SharedEncoder, output_path: str | Path | None, epoch: float, steps: int
) -> dict[str, Any]:
    if output_path is not None:
        Path(output_path).mkdir(parents=True, exist_ok=True)
        output_path = str(output_path)
    found = evaluator(encoder, output_path=output_path, epoch=epoch, steps=steps)
    if found is None:
        raise UsageError(
            f"the evaluator {type(evaluator).__name__} has returned None. Let it return a number, or a dict of name "
            "and number."
        )
    figures = dict(found) if isinstance(found, Mapping) else {"evaluator": found}
    return denumpify_detensorize(figures)  # as Trainer does with those of compute_metrics, else no file takes them


# ---- names ----


def named(figures: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Figures as a trainer logs them: "eval_" goes before a name that does not begin with it."""
    return {name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": value for name, value in figures.items()}


def prefix_once(prefix: str, eval_dataset: Any) -> str | None:
    """`prefix` of figures: of several datasets of a trainer the evaluator runs once, with the first of them, and as
    "eval". None: not with this one."""
    name = prefix.removeprefix("eval_")
    if not isinstance(eval_dataset, Mapping) or name == prefix or name not in eval_dataset:
        return prefix
    return "eval" if name == next(iter(eval_dataset)) else None


def check(evaluator: Any, model: Any, is_due: bool) -> None:
    """UsageError, before training, for a model that has no encoder. `is_due`: training evaluates."""
    if not is_due and collectives.rank() == 0:
        logger.warning(
            'evaluator is given, and eval_strategy is "no": it runs when evaluate() is called, and not while training.'
        )
    if not is_of_sentence_transformers(model):
        raise UsageError(
            f"evaluator={type(evaluator).__name__} encodes with a SentenceTransformer or MultiVectorEncoder, and the "
            f"model is a {type(model).__name__}. Give such a model, or remove evaluator."
        )


def check_best_metric(best: str | None, evaluator: Any, others: Sequence[str]) -> str | None:
    """UsageError, before training, for a `metric_for_best_model` that no figure can have; `best` when it is one of
    `others`, else None. The figures of an evaluator with a name begin with it; those of one without may have any.

    others: names of the figures that no evaluator gives, without "eval_".
    """
    parts = each_of(evaluator)
    name = (best or "").removeprefix("eval_")
    if name in others:
        return best
    is_one = len(parts) == 1 and parts[0] is evaluator
    known = [
        *others,
        *(["sequential_score"] if parts and not is_one else []),
        *(n for p in parts for n in figure_names(p) or ()),
    ]
    starts = [name for part in parts if figure_names(part) is None for name in _names(part)]
    is_open = best is None or not all(isinstance(one, str) and one for one in starts)
    if is_open or name in known or any(name.startswith(f"{one}_") for one in starts):
        return None
    near = difflib.get_close_matches(name, known, 3, 0.3) or known
    open_ones = f" Others begin with {', '.join(f'eval_{one}_' for one in starts)}." if starts else ""
    raise UsageError(
        f'metric_for_best_model="{best}" is no figure of this run. Closest: {", ".join(near[:3]) or "none"}.'
        f"{open_ones}"
    )


# ---- of a run file (from_files.py), whose figures are known before they run ----


def figure_names(evaluator: Any) -> Sequence[str] | None:
    """None: only the evaluator knows them."""
    return getattr(evaluator, "figure_names", None)


def names_of(evaluator: Any) -> list[str]:
    """With which figures of evaluators begin."""
    return [one for part in each_of(evaluator) for one in _names(part) if one]


def _names(evaluator: Any) -> list[str | None]:
    """Its own, and those of the data sets of NanoBEIR."""
    return [getattr(one, "name", None) for one in (evaluator, *getattr(evaluator, "evaluators", ()))]


def headlines_of(evaluator: Any) -> list[str]:
    """The figures that a report shows before and after training. `evaluator`: one that may have run."""
    found = []
    for part in each_of(evaluator):
        own = getattr(part, "headlines", None)
        main = getattr(part, "primary_metric", None)
        found += ([main] if main else []) if own is None else own
    return found


def is_hidden(name: str, evaluator: Any) -> bool:
    """Whether a figure, without "eval_", is one of evaluators that a report does not show."""
    is_theirs = any(name.startswith(f"{one}_") for one in names_of(evaluator)) or name == "sequential_score"
    return is_theirs and name not in headlines_of(evaluator)

"""The README.md of a trained model's folder: the card of sentence-transformers, and one section of a run after it.

Their card says what the model is, how it is used, its data, its losses and what to cite; DistTrainer writes it when
the model is saved (sentence_trainer.py). `write` appends what only the run knows: what of the model trained, its
figures before and after, its curves, and the run file. A model of another package has a short head of its own there.
A card that somebody wrote stays, and a line says so. What stands in the card of a model's own folder is of that
folder, so that `named` can put another name in its place when the model moves to the hub.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata as packages
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.utils import HFValidationError, validate_repo_id
from transformers.utils import logging

from hf_dist_ext.evaluation import evaluators
from hf_dist_ext.run.evaluations import parse_evaluations
from hf_dist_ext.run.files import looks_like_a_path
from hf_dist_ext.run.sources import BUILT_IN
from hf_dist_ext.training import curves, final_model
from hf_dist_ext.training.final_model import GENERATED, is_by_hand
from hf_dist_ext.training.scaling import device_name

if TYPE_CHECKING:
    from hf_dist_ext.run.config import Run

logger = logging.get_logger(__name__)

NAME, OURS = "README.md", "hf_dist_ext"
MARK = f"<!-- Written by hf_dist_ext. A later run leaves the file as it is once the tag {GENERATED} is removed. -->"
# What their card calls a model that has no name on the hub.
_NO_NAME, _FROM_HUB = "sentence_transformers_model_id", "# Download from the 🤗 Hub\n"
_LOADS = re.compile(r'((?:SentenceTransformer|MultiVectorEncoder|from_pretrained)\()"[^"]*"')
_SEARCHES = re.compile(r"(hf-dist search --model )\S+")


@dataclass(frozen=True)
class Life:
    """What a card says of one trainer beside its report.

    Attributes:
        losses: (step, loss) as logged, those before a resume too.
        evaluations: of `curves.panels_of`.
        best_step: whose weights were kept as the best; None: those of the last step were.
        replay_error: the largest that was logged, those before a resume too; None: no chunk was encoded twice.
        replay_tolerance: the run's argument.
    """

    name: str
    losses: list[tuple[int, float]]
    evaluations: dict[str, dict[str, curves.Points]]
    best_step: int | None
    strategy: str
    device: str
    replay_error: float | None = None
    replay_tolerance: float | None = None


def life_of(trainer: Any, figures: Sequence[str]) -> Life:
    """Of a DistTrainer that has trained. `figures`: names of the evaluation's that are shown, without "eval_"."""
    rows, lines = trainer.eval_dataset, trainer.state.log_history
    best = final_model.best_of(trainer.args, trainer.state).get("step")
    sets = [*(rows if isinstance(rows, Mapping) else ()), *evaluators.names_of(trainer.evaluator)]
    return Life(
        name=getattr(trainer, "stage", None) or "",
        losses=[(line["step"], line["loss"]) for line in lines if "loss" in line],
        evaluations=curves.panels_of(lines, figures, sets, best is not None),
        best_step=best,
        strategy=trainer.strategy.name,
        device=device_name(trainer.args.device),
        replay_error=max((line["replay_error"] for line in lines if "replay_error" in line), default=None),
        replay_tolerance=getattr(trainer.args, "replay_tolerance", None),
    )


def write(
    folder: Path, run: Run, report: Mapping[str, Any], to_load: Sequence[str], lives: Sequence[Life] = ()
) -> list[str]:
    """The names of the pictures that were drawn beside it.

    `report`: of scripts/train_hf.py; `to_load`: lines with "{folder}" in the place of the folder; `lives`: of the
    trainers that ran here, in order."""
    path = folder / NAME
    if path.exists() and is_by_hand(path):
        logger.warning(f"{path} was written by hand, so it stays as it is. Remove it to get the card of this run.")
        return []
    pictures = _draw(folder, lives)
    card = _theirs(path, folder) or _own_head(folder, run)
    _complete_head(card.data, folder, run, report["after"])
    text = f"{str(card).rstrip()}\n\n{section(folder, run, report, to_load, lives, pictures)}"
    path.write_text(text, encoding="utf-8")
    return pictures


def _theirs(path: Path, folder: Path) -> ModelCard | None:
    """The card that sentence-transformers wrote when the model was saved, without an earlier section; None: it did
    not, since the model is of another package."""
    if not (folder / "modules.json").is_file() or not path.is_file():
        return None
    content = path.read_text(encoding="utf-8").partition(MARK)[0]
    content = content.replace(f'"{_NO_NAME}"', f'"{folder}"').replace(_FROM_HUB, "")
    card = ModelCard(content, ignore_metadata_errors=True)
    return card if GENERATED in (card.data.tags or ()) else None


def _own_head(folder: Path, run: Run) -> ModelCard:
    is_whole = not (folder / "trainable.safetensors").is_file()
    if is_whole and (folder / "modules.json").is_file():  # their card could not be written: this is the least of it
        theirs = "sentence-transformers"
        data = ModelCardData(library_name=theirs, pipeline_tag="sentence-similarity", tags=[theirs, GENERATED])
        return ModelCard("\n".join(["---", data.to_yaml(), "---", "", f"# {folder.resolve().name}"]))
    library = "transformers" if is_whole else OURS
    data = ModelCardData(
        library_name=library,
        pipeline_tag=run.options.task if is_whole else None,
        tags=[GENERATED],
    )
    kind = "AutoModelForImageTextToText"
    code = [
        f"from transformers import {kind}, AutoProcessor",
        "",
        f'model = {kind}.from_pretrained("{folder}")',
        f'processor = AutoProcessor.from_pretrained("{folder}")',
    ]
    usage = ["```python", *code, "```"] if is_whole else ["This folder holds what was trained, without the rest."]
    lines = ["---", data.to_yaml(), "---", "", f"# {folder.resolve().name}", "", "## Usage", "", *usage]
    return ModelCard("\n".join(lines))


# ---- what the hub finds it by ----


def _complete_head(data: ModelCardData, folder: Path, run: Run, figures: Mapping[str, float | None]) -> None:
    """What only the run file knows: names on the hub, and figures of rows that were held out."""
    config = run.options
    data.base_model = config.model_name_or_path if is_hub_id(config.model_name_or_path) else None
    data.datasets = [name for name in dataset_names(run) if is_hub_id(name)] or None
    data.tags = list(dict.fromkeys([*(data.tags or ()), OURS, *(["lora"] if config.use_lora else [])]))
    if results := _held_out(run, figures):
        data.model_name = data.model_name or folder.resolve().name
        data.eval_results = [*(data.eval_results or ()), *results]


def _held_out(run: Run, figures: Mapping[str, float | None]) -> list[EvalResult]:
    """Those of evaluators stand in their card."""
    of_others = tuple(f"{one.name}_" for one in parse_evaluations(run.options.evaluations or []))
    task = "information-retrieval" if run.options.task == "embedding" else run.options.task
    return [
        EvalResult(
            task_type=task,
            task_name=task.replace("-", " "),
            dataset_type="held-out",
            dataset_name="held-out rows",
            metric_type=name,
            metric_name=name.replace("_", " "),
            metric_value=round(value, 6),
        )
        for name, value in figures.items()
        if value is not None and not name.startswith(of_others)
    ]


def dataset_names(run: Run) -> list[str]:
    """As the hub calls them, without revisions."""
    entries = [{"dataset_name": run.options.dataset_name}, *(run.options.datasets or [])]
    names = [str(entry.get("dataset_name") or "").partition("@")[0] for entry in entries]
    return list(dict.fromkeys(filter(None, names)))


def is_hub_id(name: str | None) -> bool:
    """Whether this can be a name on the hub: no path here, and none of the built-in datasets."""
    if not name or name in BUILT_IN or looks_like_a_path(name) or Path(name).exists():
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


# ---- the section ----


def _draw(folder: Path, lives: Sequence[Life]) -> list[str]:
    panels, best = {}, {}
    for life in lives:
        own = {f"{life.name}: {title}" if life.name else title: curve for title, curve in life.evaluations.items()}
        panels |= own
        best |= dict.fromkeys(own, life.best_step)
    drawn = {
        curves.LOSS: curves.draw_losses(folder, {life.name: life.losses for life in lives}),
        curves.METRICS: curves.draw_metrics(folder, panels, best),
    }
    return [name for name, is_drawn in drawn.items() if is_drawn]


def named(folder: Path, name: str) -> None:
    """Write `name` (of a repository) in the place of the folder in its card, if that is one of ours."""
    path = folder / NAME
    if path.is_file() and MARK in (content := path.read_text(encoding="utf-8", errors="replace")):
        content = _LOADS.sub(rf'\1"{name}"', content)
        path.write_text(_SEARCHES.sub(rf"\g<1>{name}", content), encoding="utf-8")


def section(
    folder: Path,
    run: Run,
    report: Mapping[str, Any],
    to_load: Sequence[str],
    lives: Sequence[Life] = (),
    pictures: Sequence[str] = (),
) -> str:
    given, base = run.flat(), run.options.model_name_or_path
    made_from = f"`{base}`"
    if not base:
        made_from = f"a new `{run.options.model_config['model_type']}`, not pretrained (`model_config`)"
    reports = report.get("stages") or [report]
    lines = [
        MARK,
        "## This run",
        "",
        f"* Made from {made_from}, with hf_dist_ext {packages.version('hf_dist_ext')}.",
        *(f"* Trained: {_stage(life)}{_share(life)}." for life in reports),
        f"* Task: `{run.options.task}`. Processes: {report['world_size']}{_hardware(lives)}. Every setting of the run "
        "is in `run.json`, all logged figures are in `metrics.jsonl`.",
        *_replays(lives),
        "",
        "    " + "\n    ".join(line.format(folder=folder, quoted=shlex.quote(str(folder))) for line in to_load),
        *_prompts(folder, run),
        *_figures(report, reports, curves.METRICS in pictures),
        *([f"\n![The training loss at each logged step.]({curves.LOSS})"] if curves.LOSS in pictures else []),
        *_details("Run file", ["```json", json.dumps(given, indent=2, ensure_ascii=False), "```"]),
        "",
    ]
    return "\n".join(lines)


def _stage(life: Mapping[str, Any]) -> str:
    return f"{life['name']}: " if "name" in life else ""


def _share(life: Mapping[str, Any]) -> str:
    share = f"{life['trained_share']:.2%} of the parameters"
    if "parameters" in life:  # a stage that an earlier version finished does not say it
        share += f" ({life['trained_parameters']:,} of {life['parameters']:,})"
    return f"{share}, in {life['train_seconds']:,} s"


def _hardware(lives: Sequence[Life]) -> str:
    on = dict.fromkeys(f"{life.strategy} on {life.device}".removeprefix("none on ") for life in lives)
    return f" ({', then '.join(on)})" if on else ""


def _replays(lives: Sequence[Life]) -> list[str]:
    return [
        f"* {life.name + ': ' if life.name else ''}The gradient cache encoded every chunk twice. Embeddings of both "
        f"passes differed by at most {life.replay_error:.1e} of the largest magnitude of their chunk (`replay_error`"
        + (f"; `replay_tolerance` {life.replay_tolerance:g})." if life.replay_tolerance is not None else ").")
        for life in lives
        if life.replay_error is not None
    ]


def _prompts(folder: Path, run: Run) -> list[str]:
    path = folder / "config_sentence_transformers.json"
    prompts = json.loads(path.read_text(encoding="utf-8")).get("prompts") if path.is_file() else run.options.prompts
    rows = [
        f"| `{name}` | {_cell(json.dumps(text, ensure_ascii=False))} |"
        for name, text in (prompts or {}).items()
        if text
    ]
    return ["", "| prompt | text before each row |", "|---|---|", *rows] if rows else []


def _figures(report: Mapping[str, Any], reports: Sequence[Mapping[str, Any]], is_drawn: bool) -> list[str]:
    if not (rows := final_model.figures_of(report)):
        return []
    picture = [f"![The figures of each evaluation, by step.]({curves.METRICS})", ""] if is_drawn else []
    kept = [f"{line}." for life in reports for line in final_model.kept_lines(life)]
    table = [f"| {' | '.join(row)} |" for row in (["held out", "before", "after"], ["---"] * 3, *rows)]
    return ["", "### Before and after", "", *picture, *(["\n".join(kept), ""] if kept else []), *table]


def _cell(text: str) -> str:
    """Of a table in Markdown, as it stands there and not as markup."""
    for sign, name in {"&": "&amp;", "<": "&lt;", "|": "\\|", "`": "\\`", "*": "\\*", "_": "\\_"}.items():
        text = text.replace(sign, name)
    return text


def _details(title: str, lines: Sequence[str]) -> list[str]:
    return ["", f"<details><summary>{title}</summary>", "", *lines, "", "</details>"]

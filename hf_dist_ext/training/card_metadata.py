"""The YAML head of a model's card: what the hub shows of it and finds it by."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from huggingface_hub.utils import HFValidationError, validate_repo_id

from hf_dist_ext.run.config import Run
from hf_dist_ext.run.evaluations import parse_evaluations
from hf_dist_ext.run.files import looks_like_a_path
from hf_dist_ext.run.sources import BUILT_IN

OURS = "hf_dist_ext"
# What a folder holds: the library that loads it by its name, and what its model is for.
LIBRARIES = {
    "sentence-transformers": ("sentence-transformers", "sentence-similarity"),
    "image-text-to-text": ("transformers", "image-text-to-text"),
    "part": (OURS, None),
}
TASKS = {"retrieval": "information-retrieval", "sts": "semantic-similarity"}  # other types have the same name there


def kind_of(folder: Path, task: str) -> str:
    """Which of LIBRARIES a folder is; "part" holds what was trained, and the rest is needed to load it."""
    adapters = folder / "adapter_config.json"
    has_base = not adapters.is_file() or json.loads(adapters.read_text(encoding="utf-8"))["base_model_name_or_path"]
    if (folder / "trainable.safetensors").is_file() or not has_base:
        return "part"
    found = "sentence-transformers" if (folder / "modules.json").is_file() else task
    return found if found in LIBRARIES else "part"


def class_of(folder: Path) -> str:
    """The class of sentence-transformers that its folder is loaded by."""
    path = folder / "config_sentence_transformers.json"
    own = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return own.get("model_type", "SentenceTransformer")


def metadata(
    folder: Path, run: Run, figures: Mapping[str, float | None], losses: Sequence[str], rows: int | None
) -> ModelCardData:
    """`figures`: after training, by name. `losses`: names of classes. `rows`: of training, None for a stream."""
    kind, config = kind_of(folder, run.options.task), run.options
    library, pipeline = LIBRARIES[kind]
    tags = [OURS, "generated_from_trainer"]
    if kind == "sentence-transformers":
        is_of_tokens = class_of(folder) == "MultiVectorEncoder"
        tags += ["sentence-transformers", "sentence-similarity", "feature-extraction"]
        tags += ["multi-vector", "late-interaction"] if is_of_tokens else ["dense"]
    has_adapters = (folder / "adapter_config.json").is_file()
    tags += ["lora"] if config.use_lora else []
    tags += [] if rows is None else [f"dataset_size:{rows}"]
    tags += [f"loss:{name}" for name in losses]
    base = config.model_name_or_path if is_hub_id(config.model_name_or_path) else None
    relation = {} if base is None else {"base_model_relation": "adapter" if has_adapters else "finetune"}
    return ModelCardData(
        base_model=base,
        datasets=[name for name in dataset_names(run) if is_hub_id(name)] or None,
        library_name=library,
        pipeline_tag=pipeline,
        tags=tags,
        model_name=folder.resolve().name,
        eval_results=_results(run, figures) or None,
        **relation,
    )


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


def _results(run: Run, figures: Mapping[str, float | None]) -> list[EvalResult]:
    kinds = {one.name: entry["type"] for one, entry in _evaluations(run)}
    found = []
    for name, value in figures.items():
        if value is None:
            continue
        data = next((data for data in sorted(kinds, key=len, reverse=True) if name.startswith(f"{data}_")), None)
        metric = name if data is None else name.removeprefix(f"{data}_")
        task = "information-retrieval" if run.options.task == "embedding" else run.options.task
        task = task if data is None else TASKS.get(kinds[data], kinds[data])
        found.append(
            EvalResult(
                task_type=task,
                task_name=task.replace("-", " "),
                dataset_type=data or "held-out",
                dataset_name=data or "held-out rows",
                metric_type=metric,
                metric_name=metric.replace("_", " "),
                metric_value=round(value, 6),
            )
        )
    return found


def _evaluations(run: Run) -> list[tuple[Any, dict[str, Any]]]:
    entries = run.options.evaluations or []
    return list(zip(parse_evaluations(entries), entries, strict=True))

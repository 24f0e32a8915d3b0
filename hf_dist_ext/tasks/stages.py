"""Stages: one trainer after another, each with a fresh optimizer and a fresh wrap, on the weights before it.

Unfreezing under a live wrapper is wrong (DDP's ranks drift apart, FSDP2 refuses), so a stage ends with its whole model
in a folder and the next one starts as a run from that folder would; resuming takes the same way.

(1) before anything trains, every stage's arguments are made once and its freeze plan is resolved on the model
(2) the model of the first stage is the run's, that of every other one is read from the folder before it
(3) after a stage all ranks gather the whole weights, the first one writes them, adapters merged: into the stage's
    folder, those of the last stage into output_dir. Weights of another precision than most stand in a file of their
    own, bit for bit
(4) the mark: a manifest in the stage's folder, written when the weights are on the disk, with the stage's report and
    what has trained so far

The marks of a stage that starts, and of those after it, are withdrawn, and the checkpoints of those after it are left
aside: they belong to another attempt.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import nn
from transformers.utils import logging

from hf_dist_ext.checkpoints import manifest, resume
from hf_dist_ext.errors import UsageError
from hf_dist_ext.frozen.who_trains import plan_freezing
from hf_dist_ext.models.adapters import adapters_of, merged_weights, name_without_adapters
from hf_dist_ext.models.embedder import is_of_sentence_transformers
from hf_dist_ext.run import lease
from hf_dist_ext.run.config import Run
from hf_dist_ext.strategies import consensus
from hf_dist_ext.strategies.tensors import is_split
from hf_dist_ext.tasks.parts import Parts, build_parts, make_arguments
from hf_dist_ext.training.trainer import DistTrainer

logger = logging.get_logger(__name__)

OTHER_PRECISION = "other_precision.safetensors"
RESUME = "resume_from_checkpoint"

TrainOnce = Callable[[Run, Any, Parts, Callable[[], None]], tuple[DistTrainer, dict[str, Any]]]


def run_stages(run: Run, train_once: TrainOnce) -> list[dict[str, Any]]:
    """Train what is not finished; every stage's report, in order. `train_once` trains parts and reports."""
    for stage in run.stages:  # (1)
        with _naming(stage):
            args = make_arguments(stage)
    decided = consensus.together(lambda: [(stage.is_done, stage.training.get(RESUME)) for stage in run.stages])[0]
    for stage, (is_done, asked) in zip(run.stages, decided, strict=True):  # as rank 0 has found the folders
        stage.is_done, stage.training[RESUME] = is_done, asked
    if args.process_index == 0:
        _say_edited(run)
    todo = [stage for stage in run.stages if not stage.is_done]
    for index, stage in enumerate(run.stages):
        if stage in todo:
            if index:
                resume.wait_to_see(args, Path(run.stages[index - 1].training["output_dir"]))
                _start_from(stage, run.stages[index - 1])
            args = make_arguments(stage)
            parts = build_parts(stage, args)
            if stage is todo[0]:
                for other in todo:
                    with _naming(other):
                        fields = [other.training.get(name) for name in ("trainable_modules", "frozen_modules")]
                        plan_freezing(parts.model, *fields)
            if index:
                _carry(parts.model, Path(run.stages[index - 1].training["output_dir"]))
            _train(run, stage, args, parts, train_once)
            del parts
            gc.collect()
    return consensus.together(lambda: args.process_index == 0 and _reports(run))[0]


def _fields_of(run: Run, stage: Run) -> dict[str, Any]:
    """Those that the stage itself has in the run file."""
    fields = run.options.stages[run.stages.index(stage)]
    return {name: value for name, value in fields.items() if not name.startswith("_")}


def _say_edited(run: Run) -> None:
    """A finished stage is passed over, whatever its fields say now."""
    for stage in run.stages:
        if not stage.is_done:
            continue
        now = _fields_of(run, stage)
        saved = (manifest.read(stage.training["output_dir"]) or {}).get("stage_fields", now)
        names = [name for name in {**saved, **now} if saved.get(name) != now.get(name)]
        if names:
            words = ", ".join(f"{name} {saved.get(name)} -> {now.get(name)}" for name in names)
            logger.warning(
                f'stage "{stage.name}" is finished and not trained again, though it was edited since: {words}. To '
                "train all stages anew, give --overwrite_output_dir without resume_from_checkpoint."
            )


def _withdraw_marks(stages: list[Run]) -> None:
    """When the first of them starts."""
    folders = [stage.training["output_dir"] for stage in stages]
    for folder in folders:
        Path(folder, manifest.MANIFEST).unlink(missing_ok=True)
    for folder in folders[1:]:
        if manifest.checkpoints_in(folder):
            manifest.begin_run(folder)


def _reports(run: Run) -> list[dict[str, Any]]:
    return [manifest.read(stage.training["output_dir"])["stage"] for stage in run.stages]


def _train(run: Run, stage: Run, args: Any, parts: Parts, train_once: TrainOnce) -> None:
    trainer, report = train_once(stage, args, parts, partial(_withdraw_marks, run.stages[run.stages.index(stage) :]))
    is_last = stage is run.stages[-1]
    folder = Path(run.training["output_dir"] if is_last else args.output_dir)
    with trainer.files.replacing(folder):
        facts = {"stage": {"name": stage.name} | _in_short(report) | report} | write_model(trainer, folder)  # (3)
    facts["stage_fields"] = _fields_of(run, stage)
    if args.should_save:
        files = manifest.record(folder, _own_files(folder))  # on the disk from here on
        manifest.sync_folder(folder)
        if is_last:  # other files of output_dir are written again at every start
            files = {f"../{name}": file for name, file in files.items() if name.endswith((".safetensors", ".bin"))}
        manifest.commit(args.output_dir, files, facts)  # (4)
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.free_memory()


def _in_short(report: dict[str, Any]) -> dict[str, Any]:
    """What one reads first of a stage, without looking into "before" and "after"."""
    accuracy = {f"accuracy_{when}": report[when].get("answer_accuracy") for when in ("before", "after")}
    return {name: value for name, value in accuracy.items() if value is not None} | {
        "seconds": report["train_seconds"]
    }


# (1) ---------------------------------------------------------------------------------------------------------------


@contextmanager
def _naming(stage: Run) -> Iterator[None]:
    """UsageErrors inside name the stage."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f'stage "{stage.name}": {error}') from None


# (2) ---------------------------------------------------------------------------------------------------------------


def _start_from(stage: Run, before: Run) -> None:
    """The stage as a run that starts from the folder of the one before it."""
    config, folder = stage.options, before.training["output_dir"]
    has_frozen_part = config.use_lora or any(stage.given.get(name) for name in ("trainable_modules", "frozen_modules"))
    if has_frozen_part or config.dtype is not None:  # else all of it trains, in float32
        config.dtype = manifest.read(folder)["dtype"]
    config.model_name_or_path = folder
    config.model_config = config.model_revision = config.tokenizer_name = None


def _carry(model: nn.Module, folder: Path) -> None:
    """What from_pretrained has rounded, as it was; and the names that a checkpoint must hold beside its own."""
    path = folder / OTHER_PRECISION
    if path.is_file() and any(map(is_split, model.parameters())):
        raise UsageError(
            f"{path} holds weights of another precision than the rest, which can not be put into a model under tensor "
            "parallelism. Train the stages before with it too, or without bf16."
        )
    own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    full = {plain: name for name in own if (plain := name_without_adapters(name)) is not None}
    for name, value in (load_file(path) if path.is_file() else {}).items():
        own[full[name]].data = value
    model._carried_parameters = tuple(full[name] for name in manifest.read(folder)["carried"])


# (3) ---------------------------------------------------------------------------------------------------------------


def write_model(trainer: DistTrainer, folder: Path) -> dict[str, Any]:
    """Every rank calls it; the first one writes a folder that from_pretrained loads. Returns what `_carry` needs."""
    weights = trainer.whole_weights()
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    plan = trainer.freeze_plan
    trained = {name for name, p in model.named_parameters() if p.requires_grad} if plan is None else plan.saved
    if adapters_of(model):
        trained |= {name for name, _ in model.named_parameters() if name.endswith(".base_layer.weight")}
    trained |= set(getattr(model, "_carried_parameters", ()))
    carried = {plain for name in trained if (plain := name_without_adapters(name)) is not None}
    facts = {"dtype": "float32", "carried": sorted(carried)}
    if trainer.args.should_save:
        folder.mkdir(parents=True, exist_ok=True)
        if adapters_of(model):
            base = model.get_base_model() if hasattr(model, "get_base_model") else model
            model, weights = base, merged_weights(model, weights)
        sizes = Counter()
        for value in weights.values():
            sizes[value.dtype] += value.numel() * value.is_floating_point()
        most = sizes.most_common(1)[0][0]
        facts["dtype"] = str(most).removeprefix("torch.")
        other = {k: v.clone().contiguous() for k, v in weights.items() if v.is_floating_point() and v.dtype != most}
        (folder / OTHER_PRECISION).unlink(missing_ok=True)
        if other:
            save_file(other, folder / OTHER_PRECISION)
        if is_of_sentence_transformers(model):
            trainer.files.write_merged(folder, weights)
        else:
            if trainer.processing_class is not None:
                trainer.processing_class.save_pretrained(folder)
            with trainer.strategy.saving_whole(model):
                model.save_pretrained(folder, state_dict=weights)
    trainer.accelerator.wait_for_everyone()
    return facts


def _own_files(folder: Path) -> list[str]:
    """The model's files of a stage's folder or the run's: neither checkpoints nor logs, which change or go."""
    others = ("checkpoint-", "stage_", "runs/", "metrics.jsonl", manifest.RUN, lease.NAME)
    return [name for name in manifest.files_in(folder) if not name.startswith(others)]


def summary(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """metrics.json of a staged run."""
    return {
        "before": reports[0]["before"],
        "after": reports[-1]["after"],
        "train_seconds": round(sum(report["train_seconds"] for report in reports), 2),
        "world_size": reports[-1]["world_size"],
        "stages": reports,
    }

"""A task builds its parts; `scripts/train_hf.py` trains whatever they are.

(1) `make_arguments` turns the run's training fields into `DistTrainingArguments`
(2) `build_parts` asks the task's own module for model, data, collator, processor, loss and metrics
(3) `Parts.make_trainer` wires them
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from huggingface_hub import HfApi, constants
from torch.utils.checkpoint import checkpoint
from transformers import set_seed
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

from hf_dist_ext import launched, policy
from hf_dist_ext.checkpoints import hub
from hf_dist_ext.errors import RunError, UsageError
from hf_dist_ext.evaluation import evaluators
from hf_dist_ext.failures import joining
from hf_dist_ext.run.config import Run
from hf_dist_ext.run.fields import show
from hf_dist_ext.run.files import upload_command
from hf_dist_ext.run.rules import closest_folder
from hf_dist_ext.training import console, model_card, same_run
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.meter import MetricsFile
from hf_dist_ext.training.metrics import similarity_of
from hf_dist_ext.training.nonfinite import LIMIT
from hf_dist_ext.training.trainer import DistTrainer

TASKS = {  # each has build(run, args) -> Parts, and hints(run)
    "embedding": "embedding",
    "image-text-to-text": "image_text",
}
WORKERS = 2  # that load batches for an accelerator, where the run file says nothing
# A word of transformers' error: what is said in its place.
OUR_WORDS = {
    "support bf16": "bf16=true, but no GPU that computes in bfloat16 is visible. Remove bf16, or add use_cpu=true: a "
    "CPU computes in bfloat16 too, more slowly than in float32 where it has no instructions for it.",
    "--tf32": "tf32=true, but no GPU that computes in TF32 (NVIDIA's Ampere and later) is visible. Remove tf32.",
}


@dataclass
class Parts:
    """What a trainer is made of.

    `metrics`: names of the evaluation's figures without "eval_", reported before and after training.
    `evaluations`: what is evaluated beside `eval_dataset`, of `read_evaluations`.
    `trainer_options` are further arguments of `trainer_class`.
    """

    model: torch.nn.Module
    train_dataset: Any
    eval_dataset: Any
    data_collator: Callable
    processing_class: Any
    loss: Callable | None = None
    compute_metrics: Callable | None = None
    trainer_class: type[DistTrainer] = DistTrainer
    trainer_options: dict[str, Any] = field(default_factory=dict)
    metrics: tuple[str, ...] = ()
    evaluations: list[Any] = field(default_factory=list)

    @property
    def evaluates(self) -> bool:
        return self.eval_dataset is not None or bool(self.evaluations)

    def make_trainer(self, args: DistTrainingArguments) -> DistTrainer:  # (3)
        names = ("data_collator", "train_dataset", "eval_dataset", "processing_class", "compute_metrics", "loss")
        given = {name: getattr(self, name) for name in names} | {"evaluator": self._evaluator(args)}
        trainer = self.trainer_class(self.model, args, **given, **self.trainer_options)
        # a run from a file has them always, a DistTrainer when it uses our parts
        for watcher in (MetricsFile(), trainer.scaling):
            trainer.remove_callback(type(watcher))
            trainer.add_callback(watcher)
        for stock in console.STOCK:
            trainer.remove_callback(stock)
        is_hidden = partial(evaluators.is_hidden, evaluator=trainer.evaluator)
        slow = partial(_why_slow, trainer)
        trainer.add_callback(console.Console(lambda: self._facts(trainer), is_hidden, slow))
        return trainer

    def _evaluator(self, args: DistTrainingArguments) -> Any:
        if not self.evaluations:
            return None
        from hf_dist_ext.evaluation.from_files import evaluators_of  # importing its evaluators takes seconds

        collator = self.data_collator
        given = self.evaluations, self.model, collator.columns, collator.prompts
        more = {"batch_size": args.eval_batch_size, "similarity": similarity_of(self.loss)}
        return evaluators_of(*given, **more)

    def figures(self, trainer: DistTrainer) -> list[str]:
        """Names of those that are reported before and after training, of a trainer that has evaluated."""
        return [*self.metrics, *evaluators.headlines_of(trainer.evaluator)]

    def _facts(self, trainer: DistTrainer) -> dict[str, str]:
        """What the run is made of, for people."""
        args, sharding = trainer.args, trainer.strategy.name
        rows = f"{len(self.train_dataset):,} rows" if hasattr(self.train_dataset, "__len__") else "a stream"
        held_out = self.eval_dataset.values() if isinstance(self.eval_dataset, dict) else [self.eval_dataset]
        if all(hasattr(one, "__len__") for one in held_out):
            rows += f", {sum(map(len, held_out)):,} to evaluate on"
        spread = [sharding] * (sharding != "none")
        spread += [torch.distributed.get_backend()] if args.world_size > 1 else []
        precision = "bf16" if args.bf16 else "fp16" if args.fp16 else "tf32" if args.tf32 else "float32"
        facts = {
            "data": rows,
            "devices": ", ".join([f"{args.world_size} x {args.device.type}", *spread, precision]),
        }
        if trainer.loss is not None and args.gradient_cache_chunk_size is not None:
            size = args.gradient_cache_chunk_size
            facts["chunks"] = f"{'as many rows as fit' if size == 'auto' else f'{size} rows'} in memory at a time"
        size, of_eval = args.train_batch_size, args.eval_batch_size
        if trainer.loss is not None and self.eval_dataset is not None and size != of_eval:
            facts["losses"] = f"{size} rows per device while training, {of_eval} in evaluations: do not compare them"
        return facts


def _why_slow(trainer: DistTrainer, figures: Mapping[str, float]) -> list[str]:
    from hf_dist_ext.strategies.tensors import num_elements

    args, parameters = trainer.args, list(trainer.model.parameters())
    module = None if args.device.type == "cpu" else torch.get_device_module(args.device)
    return console.why_slow(
        figures,
        workers=args.dataloader_num_workers,
        processes=args.world_size,
        device_bytes=module.mem_get_info(args.device)[1] if hasattr(module, "mem_get_info") else 0,
        is_sharded=trainer.strategy.name.startswith("fsdp"),
        trained_parameters=sum(num_elements(p) for p in parameters if p.requires_grad),
        frozen_bytes=sum(num_elements(p) * p.itemsize for p in parameters if not p.requires_grad),
    )


def loading_beside_a_device(may_have_workers: bool) -> dict[str, Any]:
    """How batches are loaded where the run file does not say: while an accelerator trains, two processes collate, sort
    and cut the next ones. Not for a stream, whose order depends on their number, nor where processes are not forked:
    then the dataset would have to be pickled."""
    has_device, forks = torch.accelerator.is_available(), multiprocessing.get_all_start_methods()[0] == "fork"
    workers = WORKERS if has_device and forks and may_have_workers else 0
    return {"dataloader_pin_memory": has_device, "dataloader_num_workers": workers}


def make_arguments(run: Run) -> DistTrainingArguments:  # (1)
    training = dict(run.training)
    yaml_precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if run.given.get(yaml_precision) is False and not (training.get("bf16") or training.get("fp16")):
        raise UsageError(
            f"{yaml_precision}=false, but mixed_precision of the accelerate YAML is {yaml_precision}. Make them agree."
        )
    if importlib.util.find_spec("tensorboard"):
        training.setdefault("report_to", ["tensorboard"])
    may_have_workers = not (run.options.streaming or training.get("use_cpu"))
    training = loading_beside_a_device(may_have_workers) | training
    if training.get("max_nonfinite_steps", "auto") == "auto":
        training["max_nonfinite_steps"] = LIMIT
    training.setdefault("preemptible", not (training.get("save_only_model") or training.get("enable_jit_checkpoint")))
    # The base of the adapters is nowhere else; an embedding model ends as a folder that others open.
    is_whole = run.options.model_config is not None if run.options.use_lora else run.options.task == "embedding"
    if is_whole and not run.name:
        training.setdefault("save_full_model", True)
    try:
        with joining():  # transformers makes the process group here
            args = DistTrainingArguments(**training)
    except (TypeError, ValueError) as error:  # transformers checks its fields against each other here
        theirs = " ".join(str(error).split())
        raise UsageError(next((ours for word, ours in OUR_WORDS.items() if word in theirs), theirs)) from error
    _refuse_unread_options(args)
    same_run.check_fields(run.flat())
    if "trackio" in args.report_to:
        _settle_trackio(args)
    return args


def _refuse_unread_options(args: DistTrainingArguments) -> None:
    """A layer takes any option of checkpointing, and a schedule without options ignores them."""
    schedule = TYPE_TO_SCHEDULER_FUNCTION[args.lr_scheduler_type]
    not_options = {"function", "args", "optimizer", "num_warmup_steps", "num_training_steps"}
    for name, reader in (("gradient_checkpointing_kwargs", checkpoint), ("lr_scheduler_kwargs", schedule)):
        takes = [one for one in inspect.signature(reader).parameters if one not in not_options]
        wrong = [one for one in getattr(args, name) or {} if one not in takes]
        if wrong and (reader is checkpoint or "kwargs" not in takes):
            takes = ", ".join(one for one in takes if one != "kwargs")
            raise UsageError(f'{name} has "{wrong[0]}", and takes {takes}.')


def _settle_trackio(args: DistTrainingArguments) -> None:
    if args.run_name is None:
        # Trainer's callback ends trackio's run with the training; by its name the evaluation after it finds that run.
        args.run_name = f"{Path(args.output_dir).resolve().name}-{time.strftime('%Y%m%d-%H%M%S')}"
    if args.trackio_static_space_id is None:
        args.trackio_static_space_id = False  # else a push of the model also publishes the figures, in a Space


def build_parts(run: Run, args: DistTrainingArguments) -> Parts:  # (2)
    if (size := launched.mesh_size("tp")) > 1 and run.options.task != "embedding":
        raise UsageError(
            f'tp_size={size} in the accelerate YAML: task "{run.options.task}" does not run under tensor parallelism. '
            "Use multi_gpu_fsdp."
        )
    set_seed(args.seed)  # every process builds the same weights
    _keep_precision_of_frozen_weights(run, args)
    parts = _module(run).build(run, args)
    if not parts.evaluates:
        _refuse_evaluation(run)
    # The first evaluation is the training loop's own: outside of it, FSDP2 has no optimizer to shard the model with.
    args.eval_on_start = parts.evaluates and run.given.get("eval_on_start", True)
    return parts


def _check_available(kind: str, name: str | None, revision: str | None) -> None:
    """UsageError for what is neither a folder here nor a repository in the cache or on the hub, which is asked once:
    each of transformers' loaders would ask again for minutes, and then say that it could not connect."""
    cached = Path(constants.HF_HUB_CACHE, f"models--{(name or '').replace('/', '--')}")
    if name is None or Path(name).exists() or cached.is_dir():
        return
    try:
        HfApi().repo_info(name, revision=revision)
    except Exception as error:  # the hub client raises a different type for each: no such name, no network, offline
        raise UsageError(
            f'{kind} "{name}" is neither a folder here nor available from the hub '
            f"({type(error).__name__}). {closest_folder(name)}Check the name and revision; offline "
            "(HF_HUB_OFFLINE), give a folder or a name that is in the cache already."
        ) from error


def _refuse_evaluation(run: Run) -> None:
    """Fields that say how to evaluate, where nothing is evaluated."""
    fields = (
        "eval_on_start",
        "eval_strategy",
        "generate_max_new_tokens",
        "max_eval_samples",
        "load_best_model_at_end",
    )
    given = [name for name in fields if run.given.get(name) not in (None, False, "no")]
    if given:
        raise UsageError(
            f"{given[0]}={show(run.given[given[0]])}, but there are no rows to evaluate on. Give eval_split, "
            f"eval_dataset_name, eval_holdout or evaluations, or remove {given[0]}."
        )


def _keep_precision_of_frozen_weights(run: Run, args: DistTrainingArguments) -> None:
    """Frozen weights under autocast stay as their files hold them, the base of adapters too. What trains is made
    float32 by peft and by the freeze plan, which can not be done to weights that are split over processes already
    (tensor parallelism): those are float32."""
    if launched.mesh_size("tp") > 1:
        return
    has_frozen_part = args.trainable_modules is not None or args.frozen_modules is not None or run.options.use_lora
    has_files, has_autocast = bool(run.options.model_name_or_path), args.bf16 or args.fp16
    if policy.keeps_precision_of_files(run.options.dtype, has_files, has_frozen_part, has_autocast):
        run.options.dtype = "auto"


def check_available(run: Run) -> None:
    """UsageError for a model or tokenizer that is neither here nor on the hub, before anything else asks for it."""
    _check_available("Model", run.options.model_name_or_path, run.options.model_revision)
    _check_available("Tokenizer", run.options.tokenizer_name, None)


def hints(run: Run) -> list[str]:
    """Lines printed at the end; "{folder}" is where the model is."""
    return _module(run).hints(run)


def push_at_end(trainer: DistTrainer, folder: Path) -> None:
    """The model, with a card that names the repository. RunError names the command that pushes later."""
    args, later = trainer.args, upload_command(folder, trainer.hub_model_id)
    later += " --private" * bool(args.hub_private_repo) + f" --revision {args.hub_revision}" * bool(args.hub_revision)
    remedy = f"The model and its card are in {folder}. Push them with: {later}"
    model_card.named(folder, trainer.hub_model_id)  # which the command pushes, too
    with hub.reached("the push at the end of the run failed", remedy, args.hub_token, RunError):
        hub.push_saved(trainer, "End of training", revision=args.hub_revision)
    print(f"pushed:   {trainer.hub_model_id}")


def _module(run: Run) -> ModuleType:
    return importlib.import_module(f"{__package__}.{TASKS[run.options.task]}")

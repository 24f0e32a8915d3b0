"""`DistTrainingArguments`: TrainingArguments with our fields, their help and their cross-field rules."""

import os
from dataclasses import dataclass
from typing import Any, Literal

from transformers import TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.utils import logging

from hf_dist_ext import launched
from hf_dist_ext.checkpoints import async_save
from hf_dist_ext.errors import UsageError
from hf_dist_ext.run import deepspeed_install
from hf_dist_ext.run.config import fields_of_run_file, option
from hf_dist_ext.run.fields import check_value
from hf_dist_ext.strategies import choose
from hf_dist_ext.strategies.collectives import has_accelerator, must_use_cpu
from hf_dist_ext.training import learning_rate, sentence_arguments

logger = logging.get_logger(__name__)


@dataclass
class DistTrainingArguments(TrainingArguments):
    """TrainingArguments for `DistTrainer`. Differences from the parent's behaviour:

    * started as several processes on a machine without an accelerator, `use_cpu` is set, so that they form a gloo
      group instead of each training alone;
    * `bf16`/`fp16` follow the mixed precision of the accelerate YAML when neither is set, so that code which asks the
      arguments agrees with what runs;
    * with a loss over embeddings or frozen parts, an update whose loss or gradient norm is not finite is skipped
      (`max_nonfinite_steps=None`: as the parent).

    No default of the parent is changed.
    """

    gradient_cache_chunk_size: int | str | None = option(
        None,
        "Rows per chunk of the gradient cache: activation memory is that of one chunk whatever the batch. 'auto' "
        "finds it in the first steps; on a CPU it is a fixed number of tokens, by the model's layers and their width. "
        "Null: no cache unless gradient_cache_chunk_tokens or _patches is set.",
    )
    gradient_cache_chunk_tokens: int | None = option(
        None, "Tokens per chunk, padding included; alone or together with gradient_cache_chunk_size."
    )
    gradient_cache_chunk_patches: int | None = option(
        None, "Image patches per chunk, beside rows and tokens: a row with several images costs far more."
    )
    gradient_cache_fsdp: Literal["auto", "speed", "memory"] = option(
        "auto",
        "FSDP with the cache. 'speed': gather weights and reduce gradients once per step, keeping both whole in "
        "between. 'memory': per chunk. 'auto': speed when that takes under a quarter of the free memory. The same "
        "for the gradients of ZeRO-2 and 3, whose weights are gathered per chunk in either.",
    )
    gradient_cache_keep_graph: int | str | None = option(
        None,
        "Chunks whose graph is kept from the first pass instead of being encoded twice; 'auto' keeps as many as the "
        "memory budget holds. With all kept a step costs what it costs without the cache. Null: 'auto' on an "
        "accelerator whose chunk size is 'auto', else 0. On a CPU 'auto' is 0.",
    )
    gradient_cache_memory_gib: float | None = option(
        None,
        "Memory that 'auto' plans a step with, beside weights and optimizer state: gradients, gathered weights, "
        "activations. Null: what an accelerator has free less 5 %; on a CPU (activations only) 1 GiB.",
    )
    gradient_cache_sort: bool = option(
        True, "Sort the rows of a batch by length before cutting it; false trims neighbours only."
    )
    gradient_cache_packing: Literal["auto", True, False] = option(
        "auto",
        "Send the rows of a chunk through the model end to end, so that no padding is computed. 'auto': where the "
        "model can and padding takes enough of a batch. True: always, and a model that can not is refused.",
    )
    no_duplicates_in_batch: bool | None = option(
        None,
        "Order the training rows so that no global batch holds the same query or the same positive twice, as far as "
        "there are others to take. Null: on with a loss over embeddings and a map-style dataset of texts.",
    )
    batch_sampler: Any | str | None = option(
        None,
        "Which rows make a global batch, as in sentence-transformers: 'batch_sampler' (any), 'no_duplicates' or "
        "'no_duplicates_hashed' (no text twice, in whatever column), 'group_by_label' (two rows of each label or "
        "more); from Python also a DefaultBatchSampler or a function that makes one. Null: no_duplicates_in_batch.",
    )
    multi_dataset_batch_sampler: Any | str | None = option(
        None,
        "Which dataset of a DatasetDict a global batch is of, as in sentence-transformers: 'proportional' (every row "
        "once in an epoch) or 'round_robin' (in turn, until one is at its end); from Python also a class or a "
        "function. Null: 'proportional' of a DatasetDict, and by weight of a run file's datasets.",
    )
    prompts: Any | str | None = option(
        None,
        "Of a SentenceTransformer, as there: a prompt, column -> prompt, dataset -> prompt, or dataset -> {column -> "
        "prompt}. A list of prompts: each row draws one. Null: none.",
    )
    router_mapping: dict[str, Any] | str | None = option(
        None,
        "Of a SentenceTransformer with a Router: column -> route, or dataset -> {column -> route}. Null: none.",
    )
    max_length: int | str | dict[str, int] | None = option(
        None,
        "Of a SentenceTransformer: tokens kept of a text while training, of all columns or by route (query, "
        "document). Null: the model's own lengths.",
    )
    verify_checkpoint_hashes: bool = option(
        True, "Before resuming, read the checkpoint and compare it with the hashes of its manifest."
    )
    trainable_modules: list[str] | str | None = option(
        None,
        "What trains, all else is frozen: a list of groups (vision, projector, language; backbone, projection), "
        "module names or dotted suffixes, or one string, a regex over full names. Null: everything.",
    )
    frozen_modules: list[str] | str | None = option(
        None, "What does not train, written like trainable_modules; the rest trains."
    )
    learning_rates: dict[str, float] | None = option(
        None,
        'Learning rates of parts, by the names of trainable_modules: {"projector": 1e-3}. The rest has learning_rate.',
    )
    learning_rate_mapping: dict[str, float] | str | None = option(
        None,
        "Learning rates by regular expressions, as in sentence-transformers: searched in the names of parameters "
        'behind "model.", and the last that is found counts: {"embeddings": 1e-4}. The rest has learning_rate.',
    )
    warmup_ratio: float | None = option(
        None, "The share of the steps in which the learning rate grows, as a warmup_steps below 1. Null: warmup_steps."
    )
    frozen_feature_cache: str | None = option(
        None,
        "Folder for what the frozen leading part (backbone, tower, image encoder) makes of the training rows: "
        "computed once before training and used in every epoch, run and rank. Null: computed in every step.",
    )
    frozen_parts_fsdp: Literal["auto", "shard", "replicate"] = option(
        "auto",
        "Frozen parts under FSDP: 'shard' them like the rest, or 'replicate' them whole on every device, which needs "
        "no collective for them. 'auto' replicates up to a quarter of a device's memory.",
    )
    max_nonfinite_steps: int | str | None = option(
        "auto",
        "A step whose loss or gradient norm is not finite is skipped on all ranks; this many in a row end the run. "
        "Null: such steps train, as in Trainer. 'auto': 20 in a run file, with a loss over embeddings and with "
        "frozen parts, else null.",
    )
    replay_tolerance: float | None = option(
        None,
        "By how much of their largest magnitude the embeddings of a gradient cache's two passes may differ, for a "
        "model that can not be deterministic; the gradient is then as far from that of the whole batch. Null: by what "
        "rounding explains.",
    )
    max_bad_rows: int | None = option(
        None,
        "Training rows per epoch (of a stream: in the whole run), of all ranks, that may be unreadable: each "
        "is replaced by the next good one, counted and listed at the end. Null: the first one ends the run, named.",
    )
    step_timeout: float | None = option(
        None,
        "Seconds a step with its data may take, after the first; then the run ends and says which rank was where. "
        "The first step, evaluations and saves have ddp_timeout. Null: no limit of ours.",
    )
    preemptible: bool = option(
        False,
        "SIGTERM, SIGUSR1 and Ctrl-C finish the step, write a checkpoint and end train() with was_preempted true. "
        "scripts/train_hf.py has it on unless given, and then exits with code 75 (after Ctrl-C 130).",
    )
    sharding: Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"] | None = option(
        None,
        "What FSDP shards. FULL_SHARD: weights are whole only while a layer runs. SHARD_GRAD_OP: from forward to "
        "backward. HYBRID_SHARD: sharded inside a machine, copied between them. NO_SHARD: DDP. Null: the preset's.",
    )
    sharding_group_size: int | None = option(
        None, "Processes that share one copy of the model under HYBRID_SHARD. Null: those of a machine."
    )
    cpu_offload: bool | None = option(
        None,
        "FSDP keeps its shards, gradients and optimizer state in the CPU's memory: far less on the device, slower "
        "steps. Null: the preset's.",
    )
    min_num_params: int | None = option(
        None,
        "Transformer layers with fewer parameters than this are no FSDP unit of their own: fewer and larger "
        "collectives. Null: every layer is one.",
    )
    reduce_dtype: Literal["float32", "bfloat16", "float16"] | None = option(
        None,
        "The precision in which FSDP adds gradients up over chunks and reduces them. Null: float32 with a loss over "
        "embeddings, else that of the forward (bf16, fp16).",
    )
    pipeline_parallel_size: int | None = option(
        None,
        "Processes of a pipeline: consecutive ones that hold the same rows and each some layers of the model, through "
        "which the chunks of a batch go. Under tensor parallelism: groups of processes, each of which splits its "
        "layers. Null: the model is not cut.",
    )
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"] | None = option(
        None,
        "In which order the processes of a pipeline work on chunks: how long they wait for each other, and how many "
        "chunks are under way at once. Null: 1f1b.",
    )
    pipeline_stages_per_rank: int | None = option(
        None, "Stages per process, for schedules that go through the processes more than once. Null: 2."
    )
    pipeline_split: list[int] | None = option(
        None, "The number of the first layer of every stage but the first. Null: as much work for every process."
    )
    ddp_comm_hook: Literal["fp16", "bf16", "power_sgd", "batched_power_sgd", "top_k", "random_k"] | None = option(
        None,
        "Compress the gradients that DDP sends: half precision, two low-rank factors (PowerSGD), the largest elements "
        "(top_k) or some drawn at random (random_k). For slow networks and many trainable parameters; the gradients "
        "are then not exact.",
    )
    ddp_power_sgd_rank: int | None = option(
        None, "Rank of PowerSGD's factors. Null: 1. Higher is closer to the gradient."
    )
    ddp_power_sgd_warmup_steps: int | None = option(
        None, "Steps with uncompressed gradients before PowerSGD begins. Null: 1000."
    )
    ddp_compression_ratio: float | None = option(
        None, "The share of a gradient's elements that top_k and random_k send. Null: 0.01."
    )
    ddp_gradient_as_bucket_view: bool | None = option(
        None, "Gradients live in DDP's buckets instead of beside them: saves their memory once."
    )
    early_stopping_patience: int | None = option(
        None,
        "End the run after so many evaluations in a row in which metric_for_best_model was no better than the best "
        "before. Null: train to the end.",
    )
    profile_steps: int | None = option(
        None,
        "Write a torch profiler trace of this many steps, from the third on: profile_rank<r>.json in output_dir. "
        "Null: none.",
    )
    scaling_baseline: str | None = option(
        None,
        "metrics.json of a single-process run with the same batch per device: the end of this run logs "
        "scaling_efficiency, its samples per second over N times that run's. Null: none.",
    )
    lr_scale_rule: Literal["none", "linear", "sqrt"] = option(
        "none",
        "Scale learning_rate by (effective batch / lr_base_batch_size), or by its square root. The effective batch "
        "is rows per device x accumulation x devices.",
    )
    lr_base_batch_size: int | None = option(
        None, "The effective batch that learning_rate was found with, for lr_scale_rule."
    )
    resume_weights_only: bool = option(
        False,
        "With resume_from_checkpoint: take the weights only; optimizer, schedule, data and random states start anew.",
    )
    trust_checkpoint: bool = option(False, "Read checkpoints whose files may run code when they are read.")
    save_async: bool = option(
        False,
        "Training goes on while a checkpoint is written, from a copy in the CPU's memory. It counts once it is "
        "complete; the next save, the end and a preemption wait for it. Not with DeepSpeed.",
    )
    save_full_model: bool = option(
        False,
        "When only a part was trained, end with the complete model all the same, adapters merged. Off: what was "
        "trained; hf-dist merge makes the complete model of it. Run files turn it on for embedding models, with "
        "LoRA only for those of a model_config; not in stages.",
    )
    allow_changed_data: bool = option(
        False, "Resume though the seed of the order or the training rows are not those of the checkpoint."
    )
    overwrite_output_dir: bool = option(
        False,
        "scripts/train_hf.py: train into an output_dir that already holds another run. train() from Python starts "
        "beside it in any case; its checkpoints stay, and are not resumed.",
    )

    def __post_init__(self) -> None:
        if launched.uses_deepspeed():
            deepspeed_install.check()
        sentence_arguments.check(self)
        self._check_values()
        self._check_gradient_cache()
        self._check_freezing()
        choose.check_arguments(self)
        learning_rate.check(self)
        async_save.check(self)
        if self.preemptible and self.save_only_model:
            raise UsageError(
                "preemptible=true writes a checkpoint to go on from, and save_only_model=true none that could be. "
                "Remove one of them."
            )
        if must_use_cpu():
            self.use_cpu = True
        elif launched.uses_deepspeed() and not has_accelerator():
            self.ddp_backend = self.ddp_backend or "gloo"  # without one, accelerate counts one process
            deepspeed_install.prepare_cpu()
        yaml_precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        if not (self.bf16 or self.fp16) and yaml_precision in ("bf16", "fp16"):
            setattr(self, yaml_precision, True)
            logger.info(f"{yaml_precision}=True, as the accelerate configuration's mixed_precision says.")
        super().__post_init__()
        if self.fp16 and self.device.type == "cpu":
            raise UsageError(
                "fp16=true, and this process computes on a CPU, for which accelerate has no float16: it would train "
                "in float32 without a word. Remove it (or mixed_precision of the accelerate YAML), or use bf16."
            )
        self._check_early_stopping()
        plugin = getattr(self, "deepspeed_plugin", None)
        if plugin is not None and not plugin.zero3_init_flag:
            # Else transformers 5.23 builds and loads models in parts under ZeRO-3, whatever the flag says.
            unset_hf_deepspeed_config()

    def _check_values(self) -> None:
        """Our fields are held to the bounds and the choices that a run file's are."""
        if isinstance(self.gradient_cache_chunk_size, str) and self.gradient_cache_chunk_size.isdigit():
            self.gradient_cache_chunk_size = int(self.gradient_cache_chunk_size)  # of HfArgumentParser
        ours = DistTrainingArguments.__annotations__.keys()
        for name, one in fields_of_run_file().items():
            if name in ours and (one.bounds or any(kind == "literal" for kind, _ in one.type)):
                check_value(one, getattr(self, name), "the arguments")

    def _check_gradient_cache(self) -> None:
        """What would be taken and have no effect."""
        size, keep, memory = (
            getattr(self, f"gradient_cache_{name}") for name in ("chunk_size", "keep_graph", "memory_gib")
        )
        if self.gradient_cache_packing is True and not self.uses_gradient_cache:
            raise UsageError(
                "gradient_cache_packing=true packs the chunks of a gradient cache. Set gradient_cache_chunk_size, or "
                "remove gradient_cache_packing."
            )
        useless = "gradient_cache_keep_graph" if keep not in (0, None) else "gradient_cache_memory_gib"
        if (keep not in (0, None) or memory is not None) and not self.uses_gradient_cache:
            raise UsageError(
                f"{useless}={getattr(self, useless)!r} needs a gradient cache. Set gradient_cache_chunk_size, or "
                f"remove {useless}."
            )
        if memory is not None and "auto" not in (size, keep):
            raise UsageError(
                f'gradient_cache_memory_gib={memory!r} is what "auto" plans with, and nothing is automatic. Set '
                'gradient_cache_chunk_size or gradient_cache_keep_graph to "auto", or remove it.'
            )
        if size == "auto" and self.gradient_cache_chunk_tokens is not None:
            raise UsageError(
                "gradient_cache_chunk_size='auto' finds the tokens itself; drop gradient_cache_chunk_tokens."
            )

    def _check_freezing(self) -> None:
        for name in ("trainable_modules", "frozen_modules"):
            value = getattr(self, name)
            if value is not None and not value:
                raise UsageError(f"{name}={value!r} names nothing. Leave it out to train everything.")
        if self.frozen_feature_cache is not None and self.trainable_modules is None and self.frozen_modules is None:
            raise UsageError(
                f"frozen_feature_cache={self.frozen_feature_cache!r} needs a frozen part: set trainable_modules or "
                "frozen_modules."
            )
        wrong = {name: rate for name, rate in (self.learning_rates or {}).items() if not rate >= 0}
        if wrong:
            raise UsageError(f"learning_rates={wrong!r}: a learning rate is 0 or more.")

    def _check_early_stopping(self) -> None:
        if self.early_stopping_patience is None:
            return
        given = {"eval_strategy": self.eval_strategy != "no", "metric_for_best_model": self.metric_for_best_model}
        if wrong := [name for name, is_given in given.items() if not is_given]:
            raise UsageError(
                f"early_stopping_patience={self.early_stopping_patience} counts evaluations in which "
                f"metric_for_best_model was no better than before. Set {' and '.join(wrong)}, or remove it."
            )
        if self.restore_callback_states_from_checkpoint:
            raise UsageError(
                "restore_callback_states_from_checkpoint=true makes callbacks anew, and that of "
                "early_stopping_patience goes on counting at a resume by itself. Remove one of them."
            )

    def to_dict(self) -> dict[str, Any]:
        """Classes and functions, which no log could hold, by their names."""
        return {
            name: getattr(value, "__qualname__", repr(value)) if callable(value) else value
            for name, value in super().to_dict().items()
        }

    @property
    def uses_gradient_cache(self) -> bool:
        limits = (self.gradient_cache_chunk_size, self.gradient_cache_chunk_tokens, self.gradient_cache_chunk_patches)
        return any(limit is not None for limit in limits)

    @property
    def num_kept_graphs(self) -> int | str:
        """`gradient_cache_keep_graph`, or what holds where it is null."""
        if self.gradient_cache_keep_graph is not None:
            return self.gradient_cache_keep_graph
        return "auto" if self.gradient_cache_chunk_size == "auto" and self.device.type != "cpu" else 0


# A checkpoint's training_args.bin names the class: by where users import it from, not by where its file lies. The
# annotations above are objects for the same reason: typing would look strings up in the module that is named here.
DistTrainingArguments.__module__ = "hf_dist_ext"

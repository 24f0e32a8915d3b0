"""What `DistTrainer` refuses.

Before Trainer's constructor it looks at the arguments alone: fields that need a loss, and fields that do not go with
one. After the constructor it looks for what something else of the run leaves without effect, and at the model that a
gradient cache works on. It looks at the training rows when the first batch is asked for.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from hf_dist_ext.checkpoints import loss_state
from hf_dist_ext.data.collator import NUM_PAIR_COLUMNS
from hf_dist_ext.data.sampling import refuse_stream
from hf_dist_ext.engine.combined_losses import loss_of
from hf_dist_ext.errors import UsageError
from hf_dist_ext.evaluation import evaluators
from hf_dist_ext.frozen.groups import module_groups
from hf_dist_ext.models.embedder import embedder_of, is_of_sentence_transformers
from hf_dist_ext.policy import TOKENS
from hf_dist_ext.run.losses import PAIRS_ALONE
from hf_dist_ext.strategies import collectives
from hf_dist_ext.strategies.base import Strategy
from hf_dist_ext.training import compiling, metrics
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.sentence_losses import let_ask

logger = logging.get_logger(__name__)

LOSS_FIELDS = [
    "pipeline_parallel_size",
    *(f"gradient_cache_chunk_{unit}" for unit in ("size", "tokens", "patches")),
    *("no_duplicates_in_batch", "batch_sampler", "multi_dataset_batch_sampler"),
]


def refuse_objects(model: Any, loss: Any, named: Mapping[str, Any]) -> None:
    """What other trainers take and this one does not; `named`: the arguments of Trainer's constructor."""

    def of_theirs(given: Any) -> bool:
        return type(given).__module__.partition(".")[0] == "sentence_transformers"

    rows = named.get("train_dataset")
    if isinstance(loss, (type, str)) or of_theirs(loss):
        shown = repr(loss) if isinstance(loss, str) else getattr(loss, "__name__", type(loss).__name__)
        raise UsageError(
            f"loss is {shown}, and DistTrainer takes a function of embeddings, such as loss=InfoNCELoss(). Losses of "
            'sentence-transformers are named in a run file: "loss": "CoSENTLoss".'
        )
    if isinstance(rows, Mapping) and not is_of_sentence_transformers(model):
        raise UsageError(
            f"train_dataset is a {type(rows).__name__} of {', '.join(map(str, rows))}. Give one of them, such as "
            f"train_dataset[{next(iter(rows), 'train')!r}]."
        )
    if loss is not None and named.get("data_collator") is None and hasattr(rows, "column_names"):
        raise UsageError(
            "data_collator is missing: a loss over embeddings takes columns of features, which ContrastiveCollator("
            f"tokenizer, {list(rows.column_names or ['query', 'positive'])[:2]}) of hf_dist_ext.data makes of texts."
        )


def refuse_without_loss(args: Any) -> None:
    """What only a loss over embeddings reads."""
    given = [name for name in LOSS_FIELDS if getattr(args, name)]
    if given and (given != ["pipeline_parallel_size"] or args.pipeline_parallel_size > 1):
        raise UsageError(
            f"{given[0]}={getattr(args, given[0])!r} needs a loss over embeddings, and DistTrainer has none. Give "
            f"loss=InfoNCELoss(), or remove {given[0]}."
        )


def prepare_arguments(args: DistTrainingArguments, compute_loss_func: Any) -> None:
    """Those of a loss over embeddings: refused, or set to what it needs."""
    args.remove_unused_columns = False  # the dataset's columns are the batch's columns, not the model's arguments
    if args.label_smoothing_factor:
        raise UsageError(
            f"label_smoothing_factor={args.label_smoothing_factor} smooths the labels of a model's own loss; a loss "
            "over embeddings has none. Remove it."
        )
    if compute_loss_func is not None:
        raise UsageError(
            "compute_loss_func computes a loss of a model's outputs and labels, and DistTrainer has a loss over "
            "embeddings, which is the one that trains. Remove one of them."
        )
    if "inputs" in args.include_for_metrics:
        raise UsageError(
            'include_for_metrics=["inputs"] hands compute_metrics one tensor of a batch, and with a loss over '
            "embeddings a batch is a mapping column -> features. Remove it: predictions are the embeddings of anchors "
            "and positives."
        )
    optim = str(getattr(args.optim, "value", args.optim))
    if "lomo" in optim or "layerwise" in optim:
        raise UsageError(
            f"optim={optim!r} updates weights inside of backward, which a loss over embeddings runs more than once "
            "per step. Use adamw_torch."
        )
    if args.auto_find_batch_size:
        raise UsageError(
            "auto_find_batch_size=true makes the batch smaller where memory runs out, and with a loss over embeddings "
            'the batch is part of the loss. Set gradient_cache_chunk_size to "auto": the batch stays.'
        )
    if args.accelerator_config.dispatch_batches is None:
        # A dispatched batch is cut by rows of its first tensor; columns may hold different numbers of rows.
        args.accelerator_config.dispatch_batches = False
    if torch.cuda.is_available() and args.dataloader_pin_memory:
        # From pinned memory a copy that does not wait is safe; one that waits drains the GPU's queue for each tensor.
        args.accelerator_config.non_blocking = True
    if args.n_gpu > 1:
        raise UsageError(
            f"{args.n_gpu} GPUs are visible to one process, which Trainer would wrap in nn.DataParallel: no negatives "
            "across devices and wrong gradients for cached chunks. Start it with `accelerate launch`, or make one "
            "device visible (CUDA_VISIBLE_DEVICES=0)."
        )


def set_defaults_of_ddp(args: Any, model: Any, processor: Any, has_frozen: bool, uses_cache: bool) -> None:
    """What Trainer leaves to DDP, where more is known of the model."""
    if has_frozen and args.ddp_find_unused_parameters is None:
        # DDP follows requires_grad, and a stand-in serves batches without images, so nothing is unused; searching
        # costs a graph walk per forward.
        if getattr(processor, "image_processor", None) is not None or "vision" not in module_groups(model):
            args.ddp_find_unused_parameters = False
    if uses_cache and args.ddp_broadcast_buffers is None:
        args.ddp_broadcast_buffers = False  # modules that write to their buffers are refused with a cache
        # accelerate 1.15 hands it to DDP by this name, and torch 2.13 wants another. Remove when accelerate uses that.
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)


def check(run: Any) -> None:
    """A `DistTrainer` whose parts are there, and its model."""
    args, loss, strategy, model = run.args, run.loss, run.strategy, run.bare_model
    _check_what_is_read(args, run.accelerator.dataloader_config, strategy, run.optimizer is not None, loss is not None)
    if run.is_ours:
        warn_of_precision(args, run.model, strategy.keeps_float32)
    if loss is not None:
        loss_state.check_optimizer(loss, run.optimizer, run.lr_scheduler)
        is_automatic = "auto" in (args.gradient_cache_chunk_size, args.num_kept_graphs)
        strategy.check(bool(run.loss_parameters()), is_automatic)
        compiling.check(run.accelerator.state.dynamo_plugin)
        if args.uses_gradient_cache:
            _check_model(run.model, args)
        _check_outputs(model, loss)
        _find_word_embeddings(model, args)
        let_ask(loss, model)
        _check_columns(loss, run.data_collator)
        if run.options.max_bad_rows:
            _check_copies(loss)
    if run.eval_dataset is not None:
        if run.evaluator is not None:
            evaluators.check(run.evaluator, model, is_due=args.eval_strategy != "no" or args.eval_on_start)
        paired = metrics.names_of_paired(run.eval_dataset, run.compute_metrics)
        if paired is not None:
            evaluators.check_best_metric(args.metric_for_best_model, run.evaluator, paired)


def _check_copies(loss: Any) -> None:
    """`max_bad_rows` puts a copy of another row of its batch in a bad row's place. A loss that compares rows has to
    mask the copy, which else is a wrong answer to the row that it repeats."""
    for part in loss.modules() if isinstance(loss, nn.Module) else [loss]:
        compares = getattr(part, "in_batch_negatives", hasattr(part, "mask_false_negatives"))
        if compares and not getattr(part, "mask_false_negatives", False):
            raise UsageError(
                "max_bad_rows puts another row of the batch in the place of one that cannot be read, and this loss "
                'does not mask rows that stand in a batch twice. Remove max_bad_rows, or use "loss": "infonce" with '
                "mask_false_negatives."
            )


def _check_what_is_read(args: Any, loader: Any, strategy: Strategy, has_optimizer: bool, has_loss: bool) -> None:
    """Fields that something else of this run would leave without effect, or make count wrongly.

    loader: accelerate's DataLoaderConfiguration; has_optimizer: one was handed to the trainer.
    """
    if not isinstance(args, DistTrainingArguments):
        return
    if not args.dataloader_in_order:
        raise UsageError(
            "dataloader_in_order=false hands over batches as workers end them, and a checkpoint counts the rows that "
            "were used in their order. Remove it."
        )
    if has_optimizer and args.learning_rates:
        raise UsageError(
            "learning_rates makes groups of the optimizer that Trainer builds, but one was given. Give it groups "
            "of its own, or remove learning_rates."
        )
    if args.learning_rates or args.lr_scale_rule != "none":
        strategy.check_optimizer("learning_rates" if args.learning_rates else "lr_scale_rule")
    if args.world_size == 1:
        return
    if loader.split_batches:
        raise UsageError(
            "split_batches=true makes per_device_train_batch_size the batch of all processes together, and the place "
            "in the data, the effective batch and the rows of a global batch are counted by device. Remove it, and "
            f"divide the batch by {args.world_size}."
        )
    if loader.dispatch_batches and has_loss:
        raise UsageError(
            "dispatch_batches=true cuts a batch by the rows of its first column, and hard negatives that have more "
            "would be lost. Remove it: every process reads its own rows."
        )


def warn_of_precision(args: Any, model: nn.Module, keeps_float32: bool) -> None:
    """Weights that train in half precision, and of which the optimizer keeps no copy in float32. Matrices in float32,
    or in an emulated bfloat16, on a GPU with cores for another precision."""
    rounded = [name for name, p in model.named_parameters() if p.requires_grad and p.dtype.itemsize < 4]
    if rounded and not keeps_float32:
        dtype = str(model.get_parameter(rounded[0]).dtype).removeprefix("torch.")
        logger.warning(
            f"{len(rounded)} parameters that train ({rounded[0]!r}, ...) are stored in {dtype}, which rounds small "
            'updates away. Load the model with "dtype": "float32"; "bf16": true computes in bfloat16 all the same.'
        )
    if args.device.type != "cuda" or args.process_index or torch.version.hip:
        return
    name, (major, _) = torch.cuda.get_device_name(args.device), torch.cuda.get_device_capability(args.device)
    is_half = args.bf16 or args.fp16 or any(p.dtype.itemsize < 4 for p in model.parameters())
    if args.bf16 and major == 7:
        logger.warning(f'bf16=true, and {name} has no cores for bfloat16, only for float16. Set "fp16": true instead.')
    elif major >= 7 and not is_half and args.tf32 is None and torch.backends.cuda.matmul.fp32_precision != "tf32":
        remedies = '"bf16": true or "tf32": true' if major >= 8 else '"fp16": true'
        logger.warning(
            f"no precision is set: matrices are multiplied in float32, at which {name} has a small part of its speed. "
            f'Set {remedies}; "tf32": false keeps float32 without this line.'
        )


def warn_of_accumulation(args: DistTrainingArguments, loss: Any) -> None:
    """Where several batches are added up, and a row of one is compared with the rows of that one alone."""
    times, rows = args.gradient_accumulation_steps, args.per_device_train_batch_size
    if times > 1 and collectives.rank() == 0 and getattr(loss, "in_batch_negatives", True):
        logger.warning_once(
            f"gradient_accumulation_steps={times} adds no negatives: every batch of {rows} rows per device is scored "
            f"by itself. per_device_train_batch_size={times * rows} with a gradient cache (gradient_cache_chunk_size) "
            "and no accumulation has as many rows per update, and all of them are negatives."
        )


def _check_model(model: nn.Module, args: DistTrainingArguments) -> None:
    """That a gradient cache works on."""
    was_training = model.training
    model.train()  # what Trainer does before every step; a model may keep its own modules in eval there
    coupled = [
        name for name, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training
    ]
    model.train(was_training)
    if coupled:
        raise UsageError(
            f"the gradient cache can not be exact with {coupled[0]!r} ({len(coupled)} batch normalisations in "
            "training mode): its output depends on which rows share a chunk. Keep it in eval mode, replace it by a "
            "LayerNorm or GroupNorm, or switch the cache off."
        )
    if args.gradient_checkpointing:  # also what transformers 5.23 calls activation_checkpointing
        logger.info(
            "gradient cache and activation checkpointing are both on: the cache encodes every chunk twice and keeps "
            "one chunk's activations, checkpointing adds a third forward and keeps one layer's. Prefer smaller chunks "
            "alone unless a single chunk does not fit."
        )


def _find_word_embeddings(model: Any, args: DistTrainingArguments) -> None:
    """For NEFTune: Trainer asks a model for them by a method that a SentenceTransformer (6.2) does not have."""
    if args.neftune_noise_alpha is None or hasattr(model, "get_input_embeddings"):
        return
    backbone = getattr(embedder_of(model), "backbone", None)
    if backbone is None:
        raise UsageError(
            f"neftune_noise_alpha adds noise to word embeddings, and {type(model).__name__} has no "
            "get_input_embeddings() that gives them. Remove it."
        )
    model.get_input_embeddings = backbone.get_input_embeddings


def _check_outputs(model: nn.Module, loss: Any) -> None:
    """The losses of this project, and the model's rows: one vector each, or token vectors."""
    embedder, reads_many = embedder_of(model), metrics.similarity_of(loss) == "maxsim"
    many = embedder.has_token_vectors
    name = type(loss).__name__
    if many and hasattr(loss, "normalize") and not reads_many:
        raise UsageError(
            f'the model gives token vectors (pooling="{TOKENS}"), and {name} reads one vector per row. Use '
            '"loss": "late_interaction", or another pooling.'
        )
    if reads_many and many is False:
        raise UsageError(
            f"{name} reads token vectors, and the model gives one vector per row. Set "
            f'pooling="{TOKENS}", or give a MultiVectorEncoder.'
        )


def _check_columns(loss: Any, collator: Any) -> None:
    """No column that the loss would leave out, and theirs refuse. And let the collator refuse
    rows with fewer negatives than others, where the loss takes the k-th of all rows as a column: their numbers may add
    up to as many for every row, and negatives would be those of another one."""
    of_sources = {None: collator, **getattr(collator, "sources", {})}
    for source, one in of_sources.items():
        of_source = loss if source is None else loss_of(loss, source)
        if getattr(of_source, "takes_negatives_as_columns", False) and hasattr(one, "same_number_of_negatives"):
            one.same_number_of_negatives = True
        name, more = getattr(of_source, "name", ""), list(getattr(one, "columns", ()))[NUM_PAIR_COLUMNS:]
        if name in PAIRS_ALONE and of_source.num_columns is not None and more:
            raise UsageError(
                f'{name} reads a pair, and the rows have a column "{more[0]}" beside it. Remove the column, or take a '
                "loss that reads negatives, such as MultipleNegativesRankingLoss."
            )


def check_rows(dataset: Any, no_duplicates: bool | None, per_device: int, batch: int) -> None:
    """The training rows, when the first batch is asked for. `batch`: rows of a forward, of all devices."""
    try:
        rows = len(dataset)
    except TypeError:  # streaming
        if no_duplicates:
            refuse_stream(dataset)
        return
    if rows < batch:
        of_groups = "processes" if batch // per_device == collectives.world_size() else "groups of processes"
        raise UsageError(
            f"the training set has {rows} rows, fewer than one global batch of {batch} "
            f"({per_device} per device x {batch // per_device} {of_groups}). "
            "Lower per_device_train_batch_size or add data."
        )

"""What a run is: `RunConfig`, the settings beside the training arguments, and `Run`, a run file that was read.

A run file may hold every field of `RunConfig`, `DistTrainingArguments` and `TrainingArguments`. All three are read
from their source (run/fields.py), so that help and errors come without an import of torch. run/read.py reads the
file, run/rules.py compares fields with each other.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hf_dist_ext.run.fields import Field, is_secret, parse_type, read_fields, source_of


def option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass
class RunConfig:
    """What a run is, beside its training arguments. None is off, or "follows from the rest"."""

    # --- Run ---
    task: Literal["embedding", "image-text-to-text"] = option(
        "embedding",
        "What is trained: embeddings (a contrastive loss), or a vision-language model that answers about pictures.",
    )
    accelerate_config: str | None = option(
        None,
        "How to spread the run: auto (what hf-dist plan recommends for the devices here), a preset (hf-dist presets "
        "lists them) or the path of an accelerate YAML. Null is auto.",
    )
    num_processes: int | None = option(None, "Processes to start. Null: one for every visible device.")
    stages: list[dict[str, Any]] | None = option(
        None,
        'Train in stages: [{"name": "align", "trainable_modules": ["projector"], ...}, ...]. Each sets fields over '
        "the file's, has a fresh optimizer and goes on from the weights before it; see docs/frozen-projection.md.",
    )

    # --- Model ---
    model_name_or_path: str | None = option(None, "Start from this hub id or folder. Give this or model_config.")
    model_config: dict[str, Any] | None = option(
        None, 'Train from scratch: a transformers configuration with its "model_type", such as "bert".'
    )
    model_revision: str | None = option(None, "Branch, tag or commit of the hub model.")
    tokenizer_name: str | None = option(None, "Hub id or folder of the tokenizer. Null: the model's own.")
    trust_remote_code: bool = option(False, "Run Python code that comes with a model you trust.")
    dtype: Literal["float32", "bfloat16", "float16", "auto"] | None = option(
        None,
        "The precision weights are loaded in. Null: float32; with frozen parts or LoRA under bf16 or fp16, that of "
        "the files.",
    )
    attn_implementation: str | None = option(None, 'Attention kernel: "eager", "sdpa", "flash_attention_2", ...')
    is_causal: bool | None = option(
        None,
        "False: a decoder's tokens see the tokens after them too, here and in the saved config.json. Null: as its "
        "config says.",
    )
    pooling: Literal["mean", "cls", "last", "tokens"] = option(
        "mean",
        'How token states become one embedding; last suits decoders. "tokens": a vector per token stays, which '
        '"loss": "late_interaction" takes for granted. Not given: a folder keeps its own.',
    )
    projection_dim: int | None = option(None, "Add a linear layer to this embedding size. Null: the backbone's size.")
    normalize: bool = option(
        True, "Embeddings have length 1, so that scores are cosines. False: dot products, in the loss too."
    )

    use_lora: bool = option(False, "Train low-rank adapters (LoRA, by peft) instead of the weights themselves.")
    lora_r: int = option(8, "Rank of the adapters.")
    lora_alpha: float = option(16, "Adapters count lora_alpha / lora_r.")
    lora_dropout: float = option(0.0, "Dropout before the adapters.")
    lora_target_modules: list[str] | str | None = option(
        None,
        'Layers with adapters: names or dotted suffixes, "all-linear", or a regex. Null: peft\'s choice for the model '
        "(in a vision-language model for its language model).",
    )

    load_in_4bit: bool = option(
        False,
        "Keep the base under the adapters of use_lora in 4 bits (QLoRA, by bitsandbytes). One process, or DDP.",
    )

    # --- Data ---
    dataset_name: str | None = option(
        None,
        'Training data: "code-search", "glyph-search" or "digits" (built in), a hub id, or a '
        "json/jsonl/csv/parquet/arrow file or folder.",
    )
    dataset_config_name: str | None = option(None, "Configuration of the hub dataset.")
    datasets: list[dict[str, Any]] | None = option(
        None,
        'Train on several datasets, each batch of one: [{"dataset_name": "nli.jsonl", "weight": 2, "prompts": {...}}, '
        "...]. Each sets data fields over the file's; see docs/data.md.",
    )
    datasets_temperature: float | None = option(
        None,
        "Without weights, datasets are drawn by size^(1/datasets_temperature): 1 by size, larger ones more evenly. "
        "Null: 1.",
    )
    train_split: str = option("train", "Split to train on.")
    eval_split: str | None = option(None, "Split to evaluate on.")
    eval_dataset_name: str | None = option(None, "Evaluate on another dataset than dataset_name.")
    eval_holdout: int | None = option(
        None, "Rows of the train split kept for evaluation, without an eval split. No pair stays on both sides."
    )
    columns: dict[str, str | list[str] | dict[str, str]] | None = option(
        None,
        'Dataset columns to use: {"query": "question", "positive": "answer", "negative": ["n1", "n2"]}; for a '
        'vision-language model also {"query": {"text": "question", "image": "photo"}}. Null: those named query '
        "(or anchor), positive and negative (or negative_1, negative_2, ...).",
    )
    prompts: dict[str, str] | None = option(
        None,
        'Text put before each row of a column: {"query": "search: "}; of a vision-language model the message of the '
        "system. Null: the model's.",
    )
    processing_kwargs: dict[str, dict[str, Any]] | None = option(
        None,
        "Options of a vision-language model's processor and chat template, as sentence-transformers takes them: "
        '{"image": {...}, "text": {...}, "chat_template": {"add_generation_prompt": true}}. Null: the model\'s.',
    )
    id_column: str | None = option(None, "Rows with the same value here are never negatives of each other.")
    max_length: int | dict[str, int] | None = option(
        None,
        'Tokens kept of a text, for all columns or each: {"query": 64, "positive": 256}. Null: the model\'s limit.',
    )
    image_columns: list[str] | None = option(
        None,
        'Task "embedding": columns that hold names of image files, such as ["positive"]. Columns of pictures are '
        "known by their type.",
    )
    image_folder: str | None = option(None, "Folder that the image files named in the data start in.")
    streaming: bool = option(False, "Read the dataset while training instead of before.")
    shuffle_buffer_rows: int | None = option(
        None, "Rows of a stream that are held and drawn from at random, 10,000 unless given. More mix files better."
    )
    max_train_samples: int | None = option(None, "Train on the first rows only.")
    max_eval_samples: int | None = option(None, "Evaluate on the first rows only.")
    generate_max_new_tokens: int | None = option(
        None,
        'Task "image-text-to-text": evaluation also generates up to so many tokens per row and counts exact answers '
        "(answer_accuracy). Null: the loss only.",
    )

    evaluations: list[dict[str, Any]] | None = option(
        None,
        'Task "embedding": evaluate on other data too: [{"type": "retrieval", "name": "nfcorpus", "path": '
        '"data/nfcorpus"}, ...]; see docs/evaluation.md.',
    )

    # --- Loss ---
    loss: str | None = option(
        None,
        'The loss over embeddings: "infonce", "siglip", "late_interaction" (token vectors, as ColBERT), or a class of '
        'sentence-transformers such as "CoSENTLoss". Not given: "infonce" for task "embedding". Null or "none": the '
        "model's own, which an embedding model does not have.",
    )
    loss_options: dict[str, Any] | None = option(
        None, 'Options of a loss other than infonce: {"scale": 20.0}, as its class takes them; see docs/losses.md.'
    )
    losses: list[dict[str, Any]] | None = option(
        None,
        'Several losses in place of one, added up: [{"loss": "infonce"}, {"loss": "CoSENTLoss", "weight": 0.3, '
        '"loss_options": {...}}, ...]. Each sets loss fields over the file\'s; see docs/losses.md.',
    )
    label_column: str | None = option(
        None,
        "Dataset column with what the loss compares scores with: a number or a list per row. Null: label, labels, "
        "score or scores, for losses that read one.",
    )
    temperature: float = option(0.05, "Scores are divided by it; lower looks harder at the nearest negatives.")
    learnable_temperature: bool = option(False, "Train the temperature too.")
    symmetric: bool = option(False, "Also find the query from the document, and average the two.")
    matryoshka_dims: list[int] | None = option(None, "Train leading dimensions to work alone, and add up: [256, 128].")
    matryoshka_weights: list[float] | None = option(None, "Weight of each of matryoshka_dims. Null: 1 each.")
    mask_false_negatives: bool = option(True, "A document equal to the row's own, or with its id, is no negative.")
    false_negative_margin: float | None = option(
        None, "Also ignore negatives that score above the positive's score minus this margin."
    )
    cross_device_negatives: bool = option(True, "The documents of all processes are negatives, not only one's own.")
    in_batch_negatives: bool = option(True, "False: infonce has a row's own hard negatives alone as negatives.")


# Fields of sentence-transformers' arguments, for scripts. A run file says the same in its own words.
OF_SENTENCE_TRANSFORMERS = (
    "batch_sampler multi_dataset_batch_sampler router_mapping learning_rate_mapping warmup_ratio".split()
)

PRESET_SHORT_NAMES = {
    "single": "single_gpu",
    "ddp": "multi_gpu_ddp",
    "fsdp": "multi_gpu_fsdp",
    "fsdp2": "multi_gpu_fsdp",
    "hsdp": "multi_gpu_hsdp",
    "fsdp_offload": "multi_gpu_fsdp_offload",
    "tp": "multi_gpu_tp",
    "pp": "multi_gpu_pp",
    "3d": "multi_gpu_3d",
    "zero1": "deepspeed_zero1",
    "zero2": "deepspeed_zero2",
    "zero3": "deepspeed_zero3",
}

# Where an annotation says less than what is meant.
_LOG_LEVEL = 'Literal["detail", "debug", "info", "warning", "error", "critical", "passive"]'
EXACT_TYPES = {
    "gradient_cache_chunk_size": 'int | Literal["auto"] | None',
    "gradient_cache_keep_graph": 'int | Literal["auto"] | None',
    "gradient_cache_packing": 'bool | Literal["auto"]',
    "max_nonfinite_steps": 'int | Literal["auto"] | None',
    "resume_from_checkpoint": "bool | str | None",  # true: the newest one of output_dir
    "log_level": _LOG_LEVEL,
    "log_level_replica": _LOG_LEVEL,
}

_POSITIVE = (
    "num_processes projection_dim eval_holdout max_length max_train_samples max_eval_samples save_total_limit "
    "generate_max_new_tokens lora_r "
    "per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps eval_accumulation_steps "
    "gradient_cache_chunk_size gradient_cache_chunk_tokens gradient_cache_chunk_patches "
    "torch_empty_cache_steps ddp_timeout ddp_bucket_cap_mb max_nonfinite_steps "
    "sharding_group_size ddp_power_sgd_rank lr_base_batch_size profile_steps max_bad_rows "
    "early_stopping_patience"
).split()
_ABOVE_ZERO = (
    "step_timeout lora_alpha gradient_cache_memory_gib temperature adam_epsilon logging_steps save_steps "
    "datasets_temperature"
).split()
_NOT_NEGATIVE = (
    "replay_tolerance "
    "num_train_epochs learning_rate weight_decay max_grad_norm warmup_steps eval_delay eval_steps matryoshka_weights "
    "false_negative_margin dataloader_num_workers gradient_cache_keep_graph min_num_params"
).split()
_SEEDS = "seed data_seed".split()
_SHARES = "adam_beta1 adam_beta2 label_smoothing_factor lora_dropout".split()
BOUNDS: dict[str, dict[str, Any]] = {  # in the words of JSON Schema; the items of lists and objects are held to them
    **dict.fromkeys(_POSITIVE, {"minimum": 1}),
    **dict.fromkeys(_ABOVE_ZERO, {"exclusiveMinimum": 0}),
    **dict.fromkeys(_NOT_NEGATIVE, {"minimum": 0}),
    **dict.fromkeys(_SEEDS, {"minimum": 0, "exclusiveMaximum": 2**32}),  # numpy takes no larger one
    **dict.fromkeys(_SHARES, {"minimum": 0, "exclusiveMaximum": 1}),
    "matryoshka_dims": {"minimum": 1, "minItems": 1},
    "shuffle_buffer_rows": {"minimum": 1},
    "max_steps": {"minimum": -1},
    "ddp_timeout": {"minimum": 1, "exclusiveMaximum": 2**31},
    "dataloader_prefetch_factor": {"minimum": 1, "exclusiveMaximum": 2**16},  # DataLoader counts to it at the start
    "ddp_power_sgd_warmup_steps": {"minimum": 2},
}
NEEDS = {  # a field: another one without which it has no effect
    **dict.fromkeys("load_in_4bit lora_r lora_alpha lora_dropout lora_target_modules".split(), "use_lora"),
    "datasets_temperature": "datasets",
    "eval_steps": "eval_strategy",
    "model_revision": "model_name_or_path",
    "resume_weights_only": "resume_from_checkpoint",
    "shuffle_buffer_rows": "streaming",
}


@functools.cache
def fields_of_run_file() -> dict[str, Field]:
    """Every field of a run file by its long name, in the order of `--help`."""
    arguments = Path(__file__).parents[1] / "training" / "arguments.py"
    sources = (
        (Path(__file__), "RunConfig", "Run"),
        (arguments, "DistTrainingArguments", "Gradient cache and batches"),
        (source_of("transformers.training_args"), "TrainingArguments", "Training"),
    )
    fields: dict[str, Field] = {}
    for path, class_name, group in sources:
        for name, one in read_fields(path, class_name).items():
            if name in OF_SENTENCE_TRANSFORMERS:
                continue
            exact = parse_type(EXACT_TYPES[name]) if name in EXACT_TYPES else one.type
            bounds = BOUNDS.get(name, {})
            more = {"group": one.group or group, "type": exact, "bounds": bounds}
            fields.setdefault(name, dataclasses.replace(one, **more))
    return fields


@dataclass
class Run:
    """A parsed run. `training` holds what was given of TrainingArguments and our training fields, and output_dir;
    `echo` the short name of a preset that was mapped; `given` all that was set."""

    path: Path
    options: RunConfig
    training: dict[str, Any]
    echo: list[str]
    given: dict[str, Any]
    name: str = ""  # of a stage
    is_done: bool = False  # a stage that an earlier attempt has finished
    is_launched: bool = False  # by the user's own launcher, which says how many processes there are
    stages: list[Run] = field(default_factory=list)

    def flat(self) -> dict[str, Any]:
        """What was set, in the form of the JSON file, with secrets masked."""
        return {name: "***" if is_secret(name) and value else value for name, value in self.given.items()}

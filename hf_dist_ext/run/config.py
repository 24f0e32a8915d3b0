"""The JSON run file: strict parsing, command-line overrides, errors that name the remedy.

    run = load_run(["--config", "configs/code_search.json", "--learning_rate", "2e-5"])
    run.options.temperature, run.training["learning_rate"], run.echo, run.flat()

(1) the fields: `RunConfig` below, `DistTrainingArguments` and `TrainingArguments`, all read from source
    (run/fields.py)
(2) the file: JSON without duplicate keys, keys that begin with "_" are comments; the command line: any
    `--field value`
(3) types, short names (run/short_names.py) and bounds; the command line goes over the file
(4) rules between fields; the checkpoint to resume (checkpoints/folder.py)

It imports the standard library only, so that help and errors are instant. The first error is reported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hf_dist_ext.checkpoints.folder import checkpoint_to_resume, decides_here, resume_or_start
from hf_dist_ext.errors import RunError, UsageError
from hf_dist_ext.failures import record
from hf_dist_ext.run import deepspeed_install
from hf_dist_ext.run.fields import (
    Field,
    Type,
    accepts,
    describe,
    from_text,
    is_secret,
    kind_of,
    out_of_bounds,
    parse_type,
    read_fields,
    show,
    source_of,
)
from hf_dist_ext.run.rules import CONTRASTIVE_FIELDS, check_task_fields
from hf_dist_ext.run.short_names import GONE, SHORT_BOUNDS, SHORT_NAMES, in_long_names

# (1) ---------------------------------------------------------------------------------------------------------------


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
        "The precision weights are loaded in. Null: float32; with frozen parts under bf16 or fp16, that of the files.",
    )
    attn_implementation: str | None = option(None, 'Attention kernel: "eager", "sdpa", "flash_attention_2", ...')
    pooling: Literal["mean", "cls", "last"] = option(
        "mean", "How token states become one embedding; last suits decoders."
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

    # --- Data ---
    dataset_name: str | None = option(
        None, 'Training data: "code-search" (built in), a hub id, or a json/csv/parquet/arrow file or folder.'
    )
    dataset_config_name: str | None = option(None, "Configuration of the hub dataset.")
    train_split: str = option("train", "Split to train on.")
    eval_split: str | None = option(None, "Split to evaluate on.")
    eval_dataset_name: str | None = option(None, "Evaluate on another dataset than dataset_name.")
    eval_holdout: int | None = option(None, "Rows of the train split kept for evaluation, without an eval split.")
    columns: dict[str, str | list[str]] | None = option(
        None,
        'Dataset columns to use: {"query": "question", "positive": "answer", "negative": ["n1", "n2"]}. Null: those '
        "named query, positive and negative.",
    )
    prompts: dict[str, str] | None = option(
        None, 'Text put before each row of a column: {"query": "search: "}. Null: the model\'s.'
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
    max_train_samples: int | None = option(None, "Train on the first rows only.")
    max_eval_samples: int | None = option(None, "Evaluate on the first rows only.")
    generate_max_new_tokens: int | None = option(
        None,
        'Task "image-text-to-text": evaluation also generates up to so many tokens per row and counts exact answers '
        "(answer_accuracy). Null: the loss only.",
    )

    # --- Loss ---
    loss: Literal["infonce", "none"] | None = option(
        None, 'The loss over embeddings. Not given: "infonce" for task "embedding". Null or "none": the model\'s own.'
    )
    temperature: float = option(0.05, "Scores are divided by it; lower looks harder at the nearest negatives.")
    learnable_temperature: bool = option(False, "Train the temperature too.")
    symmetric: bool = option(False, "Also find the query from the document, and average the two.")
    matryoshka_dims: list[int] | None = option(None, "Train leading dimensions to work alone: [256, 128, 64].")
    matryoshka_weights: list[float] | None = option(None, "Weight of each of matryoshka_dims. Null: 1 each.")
    mask_false_negatives: bool = option(True, "A document equal to the row's own, or with its id, is no negative.")
    false_negative_margin: float | None = option(
        None, "Also ignore negatives that score above the positive's score minus this margin."
    )
    cross_device_negatives: bool = option(True, "The documents of all processes are negatives, not only one's own.")


# Where an annotation says less than what is meant.
_LOG_LEVEL = 'Literal["detail", "debug", "info", "warning", "error", "critical", "passive"]'
EXACT_TYPES = {
    "gradient_cache_chunk_size": 'int | Literal["auto"] | None',
    "gradient_cache_keep_graph": 'int | Literal["auto"]',
    "max_nonfinite_steps": 'int | Literal["auto"] | None',
    "resume_from_checkpoint": "bool | str | None",  # true: the newest one of output_dir
    "log_level": _LOG_LEVEL,
    "log_level_replica": _LOG_LEVEL,
}

_POSITIVE = (
    "num_processes projection_dim eval_holdout max_length max_train_samples max_eval_samples save_total_limit "
    "generate_max_new_tokens lora_r "
    "per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps eval_accumulation_steps "
    "gradient_cache_chunk_size gradient_cache_chunk_tokens gradient_cache_chunk_patches gradient_cache_width_multiple "
    "torch_empty_cache_steps dataloader_prefetch_factor ddp_timeout ddp_bucket_cap_mb max_nonfinite_steps "
    "sharding_group_size ddp_power_sgd_rank lr_base_batch_size profile_steps max_bad_rows"
).split()
_ABOVE_ZERO = (
    "step_timeout lora_alpha gradient_cache_memory_gib temperature adam_epsilon logging_steps save_steps".split()
)
_NOT_NEGATIVE = (
    "num_train_epochs learning_rate weight_decay max_grad_norm warmup_steps eval_delay eval_steps matryoshka_weights "
    "false_negative_margin dataloader_num_workers seed data_seed gradient_cache_keep_graph min_num_params"
).split()
_SHARES = "adam_beta1 adam_beta2 label_smoothing_factor lora_dropout".split()
BOUNDS: dict[str, dict[str, Any]] = {  # in the words of JSON Schema; the items of lists and objects are held to them
    **dict.fromkeys(_POSITIVE, {"minimum": 1}),
    **dict.fromkeys(_ABOVE_ZERO, {"exclusiveMinimum": 0}),
    **dict.fromkeys(_NOT_NEGATIVE, {"minimum": 0}),
    **dict.fromkeys(
        ["adam_beta1", "adam_beta2", "label_smoothing_factor", "lora_dropout"], {"minimum": 0, "exclusiveMaximum": 1}
    ),
    "matryoshka_dims": {"minimum": 1, "minItems": 1},
    "max_steps": {"minimum": -1},
    "ddp_power_sgd_warmup_steps": {"minimum": 2},
}


@functools.cache
def all_fields() -> dict[str, Field]:
    """Every field of a run file by its long name, in the order of `--help`."""
    sources = (
        (Path(__file__), "RunConfig", "Run"),
        (
            Path(__file__).parents[1] / "training" / "arguments.py",
            "DistTrainingArguments",
            "Gradient cache and batches",
        ),
        (source_of("transformers.training_args"), "TrainingArguments", "Training"),
    )
    found: dict[str, Field] = {}
    for path, class_name, group in sources:
        for name, one in read_fields(path, class_name).items():
            exact = parse_type(EXACT_TYPES[name]) if name in EXACT_TYPES else one.type
            found.setdefault(name, dataclasses.replace(one, group=one.group or group, type=exact))
    return found


# (2) ---------------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """A parsed run. `training` holds what was given of TrainingArguments and our training fields, and output_dir;
    `echo` the short names that were mapped, a line each; `given` all that was set, by long name."""

    path: Path
    options: RunConfig
    training: dict[str, Any]
    echo: list[str]
    given: dict[str, Any]
    name: str = ""  # of a stage
    is_done: bool = False  # a stage that an earlier attempt has finished
    stages: list[Run] = field(default_factory=list)

    def flat(self) -> dict[str, Any]:
        """What was set, in the form of the JSON file, with secrets masked."""
        return {name: "***" if is_secret(name) and value else value for name, value in self.given.items()}


def load_run(argv: list[str]) -> Run:
    """`--config run.json --field value ...` -> Run. Prints the help and exits on `--help`. Raises UsageError."""
    if "--help" in argv or "-h" in argv:
        from hf_dist_ext.run.help import help_text

        print(help_text())
        sys.exit(0)
    path, overrides = _parse_command_line(argv)
    layers = [(_read_json(path), str(path)), (overrides, "the command line")]
    run = _from_layers(path, layers)
    if run.options.stages is not None:
        from hf_dist_ext.run.stages import plan_stages

        run.stages = plan_stages(run, layers, functools.partial(_from_layers, path))
    return run


def _from_layers(path: Path, layers: list[tuple[dict[str, Any], str]]) -> Run:
    """Fields in layers, each over those before it, with the words that say where it comes from."""
    given: dict[str, Any] = {}
    echo: list[str] = []
    for layer, origin in layers:
        for name, value in layer.items():
            _check_value(name, value, origin)
        given |= in_long_names(layer, given, all_fields(), echo)
    for name, value in given.items():
        _check_bounds(name, value, BOUNDS.get(name, {}), all_fields()[name].type)
    return _assemble(path, given, echo)


def _assemble(path: Path, given: dict[str, Any], echo: list[str]) -> Run:
    given.setdefault("output_dir", str(Path("outputs", path.stem)))
    own = {one.name for one in dataclasses.fields(RunConfig)}
    config = RunConfig(**{name: value for name, value in given.items() if name in own})
    config.loss = given.get("loss", "infonce" if config.task == "embedding" else None)
    if config.loss == "none":
        config.loss = None
    training = {name: value for name, value in given.items() if name not in own}
    run = Run(path, config, training, echo, given)
    if config.stages is not None:  # each stage is checked and resumed as a run of its own
        return run
    _check_rules(run)
    if not decides_here():
        return run
    asked = training.pop("resume_from_checkpoint", None)
    if asked == "auto":
        asked = resume_or_start(training)
    checkpoint = checkpoint_to_resume(asked, Path(training["output_dir"]))
    if checkpoint is not None:  # true stays true: the trainer, which also knows the hashes, picks the newest complete
        training["resume_from_checkpoint"] = True if asked is True else str(checkpoint)
    return run


def _parse_command_line(argv: list[str]) -> tuple[Path, dict[str, Any]]:
    """`--config`, and the values of all other flags by field name; the last of a repeated flag counts."""
    words: dict[str, list[str]] = {}
    name = ""
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            words[name] = [value] if equals else []
        elif name:
            words[name].append(word)
        else:
            hint = f"Write: --config {word}" if word.endswith(".json") else "Write: --field value"
            raise UsageError(f"Unexpected argument {word!r}. {hint}")
    config = words.pop("config", [])
    if len(config) != 1:
        raise UsageError("--config takes one JSON file, such as --config configs/code_search.json. See --help.")
    values = {}
    for name, tokens in words.items():
        alternatives = _type_of(name, "the command line")
        try:
            values[name] = from_text(alternatives, tokens)
        except UsageError as error:
            raise UsageError(f"--{name}: {error}") from None
    return Path(config[0]), values


def _read_json(path: Path) -> dict[str, Any]:
    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if double := [name for name in names if names.count(name) > 1]:
            raise UsageError(f"{path} gives {json.dumps(double[0])} twice. Keep one.")
        return dict(pairs)

    def refuse(word: str) -> None:
        raise UsageError(f"{path} holds {word}, which is not JSON. Write a finite number or null.")

    try:
        text = path.read_text(encoding="utf-8-sig")
        content = json.loads(text, object_pairs_hook=without_duplicates, parse_constant=refuse)
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [one.name for one in path.parent.glob("*.json")], 1, 0.4)
        hint = f"Closest: {path.parent / near[0]}" if near else "Give the path of a JSON file."
        raise UsageError(f"--config {path}: no such file. {hint}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text (byte {error.start}). Save it as UTF-8.") from None
    except OSError as error:
        raise UsageError(f"--config {path} cannot be read: {error.strerror}. Give a JSON file.") from None
    except json.JSONDecodeError as error:
        raise UsageError(
            f"{path} is not JSON: line {error.lineno}, column {error.colno}: {error.msg}. Mend it there; JSON has no "
            'trailing comma and no // comment (a key that begins with "_" is one).'
        ) from None
    if not isinstance(content, dict):
        raise UsageError(f'{path} holds {kind_of(content)}, not an object. Write {{"field": value, ...}}.')
    return {name: value for name, value in content.items() if not name.startswith("_") and name != "$schema"}


# (3) ---------------------------------------------------------------------------------------------------------------


def _type_of(name: str, origin: str) -> Type:
    if name in SHORT_NAMES:
        return parse_type(SHORT_NAMES[name][0])
    if name in all_fields():
        return all_fields()[name].type
    near = difflib.get_close_matches(name, [*all_fields(), *SHORT_NAMES], 1, 0.5)
    hint = GONE.get(name) or (f"Closest: {json.dumps(near[0])}." if near else "See --help for all fields.")
    raise UsageError(f'Unknown field {json.dumps(name)} in {origin}. {hint} (A comment begins with "_".)')


def _check_value(name: str, value: Any, origin: str) -> None:
    alternatives = _type_of(name, origin)
    if accepts(alternatives, value):
        return _check_bounds(name, value, SHORT_BOUNDS.get(name, {}), alternatives)
    takes = describe(alternatives)
    choices = [detail for kind, detail in alternatives if kind == "literal"]
    if len(choices) > 12:
        near = [name for name in choices if name.startswith(str(value))]
        near += difflib.get_close_matches(str(value), choices, 3, 0.3) or choices
        takes = f"one of {len(choices)} names; closest: {', '.join(map(json.dumps, near[:3]))}"
    raise UsageError(f"{name}={show(value, name)} in {origin} is {kind_of(value)}; it takes {takes}.")


def _check_bounds(name: str, value: Any, bounds: dict[str, Any], alternatives: Type) -> None:
    if broken := out_of_bounds(value, bounds):
        others = [json.dumps(detail) for kind, detail in alternatives if kind in ("literal", "null")]
        raise UsageError(f"{name}={show(value)} {' or '.join([broken, *others])}.")


# (4) ---------------------------------------------------------------------------------------------------------------


def _check_rules(run: Run) -> None:
    config, given = run.options, run.given
    check_task_fields(config.task, given)
    useless = [name for name in CONTRASTIVE_FIELDS if given.get(name) not in (None, False)]
    if config.loss is None and useless:
        raise UsageError(
            f"{useless[0]}={show(given[useless[0]])} needs a loss over embeddings, but loss is null. "
            f'Set "loss": "infonce" or remove {useless[0]}.'
        )
    if given.get("bf16") and given.get("fp16"):
        raise UsageError("bf16 and fp16 are both true. Keep one.")
    for name in ("bf16_full_eval", "fp16_full_eval"):
        if given.get(name):
            raise UsageError(
                f"{name}=true does nothing while training, and the evaluation at the end would round the weights that "
                f"are saved behind it. Remove it; {name[:4]}=true evaluates in that precision too."
            )
    if (config.model_name_or_path is None) == (config.model_config is None):
        found = "Neither is" if config.model_config is None else "Both are"
        raise UsageError(f"{found} given: model_name_or_path (start from weights) or model_config (from scratch).")
    if config.model_config and not isinstance(config.model_config.get("model_type"), str):
        raise UsageError('model_config has no "model_type". Add one, such as "model_type": "bert".')
    if config.model_config is not None and config.model_revision is not None:
        raise UsageError(f"model_revision={show(config.model_revision)} is of a hub model, and model_config of none.")
    if config.task == "embedding" and config.image_folder is not None and not config.image_columns:
        raise UsageError(f"image_folder={show(config.image_folder)} is where image_columns are read from. Name them.")
    if config.dataset_name is None:
        raise UsageError('dataset_name is not given. Set "code-search", a hub id or the path of a data file.')
    weights, dims = config.matryoshka_weights or [], config.matryoshka_dims or []
    if weights and len(weights) != len(dims):
        raise UsageError(
            f"matryoshka_weights has {len(weights)} entries for {len(dims)} matryoshka_dims. Give as many, or none."
        )
    if config.eval_holdout and (config.eval_split or config.eval_dataset_name):
        other = "eval_split" if config.eval_split else "eval_dataset_name"
        raise UsageError(f"eval_holdout takes rows from the train split, but {other} is given too. Keep one.")
    if given.get("resume_weights_only") and given.get("resume_from_checkpoint") in (None, False):
        raise UsageError("resume_weights_only=true says how to resume; give resume_from_checkpoint too.")
    if given.get("deepspeed"):
        deepspeed_install.check("deepspeed is set: ")
    offline = [name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if _is_on(os.environ.get(name, ""))]
    if given.get("push_to_hub") and offline:
        raise UsageError(f"push_to_hub is true but {offline[0]} is set. Unset one of the two.")


def _is_on(text: str) -> bool:
    return text.strip().upper() in ("1", "ON", "YES", "TRUE")


@contextlib.contextmanager
def exit_on_usage_error() -> Iterator[None]:
    """UsageError or RunError -> `error: ...` on stderr from one rank and its exit code; HF_DIST_DEBUG=1 shows the
    traceback. Ctrl-C ends with exit code 130 and without one."""
    try:
        yield
    except (UsageError, RunError) as error:
        if os.environ.get("HF_DIST_DEBUG") == "1":
            raise
        record(str(error))
        rank = os.environ.get("RANK", "0")
        if rank != "0":
            # Mostly rank 0 has the same error and the launcher ends this process while it waits; if not, it speaks.
            time.sleep(4)
        print(f"error: {error}" if rank == "0" else f"error (rank {rank}): {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)

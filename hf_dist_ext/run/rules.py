"""Rules between fields of a run file: what contradicts another field, and what would be ignored, is refused."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any

from hf_dist_ext import launched
from hf_dist_ext.errors import LIKENESS, UsageError
from hf_dist_ext.run import deepspeed_install
from hf_dist_ext.run.config import NEEDS, Run, RunConfig
from hf_dist_ext.run.evaluations import parse_evaluations
from hf_dist_ext.run.fields import show
from hf_dist_ext.run.files import looks_like_a_path, upload_command
from hf_dist_ext.run.losses import INFONCE_FIELDS
from hf_dist_ext.run.parts import check_parts
from hf_dist_ext.run.sources import BUILT_IN, NUM_PAIR_COLUMNS, check_sources, sources_of

CONTRASTIVE_FIELDS = [
    *INFONCE_FIELDS,
    *"gradient_cache_chunk_size gradient_cache_chunk_tokens gradient_cache_chunk_patches loss_options losses".split(),
    *"label_column pipeline_parallel_size".split(),
]
OF_TASK = {
    "embedding": [
        *CONTRASTIVE_FIELDS,
        *"is_causal pooling projection_dim normalize id_column image_columns no_duplicates_in_batch".split(),
        *"evaluations datasets datasets_temperature processing_kwargs load_in_4bit".split(),
    ],
    "image-text-to-text": ["generate_max_new_tokens"],
}


def check_rules(run: Run) -> None:
    """UsageError for the first rule that a run without stages, or one stage, breaks."""
    config, given = run.options, run.given
    _check_output_dir(given["output_dir"])
    check_task_fields(config.task, given)
    for name, other in NEEDS.items():
        if given.get(name) not in (None, False) and given.get(other) in (None, False):
            raise UsageError(
                f"{name}={show(given[name])} has no effect without {other}. Set that too, or remove {name}."
            )
    useless = [name for name in CONTRASTIVE_FIELDS if given.get(name) not in (None, False)]
    if given.get("pipeline_parallel_size") == 1:  # no pipeline
        useless.remove("pipeline_parallel_size")
    if config.loss is None and useless:
        raise UsageError(
            f"{useless[0]}={show(given[useless[0]])} needs a loss over embeddings, but loss is null. "
            f'Set "loss": "infonce" or remove {useless[0]}.'
        )
    if config.evaluations is not None:
        if config.loss is None:
            raise UsageError('evaluations compare embeddings, but loss is null. Set "loss": "infonce" or remove them.')
        parse_evaluations(config.evaluations)
    check_parts(config, given)
    _check_folders(config)
    if given.get("load_best_model_at_end") and given.get("eval_strategy", "no") == "no":
        raise UsageError(
            'load_best_model_at_end=true, but eval_strategy is "no": no checkpoint would be found the best. Set '
            "eval_strategy and save_strategy, or remove load_best_model_at_end."
        )
    if (order := given.get("train_sampling_strategy")) in ("group_by_length", "batch_rebalance"):
        raise UsageError(
            f"train_sampling_strategy={show(order)} orders rows by a length that the rows of a run file do not have. "
            "Remove it; with a loss over embeddings the rows of a batch are sorted by length before they are cut into "
            "chunks."
        )
    if config.streaming and given.get("max_steps", -1) < 0:
        raise UsageError("a stream does not know how many rows it has, so an epoch has no end. Set max_steps.")
    if given.get("save_full_model") is False and config.task == "embedding" and not config.use_lora:
        raise UsageError(
            "save_full_model=false has no effect: the run of an embedding model ends with the whole folder, which "
            "others open. Remove it; checkpoints hold what trains alone."
        )
    if given.get("max_steps") == 0:
        raise UsageError(
            "max_steps=0 is no number of updates, and Trainer would train num_train_epochs. Give 1 or more, or remove "
            "max_steps."
        )
    if given.get("num_train_epochs", 1) <= 0 and given.get("max_steps", -1) < 0:
        raise UsageError(
            f"num_train_epochs={show(given['num_train_epochs'])} trains on nothing. Give more than 0, or max_steps."
        )
    if config.temperature < 1e-6:
        raise UsageError(
            f"temperature={show(config.temperature)}: scores are divided by it, and would be too large for float32 "
            "sums. Give 0.01 or more."
        )
    if config.normalize and config.temperature >= 10:
        raise UsageError(
            f"temperature={show(config.temperature)} would make all cosines (-1 to 1) nearly equal. "
            f"Is it a scale, as elsewhere? Then set temperature to 1 / scale: {1 / config.temperature:.4g}."
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
    has_images = config.image_columns or any(isinstance(source, dict) for source in (config.columns or {}).values())
    if config.task == "embedding" and config.image_folder is not None and not has_images:
        raise UsageError(f"image_folder={show(config.image_folder)} is where image_columns are read from. Name them.")
    check_sources(run)
    if config.loss is None and config.task == "embedding":
        raise UsageError(
            'loss is null, and an embedding model has no loss of its own. Remove loss, or name one: "infonce".'
        )
    names = {one.name for one in parse_evaluations(config.evaluations or [])}
    held_out = {  # of others there are no figures
        source.name
        for source in sources_of(config)
        if (one := source.config).eval_split
        or one.eval_dataset_name
        or one.eval_holdout
        or one.dataset_name in BUILT_IN
    }
    if double := sorted(held_out & names):
        raise UsageError(
            f'evaluations and datasets both have the name "{double[0]}", and so would their figures. Give one of them '
            "another name."
        )
    if config.dataset_name is None and config.datasets is None:
        raise UsageError('dataset_name is not given. Set "code-search", a hub id or the path of a data file.')
    if config.task == "embedding" and config.columns is not None and len(config.columns) < NUM_PAIR_COLUMNS:
        raise UsageError(
            f"columns={show(config.columns)} names {len(config.columns)} column. A query and its positive are needed."
        )
    if config.eval_holdout and (config.eval_split or config.eval_dataset_name):
        other = "eval_split" if config.eval_split else "eval_dataset_name"
        raise UsageError(f"eval_holdout takes rows from the train split, but {other} is given too. Keep one.")
    if given.get("deepspeed"):
        deepspeed_install.check("deepspeed is set: ")
    offline = [name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if _is_on(os.environ.get(name, ""))]
    later = upload_command(run.training["output_dir"], given.get("hub_model_id"))
    later = f"Or train without push_to_hub and push the folder afterwards: {later}"
    if given.get("push_to_hub") and offline:
        raise UsageError(f"push_to_hub is true but {offline[0]} is set. Unset one of the two. {later}")
    if given.get("push_to_hub") and launched.rank() == 0 and not (given.get("hub_token") or _has_token()):
        raise UsageError(
            f"push_to_hub is true but there is no token for the hub. Set HF_TOKEN, or run hf auth login. {later}"
        )


def _has_token() -> bool:
    from huggingface_hub import get_token

    return get_token() is not None


def _is_on(text: str) -> bool:
    return text.strip().upper() in ("1", "ON", "YES", "TRUE")


def _check_output_dir(folder: str) -> None:
    try:
        if folder.strip():
            Path(folder).resolve().is_dir()
            return
        reason = "it is empty"
    except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL, a link to itself
        reason = getattr(error, "strerror", None) or str(error)
    raise UsageError(f"output_dir={show(folder)} is no folder's path: {reason}. Give another.")


def _check_folders(config: RunConfig) -> None:
    """What is clearly a path is no name on the hub, where it would be looked for."""
    for field in ("model_name_or_path", "tokenizer_name"):
        name = getattr(config, field)
        if name is not None and looks_like_a_path(name) and not Path(name).exists():
            near = closest_folder(name)
            raise UsageError(f'{field}="{name}": there is no such folder. {near}Paths start at {Path.cwd()}.')


def closest_folder(name: str) -> str:
    """A sentence with the folder whose name is most like that of a path which is not there; "" where none is."""
    path = Path(name)
    try:
        beside = [one.name for one in path.parent.iterdir() if one.is_dir()]
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, beside, 1, LIKENESS)
    return f'Closest: "{path.parent / near[0]}". ' if near else ""


def check_task_fields(task: str, given: dict[str, Any]) -> None:
    """UsageError for a field of another task, or a value this task has no meaning for."""
    for other, names in OF_TASK.items():
        useless = [name for name in names if name not in OF_TASK[task] and given.get(name) not in (None, False)]
        if useless:
            raise UsageError(
                f'{useless[0]}={show(given[useless[0]])} belongs to task "{other}", but task is "{task}". '
                f"Remove {useless[0]}."
            )
    if given.get("is_causal") is not None and given.get("use_lora"):
        raise UsageError(
            f"is_causal={show(given['is_causal'])} with use_lora: adapters are saved beside the base's own config, "
            "which does not say so. Save the base once with hf_dist_ext.set_is_causal, and train from that folder."
        )
    if task != "image-text-to-text":
        return
    if given.get("loss") not in (None, "none"):
        raise UsageError(f'loss={show(given["loss"])} is a loss over embeddings, but task is "{task}". Remove loss.')
    for name in ("max_length", "prompts"):
        keys = given[name].keys() if isinstance(given.get(name), dict) else ()
        if name == "max_length" and keys:
            raise UsageError(f'max_length is an object; with task "{task}" it is one number of tokens per row.')
        if set(keys) - {"prompt"}:
            raise UsageError(f'prompts={show(given[name])}: with task "{task}" it takes {{"prompt": "text "}}.')

"""Which fields belong to one task: given with another one they would be ignored, so they are refused."""

from __future__ import annotations

from typing import Any

from hf_dist_ext.errors import UsageError
from hf_dist_ext.run.fields import show

CONTRASTIVE_FIELDS = (
    "temperature learnable_temperature symmetric matryoshka_dims matryoshka_weights mask_false_negatives "
    "false_negative_margin cross_device_negatives gradient_cache_chunk_size gradient_cache_chunk_tokens "
    "gradient_cache_chunk_patches"
).split()
OF_TASK = {
    "embedding": [
        *CONTRASTIVE_FIELDS,
        *"pooling projection_dim normalize id_column image_columns no_duplicates_in_batch".split(),
    ],
    "image-text-to-text": ["generate_max_new_tokens"],
}


def check_task_fields(task: str, given: dict[str, Any]) -> None:
    """UsageError for a field of another task, or a value this task has no meaning for."""
    for other, names in OF_TASK.items():
        useless = [name for name in names if name not in OF_TASK[task] and given.get(name) not in (None, False)]
        if useless:
            raise UsageError(
                f'{useless[0]}={show(given[useless[0]])} belongs to task "{other}", but task is "{task}". '
                f"Remove {useless[0]}."
            )
    lora = [name for name in given if name.startswith("lora_") and given[name] is not None]
    if lora and not given.get("use_lora"):
        raise UsageError(f"{lora[0]}={show(given[lora[0]])} needs adapters. Set use_lora: true, or remove {lora[0]}.")
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

"""What 0.3 took out, and what to do instead: one sentence for each field, value and command that is still asked for.

`FIELDS` maps a field of the run file to its sentence, `VALUES` a field and one of its values, `COMMANDS` a command of
`hf-dist`. run/read.py and cli.py raise the sentence as a UsageError.
"""

FIELDS: dict[str, str] = {
    "compare": "`hf-dist plan --compare` is gone since 0.3: `metrics.jsonl` of a run has its rows per second and, on "
    "accelerators, its peak memory, `hf-dist plan` the same figures of the plan. Remove it.",
    "bf16_products": "`bf16_products` is gone since 0.3: products of the loss are in float32. Remove the field.",
    "cross_device_exchange": "`cross_device_exchange` is gone since 0.3: candidates are gathered. Remove the field.",
    "gradient_cache_width_multiple": "`gradient_cache_width_multiple` is gone since 0.3: it is 8. Remove the field.",
}

VALUES: dict[tuple[str, str], str] = {}

COMMANDS: dict[str, str] = {}

"""What 0.3 took out, and what to do instead: one sentence for each field, value and command that is still asked for.

`FIELDS` maps a field of the run file to its sentence, `VALUES` a field and one of its values, `COMMANDS` a command of
`hf-dist`. run/read.py and cli.py raise the sentence as a UsageError.
"""

FIELDS: dict[str, str] = {
    "compare": "`hf-dist plan --compare` is gone since 0.3: `metrics.jsonl` of a run has its rows per second and, on "
    "accelerators, its peak memory, `hf-dist plan` the same figures of the plan. Remove it.",
}

VALUES: dict[tuple[str, str], str] = {}

COMMANDS: dict[str, str] = {}

"""What 0.3 took out, and what to do instead: one sentence for each field, value and command that is still asked for.

`FIELDS` maps a field of the run file to its sentence, `VALUES` a field and one of its values, `COMMANDS` a command of
`hf-dist`. run/read.py and cli.py raise the sentence as a UsageError.
"""

FIELDS: dict[str, str] = {}

VALUES: dict[tuple[str, str], str] = {}

COMMANDS: dict[str, str] = {
    "encode": "gone since 0.3. SentenceTransformer(DIR).encode does it: docs/after-training.md has an example.",
    "mine": "gone since 0.3. mine_hard_negatives of sentence_transformers.util does it: docs/after-training.md has an "
    "example.",
    "push": "gone since 0.3. Run: hf upload REPO_ID DIR . --exclude 'checkpoint-*'",
}

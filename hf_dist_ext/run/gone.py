"""What 0.3 took out, and what to do instead: one sentence for each field, value and command that is still asked for.

`FIELDS` maps a field of the run file to its sentence, `VALUES` a field and one of its values, `COMMANDS` a command of
`hf-dist`, `EVALUATIONS` a type or a field of an entry of `evaluations`. run/read.py, run/evaluations.py and cli.py
raise the sentence as a UsageError.
"""

FIELDS: dict[str, str] = {
    "bf16_products": "`bf16_products` is gone since 0.3: products of the loss are in float32. Remove the field.",
    "cross_device_exchange": "`cross_device_exchange` is gone since 0.3: candidates are gathered. Remove the field.",
    "gradient_cache_width_multiple": "`gradient_cache_width_multiple` is gone since 0.3: it is 8. Remove the field.",
    "compare": "`hf-dist plan --compare` is gone since 0.3: `metrics.jsonl` of a run has its rows per second and, on "
    "accelerators, its peak memory, `hf-dist plan` the same figures of the plan. Remove it.",
}

VALUES: dict[tuple[str, str], str] = {
    ("pipeline_schedule", "looped_bfs"): (
        'it is gone since 0.3. Use "interleaved_1f1b", which waits as long and holds fewer chunks.'
    ),
    ("pipeline_schedule", "zero_bubble_v"): 'it is gone since 0.3. Use "zero_bubble".',
}

COMMANDS: dict[str, str] = {}

EVALUATIONS: dict[str, str] = {
    "nanobeir": 'type "nanobeir" is gone since 0.3: pass evaluator=NanoBEIREvaluator() to DistTrainer from Python.',
    "binary": 'type "binary" is gone since 0.3: pass evaluator=BinaryClassificationEvaluator(...) to DistTrainer from '
    "Python.",
    "reranking": 'type "reranking" is gone since 0.3: pass evaluator=RerankingEvaluator(...) to DistTrainer from '
    "Python.",
    "mteb": 'type "mteb" is gone since 0.3: run mteb.evaluate(model, tasks) on the trained folder.',
    "dims": 'dims is gone since 0.3: add an entry with a name of its own and "truncate_dim" for each width.',
    "precisions": "precisions is gone since 0.3: compare quantised embeddings after training, with "
    "sentence_transformers.quantization.",
    "ignore_identical_ids": "ignore_identical_ids is gone since 0.3: run mteb.evaluate(model, tasks) on the trained "
    "folder, which leaves a query's own document out.",
}

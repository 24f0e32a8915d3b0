"""`DistTrainer`, its arguments, and what watches over a run.

`trainer.py` is the subclass of Trainer and `arguments.py` that of TrainingArguments. `step.py` makes one training step
of a loss over embeddings, whose sizes `sizes.py` and whose columns `all_columns.py` have all ranks agree on, whose
padding `packing.py` leaves out, whose batches `ahead.py` cuts where they are made, and which `compiling.py` has
compiled; `own_loss.py` one of a causal language model in a pipeline. `health.py` watches signals, time limits, numbers
that are not finite (`nonfinite.py`) and bad rows (`bad_row_count.py`); `out_of_memory.py` makes chunks smaller;
`timing.py`, `meter.py` and `scaling.py` measure, `measured.py` leaves that in a file, `console.py` tells. `metrics.py`
computes retrieval metrics of held-out rows. `early_stopping.py` ends a run that gets no better.
`sentence_losses.py` has losses of sentence-transformers score embeddings, and `losses_by_name.py` makes such a loss.
`model_card.py` puts a section of the run file after the card of sentence-transformers: its pictures are of
`curves.py`. `sentence_trainer.py` takes what a trainer of sentence-transformers takes.
"""

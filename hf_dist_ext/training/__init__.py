"""`DistTrainer`, its arguments, and what watches over a run.

`trainer.py` is the subclass of Trainer and `arguments.py` that of TrainingArguments; `running.py` says what the parts
of a trainer ask of it. `step.py` makes one training step of a loss over embeddings, whose sizes and columns `sizes.py`
has all ranks agree on, whose padding `packing.py` leaves out, whose batches `ahead.py` cuts where they are made, and
which `compiling.py` has compiled; `own_loss.py` watches a model that trains with its own loss. `health.py` decides
before each update, with all ranks, whether it is made and the run goes on: it watches numbers that are not finite
(`nonfinite.py`), passes that differ, signals, time limits and bad rows;
`out_of_memory.py` makes chunks smaller; `meter.py` says what a step did and where its time went, `scaling.py` what a
run took, and `console.py` tells. `metrics.py` computes retrieval metrics of held-out rows. `sentence_losses.py` has
losses of sentence-transformers score embeddings, and `losses_by_name.py` makes such a loss. `model_card.py` puts a
section of the run file after the card of sentence-transformers: its pictures are of `curves.py`, and `final_model.py`
writes the folder at the end. `sentence_trainer.py` takes what a trainer of sentence-transformers takes, its arguments
by `sentence_arguments.py`, its datasets by `sentence_data.py`. `checks.py` refuses at the start what can not work,
`same_run.py` ranks that were started differently; `learning_rate.py` scales the rate with the batch.
"""

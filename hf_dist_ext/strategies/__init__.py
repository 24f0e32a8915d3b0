"""How a model and its rows are spread over processes: one process, DDP, FSDP2, ZeRO, tensor parallelism,
pipelines.

`base.py` holds the questions that a run asks, with the answers of one process. `ddp.py`, `fsdp.py`, `zero.py` with
`zero_checkpoint.py`, `tensor_parallel.py` and `pipeline.py` override what differs, and `choose.py` says which one
runs: a new one is a file of its own and a line there. `sparse.py` lets DDP send a part of its gradients, `sharded.py`
runs FSDP2's collectives, `fsdp_options.py` reads what a run file says of FSDP, `splitting.py` says which models can be
split, `plans.py` how, and `adapters.py` splits what LoRA adds to them. `pipeline.py` stands on six files:
`pipeline_options.py` says what can run as a pipeline, `mesh.py` which ranks are one, `stages.py` cuts a model,
`sharded_stages.py` shards a rank's stages over pipelines, `schedules.py` says which rank works on what when, and
`pipeline_passes.py` takes the chunks of a step through the stages. `pipeline_own_loss.py` and `own_loss_stages.py` do
the same for a causal language model that is trained with its own loss.

`rows.py` gathers rows with gradients, `ragged.py` rows of many vectors, `ring.py` sends blocks of rows round,
`collectives.py` is what all ranks do together beside, `tensors.py` is for tensors of which a process holds a part,
`layers.py` finds a model's layers, and `consensus.py` makes every rank see the error of one.
"""

"""How a model and its rows are spread over processes: one process, DDP, FSDP2, ZeRO, tensor parallelism,
pipelines.

`base.py` holds the questions that a run asks, with the answers of one process. `ddp.py`, `fsdp.py`, `zero.py` with
`zero_checkpoint.py`, `tensor_parallel.py` and the package `pipeline` override what differs, and `choose.py` says which
one runs: a new one is a file of its own and a line there. `sparse.py` lets DDP send a part of its gradients,
`sharded.py` runs FSDP2's collectives, `fsdp_options.py` reads what a run file says of FSDP, `splitting.py` says which
models can be split, `plans.py` how, and `mesh.py` says which ranks make a
pipeline or split a layer.

`gathering.py` gathers rows with gradients, `collectives.py` is what all ranks do together beside, `tensors.py` is for
tensors of which a process holds a part, `layers.py` finds a model's layers, and `consensus.py` makes every rank see
the error of one.
"""

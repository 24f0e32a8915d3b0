"""How a model and its rows are spread over processes: one process, DDP, FSDP2, ZeRO, tensor parallelism.

`collectives.py` gathers rows with gradients and says which backward reduces; `choose.py` refuses what would be wrong.
`ddp.py`, `fsdp.py`, `zero.py` with `zero_checkpoint.py`, and `tensor_parallel.py` hold what one of them needs alone.
`agreed.py` makes every rank see the error of one; `tensors.py` is for tensors of which a process holds a part.
"""

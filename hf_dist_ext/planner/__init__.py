"""A run and a machine become a plan: which strategy fits, and which is fastest.

`choose.py` makes a `plan.py`, from what a step computes (a `workload.py`, which `from_run.py` reads of a run file),
`catalog.py` (the ways to spread a run), `memory.py` (bytes per device) and `traffic.py` (what is sent); `devices.py`
knows what is here, cards by name, and measures the CPU. Pipelines have their own catalog, bytes and traffic in
`pipelines.py`. `auto.py` answers for `accelerate_config: "auto"`, and `command.py` is `hf-dist plan`: `reasons.py` and
`report.py` say why. `local_files.py` finds a model's files. What a forward keeps and computes is a `forward.py`, which
torch finds once in a process of its own (`traced.py`). `environment.py` lists versions and devices, and `described.py`
says what a run file comes to. Nothing here imports torch.
"""

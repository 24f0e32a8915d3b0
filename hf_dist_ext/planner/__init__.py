"""A run and a machine become a plan: which strategy fits, and which is fastest.

`choose.py` makes a `plan.py`, from what a step computes (a `workload.py`, which `from_run.py` reads of a run file),
`catalog.py` (the ways to spread a run), `memory.py` (bytes per device) and `traffic.py` (what is sent); `cards.py`
knows devices by name, `cpu.py` measures the one that is always here. Pipelines have their own catalog, bytes and
traffic in `pipelines.py`, over stages that `cut.py` makes. `command.py` is `hf-dist plan`:
`reasons.py` and `report.py` say why, `compare.py` what came of it, and `grid.py` has a row for each of several
machines. `lengths.py` samples how long the rows of local data are. What a forward keeps and computes is a
`forward.py`, which torch finds once in a process of its own (`traced.py`), with pictures as `pictures.py` sizes them.
`model_files.py` finds a model's files, `environment.py` lists versions and devices, `resolved.py` says what a run file
comes to, `data_seen.py` what of its data is seen at once. Nothing here imports torch.
"""

"""What encodes: models of sentence-transformers, and what a trainer asks of any model that embeds.

`from_run.py` builds or loads the model of a run file, `backbones.py` the transformers model inside of one that is
built. `embedder.py` asks a model how its chunks run, `packing.py` has a backbone read rows that stand end to end,
and tells it whether others are padded. `adapters.py` puts LoRA in and merges it, `folders.py` finds a model's
folder here or on the hub.
"""

"""A checkpoint is written, committed, and read back, whole or not at all.

`manifest.py` is the record that makes a folder a checkpoint, and `commit.py` writes it last. `async_save.py` lets
training go on meanwhile. `resume.py` decides which checkpoint a run continues from. `trainable.py` writes what trains,
by name; `merge.py` makes a complete model of it. `safe_reading.py` reads files without running what they say.
"""

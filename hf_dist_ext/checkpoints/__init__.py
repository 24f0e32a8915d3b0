"""A checkpoint is written, committed, and read back, whole or not at all.

`keeper.py` makes a save one act, and `model_files.py` writes and reads what a folder holds of the model. `manifest.py`
is the record that makes a folder a checkpoint, `commit.py` writes it last, and `facts.py` says what it tells of the
run. `async_save.py` lets training go on meanwhile. `resume.py` decides which checkpoint a run continues from.
`trainable.py` writes what trains, by name, and `loss_state.py` what the loss trains; `merge.py` makes a complete model
of it. `safe_reading.py` looks into files before they are read, so that nothing in them is run.
"""

"""A checkpoint is written, committed, and read back, whole or not at all.

`keeper.py` makes a save one act, and `model_files.py` writes and reads what a folder holds of the model. `manifest.py`
is the record that makes a folder a checkpoint, `commit.py` writes it last, and `facts.py` says what it tells of the
run. `async_save.py` lets training go on meanwhile. `folder.py` looks into an output folder: which checkpoints it has,
and which one "auto" and a path mean; `resume.py` decides it on all ranks. `trainable.py` writes what trains, by name,
and `loss_state.py` what the loss trains; `merge.py` makes a complete model of it. `weights.py` reads whole weights
into the model, `sentence_model.py` writes the folder of a SentenceTransformer, `model_names.py` knows a folder's files
by name, and `hub.py` pushes them. `safe_reading.py` looks
into files before they are read, so that nothing in them is run.
"""

"""Who trains, and how the rest of the model runs and is kept.

`groups.py` knows a model's parts by name, `who_trains.py` decides from names which parameters train, and `freeze.py`
asserts it in a run. `run_mode.py` keeps what is random out of frozen parts. `encode_once.py`, `leading_part.py`,
`feature_cache.py` and `feature_store.py` spare the forward of what never changes. `image_stand_in.py` gives a batch
without pictures a blank one.
"""

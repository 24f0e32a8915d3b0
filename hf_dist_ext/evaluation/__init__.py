"""Figures while a model trains, on all ranks: evaluators of sentence-transformers, of `mteb` and of your own.

`encoder.py` is a model whose `encode` shares its rows out over ranks, `evaluators.py` runs evaluators on it, and
`from_files.py` makes evaluators of what a run file names.
"""

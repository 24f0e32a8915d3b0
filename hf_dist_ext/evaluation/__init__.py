"""Figures while a model trains, on all ranks: evaluators of sentence-transformers and of your own.

`encoder.py` is a model whose `encode` shares its rows out over ranks, `evaluators.py` runs evaluators on it, and
`from_files.py` makes evaluators of what a run file names. Of held-out rows `token_vectors.py` compares the vectors of
every token, and `retrieval_metrics/` computes figures from ranks.
"""

from typing import TYPE_CHECKING

from hf_dist_ext.lazy import handed_on

if TYPE_CHECKING:  # what an editor completes and a type checker reads
    from hf_dist_ext.evaluation.from_files import evaluators_of as evaluators_of

_HOMES = {"evaluators_of": "from_files"}
__all__ = list(_HOMES)
__getattr__ = handed_on(__name__, _HOMES)

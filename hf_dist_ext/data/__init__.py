"""Rows, their order, and the batches made of them.

`load.py` opens a dataset: `columns.py` gives its columns our names, `row_check.py` looks at every row, `hold_out.py`
takes evaluation rows from the training split. `conversations.py` and `image_files.py` read rows with pictures;
`code_search.py`, `digits.py` and `glyphs.py` are the datasets that need no download. `order.py`, `sampling.py` and
`stream_order.py` (with `stream_readers.py`) put rows in order, `position.py` finds the place in that order at a
resume. `row_ids.py` numbers texts that may not share a batch, in files of `kept_files.py`. `mixture.py` holds several
datasets, and `fingerprint.py` finds out whether the data are the same. `collator.py` has what all collators share:
`sentence_collator.py` makes batches by a tokenizer or the `preprocess` of a SentenceTransformer,
`image_text_collator.py` those of conversations, and `row_facts.py` takes a batch apart again. `tokens.py` holds texts'
tokens before they are padded. `evaluations.py` reads the corpora and rows that a run is judged by. `bad_rows.py` has
what a training loader calls for a batch, which replaces rows that can not be used; `storage.py` deals with files that
can not be read, and `encoding.py` with files that are not UTF-8.
"""

from typing import TYPE_CHECKING

from hf_dist_ext.lazy import handed_on

if TYPE_CHECKING:  # what an editor completes and a type checker reads
    from hf_dist_ext.data.code_search import train_tokenizer as train_tokenizer
    from hf_dist_ext.data.evaluations import read_evaluations as read_evaluations
    from hf_dist_ext.data.sentence_collator import ContrastiveCollator as ContrastiveCollator

_HOMES = {
    "ContrastiveCollator": "sentence_collator",
    "read_evaluations": "evaluations",
    "train_tokenizer": "code_search",
}
__all__ = list(_HOMES)
__getattr__ = handed_on(__name__, _HOMES)

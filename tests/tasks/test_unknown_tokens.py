"""A tokenizer whose vocabulary is of other texts is named before training."""

import logging

import pytest
from datasets import Dataset

from hf_dist_ext.tasks.unknown_tokens import warn_of_unknown
from tests.tiny_models import tiny_tokenizer


@pytest.mark.parametrize("negative", [["zebra quagga"], "zebra quagga"])
def test_a_column_of_unknown_words_is_named(caplog, negative):
    tokenizer = tiny_tokenizer()
    known = [word for word in tokenizer.get_vocab() if word.isalpha()][:3]
    row = {"query": " ".join(known), "positive": " ".join(known), "negative": negative}
    with caplog.at_level(logging.WARNING):
        warn_of_unknown(tokenizer, Dataset.from_list([row] * 3), ["query", "positive", "negative", "picture"])
    assert len(caplog.messages) == 1 and '100% of the tokens of column "negative"' in caplog.messages[0]


def test_a_stream_and_a_tokenizer_without_unknown_tokens_are_left_alone(caplog):
    rows = Dataset.from_list([{"query": "zebra quagga"}])
    warn_of_unknown(tiny_tokenizer(), rows.to_iterable_dataset(), ["query"])
    warn_of_unknown(object(), rows, ["query"])
    assert not caplog.messages

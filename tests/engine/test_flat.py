"""Rows that travel end to end: chunks are those of a padded batch, bit for bit, in the memory of the real tokens."""

import numpy as np
import pytest
import torch

from hf_dist_ext.data.tokens import Tokens, without_rows
from hf_dist_ext.engine.layout import lay_out
from hf_dist_ext.engine.tables import ChunkLimits
from hf_dist_ext.training.nonfinite import describe_rows

FILL = {"input_ids": 7, "token_type_ids": 3}
LENGTHS = {"query": [3, 9, 1, 5, 5, 2, 8], "positive": [30, 1, 12, 17, 40, 2, 9], "negative": [4, 25, 6]}


def tokens_of(lengths: list[int], with_types: bool) -> Tokens:
    count = sum(lengths)
    values = {"input_ids": np.arange(100, 100 + count, dtype=np.int32)}
    if with_types:
        values["token_type_ids"] = (np.arange(count) % 2).astype(np.uint8)
    return Tokens(values, np.array(lengths))


def batches(side: str, with_types: bool, **more) -> tuple[dict, dict]:
    tokens = {name: tokens_of(lengths, with_types) for name, lengths in {**LENGTHS, **more}.items()}
    flat = {name: one.flat(FILL, side) for name, one in tokens.items()}
    return flat, {name: one.padded(FILL, side) for name, one in tokens.items()}


def assert_same_chunks(flat: dict, padded: dict, limits: ChunkLimits, **options) -> None:
    one, other = lay_out(flat, limits, **options), lay_out(padded, limits, **options)
    assert one.row_counts() == other.row_counts() and one.count_tokens() == other.count_tokens()
    chunks, expected = one.chunks(), other.chunks()
    assert [(c.start, c.stop, c.width) for c in chunks] == [(c.start, c.stop, c.width) for c in expected]
    for chunk, wanted in zip(chunks, expected, strict=True):
        found, wanted = chunk.features, wanted.features
        assert list(found) == list(wanted)
        for key, value in wanted.items():
            assert found[key].dtype == value.dtype and torch.equal(found[key], value), key


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("limits", [ChunkLimits(), ChunkLimits(1), ChunkLimits(4), ChunkLimits(max_tokens=60)])
@pytest.mark.parametrize("options", [
    {}, {"sort": False}, {"can_shift": True, "pad_values": {"input_ids": 11}}, {"shares_tower": False},
    {"can_trim": False},
])  # fmt: skip
def test_chunks_are_those_of_a_padded_batch(side, limits, options):
    for with_types in (False, True):
        assert_same_chunks(*batches(side, with_types), limits, **options)


@pytest.mark.parametrize("side", ["right", "left"])
def test_rows_without_tokens_and_columns_without_rows(side):
    assert_same_chunks(*batches(side, True, positive=[0, 4, 0, 2, 9, 1, 1]), ChunkLimits(3))
    flat, padded = batches(side, True)
    flat["negative"], padded["negative"] = without_rows(flat["negative"]), without_rows(padded["negative"])
    assert_same_chunks(flat, padded, ChunkLimits(3))
    flat, padded = batches(side, False, negative=[0, 0])
    assert_same_chunks(flat, padded, ChunkLimits(3), shares_tower=False)


def test_flat_and_padded_columns_share_a_batch():
    flat, padded = batches("right", False)
    assert_same_chunks(flat | {"positive": padded["positive"]}, padded, ChunkLimits(4))


def num_bytes(features: object) -> int:
    if isinstance(features, dict):
        return sum(num_bytes(value) for value in features.values())
    return getattr(features, "nbytes", 0)


def test_a_batch_takes_the_memory_of_its_real_tokens():
    """One row of 8,192 tokens among 16,384 short ones. Padded it would take 2 GiB."""
    lengths = [8192] + [12] * 16384
    batch = tokens_of(lengths, False).flat(FILL, "right")
    assert num_bytes(batch) == 4 * sum(lengths) + 8 * len(lengths) + 8 * (len(lengths) + 1)
    chunked = lay_out({"query": batch, "positive": batch}, ChunkLimits(max_tokens=16384))
    largest = max(num_bytes(chunk.features) for chunk in chunked.chunks())
    assert largest <= 2 * 8 * 16384  # ids and mask of a chunk


def test_rows_of_a_batch_are_described_by_their_texts():
    class Reader:
        def batch_decode(self, rows, skip_special_tokens):
            return [" ".join(map(str, row)) for row in rows]

    flat, _ = batches("right", False)
    assert describe_rows(flat, Reader()).startswith("'100 101 102', '103 104")

"""Chunks hold every row once, fit their limits, and go back to the batch's order. Images: test_images.py."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hf_dist_ext.engine import tables
from hf_dist_ext.engine.layout import lay_out
from hf_dist_ext.engine.tables import ChunkLimits, Table
from hf_dist_ext.errors import UsageError
from hf_dist_ext.training.sizes import costliest_chunks


def text(lengths: list[int], width: int, on_left: bool = False, value: int = 1) -> dict[str, torch.Tensor]:
    positions = torch.arange(width)
    ends = torch.tensor(lengths)[:, None]
    mask = (positions >= width - ends if on_left else positions < ends).long()
    return {"input_ids": mask * value, "attention_mask": mask}


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    draw = lambda n, width: torch.randint(1, width + 1, (n,), generator=generator).tolist()  # noqa: E731
    return {"query": text(draw(13, 7), 7), "positive": text(draw(13, 40), 40), "negative": text(draw(29, 25), 25)}


def test_sorting_computes_fewer_tokens_than_trimming_neighbours(batch):
    real, in_order = lay_out(batch, ChunkLimits(4), sort=False).count_tokens()
    again, by_length = lay_out(batch, ChunkLimits(4)).count_tokens()
    _, padded = lay_out(batch, ChunkLimits()).count_tokens()
    assert real == again == sum(int(f["attention_mask"].sum()) for f in batch.values())
    assert real < by_length < in_order < padded


def test_ranks_may_ask_for_more_chunks_and_idle_ones_come_last(batch):
    chunked = lay_out(batch, ChunkLimits(20))
    before = chunked.num_chunks()
    chunked.agree([before[0] + 3])
    chunks = chunked.chunks()
    assert len(chunks) == before[0] + 3 and not any(c.is_idle for c in chunks)
    assert sum(c.num_rows for c in chunks) == 55
    few = lay_out({"query": text([3, 1], 4), "positive": text([2, 4], 4)}, ChunkLimits(2))
    few.agree([6])
    chunks = few.chunks()
    assert [c.is_idle for c in chunks] == [False] * 4 + [True] * 2
    outputs = [c.features["attention_mask"].sum(1, keepdim=True).double() for c in chunks]
    assert few.to_columns(outputs, chunks)["positive"][:, 0].tolist() == [2, 4]
    gradients = few.to_chunks(few.to_columns(outputs, chunks), chunks)
    assert all(not g.any() for g, c in zip(gradients, chunks, strict=True) if c.is_idle)


def test_left_padding_is_trimmed_only_where_positions_are_relative():
    batch = {"query": text([3, 2], 16, on_left=True), "positive": text([5, 1], 24, on_left=True)}
    shifted = lay_out(batch, ChunkLimits(4), can_shift=True).chunks()
    assert [c.features["input_ids"].shape for c in shifted] == [(4, 8)]
    assert all(c.features["attention_mask"][:, -1].all() for c in shifted)
    kept = lay_out(batch, ChunkLimits(4)).chunks()
    assert sorted(c.features["input_ids"].shape[1] for c in kept) == [16, 24]


def test_a_fixed_width_is_never_trimmed():
    chunks = lay_out(
        {"query": text([3, 2], 16), "positive": text([5, 1], 16)}, ChunkLimits(2), can_trim=False
    ).chunks()
    assert {c.features["input_ids"].shape[1] for c in chunks} == {16}


@pytest.mark.parametrize("model_type", ["siglip", "siglip_text_model", "siglip2", "siglip2_text_model"])
def test_siglip_text_keeps_its_width_and_mixes_with_no_other(model_type):
    batch = {"query": text([3, 2], 16), "positive": text([5, 1], 16), "negative": text([2, 7], 24)}
    config = SimpleNamespace(model_type=model_type)
    chunks = lay_out(batch, ChunkLimits(4), model_config=config).chunks()
    assert [chunk.features["input_ids"].shape for chunk in chunks] == [(2, 16), (2, 16), (2, 24)]
    one_tower = lay_out(batch, ChunkLimits(2), model_config={"query": config}, shares_tower=False).chunks()
    assert [chunk.features["input_ids"].shape[1] for chunk in one_tower] == [16, 8, 8]


def test_real_tokens_are_counted_without_left_padding():
    batch = {"query": text([3, 2], 16, on_left=True), "positive": text([5, 1], 16, on_left=True)}
    assert lay_out(batch, ChunkLimits(1)).count_tokens() == (11, 64)
    assert lay_out(batch, ChunkLimits(1), can_shift=True).count_tokens() == (11, 32)


def test_rows_are_counted_per_column():
    chunked = lay_out({"query": text([3, 2], 16), "negative": text([5, 1, 4, 4], 24)}, ChunkLimits(2))
    assert chunked.row_counts() == {"query": 2, "negative": 4}
    assert chunked.num_chunks(by_vision=True) == [3, 0, 0, 0]
    chunked.agree([4, 0, 0, 0], by_vision=True)
    assert chunked.num_chunks() == [4]


def test_widening_uses_the_models_padding_token():
    batch = {"query": text([2, 2], 2, value=5), "positive": text([9, 9], 9, value=5)}
    chunk = lay_out(batch, ChunkLimits(), pad_values={"input_ids": 7}).chunks()[0]
    assert (chunk.features["input_ids"] == 7).sum() == 14
    assert chunk.features["attention_mask"].sum() == 22


def test_a_row_without_real_tokens_keeps_a_shape():
    chunks = lay_out({"query": text([0, 2], 8), "positive": text([3, 3], 8)}, ChunkLimits(1)).chunks()
    assert sorted(c.features["input_ids"].shape[0] for c in chunks) == [1] * 4


def test_columns_come_in_the_order_of_the_batch_whatever_their_kinds():
    batch = {name: text([3, 2], 16) for name in ("query", "positive", "negative")}
    batch["positive"]["token_type_ids"] = batch["positive"]["input_ids"]
    chunked = lay_out(batch, ChunkLimits(1))
    assert [table.columns for table in chunked.tables] == [["query", "negative"], ["positive"]]
    chunks = chunked.chunks()
    columns = chunked.to_columns([torch.zeros(1, 4) for _ in chunks], chunks)
    assert list(columns) == list(chunked.row_counts()) == list(batch)


@pytest.mark.parametrize("features, words", [
    ({"input_ids": [[1, 2]]}, "tensors"),
    ({}, "no features"),
    ({"input_ids": torch.ones(2, 3), "pixel_values": torch.ones(3, 3, 4, 4)}, "how many images"),
])  # fmt: skip
def test_features_that_can_not_be_cut_are_named(features, words):
    with pytest.raises(UsageError, match=words):
        lay_out({"query": features}, ChunkLimits(2))


def test_a_process_without_any_row_of_a_kind_says_what_to_do(batch):
    other_kind = {"token_type_ids": torch.zeros(0, 25, dtype=torch.long)}
    batch["negative"] = {name: values[:0] for name, values in batch["negative"].items()} | other_kind
    chunked = lay_out(batch, ChunkLimits(4))
    assert len(chunked.chunks()) == 7  # this process alone has nothing to do for them
    chunked = lay_out(batch, ChunkLimits(4))
    (text, pictures, *of_negatives) = chunked.num_chunks(by_vision=True)
    assert (text, pictures, of_negatives) == (7, 0, [0, 0, 0, 0])
    chunked.agree([text, 0, 1, 0, 0, 0], by_vision=True)
    with pytest.raises(UsageError, match="negative.*Give every row of a batch a negative"):
        chunked.chunks()


def test_a_share_of_one_row_is_one():
    assert ChunkLimits(1, 3, max_patches=2).scaled(0.3) == ChunkLimits(1, 1, max_patches=1)


@pytest.mark.parametrize("widths", [(11, 13), (13, 13)])
def test_tokens_without_a_mask_are_never_padded(widths):
    batch = {f"column {i}": {"input_ids": torch.randint(1, 50, (5, width))} for i, width in enumerate(widths)}
    chunked = lay_out(batch, ChunkLimits(4))
    chunks = chunked.chunks()
    assert len(chunks) == 4
    ids = [chunk.features["input_ids"] for chunk in chunks]
    assert {rows.shape[1] for rows in ids} == set(widths) and all((rows > 0).all() for rows in ids)
    sums = chunked.to_columns([rows.sum(1, keepdim=True) for rows in ids], chunks)
    for name, features in batch.items():
        assert torch.equal(sums[name], features["input_ids"].sum(1, keepdim=True))


def test_a_try_out_holds_a_graph_of_each_tower(batch):
    (costliest,) = costliest_chunks(shared := lay_out(batch, ChunkLimits(max_rows=3)))
    assert costliest.num_tokens == max(chunk.num_tokens for chunk in shared.chunks())
    towers = lay_out(batch, ChunkLimits(max_rows=3), shares_tower=False)
    assert [chunk.column for chunk in costliest_chunks(towers)] == list(batch)


def test_rows_without_a_token_axis_share_chunks():
    chunked = lay_out(
        {name: {"pixel_values": torch.rand(5, 3, 4, 4)} for name in ("query", "positive")}, ChunkLimits(4)
    )
    assert [chunk.num_rows for chunk in chunked.chunks()] == [4, 4, 2]


def row_by_row(table: Table, limits: ChunkLimits) -> list[tuple[int, int]]:
    """A chunk closes when the next row would pass a limit."""
    bounds, start = [], 0
    for stop in range(1, table.num_rows + 1):
        left, right = table.window(start, stop, limits)
        tokens = (stop - start) * (right - left)
        if limits.packs:
            tokens = table.packed.num_tokens(start, stop)
        entries, longest = table.patches[start:stop].T
        demands = [stop - start, tokens, entries.sum() * longest.max()]
        sizes = [limits.max_rows, limits.max_tokens, PATCHES]
        if stop - start > 1 and any(
            most is not None and demand > most for demand, most in zip(demands, sizes, strict=True)
        ):
            bounds.append((start, stop - 1))
            start = stop - 1
    return [*bounds, (start, table.num_rows)]


PATCHES = 300


@pytest.mark.parametrize("sort", [True, False])
@pytest.mark.parametrize("sizes", [
    dict(max_rows=7), dict(max_tokens=300), dict(max_tokens=5), dict(max_rows=50, max_tokens=900),
    dict(max_tokens=300, packs=True), dict(max_rows=40, max_tokens=700, packs=True),
    dict(),
], ids=str)  # fmt: skip
def test_a_chunk_ends_where_the_next_row_would_pass_a_limit(sizes, sort):
    limits, draw = ChunkLimits(max_patches=PATCHES, **sizes), np.random.default_rng(3)
    for on_left in (False, True):
        features = text(draw.integers(1, 61, 211).tolist(), 60, on_left)
        (table,) = lay_out({"query": features}, limits, sort=sort, can_shift=on_left).tables
        table.patches = draw.integers([0, 1], [1 if limits.packs else 5, 12], (211, 2))  # packed rows have none
        found = table.pack(limits)
        assert found == row_by_row(table, limits) and len(found) > 5


def test_packed_rows_are_not_looked_at_one_by_one(monkeypatch):
    looked, bisect = [], tables.bisect_right
    monkeypatch.setattr(tables, "bisect_right", lambda *given: looked.append(given[1]) or bisect(*given))
    monkeypatch.setattr(Table, "_widened", None)
    (table,) = lay_out({"query": text([8] * 8192, 8)}, ChunkLimits(packs=True)).tables
    looked.clear()
    assert len(table.pack(ChunkLimits(max_tokens=4096, packs=True))) == len(looked) == 16

"""Chunks gather their rows from the collator's tensors, exactly those of a sorted, padded table, and keep none."""

import gc
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_dist_ext.engine.layout import lay_out
from hf_dist_ext.engine.tables import ChunkLimits

WIDTHS = {"query": 9, "positive": 40, "negative": 25}
FILL = 77


def columns(on_left: bool) -> dict[str, dict[str, torch.Tensor]]:
    """Every token is its row's number, every feature without tokens too, so that nothing can be mixed up unseen."""
    generator, batch, number = torch.Generator().manual_seed(0), {}, 100
    for name, width in WIDTHS.items():
        rows = 11 if name != "negative" else 23
        lengths = torch.randint(1, width + 1, (rows, 1), generator=generator)
        token = torch.arange(width)
        mask = (token >= width - lengths if on_left else token < lengths).long()
        ids = torch.arange(number, number + rows)
        batch[name] = {"input_ids": torch.where(mask > 0, ids[:, None] * 100 + token, FILL), "attention_mask": mask}
        batch[name]["row"], number = ids, number + rows
    return batch


def rows_of(features: dict[str, torch.Tensor]) -> dict[int, dict[str, list[int]]]:
    """Row number -> its real tokens, and their positions where there are some."""
    found = {}
    for i, row in enumerate(features["row"].tolist()):
        real = features["attention_mask"][i] > 0
        assert (features["input_ids"][i][~real] == FILL).all()
        found[row] = {"tokens": features["input_ids"][i][real].tolist()}
        if "position_ids" in features:
            found[row]["positions"] = features["position_ids"][i][real].tolist()
    return found


@pytest.mark.parametrize("limits", [ChunkLimits(4), ChunkLimits(1), ChunkLimits(max_tokens=100), ChunkLimits()])
@pytest.mark.parametrize("on_left", [False, True])
@pytest.mark.parametrize("sort", [False, True])
def test_every_row_arrives_whole_and_at_the_positions_it_had(limits, on_left, sort):
    batch = columns(on_left)
    wanted = {}
    for features in batch.values():
        token = torch.arange(features["input_ids"].shape[1]).expand_as(features["input_ids"])
        wanted |= rows_of({**features, "position_ids": token} if on_left else features)
    chunked = lay_out(batch, limits, can_shift=True, sort=sort, pad_values={"input_ids": FILL})
    chunked.agree([2])
    found = {}
    for chunk in chunked.chunks():
        assert {value.shape[0] for value in chunk.features.values()} == {chunk.num_rows}
        assert chunk.features["input_ids"].shape[1] == chunk.width and chunk.width % 8 == 0
        assert limits.max_rows is None or chunk.num_rows <= limits.max_rows
        assert limits.max_tokens is None or chunk.num_rows == 1 or chunk.num_rows * chunk.width <= limits.max_tokens
        rows = rows_of(chunk.features)
        assert not rows.keys() & found.keys()
        found |= rows
    assert found == wanted and len(found) == 45
    embedded = [chunk.features["row"][:, None].double() for chunk in chunked.chunks()]
    for name, rows in chunked.to_columns(embedded, chunked.chunks()).items():
        assert torch.equal(rows[:, 0], batch[name]["row"].double())


def test_an_idle_chunk_is_the_shortest_row_wherever_its_column_stands():
    batch = columns(on_left=False)
    chunked = lay_out(batch, ChunkLimits(max_rows=1))
    chunked.agree([47])
    shortest = min(int(length) for features in batch.values() for length in features["attention_mask"].sum(1))
    idle = [chunk for chunk in chunked.chunks() if chunk.is_idle]
    assert len(idle) == 2
    assert all(int(chunk.features["attention_mask"].sum()) == shortest for chunk in idle)
    assert all(chunk.features["input_ids"].shape == (1, 8) for chunk in idle)


def test_a_chunks_features_are_freed_with_it():
    chunk = lay_out(columns(on_left=False), ChunkLimits(4)).chunks()[0]
    features = chunk.features
    kept = weakref.ref(features["input_ids"])
    del features
    gc.collect()
    assert kept() is None


class LargestTensor(TorchDispatchMode):
    """Numbers of the largest integer tensor made inside; views of `known` are not made."""

    def __init__(self, known):
        super().__init__()
        self.known, self.numbers = {tensor.untyped_storage().data_ptr() for tensor in known}, 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        if isinstance(result, torch.Tensor) and result.dtype in (torch.int32, torch.int64):
            storage = result.untyped_storage()
            if storage.data_ptr() not in self.known:
                self.numbers = max(self.numbers, storage.nbytes() // result.itemsize)
        return result


@pytest.mark.parametrize("packs", [False, True])
def test_no_copy_of_the_batch_is_made(packs):
    """Packed chunks make three numbers per token of theirs."""
    batch = columns(on_left=True)
    for features in batch.values() if packs else ():
        del features["row"]
    limits = ChunkLimits(max_tokens=80, packs=packs)
    chunked = lay_out(batch, limits, can_shift=True, pad_values={"input_ids": FILL})
    largest = max(chunk.num_tokens for chunk in chunked.chunks()) * (3 if packs else 1)
    with LargestTensor([value for features in batch.values() for value in features.values()]) as seen:
        for chunk in chunked.chunks():
            assert chunk.features["input_ids"].is_contiguous()
    row_numbers = 4 * (45 + 1) if packs else 2 * 45
    assert 0 < seen.numbers <= max(largest, row_numbers) < 45 * 40 / 4


def test_rows_in_the_batchs_own_order_are_views_of_it():
    batch = {"query": columns(on_left=False)["query"]}
    chunks = lay_out(batch, ChunkLimits(4), sort=False).chunks()
    ids = batch["query"]["input_ids"]
    assert [chunk.features["input_ids"].data_ptr() for chunk in chunks] == [ids[i].data_ptr() for i in (0, 4, 8)]

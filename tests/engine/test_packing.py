"""Packed chunks hold the real tokens of their rows, each once and in its place, and no others."""

from dataclasses import replace

import pytest
import torch
import torch.distributed.utils as distributed_utils

from hf_dist_ext.engine.layout import lay_out
from hf_dist_ext.engine.tables import ChunkLimits

WIDTHS = {"query": 9, "positive": 40, "negative": 25}


def columns(on_left: bool = False, seed: int = 0) -> dict[str, dict[str, torch.Tensor]]:
    """A token is its row's number and its place in the column, so that nothing can be mixed up unseen."""
    generator, batch, number = torch.Generator().manual_seed(seed), {}, 100
    for name, width in WIDTHS.items():
        rows = 11 if name != "negative" else 23
        lengths, token = torch.randint(1, width + 1, (rows, 1), generator=generator), torch.arange(width)
        mask = (token >= width - lengths if on_left else token < lengths).long()
        ids = torch.arange(number, number + rows)[:, None] * 100 + token
        batch[name] = {"input_ids": ids * mask, "token_type_ids": ids * mask % 7, "attention_mask": mask}
        number += rows
    return batch


def flat(features: dict[str, torch.Tensor], on_left: bool) -> dict:
    """The same column as it travels end to end (engine/flat.py)."""
    is_real = features["attention_mask"] > 0
    lengths = is_real.sum(1).numpy()
    known = {"lengths": lengths, "width": is_real.shape[1], "pads_left": on_left}
    offsets = torch.tensor([0, *lengths.cumsum()])
    keys = ("input_ids", "token_type_ids")
    values = {key: features[key][is_real] for key in keys}
    return values | {"offsets": offsets, "flat": known | {"fill": dict.fromkeys(keys, 0)}}


def real_tokens(batch) -> list[list[int]]:
    return [
        ids[mask > 0].tolist()
        for features in batch.values()
        for ids, mask in zip(features["input_ids"], features["attention_mask"], strict=True)
    ]


def test_what_wrappers_walk_through_does_not_grow_with_the_rows():
    """FSDP2 (pytree, and torch.distributed.utils) and DDP (the latter) look into the arguments of every forward."""
    found = []
    for rows in (2, 50):
        mask = torch.ones(rows, 3, dtype=torch.long)
        batch = {"query": {"input_ids": mask, "attention_mask": mask}}
        (chunk,) = lay_out(batch, ChunkLimits(packs=True)).chunks()
        assert len(chunk.features["packed_rows"]) == rows and chunk.features["packed_rows"].longest == 3
        seen = []
        distributed_utils._apply_to_tensors(seen.append, chunk.features)
        moved = distributed_utils._recursive_to(chunk.features, torch.device("cpu"), False)
        leaves = torch.utils._pytree.tree_leaves(chunk.features)
        found.append((len(seen), len(leaves), len(torch.utils._pytree.tree_leaves(moved))))
        assert not any(isinstance(leaf, int) for leaf in leaves)
    assert found[0] == found[1]


@pytest.mark.parametrize("travels", ["padded", "flat", "positive flat"])
@pytest.mark.parametrize("on_left", [False, True])
@pytest.mark.parametrize("sort", [False, True])
@pytest.mark.parametrize("limits", [ChunkLimits(4), ChunkLimits(1), ChunkLimits(max_tokens=100), ChunkLimits()])
def test_every_real_token_is_computed_once_at_the_position_it_had(limits, sort, on_left, travels):
    batch = columns(on_left)
    given = {name: flat(f, on_left) if travels in ("flat", f"{name} flat") else f for name, f in batch.items()}
    chunked = lay_out(given, replace(limits, packs=True), sort=sort)
    chunked.agree([5])
    real = sum(map(len, real_tokens(batch)))
    assert chunked.count_tokens() == (real, real) == (sum(chunk.num_tokens for chunk in chunked.chunks()), real)
    found, outputs = [], []
    for chunk in chunked.chunks():
        features = chunk.features
        assert "attention_mask" not in features
        ids, lengths = features["input_ids"][0], features["packed_rows"].lengths
        assert len(ids) == sum(lengths) == chunk.num_tokens and len(lengths) == chunk.num_rows
        assert chunk.width == max(lengths)
        assert limits.max_tokens is None or len(lengths) == 1 or len(ids) <= limits.max_tokens
        assert torch.equal(features["packed_rows"].offsets.diff(), torch.tensor(lengths, dtype=torch.int32))
        assert torch.equal(features["position_ids"][0], ids % 100), "places in the column"
        assert torch.equal(features["token_type_ids"][0], ids % 7)
        rows = ids.split(lengths)
        found += [row.tolist() for row in rows]
        outputs.append(torch.stack([row[:1] // 100 for row in rows]))
    assert sorted(found) == sorted(real_tokens(batch))
    back = chunked.to_columns(outputs, chunked.chunks())
    assert torch.cat(list(back.values())).flatten().tolist() == list(range(100, 145)), "the batch's own order"


def test_an_idle_packed_chunk_repeats_a_row():
    chunked = lay_out(columns(), ChunkLimits(2, packs=True))
    chunked.agree([60])
    chunks = chunked.chunks()
    idle = [chunk for chunk in chunks if chunk.is_idle]
    assert len(chunks) == 60 and idle and all(chunk.features["input_ids"].numel() > 0 for chunk in idle)


def hole(features):
    features["attention_mask"][features["attention_mask"].sum(1).argmax(), 1] = 0


def no_token(features):
    features["attention_mask"][2] = 0


def of_the_row(features):
    features["row"] = torch.arange(11)


def no_token_in_flat_rows(features):
    no_token(features)
    given = flat(features, on_left=False)
    features.clear()
    features.update(given)


def no_token_at_all(features):
    features.update({key: value[:, :0] for key, value in features.items()})


def no_token_at_all_in_flat_rows(features):
    no_token_at_all(features)
    no_token_in_flat_rows(features)


NO_TOKENS = [no_token, no_token_in_flat_rows, no_token_at_all, no_token_at_all_in_flat_rows]


@pytest.mark.parametrize("change", [hole, of_the_row, *NO_TOKENS])
def test_rows_that_can_not_stand_alone_keep_their_padding(change):
    batch = columns(seed=3)
    change(batch["positive"])
    for table in lay_out(batch, ChunkLimits(4, packs=True)).tables:
        assert (table.packed is None) == ("positive" in table.columns)

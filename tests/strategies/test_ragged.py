"""Several outputs per row of all ranks: only what is real travels, and it arrives where it belongs."""

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from hf_dist_ext.strategies.ragged import GatheredOutputs


def rows_of(lengths: list[int], width: int, seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    mask = torch.rand(len(lengths), width, generator=draw).argsort(dim=1) < torch.tensor(lengths)[:, None]
    vectors = torch.randn(len(lengths), width, 3, generator=draw)
    return {
        "vectors": vectors.masked_fill(~mask[..., None], torch.nan).requires_grad_(),
        "mask": mask,
        "dense": torch.randn(len(lengths), 4, generator=draw, requires_grad=True),
    }


def gathered(own: dict, other: dict, sent: list[tuple], lengths: list[int] | None = None) -> GatheredOutputs:
    """As rank 0 of two; what the other one sends is computed here."""

    def gather(entries: torch.Tensor, counts: list[int]) -> torch.Tensor:
        sent.append((tuple(entries.shape), list(counts)))
        if entries.dim() == 1:
            theirs = other["mask"].sum(dim=1)
        else:
            theirs = other["dense"] if entries.shape[1] == 4 else other["vectors"][other["mask"]]
        assert counts == [len(entries), len(theirs)]
        return torch.cat([entries, theirs])

    def exchange(numbers: list[int]) -> list[list[int]]:
        theirs = other["mask"].sum(dim=1)
        return [numbers, [int(theirs.sum()), int(theirs.max())]]

    counts = [len(own["dense"]), len(other["dense"])]
    return GatheredOutputs(gather, own, counts, exchange, None if lengths is None else np.array(lengths))


@pytest.mark.parametrize("lengths", [None, [2, 5, 1]])
def test_real_tokens_travel_and_stand_in_front(lengths):
    sent = []
    own, other = rows_of([2, 5, 1], 8, 0), rows_of([7, 3], 9, 1)
    everyone = gathered(own, other, sent, lengths)
    assert not sent, "nothing is sent before it is asked for"
    vectors, mask = everyone["vectors"], everyone["mask"]
    assert sent == [((3,), [3, 2]), ((8, 3), [8, 10])], "lengths, then the real vectors end to end"
    assert mask.sum(dim=1).tolist() == [2, 5, 1, 7, 3] and mask.shape == (5, 7) and vectors.shape == (5, 7, 3)
    rows = [*zip(own["vectors"], own["mask"], strict=True)]
    rows += zip(other["vectors"], other["mask"], strict=True)
    for number, (row, is_real) in enumerate(rows):
        assert vectors[number][mask[number]].equal(row[is_real])
        assert mask[number].int().diff().le(0).all()
    assert everyone["dense"].shape == (5, 4) and len(sent) == 3
    (vectors * torch.arange(5.0)[:, None, None]).sum().backward()
    for row, is_real, weight in zip(own["vectors"].grad, own["mask"], range(3), strict=True):
        assert row[is_real].eq(weight).all() and row[~is_real].eq(0).all()


def test_no_real_token_anywhere_sends_nothing():
    sent = []
    everyone = gathered(rows_of([0, 0], 4, 0), rows_of([0], 6, 1), sent)
    assert not everyone["mask"].any() and everyone["vectors"].shape == (3, 4, 3)
    assert [counts for _, counts in sent] == [[2, 1]], "their lengths only"


@pytest.mark.parametrize("lengths", [None, []])
def test_a_rank_without_rows_has_those_of_the_others(lengths):
    other = rows_of([7, 3], 9, 1)
    everyone = gathered(rows_of([], 4, 0), other, [], lengths)
    assert everyone["mask"].sum(dim=1).tolist() == [7, 3] and everyone["vectors"].shape == (2, 7, 3)
    assert everyone["vectors"][1, :3].equal(other["vectors"][1][other["mask"][1]])


def test_where_the_host_knows_lengths_nothing_is_read_from_a_device():
    with FakeTensorMode() as mode:
        own = {key: mode.from_tensor(value.detach()) for key, value in rows_of([2, 5, 1], 5, 0).items()}

        def gather(entries: torch.Tensor, counts: list[int]) -> torch.Tensor:
            return torch.cat([entries, entries.new_empty(counts[1], *entries.shape[1:])])

        def vectors(lengths: np.ndarray | None) -> torch.Tensor:
            return GatheredOutputs(gather, own, [3, 2], lambda numbers: [numbers, [10, 7]], lengths)["vectors"]

        assert vectors(np.array([2, 5, 1])).shape == (5, 7, 3)
        with pytest.raises(DataDependentOutputException):
            vectors(None)


def test_outputs_that_are_not_one_per_known_token_are_no_rows():
    with pytest.raises(RuntimeError, match="not one per real token"):
        gathered(rows_of([2, 5, 1], 5, 0), rows_of([7, 3], 9, 1), [], [2, 4, 1])["vectors"]

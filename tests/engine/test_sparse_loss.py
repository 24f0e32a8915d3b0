"""The sparse loss against plain autograd over vectors as long as the vocabulary, and through the cache."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_dist_ext.engine import sparse_loss
from hf_dist_ext.engine.combined_losses import SumOfLosses
from hf_dist_ext.engine.gradient_cache import cached_step
from hf_dist_ext.engine.late_interaction import LateInteractionLoss
from hf_dist_ext.engine.layout import lay_out
from hf_dist_ext.engine.limits import ChunkLimits
from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.engine.sparse_loss import SparseLoss
from hf_dist_ext.errors import UsageError
from tests.engine.test_losses import assert_close, make_ids, naive_mask

VOCABULARY = 23
WIDTHS = {"query": 5, "positive": 12, "negative": 9}


def columns_of(rows: int = 9, negatives: int = 0, vocabulary: int = VOCABULARY) -> dict:
    """Terms come several times in a row, and some places in its middle are none."""
    draw, columns = torch.Generator().manual_seed(0), {}
    for name, height in {"query": rows, "positive": rows, "negative": negatives}.items():
        shape = (height, WIDTHS[name])
        weights = torch.rand(shape, generator=draw, dtype=torch.float64).requires_grad_()
        terms = torch.randint(vocabulary, shape, generator=draw)
        columns[name] = {"terms": terms, "weights": weights, "mask": torch.rand(shape, generator=draw) < 0.7}
    return columns if negatives else {name: columns[name] for name in ("query", "positive")}


def dense(side: dict, vocabulary: int = VOCABULARY) -> torch.Tensor:
    """(rows, vocabulary), one row and term at a time."""
    rows = []
    for terms, weights, mask in zip(side["terms"], side["weights"], side["mask"], strict=True):
        of_term = [weights[mask & (terms == term)] for term in range(vocabulary)]
        rows.append(torch.stack([found.max() if len(found) else weights.new_zeros(()) for found in of_term]))
    return torch.stack(rows) if rows else side["weights"].new_zeros(0, vocabulary)


def naive(own, everyone, row_offset=0, ids=None, temperature=1.0):
    anchor, *documents = list(own)
    scores = dense(own[anchor]) @ torch.cat([dense(everyone[name]) for name in documents]).T
    targets = row_offset + torch.arange(len(scores))
    if ids:
        rows = {name: one["mask"] for name, one in everyone.items()}
        masked = naive_mask(list(own), targets.tolist(), rows, ids, reverse=False)
        assert masked.any()
        scores = scores.masked_fill(masked, -torch.inf)
    return cross_entropy(scores / temperature, targets), (scores.argmax(dim=1) == targets).double().mean()


@pytest.mark.parametrize("tile", [64, 3, 1])
@pytest.mark.parametrize("negatives, has_ids", [(0, False), (14, True), (3, True)])
def test_loss_and_gradients_are_those_of_whole_vectors(tile, negatives, has_ids):
    everyone = columns_of(negatives=negatives)
    own = {name: {key: one[key][3:7].detach().clone() for key in one} for name, one in everyone.items()}
    own["query"]["weights"].requires_grad_()
    ids = make_ids({name: one["mask"] for name, one in everyone.items()}) if has_ids else None
    inputs = [own["query"]["weights"], *[one["weights"] for one in list(everyone.values())[1:]]]
    loss = SparseLoss(temperature=0.4, queries_per_tile=tile)
    found, metrics = loss(own, everyone, row_offset=3, ids=ids)
    ours = torch.autograd.grad(2.5 * found, inputs)
    expected, accuracy = naive(own, everyone, 3, ids, 0.4)
    theirs = torch.autograd.grad(2.5 * expected, inputs)
    assert all(gradient.abs().max() > 1e-3 for gradient in theirs)
    assert_close(found.detach(), expected.detach())
    for one, other in zip(ours, theirs, strict=True):
        assert_close(one, other)
    assert metrics["accuracy"] == accuracy and (metrics["masked_share"] > 0) == has_ids


def test_what_is_masked_changes_nothing_whatever_stands_in_it():
    columns, loss = columns_of(negatives=5), SparseLoss()
    expected = torch.autograd.grad(loss(columns).loss, [one["weights"] for one in columns.values()])
    other = {}
    for name, one in columns.items():
        weights = nn.functional.pad(one["weights"].detach().masked_fill(~one["mask"], torch.nan), (0, 3), value=1e9)
        mask = nn.functional.pad(one["mask"], (0, 3))
        other[name] = {"terms": nn.functional.pad(one["terms"], (0, 3)), "weights": weights, "mask": mask}
        weights.requires_grad_()
    assert loss(other).loss == loss(columns).loss
    found = torch.autograd.grad(loss(other).loss, [one["weights"] for one in other.values()])
    for wide, gradient, (name, one) in zip(found, expected, columns.items(), strict=True):
        assert (wide[:, WIDTHS[name] :] == 0).all() and (wide[:, : WIDTHS[name]][~one["mask"]] == 0).all()
        assert gradient.abs().max() > 0
        torch.testing.assert_close(wide[:, : WIDTHS[name]], gradient, rtol=1e-12, atol=1e-14)


def test_rows_that_share_no_term_and_rows_without_any_have_no_gradient():
    columns = columns_of(4)
    columns["query"]["mask"][0] = False
    columns["positive"]["terms"] += 1000
    found = SparseLoss()(columns)
    gradients = torch.autograd.grad(found.loss, [one["weights"] for one in columns.values()])
    assert_close(found.loss.detach(), torch.tensor(4.0, dtype=torch.float64).log())
    assert all((gradient == 0).all() for gradient in gradients)
    columns["query"]["mask"][:] = False
    assert_close(SparseLoss()(columns).loss.detach(), found.loss.detach())


@pytest.mark.parametrize("rows", [40, 80])
def test_no_tensor_has_the_length_of_the_vocabulary(rows):
    """Vectors would be rows x 100,000 numbers, products of all tokens rows x 5 x rows x 12. One entry more is
    of the tokens that are not read."""

    class Largest(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            output = function(*args, **(kwargs or {}))
            sizes = [leaf.numel() for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
            self.numbers = max([self.numbers, *sizes])
            return output

    columns = columns_of(rows, vocabulary=100_000)
    columns["query"]["terms"] = columns["positive"]["terms"][:, : WIDTHS["query"]].clone()
    with Largest() as largest:
        SparseLoss(queries_per_tile=2)(columns).loss.backward()
    assert columns["query"]["weights"].grad.abs().sum() > 0 and largest.numbers == rows * WIDTHS["positive"] + 1


def test_what_a_sparse_loss_can_not_be_is_refused():
    columns = columns_of(3)
    with pytest.raises(UsageError, match="temperature=0 must be a positive number"):
        SparseLoss(temperature=0)
    with pytest.raises(UsageError, match="queries_per_tile=0 must be at least 1"):
        SparseLoss(queries_per_tile=0)
    with pytest.raises(UsageError, match="needs a query and a positive column"):
        SparseLoss()({"query": columns["query"]})
    with pytest.raises(UsageError, match='column "query" needs terms, weights, mask'):
        SparseLoss()(columns | {"query": {"weights": columns["query"]["weights"]}})
    with pytest.raises(UsageError, match='column "positive" needs terms, weights, mask'):
        SparseLoss()(columns | {"positive": torch.ones(3, 4)})


# ---- through the cache ----


class M3(nn.Module):
    """Three outputs of a row, as bge-m3."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mix = nn.Embedding(VOCABULARY, 6), nn.Linear(6, 6)
        self.tokens, self.sparse = nn.Linear(6, 4), nn.Linear(6, 1)
        self.drop = nn.Dropout(0.3)

    def forward(self, input_ids, attention_mask):
        hidden, mask = self.mix(self.drop(self.words(input_ids))).tanh(), attention_mask.bool()
        weights = self.sparse(hidden).squeeze(2).relu()
        return {
            "dense": hidden[:, 0], "tokens.vectors": self.tokens(hidden), "tokens.mask": mask,
            "sparse.terms": input_ids, "sparse.weights": weights, "sparse.mask": mask & (input_ids > 3),
        }  # fmt: skip


def batch_of(rows: int = 11) -> dict:
    draw, batch = torch.Generator().manual_seed(4), {}
    for name, width, height in (("query", 5, rows), ("positive", 12, rows), ("negative", 8, 7)):
        mask = (torch.arange(width) < torch.randint(1, width + 1, (height, 1), generator=draw)).long()
        ids = torch.randint(1, VOCABULARY, (height, width), generator=draw) * mask
        batch[name] = {"input_ids": ids, "attention_mask": mask}
    return batch


def losses() -> SumOfLosses:
    parts = {"infonce": InfoNCELoss(0.2), "sparse": SparseLoss(0.3), "late_interaction": LateInteractionLoss(0.5)}
    outputs = {"infonce": "dense", "sparse": "sparse", "late_interaction": "tokens"}
    return SumOfLosses(parts, {"sparse": 0.3, "late_interaction": 0.7}, outputs)


@pytest.mark.parametrize("limits", [ChunkLimits(max_rows=1), ChunkLimits(max_rows=4), ChunkLimits(max_tokens=30)])
@pytest.mark.parametrize("kept, has_wide", [(0, False), (0, True), (2, False)])
def test_three_outputs_per_row_have_the_gradients_of_the_plain_step(limits, kept, has_wide):
    torch.manual_seed(0)
    encoder, batch, loss = M3().double().eval(), batch_of(), losses()
    embeddings = {name: encoder(**features) for name, features in batch.items()}
    side = {name: {key: one[f"sparse.{key}"] for key in ("terms", "weights", "mask")} for name, one in
            embeddings.items()}  # fmt: skip
    tokens = {name: {key: one[f"tokens.{key}"] for key in ("vectors", "mask")} for name, one in embeddings.items()}
    plain = InfoNCELoss(0.2)({name: one["dense"] for name, one in embeddings.items()}).loss
    plain = plain + 0.3 * naive(side, side, temperature=0.3)[0] + 0.7 * LateInteractionLoss(0.5)(tokens).loss
    expected = torch.autograd.grad(plain, list(encoder.parameters()))
    assert all(gradient.abs().max() > 1e-4 for gradient in expected)
    wide = lay_out(batch, ChunkLimits(max_rows=7)) if has_wide else None
    encode = lambda chunk: encoder(**chunk.features)  # noqa: E731
    step = cached_step(lay_out(batch, limits), encode, loss, keep_graph=kept, wide=wide)
    assert step.num_chunks > 4
    assert_close(step.loss, plain.detach())
    for parameter, gradient in zip(encoder.parameters(), expected, strict=True):
        assert_close(parameter.grad, gradient)


def test_dropout_of_three_outputs_is_replayed():
    torch.manual_seed(0)
    encoder, batch = M3().double().train(), batch_of()

    def gradients(kept: int) -> list:
        encoder.zero_grad()
        torch.manual_seed(3)
        encode = lambda chunk: encoder(**chunk.features)  # noqa: E731
        cached_step(lay_out(batch, ChunkLimits(max_rows=4)), encode, losses(), keep_graph=kept)
        return [parameter.grad.clone() for parameter in encoder.parameters()]

    replayed, kept = gradients(0), gradients(99)
    assert all(gradient.abs().max() > 0 for gradient in kept)
    for one, other in zip(replayed, kept, strict=True):
        assert_close(one, other)


@pytest.mark.parametrize("queries_per_tile", [64, 4])
def test_all_sizes_come_to_the_host_in_one_copy(monkeypatch, queries_per_tile):
    """Tensors without values raise where one is read: a step runs on them once it is told what the copy holds."""
    columns, loss = columns_of(negatives=5), SparseLoss(queries_per_tile=queries_per_tile)
    said, to_host = [], sparse_loss._to_host
    monkeypatch.setattr(sparse_loss, "_to_host", lambda sizes: said.append(to_host(sizes)) or said[-1])
    loss(columns).loss.backward()
    assert len(said) == 1 and all(one["weights"].grad.abs().sum() > 0 for one in columns.values())
    plain = {name: {key: value.detach() for key, value in one.items()} for name, one in columns.items()}
    with FakeTensorMode() as mode:
        monkeypatch.setattr(sparse_loss, "_to_host", lambda sizes: said[0])
        bare = {name: {key: mode.from_tensor(value) for key, value in one.items()} for name, one in plain.items()}
        for one in bare.values():
            one["weights"].requires_grad_()
        loss(bare).loss.backward()
        assert all(one["weights"].grad.shape == one["weights"].shape for one in bare.values())
        monkeypatch.setattr(sparse_loss, "_to_host", to_host)
        with pytest.raises(DataDependentOutputException):
            loss(bare)

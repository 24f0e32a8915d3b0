"""Late interaction against plain autograd over all token products, and several outputs per row through the cache."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils._python_dispatch import TorchDispatchMode

from hf_dist_ext.engine.gradient_cache import cached_step
from hf_dist_ext.engine.late_interaction import LateInteractionLoss
from hf_dist_ext.engine.layout import lay_out
from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.engine.tables import ChunkLimits
from hf_dist_ext.errors import UsageError
from tests.engine.test_losses import LargestTensor, assert_close, make_ids, naive_mask
from tests.training.test_host_reads import Reads

WIDTHS = {"query": 4, "positive": 9, "negative": 7}
DIMENSIONS = 5


def columns_of(rows: int = 9, negatives: int = 0, seed: int = 0) -> dict:
    draw = torch.Generator().manual_seed(seed)
    heights = {"query": rows, "positive": rows} | ({"negative": negatives} if negatives else {})
    columns = {}
    for name, height in heights.items():
        width = WIDTHS[name]
        lengths = torch.randint(1, width + 1, (height, 1), generator=draw)
        vectors = torch.randn(height, width, DIMENSIONS, generator=draw, dtype=torch.float64)
        columns[name] = {"vectors": vectors.requires_grad_(), "mask": torch.arange(width) < lengths}
    return columns


def naive(own, everyone, row_offset=0, ids=None, temperature=1.0, unit=True):
    anchor, positive, *negatives = list(own)
    shape = (lambda rows: normalize(rows, dim=-1)) if unit else (lambda rows: rows)
    scores = torch.stack([
        torch.stack([
            (shape(query[real]) @ shape(document[is_token]).T).amax(dim=1).sum()
            for name in (positive, *negatives)
            for document, is_token in zip(everyone[name]["vectors"], everyone[name]["mask"], strict=True)
        ])
        for query, real in zip(own[anchor]["vectors"], own[anchor]["mask"], strict=True)
    ])  # fmt: skip
    targets = row_offset + torch.arange(len(scores))
    if ids:
        rows = {name: one["mask"] for name, one in everyone.items()}
        masked = naive_mask(list(own), targets.tolist(), rows, ids, reverse=False)
        assert masked.any()
        scores = scores.masked_fill(masked, -torch.inf)
    return cross_entropy(scores / temperature, targets), (scores.argmax(dim=1) == targets).double().mean()


@pytest.mark.parametrize("tiles", [(16, 32), (2, 4), (1, 1)])
@pytest.mark.parametrize("negatives, has_ids, unit", [(0, False, True), (14, True, True), (3, True, False)])
def test_loss_and_gradients_are_those_of_all_token_products(tiles, negatives, has_ids, unit):
    everyone = columns_of(negatives=negatives)
    own = {name: {"vectors": one["vectors"][3:7].detach().clone().requires_grad_(), "mask": one["mask"][3:7]}
           for name, one in everyone.items()}  # fmt: skip
    ids = make_ids({name: one["mask"] for name, one in everyone.items()}) if has_ids else None
    options = {"temperature": 0.4, "normalize": unit, "queries_per_tile": tiles[0], "documents_per_tile": tiles[1]}
    inputs = [own["query"]["vectors"], *[one["vectors"] for one in list(everyone.values())[1:]]]
    found, metrics = LateInteractionLoss(**options)(own, everyone, row_offset=3, ids=ids)
    ours = torch.autograd.grad(2.5 * found, inputs)
    expected, accuracy = naive(own, everyone, 3, ids, 0.4, unit)
    theirs = torch.autograd.grad(2.5 * expected, inputs)
    assert all(gradient.abs().max() > 1e-6 for gradient in theirs)
    assert_close(found.detach(), expected.detach())
    for one, other in zip(ours, theirs, strict=True):
        assert_close(one, other)
    assert metrics["accuracy"] == accuracy and (metrics["masked_share"] > 0) == has_ids


def test_padding_changes_nothing_whatever_stands_in_it():
    columns, loss = columns_of(negatives=5), LateInteractionLoss()
    expected = torch.autograd.grad(loss(columns).loss, [one["vectors"] for one in columns.values()])
    wider = {}
    for name, one in columns.items():
        vectors = one["vectors"].detach().masked_fill(~one["mask"][..., None], torch.nan)
        vectors = nn.functional.pad(vectors, (0, 0, 0, 3), value=1e9).requires_grad_()
        wider[name] = {"vectors": vectors, "mask": nn.functional.pad(one["mask"], (0, 3))}
    assert loss(wider).loss == loss(columns).loss
    found = torch.autograd.grad(loss(wider).loss, [one["vectors"] for one in wider.values()])
    for wide, gradient, (name, one) in zip(found, expected, wider.items(), strict=True):
        assert (wide[~one["mask"]] == 0).all() and gradient.abs().max() > 0
        torch.testing.assert_close(wide[:, : WIDTHS[name]], gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("rows", [40, 80])
def test_no_tensor_is_larger_than_a_tile_or_a_column(rows):
    """Token products of all pairs would be rows x 4 x rows x 9 numbers."""

    columns = columns_of(rows)
    with LargestTensor() as largest:
        LateInteractionLoss(queries_per_tile=2, documents_per_tile=5)(columns).loss.backward()
    assert (
        columns["query"]["vectors"].grad.abs().sum() > 0 and largest.numel == 2 * rows * 9 * DIMENSIONS
    )  # of float64


@pytest.mark.parametrize("documents_per_tile", [1, 8])
def test_a_negative_without_tokens_is_no_rows_best_match(documents_per_tile):
    """As a text that a tokenizer makes nothing of."""
    columns, fewer = columns_of(5, negatives=5), {}
    for name in ("query", "positive", "negative"):
        fewer[name] = {key: value.detach()[: 4 if name == "negative" else 5] for key, value in columns[name].items()}
    columns["negative"]["mask"][4] = False
    loss = LateInteractionLoss(documents_per_tile=documents_per_tile)
    found, wanted = loss(columns).loss, loss(fewer).loss
    found.backward()
    assert_close(found, wanted)
    assert all(one["vectors"].grad.isfinite().all() for one in columns.values())


def test_long_rows_cost_their_own_tokens_alone_and_masks_are_read_once():
    """A query of 50 tokens and a document of 60 among 32 rows of a few. Padded, products would be of 32 x 50 with
    32 x 60 tokens."""

    class Products(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            output = function(*args, **(kwargs or {}))
            if function is torch.ops.aten.mm.default and args[0].shape[1] == DIMENSIONS:
                self.numbers += output.numel()
            return output

    columns, sizes = columns_of(32), {}
    for name, width in (("query", 50), ("positive", 60)):
        own = columns[name]["mask"].sum(dim=1)
        own[7] = width
        mask = torch.arange(width) < own[:, None]
        mask = mask.flip(1) if name == "query" else mask  # as tokenizers of decoders pad
        columns[name] = {"vectors": torch.randn(32, width, DIMENSIONS, requires_grad=True), "mask": mask}
        sizes[name] = own
    with Products() as products, Reads() as reads:
        LateInteractionLoss(documents_per_tile=4)(columns)
    longest = sizes["positive"].sort(descending=True).values[::4]
    assert products.numbers == sizes["query"].sum() * 4 * longest.sum() < 0.1 * 32 * 50 * 32 * 60
    assert reads.lines.total() == 1


def test_what_late_interaction_can_not_be_is_refused():
    columns = columns_of(3)
    with pytest.raises(UsageError, match="temperature=0 must be a positive number"):
        LateInteractionLoss(temperature=0)
    with pytest.raises(UsageError, match="at least 1"):
        LateInteractionLoss(queries_per_tile=0)
    with pytest.raises(UsageError, match="needs a query and a positive column"):
        LateInteractionLoss()({"query": columns["query"]})
    with pytest.raises(UsageError, match='column "query" needs "vectors"'):
        LateInteractionLoss()(columns | {"query": {"vectors": columns["query"]["vectors"]}})
    with pytest.raises(RuntimeError, match="without create_graph=True"):
        torch.autograd.grad(LateInteractionLoss()(columns).loss, columns["query"]["vectors"], create_graph=True)


# ---- through the cache ----


class Encoder(nn.Module):
    """Token vectors with their mask, a dense vector and a number per row."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mix = nn.Embedding(50, 6), nn.Linear(6, DIMENSIONS)
        self.drop = nn.Dropout(0.3)

    def forward(self, input_ids, attention_mask):
        hidden = self.mix(self.drop(self.words(input_ids)))
        real = attention_mask[..., None]
        dense = (hidden * real).sum(dim=1) / real.sum(dim=1)
        return {"vectors": hidden, "mask": attention_mask.bool(), "dense": dense, "number": dense.sum(dim=1)}


def batch_of(rows: int = 11) -> dict:
    draw, batch = torch.Generator().manual_seed(4), {}
    for name, width, height in (("query", 5, rows), ("positive", 12, rows), ("negative", 8, 7)):
        mask = (torch.arange(width) < torch.randint(1, width + 1, (height, 1), generator=draw)).long()
        batch[name] = {
            "input_ids": torch.randint(1, 50, (height, width), generator=draw) * mask,
            "attention_mask": mask,
        }
    return batch


def weighted(embeddings: dict) -> tuple:
    """Dense and multi-vector losses and a term of the numbers."""
    dense = InfoNCELoss(0.2)({name: one["dense"] for name, one in embeddings.items()}).loss
    many = LateInteractionLoss(0.5)(embeddings).loss
    return dense + 0.7 * many + 0.01 * sum(one["number"].square().sum() for one in embeddings.values()), {}


@pytest.mark.parametrize("limits", [ChunkLimits(max_rows=1), ChunkLimits(max_rows=4), ChunkLimits(max_tokens=30)])
@pytest.mark.parametrize("kept, has_wide", [(0, False), (0, True), (2, False), (99, False)])
def test_several_outputs_per_row_have_the_gradients_of_the_plain_step(limits, kept, has_wide):
    torch.manual_seed(0)
    encoder, batch = Encoder().double().eval(), batch_of()
    plain, _ = weighted({name: encoder(**features) for name, features in batch.items()})
    expected = torch.autograd.grad(plain, list(encoder.parameters()))
    assert all(gradient.abs().max() > 1e-4 for gradient in expected)
    wide = lay_out(batch, ChunkLimits(max_rows=7)) if has_wide else None
    chunked = lay_out(batch, limits)
    step = cached_step(chunked, lambda chunk: encoder(**chunk.features), weighted, keep_graph=kept, wide=wide)
    assert step.num_chunks > 4
    assert_close(step.loss, plain.detach())
    for parameter, gradient in zip(encoder.parameters(), expected, strict=True):
        assert_close(parameter.grad, gradient)


def test_dropout_of_several_outputs_is_replayed():
    torch.manual_seed(0)
    encoder, batch = Encoder().double().train(), batch_of()

    def gradients(kept: int) -> list:
        encoder.zero_grad()
        torch.manual_seed(3)
        encode = lambda chunk: encoder(**chunk.features)  # noqa: E731
        cached_step(lay_out(batch, ChunkLimits(max_rows=4)), encode, weighted, keep_graph=kept)
        return [parameter.grad.clone() for parameter in encoder.parameters()]

    replayed, kept = gradients(0), gradients(99)
    assert all(gradient.abs().max() > 0 for gradient in kept)
    for one, other in zip(replayed, kept, strict=True):
        assert_close(one, other)


def test_a_column_without_rows_has_the_width_of_a_vector():
    """On a process whose rows have no negatives the dense vectors of none have their dimensions."""
    seen, batch = {}, batch_of()
    batch["negative"] = {key: value[:0] for key, value in batch["negative"].items()}

    def score(embeddings):
        seen.update({key: tuple(one.shape) for key, one in embeddings["negative"].items()})
        return sum(one["dense"].square().sum() for one in embeddings.values()), {}

    encoder = Encoder().double().eval()
    cached_step(lay_out(batch, ChunkLimits(max_rows=3)), lambda c: encoder(**c.features), score)
    assert seen["dense"] == (0, DIMENSIONS) and seen["number"] == (0,) and seen["vectors"][::2] == (0, DIMENSIONS)


def test_columns_are_as_wide_as_their_own_rows():
    seen = {}

    def score(embeddings):
        seen.update({name: one["vectors"].shape[1] for name, one in embeddings.items()})
        return weighted(embeddings)

    encoder, batch = Encoder().double().eval(), batch_of()
    cached_step(lay_out(batch, ChunkLimits(max_rows=1, width_multiple=1)), lambda c: encoder(**c.features), score)
    lengths = {name: int(features["attention_mask"].sum(dim=1).max()) for name, features in batch.items()}
    assert seen == lengths and len(set(lengths.values())) == 3

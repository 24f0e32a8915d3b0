"""Losses whose candidates go round, against the same ones over gathered candidates; float64, ranks are threads."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_dist_ext import policy
from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.engine.ring import Ring
from hf_dist_ext.engine.sigmoid_loss import SigmoidLoss
from hf_dist_ext.engine.tiled_infonce import Matmul
from hf_dist_ext.errors import UsageError
from hf_dist_ext.strategies import ring as moves
from tests.engine.test_losses import LiveBytes, assert_close, make_columns, make_ids


class Board:
    """What ranks show each other: every call of a rank is matched by the others' calls of the same number."""

    def __init__(self, size):
        self.size, self.shown = size, {}
        self.barrier = threading.Barrier(size, timeout=600)
        self.calls = [0] * size
        self.sent = [0] * size  # rows that went to another rank

    def show(self, rank, tensor):
        number = self.calls[rank]
        self.calls[rank] += 1
        self.shown[number, rank] = tensor
        self.barrier.wait()
        return [self.shown[number, other] for other in range(self.size)]

    def visits(self, rank, own, heights):
        blocks = self.show(rank, own)
        assert [len(block) for block in blocks] == list(heights) and own.is_contiguous()
        for hop in range(self.size):
            other = (rank - hop) % self.size
            self.sent[other] += heights[other] * (hop > 0)
            yield other, blocks[other]

    def gather(self, rank, own, heights):
        return torch.cat(self.show(rank, own.clone()))

    def ring(self, rank, counts):
        return Ring(rank, counts, partial(self.visits, rank), partial(self.gather, rank))


class Everyone(dict):
    """Columns of all ranks that must not be read: they go round."""

    ring = None

    def __getitem__(self, column):
        raise AssertionError(f"{column} was gathered")


def split(columns, rows_of_rank, rank):
    """A rank's rows of every column; of negatives as many as are left, cut alike."""
    found = {}
    for name, values in columns.items():
        shares = counts_of(len(values), rows_of_rank)
        start = sum(shares[:rank])
        found[name] = values.detach()[start : start + shares[rank]].clone().requires_grad_()
    return found


def counts_of(height, rows_of_rank):
    if height == sum(rows_of_rank):
        return rows_of_rank
    shares = [height * rows // sum(rows_of_rank) for rows in rows_of_rank]
    last = max(rank for rank, rows in enumerate(rows_of_rank) if rows)
    shares[last] += height - sum(shares)
    return shares


def infonce(**options):
    return InfoNCELoss(0.1, learnable_temperature=True, **options).double()


def siglip(**options):
    return SigmoidLoss(scale=8.0, bias=-2.0, **options).double()


def run_ranks(options, columns, rows_of_rank, ids=None, backward=True, make=infonce):
    """(loss, metrics, gradients by column, those of its parameters), of all rows together; and the board."""
    size = len(rows_of_rank)
    board, counts = Board(size), {name: counts_of(len(v), rows_of_rank) for name, v in columns.items()}
    parts = [split(columns, rows_of_rank, rank) for rank in range(size)]

    def of_rank(rank):
        everyone = Everyone(columns)
        everyone.ring = board.ring(rank, counts)
        # Every rank has a loss of its own: threads would add to one `.grad` at once.
        own = make(**{"cross_device_exchange": "ring", **options})
        output = own(parts[rank], everyone, ids=ids, row_offset=sum(rows_of_rank[:rank]))
        weighted = output.loss * (rows_of_rank[rank] / sum(rows_of_rank))
        if backward:
            weighted.backward()
        return weighted.detach(), output.metrics, [p.grad for p in own.parameters()]

    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(of_rank, range(size)))
    shares = [rows / sum(rows_of_rank) for rows in rows_of_rank]
    metrics = {n: sum(m[n] * share for (_, m, _), share in zip(results, shares, strict=True)) for n in results[0][1]}
    gradients = {name: torch.cat([part[name].grad for part in parts]) for name in columns} if backward else None
    of_loss = [sum(of_ranks) for of_ranks in zip(*(g for _, _, g in results), strict=True)] if backward else None
    return (sum(value for value, _, _ in results), metrics, gradients, of_loss), board


def run_alone(options, columns, ids=None, make=infonce):
    own = make(**options)
    columns = {name: values.detach().clone().requires_grad_() for name, values in columns.items()}
    output = own(columns, ids=ids)
    output.loss.backward()
    return output.loss, output.metrics, {n: v.grad for n, v in columns.items()}, [p.grad for p in own.parameters()]


RANKS = [[13], [9, 4], [5, 0, 8], [4, 3, 1, 5]]
OPTIONS = [
    {},
    {"symmetric": True, "rows_per_tile": 2, "candidates_per_tile": 3},
    {"false_negative_margin": 0.1, "rows_per_tile": 4},
    {"symmetric": True, "matryoshka_dims": [10, 3], "false_negative_margin": -0.1, "candidates_per_tile": 4},
    {"matryoshka_dims": [7, 2], "matryoshka_weights": [1.0, 3.0]},
    {"normalize": False},
]


@pytest.mark.parametrize("rows_of_rank", RANKS, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("has_ids", [False, True], ids=["no_ids", "ids"])
def test_loss_metrics_and_gradients_are_those_of_gathered_candidates(rows_of_rank, options, has_ids):
    columns = make_columns(negatives=(7, 26))
    ids = make_ids(columns, group=True) if has_ids else None
    compare(options, columns, rows_of_rank, ids, infonce)


@pytest.mark.parametrize("rows_of_rank", RANKS, ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"rows_per_tile": 3, "candidates_per_tile": 2}, {"normalize": False}], ids=str
)
@pytest.mark.parametrize("has_ids", [False, True], ids=["no_ids", "ids"])
def test_so_are_those_of_the_sigmoid_loss(rows_of_rank, options, has_ids):
    columns = make_columns(negatives=(7, 26))
    ids = make_ids(columns, group=True) if has_ids else None
    compare(options, columns, rows_of_rank, ids, siglip)


def compare(options, columns, rows_of_rank, ids, make):
    (loss, metrics, gradients, of_loss), _ = run_ranks(options, columns, rows_of_rank, ids, make=make)
    wanted = run_alone(options, columns, ids, make)
    assert wanted[0] > 1e-3
    assert_close(loss, wanted[0])
    for found, expected in zip(of_loss, wanted[3], strict=True):
        assert expected.abs().max() > 1e-6
        assert_close(found, expected)
    for name, gradient in gradients.items():
        assert wanted[2][name].abs().max() > 1e-6
        assert_close(gradient, wanted[2][name])
    for name, metric in metrics.items():
        assert_close(metric, wanted[1][name])


def test_the_candidates_go_round_once_and_the_rows_once():
    """No gradient travels: what is sent is what the gather of the candidates and its backward would send, or less."""
    rows_of_rank, columns = [4, 3, 6], make_columns(negatives=(26,))
    _, board = run_ranks({}, columns, rows_of_rank)
    assert board.calls == [3, 3, 3]  # candidates, two numbers of every row, rows
    of_rank = [rows + 3 * rows for rows in rows_of_rank]  # candidates and rows: 1 + 26 / 13 and 1
    of_rank[2] = (6 + 26 - 4 * 2 - 3 * 2) + 6
    assert board.sent == [2 * rows for rows in of_rank]
    _, board = run_ranks({}, columns, rows_of_rank, backward=False)
    assert board.calls == [1, 1, 1]


def one_of(rows_of_rank, rank, columns, **options):
    """The loss of one rank of several, and everyone's columns: others' blocks never arrive, and hold anything."""
    counts = {name: list(rows_of_rank) for name in columns}
    everyone = Everyone(columns)
    everyone.ring = Ring(
        rank,
        counts,
        lambda own, heights: moves.visits(own, heights, rank, None),
        lambda own, heights: own.new_zeros(sum(heights), *own.shape[1:]),
    )
    return InfoNCELoss(0.05, cross_device_exchange="ring", **options), everyone


def others_are_zero(messages: list, group: object) -> list:
    """In the place of sending: what would arrive is not left as the memory happens to be, which may hold NaN."""
    for kind, tensor, _ in messages:
        if kind is dist.irecv:
            tensor.zero_()
    return []


def test_without_a_gradient_the_rows_stay(monkeypatch):
    monkeypatch.setattr(moves, "_start", others_are_zero)
    columns = make_columns(rows=5)
    loss, everyone = one_of([5, 5], 0, columns)
    with torch.no_grad():
        assert not loss(columns, everyone).loss.requires_grad
    frozen = {"query": columns["query"], "positive": columns["positive"].detach()}
    everyone.ring = everyone.ring._replace(gather=None)  # not called: nobody's candidates need a gradient
    loss(frozen, everyone).loss.backward()
    assert columns["query"].grad.abs().max() > 0 and columns["positive"].grad is None


def test_a_second_backward_and_a_gradient_of_the_gradient_are_refused(monkeypatch):
    monkeypatch.setattr(moves, "_start", others_are_zero)
    columns = make_columns(rows=5)
    loss, everyone = one_of([5, 5], 0, columns)
    value = loss(columns, everyone).loss
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(value, columns["query"], create_graph=True)
    value.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="gives its gradient once"):
        value.backward()


def test_a_rank_whose_rows_are_stand_ins_contributes_zero():
    columns = make_columns(rows=6)
    counts, board = {name: [6, 0] for name in columns}, Board(2)
    parts = [columns, {name: values.detach()[:1].clone().requires_grad_() for name, values in columns.items()}]

    def of_rank(rank):
        everyone = Everyone(columns)
        everyone.ring = board.ring(rank, counts)
        output = InfoNCELoss(0.1, cross_device_exchange="ring")(parts[rank], everyone)
        (output.loss * (2.0, 0.0)[rank]).backward()
        return output.loss.item()

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(of_rank, range(2)))
    alone = make_columns(rows=6)
    wanted = InfoNCELoss(0.1)(alone).loss
    (2 * wanted).backward()
    assert found == [pytest.approx(wanted.item(), abs=1e-12), 0.0]
    for name, values in alone.items():
        assert values.grad.abs().max() > 1e-6
        assert_close(columns[name].grad, values.grad)
        assert parts[1][name].grad.abs().max() == 0


def test_auto_takes_the_ring_where_gathered_rows_would_take_more_than_a_tile(monkeypatch):
    assert not policy.goes_round("auto", 2 * 16384, 768) and policy.goes_round("auto", 2 * 65536, 1024)
    assert policy.goes_round("ring", 1, 1) and not policy.goes_round("gather", 10**9, 1024)
    monkeypatch.setattr(moves, "_start", others_are_zero)
    columns = make_columns(rows=5)
    _, everyone = one_of([5, 5], 0, columns)
    with pytest.raises(AssertionError, match="was gathered"):
        InfoNCELoss()(columns, everyone)
    monkeypatch.setattr(policy, "LOSS_TILE_BYTES", policy.EMBEDDING_COPIES * 4 * 20 * 10 - 1)  # 2 columns of 10 rows
    InfoNCELoss()(columns, everyone)


@pytest.mark.parametrize("options, words", [
    ({"cross_device_exchange": "tree"}, '"auto", "gather" or "ring"'),
    ({"cross_device_exchange": "ring", "cross_device_negatives": False}, "Remove one of them"),
])  # fmt: skip
def test_options_that_cannot_be_are_refused(options, words):
    with pytest.raises(UsageError, match=words):
        InfoNCELoss(**options)


# ---- memory ----


def counted_bytes(monkeypatch, num_rows, width, ranks, negatives, **options):
    """(most bytes of a rank that hold at once, those of the formula); scores' masks included."""
    monkeypatch.setattr(moves, "_start", others_are_zero)
    names = ["query", "positive", *(f"negative{i}" for i in range(negatives))]
    counts = [num_rows // ranks] * ranks
    columns = {name: torch.zeros(counts[0], width, requires_grad=True) for name in names}
    ids = {name: torch.zeros(num_rows, dtype=torch.long) for name in names}
    loss, everyone = one_of(
        counts, 1, columns, false_negative_margin=0.1, rows_per_tile=policy.LOSS_TILE_ROWS,
        candidates_per_tile=10**9, **options,
    )  # fmt: skip
    with LiveBytes() as live:
        loss(columns, everyone, ids=ids).loss.backward()
    assert all(values.grad.shape == values.shape for values in columns.values())
    more = {"is_symmetric": loss.symmetric, "has_bf16_products": loss.bf16_products}
    return live.most, policy.ring_bytes([counts] * len(names), width, **more)


OF_MEMORY = [(0, {}), (2, {}), (1, {"symmetric": True})]


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("negatives, options", OF_MEMORY, ids=str)
def test_what_a_rank_holds_is_what_the_formula_says(monkeypatch, ranks, negatives, options):
    monkeypatch.setattr(policy, "LOSS_TILE_ROWS", 64)
    monkeypatch.setattr(policy, "RING_TILE_BYTES", 2**17)
    num_rows = 1536
    most, formula = counted_bytes(monkeypatch, num_rows, 256, ranks, negatives, **options)
    assert abs(most - formula) < 128 * num_rows  # ids and sums of all ranks' rows
    own, everyone = num_rows // ranks * (2 + negatives), num_rows * (2 + negatives)
    assert formula < policy.loss_stage_bytes(own, everyone, num_rows // ranks, num_rows * (1 + negatives), 256)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("negatives, options", OF_MEMORY, ids=str)
def test_so_it_is_of_65536_rows_of_1024_numbers(monkeypatch, ranks, negatives, options):
    """Shapes alone: no product is computed."""
    with FakeTensorMode():
        most, formula = counted_bytes(monkeypatch, 65536, 1024, ranks, negatives, **options)
    assert abs(most - formula) < 0.005 * formula, (most, formula)


# ---- products of bfloat16 factors ----


def relative_error(found, wanted):
    return ((found - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("rows_of_rank", [None, [96, 160]], ids=["one_process", "ring"])
@pytest.mark.parametrize("options", [{}, {"symmetric": True, "matryoshka_dims": [64, 16]}], ids=str)
def test_products_of_rounded_factors_are_off_by_what_bfloat16_rounds(rows_of_rank, options):
    columns = make_columns(rows=256, width=64, negatives=(256,))
    wanted = run_alone(options, columns)
    half = {**options, "bf16_products": True}
    if rows_of_rank is None:
        loss, _, gradients, of_loss = run_alone(half, columns)
    else:
        (loss, _, gradients, of_loss), _ = run_ranks(half, columns, rows_of_rank)
    assert 1e-6 < relative_error(loss, wanted[0]) < 4e-3
    assert relative_error(of_loss[0], wanted[3][0]) < 1e-2
    for name, gradient in gradients.items():
        assert 1e-5 < relative_error(gradient, wanted[2][name]) < 1e-2


def test_equal_scores_stay_equal_in_rounded_products():
    """A document that is there twice is no win for either row: where the positive's score were not rounded as the
    others are, half of the rows would win."""
    columns = make_columns(rows=20, width=16)
    twice = {name: values.detach()[[*range(20), *range(20)]] for name, values in columns.items()}
    (_, metrics, _, _), _ = run_ranks({"bf16_products": True}, twice, [9, 31], backward=False)
    assert metrics["accuracy"].item() == 0.0


def test_both_factors_of_a_product_are_rounded_and_sums_are_not():
    left, right, before = torch.randn(5, 7), torch.randn(7, 3), torch.randn(5, 3)
    wanted, out, total = left.bfloat16().float() @ right.bfloat16().float(), torch.empty(5, 3), before.clone()
    half = Matmul(in_bf16=True)
    half.write(half.factor(left), half.factor(right), out)
    half.add(total, left, half.factor(right))
    assert (wanted - left @ right).abs().max() > 1e-4
    torch.testing.assert_close(out, wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(total, before + wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_device_gives_the_same_products_of_rounded_factors():
    half, left, right = Matmul(in_bf16=True), torch.randn(64, 96), torch.randn(96, 80)
    found = []
    for device in ("cpu", "cuda"):
        one, other = left.to(device), half.factor(right.to(device))
        out, total = torch.empty(64, 80, device=device), torch.ones(64, 80, device=device)
        half.write(half.factor(one), other, out)
        half.add(total, one, other)
        assert out.dtype == total.dtype == torch.float32
        found.append((out.cpu(), total.cpu()))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)

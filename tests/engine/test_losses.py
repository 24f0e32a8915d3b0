"""InfoNCE against plain autograd over the full logits, written out below; float64 unless a test is about dtypes."""

import math
import weakref

import pytest
import torch
from torch import nn
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_dist_ext import policy
from hf_dist_ext.engine.false_negatives import RowIds
from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.errors import UsageError

TEMPERATURE = 0.05


def naive_mask(columns, rows, everyone, ids, reverse):
    """(B, M) pairs left out by ids, by the words of the contract, one at a time."""
    anchor, positive, *negatives = columns
    candidates = [anchor] if reverse else [positive, *negatives]
    masked = []
    for i in rows:
        row = []
        for column in candidates:
            for j in range(len(everyone[column])):
                if column in negatives:
                    row.append(bool(ids[column][j] == ids[positive][i]))
                    continue
                shared = any(bool(ids[key][j] == ids[key][i]) for key in (anchor, positive, "group") if key in ids)
                row.append(shared and j != i)
        masked.append(row)
    return torch.tensor(masked)


def naive_direction(queries, candidates, targets, inverse_temperature, masked, margin):
    similarity = normalize(queries, dim=1) @ normalize(candidates, dim=1).T  # (B, M)
    own = torch.zeros_like(similarity, dtype=torch.bool)
    own[torch.arange(len(targets)), targets] = True
    if margin is not None:
        masked = masked | (similarity > similarity[own][:, None] - margin) & ~own
    logits = (similarity * inverse_temperature).masked_fill(masked, -math.inf)
    others = logits.masked_fill(own, -math.inf).amax(dim=1)
    metrics = {
        "accuracy": (logits[own] > others).double().mean(),
        "masked_share": masked.double().sum() / max(masked.numel() - len(masked), 1),
        "positive_similarity": similarity[own].mean(),
    }
    return nn.functional.cross_entropy(logits, targets), metrics


def naive_infonce(
    own,
    everyone=None,
    row_offset=0,
    ids=None,
    inverse_temperature=1 / TEMPERATURE,
    symmetric=False,
    matryoshka=None,
    margin=None,
):
    everyone = own if everyone is None else everyone
    anchor, positive, *negatives = columns = list(own)
    targets = row_offset + torch.arange(len(own[anchor]))
    masks = [
        naive_mask(columns, targets.tolist(), everyone, ids or {}, reverse) if ids else torch.tensor(False)
        for reverse in (False, True)
    ]
    total, metrics = 0.0, None
    for dim, weight in matryoshka or [(own[anchor].shape[1], 1.0)]:
        candidates = torch.cat([everyone[c][:, :dim] for c in (positive, *negatives)])
        mask = masks[0] if ids else torch.zeros(len(targets), len(candidates), dtype=torch.bool)
        loss, of_this_width = naive_direction(
            own[anchor][:, :dim], candidates, targets, inverse_temperature, mask, margin
        )
        if symmetric:
            back = everyone[anchor][:, :dim]
            mask = masks[1] if ids else torch.zeros(len(targets), len(back), dtype=torch.bool)
            reverse, _ = naive_direction(own[positive][:, :dim], back, targets, inverse_temperature, mask, margin)
            loss = (loss + reverse) / 2
        total = total + weight * loss
        metrics = of_this_width if metrics is None else metrics  # the widest is listed first
    return total, metrics


def make_columns(rows=13, negatives=(), width=10, seed=0, dtype=torch.float64):
    """Unnormalised embeddings whose positives are near their anchors, but not near enough to win every time."""
    generator = torch.Generator().manual_seed(seed)
    heights = {"query": rows, "positive": rows, **{f"negative{k}": height for k, height in enumerate(negatives)}}
    columns = {
        name: torch.randn(height, width, generator=generator, dtype=torch.float64) for name, height in heights.items()
    }
    columns["positive"] += 0.7 * columns["query"]
    return {name: (3 * values).to(dtype).requires_grad_() for name, values in columns.items()}


def make_ids(columns, group=False, seed=1):
    """Ids with repeats in every column and across positives and negatives, all far beyond 2**32."""
    generator = torch.Generator().manual_seed(seed)
    rows = len(columns["query"])
    ids = {name: torch.randint(0, max(rows // 2, 1), (len(c),), generator=generator) for name, c in columns.items()}
    ids["query"] = torch.randint(0, 2 * rows, (rows,), generator=generator)
    if group:
        ids["group"] = torch.randint(0, 2 * rows, (rows,), generator=generator)
    return {name: values + 2**62 for name, values in ids.items()}


def gradients(loss, *tensors):
    return torch.autograd.grad(loss, tensors)


def assert_close(actual, expected, relative=1e-10):
    scale = max(expected.abs().max().item(), 1e-12)
    error = (actual.double() - expected.double()).abs().max().item()
    assert error <= relative * scale, f"off by {error:.2e}, {error / scale:.2e} relative"


def assert_equals_naive(columns, ids=None, options=None, naive_options=None):
    loss = InfoNCELoss(TEMPERATURE, learnable_temperature=True, **(options or {})).double()
    inverse_temperature = torch.tensor(1 / TEMPERATURE, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        loss.log_inverse_temperature.copy_(inverse_temperature.log())
    output = loss(columns, ids=ids)
    expected, metrics = naive_infonce(
        columns, ids=ids, inverse_temperature=inverse_temperature, **(naive_options or {})
    )
    assert expected.item() > 1e-3
    assert_close(output.loss, expected)
    actual_gradients = gradients(output.loss, loss.log_inverse_temperature, *columns.values())
    expected_gradients = gradients(expected, inverse_temperature, *columns.values())
    # The parameter is the logarithm: d/d(log s) = s d/ds.
    assert_close(actual_gradients[0], expected_gradients[0] / TEMPERATURE)
    for actual, wanted in zip(actual_gradients[1:], expected_gradients[1:], strict=True):
        assert wanted.abs().max() > 1e-6
        assert_close(actual, wanted)
    for name, wanted in metrics.items():
        assert_close(output.metrics[name], wanted)
        assert not output.metrics[name].requires_grad
    assert_close(output.metrics["temperature"], torch.tensor(TEMPERATURE, dtype=torch.float64))
    return output


TILES = [{}, {"rows_per_tile": 4}, {"rows_per_tile": 5, "candidates_per_tile": 3}, {"candidates_per_tile": 1}]


@pytest.mark.parametrize("tiles", TILES, ids=str)
@pytest.mark.parametrize("negatives", [(), (26,), (5, 31)], ids=str)
@pytest.mark.parametrize("symmetric", [False, True], ids=["one_way", "symmetric"])
def test_loss_and_every_gradient_equal_the_naive_ones(tiles, negatives, symmetric):
    columns = make_columns(negatives=negatives)
    assert_equals_naive(columns, options={"symmetric": symmetric, **tiles}, naive_options={"symmetric": symmetric})


@pytest.mark.parametrize("tiles", TILES[1:3], ids=str)
@pytest.mark.parametrize("symmetric", [False, True], ids=["one_way", "symmetric"])
@pytest.mark.parametrize("margin", [None, 0.1, -0.2])
@pytest.mark.parametrize("with_ids", [False, True], ids=["no_ids", "ids"])
def test_masks_and_margins_equal_the_naive_ones(tiles, symmetric, margin, with_ids):
    columns = make_columns(rows=17, negatives=(7, 23))
    ids = make_ids(columns, group=True) if with_ids else None
    output = assert_equals_naive(
        columns,
        ids,
        options={"symmetric": symmetric, "false_negative_margin": margin, **tiles},
        naive_options={"symmetric": symmetric, "margin": margin},
    )
    assert (output.metrics["masked_share"] > 0) == (with_ids or margin is not None)


@pytest.mark.parametrize("symmetric", [False, True], ids=["one_way", "symmetric"])
@pytest.mark.parametrize("masks", [False, True], ids=["no_masks", "masks"])
@pytest.mark.parametrize("dims, weights", [([10], None), ([3, 10, 6], [1.0, 2.0, 5.0]), ([2, 7], None)], ids=str)
def test_matryoshka_is_the_weighted_sum_of_the_loss_on_every_prefix(symmetric, masks, dims, weights):
    columns = make_columns(rows=11, negatives=(4,))
    matryoshka = sorted(zip(dims, weights or [1.0] * len(dims), strict=True), reverse=True)
    assert_equals_naive(
        columns,
        make_ids(columns) if masks else None,
        options={
            "symmetric": symmetric,
            "matryoshka_dims": dims,
            "matryoshka_weights": weights,
            "false_negative_margin": 0.05 if masks else None,
            "rows_per_tile": 4,
            "candidates_per_tile": 3,
        },
        naive_options={"symmetric": symmetric, "matryoshka": matryoshka, "margin": 0.05 if masks else None},
    )


@pytest.mark.parametrize("kind", [dict, lambda ids: RowIds(ids, ["query", "positive", "negative0"])])
@pytest.mark.parametrize("relation", ["query", "positive", "group", "negative0"])
def test_each_relation_masks_exactly_its_pairs(relation, kind):
    columns = make_columns(rows=6, negatives=(12,))
    ids = {name: torch.arange(len(c)) + 100 * k for k, (name, c) in enumerate(columns.items())}
    if relation == "group":
        ids["group"] = torch.arange(6)
    # Rows 1 and 4 share the id; negative 4 has the text of the positive of row 1.
    ids[relation][4] = ids["positive" if relation == "negative0" else relation][1]
    wanted = 1 if relation == "negative0" else 2
    ids = kind(ids)
    assert not isinstance(ids, RowIds) or ids.repeating == {relation}
    output = assert_equals_naive(columns, ids)
    assert round(output.metrics["masked_share"].item() * 6 * 17) == wanted
    unmasked = InfoNCELoss(TEMPERATURE, mask_false_negatives=False)(columns, ids=ids)
    assert unmasked.metrics["masked_share"] == 0 and unmasked.loss > output.loss


def test_ids_that_are_known_to_differ_cost_no_traffic():
    class Traffic(TorchDispatchMode):
        num_bytes = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if not function.is_view:
                for leaf in tree_leaves((args, kwargs, result)):
                    self.num_bytes += leaf.nbytes if isinstance(leaf, torch.Tensor) else 0
            return result

    columns = make_columns(rows=256, negatives=(256,), width=16, dtype=torch.float32)
    ids = {name: torch.arange(256) + 1000 * k for k, name in enumerate(columns)}
    found = []
    for given in (ids, RowIds(ids, list(columns)), None):
        with Traffic() as traffic:
            output = InfoNCELoss(TEMPERATURE, rows_per_tile=64, candidates_per_tile=256)(columns, ids=given)
        found.append((traffic.num_bytes, output.loss.item(), output.metrics["masked_share"].item()))
    (compared, *expected), (known, *others), (without, *_) = found
    assert others == expected and known < 1.001 * without < 0.6 * compared


@pytest.mark.parametrize("rows_of_rank", [[13], [9, 4], [1, 0, 12], [5, 6, 2]], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"symmetric": True, "false_negative_margin": 0.05, "matryoshka_dims": [10, 4]}], ids=str
)
def test_ranks_weighted_by_rows_sum_to_the_single_process_loss_and_gradient(rows_of_rank, options):
    columns = make_columns(rows=13, negatives=(26,))
    ids = make_ids(columns)
    loss = InfoNCELoss(TEMPERATURE, True, rows_per_tile=4, candidates_per_tile=5, **options).double()
    single = loss(columns, ids=ids)
    expected = gradients(single.loss, loss.log_inverse_temperature, *columns.values())

    total, metrics, offset = 0.0, dict.fromkeys(single.metrics, 0.0), 0
    for num_rows in rows_of_rank:
        # Own rows are leaves of their own, everyone's rows the gathered ones: two roles, two gradients, one source.
        own = {name: c[offset : offset + num_rows] for name, c in columns.items() if name != "negative0"}
        own["negative0"] = columns["negative0"][2 * offset : 2 * (offset + num_rows)]
        output = loss(own, columns, row_offset=offset, ids=ids)
        total = total + output.loss * num_rows / 13
        metrics = {name: value + output.metrics[name] * num_rows / 13 for name, value in metrics.items()}
        offset += num_rows
    assert expected[1].abs().max() > 1e-3
    assert_close(total, single.loss)
    for name, value in metrics.items():
        assert_close(value, single.metrics[name])
    for actual, wanted in zip(
        gradients(total, loss.log_inverse_temperature, *columns.values()), expected, strict=True
    ):
        assert_close(actual, wanted)


def test_own_and_everyone_get_the_gradients_of_their_roles():
    everyone = make_columns(rows=9, negatives=(8,))
    own = {name: c[3:7].detach().clone().requires_grad_() for name, c in everyone.items()}
    everyone = {name: c.detach().clone().requires_grad_() for name, c in everyone.items()}
    for symmetric in (False, True):
        expected, _ = naive_infonce(own, everyone, row_offset=3, symmetric=symmetric)
        actual = InfoNCELoss(TEMPERATURE, symmetric=symmetric, rows_per_tile=3)(own, everyone, row_offset=3).loss
        tensors = [own["query"], everyone["positive"], everyone["negative0"]]
        tensors += [own["positive"], everyone["query"]] if symmetric else []
        for found, wanted in zip(gradients(actual, *tensors), gradients(expected, *tensors), strict=True):
            assert wanted.abs().max() > 1e-3
            assert_close(found, wanted)
        assert torch.autograd.grad(actual.detach() + 0 * own["negative0"].sum(), own["negative0"])[0].abs().max() == 0


def test_a_frozen_column_gets_no_gradient_and_the_others_theirs():
    for frozen in ("query", "positive"):
        columns = make_columns(negatives=(5,))
        columns[frozen] = columns[frozen].detach()
        trained = [c for name, c in columns.items() if name != frozen]
        expected, _ = naive_infonce(columns, symmetric=True)
        actual = InfoNCELoss(TEMPERATURE, symmetric=True)(columns).loss
        for found, wanted in zip(gradients(actual, *trained), gradients(expected, *trained), strict=True):
            assert_close(found, wanted)


def test_without_grad_the_loss_is_the_same_and_has_no_graph():
    columns = make_columns(negatives=(5,))
    loss = InfoNCELoss(TEMPERATURE, learnable_temperature=True)
    with torch.no_grad():
        evaluated = loss(columns)
    assert not evaluated.loss.requires_grad
    assert evaluated.loss == loss(columns).loss.detach()


def test_one_row_without_negatives_has_no_loss_and_no_nan():
    columns = make_columns(rows=1)
    output = InfoNCELoss(TEMPERATURE, symmetric=True, false_negative_margin=0.1)(columns, ids=make_ids(columns))
    assert output.loss == 0 and output.metrics["accuracy"] == 1 and output.metrics["masked_share"] == 0
    assert all((gradient == 0).all() for gradient in gradients(output.loss, *columns.values()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_row_with_every_other_candidate_masked_has_no_loss_and_no_nan(dtype):
    columns = make_columns(rows=5, negatives=(3,), dtype=dtype)
    ids = {name: torch.zeros(len(c), dtype=torch.long) for name, c in columns.items()}
    output = InfoNCELoss(TEMPERATURE, True, symmetric=True, rows_per_tile=2, candidates_per_tile=2)(columns, ids=ids)
    assert output.loss == 0 and output.metrics["accuracy"] == 1 and output.metrics["masked_share"] == 1
    assert all((gradient == 0).all() for gradient in gradients(output.loss, *columns.values()))


def test_some_rows_masked_whole_leave_the_others_exact():
    columns = make_columns(rows=6, negatives=(4,))
    ids = {name: torch.arange(len(c)) + 50 * k for k, (name, c) in enumerate(columns.items())}
    ids["negative0"][:] = ids["positive"][2]
    ids["group"] = torch.tensor([0, 1, 2, 3, 4, 5])
    for j in (0, 1, 3, 4, 5):  # row 2 shares something with every row; they share nothing with each other
        name = ("query", "positive", "group")[j % 3]
        ids[name][j] = ids[name][2]
    assert_equals_naive(columns, ids, options={"rows_per_tile": 2})


def test_a_rank_without_rows_contributes_zero():
    everyone = make_columns(rows=4)
    own = {name: c[:0] for name, c in everyone.items()}
    output = InfoNCELoss()(own, everyone, row_offset=4)
    assert output.loss == 0 and not output.loss.isnan()
    assert (gradients(output.loss, everyone["positive"])[0] == 0).all()


def test_a_vector_of_zeros_gets_no_gradient_and_spoils_no_other():
    columns = make_columns(rows=5)
    with torch.no_grad():
        columns["query"][2] = 0
        columns["positive"][3] = 0
    output = InfoNCELoss(TEMPERATURE)(columns)
    query, positive = gradients(output.loss, *columns.values())
    assert output.loss.isfinite() and query.isfinite().all() and positive.isfinite().all()
    assert (query[2] == 0).all() and (positive[3] == 0).all() and query[3].abs().max() > 0


def test_normalize_off_scores_dot_products():
    columns = make_columns(rows=7)
    columns = {name: (c.detach() / 10).requires_grad_() for name, c in columns.items()}
    expected = nn.functional.cross_entropy(columns["query"] @ columns["positive"].T / 0.5, torch.arange(7))
    actual = InfoNCELoss(0.5, normalize=False)(columns).loss
    assert_close(actual, expected)
    for found, wanted in zip(
        gradients(actual, *columns.values()), gradients(expected, *columns.values()), strict=True
    ):
        assert_close(found, wanted)


# The embeddings are rounded before either side reads them, so what is left is float32 arithmetic on logits up to 20
# (eps 6e-8 x 20, a few roundings) and the rounding of the result to the embeddings' dtype (eps / 2).
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_half_precision_is_computed_in_float32_and_rounded_once(dtype, autocast):
    columns = make_columns(rows=300, negatives=(40,), width=32, dtype=dtype)
    exact = {name: c.detach().double().requires_grad_() for name, c in columns.items()}
    expected, _ = naive_infonce(exact, symmetric=True)
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        loss = InfoNCELoss(TEMPERATURE, symmetric=True, rows_per_tile=64)(columns).loss
    assert loss.dtype == torch.float32
    assert_close(loss, expected, 1e-6)
    # fp16 cannot hold gradients of 1e-8; training scales the loss, and so does this test.
    found = torch.autograd.grad(loss * 1024, list(columns.values()))
    for actual, wanted in zip(found, gradients(expected * 1024, *exact.values()), strict=True):
        assert actual.dtype == dtype
        assert_close(actual, wanted, TOLERANCES[dtype])


def test_a_loss_scale_saves_gradients_below_the_range_of_fp16():
    columns = make_columns(rows=64, width=32, dtype=torch.float16)
    columns = {name: (c.detach() * 1000).requires_grad_() for name, c in columns.items()}  # long vectors turn slowly
    exact = {name: c.detach().double().requires_grad_() for name, c in columns.items()}
    expected, _ = naive_infonce(exact)
    wanted_gradients = gradients(expected * 2.0**16, *exact.values())
    assert ((wanted_gradients[0] / 2.0**16).half() == 0).double().mean() > 0.2
    found = torch.autograd.grad(InfoNCELoss(TEMPERATURE)(columns).loss * 2.0**16, list(columns.values()))
    for actual, wanted in zip(found, wanted_gradients, strict=True):
        assert_close(actual, wanted, TOLERANCES[torch.float16])


def test_many_tiny_contributions_survive_float32_accumulation():
    # Each of 4096 rows pushes the one negative by about 1 / 4096: summed in bf16 they would stall at 2^8 of them.
    columns = make_columns(rows=4096, negatives=(1,), width=8, dtype=torch.bfloat16)
    exact = {name: c.detach().double().requires_grad_() for name, c in columns.items()}
    expected, _ = naive_infonce(exact)
    actual = gradients(InfoNCELoss(TEMPERATURE, rows_per_tile=128)(columns).loss, columns["negative0"])[0]
    assert_close(actual, gradients(expected, exact["negative0"])[0], TOLERANCES[torch.bfloat16])


@pytest.mark.parametrize("margin", [None, 0.05])
@pytest.mark.parametrize("dims", [None, [10, 4]])
def test_without_in_batch_negatives_a_row_equals_a_batch_of_its_own(margin, dims):
    options = {"learnable_temperature": True, "matryoshka_dims": dims, "false_negative_margin": margin}
    columns = make_columns(rows=7, negatives=(7, 14))
    ids = make_ids(columns)
    ids["negative1"][2 * 2 + 1] = ids["positive"][2]
    by_row, of_batch = InfoNCELoss(0.2, in_batch_negatives=False, **options), InfoNCELoss(0.2, **options)
    output = by_row(columns, ids=ids)

    def part(of, start: int, end: int) -> dict:
        each = {name: len(rows) // 7 for name, rows in of.items()}
        return {name: rows[start * each[name] : end * each[name]] for name, rows in of.items()}

    alone = [of_batch(part(columns, i, i + 1), ids=part(ids, i, i + 1)) for i in range(7)]
    assert_close(output.loss, sum(one.loss for one in alone) / 7)
    for name, figure in output.metrics.items():
        assert_close(figure, sum(one.metrics[name] for one in alone) / 7)
    assert output.metrics["masked_share"] > 0
    found = gradients(output.loss, *columns.values(), by_row.log_inverse_temperature)
    wanted = gradients(sum(one.loss for one in alone) / 7, *columns.values(), of_batch.log_inverse_temperature)
    for one, other in zip(found, wanted, strict=True):
        assert one.abs().sum() > 0
        assert_close(one, other, 1e-6 if one.dtype == torch.float32 else 1e-10)
    assert not by_row.cross_device_negatives, "nothing is gathered"
    halves = [by_row(part(columns, *s), columns, s[0], ids).loss * (s[1] - s[0]) / 7 for s in ((0, 3), (3, 7))]
    assert_close(sum(halves), output.loss)
    pairs = {name: columns[name] for name in ("query", "positive")}
    for lacking in ({}, {"negative": columns["negative1"][:13]}):
        with pytest.raises(UsageError, match="in_batch_negatives=false needs hard negatives, as many for every row"):
            by_row(pairs | lacking)


@pytest.mark.parametrize("scale", [1000.0, 2.0**-10])
def test_the_gradient_is_linear_in_what_arrives_from_above(scale):
    columns = make_columns()
    loss = InfoNCELoss(TEMPERATURE, learnable_temperature=True).double()
    tensors = [loss.log_inverse_temperature, *columns.values()]
    plain = gradients(loss(columns).loss, *tensors)
    for found, wanted in zip(gradients(loss(columns).loss * scale, *tensors), plain, strict=True):
        assert_close(found, wanted * scale, 1e-14)


def test_backward_twice_through_one_graph_gives_the_same_gradient():
    columns = make_columns()
    loss = InfoNCELoss(TEMPERATURE)(columns).loss
    first = torch.autograd.grad(loss, columns["query"], retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(loss, columns["query"])[0], first)


def test_a_gradient_of_the_gradient_is_refused():
    columns = make_columns()
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(InfoNCELoss()(columns).loss, columns["query"], create_graph=True)


class LargestTensor(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        made = [leaf.untyped_storage().nbytes() // 4 for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.numel = max(self.numel, *made, 0)
        return result


def test_no_tensor_is_as_large_as_the_logits():
    rows = 4096
    columns = make_columns(rows=rows, width=16, dtype=torch.float32)
    ids = {name: torch.arange(rows) for name in columns}
    loss = InfoNCELoss(
        TEMPERATURE, symmetric=True, matryoshka_dims=[16, 8], false_negative_margin=0.1, rows_per_tile=64
    )
    with LargestTensor() as largest:
        loss(columns, ids=ids).loss.backward()
    assert columns["query"].grad.abs().max() > 0
    assert 64 * rows <= largest.numel < rows * rows // 32


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors made inside that live at once."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor.untyped_storage())
        return result

    def add(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key in self.known:
            return
        self.known.add(key)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self.drop, key, size)

    def drop(self, key, size):
        self.known.discard(key)
        self.now -= size


@pytest.mark.parametrize("symmetric", [False, True])
def test_what_the_loss_holds_is_what_the_planner_counts(monkeypatch, symmetric):
    """Many candidates, in whole columns as on a GPU: a tile has fewer rows, and no more than its share of bytes."""
    rows, width = 3000, 16
    monkeypatch.setattr(policy, "LOSS_TILE_BYTES", 2**22)
    columns = make_columns(rows=rows, width=width, negatives=(rows,), dtype=torch.float32)
    ids = {name: torch.arange(rows) % 1500 for name in columns}
    loss = InfoNCELoss(TEMPERATURE, symmetric=symmetric, false_negative_margin=0.1, candidates_per_tile=10**9)
    assert policy.loss_tile_rows(2 * rows) == 43 and policy.loss_tile_rows(10**7) == 1
    assert policy.loss_tile_rows(100) == policy.LOSS_TILE_ROWS
    with LiveBytes() as live:
        loss(columns, ids=ids).loss.backward()
    assert columns["query"].grad.abs().max() > 0
    counted = policy.loss_stage_bytes(3 * rows, 3 * rows, rows, 2 * rows, width)
    assert 2**21 < live.most <= counted, (live.most, counted)


def test_the_learnable_temperature_is_held_as_documented_and_can_come_back():
    columns = make_columns()
    for too_far, held in ((9.0, 0.01), (-3.0, 1.0)):
        loss = InfoNCELoss(TEMPERATURE, learnable_temperature=True)
        assert loss.log_inverse_temperature.shape == (1,) and loss.temperature == pytest.approx(TEMPERATURE)
        with torch.no_grad():
            loss.log_inverse_temperature.fill_(too_far)
        assert loss.temperature == pytest.approx(held)
        output = loss(columns)
        assert output.metrics["temperature"].item() == pytest.approx(held)
        assert loss.log_inverse_temperature.item() == pytest.approx(-math.log(held), abs=1e-6)
        output.loss.backward()
        assert loss.log_inverse_temperature.grad.abs().item() > 1e-4
    assert list(InfoNCELoss(TEMPERATURE).parameters()) == []
    assert InfoNCELoss(TEMPERATURE).temperature == TEMPERATURE


def test_accuracy_counts_strict_wins_among_unmasked_candidates():
    query = torch.eye(4)
    positive = torch.eye(4)
    positive[2:, 2:] = torch.tensor([[0.6, 0.8], [0.8, 0.6]])  # rows 2 and 3 prefer each other's positive
    output = InfoNCELoss()({"query": query, "positive": positive})
    assert output.metrics["accuracy"] == 0.5
    assert output.metrics["positive_similarity"].item() == pytest.approx(0.8)
    ids = {"query": torch.tensor([5, 6, 7, 7]), "positive": torch.arange(4)}
    assert InfoNCELoss()({"query": query, "positive": positive}, ids=ids).metrics["accuracy"] == 1.0
    tied = InfoNCELoss()({"query": query, "positive": torch.eye(4)[[0, 1, 2, 2]]})
    assert tied.metrics["accuracy"] == 0.5  # row 2 ties with row 3's positive: no strict win; row 3 misses


@pytest.mark.parametrize(
    "options, words",
    [
        ({"temperature": 0}, "temperature=0"),
        ({"temperature": 0.001, "learnable_temperature": True}, "Start inside"),
        ({"matryoshka_dims": [4, 4]}, r"\[4, 4\]"),
        ({"matryoshka_dims": []}, "at least 1"),
        ({"matryoshka_dims": [4, 2], "matryoshka_weights": [1.0]}, "one number"),
        ({"matryoshka_weights": [1.0]}, "needs matryoshka_dims"),
        ({"matryoshka_dims": [4], "normalize": False}, "normalize=false"),
        ({"false_negative_margin": math.nan}, "false_negative_margin=nan"),
        ({"rows_per_tile": 0}, "rows_per_tile=0"),
        ({"in_batch_negatives": False, "symmetric": True}, "symmetric=True is about"),
    ],
    ids=str,
)
def test_options_that_cannot_be_are_refused(options, words):
    with pytest.raises(UsageError, match=words):
        InfoNCELoss(**options)


def test_embeddings_that_cannot_be_are_refused():
    columns = make_columns(rows=4, negatives=(3,))
    loss = InfoNCELoss()
    with pytest.raises(UsageError, match="positive column"):
        loss({"query": columns["query"]})
    with pytest.raises(UsageError, match="width"):
        loss({**columns, "negative0": columns["negative0"][:, :4]})
    with pytest.raises(UsageError, match="one positive"):
        loss({**columns, "positive": columns["positive"][:3]})
    with pytest.raises(UsageError, match="same columns"):
        loss(columns, {"query": columns["query"], "positive": columns["positive"]})
    with pytest.raises(UsageError, match="row_offset=1"):
        loss(columns, row_offset=1)
    with pytest.raises(UsageError, match="one id per row"):
        loss(columns, ids={"negative0": torch.arange(4)})
    with pytest.raises(UsageError, match="no column"):
        loss(columns, ids={"negatives": torch.arange(3)})
    with pytest.raises(UsageError, match="up to 10"):
        InfoNCELoss(matryoshka_dims=[10, 11])(columns)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_the_numbers_are_the_same_and_the_host_never_waits():
    columns = make_columns(rows=70, negatives=(31,))
    ids = make_ids(columns, group=True)
    options = {"symmetric": True, "matryoshka_dims": [10, 4], "false_negative_margin": 0.05, "rows_per_tile": 16}
    expected = InfoNCELoss(TEMPERATURE, True, **options).double()(columns, ids=ids)
    on_device = {name: c.detach().cuda().requires_grad_() for name, c in columns.items()}
    loss = InfoNCELoss(TEMPERATURE, True, **options).double().cuda()
    ids = {name: values.cuda() for name, values in ids.items()}
    torch.cuda.set_sync_debug_mode("error")
    try:
        output = loss(on_device, ids=ids)
        found = gradients(output.loss, *on_device.values())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_close(output.loss.cpu(), expected.loss)
    for actual, wanted in zip(found, gradients(expected.loss, *columns.values()), strict=True):
        assert_close(actual.cpu(), wanted)

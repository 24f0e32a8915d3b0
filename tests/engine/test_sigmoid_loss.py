"""The sigmoid loss against plain autograd over all pairs at once, in float64."""

import pytest
import torch
from torch.nn.functional import logsigmoid, normalize

from hf_dist_ext.engine.sigmoid_loss import SigmoidLoss
from hf_dist_ext.errors import UsageError
from tests.engine.test_losses import LargestTensor, assert_close, make_columns, make_ids, naive_mask


def naive(own, everyone, row_offset, ids, scale, bias, unit=True):
    anchor, positive, *negatives = list(own)
    shape = (lambda rows: normalize(rows, dim=1)) if unit else (lambda rows: rows)
    similarity = shape(own[anchor]) @ torch.cat([shape(everyone[name]) for name in (positive, *negatives)]).T
    rows = torch.arange(len(similarity))
    answers = torch.full_like(similarity, -1.0)
    answers[rows, rows + row_offset] = 1.0
    logits = similarity * scale + bias
    terms = -logsigmoid(answers * logits)
    if ids:
        masked = naive_mask(list(own), (rows + row_offset).tolist(), everyone, ids, reverse=False)
        assert masked.any() and not masked.all()
        terms, logits = terms.masked_fill(masked, 0.0), logits.masked_fill(masked, -torch.inf)
    others = logits.clone()
    others[rows, rows + row_offset] = -torch.inf
    accuracy = (logits[rows, rows + row_offset] > others.amax(dim=1)).double().mean()
    return terms.sum(dim=1).mean(), accuracy


@pytest.mark.parametrize("tiles", [(512, 2048), (4, 5), (1, 1)])
@pytest.mark.parametrize("negatives, has_ids, unit", [((), False, True), ((7, 26), True, True), ((3,), True, False)])
def test_loss_and_gradients_are_those_of_all_pairs_at_once(tiles, negatives, has_ids, unit):
    everyone = make_columns(13, negatives)
    own = {name: rows[4:9].detach().clone().requires_grad_() for name, rows in everyone.items()}
    ids = make_ids(everyone, group=True) if has_ids else None
    loss = SigmoidLoss(3.0, -1.5, normalize=unit, rows_per_tile=tiles[0], candidates_per_tile=tiles[1]).double()
    inputs = [own["query"], *list(everyone.values())[1:]]
    found, metrics = loss(own, everyone, row_offset=4, ids=ids)
    ours = torch.autograd.grad(2.5 * found, [*inputs, loss.log_scale, loss.bias])
    expected, accuracy = naive(own, everyone, 4, ids, loss.log_scale.exp(), loss.bias, unit)
    theirs = torch.autograd.grad(2.5 * expected, [*inputs, loss.log_scale, loss.bias])
    assert all(gradient.abs().max() > 1e-6 for gradient in theirs)
    assert_close(found.detach(), expected.detach())
    for one, other in zip(ours, theirs, strict=True):
        assert_close(one, other)
    assert metrics["accuracy"] == accuracy and metrics["scale"] == pytest.approx(3.0)
    assert (metrics["masked_share"] > 0) == has_ids


def test_own_rows_in_parts_add_up_to_the_whole():
    columns, loss = make_columns(13, (5,)), SigmoidLoss(bias=-2.0).double()
    whole = torch.autograd.grad(loss(columns).loss, list(columns.values()))
    parts = [torch.zeros_like(gradient) for gradient in whole]
    for start, stop in ((0, 6), (6, 13)):
        own = {name: rows[start:stop] for name, rows in columns.items() if name != "negative0"}
        own |= {"negative0": columns["negative0"]}
        value = loss(own, columns, row_offset=start).loss * (stop - start) / 13
        for part, gradient in zip(parts, torch.autograd.grad(value, list(columns.values())), strict=True):
            part += gradient
    assert all(gradient.abs().max() > 0 for gradient in whole)
    for part, gradient in zip(parts, whole, strict=True):
        assert_close(part, gradient)


def test_no_tensor_is_larger_than_a_tile_or_a_column():
    columns = {name: rows.detach().requires_grad_() for name, rows in make_columns(300, width=8).items()}
    with LargestTensor() as largest:
        SigmoidLoss(rows_per_tile=16, candidates_per_tile=60).double()(columns).loss.backward()
    assert columns["query"].grad.abs().sum() > 0 and largest.numel == 2 * 300 * 8  # of float64


def test_the_scale_and_the_bias_may_be_fixed_and_what_can_not_be_is_refused():
    columns = make_columns(4)
    fixed = SigmoidLoss(learnable=False).double()
    fixed(columns).loss.backward()
    assert columns["query"].grad is not None and fixed.bias.grad is None
    with pytest.raises(UsageError, match="scale=0 must be a positive number"):
        SigmoidLoss(scale=0)
    with pytest.raises(UsageError, match="at least 1"):
        SigmoidLoss(rows_per_tile=0)
    with pytest.raises(RuntimeError, match="without create_graph=True"):
        torch.autograd.grad(fixed(columns).loss, columns["query"], create_graph=True)

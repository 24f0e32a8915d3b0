"""Batches that are cut where they are made: the training process cuts none, and chunks are as if it had."""

import pickle
from dataclasses import replace

import pytest
import torch

from hf_dist_ext.data.mixture import SOURCE
from hf_dist_ext.engine.chunks import ChunkedBatch
from hf_dist_ext.engine.layout import lay_out
from hf_dist_ext.engine.tables import ChunkLimits
from hf_dist_ext.errors import UsageError
from hf_dist_ext.training import ahead
from hf_dist_ext.training.ahead import CutAhead, CutRequest, Cutter, SharedCutRequest
from tests.training.test_host_reads import collator_of, rows
from tests.training.test_trainer import Tiny, collate, trainer

OPTIONS = {"shares_tower": True, "can_shift": True}


def assert_same_chunks(found: ChunkedBatch, wanted: ChunkedBatch) -> None:
    assert found.limits == wanted.limits and found.row_counts() == wanted.row_counts()
    for chunk, other in zip(found.chunks(), wanted.chunks(), strict=True):
        assert (chunk.start, chunk.stop, chunk.width) == (other.start, other.stop, other.width)
        features, expected = chunk.features, other.features
        assert list(features) == list(expected)
        rows, others = features.pop("packed_rows", None), expected.pop("packed_rows", None)
        assert rows is others is None or rows.lengths == others.lengths and torch.equal(rows.offsets, others.offsets)
        for key, value in expected.items():
            assert torch.equal(features[key], value) if isinstance(value, torch.Tensor) else features[key] == value


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("packs", [True, False])
def test_cuts_that_travelled_are_those_of_the_batch_also_when_limits_have_changed(flat, packs):
    cutter = Cutter(OPTIONS, packing=packs)
    first, then = (
        CutRequest(ChunkLimits(max_tokens=tokens, packs=packs), factor) for tokens, factor in ((60, 2), (24, 1))
    )
    request = SharedCutRequest(first)
    collate, cut = collator_of(flat), CutAhead(cutter, request, {"": None})
    batch = cut(collate(rows(20)))
    cuts = pickle.loads(pickle.dumps(batch.pop(ahead.CUTS)["all"]))
    columns = {name: batch[name] for name in ("query", "positive", "negative")}
    assert cuts.request == first and not cuts.chunked.columns and not cuts.wide.columns
    whole = lay_out(columns, first.limits, **OPTIONS)
    assert_same_chunks(cuts.of(columns).chunked, whole)
    assert_same_chunks(cuts.of(columns).wide, lay_out(columns, first.limits.scaled(2), **OPTIONS))
    again = cutter.cut_again(cuts.of(columns), then)
    assert_same_chunks(again.chunked, lay_out(columns, then.limits, **OPTIONS))
    assert again.wide is None and len(again.chunked.chunks()) > len(whole.chunks())
    alike = cutter.cut_again(cuts.of(columns), replace(first, factor=3))
    assert_same_chunks(alike.chunked, whole)
    assert_same_chunks(alike.wide, lay_out(columns, first.limits.scaled(3), **OPTIONS))
    split, wanted = cuts.of(columns).chunked, lay_out(columns, first.limits, **OPTIONS)
    for one in (split, wanted):  # other ranks have more chunks
        one.agree([2 * len(whole.chunks())])
    assert len(split.chunks()) == 2 * len(whole.chunks())
    assert_same_chunks(split, wanted)
    once_more = cuts.of(columns).chunked  # as the batch of an update that is run again
    assert once_more.num_chunks() == whole.num_chunks()
    assert_same_chunks(once_more, whole)
    others = {name: features | {"input_ids": features["input_ids"] + 1} for name, features in columns.items()}
    assert_same_chunks(whole.without_tensors().of_batch(others), lay_out(others, first.limits, **OPTIONS))
    request.set(then)
    assert cut(collate(rows(20)))[ahead.CUTS]["all"].request == then


def test_columns_that_the_loss_does_not_read_are_not_cut():
    cut = CutAhead(Cutter(OPTIONS, False), SharedCutRequest(CutRequest(ChunkLimits(3), 1)), {"": None, "pairs": 2})
    batch = collator_of(True)(rows(4))
    batch["ids"][SOURCE] = "pairs"
    assert list(cut(batch)[ahead.CUTS]["all"].chunked.row_counts()) == ["query", "positive"]
    batch["ids"][SOURCE] = "others"
    assert list(cut(batch)[ahead.CUTS]["all"].chunked.row_counts()) == ["query", "positive", "negative"]


@pytest.mark.parametrize("workers", [0, 1])
def test_no_batch_is_laid_out_in_the_training_process_beside_a_worker(tmp_path, monkeypatch, workers):
    calls = []
    monkeypatch.setattr(ahead, "lay_out", lambda *given, **options: calls.append(1) or lay_out(*given, **options))
    made = trainer(tmp_path, dataloader_num_workers=workers, gradient_cache_chunk_tokens=40)
    made.train()
    assert made.state.global_step == 3 and made.meter.usual_chunks > 3
    assert len(calls) == (0 if workers else 4)  # without a worker the loader makes one batch more than it gives


def test_a_trainer_that_moves_tensors_itself_cuts_none(tmp_path, monkeypatch):
    """To another dtype, as floats under DeepSpeed."""
    calls, made = [], trainer(tmp_path, dataloader_num_workers=1, gradient_cache_chunk_tokens=40)
    monkeypatch.setattr(ahead, "lay_out", lambda *given, **options: calls.append(1) or lay_out(*given, **options))
    move = made._prepare_input
    monkeypatch.setattr(
        made, "_prepare_input", lambda data: data.int() if isinstance(data, torch.Tensor) else move(data)
    )
    made.train()
    assert made.state.global_step == 3 and not calls


def test_an_error_of_the_layout_is_told_by_the_training_process(tmp_path):
    def unreadable(rows: list[int]) -> dict:
        batch = collate(rows)
        batch["query"]["pixel_values"] = torch.rand(3, 3, 4, 4)
        return batch

    with pytest.raises(UsageError, match="^column 'query': cannot cut pixel_values"):
        trainer(tmp_path, collator=unreadable, dataloader_num_workers=1).train()


class Weighted(Tiny):
    def forward(self, input_ids, attention_mask, weights=None):
        hidden = super().forward(input_ids, attention_mask)
        return hidden if weights is None else hidden + weights * torch.arange(8)


def a_feature_more(features: dict) -> None:
    features["weights"] = (torch.arange(len(features["input_ids"])) % 3).float()[:, None]


def a_longer_mask(features: dict) -> None:
    features["attention_mask"] = torch.ones_like(features["attention_mask"])


def a_mask_filled_in_place(features: dict) -> None:
    features["attention_mask"].fill_(1)


def fewer_rows(features: dict) -> None:
    features.update({key: value[:5] for key, value in features.items()})


def more_rows(features: dict) -> None:
    features.update({key: torch.cat([value, value[:3]]) for key, value in features.items()})


CHANGES = [a_feature_more, a_longer_mask, a_mask_filled_in_place, fewer_rows, more_rows]


def trained_on_changed(folder, change, hook: str, monkeypatch, is_cut_ahead: bool) -> torch.Tensor:
    own = lambda rows: {name: features for name, features in collate(rows).items() if name != "ids"}  # noqa: E731
    made = trainer(folder, Weighted(), collator=own, learning_rate=0.1)
    run = getattr(made, hook)

    def changed(*arguments):
        inputs = arguments[-1] if hook == "_prepare_inputs" else arguments[1]
        for name in ("query", "positive"):
            change(inputs[name])
        return run(*arguments)

    monkeypatch.setattr(made, hook, changed)
    if not is_cut_ahead:
        monkeypatch.setattr(made.step.sizes, "cut_ahead", lambda: lambda batch: batch)
    made.train()
    return torch.cat([weight.detach().flatten() for weight in made.model.parameters()])


@pytest.mark.parametrize(
    "hook, change", [*(("training_step", one) for one in CHANGES), ("_prepare_inputs", CHANGES[1])]
)
def test_a_batch_that_has_changed_since_it_was_loaded_is_cut_anew(tmp_path, monkeypatch, hook, change):
    train = lambda change, is_cut_ahead: trained_on_changed(tmp_path, change, hook, monkeypatch, is_cut_ahead)  # noqa: E731
    found, wanted = train(change, True), train(change, False)
    assert not torch.allclose(wanted, train(lambda features: None, True)), "the change is one of the training"
    assert torch.equal(found, wanted)


def test_cuts_are_those_of_the_tensors_that_the_loader_gave():
    def moved(batch: dict) -> dict:
        """As where floats get the dtype of an engine: other tensors."""
        return {
            name: {k: v.clone() if hasattr(v, "clone") else v for k, v in of.items()} for name, of in batch.items()
        }

    def columns_and_cuts(batch: dict) -> tuple:
        return {name: batch[name] for name in ("query", "positive", "negative")}, batch[ahead.CUTS]["all"]

    request = SharedCutRequest(CutRequest(ChunkLimits(max_tokens=60), 1))
    batch = CutAhead(Cutter(OPTIONS, False), request, {"": None})(collator_of(False)(rows(20)))
    columns, cuts = columns_and_cuts(batch)
    assert not cuts.are_of(columns), "nobody has noted what the loader gave"
    ahead.remember(batch)
    there = moved(batch)
    assert cuts.are_of(columns) and not cuts.are_of(columns_and_cuts(there)[0])
    assert not cuts.are_of(dict(reversed(columns.items()))), "another anchor"
    assert not cuts.are_of({name: columns[name] for name in ("query", "positive")}), "a column less"

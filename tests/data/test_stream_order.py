"""A stream is one order of rows: a resumed run takes it up where it was left, whatever changed."""

import itertools
import json
import logging
from dataclasses import replace

import datasets
import pytest
import torch
from PIL import Image
from torch import nn

from hf_dist_ext.checkpoints import manifest
from hf_dist_ext.data import stream_order, stream_readers
from hf_dist_ext.data.stream_order import Dealer, DealtRows, Ranks, StreamState
from hf_dist_ext.errors import UsageError
from tests.data.test_position import run, table

ROWS, STEPS = 12, 8  # of 4 rows: more than two epochs


def plain() -> datasets.IterableDataset:
    return table(ROWS).to_iterable_dataset(num_shards=5)


def mapped() -> datasets.IterableDataset:
    batched = plain().map(lambda batch: {"x": batch["x"]}, batched=True, batch_size=3)
    return batched.filter(lambda row: row["x"][0] != 7)


def mixed() -> datasets.IterableDataset:
    both = [plain(), table(ROWS, shift=100).to_iterable_dataset()]
    return datasets.interleave_datasets(both, [0.7, 0.3], seed=5, stopping_strategy="all_exhausted")


STREAMS = {
    "plain": plain,
    "shuffled": lambda: plain().shuffle(seed=3, buffer_size=7),
    "mapped": mapped,
    "mixed": mixed,
}
CHANGES = {
    "nothing": {},
    "smaller batch": {"per_device_train_batch_size": 3},
    "accumulation": {"gradient_accumulation_steps": 2},
    "workers": {"dataloader_num_workers": 2},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(a folder with a checkpoint of every step, the rows) of an uninterrupted run over a kind of stream."""
    made = {}

    def of(kind, **options):
        key = kind, *options.values()
        if key not in made:
            folder = tmp_path_factory.mktemp(kind)
            made[key] = folder, run(folder, STREAMS[kind](), max_steps=STEPS, **options).seen
        return made[key]

    return of


def goes_on(found, kind, stopped, **change) -> bool:
    folder, order = found
    after = run(folder, STREAMS[kind](), resume=stopped, max_steps=STEPS, **change)
    assert after.last_step == STEPS
    used = 4 * stopped
    rows = change.get("per_device_train_batch_size", 4) * change.get("gradient_accumulation_steps", 1)
    assert len(after.seen) == rows * (STEPS - stopped) > 0
    common = min(len(order) - used, len(after.seen))
    return after.seen[:common] == order[used:][:common]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", STREAMS)
def test_no_row_is_repeated_and_none_is_skipped(whole, kind, change):
    # In the first epoch, behind its last row, in the second.
    for stopped in (2, 3, 5) if kind == "plain" else (4,):
        assert goes_on(whole(kind), kind, stopped, **CHANGES[change])


@pytest.mark.parametrize("kind", ["plain", "shuffled"])
def test_loader_workers_do_not_change_the_order(whole, kind):
    folder, order = whole(kind, dataloader_num_workers=2)
    assert order == whole(kind)[1]
    assert sorted(order[:ROWS]) == list(range(ROWS)) == sorted(order[ROWS : 2 * ROWS])
    assert goes_on((folder, order), kind, 4, dataloader_num_workers=2, per_device_train_batch_size=5)
    assert goes_on((folder, order), kind, 4)


def logged_stream(log, rows=10) -> datasets.IterableDataset:
    """A generator that writes down every row that is read, in whichever process."""

    def generate(shards):
        for shard in shards:
            for i in range(rows):
                with open(log, "a") as file:
                    file.write(f"{rows * shard + i}\n")
                yield {"x": [float(rows * shard + i)]}

    return datasets.IterableDataset.from_generator(generate, gen_kwargs={"shards": list(range(8))})


def read_rows(log) -> list[int]:
    return [int(line) for line in log.read_text().splitlines()]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["plain", "shuffled"])
def test_rows_that_were_used_are_not_read_again(tmp_path, monkeypatch, kind, workers):
    monkeypatch.setattr(stream_readers, "ROUND_ROWS", 16)  # two of each reader

    def stream():
        made = logged_stream(tmp_path / "log", rows=100)
        return made.shuffle(seed=3, buffer_size=16) if kind == "shuffled" else made

    options = {"max_steps": 100, "dataloader_num_workers": workers}
    order = run(tmp_path, stream(), save_steps=90, **options).seen
    (tmp_path / "log").unlink()
    after = run(tmp_path, stream(), resume=90, **options | {"per_device_train_batch_size": 2})
    assert after.seen == order[360:380]
    # 45 rows of each reader were used. A generator cannot skip: it begins at its shard's first row. Ahead: what was
    # used, and two blocks of each reader for each process that reads ahead.
    read = read_rows(tmp_path / "log")
    assert len(set(read)) == len(read) and all(row % 100 < 60 for row in read)


def test_a_shard_that_was_read_is_not_opened_again(tmp_path, monkeypatch):
    monkeypatch.setattr(stream_readers, "ROUND_ROWS", 8)
    monkeypatch.setattr(stream_readers, "MAX_READERS", 2)
    order = run(tmp_path, logged_stream(tmp_path / "log"), max_steps=19, save_steps=14).seen
    (tmp_path / "log").unlink()
    after = run(tmp_path, logged_stream(tmp_path / "log"), resume=14, max_steps=19, per_device_train_batch_size=2)
    assert after.seen == order[56:66] and sorted(order) == sorted(set(order))
    # Reader 0 has the shards 0, 2, 4, 6; 28 of its rows were used, all of 0 and 2.
    assert {row // 10 for row in read_rows(tmp_path / "log")} <= {4, 5, 6, 7}


def test_a_shuffle_buffer_mixes_every_block_of_every_reader_and_epoch_in_a_way_of_its_own():
    stream = table(96).to_iterable_dataset(num_shards=2).shuffle(seed=3, buffer_size=16)  # blocks of 8 rows
    epochs = dealt(stream, window=96)
    mixed = []
    for _, rows in (next(epochs), next(epochs)):
        for first in range(0, 96, 8):
            mixed.append(tuple(row - first for row in rows if first <= row < first + 8))
    assert {tuple(sorted(block)) for block in mixed} == {tuple(range(8))}
    assert len(mixed) == len(set(mixed)) == 24


def dealt(stream, window=4, start=None, number=lambda dealt: int(dealt.row["x"][0])):
    """(state after it, rows) of every batch, of one process."""
    dealer = Dealer(stream, window, Ranks(0, 1, 1), start or StreamState())
    for batch in dealer:
        yield dealer.states.popleft(), [number(row) for row in batch]


def test_a_reader_that_is_through_drops_out_until_the_epoch_ends():
    """3 shards of 6, 3 and 1 rows."""
    parts = [table(n, shift=10 * i).to_iterable_dataset() for i, n in enumerate((6, 3, 1))]
    found = dealt(datasets.concatenate_datasets(parts), window=10)
    assert next(found)[1] == [0, 10, 20, 1, 11, 2, 12, 3, 4, 5]
    assert sorted(next(found)[1]) == [0, 1, 2, 3, 4, 5, 10, 11, 12, 20]


def test_a_resumed_run_draws_what_the_whole_run_drew(tmp_path):
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.drawn = nn.Parameter(torch.zeros(1)), []

        def forward(self, x, labels=None):
            self.drawn.append(torch.rand(1).item())
            return {"loss": (self.weight * x.sum()).sum() * 1e-6, "logits": x}

    order = run(tmp_path, plain(), max_steps=8, save_steps=5, dataloader_num_workers=2, model=Noisy()).drawn
    after = run(tmp_path, plain(), resume=5, max_steps=8, dataloader_num_workers=2, model=Noisy()).drawn
    assert after == order[5:] and len(set(order)) == 8


def test_the_place_is_a_committed_file_of_plain_json(whole):
    folder = whole("plain")[0] / "checkpoint-5"
    content = manifest.read(folder)
    assert stream_order.FILE in content["files"] and content["position"]["rows"] == 8
    place = json.loads((folder / stream_order.FILE).read_text())
    assert place["epoch"] == 1 and place["rows"] == 8 and set(place["states"]) == set("01234")


@pytest.mark.parametrize(
    "stream, words",
    [
        (lambda: table(ROWS).to_iterable_dataset(num_shards=4), "other columns or shards"),
        (lambda: plain().shuffle(seed=4, buffer_size=7), "shuffled with another seed"),
        (lambda: table(ROWS, shift=1).to_iterable_dataset(num_shards=5), "are not those of the checkpoint"),
    ],
)
def test_another_stream_is_refused_unless_it_is_meant(whole, stream, words):
    with pytest.raises(UsageError, match=words):
        run(whole("plain")[0], stream(), resume=2, max_steps=STEPS)
    assert run(whole("plain")[0], stream(), resume=2, max_steps=STEPS, allow_changed_data=True).seen


def test_a_state_that_leads_elsewhere_is_not_believed(caplog, monkeypatch):
    monkeypatch.setattr(stream_readers, "ROUND_ROWS", 5)
    rounds = [*itertools.islice(dealt(plain()), 3)]
    state, following = rounds[1][0], rounds[2][1]
    assert state.rows == 8 and state.round == 1
    wrong = replace(state, states={reader: None for reader in state.states})
    with caplog.at_level(logging.WARNING):
        assert next(dealt(plain(), start=wrong))[1] == following
    assert "the first 8 rows of epoch 0 are read again" in caplog.text


def test_what_accelerate_dispatches_is_read_as_trainer_does_and_goes_on_behind_what_was_read(tmp_path):
    def stream():
        return table(16).to_iterable_dataset(num_shards=4)

    options = {"max_steps": 8, "accelerator_config": {"dispatch_batches": True}}
    order = run(tmp_path, stream(), **options).seen
    assert sorted(order[:16]) == sorted(order[16:]) == list(range(16))
    assert run(tmp_path, stream(), resume=6, **options).seen == order[24:]  # of the second epoch
    smaller = {"per_device_train_batch_size": 2, "max_steps": 9}
    assert run(tmp_path, stream(), resume=3, **options | smaller).seen == order[12:24]
    with pytest.raises(UsageError, match="can not go on with another batch and dataloader_num_workers"):
        run(tmp_path, stream(), resume=3, **options | smaller, dataloader_num_workers=2)
    with pytest.raises(UsageError, match="through accelerate's dispatch_batches"):
        run(tmp_path, stream(), resume=3, max_steps=8)


def test_a_finished_run_takes_no_further_step(whole):
    after = run(whole("plain")[0], plain(), resume=STEPS, max_steps=STEPS, per_device_train_batch_size=2)
    assert after.seen == [] and after.last_step == STEPS


def test_without_skipping_the_data_begin_anew(whole):
    folder, order = whole("plain")
    options = {"resume": 4, "max_steps": STEPS, "ignore_data_skip": True}
    for change in ({}, {"per_device_train_batch_size": 2}):
        seen = run(folder, plain(), **options, **change).seen
        assert seen == order[: len(seen)] and len(seen) > 7


def test_what_can_not_be_is_said(tmp_path):
    with pytest.raises(UsageError, match="the training stream has no rows"):
        run(tmp_path, plain().filter(lambda row: False), max_steps=2)
    with pytest.raises(UsageError, match="save_strategy='epoch' with a stream"):
        run(tmp_path, plain(), max_steps=2, save_strategy="epoch")
    with pytest.raises(UsageError, match="dataloader_in_order=false hands over"):
        run(tmp_path, plain(), max_steps=2, dataloader_in_order=False)


def test_a_digest_is_the_content_of_a_row():
    rows = [{"a": 1}, {"a": 2}, {"a": "1"}, {"b": 1}, {"a": [1]}, {"a": torch.ones(1)}, {"a": torch.zeros(1)}]
    assert len({stream_readers.digest(row) for row in rows}) == len(rows)
    assert stream_readers.digest({"a": 1, "b": b"x"}) == stream_readers.digest({"b": b"x", "a": 1})


def test_a_picture_beside_a_text_is_decoded_where_a_batch_is_made():
    rows = [{"text": f"t {i}", "image": Image.new("RGB", (4, 4)) if i % 2 else None} for i in range(4)]
    features = datasets.Features({"positive": {"text": datasets.Value("string"), "image": datasets.Image()}})
    stream = datasets.Dataset.from_dict({"positive": rows}, features).to_iterable_dataset()
    dealer = Dealer(stream, 4, Ranks(0, 1, 1), StreamState())
    found = [DealtRows(dealer.features)[dealt]["positive"] for dealt in next(iter(dealer))]
    assert [one["text"] for one in found] == ["t 0", "t 1", "t 2", "t 3"]
    assert [getattr(one["image"], "size", None) for one in found] == [None, (4, 4), None, (4, 4)]

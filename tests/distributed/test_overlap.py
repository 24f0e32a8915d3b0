"""What travels while chunks are encoded: a column's embeddings, all of it done by the time of the loss."""

import json
import signal
from functools import partial

import pytest
import torch
from torch import nn

from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.strategies import gathering
from hf_dist_ext.strategies.gathering import GatheredColumns, Gathering
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.distributed.forked import Run
from tests.training.test_host_reads import collator_of, rows
from tests.training.test_trainer import Tiny

BATCH, CHUNK = 12, 2  # rows of a process, of a chunk
ENCODED = ["positive", "negative", "query"]  # in this order


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.towers = nn.ModuleDict({name: Tiny() for name in ENCODED})

    def forward(self, column, **features):
        return self.towers[column](**features)


class Watched(Gathering):
    """Notes when it begins and is waited for."""

    events: list[str] = []
    buffers: list[int] = []

    def __init__(self, own, counts, peers):
        self.name = f"{sum(counts)} rows of {own.dtype}"
        if own.is_floating_point():
            self.events.append(f"begin {self.name}")
        super().__init__(own, counts, peers)

    def wait(self):
        found, is_one = super().wait(), min(self._counts) == max(self._counts)
        assert not {"_own", "_everyone"} & {*vars(self)}  # neither is held twice
        if found.is_floating_point():
            self.events.append(f"wait {self.name}")
            self.buffers.append(found.data_ptr() if is_one else 0)
        return found


class WatchedLoss(InfoNCELoss):
    def forward(self, own, everyone, **more):
        if isinstance(everyone, GatheredColumns):
            begun = len(Watched.buffers)
            found = {name: everyone[name] for name in (ENCODED if self.symmetric else ENCODED[:2])}
            at = [rows.data_ptr() for rows in found.values()]
            assert all(place in (of, 0) for of, place in zip(at, Watched.buffers[begun:], strict=True))
        return super().forward(own, everyone, **more)


def events_of(say, folder, has_towers: bool, symmetric: bool, negatives_read: bool = True) -> str:
    """Of the last of three steps."""
    signal.alarm(600)
    gathering.Gathering = Watched
    torch.manual_seed(0)
    args = DistTrainingArguments(
        str(folder), per_device_train_batch_size=BATCH, gradient_cache_chunk_size=CHUNK, max_steps=3, use_cpu=True,
        save_strategy="no", report_to=[], disable_tqdm=True, train_sampling_strategy="sequential",
    )  # fmt: skip
    trainer = DistTrainer(
        Towers() if has_towers else Tiny(), args, loss=WatchedLoss(symmetric=symmetric),
        data_collator=collator_of(False), train_dataset=rows(6 * BATCH),
    )  # fmt: skip
    step, encode, run = trainer.step, trainer.step._encode, trainer.step.train

    def noted(model, chunk, **more):
        if not torch.is_grad_enabled():
            Watched.events.append("encode " + "+".join(step.layout.chunked.tables[chunk.table].columns))
        return encode(model, chunk, **more)

    step._encode = noted
    step.train = lambda *given: Watched.events.clear() or run(*given)
    trainer.train()
    return json.dumps(Watched.events)


def places(events: list[str], what: str) -> list[int]:
    return [i for i, event in enumerate(events) if event.startswith(what)]


@pytest.mark.parametrize("mode, has_towers, symmetric", [
    ("ddp", False, False), ("ddp", True, True), ("fsdp-full", True, False),
])  # fmt: skip
def test_a_column_is_gathered_while_the_next_is_encoded(tmp_path, mode, has_towers, symmetric):
    target = partial(events_of, folder=tmp_path / "run", has_towers=has_towers, symmetric=symmetric)
    events = json.loads(Run(mode, tmp_path / "run", target).result())
    encoded = {name: places(events, f"encode {name}") for name in ENCODED}
    assert len(encoded["query"]) == len(encoded["positive"]) == BATCH // CHUNK and len(encoded["negative"]) > 2
    sent = ENCODED if symmetric else ENCODED[:2]
    begun, waited = places(events, "begin"), places(events, "wait")
    assert len(begun) == len(waited) == len(sent)
    for i, name in enumerate(sent):
        assert max(encoded[name]) < begun[i]
        if i + 1 < len(ENCODED):
            assert begun[i] < min(encoded[ENCODED[i + 1]])
    assert min(waited) > max(max(numbers) for numbers in encoded.values())
    assert [events[i].split(" ", 1)[1] for i in begun] == [events[i].split(" ", 1)[1] for i in waited]


def test_where_forwards_wait_for_other_ranks_a_shared_tower_encodes_all_columns_first(tmp_path):
    target = partial(events_of, folder=tmp_path / "run", has_towers=False, symmetric=False)
    events = json.loads(Run("fsdp-full", tmp_path / "run", target).result())
    assert max(places(events, "encode")) < min(places(events, "begin")) and len(places(events, "begin")) == 2

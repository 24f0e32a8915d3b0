"""What two processes draw: each its own dropout, and all one order of rows, in a first training and in a second."""

import json
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.forked import Run
from tests.training.test_trainer import Tiny, collate, trainer


class Noted(nn.Module):
    """Notes what dropout leaves of ones."""

    def __init__(self):
        super().__init__()
        self.linear, self.dropout, self.kept = nn.Linear(8, 8), nn.Dropout(0.5), []

    def forward(self, hidden):
        kept = self.dropout(torch.ones_like(hidden))
        if self.training:
            self.kept.append(kept.flatten().tolist())
        return self.linear(hidden * kept)


def train_twice(say, folder: Path) -> str:
    seen, found = [], []

    def noting(rows):
        seen.append(rows)
        return collate(rows)

    run = trainer(folder, Tiny(Noted()), collator=noting, max_steps=-1, num_train_epochs=1)
    for _ in range(2):
        run.train()
        own = {"kept": run.model.middle.kept[:2], "rows": [*seen]}
        everyone = [None, None]
        dist.all_gather_object(everyone, own)
        found.append(everyone)
        seen.clear()
        run.model.middle.kept.clear()
    return json.dumps(found)


def test_processes_draw_other_dropout_and_the_same_order(tmp_path):
    found = json.loads(Run("ddp", tmp_path / "run.log", partial(train_twice, folder=tmp_path / "out")).result())
    for first, second in found:
        assert len(first["kept"]) == 2 and first["kept"][0] != first["kept"][1]
        assert {0.0, 2.0} == set(first["kept"][0]) and first["kept"] != second["kept"]
        assert sorted(row for of in (first, second) for rows in of["rows"] for row in rows) == list(range(32))

r"""Whole training runs drawn at random, each compared with a naive reference.

    python tests/parity/fuzz.py --draws 300 --seed 7          # 300 runs; prints the line that repeats a failing one
    python tests/parity/fuzz.py --seed 7 --only 41            # that one again

(1) a draw says everything about a run: rows and the files that hold them, columns and their features, batch, chunks,
    sampler, processes, strategy, where the run is saved and with how many processes it is resumed
(2) `train` runs it with DistTrainer in forked processes that talk over gloo. Every rank records the rows that it was
    given for each update; rank 0 records gradients, losses, metrics and the weights at the end
(3) `judge` compares the records with naive lines: one model in one process, the plain loss of every global batch, and
    what an epoch has to hold. The resumed run is compared with the uninterrupted one too

Everything runs in float64, so a difference that is not rounding is a fault. Where forward or loss draw random numbers
the reference is the same run with every graph kept, which draws the same. Resumed by as many processes, a run ends
with the weights of the uninterrupted one bit for bit, but for automatic chunks and DDP of more than two processes; one
of the two may evaluate between its steps.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import os
import random
import sys
import traceback
from collections import Counter
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import datasets
import numpy as np
import torch
from datasets import Dataset
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils.data import Sampler
from transformers import AutoConfig, AutoModel, TrainerCallback
from transformers.trainer_utils import SaveStrategy

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


from hf_dist_ext import launched  # noqa: E402
from hf_dist_ext.data import order as epoch_order
from hf_dist_ext.data.collator import content_id  # noqa: E402
from hf_dist_ext.data.load import load_datasets
from hf_dist_ext.data.mixture import MixedStream, Mixture, Tagged, tagged_stream
from hf_dist_ext.data.order import StandIn  # noqa: E402
from hf_dist_ext.data.sentence_collator import ContrastiveCollator  # noqa: E402
from hf_dist_ext.engine import chunks
from hf_dist_ext.engine.losses import InfoNCELoss  # noqa: E402
from hf_dist_ext.run.config import RunConfig
from hf_dist_ext.strategies.collectives import rank  # noqa: E402
from hf_dist_ext.training import metrics  # noqa: E402
from hf_dist_ext.training.arguments import DistTrainingArguments  # noqa: E402
from hf_dist_ext.training.metrics import TIE_TOLERANCE  # noqa: E402
from hf_dist_ext.training.trainer import DistTrainer  # noqa: E402
from tests.distributed.forked import Run  # noqa: E402
from tests.tiny_models import SPECIAL, WORDS, around, embed, tiny_tokenizer

LAYERS = 4  # with four or more, the pass without a graph may use wider chunks
GRADIENT_TOLERANCE = 1e-10
LENGTHS = {"query": 6, "positive": 20, "negative": 12, "other": 9}  # words of the longest text
VALUES = 5  # numbers per row of a column that holds no text
TEMPERATURE = 0.1
ADAM_EPSILON = 1e-4  # with 1e-8, what is zero but for rounding takes a step too, and so rounding grows
EVALUATION_BATCH = 4  # per process
# A file or folder of rows, and a file beside it, which the name would mean as a pattern or as a kind of files.
NEIGHBOURS = {
    "pairs.jsonl": "pairs1.jsonl",
    "pairs[1].jsonl": "pairs1.jsonl",
    "pairs*.jsonl": "pairs1.jsonl",
    "json": "others/rows.jsonl",
}


# ---- (1) ----


@dataclass(frozen=True)
class Draw:
    """One run. `negatives` is the least and the largest number of hard negatives of a row; `kinds` says per column
    which features its rows have: "text", "types" (text with token_type_ids, which a decoder does not read) or "values"
    (a vector). `repeats` is the share of texts that repeat an earlier one. `noise` is added to embeddings, drawn by
    numpy and by `random`. `names` are those of the files that hold the rows, one for each source of a mixture; none:
    they are in memory. `held_out` rows of each file are for evaluation."""

    rows: int
    kinds: dict[str, str]
    negatives: tuple[int, int]
    repeats: float
    backbone: str  # "bert" (padding on the right) or "llama" (on the left, last token)
    batch: int  # per process
    accumulation: int
    epochs: int
    sampler: str  # "no_duplicates", "random", "sequential", "by length", "own"
    workers: int
    chunk: dict
    loss: dict
    dropout: float
    optimizer: str
    max_grad_norm: float
    mode: str  # "single", "ddp", "fsdp-full", "fsdp-sharded"
    processes: int
    resumed_processes: int
    evaluation_rows: int
    save_at: float  # where in the run it is saved, as a share of its updates
    seed: int
    noise: float = 0.0
    loss_dropout: float = 0.0
    model_init: str = ""  # "new", "again" (it has trained before) or "other" (its first model had another attention)
    sources: int = 1
    names: tuple[str, ...] = ()
    is_stream: bool = False
    held_out: int = 0
    evaluating: str = ""  # "whole" or "resumed": the run that evaluates between its steps

    @property
    def is_random(self) -> bool:
        return bool(self.dropout or self.noise or self.loss_dropout)

    @property
    def updates_per_epoch(self) -> int:
        return math.ceil(math.ceil(self.rows / (self.batch * self.processes)) / self.accumulation)

    @property
    def has_epochs(self) -> bool:
        """Of all rows, each once; else the number of updates is given, and every source is read again and again."""
        return not self.names and self.sources == 1


def drawn(seed: int, number: int) -> Draw:
    r = random.Random(f"{seed}/{number}")
    columns = ["query", "positive", *["negative", "other"][: r.choice([0, 0, 1, 1, 2])]]
    kinds = {name: r.choice(["text", "text", "text", "types", "values"]) for name in columns}
    if all(kind == "values" for kind in kinds.values()):
        kinds["query"] = "text"  # the text encoder must train
    processes = r.choice([1, 1, 2, 2, 2, 3])
    mode = "single" if processes == 1 else r.choice(["ddp", "ddp", "fsdp-full", "fsdp-sharded"])
    others = [1, 2, 3] if mode in ("single", "ddp") else [2, 3]
    batch = r.randint(2, 6)
    dropout = r.choice([0.0, 0.0, 0.0, 0.2])
    chunk = r.choice(
        [
            {"gradient_cache_chunk_size": None},
            {"gradient_cache_chunk_size": r.randint(1, 4)},
            {"gradient_cache_chunk_size": r.randint(1, 2), "gradient_cache_fsdp": "memory"},
            {"gradient_cache_chunk_tokens": r.choice([24, 48, 100])},
            {"gradient_cache_chunk_size": r.randint(1, 3), "gradient_cache_keep_graph": r.choice([1, 2, 99, "auto"])},
            {"gradient_cache_chunk_size": "auto", "gradient_cache_memory_gib": 1e-3},
            {"gradient_cache_chunk_size": r.randint(1, 4), "gradient_cache_sort": False},
        ]
    )
    if dropout:
        chunk = given_chunk(r)
    loss = {}
    if r.random() < 0.4:
        loss["learnable_temperature"] = True
    if r.random() < 0.3:
        loss["symmetric"] = True
    if r.random() < 0.2:
        loss["mask_false_negatives"] = False
    draw = Draw(
        rows=r.randint(3 * batch * processes, 3 * batch * processes + 13),
        kinds=kinds,
        negatives=r.choice([(1, 1), (1, 3), (1, 3)]),
        repeats=r.choice([0.0, 0.2, 0.5]),
        backbone=r.choice(["bert", "bert", "llama"]),
        batch=batch,
        accumulation=r.choice([1, 1, 2, 3]),
        epochs=r.choice([2, 3]),
        sampler=r.choice(["no_duplicates", "no_duplicates", "random", "sequential"]),
        workers=r.choice([0, 0, 0, 1]),
        chunk=chunk,
        loss=loss,
        dropout=dropout,
        optimizer=r.choice(["sgd", "adamw_torch"]),
        max_grad_norm=r.choice([0.0, 0.05]),
        mode=mode,
        processes=processes,
        resumed_processes=r.choice([processes, processes, r.choice(others)]),
        evaluation_rows=r.choice([24, 24, 21]),  # 24 are whole batches on 1, 2 and 3 processes
        save_at=r.random(),
        seed=r.randrange(1000),
    )
    return with_more(draw, random.Random(f"{seed}/{number}/more"))


def given_chunk(r: random.Random) -> dict:
    """The reference of a run that draws random numbers must cut the batch as the run does."""
    return {"gradient_cache_chunk_size": r.randint(1, 4), "gradient_cache_keep_graph": r.choice([0, 0, 2])}


def with_more(draw: Draw, r: random.Random) -> Draw:
    more = {
        "noise": r.choice([0.0] * 5 + [0.1]),
        "loss_dropout": r.choice([0.0] * 5 + [0.2]),
        "model_init": r.choice(["", "", "", "new", "again", "other"]),
        "sources": r.choice([1, 1, 1, 2]),
        "is_stream": r.choice([False, True]),
        "held_out": r.choice([0, 3, 6]),
        "evaluating": r.choice(["", "whole", "resumed"]),
    }
    files = r.sample(list(NEIGHBOURS), more["sources"])
    more["names"] = tuple(f"{number}/{name}" for number, name in enumerate(files)) if r.random() < 0.35 else ()
    if not more["names"]:
        more |= {"is_stream": False, "held_out": 0}
    if more["noise"] or more["loss_dropout"]:
        more["chunk"] = given_chunk(r)
    drawn = replace(draw, **more)
    if not drawn.has_epochs:
        window = draw.batch * max(draw.processes, draw.resumed_processes)  # of which a source has one at least
        more["rows"] = drawn.sources * (2 * window + drawn.held_out + r.randrange(5))
        more["sampler"] = r.choice(["no_duplicates", "random"])
    elif r.random() < 0.4:
        more["sampler"] = r.choice(["by length", "own"])
    return replace(drawn, **more)


def make_rows(draw: Draw, count: int, salt: int) -> list[dict]:
    r = random.Random(f"{draw.seed}/{salt}")
    known: dict[str, list[str]] = {name: [] for name in draw.kinds}

    def text(column: str) -> str:
        if known[column] and r.random() < draw.repeats:
            return r.choice(known[column])
        known[column].append(" ".join(r.choice(WORDS) for _ in range(r.randint(1, LENGTHS[column]))))
        return known[column][-1]

    rows, of_pair = [], {}
    while len(rows) < count:
        source, row = min(len(rows) // (count // draw.sources), draw.sources - 1), {}
        for index, column in enumerate(draw.kinds):
            row[column] = text(column) if index < 2 else [text(column) for _ in range(r.randint(*draw.negatives))]
        of_source, first = of_pair.setdefault((row["query"], row["positive"]), (source, row))
        if of_source == source:  # a pair is of one source, and its rows have the same negatives
            rows.append(first | {"row": len(rows), "length": len(first["query"].split())})
    return rows


def of_sources(draw: Draw, rows: list) -> list[list]:
    size = len(rows) // draw.sources
    return [rows[i * size : (i + 1) * size if i + 1 < draw.sources else None] for i in range(draw.sources)]


def write_files(draw: Draw, folder: Path) -> None:
    for name, rows in zip(draw.names, of_sources(draw, make_rows(draw, draw.rows, salt=0)), strict=bool(draw.names)):
        path = folder / name
        neighbour = path.parent / NEIGHBOURS[path.name]
        is_folder = not path.suffix
        files = {path: rows} if not is_folder else {path / "a.jsonl": rows[::2], path / "b.jsonl": rows[1::2]}
        for file, of_file in (files | {neighbour: make_rows(draw, 9, salt=2)}).items():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(json.dumps(row) + "\n" for row in of_file))


def load_rows(draw: Draw, folder: Path) -> tuple[object, list[dict]]:
    """What a run trains on, and the rows that are held out."""
    held, sources = [], {}
    for number, rows in enumerate(of_sources(draw, make_rows(draw, draw.rows, salt=0))):
        sources[f"source{number}"] = Dataset.from_list(rows)
        if draw.names:
            path = folder / draw.names[number]
            os.chdir(path.parent)
            columns, held_out = {name: name for name in draw.kinds}, draw.held_out or None
            run = RunConfig(dataset_name=path.name, columns=columns, streaming=draw.is_stream, eval_holdout=held_out)
            sources[f"source{number}"], evaluation = load_datasets(run, seed=draw.seed)
            held += [dict(row) for row in evaluation or ()]
    if draw.sources == 1:
        return sources["source0"], held
    if draw.is_stream:
        sources = {name: tagged_stream(name, one) for name, one in sources.items()}
    return (MixedStream if draw.is_stream else Mixture)(sources, [0.6, 0.4]), held


def numbers_by_pair(draw: Draw) -> dict[tuple[str, str], int]:
    """Of rows that were read from files: the first with this query and positive."""
    rows = make_rows(draw, draw.rows, salt=0)
    return {(row["query"], row["positive"]): row["row"] for row in reversed(rows)}


def numbers_of(text: str) -> torch.Tensor:
    """(VALUES,): what a row of a "values" column holds instead of its text."""
    r = random.Random(text)
    return torch.tensor([r.uniform(-1, 1) for _ in range(VALUES)], dtype=torch.float64)


class Collator(ContrastiveCollator):
    """Columns that differ in their features; the rows' numbers travel with the batch."""

    def __init__(self, draw: Draw):
        super().__init__(tiny_tokenizer("right" if draw.backbone == "bert" else "left"), list(draw.kinds))
        self.kinds = draw.kinds

    def _preprocessed(self, column: str, place: int, values: list[str], draws: None = None) -> tuple[dict, dict]:
        if self.kinds[column] == "values":
            return {"values": torch.stack([numbers_of(text) for text in values])}, {}
        features, constants = super()._preprocessed(column, place, values, draws)
        features.pop("token_type_ids", None)
        if self.kinds[column] == "types":
            features["token_type_ids"] = features["input_ids"] % 2 * features["attention_mask"]
        return features, constants

    def __call__(self, rows: list[dict]) -> dict:
        batch = super().__call__(rows)
        if "row" in rows[0]:
            batch["ids"]["row"] = torch.tensor([row["row"] for row in rows])
        return batch


def build_backbone(draw: Draw, attention: str) -> nn.Module:
    size = {
        "model_type": draw.backbone, "vocab_size": len(SPECIAL) + len(set(WORDS)), "hidden_size": 16,
        "intermediate_size": 24, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "max_position_embeddings": 32,
    }  # fmt: skip
    if draw.backbone == "bert":
        size |= {"hidden_dropout_prob": draw.dropout, "attention_probs_dropout_prob": draw.dropout}
    else:
        size |= {"num_key_value_heads": 1, "attention_dropout": draw.dropout}
    pooler = {"add_pooling_layer": False} if draw.backbone == "bert" else {}
    model = AutoModel.from_config(AutoConfig.for_model(**size), attn_implementation=attention, **pooler)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if "RMSNorm" in type(child).__name__:  # transformers' own computes in float32, whatever its input
                setattr(module, name, nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon))
    return model


class Model(nn.Module):
    """A text encoder for rows with tokens, a small one for rows of numbers."""

    accepts_loss_kwargs = False

    def __init__(self, draw: Draw, attention: str = "sdpa"):
        super().__init__()
        self.noise = draw.noise
        self.text = around(build_backbone(draw, attention), pooling="mean" if draw.backbone == "bert" else "last")
        self.numbers = nn.Sequential(nn.Linear(VALUES, 24), nn.Tanh(), nn.Dropout(draw.dropout), nn.Linear(24, 16))
        self.config = self.text.config

    def forward(self, values: torch.Tensor | None = None, **features: torch.Tensor) -> torch.Tensor:
        embeddings = embed(self.text, **features) if values is None else self.numbers(values)
        if self.noise and self.training:
            drawn = np.random.standard_normal(embeddings.shape) + random.random()
            embeddings = embeddings + self.noise * torch.from_numpy(drawn)
        return embeddings


class Loss(InfoNCELoss):
    """With dropout of the anchors."""

    def __init__(self, dropout: float, **options):
        super().__init__(**options)
        self.dropout = nn.Dropout(dropout)

    def forward(self, own, everyone=None, row_offset=0, ids=None):
        anchor = next(iter(own))
        return super().forward(dict(own) | {anchor: self.dropout(own[anchor])}, everyone or own, row_offset, ids)


def make_model(draw: Draw, attention: str = "sdpa") -> tuple[Model, InfoNCELoss]:
    torch.manual_seed(draw.seed)
    model = Model(draw, attention).double().train()
    if "values" not in draw.kinds.values():
        del model.numbers  # what no column reaches has no gradient
    loss = partial(Loss, draw.loss_dropout) if draw.loss_dropout else InfoNCELoss
    return model, loss(temperature=TEMPERATURE, **draw.loss).double()


# ---- (2) ----


class Recorder(TrainerCallback):
    """Gradients as the optimizer gets them, whole on every rank."""

    def __init__(self, loss: nn.Module):
        self.loss, self.gradients = loss, []

    def on_pre_optimizer_step(self, args, state, control, model=None, **others):
        found = [p.grad for p in [*model.parameters(), *self.loss.parameters()]]
        assert all(g is not None for g in found), "a trainable parameter has no gradient"
        self.gradients.append(whole(found))


def whole(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies; those of which every rank holds some rows are gathered, all in one message."""
    here = [t.detach().to_local() if isinstance(t, DTensor) else t.detach().clone() for t in tensors]
    if not any(isinstance(t, DTensor) for t in tensors):
        return here
    assert all(t.placements == (Shard(0),) for t in tensors if isinstance(t, DTensor))
    of_ranks: list[list[torch.Tensor]] = [[]] * launched.processes()
    torch.distributed.all_gather_object(of_ranks, here)
    return [
        torch.cat(parts) if isinstance(tensor, DTensor) else parts[0]
        for tensor, *parts in zip(tensors, *of_ranks, strict=True)
    ]


class OwnOrder(Sampler[int]):
    """As users write it: its order follows from `set_epoch`, or from numpy's global generator."""

    def __init__(self, draw: Draw):
        self.rows, self.is_global, self.epoch = draw.rows, draw.seed % 2, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.rows

    def __iter__(self):
        order = np.random if self.is_global else np.random.default_rng(self.epoch)
        return iter(order.permutation(self.rows).tolist())


class Recording(DistTrainer):
    """A DistTrainer that notes which rows it was given, per micro-batch, and their loss."""

    def _get_train_sampler(self, dataset=None):
        return self.own_order or super()._get_train_sampler(dataset)

    def training_step(self, model, inputs, num_items_in_batch=None):
        rows = []
        if not isinstance(inputs, StandIn):  # a rank may have none in the last batch of an epoch
            query, positive, row = (inputs["ids"].get(name) for name in ("query", "positive", "row"))
            pairs = zip(query.tolist(), positive.tolist(), strict=True)
            rows = [self.numbers.get(pair, -1) for pair in pairs] if self.numbers else row.tolist()
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.seen.append((self.state.global_step, rows, float(loss) * self.current_gradient_accumulation_steps))
        return loss


def train(say, draw: Draw, folder: Path, name: str, accumulation: int, batch: int, resume=None, **more) -> str:
    """What every process of a run does; its record is folder/name.RANK."""
    datasets.config.HF_DATASETS_CACHE = folder / "cache"
    model, loss = make_model(draw)
    recorder, collator = Recorder(loss), Collator(draw)
    rows, held = load_rows(draw, folder)
    evaluation = Dataset.from_list(make_rows(draw, draw.evaluation_rows, salt=1))
    attention = itertools.chain(["sdpa"], itertools.repeat("eager" if draw.backbone == "bert" else "sdpa"))
    made = {"model_init": lambda: make_model(draw, next(attention) if draw.model_init == "other" else "sdpa")[0]}
    if draw.sources > 1:
        evaluation = Tagged("source0", evaluation)
    arguments = {
        "gradient_cache_chunk_size": None, "per_device_train_batch_size": batch, "max_grad_norm": draw.max_grad_norm,
        "gradient_accumulation_steps": accumulation, "num_train_epochs": draw.epochs, "optim": draw.optimizer,
        "train_sampling_strategy": {"sequential": "sequential", "by length": "group_by_length"}.get(
            draw.sampler, "random"
        ),
        "no_duplicates_in_batch": None if draw.sampler in ("no_duplicates", "sequential") else False,
        "dataloader_num_workers": draw.workers, "save_strategy": "no",
    }  # fmt: skip
    if not draw.has_epochs:
        arguments["max_steps"] = draw.epochs * draw.updates_per_epoch
    if draw.evaluating == name:
        arguments |= {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True}
    args = DistTrainingArguments(
        output_dir=str(folder / name), learning_rate=0.05 if draw.optimizer == "sgd" else 1e-3, report_to=[],
        lr_scheduler_type="constant", logging_strategy="no", disable_tqdm=True, use_cpu=True, seed=draw.seed,
        per_device_eval_batch_size=EVALUATION_BATCH, adam_epsilon=ADAM_EPSILON, **arguments | draw.chunk | more,
    )  # fmt: skip
    trainer = Recording(
        None if draw.model_init else model,
        args,
        data_collator=collator,
        train_dataset=rows,
        eval_dataset=evaluation,
        loss=loss,
        callbacks=[recorder],
        **made if draw.model_init else {},
    )
    known = numbers_by_pair(draw)
    ids = {(content_id(query), content_id(positive)): number for (query, positive), number in known.items()}
    trainer.seen, trainer.numbers = [], ids if draw.names else {}
    trainer.own_order = OwnOrder(draw) if draw.sampler == "own" else None
    if draw.model_init == "again" and resume is None:
        asked = args.max_steps, args.save_strategy
        args.max_steps, args.save_strategy = 2, SaveStrategy.NO
        trainer.train()
        args.max_steps, args.save_strategy = asked
        trainer.seen.clear(), recorder.gradients.clear()
    trainer.train(resume_from_checkpoint=resume)
    metrics = trainer.evaluate()
    record = {
        "seen": trainer.seen,
        "steps": trainer.state.global_step,
        "gradients": recorder.gradients,
        "metrics": {key: value for key, value in metrics.items() if "@" in key or key == "eval_loss"},
        "weights": whole([*trainer.model.parameters(), *loss.parameters()]),
        "accumulation": args.gradient_accumulation_steps,
        "held": [known.get((row["query"], row["positive"]), -1) for row in held],
    }
    torch.save(record if rank() == 0 else {"seen": trainer.seen}, folder / f"{name}.{rank()}")
    if launched.processes() > 1:
        torch.distributed.barrier()
    return str(trainer.state.global_step)


@dataclass
class Record:
    """Of all ranks: `updates` holds per optimizer step its micro-batches, each a list of rows per rank."""

    updates: list[list[list[list[int]]]]
    losses: list[list[float]]
    gradients: list[list[torch.Tensor]]
    metrics: dict[str, float]
    weights: list[torch.Tensor]
    held: list[int]


def run(draw: Draw, folder: Path, name: str, mode: str, processes: int, **options) -> Record:
    Run(
        f"{mode}@{processes}", folder / f"{name}.log", partial(train, draw=draw, folder=folder, name=name, **options)
    ).result()
    ranks = [torch.load(folder / f"{name}.{i}", weights_only=False) for i in range(processes)]
    seen = [
        [list(group) for _, group in itertools.groupby(found["seen"], key=lambda call: call[0])] for found in ranks
    ]
    updates, losses = [], []
    for of_ranks in itertools.zip_longest(*seen, fillvalue=[]):
        calls = list(itertools.zip_longest(*of_ranks, fillvalue=(0, [], 0.0)))
        updates.append([[rows for _, rows, _ in call] for call in calls])
        losses.append([sum(loss for _, _, loss in call) / processes for call in calls])
    return Record(updates, losses, *(ranks[0][key] for key in ("gradients", "metrics", "weights", "held")))


# ---- (3) ----


class Fault(AssertionError):
    pass


def check(is_so: bool, what: str) -> None:
    if not is_so:
        raise Fault(what)


class Naive:
    """The same training in plain lines: one process, the whole global batch, autograd through the whole loss."""

    def __init__(self, draw: Draw, processes: int):
        self.draw, self.collate, self.evaluation_batch = draw, Collator(draw), EVALUATION_BATCH * processes
        self.rows = make_rows(draw, draw.rows, salt=0)
        self.model, self.loss = make_model(draw)
        self.parameters = [*self.model.parameters(), *self.loss.parameters()]
        rate = 0.05 if draw.optimizer == "sgd" else 1e-3
        kind = partial(torch.optim.AdamW, weight_decay=0.0, eps=ADAM_EPSILON)
        kind = torch.optim.SGD if draw.optimizer == "sgd" else kind
        self.optimizer = kind(self.parameters, lr=rate)

    def encode(self, column: str, texts: list[str]) -> torch.Tensor:
        return nn.functional.normalize(self.model(**self.collate.features(column, texts)), dim=-1)

    def batch_loss(self, ranks: list[list[dict]]) -> torch.Tensor:
        """Of a global batch. Each rank's rows are padded by themselves: a decoder's rotary angles are float32, and
        padding on the left shifts them."""
        columns, rows = list(self.draw.kinds), [row for of_rank in ranks for row in of_rank]
        temperature = TEMPERATURE
        if self.loss.log_inverse_temperature is not None:
            temperature = torch.exp(-self.loss.log_inverse_temperature)
        texts, embeddings = {}, []
        for index, name in enumerate(columns):
            parts = [
                [text for row in of_rank for text in ([row[name]] if index < 2 else row[name])] for of_rank in ranks
            ]
            texts[name] = [text for part in parts for text in part]
            embeddings.append(torch.cat([self.encode(name, part) for part in parts if part]))
        query, positive, *negatives = embeddings
        masks = self.draw.loss.get("mask_false_negatives", True)
        queries, positives = texts["query"], texts["positive"]
        hides = torch.tensor(
            [
                [
                    masks and i != j and (positives[i] == positives[j] or queries[i] == queries[j])
                    for j in range(len(rows))
                ]
                for i in range(len(rows))
            ]
        )
        scores = [(query @ positive.T / temperature).masked_fill(hides, -math.inf)]
        for name, candidates in zip(columns[2:], negatives, strict=True):
            hidden = torch.tensor([[masks and positives[i] == text for text in texts[name]] for i in range(len(rows))])
            scores.append((query @ candidates.T / temperature).masked_fill(hidden, -math.inf))
        labels = torch.arange(len(rows))
        loss = nn.functional.cross_entropy(torch.cat(scores, dim=1), labels)
        if self.draw.loss.get("symmetric"):
            loss = (loss + nn.functional.cross_entropy(scores[0].T, labels)) / 2
        return loss

    def update(self, micro_batches: list[list[list[int]]]) -> tuple[list[float], list[torch.Tensor]]:
        self.optimizer.zero_grad()
        losses = []
        for ranks in micro_batches:
            loss = self.batch_loss([[self.rows[row] for row in rows] for rows in ranks])
            (loss / len(micro_batches)).backward()
            losses.append(loss.item())
        if self.draw.max_grad_norm:
            nn.utils.clip_grad_norm_(self.parameters, self.draw.max_grad_norm)
        gradients = [p.grad.clone() for p in self.parameters]
        self.optimizer.step()
        return losses, gradients

    def metrics(self) -> dict[str, float]:
        """Every distinct query against the distinct documents; those of all rows with its text are right."""
        rows = make_rows(self.draw, self.draw.evaluation_rows, salt=1)
        right: dict[str, set[str]] = {}
        for row in rows:
            right.setdefault(row["query"], set()).add(row["positive"])
        documents = list(dict.fromkeys(row["positive"] for row in rows))
        size = self.evaluation_batch
        self.model.eval()
        with torch.no_grad():
            all_scores = (self.encode("query", list(right)) @ self.encode("positive", documents).T).tolist()
            losses = [self.batch_loss([rows[i : i + size]]) for i in range(0, len(rows), size)]
        self.model.train()
        of_queries = []
        for wanted, scores in zip(right.values(), all_scores, strict=True):
            # A wrong document that scores as high as a right one stands before it.
            order = sorted(range(len(documents)), key=lambda i: TIE_TOLERANCE * (documents[i] in wanted) - scores[i])
            of_queries.append([place for place, i in enumerate(order) if documents[i] in wanted])
        found = {
            "eval_mrr@10": mean(1 / (ranks[0] + 1) if ranks[0] < 10 else 0.0 for ranks in of_queries),
            "eval_ndcg@10": mean(
                gain(r for r in ranks if r < 10) / gain(range(min(10, len(ranks)))) for ranks in of_queries
            ),
            "eval_recall@1": mean(float(ranks[0] < 1) for ranks in of_queries),
            "eval_recall@10": mean(float(ranks[0] < 10) for ranks in of_queries),
        }
        # Else ranks fill the last batch up; and Trainer groups the rows of an evaluation by length too.
        if len(rows) % size == 0 and self.draw.sampler != "by length":
            found["eval_loss"] = mean(loss.item() for loss in losses)
        return found


def gain(ranks) -> float:
    return sum(1 / math.log2(rank + 2) for rank in ranks)


def mean(values) -> float:
    values = list(values)
    return sum(values) / len(values)


def distance(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """Norm of the difference over the norm of what is wanted; a batch of one pair has a gradient of zeros."""
    found, wanted = (torch.cat([t.flatten() for t in tensors]) for tensors in (found, wanted))
    return float((found - wanted).norm() / (wanted.norm() or 1.0))


def check_updates(name: str, record: Record, naive: Naive, updates: slice) -> None:
    """Losses and gradients of these updates of a record; the naive run goes on with each."""
    for number in range(*updates.indices(len(record.updates))):
        losses, gradients = naive.update(record.updates[number])
        error = distance(record.gradients[number], gradients)
        check(error < GRADIENT_TOLERANCE, f"{name}: gradient of update {number + 1} is off by {error:.1e}")
        for found, wanted in zip(record.losses[number], losses, strict=True):
            check(abs(found - wanted) < 1e-8, f"{name}: update {number + 1} has the loss {found}, plain {wanted}")


def rows_in_order(updates: list) -> list[list[int]]:
    """Per global micro-batch its rows."""
    return [[row for rows in ranks for row in rows] for update in updates for ranks in update]


def check_epochs(name: str, draw: Draw, updates: list, begun: list[int]) -> None:
    """Behind the rows of an epoch that were `begun`, every epoch holds each row once, and none more than is asked."""
    epoch, expected = list(begun), set(range(draw.rows))
    done = 0
    for rows in rows_in_order(updates):
        epoch += rows
        repeated = [row for row, count in Counter(epoch).items() if count > 1]
        check(not repeated, f"{name}: rows {sorted(repeated)} come twice within an epoch")
        if len(epoch) == draw.rows:
            check(set(epoch) == expected, f"{name}: rows are missing in an epoch")
            epoch, done = [], done + 1
    check(not epoch, f"{name}: the last epoch ends after {len(epoch)} of {draw.rows} rows")


def check_passes(name: str, draw: Draw, updates: list, held: list[int]) -> None:
    """Every source is read again and again: no row for the next time before all that are not held out had their turn.

    Rows that are equal can not be told apart. A mixture puts an epoch of a source, in which some rows may come for the
    next time, into an order without duplicates in a batch.
    """
    early = draw.sources > 1 and draw.sampler == "no_duplicates" and not draw.is_stream
    rows, known = make_rows(draw, draw.rows, salt=0), numbers_by_pair(draw)
    pair = lambda row: (row["query"], row["positive"])  # noqa: E731
    held_out = {pair(rows[number]) for number in held}
    check(-1 not in held and len(held) <= draw.held_out * draw.sources, f"{name}: {held} are held out")
    source_of = {row["row"]: i for i, part in enumerate(of_sources(draw, rows)) for row in part}
    of_batches = [{source_of.get(row, row) for row in batch} for batch in rows_in_order(updates)]
    check(all(len(one) == 1 for one in of_batches), f"{name}: a batch has rows of the sources {of_batches}")
    seen = Counter(row for batch in rows_in_order(updates) for row in batch)
    check(-1 not in seen, f"{name}: {seen.get(-1)} rows are none of this run")
    check(bool(held) == bool(draw.held_out), f"{name}: the rows {held} are held out, not {draw.held_out}")
    for part in of_sources(draw, rows):
        named = [row for row in part if pair(row) not in held_out]
        counts = Counter(known[pair(row)] if draw.names else row["row"] for row in named)
        passes = sum(seen[row["row"]] for row in part) // len(named)
        for row, count in counts.items():
            is_even = (passes - early) * count <= seen[row] <= (passes + 1 + early) * count
            check(is_even, f"{name}: row {row} came {seen[row]} times in {passes} passes over {len(named)} rows")
        left_out = {row["row"] for row in part} - counts.keys()
        check(left_out.isdisjoint(seen), f"{name}: held-out rows are trained on: {left_out & seen.keys()}")


def check_order(draw: Draw, updates: list) -> None:
    """What each sampler promises of global micro-batches."""
    for number, rows in enumerate(rows_in_order(updates)):
        if draw.sampler == "sequential":
            size = draw.batch * draw.processes
            begin = number % math.ceil(draw.rows / size) * size
            wanted = list(range(begin, min(begin + size, draw.rows)))
            check(sorted(rows) == wanted, f"global batch {number + 1} holds rows {rows}, wanted {wanted}")


def judge(say, draw: Draw, whole_run: Record, saved_at: int, resumed: Record, reference: Record | None) -> str:
    per_epoch = draw.updates_per_epoch
    check(
        len(whole_run.updates) == draw.epochs * per_epoch,
        f"{len(whole_run.updates)} updates instead of {draw.epochs} epochs of {per_epoch}",
    )
    before, after = whole_run.updates[:saved_at], whole_run.updates[saved_at:]
    if draw.has_epochs:
        check_epochs("uninterrupted", draw, whole_run.updates, begun=[])
        check_order(draw, whole_run.updates)
        in_epoch = rows_in_order(before[saved_at // per_epoch * per_epoch :])
        check_epochs("resumed", draw, resumed.updates, begun=[row for rows in in_epoch for row in rows])
    else:
        check_passes("uninterrupted", draw, whole_run.updates, whole_run.held)
        check_passes("resumed", draw, before + resumed.updates, resumed.held)

    naive = Naive(draw, draw.processes)
    is_same = draw.resumed_processes == draw.processes
    if is_same:
        for number, (found, wanted) in enumerate(zip(resumed.updates, after, strict=True)):
            check(found == wanted, f"resumed: update {saved_at + number + 1} has rows {found}, uninterrupted {wanted}")
        is_equal = all(map(torch.equal, resumed.weights, whole_run.weights))
        error = distance(resumed.weights, whole_run.weights)
        if "auto" in draw.chunk.values() or draw.mode == "ddp" and draw.processes > 2:
            # Sizes that were not settled when the run was saved are measured again. DDP's first step has other buckets
            # than its later ones, and gloo adds up in another order.
            is_equal = error < GRADIENT_TOLERANCE
        check(is_equal, f"resumed: the weights are off by {error:.1e} from those of the uninterrupted run")
    check(any(g.any() for of_update in whole_run.gradients for g in of_update), "zeros prove nothing")
    if reference is None:
        check_updates("uninterrupted", whole_run, naive, slice(0, saved_at))
        branch = copy.deepcopy(naive)
        branch.evaluation_batch = EVALUATION_BATCH * draw.resumed_processes
        check_updates("uninterrupted", whole_run, naive, slice(saved_at, None))
        check_updates("resumed", resumed, branch, slice(0, None))
        for name, record, plain in (("uninterrupted", whole_run, naive), ("resumed", resumed, branch)):
            error = distance(record.weights, [p.detach() for p in plain.parameters])
            check(error < GRADIENT_TOLERANCE, f"{name}: the weights at the end are off by {error:.1e}")
            check_metrics(name, record.metrics, plain.metrics())
        return "fine"
    check(reference.updates == whole_run.updates, "with every graph kept the rows are others")
    for number, (found, wanted) in enumerate(zip(whole_run.gradients, reference.gradients, strict=True)):
        error = distance(found, wanted)
        check(error < GRADIENT_TOLERANCE, f"random: gradient of update {number + 1} is off by {error:.1e}")
    for name, record in (("uninterrupted", whole_run), ("resumed", resumed)):
        with torch.no_grad():
            for parameter, value in zip(naive.parameters, record.weights, strict=True):
                parameter.copy_(value)
        naive.evaluation_batch = EVALUATION_BATCH * (draw.processes if record is whole_run else draw.resumed_processes)
        check_metrics(name, record.metrics, naive.metrics())
    return "fine"


def check_metrics(name: str, found: dict[str, float], wanted: dict[str, float]) -> None:
    for key, value in wanted.items():
        check(
            key in found and abs(found[key] - value) < 1e-6,
            f"{name}: {key} is {found.get(key)}, over documents {value}",
        )


def run_draw(draw: Draw, folder: Path) -> None:
    """Raises what went wrong."""
    updates = draw.epochs * draw.updates_per_epoch
    saved_at = min(updates - 1, 1 + int(draw.save_at * (updates - 1)))
    options = {"accumulation": draw.accumulation, "batch": draw.batch}
    saving = {"save_strategy": "steps", "save_steps": saved_at, "save_total_limit": None}
    write_files(draw, folder)
    whole_run = run(draw, folder, "whole", draw.mode, draw.processes, **options, **saving)
    reference = None
    if draw.is_random:
        reference = run(draw, folder, "kept", draw.mode, draw.processes, **options, gradient_cache_keep_graph=999)
    mode = draw.mode
    if mode in ("single", "ddp"):
        mode = "single" if draw.resumed_processes == 1 else "ddp"
    checkpoint = str(folder / "whole" / f"checkpoint-{saved_at}")
    resumed = run(draw, folder, "resumed", mode, draw.resumed_processes, **options, resume=checkpoint)
    # In a process of its own: what has run autograd should not be forked.
    target = partial(judge, draw=draw, whole_run=whole_run, saved_at=saved_at, resumed=resumed, reference=reference)
    Run("single", folder / "judge.log", target).result()


# ---- faults that were in the package once: what looks for faults has to find them ----


def columns_by_kind() -> None:
    """Columns whose features are of one kind stand together, so a hard negative may be taken for the positive."""
    chunks.ChunkedBatch.row_counts = lambda batch: {
        name: rows for table in batch.tables for name, rows in zip(table.columns, table.row_counts, strict=True)
    }


def first_epoch_again() -> None:
    """Where several processes resume, the epoch's number does not reach the order before its first use."""
    tell, draw_order = epoch_order.EpochBatches.set_epoch, epoch_order.EpochBatches.__iter__

    def set_epoch(self, epoch: int) -> None:
        if self.num_processes == 1 or getattr(self, "was_used", False):
            tell(self, epoch)

    def iterate(self):
        self.was_used = True
        return draw_order(self)

    epoch_order.EpochBatches.set_epoch, epoch_order.EpochBatches.__iter__ = set_epoch, iterate


def documents_of_rows() -> None:
    """A document that several rows hold is a candidate once per row."""
    metrics.ids_of_rows = lambda ids, anchor, positive, rows: torch.zeros(len(rows), dtype=torch.long)


FAULTS = {
    "column order": columns_by_kind,
    "rows of a later epoch": first_epoch_again,
    "repeated documents": documents_of_rows,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument(
        "--first", type=int, default=0, help="number of the first draw, to go on with a run that ended early"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="this draw alone")
    parser.add_argument("--stop", action="store_true", help="end at the first draw that fails")
    parser.add_argument("--fault", choices=FAULTS, help="put this fault into the package; the draws have to find it")
    options = parser.parse_args()
    if options.fault:
        FAULTS[options.fault]()
    failed = []
    numbers = range(options.first, options.draws) if options.only is None else [options.only]
    for number in numbers:
        draw = drawn(options.seed, number)
        with TemporaryDirectory() as name:
            try:
                run_draw(draw, Path(name))
                print(f"{number:4d} fine: {draw.mode} {draw.processes} -> {draw.resumed_processes}", flush=True)
            except Exception as error:
                last = str(error).strip().splitlines()[-1:]
                if not isinstance(error, AssertionError):
                    traceback.print_exc()
                if options.only is not None:
                    print(str(error)[-6000:])
                failed.append(number)
                print(f"{number:4d} FAILED: {last[0] if last else error!r}\n     {json.dumps(asdict(draw))}")
                print(f"     python tests/parity/fuzz.py --seed {options.seed} --only {number}", flush=True)
                if options.stop:
                    break
    print(f"{len(failed)} of {len(numbers)} draws failed: {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)

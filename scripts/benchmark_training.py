#!/usr/bin/env python
"""Training as users train: `SentenceTransformerTrainer` beside `DistTrainer`, time and memory in one run.

    python scripts/benchmark_training.py --output outputs/training               # two quiet cores: some eight minutes
    python scripts/benchmark_training.py --comparisons tiny --turns 5
    python scripts/benchmark_training.py --device cuda --model minilm --comparisons mnr --rows 2048 \
        --mini_batches 128 --mini_batch_tokens 16384 --chunk_tokens 16384 65536

(1) data: (docstring, function) pairs of the standard library, cut at 256 tokens; a saved model, which both sides load
(2) contestants: their cached loss with its mini-batch swept, and this project's cache with its chunks swept, as it
    runs by default; each in a process of its own. For each setting of theirs of "mnr" there is one of ours that keeps
    as many graphs as its memory holds, found by a step of each before
(3) their steps are taken in turns (turns.py); a step holds the loading of its batch too

Weights, batches, optimizer and clipping are the same on both sides, and dropout is 0, so that the losses of all
contestants must agree: the report has the largest difference. A ratio is the median of the ratios within a turn, to
theirs that takes the fewest CPU seconds, which other programs change less than wall time.

Memory is given twice: the bytes of all tensors that the last step makes and that are alive together (weights,
optimizer state and batch not), and by how much the process grew from before training to its peak. On a GPU, where both
sides run in bf16, both are torch's allocator's, and the weights and states of all contestants lie on it together.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, disable_progress_bars
from model_sizes import MODELS, pooling_of
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.base.sampler import DefaultBatchSampler
from sentence_transformers.sentence_transformer import losses
from torch.utils.data import SequentialSampler
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging
from turns import FORK, Turns, describe_machine, ratio, take_turns

from hf_dist_ext import DistTrainer, DistTrainingArguments, InfoNCELoss, SentenceTransformersLoss
from hf_dist_ext.data.code_search import load_code_search, train_tokenizer
from hf_dist_ext.errors import UsageError
from hf_dist_ext.failures import exit_on_usage_error
from hf_dist_ext.models.from_run import build

TEMPERATURE = 0.05
LEARNING_RATE = 1e-3
LENGTH = 256  # tokens
COLUMNS = ["query", "positive"]
ALL_GRAPHS = 10**6
PROBED = (2, 4, ALL_GRAPHS)  # graphs kept to see what one takes, and all
THEIRS, OURS = "sentence-transformers", "hf_dist_ext"


@dataclass(frozen=True)
class Work:
    """What all contestants of a comparison are given."""

    folder: Path  # of the saved model
    rows: Dataset
    batch: int
    steps: int
    device: str


@dataclass(frozen=True)
class Comparison:
    """`theirs` and `ours` take the work, a setting and a callback of the trainer, and return what trains."""

    title: str
    theirs: Callable[..., Callable]
    ours: Callable[..., Callable]
    width: int = 256
    layers: int = 4
    batches: int = 1  # rows of a step, in batches of --rows
    are_rated: bool = False  # rows of the data; no loss of theirs over rated pairs has a cache
    keeps_graphs: bool = False  # one more of ours for each setting of theirs


# (1) -----------------------------------------------------------------------------------------------------------------


def make_model(folder: Path, tokenizer: PreTrainedTokenizerBase, of: Comparison, options: argparse.Namespace) -> None:
    config = {
        "model_type": "bert", "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id,
        "hidden_size": of.width, "num_hidden_layers": of.layers, "num_attention_heads": max(2, of.width // 64),
        "intermediate_size": 4 * of.width, "max_position_embeddings": LENGTH,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip
    pooling = {}
    if options.model:
        config = {"pad_token_id": tokenizer.pad_token_id} | MODELS[options.model]
        pooling = {"pooling": pooling_of(options.model)}
    torch.manual_seed(0)
    build(model_config=config, tokenizer=tokenizer, **pooling).save_pretrained(str(folder))


def make_rows(pairs: Dataset, number: int, are_rated: bool) -> Dataset:
    """Rows of a docstring and its function; rated ones have a score, and every second one, of score 0, the function of
    the next docstring."""
    rows = [pairs[i % len(pairs)] for i in range(number + 1)]
    columns = {"query": [row["query"] for row in rows[:-1]], "positive": [row["positive"] for row in rows[:-1]]}
    if are_rated:
        columns["score"] = [1.0 - i % 2 for i in range(number)]
        columns["positive"] = [rows[i + i % 2]["positive"] for i in range(number)]
    return Dataset.from_dict(columns)


# (2) -----------------------------------------------------------------------------------------------------------------


def in_order(dataset: Dataset, batch_size: int, drop_last: bool, **_: Any) -> DefaultBatchSampler:
    return DefaultBatchSampler(SequentialSampler(dataset), batch_size=batch_size, drop_last=drop_last)


def common(work: Work) -> dict[str, Any]:
    return dict(
        output_dir=str(work.folder / f"run{os.getpid()}"), max_steps=work.steps, seed=0, learning_rate=LEARNING_RATE,
        use_cpu=work.device == "cpu", bf16=work.device != "cpu", logging_steps=1, save_strategy="no",
        report_to="none", disable_tqdm=True, per_device_train_batch_size=work.batch, dataloader_drop_last=True,
    )  # fmt: skip


def saved_model(work: Work) -> SentenceTransformer:
    """Without BERT's pooler, which nobody reads: our model has none."""
    model = SentenceTransformer(str(work.folder), device=work.device)
    if getattr(model[0].model, "pooler", None) is not None:
        model[0].model.pooler = None
    return model


def their_trainer(loss: str, columns: list[str], work: Work, setting: dict, callback: Turns) -> Callable:
    model = saved_model(work)
    trainer = SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(batch_sampler=in_order, **common(work)),
        train_dataset=work.rows.select_columns(columns),
        loss=getattr(losses, loss)(model, **setting),
        callbacks=[callback],
    )
    return trainer.train


def our_trainer(loss: str, columns: list[str], work: Work, setting: dict, callback: Turns) -> Callable:
    model = saved_model(work)
    width = model.get_embedding_dimension()
    trainer = DistTrainer(
        model=model,
        args=DistTrainingArguments(
            train_sampling_strategy="sequential", no_duplicates_in_batch=False, **setting, **common(work)
        ),
        loss=InfoNCELoss(temperature=TEMPERATURE) if loss == "infonce" else SentenceTransformersLoss(loss, width),
        train_dataset=work.rows.select_columns(columns),
        callbacks=[callback],
    )
    return trainer.train


COMPARISONS = {
    "mnr": Comparison(
        "MultipleNegativesRanking",
        partial(their_trainer, "CachedMultipleNegativesRankingLoss", COLUMNS),
        partial(our_trainer, "infonce", COLUMNS),
        keeps_graphs=True,
    ),
    "cosent": Comparison(
        "CoSENT",
        partial(their_trainer, "CoSENTLoss", [*COLUMNS, "score"]),
        partial(our_trainer, "CoSENTLoss", [*COLUMNS, "score"]),
        are_rated=True,
    ),
    "tiny": Comparison(
        "MultipleNegativesRanking, one layer of width 64",
        partial(their_trainer, "CachedMultipleNegativesRankingLoss", COLUMNS),
        partial(our_trainer, "infonce", COLUMNS),
        width=64,
        layers=1,
        batches=4,
        keeps_graphs=True,
    ),
}


# (3) ------------------------------------------------------------------------------------------------------------


def contestants(comparison: Comparison, work: Work, options: argparse.Namespace) -> dict[str, Callable]:
    """Name -> what makes its trainer, for `take_turns`."""
    found = {}
    if comparison.are_rated:
        found[f"{THEIRS}, not cached"] = partial(comparison.theirs, work, {})
    else:
        settings = {f"{n} rows": {"mini_batch_size": n} for n in options.mini_batches}
        settings |= {f"{n} tokens": {"mini_batch_num_tokens": n} for n in options.mini_batch_tokens}
        found = {f"{THEIRS}, cached, {name}": partial(comparison.theirs, work, one) for name, one in settings.items()}
    for n in options.chunk_tokens:
        found[f"{OURS}, {n} tokens"] = ours_with(comparison, work, n)
    return found


def ours_with(comparison: Comparison, work: Work, tokens: int, num_kept: int = 0) -> Callable:
    setting = {"gradient_cache_chunk_tokens": tokens, "gradient_cache_keep_graph": num_kept}
    return partial(comparison.ours, work, setting)


def in_their_memory(
    comparison: Comparison, work: Work, logs: Path, options: argparse.Namespace
) -> dict[str, Callable]:
    """Of ours, one for each of theirs: so many graphs kept that a step's tensors take as much memory."""
    one_step = replace(work, steps=1)
    probes = {f"{n}, {kept}": ours_with(comparison, one_step, n, kept) for n in options.kept_tokens for kept in PROBED}
    theirs = {name: make for name, make in contestants(comparison, one_step, options).items() if THEIRS in name}
    peaks = {name: one["peak_bytes"] for name, one in take_turns(theirs | probes, 1, logs, work.device).items()}
    found = {}
    for n in options.kept_tokens:
        few, more, most = (peaks[f"{n}, {kept}"] for kept in PROBED)
        of_graph = max(1, (more - few) // (PROBED[1] - PROBED[0]))
        for name in theirs:
            number = ALL_GRAPHS if peaks[name] >= most else PROBED[0] + (peaks[name] - few) // of_graph
            words = "all" if number == ALL_GRAPHS else number
            if number > 0:
                found[f"{OURS}, {n} tokens, {words} graphs kept"] = ours_with(comparison, work, n, number)
    return found


# the report ----------------------------------------------------------------------------------------------------------


def summary(comparison: Comparison, work: Work, figures: dict[str, dict]) -> dict:
    theirs = [name for name in figures if name.startswith(THEIRS)]
    fastest = min(theirs, key=lambda name: statistics.median(figures[name]["cpu_seconds"]))
    losses = list(zip(*(entry["losses"] for entry in figures.values()), strict=True))
    apart = max(max(of_step) - min(of_step) for of_step in losses)
    print(f"\n**{comparison.title}**, {work.batch} pairs a step\n")
    print("| contestant | rows/s | time | CPU time | tensors, MiB | process, MiB |\n|---|---|---|---|---|---|")
    for name, entry in figures.items():
        entry["rows_per_second"] = work.batch / statistics.median(entry["seconds"])
        entry["time"] = ratio(figures, name, fastest)
        entry["cpu_time"] = ratio(figures, name, fastest, "cpu_seconds")
        memory = " | ".join(f"{entry[key] / 2**20:,.0f}" for key in ("peak_bytes", "grown_bytes"))
        speed = f"{entry['rows_per_second']:.1f} | {entry['time']:.2f} | {entry['cpu_time']:.2f}"
        print(f"| {name} | {speed} | {memory} |")
    print(f"\nThe losses of all steps differ by {apart:.1e} at most, and go from {losses[0][0]:.3f} to ", end="")
    print(f"{losses[-1][0]:.3f}.", flush=True)
    return {"title": comparison.title, "batch": work.batch, "losses_differ_by": apart, "contestants": figures}


def machine(device: str) -> str:
    with FORK.Pool(1) as pool:  # a process that has asked CUDA must not fork
        if device != "cpu" and not pool.apply(torch.cuda.is_available):
            raise UsageError(f'--device {device}: torch sees no CUDA device. Use "cpu", or a machine that has one.')
        words = pool.apply(describe_machine, (device,))
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "sentence-transformers"))
    return f"{words}; {packages}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comparisons", nargs="+", choices=list(COMPARISONS), default=list(COMPARISONS))
    parser.add_argument("--rows", type=int, default=64, help="pairs of a step; of the tiny model four times as many")
    parser.add_argument("--turns", type=int, default=2, help="turns that are timed")
    parser.add_argument("--mini_batches", type=int, nargs="*", default=[8, 32], help="theirs, in rows")
    parser.add_argument("--mini_batch_tokens", type=int, nargs="*", default=[1024], help="theirs, in tokens")
    parser.add_argument("--chunk_tokens", type=int, nargs="+", default=[1024, 2048], help="ours")
    kept = "ours, of chunks whose graphs are kept; none: no rows"
    parser.add_argument("--kept_tokens", type=int, nargs="*", default=[1024], help=kept)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", choices=list(MODELS), help="of this size (model_sizes.py), without dropout")
    parser.add_argument("--code_root", help="read functions from this folder instead of the standard library")
    parser.add_argument("--output", type=Path, help="write results.json into this folder")
    options = parser.parse_args(argv)
    with exit_on_usage_error():
        run(options)


def run(options: argparse.Namespace) -> None:
    # torch asks the driver's library whether there is a GPU, and not CUDA, after which no process must fork
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    disable_progress_bars()
    transformers_logging.disable_progress_bar()
    described = machine(options.device)
    print(described)
    pairs = load_code_search(held_out=1, root=options.code_root)["train"].shuffle(seed=0)
    tokenizer = train_tokenizer((t for name in COLUMNS for t in pairs[name]), model_max_length=LENGTH)
    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for key in options.comparisons:
            comparison = COMPARISONS[key]
            if options.model:
                comparison = replace(comparison, title=f"{comparison.title.partition(',')[0]}, {options.model}")
            # in a process of its own: one that has run OpenMP's threads must not fork
            maker = FORK.Process(target=make_model, args=(folder / key / "model", tokenizer, comparison, options))
            maker.start()
            maker.join()
            batch, steps = options.rows * comparison.batches, options.turns + 2
            rows = make_rows(pairs, batch * steps, comparison.are_rated)
            work = Work(folder / key / "model", rows, batch, steps, options.device)
            makers = contestants(comparison, work, options)
            if comparison.keeps_graphs and options.kept_tokens:
                makers |= in_their_memory(comparison, work, folder / key, options)
            figures = take_turns(makers, steps, folder / key, options.device)
            results.append(summary(comparison, work, figures))
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        report = {"machine": described, "command": " ".join(sys.argv), "results": results}
        (options.output / "results.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

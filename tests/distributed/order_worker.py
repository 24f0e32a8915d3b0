r"""Which rows every process trains on: resumed runs beside the uninterrupted one, and short last batches.

    python tests/distributed/order_worker.py --output found.json           # the core
    python tests/distributed/order_worker.py --whole --output found.json   # all of it; prints a table
    python tests/distributed/order_worker.py --whole --output found.json --modes ddp --samplers random   # a part

(1) an uninterrupted run of three epochs writes checkpoints before and behind the middle of each
(2) it is resumed at every one of them, by as many processes or by another number; every process notes the rows of
    each micro-batch
(3) counted over what the checkpoint had used and what the resumed run used: rows that an epoch saw more than once,
    and rows that it never saw. With as many processes, each one's rows must be those of the uninterrupted run

A global batch has 8 rows and an epoch 25: the last batch is of one row, so that a process has none.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections import Counter
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets
import numpy as np
import torch
from torch.utils.data import Sampler
from transformers import TrainerCallback

from hf_dist_ext.data.order import StandIn
from hf_dist_ext.data.sentence_collator import ContrastiveCollator
from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.strategies.collectives import leave_together, rank
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.distributed.forked import HSDP, MODES, THREE, ZERO, Run
from tests.tiny_models import WORDS, embedding_model, model_config, tiny_tokenizer

ROWS, WINDOW, EPOCHS = 25, 8, 3
STOPS = (1, 3, 5, 7, 9, 11)  # steps, of 4 in an epoch
SAMPLERS = ("no duplicates", "random", "sequential", "by length", "own", "own, global generator")


class OwnOrder(Sampler[int]):
    """As users write it: its order follows from `set_epoch`, or from numpy's global generator."""

    def __init__(self, is_global: bool):
        self.epoch, self.is_global = 0, is_global

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return ROWS

    def __iter__(self):
        order = np.random if self.is_global else np.random.default_rng(self.epoch)
        return iter(order.permutation(ROWS).tolist())


def pairs(rows: int = ROWS) -> datasets.Dataset:
    """Every fourth text comes twice; texts are of 2 to 8 words."""
    draw = np.random.default_rng(0)
    texts = [" ".join(draw.choice(WORDS, draw.integers(2, 9))) for _ in range(rows)]
    return datasets.Dataset.from_dict(
        {
            "query": [f"{texts[i - 1] if i % 4 == 0 else texts[i]}" for i in range(rows)],
            "positive": [" ".join(draw.choice(WORDS, 4)) for _ in range(rows)],
            "length": [len(text.split()) for text in texts],
        }
    )


class SaveAt(TrainerCallback):
    def on_step_end(self, args, state, control, **others):
        control.should_save = state.global_step in STOPS


def train(folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    """One process of a run: rows of every micro-batch with its epoch, and what was logged."""
    torch.manual_seed(0)
    sampler, seen = job.get("sampler", SAMPLERS[0]), []

    class Noting(DistTrainer):
        def training_step(self, model, inputs, *more):
            rows = [] if isinstance(inputs, StandIn) else inputs["ids"]["row"].tolist()
            seen.append([self.data_position.used.epoch, rows])
            return super().training_step(model, inputs, *more)

        def _get_train_sampler(self, dataset=None):
            return OwnOrder("global" in sampler) if sampler.startswith("own") else super()._get_train_sampler(dataset)

    tokenizer, options = tiny_tokenizer(), dict(job.get("options", {}))
    names = {"sequential": "sequential", "by length": "group_by_length"}
    micro_batch = WINDOW // options.get("gradient_accumulation_steps", 1)
    options = {"per_device_train_batch_size": micro_batch // job["size"]} | options
    if job["mode"].startswith("zero3"):  # every forward is followed by its backward there
        options = {"gradient_cache_chunk_size": 4} | options
    args = DistTrainingArguments(
        output_dir=str(folder / job["name"]), num_train_epochs=EPOCHS, report_to=[], disable_tqdm=True,
        use_cpu=not job["mode"].startswith("zero"), seed=5, learning_rate=1e-3, save_strategy="no", logging_steps=1,
        no_duplicates_in_batch=sampler == "no duplicates", train_sampling_strategy=names.get(sampler, "random"),
        frozen_modules=["embeddings"], **options,
    )  # fmt: skip
    model = embedding_model(model_config("bert", hidden_dropout_prob=0, attention_probs_dropout_prob=0))
    trainer = Noting(
        model=model, args=args,
        train_dataset=job.get("dataset") or pairs(), processing_class=tokenizer, loss=InfoNCELoss(),
        data_collator=ContrastiveCollator(tokenizer, ["query", "positive"]),
        callbacks=[] if "resume" in job else [SaveAt()],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=job.get("resume"))
    keys = ("loss", "accuracy", "contrastive_batch_size", "grad_norm", "epoch")
    logs = [{key: line[key] for key in keys} for line in trainer.state.log_history if "loss" in line]
    return {"seen": seen, "logs": logs, "accumulation": args.gradient_accumulation_steps}


def process(say, folder: Path, jobs: list[dict[str, Any]]) -> str:
    for job in jobs:
        found = train(folder, job)
        (folder / f"{job['name']}.{rank()}.json").write_text(json.dumps(found))
    return "done"


def run(folder: Path, mode: str, jobs: list[dict[str, Any]]) -> list[list[dict]]:
    """What every process of each job found."""
    size = (MODES | THREE | ZERO | HSDP)[mode][0]
    jobs = [job | {"mode": mode, "size": size} for job in jobs]
    Run(mode, folder / mode, partial(process, folder=folder, jobs=jobs)).result()
    files = [[folder / f"{job['name']}.{number}.json" for number in range(size)] for job in jobs]
    return [[json.loads(path.read_text()) for path in of_job] for of_job in files]


def together(ranks: list[dict]) -> list[tuple[int, list[int]]]:
    """(epoch, rows of all processes in their order) of every micro-batch."""
    steps = zip(*(found["seen"] for found in ranks), strict=True)
    return [(of_ranks[0][0], [row for _, rows in of_ranks for row in rows]) for of_ranks in steps]


def compare(whole: list[dict], resumed: list[dict], stop: int) -> dict[str, Any]:
    per_update = whole[0]["accumulation"]
    per_epoch = -(-ROWS // (WINDOW // per_update))  # micro-batches
    used = stop // 4 * per_epoch + stop % 4 * per_update
    before, after = together(whole)[:used], together(resumed)
    counts = Counter((epoch, row) for epoch, rows in before + after for row in rows)
    begun = stop // 4
    expected = [row for epoch, rows in together(whole) for row in rows if epoch == begun]
    found = {
        "repeated": sum(count - 1 for count in counts.values()),
        "missing": EPOCHS * ROWS - len(counts),
        "begun epoch in order": [row for epoch, rows in before + after for row in rows if epoch == begun] == expected,
    }
    if len(whole) == len(resumed):
        found["rows of each process"] = all(
            one["seen"][used:] == other["seen"] for one, other in zip(whole, resumed, strict=True)
        )
        pairs_of_logs = zip(whole[0]["logs"][stop:], resumed[0]["logs"][stop:], strict=True)
        found["largest difference of a loss"] = max(abs(one["loss"] - two["loss"]) for one, two in pairs_of_logs)
    return found


def matrix(folder: Path, mode: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`cases` share what saved: {"sampler", "options", "resumed_by": [modes], "stops"}."""
    wholes = run(folder, mode, [case | {"name": f"whole{i}"} for i, case in enumerate(cases)])
    table = []
    for resumed_by in dict.fromkeys(by for case in cases for by in case["resumed_by"]):
        chosen = [
            (i, case, stop)
            for i, case in enumerate(cases) if resumed_by in case["resumed_by"]
            for stop in case.get("stops", STOPS)
        ]  # fmt: skip
        jobs = []
        for i, case, stop in chosen:
            options = dict(case.get("options", {}))
            if resumed_by != mode:  # the number of accumulated batches is found by the trainer
                options["per_device_train_batch_size"] = (
                    WINDOW // (MODES | ZERO)[mode][0] // options.get("gradient_accumulation_steps", 1)
                )
            resume = str(folder / f"whole{i}" / f"checkpoint-{stop}")
            name = f"{resumed_by}-{i}-{stop}"
            jobs.append({"sampler": case["sampler"], "options": options, "resume": resume, "name": name})
        for (i, case, stop), found in zip(chosen, run(folder, resumed_by, jobs), strict=True):
            what = {"saved": mode, "resumed": resumed_by, "sampler": case["sampler"], "stop": stop}
            table.append(what | {"options": case.get("options", {})} | compare(wholes[i], found, stop))
    return table


def core() -> dict[str, list[dict[str, Any]]]:
    """Each kind of sampler once behind the first epoch, with what differs beside it; which rows come next does not
    depend on how weights are sharded."""
    return {
        "ddp": [
            {"sampler": "no duplicates", "resumed_by": ["ddp", "single"], "stops": (5, 11)},
            {"sampler": "by length", "resumed_by": ["single"], "stops": (7,)},
            {"sampler": "own", "resumed_by": ["ddp"], "stops": (7,),
             "options": {"dataloader_num_workers": 1, "gradient_accumulation_steps": 2}},
            {"sampler": "own, global generator", "resumed_by": ["ddp"], "stops": (5,)},
        ],
        "single": [{"sampler": "no duplicates", "resumed_by": ["single", "ddp"], "stops": (5,)}],
    }  # fmt: skip


def whole(stops: tuple[int, ...], samplers: list[str]) -> dict[str, list[dict[str, Any]]]:
    options = [{}, {"gradient_accumulation_steps": 2}, {"dataloader_num_workers": 2}]
    everything = [(sampler, some) for sampler in samplers for some in options]
    default = [(sampler, {}) for sampler in samplers]

    def cases(pairs: list, *resumed_by: str) -> list[dict[str, Any]]:
        return [
            {"sampler": sampler, "options": some, "resumed_by": resumed_by, "stops": stops} for sampler, some in pairs
        ]

    return {
        "single": cases(everything, "single", "ddp", "fsdp-sharded"),
        "ddp": cases(everything, "ddp", "single"),
        "fsdp-sharded": cases(default, "fsdp-sharded", "single", "ddp"),
        "zero1": cases(default, "zero1"),
        "zero2": cases(default[:1], "zero2"),
        "zero3": cases(default[:1], "zero3"),
    }


def short_batches(folder: Path, rows: int, modes: list[str], **options: Any) -> dict[str, Any]:
    """What three epochs of `rows` rows in global batches of 12 logged, and the rows of their micro-batches."""
    found = {}
    for mode in modes:
        size = (MODES | THREE | ZERO | HSDP)[mode][0]
        batch = {"per_device_train_batch_size": 12 // size // options.get("gradient_accumulation_steps", 1)}
        if mode in HSDP:
            batch |= {"sharding": "HYBRID_SHARD", "sharding_group_size": 2}
        job = {"name": f"short-{mode}-{rows}", "dataset": pairs(rows), "options": batch | options, "resume": None}
        (ranks,) = run(folder, mode, [job])
        found[mode] = {"logs": ranks[0]["logs"], "rows": together(ranks), "by process": [r["seen"] for r in ranks]}
    return found


def all_short_batches(folder: Path, is_whole: bool) -> dict[str, Any]:
    found = {"26 rows": short_batches(folder, 26, ["single", "ddp", "ddp-3", "fsdp-sharded"])}
    if is_whole:
        modes = ["single", *(mode for mode in MODES | ZERO | THREE | HSDP if mode != "single")]
        found["30 rows"] = short_batches(folder, 30, modes)
        found["14 rows"] = short_batches(folder, 14, modes)
        more = {"gradient_accumulation_steps": 2, "gradient_cache_chunk_size": 2}
        found["31 rows, accumulated"] = short_batches(folder, 31, ["single", "ddp", "ddp-3"], **more)
    return found


def printed(row: dict[str, Any]) -> str:
    options = ", ".join(f"{name}={value}" for name, value in row["options"].items()) or "-"
    same = row["begun epoch in order"] and row.get("rows of each process", True)
    words = [row["saved"], "->", row["resumed"], row["sampler"], options, f"step {row['stop']}"]
    return " | ".join([*words, f"{row['repeated']} repeated", f"{row['missing']} missing", f"same order: {same}"])


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--modes", nargs="+", help="that save, or short: short last batches; all")
    parser.add_argument("--stops", type=int, nargs="+", default=STOPS, help="of --whole: steps to resume at")
    parser.add_argument("--samplers", nargs="+", default=SAMPLERS, help="of --whole")
    options = parser.parse_args(words)
    plan = whole(options.stops, options.samplers) if options.whole else core()
    modes = options.modes or [*plan, "short"]
    if options.whole and any(mode.startswith(("zero", "short")) for mode in modes):
        import deepspeed  # noqa: F401, once, before the forks
    found: dict[str, Any] = {"resumed": [], "short": {}}
    with TemporaryDirectory() as name:
        for mode in modes:
            folder = Path(name, mode)
            folder.mkdir()
            if mode == "short":
                found["short"] = all_short_batches(folder, options.whole)
                continue
            for row in matrix(folder, mode, plan[mode]):
                print(printed(row), flush=True)
                found["resumed"].append(row)
            shutil.rmtree(folder)
    options.output.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
    leave_together()

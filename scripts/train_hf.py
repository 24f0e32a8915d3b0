#!/usr/bin/env python
"""Train from one JSON file; what every process runs, read top to bottom.

    python scripts/train_hf.py --config configs/code_search.json                    # one process, or as the JSON says
    accelerate launch --config_file configs/accelerate/multi_gpu_ddp.yaml scripts/train_hf.py --config run.json
    python scripts/train_hf.py --config run.json --learning_rate 2e-5 --max_steps 100     # any field, over the JSON

(1) read the run, and hand it over to accelerate's launcher when it asks for several processes
(2) the task builds data, processor, model and loss; they make a trainer
(3) evaluate, train, evaluate
(4) save the model, metrics.json and a line that says how to load it

A mistake in the run file ends it with one message from one process and exit code 2; HF_DIST_DEBUG=1 shows where.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

from hf_dist_ext.config import Run, exit_on_usage_error, load_run
from hf_dist_ext.failures import first_error_only
from hf_dist_ext.launch import hand_over_if_needed
from hf_dist_ext.preemption import REQUEUE, StopSignals


def main(argv: list[str] | None = None) -> None:
    with exit_on_usage_error():
        run = load_run(sys.argv[1:] if argv is None else argv)
        hand_over_if_needed(run)  # (1)
        with StopSignals(), first_error_only():
            train(run)


def train(run: Run) -> None:
    from hf_dist_ext.tasks import build_parts, make_arguments

    # (2)
    args = make_arguments(run)
    is_main = args.process_index == 0
    logging.basicConfig(level=logging.INFO if is_main else logging.ERROR, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    for line in run.echo if is_main else ():
        print(line)
    parts = build_parts(run, args)
    trainer = parts.make_trainer(args)

    # (3)
    result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    if trainer.was_preempted:
        trainer.accelerator.wait_for_everyone()  # the launcher ends the others as soon as one has left
        sys.exit(REQUEUE)
    after = trainer.evaluate() if parts.eval_dataset is not None else {}

    # (4)
    trainer.save_model()
    if not is_main:
        return
    before = next((line for line in trainer.state.log_history if f"eval_{parts.metrics[0]}" in line), {})
    report = {
        "before": {name: before.get(f"eval_{name}") for name in parts.metrics},
        "after": {name: after.get(f"eval_{name}") for name in parts.metrics},
        "train_seconds": round(result.metrics["train_runtime"], 2),
        "world_size": args.world_size,
    }
    if parts.loss is not None:
        report |= {"contrastive_batch_size": trainer.meter.largest_batch, "num_chunks": trainer.meter.most_chunks}
    output_dir = Path(args.output_dir)
    (output_dir / "metrics.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    (output_dir / "run.json").write_text(json.dumps(run.flat(), indent=2) + "\n", encoding="utf-8")
    print_report(report, parts.title)
    chunks = f", {report['num_chunks']} chunks per step" if "num_chunks" in report else ""
    print(f"{report['train_seconds']} s of training{chunks}")
    for hint in parts.hints:
        print(hint.format(folder=output_dir))


def print_report(report: dict, title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for heading in ("", "before", "after"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name in report["after"]:
        cells = [report[when][name] for when in ("before", "after")]
        table.add_row(name, *["-" if value is None else f"{value:.4f}" for value in cells])
    if any(value is not None for value in report["after"].values()):
        Console().print(table)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()

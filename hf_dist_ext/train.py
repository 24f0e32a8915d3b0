"""Train from one run file: what every process runs, read top to bottom.

    hf-dist train run.json                                          # one process, or as the run file says
    hf-dist train run.json --learning_rate 2e-5 --max_steps 100     # any field, over the file's
    python scripts/train_hf.py --config run.json                    # the same
    accelerate launch --config_file configs/accelerate/multi_gpu_ddp.yaml scripts/train_hf.py --config run.json

(1) read the run, and hand it over to accelerate's launcher when it asks for several processes
(2) the task builds data, processor, model and loss; they make a trainer, one per stage where there are stages
(3) evaluate, train, evaluate
(4) save the model, metrics.json and a README.md; a line says how to load it. With push_to_hub they go to the hub then

A mistake in the run file ends it with one message from one process and exit code 2; HF_DIST_DEBUG=1 shows where.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_dist_ext import launched
from hf_dist_ext.failures import exit_on_usage_error, first_error_only
from hf_dist_ext.launch import hand_over_if_needed
from hf_dist_ext.run import lease, record
from hf_dist_ext.run.config import Run
from hf_dist_ext.run.preemption import MARK, StopSignals, exit_code, remove_mark, write_mark
from hf_dist_ext.run.read import load_run

if TYPE_CHECKING:
    from hf_dist_ext.tasks.parts import Parts
    from hf_dist_ext.training.arguments import DistTrainingArguments
    from hf_dist_ext.training.model_card import Life
    from hf_dist_ext.training.trainer import DistTrainer


MODULE = ("--module", "hf_dist_ext.train")  # how a launcher starts this file, wherever it is installed


def main(
    argv: list[str] | None = None, program: Sequence[str] = (), act: Callable[[Run], None] | None = None, **fields: Any
) -> None:
    """`argv`: "--config", the run file and further fields; None is this process's own arguments.

    `program`: what a launcher starts in every process; nothing is the script that this process runs. `act`: what every
    process does with the run; None: train. `fields`: of training, over those of the run.
    """
    argv = sys.argv[1:] if argv is None else argv
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    join_freed_memory()
    bars_on_a_terminal_only()
    with exit_on_usage_error(), lease.all_released():
        run = load_run(argv)
        run.training |= fields
        hand_over_if_needed(run, program, argv)  # (1)
        with StopSignals() as stop, first_error_only():
            try:
                (act or train)(run)
            finally:
                # a run that loads or saves has nothing to finish; SIGTERM may be a launcher's, after an error
                if act is None and stop.received == "SIGUSR1" and launched.rank() == 0:
                    write_mark(run.training["output_dir"], None, stop.received)


def join_freed_memory() -> None:
    """Chunks differ in size, and memory that one has freed in pieces is of no use to a larger one unless torch's
    allocator joins the pieces. It reads this variable when a GPU is first used; older names have "CUDA" or "HIP"."""
    if not any(f"PYTORCH_{name}ALLOC_CONF" in os.environ for name in ("", "CUDA_", "HIP_")):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def bars_on_a_terminal_only() -> None:
    """`datasets` draws bars into files and logs too; it reads this variable when it is imported."""
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")


def train(run: Run) -> None:
    from transformers.utils import logging as transformers_logging

    from hf_dist_ext.strategies.collectives import leave_together
    from hf_dist_ext.tasks import push
    from hf_dist_ext.tasks.parts import build_parts, check_available, hints, make_arguments
    from hf_dist_ext.tasks.stages import run_stages, summary
    from hf_dist_ext.training import final_model, model_card

    is_main = launched.rank() == 0
    logging.basicConfig(level=logging.INFO if is_main else logging.ERROR, format="%(message)s")
    for name in ("httpx", "sentence_transformers"):
        logging.getLogger(name).setLevel(logging.WARNING)
    transformers_logging.disable_progress_bar()  # of files that are read and written: the run has a bar of its own
    for line in run.echo if is_main else ():
        print(line)
    check_available(run)
    to_load = hints(run)
    lives: list[model_card.Life] = []
    pushed = None
    if run.stages:
        report = summary(run_stages(run, partial(train_once, run, lives)))
    else:
        args = make_arguments(run)
        trainer, report = train_once(run, lives, run, args, build_parts(run, args))
        pushed, args.push_to_hub = trainer if args.push_to_hub else None, False  # with its card, at the very end
        final_model.save(trainer.save_model, trainer.model, args)  # (4)
        if not trainer.saves_complete_model:
            to_load = ["merge it: hf-dist merge {quoted} --output {quoted}-merged      # the complete model"]
    if is_main:
        output_dir = Path(run.training["output_dir"])
        remove_mark(str(output_dir))  # where all stages had ended before, none has begun
        (output_dir / "metrics.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        pictures = model_card.write(output_dir, run, report, to_load, lives)
        print_end(report, to_load, output_dir, pictures)
    leave_together()  # else gloo aborts some exits, and a launcher restarts them
    if pushed is not None and is_main:  # the others wait for nothing
        push.of_run(pushed, output_dir)


def train_once(
    whole: Run,
    lives: list[Life],
    run: Run,
    args: DistTrainingArguments,
    parts: Parts,
    at_begin: Callable[[], None] = lambda: None,
) -> tuple[DistTrainer, dict]:
    """One life of a trainer, and its report. What the model's card says of it goes to `lives`.

    `run`: the stage of the `whole` run, or all of it. `at_begin`: what is written once the start is accepted.
    """
    from hf_dist_ext.strategies.tensors import num_elements
    from hf_dist_ext.training.final_model import best_of
    from hf_dist_ext.training.model_card import life_of

    trainer = parts.make_trainer(args)  # (2)
    trainer.stage = run.name or None
    trainer.keeper.at_begin += [at_begin] * args.should_save
    if args.process_index == 0:
        trainer.keeper.at_begin += [partial(remove_mark, whole.training["output_dir"]), partial(record.write, whole)]
    trains = [(num_elements(p), p.requires_grad) for p in trainer.model.parameters()]

    # (3)
    result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    if trainer.was_preempted:
        mark = Path(args.output_dir, MARK)
        if run is not whole and args.process_index == 0 and mark.is_file():  # of a stage: who looks does not know it
            mark.replace(Path(whole.training["output_dir"], MARK))
        trainer.accelerator.wait_for_everyone()  # the launcher ends the others as soon as one has left
        sys.exit(exit_code(trainer.stop_signal))
    after = trainer.evaluate() if parts.evaluates else {}
    names = parts.figures(trainer) if parts.evaluates else []
    before: dict = {}  # of each evaluation set a line
    for line in trainer.state.log_history:
        if line["step"] == 0:
            before |= line
    trained, everything = sum(n for n, is_on in trains if is_on), sum(n for n, _ in trains)
    report = {
        "before": {name: before.get(f"eval_{name}") for name in names},
        "after": {name: after.get(f"eval_{name}") for name in names},
        "train_seconds": round(result.metrics["train_runtime"], 2),
        "world_size": args.world_size,
        "per_device_train_batch_size": args.train_batch_size,
        "trained_share": round(trained / everything, 4),
        "trained_parameters": trained,
        "parameters": everything,
    }
    if best := best_of(args, trainer.state):
        report["best"] = best
    report |= trainer.scaling.report
    if parts.loss is not None:
        report |= {"contrastive_batch_size": trainer.meter.largest_batch, "num_chunks": trainer.meter.usual_chunks}
    made, before_this_start = trainer.progress()
    if made == before_this_start > 0:
        report = of_first_time(Path(args.output_dir), report)
    if args.process_index == 0:
        lives.append(life_of(trainer, names))
    return trainer, report


def of_first_time(output_dir: Path, report: dict[str, Any]) -> dict[str, Any]:
    """The report of a finished run that was started again: what was measured while it trained stays."""
    path = output_dir / "metrics.json"
    try:
        measured = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return report
    logging.getLogger(__name__).info(
        "the run was at its end already: its seconds and sizes are those of its training."
    )
    return measured | {name: report[name] for name in ("before", "after")}


def print_end(report: dict, hints: list[str], output_dir: Path, pictures: Sequence[str]) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    from hf_dist_ext.training.final_model import figures_of, kept_lines

    names = Column("held out", overflow="fold")  # they are long, and cut they would all look alike
    table = Table(names, *(Column(name, justify="right") for name in ("before", "after")))
    for row in figures_of(report):
        table.add_row(*row)
    if table.rows:
        Console().print(table)
    for life in report.get("stages") or [report]:
        for line in kept_lines(life):
            print(line)
    number = report.get("num_chunks")
    chunks = "" if number is None else f", {number} chunk{'s' * (number != 1)} per step"
    print(f"{report['train_seconds']} s of training{chunks}")
    if "scaling_efficiency" in report:
        print(f"scaling efficiency {report['scaling_efficiency']:.0%} over {report['world_size']} process(es)")
    if pictures:
        print(f"see it:   {', '.join(str(output_dir / name) for name in pictures)}")
    for hint in hints:
        print(hint.format(folder=output_dir, quoted=shlex.quote(str(output_dir))))


if __name__ == "__main__":
    main(program=MODULE)

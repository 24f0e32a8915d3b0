r"""One process under DeepSpeed: SGD steps through the gradient cache beside naive full-batch steps in float64.

    accelerate launch --config_file configs/accelerate/deepspeed_zero2.yaml tests/distributed/deepspeed_worker.py \
        --output found.json

ZeRO's master weights are float32, whatever the model's, so the comparison is of float32 weights.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import BertConfig, TrainerCallback

from hf_dist_ext import launched
from hf_dist_ext.checkpoints import trainable
from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.errors import RunError, UsageError
from hf_dist_ext.frozen.who_trains import plan_freezing
from hf_dist_ext.strategies.collectives import leave_together, rank
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.distributed.nonfinite_worker import InfiniteClassifier, InfiniteOnRankOne
from tests.distributed.test_trainer import SMALL
from tests.parity.exactness_worker import BATCH, Case, build_model, collate, reference_gradients

RATE, STEPS = 0.1, 2
TEMPERATURE = {"learnable_temperature": True}
CASES = [
    Case("no cache", arguments={"gradient_cache_chunk_size": None}),
    Case("chunks of 4"),
    Case("every chunk reduced", arguments={"gradient_cache_fsdp": "memory"}),
    Case("2 graphs kept", arguments={"gradient_cache_keep_graph": 2}),
    Case("accumulation", arguments={"gradient_accumulation_steps": 2}),
    Case("max_grad_norm", arguments={"max_grad_norm": 1.0}),
    Case("temperature", loss=TEMPERATURE),
    Case("temperature, accumulation", loss=TEMPERATURE, arguments={"gradient_accumulation_steps": 2}),
    Case("temperature, max_grad_norm", loss=TEMPERATURE, arguments={"max_grad_norm": 1.0}),
    Case("frozen layer", arguments={"frozen_modules": ["encoder.layer.0"]}),
    Case("frozen backbone", arguments={"trainable_modules": ["projection"]}),
    Case("tower per column", model="two alike"),
    Case("frozen tower", model="two alike", arguments={"frozen_modules": ["document"]}),
    Case("LoRA", model="lora"),
    Case("LoRA and projection", model="lora", arguments={"trainable_modules": ["projection"]}),
]


def whole_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {name: p.detach().double().clone() for name, p in model.named_parameters()}


# Made before any trainer: with ZeRO-3 running, transformers builds models sharded.
STARTS = {case.name: build_model(case.model).float() for case in CASES}
CLASSIFIER = InfiniteClassifier(BertConfig(**SMALL))
SPARE = [copy.deepcopy(STARTS["chunks of 4"]) for _ in range(13)]


class Sent(TrainerCallback):
    """Counts what leaves a rank as large as all gradients, and how often."""

    def __init__(self):
        self.count = self.elements = 0

    def watch(self, function):
        def watched(tensor, *arguments, **options):
            largest = max((t.numel() for t in [tensor, *arguments] if isinstance(t, torch.Tensor)), default=0)
            if largest > 1000:  # embeddings and scalars are smaller
                self.count, self.elements = self.count + 1, self.elements + largest
            return function(tensor, *arguments, **options)

        return watched


def make_trainer(folder: str, loss: InfoNCELoss, model=None, collator=None, **arguments) -> DistTrainer:
    defaults = {"gradient_cache_chunk_size": 4, "max_grad_norm": 0, "max_steps": STEPS, "save_strategy": "no"}
    args = DistTrainingArguments(
        output_dir=folder, per_device_train_batch_size=BATCH, learning_rate=RATE, report_to=[], seed=7,
        lr_scheduler_type="constant", disable_tqdm=True, logging_strategy="no", train_sampling_strategy="sequential",
        **({"optim": "sgd"} | defaults | arguments),
    )  # fmt: skip
    case = Case("deepspeed")
    return DistTrainer(
        SPARE.pop() if model is None else model,
        args,
        data_collator=collator or (lambda rows: collate(case, rows, rank())),
        train_dataset=list(range(args.max_steps * args.gradient_accumulation_steps * BATCH * launched.processes())),
        loss=loss,
    )


def measure(case: Case) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(
            folder, InfoNCELoss(temperature=0.1, **case.loss), copy.deepcopy(STARTS[case.name]),
            lambda rows: collate(case, rows, rank()), **case.arguments,
        )  # fmt: skip
        try:
            trainer.train()
        except UsageError as error:
            return {"refused": str(error)}
    found = whole_weights(trainer.model) | {name: p.detach() for name, p in trainer.loss.named_parameters()}
    wanted = copy.deepcopy(STARTS[case.name]).double()
    loss = InfoNCELoss(temperature=0.1, **case.loss).double()
    if plan := plan_freezing(wanted, *(case.arguments.get(f"{kind}_modules") for kind in ("trainable", "frozen"))):
        plan.apply(wanted)
    named = dict(wanted.named_parameters()) | dict(loss.named_parameters())
    before = {name: p.detach().clone() for name, p in named.items()}
    reference_gradients(case, wanted, loss, len(trainer.train_dataset))
    after = {name: p.detach() for name, p in named.items()}
    moved = torch.cat([(after[n] - before[n]).flatten() for n in before]).norm()
    off = torch.cat([(after[n] - found[n]).flatten() for n in before]).norm()
    own = [n for n, _ in loss.named_parameters()]
    return {
        "engine": type(trainer.model_wrapped).__name__,
        "stage": trainer.model_wrapped.zero_optimization_stage(),
        "moved": moved.item(),
        "error": (off / moved).item(),
        "loss_moved": [abs((after[n] - before[n]).item()) for n in own],
        "loss_error": [abs(((after[n] - found[n]) / (after[n] - before[n])).item()) for n in own],
        "frozen": [torch.equal(found[n], before[n]) for n, p in named.items() if not p.requires_grad],
    }


# ---- what is sent ----


def reductions(**arguments) -> list[int]:
    """Reductions of gradients in two steps of several chunks: how many, of how many elements, per rank."""
    from deepspeed import comm

    sent, names = Sent(), [n for n in ("all_reduce", "reduce", "reduce_scatter_fn", "reduce_scatter_tensor")]
    own = {name: getattr(comm, name) for name in names if hasattr(comm, name)}
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(folder, InfoNCELoss(temperature=0.1), **arguments)
        for name, function in own.items():
            setattr(comm, name, sent.watch(function))
        try:
            trainer.train()
        finally:
            for name, function in own.items():
                setattr(comm, name, function)
    return [sent.count, sent.elements]


# ---- what is not finite ----


class TwiceInfinite(InfiniteOnRankOne):
    bad_steps = (2, 3)


def own_loss() -> dict:
    """The same for a model's own loss, which Trainer back-propagates."""
    rows = [{"input_ids": torch.arange(1, 11) + i, "labels": torch.tensor(i % 2)} for i in range(40)]
    with tempfile.TemporaryDirectory() as folder:
        args = DistTrainingArguments(
            output_dir=folder, per_device_train_batch_size=4, max_steps=5, max_nonfinite_steps=2, report_to=[],
            disable_tqdm=True, save_strategy="no", remove_unused_columns=False,
        )  # fmt: skip
        trainer = DistTrainer(CLASSIFIER, args, train_dataset=rows)
        trainer.add_callback(weights := Weights())
        try:
            trainer.train()
        except RunError as error:
            return {"message": str(error), "moved": [not torch.equal(*pair) for pair in pairs(weights.seen)]}
    return {}


class Weights(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_step_end(self, args, state, control, model=None, **others):
        self.seen.append(torch.cat([w.flatten() for w in whole_weights(model).values()]))


def bad_steps(limit: int, **arguments) -> dict:
    """Five steps, of which the second and third are not finite on one of two ranks."""
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        trainer = make_trainer(
            folder[0], TwiceInfinite(temperature=0.1, learnable_temperature=True), max_steps=5,
            optim="adamw_torch", max_nonfinite_steps=limit, save_strategy="steps", save_steps=1, max_grad_norm=1.0,
            **arguments,
        )  # fmt: skip
        trainer.add_callback(weights := Weights())
        temperatures, message = [], ""
        trainer.add_callback(_EachStep(lambda: temperatures.append(trainer.loss_parameters()[0].item())))
        try:
            trainer.train()
        except RunError as error:
            message = str(error)
        dist.barrier()
        saved = sorted(path.parent.name for path in Path(folder[0]).glob("checkpoint-*/manifest.json"))
        dist.barrier()
    return {
        "moved": [not torch.equal(*pair) for pair in pairs(weights.seen)],
        "temperature_moved": [a != b for a, b in pairs(temperatures)],
        "finite": bool(weights.seen[-1].isfinite().all()),
        "total": trainer.health.guard.total,
        "message": message,
        "saved": saved,
    }


def passes_that_differ() -> dict:
    """From the second step on rank 1 draws noise that is not replayed."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(
            folder, InfoNCELoss(temperature=0.1, learnable_temperature=True), max_steps=3, optim="adamw_torch"
        )
        trainer.add_callback(weights := Weights())
        last = next(m for name, m in trainer.bare_model.named_modules() if name.endswith("layer.1.output.dense"))
        own = np.random.default_rng(0)
        is_bad = lambda: bool(weights.seen) and rank() == 1  # noqa: E731
        last.register_forward_hook(lambda module, given, out: out * (1 + own.random() if is_bad() else 1))
        temperatures, message = [], ""
        trainer.add_callback(read := _EachStep(lambda: temperatures.append(trainer.loss_parameters()[0].item())))
        try:
            trainer.train()
        except RunError as error:
            message = str(error)
        for each in (weights, read):
            each.on_step_end(None, None, None, model=trainer.model_wrapped)
    moved = [not torch.equal(*pair) for pair in pairs(weights.seen)]
    return {"message": message, "moved": moved, "temperature_moved": [a != b for a, b in pairs(temperatures)]}


def pairs(of_steps: list) -> list[tuple]:
    return list(zip(of_steps, of_steps[1:], strict=False))


class _EachStep(TrainerCallback):
    def __init__(self, call):
        self.call = call

    def on_step_end(self, *arguments, **options):
        self.call()


# ---- checkpoints ----


def resumed(**arguments) -> dict:
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch"} | arguments
        make_loss = lambda: InfoNCELoss(temperature=0.1, learnable_temperature=True)  # noqa: E731
        whole = make_trainer(folder[0], make_loss(), **options)
        whole.train()
        checkpoint = Path(folder[0], "checkpoint-2")
        again = make_trainer(folder[0], make_loss(), **options)
        again.train(resume_from_checkpoint=str(checkpoint))
        ended, repeated = (
            whole_weights(t.model) | {n: p.detach() for n, p in t.loss.named_parameters()} for t in (whole, again)
        )
        start = whole_weights(STARTS["chunks of 4"])
        found = {
            "equal": all(torch.equal(ended[n], repeated[n]) for n in ended),
            "moved": max((ended[n] - start[n]).abs().max().item() for n in start),
            "trained_equal": trained_equal(checkpoint.with_name("checkpoint-4"), ended),
            "files": {f.relative_to(checkpoint).as_posix(): f.stat().st_size for f in checkpoint.rglob("*.*")},
            "in_manifest": sorted(json.loads((checkpoint / "manifest.json").read_text())["files"]),
        }
        dist.barrier()
        found |= {"broken": broken(checkpoint, make_loss(), **options)}
        dist.barrier()
    return found


def trained_equal(checkpoint: Path, ended: dict[str, torch.Tensor]) -> list[bool]:
    """What `hf-dist merge` and other modes would read, of a run with frozen parts."""
    path = checkpoint / trainable.WEIGHTS
    stored = load_file(path) if path.is_file() else {}
    return [torch.equal(tensor.double(), ended[name]) for name, tensor in stored.items()]


def broken(checkpoint: Path, loss: InfoNCELoss, **options) -> dict[str, str]:
    """What is said of a shard that runs code, is short, is gone."""
    shard, said = sorted(checkpoint.glob("global_step*/*optim_states.pt"))[-1], {}
    trainer = make_trainer(str(checkpoint.parent), loss, **options)
    for what in ("altered", "short", "gone"):
        dist.barrier()
        if rank() == 0:
            if what == "gone":
                shard.unlink()
            else:
                shard.write_bytes(shard.read_bytes()[:-1] + (b"x" if what == "altered" else b""))
        dist.barrier()
        try:
            trainer.train(resume_from_checkpoint=str(checkpoint))
        except UsageError as error:
            said[what] = str(error)
    return said | {"shard": shard.name}


def refusal(**arguments) -> str:
    with tempfile.TemporaryDirectory() as folder:
        try:
            make_trainer(folder, InfoNCELoss(temperature=0.1), **arguments)
        except UsageError as error:
            return str(error)
    return "not refused"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", required=True)
    parser.add_argument("--only", nargs="+", help="these cases, and nothing beside them")
    options = parser.parse_args()
    gc.freeze()  # or every end of a training looks at all that was imported
    found: dict = {}
    DistTrainingArguments(output_dir="unused")  # the process group
    for case in CASES:
        if options.only is None or case.name in options.only:
            case.steps = STEPS
            found[case.name] = measure(case)
            if rank() == 0:
                print(case.name, found[case.name], flush=True)
    rest = {
        "refused": lambda: refusal(gradient_cache_chunk_size="auto"),
        "sent": lambda: {mode: reductions(gradient_cache_fsdp=mode) for mode in ("speed", "memory")},
        "two bad steps": lambda: bad_steps(20),
        "too many bad steps": lambda: bad_steps(2),
        "bad steps of a model's own loss": own_loss,
        "passes that differ": passes_that_differ,
        "resumed": resumed,
        "resumed, frozen backbone": lambda: resumed(trainable_modules=["projection"]),
    }
    for name, run in rest.items():
        if options.only is None or name in options.only:
            found[name] = run()
            if rank() == 0:
                print(name, found[name], flush=True)
    if rank() == 0:
        Path(options.output).write_text(json.dumps(found, indent=1), encoding="utf-8")
    leave_together()


if __name__ == "__main__":
    main()

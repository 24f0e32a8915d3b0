r"""One process under DeepSpeed: SGD steps through the gradient cache beside naive full-batch steps in float64.

    accelerate launch --config_file configs/accelerate/deepspeed_zero2.yaml tests/distributed/deepspeed_worker.py \
        --output found.json
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from hf_dist_ext.distributed import launched_processes, rank
from hf_dist_ext.errors import UsageError
from hf_dist_ext.losses import InfoNCELoss
from hf_dist_ext.modeling import EmbeddingModel
from hf_dist_ext.trainer import DistTrainer
from hf_dist_ext.training_args import DistTrainingArguments
from tests.parity.exactness_worker import BATCH, BERT, Case, collate, reference_gradients

RATE, STEPS = 0.1, 2
CASES = {
    "no cache": {"gradient_cache_chunk_size": None},
    "chunks of 4": {},
    "2 graphs kept": {"gradient_cache_keep_graph": 2},
    "accumulation": {"gradient_accumulation_steps": 2},
    "max_grad_norm": {"max_grad_norm": 0.01},
    "frozen layer": {"frozen_modules": ["encoder.layer.0"]},
}


def whole_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {name: p.detach().double().clone() for name, p in model.named_parameters()}


torch.manual_seed(0)
# Made before any trainer: with ZeRO-3 running, transformers builds models sharded.
START = EmbeddingModel.from_config(BERT)
SPARE = [copy.deepcopy(START) for _ in range(len(CASES) + 6)]


def make_trainer(folder: str, loss: InfoNCELoss, **arguments) -> DistTrainer:
    model = SPARE.pop()
    defaults = {"gradient_cache_chunk_size": 4, "max_grad_norm": 0, "max_steps": STEPS, "save_strategy": "no"}
    args = DistTrainingArguments(
        output_dir=folder, per_device_train_batch_size=BATCH, optim="sgd", learning_rate=RATE, report_to=[], seed=7,
        lr_scheduler_type="constant", disable_tqdm=True, logging_strategy="no", train_sampling_strategy="sequential",
        **(defaults | arguments),
    )  # fmt: skip
    case = Case("deepspeed")
    return DistTrainer(
        model,
        args,
        data_collator=lambda rows: collate(case, rows, rank()),
        train_dataset=list(range(STEPS * args.gradient_accumulation_steps * BATCH * launched_processes())),
        loss=loss,
    )


def measure(name: str, arguments: dict) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(folder, InfoNCELoss(temperature=0.1), **arguments)
        try:
            trainer.train()
        except UsageError as error:
            return {"refused": str(error)}
    found = whole_weights(trainer.model)
    wanted = copy.deepcopy(START).double()
    if "frozen_modules" in arguments:
        wanted.backbone.encoder.layer[0].requires_grad_(False)
    case = Case(name, arguments={k: v for k, v in arguments.items() if k != "frozen_modules"}, steps=STEPS)
    before = {name: p.detach().clone() for name, p in wanted.named_parameters()}
    reference_gradients(case, wanted, InfoNCELoss(temperature=0.1).double(), len(trainer.train_dataset))
    after = {name: p.detach() for name, p in wanted.named_parameters()}
    moved = torch.cat([(after[n] - before[n]).flatten() for n in before]).norm()
    off = torch.cat([(after[n] - found[n]).flatten() for n in before]).norm()
    return {
        "engine": type(trainer.model_wrapped).__name__,
        "stage": trainer.model_wrapped.zero_optimization_stage(),
        "moved": moved.item(),
        "error": (off / moved).item(),
        "frozen": [torch.equal(found[n], before[n]) for n, p in wanted.named_parameters() if not p.requires_grad],
    }


def resumed() -> dict:
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "trust_checkpoint": True}
        whole = make_trainer(folder[0], InfoNCELoss(temperature=0.1), **options)
        whole.train()
        again = make_trainer(folder[0], InfoNCELoss(temperature=0.1), **options)
        again.train(resume_from_checkpoint=str(Path(folder[0], "checkpoint-2")))
        ended, repeated = whole_weights(whole.model), whole_weights(again.model)
        dist.barrier()
    return {"equal": all(torch.equal(ended[n], repeated[n]) for n in ended)}


def refusal(**arguments) -> str:
    learnable = arguments.pop("learnable", False)
    with tempfile.TemporaryDirectory() as folder:
        try:
            make_trainer(folder, InfoNCELoss(temperature=0.1, learnable_temperature=learnable), **arguments)
        except UsageError as error:
            return str(error)
    return "not refused"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", required=True)
    parser.add_argument("--only")
    options = parser.parse_args()
    cases = {name: a for name, a in CASES.items() if options.only in (None, name)}
    found = {name: measure(name, dict(arguments)) for name, arguments in cases.items()}
    found["refused"] = [refusal(learnable=True), refusal(gradient_cache_chunk_size="auto")]
    found["resumed"] = resumed()
    if rank() == 0:
        Path(options.output).write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()

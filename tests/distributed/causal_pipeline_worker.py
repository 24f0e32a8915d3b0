r"""Runs of causal language models, with their own loss, as a pipeline of two processes: counted, resumed, saved,
evaluated; and what is refused.

(1) a folder with a small model whose word embeddings and head are tied, by the first process
(2) one update, counted: forwards and backwards per stage, chunks under way
(3) four updates with a checkpoint after the second, in the middle of an epoch, and from that checkpoint again
(4) a run that one process does likewise, with its evaluation
(5) a tied weight that processes have drawn each for itself
(6) what is refused
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GraniteConfig,
    LlamaForSequenceClassification,
    Trainer,
    TrainingArguments,
)

from hf_dist_ext import policy
from hf_dist_ext.checkpoints import manifest, trainable
from hf_dist_ext.models.causal_lm import load_causal_lm
from hf_dist_ext.strategies.collectives import rank
from hf_dist_ext.strategies.pipeline import own_loss, schedules
from hf_dist_ext.strategies.tensors import gathered, held_here
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.distributed.pipeline_worker import Read, all_ranks, everyone, said_by
from tests.parity.causal_worker import CONFIG, LORA, TIED, Case, build, collate, loss_of_outputs

BATCH, ROWS = 6, 36  # an update takes two batches, an epoch has three of them
CHUNKS = BATCH // 2
LORA_AND_HEAD = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])


def save_base(folder: Path) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **CONFIG | TIED | {"attention_dropout": 0.1})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def rows_of(numbers: range) -> list[dict]:
    return [{"row": number} for number in numbers]


def collate_rows(rows: list[dict]) -> dict[str, torch.Tensor]:
    return collate([row["row"] for row in rows], pads_left=False)


def make_trainer(folder: Path, model, is_alone: bool = False, **more) -> Trainer:
    """`model`: or what makes one of the arguments. `is_alone`: transformers' own trainer, as one process has it."""
    options = dict(max_steps=4, save_steps=2, learning_rate=1e-2, max_grad_norm=0.5, gradient_accumulation_steps=2)
    own = {"data_collator": collate_rows}
    own |= {name: more.pop(name) for name in ("compute_metrics", "compute_loss_func", "data_collator") if name in more}
    if not is_alone:
        options |= {"pipeline_parallel_size": 2, "gradient_cache_chunk_size": 2, "preemptible": True}
    args = (TrainingArguments if is_alone else DistTrainingArguments)(
        output_dir=str(folder), per_device_train_batch_size=BATCH, per_device_eval_batch_size=4, use_cpu=True,
        report_to=[], disable_tqdm=True, logging_steps=1, seed=3, remove_unused_columns=False, **(options | more),
    )  # fmt: skip
    return (Trainer if is_alone else DistTrainer)(
        model if isinstance(model, nn.Module) else model(args), args, train_dataset=rows_of(range(ROWS)),
        eval_dataset=rows_of(range(ROWS, ROWS + 10)), **own,
    )  # fmt: skip


# ---- (2) ----


def counted(base: Path, folder: Path, **more) -> list[dict]:
    """What each rank says of one update of one batch."""
    options = {"max_steps": 1, "save_strategy": "no", "gradient_accumulation_steps": 1}
    trainer = make_trainer(folder, lambda args: load_causal_lm(base, args), **(options | more))
    held = sum(p.numel() for p in trainer.model.parameters())
    counts, flow = Counter(), own_loss._OwnLossFlow

    class Watched(flow):
        def forward(self, stage, number):
            super().forward(stage, number)
            counts["forwards"] += 1
            counts["live"] = max(counts["live"], len(self.held) + len(self.cut_in_two))

        def gradient_of_output(self, stage, number):
            counts["backwards"] += 1
            return super().gradient_of_output(stage, number)

        def message(self, kind, tensor, stage):
            counts[kind.__name__] += 1
            return super().message(kind, tensor, stage)

    own_loss._OwnLossFlow = Watched
    try:
        trainer.train()
    finally:
        own_loss._OwnLossFlow = flow
    line = trainer.strategy.line
    found = {**counts, "per_rank": line.per_rank, "chunks": line.num_chunks, "parameters": held}
    return everyone(found)


# ---- (3) ----


def weights_of(trainer: DistTrainer) -> dict[str, torch.Tensor]:
    """What this rank holds of its stages."""
    return {name: held_here(value.detach()).clone() for name, value in trainer.model.state_dict().items()}


def resumed(base: Path, folder: Path, adapters: LoraConfig | None = None, **more) -> dict:
    has_adapters = adapters is not None

    def load(args) -> nn.Module:
        model = load_causal_lm(base, args)
        torch.manual_seed(1)
        return get_peft_model(model, adapters) if has_adapters else model

    trainer = make_trainer(folder, load, **more)
    start = weights_of(trainer)
    trainer.train()
    end = weights_of(trainer)
    again = make_trainer(folder, load, **more)
    again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    now = weights_of(again)
    losses = [[line["loss"] for line in t.state.log_history if "loss" in line] for t in (trainer, again)]
    trainer.save_model(str(folder / "end"))
    trainer.accelerator.wait_for_everyone()
    facts = manifest.read(folder / "checkpoint-4")
    whole = AutoModelForCausalLM.from_pretrained(base if has_adapters else folder / "end").eval()
    if has_adapters:
        whole = PeftModel.from_pretrained(whole, folder / "end").eval()
    theirs = whole.state_dict()
    moved = torch.tensor(sum((end[n] - start[n]).double().norm().item() for n in end))
    dist.all_reduce(moved)
    # What the whole model makes of a batch, and the cut one of the same.
    batch = collate_rows(rows_of(range(5)))
    trainer.model.eval()
    with torch.no_grad():
        _, logits, _ = trainer.prediction_step(trainer.model, batch, prediction_loss_only=False)
        del batch["labels"]
        unlabelled = trainer.prediction_step(trainer.model, batch, prediction_loss_only=False)
        expected = whole(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    line, own = trainer.state.log_history[0], dict(gathered(trainer.model.state_dict(), keep=True))
    return {
        "moved": moved.item(),
        "equal": all_ranks(end.keys() == now.keys() and all(torch.equal(end[name], now[name]) for name in end)),
        "losses_equal": losses[0] == losses[1] and len(losses[0]) == 4,
        "committed": manifest.why_incomplete(folder / "checkpoint-4"),
        "files": sorted(path.name for path in (folder / "checkpoint-4").iterdir()),
        "weights_equal": all_ranks(all(torch.equal(value, theirs[name]) for name, value in own.items())),
        "logits_differ": (logits - expected).abs().max().item(),
        "unlabelled": unlabelled[0] is None and torch.equal(unlabelled[1], logits) and unlabelled[2] is None,
        "sizes": [facts[f"{kind}_parallel_size"] for kind in ("data", "tensor", "pipeline")],
        "tied": whole.get_input_embeddings().weight is whole.get_output_embeddings().weight,
        "keys": [] if has_adapters else sorted(load_file(folder / "end" / "model.safetensors")),
        "bubble": [line.get("bubble_share"), line.get("bubble_share_expected")],
        "passes": line.get("seconds_passes", 0),
    }


def goes_on_elsewhere(base: Path, folder: Path, **more) -> dict[str, bool]:
    """The end of a finished run, read by processes that have other stages: both tied weights lie on the first one."""
    trainer, found = make_trainer(folder, lambda args: load_causal_lm(base, args), **more), {}
    checkpoint = folder / "checkpoint-4"
    whole = AutoModelForCausalLM.from_pretrained(checkpoint).state_dict()
    trainer.add_callback(Read(trainer, checkpoint, whole, found))
    trainer.train(resume_from_checkpoint=str(checkpoint))
    return found


def frozen(base: Path, folder: Path, **more) -> dict:
    """A run whose checkpoints hold what trains, and the same again from the middle; the weights of its end, taken by a
    run of its own."""
    runs = [make_trainer(folder, lambda args: load_causal_lm(base, args), **more) for _ in range(2)]
    runs[0].train()
    runs[1].train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    ends = [weights_of(trainer) for trainer in runs]
    options = {"save_strategy": "no", "learning_rate": 0.0, "resume_weights_only": True, "max_steps": 1}
    taken = make_trainer(folder.with_name("taken"), lambda args: load_causal_lm(base, args), **(more | options))
    before = weights_of(taken)
    taken.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
    now = weights_of(taken)
    return {
        "equal": all_ranks(all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])),
        "taken": all_ranks(all(torch.equal(ends[0][name], now[name]) for name in now)),
        "moved": not all_ranks(all(torch.equal(before[name], now[name]) for name in now)),
        "saved": sorted(load_file(folder / "checkpoint-4" / trainable.WEIGHTS)),
    }


def streamed(folder: Path) -> list[list[float]]:
    """Losses of rows that are read one after another, and of the same rows from a stream."""
    found = []
    for is_stream in (False, True):
        trainer = make_trainer(
            folder, build(Case("tied", config=TIED)), save_strategy="no", train_sampling_strategy="sequential"
        )
        if is_stream:
            trainer.train_dataset = Dataset.from_list(rows_of(range(ROWS))).to_iterable_dataset()
        trainer.train()
        found.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
    return found


# ---- (4) ----


def mean_of_targets(prediction) -> dict[str, float]:
    """The logit of the token that comes, which is sensitive to everything."""
    labels, logits = prediction.label_ids[:, 1:], prediction.predictions[:, :-1]
    found = np.take_along_axis(logits, labels.clip(min=0)[..., None], axis=2)[..., 0]
    return {"target": found[labels != -100].mean(), "rows": len(labels)}


def trained(folder: Path, **more) -> tuple[DistTrainer, dict[str, float]]:
    """A float64 run without dropout, and its evaluation."""
    options = {
        "save_strategy": "no",
        "include_num_input_tokens_seen": "non_padding",
        "compute_metrics": mean_of_targets,
    }
    trainer = make_trainer(folder, build(Case("tied", config=TIED)), **(options | more))
    trainer.train()
    return trainer, trainer.evaluate()


def compared(folder: Path, is_alone: bool = False, **more) -> dict:
    trainer, evaluation = trained(folder, is_alone=is_alone, **more)
    found = {
        "evaluation": evaluation,
        "losses": [[line["loss"], line["grad_norm"]] for line in trainer.state.log_history if "loss" in line],
        "tokens": trainer.state.num_input_tokens_seen,
    }
    whole = trainer.model.state_dict() if is_alone else trainer.whole_weights()
    if rank() == 0:
        folder.mkdir(exist_ok=True)
        torch.save(whole, folder / "weights.pt")
    if not is_alone:
        found["copies_equal"] = copies_are_equal(trainer)
    return found


def copies_are_equal(trainer: DistTrainer) -> bool:
    """Of the tied weight, on the first stage and the last one."""
    line = trainer.strategy.line
    name = "model.embed_tokens.weight" if line.rank == 0 else "lm_head.weight"
    ((_, copy),) = gathered({name: trainer.model.get_parameter(name)}, keep=True)
    of_stages = [torch.empty_like(copy) for _ in range(line.size)]
    dist.all_gather(of_stages, copy, group=line.group)
    return all_ranks(torch.equal(of_stages[0], of_stages[-1]))


def not_finite(folder: Path, **more) -> dict[str, bool]:
    """The loss of one update is NaN, which the last stage alone sees."""
    trainer = make_trainer(
        folder, build(Case("tied", config=TIED)), max_nonfinite_steps=3, save_strategy="no",
        compute_loss_func=lambda *given, **items: broken(*given, **items), **more,
    )  # fmt: skip

    def broken(outputs, labels, num_items_in_batch=None):
        loss = loss_of_outputs(outputs, labels, num_items_in_batch)
        return loss * float("nan") if trainer.state.global_step == 1 else loss

    trainer.train()
    skipped = [line.get("nonfinite_steps") for line in trainer.state.log_history][:4]
    is_finite = all(held_here(p).isfinite().all() for p in trainer.model.parameters())
    return {"skipped_once": all_ranks(skipped == [None, 1, 1, 1]), "is_finite": all_ranks(is_finite)}


# ---- (5) ----


def drawn(folder: Path, **more) -> dict[str, bool]:
    torch.manual_seed(rank())
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **CONFIG | TIED))
    trainer = make_trainer(folder, model, save_strategy="no", max_steps=2, **more)
    found = {"before": copies_are_equal(trainer)}
    trainer.train()
    return found | {"after": copies_are_equal(trainer)}


# ---- (6) ----


def refusals(base: Path, folder: Path) -> dict[str, str]:
    tied = Case("tied", config=TIED)

    def attempt(model=None, trains: bool = False, evaluates: bool = False, **more):
        def run() -> None:
            trainer = make_trainer(folder / "no", build(tied) if model is None else model, save_strategy="no", **more)
            if trains:
                trainer.train()
            if evaluates:
                trainer.evaluate()

        return said_by(run)

    def mean(outputs, labels, num_items_in_batch=None):
        return outputs["logits"].mean()

    def mean_in_evaluation(outputs, labels, num_items_in_batch=None):
        return (loss_of_outputs if torch.is_grad_enabled() else mean)(outputs, labels, num_items_in_batch)

    def without_labels(rows):
        return {name: value for name, value in collate_rows(rows).items() if name != "labels"}

    def with_lengths(rows):
        return collate_rows(rows) | {"lengths": torch.tensor([1, 2, 3])}

    takes_no_items = build(tied)
    takes_no_items.accepts_loss_kwargs = False
    classifier = LlamaForSequenceClassification(build(tied).config)
    scaling = AutoModelForCausalLM.from_config(granite())
    return {
        "no chunks": attempt(gradient_cache_chunk_size=None),
        "tokens": attempt(gradient_cache_chunk_size=None, gradient_cache_chunk_tokens=64),
        "both": attempt(gradient_cache_chunk_tokens=64),
        "mean": attempt(compute_loss_func=mean, trains=True),
        "mean, evaluated": attempt(compute_loss_func=mean, evaluates=True),
        "mean in evaluations": attempt(compute_loss_func=mean_in_evaluation, trains=True, evaluates=True, max_steps=1),
        "other labels": attempt(data_collator=without_labels, label_names=["input_ids"], evaluates=True),
        "no items": attempt(takes_no_items),
        "no labels": attempt(data_collator=without_labels, trains=True),
        "other rows": attempt(data_collator=with_lengths, trains=True),
        "no rows": attempt(data_collator=lambda rows: {"labels": torch.zeros(6, 3)}, trains=True),
        "batch size": attempt(auto_find_batch_size=True),
        "dispatch": attempt(accelerator_config={"dispatch_batches": True}),
        "optimizer": attempt(optim="galore_adamw_layerwise", optim_target_modules=["q_proj"]),
        "noise": attempt(neftune_noise_alpha=5.0),
        "merging": attempt(get_peft_model(build(tied), LORA), frozen_modules=["norm"], trains=True),
        "classifier": attempt(classifier),
        "architecture": attempt(scaling),
        "layers": attempt(pipeline_split=[6]),
    }


def granite():
    return GraniteConfig(
        vocab_size=59, hidden_size=32, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48,
    )  # fmt: skip


def found_alone(_, folder: Path) -> dict:
    return compared(folder / "alone", is_alone=True)


def found_in(_, folder: Path, fields: dict, parts: tuple[str, ...]) -> dict:
    """What these parts find; `fields`: of every run but the counted ones."""
    DistTrainingArguments(output_dir=str(folder / "none"), use_cpu=True, report_to=[])  # makes the process group
    base = folder / "base"
    if rank() == 0:  # (1)
        save_base(base)
    dist.barrier()
    cuts = fields.get("sharding") != "FULL_SHARD"  # whether schedules may that compute gradients of weights later
    everything = {
        **{
            name: lambda name=name: counted(
                base, folder / "counted", pipeline_schedule=name,
                pipeline_stages_per_rank=None if name in policy.FIXED_STAGES_PER_RANK else 2,
            )
            for name in schedules.SCHEDULES
        },
        "resumed": lambda: resumed(base, folder / "run", **fields),
        "elsewhere": lambda: goes_on_elsewhere(
            base, folder / "run", pipeline_schedule="zero_bubble_v" if cuts else "interleaved_1f1b", **fields
        ),
        "adapters": lambda: resumed(
            base, folder / "adapters", LORA, pipeline_schedule="zero_bubble" if cuts else "1f1b", **fields
        ),
        "adapters, head": lambda: resumed(base, folder / "adapters_head", LORA_AND_HEAD, **fields),
        "frozen": lambda: frozen(
            base, folder / "frozen", frozen_modules=["layers.0", "layers.3", "norm"], **fields
        ),
        "head": lambda: frozen(base, folder / "head", trainable_modules=["lm_head"], **fields),
        "streamed": lambda: streamed(folder / "streamed"),
        "compared": lambda: compared(folder / "compared", **fields),
        "not_finite": lambda: not_finite(folder / "not_finite", **fields),
        "drawn": lambda: drawn(folder / "drawn", **fields),
        "said": lambda: refusals(base, folder),
    }  # fmt: skip
    return {name: everything[name]() for name in parts}

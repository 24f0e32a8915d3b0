r"""One process of the exactness table's causal language models: what DistTrainer hands to the optimizer in a pipeline,
against naive lines of one process over the rows of all of them.

(1) a case says the model, the arguments and who trains; rows are made from their number alone
(2) the reference adds up the losses of all tokens of an update, divides once, and calls autograd, in float64
(3) the trainer runs the same steps; its gradients are read just before the optimizer uses them
(4) the figure is |trainer - reference| / |reference| over all gradients and steps, the largest of all ranks
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback

from hf_dist_ext import launched
from hf_dist_ext.frozen.who_trains import plan_freezing
from hf_dist_ext.strategies.collectives import rank
from hf_dist_ext.strategies.tensors import gathered
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.tiny_models import CHECKPOINTING

BATCH, WIDTH, LAYERS, LEARNING_RATE, SMOOTHING = 6, 14, 6, 0.1, 0.2
CONFIG = dict(vocab_size=59, hidden_size=32, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2)
CONFIG |= dict(intermediate_size=48, max_position_embeddings=64, head_dim=8, pad_token_id=0, tie_word_embeddings=False)
LORA = LoraConfig(r=2, target_modules=["q_proj", "v_proj", "o_proj"])

pipeline_size = 1  # ranks that hold the same rows: stages, as --arguments say, times those that split a layer


@dataclass
class Case:
    """What differs from the base case: a Llama, rows of unequal lengths padded on the right, two rows per chunk."""

    name: str
    model: str = "llama"
    config: dict = field(default_factory=dict)
    arguments: dict = field(default_factory=dict)
    steps: int = 1
    batch: int = BATCH  # rows per pipeline and micro-batch
    last_batch_is_alone: bool = False  # in its window
    last_is_shorter: bool = False  # the last pipeline's batches lack three rows, and so a chunk
    pads_left: bool = False
    has_lora: bool = False
    loss: str = "model"  # model | smoothed | function | subclass
    dtype: str = "float64"
    is_exact_loss: bool = True  # a loss in float64 in place of the model's own, which computes in float32
    is_like: dict | None = None  # the reference is the same run with these arguments
    tolerance: float = 1e-10


TIED = {"tie_word_embeddings": True}
DROPOUT = {"attention_dropout": 0.3}
CASES = [
    Case("causal LM", steps=2),
    Case("causal LM, tied word embeddings", config=TIED, steps=2, arguments={"max_grad_norm": 0.05}),
    Case("causal LM, Qwen3, tied, left padding", model="qwen3", config=TIED, pads_left=True),
    Case("causal LM, Qwen2", model="qwen2"),
    Case("causal LM, Mistral", model="mistral"),
    Case("causal LM, accumulation 2, short last window, clipped", steps=2, last_batch_is_alone=True,
         arguments={"gradient_accumulation_steps": 2, "max_grad_norm": 0.05}),
    Case("causal LM, tokens per device", arguments={"average_tokens_across_devices": False}),
    Case("causal LM, chunk 4, does not divide", arguments={"gradient_cache_chunk_size": 4}),
    Case("causal LM, 7 chunks, a schedule in rounds takes 8", batch=7, arguments={"gradient_cache_chunk_size": 1}),
    Case("causal LM, one chunk", arguments={"gradient_cache_chunk_size": 9}),
    Case("causal LM, other numbers of chunks per pipeline", last_is_shorter=True),
    Case("causal LM, first layers frozen",
         arguments={"frozen_modules": ["embed_tokens", "layers.0", "layers.1", "layers.2"]}),
    Case("causal LM, later layers frozen", arguments={"frozen_modules": ["layers.2", "layers.3", "layers.4", "norm"]}),
    Case("causal LM, head alone trains, tied", config=TIED, arguments={"trainable_modules": ["lm_head"]}),
    Case("causal LM, LoRA", has_lora=True, config=TIED),
    Case("causal LM, gradient checkpointing", arguments={CHECKPOINTING: True}),
    Case("causal LM, dropout, gradient checkpointing replays it", config=DROPOUT, arguments={CHECKPOINTING: True},
         is_like={CHECKPOINTING: False}),
    Case("causal LM, label smoothing", loss="smoothed", arguments={"label_smoothing_factor": SMOOTHING},
         tolerance=1e-6),  # the smoother adds up in float32
    Case("causal LM, compute_loss_func", loss="function"),
    Case("causal LM, compute_loss of a subclass", loss="subclass"),
    Case("causal LM, its own float32 loss", is_exact_loss=False, tolerance=1e-6),
    Case("causal LM, bf16 autocast", dtype="float32", arguments={"bf16": True}, tolerance=3e-2),
]  # fmt: skip


def num_groups() -> int:
    """Pipelines."""
    return launched.processes() // pipeline_size


def build(case: Case) -> nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(case.model, **CONFIG | case.config))
    # Their RMSNorm rounds to float32 inside, where a difference in the last float64 bit becomes one of 1e-8.
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if "RMSNorm" in type(child).__name__:
                setattr(module, name, nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon))
    if case.is_exact_loss:
        model.loss_function = sum_over_tokens
    if case.has_lora:
        model = get_peft_model(model, LORA)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)  # zero at init would make the gradient of lora_A vanish
    return model.to(getattr(torch, case.dtype)).train()


def rows_of(case: Case, rows: list[int], group: int) -> list[int]:
    """Those of a batch that a pipeline has."""
    return rows[:-3] if case.last_is_shorter and group == num_groups() - 1 else rows


def collate(rows: list[int], pads_left: bool) -> dict[str, torch.Tensor]:
    ids = torch.zeros(len(rows), WIDTH, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for i, row in enumerate(rows):
        generator = torch.Generator().manual_seed(row)
        length = int(torch.randint(3, WIDTH + 1, (), generator=generator))
        real = slice(WIDTH - length, WIDTH) if pads_left else slice(0, length)
        ids[i, real] = torch.randint(1, 59, (length,), generator=generator)
        mask[i, real] = 1
        labels[i, real] = ids[i, real]
        labels[i, real.start + row % 3] = -100  # a token that is no target
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


# ---- (2) ----


def sum_over_tokens(logits, labels, vocab_size=None, num_items_in_batch=None, **options) -> torch.Tensor:
    own = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum", ignore_index=-100)
    return own / num_items_in_batch


def loss_of_outputs(outputs, labels, num_items_in_batch=None) -> torch.Tensor:
    """For `compute_loss_func`: no cross entropy, but a sum over tokens as well."""
    logits, labels = outputs["logits"][:, :-1], labels[:, 1:]
    found = logits.gather(2, labels.clamp(min=0)[..., None])[..., 0]
    return ((found - 1) ** 2 * (labels != -100)).sum() / num_items_in_batch


def naive_sum(case: Case, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=case.arguments.get("bf16", False)):
        outputs = model(batch["input_ids"], attention_mask=batch["attention_mask"])
    logits = outputs.logits.to(getattr(torch, case.dtype))
    if case.loss in ("function", "subclass"):
        return loss_of_outputs({"logits": logits}, batch["labels"], 1)
    smoothing = SMOOTHING if case.loss == "smoothed" else 0.0
    labels = batch["labels"][:, 1:].flatten()
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels, reduction="sum", label_smoothing=smoothing)


def reference(case: Case, model: nn.Module, num_rows: int) -> tuple[list[dict], list[float]]:
    """Gradients of every optimizer step by name, and the losses."""
    freeze = [case.arguments.get(f"{kind}_modules") for kind in ("trainable", "frozen")]
    if plan := plan_freezing(model, *freeze):
        plan.apply(model)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(trained.values(), lr=LEARNING_RATE)
    order, of_steps, losses = list(range(num_rows)), [], []
    batches = [order[i : i + case.batch] for i in range(0, num_rows, case.batch)]
    per_update = case.arguments.get("gradient_accumulation_steps", 1) * num_groups()
    is_per_device = not case.arguments.get("average_tokens_across_devices", True)
    for start in range(0, len(batches), per_update):
        window = [
            collate(rows_of(case, rows, number % num_groups()), case.pads_left)
            for number, rows in enumerate(batches[start : start + per_update])
        ]
        counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in window]
        optimizer.zero_grad()
        value = 0.0
        for batch, count in zip(window, counts, strict=True):
            loss = naive_sum(case, model, batch) / (count * len(window) if is_per_device else sum(counts))
            loss.backward()
            value += loss.item()
        if case.arguments.get("max_grad_norm"):
            nn.utils.clip_grad_norm_(trained.values(), case.arguments["max_grad_norm"])
        of_steps.append({name: p.grad.clone() for name, p in trained.items()})
        losses.append(value)
        optimizer.step()
    return of_steps, losses


# ---- (3) ----


class GradientRecorder(TrainerCallback):
    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **others):
        found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        assert all(g is not None for g in found.values()), "a trainable parameter has no gradient"
        self.steps.append(dict(gathered(found, keep=True)))


class Overriding(DistTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """`inputs` are those of a batch, whichever stage runs."""
        assert inputs["input_ids"].shape == inputs["labels"].shape
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = loss_of_outputs(outputs, labels, num_items_in_batch) * self.loss_factor
        return (loss, outputs) if return_outputs else loss

    @property
    def loss_factor(self) -> int:
        """As Trainer: gradients are averaged over pipelines."""
        return num_groups()


def trained(case: Case, num_rows: int, **more) -> tuple[list[dict], list[float]]:
    """The same of a run."""
    recorder = GradientRecorder()
    arguments = dict(gradient_cache_chunk_size=2, max_grad_norm=0, max_steps=case.steps) | case.arguments | more
    with tempfile.TemporaryDirectory() as folder:
        args = DistTrainingArguments(
            output_dir=folder, per_device_train_batch_size=case.batch, optim="sgd", learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant", save_strategy="no", report_to=[], disable_tqdm=True, logging_steps=1,
            train_sampling_strategy="sequential", use_cpu=True, seed=7, save_on_each_node=False, **arguments,
        )  # fmt: skip
        trainer = (Overriding if case.loss == "subclass" else DistTrainer)(
            build(case), args, train_dataset=[{"row": row} for row in range(num_rows)], callbacks=[recorder],
            data_collator=lambda rows: collate(
                rows_of(case, [row["row"] for row in rows], rank() // pipeline_size), case.pads_left
            ),
            compute_loss_func=loss_of_outputs if case.loss == "function" else None,
        )  # fmt: skip
        args.remove_unused_columns = False
        trainer.train()
    return recorder.steps, [line["loss"] for line in trainer.state.log_history if "loss" in line]


# ---- (4) ----


def measure(case: Case) -> float:
    num_batches = case.steps * case.arguments.get("gradient_accumulation_steps", 1) * num_groups()
    if case.last_batch_is_alone:
        num_batches -= num_groups()
    num_rows = num_batches * case.batch
    if case.is_like is None:
        expected, losses = reference(case, build(case), num_rows)
    else:
        expected, losses = trained(case, num_rows, **case.is_like)
        together: list = [None] * launched.processes()
        dist.all_gather_object(together, expected)
        expected = [
            {n: g for of_rank in of_step for n, g in of_rank.items()} for of_step in zip(*together, strict=True)
        ]
    found, reported = trained(case, num_rows)
    assert len(found) == len(expected) == case.steps, (len(found), len(expected))
    assert reported == [torch.tensor(loss).isclose(torch.tensor(own), rtol=max(1e-5, case.tolerance)) and own
                        for loss, own in zip(losses, reported, strict=True)], (reported, losses)  # fmt: skip
    worst = 0.0
    for of_step, wanted in zip(found, expected, strict=True):
        everyone: list = [None] * launched.processes()
        dist.all_gather_object(everyone, list(of_step))
        assert set().union(*everyone) == wanted.keys()
        scale = torch.cat([w.flatten() for w in wanted.values()]).norm()
        assert scale > 0, "a comparison of zeros proves nothing"
        parts = [(own - wanted[name]).flatten() for name, own in of_step.items()]  # none where a stage trains nothing
        worst = max(worst, float(torch.cat([*parts, scale.new_zeros(0)]).norm() / scale))
    return worst


def errors_of(_, arguments: dict, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Case -> error and bound, of these cases or of all; `arguments` are put over every case's own."""
    global pipeline_size
    pipeline_size = arguments["pipeline_parallel_size"] * launched.mesh_size("tp")
    errors = {}
    for case in CASES:
        if not names or case.name in names:
            case.arguments |= arguments
            own = torch.tensor(measure(case), dtype=torch.float64)
            dist.all_reduce(own, op=dist.ReduceOp.MAX)
            errors[case.name] = {"error": own.item(), "tolerance": case.tolerance}
    return errors

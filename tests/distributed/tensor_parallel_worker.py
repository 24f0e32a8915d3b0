"""Runs of DistTrainer under tensor parallelism, in groups of two: resumed, saved, evaluated; and what is refused.

(1) a folder with a small Qwen3, by the first process
(2) four steps with a checkpoint after the second, and from that checkpoint again; with frozen parts too
(3) the folder of the end, loaded by every process whole; an evaluation; what is refused
(4) upstream: what two backwards leave in the gradients of a split model
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModel, Qwen3Config, TrainerCallback
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from hf_dist_ext import launched
from hf_dist_ext.checkpoints import manifest
from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.errors import UsageError
from hf_dist_ext.strategies import splitting
from hf_dist_ext.strategies.collectives import rank
from hf_dist_ext.strategies.tensors import gathered
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.tiny_models import around, embed, loaded

ROWS, BATCH = 36, 4
LORA = LoraConfig(r=2, target_modules=["q_proj"])


def save_base(folder: Path) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, attention_dropout=0.1,
    )  # fmt: skip
    around(AutoModel.from_config(config), pooling="last").save_pretrained(str(folder))


def collate(rows: list[int]) -> dict:
    batch = {}
    for column, width in (("query", 5), ("positive", 9)):
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            generator = torch.Generator().manual_seed(100 * row + width)
            length = int(torch.randint(2, width + 1, (), generator=generator))
            ids[i, :length] = torch.randint(1, 99, (length,), generator=generator)
            mask[i, :length] = 1
        batch[column] = {"input_ids": ids, "attention_mask": mask}
    return batch


def make_trainer(
    base: Path, folder: Path, is_split: bool = True, adapters: LoraConfig | None = None, **more
) -> DistTrainer:
    torch.manual_seed(rank())  # a new projection is the first process's all the same
    config = splitting.launched_config() if is_split else None
    model = loaded(base, projection_dim=16, distributed_config=config)
    options = dict(max_steps=4, save_steps=2, learning_rate=1e-2, max_grad_norm=0.5, gradient_accumulation_steps=2)
    options |= {"preemptible": True} | more
    args = DistTrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=BATCH, per_device_eval_batch_size=BATCH, use_cpu=True,
        report_to=[], disable_tqdm=True, gradient_cache_chunk_size=3, logging_steps=1, seed=3, **options,
    )  # fmt: skip
    if adapters is not None:
        model.requires_grad_(False).transformers_model.add_adapter(adapters)
    return DistTrainer(
        model=model, args=args, loss=InfoNCELoss(0.1, learnable_temperature=True), data_collator=collate,
        train_dataset=list(range(ROWS)), eval_dataset=list(range(ROWS, ROWS + 10)),
    )  # fmt: skip


def collate_repeated(rows: list[int]) -> dict:
    """Two queries per document, and their ids."""
    documents = [row // 2 for row in rows]
    ids = {"query": torch.tensor(rows), "positive": torch.tensor(documents)}
    return {"query": collate(rows)["query"], "positive": collate(documents)["positive"], "ids": ids}


def evaluated(base: Path, folder: Path) -> dict[str, float]:
    trainer = make_trainer(base, folder, save_strategy="no")
    trainer.data_collator = collate_repeated
    return trainer.evaluate()


def weights_of(trainer: DistTrainer) -> dict[str, torch.Tensor]:
    tensors = trainer.model.state_dict() | {f"loss.{k}": v for k, v in trainer.loss.state_dict().items()}
    return {name: value.clone() for name, value in gathered(tensors, keep=True)}


def largest_difference(one: dict, other: dict) -> float:
    assert one.keys() == other.keys()
    return max((one[name].double() - other[name].double()).abs().max().item() for name in one)


def resumed(base: Path, folder: Path, **more) -> dict:
    trainer = make_trainer(base, folder, **more)
    start = weights_of(trainer)
    trainer.train()
    end = weights_of(trainer)
    again = make_trainer(base, folder, **more)
    again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    now = weights_of(again)
    losses = [[line["loss"] for line in t.state.log_history if "loss" in line] for t in (trainer, again)]
    trainer.evaluate()  # behind which FSDP2 has weights whole
    trainer.save_model(str(folder / "end"))
    trainer.accelerator.wait_for_everyone()
    found = {
        "moved": largest_difference(start, end),
        "equal": end.keys() == now.keys() and all(torch.equal(end[name], now[name]) for name in end),
        "losses_equal": losses[0] == losses[1] and len(losses[0]) == 4,
        "committed": manifest.why_incomplete(folder / "checkpoint-4"),
        "facts": {
            name: value
            for name, value in manifest.read(folder / "checkpoint-4").items()
            if name in ("world_size", "data_parallel_size", "tensor_parallel_size", "samples_seen", "sharding")
        },
        "rows_per_step": trainer.data_position.rows_per_micro_batch,
        "logged_batch": trainer.state.log_history[0]["contrastive_batch_size"],
        "files": sorted(path.name for path in (folder / "checkpoint-4").iterdir()),
    }
    whole = loaded(folder / "end").eval()
    rows = collate(list(range(7)))["positive"]
    with torch.no_grad():
        ours = embed(trainer.model.eval(), **rows)
        found["embeddings_differ"] = (ours - embed(whole, **rows)).abs().max().item()
    found["config"] = json.loads((folder / "end" / "config.json").read_text())
    found["weights_equal"] = all(torch.equal(value, end[name]) for name, value in whole.state_dict().items())
    if (trained := folder / "checkpoint-4" / "trainable.safetensors").is_file():
        found["weights"] = sorted(load_file(trained))
    return found


def refusals(base: Path, folder: Path) -> dict[str, str]:
    said = {}
    for name, more in {
        "fp16": {"fp16": True}, "optimizer": {"optim": "adafactor"}, "whole": {"is_split": False},
        "async": {"save_async": True}, "adapters": {"adapters": LORA},
    }.items():  # fmt: skip
        try:
            make_trainer(base, folder / name, **more)
        except (UsageError, ValueError) as error:
            said[name] = str(error)
    for name in ("other_rows", "other_numbers"):
        trainer = make_trainer(base, folder / name, save_strategy="no")
        try:
            if name == "other_rows":
                trainer.data_collator = lambda rows: collate([row + rank() for row in rows])
            else:
                trainer.add_callback(DrawsByRank())
            trainer.train()
        except UsageError as error:
            said[name] = str(error)
    return said


class DrawsByRank(TrainerCallback):
    def on_step_begin(self, args, state, control, **others):
        torch.manual_seed(rank())


def upstream(base: Path) -> dict[str, float]:
    """(4): two halves of a batch backward one after the other; per parameter the distance to the whole model's."""
    # The class rounds to float32 inside; this is about sums over processes.
    forward = Qwen3RMSNorm.forward
    Qwen3RMSNorm.forward = lambda self, x: nn.functional.rms_norm(
        x, (x.shape[-1],), self.weight, self.variance_epsilon
    )
    rows = torch.randint(1, 99, (4, 7), generator=torch.Generator().manual_seed(0))
    models = [
        AutoModel.from_pretrained(base, dtype=torch.float64, distributed_config=config)
        for config in (None, splitting.launched_config())
    ]
    for model in models:
        for half in rows.split(2):
            model(input_ids=half).last_hidden_state.square().sum().backward()
    Qwen3RMSNorm.forward = forward
    differences = {}
    for (name, wanted), found in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert wanted.grad.norm() > 0
        whole = found.grad.full_tensor() if hasattr(found.grad, "full_tensor") else found.grad
        differences[name] = ((whole - wanted.grad).norm() / wanted.grad.norm()).item()
    return differences


def all_cases(folder: Path) -> dict:
    DistTrainingArguments(output_dir=str(folder / "none"), use_cpu=True, report_to=[])  # makes the process group
    base = folder / "base"
    if rank() == 0:  # (1)
        save_base(base)
    dist.barrier()
    return {
        "resumed": resumed(base, folder / "run"),
        "frozen": resumed(base, folder / "frozen", frozen_modules=["embed_tokens", "layers.0"]),
        "evaluation": evaluated(base, folder / "eval"),
        "said": refusals(base, folder),
        "upstream": upstream(base) if launched.processes() == launched.mesh_size("tp") else {},
    }

r"""Runs of DistTrainer as pipelines: of two processes, and of more whose layers are split (tensor parallelism).
Resumed, saved, evaluated, counted; and what is refused.

    accelerate launch --config_file configs/accelerate/multi_gpu_3d.yaml --num_processes 4 \
        tests/distributed/pipeline_worker.py FOLDER --fields '{"pipeline_parallel_size": 2}' --only held resumed

(1) a folder with a small model, by the first process
(2) what a process holds: of the loaded model, and of weights and optimizer state after an update
(3) four steps with a checkpoint after the second, and from that checkpoint again; the folder of the end, loaded by
    every process whole; processes with other stages; an update that is not finite; an evaluation
(4) what is refused
(5) one step, counted: chunks under way, messages, reductions; and its embeddings of both passes
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import load_file
from torch import nn
from transformers import TrainerCallback

from hf_dist_ext import launched, policy
from hf_dist_ext.checkpoints import manifest, sentence_model, trainable
from hf_dist_ext.checkpoints.merge import merge
from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.adapters import WEIGHTS, adapters_of
from hf_dist_ext.strategies.collectives import rank
from hf_dist_ext.strategies.pipeline import options as pipeline_options
from hf_dist_ext.strategies.pipeline import passes, schedules, strategy
from hf_dist_ext.strategies.tensors import bare_optimizer, gathered, held_here
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.distributed.tensor_parallel_worker import DrawsByRank, collate, collate_repeated, largest_difference
from tests.tiny_models import CHECKPOINTING, embed, embedding_model, loaded, model_config

ROWS, BATCH, LAYERS = 36, 6, 6
WIDTHS = {"query": 8, "positive": 16}  # tokens of what is counted
CONFIG = model_config(
    "qwen3", num_hidden_layers=LAYERS, attention_dropout=0.1, vocab_size=99, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
LORA = LoraConfig(r=2, target_modules=["q_proj", "v_proj", "o_proj"], lora_dropout=0.1)


def save_base(folder: Path) -> None:
    torch.manual_seed(0)
    embedding_model(CONFIG, pooling="last").save_pretrained(str(folder))


def make_trainer(
    base: Path, folder: Path, has_adapters: bool = False, is_alone: bool = False, loss: nn.Module | None = None, **more
) -> DistTrainer:
    options = {} if is_alone else {"pipeline_parallel_size": 2}
    options |= dict(max_steps=4, save_steps=2, learning_rate=1e-2, max_grad_norm=0.5, gradient_accumulation_steps=2)
    args = DistTrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=BATCH, per_device_eval_batch_size=4, use_cpu=True,
        report_to=[], disable_tqdm=True, logging_steps=1, seed=3,
        **(options | {"gradient_cache_chunk_size": 2, "preemptible": True} | more),
    )  # fmt: skip
    torch.manual_seed(1)
    model = loaded(base, projection_dim=16, in_stages=strategy.in_stages(args))
    torch.manual_seed(1)
    nn.init.normal_(model.projection.linear.weight, std=0.1)
    if has_adapters:
        model.requires_grad_(False).transformers_model.add_adapter(LORA)
    return DistTrainer(
        model=model, args=args, loss=loss or InfoNCELoss(0.1, learnable_temperature=True), data_collator=collate,
        train_dataset=list(range(ROWS)), eval_dataset=list(range(ROWS, ROWS + 10)),
    )  # fmt: skip


def weights_of(trainer: DistTrainer) -> dict[str, torch.Tensor]:
    """What this rank holds of its stages, and those of the loss."""
    tensors = trainer.model.state_dict() | {f"loss.{k}": v for k, v in trainer.loss.state_dict().items()}
    return {name: held_here(value.detach()).clone() for name, value in tensors.items()}


# ---- (2) ----


def loaded_here(base: Path, folder: Path, **fields) -> list[int]:
    """Elements that each process holds of a model that was just read."""
    args = DistTrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to=[], gradient_cache_chunk_size=2, **fields
    )
    model = loaded(base, in_stages=strategy.in_stages(args))
    return everyone(sum(held_here(p).numel() for p in model.parameters() if p.device.type != "meta"))


def held(base: Path, folder: Path, **fields) -> list[dict[str, int]]:
    """Of each process, after an update of two batches: elements of weights and of optimizer state."""
    trainer = make_trainer(base, folder, max_steps=1, save_strategy="no", **fields)
    trainer.train()
    of_optimizer = [v for values in bare_optimizer(trainer.optimizer).state.values() for v in values.values()]
    return everyone(
        {
            "weights": sum(held_here(p).numel() for p in trainer.model.parameters()),
            "optimizer": sum(held_here(v).numel() for v in of_optimizer if v.dim()),
        }
    )


def draws(base: Path, folder: Path, **fields) -> list[list[int]]:
    """A number that each process draws in the midst of a run, and in the midst of one that goes on from it."""
    drawn = []

    class Draws(TrainerCallback):
        def on_step_end(self, args, state, control, **others):
            if state.global_step == 3:
                drawn.append(int(torch.randint(2**40, ())))

    for checkpoint in (None, str(folder / "checkpoint-2")):
        trainer = make_trainer(base, folder, **fields)
        trainer.add_callback(Draws())
        trainer.train(resume_from_checkpoint=checkpoint)
    return everyone(drawn)


class Written(InfoNCELoss):
    """Its forward counts, and writes to its parameter."""

    def __init__(self):
        super().__init__(0.1, learnable_temperature=True)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, *arguments, **options):
        if self.training:
            self.seen += 1
            with torch.no_grad():
                self.log_inverse_temperature.clamp_(max=1.0)
        return super().forward(*arguments, **options)


def writes(base: Path, folder: Path, **fields) -> list[dict[str, float]]:
    """The loss's state on each process, after four updates of two batches each."""
    trainer = make_trainer(base, folder, loss=Written(), save_strategy="no", **fields)
    trainer.train()
    return everyone({name: value.item() for name, value in trainer.loss.state_dict().items()})


# ---- (3) ----


def evaluated(base: Path, folder: Path, **more) -> dict[str, float]:
    trainer = make_trainer(base, folder, save_strategy="no", **more)
    trainer.data_collator = collate_repeated
    return trainer.evaluate()


def goes_on_elsewhere(base: Path, folder: Path, has_adapters: bool = False, **more) -> dict[str, bool]:
    """The end of a finished run, read by processes that have other stages."""
    trainer, found = make_trainer(base, folder, has_adapters, **more), {}
    checkpoint = folder / "checkpoint-4"
    num_elements = sum(p.numel() for p in loaded(checkpoint).parameters())
    state_dict_of = sentence_model.state_dict_of

    def watched(*arguments) -> dict[str, torch.Tensor]:
        weights = state_dict_of(*arguments)
        found["parts"] = all_ranks(sum(w.numel() for w in weights.values()) < 0.6 * num_elements)
        return weights

    trainer.add_callback(Read(trainer, checkpoint, whole_of(checkpoint, has_adapters), found))
    with mock.patch.object(sentence_model, "state_dict_of", watched):
        trainer.train(resume_from_checkpoint=str(checkpoint))
    return found


def whole_of(checkpoint: Path, has_adapters: bool) -> dict[str, torch.Tensor]:
    if not has_adapters:
        return loaded(checkpoint).state_dict()
    saved = load_file(checkpoint / WEIGHTS)
    return {name.removeprefix("base_model.model."): value for name, value in saved.items()}


class Read(TrainerCallback):
    """Writes into `found` whether a run that goes on from a checkpoint, whose `whole` weights are known, has them and
    its moments."""

    def __init__(self, trainer: DistTrainer, checkpoint: Path, whole: dict[str, torch.Tensor], found: dict):
        self.trainer, self.checkpoint, self.whole, self.found = trainer, checkpoint, whole, found

    def on_train_begin(self, args, state, control, model=None, **others):
        saved = torch.load(self.checkpoint / trainable.OPTIMIZER, weights_only=True)["state"]
        of_optimizer = bare_optimizer(self.trainer.optimizer).state
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        moments = dict(gathered({name: of_optimizer[p]["exp_avg_sq"] for name, p in trained.items()}, keep=True))
        is_adapter = len(trained) < len(dict(model.named_parameters()))
        own = get_peft_model_state_dict(model.transformers_model) if is_adapter else trained
        own = {name: value for name, value in gathered(own, keep=True) if name in self.whole or not is_adapter}
        self.found["weights"] = all_ranks(len(own) > 4 and all(torch.equal(p, self.whole[n]) for n, p in own.items()))
        self.found["moments"] = all_ranks(all(torch.equal(m, saved[f"{n}/exp_avg_sq"]) for n, m in moments.items()))
        self.found["moved"] = all_ranks(len(moments) > 4 and all(moment.norm() > 0 for moment in moments.values()))


def not_finite(base: Path, folder: Path, **more) -> dict[str, bool]:
    """The last stage gives NaN in one update."""
    trainer = make_trainer(base, folder, max_nonfinite_steps=3, save_strategy="no", **more)
    run = trainer.strategy.cut.run

    def broken(stage, features, hidden):
        output = run(stage, features, hidden)
        return output * float("nan") if stage == 1 and trainer.state.global_step == 1 else output

    trainer.strategy.cut.run = broken
    trainer.train()
    skipped = [line.get("nonfinite_steps") for line in trainer.state.log_history][:4]
    is_finite = all(held_here(p).isfinite().all() for p in trainer.model.parameters())
    return {"skipped_once": all_ranks(skipped == [None, 1, 1, 1]), "is_finite": all_ranks(is_finite)}


def everyone(of_rank) -> list:
    found: list = [None] * launched.processes()
    dist.all_gather_object(found, of_rank)
    return found


def all_ranks(is_true: bool) -> bool:
    return all(everyone(is_true))


def resumed(base: Path, folder: Path, **more) -> dict:
    trainer = make_trainer(base, folder, **more)
    start = weights_of(trainer)
    trainer.train()
    end = weights_of(trainer)
    again = make_trainer(base, folder, **more)
    again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    now = weights_of(again)
    losses = [[line["loss"] for line in t.state.log_history if "loss" in line] for t in (trainer, again)]
    evaluation = trainer.evaluate()
    trainer.save_model(str(folder / "end"))
    trainer.accelerator.wait_for_everyone()
    facts = manifest.read(folder / "checkpoint-4")
    found = {
        "moved": largest_difference(start, end),
        "equal": all_ranks(end.keys() == now.keys() and all(torch.equal(end[name], now[name]) for name in end)),
        "losses_equal": losses[0] == losses[1] and len(losses[0]) == 4,
        "committed": manifest.why_incomplete(folder / "checkpoint-4"),
        "facts": {
            name: facts[name]
            for name in ("world_size", "data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size",
                         "samples_seen", "sharding", "embedder")
        },
        "rows_per_step": trainer.data_position.rows_per_micro_batch,
        "logged_batch": trainer.state.log_history[0]["contrastive_batch_size"],
        "files": sorted(path.name for path in (folder / "checkpoint-4").iterdir()),
        "evaluation": evaluation,
        "rates": {name: rate for name, rate in trainer.state.log_history[0].items() if "learning_rate" in name},
        "bubble": [trainer.state.log_history[0].get(f"bubble_share{end}") for end in ("", "_expected")],
    }  # fmt: skip
    if not trainer.saves_complete_model:
        if rank() == 0:
            merge(folder / "end", folder / "whole")
        dist.barrier()
    whole = loaded(folder / ("end" if trainer.saves_complete_model else "whole")).eval()
    theirs = whole.state_dict()
    if not adapters_of(trainer.model):
        own = dict(gathered(trainer.model.state_dict(), keep=True))
        found["weights_equal"] = all_ranks(all(torch.equal(value, theirs[name]) for name, value in own.items()))
    trainer.model.eval()
    rows = collate(list(range(7)))
    with torch.no_grad():
        ours = trainer.step.score_only(trainer.model, rows).embeddings
    models = [whole]
    if adapters_of(trainer.model):
        trainer.args.save_full_model = True
        trainer.save_model(str(folder / "merged"))
        trainer.accelerator.wait_for_everyone()
        models.append(loaded(folder / "merged", merges_adapters=False).eval())
        assert not adapters_of(models[-1])
    found["embeddings_differ"] = max(
        (ours[name] - embed(model, **features)).abs().max().item()
        for model in models
        for name, features in rows.items()
    )
    return found


# ---- (4) ----


def said_by(attempt) -> str:
    try:
        attempt()
    except (UsageError, ValueError) as error:
        return str(error)
    return "nothing"


REFUSED = {
    "no cache": {"gradient_cache_chunk_size": None}, "auto": {"gradient_cache_chunk_size": "auto"},
    "kept graphs": {"gradient_cache_keep_graph": 1}, "fp16": {"fp16": True}, "async": {"save_async": True},
    "compile": {"torch_compile": True}, "half in evaluation": {"bf16_full_eval": True},
    "reentrant": {f"{CHECKPOINTING}_kwargs": {"use_reentrant": True}},
    "hook": {"ddp_comm_hook": "fp16"}, "sharding": {"sharding": "FULL_SHARD"},
    "schedule": {"pipeline_schedule": "dualpipe"}, "per rank": {"pipeline_stages_per_rank": 2},
    "no pipeline": {"pipeline_parallel_size": None, "pipeline_schedule": "gpipe"},
    "processes": {"pipeline_parallel_size": 3}, "split": {"pipeline_split": [2, 4]},
    "empty stage": {"pipeline_split": [6]},
    "layers": {"pipeline_schedule": "zero_bubble", "pipeline_stages_per_rank": 4},
}  # fmt: skip


OF_GROUPS = {
    "optimizer": {"optim": "adafactor"}, "processes": {"pipeline_parallel_size": 4},
    "adapters": {"has_adapters": True},
}  # fmt: skip


def refusals(base: Path, folder: Path) -> dict[str, str]:
    options = {"base": base, "folder": folder / "no", "save_strategy": "no"}
    has_groups = launched.mesh_size("tp") > 1
    cases = OF_GROUPS if has_groups else REFUSED
    said = {name: said_by(lambda more=more: make_trainer(**(options | more))) for name, more in cases.items()}

    def train_with_numbers_of_its_own() -> None:
        trainer = make_trainer(**options)
        trainer.add_callback(DrawsByRank())
        trainer.train()

    def train_on_other_rows() -> None:
        trainer = make_trainer(**options)
        trainer.data_collator = lambda rows: collate([row + rank() for row in rows])
        trainer.train()

    def train(model: nn.Module) -> None:
        args = DistTrainingArguments(
            output_dir=str(folder / "no"), use_cpu=True, pipeline_parallel_size=2, gradient_cache_chunk_size=2
        )
        DistTrainer(model=model, args=args, loss=InfoNCELoss())

    if has_groups:
        said["other numbers"] = said_by(train_with_numbers_of_its_own)
    else:
        said["other rows"] = said_by(train_on_other_rows)
        said["architecture"] = said_by(lambda: train(embedding_model(model_config("distilbert"))))
        said["towers"] = said_by(lambda: train(nn.Linear(2, 2)))
    return said


def check_one_process_goes_on(base: Path, checkpoint: Path, folder: Path, name: str) -> None:
    """From the weights of this checkpoint, unchanged, and from nothing else of it; `name`: of how it was trained."""
    more = {"resume_weights_only": True, "learning_rate": 0.0, "save_strategy": "no"}
    trainer = make_trainer(base, folder, is_alone=True, **more)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    saved, own = loaded(checkpoint).state_dict(), trainer.model.state_dict()
    assert own.keys() == saved.keys() and all(torch.equal(p, saved[name]) for name, p in own.items())
    with pytest.raises(UsageError, match=rf"saved as a pipeline \({name}\).*resume_weights_only"):
        make_trainer(base, folder, is_alone=True).train(resume_from_checkpoint=str(checkpoint))


def trained_twice(base: Path, folder: Path) -> list[float]:
    """Losses of two trainings of one trainer."""
    trainer = make_trainer(base, folder, save_strategy="no", max_steps=2)
    return [trainer.train().training_loss for _ in range(2)]


def takes_weights(base: Path, folder: Path, **more) -> float:
    """The loss of a run that begins with the weights of a checkpoint, and nothing else of it."""
    newest = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    other = folder.with_name("weights_only")
    trainer = make_trainer(base, other, save_strategy="no", max_steps=1, resume_weights_only=True, **more)
    return trainer.train(resume_from_checkpoint=str(newest)).training_loss


# ---- (5) ----


def collate_equal(rows: list[int]) -> dict:
    """Rows of a column are equally long, with padding that attention masks, as a plan takes them to be."""
    generator = torch.Generator().manual_seed(rows[0])
    ids = {name: torch.randint(1, 99, (len(rows), width), generator=generator) for name, width in WIDTHS.items()}
    masks = {name: torch.ones_like(of).index_fill_(1, torch.tensor([of.shape[1] - 1]), 0) for name, of in ids.items()}
    return {name: {"input_ids": of, "attention_mask": masks[name]} for name, of in ids.items()}


def watched_outputs(cut) -> dict[bool, dict[int, list[torch.Tensor]]]:
    """What stages give from now on: whether there is a graph -> stage -> chunk by chunk."""
    run, outputs = cut.run, {False: {}, True: {}}

    def watched(stage, features, hidden):
        output = run(stage, features, hidden)
        outputs[torch.is_grad_enabled()].setdefault(stage, []).append(output.detach().clone())
        return output

    cut.run = watched
    return outputs


def are_replayed(outputs: dict[bool, dict[int, list[torch.Tensor]]], own: list[int]) -> bool:
    """Whether pass 3 gave what pass 1 did, to the bit."""
    first, second = outputs[False], outputs[True]
    for stage in first:
        first[stage] = first[stage][-len(second[stage]) :]  # behind the one row of which shapes are looked at
    return sorted(first) == sorted(second) == own and all(
        torch.equal(a, b) for s in first for a, b in zip(first[s], second[s], strict=True)
    )


def counted(base: Path, folder: Path, **more) -> list[dict]:
    """One update of one batch; what each rank says of it."""
    options = {"max_steps": 1, "save_strategy": "no", "gradient_accumulation_steps": 1, "max_grad_norm": 0.5}
    trainer = make_trainer(base, folder, **(options | more))
    trainer.data_collator = collate_equal
    cut, args = trainer.strategy.cut, trainer.args
    flow, all_reduce = passes.Flow, dist.all_reduce
    counts, outputs = Counter(), watched_outputs(cut)
    kept = {}  # bytes of what each chunk holds
    weights = {held_here(p).untyped_storage().data_ptr() for p in trainer.model.parameters()}
    casts = {}  # bytes of half-precision copies of weights
    halves = [held_here(p).detach().bfloat16() for p in trainer.model.parameters() if p.dim() == 2]

    class Watched(flow):
        def forward(self, stage, number):
            found = {}

            def see(saved):
                tensor = held_here(saved)
                found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
                for half in halves if tensor.dtype == torch.bfloat16 and tensor.dim() == 2 else ():
                    if any(one.shape == half.shape and torch.equal(one, half) for one in (tensor, tensor.mT)):
                        casts[tensor.untyped_storage().data_ptr()] = half.nbytes
                return saved

            with torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
                super().forward(stage, number)
            for tensor in self.held.get((stage, number), ()):
                if tensor is not None:
                    see(tensor)
            kept[stage, number] = {at: size for at, size in found.items() if at not in weights}
            held = [*self.held, *self.cut_in_two]
            counts["live"] = max(counts["live"], len(held))
            together = {at: size for of in held for at, size in kept[of].items()}
            counts["casts"] = max(counts["casts"], sum(size for at, size in casts.items() if at in together))
            counts["waiting"] = max(counts["waiting"], len(self.inputs) + len(self.gradients) + len(self.leaving))

        def message(self, kind, tensor, stage):
            counts[kind.__name__] += 1
            return super().message(kind, tensor, stage)

    def watched_reduce(tensor, *arguments, **options):
        peers = trainer.strategy.rows.peers
        counts["reductions"] += peers is not None and options.get("group") is peers
        return all_reduce(tensor, *arguments, **options)

    passes.Flow, dist.all_reduce = Watched, watched_reduce
    try:
        trainer.train()
    finally:
        passes.Flow, dist.all_reduce = flow, all_reduce
    found = {
        **counts,
        "halves": sum(half.nbytes for half in halves),
        "chunks": len(next(iter(outputs[True].values()))),
        "rank": rank() % pipeline_options.size(args),
        "per_rank": pipeline_options.per_rank_of(args),
        "replayed": are_replayed(outputs, cut.own),
        "parameters": sum(held_here(p).numel() for p in trainer.model.parameters()),
    }
    return everyone(found)


def found_in(_, folder: Path, fields: dict, only: list[str]) -> dict:
    """What these parts find; `fields`: of every run but those of schedules."""
    DistTrainingArguments(output_dir=str(folder / "none"), use_cpu=True, report_to=[])  # makes the process group
    base = folder / "base"
    if rank() == 0:  # (1)
        save_base(base)
    dist.barrier()
    frozen = {"frozen_modules": ["embed_tokens", "layers.0", "layers.5"]}
    frozen["learning_rates"] = {"projection": 5e-3, "layers.1": 2e-3}
    other = {"pipeline_schedule": "interleaved_1f1b"} | fields
    of_adapters = {"pipeline_schedule": "zero_bubble"} | fields

    def of_schedule(name: str) -> list[dict]:
        per_rank = None if name in policy.ONE_STAGE_PER_RANK else 2
        more = {"pipeline_schedule": name, "pipeline_stages_per_rank": per_rank}
        return counted(base, folder / "counted", **more)

    parts = {name: partial(of_schedule, name) for name in schedules.SCHEDULES} | {
        "bf16": lambda: counted(base, folder / "counted", pipeline_schedule="gpipe", bf16=True),
        "counted": lambda: counted(base, folder / "counted", **fields),
        "loaded": lambda: loaded_here(base, folder / "loaded", **fields),
        "held": lambda: held(base, folder / "held", **fields),
        "writes": lambda: writes(base, folder / "writes", **fields),
        "draws": lambda: draws(base, folder / "draws", **fields),
        "resumed": lambda: resumed(base, folder / "run", **fields),
        "elsewhere": lambda: goes_on_elsewhere(base, folder / "run", **other),
        "adapters": lambda: resumed(base, folder / "adapters", has_adapters=True, **of_adapters),
        "adapters elsewhere": lambda: goes_on_elsewhere(base, folder / "adapters", has_adapters=True, **other),
        "frozen": lambda: resumed(base, folder / "frozen", **fields, **frozen),
        "head": lambda: resumed(base, folder / "head", trainable_modules=["projection"], **fields),
        "not_finite": lambda: not_finite(base, folder / "not_finite", **fields),
        "evaluation": lambda: evaluated(base, folder / "eval", **fields),
        "again": lambda: trained_twice(base, folder / "again"),
        "weights_only": lambda: takes_weights(base, folder / "frozen", **frozen),
        "whole weights only": lambda: takes_weights(base, folder / "run"),
        "said": lambda: refusals(base, folder),
    }
    return {name: parts[name]() for name in only}

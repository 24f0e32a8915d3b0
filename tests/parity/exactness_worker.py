r"""One process of the exactness table: what DistTrainer hands to the optimizer, against naive full-batch lines.

(1) a case says the model, the columns, the chunks and the arguments; rows are made from their number alone
(2) the reference builds every rank's rows, one plain forward and one autograd loss per micro-batch, in float64
(3) the trainer runs the same steps; its gradients are read just before the optimizer uses them
(4) the figure is |trainer - reference| / |reference| over all gradients and steps, the largest of all ranks

    accelerate launch --config_file configs/accelerate/multi_gpu_ddp.yaml \
        tests/parity/exactness_worker.py --output errors.json
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from peft import LoraConfig
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Router
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from torch import nn
from transformers import AutoConfig, AutoModel, TrainerCallback

from hf_dist_ext import launched
from hf_dist_ext.checkpoints.trainable import named
from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.frozen.who_trains import plan_freezing
from hf_dist_ext.strategies.collectives import leave_together, rank
from hf_dist_ext.strategies.pipeline.stages import StagedModel
from hf_dist_ext.strategies.splitting import launched_config, split
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.sentence_losses import SentenceTransformersLoss
from hf_dist_ext.training.trainer import DistTrainer
from tests.formula_device import with_memory
from tests.tiny_models import CHECKPOINTING, around, embedding_model

BATCH = 6  # rows per rank and micro-batch
WIDTHS = {"query": 9, "positive": 30, "negative": 17, "other": 12}
BERT = dict(model_type="bert", vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
BERT |= dict(intermediate_size=48, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
QWEN = dict(model_type="qwen3", vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, head_dim=8)
QWEN |= dict(num_key_value_heads=2, intermediate_size=48)
STATIC = dict(model_type="static_embedding", vocab_size=99, hidden_size=24)
LLAMA = QWEN | {"model_type": "llama"}
ROUTED = ("two alike", "two texts", "table and text")  # a way for queries and one for documents
DECODERS = {"qwen3": QWEN, "llama": LLAMA}
XLM_R = BERT | {"model_type": "xlm-roberta", "pad_token_id": 0, "max_position_embeddings": 64}
MODERN = {name: value for name, value in BERT.items() if "dropout" not in name} | {"model_type": "modernbert"}
MODERN |= {"pad_token_id": 0, "local_attention": 8, "global_attn_every_n_layers": 2}
TASKS = {"query": "query", "positive": "document"}  # of columns, where a Router asks
TARGETS = ["q_proj", "v_proj", "o_proj", "down_proj"]  # of LoRA in decoders: layers of both ways of splitting


pipeline_size = 1  # ranks, as --arguments say


def ranks_per_rows() -> int:
    return launched.mesh_size("tp") * pipeline_size


def num_groups() -> int:
    """Ranks with rows of their own; under tensor parallelism and in pipelines groups of ranks."""
    return launched.processes() // ranks_per_rows()


def own_group() -> int:
    return rank() // ranks_per_rows()


# ---- (1) cases ----


@dataclass
class Case:
    """What differs from the base case: a shared Bert, two columns, chunks of 4 rows, one step."""

    name: str
    model: str = "bert"
    columns: dict[str, int] = field(default_factory=lambda: {"query": 1, "positive": 1})  # rows per anchor
    loss: dict = field(default_factory=dict)
    named: str | None = None  # a loss of sentence-transformers, with the options of `loss`
    arguments: dict = field(default_factory=dict)
    batch: int = BATCH  # rows per rank and micro-batch
    rows: int | None = None  # rows in the dataset; None: one global batch per step
    steps: int = 1
    memory: int | None = None  # tokens that a device has room for, by whose memory sizes are found
    shorter_on_rank: int | None = None  # that rank's batches lack two rows
    typed: tuple[str, ...] = ()  # the column of rank 0, 1, ... whose features hold one key more than the others'
    # dropout: the reference is the same run with every graph kept; of a pipeline, which keeps none, the figure is the
    # largest difference between what a stage gave in both passes, and has to be 0
    same_masks: bool = False
    dtype: str = "float64"
    is_rounding: bool = False  # the reference is computed without autocast: the figure is what bf16 rounds
    tolerance: float = 1e-10
    worlds: tuple[int, ...] = (1, 2, 3)


def rounding(num_chunks: int, model: str = "bert") -> Case:
    """What bf16 costs: against float32 without autocast."""
    rows = 32  # per column; both columns share the chunks
    return Case(
        f"bf16 against float32{'' if model == 'bert' else ', decoder'}, chunks: {num_chunks}", model, dtype="float32",
        is_rounding=True, batch=rows, arguments={"bf16": True, "gradient_cache_chunk_size": 2 * rows // num_chunks},
        tolerance=2e-2, worlds=(1, 2),
    )  # fmt: skip


PACKED = {"gradient_cache_packing": True}
THREE = {"query": 1, "positive": 1, "negative": 3}
ONE_EACH = dict.fromkeys(THREE, 1)
CASES = [
    Case("no cache", arguments={"gradient_cache_chunk_size": None}),
    Case("chunk 1", arguments={"gradient_cache_chunk_size": 1}, worlds=(1, 2)),
    Case("chunk 3, divides", arguments={"gradient_cache_chunk_size": 3}),
    Case("chunk 4, does not divide"),
    Case("chunk 6, the batch", arguments={"gradient_cache_chunk_size": 6}, worlds=(1, 2)),
    Case("chunk 100, above the batch", arguments={"gradient_cache_chunk_size": 100}),
    Case("64 tokens per chunk", arguments={"gradient_cache_chunk_size": None, "gradient_cache_chunk_tokens": 64}),
    Case("batch order, not sorted", arguments={"gradient_cache_sort": False}, worlds=(1,)),
    Case("packed chunks, three columns", columns=THREE, arguments=PACKED),
    Case("packed chunks of 64 tokens, a wider first pass", model="deep", worlds=(1, 2),
         arguments=PACKED | {"gradient_cache_chunk_size": None, "gradient_cache_chunk_tokens": 64}),
    Case("packed chunks, dropout and gradient checkpointing", model="dropout", same_masks=True,
         arguments=PACKED | {CHECKPOINTING: True}),
    Case("packed chunks, LoRA, decoder, accumulation", model="qwen3:16:lora", steps=2, rows=4, worlds=(1, 2),
         arguments=PACKED | {"gradient_accumulation_steps": 2}),
    Case("packed chunks, ModernBERT, batch order", model="modernbert", worlds=(1,),
         arguments=PACKED | {"gradient_cache_sort": False}),
    Case("packed chunks, XLM-R, other rows on each rank", model="xlm-roberta", shorter_on_rank=1, worlds=(2,),
         arguments=PACKED),
    Case("packed chunks, automatic size", worlds=(1, 2), steps=3, memory=64,
         arguments=PACKED | {"gradient_cache_chunk_size": "auto"}),
    Case("packed chunks, frozen backbone, temperature", loss={"learnable_temperature": True},
         arguments=PACKED | {"trainable_modules": ["projection"]}, worlds=(1, 2)),
    Case("2 graphs kept", arguments={"gradient_cache_keep_graph": 2}),
    Case("all graphs kept", arguments={"gradient_cache_keep_graph": 99}),
    Case("4 layers: a wider first pass", model="deep"),
    Case("4 layers with dropout: no wider pass", model="deep:0.2", same_masks=True),
    Case("automatic chunk size", arguments={"gradient_cache_chunk_size": "auto"}, steps=3, memory=64),
    Case("automatic kept graphs", arguments={"gradient_cache_keep_graph": "auto"}, steps=3, memory=400, model="deep"),
    Case("out of memory, retried", model="scarce", arguments={"gradient_cache_chunk_size": "auto",
         "gradient_cache_memory_gib": 1e-3}, steps=3, worlds=(1,)),
    Case("three columns, 3 hard negatives", columns=THREE),
    Case("four columns", columns=THREE | {"other": 1}, worlds=(1, 2)),
    Case("a positive of another kind, plain negatives", columns=ONE_EACH, typed=("positive",)),
    Case("other kinds in other columns on each rank", columns=THREE, typed=("positive", "negative"), worlds=(2, 3)),
    Case("a positive of another kind, no cache", columns=ONE_EACH, typed=("positive",), worlds=(1, 2),
         arguments={"gradient_cache_chunk_size": None}),
    Case("tower per column", model="towers"),
    Case("three columns, symmetric, ranks with different row counts", model="deep", columns=THREE, steps=2,
         shorter_on_rank=1, loss={"symmetric": True}, arguments={"gradient_cache_chunk_size": 2}, worlds=(2, 3)),
    Case("three columns, dropout", model="dropout", columns=THREE, steps=2, same_masks=True,
         arguments={"gradient_cache_chunk_size": 2}, worlds=(2, 3)),
    Case("tower per column, symmetric", model="towers", steps=2, loss={"symmetric": True}, worlds=(2, 3)),
    Case("tower per column, no cache", model="towers", arguments={"gradient_cache_chunk_size": None}),
    Case("first tower frozen", model="towers:query"),
    Case("last tower frozen", model="towers:positive"),
    Case("frozen backbone, encoded once", arguments={"trainable_modules": ["projection"]}),
    Case("frozen backbone, accumulation, temperature", loss={"learnable_temperature": True}, steps=2, rows=4,
         arguments={"trainable_modules": ["projection"], "gradient_accumulation_steps": 2}, worlds=(1, 2)),
    Case("frozen backbone, sharded", worlds=(),
         arguments={"trainable_modules": ["projection"], "frozen_parts_fsdp": "shard"}),
    Case("frozen tower, encoded once", model="two alike", arguments={"frozen_modules": ["document"]}),
    Case("two Dense modules, activation and residual", model="dense"),
    Case("static embeddings", model="static"),
    Case("routes of queries and documents", model="table and text"),
    Case("decoder, last token, left padding", model="qwen3"),
    Case("decoder, no cache", model="qwen3", arguments={"gradient_cache_chunk_size": None}, worlds=(1, 2)),
    Case("decoder without norms in attention", model="llama", worlds=(1, 2)),
    Case("decoder, accumulation, temperature", model="qwen3:16", loss={"learnable_temperature": True}, steps=2, rows=4,
         arguments={"gradient_accumulation_steps": 2, "max_grad_norm": 0.01}, worlds=(1, 2)),
    Case("decoder, frozen, trained projection", model="qwen3:16", arguments={"trainable_modules": ["projection"]},
         worlds=(1, 2)),
    Case("decoder, first half frozen", model="half frozen", worlds=(1,)),
    Case("decoder, frozen layers", model="qwen3:16", arguments={"frozen_modules": ["embed_tokens", "layers.0"]},
         worlds=(1, 2)),
    Case("decoder, later layers frozen", model="qwen3:16", arguments={"frozen_modules": r".*layers\.[1-9].*"},
         worlds=(1, 2)),
    Case("decoder, three columns, gradient checkpointing", model="qwen3", columns=THREE, worlds=(1,),
         arguments={CHECKPOINTING: True}),
    Case("decoder, LoRA", model="qwen3:16:lora", worlds=(1,)),
    Case("decoder, LoRA, accumulation, clipped", model="qwen3:16:lora", steps=2, rows=4, worlds=(1, 2),
         arguments={"gradient_accumulation_steps": 2, "max_grad_norm": 0.01}),
    Case("XLM-R, three columns", model="xlm-roberta", columns=THREE, worlds=(1, 2)),
    Case("ModernBERT, accumulation, clipped", model="modernbert", steps=2, rows=4, worlds=(1,),
         arguments={"gradient_accumulation_steps": 2, "max_grad_norm": 0.01}),
    Case("decoder, every chunk reduced, accumulation", model="qwen3", steps=2, rows=4, worlds=(),
         arguments={"gradient_cache_fsdp": "memory", "gradient_accumulation_steps": 2}),
    Case("gradient checkpointing", arguments={CHECKPOINTING: True}),
    Case("LoRA", model="lora"),
    Case("LoRA with LoRA dropout", model="lora:0.3", same_masks=True),
    Case("LoRA and a trained projection", model="lora", worlds=(1, 2),
         arguments={"trainable_modules": ["projection"]}),
    Case("dropout", model="dropout", same_masks=True),
    Case("dropout and gradient checkpointing", model="dropout", same_masks=True,
         arguments={CHECKPOINTING: True}),
    Case("learnable temperature", loss={"learnable_temperature": True}, steps=2),
    Case("symmetric", loss={"symmetric": True}),
    Case("CoSENT, accumulation", named="CoSENTLoss", arguments={"gradient_accumulation_steps": 2}, steps=2, rows=4),
    Case("distilled embeddings, trained projection", named="EmbedDistillLoss", steps=2,
         loss={"projection_dim": 5, "distance_metric": "mse"}),
    Case("own negatives only", loss={"cross_device_negatives": False}),
    Case("a row's hard negatives alone", columns=THREE, loss={"in_batch_negatives": False}, shorter_on_rank=1),
    Case("a row's hard negatives alone, no cache", columns=THREE, loss={"in_batch_negatives": False}, worlds=(1,),
         arguments={"gradient_cache_chunk_size": None}),
    Case("max_grad_norm", arguments={"max_grad_norm": 0.01}, loss={"learnable_temperature": True}),
    Case("accumulation 2, short last window", arguments={"gradient_accumulation_steps": 2}, steps=3, rows=5),
    Case("accumulation, temperature", arguments={"gradient_accumulation_steps": 2}, steps=2, rows=4,
         loss={"learnable_temperature": True}),
    Case("a last batch that is smaller", rows=-2, steps=2, worlds=(1,)),
    Case("ranks with different row counts", shorter_on_rank=1, worlds=(2, 3)),
    Case("FSDP, every chunk reduced", arguments={"gradient_cache_fsdp": "memory"}, worlds=()),
    Case("FSDP, every chunk reduced, accumulation", arguments={"gradient_cache_fsdp": "memory",
         "gradient_accumulation_steps": 2}, steps=2, rows=4, worlds=()),
    Case("float32", dtype="float32", tolerance=2e-5, worlds=(1, 2)),
    Case("bf16 autocast", dtype="float32", arguments={"bf16": True}, tolerance=3e-2, worlds=(1, 2)),
    Case("frozen layers", "base", arguments={"frozen_modules": ["layer.0"]}),
    *[rounding(num_chunks) for num_chunks in (1, 8, 64)],
    *[rounding(num_chunks, "llama") for num_chunks in (1, 8)],
]  # fmt: skip


# Four processes on a small machine: what differs from FSDP on two.
HSDP_CASES = {
    "no cache", "chunk 4, does not divide", "2 graphs kept", "tower per column", "tower per column, symmetric",
    "first tower frozen", "frozen backbone, encoded once", "frozen tower, encoded once", "LoRA with LoRA dropout",
    "accumulation, temperature", "ranks with different row counts",
    "FSDP, every chunk reduced", "bf16 against float32, chunks: 8",
}  # fmt: skip


class Scarce:
    """Memory runs out on the last rank when a graph holds more than 40 tokens."""

    failures, is_on = 0, False

    @classmethod
    def look(cls, model: nn.Module, inputs: tuple) -> None:
        is_last = rank() == launched.processes() - 1
        if cls.is_on and is_last and torch.is_grad_enabled() and inputs[0]["input_ids"].numel() > 40:
            cls.failures += 1
            raise torch.OutOfMemoryError("a chunk too large for this test's memory")


class Towers(nn.Module):
    """A model of no package that has a tower per column: it takes the column's name."""

    def __init__(self, frozen: str | None):
        super().__init__()
        self.towers = nn.ModuleDict({name: embedding_model(BERT) for name in ("query", "positive")})
        if frozen:
            self.towers[frozen].requires_grad_(False)

    def forward(self, column: str, **features):
        return self.towers[column](features)["sentence_embedding"]


def build_model(kind: str, distributed_config=None, dtype: torch.dtype = torch.float64) -> nn.Module:
    """`dtype`: of a decoder, which has its own before it is split."""
    torch.manual_seed(0)
    kind, _, option = kind.partition(":")
    if distributed_config is not None:
        return split_embedder(f"{kind}:{option}", distributed_config, dtype)
    if kind == "towers":
        return Towers(option or None)
    if kind == "two alike":
        return routed(embedding_model(BERT), embedding_model(BERT))
    if kind == "two texts":
        return routed(build_model("xlm-roberta"), build_model("modernbert"))
    if kind == "table and text":
        return routed(build_model("static"), embedding_model(BERT, projection_dim=16))
    if kind == "dense":
        first, pooling, normalize = embedding_model(BERT)
        dense = [
            Dense(32, 20, activation_function=nn.Tanh(), use_residual=True),
            Dense(20, 20, bias=False, activation_function=nn.GELU(), use_residual=True),
            Dense(20, 8, bias=False, activation_function=nn.Identity()),
        ]
        return SentenceTransformer(modules=[first, pooling, *dense, normalize], device="cpu")
    if kind == "static":
        return embedding_model(STATIC, projection_dim=16)
    if kind in DECODERS:
        width, _, lora = option.partition(":")
        model = around(build_decoder(kind, dtype), pooling="last", projection_dim=int(width) if width else None)
        return with_lora(model, TARGETS) if lora else model
    if kind in ("xlm-roberta", "modernbert"):
        config = XLM_R if kind == "xlm-roberta" else MODERN
        return embedding_model(config | {"num_hidden_layers": BERT["num_hidden_layers"]})
    if kind == "scarce":
        Scarce.failures, model = 0, embedding_model(BERT)
        model.register_forward_pre_hook(Scarce.look)
        return model
    if kind == "deep":
        return embedding_model(BERT | {"num_hidden_layers": 4, "hidden_dropout_prob": float(option or 0)})
    if kind == "dropout":
        return embedding_model(BERT | {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.2})
    if kind == "half frozen":
        model = build_model("qwen3:16")
        backbone = model.transformers_model
        for module in (backbone.embed_tokens, *backbone.layers[: len(backbone.layers) // 2]):
            module.requires_grad_(False)
        return model
    assert kind in ("bert", "base", "lora"), kind
    model = embedding_model(BERT, projection_dim=16)
    if kind == "lora":
        return with_lora(model, ["query", "value"], dropout=float(option or 0))
    return model


def routed(*models: SentenceTransformer) -> SentenceTransformer:
    """The modules of one for queries and those of another for documents."""
    return SentenceTransformer(modules=[Router.for_query_document(*map(list, models))], device="cpu")


def embeddings_of(model: nn.Module, features: dict, column: str) -> torch.Tensor:
    """In float32 at least, in which a loss compares them."""
    if isinstance(model, Towers):
        return model(column, **features)
    is_routed = isinstance(model[0], Router)
    first = model[0].sub_modules[TASKS[column]][0] if is_routed else model[0]
    if isinstance(first, StaticEmbedding):
        is_real = features["attention_mask"].bool()
        ends = is_real.sum(1).cumsum(0)
        features = {"input_ids": features["input_ids"][is_real], "offsets": ends - is_real.sum(1)}
    found = model(dict(features), **({"task": TASKS[column]} if is_routed else {}))["sentence_embedding"]
    return found.to(torch.promote_types(found.dtype, torch.float32))


def with_lora(model: SentenceTransformer, targets: list[str], dropout: float = 0.0) -> SentenceTransformer:
    add_lora(model, targets, dropout)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)  # zero at init would make the gradient of lora_A vanish
    return model


def add_lora(model: SentenceTransformer, targets: list[str], dropout: float = 0.0) -> None:
    model.requires_grad_(False)
    model.transformers_model.add_adapter(LoraConfig(r=4, target_modules=targets, lora_dropout=dropout))


def split_embedder(kind: str, distributed_config, dtype: torch.dtype) -> nn.Module:
    """The model with its backbone split, with the same weights."""
    model = build_model(kind, dtype=dtype).to(dtype)
    model[0].model = split(model[0].model, distributed_config)
    return model


def build_decoder(kind: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    return _with_norms_in_its_own_precision(AutoModel.from_config(AutoConfig.for_model(**DECODERS[kind]))).to(dtype)


def _with_norms_in_its_own_precision(model: nn.Module) -> nn.Module:
    """Qwen3's RMSNorm rounds to float32 inside, where a difference in the last float64 bit becomes one of 1e-8; the
    case is about positions and padding, so its norms are torch's."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if "RMSNorm" in type(child).__name__:
                setattr(module, name, nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon))
    return model


def features_of(rows: list[int], column: str, per_anchor: int, on_left: bool) -> dict[str, torch.Tensor]:
    width = WIDTHS[column]
    ids = torch.zeros(len(rows) * per_anchor, width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        for k in range(per_anchor):
            generator = torch.Generator().manual_seed(1000 * row + 10 * k + len(column))
            length = int(torch.randint(2, width + 1, (), generator=generator))
            real = slice(width - length, width) if on_left else slice(0, length)
            ids[i * per_anchor + k, real] = torch.randint(1, 99, (length,), generator=generator)
            mask[i * per_anchor + k, real] = 1
    return {"input_ids": ids, "attention_mask": mask}


def collate(case: Case, rows: list[int], of_rank: int) -> dict[str, dict[str, torch.Tensor]]:
    rows = rows[:-2] if case.shorter_on_rank == of_rank else rows
    batch = {
        name: features_of(rows, name, per_anchor, "qwen3" in case.model) for name, per_anchor in case.columns.items()
    }
    if case.typed:
        features = batch[case.typed[of_rank % len(case.typed)]]
        features["token_type_ids"] = features["input_ids"] % 2
    if case.named:
        width = case.loss.get("projection_dim")
        draws = [torch.Generator().manual_seed(row) for row in rows]
        vectors = [torch.randn(width, generator=draw) for draw in draws] if width else []
        label = torch.stack(vectors) if width else torch.tensor([row * 7 % 5 / 4 for row in rows])
        batch["targets"] = {"label": label}
    if case.model in ROUTED:
        batch["constants"] = {name: {"task": TASKS[name]} for name in case.columns}
    return batch


# ---- (2) the reference ----


def naive_loss(embeddings: dict[str, torch.Tensor], temperature, symmetric: bool) -> torch.Tensor:
    query, *documents = [nn.functional.normalize(e, dim=-1) for e in embeddings.values()]
    labels = torch.arange(len(query))
    loss = nn.functional.cross_entropy(query @ torch.cat(documents).T / temperature, labels)
    if symmetric:
        loss = (loss + nn.functional.cross_entropy(documents[0] @ query.T / temperature, labels)) / 2
    return loss


def naive_named_loss(loss: nn.Module, embeddings: dict[str, torch.Tensor], label: torch.Tensor) -> torch.Tensor:
    if loss.name == "EmbedDistillLoss":
        projection = loss.innermost.projection
        return torch.stack([((projection(e) - label) ** 2).mean() for e in embeddings.values()]).mean()
    query, positive = [nn.functional.normalize(e, dim=-1) for e in embeddings.values()]
    cosine = 20 * (query * positive).sum(dim=1)
    pairs = [cosine[i] - cosine[j] for i in range(len(label)) for j in range(len(label)) if label[i] < label[j]]
    return torch.stack([cosine.new_zeros(()), *pairs]).exp().sum().log()


def trained_by_name(model: nn.Module, loss: nn.Module) -> dict[str, nn.Parameter]:
    parameters = {**named(model.named_parameters()), **{f"loss {name}": p for name, p in loss.named_parameters()}}
    return {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}


def reference_gradients(case: Case, model: nn.Module, loss: nn.Module, num_rows: int) -> list[dict]:
    """Gradients of every optimizer step, by name, from naive lines over the rows of all ranks."""
    by_name = trained_by_name(model, loss)
    trained = list(by_name.values())
    optimizer = torch.optim.SGD(trained, lr=LEARNING_RATE)
    accumulation = case.arguments.get("gradient_accumulation_steps", 1)
    of_steps = []
    order = list(range(num_rows))
    batches = [order[i : i + case.batch] for i in range(0, num_rows, case.batch)]
    has_autocast = case.arguments.get("bf16", False) and not case.is_rounding
    micro_batches = [batches[i : i + num_groups()] for i in range(0, len(batches), num_groups())]
    for start in range(0, len(micro_batches), accumulation):
        window = micro_batches[start : start + accumulation]
        optimizer.zero_grad()
        for per_rank in window:
            parts = [collate(case, rows, r) for r, rows in enumerate(per_rank)]
            autocast = torch.autocast("cpu", torch.bfloat16, enabled=has_autocast)
            encoded = []
            for part in parts:
                with autocast:
                    encoded.append({c: embeddings_of(model, part[c], c) for c in case.columns})
            anchors = sum(len(e["query"]) for e in encoded)
            groups = [{c: torch.cat([e[c] for e in encoded]) for c in case.columns}]
            if not case.loss.get("cross_device_negatives", True):
                groups = encoded
            if not case.loss.get("in_batch_negatives", True):
                each = case.columns.items()
                groups = [
                    {c: e[c][i * n : i * n + n] for c, n in each} for e in encoded for i in range(len(e["query"]))
                ]
            for group in groups:
                if case.named:
                    label = torch.cat([part["targets"]["label"] for part in parts])
                    (naive_named_loss(loss, group, label) / len(window)).backward(retain_graph=True)
                    continue
                temperature = torch.exp(-loss.log_inverse_temperature) if list(loss.parameters()) else 0.1
                value = naive_loss(group, temperature, case.loss.get("symmetric", False))
                (value * len(group["query"]) / anchors / len(window)).backward(retain_graph=True)
        if case.arguments.get("max_grad_norm", 0):
            nn.utils.clip_grad_norm_(trained, case.arguments["max_grad_norm"])
        of_steps.append({name: p.grad.clone() for name, p in by_name.items()})
        optimizer.step()
    return of_steps


# ---- (3) the trainer ----

LEARNING_RATE = 0.1


class GradientRecorder(TrainerCallback):
    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **others):
        if os.environ.get("ACCELERATE_USE_FSDP") == "true":
            assert all(hasattr(p, "full_tensor") for p in model.parameters() if p.requires_grad), "not sharded"
        found = {name: p.grad for name, p in trained_by_name(model, self.loss).items()}
        assert all(g is not None for g in found.values()), "a trainable parameter has no gradient"
        whole = {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in found.items()}
        self.steps.append({name: g.clone() for name, g in whole.items()})


def trained_gradients(case: Case, model: nn.Module, loss: nn.Module, num_rows: int, **more) -> list:
    recorder = GradientRecorder()
    recorder.loss = loss
    arguments = dict(gradient_cache_chunk_size=4, gradient_cache_packing=False, max_grad_norm=0, max_steps=case.steps)
    arguments |= case.arguments | more
    with tempfile.TemporaryDirectory() as folder:
        args = DistTrainingArguments(
            output_dir=folder, save_on_each_node=True,
            per_device_train_batch_size=case.batch, optim="sgd", learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant", save_strategy="no", report_to=[], disable_tqdm=True, logging_strategy="no",
            train_sampling_strategy="sequential", use_cpu=True, seed=7, **arguments,
        )  # fmt: skip
        trainer = DistTrainer(
            model,
            args,
            data_collator=lambda rows: collate(case, rows, own_group()),
            train_dataset=list(range(num_rows)),
            loss=loss,
            callbacks=[recorder],
        )
        with with_memory(trainer, case.memory) if case.memory else nullcontext():
            trainer.train()
    return recorder.steps


# ---- (4) the figure ----


def measure(case: Case) -> float:
    num_rows = case.rows if case.rows and case.rows > 0 else case.steps
    num_rows = num_rows * case.batch * num_groups() + (case.rows if case.rows and case.rows < 0 else 0)
    dtype = getattr(torch, case.dtype)

    def build(is_split: bool = False) -> tuple[nn.Module, nn.Module]:
        config = launched_config() if is_split and pipeline_size == 1 else None  # a pipeline splits its stages
        model = build_model(case.model, config, dtype)
        model = model.to(dtype) if config is None else model
        if case.named:
            return model.train(), SentenceTransformersLoss(
                case.named, model.get_embedding_dimension(), **case.loss
            ).to(dtype)
        return model.train(), InfoNCELoss(temperature=0.1, **case.loss).to(dtype)

    if case.same_masks and "pipeline_parallel_size" in case.arguments:
        case.tolerance = 0.0
        return largest_difference_of_passes(case, *build(), num_rows)
    if case.same_masks:
        expected = trained_gradients(case, *build(is_split=True), num_rows, gradient_cache_keep_graph=99)
    else:
        model, loss = build()
        if plan := plan_freezing(model, *(case.arguments.get(f"{kind}_modules") for kind in ("trainable", "frozen"))):
            plan.apply(model)
        expected = reference_gradients(case, model, loss, num_rows)
    Scarce.is_on = True  # the reference has all the memory it wants
    found = trained_gradients(case, *build(is_split=True), num_rows)
    Scarce.is_on = False
    if case.model == "scarce" and rank() == launched.processes() - 1:
        assert Scarce.failures >= 2, "memory was never scarce"
    assert len(found) == len(expected) == case.steps, (len(found), len(expected))
    worst = 0.0
    for of_step, wanted in zip(found, expected, strict=True):
        assert names_of_all(of_step) == wanted.keys()
        scale = torch.cat([w.flatten() for w in wanted.values()]).norm()
        assert scale > 0, "a comparison of zeros proves nothing"
        parts = [(own - wanted[name]).flatten() for name, own in of_step.items()]  # none where a stage trains nothing
        difference = torch.cat([*parts, scale.new_zeros(0)]).norm()
        worst = max(worst, float(difference / scale))
    return worst


def largest_difference_of_passes(case: Case, model: nn.Module, loss: nn.Module, num_rows: int) -> float:
    run, passes, was_drawn = StagedModel.run, {False: {}, True: {}}, []

    def watched(self, stage, features, hidden):
        if torch.is_grad_enabled():  # once more, with other masks
            state = torch.get_rng_state()
            torch.manual_seed(123)
            again = run(self, stage, features, hidden).detach()
            torch.set_rng_state(state)
        output = run(self, stage, features, hidden)
        if torch.is_grad_enabled():
            was_drawn.append(not torch.equal(again, output))
        passes[torch.is_grad_enabled()].setdefault(stage, []).append(output.detach().clone())
        return output

    StagedModel.run = watched
    trained_gradients(case, model, loss, num_rows)
    StagedModel.run = run
    assert was_drawn and all(was_drawn), "no dropout"
    worst = 0.0
    for stage, outputs in passes[True].items():
        first = passes[False][stage][-len(outputs) :]  # behind the one row of which shapes are looked at
        worst = max([worst, *(float((a - b).abs().max()) for a, b in zip(first, outputs, strict=True))])
    return worst


def names_of_all(of_step: dict) -> set[str]:
    """Those that some rank has: in a pipeline each has its own."""
    everyone: list = [of_step.keys()]
    if pipeline_size > 1:
        everyone = [None] * launched.processes()
        torch.distributed.all_gather_object(everyone, list(of_step))
    return set().union(*everyone)


def runs_here(case: Case, is_fsdp: bool) -> bool:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if launched.mesh_size("tp") > 1:
        is_split = case.model.partition(":")[0] in DECODERS and "lora" not in case.model
        return is_split and (num_groups() in case.worlds or not case.worlds)
    if is_fsdp and world > 2:
        return case.name in HSDP_CASES
    if is_fsdp:
        return 2 in case.worlds or not case.worlds
    return world in case.worlds


def errors_of(_, arguments: dict, names: Sequence[str] = (), layers: int | None = None) -> dict[str, dict[str, float]]:
    """Case -> error and bound, of all cases of this way of running or exactly of `names`, whatever way they are listed
    for. `arguments` are put over every case's own; `layers` are those of every model."""
    global pipeline_size
    pipeline_size = arguments.get("pipeline_parallel_size", 1)
    for config in (BERT, *DECODERS.values()) if layers else ():
        config["num_hidden_layers"] = layers
    is_fsdp = os.environ.get("ACCELERATE_USE_FSDP") == "true"
    errors = {}
    for case in CASES:
        if case.name in names if names else runs_here(case, is_fsdp):
            case.arguments |= arguments
            own = torch.tensor(measure(case), dtype=torch.float64)
            if launched.processes() > 1:
                torch.distributed.all_reduce(own, op=torch.distributed.ReduceOp.MAX)
            errors[case.name] = {"error": own.item(), "tolerance": case.tolerance}
    return errors


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", required=True)
    parser.add_argument("--names", nargs="+", default=[])
    parser.add_argument("--arguments", type=json.loads, default={})
    options = parser.parse_args()
    errors = errors_of(None, options.arguments, options.names)
    if rank() == 0:
        Path(options.output).write_text(json.dumps(errors))
    leave_together()


if __name__ == "__main__":
    main()

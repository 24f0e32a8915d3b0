"""What one step of a run computes: columns, row lengths, chunks, precisions, who trains; from the run file alone.

(1) columns and the tokens of their rows: `max_length`, or what the model takes at most (said in `notes`)
(2) chunks: rows per chunk from gradient_cache_chunk_size and _tokens; without a cache every row's graph is held
(3) who trains, and which layers have adapters: planner/who_trains.py
(4) a forward and backward of one row on a `Tape`; everything it keeps is linear in rows

Row lengths are upper bounds: real batches are shorter than `max_length`, never longer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hf_dist_ext import policy
from hf_dist_ext.planner.architectures import TWO_TOWERS, embed, embed_tower, generate
from hf_dist_ext.planner.knobs import Knobs, knobs_of
from hf_dist_ext.planner.tape import Lora, Parameter, Recipe, Tape
from hf_dist_ext.planner.text_architectures import Rows
from hf_dist_ext.planner.tower_architectures import num_patches
from hf_dist_ext.planner.vision_language import assumption, image_tokens
from hf_dist_ext.planner.who_trains import depth, lora_of, who_trains

BYTES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "float64": 8}
DEFAULT_LENGTH = 512  # where neither the run nor the model bounds it sooner
Cast = Literal["nothing", "products", "all"]  # the weights that a wrapper casts before autocast sees them


@dataclass(frozen=True)
class Column:
    """One column of the batch: `rows` per device, each `length` tokens at most; `tower` names whose forward it is."""

    name: str
    rows: int
    length: int
    tower: str = "backbone"
    images: int = 0


@dataclass(frozen=True)
class Work:
    """What a row costs: bytes kept for backward, weight copies, the largest value and what backward makes beside what
    is kept, multiply-adds."""

    kept: float
    kept_checkpointed: float
    casts: float
    casts_checkpointed: float
    largest: float
    temporary: float
    temporary_checkpointed: float
    forward: float
    backward: float


@dataclass(frozen=True, eq=False)  # by identity, so that what was computed once is found again
class Workload:
    """A run as the planner sees it; see the head of this file."""

    config: Mapping[str, Any]
    task: str
    columns: tuple[Column, ...]
    chunk_rows: int | None  # None: not given
    chunk_tokens: int | None
    is_cached: bool
    finds_chunk: bool  # chunk size "auto"
    keep_graph: int
    is_checkpointed: bool
    accumulation: int
    autocast_bytes: int | None
    load_bytes: int
    optimizer: str
    attention: str
    projection_dim: int | None
    embedding_dim: int
    trains: Callable[[str], bool]
    lora: Lora | None
    is_frozen: bool  # freezing fields or LoRA are given
    bucket_view: bool
    fsdp_mode: str
    replicates_frozen: str
    can_replicate: bool  # by freezing fields; adapters leave nothing whole
    knobs: Knobs
    has_feature_cache: bool
    is_embedding: bool
    notes: tuple[str, ...] = ()
    mask_bytes: int = 1  # see tape.Recipe
    has_padding: bool = True

    @property
    def batch(self) -> int:
        return self.columns[0].rows

    @functools.cached_property
    def has_frozen_backbone(self) -> bool:
        """Pooled vectors are constants of the run, and a projection goes on from them (frozen/encode_once.py)."""
        if self.projection_dim is None or not self.is_embedding:
            return False
        return not any(one.trains for name, one in self.parameters().items() if not name.startswith("projection."))

    @property
    def reads_features(self) -> bool:
        """Whether a step reads pooled output from frozen_feature_cache instead."""
        return self.has_feature_cache and self.has_frozen_backbone

    def products_of(self, column: Column, tape: Tape) -> float:
        """Multiply-adds of one forward in a step; frozen_feature_cache takes the frozen leading part out of it."""
        parts = [tape.before, *tape.layers, tape.after]
        if self.reads_features:
            return tape.after.products
        if self.has_feature_cache and self.config["model_type"] in TWO_TOWERS:
            return sum(part.products for part in parts) if any(p.trains for p in tape.parameters.values()) else 0.0
        if self.has_feature_cache and not self.is_embedding:  # the image encoder
            return sum(part.products for part in parts if part.backward or not depth(["vision"], part.name))
        return sum(part.products for part in parts)

    def widening(self, is_checkpointed: bool) -> int:
        """How many times wider the chunks of the pass without a graph are."""
        return policy.widening(self.config.get("num_hidden_layers"), is_checkpointed)

    def rows_of_chunk(self, length: int, chunk_rows: int | None = None) -> int:
        """(2) Rows per chunk for rows of a length, never more than a column has."""
        rows = max(column.rows for column in self.columns)
        if self.chunk_rows is not None and chunk_rows is None:
            rows = min(rows, self.chunk_rows)
        if self.chunk_tokens is not None and chunk_rows is None:
            rows = min(rows, max(1, self.chunk_tokens // length))
        return min(rows, chunk_rows) if chunk_rows else rows

    def num_chunks(self, chunk_rows: int | None = None) -> int:
        if not self.is_cached:
            return len(self.columns)
        return sum(-(-one.rows // self.rows_of_chunk(one.length, chunk_rows)) for one in self.columns)

    def item(self, name: str) -> int:
        """Bytes per element a parameter is stored in."""
        if self.is_frozen and self.autocast_bytes and self.trains(name):
            return 4  # frozen/plan.py keeps what trains in float32 under autocast
        return 4 if ".lora_" in name else self.load_bytes

    @property
    def compute_bytes(self) -> int:
        return self.autocast_bytes or self.load_bytes

    @property
    def gathered_as(self) -> Cast:
        """What FSDP casts: with a loss over embeddings what autocast does, else every weight (strategies/fsdp.py)."""
        if not self.autocast_bytes:
            return "nothing"
        return "products" if self.is_embedding else "all"

    def gathered_item(self, parameter: Parameter) -> int:
        """Bytes per element of a parameter that FSDP has made whole."""
        if self.gathered_as == "all" or (self.gathered_as == "products" and parameter.is_multiplied):
            return self.compute_bytes
        # accelerate keeps what trains under mixed precision in float32
        return 4 if parameter.trains and self.autocast_bytes else parameter.item

    @property
    def reduced_item(self) -> int:
        """Bytes per element of the gradients that FSDP adds up over backwards and reduces (strategies/fsdp.py)."""
        own = max(4, self.load_bytes) if self.is_embedding else self.compute_bytes
        return self.knobs.reduce_bytes or own

    def recipe(self, cast: Cast = "nothing") -> Recipe:
        items = {
            "nothing": self.item,
            "products": lambda name: 4 if self.trains(name) else self.item(name),
            "all": lambda name: self.compute_bytes,
        }
        return Recipe(
            trains=self.trains,
            item=items[cast],
            product_item=self.compute_bytes if cast == "products" else None,
            autocast_bytes=self.autocast_bytes,
            attention=self.attention,
            has_padding=self.has_padding,
            mask_bytes=self.mask_bytes,
            lora=self.lora,
        )

    @functools.cache  # noqa: B019, a plan's few workloads live as long as the plan
    def tape(self, column: Column, cast: Cast = "nothing", tensor_parallel: int = 1, rows: float = 1) -> Tape:
        """(4) One row of a column through its forward."""
        tape = Tape(self.recipe(cast))
        config = self.config if tensor_parallel == 1 else split_heads(self.config, tensor_parallel)
        of_row = Rows(rows, column.length, column.images)
        if not self.is_embedding:
            generate(tape, config, of_row)
        elif config["model_type"] in TWO_TOWERS:
            embed_tower(tape, config, of_row, is_image=column.tower == "image")
        else:
            embed(tape, config, of_row, self.projection_dim)
        return tape

    @functools.cache  # noqa: B019
    def work(self, column: Column, cast: Cast = "nothing", tensor_parallel: int = 1) -> Work:
        """Of one row of a column."""
        tape = self.tape(column, cast, tensor_parallel)
        plain, checkpointed = tape.cost(), tape.cost(lambda layer: True)
        parts = [tape.before, *tape.layers, tape.after]
        return Work(
            kept=plain.activations,
            kept_checkpointed=checkpointed.activations,
            casts=plain.casts,
            casts_checkpointed=checkpointed.casts,
            largest=max(part.largest for part in parts),
            temporary=plain.temporary,
            temporary_checkpointed=checkpointed.temporary,
            forward=self.products_of(column, tape),
            backward=sum(part.backward for part in parts),
        )

    def parameters(self, tensor_parallel: int = 1) -> dict[str, Parameter]:
        """Name -> `tape.Parameter`, of all towers."""
        found = {}
        for column in self.columns:
            found |= self.tape(column, "nothing", tensor_parallel).parameters
        return found


@dataclass(frozen=True, eq=False)
class TracedWorkload(Workload):
    """A model without a closed form, as torch's trace found it (`tasks/trace.py --shape`)."""

    found: Mapping[str, Any] = field(default_factory=dict)

    def work(self, column: Column, cast: Cast = "nothing", tensor_parallel: int = 1) -> Work:
        row = self.found["rows"][column.name]
        trains = any(one[2] for one in self.found["parameters"].values())
        casts = row["casts"] if cast == "nothing" else 0.0
        backward = 2 * row["products"] * trains
        # what backward makes meanwhile is in the trace already
        return Work(row["kept"], row["kept_checkpointed"], casts, casts, 0.0, 0.0, 0.0, row["products"], backward)

    def parameters(self, tensor_parallel: int = 1) -> dict[str, Parameter]:
        return {name: Parameter(*values) for name, values in self.found["parameters"].items()}


def split_heads(config: Mapping[str, Any], parts: int) -> dict[str, Any]:
    """The configuration of one rank's share of a decoder under tensor parallelism."""
    if config.get("text_config"):
        return {**config, "text_config": split_heads(config["text_config"], parts)}
    heads = config["num_attention_heads"]
    return {
        **config,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "num_attention_heads": heads // parts,
        "num_key_value_heads": (config.get("num_key_value_heads") or heads) // parts,
        "intermediate_size": config["intermediate_size"] // parts,
        **(
            {"moe_intermediate_size": config["moe_intermediate_size"] // parts}
            if "moe_intermediate_size" in config
            else {}
        ),
    }


# ---- from a run ----


def workload_of(run: Any, config: Mapping[str, Any]) -> Workload:
    """A parsed run (`config.Run`) and its model's complete configuration (planner/shape_config.py) -> Workload."""
    given, fields = run.given, run.options
    knobs = knobs_of(given)
    notes: list[str] = []
    is_embedding = getattr(fields, "task", "embedding") == "embedding"
    columns = _columns(run, config, is_embedding, notes)
    size = given.get("gradient_cache_chunk_size")
    tokens = given.get("gradient_cache_chunk_tokens")
    half = given.get("bf16") or given.get("fp16")
    lora = lora_of(given, config) if given.get("use_lora") else None
    trainable, frozen = given.get("trainable_modules"), given.get("frozen_modules")
    keep = given.get("gradient_cache_keep_graph", 0)
    dtype = fields.dtype or "float32"
    if dtype == "auto":
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    text = config.get("text_config") or config
    return Workload(
        config=config,
        task=getattr(fields, "task", "embedding"),
        columns=columns,
        chunk_rows=size if isinstance(size, int) else None,
        chunk_tokens=tokens,
        is_cached=size is not None or tokens is not None or given.get("gradient_cache_chunk_patches") is not None,
        finds_chunk=size == "auto",
        keep_graph=keep if isinstance(keep, int) else 0,
        is_checkpointed=bool(given.get("gradient_checkpointing") or given.get("activation_checkpointing")),
        accumulation=given.get("gradient_accumulation_steps") or 1,
        autocast_bytes=2 if half else None,
        load_bytes=BYTES.get(dtype, 4),
        optimizer=given.get("optim") or "adamw_torch_fused",
        attention=fields.attn_implementation or "sdpa",
        projection_dim=fields.projection_dim,
        embedding_dim=fields.projection_dim or config.get("projection_dim") or text["hidden_size"],
        trains=who_trains(trainable, frozen, is_lora=lora is not None),
        lora=lora,
        is_frozen=bool(trainable or frozen or lora),
        bucket_view=bool(given.get("ddp_gradient_as_bucket_view")),
        fsdp_mode=knobs.fsdp_mode or given.get("gradient_cache_fsdp") or "auto",
        replicates_frozen=given.get("frozen_parts_fsdp") or "auto",
        can_replicate=bool(trainable or frozen),
        knobs=knobs,
        has_feature_cache=given.get("frozen_feature_cache") is not None,
        is_embedding=is_embedding,
        notes=tuple(notes),
    )


def _columns(run: Any, config: Mapping[str, Any], is_embedding: bool, notes: list[str]) -> tuple[Column, ...]:
    """(1)"""
    fields, given = run.options, run.given
    rows = given.get("per_device_train_batch_size") or 8
    text = config.get("text_config") or config
    longest = text.get("max_position_embeddings") or DEFAULT_LENGTH
    if not is_embedding:
        per_image = image_tokens(config) if config.get("vision_config") else 0
        length = fields.max_length
        if not isinstance(length, int):
            length = min(longest, per_image + DEFAULT_LENGTH)
            notes.append(f"max_length is not given: counted with rows of {length} tokens.")
        if per_image and (said := assumption(config)):
            notes.append(said)
        return (Column("rows", rows, length, images=1 if per_image else 0),)
    names = dict(fields.columns or {"query": "query", "positive": "positive"})
    found = []
    for i, (name, source) in enumerate(names.items()):
        length = fields.max_length.get(name) if isinstance(fields.max_length, dict) else fields.max_length
        count = rows * (len(source) if isinstance(source, list) and i > 1 else 1)
        is_image = "image" in (name, source) or name in (given.get("image_columns") or ())
        if config["model_type"] in TWO_TOWERS and (is_image or (i == 1 and "image" not in str(names))):
            found.append(Column(name, count, num_patches(config["vision_config"]), tower="image", images=1))
            continue
        if length is None:
            length = min(longest, DEFAULT_LENGTH)
            notes.append(f"max_length of {name} is not given: counted with rows of {length} tokens.")
        length = min(int(length), longest)
        multiple = given.get("gradient_cache_width_multiple") or 8
        found.append(
            Column(name, count, -(-length // multiple) * multiple, "text" if found_towers(config) else "backbone")
        )
    return tuple(found)


def found_towers(config: Mapping[str, Any]) -> bool:
    return config["model_type"] in TWO_TOWERS


def with_batch(work: Workload, rows: int) -> Workload:
    """The same with another batch per device."""
    share = rows / work.batch
    columns = tuple(replace(one, rows=max(1, round(one.rows * share))) for one in work.columns)
    return replace(work, columns=columns)

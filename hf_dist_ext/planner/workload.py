"""What one step of a run computes: columns, row lengths, chunks, precisions; from the run file alone.

What a forward and backward of one row takes comes from a trace (planner/traced.py), and everything in it is linear in
rows. Row lengths are those of the data where it lies here (lengths.py), else upper bounds: `max_length`, or what the
model takes at most. Both are said in `notes`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hf_dist_ext import policy
from hf_dist_ext.planner import lengths, pictures
from hf_dist_ext.planner.forward import Cost, Forward, Layer, Parameter, share_forward, share_parameter
from hf_dist_ext.planner.knobs import Knobs, knobs_of
from hf_dist_ext.run.config import RunConfig
from hf_dist_ext.run.losses import LATE, compares_all_pairs
from hf_dist_ext.run.parts import outputs_of
from hf_dist_ext.run.sources import all_parts, sources_of

BYTES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "float64": 8}
PAIR = {"query": "query", "positive": "positive"}
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
    tokens: float | None = None  # of a row on average, where the data was looked at

    @property
    def usual(self) -> float:
        """Tokens of a row on average, as far as is known."""
        return self.length if self.tokens is None else self.tokens


@dataclass(frozen=True)
class Work:
    """What a row costs: bytes as it stands and with checkpointing, those of the largest value, multiply-adds."""

    plain: Cost
    checkpointed: Cost
    largest: float
    forward: float
    backward: float


@dataclass(frozen=True, eq=False)  # by identity, so that what was computed once is found again
class Workload:
    """A run as the planner sees it."""

    config: Mapping[str, Any]
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
    split_bytes: int  # the same where tensor parallelism splits the weights (tasks/parts.py)
    optimizer: str
    projection_dim: int | None
    embedding_dim: int
    leaves_tokens: bool  # a vector of every token, for late interaction
    token_dim: int | None  # of these where a row has a dense vector and term weights too
    bucket_view: bool
    fsdp_mode: str
    replicates_frozen: str
    can_replicate: bool  # by freezing fields; adapters leave nothing whole
    knobs: Knobs
    has_feature_cache: bool
    is_embedding: bool
    has_tiled_loss: bool
    exchange: str  # of candidates, "gather" for losses that know no other
    is_symmetric: bool
    has_bf16_products: bool
    packs: bool = False  # accelerators get chunks without padding, where the strategy does not need it
    notes: tuple[str, ...] = ()
    mask_bytes: int = 1  # of dropout, per element; 0 stands for an element's own, as on a CPU
    has_padding: bool = True  # rows of different lengths, so that attention takes a mask
    found: Mapping[str, Any] = field(default_factory=dict)  # by the trace of the model's forwards (tasks/trace.py)

    @property
    def batch(self) -> int:
        return self.columns[0].rows

    def vectors(self, columns: Sequence[Column]) -> int:
        """Of the rows of a batch's columns: one each, or one for every token."""
        return sum(one.rows * (one.length if self.leaves_tokens else 1) for one in columns)

    def candidates_go_round(self, world: int) -> bool:
        """Instead of being gathered by each of so many devices with rows of their own."""
        all_rows = self.vectors(self.columns) * world
        return world > 1 and policy.goes_round(self.exchange, all_rows, self.embedding_dim)

    @functools.cached_property
    def has_frozen_backbone(self) -> bool:
        """Pooled vectors are constants of the run, and a projection goes on from them (frozen/encode_once.py)."""
        if self.projection_dim is None or not self.is_embedding or self.leaves_tokens:
            return False
        return not any(one.trains for name, one in self.parameters().items() if not name.startswith("projection."))

    @property
    def reads_features(self) -> bool:
        """Whether a step reads pooled output from frozen_feature_cache instead."""
        return self.has_feature_cache and self.has_frozen_backbone

    def _products_of(self, parts: list[Layer]) -> float:
        """Multiply-adds of one forward in a step; frozen_feature_cache takes the frozen leading part out of it."""
        if self.reads_features:
            parts = parts[-1:]
        elif self.has_feature_cache and self.has_towers:
            parts = parts if any(part.backward for part in parts) else []
        elif self.has_feature_cache and not self.is_embedding:  # the image encoder
            parts = [part for part in parts if part.backward or not part.is_of_images]
        return sum(part.products for part in parts)

    @property
    def has_towers(self) -> bool:
        return self.config["model_type"] in pictures.TWO_TOWERS

    def widening(self, is_checkpointed: bool) -> int:
        """How many times wider the chunks of the pass without a graph are."""
        return policy.widening(self.config.get("num_hidden_layers"), is_checkpointed)

    @functools.cached_property
    def longest(self) -> int:
        """Tokens of the longest rows."""
        return max(column.length for column in self.columns)

    def chunk_fields(self, chunk_rows: int) -> dict[str, int | None]:
        """Fields of the run file for chunks of so many of the longest rows: in tokens where the run bounds tokens
        alone."""
        if self.is_embedding and self.chunk_tokens is not None and self.chunk_rows is None:
            return {"gradient_cache_chunk_tokens": chunk_rows * self.longest}
        tokens = {} if self.chunk_tokens is None else {"gradient_cache_chunk_tokens": None}
        return {"gradient_cache_chunk_size": chunk_rows, **tokens}

    def _limits(self, chunk_rows: int | None) -> tuple[int | None, int | None]:
        """Rows and tokens that a chunk has at most. `chunk_rows`: of the longest rows; None: as the run says."""
        if chunk_rows is None:
            return self.chunk_rows, self.chunk_tokens
        fields = self.chunk_fields(chunk_rows)
        return fields.get("gradient_cache_chunk_size"), fields.get("gradient_cache_chunk_tokens")

    def rows_of_chunk(self, length: int, chunk_rows: int | None = None) -> int:
        """Rows per chunk for rows of a length, never more than a column has. `chunk_rows`: as for `chunk_fields`."""
        most, tokens = self._limits(chunk_rows)
        rows = max(column.rows for column in self.columns)
        if tokens is not None:
            rows = min(rows, max(1, tokens // length))
        return rows if most is None else min(rows, most)

    def held_rows(self, column: Column, chunk_rows: int | None = None) -> float:
        """Rows of a column that are as many tokens as the chunk which has most. A packed chunk is filled with shorter
        rows up to its limit, so this is no whole number."""
        rows = min(column.rows, self.rows_of_chunk(column.length, chunk_rows))
        most, tokens = self._limits(chunk_rows)
        if self.has_padding or tokens is None:
            return rows
        return min(column.rows if most is None else min(column.rows, most), max(rows, tokens / column.length))

    @functools.cached_property
    def packed(self) -> Workload:
        """The same in chunks as they run on accelerators: without padding, if they are packed."""
        return replace(self, has_padding=False) if self.packs else self

    def num_chunks(self, chunk_rows: int | None = None) -> int:
        if not self.is_cached and chunk_rows is None:
            return len(self.columns)
        return sum(-(-one.rows // self.rows_of_chunk(one.length, chunk_rows)) for one in self.columns)

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

    @functools.cache  # noqa: B019, a plan's few workloads live as long as the plan
    def forward(self, column: Column, cast: Cast = "nothing", tensor_parallel: int = 1) -> Forward:
        """Of one row of a column, by a model some of whose weights a wrapper has cast, or by one device of several
        that share its layers."""
        if tensor_parallel == 1:
            return Forward.of(self._columns_of(self.found["whole"], column, cast))
        whole, of_one = (Forward.of(self._columns_of(part, column)) for part in self._split)
        return share_forward(whole, of_one, self.found["split"]["ways"], tensor_parallel)

    @functools.cache  # noqa: B019
    def work(self, column: Column, cast: Cast = "nothing", tensor_parallel: int = 1) -> Work:
        """Of one row of a column."""
        forward = self.forward(column, cast, tensor_parallel)
        parts = forward.parts
        largest = max(part.largest for part in parts)
        backward = sum(part.backward for part in parts)
        return Work(forward.cost(), forward.cost(lambda layer: True), largest, self._products_of(parts), backward)

    @functools.cache  # noqa: B019
    def parameters(self, tensor_parallel: int = 1) -> dict[str, Parameter]:
        """Name -> `forward.Parameter`, of all towers, in the order of the model."""
        if tensor_parallel == 1:
            return {name: Parameter(*one) for name, one in self.found["whole"]["parameters"].items()}
        whole, of_one = ({name: Parameter(*one) for name, one in part["parameters"].items()} for part in self._split)
        ways = self.found["split"]["ways"]
        return {name: share_parameter(one, of_one[name], ways, tensor_parallel) for name, one in whole.items()}

    def _columns_of(self, found: Mapping[str, Any], column: Column, cast: Cast = "nothing") -> Mapping[str, Any]:
        by_cast = found["columns" if self.has_padding else "packed"][column.name]
        return by_cast.get(cast) or by_cast["nothing"]  # without autocast nothing is cast

    @property
    def _split(self) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """The whole model, and what one of the devices that share its layers has."""
        return self.found["split"]["whole"] or self.found["whole"], self.found["split"]["shared"]

    @property
    def can_be_split(self) -> bool:
        """Whether devices can share its layers: a plan for that is there."""
        return bool(self.found["split"])


# ---- from a run ----


def workload_of(run: Any, config: Mapping[str, Any]) -> Workload:
    """A parsed run (`config.Run`) and its model's complete configuration (planner/shape_config.py) -> Workload."""
    given, fields = run.given, run.options
    knobs = knobs_of(given)
    notes: list[str] = []
    is_embedding = fields.task == "embedding"
    columns = _columns(run, config, is_embedding, notes)
    size = given.get("gradient_cache_chunk_size")
    tokens = given.get("gradient_cache_chunk_tokens")
    half = given.get("bf16") or given.get("fp16")
    trainable, frozen = given.get("trainable_modules"), given.get("frozen_modules")
    keep = given.get("gradient_cache_keep_graph", 0)
    has_frozen_part = trainable is not None or frozen is not None or bool(given.get("use_lora"))
    keeps_files = policy.keeps_precision_of_files(
        fields.dtype, bool(fields.model_name_or_path), has_frozen_part, bool(half)
    )
    dtype = fields.dtype or "float32"
    if keeps_files or dtype == "auto":
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    text = config.get("text_config") or config
    width = text.get("hidden_size") or 0
    token_dim = (fields.token_dim or width) if is_embedding and outputs_of(fields) else None
    parts = [part.config for part in all_parts(fields)] if is_embedding else []
    is_cached = size is not None or tokens is not None or given.get("gradient_cache_chunk_patches") is not None
    packs = is_embedding and is_cached and token_dim is None and _packs(given, config, fields.attn_implementation)
    if packs:
        notes.append("chunks are packed: counted without padding (gradient_cache_packing).")
    return Workload(
        config=config,
        columns=columns,
        chunk_rows=size if isinstance(size, int) else None,
        chunk_tokens=tokens,
        is_cached=is_cached,
        finds_chunk=size == "auto",
        keep_graph=keep if isinstance(keep, int) else 0,
        is_checkpointed=bool(given.get("gradient_checkpointing") or given.get("activation_checkpointing")),
        accumulation=given.get("gradient_accumulation_steps") or 1,
        autocast_bytes=2 if half else None,
        load_bytes=BYTES.get(dtype, 4),
        split_bytes=4 if keeps_files else BYTES.get(dtype, 4),
        optimizer=given.get("optim") or "adamw_torch_fused",
        projection_dim=fields.projection_dim,
        leaves_tokens=any(part.loss == LATE for part in parts),
        token_dim=token_dim,
        embedding_dim=token_dim or fields.projection_dim or config.get("projection_dim") or width,
        bucket_view=bool(given.get("ddp_gradient_as_bucket_view")),
        fsdp_mode=knobs.fsdp_mode or given.get("gradient_cache_fsdp") or "auto",
        replicates_frozen=given.get("frozen_parts_fsdp") or "auto",
        can_replicate=bool(trainable or frozen),
        knobs=knobs,
        has_feature_cache=given.get("frozen_feature_cache") is not None,
        is_embedding=is_embedding,
        has_tiled_loss=not any(compares_all_pairs(part.loss, part.loss_options) for part in parts),
        exchange=_exchange(parts),
        is_symmetric=any(part.symmetric for part in parts),
        has_bf16_products=all(part.bf16_products for part in parts),
        packs=packs,
        notes=tuple(notes),
    )


def _packs(given: Mapping[str, Any], config: Mapping[str, Any], attention: str | None) -> bool:
    """As training/packing.py decides on an accelerator."""
    asked = given.get("gradient_cache_packing", "auto")
    kernels = {"auto": policy.FLASH, True: (*policy.FLASH, "sdpa")}.get(asked, ())
    can = config["model_type"] in policy.PACKED_FAMILIES and config.get("is_causal", True)
    return bool(can and (attention or "sdpa") in kernels and not given.get("torch_compile"))


def _columns(run: Any, config: Mapping[str, Any], is_embedding: bool, notes: list[str]) -> tuple[Column, ...]:
    fields, given = run.options, run.given
    rows = given.get("per_device_train_batch_size") or 8
    has_towers, text = config["model_type"] in pictures.TWO_TOWERS, config.get("text_config") or config
    longest = text.get("max_position_embeddings") or DEFAULT_LENGTH
    if not is_embedding:
        per_image = pictures.image_tokens(config) if config.get("vision_config") else 0
        length = fields.max_length
        if not isinstance(length, int):
            length = min(longest, per_image + DEFAULT_LENGTH)
            notes.append(f"max_length is not given: counted with rows of {length} tokens.")
        if per_image and (said := pictures.assumption(config)):
            notes.append(said)
        return (Column("rows", rows, length, images=1 if per_image else 0),)
    names = _names(fields, notes)
    pictured = set() if has_towers else _pictured(fields, names, config, notes)
    limits = {name: lengths.limit_of(fields, name, i == 0) for i, name in enumerate(names)}
    for name, length in limits.items():
        limits[name] = min(
            longest, length or DEFAULT_LENGTH + (pictures.image_tokens(config) if name in pictured else 0)
        )
    texts = {name: limit for name, limit in limits.items() if name not in pictured}
    seen, columns = lengths.sampled(fields, names, texts), []
    for i, (name, source) in enumerate(names.items()):
        count = rows * (len(source) if isinstance(source, list) and i > 1 else 1)
        is_image = "image" in (name, source) or name in (given.get("image_columns") or ())
        if has_towers and (is_image or (i == 1 and "image" not in str(names))):
            columns.append(Column(name, count, pictures.num_patches(config["vision_config"]), tower="image", images=1))
            continue
        length, of_data = limits[name], seen.get(name)
        if of_data is not None:
            length = of_data.most
            notes.append(of_data.in_words(name))
        elif lengths.limit_of(fields, name, i == 0) is None:
            notes.append(f"max_length of {name} is not given: counted with rows of {length} tokens.")
        multiple = given.get("gradient_cache_width_multiple") or 8
        if given.get("torch_compile"):
            length = min(max(length, longest), policy.width_in_buckets(length, multiple))
        else:
            length = min(longest, -(-length // multiple) * multiple)
        tower, images = "text" if has_towers else "backbone", int(name in pictured)
        columns.append(Column(name, count, length, tower, images, of_data and of_data.mean))
    return tuple(columns)


def _pictured(fields: RunConfig, names: Mapping[str, Any], config: Mapping[str, Any], notes: list[str]) -> set[str]:
    """The columns whose rows hold a picture each, of a model that embeds texts and pictures alike."""
    if not config.get("vision_config"):
        return set()
    found = {name for name, source in names.items() if isinstance(source, dict) and "image" in source}
    found |= {*(fields.image_columns or ())} & {*names}
    if fields.dataset_name == "glyph-search":
        found |= {list(names)[1]}
    if not found:
        notes.append(
            'no column is said to hold pictures (image_columns, or "image" in columns): counted as texts alone.'
        )
        return set()
    if config["model_type"] not in pictures.KINDS:
        notes.append(f'pictures of a "{config["model_type"]}" can not be counted: what they take comes on top.')
        return set()
    if said := pictures.assumption(config):
        notes.append(said)
    notes.append(f"every row of {', '.join(sorted(found))} is counted with one picture.")
    return found


def _names(fields: RunConfig, notes: list[str]) -> dict[str, str | list[str]]:
    """The columns of a batch; of several datasets those of the one with most texts in a row."""
    sources = sources_of(fields)
    if not sources:
        return dict(fields.columns or PAIR | lengths.negatives_of(fields))
    of_each = [source.config.columns or PAIR for source in sources]
    texts = [sum(len(name) if isinstance(name, list) else 1 for name in names.values()) for names in of_each]
    most = texts.index(max(texts))
    notes.append(f'datasets: counted with batches of "{sources[most].name}", which has most texts in a row.')
    return dict(of_each[most])


def _exchange(parts: Sequence[RunConfig]) -> str:
    """How candidates meet: "gather" where one of the losses knows no other way."""
    of_losses = {"infonce": lambda part: part.cross_device_exchange}
    of_losses["siglip"] = lambda part: (part.loss_options or {}).get("cross_device_exchange", "auto")
    found = {of_losses[part.loss](part) if part.loss in of_losses else "gather" for part in parts}
    return next((name for name in ("gather", "auto") if name in found), "ring")


def with_batch(work: Workload, rows: int) -> Workload:
    """The same with another batch per device."""
    share = rows / work.batch
    columns = tuple(replace(one, rows=max(1, round(one.rows * share))) for one in work.columns)
    return replace(work, columns=columns)

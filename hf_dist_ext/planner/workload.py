"""What one step of a run computes: columns, row lengths, chunks, precisions.

planner/from_run.py reads them of a run file. What a forward and backward of one row takes comes from a trace
(planner/traced.py), and everything in it is linear in rows.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hf_dist_ext import policy
from hf_dist_ext.planner.forward import Cost, Forward, Layer, Parameter, share_forward, share_parameter

BYTES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "float64": 8}
TWO_TOWERS = ("clip", "siglip")  # a model of texts beside one of pictures
# the weights that a wrapper casts before autocast sees them: none, those of matrix products, all
Cast = Literal["nothing", "matmul", "all"]


@dataclass(frozen=True)
class BatchColumn:
    """One column of the batch: `rows` per device, each `length` tokens at most; `tower` names whose forward it is."""

    name: str
    rows: int
    length: int
    tower: str = "backbone"
    images: int = 0
    patches: int = 0  # of a row's pictures


@dataclass(frozen=True)
class Chunks:
    """So many chunks alike, of rows as long as a column's; shorter rows of other columns may be among them."""

    column: BatchColumn
    rows: int
    number: int


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

    given: Mapping[str, Any]  # fields of the run file
    config: Mapping[str, Any]  # of the model, complete
    columns: tuple[BatchColumn, ...]
    chunk_rows: int | None  # None: not given
    chunk_tokens: int | None
    chunk_patches: int | None
    is_cached: bool
    finds_chunk: bool  # chunk size "auto"
    is_checkpointed: bool
    is_in_4_bits: bool  # the base below adapters
    accumulation: int
    autocast_bytes: int | None
    load_bytes: int
    split_bytes: int  # the same where tensor parallelism splits the weights (tasks/parts.py)
    optimizer: str
    projection_dim: int | None
    embedding_dim: int
    leaves_tokens: bool  # a vector of every token, for late interaction
    is_embedding: bool
    has_tiled_loss: bool
    sees_all_rows: bool  # the loss, of all devices
    packs: bool = False  # accelerators get chunks without padding, where the strategy does not need it
    notes: tuple[str, ...] = ()
    mask_bytes: int = 1  # of dropout, per element; 0 stands for an element's own, as on a CPU
    has_padding: bool = True  # rows of different lengths, so that attention takes a mask
    found: Mapping[str, Any] = field(default_factory=dict)  # by the trace of the model's forwards (tasks/trace.py)

    @property
    def batch(self) -> int:
        return self.columns[0].rows

    @property
    def fsdp_mode(self) -> str:
        """Whether weights stay whole between the chunks of a step: "speed", "memory" or "auto"."""
        by_sharding = {"FULL_SHARD": "memory", "SHARD_GRAD_OP": "speed"}.get(self.given.get("sharding") or "")
        return by_sharding or self.given.get("gradient_cache_fsdp") or "auto"

    @property
    def pipeline_size(self) -> int:
        return self.given.get("pipeline_parallel_size") or 1

    @property
    def has_feature_cache(self) -> bool:
        return self.given.get("frozen_feature_cache") is not None

    def vectors(self, columns: Sequence[BatchColumn]) -> int:
        """Of the rows of a batch's columns: one each, or one for every token."""
        return sum(one.rows * (one.length if self.leaves_tokens else 1) for one in columns)

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

    def _multiply_adds_of(self, parts: list[Layer]) -> float:
        """Multiply-adds of one forward in a step; frozen_feature_cache takes the frozen leading part out of it."""
        if self.reads_features:
            parts = parts[-1:]
        elif self.has_feature_cache and self.has_towers:
            parts = parts if any(part.backward for part in parts) else []
        elif self.has_feature_cache and not self.is_embedding:  # the image encoder
            parts = [part for part in parts if part.backward or not part.is_of_images]
        return sum(part.multiply_adds for part in parts)

    @property
    def has_towers(self) -> bool:
        return self.config["model_type"] in TWO_TOWERS

    def widening(self, is_checkpointed: bool) -> int:
        """How many times wider the chunks of the pass without a graph are."""
        return policy.widening(self.config.get("num_hidden_layers"), is_checkpointed)

    @functools.cached_property
    def longest_column(self) -> BatchColumn:
        return max(self.columns, key=lambda column: column.length)

    @property
    def longest(self) -> int:
        """Tokens of the longest rows."""
        return self.longest_column.length

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

    @functools.cached_property
    def tables(self) -> list[list[BatchColumn]]:
        """The columns whose rows share chunks, the longest rows first: those of one tower, apart from those with
        pictures (engine/layout.py)."""
        tables: dict[Any, list[BatchColumn]] = {}
        for column in sorted(self.columns, key=lambda one: -one.length):
            tables.setdefault(column.name if self.has_towers else column.images > 0, []).append(column)
        return list(tables.values())

    @functools.cached_property
    def most_rows(self) -> int:
        """That one chunk could have."""
        return max(sum(column.rows for column in table) for table in self.tables)

    def rows_of_chunk(self, column: BatchColumn, chunk_rows: int | None = None) -> int:
        """Of rows like a column's, at most all that share chunks. `chunk_rows`: as for `chunk_fields`."""
        most, tokens = self._limits(chunk_rows)
        rows = self.most_rows
        if tokens is not None:
            rows = min(rows, max(1, tokens // column.length))
        if self.chunk_patches is not None and column.patches:
            rows = min(rows, max(1, self.chunk_patches // column.patches))
        return rows if most is None else min(rows, most)

    def rows_beside(self, column: BatchColumn) -> int:
        """Those that may stand in a chunk as long as the rows of a column: its own, and shorter ones."""
        table = next(table for table in self.tables if column in table)
        return sum(one.rows for one in table[table.index(column) :])

    def chunks(self, chunk_rows: int | None = None) -> list[Chunks]:
        """As engine/layout.py makes them of a batch with sorted rows."""
        found, is_chunked = [], self.is_cached or chunk_rows is not None
        for table in self.tables if is_chunked else [[one] for one in self.columns]:
            first, end, total = 0, 0, sum(column.rows for column in table)
            for column in table:
                end += column.rows
                rows = self.rows_of_chunk(column, chunk_rows)
                if (number := -(-(end - first) // rows)) <= 0:  # all stand behind longer rows
                    continue
                last = min(rows, total - first - (number - 1) * rows)
                found += [Chunks(column, rows, number - 1)] * (number > 1) + [Chunks(column, last, 1)]
                first += (number - 1) * rows + last
        return found

    def held_rows(self, column: BatchColumn, chunk_rows: int | None = None) -> float:
        """Rows of a column's length that are as many tokens as the chunk which has most. A packed chunk is filled with
        shorter rows up to its limit, so this is no whole number."""
        beside = self.rows_beside(column)
        rows = min(beside, self.rows_of_chunk(column, chunk_rows))
        most, tokens = self._limits(chunk_rows)
        if self.has_padding or tokens is None:
            return rows
        return min(beside if most is None else min(beside, most), max(rows, tokens / column.length))

    @functools.cached_property
    def packed(self) -> Workload:
        """The same in chunks as they run on accelerators: without padding, if they are packed."""
        return replace(self, has_padding=False) if self.packs else self

    def num_chunks(self, chunk_rows: int | None = None) -> int:
        return sum(chunks.number for chunks in self.chunks(chunk_rows))

    @property
    def compute_bytes(self) -> int:
        return self.autocast_bytes or self.load_bytes

    @property
    def gathered_as(self) -> Cast:
        """What FSDP casts: with a loss over embeddings what autocast does, else every weight (strategies/fsdp.py)."""
        if not self.autocast_bytes:
            return "nothing"
        return "matmul" if self.is_embedding else "all"

    def gathered_item(self, parameter: Parameter) -> int:
        """Bytes per element of a parameter that FSDP has made whole."""
        if self.gathered_as == "all" or (self.gathered_as == "matmul" and parameter.is_multiplied):
            return self.compute_bytes
        # accelerate keeps what trains under mixed precision in float32
        return 4 if parameter.trains and self.autocast_bytes else parameter.item

    @property
    def reduced_item(self) -> int:
        """Bytes per element of the gradients that FSDP adds up over backwards and reduces (strategies/fsdp.py)."""
        own = max(4, self.load_bytes) if self.is_embedding else self.compute_bytes
        return BYTES.get(self.given.get("reduce_dtype") or "", own)

    @functools.cache  # noqa: B019, a plan's few workloads live as long as the plan
    def forward(self, column: BatchColumn, cast: Cast = "nothing", tensor_parallel: int = 1) -> Forward:
        """Of one row of a column, by a model some of whose weights a wrapper has cast, or by one device of several
        that share its layers."""
        if tensor_parallel == 1:
            return Forward.of(self._columns_of(self.found["whole"], column, cast))
        whole, of_one = (Forward.of(self._columns_of(part, column)) for part in self._split)
        return share_forward(whole, of_one, self.found["split"]["ways"], tensor_parallel)

    @functools.cache  # noqa: B019
    def work(self, column: BatchColumn, cast: Cast = "nothing", tensor_parallel: int = 1) -> Work:
        """Of one row of a column."""
        forward = self.forward(column, cast, tensor_parallel)
        parts = forward.parts
        largest = max(part.largest for part in parts)
        backward = sum(part.backward for part in parts)
        return Work(
            forward.cost(), forward.cost(is_checkpointed=True), largest, self._multiply_adds_of(parts), backward
        )

    @functools.cache  # noqa: B019
    def parameters(self, tensor_parallel: int = 1) -> dict[str, Parameter]:
        """Name -> `forward.Parameter`, of all towers, in the order of the model."""
        if tensor_parallel == 1:
            return {name: Parameter(*one) for name, one in self.found["whole"]["parameters"].items()}
        whole, of_one = ({name: Parameter(*one) for name, one in part["parameters"].items()} for part in self._split)
        ways = self.found["split"]["ways"]
        return {name: share_parameter(one, of_one[name], ways, tensor_parallel) for name, one in whole.items()}

    def _columns_of(self, found: Mapping[str, Any], column: BatchColumn, cast: Cast = "nothing") -> Mapping[str, Any]:
        by_cast = found["columns" if self.has_padding else "packed"][column.name]
        return by_cast.get(cast) or by_cast["nothing"]  # without autocast nothing is cast

    @property
    def _split(self) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """The whole model, and what one of the devices that share its layers has."""
        return self.found["split"]["whole"] or self.found["whole"], self.found["split"]["shared"]

    @property
    def sizes_to_split(self) -> list[int]:
        """How many devices can share its layers."""
        return (self.found["split"] or {"sizes": []})["sizes"]


def with_batch(work: Workload, rows: int) -> Workload:
    """The same with another batch per device."""
    share = rows / work.batch
    columns = tuple(replace(one, rows=max(1, round(one.rows * share))) for one in work.columns)
    return replace(work, columns=columns)

"""A parsed run and its model's configuration -> `Workload` (planner/workload.py).

The data is not opened: rows are as long as `max_length` or the model's folder lets them be, and `notes` says what was
assumed beside it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_dist_ext import policy
from hf_dist_ext.planner.local_files import model_file
from hf_dist_ext.planner.workload import BYTES, TWO_TOWERS, BatchColumn, Workload
from hf_dist_ext.run.config import RunConfig
from hf_dist_ext.run.losses import LATE, compares_all_pairs
from hf_dist_ext.run.sources import BUILT_IN, GLYPH_SEARCH, all_parts, sources_of

PAIR = {"query": "query", "positive": "positive"}
DEFAULT_LENGTH = 512  # where neither the run nor the model bounds it sooner
MOST_TOKENS = 100_000  # a tokenizer that says more says that it has no limit
READERS = ("sentence_bert_config.json", "sentence_roberta_config.json", "sentence_xlm-roberta_config.json")


def workload_of(run: Any, config: Mapping[str, Any]) -> Workload:
    """A parsed run (`config.Run`) and its complete configuration (`config_of`, planner/traced.py) -> Workload."""
    given, fields = run.given, run.options
    notes: list[str] = []
    is_embedding = fields.task == "embedding"
    columns = _columns(run, config, is_embedding, notes)
    limits = [given.get(f"gradient_cache_chunk_{unit}") for unit in ("size", "tokens", "patches")]
    size, is_cached = limits[0], limits != [None] * 3
    half = given.get("bf16") or given.get("fp16")
    freezes = any(given.get(name) is not None for name in ("trainable_modules", "frozen_modules"))
    has_frozen_part = freezes or bool(given.get("use_lora"))
    keeps_files = policy.keeps_precision_of_files(
        fields.dtype, bool(fields.model_name_or_path), has_frozen_part, bool(half)
    )
    dtype = fields.dtype or "float32"
    if keeps_files or dtype == "auto":
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    text = config.get("text_config") or config
    width = text.get("hidden_size") or 0
    parts = [part.config for part in all_parts(fields)] if is_embedding else []
    is_half = bool(half) or dtype in ("bfloat16", "float16")
    packs = is_embedding and is_cached and _packs(given, config, fields.attn_implementation, is_half)
    if packs:
        notes.append("chunks are packed: counted without padding (gradient_cache_packing).")
    return Workload(
        given=given,
        config=config,
        columns=columns,
        chunk_rows=size if isinstance(size, int) else None,
        chunk_tokens=limits[1],
        chunk_patches=limits[2],
        is_cached=is_cached,
        finds_chunk=size == "auto",
        is_checkpointed=bool(given.get("gradient_checkpointing") or given.get("activation_checkpointing")),
        is_in_4_bits=fields.load_in_4bit,
        accumulation=given.get("gradient_accumulation_steps") or 1,
        autocast_bytes=2 if half else None,
        load_bytes=BYTES.get(dtype, 4),
        split_bytes=4 if keeps_files else BYTES.get(dtype, 4),
        optimizer=given.get("optim") or "adamw_torch_fused",
        projection_dim=fields.projection_dim,
        leaves_tokens=any(part.loss == LATE for part in parts),
        embedding_dim=fields.projection_dim or config.get("projection_dim") or width,
        is_embedding=is_embedding,
        has_tiled_loss=not any(compares_all_pairs(part.loss, part.loss_options) for part in parts),
        sees_all_rows=any(_sees_all_rows(part) for part in parts),
        packs=packs,
        notes=tuple(notes),
    )


def _packs(given: Mapping[str, Any], config: Mapping[str, Any], attention: str | None, is_half: bool) -> bool:
    """As training/packing.py decides on an accelerator, of NVIDIA's Ampere or later."""
    asked, attention = given.get("gradient_cache_packing", "auto"), attention or "sdpa"
    if config["model_type"] not in policy.PACKED_FAMILIES:
        return False
    if attention not in ("sdpa", *policy.FLASH) or not asked:
        return False
    return asked is True or not policy.why_many_calls(attention, policy.VARLEN_CAPABILITY, is_half, config.get)


def _columns(run: Any, config: Mapping[str, Any], is_embedding: bool, notes: list[str]) -> tuple[BatchColumn, ...]:
    fields, given = run.options, run.given
    rows = given.get("per_device_train_batch_size") or 8
    has_towers, text = config["model_type"] in TWO_TOWERS, config.get("text_config") or config
    longest = text.get("max_position_embeddings") or DEFAULT_LENGTH
    if not is_embedding:
        picture = config.get("picture") or {"tokens": 0, "assumption": ""}
        per_image = picture["tokens"]
        length = fields.max_length
        if not isinstance(length, int):
            length = min(longest, per_image + DEFAULT_LENGTH)
            notes.append(f"max_length is not given: counted with rows of {length} tokens.")
        notes += [picture["assumption"]] * bool(picture["assumption"])
        return (BatchColumn("rows", rows, length, images=1 if per_image else 0),)
    names, per_picture = _names(fields, notes), config.get("picture", {}).get("tokens", 0)
    pictured = set() if has_towers else _pictured(fields, names, config, notes)
    limits = {name: _limit_of(fields, name, i == 0) for i, name in enumerate(names)}
    is_wide = config["model_type"] in policy.FIXED_WIDTH and fields.max_length is None
    for name, length in limits.items():
        length = longest if is_wide else length or DEFAULT_LENGTH + per_picture * (name in pictured)
        limits[name] = min(longest, length)
    columns = []
    for i, (name, source) in enumerate(names.items()):
        count = rows * (len(source) if isinstance(source, list) and i > 1 else 1)
        is_image = "image" in (name, source) or name in (given.get("image_columns") or ())
        if has_towers and (is_image or (i == 1 and "image" not in str(names))):
            patches = config["picture"]["patches"]
            columns.append(BatchColumn(name, count, patches, tower="image", images=1, patches=patches))
            continue
        length = limits[name]
        if not is_wide and _limit_of(fields, name, i == 0) is None:
            notes.append(f"max_length of {name} is not given: counted with rows of {length} tokens.")
        length = min(longest, -(-length // 8) * 8)  # engine/tables.py, ChunkLimits.width
        tower, images = "text" if has_towers else "backbone", int(name in pictured)
        patches = config["picture"]["patches"] if images else 0
        columns.append(BatchColumn(name, count, length, tower, images, patches))
    return tuple(columns)


def _limit_of(fields: RunConfig, column: str, is_query: bool) -> int | None:
    """Tokens at which training cuts the rows of a column: `max_length` of the run file, else what the model's folder
    or its tokenizer says; None: nothing here says so."""
    given = fields.max_length.get(column) if isinstance(fields.max_length, Mapping) else fields.max_length
    if given is not None or not fields.model_name_or_path:
        return given
    name, revision = fields.model_name_or_path, fields.model_revision
    for file in READERS:
        reading = _json(model_file(name, file, revision))
        length = reading.get("query_length" if is_query else "document_length") or reading.get("max_seq_length")
        if length is not None:
            return int(length)
    tokenizer = _json(model_file(fields.tokenizer_name or name, "tokenizer_config.json", revision))
    length = tokenizer.get("model_max_length")
    return int(length) if length is not None and length < MOST_TOKENS else None


def _json(path: Path | None) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path is not None else {}


def _pictured(fields: RunConfig, names: Mapping[str, Any], config: Mapping[str, Any], notes: list[str]) -> set[str]:
    """The columns whose rows hold a picture each, of a model that embeds texts and pictures alike."""
    if not config.get("vision_config"):
        return set()
    found = {name for name, source in names.items() if isinstance(source, dict) and "image" in source}
    found |= {*(fields.image_columns or ())} & {*names}
    if fields.dataset_name == GLYPH_SEARCH:
        found |= {list(names)[1]}
    if not found:
        notes.append(
            'no column is said to hold pictures (image_columns, or "image" in columns): counted as texts alone.'
        )
        return set()
    if not config.get("picture", {}).get("is_known"):
        notes.append(f'pictures of a "{config["model_type"]}" can not be counted: what they take comes on top.')
        return set()
    notes += [config["picture"]["assumption"]] * bool(config["picture"]["assumption"])
    notes.append(f"every row of {', '.join(sorted(found))} is counted with one picture.")
    return found


def _names(fields: RunConfig, notes: list[str]) -> dict[str, str | list[str]]:
    """The columns of a batch; of several datasets those of the one with most texts in a row."""
    sources = sources_of(fields)
    if not sources:
        if fields.columns is None and fields.dataset_name not in BUILT_IN:
            notes.append("columns is not given: counted with a query and a positive in each row.")
        return dict(fields.columns or PAIR)
    of_each = [source.config.columns or PAIR for source in sources]
    texts = [sum(len(name) if isinstance(name, list) else 1 for name in names.values()) for names in of_each]
    most = texts.index(max(texts))
    notes.append(f'datasets: counted with batches of "{sources[most].name}", which has most texts in a row.')
    return dict(of_each[most])


def _sees_all_rows(part: RunConfig) -> bool:
    return (part.loss_options or {}).get("cross_device_negatives", part.cross_device_negatives)

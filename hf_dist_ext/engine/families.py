"""What is peculiar to a model family: how it reads text and positions, how it lays out images and cuts them up.

Families were read and run with transformers 5.23; configs are only asked for attributes, so nothing of it is imported.
"""

from __future__ import annotations

from typing import Any

from hf_dist_ext import policy

# Convolutions (ConvBERT), a Fourier transform (FNet), landmarks (Nystromformer) and hashes (YOSO) read padding.
READ_PADDING = frozenset({"convbert", "fnet", "nystromformer", "yoso"})
# Rotary embeddings whose table is that of the longest row, once it is longer than the model was first trained for.
ROPE_OF_LONGEST_ROW = frozenset({"dynamic", "longrope"})
# Positions are counted over real tokens, from mm_token_type_ids, as soon as a grid is passed.
MROPE_MODEL_TYPES = frozenset("qwen2_vl qwen2_5_vl qwen3_vl qwen3_vl_moe qwen3_5 qwen3_5_moe".split())
# Pixels are (rows, tiles of the fullest row, ...); elsewhere the entries of all rows stand end to end.
PADDED_MODEL_TYPES = frozenset({"idefics2", "idefics3", "smolvlm"})
# Whose entries stand end to end in a form of their own: tiles of an image in one entry, videos.
FLAT_MODEL_TYPES = frozenset({"llava", "llava_next", "llava_onevision", "paligemma"})


def reads_fixed_width(config: Any) -> bool:
    """Whether the model reads a fixed position of a fixed width."""
    return getattr(config, "model_type", None) in policy.FIXED_WIDTH


def free_width(config: Any) -> int | None:
    """How wide rows may be and still be trimmed or packed: beyond, a row's embedding depends on the width of its batch
    or chunk. None: any width."""
    if reads_fixed_width(config) or getattr(config, "model_type", None) in READ_PADDING:
        return 0
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [rope] if "rope_type" in rope else [kind for kind in rope.values() if isinstance(kind, dict)]
    most = getattr(text, "max_position_embeddings", 0)
    first = [kind.get("original_max_position_embeddings") or most for kind in kinds if _follows_longest_row(kind)]
    if getattr(text, "attention_type", None) == "block_sparse":  # BigBird: shorter rows meet in full attention
        first.append((5 + 2 * text.num_random_blocks) * text.block_size)
    return min(first, default=None)


def _follows_longest_row(rope: dict[str, Any]) -> bool:
    return rope.get("rope_type") in ROPE_OF_LONGEST_ROW


def patch_size(config: Any) -> tuple[int, int] | None:
    """(height, width) in pixels; None where the config does not tell."""
    size = getattr(getattr(config, "vision_config", None) or config, "patch_size", None)
    if size is None:
        return None
    return (size, size) if isinstance(size, int) else tuple(size)


def patch_grid(config: Any, height: int, width: int) -> int:
    """Patches of an image of so many pixels."""
    size = patch_size(config)
    assert size is not None, "the config tells no patch size"
    patch_height, patch_width = size
    return (height // patch_height) * (width // patch_width)

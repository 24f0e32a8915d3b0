"""What one image of a model family becomes: patches in the vision tower, placeholder tokens in the text.

Families were read and run with transformers 5.23; configs are only asked for attributes, so nothing of it is imported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# SigLIP text pools the last position of a fixed width, so trimming moves the embedding.
FIXED_WIDTH_MODEL_TYPES = frozenset({"siglip", "siglip_text_model", "siglip2", "siglip2_text_model"})
# Positions are counted over real tokens, from mm_token_type_ids, as soon as a grid is passed.
MROPE_MODEL_TYPES = frozenset(
    "qwen2_vl qwen2_5_vl qwen3_vl qwen3_vl_moe qwen3_5 qwen3_5_moe glm4v glm4v_moe glm46v".split()
)


@dataclass(frozen=True)
class Family:
    """tokens: config, pixel height, width -> placeholder tokens of one image or tile; None: they vary by more than
    that, so that only the collator knows. is_padded: axis 0 is the row, axis 1 its tiles, padded at the end."""

    tokens: Callable[[Any, int, int], int] | None = None
    makes_tiles: bool = False
    is_padded: bool = False


def reads_fixed_width(config: Any) -> bool:
    """Whether the model reads a fixed position of a fixed width, so that tokens may never be trimmed."""
    return getattr(config, "model_type", None) in FIXED_WIDTH_MODEL_TYPES


def patch_size(config: Any) -> tuple[int, int] | None:
    """(height, width) in pixels; None where the config does not tell."""
    size = getattr(getattr(config, "vision_config", None) or config, "patch_size", None)
    if size is None:
        return None
    return (size, size) if isinstance(size, int) else tuple(size)


def patch_grid(config: Any, height: int, width: int) -> int:
    """Patches of an image of so many pixels."""
    patch_height, patch_width = patch_size(config)
    return (height // patch_height) * (width // patch_width)


def _llava_tokens(config: Any, height: int, width: int) -> int:
    vision_type = config.vision_config.model_type
    has_class_token = "siglip" not in vision_type
    drops_first = config.vision_feature_select_strategy == "default"
    return patch_grid(config, height, width) + has_class_token - drops_first


# Not here, because their tokens follow from more than the size of pixel_values: grids, padded patches and Pixtral's
# sizes (see tokens_per_entry), and LLaVA-NeXT and -OneVision, where only the processor knows.
FAMILIES = {
    "llava": Family(_llava_tokens),
    "vipllava": Family(patch_grid),
    "paligemma": Family(patch_grid),
    "gemma3": Family(lambda c, h, w: c.mm_tokens_per_image, makes_tiles=True),
    "internvl": Family(lambda c, h, w: int(patch_grid(c, h, w) * c.downsample_ratio**2), makes_tiles=True),
    "aya_vision": Family(lambda c, h, w: patch_grid(c, h, w) // c.downsample_factor**2, makes_tiles=True),
    "lfm2_vl": Family(makes_tiles=True),
    "idefics2": Family(lambda c, h, w: c.perceiver_config.resampler_n_latents, True, is_padded=True),
    "idefics3": Family(lambda c, h, w: patch_grid(c, h, w) // c.scale_factor**2, True, is_padded=True),
    "smolvlm": Family(lambda c, h, w: patch_grid(c, h, w) // c.scale_factor**2, True, is_padded=True),
    "modernvbert": Family(lambda c, h, w: patch_grid(c, h, w) // c.pixel_shuffle_factor**2, True, is_padded=True),
}


def tokens_per_entry(
    config: Any, kind: str, shape: Sequence[int], grid: Sequence[Sequence[int]] | None, host: Mapping[str, Any]
) -> list[int] | None:
    """Placeholder tokens of every image, tile or video; None where the config does not tell.

    Args:
        kind: "image" or "video".
        shape: of their pixels.
        grid: patches of each in time, height and width, for models whose pixels are packed patches.
        host: values that engine/images.py asked for.
    """
    vision, model_type = getattr(config, "vision_config", None), getattr(config, "model_type", None)
    if grid is not None:
        merge = getattr(vision, "spatial_merge_size", None)
        return None if merge is None else [math.prod(thw) // merge**2 for thw in grid]
    if kind == "video":
        if model_type != "llava_onevision" or len(shape) != 5:
            return None
        side = math.ceil(math.sqrt(patch_grid(config, *shape[-2:])) / 2)  # pooled 2 x 2, and one newline
        return [shape[1] * side**2 + 1] * shape[0]
    if "real_patches" in host:
        pooled = getattr(vision, "pooling_kernel_size", None)
        return None if pooled is None else [number // pooled**2 for number in host["real_patches"]]
    if model_type == "lfm2_vl" and "spatial_shapes" in host:
        factor = config.downsample_factor
        return [(height // factor) * (width // factor) for height, width in host["spatial_shapes"]]
    if "image_sizes" in host and getattr(vision, "model_type", None) == "pixtral":
        patch_height, patch_width = (size * getattr(config, "spatial_merge_size", 1) for size in patch_size(config))
        return [(h // patch_height) * (w // patch_width) for h, w in host["image_sizes"]]
    tokens = FAMILIES.get(model_type, Family()).tokens
    return None if tokens is None else [tokens(config, *shape[-2:])] * shape[0]

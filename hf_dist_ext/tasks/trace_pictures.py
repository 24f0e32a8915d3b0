"""What pictures come to in a vision-language model: how many images its tower sees of one, and how many tokens.

It is counted where the configuration tells; else a picture is one tile, or has PICTURE x PICTURE pixels.
tasks/trace.py builds its pictures so, and hands `facts` on to the planner with the model's configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]
QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
SHUFFLING = ("idefics3", "smolvlm")
KINDS = ("llava", "llava_next", "paligemma", "gemma3", *SHUFFLING, "internvl", *QWEN)  # that are known here

PICTURE = 448  # pixels of a side, for models that take any size


def side(config: Config, name: str) -> int:
    """Of an image or a patch, which are squares."""
    return config[name] if isinstance(config[name], int) else config[name][0]


def num_patches(config: Config) -> int:
    """Of one image of a tower: patches, without a class token."""
    return (side(config, "image_size") // side(config, "patch_size")) ** 2


def _tiles(config: Config) -> list[tuple[int, int]]:
    """LLaVA-NeXT cuts a picture into tiles of the tower's size: rows and columns, all it may choose."""
    size = config["vision_config"]["image_size"]
    usual = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
    return [(height // size, width // size) for height, width in config.get("image_grid_pinpoints") or usual]


def most_tiles(config: Config) -> tuple[int, int]:
    """Rows and columns of LLaVA-NeXT's tiles that make most tokens."""
    return max(_tiles(config), key=lambda tiles: (tiles[0] * tiles[1], tiles[0]))


def images_of_picture(config: Config) -> int:
    """How many images the tower sees of one picture, at most."""
    if config["model_type"] == "llava_next":
        rows, columns = most_tiles(config)
        return 1 + rows * columns
    return config.get("tiles_of_picture", 1)


def patches_of_picture(config: Config) -> int:
    """That the tower sees of one picture, at most."""
    vision = config["vision_config"]
    each = grid(vision) ** 2 if config["model_type"] in QWEN else num_patches(vision)
    return images_of_picture(config) * each


def image_tokens(config: Config) -> int:
    """Tokens that one picture takes in the text, at most."""
    kind, vision = config["model_type"], config["vision_config"]
    if kind == "gemma3":
        return config.get("mm_tokens_per_image") or 256
    if kind in QWEN:
        return grid(vision) ** 2 // vision["spatial_merge_size"] ** 2
    if kind in SHUFFLING:
        return images_of_picture(config) * (num_patches(vision) // config["scale_factor"] ** 2)
    if kind == "internvl":
        return images_of_picture(config) * round(num_patches(vision) * config["downsample_ratio"] ** 2)
    if kind == "llava_next":
        side = round(num_patches(vision) ** 0.5)
        # the whole picture small, then its tiles with the end of each line
        return max(side * side * (1 + rows * columns) + side * rows for rows, columns in _tiles(config))
    keeps_all = config.get("vision_feature_select_strategy") == "full" and vision["model_type"].startswith("clip")
    return num_patches(vision) + keeps_all


def grid(vision: Config) -> int:
    """Patches along a side of a picture in Qwen's towers, which take any size."""
    merged = vision["patch_size"] * vision["spatial_merge_size"]
    return max(1, PICTURE // merged) * vision["spatial_merge_size"]


def facts(config: Config) -> dict[str, Any] | None:
    """Of one picture; None: the configuration is of no model with pictures, or does not tell."""
    if not (vision := config.get("vision_config")):
        return None
    if config["model_type"] not in KINDS and not {"image_size", "patch_size"} <= vision.keys():
        return None
    return {
        "is_known": config["model_type"] in KINDS,
        "patches": patches_of_picture(config),
        "tokens": image_tokens(config),
        "assumption": assumption(config),
    }


def assumption(config: Config) -> str:
    """What a plan must say about the size of pictures; "" where the configuration settles it."""
    kind = config["model_type"]
    if kind in QWEN:
        return f"pictures may have any size: counted as {PICTURE} x {PICTURE}, {image_tokens(config)} tokens."
    if (tiles := config.get("tiles_of_picture", 1)) > 1:
        return f"pictures are counted with the processor's most tiles, {tiles}: {image_tokens(config)} tokens."
    if kind in (*SHUFFLING, "internvl") and "tiles_of_picture" not in config:
        return f"a processor may cut pictures into tiles: counted as one tile, {image_tokens(config)} tokens."
    if kind == "llava_next":
        return f"pictures are counted with the most tiles, {images_of_picture(config)}: {image_tokens(config)} tokens."
    return ""

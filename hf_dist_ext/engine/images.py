"""Image-text features: which keys hold images, how many entries of each belong to a row, what a chunk may leave out.

Processors lay images out as their models like it: one entry per image, per tile, per packed patch, or padded per row.
What they share: entries stand in the order of the rows, so a row owns one run of them, and numbers of entries per row
are all that is needed to cut.

The collator knows these numbers and puts them beside the features, as integers on the CPU that no model gets to see:

    num_images   of every row; also num_images_per_sample (sentence-transformers), batch_num_images (LLaVA-OneVision)
    num_tiles    of every row, where the processor cuts images into tiles or crops
    num_videos   of every row; also num_videos_per_sample

Nothing is concluded from shapes or tokens. A grid of patches per image, which the features of some families hold, says
how many packed patches an image has. Every image key gets its `UnitLayout`; a chunk that owns none of its entries goes
without the key. Patches per row are counted for the budget. `families.py` knows what is peculiar to a model;
`columns.py` copies small tensors whose values the host must know, all at once; `chunks.py` does the cutting.

Letters: R rows, L tokens, I images.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from hf_dist_ext.engine.families import (
    FLAT_MODEL_TYPES,
    MROPE_MODEL_TYPES,
    PADDED_MODEL_TYPES,
    patch_grid,
    patch_size,
)
from hf_dist_ext.errors import UsageError

# What collators call the number of images (tiles where a model cuts images up) and videos of a row.
COUNT_NAMES = {
    "image": ("num_tiles", "num_images_per_sample", "num_images", "batch_num_images"),
    "video": ("num_videos_per_sample", "num_videos"),
}
ALL_COUNT_NAMES = (*COUNT_NAMES["image"], *COUNT_NAMES["video"])
PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}
GRIDS = {"image": "image_grid_thw", "video": "video_grid_thw"}
# One entry per image (or tile), and one per video, unless the family says that axis 0 holds rows.
ENTRY_KEYS = {
    "image": ("pixel_values", "pixel_attention_mask", "image_sizes", "spatial_shapes"),
    "video": ("pixel_values_videos", "image_sizes_videos", "second_per_grid_ts"),
}
ROW_KEYS = ("batch_num_images",)  # LLaVA-OneVision


@dataclass(frozen=True)
class UnitLayout:
    """How axis 0 of an image key is shared out among rows, and how far axis 1 is real.

    counts: entries per row; None: one each. lengths: real extent of axis 1 per row (its padding is at the end); None:
    never trimmed. A chunk whose rows have no entries, or only padding, does not get the key.
    """

    counts: tuple[int, ...] | None = None
    lengths: tuple[int, ...] | None = None
    rounds_length: bool = False  # axis 1 is a sequence: trim to a multiple, so that kernels see few shapes


@dataclass(frozen=True)
class Vision:
    """One column's images. `has_vision`: rows for which vision layers run. `patches`: per row (entries, patches of the
    longest), whose product is what vision layers compute; None where the patch size is not known."""

    units: dict[str, UnitLayout]
    has_vision: list[bool]
    patches: list[tuple[int, int]] | None
    counts_positions_from_mask: bool = False


def without_counts(features: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """The features that reach the model: all but the numbers of images and videos per row."""
    names, model_type = set(ALL_COUNT_NAMES), getattr(config, "model_type", None)
    if model_type == "llava_onevision":
        names.discard("batch_num_images")  # its forward decides by it which images were cut into patches
    if model_type == "paligemma":
        names.add("labels")  # its processor makes them unasked; they only cost a loss that nobody reads
    return {key: value for key, value in features.items() if key not in names}


def has_images(features: Mapping[str, Any]) -> bool:
    return any(key in features for key in PIXELS.values())


def questions(features: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Integer tensors of at most two axes whose values `describe` needs, under the names it looks them up by."""
    names = (*ALL_COUNT_NAMES, *((*GRIDS.values(), "spatial_shapes") if has_images(features) else ()))
    return {name: features[name] for name in names if isinstance(features.get(name), torch.Tensor)}


def describe(
    column: str, features: Mapping[str, Any], num_rows: int, has_text: bool, config: Any, host: Mapping[str, Any]
) -> Vision:
    """Layouts of a column's image keys. `host` holds the values of what `questions` asked for.

    Raises:
        UsageError: images that can not be matched to rows, or features a model would silently read wrongly.
    """
    reader = _Reader(column, features, num_rows, config, host)
    if not has_text:
        return reader.image_tower()
    reader.check_family()
    reader.check_token_types()
    if "pixel_values" in features and getattr(config, "model_type", None) in PADDED_MODEL_TYPES:
        return reader.padded_rows()
    return reader.flat()


class _Reader:
    """One column while it is described; every method that ends in a Vision is one way to lay images out."""

    def __init__(self, column: str, features: Mapping[str, Any], num_rows: int, config: Any, host: Mapping[str, Any]):
        self.column, self.features, self.num_rows, self.config = column, features, num_rows, config
        counted = {name: features[name] for name in ALL_COUNT_NAMES if isinstance(features.get(name), (list, tuple))}
        self.host = {**host, **counted}
        for name in ALL_COUNT_NAMES:
            if name in self.host and len(self.host[name]) != num_rows:
                raise self.error(
                    f"{name} counts {len(self.host[name])} rows, but the column has {num_rows}. "
                    "Give one number per row, 0 for a row without."
                )

    def error(self, message: str) -> UsageError:
        return UsageError(f"column {self.column!r}: {message}")

    def check_family(self) -> None:
        """Of a family that is not known here, whole pictures alone can be told apart."""
        model_type, pixels = getattr(self.config, "model_type", None), self.features.get("pixel_values")
        has_whole_pictures = pixels is not None and pixels.dim() == 4 and PIXELS["video"] not in self.features
        known = MROPE_MODEL_TYPES | PADDED_MODEL_TYPES | FLAT_MODEL_TYPES
        if self.config is not None and model_type not in known and not has_whole_pictures:
            shape = "of videos" if pixels is None else tuple(pixels.shape)
            raise self.error(
                f'cannot cut pixel values {shape} of model type "{model_type}": which of them belong to which row is '
                "known for LLaVA, PaliGemma, Qwen-VL, Idefics and SmolVLM, and where every picture or tile is one "
                "entry of (channels, height, width). Use such a model."
            )

    def check_token_types(self) -> None:
        model_type = getattr(self.config, "model_type", None)
        grids = [key for key in GRIDS.values() if key in self.features]
        if not grids or "mm_token_type_ids" in self.features or "position_ids" in self.features:
            return
        if model_type in MROPE_MODEL_TYPES or self.config is None:
            # Qwen2.5-VL would go on with text positions: other embeddings, and no error.
            raise self.error(
                f"{grids[0]} without mm_token_type_ids: {model_type or 'the model'} can not tell image tokens from "
                "text, which moves its embeddings. Keep the processor's mm_token_type_ids in the batch."
            )

    # ---- the ways images are laid out ----

    def image_tower(self) -> Vision:
        """A column of images (or videos) only: one per row."""
        counts = [self.host[name] for name in COUNT_NAMES["image"] if name in self.host]
        if any(count != 1 for count in (counts[0] if counts else ())):
            raise self.error(
                "rows with another number of images than one need text to place them in; the column has none."
            )
        pixels = next(key for key in PIXELS.values() if key in self.features)
        keys = (*ENTRY_KEYS["image"], *ENTRY_KEYS["video"])
        units = {key: UnitLayout() for key in keys if self._holds(key, self.num_rows)}
        if "spatial_shapes" in self.host and "pixel_values" in units:
            lengths = tuple(math.prod(shape) for shape in self.host["spatial_shapes"])
            of_patches = [key for key in ("pixel_values", "pixel_attention_mask") if key in units]
            units |= dict.fromkeys(of_patches, UnitLayout(None, lengths, True))
            return Vision(units, [True] * self.num_rows, [(1, length) for length in lengths])
        each = self._patches_per_entry(pixels)
        return Vision(units, [True] * self.num_rows, None if each is None else [(each, 1)] * self.num_rows)

    def padded_rows(self) -> Vision:
        """(R, tiles of the fullest row, ...): trimmed to the chunk's fullest row, left out where no row has a tile."""
        pixels = self.features["pixel_values"]
        if pixels.dim() != 5 or pixels.shape[0] != self.num_rows:
            raise self.cannot_cut("pixel_values")
        if "num_tiles" not in self.host:
            self.refuse_uncounted("image", "num_tiles")
        most, tiles = pixels.shape[1], self.host["num_tiles"]
        for row, count in enumerate(tiles):
            if count > most:
                raise self.error(
                    f"num_tiles counts {count} in row {row}, but pixel_values holds {most} of a row. Count them as "
                    "the processor laid them out."
                )
        layout = UnitLayout(None, tuple(tiles))
        units = {key: layout for key in ("pixel_values", "pixel_attention_mask") if self._holds(key, self.num_rows)}
        each = None if patch_size(self.config) is None else patch_grid(self.config, *pixels.shape[-2:])
        return Vision(units, [count > 0 for count in tiles], None if each is None else [(n * each, 1) for n in tiles])

    def flat(self) -> Vision:
        """Entries of all rows end to end: images, tiles, or packed patches under a grid of images."""
        units: dict[str, UnitLayout] = {}
        has_vision = [False] * self.num_rows
        patches: list[tuple[int, int]] | None = [(0, 1)] * self.num_rows
        for kind, pixels in PIXELS.items():
            if pixels not in self.features:
                continue
            counts, computed = self._flat_kind(kind, units)
            has_vision = [seen or count > 0 for seen, count in zip(has_vision, counts, strict=True)]
            if computed is None or patches is None:
                patches = None
            else:
                patches = [(a + b, 1) for (a, _), b in zip(patches, computed, strict=True)]
        is_mrope = self.config is None or self.config.model_type in MROPE_MODEL_TYPES
        has_grid = "mm_token_type_ids" in self.features and any(key in self.features for key in GRIDS.values())
        return Vision(units, has_vision, patches, is_mrope and has_grid and "position_ids" not in self.features)

    def _flat_kind(self, kind: str, units: dict[str, UnitLayout]) -> tuple[tuple[int, ...], Sequence[int] | None]:
        """Entries of every row, and its patches."""
        pixels, grid = PIXELS[kind], self.host.get(GRIDS[kind])
        total = self.features[pixels].shape[0] if grid is None else len(grid)
        counts = self._counts(kind, total)
        packed_keys = () if grid is None else (pixels,)
        entry_keys = [key for key in ENTRY_KEYS[kind] if key not in packed_keys and self._holds(key, total)]
        units |= {key: UnitLayout(counts) for key in entry_keys}
        if grid is not None:
            entries = [math.prod(thw) for thw in grid]
            if sum(entries) != self.features[pixels].shape[0]:
                raise self.error(
                    f"{GRIDS[kind]} stands for {sum(entries)} patches, but {pixels} holds "
                    f"{self.features[pixels].shape[0]}. Keep both as the processor returned them."
                )
            packed = tuple(sum(run) for run in _runs(entries, counts))
            units |= {GRIDS[kind]: UnitLayout(counts), pixels: UnitLayout(packed)}
            return counts, packed
        each = self._patches_per_entry(pixels)
        return counts, None if each is None else [count * each for count in counts]

    # ---- entries per row ----

    def _counts(self, kind: str, total: int) -> tuple[int, ...]:
        name = next((name for name in COUNT_NAMES[kind] if name in self.host), None)
        if name is None:
            self.refuse_uncounted(kind, f"num_{kind}s")
        counts = tuple(self.host[name])
        if sum(counts) != total:
            hint = " Images that are cut into tiles are counted as num_tiles." if kind == "image" else ""
            raise UsageError(
                f"column {self.column!r}: {name} adds up to {sum(counts)}, but {PIXELS[kind]} holds {total} {kind}s. "
                f"Count them per row as the processor laid them out.{hint}"
            )
        return counts

    # ---- patches per row, and small things ----

    def _patches_per_entry(self, pixels: str) -> int | None:
        shape = self.features[pixels].shape
        if len(shape) < 4 or patch_size(self.config) is None:
            return None
        return math.prod(shape[1:-3]) * patch_grid(self.config, *shape[-2:])

    def _holds(self, key: str, entries: int) -> bool:
        if key not in self.features:
            return False
        if len(self.features[key]) != entries:
            raise self.cannot_cut(key)
        return True

    def cannot_cut(self, key: str) -> UsageError:
        return cannot_cut(self.column, key, self.features[key], self.num_rows)

    def refuse_uncounted(self, kind: str, name: str) -> NoReturn:
        raise UsageError(
            f"column {self.column!r}: cannot cut {PIXELS[kind]} {tuple(self.features[PIXELS[kind]].shape)}: the batch "
            f"does not say how many {kind}s each of the {self.num_rows} rows has. Have the collator put {name} beside "
            "the features, a list with one number per row, 0 for a row without; "
            "the batches of a SentenceTransformer have it."
        )


def cannot_cut(column: str, key: str, value: Any, num_rows: int) -> UsageError:
    shape = tuple(value.shape) if isinstance(value, torch.Tensor) else f"({len(value)},)"
    return UsageError(
        f"column {column!r}: cannot cut {key} {shape}. Its first axis holds neither the same rows as the "
        f"text ({num_rows}) nor, without doubt, one entry per image, video or patch. Leave it out of the batch."
    )


def _runs(values: Iterable[Any], counts: Sequence[int]) -> list[list[int]]:
    values = iter(values)
    return [[next(values) for _ in range(count)] for count in counts]

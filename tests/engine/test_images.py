"""Image-text features in chunks: the gradient is the full batch's, for every family that lays images out its own way.

Models are tiny and random, features are made as tensors, rows hold 0, 1 and 2 images (or tiles, or videos) of several
sizes, an embedding is the last real token. Batches hold the counts that a collator makes.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import warnings
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn

from hf_dist_ext.engine import columns
from hf_dist_ext.engine.gradient_cache import cached_step
from hf_dist_ext.engine.layout import lay_out
from hf_dist_ext.engine.tables import ChunkLimits
from hf_dist_ext.errors import UsageError

IMAGE, VIDEO = 5, 6
WIDTH = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = {**WIDTH, "vocab_size": 64, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 128}
TEXT |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
VISION = {**WIDTH, "image_size": 16, "patch_size": 4}  # 16 patches
LLAMA, QWEN = {**TEXT, "model_type": "llama"}, {**TEXT, "model_type": "qwen2"}
SIGLIP_VISION = {**VISION, "model_type": "siglip_vision_model"}
CLIP_VISION = {**VISION, "model_type": "clip_vision_model", "projection_dim": 8}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}


@dataclasses.dataclass
class Rows:
    """A batch under construction: token ids per row, feature tensors, and what a collator would count."""

    ids: list[list[int]]
    features: dict = dataclasses.field(default_factory=dict)
    counts: dict[str, list[int]] = dataclasses.field(default_factory=dict)


def words(number: int) -> list[int]:
    return torch.randint(10, 60, (number,)).tolist()


def rows_with(images_per_row, tokens_of: Callable[[], int]) -> Rows:
    """Rows of different lengths with text before, between and after their images."""
    ids = []
    for row, images in enumerate(images_per_row):
        ids.append(words(3 + 2 * row))
        for _ in range(images):
            ids[-1] += [IMAGE] * tokens_of() + words(2)
    return Rows(ids, counts={"num_images": list(images_per_row)})


def pixels(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def collate(rows: Rows, on_left: bool = False) -> dict[str, torch.Tensor]:
    """Features, and the counts as a list, one per row."""
    width = max(map(len, rows.ids)) + 3  # a batch may be wider than its longest row
    tokens = {"input_ids": rows.ids, "attention_mask": [[1] * len(ids) for ids in rows.ids], **rows.features}
    for key, values in tokens.items():
        if isinstance(values, list) and isinstance(values[0], list):
            padding = [[0] * (width - len(row)) for row in values]
            tokens[key] = torch.tensor([p + r if on_left else r + p for r, p in zip(values, padding, strict=True)])
    return tokens | rows.counts


def without_counts(features: dict) -> dict:
    """What the model takes, of a batch that is not cut."""
    names = ("num_images", "num_tiles", "num_videos", "labels")
    return {key: value for key, value in features.items() if key not in names}


# ---- rows of images, as processors lay them out: (images per row, the model) -> rows ----


def image_rows(images_per_row, _=None, tokens: int = 16) -> Rows:
    rows = rows_with(images_per_row, lambda: tokens)
    rows.features["pixel_values"] = pixels(sum(images_per_row), 3, 16, 16)
    return rows


def sized_rows(images_per_row, _, edge: int) -> Rows:
    """Images padded to the largest, and their sizes; a token stands for edge x edge pixels."""
    sizes = [(8 + 8 * (i % 2), 16) for i in range(sum(images_per_row))]
    tokens = iter([height // edge * (width // edge) for height, width in sizes])
    rows = rows_with(images_per_row, lambda: next(tokens))
    rows.features |= {"pixel_values": pixels(len(sizes), 3, 16, 16), "image_sizes": torch.tensor(sizes)}
    return rows


def split_rows(images_per_row, model, has_counts: bool = False) -> Rows:
    """Each image whole and in two halves, and its size. The model says how many tokens it becomes."""
    sizes = torch.tensor([(20 + 5 * i, 40) if i % 2 else (40, 24) for i in range(sum(images_per_row))])
    values = pixels(len(sizes), 3, 3, 16, 16)
    counts = {"batch_num_images": torch.tensor(images_per_row)} if has_counts else {}
    with torch.no_grad():
        tokens = iter([len(found) for found in model.get_image_features(values, sizes, **counts).pooler_output])
    rows = rows_with(images_per_row, lambda: next(tokens))
    rows.features |= {"pixel_values": values, "image_sizes": sizes} | counts
    return rows


def grid_rows(images_per_row, _) -> Rows:
    grids = [(1, 4, 2 + 2 * (i % 2)) for i in range(sum(images_per_row))]
    tokens = iter([t * h * w // 4 for t, h, w in grids])
    rows = rows_with(images_per_row, lambda: next(tokens))
    rows.features |= {
        "pixel_values": pixels(sum(t * h * w for t, h, w in grids), 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor(grids),
        "mm_token_type_ids": [[int(i == IMAGE) for i in ids] for ids in rows.ids],
    }
    return rows


def grid_video_rows(_, __, with_timestamps: bool) -> Rows:
    """Rows: video, image, video and image, text. With timestamps every frame is a block of its own."""
    images, videos = [(1, 4, 4), (1, 4, 2)], [(2, 4, 2), (3, 2, 4)]

    def video(frames, height, width):
        block = [VIDEO] * (height * width // 4)
        return (words(1) + block) * frames if with_timestamps else block * frames

    image = [[IMAGE] * (t * h * w // 4) for t, h, w in images]
    ids = [
        words(2) + video(*videos[0]) + words(3),
        words(5) + image[0] + words(1),
        words(1) + video(*videos[1]) + words(2) + image[1] + words(4),
        words(7),
    ]
    features = {
        "pixel_values": pixels(sum(t * h * w for t, h, w in images), 96),
        "image_grid_thw": torch.tensor(images),
        "pixel_values_videos": pixels(sum(t * h * w for t, h, w in videos), 96),
        "video_grid_thw": torch.tensor(videos),
        "mm_token_type_ids": [[{IMAGE: 1, VIDEO: 2}.get(i, 0) for i in row] for row in ids],
    }
    if not with_timestamps:
        features["second_per_grid_ts"] = [1.0, 0.5]
    return Rows(ids, features, {"num_images": [0, 1, 1, 0], "num_videos": [1, 0, 1, 0]})


def video_rows(videos_per_row, _) -> Rows:
    rows = rows_with(videos_per_row, lambda: 2 * 4 + 1)  # two frames pooled to 2 x 2, a newline
    rows.ids = [[VIDEO if i == IMAGE else i for i in row] for row in rows.ids]
    rows.features["pixel_values_videos"] = pixels(sum(videos_per_row), 2, 3, 16, 16)
    rows.counts = {"num_videos": list(videos_per_row)}
    return rows


def labelled_rows(images_per_row, _) -> Rows:
    rows = image_rows(images_per_row)
    rows.features["token_type_ids"] = [[int(i > 30) for i in ids] for ids in rows.ids]
    rows.features["labels"] = rows.ids
    return rows


def tiled_rows(images_per_row, _, tiles=lambda i: 1) -> Rows:
    """Image i has tiles(i) tiles of 4 tokens; the collator counts images too, which do not add up to the tiles."""
    number = [tiles(i) for i in range(sum(images_per_row))]
    each = iter(number)
    rows = rows_with(images_per_row, lambda: next(each) * 4)
    each = iter(number)
    rows.counts["num_tiles"] = [sum(next(each) for _ in range(images)) for images in images_per_row]
    rows.features["pixel_values"] = pixels(sum(number), 3, 16, 16)
    return rows


def padded_rows(images_per_row, _, tokens: int = 4) -> Rows:
    """Tiles padded per row with zeros; the second image of a row has two tiles."""
    tiles = [[1 + i for i in range(images)] for images in images_per_row]
    each = iter([n for row in tiles for n in row])
    rows = rows_with(images_per_row, lambda: next(each) * tokens)
    most = max(map(sum, tiles))
    values, mask = torch.zeros(len(tiles), most, 3, 16, 16), torch.zeros(len(tiles), most, 16, 16, dtype=torch.bool)
    for row, counts in enumerate(tiles):
        values[row, : sum(counts)] = pixels(sum(counts), 3, 16, 16)
        mask[row, : sum(counts)] = True
    rows.features |= {"pixel_values": values, "pixel_attention_mask": mask}
    rows.counts = {"num_tiles": [sum(counts) for counts in tiles]}
    return rows


def patched(shapes) -> dict[str, torch.Tensor]:
    most = max(h * w for h, w in shapes) + 2
    mask = torch.stack([(torch.arange(most) < h * w).long() for h, w in shapes])
    return {
        "pixel_values": pixels(len(shapes), most, 48) * mask[..., None],
        "pixel_attention_mask": mask,
        "spatial_shapes": torch.tensor(shapes),
    }


# ---- the families: transformers' name, rows of images for it, and what makes a tiny model ----

INDEX, ID = {"image_token_index": IMAGE}, {"image_token_id": IMAGE}
PIXTRAL = {**VISION, "model_type": "pixtral", "head_dim": 16, "image_size": 32}
SPLIT = {"image_grid_pinpoints": [[16, 32], [32, 16]], **INDEX}
ONEVISION = {"text_config": QWEN, "vision_config": SIGLIP_VISION, "video_token_index": VIDEO, **SPLIT}
GEMMA = {"sliding_window": 64, "query_pre_attn_scalar": 16}
GRID = {"hidden_size": 32, "depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2}
GRID["temporal_patch_size"] = 2
WIDE = {**GRID, "intermediate_size": 48, "out_hidden_size": 32}


def tiny(model_type: str, **more) -> dict:
    return {**VISION, "model_type": model_type, **more}


def with_mrope(vision: dict, text: dict | None = None, **rope) -> dict:
    text = {**TEXT, **(text or {}), "rope_parameters": {**MROPE, **rope}}
    return {"text_config": text, "vision_config": vision, "video_token_id": VIDEO, **ID}


QWEN2_5 = with_mrope({**WIDE, "window_size": 16, "fullatt_block_indexes": [1]})
QWEN3 = with_mrope({**WIDE, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}, mrope_interleaved=True)
LINEAR = {
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
PERCEIVER = {
    "resampler_n_latents": 3, "resampler_depth": 1, "resampler_n_heads": 2, "num_key_value_heads": 1,
    "resampler_head_dim": 8,
}  # fmt: skip
with_ = functools.partial
FAMILIES: dict[str, tuple[str, Callable, dict]] = {
    "llava": ("Llava", image_rows, {"text_config": LLAMA, "vision_config": CLIP_VISION, **INDEX}),
    "llava with pixtral": ("Llava", with_(sized_rows, edge=4), {
        "text_config": LLAMA, "vision_config": PIXTRAL, "vision_feature_select_strategy": "full",
        "vision_feature_layer": -1, **INDEX}),
    "llava_next": ("LlavaNext", split_rows, {"text_config": LLAMA, "vision_config": CLIP_VISION, **SPLIT}),
    "llava_onevision": ("LlavaOnevision", with_(split_rows, has_counts=True), ONEVISION),
    "llava_onevision video": ("LlavaOnevision", video_rows, ONEVISION),
    "qwen2_vl": ("Qwen2VL", grid_rows, with_mrope({**GRID, "embed_dim": 32, "mlp_ratio": 2})),
    "qwen2_5_vl": ("Qwen2_5_VL", grid_rows, QWEN2_5),
    "qwen3_vl": ("Qwen3VL", grid_rows, QWEN3),
    "qwen3_5": ("Qwen3_5", grid_rows, with_mrope(
        {**WIDE, "num_position_embeddings": 64}, LINEAR, partial_rotary_factor=1.0, mrope_interleaved=True)),
    "qwen2_5_vl video": ("Qwen2_5_VL", with_(grid_video_rows, with_timestamps=False), QWEN2_5),
    "qwen3_vl video": ("Qwen3VL", with_(grid_video_rows, with_timestamps=True), QWEN3),
    "paligemma": ("PaliGemma", labelled_rows, {
        "text_config": {**TEXT, **GEMMA, "model_type": "gemma2"}, "vision_config": SIGLIP_VISION,
        "projection_dim": 32, **INDEX}),
    "idefics2": ("Idefics2", with_(padded_rows, tokens=3), {
        "text_config": {**TEXT, "model_type": "mistral"}, "vision_config": tiny("idefics2_vision"),
        "perceiver_config": PERCEIVER, **ID}),
    "idefics3": ("Idefics3", padded_rows, {
        "text_config": LLAMA, "vision_config": tiny("idefics3_vision"), "scale_factor": 2, **ID}),
    "smolvlm": ("SmolVLM", padded_rows, {
        "text_config": LLAMA, "vision_config": tiny("smolvlm_vision"), "scale_factor": 2, **ID}),
    "internvl": ("InternVL", with_(tiled_rows, tiles=lambda i: 1 + 2 * (i % 2)), {
        "text_config": QWEN, "vision_config": tiny("internvl_vision", image_size=[16, 16], patch_size=[4, 4]), **ID}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def double_precision(monkeypatch):
    """float64, also where a model's code casts to float32 inside (Gemma, Cohere, gated delta rule): one rounding that
    flips there is worth up to 1e-7 of the gradient, and would hide what chunks do."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch, "float", torch.float64)
    yield
    monkeypatch.undo()
    torch.set_default_dtype(torch.float32)


@functools.cache
def family(name: str):
    kind, rows, options = FAMILIES[name]
    config = getattr(transformers, f"{kind}Config")(**copy.deepcopy(options))
    model = getattr(transformers, f"{kind}Model")(config)
    fill_zeros(model)
    return model.double().train(), lambda images_per_row: rows(images_per_row, model)


def fill_zeros(model: nn.Module) -> None:
    """Heads and gates that start at zero would hide the vision tower from the gradient."""
    for parameter in model.parameters():
        if not parameter.any() and (parameter.dim() > 1 or parameter.numel() == 1):
            nn.init.normal_(parameter.data, std=0.2)


def last_token(model, features) -> torch.Tensor:
    hidden = model(**without_counts(features)).last_hidden_state
    mask = features["attention_mask"]
    last = (torch.arange(mask.shape[1]) * mask).argmax(dim=1)
    return hidden[torch.arange(len(hidden)), last]


def encode_last(model, column, features):
    return last_token(model, features)


def entangled(embeddings: dict[str, torch.Tensor]):
    """A loss whose gradient at every row depends on every other row."""
    rows = torch.cat(list(embeddings.values()))
    weights = torch.linspace(-1, 1, len(rows) ** 2).reshape(len(rows), -1)
    return (torch.tanh(rows @ rows.T / 8) * weights).sum(), {}


def gradients(model: nn.Module, only: str = "") -> torch.Tensor:
    return torch.cat([
        (torch.zeros_like(p) if p.grad is None else p.grad).flatten()
        for name, p in model.named_parameters() if only in name
    ])  # fmt: skip


def assert_exact(model, encode, batch, config, limits, **options):
    """The cached step's gradient is that of one forward per column over the batch without its counts."""
    plain = {name: without_counts(features) for name, features in batch.items()}
    parts = ["", *(p for p in ("vision", "visual") if any(p in name for name, _ in model.named_parameters()))]
    model.zero_grad()
    loss, _ = entangled({name: encode(model, name, features) for name, features in plain.items()})
    loss.backward()
    expected = [gradients(model, part) for part in parts]
    assert len(parts) > 1 and all(gradient.abs().max() > 1e-6 for gradient in expected)
    model.zero_grad()
    chunked = lay_out(batch, limits, model_config=config, **options)
    step = cached_step(chunked, lambda chunk: encode(model, chunk.column, chunk.features), entangled)
    assert torch.allclose(step.loss, loss.detach(), rtol=1e-12)
    for part, gradient in zip(parts, expected, strict=True):
        error = (gradients(model, part) - gradient).norm() / gradient.norm()
        assert error < 1e-10, f"{part or 'all'}: {error:.1e}"
    return chunked


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("images_per_row, limits, as_tensor, on_left", [
    ((0, 1, 2), ChunkLimits(1), False, False),
    ((2, 0, 1), ChunkLimits(2), True, False),
    ((1, 0, 2, 0), ChunkLimits(2, width_multiple=1), False, True),
])  # fmt: skip
def test_gradient_is_the_full_batch_gradient(name, images_per_row, limits, as_tensor, on_left):
    model, build_rows = family(name)
    rows = build_rows(images_per_row)
    if as_tensor:
        rows.counts = {name: torch.tensor(counts) for name, counts in rows.counts.items()}
    chunked = assert_exact(model, encode_last, {"query": collate(rows, on_left)}, model.config, limits)
    chunks = chunked.chunks()
    assert {chunk.has_vision for chunk in chunks} == {False, True}
    for chunk in chunks:
        assert chunk.has_vision == any(key.startswith("pixel_values") for key in chunk.features)
    assert chunks[-1].has_vision, "the last backward of a step must reach the vision layers"


@pytest.mark.parametrize("name", ["llava", "qwen3_vl", "qwen3_vl video", "smolvlm", "internvl"])
@pytest.mark.parametrize("on_left", [False, True])
def test_columns_with_and_without_images_share_a_tower(name, on_left):
    """Text queries, images as positives and as twice as many negatives, all through one model."""
    model, build_rows = family(name)
    query = collate(Rows([words(n) for n in (4, 9, 6)]), on_left)
    positive, negative = (collate(build_rows(images), on_left) for images in ((1, 1, 1), (0, 1, 2, 1, 0, 1)))
    batch = {"query": query, "positive": positive, "negative": negative}
    chunked = assert_exact(model, encode_last, batch, model.config, ChunkLimits(4))
    mixed = [table.columns for table in chunked.tables]
    # Padded tiles make columns differ in shape, and absolute positions keep left padding where it is.
    is_apart = name == "smolvlm" or (on_left and "qwen" not in name)
    assert (["positive", "negative"] in mixed) != is_apart


def test_a_wide_batch_is_one_chunk_without_limits():
    model, build_rows = family("qwen3_vl")
    batch = {"query": collate(build_rows((2, 0, 1)))}
    chunked = assert_exact(model, encode_last, batch, model.config, ChunkLimits(), sort=False, can_trim=False)
    assert len(chunked.chunks()) == 1 and chunked.chunks()[0].num_rows == 3


def test_positions_given_by_the_collator_are_cut_with_their_rows():
    model, build_rows = family("qwen2_5_vl")
    features = collate(build_rows((2, 0, 1)))
    with torch.no_grad():
        positions, _ = model.get_rope_index(
            features["input_ids"],
            features["mm_token_type_ids"],
            features["image_grid_thw"],
            attention_mask=features["attention_mask"],
        )
    features = {key: value for key, value in features.items() if key != "mm_token_type_ids"}
    batch = {"query": {**features, "position_ids": positions}}
    chunked = assert_exact(model, encode_last, batch, model.config, ChunkLimits(1))
    widths = [chunk.features["position_ids"].shape for chunk in chunked.chunks()]
    assert all(shape[:2] == (3, 1) for shape in widths) and len({shape[2] for shape in widths}) > 1


# ---- towers ----


class Towers(nn.Module):
    def __init__(self, text: nn.Module, vision: nn.Module):
        super().__init__()
        self.text, self.vision = text, vision
        fill_zeros(self)

    def configs(self):
        return {"query": self.text.config, "positive": self.vision.config, "negative": self.vision.config}


def encode_tower(model, column, features):
    output = (model.text if column == "query" else model.vision)(**features)
    for field in ("text_embeds", "image_embeds", "pooler_output"):
        if getattr(output, field, None) is not None:
            return getattr(output, field)


def clip_towers():
    text = transformers.CLIPTextConfig(**{**TEXT, "projection_dim": 8})
    return Towers(
        transformers.CLIPTextModelWithProjection(text),
        transformers.CLIPVisionModelWithProjection(transformers.CLIPVisionConfig(**VISION, projection_dim=8)),
    )


def siglip_towers():
    text = transformers.SiglipTextConfig(**{**TEXT, "projection_size": 32})
    return Towers(
        transformers.SiglipTextModel(text), transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**VISION))
    )


def siglip2_towers():
    text = transformers.Siglip2TextConfig(**{**TEXT, "projection_size": 32})
    vision = transformers.Siglip2VisionConfig(**WIDTH, patch_size=4, num_patches=16)
    return Towers(transformers.Siglip2TextModel(text), transformers.Siglip2VisionModel(vision))


@pytest.mark.parametrize("build, is_fixed", [(clip_towers, False), (siglip_towers, True), (siglip2_towers, True)])
def test_towers_take_their_columns_apart(build, is_fixed):
    model = build().double()
    texts = collate(Rows([words(n) + [2] for n in (3, 9, 5)]))
    images = [{"pixel_values": pixels(number, 3, 16, 16)} for number in (3, 6)]
    if build is siglip2_towers:
        images = [patched([(2, 2), (4, 4), (3, 2)]), patched([(2, 2), (4, 4), (3, 4), (1, 2), (2, 2), (4, 4)])]
    batch = dict(zip(("query", "positive", "negative"), [texts, *images], strict=True))
    chunked = assert_exact(
        model, encode_tower, batch, model.configs(), ChunkLimits(2, width_multiple=4), shares_tower=False
    )
    text_widths = {c.features["input_ids"].shape[1] for c in chunked.chunks() if c.column == "query"}
    assert (text_widths == {texts["input_ids"].shape[1]}) == is_fixed
    if build is siglip2_towers:
        shapes = [c.features["pixel_values"].shape[1] for c in chunked.chunks() if c.column == "negative"]
        assert shapes == [16, 12, 4], "sorted by patches, and as wide as the chunk's largest image"


def test_images_in_order_are_not_copied():
    pixel_values = pixels(6, 3, 16, 16)
    config = transformers.CLIPVisionConfig(**VISION)
    chunks = lay_out({"image": {"pixel_values": pixel_values}}, ChunkLimits(2), model_config=config).chunks()
    found = [chunk.features["pixel_values"] for chunk in chunks]
    assert [value.data_ptr() for value in found] == [pixel_values[i].data_ptr() for i in (0, 2, 4)]


def test_a_column_without_rows_stands_beside_pictures():
    """As one that a process is given because others have rows in it (training/sizes.py)."""
    batch = {name: {"pixel_values": pixels(rows, 3, 16, 16)} for name, rows in (("query", 3), ("negative", 0))}
    chunked = lay_out(batch, ChunkLimits(2), model_config=transformers.CLIPVisionConfig(**VISION))
    chunks = chunked.chunks()
    found = chunked.to_columns([chunk.features["pixel_values"].flatten(1) for chunk in chunks], chunks)
    assert torch.equal(found["query"], batch["query"]["pixel_values"].flatten(1)) and len(found["negative"]) == 0


@pytest.mark.parametrize("name", ["llava", "qwen3_vl", "smolvlm"])
def test_the_cuts_of_pictures_find_them_where_the_batch_has_arrived(name):
    model, build_rows = family(name)
    batch = {"query": collate(build_rows((0, 2, 1)))}
    chunked = lay_out(batch, ChunkLimits(1), model_config=model.config)
    there = {"query": {key: 2 * of if isinstance(of, torch.Tensor) else of for key, of in batch["query"].items()}}
    found = chunked.without_tensors().of_batch(there).chunks()
    assert [chunk.has_vision for chunk in found] == [False, True, True]
    for one, other in zip(found, chunked.chunks(), strict=True):
        assert one.features.keys() == other.features.keys()
        assert torch.equal(one.features["input_ids"], 2 * other.features["input_ids"])
        if one.has_vision:
            assert torch.equal(one.features["pixel_values"], 2 * other.features["pixel_values"])


# ---- what is left out of a chunk ----


def test_tiles_are_trimmed_to_the_chunks_fullest_row():
    model, build_rows = family("idefics3")
    features = collate(build_rows((0, 2, 1)))
    assert features["pixel_values"].shape[1] == 3
    chunks = lay_out({"query": features}, ChunkLimits(1), model_config=model.config).chunks()
    tiles = [chunk.features["pixel_values"].shape[1] if chunk.has_vision else 0 for chunk in chunks]
    assert tiles == [0, 3, 1]
    assert all(("pixel_attention_mask" in chunk.features) == chunk.has_vision for chunk in chunks)


@pytest.mark.parametrize("name", ["num_images_per_sample", "num_images", "num_tiles", "batch_num_images"])
@pytest.mark.parametrize("make", [list, torch.tensor])
def test_every_name_of_a_count_is_read_and_taken_out(name, make):
    if name == "batch_num_images" and make is list:
        return  # an image processor's tensor, never a list
    counts = make([0, 1, 2])
    _, build_rows = family("llava")
    features = {name: counts, **without_counts(collate(build_rows((0, 1, 2))))}
    chunked = lay_out({"query": features}, ChunkLimits(1))  # without a config only counts can tell
    assert chunked.row_counts() == {"query": 3}
    chunks = chunked.chunks()
    assert [len(chunk.features.get("pixel_values", ())) for chunk in chunks] == [0, 2, 1]
    assert all(name not in chunk.features for chunk in chunks)


# ---- the second budget ----


def image_only(*sides: int) -> dict[str, torch.Tensor]:
    return {"image": patched([(side, side) for side in sides])}


def test_patches_bound_a_chunk_and_a_row_beyond_the_bound_is_alone():
    config = SimpleNamespace(model_type="siglip2_vision_model", patch_size=4)
    chunks = lay_out(image_only(5, 1, 2, 2, 1), ChunkLimits(max_patches=16), model_config=config).chunks()
    shapes = [tuple(chunk.features["spatial_shapes"].prod(dim=1).tolist()) for chunk in chunks]
    assert shapes == [(25,), (4, 4, 1, 1)], "16 patches with padding"


def test_image_patches_bound_a_chunk_beside_rows_and_tokens():
    model, build_rows = family("llava")
    features = {"query": collate(build_rows((1, 1, 1, 1, 0)))}
    for max_patches, rows in ((1, 1), (16, 1), (47, 2), (64, 3)):
        limits = ChunkLimits(max_rows=3, max_patches=max_patches)
        chunks = lay_out(features, limits, model_config=model.config).chunks()
        assert max(chunk.num_rows for chunk in chunks if chunk.has_vision) == rows


def test_packed_patches_are_counted_one_by_one():
    model, build_rows = family("qwen3_vl")
    features = {"query": collate(build_rows((1, 2, 1, 0, 1)))}  # 8, 16 + 8, 16 and 8 patches
    chunks = lay_out(features, ChunkLimits(max_patches=24), model_config=model.config).chunks()
    patches = [len(chunk.features["pixel_values"]) for chunk in chunks if chunk.has_vision]
    assert sum(patches) == 56 and max(patches) == 24 and len(patches) == 3


def test_padded_tiles_count_where_they_are_computed():
    model, build_rows = family("smolvlm")  # zero tiles are dropped by the model
    features = {"query": collate(build_rows((0, 1, 1, 2)))}
    chunks = lay_out(features, ChunkLimits(max_patches=48), model_config=model.config).chunks()
    assert [chunk.num_rows for chunk in chunks] == [1, 1, 2]


def test_a_bound_on_patches_needs_the_patch_size():
    batch = {"image": {"pixel_values": pixels(2, 3, 16, 16)}}
    with pytest.raises(UsageError, match="patch size"):
        lay_out(batch, ChunkLimits(max_patches=100))


# ---- sharded models: ranks run vision layers in the same chunks ----


def test_ranks_agree_on_chunks_with_and_without_images():
    model, build_rows = family("qwen3_vl")
    batch = {"query": collate(build_rows((2, 0, 1)))}
    chunked = lay_out(batch, ChunkLimits(4), model_config=model.config)
    assert chunked.num_chunks() == [2] and chunked.num_chunks(by_vision=True) == [1, 1]
    chunked.agree([3, 4], by_vision=True)
    chunks = chunked.chunks()
    assert [chunk.has_vision for chunk in chunks] == [False] * 3 + [True] * 4
    assert [chunk.is_idle for chunk in chunks] == [False, True, True, False, False, True, True]
    assert [("pixel_values" in chunk.features) for chunk in chunks] == [chunk.has_vision for chunk in chunks]
    model.zero_grad()
    entangled({"query": last_token(model, batch["query"])})[0].backward()
    expected = gradients(model)
    model.zero_grad()
    cached_step(chunked, lambda chunk: last_token(model, chunk.features), entangled)
    assert (gradients(model) - expected).norm() / expected.norm() < 1e-10


def test_an_idle_text_chunk_is_a_row_without_its_images():
    model, build_rows = family("qwen3_vl")
    chunked = lay_out({"query": collate(build_rows((1, 1)))}, ChunkLimits(4), model_config=model.config)
    chunked.agree([1, 1], by_vision=True)
    idle, full = chunked.chunks()
    assert idle.is_idle and not idle.has_vision and "image_grid_thw" not in idle.features and full.has_vision
    assert last_token(model, idle.features).shape == (1, 32)


def test_a_rank_without_images_can_not_join_one_with_images():
    model, build_rows = family("qwen3_vl")
    text = lay_out({"query": collate(Rows([words(4)]))}, ChunkLimits(4), model_config=model.config)
    assert text.num_chunks(by_vision=True) == [1, 0]
    with pytest.raises(UsageError, match="another process has rows with images"):
        text.agree([1, 1], by_vision=True)
    pairs = {"query": collate(Rows([words(4)])), "positive": collate(Rows([words(4)]))}
    shared = lay_out(pairs, ChunkLimits(4), model_config=model.config)
    assert shared.num_chunks(by_vision=True) == [1, 0, 0, 0]
    with pytest.raises(UsageError, match="other features"):
        shared.agree([1, 0, 0, 1], by_vision=True)


# ---- what is refused ----


def features_of(name: str, images_per_row=(0, 1, 2)) -> tuple[dict, object]:
    model, build_rows = family(name)
    return collate(build_rows(images_per_row)), model.config


def refused(features, config, match, **options):
    with pytest.raises(UsageError, match=match):
        lay_out({"query": features}, ChunkLimits(1), model_config=config, **options)


def test_images_that_do_not_add_up_are_named():
    features, config = features_of("llava")
    features["pixel_values"] = torch.cat([features["pixel_values"], pixels(1, 3, 16, 16)])
    refused(features, config, "num_images adds up to 3, but pixel_values holds 4 images")
    refused({**features, "num_images": [0, 1]}, config, "num_images counts 2 rows, but the column has 3")
    features, config = features_of("internvl")
    refused({**features, "num_tiles": features["num_images"]}, config, "num_tiles adds up to 3.*holds 5 images")
    del features["num_tiles"]
    refused(features, config, "num_images adds up to 3.*cut into tiles are counted as num_tiles")


def test_tiles_beyond_the_padded_axis_are_refused():
    features, config = features_of("idefics3")
    features["pixel_values"] = features["pixel_values"][:, :2]
    refused(features, config, "num_tiles counts 3 in row 2, but pixel_values holds 2 of a row")


@pytest.mark.parametrize("name, count, kind", [
    ("llava", "num_images", "image"),
    ("llava_next", "num_images", "image"),
    ("qwen3_vl", "num_images", "image"),
    ("internvl", "num_images", "image"),
    ("smolvlm", "num_tiles", "image"),
    ("qwen3_vl video", "num_videos", "video"),
])  # fmt: skip
def test_images_are_never_guessed(name, count, kind):
    """Also where there is one image per row, or where tokens of the text would tell."""
    features, config = features_of(name)
    features = {key: value for key, value in features.items() if key not in ("num_tiles", count)}
    refused(features, config, rf"cannot cut pixel_values.*how many {kind}s each .* has.*put {count} beside")


def test_a_model_without_placeholders_is_counted_too():
    features = collate(Rows([words(4), words(2)])) | {"pixel_values": pixels(2, 3, 16, 16)}
    config = SimpleNamespace(model_type="vilt", patch_size=4)
    refused(features, config, "cannot cut pixel_values")
    chunks = lay_out({"query": features | {"num_images": [1, 1]}}, ChunkLimits(1), model_config=config).chunks()
    assert [chunk.features["pixel_values"].shape[0] for chunk in chunks] == [1, 1]
    assert torch.equal(chunks[0].features["pixel_values"], features["pixel_values"][:1])


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_grids_without_token_types_are_refused(name):
    features, config = features_of(name)
    del features["mm_token_type_ids"]
    refused(features, config, "image_grid_thw without mm_token_type_ids.*Keep the processor's mm_token_type_ids")


@pytest.mark.parametrize("model_type, more", [
    ("glm4v", {"pixel_values": pixels(16, 96), "image_grid_thw": torch.tensor([[1, 4, 4]])}),
    ("gemma4", {"pixel_values": pixels(3, 16, 48)}),
    ("modernvbert", {"pixel_values": pixels(3, 2, 3, 16, 16)}),
    ("mllama", {"pixel_values": pixels(3, 2, 2, 3, 16, 16)}),
    ("video_llava", {"pixel_values_videos": pixels(3, 2, 3, 16, 16)}),
])  # fmt: skip
def test_of_a_family_that_is_not_known_whole_pictures_alone_are_cut(model_type, more):
    features = collate(Rows([words(4), words(2), words(3)], counts={"num_images": [0, 1, 2]}))
    config = SimpleNamespace(model_type=model_type, patch_size=4)
    refused({**features, **more}, config, f'of model type "{model_type}": which of them belong to which row is known')
    lay_out({"query": {**features, "pixel_values": pixels(3, 3, 16, 16)}}, ChunkLimits(1), model_config=config)


def test_an_unknown_feature_goes_with_rows_or_images_or_is_refused():
    features, config = features_of("llava", (0, 1, 3))
    refused({**features, "regions": pixels(7, 2)}, config, r"cannot cut regions \(7, 2\)\. .* Leave it out")
    known = {**features, "per_row": pixels(3, 2), "per_image": pixels(4, 2)}
    chunks = lay_out({"query": known}, ChunkLimits(1), model_config=config).chunks()
    assert [len(chunk.features.get("per_image", ())) for chunk in chunks] == [0, 3, 1]
    assert [len(chunk.features["per_row"]) for chunk in chunks] == [1, 1, 1]


def test_a_feature_that_fits_rows_and_images_alike_is_refused():
    features, config = features_of("llava", (0, 1, 2))
    refused({**features, "regions": pixels(3, 2)}, config, "cannot cut regions")


# ---- synchronisations ----


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl video", "smolvlm"])
def test_the_host_asks_for_values_once_per_batch(name, monkeypatch):
    features, config = features_of(name)
    calls, to_host = [], columns._to_host

    def counted(tensors):
        calls.append(len(tensors))
        with monkeypatch.context() as allowed:
            for method, original in originals.items():
                allowed.setattr(torch.Tensor, method, original)
            return to_host(tensors)

    def refuse(*_):
        raise AssertionError("a value was asked for outside the one copy")

    originals = {method: getattr(torch.Tensor, method) for method in ("tolist", "item", "__bool__", "__int__", "cpu")}
    monkeypatch.setattr(columns, "_to_host", counted)
    for method in originals:
        monkeypatch.setattr(torch.Tensor, method, refuse)
    chunked = lay_out({"query": features, "positive": features}, ChunkLimits(1), model_config=config)
    assert all(len(chunk.features) for chunk in chunked.chunks())
    assert len(calls) == 1 and calls[0] >= 2


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["llava", "qwen3_vl", "smolvlm"])
def test_one_copy_to_the_host_per_batch(name):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    _, build_rows = family(name)
    batch = {
        column: {
            key: value.cuda() if isinstance(value, torch.Tensor) else value
            for key, value in collate(build_rows((2, 0, 1))).items()
        }
        for column in ("a", "b")
    }
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            chunked = lay_out(batch, ChunkLimits(1), model_config=family(name)[0].config)
            assert all(len(chunk.features) for chunk in chunked.chunks())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([w for w in caught if "synchroniz" in str(w.message)]) == 1

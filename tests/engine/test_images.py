"""Image-text features in chunks: the gradient is the full batch's, for every family that lays images out its own way.

Models are tiny and random, features are made as tensors, rows hold 0, 1 and 2 images (or tiles, or videos) of several
sizes, an embedding is the last real token. Batches hold the counts that a collator makes.
"""

from __future__ import annotations

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
from hf_dist_ext.engine.limits import ChunkLimits
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


# ---- the families: a tiny model, and rows of images for it ----


def image_rows(images_per_row, tokens: int) -> Rows:
    rows = rows_with(images_per_row, lambda: tokens)
    rows.features["pixel_values"] = pixels(sum(images_per_row), 3, 16, 16)
    return rows


def llava():
    config = transformers.LlavaConfig(text_config=LLAMA, vision_config=CLIP_VISION, image_token_index=IMAGE)
    return transformers.LlavaModel(config), functools.partial(image_rows, tokens=16)


def pixtral():
    vision = {**VISION, "model_type": "pixtral", "head_dim": 16, "image_size": 32}
    config = transformers.LlavaConfig(
        text_config=LLAMA, vision_config=vision, image_token_index=IMAGE, vision_feature_select_strategy="full"
    )
    config.vision_feature_layer = -1

    return transformers.LlavaModel(config), functools.partial(sized_rows, edge=4)


def sized_rows(images_per_row, edge: int) -> Rows:
    """Images padded to the largest, and their sizes; a token stands for edge x edge pixels."""
    sizes = [(8 + 8 * (i % 2), 16) for i in range(sum(images_per_row))]
    tokens = iter([height // edge * (width // edge) for height, width in sizes])
    rows = rows_with(images_per_row, lambda: next(tokens))
    rows.features |= {"pixel_values": pixels(len(sizes), 3, 16, 16), "image_sizes": torch.tensor(sizes)}
    return rows


def mistral3():
    vision = {**VISION, "model_type": "pixtral", "head_dim": 16, "image_size": 32}
    config = transformers.Mistral3Config(
        text_config={**TEXT, "model_type": "mistral"},
        vision_config=vision,
        image_token_index=IMAGE,
        spatial_merge_size=2,
    )
    return transformers.Mistral3Model(config), functools.partial(sized_rows, edge=8)


def vipllava():
    config = transformers.VipLlavaConfig(
        text_config=LLAMA, vision_config=CLIP_VISION, image_token_index=IMAGE, vision_feature_layers=[-1, -2]
    )
    return transformers.VipLlavaModel(config), functools.partial(image_rows, tokens=16)


def llava_next():
    config = transformers.LlavaNextConfig(
        text_config=LLAMA,
        vision_config=CLIP_VISION,
        image_token_index=IMAGE,
        image_grid_pinpoints=[[16, 32], [32, 16]],
    )
    model = transformers.LlavaNextModel(config)

    def rows(images_per_row):
        sizes = torch.tensor([(20 + 5 * i, 40) if i % 2 else (40, 24) for i in range(sum(images_per_row))])
        values = pixels(len(sizes), 3, 3, 16, 16)  # the whole image and two halves
        with torch.no_grad():
            tokens = iter([len(f) for f in model.get_image_features(values, sizes).pooler_output])
        made = rows_with(images_per_row, lambda: next(tokens))
        made.features |= {"pixel_values": values, "image_sizes": sizes}
        return made

    return model, rows


def llava_onevision():
    config = transformers.LlavaOnevisionConfig(
        text_config=QWEN,
        vision_config=SIGLIP_VISION,
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        image_grid_pinpoints=[[16, 32], [32, 16]],
    )
    model = transformers.LlavaOnevisionModel(config)

    def rows(images_per_row):
        sizes = torch.tensor([(20 + 5 * i, 40) if i % 2 else (40, 24) for i in range(sum(images_per_row))])
        values, per_row = pixels(len(sizes), 3, 3, 16, 16), torch.tensor(images_per_row)
        with torch.no_grad():
            found = model.get_image_features(values, sizes, batch_num_images=per_row).pooler_output
        tokens = iter([len(f) for f in found])
        made = rows_with(images_per_row, lambda: next(tokens))
        made.features |= {"pixel_values": values, "image_sizes": sizes, "batch_num_images": per_row}
        return made

    return model, rows


def qwen_vision(**more):
    return {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, **more}


def qwen2_vl():
    config = transformers.Qwen2VLConfig(
        text_config={**TEXT, "rope_parameters": {**MROPE}},
        vision_config=qwen_vision(embed_dim=32, hidden_size=32, mlp_ratio=2),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
    )
    return transformers.Qwen2VLModel(config), grid_rows


def qwen2_5_vl():
    vision = qwen_vision(
        hidden_size=32, intermediate_size=48, out_hidden_size=32, window_size=16, fullatt_block_indexes=[1]
    )
    config = transformers.Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": {**MROPE}},
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
    )
    return transformers.Qwen2_5_VLModel(config), grid_rows


def qwen3_vl():
    vision = qwen_vision(
        hidden_size=32,
        intermediate_size=48,
        out_hidden_size=32,
        num_position_embeddings=64,
        deepstack_visual_indexes=[0],
    )
    config = transformers.Qwen3VLConfig(
        text_config={**TEXT, "rope_parameters": {**MROPE, "mrope_interleaved": True}},
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
    )
    return transformers.Qwen3VLModel(config), grid_rows


def qwen3_5():
    vision = qwen_vision(hidden_size=32, intermediate_size=48, out_hidden_size=32, num_position_embeddings=64)
    linear = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2}
    config = transformers.Qwen3_5Config(
        text_config={
            **TEXT,
            **linear,
            "linear_num_value_heads": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "rope_parameters": {**MROPE, "partial_rotary_factor": 1.0, "mrope_interleaved": True},
        },
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
    )
    return transformers.Qwen3_5Model(config), grid_rows


def glm4v():
    vision = {**qwen_vision(hidden_size=32, intermediate_size=48, out_hidden_size=32), "image_size": 16}
    config = transformers.Glm4vConfig(
        text_config={**TEXT, "rope_parameters": {**MROPE, "partial_rotary_factor": 1.0}},
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
    )
    return transformers.Glm4vModel(config), grid_rows


def grid_rows(images_per_row) -> Rows:
    grids = [(1, 4, 2 + 2 * (i % 2)) for i in range(sum(images_per_row))]
    tokens = iter([t * h * w // 4 for t, h, w in grids])
    rows = rows_with(images_per_row, lambda: next(tokens))
    rows.features |= {
        "pixel_values": pixels(sum(t * h * w for t, h, w in grids), 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor(grids),
        "mm_token_type_ids": [[int(i == IMAGE) for i in ids] for ids in rows.ids],
    }
    return rows


def video_rows(_, with_timestamps: bool, seconds: bool = False) -> Rows:
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
    if seconds:
        features["second_per_grid_ts"] = [1.0, 0.5]
    return Rows(ids, features, {"num_images": [0, 1, 1, 0], "num_videos": [1, 0, 1, 0]})


def onevision_video():
    model, _ = llava_onevision()

    def rows(videos_per_row):
        made = rows_with(videos_per_row, lambda: 2 * 4 + 1)  # two frames pooled to 2 x 2, a newline
        made.ids = [[VIDEO if i == IMAGE else i for i in row] for row in made.ids]
        made.features["pixel_values_videos"] = pixels(sum(videos_per_row), 2, 3, 16, 16)
        made.counts = {"num_videos": list(videos_per_row)}
        return made

    return model, rows


def paligemma():
    text = {**TEXT, "model_type": "gemma2", "sliding_window": 64, "query_pre_attn_scalar": 16}
    config = transformers.PaliGemmaConfig(
        text_config=text, vision_config=SIGLIP_VISION, image_token_index=IMAGE, projection_dim=32
    )

    def rows(images_per_row):
        made = image_rows(images_per_row, tokens=16)
        made.features["token_type_ids"] = [[int(i > 30) for i in ids] for ids in made.ids]
        made.features["labels"] = made.ids
        return made

    return transformers.PaliGemmaModel(config), rows


def gemma3(crops: bool = False):
    text = {**TEXT, "model_type": "gemma3_text", "sliding_window": 8, "query_pre_attn_scalar": 16}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=SIGLIP_VISION, mm_tokens_per_image=4, image_token_index=IMAGE
    )

    def rows(images_per_row):
        tiles = [1 + 3 * ((i + 1) % 2) if crops else 1 for i in range(sum(images_per_row))]
        return tiled_rows(images_per_row, tiles, tokens=4, with_types=True)

    return transformers.Gemma3Model(config), rows


def tiled_rows(images_per_row, tiles, tokens: int, with_types: bool = False) -> Rows:
    """Images of several tiles each; the collator counts images too, which do not add up to the tiles."""
    each = iter(tiles)
    rows = rows_with(images_per_row, lambda: next(each) * tokens)
    each = iter(tiles)
    rows.counts["num_tiles"] = [sum(next(each) for _ in range(images)) for images in images_per_row]
    rows.features["pixel_values"] = pixels(sum(tiles), 3, 16, 16)
    if with_types:
        rows.features["token_type_ids"] = [[int(i == IMAGE) for i in ids] for ids in rows.ids]
    return rows


def gemma4():
    text = {**TEXT, "model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "num_global_key_value_heads": 1}
    vision = {**VISION, "model_type": "gemma4_vision", "pooling_kernel_size": 2, "num_key_value_heads": 2}
    config = transformers.Gemma4Config(
        text_config=text, vision_config={**vision, "head_dim": 16}, audio_config=None, image_token_id=IMAGE
    )
    config.video_token_id = VIDEO

    def rows(images_per_row):
        sides = [(4, 2 + 2 * (i % 2)) for i in range(sum(images_per_row))]
        tokens = iter([height * width // 4 for height, width in sides])
        made = rows_with(images_per_row, lambda: next(tokens))
        positions = torch.full((len(sides), 16, 2), -1)
        for i, (height, width) in enumerate(sides):
            grid = torch.cartesian_prod(torch.arange(height), torch.arange(width)).flip(1)
            positions[i, : height * width] = grid
        made.features |= {"pixel_values": pixels(len(sides), 16, 48), "image_position_ids": positions}
        made.features["mm_token_type_ids"] = [[int(i == IMAGE) for i in ids] for ids in made.ids]
        return made

    return transformers.Gemma4Model(config), rows


def padded_rows(images_per_row, tokens: int) -> Rows:
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


def idefics3():
    vision = {**VISION, "model_type": "idefics3_vision"}
    config = transformers.Idefics3Config(text_config=LLAMA, vision_config=vision, image_token_id=IMAGE, scale_factor=2)
    return transformers.Idefics3Model(config), functools.partial(padded_rows, tokens=4)


def smolvlm():
    vision = {**VISION, "model_type": "smolvlm_vision"}
    config = transformers.SmolVLMConfig(text_config=LLAMA, vision_config=vision, image_token_id=IMAGE, scale_factor=2)
    return transformers.SmolVLMModel(config), functools.partial(padded_rows, tokens=4)


def idefics2():
    perceiver = {"resampler_n_latents": 3, "resampler_depth": 1, "resampler_n_heads": 2, "num_key_value_heads": 1}
    config = transformers.Idefics2Config(
        text_config={**TEXT, "model_type": "mistral"},
        vision_config={**VISION, "model_type": "idefics2_vision"},
        perceiver_config={**perceiver, "resampler_head_dim": 8},
        image_token_id=IMAGE,
    )
    return transformers.Idefics2Model(config), functools.partial(padded_rows, tokens=3)


def modernvbert():
    text = {**TEXT, "model_type": "modernbert", "cls_token_id": 1, "sep_token_id": 2}
    config = transformers.ModernVBertConfig(
        text_config=text, vision_config=SIGLIP_VISION, image_token_id=IMAGE, pixel_shuffle_factor=2
    )
    return transformers.ModernVBertModel(config), functools.partial(padded_rows, tokens=4)


def internvl():
    vision = {**VISION, "model_type": "internvl_vision", "image_size": [16, 16], "patch_size": [4, 4]}
    config = transformers.InternVLConfig(text_config=QWEN, vision_config=vision, image_token_id=IMAGE)

    def rows(images_per_row):
        return tiled_rows(images_per_row, [1 + 2 * (i % 2) for i in range(sum(images_per_row))], tokens=4)

    return transformers.InternVLModel(config), rows


def aya_vision():
    config = transformers.AyaVisionConfig(
        text_config={**TEXT, "model_type": "cohere2"}, vision_config=SIGLIP_VISION, image_token_index=IMAGE
    )

    def rows(images_per_row):
        return tiled_rows(images_per_row, [1 + (i % 2) for i in range(sum(images_per_row))], tokens=4)

    return transformers.AyaVisionModel(config), rows


def lfm2_vl():
    text = {**TEXT, "model_type": "lfm2", "layer_types": ["conv", "full_attention"], "block_ff_dim": 48}
    config = transformers.Lfm2VlConfig(
        text_config=text,
        vision_config={**WIDTH, "model_type": "siglip2_vision_model", "patch_size": 4, "num_patches": 16},
        image_token_id=IMAGE,
        projector_hidden_size=32,
    )

    def rows(images_per_row):
        shapes = [(2, 2 + 2 * (i % 2)) for i in range(sum(images_per_row))]
        tokens = iter([height * width // 4 for height, width in shapes])
        made = rows_with(images_per_row, lambda: next(tokens))
        made.features |= patched(shapes)
        return made

    return transformers.Lfm2VlModel(config), rows


def patched(shapes) -> dict[str, torch.Tensor]:
    most = max(h * w for h, w in shapes) + 2
    mask = torch.stack([(torch.arange(most) < h * w).long() for h, w in shapes])
    return {
        "pixel_values": pixels(len(shapes), most, 48) * mask[..., None],
        "pixel_attention_mask": mask,
        "spatial_shapes": torch.tensor(shapes),
    }


def mllama():
    text = {**TEXT, "model_type": "mllama_text_model", "num_hidden_layers": 3, "cross_attention_layers": [1]}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    vision = {**VISION, "attention_heads": 2, "num_global_layers": 1, "max_num_tiles": 2, "vision_output_dim": 64}
    config = transformers.MllamaConfig(
        text_config=text,
        vision_config={**vision, "intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1], [1, 2]]},
        image_token_index=IMAGE,
    )

    def rows(images_per_row):
        made = rows_with(images_per_row, lambda: 1)
        most, rows, length = max(images_per_row), len(images_per_row), max(map(len, made.ids)) + 3
        tiles = torch.zeros(rows, most, 2, dtype=torch.long)
        ratios = torch.zeros(rows, most, dtype=torch.long)
        seen = torch.zeros(rows, length, most, 2, dtype=torch.long)
        for row, images in enumerate(images_per_row):
            for image in range(images):
                number = 1 + image % 2
                tiles[row, image, :number], ratios[row, image] = 1, number
                first = [i for i, token in enumerate(made.ids[row]) if token == IMAGE][image]
                seen[row, first : len(made.ids[row]), image, :number] = 1
        made.features |= {
            "pixel_values": pixels(rows, most, 2, 3, 16, 16) * tiles[..., None, None, None],
            "aspect_ratio_ids": ratios,
            "aspect_ratio_mask": tiles,
            "cross_attention_mask": seen,
        }
        return made

    return transformers.MllamaModel(config), rows


FAMILIES = {
    "llava": llava,
    "llava with pixtral": pixtral,
    "mistral3": mistral3,
    "vipllava": vipllava,
    "llava_next": llava_next,
    "llava_onevision": llava_onevision,
    "llava_onevision video": onevision_video,
    "qwen2_vl": qwen2_vl,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
    "qwen3_5": qwen3_5,
    "glm4v": glm4v,
    "qwen2_5_vl video": lambda: (qwen2_5_vl()[0], functools.partial(video_rows, with_timestamps=False, seconds=True)),
    "qwen3_vl video": lambda: (qwen3_vl()[0], functools.partial(video_rows, with_timestamps=True)),
    "paligemma": paligemma,
    "gemma3": gemma3,
    "gemma3 pan-and-scan": functools.partial(gemma3, crops=True),
    "gemma4": gemma4,
    "idefics2": idefics2,
    "idefics3": idefics3,
    "smolvlm": smolvlm,
    "modernvbert": modernvbert,
    "internvl": internvl,
    "aya_vision": aya_vision,
    "lfm2_vl": lfm2_vl,
    "mllama": mllama,
}


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
    model, rows = FAMILIES[name]()
    fill_zeros(model)
    return model.double().train(), rows


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
    if name != "mllama":
        assert {chunk.has_vision for chunk in chunks} == {False, True}
        for chunk in chunks:
            assert chunk.has_vision == any(key.startswith("pixel_values") for key in chunk.features)
    assert chunks[-1].has_vision, "the last backward of a step must reach the vision layers"


@pytest.mark.parametrize("name", ["llava", "qwen3_vl", "qwen3_vl video", "smolvlm", "gemma3 pan-and-scan", "mllama"])
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
    is_apart = name in ("smolvlm", "mllama") or (on_left and "qwen" not in name)
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
    """As one that a process is given because others have rows in it (training/all_columns.py)."""
    batch = {name: {"pixel_values": pixels(rows, 3, 16, 16)} for name, rows in (("query", 3), ("negative", 0))}
    chunked = lay_out(batch, ChunkLimits(2), model_config=transformers.CLIPVisionConfig(**VISION))
    chunks = chunked.chunks()
    found = chunked.to_columns([chunk.features["pixel_values"].flatten(1) for chunk in chunks], chunks)
    assert torch.equal(found["query"], batch["query"]["pixel_values"].flatten(1)) and len(found["negative"]) == 0


# ---- what is left out of a chunk ----


def test_tiles_are_trimmed_to_the_chunks_fullest_row():
    model, build_rows = family("idefics3")
    features = collate(build_rows((0, 2, 1)))
    assert features["pixel_values"].shape[1] == 3
    chunks = lay_out({"query": features}, ChunkLimits(1), model_config=model.config).chunks()
    tiles = [chunk.features["pixel_values"].shape[1] if chunk.has_vision else 0 for chunk in chunks]
    assert tiles == [0, 3, 1]
    assert all(("pixel_attention_mask" in chunk.features) == chunk.has_vision for chunk in chunks)


def test_mllama_keeps_its_images_in_every_chunk_of_a_batch_that_has_one():
    model, build_rows = family("mllama")
    features = collate(build_rows((0, 1, 2)))
    chunks = lay_out({"query": features}, ChunkLimits(1), model_config=model.config).chunks()
    for chunk in chunks:
        assert chunk.features["pixel_values"].shape[:2] == (1, 2)
        assert chunk.features["cross_attention_mask"].shape[1] == chunk.features["input_ids"].shape[1]
    text_only = {key: features[key] for key in ("input_ids", "attention_mask")}
    chunks = lay_out({"query": text_only}, ChunkLimits(1), model_config=model.config).chunks()
    assert not any(chunk.has_vision for chunk in chunks)


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
    model, build_rows = family("mllama")  # every row computes 2 images x 2 tiles x 16 patches
    features = {"query": collate(build_rows((0, 1, 2)))}
    chunks = lay_out(features, ChunkLimits(max_patches=128), model_config=model.config).chunks()
    assert [chunk.num_rows for chunk in chunks] == [2, 1]
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


def test_an_unknown_feature_needs_its_axis_named():
    features, config = features_of("llava", (0, 1, 3))
    refused(
        {**features, "regions": pixels(7, 2)}, config, r"cannot cut regions \(7, 2\); name its axis in feature_axes"
    )
    known = {**features, "per_row": pixels(3, 2), "per_image": pixels(4, 2)}
    chunks = lay_out({"query": known}, ChunkLimits(1), model_config=config).chunks()
    assert [len(chunk.features.get("per_image", ())) for chunk in chunks] == [0, 3, 1]
    assert [len(chunk.features["per_row"]) for chunk in chunks] == [1, 1, 1]


def test_a_feature_that_fits_rows_and_images_alike_is_refused():
    features, config = features_of("llava", (0, 1, 2))
    refused({**features, "regions": pixels(3, 2)}, config, "cannot cut regions")


def test_feature_axes_name_rows_counts_and_what_is_shared():
    features = collate(Rows([words(n) for n in (2, 5, 3)]))
    more = {
        "boxes": torch.arange(7.0),
        "num_boxes": torch.tensor([4, 0, 3]),
        "planes": torch.arange(6).reshape(2, 3),
        "table": pixels(5, 5),
    }
    axes = {"boxes": "num_boxes", "planes": 1, "table": None}
    chunks = lay_out({"query": {**features, **more}}, ChunkLimits(1), feature_axes=axes).chunks()
    assert [chunk.features["planes"][1].tolist() for chunk in chunks] == [[4], [5], [3]]
    boxes = [chunk.features.get("boxes", torch.tensor([])).tolist() for chunk in chunks]
    assert boxes == [[], [4, 5, 6], [0, 1, 2, 3]]
    assert all(chunk.features["table"] is more["table"] and "num_boxes" not in chunk.features for chunk in chunks)
    refused({**features, **more}, None, "axis 0 of planes", feature_axes={**axes, "planes": 0})
    refused({**features, **more}, None, "num_boxes must count", feature_axes={**axes, "table": "num_boxes"})


# ---- synchronisations ----


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl video", "smolvlm", "lfm2_vl", "gemma4", "mllama"])
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
@pytest.mark.parametrize("name", ["llava", "qwen3_vl", "smolvlm", "lfm2_vl", "mllama"])
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

"""Vision-language models of two tiny layers, each with a processor made here, and pictures of digits for them.

Some processors ask for torchvision's video part or for num2words, neither of which a picture needs: they get none.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import transformers
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.smolvlm import processing_smolvlm

WORDS = "a red green small round boat tree house which digit is this of two pictures the second one in field find it"
MARKS = {  # of Qwen, InternVL and SmolVLM
    "image_token": "<image>", "video_token": "<video>", "vision_start_token": "<vs>", "vision_end_token": "<ve>",
    "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<image>",
    "fake_image_token": "<fake_token_around_image>", "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>", "boi_token": "<boi>", "eoi_token": "<eoi>",
}  # fmt: skip
TILES = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
SPECIAL = ["<pad>", "<unk>", "<|im_start|>", "<|im_end|>", *dict.fromkeys(MARKS.values()), *TILES]
TEMPLATE = (
    "{% for message in messages %}<|im_start|> {{ message['role'] }} "
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE {% else %}{{ part['text'] }} {% endif %}"
    "{% endfor %}<|im_end|> {% endfor %}{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)
LAYERS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
SIDE = {"height": 16, "width": 16}


def tiny_tokenizer(side: str = "right", max_length: int | None = None) -> PreTrainedTokenizerFast:
    words = [*SPECIAL, "system", "user", "assistant", *dict.fromkeys(WORDS.split()), *map(str, range(10)), "[UNK]"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    options = {} if max_length is None else {"model_max_length": max_length}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token="<|im_end|>", padding_side=side,
        additional_special_tokens=SPECIAL[2:], extra_special_tokens=MARKS, **options,
    )  # fmt: skip


def vocabulary(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    return {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}


def _with_videos_left_out(kind: type) -> type:
    pictures_only = classmethod(lambda cls: ["image_processor", "tokenizer"])
    return type(kind.__name__, (kind,), {"get_attributes": pictures_only, "video_processor": _NO_VIDEOS})


_NO_VIDEOS = SimpleNamespace(num_frames=1, fps=1)


def _llava(tokenizer):
    images = transformers.CLIPImageProcessorPil(size=SIDE, crop_size=SIDE)
    processor = transformers.LlavaProcessor(
        images, tokenizer, 4, "default", TEMPLATE.replace("IMAGE", "<image>"), num_additional_image_tokens=1
    )
    vision = {**LAYERS, "model_type": "clip_vision_model", "image_size": 16, "patch_size": 4, "projection_dim": 8}
    return processor, {"model_type": "llava", "vision_config": vision, "vision_feature_layer": -1}


def _qwen(number: str):
    def make(tokenizer):
        images = transformers.Qwen2VLImageProcessorPil(
            patch_size=4, merge_size=2, size={"shortest_edge": 64, "longest_edge": 1024}
        )
        kind = _with_videos_left_out(getattr(transformers, f"Qwen{number}VLProcessor"))
        processor = kind(images, tokenizer, chat_template=TEMPLATE.replace("IMAGE", "<vs> <image> <ve>"))
        vision = {
            "depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
            "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 32,
        }  # fmt: skip
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
        if number == "3":
            vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
            rope["mrope_interleaved"] = True
        else:
            vision |= {"window_size": 16, "fullatt_block_indexes": [1]}
        config = {"vision_config": vision, "text_config": {"rope_parameters": rope, "head_dim": 16}}
        video = tokenizer.convert_tokens_to_ids("<video>")
        starts = {"vision_start_token_id": tokenizer.convert_tokens_to_ids("<vs>")}
        return processor, {"model_type": f"qwen{number.rstrip('_')}_vl", "video_token_id": video, **starts, **config}

    return make


def _smolvlm(tokenizer):
    processing_smolvlm.num2words = processing_smolvlm.num2words or str
    images = transformers.SmolVLMImageProcessorPil(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
    kind = _with_videos_left_out(transformers.SmolVLMProcessor)
    template = TEMPLATE.replace("IMAGE", "<image>")
    processor = kind(images, tokenizer, None, image_seq_len=4, chat_template=template)
    vision = {**LAYERS, "model_type": "smolvlm_vision", "image_size": 16, "patch_size": 4}
    return processor, {"model_type": "smolvlm", "vision_config": vision, "scale_factor": 2}


def _internvl(tokenizer):
    images = transformers.GotOcr2ImageProcessorPil(size=SIDE, crop_to_patches=True, min_patches=1, max_patches=3)
    kind = _with_videos_left_out(transformers.InternVLProcessor)
    template = TEMPLATE.replace("IMAGE", "<image>")
    processor = kind(images, tokenizer, image_seq_length=4, chat_template=template)
    vision = {**LAYERS, "model_type": "internvl_vision", "image_size": [16, 16], "patch_size": [4, 4]}
    return processor, {"model_type": "internvl", "vision_config": vision, "downsample_ratio": 0.5}


def _gemma3(tokenizer):
    images = transformers.Gemma3ImageProcessorPil(size=SIDE)
    template = TEMPLATE.replace("IMAGE", "<boi>")
    processor = transformers.Gemma3Processor(images, tokenizer, template, image_seq_length=4)
    vision = {**LAYERS, "model_type": "siglip_vision_model", "image_size": 16, "patch_size": 4}
    config = {"model_type": "gemma3", "vision_config": vision, "mm_tokens_per_image": 4}
    return processor, {**config, "text_config": {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 8}}


FAMILIES = {
    "llava": _llava,
    "qwen2_5_vl": _qwen("2_5_"),
    "qwen3_vl": _qwen("3"),
    "smolvlm": _smolvlm,
    "internvl": _internvl,
    "gemma3": _gemma3,
}


def tiny_vision_language(family: str, side: str = "right", max_length: int | None = None) -> tuple[Any, dict]:
    """A processor, and the `model_config` of a model for it."""
    tokenizer = tiny_tokenizer(side, max_length)
    processor, config = FAMILIES[family](tokenizer)
    text = {**LAYERS, "num_key_value_heads": 2, "max_position_embeddings": 256, **vocabulary(tokenizer)}
    text |= {"eos_token_id": tokenizer.eos_token_id}
    kind = {} if family.startswith("qwen") else {"model_type": "llama"}
    config["text_config"] = {**kind, **text, **config.get("text_config", {})}
    token = "image_token_index" if family == "llava" else "image_token_id"
    return processor, {**config, token: tokenizer.convert_tokens_to_ids("<image>")}


@functools.cache
def picture(digit: int, width: int = 16, height: int = 16) -> Image.Image:
    drawn = Image.new("RGB", (width, height), (20 * digit, 40, 200 - 20 * digit))
    ImageDraw.Draw(drawn).text((width // 3, height // 8), str(digit), fill=(255, 255, 255))
    return drawn


def mixed_row(number: int) -> dict[str, Any]:
    """A row whose columns hold words, a picture, both, or two pictures, each in turn."""
    words, drawn = WORDS.split(), picture(number % 10, 16 + 8 * (number % 2), 16)
    kinds = [
        f"{words[number % 20]} boat of field",
        {"text": f"which {words[number % 20]}", "image": drawn},
        drawn,
        {"image": [drawn, picture((number + 3) % 10)], "text": "of two pictures the second one"},
    ]
    return {
        "query": kinds[number % 2],
        "positive": kinds[(number + 1) % 4],
        "negative": [kinds[(number + turn) % 4] for turn in range(2, 3 + number % 2)],
    }

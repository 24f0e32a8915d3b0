"""A LLaVA of two tiny layers each, rows with and without an image, for the tests of frozen-part training."""

from __future__ import annotations

import torch
from torch import nn
from transformers import LlavaConfig, LlavaForConditionalGeneration

IMAGE_TOKEN, PAD = 40, 0
TOKENS_PER_IMAGE = 16  # 16 x 16 pixels in patches of 4
VISION = {
    "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "image_size": 16, "patch_size": 4, "projection_dim": 32, "attention_dropout": 0.1,
}  # fmt: skip
TEXT = {
    "model_type": "llama", "vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64, "attention_dropout": 0.1,
    "pad_token_id": PAD,
}  # fmt: skip


def tiny_llava(seed: int = 0, **changes) -> LlavaForConditionalGeneration:
    torch.manual_seed(seed)
    config = LlavaConfig(vision_config=VISION, text_config=TEXT, image_token_index=IMAGE_TOKEN, **changes)
    # layer -1: the default, one before the last, would leave a layer without gradients
    config.vision_feature_layer = -1
    return LlavaForConditionalGeneration(config)


def row(has_image: bool, seed: int = 0) -> dict[str, torch.Tensor]:
    """One row of 24 tokens; the first 16 are the image's, when there is one."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(1, IMAGE_TOKEN, (24,), generator=generator)
    labels = words.clone()
    found = {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": labels}
    if has_image:
        words[:TOKENS_PER_IMAGE], labels[:TOKENS_PER_IMAGE] = IMAGE_TOKEN, -100
        found["pixel_values"] = torch.randn(3, 16, 16, generator=generator)
    return found


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    batch = {key: torch.stack([row[key] for row in rows]) for key in ("input_ids", "attention_mask", "labels")}
    pixels = [row["pixel_values"] for row in rows if "pixel_values" in row]
    return {**batch, "pixel_values": torch.stack(pixels)} if pixels else batch


class BlankPictures:
    """Stands for a processor: all that the trainer asks of it is a blank picture's features."""

    def image_processor(self, images, return_tensors):
        return {"pixel_values": torch.zeros(len(images), 3, 16, 16)}

    def save_pretrained(self, folder, **more) -> None:
        pass


class Calls:
    """Counts forward and backward calls of named modules; a backward counts where a gradient passes the output."""

    def __init__(self, model: nn.Module, names: list[str]):
        self.forward, self.backward = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
        for name in names:
            module = model.get_submodule(name)
            # before: a recomputation under checkpointing stops as soon as it has what the backward needs
            module.register_forward_pre_hook(lambda module, args, name=name: self._begin(name))
            module.register_forward_hook(self._count(name), with_kwargs=True)

    def _begin(self, name: str) -> None:
        self.forward[name] += 1

    def _count(self, name: str):
        def hook(module, args, kwargs, output):
            tensor = output if isinstance(output, torch.Tensor) else output[0]
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: self._note(name))

        return hook

    def _note(self, name: str) -> None:
        self.backward[name] += 1

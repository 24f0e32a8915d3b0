"""CLIP and SigLIP: their two towers, and the files by which a folder of both is the dual encoder again.

    text/  image/                   the towers, each a model of its own
    config.json                     the dual encoder's
    model.safetensors.index.json    says which tower's file holds which of its weights: nothing is stored twice
    scale.safetensors               what stands between the towers: the scale of scores (and a bias) that a new model
                                    has, since the loss has trained its own. Embeddings do not depend on it
    sentence_bert_config.json, modules.json, config_sentence_transformers.json

transformers loads the folder as `CLIPModel` or `SiglipModel`, and sentence-transformers with texts and pictures.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from hf_dist_ext.models.model_folder import update_config, write_json, write_modules, write_prompts

TEXT, IMAGE = "text", "image"
# model_type: the transformers classes that end in one vector per row
DUAL_ENCODERS = {
    "clip": ("CLIPTextModelWithProjection", "CLIPVisionModelWithProjection"),
    "siglip": ("SiglipTextModel", "SiglipVisionModel"),
    "siglip2": ("Siglip2TextModel", "Siglip2VisionModel"),
}
SCALE = "scale.safetensors"


def family_of(towers: Mapping[str, PreTrainedModel]) -> str | None:
    """The model_type of the dual encoder that the towers make; None for others."""
    if set(towers) != {TEXT, IMAGE}:
        return None
    names = tuple(type(towers[name]).__name__.removeprefix("FSDP") for name in (TEXT, IMAGE))
    return next((family for family, classes in DUAL_ENCODERS.items() if classes == names), None)


def write(
    folder: Path,
    towers: Mapping[str, PreTrainedModel],
    normalize: bool,
    prompts: Mapping[str, str],
    default_prompt_name: str | None,
) -> None:
    """Write what makes one model of the towers' folders, which are there; nothing for other towers."""
    family = family_of(towers)
    if family is None:
        return
    if family != "clip":
        _name_as_parts(folder)
    files = {file: _weights_in(folder / file) for file in _weight_files(folder)}
    dtypes = {dtype for shapes in files.values() for _, dtype in shapes.values()}
    config = _config(family, towers)
    config.save_pretrained(folder)
    update_config(folder, {"dtype": str(min(dtypes, key=str)).removeprefix("torch.") if len(dtypes) == 1 else None})
    save_file(_scale(family, config, next(iter(dtypes))), folder / SCALE, metadata={"format": "pt"})
    files[SCALE] = _weights_in(folder / SCALE)
    weight_map = {name: file for file, shapes in files.items() for name in shapes}
    size = sum(count * dtype.itemsize for shapes in files.values() for count, dtype in shapes.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": weight_map})
    write_json(folder / "sentence_bert_config.json", _reading(family, towers[TEXT].config))
    write_prompts(folder, prompts, default_prompt_name, normalize)
    write_modules(folder, ["CLIPModel" if family == "clip" else "Transformer", *["Normalize"] * normalize])


def _weight_files(folder: Path) -> list[str]:
    return sorted(
        str(path.relative_to(folder)) for name in (TEXT, IMAGE) for path in folder.glob(f"{name}/*.safetensors")
    )


def _name_as_parts(folder: Path) -> None:
    """SigLIP's towers are parts of the whole as they are, and one that was built from a config names its weights as if
    it was alone. The towers' own classes load both names."""
    for file in _weight_files(folder):
        part = {TEXT: "text_model.", IMAGE: "vision_model."}[Path(file).parent.name]
        weights = load_file(folder / file)
        if not all(name.startswith(part) for name in weights):
            named = {part + name.removeprefix(part): value for name, value in weights.items()}
            save_file(named, folder / file, metadata={"format": "pt"})


def _weights_in(path: Path) -> dict[str, tuple[int, torch.dtype]]:
    """name -> how many values, of which precision."""
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    return {name: (tensor.numel(), tensor.dtype) for name, tensor in tensors.items()}


def _config(family: str, towers: Mapping[str, PreTrainedModel]) -> PreTrainedConfig:
    text, image = (towers[name].config for name in (TEXT, IMAGE))
    own = {"projection_dim": text.projection_dim} if family == "clip" else {}
    config = AutoConfig.for_model(family, text_config=text.to_dict(), vision_config=image.to_dict(), **own)
    config.architectures = [{"clip": "CLIPModel", "siglip": "SiglipModel", "siglip2": "Siglip2Model"}[family]]
    return config


def _scale(family: str, config: PreTrainedConfig, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    if family == "clip":
        return {"logit_scale": torch.tensor(config.logit_scale_init_value, dtype=dtype)}
    return {"logit_scale": torch.zeros(1, dtype=dtype), "logit_bias": torch.zeros(1, dtype=dtype)}


def _reading(family: str, text: PreTrainedConfig) -> dict[str, Any]:
    """How sentence-transformers makes features and calls the model. SigLIP's texts have a fixed width."""
    ways = {
        modality: {"method": f"get_{modality}_features", "method_output_name": "pooler_output"}
        for modality in ("text", "image")
    }
    width = text.max_position_embeddings
    reading = {"modality_config": ways, "module_output_name": "sentence_embedding", "max_seq_length": width}
    if family == "clip":
        return reading
    return reading | {"processing_kwargs": {"text": {"padding": "max_length", "max_length": width}}}

"""What a model's folder is made of, by the names of its files: the processor's, and all that is pushed with it.

A name that is not listed here is no part of a model: what a run leaves in its folder beside the model (caches, logs,
states, files of others) has any name.
"""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

from hf_dist_ext.models.folders import read_json

# As transformers' tokenizers and processors name them.
OF_A_PROCESSOR = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.json",
    "processor_config.json", "*preprocessor_config.json", "audio_tokenizer_config.json", "*vocab*.json",
    "tekken.json", "normalizer.json", "word_shape.json", "word_pronunciation.json", "byte_maps.json", "emoji.json",
    "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.spm", "*.bpe", "*.codes", "*.tokenizer",
)  # fmt: skip
OF_A_MODEL = (  # weights, what describes them, code of their own, the card
    "model*.safetensors", "pytorch_model*.bin", "*.index.json", "adapter_model.*", "trainable.safetensors",
    "frozen.json", "other_precision.safetensors", "manifest.json", "config.json", "*_config.json",
    "config_sentence_transformers.json", "modules.json", "*.py", "README.md", "*.png", "*LICENSE*",
    "NOTICE*", "run.json", "plan.json", "metrics.json", "metrics.jsonl",
)  # fmt: skip
FOLDERS = ("additional_chat_templates", "onnx", "openvino", "assets")  # the last has the pictures of a card


def is_processors(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in OF_A_PROCESSOR)


def of_model(folder: Path) -> list[str]:
    """The files of the model that lies in a folder, relative to it, sorted: by their names, in a folder that the model
    names as a part of it, such as pooling, a tower or an adapter, or as an index names those of its weights."""
    parts, indexes = _parts(folder), map(read_json, folder.glob("*.index.json"))
    weights = {name for index in indexes for name in index.get("weight_map", {}).values()}
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    patterns = OF_A_MODEL + OF_A_PROCESSOR
    return [
        name
        for name in names
        if Path(name).parts[0] in parts
        or name in weights
        or ("/" not in name and any(fnmatch(name, pattern) for pattern in patterns))
    ]


def _parts(folder: Path) -> set[str]:
    paths = [module.get("path", "") for module in read_json(folder / "modules.json", missing_is_empty=True)]
    for own in {*paths, ""}:
        routes = read_json(folder / own / "router_config.json", missing_is_empty=True).get("structure", {}).values()
        paths += [path for route in routes for path in route]
    paths += [str(path.parent.relative_to(folder)) for path in folder.glob("*/adapter_config.json")]
    found = {Path(path).parts[0] for path in paths if Path(path).parts}
    return found | {name for name in FOLDERS if (folder / name).is_dir()}

"""Predicted against measured bytes, single, DDP 2 and FSDP2 2, as a Markdown table.

    python tests/parity/memory_table.py            # all of it, about three minutes
    python tests/parity/memory_table.py single     # one way to run

A cell is measured bytes and how far the plan is off. `tests/planner/test_memory.py` holds the cases to 2 %, and
activations to 5 %.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # started by its path, Python looks beside this file only

from tests.distributed.forked import run_python  # noqa: E402
from tests.launching import launch  # noqa: E402
from tests.parity.memory_worker import PARTS  # noqa: E402
from tests.tiny_models import OWN_CODE  # noqa: E402

SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 160,
    "max_position_embeddings": 128,
}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BERT = {"model_type": "bert", **SMALL, **NO_DROPOUT}
T5 = {
    "model_type": "t5", "vocab_size": 64, "d_model": 64, "num_layers": 4, "num_heads": 4, "d_kv": 16, "d_ff": 160,
    "dropout_rate": 0.0,
}  # fmt: skip
LLAMA = {"model_type": "llama", **SMALL, **IDS, "num_key_value_heads": 2}
QWEN = {"model_type": "qwen3", **SMALL, **IDS, "num_key_value_heads": 2, "head_dim": 16}
GEMMA = {"model_type": "gemma3_text", **SMALL, **IDS, "num_key_value_heads": 1, "head_dim": 16}
MODERN = {"model_type": "modernbert", **SMALL, **IDS, "cls_token_id": 1, "sep_token_id": 2}
EXPERTS = {"model_type": "mixtral", **SMALL, **IDS, "num_key_value_heads": 2, "num_local_experts": 4}
LAYERS = {
    name: SMALL[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
}
CLIP = {
    "model_type": "clip",
    "projection_dim": 32,
    "text_config": {**SMALL, **IDS},
    "vision_config": {**LAYERS, "image_size": 32, "patch_size": 8},
}
SIGLIP = {
    **CLIP,
    "model_type": "siglip",
    "text_config": {**SMALL, **IDS, "projection_size": 64},
}
RUN = {
    "max_length": {"query": 32, "positive": 64},
    "per_device_train_batch_size": 32,
    "gradient_cache_chunk_size": 8,
    "optim": "adamw_torch",
}
BASE = {name: value for name, value in RUN.items() if name != "gradient_cache_chunk_size"}
TOWERS = {**RUN, "max_length": {"query": 32, "positive": 32}}


TEXT = {**CLIP["text_config"], "num_key_value_heads": 2}
VISION = CLIP["vision_config"]
LLAVA = {
    "model_type": "llava",
    "vision_config": {**VISION, "model_type": "clip_vision_model"},
    "text_config": {**TEXT, "model_type": "llama"},
    "image_token_index": 63,
    "vision_feature_layer": -1,
}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
QWEN_VISION = {"depth": 3, "num_heads": 4, "patch_size": 4, "hidden_size": 64, "out_hidden_size": 64}
_SIGLIP = {
    "vision_config": {**VISION, "model_type": "siglip_vision_model", "vision_use_head": False}, "image_token_id": 63,
}  # fmt: skip
_SHUFFLING = {"vision_config": VISION, "text_config": {**TEXT, "model_type": "llama"}, "image_token_id": 63}
VISION_LANGUAGE = {
    "llava": LLAVA,
    "llava, its last layer not read": {**LLAVA, "vision_feature_layer": -2},
    "llava_next": {**LLAVA, "model_type": "llava_next", "image_grid_pinpoints": [[32, 32]]},
    "paligemma": {
        "model_type": "paligemma", **_SIGLIP, "text_config": {**TEXT, "model_type": "gemma", "head_dim": 16},
        "projection_dim": 64,
    },
    "idefics3": {"model_type": "idefics3", **_SHUFFLING},
    "smolvlm": {"model_type": "smolvlm", **_SHUFFLING},
    "internvl": {
        "model_type": "internvl", "vision_config": VISION, "text_config": {**TEXT, "model_type": "qwen2"},
        "image_token_id": 63,
    },
    "qwen2_vl": {
        "model_type": "qwen2_vl", "vision_config": {**QWEN_VISION, "embed_dim": 48, "mlp_ratio": 3},
        "text_config": {**TEXT, "rope_parameters": ROPE}, "image_token_id": 63,
    },
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl", "text_config": {**TEXT, "rope_parameters": ROPE}, "image_token_id": 63,
        "vision_config": {**QWEN_VISION, "intermediate_size": 96, "fullatt_block_indexes": [1], "window_size": 32},
    },
    "qwen3_vl": {
        "model_type": "qwen3_vl", "image_token_id": 63,
        "text_config": {**TEXT, "head_dim": 16, "rope_parameters": ROPE},
        "vision_config": {
            **QWEN_VISION, "intermediate_size": 96, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1],
        },
    },
}  # fmt: skip


def case(name: str, model: dict, trains: list[str] | None = None, **fields) -> dict:
    return {"name": name, "run": {**RUN, "model_config": model, **fields}, "trains": trains}


def seeing(kind: str, name: str = "", trains: list[str] | None = None, tiles: int | None = None, **fields) -> dict:
    """Every document is a picture and words."""
    fields = {"max_length": {"query": 32, "positive": 96}, "image_columns": ["positive"], **fields}
    return case(f"{kind}, pictures{name}", VISION_LANGUAGE[kind], trains, **fields) | {"tiles": tiles}


CASES = [
    case("bert", BERT),
    case("bert, no cache", BERT, gradient_cache_chunk_size=None),
    case("bert, chunk 2", BERT, gradient_cache_chunk_size=2),
    case("bert, chunk 8 and 2 graphs kept", BERT, gradient_cache_keep_graph=2),
    case("bert, 256 tokens a chunk", BERT, gradient_cache_chunk_size=None, gradient_cache_chunk_tokens=256),
    case("bert, dropout", {**BERT, "hidden_dropout_prob": 0.1}),
    case("bert, checkpointing", BERT, gradient_checkpointing=True),
    case("bert, bf16 autocast", BERT, bf16=True),
    case("bert, eager attention", BERT, attn_implementation="eager"),
    case("bert, projection only", BERT, ["projection"], projection_dim=16, trainable_modules=["projection"]),
    case(
        "bert, last layer and projection",
        BERT,
        ["projection", "layer.3."],
        projection_dim=16,
        trainable_modules=["projection", "encoder.layer.3"],
    ),
    case("bert, adafactor", BERT, optim="adafactor"),
    case("bert, SGD", BERT, optim="sgd"),
    case("bert, LoRA", BERT, use_lora=True, lora_r=4, lora_target_modules=["query", "value"]),
    case("modernbert", MODERN),
    case("llama", LLAMA),
    case("llama, checkpointing", LLAMA, gradient_checkpointing=True),
    case("llama, bf16 autocast", LLAMA, bf16=True),
    case("llama, bf16 autocast and checkpointing", LLAMA, bf16=True, gradient_checkpointing=True),
    case("llama, LoRA", LLAMA, use_lora=True, lora_r=4, lora_target_modules=["q_proj", "v_proj"]),
    case("llama, first layer only", LLAMA, ["layers.0."], trainable_modules=["layers.0"]),
    case("qwen3", QWEN),
    case("gemma3", GEMMA),
    case("mixtral", EXPERTS),
    case("clip", CLIP),
    case("clip, image tower frozen", CLIP, ["text_model", "text_projection"], trainable_modules=["text"]),
    case("siglip", SIGLIP),
    case("mixtral, bf16 weights", EXPERTS, dtype="bfloat16"),
    case("electra", {"model_type": "electra", **SMALL, **NO_DROPOUT, "embedding_size": 32}),
    case("deberta-v2", {"model_type": "deberta-v2", **SMALL, **NO_DROPOUT}),
    case("olmo2", {"model_type": "olmo2", **SMALL, **IDS, "num_key_value_heads": 2}),
    case("olmo2, bf16 autocast", {"model_type": "olmo2", **SMALL, **IDS, "num_key_value_heads": 2}, bf16=True),
    case("qwen2_moe", {**QWEN, "model_type": "qwen2_moe", "num_experts": 4, "moe_intermediate_size": 96}),
    case("t5's encoder", T5),
    case("t5's encoder, checkpointing", T5, gradient_checkpointing=True),
    *(seeing(kind) for kind in VISION_LANGUAGE),
    *(seeing(kind, ", bf16 autocast", bf16=True) for kind in ("llava", "internvl", "qwen3_vl")),
    *(seeing(kind, ", 5 tiles", tiles=5) for kind in ("idefics3", "internvl")),
    seeing("llava", ", projector only", ["multi_modal_projector"], trainable_modules=["projector"]),
    seeing("qwen2_5_vl", ", language only", ["language_model"], trainable_modules=["language"]),
    {**case("own code", BERT, trust_remote_code=True), "code": OWN_CODE},
]
TWICE = (
    "bert",
    "llama",
    "bert, bf16 autocast",
    "llama, bf16 autocast",
    "bert, last layer and projection",
    "llama, LoRA",
)
ON_TWO = [one for one in CASES if one["name"] in TWICE]
WAYS = {
    "single": ("python", 1, "single", CASES),
    "DDP 2": ("multi_gpu_ddp", 2, "DDP", ON_TWO),
    "FSDP2 2": ("multi_gpu_fsdp", 2, "FSDP memory", ON_TWO),
}
WORKER = Path(__file__).with_name("memory_worker.py")


def rows_of(way: str, cases: list[dict] | None = None) -> list[dict]:
    """What the worker printed for a way of running; one process is forked."""
    preset, processes, strategy, all_cases = WAYS[way]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "cases.json")
        path.write_text(json.dumps(all_cases if cases is None else cases), encoding="utf-8")
        if processes == 1:
            printed = run_python(WORKER, path, strategy)
        else:
            printed = launch(preset, processes, WORKER, path, strategy, timeout=600).stdout
    lines = [line.partition("CASE ")[2] for line in printed.splitlines() if line.startswith("CASE ")]
    return [json.loads(line) for line in lines]


def error(row: dict, part: str) -> float:
    """Relative, against the measured bytes; parts of under a KiB are what rounding leaves."""
    predicted, measured = row["predicted"][part], row["measured"][part]
    return 0.0 if max(predicted, measured) < 1024 else (predicted - measured) / measured


def main() -> None:
    print("| run | | " + " | ".join(PARTS) + " |\n" + "|---" * (2 + len(PARTS)) + "|")
    for way in sys.argv[1:] or WAYS:
        for row in rows_of(way):
            cells = [f"{row['measured'][part] / 1024:,.0f} ({error(row, part):+.1%})" for part in PARTS]
            print(f"| {row['name']} | {way} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()

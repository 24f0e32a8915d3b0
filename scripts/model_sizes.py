"""The models that scripts measure on a GPU, as transformers configurations: random weights, nothing is downloaded.

"tiny" stands in for them where there is no GPU.
"""

from __future__ import annotations


def bert(width: int, layers: int, heads: int, **more) -> dict:
    return {
        "model_type": "bert", "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads,
        "intermediate_size": 4 * width, "max_position_embeddings": 512,
        # Dropout would make every contestant's gradient a different random number.
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, **more,
    }  # fmt: skip


MODELS = {
    "tiny": bert(32, 2, 2, vocab_size=30522),
    "small": bert(384, 4, 6, vocab_size=30522),
    "minilm": bert(384, 12, 12, vocab_size=30522),  # 33 million parameters
    "bert-base": bert(768, 12, 12, vocab_size=30522),  # 110 million
    "qwen3-0.6b": {
        "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936,
    },
}  # fmt: skip


def pooling_of(name: str) -> str:
    return "last" if MODELS[name]["model_type"] == "qwen3" else "mean"

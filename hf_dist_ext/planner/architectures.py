"""Families of transformers models as forwards on a `Tape`: which form a model type has, and what stands around it.

    tape = Tape(recipe)
    embed(tape, config, Rows(32, 128))               # an embedding model: backbone, pooling, projection
    generate(tape, config, Rows(4, 300, images=1))   # a model with its labels' loss

Around a family's form stand the pooling and projection of an EmbeddingModel, or the logits of a language model. A
family that is not here is counted by torch itself (tasks/trace.py).
"""

from __future__ import annotations

from collections.abc import Callable

from hf_dist_ext.errors import UsageError
from hf_dist_ext.planner.tape import Tape, Value
from hf_dist_ext.planner.text_architectures import GEMMA, Config, Rows, bert, decoder, distilbert, modernbert
from hf_dist_ext.planner.tower_architectures import text_tower, vision_tower
from hf_dist_ext.planner.vision_language import LANGUAGE, TOWERS, vision_language

FAMILIES: dict[str, Callable[[Tape, Config, Rows], Value]] = {
    **dict.fromkeys(["bert", "roberta", "xlm-roberta", "camembert", "mpnet"], bert),
    "distilbert": distilbert,
    "modernbert": modernbert,
    **dict.fromkeys(["llama", "mistral", "mixtral", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"], decoder),
    **dict.fromkeys(GEMMA, decoder),
    **dict.fromkeys(["clip_vision_model", "siglip_vision_model"], vision_tower),
    **dict.fromkeys(["clip_text_model", "siglip_text_model"], text_tower),
    **dict.fromkeys(TOWERS, vision_language),
}
TWO_TOWERS = ("clip", "siglip")
PARTS = ("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text")  # decoders that are no model of their own


def is_known(config: Config) -> bool:
    kind = config["model_type"]
    if kind not in TOWERS:
        parts = [config, *(config[part] for part in ("text_config", "vision_config") if config.get(part))]
        return all(part["model_type"] in {*FAMILIES, *TWO_TOWERS} for part in parts)
    text = config["text_config"]["model_type"]
    return config["vision_config"]["model_type"] in TOWERS[kind] and (FAMILIES.get(text) is decoder or text in PARTS)


def embed(
    tape: Tape,
    config: Config,
    rows: Rows,
    projection_dim: int | None = None,
    leaves_tokens: bool = False,
    token_dim: int | None = None,
) -> Value:
    """An `EmbeddingModel`: backbone, pooling to one vector per row (`leaves_tokens`: one per token), an optional
    projection, normalization. `token_dim`: of a `HybridEmbeddingModel`, whose heads stand beside the projection."""
    with tape.module("backbone"):
        x = _family(config)(tape, config, rows)
    if leaves_tokens:
        pooled = tape.new(x.rows, x.width, x.item, x.flows)  # real tokens in front
        tape.keep_bytes(8 * x.rows * x.flows)
    else:
        pooled = tape.new(rows.count, x.width, 4, x.flows)
    if token_dim:
        if projection_dim:
            dense = tape.new(rows.count, x.width, x.item, x.flows)
            tape.linear("projection", dense, projection_dim, bias=False)
        tape.linear("sparse_linear", pooled, 1)
        pooled = tape.linear("colbert_linear", pooled, token_dim)
    elif projection_dim:
        pooled = tape.linear("projection", tape.cast(pooled, x.item), projection_dim, bias=False)
    return _normalized(tape, pooled)


def embed_tower(tape: Tape, config: Config, rows: Rows, is_image: bool) -> Value:
    """One tower of a two-tower model such as CLIP, to one vector per row."""
    name, head, tower = ("vision", "visual", vision_tower) if is_image else ("text", "text", text_tower)
    with tape.module(f"{name}_model"):
        x = tower(tape, config[f"{name}_config"], rows)
    if config["model_type"] == "clip":
        x = tape.linear(f"{head}_projection", x, config["projection_dim"], False)
    return _normalized(tape, x)


def _normalized(tape: Tape, x: Value) -> Value:
    x = tape.cast(x, 4)
    if x.flows:
        tape.keep(x)
        tape.keep_bytes(x.bytes + 2 * 4 * x.rows)  # its product with the gradient's cache; a norm and divisor per row
    return tape.new(x.rows, x.width, 4, x.flows)


def generate(tape: Tape, config: Config, rows: Rows) -> Value:
    """A model with a language-model head and its labels' loss: every token's logits over the vocabulary."""
    is_whole = config["model_type"] in TOWERS
    with tape.module("model"):
        x = _family(config)(tape, config, rows)
    text = config["text_config"] if is_whole else config
    if text.get("tie_word_embeddings") or config.get("tie_word_embeddings"):  # the embedding's matrix once more
        part = LANGUAGE.get(config["model_type"], "language_model") + "." if is_whole else ""
        name = f"model.{part}embed_tokens.weight"
        logits = tape.product(name, tape.parameters[name], x, text["vocab_size"])
    else:
        logits = tape.linear("lm_head", x, text["vocab_size"], bias=False)
    if logits.flows:
        tape.keep(tape.new(rows.tokens, text["vocab_size"], 4, True))  # log-softmax in float32
        tape.keep_bytes(logits.bytes)  # the output holds the logits
    return logits


def _family(config: Config) -> Callable[[Tape, Config, Rows], Value]:
    if config["model_type"] not in FAMILIES:
        raise UsageError(
            f'model_type="{config["model_type"]}" has no closed form here. Known: {", ".join(FAMILIES)}. '
            "Use --trace, which lets torch count it."
        )
    return FAMILIES[config["model_type"]]

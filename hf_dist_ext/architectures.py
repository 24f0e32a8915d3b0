"""Families of transformers models as forwards on a `Tape`: their parameters by name, and what autograd keeps of them.

    tape = Tape(recipe)
    embed(tape, config, Rows(32, 128))               # an embedding model: backbone, pooling, projection
    describe_image(tape, config, Rows(4, 300, images=1))   # a vision-language model with its labels' loss

(1) encoders (Bert and its relatives, DistilBert, MPNet, ModernBert), one layer in ten lines each
(2) decoders (Llama, Mistral, Qwen, Gemma, Phi3): grouped queries, gated feed-forward, mixtures of experts
(3) towers (CLIP, SigLIP), text and image
(4) vision-language models: a tower, a projector, a decoder (LLaVA, PaliGemma, Gemma 3)
(5) what stands around: pooling and projection of an EmbeddingModel, the logits of a language model

Names are those of `model.named_parameters()`, so that freezing patterns and LoRA targets mean here what they mean
there. A family that is not here is counted by torch itself (memory_trace.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hf_dist_ext.errors import UsageError
from hf_dist_ext.tape import Parameter, Tape, Value

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Rows:
    """What a forward takes: `count` rows of `length` tokens each (a vision-language model's image tokens included)."""

    count: float
    length: float
    images: float = 0  # per row

    @property
    def tokens(self) -> float:
        return self.count * self.length


# (1) ---------------------------------------------------------------------------------------------------------------


def _bert(tape: Tape, config: Config, rows: Rows) -> Value:
    width, drop, act = config["hidden_size"], config["hidden_dropout_prob"], config["hidden_act"]
    is_mpnet = config["model_type"] == "mpnet"
    with tape.module("embeddings"):
        x = tape.embedding("word_embeddings", rows.tokens, config["vocab_size"], width)
        x = tape.add(x, tape.embedding("position_embeddings", rows.tokens, config["max_position_embeddings"], width))
        if not is_mpnet:
            types = tape.embedding("token_type_embeddings", rows.tokens, config["type_vocab_size"], width)
            x = tape.add(x, types)
        x = tape.dropout(tape.layer_norm("LayerNorm", x), drop)
    if is_mpnet:
        buckets = config.get("relative_attention_num_buckets", 32)
        tape.learned("encoder.relative_attention_bias.weight", 1, buckets, config["num_attention_heads"])
    names = ("attn.q", "attn.k", "attn.v", "attn.o", "LayerNorm")
    if not is_mpnet:
        names = ("self.query", "self.key", "self.value", "output.dense", "output.LayerNorm")
    for i in range(config["num_hidden_layers"]):
        with tape.layer(f"encoder.layer.{i}", x):
            with tape.module("attention"):
                query, key, value = (tape.linear(name, x, width) for name in names[:3])
                heads, drop_scores = config["num_attention_heads"], config["attention_probs_dropout_prob"]
                kind = "eager" if is_mpnet else None  # its scores have a bias that no kernel takes
                attended = tape.attention(query, key, value, heads, rows.length, drop_scores, kind=kind)
                attended = tape.dropout(tape.linear(names[3], attended, width), drop)
                x = tape.layer_norm(names[4], tape.add(attended, x))
            inner = tape.activation(tape.linear("intermediate.dense", x, config["intermediate_size"]), act)
            outer = tape.dropout(tape.linear("output.dense", inner, width), drop)
            x = tape.layer_norm("output.LayerNorm", tape.add(outer, x))
    return x


def _distilbert(tape: Tape, config: Config, rows: Rows) -> Value:
    width, drop = config["dim"], config["dropout"]
    with tape.module("embeddings"):
        x = tape.embedding("word_embeddings", rows.tokens, config["vocab_size"], width)
        x = tape.add(x, tape.embedding("position_embeddings", rows.tokens, config["max_position_embeddings"], width))
        x = tape.dropout(tape.layer_norm("LayerNorm", x), drop)
    for i in range(config["n_layers"]):
        with tape.layer(f"transformer.layer.{i}", x):
            parts = [tape.linear(f"attention.{name}_lin", x, width) for name in "qkv"]
            attended = tape.attention(*parts, config["n_heads"], rows.length, config["attention_dropout"])
            attended = tape.linear("attention.out_lin", attended, width)
            x = tape.layer_norm("sa_layer_norm", tape.add(attended, x))
            inner = tape.activation(tape.linear("ffn.lin1", x, config["hidden_dim"]), config["activation"])
            outer = tape.dropout(tape.linear("ffn.lin2", inner, width), drop)
            x = tape.layer_norm("output_layer_norm", tape.add(outer, x))
    return x


def _modernbert(tape: Tape, config: Config, rows: Rows) -> Value:
    width, inner = config["hidden_size"], config["intermediate_size"]
    with tape.module("embeddings"):
        x = tape.embedding("tok_embeddings", rows.tokens, config["vocab_size"], width)
        x = tape.dropout(tape.layer_norm("norm", x, config["norm_bias"]), config["embedding_dropout"])
    for i in range(config["num_hidden_layers"]):
        with tape.layer(f"layers.{i}", x):
            normed = x if i == 0 else tape.layer_norm("attn_norm", x, config["norm_bias"])
            together = tape.linear("attn.Wqkv", normed, 3 * width, config["attention_bias"])
            parts = [tape.part(together, width) for _ in range(3)]
            query, key = (_rotated(tape, one) for one in parts[:2])
            heads, drop = config["num_attention_heads"], config["attention_dropout"]
            attended = tape.attention(query, key, parts[2], heads, rows.length, drop)
            x = tape.add(x, tape.linear("attn.Wo", attended, width, config["attention_bias"]))
            both = tape.linear(
                "mlp.Wi", tape.layer_norm("mlp_norm", x, config["norm_bias"]), 2 * inner, config["mlp_bias"]
            )
            gate, up = tape.part(both, inner), tape.part(both, inner)
            gated = tape.multiply(tape.activation(gate, config["hidden_activation"]), up)
            gated = tape.dropout(gated, config["mlp_dropout"])
            x = tape.add(x, tape.linear("mlp.Wo", gated, width, config["mlp_bias"]))
    return tape.layer_norm("final_norm", x, config["norm_bias"])


# (2) ---------------------------------------------------------------------------------------------------------------

GEMMA = ("gemma", "gemma2", "gemma3_text")
QUERY_KEY_NORM = ("qwen3", "qwen3_moe", "gemma3_text")
FOUR_NORMS = ("gemma2", "gemma3_text")


def _rotated(tape: Tape, x: Value) -> Value:
    """Rotary positions: products with constants keep nothing of x."""
    return tape.new(x.rows, x.width, x.item, x.flows)


def _decoder(tape: Tape, config: Config, rows: Rows, embeds: Value | None = None) -> Value:
    """`embeds`: what stands in for some tokens of a vision-language model; a gradient flows into it."""
    width, kind, heads = config["hidden_size"], config["model_type"], config["num_attention_heads"]
    shared = config.get("num_key_value_heads") or heads
    head = config.get("head_dim") or width // heads
    is_gemma, has_four = kind in GEMMA, kind in FOUR_NORMS
    bias = bool(config.get("attention_bias") or kind.startswith("qwen2"))
    x = tape.embedding("embed_tokens", rows.tokens, config["vocab_size"], width)
    if embeds is not None:  # masked_scatter into a copy
        x = tape.new(x.rows, x.width, x.item, x.flows or embeds.flows)
    for i in range(config["num_hidden_layers"]):
        with tape.layer(f"layers.{i}", x):
            normed = tape.rms_norm("input_layernorm", x, is_gemma)
            with tape.module("self_attn"):
                if kind == "phi3":
                    together = tape.linear("qkv_proj", normed, (heads + 2 * shared) * head, False)
                    query, key, value = (tape.part(together, n * head) for n in (heads, shared, shared))
                else:
                    query = tape.linear("q_proj", normed, heads * head, bias)
                    key = tape.linear("k_proj", normed, shared * head, bias)
                    value = tape.linear("v_proj", normed, shared * head, bias)
                if kind in QUERY_KEY_NORM:
                    query = tape.rms_norm("q_norm", query, is_gemma, head)
                    key = tape.rms_norm("k_norm", key, is_gemma, head)
                query, key = _rotated(tape, query), _rotated(tape, key)
                drop = config.get("attention_dropout") or 0.0
                is_capped = bool(config.get("attn_logit_softcapping"))
                options = {"kind": "eager" if is_capped else None, "capped": is_capped, "causal": True}
                attended = tape.attention(query, key, value, heads, rows.length, drop, shared, **options)
                attended = tape.linear("o_proj", attended, width, bias and not kind.startswith("qwen2"))
            if has_four:
                attended = tape.rms_norm("post_attention_layernorm", attended, is_gemma)
            x = tape.add(x, attended)
            norm = "pre_feedforward_layernorm" if has_four else "post_attention_layernorm"
            outer = _feed_forward(tape, config, tape.rms_norm(norm, x, is_gemma), i)
            if has_four:
                outer = tape.rms_norm("post_feedforward_layernorm", outer, is_gemma)
            x = tape.add(x, outer)
    return tape.rms_norm("norm", x, is_gemma)


def _feed_forward(tape: Tape, config: Config, x: Value, index: int) -> Value:
    experts = config.get("num_experts") or config.get("num_local_experts") or 0
    is_sparse = experts and index not in (config.get("mlp_only_layers") or ())
    is_sparse = is_sparse and (index + 1) % (config.get("decoder_sparse_step") or 1) == 0
    with tape.module("mlp"):
        if is_sparse:
            return _experts(tape, config, x, experts)
        return _gated(tape, config, x, config["intermediate_size"])


def _gated(tape: Tape, config: Config, x: Value, inner: int) -> Value:
    bias, act = bool(config.get("mlp_bias")), config.get("hidden_act") or config.get("hidden_activation")
    if config["model_type"] == "phi3":
        both = tape.linear("gate_up_proj", x, 2 * inner, False)
        gate, up = tape.part(both, inner), tape.part(both, inner)
    else:
        gate, up = tape.linear("gate_proj", x, inner, bias), tape.linear("up_proj", x, inner, bias)
    return tape.linear("down_proj", tape.multiply(tape.activation(gate, act), up), int(x.width), bias)


def _experts(tape: Tape, config: Config, x: Value, experts: int) -> Value:
    """Every token is copied to its experts; all experts have weights, gradients and states, few have work."""
    inner = config.get("moe_intermediate_size") or config["intermediate_size"]
    width, chosen = int(x.width), config["num_experts_per_tok"]
    scores = tape.linear("gate", x, experts, False)
    tape.keep(tape.new(x.rows, experts, 4, scores.flows))  # softmax
    both = tape.parameter("experts.gate_up_proj", experts * 2 * inner * width, width)
    down = tape.parameter("experts.down_proj", experts * width * inner, inner)
    copies = tape.new(x.rows * chosen, width, x.item, x.flows or scores.flows)
    hidden = _grouped_product(tape, both, copies, 2 * inner)
    gate, up = tape.part(hidden, inner), tape.part(hidden, inner)
    gated = tape.multiply(tape.activation(gate, "silu"), up)
    out = _grouped_product(tape, down, gated, width)
    if out.flows:
        tape.keep(out)  # times the router's weight
    result = tape.new(x.rows, width, x.item, out.flows)
    if config.get("shared_expert_intermediate_size"):
        with tape.module("shared_expert"):
            shared = _gated(tape, config, x, config["shared_expert_intermediate_size"])
        gate = tape.activation(tape.linear("shared_expert_gate", x, 1, False), "sigmoid")
        result = tape.add(result, tape.multiply(gate, shared))
    return result


def _grouped_product(tape: Tape, weight: Parameter, x: Value, width: int) -> Value:
    """transformers' grouped matrix product is not autocast's: it runs in the precision the weights are stored in."""
    source = tape.cast(x, weight.item)
    if weight.trains:
        tape.keep(source)
    tape.work(x.rows * x.width * width, x.flows + weight.trains)
    return tape.new(x.rows, width, weight.item, x.flows or weight.trains)


# (3) ---------------------------------------------------------------------------------------------------------------


def _tower_layers(tape: Tape, config: Config, x: Value, length: float) -> list[Value]:
    """The input and output of every layer."""
    states, width, drop = [x], int(x.width), config.get("attention_dropout") or 0.0
    for i in range(config["num_hidden_layers"]):
        with tape.layer(f"encoder.layers.{i}", x):
            normed = tape.layer_norm("layer_norm1", x)
            query, key, value = (tape.linear(f"self_attn.{name}_proj", normed, width) for name in "qkv")
            attended = tape.attention(query, key, value, config["num_attention_heads"], length, drop)
            x = tape.add(x, tape.linear("self_attn.out_proj", attended, width))
            inner = tape.linear("mlp.fc1", tape.layer_norm("layer_norm2", x), config["intermediate_size"])
            x = tape.add(x, tape.linear("mlp.fc2", tape.activation(inner, config["hidden_act"]), width))
        states.append(x)
    return states


def num_patches(config: Config) -> int:
    """Of one image of a tower: patches, without a class token."""
    size, patch = (one if isinstance(one, int) else one[0] for one in (config["image_size"], config["patch_size"]))
    return (size // patch) ** 2


def _vision_states(tape: Tape, config: Config, images: float) -> tuple[list[Value], float]:
    width, is_clip = config["hidden_size"], config["model_type"].startswith("clip")
    patch = config["patch_size"] if isinstance(config["patch_size"], int) else config["patch_size"][0]
    length = num_patches(config) + is_clip
    # The image itself is an input: nothing flows into it, but a trained patch embedding keeps it.
    pixels = tape.new(images * num_patches(config), config["num_channels"] * patch * patch, 4, False)
    with tape.module("embeddings"):
        if is_clip:
            tape.parameter("class_embedding", width)
        patches = tape.linear("patch_embedding", pixels, width, bias=not is_clip)
        positions = tape.embedding("position_embedding", 0, length, width)
        flows = patches.flows or positions.flows
        # float32 position vectors lift the sum
        x = tape.new(images * length, width, max(patches.item, positions.item), flows)
    if is_clip:
        x = tape.layer_norm("pre_layrnorm", x)
    return _tower_layers(tape, config, x, length), length


def _vision_tower(tape: Tape, config: Config, rows: Rows) -> Value:
    """-> one vector per image."""
    images, width = rows.count, config["hidden_size"]
    states, length = _vision_states(tape, config, images)
    if config["model_type"].startswith("clip"):
        pooled = tape.new(images, width, states[-1].item, states[-1].flows)
        return tape.layer_norm("post_layernorm", pooled)
    x = tape.layer_norm("post_layernorm", states[-1])
    if not config.get("vision_use_head", True):
        return tape.new(images, width, x.item, x.flows)
    return _attention_head(tape, config, x, images)


def _attention_head(tape: Tape, config: Config, x: Value, images: float) -> Value:
    """SigLIP's pooling: one learned query looks at all patches."""
    width = config["hidden_size"]
    with tape.module("head"):
        tape.parameter("probe", width)
        both = tape.parameter("attention.in_proj_weight", 3 * width * width, width)
        tape.parameter("attention.in_proj_bias", 3 * width)
        keys = tape.product(f"{tape.prefix}attention.in_proj_weight", both, x, 2 * width)
        if keys.flows:
            tape.keep(keys)
        pooled = tape.linear("attention.out_proj", tape.new(images, width, keys.item, keys.flows), width)
        normed = tape.layer_norm("layernorm", pooled)
        inner = tape.activation(tape.linear("mlp.fc1", normed, config["intermediate_size"]), config["hidden_act"])
        return tape.add(pooled, tape.linear("mlp.fc2", inner, width))


def _text_tower(tape: Tape, config: Config, rows: Rows) -> Value:
    width = config["hidden_size"]
    with tape.module("embeddings"):
        x = tape.embedding("token_embedding", rows.tokens, config["vocab_size"], width)
        positions = tape.embedding("position_embedding", rows.length, config["max_position_embeddings"], width)
        x = tape.add(x, positions)
    x = tape.layer_norm("final_layer_norm", _tower_layers(tape, config, x, rows.length)[-1])
    pooled = tape.new(rows.count, width, x.item, x.flows)
    if config["model_type"].startswith("siglip"):
        return tape.linear("head", pooled, config.get("projection_size") or width)
    return pooled


# (4) ---------------------------------------------------------------------------------------------------------------


def _image_features(tape: Tape, config: Config, images: float) -> Value:
    """The tower's chosen layer through the projector: one vector per image token."""
    vision, text = config["vision_config"], config["text_config"]
    with tape.module("vision_tower"):
        states, length = _vision_states(tape, vision, images)
        layer = config.get("vision_feature_layer", -1)
        layer = layer if isinstance(layer, int) else layer[-1]
        x = states[layer]
        for unused in tape.layers[len(states[: layer if layer >= 0 else len(states) + layer]) :]:
            unused.saved = unused.casts = 0.0  # layers after the chosen one run, and are forgotten
        if vision["model_type"].startswith("siglip") and layer == -1:
            x = tape.layer_norm("post_layernorm", x)
        else:
            tape.parameter("post_layernorm.weight", vision["hidden_size"])
            tape.parameter("post_layernorm.bias", vision["hidden_size"])
        if vision["model_type"].startswith("siglip") and vision.get("vision_use_head", True):
            _attention_head(tape, vision, tape.new(0, vision["hidden_size"], 4, False), 0)  # there, but never called
    with tape.module("multi_modal_projector"):
        tokens = image_tokens(config)
        x = tape.new(images * tokens, vision["hidden_size"], x.item, x.flows)
        if config["model_type"] == "paligemma":
            return tape.linear("linear", x, text["hidden_size"])
        if config["model_type"] == "gemma3":
            x = tape.rms_norm("mm_soft_emb_norm", x, adds_one=True)
            weight = tape.parameter(
                "mm_input_projection_weight", vision["hidden_size"] * text["hidden_size"], vision["hidden_size"]
            )
            return tape.product(f"{tape.prefix}mm_input_projection_weight", weight, x, text["hidden_size"])
        bias = config.get("multimodal_projector_bias", True)
        inner = tape.linear("linear_1", x, text["hidden_size"], bias)
        inner = tape.activation(inner, config.get("projector_hidden_act", "gelu"))
        return tape.linear("linear_2", inner, text["hidden_size"], bias)


def image_tokens(config: Config) -> int:
    """Tokens that one image takes in the text of a vision-language model."""
    if config["model_type"] == "gemma3":
        return config.get("mm_tokens_per_image") or 256
    vision = config["vision_config"]
    keeps_all = config.get("vision_feature_select_strategy") == "full" and vision["model_type"].startswith("clip")
    return num_patches(vision) + keeps_all


def _vision_language(tape: Tape, config: Config, rows: Rows) -> Value:
    features = _image_features(tape, config, rows.count * rows.images) if rows.images else None
    if features is None:  # the parameters are there all the same
        _image_features(tape, config, 0)
    with tape.module("language_model"):
        return _decoder(tape, config["text_config"], rows, features)


FAMILIES: dict[str, Callable[[Tape, Config, Rows], Value]] = {
    **dict.fromkeys(["bert", "roberta", "xlm-roberta", "camembert", "mpnet"], _bert),
    "distilbert": _distilbert,
    "modernbert": _modernbert,
    **dict.fromkeys(["llama", "mistral", "mixtral", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"], _decoder),
    **dict.fromkeys(GEMMA, _decoder),
    **dict.fromkeys(["clip_vision_model", "siglip_vision_model"], _vision_tower),
    **dict.fromkeys(["clip_text_model", "siglip_text_model"], _text_tower),
    **dict.fromkeys(["llava", "paligemma", "gemma3"], _vision_language),
}
TWO_TOWERS = ("clip", "siglip")


def is_known(config: Config) -> bool:
    kinds = [config, *(config[part] for part in ("text_config", "vision_config") if config.get(part))]
    known = {*FAMILIES, *TWO_TOWERS}
    return all(one["model_type"] in known for one in kinds)


# (5) ---------------------------------------------------------------------------------------------------------------


def embed(tape: Tape, config: Config, rows: Rows, projection_dim: int | None = None) -> Value:
    """An `EmbeddingModel`: backbone, pooling to one vector per row, an optional projection, normalization."""
    with tape.module("backbone"):
        x = _family(config)(tape, config, rows)
    pooled = tape.new(rows.count, x.width, 4, x.flows)
    if projection_dim:
        pooled = tape.linear("projection", tape.cast(pooled, x.item), projection_dim, bias=False)
    return _normalized(tape, pooled)


def embed_tower(tape: Tape, config: Config, rows: Rows, is_image: bool) -> Value:
    """One tower of a two-tower model such as CLIP, to one vector per row."""
    name = "vision" if is_image else "text"
    with tape.module(f"{name}_model"):
        tower = _vision_tower if is_image else _text_tower
        x = tower(tape, config[f"{name}_config"], rows)
    if config["model_type"] == "clip":
        x = tape.linear("visual_projection" if is_image else "text_projection", x, config["projection_dim"], False)
    return _normalized(tape, x)


def _normalized(tape: Tape, x: Value) -> Value:
    x = tape.cast(x, 4)
    if x.flows:
        tape.keep(x)
        tape.keep_bytes(2 * x.bytes)  # the divisor, expanded, and the result for the product with its gradient
    return tape.new(x.rows, x.width, 4, x.flows)


def generate(tape: Tape, config: Config, rows: Rows) -> Value:
    """A model with a language-model head and its labels' loss: every token's logits over the vocabulary."""
    is_whole = config["model_type"] in ("llava", "paligemma", "gemma3")
    with tape.module("model"):
        x = _family(config)(tape, config, rows)
    text = config["text_config"] if is_whole else config
    is_tied = text.get("tie_word_embeddings") or config.get("tie_word_embeddings")
    if is_tied:  # the embedding's matrix once more
        name = f"model.{'language_model.' if is_whole else ''}embed_tokens.weight"
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

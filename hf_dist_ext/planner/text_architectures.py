"""Text models as forwards on a `Tape`: their parameters by name, and what autograd keeps of them.

Encoders are Bert and its relatives, DistilBert and ModernBert; decoders are Llama, Mistral, Qwen, Gemma and Phi3.
Names are those of `model.named_parameters()`, so that freezing patterns and LoRA targets mean here what they do there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_dist_ext.planner.tape import Parameter, Tape, Value

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


def _embeddings(tape: Tape, config: Config, rows: Rows, width: int, dropout: float, has_types: bool) -> Value:
    with tape.module("embeddings"):
        x = tape.embedding("word_embeddings", rows.tokens, config["vocab_size"], width)
        x = tape.add(x, tape.embedding("position_embeddings", rows.tokens, config["max_position_embeddings"], width))
        if has_types:
            types = tape.embedding("token_type_embeddings", rows.tokens, config["type_vocab_size"], width)
            x = tape.add(x, types)
        return tape.dropout(tape.layer_norm("LayerNorm", x), dropout)


def feed_forward(tape: Tape, x: Value, names: Sequence[str], inner: int, activation: str, width: int) -> Value:
    """Two linear layers with an activation between them."""
    return tape.linear(names[1], tape.activation(tape.linear(names[0], x, inner), activation), width)


def bert(tape: Tape, config: Config, rows: Rows) -> Value:
    width, drop, act = config["hidden_size"], config["hidden_dropout_prob"], config["hidden_act"]
    is_mpnet = config["model_type"] == "mpnet"
    x = _embeddings(tape, config, rows, width, drop, has_types=not is_mpnet)
    names = ("self.query", "self.key", "self.value", "output.dense", "output.LayerNorm")
    if is_mpnet:
        buckets = config.get("relative_attention_num_buckets", 32)
        tape.learned("encoder.relative_attention_bias.weight", 1, buckets, config["num_attention_heads"])
        names = ("attn.q", "attn.k", "attn.v", "attn.o", "LayerNorm")
    for i in range(config["num_hidden_layers"]):
        with tape.layer(f"encoder.layer.{i}", x):
            with tape.module("attention"):
                heads, drop_scores = config["num_attention_heads"], config["attention_probs_dropout_prob"]
                inner = heads * (config.get("head_dim") or width // heads)
                query, key, value = (tape.linear(name, x, inner) for name in names[:3])
                kind = "eager" if is_mpnet else None  # its scores have a bias that no kernel takes
                attended = tape.attention(query, key, value, heads, rows.length, drop_scores, kind=kind)
                attended = tape.dropout(tape.linear(names[3], attended, width), drop)
                x = tape.layer_norm(names[4], tape.add(attended, x))
            layers = ("intermediate.dense", "output.dense")
            outer = tape.dropout(feed_forward(tape, x, layers, config["intermediate_size"], act, width), drop)
            x = tape.layer_norm("output.LayerNorm", tape.add(outer, x))
    return x


def distilbert(tape: Tape, config: Config, rows: Rows) -> Value:
    width, drop = config["dim"], config["dropout"]
    x = _embeddings(tape, config, rows, width, drop, has_types=False)
    for i in range(config["n_layers"]):
        with tape.layer(f"transformer.layer.{i}", x):
            parts = [tape.linear(f"attention.{name}_lin", x, width) for name in "qkv"]
            attended = tape.attention(*parts, config["n_heads"], rows.length, config["attention_dropout"])
            attended = tape.linear("attention.out_lin", attended, width)
            x = tape.layer_norm("sa_layer_norm", tape.add(attended, x))
            layers = ("ffn.lin1", "ffn.lin2")
            outer = feed_forward(tape, x, layers, config["hidden_dim"], config["activation"], width)
            outer = tape.dropout(outer, drop)
            x = tape.layer_norm("output_layer_norm", tape.add(outer, x))
    return x


def modernbert(tape: Tape, config: Config, rows: Rows) -> Value:
    width, inner, bias = config["hidden_size"], config["intermediate_size"], config["norm_bias"]
    with tape.module("embeddings"):
        x = tape.embedding("tok_embeddings", rows.tokens, config["vocab_size"], width)
        x = tape.dropout(tape.layer_norm("norm", x, bias), config["embedding_dropout"])
    for i in range(config["num_hidden_layers"]):
        with tape.layer(f"layers.{i}", x):
            normed = x if i == 0 else tape.layer_norm("attn_norm", x, bias)
            together = tape.linear("attn.Wqkv", normed, 3 * width, config["attention_bias"])
            parts = [tape.part(together, width) for _ in range(3)]
            query, key = (rotated(tape, one) for one in parts[:2])
            heads, drop = config["num_attention_heads"], config["attention_dropout"]
            attended = tape.attention(query, key, parts[2], heads, rows.length, drop)
            x = tape.add(x, tape.linear("attn.Wo", attended, width, config["attention_bias"]))
            both = tape.linear("mlp.Wi", tape.layer_norm("mlp_norm", x, bias), 2 * inner, config["mlp_bias"])
            gated = tape.dropout(_halves_gated(tape, both, config["hidden_activation"]), config["mlp_dropout"])
            x = tape.add(x, tape.linear("mlp.Wo", gated, width, config["mlp_bias"]))
    return tape.layer_norm("final_norm", x, bias)


def _halves_gated(tape: Tape, both: Value, activation: str) -> Value:
    """A gate and what it multiplies, side by side in one value."""
    gate, up = tape.part(both, both.width / 2), tape.part(both, both.width / 2)
    return tape.multiply(tape.activation(gate, activation), up)


GEMMA = ("gemma", "gemma2", "gemma3_text")
QUERY_KEY_NORM = ("qwen3", "qwen3_moe", "qwen3_vl_text", "gemma3_text")
FOUR_NORMS = ("gemma2", "gemma3_text")


def rotated(tape: Tape, x: Value) -> Value:
    """Rotary positions: products with constants keep nothing of x."""
    return tape.new(x.rows, x.width, x.item, x.flows)


def decoder(tape: Tape, config: Config, rows: Rows, embeds: Value | None = None, added: Sequence[Value] = ()) -> Value:
    """`embeds`: what stands in for some tokens of a vision-language model; a gradient flows into it. `added`: more of
    an image, added to its tokens after each of the first layers."""
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
                query, key = rotated(tape, query), rotated(tape, key)
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
        if i < len(added):  # into a copy
            x = tape.new(x.rows, x.width, x.item, x.flows or added[i].flows)
    return tape.rms_norm("norm", x, is_gemma)


def _feed_forward(tape: Tape, config: Config, x: Value, index: int) -> Value:
    experts = config.get("num_experts") or config.get("num_local_experts") or 0
    is_dense = index in (config.get("mlp_only_layers") or ()) or (index + 1) % (config.get("decoder_sparse_step") or 1)
    with tape.module("mlp"):
        if experts and not is_dense:
            return _experts(tape, config, x, experts)
        return gated_layers(tape, config, x, config["intermediate_size"])


def gated_layers(tape: Tape, config: Config, x: Value, inner: int) -> Value:
    bias, act = bool(config.get("mlp_bias")), config.get("hidden_act") or config.get("hidden_activation")
    if config["model_type"] == "phi3":
        gated = _halves_gated(tape, tape.linear("gate_up_proj", x, 2 * inner, False), act)
    else:
        gate, up = tape.linear("gate_proj", x, inner, bias), tape.linear("up_proj", x, inner, bias)
        gated = tape.multiply(tape.activation(gate, act), up)
    return tape.linear("down_proj", gated, int(x.width), bias)


def _experts(tape: Tape, config: Config, x: Value, experts: int) -> Value:
    """Every token is copied to its experts; all experts have weights, gradients and states, few have work."""
    inner = config.get("moe_intermediate_size") or config["intermediate_size"]
    width, chosen = int(x.width), config["num_experts_per_tok"]
    scores = tape.linear("gate", x, experts, False)
    tape.keep(tape.new(x.rows, experts, 4, scores.flows))  # softmax
    both = tape.parameter("experts.gate_up_proj", experts * 2 * inner * width, width)
    down = tape.parameter("experts.down_proj", experts * width * inner, inner)
    copies = tape.new(x.rows * chosen, width, x.item, x.flows or scores.flows)
    gated = _halves_gated(tape, _grouped_product(tape, both, copies, 2 * inner), "silu")
    out = _grouped_product(tape, down, gated, width)
    if out.flows:
        tape.keep(out)  # times the router's weight
    result = tape.new(x.rows, width, x.item, out.flows)
    if config.get("shared_expert_intermediate_size"):
        with tape.module("shared_expert"):
            shared = gated_layers(tape, config, x, config["shared_expert_intermediate_size"])
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

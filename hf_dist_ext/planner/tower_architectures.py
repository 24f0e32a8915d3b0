"""Image and text towers as forwards on a `Tape`: CLIP, SigLIP and those built alike (Idefics3), InternVL, Qwen-VL.

A tower gives one vector per image or text, or the states for a vision-language model. Qwen's towers take pictures of
any size, and a merger makes one token of a square of patches; Qwen3-VL also hands on what layers in between see.
"""

from __future__ import annotations

from hf_dist_ext.planner.tape import Tape, Value
from hf_dist_ext.planner.text_architectures import Config, Rows, feed_forward, gated_layers, rotated

_MLP = ("mlp.fc1", "mlp.fc2")


def _tower_layers(tape: Tape, config: Config, x: Value, length: float, masked: bool = True) -> list[Value]:
    """The input and output of every layer."""
    states, width, drop = [x], int(x.width), config.get("attention_dropout") or 0.0
    for i in range(config["num_hidden_layers"]):
        with tape.layer(f"encoder.layers.{i}", x):
            normed = tape.layer_norm("layer_norm1", x)
            query, key, value = (tape.linear(f"self_attn.{name}_proj", normed, width) for name in "qkv")
            attended = tape.attention(query, key, value, config["num_attention_heads"], length, drop, masked=masked)
            x = tape.add(x, tape.linear("self_attn.out_proj", attended, width))
            normed = tape.layer_norm("layer_norm2", x)
            x = tape.add(x, feed_forward(tape, normed, _MLP, config["intermediate_size"], config["hidden_act"], width))
        states.append(x)
    return states


def _side(config: Config, name: str) -> int:
    """Of an image or a patch, which are squares."""
    return config[name] if isinstance(config[name], int) else config[name][0]


def num_patches(config: Config) -> int:
    """Of one image of a tower: patches, without a class token."""
    return (_side(config, "image_size") // _side(config, "patch_size")) ** 2


def _pixels(tape: Tape, config: Config, images: float) -> Value:
    """The image itself is an input: nothing flows into it, but a trained patch embedding keeps it."""
    return tape.new(images * num_patches(config), config["num_channels"] * _side(config, "patch_size") ** 2, 4, False)


def vision_states(tape: Tape, config: Config, images: float) -> tuple[list[Value], float]:
    width, is_clip = config["hidden_size"], config["model_type"].startswith("clip")
    length = num_patches(config) + is_clip
    with tape.module("embeddings"):
        if is_clip:
            tape.parameter("class_embedding", width)
        patches = tape.linear("patch_embedding", _pixels(tape, config, images), width, bias=not is_clip)
        positions = tape.embedding("position_embedding", 0, length, width)
        flows = patches.flows or positions.flows
        # float32 position vectors lift the sum
        x = tape.new(images * length, width, max(patches.item, positions.item), flows)
    if is_clip:
        x = tape.layer_norm("pre_layrnorm", x)
    return _tower_layers(tape, config, x, length, masked=False), length


def vision_tower(tape: Tape, config: Config, rows: Rows) -> Value:
    """-> one vector per image."""
    images, width = rows.count, config["hidden_size"]
    states, length = vision_states(tape, config, images)
    if config["model_type"].startswith("clip"):
        pooled = tape.new(images, width, states[-1].item, states[-1].flows)
        return tape.layer_norm("post_layernorm", pooled)
    x = tape.layer_norm("post_layernorm", states[-1])
    if not config.get("vision_use_head", True):
        return tape.new(images, width, x.item, x.flows)
    return attention_head(tape, config, x, images)


def attention_head(tape: Tape, config: Config, x: Value, images: float) -> Value:
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
        inner, act = config["intermediate_size"], config["hidden_act"]
        return tape.add(pooled, feed_forward(tape, normed, _MLP, inner, act, width))


def text_tower(tape: Tape, config: Config, rows: Rows) -> Value:
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


def internvl_tower(tape: Tape, config: Config, images: float) -> Value:
    """-> the states of the last layer, those of the class token included. Both branches of a layer have a scale."""
    width, drop, length = config["hidden_size"], config["hidden_dropout_prob"], num_patches(config) + 1
    norm = tape.rms_norm if config["norm_type"] == "rms_norm" else tape.layer_norm
    with tape.module("embeddings"):
        first = [tape.parameter("cls_token", width)]
        if config["use_mask_token"]:
            tape.parameter("mask_token", width)
        if config["use_absolute_position_embeddings"]:
            first.append(tape.parameter("position_embeddings", length * width))
        patches = tape.linear("patch_embeddings.projection", _pixels(tape, config, images), width)
        flows = patches.flows or any(one.trains for one in first)
        x = tape.new(images * length, width, max(patches.item, *(one.item for one in first)), flows)
        x = tape.dropout(x, drop)
    for i in range(config["num_hidden_layers"]):
        with tape.layer(f"encoder.layer.{i}", x):
            normed = norm("layernorm_before", x)
            with tape.module("attention"):
                bias = config["attention_bias"]
                query, key, value = (tape.linear(f"{name}_proj", normed, width, bias) for name in "qkv")
                if config["use_qk_norm"]:
                    query, key = tape.rms_norm("q_norm", query), tape.rms_norm("k_norm", key)
                heads, drop_scores = config["num_attention_heads"], config["attention_dropout"]
                attended = tape.attention(query, key, value, heads, length, drop_scores, masked=False)
                attended = tape.dropout(tape.linear("projection_layer", attended, width), config["projection_dropout"])
            x = tape.add(tape.scaled("lambda_1", attended), x)
            normed, inner = norm("layernorm_after", x), config["intermediate_size"]
            outer = feed_forward(tape, normed, _MLP, inner, config["hidden_act"], width)
            x = tape.add(tape.scaled("lambda_2", tape.dropout(outer, drop)), x)
    return x if config["use_mean_pooling"] else tape.layer_norm("layernorm", x)


def qwen_tower(tape: Tape, config: Config, patches: float, length: float) -> tuple[Value, list[Value]]:
    """Patches of pictures with `length` each -> tokens of the language model, and those of the layers in between."""
    generation = config["model_type"].removesuffix("_vl_vision")  # qwen2, qwen2_5, qwen3
    width = config["embed_dim"] if generation == "qwen2" else config["hidden_size"]
    norm = tape.rms_norm if generation == "qwen2_5" else tape.layer_norm
    size = config["patch_size"] ** 2 * config["temporal_patch_size"]
    pixels = tape.new(patches, config["in_channels"] * size, 4, False)
    x = tape.linear("patch_embed.proj", pixels, width, bias=generation == "qwen3")
    if generation == "qwen3":  # each patch mixes the four learned positions around it
        corners = tape.embedding("pos_embed", 4 * patches, config["num_position_embeddings"], width)
        x = tape.new(x.rows, width, x.item, x.flows or corners.flows)
    between = []
    for i in range(config["depth"]):
        is_whole = i in config.get("fullatt_block_indexes", (i,))
        window = min(length, (config.get("window_size", 0) // config["patch_size"]) ** 2)
        with tape.layer(f"blocks.{i}", x):
            together = tape.linear("attn.qkv", norm("norm1", x), 3 * width)
            query, key, value = (tape.part(together, width) for _ in range(3))
            query, key = rotated(tape, query), rotated(tape, key)
            seen = length if is_whole else window
            attended = tape.attention(query, key, value, config["num_heads"], seen, masked=False)
            attended = tape.new(attended.rows, width, attended.item, attended.flows)  # pictures, put together again
            x = tape.add(x, tape.linear("attn.proj", attended, width))
            x = tape.add(x, _qwen_feed_forward(tape, config, generation, norm("norm2", x)))
        if i in config.get("deepstack_visual_indexes", ()):
            with tape.module(f"deepstack_merger_list.{len(between)}"):
                between.append(_merged(tape, config, generation, x, norms_squares=True))
    with tape.module("merger"):
        return _merged(tape, config, generation, x), between


def _qwen_feed_forward(tape: Tape, config: Config, generation: str, x: Value) -> Value:
    with tape.module("mlp"):
        if generation == "qwen2_5":
            return gated_layers(tape, {**config, "mlp_bias": True}, x, config["intermediate_size"])
        names, width, inner = ("linear_fc1", "linear_fc2"), int(x.width), config.get("intermediate_size")
        if generation == "qwen2":
            names, inner = ("fc1", "fc2"), width * config["mlp_ratio"]
        return feed_forward(tape, x, names, inner, config["hidden_act"], width)


def _merged(tape: Tape, config: Config, generation: str, x: Value, norms_squares: bool = False) -> Value:
    square = config["spatial_merge_size"] ** 2
    norm = tape.rms_norm if generation == "qwen2_5" else tape.layer_norm
    name, *layers = ("norm", "linear_fc1", "linear_fc2") if generation == "qwen3" else ("ln_q", "mlp.0", "mlp.2")
    x = norm(name, tape.regrouped(x, square)) if norms_squares else tape.regrouped(norm(name, x), square)
    width = config["hidden_size"] if generation == "qwen2" else config["out_hidden_size"]
    return feed_forward(tape, x, layers, int(x.width), "gelu", width)

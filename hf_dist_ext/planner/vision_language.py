"""Vision-language models as forwards on a `Tape`: a tower and a projector make a vector for every image token.

How many images the tower sees of a picture, and how many tokens they become, is counted where the configuration tells;
else it is one tile, or a picture of PICTURE x PICTURE.
"""

from __future__ import annotations

from hf_dist_ext.planner.tape import Tape, Value
from hf_dist_ext.planner.text_architectures import Config, Rows, decoder
from hf_dist_ext.planner.tower_architectures import (
    attention_head,
    internvl_tower,
    num_patches,
    qwen_tower,
    vision_states,
)

QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
SHUFFLING = ("idefics3", "smolvlm")
TOWERS: dict[str, tuple[str, ...]] = {  # model type -> the towers that it takes
    **dict.fromkeys(["llava", "llava_next", "paligemma", "gemma3"], ("clip_vision_model", "siglip_vision_model")),
    **{kind: (f"{kind}_vision",) for kind in (*SHUFFLING, "internvl", *QWEN)},
}
LANGUAGE = dict.fromkeys(SHUFFLING, "text_model")  # the decoder's name where it is not language_model

PICTURE = 448  # pixels of a side, for models that take any size


def _tiles(config: Config) -> list[tuple[int, int]]:
    """LLaVA-NeXT cuts a picture into tiles of the tower's size: rows and columns, all it may choose."""
    size = config["vision_config"]["image_size"]
    usual = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
    return [(height // size, width // size) for height, width in config.get("image_grid_pinpoints") or usual]


def images_of_picture(config: Config) -> int:
    """How many images the tower sees of one picture, at most."""
    if config["model_type"] == "llava_next":
        return 1 + max(rows * columns for rows, columns in _tiles(config))
    return config.get("tiles_of_picture", 1)


def image_tokens(config: Config) -> int:
    """Tokens that one picture takes in the text, at most."""
    kind, vision = config["model_type"], config["vision_config"]
    if kind == "gemma3":
        return config.get("mm_tokens_per_image") or 256
    if kind in QWEN:
        return _qwen_patches(vision) // vision["spatial_merge_size"] ** 2
    if kind in SHUFFLING:
        return images_of_picture(config) * (num_patches(vision) // config["scale_factor"] ** 2)
    if kind == "internvl":
        return images_of_picture(config) * round(num_patches(vision) * config["downsample_ratio"] ** 2)
    if kind == "llava_next":
        side = round(num_patches(vision) ** 0.5)
        # the whole picture small, then its tiles with the end of each line
        return max(side * side * (1 + rows * columns) + side * rows for rows, columns in _tiles(config))
    keeps_all = config.get("vision_feature_select_strategy") == "full" and vision["model_type"].startswith("clip")
    return num_patches(vision) + keeps_all


def _qwen_patches(vision: Config) -> int:
    merged = vision["patch_size"] * vision["spatial_merge_size"]
    return (max(1, PICTURE // merged) * vision["spatial_merge_size"]) ** 2


def assumption(config: Config) -> str:
    """What a plan must say about the size of pictures; "" where the configuration settles it."""
    kind = config["model_type"]
    if kind in QWEN:
        return f"pictures may have any size: counted as {PICTURE} x {PICTURE}, {image_tokens(config)} tokens."
    if (tiles := config.get("tiles_of_picture", 1)) > 1:
        return f"pictures are counted with the processor's most tiles, {tiles}: {image_tokens(config)} tokens."
    if kind in (*SHUFFLING, "internvl") and "tiles_of_picture" not in config:
        return f"a processor may cut pictures into tiles: counted as one tile, {image_tokens(config)} tokens."
    if kind == "llava_next":
        return f"pictures are counted with the most tiles, {images_of_picture(config)}: {image_tokens(config)} tokens."
    return ""


def _image_features(tape: Tape, config: Config, pictures: float) -> tuple[Value, list[Value]]:
    """-> one vector per image token, and for Qwen3-VL those of the layers in between."""
    kind, vision, text = config["model_type"], config["vision_config"], config["text_config"]
    images = pictures * images_of_picture(config)
    if kind in QWEN:
        with tape.module("visual"):
            length = _qwen_patches(vision)
            return qwen_tower(tape, vision, images * length, length)
    if kind in SHUFFLING:
        with tape.module("vision_model"):
            x = tape.layer_norm("post_layernorm", vision_states(tape, vision, images)[0][-1])
        x = _shuffled(tape, x, pictures * image_tokens(config), config["scale_factor"] ** 2)
        return tape.linear("connector.modality_projection.proj", x, text["hidden_size"], bias=False), []
    with tape.module("vision_tower"):
        x = internvl_tower(tape, vision, images) if kind == "internvl" else _chosen_layer(tape, config, images)
    with tape.module("multi_modal_projector"):
        return _projected(tape, config, x, images, pictures), []


def _shuffled(tape: Tape, x: Value, count: float, square: int) -> Value:
    """Neighbouring patches side by side in one vector: a copy."""
    return tape.new(count, x.width * square, x.item, x.flows)


def _chosen_layer(tape: Tape, config: Config, images: float) -> Value:
    vision = config["vision_config"]
    states, _ = vision_states(tape, vision, images)
    layer = config.get("vision_feature_layer", -1)
    layer = layer if isinstance(layer, int) else layer[-1]
    x = states[layer]
    for unused in tape.layers[len(states[: layer if layer >= 0 else len(states) + layer]) :]:
        unused.saved = unused.casts = 0.0  # layers after the chosen one run, and are forgotten
    is_siglip = vision["model_type"].startswith("siglip")
    if is_siglip and layer == -1:
        x = tape.layer_norm("post_layernorm", x)
    else:
        tape.parameter("post_layernorm.weight", vision["hidden_size"])
        tape.parameter("post_layernorm.bias", vision["hidden_size"])
    if is_siglip and vision.get("vision_use_head", True):
        attention_head(tape, vision, tape.new(0, vision["hidden_size"], 4, False), 0)  # there, but never called
    return x


def _projected(tape: Tape, config: Config, x: Value, images: float, pictures: float) -> Value:
    kind, width = config["model_type"], config["vision_config"]["hidden_size"]
    out = config["text_config"]["hidden_size"]
    if kind == "internvl":
        square = round(1 / config["downsample_ratio"]) ** 2
        x = tape.layer_norm("layer_norm", _shuffled(tape, x, pictures * image_tokens(config), square))
    else:
        count = num_patches(config["vision_config"]) if kind == "llava_next" else image_tokens(config)
        x = tape.new(images * count, width, x.item, x.flows)
    if kind == "paligemma":
        return tape.linear("linear", x, out)
    if kind == "gemma3":
        x = tape.rms_norm("mm_soft_emb_norm", x, adds_one=True)
        weight = tape.parameter("mm_input_projection_weight", width * out, width)
        return tape.product(f"{tape.prefix}mm_input_projection_weight", weight, x, out)
    bias = config.get("multimodal_projector_bias", True)
    inner = tape.activation(tape.linear("linear_1", x, out, bias), config.get("projector_hidden_act", "gelu"))
    x = tape.linear("linear_2", inner, out, bias)
    if kind == "llava_next":  # packed with the ends of lines
        x = tape.new(pictures * image_tokens(config), x.width, x.item, x.flows)
    return x


def vision_language(tape: Tape, config: Config, rows: Rows) -> Value:
    # without images the parameters are there all the same
    features, between = _image_features(tape, config, rows.count * rows.images)
    if config["model_type"] == "llava_next":
        newline = tape.parameter("image_newline", config["text_config"]["hidden_size"])
        features = tape.new(features.rows, features.width, features.item, features.flows or newline.trains)
    images = (features, between) if rows.images else ()
    with tape.module(LANGUAGE.get(config["model_type"], "language_model")):
        return decoder(tape, config["text_config"], rows, *images)

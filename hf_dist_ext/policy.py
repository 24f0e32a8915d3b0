"""Numbers that a run uses and the planner must foretell, each once. Imports nothing, so both sides may read it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MOST_WIDENING = 8
KEPT_WHOLE_SHARE = 0.25  # of a device's memory, that weights or gradients may take whole where they could be sharded
LOSS_TILE_BYTES = 512 * 2**20  # of all buffers of a tile of scores together
LOSS_TILE_BUFFERS = 4  # logits, mask of known false negatives, two while false negatives are looked for
WHOLE_LOSS_BUFFERS = 6  # of a loss that compares all pairs at once: scores as compared and as scaled, their gradients
LOSS_TILE_ROWS = 1024  # enough rows to keep a device busy; more only take memory
EMBEDDING_COPIES = 4  # of a column's embeddings while the loss is computed: passed, leaf, gradient, normalised
TOKENS = "tokens"  # the pooling that leaves a vector of every token
# Whose text model gives the vector of its last position, and so reads texts of one width: all its positions.
FIXED_WIDTH = frozenset({"siglip", "siglip_text_model", "siglip2", "siglip2_text_model"})
LATE_TILE = (16, 32)  # queries and documents whose tokens meet at once in late interaction
FSDP_FIELDS = ("sharding", "sharding_group_size", "cpu_offload", "min_num_params", "reduce_dtype")
DDP_FIELDS = ("ddp_comm_hook", "ddp_gradient_as_bucket_view", "ddp_static_graph")  # read where DDP runs alone
SENT_SHARE = 0.01  # of a gradient's elements, by DDP's hooks top_k and random_k


def keeps_precision_of_files(dtype: str | None, has_files: bool, has_frozen_part: bool, has_autocast: bool) -> bool:
    """Whether weights are loaded as their files hold them (mostly in bfloat16): a float32 copy of what is frozen, by
    freezing fields or below adapters, would double what it takes. What trains is made float32 afterwards. Without
    autocast the precision of the weights is that of the computation, so that they are float32."""
    return dtype is None and has_files and has_frozen_part and has_autocast


def widening(num_layers: int | None, is_checkpointed: bool) -> int:
    """How many times larger the chunks without a graph may be: they hold two layers' activations, those with a graph
    all layers'. With activation checkpointing a chunk with a graph holds one layer's and little of the others."""
    return 1 if is_checkpointed else min(MOST_WIDENING, max(1, (num_layers or 1) // 2))


def loss_tile_rows(candidates: int, most: int = LOSS_TILE_ROWS, item: int = 4) -> int:
    """Rows that InfoNCE scores at once against all candidates: `most`, or as many as fit the bytes of a tile."""
    return max(1, min(most, LOSS_TILE_BYTES // (LOSS_TILE_BUFFERS * item * max(candidates, 1))))


def loss_stage_bytes(
    own_rows: int,
    all_rows: int,
    anchors: int,
    candidates: int,
    dimensions: int,
    is_tiled: bool = True,
) -> int:
    """What the loss holds beside the model: copies of the embeddings (of all columns:
    own rows, all processes' rows), and a tile of scores of this process's anchors against all candidates. Not tiled:
    all scores of these anchors."""
    tile_rows = min(anchors, loss_tile_rows(candidates)) if is_tiled else anchors
    scores = (LOSS_TILE_BUFFERS if is_tiled else WHOLE_LOSS_BUFFERS) * 4 * tile_rows * candidates
    return EMBEDDING_COPIES * (own_rows + all_rows) * dimensions * 4 + scores


def token_products_bytes(candidates: int, tokens: int) -> int:
    """What late interaction holds beside: for a tile of queries the places of all best matches, for a tile of
    documents products of tokens and where these are best. No tokens: 0."""
    queries, documents = LATE_TILE
    products = 3 * 4 * queries * documents * tokens**2
    return 8 * queries * tokens * candidates + products


# ---- packed chunks: rows end to end, without padding ----

FLASH = ("flash_attention_2", "flash_attention_3", "flash_attention_4")
# Model types whose layers mix tokens in attention alone, and take their positions from the caller. Each is tested.
PACKED_FAMILIES = frozenset(
    "albert bert camembert distilbert electra ernie eurobert gemma gemma3_text granite llama ministral mistral "
    "modernbert nomic_bert olmo2 phi3 qwen2 qwen3 roberta smollm3 starcoder2 xlm-roberta".split()
)
VARLEN_CAPABILITY = 8  # of a CUDA device, the least first number that torch's kernel for rows of many lengths needs
VARLEN_HEAD_WIDTH = 256  # the widest head that it takes; widths are multiples of 8


def why_many_calls(attention: str, capability: int, is_half: bool, read: Callable[[str], Any]) -> str | None:
    """Why attention on an accelerator takes a call for each length of packed rows; None: one call takes all rows.

    Args:
        capability: of a CUDA device, the first number; 0 for others.
        is_half: what attention is given is in half precision.
        read: a value of the model's config by its usual name; None where it has none.
    """
    if attention in FLASH:
        return None
    dropout = max(read(name) or 0.0 for name in ("attention_dropout", "attention_probs_dropout_prob"))
    width = read("head_dim") or read("hidden_size") // read("num_attention_heads")
    kernel = "torch's kernel for rows of many lengths"
    if capability < VARLEN_CAPABILITY:
        return f"{kernel} is for NVIDIA's Ampere and later"
    if not is_half:
        return f'{kernel} computes in half precision ("bf16": true)'
    if dropout:
        return f"{kernel} has no attention dropout, and the model's is {dropout}"
    return f"{kernel} takes no heads of {width} dimensions" if width % 8 or width > VARLEN_HEAD_WIDTH else None


def bytes_in_4_bits(elements: int) -> int:
    """Of a matrix that bitsandbytes stores as NF4 with its scales quantized too: half a byte per number, a byte for
    every 64 of them (their scale), a float32 for every 256 scales, their offset and 16 values."""
    scales = -(-elements // 64)
    return -(-elements // 2) + scales + 4 * -(-scales // 256) + 4 + 4 * 16


# What an optimizer keeps per trained element, in bytes or in copies of the parameter ("x2").
_OPTIMIZERS = {
    "adamw_bnb_8bit": 2.03,  # two bytes and a float32 scale for every 256
    "adamw_8bit": 2.03,
    "adamw_torch_8bit": 2.03,
    "adamw_torch_4bit": 1.06,
    "lion": "x1",
    "lion_8bit": 1.02,
    "lion_32bit": 4,
    "rmsprop": "x1",
    "adagrad": "x1",
    "sgd": 0,
}


def optimizer_bytes(optimizer: str, elements: int, item: int, columns: int = 0) -> float:
    """State of one parameter of so many elements of `item` bytes. Adafactor keeps a row and a column of each matrix,
    whose `columns` are given; AdamW two copies."""
    name = optimizer.removeprefix("paged_")
    if name == "adafactor":
        rows = elements / columns if columns else elements
        return 4 * (rows + columns)
    if name in _OPTIMIZERS and ("8bit" in name or "4bit" in name) and elements < 4096:
        return 8 * elements  # small ones stay in float32
    per_element = _OPTIMIZERS.get(name, "x2")
    if isinstance(per_element, str):
        return int(per_element[1:]) * elements * item
    return per_element * elements


def is_known_optimizer(optimizer: str) -> bool:
    """Whether `optimizer_bytes` knows it; it takes others for AdamW."""
    known = {*_OPTIMIZERS, "adafactor"}
    return optimizer.removeprefix("paged_") in known or optimizer.startswith(
        ("adamw_torch", "adamw_apex", "paged_adamw")
    )


# ---- pipelines: P ranks, V stages per rank, M chunks; schedules by the names of pipeline_schedule ----

PIPELINE_SCHEDULE = "1f1b"  # where a run names none
STAGES_PER_RANK = 2  # where a run says nothing and the schedule has several
ONE_STAGE_PER_RANK = ("gpipe", "1f1b")  # the other schedules have any number
MESSAGES_ON_THE_WAY = 2  # of a direction, that have left and are not waited for
REDUCED_TOGETHER = 2**28  # elements of gradients that copies of a pipeline average at once
IN_ROUNDS = ("interleaved_1f1b", "zero_bubble")  # chunks come in rounds of equal length
SPLIT_OPTIMIZERS = frozenset({"adamw_torch", "adamw_torch_fused", "sgd"})  # whose state is split as the parameter is
# Model types of which stage after stage was measured to be the whole model (pipeline/stages.py knows their parts).
IN_STAGES = frozenset({"bert", "llama", "mistral", "modernbert", "qwen2", "qwen3", "roberta", "xlm-roberta"})


def stages_per_rank(schedule: str, asked: int | None) -> int:
    return 1 if schedule in ONE_STAGE_PER_RANK else asked or STAGES_PER_RANK


def stages_of_rank(rank: int, ranks: int, per_rank: int) -> list[int]:
    """Stages lie down the ranks of a pipeline, again and again."""
    return list(range(rank, ranks * per_rank, ranks))


def dealt_chunks(schedule: str, ranks: int, needed: int) -> int:
    """So many chunks a schedule takes: `needed`, or the next number that it can deal out."""
    while schedule in IN_ROUNDS and needed % max(1, needed // ranks):
        needed += 1
    return needed


def layers_of_stages(num_layers: int, num_stages: int) -> list[int]:
    """Layers per stage: the same number for all, and one more for the last ones: the first ranks hold more chunks."""
    each, more = divmod(num_layers, num_stages)
    return [each + (stage >= num_stages - more) for stage in range(num_stages)]


def idle_share(schedule: str, ranks: int, per_rank: int, chunks: int) -> float:
    """Of the time of a step that a rank waits, where a backward takes twice a forward's time, all stages the same, and
    messages none. For `gpipe` and `1f1b` it is (P - 1) / (M + P - 1), the bubble of GPipe
    (https://arxiv.org/abs/1811.06965, 2.3). Forwards alone go before the training schedule."""
    missing = max(0, ranks - chunks)  # a round of fewer chunks than ranks waits for its first one
    first = ranks - 1 + (per_rank - 1) * missing  # of the forwards, in forwards of a stage
    training = 3 * first
    if schedule == "zero_bubble":
        training = ranks - 1 + per_rank * missing + (per_rank - 1) * max(0, ranks - 2 * chunks)
    idle = training + first
    return idle / (idle + 4 * per_rank * chunks)


def live_chunks(schedule: str, ranks: int, per_rank: int, chunks: int, rank: int) -> int:
    """Chunks whose activations a rank holds at once, each on one of its stages. A forward begins to hold them, the
    backward that ends with gradients of weights gives them up.

    `gpipe` holds all, `1f1b` P - rank, `interleaved_1f1b` (V - 1) P + 2 (P - 1 - rank) + 1 of a stage each,
    `zero_bubble` V P; never more than there are, and rounds may be longer than P.
    """
    everything, after = per_rank * chunks, ranks - 1 - rank  # forwards; ranks that follow
    length = chunks // max(1, chunks // ranks) if schedule in IN_ROUNDS else chunks  # of a round
    ahead = {  # forwards before the first chunk is given up; from then on one is for each forward
        "1f1b": after,
        "interleaved_1f1b": (per_rank - 1) * length + 2 * after,
        "zero_bubble": min(everything, (per_rank - 1) * length + after) + rank,
    }.get(schedule, everything)
    return min(everything, ahead + 1)

"""A backbone that reads rows end to end gives what it gives for padded rows."""

import copy

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.utils import is_flash_attn_2_available

from hf_dist_ext import policy
from hf_dist_ext.engine.budget import widened
from hf_dist_ext.engine.gradient_cache import cached_step
from hf_dist_ext.engine.layout import lay_out
from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.engine.packing import RowBounds
from hf_dist_ext.engine.tables import ChunkLimits
from hf_dist_ext.models import packing
from hf_dist_ext.models.embedder import embedder_of
from tests.tiny_models import SMALL, SPECIAL_IDS, embed, embedding_model

DECODER = SMALL | SPECIAL_IDS | {"num_key_value_heads": 1, "head_dim": 16}
WINDOWS = {"sliding_window": 6, "num_hidden_layers": 3}
CONFIGS = {
    **dict.fromkeys(policy.PACKED_FAMILIES, SMALL | SPECIAL_IDS),
    **dict.fromkeys("eurobert gemma granite llama olmo2 phi3 qwen3 smollm3 starcoder2".split(), DECODER),
    **dict.fromkeys(["ministral", "mistral"], DECODER | WINDOWS),
    "gemma3_text": DECODER | WINDOWS | {"use_bidirectional_attention": True, "layer_types": [
        "sliding_attention", "full_attention", "sliding_attention"]},
    "qwen2": DECODER | WINDOWS | {"use_sliding_window": True, "max_window_layers": 1},
    "albert": SMALL | SPECIAL_IDS | {"embedding_size": 32},
    "modernbert": SMALL | SPECIAL_IDS | {
        "num_hidden_layers": 3, "local_attention": 8, "global_attn_every_n_layers": 3, "cls_token_id": 2,
        "sep_token_id": 3,
    },
}  # fmt: skip
SENTINELS = {"bert", "xlm-roberta", "modernbert", "qwen3"}
EVERY = [pytest.param(name, marks=[] if name in SENTINELS else pytest.mark.slow) for name in sorted(CONFIGS)]


def build(name: str, dropout: float = 0.0, pooling: str = "mean", **options) -> SentenceTransformer:
    torch.manual_seed(0)
    model = embedding_model({"model_type": name, **CONFIGS[name]}, pooling=pooling, **options).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = dropout
    return model


def batch_of(
    model: SentenceTransformer, on_left: bool = False, device: str = "cpu"
) -> dict[str, dict[str, torch.Tensor]]:
    """Two columns of 9 rows, two of them as long; a row holds the padding token among others."""
    generator, batch = torch.Generator().manual_seed(1), {}
    padding = model.transformers_model.config.pad_token_id or 0
    for name, width in (("query", 14), ("positive", 30)):
        lengths = [width, *torch.randint(1, width + 1, (6,), generator=generator).tolist(), 6, 6]
        ids = torch.full((len(lengths), width), padding)
        mask = torch.zeros_like(ids)
        for row, length in enumerate(lengths):
            real = slice(width - length, width) if on_left else slice(0, length)
            ids[row, real] = torch.randint(4, 32, (length,), generator=generator)
            mask[row, real] = 1
        ids[8, width - 3 if on_left else 2] = padding
        batch[name] = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
    return batch


def step(model: SentenceTransformer, batch, packs: bool, limits: ChunkLimits = ChunkLimits(4)):  # noqa: B008, frozen
    """(loss, gradients, tokens that went through the backbone's forwards)."""
    model.zero_grad()
    seen, loss = [], InfoNCELoss(0.05)
    handle = model.transformers_model.get_input_embeddings().register_forward_pre_hook(
        lambda _, args: seen.append(args[0].numel())
    )
    can_shift = getattr(model.transformers_model.config, "rope_parameters", None) is not None
    chunked = lay_out(batch, ChunkLimits(limits.max_rows, limits.max_tokens, packs=packs), can_shift=can_shift)
    done = cached_step(chunked, lambda chunk: embed(model, **chunk.features), loss)
    handle.remove()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert gradients.abs().max() > 0, "a comparison of zeros proves nothing"
    return done.loss, gradients, sum(seen)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("on_left", [False, True])
def test_packed_gradients_are_those_of_padded_rows_and_only_real_tokens_are_computed(name, on_left):
    model = build(name, dtype=torch.float64)
    assert embedder_of(model).why_padded is None
    batch = batch_of(model, on_left)
    _, wanted, padded_tokens = step(model, batch, packs=False)
    _, found, tokens = step(model, batch, packs=True)
    # Gemma's code casts to float32 inside.
    assert (found - wanted).norm() <= (1e-8 if "gemma" in name else 1e-10) * wanted.norm()
    real = sum(int(features["attention_mask"].sum()) for features in batch.values())
    assert tokens == 2 * real < padded_tokens, "two forwards of every real token"


DECODERS = "gemma gemma3_text granite llama ministral mistral olmo2 phi3 qwen2 qwen3 smollm3 starcoder2".split()


@pytest.mark.parametrize(
    "name", [n if n in ("qwen2", "mistral") else pytest.param(n, marks=pytest.mark.slow) for n in DECODERS]
)
def test_a_decoder_whose_config_says_not_causal_sees_both_ways_padded_and_packed(name, monkeypatch):
    if name == "gemma3_text":
        monkeypatch.setitem(CONFIGS, name, {**CONFIGS[name], "use_bidirectional_attention": False})
    model = build(name, dtype=torch.float64)
    batch = batch_of(model)
    causal, _, _ = step(model, batch, packs=False)
    model.transformers_model.config.is_causal = False
    loss, wanted, _ = step(model, batch, packs=False)
    assert abs(loss - causal) > 1e-4
    packed, found, _ = step(model, batch, packs=True)
    tolerance = 1e-8 if "gemma" in name else 1e-10
    assert abs(packed - loss) <= tolerance * abs(loss)
    assert (found - wanted).norm() <= tolerance * wanted.norm()


@pytest.mark.parametrize("name", [
    "bert", "qwen3", "xlm-roberta", *(pytest.param(name, marks=pytest.mark.slow) for name in ("roberta", "camembert"))
])  # fmt: skip
def test_positions_that_a_batch_has_itself_are_kept(name):
    model = build(name, dtype=torch.float64)
    batch = batch_of(model)
    for features in batch.values():
        features["position_ids"] = features["attention_mask"].flip(1).cumsum(1).flip(1) + 3
    _, wanted, _ = step(model, batch, packs=False)
    _, found, _ = step(model, batch, packs=True)
    assert (found - wanted).norm() <= 1e-10 * wanted.norm()


ROPES = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0},
    "longrope": {
        "rope_type": "longrope", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 20,
        "short_factor": [1.0] * 8, "long_factor": [3.0] * 8,
    },
}  # fmt: skip


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("rope", ROPES)
def test_rotary_tables_that_follow_the_longest_row_are_those_of_the_batch(rope, packs):
    """Queries are within the model's first positions, documents are beyond: they keep their width, in chunks of either
    pass."""
    config = DECODER | {"model_type": "llama", "max_position_embeddings": 20, "rope_parameters": ROPES[rope]}
    torch.manual_seed(0)
    model = embedding_model(config, dtype=torch.float64)
    batch, loss = batch_of(model), InfoNCELoss(0.05)
    loss({name: embed(model, **features) for name, features in batch.items()})[0].backward()
    wanted = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert wanted.abs().max() > 0, "a comparison of zeros proves nothing"
    model.zero_grad()
    chunked = lay_out(batch, ChunkLimits(2, packs=packs), can_shift=True, model_config=model.transformers_model.config)
    done = cached_step(chunked, lambda c: embed(model, **c.features), loss, wide=widened(chunked, 3))
    found = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert (found - wanted).norm() <= 1e-10 * wanted.norm() and done.replay_error.largest < 1e-12
    widths = {name: {c.width for c in chunked.chunks() if name in c.columns} for name in batch}
    assert len(widths["query"]) > 1 and widths["positive"] == {30}


READ_PADDING = {
    "convbert": {"embedding_size": 32, "head_ratio": 1, "conv_kernel_size": 5},
    "fnet": {},
    "nystromformer": {"segment_means_seq_len": 8, "num_landmarks": 8, "conv_kernel_size": 3},
    "yoso": {"num_hash": 4, "hash_code_len": 3},
}


@pytest.mark.parametrize("name", READ_PADDING)
def test_rows_of_models_that_read_their_padding_keep_it(name):
    """The gradient is that of the batch as the collator padded it, of sorted chunks too."""
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = {"model_type": name, **SMALL, **SPECIAL_IDS, **no_dropout, **READ_PADDING[name]}
    torch.manual_seed(0)
    model = embedding_model(config, dtype=torch.float64)
    batch, loss = batch_of(model), InfoNCELoss(0.05)
    loss({column: embed(model, **features) for column, features in batch.items()})[0].backward()
    wanted = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert wanted.abs().max() > 0, "a comparison of zeros proves nothing"
    model.zero_grad()
    chunked = lay_out(batch, ChunkLimits(2), model_config=model.transformers_model.config)
    cached_step(chunked, lambda c: embed(model, **c.features), loss, wide=widened(chunked, 3))
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert (found - wanted).norm() <= (1e-6 if name == "fnet" else 1e-10) * wanted.norm()


@pytest.mark.parametrize("pooling", ["cls", "last", "tokens"])
def test_every_pooling_finds_its_tokens_in_packed_rows(pooling):
    model = build("qwen3", pooling=pooling, projection_dim=8, dtype=torch.float64)
    batch = batch_of(model)
    packed = lay_out(batch, ChunkLimits(5, packs=True), sort=False)
    outputs = [embed(model, **chunk.features) for chunk in packed.chunks()]
    if pooling == "tokens":
        outputs = [row[mask] for one in outputs for row, mask in zip(one["vectors"], one["mask"], strict=True)]
        wanted = [embed(model, **features) for features in batch.values()]
        wanted = [row[mask] for one in wanted for row, mask in zip(one["vectors"], one["mask"], strict=True)]
    else:
        wanted = [embed(model, **features) for features in batch.values()]
    torch.testing.assert_close(torch.cat(outputs), torch.cat(wanted), rtol=1e-10, atol=1e-12)


def test_a_packed_chunk_runs_on_tensors_without_values():
    """So nothing is read back from a device between a batch whose lengths are known and its gradients."""
    batch = {}
    for name, width in (("query", 14), ("positive", 30)):
        lengths = np.array([width, 3, 8, 8, 1, 5])
        known = {"lengths": lengths, "width": width, "pads_left": False, "fill": {"input_ids": 0}}
        batch[name] = {"input_ids": torch.arange(lengths.sum()) % 28 + 4, "flat": known}
        batch[name]["offsets"] = torch.tensor([0, *lengths.cumsum()])
    with FakeTensorMode() as mode:
        model = build("xlm-roberta")
        for features in batch.values():
            features |= {key: mode.from_tensor(features[key]) for key in ("input_ids", "offsets")}
        chunks = lay_out(batch, ChunkLimits(4, packs=True)).chunks()
        for chunk in chunks:
            embed(model, **chunk.features).sum().backward()
        assert len(chunks) == 3 and all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_dropout_is_replayed_bit_for_bit_in_packed_chunks(is_checkpointed):
    model = build("modernbert", attn_implementation="sdpa")
    model.transformers_model.config.attention_dropout = 0.3
    for layer in model.transformers_model.layers:
        layer.attn.attention_dropout = layer.attn.out_drop.p = 0.3
    if is_checkpointed:
        model.transformers_model.activation_checkpointing_enable()
    chunked = lay_out(batch_of(model), ChunkLimits(4, packs=True))
    passes: dict[bool, dict[int, torch.Tensor]] = {False: {}, True: {}}

    def encode(chunk):
        embeddings = embed(model, **chunk.features)
        passes[embeddings.requires_grad][chunk.start] = embeddings.detach().clone()
        return embeddings

    again = cached_step(chunked, encode, InfoNCELoss(0.05))
    assert again.drew_randomness and passes[False].keys() == passes[True].keys()
    for start, first in passes[False].items():
        assert torch.equal(first, passes[True][start])
    other = embed(model, **chunked.chunks()[0].features)
    assert not torch.equal(other, passes[True][0]), "no dropout"


def test_checkpointed_layers_give_the_gradients_of_others():
    """Layers run again in the backward, when the forward that told them of rows is long over."""
    plain = build("bert", dtype=torch.float64)
    checkpointed = copy.deepcopy(plain)
    checkpointed.transformers_model.activation_checkpointing_enable()
    _, wanted, tokens = step(plain, batch_of(plain), packs=True)
    _, found, _ = step(checkpointed, batch_of(plain), packs=True)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_padded_rows_and_the_config_are_as_before_once_rows_were_packed():
    model = build("bert").eval()
    features = batch_of(model)["positive"]
    config, before = model.transformers_model.config.to_dict(), embed(model, **features)
    step(model, batch_of(model), packs=True)
    assert torch.equal(embed(model, **features), before) and model.transformers_model.config.to_dict() == config
    assert model.transformers_model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("config, words", [
    ({"model_type": "deberta-v2", **SMALL, "type_vocab_size": 0}, 'model type "deberta-v2"'),
    ({"model_type": "bert", **SMALL, "attn_implementation": "eager"}, 'attn_implementation="eager"'),
])  # fmt: skip
def test_a_backbone_that_can_not_says_why(config, words):
    implementation = config.pop("attn_implementation", None)
    assert words in embedder_of(embedding_model(config, attn_implementation=implementation)).why_padded


@pytest.mark.parametrize("change, kernel", [
    ({}, "varlen"),
    ({"dtype": torch.float16}, "varlen"),
    ({"queries": torch.float32, "autocast": torch.bfloat16}, "varlen"),  # after a rotary embedding
    ({"dtype": torch.float32, "autocast": torch.bfloat16}, "varlen"),
    ({"dtype": torch.float32}, "runs"),
    ({"dtype": torch.float64, "autocast": torch.bfloat16}, "runs"),
    ({"dropout": 0.1}, "runs"),
    ({"width": 12}, "runs"),
    ({"width": 264}, "runs"),
    ({"capability": (7, 5), "dtype": torch.float16}, "runs"),
])  # fmt: skip
def test_on_cuda_one_kernel_takes_rows_of_all_lengths_where_it_can(change, kernel, monkeypatch):
    """Tensors without values, which may be a CUDA device's where there is none."""
    given = {"dtype": torch.bfloat16, "dropout": 0.0, "width": 16, "capability": (8, 0), "autocast": None} | change
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: given["capability"])
    calls, wanted = [], given["autocast"] if given["dtype"] != torch.float64 else None

    def called(name, of_torch):
        def attend(query, key, value, *sizes, **options):
            calls.append((name, {one.dtype for one in (query, key, value)}))
            return of_torch(query, key, value, *sizes, **options)

        return attend

    monkeypatch.setattr(packing, "varlen_attn", called("varlen", packing.varlen_attn))
    monkeypatch.setattr(packing, "scaled_dot_product_attention", called("runs", packing.scaled_dot_product_attention))
    module = torch.nn.Module()
    module.is_causal, lengths = True, [9, 9, 4, 1]
    if given["autocast"]:
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda")
        monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind: given["autocast"])
    with FakeTensorMode():
        queries, values = (torch.empty(1, heads, 23, given["width"], device="cuda:0") for heads in (4, 2))
        queries, keys = queries.to(given.get("queries", given["dtype"])), values.to(given["dtype"])
        offsets = torch.empty(5, dtype=torch.int32, device="cuda:0")
        found, _ = packing._attend_with_sdpa(
            None, module, queries, keys, keys, RowBounds(lengths, offsets), dropout=given["dropout"], scaling=0.3
        )
    assert found.shape == (1, 23, 4, given["width"]) and found.device.type == "cuda"
    assert calls == [(kernel, {wanted or given["dtype"]})] * (1 if kernel == "varlen" else 3)


@pytest.mark.parametrize("key_heads, is_told, is_causal, size, options", [
    (2, True, True, 3, {"window_size": (2, 0), "enable_gqa": True}),
    (2, False, True, 3, {"window_size": (2, 0)}),  # torch 2.11, which has no such argument
    (4, True, True, None, {"window_size": (-1, 0)}),
    (4, True, False, None, {"window_size": (-1, -1)}),
    (4, True, False, 3, {"window_size": (2, 2)}),
])  # fmt: skip
def test_the_kernel_is_told_of_groups_of_heads_and_how_far_a_token_sees(
    key_heads, is_told, is_causal, size, options, monkeypatch
):
    monkeypatch.setattr(packing, "VARLEN_IS_TOLD_OF_GROUPS", is_told)
    monkeypatch.setattr(packing, "_takes_all_lengths", lambda query: True)
    seen, module = [], torch.nn.Module()
    module.is_causal = is_causal
    monkeypatch.setattr(packing, "varlen_attn", lambda query, *sizes, **given: seen.append(given) or query)
    query, key = torch.empty(1, 4, 7, 8), torch.empty(1, key_heads, 7, 8)
    rows = RowBounds([4, 3], torch.tensor([0, 4, 7]))
    packing._attend_with_sdpa(None, module, query, key, key, rows, sliding_window=size)
    assert seen == [{"scale": None} | options]


ON_GPU = [
    pytest.param("sdpa", torch.bfloat16),
    pytest.param("sdpa", torch.float64),
    pytest.param("flash_attention_2", torch.bfloat16, marks=pytest.mark.skipif(
        not is_flash_attn_2_available(), reason="needs FlashAttention")),
]  # fmt: skip


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("implementation, dtype", ON_GPU)
@pytest.mark.parametrize("name", sorted(SENTINELS))
def test_on_cuda_packed_gradients_are_those_of_padded_rows(name, implementation, dtype):
    exact = build(name, dtype=torch.float64)
    batch = batch_of(exact)
    _, wanted, _ = step(exact, batch, packs=False)
    model = build(name, dtype=dtype, attn_implementation=implementation).cuda()
    model.load_state_dict(exact.state_dict())
    _, found, tokens = step(model, batch_of(model, device="cuda"), packs=True)
    error = ((found.cpu().double() - wanted).norm() / wanted.norm()).item()
    assert error <= (1e-7 if dtype == torch.float64 else 5e-2), "a bf16 rounding, as of padded rows"
    assert tokens == 2 * sum(int(features["attention_mask"].sum()) for features in batch.values())


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_the_host_never_waits_for_a_packed_chunk():
    model = build("qwen3", dtype=torch.bfloat16).cuda()
    chunk = lay_out(batch_of(model, device="cuda"), ChunkLimits(8, packs=True)).chunks()[0]
    embed(model, **chunk.features)  # kernels are loaded
    torch.cuda.set_sync_debug_mode("error")
    try:
        embed(model, **chunk.features).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")

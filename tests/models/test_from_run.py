"""What a run file names becomes a model of sentence-transformers: the one that its folder says, or one that embeds as
five plain lines do."""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from sentence_transformers import MultiVectorEncoder, SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sentence_transformer.modules import Pooling, StaticEmbedding
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModel, BertModel, CLIPModel

from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.backbones import build_backbone, parse_config
from hf_dist_ext.models.from_run import build, describe
from hf_dist_ext.strategies import choose
from hf_dist_ext.strategies.pipeline import stages
from hf_dist_ext.training.arguments import DistTrainingArguments
from tests.distributed.forked import launch
from tests.sentence_models import bert, picture_model, routed_model, static_model, text_model
from tests.tiny_models import OWN_CODE, SMALL, embed, model_config, needs_tensor_parallelism, tiny_tokenizer

TEXTS = ["read the file into list of lines by key", "parse a date from text", "sort"]
STATIC = {"model_type": "static_embedding", "vocab_size": 32, "hidden_size": 16}
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def drawn(kind, *arguments, **options):
    torch.manual_seed(0)
    return kind(*arguments, **options)


def vectors_of(model: nn.Module, padding_side: str = "right") -> torch.Tensor:
    found = embed(model, **tiny_tokenizer(padding_side)(TEXTS, padding=True, return_tensors="pt"))
    return found["vectors"][found["mask"]] if isinstance(found, dict) else found


def rows_of(model: SentenceTransformer) -> torch.Tensor:
    """What sentence-transformers makes of TEXTS."""
    return torch.cat([torch.as_tensor(row).view(-1, row.shape[-1]) for row in model.encode(TEXTS)])


# ---- random weights ----

POOLED = {
    "mean": lambda row: row.mean(0),
    "cls": lambda row: row[0],
    "last": lambda row: row[-1],
    "tokens": lambda r: r,
}


@pytest.mark.parametrize(
    ("model_type", "padding_side", "options"),
    [
        ("bert", "right", {}),
        ("bert", "left", {"pooling": "cls", "projection_dim": 8, "projection_bias": True}),
        ("xlm-roberta", "right", {"projection_dim": 8, "normalize": False}),
        ("qwen3", "left", {"pooling": "last", "projection_dim": 8}),
        ("bert", "right", {"pooling": "tokens", "projection_dim": 8}),
        ("qwen3", "left", {"pooling": "tokens"}),
    ],
)  # fmt: skip
def test_a_configuration_embeds_as_plain_lines_do(model_type, padding_side, options):
    tokenizer, pooling = tiny_tokenizer(padding_side), options.get("pooling", "mean")
    model = drawn(build, model_config=model_config(model_type), tokenizer=tokenizer, **options).double().eval()
    assert isinstance(model, MultiVectorEncoder if pooling == "tokens" else SentenceTransformer)
    assert model[0].processor.padding_side == padding_side

    given = tokenizer(TEXTS, padding=True, return_tensors="pt")
    expected = []
    for states, mask in zip(model[0].model(**given).last_hidden_state, given["attention_mask"].bool(), strict=True):
        row = POOLED[pooling](states[mask])
        row = model.projection.linear(row) if "projection_dim" in options else row
        row = row if options.get("normalize") is False else row / row.norm(dim=-1, keepdim=True)
        expected.append(row.view(-1, row.shape[-1]))
    torch.testing.assert_close(vectors_of(model, padding_side), torch.cat(expected), rtol=1e-12, atol=1e-12)
    assert torch.cat(expected).std(0).max() > 1e-4


@pytest.mark.parametrize("config", [model_config("bert"), STATIC], ids=["bert", "static"])
def test_one_seed_draws_one_model(config):
    models = [drawn(build, model_config=config, projection_dim=4, dtype="bfloat16").state_dict() for _ in range(2)]
    assert all(
        value.dtype == torch.bfloat16 and torch.equal(value, models[1][key]) for key, value in models[0].items()
    )
    if config != STATIC:
        backbone = drawn(build_backbone, parse_config(config), "bfloat16").state_dict()
        assert all(torch.equal(value, models[0][f"backbone.model.{key}"]) for key, value in backbone.items())


def test_pictures_and_words_have_one_transformer(tmp_path):
    given = picture_model(tmp_path)
    model = drawn(build, model_config=given.transformers_model.config, tokenizer=given.processor)
    assert [*model._modules] == ["backbone", "normalize"] and type(model[0].model) is CLIPModel
    assert model[0].modalities == ["text", "image"]
    expected = drawn(CLIPModel, given.transformers_model.config)
    assert all(map(torch.equal, model[0].model.state_dict().values(), expected.state_dict().values()))


@pytest.mark.parametrize("context", [lambda: torch.device("meta"), FakeTensorMode], ids=["meta", "fake"])
@pytest.mark.parametrize("config", [model_config("bert"), STATIC], ids=["bert", "static"])
def test_a_model_without_bytes_has_the_names_and_shapes_of_one_with(config, context):
    with context():
        empty = build(model_config=config, pooling="mean" if config != STATIC else None, projection_dim=8)
    whole = build(model_config=config, tokenizer=tiny_tokenizer(), projection_dim=8)
    shapes = [{name: tuple(p.shape) for name, p in model.named_parameters()} for model in (empty, whole)]
    assert shapes[0] == shapes[1]
    assert all(p.device.type == "meta" or hasattr(p, "fake_mode") for p in empty.parameters())


# ---- folders ----


def written(folder: Path, *following: nn.Module, kind: type = SentenceTransformer, **options) -> SentenceTransformer:
    """A model of sentence-transformers, and its folder."""
    first = bert(folder / "first", **options)
    model = kind(
        modules=[first, *(following or (Pooling(32, "mean"), Dense(32, 8, bias=False), Normalize()))], device="cpu"
    )
    model.save_pretrained(str(folder / "model"))
    return model


CHAINS = {
    "several Dense modules": lambda: [
        Pooling(32, "cls"),
        Dense(32, 12, activation_function=nn.Tanh(), use_residual=True),
        Dense(12, 8, bias=False, activation_function=nn.Identity()),
    ],
    "normalized": lambda: [Pooling(32, "lasttoken"), Normalize()],
    "a mode that no run file names": lambda: [Pooling(32, ("mean", "max"))],
}


@pytest.mark.parametrize("name", [*CHAINS, "token vectors", "static"])
def test_a_folder_is_the_model_that_sentence_transformers_opens(tmp_path, name):
    torch.manual_seed(0)
    if name == "static":
        kind, modules = SentenceTransformer, [StaticEmbedding(tiny_tokenizer(), embedding_dim=16), Dense(16, 8)]
        SentenceTransformer(modules=modules, device="cpu").save_pretrained(str(tmp_path / "model"))
    elif name == "token vectors":
        tokens = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
        kind, modules = MultiVectorEncoder, [Dense(32, 8, **tokens), MultiVectorMask(), Normalize("token_embeddings")]
        written(tmp_path, *modules, kind=kind)
    else:
        kind, modules = SentenceTransformer, CHAINS[name]()
        written(tmp_path, *modules)
    theirs, model = kind(str(tmp_path / "model"), device="cpu"), build(tmp_path / "model")
    assert type(model) is kind and not model.training
    assert not any("pooler" in key for key in model.state_dict())
    expected = rows_of(theirs)
    assert expected.std(0).max() > 1e-3
    torch.testing.assert_close(rows_of(model), expected, **CLOSE)
    if name != "static":  # whose texts get no special tokens
        torch.testing.assert_close(vectors_of(model).detach(), expected, **CLOSE)
    model.save_pretrained(str(tmp_path / "again"))
    again = build(tmp_path / "again")
    assert [*again._modules] == [*model._modules]
    assert all(map(torch.equal, again.state_dict().values(), model.state_dict().values()))
    torch.testing.assert_close(rows_of(kind(str(tmp_path / "again"), device="cpu")), expected, **CLOSE)


def test_what_is_given_wins_over_the_folder(tmp_path):
    theirs = written(tmp_path, Pooling(32, "cls"))
    model = build(
        tmp_path / "model", pooling="mean", projection_dim=8, normalize=True, tokenizer=tiny_tokenizer(max_length=9)
    )
    assert [*model._modules] == ["backbone", "pooling", "projection", "normalize"]
    assert model.similarity_fn_name == "cosine" and model.max_seq_length == 9
    assert (model.pooling.pooling_mode, model.get_embedding_dimension()) == ("mean", 8)
    torch.testing.assert_close(rows_of(model).norm(dim=1), torch.ones(3))
    of_tokens = build(tmp_path / "model", pooling="tokens")
    states = theirs.encode(TEXTS, output_value="token_embeddings")
    assert isinstance(of_tokens, MultiVectorEncoder)
    torch.testing.assert_close(rows_of(of_tokens), torch.cat(states), **CLOSE)


def test_a_plain_folder_means_what_it_means_there(tmp_path):
    bert(tmp_path)
    model = build(str(tmp_path), attn_implementation="eager")
    assert [*model._modules] == ["backbone", "pooling"] and model[0].config._attn_implementation == "eager"
    torch.testing.assert_close(rows_of(model), rows_of(SentenceTransformer(str(tmp_path), device="cpu")), **CLOSE)
    assert {p.dtype for p in build(tmp_path, dtype="bfloat16").parameters()} == {torch.bfloat16}


def test_a_pooler_that_has_to_be_built_is_not_kept(tmp_path):
    drawn(AutoModel.from_config, parse_config(model_config("bert", model_type="layoutlm"))).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    model = build(tmp_path)
    assert not any("pooler" in name for name, _ in model.named_parameters())
    assert vectors_of(model).isfinite().all()


def test_static_vectors_are_kept_in_the_precision_that_is_given(tmp_path):
    static_model().save_pretrained(str(tmp_path))
    assert {p.dtype for p in build(tmp_path, dtype="bfloat16").parameters()} == {torch.bfloat16}


def test_adapters_are_merged_and_all_of_the_model_trains(tmp_path):
    written(tmp_path)
    model = build(tmp_path / "model")
    model.add_adapter(LoraConfig(r=2, target_modules=["query"]))
    for name, factor in model.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(factor)
    model.save_pretrained(str(tmp_path / "adapters"))
    assert not (tmp_path / "adapters" / "model.safetensors").exists()
    merged = build(tmp_path / "adapters")
    assert all(p.requires_grad and ".lora_" not in name for name, p in merged.named_parameters())
    torch.testing.assert_close(vectors_of(merged), vectors_of(model.eval()))


def test_code_of_a_folder_runs_only_where_it_is_trusted(tmp_path):
    (tmp_path / "own.py").write_text(OWN_CODE)
    maps = {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": maps, **SMALL}))
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="cannot be loaded"):
        build(tmp_path)
    with torch.device("meta"):
        model = build(tmp_path, trust_remote_code=True)
    assert type(model[0].model).__name__ == "OwnModel" and not any("pooler" in name for name in model.state_dict())


def test_a_folder_on_the_meta_device_is_not_read(tmp_path):
    written(tmp_path)
    (tmp_path / "model" / "model.safetensors").unlink()
    with torch.device("meta"):
        model = build(tmp_path / "model")
    assert [*model._modules] == ["backbone", "pooling", "projection", "normalize"]
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_models_of_other_modules_load_as_they_are(tmp_path):
    for name, given in {"r": routed_model(tmp_path / "routes"), "p": picture_model(tmp_path / "pictures")}.items():
        given.save_pretrained(str(tmp_path / name))
        opened = build(tmp_path / name)
        first, kept = {"r": "0", "p": "backbone"}[name], given.state_dict()
        assert [*opened._modules] == [first] and len(opened.state_dict()) > 30
        for key, value in opened.state_dict().items():
            assert torch.equal(value, kept.pop(key.replace(first, "0", 1))), key
        assert all("pooler" in key for key in kept)


# ---- spread over processes ----


def test_a_stage_of_a_pipeline_is_read_alone(tmp_path):
    written(tmp_path)
    whole = build(tmp_path / "model")
    for own in ([0], [1]):
        model = build(tmp_path / "model", in_stages=lambda kind, own=own: stages.staged(kind, own, 2, None))
        kinds = type(model), type(model[0]), type(model[0].model)
        assert kinds == (SentenceTransformer, Transformer, BertModel)
        here = {name: p for name, p in model.named_parameters() if p.device.type != "meta"}
        assert any("layer.0" in name for name in here) == (own == [0])
        assert "projection.linear.weight" in here
        assert all(torch.equal(value, whole.get_parameter(name)) for name, value in here.items())
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in whole.named_parameters()]
        stages.StagedModel(model, own, stages.firsts_of(model, 2, None))


@needs_tensor_parallelism
def test_a_model_is_split_over_processes(tmp_path):
    config = model_config("llama", num_key_value_heads=2)
    drawn(build, model_config=config, tokenizer=tiny_tokenizer()).save_pretrained(str(tmp_path))
    sources = {"model_name_or_path": tmp_path}, {"model_config": config, "projection_dim": 8}
    expected = [vectors_of(drawn(build, **given).double().eval()) for given in sources]

    def main() -> None:
        split = choose.launched_split(DistTrainingArguments(tmp_path / "out", use_cpu=True))
        for given, whole in zip(sources, expected, strict=True):
            model = drawn(build, **given, distributed_config=split).eval()
            assert type(model[0].model.layers[0].self_attn.q_proj.weight).__name__ == "DTensor"
            torch.testing.assert_close(vectors_of(model.double()), whole, rtol=1e-6, atol=1e-6)  # norms are float32

    launch("multi_gpu_tp", 2, main)


# ---- what the folder says of the run ----


def test_the_folder_says_what_was_trained(tmp_path):
    model = build(model_config=model_config("bert"), tokenizer=tiny_tokenizer(), projection_dim=8)
    describe(
        model,
        max_length={"query": 6, "positive": 12, "negative": 12},
        prompts={"query": "search : ", "positive": "text : "},
        default_prompt_name="query",
        matryoshka_dims=[8, 4],
    )
    model.save_pretrained(str(tmp_path))
    opened = SentenceTransformer(str(tmp_path), device="cpu")
    assert (opened.max_seq_length, opened[0].query_length, opened[0].document_length) == (12, 6, 12)
    assert opened.prompts == {"query": "search : ", "positive": "text : ", "document": "text : "}
    assert opened.default_prompt_name == "query"
    assert opened.transformers_model.config.matryoshka_dimensions == [8, 4]
    describe(opened, max_length=10)
    assert (opened.max_seq_length, opened[0].query_length, opened[0].document_length) == (10, None, None)


# ---- refused ----


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pooling": "middle"}, 'pooling="middle" does not exist. Choose one of last, tokens, cls'),
        ({"projection_dim": 4}, "has a trained projection to 8 dimensions, not 4"),
        ({"dtype": "int8"}, "no floating-point type"),
        ({"model_config": {}}, "Give model_name_or_path or model_config"),
    ],
)
def test_what_does_not_go_with_a_folder_is_refused(tmp_path, options, words):
    written(tmp_path)
    with pytest.raises(UsageError, match=words):
        build(tmp_path / "model", **options)


def normalized_first(folder: Path) -> SentenceTransformer:
    return SentenceTransformer(modules=[*text_model(folder), Dense(32, 8)], device="cpu")


@pytest.mark.parametrize(
    ("given", "options", "words"),
    [
        (routed_model, {"pooling": "cls"}, "a chain of Router"),
        (normalized_first, {"projection_dim": 8}, "a chain of Transformer, Pooling, Normalize, Dense: pooling"),
        (routed_model, {"in_stages": lambda kind: kind}, "has 2 transformers models, and a pipeline needs one"),
        (picture_model, {"pooling": "cls"}, "gives one vector per row"),
        (lambda folder: static_model(), {"distributed_config": object()}, "has 0 transformers models"),
        (lambda folder: static_model(), {"pooling": "mean"}, "gives one vector per row"),
        (lambda folder: static_model(), {"tokenizer": tiny_tokenizer()}, "a tokenizer of its own does not go with"),
    ],
)
def test_what_does_not_go_with_a_kind_of_model_is_refused(tmp_path, given, options, words):
    given(tmp_path / "parts").save_pretrained(str(tmp_path / "model"))
    with pytest.raises(UsageError, match=words):
        build(tmp_path / "model", **options)


def test_an_incomplete_folder_is_refused(tmp_path):
    backbone, folder = written(tmp_path)[0].model, tmp_path / "model"
    weights = {name: value for name, value in backbone.state_dict().items() if "layer.1" not in name}
    backbone.save_pretrained(folder, state_dict=weights)
    with pytest.raises(UsageError, match="lacks 16 weights of BertModel"):
        build(folder)
    (folder / "modules.json").unlink()
    with pytest.raises(UsageError, match="holds 1_Pooling, 2_Dense, 3_Normalize but no modules.json"):
        build(folder)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(UsageError, match="hf-dist merge"):
        build(folder)

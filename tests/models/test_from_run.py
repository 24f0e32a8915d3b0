"""What a run file names becomes the model of sentence-transformers that `EmbeddingModel` was for the same words: the
same draws, embeddings and gradients, the same parameters by the same names."""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from sentence_transformers import MultiVectorEncoder, SentenceTransformer
from sentence_transformers.base.modules import Dense, Transformer
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModel, BertModel, CLIPModel

from hf_dist_ext.errors import UsageError
from hf_dist_ext.frozen.plan import plan_freezing
from hf_dist_ext.models.backbones import parse_config
from hf_dist_ext.models.embedder import embedder_of
from hf_dist_ext.models.embedding_model import EmbeddingModel
from hf_dist_ext.models.from_run import build, describe
from hf_dist_ext.strategies import choose, stages
from hf_dist_ext.training.arguments import DistTrainingArguments
from tests.distributed.forked import launch
from tests.sentence_models import picture_model, routed_model, static_model, text_model
from tests.tiny_models import OWN_CODE, SMALL, model_config, needs_tensor_parallelism, tiny_tokenizer

TEXTS = ["read the file into list of lines by key", "parse a date from text", "sort"]
STATIC = {"model_type": "static_embedding", "vocab_size": 32, "hidden_size": 16}
EXACT = {"rtol": 1e-12, "atol": 1e-12}
TANH = "torch.nn.modules.activation.Tanh"
CHAIN = [
    {"in_features": 32, "out_features": 12, "bias": True, "activation": TANH, "use_residual": True},
    {"in_features": 12, "out_features": 8},
]


def features(padding_side: str = "right") -> dict[str, torch.Tensor]:
    return dict(tiny_tokenizer(padding_side)(TEXTS, padding=True, return_tensors="pt"))


def drawn(kind, *arguments, **options):
    torch.manual_seed(0)
    return kind(*arguments, **options)


def vectors_of(model: torch.nn.Module, **given: torch.Tensor) -> torch.Tensor:
    found = embedder_of(model).call(model, given)
    return found["vectors"][found["mask"]] if isinstance(found, dict) else found


def assert_same(new: torch.nn.Module, old: EmbeddingModel, padding_side: str = "right") -> None:
    """Embeddings and gradients, in float64."""
    given, gradients, vectors = features(padding_side), [], []
    for model in (new.double().eval(), old.double().eval()):
        made = vectors_of(model, **given)
        weights = torch.linspace(-1, 2, made.numel(), dtype=torch.float64).view_as(made)
        parameters = [p for p in model.parameters() if p.requires_grad]
        gradients.append(torch.autograd.grad((made * weights).sum(), parameters))
        vectors.append(made)
    torch.testing.assert_close(vectors[0], vectors[1], **EXACT)
    assert vectors[0].std(0).max() > 1e-4 and sum(one.abs().sum() for one in gradients[1]) > 0.1
    assert len(gradients[0]) == len(gradients[1])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, **EXACT)


# ---- random weights ----


@pytest.mark.parametrize(
    ("model_type", "padding_side", "options"),
    [
        ("bert", "right", {}),
        ("bert", "left", {"pooling": "cls", "projection_dim": 8, "projection_bias": True}),
        ("xlm-roberta", "right", {"projection_dim": 8, "normalize": False}),
        ("modernbert", "right", {"pooling": "mean"}),
        ("qwen3", "left", {"pooling": "last", "projection_dim": 8}),
        ("bert", "right", {"pooling": "tokens", "projection_dim": 8}),
        ("qwen3", "left", {"pooling": "tokens"}),
    ],
)  # fmt: skip
def test_one_seed_draws_the_weights_that_embedding_model_draws(model_type, padding_side, options):
    new = drawn(build, model_config=model_config(model_type), tokenizer=tiny_tokenizer(padding_side), **options)
    old = drawn(EmbeddingModel.from_config, model_config(model_type), **options)
    assert isinstance(new, MultiVectorEncoder if options.get("pooling") == "tokens" else SentenceTransformer)
    assert new[0].processor.padding_side == padding_side
    assert_same(new, old, padding_side)


@pytest.mark.parametrize("options", [{}, {"projection_dim": 4, "dtype": "bfloat16"}])
def test_a_static_model_is_drawn_alike(options):
    new = drawn(build, model_config=STATIC, tokenizer=tiny_tokenizer(), **options)
    assert_same(new, drawn(EmbeddingModel.from_config, STATIC, **options))


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


def written(folder: Path, name: str, **options) -> EmbeddingModel:
    """A folder, and the model that it was written from."""
    model = drawn(EmbeddingModel.from_config, model_config(name) if name != "static" else STATIC, **options)
    model.save_pretrained(folder, tokenizer=tiny_tokenizer("left" if name == "qwen3" else "right"))
    return model


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("bert", {"dense": CHAIN, "normalize": False}),
        ("xlm-roberta", {"projection_dim": 8, "projection_bias": True}),
        ("modernbert", {"pooling": "cls"}),
        ("qwen3", {"pooling": "last"}),
        ("bert", {"pooling": "tokens", "projection_dim": 8}),
        ("static", {"projection_dim": 8}),
    ],
)
def test_a_folder_is_read_as_embedding_model_reads_it_and_opens_again(tmp_path, name, options):
    old = written(tmp_path, name, **options)
    new = build(tmp_path, dtype="float32")
    assert not any("pooler" in key for key in new.state_dict())
    assert [type(module).__module__.partition(".")[0] for module in new] == ["sentence_transformers"] * len(new)
    assert_same(new, old, "left" if name == "qwen3" else "right")
    new.save_pretrained(str(tmp_path / "again"))
    again = build(tmp_path / "again")
    assert [*again._modules] == [*new._modules] and not again.training
    assert all(map(torch.equal, again.state_dict().values(), new.state_dict().values()))
    opened = type(new)(str(tmp_path / "again"), device="cpu")
    assert all(map(torch.equal, _list(opened.encode(TEXTS)), _list(again.encode(TEXTS))))


def _list(vectors) -> list[torch.Tensor]:
    return [torch.as_tensor(row) for row in vectors]


def test_what_is_given_wins_over_the_folder(tmp_path):
    old = written(tmp_path, "bert", pooling="cls", normalize=False)
    new = drawn(
        build, tmp_path, pooling="mean", projection_dim=8, normalize=True, tokenizer=tiny_tokenizer(max_length=9)
    )
    assert [*new._modules] == ["backbone", "pooling", "projection", "normalize"]
    assert new.similarity_fn_name == "cosine" and new.max_seq_length == 9
    options = {"pooling": "mean", "projection_dim": 8, "normalize": True}
    assert_same(new, drawn(EmbeddingModel.from_backbone, tmp_path, **options))
    assert_same(build(tmp_path, pooling="tokens"), EmbeddingModel.from_pretrained(tmp_path, pooling="tokens"))
    assert_same(build(tmp_path), old)


def test_a_plain_folder_means_what_it_means_there(tmp_path):
    old = drawn(EmbeddingModel.from_config, model_config("bert"), normalize=False)
    old.backbone.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    new = build(str(tmp_path), attn_implementation="eager")
    assert [*new._modules] == ["backbone", "pooling"] and new[0].config._attn_implementation == "eager"
    assert_same(new, old)


def test_a_pooler_that_has_to_be_built_is_not_kept(tmp_path):
    drawn(AutoModel.from_config, parse_config(model_config("bert", model_type="layoutlm"))).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    model = build(tmp_path)
    assert not any("pooler" in name for name, _ in model.named_parameters())
    assert vectors_of(model, **features()).isfinite().all()


def test_static_vectors_are_kept_in_the_precision_that_is_given(tmp_path):
    written(tmp_path, "static")
    assert {p.dtype for p in build(tmp_path, dtype="bfloat16").parameters()} == {torch.bfloat16}


def test_adapters_are_merged_and_all_of_the_model_trains(tmp_path):
    written(tmp_path / "base", "bert", projection_dim=8)
    model = build(tmp_path / "base")
    model.add_adapter(LoraConfig(r=2, target_modules=["query"]))
    for name, factor in model.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(factor)
    model.save_pretrained(str(tmp_path / "adapters"))
    assert not (tmp_path / "adapters" / "model.safetensors").exists()
    merged = build(tmp_path / "adapters")
    assert all(p.requires_grad and ".lora_" not in name for name, p in merged.named_parameters())
    torch.testing.assert_close(vectors_of(merged, **features()), vectors_of(model.eval(), **features()))


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
    written(tmp_path, "bert", projection_dim=8)
    (tmp_path / "model.safetensors").unlink()
    with torch.device("meta"):
        model = build(tmp_path)
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


# ---- names ----


@pytest.mark.parametrize(
    "patterns", [["projection"], ["backbone"], ["encoder.layer.1", "projection"], ["attention.self.query"]]
)
def test_trainable_modules_select_the_same_parameters(tmp_path, patterns):
    old = written(tmp_path, "bert", projection_dim=8)
    counts = []
    for model in (old, build(tmp_path), build(model_config=model_config("bert"), projection_dim=8)):
        plan = plan_freezing(model, patterns)
        counts.append(sum(p.numel() for name, p in model.named_parameters() if name in plan.trainable))
    assert counts[0] == counts[1] == counts[2] > 0


# ---- spread over processes ----


def test_a_stage_of_a_pipeline_is_read_alone(tmp_path):
    old = written(tmp_path, "bert", projection_dim=8)
    for own in ([0], [1]):
        model = build(tmp_path, in_stages=lambda kind, own=own: stages.staged(kind, own, range(2), None))
        assert (
            type(model[0]) is Transformer and type(model[0].model) is BertModel and type(model) is SentenceTransformer
        )
        here = {name: p for name, p in model.named_parameters() if p.device.type != "meta"}
        assert any("layer.0" in name for name in here) == (own == [0])
        assert "projection.linear.weight" in here
        for name, value in here.items():
            assert torch.equal(
                value, old.get_parameter(name.replace("backbone.model", "backbone").replace("linear.", ""))
            )
        assert [name for name, _ in model.named_parameters()] == [
            name for name, _ in build(tmp_path).named_parameters()
        ]
        stages.StagedModel(model, own, stages.firsts_of(model, range(2), None))


@needs_tensor_parallelism
def test_a_folder_is_split_over_processes(tmp_path):
    old = written(tmp_path / "model", "bert", projection_dim=8)
    expected = vectors_of(old.double().eval(), **features())

    def main() -> None:
        split = choose.launched_split(DistTrainingArguments(tmp_path / "out", use_cpu=True))
        for given in ({"model_name_or_path": tmp_path / "model"}, {"model_config": model_config("bert")}):
            model = drawn(build, **given, projection_dim=8, distributed_config=split).eval()
            found = vectors_of(model.double(), **features())
            assert type(model[0].model.encoder.layer[0].attention.self.query.weight).__name__ == "DTensor"
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)

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
    written(tmp_path, "bert", projection_dim=8)
    with pytest.raises(UsageError, match=words):
        build(tmp_path, **options)


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
    old = written(tmp_path, "bert", projection_dim=8)
    weights = {name: value for name, value in old.backbone.state_dict().items() if "layer.1" not in name}
    old.backbone.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(UsageError, match="lacks 16 weights of BertModel"):
        build(tmp_path)
    (tmp_path / "modules.json").unlink()
    with pytest.raises(UsageError, match="holds 1_Pooling, 2_Dense, 3_Normalize but no modules.json"):
        build(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UsageError, match="hf-dist merge"):
        build(tmp_path)

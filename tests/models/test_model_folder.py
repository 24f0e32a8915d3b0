import json
import os
import shutil

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import AutoModel, BertModel

from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.backbones import load_tokenizer
from hf_dist_ext.models.embedding_model import EmbeddingModel
from hf_dist_ext.models.model_folder import read_model_folder, resolve_folder
from tests.tiny_models import model_config, tiny_tokenizer

# Longest first, the order in which sentence-transformers encodes: another order of rows differs in the last bit.
TEXTS = ["read the file into list of lines by key", "parse a date from text", "sort"]
PROMPTS = {"query": "search : ", "positive": "text : "}


def tiny(model_type="bert", **options):
    torch.manual_seed(0)
    return EmbeddingModel.from_config(model_config(model_type), **options).eval()


def embed(model, tokenizer, texts=TEXTS):
    with torch.no_grad():
        return model(**tokenizer(texts, padding=True, truncation=True, return_tensors="pt")).embeddings


def read_json(path):
    return json.loads(path.read_text())


def write_json(path, content):
    path.write_text(json.dumps(content))


# ---- what sentence-transformers makes of our folder ----


@pytest.mark.parametrize(
    ("model_type", "pooling", "projection_dim", "normalize", "padding_side"),
    [
        ("bert", "mean", None, True, "right"),
        ("bert", "mean", 8, True, "right"),
        ("bert", "mean", None, False, "left"),
        ("bert", "cls", 8, False, "right"),
        ("bert", "cls", None, True, "left"),
        ("bert", "last", None, True, "right"),
        ("qwen3", "last", None, True, "left"),
        ("qwen3", "last", 8, True, "right"),
        ("qwen3", "mean", 8, False, "left"),
    ],
)
def test_sentence_transformers_gives_the_same_embeddings(
    tmp_path, model_type, pooling, projection_dim, normalize, padding_side
):
    model = tiny(model_type, pooling=pooling, projection_dim=projection_dim, normalize=normalize)
    tokenizer = tiny_tokenizer(padding_side)
    model.save_pretrained(tmp_path, tokenizer=tokenizer)
    ours = embed(model, tokenizer)
    assert ours.std(dim=0).max() > 0.001

    served = SentenceTransformer(str(tmp_path), device="cpu")
    theirs = served.encode(TEXTS, convert_to_tensor=True)
    assert torch.equal(theirs, ours)
    assert served.get_embedding_dimension() == model.embedding_dim
    reloaded = EmbeddingModel.from_pretrained(tmp_path)
    assert (reloaded.pooling, reloaded.normalize, reloaded.embedding_dim) == (pooling, normalize, ours.shape[1])
    assert torch.equal(embed(reloaded, tokenizer), ours)


@pytest.mark.parametrize("prompts", [{}, PROMPTS], ids=["", "prompts"])
@pytest.mark.parametrize("dims", [None, [8, 4]], ids=["", "matryoshka"])
@pytest.mark.parametrize("projection_dim", [None, 8], ids=["", "dense"])
@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_what_is_trained_is_what_sentence_transformers_serves(tmp_path, pooling, projection_dim, dims, prompts):
    model, tokenizer = tiny(pooling=pooling, projection_dim=projection_dim), tiny_tokenizer()
    model.save_pretrained(tmp_path, tokenizer=tokenizer, prompts=prompts, matryoshka_dims=dims)
    served = SentenceTransformer(str(tmp_path), device="cpu")
    ways = {"": served.encode, "query": served.encode_query, "positive": served.encode_document}
    for column, encode in ways.items():
        ours = embed(model, tokenizer, [prompts.get(column, "") + text for text in TEXTS])
        assert (encode(TEXTS, convert_to_tensor=True) - ours).abs().max() <= 1e-6
        for dim in dims or ():
            short = encode(TEXTS, convert_to_tensor=True, truncate_dim=dim, normalize_embeddings=True)
            cut = torch.nn.functional.normalize(ours[:, :dim], dim=1)
            assert short.shape == cut.shape == (len(TEXTS), dim) and (short - cut).abs().max() <= 1e-6


def test_a_projection_with_bias_is_served_too(tmp_path):
    model, tokenizer = tiny(projection_dim=8, projection_bias=True), tiny_tokenizer()
    assert model.projection.bias.abs().sum() > 0
    model.save_pretrained(tmp_path, tokenizer=tokenizer)
    ours = embed(model, tokenizer)
    assert torch.equal(SentenceTransformer(str(tmp_path), device="cpu").encode(TEXTS, convert_to_tensor=True), ours)
    assert torch.equal(embed(EmbeddingModel.from_pretrained(tmp_path), tokenizer), ours)


def test_prompts_are_applied_to_queries_and_documents(tmp_path):
    model, tokenizer = tiny(prompts=PROMPTS), tiny_tokenizer()
    model.save_pretrained(tmp_path, tokenizer=tokenizer)
    plain = embed(model, tokenizer)
    queries = embed(model, tokenizer, [PROMPTS["query"] + text for text in TEXTS])
    documents = embed(model, tokenizer, [PROMPTS["positive"] + text for text in TEXTS])
    assert not torch.allclose(plain, queries) and not torch.allclose(plain, documents)

    served = SentenceTransformer(str(tmp_path), device="cpu")
    assert torch.equal(served.encode(TEXTS, convert_to_tensor=True), plain)
    assert torch.equal(served.encode(TEXTS, prompt_name="query", convert_to_tensor=True), queries)
    assert torch.equal(served.encode_query(TEXTS, convert_to_tensor=True), queries)
    assert torch.equal(served.encode_document(TEXTS, convert_to_tensor=True), documents)
    assert EmbeddingModel.from_pretrained(tmp_path).prompts.items() >= PROMPTS.items()


@pytest.mark.parametrize("max_length", [5, {"query": 3, "positive": 5}])
def test_texts_are_cut_where_training_cut_the_longest(tmp_path, max_length):
    model, tokenizer = tiny(), tiny_tokenizer()
    model.save_pretrained(tmp_path, tokenizer=tokenizer, max_length=max_length)
    short_tokenizer = tiny_tokenizer(max_length=5)
    expected = embed(model, short_tokenizer)
    assert not torch.allclose(embed(model, tokenizer), expected)
    assert torch.equal(
        SentenceTransformer(str(tmp_path), device="cpu").encode(TEXTS, convert_to_tensor=True), expected
    )
    assert EmbeddingModel.from_pretrained(tmp_path).max_length == 5


# ---- the files ----


def test_the_folder_is_the_layout_that_every_server_reads(tmp_path):
    model = tiny(projection_dim=8, matryoshka_dims=[8, 4])
    model.save_pretrained(tmp_path, tokenizer=tiny_tokenizer(), prompts=PROMPTS)

    names = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert names == {
        *("config.json", "model.safetensors", "modules.json", "sentence_bert_config.json"),
        *("config_sentence_transformers.json", "tokenizer.json", "tokenizer_config.json"),
        *("1_Pooling", "1_Pooling/config.json", "3_Normalize"),
        *("2_Dense", "2_Dense/config.json", "2_Dense/model.safetensors"),
    }
    modules = read_json(tmp_path / "modules.json")
    kinds = ["Transformer", "Pooling", "Dense", "Normalize"]
    assert [module["type"] for module in modules] == [f"sentence_transformers.models.{kind}" for kind in kinds]
    assert [module["path"] for module in modules] == ["", "1_Pooling", "2_Dense", "3_Normalize"]
    pooling = read_json(tmp_path / "1_Pooling" / "config.json")
    assert pooling["pooling_mode_mean_tokens"] is True and pooling["pooling_mode"] == "mean"
    assert not any(pooling[f"pooling_mode_{name}"] for name in ("cls_token", "max_tokens", "lasttoken"))
    # Releases of sentence-transformers before 5.4 stop at a key that they do not know.
    assert pooling["word_embedding_dimension"] == 32 and "embedding_dimension" not in pooling
    assert read_json(tmp_path / "sentence_bert_config.json") == {"max_seq_length": 24, "do_lower_case": False}
    config = read_json(tmp_path / "config.json")
    assert config["architectures"] == ["BertModel"]
    assert config["is_matryoshka"] is True and config["matryoshka_dimensions"] == [8, 4]
    assert EmbeddingModel.from_pretrained(tmp_path).matryoshka_dims == [8, 4]
    assert "embeddings.word_embeddings.weight" in load_file(tmp_path / "model.safetensors")


def test_automodel_loads_the_backbone_from_the_top_of_the_folder(tmp_path):
    model = tiny(projection_dim=8)
    model.save_pretrained(tmp_path)
    backbone = AutoModel.from_pretrained(tmp_path, add_pooling_layer=False)
    assert isinstance(backbone, BertModel)
    weights = backbone.state_dict()
    assert all(torch.equal(weights[key], value) for key, value in model.backbone.state_dict().items())


def test_saving_again_without_matryoshka_or_projection_leaves_none_behind(tmp_path):
    tiny(projection_dim=8, matryoshka_dims=[8, 4]).save_pretrained(tmp_path)
    model = tiny()
    model.save_pretrained(tmp_path)
    reloaded = EmbeddingModel.from_pretrained(tmp_path)
    assert reloaded.projection is None and reloaded.matryoshka_dims is None
    assert "is_matryoshka" not in read_json(tmp_path / "config.json")
    assert torch.equal(embed(reloaded, tiny_tokenizer()), embed(model, tiny_tokenizer()))


# ---- reading what others wrote ----


@pytest.fixture(scope="module")
def new_layout(tmp_path_factory):
    """A folder in the layout of sentence-transformers 6, and its embeddings of TEXTS."""
    folder = tmp_path_factory.mktemp("new_layout")
    tiny().backbone.save_pretrained(folder / "backbone")
    tiny_tokenizer().save_pretrained(folder / "backbone")
    torch.manual_seed(0)
    dense = Dense(32, 8, activation_function=torch.nn.Identity())
    modules = [Transformer(str(folder / "backbone")), Pooling(32, "cls"), dense, Normalize()]
    theirs = SentenceTransformer(modules=modules, device="cpu", prompts={"query": "search : "})
    theirs.save(str(folder / "model"))
    return folder / "model", theirs.encode(TEXTS, convert_to_tensor=True)


def test_the_layout_of_sentence_transformers_6_is_read(new_layout):
    folder, expected = new_layout
    assert "sentence_transformers.models" not in (folder / "modules.json").read_text()
    model = EmbeddingModel.from_pretrained(folder)
    assert model.pooling == "cls" and model.prompts["query"] == "search : "
    assert torch.equal(embed(model, tiny_tokenizer()), expected)


def test_what_the_caller_asks_for_wins_over_the_folder_but_a_trained_projection_stays(new_layout):
    folder, expected = new_layout
    model = EmbeddingModel.from_pretrained(folder, pooling="mean", normalize=False, prompts={}, projection_dim=8)
    assert (model.pooling, model.normalize, model.prompts) == ("mean", False, {})
    model.pooling, model.normalize = "cls", True
    assert torch.equal(embed(model, tiny_tokenizer()), expected)
    with pytest.raises(UsageError, match="trained projection to 8 dimensions, not 4"):
        EmbeddingModel.from_pretrained(folder, projection_dim=4)
    assert EmbeddingModel.from_backbone(folder, projection_dim=4).embedding_dim == 4


def test_a_backbone_in_a_subfolder_and_bin_weights_are_read(new_layout, tmp_path):
    folder, expected = new_layout
    old = tmp_path / "old"
    shutil.copytree(folder, old)
    (old / "0_Transformer").mkdir()
    for name in ("config.json", "model.safetensors", "sentence_bert_config.json"):
        (old / name).rename(old / "0_Transformer" / name)
    modules = read_json(old / "modules.json")
    modules[0]["path"] = "0_Transformer"
    write_json(old / "modules.json", modules)
    for weights in old.rglob("model.safetensors"):
        torch.save(load_file(weights), weights.with_name("pytorch_model.bin"))
        weights.unlink()
    assert torch.equal(embed(EmbeddingModel.from_pretrained(old), tiny_tokenizer()), expected)


def test_letters_are_made_small_and_texts_cut_where_an_older_release_said_so_in_a_file_of_another_name(tmp_path):
    model, texts = tiny(), ["SORT the Numbers by key", "Parse a DATE from text : read"]
    model.save_pretrained(tmp_path / "old", tokenizer=tiny_tokenizer())
    write_json(tmp_path / "old" / "sentence_roberta_config.json", {"max_seq_length": 5, "do_lower_case": True})
    (tmp_path / "old" / "sentence_bert_config.json").unlink()
    expected = SentenceTransformer(str(tmp_path / "old"), device="cpu").encode(texts, convert_to_tensor=True)
    for folder in (tmp_path / "old", tmp_path / "new"):
        loaded, tokenizer = EmbeddingModel.from_pretrained(folder), load_tokenizer(folder)
        assert loaded.max_length == 5
        tokenizer.model_max_length = loaded.max_length
        assert torch.allclose(embed(loaded, tokenizer, texts), expected, atol=1e-6)
        assert not torch.allclose(embed(loaded, tiny_tokenizer(max_length=5), texts), expected, atol=1e-3)
        loaded.save_pretrained(tmp_path / "new", tokenizer=tokenizer)
    served = SentenceTransformer(str(tmp_path / "new"), device="cpu").encode(texts, convert_to_tensor=True)
    assert torch.allclose(served, expected, atol=1e-6)


def test_a_plain_transformers_folder_is_mean_pooled_and_says_so(tmp_path, caplog):
    model = tiny()
    model.backbone.save_pretrained(tmp_path)
    with caplog.at_level("INFO", logger="hf_dist_ext"):
        reloaded = EmbeddingModel.from_pretrained(tmp_path)
    assert "plain transformers model: mean pooling" in caplog.text
    assert torch.equal(embed(reloaded, tiny_tokenizer()), embed(model, tiny_tokenizer()))


# ---- a piece is missing, or is not what we can reproduce ----


def remove(*names):
    def break_folder(folder):
        for name in names:
            path = folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return break_folder


def change(name, **changes):
    return lambda folder: write_json(folder / name, read_json(folder / name) | changes)


def swap_dense_and_normalize(folder):
    modules = read_json(folder / "modules.json")
    write_json(folder / "modules.json", modules[:2] + modules[:1:-1])


def cut_json(folder):
    (folder / "modules.json").write_text("[{")


@pytest.mark.parametrize(
    ("break_folder", "message"),
    [
        (remove("2_Dense"), "2_Dense/config.json is missing"),
        (remove("2_Dense/model.safetensors"), "2_Dense has no model.safetensors"),
        (remove("1_Pooling"), "1_Pooling/config.json is missing"),
        (remove("modules.json"), "1_Pooling, 2_Dense, 3_Normalize but no modules.json"),
        (remove("config.json"), "has no config.json"),
        (remove("model.safetensors"), "cannot be loaded"),
        (lambda folder: os.truncate(folder / "model.safetensors", 500), "cannot be loaded: Error while deserializing"),
        (remove("modules.json", "1_Pooling", "2_Dense", "3_Normalize", "config.json"), "not a model folder"),
        (cut_json, "modules.json is not valid JSON"),
        (swap_dense_and_normalize, "Transformer -> Pooling -> Normalize -> Dense"),
        (change("1_Pooling/config.json", pooling_mode="max"), "pools by 'max'"),
        (change("1_Pooling/config.json", include_prompt=False), "include_prompt"),
        (change("2_Dense/config.json", activation_function="own_code.Activation"), "own_code.Activation"),
        (change("2_Dense/config.json", activation_function="torch.nn.functional.gelu"), "no module of torch.nn"),
        (change("2_Dense/config.json", use_residual=True), "missing: residual.weight"),
        (change("2_Dense/config.json", module_input_name="token_embeddings"), "projects the pooled vector"),
    ],
)
def test_a_folder_that_would_give_other_embeddings_is_an_error(tmp_path, break_folder, message):
    tiny(projection_dim=8).save_pretrained(tmp_path)
    EmbeddingModel.from_pretrained(tmp_path)
    break_folder(tmp_path)
    with pytest.raises(UsageError, match=message):
        EmbeddingModel.from_pretrained(tmp_path)


def test_the_booleans_alone_name_the_pooling(tmp_path):
    tiny(pooling="last").save_pretrained(tmp_path)
    path = tmp_path / "1_Pooling" / "config.json"
    config = read_json(path)
    del config["pooling_mode"]
    write_json(path, config)
    assert read_model_folder(tmp_path).pooling == "last"
    write_json(path, config | {"pooling_mode_mean_tokens": True})
    with pytest.raises(UsageError, match="pools by .'mean', 'lasttoken'"):
        read_model_folder(tmp_path)


def test_a_hub_name_means_its_copy_in_the_cache(tmp_path, monkeypatch, new_layout):
    snapshot = tmp_path / "models--owner--name" / "snapshots" / "0123abc"
    shutil.copytree(new_layout[0], snapshot)
    (tmp_path / "models--owner--name" / "refs").mkdir()
    (tmp_path / "models--owner--name" / "refs" / "main").write_text("0123abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    assert resolve_folder("owner/name") == snapshot
    assert torch.equal(embed(EmbeddingModel.from_pretrained("owner/name"), tiny_tokenizer()), new_layout[1])
    with pytest.raises(UsageError, match='"owner/other" is neither a folder'):
        resolve_folder("owner/other")
    with pytest.raises(UsageError, match="is a file"):
        resolve_folder(snapshot / "config.json")


def test_a_hub_model_may_hold_weights_of_both_kinds(tmp_path, monkeypatch):
    remote, cache = tmp_path / "remote", tmp_path / "cache"
    model = tiny(projection_dim=8)
    model.save_pretrained(remote)
    dense = remote / "2_Dense" / "model.safetensors"
    torch.save(load_file(dense), dense.with_name("pytorch_model.bin"))
    dense.unlink()
    torch.save({}, remote / "pytorch_model.bin")  # beside the same weights as safetensors

    def download(name: str, revision: str | None, **patterns) -> str:
        names = [path.relative_to(remote).as_posix() for path in remote.rglob("*") if path.is_file()]
        for one in filter_repo_objects(names, **patterns):
            (cache / one).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(remote / one, cache / one)
        return str(cache)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    loaded = EmbeddingModel.from_pretrained("owner/name")
    assert torch.equal(loaded.projection.weight, model.projection.weight)
    assert not (cache / "pytorch_model.bin").exists()

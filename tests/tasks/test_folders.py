"""Runs that start from the folders sentence-transformers writes, and end with folders that it opens."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling, StaticEmbedding
from torch import nn

from hf_dist_ext.checkpoints.merge import merge
from hf_dist_ext.models.backbones import load_tokenizer
from hf_dist_ext.models.embedding_model import EmbeddingModel
from hf_dist_ext.models.towers import TowerModel
from tests.models.test_model_folder import TEXTS, embed, tiny
from tests.models.test_router_folder import PROMPTS, asymmetric
from tests.tasks.test_stages import main
from tests.tiny_models import tiny_pairs, tiny_tokenizer


def write_run(folder: Path, **more) -> Path:
    data = tiny_pairs(folder)
    del data["tokenizer_name"]
    fields = data | {
        "per_device_train_batch_size": 8,
        "gradient_cache_chunk_size": 3, "max_steps": 4, "save_steps": 2, "learning_rate": 1e-2,
        "eval_holdout": 8, "output_dir": str(folder / "out"), "use_cpu": True, "disable_tqdm": True,
        "report_to": "none",
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(fields | more))
    return folder / "run.json"


def resumed(path: Path, folder: Path, kind: type) -> dict[str, torch.Tensor]:
    """The weights of a run that goes on from its second step."""
    shutil.rmtree(folder / "out" / "checkpoint-4")
    main(path, "--resume_from_checkpoint", "true")
    return kind.from_pretrained(folder / "out").state_dict()


def test_all_dense_modules_of_a_folder_train_are_saved_and_resumed(tmp_path):
    tiny().backbone.save_pretrained(tmp_path / "backbone")
    tiny_tokenizer().save_pretrained(tmp_path / "backbone")
    dense = [Dense(32, 24, bias=False, activation_function=nn.Tanh()), Dense(24, 16, bias=False)]
    modules = [Transformer(str(tmp_path / "backbone")), Pooling(32, "mean"), *dense, Normalize()]
    SentenceTransformer(modules=modules, device="cpu").save(str(tmp_path / "model"))
    before = EmbeddingModel.from_pretrained(tmp_path / "model").state_dict()
    path = write_run(tmp_path, model_name_or_path=str(tmp_path / "model"))
    main(path)
    model = EmbeddingModel.from_pretrained(tmp_path / "out")
    after = model.state_dict()
    assert {"projection.0.weight", "projection.1.weight"} < after.keys()
    assert all(not torch.equal(after[name], before[name]) for name in after if name.startswith("projection"))
    served = SentenceTransformer(str(tmp_path / "out"), device="cpu").encode(TEXTS, convert_to_tensor=True)
    assert (served - embed(model, load_tokenizer(tmp_path / "out"))).abs().max() <= 1e-6
    again = resumed(path, tmp_path, EmbeddingModel)
    assert after.keys() == again.keys() and all(torch.equal(again[name], value) for name, value in after.items())


@pytest.mark.parametrize("part", [{"trainable_modules": ["projection"]}, {"frozen_modules": ["embeddings"]}])
def test_a_run_that_trains_a_part_of_a_folder_ends_with_a_whole_one(tmp_path, capsys, part):
    """Its checkpoints hold what trains, and merging one gives the same model."""
    tiny(projection_dim=16).save_pretrained(tmp_path / "model", tokenizer=tiny_tokenizer())
    main(write_run(tmp_path, model_name_or_path=str(tmp_path / "model"), **part))
    out, said = tmp_path / "out", capsys.readouterr().out
    assert "merge it:" not in said and f'SentenceTransformer("{out}")' in said
    texts, tokenizer = [*TEXTS, "sort the numbers by key"], load_tokenizer(out)
    served = SentenceTransformer(str(out), device="cpu").encode(texts, convert_to_tensor=True)
    assert (served - embed(EmbeddingModel.from_pretrained(out), tokenizer, texts)).abs().max() <= 1e-6
    before = embed(EmbeddingModel.from_pretrained(tmp_path / "model"), tokenizer, texts)
    assert (served - before).abs().max() > 1e-3, "something trained"
    assert (out / "checkpoint-4" / "trainable.safetensors").is_file()
    merge(out / "checkpoint-4", tmp_path / "merged")
    assert torch.equal(
        embed(EmbeddingModel.from_pretrained(tmp_path / "merged"), tokenizer, texts),
        embed(EmbeddingModel.from_pretrained(out), tokenizer, texts),
    )


@pytest.mark.parametrize("start", ["a folder", "a configuration"])
def test_static_embeddings_train_are_served_and_resumed(tmp_path, start):
    SentenceTransformer(modules=[StaticEmbedding(tiny_tokenizer(), embedding_dim=16)], device="cpu").save(
        str(tmp_path / "model")
    )
    given = {"model_name_or_path": str(tmp_path / "model")}
    if start == "a configuration":
        given = {"model_config": {"model_type": "static_embedding", "hidden_size": 16}}
        given["tokenizer_name"] = str(tmp_path / "tokenizer")
    path = write_run(tmp_path, **given)
    main(path)
    model = EmbeddingModel.from_pretrained(tmp_path / "out")
    after, served = model.state_dict(), SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert [type(module).__name__ for module in served] == ["StaticEmbedding", "Normalize"]
    texts = [*TEXTS, " ".join(["sort the numbers by key"] * 9)]
    theirs = served.encode(texts, convert_to_tensor=True)
    assert (theirs - embed(model, load_tokenizer(tmp_path / "out"), texts)).abs().max() <= 1e-6
    first = EmbeddingModel.from_pretrained(tmp_path / "out" / "checkpoint-2").state_dict()
    assert after.keys() == first.keys() and all(not torch.equal(first[name], value) for name, value in after.items())
    assert json.loads((tmp_path / "out" / "metrics.json").read_text())["num_chunks"] > 3
    again = resumed(path, tmp_path, EmbeddingModel)
    assert all(torch.equal(again[name], value) for name, value in after.items())


@pytest.fixture
def router_run(tmp_path):
    asymmetric(tmp_path)
    return write_run(tmp_path, model_name_or_path=str(tmp_path / "model"))


def test_queries_and_documents_train_their_own_route(router_run, tmp_path):
    main(router_run)
    model = TowerModel.from_pretrained(tmp_path / "out")
    assert model.column_to_tower == {"query": "query", "positive": "document"}
    served = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    before = SentenceTransformer(str(tmp_path / "model"), device="cpu")
    assert served.default_prompt_name == before.default_prompt_name == "query"
    for task, encode, old in (
        ("query", served.encode_query, before.encode_query),
        ("document", served.encode_document, before.encode_document),
    ):
        column = {"query": "query", "document": "positive"}[task]
        tokenizer = load_tokenizer(tmp_path / "out" / task)
        features = tokenizer([PROMPTS[task] + text for text in TEXTS], padding=True, return_tensors="pt")
        with torch.no_grad():
            ours = model(column=column, **features).embeddings
        theirs = encode(TEXTS, convert_to_tensor=True)
        assert (ours - theirs).abs().max() <= 1e-6
        assert (theirs - old(TEXTS, convert_to_tensor=True, normalize_embeddings=True)).abs().max() > 1e-3
    after = model.state_dict()
    again = resumed(router_run, tmp_path, TowerModel)
    assert all(torch.equal(again[name], value) for name, value in after.items())


def test_a_frozen_document_route_stays_and_a_checkpoint_is_merged(router_run, tmp_path):
    main(router_run, "--trainable_modules", '["query"]')
    after, merged = TowerModel.from_pretrained(tmp_path / "out"), tmp_path / "merged"
    before = EmbeddingModel.from_pretrained(tmp_path / "model" / "document_0_Transformer").backbone.state_dict()
    backbone = after.towers["document"].backbone.state_dict()
    assert all(torch.equal(backbone[name], value) for name, value in before.items())
    merge(tmp_path / "out" / "checkpoint-4", merged)
    weights = TowerModel.from_pretrained(merged).state_dict()
    assert all(torch.equal(weights[name], value) for name, value in after.state_dict().items())
    served = [SentenceTransformer(str(folder), device="cpu") for folder in (tmp_path / "out", merged)]
    assert [model.default_prompt_name for model in served] == ["query", "query"]
    one, other = (model.encode_document(TEXTS, convert_to_tensor=True) for model in served)
    assert torch.equal(one, other)
    main(router_run, "--model_name_or_path", str(merged), "--output_dir", str(tmp_path / "second"), "--max_steps", "1")
    second = TowerModel.from_pretrained(tmp_path / "second").state_dict()
    moved = {name.split(".")[1] for name, value in second.items() if not torch.equal(value, weights[name])}
    assert moved == {"query", "document"}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--pooling", "cls"), 'pooling="cls", but'),
        (("--max_length", '{"third": 4}'), 'max_length has "third"'),
    ],
)
def test_what_a_router_does_not_take_is_refused(router_run, more, words, capsys):
    with pytest.raises(SystemExit):
        main(router_run, *more)
    assert words in capsys.readouterr().err


def test_static_embeddings_read_whole_texts(tmp_path, capsys):
    model = SentenceTransformer(modules=[StaticEmbedding(tiny_tokenizer(), embedding_dim=16)], device="cpu")
    model.save(str(tmp_path / "model"))
    with pytest.raises(SystemExit):
        main(write_run(tmp_path, model_name_or_path=str(tmp_path / "model"), max_length=8))
    assert "max_length=8: static embeddings read whole texts" in capsys.readouterr().err

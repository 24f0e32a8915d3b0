"""Runs that start from the folders sentence-transformers writes, and end with folders that it opens."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Router, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling, StaticEmbedding
from torch import nn

from hf_dist_ext.checkpoints.merge import merge
from tests.tasks.test_stages import main
from tests.tiny_models import embedding_model, loaded, model_config, tiny_pairs, tiny_tokenizer, write_fields

TEXTS = ["parse a date", "read text file into list of lines"]
PROMPTS = {"query": "search : ", "document": "file : "}


def write_run(folder: Path, **more) -> Path:
    data = tiny_pairs(folder)
    del data["tokenizer_name"]
    fields = data | {
        "per_device_train_batch_size": 8, "gradient_cache_chunk_size": 3, "max_steps": 4, "save_steps": 2,
        "learning_rate": 1e-2, "eval_holdout": 8, "output_dir": str(folder / "out"),
    }  # fmt: skip
    return write_fields(folder, **fields | more)


def resumed(path: Path, folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a run that goes on from its second step."""
    shutil.rmtree(folder / "out" / "checkpoint-4")
    main(path, "--resume_from_checkpoint", "true")
    return loaded(folder / "out").state_dict()


def served(folder: Path, texts: list[str] = TEXTS) -> torch.Tensor:
    return SentenceTransformer(str(folder), device="cpu").encode(texts, convert_to_tensor=True)


def said(model, texts: list[str] = TEXTS) -> torch.Tensor:
    return model.eval().encode(texts, convert_to_tensor=True)


def asymmetric(folder: Path) -> None:
    """A Router, whose queries and documents have a model each."""
    routes = {}
    for task in ("query", "document"):
        embedding_model(model_config("bert")).save_pretrained(str(folder / task))
        routes[task] = [Transformer(str(folder / task)), Pooling(32, "mean")]
    router = Router.for_query_document(query_modules=routes["query"], document_modules=routes["document"])
    model = SentenceTransformer(modules=[router], device="cpu", prompts=PROMPTS, default_prompt_name="query")
    model.save_pretrained(str(folder / "model"))


def test_all_dense_modules_of_a_folder_train_are_saved_and_resumed(tmp_path):
    embedding_model(model_config("bert"))[0].save(str(tmp_path / "backbone"))
    dense = [Dense(32, 24, bias=False, activation_function=nn.Tanh()), Dense(24, 16, bias=False)]
    modules = [Transformer(str(tmp_path / "backbone")), Pooling(32, "mean"), *dense, Normalize()]
    SentenceTransformer(modules=modules, device="cpu").save(str(tmp_path / "model"))
    before = loaded(tmp_path / "model").state_dict()
    path = write_run(tmp_path, model_name_or_path=str(tmp_path / "model"))
    main(path)
    after = loaded(tmp_path / "out").state_dict()
    projections = [name for name in after if "linear" in name]
    assert len(projections) == 2 and all(not torch.equal(after[name], before[name]) for name in projections)
    again = resumed(path, tmp_path)
    assert after.keys() == again.keys() and all(torch.equal(again[name], value) for name, value in after.items())


@pytest.mark.parametrize("part", [{"trainable_modules": ["projection"]}, {"frozen_modules": ["embeddings"]}])
def test_a_run_that_trains_a_part_of_a_folder_ends_with_a_whole_one(tmp_path, capsys, part):
    """Its checkpoints hold what trains, and merging one gives the same model."""
    embedding_model(model_config("bert"), projection_dim=16).save_pretrained(str(tmp_path / "model"))
    main(write_run(tmp_path, model_name_or_path=str(tmp_path / "model"), **part))
    out, printed = tmp_path / "out", capsys.readouterr().out
    assert "merge it:" not in printed and f'SentenceTransformer("{out}")' in printed
    assert (served(out) - served(tmp_path / "model")).abs().max() > 1e-3, "something trained"
    assert (out / "checkpoint-4" / "trainable.safetensors").is_file()
    merge(out / "checkpoint-4", tmp_path / "merged")
    assert torch.equal(served(tmp_path / "merged"), served(out))


@pytest.mark.parametrize("start", ["a folder", "a configuration"])
def test_static_embeddings_train_are_served_and_resumed(tmp_path, start):
    static = StaticEmbedding(tiny_tokenizer(), embedding_dim=16)
    SentenceTransformer(modules=[static], device="cpu").save(str(tmp_path / "model"))
    given = {"model_name_or_path": str(tmp_path / "model")}
    if start == "a configuration":
        given = {"model_config": {"model_type": "static_embedding", "hidden_size": 16}}
        given["tokenizer_name"] = str(tmp_path / "tokenizer")
    path = write_run(tmp_path, **given)
    main(path)
    model = loaded(tmp_path / "out")
    assert [type(module).__name__ for module in model] == ["StaticEmbedding", "Normalize"]
    after, first = model.state_dict(), loaded(tmp_path / "out" / "checkpoint-2").state_dict()
    assert after.keys() == first.keys() and all(not torch.equal(first[name], value) for name, value in after.items())
    assert json.loads((tmp_path / "out" / "metrics.json").read_text())["num_chunks"] > 3
    again = resumed(path, tmp_path)
    assert all(torch.equal(again[name], value) for name, value in after.items())


@pytest.fixture
def router_run(tmp_path):
    asymmetric(tmp_path)
    return write_run(tmp_path, model_name_or_path=str(tmp_path / "model"))


def weights_of(folder: Path, task: str) -> dict[str, torch.Tensor]:
    return loaded(folder)[0].sub_modules[task].state_dict()


def has_moved(folder: Path, other: Path, task: str) -> bool:
    after, before = weights_of(folder, task), weights_of(other, task)
    return any(not torch.equal(after[name], before[name]) for name in before)


def test_queries_and_documents_train_their_own_route(router_run, tmp_path):
    main(router_run)
    out, base = tmp_path / "out", tmp_path / "model"
    assert has_moved(out, base, "query") and has_moved(out, base, "document")
    model = SentenceTransformer(str(out), device="cpu")
    assert model.default_prompt_name == "query" and {name: model.prompts[name] for name in PROMPTS} == PROMPTS
    after = loaded(out).state_dict()
    again = resumed(router_run, tmp_path)
    assert all(torch.equal(again[name], value) for name, value in after.items())


def test_a_frozen_document_route_stays_and_a_checkpoint_is_merged(router_run, tmp_path):
    main(router_run, "--trainable_modules", '["query"]')
    out, base, merged = tmp_path / "out", tmp_path / "model", tmp_path / "merged"
    assert has_moved(out, base, "query") and not has_moved(out, base, "document")
    merge(out / "checkpoint-4", merged)
    again = loaded(merged).state_dict()
    assert all(torch.equal(again[name], one) for name, one in loaded(out).state_dict().items())
    assert torch.equal(said(loaded(merged)), said(loaded(out)))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--pooling", "cls"), "pooling, projection_dim and normalize say what follows one backbone"),
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


def test_weights_in_half_precision_without_autocast_train_packed_with_a_projection_behind(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    config = {"model_config": model_config("bert"), "tokenizer_name": str(tmp_path / "tokenizer")}
    for pooling in ("mean", "cls"):
        out = str(tmp_path / pooling)
        main(write_run(tmp_path, **config, output_dir=out, pooling=pooling, projection_dim=8, dtype="bfloat16"))
        assert {value.dtype for value in loaded(Path(out)).state_dict().values()} == {torch.bfloat16}

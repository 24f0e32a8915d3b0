"""`hf-dist export`: who serves a folder, and the folder that they serve."""

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import nn
from transformers import CLIPModel

from hf_dist_ext.cli import main
from hf_dist_ext.models.servers import answers
from hf_dist_ext.tasks import export
from tests.models.test_dual_encoders import build
from tests.models.test_model_folder import TEXTS, change, tiny
from tests.models.test_router_folder import asymmetric
from tests.tiny_models import tiny_tokenizer


def of_sentence_transformers(folder, activation: nn.Module) -> SentenceTransformer:
    tiny().backbone.save_pretrained(folder / "backbone")
    tiny_tokenizer().save_pretrained(folder / "backbone")
    dense = Dense(32, 8, activation_function=activation)
    modules = [Transformer(str(folder / "backbone")), Pooling(32, "cls"), dense, Normalize()]
    model = SentenceTransformer(modules=modules, device="cpu", prompts={"query": "search : "})
    model.save(str(folder / "model"))
    return model


def test_a_folder_of_release_6_is_written_so_that_all_serve_it(tmp_path, capsys):
    theirs = of_sentence_transformers(tmp_path, nn.Tanh())
    change("sentence_bert_config.json", query_length=5, document_length=9)(tmp_path / "model")
    main(["export", str(tmp_path / "model")])
    assert "vllm: no" in capsys.readouterr().out
    main(["export", str(tmp_path / "model"), "--output", str(tmp_path / "out")])
    assert "vllm: yes" in capsys.readouterr().out
    assert not any(answer.reasons for answer in answers(tmp_path / "out"))
    served = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert torch.equal(served.encode(TEXTS, convert_to_tensor=True), theirs.encode(TEXTS, convert_to_tensor=True))
    assert served.prompts["query"] == "search : "


def test_what_a_server_can_not_do_is_refused_and_nothing_is_left(tmp_path, capsys):
    of_sentence_transformers(tmp_path, nn.GELU())
    with pytest.raises(SystemExit):
        main(["export", str(tmp_path / "model"), "--output", str(tmp_path / "out")])
    assert "text-embeddings-inference: its Dense has no torch.nn" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    main(["export", str(tmp_path / "model"), "--output", str(tmp_path / "out"), "--server", "vllm"])
    with pytest.raises(SystemExit, match="1"):
        main(["export", str(tmp_path / "out"), "--check", "--server", "text-embeddings-inference"])
    with pytest.raises(SystemExit):
        main(["export", str(tmp_path / "model"), "--output", str(tmp_path / "out"), "--server", "vllm"])
    assert "is not empty" in capsys.readouterr().err


def test_a_dual_encoder_is_written_as_one_model_and_a_router_is_not(tmp_path, capsys):
    model, processor = build("clip")
    model.save_pretrained(tmp_path / "pair")
    processor.save_pretrained(tmp_path / "pair")
    old = ["--server", "sentence-transformers 3 and 4", "--server", "sentence-transformers"]
    main(["export", str(tmp_path / "pair"), "--output", str(tmp_path / "out"), *old])
    assert (tmp_path / "out" / "model.safetensors").is_file() and CLIPModel.from_pretrained(tmp_path / "out")
    before, after = (SentenceTransformer(str(tmp_path / name), device="cpu") for name in ("pair", "out"))
    assert torch.equal(before.encode(TEXTS, convert_to_tensor=True), after.encode(TEXTS, convert_to_tensor=True))
    asymmetric(tmp_path)
    with pytest.raises(SystemExit):
        main(["export", str(tmp_path / "model"), "--output", str(tmp_path / "routed")])
    assert "has a Router, which sentence-transformers alone serves" in capsys.readouterr().err


def test_onnx_needs_a_library_that_is_there_and_fits(tmp_path, capsys, monkeypatch):
    of_sentence_transformers(tmp_path, nn.Tanh())
    ask = ["export", str(tmp_path / "model"), "--onnx", str(tmp_path / "onnx")]
    monkeypatch.setattr(export, "_is_there", lambda name: name == "sentence_transformers")
    with pytest.raises(SystemExit):
        main(ask)
    assert "--onnx needs optimum and onnxruntime, which is not installed: pip" in capsys.readouterr().err

    class Broken(SentenceTransformer):
        def __init__(self, *arguments, backend="torch", **options):
            if backend == "onnx":
                raise ImportError("cannot import name")
            super().__init__(*arguments, **options)

    monkeypatch.setattr(export, "_is_there", lambda name: True)
    monkeypatch.setattr("sentence_transformers.SentenceTransformer", Broken)
    with pytest.raises(SystemExit):
        main(ask)
    assert "optimum can not export" in capsys.readouterr().err and not (tmp_path / "onnx").exists()


def test_onnx_gives_the_same_embeddings_or_nothing(tmp_path, capsys, monkeypatch):
    """With a stand-in for the exported model, which is off by a given amount."""
    of_sentence_transformers(tmp_path, nn.Tanh())
    off = 0.0

    class Exported(SentenceTransformer):
        def __init__(self, *arguments, backend="torch", model_kwargs=None, **options):
            super().__init__(*arguments, **options)
            self.is_exported = backend == "onnx"

        def encode(self, *arguments, **options):
            return super().encode(*arguments, **options) + (off if self.is_exported else 0)

    monkeypatch.setattr(export, "_is_there", lambda name: True)
    monkeypatch.setattr("sentence_transformers.SentenceTransformer", Exported)
    main(["export", str(tmp_path / "model"), "--onnx", str(tmp_path / "onnx")])
    assert "embeddings differ by at most 0.0e+00" in capsys.readouterr().out and (tmp_path / "onnx").is_dir()
    off = 1e-3
    with pytest.raises(SystemExit):
        main(["export", str(tmp_path / "model"), "--onnx", str(tmp_path / "other")])
    assert "differ by 1.0e-03" in capsys.readouterr().err and not (tmp_path / "other").exists()

"""Models whose folder brings its own code: their runs are resumed, and no code of a checkpoint is run."""

import json
from pathlib import Path

import pytest
import torch
import transformers.dynamic_module_utils
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Router

from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.checkpoints.test_hub import collate
from tests.distributed.forked import Run
from tests.tiny_models import OWN_CODE, embedding_model, loaded, model_config, tiny_tokenizer


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "own_code.py").write_text(OWN_CODE)
    sizes = dict(vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    maps = {"AutoConfig": "own_code.OwnConfig", "AutoModel": "own_code.OwnModel"}
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": maps, **sizes}))
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    transformers.AutoModel.from_config(config, trust_remote_code=True).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def test_code_that_is_not_run_is_named(tmp_path, caplog):
    """transformers knows the model's type too, and takes its own class without a word."""
    embedding_model(model_config("bert"))[0].model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    loaded(tmp_path)
    assert not caplog.messages
    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "own_code.OwnModel"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded(tmp_path)
    (said,) = caplog.messages
    assert "code of its own, and transformers' bert is used" in said and "trust_remote_code=true" in said


def own_model(folder: Path) -> SentenceTransformer:
    return loaded(folder, trust_remote_code=True, projection_dim=8)


def routes(folder: Path) -> SentenceTransformer:
    query, document = own_model(folder), own_model(folder)
    return SentenceTransformer(modules=[Router.for_query_document([*query], [*document])], trust_remote_code=True)


def trainer(model, output: Path, **more) -> DistTrainer:
    args = DistTrainingArguments(
        output_dir=str(output), per_device_train_batch_size=4, max_steps=6, save_steps=2, report_to=[], use_cpu=True,
        disable_tqdm=True, gradient_cache_chunk_size=2, learning_rate=1e-2, **more,
    )  # fmt: skip
    return DistTrainer(model, args, loss=InfoNCELoss(), train_dataset=list(range(32)), data_collator=collate)


def weights(model) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("make", [own_model, routes])
def test_a_resumed_run_is_the_whole_one(tmp_path, folder, make):
    whole = trainer(make(folder), tmp_path / "out")
    before = weights(whole.model).clone()
    whole.train()
    assert not torch.equal(weights(whole.model), before)
    for code in (tmp_path / "out").rglob("own_code.py"):
        bad = "raise AssertionError('the code of a checkpoint was run')"  # the model in memory has its own
        code.write_text(bad.ljust(len(code.read_text())))
    resumed = trainer(make(folder), tmp_path / "out", verify_checkpoint_hashes=False)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-4"))
    assert torch.equal(weights(resumed.model), weights(whole.model))
    taken = trainer(make(folder), tmp_path / "new", resume_weights_only=True, verify_checkpoint_hashes=False)
    taken._load_from_checkpoint(str(tmp_path / "out" / "checkpoint-6"))
    assert torch.equal(weights(taken.model), weights(whole.model))


def test_a_resumed_run_of_two_processes_is_the_whole_one(tmp_path, folder):
    def train(say, resume: bool | str) -> str:
        run = trainer(own_model(folder), tmp_path / "out")
        run.train(resume_from_checkpoint=resume)
        return json.dumps(weights(run.model).tolist())

    whole = Run("ddp", tmp_path / "whole", lambda say: train(say, False)).result()
    resumed = Run("ddp", tmp_path / "resumed", lambda say: train(say, str(tmp_path / "out" / "checkpoint-4"))).result()
    assert resumed == whole


def test_a_checkpoint_that_lacks_weights_of_its_own_code_is_refused(tmp_path, folder):
    from safetensors.torch import load_file, save_file

    whole = trainer(own_model(folder), tmp_path / "out")
    whole.save_model()
    path = tmp_path / "out" / "model.safetensors"
    save_file({name: value for name, value in load_file(path).items() if name != "scale"}, path, {"format": "pt"})
    with pytest.raises(ValueError, match="lacks 1 weights of OwnModel .scale."):
        whole._load_from_checkpoint(str(tmp_path / "out"))

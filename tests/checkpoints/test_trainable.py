"""Checkpoints of runs with frozen parts, in this process: what is in them, what they are refused for."""

import json
import shutil
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from hf_dist_ext.checkpoints import manifest, trainable
from hf_dist_ext.checkpoints.merge import merge
from hf_dist_ext.errors import UsageError
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.distributed.forked import run_python

SMALL = dict(
    vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
    tie_word_embeddings=False, attention_dropout=0.1,
)  # fmt: skip


def base(folder: Path, seed: int = 0, **changes) -> Path:
    torch.manual_seed(seed)
    path = folder / f"base{seed}"
    LlamaForCausalLM(LlamaConfig(**SMALL | changes)).save_pretrained(path)
    return path


def make(folder: Path, model: Path | nn.Module, **more) -> DistTrainer:
    torch.manual_seed(1)
    rows = [{"input_ids": (ids := torch.randint(1, 60, (8,))), "labels": ids} for _ in range(24)]
    options = dict(trainable_modules=["layers.1"], max_steps=4, save_steps=2, learning_rate=1e-2) | more
    args = DistTrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=4, report_to=[], disable_tqdm=True,
        use_cpu=True, seed=5, logging_steps=10, **options,
    )  # fmt: skip
    model = LlamaForCausalLM.from_pretrained(model) if isinstance(model, Path) else model
    return DistTrainer(model, args, train_dataset=rows)


def weights(trainer: DistTrainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, Path, torch.Tensor]:
    """(the base's folder, the run's folder, the weights it ends with)."""
    folder = tmp_path_factory.mktemp("whole")
    trainer = make(folder / "run", base(folder))
    start = weights(trainer)
    trainer.train()
    assert (weights(trainer) - start).abs().max() > 1e-3
    trainer.save_model()
    return folder / "base0", folder / "run", weights(trainer)


@pytest.fixture
def copied(whole, tmp_path) -> Path:
    shutil.copytree(whole[1], tmp_path / "run")
    return tmp_path / "run"


def test_a_checkpoint_holds_what_trains_and_says_what_it_stands_on(whole):
    folder = whole[1] / "checkpoint-2"
    saved, content = load_file(folder / "trainable.safetensors"), manifest.read(folder)
    assert len(saved) == 9 and all(".layers.1." in name for name in saved)
    assert content["base_model"] == str(whole[0].resolve()) and content["dtype"] == "float32"
    assert set(content["trains"]["trainable"]) == set(saved)
    digests = json.loads((folder / "frozen.json").read_text())
    assert not digests.keys() & saved.keys() and len(digests) == 12
    assert content["frozen_fingerprint"] == trainable.fingerprint(digests)


@pytest.mark.parametrize("asked", [True, "checkpoint-2"])
def test_a_resumed_run_ends_as_the_uninterrupted_one(whole, copied, asked):
    shutil.rmtree(copied / "checkpoint-4")
    resumed = make(copied, whole[0])
    resumed.train(resume_from_checkpoint=asked if asked is True else str(copied / asked))
    assert torch.equal(weights(resumed), whole[2])


def test_another_base_is_refused_and_what_differs_is_named(whole, copied, tmp_path):
    with pytest.raises(UsageError, match="frozen weights 9 with other values: .*embed_tokens"):
        make(copied, base(tmp_path, seed=7)).train(resume_from_checkpoint=True)
    changed = LlamaForCausalLM.from_pretrained(whole[0])
    with torch.no_grad():
        changed.model.embed_tokens.weight[3, 3] += 1e-6
    with pytest.raises(UsageError, match="frozen weights 1 with other values: model.embed_tokens.weight. Use"):
        make(copied, changed).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("options, words", [
    (dict(trainable_modules=["layers.1", "lm_head"]), "1 surplus: .*lm_head|1 missing: lm_head"),
    (dict(trainable_modules=["layers.1.mlp"]), "frozen weights .* surplus|6 surplus"),
    (dict(trainable_modules=None), "nothing is frozen now"),
])  # fmt: skip
def test_another_plan_is_refused_with_the_difference(whole, copied, options, words):
    with pytest.raises(UsageError, match=words):
        make(copied, whole[0], **options).train(resume_from_checkpoint=True)


def test_another_shape_is_refused(whole, tmp_path):
    model = LlamaForCausalLM(LlamaConfig(**SMALL | {"intermediate_size": 40}))
    with pytest.raises(UsageError, match=r"3 of another shape: model.layers.1.mlp.\w+.weight \(\d+, \d+\) instead of"):
        trainable.load_weights(
            model, frozenset(n for n, _ in model.named_parameters() if ".layers.1." in n), whole[1] / "checkpoint-2"
        )


def test_weights_only_starts_the_schedule_anew(whole, copied, caplog):
    taken = make(copied, whole[0], resume_weights_only=True, max_steps=1, learning_rate=0.0)
    taken.train(resume_from_checkpoint=str(copied / "checkpoint-4"))
    assert torch.equal(weights(taken), whole[2]) and taken.state.global_step == 1
    everything = make(copied, whole[0], resume_weights_only=True, trainable_modules=None, max_steps=1, learning_rate=0)
    everything.train(resume_from_checkpoint=str(copied / "checkpoint-1"))
    assert torch.equal(weights(everything), whole[2])
    with pytest.raises(UsageError, match="resume_from_checkpoint too"):
        make(copied, whole[0], resume_weights_only=True).train()


def test_buffers_of_what_trains_are_saved_and_those_of_the_rest_are_not():
    model = nn.ModuleDict({"a": nn.BatchNorm1d(3), "b": nn.BatchNorm1d(3)})
    saved = trainable.saved_tensors(model, frozenset({"a.weight", "a.bias"}))
    assert set(saved) == {"a.weight", "a.bias", "a.running_mean", "a.running_var", "a.num_batches_tracked"}
    digests = trainable.frozen_digests(model, frozenset({"a.weight", "a.bias"}))
    assert set(digests) == {name.replace("a.", "b.") for name in saved}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool])
def test_a_digest_sees_any_change_and_nothing_else(dtype):
    tensor = (torch.randn(50, 70) * 9).to(dtype)
    digest = trainable.digest_of(tensor)
    assert digest == trainable.digest_of(tensor.clone())
    changed = tensor.clone()
    changed[49, 68] = changed[49, 68] + 1 if dtype != torch.bool else ~changed[49, 68]
    assert digest not in (trainable.digest_of(changed), trainable.digest_of(tensor.view(70, 50)))
    assert trainable.digest_of(torch.empty(0, 3)) and trainable.digest_of(torch.tensor(2.0))


def test_the_end_of_a_run_is_what_was_trained_unless_asked_or_nowhere_else(whole, tmp_path):
    assert not (whole[1] / "model.safetensors").exists() and (whole[1] / "trainable.safetensors").is_file()
    assert manifest.why_incomplete(whole[1], hashes=True) == ""
    for number, (model, options) in enumerate(
        [(whole[0], {"save_full_model": True}), (LlamaForCausalLM(LlamaConfig(**SMALL)), {})]
    ):
        trainer = make(tmp_path / str(number), model, max_steps=1, save_strategy="no", **options)
        trainer.train()
        trainer.save_model()
        loaded = LlamaForCausalLM.from_pretrained(tmp_path / str(number))
        assert torch.equal(torch.cat([p.flatten() for p in loaded.parameters()]), weights(trainer))


def test_what_fsdp_gathered_for_an_evaluation_is_never_saved(tmp_path):
    """Its memory is freed while the state dict is made, and reading it ended the process."""
    code = f"""
        import torch.distributed as dist
        from torch import nn, ones
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import DTensor
        from hf_dist_ext.checkpoints.trainable import saved_tensors

        dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=0, world_size=1)
        model = fully_shard(nn.Linear(2, 2), reshard_after_forward=False)
        model(ones(1, 2))
        assert not isinstance(model.weight, DTensor)  # whole
        found = saved_tensors(model, frozenset(["weight", "bias"]))
        assert all(isinstance(tensor, DTensor) for tensor in found.values()), found
        dist.destroy_process_group()
    """
    run_python(textwrap.dedent(code))


def test_weights_that_were_taken_alone_are_in_the_checkpoints_of_a_run_that_freezes_them(tmp_path):
    first = make(tmp_path / "A", base(tmp_path), trainable_modules=None, max_steps=2)
    first.train()
    whole = make(tmp_path / "B", tmp_path / "base0", resume_weights_only=True)
    whole.train(resume_from_checkpoint=str(tmp_path / "A" / "checkpoint-2"))
    whole.save_model()
    frozen, of_base = whole.model.model.embed_tokens.weight, LlamaForCausalLM.from_pretrained(tmp_path / "base0")
    assert not frozen.requires_grad and not torch.equal(frozen, of_base.model.embed_tokens.weight)
    shutil.rmtree(tmp_path / "B" / "checkpoint-4")
    again = make(tmp_path / "B", tmp_path / "base0", resume_weights_only=True)
    again.train(resume_from_checkpoint=True)
    assert torch.equal(weights(again), weights(whole))
    for number, source in enumerate([tmp_path / "B", tmp_path / "B" / "checkpoint-4"]):
        merge(source, tmp_path / f"merged-{number}")
        merged = LlamaForCausalLM.from_pretrained(tmp_path / f"merged-{number}")
        assert torch.equal(torch.cat([p.flatten() for p in merged.parameters()]), weights(whole))


def test_buffers_of_modules_without_parameters_go_with_what_is_around_them():
    head = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False))
    body = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False))
    model = nn.ModuleDict({"body": body, "between": nn.BatchNorm1d(3, affine=False), "head": head})
    head.register_buffer("scale", torch.ones(1))  # Gemma 4's layers have such a one, which belongs to none that trains
    saved = frozenset({"head.0.weight", "head.0.bias"})
    owned = {name.rpartition(".")[0] for name in trainable.saved_tensors(model, saved)}
    assert owned == {"head.0", "head.1", "between"}
    assert {name.rpartition(".")[0] for name in trainable.frozen_digests(model, saved)} == {"body.0", "body.1", "head"}

"""`save_async`: what is written is the state of the step that was saved, and nothing of the writing is ever lost."""

import json
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.cuda._pin_memory_utils as pin_memory_utils
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from hf_dist_ext.checkpoints import async_save, hub, manifest
from hf_dist_ext.checkpoints.keeper import Keeper
from hf_dist_ext.errors import RunError, UsageError
from hf_dist_ext.strategies import consensus
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.checkpoints import test_saving, test_sentence_model, test_trainable
from tests.checkpoints.test_trainable import SMALL, base

OF_THE_CLOCK = ("runtime", "seconds", "per_second", "share", "bytes")


def llama(folder: Path, **more) -> DistTrainer:
    torch.manual_seed(0)
    return test_trainable.make(folder, LlamaForCausalLM(LlamaConfig(**SMALL)), **more)


MAKERS = {
    "with a loss": test_saving.make,
    "whole": lambda folder, **more: llama(folder, trainable_modules=None, **more),
    "a part": lambda folder, **more: test_trainable.make(folder, base(folder.parent), **more),
}


def read(path: Path) -> object:
    if path.suffix == ".safetensors":
        return load_file(path)
    if path.suffix in (".pt", ".pth"):
        return torch.load(path, weights_only=False)
    if path.suffix == ".json":
        return json.loads(path.read_text())
    return path.name  # training_args.bin: the field itself differs


def same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        keys = [key for key in one if not any(word in str(key) for word in OF_THE_CLOCK)]
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in keys)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "tobytes"):
        return one.tobytes() == other.tobytes()
    return one == other


@pytest.fixture
def overlapping(monkeypatch) -> list:
    """Writing starts behind the next step; the list gets (saved step, step of the run when it is written)."""
    seen, states, begin, save = [], [], async_save.Background.begin, Keeper.save

    def remembered(keeper, output_dir, state, *others, **more):
        states.append(state)
        save(keeper, output_dir, state, *others, **more)

    def late(background, name, work, push):
        state, step = states[-1], states[-1].global_step

        def work_later(group):
            deadline = time.monotonic() + 300
            while state.global_step == step < state.max_steps and time.monotonic() < deadline:
                time.sleep(0.001)
            seen.append((step, state.global_step))
            work(group)

        begin(background, name, work_later, push)

    monkeypatch.setattr(Keeper, "save", remembered)
    monkeypatch.setattr(async_save.Background, "begin", late)
    return seen


@pytest.mark.parametrize("kind", MAKERS)
def test_the_files_are_those_of_a_save_that_stops_training(tmp_path, overlapping, kind):
    trainers = {}
    for name, is_async in (("sync", False), ("async", True)):
        (tmp_path / name).mkdir()
        trainers[name] = MAKERS[kind](tmp_path / name / "run", save_async=is_async, max_steps=4, save_steps=2)
        trainers[name].train()
    assert overlapping[0][0] == 2 and overlapping[0][1] >= 3, "training did not go on"
    for step in (2, 4):
        folders = [tmp_path / name / "run" / f"checkpoint-{step}" for name in trainers]
        names = manifest.files_in(folders[0])
        assert names == manifest.files_in(folders[1]) and len(names) >= 5
        assert not manifest.why_incomplete(folders[1], hashes=True)
        for name in names:
            assert same(read(folders[0] / name), read(folders[1] / name)), name
    weights = [next((tmp_path / "async" / "run" / f"checkpoint-{step}").glob("*.safetensors")) for step in (2, 4)]
    assert not same(*map(read, weights)), "nothing trained between the saves"


def test_what_was_saved_is_resumed_bit_for_bit(tmp_path, overlapping):
    whole = MAKERS["with a loss"](tmp_path / "sync")
    whole.train()
    MAKERS["with a loss"](tmp_path / "async", save_async=True).train()
    for step in (6, 4):
        (tmp_path / "async" / f"checkpoint-{step}" / "manifest.json").unlink()
    resumed = MAKERS["with a loss"](tmp_path / "async", save_async=True)
    resumed.train(resume_from_checkpoint=True)
    assert torch.equal(test_saving.weights(resumed), test_saving.weights(whole))


def test_one_save_is_in_flight_and_commit_rotation_and_push_come_in_this_order(tmp_path, monkeypatch):
    events, record, commit_, rotate = [], manifest.record, manifest.commit, manifest.rotate

    def slow_record(*arguments):
        events.append("record")
        assert threading.current_thread() is not threading.main_thread()
        time.sleep(0.1)  # several steps
        return record(*arguments)

    monkeypatch.setattr(manifest, "record", slow_record)
    monkeypatch.setattr(manifest, "commit", lambda *a: (commit_(*a), events.append("commit")))
    monkeypatch.setattr(manifest, "rotate", lambda *a, **k: (rotate(*a, **k), events.append("rotate")))
    monkeypatch.setattr(hub, "push_checkpoint", lambda *a: events.append("push"))
    monkeypatch.setattr(DistTrainer, "init_hf_repo", lambda *a, **k: None)
    trainer = llama(tmp_path, save_async=True, save_steps=1, save_total_limit=1)
    trainer.args.push_to_hub = True
    trainer.train()
    assert events == ["record", "commit", "rotate", "push"] * 4
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-4"]
    assert trainer.keeper.background.saving is None


@pytest.mark.parametrize("save_steps", [1, 4], ids=["behind the next step", "at the end"])
def test_an_error_of_the_writing_is_raised_and_the_older_checkpoint_stays(tmp_path, monkeypatch, save_steps):
    failing, record = f"checkpoint-{2 if save_steps == 1 else 4}", manifest.record

    def broken(folder, names):
        if Path(folder).name == failing:
            raise OSError("the cable was pulled")
        return record(folder, names)

    monkeypatch.setattr(manifest, "record", broken)
    trainer = llama(tmp_path, save_async=True, save_steps=save_steps, max_steps=4)
    with pytest.raises(RunError, match=f"{failing} was not written: OSError: the cable was pulled"):
        trainer.train()
    assert manifest.why_incomplete(tmp_path / failing)
    if save_steps == 1:
        assert trainer.state.global_step == 3
        assert not manifest.why_incomplete(tmp_path / "checkpoint-1", hashes=True)
        monkeypatch.setattr(manifest, "record", record)
        resumed = llama(tmp_path, save_async=True, save_steps=4)
        resumed.train(resume_from_checkpoint=True)
        assert not manifest.why_incomplete(tmp_path / "checkpoint-4")


def test_a_run_that_fails_still_ends_the_save_in_flight(tmp_path, monkeypatch):
    record = manifest.record
    monkeypatch.setattr(manifest, "record", lambda *a: (time.sleep(0.3), record(*a))[1])
    trainer = llama(tmp_path, save_async=True)
    step = trainer.training_step

    def fails(*arguments, **options):
        if trainer.state.global_step == 3:
            raise RuntimeError("something else")
        return step(*arguments, **options)

    trainer.training_step = fails
    with pytest.raises(RuntimeError, match="something else"):
        trainer.train()
    assert not manifest.why_incomplete(tmp_path / "checkpoint-2", hashes=True)


def test_a_full_disk_is_said_in_the_same_words(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(manifest, "record", full)
    with pytest.raises(UsageError, match="ran full while checkpoint-2 was written"):
        llama(tmp_path, save_async=True).train()


def test_a_preempted_run_ends_with_its_checkpoint_complete(tmp_path, monkeypatch):
    record = manifest.record
    monkeypatch.setattr(manifest, "record", lambda *a: (time.sleep(0.3), record(*a))[1])
    trainer = llama(tmp_path, save_async=True, preemptible=True, max_steps=50, save_steps=50)
    log = trainer.training_step

    def signalled(*arguments, **options):
        if trainer.state.global_step == 1:
            trainer.health.stop.received = "SIGTERM"
        return log(*arguments, **options)

    trainer.training_step = signalled
    trainer.train()
    assert trainer.was_preempted and trainer.state.global_step == 2
    assert not manifest.why_incomplete(tmp_path / "checkpoint-2", hashes=True)


def test_a_writer_writes_what_its_content_was_when_it_was_given_it(tmp_path):
    for is_later in (False, True):
        folder, shared = tmp_path / str(is_later), torch.ones(2)
        folder.mkdir()
        writer = async_save.Writer(async_save.Stager().copied if is_later else None)
        writer.torch({"a": shared, "b": [shared, 3]}, folder / "content.pt")
        writer.tensors({"a": shared}, folder / "model.safetensors")
        writer.shards({"model": {"a": shared}}, folder / "shards")
        assert len(list(folder.iterdir())) == (0 if is_later else 3) and len(writer.writes) == (3 if is_later else 0)
        shared.zero_()
        async_save.make(writer.writes, None)
        content, sharded = torch.load(folder / "content.pt"), {"model": {"a": torch.zeros(2)}}
        dcp.load(sharded, checkpoint_id=folder / "shards")
        for found in (
            content["a"],
            content["b"][0],
            load_file(folder / "model.safetensors")["a"],
            sharded["model"]["a"],
        ):
            assert found.sum() == 2
        assert content["b"][1] == 3 and content["a"].data_ptr() == content["b"][0].data_ptr(), "they shared memory"


def test_what_a_gpu_holds_is_copied_into_pinned_memory_that_is_used_again(monkeypatch):
    pinned, waited = [], []

    class OnDevice(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *given: waited.append(len(pinned)))
    monkeypatch.setattr(pin_memory_utils, "pin_memory", lambda start, size: pinned.append(size))
    monkeypatch.setattr(pin_memory_utils, "unpin_memory", lambda start: None)
    weights, moment = (torch.zeros(64).as_subclass(OnDevice) for _ in range(2))
    stager, places = async_save.Stager(), []
    for step in (1.0, 2.0):
        weights.fill_(step), moment.fill_(-step)
        copies = stager.copied({"weights": weights, "step": step}), stager.copied({"moment": [moment]})
        weights.zero_(), moment.zero_()
        assert copies[0]["weights"].eq(step).all() and copies[1]["moment"][0].eq(-step).all()
        places.append([copies[0]["weights"].data_ptr(), copies[1]["moment"][0].data_ptr()])
    assert places[0] == places[1] and pinned == [256, 256] and waited == [1, 2, 2, 2]
    stager.copied({"weights": torch.zeros(4)})
    assert pinned == [256, 256], "what lies on the CPU needs no pinned memory"


def test_the_thread_of_a_save_has_the_device_of_its_process(monkeypatch):
    """A thread begins with the first one, and the other ranks would take memory there."""
    device = threading.local()
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: getattr(device, "index", 0))
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: setattr(device, "index", index))
    device.index, seen = 3, []
    saving = async_save.Saving(
        "a save", lambda group: seen.append(torch.accelerator.current_device_index()), None, None
    )
    saving.wait()
    assert seen == [3] and saving.error is None


def test_deepspeed_is_refused_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setattr("hf_dist_ext.run.deepspeed_install.check", lambda *words: None)
    with pytest.raises(UsageError, match="save_async=true does not work with DeepSpeed"):
        DistTrainingArguments(output_dir=str(tmp_path), save_async=True, use_cpu=True)


def test_ranks_that_are_alone_get_their_own_error():
    assert consensus.together(lambda: 3) == [3]
    with pytest.raises(KeyError):
        consensus.together(lambda: {}["missing"])


class Packed(nn.Linear):
    """As bitsandbytes keeps a layer: bytes, and in the state dict beside them what they mean."""

    def __init__(self, of):
        super().__init__(of.in_features, of.out_features, of.bias is not None)
        self.scale = of.weight.detach().abs().max() / 127
        self.weight = nn.Parameter((of.weight.detach() / self.scale).round().to(torch.int8), requires_grad=False)
        self.bias = of.bias

    def forward(self, inputs):
        return nn.functional.linear(inputs, self.weight * self.scale, self.bias)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.absmax"] = self.scale


def test_adapters_over_a_packed_base_are_saved_while_training_goes_on(tmp_path):
    model = test_sentence_model.model_of(tmp_path / "base")
    for layer in model.transformers_model.encoder.layer:
        layer.attention.self.key = Packed(layer.attention.self.key)
    model.add_adapter(test_sentence_model.ADAPTERS)
    test_sentence_model.train(tmp_path, model, save_async=True, max_steps=3)
    assert (tmp_path / "out" / "checkpoint-3" / "adapter_model.safetensors").is_file()
    assert (tmp_path / "out" / "checkpoint-3" / "manifest.json").is_file()

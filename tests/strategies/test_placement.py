"""The model is always called through its wrapper, and every part of it is on the device before.

Test machines have no device, so the meta device stands for one: `.to` moves there what it would move to a GPU, and
what nobody moves stays on the CPU. FSDP2 could not move a tensor there in place: it says which it would move, and
shards them on the CPU.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from accelerate import ParallelismConfig, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin
from peft import LoraConfig
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_init
from torch.distributed.tensor import DTensor
from transformers import Trainer

from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.strategies import collectives
from hf_dist_ext.strategies.fsdp import replicate_frozen_parts
from hf_dist_ext.tasks.readers import stand_in
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.distributed.forked import Run
from tests.parity.memory_table import CLIP
from tests.tiny_models import embedding_model, model_config

DEVICE = torch.device("meta")


class LossWithState(InfoNCELoss):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))


def embedder(name: str) -> nn.Module:
    return embedding_model(model_config(name), projection_dim=8)


def towers() -> nn.Module:
    return embedding_model(CLIP, tokenizer=stand_in(CLIP))


def adapted() -> nn.Module:
    model = embedder("llama").requires_grad_(False)
    model.transformers_model.add_adapter(LoraConfig(target_modules=["q_proj"], r=2))
    return model


CASES: dict[str, tuple[Callable[[], nn.Module], dict]] = {
    "rotary": (lambda: embedder("llama"), dict(trainable_modules=["projection"])),  # inv_freq is in no state dict
    "positions": (lambda: embedder("bert"), dict(trainable_modules=["layer.1", "projection"])),
    "a tower": (towers, dict(frozen_modules=["image"])),
    "adapters": (adapted, dict(trainable_modules=["projection"])),
    "everything trains": (lambda: embedder("llama"), {}),
}


class Arrived(Exception):
    """The model is in its wrappers, or about to be in those that move nothing, and no forward has run."""


def arrive(*given, **more):
    raise Arrived


moved_buffers: list[torch.Tensor] = []


def moved_by_fsdp(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor) or any(tensor is buffer for buffer in moved_buffers)


def left_behind(folder: Path, case: str, from_init: bool = False, **more) -> list[str]:
    """Names of parameters and buffers that are on no device, of a trainer whose device is DEVICE."""
    make, options = CASES[case]
    torch.manual_seed(0)
    args = DistTrainingArguments(
        output_dir=str(folder), max_steps=1, report_to=[], disable_tqdm=True, use_cpu=True, save_strategy="no",
        per_device_train_batch_size=2, **options | more,
    )  # fmt: skip
    PartialState._shared_state["device"] = args.__dict__["_setup_devices"] = DEVICE
    model, model_init = (None, make) if from_init else (make(), None)
    rows = [{"row": 0}] * 8
    loss = LossWithState()
    trainer = DistTrainer(
        model=model, args=args, train_dataset=rows, loss=loss, data_collator=list, model_init=model_init
    )
    assert trainer.accelerator.device == DEVICE
    type(trainer.strategy).wrapped = nn.parallel.DistributedDataParallel.__init__ = arrive
    trainer._fit_checkpoint = lambda: None  # it reads the weights, to compare them with a checkpoint's
    with pytest.raises(Arrived):
        Trainer.train(trainer)
    places = [*trainer.model.named_parameters(), *trainer.model.named_buffers(), *loss.named_buffers()]
    assert len(places) > 10
    if options and more.get("frozen_parts_fsdp") != "shard":
        assert all(p.requires_grad for p in trainer.model.parameters() if isinstance(p, DTensor))
    return [name for name, one in places if one.device != DEVICE and not moved_by_fsdp(one)]


@pytest.mark.parametrize(
    "mode, options",
    [
        ("single", {}),
        ("ddp", {}),
        ("fsdp-full", {}),
        ("fsdp-full", {"from_init": True}),
        ("fsdp-full", {"cpu_offload": True}),
        ("fsdp-full", {"frozen_parts_fsdp": "shard"}),
        ("hsdp-sharded", {"sharding": "HYBRID_SHARD", "sharding_group_size": 2}),
    ],
    ids=lambda given: given if isinstance(given, str) else "-".join(given),
)
def test_every_part_is_on_the_device_before_the_first_forward(tmp_path, mode, options, monkeypatch):
    monkeypatch.setattr(_fsdp_init, "_move_states_to_device", lambda _, buffers, device: moved_buffers.extend(buffers))
    make_mesh = ParallelismConfig.build_device_mesh
    monkeypatch.setattr(ParallelismConfig, "build_device_mesh", lambda self, device: make_mesh(self, "cpu"))

    def train(say) -> str:
        cases = ["a tower"] if mode == "hsdp-sharded" else CASES
        found = {name: left_behind(tmp_path / "run", name, **options) for name in cases}
        return str({name: names for name, names in found.items() if names})

    assert Run(mode, tmp_path / "log", train).result() == "{}"


def test_all_ranks_keep_frozen_parts_whole_as_the_smallest_device_allows(tmp_path):
    def choose(say) -> str:
        rank = PartialState(cpu=True).process_index
        memory = SimpleNamespace(mem_get_info=lambda: (0, 2**20 // (1 + 9 * rank)))
        with (
            mock.patch.multiple(
                torch.accelerator, is_available=lambda: True, current_accelerator=lambda: torch.device("cpu")
            ),
            mock.patch.object(torch, "get_device_module", lambda device: memory),
        ):
            plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
            replicate_frozen_parts(plugin, [nn.Linear(200, 200)], "auto")  # between both quarters
        return str(collectives.exchange([plugin.ignored_modules is not None]))

    assert Run("ddp", tmp_path / "log", choose).result() == "[[0], [0]]"

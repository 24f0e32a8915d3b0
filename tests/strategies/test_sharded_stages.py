"""FSDP2 inside the stages of a pipeline: when weights are gathered, on one of two copies with collectives that do
nothing."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.testing._internal.distributed.fake_pg import FakeStore

from hf_dist_ext.strategies.pipeline.sharded_stages import ShardedStages


class Layer(nn.Module):
    def __init__(self, name: str, events: list[str]):
        super().__init__()
        self.name, self.events = name, events
        self.inner = nn.Linear(4, 4)

    def forward(self, hidden):
        self.events.append(f"{self.name} runs")
        hidden.requires_grad and hidden.register_hook(lambda _: self.events.append(f"{self.name} ran back"))
        return self.inner(hidden)


@pytest.fixture
def copies():
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@pytest.mark.parametrize("frozen", [0, 2])
def test_weights_are_gathered_while_the_layer_before_runs(copies, monkeypatch, frozen):
    events: list[str] = []
    layers = [Layer(f"{stage}{i}", events) for stage in "ab" for i in range(3)]
    for layer in layers[:frozen]:
        layer.requires_grad_(False)
    words = nn.Linear(4, 4)  # stands before the layers of the first stage
    stages = [[words, *layers[:3]], layers[3:]]
    sharded = ShardedStages(stages, copies, frees=True)
    names = {id(layer): layer.name for layer in layers}
    unshard = FSDPParamGroup.unshard

    def noted(group, *given):
        before = group._all_gather_result
        unshard(group, *given)
        if group._all_gather_result is not before and id(group.modules[0]) in names:
            events.append(f"{names[id(group.modules[0])]} is gathered")

    monkeypatch.setattr(FSDPParamGroup, "unshard", noted)
    for _ in range(2):  # chunks
        for first in (0, 3):
            hidden = torch.ones(2, 4, requires_grad=True)
            for module in ([words] if first == 0 else []) + layers[first : first + 3]:
                hidden = module(hidden)
            hidden.sum().backward()
    forward = ["0 is gathered", "1 is gathered", "0 runs", "2 is gathered", "1 runs", "2 runs"]
    back = ["2 is gathered", "1 is gathered", "2 ran back", "0 is gathered", "1 ran back", "0 ran back"]
    of_chunk = [stage + event for stage in "ab" for event in forward + back]
    if frozen:
        assert [one for one in events if one.startswith("b")] == [one for one in 2 * of_chunk if one.startswith("b")]
        pending = [one for one in events if one.startswith("a") and one.endswith("gathered")]
        assert pending[:3] == ["a0 is gathered", "a1 is gathered", "a2 is gathered"]
    else:
        assert events == 2 * of_chunk
    assert not any(module._get_fsdp_state()._fsdp_param_group._all_gather_result for module in layers)
    assert sharded.root._get_fsdp_state()._is_root

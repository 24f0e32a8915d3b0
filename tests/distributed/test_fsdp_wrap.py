"""Tiny models that FSDP2 shards by `repeated_layer_classes`: one SGD step of two processes is that of one."""

import copy
import functools
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator, PartialState
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor

from hf_dist_ext.strategies.collectives import sharded_on_cpu
from hf_dist_ext.strategies.layers import repeated_layer_classes
from tests.distributed.forked import look
from tests.tiny_models import TEXT_CONFIGS, embedding_model, model_config, tiny_towers

ROWS = 4  # over all ranks
TOWERS = ("clip", "siglip")


class Towers(torch.nn.ModuleDict):
    def forward(self, **features):
        output = self["image" if "pixel_values" in features else "text"](**features)
        return next(output[name] for name in ("text_embeds", "image_embeds", "pooler_output") if name in output)


class Projected(torch.nn.Module):
    def __init__(self, backbone: torch.nn.Module):
        super().__init__()
        self.backbone, self.projection = backbone, torch.nn.Linear(32, 8)

    def forward(self, **features):
        return self.projection(self.backbone(**features)[0]).mean(dim=1)


def build(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if name in TOWERS:
        model = Towers(tiny_towers(name))
    else:
        model = Projected(embedding_model(model_config(name)).transformers_model)
    return model.double().eval()  # no dropout, so that the two steps can be equal


def build_batch(name: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    mask = torch.ones(ROWS, 6, dtype=torch.long)
    mask[1, 4:] = 0
    batch = {"input_ids": torch.randint(4, 32, (ROWS, 6)), "attention_mask": mask}
    if name in TOWERS:
        return batch | {"pixel_values": torch.randn(ROWS, 3, 16, 16, dtype=torch.float64)}
    return batch | {"target": torch.randn(ROWS, 8, dtype=torch.float64)}


def mean_loss(name: str, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean over rows, so that the mean over equal ranks is the mean over the whole batch."""
    text = {key: batch[key] for key in ("input_ids", "attention_mask")}
    if name not in TOWERS:
        return (model(**text) * batch["target"]).sum(dim=-1).mean()
    return (model(**text) * model(pixel_values=batch["pixel_values"])).sum(dim=-1).mean()


def take_step(name, model, batch, accelerator=None) -> dict[str, torch.Tensor]:
    """Every parameter after one step, whole."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
        rows = ROWS // accelerator.num_processes
        batch = {key: value.split(rows)[accelerator.process_index] for key, value in batch.items()}
    mean_loss(name, model, batch).backward()
    optimizer.step()
    parameters = {key: value.detach() for key, value in model.named_parameters()}
    return {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in parameters.items()}


def examine(name: str, accelerator: Accelerator) -> dict:
    model, batch = build(name), build_batch(name)
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    expected = take_step(name, copy.deepcopy(model), batch)

    plugin = accelerator.state.fsdp_plugin  # one Accelerator for all models: give each the policy it starts with
    plugin.auto_wrap_policy = transformer_auto_wrap_policy
    plugin.transformer_cls_names_to_wrap = repeated_layer_classes(model)
    layers = [m for m in model.modules() if type(m).__name__ in plugin.transformer_cls_names_to_wrap]
    found = take_step(name, model, batch, accelerator)
    assert found.keys() == expected.keys()
    return {
        "num_layers": len(layers),
        "num_sharded_layers": sum(isinstance(layer, FSDPModule) for layer in layers),
        "num_parameters": len(found),
        "num_sharded_parameters": sum(isinstance(parameter, DTensor) for parameter in model.parameters()),
        "largest_change": max((expected[key] - before[key]).abs().max().item() for key in before),
        "largest_difference": max((expected[key] - found[key]).abs().max().item() for key in before),
    }


def examine_all(folder: Path) -> dict:
    PartialState(cpu=True)
    with sharded_on_cpu():
        accelerator = Accelerator(cpu=True)
    assert accelerator.is_fsdp2 and accelerator.num_processes == 2, accelerator.state
    return {name: examine(name, accelerator) for name in (*TEXT_CONFIGS, *TOWERS)}


@functools.cache
def found() -> dict:
    return look("multi_gpu_fsdp", 2, examine_all)


@pytest.mark.parametrize("name", [*TEXT_CONFIGS, *TOWERS])
def test_every_layer_is_sharded_and_one_step_equals_the_single_process_step(name):
    result = found()[name]
    assert result["num_layers"] == (4 if name in TOWERS else 2)
    assert result["num_sharded_layers"] == result["num_layers"]
    assert result["num_sharded_parameters"] == result["num_parameters"] > 10
    assert result["largest_change"] > 1e-3
    assert result["largest_difference"] < 1e-12 * max(1, result["largest_change"])

"""What a run's model keeps and computes in a forward, found by running it on tensors that have shapes and no bytes.

    python -m hf_dist_ext.tasks.trace --config run.json      # started by `hf-dist plan`

(1) the run's model is built on torch's meta device, with its adapters, and frozen as in training: a laptop traces a
    model that it could never hold. Where a group of devices can share its layers it is also traced as one of such a
    group has it
(2) some rows of each column go forward, with pictures of the size that the model takes (planner/pictures.py)
(3) what is kept and computed is written down layer by layer (tasks/trace_record.py)

It is a process of its own, since the planner imports no torch. Prints one line of JSON, which
`planner/traced.py` reads.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._pytree import tree_leaves

from hf_dist_ext import policy
from hf_dist_ext.errors import UsageError
from hf_dist_ext.failures import exit_on_usage_error
from hf_dist_ext.planner import pictures
from hf_dist_ext.planner.catalog import has_layers_to_split, heads_of
from hf_dist_ext.planner.from_run import workload_of
from hf_dist_ext.planner.shape_config import read_model_config
from hf_dist_ext.planner.workload import Cast, Column, Workload
from hf_dist_ext.run.read import load_run
from hf_dist_ext.strategies import plans
from hf_dist_ext.strategies.layers import is_multiplied
from hf_dist_ext.tasks import trace_4bit
from hf_dist_ext.tasks.trace_record import Accelerator, Recorder, instead, layers_of, plain_name

ROWS = 32  # what does not grow with rows, such as tables of positions, is spread over them
ROWS_OF_PICTURES = 4  # a tower may go over each by itself
MOST_WAYS = 8  # of splitting layers over devices


# ---- (1) ----


def build(run: Any, work: Workload) -> nn.Module:
    """The run's model, in training mode, on the meta device."""
    from transformers import AutoConfig

    from hf_dist_ext.frozen.plan import plan_freezing
    from hf_dist_ext.frozen.run_mode import set_frozen_mode
    from hf_dist_ext.models.backbones import parse_config
    from hf_dist_ext.tasks.adapters import add_adapters

    fields, given = run.options, run.given
    options: dict[str, Any] = {"trust_remote_code": fields.trust_remote_code}
    if fields.model_config is not None:
        config = parse_config(fields.model_config)
    else:
        config = AutoConfig.from_pretrained(fields.model_name_or_path, revision=fields.model_revision, **options)
    options["dtype"] = {4: torch.float32, 2: torch.bfloat16, 8: torch.float64}[work.load_bytes]
    if fields.attn_implementation in ("eager", "sdpa"):  # the others keep what sdpa keeps
        options["attn_implementation"] = fields.attn_implementation
    with torch.device("meta"):
        if work.has_towers:
            model = _towers(config, work, options)
        elif work.is_embedding:
            model = _embedding_model(config, fields, work, options)
        else:
            model = _generator(config, options)
        model = add_adapters(model, fields)
        if work.is_in_4_bits and work.autocast_bytes:
            trace_4bit.as_bitsandbytes_runs_adapters(model)
        freezing = plan_freezing(model, given.get("trainable_modules"), given.get("frozen_modules"))
        model.train()
        if freezing is not None:
            freezing.apply(model, has_autocast=work.autocast_bytes is not None)
            set_frozen_mode(model)
    return model


def cast_weights(model: nn.Module, cast: Cast) -> None:
    """To half precision, those that FSDP ("products" with a loss over embeddings, else "all") or DeepSpeed ("all")
    hand to a forward so."""
    for name, parameter in model.named_parameters():
        if cast == "all" or is_multiplied(model.get_submodule(name.rpartition(".")[0]), parameter):
            parameter.data = parameter.data.to(torch.bfloat16)


def _embedding_model(config: Any, fields: Any, work: Workload, options: dict[str, Any]) -> nn.Module:
    from hf_dist_ext.models.backbones import build_backbone
    from hf_dist_ext.models.embedding_model import EmbeddingModel
    from hf_dist_ext.models.hybrid_model import HybridEmbeddingModel

    backbone = build_backbone(config, **options)
    if work.is_in_4_bits:
        half = torch.bfloat16 if work.autocast_bytes else torch.float32
        backbone = trace_4bit.in_4_bits(backbone, half)
    if work.token_dim is not None:
        heads = {"special_ids": (), "token_dim": work.token_dim, "projection_dim": fields.projection_dim}
        return HybridEmbeddingModel(backbone, pooling=fields.pooling, **heads)
    pooling = policy.TOKENS if work.leaves_tokens else fields.pooling
    return EmbeddingModel(backbone, pooling=pooling, projection_dim=fields.projection_dim)


def _towers(config: Any, work: Workload, options: dict[str, Any]) -> nn.Module:
    from hf_dist_ext.models.towers import TowerModel
    from hf_dist_ext.tasks.image_pairs import part_of

    del options["trust_remote_code"]
    parts = {name: part_of(config, name) for name in ("text", "image")}
    towers = {name: kind._from_config(part, **options) for name, (kind, part) in parts.items()}
    return TowerModel(towers, {column.name: column.tower for column in work.columns})


def _generator(config: Any, options: dict[str, Any]) -> nn.Module:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    return auto.from_config(config, **options)


@contextlib.contextmanager
def split_layers(model: nn.Module, ways: int) -> Iterator[None]:
    """As one device of `ways` has them by transformers' plan for the model, or ours (strategies/plans.py). A matrix
    that is cut and put together again, and word embeddings, whose gradient is whole, stay whole: a bound."""
    part, whole = plans.planned(model), []
    for name, style in plans.styles_of(part).items():
        axis = {"colwise": 0, "rowwise": 1}.get(style.removeprefix("packed_").removesuffix("_of_3"))
        for inner, module in part.get_submodule(name).named_modules():
            if axis is None or not isinstance(module, nn.Linear) or f"lora_{'AB'[axis]}" in inner:
                continue  # of an adapter's two factors each device has one whole
            for key, one in module.named_parameters(recurse=False):
                shape = [size // ways if at == axis else size for at, size in enumerate(one.shape)]
                whole.append((module, key, one))
                part_of_it = torch.empty(shape, dtype=one.dtype, device="meta")
                setattr(module, key, nn.Parameter(part_of_it, one.requires_grad))
    try:
        yield
    finally:
        for module, key, one in whole:
            setattr(module, key, one)


def ways_to_split(model: nn.Module, work: Workload) -> int:
    """The fewest devices that can share the model's layers; 1: there is no plan for it."""
    is_whole = not work.is_embedding or work.token_dim is not None or work.is_in_4_bits
    if is_whole or not has_layers_to_split(work.config):
        return 1
    try:
        plans.planned(model)
    except UsageError:
        return 1
    heads = heads_of(work.config)
    return next((ways for ways in range(2, MOST_WAYS + 1) if not any(number % ways for number in heads)), 1)


# ---- (2) ----


def features(work: Workload, column: Column, rows: int) -> dict[str, Any]:
    """Inputs of some rows: ids and mask, and pictures for the rows that have one."""
    if column.tower == "image":
        return {"column": column.name, **_pictures(work.config, rows)}
    ids = torch.zeros(rows, column.length, dtype=torch.long)
    inputs: dict[str, Any] = {"input_ids": ids}
    if work.has_padding:
        inputs["attention_mask"] = torch.ones_like(ids)
    if work.has_towers:
        inputs["column"] = column.name
    if work.config["model_type"] in pictures.QWEN:  # else they follow from where its pictures are
        inputs["position_ids"] = ids.expand(3, rows, column.length)
    if column.images:
        inputs |= _pictures(work.config, rows * column.images)
    if not work.is_embedding:
        inputs["labels"] = ids.clone()
    return inputs


def _pictures(config: Any, count: int) -> dict[str, torch.Tensor]:
    """As the model's processor gives them, with its most tiles."""
    kind, vision = config["model_type"], config["vision_config"]
    if kind in pictures.QWEN:
        side, channels = pictures.grid(vision), vision.get("in_channels") or vision.get("in_chans") or 3
        values = channels * vision["temporal_patch_size"] * vision["patch_size"] ** 2
        grid = torch.tensor([[1, side, side]] * count)
        return {"pixel_values": torch.zeros(count * side * side, values), "image_grid_thw": grid}
    side, tiles = pictures.side(vision, "image_size"), pictures.images_of_picture(config)
    image = (vision.get("num_channels", 3), side, side)
    if kind == "llava_next":
        rows, columns = pictures.most_tiles(config)
        sizes = torch.tensor([[rows * side, columns * side]] * count)
        return {"pixel_values": torch.zeros(count, tiles, *image), "image_sizes": sizes}
    if kind in pictures.SHUFFLING:
        return {"pixel_values": torch.zeros(count, tiles, *image)}
    return {"pixel_values": torch.zeros(count * tiles, *image)}


def _windows(module: nn.Module, grid: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of Qwen2.5-VL's tower, which finds them by values."""
    from transformers.vision_utils import get_vision_window_index

    sizes = (module.spatial_merge_size, module.window_size, module.patch_size)
    with unset_fake_temporarily():
        index, ends = get_vision_window_index(torch.tensor(grid.tolist()), *sizes)
        lists = index.tolist(), ends.tolist()
    return dict(zip(("window_index", "cu_window_seqlens"), map(torch.tensor, lists), strict=True))


# ---- (3) ----


def record(mode: FakeTensorMode, model: nn.Module, work: Workload, column: Column) -> tuple[dict[str, Any], set[str]]:
    """One forward of a column by a model from the meta device -> its layers: copies of weights, everything else per
    row; and the names of the parameters that its backward gives a gradient to."""
    rows = ROWS_OF_PICTURES if column.images else ROWS
    with _without_values(work.has_padding), mode:
        inputs, images = features(work, column, rows), {}
        if column.images and column.tower != "image" and work.config["model_type"] in pictures.KINDS:
            tokens = rows * column.images * pictures.image_tokens(work.config)
            images = {"image_tokens": tokens, "images": column.images * pictures.images_of_picture(work.config)}
        recorder, outputs = _recorded(model, inputs, Accelerator(work.mask_bytes, work.has_padding, **images), work)
        leaves, layers = recorder.reach(outputs)
    forward, reached = recorder.forward, set()
    for name, one in model.named_parameters():
        own = plain_name(name)
        if id(one) in leaves or (one.device.type == "meta" and any(own.startswith(f"{layer}.") for layer in layers)):
            reached.add(own)
    for part in forward.parts:
        for name in ("input", "beside", "saved", "products", "backward", "largest"):
            setattr(part, name, getattr(part, name) / rows)
    return asdict(forward), reached


@contextlib.contextmanager
def _without_values(has_padding: bool) -> Iterator[None]:
    """Models compare the number of image tokens with that of image features, which tensors without values can not say;
    towers that take pictures of any size read from small tensors how to cut them, so those keep their values. Without
    padding a kernel needs no copies of keys and values for heads that share them."""
    options = {"TRANSFORMERS_DISABLE_TORCH_CHECK": "1"} | ({} if has_padding else {"TRANSFORMERS_SDPA_FORCE_GQA": "1"})
    before = {name: os.environ[name] for name in options if name in os.environ}
    limit, fake_tensor.CONSTANT_NUMEL_LIMIT = fake_tensor.CONSTANT_NUMEL_LIMIT, 4096
    os.environ.update(options)
    try:
        yield
    finally:
        fake_tensor.CONSTANT_NUMEL_LIMIT = limit
        for name in options:
            del os.environ[name]
        os.environ.update(before)


def _recorded(
    model: nn.Module, inputs: dict[str, Any], kernels: Accelerator, work: Workload
) -> tuple[Recorder, list[torch.Tensor]]:
    """And what the loss reads."""
    recorder = Recorder(model, [one for one in inputs.values() if isinstance(one, torch.Tensor)])
    hooks = torch.autograd.graph.saved_tensors_hooks(recorder.keep, lambda saved: saved)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=work.autocast_bytes is not None)
    with contextlib.ExitStack() as stack:
        for module in model.modules() if "image_grid_thw" in inputs else ():
            if hasattr(module, "fullatt_block_indexes"):
                windows = partial(module.forward, **_windows(module, inputs["image_grid_thw"]))
                stack.enter_context(instead(module, windows))
        for one in (kernels, recorder, hooks, autocast):
            stack.enter_context(one)
        output = model(**inputs)
        outputs = tree_leaves(dict(output)) if work.is_embedding else [output.loss]
        outputs = [one for one in outputs if one is not None and one.is_floating_point()]
        for vectors in outputs if work.is_embedding else ():  # they meet the gradients that the loss has left
            (vectors * torch.empty_like(vectors)).sum()
    return recorder, outputs


def shape(run: Any, work: Workload) -> dict[str, Any]:
    """`whole`: parameters as `forward.Parameter` takes them, and every column's forward with the weights that wrappers
    cast. `split`: where devices can share the layers, the same of one of so many `ways`."""
    model, mode = build(run, work), FakeTensorMode(allow_non_fake_inputs=True)
    width = getattr(model, "embedding_dim", None) or work.embedding_dim
    found: dict[str, Any] = {"embedding_dim": width, "split": None, "whole": _found(mode, model, work)}
    if (ways := ways_to_split(model, work)) > 1:
        found["split"] = {"ways": ways, **_split(mode, run, work, model, ways)}
    for cast in ("products", "all") if work.is_embedding else ("all",):  # the last casts most
        if work.autocast_bytes and not work.is_in_4_bits:
            cast_weights(model, cast)
            _add(found["whole"], mode, model, work, cast)
    return found


def _split(mode: FakeTensorMode, run: Any, work: Workload, model: nn.Module, ways: int) -> dict[str, Any]:
    """`shared`: of one of so many `ways`; `whole`: where weights have another precision once devices share layers."""
    whole = None
    if work.split_bytes != work.load_bytes:
        model = build(run, replace(work, load_bytes=work.split_bytes))
        whole = _found(mode, model, work)
    with split_layers(model, ways):
        return {"whole": whole, "shared": _found(mode, model, work)}


def _found(mode: FakeTensorMode, model: nn.Module, work: Workload) -> dict[str, Any]:
    """Before a wrapper casts weights."""
    layers = [plain_name(name) for name, _ in layers_of(model)]
    parameters = {}
    for name, one in model.named_parameters():
        own = plain_name(name)
        layer = next((layer for layer in layers if own.startswith(layer + ".")), None)
        is_table = one.dim() > 1 and not is_multiplied(model.get_submodule(name.rpartition(".")[0]), one)
        columns = one.shape[-1] if one.dim() > 1 else 0
        item = policy.bytes_in_4_bits(one.numel()) / one.numel() if one.dtype == torch.uint8 else one.element_size()
        parameters[own] = [one.numel(), item, one.requires_grad, layer, columns, is_table]
    found: dict[str, Any] = {"parameters": parameters, "columns": {}, "packed": {}}
    reached = _add(found, mode, model, work, "nothing")
    for name, one in parameters.items():
        one.append(one[2] and name in reached)
    return found


def _add(found: dict[str, Any], mode: FakeTensorMode, model: nn.Module, work: Workload, cast: Cast) -> set[str]:
    """Every column's forward; `packed`: without padding. The parameters that get a gradient by some column."""
    reached: set[str] = set()
    for name, each in (("columns", work), ("packed", work.packed)):
        if name == "columns" or work.packs:
            for column in work.columns:
                forward, more = record(mode, model, each, column)
                found[name].setdefault(column.name, {})[cast] = forward
                reached |= more
    return reached


def main(argv: list[str]) -> None:
    with exit_on_usage_error():
        run = load_run(argv)
        config = run.options
        full = read_model_config(config.model_config, config.model_name_or_path, config.model_revision)
        work = workload_of(run, full)
        try:
            report = shape(run, work)
        except UsageError:
            raise
        except Exception as error:  # whatever a model's code does with tensors that have no values
            words = re.sub(r"\s+", " ", f"{type(error).__name__}: {error}")[:300]
            raise UsageError(f"{full['model_type']} does not trace without memory: {words}") from error
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1:])

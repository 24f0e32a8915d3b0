"""What a run's model keeps and computes in a forward, found by running it on tensors that have shapes and no bytes.

    python -m hf_dist_ext.tasks.trace --config run.json      # started by `hf-dist plan`

(1) the run's model is built on torch's meta device, with its adapters, and frozen as in training: a laptop traces a
    model that it could never hold. Where a group of devices can share its layers it is also traced as one of such a
    group has it
(2) some rows of each column go forward, with pictures of the size that the model takes (tasks/trace_pictures.py)
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
from hf_dist_ext.models.embedder import embedder_of
from hf_dist_ext.planner.from_run import workload_of
from hf_dist_ext.planner.local_files import config_file, processor_file
from hf_dist_ext.planner.workload import BatchColumn, Cast, Workload
from hf_dist_ext.run.read import load_run
from hf_dist_ext.strategies import plans
from hf_dist_ext.strategies.base import meanwhile
from hf_dist_ext.strategies.layers import is_multiplied
from hf_dist_ext.tasks import trace_4bit
from hf_dist_ext.tasks import trace_pictures as pictures
from hf_dist_ext.tasks.trace_record import Accelerator, Recorder, layers_of, plain_name

ROWS = 32  # what does not grow with rows, such as tables of positions, is spread over them
ROWS_OF_PICTURES = 4  # a tower may go over each by itself
MOST_WAYS = 8  # of splitting layers over devices


# ---- (1) ----


def complete_config(fields: Any) -> dict[str, Any]:
    """The configuration of a run's model as plain JSON, with the defaults of its class, the usual names of fields that
    the class calls otherwise, `tiles_of_picture` where its processor says so, and `picture`: what one comes to. Raises
    UsageError."""
    found = _as_dict(_config(fields))
    tiles = _tiles_of_picture(found["model_type"], fields) if fields.model_config is None else None
    found |= {} if tiles is None else {"tiles_of_picture": tiles}
    picture = pictures.facts(found)
    return found if picture is None else found | {"picture": picture}


def _config(fields: Any) -> Any:
    from transformers import AutoConfig

    from hf_dist_ext.models.backbones import one_line, parse_config

    if fields.model_config is not None:
        return parse_config(fields.model_config)
    name, revision = fields.model_name_or_path, fields.model_revision
    path = config_file(name, revision)
    place = path.parent if os.path.isdir(name) else name
    try:
        return AutoConfig.from_pretrained(place, revision=revision, trust_remote_code=fields.trust_remote_code)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {one_line(error)}. Give a complete model folder.") from None


def _as_dict(config: Any) -> dict[str, Any]:
    usual = {name: getattr(config, name, None) for name in config.attribute_map}
    parts = {name: _as_dict(part) for name in config.sub_configs if (part := getattr(config, name, None)) is not None}
    return config.to_dict() | usual | parts


def _tiles_of_picture(model_type: str, fields: Any) -> int | None:
    """Images that the tower sees of one picture at most, the whole picture made small included; None: not known."""
    path = processor_file(fields.model_name_or_path, fields.model_revision)
    if model_type not in (*pictures.SHUFFLING, "internvl") or path is None:
        return None
    content = json.loads(path.read_text(encoding="utf-8"))
    processor = content.get("image_processor", content)
    if model_type == "internvl":  # its processor cuts, whatever the image processor's own default is
        most = processor.get("max_patches", 12) if processor.get("crop_to_patches", True) else 1
        return most + (most > 1)
    if not processor.get("do_image_splitting", True):
        return 1
    tile = (processor.get("max_image_size") or {}).get("longest_edge")
    side = (processor.get("size") or {}).get("longest_edge")
    return None if not tile or not side else (-(-side // tile)) ** 2 + (side > tile)


def build(run: Any, work: Workload) -> nn.Module:
    """The run's model, in training mode, on the meta device."""
    from hf_dist_ext.frozen.run_mode import set_frozen_mode
    from hf_dist_ext.frozen.who_trains import plan_freezing
    from hf_dist_ext.tasks.adapters import adapt, add_adapters

    fields, given, config = run.options, run.given, _config(run.options)
    dtype = {4: torch.float32, 2: torch.bfloat16, 8: torch.float64}[work.load_bytes]
    options: dict[str, Any] = {"trust_remote_code": fields.trust_remote_code, "dtype": dtype}
    if fields.attn_implementation in ("eager", "sdpa"):  # the others keep what sdpa keeps
        options["attn_implementation"] = fields.attn_implementation
    with torch.device("meta"):
        if work.is_embedding:
            model = _embedding_model(config, fields, given, work, options)
            adapt(model, fields)
        else:
            model = add_adapters(_generator(config, options), fields)
        if work.is_in_4_bits and work.autocast_bytes:
            trace_4bit.as_bitsandbytes_runs_adapters(model)
        freezing = plan_freezing(model, given.get("trainable_modules"), given.get("frozen_modules"))
        model.train()
        if freezing is not None:
            freezing.apply(model, has_autocast=work.autocast_bytes is not None)
            set_frozen_mode(model)
    return model


def cast_weights(model: nn.Module, cast: Cast) -> None:
    """To half precision, those that FSDP ("matmul" with a loss over embeddings, else "all") or DeepSpeed ("all")
    hand to a forward so."""
    for name, parameter in model.named_parameters():
        if cast == "all" or is_multiplied(model.get_submodule(name.rpartition(".")[0]), parameter):
            parameter.data = parameter.data.to(torch.bfloat16)


def _embedding_model(config: Any, fields: Any, given: dict[str, Any], work: Workload, options: dict[str, Any]) -> Any:
    from hf_dist_ext.models import from_run
    from hf_dist_ext.tasks.readers import stand_in

    pooling = policy.TOKENS if work.leaves_tokens else given.get("pooling")
    options |= {"pooling": pooling, "projection_dim": given.get("projection_dim")}
    if fields.model_config is None:
        model = from_run.build(fields.model_name_or_path, revision=fields.model_revision, **options)
    else:
        model = from_run.build(model_config=config, tokenizer=stand_in(fields.model_config), **options)
    if work.is_in_4_bits:
        half = torch.bfloat16 if work.autocast_bytes else torch.float32
        model[0].model = trace_4bit.in_4_bits(model[0].model, half)
    return model


def _generator(config: Any, options: dict[str, Any]) -> nn.Module:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    return auto.from_config(config, **options)


@contextlib.contextmanager
def split_layers(model: nn.Module, ways: int) -> Iterator[None]:
    """As one device of `ways` has them by transformers' plan for the model (strategies/plans.py). Word embeddings,
    whose gradient is whole, stay whole: a bound."""
    part, whole = plans.planned(model), []
    for name, style in plans.styles_of(part).items():
        axis = {"colwise": 0, "rowwise": 1}.get(style)
        for module in part.get_submodule(name).modules():
            if axis is None or not isinstance(module, nn.Linear):
                continue
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


def sizes_to_split(run: Any, work: Workload, model: nn.Module) -> list[int]:
    """How many devices can share the model's layers, by the rules of a run (strategies/plans.py)."""
    is_whole = not work.is_embedding or run.options.use_lora
    return [] if is_whole else [size for size in range(2, MOST_WAYS + 1) if _can_be_split(run, model, size)]


def _can_be_split(run: Any, model: nn.Module, size: int) -> bool:
    config = _config(run.options)
    try:
        plans.check_can_be_split(config, size)
        plans.planned(model)
    except UsageError:
        return False
    return True


# ---- (2) ----


def features(work: Workload, column: BatchColumn, rows: int) -> dict[str, Any]:
    """Inputs of some rows: ids and mask, and pictures for the rows that have one."""
    if column.tower == "image":
        return _pictures(work.config, rows)
    ids = torch.zeros(rows, column.length, dtype=torch.long)
    inputs: dict[str, Any] = {"input_ids": ids}
    if work.has_padding:
        inputs["attention_mask"] = torch.ones_like(ids)
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


def record(
    mode: FakeTensorMode, model: nn.Module, work: Workload, column: BatchColumn
) -> tuple[dict[str, Any], set[str]]:
    """One forward of a column by a model from the meta device -> its layers: copies of weights, everything else per
    row; and the names of the parameters that its backward gives a gradient to."""
    rows = ROWS_OF_PICTURES if column.images else ROWS
    with _without_values(work.has_padding), mode:
        inputs, images = features(work, column, rows), {}
        if column.images and column.tower != "image" and work.config["model_type"] in pictures.KINDS:
            tokens = rows * column.images * pictures.image_tokens(work.config)
            images = {"image_tokens": tokens, "images": column.images * pictures.images_of_picture(work.config)}
        recorder, outputs = _recorded(
            model, column, inputs, Accelerator(work.mask_bytes, work.has_padding, **images), work
        )
        leaves, layers = recorder.reach(outputs)
    forward, reached = recorder.forward, set()
    for name, one in model.named_parameters():
        own = plain_name(name)
        if id(one) in leaves or (one.device.type == "meta" and any(own.startswith(f"{layer}.") for layer in layers)):
            reached.add(own)
    for part in forward.parts:
        for name in ("input", "beside", "saved", "multiply_adds", "backward", "largest"):
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


def _embeddings(model: Any, column: BatchColumn, inputs: dict[str, Any]) -> list[Any]:
    kinds = getattr(model[0], "modality_config", {})
    modality = "image" if column.tower == "image" else "message" if "message" in kinds else "text"
    return tree_leaves(embedder_of(model).call(model, inputs, column.name, {"modality": modality}))


def _recorded(
    model: nn.Module, column: BatchColumn, inputs: dict[str, Any], kernels: Accelerator, work: Workload
) -> tuple[Recorder, list[torch.Tensor]]:
    """And what the loss reads."""
    recorder = Recorder(model, [one for one in inputs.values() if isinstance(one, torch.Tensor)])
    hooks = torch.autograd.graph.saved_tensors_hooks(recorder.keep, lambda saved: saved)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=work.autocast_bytes is not None)
    with contextlib.ExitStack() as stack:
        for module in model.modules() if "image_grid_thw" in inputs else ():
            by_values = {}
            if hasattr(module, "fullatt_block_indexes"):
                by_values = _windows(module, inputs["image_grid_thw"])
            elif hasattr(module, "interpolation_mode"):  # Qwen3-VL's tower: four places of a table for each patch
                patches = len(inputs["pixel_values"])
                by_values = {
                    "interp_indices": torch.zeros(patches, 4, dtype=torch.long),
                    "interp_weights": torch.zeros(patches, 4),
                }
            if by_values:
                stack.enter_context(meanwhile(module, forward=partial(module.forward, **by_values)))
        for one in (kernels, recorder, hooks, autocast):
            stack.enter_context(one)
        outputs = _embeddings(model, column, inputs) if work.is_embedding else [model(**inputs).loss]
        outputs = [one for one in outputs if one is not None and one.is_floating_point()]
        for vectors in outputs if work.is_embedding else ():  # they meet the gradients that the loss has left
            (vectors * torch.empty_like(vectors)).sum()
    return recorder, outputs


def shape(run: Any, work: Workload) -> dict[str, Any]:
    """`whole`: parameters as `forward.Parameter` takes them, and every column's forward with the weights that wrappers
    cast. `split`: where devices can share the layers, the same of one of so many `ways`, the least of the
    `sizes` that a group may have."""
    model, mode = build(run, work), FakeTensorMode(allow_non_fake_inputs=True)
    width = model.get_embedding_dimension() if work.is_embedding else work.embedding_dim
    found: dict[str, Any] = {"embedding_dim": width, "split": None, "whole": _found(mode, model, work)}
    if sizes := sizes_to_split(run, work, model):
        found["split"] = {"sizes": sizes, "ways": sizes[0], **_split(mode, run, work, model, sizes[0])}
    for cast in ("matmul", "all") if work.is_embedding else ("all",):  # the last casts most
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


def counted(run: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The complete configuration of the run's model, and what a trace of it finds."""
    config = complete_config(run.options)
    try:
        return config, shape(run, workload_of(run, config))
    except UsageError:
        raise
    except Exception as error:  # whatever a model's code does with tensors that have no values
        words = re.sub(r"\s+", " ", f"{type(error).__name__}: {error}")[:300]
        raise UsageError(f"{config['model_type']} does not trace without memory: {words}") from error


def main(argv: list[str]) -> None:
    with exit_on_usage_error():
        found = counted(load_run(argv))
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])

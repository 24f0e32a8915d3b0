"""The planner's second engine: torch runs the model without its memory and reports what it would have held.

    python -m hf_dist_ext.tasks.trace --config run.json            # beside the closed form: `hf-dist plan --trace`
    python -m hf_dist_ext.tasks.trace --shape --config run.json    # for a model without a closed form

(1) the model is built under FakeTensorMode: every tensor has a shape and no bytes, so that any size fits a laptop
(2) gradients and optimizer state exist, as from the second chunk on; then a chunk's forward and backward are tracked
    by torch's MemTracker, temporaries included
(3) `--shape`: parameters by name and layer, and bytes and multiply-adds per row from traces of two batches

It is a process of its own, since the planner imports no torch. CPU kernels are traced: an accelerator's save the same
values, but a mask of dropout takes one byte there and four here. Prints one line of JSON.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.flop_counter import FlopCounterMode

from hf_dist_ext.errors import UsageError
from hf_dist_ext.failures import exit_on_usage_error
from hf_dist_ext.planner.shape_config import read_model_config
from hf_dist_ext.planner.workload import Column, Workload, workload_of
from hf_dist_ext.policy import TOKENS
from hf_dist_ext.run.read import load_run
from hf_dist_ext.strategies.layers import is_multiplied, repeated_layer_classes

ROWS = (256, 512)  # of the traces whose difference is what a row costs


class Tracker(MemTracker):
    """MemTracker that leaves frozen parameters alone. torch 2.13 hooks the gradient of every parameter, which raises
    for those that have none; remove when it asks `requires_grad`."""

    def _track_module_params_and_buffers(self, module: nn.Module, install_grad_hooks: bool = True) -> tuple[int, int]:
        for parameter in module.parameters():
            if not parameter.requires_grad and self._param_to_grad_hook_handles.get(parameter) is None:
                no_hook = SimpleNamespace(remove=lambda: None)
                self._param_to_grad_hook_handles[parameter] = (no_hook, no_hook)
        return super()._track_module_params_and_buffers(module, install_grad_hooks)


# ---- (1) ----


def build(run: Any, work: Workload) -> nn.Module:
    """The run's model, of random or no weights; call it under FakeTensorMode or on the meta device."""
    from transformers import AutoConfig

    from hf_dist_ext.models.backbones import parse_config
    from hf_dist_ext.models.embedding_model import EmbeddingModel

    fields = run.options
    if fields.model_config is not None:
        config = parse_config(fields.model_config)
    else:
        options = {"trust_remote_code": fields.trust_remote_code, "revision": fields.model_revision}
        config = AutoConfig.from_pretrained(fields.model_name_or_path, **options)
    dtype = {4: torch.float32, 2: torch.bfloat16, 8: torch.float64}[work.load_bytes]
    if work.is_embedding:
        pooling = TOKENS if work.leaves_tokens else fields.pooling
        options = {"pooling": pooling, "projection_dim": fields.projection_dim, "dtype": dtype}
        model: nn.Module = EmbeddingModel.from_config(
            config, attn_implementation=fields.attn_implementation, **options
        )
    else:
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

        auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
        model = auto.from_config(config, dtype=dtype)
    if work.lora is not None:
        from hf_dist_ext.tasks.adapters import add_adapters

        model = add_adapters(model, fields)
    for name, parameter in model.named_parameters():
        if work.lora is None or not work.trains(name):
            parameter.requires_grad_(work.trains(name))
        if parameter.requires_grad and work.is_frozen and work.autocast_bytes and parameter.dtype.itemsize < 4:
            parameter.data = parameter.data.float()
    return model.train()


def features(run: Any, work: Workload, column: Column, rows: int) -> dict[str, torch.Tensor]:
    """Inputs of some rows: ids and mask, and pictures for the rows that have one."""
    config, inputs = work.config, {}
    if column.tower != "image":
        ids = torch.zeros(rows, column.length, dtype=torch.long)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if column.images:
        vision = config["vision_config"]
        size = vision["image_size"] if isinstance(vision["image_size"], int) else vision["image_size"][0]
        inputs["pixel_values"] = torch.zeros(rows * column.images, vision.get("num_channels", 3), size, size)
    if not work.is_embedding:
        inputs["labels"] = inputs["input_ids"].clone()
    return inputs


# ---- (2) ----


def tracked(run: Any, work: Workload, columns: Mapping[Column, int], is_checkpointed: bool) -> dict[str, float]:
    """Peak bytes by kind while the given rows of the columns go forward and backward together."""
    with FakeTensorMode():
        model = build(run, work)
        if is_checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        trained = [one for one in model.parameters() if one.requires_grad]
        # foreach would hold lists of temporaries that a fused kernel does not have
        is_sgd = work.optimizer.startswith("sgd")
        optimizer = torch.optim.SGD(trained) if is_sgd else torch.optim.AdamW(trained, foreach=False)
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        inputs = [features(run, work, column, rows) for column, rows in columns.items()]
        tracker = Tracker()
        tracker.track_external(model, optimizer, *(one for batch in inputs for one in batch.values()))
        half = work.autocast_bytes is not None
        with tracker:
            total = 0.0
            for batch in inputs:
                with torch.autocast("cpu", torch.bfloat16, enabled=half):
                    output = model(**batch)
                loss = getattr(output, "loss", None)
                total = total + (_squares(output.embeddings) if loss is None else loss)
                del output, loss
            total.backward()
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    kinds = {str(getattr(kind, "value", kind)): size for kind, size in peak.items()}
    return {
        "parameters": kinds["Parameter"],
        "gradients": kinds["Gradient"],
        "optimizer": kinds["Optstate"],
        "activations": kinds["Activation"] + kinds["Temp"],
    }


def _squares(embeddings: torch.Tensor | Mapping[str, torch.Tensor]) -> torch.Tensor:
    rows = embeddings["vectors"] if isinstance(embeddings, Mapping) else embeddings
    return rows.float().square().sum()


def products(run: Any, work: Workload, column: Column, rows: int) -> float:
    """Multiply-adds of a forward. Counted apart, since the counter keeps what checkpointing would free."""
    with FakeTensorMode(), FlopCounterMode(display=False) as counter, torch.no_grad():
        build(run, work)(**features(run, work, column, rows))
    return counter.get_total_flops() / 2


def compare(run: Any, work: Workload) -> dict[str, Any]:
    """Closed form beside trace, one device, at the run's own chunk."""
    from hf_dist_ext.planner.memory import Settings, held, is_cut, model_of

    settings = Settings(is_checkpointed=work.is_checkpointed)
    columns = {one: min(one.rows, work.rows_of_chunk(one.length)) for one in work.columns}
    if is_cut(work, settings):
        costliest = max(columns, key=lambda one: columns[one] * work.work(one).plain.saved)
        columns = {costliest: columns[costliest]}
    whole, of_chunk = model_of(work).whole, held(work, settings)
    closed = {
        "parameters": whole.frozen_stored + whole.trained_stored,
        "gradients": whole.trained_stored,
        "optimizer": whole.optimizer,
        "activations": of_chunk.activations + of_chunk.casts,
    }
    traced = tracked(run, work, columns, work.is_checkpointed)
    known = ("adamw", "sgd")
    if not work.optimizer.startswith(known) or "bit" in work.optimizer:
        closed.pop("optimizer"), traced.pop("optimizer")  # the trace has AdamW in its place
    closed["total"], traced["total"] = sum(closed.values()), sum(traced.values())
    return {"closed_form": closed, "traced": traced}


# ---- (3) ----


def shape(run: Any, work: Workload) -> dict[str, Any]:
    """Parameters, and per row and column what a forward and backward hold and compute."""
    with torch.device("meta"):
        model = build(run, work)
    classes = set(repeated_layer_classes(model))
    layers = [name for name, module in model.named_modules() if type(module).__name__ in classes]
    parameters = {}
    for name, one in model.named_parameters():
        layer = next((layer for layer in layers if name.startswith(layer + ".")), None)
        is_table = not is_multiplied(model.get_submodule(name.rpartition(".")[0]), one)
        columns = one.shape[-1] * (one.dim() > 1)
        parameters[name] = [one.numel(), one.element_size(), one.requires_grad, layer, columns, is_table]
    rows = {}
    for column in work.columns:
        # So many rows that their activations, not a matrix's gradient, are the peak; shapes cost nothing.
        few, many = (tracked(run, work, {column: count}, False)["activations"] for count in ROWS)
        again = [tracked(run, work, {column: count}, True)["activations"] for count in ROWS]
        per_row = (many - few) / (ROWS[1] - ROWS[0])
        rows[column.name] = {
            "kept": per_row,
            "casts": max(0.0, few - ROWS[0] * per_row),
            "kept_checkpointed": (again[1] - again[0]) / (ROWS[1] - ROWS[0]),
            "products": products(run, work, column, 2) / 2,
        }
    return {"parameters": parameters, "rows": rows}


def main(argv: list[str]) -> None:
    wants_shape = "--shape" in argv
    with exit_on_usage_error():
        run = load_run([word for word in argv if word != "--shape"])
        config = run.options
        full = read_model_config(config.model_config, config.model_name_or_path, config.model_revision)
        # the trace's kernels are a CPU's, and its masks hide nothing
        work = replace(workload_of(run, full), mask_bytes=0, has_padding=False)
        try:
            report = shape(run, work) if wants_shape else compare(run, work)
        except UsageError:
            raise
        except Exception as error:  # whatever a model's code does with tensors that have no values
            words = re.sub(r"\s+", " ", f"{type(error).__name__}: {error}")[:300]
            raise UsageError(f"{full['model_type']} does not trace without memory: {words}") from error
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1:])

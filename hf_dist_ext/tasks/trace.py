"""What a model's forward keeps and computes, found by running it on tensors that have shapes and no bytes.

    python -m hf_dist_ext.tasks.trace --config run.json      # started by `hf-dist plan`

(1) the run's model is built on torch's meta device, with its adapters, and frozen as in training: a laptop traces a
    model that it could never hold
(2) `ROWS` rows of each column go forward under FakeTensorMode with the kernels of an accelerator: attention that keeps
    no scores, dropout that keeps one byte per element
(3) autograd's saved tensors are counted, each storage once; parameters, buffers and inputs are no activations, and
    autocast's copies of weights are counted apart; layer by layer, so that checkpointing follows from the same numbers

It is a process of its own, since the planner imports no torch. Prints one line of JSON, which
`planner/traced.py` reads.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

# Models compare the number of image tokens with that of image features, which tensors without values cannot say.
os.environ["TRANSFORMERS_DISABLE_TORCH_CHECK"] = "1"

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from torch.utils.flop_counter import flop_registry  # noqa: E402

from hf_dist_ext.errors import UsageError  # noqa: E402
from hf_dist_ext.failures import exit_on_usage_error  # noqa: E402
from hf_dist_ext.planner.shape_config import read_model_config  # noqa: E402
from hf_dist_ext.planner.tape import Layer  # noqa: E402
from hf_dist_ext.planner.workload import Cast, Column, Workload, workload_of  # noqa: E402
from hf_dist_ext.policy import TOKENS  # noqa: E402
from hf_dist_ext.run.read import load_run  # noqa: E402
from hf_dist_ext.strategies.layers import is_multiplied, repeated_layer_classes  # noqa: E402

ROWS = 32  # what does not grow with rows, such as tables of positions, is spread over them


# ---- (1) ----


def build(run: Any, work: Workload, cast: Cast = "nothing") -> nn.Module:
    """The run's model, in training mode, on the meta device. `cast`: which weights FSDP ("products" with a loss over
    embeddings, else "all") or DeepSpeed ("all") hand to a forward in half precision."""
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
        model = _embedding_model(config, fields, work, options) if work.is_embedding else _generator(config, options)
        model = add_adapters(model, fields)
        freezing = plan_freezing(model, given.get("trainable_modules"), given.get("frozen_modules"))
        model.train()
        if freezing is not None:
            freezing.apply(model, has_autocast=work.autocast_bytes is not None)
            set_frozen_mode(model)
        for name, parameter in model.named_parameters() if cast != "nothing" else ():
            if cast == "all" or is_multiplied(model.get_submodule(name.rpartition(".")[0]), parameter):
                parameter.data = parameter.data.to(torch.bfloat16)
    return model


def _embedding_model(config: Any, fields: Any, work: Workload, options: dict[str, Any]) -> nn.Module:
    from hf_dist_ext.models.backbones import build_backbone
    from hf_dist_ext.models.embedding_model import EmbeddingModel
    from hf_dist_ext.models.hybrid_model import HybridEmbeddingModel

    if work.token_dim is not None:
        heads = {"special_ids": (), "token_dim": work.token_dim, "projection_dim": fields.projection_dim}
        return HybridEmbeddingModel(build_backbone(config, **options), pooling=fields.pooling, **heads)
    pooling = TOKENS if work.leaves_tokens else fields.pooling
    backbone = build_backbone(config, **options)
    return EmbeddingModel(backbone, pooling=pooling, projection_dim=fields.projection_dim)


def _generator(config: Any, options: dict[str, Any]) -> nn.Module:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    return auto.from_config(config, **options)


def features(work: Workload, column: Column, rows: int) -> dict[str, torch.Tensor]:
    """Inputs of some rows: ids and mask, and pictures for the rows that have one."""
    ids = torch.zeros(rows, column.length, dtype=torch.long)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if column.images:
        vision = work.config["vision_config"]
        size = vision["image_size"] if isinstance(vision["image_size"], int) else vision["image_size"][0]
        inputs["pixel_values"] = torch.zeros(rows * column.images, vision.get("num_channels", 3), size, size)
    if not work.is_embedding:
        inputs["labels"] = ids.clone()
    return inputs


# ---- (2) ----


IN_FLOAT32 = (  # of those that a GPU's autocast runs so, the ones that a CPU's does not
    functional.layer_norm, functional.group_norm, functional.softmax, functional.log_softmax, functional.cross_entropy,
    torch.softmax, torch.log_softmax, torch.Tensor.softmax,
)  # fmt: skip


class Accelerator(TorchFunctionMode):
    """The kernels that a GPU has, by others that keep as many bytes: attention's dropout keeps a seed there and all
    scores on a CPU; dropout's mask has one byte per element there and four here; experts' products take any dtype."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function in IN_FLOAT32 and torch.is_autocast_enabled("cpu"):
            args = tuple(one.float() if _is_half(one) else one for one in args)
        if function is functional.scaled_dot_product_attention:
            kwargs["dropout_p"] = 0.0
            return function(*args[:4], **kwargs)
        if function is functional.dropout:
            probability = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
            is_training = kwargs.get("training", args[2] if len(args) > 2 else True)
            of = kwargs.get("input", args[0] if args else None)
            return torch.native_dropout(of, probability, True)[0] if is_training and probability else of
        if getattr(function, "__name__", "") in ("grouped_mm", "_grouped_mm"):
            offsets = kwargs["offs"] if "offs" in kwargs else args[2]
            return torch.ops.transformers.grouped_mm_fallback(*args[:2], offsets)
        return function(*args, **kwargs)


def _is_half(one: Any) -> bool:
    return isinstance(one, torch.Tensor) and one.dtype in (torch.bfloat16, torch.float16)


# ---- (3) ----


class Recorder(TorchDispatchMode):
    """One forward of a model as `tape.Layer`s: before its layers, in them, after them."""

    def __init__(self, model: nn.Module, inputs: Iterable[torch.Tensor]):
        super().__init__()
        self.before, self.after = Layer("", 0.0), Layer("", 0.0)
        self.layers: list[Layer] = []
        self._current = self.before
        self._weights = {_storage(one) for one in model.parameters()}
        self._known = {_storage(one) for one in (*inputs, *model.buffers())}
        self._copies: dict[int, torch.UntypedStorage] = {}  # of weights; storages are held, so that ids stay their own
        self._kept: dict[int, torch.UntypedStorage] = {}
        self._input: int | None = None
        classes = set(repeated_layer_classes(model))
        for name, module in model.named_modules():
            if type(module).__name__ in classes:
                module.register_forward_pre_hook(self._enter(name), with_kwargs=True)
                module.register_forward_hook(self._leave)

    def _enter(self, name: str):
        def enter(module: nn.Module, args: tuple, kwargs: dict) -> None:
            self._join()
            inputs = (one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor))
            first = next((one for one in inputs if one.is_floating_point()), None)
            self._input = None if first is None else _storage(first)
            self._current = Layer(plain_name(name), 0.0 if first is None else first.untyped_storage().nbytes())
            self.layers.append(self._current)

        return enter

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        self._current = self.after

    def _join(self) -> None:
        """What comes between two layers is not what comes after the last."""
        for name in ("saved", "casts", "frozen_casts", "products", "backward"):
            setattr(self.before, name, getattr(self.before, name) + getattr(self.after, name))
        self.before.largest = max(self.before.largest, self.after.largest)
        self.after = Layer("", 0.0)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        packet = function._overloadpacket
        if packet is torch.ops.aten._to_copy and _storage(args[0]) in self._weights:
            self._copy_weight(args[0], out)
        elif packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
            query, key, _, _, is_causal = (*args, 0.0, False)[:5]
            products = 2 * query.numel() * key.shape[-2] * (0.5 if is_causal else 1)
            self._multiply(args[:3], products, most=2)
        elif packet is torch.ops.transformers.grouped_mm_fallback:
            self._multiply(args[:2], args[0].numel() * args[1].shape[2])
        elif packet in flop_registry:
            self._multiply(args, flop_registry[packet](*args, **kwargs, out_val=out) / 2)
        for one in tree_leaves(out):
            if isinstance(one, torch.Tensor) and _storage(one) not in self._weights | self._copies.keys():
                self._current.largest = max(self._current.largest, one.untyped_storage().nbytes())
        return out

    def _copy_weight(self, weight: torch.Tensor, copy: torch.Tensor) -> None:
        self._copies[_storage(copy)] = copy.untyped_storage()
        if weight.requires_grad:  # autocast keeps it until it ends; a frozen one's lives while a backward needs it
            self._kept[_storage(copy)] = copy.untyped_storage()
            self._current.casts += copy.untyped_storage().nbytes()

    def _multiply(self, args: tuple, products: float, most: int = 3) -> None:
        """A backward multiplies once more for every factor that has a gradient, `most` times at most."""
        factors = [one for one in args if isinstance(one, torch.Tensor) and one.dim() > 1]
        self._current.products += products
        self._current.backward += products * min(most, sum(one.requires_grad for one in factors))

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """What autograd calls for every tensor that it saves."""
        key, storage = _storage(tensor), tensor.untyped_storage()
        if key in self._weights or key in self._known or key in self._kept:
            return tensor
        self._kept[key] = storage
        if key in self._copies:
            self._current.casts += storage.nbytes()
            self._current.frozen_casts += storage.nbytes()
        else:
            self._current.saved += storage.nbytes()
            self._current.keeps_input |= key == self._input
        return tensor


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def plain_name(name: str) -> str:
    """Without what peft puts around a model's own names."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".").replace(".default.", ".")


def record(model: nn.Module, work: Workload, column: Column) -> dict[str, Any]:
    """One forward of `ROWS` rows by a model from the meta device -> its layers: copies of weights, everything else per
    row."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = model.to_empty(device="cpu")
        inputs = features(work, column, ROWS)
        recorder = Recorder(model, inputs.values())
        has_autocast = work.autocast_bytes is not None
        hooks = torch.autograd.graph.saved_tensors_hooks(recorder.keep, lambda saved: saved)
        with Accelerator(), recorder, hooks, torch.autocast("cpu", torch.bfloat16, enabled=has_autocast):
            model(**inputs)
    parts = [recorder.before, *recorder.layers, recorder.after]
    for part in parts:
        for name in ("input", "saved", "products", "backward", "largest"):
            setattr(part, name, getattr(part, name) / ROWS)
    before, *layers, after = map(asdict, parts)
    return {"before": before, "layers": layers, "after": after}


def shape(run: Any, work: Workload) -> dict[str, Any]:
    """Parameters as `tape.Parameter` takes them, and every column's forward with the weights that wrappers cast."""
    model = build(run, work)
    classes = set(repeated_layer_classes(model))
    layers = [plain_name(name) for name, module in model.named_modules() if type(module).__name__ in classes]
    parameters = {}
    for name, one in model.named_parameters():
        own = plain_name(name)
        layer = next((layer for layer in layers if own.startswith(layer + ".")), None)
        is_table = one.dim() > 1 and not is_multiplied(model.get_submodule(name.rpartition(".")[0]), one)
        columns = one.shape[-1] if one.dim() > 1 else 0
        parameters[own] = [one.numel(), one.element_size(), one.requires_grad, layer, columns, is_table]
    casts: list[Cast] = ["nothing"]
    if work.autocast_bytes:
        casts += ["products", "all"] if work.is_embedding else ["all"]
    columns = {
        column.name: {cast: record(build(run, work, cast), work, column) for cast in casts} for column in work.columns
    }
    width = getattr(model, "embedding_dim", None) or work.embedding_dim
    return {"parameters": parameters, "columns": columns, "embedding_dim": width}


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

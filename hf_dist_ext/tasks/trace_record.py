"""One forward on tensors that have shapes and no bytes, written down layer by layer.

(1) `Accelerator` stands in for the kernels of a GPU: attention that keeps no scores, dropout that keeps one byte per
    element
(2) `Recorder` counts autograd's saved tensors, each storage once; parameters, buffers and inputs are no activations,
    and autocast's copies of weights are counted apart
(3) of layers that are alike and take the same shapes the first two run (the first keeps what all share, such as a
    mask); a later one gives what the second gave, and costs as much
(4) what a backward would reach: a tower's last layer may be run for nothing, and its parameters then get no gradient
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from hf_dist_ext.frozen.groups import module_groups
from hf_dist_ext.planner.forward import Forward, Layer
from hf_dist_ext.strategies.base import meanwhile
from hf_dist_ext.strategies.layers import repeated_layer_classes

# ---- (1) ----


IN_FLOAT32 = (  # of those that a GPU's autocast runs so, the ones that a CPU's does not
    functional.layer_norm, functional.group_norm, functional.softmax, functional.log_softmax, functional.cross_entropy,
    torch.softmax, torch.log_softmax, torch.Tensor.softmax,
)  # fmt: skip


class Accelerator(TorchFunctionMode):
    """The kernels that a GPU has, by others that keep as many bytes: attention's dropout keeps a seed there and all
    scores on a CPU; dropout's mask has one byte per element there (`mask_bytes` 0: all of it as on a CPU, where the
    mask's elements are those of the values); norms run in float32 under autocast; experts' products take any dtype.

    Without padding attention takes no mask (`has_masks`). Masks have no values: one over the tokens of rows picks
    `image_tokens` of them all together, another one everything; and each row has `images` images.
    """

    def __init__(self, mask_bytes: int = 1, has_masks: bool = True, image_tokens: int = 0, images: int = 0):
        super().__init__()
        self.mask_bytes, self.has_masks = mask_bytes, has_masks
        self.image_tokens, self.images = image_tokens, images

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function in IN_FLOAT32 and self.mask_bytes and torch.is_autocast_enabled("cpu"):
            args = tuple(one.float() if _is_half(one) else one for one in args)
        if function is functional.scaled_dot_product_attention:
            if self.mask_bytes:
                args, kwargs["dropout_p"] = args[:4], 0.0  # after the mask it stands by place
            if not self.has_masks:
                args, kwargs["attn_mask"] = args[:3], None
            return function(*args, **kwargs)
        if function is functional.dropout and self.mask_bytes:
            probability = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
            is_training = kwargs.get("training", args[2] if len(args) > 2 else True)
            of = kwargs.get("input", args[0] if args else None)
            return torch.native_dropout(of, probability, True)[0] if is_training and probability else of
        if getattr(function, "__name__", "") in ("grouped_mm", "_grouped_mm"):
            offsets = kwargs["offs"] if "offs" in kwargs else args[2]
            return torch.ops.transformers.grouped_mm_fallback(*args[:2], offsets)
        if function in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            mask = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
            if isinstance(mask, torch.Tensor) and mask.dtype == torch.bool and mask.constant is None:
                picked = args[0].flatten(0, mask.dim() - 1)
                picked = picked[: self.image_tokens] if mask.dim() > 1 else picked
                return picked.clone() if function is torch.Tensor.__getitem__ else picked.copy_(args[2])
        if function is torch.Tensor.masked_scatter:  # of some weights in half precision: these need one for both
            args = (*args[:2], args[2].to(args[0].dtype))
        if function is torch.Tensor.item and self.images and args[0].constant is None:
            return self.images
        return function(*args, **kwargs)


def _is_half(one: Any) -> bool:
    return isinstance(one, torch.Tensor) and one.dtype in (torch.bfloat16, torch.float16)


# ---- (2) ----


class Recorder(TorchDispatchMode):
    """`forward` holds what one forward of the model keeps and computes, of all its rows."""

    def __init__(self, model: nn.Module, inputs: Iterable[torch.Tensor]):
        super().__init__()
        self.forward = Forward()
        self._current = self.forward.before
        self._weights: set[int] = set()
        self._known = {_storage(one) for one in inputs}
        self._copies: dict[int, torch.UntypedStorage] = {}  # of weights; storages are held, so that ids stay their own
        self._kept: dict[int, torch.UntypedStorage] = {}
        self._input: int | None = None
        self._taken: dict[int, torch.UntypedStorage] = {}
        self._is_placing = False
        self._runs: dict[Any, list[tuple[Layer, Any]]] = {}
        self._given: list[tuple[Layer, list[torch.Tensor]]] = []  # by layers that ran or were copied
        self._taken_by_copies: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}  # by the leaf that they gave
        of_images = module_groups(model).get("vision")
        self._layers = contextlib.ExitStack()
        for name, module in layers_of(model):
            is_of_images = of_images is not None and bool(of_images.depth(f"{name}.weight"))
            layer = Layer(plain_name(name), 0.0, is_of_images=is_of_images)
            self._layers.enter_context(meanwhile(module, forward=self._recorded(module, layer)))
        layers = {id(part) for _, module in layers_of(model) for part in module.modules()}
        self._place(one for one in model.modules() if id(one) not in layers)

    def _place(self, modules: Iterable[nn.Module]) -> None:
        """Their tensors, from the meta device: of a layer once it is known to run."""
        self._is_placing, made = True, {}
        for module in modules:
            for owned, known in ((module._parameters, self._weights), (module._buffers, self._known)):
                for name, one in owned.items():
                    if one is None:
                        continue
                    if one.device.type == "meta":
                        made[id(one)] = owned[name] = (
                            made[id(one)] if id(one) in made else _placed(one)
                        )  # some are tied
                    known.add(_storage(owned[name]))
        self._is_placing = False

    def __exit__(self, *error: Any) -> None:
        self._layers.close()
        super().__exit__(*error)

    def _recorded(self, module: nn.Module, blank: Layer) -> Callable:
        run, own = module.forward, _likeness(module)

        def forward(*args: Any, **kwargs: Any) -> Any:
            inputs = [one for one in _leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
            by_place = [one for one in _leaves(args) if isinstance(one, torch.Tensor)]
            self._enter(replace(blank), next((one for one in inputs if one.is_floating_point()), None), by_place)
            alike = self._runs.setdefault((own, *map(_as_key, _leaves((args, kwargs)))), [])
            if len(alike) < 2:
                self._place(module.modules())
                given = run(*args, **kwargs)
                alike.append((self._current, tree_map(lambda one: _described(one, inputs), given)))
            else:  # (3)
                layer, described = alike[1]
                given = tree_map(lambda one: self._copied(one, inputs) if isinstance(one, _Given) else one, described)
                self.forward.layers[-1] = replace(layer, name=blank.name)
            made = [one for one in _leaves(given) if isinstance(one, torch.Tensor) and one.grad_fn is not None]
            taken = {id(one) for one in inputs}
            self._given.append((self.forward.layers[-1], [one for one in made if id(one) not in taken]))
            self._current, self._input = self.forward.after, None
            return given

        return forward

    def _copied(self, one: _Given, inputs: list[torch.Tensor]) -> torch.Tensor:
        if one.place is not None:
            return inputs[one.place]
        leaf = one.made()
        self._taken_by_copies[id(leaf)] = leaf, inputs
        return leaf.clone() if leaf.requires_grad else leaf  # a leaf takes no change in place

    def reach(self, outputs: Iterable[torch.Tensor]) -> tuple[set[int], set[str]]:
        """(4) The ids of the parameters, and the names of the layers, that a backward from the outputs gives a
        gradient to. Layers that it does not reach have no backward any more."""
        leaves, seen, left = set(), set(), list(outputs)
        while left:
            one = left.pop()
            node = one.grad_fn if isinstance(one, torch.Tensor) else one
            if node is None and isinstance(one, torch.Tensor) and one.requires_grad:
                leaves.add(id(one))
            if node is None or node in seen:
                continue
            seen.add(node)
            variable = getattr(node, "variable", None)
            if variable is not None:
                leaves.add(id(variable))
                left += self._taken_by_copies.get(id(variable), (None, []))[1]
            left += [behind for behind, _ in node.next_functions]
        layers = set()
        for layer, made in self._given:
            if any(one.grad_fn in seen for one in made):
                layers.add(layer.name)
            else:
                layer.backward = 0.0
        return leaves, layers

    def _enter(self, layer: Layer, first: torch.Tensor | None, by_place: list[torch.Tensor]) -> None:
        """What comes between two layers is not what comes after the last."""
        self.forward.before.add(self.forward.after)
        self.forward.after = Layer("", 0.0)
        self._input = None if first is None else _storage(first)
        layer.input = 0.0 if first is None else float(first.untyped_storage().nbytes())
        for one in by_place:
            if _storage(one) not in self._taken and _storage(one) not in self._known and one is not first:
                layer.beside += one.untyped_storage().nbytes()
                self._taken[_storage(one)] = one.untyped_storage()
        self._current = layer
        self.forward.layers.append(layer)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        if self._is_placing:
            return out
        packet = function._overloadpacket
        if packet is torch.ops.aten._to_copy and _storage(args[0]) in self._weights:
            self._copy_weight(args[0], out)
        elif packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
            query, key, _, _, is_causal = (*args, 0.0, False)[:5]
            multiply_adds = 2 * query.numel() * key.shape[-2] * (0.5 if is_causal else 1)
            self._multiply(args[:3], multiply_adds, most=2)
        elif packet is torch.ops.transformers.grouped_mm_fallback:
            self._multiply(args[:2], args[0].numel() * args[1].shape[2])
        elif packet in flop_registry:
            self._multiply(args, flop_registry[packet](*args, **kwargs, out_val=out) / 2)
        for one in tree_leaves(out):
            if isinstance(one, torch.Tensor):
                key = _storage(one)
                if key not in self._weights and key not in self._copies:
                    self._current.largest = max(self._current.largest, one.untyped_storage().nbytes())
        return out

    def _copy_weight(self, weight: torch.Tensor, copy: torch.Tensor) -> None:
        self._copies[_storage(copy)] = copy.untyped_storage()
        if weight.requires_grad:  # autocast keeps it until it ends; a frozen one's lives while a backward needs it
            self._kept[_storage(copy)] = copy.untyped_storage()
            self._current.casts += copy.untyped_storage().nbytes()

    def _multiply(self, args: tuple, multiply_adds: float, most: int = 3) -> None:
        """A backward multiplies once more for every factor that has a gradient, `most` times at most."""
        factors = [one for one in args if isinstance(one, torch.Tensor) and one.dim() > 1]
        self._current.multiply_adds += multiply_adds
        self._current.backward += multiply_adds * min(most, sum(one.requires_grad for one in factors))

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


def _placed(one: torch.Tensor) -> torch.Tensor:
    made = torch.empty(one.shape, dtype=one.dtype, device="cpu")
    return nn.Parameter(made, one.requires_grad) if isinstance(one, nn.Parameter) else made


def layers_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    classes = set(repeated_layer_classes(model))
    return [(name, module) for name, module in model.named_modules() if type(module).__name__ in classes]


def plain_name(name: str) -> str:
    """Without what peft puts around a model's own names."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".").replace(".default.", ".")


# ---- (3) ----


class _Given:
    """A tensor that a layer gave: one of those that it took (`place`), or a new one of its shape."""

    def __init__(self, tensor: torch.Tensor, place: int | None):
        self.place, self.needs_gradient = place, tensor.requires_grad
        self.layout = (tensor.shape, tensor.stride(), tensor.dtype)

    def made(self) -> torch.Tensor:
        shape, strides, dtype = self.layout
        return torch.empty_strided(shape, strides, dtype=dtype, requires_grad=self.needs_gradient)


def _described(one: Any, inputs: list[torch.Tensor]) -> Any:
    if not isinstance(one, torch.Tensor):
        return one
    places = (at for at, other in enumerate(inputs) if _storage(other) == _storage(one))
    return _Given(one, next(places, None))


def _leaves(one: Any) -> Iterator[Any]:
    """Of containers, and never inside other objects, such as a cache of keys and values."""
    if isinstance(one, (tuple, list)):
        for part in one:
            yield from _leaves(part)
    elif type(one) is dict:
        for name in sorted(one):
            yield name
            yield from _leaves(one[name])
    else:
        yield one


def _as_key(one: Any) -> Any:
    if isinstance(one, torch.Tensor):
        return tuple(one.shape), one.dtype, one.requires_grad
    return one if isinstance(one, _PLAIN) else type(one)


_PLAIN = (int, float, str, type(None))
_PLACES = ("layer_idx", "layer_index", "layer_id")


def _likeness(layer: nn.Module) -> Any:
    """Equal for layers that do the same with other values."""
    found: list[Any] = []
    for name, module in layer.named_modules():
        own = {key: one for key, one in vars(module).items() if isinstance(one, _PLAIN) and key not in _PLACES}
        found.append((name, type(module), tuple(sorted(own.items()))))
    tensors = (*layer.named_parameters(), *layer.named_buffers())
    return (*found, *((name, _as_key(one)) for name, one in tensors))

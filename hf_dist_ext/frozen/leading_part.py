"""The frozen leading part of a model: which of a batch's inputs it reads, what it makes of them, and how the rest of
the model goes on from there.

    part = frozen_leading_part(model)
    part.inputs(batch)                  # name -> tensors with one entry per cached unit (a row, or an image)
    part.compute(name, inputs)          # (n, ...) features
    part.put(batch, name, features)     # the batch that the rest of the model goes on from

(1) a SentenceTransformer whose backbone is frozen: pooled vectors, one per row of every column
(2) a dual encoder or a Router with a frozen part: its embeddings, one per row of the columns that it reads
(3) a vision-language model with a frozen image encoder: what its projector is given, one per image. The encoder's
    forward is then a stand-in that returns zeros of the right shapes, and the projector's input is replaced
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from hf_dist_ext.errors import UsageError
from hf_dist_ext.frozen.encode_once import has_frozen_backbone
from hf_dist_ext.frozen.groups import image_arguments, module_groups
from hf_dist_ext.models.embedder import POOLED, VECTORS, embedder_of

NO_COLUMNS = ("ids", "targets", "constants")  # of a batch
FEATURES = "frozen_features"  # the key of (3) in a batch; it never reaches the model's forward

Batch = dict[str, Any]


def frozen_leading_part(model: nn.Module) -> FrozenVectors | ImageEncoder:
    """Raises UsageError when nothing before the first trainable parameter can be cached."""
    if has_frozen_backbone(model) or embedder_of(model).frozen_parts:
        return FrozenVectors(model)
    if "vision" in module_groups(model) and hasattr(model, "get_image_features"):
        return ImageEncoder(model)
    raise UsageError(
        f"frozen_feature_cache: {type(model).__name__} has no frozen leading part to cache: that is a frozen backbone "
        "under a projection, a frozen tower, or the frozen image encoder of a model that answers (image-text-to-text)."
        " Freeze one, or switch the cache off."
    )


class FrozenVectors:
    """(1), (2)"""

    def __init__(self, model: nn.Module):
        self.model, self.embedder, self.is_pooled = model, embedder_of(model), has_frozen_backbone(model)
        parts = [self.embedder.frozen_modules] if self.is_pooled else self.embedder.frozen_parts.values()
        self.modules = [module for modules in parts for module in modules]
        if not self.is_pooled:  # what follows on the parts is in the vectors
            self.modules += self.embedder.modules[1:]
        self.constants: Mapping[str, Mapping[str, Any]] = {}  # of the last batch

    def inputs(self, batch: Batch) -> dict[str, Mapping[str, torch.Tensor]]:
        self.constants = batch.get("constants", {})
        columns = {name: features for name, features in batch.items() if name not in NO_COLUMNS}
        read = columns if self.is_pooled else self.embedder.frozen_columns(columns, self.constants)
        return {name: columns[name] for name in read}

    def compute(self, name: str, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.embedder.call(self.model, inputs, name, self.constants.get(name), stops_at_pooled=self.is_pooled)

    def put(self, batch: Batch, name: str, features: torch.Tensor) -> Batch:
        return {**batch, name: {POOLED if self.is_pooled else VECTORS: features}}

    def salt(self, name: str) -> str:
        """What the modules say of themselves, and what no tensor says of a column: a task, where a prompt ends."""
        run = self.modules if self.is_pooled else self.embedder.modules
        described = [(type(module).__name__, getattr(module, "get_config_dict", dict)()) for module in run]
        return f"{described}{self.constants.get(name, '')}"


class _Reached(Exception):
    """The projector was reached; nothing behind it is needed."""


class ImageEncoder:
    """(3)"""

    def __init__(self, model: nn.Module):
        groups = module_groups(model)
        modules = dict(model.named_modules())
        self.model = model
        self.encoder = modules[groups["vision"].roots[0]]
        projectors = [modules[root] for root in groups["projector"].roots if root in modules]
        if any(p.requires_grad for p in self.encoder.parameters()):
            nested = any(module in projectors for module in self.encoder.modules())
            why = "its projector lies inside the image encoder" if nested else "its image encoder trains"
            raise UsageError(f"frozen_feature_cache: {type(model).__name__}: {why}. Switch the cache off.")
        if len(projectors) != 1 or groups["vision"].without:
            raise UsageError(
                f"frozen_feature_cache: {type(model).__name__} has no single projector behind its image encoder, so "
                "there is no one place to go on from. Switch the cache off."
            )
        self.projector, self.modules = projectors[0], [self.encoder]
        self.taken = image_arguments(model) - {"input_ids"}
        self.output: Any = None  # what the encoder returns, with empty tensors of its shapes (0, ...)
        self._given: torch.Tensor | None = None
        self._encode = self.encoder.forward
        self.encoder.forward = self._forward
        self.projector.register_forward_pre_hook(self._go_on)

    def inputs(self, batch: Batch) -> dict[str, Mapping[str, torch.Tensor]]:
        images = {k: v for k, v in batch.items() if k in self.taken and isinstance(v, torch.Tensor)}
        return {"images": images} if "pixel_values" in images else {}

    def compute(self, name: str, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        reached: list[torch.Tensor] = []

        def stop(module: nn.Module, args: tuple) -> None:
            reached.append(args[0])
            raise _Reached

        def note(module: nn.Module, args: tuple, output: Any) -> None:
            self.output = tree_map_only(torch.Tensor, lambda one: one.new_empty(0, *one.shape[1:]), output)

        stopping = self.projector.register_forward_pre_hook(stop, prepend=True)
        with stopping, self.encoder.register_forward_hook(note), contextlib.suppress(_Reached):
            self.model.get_image_features(**inputs)
        if not reached or len(reached[0]) != len(inputs["pixel_values"]):
            given = tuple(reached[0].shape) if reached else "nothing"
            raise UsageError(
                f"frozen_feature_cache: the projector of {type(self.model).__name__} is given {given} for "
                f"{len(inputs['pixel_values'])} images; one entry per image is needed. Switch the cache off."
            )
        return reached[0]

    def put(self, batch: Batch, name: str, features: torch.Tensor) -> Batch:
        return {**batch, FEATURES: features}

    def salt(self, name: str) -> str:
        return "images"

    def provide(self, features: torch.Tensor) -> None:
        """The next forward goes on from these, (n, ...) for its n images."""
        assert self.output is not None
        self._given = features

    def withdraw(self) -> None:
        self._given = None

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._given is None:
            return self._encode(*args, **kwargs)
        zero, count = self._given.new_zeros(1), len(self._given)  # expanded, it takes no memory
        return tree_map_only(torch.Tensor, lambda empty: zero.expand(count, *empty.shape[1:]), self.output)

    def _go_on(self, module: nn.Module, args: tuple) -> tuple | None:
        if self._given is None:
            return None
        given, self._given = self._given, None
        assert args[0].shape == given.shape, (args[0].shape, given.shape)
        return (given.to(args[0].device), *args[1:])

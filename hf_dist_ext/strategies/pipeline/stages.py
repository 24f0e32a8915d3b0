"""A model cut into the stages of a pipeline: what lies where, and one stage run alone.

A model that can be cut embeds (a SentenceTransformer, adapters in it too): it has one stack of layers, what comes
before them (word embeddings) and what comes after. The first stage has what comes before the stack, the last one all
that comes after it: the norm, pooling, projection. A stage is run by the model's own forward with hidden states in
place of word embeddings (`inputs_embeds`), where everything that is not this stage's gives back what comes in. So
masks and positions are made by the model's own code on every stage, and parameters keep the names that they have in
the whole model.

Of parts that lie on other ranks a rank keeps the names and shapes (the meta device) and no memory. A model that is
read from files as `staged` says never has more (one with random weights is built whole before it is cut).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_dist_ext import policy
from hf_dist_ext.errors import UsageError

# Decoders whose plan (base_model_pp_plan of transformers) was measured: some scale what they take for word embeddings
# (granite), and would do so at every stage.
DECODERS = {"llama", "mistral", "qwen2", "qwen3"}


EMBEDDING, TOKEN_EMBEDDINGS = "sentence_embedding", "token_embeddings"  # sentence-transformers' names of features


class BackboneLayout(NamedTuple):
    """Where a backbone has what: names of modules."""

    before: tuple[str, ...]
    stack: str
    after: tuple[str, ...]


ENCODERS = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta"), BackboneLayout(("embeddings",), "encoder.layer", ())),
    "modernbert": BackboneLayout(("embeddings",), "layers", ("final_norm",)),
}


def layout_of(config: Any) -> BackboneLayout:
    """Of a model's config. Raises UsageError when it is of no kind that can be cut."""
    name = config.model_type
    if name in ENCODERS:
        return ENCODERS[name]
    plan = list(getattr(config, "base_model_pp_plan", None) or ())
    if name not in DECODERS or "layers" not in plan:
        raise UsageError(
            f'a pipeline can not be made of "{name}": it was measured to be exact for '
            f"{', '.join(sorted(DECODERS | ENCODERS.keys()))}. Use multi_gpu_fsdp."
        )
    at = plan.index("layers")
    return BackboneLayout(tuple(plan[:at]), "layers", tuple(plan[at + 1 :]))


def first_layers(num_layers: int, num_stages: int, split: Sequence[int] | None = None) -> list[int]:
    """The number of the first layer of every stage.

    Args:
        split: the first layers of all stages but the first; None: as `policy.layers_of_stages` deals them.

    Raises:
        UsageError: a stage without a layer.
    """
    if split is None:
        firsts = [0, *accumulate(policy.layers_of_stages(num_layers, num_stages)[:-1])]
    else:
        firsts = [0, *split]
    if len(firsts) != num_stages:
        raise UsageError(
            f"pipeline_split={list(split)} has {len(split)} numbers; {num_stages} stages need {num_stages - 1}: the "
            "first layer of every stage but the first."
        )
    if any(end <= first for first, end in zip(firsts, [*firsts[1:], num_layers], strict=True)):
        given = "" if split is None else f" cut at {list(split)}"
        raise UsageError(
            f"{num_layers} layers{given} do not make {num_stages} stages of at least one layer each. Use fewer "
            "processes or stages per process (pipeline_parallel_size, pipeline_stages_per_rank), or another split."
        )
    return firsts


def firsts_of(model: nn.Module, num_stages: int, split: Sequence[int] | None) -> list[int]:
    """`first_layers` of a model that will be cut."""
    backbone = base_of(model).transformers_model
    return first_layers(len(backbone.get_submodule(layout_of(backbone.config).stack)), num_stages, split)


def base_of(model: nn.Module) -> Any:
    """Without adapters. Raises UsageError when it can not be cut."""
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not is_chain(base):
        raise UsageError(
            f"a pipeline can not be made of {type(base).__name__}: it needs one backbone with a stack of layers. "
            "Use a SentenceTransformer, or multi_gpu_fsdp."
        )
    _check_chain(base)
    return base


class Passed(nn.Module):
    """Stands where a part of another stage is: gives back what comes in."""

    def __init__(self, part: nn.Module):
        super().__init__()
        self.__dict__["stands_for"] = part  # no module of this one
        if hasattr(part, "attention_type"):  # by which ModernBERT's loop picks the layer's mask
            self.attention_type = part.attention_type
        for name, child in part.named_children():
            if isinstance(child, nn.Embedding):  # asked for by get_input_embeddings
                self.add_module(name, nn.Identity())

    def forward(self, hidden: Any = None, *arguments: Any, inputs_embeds: Any = None, **options: Any) -> Any:
        return hidden if inputs_embeds is None else inputs_embeds


class StageModule(NamedTuple):
    """A module, and where in the model it hangs."""

    owner: nn.Module
    name: str
    module: nn.Module

    def put(self, module: nn.Module | None) -> None:
        self.owner._modules[self.name] = module


class StagedModel:
    """A model of which this rank has the stages `own`.

    Args:
        model: whole. Parts of other stages give up their memory.
        own: this rank's stages.
        firsts: the first layer of every stage.
    """

    def __init__(self, model: nn.Module, own: Sequence[int], firsts: Sequence[int]):
        self.model, self.own, self.num_stages = model, list(own), len(firsts)
        self.base = base_of(model)
        self.parts = parts_of(self.base, self.base.transformers_model, firsts)
        for _, part in self._all():
            part.put(part.module)
        self.check_is_covered()
        self._left_out = [part for stage, part in self._all() if stage not in self.own]
        for part in self._left_out:
            _forget(part.module)
        self.renew()

    def renew(self) -> None:
        """Something that passes on stands where the parts of other ranks are."""
        for part in self._left_out:
            part.put(Passed(part.module))

    def check_is_covered(self) -> None:
        """Every parameter lies in one stage. Raises UsageError."""
        owners = self.stages_by_id()
        for name, parameter in self.model.named_parameters():
            found = owners.get(id(parameter), set())
            if len(found) != 1:
                where = "in none" if not found else f"in {len(found)}"
                raise UsageError(
                    f"a pipeline can not be made of {type(self.model).__name__}: {name!r} lies {where} of its stages. "
                    "Use multi_gpu_fsdp."
                )

    def stages_by_id(self) -> dict[int, set[int]]:
        """The id of a parameter -> the stages that hold it."""
        owners: dict[int, set[int]] = {}
        for stage, part in self._all():
            for parameter in part.module.parameters():
                owners.setdefault(id(parameter), set()).add(stage)
        return owners

    def _all(self) -> list[tuple[int, StageModule]]:
        return [(stage, part) for stage, parts in enumerate(self.parts) for part in parts]

    def parameters(self, stage: int) -> list[nn.Parameter]:
        """Those of one of this rank's stages that train."""
        return [p for part in self.parts[stage] for p in part.module.parameters() if p.requires_grad]

    def run(self, stage: int, features: Mapping[str, Any], hidden: torch.Tensor | None) -> torch.Tensor:
        """One stage alone: features and what the stage before gave (b, T, H) -> the same for the next one; the last
        stage gives embeddings (b, D). `hidden` is None for the first stage."""
        if stage > 0:
            features = {name: value for name, value in features.items() if name != "input_ids"}
            features["inputs_embeds"] = hidden
        with self.only(stage):
            if stage == self.num_stages - 1:
                return self.base(dict(features))[EMBEDDING]
            return self.base[0](dict(features))[TOKEN_EMBEDDINGS]

    @property
    def num_layers(self) -> list[int]:
        """Of every stage."""
        backbone = self.base.transformers_model
        stack = backbone.get_submodule(layout_of(backbone.config).stack)
        return [sum(part.owner is stack for part in parts) for parts in self.parts]

    @contextlib.contextmanager
    def only(self, stage: int) -> Iterator[None]:
        """While inside, other stages of this rank give back what comes in."""
        others = [part for own in self.own if own != stage for part in self.parts[own]]
        try:
            for part in others:
                part.put(Passed(part.module))
            yield
        finally:
            for part in others:
                part.put(part.module)

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """While inside, the model has all its modules; those of other ranks are on the meta device."""
        try:
            for part in self._left_out:
                part.put(part.module)
            yield
        finally:
            self.renew()


def parts_of(base: nn.Module, backbone: nn.Module, firsts: Sequence[int]) -> list[list[StageModule]]:
    """Stage -> its parts. What `base` has beside its backbone belongs to the last one."""
    layout = layout_of(backbone.config)
    stack = backbone.get_submodule(layout.stack)
    ends = [*firsts[1:], len(stack)]
    parts = [[_part(stack, str(i)) for i in range(first, end)] for first, end in zip(firsts, ends, strict=True)]
    parts[0] += [_part(backbone, name) for name in layout.before]
    named = {*layout.before, layout.stack.partition(".")[0], *layout.after}
    others = [name for name, child in backbone.named_children() if name not in named]
    unread = [name for name in others if list(backbone.get_submodule(name).parameters())]  # a pooler
    parts[-1] += [_part(backbone, name) for name in (*layout.after, *unread)]
    if base is not backbone:
        parts[-1] += [_part(base, name) for name, child in base.named_children() if backbone not in child.modules()]
    return parts


def is_chain(base: nn.Module) -> bool:
    """Whether it is a SentenceTransformer: modules that hand on features, of which the first has the backbone."""
    return hasattr(base, "transformers_model")


def _check_chain(base: Any) -> None:
    kinds, backbone = [type(module).__name__.removeprefix("FSDP") for module in base], base.transformers_model
    if backbone is None or kinds[:2] != ["Transformer", "Pooling"]:
        raise UsageError(
            f"a pipeline is made of a Transformer and a Pooling, and this {type(base).__name__} is a chain of "
            f"{', '.join(kinds)}. Use multi_gpu_ddp or multi_gpu_fsdp."
        )


def _forget(module: nn.Module) -> None:
    """Gives the memory back. `Module.to` would take it from the parameter itself where that is a DTensor, and so from
    every module that has it too (tied weights)."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter.device.type != "meta":
                part._parameters[name] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        part._buffers.update({name: b if b is None else b.to("meta") for name, b in part._buffers.items()})


def _part(owner: nn.Module, name: str) -> StageModule:
    module = owner.get_submodule(name)
    return StageModule(owner, name, getattr(module, "stands_for", module))


def staged(
    kind: type,
    own: Sequence[int],
    num_stages: int,
    split: Sequence[int] | None,
    finish: Callable[[nn.Module], None] = lambda backbone: None,
) -> type:
    """A class of backbones which `from_pretrained` fills with the weights of the stages `own` alone; `put_back` makes
    its model one that can be cut into these stages. `finish`: what a backbone goes through before it is filled."""

    def __init__(self: Any, config: Any, *arguments: Any, **options: Any) -> None:
        kind.__init__(self, config, *arguments, **options)
        self.__class__ = kind
        num_layers = len(self.get_submodule(layout_of(config).stack))
        for stage, parts in enumerate(parts_of(self, self, first_layers(num_layers, num_stages, split))):
            for part in parts if stage not in own else ():
                part.module.to("meta")
                part.put(Passed(part.module))
        finish(self)

    body = {"__init__": __init__, "_keys_to_ignore_on_load_unexpected": [""]}  # other stages' weights are in the files
    return type(kind.__name__, (kind,), body | {"__module__": kind.__module__})


def put_back(model: nn.Module) -> nn.Module:
    """A `staged` model with all its modules, those of other stages on the meta device: for whoever asks for names or
    puts adapters in, before it is cut."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Passed):
                module._modules[name] = child.stands_for
    return model

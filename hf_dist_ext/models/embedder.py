"""What a trainer asks of a model that embeds, answered once for models of sentence-transformers and once for others.

    embedder = embedder_of(model)          # the model without its wrappers
    embedder.call(wrapped, features)       # (rows, D), or a mapping of outputs over the rows

Features are those of one chunk: tensors over its rows, or its rows end to end (engine/packing.py, with `packed_rows`).
A model of sentence-transformers is a chain of modules which hand on one mapping of features. Beside tensors it reads
constants of a column, which its `preprocess` gives: the modality, the task, the length of the prompt.

Shapes: B rows, T tokens of the longest, t real tokens of all rows, D the embedding's width.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import nn

from hf_dist_ext.errors import UsageError
from hf_dist_ext.models import packing
from hf_dist_ext.policy import why_many_calls
from hf_dist_ext.strategies.tensors import own_class

PACKAGE = "sentence_transformers"
EMBEDDING, TOKEN_EMBEDDINGS = "sentence_embedding", "token_embeddings"  # sentence-transformers' names
VECTORS = "vectors"  # a feature: embeddings, which nothing follows on
POOLED = "pooled"  # a feature: what the frozen modules that come first have given
# The parts of CLIP and SigLIP, by transformers' names.
PARTS_OF_DUAL = {"text": ("text_model", "text_projection"), "image": ("vision_model", "visual_projection")}
OLDER_NAMES = {"CLIPModel": "Transformer"}  # a class of older folders, which adds nothing
PART = "part"  # an argument of a forward that `_cut_forward` has cut


def embedder_of(model: nn.Module) -> Embedder:
    """`model`: without its wrappers. Raises UsageError for a model of sentence-transformers inside of peft's."""
    if is_of_sentence_transformers(model):
        return SentenceEmbedder(model)
    if is_of_sentence_transformers(getattr(model, "get_base_model", lambda: None)()):
        raise UsageError(
            f"{type(model).__name__} is around a model of sentence-transformers, whose folder then could not hold the "
            "adapters. Put them inside: model.add_adapter(LoraConfig(...)), without get_peft_model."
        )
    return Embedder(model)


def is_of_sentence_transformers(model: Any) -> bool:
    """Whether it is a SentenceTransformer, or another model of that package that encodes rows."""
    names = {kind.__name__ for kind in type(model).__mro__ if kind.__module__.startswith(PACKAGE)}
    return "BaseModel" in names and "CrossEncoder" not in names


def set_is_causal(model: nn.Module, is_causal: bool) -> None:
    """Let a token of a decoder see the tokens after it (`is_causal` false), or not see them, as transformers does by
    its config, which says so in what is saved too.

    model: a SentenceTransformer, or a model of transformers. Call it before the model is wrapped. Raises UsageError
    for a model that would not do so.
    """
    embedder = embedder_of(model)
    backbone = embedder.backbone if isinstance(embedder, SentenceEmbedder) else model
    if getattr(backbone, "config", None) is None:
        raise UsageError("is_causal is a setting of transformers' models, and this one has none inside. Remove it.")
    config = backbone.config.get_text_config()
    before = getattr(config, "is_causal", None)
    config.is_causal = is_causal
    if is_causal in _sees_both_ways(backbone):
        config.is_causal = before
        raise UsageError(
            f"is_causal={str(is_causal).lower()}, and {type(backbone).__name__} of the installed transformers "
            f"{'sees' if is_causal else 'hides'} the tokens after a token all the same, in some batches or in all. "
            "Remove it, or choose another model."
        )


@torch.no_grad()
def _sees_both_ways(backbone: nn.Module) -> list[bool]:
    """Whether the first token changes with a later one, in rows without padding and in rows with it: some families of
    transformers 5.x heed their config in one of them only."""
    modes = [(module, module.training) for module in backbone.modules()]
    backbone.eval()
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 9, 8]], device=backbone.device)  # (2, 4), of any vocabulary
    try:
        found = []
        for real in (4, 3):
            mask = (torch.arange(4, device=ids.device) < real).long().expand(2, 4)
            first, other = backbone(input_ids=ids, attention_mask=mask).last_hidden_state[:, 0].float()
            found.append(bool((first - other).norm() > 1e-5 * first.norm()))
    finally:
        for module, was_training in modes:
            module.training = was_training
    return found


class Embedder:
    """Any module that returns embeddings: a tensor (rows, D), or an output with the field `embeddings`."""

    def __init__(self, model: nn.Module):
        self.model = model

    @cached_property
    def takes_column(self) -> bool:
        """Whether it must be told a chunk's column, so that rows of two columns never share a chunk."""
        return "column" in forward_parameters(self.model)

    @property
    def why_padded(self) -> str | None:
        """Why rows can not go end to end through it; None: they can."""
        return f"{type(self.model).__name__} is no model of sentence-transformers"

    def why_many_calls(self, capability: int, is_half: bool) -> str | None:
        """Of rows that go end to end: `policy.why_many_calls`, of this backbone."""
        return None

    @property
    def has_token_vectors(self) -> bool | None:
        """Whether a row encodes to a vector of each of its tokens; None: it does not say."""
        return None

    @property
    def num_frozen(self) -> int | None:
        """So many modules come first, train nothing and give one vector per row, while a later one trains; None: there
        are no such."""
        return None

    @property
    def frozen_modules(self) -> list[nn.Module]:
        """What gives the feature `pooled`."""
        return []

    def freeze_unread(self) -> set[str]:
        """Parameters that no embedding depends on do not train. Returns their names."""
        return set()

    @property
    def frozen_parts(self) -> dict[str, list[nn.Module]]:
        """Part of the model that reads some of the columns -> its modules, where these train nothing, nor does what
        follows on them."""
        return {}

    def part_of(self, features: Mapping[str, Any], constants: Mapping[str, Any]) -> str | None:
        """The part that reads a column of these features; None: the whole model does."""
        return None

    def frozen_columns(self, batch: Mapping[str, Mapping[str, Any]], constants: Mapping[str, Any]) -> set[str]:
        """Columns of a batch that train nothing. Letting one model read all of them is not meant by it."""
        frozen = self.frozen_parts
        return {name for name, one in batch.items() if frozen and self.part_of(one, constants.get(name, {})) in frozen}

    def call(
        self,
        wrapped: nn.Module,
        features: Mapping[str, Any],
        column: str | None = None,
        constants: Mapping[str, Any] | None = None,
        stops_at_pooled: bool = False,
    ) -> Any:
        """Embeddings of a chunk, or what the model returns where these are none.

        `wrapped`: the model, in its wrappers. `column`: of the rows, where the model must know. `constants`: of that
        column. `stops_at_pooled`: gives what the frozen part gives, from which the feature `pooled` goes on.
        """
        more: dict[str, Any] = {"column": column} if self.takes_column else {}
        output = wrapped(**features, **more)
        return output if isinstance(output, torch.Tensor) else _field(output, "embeddings")


class SentenceEmbedder(Embedder):
    """A SentenceTransformer or MultiVectorEncoder."""

    def __init__(self, model: nn.Module):
        super().__init__(model)
        self.modules = list(model.children())
        self.reads = frozenset(model.get_model_kwargs())  # type: ignore[operator]  # beside features: the task

    @cached_property
    def has_own_forward(self) -> bool:
        """Whether its forward is the package's, which calls one module after the other; a subclass may do anything."""
        return type(self.model).forward.__module__.startswith(f"{PACKAGE}.")

    @cached_property
    def is_chain(self) -> bool:
        """Of text through the package's own modules, none of which reads a column's constants."""
        kinds = {_name(module) for module in self.modules}
        own = {"Transformer", "StaticEmbedding", "Pooling", "Dense", "Normalize", "LayerNorm", "Dropout"}
        pooling = [module for module in self.modules if _name(module) == "Pooling"]
        return self.has_own_forward and kinds <= own and all(module.include_prompt for module in pooling)

    @cached_property
    def takes_column(self) -> bool:
        first = self.modules[0]
        modalities = set(getattr(first, "modality_config", {"text": None}))
        reads_task = "task" in getattr(first, "_declared_forward_params", ())
        return not self.is_chain or modalities != {"text"} or bool(self.reads) or reads_task

    @cached_property
    def backbone(self) -> Any:
        """The transformers model that embeds tokens of text; None: there is none, or there are several."""
        found = [module for module in self.model.modules() if _name(module) == "Transformer"]
        return found[0].model if len(found) == 1 else None

    @cached_property
    def is_static(self) -> bool:
        return _name(self.modules[0]) == "StaticEmbedding"

    @property
    def why_padded(self) -> str | None:
        if self.is_static and self.is_chain:
            return None
        first, *others = self.modules
        if not self.is_chain or [_name(module) for module in (first, *others[:1])] != ["Transformer", "Pooling"]:
            return "its modules are not a Transformer, a Pooling and what follows on one vector per row"
        text = getattr(first, "modality_config", {}).get("text", {})
        if text.get("method") != "forward" or first.module_output_name != TOKEN_EMBEDDINGS:
            return "its Transformer does not give the vectors of tokens"
        return packing.why_not(first.model)

    def why_many_calls(self, capability: int, is_half: bool) -> str | None:
        if self.is_static:
            return None
        config, is_half = self.backbone.config, is_half or self.backbone.dtype.itemsize == 2
        return why_many_calls(
            config._attn_implementation, capability, is_half, lambda name: getattr(config, name, None)
        )

    @cached_property
    def has_token_vectors(self) -> bool:
        return any(kind.__name__ == "MultiVectorEncoder" for kind in type(self.model).__mro__)

    @property
    def num_frozen(self) -> int | None:
        if self.has_token_vectors or not self.has_own_forward:
            return None
        trains = [any(p.requires_grad for p in module.parameters()) for module in self.modules]
        if not any(trains):
            return None
        head = [one or _drops_out(module) for one, module in zip(trains, self.modules, strict=True)].index(True)
        gives_vectors = any(_gives_vectors(module) for module in self.modules[:head])
        return head if gives_vectors else None

    @property
    def frozen_modules(self) -> list[nn.Module]:
        return self.modules[: self.num_frozen]

    @cached_property
    def parts(self) -> dict[str, list[nn.Module]]:
        """Of a dual encoder "text" and "image", of a Router its routes; {} for others."""
        first = self.modules[0]
        if _name(first) == "Router":
            return {name: list(route) for name, route in first.sub_modules.items()}
        if (found := dual_encoder_of(first)) is None:
            return {}
        return {
            name: [one for of in names if isinstance(one := getattr(found, of, None), nn.Module)]
            for name, names in PARTS_OF_DUAL.items()
        }

    @property
    def frozen_parts(self) -> dict[str, list[nn.Module]]:
        if not self.has_own_forward or _any_trains(self.modules[1:]):
            return {}
        return {name: modules for name, modules in self.parts.items() if not _any_trains(modules)}

    def part_of(self, features: Mapping[str, Any], constants: Mapping[str, Any]) -> str | None:
        if _name(self.modules[0]) == "Router":
            return self.modules[0]._resolve_route(constants.get("task"), constants.get("modality"))  # type: ignore
        return ("image" if "pixel_values" in features else "text") if self.parts else None

    def freeze_unread(self) -> set[str]:
        """A Transformer that hands on the vectors of tokens has a pooler which nobody reads. It would have no state in
        the optimizer, without which accelerate 1.15 resumes no run under FSDP2."""
        found: set[str] = set()
        for name, module in self.model.named_modules():
            if _name(module) == "Transformer" and module.module_output_name == TOKEN_EMBEDDINGS:
                if isinstance(pooler := getattr(module.model, "pooler", None), nn.Module):
                    found |= {
                        f"{name}.model.pooler.{own}" for own, _ in pooler.requires_grad_(False).named_parameters()
                    }
            elif (dual := dual_encoder_of(module)) is not None:  # the loss has a scale of its own
                for own in ("logit_scale", "logit_bias"):
                    if isinstance(scale := getattr(dual, own, None), nn.Parameter):
                        scale.requires_grad_(False)
                        found.add(f"{name}.model.{own}")
        return found

    def call(
        self,
        wrapped: nn.Module,
        features: Mapping[str, Any],
        column: str | None = None,
        constants: Mapping[str, Any] | None = None,
        stops_at_pooled: bool = False,
    ) -> Any:
        if VECTORS in features:  # of a frozen part
            return features[VECTORS]
        given = {**features, **(constants or {})}
        more: dict[str, Any] = {name: given[name] for name in self.reads if name in given}
        if stops_at_pooled or POOLED in given:
            self._cut_forward()
            head = self.num_frozen  # now: another run may have trained more of the model
            more[PART] = (head if POOLED in given else 0, head if stops_at_pooled else None)
            given |= {EMBEDDING: given.pop(POOLED)} if POOLED in given else {}
        if (rows := given.pop("packed_rows", None)) is not None:
            given = _of_packed(self.modules[0], given, rows)
        elif "input_ids" in given and _name(self._reader(given)) == "StaticEmbedding":
            given = {**given, **_of_padded_static(given)}
        output = wrapped(given, **more)
        if self.has_token_vectors:
            vectors, mask = real_in_front(output[TOKEN_EMBEDDINGS], output.get("attention_mask"))
            return {"vectors": _at_least_float32(vectors), "mask": mask}
        found = output.get(EMBEDDING)
        return None if found is None else _at_least_float32(found)

    def _reader(self, given: Mapping[str, Any]) -> nn.Module:
        """The module that reads these features: in a Router the first of their route."""
        first = self.modules[0]
        while _name(first) == "Router":  # whose method is private, and what its forward calls (6.2)
            first = first.sub_modules[first._resolve_route(given.get("task"), given.get("modality"))][0]  # type: ignore
        return first

    def _cut_forward(self) -> None:
        """Wrappers call the model's forward, so it is there that a chain begins or ends in its middle."""
        if PART not in inspect.signature(self.model.forward).parameters:
            self.model.forward = _Parts(self.model)  # type: ignore[method-assign]


class _Parts:
    """The forward of a chain of modules, of which a part can be run alone: those that are frozen, or the rest."""

    def __init__(self, model: nn.Module):
        self.whole, self.model = model.forward, model

    def __call__(
        self, input: dict[str, Any], part: tuple[int, int | None] | None = None, **more: Any
    ) -> dict[str, Any]:
        """`part`: which of the modules are run; None: all."""
        if part is None:
            return self.whole(input, **more)
        for module in list(self.model.children())[slice(*part)]:
            input = module(input)
        return input


def _of_packed(first: nn.Module, given: dict[str, Any], rows: Any) -> dict[str, Any]:
    """Features (1, t) of rows end to end, as the first module takes them and `Pooling` reads them."""
    if _name(first) == "StaticEmbedding":
        return {"input_ids": given["input_ids"].squeeze(0), "offsets": rows.offsets[:-1].long()}
    return packing.sentence_inputs_of(first, given, rows)


def _of_padded_static(given: dict[str, Any]) -> dict[str, Any]:
    mask = given["attention_mask"].bool()
    lengths = mask.sum(1)
    return {"input_ids": given["input_ids"][mask], "offsets": lengths.cumsum(0) - lengths}


def forward_parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Of the model itself, below adapters."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return inspect.signature(base.forward).parameters


def real_in_front(tokens: torch.Tensor, attention_mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, T, H) and (B, T) -> the same with each row's real tokens first, in their order, whichever side the padding
    is on; the mask is boolean. Chunks of different widths then put a token at the same place."""
    if attention_mask is None:
        return tokens, torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
    if attention_mask.shape != tokens.shape[:2]:
        raise UsageError(
            f"attention_mask {tuple(attention_mask.shape)} must be (rows, tokens) = {tuple(tokens.shape[:2])} to tell "
            "which token vectors are real."
        )
    is_real = attention_mask.bool()
    order = is_real.int().argsort(dim=1, descending=True, stable=True)  # (B, T)
    return tokens.gather(1, order[..., None].expand_as(tokens)), is_real.gather(1, order)


def check_embeddings(embeddings: Any, model: nn.Module, num_rows: int) -> None:
    """UsageError for what a model returns that is no tensor (num_rows, D), nor a mapping of tensors over the rows."""
    if not isinstance(embeddings, Mapping):
        if isinstance(embeddings, torch.Tensor) and embeddings.dim() == 2 and len(embeddings) == num_rows:
            return
    elif all(isinstance(one, torch.Tensor) and one.dim() and len(one) == num_rows for one in embeddings.values()):
        return
    found = tuple(embeddings.shape) if isinstance(embeddings, torch.Tensor) else type(embeddings).__name__
    raise UsageError(
        f"{type(model).__name__} does not return embeddings: a loss over embeddings needs a tensor ({num_rows}, D) or "
        f"an output with the field `embeddings`, got {found}. Give a SentenceTransformer, or return them."
    )


def dual_encoder_of(module: nn.Module) -> Any:
    """The model inside a Transformer that embeds texts and pictures by a part of its own each; None: it is no such."""
    found = getattr(module, "model", None) if _name(module) == "Transformer" else None
    has_parts = all(isinstance(getattr(found, names[0], None), nn.Module) for names in PARTS_OF_DUAL.values())
    return found if has_parts and hasattr(found, "get_text_features") else None


def _any_trains(modules: Iterable[nn.Module]) -> bool:
    return any(parameter.requires_grad for module in modules for parameter in module.parameters())


def _gives_vectors(module: nn.Module) -> bool:
    return _name(module) in ("Pooling", "StaticEmbedding") or getattr(module, "module_output_name", "") == EMBEDDING


def _drops_out(module: nn.Module) -> bool:
    """Whether it is of dropout alone, which no frozen module around it holds in eval mode."""
    return not any(True for _ in module.parameters()) and any(isinstance(one, nn.Dropout) for one in module.modules())


def _name(module: nn.Module) -> str:
    """The class of a module that sentence-transformers ships, without the prefix that FSDP2 gives it; "" for others: a
    subclass may do anything."""
    kind = own_class(module)
    name = kind.__name__ if kind.__module__.startswith(f"{PACKAGE}.") else ""
    return OLDER_NAMES.get(name, name)


def _field(output: Any, name: str) -> Any:
    found = getattr(output, name, None)
    return output.get(name) if found is None and isinstance(output, Mapping) else found


def _at_least_float32(vectors: torch.Tensor) -> torch.Tensor:
    return vectors.to(torch.promote_types(vectors.dtype, torch.float32))

"""A causal language model cut into stages: its own loss lies on the last one, with the labels.

The first stage has the word embeddings, the last one the norm, the head and the loss. A stage is run as `stages.py`
says. On the last one the caller's `score` is called with something that takes the batch as the model itself does.

Where word embeddings and head share one weight (tied), first and last stage each have a copy, unless they lie on the
same rank. What stands for the part of the other rank then has the copy too, so that names are those of the whole
model: whoever saves, reads or groups parameters by name finds one parameter with two names, as in the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from accelerate.utils import convert_to_fp32
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from hf_dist_ext.errors import UsageError
from hf_dist_ext.strategies.pipeline.stages import (
    DECODERS,
    Passed,
    StagedModel,
    StageModule,
    firsts_of,
    layout_of,
    set_parameter,
    without_adapters,
)

OF_THE_LOSS = ("labels", "shift_labels", "num_items_in_batch")  # what the model takes and its backbone does not need

# A batch's features and a model that takes them -> (loss or None, what the model returns).
Score = Callable[[nn.Module, dict[str, Any]], tuple[torch.Tensor | None, Any]]


class Place(NamedTuple):
    """Of a parameter: the stage, its part, the name below it."""

    stage: int
    part: StageModule
    name: str

    @property
    def parameter(self) -> nn.Parameter:
        return self.part.module.get_parameter(self.name)


class StagedModelWithLoss(StagedModel):
    """A causal language model of which this rank has the stages `own`. Arguments as those of `StagedModel`.

    Attributes:
        ties: places in the first stage and the last one that hold the same parameter.
    """

    ties: Sequence[tuple[Place, Place]] = ()

    @staticmethod
    def base_of(model: nn.Module) -> nn.Module:
        base = without_adapters(model)
        config = getattr(base, "config", None)
        kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
        if kind is None or not isinstance(base, kind):
            raise UsageError(
                f"a pipeline can not be made of {type(base).__name__} with its own loss: it was measured to be exact "
                f"for causal language models of {', '.join(sorted(DECODERS))}. Use multi_gpu_fsdp."
            )
        layout_of(config, DECODERS)
        return base

    @staticmethod
    def backbone_of(base: nn.Module) -> nn.Module:
        return base.base_model

    @staticmethod
    def head_in_layers(config: Any) -> float:
        """Multiplications per token in the head and in the matrices of a layer."""
        width, heads = config.hidden_size, config.num_attention_heads
        head_width = getattr(config, "head_dim", None) or width // heads
        attention = 2 * head_width * (heads + config.num_key_value_heads)
        return config.vocab_size / (attention + 3 * config.intermediate_size)

    @contextmanager
    def saving(self) -> Iterator[None]:
        with self.whole():
            self.base._is_distributed_loading_by_transformers = False
            try:
                yield
            finally:
                self.base._is_distributed_loading_by_transformers = True

    # ---- a weight of two stages ----

    def check_is_covered(self) -> None:
        first, last = (self._places(stage) for stage in (0, self.num_stages - 1))
        self.ties = [(first[key], last[key]) for key in first if key in last]
        super().check_is_covered()

    def _places(self, stage: int) -> dict[int, Place]:
        named = [(part, name, p) for part in self.parts[stage] for name, p in part.module.named_parameters()]
        return {id(parameter): Place(stage, part, name) for part, name, parameter in named}

    def may_share(self, stages: set[int]) -> bool:
        return stages == {0, self.num_stages - 1}

    def stand_in(self, part: StageModule) -> Passed:
        """With the copy of a tied weight. On a rank that has none the left out parts stay tied, so that it is counted
        once."""
        passed = super().stand_in(part)
        for first, last in self.ties:
            place, other = (first, last) if last.stage in self.own else (last, first)
            if place.part.module is part.module:
                set_parameter(part.module, place.name, other.parameter)
                if other.stage in self.own:
                    set_parameter(passed, place.name, other.parameter)
        return passed

    def renew(self) -> None:
        """Splitting makes a parameter of each name: where both tied ones lie here they become one again."""
        for first, last in self.ties:
            if first.stage in self.own and last.stage in self.own:
                set_parameter(last.part.module, last.name, first.parameter)
        super().renew()

    @property
    def copied(self) -> list[nn.Parameter]:
        """Parameters of which another rank has a copy."""
        return [
            place.parameter
            for tie in self.ties
            for place, other in (tie, tie[::-1])
            if place.stage in self.own and other.stage not in self.own
        ]

    @property
    def copies(self) -> list[nn.Parameter]:
        return [] if 0 in self.own else self.copied

    # ---- a stage ----

    def run(self, stage: int, features: Mapping[str, Any], hidden: torch.Tensor | None) -> torch.Tensor:
        """One of the stages before the last one: (b, T, H), also of what it gives."""
        features = {name: value for name, value in features.items() if name not in OF_THE_LOSS}
        with self.only(stage):
            return self.backbone_of(self.base)(**_from(hidden, features)).last_hidden_state

    def score(
        self,
        features: dict[str, Any],
        hidden: torch.Tensor,
        score: Score,
        precision: Callable[[], AbstractContextManager],
    ) -> tuple[torch.Tensor | None, Any]:
        """The last stage: what `score` returns. `precision`: context around the model's forward alone, whose outputs
        are float32 then, as those of a model that accelerate has prepared."""
        with self.only(self.num_stages - 1):
            return score(_LastStage(self.base, hidden, precision), features)


def _from(hidden: torch.Tensor | None, features: Mapping[str, Any]) -> dict[str, Any]:
    """With hidden states in place of tokens, and no cache of keys and values, which nobody would read."""
    features = {**features, "use_cache": False}
    if hidden is not None:
        del features["input_ids"]
        features["inputs_embeds"] = hidden
    return features


class _LastStage(nn.Module):
    """Takes the features of a batch as the model does; `_get_name` is the model's, which Trainer asks for."""

    def __init__(self, base: nn.Module, hidden: torch.Tensor, precision: Callable[[], AbstractContextManager]):
        super().__init__()
        self.__dict__["base"] = base  # no module of this one: accelerate looks through those
        self.hidden, self.precision = hidden, precision

    def _get_name(self) -> str:
        return self.base._get_name()

    def forward(self, **features: Any) -> Any:
        with self.precision():
            is_mixed = torch.is_autocast_enabled(self.hidden.device.type)
            outputs = self.base(**_from(self.hidden, features))
        return convert_to_fp32(outputs) if is_mixed else outputs


def staged(
    kind: type,
    own: Sequence[int],
    places: Sequence[int],
    split: Sequence[int] | None,
    finish: Callable[[nn.Module], None] = lambda model: None,
) -> type:
    """A class of causal language models which `from_pretrained` fills with the weights of the stages `own` alone;
    `stages.put_back` makes its model one that can be cut into these stages. `finish`: what a model goes through before
    it is filled."""

    def __init__(self: Any, config: Any, *arguments: Any, **options: Any) -> None:
        kind.__init__(self, config, *arguments, **options)
        self.__class__ = kind
        for name, source in self.all_tied_weights_keys.items():  # from_pretrained ties them after reading
            set_parameter(self, name, self.get_parameter(source))
        cut = StagedModelWithLoss(
            self, own, firsts_of(self, places, split, StagedModelWithLoss)
        )  # leaves stand-ins behind
        finish(self)
        cut.renew()
        if not {0, len(places) - 1} & set(own):
            self.all_tied_weights_keys = {}  # neither of two tied weights lies here

    body = {"__init__": __init__, "_keys_to_ignore_on_load_unexpected": [""]}  # other stages' weights are in the files
    return type(kind.__name__, (kind,), body | {"__module__": kind.__module__})

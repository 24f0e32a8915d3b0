"""A model's forward as a plan reads it: what its layers keep for a backward, what they compute, and its parameters.

tasks/trace.py finds the figures by torch's own forward, of one row of a column. Everything is in bytes unless it says
elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

# Backward holds gradients of values beside what was saved. In traces of torch over encoders and decoders, with and
# without autocast: 1.6 to 3.4 times the widest value, 1.1 to 2.4 with checkpointing.
TEMPORARY_VALUES = 3
TEMPORARY_VALUES_CHECKPOINTED = 2


@dataclass(frozen=True)
class Parameter:
    elements: float
    item: float  # bytes per element as stored
    trains: bool
    layer: str | None = None  # the layer it belongs to, None outside of all
    columns: int = 0  # of a matrix; 0 for vectors
    is_table: bool = False  # a matrix of which rows are taken
    gets_gradient: bool = True  # by the rows of some column

    @property
    def is_packed(self) -> bool:
        """Whether it is stored in 4 bits, and unpacked for each product."""
        return self.item < 1

    @property
    def is_multiplied(self) -> bool:
        """Whether FSDP gathers it in half precision under autocast (strategies/fsdp.py)."""
        return 1 < self.columns < self.elements and not self.is_table


@dataclass
class Layer:
    """What one layer keeps: `saved` for its backward, `casts` copies of its weights, `input` when checkpointed."""

    name: str
    input: float
    saved: float = 0.0
    casts: float = 0.0
    frozen_casts: float = 0.0  # those among them of frozen weights
    multiply_adds: float = 0.0  # of one forward
    backward: float = 0.0  # multiply-adds of its backward
    largest: float = 0.0  # bytes of the largest value made
    beside: float = 0.0  # what a checkpoint holds beside `input`, such as a mask: with the first layer that takes it
    keeps_input: bool = False  # its input is among what is saved
    is_of_images: bool = False

    def add(self, other: Layer) -> None:
        for name in ("saved", "casts", "frozen_casts", "multiply_adds", "backward"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.largest = max(self.largest, other.largest)


@dataclass
class Cost:
    """Of a forward and backward: saved values, autocast's copies of weights, what backward makes meanwhile."""

    saved: float = 0.0
    casts: float = 0.0
    temporary: float = 0.0

    @property
    def total(self) -> float:
        """Peak of what autograd keeps."""
        return self.saved + self.casts

    @property
    def activations(self) -> float:
        return self.saved + self.temporary


@dataclass
class Forward:
    """`before`: what comes before the layers and between them. `after`: what follows the last."""

    before: Layer = field(default_factory=lambda: Layer("", 0.0))
    layers: list[Layer] = field(default_factory=list)
    after: Layer = field(default_factory=lambda: Layer("", 0.0))

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Forward:
        """Of what tasks/trace.py prints."""
        before, *layers, after = (Layer(**one) for one in (found["before"], *found["layers"], found["after"]))
        return cls(before, layers, after)

    @property
    def parts(self) -> list[Layer]:
        return [self.before, *self.layers, self.after]

    def cost(self, is_checkpointed: bool = False) -> Cost:
        """The peak: with checkpointing, all inputs and either what comes after the layers, whose backward is first, or
        the one layer whose backward runs."""
        # a layer through which no gradient flows is run once, without a checkpoint that holds its input
        again = [layer for layer in self.layers if is_checkpointed and layer.saved]
        plain = [] if is_checkpointed else self.layers
        inputs = sum(layer.input + layer.beside for layer in again)
        widest = max(again, key=lambda layer: layer.saved + layer.casts, default=Layer("", 0.0))
        recomputed = widest.saved - (widest.input if widest.keeps_input else 0.0)
        base = self.before.saved + sum(layer.saved for layer in plain) + inputs
        casts = self.before.casts + sum(layer.casts for layer in plain)
        largest = max(layer.largest for layer in [*self.layers, self.before])
        widest_first = max(self.after.largest, 0.0 if again else largest)
        first = Cost(base + self.after.saved, casts + self.after.casts, TEMPORARY_VALUES * widest_first)
        last = Cost(base + recomputed, casts + widest.casts, TEMPORARY_VALUES_CHECKPOINTED * largest)
        return max(first, last, key=lambda cost: cost.total + cost.temporary) if again else first


# Every tensor of a model that a group of devices shares is either split over them or whole on each, so what one device
# has is a constant and a part that falls with their number: the whole model, and one split once, give both.


def shared(whole: float, split: float, ways: int, parts: int) -> float:
    """Of `whole`, which is `split` on each of so many `ways`: on each of `parts` devices."""
    divided = (whole - split) * ways / (ways - 1)
    return whole - divided + divided / parts


def share_forward(whole: Forward, split: Forward, ways: int, parts: int) -> Forward:
    def share(one: Layer, other: Layer) -> Layer:
        names = [f.name for f in fields(Layer) if isinstance(getattr(one, f.name), float)]
        found = {name: shared(getattr(one, name), getattr(other, name), ways, parts) for name in names}
        found["largest"] = max(found["largest"], min(one.input, one.largest))  # layers take and give whole rows
        return replace(one, **found)

    before, *layers, after = map(share, whole.parts, split.parts)
    return Forward(before, layers, after)


def share_parameter(whole: Parameter, split: Parameter, ways: int, parts: int) -> Parameter:
    elements, columns = (
        round(shared(getattr(whole, name), getattr(split, name), ways, parts)) for name in ("elements", "columns")
    )
    return replace(whole, elements=elements, columns=columns)

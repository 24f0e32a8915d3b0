"""What autograd keeps of a forward, by arithmetic: operations on shapes instead of tensors, without torch.

    tape = Tape(Recipe(autocast_bytes=2))
    x = tape.embedding("embed_tokens", rows=8 * 128, entries=30522, width=768)
    with tape.layer("layers.0", x):
        x = tape.linear("mlp.up_proj", x, 768)
    tape.parameters, tape.cost()

(1) an operation adds its parameters under the name that transformers gives them, and says what its backward needs
(2) what is kept twice is counted once: views are the same `Value`, copies are new ones
(3) nothing is kept where no gradient flows: a frozen layer below everything that trains keeps nothing, a frozen layer
    above it keeps what the gradient of its input needs, and no more
(4) under autocast, matrix products keep a cast copy of their input, and of their weight, next to what is stored
(5) a layer may be checkpointed: it then keeps its input, and the rest only while its own backward runs

The rules are those of torch 2.13, read off with saved-tensor hooks; tests hold them to a few percent.
Everything is in bytes unless it says elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

# Backward holds gradients of values beside what was saved. In traces of torch (tasks/trace.py) over encoders and
# decoders, with and without autocast: 1.6 to 3.4 times the widest value, 1.1 to 2.4 with checkpointing.
TEMPORARY_VALUES = 3
TEMPORARY_VALUES_CHECKPOINTED = 2


@dataclass(frozen=True)
class Value:
    """A tensor (rows, width): `rows` are tokens, or whatever the first axes hold."""

    rows: float
    width: float
    item: int  # bytes per element
    flows: bool  # whether a gradient comes back through it
    whole: Value | None = None  # what this is a view of: kept together

    @property
    def bytes(self) -> float:
        return self.rows * self.width * self.item


@dataclass(frozen=True)
class Parameter:
    elements: int
    item: int  # bytes per element as stored
    trains: bool
    layer: str | None = None  # the layer it belongs to, None outside of all
    columns: int = 0  # of a matrix; 0 for vectors
    is_table: bool = False  # a matrix of which rows are taken

    @property
    def is_multiplied(self) -> bool:
        """Whether FSDP gathers it in half precision under autocast (strategies/fsdp.py)."""
        return 1 < self.columns < self.elements and not self.is_table


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters: rank, dropout, and which modules have them."""

    rank: int
    dropout: float = 0.0
    targets: Callable[[str], bool] = lambda name: False
    wanted: Sequence[str] | str = ()  # in the run file's words


@dataclass(frozen=True)
class Recipe:
    """How a model is run. Functions take the name of a parameter; sizes are bytes per element."""

    trains: Callable[[str], bool] = lambda name: True
    item: Callable[[str], int] = lambda name: 4  # that it is stored in
    product_item: int | None = None  # of matrices that are multiplied with, where they are cast already (FSDP)
    autocast_bytes: int | None = None  # None: without autocast
    attention: str = "sdpa"  # anything but "eager" never holds tokens x tokens per head
    has_padding: bool = False  # rows of different lengths, so that attention takes a mask
    mask_bytes: int = 1  # of a dropout mask; 0 stands for an element's own, as on a CPU
    lora: Lora | None = None
    is_training: bool = True


@dataclass
class Layer:
    """What one layer keeps: `saved` for its backward, `casts` copies of its weights, `input` when checkpointed."""

    name: str
    input: float
    saved: float = 0.0
    casts: float = 0.0
    frozen_casts: float = 0.0  # those among them of frozen weights
    products: float = 0.0  # multiply-adds of one forward
    backward: float = 0.0  # and of its backward
    largest: float = 0.0  # bytes of the largest value made
    keeps_input: bool = False  # its input is among what is saved


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
class Tape:
    recipe: Recipe = field(default_factory=Recipe)
    parameters: dict[str, Parameter] = field(default_factory=dict)
    layers: list[Layer] = field(default_factory=list)
    prefix: str = ""

    def __post_init__(self) -> None:
        self.before, self.after = Layer("", 0.0), Layer("", 0.0)  # the last layer; what belongs to no layer
        self._current = self.before
        self._kept: set[int] = set()
        self._cast_of: set[str] = set()
        self._input: Value | None = None
        self._alive: list[Value] = []  # so that ids stay unique

    # ---- structure ----

    @contextmanager
    def module(self, name: str) -> Iterator[None]:
        before, self.prefix = self.prefix, f"{self.prefix}{name}."
        try:
            yield
        finally:
            self.prefix = before

    @contextmanager
    def layer(self, name: str, x: Value) -> Iterator[None]:
        """One repeated layer with input x: the unit of checkpointing and of FSDP."""
        self._join(self.after)  # what comes between two layers is not what comes after the last
        self._current, self._input = Layer(f"{self.prefix}{name}", x.bytes), x
        self.layers.append(self._current)
        try:
            with self.module(name):
                yield
        finally:
            self._current = self.after

    def _join(self, between: Layer) -> None:
        before = self.before
        before.saved, before.casts = before.saved + between.saved, before.casts + between.casts
        before.frozen_casts += between.frozen_casts
        before.products, before.backward = before.products + between.products, before.backward + between.backward
        before.largest = max(before.largest, between.largest)
        self.after = Layer("", 0.0)

    def cost(self, checkpointed: Callable[[str], bool] = lambda layer: False) -> Cost:
        """The peak: with checkpointing, all inputs and either what comes after the layers, whose backward is first, or
        the one layer whose backward runs. (5)"""
        # a layer through which no gradient flows is run once, without a checkpoint that holds its input
        again = [layer for layer in self.layers if checkpointed(layer.name) and layer.saved]
        plain = [layer for layer in self.layers if not checkpointed(layer.name)]
        inputs = sum(layer.input for layer in again)
        widest = max(again, key=lambda layer: layer.saved + layer.casts, default=Layer("", 0.0))
        recomputed = widest.saved - (widest.input if widest.keeps_input else 0.0)
        base = self.before.saved + sum(layer.saved for layer in plain) + inputs
        casts = self.before.casts + sum(layer.casts for layer in plain)
        largest = max(layer.largest for layer in [*self.layers, self.before])
        widest_first = max(self.after.largest, 0.0 if again else largest)
        first = Cost(base + self.after.saved, casts + self.after.casts, TEMPORARY_VALUES * widest_first)
        last = Cost(base + recomputed, casts + widest.casts, TEMPORARY_VALUES_CHECKPOINTED * largest)
        return max(first, last, key=lambda cost: cost.total + cost.temporary) if again else first

    # ---- what the rules are made of ----

    def new(self, rows: float, width: float, item: int, flows: bool) -> Value:
        value = Value(rows, width, item, flows and self.recipe.is_training)
        self._alive.append(value)
        self._current.largest = max(self._current.largest, value.bytes)
        return value

    def part(self, whole: Value, width: float) -> Value:
        """A view of some columns."""
        return replace(whole, width=width, whole=whole.whole or whole)

    def regrouped(self, x: Value, count: float) -> Value:
        """A view that puts `count` neighbouring rows into one."""
        return replace(x, rows=x.rows / count, width=x.width * count, whole=x.whole or x)

    def keep(self, value: Value) -> None:
        """(2)"""
        value = value.whole or value
        if id(value) not in self._kept and self.recipe.is_training:
            self._kept.add(id(value))
            self._current.keeps_input |= value is self._input
            self._current.saved += value.bytes

    def keep_bytes(self, count: float) -> None:
        if self.recipe.is_training:
            self._current.saved += count

    def work(self, products: float, again: float) -> None:
        """Multiply-adds of one forward, and how many times as many its backward has."""
        self._current.products += products
        self._current.backward += products * again

    def parameter(
        self, name: str, elements: int, columns: int = 0, trains: bool | None = None, is_table: bool = False
    ) -> Parameter:
        """(1)"""
        full = self.prefix + name
        if full not in self.parameters:
            trains = self.recipe.trains(full) if trains is None else trains
            layer = self._current.name or None
            parameter = Parameter(elements, self.recipe.item(full), trains, layer, columns, is_table)
            if parameter.is_multiplied and self.recipe.product_item:
                parameter = replace(parameter, item=self.recipe.product_item)
            self.parameters[full] = parameter
        return self.parameters[full]

    def cast(self, x: Value, item: int) -> Value:
        return x if x.item == item else self.new(x.rows, x.width, item, x.flows)

    def _cast_weight(self, name: str, weight: Parameter, is_needed: bool) -> None:
        """(4) A trained weight's copy is cached until autocast ends, a frozen one's kept while backward needs it."""
        item = self.recipe.autocast_bytes
        if item is None or weight.item == item or name in self._cast_of or not self.recipe.is_training:
            return
        if weight.trains or is_needed:
            self._cast_of.add(name)
            self._current.casts += weight.elements * item
            self._current.frozen_casts += weight.elements * item * (not weight.trains)

    # ---- operations ----

    def embedding(self, name: str, rows: float, entries: int, width: int) -> Value:
        weight = self.parameter(f"{name}.weight", entries * width, width, is_table=True)
        if weight.trains:
            self.keep_bytes(8 * rows)  # the indices
        return self.new(rows, width, weight.item, weight.trains)

    def learned(self, name: str, rows: float, entries: int, width: int) -> Value:
        """Position vectors that are added to every row."""
        weight = self.parameter(name, entries * width, width, is_table=True)
        return self.new(rows, width, weight.item, weight.trains)

    def linear(self, name: str, x: Value, width: int, bias: bool = True, rows: float | None = None) -> Value:
        full = f"{self.prefix}{name}"
        weight = self.parameter(f"{name}.weight", int(x.width) * width, int(x.width))
        has_bias = self.parameter(f"{name}.bias", width) if bias else None
        out = self.product(f"{full}.weight", weight, x, width, has_bias is not None and has_bias.trains)
        lora = self.recipe.lora
        if lora is not None and lora.targets(full):
            out = self._adapted(name, x, out, lora)
        return out

    def product(self, full: str, weight: Parameter, x: Value, width: float, bias_trains: bool = False) -> Value:
        item = self.recipe.autocast_bytes or x.item
        source = self.cast(x, item)
        if weight.trains:
            self.keep(source)
        self._cast_weight(full, weight, x.flows)
        self.work(x.rows * x.width * width, x.flows + weight.trains)
        return self.new(x.rows, width, item, x.flows or weight.trains or bias_trains)

    def _adapted(self, name: str, x: Value, out: Value, lora: Lora) -> Value:
        """PEFT: x goes to the adapter's own precision, through its dropout, A and B; the scaled result is added."""
        first = self.parameter(f"{name}.lora_A.weight", int(x.width) * lora.rank, int(x.width), trains=True)
        second = self.parameter(f"{name}.lora_B.weight", lora.rank * int(out.width), lora.rank, trains=True)
        source = self.dropout(self.cast(x, first.item), lora.dropout)
        inner = self.product(f"{self.prefix}{name}.lora_A.weight", first, source, lora.rank)
        outer = self.product(f"{self.prefix}{name}.lora_B.weight", second, inner, out.width)
        return self.new(out.rows, out.width, max(out.item, outer.item), True)

    def layer_norm(self, name: str, x: Value, bias: bool = True) -> Value:
        weight = self.parameter(f"{name}.weight", int(x.width))
        if bias:
            self.parameter(f"{name}.bias", int(x.width))
        source = self.cast(x, 4) if self.recipe.autocast_bytes else x  # autocast runs it in float32
        if source.flows or weight.trains:
            self.keep(source)
            self.keep_bytes(2 * 4 * x.rows)  # mean and standard deviation
        return self.new(x.rows, x.width, source.item, source.flows or weight.trains)

    def rms_norm(self, name: str, x: Value, adds_one: bool = False, width: int | None = None) -> Value:
        """The norm of Llama: in float32, then the weight in the input's precision; Gemma's multiplies by 1 + weight,
        in float32. `width`: per head rather than over all of x."""
        weight = self.parameter(f"{name}.weight", width or int(x.width))
        groups = x.rows * x.width / (width or x.width)
        wide = self.cast(x, 4)
        if x.flows:
            self.keep(wide)
            self.keep_bytes(4 * groups)  # one factor per group
        normed = self.cast(self.new(x.rows, x.width, 4, x.flows), 4 if adds_one else x.item)
        if weight.trains:
            self.keep(normed)
        out = self.new(x.rows, x.width, max(normed.item, weight.item), x.flows or weight.trains)
        return self.cast(out, x.item) if adds_one else out

    def activation(self, x: Value, kind: str) -> Value:
        if kind == "quick_gelu":  # x * sigmoid(1.702 x)
            return self.multiply(x, self._keeping_result(x))
        if kind in ("relu", "tanh", "sigmoid"):
            return self._keeping_result(x)
        if x.flows:
            self.keep(x)
        return self.new(x.rows, x.width, x.item, x.flows)

    def _keeping_result(self, x: Value) -> Value:
        out = self.new(x.rows, x.width, x.item, x.flows)
        if x.flows:
            self.keep(out)
        return out

    def multiply(self, a: Value, b: Value) -> Value:
        if b.flows:
            self.keep(a)
        if a.flows:
            self.keep(b)
        return self.new(a.rows, max(a.width, b.width), max(a.item, b.item), a.flows or b.flows)

    def add(self, a: Value, b: Value) -> Value:
        return self.new(a.rows, a.width, max(a.item, b.item), a.flows or b.flows)

    def scaled(self, name: str, x: Value) -> Value:
        """Times a learned vector."""
        weight = self.parameter(name, int(x.width))
        if weight.trains:
            self.keep(x)
        return self.new(x.rows, x.width, max(x.item, weight.item), x.flows or weight.trains)

    def dropout(self, x: Value, probability: float) -> Value:
        if not probability:
            return x
        if x.flows:
            self.keep_bytes(x.rows * x.width * (self.recipe.mask_bytes or x.item))
        return self.new(x.rows, x.width, x.item, x.flows)

    def attention(
        self,
        query: Value,
        key: Value,
        value: Value,
        heads: int,
        length: float,
        dropout: float = 0.0,
        shared: int | None = None,
        causal: bool = False,
        kind: str | None = None,
        capped: bool = False,
        masked: bool = True,
    ) -> Value:
        """softmax(q k^T) v. Keys and values of fewer heads (`shared`) are repeated where a kernel needs that.

        `kind` wins over the recipe's attention; `capped`: scores go through tanh; `masked`: padding is masked.
        """
        kind = kind or self.recipe.attention
        item = self.recipe.autocast_bytes or query.item
        query, key, value = (self.cast(one, item) for one in (query, key, value))
        flows = query.flows or key.flows or value.flows
        # one key head is repeated by a stride of zero, without a copy
        if 1 < (shared or heads) < heads and (self.recipe.has_padding or kind == "eager"):
            key, value = (self.new(one.rows, query.width, one.item, one.flows) for one in (key, value))
        out = self.new(query.rows, query.width, item, flows)
        self.work(2 * query.rows * length * query.width * (0.5 if causal else 1), 2 * flows)
        if not flows:
            return out
        for one in (query, key, value):
            self.keep(one)
        scores = query.rows * heads * length  # elements
        if kind == "eager" or (dropout and not self.recipe.mask_bytes):  # a CPU's kernel has no dropout
            # the softmax's result, what the product with the values takes, and dropout's mask
            kept = 4 if item < 4 else 0
            self.keep_bytes(scores * (item + kept + (item if capped else 0)))
            if dropout:
                self.keep_bytes(scores * (item + (self.recipe.mask_bytes or item)))
            return out
        self.keep(out)
        self.keep_bytes(4 * query.rows * heads)  # log of the sum of exponentials
        if self.recipe.has_padding and masked:
            self.keep_bytes(query.rows * length * item)  # the mask, in the kernel's precision
        return out

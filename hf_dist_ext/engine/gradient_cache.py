"""Gradient cache (https://huggingface.co/papers/2101.06983): the full batch's gradient at one chunk's memory.

(1) encode every chunk without a graph, remembering the random state it began with
(2) score the embeddings, and backward from the loss to the embeddings only: the cache
(3) encode every chunk again under its random state, and backward <embedding, cached gradient>

(3) is the chain rule: sum_i <e_i(theta), dL/de_i> has dL/dtheta as its gradient, so chunks may be replayed one at a
time and their gradients add up to the full batch's. Chunks whose graph is kept in (1) skip their second forward; with
one chunk, or all kept, the step costs what the plain step costs.

    >>> import torch
    >>> from hf_dist_ext.engine.chunks import ChunkLimits, lay_out
    >>> from hf_dist_ext.engine.gradient_cache import cached_step
    >>> encoder = torch.nn.Linear(8, 4)
    >>> batch = {"query": {"x": torch.randn(32, 8)}, "positive": {"x": torch.randn(32, 8)}}
    >>> def score(embeddings):
    ...     logits = embeddings["query"] @ embeddings["positive"].T
    ...     return torch.nn.functional.cross_entropy(logits, torch.arange(32)), {}
    >>> chunked = lay_out(batch, ChunkLimits(max_rows=5))
    >>> step = cached_step(chunked, encode=lambda chunk: encoder(chunk.features["x"]), score=score)
    >>> encoder.weight.grad.shape, step.num_chunks
    (torch.Size([4, 8]), 13)

This file knows no wrapper, rank or scaler: it is told how to encode, score, run backward and which part reduces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import NoReturn

import torch

from hf_dist_ext.engine.chunks import Chunk, ChunkedBatch
from hf_dist_ext.errors import UsageError

Embeddings = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Phase:
    """What a forward or backward is for, so that the caller can set up collectives around it.

    with_graph: pass 3, or a chunk whose graph is kept; False is pass 1.
    is_last: the one forward-and-backward of this step after which gradients are complete on this rank.
    """

    with_graph: bool
    is_last: bool = False


@dataclass
class CachedStep:
    """What a step did. `loss` is detached; `metrics` are the score function's own."""

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]
    num_chunks: int
    num_forwards: int
    drew_randomness: bool


class RandomState:
    """The generators a forward may draw from, as they are now: the CPU's and the current accelerator's."""

    def __init__(self, device: torch.device):
        self.cpu = torch.get_rng_state()
        self.device_module = None if device.type == "cpu" else torch.get_device_module(device)
        self.device = device
        self.on_device = None if self.device_module is None else self.device_module.get_rng_state(device)

    def is_now(self) -> bool:
        """Whether nothing was drawn since; from host copies, no synchronisation."""
        now = RandomState(self.device)
        same_on_device = self.on_device is None or torch.equal(self.on_device, now.on_device)
        return same_on_device and torch.equal(self.cpu, now.cpu)

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.device_module is not None:
            self.device_module.set_rng_state(self.on_device, self.device)


@contextmanager
def _replayed(state: RandomState):
    after = RandomState(state.device)
    state.restore()
    try:
        yield
    finally:
        after.restore()


def _no_phase(phase: Phase) -> AbstractContextManager:
    return nullcontext()


def cached_step(
    batch: ChunkedBatch,
    encode: Callable[[Chunk], torch.Tensor],
    score: Callable[[Embeddings], tuple[torch.Tensor, dict[str, torch.Tensor]]],
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward,
    sync: Callable[[Phase], AbstractContextManager] = _no_phase,
    loss_parameters: Iterable[torch.nn.Parameter] = (),
    keep_graph: int = 0,
    backward_together: bool = True,
    last_reaches_all: bool = True,
    wide: ChunkedBatch | None = None,
    is_frozen: Callable[[Chunk], bool] = lambda chunk: False,
) -> CachedStep:
    """One forward and backward over a batch; gradients are added to the parameters' `.grad`.

    Args:
        encode: chunk -> embeddings (b, D); called once per chunk without a graph and once with one.
        score: column -> (rows, D) leaves, to (scalar loss, metrics). Collectives belong in here.
        backward: runs a scalar's backward; the place for gradient accumulation's division and the fp16 scale, which
            so enter exactly once.
        sync: context around every forward and backward; told by its `Phase` which one completes the gradients.
        loss_parameters: parameters used by `score` only (a temperature); they receive their exact gradient.
        keep_graph: number of chunks whose graph is kept from pass 1 (at least as many as there are chunks: all).
        backward_together: chunks whose graphs are alive at once go through one backward, as the plain step does. False
            runs one backward per chunk (wrappers whose hooks count forwards, such as FSDP2).
        last_reaches_all: the backward that completes the gradients reaches every tower, so it is of a chunk of each.
            False: of one chunk, and no two replayed graphs are alive at once (ZeRO-3).
        wide: the same batch in fewer, larger chunks for (1), which holds no graph. Used when no graph is kept; if the
            forward turns out to draw random numbers, (1) is run again in the chunks that (3) can replay.
        is_frozen: chunks whose rows train nothing (their column's tower is frozen): encoded once, and not in (3).

    Raises:
        UsageError: nothing that was encoded requires a gradient.
    """
    chunks = batch.chunks()
    loss_parameters = [p for p in loss_parameters if p.requires_grad]
    frozen = {i for i, chunk in enumerate(chunks) if is_frozen(chunk)}
    trained = [i for i in range(len(chunks)) if i not in frozen]
    if not trained:
        _refuse_nothing_trains()
    final = _final_chunks(chunks, trained)[0 if last_reaches_all else -1 :]
    trained = [*(i for i in trained if i not in final), *final]
    keep_all = keep_graph >= len(trained) or len(trained) == 1
    kept = set(trained) if keep_all else set([i for i in trained if i not in final][:keep_graph])

    # (1)
    start = RandomState(chunks[0].device)
    columns, num_forwards = None, 0
    if wide is not None and not kept:
        columns, num_forwards = encode_without_graph(wide, encode, sync), len(wide.chunks())
        if not start.is_now():
            start.restore()
            columns = None
    outputs: list[torch.Tensor] = [torch.empty(0)] * len(chunks)
    states: list[RandomState | None] = [None] * len(chunks)
    # Frozen chunks first: none may run between the forward that completes the step and its backward.
    for i in [*sorted(frozen), *trained] if columns is None else ():
        has_graph = i in kept
        states[i] = None if has_graph else RandomState(start.device)
        with sync(Phase(has_graph, is_last=keep_all and i == trained[-1])), torch.set_grad_enabled(has_graph):
            outputs[i] = encode(chunks[i])
        num_forwards += 1
    drew_randomness = not start.is_now()
    if columns is None:
        columns = batch.to_columns([output.detach() for output in outputs], chunks)

    # (2)
    leaves = {}
    for name, rows in columns.items():
        # Half precision leaves would round the cache before the fp16 scale is applied; the plain step scales first.
        leaves[name] = (rows.float() if rows.dtype.itemsize < 4 else rows.detach()).requires_grad_()
    loss, metrics = score(leaves)
    gradients = torch.autograd.grad(loss, [*leaves.values(), *loss_parameters], allow_unused=True)
    column_gradients = {
        name: torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(leaves.items(), gradients, strict=False)
    }
    cache = batch.to_chunks(column_gradients, chunks)
    parameter_terms = [
        (parameter * gradient.detach()).sum()
        for parameter, gradient in zip(loss_parameters, gradients[len(leaves) :], strict=True)
        if gradient is not None
    ]

    # (3) kept graphs first (they hold memory), then replays, and last one chunk of every tower: that backward reduces.
    def surrogate(i: int, output: torch.Tensor) -> torch.Tensor | None:
        return (output * cache[i]).sum() if output.requires_grad else None

    def replay(i: int) -> torch.Tensor:
        with _replayed(states[i]) if drew_randomness else nullcontext():
            return encode(chunks[i])

    num_backwards = 0
    kept_not_last = [i for i in sorted(kept) if not (keep_all and i == trained[-1])]
    if keep_all and backward_together:
        kept_not_last = []
    for group in [kept_not_last] if backward_together else [[i] for i in kept_not_last]:
        terms = [t for t in (surrogate(i, outputs[i]) for i in group) if t is not None]
        if terms:
            with sync(Phase(True)):
                backward(_total(terms))
            num_backwards += 1
        for i in group:
            outputs[i] = outputs[i].detach()
    for i in trained:
        if i in kept or i in final:
            continue
        with sync(Phase(True)):
            term = surrogate(i, replay(i))
            num_forwards += 1
            if term is not None:
                backward(term)
                num_backwards += 1
    if keep_all:
        alive = trained if backward_together else trained[-1:]
        terms = [surrogate(i, outputs[i]) for i in alive]
        with sync(Phase(True, is_last=True)):
            num_backwards += _finish(terms + parameter_terms, backward)
    else:
        terms = []
        for i in final[:-1]:
            with sync(Phase(True)):
                terms.append(surrogate(i, replay(i)))
        with sync(Phase(True, is_last=True)):
            terms.append(surrogate(final[-1], replay(final[-1])))
            num_backwards += _finish(terms + parameter_terms, backward)
        num_forwards += len(final)
    if num_backwards == 0:
        _refuse_nothing_trains()
    return CachedStep(loss.detach(), metrics, len(chunks), num_forwards, drew_randomness)


def _refuse_nothing_trains() -> NoReturn:
    raise UsageError(
        "nothing that was encoded requires a gradient: no trainable parameter is used by the model. "
        "Check which parameters have requires_grad."
    )


def encode_without_graph(
    batch: ChunkedBatch, encode: Callable[[Chunk], torch.Tensor], sync: Callable[[Phase], AbstractContextManager]
) -> Embeddings:
    """Column -> (rows, D) in the batch's order: pass 1 alone, for rows whose features train nothing."""
    chunks, outputs = batch.chunks(), []
    for chunk in chunks:
        with sync(Phase(with_graph=False)), torch.no_grad():
            outputs.append(encode(chunk))
    return batch.to_columns(outputs, chunks)


def _finish(terms: Sequence[torch.Tensor | None], backward: Callable[[torch.Tensor], None]) -> int:
    terms = [term for term in terms if term is not None]
    if terms:
        backward(_total(terms))
    return len(terms)


def _total(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    return terms[0] if len(terms) == 1 else torch.stack([term.reshape(()) for term in terms]).sum()


def _final_chunks(chunks: Sequence[Chunk], trained: Sequence[int]) -> list[int]:
    """One full-size chunk of every table, with images where there are any: replayed last and back-propagated together,
    so that the backward which reduces reaches the parameters of every tower and is long enough to hide the reduction.

    Rows are sorted, the longest first: a table's first chunk is replayed early, since what does not fit shall fail
    before anything is reduced, and its last one may be small. So it is the second, and the first of two.
    """
    found = []
    for table in sorted({chunks[i].table for i in trained}):
        own = [i for i in trained if chunks[i].table == table]
        own = [i for i in own if chunks[i].has_vision] or own
        found.append(own[1] if len(own) > 2 else own[0])
    return found

"""Gradient cache (https://huggingface.co/papers/2101.06983): the full batch's gradient at one chunk's memory.

(1) encode every chunk without a graph, remembering the random state it began with
(2) score the embeddings, and backward from the loss to the embeddings only: the cache
(3) encode every chunk again under its random state, compare with (1), and backward <embedding, cached gradient>

(3) is the chain rule: sum_i <e_i(theta), dL/de_i> has dL/dtheta as its gradient, so chunks may be replayed one at a
time and their gradients add up to the full batch's. Chunks whose graph is kept in (1) skip their second forward; with
one chunk, or all kept, the step costs what the plain step costs.

    >>> import torch
    >>> from hf_dist_ext.engine.tables import ChunkLimits
    >>> from hf_dist_ext.engine.layout import lay_out
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

This file knows no wrapper, rank or scaler: it is told how to encode, score and run backward. Whoever has something to
do around a part of a step (reduce gradients, measure time or memory) does it in `phase`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NoReturn

import torch

from hf_dist_ext.engine.chunks import Chunk, ChunkedBatch
from hf_dist_ext.engine.outputs import (
    Output,
    detached,
    gradients_of,
    inner_product,
    leaves_of,
    to_chunks,
    to_columns,
)
from hf_dist_ext.engine.replay import Comparison, RandomState, ReplayError, replayed
from hf_dist_ext.errors import UsageError

Embeddings = Mapping[str, Output]
Encode = Callable[[Chunk], Output]
Score = Callable[[Embeddings], tuple[torch.Tensor, dict[str, torch.Tensor]]]

# What a phase of a step does.
ENCODE = "a forward without a graph"
KEEP = "a forward whose graph lives until a later phase"
SCORE = "the loss and its gradient with respect to the embeddings"
REPLAY = "a forward and its backward"
BACKWARD = "a backward of graphs that were kept"
WHOLE_PASS = "all forwards, or all backwards too, of a pipeline's rank, around phases of the other kinds"


@dataclass(frozen=True)
class Phase:
    """A part of a step, of one of the kinds above.

    chunk: the one that is encoded; None where none is.
    is_last: the one forward or backward of its kind of this step after which gradients are complete on this rank.
    """

    kind: str
    chunk: Chunk | None = None
    is_last: bool = False

    @property
    def has_graph(self) -> bool:
        return self.kind in (KEEP, REPLAY, BACKWARD)


PhaseContext = Callable[[Phase], AbstractContextManager]


@dataclass
class CachedStep:
    """What a step did. `loss` is detached; `metrics` are the score function's own. `replay_error`: None where no chunk
    was encoded twice here."""

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]
    num_chunks: int
    num_forwards: int
    drew_randomness: bool
    replay_error: ReplayError | None = None


def cached_step(
    batch: ChunkedBatch,
    encode: Encode,
    score: Score,
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward,
    phase: PhaseContext = nullcontext,
    loss_parameters: Iterable[torch.nn.Parameter] = (),
    keep_graph: int = 0,
    backward_together: bool = True,
    last_reaches_all: bool = True,
    wide: ChunkedBatch | None = None,
    is_frozen: Callable[[Chunk], bool] = lambda chunk: False,
    make_passes: Callable[..., Passes] | None = None,
    before_last: Callable[[torch.Tensor, ReplayError, bool], torch.Tensor] | None = None,
) -> CachedStep:
    """One forward and backward over a batch; gradients are added to the parameters' `.grad`.

    Args:
        encode: chunk -> embeddings (b, D), or several outputs, key -> (b, ...); called once per chunk without a graph
            and once with one.
        score: column -> (rows, D) leaves (of several outputs: column -> key -> (rows, ...)), to (scalar loss,
            metrics). Collectives belong in here.
        backward: runs a scalar's backward; the place for gradient accumulation's division and the fp16 scale, which
            so enter exactly once.
        phase: context around every part of the step: each forward, each backward and the score. Its `Phase` says what
            is done and which part completes the gradients.
        loss_parameters: parameters used by `score` only (a temperature); they receive their exact gradient.
        keep_graph: number of chunks whose graph is kept from pass 1 (at least as many as there are chunks: all).
        backward_together: chunks whose graphs are kept go through one backward (wrappers in which the backward that
            completes the gradients must be the only one behind its forward, such as DDP). False runs one backward per
            chunk, which frees its graph.
        last_reaches_all: the backward that completes the gradients reaches every tower, so it is of a chunk of each.
            False: of one chunk, and no two replayed graphs are alive at once (ZeRO-3).
        wide: the same batch in fewer, larger chunks for (1), which holds no graph. Used when no graph is kept; if the
            forward turns out to draw random numbers, (1) is run again in the chunks that (3) can replay.
        is_frozen: chunks whose rows train nothing (their column's tower is frozen): encoded once, and not in (3).
        make_passes: another way through the model than `Passes`, with its arguments: through stages of a pipeline.
        before_last: what the last backward is of, from its scalar, how far embeddings of (3) are from those of (1),
            and whether (1) drew random numbers; not called where nothing was encoded twice.

    Raises:
        UsageError: nothing that was encoded requires a gradient.
    """
    chunks = batch.chunks()
    kinds = [batch.tables[chunk.table].kind for chunk in chunks]
    order = _order(chunks, kinds, is_frozen, keep_graph, backward_together, last_reaches_all)
    passes = (make_passes or Passes)(batch, chunks, order, encode, backward, phase)
    passes.before_last = before_last

    passes.embed(wide)  # (1)
    with phase(Phase(SCORE)):  # (2)
        scored = passes.score(passes.embeddings, score, [p for p in loss_parameters if p.requires_grad])
    replay_error = passes.replay(scored)  # (3)

    counts = len(chunks), passes.num_forwards
    return CachedStep(scored.loss, scored.metrics, *counts, bool(passes.drawn), replay_error)


def encode_without_graph(batch: ChunkedBatch, encode: Encode, phase: PhaseContext) -> Embeddings:
    """Column -> (rows, D) in the batch's order: pass 1 alone, for rows whose features train nothing."""
    chunks, outputs = batch.chunks(), []
    for chunk in chunks:
        with phase(Phase(ENCODE, chunk)), torch.no_grad():
            outputs.append(encode(chunk))
    return to_columns(batch, outputs, chunks)


@dataclass
class Scored:
    """What (2) found.

    gradients: column -> one per embedding.
    of_parameters: of the loss's own parameters, None for one that it did not use.
    """

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]
    gradients: Embeddings
    parameters: list[torch.nn.Parameter]
    of_parameters: list[torch.Tensor | None]

    @property
    def terms(self) -> list[torch.Tensor]:
        """Terms of the last backward, which give the loss's parameters their gradients."""
        pairs = zip(self.parameters, self.of_parameters, strict=True)
        return [(parameter * gradient.detach()).sum() for parameter, gradient in pairs if gradient is not None]


def score_embeddings(embeddings: Embeddings, score: Score, parameters: list[torch.nn.Parameter]) -> Scored:
    """The loss and its gradients; `parameters`: those of the loss that train."""
    embeddings, leaves = leaves_of(embeddings)
    loss, metrics = score(embeddings)
    gradients = torch.autograd.grad(loss, [*leaves, *parameters], allow_unused=True)
    of_embeddings = gradients_of(embeddings, gradients[: len(leaves)])
    return Scored(loss.detach(), metrics, of_embeddings, parameters, list(gradients[len(leaves) :]))


class Passes:
    """(1) and (3): the forwards and backwards of one step, one chunk after another, and what (3) needs of (1)."""

    score = staticmethod(score_embeddings)
    before_last: Callable[[torch.Tensor, ReplayError, bool], torch.Tensor] | None = None

    def __init__(
        self,
        batch: ChunkedBatch,
        chunks: Sequence[Chunk],
        order: _Order,
        encode: Encode,
        backward: Callable[[torch.Tensor], None],
        phase: PhaseContext,
    ):
        self.batch, self.chunks, self.order = batch, chunks, order
        self.encode, self.backward, self.phase = encode, backward, phase
        self.num_forwards = 0
        self.embeddings: Embeddings = {}  # of (1)
        self.drawn: list[str] = []  # generators that (1) drew from
        self._joined = {i for group in order.groups if len(group) > 1 for i in group}  # share a backward
        self._outputs: dict[int, Output] = {}
        self._states: dict[int, RandomState] = {}
        self._cache: Sequence[Output] = ()
        self._comparison: Comparison | None = None
        self._has_trained = False

    def embed(self, wide: ChunkedBatch | None) -> None:
        chunks, kept, start = self.chunks, self.order.kept, RandomState()
        if wide is not None and not kept:
            self.embeddings = encode_without_graph(wide, self.encode, self.phase)
            self.num_forwards = len(wide.chunks())
            if start.is_now():
                return
            start.restore()
        outputs: dict[int, Output] = {}
        for i in self.order.encoded:
            is_kept = i in kept
            if not is_kept:
                self._states[i] = RandomState()
            self._cast_apart(i)
            phase = Phase(KEEP if is_kept else ENCODE, chunks[i], is_last=is_kept and i == self.order.last)
            with self.phase(phase), torch.set_grad_enabled(is_kept):
                output = self.encode(chunks[i])
            if is_kept:
                self._outputs[i] = output
            outputs[i] = detached(output)
        self.num_forwards += len(chunks)
        self.drawn = start.drawn_since()
        self.embeddings = to_columns(self.batch, [outputs[i] for i in range(len(chunks))], chunks)

    def replay(self, scored: Scored) -> ReplayError | None:
        """Backward of <embedding, its cached gradient> for every chunk; the loss's terms are added to the last one."""
        self._cache = to_chunks(self.batch, scored.gradients, self.chunks)
        if self.order.has_replays:
            self._comparison = Comparison(self.chunks, to_chunks(self.batch, self.embeddings, self.chunks))
        self.embeddings = {}  # from here on there is one copy, by chunks
        *groups, final = self.order.groups
        for group in groups:
            self._train(group)
        self._train(final, scored.terms, is_last=True)
        if not self._has_trained:
            refuse_nothing_trains()
        return None if self._comparison is None else self._comparison.result()

    def _train(self, group: list[int], loss_terms: Sequence[torch.Tensor] = (), is_last: bool = False) -> None:
        """One backward for the chunks of a group: graphs that were kept, or made again."""
        *others, last = group
        if last in self.order.kept:
            terms = [self._term(i, self._outputs.pop(i)) for i in group]
            with self.phase(Phase(BACKWARD, is_last=is_last)):
                self._run_backward([*terms, *loss_terms], is_last)
            return
        terms = []
        for i in others:
            with self.phase(Phase(KEEP, self.chunks[i])):
                terms.append(self._term(i, self._encode_again(i)))
        with self.phase(Phase(REPLAY, self.chunks[last], is_last)):
            terms.append(self._term(last, self._encode_again(last)))
            self._run_backward([*terms, *loss_terms], is_last)

    def _encode_again(self, i: int) -> Output:
        self.num_forwards += 1
        self._cast_apart(i)
        with replayed(self._states[i], self.drawn) if self.drawn else nullcontext():
            output = self.encode(self.chunks[i])
        if self._comparison is not None:
            self._comparison.add(i, output, self._cache[i])
        return output

    def _cast_apart(self, i: int) -> None:
        """Before a forward. Graphs that go through one backward share no copies of weights that autocast makes: the
        gradients of a copy would be added up in half precision."""
        if i in self._joined:
            torch.clear_autocast_cache()

    def _term(self, i: int, output: Output) -> torch.Tensor | None:
        return inner_product(output, self._cache[i])

    def _run_backward(self, terms: Sequence[torch.Tensor | None], is_last: bool) -> None:
        trained = [term for term in terms if term is not None]
        if not trained:
            return
        whole = trained[0] if len(trained) == 1 else torch.stack([t.reshape(()) for t in trained]).sum()
        if is_last and self.before_last is not None and self._comparison is not None:
            found = self._comparison.result()
            whole = whole if found is None else self.before_last(whole, found, bool(self.drawn))
        self.backward(whole)
        self._has_trained = True


@dataclass(frozen=True)
class _Order:
    """Numbers of chunks, in the order in which they take part."""

    encoded: list[int]  # all of them, as (1) encodes them
    kept: set[int]  # whose graph (1) keeps
    groups: list[list[int]]  # as (3) trains them: each one goes through a backward together, kept graphs or replayed

    @property
    def last(self) -> int:
        """The chunk after which gradients are complete."""
        return self.groups[-1][-1]

    @property
    def has_replays(self) -> bool:
        """Whether a chunk is encoded twice: whether a backward remains whose graph (1) did not keep."""
        return any(group[-1] not in self.kept for group in self.groups)


def _order(
    chunks: Sequence[Chunk],
    kinds: Sequence[int],
    is_frozen: Callable[[Chunk], bool],
    keep_graph: int,
    backward_together: bool,
    last_reaches_all: bool,
) -> _Order:
    """Frozen chunks come first in (1): none may run between the forward that completes the step and its backward. Then
    come the others, and last those that complete it. Kept graphs come first in (3), as they hold memory, then replays,
    and last one chunk of every tower."""
    frozen = [i for i, chunk in enumerate(chunks) if is_frozen(chunk)]
    trained = sorted({*range(len(chunks))} - {*frozen})
    if not trained:
        refuse_nothing_trains()
    final = _final_chunks(chunks, kinds, trained)[0 if last_reaches_all else -1 :]
    others = [i for i in trained if i not in final]
    order = [*others, *final]
    encoded, last = [*frozen, *order], final[-1]
    if keep_graph >= len(trained) or len(trained) == 1:
        groups = [order] if backward_together else [*([i] for i in trained if i != last), [last]]
        return _Order(encoded, set(trained), groups)
    kept, replayed = others[:keep_graph], others[keep_graph:]
    early = [kept] if backward_together and kept else [[i] for i in kept]
    return _Order(encoded, set(kept), [*early, *([i] for i in replayed), final])


def _final_chunks(chunks: Sequence[Chunk], kinds: Sequence[int], trained: Sequence[int]) -> list[int]:
    """One full-size chunk of every kind, with images where there are any: replayed last and back-propagated together,
    so that the backward which reduces reaches the parameters of every tower and is long enough to hide the reduction.

    Rows are sorted, the longest first: a table's first chunk is replayed early, since what does not fit shall fail
    before anything is reduced, and its last one may be small. So it is the second, and the first of two.
    """
    final = []
    for kind in sorted({kinds[i] for i in trained}):
        own = [i for i in trained if kinds[i] == kind]
        own = [i for i in own if chunks[i].has_vision] or own
        final.append(own[1] if len(own) > 2 else own[0])
    return final


def refuse_nothing_trains() -> NoReturn:
    raise UsageError(
        "nothing that was encoded requires a gradient: no trainable parameter is used by the model. "
        "Check which parameters have requires_grad."
    )

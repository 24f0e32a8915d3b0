"""The passes of a gradient-cache step through the stages of a pipeline.

A pipeline needs a loss that is a sum over chunks, which a contrastive loss is not. Pass 3 of the cache is one:
sum_i <e_i, g_i>. So chunks are what goes through the pipeline:

(1) forwards of all chunks through all stages, without graphs; the last stage has the embeddings
(2) the last stage scores them, with those of other pipelines; the other ranks are told the loss, its metrics and the
    gradients of its parameters
(3) forwards and backwards in the order of a training schedule; the last stage's backwards begin with the cache

Chunks differ in rows and width. Every rank of a pipeline holds the same rows and so cuts the same chunks, which tells
it the shape of whatever arrives. A buffer lives from the moment its message may come until its chunk has run, so
memory follows the live chunks of the schedule.

Each stage remembers the random state of its forward in (1) and replays it in (3). A gradient is sent back only where
an earlier stage trains. Letters: b rows of a chunk, T its tokens, H hidden width, D embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from hf_dist_ext import policy
from hf_dist_ext.engine.chunks import Chunk, ChunkedBatch
from hf_dist_ext.engine.gradient_cache import (
    BACKWARD,
    ENCODE,
    KEEP,
    WHOLE_PASS,
    Embeddings,
    Phase,
    PhaseContext,
    Score,
    Scored,
    refuse_nothing_trains,
    score_embeddings,
)
from hf_dist_ext.engine.replay import Comparison, RandomState, ReplayError, replayed
from hf_dist_ext.strategies.pipeline import schedules
from hf_dist_ext.strategies.pipeline.stages import StagedModel


class Line:
    """A pipeline, as one of its ranks sees it.

    Args:
        cut: the model, of which this rank has its stages.
        schedule: a key of `schedules.SCHEDULES`.
        per_rank: stages.
        group: process group of the pipeline's ranks, in their order.
        precision: context around every forward.
    """

    def __init__(
        self,
        cut: StagedModel,
        schedule: str,
        per_rank: int,
        group: Any,
        device: torch.device,
        precision: Callable[[], AbstractContextManager],
    ):
        self.cut, self.schedule, self.per_rank = cut, schedule, per_rank
        self.group, self.device, self.precision = group, device, precision
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.last = self.size * per_rank - 1  # the number of the last stage, which the last rank has
        self.has_last = self.rank == self.size - 1
        self.num_chunks = 0  # of the last pass, idle ones counted
        self.trains: list[bool] = []  # per stage
        self.widths: list[tuple[int, torch.dtype]] = []  # per stage but the last: H and dtype of what it gives

    # ---- what ranks tell each other ----

    def told(self, content: Any, by: int) -> Any:
        """What the rank `by` of the pipeline says, on all of them."""
        box = [content]
        dist.broadcast_object_list(box, src=self.global_rank(by), group=self.group)
        return box[0]

    def global_rank(self, rank: int) -> int:
        return dist.get_global_rank(self.group or dist.group.WORLD, rank)

    def look(self, chunk: Chunk) -> None:
        """Before the first chunk: which stages train, and what each gives to the next, from a forward of one row."""
        self.trains, self.widths = [], []
        features, state = first_row(chunk).features, RandomState()
        for stage in range(self.last + 1):
            said, rank = None, stage % self.size
            if rank == self.rank:
                trains = bool(self.cut.parameters(stage))
                shape = None
                if stage < self.last:
                    hidden = None
                    if stage:
                        width, dtype = self.widths[-1]
                        hidden = torch.zeros(1, chunk.width, width, dtype=dtype, device=self.device)
                    with torch.no_grad(), self.precision():
                        given = self.cut.run(stage, features, hidden)
                    shape = given.shape[-1], given.dtype
                said = trains, shape
            trains, shape = self.told(said, rank)
            self.trains.append(trains)
            if shape is not None:
                self.widths.append(shape)
        state.restore()

    # ---- chunks ----

    def filled_up(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """With idle chunks of one row, as many as the schedule can deal out."""
        missing = policy.dealt_chunks(self.schedule, self.size, len(chunks)) - len(chunks)
        return [*chunks, *[first_row(chunks[-1])] * missing]

    def sends_back(self, stage: int) -> bool:
        """Whether a stage's input has a gradient that somebody needs."""
        return any(self.trains[:stage])

    def forward(
        self, chunks: Sequence[Chunk], phase: PhaseContext, states: dict[tuple[int, int], RandomState] | None = None
    ) -> list[torch.Tensor]:
        """(1): embeddings per chunk (b, D) on the last stage, [] on the others; fills `states`."""
        if not self.trains:
            self.look(chunks[0])
        flow = Flow(self, chunks, phase, states if states is not None else {}, gradients=None)
        flow.run()
        return [flow.embeddings[m] for m in range(len(chunks))] if self.has_last else []

    def train(
        self,
        chunks: Sequence[Chunk],
        phase: PhaseContext,
        states: dict[tuple[int, int], RandomState],
        drawn: Sequence[str],
        gradients: Sequence[torch.Tensor],
    ) -> dict[int, torch.Tensor]:
        """(3): adds to `.grad` of this rank's parameters, and gives the embeddings of (1), per chunk, once more.

        drawn: the generators that (1) drew from. gradients: the cache, per chunk, on the last stage."""
        flow = Flow(self, chunks, phase, states, gradients, drawn)
        flow.run()
        return flow.embeddings

    def shared(self, embeddings: Embeddings) -> Embeddings:
        """The last stage's, on every rank."""
        source = self.size - 1
        shapes = self.told({name: (rows.shape, rows.dtype) for name, rows in embeddings.items()}, source)
        for name, (shape, dtype) in shapes.items():
            rows = embeddings[name] if self.has_last else torch.empty(shape, dtype=dtype, device=self.device)
            embeddings[name] = rows.contiguous()
            dist.broadcast(embeddings[name], src=self.global_rank(source), group=self.group)
        return embeddings


def first_row(chunk: Chunk) -> Chunk:
    """An idle chunk: the first row of another one."""

    def gather() -> dict[str, Any]:
        found = chunk.features
        return {name: v[:1] if isinstance(v, torch.Tensor) and v.dim() else v for name, v in found.items()}

    return replace(chunk, gather=gather, stop=chunk.start + 1, is_idle=True)


class Flow:
    """One run of a schedule on one rank: what arrives, what is held until its backward, what leaves.

    Args:
        states: random states of the forwards, which a run without gradients fills and one with them replays.
        gradients: of what the last stage gives, per chunk, on its rank; None: the run has no backwards.
        drawn: generators that are replayed.
    """

    def __init__(
        self,
        line: Line,
        chunks: Sequence[Chunk],
        phase: PhaseContext,
        states: dict[tuple[int, int], RandomState],
        gradients: Sequence[torch.Tensor] | None,
        drawn: Sequence[str] = (),
    ):
        self.line, self.chunks, self.phase, self.states = line, line.filled_up(chunks), phase, states
        self.drawn = drawn
        self.trains = gradients is not None
        self.embeddings: dict[int, torch.Tensor] = {}
        self.cache = gradients or ()
        self.inputs: dict[tuple[int, int], torch.Tensor] = {}  # of forwards to come, (b, T, H)
        self.gradients: dict[tuple[int, int], torch.Tensor] = {}  # of what a stage gave, for backwards to come
        self.held: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor]] = {}  # input and output
        self.cut_in_two: dict[tuple[int, int], Any] = {}  # backwards whose weights are still to come
        self.leaving: dict[tuple[str, int, int], torch.Tensor] = {}
        self.on_the_way: dict[str, list[tuple[list[Any], torch.Tensor]]] = {"forward": [], "backward": []}
        self.arriving: dict[tuple[str, int, int], list[Any]] = {}

    def run(self) -> None:
        do = {
            schedules.FORWARD: self.forward,
            schedules.BACKWARD: self.backward,
            schedules.INPUT_BACKWARD: self.backward_of_input,
            schedules.WEIGHT_BACKWARD: self.backward_of_weights,
            schedules.SEND_FORWARD: lambda s, m: self.send("forward", s, m, s + 1),
            schedules.RECEIVE_FORWARD: lambda s, m: self.receive("forward", s, m, s - 1),
            schedules.SEND_BACKWARD: lambda s, m: self.send("backward", s, m, s - 1),
            schedules.RECEIVE_BACKWARD: lambda s, m: self.receive("backward", s, m, s + 1),
        }
        line = self.line
        line.num_chunks = len(self.chunks)
        order = (line.schedule, line.size, line.per_rank, len(self.chunks), line.rank)
        with self.phase(Phase(WHOLE_PASS)):
            for kind, stage, number in schedules.actions(*order, forward_only=not self.trains):
                do[kind](stage, number)
            for messages in self.on_the_way.values():
                for works, _ in messages:
                    _wait(works)

    # ---- forwards and backwards ----

    def forward(self, stage: int, number: int) -> None:
        line, chunk, at = self.line, self.chunks[number], (stage, number)
        self.await_("forward", stage, number)
        given = hidden = self.inputs.pop(at, None)
        if self.trains:
            if hidden is not None and line.sends_back(stage):
                # A view: frozen layers keep no graph for a leaf, behind which there is nobody (frozen/run_mode.py).
                given = hidden.requires_grad_().view_as(hidden)
            random = replayed(self.states[at], self.drawn)
        else:
            self.states[at] = RandomState()
            random = torch.no_grad()
        with self.phase(Phase(KEEP if self.trains else ENCODE, chunk)), random, line.precision():
            output = line.cut.run(stage, chunk.features, given)
        if self.trains:
            self.held[at] = hidden, output
        if stage == line.last:
            self.embeddings[number] = output.detach()
        else:
            self.leaving["forward", stage + 1, number] = output.detach().contiguous()

    def backward(self, stage: int, number: int) -> None:
        """Of input and weights together."""
        hidden, output = self.held.pop((stage, number))
        gradient = self.gradient_of_output(stage, number)
        if output.requires_grad and gradient is not None:
            with self.phase(Phase(BACKWARD, self.chunks[number])):
                torch.autograd.backward(output, gradient)
        self.give_back(stage, number, hidden)

    def backward_of_input(self, stage: int, number: int) -> None:
        """The weights' part follows, unless there is nothing to cut."""
        line, at = self.line, (stage, number)
        if line.trains[stage] and line.sends_back(stage):
            hidden, output = self.held.pop(at)
            parameters, gradient = self.line.cut.parameters(stage), self.gradient_of_output(stage, number)
            with self.phase(Phase(BACKWARD, self.chunks[number])):
                _, groups = stage_backward_input([output], [gradient], [hidden], iter(parameters))
            self.cut_in_two[at] = parameters, groups
            self.give_back(stage, number, hidden)
        elif not line.trains[stage]:
            self.backward(stage, number)

    def backward_of_weights(self, stage: int, number: int) -> None:
        at = (stage, number)
        if at in self.cut_in_two:
            parameters, groups = self.cut_in_two.pop(at)
            with self.phase(Phase(BACKWARD, self.chunks[number])):
                stage_backward_weight(iter(parameters), groups)
        elif at in self.held:  # nobody waits for the gradient of this stage's input
            self.backward(stage, number)

    def gradient_of_output(self, stage: int, number: int) -> torch.Tensor | None:
        if stage == self.line.last:  # an idle chunk trains nothing
            return self.cache[number] if number < len(self.cache) else torch.zeros_like(self.embeddings[number])
        self.await_("backward", stage, number)
        return self.gradients.pop((stage, number), None)

    def give_back(self, stage: int, number: int, hidden: torch.Tensor | None) -> None:
        if hidden is None or not self.line.sends_back(stage):
            return
        gradient = torch.zeros_like(hidden) if hidden.grad is None else hidden.grad
        self.leaving["backward", stage - 1, number] = gradient.contiguous()

    # ---- messages ----

    def box(self, direction: str) -> dict[tuple[int, int], torch.Tensor]:
        return self.inputs if direction == "forward" else self.gradients

    def is_sent(self, direction: str, to: int) -> bool:
        return direction == "forward" or self.line.sends_back(to + 1)

    def send(self, direction: str, stage: int, number: int, to: int) -> None:
        if not self.is_sent(direction, to):
            return
        tensor, sent = self.leaving.pop((direction, to, number)), self.on_the_way[direction]
        sent.append((self.message(dist.isend, tensor, to), tensor))
        if len(sent) > policy.MESSAGES_ON_THE_WAY:
            _wait(sent.pop(0)[0])

    def receive(self, direction: str, stage: int, number: int, source: int) -> None:
        if not self.is_sent(direction, stage):
            return
        chunk, (width, dtype) = self.chunks[number], self.line.widths[min(stage, source)]
        tensor = torch.empty(chunk.num_rows, chunk.width, width, dtype=dtype, device=self.line.device)
        self.box(direction)[stage, number] = tensor
        self.arriving[direction, stage, number] = self.message(dist.irecv, tensor, source)

    def await_(self, direction: str, stage: int, number: int) -> None:
        _wait(self.arriving.pop((direction, stage, number), ()))

    def message(self, kind: Callable, tensor: torch.Tensor, stage: int) -> list[Any]:
        peer = self.line.global_rank(stage % self.line.size)
        return dist.batch_isend_irecv([dist.P2POp(kind, tensor, peer, self.line.group)])


def _wait(works: Iterable[Any]) -> None:
    for work in works:
        work.wait()


class PipelinePasses:
    """`Passes` of a step whose chunks go through the stages of a pipeline."""

    def __init__(
        self,
        line: Line,
        batch: ChunkedBatch,
        chunks: Sequence[Chunk],
        order: Any,
        encode: Any,
        backward: Callable[[torch.Tensor], None],
        phase: PhaseContext,
    ):
        self.line, self.batch, self.chunks, self.backward, self.phase = line, batch, chunks, backward, phase
        self.num_forwards = 0
        self.embeddings: Embeddings = {}  # on the last stage
        self.drawn: list[str] = []
        self._outputs: list[torch.Tensor] = []  # the same, per chunk
        self._states: dict[tuple[int, int], RandomState] = {}

    def embed(self, wide: ChunkedBatch | None) -> None:
        start = RandomState()
        self._outputs = self.line.forward(self.chunks, self.phase, self._states)
        self.num_forwards += len(self.chunks)
        self.drawn = start.drawn_since()
        if not any(self.line.trains):
            refuse_nothing_trains()
        self.embeddings = self.batch.to_columns(self._outputs, self.chunks) if self.line.has_last else {}

    def score(self, embeddings: Embeddings, score: Score, parameters: list[torch.nn.Parameter]) -> Scored:
        """(2)"""
        line, said, gradients = self.line, None, {}
        if line.has_last:
            found = score_embeddings(embeddings, score, parameters)
            gradients = found.gradients
            of_parameters = [None if one is None else one.cpu() for one in found.of_parameters]
            said = (
                found.loss.cpu(),
                {name: value.detach().cpu() for name, value in found.metrics.items()},
                of_parameters,
            )
        loss, metrics, of_parameters = line.told(said, line.size - 1)
        metrics = {name: value.to(line.device) for name, value in metrics.items()}
        of_parameters = [None if one is None else one.to(line.device) for one in of_parameters]
        return Scored(loss.to(line.device), metrics, gradients, parameters, of_parameters)

    def replay(self, scored: Scored) -> ReplayError | None:
        """(3); compared on the last stage. The division by gradient accumulation enters in `backward`, which is asked
        what it makes of the cache."""
        cache: list[torch.Tensor] = []
        if self.line.has_last:
            leaves = {name: torch.zeros_like(rows, requires_grad=True) for name, rows in scored.gradients.items()}
            self.backward(torch.stack([(leaves[name] * rows).sum() for name, rows in scored.gradients.items()]).sum())
            cache = self.batch.to_chunks({name: leaf.grad for name, leaf in leaves.items()}, self.chunks)
        again = self.line.train(self.chunks, self.phase, self._states, self.drawn, cache)
        self.num_forwards += len(self.chunks)
        if scored.terms:
            self.backward(torch.stack(scored.terms).sum())
        comparison = Comparison(self.chunks, self._outputs)
        for number in range(len(self._outputs)):
            comparison.add(number, again[number], cache[number])
        return comparison.result()

"""`EmbeddingStep`: one training step of a loss over embeddings, on the gradient cache.

`sizes.py` cuts the batch as all ranks agree, `gradient_cache` encodes, scores and replays the chunks, and the strategy
says which part reduces. Without a cache each column is one chunk whose graph is kept, and what is frozen is encoded
once. Embeddings are gathered for the score, where a rank's loss counts by its rows. The division by gradient
accumulation and the fp16 scale enter in `_backward`, that is once. No maths lives here.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_dist_ext.checkpoints import loss_state
from hf_dist_ext.data.row_facts import RowFacts, split
from hf_dist_ext.engine.chunks import Chunk
from hf_dist_ext.engine.combined_losses import loss_of
from hf_dist_ext.engine.false_negatives import RowIds
from hf_dist_ext.engine.gradient_cache import (
    SCORE,
    WHOLE_PASS,
    CachedStep,
    Phase,
    cached_step,
    encode_without_graph,
)
from hf_dist_ext.engine.losses import as_output
from hf_dist_ext.engine.outputs import Output, each, row_size
from hf_dist_ext.engine.replay import RandomState, ReplayError, allowed_difference
from hf_dist_ext.errors import UsageError
from hf_dist_ext.evaluation.encoder import in_eval_mode
from hf_dist_ext.evaluation.token_vectors import Compared, compared
from hf_dist_ext.frozen.encode_once import batch_of_pooled
from hf_dist_ext.models.embedder import check_embeddings
from hf_dist_ext.models.packing import padding_is_known
from hf_dist_ext.strategies.gathering import GatheredColumns, row_weight
from hf_dist_ext.strategies.tensors import loss_parameters
from hf_dist_ext.training import compiling
from hf_dist_ext.training.out_of_memory import empty_cache, is_lack_of_memory
from hf_dist_ext.training.running import Running
from hf_dist_ext.training.sizes import Batch, Layout, StepSizes, names_of_all_ranks


class EvaluatedBatch(NamedTuple):
    """A batch without a gradient."""

    loss: torch.Tensor
    embeddings: dict[str, Compared]  # column -> (B, D), or token vectors of B rows
    facts: RowFacts


class EmbeddingStep:
    """Made once for a model. It is called as it is given, in its wrappers; `sizes` are those of a step."""

    def __init__(self, run: Running, sizes: StepSizes):
        self.run, self.args, self.sizes = run, run.args, sizes
        self.layout: Layout | None = None  # of the batch that runs
        self._accumulated = 1  # batches of the update that runs
        self._gradients_are_used = True  # those of the loss's own parameters
        self.allowed_difference = 0.0  # between embeddings of the last batch and those that are encoded again
        self._before_update: RandomState | None = None
        self._buffers_before: list[torch.Tensor] = []
        self._own_loss: torch.Tensor | None = None
        self._constants: Mapping[str, Mapping[str, Any]] = {}  # of the batch that runs

    # ---- training ----

    def begin(self) -> None:
        """A training: what one that was interrupted has left in the loss's gradients is dropped with the next batch,
        as Trainer drops the model's."""
        self._gradients_are_used = True
        self.sizes.begin()

    def train(
        self, model: nn.Module, inputs: Any, earlier: Sequence[Any], accumulated: int, is_last: bool
    ) -> CachedStep:
        """One batch: gradients are added up, and complete on all ranks after the last batch of an update.

        Args:
            inputs: as the data loader gave them.
            earlier: those of this update.
            accumulated: batches of this update.
            is_last: the batch is the last one of the update.
        """
        strategy, own = self.run.strategy, loss_parameters(self.run.loss)
        if self._gradients_are_used and isinstance(self.run.loss, nn.Module):
            self.run.loss.zero_grad()
        self._accumulated = accumulated
        batch, facts = self._split(inputs)
        strategy.begin_step()
        strategy.check_batch(batch, self.args.device)
        step = self._run_until_it_fits(model, batch, facts, earlier)
        self._gradients_are_used = is_last
        if is_last:
            for parameter in own:  # of a loss of other sources: on every number of processes its gradient is zero
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            strategy.finish_update(own)
            strategy.agree_on_loss(functools.partial(loss_state.state_of, self.run.loss))
        self.run.meter.add(step, self.layout, facts.source)
        return step

    def _run_until_it_fits(
        self, model: nn.Module, batch: Batch, facts: RowFacts, earlier: Sequence[Any]
    ) -> CachedStep:
        """Where memory runs out and the step can be run again, the update so far is dropped, and its batches are run
        again in smaller chunks from the random state before it."""
        if not earlier:
            self._before_update = RandomState()
            self._buffers_before = [] if self.sizes.fitting is None else [b.clone() for b in self._buffers()]
        again: list[Any] = []
        fitting = self.sizes.fitting
        while True:
            try:
                with self._sharing_casts():
                    for inputs in again:
                        self._attempt(model, *self._split(inputs), is_first=not earlier)
                    return self._attempt(model, batch, facts, is_first=not earlier)
            except Exception as error:
                if fitting is None or self.layout is None or not is_lack_of_memory(error):
                    raise
                if not self.run.strategy.can_redo:
                    raise fitting.end_run(self._number, **self.layout.left_to_shrink()) from error
            # After the except block: the error holds the tensors of every frame it passed.
            fitting.shrink(self._number, **self.layout.left_to_shrink())
            for parameter in chain(model.parameters(), loss_parameters(self.run.loss)):
                parameter.grad = None
            self._before_update.restore()
            for buffer, before in zip(self._buffers(), self._buffers_before, strict=True):
                buffer.copy_(before)
            empty_cache(self.args.device)
            again = list(earlier)

    def _buffers(self) -> list[torch.Tensor]:
        """Those of the loss, which a step may write to."""
        return list(self.run.loss.buffers()) if isinstance(self.run.loss, nn.Module) else []

    def _attempt(self, model: nn.Module, batch: Batch, facts: RowFacts, is_first: bool) -> CachedStep:
        sizes, strategy, budget, bare = self.sizes, self.run.strategy, self.sizes.budget, self.run.bare_model
        self._constants = facts.constants
        layout = self.layout = sizes.fit(model, self._encode, batch, is_first, facts.cuts)
        frozen = sizes.embedder.frozen_columns(layout.batch, facts.constants or {})
        chunked, wide = layout.chunked, layout.wide
        encode, is_measured = functools.partial(self._encode, model), sizes.is_measured(is_first)
        facts = self._completed(facts, layout)
        facts = facts._replace(ids=self._ids_of_all(facts, layout))

        def score(embeddings: dict[str, Output]):
            if budget is not None:
                budget.reserve(layout.loss_bytes(self._loss_of(facts), max(map(row_size, embeddings.values()))))
            return self._score(embeddings, facts, layout)

        def stop_update(loss: torch.Tensor, found: ReplayError, drew: bool) -> torch.Tensor:
            is_wrong = found.largest > self._allowed_difference(bare, wide is not None and not drew)
            return strategy.mark(loss, torch.where(is_wrong, math.inf, 0.0))

        with budget.measured_step() if is_measured else nullcontext():
            to_train, phase = chunked, functools.partial(self._phase, is_measured, is_measured)
            if sizes.encodes_once:
                to_pooled = functools.partial(encode, stops_at_pooled=True)
                to_train, wide = batch_of_pooled(encode_without_graph(wide or chunked, to_pooled, phase)), None
                phase = functools.partial(self._phase, False, is_measured)
            strategy.check_graphs(layout.num_kept, len(to_train.chunks()))
            step = cached_step(
                to_train,
                encode,
                score,
                backward=self._backward,
                phase=phase,
                loss_parameters=loss_parameters(self.run.loss),
                keep_graph=layout.num_kept,
                backward_together=strategy.waits_for_all,
                last_reaches_all=not sizes.has_stand_in and strategy.max_live_graphs is None,
                wide=wide,
                is_frozen=lambda chunk: chunk.column in frozen,
                make_passes=strategy.make_passes,
                before_last=None if strategy.holds_gradients else stop_update,
            )
        sizes.may_widen = not step.drew_randomness
        self.allowed_difference = self._allowed_difference(bare, wide is not None and not step.drew_randomness)
        return replace(step, num_chunks=len(chunked.chunks()))

    def _allowed_difference(self, bare: nn.Module, was_wider: bool) -> float:
        """By how much the embeddings of pass 3 may differ. `was_wider`: pass 1 had larger chunks. A compiled model has
        kernels of its own for a pass without gradients."""
        explained = allowed_difference(self.dtypes_of(bare), was_wider or self.args.torch_compile)
        return max(explained, self.args.replay_tolerance or 0.0)

    def dtypes_of(self, bare: nn.Module) -> set[torch.dtype]:
        """In which the model computes."""
        kind, dtypes = self.args.device.type, {p.dtype for p in bare.parameters() if p.dtype.is_floating_point}
        with self.run.precision():
            if torch.is_autocast_enabled(kind):
                dtypes.add(torch.get_autocast_dtype(kind))
        if kind == "cuda" and compiling.multiplies_in_tf32():
            dtypes.add(torch.float16)  # of the same epsilon
        return dtypes

    def _sharing_casts(self) -> AbstractContextManager:
        return self.run.strategy.sharing_casts(self.sizes.is_checkpointed)

    @contextmanager
    def _phase(self, measures_chunks: bool, measures_score: bool, phase: Phase) -> Iterator[None]:
        """Whoever watches the parts of a step. A score has collectives of its own."""
        with ExitStack() as watched:
            watched.enter_context(self.run.clock.phase(phase))
            if phase.kind == WHOLE_PASS:
                yield
                return
            if self.sizes.fitting is not None:
                watched.enter_context(self.sizes.fitting.phase(phase))
            if measures_score if phase.kind == SCORE else measures_chunks:
                watched.enter_context(self.sizes.budget.phase(phase))
            if phase.kind == SCORE:
                watched.enter_context(compiling.scores_in_float32(self.args))
            else:
                watched.enter_context(self.run.strategy.phase(phase))
            yield

    @property
    def _number(self) -> int:
        return self.run.progress()[0] + 1

    def _backward(self, loss: torch.Tensor) -> None:
        self.run.strategy.backward(loss / self._accumulated, self._own_loss)

    # ---- evaluation ----

    def score_only(self, model: nn.Module, inputs: Any) -> EvaluatedBatch:
        """The loss of the training step, without a gradient. Call it without one."""
        batch, facts = self._split(inputs)
        self._constants = facts.constants
        layout = self.sizes.cut(batch, is_first=False, ahead=facts.cuts)
        facts = self._completed(facts, layout)
        embeddings = self._encoded(model, layout)
        is_module = isinstance(self.run.loss, nn.Module)
        with compiling.scores_in_float32(self.args), in_eval_mode(self.run.loss) if is_module else nullcontext():
            loss, _ = self._score(embeddings, facts._replace(ids=self._ids_of_all(facts, layout)), layout)
        return EvaluatedBatch(
            loss, {name: compared(rows, self._loss_of(facts)) for name, rows in embeddings.items()}, facts
        )

    def embeddings_of(
        self, model: nn.Module, batch: Batch, constants: Mapping[str, Mapping[str, Any]] | None = None
    ) -> dict[str, Compared]:
        """column -> (rows, D) in float32, or token vectors of rows, of a batch on the device, with the constants of
        its columns. Every rank calls it, without a gradient and with the same columns."""
        self._constants = constants or {}
        found = self._encoded(model, self.sizes.cut(batch, is_first=False))
        return {name: compared(output, self.run.loss) for name, output in found.items()}

    def forward_of_stages(self, model: nn.Module, features: Mapping[str, Any], **options: Any) -> dict[str, Any]:
        """What a SentenceTransformer gives, of a model whose layers are on other ranks too: a forward of all ranks."""
        rows = {name: value for name, value in features.items() if isinstance(value, torch.Tensor)}
        others = {name: value for name, value in features.items() if name not in rows} | options
        return {"sentence_embedding": self.embeddings_of(model, {"": rows}, {"": others})[""]}

    def _encoded(self, model: nn.Module, layout: Layout) -> dict[str, Output]:
        chunked = layout.wide or layout.chunked  # no graph is held
        encode, phase = functools.partial(self._encode, model), lambda phase: nullcontext()
        with self._sharing_casts():
            found = self.run.strategy.encoded(chunked, encode, phase)
        as_float = lambda rows: rows.float() if rows.is_floating_point() else rows  # noqa: E731
        return {name: each(output, as_float) for name, output in found.items()}

    # ---- a chunk, the loss ----

    def _split(self, inputs: Any) -> tuple[Batch, RowFacts]:
        """A batch's columns on the device, but for those that the loss does not read."""
        batch, facts = split(self.run._prepare_inputs(inputs))
        unread = list(batch)[getattr(self._loss_of(facts), "num_columns", None) or len(batch) :]
        if not unread:
            return batch, facts
        ids = facts.ids if facts.ids is None else {n: ids for n, ids in facts.ids.items() if n not in unread}
        return type(batch)({n: batch[n] for n in batch if n not in unread}), facts._replace(ids=ids)

    def _encode(self, model: nn.Module, chunk: Chunk, **more: Any) -> Output:
        constants = self._constants.get(chunk.columns[0]) if chunk.columns else None
        # What is compiled would be compiled again for each answer; a CPU answers at once.
        is_asked = not self.args.torch_compile and self.args.device.type != "cpu"
        with self.run.precision(), padding_is_known(chunk.is_full if is_asked else None):
            embeddings = self.sizes.embedder.call(model, chunk.features, chunk.column, constants, **more)
        check_embeddings(embeddings, self.run.bare_model, chunk.num_rows)
        return embeddings

    def _completed(self, facts: RowFacts, layout: Layout) -> RowFacts:
        """With ids, of no row, of columns that this rank's batch lacked, and with what the loss wants to know of the
        features themselves, such as a frozen guide's embeddings: once per step."""
        if layout.is_completed and facts.ids is not None:
            names, no_row = names_of_all_ranks(facts.ids), next(iter(facts.ids.values()))[:0]
            facts = facts._replace(ids={name: facts.ids.get(name, no_row) for name in names})
        loss = self._loss_of(facts)
        if not hasattr(loss, "targets_of"):
            return facts
        return facts._replace(targets={**facts.targets, **loss.targets_of(layout.batch, facts.constants)})

    def _ids_of_all(self, facts: RowFacts, layout: Layout) -> Mapping[str, torch.Tensor] | None:
        """Those of all rows that the loss compares own rows with. A step asks before its first forward, so that the
        host knows which ids repeat when the loss asks."""
        ids, counts, ranks, loss = facts.ids, layout.counts, self.run.strategy.rows, self._loss_of(facts)
        if ids is None:
            return None
        if ranks.size > 1 and getattr(loss, "cross_device_negatives", True):
            anchor, own = next(iter(counts)), {name: of_ranks[ranks.index] for name, of_ranks in counts.items()}
            ids = {name: values[: own.get(name, own[anchor])] for name, values in ids.items()}
            ids = ranks.gather_ids(ids, counts, anchor)
        parts = loss.modules() if isinstance(loss, nn.Module) else [loss]
        return RowIds(ids, list(counts)) if any(getattr(p, "mask_false_negatives", False) for p in parts) else ids

    def _loss_of(self, facts: RowFacts) -> Callable:
        return loss_of(self.run.loss, facts.source)

    def _score(self, embeddings: dict[str, Output], facts: RowFacts, layout: Layout):
        """The loss of this rank's rows, weighted by their number. A stand-in for rows (data/order.py) is scored
        as if its row were the first of all, so that every rank asks for the same columns, and weighs nothing.

        facts: with ids of `_ids_of_all`."""
        anchor, ranks, counts = next(iter(embeddings)), self.run.strategy.rows, layout.counts
        own = {name: of_ranks[ranks.index] for name, of_ranks in counts.items()}
        everyone, row_offset, (ids, targets, *_), scores = None, 0, facts, self._loss_of(facts)
        if ranks.size > 1 and getattr(scores, "cross_device_negatives", True):
            rows = {name: each(embeddings[name], lambda one, n=own[name]: one[:n]) for name in embeddings}
            everyone = GatheredColumns(ranks, rows, counts)
            row_offset = sum(counts[anchor][: ranks.index]) if own[anchor] else 0
            targets = ranks.gather_targets(targets, counts, anchor)
        more = {"targets": targets} if targets else {}
        if more and "targets" not in inspect.signature(getattr(scores, "forward", scores)).parameters:
            raise UsageError(
                f"the batch has targets ({', '.join(targets)}), which {type(scores).__name__} does not read: it "
                "has no argument `targets`. Leave out label_column, or use a loss that reads labels."
            )
        output = scores(embeddings, everyone, row_offset=row_offset, ids=ids, **more)
        loss, metrics = as_output(output)
        weight = row_weight(own[anchor], counts[anchor])
        self._own_loss = loss.detach()
        return loss * weight, {name: value * weight for name, value in metrics.items()}

"""The sizes of a step, agreed by all ranks before its first forward: rows, chunks, their widening, kept graphs.

`engine/chunks.py` cuts this rank's batch, within limits that the run file gives or that `engine/budget.py` measured.
The ranks then tell each other their rows and their sizes in one small gather, and every rank takes what all can do. No
size changes a gradient.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from transformers.utils import logging

from hf_dist_ext import policy
from hf_dist_ext.data.order import StandIn
from hf_dist_ext.data.tokens import without_rows
from hf_dist_ext.engine.budget import ChunkBudget, longest_row
from hf_dist_ext.engine.chunks import Chunk, ChunkedBatch
from hf_dist_ext.engine.combined_losses import num_columns_of
from hf_dist_ext.engine.gradient_cache import REPLAY, Phase
from hf_dist_ext.engine.outputs import Output, RowSize, tensors_of
from hf_dist_ext.engine.replay import RandomState
from hf_dist_ext.engine.tables import ChunkLimits
from hf_dist_ext.errors import UsageError
from hf_dist_ext.frozen.encode_once import has_frozen_backbone
from hf_dist_ext.models.embedder import Embedder
from hf_dist_ext.strategies import collectives
from hf_dist_ext.training.ahead import Batch, CutAhead, CutRequest, Cuts, Cutter, SharedCutRequest
from hf_dist_ext.training.out_of_memory import FittingSizes, empty_cache, is_lack_of_memory
from hf_dist_ext.training.running import Running

logger = logging.get_logger(__name__)

# On a CPU, where torch counts no memory: GiB that the graph of a chunk may take where nobody says how many, and what a
# layer keeps of a token for its backward, in hidden sizes (in float32: 16 of ModernBERT, 31 of Qwen3, BERT 22 to 43).
GIB_ON_CPU, KEPT_BY_LAYER = 1.0, 30
MOST_PROBES = 20  # of chunks that double
ALIKE = 1.05  # chunks of so many times the tokens of those before, or less, are not tried out
ALL_GRAPHS = 2**31


class Layout(NamedTuple):
    """How one batch is cut, as all ranks agree."""

    chunked: ChunkedBatch
    wide: ChunkedBatch | None  # larger chunks for the pass without a graph
    counts: dict[str, list[int]]  # rows per column and rank
    num_kept: int  # graphs
    batch: Batch = {}  # what was cut: with the columns of all ranks
    is_completed: bool = False  # some rank's batch lacked a column

    def left_to_shrink(self) -> dict[str, Any]:
        """For `Reductions.smaller`."""
        chunks = self.chunked.chunks()
        return {
            "num_kept": min(self.num_kept, len(chunks) - 1),
            "can_halve": self.wide is not None or any(chunk.num_rows > 1 for chunk in chunks),
        }

    def loss_bytes(self, loss: Any, size: RowSize) -> int:
        """What the loss will hold of rows that large."""
        own = self.chunked.row_counts()
        sees_all = getattr(loss, "cross_device_negatives", True) and len(next(iter(self.counts.values()))) > 1
        everyone = {name: sum(rows) for name, rows in self.counts.items()} if sees_all else own
        is_tiled = not getattr(loss, "compares_all_pairs", False)
        anchors, *_ = (own if is_tiled else everyone).values()
        first, *others = everyone.values()
        candidates = others or [first]  # a loss of one column compares its rows
        numbers = sum(own.values()), sum(everyone.values()), anchors, sum(candidates), size.numbers
        of_rows = policy.loss_stage_bytes(*numbers, is_tiled=is_tiled)
        return of_rows + policy.token_products_bytes(sum(candidates), size.tokens)


class StepSizes:
    """Made once for a model that is trained with a loss over embeddings.

    Args:
        fitting: the sizes that memory has left; None without a gradient cache.
        has_stand_in: rows without images run the vision layers too.
    """

    def __init__(self, run: Running, fitting: FittingSizes | None, embedder: Embedder, has_stand_in: bool):
        self.run, self.args, self.fitting = run, run.args, fitting
        self.embedder, self.has_stand_in = embedder, has_stand_in
        self.takes_column = embedder.takes_column
        self.budget = self._make_budget()
        self.may_widen = True  # the pass without a graph: not where the model draws random numbers
        self.may_pack = False  # chunks: what training/packing.py says of this run
        self.request: SharedCutRequest | None = None  # of the last step, where loaders cut their batches

    def _make_budget(self) -> ChunkBudget | None:
        args = self.args
        finds_size = args.gradient_cache_chunk_size == "auto"
        keeps = args.num_kept_graphs == "auto" and not self.encodes_once  # no chunk has a graph to keep
        if args.device.type == "cpu" or not args.uses_gradient_cache or not (finds_size or keeps):
            return None
        gib = args.gradient_cache_memory_gib
        memory = None if gib is None else int(gib * 2**30)
        budget = ChunkBudget(args.device, memory, finds_size, keeps, has_graphs=not self.encodes_once)
        names = [name for name in type(args).__dataclass_fields__ if name.startswith("gradient_cache_")]
        budget.measured.given = {name: getattr(args, name) for name in names} | {
            "gradient_checkpointing": args.gradient_checkpointing
        }
        return budget

    def begin(self) -> None:
        """A training, whose steps have in common what was worked out for those before it."""
        for name in ("encodes_once", "is_checkpointed", "_cutter", "_given_limits"):
            vars(self).pop(name, None)

    @cached_property
    def encodes_once(self) -> bool:
        """Whether no chunk has a graph, as all that encodes is frozen."""
        is_whole = not self.run.strategy.is_cut
        return self.args.uses_gradient_cache and is_whole and has_frozen_backbone(self.run.bare_model)

    @cached_property
    def is_checkpointed(self) -> bool:
        """Whether layers give up their activations and are run again: by transformers or by FSDP."""
        modules = self.run.bare_model.modules()
        return any(getattr(m, "gradient_checkpointing", False) or isinstance(m, CheckpointWrapper) for m in modules)

    def is_measured(self, is_first: bool) -> bool:
        """Whether the step that begins is. `is_first`: of an update."""
        return self.budget is not None and self.budget.is_measuring and is_first

    def fit(
        self, wrapped: nn.Module, encode: Callable[..., Output], batch: Batch, is_first: bool, ahead: Cuts | None
    ) -> Layout:
        """How a batch is cut, after "auto" has looked for the size of chunks.

        Args:
            encode: model, chunk -> embeddings.
            is_first: the first batch of an update.
            ahead: how the batch was cut where it was made; it is cut anew where it has changed since.
        """
        layout = self.cut(batch, is_first, ahead)
        if is_first and self._probes(layout) and (bare := self._to_probe(wrapped)) is not None:
            self._probe(bare, encode, batch, ahead)
            layout = self.cut(batch, is_first, ahead)
        return layout

    def _probes(self, layout: Layout) -> bool:
        """Whether the size of chunks is looked for before the step. All ranks answer alike."""
        if self.budget is None or self.run.strategy.forwards_are_collective or self.encodes_once:
            return False
        return self.budget.probes(max(map(sum, zip(*layout.counts.values(), strict=True))))

    def _to_probe(self, wrapped: nn.Module) -> nn.Module | None:
        return wrapped if collectives.world_size() == 1 else self.run.strategy.bare_to_try(wrapped)

    def _probe(self, bare: nn.Module, encode: Callable[..., Output], batch: Batch, ahead: Cuts | None) -> None:
        """Forward and backward of one chunk of every kind, in ever larger chunks, while the budget measures; each
        twice, since gradients are new the first time. Nothing of it stays."""
        state, before, is_too_large = RandomState(), 0, False
        for _ in range(MOST_PROBES):
            chunked = self.cut(batch, is_first=True, ahead=ahead).chunked
            tokens = chunked.limits.max_tokens  # None while rows are counted
            if tokens and before and tokens < ALIKE * before:
                break
            before = tokens
            try:
                with self.budget.measured_step():
                    for chunk in [chunk for chunk in costliest_chunks(chunked) for _ in range(2)]:
                        with self.budget.phase(Phase(REPLAY, chunk)):
                            outputs = [one for one in tensors_of(encode(bare, chunk)) if one.requires_grad]
                            sum((one * 0.0).sum() for one in outputs).backward()
            except Exception as error:
                if not is_lack_of_memory(error):
                    raise
                is_too_large = True
            for parameter in bare.parameters():
                parameter.grad = None
            if any(row[0] for row in collectives.exchange([is_too_large])):
                break
        state.restore()
        empty_cache(self.args.device)

    def cut(self, batch: Batch, is_first: bool, ahead: Cuts | None = None, is_completed: bool = False) -> Layout:
        """This rank's batch in chunks; every number that decides what a step does is the same on all ranks.
        `is_completed`: it was given columns that other ranks have."""
        cutter = self._cutter
        if ahead is not None and ahead.are_of(batch):
            cuts = ahead.of(batch)
        else:
            cuts = cutter.cut(batch, self._request())
        request, factor = self._request(), self._widening()
        if self.budget is not None:
            request = replace(request, limits=self._limits_of_budget(cuts.chunked, is_first))
        cuts = cutter.cut_again(cuts, request)
        if self.request is not None:
            self.request.set(request)
        chunked, wide = cuts.chunked, cuts.wide
        rows, plans = chunked.row_counts(), [chunked, wide] if factor > 1 else [chunked]
        if isinstance(batch, StandIn):
            rows = dict.fromkeys(rows, 0)
        by_vision = not self.has_stand_in  # with a stand-in every forward runs the vision layers
        needed = [(plan or chunked).num_chunks(by_vision) for plan in plans]
        num_kept = self._num_kept_graphs(chunked)
        numbers = [columns_digest(rows), self.may_widen, num_kept]
        everyone = collectives.exchange([*numbers, *rows.values(), *chain(*needed)])
        if len({columns for columns, *_ in everyone}) > 1:
            batch = with_columns_of_all_ranks(batch)
            return self.cut(batch, is_first, is_completed=True)
        _, may_widen, num_kept, *_ = zip(*everyone, strict=True)
        self.may_widen = all(may_widen)
        # Every rank runs as many as the one that needs most.
        if self.run.strategy.forwards_are_collective:
            most = [max(numbers) for numbers in zip(*(row[3 + len(rows) :] for row in everyone), strict=True)]
            for plan, own in zip(plans, needed, strict=True):
                if plan is chunked or self.may_widen:
                    plan.agree(most[: len(own)], by_vision)
                most = most[len(own) :]
        of_each = self.run.strategy.rows.one_of_each(everyone)
        counts = {name: [row[3 + i] for row in of_each] for i, name in enumerate(rows)}
        wide = wide if self.may_widen else None
        return Layout(chunked, wide, counts, min(num_kept), batch, is_completed)

    def cut_ahead(self) -> CutAhead:
        """What cuts the batches of a loader where it makes them."""
        self.request = SharedCutRequest(self._request())
        return CutAhead(self._cutter, self.request, num_columns_of(self.run.loss))

    @cached_property
    def _cutter(self) -> Cutter:
        model = self.run.bare_model
        config = getattr(model, "config", None)
        is_chunked = self.args.uses_gradient_cache
        options = {
            "shares_tower": is_chunked and not self.takes_column,
            "pad_values": {"input_ids": _padding_token(config)},
            "can_trim": is_chunked,
            "can_shift": getattr(config, "rope_parameters", None) is not None,
            "sort": is_chunked and self.args.gradient_cache_sort,
            "model_config": config,
        }
        return Cutter(options, self.args.gradient_cache_packing)

    def _request(self) -> CutRequest:
        """Before the budget has its say."""
        return CutRequest(self._limits(), self._widening() if self.may_widen else 1)

    @cached_property
    def _given_limits(self) -> ChunkLimits:
        args = self.args
        if not args.uses_gradient_cache:
            return ChunkLimits()
        size, tokens = args.gradient_cache_chunk_size, args.gradient_cache_chunk_tokens
        if size == "auto":
            size, tokens = None, self._tokens_on_cpu() if args.device.type == "cpu" else None
        return ChunkLimits(size, tokens, max_patches=args.gradient_cache_chunk_patches, packs=self.may_pack)

    def _tokens_on_cpu(self) -> int:
        config = getattr(self.run.bare_model, "config", None)
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        hidden, layers = getattr(text, "hidden_size", None) or 768, getattr(text, "num_hidden_layers", None) or 12
        gib = self.args.gradient_cache_memory_gib or GIB_ON_CPU
        return max(1, int(gib * 2**30 / (4 * KEPT_BY_LAYER * hidden * layers)))

    def _limits(self) -> ChunkLimits:
        return self._given_limits if self.fitting is None else self._given_limits.scaled(self.fitting.now.share)

    def _limits_of_budget(self, chunked: ChunkedBatch, is_first: bool) -> ChunkLimits:
        budget, was_measuring = self.budget, self.budget.is_measuring
        if torch.is_grad_enabled() and is_first:
            budget.propose(may_settle=self.run.progress()[0] > 0)
        everyone = collectives.exchange([longest_row(chunked), budget.proposed])
        longest, tokens = max(row[0] for row in everyone), min(row[1] for row in everyone)
        limits = budget.limits(longest, tokens, self._limits(), self.fitting.now.share)
        if was_measuring and not budget.is_measuring:
            measured = budget.measured
            size = f"{measured.tokens} tokens per chunk, " if budget.finds_size else ""
            logger.info(
                f"gradient cache: {size}from {measured.bytes_per_token:.0f} bytes per token measured; of the "
                f"{measured.available / 2**30:.2f} GiB for a step {measured.intercept / 2**30:.2f} GiB are taken by "
                "what does not depend on the chunk."
            )
        return limits

    def _widening(self) -> int:
        """How many times larger the chunks of the pass without a graph are."""
        if not self.args.uses_gradient_cache or self.fitting.now.chunk_halvings:
            return 1
        if self.run.strategy.is_cut:
            return 1  # fewer chunks would leave more ranks idle
        if self.budget is not None and not self.budget.has_graphs:
            return 1  # the size was found for this very pass
        num_layers = getattr(getattr(self.run.bare_model, "config", None), "num_hidden_layers", None)
        return policy.widening(num_layers, self.is_checkpointed)

    def _num_kept_graphs(self, chunked: ChunkedBatch) -> int:
        if not self.args.uses_gradient_cache:
            return ALL_GRAPHS
        if not self.fitting.now.keeps_graphs:
            return 0
        kept = self.args.num_kept_graphs
        if kept == "auto":
            kept = 0 if self.budget is None else self.budget.keep_graph(chunked.costliest())
        return kept


def costliest_chunks(chunked: ChunkedBatch) -> Iterator[Chunk]:
    """Of every kind of rows, without and with images, the chunk with most tokens."""
    kinds: dict[tuple[int, bool], list[Chunk]] = {}
    for chunk in chunked.chunks():
        kinds.setdefault((chunked.tables[chunk.table].kind, chunk.has_vision), []).append(chunk)
    for chunks in kinds.values():
        yield max(chunks, key=lambda chunk: chunk.num_tokens)


def _padding_token(config: Any) -> int:
    """Of the part that reads text: SmolVLM's own is one that its vocabulary does not have."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(text, "pad_token_id", None) or 0


# ---- columns that some ranks lack: hard negatives, which none of a rank's rows has. The rank gets the column without
# rows, so that all gather the same columns in the same order, as one process with the rows of all would see them. ----


def columns_digest(names: Iterable[str]) -> int:
    """One number for the names and their order."""
    content = "\0".join(names).encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=7).digest(), "big")


def names_of_all_ranks(names: Iterable[str]) -> list[str]:
    """The names that any rank has, in the order of the rank that has most. Every rank calls it."""
    everyone = [bytes(said).decode() for said in collectives.exchange(list("\0".join(names).encode()))]
    of_ranks = [said.split("\0") if said else [] for said in everyone]
    return list(dict.fromkeys(name for own in sorted(of_ranks, key=len, reverse=True) for name in own))


def with_columns_of_all_ranks(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """The batch with the columns of all ranks. Every rank calls it. A column that no row here has is one of negatives,
    which are read as positives are.

    Raises:
        UsageError: the ranks have other anchors or positives.
    """
    pairs, names, found = names_of_all_ranks(list(batch)[:2]), names_of_all_ranks(batch), dict(batch)
    if len(pairs) > 2:
        raise UsageError(
            f"the batches of the processes have other columns: {list(batch)} here, {names} together. The first two, "
            "anchor and positive, must be the same on all of them. Give every row the same columns, in one order."
        )
    for name in names:
        if name not in batch:
            found[name] = without_rows(batch[list(batch)[-1]])
    return type(batch)({name: found[name] for name in names})

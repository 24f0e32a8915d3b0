"""Pipeline parallelism under a loss over embeddings: consecutive ranks hold the same rows and some stages of a model.

A pipeline is a group of consecutive ranks; other groups are copies of it with rows of their own. `mesh.py` says which
ranks, `stages.py` cuts the model, `schedules.py` says who works when, and `passes.py` takes the chunks of a
step through the stages. Several ranks may split the layers of a stage between them (tensor parallelism, as
`splitting.py` does it). Gradients are added up locally and averaged over the copies once per update. `options.py` says
what can run as a pipeline.

(1) this rank's part of the model
(2) once per update: gradients over the copies, one norm for the whole model
(3) whole weights for a folder that loads anywhere
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers.utils import logging

from hf_dist_ext import policy
from hf_dist_ext.engine.chunks import ChunkedBatch
from hf_dist_ext.engine.gradient_cache import Embeddings, PhaseContext
from hf_dist_ext.errors import UsageError
from hf_dist_ext.strategies import collectives, mesh, plans, splitting
from hf_dist_ext.strategies.base import Strategy, meanwhile
from hf_dist_ext.strategies.gathering import Rows
from hf_dist_ext.strategies.mesh import COPIES, PARTS, STAGES
from hf_dist_ext.strategies.pipeline import stages
from hf_dist_ext.strategies.pipeline.options import check_model, per_rank_of, schedule_of, size, stages_of
from hf_dist_ext.strategies.pipeline.passes import Line, PipelinePasses
from hf_dist_ext.strategies.tensors import held_here, num_parts, whole

logger = logging.get_logger(__name__)

# ---- (1) ----


def in_stages(args: Any) -> Callable[[type], type] | None:
    """For whoever reads the model: this rank reads its stages only. None without a pipeline."""
    if size(args) == 1:
        return None
    return _in_stages(args, mesh.make(args) if mesh.shape_of(args).parts > 1 else None)


def _in_stages(args: Any, of_parts: mesh.Mesh | None) -> Callable[[type], type]:
    """With tensor parallelism what is split keeps the mesh on which it is."""
    own, num_stages = stages_of(args)

    def finish(model: nn.Module) -> None:
        model.mesh = of_parts
        splitting.split_layers(model, of_parts.devices[PARTS])

    more = {} if of_parts is None else {"finish": finish}
    return functools.partial(stages.staged, own=own, num_stages=num_stages, split=args.pipeline_split, **more)


class Pipeline(Strategy):
    """
    Attributes:
        cut: the model, while Trainer is constructed and from then on.
        line: this rank's pipeline, once there is an accelerator.
    """

    comes_with_model = is_cut = saves_by_name = syncs_replicated = True
    pads_rows = "the stages of a pipeline send each other rows of one width"
    can_redo = False

    def __init__(self, model: nn.Module | None, args: Any):
        super().__init__()
        check_model(model, args)
        self.whole = model
        self.shape, self.schedule, self.per_rank = mesh.shape_of(args), schedule_of(args), per_rank_of(args)
        if self.shape.parts > 1:
            splitting.check_what_trains(model, args)
        self.cut: stages.StagedModel | None = None
        self.line: Line | None = None
        self.mesh: mesh.Mesh | None = None
        self.partial: list[nn.Module] = []  # whose gradients are of this rank's heads only
        self._has_checked_rows = False
        self._elsewhere: frozenset[str] | None = None

    @property
    def size(self) -> int:
        """Ranks with stages of their own."""
        return self.shape.stages

    @property
    def ranks_per_layer(self) -> int:
        return self.shape.parts

    @property
    def split(self) -> str:
        return f"pp {self.size}" + (f" x tp {self.shape.parts}" if self.shape.parts > 1 else "")

    @property
    def name(self) -> str:
        return self.split + (f" x dp {self.shape.copies}" if self.shape.copies > 1 else "")

    # ---- setting up ----

    @contextmanager
    def constructing(self, args: Any) -> Iterator[None]:
        own, num_stages = stages_of(args)
        self.cut = stages.StagedModel(self.whole, own, stages.firsts_of(self.whole, num_stages, args.pipeline_split))
        split = plans.planned(self.whole) if self.shape.parts > 1 else None
        self.mesh = getattr(split, "mesh", None) or mesh.make(args)
        self.rows = Rows(self.shape.of_a_model, self.mesh.group(COPIES))
        self._in_stages = _in_stages(args, self.mesh if self.shape.parts > 1 else None)
        self.whole.to(args.device)
        if self.shape.parts > 1:
            splitting.split_layers(split, self.mesh.devices[PARTS])
            self.partial = splitting.without_own_reduction(split)
        self.mesh.agree(self.whole.parameters())
        if args.process_index == 0:
            logger.info(self._in_words())
        splitting.say_split(self.cut.base)
        with meanwhile(args, save_only_model=True):  # as under tensor parallelism
            yield

    def _in_words(self) -> str:
        layers = [sum(self.cut.num_layers[rank :: self.size]) for rank in range(self.size)]
        each, many = "process", f"{self.size} processes"
        if self.shape.parts > 1:
            each, many = "group", f"{self.size} groups of {self.shape.parts} processes"
        copies = "there are no copies" if self.shape.copies == 1 else "copies average their gradients once per update"
        return (
            f"pipelines: {self.shape.copies} of {many}; layers per {each}: {', '.join(map(str, layers))}; stages per "
            f"{each}: {self.per_rank}; schedule {self.schedule}; {copies}."
        )

    def place(self, model: nn.Module | None, *more: Any) -> None:
        device = self.accelerator.device
        group = self.mesh.group(STAGES)
        self.line = Line(self.cut, self.schedule, self.per_rank, group, device, self.accelerator.autocast)

    def arrange(self, optimizer: torch.optim.Optimizer) -> None:
        if self.shape.parts > 1:
            self.mesh.arrange(optimizer)

    def gather_for_metrics(self) -> Callable:
        return functools.partial(self.rows.gather_for_metrics, self.accelerator)

    # ---- a step ----

    def check_batch(self, batch: Mapping[str, Mapping[str, torch.Tensor]], device: torch.device) -> None:
        """In a run's first step. Raises UsageError on every rank."""
        if self._has_checked_rows:
            return
        ranks = self.shape.of_a_model
        if not self.rows.hold_the_same(batch):
            raise UsageError(
                f"ranks of a pipeline of {ranks} hold other rows than each other. Let the order of rows depend on "
                f"the pipeline, not on the rank: rank // {ranks}."
            )
        if self.shape.parts > 1 and not Rows(self.shape.parts).say_the_same(collectives.random_state(device)):
            raise UsageError(
                f"{self.shape.parts} ranks that split a stage's layers draw other random numbers than each other. "
                f"Let what is drawn depend on the stage, not on the rank: rank // {self.shape.parts}."
            )
        self._has_checked_rows = True

    def make_passes(self, *arguments: Any) -> PipelinePasses:
        return PipelinePasses(self.line, *arguments)

    def encoded(self, batch: ChunkedBatch, encode: Any, phase: PhaseContext) -> Embeddings:
        chunks = batch.chunks()
        outputs = self.line.forward(chunks, phase)
        return self.line.shared(batch.to_columns(outputs, chunks) if self.line.has_last else {})

    # ---- (2) ----

    def finish_update(self, loss_parameters: Iterable[nn.Parameter]) -> None:
        bucket: list[nn.Parameter] = []
        for parameter in chain(loss_parameters, self.whole.parameters()):
            if bucket and sum(p.numel() for p in bucket) + parameter.numel() > policy.REDUCED_TOGETHER:
                self.rows.average_gradients(bucket)
                bucket = []
            bucket.append(parameter)
        self.rows.average_gradients(bucket)
        if self.partial:
            splitting.sum_partial(self.partial, self.mesh.group(PARTS))

    @torch.no_grad()
    def agree_on_loss(self, state: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        source = self.line.global_rank(self.size - 1)  # which alone runs the loss of a step
        for tensor in state().values():
            dist.broadcast(tensor, src=source, group=self.line.group)

    def clip(
        self, parameters: Iterable[nn.Parameter], loss_parameters: Sequence[nn.Parameter], max_norm: float
    ) -> torch.Tensor:
        """The norm of all stages' gradients, and of those that every rank has (the loss's own parameters) once; they
        are scaled down to `max_norm` (inf: not at all)."""
        here = {id(p) for p in self.whole.parameters()}
        of_copies = defaultdict(list)  # on how many ranks an element lies -> gradients
        for parameter in chain(parameters, loss_parameters):
            if parameter.grad is not None:
                of_stages = 1 if id(parameter) in here else self.size
                ranks = self.shape.copies * self.shape.parts * of_stages // num_parts(parameter.grad)
                of_copies[ranks].append(held_here(parameter.grad))
        return collectives.clip(of_copies, max_norm, self.line.device)

    def for_log(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """The share of the passes that a rank waits, the mean over the pipeline, and what the schedule would have it
        be."""
        if not seconds.get("seconds_passes"):
            return {}
        busy = sum(seconds[f"seconds_{part}"] for part in ("encode", "replay", "last_backward"))
        share = torch.tensor([1 - busy / seconds["seconds_passes"]], device=self.line.device)
        dist.all_reduce(share, group=self.line.group)
        expected = policy.idle_share(self.schedule, self.size, self.per_rank, self.line.num_chunks)
        return {"bubble_share": round(share.item() / self.size, 4), "bubble_share_expected": round(expected, 4)}

    # ---- (3) ----

    @property
    def elsewhere(self) -> frozenset[str]:
        if self._elsewhere is None:
            own = {name for name, _ in self.whole.named_parameters()}
            found: list[set[str]] = [set()] * self.size
            dist.all_gather_object(found, own, group=self.line.group)
            self._elsewhere = frozenset(set().union(*found) - own)
        return self._elsewhere

    def collected(self, tensors: Mapping[str, torch.Tensor], keep: bool) -> dict[str, torch.Tensor]:
        """Stage by stage: its ranks make one tensor after another whole, and the first of them sends it to rank 0."""
        found, line = {}, self.line
        is_first = self.mesh.place._replace(stages=0) == (0, 0, 0)
        shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        for stage in range(self.size):
            for name, (shape, dtype) in line.told(shapes, stage).items():
                if stage == line.rank:
                    with whole(tensors[name]) as content:
                        if keep:
                            found[name] = content.cpu().clone()
                        elif is_first and stage:
                            dist.send(content.to(line.device).contiguous(), line.global_rank(0), line.group)
                elif is_first and line.rank == 0:
                    tensor = torch.empty(shape, dtype=dtype, device=line.device)
                    dist.recv(tensor, line.global_rank(stage), line.group)
                    if keep:
                        found[name] = tensor.cpu()
        return found

    def said_by_parts(self, content: Any) -> list[Any]:
        return [self.line.told(content, rank) for rank in range(self.size)]

    def whole_weights(self, model: nn.Module, keep: bool) -> dict[str, torch.Tensor]:
        return self.collected(model.state_dict(), keep)

    def saving_whole(self, model: nn.Module) -> AbstractContextManager:
        return self.cut.whole()

    def read_backbone(self, kind: Any, folder: str | Path, **options: Any) -> Any:
        return self._in_stages(kind).from_pretrained(folder, **options)

    def check_resumable(self, folder: Path, content: Mapping[str, Any], world_size: int) -> None:
        if content.get("pipeline_parallel_size", 1) == 1:
            saved = "without a pipeline"
        elif (content.get("tensor_parallel_size", 1) > 1) != (self.ranks_per_layer > 1):
            saved = f"as {content['sharding']}"
        else:
            return
        raise UsageError(
            f"{folder} was saved {saved}, this run is {self.name}: the optimizer's groups are others. "
            "With resume_weights_only its weights are taken and everything else starts anew."
        )

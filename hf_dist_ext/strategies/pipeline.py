"""Pipeline parallelism under a loss over embeddings: consecutive ranks hold the same rows and some stages of a model.

A pipeline is a group of P consecutive ranks; other groups are copies of it with rows of their own. `stages.py` cuts
the model, `schedules.py` says who works when, and `pipeline_passes.py` takes the chunks of a step through the stages.
Nothing wraps the model: gradients are added up locally and averaged over the copies once per update. accelerate and
Trainer know no pipelines, but groups of ranks that hold the same rows: to them a pipeline is a tensor-parallel group.

(1) what can run as a pipeline, said before anything is cut
(2) the groups; what accelerate hears of them
(3) once per update: gradients over the copies, one norm for the whole model
(4) whole weights for a folder that loads anywhere
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hf_dist_ext import launched, policy
from hf_dist_ext.engine.chunks import ChunkedBatch
from hf_dist_ext.engine.gradient_cache import Door, Embeddings
from hf_dist_ext.errors import UsageError
from hf_dist_ext.strategies import collectives, schedules, stages
from hf_dist_ext.strategies.base import Strategy, meanwhile
from hf_dist_ext.strategies.pipeline_passes import Line, PipelinePasses
from hf_dist_ext.strategies.rows import Rows

# What transformers calls the options of activation checkpointing, today and before 5.23.
CHECKPOINTING = ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs")


def size(args: Any) -> int:
    """Ranks of a pipeline; 1: there is none."""
    return getattr(args, "pipeline_parallel_size", None) or 1


# ---- (1) ----


def check(args: Any) -> None:
    """Rules between the fields. Raises UsageError."""
    given = {
        name: value
        for name in ("pipeline_schedule", "pipeline_stages_per_rank", "pipeline_split")
        if (value := getattr(args, name)) is not None
    }
    if args.pipeline_parallel_size is not None and args.pipeline_parallel_size < 1:
        raise UsageError(f"pipeline_parallel_size={args.pipeline_parallel_size} must be at least 1.")
    if size(args) == 1:
        if given:
            name, value = next(iter(given.items()))
            raise UsageError(f"{name}={value!r} is of a pipeline. Set pipeline_parallel_size, or remove {name}.")
        return
    if schedule_of(args) not in schedules.SCHEDULES:
        raise UsageError(
            f"pipeline_schedule={args.pipeline_schedule!r} does not exist. Choose one of "
            f"{', '.join(schedules.SCHEDULES)}."
        )
    fixed, per_rank = policy.FIXED_STAGES_PER_RANK.get(schedule_of(args)), args.pipeline_stages_per_rank
    if per_rank is not None and (per_rank < 1 or per_rank != (fixed or per_rank)):
        raise UsageError(
            f"pipeline_stages_per_rank={per_rank}: {schedule_of(args)} has {fixed or 'at least 1'} per process."
        )
    if launched.processes() % size(args):
        raise UsageError(
            f"{launched.processes()} processes do not make pipelines of {size(args)} (pipeline_parallel_size). Start "
            f"a multiple of {size(args)}."
        )
    _check_rest(args)


def schedule_of(args: Any) -> str:
    return args.pipeline_schedule or policy.PIPELINE_SCHEDULE


def per_rank_of(args: Any) -> int:
    return policy.stages_per_rank(schedule_of(args), args.pipeline_stages_per_rank)


def places_of(args: Any) -> tuple[list[int], list[int]]:
    """The rank of every stage, and this rank's stages."""
    places = policy.rank_of_stage(schedule_of(args), size(args), per_rank_of(args))
    return places, [stage for stage, rank in enumerate(places) if rank == launched.rank() % size(args)]


def in_stages(args: Any, staged: Callable[..., type] = stages.staged) -> Callable[[type], type] | None:
    """For `EmbeddingModel.from_pretrained`: this rank reads its stages only. None without a pipeline."""
    if size(args) == 1:
        return None
    places, own = places_of(args)
    return functools.partial(staged, own=own, places=places, split=args.pipeline_split)


def _check_rest(args: Any) -> None:
    """UsageError for what was not made exact, or has no meaning, with a pipeline."""
    chunk_size = args.gradient_cache_chunk_size
    if not args.uses_gradient_cache or chunk_size == "auto":
        raise UsageError(
            "a pipeline works on chunks: give gradient_cache_chunk_size a number of rows, or "
            "gradient_cache_chunk_tokens one of tokens. None is found by measuring, as several chunks are under way."
        )
    refused = {
        f"gradient_cache_keep_graph={args.gradient_cache_keep_graph!r}": args.gradient_cache_keep_graph
        not in (0, "0"),
        "fp16=true": args.fp16,
        "torch_compile=true": args.torch_compile,
        "frozen_feature_cache": args.frozen_feature_cache is not None,
        "save_async=true": args.save_async,
        "save_on_each_node=true": args.save_on_each_node
        and launched.processes_here(launched.processes()) < launched.processes(),
        "bf16_full_eval=true": args.bf16_full_eval,
        f"neftune_noise_alpha={args.neftune_noise_alpha}": args.neftune_noise_alpha is not None,
        "use_liger_kernel=true": args.use_liger_kernel,
        "fp16_full_eval=true": args.fp16_full_eval,
        "use_reentrant=true": any((getattr(args, name, None) or {}).get("use_reentrant") for name in CHECKPOINTING),
        "DeepSpeed": bool(args.deepspeed) or launched.uses_deepspeed(),
        "FSDP": bool(args.fsdp) or launched.uses_fsdp(),
        "a mesh of accelerate (parallelism_config)": launched.uses_mesh(),
    }
    refused |= {
        f"{name}={getattr(args, name)!r}": getattr(args, name) is not None for name in ("ddp_comm_hook", "sharding")
    }
    if found := [what for what, is_given in refused.items() if is_given]:
        remedy = {"fp16=true": "Use bf16."}.get(found[0], "Leave it out, or use multi_gpu_fsdp.")
        raise UsageError(f"a pipeline does not go with {found[0]}. {remedy}")


def check_model(model: nn.Module | None, args: Any) -> None:
    """Before anything is cut. Raises UsageError."""
    if model is None:
        raise UsageError("a pipeline needs the model itself, not model_init: it is cut into stages before training.")
    if any(vars(module).get("_is_distributed_loading_by_transformers") for module in model.modules()):
        raise UsageError(f"{type(model).__name__} is split over processes already. Give a pipeline the whole model.")


# ---- (2) ----


def options(args: Any) -> dict[str, Any]:
    """What an `Accelerator` takes: loaders then deal the same rows to the ranks of a pipeline."""
    if size(args) == 1:
        return {}
    from accelerate import ParallelismConfig

    copies = launched.processes() // size(args)
    return {"parallelism_config": ParallelismConfig(tp_size=size(args), dp_shard_size=copies)}


class Pipeline(Strategy):
    """
    Attributes:
        cut: the model, while Trainer is constructed and from then on.
        line: this rank's pipeline, once there is an accelerator.
    """

    comes_with_model = is_cut = saves_by_name = syncs_replicated = True
    can_redo = False
    cut_kind, staged = stages.Cut, staticmethod(stages.staged)
    has_first_pass = True  # of chunks, without graphs

    def __init__(self, model: nn.Module | None, args: Any):
        super().__init__()
        check_model(model, args)
        self.whole = model
        self.size, self.schedule, self.per_rank = size(args), schedule_of(args), per_rank_of(args)
        self.cut: stages.Cut | None = None
        self.line: Line | None = None
        self.group: Any = None
        self._has_checked_rows = False
        self._elsewhere: frozenset[str] | None = None

    @property
    def split(self) -> str:
        return f"pp {self.size}"

    @property
    def name(self) -> str:
        return self.split + (f" x dp {self.rows.size}" if self.rows.size > 1 else "")

    # ---- setting up ----

    @contextmanager
    def constructing(self, args: Any) -> Iterator[None]:
        device = args.device  # with it come the processes' connections
        self.group, peers = _groups(self.size, timedelta(seconds=args.ddp_timeout))
        self.rows = Rows(self.size, peers)
        places, own = places_of(args)
        firsts = stages.firsts_of(self.whole, places, args.pipeline_split, self.cut_kind)
        self.cut = self.cut_kind(self.whole, own, firsts)
        self._in_stages = in_stages(args, self.staged)
        self.whole.to(device)
        # Trainer then leaves the model where it is, and accelerate puts no wrapper around it.
        self.cut.base._is_distributed_loading_by_transformers = True
        with meanwhile(args, "save_only_model", True):  # as under tensor parallelism
            yield

    @contextmanager
    def training(self) -> Iterator[None]:
        """The seed is that of all ranks again behind it: samplers of a next training ask for it."""
        seed = torch.initial_seed()
        try:
            yield
        finally:
            torch.manual_seed(seed)

    def wrapped(self, model: nn.Module, *more: Any) -> None:
        # Trainer has seeded all ranks alike; layers of two stages must not drop the same elements.
        torch.manual_seed(torch.initial_seed() + self.line.rank)

    def place(self, model: nn.Module | None, *more: Any) -> None:
        device = self.accelerator.device
        self.line = Line(self.cut, self.schedule, self.per_rank, self.group, device, self.accelerator.autocast)
        self.accelerator.clip_grad_norm_ = self.clip_gradients

    def gather_for_metrics(self) -> Callable:
        return functools.partial(self.rows.gather_for_metrics, self.accelerator)

    # ---- a step ----

    def check_batch(self, batch: Mapping[str, Mapping[str, torch.Tensor]], device: torch.device) -> None:
        """In a run's first step. Raises UsageError on every rank."""
        if not self._has_checked_rows and not self.rows.hold_the_same(batch, device):
            raise UsageError(
                f"ranks of a pipeline of {self.size} hold other rows than each other. Let the order of rows depend on "
                "the pipeline, not on the rank: rank // pipeline_parallel_size."
            )
        self._has_checked_rows = True

    def make_passes(self, *arguments: Any) -> PipelinePasses:
        return PipelinePasses(self.line, *arguments)

    def encoded(self, batch: ChunkedBatch, encode: Any, phase: Door) -> Embeddings:
        chunks = batch.chunks()
        outputs = self.line.forward(chunks, phase)
        return self.line.shared(batch.to_columns(outputs, chunks) if self.line.has_last else {})

    # ---- (3) ----

    def finish_update(self, loss_parameters: Iterable[nn.Parameter]) -> None:
        bucket: list[nn.Parameter] = []
        for parameter in chain(loss_parameters, self.whole.parameters()):
            if bucket and sum(p.numel() for p in bucket) + parameter.numel() > policy.REDUCED_TOGETHER:
                self.rows.average_gradients(bucket)
                bucket = []
            bucket.append(parameter)
        self.rows.average_gradients(bucket)

    @torch.no_grad()
    def clip_gradients(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """In place of the accelerator's. The norm of all stages' gradients, and of those that every rank has (the
        loss's own parameters) once; they are scaled down to `max_norm` (inf: not at all)."""
        assert norm_type == 2.0
        here, copies = ({id(p) for p in found} for found in (self.whole.parameters(), self.cut.copies))
        gradients = [(p.grad, id(p) in here, id(p) in copies) for p in parameters if p.grad is not None]
        # float64, whatever the gradients are: a stage that trains nothing has none to tell.
        total = torch.zeros((), device=self.line.device, dtype=torch.float64)
        for is_of_stage in (True, False):
            found = [grad for grad, is_here, is_copy in gradients if is_here is is_of_stage and not is_copy]
            if found:
                total += nn.utils.get_total_norm(found).to(total) ** 2
            if is_of_stage:
                dist.all_reduce(total, group=self.group)
        norm = total.sqrt()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # torch.nn.utils.clip_grads_with_norm_
        for gradient, *_ in gradients if max_norm != float("inf") else ():
            gradient.mul_(factor.to(gradient.dtype))
        return norm

    def for_log(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """The share of the passes that a rank waits, the mean over the pipeline, and what the schedule would have it
        be."""
        if not seconds.get("seconds_passes"):
            return {}
        busy = sum(seconds[f"seconds_{part}"] for part in ("encode", "replay", "last_backward"))
        share = torch.tensor([1 - busy / seconds["seconds_passes"]], device=self.line.device)
        dist.all_reduce(share, group=self.group)
        sizes = (self.size, self.per_rank, self.line.num_chunks)
        expected = policy.idle_share(self.schedule, *sizes, has_first_pass=self.has_first_pass)
        return {"bubble_share": round(share.item() / self.size, 4), "bubble_share_expected": round(expected, 4)}

    # ---- (4) ----

    @property
    def elsewhere(self) -> frozenset[str]:
        if self._elsewhere is None:
            own = {name for name, _ in self.whole.named_parameters()}
            found: list[set[str]] = [set()] * self.size
            dist.all_gather_object(found, own, group=self.group)
            self._elsewhere = frozenset(set().union(*found) - own)
        return self._elsewhere

    def collected(self, tensors: Mapping[str, torch.Tensor], keep: bool) -> dict[str, torch.Tensor]:
        """One tensor after another travels to the first rank of the first pipeline."""
        found = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()} if keep else {}
        if collectives.rank() >= self.size:
            return found
        shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        for rank in range(1, self.size):
            for name, (shape, dtype) in self.line.told(shapes, rank).items():
                if rank == self.line.rank:
                    dist.send(
                        tensors[name].detach().to(self.line.device).contiguous(), self.line.global_rank(0), self.group
                    )
                elif keep:
                    tensor = torch.empty(shape, dtype=dtype, device=self.line.device)
                    dist.recv(tensor, self.line.global_rank(rank), self.group)
                    found[name] = tensor.cpu()
        return found

    def said_by_parts(self, content: Any) -> list[Any]:
        return [self.line.told(content, rank) for rank in range(self.size)]

    def whole_weights(self, model: nn.Module, keep: bool) -> dict[str, torch.Tensor]:
        return self.collected(model.state_dict(), keep)

    def saving_whole(self, model: nn.Module) -> AbstractContextManager:
        return self.cut.saving()

    @torch.no_grad()
    def load_whole(self, model: nn.Module, folder: str | Path) -> bool:
        """Every rank reads its own stages. Adapters are peft's to read."""
        if self.cut.base is not self.whole:
            return False
        # float32 holds what either half precision holds; copying casts back to each parameter's own.
        dtype = functools.reduce(torch.promote_types, {p.dtype for p in model.parameters()}, torch.float32)
        theirs = self.read(folder, dtype).state_dict()
        for name, tensor in model.state_dict().items():
            if name not in theirs or theirs[name].shape != tensor.shape:
                raise UsageError(f"{folder} does not fit this model: {name!r}. Use the options it was saved with.")
            tensor.copy_(theirs[name])
        return True

    def read(self, folder: str | Path, dtype: torch.dtype) -> nn.Module:
        """A model of this rank's stages, with the weights of a folder."""
        return type(self.cut.base).from_pretrained(folder, dtype=dtype, in_stages=self._in_stages)

    def check_resumable(self, folder: Path, content: Mapping[str, Any], world_size: int) -> None:
        if content.get("pipeline_parallel_size", 1) == 1:
            raise UsageError(
                f"{folder} was saved without a pipeline, this run is {self.name}: the optimizer's groups are others. "
                "With resume_weights_only its weights are taken and everything else starts anew."
            )


def _groups(size: int, timeout: timedelta) -> tuple[Any, Any]:
    """This rank's pipeline, and the ranks with its place in the others (None: there are none)."""
    ranks = list(range(collectives.world_size()))
    own = peers = None
    for start in range(0, len(ranks), size):
        group = dist.new_group(ranks[start : start + size], timeout)
        own = group if collectives.rank() in ranks[start : start + size] else own
    for place in range(size):
        group = dist.new_group(ranks[place::size], timeout)
        peers = group if collectives.rank() in ranks[place::size] else peers
    return own, peers

"""What a run asks about the way its model is spread over processes. The answers here are those of one process.

Each other way is a subclass in a file of its own that overrides what differs; `choose.py` says which one runs. Nobody
asks a strategy which one it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_dist_ext.engine.chunks import ChunkedBatch
from hf_dist_ext.engine.gradient_cache import Embeddings, Encode, Passes, Phase, PhaseContext, encode_without_graph
from hf_dist_ext.errors import UsageError
from hf_dist_ext.strategies import collectives
from hf_dist_ext.strategies.gathering import Rows
from hf_dist_ext.strategies.tensors import gathered


class Strategy:
    """One process.

    Attributes:
        accelerator: None before there is one.
        model: with its wrappers, once `start` was called.
        completes: whether the phase that runs completes the gradients of an update.
        rows: which ranks hold rows of their own.
    """

    comes_with_model = False  # the model is split over a mesh of processes before there is an accelerator
    # What a step may do.
    forwards_are_collective = False  # a forward waits for other ranks, which then have to run the same ones
    max_live_graphs: int | None = None  # 1: every forward must be followed by its backward
    can_redo = True  # an error inside a forward or backward leaves nothing behind, so the step can be run again
    waits_for_all = False  # gradients are complete only when one of every trainable parameter has come
    holds_gradients = True  # until the update; else the wrapper has used them up in the last backward
    keeps_float32 = False  # trains copies of its own of weights in half precision
    casts_to: str | None = None  # the precision that an engine puts all weights into, whatever they were loaded in
    is_cut = False  # a rank has some layers of the model and no others
    syncs_replicated = False  # keeps what no mesh holds alike on all ranks, in place of Trainer
    loads_alone = False  # every rank trains the weights that it loaded, and nothing makes them those of one rank
    pads_rows = ""  # why rows can not go through the model end to end, without padding
    fixed_accumulation = ""  # why accumulation can not change after the start
    # What a checkpoint is made of.
    split = ""  # how the layers themselves are split, in words: the optimizer's groups follow it
    saves_by_name = False  # the optimizer's state, since Trainer can not write it
    saves_shards = False  # weights and optimizer state go into a distributed format
    reads_own_format = False  # of weights, which Trainer knows how to load
    has_engine = False  # that writes and reads weights and optimizer state by itself
    optimizer_file = "optimizer.pt"  # in which Trainer looks for the optimizer's state

    def __init__(self) -> None:
        self.accelerator: Any = None
        self.model: nn.Module | None = None
        self.completes = False
        self.rows = Rows()

    @classmethod
    def runs(cls, accelerator: Any) -> bool:
        """Whether this is what an `Accelerator` will wrap a model in."""
        return True

    @property
    def name(self) -> str:
        """How a checkpoint's manifest names it, as `sharding`."""
        return "none"

    @property
    def ranks_per_layer(self) -> int:
        """So many consecutive ranks have parts of the same layers, and draw the same random numbers."""
        return self.rows.shared_by

    @property
    def frozen_forwards_are_collective(self) -> bool:
        """Whether those of modules of which nothing trains are."""
        return self.forwards_are_collective

    # ---- setting up ----

    def constructing(self, args: Any) -> AbstractContextManager:
        """Around Trainer's constructor, for what it refuses and a strategy can do."""
        return nullcontext()

    def place(
        self, model: nn.Module | None, args: Any, has_loss: bool, frozen_roots: Sequence[nn.Module] | None
    ) -> None:
        """When there is an `Accelerator`, before it wraps the model: tells its plugin what this model needs.
        `frozen_roots`: the largest modules of which nothing trains; None when nothing is frozen by name."""

    def gather_for_metrics(self) -> Callable | None:
        """What an evaluation gathers its tensors with, in place of the accelerator's; None: that one will do."""
        return None

    def constructed(self, model: nn.Module) -> None:
        """After Trainer's constructor: makes equal on all ranks what each drew for itself. Also for an evaluation that
        no training precedes."""

    def wrapped(self, model: nn.Module, args: Any, has_loss: bool) -> None:
        """Once the model is in its wrappers: corrects what these do by themselves."""

    def seed(self, seed: int, device: torch.device) -> None:
        """Trainer seeds all ranks alike. From here on dropout draws other numbers on ranks with other rows or other
        layers. It draws on the device: with an accelerator the host's numbers stay alike on all ranks, as other ranks
        would wait for a layer that one skips at random."""
        if collectives.world_size() == 1:
            return
        own = hash((seed, collectives.rank() // self.ranks_per_layer)) % 2**32
        generators = torch.default_generator if device.type == "cpu" else torch.get_device_module(device)
        generators.manual_seed(own)

    def check(self, has_loss_parameters: bool, is_automatic: bool) -> None:
        """UsageError for what can not be exact with a loss over embeddings. `has_loss_parameters`: the loss trains
        some of its own; `is_automatic`: the size of chunks, or the number of kept graphs."""

    def arrange(self, optimizer: torch.optim.Optimizer) -> None:
        """When Trainer has made it: gives all ranks groups of parameters that mean the same."""

    def check_optimizer(self, field: str) -> None:
        """UsageError when `field` does not reach the optimizer."""

    # ---- a step ----

    def start(
        self, model: nn.Module, mode: str, loss_parameters: Sequence[nn.Parameter], optimizer: Any, has_towers: bool
    ) -> None:
        """Before the first step of a wrapped model. `mode`: the argument `gradient_cache_fsdp`; `has_towers`: every
        column of a batch has a tower of its own."""
        self.model = model

    def begin_step(self) -> None:
        """Before a batch is cut: collectives that a wrapper would run inside of a forward. Every rank calls it."""

    def check_batch(self, batch: Mapping[str, Mapping[str, torch.Tensor]], device: torch.device) -> None:
        """UsageError for rows that this rank must not hold."""

    def check_graphs(self, num_kept: int, num_chunks: int) -> None:
        """UsageError when a step would keep more graphs alive than may be."""

    def bare_to_try(self, model: nn.Module) -> nn.Module | None:
        """The model in its wrapper, on which chunks can be tried out without a collective; None: not needed, or not
        possible."""
        return None

    def phase(self, phase: Phase) -> AbstractContextManager:
        """Around every forward and backward of a step. One reduction runs per update: in the phase that is the last of
        a step, where accelerate says that the step ends an update."""
        self.completes = phase.is_last and self.accelerator.sync_gradients
        return self.reducing()

    def reducing(self) -> AbstractContextManager:
        """The collectives of the phase that runs; `completes` is set."""
        return nullcontext()

    def backward(self, loss: torch.Tensor, own_loss: torch.Tensor) -> None:
        """`own_loss`: what this rank scored in the step, detached."""
        self.accelerator.backward(self.reaching_all(loss))

    def reaching_all(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss of the backward that runs: the one that completes the gradients has a gradient of zero for
        parameters that this rank's chunk did not use (an image encoder, for rows without images)."""
        if not (self.completes and self.waits_for_all):
            return loss
        used = _parameters_behind(loss)
        unused = [p for p in self.model.parameters() if p.requires_grad and used is not None and id(p) not in used]
        return _WithZeroGradients.apply(loss, *unused) if unused else loss

    def mark(self, loss: torch.Tensor, own_loss: torch.Tensor) -> torch.Tensor:
        """`loss`, such that all ranks skip the update when `own_loss` is not finite on one."""
        return loss

    def marking(self) -> AbstractContextManager:
        """Around a step of Trainer's, whose loss is marked."""
        backward = self.accelerator.backward
        marked = lambda loss, **options: backward(self.mark(loss, loss.detach()), **options)  # noqa: E731
        return meanwhile(self.accelerator, backward=marked)

    def sharing_casts(self, is_checkpointed: bool) -> AbstractContextManager:
        """Around a step. Autocast keeps its copy of a trained weight until its outermost context ends: with one around
        all forwards, chunks share it. Forwards turn it on; the loss and backwards run without it.

        Under activation checkpointing no chunk holds copies, and none would be freed behind a layer. Where FSDP2 frees
        a layer's weights, each chunk needs a copy of its own: autograd runs the newest nodes first, so the cast that
        an earlier chunk recorded would run behind FSDP2's hook, and its gradient would be left out.
        """
        if is_checkpointed or self.forwards_are_collective:
            return nullcontext()
        return torch.autocast(self.accelerator.device.type, enabled=False)

    def make_passes(self, *arguments: Any) -> Passes:
        """How the chunks of a step go through the model: one after another, or together through its stages."""
        return Passes(*arguments)

    def encoded(self, batch: ChunkedBatch, encode: Encode, phase: PhaseContext) -> Embeddings:
        """Embeddings of an evaluation, on every rank."""
        return encode_without_graph(batch, encode, phase)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Around `train()`. The seed is that of all ranks again afterwards: samplers of a next training ask for it."""
        seed = torch.initial_seed()
        try:
            yield
        finally:
            if collectives.world_size() > 1 and torch.initial_seed() != seed:
                torch.manual_seed(seed)

    # ---- an update ----

    def finish_update(self, loss_parameters: Iterable[nn.Parameter]) -> None:
        """After its last backward: gradients that no wrapper reduces."""
        self.rows.average_gradients(loss_parameters)

    def agree_on_loss(self, state: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        """After an update's last batch: the loss's parameters and buffers, which its forward may have written to, are
        those of a rank that has run it. Every rank calls it; their names and shapes stay as they were."""

    def clip(
        self, parameters: Iterable[nn.Parameter], loss_parameters: Sequence[nn.Parameter], max_norm: float
    ) -> torch.Tensor | None:
        """Scale gradients down to `max_norm` (inf: not at all); their norm before. None: Trainer does it."""
        if not loss_parameters:
            return None
        return self.accelerator.clip_grad_norm_(chain(parameters, loss_parameters), max_norm)

    def update_norm(self, norm: Any) -> Any:
        """The gradient norm, infinite when the update was skipped."""
        return norm

    def has_scaler(self, args: Any) -> bool:
        """Whether updates that overflow in fp16 are skipped and the scale lowered."""
        return getattr(self.accelerator, "scaler", None) is not None

    def for_log(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """What a logged line says of it. `seconds`: of the parts of a step, by the names of the line. Every rank calls
        it."""
        return {}

    def drop_update(self, optimizer: Any, step: int) -> None:
        """Leave out an update that is not finite."""
        optimizer.zero_grad()

    # ---- checkpoints ----

    def read_as(self, is_part: bool, trusts: bool, around: Callable[[], AbstractContextManager]) -> None:
        """When there is an optimizer, for the checkpoint that may be read next. `is_part`: it holds what was trained
        and no more; `trusts`: its pickles may run code; `around`: what it is read inside of."""

    def whole_weights(self, model: nn.Module, keep: bool) -> dict[str, torch.Tensor]:
        """The model's state dict on the ranks with `keep`. Every rank calls it."""
        return self.accelerator.get_state_dict(model)

    @property
    def elsewhere(self) -> frozenset[str]:
        """Names of parameters that lie on other ranks alone. Every rank asks for them."""
        return frozenset()

    def collected(self, tensors: Mapping[str, torch.Tensor], keep: bool) -> dict[str, torch.Tensor]:
        """Whole tensors on the CPU, also those that lie elsewhere, on the ranks with `keep`. Every rank calls it."""
        return dict(gathered(tensors, keep))

    def said_by_parts(self, content: Any) -> list[Any]:
        """What the ranks say that have different parts of the model. Every rank calls it."""
        return [content]

    def saving_whole(self, model: nn.Module) -> AbstractContextManager:
        """Around `save_pretrained` of whole weights on one rank."""
        return nullcontext()

    def read_backbone(self, kind: Any, folder: str | Path, **options: Any) -> Any:
        """What `kind.from_pretrained` gives: of a model whose layers are split, this rank's part of them."""
        return kind.from_pretrained(folder, **options)

    def holds_own_format(self, folder: Path) -> bool:
        """With `reads_own_format`: whether a checkpoint's weights are in it."""
        return True

    def save_engine(self, folder: Path) -> None:
        """With `has_engine`: its state in a run with frozen parts. Every rank calls it."""
        raise NotImplementedError

    def save_optimizer(self, model: nn.Module, optimizer: Any, folder: Path, keep: bool, writer: Any) -> bool:
        """The optimizer's state, and weights in a format of the strategy's own, through `writer` (checkpoints). Every
        rank calls it, those that `keep` write whole tensors. False: Trainer does it."""
        if keep:
            writer.torch(optimizer.state_dict(), folder / "optimizer.pt")
        return True

    def has_no_optimizer_state(self, folder: str | Path) -> bool:
        """Whether a checkpoint holds an optimizer that reading would fail at."""
        return False

    def converts(self, folder: Path) -> bool:
        """Whether a checkpoint's weights and optimizer state are whole tensors in the files of another strategy, which
        can be read by name, or by order, as one trainer makes the same groups everywhere. Not adapters."""
        is_foreign = any(name != self.optimizer_file and (folder / name).is_file() for name in WHOLE)
        others = ("pytorch_model_fsdp*", "adapter_model*")
        return is_foreign and not self.has_engine and not any(any(folder.glob(name)) for name in others)

    def save(self, model: nn.Module, folder: Path, args: Any, writer: Any) -> None:
        """What a checkpoint needs beside weights and optimizer; `model` in its wrapper. Every rank calls it."""

    def load(self, model: nn.Module, folder: str | None, args: Any) -> None:
        """Read what `save` wrote."""

    def check_resumable(self, folder: Path, content: Mapping[str, Any], world_size: int) -> None:
        """UsageError for a checkpoint that this run can not continue; `content`: its manifest, empty without one."""
        sizes = [content.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline")]
        before, now = content["sharding"] if max(sizes) > 1 else "", self.split
        if any((what in before) != (what in now) for what in ("tp", "fsdp", "pp")):
            raise UsageError(
                f"{folder} was saved {_under(before)}, this run is {_under(now)}: the optimizer's groups are others. "
                "With resume_weights_only its weights are taken and everything else starts anew."
            )
        for name, wrote in () if self.converts(folder) else WRITERS.items():
            if name != self.optimizer_file and any(folder.glob(name)):
                raise UsageError(
                    f"{folder} was written {wrote}, and only such a run reads its optimizer's state. Resume it as it "
                    "was written, or set resume_weights_only=true: it takes the weights, and everything else starts "
                    "anew."
                )


WHOLE = ("optimizer.pt", "optimizer.bin")  # of whole tensors: by position, and by name
# The file of an optimizer's state that is not kept by name -> who writes it. Trainer looks for its own alone.
WRITERS = {
    "optimizer.pt": "by one process or under DDP",
    "optimizer.bin": "under FSDP with FULL_STATE_DICT",
    "optimizer_0": "under FSDP with SHARDED_STATE_DICT",
    "global_step*": "under DeepSpeed",
}


def _under(split: str) -> str:
    if split.startswith("pp "):
        return f"as a pipeline ({split})"
    return f"under tensor parallelism ({split})" if split else "without tensor parallelism"


@contextmanager
def meanwhile(owner: Any, **values: Any) -> Iterator[None]:
    """Attributes of an object, a class or a module have other values while inside."""
    with ExitStack() as leaving:
        for name, value in values.items():
            undo = (setattr, owner, name, vars(owner)[name]) if name in vars(owner) else (delattr, owner, name)
            setattr(owner, name, value)
            leaving.callback(*undo)
        yield


class _WithZeroGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.parameters = parameters
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return gradient, *map(torch.zeros_like, ctx.parameters)


def _parameters_behind(loss: torch.Tensor) -> set[int] | None:
    """The ids of the leaves that the backward of `loss` reaches. None where it can not be known: reentrant activation
    checkpointing makes the graph of a layer only when its backward runs."""
    seen, leaves, next_ones = set(), set(), [loss.grad_fn]
    while next_ones:
        node = next_ones.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::AccumulateGrad":
            leaves.add(id(node.variable))
        elif node.name() == "CheckpointFunctionBackward":
            return None
        next_ones += [function for function, _ in node.next_functions]
    return leaves

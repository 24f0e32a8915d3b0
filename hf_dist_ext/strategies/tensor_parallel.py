"""Tensor parallelism under a loss over embeddings: a group of ranks holds the same rows and a part of every layer.

transformers has split the model (`splitting.py`): layers over the ranks of a group, which are consecutive, and what
that leaves over the groups with FSDP2. The loss and its gather see one rank per group. What is left to do:

(1) the style whose gradients go wrong with several backwards is taken out of transformers' hands
(2) once per update: gradients of norms inside attention are summed over a group, those FSDP2 does not own averaged
    over the groups; their norm is that of the whole model
(3) the ranks of a group must hold the same rows and draw the same random numbers
(4) whole weights for a folder that loads anywhere, and back; Trainer's refusal to save set aside

Letters: D a parameter split over a group (a DTensor), R one that every rank of a group has whole.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hf_dist_ext.errors import UsageError
from hf_dist_ext.strategies import collectives, splitting
from hf_dist_ext.strategies.base import meanwhile
from hf_dist_ext.strategies.gathering import Rows
from hf_dist_ext.strategies.sharded import Sharded
from hf_dist_ext.strategies.tensors import gathered, held_here, num_parts


class TensorParallel(Sharded):
    """A model that transformers has split, over groups with FSDP2 too.

    Attributes:
        partial: modules whose parameters (R) have gradients of this rank's heads only.
    """

    comes_with_model = saves_by_name = syncs_replicated = True

    def __init__(self, model: nn.Module | None):
        """`model` None: one is still to be made."""
        super().__init__()
        self._has_checked_group = False
        if model is None:
            return
        backbone = next(m for m in model.modules() if "_device_mesh" in vars(m) and m._device_mesh is not None)
        self.whole, self.config = model, model.config.distributed_config
        self.group = backbone._mesh_manager.get_mesh("tp").get_group()
        self.rows = Rows(self.config.tp_size, peers=backbone._mesh_manager.get_mesh("fsdp").get_group())
        self.partial = splitting.without_own_reduction(backbone)

    @property
    def split(self) -> str:
        groups = self.config.fsdp_size
        return f"tp {self.config.tp_size}" + (f" x fsdp {groups}" if groups > 1 else "")

    @property
    def name(self) -> str:
        return self.split

    # ---- setting up ----

    def constructing(self, args: Any) -> AbstractContextManager:
        """transformers 5.23 (trainer.py) refuses to save the optimizer of a split model, which it cannot write;
        checkpoints/trainable.py can, by name. Remove when the constructor takes such a model with
        save_only_model=False; tests/distributed/test_upstream.py tells."""
        return meanwhile(args, save_only_model=True)

    def constructed(self, model: nn.Module) -> None:
        """What no mesh holds (a new projection) is the same on every rank, whatever they drew; parts of adapters are
        those of the first group in every one."""
        for parameter in model.parameters():
            if num_parts(parameter) == 1:
                dist.broadcast(held_here(parameter.data), src=0)
            elif not _is_sharded(parameter):
                dist.broadcast(held_here(parameter.data), group=self.rows.peers, group_src=0)

    def gather_for_metrics(self) -> Callable:
        return functools.partial(self.rows.gather_for_metrics, self.accelerator)

    # ---- (2) ----

    def finish_update(self, loss_parameters: Iterable[nn.Parameter]) -> None:
        own = [p for p in self.whole.parameters() if not _is_sharded(p)]
        self.rows.average_gradients(chain(loss_parameters, own))
        splitting.sum_partial(self.partial, self.group)

    def clip(
        self, parameters: Iterable[nn.Parameter], loss_parameters: Sequence[nn.Parameter], max_norm: float
    ) -> torch.Tensor:
        """torch's own cannot span meshes: D, R and what FSDP2 does not own lie on different ones."""
        return self.clip_parts(chain(parameters, loss_parameters), max_norm)

    # ---- (3) ----

    def check_batch(self, batch: Mapping[str, Mapping[str, torch.Tensor]], device: torch.device) -> None:
        """In a run's first step. Raises UsageError on every rank."""
        if self._has_checked_group:
            return
        rows = b"".join(
            tensor.detach().float().cpu().numpy().tobytes()
            for features in batch.values()
            for tensor in features.values()
            if isinstance(tensor, torch.Tensor)
        )
        everyone = collectives.exchange([_number(rows), _number(collectives.random_state(device))])
        size = self.rows.shared_by
        groups = [everyone[start : start + size] for start in range(0, len(everyone), size)]
        for i, what in enumerate(("hold other rows", "draw other random numbers")):
            if any(len({of_rank[i] for of_rank in group}) > 1 for group in groups):
                raise UsageError(
                    f"tensor parallelism: ranks of a group of {size} {what} than each other. Let the order of rows "
                    "and what is drawn depend on the group, not on the rank: rank // tp_size."
                )
        self._has_checked_group = True

    # ---- (4) ----

    def whole_weights(self, model: nn.Module, keep: bool) -> dict[str, torch.Tensor]:
        return dict(gathered(model.state_dict(), keep))

    def saving_whole(self, model: nn.Module) -> AbstractContextManager:
        """transformers would gather the weights again, on all ranks."""
        config = getattr(model, "config", None)
        is_split = getattr(config, "distributed_config", None) is not None
        return meanwhile(config, distributed_config=None) if is_split else contextlib.nullcontext()

    def read_backbone(self, kind: Any, folder: str | Path, **options: Any) -> Any:
        return kind.from_pretrained(folder, distributed_config=self.config, **options)


def _is_sharded(parameter: nn.Parameter) -> bool:
    """Over the groups, by FSDP2, which reduces its gradient: not what was made when the model was split already."""
    return isinstance(parameter, DTensor) and "fsdp" in parameter.device_mesh.mesh_dim_names


def _number(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=7).digest(), "big")

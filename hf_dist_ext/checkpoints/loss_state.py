"""What a checkpoint holds beside the model's weights and their optimizer state.

What the loss's `state_dict` holds, and the optimizer state of its parameters, stand in files of their own,
`loss.safetensors` and `loss_optimizer.pt`, in every mode: FSDP's optimizer format knows only parameters of the model.
Where weights are in a form of their own, what describes the model stands beside them. The token of the hub never
reaches a file.
"""

from __future__ import annotations

import contextlib
import copyreg
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.trainer_callback import ExportableState, TrainerState
from transformers.utils import logging

from hf_dist_ext.checkpoints.folder import OF_THE_LOSS
from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.adapters import adapters_of
from hf_dist_ext.strategies.tensors import bare_optimizer, loss_parameters

logger = logging.get_logger(__name__)

LOSS_WEIGHTS, LOSS_OPTIMIZER = OF_THE_LOSS
BUDGET = "gradient_cache.json"
SECRETS = ("hub_token", "push_to_hub_token")

# ---- the loss ----


def state_of(loss: Any) -> dict[str, torch.Tensor]:
    """What a loss goes on from, as its `state_dict` says: parameters, and buffers such as a queue or a mean."""
    state = loss.state_dict() if isinstance(loss, nn.Module) else {}
    if other := [name for name, value in state.items() if not isinstance(value, torch.Tensor)]:
        raise UsageError(
            f"the state_dict of {type(loss).__name__} has {other[0]!r}, which is no tensor, and a checkpoint holds "
            "tensors of a loss. Make it a buffer (register_buffer), or leave it out of the state_dict."
        )
    return state


def check_optimizer(loss: Any, optimizer: Any, schedule: Any) -> None:
    """UsageError where an optimizer that was given can not train the loss's parameters. `schedule`: given too."""
    own = {id(p) for p in loss_parameters(loss)}
    groups = [{id(p) for p in group["params"]} for group in getattr(optimizer, "param_groups", ())]
    held = own.intersection(*[set().union(*groups)])
    is_shared = any(group & own and group - own for group in groups)
    if is_shared or (groups and schedule is not None and held != own):
        why = "them in one group with others" if is_shared else "none of them, while its schedule was given too"
        raise UsageError(
            f"{type(loss).__name__} has parameters that train, such as a temperature, and the given optimizer has "
            f'{why}. Give them a group of their own: AdamW([{{"params": model.parameters()}}, '
            '{"params": loss.parameters()}]).'
        )


def add_loss_group(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    """Let the optimizer train the loss's parameters, without weight decay (a temperature has no reason to shrink)."""
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [p for p in parameters if id(p) not in owned]
    if missing:
        bare_optimizer(optimizer).add_param_group({"params": missing, "weight_decay": 0.0})


@contextlib.contextmanager
def loss_state_apart(
    loss: Any, optimizer: Any, save_to: str | None = None, load_from: str | None = None
) -> Iterator[None]:
    """While inside, the optimizer holds the model's parameters only; the loss's state is saved to or loaded from the
    checkpoint's own files and put back on leaving."""
    if save_to is not None:
        save_loss(loss, save_to)
    if load_from is not None:
        if not state_of(loss) and os.path.isfile(_at(load_from, LOSS_WEIGHTS)):
            raise UsageError(
                f"{load_from} was trained with a loss that has a state, such as a learnable temperature, "
                "and the loss given now has none. Give the loss as it was (learnable_temperature), or go on from the "
                "weights alone: resume_weights_only=true."
            )
        load_loss(loss, load_from)
    parameters = loss_parameters(loss)
    if not parameters or optimizer is None:
        yield
        return
    optimizer, own = bare_optimizer(optimizer), {id(p) for p in parameters}
    apart = torch.optim.Optimizer(parameters, {})  # a holder, which knows how state is kept and moved
    others: list[dict[str, Any]] = []
    apart.param_groups = []
    for group in optimizer.param_groups:
        (apart.param_groups if any(id(p) in own for p in group["params"]) else others).append(group)
    optimizer.param_groups[:] = others
    apart.state.update({p: optimizer.state.pop(p) for p in parameters if p in optimizer.state})
    if save_to is not None:
        torch.save(apart.state_dict(), _at(save_to, LOSS_OPTIMIZER))
    try:
        yield
    finally:
        if load_from is not None:
            path = _stored(load_from, LOSS_OPTIMIZER, "parameters")
            apart.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        optimizer.param_groups.extend(apart.param_groups)
        optimizer.state.update(apart.state)


def save_loss(loss: Any, folder: str | Path | None) -> None:
    """The loss's state; None: another rank saves it. Nothing to do for a loss without any."""
    if folder is None or not (state := state_of(loss)):
        return
    os.makedirs(folder, exist_ok=True)
    # Copies: one loss may stand for several sources, and safetensors takes no memory twice.
    whole = {name: value.cpu().clone(memory_format=torch.contiguous_format) for name, value in state.items()}
    save_file(whole, _at(folder, LOSS_WEIGHTS))


def load_loss(loss: Any, folder: str) -> None:
    """Load the loss's state from a checkpoint; nothing to do for a loss without any."""
    if not state_of(loss):
        return
    path = _stored(folder, LOSS_WEIGHTS, "state")
    try:
        loss.load_state_dict(load_file(path))
    except RuntimeError as error:
        raise UsageError(f"{path} is of another loss than {type(loss).__name__}: {error}. Give that one.") from None


def _stored(folder: str, name: str, what: str) -> str:
    if not os.path.isfile(path := _at(folder, name)):
        raise UsageError(f"{folder} holds no {name}: the loss's {what} can not be resumed from it.")
    return path


# ---- beside the weights ----


def save_description(model: nn.Module, processor: Any, args: Any, folder: Path) -> None:
    """Everything that `save_model` writes beside weights: configs, adapters' configs, processor, arguments. `model`:
    the bare one."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config", "generation_config"):
        if hasattr(part := getattr(model, name, None), "save_pretrained"):
            part.save_pretrained(folder)
    for name, adapter in adapters_of(model).items():
        adapter.save_pretrained(folder if name == "default" else folder / name)
    if processor is not None:
        processor.save_pretrained(folder)
    save_arguments(args, folder)


def save_arguments(args: Any, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with without_secrets(args):
        torch.save(args, folder / "training_args.bin")


def save_budget(budget: Any, folder: str) -> None:
    """Keep what the automatic chunk size measured, so that a resumed run cuts the same chunks from its first step.
    None: it is not automatic."""
    if budget is None:
        return
    with open(_at(folder, BUDGET), "w", encoding="utf-8") as file:
        json.dump(budget.state(), file)


def load_budget(budget: Any, folder: str) -> None:
    """Missing, or measured on another kind of device or for other fields: it is measured again."""
    if budget is not None and os.path.isfile(_at(folder, BUDGET)):
        with open(_at(folder, BUDGET), encoding="utf-8") as file:
            budget.resume(json.load(file))


def save_trainer_state(state: TrainerState, parts: Iterable[Any], folder: Path) -> None:
    """`parts`: callbacks, and Trainer's control, of which some have a state of their own."""
    states = state.stateful_callbacks
    for part in parts:
        if isinstance(part, ExportableState):
            name = type(part).__name__
            if isinstance(states.get(name), list):
                states[name].append(part.state())
            else:
                states[name] = part.state()
    state.save_to_json(str(folder / "trainer_state.json"))


# ---- secrets ----


@contextlib.contextmanager
def without_secrets(args: Any) -> Iterator[None]:
    """Trainer pickles its arguments beside the weights; meanwhile what is pickled of them holds no token."""
    kind = type(args)

    def reduced(given: Any) -> tuple:
        state = vars(given) | {name: None for name in SECRETS if hasattr(given, name)}
        return copyreg.__newobj__, (kind,), state

    before = copyreg.dispatch_table.get(kind)
    copyreg.pickle(kind, reduced)
    try:
        yield
    finally:
        del copyreg.dispatch_table[kind]
        if before is not None:
            copyreg.pickle(kind, before)


def _at(folder: str | Path, name: str) -> str:
    return os.path.join(folder, name)

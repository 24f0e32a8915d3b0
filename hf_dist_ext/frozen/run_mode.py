"""How frozen parts run: nothing random, nothing counted, no graph where no gradient is wanted.

(1) `train()` no longer reaches frozen modules: dropout, DropPath, BatchNorm stay in eval. Modules that ask `training`
    before they checkpoint activations keep it, and have their own drop rates set to 0 instead
(2) a fully frozen module whose inputs ask for no gradient runs without a graph. By itself it would have none, but
    activation checkpointing makes the outputs of input embeddings ask for one, and a frozen tower is then
    back-propagated for nothing
(3) everything is undone when the module trains again

The one thing to know: whether (2) holds is asked at every call, so a frozen language model behind a trained projector
keeps its graph.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn

_RATES = "_rates_before_freezing"
_HOOKS = "_no_graph_hooks"
_MODES = "_grad_modes"


def set_frozen_mode(model: nn.Module) -> None:
    """Bring every module of a bare model into the mode that its parameters' `requires_grad` ask for; call it again
    after they changed. Modules without parameters follow the module around them."""
    release(model)
    for root in fully_frozen_roots(model):
        for module in root.modules():
            _hold(module)
        if list(root.children()):  # a single operation on inputs without gradients makes no graph anyway
            _run_without_graph(root)


def fully_frozen_roots(model: nn.Module) -> list[nn.Module]:
    """The outermost modules that have parameters and train none of them; lists of modules are never called, so their
    members count."""
    parameters = list(model.parameters())
    is_frozen = parameters and not any(p.requires_grad for p in parameters)
    if is_frozen and not isinstance(model, nn.ModuleList | nn.ModuleDict):
        return [model]
    return [root for child in model.children() for root in fully_frozen_roots(child)]


# ---- (1) ----


def _stays_in_eval(self: nn.Module, mode: bool = True) -> nn.Module:
    self.training = False
    for child in self.children():
        child.train(mode)  # members that checkpoint activations follow
    return self


def _hold(module: nn.Module) -> None:
    if hasattr(module, "gradient_checkpointing"):
        numbers = {name: value for name, value in vars(module).items() if isinstance(value, float)}
        module.__dict__[_RATES] = {name: rate for name, rate in numbers.items() if "drop" in name and rate > 0}
        module.__dict__.update(dict.fromkeys(module.__dict__[_RATES], 0.0))
        return
    module.__dict__["train"] = MethodType(_stays_in_eval, module)
    module.training = False


# ---- (2) ----


def _run_without_graph(module: nn.Module) -> None:
    module.__dict__[_MODES] = []
    module.__dict__[_HOOKS] = [
        module.register_forward_pre_hook(_enter, with_kwargs=True),
        # always_call: an error inside must not leave gradients switched off for the rest of the program
        module.register_forward_hook(_leave, always_call=True),
    ]


def _enter(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    module.__dict__[_MODES].append(torch.is_grad_enabled())
    if torch.is_grad_enabled() and not asks_for_gradient((args, kwargs)):
        torch._C._set_grad_enabled(False)


def _leave(module: nn.Module, args: tuple, output: Any) -> None:
    modes = module.__dict__[_MODES]
    if modes:  # else a pre-hook before ours raised
        torch._C._set_grad_enabled(modes.pop())


def asks_for_gradient(value: Any, depth: int = 2) -> bool:
    """Whether a tensor inside (tuples, lists, mappings, and so many objects deep their attributes) has a gradient that
    somebody wants: one that only `requires_grad_()` on an output marked, as activation checkpointing does, is a leaf
    and has nobody behind it."""
    if isinstance(value, torch.Tensor):
        return value.requires_grad and (not value.is_leaf or isinstance(value, nn.Parameter))
    if isinstance(value, dict):
        return any(asks_for_gradient(one, depth) for one in value.values())
    if isinstance(value, tuple | list):
        return any(asks_for_gradient(one, depth) for one in value)
    # a dataclass, or a cache of layers with keys and values, such as the trained ones of prefix tuning
    return depth > 0 and hasattr(value, "__dict__") and asks_for_gradient(vars(value), depth - 1)


# ---- (3) ----


def release(model: nn.Module) -> None:
    """Undo it everywhere: the model of an earlier run may train in another one."""
    for module in model.modules():
        state = module.__dict__
        if isinstance(state.get("train"), MethodType) and state["train"].__func__ is _stays_in_eval:
            del state["train"]
            module.training = model.training
        for name, value in state.pop(_RATES, {}).items():
            setattr(module, name, value)
        for handle in state.pop(_HOOKS, ()):
            handle.remove()
        state.pop(_MODES, None)

"""What differs in a step under DeepSpeed: which backward is the last one, and who may take part.

(1) the engine steps inside the last backward of an update, so every other one is marked as none; the division by
    accumulation is ours, DeepSpeed's is off
(2) ZeRO-1 reduces gradients once. ZeRO-2 and 3 would scatter every chunk's as they come: "speed" keeps them whole on
    each rank until the last backward and reduces once, "memory" leaves it to them (`gradient_cache_fsdp`)
(3) an update that is not finite: a loss that is not takes the gradient with it, the reduction tells all ranks, and the
    engine skips the update by itself, as it does for an fp16 overflow
(4) the loss's own parameters are no part of the engine: they share its gradient norm and step right after it
(5) what can not be exact or can not be reached is refused

DeepSpeed keeps float32 master weights and averages over ranks, as DDP does: no factor of ours enters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from hf_dist_ext.errors import RunError, UsageError
from hf_dist_ext.strategies import collectives
from hf_dist_ext.strategies.tensors import bare_optimizer, num_elements

if TYPE_CHECKING:
    from hf_dist_ext.training.trainer import DistTrainer


def stage(trainer: DistTrainer) -> int:
    """0 without DeepSpeed."""
    return trainer.accelerator.state.deepspeed_plugin.zero_stage if trainer.is_deepspeed_enabled else 0


def is_zero3(trainer: DistTrainer) -> bool:
    """Weights are gathered when a layer runs: forwards are collectives."""
    return stage(trainer) == 3


def engine_of(trainer: DistTrainer) -> Any:
    return trainer.accelerator.deepspeed_engine_wrapped.engine


class Update:
    """The backwards of one optimizer step, of which the last takes it; made once per engine."""

    def __init__(self, trainer: DistTrainer):
        self.trainer, self.engine = trainer, engine_of(trainer)
        self.reduces_once = self.engine.zero_optimization_stage() > 1 and _mode(trainer) == "speed"
        self._together: ExitStack | None = None  # while gradients are kept whole

    def backward(self, loss: torch.Tensor, completes: bool) -> None:
        """(1), (2): `completes` runs the reduction and the optimizer's step."""
        engine = self.engine
        if self.reduces_once and self._together is None and not completes:
            self._together = ExitStack()
            self._together.enter_context(engine.coalesce_grad_reduction())
        engine.set_gradient_accumulation_boundary(completes)
        engine.backward(loss, scale_wrt_gas=False)
        if not completes:
            return
        if self._together is not None:
            together, self._together = self._together, None
            together.close()  # the one reduction
            engine.set_gradient_accumulation_boundary(True)
        with self._loss_parameters():
            engine.step()

    # ---- (4) ----

    @contextmanager
    def _loss_parameters(self) -> Iterator[None]:
        """Around the engine's step: the loss's parameters are clipped with the model's and skipped with them.

        Their group stands in the base optimizer, for its rates and its schedule, but not while ZeRO looks: it takes
        every group for one that it has cut up.
        """
        parameters = self.trainer._loss_parameters()
        if not parameters:
            yield
            return
        collectives.average_gradients(parameters)
        zero, ids = self.engine.optimizer, {id(p) for p in parameters}
        gradients = [p.grad.float() / zero.loss_scale for p in parameters]
        norm = torch.linalg.vector_norm(torch.cat([gradient.flatten() for gradient in gradients]))
        base = bare_optimizer(self.trainer.optimizer)
        groups = base.param_groups
        own = [group for group in groups if any(id(p) in ids for p in group["params"])]
        base.param_groups = [group for group in groups if not any(id(p) in ids for p in group["params"])]
        try:
            with _joint_norm(zero, norm * zero.loss_scale):
                yield
            base.param_groups = own
            if self.engine.was_step_applied():
                self._step_loss_parameters(base, parameters, gradients)
        finally:
            base.param_groups = groups
            for parameter in parameters:
                parameter.grad = None

    def _step_loss_parameters(self, optimizer: Any, parameters: list, gradients: list[torch.Tensor]) -> None:
        most, whole = self.engine.gradient_clipping(), self.engine.get_global_grad_norm()
        factor = min(1.0, most / (float(whole) + 1e-6)) if most > 0 else 1.0
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = (gradient * factor).to(parameter.dtype)
        optimizer.step()


@contextmanager
def _joint_norm(zero: Any, norm: torch.Tensor) -> Iterator[None]:
    """Meanwhile the gradient norm that ZeRO clips by, and skips by, includes `norm`.

    DeepSpeed 0.19.8 computes it inside `step` and takes no other: stages 1 and 2 in `scaled_global_norm`, stage 3 from
    `_get_norm_groups`. Both say -1 or infinity for what is not finite.
    """
    if hasattr(zero, "_get_norm_groups"):
        name, own = "_get_norm_groups", zero._get_norm_groups
        joint = lambda *given, **named: [*own(*given, **named), norm]  # noqa: E731
    else:
        name, own = "scaled_global_norm", zero.scaled_global_norm

        def joint(*given: Any, **named: Any) -> torch.Tensor:
            whole = torch.as_tensor(own(*given, **named)).to(norm)
            return torch.where(whole < 0, whole, torch.hypot(whole, norm))

    setattr(zero, name, joint)
    try:
        yield
    finally:
        delattr(zero, name)


def _mode(trainer: DistTrainer) -> str:
    """(2): gradients that stay whole are a rank's own memory."""
    if trainer.args.gradient_cache_fsdp != "auto":
        return trainer.args.gradient_cache_fsdp
    trained = (p for p in trainer.model.parameters() if p.requires_grad)
    return collectives.choose_mode(sum(num_elements(p) * p.element_size() for p in trained))


# ---- (3) ----


def poisoned(loss: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """`loss`, bit for bit, where `own` (the step's loss, detached) is finite; else its gradient is NaN."""
    return loss * (1 + 0 * own)


def norm_of_update(trainer: DistTrainer, norm: float) -> float:
    """The gradient norm, infinite when the engine skipped the update."""
    return norm if engine_of(trainer).was_step_applied() else math.inf


def check_skipped(trainer: DistTrainer) -> None:
    """RunError when the engine applied an update that is not finite: its own check is off, or another version's."""
    if engine_of(trainer).was_step_applied():
        raise RunError(
            f"step {trainer.state.global_step + 1} is not finite and DeepSpeed did not skip it. The checkpoints "
            "before it are good. Leave bf16.check_grad_overflow and zero_optimization.compute_grad_norm of its "
            "configuration as they are."
        )


# ---- (5) ----


def check(trainer: DistTrainer) -> None:
    """Raises UsageError for what does not work under DeepSpeed."""
    configuration = trainer.accelerator.state.deepspeed_plugin.hf_ds_config
    if trainer._loss_parameters() and configuration.get_value("optimizer"):
        raise UsageError(
            "learnable_temperature does not reach the optimizer that DeepSpeed's configuration names. Remove it "
            "there: Trainer then builds the one that optim names."
        )
    if trainer._loss_parameters() and configuration.is_offload():
        raise UsageError(
            "learnable_temperature does not work with DeepSpeed's offloading, whose optimizer steps on the CPU only. "
            "Use a fixed temperature, or a preset that does not offload."
        )
    if trainer._budget is not None:
        raise UsageError(
            'an automatic chunk size or number of graphs ("auto") is not measured under DeepSpeed. Give '
            "gradient_cache_chunk_size or gradient_cache_chunk_tokens, and gradient_cache_keep_graph, as numbers."
        )


def check_chunks(trainer: DistTrainer, num_kept: int, num_chunks: int) -> None:
    """ZeRO-3 counts one backward per forward: with two graphs alive at once its gradients are wrong, in silence."""
    if is_zero3(trainer) and num_chunks > 1 and num_kept:
        raise UsageError(
            "DeepSpeed ZeRO-3 needs every forward to be followed by its backward, and this step keeps several graphs: "
            "use a gradient cache (gradient_cache_chunk_size) with gradient_cache_keep_graph 0, or ZeRO-2, or "
            "multi_gpu_fsdp."
        )

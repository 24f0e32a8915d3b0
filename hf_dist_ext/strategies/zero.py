"""What differs in a step under DeepSpeed: which backward is the last one, and who may take part.

(1) the engine steps inside the last backward of an update, so every other one is marked as none; the division by
    accumulation is ours, DeepSpeed's is off
(2) ZeRO-1 reduces gradients once. ZeRO-2 and 3 would scatter every chunk's as they come: "speed" keeps them whole on
    each rank until the last backward and reduces once, "memory" leaves it to them (`gradient_cache_fsdp`)
(3) an update that is not finite, or whose passes differ: such a loss takes the gradient with it, the reduction tells
    all ranks, and the engine skips the update by itself, as it does for an fp16 overflow
(4) the loss's own parameters are no part of the engine: they share its gradient norm and step right after it
(5) what can not be exact or can not be reached is refused

DeepSpeed keeps float32 master weights and averages over ranks, as DDP does: no factor of ours enters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_dist_ext.errors import RunError, UsageError
from hf_dist_ext.strategies import collectives, zero_checkpoint
from hf_dist_ext.strategies.base import Strategy, meanwhile
from hf_dist_ext.strategies.tensors import bare_optimizer, num_elements


class ZeRO(Strategy):
    """DeepSpeed's engine, all stages."""

    can_redo = holds_gradients = False
    keeps_float32 = has_engine = True
    optimizer_file = "global_step*"
    pads_rows = "it was not compared with padded rows under DeepSpeed"
    fixed_accumulation = "DeepSpeed's accumulation is fixed when it starts"

    @classmethod
    def runs(cls, accelerator: Any) -> bool:
        return getattr(accelerator.state, "deepspeed_plugin", None) is not None

    @property
    def name(self) -> str:
        return "deepspeed"

    @property
    def plugin(self) -> Any:
        return self.accelerator.state.deepspeed_plugin

    @property
    def casts_to(self) -> str | None:
        return {"bf16": "bfloat16", "fp16": "float16"}.get(self.accelerator.mixed_precision)

    @property
    def engine(self) -> Any:
        return self.accelerator.deepspeed_engine_wrapped.engine

    @property
    def forwards_are_collective(self) -> bool:
        """Weights are gathered when a layer runs."""
        return self.plugin.zero_stage == 3

    @property
    def max_live_graphs(self) -> int | None:
        """ZeRO-3 counts one backward per forward: with two graphs alive at once its gradients are silently wrong."""
        return 1 if self.plugin.zero_stage == 3 else None

    @property
    def waits_for_all(self) -> bool:
        return self.plugin.zero_stage in (1, 2)

    # ---- a step ----

    def start(
        self, model: nn.Module, mode: str, loss_parameters: Sequence[nn.Parameter], optimizer: Any, has_towers: bool
    ) -> None:
        super().start(model, mode, loss_parameters, optimizer, has_towers)
        self.loss_parameters, self.optimizer = loss_parameters, optimizer
        if mode == "auto":  # gradients that stay whole are a rank's own memory
            trained = (p for p in model.parameters() if p.requires_grad)
            mode = collectives.choose_mode(sum(num_elements(p) * p.element_size() for p in trained))
        self.reduces_once = self.plugin.zero_stage > 1 and mode == "speed"
        self._together: ExitStack | None = None  # while gradients are kept whole

    def check_graphs(self, num_kept: int, num_chunks: int) -> None:
        if self.max_live_graphs is not None and num_chunks > 1 and num_kept:
            raise UsageError(
                "DeepSpeed ZeRO-3 needs every forward to be followed by its backward, and this step keeps several "
                "graphs: use a gradient cache (gradient_cache_chunk_size) with gradient_cache_keep_graph 0, or "
                "ZeRO-2, or multi_gpu_fsdp."
            )

    def backward(self, loss: torch.Tensor, own_loss: torch.Tensor) -> None:
        """(1), (2): the one that completes the gradients runs the reduction and the optimizer's step."""
        engine, loss = self.engine, self.mark(self.reaching_all(loss), own_loss)
        if self.reduces_once and self._together is None and not self.completes:
            self._together = ExitStack()
            self._together.enter_context(engine.coalesce_grad_reduction())
        engine.set_gradient_accumulation_boundary(self.completes)
        engine.backward(loss, scale_wrt_gas=False)
        if not self.completes:
            return
        if self._together is not None:
            together, self._together = self._together, None
            together.close()  # the one reduction
            engine.set_gradient_accumulation_boundary(True)
        with self._with_loss_parameters():
            engine.step()

    def mark(self, loss: torch.Tensor, own_loss: torch.Tensor) -> torch.Tensor:
        """(3) `loss`, bit for bit, where `own_loss` is finite; else its gradient is NaN."""
        return loss * (1 + 0 * own_loss)

    def finish_update(self, loss_parameters: Iterable[nn.Parameter]) -> None:
        """The last backward has taken the optimizer's step."""

    def clip(self, *arguments: Any) -> None:
        """The engine does it in its step."""

    def update_norm(self, norm: Any) -> Any:
        return norm if self.engine.was_step_applied() else math.inf

    def has_scaler(self, args: Any) -> bool:
        return super().has_scaler(args) or args.fp16

    def drop_update(self, optimizer: Any, step: int) -> None:
        """RunError when the engine applied the update: its own check is off, or another version's."""
        if self.engine.was_step_applied():
            raise RunError(
                f"step {step} is not finite and DeepSpeed did not skip it. The checkpoints before it are good. Leave "
                "bf16.check_grad_overflow and zero_optimization.compute_grad_norm of its configuration as they are."
            )
        super().drop_update(optimizer, step)

    # ---- (4) ----

    @contextmanager
    def _with_loss_parameters(self) -> Iterator[None]:
        """Around the engine's step: the loss's parameters are clipped with the model's and skipped with them.

        Their group stands in the base optimizer, for its rates and its schedule, but not while ZeRO looks: it takes
        every group for one that it has cut up.
        """
        parameters = self.loss_parameters
        if not parameters:
            yield
            return
        for parameter in parameters:  # of a loss of other sources
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        self.rows.average_gradients(parameters)
        zero, ids = self.engine.optimizer, {id(p) for p in parameters}
        gradients = [p.grad.float() / zero.loss_scale for p in parameters]
        norm = torch.linalg.vector_norm(torch.stack([*map(torch.linalg.vector_norm, gradients)]))
        base = bare_optimizer(self.optimizer)
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

    # ---- (5) ----

    def check(self, has_loss_parameters: bool, is_automatic: bool) -> None:
        if has_loss_parameters:
            self.check_optimizer("learnable_temperature")
        if has_loss_parameters and self.plugin.hf_ds_config.is_offload():
            raise UsageError(
                "learnable_temperature does not work with DeepSpeed's offloading, whose optimizer steps on the CPU "
                "only. Use a fixed temperature, or a preset that does not offload."
            )
        if is_automatic:
            raise UsageError(
                'an automatic chunk size or number of graphs ("auto") is not measured under DeepSpeed. Give '
                "gradient_cache_chunk_size or gradient_cache_chunk_tokens, and gradient_cache_keep_graph, as numbers."
            )

    @contextmanager
    def training(self) -> Iterator[None]:
        if self.accelerator.deepspeed_engine_wrapped is not None:
            raise UsageError(
                "this trainer's model is in a DeepSpeed engine, of an earlier train(), and transformers makes no "
                "second one. Train another DistTrainer of another model."
            )
        with super().training():
            yield

    def check_optimizer(self, field: str) -> None:
        if self.plugin.hf_ds_config.get_value("optimizer"):
            raise UsageError(
                f"{field} does not reach the optimizer that DeepSpeed's configuration names. Remove it there: Trainer "
                "then builds the one that optim names."
            )

    # ---- checkpoints ----

    def read_as(self, is_part: bool, trusts: bool, around: Callable[[], AbstractContextManager]) -> None:
        if self.accelerator.deepspeed_engine_wrapped is not None:
            zero_checkpoint.attach(self.engine, is_part, trusts, around)

    def save_optimizer(self, *arguments: Any) -> bool:
        return False

    def whole_weights(self, model: nn.Module, keep: bool) -> dict[str, torch.Tensor]:
        """Of the engine, which alone can gather them; before there is one the model is whole."""
        if self.accelerator.deepspeed_engine_wrapped is None:
            return model.state_dict()
        return self.accelerator.get_state_dict(self.engine)

    def save_engine(self, folder: Path) -> None:
        """What trains stands in `trainable.safetensors` too, as in every mode."""
        self.engine.save_checkpoint(str(folder), exclude_frozen_parameters=True)

    def check_resumable(self, folder: Path, content: Mapping[str, Any], world_size: int) -> None:
        before = content.get("world_size", world_size)
        if before != world_size:
            raise UsageError(
                f"{folder} is of {before} processes, this run of {world_size}: ZeRO's parts fit the number they were "
                "made for. resume_weights_only=true takes the weights."
            )
        if content.get("sharding", "deepspeed") != "deepspeed" or not list(folder.glob("global_step*")):
            raise UsageError(
                f"{folder} was not written under DeepSpeed, which can not continue it. resume_weights_only=true takes "
                "its weights."
            )
        super().check_resumable(folder, content, world_size)


def _joint_norm(zero: Any, norm: torch.Tensor) -> AbstractContextManager:
    """Meanwhile the gradient norm that ZeRO clips by, and skips by, includes `norm`.

    DeepSpeed 0.19.8 computes it inside `step` and takes no other: stages 1 and 2 in `scaled_global_norm`, stage 3 from
    `_get_norm_groups`. Both say -1 or infinity for what is not finite.
    """
    has_groups = hasattr(zero, "_get_norm_groups")
    name = "_get_norm_groups" if has_groups else "scaled_global_norm"
    of_model = getattr(zero, name)

    def joint(*given: Any, **named: Any) -> Any:
        if has_groups:
            return [*of_model(*given, **named), norm]
        whole = torch.as_tensor(of_model(*given, **named)).to(norm)
        return torch.where(whole < 0, whole, torch.hypot(whole, norm))

    return meanwhile(zero, **{name: joint})

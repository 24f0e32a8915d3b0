"""Evaluation that also generates: held-out questions go through `generate` on every rank, answers are compared.

It runs in Trainer's own evaluation loop, so rows are shared out, gathered and counted once as everywhere else, and the
model is whatever the run has wrapped. Letters: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn

from hf_dist_ext.data.image_text_collator import IGNORED
from hf_dist_ext.strategies.base import meanwhile
from hf_dist_ext.training.trainer import DistTrainer


class GeneratingTrainer(DistTrainer):
    """`DistTrainer` whose evaluation batches come from `eval_collator` and may hold a `prompt` to generate from.

    Predictions are then the new tokens (B, T), labels the answers' tokens; see `answer_accuracy`.
    """

    def __init__(self, *arguments: Any, eval_collator: Callable, max_new_tokens: int | None = None, **options: Any):
        self.eval_collator, self.max_new_tokens = eval_collator, max_new_tokens
        super().__init__(*arguments, **options)

    def _take_model(self) -> None:
        super()._take_model()
        if self.freeze_plan is None:  # with one it is there already
            self.image_stand_in = self.make_image_stand_in()

    def evaluate(self, *arguments: Any, **options: Any) -> dict[str, float]:
        with meanwhile(self, data_collator=self.eval_collator):
            return super().evaluate(*arguments, **options)

    @torch.no_grad()
    def prediction_step(
        self, model: nn.Module, inputs: Mapping[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ):
        inputs = dict(inputs)
        answers, prompt = inputs.pop("answers"), inputs.pop("prompt", None)
        loss, _, _ = super().prediction_step(model, inputs, True, ignore_keys)
        if self.max_new_tokens is None:
            return loss, None, None
        new = self._generate(model, self._prepare_inputs(prompt))
        return loss, new, answers.to(new.device)

    def _generate(self, model: nn.Module, prompt: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The tokens (B, T) that follow the prompts."""
        served = nullcontext() if self.image_stand_in is None else self.image_stand_in.generating(prompt)
        with self.compute_loss_context_manager(), served:
            tokens = self.accelerator.unwrap_model(model).generate(
                **prompt,
                max_new_tokens=self.max_new_tokens,
                do_sample=False,
                synced_gpus=self.strategy.forwards_are_collective,  # ranks go on until the last answer is whole
            )
        return tokens[:, prompt["input_ids"].shape[1] :]


def answer_accuracy(tokenizer: Any) -> Callable[[Any], dict[str, float]]:
    """`compute_metrics`: the share of generated answers that are, as text, exactly the reference."""

    def compute(prediction: Any) -> dict[str, float]:
        texts = []
        for tokens in (prediction.predictions, prediction.label_ids):
            tokens = np.where(tokens == IGNORED, tokenizer.pad_token_id, tokens)
            texts.append([text.strip() for text in tokenizer.batch_decode(tokens, skip_special_tokens=True)])
        matches = [generated == reference for generated, reference in zip(*texts, strict=True)]
        return {"answer_accuracy": sum(matches) / len(matches)}

    return compute

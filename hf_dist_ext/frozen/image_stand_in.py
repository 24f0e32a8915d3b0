"""Batches without images: the image part of a vision-language model runs all the same, on a blank picture.

A rank whose rows hold no image skips the image encoder and the projector. Under FSDP the other ranks then wait for its
collectives, DDP waits for the projector's gradients, and on one process a text batch in projector-only training has
no gradient at all. So

(1) the image encoder notes that it ran
(2) the language model, before it runs, finds that it did not, sends a blank picture through encoder and projector and
    adds 0 times the result to its input embeddings: collectives and gradients take their usual place and order
(3) a projector's bare parameters (a newline embedding) join in the same way

With gradients off it happens only where a forward is a collective. Generation is served at its first step, or before
it (`generating`); later steps run the language model alone on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hf_dist_ext.frozen.groups import module_groups
from hf_dist_ext.strategies.base import meanwhile

# What an encoder records and no model goes on from. A gradient through these would make the backward pass modules in
# another order than rows with images do, and ZeRO-3 compares orders.
ENCODER_OUTPUTS = {"last_hidden_state", "hidden_states", "attentions"}


class ImageStandIn:
    """Installs itself on a bare model with groups `vision` and `language`; `blank` are one blank picture's features as
    the model's `get_image_features` takes them. `is_collective()`: whether a forward gathers shards (FSDP)."""

    def __init__(self, model: nn.Module, blank: Mapping[str, torch.Tensor], is_collective: Callable[[], bool]):
        groups = module_groups(model)
        self.model, self.blank, self.is_collective = model, dict(blank), is_collective
        self.vision = vision = model.get_submodule(groups["vision"].roots[0])
        language = model.get_submodule(groups["language"].roots[0])
        self.bare = [root for root in groups["projector"].roots if root in dict(model.named_parameters())]
        self.before: Callable[[], None] = lambda: None  # called before the blank picture goes through
        self._place: tuple[torch.device, torch.dtype] | None = None
        self._there: dict[str, torch.Tensor] = {}
        self._has_run = self._is_standing_in = self._is_encoded_before = False
        model.register_forward_pre_hook(self._begin)
        vision.register_forward_pre_hook(self._note)  # (1)
        # (2) prepended: run_mode.py's hook on a frozen language model then sees the gradient that is asked for
        language.register_forward_pre_hook(self._fill_in, with_kwargs=True, prepend=True)

    def _placed(self, device: torch.device) -> dict[str, torch.Tensor]:
        """The blank picture where the model runs. It is moved once, as a copy from the CPU waits for a GPU's queue."""
        dtype = next(self.vision.parameters()).dtype
        if self._place != (device, dtype):
            self._place = device, dtype
            self._there = {k: v.to(device, dtype if v.is_floating_point() else v.dtype) for k, v in self.blank.items()}
        return self._there

    def _begin(self, module: nn.Module, args: tuple) -> None:
        self._has_run = False  # the encoder may have been called by itself before

    def _note(self, module: nn.Module, args: tuple) -> None:
        self._has_run = not self._is_standing_in

    def _fill_in(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        had_images, self._has_run = self._has_run, False
        embeds, cache = kwargs.get("inputs_embeds"), kwargs.get("past_key_values")
        is_later_step = cache is not None and cache.get_seq_length() > 0
        is_served = had_images or self._is_encoded_before or embeds is None or is_later_step
        if is_served or not (torch.is_grad_enabled() or self.is_collective()):
            return None
        output = self._encode_blank(embeds.device)
        if isinstance(output, Mapping) and "pooler_output" in output:  # what the projector made of the picture
            output = {key: value for key, value in output.items() if key not in ENCODER_OUTPUTS}
        leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        terms = [leaf.sum() for leaf in leaves if leaf.requires_grad]
        parameters = dict(self.model.named_parameters())
        terms += [parameters[name].sum() for name in self.bare if parameters[name].requires_grad]  # (3)
        if not terms:
            return None
        zero = 0.0 * torch.stack([term.float() for term in terms]).sum()
        return args, {**kwargs, "inputs_embeds": embeds + zero.to(embeds.dtype)}

    def _encode_blank(self, device: torch.device) -> Any:
        with meanwhile(self, _is_standing_in=True):
            self.before()
            return self.model.get_image_features(**self._placed(device))

    @contextmanager
    def generating(self, prompt: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Around `generate`. transformers 5.23 encodes a prompt's images before the first forward, so where forwards
        are collectives a prompt without images has its blank picture encoded there as well."""
        encodes_before = getattr(self.model, "_supports_mm_encoder_outputs", lambda: False)()
        if not (encodes_before and self.is_collective()):
            yield
            return
        if not any(key in prompt for key in self.blank):
            self._encode_blank(prompt["input_ids"].device)
        with meanwhile(self, _is_encoded_before=True):
            yield

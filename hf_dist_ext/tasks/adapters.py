"""LoRA from the run file, through peft: `use_lora` and its fields -> the model with adapters, its base frozen.

(1) where adapters go: the modules that are named (peft's meaning: names or suffixes, "all-linear", or a regex), or
    peft's own choice for the architecture; in a vision-language model inside the language model only
(2) the base may be kept in 4 bits, which bitsandbytes does
(3) peft freezes the base. `trainable_modules` may name parts of it that train whole beside the adapters, such as the
    projector; then a checkpoint holds both, and `hf-dist merge` makes one model of them
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hf_dist_ext import launched
from hf_dist_ext.errors import UsageError
from hf_dist_ext.frozen.groups import module_groups
from hf_dist_ext.models.adapters import keep_wide
from hf_dist_ext.models.backbones import one_line
from hf_dist_ext.run.config import Run, RunConfig
from hf_dist_ext.strategies import choose


def add_adapters(model: nn.Module, config: RunConfig) -> nn.Module:
    """A model of transformers, wrapped by peft; the model itself when the run wants none."""
    if not config.use_lora:
        return model
    from peft import get_peft_model

    with _errors(config):
        return get_peft_model(model, _options(model, config))


def adapt(model: Any, config: RunConfig) -> None:
    """The same inside a SentenceTransformer, whose folder then holds adapters in the place of its backbone's weights.
    Nothing beside them trains, but for what `trainable_modules` names."""
    if not config.use_lora:
        return
    if (backbone := model.transformers_model) is None:
        raise UsageError(f"use_lora: {type(model).__name__} has no model of transformers. Remove use_lora.")
    model.requires_grad_(False)
    with _errors(config):
        backbone.add_adapter(_options(backbone, config))
    keep_wide(backbone)


@contextmanager
def _errors(config: RunConfig) -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError) as error:
        raise UsageError(f"lora_target_modules={config.lora_target_modules!r}: {one_line(error)}") from error


def _options(model: nn.Module, config: RunConfig) -> Any:
    from peft import LoraConfig

    if config.load_in_4bit:
        _keep_unpacked(model)
    targets = config.lora_target_modules if config.lora_target_modules is not None else _usual_targets(model)
    return LoraConfig(
        r=config.lora_r, lora_alpha=config.lora_alpha, lora_dropout=config.lora_dropout, target_modules=targets
    )


def _keep_unpacked(model: nn.Module) -> None:
    """On CPUs with AVX512-BF16, bitsandbytes 0.50 packs weights at the first evaluation for a product that has no
    gradient. Training would go on with it and leave most adapters as they are. Remove when its product has one."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def quantization_of(run: Run, args: Any) -> Any:
    """transformers' BitsAndBytesConfig for `load_in_4bit` (NF4, its scales quantized too, https://arxiv.org/abs/2305.14314,
    section 3), or None. Everything that can not be is refused here, before a weight is read."""
    config = run.options
    if not config.load_in_4bit:
        return None
    wrong = {
        "model_config": config.model_config is not None,
        "stages": bool(run.name),
        "save_full_model": args.save_full_model,
        "trainable_modules": args.trainable_modules is not None,
        "frozen_modules": args.frozen_modules is not None,
        "FSDP": launched.uses_fsdp(),
        "DeepSpeed": launched.uses_deepspeed(),
        "a mesh of processes": launched.uses_mesh() or choose.in_stages(args) is not None,
    }
    if given := [name for name, is_given in wrong.items() if is_given]:
        raise UsageError(
            f"load_in_4bit does not go with {given[0]}: the base stays whole in every process, as a folder or the hub "
            "holds it, and the run ends with its adapters. Use one process or multi_gpu_ddp."
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UsageError("load_in_4bit needs bitsandbytes, which is not installed: pip install bitsandbytes.")
    from transformers import BitsAndBytesConfig

    compute = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute,
    )


def _usual_targets(model: nn.Module) -> list[str]:
    """Full names, so that the image encoder's layers of the same name stay as they are."""
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as USUAL

    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    wanted = USUAL.get(getattr(text, "model_type", ""), ["q_proj", "v_proj"])
    groups = module_groups(model)
    roots = groups["language"].roots if "language" in groups else ("",)
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    below = [name for name in linear if any(root == "" or name.startswith(f"{root}.") for root in roots)]
    targets = [name for name in below if name.rpartition(".")[2] in wanted]
    if not targets:
        raise UsageError(
            f"use_lora: {type(model).__name__} has no layer called {' or '.join(wanted)}. Name some in "
            f'lora_target_modules, or "all-linear". Its last ones: {", ".join(linear[-3:])}.'
        )
    return targets

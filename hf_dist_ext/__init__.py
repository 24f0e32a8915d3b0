"""Exact full-batch contrastive training for the Hugging Face Trainer, from one process to DDP and FSDP.

Names are loaded on first use: `import hf_dist_ext` costs nothing, `hf_dist_ext.InfoNCELoss` needs torch only,
`hf_dist_ext.DistTrainer` needs transformers.
"""

import importlib

__version__ = "0.1.0"

_HOMES = {
    "DistTrainer": "trainer",
    "DistTrainingArguments": "training_args",
    "EmbeddingModel": "modeling",
    "InfoNCELoss": "losses",
    "UsageError": "errors",
}
__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)

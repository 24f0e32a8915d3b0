"""Exact full-batch contrastive training for the Hugging Face Trainer, from one process to DDP and FSDP.

Names are loaded on first use: `import hf_dist_ext` costs nothing, `hf_dist_ext.InfoNCELoss` needs torch only,
`hf_dist_ext.DistTrainer` needs transformers.
"""

from hf_dist_ext.lazy import handed_on

__version__ = "0.1.0"

_HOMES = {
    "DistTrainer": "training.trainer",
    "DistTrainingArguments": "training.arguments",
    "EmbeddingModel": "models.embedding_model",
    "InfoNCELoss": "engine.losses",
    "RunError": "errors",
    "SentenceTransformersLoss": "tasks.sentence_losses",
    "SigmoidLoss": "engine.sigmoid_loss",
    "TowerModel": "models.towers",
    "UsageError": "errors",
    "load_causal_lm": "models.causal_lm",
}
__all__ = [*_HOMES, "__version__"]


__getattr__ = handed_on(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)

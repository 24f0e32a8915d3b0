"""Exact full-batch contrastive training for the Hugging Face Trainer, from one process to DDP and FSDP.

Names are loaded on first use: `import hf_dist_ext` costs nothing, `hf_dist_ext.InfoNCELoss` needs torch only,
`hf_dist_ext.DistTrainer` needs transformers.
"""

from typing import TYPE_CHECKING

from hf_dist_ext.lazy import handed_on

if TYPE_CHECKING:  # what an editor completes and a type checker reads
    from hf_dist_ext.engine.losses import InfoNCELoss as InfoNCELoss
    from hf_dist_ext.engine.sigmoid_loss import SigmoidLoss as SigmoidLoss
    from hf_dist_ext.errors import RunError as RunError
    from hf_dist_ext.errors import UsageError as UsageError
    from hf_dist_ext.models.embedder import set_is_causal as set_is_causal
    from hf_dist_ext.training.arguments import DistTrainingArguments as DistTrainingArguments
    from hf_dist_ext.training.sentence_losses import SentenceTransformersLoss as SentenceTransformersLoss
    from hf_dist_ext.training.trainer import DistTrainer as DistTrainer

__version__ = "0.3.0"

_HOMES = {
    "DistTrainer": "training.trainer",
    "DistTrainingArguments": "training.arguments",
    "InfoNCELoss": "engine.losses",
    "RunError": "errors",
    "SentenceTransformersLoss": "training.sentence_losses",
    "SigmoidLoss": "engine.sigmoid_loss",
    "UsageError": "errors",
    "set_is_causal": "models.embedder",
}
__all__ = [*_HOMES, "__version__"]


__getattr__ = handed_on(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)

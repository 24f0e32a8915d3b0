"""The loss that a run file names, made for the run's model: one, several added up, or one per dataset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from hf_dist_ext.engine.combined_losses import LossPerSource, SumOfLosses
from hf_dist_ext.engine.late_interaction import LateInteractionLoss
from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.engine.sigmoid_loss import SigmoidLoss
from hf_dist_ext.errors import UsageError
from hf_dist_ext.run.config import RunConfig
from hf_dist_ext.run.losses import INFONCE_FIELDS, LATE, MATRYOSHKA, cuts_dimensions
from hf_dist_ext.run.parts import parts_of
from hf_dist_ext.run.sources import sources_of
from hf_dist_ext.training.sentence_losses import SentenceTransformersLoss

# Those of this project with options of their own.
OWN = {
    "siglip": (SigmoidLoss, ("scale", "bias", "learnable", "mask_false_negatives")),
    LATE: (LateInteractionLoss, ("temperature", "mask_false_negatives", "queries_per_tile", "documents_per_tile")),
}


def build_loss(
    config: RunConfig,
    embedding_dim: int,
    tokenizer: Any,
    max_length: int | Mapping[str, int] | None,
    normalize: bool | None,
) -> nn.Module:
    """`max_length`: of the collator, for all columns or each. `normalize`: of a loss
    of this project.

    Raises:
        UsageError: options that the loss does not take, a package that it needs.
    """
    more = (embedding_dim, tokenizer, max_length, normalize)
    sources = {source.name: source for source in sources_of(config)}
    if own := {name: source.config for name, source in sources.items() if source.has_own_loss}:
        made = {name: _sum_of_parts(of_source, *more) for name, of_source in own.items()}
        return LossPerSource(made, None if len(own) == len(sources) else _sum_of_parts(config, *more))
    return _sum_of_parts(config, *more)


def _sum_of_parts(config: RunConfig, *more: Any) -> nn.Module:
    parts = parts_of(config)
    made = {part.name: _build(part.config, *more) for part in parts}
    if config.losses is None:
        return made[parts[0].name]
    return SumOfLosses(made, {part.name: part.weight for part in parts})


def _build(
    config: RunConfig,
    embedding_dim: int,
    tokenizer: Any,
    max_length: int | Mapping[str, int] | None,
    normalize: bool | None,
) -> nn.Module:
    if config.loss == "infonce":
        return InfoNCELoss(**{name: getattr(config, name) for name in INFONCE_FIELDS}, normalize=normalize)
    options = config.loss_options or {}
    if config.loss in OWN:
        kind, known = OWN[config.loss]
        if useless := sorted({*options} - {*known}):
            raise UsageError(f"loss_options: {config.loss} has no option {useless[0]}. It has {', '.join(known)}.")
        return kind(**options, normalize=normalize)
    lengths = max_length.values() if isinstance(max_length, Mapping) else [max_length]
    longest = max(filter(None, lengths), default=getattr(tokenizer, "model_max_length", None))
    name = config.loss
    if cuts_dimensions(config):
        name, options = MATRYOSHKA, {"loss": name, "loss_options": options, "matryoshka_dims": config.matryoshka_dims}
        options["matryoshka_weights"] = config.matryoshka_weights
    return SentenceTransformersLoss(name, embedding_dim, tokenizer=tokenizer, max_length=longest, **options)

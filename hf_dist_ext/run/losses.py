"""The losses that a run file may name: what each reads of a row beside its texts, and which are refused and why.

The names in OWN are this project's (engine/losses.py, sigmoid_loss.py, late_interaction.py). Every other
name ends with "Loss" and is a class of sentence-transformers, which training/sentence_losses.py runs on
embeddings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from hf_dist_ext.errors import UsageError, closest
from hf_dist_ext.policy import TOKENS
from hf_dist_ext.run.fields import show

if TYPE_CHECKING:
    from hf_dist_ext.run.config import RunConfig

LATE = "late_interaction"
OWN = ("infonce", "siglip", LATE)
INFONCE_FIELDS = (
    "temperature", "learnable_temperature", "symmetric", "matryoshka_dims", "matryoshka_weights",
    "mask_false_negatives", "false_negative_margin", "cross_device_negatives", "in_batch_negatives",
)  # fmt: skip
MATRYOSHKA = "MatryoshkaLoss"  # the loss around another one

NOT_IN_MATRYOSHKA = ("SoftmaxLoss", "GlobalOrthogonalRegularizationLoss")

# Which read one column of texts with a class each.
GROUPS = (
    "BatchAllTripletLoss", "BatchHardTripletLoss", "BatchHardSoftMarginTripletLoss", "BatchSemiHardTripletLoss",
)  # fmt: skip
# What a label is, by the loss that cannot do without.
LABELS = {
    "CoSENTLoss": "a number per row, higher where the pair is nearer",
    "AnglELoss": "a number per row, higher where the pair is nearer",
    "CosineSimilarityLoss": "the cosine that the pair should have",
    "ContrastiveLoss": "1 for a pair that belongs together, 0 for one that does not",
    "OnlineContrastiveLoss": "1 for a pair that belongs together, 0 for one that does not",
    "SoftmaxLoss": "the number of the pair's class",
    "MarginMSELoss": "the teacher's margin per negative, or its scores of the positive and every negative",
    "DistillKLDivLoss": "the teacher's scores of the positive and every negative",
    "EmbedDistillLoss": "the teacher's embedding, one for all columns or one per column",
    "MSELoss": "the teacher's embedding, one for all columns or one per column",
    **dict.fromkeys(GROUPS, "the number of the text's class"),
}
NO_COSINES = {"SoftmaxLoss", "MSELoss"}  # nor has one a distance that would say so
CLASSES = {"SoftmaxLoss"}  # whose label is a number of a class, not a measure
MAY_LACK_LABEL = {"AnglELoss"}  # with negatives the positive is the nearer one
RATED_PAIRS = {"CoSENTLoss", "AnglELoss", "CosineSimilarityLoss", "ContrastiveLoss", "OnlineContrastiveLoss"}
# Which read a query and its positive, and no further column.
PAIRS = {
    "CoSENTLoss", "CosineSimilarityLoss", "ContrastiveLoss", "OnlineContrastiveLoss", "SoftmaxLoss",
    "MegaBatchMarginLoss",
}  # fmt: skip
WITHOUT_LABEL = {
    "MultipleNegativesRankingLoss", "MultipleNegativesSymmetricRankingLoss", "TripletLoss", "GISTEmbedLoss",
    "MegaBatchMarginLoss", "GlobalOrthogonalRegularizationLoss",
}  # fmt: skip
PAIRS_ALONE = {"ContrastiveLoss", "SoftmaxLoss", "MegaBatchMarginLoss"}  # sentence-transformers ends at a third column
# Those that compare all pairs of the global batch at once.
ALL_PAIRS = {
    "MultipleNegativesRankingLoss", "MultipleNegativesSymmetricRankingLoss", "GISTEmbedLoss", "MegaBatchMarginLoss",
    "GlobalOrthogonalRegularizationLoss", *GROUPS,
}  # fmt: skip
LABEL_COLUMNS = ("label", "labels", "score", "scores")  # as sentence-transformers calls them

_OWN_CACHE = "it brings a gradient cache of its own, and this trainer's is outside of the loss. Use {} with "
_OWN_CACHE += "gradient_cache_chunk_size"
_LAYERS = "it runs the model's layers itself, and here a loss sees embeddings only. Use MatryoshkaLoss for dimensions"
_COPY = "it trains a second copy of the model, and here a loss sees embeddings only. Use an unsupervised pair dataset"
_COPY += " with MultipleNegativesRankingLoss"
_GROUPS = "it reads one column of texts with a class each, and a row here has a query and a positive. Make pairs of "
_GROUPS += "one class, and use MultipleNegativesRankingLoss, or infonce with id_column"
SEES_MODEL = {
    "AdaptiveLayerLoss": _LAYERS,
    "Matryoshka2dLoss": _LAYERS,
    "ContrastiveTensionLoss": _COPY,
    "ContrastiveTensionLossInBatchNegatives": _COPY,
    "DenoisingAutoEncoderLoss": "it trains a decoder on the model's tokens, and here a loss sees embeddings only. "
    "Use MultipleNegativesRankingLoss on pairs",
}
# By a run file, whose rows have a query and a positive, and whose chunks are fields of its own.
REFUSED = {
    **SEES_MODEL,
    "CachedMultipleNegativesRankingLoss": _OWN_CACHE.format("MultipleNegativesRankingLoss"),
    "CachedMultipleNegativesSymmetricRankingLoss": _OWN_CACHE.format("MultipleNegativesSymmetricRankingLoss"),
    "CachedGISTEmbedLoss": _OWN_CACHE.format("GISTEmbedLoss"),
    **dict.fromkeys(GROUPS, _GROUPS),
    "sparse": "it reads a weight of each term, and a model here gives one vector per row or per token. Train a "
    f'SparseEncoder with the trainer of sentence-transformers, or take "{LATE}" for a vector per token',
}


def check_loss(config: RunConfig, given: Mapping[str, Any], of_infonce: Iterable[str]) -> None:
    """UsageError for a name that is no loss, one that is refused, and fields that the loss does not read.

    of_infonce: the fields that InfoNCE alone reads.
    """
    name, options = config.loss, config.loss_options or {}
    if config.pooling == TOKENS and name != LATE:
        raise UsageError(
            f'pooling="{TOKENS}" leaves a vector of every token, which loss={show(name)} does not read. Set '
            f'"loss": "{LATE}", or choose another pooling.'
        )
    if name is None:
        return
    if name == LATE and given.get("pooling", TOKENS) != TOKENS:
        raise UsageError(
            f'pooling={show(given["pooling"])} makes one vector of a row, and loss="{LATE}" reads a vector of every '
            f'token. Remove pooling, or set "pooling": "{TOKENS}".'
        )
    _check_name(name, "loss")
    if name == "infonce" and options:
        raise UsageError(
            f"loss_options={show(options)}: the options of infonce are fields of the run file themselves "
            "(temperature, symmetric, ...). Set those, and remove loss_options."
        )
    useless = [one for one in of_infonce if given.get(one) is not None]
    if name != "infonce" and useless:
        remedy = f"Its options stand in loss_options. Remove {useless[0]}."
        if useless[0] == "matryoshka_dims" and name not in OWN:
            remedy = (
                f'Write "loss": "{MATRYOSHKA}", "loss_options": {{"loss": {show(name)}, "matryoshka_dims": [...]}}.'
            )
        raise UsageError(
            f"{useless[0]}={show(given[useless[0]])} is an option of infonce, and loss is {show(name)}. {remedy}"
        )
    if name == MATRYOSHKA:
        inner = options.get("loss")
        if not isinstance(inner, str) or inner in OWN or inner == MATRYOSHKA:
            raise UsageError(
                f"{MATRYOSHKA} is around a loss of sentence-transformers, and loss_options.loss is {show(inner)}. "
                'Write "loss_options": {"loss": "CoSENTLoss", "matryoshka_dims": [...]}; infonce has matryoshka_dims '
                "of its own."
            )
        _check_name(inner, "loss_options.loss")
        if inner in NOT_IN_MATRYOSHKA or (options.get("loss_options") or {}).get("projection_dim"):
            raise UsageError(
                f"{MATRYOSHKA} can not be around {inner} with a layer of one width, or parts of its own: embeddings "
                "are cut to each of matryoshka_dims. Train it without."
            )
    if config.label_column and not reads_label(name, options):
        raise UsageError(
            f"label_column={show(config.label_column)}: {innermost(name, options)} reads no label. Remove it."
        )


def _check_name(name: str, field: str) -> None:
    if name in REFUSED:
        raise UsageError(f"{field}={show(name)} can not be trained here: {REFUSED[name]}.")
    if name not in OWN and not name.endswith("Loss"):
        hint = closest(name, [*OWN, *LABELS, *WITHOUT_LABEL, MATRYOSHKA])
        raise UsageError(
            f"{field}={show(name)} is no loss. There are {', '.join(OWN)} and none, and the losses of "
            f"sentence-transformers by their class, such as CoSENTLoss.{hint}"
        )


def cuts_dimensions(config: RunConfig) -> bool:
    """Whether `matryoshka_dims` of the file holds for this loss too, as one among several: MatryoshkaLoss around it.
    UsageError where it can not."""
    name, options = config.loss, config.loss_options or {}
    if not config.matryoshka_dims or name in (None, "", "infonce", LATE, MATRYOSHKA):
        return False
    if name == "siglip" or name in NOT_IN_MATRYOSHKA or options.get("projection_dim"):
        raise UsageError(
            f"matryoshka_dims={show(config.matryoshka_dims)} holds for every loss over one vector, and {name} reads "
            'whole ones. Set "matryoshka_dims": null beside it.'
        )
    return True


def innermost(name: str, options: Mapping[str, Any] | None) -> str:
    """The loss inside of MatryoshkaLoss, or the loss itself."""
    return (options or {}).get("loss", name) if name == MATRYOSHKA else name


def reads_label(name: str | None, options: Mapping[str, Any] | None) -> bool:
    """Whether the loss reads a label; one that this file does not know may."""
    return name is not None and name not in OWN and innermost(name, options) not in WITHOUT_LABEL


def reads_pairs(name: str | None, options: Mapping[str, Any] | None) -> bool:
    """Whether it reads a query and its positive, and no further column."""
    return name is not None and innermost(name, options) in PAIRS


def compares_all_pairs(name: str | None, options: Mapping[str, Any] | None) -> bool:
    """Whether it holds the scores of all pairs of the global batch at once."""
    return name is not None and innermost(name, options) in ALL_PAIRS


def label_column(config: RunConfig, available: Iterable[str]) -> str | None:
    """The column of labels among a dataset's, None where the loss reads none. Of several losses see run/parts.py.

    Raises:
        UsageError: there is none, and the loss cannot do without.
    """
    if not reads_label(config.loss, config.loss_options):
        return None
    if config.label_column:
        return config.label_column
    taken, available = embedded_columns(config), list(available)
    found = next((name for name in LABEL_COLUMNS if name in available and name not in taken), None)
    name = innermost(config.loss, config.loss_options)
    if found is None and name in LABELS and name not in MAY_LACK_LABEL:
        raise UsageError(
            f"{name} needs a label of every row ({LABELS[name]}), and the dataset has no column called "
            f"{' or '.join(LABEL_COLUMNS)}: it has {', '.join(available)}. Name it in label_column."
        )
    return found


def names_in(source: Any) -> list[str]:
    """The dataset's columns that a column of the run is made of: one, a list or an object of several."""
    return [source] if isinstance(source, str) else list(source.values() if isinstance(source, Mapping) else source)


def embedded_columns(config: RunConfig) -> set[str]:
    """Those of the dataset."""
    return {one for source in (config.columns or {}).values() for one in names_in(source)}

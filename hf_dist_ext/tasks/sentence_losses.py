"""`SentenceTransformersLoss`: a loss of sentence-transformers, computed from embeddings instead of a model and texts.

(1) the loss is made with a stand-in for its model, which hands on embeddings that are there already
(2) a column with K negatives per row becomes K columns, since those losses take one row of every column per anchor
(3) the loss is called as its trainer calls it: with features per column, which hold nothing but embeddings, and labels

Every process computes the loss of the global batch from all processes' rows, so losses that compare all pairs mean on
several processes what they mean on one, and their normalisation is that of the global batch. The price is a
computation per process of what InfoNCE (engine/losses.py) shares and cuts into tiles.

Letters: B own rows, N all processes' rows, K negatives per row, D embedding, G the guide's embedding.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import re
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hf_dist_ext.data.collator import NUM_PAIR_COLUMNS
from hf_dist_ext.engine.chunks import Chunk
from hf_dist_ext.engine.gradient_cache import encode_without_graph
from hf_dist_ext.engine.layout import lay_out
from hf_dist_ext.engine.limits import ChunkLimits
from hf_dist_ext.engine.losses import LossOutput
from hf_dist_ext.errors import UsageError
from hf_dist_ext.run.losses import (
    ALL_PAIRS,
    CLASSES,
    LABELS,
    MATRYOSHKA,
    MAY_LACK_LABEL,
    NO_COSINES,
    PAIRS,
    RATED_PAIRS,
    REFUSED,
)

OF_SHAPES = ("must match the size", "cannot be multiplied")  # what torch says of a teacher of another width
GUIDE_ROWS = 32  # that a guide encodes at once, unless told otherwise
GUIDE_WIDTH = 64  # of longer rows fewer: a chunk has few that are much shorter than its longest, and little padding


class SentenceTransformersLoss(nn.Module):
    """A loss of `sentence_transformers.sentence_transformer.losses` over columns of embeddings.

    The columns are what the loss calls its inputs: anchor, positive, negatives. A label travels with the batch as
    `targets["label"]` (see `ContrastiveCollator`), and means what it means to the loss.

    Args:
        name: the class or its name, such as "CoSENTLoss".
        embedding_dim: D of the model.
        tokenizer: the model's, for losses with a guide.
        max_length: the model's, for losses with a guide.
        options: what the class takes. Functions and distances may be given by name ("pairwise_dot_score", "COSINE"),
            and `guide` as a folder or hub id; `guide_batch_size` (32) rows go through it at once, and of rows above
            64 tokens as many tokens as such rows have. MatryoshkaLoss takes `loss`, a name, with `loss_options`.

    Raises:
        UsageError: sentence-transformers is missing, has no such loss, or refuses the options; the loss must see the
            model itself.
    """

    def __init__(
        self,
        name: str | type[nn.Module],
        embedding_dim: int,
        tokenizer: Any = None,
        max_length: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.stand_in = _StandIn("sentence", embedding_dim, tokenizer, max_length)
        self._guide_rows = options.pop("guide_batch_size", GUIDE_ROWS)
        self.loss = self._made(name, options)
        self.name = type(self.innermost).__name__
        self._guides: list[_Guide] = []  # a list keeps the guide's weights from being parameters of this loss
        if hasattr(self.innermost, "guide"):
            self._guides.append(_Guide(self.innermost, tokenizer, self._guide_rows))
            self.innermost.guide = _StandIn("guide", embedding_dim, tokenizer, max_length)
            self.innermost.must_retokenize = False  # the features hold the guide's embeddings, whoever made them
            self.innermost.similarity_fct = _Cosines()
            self.targets_of = self._guides[0].embed

    @property
    def innermost(self) -> nn.Module:
        """The loss itself, inside of MatryoshkaLoss too. No attribute: its parameters would be saved twice."""
        return self.loss.loss if type(self.loss).__name__ == MATRYOSHKA else self.loss

    @property
    def normalize(self) -> bool:
        """Whether it compares cosines, so that an evaluation does."""
        compares = getattr(self.innermost, "similarity_fct", getattr(self.innermost, "distance_metric", None))
        name = compares if isinstance(compares, str) else _name_of(compares)
        return compares is None or any(word in name.lower() for word in ("cos", "angle"))

    @property
    def reads_lengths(self) -> bool:
        """Whether embeddings of length 1 have another loss, as it compares no cosines."""
        return self.name in NO_COSINES or not self.normalize

    @property
    def compares_all_pairs(self) -> bool:
        """Whether it holds the scores of all pairs of the global batch at once."""
        return self.name in ALL_PAIRS

    @property
    def rates_pairs(self) -> bool:
        """Whether labels say how near a pair is, so that an evaluation correlates instead of ranking documents."""
        return self.name in RATED_PAIRS

    @property
    def num_columns(self) -> int | None:
        """So many columns it reads, the others need not be encoded; None: all there are."""
        return NUM_PAIR_COLUMNS if self.name in PAIRS else None

    @property
    def takes_negatives_as_columns(self) -> bool:
        """Whether the first, second, ... negatives of all rows are a column each, so that every row needs as many."""
        return self.num_columns is None

    def forward(
        self,
        own: Mapping[str, Tensor],
        everyone: Mapping[str, Tensor] | None = None,
        row_offset: int = 0,
        ids: Mapping[str, Tensor] | None = None,
        targets: Mapping[str, Tensor] | None = None,
    ) -> LossOutput:
        """The loss of the global batch, the same on every process. As metrics its parts, where it has several.

        own: column -> (rows, D); everyone: column -> (all rows, D) in rank order, None = own. targets: "label" ->
        (N, ...), for the rows of everyone's anchors. `row_offset` and `ids` are not read.
        """
        everyone, targets = own if everyone is None else everyone, targets or {}
        own = {name: own[name] for name in list(own)[: self.num_columns]}
        label = targets.get("label") if not self._guides else None
        if label is None and self.name in LABELS and (self.name not in MAY_LACK_LABEL or len(own) < 3):
            raise UsageError(
                f"{self.name} needs a label of every row ({LABELS[self.name]}), and the batch has none. Give the "
                "collator label_column, or the batch targets={'label': ...}."
            )
        if label is not None and any(kind.__name__ in CLASSES for kind in type(self.innermost).__mro__):
            label = label.long()
        columns = _one_row_each(own, everyone)  # (2)
        features = [{"sentence": column} for column in columns]
        if self._guides:
            of_guide = _one_row_each(own, targets)
            features = [one | {"guide": rows} for one, rows in zip(features, of_guide, strict=True)]
        value = self._guarded(self.loss, features, label)  # (3)
        parts = {name: part.detach() for name, part in value.items()} if isinstance(value, Mapping) else {}
        return LossOutput(sum(value.values()) if parts else value, parts)

    # ---- (1) ----

    def _made(self, name: str | type[nn.Module], options: dict[str, Any]) -> nn.Module:
        kind = name if isinstance(name, type) else _class_of(name)
        options = _resolved(kind, options)
        if kind.__name__ == MATRYOSHKA:
            inner, options["loss"] = options.pop("loss_options", {}), options.get("loss")
            if not isinstance(options["loss"], (str, type)):
                raise UsageError(f"{MATRYOSHKA} is around a loss: give loss, a name, and loss_options.")
            options["loss"] = self._made(options["loss"], inner)
        if options.get("gather_across_devices"):
            raise UsageError(f"gather_across_devices=true: {kind.__name__} has the rows of all processes. Remove it.")
        if options.get("n_dims_per_step", -1) > 0:
            raise UsageError(
                f"n_dims_per_step={options['n_dims_per_step']} lets every process draw other dimensions, and the loss "
                "would be none of a global batch. Remove it: dimensions cost little beside the model."
            )
        if "use_mini_batched_version" in _options_of(kind):
            options["use_mini_batched_version"] = False  # its own gradient cache; the trainer's is outside of the loss
        if isinstance(options.get("guide"), (str, os.PathLike)):
            options["guide"] = _load_guide(options["guide"])
        return self._guarded(kind, self.stand_in, **options)

    def _guarded(self, call: Any, *arguments: Any, **options: Any) -> Any:
        """What sentence-transformers finds wrong, and what it asks of a model that a stand-in has not."""
        name = getattr(call, "__name__", type(call).__name__)
        try:
            return call(*arguments, **options)
        except (AssertionError, AttributeError) as error:
            raise UsageError(
                f"{name} must see the model itself, and here a loss sees embeddings only: {error}. Choose another one."
            ) from error
        except (TypeError, ValueError, IndexError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not any(words in str(error) for words in OF_SHAPES):
                raise
            reason = str(error).rstrip(".")
            if expected := re.search(r"values to unpack \(expected (\d+)", reason):
                texts = f"{len(arguments[0])} texts of a row, of which every negative is one"
                reason = f"it reads {expected[1]}, and was given {texts}"
            raise UsageError(f"{name}: {reason}. docs/losses.md says what each loss needs.") from error

    def extra_repr(self) -> str:
        config = getattr(self.loss, "get_config_dict", dict)()
        return ", ".join(f"{name}={value}" for name, value in config.items() if name not in ("guide", "loss"))


class _StandIn(nn.Module):
    """In the place of a model: hands on the embeddings that stand in the features under its name."""

    def __init__(self, key: str, embedding_dim: int, tokenizer: Any, max_length: int | None):
        super().__init__()
        self.key, self.embedding_dim = key, embedding_dim
        self.tokenizer, self.max_seq_length = tokenizer, max_length
        self.device = torch.device("cpu")  # where a loss makes its own parameters; they are moved with it

    def forward(self, features: Mapping[str, Tensor], **_: Any) -> dict[str, Tensor]:
        return {"sentence_embedding": features[self.key]}

    def get_embedding_dimension(self) -> int:
        return self.embedding_dim

    def __getitem__(self, index: int) -> nn.Module:
        """Losses look whether a model's first module is one that they cannot do with."""
        return nn.Identity()


class _Cosines(nn.Module):
    """(N, 1, D), (1, M, D) -> (N, M), in place of nn.CosineSimilarity, which would hold (N, M, D)."""

    def forward(self, rows: Tensor, columns: Tensor) -> Tensor:
        rows, columns = (nn.functional.normalize(one, dim=-1) for one in (rows.squeeze(1), columns.squeeze(0)))
        return rows @ columns.T


class _Guide:
    """A frozen model that says which candidates are false negatives; it sees each row once per step."""

    def __init__(self, loss: nn.Module, tokenizer: Any, batch_size: int):
        self.model, self.tokenizer, self.batch_size = loss.guide.eval().requires_grad_(False), tokenizer, batch_size
        self.must_retokenize = loss.must_retokenize  # as the loss found: other vocabularies, or it reads less

    @torch.no_grad()
    def embed(self, batch: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """column -> (rows, G)"""
        without = [name for name, features in batch.items() if "input_ids" not in features]
        if without:
            raise UsageError(f'GISTEmbedLoss: its guide reads texts, and column "{without[0]}" has none.')
        self.model.to(next(iter(batch.values()))["input_ids"].device)
        limits = ChunkLimits(max_rows=self.batch_size, max_tokens=self.batch_size * GUIDE_WIDTH)
        chunked = lay_out(batch, limits)  # rows of about one length go together
        return encode_without_graph(chunked, self._embedded, lambda _: nullcontext())

    def _embedded(self, chunk: Chunk) -> Tensor:
        part = dict(chunk.features)
        if self.must_retokenize:
            ids = part["input_ids"]
            real = part.get("attention_mask", torch.ones_like(ids)).bool()
            rows = [row[mask] for row, mask in zip(ids, real, strict=True)]  # padding may decode to text, such as "!"
            texts = self.tokenizer.batch_decode(rows, skip_special_tokens=True)
            part = {
                key: value.to(self.model.device) if isinstance(value, Tensor) else value
                for key, value in self.model.preprocess(texts).items()
            }
        return self.model(part)["sentence_embedding"]


def _one_row_each(own: Mapping[str, Tensor], everyone: Mapping[str, Tensor]) -> list[Tensor]:
    """Columns of (N, ...), those with K rows per anchor as K columns: the first of every row, the second, ..."""
    anchor, columns = next(iter(own)), []
    num_rows, own_rows = len(everyone[anchor]), len(own[anchor])
    for name in own:
        rows = everyone[name]
        each, left = divmod(len(rows), num_rows)
        if left or len(own[name]) != own_rows * each:
            raise UsageError(
                f'column "{name}" has {len(rows)} rows for {num_rows} anchors, and this loss takes as many of every '
                "anchor. Give every row as many negatives."
            )
        columns += rows.unflatten(0, (num_rows, each)).unbind(1) if each else []
    return columns


# ---- a class and its options, by name ----


def _library(module: str) -> Any:
    try:
        return importlib.import_module(f"sentence_transformers.{module}")
    except ImportError as error:
        raise UsageError(
            f"a loss of sentence-transformers needs the package (6.2 or newer), and it can not be imported: {error}. "
            "Run pip install 'hf_dist_ext[losses]'."
        ) from error


def _class_of(name: str) -> type[nn.Module]:
    if name in REFUSED:
        raise UsageError(f"{name} can not be trained here: {REFUSED[name]}.")
    losses = _library("sentence_transformer.losses")
    found = getattr(losses, name, None)
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        known = [one for one in losses.__all__ if one.endswith("Loss") and one not in REFUSED]
        raise UsageError(f"sentence-transformers has no loss called {name}. It has {', '.join(sorted(known))}.")
    return found


def _options_of(kind: type[nn.Module]) -> dict[str, inspect.Parameter]:
    _, _, *options = inspect.signature(kind.__init__).parameters.items()  # but self and the model
    return dict(options)


def _resolved(kind: type[nn.Module], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as the class takes them: functions and distances instead of their names."""
    taken = _options_of(kind)
    also = {"loss_options"} if kind.__name__ == MATRYOSHKA else set()
    for name in options:
        if name not in {*taken, *also}:
            raise UsageError(
                f"loss_options: {kind.__name__} has no option {name}. It has {', '.join(sorted({*taken, *also}))}."
            )
    return {name: _object_of(kind, name, value, taken.get(name)) for name, value in options.items()}


def _object_of(kind: type[nn.Module], option: str, value: Any, parameter: inspect.Parameter | None) -> Any:
    default = None if parameter is None else parameter.default
    if not isinstance(value, str) or not callable(default) or default is inspect.Parameter.empty:
        return value
    functions = _distances(kind) if option == "distance_metric" else vars(_library("util"))
    found = functions.get(value)
    if not callable(found):
        known = sorted(functions) if option == "distance_metric" else [n for n in functions if n.endswith("_sim")]
        raise UsageError(
            f"loss_options: {option}={value!r} of {kind.__name__} is no name of such a function. There are "
            f"{', '.join(known)}; another one can be given from Python."
        )
    return found


@functools.cache
def _distances(kind: type[nn.Module]) -> dict[str, Any]:
    """Name -> function of the class of distances that stands beside a loss, such as TripletDistanceMetric."""
    beside = vars(importlib.import_module(kind.__module__)).items()
    classes = [one for name, one in beside if name.endswith(("DistanceMetric", "DistanceFunction"))]
    return {name: f for one in classes for name, f in vars(one).items() if callable(f) and not name.startswith("_")}


def _name_of(function: Any) -> str:
    """A function's name, or the name under which a class of distances has it."""
    if isinstance(function, nn.Module):
        return type(function).__name__
    losses = _library("sentence_transformer.losses")
    for kind in (losses.TripletDistanceMetric, losses.SiameseDistanceMetric):
        for name, one in vars(kind).items():
            if one is function:
                return name
    return getattr(function, "__name__", type(function).__name__)


def _load_guide(name: str | os.PathLike) -> nn.Module:
    try:
        return _library("sentence_transformer").SentenceTransformer(str(name), device="cpu")
    except (OSError, ValueError) as error:
        raise UsageError(f"loss_options: the guide {str(name)!r} can not be loaded: {error}") from error

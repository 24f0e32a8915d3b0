"""A loss of sentence-transformers, computed from embeddings instead of a model and texts.

(1) in the place of its model the loss has a stand-in, which hands on embeddings that are there already
(2) a column with K negatives per row becomes K columns, since those losses take one row of every column per anchor
(3) the loss is called as its trainer calls it: with features per column, which hold nothing but embeddings, and labels
(4) a loss with a gradient cache of its own is asked for its scores alone, and makes their gradient in parts as it goes

Every process computes the loss of the global batch from all processes' rows, so losses that compare all pairs mean on
several processes what they mean on one, and their normalisation is that of the global batch. The price is a
computation per process of what InfoNCE (engine/losses.py) shares and cuts into tiles.

Letters: B own rows, N all processes' rows, K negatives per row, T tokens, D embedding, G the guide's embedding.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_dist_ext.data.collator import NUM_PAIR_COLUMNS
from hf_dist_ext.engine.chunks import Chunk
from hf_dist_ext.engine.combined_losses import LossPerSource, SumOfLosses
from hf_dist_ext.engine.gradient_cache import encode_without_graph
from hf_dist_ext.engine.layout import lay_out
from hf_dist_ext.engine.losses import LossOutput
from hf_dist_ext.engine.manual_gradient import with_gradients
from hf_dist_ext.engine.outputs import Output, tensors_of
from hf_dist_ext.engine.tables import ChunkLimits
from hf_dist_ext.errors import UsageError
from hf_dist_ext.evaluation.token_vectors import MASK, VECTORS
from hf_dist_ext.run.losses import (
    ALL_PAIRS,
    CLASSES,
    GROUPS,
    LABELS,
    MATRYOSHKA,
    MAY_LACK_LABEL,
    NO_COSINES,
    PAIRS,
    RATED_PAIRS,
    SEES_MODEL,
    WITHOUT_LABEL,
)
from hf_dist_ext.training.losses_by_name import guarded, library, made, name_of

GUIDE_ROWS = 32  # that a guide encodes at once, unless told otherwise
GUIDE_WIDTH = 64  # of longer rows fewer: a chunk has few that are much shorter than its longest, and little padding
KNOWN = {*LABELS, *WITHOUT_LABEL}
DEFAULTS = {  # what the trainer of a model's class takes where no loss is given
    "MultiVectorEncoder": ("multi_vector_encoder.losses", "MultiVectorMultipleNegativesRankingLoss"),
    "SentenceTransformer": ("sentence_transformer.losses", "CoSENTLoss"),
}
LIBRARIES = ("sentence_transformers", "torch", "builtins")  # whose methods are known
MODEL = ("model", "sentence_embedder")  # what losses call it
# What a loss may ask of its model: what says how embeddings are made and compared, and reaches no weights.
READABLE = (
    "tokenizer", "max_seq_length", "device", "dtype", "get_embedding_dimension", "get_sentence_embedding_dimension",
    "similarity", "similarity_pairwise", "similarity_fn_name", "truncate_dim", "prompts", "default_prompt_name",
)  # fmt: skip


def as_loss(loss: Any, model: nn.Module) -> Any:
    """What a trainer was given as `loss`, as a loss over embeddings: `loss(own, everyone, row_offset, ids, targets)`.

    Args:
        loss: a loss of sentence-transformers, or one of the same form (`forward(sentence_features, labels)`, the model
            as its attribute `model`), which is changed: a stand-in takes the place of the model; a function model ->
            loss; a mapping source -> one of these; a loss over embeddings, which is handed through; None: what the
            trainer of the model's class takes, or None where it has none.
        model: the one that trains.

    Raises:
        UsageError: the loss must see the model itself, or would not be the one of the global batch.
    """
    if loss is None:
        default = next((DEFAULTS[kind.__name__] for kind in type(model).__mro__ if kind.__name__ in DEFAULTS), None)
        return default and as_loss(getattr(library(default[0]), default[1]), model)
    if isinstance(loss, Mapping):
        made = {id(one): as_loss(one, model) for one in loss.values()}
        return LossPerSource({source: made[id(one)] for source, one in loss.items()})
    if isinstance(loss, SumOfLosses | LossPerSource):
        made = {id(one): as_loss(one, model) for one in loss.losses.values()}
        loss.losses.update({name: made[id(one)] for name, one in loss.losses.items()})
        if isinstance(loss, SumOfLosses):
            loss.refuse_two_guides()  # which a loss of sentence-transformers shows when it is made into one of ours
        return loss
    if scores_embeddings(loss):
        return loss
    return SentenceTransformersLoss(loss, model) if isinstance(loss, nn.Module) else as_loss(loss(model), model)


def scores_embeddings(loss: Any) -> bool:
    """By its arguments: else it is a loss over features, or a function that makes one. A mapping: all of them do."""
    if isinstance(loss, Mapping | SumOfLosses | LossPerSource):
        return all(map(scores_embeddings, (loss if isinstance(loss, Mapping) else loss.losses).values()))
    kinds = (loss if isinstance(loss, type) else type(loss)).__mro__
    if isinstance(loss, type) or any(kind.__module__.startswith("sentence_transformers.") for kind in kinds):
        return False
    parameters = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss).parameters
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    return "row_offset" in parameters or takes_any and "sentence_features" not in parameters


def let_ask(loss: Any, model: nn.Module) -> None:
    """Losses that an evaluator may ask: `model` takes the place of the one that they were made with (`model_init`)."""
    for one in loss.modules() if isinstance(loss, nn.Module) else ():
        if isinstance(one, SentenceTransformersLoss) and isinstance(getattr(one._stand_in, "model", None), nn.Module):
            one._stand_in.model = model


class AskedChunks(NamedTuple):
    """How many rows, or tokens, go through the model at once; None where a loss does not ask."""

    rows: int | None = None
    tokens: int | None = None


def asked_chunks(loss: Any) -> AskedChunks:
    """What losses ask for that have a gradient cache of their own, the least of several."""
    parts = loss.modules() if isinstance(loss, nn.Module) else ()
    asked = [one.chunks for one in parts if isinstance(one, SentenceTransformersLoss)] or [AskedChunks()]
    return AskedChunks(*(min(filter(None, sizes), default=None) for sizes in zip(*asked, strict=True)))


class SentenceTransformersLoss(nn.Module):
    """A loss of sentence-transformers over columns of embeddings, or of token vectors.

    The columns are what the loss calls its inputs: anchor, positive, negatives. A label travels with the batch as
    `targets["label"]` (see `ContrastiveCollator`), and means what it means to the loss.

    Args:
        loss: the loss itself, which is changed: where it had its model, it has a stand-in, and its rows are those of
            all processes, as with gather_across_devices. Or its class or the name of that, such as "CoSENTLoss".
        model: the one that trains; for a class or a name D of the model.
        tokenizer: the model's, for a class or a name with a guide.
        max_length: the model's, for a class or a name with a guide.
        options: what the class takes. Functions and distances may be given by name ("pairwise_dot_score", "COSINE"),
            and `guide` as a folder or hub id; `guide_batch_size` (32) rows go through it at once, and of rows above
            64 tokens as many tokens as such rows have. MatryoshkaLoss takes `loss`, a name, with `loss_options`.

    Raises:
        UsageError: sentence-transformers is missing, has no such loss, or refuses the options; the loss must see the
            model itself, or would not be the one of the global batch.
    """

    def __init__(
        self,
        loss: str | type[nn.Module] | nn.Module,
        model: nn.Module | int,
        /,
        tokenizer: Any = None,
        max_length: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self._guide_rows = options.pop("guide_batch_size", GUIDE_ROWS)
        if isinstance(loss, nn.Module):
            self.loss = loss
        else:
            of_model = SimpleNamespace(get_embedding_dimension=lambda: model, tokenizer=tokenizer)
            of_model.max_seq_length = max_length
            of_model.device = torch.device("cpu")  # where a loss makes its own parameters; they are moved with it
            self.loss = made(loss, options, _StandIn("sentence", of_model))
        kinds = [kind.__name__.removeprefix("Cached") for kind in type(self.innermost).__mro__]
        names = [kind.removeprefix("MultiVector") for kind in kinds]
        self.name = next((name for name in names if name in KNOWN), kinds[0])
        self.similarity = None if names == kinds else "maxsim"  # by which evaluations compare
        self.chunks = self._without_model(model)
        self._guides: list[_Guide] = []  # a list keeps the guide's weights from being parameters of this loss
        if self._is_guided:
            self._guides += self._without_guide()
        if self._guides:
            self.targets_of = self._guides[0].embed

    @property
    def innermost(self) -> Any:
        """The loss itself, inside of MatryoshkaLoss too. No attribute: its parameters would be saved twice."""
        return self.loss.loss if type(self.loss).__name__ == MATRYOSHKA else self.loss

    @property
    def _is_guided(self) -> bool:
        return hasattr(self.innermost, "must_retokenize")

    @property
    def _is_cached(self) -> bool:
        return getattr(self.innermost, "uses_gradient_cache", False)

    @property
    def normalize(self) -> bool:
        """Whether it compares cosines, so that an evaluation does."""
        compares = getattr(self.innermost, "similarity_fct", getattr(self.innermost, "distance_metric", None))
        name = compares if isinstance(compares, str) else name_of(compares)
        return compares is None or any(word in name.lower() for word in ("cos", "angle"))

    @property
    def reads_lengths(self) -> bool:
        """Whether embeddings of length 1 have another loss, as it compares no cosines."""
        return self.name in NO_COSINES or not (self.name in KNOWN and self.normalize)

    @property
    def in_batch_negatives(self) -> bool:
        """Whether a row is compared with other rows of the batch; of an unknown loss that is assumed."""
        return self.name in ALL_PAIRS or self.name not in KNOWN

    @property
    def compares_all_pairs(self) -> bool:
        """Whether it holds the scores of all pairs of the global batch at once."""
        return self.in_batch_negatives and not self._is_cached

    @property
    def rates_pairs(self) -> bool:
        """Whether labels say how near a pair is, so that an evaluation correlates instead of ranking documents."""
        return self.name in RATED_PAIRS

    @property
    def num_columns(self) -> int | None:
        """So many columns it reads, the others need not be encoded; None: all there are."""
        own = [kind for kind in type(self.innermost).__mro__ if kind.__module__.partition(".")[0] not in LIBRARIES]
        methods = {name for kind in own for name, value in vars(kind).items() if inspect.isfunction(value)}
        if methods - {"__init__"}:
            return None  # a subclass of the user's, which may read more than its base
        return 1 if self.name in GROUPS else NUM_PAIR_COLUMNS if self.name in PAIRS else None

    @property
    def takes_negatives_as_columns(self) -> bool:
        """Whether the first, second, ... negatives of all rows are a column each, so that every row needs as many."""
        return self.num_columns is None

    def forward(
        self,
        own: Mapping[str, Output],
        everyone: Mapping[str, Output] | None = None,
        row_offset: int = 0,
        ids: Mapping[str, Tensor] | None = None,
        targets: Mapping[str, Tensor] | None = None,
    ) -> LossOutput:
        """The loss of the global batch, the same on every process. As metrics its parts, where it has several.

        own: column -> (rows, D), or {"vectors": (rows, T, D), "mask": (rows, T)}; everyone: the same of all rows in
        rank order, None = own. targets: "label" -> (N, ...), for the rows of everyone's anchors. `row_offset` and
        `ids` are not read.
        """
        everyone, targets = own if everyone is None else everyone, targets or {}
        own = {name: own[name] for name in list(own)[: self.num_columns]}
        label = targets.get("label") if not self._is_guided else None
        if label is None and self.name in LABELS and (self.name not in MAY_LACK_LABEL or len(own) < 3):
            raise UsageError(
                f"{self.name} needs a label of every row ({LABELS[self.name]}), and the batch has none. Call "
                "the dataset's column label, or give the collator label_column, or the batch targets={'label': ...}."
            )
        if label is not None and self.name in CLASSES:
            label = _classes(label, self.innermost.loss_fct)
        name, columns = type(self.loss).__name__, _one_row_each(own, everyone)  # (2)
        of_guide = _one_row_each(own, targets) if self._guides else columns  # the model may be its own guide
        if self._is_cached:
            value = guarded(name, self._in_parts, columns, of_guide, label)  # (4)
        else:
            features = [rows if isinstance(rows, Mapping) else {"sentence": rows} for rows in columns]
            features = [{**one, "guide": rows} for one, rows in zip(features, of_guide, strict=True)]
            value = guarded(name, self.loss, features, label)  # (3)
        parts = {name: part.detach() for name, part in value.items()} if isinstance(value, Mapping) else {}
        return LossOutput(sum(value.values()) if parts else value, parts)

    # ---- (1) ----

    def _without_model(self, model: Any) -> AskedChunks:
        """Take the model out of the loss and those inside of it. Returns the chunks that the loss asks for."""
        chunks, stand_in = AskedChunks(), None
        of_model = set(model.modules()) if isinstance(model, nn.Module) else set()
        for loss in list(_losses_in(self.loss, of_model)):
            name = type(loss).__name__
            if kind := next((kind.__name__ for kind in type(loss).__mro__ if kind.__name__ in SEES_MODEL), None):
                raise UsageError(f"{name} can not be trained here: {SEES_MODEL[kind]}.")
            if (drawn := getattr(loss, "n_dims_per_step", -1)) > 0:
                raise UsageError(
                    f"n_dims_per_step={drawn} lets every process draw other dimensions, and the loss would be none of "
                    "a global batch. Remove it: dimensions cost little beside the model."
                )
            if loss is self.innermost and self._is_cached:
                tokens = getattr(loss, "mini_batch_num_tokens", None)
                chunks = AskedChunks(getattr(loss, "mini_batch_size", None) if tokens is None else None, tokens)
            elif loss is not self.loss and getattr(loss, "uses_gradient_cache", False):
                raise UsageError(
                    f"{name} stands inside of {type(self.loss).__name__} and runs the model itself, for a gradient "
                    "cache of its own. Use the loss without Cached there, and gradient_cache_chunk_size."
                )
            if getattr(loss, "gather_across_devices", False):
                loss.gather_across_devices = False  # the rows of all processes are there
            for part, held in [*loss._modules.items(), *vars(loss).items()]:
                if isinstance(held, _StandIn) and held.key == "sentence" or _is_model(part, held, model):
                    stand_in = stand_in or (held if isinstance(held, _StandIn) else _StandIn("sentence", held))
                    _put(loss, part, stand_in)  # the same one in all of them: MatryoshkaLoss changes its forward
        if inside := [name for name, part in self.loss.named_modules() if part in of_model]:
            raise UsageError(
                f"{type(self.loss).__name__} holds {inside[0]!r}, which is of the model, and here a loss sees "
                "embeddings only. Keep the model as its attribute `model` alone."
            )
        self._stand_in = stand_in
        return chunks

    def _without_guide(self) -> list[_Guide]:
        """The guide; none where it is the model that trains, whose embeddings of the step stand for its own."""
        loss = self.innermost
        if not isinstance(loss.guide, _StandIn):
            _put(loss, "guide", _StandIn("guide", _Guide(loss, self._guide_rows)))
            loss.must_retokenize = False  # the features hold the guide's embeddings, whoever made them
        loss.similarity_fct = _Cosines()
        return [loss.guide.model] if loss.guide.key == "guide" else []

    # ---- (3) and (4) ----

    def _in_parts(self, columns: list[Any], of_guide: list[Any], label: Tensor | None) -> Tensor:
        """The loss by its `calculate_loss`, which back-propagates to embeddings that are leaves as it goes."""
        more: Any = [[rows.detach()] for rows in of_guide] if self._is_guided else label
        if self.similarity is not None:
            columns, more = [rows[VECTORS] for rows in columns], [[rows[MASK].bool()] for rows in columns]
        own = [parameter for parameter in self.loss.parameters() if parameter.requires_grad]

        def loss_and_gradients(*tensors: Tensor, needs: list[bool]) -> tuple[Tensor, Tensor, list[Tensor | None]]:
            leaves, kept = [one.detach().requires_grad_() for one in tensors[: len(columns)]], [p.grad for p in own]
            for parameter in own:
                parameter.grad = None
            with torch.set_grad_enabled(any(needs)):
                backward = {"with_backward": True} if any(needs) else {}
                loss = self.innermost.calculate_loss([[leaf] for leaf in leaves], more, **backward)
            found = [one.grad for one in (*leaves, *own)]
            for parameter, gradient in zip(own, kept, strict=True):
                parameter.grad = gradient
            return loss.detach(), loss.new_zeros(0), found

        return with_gradients(type(self.loss).__name__, loss_and_gradients, *columns, *own)[0]

    def extra_repr(self) -> str:
        config = getattr(self.loss, "get_config_dict", dict)()
        return ", ".join(f"{name}={value}" for name, value in config.items() if name not in ("guide", "loss"))


class _StandIn:
    """In the place of a model: hands on the embeddings that stand in the features under its name. No module, so it is
    no part of a loss, and a loss that looks for weights finds none."""

    def __init__(self, key: str, model: Any):
        self.key, self.model = key, model

    def __call__(self, features: Mapping[str, Any], **_: Any) -> dict[str, Tensor]:
        return self.forward(features)  # which MatryoshkaLoss replaces

    def forward(self, features: Mapping[str, Any]) -> dict[str, Tensor]:
        if VECTORS in features:
            return {"token_embeddings": features[VECTORS], "attention_mask": features[MASK]}
        if self.key not in features:
            if self.key == "sentence" and not torch.is_grad_enabled():
                return self.model(features)  # an evaluator asks the loss, as LabelAccuracyEvaluator does
            raise UsageError(
                "This loss was given to DistTrainer, which took its model out, and reads embeddings since then. Make "
                "another one of the model for another trainer."
            )
        return {"sentence_embedding": features[self.key]}

    def __getattr__(self, name: str) -> Any:
        if name not in READABLE:
            raise AttributeError(f"it asks for model.{name}")
        return getattr(self.model, name)

    def __getitem__(self, index: int) -> nn.Module:
        """Losses look whether a model's first module is one that they cannot do with."""
        return nn.Identity()


def _is_model(name: str, part: Any, model: Any) -> bool:
    """The one that trains, or the one that the loss was made with."""
    return part is model or name in MODEL and isinstance(part, nn.Module) and hasattr(part, "encode")


def _losses_in(loss: nn.Module, of_model: set[nn.Module]) -> Iterator[Any]:
    """The loss and its parts, without models and their parts."""
    yield loss
    for part in loss.children():
        if part not in of_model and not hasattr(part, "encode"):
            yield from _losses_in(part, of_model)


def _classes(label: Tensor, loss_fct: Any) -> Tensor:
    """Numbers of classes, which a run file's labels are as floats; probabilities and measures stay as they are."""
    if label.dim() != 1 or not isinstance(loss_fct, nn.CrossEntropyLoss):
        return label
    if label.is_floating_point() and (odd := label[label != label.round()]).numel():
        raise UsageError(
            f"SoftmaxLoss: a row's label is {odd[0].item():g}, and a class is a whole number. Number the classes, or "
            "give a row the probabilities of all classes."
        )
    return label.long()


def _put(loss: Any, name: str, stand_in: _StandIn) -> None:
    loss._modules.pop(name, None)
    setattr(loss, name, stand_in)


class _Cosines(nn.Module):
    """(N, 1, D), (1, M, D) -> (N, M), in place of nn.CosineSimilarity, which would hold (N, M, D)."""

    def forward(self, rows: Tensor, columns: Tensor) -> Tensor:
        rows, columns = (nn.functional.normalize(one, dim=-1) for one in (rows.squeeze(1), columns.squeeze(0)))
        return rows @ columns.T


class _Guide:
    """A frozen model that says which candidates are false negatives; it sees each row once per step."""

    def __init__(self, loss: Any, batch_size: int):
        self.model, self.batch_size = loss.guide.eval().requires_grad_(False), batch_size
        self.must_retokenize = loss.must_retokenize  # as the loss found: other vocabularies, or it reads less
        self.tokenizer = getattr(loss, "tokenizer", None)  # the model's

    @torch.no_grad()
    def embed(
        self, batch: Mapping[str, Mapping[str, Tensor]], constants: Mapping[str, Mapping[str, Any]] | None = None
    ) -> dict[str, Tensor]:
        """column -> (rows, G). constants: column -> what a model is told of it, such as the length of its prompt."""
        without = [name for name, features in batch.items() if "input_ids" not in features]
        if without:
            raise UsageError(f'GISTEmbedLoss: its guide reads texts, and column "{without[0]}" has none.')
        self.model.to(next(iter(batch.values()))["input_ids"].device)
        limits = ChunkLimits(max_rows=self.batch_size, max_tokens=self.batch_size * GUIDE_WIDTH)
        chunked = lay_out(batch, limits, shares_tower=not constants)  # rows of about one length go together
        return encode_without_graph(chunked, partial(self._embedded, constants or {}), lambda _: nullcontext())

    def _embedded(self, constants: Mapping[str, Mapping[str, Any]], chunk: Chunk) -> Tensor:
        part = {**chunk.features, **constants.get(chunk.columns[0], {})}
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


def _one_row_each(own: Mapping[str, Output], everyone: Mapping[str, Output]) -> list[Output]:
    """Columns of (N, ...), those with K rows per anchor as K columns: the first of every row, the second, ..."""
    columns: list[Output] = []
    own_rows, num_rows = (len(tensors_of(rows[next(iter(own))])[0]) for rows in (own, everyone))
    for name in own:
        rows = everyone[name]
        found = len(tensors_of(rows)[0])
        of_row, left = divmod(found, num_rows)
        if left or len(tensors_of(own[name])[0]) != own_rows * of_row:
            raise UsageError(
                f'column "{name}" has {found} rows for {num_rows} anchors, and this loss takes as many of every '
                "anchor. Give every row as many negatives."
            )
        keys = list(rows) if isinstance(rows, Mapping) else []
        split = [tensor.unflatten(0, (num_rows, of_row)).unbind(1) for tensor in tensors_of(rows)] if of_row else []
        columns += [dict(zip(keys, one, strict=True)) if keys else one[0] for one in zip(*split, strict=True)]
    return columns

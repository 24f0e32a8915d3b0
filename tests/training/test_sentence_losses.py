"""Losses of sentence-transformers on cached embeddings, against sentence-transformers with a model of its own."""

import json
import re
from functools import partial

import pytest
import torch
from datasets import Dataset, DatasetDict
from safetensors.torch import load_file
from sentence_transformers import MultiVectorEncoder, SentenceTransformer
from sentence_transformers.multi_vector_encoder import losses as multi_vector
from sentence_transformers.multi_vector_encoder.scoring import XTRScores
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.sentence_transformer.modules import Normalize
from sentence_transformers.util import cos_sim
from torch.nn.functional import pad
from transformers import BertConfig, BertModel

from hf_dist_ext.checkpoints.loss_state import load_loss, save_loss
from hf_dist_ext.data.load import load_datasets, prepare
from hf_dist_ext.data.row_check import RowCheck
from hf_dist_ext.data.row_facts import split
from hf_dist_ext.data.sentence_collator import ContrastiveCollator
from hf_dist_ext.engine.combined_losses import LossPerSource, SumOfLosses
from hf_dist_ext.engine.gradient_cache import cached_step
from hf_dist_ext.engine.layout import lay_out
from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.engine.tables import ChunkLimits
from hf_dist_ext.errors import UsageError
from hf_dist_ext.run import losses as by_name
from hf_dist_ext.run.config import RunConfig
from hf_dist_ext.training import metrics
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.sentence_losses import SentenceTransformersLoss, as_loss, asked_chunks, scores_embeddings
from hf_dist_ext.training.trainer import DistTrainer
from tests.test_train_script import main, run_file  # noqa: F401, fixtures
from tests.tiny_models import WORDS, embedding_model, model_config, tiny_tokenizer

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
COLUMNS = ("query", "positive", "negative")
WIDTH = 32  # of the tiny model


def saved(folder, seed: int, tokenizer=None) -> str:
    torch.manual_seed(seed)
    BertModel(BertConfig(**model_config("bert", **NO_DROPOUT))).save_pretrained(folder)
    (tokenizer or tiny_tokenizer()).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> SentenceTransformer:
    return SentenceTransformer(saved(tmp_path_factory.mktemp("model"), 0), device="cpu").double()


@pytest.fixture(scope="module")
def guides(tmp_path_factory) -> dict[str, SentenceTransformer]:
    """With the model's tokenizer, and one that cuts texts where the model does not, so that it reads them anew."""
    folders = {"same": tiny_tokenizer(), "shorter": tiny_tokenizer(max_length=5)}
    paths = {name: saved(tmp_path_factory.mktemp(name), 7, tokenizer) for name, tokenizer in folders.items()}
    guides = {name: SentenceTransformer(path, device="cpu").double() for name, path in paths.items()}
    guides["shorter"].max_seq_length = 5
    return guides


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> MultiVectorEncoder:
    return MultiVectorEncoder(saved(tmp_path_factory.mktemp("tokens"), 0), device="cpu").double()


def texts(num_columns: int, rows: int = 7) -> dict[str, list[str]]:
    draw = torch.Generator().manual_seed(3)
    words = lambda: " ".join(WORDS[i] for i in torch.randint(len(WORDS), (2 + rows % 5,), generator=draw))  # noqa: E731
    names = [*COLUMNS, "negative 2", "negative 3"][:num_columns]
    return {name: [f"{words()} {words()}"[: 12 + 7 * (row % 3)] for row in range(rows)] for name in names}


RATED = torch.tensor([0.1, 0.9, 0.5, 0.5, 1.0, 0.0, 0.3])
BINARY = torch.tensor([0, 1, 1, 0, 1, 0, 1])
SCORES = torch.randn(7, 4, generator=torch.Generator().manual_seed(1))
TEACHER = torch.randn(7, 3, WIDTH, generator=torch.Generator().manual_seed(2))

# name, columns, label, options
CASES = [
    ("MultipleNegativesRankingLoss", 2, None, {}),
    ("MultipleNegativesRankingLoss", 4, None, {
        "scale": 5.0, "directions": ["query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"]}),
    ("MultipleNegativesSymmetricRankingLoss", 2, None, {"similarity_fct": "dot_score", "scale": 0.1}),
    ("CoSENTLoss", 2, RATED, {"scale": 3.0}),
    ("AnglELoss", 2, RATED, {}),
    ("AnglELoss", 3, None, {}),
    ("CosineSimilarityLoss", 2, RATED, {}),
    ("ContrastiveLoss", 2, BINARY, {"distance_metric": "EUCLIDEAN", "margin": 4.0}),
    ("OnlineContrastiveLoss", 2, BINARY, {}),
    ("TripletLoss", 3, None, {"distance_metric": "MANHATTAN"}),
    ("MarginMSELoss", 3, RATED, {}),
    ("MarginMSELoss", 5, SCORES, {"similarity_fct": "pairwise_cos_sim"}),
    ("DistillKLDivLoss", 5, SCORES, {"student_temperature": 2.0}),
    ("MSELoss", 2, TEACHER[:, 0], {}),
    ("EmbedDistillLoss", 3, TEACHER, {}),
    ("EmbedDistillLoss", 2, TEACHER[:, 0, :5].contiguous(), {"projection_dim": 5, "distance_metric": "l2"}),
    ("EmbedDistillLoss", 2, TEACHER[:, :2, :5].contiguous(), {"projection_dim": 5, "distance_metric": "cosine"}),
    ("SoftmaxLoss", 2, BINARY, {"embedding_dimension": WIDTH, "num_labels": 2}),
    ("MegaBatchMarginLoss", 2, None, {}),
    ("GlobalOrthogonalRegularizationLoss", 3, None, {}),
    ("GISTEmbedLoss", 2, None, {"guide": "same", "temperature": 0.1}),
    ("GISTEmbedLoss", 3, None, {"guide": "shorter", "temperature": 0.1, "margin": 0.02, "guide_batch_size": 2}),
    ("MatryoshkaLoss", 2, RATED, {"loss": "CoSENTLoss", "loss_options": {"scale": 3.0}, "matryoshka_dims": [32, 8]}),
    ("MatryoshkaLoss", 3, None, {
        "loss": "MultipleNegativesRankingLoss", "matryoshka_dims": [8, 16], "matryoshka_weights": [2, 1]}),
    ("MatryoshkaLoss", 2, None, {
        "loss": "GISTEmbedLoss", "loss_options": {"guide": "same", "temperature": 0.1}, "matryoshka_dims": [32, 8]}),
    ("MatryoshkaLoss", 3, None, {
        "loss": "TripletLoss", "loss_options": {"distance_metric": "COSINE"}, "matryoshka_dims": [32, 8]}),
]  # fmt: skip


def theirs(model, name: str, options: dict) -> torch.nn.Module:
    """The loss as a sentence-transformers script writes it."""
    kind, options = getattr(losses, name), dict(options)
    options.pop("guide_batch_size", None)
    if name == "MatryoshkaLoss":
        options["loss"] = theirs(model, options["loss"], options.pop("loss_options", {}))
    if isinstance(options.get("similarity_fct"), str):
        import sentence_transformers.util as functions

        options["similarity_fct"] = getattr(functions, options["similarity_fct"])
    if name in ("TripletLoss", "ContrastiveLoss") and "distance_metric" in options:
        distances = losses.TripletDistanceMetric if name == "TripletLoss" else losses.SiameseDistanceMetric
        options["distance_metric"] = getattr(distances, options["distance_metric"])
    if name == "MegaBatchMarginLoss":
        options["use_mini_batched_version"] = False
    return kind(model, **options)


def of_guide(options: dict, guides: dict) -> dict:
    """The options with the guide that is named, of the loss or of the one inside."""
    if "guide" in options:
        return options | {"guide": guides[options["guide"]]}
    return options | ({"loss_options": of_guide(options["loss_options"], guides)} if "loss_options" in options else {})


class Mixed(torch.nn.Module):
    """As users write one: two losses, a scale that trains, options of the model."""

    def __init__(self, model):
        super().__init__()
        self.model, self.scale = model, torch.nn.Parameter(torch.tensor([0.3], dtype=torch.float64))
        self.ranking, self.rated = losses.MultipleNegativesRankingLoss(model), losses.CoSENTLoss(model, scale=3.0)

    def forward(self, sentence_features, labels):
        anchor, *_ = [self.model(features)["sentence_embedding"] for features in sentence_features]
        by_rank, by_rate = self.ranking(sentence_features, None), self.rated(sentence_features, labels)
        return by_rank + self.scale.sum() * by_rate + anchor.pow(2).mean() / self.model.get_embedding_dimension()


class Three(losses.CoSENTLoss):
    """Reads more columns than its base."""

    def forward(self, sentence_features, labels):
        anchor, *others = [self.model(features)["sentence_embedding"] for features in sentence_features]
        return sum(self.compute_loss_from_embeddings([anchor, other], labels) for other in others)


class Members(losses.BatchAllTripletLoss):
    """Reads more columns than its base."""

    def forward(self, sentence_features, labels):
        return sum(super(Members, self).forward([features], labels) for features in sentence_features)


class Learnt(losses.CachedMultipleNegativesRankingLoss):
    """With a parameter of its own, whose gradient its cache makes too."""

    def __init__(self, model, **options):
        super().__init__(model, **options)
        self.learnt = torch.nn.Parameter(torch.tensor([0.5], dtype=torch.float64))
        self.similarity_fct = lambda rows, columns: self.learnt * cos_sim(rows, columns)


CLASSES = torch.tensor([0, 1, 0, 2, 1, 0, 2])
EUCLIDEAN = losses.BatchHardTripletLossDistanceFunction.euclidean_distance
CACHED = {"mini_batch_size": 3}
# a loss of (model, guides), columns, label; a cached one with how the trainer of sentence-transformers computes it
OBJECTS = {
    "symmetric": (lambda m, g: losses.CachedMultipleNegativesSymmetricRankingLoss(m, scale=5.0, **CACHED), 2, None),
    "cached hardness": (lambda m, g: losses.CachedMultipleNegativesRankingLoss(
        m, hardness_mode="all_negatives", hardness_strength=2.0, **CACHED), 4, None),
    "gathered": (lambda m, g: losses.CachedMultipleNegativesRankingLoss(m, gather_across_devices=True), 3, None),
    "plain gathered": (lambda m, g: losses.MultipleNegativesRankingLoss(m, gather_across_devices=True), 3, None),
    "hardness": (lambda m, g: losses.MultipleNegativesRankingLoss(
        m, hardness_mode="hard_negatives", hardness_strength=2.0), 4, None),
    "cached guide": (lambda m, g: losses.CachedGISTEmbedLoss(m, g["shorter"], temperature=0.1, **CACHED), 4, None),
    "guide": (lambda m, g: losses.GISTEmbedLoss(m, g["same"], margin_strategy="relative", margin=0.1), 3, None),
    "its own guide": (lambda m, g: losses.GISTEmbedLoss(m, m, temperature=0.1), 3, None),
    "its own guide, cached": (lambda m, g: losses.CachedGISTEmbedLoss(m, m, temperature=0.1, **CACHED), 4, None),
    "dimensions of its own guide": (lambda m, g: losses.MatryoshkaLoss(
        m, losses.GISTEmbedLoss(m, m, temperature=0.1), [32, 8]), 2, None),
    "mega batch": (lambda m, g: losses.MegaBatchMarginLoss(m, mini_batch_size=3), 2, None),
    "dimensions of a cached one": (lambda m, g: losses.MatryoshkaLoss(
        m, losses.CachedMultipleNegativesRankingLoss(m, **CACHED), [32, 8], [1.0, 0.5]), 3, None),
    "dimensions of a guided one": (lambda m, g: losses.MatryoshkaLoss(
        m, losses.CachedGISTEmbedLoss(m, g["same"], **CACHED), [32, 8]), 3, None),
    "parameter of a cached one": (lambda m, g: Learnt(m, **CACHED), 3, None),
    "hard": (lambda m, g: losses.BatchHardTripletLoss(m), 1, CLASSES),
    "all": (lambda m, g: losses.BatchAllTripletLoss(m, EUCLIDEAN, margin=2.0), 1, CLASSES),
    "soft": (lambda m, g: losses.BatchHardSoftMarginTripletLoss(m), 1, CLASSES),
    "semi-hard": (lambda m, g: losses.BatchSemiHardTripletLoss(m, margin=2.0), 1, CLASSES),
    "more columns of a pair": (lambda m, g: Three(m), 3, RATED),
    "more columns of a group": (lambda m, g: Members(m), 2, CLASSES),
    "probabilities of classes": (lambda m, g: losses.SoftmaxLoss(m, WIDTH, 4), 2, SCORES.softmax(1).double()),
    "measures": (lambda m, g: losses.SoftmaxLoss(m, WIDTH, 4, loss_fct=torch.nn.MSELoss()), 2, SCORES.double()),
    "of a user": (lambda m, g: Mixed(m), 3, RATED),
    "dimensions of a user": (lambda m, g: losses.MatryoshkaLoss(m, Mixed(m), [32, 8]), 3, RATED),
}  # fmt: skip
NAMED = {f"{name} {number}": (name, *case) for number, (name, *case) in enumerate(CASES)}


def own_parameters(loss: torch.nn.Module, *models: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    of_models = {p for model in models for p in model.parameters()}
    return {name: p for name, p in loss.named_parameters() if p not in of_models}


@pytest.mark.parametrize("case, is_object", [*((n, False) for n in NAMED), *((n, True) for n in {**NAMED, **OBJECTS})])
def test_cached_gradients_are_those_of_sentence_transformers(model, guides, case, is_object):
    """The same weights in both: chunks of 3 rows through the cache here, the full batch and autograd there."""
    if case in NAMED:
        name, num_columns, label, options = NAMED[case]
        options = of_guide(options, guides)
        build = lambda: theirs(model, name, options)  # noqa: E731
    else:
        make, num_columns, label = OBJECTS[case]
        build = lambda: make(model, guides)  # noqa: E731
    batch = {column: model.preprocess(rows) for column, rows in texts(num_columns).items()}
    batch = {column: {key: of[key] for key in ("input_ids", "attention_mask")} for column, of in batch.items()}
    torch.manual_seed(5)
    if is_object:
        own = own_parameters(given := build(), model, *guides.values())
        ours = as_loss(given, model).double()
        assert ours.loss is given and {*own.values()} == {*ours.parameters()}
    else:
        ours = SentenceTransformersLoss(name, WIDTH, tokenizer=model.tokenizer, max_length=24, **options).double()
    torch.manual_seed(5)
    reference = build().double()
    targets = ({} if label is None else {"label": label}) | (
        ours.targets_of(batch) if hasattr(ours, "targets_of") else {}
    )

    model.zero_grad()
    for parameter in ours.parameters():  # of the batch before, in an update of several
        parameter.grad = torch.ones_like(parameter)
    step = cached_step(
        lay_out(batch, ChunkLimits(max_rows=3)),
        encode=lambda chunk: model(dict(chunk.features))["sentence_embedding"],
        score=lambda embeddings: ours(embeddings, targets=targets),
        loss_parameters=ours.parameters(),
    )
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    found |= {f"loss.{n}": p.grad - 1 for n, p in ours.loss.named_parameters()}
    assert step.num_chunks > num_columns and len(found) > 20 and sum(g.abs().sum() for g in found.values()) > 0

    model.zero_grad()
    value = reference([dict(features) for features in batch.values()], label)
    value = sum(value.values()) if isinstance(value, dict) else value
    value.backward()
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    expected |= {f"loss.{n}": p.grad for n, p in own_parameters(reference, model, *guides.values()).items()}
    assert found.keys() == expected.keys()
    torch.testing.assert_close(step.loss, value.detach(), rtol=1e-12, atol=0)
    scale = torch.cat([g.flatten() for g in expected.values()]).norm()
    for key, gradient in expected.items():
        assert (found[key] - gradient).norm() <= 1e-11 * scale, key


# a loss of a MultiVectorEncoder, columns, label
OF_TOKENS = [
    (lambda m: multi_vector.MultiVectorMultipleNegativesRankingLoss(m, score_mini_batch_size=4), 4, None),
    (lambda m: multi_vector.MultiVectorMultipleNegativesRankingLoss(
        m, mini_batch_size=3, similarity_fct=XTRScores(top_k=6), gather_across_devices=True), 3, None),
    (lambda m: multi_vector.CachedMultiVectorMultipleNegativesRankingLoss(m, mini_batch_size=3, scale=0.5), 3, None),
    (lambda m: multi_vector.MultiVectorMarginMSELoss(m), 3, RATED),
    (lambda m: multi_vector.MultiVectorMarginMSELoss(m, mini_batch_size=2), 5, SCORES),
    (lambda m: multi_vector.MultiVectorDistillKLDivLoss(m, temperature=2.0), 5, SCORES),
]  # fmt: skip


@pytest.mark.parametrize("build, num_columns, label", OF_TOKENS)
@pytest.mark.parametrize("in_lists", [False, True])
def test_losses_of_token_vectors_are_those_of_sentence_transformers(tokens, build, num_columns, label, in_lists):
    """Columns of other lengths, and negatives as a column each or end to end."""
    features = {name: tokens.preprocess(rows) for name, rows in texts(num_columns).items()}
    tasks = {name: "document" if name != "query" else "query" for name in features}
    outputs = {name: tokens(dict(of), task=tasks[name]) for name, of in features.items()}
    own = {name: {"vectors": o["token_embeddings"], "mask": o["attention_mask"]} for name, o in outputs.items()}
    assert len({of["mask"].shape[1] for of in own.values()}) > 1, "lengths"
    if in_lists and num_columns > 3:
        names, width = list(own)[2:], max(of["mask"].shape[1] for of in own.values())
        wide = {
            n: {k: pad(v, (0,) * 2 * (v.dim() - 2) + (0, width - v.shape[1])) for k, v in own.pop(n).items()}
            for n in names
        }
        own["negative"] = {k: torch.stack([wide[n][k] for n in names], 1).flatten(0, 1) for k in ("vectors", "mask")}
    trained, targets = [*tokens.parameters()], {} if label is None else {"label": label}
    ours = as_loss(build(tokens), tokens)
    assert (ours.similarity, ours.normalize, [*ours.parameters()]) == ("maxsim", False, [])
    value = ours(own, targets=targets).loss
    found = torch.autograd.grad(value, trained, allow_unused=True)
    tokens.zero_grad()
    reference = build(tokens)([{**of, "task": tasks[name]} for name, of in features.items()], label)
    reference.backward()
    torch.testing.assert_close(value.detach(), reference.detach(), rtol=1e-12, atol=0)
    assert sum(p.grad is not None and p.grad.abs().max() > 1e-9 for p in trained) > 20
    scale = torch.cat([p.grad.flatten() for p in trained if p.grad is not None]).norm()
    for parameter, gradient in zip(trained, found, strict=True):
        if parameter.grad is not None:
            assert (gradient - parameter.grad).norm() <= 1e-11 * scale


def test_a_loss_is_given_in_every_form_of_their_trainer(model, tokens):
    infonce, plain = InfoNCELoss(), torch.nn.Linear(2, 2)
    assert as_loss(infonce, model) is infonce and as_loss(None, plain) is None
    function = lambda own, everyone=None, row_offset=0, ids=None: 0.0  # noqa: E731
    assert as_loss(function, model) is function
    assert as_loss(None, model).name == "CoSENTLoss" and as_loss(None, tokens).similarity == "maxsim"
    for make in (losses.CoSENTLoss, lambda model: losses.CoSENTLoss(model), partial(losses.CoSENTLoss, scale=3.0)):
        made = as_loss(make, model)
        assert isinstance(made, SentenceTransformersLoss) and as_loss(made, model) is made
    cached = losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=8)
    of_tokens = partial(losses.CachedMultipleNegativesRankingLoss, mini_batch_size=2, mini_batch_num_tokens=64)
    several = as_loss({"a": cached, "b": cached, "c": losses.CoSENTLoss, "d": infonce, "e": of_tokens}, model)
    assert isinstance(several, LossPerSource) and several.of("a") is several.of("b") and several.of("d") is infonce
    assert asked_chunks(several) == (8, 64) and asked_chunks(infonce) == asked_chunks(function) == (None, None)
    added = as_loss(SumOfLosses({"a": losses.CoSENTLoss(model), "b": infonce}), model)
    assert isinstance(added.losses["of_a"], SentenceTransformersLoss) and added.losses["of_b"] is infonce


def test_a_loss_that_was_given_before_is_given_again(model, guides):
    """With another trainer, and inside of another loss: its stand-in is the one of the loss around it."""
    rows = {name: torch.randn(5, WIDTH, dtype=torch.float64) for name in COLUMNS[:2]}
    inner = losses.GISTEmbedLoss(model, guides["shorter"])
    first, again = as_loss(inner, model), as_loss(inner, model)
    assert again._guides == first._guides and again._guides[0].must_retokenize
    inner = losses.MultipleNegativesRankingLoss(model)
    value = as_loss(inner, model)(rows).loss
    around = as_loss(losses.MatryoshkaLoss(model, inner, [8]), model)
    short = {name: of[:, :8] for name, of in rows.items()}
    torch.testing.assert_close(around(rows).loss, as_loss(inner, model)(short).loss)
    assert abs(around(rows).loss - value) > 1e-3 and isinstance(model, SentenceTransformer)


def test_a_loss_that_was_given_goes_to_no_other_trainer(model, guides):
    """It has no model, and its rows are those of all processes already."""
    features = [model.preprocess(rows) for rows in texts(2).values()]
    for loss in (losses.TripletLoss(model), losses.GISTEmbedLoss(model, guides["same"])):
        as_loss(loss, model)
        with pytest.raises(UsageError, match="given to DistTrainer, which took its model out"):
            loss(features, None)


def test_an_unknown_loss_is_taken_for_what_costs_most(model):
    unknown, known = as_loss(Mixed(model), model), as_loss(losses.TripletLoss(model), model)
    for name in ("compares_all_pairs", "reads_lengths", "takes_negatives_as_columns"):
        assert getattr(unknown, name), name
    assert not known.compares_all_pairs and unknown.num_columns is None and not unknown.rates_pairs

    class Mine(losses.CoSENTLoss):
        pass

    mine = as_loss(Mine(model), model)
    assert as_loss(losses.BatchAllTripletLoss(model), model).num_columns == 1
    plain, cached = losses.MultipleNegativesRankingLoss(model), losses.CachedMultipleNegativesRankingLoss(model)
    assert as_loss(plain, model).compares_all_pairs and not as_loss(cached, model).compares_all_pairs
    assert mine.rates_pairs and mine.num_columns == 2 and not mine.compares_all_pairs


class Hidden(torch.nn.Module):
    def __init__(self, model, reads):
        super().__init__()
        self.model, self.reads = model, reads

    def forward(self, sentence_features, labels):
        return self.reads(self.model, sentence_features)


class Inside(torch.nn.Module):
    def __init__(self, model, loss):
        super().__init__()
        self.inside, self.model = loss, model

    def forward(self, sentence_features, labels):
        return self.inside(sentence_features, labels)


@pytest.mark.parametrize("make, words", [
    (lambda m: losses.AdaptiveLayerLoss(m, losses.CoSENTLoss(m)), "AdaptiveLayerLoss can .*: it runs the model"),
    (lambda m: losses.Matryoshka2dLoss(m, losses.CoSENTLoss(m), [8]), "Matryoshka2dLoss can not be trained here"),
    (losses.ContrastiveTensionLoss, "ContrastiveTensionLoss can not be .*: it trains a second copy"),
    (losses.ContrastiveTensionLossInBatchNegatives, "trains a second copy"),
    (lambda m: Inside(m, losses.ContrastiveTensionLoss(m)), "trains a second copy"),
    (lambda m: losses.MatryoshkaLoss(m, losses.CoSENTLoss(m), [8, 4], n_dims_per_step=1), "lets every process draw"),
    (lambda m: Inside(m, losses.CachedMultipleNegativesRankingLoss(m)), "stands inside of Inside and runs the model"),
    (lambda m: Inside(m, m[0]), "Inside holds 'inside', which is of the model"),
    (lambda m: Hidden(m, lambda m, f: sum(m.parameters())), "Hidden must see .*: it asks for model.parameters"),
    (lambda m: Hidden(m, lambda m, f: m.encode("a")), "it asks for model.encode"),
    (lambda m: Hidden(m, lambda m, f: f[0]["input_ids"].sum()), "embeddings only: 'input_ids'"),
    (losses.MultipleNegativesRankingLoss, "Expected at least 2 embeddings, got 1"),
    (losses.BatchHardTripletLoss, "BatchHardTripletLoss needs a label of every row .the number of the text's class."),
])  # fmt: skip
def test_an_object_that_must_see_the_model_is_refused(model, make, words):
    with pytest.raises(UsageError, match=words):
        as_loss(make(model), model)({"text": torch.randn(3, WIDTH, dtype=torch.float64)})


@pytest.mark.parametrize("weights", [None, [2.0, 1.0, 0.5]])
def test_dimensions_of_infonce_are_those_of_matryoshka_loss(model, weights):
    """The sum over the widths, each times its weight; 1 where none is given."""
    draw, dims = torch.Generator().manual_seed(3), [32, 16, 8]
    rows = {name: torch.randn(7, WIDTH, generator=draw, dtype=torch.float64) for name in ("query", "positive", "hard")}
    given = {name: one.requires_grad_() for name, one in rows.items()}
    ours = InfoNCELoss(0.05, matryoshka_dims=dims, matryoshka_weights=weights)(given).loss
    inner = {"loss": "MultipleNegativesRankingLoss", "loss_options": {"scale": 20.0}}
    reference = SentenceTransformersLoss(
        "MatryoshkaLoss", WIDTH, matryoshka_dims=dims, matryoshka_weights=weights, **inner
    )
    expected = reference(given).loss
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=0)
    gradients = (torch.autograd.grad(one, [*given.values()]) for one in (ours, expected))
    for found, wanted in zip(*gradients, strict=True):
        assert wanted.abs().max() > 0
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


def test_every_loss_of_sentence_transformers_is_compared_or_refused():
    known = {name for name in losses.__all__ if "Loss" in name and not name.endswith("Function")}
    refused = set(by_name.REFUSED) - {"sparse"}  # a loss that this project had
    assert known == {name for name, *_ in CASES} | refused
    assert known - refused == {*by_name.LABELS, *by_name.WITHOUT_LABEL, by_name.MATRYOSHKA} - {*by_name.GROUPS}


def test_a_guide_reads_every_row_once_and_is_no_part_of_the_loss(guides, monkeypatch):
    monkeypatch.setattr("hf_dist_ext.training.sentence_losses.GUIDE_WIDTH", 8)
    guide, seen = guides["same"], []
    loss = SentenceTransformersLoss("GISTEmbedLoss", WIDTH, tokenizer=guide.tokenizer, max_length=24, guide=guide)
    rows_of = {
        name: [row if i % 2 else f"{row} {row}" for i, row in enumerate(rows)] for name, rows in texts(3, 70).items()
    }
    batch = {name: guide.tokenizer(rows, padding=True, return_tensors="pt") for name, rows in rows_of.items()}
    with_hook = guide.register_forward_hook(lambda module, given, output: seen.append(given[0]["input_ids"].shape))
    of_guide = loss.targets_of(batch)
    with_hook.remove()
    assert sum(rows for rows, _ in seen) == 3 * 70 and max(rows for rows, _ in seen) == 32
    assert max(rows * tokens for rows, tokens in seen) == 32 * 8 and max(tokens for _, tokens in seen) > 8
    padded = sum(features["input_ids"].numel() for features in batch.values())
    assert sum(rows * tokens for rows, tokens in seen) < 0.9 * padded  # rows of about one length go together
    assert {name: rows.shape for name, rows in of_guide.items()} == dict.fromkeys(batch, (70, WIDTH))
    assert not list(loss.parameters()) and not loss.state_dict() and not of_guide["query"].requires_grad


def test_a_guide_with_another_vocabulary_reads_no_padding(guides):
    """Also where the model pads with a token that is a word to its tokenizer, as CLIP's "!" is."""
    guide, tokenizer = guides["shorter"], tiny_tokenizer()
    loss = SentenceTransformersLoss("GISTEmbedLoss", WIDTH, tokenizer=tokenizer, max_length=24, guide=guide)
    rows = {"query": ["read", "sort by"], "positive": ["read file", "date"]}
    batch = {
        name: tokenizer(one, padding="max_length", max_length=9, return_tensors="pt") for name, one in rows.items()
    }
    for features in batch.values():
        features["input_ids"][features["attention_mask"] == 0] = tokenizer.convert_tokens_to_ids("text")
    found = loss.targets_of({name: dict(features) for name, features in batch.items()})
    for name, texts in rows.items():
        torch.testing.assert_close(found[name], guide.encode(texts, convert_to_tensor=True))


def test_negatives_in_lists_are_columns_of_their_own():
    draw = torch.Generator().manual_seed(0)
    query, positive, first, second = (torch.randn(5, WIDTH, generator=draw) for _ in range(4))
    loss, targets = SentenceTransformersLoss("DistillKLDivLoss", WIDTH), {"label": SCORES[:5, :3]}
    apart = loss({"query": query, "positive": positive, "n1": first, "n2": second}, targets=targets)
    listed = {"query": query, "positive": positive, "negative": torch.stack([first, second], 1).flatten(0, 1)}
    torch.testing.assert_close(loss(listed, targets=targets).loss, apart.loss)
    with pytest.raises(UsageError, match="has 9 rows for 5 anchors"):
        loss(listed | {"negative": listed["negative"][:9]}, targets=targets)
    collator = ContrastiveCollator(tiny_tokenizer(), [*COLUMNS], same_number_of_negatives=True)
    rows = [
        {"query": "add", "positive": "a", "negative": ["b", "c"]},
        {"query": "b", "positive": "c", "negative": ["a", ""]},
    ]
    with pytest.raises(UsageError, match="one row has 2 negatives and another one 1"):
        collator(rows)


@pytest.mark.parametrize("is_sum", [False, True])
def test_negatives_of_one_row_are_never_those_of_another(tmp_path, is_sum):
    """A batch of two rows, with one negative and three: two for each, if nobody counts them by row."""
    rows = [
        {"query": "read file", "positive": "read", "negative": ["list"]},
        {"query": "sort by key", "positive": "sort", "negative": ["date", "text", "lines"]},
    ]
    embeddings = embedding_model(model_config("bert", **NO_DROPOUT))
    args = DistTrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=2, max_steps=1, report_to=[], disable_tqdm=True,
        use_cpu=True, save_strategy="no", no_duplicates_in_batch=False,
    )  # fmt: skip
    triplets = SentenceTransformersLoss("TripletLoss", WIDTH)

    def train(loss: torch.nn.Module) -> None:
        collator = ContrastiveCollator(tiny_tokenizer(), COLUMNS)
        DistTrainer(embeddings, args, train_dataset=Dataset.from_list(rows), data_collator=collator, loss=loss).train()

    with pytest.raises(UsageError, match="one row has 3 negatives and another one 1"):
        train(SumOfLosses({"infonce": InfoNCELoss(), "triplets": triplets}) if is_sum else triplets)
    train(InfoNCELoss())  # which asks of no negative whose it is


@pytest.mark.parametrize("by_name", [False, True])
def test_negatives_in_lists_of_a_model_of_theirs_are_never_those_of_another_row(model, tmp_path, by_name):
    """Four rows with 1, 2, 0 and 1 negatives: one for each, if nobody counts them by row."""
    rows = Dataset.from_dict(texts(2, 4) | {"negatives": [["add"], ["list", "file"], [], ["date"]]})
    args = DistTrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=4, max_steps=1, report_to=[], disable_tqdm=True,
        use_cpu=True, save_strategy="no",
    )  # fmt: skip
    given = DatasetDict({"code": rows}) if by_name else rows
    with pytest.raises(UsageError, match="one row has . negatives and another one 0"):
        DistTrainer(model, args, train_dataset=given, loss=losses.TripletLoss(model)).train()


def test_rows_with_fewer_negatives_are_refused_before_training():
    """Where the loss takes the first, second, ... negatives of all rows as a column each."""
    rows = Dataset.from_dict(
        {"query": ["a"] * 4, "positive": ["b"] * 4, "negative": [["c", "d"], ["c"], [], ["", "d"]]}
    )
    said = 'row 1 .*, column "negative": 1 negative.s., and row 0 has 2; .*: 3 .1, 2, 3., more than max_bad_rows=2'
    check = RowCheck("rows", may_be_bad=2)
    prepare(rows, RunConfig(loss="MultipleNegativesRankingLoss"), check)
    with pytest.raises(UsageError, match=said):
        check.finish()
    for fit, loss in ((rows.select([0, 0]), "MultipleNegativesRankingLoss"), (rows, "infonce"), (rows, "siglip")):
        assert prepare(fit, RunConfig(loss=loss), RowCheck("rows")).column_names == ["query", "positive", "negative"]


def test_rows_of_a_stream_that_share_a_label_with_a_held_out_one_are_trained_on(tmp_path):
    rows = [{"query": f"q{i}", "positive": f"p{i}", "label": i % 2} for i in range(12)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run = RunConfig(dataset_name=str(tmp_path / "rows.jsonl"), loss="CoSENTLoss", streaming=True, eval_holdout=4)
    train, held = (sorted(row["query"] for row in split) for split in load_datasets(run))
    assert len(held) == 4 and len(train) == 8 and not {*train} & {*held}


@pytest.mark.parametrize("values, shape", [
    ([1, 0, 1], (3,)), ([True, False], (2,)), ([0.5, 1], (2,)), ([[1, 2], [3.0, 4.0]], (2, 2)),
    ([[[1.0], [2.0]]], (1, 2, 1)),
])  # fmt: skip
def test_labels_travel_with_the_batch(values, shape):
    """In one dtype, whatever the numbers: another process's rows may have whole ones where this one's have none."""
    collator = ContrastiveCollator(tiny_tokenizer(), ["query", "positive"], label_column="score")
    batch = collator([{"query": "add", "positive": "a", "score": value} for value in values])
    columns, facts = split(batch)
    assert list(columns) == ["query", "positive"]
    assert facts.targets["label"].shape == shape and facts.targets["label"].dtype == torch.float32
    assert facts.targets["label"].tolist() == values
    for bad in ([1.0, [2.0]], ["high", "low"], [None, 1.0]):
        with pytest.raises(UsageError, match='Column "score": a label must be a number'):
            collator([{"query": "add", "positive": "a", "score": value} for value in bad])


@pytest.mark.parametrize("name, label, options, words", [
    ("EmbedDistillLoss", torch.ones(3, 6), {}, "EmbedDistillLoss: The size of tensor"),
    ("SoftmaxLoss", torch.arange(3), {"embedding_dimension": 8, "num_labels": 3}, "cannot be multiplied"),
    ("SoftmaxLoss", torch.arange(3), {"embedding_dimension": 4, "num_labels": 2}, "Target 2 is out of bounds"),
])  # fmt: skip
def test_labels_that_do_not_fit_are_one_line(name, label, options, words):
    embeddings = {column: torch.randn(3, 4) for column in ("query", "positive")}
    with pytest.raises(UsageError, match=words):
        SentenceTransformersLoss(name, 4, **options)(embeddings, targets={"label": label})


def test_what_breaks_inside_of_a_loss_stays_what_it_is():
    class Broken(torch.nn.Module):
        def __init__(self, model):
            super().__init__()

        def forward(self, features, labels):
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.cuda.OutOfMemoryError):
        SentenceTransformersLoss(Broken, 4)({column: torch.randn(3, 4) for column in ("query", "positive")})


def test_a_class_is_a_whole_number():
    embeddings = {name: torch.randn(3, 4) for name in ("query", "positive")}
    loss = SentenceTransformersLoss("SoftmaxLoss", 4, embedding_dimension=4, num_labels=3)
    whole, of_floats = (loss(embeddings, targets={"label": torch.tensor(of)}).loss for of in ([2, 0, 1], [2.0, 0, 1]))
    assert torch.equal(whole, of_floats) and whole > 0
    with pytest.raises(UsageError, match="a row's label is 0.7, and a class is a whole number"):
        loss(embeddings, targets={"label": torch.tensor([0.7, 0, 1])})


def test_rated_pairs_are_evaluated_as_by_sentence_transformers(model):
    rows = texts(2, 20)
    scores = [round(i * 0.37 % 1, 1) for i in range(20)]
    expected = EmbeddingSimilarityEvaluator(*rows.values(), scores, main_similarity="cosine")(model)["spearman_cosine"]
    embeddings = tuple(model.encode(column) for column in rows.values())

    class Prediction:
        predictions, label_ids = embeddings, torch.tensor(scores).numpy()

    assert metrics.metrics_of_rated_pairs(Prediction)["spearman_cosine"] == pytest.approx(expected, abs=1e-6)
    Prediction.label_ids = torch.ones(20).numpy()
    assert metrics.metrics_of_rated_pairs(Prediction) == {"spearman_cosine": 0.0}


@pytest.mark.parametrize("build, words", [
    (lambda: SentenceTransformersLoss("CosentLoss", 4), "has no loss called CosentLoss. It has AnglELoss"),
    (lambda: SentenceTransformersLoss("CoSENTLoss", 4, scales=2), "has no option scales. It has scale, sim"),
    (lambda: SentenceTransformersLoss("CoSENTLoss", 4, similarity_fct="cosine"), "is no name of such a function"),
    (lambda: SentenceTransformersLoss("TripletLoss", 4, distance_metric="cosine"), "There are COSINE, EUCLIDEAN"),
    (lambda: SentenceTransformersLoss("MultipleNegativesRankingLoss", 4, scale=-1), "Scale must be a positive value"),
    (lambda: SentenceTransformersLoss("GISTEmbedLoss", 4, guide="/nowhere"), "the guide '/nowhere' can not be loaded"),
    (lambda: SentenceTransformersLoss("MatryoshkaLoss", 4, matryoshka_dims=[2]), "is around a loss: give loss"),
    (lambda: SentenceTransformersLoss("MatryoshkaLoss", 4, loss="CoSENTLoss", matryoshka_dims=[2], n_dims_per_step=1),
     "lets every process draw other dimensions"),
    (lambda: SentenceTransformersLoss("CoSENTLoss", 4)({"a": torch.ones(2, 4), "b": torch.ones(2, 4)}),
     "CoSENTLoss needs a label of every row"),
    (lambda: SentenceTransformersLoss("TripletLoss", 4)({"a": torch.ones(2, 4), "b": torch.ones(2, 4)}),
     "TripletLoss: it reads 3, and was given 2 texts of a row"),
    (lambda: SentenceTransformersLoss("TripletLoss", 4)({name: torch.ones(2, 4) for name in "abcd"}),
     "TripletLoss: it reads 3, and was given 4 texts of a row"),
    (lambda: SentenceTransformersLoss(losses.DenoisingAutoEncoderLoss, 4), "must see the model itself"),
])  # fmt: skip
def test_what_a_loss_can_not_be_is_refused(build, words):
    with pytest.raises(UsageError, match=words):
        build()


# ---- from a run file ----

PAIRS = {"columns": {"query": "question", "positive": "answer"}, "learnable_temperature": ...}


@pytest.mark.parametrize("options, words", [
    ({"loss": "CosentLos"}, "is no loss"),
    ({"loss": "infonc"}, 'Closest: "infonce"'),
    ({"loss": "AdaptiveLayerLoss"}, "can not be trained here: it runs the model's layers itself"),
    ({"loss": "CoSENTLoss", "temperature": 0.1}, "temperature=0.1 is an option of infonce"),
    ({"loss": "CoSENTLoss", "matryoshka_dims": [8]}, 'Write "loss": "MatryoshkaLoss", .*"loss": "CoSENTLoss"'),
    ({"loss": "CoSENTLoss", "cross_device_negatives": False}, "cross_device_negatives=false is an option of infonce"),
    ({"loss_options": {"scale": 2}}, "the options of infonce are fields of the run file"),
    ({"label_column": "question"}, "infonce reads no label"),
    ({"loss": "siglip", "label_column": "question"}, "siglip reads no label"),
    ({"loss": "siglip", "symmetric": True}, "symmetric=true is an option of infonce"),
    ({"loss": "siglip", "loss_options": {"temperature": 2}}, "siglip has no option temperature. It has scale, bias"),
    ({"loss": "TripletLoss", "label_column": "question"}, "TripletLoss reads no label"),
    ({"loss": "MatryoshkaLoss", "loss_options": {"matryoshka_dims": [8]}}, "loss_options.loss is null"),
    ({"loss": "MatryoshkaLoss", "loss_options": {"loss": "Matryoshka2dLoss"}}, "loss_options.loss=.*layers itself"),
    ({"loss": "MatryoshkaLoss", "loss_options": {"loss": "SoftmaxLoss", "matryoshka_dims": [8]}},
     "around SoftmaxLoss"),
    ({"loss": "MatryoshkaLoss", "loss_options": {"loss": "EmbedDistillLoss", "loss_options": {"projection_dim": 5}}},
     "around EmbedDistillLoss with a layer of one width"),
    ({"loss": None, "label_column": "question"}, "needs a loss over embeddings"),
    ({"loss": "CoSENTLoss"}, "CoSENTLoss needs a label of every row .* has no column called label or labels"),
    ({"loss": "CoSENTLoss", "label_column": "questions"}, 'has no column "questions". .* Closest: "question"'),
    ({"loss": "CoSENTLoss", "label_column": "wrong"}, "holds List; a label must be a number"),
    ({"loss": "TripletLoss", "loss_options": {"margin": 2}}, "TripletLoss has no option margin"),
])  # fmt: skip
def test_a_run_file_that_names_a_wrong_loss_is_told_why(main, run_file, capsys, options, words):  # noqa: F811
    with pytest.raises(SystemExit) as left:
        main(["--config", run_file(**PAIRS | options)])
    assert left.value.code == 2
    error = capsys.readouterr().err
    assert re.search(words, " ".join(error.split())), error


def rated(run_file, tmp_path, **more) -> str:  # noqa: F811
    path = run_file(**PAIRS | {"max_steps": 2, "save_strategy": "no"} | more)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    rows = [{"question": r["question"], "answer": r["answer"], "score": i % 5 / 4} for i, r in enumerate(rows)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return path


def test_a_run_file_trains_a_loss_by_name_with_its_labels(main, run_file, tmp_path):  # noqa: F811
    options = {"loss": "CoSENTLoss", "loss_options": {"scale": 20.0}, "matryoshka_dims": [16, 8]}
    main(["--config", rated(run_file, tmp_path, loss="MatryoshkaLoss", loss_options=options)])
    report = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert -1 <= report["before"]["spearman_cosine"] <= 1 and "mrr@10" not in report["after"]
    folder = SentenceTransformer(str(tmp_path / "out"))
    assert folder.get_embedding_dimension() == 16


def test_a_run_file_trains_the_sigmoid_loss_and_keeps_its_scale_and_bias(main, run_file, tmp_path):  # noqa: F811
    of_loss = {"scale": 5.0, "bias": -3.0}
    options = {"loss": "siglip", "loss_options": of_loss, "learnable_temperature": ...}
    main(["--config", run_file(**options, learning_rate=0.1, max_steps=4)])
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    found = [(line["scale"], line["bias"]) for line in lines if "scale" in line]
    assert found[0] == pytest.approx((5.0, -3.0)) and len(set(found)) == 4
    saved = load_file(tmp_path / "out" / "checkpoint-4" / "loss.safetensors")
    assert saved.keys() == {"log_scale", "bias"} and abs(saved["bias"] - found[-1][1]) > 1e-3


def test_parameters_of_a_loss_are_saved_once_and_read_back(tmp_path):
    first, second = (SentenceTransformersLoss("EmbedDistillLoss", WIDTH, projection_dim=5) for _ in range(2))
    save_loss(first, tmp_path)
    load_loss(second, str(tmp_path))
    state = first.state_dict()
    assert len(state) == len(list(first.parameters())) > 0
    assert all(second.state_dict()[name].equal(value) for name, value in state.items())


def test_a_loss_of_two_sources_is_saved(tmp_path):
    first, second = (as_loss({"a": loss, "b": loss}, None) for loss in (InfoNCELoss(t, True) for t in (0.1, 0.2)))
    save_loss(first, tmp_path)
    load_loss(second, str(tmp_path))
    assert all(second.state_dict()[name].equal(value) for name, value in first.state_dict().items())


@pytest.mark.parametrize("kind, normalizes", [("plain", False), ("pooled", False), ("normalized", True)])
@pytest.mark.parametrize("name", ["TripletLoss", "SoftmaxLoss", "CoSENTLoss"])
def test_lengths_stay_where_the_loss_reads_them_unless_the_folder_normalises(
    main,  # noqa: F811
    run_file,  # noqa: F811
    tmp_path,
    name,
    kind,
    normalizes,
):
    """A plain model, and folders of sentence-transformers with and without Normalize: the loss is theirs."""
    torch.manual_seed(0)
    backbone, folder = BertModel(BertConfig(**model_config("bert", **NO_DROPOUT))), str(tmp_path / "model")
    backbone.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    if kind != "plain":
        chain = SentenceTransformer(folder, device="cpu")
        modules = [*chain, *([Normalize()] if normalizes else [])]
        SentenceTransformer(modules=modules, device="cpu").save_pretrained(folder := str(tmp_path / "chain"))
    rows = [{"query": f"read {w}", "positive": f"a text {w} {w}", "negative": "sort", "label": i % 2}
            for i, w in enumerate(WORDS[:8])]  # fmt: skip
    options, fields = {}, {"label_column": "label"}
    if name == "TripletLoss":
        fields = {"label_column": ...}
    else:
        rows = [{key: value for key, value in row.items() if key != "negative"} for row in rows]
    if name == "SoftmaxLoss":
        options = {"num_labels": 2, "embedding_dimension": WIDTH}
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    fields |= {"model_name_or_path": folder, "loss": name, "loss_options": options, "max_steps": 1}
    fields |= {"per_device_train_batch_size": 8}
    empty = dict.fromkeys(
        ("model_config", "tokenizer_name", "eval_holdout", "prompts", "columns", "projection_dim",
         "learnable_temperature"), ...
    )  # fmt: skip
    main(["--config", run_file(**fields, **empty, learning_rate=0.0, seed=1)])
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    (found,) = (line["loss"] for line in lines if "loss" in line)

    model = SentenceTransformer(folder, device="cpu")
    reference = theirs(model, name, options)
    if name == "SoftmaxLoss":
        saved = load_file(tmp_path / "out" / "checkpoint-1" / "loss.safetensors")
        reference.classifier.load_state_dict({key.rpartition(".")[2]: value for key, value in saved.items()})
    texts_of = [[row[column] for row in rows] for column in COLUMNS if column in rows[0]]
    labels = torch.tensor([row["label"] for row in rows])
    expected = reference([model.preprocess(column) for column in texts_of], labels).item()
    assert found == pytest.approx(expected, rel=1e-4)
    is_cosine = name == "CoSENTLoss"
    assert [type(module).__name__ for module in SentenceTransformer(str(tmp_path / "out"), device="cpu")] == [
        "Transformer", "Pooling", *["Normalize"] * (normalizes or is_cosine)
    ]  # fmt: skip


def test_losses_of_sentence_transformers_inside_of_ours_are_made_into_ours_and_have_one_guide(model, guides):
    gist = {name: losses.GISTEmbedLoss(model, guide) for name, guide in guides.items()}
    assert not scores_embeddings(SumOfLosses(gist)), "of a model_init they are made when the model is"
    with pytest.raises(UsageError, match="same and shorter both have a guide"):
        as_loss(SumOfLosses(gist), model)
    of = as_loss(LossPerSource({"a": losses.CoSENTLoss(model)}, losses.MultipleNegativesRankingLoss(model)), model)
    assert all(isinstance(one, SentenceTransformersLoss) for one in of.losses.values())

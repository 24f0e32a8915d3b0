"""Training scripts as the pages of sentence-transformers write them, on tiny models that lie in the working folder.

Each is a function of a trainer's class and of the class of its arguments, and returns the trainer. `store` makes the
folders from which they load models. A dataset is one global batch, so that all trainers see the same batches.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import Dataset, DatasetDict, Features, Image, Value
from peft import LoraConfig
from sentence_transformers import (
    MultiVectorEncoder,
    MultiVectorEncoderTrainer,
    MultiVectorEncoderTrainingArguments,
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.base.modules import Dense, Module, Router, Transformer
from sentence_transformers.base.sampler import BatchSamplers, MultiDatasetBatchSamplers
from sentence_transformers.multi_vector_encoder.losses import (
    CachedMultiVectorMultipleNegativesRankingLoss,
    MultiVectorMultipleNegativesRankingLoss,
)
from sentence_transformers.sentence_transformer import evaluation, losses
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, StaticEmbedding
from sentence_transformers.sentence_transformer.readers import InputExample
from torch.utils.data import DataLoader

from hf_dist_ext.engine.late_interaction import LateInteractionLoss
from tests.retrieval_data import texts
from tests.sentence_models import chat_model, picture_model, pictures, text_model, vision_language_model
from tests.tiny_models import tiny_tokenizer

ROWS = 8  # of a dataset, and of the global batch
WIDTH = 32  # of the models
SCORES = [0.1, 0.9, 0.5, 0.4, 1.0, 0.0, 0.3, 0.7]
CLASSES = [0, 1, 1, 0, 2, 2, 0, 1]
OF_SEVERAL_VECTORS = (MultiVectorEncoderTrainer, MultiVectorEncoderTrainingArguments)


class Script(NamedTuple):
    """`trainer`, `arguments`: of sentence-transformers. `packs`: the model takes rows end to end."""

    run: Callable[[Any, Any], Any]
    trainer: type = SentenceTransformerTrainer
    arguments: type = SentenceTransformerTrainingArguments
    packs: bool = True


SCRIPTS: dict[str, Script] = {}


def script(name: str | None = None, *classes: type, packs: bool = True, **options: Any):
    """Lists a function under its name, or under another one with some of its arguments given."""

    def listed(function: Callable) -> Callable:
        run = lambda trainer, arguments: function(trainer, arguments, **options)  # noqa: E731
        of_theirs = dict(zip(("trainer", "arguments"), classes, strict=False))
        SCRIPTS[name or function.__name__] = Script(run, packs=packs, **of_theirs)
        return function

    return listed


def store(folder: Path) -> None:
    parts = folder / "parts"
    models = {"bert": text_model(parts / "1"), "teacher": text_model(parts / "2", seed=7)}
    models |= {"chat": chat_model(parts / "3"), "clip": picture_model(parts / "4")}
    for name, model in models.items():
        model.double().save_pretrained(str(folder / name), create_model_card=False)


def rows(columns: str, seed: int = 0, count: int = ROWS, **others: Any) -> Dataset:
    """Of different texts in these columns, and what else is given."""
    names = columns.split()
    drawn = texts(count * len(names), seed)
    return Dataset.from_dict({name: drawn[i :: len(names)] for i, name in enumerate(names)} | others)


# ---- losses ----


@script()
def pairs(Trainer, Arguments):
    model = SentenceTransformer("bert")
    loss = losses.MultipleNegativesRankingLoss(model)
    return Trainer(model=model, args=Arguments(), train_dataset=rows("anchor positive"), loss=loss)


@script()
def triplets(Trainer, Arguments):
    model = SentenceTransformer("bert")
    loss = losses.TripletLoss(model=model)
    return Trainer(model, Arguments(), train_dataset=rows("anchor positive negative"), loss=loss)


@script()
def several_negatives(Trainer, Arguments):
    model = SentenceTransformer("bert")
    train_dataset = rows("query answer negative_1 negative_2 negative_3")
    return Trainer(model, Arguments(), train_dataset, loss=losses.MultipleNegativesRankingLoss)


@script()
def the_default_loss(Trainer, Arguments):
    return Trainer(SentenceTransformer("bert"), Arguments(), rows("sentence1 sentence2", score=SCORES))


@script("cosent", loss=losses.CoSENTLoss, label="score", labels=SCORES)
@script("cosine similarity", loss=losses.CosineSimilarityLoss, label="scores", labels=SCORES)
@script("contrastive", loss=losses.ContrastiveLoss, label="label", labels=[label % 2 for label in CLASSES])
@script("online contrastive", loss=losses.OnlineContrastiveLoss, label="labels", labels=[i % 2 for i in CLASSES])
def labelled_pairs(Trainer, Arguments, loss, label, labels):
    model = SentenceTransformer("bert")
    train_dataset = rows("sentence1 sentence2", **{label: labels})
    return Trainer(model=model, args=Arguments(), train_dataset=train_dataset, loss=loss(model))


@script()
@script("softmax, of a model that is made", is_made=True)
def softmax(Trainer, Arguments, is_made=False):
    """Its evaluator asks the loss for classes."""
    model = SentenceTransformer("bert")
    train_dataset = rows("premise hypothesis", label=CLASSES)
    loss = losses.SoftmaxLoss(model, embedding_dimension=model.get_embedding_dimension(), num_labels=3)
    examples = [InputExample(texts=[row["premise"], row["hypothesis"]], label=row["label"]) for row in train_dataset]
    evaluator = evaluation.LabelAccuracyEvaluator(DataLoader(examples, batch_size=3), "nli", softmax_model=loss)
    args = Arguments(eval_strategy="steps", eval_steps=1, learning_rate=3.0)
    options = {"model_init": lambda: SentenceTransformer("bert").double()} if is_made else {"model": model}
    return Trainer(args=args, train_dataset=train_dataset, loss=loss, evaluator=evaluator, **options)


@script()
def batch_hard_triplets(Trainer, Arguments):
    model = SentenceTransformer("bert")
    loss = losses.BatchHardTripletLoss(model)
    return Trainer(model=model, args=Arguments(), train_dataset=rows("sentence", label=CLASSES), loss=loss)


@script("matryoshka of rated pairs", loss=losses.CoSENTLoss, columns="sentence1 sentence2", score=SCORES)
@script("matryoshka", loss=losses.MultipleNegativesRankingLoss, columns="anchor positive negative")
@script("matryoshka, cached", loss=losses.CachedMultipleNegativesRankingLoss, columns="anchor positive")
def matryoshka(Trainer, Arguments, loss, columns, **labels):
    model = SentenceTransformer("bert")
    loss = losses.MatryoshkaLoss(model, loss(model), matryoshka_dims=[32, 16, 8], matryoshka_weights=[1, 1, 2])
    return Trainer(model=model, args=Arguments(), train_dataset=rows(columns, **labels), loss=loss)


@script("cached", loss=losses.CachedMultipleNegativesRankingLoss)
@script("cached, symmetric", loss=losses.CachedMultipleNegativesSymmetricRankingLoss)
def cached(Trainer, Arguments, loss):
    model = SentenceTransformer("bert")
    loss = loss(model, mini_batch_size=2)
    return Trainer(model=model, args=Arguments(), train_dataset=rows("anchor positive"), loss=loss)


@script("gist", loss=losses.GISTEmbedLoss)
@script("gist, its own guide", loss=losses.GISTEmbedLoss, is_own=True)
@script("gist, cached", loss=losses.CachedGISTEmbedLoss, mini_batch_size=3)
def gist(Trainer, Arguments, loss, is_own=False, **options):
    model = SentenceTransformer("bert")
    guide = model if is_own else SentenceTransformer("teacher")
    loss = loss(model, guide=guide, temperature=0.1, **options)
    return Trainer(model=model, args=Arguments(), train_dataset=rows("anchor positive negative"), loss=loss)


# ---- distillation ----


@script()
def distilled_vectors(Trainer, Arguments):
    student, teacher = SentenceTransformer("bert"), SentenceTransformer("teacher")
    train_dataset = rows("english other")
    train_dataset = train_dataset.add_column("label", teacher.encode(train_dataset["english"]).tolist())
    return Trainer(student, Arguments(), train_dataset=train_dataset, loss=losses.MSELoss(student))


@script("distilled margins", loss=losses.MarginMSELoss, margins=True)
@script("distilled distributions", loss=losses.DistillKLDivLoss, margins=False)
def distilled_scores(Trainer, Arguments, loss, margins):
    student, teacher = SentenceTransformer("bert"), SentenceTransformer("teacher")

    def compute_labels(batch):
        query, positive, negative = (teacher.encode(batch[name]) for name in ("query", "positive", "negative"))
        scores = [teacher.similarity_pairwise(query, one) for one in (positive, negative)]
        return {"label": scores[0] - scores[1] if margins else torch.stack(scores, dim=1)}

    train_dataset = rows("query positive negative").map(compute_labels, batched=True)
    return Trainer(model=student, args=Arguments(), train_dataset=train_dataset, loss=loss(student))


# ---- prompts and datasets ----


@script("a prompt", prompts="search : ")
@script("a prompt per column", prompts={"anchor": "search : ", "positive": "a text "})
def prompts(Trainer, Arguments, prompts):
    model = SentenceTransformer("bert")
    loss = losses.MultipleNegativesRankingLoss(model)
    return Trainer(model, Arguments(prompts=prompts), train_dataset=rows("anchor positive"), loss=loss)


@script("two datasets")
@script("two datasets, in turn", multi_dataset_batch_sampler=MultiDatasetBatchSamplers.ROUND_ROBIN)
@script("a prompt per dataset", prompts={"qa": "search : ", "sts": "a text "})
@script("a prompt per column of a dataset", prompts={"qa": {"anchor": "search : "}, "sts": {"sentence2": "list "}})
def two_datasets(Trainer, Arguments, **options):
    model = SentenceTransformer("bert")
    train_dataset = DatasetDict({"qa": rows("anchor positive"), "sts": rows("sentence1 sentence2", 5, score=SCORES)})
    loss = {"qa": losses.MultipleNegativesRankingLoss(model), "sts": losses.CoSENTLoss(model)}
    return Trainer(model=model, args=Arguments(**options), train_dataset=train_dataset, loss=loss)


@script()
def stream(Trainer, Arguments):
    model = SentenceTransformer("bert")
    train_dataset = rows("anchor positive", count=6 * ROWS).to_iterable_dataset()
    args = Arguments(gradient_accumulation_steps=2)
    return Trainer(model, args, train_dataset, loss=losses.MultipleNegativesRankingLoss(model))


@script()
def no_duplicates(Trainer, Arguments):
    model = SentenceTransformer("bert")
    whole = rows("anchor positive")
    train_dataset = Dataset.from_list([row for row in whole for _ in range(2)])
    args = Arguments(batch_sampler=BatchSamplers.NO_DUPLICATES)
    return Trainer(model, args, train_dataset, loss=losses.MultipleNegativesRankingLoss(model))


@script()
def learning_rates(Trainer, Arguments):
    model = SentenceTransformer("bert")
    args = Arguments(learning_rate_mapping={r"embeddings": 1e-3, r"layer\.1\.": 0.2})
    return Trainer(model, args, rows("anchor positive"), loss=losses.MultipleNegativesRankingLoss(model))


# ---- models ----


@script("cls", modes="cls")
@script("max", modes="max", packs=False)
@script("mean", modes="mean")
@script("mean over the root of the length", modes="mean_sqrt_len_tokens", packs=False)
@script("weighted mean", modes="weightedmean", packs=False)
@script("last token", modes="lasttoken")
@script("two poolings", modes=("cls", "mean"), packs=False)
@script("without the prompt", modes="mean", include_prompt=False, packs=False)
def pooled(Trainer, Arguments, modes, **options):
    transformer = Transformer("bert")
    pooling = Pooling(transformer.get_embedding_dimension(), pooling_mode=modes, **options)
    model = SentenceTransformer(modules=[transformer, pooling, Normalize()])
    args = Arguments(prompts={"anchor": "search : ", "positive": "a text "})
    return Trainer(model, args, rows("anchor positive"), loss=losses.MultipleNegativesRankingLoss(model))


@script("dense", is_frozen=False)
@script("dense on frozen layers", is_frozen=True)
def dense(Trainer, Arguments, is_frozen):
    transformer = Transformer("bert").requires_grad_(not is_frozen)
    pooling = Pooling(transformer.get_embedding_dimension(), pooling_mode="mean")
    projection = Dense(pooling.get_embedding_dimension(), 12, activation_function=torch.nn.Tanh())
    model = SentenceTransformer(modules=[transformer, pooling, projection])
    return Trainer(model, Arguments(), rows("anchor positive"), loss=losses.MultipleNegativesRankingLoss(model))


@script()
def static(Trainer, Arguments):
    model = SentenceTransformer(modules=[StaticEmbedding(tiny_tokenizer(), embedding_dim=12)])
    loss = losses.MatryoshkaLoss(model, losses.MultipleNegativesRankingLoss(model), matryoshka_dims=[12, 4])
    return Trainer(model=model, args=Arguments(), train_dataset=rows("anchor positive negative"), loss=loss)


@script(packs=False)
def router(Trainer, Arguments):
    document = [Transformer("bert"), Pooling(WIDTH, "mean")]
    model = SentenceTransformer(
        modules=[Router.for_query_document([StaticEmbedding(tiny_tokenizer(), embedding_dim=WIDTH)], document)]
    )
    args = Arguments(
        router_mapping={"question": "query", "answer": "document"},
        learning_rate_mapping={r"StaticEmbedding.*|sub_modules\.query": 0.2},
    )
    return Trainer(model, args, rows("question answer"), loss=losses.MultipleNegativesRankingLoss(model))


class Weighting(Transformer):
    """Gives every token a weight, which a module of one's own reads."""

    def preprocess(self, inputs, **kwargs):
        features = super().preprocess(inputs, **kwargs)
        return {**features, "token_weights": 1 + features["input_ids"] % 5}


class DecayedMean(Module):
    """A pooling of one's own, as the page on custom models writes it."""

    config_keys = ["decay"]

    def __init__(self, decay: float = 0.9):
        super().__init__()
        self.decay = torch.nn.Parameter(torch.tensor(decay))

    def forward(self, features, **kwargs):
        tokens, mask = features["token_embeddings"], features["attention_mask"].unsqueeze(-1)
        weights = mask * self.decay ** torch.arange(tokens.size(1)).view(1, -1, 1)
        if "token_weights" in features:
            weights = weights * features["token_weights"].unsqueeze(-1)
        features["sentence_embedding"] = (tokens * weights).sum(1) / weights.sum(1)
        return features

    def get_embedding_dimension(self):
        return WIDTH

    def get_config_dict(self):
        return {"decay": self.decay.item()}

    def save(self, output_path, *args, safe_serialization=True, **kwargs):
        self.save_config(output_path)


@script("custom pooling", first=Transformer, packs=False)
@script("custom features", first=Weighting, packs=False)
def custom_modules(Trainer, Arguments, first):
    model = SentenceTransformer(modules=[first("bert"), DecayedMean(), Normalize()])
    return Trainer(model, Arguments(), rows("anchor positive"), loss=losses.MultipleNegativesRankingLoss(model))


@script("clip", packs=False)
@script("clip, cached", packs=False, loss=losses.CachedMultipleNegativesRankingLoss)
def clip(Trainer, Arguments, loss=losses.MultipleNegativesRankingLoss):
    model = SentenceTransformer("clip")
    train_dataset = rows("caption", image=pictures(ROWS))
    return Trainer(model=model, args=Arguments(), train_dataset=train_dataset, loss=loss(model))


@script("pictures in patches", family="qwen3_vl", packs=False)
@script("pictures in tiles", family="internvl", packs=False)
@script("pictures in padded tiles", family="smolvlm", packs=False)
def text_and_pictures(Trainer, Arguments, family):
    model = vision_language_model(Path("parts", family), family)
    kinds = {"text": Value("string"), "image": Image()}
    of_rows = [{"text": text, "image": image} for text, image in zip(texts(ROWS, 2), pictures(ROWS), strict=True)]
    columns = {"query": texts(ROWS, 1), "document": of_rows}
    train_dataset = Dataset.from_dict(columns, features=Features({"query": Value("string"), "document": kinds}))
    args = Arguments(prompts={"query": "find it"})
    return Trainer(model, args, train_dataset, loss=losses.MultipleNegativesRankingLoss(model))


@script("decoder", packs=False)
@script("decoder, messages", packs=False, as_messages=True)
def decoder(Trainer, Arguments, as_messages=False):
    model = SentenceTransformer("chat")
    train_dataset = rows("query document")
    if as_messages:
        said = lambda text: [{"role": "system", "content": "search"}, {"role": "user", "content": text}]  # noqa: E731
        train_dataset = train_dataset.map(lambda row: {name: said(text) for name, text in row.items()})
    args = Arguments(prompts={"query": "search the text"})
    return Trainer(model, args, train_dataset, loss=losses.MultipleNegativesRankingLoss(model))


@script()
def adapter(Trainer, Arguments):
    model = SentenceTransformer("bert")
    torch.manual_seed(1)
    config = LoraConfig(target_modules=["query", "value"], r=4, lora_alpha=8, init_lora_weights=False)
    model.add_adapter(config)
    return Trainer(model, Arguments(), rows("anchor positive"), loss=losses.MultipleNegativesRankingLoss(model))


@script()
def truncated(Trainer, Arguments):
    model = SentenceTransformer("bert", truncate_dim=8)
    return Trainer(model, Arguments(), rows("anchor positive"), loss=losses.MultipleNegativesRankingLoss(model))


# ---- evaluation ----


@script()
def evaluated(Trainer, Arguments):
    model = SentenceTransformer("bert")
    triples, rated = rows("anchor positive negative", seed=2), rows("one other", seed=3, score=SCORES)
    queries = {f"q{i}": text for i, text in enumerate(triples["anchor"])}
    corpus = {f"d{i}": text for i, text in enumerate([*triples["positive"], *triples["negative"]])}
    relevant = {f"q{i}": {f"d{i}"} for i in range(ROWS)}
    evaluators = [
        evaluation.InformationRetrievalEvaluator(queries, corpus, relevant, name="retrieval"),
        evaluation.EmbeddingSimilarityEvaluator(rated["one"], rated["other"], rated["score"], name="sts"),
        evaluation.TripletEvaluator(triples["anchor"], triples["positive"], triples["negative"], name="triplets"),
    ]
    return Trainer(
        model=model,
        args=Arguments(eval_strategy="steps", eval_steps=1),
        train_dataset=rows("anchor positive"),
        eval_dataset=rows("anchor positive", seed=4),
        loss=losses.MultipleNegativesRankingLoss(model),
        evaluator=evaluation.SequentialEvaluator(evaluators),
    )


# ---- a vector of every token ----


@script("token vectors", *OF_SEVERAL_VECTORS, packs=False)
@script("token vectors, cached", *OF_SEVERAL_VECTORS, packs=False, mini_batch_size=3)
@script("token vectors, longer queries", *OF_SEVERAL_VECTORS, packs=False, longer=True)
def token_vectors(Trainer, Arguments, longer=False, **options):
    model = MultiVectorEncoder("bert")
    if longer:
        model[0].query_expansion = {"strategy": "fixed", "length": 14, "attend": False, "token": "[UNK]"}
    kind = CachedMultiVectorMultipleNegativesRankingLoss if options else MultiVectorMultipleNegativesRankingLoss
    return Trainer(model, Arguments(), rows("query positive negative"), loss=kind(model, **options))


@script("token vectors, our loss", *OF_SEVERAL_VECTORS, packs=False)
def token_vectors_by_our_loss(Trainer, Arguments):
    """Which their trainer does not take."""
    torch.manual_seed(0)
    model = MultiVectorEncoder("bert")
    is_theirs = Trainer is MultiVectorEncoderTrainer
    loss = MultiVectorMultipleNegativesRankingLoss(model) if is_theirs else LateInteractionLoss()
    return Trainer(model, Arguments(), rows("query positive negative"), loss=loss)

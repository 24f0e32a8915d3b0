"""Every evaluator of sentence-transformers, on small data."""

import random
from pathlib import Path

import torch
from sentence_transformers import InputExample
from sentence_transformers.multi_vector_encoder import evaluation as of_tokens
from sentence_transformers.sentence_transformer import evaluation as of_vectors
from sentence_transformers.sentence_transformer.losses import SoftmaxLoss
from torch.utils.data import DataLoader

from tests.evaluation.models import sentence_transformer
from tests.retrieval_data import corpus, texts, write_lines, write_rows


def by_column(rows: list[dict]) -> dict[str, list]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def of_dense(model, folder: Path) -> list:
    """The figures of each have a name."""
    folder.mkdir(exist_ok=True, parents=True)
    rows, draw = write_rows(folder), random.Random(0)
    queries, documents, right = corpus()
    right = {query: set(of_query) for query, of_query in right.items()}
    sts, triplet = by_column(rows["sts"]), by_column(rows["triplet"])
    first, second = sts["sentence1"], sts["sentence2"]
    labels = [draw.randint(0, 1) for _ in first]
    teacher = sentence_transformer(num_hidden_layers=1)
    torch.manual_seed(5)
    examples = [InputExample(texts=[a, b], label=label) for a, b, label in zip(first, second, labels, strict=True)]
    pairs = [{"en": a, "de": b} for a, b in zip(first, second, strict=True)]
    return [
        of_vectors.EmbeddingSimilarityEvaluator(*sts.values(), name="sts", similarity_fn_names=["cosine", "dot"]),
        of_vectors.EmbeddingSimilarityEvaluator(*sts.values(), name="int8", precision="int8", truncate_dim=7),
        of_vectors.TripletEvaluator(*triplet.values(), name="triplet"),
        of_vectors.RerankingEvaluator(rows["reranking"], name="reranking"),
        of_vectors.BinaryClassificationEvaluator(first, second, labels, name="binary"),
        of_vectors.InformationRetrievalEvaluator(
            queries, documents, right, name="ir", corpus_chunk_size=40, write_predictions=True
        ),
        of_vectors.ParaphraseMiningEvaluator(
            {str(i): text for i, text in enumerate(texts(60, 9))},  # different ones: no two pairs are equally similar
            [(str(i), str(i + 30)) for i in range(30)], name="mining",
        ),
        of_vectors.TranslationEvaluator(first, second, name="translation"),
        of_vectors.MSEEvaluator(first, second, teacher_model=teacher, name="mse"),
        of_vectors.MSEEvaluatorFromDataFrame(pairs, teacher, [("en", "de")], name="frame"),
        of_vectors.LabelAccuracyEvaluator(
            DataLoader(examples, batch_size=8), name="label",
            softmax_model=SoftmaxLoss(model, model.get_embedding_dimension(), num_labels=2),
        ),
        nano_beir(folder / "nano"),
    ]  # fmt: skip


def nano_beir(folder: Path):
    """Of a folder laid out as the NanoBEIR datasets on the hub."""
    lines = ["---", "configs:"]
    for kind in ("corpus", "queries", "qrels"):
        lines += [f"- config_name: {kind}", "  data_files:"]
        for name, seed in (("NanoNFCorpus", 0), ("NanoSciFact", 3)):
            queries, documents, right = corpus(seed=seed)
            rows = {
                "corpus": [{"_id": i, "text": text} for i, text in documents.items()],
                "queries": [{"_id": i, "text": text} for i, text in queries.items()],
                "qrels": [{"query-id": query, "corpus-id": one} for query, of in right.items() for one in of],
            }[kind]
            (folder / kind).mkdir(parents=True, exist_ok=True)
            write_lines(folder / kind / f"{name}.jsonl", rows)
            lines += [f"  - split: {name}", f"    path: {kind}/{name}.jsonl"]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]))
    return of_vectors.NanoBEIREvaluator(["nfcorpus", "scifact"], dataset_id=str(folder))


def of_token_vectors(model, folder: Path) -> list:
    folder.mkdir(exist_ok=True, parents=True)
    rows = write_rows(folder)
    queries, documents, right = corpus()
    right = {query: set(of_query) for query, of_query in right.items()}
    triplet = by_column(rows["triplet"])
    return [
        of_tokens.MultiVectorTripletEvaluator(*triplet.values(), name="triplet"),
        of_tokens.MultiVectorRerankingEvaluator(rows["reranking"], name="reranking"),
        of_tokens.MultiVectorInformationRetrievalEvaluator(queries, documents, right, name="ir"),
    ]

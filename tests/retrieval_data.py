"""Small corpora in the files of BEIR and of MTEB, and tiny models that tell their texts apart."""

import json
import random
from pathlib import Path

import datasets
import torch
from PIL import Image

from tests.tiny_models import WORDS, embedding_model, model_config, tiny_tokenizer

PROMPTS = {"query": "search : ", "positive": "list of "}


def texts(number: int, seed: int, length: tuple[int, int] = (2, 9)) -> list[str]:
    """All different."""
    draw, found = random.Random(seed), {}
    while len(found) < number:
        found[" ".join(draw.choices(WORDS, k=draw.randint(*length)))] = None
    return list(found)


def corpus(queries: int = 23, documents: int = 101, seed: int = 0) -> tuple[dict, dict, dict]:
    """Texts of queries and documents by id, and of every query but the last two its right documents, one to four that
    begin as it does."""
    draw = random.Random(seed)
    of_queries = {f"q{i}": text for i, text in enumerate(texts(queries, seed, (4, 7)))}
    right: dict[str, list[str]] = {f"q{i}": [] for i in range(queries - 2)}
    found: dict[str, str] = {}
    for query in right:
        for _ in range(4):
            found[f"{of_queries[query]} {' '.join(draw.choices(WORDS, k=draw.randint(1, 5)))}"] = query
    found = dict(draw.sample(sorted(found.items()), min(len(found), documents // 2)))
    found |= dict.fromkeys(texts(documents - len(found), seed + 1), "")
    rows = draw.sample(sorted(found.items()), len(found))
    for i, (_, query) in enumerate(rows):
        if query:
            right[query].append(f"d{i}")
    return of_queries, {f"d{i}": text for i, (text, _) in enumerate(rows)}, {q: of for q, of in right.items() if of}


def write_beir(folder: Path, queries: dict, documents: dict, right: dict, split: str = "test") -> Path:
    """The first word of every second document is its title. A line of qrels with score 0 makes nothing right."""
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    rows = []
    for i, (name, text) in enumerate(documents.items()):
        title, _, rest = text.partition(" ") if i % 2 else ("", "", text)
        rows.append({"_id": name, "title": title, "text": rest, "metadata": {} if i % 3 else {"url": str(i)}})
    write_lines(folder / "corpus.jsonl", rows)
    write_lines(folder / "queries.jsonl", [{"_id": name, "text": text} for name, text in queries.items()])
    lines = ["query-id\tcorpus-id\tscore", *(f"{query}\t{one}\t1" for query, of in right.items() for one in of)]
    lines.append(f"{next(reversed(queries))}\t{next(iter(documents))}\t0")
    (folder / "qrels" / f"{split}.tsv").write_text("\n".join(lines) + "\n")
    return folder


def write_mteb(folder: Path, queries: dict, documents: dict, right: dict) -> Path:
    """As a clone of a repository on the hub, with the configurations in its README and qrels that are no folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_lines(folder / "corpus.jsonl", [{"_id": i, "title": "", "text": t} for i, t in documents.items()])
    write_lines(folder / "queries.jsonl", [{"_id": name, "text": text} for name, text in queries.items()])
    judged = [{"query-id": q, "corpus-id": d, "score": 1.0} for q, of in right.items() for d in of]
    write_lines(folder / "qrels.jsonl", judged)
    files = {"default": ("test", "qrels.jsonl"), "corpus": ("corpus", "corpus.jsonl")}
    files["queries"] = ("queries", "queries.jsonl")
    lines = ["---", "configs:"]
    for name, (split, path) in files.items():
        lines += [f"- config_name: {name}", "  data_files:", f"  - split: {split}", f"    path: {path}"]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]))
    return folder


def write_pictures(folder: Path, pictures: list[Image.Image], queries: dict, right: dict) -> Path:
    """The same of pictures "0", "1", ... in parquet files."""
    rows = [{"id": str(i), "image": picture} for i, picture in enumerate(pictures)]
    features = datasets.Features({"id": datasets.Value("string"), "image": datasets.Image()})
    write_mteb(folder, queries, {"0": ""}, right)
    datasets.Dataset.from_list(rows, features=features).to_parquet(folder / "corpus.parquet")
    for name in ("queries", "qrels"):
        datasets.Dataset.from_json(str(folder / f"{name}.jsonl")).to_parquet(folder / f"{name}.parquet")
    (folder / "README.md").write_text((folder / "README.md").read_text().replace(".jsonl", ".parquet"))
    return folder


def write_lines(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_rows(folder: Path, number: int = 40, seed: int = 3) -> dict[str, list[dict]]:
    """Files sts.jsonl, triplet.jsonl and reranking.jsonl, whose columns have other names than the evaluation's; two
    sentences of sts.jsonl are equal, and texts repeat in reranking.jsonl. The rows by the evaluation's names."""
    draw = random.Random(seed)
    first = texts(number, seed, (3, 6))
    longer = lambda text: f"{text} {' '.join(draw.choices(WORDS, k=draw.randint(1, 4)))}"  # noqa: E731
    others = first[7:] + first[:7]  # no pair is another one turned round: they would be as similar, but for rounding
    second = [longer(text) if draw.random() < 0.6 else other for text, other in zip(first, others, strict=True)]
    second[5] = first[5]
    rows = {
        "sts": [
            {"sentence1": a, "sentence2": b, "score": draw.randint(0, 10) / 2 + (a in b)}
            for a, b in zip(first, second, strict=True)
        ],
        "triplet": [
            {"anchor": text, "positive": longer(text), "negative": longer(draw.choice(first))} for text in first
        ],
        "reranking": [
            {"query": text, "positive": [longer(text) for _ in range(draw.randint(1, 3))],
             "negative": draw.sample([other for other in first if other != text], draw.randint(2, 7))}
            for text in first
        ],
    }  # fmt: skip
    for name, of in rows.items():
        write_lines(folder / f"{name}.jsonl", [{f"my_{key}": value for key, value in row.items()} for row in of])
    return rows


def save_model(folder: Path, family: str = "bert", normalize: bool = True, **config) -> Path:
    """A small model whose embeddings are far apart, with prompts."""
    torch.manual_seed(0)
    config = model_config(family, initializer_range=0.3, **config)
    tokenizer = tiny_tokenizer(max_length=40)
    model = embedding_model(config, projection_dim=16, normalize=normalize, tokenizer=tokenizer)
    model.prompts = {**PROMPTS, "document": PROMPTS["positive"]}
    model.save_pretrained(str(folder))
    return folder

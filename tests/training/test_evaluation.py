"""Retrieval metrics as a run reports them, where queries and documents repeat: ids decide what is the same."""

import json
import random
from pathlib import Path

import pytest
import torch
from PIL import Image
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import PretrainedConfig, PreTrainedTokenizerFast, TrainerCallback

from hf_dist_ext.data.sentence_collator import ContrastiveCollator
from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.errors import UsageError
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.distributed.forked import Run

NAMES = ("mrr@10", "ndcg@10", "recall@1", "recall@10")
PERFECT = dict.fromkeys(NAMES, 1.0)


class Table(nn.Module):
    """A vector per text, which is one token, or per shade of a picture; layers on top that change nothing yet."""

    def __init__(self, vectors: torch.Tensor):
        super().__init__()
        self.config = PretrainedConfig()
        self.vectors = nn.Embedding.from_pretrained(vectors, freeze=False)
        width = vectors.shape[1]
        self.layers = nn.Sequential(*[nn.Linear(width, width) for _ in range(3)])
        for layer in self.layers:
            nn.init.zeros_(layer.weight), nn.init.zeros_(layer.bias)

    def forward(self, input_ids=None, attention_mask=None, pixel_values=None):
        rows = input_ids[:, 0] if pixel_values is None else pixel_values[:, 0, 0, 0].round().long()
        vectors = self.vectors(rows)
        return vectors + self.layers(vectors)


def to_pixels(images: list, return_tensors: str) -> dict:
    return {"pixel_values": torch.stack([torch.full((3, 2, 2), float(image.getpixel((0, 0))[0])) for image in images])}


def collator(words: list[str], columns: list[str], **options) -> ContrastiveCollator:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="pad", unk_token="pad")
    return ContrastiveCollator(tokenizer, columns, processor=to_pixels, **options)


def trainer(folder, model: nn.Module, rows: list[dict], batch: int = 3, words=None, loss=None, **more) -> DistTrainer:
    columns = [name for name in rows[0] if name != "group"]
    group = "group" if "group" in rows[0] else None
    options = {name: more.pop(name) for name in ("compute_metrics", "callbacks") if name in more}
    args = DistTrainingArguments(
        output_dir=str(folder), report_to=[], disable_tqdm=True, use_cpu=True, per_device_eval_batch_size=batch,
        per_device_train_batch_size=batch, gradient_cache_chunk_size=2, no_duplicates_in_batch=False, **more,
    )  # fmt: skip
    return DistTrainer(
        model, args, loss=loss or InfoNCELoss(0.05, normalize=False), train_dataset=rows, eval_dataset=rows,
        data_collator=collator(words or ["pad"], columns, id_column=group), **options,
    )  # fmt: skip


def figures(evaluation: dict) -> dict[str, float]:
    return {name: evaluation[f"eval_{name}"] for name in NAMES}


# ---- a perfect model ----


def captioned(number: int = 4, captions: int = 5) -> tuple[list[dict], list[str], torch.Tensor]:
    """Rows of caption and picture as COCO has them, shuffled; the words, and a vector per word and per picture."""
    words = [f"c{image}.{caption}" for image in range(number) for caption in range(captions)]
    pictures = [Image.new("RGB", (4, 4), (len(words) + image, 0, 0)) for image in range(number)]
    rows = [{"caption": word, "image": pictures[i // captions].copy()} for i, word in enumerate(words)]
    random.Random(0).shuffle(rows)
    eye = torch.eye(number)
    return rows, words, torch.cat([eye.repeat_interleave(captions, dim=0), eye])


@pytest.mark.parametrize("columns", [("caption", "image"), ("image", "caption")])
def test_a_perfect_model_is_perfect_on_four_images_with_five_captions_each(columns, tmp_path):
    rows, words, vectors = captioned()
    rows = [{name: row[name] for name in columns} for row in rows]
    assert figures(trainer(tmp_path, Table(vectors), rows, words=words).evaluate()) == pytest.approx(PERFECT)


def test_documents_are_ranked_by_cosine_where_the_loss_scores_cosines(tmp_path):
    """A model that does not normalize its embeddings, and a wrong picture whose vector is long."""
    rows, words, vectors = captioned()
    vectors[:20] += 0.5 * vectors[:20].roll(1, dims=1)
    vectors[20] *= 100
    of_loss = {
        of: trainer(tmp_path, Table(vectors), rows, words=words, loss=InfoNCELoss(0.05, normalize=of))
        for of in (True, False)
    }
    assert figures(of_loss[True].evaluate()) == pytest.approx(PERFECT)
    assert figures(of_loss[False].evaluate())["recall@1"] < 1


def test_the_documents_of_a_group_are_right_for_all_its_queries(tmp_path):
    words = [f"q{i}" for i in range(6)] + [f"d{i}" for i in range(6)]
    rows = [{"query": f"q{i}", "positive": f"d{i}", "group": i // 2} for i in range(6)]
    vectors = torch.eye(3).repeat_interleave(2, dim=0).repeat(2, 1)
    assert figures(trainer(tmp_path / "1", Table(vectors), rows, words=words).evaluate()) == pytest.approx(PERFECT)
    for row in rows:
        del row["group"]
    assert figures(trainer(tmp_path / "2", Table(vectors), rows, words=words).evaluate())["recall@1"] == 0.0


# ---- against sentence-transformers ----


def random_rows(seed: int = 0, queries: int = 200, documents: int = 120) -> tuple[list[dict], list[str], torch.Tensor]:
    """Of 200 queries some have several rows, documents are shared, and vectors are whole numbers: many scores tie."""
    draw = random.Random(seed)
    pairs = [(query, draw.randrange(documents)) for query in range(queries)]
    pairs += [(draw.randrange(queries), draw.randrange(documents)) for _ in range(90)] + pairs[:20]
    draw.shuffle(pairs)
    words = [f"q{i}" for i in range(queries)] + [f"d{i}" for i in range(documents)]
    generator = torch.Generator().manual_seed(seed)
    of_documents = torch.randint(-2, 3, (documents, 6), generator=generator).float()
    of_documents[documents // 2 :: 7] = of_documents[0]
    of_queries = torch.stack([of_documents[pairs[i % len(pairs)][1]] for i in range(queries)])
    for query, document in pairs:
        of_queries[query] = of_documents[document]
    of_queries += torch.randint(-2, 3, of_queries.shape, generator=generator)
    rows = [{"query": f"q{query}", "positive": f"d{document}"} for query, document in pairs]
    return rows, words, torch.cat([of_queries, of_documents])


class Encoder:
    """What the evaluator asks of a model."""

    model_card_data = None

    def __init__(self, words: list[str], vectors: torch.Tensor):
        self.vectors = dict(zip(words, vectors, strict=True))

    def encode_query(self, texts, **options) -> torch.Tensor:
        return torch.stack([self.vectors[text] for text in texts])

    encode_document = encode_query


def of_sentence_transformers(rows, words, vectors, right_last: bool = True) -> dict[str, float]:
    """Of equal scores theirs puts the document first whose id sorts first; here ids name the right ones last, or
    first, per query, by asking one query at a time."""
    right: dict[str, set[str]] = {}
    for row in rows:
        right.setdefault(row["query"], set()).add(row["positive"])
    corpus = {row["positive"] for row in rows}
    sums = dict.fromkeys(NAMES, 0.0)
    for query, documents in right.items():
        name_of = {text: f"{(text in documents) == right_last}:{text}" for text in corpus}
        evaluator = InformationRetrievalEvaluator(
            {query: query}, {name_of[text]: text for text in corpus}, {query: {name_of[text] for text in documents}},
            mrr_at_k=[10], ndcg_at_k=[10], accuracy_at_k=[1, 10], precision_recall_at_k=[10], map_at_k=[10],
            score_functions={"dot": lambda a, b: a @ b.T}, write_csv=False,
        )  # fmt: skip
        found = evaluator.compute_all_metrics(Encoder(words, vectors))["dot"]
        sums["mrr@10"] += found["mrr@k"][10]
        sums["ndcg@10"] += found["ndcg@k"][10]
        sums["recall@1"] += found["accuracy@k"][1]
        sums["recall@10"] += found["accuracy@k"][10]
    return {name: value / len(right) for name, value in sums.items()}


def test_metrics_equal_those_of_sentence_transformers_on_repeated_and_tied_documents(tmp_path):
    """Theirs depends on the ids of tied documents; ours is theirs when the right ones sort last."""
    rows, words, vectors = random_rows()
    assert len({row["query"] for row in rows}) == 200 and len(rows) > 300
    found = figures(trainer(tmp_path, Table(vectors), rows, batch=32, words=words).evaluate())
    assert 0.1 < found["recall@1"] < found["recall@10"] < 0.99
    assert found == pytest.approx(of_sentence_transformers(rows, words, vectors), abs=1e-12)
    best = of_sentence_transformers(rows, words, vectors, right_last=False)
    assert all(best[name] > found[name] + 0.02 for name in NAMES)  # ties there are

    # Without ties the names do not matter, and one evaluator over all queries says the same.
    vectors = torch.nn.functional.normalize(vectors + torch.randn(vectors.shape, generator=torch.Generator()), dim=1)
    found = figures(trainer(tmp_path, Table(vectors), rows, batch=32, words=words).evaluate())
    right: dict[str, set[str]] = {}
    for row in rows:
        right.setdefault(row["query"], set()).add(row["positive"])
    corpus = {row["positive"] for row in rows}
    theirs = InformationRetrievalEvaluator(
        {query: query for query in right}, {text: text for text in corpus}, right, accuracy_at_k=[1, 10],
        score_functions={"cosine": lambda a, b: a @ b.T}, write_csv=False,
    ).compute_all_metrics(Encoder(words, vectors))["cosine"]  # fmt: skip
    assert found["mrr@10"] == pytest.approx(theirs["mrr@k"][10], abs=1e-12)
    assert found["ndcg@10"] == pytest.approx(theirs["ndcg@k"][10], abs=1e-12)
    assert found["recall@1"] == pytest.approx(theirs["accuracy@k"][1], abs=1e-12)
    assert found["recall@10"] == pytest.approx(theirs["accuracy@k"][10], abs=1e-12)


# ---- in a run ----


def test_the_best_model_is_the_one_with_the_best_metric_over_distinct_documents(tmp_path):
    """Two steps make a perfect model, the next ones worse again. Counted by rows, the first would be the best."""
    rows, words, vectors = captioned()
    wrong, spoiled = vectors.clone(), vectors.clone()
    wrong[:20] = torch.cat([vectors[:3], vectors[3:20].roll(7, dims=0)])
    spoiled[:20] += 2 * vectors[:20].roll(1, dims=1)
    states = {1: wrong, 2: vectors, 3: spoiled, 4: wrong}

    class SetWeights(TrainerCallback):
        def on_step_end(self, args, state, control, model, **others):
            model.vectors.weight.data.copy_(states[state.global_step])
            for parameter in model.layers.parameters():
                parameter.data.zero_()

    found = trainer(
        tmp_path, Table(wrong), rows, words=words, max_steps=4, eval_strategy="steps", eval_steps=1, save_steps=1,
        load_best_model_at_end=True, metric_for_best_model="mrr@10", save_strategy="steps", logging_strategy="no",
        callbacks=[SetWeights()],
    )  # fmt: skip
    found.train()
    assert found.state.best_metric == pytest.approx(1.0) and found.state.best_global_step == 2
    assert torch.equal(found.model.vectors.weight, vectors)
    history = [line["eval_mrr@10"] for line in found.state.log_history if "eval_mrr@10" in line]
    assert history[1] == pytest.approx(1.0) and history[2] == pytest.approx(0.5) and len(history) == 4


def test_a_misspelt_metric_is_refused_before_training_where_the_figures_are_known(tmp_path):
    rows, words, vectors = captioned()
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps"}
    with pytest.raises(UsageError, match='metric_for_best_model="eval_mmr@10" is no figure .* Closest: mrr@10'):
        trainer(tmp_path, Table(vectors), rows, words=words, metric_for_best_model="eval_mmr@10", **best)
    for metric in ("eval_mrr@10", "loss"):
        trainer(tmp_path, Table(vectors), rows, words=words, metric_for_best_model=metric, **best)
    of_the_user = {"metric_for_best_model": "mine", "compute_metrics": lambda prediction: {"mine": 1.0}}
    trainer(tmp_path, Table(vectors), rows, words=words, **of_the_user, **best)


def test_compute_metrics_of_the_user_gets_embeddings_and_ids(tmp_path):
    rows, words, vectors = captioned()
    seen = []

    def compute(prediction) -> dict:
        seen.append(prediction)
        return {"rows": len(prediction.predictions[0])}

    evaluation = trainer(tmp_path, Table(vectors), rows, words=words, compute_metrics=compute).evaluate()
    assert evaluation["eval_rows"] == 20 and "eval_mrr@10" not in evaluation
    captions, pictures = seen[0].predictions
    assert captions.shape == pictures.shape == (20, 4)
    ids = seen[0].label_ids
    assert ids.dtype == "int64" and len(set(ids[:, 0])) == 20 and len(set(ids[:, 1])) == 4


@pytest.mark.parametrize("given", [{"batch_eval_metrics": True}, {"eval_do_concat_batches": False}])
def test_retrieval_metrics_are_refused_where_batches_come_one_by_one(given, tmp_path):
    rows, words, vectors = captioned()

    def of_batches(prediction, compute_result=True) -> dict:
        return {}

    with pytest.raises(UsageError, match=f"{next(iter(given))}=.*one batch at a time.*Remove"):
        trainer(tmp_path, Table(vectors), rows, words=words, **given)
    trainer(tmp_path, Table(vectors), rows, words=words, compute_metrics=of_batches, **given)


@pytest.mark.parametrize("mode", ["ddp", "fsdp-full"])
def test_metrics_of_two_processes_are_those_of_one(mode, tmp_path):
    """310 rows: the last batch of 32 on each of two processes is filled up with other rows, which then repeat."""
    rows, words, vectors = random_rows()

    def evaluate(say) -> str:
        torch.set_num_threads(1)
        more = dict(max_steps=1, eval_on_start=True, save_strategy="no")  # FSDP2 shards a model with its optimizer
        made = trainer(tmp_path / mode, Table(vectors), rows, batch=32, words=words, **more)
        made.train()
        return json.dumps([made.args.world_size, figures(made.state.log_history[0])])

    processes, found = json.loads(Run(mode, Path(tmp_path / "log"), evaluate).result())
    alone = figures(trainer(tmp_path / "alone", Table(vectors), rows, batch=32, words=words).evaluate())
    assert processes == 2
    assert found == pytest.approx(alone, abs=1e-12)

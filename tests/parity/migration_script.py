"""A script as the documentation of sentence-transformers writes them; `DistTrainer` takes the place of its trainer."""

import json

from datasets import load_dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.training_args import BatchSamplers


def read(name, key, value):
    with open(f"data/functions/{name}.jsonl", encoding="utf-8") as file:
        return {row[key]: row[value] for row in map(json.loads, file)}


model = SentenceTransformer("models/base")
train_dataset = load_dataset("json", data_files="data/pairs.jsonl", split="train")
loss = CachedMultipleNegativesRankingLoss(model, scale=20.0, mini_batch_size=64)

with open("data/functions/qrels/test.tsv", encoding="utf-8") as file:
    rows = [line.split("\t") for line in file.read().splitlines()[1:]]
evaluator = InformationRetrievalEvaluator(
    queries=read("queries", "_id", "text"),
    corpus=read("corpus", "_id", "text"),
    relevant_docs={query: {document} for query, document, _ in rows},
    name="functions",
)
args = SentenceTransformerTrainingArguments(
    output_dir="outputs/theirs",
    max_steps=40,
    per_device_train_batch_size=256,
    learning_rate=3e-3,
    lr_scheduler_type="linear",
    warmup_steps=0.1,
    batch_sampler=BatchSamplers.NO_DUPLICATES,
    eval_strategy="steps",
    eval_steps=20,
    save_strategy="steps",
    save_steps=20,
    load_best_model_at_end=True,
    metric_for_best_model="eval_functions_cosine_ndcg@10",
    logging_steps=10,
    seed=1,
)
trainer = SentenceTransformerTrainer(
    model=model, args=args, train_dataset=train_dataset, loss=loss, evaluator=evaluator
)
trainer.train()
model.save_pretrained("outputs/theirs/final")
print(evaluator(model)["functions_cosine_ndcg@10"])

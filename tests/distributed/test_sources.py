"""Several datasets in one run: every rank's batch is of the same one at each step, and a run goes on where it was."""

import json
import os
from collections import Counter
from functools import partial
from pathlib import Path

import datasets
import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss

from hf_dist_ext.data import stream_readers
from hf_dist_ext.data.collator import content_id
from hf_dist_ext.data.mixture import SOURCE, MixedStream, Mixture
from hf_dist_ext.data.order import StandIn
from hf_dist_ext.data.sentence_collator import ContrastiveCollator
from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.strategies.collectives import rank
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.distributed.forked import MODES, THREE, Run, slow
from tests.sentence_models import text_model
from tests.tiny_models import WORDS, embedding_model, model_config, tiny_tokenizer

SIZES, SHARES, WINDOW = {"pairs": 30, "triplets": 21, "others": 19}, [0.5, 0.3, 0.2], 8
STOP = 12  # of 9 steps in an epoch: in the middle of the second


def table(name: str) -> datasets.Dataset:
    words = lambda i, n: " ".join(WORDS[(i * n + k) % len(WORDS)] for k in range(2 + i % n))  # noqa: E731
    rows = [{"query": f"{name} {words(i, 3)} {i}", "positive": f"{words(i, 5)} {i}"} for i in range(SIZES[name])]
    if name == "triplets":
        rows = [row | {"negative": [f"{words(i, 4)}"] * (i % 3)} for i, row in enumerate(rows)]
    return datasets.Dataset.from_list(rows)


def sources(is_stream: bool) -> Mixture | MixedStream:
    tables = {name: table(name) for name in SIZES}
    if not is_stream:
        return Mixture(tables, SHARES)
    streams = {
        name: one.to_iterable_dataset(num_shards=3).shuffle(seed=1, buffer_size=6) for name, one in tables.items()
    }
    return MixedStream(streams, SHARES)


def train(say, folder: Path, name: str, processes: int, is_stream: bool, resume: str | None, **options) -> str:
    stream_readers.ROUND_ROWS = 6
    torch.manual_seed(0)
    seen = []
    ids = {content_id(text): f"{name} {i}" for name in SIZES for i, text in enumerate(table(name)["query"])}

    class Noting(DistTrainer):
        def training_step(self, model, inputs, *more):
            rows = [] if isinstance(inputs, StandIn) else [ids[one] for one in inputs["ids"]["query"].tolist()]
            seen.append([inputs["ids"][SOURCE], rows, list(inputs)])
            return super().training_step(model, inputs, *more)

    length = {"max_steps": 16} if is_stream else {"num_train_epochs": 2}
    args = DistTrainingArguments(
        **{"output_dir": str(folder / name), "per_device_train_batch_size": WINDOW // processes,
           "save_strategy": "steps",
           "save_steps": STOP, "report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_steps": 1, "seed": 5,
           "gradient_cache_chunk_size": 3, "learning_rate": 1e-3} | length | options
    )  # fmt: skip
    tokenizer = tiny_tokenizer()
    columns = {name: ["query", "positive", *(["negative"] * (name == "triplets"))] for name in SIZES}
    of_all = ContrastiveCollator(tokenizer, columns["triplets"])
    collator = of_all.with_sources({name: ContrastiveCollator(tokenizer, columns[name]) for name in SIZES})
    model = embedding_model(model_config("bert"))  # with dropout
    trainer = Noting(
        model=model, args=args, train_dataset=sources(is_stream), processing_class=tokenizer, loss=InfoNCELoss(),
        data_collator=collator,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(folder / name / "end"))
    lines = [line for line in trainer.state.log_history if "loss" in line]
    (folder / f"{name}.{rank()}.json").write_text(json.dumps({"seen": seen, "lines": lines}))
    return "done"


def run(mode: str, folder: Path, name: str, is_stream: bool, resume: str | None = None, **options) -> list[dict]:
    processes = (MODES | THREE)[mode][0]
    target = partial(
        train, folder=folder, name=name, processes=processes, is_stream=is_stream, resume=resume, **options
    )
    assert Run(mode, folder / f"{name}-{mode}", target).result() == "done"
    return [json.loads((folder / f"{name}.{number}.json").read_text()) for number in range(processes)]


def steps(ranks: list[dict]) -> list[tuple[str, list[str]]]:
    """(source, rows of all ranks) of each micro-batch, which is of one source on all of them."""
    found = []
    for of_ranks in zip(*(one["seen"] for one in ranks), strict=True):
        names, rows, columns = zip(*of_ranks, strict=True)
        assert len(set(names)) == 1 and len({tuple(one) for one in columns}) == 1
        rows = [row for of_rank in rows for row in of_rank]
        assert {row.split()[0] for row in rows} == {names[0]}
        assert ("negative" in columns[0]) == (names[0] == "triplets")
        found.append((names[0], rows))
    return found


def in_any_order(found: list[tuple[str, list[str]]]) -> list[tuple[str, list[str]]]:
    return [(name, sorted(rows)) for name, rows in found]


@pytest.mark.parametrize(
    "is_stream, workers, accumulated",
    [(False, 0, 1), slow(True, 0, 1), slow(False, 2, 1), slow(True, 2, 1), slow(False, 0, 2), slow(True, 0, 2)],
)
def test_ranks_take_the_same_source_and_a_resumed_run_goes_on_bit_for_bit(tmp_path, is_stream, workers, accumulated):
    options = {
        "dataloader_num_workers": workers, "gradient_accumulation_steps": accumulated,
        "per_device_train_batch_size": WINDOW // accumulated // 2, "save_steps": STOP,
    }  # fmt: skip
    whole = run("ddp", tmp_path, "whole", is_stream, **options)
    found = steps(whole)
    assert len({name for name, _ in found}) == 3
    resume = str(tmp_path / "whole" / f"checkpoint-{STOP}")
    resumed = run("ddp", tmp_path, "resumed", is_stream, resume, **options)
    used = len(found) - len(resumed[0]["seen"])
    assert 0 < used < len(found)
    for one, other in zip(whole, resumed, strict=True):
        assert one["seen"][used:] == other["seen"], "the same rows on the same rank"
    ends = [load_file(tmp_path / name / "end" / "model.safetensors") for name in ("whole", "resumed")]
    assert ends[0].keys() == ends[1].keys() and all(ends[0][key].equal(ends[1][key]) for key in ends[0])
    losses = [
        [{key: value for key, value in line.items() if key.startswith("loss")} for line in one[0]["lines"]]
        for one in (whole, resumed)
    ]
    assert losses[0] == losses[1] and all(len(line) > 1 for line in losses[0])


@pytest.mark.slow
@pytest.mark.parametrize("is_stream", [False, True])
def test_one_process_and_two_draw_the_same_and_one_goes_on_where_two_stopped(tmp_path, is_stream):
    two, one = steps(run("ddp", tmp_path, "two", is_stream)), steps(run("single", tmp_path, "one", is_stream))
    assert in_any_order(two) == in_any_order(one)
    # the same rows per update, in micro-batches of half the size: other draws, and no row twice or never
    again = run("single", tmp_path, "again", is_stream, str(tmp_path / "two" / f"checkpoint-{STOP}"),
                per_device_train_batch_size=WINDOW // 2)  # fmt: skip
    order = two[:STOP] + steps(again)
    assert {len(rows) for _, rows in order[STOP:-1]} <= {WINDOW // 2, 2} and len(order) > len(two)
    for name in SIZES:
        rows = [row for of, rows in order if of == name for row in rows]
        size, whole = SIZES[name], len(rows) // SIZES[name]
        counts = Counter(rows)
        assert len(counts) == size or whole == 0
        assert max(counts.values()) - min(counts.values()) <= (2 if is_stream else 1)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_stream_is_evaluated_over_the_rows_that_it_has(tmp_path, shards):
    """13 rows are one more than three batches of two processes: what fills the fourth up is no row of the stream. Its
    loss is that of a Dataset of these rows."""

    def figures(folder) -> str:
        torch.manual_seed(0)
        model = text_model(folder / str(os.getpid()))  # each process makes its own
        words = [f"{WORDS[i % len(WORDS)]} {WORDS[i * 5 % len(WORDS)]}" for i in range(14)]
        rows = datasets.Dataset.from_dict({"a": words[:13], "b": words[1:], "score": [i / 13 for i in range(13)]})
        args = DistTrainingArguments(
            folder / "run", report_to=[], use_cpu=True, disable_tqdm=True, per_device_eval_batch_size=2
        )
        made = DistTrainer(model, args, rows, loss=CosineSimilarityLoss(model))
        stream = rows.to_iterable_dataset(num_shards=shards)
        of_stream, of_rows = made.evaluate(stream), made.evaluate(rows)
        assert of_stream["eval_loss"] == pytest.approx(of_rows["eval_loss"], rel=1e-6)
        return json.dumps([of_stream["eval_spearman_cosine"], made.predict(stream).label_ids.tolist()])

    alone = json.loads(figures(tmp_path))
    together = json.loads(Run("ddp", tmp_path / "log", lambda say: figures(tmp_path)).result())
    assert together == alone and len(alone[1]) == 13

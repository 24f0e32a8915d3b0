#!/usr/bin/env python
"""What mined negatives are worth: one model trained on with them, with random ones, and with none, over several seeds.

    python scripts/benchmark_mining.py --folder outputs/mining --validate --seeds 0      # settings are chosen here
    python scripts/benchmark_mining.py --folder outputs/mining --seeds 1 2 3             # the held-out functions

For each seed
(1) the model of configs/code_search.json is trained for `--base_steps`
(2) `hf-dist mine` finds negatives for its training rows with it: the hardest ones, and as many drawn at random
(3) the model is trained on three times, with as many steps on as many rows: without negatives, with random ones, and
    with mined ones. The batches of the last two hold as many texts
(4) all are evaluated with functions that none of them has seen: with `--validate` 500 of the training functions, which
    are then taken out, else the 500 that the dataset holds out. MRR@10 is given among these, and among all functions

A run that is in the folder already is not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from datasets import load_dataset
from sentence_transformers import SentenceTransformer
from train_hf import main as train_hf

from hf_dist_ext.data.code_search import load_code_search, train_tokenizer
from hf_dist_ext.tasks.mine import Mine
from hf_dist_ext.tasks.mine import main as mine

ROOT = Path(__file__).resolve().parents[1]
QUIET = {"accelerate_config": "single_gpu", "report_to": "none", "save_strategy": "no", "eval_strategy": "no"}
LENGTHS = {"query": 64, "positive": 128}
ARMS = ("without", "random", "mined")
EVALUATED = 500  # functions


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--validate", action="store_true", help="leave the held-out functions alone")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS, help="of (3)")
    parser.add_argument("--base_steps", type=int, default=9, help="of (1), 1,024 rows each (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=163, help="of (3) (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="rows of a step of (3) (default: %(default)s)")
    parser.add_argument("--learning_rate", type=float, default=2e-3, help="of (3) (default: %(default)s)")
    parser.add_argument("--num_negatives", type=int, default=2, help="of a row (default: %(default)s)")
    parser.add_argument("--range_min", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--range_max", type=int, default=50, help="(default: %(default)s)")
    parser.add_argument("--relative_margin", type=float, default=0.05, help="(default: %(default)s)")
    options = parser.parse_args(words)
    folder = (options.folder / ("validation" if options.validate else "held_out")).absolute()
    rows = write_rows(folder, options.validate)
    print(f"| seed | before | {' | '.join(options.arms)} |\n|---|---|{'---|' * len(options.arms)}")
    table = []
    for seed in options.seeds:
        base = folder / f"seed{seed}" / f"base{options.base_steps}"
        train(base, base_fields(options.base_steps) | rows | {"seed": seed})  # (1)
        data = {arm: rows["dataset_name"] for arm in options.arms} | mined(base, rows, options)  # (2)
        ends = {"before": base}
        for arm in options.arms:
            ends[arm] = train_on(base, arm, rows | {"dataset_name": data[arm]}, seed, options)  # (3)
        table.append({"seed": seed} | {arm: figures(folder, rows) for arm, folder in ends.items()})  # (4)
        print(line(seed, table[-1:], options.arms, lambda values: values[0]), flush=True)
    print(line("mean", table, options.arms, statistics.mean))
    if len(table) > 1:
        print(line("standard deviation", table, options.arms, statistics.stdev))
    settings = {name: str(value) for name, value in vars(options).items()}
    report = {"settings": settings, "results": table}
    (folder / "results.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def line(name: object, table: list[dict], arms: Sequence[str], summed_up: Callable[[list[float]], float]) -> str:
    """A line of the printed table: both figures of every arm."""
    cells = [
        " / ".join(f"{summed_up([row[arm][key] for row in table]):.3f}" for key in ("mrr@10", "mrr@10 among all"))
        for arm in ("before", *arms)
    ]
    return f"| {name} | {' | '.join(cells)} |"


def write_rows(folder: Path, validate: bool) -> dict[str, str]:
    """The fields of a run that name its data and tokenizer: rows to train on, and rows to evaluate on."""
    paths = {name: folder / f"{name}.jsonl" for name in ("train", "evaluated")}
    if not folder.is_dir():
        folder.mkdir(parents=True)
        splits = load_code_search()
        if validate:
            splits = splits["train"].train_test_split(EVALUATED, seed=0)
        train_tokenizer([*splits["train"]["query"], *splits["train"]["positive"]]).save_pretrained(
            folder / "tokenizer"
        )
        for path, split in zip(paths.values(), ("train", "test"), strict=True):
            splits[split].select_columns(["query", "positive"]).to_json(str(path))
    return {
        "dataset_name": str(paths["train"]),
        "eval_dataset_name": str(paths["evaluated"]),
        "tokenizer_name": str(folder / "tokenizer"),
    }


def base_fields(steps: int) -> dict:
    fields = json.loads((ROOT / "configs" / "code_search.json").read_text(encoding="utf-8"))
    return {name: value for name, value in fields.items() if not name.startswith("_")} | {"max_steps": steps}


def train(folder: Path, fields: dict) -> None:
    """A run, which ends with an evaluation and the model in its folder."""
    if not (folder / "metrics.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "fields.json"
        path.write_text(json.dumps(fields | QUIET | {"output_dir": str(folder)}), encoding="utf-8")
        train_hf(["--config", str(path)])


def figures(folder: Path, rows: dict[str, str]) -> dict[str, float]:
    """Those of a run's end, and MRR@10 among all functions."""
    path = folder / "among_all.json"
    if not path.is_file():
        evaluated, trained = (
            load_dataset("json", data_files=rows[name], split="train")
            for name in ("eval_dataset_name", "dataset_name")
        )
        model = SentenceTransformer(str(folder))
        options = {"convert_to_tensor": True, "show_progress_bar": False}
        queries = model.encode_query(evaluated["query"][:], **options)
        documents = model.encode_document([*evaluated["positive"], *trained["positive"]], **options)
        scores = queries @ documents.T  # (queries, documents); document i is the right one of query i
        places = (scores > scores.diagonal()[:, None]).sum(dim=1)
        reciprocal = (places < 10) / (places + 1)
        path.write_text(json.dumps(reciprocal.mean().item()), encoding="utf-8")
    report = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    return report["after"] | {"mrr@10 among all": json.loads(path.read_text(encoding="utf-8"))}


def mined(base: Path, rows: dict[str, str], options: argparse.Namespace) -> dict[str, str]:
    """Arm -> the training rows with its negatives."""
    hardest = {name: getattr(options, name) for name in ("range_min", "range_max", "relative_margin")}
    drawn = {"range_max": 5000, "sampling_strategy": "random"}  # of nearly all documents
    found = {}
    for arm, wanted in (("mined", hardest), ("random", drawn)):
        wanted |= {"num_negatives": options.num_negatives, "output_format": "n-tuple"}
        name = "-".join(map(str, (arm, *wanted.values())))
        path = base.parent / f"{base.name}-{name}.jsonl"
        if arm in options.arms and not path.is_file():
            mine(Mine(model=str(base), data=rows["dataset_name"], output=str(path), options=wanted))
        found[arm] = str(path)
    return found


def train_on(base: Path, arm: str, rows: dict[str, str], seed: int, options: argparse.Namespace) -> Path:
    """The run's folder."""
    words = (options.steps, options.batch, options.learning_rate, Path(rows["dataset_name"]).stem)
    fields = {
        "model_name_or_path": str(base), "seed": seed, "max_steps": options.steps, "logging_steps": 10,
        "max_length": LENGTHS if arm == "without" else LENGTHS | {"negative": LENGTHS["positive"]},
        "temperature": 0.05, "learning_rate": options.learning_rate, "warmup_steps": 0.1,
        "per_device_train_batch_size": options.batch, "per_device_eval_batch_size": 256,
        "gradient_cache_chunk_size": 64, "gradient_cache_keep_graph": 10**6,
    }  # fmt: skip
    folder = base.parent / "-".join([base.name, *map(str, words)])
    train(folder, fields | rows)
    return folder


if __name__ == "__main__":
    main()

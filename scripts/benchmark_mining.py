#!/usr/bin/env python
"""What mined negatives are worth: the code-search model trained on, with them and without, over several seeds.

    python scripts/benchmark_mining.py --folder /tmp/mining --seeds 1 2 3

For each seed
(1) the model of configs/code_search.json is trained
(2) `hf-dist mine` finds negatives for its training rows with it
(3) the model is trained on, with as many steps on as many rows: once on the rows, once on the rows with negatives
(4) both are evaluated on the held-out functions, which neither has seen

A run that is in the folder already is not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
QUIET = {"accelerate_config": "single_gpu", "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
HELD_OUT = {"eval_dataset_name": "code-search", "eval_split": "test", "eval_strategy": "no"}


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--base_steps", type=int, default=36, help="of (1) (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=90, help="of (3) (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=128, help="rows of a step of (3) (default: %(default)s)")
    parser.add_argument("--learning_rate", type=float, default=1e-3, help="of (3) (default: %(default)s)")
    parser.add_argument("--negatives", type=int, default=2, help="of a row (default: %(default)s)")
    parser.add_argument("--rank_max", type=int, default=50, help="(default: %(default)s)")
    parser.add_argument("--relative_margin", default="0.05", help="(default: %(default)s)")
    options = parser.parse_args(words)
    table = []
    for seed in options.seeds:
        folder = options.folder / str(seed)
        folder.mkdir(parents=True, exist_ok=True)
        base = folder / "base"
        train(base, base_fields(options, seed))  # (1)
        pairs, mined = mine(folder, base, options)  # (2)
        on = {
            "model_name_or_path": str(base), "max_length": {"query": 64, "positive": 128}, "seed": seed,
            "per_device_train_batch_size": options.batch, "gradient_cache_chunk_size": 64,
            "per_device_eval_batch_size": 256, "max_steps": options.steps, "learning_rate": options.learning_rate,
            "warmup_steps": 0.1, "logging_steps": 10,
        }  # fmt: skip
        lengths = {"max_length": on["max_length"] | {"negative": 128}}
        without = train(folder / "without", on | {"dataset_name": str(pairs)})  # (3)
        with_them = train(folder / "with", on | lengths | {"dataset_name": str(mined)})
        table.append((seed, without["before"], without["after"], with_them["after"]))
        print(row(seed, *(one["mrr@10"] for one in table[-1][1:])), flush=True)
    columns = list(zip(*table, strict=True))[1:]
    print(row("mean", *(statistics.mean(one["mrr@10"] for one in column) for column in columns)))
    names = ("seed", "before", "without", "with")
    results = [dict(zip(names, line, strict=True)) for line in table]
    (options.folder / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def row(seed: int | str, before: float, without: float, with_them: float) -> str:
    return f"| {seed} | {before:.3f} | {without:.3f} | {with_them:.3f} | {with_them - without:+.3f} |"


def base_fields(options: argparse.Namespace, seed: int) -> dict:
    fields = json.loads((ROOT / "configs" / "code_search.json").read_text(encoding="utf-8"))
    fields = {name: value for name, value in fields.items() if not name.startswith("_")}
    return fields | {"seed": seed, "max_steps": options.base_steps}


def train(folder: Path, fields: dict) -> dict:
    """The report of a run, which begins and ends with an evaluation on the held-out functions."""
    if not (folder / "metrics.json").is_file():
        path = folder.with_suffix(".json")
        path.write_text(json.dumps(fields | QUIET | HELD_OUT | {"output_dir": str(folder)}), encoding="utf-8")
        call(sys.executable, str(ROOT / "scripts" / "train_hf.py"), "--config", str(path), log=folder)
    return json.loads((folder / "metrics.json").read_text(encoding="utf-8"))


def mine(folder: Path, model: Path, options: argparse.Namespace) -> tuple[Path, Path]:
    """The training rows, and the same rows with negatives."""
    pairs, mined = folder / "pairs.jsonl", folder / "mined.jsonl"
    if not mined.is_file():
        from hf_dist_ext.data.code_search import load_code_search

        load_code_search()["train"].select_columns(["query", "positive"]).to_json(str(pairs))
        named = {"model": model, "data": pairs, "output": mined, "negatives": options.negatives}
        named |= {"rank_max": options.rank_max, "relative_margin": options.relative_margin}
        flags = [word for name, value in named.items() for word in (f"--{name}", str(value))]
        call(sys.executable, "-m", "hf_dist_ext.cli", "mine", *flags, log=mined)
    return pairs, mined


def call(*command: str, log: Path) -> None:
    with open(log.with_suffix(".log"), "w", encoding="utf-8") as file:
        subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=True, cwd=ROOT)


if __name__ == "__main__":
    main()

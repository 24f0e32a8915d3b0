"""`hf-dist`: what runs may hold, how they can be spread, and a look at what one learned. An argparse skin, no more."""

from __future__ import annotations

import argparse
import json

from hf_dist_ext.config import exit_on_usage_error
from hf_dist_ext.errors import UsageError


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="hf-dist", description="Exact full-batch contrastive training, any size.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    summary = "the JSON Schema of run files, or what one run file resolves to"
    config = commands.add_parser("config", help=summary, allow_abbrev=False)
    what = config.add_mutually_exclusive_group(required=True)
    what.add_argument("--schema", action="store_true", help='print the schema; name the file in "$schema" of a run')
    what.add_argument("--explain", metavar="RUN.json", help="print the fields it sets, short names resolved")
    config.set_defaults(act=_config)

    presets = commands.add_parser("presets", help="the accelerate presets, a line each")
    presets.set_defaults(act=_presets)

    search = commands.add_parser("search", help="ask a trained code-search model for functions")
    search.add_argument("--model", required=True, metavar="DIR", help="the output_dir of a run, or a hub id")
    search.add_argument("--top_k", type=int, default=5, help="how many functions to print (default: %(default)s)")
    search.add_argument("query", nargs="+", metavar="QUERY", help="what the function should do, in words")
    search.set_defaults(act=_search)

    # `hf-dist config --explain run.json --seed 3`: what argparse does not know are overrides, which load_run reads
    arguments, overrides = parser.parse_known_args(argv)
    if overrides and not getattr(arguments, "explain", None):
        parser.error(f"unexpected arguments: {' '.join(overrides)}")
    with exit_on_usage_error():
        arguments.act(arguments, overrides)


def _config(arguments: argparse.Namespace, overrides: list[str]) -> None:
    if arguments.schema:
        from hf_dist_ext.config_docs import json_schema

        print(json.dumps(json_schema(), indent=2))
        return
    from hf_dist_ext.config import load_run

    run = load_run(["--config", arguments.explain, *overrides])
    for line in run.echo:
        print(f"# {line}")
    print(json.dumps(run.flat(), indent=2, ensure_ascii=False))


def _presets(arguments: argparse.Namespace, overrides: list[str]) -> None:
    from hf_dist_ext.presets import preset_folder, presets
    from hf_dist_ext.short_names import PRESET_SHORT_NAMES

    for name, description in presets().items():
        short = [one for one, preset in PRESET_SHORT_NAMES.items() if preset == name]
        print(f"{name} ({', '.join(short)})" if short else name)
        print(f"    {description}")
    print(f"auto\n    single_gpu on zero or one device, multi_gpu_ddp on several.\n\nFiles: {preset_folder()}")


def _search(arguments: argparse.Namespace, overrides: list[str]) -> None:
    if arguments.top_k < 1:
        raise UsageError(f"--top_k {arguments.top_k} is not a positive number of functions.")
    from hf_dist_ext.search import main as search

    search(arguments.model, " ".join(arguments.query), arguments.top_k)


if __name__ == "__main__":
    main()

"""`hf-dist`: what runs may hold, how they can be spread, and a look at what one learned. An argparse skin, no more."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import json
import re
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from hf_dist_ext import __version__
from hf_dist_ext.errors import UsageError
from hf_dist_ext.failures import end_with_reader, exit_on_usage_error
from hf_dist_ext.run import examples, gone
from hf_dist_ext.train import bars_on_a_terminal_only

UNEXPECTED = "unexpected arguments: "
TAKES_A_RUN = ("train", "plan", "config", "audit")
CHOICE = re.compile(r"argument .*: invalid choice: '(.*)' \(choose from (.*)\)")  # argparse's words


class Parser(argparse.ArgumentParser):
    """A mistake is one line, without the usage above it, and names what comes closest."""

    def error(self, message: str) -> NoReturn:
        given, among = "", []
        if found := CHOICE.match(message):
            given, among = found[1], re.findall(r"[\w-]+", found[2])
            if given in gone.COMMANDS:
                self.exit(2, f"error: hf-dist {given}: {gone.COMMANDS[given]}\n")
        elif message.startswith(UNEXPECTED):
            given, among = message.removeprefix(UNEXPECTED).split()[0], [*self._option_string_actions]
        near = difflib.get_close_matches(given, among, 1)
        closest = f" Closest: {near[0]}." if near else ""
        self.exit(2, f"error: {message}.{closest} {self.prog} --help says what there is.\n")


def main(argv: list[str] | None = None) -> None:
    parser = Parser(prog="hf-dist", description="Exact full-batch contrastive training, any size.")
    parser.add_argument("--version", action="version", version=f"hf_dist_ext {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, act: Callable, summary: str, **options: Any) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=summary, allow_abbrev=False, **options)
        made.set_defaults(act=act)
        return made

    train = command(
        "train",
        _train,
        "train, in as many processes as the run file says; --help [SECTION] explains its fields",
        add_help=False,
    )
    _add_run(train, is_required=False)

    resume = command(
        "resume",
        _resume,
        "go on with the run of an output_dir, from its newest checkpoint; --field value go over its run file",
    )
    resume.add_argument("folder", metavar="DIR", help="the output_dir of a run")

    audit = command(
        "audit",
        _audit,
        "is the gradient of the run's first update right, with its model, rows, processes and precision",
    )
    _add_run(audit)
    audit.add_argument("--rows", type=int, help="so many rows of the update, where the plain step would not fit")
    audit.add_argument("--json", action="store_true", help="print JSON")
    kinds = "the plain step: in float64 on the CPU, or in float32 on the device (default: as its size allows)"
    audit.add_argument("--reference", choices=["auto", "float64", "float32"], default="auto", help=kinds)

    init = command("init", _init, "a run file to begin with and ten rows of data, which train as they are")
    kinds = "; ".join(f"{kind}: {meaning}" for kind, meaning in examples.KINDS.items())
    init.add_argument(
        "kind", choices=examples.KINDS, nargs="?", default="text", help=f"{kinds} (default: %(default)s)"
    )
    init.add_argument("folder", nargs="?", default=".", metavar="DIR", help="where to (default: this folder)")

    command("env", _env, "versions, devices and links here, for a report of an error")

    config = command("config", _config, "the JSON Schema of run files, or what one run file resolves to")
    config.add_argument("--schema", action="store_true", help='print the schema; name the file in "$schema" of a run')
    _add_run(config, "--explain", is_required=False)

    presets = command("presets", _presets, "the accelerate presets, a line each, and what this machine can run")
    presets.add_argument("--explain", metavar="NAME", help="what it shards, what travels, when to use it")

    plan = command("plan", _plan, "bytes per device for every strategy, and which to take, from the run file alone")
    _add_run(plan)
    number = "over all machines (default: num_processes of the run, else those visible here, else 1)"
    plan.add_argument("--num_devices", type=int, help=number)
    plan.add_argument("--device_memory_gib", type=float, help="of one device (default: that of those here, else 80)")
    plan.add_argument("--num_nodes", type=int, help="machines (default: one for every eight devices)")
    plan.add_argument("--interconnect", choices=["nvlink", "pcie", "ethernet"], help="between devices of a machine")
    cards = "a card by name, such as h100, a100-80, l40s, 4090: memory, speed, links; cpu: this CPU, measured"
    plan.add_argument("--device", help=cards)
    plan.add_argument("--host_memory_gib", type=float, help="of a machine (default: twice its devices', at least 64)")
    plan.add_argument("--network_gbps", type=float, help="that a machine sends to others, in Gbit/s (default: 24)")
    plan.add_argument("--tflops", type=float, help="that a device reaches (default: a share of the card's peak)")
    plan.add_argument("--num_rows", type=int, help="of the dataset: says how long the run takes")
    plan.add_argument("--price_per_hour", type=float, help="of one device: says what the run costs")
    plan.add_argument("--json", action="store_true", help="print JSON")
    plan.add_argument("--png", metavar="FILE", help="also draw a stacked bar per strategy")

    search = command(
        "search", _search, "ask a trained model for functions of Python, or for texts or pictures of yours"
    )
    search.add_argument("--model", required=True, metavar="DIR", help="the output_dir of a run, or a hub id")
    search.add_argument("--top_k", type=int, default=5, help="how many results to print (default: %(default)s)")
    search.add_argument("--data", metavar="PATH", help="what is searched: a folder of pictures, a text or data file")
    search.add_argument("--column", help="of a data file: the column with the texts (default: the only one)")
    search.add_argument("--image", metavar="FILE", help="ask with this picture instead of words")
    search.add_argument(
        "query", nargs="*", metavar="QUERY", help="what to look for; without --data, what a function does"
    )

    merge = command("merge", _merge, "the complete model of a checkpoint, as from_pretrained loads it")
    merge.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint-N folder, or the output_dir of a run")
    merge.add_argument("--output", required=True, metavar="DIR", help="a new folder")
    merge.add_argument("--base", metavar="MODEL", help="where the frozen weights are, if not where the run had them")
    merge.add_argument("--trust_remote_code", action="store_true", help="run Python code that comes with the base")
    merge.add_argument("--trust_checkpoint", action="store_true", help="read files that may run code when read")

    _add_mine(command)
    _add_encode(command)
    _add_push(command)

    with exit_on_usage_error(), end_with_reader():
        # `hf-dist train run.json --seed 3`: what argparse does not know are overrides, which load_run reads
        arguments, overrides = parser.parse_known_args(_with_flag(sys.argv[1:] if argv is None else argv))
        if overrides and arguments.command not in ("train", "resume") and not getattr(arguments, "run", None):
            commands.choices[arguments.command].error(f"{UNEXPECTED}{' '.join(overrides)}")
        bars_on_a_terminal_only()
        arguments.act(arguments, overrides)


def _add_run(command: argparse.ArgumentParser, *also: str, is_required: bool = True) -> None:
    help_ = "the run file; --config may be left out; further --field value go over the file's"
    command.add_argument("--config", *also, dest="run", required=is_required, metavar="RUN.json", help=help_)


def _with_flag(argv: list[str]) -> list[str]:
    """`train run.json` -> `train --config run.json`: as a place of its own, argparse would look for the file among the
    values of fields that it does not know."""
    names_a_run = len(argv) > 1 and argv[0] in TAKES_A_RUN and not argv[1].startswith("-")
    return [argv[0], "--config", *argv[1:]] if names_a_run else argv


def _add_mine(command: Callable[..., argparse.ArgumentParser]) -> None:
    mine = command("mine", _mine, "hard negatives for a file of pairs, found by a model")
    add = mine.add_argument
    add("--model", required=True, metavar="DIR", help="the output_dir of a run, or a folder of sentence-transformers")
    add("--data", required=True, metavar="FILE", help="pairs: what dataset_name of a run file takes")
    add("--output", required=True, metavar="FILE", help="a new .jsonl or .parquet file")
    add("--split", default="train", help="of the data (default: %(default)s)")
    add("--anchor_column_name", default="query", metavar="NAME", help="of the data: queries (default: %(default)s)")
    add("--positive_column_name", default="positive", metavar="NAME", help="of the data (default: %(default)s)")
    add("--id_column", metavar="NAME", help="rows with the same value are never negatives of each other")
    add("--corpus", metavar="FILE", help="more documents, in a column named as the positives'")
    add("--cross_encoder", metavar="DIR", help="scores candidates and positives in the model's place")
    add("--seed", type=int, default=0, help="of --sampling_strategy random (default: %(default)s)")
    theirs = mine.add_argument_group("options of mine_hard_negatives, with its defaults")
    add = partial(theirs.add_argument, default=argparse.SUPPRESS)
    add("--num_negatives", type=int, help="of a query (default: 3)")
    add("--range_min", type=int, help="better ranks are left out (default: 0)")
    add("--range_max", type=int, help="so are ranks from this one on (default: by num_negatives)")
    add("--max_score", type=float, help="negatives score at most this")
    add("--min_score", type=float, help="negatives score at least this")
    add("--absolute_margin", type=float, help="negatives score at least this below the positive")
    add("--relative_margin", type=float, help="the same, as a share of the positive's score")
    add("--sampling_strategy", choices=["top", "random"], help="of those left (default: top)")
    for name in ("query_prompt", "corpus_prompt"):
        add(f"--{name}_name", metavar="NAME", help="of the model's prompts (default: the model's own)")
        add(f"--{name}", metavar="TEXT", help="put before every text instead")
    add("--include_positives", action="store_true", help="among the candidates, for data of rerankers")
    formats = ["triplet", "n-tuple", "labeled-pair", "labeled-list"]
    add("--output_format", choices=formats, help="columns of the output (default: triplet)")
    add("--output_scores", action="store_true", help="also write the scores")
    add("--batch_size", type=int, help="rows that go through the model at once (default: 32)")
    add("--faiss_batch_size", type=int, help="queries compared at a time (default: by the number of documents)")
    add("--use_faiss", action="store_true", help="search with faiss")
    add("--use_multi_process", nargs="+", metavar="DEVICE", help="a process for each, as in cuda:0 cuda:1")
    add("--verbose", action=argparse.BooleanOptionalAction, help="print statistics (default: true)")
    add("--cache_folder", metavar="DIR", help="embeddings are kept here for the next time")


def _add_encode(command: Callable[..., argparse.ArgumentParser]) -> None:
    encode = command("encode", _encode, "embeddings of the rows of a file, or of the pictures of a folder, as a file")
    add = encode.add_argument
    add("--model", required=True, metavar="DIR", help="the output_dir of a run, or a hub id")
    add("data", metavar="FILE", help="a data file, a text file (a row per line) or a folder of pictures")
    add("--output", required=True, metavar="FILE", help="a new .npy or .parquet file, in the order of the rows")
    add("--column", metavar="NAME", help="with the texts (default: the only one that holds texts)")
    add("--id_column", metavar="NAME", help="kept in the .parquet (default: _id, id, or the row's number)")
    add(
        "--prompt_name",
        metavar="NAME",
        help="of the model's prompts: query, document, ... (default: the folder's own, or none)",
    )
    add("--prompt", metavar="TEXT", help="put before every text")
    add("--batch_size", type=int, default=64, help="rows that go through the model at once (default: %(default)s)")
    add("--dims", type=int, help="keep so many leading dimensions, those of Matryoshka training")
    precisions = ["float32", "float16", "int8", "uint8", "binary", "ubinary"]
    add("--precision", choices=precisions, default="float32", help="of the output (default: %(default)s)")
    add("--devices", nargs="+", metavar="DEVICE", help="a process for each, as in cuda:0 cuda:1 (default: one)")
    add("--ranges", metavar="FILE", help="of an earlier int8 or uint8 output, to have the same steps")


def _add_push(command: Callable[..., argparse.ArgumentParser]) -> None:
    push = command(
        "push", _push, "a model's folder to the hub, as it loads: without checkpoints, optimizers and caches"
    )
    push.add_argument("folder", metavar="DIR", help="the folder that a run ended with")
    push.add_argument("repo_id", metavar="REPO_ID", help="of the hub: someone/a-model; made if need be")
    push.add_argument("--private", action="store_true", help="make the repository private, where it is made")
    push.add_argument("--revision", metavar="NAME", help="branch to push to (default: main)")
    push.add_argument("--include", nargs="+", default=[], metavar="PATTERN", help="push these files of DIR too")


def _mine(arguments: argparse.Namespace, overrides: list[str]) -> None:
    from hf_dist_ext.tasks.mine import Mine, main

    given = {name: value for name, value in vars(arguments).items() if name not in ("command", "act")}
    own = {one.name: given.pop(one.name) for one in fields(Mine) if one.name in given}
    main(Mine(**own, options=given))


def _encode(arguments: argparse.Namespace, overrides: list[str]) -> None:
    from hf_dist_ext.tasks.encode import Encode, main

    main(Encode(**{name: value for name, value in vars(arguments).items() if name not in ("command", "act")}))


def _train(arguments: argparse.Namespace, overrides: list[str]) -> None:
    from hf_dist_ext.train import MODULE, main

    main([*(["--config", arguments.run] if arguments.run else []), *overrides], MODULE)


def _audit(arguments: argparse.Namespace, overrides: list[str]) -> None:
    from hf_dist_ext.launch import is_launched
    from hf_dist_ext.tasks.audit import QUIET, audit, folder_of_all
    from hf_dist_ext.train import main

    _check_flags(arguments, overrides)
    if arguments.rows is not None and arguments.rows < 1:
        raise UsageError(f"--rows {arguments.rows} is not a positive number of rows.")
    own = [*(["--rows", str(arguments.rows)] if arguments.rows else []), *(["--json"] if arguments.json else [])]
    program = ("--module", "hf_dist_ext.cli", "audit", *own, "--reference", arguments.reference)
    act = partial(audit, rows=arguments.rows, reference=arguments.reference, as_json=arguments.json)
    main(["--config", arguments.run, *overrides], program, act, **QUIET, output_dir=folder_of_all(is_launched()))


def _resume(arguments: argparse.Namespace, overrides: list[str]) -> None:
    from hf_dist_ext.run.record import resume
    from hf_dist_ext.train import MODULE, main

    main(resume(Path(arguments.folder), overrides), MODULE)


def _init(arguments: argparse.Namespace, overrides: list[str]) -> None:
    folder = Path(arguments.folder)
    for path in examples.copy(arguments.kind, folder):
        print(path)
    if arguments.kind != "text" and importlib.util.find_spec("PIL") is None:
        print("first:     pip install 'hf_dist_ext[image]'      # its rows have pictures")
    print("train it:  " + (f"cd {folder} && " if folder != Path() else "") + "hf-dist train run.json")


def _env(arguments: argparse.Namespace, overrides: list[str]) -> None:
    from hf_dist_ext.planner.environment import lines

    print("\n".join(lines()))


def _push(arguments: argparse.Namespace, overrides: list[str]) -> None:
    from hf_dist_ext.tasks.push import main

    main(Path(arguments.folder), arguments.repo_id, arguments.private, arguments.revision, arguments.include)


def _config(arguments: argparse.Namespace, overrides: list[str]) -> None:
    if arguments.schema == bool(arguments.run):
        raise UsageError("hf-dist config takes a run file, or --schema.")
    if arguments.schema:
        from hf_dist_ext.run.help import json_schema

        print(json.dumps(json_schema(), indent=2))
        return
    from hf_dist_ext.launch import in_words
    from hf_dist_ext.planner.described import check_data, words
    from hf_dist_ext.run.read import load_run

    run = load_run(["--config", arguments.run, *overrides])
    for line in run.echo:
        print(f"# {line}")
    over = [word[2:].partition("=")[0] for word in overrides if word.startswith("--")]
    for name, text in words(run, *in_words(run), over).items():
        print(f"# {name}: {text}")
    print(json.dumps(run.flat(), indent=2, ensure_ascii=False))
    check_data(run)


def _presets(arguments: argparse.Namespace, overrides: list[str]) -> None:
    from hf_dist_ext.planner.devices import count_devices
    from hf_dist_ext.run.config import PRESET_SHORT_NAMES
    from hf_dist_ext.run.presets import explained, find_preset, preset_folder, presets, runs_here

    devices = count_devices()
    if arguments.explain:
        path = find_preset(arguments.explain)
        print("\n".join(explained(path)))
        print(f"\nruns here: {runs_here(path, devices)}\nfile: {path}")
        return
    for name, description in presets().items():
        short = [one for one, preset in PRESET_SHORT_NAMES.items() if preset == name]
        print(f"{name} ({', '.join(short)})" if short else name)
        print(f"    {description}\n    here: {runs_here(find_preset(name), devices)}")
    print(f"auto\n    what hf-dist plan recommends for the devices here.\n\nFiles: {preset_folder()}")


def _check_flags(arguments: argparse.Namespace, overrides: list[str]) -> None:
    """Raises UsageError for a slip in one of the command's own flags, for which a field of a run would be proposed."""
    from hf_dist_ext.run.config import fields_of_run_file

    known = fields_of_run_file()
    for name in (word[2:].partition("=")[0] for word in overrides if word.startswith("--")):
        near = difflib.get_close_matches(name, [*(vars(arguments).keys() - {"act", "command"}), *known], 1, 0.8)
        if name not in known and near and near[0] not in known:
            raise UsageError(f"--{name} is not an option of this command. Closest: --{near[0]}.")


def _plan(arguments: argparse.Namespace, overrides: list[str]) -> None:
    from hf_dist_ext.planner.command import main

    _check_flags(arguments, overrides)
    main(arguments, overrides)


def _search(arguments: argparse.Namespace, overrides: list[str]) -> None:
    if arguments.top_k < 1:
        raise UsageError(f"--top_k {arguments.top_k} is not a positive number of results.")
    wrong = [name for name in ("image", "column") if getattr(arguments, name) is not None]
    if wrong and arguments.data is None:
        raise UsageError(f"--{wrong[0]} goes with --data, which says what is searched. Give --data PATH.")
    from hf_dist_ext.tasks.search import main

    query = " ".join(arguments.query)
    main(arguments.model, query, arguments.top_k, arguments.data, arguments.image, arguments.column)


def _merge(arguments: argparse.Namespace, overrides: list[str]) -> None:
    from hf_dist_ext.checkpoints.merge import merge

    output = Path(arguments.output)
    merge(Path(arguments.checkpoint), output, arguments.base, arguments.trust_remote_code, arguments.trust_checkpoint)
    print(f"{output}: the complete model.")


if __name__ == "__main__":
    main()

"""README, docs and example run files: what they name exists, what they show parses, what they call runnable runs."""

import ast
import importlib
import json
import re
import shlex
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path

import jsonschema
import pytest
from transformers import TrainingArguments

from hf_dist_ext import DistTrainer, DistTrainingArguments
from hf_dist_ext.cli import main as hf_dist
from hf_dist_ext.data.load import load_datasets
from hf_dist_ext.run.config import PRESET_SHORT_NAMES, RunConfig, fields_of_run_file
from hf_dist_ext.run.help import json_schema
from hf_dist_ext.run.read import load_run
from scripts.error_messages import messages
from scripts.error_messages import page as page_of_messages
from tests.distributed.forked import run_python
from tests.launching import ROOT
from tests.tiny_models import WORDS, embedding_model, model_config

PACKAGE = ROOT / "hf_dist_ext"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
RUN_FILES = sorted((ROOT / "configs").glob("*.json"))
RUNS = "<!-- test: run -->"

by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
by_run_file = pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: path.stem)


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[tuple[str, bool]]:
    """Fenced blocks of a language, and whether the line above says that they run."""
    pattern = rf"({re.escape(RUNS)}\n)?```{language}\n(.*?)```"
    return [(code, bool(mark)) for mark, code in re.findall(pattern, text_of(page), re.DOTALL)]


def commands(page: Path) -> list[list[str]]:
    """Indented lines that call a program of ours or of accelerate, as a shell would cut them; `&&` separates two."""
    lines = re.findall(r"^ {4,}((?:pip|python|accelerate|hf-dist) .+)$", text_of(page), re.MULTILINE)
    return [shlex.split(part.partition(" > ")[0]) for line in lines for part in line.split(" && ")]


# ---- names ----


@by_page
def test_every_path_that_is_named_exists(page):
    named = re.findall(r"(?<![\w/.])(?:hf_dist_ext|configs|scripts|docs|tests)/[\w./*-]*", text_of(page))
    missing = [name for name in named if not list(ROOT.glob(name.rstrip("./")))]
    assert not missing


@by_page
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", text_of(page)):
        if target.startswith("https://"):
            continue
        path, _, heading = target.partition("#")
        linked = (page.parent / path) if path else page
        assert linked.exists(), target
        assert not heading or heading in headings(linked), target


def headings(page: Path) -> list[str]:
    """Anchors as GitHub makes them of headings."""
    titles = re.findall(r"^#+ (.+)$", text_of(page), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]


def test_the_glossary_is_in_order_and_of_words_that_are_used():
    glossary = ROOT / "docs" / "glossary.md"
    terms = re.findall(r"^## (.+)$", text_of(glossary), re.MULTILINE)
    assert len(terms) > 40 and len(set(terms)) == len(terms)
    assert terms == sorted(terms, key=str.casefold)
    said = "".join(text_of(page) for page in PAGES if page != glossary).casefold()
    words = {term: re.sub(r" \(.*\)", "", term).casefold() for term in terms}
    assert not [term for term, word in words.items() if word not in said]
    linked = {name for page in PAGES for name in re.findall(r"\(glossary\.md#([\w-]+)\)", text_of(page))}
    assert len(linked) > 10 and linked <= set(headings(glossary))


def test_what_the_comparison_is_shown_by_exists(capsys):
    tables = text_of(ROOT / "docs" / "compared.md").partition("\n## Where other guides")[0]
    rows = re.findall(r"^\|(.+)\|$", tables, re.MULTILINE)
    cells = [[cell.strip() for cell in row.split("|")] for row in rows]
    features = [row for row in cells if row[0] not in ("feature", "---")]
    assert len(features) > 30 and {len(row) for row in features} == {4}
    for feature, *_, shown in features:
        (shown,) = re.findall(r"^`(.+)`$", shown)
        path, _, name = shown.removeprefix("python ").partition("::")
        if shown.startswith("hf-dist "):
            with pytest.raises(SystemExit) as end:
                hf_dist([*shown.split()[1:2], "--help"])
            assert end.value.code == 0, feature
        elif shown.startswith("python "):
            assert (ROOT / path).is_file(), feature
        else:
            assert f"\ndef {name}(" in text_of(ROOT / path), feature


QUESTIONS = ("When you need this page:", "The shortest way:", "How you know it works:")


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_a_page_begins_with_what_it_is_for_how_to_do_it_and_how_to_check_it(page):
    top = text_of(page).partition("\n\n")[2].partition("\n\n")[0]
    asked = re.findall(r"^\* \*\*(.+?)\*\*", top, re.MULTILINE)
    assert tuple(asked) == QUESTIONS


def test_the_readme_is_short():
    assert len(text_of(ROOT / "README.md").split()) <= 900


def test_every_package_is_named_once():
    section = text_of(ROOT / "CONTRIBUTING.md").partition("## Where things are")[2]
    named = re.findall(r"^\| `([\w/.]+)` \|", section, re.MULTILINE)
    here = {f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")}
    assert len(named) == len(set(named)) and set(named) == here


def test_every_field_of_ours_is_on_a_page_and_read_outside_of_its_declaration():
    declared = [PACKAGE / "run" / "config.py", PACKAGE / "training" / "arguments.py"]
    theirs = {field.name for field in fields(TrainingArguments)}
    ours = {field.name for kind in (RunConfig, DistTrainingArguments) for field in fields(kind)} - theirs
    pages = set(re.findall(r"\w+", " ".join(map(text_of, PAGES[3:]))))
    code = " ".join(text_of(path) for path in PACKAGE.rglob("*.py") if path not in declared)
    assert len(ours) > 100 and not ours - pages and not ours - set(re.findall(r"\w+", code))


PARTS = sorted(path.parent for path in PACKAGE.glob("*/__init__.py"))


@pytest.mark.parametrize("package", PARTS, ids=lambda package: package.name)
def test_files_that_a_package_describes_exist(package):
    named = re.findall(r"`(\w+\.py)`", text_of(package / "__init__.py"))
    assert named and all((package / name).is_file() for name in named)


@pytest.mark.parametrize("module", ["", ".engine", ".data"])
def test_public_names_are_those_of_the_page_that_lists_them(module):
    name = f"hf_dist_ext{module}"
    _, _, section = text_of(ROOT / "docs" / "api.md").partition(f"## `{name}`\n")
    table, _, _ = section.partition("\n\nBeside" if not module else "\n\n## ")
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == set(importlib.import_module(name).__all__)


def test_attributes_listed_as_public_are_there():
    _, _, section = text_of(ROOT / "docs" / "api.md").partition("these public attributes:")
    names = re.findall(r"^\| `(\w+)", section.partition("## ")[0], re.MULTILINE)
    assert len(names) > 4 and [name for name in names if not hasattr(DistTrainer, name)] == ["loss"]  # set when made


@by_page
def test_examples_are_python_and_import_public_names_only(page):
    for code, _ in blocks(page, "python"):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("hf_dist_ext"):
                assert {alias.name for alias in node.names} <= set(importlib.import_module(node.module).__all__)


@by_page
def test_every_field_in_a_pair_of_quotes_is_a_field(page):
    names = re.findall(r'`[^`\n]*?"(\w+)": [^`\n]*`', text_of(page))
    known = {*fields_of_run_file(), "$schema", "query", "input_ids"}
    assert not set(names) - known


def test_the_short_names_are_those_of_the_table():
    section = text_of(ROOT / "docs" / "configuration.md").partition("## Presets")[2].partition("\n## ")[0]
    assert not {f'"{name}"' for name in PRESET_SHORT_NAMES} - set(re.findall(r'"\w+"', section))


def test_the_error_messages_are_those_of_the_code():
    templates = [template for path in PACKAGE.rglob("*.py") for template in messages(text_of(path))]
    assert len(templates) > 400
    tables = text_of(ROOT / "docs" / "troubleshooting.md").partition("## Slow, hanging")[0]
    first_cells = re.findall(r"^\| (`.+?) \|", tables, re.MULTILINE)
    documented = [span for cell in first_cells for span in re.findall(r"`([^`]+)`", cell)]
    assert len(documented) > 50
    unknown = []
    for message in documented:
        pattern = re.compile(".*".join(map(re.escape, message.split("…"))), re.DOTALL)
        if not any(pattern.search(template) for template in templates):
            unknown.append(message)
    assert not unknown


def test_the_list_of_messages_has_those_of_every_package():
    lines = list(page_of_messages())
    listed = {line.removeprefix("\n## ").strip() for line in lines if line.startswith("\n## ")}
    assert {"the commands"} | {package.name for package in PARTS} - {"engine"} <= listed | {"engine"}
    assert len([line for line in lines if line.startswith("* `")]) > 400


def test_the_page_shows_cases_of_the_exactness_table():
    from tests.parity.exactness_table import RUNS as WAYS
    from tests.parity.exactness_worker import CASES

    section = text_of(ROOT / "docs" / "exactness.md").partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+?) \| (\d\w?e-\d+) \|", section, re.MULTILINE)
    bounds = {case.name: f"{case.tolerance:.0e}" for case in CASES}
    assert len(rows) > 10
    assert f"| configuration | bound | {' | '.join(WAYS)} |" in section
    assert {name: bounds.get(name) for name, _ in rows} == dict(rows)


# ---- what is shown ----


@by_run_file
def test_an_example_run_file_parses_and_fits_the_schema(path):
    jsonschema.validate(json.loads(text_of(path)), json_schema())
    assert load_run(["--config", str(path)]).given


@by_page
def test_json_shown_on_a_page_fits_the_schema(page):
    for code, _ in blocks(page, "json"):
        jsonschema.validate(json.loads(code), json_schema())


def test_the_readme_has_the_two_commands():
    lines = text_of(ROOT / "README.md").splitlines()
    assert (
        "    pip install -c constraints.txt -e . && python scripts/train_hf.py --config configs/code_search.json"
        in lines
    )
    assert "    pip install -c constraints.txt -e '.[test]' && pytest" in lines


def test_the_page_of_the_run_file_lists_every_extra():
    (call,) = [node for node in ast.walk(ast.parse(text_of(ROOT / "setup.py"))) if isinstance(node, ast.Call)
               and getattr(node.func, "id", "") == "setup"]  # fmt: skip
    extras = next(option.value for option in call.keywords if option.arg == "extras_require")
    table = text_of(ROOT / "docs" / "configuration.md").partition("| extra | for |")[2].partition("\n\n")[0]
    listed = [
        name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.split("|")[1] if line else "")
    ]
    assert sorted(listed) == sorted(key.value for key in extras.keys) and len(listed) == 9


@by_page
def test_every_command_is_one(page, monkeypatch, capsys):
    from accelerate.commands.launch import launch_command_parser

    monkeypatch.chdir(ROOT)
    for program, *words in commands(page):
        if program == "accelerate":
            launched = launch_command_parser().parse_args(words[1:])
            assert Path(launched.config_file).is_file()
            program, words = "python", [launched.training_script, *launched.training_script_args]
            if launched.module:
                assert words.pop(0) == "hf_dist_ext.cli"
                program = "hf-dist"
        if program == "hf-dist" and words[0] in ("train", "audit") and "--help" not in words:
            program, words = "python", ["scripts/train_hf.py", "--config", *words[1:]]
        if words and words[0] == "scripts/train_hf.py" and "--help" not in words:
            assert load_run(words[1:]).training["output_dir"].startswith("outputs/")
        elif program == "python":
            assert Path(words[0]).is_file()
        elif program == "hf-dist" and words[0] not in ("init", "resume", "search", "merge"):  # of a trained model
            with pytest.raises(SystemExit) if "--help" in words else nullcontext():
                hf_dist(words)
            assert capsys.readouterr().out


SELECTED = """
import argparse, json, re, sys
import pytest
from _pytest.mark import KeywordMatcher, MarkMatcher
from _pytest.mark.expression import Expression

parser = argparse.ArgumentParser()
parser.add_argument("paths", nargs="*")
for flag in ("-k", "-m", "-n"):
    parser.add_argument(flag)
parser.add_argument("-s", action="store_true")
parser.set_defaults(k="", m="not slow")
asked = [parser.parse_args(words) for words in json.loads(sys.argv[1])]
items = []

class Collector:
    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        globals()["items"] = list(items)

files = {path.partition("::")[0] for one in asked for path in one.paths}
pytest.main(["--collect-only", "-q", "-q", "-o", "addopts=", "-n", "0", *sorted(files)], plugins=[Collector()])

def selects(one, item):
    is_inside = not one.paths or any(re.match(re.escape(path) + "($|::|\\\\[|/)", item.nodeid) for path in one.paths)
    has_words = not one.k or Expression.compile(one.k).evaluate(KeywordMatcher.from_item(item))
    marks = MarkMatcher.from_markers(item.iter_markers())
    return is_inside and has_words and Expression.compile(one.m).evaluate(marks)

print("counts:", json.dumps([sum(selects(one, item) for item in items) for one in asked]))
"""


def test_every_command_of_pytest_selects_a_test():
    shown = [
        command for page in PAGES for command in re.findall(r"(?:^ {4}|`|&& )pytest\b([^`\n]*)", text_of(page), re.M)
    ]
    words = [shlex.split(command) for command in dict.fromkeys(shown) if "NAME" not in command]
    said = run_python(SELECTED, json.dumps(words))
    counts = json.loads(said.partition("counts:")[2])
    assert len(counts) == len(words) > 20
    assert not [shlex.join(command) for command, count in zip(words, counts, strict=True) if not count]


def test_the_readme_shows_every_way_to_launch():
    programs = [words[0] for words in commands(ROOT / "README.md")]
    assert {"pip", "python", "accelerate", "hf-dist"} <= set(programs)


# ---- what runs ----

EXAMPLES = [
    pytest.param(code, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, (code, runs) in enumerate(blocks(page, "python"))
    if runs
]


@pytest.mark.parametrize("code", EXAMPLES)
def test_a_python_example_runs(code, tmp_path):
    if "outputs/code_search" in code:
        embedding_model(model_config("bert")).save_pretrained(str(tmp_path / "outputs" / "code_search"))
    for name, columns in (("notes.jsonl", ["text"]), ("pairs.jsonl", ["query", "positive"])):
        rows = [json.dumps({column: f"{column} {one} {two}" for column in columns}) for one in WORDS for two in WORDS]
        (tmp_path / name).write_text("\n".join(rows))
    assert run_python(code, cwd=tmp_path).strip(), "an example shows something"
    if (tmp_path / "mined.jsonl").exists():
        train, _ = load_datasets(RunConfig(dataset_name=str(tmp_path / "mined.jsonl")))
        assert len(train) > 9 and train.column_names == ["query", "positive", "negative"]


TINY_RUNS = """
import json, random, sys
sys.path.insert(0, "scripts")
from train_hf import main
from tests.tiny_models import WORDS, embedding_model, model_config, tiny_tokenizer

folder, draw = sys.argv[1], random.Random(0)
text = lambda: " ".join(draw.choices(WORDS, k=draw.randint(3, 12)))
rows = [
    {"question": text(), "answer": text(), "query": text(), "positive": text(), "negatives": [text()] * (1 + i % 3)}
    for i in range(60)
]
with open(f"{folder}/rows.jsonl", "w") as file:
    file.writelines(json.dumps(row) + "\\n" for row in rows)
for name, backbone, side, pooling, more in (
    ("finetune_text_embedding", "bert", "right", "mean", []),
    ("finetune_decoder_embedding", "qwen3", "left", "last", ["--matryoshka_dims", "32", "16"]),
):
    config = model_config(backbone, max_position_embeddings=512)
    model = embedding_model(config, pooling=pooling, tokenizer=tiny_tokenizer(side, max_length=512))
    model.save_pretrained(f"{folder}/{backbone}", create_model_card=False)
    main([
        "--config", f"configs/{name}.json", "--output_dir", f"{folder}/{name}",
        "--dataset_name", f"{folder}/rows.jsonl", "--model_name_or_path", f"{folder}/{backbone}",
        "--accelerate_config", "single", "--use_cpu", "--per_device_train_batch_size", "20", "--eval_holdout", "10",
        "--logging_steps", "1", "--dataloader_num_workers", "0", *more,
    ])
"""


def test_the_fine_tuning_examples_train_tiny_models(tmp_path):
    run_python(TINY_RUNS, tmp_path)
    for name in ("finetune_text_embedding", "finetune_decoder_embedding"):
        report = json.loads(text_of(tmp_path / name / "metrics.json"))
        assert report["contrastive_batch_size"] == 20 and report["after"]["mrr@10"] > 0

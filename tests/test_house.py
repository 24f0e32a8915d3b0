"""The house: which package may import which, no circle of files, and what imports without torch or transformers.

Arrows are read from the source of every import, those inside functions and those for types included.
"""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "hf_dist_ext"
FILES = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in sorted(PACKAGE.rglob("*.py"))}
FILES = {name: path for name, path in FILES.items() if not name.endswith("__init__")}

# Package -> the packages that its files may import. Everything may import the files named in COMMON.
ALLOWED = {
    "engine": "",
    "strategies": "engine",
    "models": "strategies",
    "frozen": "engine strategies models",
    "checkpoints": "strategies models",
    "data": "run",
    "planner": "run",
    "run": "checkpoints",  # manifest and folder alone: they need the standard library only
    "evaluation": "engine strategies models data run",
    "audit": "engine strategies models data checkpoints",
    "training": "engine strategies models frozen data checkpoints evaluation audit run",
    "tasks": "engine strategies models frozen data checkpoints evaluation training run planner",
    "cli": "train launch run planner checkpoints tasks",
    "train": "launch strategies run tasks training",
    "launch": "run planner checkpoints tasks",
}
COMMON = {"errors", "policy", "failures", "launched", "lazy"}
RUN_READS = {"checkpoints.manifest", "checkpoints.folder"}

# Trainer is subclassed directly and once, but for evaluation that generates.
SUBCLASSES = {
    "training.trainer": ["DistTrainer"],
    "tasks.generation": ["GeneratingTrainer"],
}
LINES_OF_OVERRIDE = 15
# What asks which parallelism runs; it belongs behind the seam in strategies/.
PARALLELISM = re.compile(
    r"is_fsdp_enabled|is_deepspeed_enabled|\bDTensor\b|\bds_[a-z]+|DistributedType|FullyShardedDataParallel"
    r"|DistributedDataParallel"
)
# What a launcher tells its processes. `launched` reads it for all; `launch` starts a launcher and looks whether it
# runs under one; strategies.fsdp_options hides FSDP from accelerate for a while.
LAUNCHER = re.compile(r"ACCELERATE_USE_|PARALLELISM_CONFIG_[A-Z{]|\"FSDP_|LOCAL_RANK|WORLD_SIZE|\"RANK\"")
READS_LAUNCHER = {"launch", "launched", "strategies.fsdp_options"}
# Strategies by name: only strategies.choose knows which there are. transformers splits a model while it loads one.
PARTICULAR = {
    f"strategies.{name}"
    for name in (
        "ddp", "fsdp", "fsdp_options", "sharded", "splitting", "tensor_parallel", "zero", "zero_checkpoint"
    )
}  # fmt: skip
NAMES_ONE = {"models.backbones -> strategies.splitting"}


def imports(name: str) -> set[str]:
    """The files of the package that a file imports, as "engine.chunks"."""
    found = set()
    for node in ast.walk(ast.parse(FILES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hf_dist_ext"):
            inner = node.module.removeprefix("hf_dist_ext").removeprefix(".")
            for alias in node.names:
                module = ".".join(filter(None, [inner, alias.name]))
                found.add(module if module in FILES else inner)
        elif isinstance(node, ast.Import):
            found |= {a.name.removeprefix("hf_dist_ext.") for a in node.names if a.name.startswith("hf_dist_ext.")}
    return found & FILES.keys() - {name}


# What is imported where an embedder is trained or evaluated.
OF_SENTENCE_TRANSFORMERS = (
    "evaluation.from_files",
    "models.from_run",
    "tasks.embedding",
    "tasks.lengths",
)
ARROWS = {name: imports(name) for name in FILES}


def is_allowed(source: str, target: str) -> bool:
    home, other = source.partition(".")[0], target.partition(".")[0]
    if home == other or target in COMMON:
        return True
    if home == "run" and other == "checkpoints":
        return target in RUN_READS
    if home == "strategies" and other == "run":
        return target == "run.compatibility"
    return other in ALLOWED.get(home, "").split()


def circles() -> set[str]:
    """The files from which imports lead back to themselves."""
    reached = {name: set(targets) for name, targets in ARROWS.items()}
    while True:
        more = {name: set.union(targets, *(reached[t] for t in targets)) for name, targets in reached.items()}
        if more == reached:
            return {name for name, targets in reached.items() if name in targets}
        reached = more


def test_packages_import_only_what_they_may():
    assert not [f"{source} -> {to}" for source in FILES for to in ARROWS[source] if not is_allowed(source, to)]


def test_no_file_imports_itself_by_way_of_others():
    assert not circles()


def test_no_package_has_more_than_16_percent_of_the_lines():
    of_packages = Counter()
    for path in PACKAGE.rglob("*.py"):
        home, *inner = path.relative_to(PACKAGE).parts
        of_packages[home if inner else "top"] += len(path.read_text(encoding="utf-8").splitlines())
    assert not {name: count for name, count in of_packages.items() if count > 0.16 * of_packages.total()}


def test_few_classes_subclass_trainer():
    found = {}
    for name, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
                if bases & {"Trainer", "DistTrainer"}:
                    found.setdefault(name, []).append(node.name)
    assert found == SUBCLASSES


def test_what_trainer_has_is_overridden_in_a_few_lines():
    """An override hands on to a part; what takes longer belongs there."""
    from transformers import Trainer

    too_long = []
    for name in SUBCLASSES.keys():
        for node in ast.walk(ast.parse(FILES[name].read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and hasattr(Trainer, node.name):
                body = node.body[ast.get_docstring(node) is not None :]
                if body[-1].end_lineno - body[0].lineno >= LINES_OF_OVERRIDE:
                    too_long.append(f"{name}.{node.name}")
    assert not too_long


def lines_with(pattern: re.Pattern, of: Iterable[str]) -> list[str]:
    sources = {name: FILES[name].read_text(encoding="utf-8").splitlines() for name in of}
    return [f"{name}: {line.strip()}" for name, lines in sources.items() for line in lines if pattern.search(line)]


def test_only_strategies_ask_which_parallelism_runs():
    assert lines_with(PARALLELISM, (name for name in FILES if not name.startswith("strategies."))) == []
    assert len(lines_with(PARALLELISM, PARTICULAR | {"strategies.tensors"})) > 9


def test_one_file_reads_what_a_launcher_says():
    assert lines_with(LAUNCHER, FILES.keys() - READS_LAUNCHER) == []
    (hidden,) = lines_with(LAUNCHER, ["strategies.fsdp_options"])
    assert "ACCELERATE_USE_FSDP" in hidden and len(lines_with(LAUNCHER, ["launched"])) > 5


def test_no_file_but_choose_knows_which_strategies_there_are():
    outside = [name for name in FILES if not name.startswith("strategies.")]
    found = {f"{source} -> {target}" for source in outside for target in ARROWS[source] & PARTICULAR}
    assert found == NAMES_ONE
    assert ARROWS["strategies.choose"] & PARTICULAR == PARTICULAR - {
        "strategies.sharded",
        "strategies.zero_checkpoint",
    }
    assert not ARROWS["strategies.base"] & PARTICULAR


BLOCKED_IMPORT = """
import importlib, sys

blocked, modules = (words.split(",") for words in sys.argv[1:])
for name in blocked:
    sys.modules[name] = None  # an import of it raises ModuleNotFoundError
for module in modules:
    importlib.import_module(f"hf_dist_ext.{module}")
"""
WITHOUT_TORCH = ("run.", "planner.")
ALONE = [
    "train",
    "launch",
    "launched",
    "cli",
    "errors",
    "policy",
    "failures",
    "checkpoints.manifest",
    "checkpoints.folder",
]


@pytest.mark.parametrize("blocked, modules", [
    ("transformers accelerate datasets peft evaluate", [name for name in FILES if name.startswith("engine.")]),
    ("torch transformers accelerate datasets peft numpy",
     [name for name in FILES if name.startswith(WITHOUT_TORCH)] + ALONE),
    ("sentence_transformers", [name for name in FILES if name not in OF_SENTENCE_TRANSFORMERS]),
], ids=["engine needs torch only", "what runs before ranks exist needs no torch", "used, not imported"])  # fmt: skip
def test_it_imports_with_others_blocked(blocked, modules):
    command = [sys.executable, "-c", BLOCKED_IMPORT, ",".join(blocked.split()), ",".join(modules)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=PACKAGE.parent)
    assert len(modules) > 6 and done.returncode == 0, done.stderr


def test_the_package_itself_imports_nothing_and_names_its_parts():
    code = (
        "import sys, hf_dist_ext, hf_dist_ext.engine, hf_dist_ext.data\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
        "from hf_dist_ext import UsageError\n"
        "assert issubclass(UsageError, ValueError) and hf_dist_ext.__version__\n"
        "assert {'DistTrainer', 'InfoNCELoss'} <= set(dir(hf_dist_ext))\n"
        "assert not hasattr(hf_dist_ext, 'nonsense')\n"
        "for package in (hf_dist_ext, hf_dist_ext.engine, hf_dist_ext.data):\n"
        "    assert all(hasattr(package, name) for name in package.__all__), package\n"
        "import pickle\n"
        "assert hf_dist_ext.DistTrainingArguments.__module__ == 'hf_dist_ext'\n"
        "assert pickle.loads(pickle.dumps(hf_dist_ext.DistTrainingArguments)) is hf_dist_ext.DistTrainingArguments"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)


@pytest.mark.parametrize("package", ["", "engine", "data"])
def test_a_type_checker_sees_the_names_that_are_handed_on(package):
    """They are imported when first asked for, which a type checker and an editor do not follow."""
    path = PACKAGE / package / "__init__.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {}
    for block in (node for node in tree.body if isinstance(node, ast.If)):
        for line in block.body:
            home = line.module.removeprefix(f"hf_dist_ext.{package}".rstrip(".") + ".")
            names |= {alias.name: home for alias in line.names if alias.asname == alias.name}
    homes = next(node for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "_HOMES")
    assert names == ast.literal_eval(homes.value)


def test_the_head_of_a_package_says_what_each_of_its_files_is_for():
    heads = {}
    for path in PACKAGE.rglob("__init__.py"):
        files = {f"`{one.name}`" for one in path.parent.glob("*.py")} - {"`__init__.py`"}
        head = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        heads[path.parent.name] = sorted(name for name in files if name not in head)
    of_the_doors, of_evaluate = (
        heads.pop(PACKAGE.name),
        heads.pop("retrieval_metrics"),
    )  # README, and a metric's one file
    assert of_the_doors and of_evaluate and len(heads) > 10
    assert {name: files for name, files in heads.items() if files} == {}

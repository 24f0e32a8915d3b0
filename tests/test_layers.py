"""The arrows of the design: which files import without transformers, and which even without torch."""

import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "hf_dist_ext"
CORE = (
    "chunking row_features column_layout image_features chunk_budget gradient_cache losses tiled_infonce freezing "
    "frozen_mode image_stand_in"
).split()
BEFORE_RANKS = (
    "errors policy fields short_names task_fields config config_docs stage_plan manifest run_folder presets "
    "preset_notes deepspeed_install memory planner launch cli preemption lease failures shape_config tape "
    "architectures text_architectures tower_architectures vision_language who_trains workload knobs strategies "
    "traffic plan_reasons plan_report devices auto_choice trackers"
).split()

BLOCKED_IMPORT = """
import importlib, sys

blocked, modules, group = (words.split(",") for words in sys.argv[1:])
for name in blocked:
    sys.modules[name] = None  # an import of it raises ModuleNotFoundError
for module in modules:
    importlib.import_module(f"hf_dist_ext.{module}")
stray = {name.partition(".")[2] for name in sys.modules if name.startswith("hf_dist_ext.")} - set(group)
assert not stray, f"{modules} import {stray} of another group"
"""


def import_with_blocked(blocked: list[str], group: list[str]) -> None:
    modules = [name for name in group if (PACKAGE / f"{name}.py").is_file()]
    assert modules
    command = [sys.executable, "-c", BLOCKED_IMPORT, ",".join(blocked), ",".join(modules), ",".join(group)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr


def test_the_core_needs_torch_only():
    import_with_blocked(["transformers", "accelerate", "datasets", "peft", "evaluate"], [*CORE, "errors", "policy"])


def test_what_runs_before_ranks_exist_needs_no_torch():
    import_with_blocked(["torch", "transformers", "accelerate", "datasets", "peft", "numpy"], BEFORE_RANKS)


def test_the_package_itself_imports_nothing_and_names_its_parts():
    code = (
        "import sys, hf_dist_ext\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
        "from hf_dist_ext import UsageError\n"
        "assert issubclass(UsageError, ValueError) and hf_dist_ext.__version__\n"
        "assert {'DistTrainer', 'InfoNCELoss'} <= set(dir(hf_dist_ext))\n"
        "assert not hasattr(hf_dist_ext, 'nonsense')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)

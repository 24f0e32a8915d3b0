"""Compiles `device.cpp` for the installed torch, without importing torch."""

import importlib.util
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("device.cpp")
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def build(library: Path) -> None:
    """Takes seconds. Raises RuntimeError with what the compiler says."""
    torch = Path(importlib.util.find_spec("torch").origin).parent
    command = [COMPILER, "-O0", "-shared", "-fPIC", "-std=c++20", SOURCE, f"-I{torch}/include", f"-L{torch}/lib",
               f"-Wl,-rpath,{torch}/lib", "-lc10", "-ltorch_cpu", "-o", library]  # fmt: skip
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])

"""docs/tutorial.md: its files are written and its commands run, as they stand there and in their order."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hf_dist_ext.run.read import load_run
from tests import hub_server
from tests.launching import ROOT, environment

PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
TOKEN = "hf_SECRET"


def parts() -> list[tuple[str, str]]:
    """(name of a file, its content) and ("", a command), in the order of the page."""
    found = re.findall(r"<!-- test: (\S+) -->\n```\w+\n(.*?)```|```sh\n(.*?)```", PAGE, re.DOTALL)
    return [(name, content or line) for name, content, lines in found for line in (lines.splitlines() or [""])]


def test_its_run_file_takes_what_its_commands_set(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = {}
    for name, content in parts():
        if name:
            Path(name).write_text(content, encoding="utf-8")
        elif content.startswith("hf-dist train") and Path("make_pairs.py").exists():
            run = load_run(["--config", *shlex.split(content)[2:]])
            runs[run.training["output_dir"]] = run
    assert sorted(runs) == ["outputs/functions", "outputs/mined", "outputs/stopped", "outputs/two"]
    assert runs["outputs/mined"].given["dataset_name"] == "mined.jsonl"


@pytest.mark.slow
@pytest.mark.timeout(3000)  # eleven commands, each of which starts Python; three of them train for a minute
def test_its_commands_do_what_it_says(tmp_path):
    with hub_server.running(TOKEN) as server:
        own = {"HF_ENDPOINT": server.url, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        for name, content in parts():
            if name:
                (tmp_path / name).write_text(content, encoding="utf-8")
                continue
            words = shlex.split(content)
            start = [sys.executable, "-m", "hf_dist_ext.cli"] if words[0] == "hf-dist" else [sys.executable]
            start = [str(Path(sys.executable).with_name("hf"))] if words[0] == "hf" else start
            more = own if words[0] == "hf" else {}
            is_stopped = "outputs/stopped" in words and "train" in words
            said = terminal([*start, *words[1:]], tmp_path, environment(**more), 130 if is_stopped else 0)
            print(f"$ {content}\n{said}")
        pushed = server.commits[server.branches["someone/functions", "main"]]
    assert {"model.safetensors", "README.md", "tokenizer.json"} <= set(pushed)

    reports = {
        name: json.loads((tmp_path / "outputs" / name / "metrics.json").read_text())
        for name in ("text", "functions", "mined", "stopped", "two")
    }
    for name, report in reports.items():
        lost = 0.03 if name == "mined" else 0  # goes on from a trained model, and 201 queries tell no more apart
        assert report["after"]["mrr@10"] > report["before"]["mrr@10"] - lost
    assert reports["functions"]["after"]["mrr@10"] > 0.4
    assert reports["two"]["before"] == pytest.approx(reports["functions"]["before"])
    rows = (tmp_path / "pairs.jsonl").read_text(encoding="utf-8").splitlines()
    mined = (tmp_path / "mined.jsonl").read_text(encoding="utf-8").splitlines()
    assert 0.9 * len(rows) < len(mined) <= len(rows)  # those with fewer negatives are left out


def terminal(command: list[str], folder: Path, variables: dict[str, str], code: int) -> str:
    """What a command says, which ends with this exit code; after Ctrl-C in its fourth step where that is 130."""
    log = folder / "terminal.txt"
    with open(log, "w", encoding="utf-8") as file:
        # a shell that runs tests in the background has them ignore SIGINT, and their children too
        default = (lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)) if code else None
        run = subprocess.Popen(command, cwd=folder, env=variables, stdout=file, stderr=file, preexec_fn=default)
        while code and run.poll() is None and "step  4/20" not in log.read_text(encoding="utf-8"):
            time.sleep(0.1)
        if code:
            os.kill(run.pid, signal.SIGINT)
        found = run.wait(900)
    said = log.read_text(encoding="utf-8")
    assert found == code, said[-3000:]
    return said

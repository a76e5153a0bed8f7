"""Every file of tests/cases is a small program of a kind that a public report describes, and what must be said of it.

A case is a pytest file with a dictionary EXPECT: for each test its outcome, values at dotted paths of its entry in the
report ("<- word": the line of the file that ends with that comment), and text that the output must contain.

`pytest tests/test_cases.py --sglmem-device cuda` runs them on a GPU, whose ranks share it.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
CASES = sorted((Path(__file__).parent / "cases").glob("case_*.py"))
LIMIT = 240  # seconds for one file; the longest takes 30 on a busy machine


def constants(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.EXPECT, getattr(module, "ARGS", [])


def line_of(path, mark):
    lines = path.read_text().splitlines()
    return f"{path.name}:{next(n for n, line in enumerate(lines, 1) if line.rstrip().endswith('# ' + mark))}"


def reach(value, dotted):
    for key in dotted.split("."):
        value = value[int(key)] if isinstance(value, list) else value[key]
    return value


def differs(path, want, got):
    if isinstance(want, str) and want.startswith("<- "):
        return line_of(path, want) not in str(got)
    return want != got


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_case(path, tmp_path, pytestconfig):
    expect, args = constants(path)
    report = tmp_path / "report.json"
    options = ["-p", "no:cacheprovider", "-rA", "--sglmem-artifacts", str(tmp_path)]
    options += ["--sglmem-device", pytestconfig.getoption("--sglmem-device") or "emulated"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:nose", str(path), *options, "--sglmem-report", str(report), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
        cwd=path.parent,
        check=False,
    )
    assert report.exists(), done.stdout
    entries = {entry["nodeid"].rpartition("::")[2]: entry for entry in json.loads(report.read_text())["tests"]}
    wrong = []
    for name, want in expect.items():
        entry = entries[name]
        found = {"outcome": entry["outcome"]}
        found.update({dotted: reach(entry, dotted) for dotted in want.get("report", {})})
        wanted = {"outcome": want["outcome"], **want.get("report", {})}
        wrong += [
            f"{name}: {at} is {found[at]!r}, not {v!r}" for at, v in wanted.items() if differs(path, v, found[at])
        ]
        wrong += [f"{name}: the output lacks {text!r}" for text in want.get("says", ()) if text not in done.stdout]
    assert not wrong, "\n".join([*wrong, done.stdout])


def test_there_are_cases():
    assert len(CASES) >= 5

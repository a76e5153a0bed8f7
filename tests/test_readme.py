"""The README is true: its code runs, what it quotes is printed, its commands are taken, its tables are the code's.

A block of Python is a test file of its own; `<!-- test: passed=1 failed=0 args="..." says="..." -->` before it says
what becomes of it. `<!-- output: test_first.py -->` before a block of text says whose failure it quotes, line by line;
with `sizes=about` any size will do where one stands (a race decides it).
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest
import readme_tables

from pytest_sglmem import options
from pytest_sglmem.__main__ import main

pytest.importorskip("torch")

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(
    r"(?:<!-- (?P<kind>\w+): (?P<says>[^\n]*?) -->\n)?```(?P<language>\w+)\n(?P<text>.*?)^```$", re.S | re.M
)
SIZE = re.compile(r"[\d.]+ (?:B|KiB|MiB|blocks)\b")

# The failure that the README opens with: the bundled check of the faulty shape, without what expects it to fail.
REPLACED = """
from pytest_sglmem import geometries
from pytest_sglmem.checks.test_ipc_handles import CYCLES, SCALE, one_handle_for_all


def test_one_handle_for_all(world, live_bytes):
    live_bytes.assert_flat(world.trace(one_handle_for_all, geometries(world.size, scale=SCALE), cycles=CYCLES))
"""


@dataclass(frozen=True)
class Block:
    """A fenced block: what the comment before it says, and its text."""

    language: str
    text: str
    kind: str
    says: tuple[tuple[str, str], ...]

    def all(self, name):
        return [value for key, value in self.says if key == name]

    def one(self, name, default=""):
        return next(iter(self.all(name)), default)


def blocks(text: str = TEXT) -> Iterator[Block]:
    for found in BLOCK.finditer(text):
        said = [word.partition("=") for word in shlex.split(found["says"] or "")]
        pairs = tuple((name, value) if equals else ("of", name) for name, equals, value in said)
        yield Block(found["language"], found["text"], found["kind"] or "", pairs)


PYTHON = {
    "test_first.py" if number == 1 else f"test_block_{number}.py": block
    for number, block in enumerate((block for block in blocks() if block.language == "python"), start=1)
}
QUOTES = [block for block in blocks() if block.language == "text"]
SESSIONS = sorted({block.one("args") for block in PYTHON.values()})
WORLD_OF_8 = "--sglmem-world 8"


def test_every_block_says_how_it_is_checked():
    assert {block.kind for block in PYTHON.values()} == {"test"}
    assert {block.kind for block in QUOTES} == {"output"}
    assert {block.one("of") for block in QUOTES} <= {*PYTHON, "test_replaced.py"}
    assert {block.language for block in blocks()} <= {"python", "text", "console", "yaml"}


@pytest.mark.parametrize("args", SESSIONS, ids=lambda args: args or "defaults")
def test_code_does_what_the_readme_says(pytester, args):
    said = {name: block for name, block in PYTHON.items() if block.one("args") == args}
    files = {name: block.text for name, block in said.items()}
    if args == WORLD_OF_8:
        files["test_replaced.py"] = REPLACED
    for name, text in files.items():
        (pytester.path / name).write_text(text, encoding="utf-8")
    pytester.runpytest_subprocess("--sglmem-device", "emulated", "--junitxml", "j.xml", *shlex.split(args))
    outcomes, failures = results(pytester.path / "j.xml")
    for name, block in said.items():
        expected = {word: int(block.one(word)) for word in ("passed", "failed") if block.one(word)}
        assert (name, outcomes[name]) == (name, expected), failures[name]
        for text in block.all("says"):
            assert text in failures[name]
    for quote in QUOTES:
        if quote.one("of") in files:
            assert unsaid(quote, failures[quote.one("of")]) == []


def results(path: Path) -> tuple[dict[str, Counter[str]], dict[str, str]]:
    """From a junit file: how often a test file passed and failed, and all that its failures say."""
    outcomes: dict[str, Counter[str]] = {}
    failures: dict[str, str] = {}
    for case in ElementTree.parse(path).iter("testcase"):
        name = f"{case.get('classname')}.py"
        failed = [child for child in case if child.tag in ("failure", "error")]
        outcomes.setdefault(name, Counter())["failed" if failed else "passed"] += 1
        failures[name] = failures.get(name, "") + "".join(child.text or "" for child in failed)
    return outcomes, failures


def unsaid(quote: Block, failure: str) -> list[str]:
    """The lines that the README quotes and the failure does not have."""
    real = [line.rstrip() for line in failure.splitlines()]
    return [line for line in quote.text.splitlines() if line.strip() and not _said(line, real, quote.one("sizes"))]


def _said(line: str, real: list[str], sizes: str) -> bool:
    if sizes == "about":
        pattern = re.compile(".*" + r"[\d.]+ \w+".join(map(re.escape, SIZE.split(line.strip()))))
        return any(pattern.fullmatch(other) for other in real)
    return any(other.endswith(line.strip()) for other in real)


@pytest.mark.parametrize(
    ("line", "sizes", "found"),
    [
        ("  leak: 28 KiB a cycle", "", True),
        ("  leak: 29 KiB a cycle", "", False),
        ("  leak: 29 KiB a cycle", "about", True),
        ("  leak: 29 KiB a year", "about", False),
        ("  leak: 28 KiB", "", False),
    ],
)
def test_a_quote_is_compared_line_by_line(line, sizes, found):
    quote = Block("text", line, "output", (("sizes", sizes),))
    assert (unsaid(quote, "E   Error: leak: 28 KiB a cycle\nE   more") == []) is found


# --- commands -----------------------------------------------------------------------------------------------------


def commands() -> list[str]:
    """The lines that the README would have somebody run, comments left out."""
    lines = [line for block in blocks() if block.language == "console" for line in block.text.splitlines()]
    lines += [
        line.partition("run: ")[2]
        for block in blocks()
        if block.language == "yaml"
        for line in block.text.splitlines()
        if "run: " in line
    ]
    return [shlex.join(shlex.split(line, comments=True)).replace("'&&'", "&&") for line in lines]


def parts(command: str) -> Iterator[tuple[Path, list[str]]]:
    """The folder and the words of each command of a line."""
    folder = ROOT
    for words in command.split(" && "):
        first, *rest = shlex.split(words)
        if first == "cd":
            folder = ROOT / rest[0]
        else:
            yield folder, [first, *rest]


PYTEST = [
    (folder, words[at + 1 :])
    for command in commands()
    for folder, words in parts(command)
    for at in [next((at for at, word in enumerate(words) if Path(word).name == "pytest"), None)]
    if at is not None
]


def test_there_are_commands():
    assert len(PYTEST) >= 6


def taken(folder: Path, words: list[str]) -> bool:
    """Whether pytest takes these words and everything checks its settings; `--help` ends it there."""
    command = [sys.executable, "-m", "pytest", *words, "--help"]
    return not subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, timeout=60, check=False).returncode


@pytest.mark.parametrize(("folder", "words"), PYTEST, ids=[" ".join(words) for _, words in PYTEST])
def test_pytest_takes_the_command(folder, words):
    pytest.importorskip("xdist")
    assert taken(folder, words)
    assert [word for word in words if "/" in word and not (folder / word).exists()] == []
    assert "--pyargs" not in words or importlib.util.find_spec(words[words.index("--pyargs") + 1]) is not None


@pytest.mark.parametrize(
    "wrong", [["--sglmem-device", "abacus"], ["--sglmem-world", "0"], ["--sglmem-report", "r.txt"]]
)
def test_a_wrong_command_would_be_seen(tmp_path, wrong):
    assert not taken(tmp_path, wrong)


def test_ci_runs_the_two_commands():
    first = next(block for block in blocks() if block.language == "console").text.splitlines()
    script = (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()
    assert len(first) == 2
    assert [line for line in first if line not in script] == []


def test_options_that_the_text_names_exist():
    known = {option.flag for option in options.OPTIONS} | {"--sglmem-faults"}
    named = set(re.findall(r"--sglmem-[a-z][a-z-]*[a-z]", TEXT))
    assert named - known == set()
    assert known - named == set()


def test_links_lead_somewhere():
    linked = [target for target in re.findall(r"\]\(([^)]+)\)", TEXT) if "://" not in target]
    assert [target for target in linked if not (ROOT / target.partition("#")[0]).exists()] == []


@pytest.mark.parametrize("command", sorted(set(re.findall(r"python -m pytest_sglmem (\w+)", TEXT))))
def test_subcommands_exist(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0


# --- tables -------------------------------------------------------------------------------------------------------


def test_tables_are_made_from_the_code():
    assert readme_tables.with_tables(TEXT) == TEXT, "python tests/readme_tables.py --write"
    assert {name for _, name, _, _ in readme_tables.PLACE.findall(TEXT)} == set(readme_tables.TABLES)

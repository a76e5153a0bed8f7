"""The ladder: a module imports only from lower rungs, lazily or not; and what loading the plugin must not bring.

The rungs are DESIGN's and CONTRIBUTING.md's. Modules on one rung know each other only where `SIDEWAYS` says so. A
package counts as one module. Imports under `TYPE_CHECKING` never run and do not count.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pytest_sglmem

HOME = Path(pytest_sglmem.__file__).parent

LADDER = {
    6: {"plugin", "prove", "proof", "__main__", "options", "markers", "collector", "live_bytes"},
    5: {"world", "stacks", "progress", "report", "html", "charts", "summary"},
    4: {"launch", "rank", "torchrun"},
    3: {"tracing", "judge", "reference"},
    2: {
        *("sources", "digests", "words"),
        *("objects", "appends", "cancelling", "capture", "pauses", "heap", "roots", "holders", "links", "autograd"),
        *("ipc", "ledger", "audit", "emulated"),
        *("faults", "strikes"),
    },
    1: {"records", "document", "geometry", "contract", "windows", "sites", "revivals", "scratch"},
}
RUNG = {module: rung for rung, modules in LADDER.items() for module in modules}

# importer: what it may import of its own rung.
SIDEWAYS = {
    "plugin": {"prove", "options", "markers", "collector", "live_bytes"},
    "prove": {"proof", "options", "markers"},
    "markers": {"proof"},
    "world": {"stacks"},
    "report": {"html", "summary"},
    "html": {"charts", "summary"},
    "launch": {"rank"},  # it starts ranks; of launch.py a rank knows only types
    "torchrun": {"launch"},
    "tracing": {"judge"},
    "objects": {"appends", "cancelling", "capture", "pauses", "heap", "roots"},
    "appends": {"heap"},
    "pauses": {"heap"},
    "roots": {"heap"},
    "ipc": {"ledger", "audit"},
    "faults": {"strikes"},  # the one circle: what a fault is, and what carries it out once armed
    "strikes": {"faults", "appends", "emulated", "objects"},
    "holders": {"links", "autograd", "heap"},
    "document": {"records"},
}


def modules() -> dict[str, list[Path]]:
    """Each module or package of the ladder with its files; the package's `__init__` and the checks stand outside."""
    found: dict[str, list[Path]] = {}
    for path in sorted(HOME.rglob("*.py")):
        name = path.relative_to(HOME).with_suffix("").parts[0]
        if name not in ("__init__", "checks"):
            found.setdefault(name, []).append(path)
    return found


def imported(path: Path) -> set[str]:
    """The modules of this package that the file imports anywhere, functions included, by the ladder's names."""
    package = ("pytest_sglmem", *path.relative_to(HOME).parent.parts)
    found = set()
    for node in _running(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            stem = ".".join(filter(None, (base, node.module)))
            names = [f"{stem}.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("pytest_sglmem.")}
    return found & (RUNG.keys() | modules().keys())


def _running(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            for other in child.orelse:
                yield from (other, *_running(other))
            continue
        yield child
        yield from _running(child)


def edges(name: str, files: list[Path]) -> set[str]:
    return set().union(*map(imported, files)) - {name}


def wrong(name: str, used: set[str]) -> list[str]:
    """What of `used` a module called `name` may not import."""
    return sorted(
        other
        for other in used
        if RUNG[other] > RUNG[name] or (RUNG[other] == RUNG[name] and other not in SIDEWAYS.get(name, ()))
    )


def test_every_module_has_a_rung():
    assert modules().keys() - RUNG.keys() == set(), "give the new module a rung in LADDER and CONTRIBUTING.md"


@pytest.mark.parametrize("name", sorted(modules().keys() & RUNG.keys()))
def test_imports_go_down(name):
    assert wrong(name, edges(name, modules()[name])) == [], f"{name}.py imports from its own rung or above"


def test_sideways_says_nothing_that_is_not_so():
    stale = {
        (name, other)
        for name, others in SIDEWAYS.items()
        for other in others - (edges(name, modules()[name]) if name in modules() else set())
    }
    assert stale == set()


def test_a_circle_exists_only_where_it_is_said():
    both = {(name, other) for name, others in SIDEWAYS.items() for other in others if name in SIDEWAYS.get(other, ())}
    assert both == {("faults", "strikes"), ("strikes", "faults")}


@pytest.mark.parametrize(
    ("code", "used"),
    [
        ("from .world import World", {"world"}),
        ("from . import report, words", {"report", "words"}),
        ("import pytest_sglmem.plugin", {"plugin"}),
        ("from pytest_sglmem.judge import judge", {"judge"}),
        ("from pytest_sglmem import words", {"words"}),
        ("def lazily():\n    from .emulated.memory import Block", {"emulated"}),
        ("class A:\n    def b(self):\n        if self:\n            from . import rank", {"rank"}),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .world import World", set()),
        ("import typing\nif typing.TYPE_CHECKING:\n    from . import ipc\nelse:\n    from . import html", {"html"}),
        ("from . import __version__\nimport json, torch", set()),
        ("from ..records import Trace", set()),
    ],
)
def test_imports_are_seen(tmp_path, monkeypatch, code, used):
    monkeypatch.setattr(sys.modules[__name__], "HOME", tmp_path)
    (tmp_path / "some.py").write_text(code)
    assert imported(tmp_path / "some.py") == used


def test_imports_of_a_package_are_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "HOME", tmp_path)
    (tmp_path / "emulated").mkdir()
    (tmp_path / "emulated" / "a.py").write_text("from ..rank import main\nfrom . import words\nfrom .judge import x")
    assert imported(tmp_path / "emulated" / "a.py") == {"rank", "emulated"}


def test_upward_and_sideways_are_wrong():
    assert wrong("judge", {"world", "records", "tracing", "words"}) == ["tracing", "world"]
    assert wrong("tracing", {"judge", "records"}) == []


def test_checks_use_the_public_surface_only():
    public = {*pytest_sglmem.__all__, "reference"}
    used = set()
    for path in (HOME / "checks").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "pytest_sglmem":
                inner = (node.module or "").split(".")[1:2]
                used |= set(inner) or {alias.name for alias in node.names}
            assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path} imports relatively"
    assert used <= public


def test_nothing_comes_from_inside_pytest():
    for path in HOME.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "_pytest" for name in names), path


def _loaded(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter has after `code`."""
    probe = f"{code}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("code", ["import pytest_sglmem.plugin", "import pytest_sglmem"])
def test_loading_imports_neither_torch_nor_numpy(code):
    loaded = _loaded(code)
    assert "pytest_sglmem" in loaded
    assert not loaded & {"torch", "numpy", "jinja2", "pygal", "objgraph", "cloudpickle", "cattrs"}


@pytest.mark.parametrize(
    "code",
    [
        "import pytest_sglmem",
        "import pytest_sglmem.judge",
        "from pytest_sglmem.words import size",
        "import pytest_sglmem.judge as first; import pytest_sglmem",
        "from pytest_sglmem.judge import judge as first; assert pytest_sglmem.judge is first",
        "from pytest_sglmem import judge as first; assert pytest_sglmem.judge is first",
    ],
)
def test_judge_is_the_function_whoever_imported_its_module_first(code):
    check = "import pytest_sglmem; assert 'pytest_sglmem.judge' not in __import__('sys').modules"
    assert _loaded(f"{check}; {code}; assert pytest_sglmem.judge.__qualname__ == 'judge', pytest_sglmem.judge")


def test_the_probe_sees_what_is_loaded():
    assert "json" in _loaded("import json")


def test_names_are_public_and_last():
    pytest.importorskip("torch", reason="most public names come with torch")
    import pytest_sglmem.judge

    for name in pytest_sglmem.__all__:
        first, again = getattr(pytest_sglmem, name), getattr(pytest_sglmem, name)
        assert first is again
        assert name == "reference" or callable(first), name
    assert set(pytest_sglmem.__all__) <= set(dir(pytest_sglmem))
    with pytest.raises(AttributeError, match="no_such_name"):
        pytest_sglmem.no_such_name

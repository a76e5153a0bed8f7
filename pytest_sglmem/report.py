"""A session's checks as a report: entries -> one JSON document -> terminal lines, files, a comparison.

`entry` turns what one test learned into plain JSON, in whichever process the test ran; `session` folds the entries of
all workers and phases into the document of DESIGN.md (`schema: 1`, published as `report.schema.json` beside this
file). Everything else reads that document and nothing more, so a report from another machine prints, compares and
renders here as it did there.

It judges nothing: verdicts come from `judge.py` and `objects.py`, words from `words.py`. Neither torch nor pytest is
imported. `.html` needs the packages of the extra `html`; every other form needs none.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from importlib import resources
from pathlib import Path
from typing import cast

from . import records, words
from .document import Document, Proof, Test
from .summary import github_summary, settled, terminal_lines

__all__ = [
    "check_path",
    "compare",
    "entry",
    "github_summary",
    "json_schema",
    "junit_properties",
    "load",
    "not_compared",
    "session",
    "terminal_lines",
    "write",
]

SCHEMA = 1
ENDINGS = (".json", ".html")
_NUMBERS = re.compile(r"\[\n[-+.\deE,\s]+\]")  # a list of numbers over several lines: no JSON string holds a newline
_OUTCOMES = ("passed", "skipped", "failed")
_OPTIONAL_LIVE_BYTES: dict[str, object] = {
    "geometries": (),
    "outside_bytes": (),
    "reserved_bytes": (),
    "note": "",
    "slowest": None,
}
_OPTIONAL_IPC: dict[str, object] = {"pairs": (), "note": ""}
_OPTIONAL_IPC_FAULT: dict[str, object] = {"exporters": (), "stack": (), "open_sites": (), "advice": ""}
_OPTIONAL_PROOF: dict[str, object] = {"blind": (), "not_healed": (), "runs": 0, "left_out": 0}
_OPTIONAL_GC: dict[str, object] = {"times": 0, "windows": (), "bytes_per_append": None, "per_append": 0, "note": ""}


# --- building the document ------------------------------------------------------------------------------------------


def entry(
    nodeid: str,
    outcome: str,
    seconds: float,
    world: Mapping[str, object] | None = None,
    live_bytes: Sequence[records.Verdict] = (),
    gc: Sequence[records.Growth] = (),
    faults: Sequence[Mapping[str, object]] = (),
) -> Test:
    """What one test (or one phase of it) learned, as plain JSON: it survives pickle, xdist and `json.dumps`.

    `outcome`: passed, failed or skipped; `world`: size, device, backend; `faults`: {"fault", "fired": [a rank]} each.
    Raises ValueError for another outcome, TypeError where a value is not JSON.
    """
    if outcome not in _OUTCOMES:
        raise ValueError(f"outcome must be one of {', '.join(_OUTCOMES)} (got {outcome!r})")
    made = {
        "nodeid": nodeid,
        "outcome": outcome,
        "seconds": round(seconds, 6),
        "world": None if world is None else dict(world),
        "live_bytes": [records.to_json(verdict) for verdict in live_bytes],
        "gc": [records.to_json(growth) for growth in gc],
        "faults": [dict(fault) for fault in faults],
    }
    return cast(Test, _plain(made))


def session(
    entries: Iterable[Test],
    *,
    versions: Mapping[str, str | None],
    machine: Mapping[str, str | int | float | bool | None],
    seed: int = 0,
    proof: Mapping[str, object] | None = None,
) -> Document:
    """The whole report. Entries of one nodeid (setup, call, teardown; several workers) become one test.

    Folding: the worst outcome, the sum of the seconds, the first world, all the checks in the order they came.
    """
    tests: dict[str, Test] = {}
    for one in entries:
        seen = tests.get(one["nodeid"])
        tests[one["nodeid"]] = one if seen is None else _folded(seen, one)
    return {
        "schema": SCHEMA,
        "versions": dict(versions),
        "machine": dict(machine),
        "seed": seed,
        "tests": list(tests.values()),
        "proof": None if proof is None else cast(Proof, _plain({**_OPTIONAL_PROOF, **proof})),
    }


def _folded(one: Test, other: Test) -> Test:
    return {
        "nodeid": one["nodeid"],
        "outcome": max(one["outcome"], other["outcome"], key=_OUTCOMES.index),
        "seconds": round(one["seconds"] + other["seconds"], 6),
        "world": other["world"] if one["world"] is None else one["world"],
        "live_bytes": one["live_bytes"] + other["live_bytes"],
        "gc": one["gc"] + other["gc"],
        "faults": one["faults"] + other["faults"],
    }


def _plain(value: object) -> object:
    # The trip through text turns tuples into lists here, not later on some worker, and finds what is not JSON at once.
    return json.loads(json.dumps(value))


# --- files ----------------------------------------------------------------------------------------------------------


def check_path(path: str | Path) -> None:
    """Raise ValueError where `write` could not write to `path`: another ending, or `.html` without its packages."""
    ending = Path(path).suffix
    if ending not in ENDINGS:
        raise ValueError(f"a report ends in {' or '.join(ENDINGS)} (got {str(path)!r})")
    if ending == ".html":
        from . import html

        html.check_installed(path)


def write(document: Document, path: str | Path) -> None:
    """Write the report as its ending says, whole or not at all. Raises ValueError as `check_path` does, and OSError."""
    check_path(path)
    if Path(path).suffix == ".html":
        from . import html

        text = html.page(document)
    else:
        text = _NUMBERS.sub(lambda found: " ".join(found[0].split()), json.dumps(document, indent=1)) + "\n"
    _replace(Path(path), text)


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)  # mkstemp's 0600 would keep a CI artifact from being read
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def load(path: str | Path) -> Document:
    """Read a `.json` report. Raises ValueError where the file is none, or is of another schema."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    found = document.get("schema") if isinstance(document, dict) else None
    if found != SCHEMA or "tests" not in document:
        raise ValueError(f"{path} is not a report of schema {SCHEMA} (its schema: {found!r})")
    _complete(document)
    return cast(Document, document)


def _complete(document: dict[str, list[dict[str, list[dict[str, object]]]]]) -> None:
    """Give the fields that the schema leaves optional their defaults, in place."""
    if document["proof"] is not None:
        _default(cast("dict[str, object]", document["proof"]), _OPTIONAL_PROOF)
    for test in document["tests"]:
        for check in test["live_bytes"]:
            ipc = cast("dict[str, object]", check["ipc"])
            _default(check, _OPTIONAL_LIVE_BYTES)
            _default(ipc, _OPTIONAL_IPC)
            for fault in cast("list[dict[str, object]]", ipc["faults"]):
                _default(fault, _OPTIONAL_IPC_FAULT)
        for growth in test["gc"]:
            _default(growth, _OPTIONAL_GC)


def _default(fields: dict[str, object], values: Mapping[str, object]) -> None:
    for name, value in values.items():
        fields.setdefault(name, value)


def json_schema() -> dict[str, object]:
    """The published JSON schema (draft 2020-12) of the report."""
    return json.loads(resources.files(__package__).joinpath("report.schema.json").read_text(encoding="utf-8"))


# --- comparison with an earlier report ------------------------------------------------------------------------------


def compare(new: Document, baseline: Document, tolerance_percent: float = 0) -> list[str]:
    """A line for each settled size or object count that grew by more than `tolerance_percent` of the baseline's.

    Tests are matched by nodeid, checks by their place in the test, sizes rank by rank. What has no counterpart, or ran
    in another world, is not compared (`not_compared` says so). Raises ValueError for a negative tolerance.
    """
    if tolerance_percent < 0:
        raise ValueError(f"the tolerance must be 0 or more percent (got {tolerance_percent})")
    allowed = 1 + Fraction(str(tolerance_percent)) / 100
    return [line for now, was in _pairs(new, baseline) for line in _grown(now, was, allowed)]


def compared(new: Document, baseline: Document) -> int:
    """How many tests `compare` finds in both reports, each with something to compare."""
    pairs = _pairs(new, baseline)
    return sum(bool((now["live_bytes"] and was["live_bytes"]) or (now["gc"] and was["gc"])) for now, was in pairs)


def not_compared(new: Document, baseline: Document) -> list[str]:
    """A line for each test that `compare` leaves out although it checks something, with the reason."""
    old = {test["nodeid"]: test for test in baseline["tests"]}
    lines = []
    for test in new["tests"]:
        if not (test["live_bytes"] or test["gc"]):
            continue
        reason = _difference(test, old.get(test["nodeid"]))
        if reason:
            lines.append(f"{test['nodeid']}: not compared, {reason}")
    return lines


def _pairs(new: Document, baseline: Document) -> Iterator[tuple[Test, Test]]:
    old = {test["nodeid"]: test for test in baseline["tests"]}
    for test in new["tests"]:
        was = old.get(test["nodeid"])
        if was is not None and not _difference(test, was):
            yield test, was


def _difference(now: Test, was: Test | None) -> str:
    if was is None:
        return "it is not in the baseline"
    if now["world"] != was["world"]:
        return f"its world is {_world_text(now)}, the baseline's {_world_text(was)}"
    return ""


def _world_text(test: Test) -> str:
    world = test["world"]
    return "none" if world is None else f"{world['size']} ranks on {world['device']} ({world['backend']})"


def _grown(now: Test, was: Test, allowed: Fraction) -> Iterator[str]:
    for index, (check, old) in enumerate(zip(now["live_bytes"], was["live_bytes"], strict=False)):
        for rank, (ends, old_ends) in enumerate(zip(check["settled"], old["settled"], strict=False)):
            if ends and old_ends and ends[-1] > old_ends[-1] * allowed:
                grown = f"{words.size(old_ends[-1])} -> {words.size(ends[-1])}{_percent(ends[-1], old_ends[-1])}"
                yield f"{now['nodeid']}: live_bytes {index}, rank {rank}: settled {grown}"
    for index, (growth, before) in enumerate(zip(now["gc"], was["gc"], strict=False)):
        count, old_count = growth["objects_per_append"], before["objects_per_append"]
        if Fraction(str(count)) > Fraction(str(old_count)) * allowed:
            yield (
                f"{now['nodeid']}: gc {index}: objects an append {old_count:g} -> {count:g}{_percent(count, old_count)}"
            )


def _percent(now: float, was: float) -> str:
    return f" (+{100 * (now - was) / was:.3g}%)" if was else ""


# --- junit ----------------------------------------------------------------------------------


def junit_properties(entry: Test) -> list[tuple[str, str]]:
    """The entry as junit properties: a verdict a check, and what a dashboard would plot of it.

    Names are `sglmem_<what>`, with the check's number where a test has several of a kind.
    """
    found: list[tuple[str, str]] = []
    for number, check in enumerate(entry["live_bytes"]):
        mark = f"_{number}" if len(entry["live_bytes"]) > 1 else ""
        found.append((f"sglmem_live_bytes{mark}", check["verdict"]))
        found.append((f"sglmem_bytes_per_cycle{mark}", str(max(check["bytes_per_cycle"], default=0))))
        found.append((f"sglmem_settled_bytes{mark}", str(settled(check))))
        if check["sites"]:
            site = check["sites"][0]
            found.append((f"sglmem_site{mark}", f"{site['site']} ({site['mechanism']})"))
    for number, growth in enumerate(entry["gc"]):
        mark = f"_{number}" if len(entry["gc"]) > 1 else ""
        found.append((f"sglmem_gc{mark}", growth["verdict"]))
        found.append((f"sglmem_objects_per_append{mark}", f"{growth['objects_per_append']:g}"))
    return found

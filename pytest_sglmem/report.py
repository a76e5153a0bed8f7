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
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from importlib import resources
from pathlib import Path
from typing import cast

from . import records, words
from .document import Document, Gc, IpcFault, LiveBytes, Proof, Test

SCHEMA = 1
ENDINGS = (".json", ".html")
SCREEN = 24  # lines of a classic terminal: what the default summary keeps to
ALARMS = ("leak", "growing", "late", "cyclic")
_ORDER = ("leak", "growing", "late", "cyclic", "filling", "flat")
_OUTCOMES = ("passed", "skipped", "failed")


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
        "proof": None if proof is None else cast(Proof, _plain(proof)),
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
        text = json.dumps(document, indent=1) + "\n"
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
    return document


def json_schema() -> dict[str, object]:
    """The published JSON schema (draft 2020-12) of the report."""
    return json.loads(resources.files(__package__).joinpath("report.schema.json").read_text(encoding="utf-8"))


# --- the terminal ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Row:
    """One check on one line; `cause` says why, for a check that is not clean; `full` is what -v adds."""

    word: str
    amount: str
    ranks: str
    series: str
    name: str
    cause: str = ""
    full: tuple[str, ...] = ()

    @property
    def alarming(self) -> bool:
        return self.word in ALARMS

    @property
    def shown_word(self) -> str:
        return f"{self.word.upper()}!" if self.alarming else self.word


def terminal_lines(document: Document, width: int = 80, verbosity: int = 0) -> list[str]:
    """The lines of the summary section: a line a check, the alarming ones first and in capitals.

    Verbosity below 0: nothing where all is clean, else one line that counts. 0: at most a screen for 20 tests (causes
    and clean checks beyond it are counted, not shown). 1 and more: everything, no limit. No line is longer than
    `width` unless verbosity asks for stacks.
    """
    rows = sorted(_rows(document), key=lambda row: _ORDER.index(row.word))
    closing = [*_proof_lines(document["proof"], width, verbosity)]
    if verbosity < 0:
        alarming = any(row.alarming for row in rows)
        return [_counts(rows)] if alarming else []
    if not rows:
        return closing
    if verbosity > 0:
        return [*_all_lines(rows), *closing, _counts(rows)]
    return [*_screen(rows, width, SCREEN - 1 - len(closing)), *closing, _counts(rows)]


def _rows(document: Document) -> Iterator[_Row]:
    for test in document["tests"]:
        for check in test["live_bytes"]:
            yield _bytes_row(test, check)
        for growth in test["gc"]:
            yield _gc_row(test, growth)


def _bytes_row(test: Test, check: LiveBytes) -> _Row:
    grown = check["bytes_per_cycle"]
    worst = max(range(len(grown)), key=grown.__getitem__, default=0)
    guilty, amount = _bytes_amount(check)
    shown = check["settled"] or check["series"]
    return _Row(
        word=check["verdict"],
        amount=amount,
        ranks=_short_ranks(guilty, len(grown)),
        series=words.sparkline(shown[worst]) if worst < len(shown) else "",
        name=test["nodeid"],
        cause=_bytes_cause(check),
        full=tuple(_bytes_full(check)),
    )


def _bytes_amount(check: LiveBytes) -> tuple[list[int], str]:
    """Which ranks the verdict is about, and the most that one of them shows."""
    if check["verdict"] == "late":
        values, unit = check["late_bytes"], "late"
    elif check["verdict"] == "cyclic":
        values, unit = check["cyclic_bytes"], "cyclic"
    else:
        values, unit = check["bytes_per_cycle"], "a cycle"
    most = max(values, default=0)
    if check["verdict"] in ("flat", "filling"):
        return list(range(len(values))), words.size(max(map(max, filter(None, check["settled"])), default=0))
    return [rank for rank, value in enumerate(values) if value > 0], f"+{words.size(most)} {unit}"


def _short_ranks(ranks: Sequence[int], size: int) -> str:
    return f"all {size}" if len(ranks) == size and size > 1 else words.ranks(ranks)


def _bytes_cause(check: LiveBytes) -> str:
    if check["verdict"] not in ALARMS:
        return ""
    parts = [f"{site['site']}  {site['mechanism']}" for site in check["sites"][:1]]
    parts += [f"{fault['opens']} opens{_counter(fault)}" for fault in check["ipc"]["faults"][:1]]
    if len(check["sites"]) > 1:
        parts.append(f"+{len(check['sites']) - 1} sites")
    return "  ".join(parts)


def _counter(fault: IpcFault) -> str:
    return "" if fault["counter"] is None else f", counter {fault['counter']}"


def _bytes_full(check: LiveBytes) -> Iterator[str]:
    yield from _series_lines(check)
    for site in check["sites"]:
        grown = f"+{words.size(site['bytes_per_cycle'])} a cycle"
        yield f"{site['site']}: {grown}, {words.ranks(site['ranks'])}, {site['mechanism']}"
        yield from (f"  from {frame}" for frame in site["stack"][1:])
        yield from (f"  held by {chain}" for chain in site["held_by"])
    for fault in check["ipc"]["faults"]:
        each = f"{fault['handles']} handles of {fault['site']}, {fault['opens']} opens each{_counter(fault)}"
        yield f"ipc {fault['kind']}: {each}, {words.size(fault['bytes'])}, by {words.ranks(fault['by_ranks'])}"
    if check["note"]:
        yield check["note"]


def _series_lines(check: LiveBytes) -> Iterator[str]:
    """One line for all ranks that saw the same bytes at the same steps."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for rank, series in enumerate(check["series"]):
        alike.setdefault(tuple(series), []).append(rank)
    for seen, ranks in alike.items():
        if seen:
            ends = f"{words.size(seen[0])} to {words.size(seen[-1])}"
            yield f"{words.ranks(ranks)}: {words.sparkline(seen)} {ends}"


def _gc_row(test: Test, growth: Gc) -> _Row:
    amount = f"+{growth['objects_per_append']:g} an append" if growth["verdict"] == "growing" else "0 objects"
    types = ", ".join(f"{name} +{count:g}" for name, count in growth["by_type"].items())
    alarming = growth["verdict"] in ALARMS
    return _Row(
        word=growth["verdict"],
        amount=amount,
        ranks="",
        series="",
        name=test["nodeid"],
        cause=types if alarming else "",
        full=tuple(_gc_full(growth)),
    )


def _gc_full(growth: Gc) -> Iterator[str]:
    yield from (f"{name}: +{count:g} an append" for name, count in growth["by_type"].items())
    yield from (f"held by {chain}" for chain in growth["held_by"])
    if growth["pause_ms"]:
        yield "full collection " + ", ".join(f"{when} {ms:.1f} ms" for when, ms in growth["pause_ms"].items())
    if growth["note"]:
        yield growth["note"]


def _line(row: _Row, width: int) -> str:
    head = f"{row.shown_word:<8} {row.amount:>17} {row.ranks:<7} {row.series:<8} "
    return (head + _shortened(row.name, max(width - len(head), 12))).rstrip()


def _shortened(text: str, room: int) -> str:
    """The end of a name tells it from its neighbours, so the beginning goes."""
    return text if len(text) <= room else "…" + text[len(text) - room + 1 :]


def _cause_line(row: _Row, width: int) -> str:
    text = f"{'':<8} {row.cause}"
    return text if len(text) <= width else text[: width - 1] + "…"


def _screen(rows: Sequence[_Row], width: int, room: int) -> list[str]:
    """At most `room` lines: alarming checks first, then their causes, then the clean ones; the rest is counted."""
    alarming = [row for row in rows if row.alarming]
    wanted = sum(1 + bool(row.cause) for row in alarming)
    clean = len(rows) - len(alarming)
    spare = room - len(rows)
    if spare < wanted - len(alarming):  # causes push clean checks out, but not alarming ones
        clean = max(0, min(clean, room - 1 - wanted))
    shown = [*alarming, *rows[len(alarming) : len(alarming) + clean]]
    folded = len(rows) > len(shown) or len(shown) > room
    shown = shown[: room - folded]
    causes = room - folded - len(shown)
    lines: list[str] = []
    for row in shown:
        lines.append(_line(row, width))
        if row.cause and causes > 0:
            lines.append(_cause_line(row, width))
            causes -= 1
    if len(rows) > len(shown):
        lines.append(f"… and {len(rows) - len(shown)} more (-v shows all)")
    return lines


def _all_lines(rows: Sequence[_Row]) -> Iterator[str]:
    for row in rows:
        yield _line(row, 10_000)
        yield from (f"{'':<8} {text}" for text in row.full)


def _counts(rows: Sequence[_Row]) -> str:
    counted = [(word, sum(row.word == word for row in rows)) for word in _ORDER]
    said = ", ".join(f"{count} {word.upper() if word in ALARMS else word}" for word, count in counted if count)
    return f"sglmem: {said}"


def _proof_lines(proof: Proof | None, width: int, verbosity: int) -> Iterator[str]:
    if proof is None:
        return
    caught = sum(fault["verdict"] == "caught" for fault in proof["faults"])
    score = "no fault fired" if proof["score"] is None else f"score {proof['score']:.0%}"
    yield f"proof: {caught} of {len(proof['faults'])} faults caught, {score}"
    missed = [fault for fault in proof["faults"] if fault["verdict"] != "caught" or verbosity > 0]
    limit = len(missed) if verbosity > 0 else 4
    for fault in missed[:limit]:
        word = fault["verdict"].upper() + "!" if fault["verdict"] == "survived" else fault["verdict"]
        yield _shortened(f"  {word:<14} {fault['fault']}", width)


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

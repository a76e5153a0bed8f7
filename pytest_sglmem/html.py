"""A report as one self-contained page: styles and drawings inside, no script, no network, none allowed by its policy.

The page is laid out by `templates/report.html` (jinja2) and drawn by `charts.py` (pygal); both come with the extra
`html`. It opens what alarms and folds what is clean, follows the reader's light or dark, and is read by keyboard alone
(headings, `details`, scrollable tables that take the focus). Text from the report is escaped, wherever it came from.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from . import summary, words
from .document import Document, LiveBytes, Proof, Test

NEEDED = ("jinja2", "pygal")
_MARKS = {"caught": "✓", "missed": "✗", "": "·"}
_SAID = {"caught": "fired and was noticed", "missed": "fired and nobody noticed", "": "did not fire"}


def check_installed(path: str | Path) -> None:
    """Raise ValueError, naming the extra to install, where the page for `path` could not be made."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"{str(path)!r} needs {' and '.join(missing)}: pip install 'pytest-sglmem[html]'")


def page(document: Document) -> str:
    """The page. Raises ValueError as `check_installed` does."""
    check_installed("an .html report")
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("pytest_sglmem"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(size=words.size, ranks=words.ranks, grown=_grown, who=_who, share=_share)
    tests = [_view(number, test) for number, test in enumerate(document["tests"], start=1)]
    rows = summary.sorted_rows(document)
    return environment.get_template("report.html").render(
        document=document,
        counts=summary.counts(rows).removeprefix("sglmem: ") if rows else "nothing was checked",
        tests=sorted(tests, key=lambda view: (not view.alarming, view.test["outcome"] != "failed")),
        proof=_matrix(document["proof"], tests),
    )


@dataclass(frozen=True, slots=True)
class _Check:
    """One verdict on live bytes with its drawings (SVG, safe as it is)."""

    check: LiveBytes
    row: summary.Row
    legend: list[tuple[int, str]]
    series: str
    growth: str
    cycles: int
    traffic: list[list[tuple[int, int] | None]]


@dataclass(frozen=True, slots=True)
class _View:
    """One test as the page shows it; `number` names it in the proof's matrix."""

    number: int
    test: Test
    rows: list[summary.Row]
    checks: list[_Check]
    growths: list[tuple[summary.Row, object]]

    @property
    def alarming(self) -> bool:
        return any(row.alarming for row in self.rows)


def _view(number: int, test: Test) -> _View:
    rows = summary.check_rows(test)
    first = len(test["live_bytes"])
    return _View(
        number=number,
        test=test,
        rows=rows,
        checks=[_check(check, row) for check, row in zip(test["live_bytes"], rows, strict=False)],
        growths=list(zip(rows[first:], test["gc"], strict=True)),
    )


def _check(check: LiveBytes, row: summary.Row) -> _Check:
    from . import charts

    drawn = charts.lines(check)
    judged = max((len(line.settled) for line in drawn), default=0)
    return _Check(
        check=check,
        row=row,
        legend=[(index % charts.COLOURS, line.name) for index, line in enumerate(drawn)],
        series=charts.live_bytes(drawn, check["warmup"]) if any(line.series for line in drawn) else "",
        growth=charts.growth(drawn) if judged > 1 else "",
        cycles=judged,
        traffic=_traffic(check),
    )


def _traffic(check: LiveBytes) -> list[list[tuple[int, int] | None]]:
    """Row: exporter, column: opener; (opens, still open), None where the two never met; empty where nobody did."""
    pairs = check["ipc"]["pairs"]
    size = 1 + max((max(pair["exporter"], pair["opener"]) for pair in pairs), default=-1)
    table: list[list[tuple[int, int] | None]] = [[None] * size for _ in range(size)]
    for pair in pairs:
        table[pair["exporter"]][pair["opener"]] = (pair["opens"], pair["still_open"])
    return table


@dataclass(frozen=True, slots=True)
class _Matrix:
    """The proof: a row a fault, a column a test in which a fault fired."""

    said: str
    columns: list[_View]
    rows: list[tuple[str, str, list[tuple[str, str]]]]


def _matrix(proof: Proof | None, tests: list[_View]) -> _Matrix | None:
    if proof is None:
        return None
    struck = {nodeid for fault in proof["faults"] for nodeid in fault["fired_in"]}
    columns = [view for view in tests if view.test["nodeid"] in struck]
    rows = []
    for fault in proof["faults"]:
        cells = []
        for view in columns:
            nodeid = view.test["nodeid"]
            word = "caught" if nodeid in fault["caught_by"] else "missed" if nodeid in fault["fired_in"] else ""
            cells.append((_MARKS[word], _SAID[word]))
        rows.append((fault["fault"], fault["verdict"], cells))
    return _Matrix(next(summary.proof_lines(proof)).removeprefix("proof: "), columns, rows)


def _grown(count: int) -> str:
    return f"+{words.size(count)}" if count > 0 else words.size(count)


def _who(row: summary.Row) -> str:
    """The row's amount and ranks as a phrase."""
    ranks = f"{row.ranks} ranks" if row.ranks.startswith("all ") else row.ranks
    return f"{row.amount}, {ranks}" if ranks else row.amount


def _share(part: float, most: float) -> int:
    """Percent of the widest bar; what shrank has none."""
    return round(100 * max(part, 0) / most) if most > 0 else 0

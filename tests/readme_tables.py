"""The README's tables, made from the code: `python tests/readme_tables.py --write` puts them in, a test compares.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; what is there between is replaced. It is made from the
code, or from what was measured (`fixtures/`), so that no number drifts from where it comes. Without `--write` the
program says whether the README is up to date (exit status 1 where it is not).
"""

from __future__ import annotations

import gzip
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from pytest_sglmem.faults import ACTIONS, POINTS
from pytest_sglmem.markers import MARKERS
from pytest_sglmem.options import INI_ONLY, OPTIONS

README = Path(__file__).parent.parent / "README.md"
FIXTURES = README.parent / "fixtures"
PLACE = re.compile(r"(<!-- table: (\w+) -->\n)(.*?)(<!-- end -->\n)", re.DOTALL)


def options() -> Iterator[str]:
    """Every option with its default, then what only the ini file can say."""
    rows = [
        (
            code(" ".join(filter(None, (option.flag, option.metavar)))),
            option.meaning,
            option.shown_default or option.default,
        )
        for option in OPTIONS
    ]
    yield from table(
        ("option", "meaning", "default"),
        [
            *((name, meaning, "" if default is None else code(str(default))) for name, meaning, default in rows),
            ("`--sglmem-faults`", "list the fault points and actions, and exit", ""),
            *((f"{code(name)} (ini file only)", meaning, "") for name, meaning in INI_ONLY),
        ],
    )


def markers() -> Iterator[str]:
    """Every marker."""
    rows = [marker.split(": ", 1) for marker in MARKERS]
    yield from table(("marker", "meaning"), [(code(name), meaning) for name, meaning in rows])


def faults() -> Iterator[str]:
    """Every fault point with what it takes, then every action."""
    points = [(code(p.name), place(p.place), " ".join(map(code, p.actions))) for p in POINTS.values()]
    yield from table(("point", "where it strikes", "actions"), points)
    yield ""
    yield from table(("action", "what it does"), [(code(a.name + a.argument), a.does) for a in ACTIONS.values()])


def emulated() -> Iterator[str]:
    """What of torch's device interface is emulated, the names that work alike in one row."""
    from pytest_sglmem.emulated.surface import SUPPORTED

    alike: dict[str, list[str]] = {}
    for name, note in sorted(SUPPORTED.items()):
        alike.setdefault(note, []).append(name)
    rows = sorted(alike.items(), key=lambda row: -len(row[1]))
    yield from table(("names", "how"), [(", ".join(map(code, names)), note) for note, names in rows])


def exchange() -> Iterator[str]:
    """`exchange` beside NCCL, as recorded."""
    rows = measured("exchange-2xh200.json")["rows"]
    head = ("MiB a rank", "`exchange`, ms", "NCCL, ms", "times as fast", "host ahead", "GB/s", "of the link")
    yield from table(
        head,
        [
            (
                str(row["mib"]),
                f"{row['ours_ms']:.3f}",
                f"{row['nccl_ms']:.3f}",
                f"{row['ratio']:.2f}",
                f"{row['ratio_ahead']:.2f}",
                f"{row['gb_s']:.0f}",
                f"{row['of_link']:.0%}",
            )
            for row in rows
        ],
    )


def seed() -> Iterator[str]:
    """Requests of varied and of fixed geometry, before and after, as recorded."""
    head = ("requests", "", "growth, MiB a request", "at the end, MiB", "outputs the same", "median, ms a request")
    yield from table(
        head, [seed_row(row, code) for row in measured("seed-1xh200.json")["rows"] for code in ("before", "after")]
    )


def seed_row(row: dict, code: str) -> tuple[str, ...]:
    """One line. The second half of the requests repeats the first: growth is counted from half to end."""
    live, half = row[code]["live_bytes"], row["requests"] // 2
    growth = (live[-1] - live[half - 1]) / 2**20 / half
    return (
        f"{row['requests']} {row['kind']}",
        code,
        f"{growth:.1f}",
        f"{live[-1] / 2**20:,.0f}",
        f"{row['same_outputs']} of {row['requests']}",
        f"{statistics.median(row[code]['ms'][half:]):,.0f}",
    )


def truth() -> Iterator[str]:
    """What was recorded of CUDA IPC."""
    rows = []
    for path in sorted((FIXTURES / "truth").glob("*.json.gz")):
        said = json.loads(gzip.decompress(path.read_bytes()))
        played = said["schedules"]
        steps = sum(len(schedule["steps"]) for schedule in played)
        rows.append((code(path.name), f"{said['devices']} x {said['device']}", f"{len(played):,}", f"{steps:,}"))
    yield from table(("recording", "devices", "schedules", "steps"), rows)


def measured(name: str) -> dict:
    """A record of `fixtures/measured`."""
    return json.loads((FIXTURES / "measured" / name).read_text(encoding="utf-8"))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """A markdown table."""
    for row in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


def code(text: str) -> str:
    """`text` as code."""
    return f"`{text}`"


def place(text: str) -> str:
    """Where a point strikes: names as code, other words as they are."""
    return text if " " in text.split(",")[0] else ", ".join(map(code, text.split(", ")))


TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "options": options,
    "markers": markers,
    "faults": faults,
    "emulated": emulated,
    "exchange": exchange,
    "seed": seed,
    "truth": truth,
}


def with_tables(text: str) -> str:
    """`text` with each of its tables as the code says now. Raises KeyError for a table that nobody makes."""
    return PLACE.sub(lambda found: found[1] + "\n".join(["", *TABLES[found[2]](), "", ""]) + found[4], text)


def main(arguments: Sequence[str]) -> int:
    """Compare, or write."""
    text = README.read_text(encoding="utf-8")
    made = with_tables(text)
    if "--write" in arguments:
        README.write_text(made, encoding="utf-8")
        return 0
    print("up to date" if made == text else "differs: python tests/readme_tables.py --write")
    return int(made != text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

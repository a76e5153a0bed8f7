"""The seed's table as a drawing: live bytes of all ranks after each request, before and after.

    python benchmarks/plot_seed.py [--json fixtures/measured/seed-1xh200.json] [--svg docs/seed-1xh200.svg]

Reads what `seed_table.py --json` wrote and needs nothing but Python. One scale of bytes for both panels. Every colour
is readable on white and on black: a drawing in a README is not told which of the two its page is.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "fixtures" / "measured" / "seed-1xh200.json"
DRAWING = ROOT / "docs" / "seed-1xh200.svg"
GIB = 1 << 30
WIDTH, HEIGHT = 800, 320
LEFT, RIGHT, TOP, BOTTOM, BETWEEN = 62, 90, 46, 44, 146  # room beside a panel holds the names of its lines
PANEL = (WIDTH - LEFT - RIGHT - BETWEEN) / 2
COLOURS = {"before": "#d9534f", "after": "#1f9d8a"}
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #6e7781 }
.title { font-weight: 600 }
.guide { stroke: #8c959f; stroke-opacity: .35 }
path { fill: none; stroke-width: 2; stroke-linejoin: round }
"""


def drawing(record: dict) -> str:
    """The record as SVG text."""
    most = max(size for row in record["rows"] for code in COLOURS for size in row[code]["live_bytes"])
    top = -(-most // (2 * GIB)) * 2  # GiB
    said = f"Live bytes of all {record['ranks']} ranks after each request, before and after"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{said}">',
        f"<title>{said}</title>",
        f"<style>{STYLE}</style>",
    ]
    for number, row in enumerate(record["rows"]):
        lines += panel(row, LEFT + number * (PANEL + BETWEEN), top)
    return "\n".join([*lines, "</svg>"]) + "\n"


def panel(row: dict, left: float, top: int) -> Iterator[str]:
    """One kind of requests: guides, then a line for each code with its name at its end."""
    requests, right = row["requests"], left + PANEL
    kind = f"{requests} requests of " + {"varied": "varied geometry", "fixed": "one geometry"}[row["kind"]]
    yield f'<text class="title" x="{left:g}" y="{TOP - 24}">{kind}</text>'
    for mark in range(0, top + 1, 2):
        y = height(mark * GIB, top)
        yield f'<line class="guide" x1="{left:g}" y1="{y:g}" x2="{right:g}" y2="{y:g}"/>'
        yield f'<text x="{left - 8:g}" y="{y + 4:g}" text-anchor="end">{mark}{" GiB" if mark == top else ""}</text>'
    for mark in (1, requests // 2, requests):
        x = across(mark, requests, left)
        yield f'<text x="{x:g}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{mark}</text>'
    yield f'<text x="{left + PANEL / 2:g}" y="{HEIGHT - 6}" text-anchor="middle">request</text>'
    for code, colour in COLOURS.items():
        live = row[code]["live_bytes"]
        points = [f"{across(n, requests, left):g},{height(size, top):g}" for n, size in enumerate(live, start=1)]
        yield f'<path d="M{" L".join(points)}" stroke="{colour}"/>'
        y = height(live[-1], top) + 4
        yield f'<text x="{right + 6:g}" y="{y:g}">{code} {live[-1] / GIB:.1f}</text>'


def across(request: int, requests: int, left: float) -> float:
    """Where a request stands."""
    return round(left + PANEL * (request - 1) / max(1, requests - 1), 1)


def height(size: int, top: int) -> float:
    """Where a number of bytes stands; `top`: GiB at the upper end."""
    return round(HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * size / (top * GIB), 1)


def main() -> None:
    """Parse, read, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=RECORD)
    parser.add_argument("--svg", type=Path, default=DRAWING)
    args = parser.parse_args()
    args.svg.write_text(drawing(json.loads(args.json.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()

"""The report page's drawings: live bytes step by step, settled bytes cycle by cycle, as inline SVG.

Drawn by pygal (the extra `html`), because it writes SVG that needs no script and no font, in pure Python: plotly.js
would weigh more than the whole page may, matplotlib would bring numpy and a second to import it. Its styles, script
and comments are taken out: colours are the page's classes (`c0` to `c7`), so that dark and light are one drawing, and
a value shows on hovering as an SVG title.

Ranks that saw the same bytes are one line. A series longer than the drawing is wide keeps the lowest and the highest
of every stretch, so no peak is lost.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

import pygal
import pygal.style

from . import words
from .document import LiveBytes

# pygal leaves an import hook of the old kind in `sys.meta_path` (for map plug-ins, unused here). From then on Python
# 3.10 and 3.11 warn at modules they look for; a session under `-W error` fails at its next import. So it goes again.
sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__module__ != "pygal"]

COLOURS = 8
POINTS = 480  # a drawing is some 500 units wide: more points a line cannot be seen
HEIGHT = 260
LETTERS = 18  # room is kept for letters of this size, which report.css takes on a phone
_LEFT_OUT = ("defs", "script", "style", "title")
_LEFT_OUT_CLASSES = frozenset({"background", "titles", "text-overlay", "tooltip-overlay"})
_CLASSES = ("axis", "x", "y", "guide", "line", "dot")
_NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")


@dataclass(frozen=True, slots=True)
class Line:
    """Ranks alike: what they saw step by step, warm-up included, and settled at the ends of the judged cycles."""

    ranks: tuple[int, ...]
    series: tuple[int, ...]
    settled: tuple[int, ...]

    @property
    def name(self) -> str:
        """As a legend says it: "ranks 0-7"."""
        return words.ranks(self.ranks)


def lines(check: LiveBytes) -> list[Line]:
    """The check's ranks, those alike together, in the order of their first rank."""
    alike: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for rank, ends in enumerate(check["settled"]):
        series = tuple(check["series"][rank]) if rank < len(check["series"]) else ()
        if series or ends:  # a rank that was not traced has neither
            alike.setdefault((series, tuple(ends)), []).append(rank)
    return [Line(tuple(ranks), series, ends) for (series, ends), ranks in alike.items()]


def live_bytes(drawn: Sequence[Line], warmup: int) -> str:
    """SVG of live bytes after each step; guides where cycles end; the settled bytes as dots on the judged guides."""
    steps = max((len(line.series) for line in drawn), default=0)
    judged = max((len(line.settled) for line in drawn), default=0)
    length = steps / (warmup + judged) if warmup + judged else 0
    guides = [((cycle + 1) * length, name) for cycle, name in enumerate(cycle_names(judged, 10, warmup))]
    chart = _chart([value for line in drawn for value in (*line.series, *line.settled)], guides, (0, steps), 640)
    for line in drawn:
        chart.add(line.name, thinned(line.series), show_dots=False)
    for line in drawn:
        chart.add(line.name, _dots(line.name, guides[warmup:], line.settled, "settled"), stroke=False)
    label = "live bytes after each step, by rank, and settled bytes at the ends of the judged cycles"
    return _svg(chart, label, 2 * list(range(len(drawn))))


def growth(drawn: Sequence[Line]) -> str:
    """SVG of settled bytes since the end of the first judged cycle: what the verdict is about, alone.

    Ranks that grew alike are one line here although they may have started from different bytes.
    """
    alike: dict[tuple[int, ...], list[int]] = {}
    for index, line in enumerate(drawn):
        alike.setdefault(tuple(value - line.settled[0] for value in line.settled), []).append(index)
    judged = max(map(len, alike), default=0)
    guides = [(float(cycle), name) for cycle, name in enumerate(cycle_names(judged, 6), start=1)]
    chart = _chart([value for since in alike for value in since], guides, (1, judged), 360)
    for since, indices in alike.items():
        name = words.ranks(sorted(rank for index in indices for rank in drawn[index].ranks))
        chart.add(name, _dots(name, guides, since, "since cycle 1"))
    label = "settled bytes since the first judged cycle, cycle by cycle"
    return _svg(chart, label, [indices[0] for indices in alike.values()])


def _dots(name: str, guides: Sequence[tuple[float, str]], values: Sequence[int], what: str) -> list[dict[str, object]]:
    return [
        {"value": (place, value), "label": f"{name}: {words.size(value)} {what}"}
        for (place, _), value in zip(guides, values, strict=False)
    ]


def cycle_names(judged: int, most: int, warmup: int = 0) -> list[str]:
    """Labels for the cycles' ends, "w" for warm-up, then 1, 2, 3; all but at most `most` of them left empty."""
    names = ["w"] * warmup + [str(cycle + 1) for cycle in range(judged)]
    every = -(-len(names) // most) or 1
    return [name if (len(names) - 1 - index) % every == 0 else "" for index, name in enumerate(names)]


def thinned(series: Sequence[int], points: int = POINTS) -> list[tuple[int, int]]:
    """(step, bytes) in step order, at most about `points`: the lowest and the highest of each stretch of steps."""
    every = -(-2 * len(series) // points)
    if every <= 2:
        return [(step + 1, value) for step, value in enumerate(series)]
    return [point for start in range(0, len(series), every) for point in _extremes(series, start, every)]


def _extremes(series: Sequence[int], start: int, every: int) -> Iterator[tuple[int, int]]:
    stretch = range(start, min(start + every, len(series)))
    low, high = min(stretch, key=series.__getitem__), max(stretch, key=series.__getitem__)
    for step in sorted({low, high}):
        yield step + 1, series[step]


def scale(low: int, high: int, most: int = 5) -> list[int]:
    """Marks for bytes from `low` to `high`: at most `most` + 1, apart by a power of two.

    At least 512 B in all, the least that an allocation takes: so nothing looks like much.
    """
    apart = 128
    while (high - low) / apart > most - 1:
        apart *= 2
    first = low // apart
    return [apart * mark for mark in range(first, max(first + (4 if apart == 128 else 1), -(-high // apart)) + 1)]


def mark_names(marks: Sequence[int]) -> list[str]:
    """Text for marks of `scale`, so that no two look alike.

    "0 B", "64 MiB" where the sizes are short; else the first and what the others add to it: "97 GiB", "+512 KiB".
    """
    exact = [words.size(mark) for mark in marks]
    if all(_bytes_of(name) == mark for name, mark in zip(exact, marks, strict=True)):
        return exact
    return [exact[0], *(f"+{words.size(mark - marks[0])}" for mark in marks[1:])]


def _bytes_of(name: str) -> float:
    number, unit = name.split()
    return float(number) * 1024 ** ("B", "KiB", "MiB", "GiB", "TiB").index(unit)


def _chart(
    values: Sequence[int], guides: Sequence[tuple[float, str]], across: tuple[float, float], width: int
) -> pygal.XY:
    marks = scale(min(values, default=0), max(values, default=0))
    chart = pygal.XY(
        width=width,
        height=HEIGHT,
        css=[],
        js=[],
        no_prefix=True,
        disable_xml_declaration=True,
        show_legend=False,
        show_x_guides=True,
        dots_size=3,
        margin=8,
        margin_top=14,
        style=pygal.style.Style(label_font_size=LETTERS),
        margin_right=18,
        y_labels=[{"value": mark, "label": label} for mark, label in zip(marks, mark_names(marks), strict=True)],
        range=(marks[0], marks[-1]),
        xrange=(across[0], max(across[1], across[0] + 1)),
    )
    chart.x_labels = [{"value": place, "label": label} for place, label in guides]
    return chart


def _svg(chart: pygal.XY, label: str, colours: Sequence[int]) -> str:
    """The chart as text, without what the page brings itself. `colours`: a number a series of the chart."""
    found = _copied(ElementTree.fromstring(chart.render()), colours)
    assert found is not None  # the root is never left out
    found.set("role", "img")
    found.set("aria-label", label)
    return ElementTree.tostring(found, encoding="unicode")


def _copied(element: ElementTree.Element, colours: Sequence[int]) -> ElementTree.Element | None:
    """`element` and what it holds, bare of styles, scripts, tooltips and empty groups; None where nothing is left."""
    tag = element.tag.rpartition("}")[2]
    classes = element.get("class", "").split()
    if tag in _LEFT_OUT or not _LEFT_OUT_CLASSES.isdisjoint(classes):
        return None
    if tag == "desc" and "label" not in classes:
        return None
    made = ElementTree.Element("title" if tag == "desc" else tag, _attributes(element, classes, colours))
    made.text = element.text
    for child in element:
        copied = _copied(child, colours)
        if copied is not None:
            made.append(copied)
    return None if tag == "g" and len(made) == 0 else made


def _attributes(element: ElementTree.Element, classes: Sequence[str], colours: Sequence[int]) -> dict[str, str]:
    kept = {name: _NUMBER.sub(_rounded, value) for name, value in element.attrib.items() if name not in ("id", "class")}
    series = next((int(name.removeprefix("serie-")) for name in classes if name.startswith("serie-")), None)
    named = [f"c{colours[series] % COLOURS}"] if series is not None else [n for n in classes if n in _CLASSES]
    return {**kept, "class": " ".join(named)} if named else kept


def _rounded(found: re.Match[str]) -> str:
    return f"{float(found[0]):.1f}".removesuffix(".0")

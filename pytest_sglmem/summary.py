"""A report's checks as rows, and the rows as lines: for a terminal, for GitHub's step summary.

A row is one check: a verdict word, how much, on which ranks, a small series, the test, the cause. Words that alarm are
in capitals with a mark, so they stand out where there is no colour; a leak in a test that passed was expected there,
and does not. Whatever is longer than the line is shortened at
the end that says less; nothing is measured or judged here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from . import words
from .document import ALARMS, FAILING, ORDER, Document, Fired, Gc, IpcFault, LiveBytes, Proof, SlowStep, Test

SCREEN = 23  # lines of a classic terminal less the title of the section: what the default summary keeps to
GITHUB_ROWS = 100
_WITH_HELP = {
    "late": "comes back only after torch.cuda.ipc_collect()",
    "cyclic": "comes back only through the cyclic collector",
}
_PASSED = "expected: the test passed"
_INDENT = " " * 6
_RANKS_ROOM = 12  # columns: "ranks 0-2, 5"


@dataclass(frozen=True, slots=True)
class Row:
    """One check as text: `cause` says why it is not clean (empty where it is), `full` is what -v adds.

    `expected`: the verdict fails a test that asserts otherwise, and this one passed.
    """

    word: str
    amount: str
    ranks: str
    series: str
    name: str
    cause: str = ""
    full: tuple[str, ...] = ()
    expected: bool = False

    @property
    def alarming(self) -> bool:
        """Somebody should look at this check."""
        return self.word in ALARMS and not self.expected

    @property
    def shown_word(self) -> str:
        """The verdict as it stands out in plain text."""
        if self.expected:
            return f"{self.word} (expected)"
        return f"{self.word.upper()}!" if self.alarming else self.word


def terminal_lines(document: Document, width: int = 80, verbosity: int = 0) -> list[str]:
    """The lines of the summary section: a line a check, the alarming ones first and in capitals.

    Verbosity below 0: nothing where all is clean, else one line that counts. 0: at most a screen (what does not fit is
    counted), no line longer than `width` (at least 60). 1 and more: everything, uncut.
    """
    rows = sorted_rows(document)
    closing = [*_slowest_of_all(document, width), *proof_lines(document["proof"], listed=verbosity > 0)]
    if rows:
        closing.append(counts(rows))
    if verbosity < 0:
        return closing[-1:] if any(row.alarming for row in rows) else []
    if verbosity > 0:
        return [*_all_lines(rows), *closing]
    return [*_screen(rows, width, SCREEN - len(closing)), *closing]


def github_summary(document: Document) -> str:
    """The report as GitHub-flavoured markdown for `$GITHUB_STEP_SUMMARY`: a table, alarming checks first.

    Empty where nothing was checked. At most a hundred rows: the step summary holds 1 MiB, and nobody reads more.
    """
    rows = sorted_rows(document)
    if not rows:
        return ""
    lines = [
        f"### {counts(rows)}",
        "",
        "| verdict | how much | ranks | series | test | cause |",
        "|---|--:|---|---|---|---|",
    ]
    for row in rows[:GITHUB_ROWS]:
        word = f"**{row.shown_word}**" if row.alarming else row.shown_word
        cells = [word, row.amount, row.ranks, row.series, _code(row.name), _cell(row.cause)]
        lines.append(f"| {' | '.join(cells)} |")
    if len(rows) > GITHUB_ROWS:
        lines += ["", f"… and {len(rows) - GITHUB_ROWS} more"]
    lines += ["", *(f"{_cell(line.strip())}  " for line in proof_lines(document["proof"], listed=True))]
    return "\n".join(lines).rstrip() + "\n"


def counts(rows: Sequence[Row]) -> str:
    """How many checks said what: "sglmem: 2 LEAK, 1 leak expected, 12 flat"."""
    counted: dict[str, int] = {}
    for row in sorted(rows, key=_rank):
        word = f"{row.word} expected" if row.expected else row.word.upper() if row.alarming else row.word
        counted[word] = counted.get(word, 0) + 1
    return "sglmem: " + ", ".join(f"{count} {word}" for word, count in counted.items())


def sorted_rows(document: Document) -> list[Row]:
    """All checks of the session, the worst verdicts first, else in the order they came."""
    rows = [row for test in document["tests"] for row in check_rows(test)]
    return sorted(rows, key=_rank)


def _rank(row: Row) -> tuple[bool, int]:
    return not row.alarming, ORDER.index(row.word)


def check_rows(test: Test) -> list[Row]:
    """The checks of one test: live bytes, then tracked objects. The first has the faults that struck the test."""
    rows = [
        *(_bytes_row(test, check) for check in test["live_bytes"]),
        *(_gc_row(test, growth) for growth in test["gc"]),
    ]
    if test["outcome"] == "passed":
        rows = [_expected(row) if row.word in FAILING else row for row in rows]
    if rows and test["faults"]:
        rows[0] = replace(rows[0], full=(*_fired_lines(test["faults"]), *rows[0].full))
    return rows


def _expected(row: Row) -> Row:
    return replace(row, expected=True, cause=f"{_PASSED}  {row.cause}", full=(_PASSED, *row.full))


def _fired_lines(faults: Sequence[Fired]) -> Iterator[str]:
    for fault in faults:
        by_rank = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(fault["fired"]) if count)
        yield f"fault {fault['fault']} fired {f'({by_rank})' if by_rank else 'nowhere'}"


def proof_lines(proof: Proof | None, *, listed: bool = False) -> Iterator[str]:
    """The proof's score in a line; `listed`: then a line for each fault, those that no test noticed first."""
    if proof is None:
        return
    caught = sum(fault["verdict"] == "caught" for fault in proof["faults"])
    score = "none fired" if proof["score"] is None else f"score {proof['score']:.0%}"
    blind = f", {len(proof['blind'])} BLIND!" if proof["blind"] else ""
    not_healed = f", {len(proof['not_healed'])} NOT HEALED!" if proof["not_healed"] else ""
    left_out = f", {proof['left_out']} runs left out" if proof["left_out"] else ""
    yield f"proof: {caught} of {len(proof['faults'])} faults caught, {score}{blind}{not_healed}{left_out}"
    if listed:
        holes = ("survived", "blind")
        for fault in sorted(proof["faults"], key=lambda fault: fault["verdict"] not in holes):
            word = f"{fault['verdict'].upper()}!" if fault["verdict"] in holes else fault["verdict"]
            yield f"  {word:<14} {fault['fault']}"


def shortened(text: str, room: int) -> str:
    """`text` in `room` characters, its end cut."""
    return text if len(text) <= room else text[: room - 1] + "…"


def _shortened_name(text: str, room: int) -> str:
    # The end of a name tells it from its neighbours, so the beginning goes.
    return text if len(text) <= room else "…" + text[len(text) - room + 1 :]


def _bytes_row(test: Test, check: LiveBytes) -> Row:
    guilty, amount = _guilty_and_amount(check)
    worst = max(guilty, key=lambda rank: check["bytes_per_cycle"][rank], default=0)
    shown = check["settled"] or check["series"]
    return Row(
        word=check["verdict"],
        amount=amount,
        ranks=_short_ranks(guilty, len(check["bytes_per_cycle"])),
        series=words.sparkline(shown[worst], 8) if shown else "",
        name=test["nodeid"],
        cause=_bytes_cause(check),
        full=tuple(_bytes_full(check)),
    )


def _guilty_and_amount(check: LiveBytes) -> tuple[list[int], str]:
    """The ranks that the verdict is about, and the most that one of them shows."""
    values, unit = {
        "late": (check["late_bytes"], "late"),
        "cyclic": (check["cyclic_bytes"], "cyclic"),
    }.get(check["verdict"], (check["bytes_per_cycle"], "a cycle"))
    if check["verdict"] not in ALARMS:
        return list(range(len(values))), words.size(settled(check))
    return [rank for rank, value in enumerate(values) if value > 0], f"+{words.size(max(values, default=0))} {unit}"


def settled(check: LiveBytes) -> int:
    """The settled size of the fullest rank, at the last cycle's end."""
    return max((ends[-1] for ends in check["settled"] if ends), default=0)


def _short_ranks(ranks: Sequence[int], size: int) -> str:
    if len(ranks) == size and size > 1:
        return f"all {size}"
    text = words.ranks(ranks)
    return text if len(text) <= _RANKS_ROOM else f"{len(ranks)} of {size}"


def _bytes_cause(check: LiveBytes) -> str:
    if check["verdict"] not in ALARMS:
        return ""
    parts = [_WITH_HELP[check["verdict"]]] if check["verdict"] in _WITH_HELP else []
    parts += [f"{site['site']}  {site['mechanism']}" for site in check["sites"][:1]]
    parts += [f"{fault['opens']} opens{_counter(fault)}" for fault in check["ipc"]["faults"][:1]]
    if len(check["sites"]) > 1:
        parts.append(f"+{len(check['sites']) - 1} more")
    return "  ".join(parts)


def _counter(fault: IpcFault) -> str:
    return "" if fault["counter"] is None else f", counter {fault['counter']}"


def _by(fault: IpcFault) -> str:
    return words.ranks(fault["by_ranks"]) if fault["by_ranks"] else "nobody known"


def _bytes_full(check: LiveBytes) -> Iterator[str]:
    yield from _series_lines(check)
    for site in check["sites"]:
        grown = f"+{words.size(site['bytes_per_cycle'])} a cycle"
        yield f"{site['site']}: {grown}, {words.ranks(site['ranks'])}, {site['mechanism']}"
        yield from (f"  from {frame}" for frame in site["stack"][1:])
        yield from (f"  held by {chain}" for chain in site["held_by"])
    if check["slowest"]:
        yield f"slowest step: {_step_text(check, check['slowest'])}{_shape(check, check['slowest'])}"
    for fault in check["ipc"]["faults"]:
        each = f"{fault['handles']} handles of {fault['site']}, {fault['opens']} opens each{_counter(fault)}"
        yield f"ipc {fault['kind']}: {each}, {words.size(fault['bytes'])}, by {_by(fault)}"
        if fault["advice"]:
            yield f"  {fault['advice']}"
    if check["ipc"]["note"]:
        yield check["ipc"]["note"]
    if check["note"]:
        yield check["note"]


def _step_text(check: LiveBytes, step: SlowStep) -> str:
    length = len(check["geometries"])
    cycle, index = divmod(step["step"], length) if length else (0, step["step"])
    return f"{step['seconds']:.3f} s, rank {step['rank']}, cycle {cycle}, step {index}"


def _shape(check: LiveBytes, step: SlowStep) -> str:
    return f" ({check['geometries'][step['step'] % len(check['geometries'])]})" if check["geometries"] else ""


def _slowest_of_all(document: Document, width: int) -> Iterator[str]:
    steps = [
        (check["slowest"]["seconds"], _step_text(check, check["slowest"]), test["nodeid"])
        for test in document["tests"]
        for check in test["live_bytes"]
        if check["slowest"]
    ]
    if steps:
        _, text, nodeid = max(steps)
        said = f"slowest step: {text}, "
        yield said + _shortened_name(nodeid, max(width - len(said), 12))


def _series_lines(check: LiveBytes) -> Iterator[str]:
    """One line for all ranks that saw the same bytes at the same steps."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for rank, series in enumerate(check["series"]):
        alike.setdefault(tuple(series), []).append(rank)
    for seen, ranks in alike.items():
        if seen:
            ends = f"{words.size(seen[0])} to {words.size(seen[-1])}"
            yield f"{words.ranks(ranks)}: {words.sparkline(seen)} {ends}"


def _gc_row(test: Test, growth: Gc) -> Row:
    amount = f"+{growth['objects_per_append']:g} an append" if growth["verdict"] == "growing" else "0 objects"
    types = ", ".join(f"{name} +{count:g}" for name, count in growth["by_type"].items())
    alarming = growth["verdict"] in ALARMS
    return Row(
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


def _aligned(rows: Sequence[Row], width: int) -> list[str]:
    """A line a row, in columns that are as wide as these rows need; names are shortened to what is left of `width`."""
    if not rows:
        return []
    columns = [[row.shown_word, row.amount, row.ranks, row.series] for row in rows]
    word, amount, ranks, series = (max(map(len, column)) for column in zip(*columns, strict=True))
    room = max(width - word - amount - ranks - series - 4, 12)
    return [
        " ".join(
            [
                f"{row.shown_word:<{word}} {row.amount:>{amount}}",
                *([f"{row.ranks:<{ranks}} {row.series:<{series}}"] if series else []),
                _shortened_name(row.name, room),
            ]
        )
        for row in rows
    ]


def _screen(rows: Sequence[Row], width: int, room: int) -> list[str]:
    """At most `room` lines: alarming checks first, then their causes, then clean checks; the rest is counted."""
    alarming = [row for row in rows if row.alarming]
    wanted = len(rows) + sum(bool(row.cause) for row in alarming)
    room -= wanted > room  # the line that counts the rest
    alarming = alarming[:room]
    causes = min(room - len(alarming), sum(bool(row.cause) for row in alarming))
    clean = [row for row in rows if not row.alarming][: room - len(alarming) - causes]
    shown = [*alarming, *clean]
    lines: list[str] = []
    for row, line in zip(shown, _aligned(shown, width), strict=True):
        lines.append(line)
        if row.cause and causes:
            lines.append(shortened(_INDENT + row.cause, width))
            causes -= 1
    left = len(rows) - len(alarming) - len(clean)
    if wanted > room:
        lines.append(f"… and {left} more (-v shows all)" if left else "… causes: -v")
    return lines


def _all_lines(rows: Sequence[Row]) -> Iterator[str]:
    for row, line in zip(rows, _aligned(rows, 10_000), strict=True):
        yield line
        yield from (_INDENT + text for text in row.full)


def _cell(text: str) -> str:
    for special in "\\|<>*_`[]":
        text = text.replace(special, f"\\{special}")
    return text


def _code(text: str) -> str:
    # Inside a code span only the bar of the table and the backtick itself still mean something.
    return f"`{text.replace('`', chr(39)).replace('|', chr(92) + '|')}`"

"""How verdicts, growth and numbers read: the one place where a record becomes text.

Lines stay within 80 columns where the user's own paths allow it, need no colour, and name rank, number, limit, cause
and next move. Ranks that say the same share a line, so eight ranks are as readable as two. It judges nothing and
imports no torch.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence

from .records import Growth, IpcFault, Mechanism, SiteVerdict, Verdict

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 80
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
_ROWS = 8  # ranks that have a row each where they differ
_SEARCH = "the search for holders"
_NO_HOLDER = ("no Python object", _SEARCH)  # lines of holders.py that name none: `because` says the same
_CALLERS = 4  # lines of a stack that are shown under the user's own
_BECAUSE: Mapping[Mechanism, str] = {
    "retained": "a Python object keeps the tensor",
    "ipc-over-released": "one IPC handle was released more often than it was given out",
    "ipc-never-opened": "an IPC handle was given out and nobody opened it",
    "ipc-held-by-peer": "a peer still maps the block",
    "ipc-dead-peer": "a peer died while it mapped the block",
    "outside-torch": "not torch's allocator: a context, a communicator, a raw cudaMalloc",
    "unknown": "only C++ keeps it: no Python object leads to it, and no IPC handle was made of it",
}
_NEXT: Mapping[Mechanism, str] = {
    "retained": "drop the tensor where the step ends, or give what holds it a bound.",
    "ipc-over-released": "export one handle for each peer that opens it (reduce_tensor once a peer).",
    "ipc-never-opened": "export only what a peer will open, or let the receiver open it and drop it.",
    "ipc-held-by-peer": "let the peer drop its views, synchronize and meet at a barrier before the step ends.",
    "ipc-dead-peer": "restart the exporter when a peer dies; torch never takes this memory back.",
    "outside-torch": "look at communicators, contexts and allocations made without torch.",
    "unknown": "look for what keeps tensors in C++: futures, works, DLPack capsules, caches of extensions.",
}


def size(count: float) -> str:
    """`count` bytes in the unit that keeps it under 1024: "512 B", "1.5 MiB"."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"


def ranks(numbers: Sequence[int]) -> str:
    """Ranks as runs of three or more: "rank 3", "ranks 0, 1, 3", "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    text = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
    return f"{'rank' if len(set(numbers)) == 1 else 'ranks'} {text}"


def sparkline(values: Sequence[float], width: int = 8) -> str:
    """The series in at most `width` characters, lowest to highest."""
    if len(values) > width:
        values = [values[round(i * (len(values) - 1) / (width - 1))] for i in range(width)]
    low, high = min(values, default=0), max(values, default=0)
    return "".join(_BARS[0 if high == low else round((v - low) / (high - low) * 7)] for v in values)


def verdict_line(verdict: Verdict) -> str:
    """The verdict in one line, with what came back only with help."""
    said = [_head(verdict)]
    if verdict.verdict == "leak" and verdict.sites:
        said.append(f"{verdict.sites[0].site} ({verdict.sites[0].mechanism})")
    said.extend(_helped(verdict))
    return "; ".join(said)


def verdict_message(verdict: Verdict) -> str:
    """All that is said of a verdict: headline, series, sites with their holders and mechanism, IPC, what to do next."""
    blocks = [
        [_head(verdict)],
        list(_series(verdict.settled)),
        *[list(_site(site, verdict)) for site in verdict.sites],
        [line for fault in verdict.ipc.faults for line in _fault(fault)],
        [line for text in (*_helped(verdict), *_beside(verdict)) for line in _wrapped(text, "  ")],
        list(_next(verdict)),
    ]
    return "\n\n".join("\n".join(lines) for lines in blocks if lines)


def fault_line(fault: IpcFault) -> str:
    """One broken IPC contract in one line."""
    handles = "1 handle" if fault.handles == 1 else f"{fault.handles} handles, each"
    by = f" by {ranks(fault.by_ranks)}" if fault.by_ranks else ""
    opened = f"opened {_times(fault.opens)}{by}" if fault.opens else f"never opened{by}"
    counter = "gone" if fault.counter is None else str(fault.counter)
    return (
        f"ipc {fault.kind}: exported at {fault.site}: {handles} {opened}, counter {counter}, {size(fault.bytes)} in all"
    )


def growth_message(growth: Growth) -> str:
    """What a failed `gc_tracked` assertion says; for flat growth the same in fewer lines."""
    allowed = f", allowed {growth.per_append:g}"
    head = f"{growth.verdict}: {growth.objects_per_append:g} tracked objects stay with every append{allowed}"
    lines = [head + (f" ({growth.times} appends)" if growth.times else "")]
    if growth.windows:
        lines.append("  objects more in each window: " + ", ".join(f"{count:+d}" for count in growth.windows))
    for name, count in sorted(growth.by_type.items(), key=lambda item: -item[1])[:10]:
        lines.append(f"  {count:>8.3g} an append  {name}")
    lines.extend(line for chain in growth.held_by for line in _chain("  held by  ", chain))
    if growth.note:
        lines.extend(_wrapped(growth.note, "  "))
    return "\n".join(lines)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _head(verdict: Verdict) -> str:
    cycles = f"{verdict.cycles} cycle{'s' * (verdict.cycles != 1)} + {verdict.warmup} warm-up"
    world = _traced(verdict)
    if verdict.verdict == "leak":
        leaking = [rank for rank, rate in enumerate(verdict.bytes_per_cycle) if rate > verdict.tolerance]
        traced = " traced" * (world < len(verdict.settled))  # others were dead, or are of another group
        who = f"{ranks(leaking)} of {world}{traced}" if len(leaking) < world else f"{'all ' * (world > 1)}{world} ranks"
        who = "1 rank" if world == 1 else who
        most = size(max(verdict.bytes_per_cycle))
        return f"leak: {most} a cycle on {who}, allowed {size(verdict.tolerance)} ({cycles})"
    if verdict.verdict == "filling":
        grown = max((v[-1] - v[0] for v in verdict.settled if v), default=0)
        return f"filling: grew by {size(grown)} over the cycles, not in the way of a leak ({cycles})"
    if verdict.verdict == "cyclic":
        return f"cyclic: device memory lies in reference cycles ({cycles})"
    if verdict.verdict == "late":
        return f"late: device memory waits for somebody's ipc_collect ({cycles})"
    return f"flat: {size(max((v[-1] for v in verdict.settled if v), default=0))} ({cycles})"


def _traced(verdict: Verdict) -> int:
    """How many ranks were traced: one that was not has no settled bytes."""
    return sum(map(bool, verdict.settled)) or len(verdict.bytes_per_cycle)


def _helped(verdict: Verdict) -> Iterator[str]:
    """What came back only with help."""
    for values, how in (
        (verdict.cyclic_bytes, "only through the cyclic collector"),
        (verdict.late_bytes, "only after torch.cuda.ipc_collect()"),
    ):
        who = [rank for rank, value in enumerate(values) if value > 0]
        if who:
            yield f"{size(max(values))} a cycle came back {how} on {ranks(who)}"


def _beside(verdict: Verdict) -> Iterator[str]:
    if verdict.note:
        yield f"note: {verdict.note}"
    outside = [value for value in verdict.outside_bytes if value]
    idle = max(verdict.reserved_bytes, default=0)
    if outside:
        yield f"outside torch: {size(max(outside))} at most a rank (contexts, communicators, raw cudaMalloc)"
    if idle:
        yield f"reserved and not live: {size(idle)} at most a rank (fragments, private pools)"


def _series(settled: Sequence[Sequence[int]]) -> Iterator[str]:
    """Aligned rows of settled bytes: one where all ranks say the same; where they differ a row a rank, so that each can
    be found by its number, or in a large world one for all that say the same.
    """
    told = {rank: tuple(values) for rank, values in enumerate(settled) if values}
    if not told:
        return
    alike: dict[tuple[int, ...], list[int]] = {}
    for rank, values in told.items():
        alike.setdefault(values, []).append(rank)
    rows = [(who, values) for values, who in alike.items()]
    if len(alike) > 1 and len(told) <= _ROWS:
        rows = [([rank], values) for rank, values in told.items()]
    unit, factor, digits = _unit(settled)
    labels = [ranks(who) for who, _ in rows]
    margin = max(len(label) for label in labels) + 2
    cells = [[f"{value / factor:.{digits}f}" for value in values] for _, values in rows]
    wide = max(len(cell) for row in cells for cell in row) + 2
    room = max(3, (_WIDTH - margin) // wide)
    yield f"  settled {unit} at the ends of the cycles"
    for label, row in zip(labels, cells, strict=True):
        head = (room - 1) // 2
        shown = row if len(row) <= room else [*row[:head], "..", *row[head + 1 - room :]]
        yield f"  {label:<{margin - 2}}" + "".join(f"{cell:>{wide}}" for cell in shown)


def _unit(settled: Sequence[Sequence[int]]) -> tuple[str, int, int]:
    """The largest unit, and the fewest digits after its point, in which every value is exact to the byte."""
    values = [value for row in settled for value in row if value]
    for unit, factor in _UNITS:
        for digits in range(3):
            if values and all(value * 10**digits % factor == 0 for value in values):
                return unit, factor, digits
    return "B", 1, 0


def _site(site: SiteVerdict, verdict: Verdict) -> Iterator[str]:
    world = _traced(verdict)
    blocks = f" in {site.blocks_per_cycle:g} blocks" if site.blocks_per_cycle > 1 else ""
    where = f", {ranks(site.ranks)}" if len(site.ranks) < world else ""
    yield f"  +{size(site.bytes_per_cycle)} a cycle{blocks}{where}: {site.site}"
    yield from (f"      from  {line}" for line in site.stack[1 : 1 + _CALLERS])
    for chain in site.held_by:
        if not chain.startswith(_NO_HOLDER):
            yield from _chain("    held by  ", chain)
    yield from _wrapped(f"{_because(site)} ({site.mechanism})", "    because  ", "             ")


def _because(site: SiteVerdict) -> str:
    """Why the blocks stay; where the search for who keeps them did not come to an end, that."""
    searched = [chain for chain in site.held_by if chain.startswith(_SEARCH)]
    return searched[0] if searched and site.mechanism == "unknown" else _BECAUSE[site.mechanism]


def _chain(head: str, chain: str) -> Iterator[str]:
    """A chain of holders, broken between its links only."""
    line = head
    for number, link in enumerate(chain.split(" -> ")):
        piece = link if number == 0 else f" -> {link}"
        if number and len(line) + len(piece) > _WIDTH:
            yield line
            line = " " * len(head) + "->" + piece[3:]
        else:
            line += piece
    yield line


def _fault(fault: IpcFault) -> Iterator[str]:
    yield from _wrapped(fault_line(fault), "  ", "      ")
    yield from (f"      opened at {site}" for site in fault.open_sites[:_CALLERS])


def _next(verdict: Verdict) -> Iterator[str]:
    if verdict.verdict == "leak":
        mechanism: Mechanism = verdict.sites[0].mechanism if verdict.sites else "unknown"
        yield from _wrapped(f"next: {_NEXT[mechanism]}", "  ", "        ")
    elif any(verdict.cyclic_bytes):
        yield from _wrapped("next: break the cycle (a weakref, or no bound method kept in its own object).", "  ")
    elif any(verdict.late_bytes):
        yield from _wrapped("next: synchronize, meet at a barrier, then call torch.cuda.ipc_collect().", "  ")


def _wrapped(text: str, first: str, then: str | None = None) -> Iterable[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=first if then is None else then,
        break_long_words=False,
        break_on_hyphens=False,
    )

"""Trace -> Verdict: what leaks, what only fills, what comes back with help. Pure: records in, a record out.

The rule by examples, settled bytes at the ends of the judged cycles, in MiB:

- `[8, 8, 8]` flat. `[4, 8, 8, 8]` flat after one warm-up cycle. `[8, 9, 7, 8]` flat: what comes and goes is no growth.
- `[8, 9, 10, 11]` leak of 1 a cycle. Rank 0 `[8, 8, 8]`, rank 3 `[8, 9, 10]`: leak, on rank 3.
- `[8, 9, 10, 10, 10]` filling: grew, then stood still. `[8, 8, 9]` filling too: grew, not proven to go on.
- `[8, 9, 9, 10, 10, 11]` leak of 1/2: every value is above that of two cycles before, by the same amount.
- `[8, 9]` after a warm-up that ended with 7: leak; after one that ended with 8, or after none: filling.
- `[8, 8, 8]` where one site gains 1 in every cycle and others lose it: leak, compensated.

Where a census says in which cycle live blocks were born, growth alone accuses nobody: a leak keeps blocks born in
every judged cycle, while a full LRU cache or a backlog keeps only the newest; and its blocks become more, unless it is
one block that a larger one replaces, by as much each cycle. So a site is acquitted as soon as one judged cycle has no
survivor. A block that the IPC ledger knows to be lost for good needs no growth to show it. What no rule can tell from a
leak in the cycles it saw: a cache that fills through all of them, by however little (`benchmarks/programs.py` says what
is called clean). Few cycles see that often, so a leak out of few says how many there were.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from fractions import Fraction
from itertools import pairwise
from math import ceil

from . import words
from .audit import broken, summary
from .holders import is_holder, pattern
from .records import (
    FaultKind,
    IpcSummary,
    LiveBlocks,
    Mechanism,
    Open,
    RankTrace,
    SiteVerdict,
    SlowStep,
    Trace,
    Verdict,
    VerdictWord,
)

__all__ = [
    "CyclicMemoryWarning",
    "IpcContractWarning",
    "LateReleaseWarning",
    "LeakError",
    "UnjudgedTraceWarning",
    "judge",
    "leaking_stacks",
    "settled",
]

Stack = tuple[str, ...]
_FEWEST = 3  # cycles that can show a leak: one rise is a first use as well
_STALL = 3  # cycles without growth before "filling" is believed: a leak of every third cycle would have grown again
_FEW = 6  # cycles below which many a cache is still filling in each of them
_LONG = 8  # cycles after which turnover shows: what is still kept from all of them is not the newest
_IPC_MECHANISMS: Mapping[FaultKind, Mechanism] = {
    "over-released": "ipc-over-released",
    "dead-peer": "ipc-dead-peer",
    "never-opened": "ipc-never-opened",
    "still-open": "ipc-held-by-peer",
}
_UNIT = 512  # the allocator's rounding, bytes


class LeakError(AssertionError):
    """Live bytes stay behind, cycle after cycle. `.verdict` has everything that the message says."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(words.verdict_message(verdict))
        self.verdict = verdict

    def __reduce__(self) -> tuple[type[LeakError], tuple[Verdict]]:
        return LeakError, (self.verdict,)


class CyclicMemoryWarning(UserWarning):
    """Device memory lies in reference cycles: it comes back only when the cyclic collector happens to run."""


class LateReleaseWarning(UserWarning):
    """Device memory comes back only when somebody calls `torch.cuda.ipc_collect()`."""


class UnjudgedTraceWarning(UserWarning):
    """A test passed and nobody had looked at a trace that it made: so it would have, whatever leaks in that."""


class IpcContractWarning(UserWarning):
    """The CUDA IPC contract was broken, or a handle is still out, at the end of a test."""


def judge(trace: Trace, *, tolerance: int = 0, ignore_sites: Sequence[str] = ()) -> Verdict:
    """The verdict on `trace`. `tolerance`: bytes a cycle and rank that may stay; one more is a leak.

    `ignore_sites`: patterns (as in fnmatch, or plain parts of a line) of stack lines; blocks with such a line do not
    count, and the verdict's note says how many bytes a cycle that hid. Raises ValueError for a negative tolerance.
    """
    if isinstance(tolerance, bool) or not isinstance(tolerance, int) or tolerance < 0:
        raise ValueError(f"tolerance is a number of bytes a cycle, 0 or more (got {tolerance!r})")
    found = [_of_rank(rank, trace.warmup, tolerance, tuple(ignore_sites)) for rank in trace.ranks]
    sites = _sites(found, trace)
    rows = _rows(trace)
    traced = [None if at is None else trace.ranks[at] for at in rows]
    judged = [None if at is None else found[at] for at in rows]
    return Verdict(
        verdict=_word(found),
        bytes_per_cycle=tuple(one.bytes_per_cycle if one else 0 for one in judged),
        settled=tuple(one.settled if one else () for one in judged),
        series=tuple(rank.series if rank else () for rank in traced),
        cyclic_bytes=tuple(one.cyclic if one else 0 for one in judged),
        late_bytes=tuple(one.late if one else 0 for one in judged),
        tolerance=tolerance,
        cycles=trace.cycles,
        warmup=trace.warmup,
        outputs_digest=tuple(_digest(rank.digests) if rank else "" for rank in traced),
        sites=sites + _outside_site(trace),
        ipc=_ipc(trace),
        geometries=trace.geometries,
        outside_bytes=tuple(r.ends[-1].after_gc.outside if r else None for r in traced) if trace.cycles else (),
        reserved_bytes=tuple(_idle(rank) if rank else 0 for rank in traced) if trace.cycles else (),
        note=_note(found, sites, trace, tolerance),
        slowest=_slowest(trace),
    )


def settled(rank_trace: RankTrace, warmup: int, least: int) -> bool:
    """Whether another cycle could not make this rank a leak that it is not yet shown to be.

    False while any site may still prove to leak; a leak itself is never settled early, because a cache that fills looks
    the same until it is full.
    """
    if len(rank_trace.ends) - warmup < max(least, _FEWEST):
        return False
    books = _books(rank_trace, warmup, ())
    return not any(_may_leak(group) for group in (books.total, *books.stacks.values(), *books.sites.values()))


def leaking_stacks(rank_trace: RankTrace, warmup: int) -> tuple[Stack, ...]:
    """The allocation stacks that leak in this rank, worst first; `((),)` where it leaks and no stack is to blame."""
    found = _of_rank(rank_trace, warmup, 0, ())
    return tuple(one.stack for one in sorted(found.leaks, key=lambda one: -one.rate))


# One group of blocks over the judged cycles: all of a rank, all of a line, all of a stack.


@dataclass(slots=True)
class _Group:
    """`bytes`, `blocks`: at the end of each judged cycle. `survivors`: bytes of the last census by the judged cycle of
    their birth, and `early` those born in the warm-up. `turned_over`: a block that had outlived the cycle after its
    birth's died later. None: not known.
    """

    bytes: list[int]
    blocks: list[int] | None = None
    survivors: list[int] | None = None
    early: list[int] = field(default_factory=list)
    turned_over: bool = False


@dataclass(slots=True)
class _Books:
    total: _Group
    stacks: dict[Stack, _Group]
    sites: dict[str, _Group]
    ignored: dict[Stack, _Group]


@dataclass(slots=True)
class _Leak:
    stack: Stack
    rate: Fraction
    block_rate: Fraction


@dataclass(slots=True)
class _RankFinding:
    rank: int
    settled: tuple[int, ...]
    word: VerdictWord
    bytes_per_cycle: int
    leaks: list[_Leak]
    cyclic: int
    late: int
    tolerated: Fraction
    ignored: Fraction
    compensated: bool
    still_growing: bool


def _books(rank: RankTrace, warmup: int, ignore: Sequence[str]) -> _Books:
    """The groups of one rank. Blocks that `ignore` hides are in no group but their own."""
    ends = rank.ends[warmup:]
    by_stack: dict[Stack, list[list[LiveBlocks]]] = {}
    for index, end in enumerate(ends):
        for entry in end.census:
            by_stack.setdefault(entry.stack, [[] for _ in ends])[index].append(entry)
    hidden = {stack for stack in by_stack if _matches(stack, ignore)}
    groups = {stack: _group(cycles, warmup) for stack, cycles in by_stack.items()}
    by_site: dict[str, list[Stack]] = {}
    for stack in by_stack:
        if stack not in hidden:
            by_site.setdefault(stack[0] if stack else "", []).append(stack)
    sites = {
        site: _group([[entry for s in stacks for entry in by_stack[s][i]] for i in range(len(ends))], warmup)
        for site, stacks in by_site.items()
        if len(stacks) > 1
    }
    ignored = {stack: groups[stack] for stack in hidden}
    return _Books(
        _total(rank, warmup, ignored.values(), groups),
        {stack: group for stack, group in groups.items() if stack not in hidden},
        sites,
        ignored,
    )


def _group(cycles: Sequence[Sequence[LiveBlocks]], warmup: int) -> _Group:
    births: list[dict[int, int]] = []
    for entries in cycles:
        born: dict[int, int] = {}
        for entry in entries:
            born[entry.born] = born.get(entry.born, 0) + entry.bytes
        births.append(born)
    turned_over = any(
        after.get(born, 0) < size
        for index, (before, after) in enumerate(pairwise(births))
        for born, size in before.items()
        if born < index + warmup
    )
    last = births[-1] if births else {}
    return _Group(
        [sum(born.values()) for born in births],
        [sum(entry.blocks for entry in entries) for entries in cycles],
        [last.get(warmup + index, 0) for index in range(len(cycles))],
        [last.get(index, 0) for index in range(warmup)],
        turned_over,
    )


def _total(rank: RankTrace, warmup: int, ignored: Iterable[_Group], groups: dict[Stack, _Group]) -> _Group:
    """All blocks of a rank: by the census where it saw every block, because a block's own size varies with the cached
    block that was reused; by the readings where it did not.
    """
    ends = rank.ends[warmup:]
    ignored = list(ignored)
    counted = [sum(entry.blocks for entry in end.census) for end in ends]
    complete = bool(groups) and all(n == end.after_gc.blocks for n, end in zip(counted, ends, strict=True))
    size = [sum(e.bytes for e in end.census) if complete else end.after_gc.live for end in ends]
    blocks = [end.after_gc.blocks for end in ends]
    size = [n - sum(group.bytes[i] for group in ignored) for i, n in enumerate(size)]
    if not any(blocks):
        return _Group(size)
    blocks = [n - sum(group.blocks[i] for group in ignored if group.blocks) for i, n in enumerate(blocks)]
    if not complete:
        return _Group(size, blocks)
    kept = [g for g in groups.values() if not any(g is other for other in ignored)]
    survivors = [sum(group.survivors[i] for group in kept if group.survivors) for i in range(len(ends))]
    early = [sum(group.early[i] for group in kept) for i in range(warmup)]
    return _Group(size, blocks, survivors, early, any(group.turned_over for group in kept))


def _growth(group: _Group) -> tuple[Fraction, Fraction] | None:
    """Bytes and blocks a cycle that the group leaks; None where it is not shown to leak."""
    count = len(group.bytes)
    for lag in range(1, (count - 1) // 2 + 1):
        if _grows(group, lag):
            first = (count - 1) % lag
            span = count - 1 - first
            blocks = group.blocks or [0] * count
            return Fraction(group.bytes[-1] - group.bytes[first], span), Fraction(blocks[-1] - blocks[first], span)
    return None


def _grows(group: _Group, lag: int) -> bool:
    """Whether every value is above the one `lag` cycles before it, in the way of a leak.

    A lag of one allows any step upwards (a leak of every fifth step of eight adds one block or two a cycle); a longer
    one asks for the same step each time, which is what tells a leak of every k-th cycle from a cache that fills ever
    more slowly.
    """
    steps = _lagged(group.bytes, lag)
    if not steps or min(steps) <= 0:
        return False
    if lag > 1 and (len(set(steps)) > 1 or (lag > 3 and sum(step > 0 for step in _lagged(group.bytes, 1)) < 3)):
        return False
    if group.blocks is None:
        return True
    added = _lagged(group.blocks, lag)
    if min(added) > 0 and (lag == 1 or len(set(added)) == 1):
        return group.survivors is None or (_kept_from_all(group.survivors, lag) and _began_alike(group, lag))
    return not any(added) and _replaced_by_larger(group, steps)


def _kept_from_all(survivors: Sequence[int], lag: int) -> bool:
    return all(any(survivors[at : at + lag]) for at in range(len(survivors) - lag + 1))


def _began_alike(group: _Group, lag: int) -> bool:
    """Whether the warm-up left no more than the cycle `lag` later did: a cache fills fastest when it is empty."""
    kept = [*group.early, *(group.survivors or ())]
    return lag == 1 or all(kept[at] <= kept[at + lag] for at in range(len(group.early)))


def _replaced_by_larger(group: _Group, steps: Sequence[int]) -> bool:
    """As many blocks, more bytes, by about as much each cycle, and no old block of the judged cycles is left.

    Where several blocks are replaced in turn, some are older than a cycle: a long look allows that.
    """
    count = len(group.bytes)
    old = count // 2 if count >= _LONG else count - 1
    return _even(steps) and (group.survivors is None or not any(group.survivors[:old]))


def _even(steps: Sequence[int]) -> bool:
    return min(steps) > 0 and max(steps) <= 2 * min(steps) + 2 * _UNIT


def _lagged(values: Sequence[int], lag: int) -> list[int]:
    return [later - earlier for earlier, later in zip(values, values[lag:], strict=False)]


def _may_leak(group: _Group) -> bool:
    """Whether more cycles could show that this group leaks, given what these have shown."""
    if _growth(group) is not None:
        return True
    replaced = group.blocks is not None and len(set(group.blocks)) == 1 and _even(_lagged(group.bytes, 1))
    if replaced and len(group.bytes) < _LONG:
        return True
    if group.turned_over or not group.bytes or group.bytes[-1] <= group.bytes[0]:
        return False
    rises = [at for at, step in enumerate(_lagged(group.bytes, 1)) if step > 0]
    return len(group.bytes) - 2 - rises[-1] < _STALL


def _of_rank(rank: RankTrace, warmup: int, tolerance: int, ignore: Sequence[str]) -> _RankFinding:
    # Two judged cycles show one rise; where they follow a warm-up, its end is the third value.
    books = _books(rank, warmup - 1 if warmup and len(rank.ends) - warmup == _FEWEST - 1 else warmup, ignore)
    total = _growth(books.total)
    leaks = _leaks(books, compensated=total is None)
    leaks += _lost_for_good(rank, warmup, ignore, {leak.stack[:1] for leak in leaks})
    summed = sum((leak.rate for leak in leaks), Fraction(0))
    rate = max(summed, total[0]) if total else summed
    if total and not leaks:
        leaks = _suspects(books) or [_Leak((), *total)]
    leaking = rate > tolerance
    ends = rank.ends[warmup:]
    counted = books.total.bytes[-len(ends) :] if ends else []
    cyclic = _recurring([end.after_ipc.live - end.after_gc.live for end in ends])
    late = _recurring([end.as_is.live - end.after_ipc.live for end in ends])
    return _RankFinding(
        rank=rank.rank,
        settled=tuple(end.after_gc.live for end in ends),
        word="leak" if leaking else _word_without_leak(counted, cyclic, late),
        bytes_per_cycle=ceil(rate) if leaking else 0,
        leaks=leaks if leaking else [],
        cyclic=cyclic,
        late=late,
        tolerated=Fraction(0) if leaking else rate,
        ignored=sum((found[0] for g in books.ignored.values() if (found := _growth(g))), Fraction(0)),
        compensated=leaking and total is None,
        still_growing=not leaking and _still_growing(counted),
    )


def _leaks(books: _Books, *, compensated: bool) -> list[_Leak]:
    """The stacks that leak; a line whose stacks only leak together counts once, under its largest stack."""
    leaks = [_Leak(stack, *found) for stack, g in books.stacks.items() if (found := _accused(g, compensated))]
    lines = {leak.stack[:1] for leak in leaks}
    for site, group in books.sites.items():
        found = _accused(group, compensated)
        if found and (site,) not in lines:
            stacks = [stack for stack in books.stacks if stack[:1] == (site,)]
            if stacks:
                leaks.append(_Leak(max(stacks, key=lambda s: _gained(books.stacks[s])), *found))
    return leaks


def _lost_for_good(rank: RankTrace, warmup: int, ignore: Sequence[str], named: Iterable[Stack]) -> list[_Leak]:
    """Lines (but those in `named`) whose blocks IPC lost in at least two judged cycles, however unevenly.

    A dropped block whose counter is below zero never comes back, so no growth has to show it. Whether a drop meets the
    counter below zero or at exactly zero is a race: such a leak skips cycles.
    """
    steps = max(1, len(rank.series) // max(1, len(rank.ends)))
    count = len(rank.ends) - warmup
    lost: dict[Stack, dict[object, tuple[int, int]]] = {}
    for number, export in enumerate(rank.exports):
        gone = export.dropped and not export.freed and export.counter is not None and export.counter < 0
        if gone and export.allocated and export.step >= warmup * steps and not _matches(export.allocated, ignore):
            block = export.block if export.block >= 0 else (number,)
            lost.setdefault(export.allocated, {})[block] = export.bytes, export.step // steps
    return [
        _Leak(stack, Fraction(sum(size for size, _ in blocks.values()), count), Fraction(len(blocks), count))
        for stack, blocks in lost.items()
        if stack[:1] not in named and len({cycle for _, cycle in blocks.values()}) > 1
    ]


def _accused(group: _Group, compensated: bool) -> tuple[Fraction, Fraction] | None:
    """The group's growth, if it may be called a leak: where the rank as a whole does not grow, a site that turns its
    blocks over needs a long look, because in a full cache one line gains for a while what another loses.
    """
    if compensated and group.turned_over and len(group.bytes) < _LONG:
        return None
    return _growth(group)


def _suspects(books: _Books) -> list[_Leak]:
    """Where a rank leaks and no single stack does: the stacks that gained, the most first."""
    span = max(1, len(books.total.bytes) - 1)
    gains = [
        _Leak(stack, Fraction(gain, span), Fraction(_gained_blocks(group), span))
        for stack, group in books.stacks.items()
        if (gain := _gained(group)) > 0
    ]
    return sorted(gains, key=lambda leak: -leak.rate)


def _gained(group: _Group) -> int:
    return group.bytes[-1] - group.bytes[0]


def _gained_blocks(group: _Group) -> int:
    return group.blocks[-1] - group.blocks[0] if group.blocks else 0


def _recurring(values: Sequence[int]) -> int:
    """Bytes a cycle that came back only with help: 0 where that happened in one of several cycles only."""
    helped = [value for value in values if value > 0]
    return sum(helped) // len(values) if len(helped) >= min(2, max(1, len(values))) else 0


def _word_without_leak(values: Sequence[int], cyclic: int, late: int) -> VerdictWord:
    if _filled(values):
        return "filling"
    if cyclic > 0:
        return "cyclic"
    return "late" if late > 0 else "flat"


def _filled(values: Sequence[int]) -> bool:
    """Whether the series ends above where it began, and never was higher: what comes and goes is no filling."""
    return bool(values) and values[0] < values[-1] == max(values)


def _still_growing(values: Sequence[int]) -> bool:
    return len(values) > 1 and _filled(values) and values[-1] > values[-2]


def _matches(stack: Stack, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(line, pattern) or pattern in line for line in stack for pattern in patterns)


# The world's verdict, out of its ranks'.

_ORDER: tuple[VerdictWord, ...] = ("leak", "filling", "cyclic", "late", "flat")


def _rows(trace: Trace) -> list[int | None]:
    """For each number of a rank, up to the last, where in the trace that rank is; None for one that was not traced."""
    at = {rank.rank: place for place, rank in enumerate(trace.ranks)}
    if len(at) < len(trace.ranks):  # a trace made by hand, without numbers
        return list(range(len(trace.ranks)))
    return [at.get(number) for number in range(max((*at, *trace.dead), default=-1) + 1)]


def _word(found: Sequence[_RankFinding]) -> VerdictWord:
    return min((one.word for one in found), key=_ORDER.index)


def _sites(found: Sequence[_RankFinding], trace: Trace) -> tuple[SiteVerdict, ...]:
    merged: dict[str, list[tuple[_RankFinding, _Leak]]] = {}
    for one in found:
        for leak in one.leaks:
            merged.setdefault(leak.stack[0] if leak.stack else "unknown", []).append((one, leak))
    sites = [_site(site, entries, trace) for site, entries in merged.items()]
    return tuple(sorted(sites, key=lambda site: -site.bytes_per_cycle * len(site.ranks)))


def _site(site: str, entries: Sequence[tuple[_RankFinding, _Leak]], trace: Trace) -> SiteVerdict:
    by_rank: dict[int, list[_Leak]] = {}
    for one, leak in entries:
        by_rank.setdefault(one.rank, []).append(leak)
    worst = max(by_rank.values(), key=lambda leaks: sum(leak.rate for leak in leaks))
    largest = max(worst, key=lambda leak: leak.rate)
    records = [rank for rank in trace.ranks if rank.rank in by_rank]
    held: dict[str, str] = {}
    for rank in records:
        for chain in rank.held_by.get(site, ()):
            held.setdefault(pattern(chain), chain)
    return SiteVerdict(
        site=site,
        stack=largest.stack,
        bytes_per_cycle=ceil(sum(leak.rate for leak in worst)),
        blocks_per_cycle=round(float(sum(leak.block_rate for leak in worst)), 3),
        ranks=tuple(sorted(by_rank)),
        held_by=tuple(held.values()),
        mechanism=_mechanism(site, records, trace, tuple(held.values())),
    )


def _mechanism(site: str, records: Sequence[RankTrace], trace: Trace, held: Sequence[str]) -> Mechanism:
    """Why the site's blocks stay: what the ledgers know of them first, then what Python knows."""
    lost = [e for rank in records for e in rank.exports if not e.freed and e.allocated[:1] == (site,)]
    if lost:
        opens: dict[tuple[str, int], list[Open]] = {}
        for rank in trace.ranks:
            for one in rank.opens:
                opens.setdefault((one.counter_file, one.slot), []).append(one)
        dead = frozenset(trace.dead)
        kinds = [broken(e, opens.get((e.counter_file, e.slot), ()), dead) for e in lost]
        for kind, mechanism in _IPC_MECHANISMS.items():
            if kind in kinds:
                return mechanism
    return "retained" if any(map(is_holder, held)) else "unknown"


def _outside_site(trace: Trace) -> tuple[SiteVerdict, ...]:
    """What grows in every judged cycle outside torch's allocator: said beside the verdict, never part of it."""
    grown = {rank.rank: rate for rank in trace.ranks if (rate := _outside_growth(rank, trace.warmup))}
    if not grown:
        return ()
    most = max(grown.values())
    return (SiteVerdict("outside torch", (), round(most), 0.0, tuple(sorted(grown)), (), "outside-torch"),)


def _outside_growth(rank: RankTrace, warmup: int) -> Fraction | None:
    values = [end.after_gc.outside for end in rank.ends[warmup:]]
    known = [value for value in values if value is not None]
    if len(known) < max(3, len(values)):
        return None
    found = _growth(_Group(known)) if min(_lagged(known, 1)) > 0 else None
    return found[0] if found else None


def _ipc(trace: Trace) -> IpcSummary:
    exports = [export for rank in trace.ranks for export in rank.exports]
    opens = [one for rank in trace.ranks for one in rank.opens]
    if not exports and not opens:
        return IpcSummary()
    return summary(exports, opens, dead=trace.dead)


def _idle(rank: RankTrace) -> int:
    end = rank.ends[-1].after_gc
    return max(0, end.reserved - end.live)


def _digest(digests: Sequence[str]) -> str:
    return hashlib.blake2b("".join(digests).encode(), digest_size=16).hexdigest() if digests else ""


def _slowest(trace: Trace) -> SlowStep | None:
    steps = [SlowStep(r.rank, step, s) for r in trace.ranks for step, s in enumerate(r.seconds)]
    return max(steps, key=lambda one: one.seconds, default=None)


def _note(found: Sequence[_RankFinding], sites: Sequence[SiteVerdict], trace: Trace, tolerance: int) -> str:
    said = []
    if any(one.compensated for one in found):
        which = words.ranks([one.rank for one in found if one.compensated])
        said.append(f"compensated: on {which} other sites lose what this one gains, the total does not show it")
    if any(one.tolerated for one in found):
        most = max(one.tolerated for one in found)
        said.append(f"within the tolerance: {words.size(round(most))} a cycle of {words.size(tolerance)}")
    if any(one.ignored for one in found):
        said.append(f"hidden by ignored sites: {words.size(round(max(one.ignored for one in found)))} a cycle")
    if any(one.still_growing for one in found):
        said.append("still growing in the last cycle, not in the way of a leak: trace more cycles to be sure")
    retained = [site for site in sites if not site.mechanism.startswith("ipc-")]
    if retained and trace.cycles < _FEW:  # what IPC lost is lost; what is kept may be kept by a cache
        said.append(
            f"only {trace.cycles} cycles were run, and a cache that is still filling looks the same: "
            "cycles=(3, 12) tells them apart"
        )
    if trace.cycles < _FEWEST:
        said.append(f"too few cycles to tell a leak from a first use: trace at least {_FEWEST}")
    return "; ".join(said)

"""GC-tracked objects: what appends leave behind, who keeps it, and what a full collection then costs.

`GcTracked` is what the fixture `gc_tracked` gives a test. It counts live plus frozen objects, runs appends by
`appends.py`, judges by the rule of `windows.py`, names the holders by `roots.py`, times collections by `pauses.py`. The
collector's settings are afterwards as they were. It imports neither torch nor pytest.

What it does not see: memory outside the collector's care, beyond the bytes that tracemalloc counts. What another thread
makes while appends run counts as theirs. Log records of measured stretches are not in pytest's `caplog` and report,
which would keep them (`capture.py`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence

from . import heap, roots, windows
from .appends import Append, Appends, Caller, traced
from .cancelling import CancelAtEachAwait
from .capture import log_capture_resting
from .pauses import FullPause, Pauses, Stall, event_loop_stall, full_pause
from .records import Growth

_RATE, _KEPT = 1000, 300  # requests/s and seconds: the production that a message speaks of
_REAL_NS = (360, 550)  # ns an object that full collections of real servers were seen to cost
_METHOD = "builtins.method"
_TRACED = 2000  # appends: tracing costs a microsecond an allocation, so beyond them bytes must be asked for
_TRIES = 8  # appends pinned at one await, to see whether that one leaks
_PASSES = 2  # full collections, of which the quickest counts, where a pause is compared with another
_ONE_OFFS = 8  # objects a window: fewer beside a container that fills are no leak yet
_PARTS = 0.02  # of what filled a container that then replaced entries: what those held is estimated by the new ones
_BLOCKS = 10  # timings of each side that assert_no_worse interleaves, so that the machine's moods strike both


class GrowthError(AssertionError):
    """Appends leave more behind than was allowed. `growth`: what was measured (`records.Growth`)."""

    def __init__(self, growth: Growth, message: str) -> None:
        super().__init__(message)
        self.growth = growth


class Grown:
    """What a `with` block leaves: `objects` (live plus frozen; negative where more went than came) and `by_type` (what
    changed). Zero and empty until the block has ended. What the block logs is not in `caplog`.
    """

    def __init__(self, ignored: Sequence[str] = ()) -> None:
        self.objects = 0
        self.by_type: dict[str, int] = {}
        self._ignored = ignored
        self._before: dict[str, int] = {}
        self._after: dict[str, int] = {}
        self._froze = heap.application_froze()
        self._settings = heap.settings_kept()
        self._resting = log_capture_resting()

    def __enter__(self) -> Grown:
        self._settings.__enter__()
        self._resting.__enter__()
        heap.settle()
        self._before.update(heap.by_type())
        self._before[_METHOD] = self._before.get(_METHOD, 0) - heap.bound_to(self)
        self.objects = heap.comparable(self._ignored) - heap.bound_to(self)
        return self

    def __exit__(self, *raised: object) -> None:
        if heap.application_froze() and not self._froze:
            heap.unfreeze()  # what the block froze would show no types
        heap.settle()
        self.objects = heap.comparable(self._ignored) - heap.bound_to(self) - self.objects
        self._after.update(heap.by_type())
        self._after[_METHOD] = self._after.get(_METHOD, 0) - heap.bound_to(self)
        self._resting.__exit__(None, None, None)
        self._settings.__exit__(None, None, None)
        self._say()

    def _say(self) -> None:
        changes = {name: after - before for name, (before, after) in _lined_up((self._before, self._after)).items()}
        self.by_type = {name: round(n) for name, n in _shown(changes, self._ignored).items()}


class GcTracked:
    """The fixture's methods. `record` is told of every `Growth` that was judged.

    `ignore_types`: patterns (fnmatch) of type names that do not count; a growth's note says how many they hid.
    """

    def __init__(
        self,
        record: Callable[[Growth], None],
        *,
        ignore_types: Sequence[str] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._record = record
        self._ignored = tuple(ignore_types)
        self._clock = clock
        heap.by_type()  # its first use fills caches of abstract classes, which are objects
        self._first = FullPause(heap.settle(clock, passes=_PASSES), heap.walked())

    def count(self) -> int:
        """Objects in the collector's care now, live plus frozen. Collects nothing."""
        return heap.tracked()

    def growth(self) -> Grown:
        """`with gc_tracked.growth() as grown: ...`, then `grown.objects` and `grown.by_type`."""
        return Grown(self._ignored)

    def assert_flat(
        self, append: Append, *, times: int = 1000, per_append: float = 0, max_bytes_per_append: float | None = None
    ) -> Growth:
        """Fail with `GrowthError` where an append leaves more than `per_append` tracked objects.

        `append(i)` is called `times` times in two windows, after a warm-up of a tenth as many; it may be a coroutine
        function. `max_bytes_per_append` bounds the bytes that an append leaves, too; without it they are said up to
        2,000 appends. What appends log is not in `caplog`: it would keep each record. Raises ValueError for
        numbers that say nothing.
        """
        _check(times, per_append, max_bytes_per_append)
        trace = max_bytes_per_append is not None or times <= _TRACED
        growth, walked = self._judge(append, times, per_append, max_bytes_per_append, trace)
        return self._verdict(growth, lambda: growth_message(growth, walked, max_bytes_per_append))

    def cancel_at_each_await(self, request: Callable[[int], Coroutine[object, object, object]]) -> CancelAtEachAwait:
        """An append for `assert_flat`: runs `request(i)` and cancels it at its first await, at the next call at its
        second, and so on; past the last one it lets it end, and begins again. A failure names the awaits that leak.
        """
        return CancelAtEachAwait(request)

    def pauses(self) -> Pauses:
        """`with gc_tracked.pauses() as pauses: ...`, then `pauses.collections`: generation, seconds, collected, tracked
        of each collection that happened meanwhile.
        """
        return Pauses(self._clock)

    def assert_pause(self, max_ms: float | None = None, *, max_growth: float | None = None) -> Growth:
        """Fail with `GrowthError` where a full collection, made now, takes more than `max_ms` milliseconds, or more
        than `max_growth` times what it took when the test began.

        `max_growth` does not hang on the machine's speed: let the history grow N-fold, and allow less than N.
        """
        if max_ms is None and max_growth is None:
            raise ValueError("assert_pause needs max_ms (milliseconds), max_growth (a factor), or both")
        first, now = self._first, full_pause(self._clock)
        took, factor = now.seconds * 1e3, now.seconds / first.seconds if first.seconds else 1.0
        said = []
        if max_ms is not None and took > max_ms:
            said.append(f"{took:.1f} ms is more than max_ms={max_ms:g}")
        if max_growth is not None and factor > max_growth:
            begun = f"{first.seconds * 1e3:.1f} ms when the test began"
            said.append(f"{factor:.2f} times the {begun} is more than max_growth={max_growth:g}")
        pauses = {"before": first.seconds * 1e3, "after": took}
        growth = Growth("growing" if said else "flat", 0.0, {}, pause_ms=pauses, note="; ".join(said))
        about = f"{now.walked:,} objects walked ({first.walked:,} then), {now.ns_per_object:.0f} ns each"
        return self._verdict(growth, lambda: f"a full collection takes too long: {growth.note}\n  {about}")

    def event_loop_stall(
        self, append: Append, *, rate: float = _RATE, retention: float = _KEPT, turns: int = 2000
    ) -> Stall:
        """What an asyncio loop sees while a history lives: p50, p99 and worst lateness of its turns.

        The history is that of `rate` requests/s kept for `retention` seconds: `rate * retention` appends are made
        first, then `turns` turns of the loop with one append each, one of which meets a full collection.
        """
        if not (rate * retention >= 1 and turns >= 1):
            raise ValueError(f"rate * retention and turns must be >= 1 (got {rate!r} * {retention!r}, {turns!r})")
        with heap.settings_kept(), log_capture_resting():
            return event_loop_stall(append, alive=int(rate * retention), turns=turns, clock=self._clock)

    def assert_no_worse(
        self, candidate: Append, reference: Append, *, times: int = 1000, within: float = 1.5
    ) -> tuple[Growth, Growth]:
        """Fail with `GrowthError` where the candidate leaves more than the reference: tracked objects (exactly), bytes
        or time of an append or of a full collection (more than `within` times). Returns both growths. What appends log
        is not in `caplog`.
        """
        _check(times, 0, None)
        theirs, _ = self._judge(reference, times, 0, None, trace=True, passes=_PASSES)
        ours, _ = self._judge(candidate, times, 0, None, trace=True, passes=_PASSES)
        seconds = self._seconds(candidate, reference, times)
        worse = list(_worse(ours, theirs, seconds, within))
        growth = dataclasses.replace(ours, verdict="growing" if worse else "flat", note="; ".join(worse))
        lines = ["worse than the reference:", *(f"  {line}" for line in worse), *_held(ours)]
        return self._verdict(growth, lambda: "\n".join(lines)), theirs

    def _verdict(self, growth: Growth, message: Callable[[], str]) -> Growth:
        self._record(growth)
        if growth.verdict == "growing":
            raise GrowthError(growth, message())
        return growth

    def _judge(
        self, append: Append, times: int, per_append: float, max_bytes: float | None, trace: bool, passes: int = 1
    ) -> tuple[Growth, int]:
        """The growth, and how many objects the last full collection walked. `trace`: count bytes."""
        run = Appends(times, self._clock, self._ignored, passes=passes)
        caller = Caller(append)
        with heap.settings_kept(), log_capture_resting(), traced(trace), caller as call:
            run.run(call)
            first, second = run.windows
            objects = windows.rate(first.objects(), second.objects(), per_append)
            held_by: tuple[str, ...] = ()
            changes = run.by_type()
            shown = changes
            if objects.growing:
                try:
                    objects, held_by, shown = self._looked_into(objects, run, per_append, append, caller.loop)
                except Exception as error:  # whatever the objects do as they are looked at: the verdict has fallen
                    held_by = (f"what is not found: {error!r}",)
            made = roots.futures(run.new) if objects.growing else ""
            leaks = self._awaits(append, call, run.end) if objects.growing else ""
        sizes = windows.rate(first.bytes(), second.bytes(), max_bytes or 0)
        growth = Growth(
            "growing" if objects.growing or (max_bytes is not None and sizes.growing) else "flat",
            objects.per_append,
            _shown(shown, self._ignored) if objects.per_append else {},
            held_by,
            {"before": run.pause_before * 1e3, "after": run.pause_after * 1e3},
            times,
            run.rises(),
            sizes.per_append if trace else None,
            per_append,
            "; ".join(filter(None, (objects.note, made, leaks, self._hid(changes)))),
        )
        return growth, run.walked

    def _looked_into(
        self, grew: windows.Rate, run: Appends, slack: float, append: Append, loop: object
    ) -> tuple[windows.Rate, tuple[str, ...], dict[str, float]]:
        """The verdict without what made nothing but bounded containers longer; who holds the rest, and its types."""
        search = roots.search(run.new, append, loop)
        found = roots.filling(search, run.lengths)
        if not found.holders:
            return grew, roots.growers(search), run.by_type()
        note = "; ".join(f"within a bound: {chain}" for chain in found.holders)
        left = self._left(run, found)
        replaced = (run.rises()[1] - left) * _PARTS if found.share < 1 else 0  # sizes of what went are not known
        if left - slack * run.length <= max(_ONE_OFFS, replaced):
            return windows.Rate(0.0, False, f"grew {note}; raise times to see it full"), (), {}
        grew = grew._replace(per_append=min(grew.per_append, left / run.length), note=f"not counted: {note}")
        rest = frozenset(run.new) - found.behind
        if heap.comparable_of(rest, self._ignored) < left / 2:  # the rest is behind what a container let go of
            return grew, roots.growers(search), run.by_type()
        types = heap.by_type(rest)
        kept = {name: min(n, types.get(name, 0) / run.length) for name, n in run.by_type().items()}
        return grew, roots.growers(found.beside, found.behind), kept

    def _left(self, run: Appends, found: roots.Filling) -> float:
        """Objects that a window added besides: in the lesser of the windows, because one has first uses."""
        first, second = run.rises()
        left = second - heap.comparable_of(found.behind, self._ignored) * found.share
        if left <= _ONE_OFFS:
            return left
        early = roots.behind(run.early, found) if run.early else found.behind
        return min(left, first - heap.comparable_of(early, self._ignored))

    def _awaits(self, append: Append, call: Append, begin: int) -> str:
        """Which awaits leak when a request is cancelled there. Requests are numbered on from `begin`: a registry that
        has an entry of this number already would not grow.
        """
        if not isinstance(append, CancelAtEachAwait):
            return ""
        leaking = []
        append.pinned = True
        for at, site in enumerate(append.sites):
            append.at = at
            heap.settle()
            before = heap.comparable(self._ignored)
            for i in range(begin + at * _TRIES, begin + (at + 1) * _TRIES):
                call(i)
            heap.settle()
            if heap.comparable(self._ignored) - before >= _TRIES:
                leaking.append(site)
        append.at, append.pinned = 0, False
        return f"leaks when cancelled at {', '.join(leaking)}" if leaking else ""

    def _seconds(self, candidate: Append, reference: Append, times: int) -> tuple[float, float]:
        """Seconds of an append of each, the quickest of interleaved blocks."""
        quickest = [float("inf"), float("inf")]
        size = max(1, times // _BLOCKS)
        with heap.settings_kept(), log_capture_resting(), Caller(candidate) as ours, Caller(reference) as theirs:
            for block in range(_BLOCKS):
                for which, call in enumerate((ours, theirs)):
                    begun = self._clock()
                    for i in range(block * size, (block + 1) * size):
                        call(i)
                    quickest[which] = min(quickest[which], (self._clock() - begun) / size)
        return quickest[0], quickest[1]

    def _hid(self, changes: Mapping[str, float]) -> str:
        hidden = sum(n for name, n in changes.items() if heap.matches(name, self._ignored))
        return f"{hidden:g} objects an append of ignored types" if hidden else ""


def growth_message(growth: Growth, walked: int, max_bytes: float | None = None) -> str:
    """Why appends failed: numbers, types, holders, what production would see, the next move.

    `walked`: objects of the full collection that `growth.pause_ms["after"]` timed.
    """
    lines = [f"+{growth.objects_per_append:g} tracked objects an append, {growth.per_append:g} allowed"]
    if growth.objects_per_append <= growth.per_append:
        lines = [f"+{growth.bytes_per_append:,.0f} bytes an append, {max_bytes:,.0f} allowed"]
    lines[0] += f" (windows of {growth.times // 2}: {', '.join(f'{rise:+,}' for rise in growth.windows)} objects)"
    lines += (f"  {name:<28} {count:+g}" for name, count in growth.by_type.items())
    lines += _held(growth)
    if growth.bytes_per_append:
        lines.append(f"  bytes an append: {growth.bytes_per_append:,.0f}")
    if growth.objects_per_append:
        lines.append("  " + _production(growth, walked))
    if growth.note:
        lines.append(f"  {growth.note}")
    lines.append("  keep bytes instead (reference.CrashDumpHistory), drop it, or allow it with per_append=")
    return "\n".join(lines)


def _held(growth: Growth) -> list[str]:
    return [f"  held by {chain}" for chain in growth.held_by]


def _production(growth: Growth, walked: int) -> str:
    """The same appends in a server: objects, and full collections at this heap's cost and at real servers'."""
    objects = growth.objects_per_append * _RATE * _KEPT
    each = growth.pause_ms["after"] * 1e6 / max(walked, 1)
    low, high = (objects * ns / 1e9 for ns in _REAL_NS)
    return (
        f"at {_RATE:,} requests/s kept for {_KEPT} s: {_large(objects)} tracked objects, full collections of about "
        f"{objects * each / 1e9:.2g} s on this machine\n    ({each:.0f} ns an object, measured on this heap of "
        f"{walked:,}; heaps of real servers cost {_REAL_NS[0]} to {_REAL_NS[1]}: {low:.2g} to {high:.2g} s)"
    )


def _large(count: float) -> str:
    return f"{count / 1e6:.2g} M" if count >= 1e6 else f"{count:,.0f}"


def _worse(ours: Growth, theirs: Growth, seconds: tuple[float, float], within: float) -> Iterator[str]:
    """What the candidate does worse, a line each."""
    if ours.objects_per_append > theirs.objects_per_append:
        yield f"objects an append: {ours.objects_per_append:g}, the reference {theirs.objects_per_append:g}"
    sizes = ours.bytes_per_append or 0.0, theirs.bytes_per_append or 0.0
    if sizes[0] > sizes[1] * within + 1:  # a byte: what dictionaries that are about to grow differ by
        yield f"bytes an append: {sizes[0]:,.0f}, the reference {sizes[1]:,.0f}"
    if seconds[0] > seconds[1] * within:
        yield f"an append takes {seconds[0] * 1e6:.1f} us, the reference's {seconds[1] * 1e6:.1f} us"
    factors = [growth.pause_ms["after"] / max(growth.pause_ms["before"], 1e-3) for growth in (ours, theirs)]
    if factors[0] > max(factors[1], 1.0) * within:
        yield f"a full collection got {factors[0]:.1f} times as long, with the reference {factors[1]:.1f} times"


def _lined_up(types: Sequence[Mapping[str, int]]) -> dict[str, tuple[int, ...]]:
    names = dict.fromkeys(name for counts in types for name in counts)
    return {name: tuple(counts.get(name, 0) for counts in types) for name in names}


def _shown(changes: Mapping[str, float], ignored: Sequence[str]) -> dict[str, float]:
    """What changed, largest growth first, without the ignored types."""
    kept = {name: n for name, n in changes.items() if n and not heap.matches(name, ignored)}
    return dict(sorted(_named(kept).items(), key=lambda pair: (-pair[1], pair[0])))


def _named(changes: Mapping[str, float]) -> dict[str, float]:
    """The same by short names, except where two types of one short name would fall together."""
    shorts = [heap.short_name(name) for name in changes]
    names = (name if shorts.count(short) > 1 else short for name, short in zip(changes, shorts, strict=True))
    return dict(zip(names, changes.values(), strict=True))


def _check(times: int, per_append: float, max_bytes: float | None) -> None:
    if isinstance(times, bool) or not isinstance(times, int) or times < 2:
        raise ValueError(f"times must be a whole number >= 2, for two windows (got {times!r})")
    if not per_append >= 0:
        raise ValueError(f"per_append must be >= 0 tracked objects (got {per_append!r})")
    if max_bytes is not None and not max_bytes >= 0:
        raise ValueError(f"max_bytes_per_append must be >= 0 bytes, or None for no bound (got {max_bytes!r})")

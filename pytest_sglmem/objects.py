"""GC-tracked objects: what appends leave behind, who keeps it, and what a full collection then costs.

`GcTracked` is what the fixture `gc_tracked` gives a test. It counts live plus frozen objects, runs appends by
`appends.py`, judges by the rule of `windows.py`, and names the holders by `roots.py`. The collector's settings are
afterwards as they were. It imports neither torch nor pytest.

What it does not see: memory outside the collector's care, beyond the bytes that tracemalloc counts. What another thread
makes while appends run counts as theirs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from . import heap, roots, windows
from .appends import Append, Appends, Caller, traced
from .records import Growth

_RATE, _KEPT = 1000, 300  # requests/s and seconds: the production that a message speaks of
_REAL_NS = (360, 550)  # ns an object that a full collection costs in real servers


class GrowthError(AssertionError):
    """Appends leave more behind than was allowed. `growth`: what was measured (`records.Growth`)."""

    def __init__(self, growth: Growth, message: str) -> None:
        super().__init__(message)
        self.growth = growth


class Grown:
    """What a `growth()` block left. `objects`: live plus frozen (negative where more went than came); `by_type`: what
    changed; empty and 0 until the block has ended.
    """

    def __init__(self) -> None:
        self.objects = 0
        self.by_type: dict[str, int] = {}


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

    def count(self) -> int:
        """Objects in the collector's care now, live plus frozen. Collects nothing."""
        return heap.tracked()

    @contextmanager
    def growth(self) -> Iterator[Grown]:
        """`with gc_tracked.growth() as grown: ...`, then `grown.objects` and `grown.by_type`."""
        grown = Grown()
        before: dict[str, int] = {}
        after: dict[str, int] = {}
        with heap.settings_kept():
            heap.settle()
            before.update(heap.by_type())
            begun = heap.comparable(self._ignored)
            try:
                yield grown
            finally:
                heap.settle()
                grown.objects = heap.comparable(self._ignored) - begun
                after.update(heap.by_type())
                grown.by_type = self._changes({name: after.get(name, 0) - before.get(name, 0) for name in before | after})

    def assert_flat(
        self, append: Append, *, times: int = 1000, per_append: float = 0, max_bytes_per_append: float | None = None
    ) -> Growth:
        """Fail with `GrowthError` where an append leaves more than `per_append` tracked objects.

        `append(i)` is called `times` times in two windows, after a warm-up of a tenth as many; it may be a coroutine
        function. `max_bytes_per_append` bounds the bytes that an append leaves, too. Raises ValueError for numbers that
        say nothing.
        """
        growth = self._judge(append, times, per_append, max_bytes_per_append)
        self._record(growth)
        if growth.verdict == "growing":
            raise GrowthError(growth, growth_message(growth))
        return growth

    def _judge(self, append: Append, times: int, per_append: float, max_bytes: float | None) -> Growth:
        _check(times, per_append, max_bytes)
        run = Appends(times, self._clock, self._ignored)
        with heap.settings_kept(), traced(), Caller(append) as call:
            run.run(call)
            objects = windows.rate(*(window.objects() for window in run.windows), slack=per_append)
            bytes_ = windows.rate(*(window.bytes() for window in run.windows), slack=max_bytes or 0)
            too_large = max_bytes is not None and bytes_.growing
            held_by = roots.growers(run.new, append) if objects.growing else ()
        changes = {name: min(b - a, c - b) / run.length for name, (a, b, c) in _lined_up(run.types).items()}
        by_type = self._changes({name: change for name, change in changes.items() if change > 0})
        return Growth(
            "growing" if objects.growing or too_large else "flat",
            objects.per_append,
            by_type if objects.per_append else {},
            held_by,
            {"before": run.pause_before * 1e3, "after": run.pause_after * 1e3},
            times,
            tuple(window.objects()[-1][1] - window.objects()[0][1] for window in run.windows),
            bytes_.per_append,
            per_append,
            objects.note,
        )

    def _changes(self, changes: Mapping[str, float]) -> dict[str, float]:
        kept = {name: n for name, n in changes.items() if n and not heap.matches(name, self._ignored)}
        return dict(sorted(named(kept).items(), key=lambda pair: (-pair[1], pair[0])))


def _lined_up(types: Sequence[Mapping[str, int]]) -> dict[str, tuple[int, ...]]:
    names = dict.fromkeys(name for counts in types for name in counts)
    return {name: tuple(counts.get(name, 0) for counts in types) for name in names}


def named(changes: Mapping[str, float]) -> dict[str, float]:
    """The same by short names, except where two types of one short name would fall together."""
    shorts = [heap.short_name(name) for name in changes]
    return {name if shorts.count(short) > 1 else short: n for (name, n), short in zip(changes.items(), shorts, strict=True)}


def growth_message(growth: Growth) -> str:
    """Why an `assert_flat` failed: numbers, types, holders, production, next move."""
    return f"{growth.objects_per_append:+g} tracked objects an append\n{growth.by_type}\n{growth.held_by}"


def _check(times: int, per_append: float, max_bytes: float | None) -> None:
    if isinstance(times, bool) or not isinstance(times, int) or times < 2:
        raise ValueError(f"times must be a whole number >= 2, for two windows (got {times!r})")
    if not per_append >= 0:
        raise ValueError(f"per_append must be >= 0 tracked objects (got {per_append!r})")
    if max_bytes is not None and not max_bytes >= 0:
        raise ValueError(f"max_bytes_per_append must be >= 0 bytes, or None for no bound (got {max_bytes!r})")

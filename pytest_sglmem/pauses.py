"""What the collector's pauses cost: real collections as they happen, a full one on demand, an event loop's view.

`Pauses` hears of collections by `gc.callbacks` and enumerates nothing in the callback (that alone lengthens pauses by a
fifth); its notes go into an array, so listening adds no object for the collector to walk. `event_loop_stall` turns an
event loop while appends run and reports how late the loop was.
"""

from __future__ import annotations

import gc
import inspect
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from . import heap

_PASSES = 3  # full collections, of which the quickest counts: the others met the machine's other work
_NOTE = 3  # numbers a collection: generation, seconds, collected


@dataclass(frozen=True, slots=True)
class Pause:
    """One collection. `generation`: 2 is a full one; `collected`: objects it freed; `tracked`: objects in the
    collector's care when the listening ended.
    """

    generation: int
    seconds: float
    collected: int
    tracked: int


class Pauses:
    """`with gc_tracked.pauses() as pauses: ...`: the collections that happened meanwhile, automatic ones included."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._notes = array("d")
        self._begun = 0.0
        self._tracked = 0

    def __enter__(self) -> Pauses:
        gc.callbacks.append(self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        if self._hear in gc.callbacks:  # the code under test may have cleared the list
            gc.callbacks.remove(self._hear)
        self._tracked = heap.tracked()

    def _hear(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._begun = self._clock()
        else:
            self._notes.extend((info["generation"], self._clock() - self._begun, info["collected"]))

    @property
    def collections(self) -> tuple[Pause, ...]:
        """Every collection, in order."""
        notes = [self._notes[i : i + _NOTE] for i in range(0, len(self._notes), _NOTE)]
        return tuple(Pause(int(which), seconds, int(freed), self._tracked) for which, seconds, freed in notes)

    @property
    def worst(self) -> float:
        """Seconds of the longest collection; 0.0 where there was none."""
        return max(self._notes[1::_NOTE], default=0.0)

    @property
    def total(self) -> float:
        """Seconds of all collections together."""
        return sum(self._notes[1::_NOTE])


@dataclass(frozen=True, slots=True)
class FullPause:
    """A full collection, measured: seconds, and the objects it walked."""

    seconds: float
    walked: int

    @property
    def ns_per_object(self) -> float:
        """Nanoseconds an object that a full collection costs on this heap."""
        return self.seconds * 1e9 / max(self.walked, 1)


def full_pause(clock: Callable[[], float] = time.perf_counter) -> FullPause:
    """Time full collections of what lives now, garbage collected first. The quickest of three counts."""
    heap.settle()
    quickest = float("inf")
    for _ in range(_PASSES):
        begun = clock()
        heap.collect()
        quickest = min(quickest, clock() - begun)
    return FullPause(quickest, heap.walked())


@dataclass(frozen=True, slots=True)
class Stall:
    """How late an event loop was, in milliseconds, over `turns` turns with one append each; one of them met a full
    collection (`full_ms`). `tracked`: objects in the collector's care at the end.
    """

    p50_ms: float
    p99_ms: float
    worst_ms: float
    full_ms: float
    tracked: int
    turns: int


def event_loop_stall(
    append: Callable[[int], object], *, alive: int, turns: int, clock: Callable[[], float] = time.perf_counter
) -> Stall:
    """Fill the history with `alive` appends, then turn an event loop `turns` times with one more append each.

    Halfway a full collection is made, as sooner or later the collector makes one. No pacing: what is measured is how
    long a turn takes, which is how late a ticking coroutine gets its turn. `append` may be a coroutine function.
    """
    import asyncio

    lateness = array("d", bytes(8 * turns))

    async def call(i: int) -> None:
        result = append(i)
        if inspect.isawaitable(result):
            await result

    async def serve() -> float:
        full = 0.0
        for i in range(alive):
            await call(i)
        for turn in range(turns):
            begun = clock()
            await call(alive + turn)
            if turn == turns // 2:
                collecting = clock()
                heap.collect()
                full = clock() - collecting
            await asyncio.sleep(0)
            lateness[turn] = clock() - begun
        return full

    full = asyncio.run(serve())
    late = sorted(lateness)
    return Stall(
        late[turns // 2] * 1e3, late[turns * 99 // 100] * 1e3, late[-1] * 1e3, full * 1e3, heap.tracked(), turns
    )

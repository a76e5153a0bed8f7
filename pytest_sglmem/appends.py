"""Runs appends in two windows and takes samples of what they leave: objects, bytes, types, pauses.

What was there before a window is frozen meanwhile, so a sample costs what is new. At the ends of a window everything is
thawed, collected and counted, so that a cycle from before the window that died in it counts as dead. Between the ends
samples lie at irregular places, and where memory falls, because a backlog that drains is then at its floor.

It adds no tracked object: samples go into arrays and dictionaries that were made before the first count. It says what
was seen; `windows.py` says what that means.
"""

from __future__ import annotations

import inspect
import sys
import tracemalloc
from array import array
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from . import heap
from .windows import Sample

if TYPE_CHECKING:
    import asyncio

Append = Callable[[int], object]

_SAMPLES = 32  # a window: enough to see its floor, few enough that counting stays cheap
_LONG = 1000  # appends: longer windows leave more to walk at each sample, and get half as many
_DRAINS = 64  # further samples a window, where memory falls
_FRAMES = 6  # of a traced allocation: through asyncio to the line that made the task
_CANCEL_SECONDS = 1.0  # for tasks that appends left: one that swallows its cancellation must not hang the test


class Samples:
    """Room for numbers that are taken while appends run: appends so far, objects, bytes."""

    def __init__(self, room: int) -> None:
        self._at, self._objects, self._bytes = (array("q", bytes(8 * room)) for _ in range(3))
        self._used = 0

    def add(self, at: int, objects: int, size: int) -> None:
        """One more sample."""
        self._at[self._used], self._objects[self._used], self._bytes[self._used] = at, objects, size
        self._used += 1

    def objects(self) -> list[Sample]:
        """(appends so far, tracked objects) of each sample."""
        return list(zip(self._at[: self._used], self._objects, strict=False))

    def bytes(self) -> list[Sample]:
        """(appends so far, bytes) of each sample."""
        return list(zip(self._at[: self._used], self._bytes, strict=False))


class Appends:
    """`times` appends in two windows of `length`. After `run`:

    `windows`: the samples of each; `types`: a count by full name at the three ends; `new`: ids of what the second
    window left; `pause_before`, `pause_after`: seconds of a full collection; `walked`: objects the last one walked.
    """

    def __init__(self, times: int, clock: Callable[[], float], ignored: Sequence[str] = ()) -> None:
        self.length = times // 2
        self.warmup = max(1, times // 10) + times % 2
        self.windows = (Samples(_SAMPLES + _DRAINS + 2), Samples(_SAMPLES + _DRAINS + 2))
        self.types: tuple[dict[str, int], ...] = ({}, {}, {})
        self.new = array("Q")
        self.pause_before = self.pause_after = 0.0
        self.walked = self._known = self._own = 0  # objects at the last end; bytes of `types`
        self._ignored = ignored
        self._clock = clock
        self._places = _places(self.length)

    def run(self, call: Append) -> None:
        """Call `call(i)`: the warm-up, then both windows, `i` counting on."""
        first, second = self.windows
        for i in range(self.warmup):
            call(i)
        self.pause_before = heap.settle(self._clock)
        self._end(0, self.warmup, first)
        self._window(call, self.warmup, first)
        heap.collect()  # what is new has settled in its window; what is old had settled before the first
        self._end(1, self.warmup + self.length, first, second)
        self._window(call, self.warmup + self.length, second)
        self.pause_after = heap.settle(self._clock)
        self.walked = heap.walked()
        self._end(2, self.warmup + 2 * self.length, second)

    def _end(self, which: int, at: int, *windows: Samples) -> None:
        self._known = heap.comparable(self._ignored)
        size = _traced_bytes()
        for window in windows:
            window.add(at, self._known, size - self._own)
        self.types[which].update(heap.by_type())
        self._own += _traced_bytes() - size

    def _window(self, call: Append, begin: int, samples: Samples) -> None:
        """One window without its ends. A sample counts what is new and what is left of what was set aside."""
        with heap.set_aside():
            base = heap.comparable(self._ignored) - self._known
            old = heap.walked()
            drains, deepest, before = 0, 2, sys.getallocatedblocks()
            for done in range(1, self.length):
                call(begin + done - 1)
                fell = before - sys.getallocatedblocks()
                drained = drains < _DRAINS and fell >= deepest * 0.75
                if drained:
                    drains, deepest = drains + 1, max(deepest, fell)
                if drained or done in self._places:
                    heap.collect()
                    samples.add(begin + done, heap.comparable(self._ignored) - base, _traced_bytes() - self._own)
                before = sys.getallocatedblocks()
            call(begin + self.length - 1)
            heap.settle()
            self.new = heap.newest(old)


def _traced_bytes() -> int:
    return tracemalloc.get_traced_memory()[0]


def _places(length: int) -> frozenset[int]:
    """Where samples lie in a window: irregular, so that no backlog's period hides from them."""
    samples = _SAMPLES if length <= _LONG else _SAMPLES // 2
    step = length // samples
    if step < 2:
        return frozenset(range(1, length))
    return frozenset(max(1, j * length // samples - j * j % step) for j in range(1, samples + 1))


@contextmanager
def traced(wanted: bool) -> Iterator[None]:
    """tracemalloc counts, and knows where things were allocated. Left running where it ran before."""
    ran = tracemalloc.is_tracing() or not wanted
    if not ran:
        tracemalloc.start(_FRAMES)
    try:
        yield
    finally:
        if not ran:
            tracemalloc.stop()


class Caller:
    """Calls appends; awaits what a coroutine function gives, in an event loop of its own, made at the first one."""

    def __init__(self, append: Append) -> None:
        self._append = append
        self._loop: asyncio.AbstractEventLoop | None = None

    def __enter__(self) -> Append:
        return self._call

    def __exit__(self, *_: object) -> None:
        if self._loop is not None:
            _close(self._loop)

    def _call(self, i: int) -> None:
        result = self._append(i)
        if inspect.iscoroutine(result):
            self._run(result)

    def _run(self, coroutine: Coroutine[object, object, object]) -> None:
        import asyncio

        if self._loop is None:
            try:
                asyncio.get_running_loop()
            except RuntimeError:
                self._loop = asyncio.new_event_loop()
            else:
                coroutine.close()
                raise RuntimeError(
                    "appends that are coroutine functions run in a loop of their own: "
                    "call this from a plain test function, not from a coroutine"
                )
        self._loop.run_until_complete(coroutine)


def _close(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel what the appends left, then close the loop."""
    import asyncio

    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.wait(left, timeout=_CANCEL_SECONDS))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()

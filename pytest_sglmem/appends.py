"""Runs appends in two windows and takes samples of what they leave: objects, bytes, types, pauses.

What was there before a window is frozen meanwhile, so a sample costs what is new. Samples lie at irregular places, and
where memory falls, because a backlog that drains is then at its floor. Where the first window grew, its end is thawed,
collected and counted, so that a cycle from before that died in it counts as dead; where it did not, all is settled, and
the second goes on as it stands. In a large heap the costly question is how many of the frozen are still alive: the
first window asks it where the answer can lower the floor, the second, if it matters, at every sample.

It adds no tracked object: samples go into arrays and dictionaries that were made before the first count. It says what
was seen; `windows.py` says what that means.
"""

from __future__ import annotations

import inspect
import sys
import tracemalloc
from array import array
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
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

    `windows`: the samples of each; `end`: appends made; `pause_before`, `pause_after`: seconds of a full collection,
    the quickest of `passes` or more. Where the first window grew, `early`, `new`: ids of what each window left (`early`
    is empty where it is untold); `lengths`: of bounded containers before the second, by id; `walked`: objects that the
    last collection walked.
    """

    def __init__(self, times: int, clock: Callable[[], float], ignored: Sequence[str] = (), *, passes: int = 1) -> None:
        self.length = times // 2
        self.warmup = max(1, times // 10) + times % 2
        self.windows = (Samples(_SAMPLES + _DRAINS + 2), Samples(_SAMPLES + _DRAINS + 2))
        self.end = self.warmup + 2 * self.length
        self.early, self.new = array("Q"), array("Q")
        self.lengths: dict[int, int] = {}
        self.pause_before = self.pause_after = 0.0
        self.walked = self._own = 0  # `_own`: bytes of what is noted here
        self._young: tuple[dict[str, int], dict[str, int]] = ({}, {})  # types, frozen ones aside, at the first's ends
        self._all: tuple[dict[str, int], dict[str, int]] = ({}, {})  # types at the second's ends
        self._ignored = ignored
        self._clock = clock
        self._passes = passes
        self._places = _places(self.length)

    def run(self, call: Append) -> None:
        """Call `call(i)`: the warm-up, then both windows, `i` counting on."""
        for i in range(self.warmup):
            call(i)
        self.pause_before = heap.settle(self._clock, passes=self._passes)
        known = heap.comparable(self._ignored)
        self._sample(self.warmup, known, self.windows[0])
        grew = self._first(call, known)
        if grew:
            self._second(call)
        self.pause_after = heap.settle(self._clock, passes=self._passes)
        self._sample(self.end, heap.comparable(self._ignored), self.windows[1])
        if grew:
            self.walked = heap.walked()
            self._note(self._all[1])

    def _first(self, call: Append, known: int) -> bool:
        """The first window; where it did not grow, the second one, too. Whether it grew."""
        begin, middle = self.warmup, self.warmup + self.length
        with self._set_aside() as aside:
            aside.begin()
            self._note(self._young[0])
            old = heap.walked()
            self._window(call, begin, self.windows[0], aside, known)
            count = known + aside.rise()
            grew = count > known or bool(self._ignored)  # what is ignored is counted all the same
            if grew and not aside.disturbed:
                self._note(self._young[1])
                self._note_early(old)
            if not grew:
                self._sample(middle, count, *self.windows)
                self._window(call, middle, self.windows[1], aside, known)
        return grew

    def _second(self, call: Append) -> None:
        """The second window, which matters: counted by type, and sampled exactly."""
        middle = self.warmup + self.length
        heap.collect()  # what is new has settled in its window; what is old had settled before the first
        known = heap.comparable(self._ignored)
        self._sample(middle, known, *self.windows)
        self._note(self._all[0])
        self.lengths.update(heap.lengths())
        with self._set_aside() as aside:
            aside.begin()
            old = heap.walked()
            self._window(call, middle, self.windows[1], aside, known, True)
            self.new = heap.newest(old)

    def rises(self) -> tuple[int, int]:
        """Objects that each window added."""
        first, second = (window.objects() for window in self.windows)
        return first[-1][1] - first[0][1], second[-1][1] - second[0][1]

    def by_type(self) -> dict[str, float]:
        """What stays an append by full type name, in the lesser of the windows. Empty where the first did not grow."""
        rises = _less(*self._all)
        if self._young[1]:  # else what the appends left was frozen by themselves, and cannot be listed
            young = _less(*self._young)
            rises = {name: min(rise, young.get(name, 0)) for name, rise in rises.items()}
        return {name: rise / self.length for name, rise in rises.items() if rise > 0}

    @contextmanager
    def _set_aside(self) -> Iterator[heap.SetAside]:
        """`heap.set_aside`, whose own bytes are not the appends'."""
        size = _traced_bytes()
        with heap.set_aside(self._ignored) as aside:
            held = _traced_bytes() - size
            self._own += held
            yield aside
        self._own -= held

    def _sample(self, at: int, count: int, *windows: Samples) -> None:
        for window in windows:
            window.add(at, count, _traced_bytes() - self._own)

    def _note(self, types: dict[str, int]) -> None:
        size = _traced_bytes()
        types.update(heap.by_type())
        self._own += _traced_bytes() - size

    def _note_early(self, old: int) -> None:
        size = _traced_bytes()
        self.early = heap.newest(old)
        self._own += _traced_bytes() - size

    def _window(
        self, call: Append, begin: int, samples: Samples, aside: heap.SetAside, known: int, ask: bool = False
    ) -> None:
        """One window without its ends. `known`: objects when `aside` began. No keywords: see `SetAside.begin`."""
        drains, deepest, before = 0, 2, sys.getallocatedblocks()
        for done in range(1, self.length):
            call(begin + done - 1)
            fell = before - sys.getallocatedblocks()
            drained = drains < _DRAINS and fell >= deepest * 0.75
            if drained or done in self._places:
                heap.collect()
                self._sample(begin + done, known + aside.rise(ask or fell > deepest), samples)
            if drained:
                drains, deepest = drains + 1, max(deepest, fell)
            before = sys.getallocatedblocks()
        call(begin + self.length - 1)
        heap.settle()


def _less(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    return {name: count - before.get(name, 0) for name, count in after.items()}


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
        self.loop: asyncio.AbstractEventLoop | None = None

    def __enter__(self) -> Append:
        return self._call

    def __exit__(self, *_: object) -> None:
        if self.loop is not None:
            _close(self.loop)

    def _call(self, i: int) -> None:
        result = self._append(i)
        if inspect.iscoroutine(result):
            self._run(result)

    def _run(self, coroutine: Coroutine[object, object, object]) -> None:
        import asyncio

        if self.loop is None:
            try:
                asyncio.get_running_loop()
            except RuntimeError:
                self.loop = asyncio.new_event_loop()
            else:
                coroutine.close()
                raise RuntimeError(
                    "appends that are coroutine functions run in a loop of their own: "
                    "call this from a plain test function, not from a coroutine"
                )
        self.loop.run_until_complete(coroutine)


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

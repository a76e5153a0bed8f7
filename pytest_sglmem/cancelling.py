"""Cancels a request at each of its awaits in turn, because many leaks live only between a registration and its removal.

The cancellation is asyncio's own: at the chosen suspension the task cancels itself, so what the request awaits is
cancelled with it, and `CancelledError` comes out of that await as it would when a client disconnects.
"""

from __future__ import annotations

import os
import types
from collections.abc import Callable, Coroutine, Generator

Request = Callable[[int], Coroutine[object, object, object]]


class CancelAtEachAwait:
    """An append: `await it(i)` runs `request(i)`, cancelled at await number `at`, which then moves on.

    `sites`: where the request awaits, in order, as "engine.py:41 in generate"; known once it has been there.
    `pinned`: stay at one await. What a request raises instead of ending or being cancelled is raised.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self.at = 0
        self.pinned = False
        self.sites: list[str] = []

    async def __call__(self, i: int) -> None:
        """One request, cancelled at one await, or not at all where it has no such await."""
        import asyncio

        run = _Run(self._request(i), self.at, self.sites)
        task = asyncio.ensure_future(run.drive())
        await asyncio.wait({task})
        if not task.cancelled():
            task.result()
        if not self.pinned:
            self.at = self.at + 1 if run.struck else 0


class _Run:
    def __init__(self, coroutine: Coroutine[object, object, object], at: int, sites: list[str]) -> None:
        self._coroutine = coroutine
        self._at = at
        self._sites = sites
        self.struck = False

    async def drive(self) -> object:
        return await self._steps()

    @types.coroutine
    def _steps(self) -> Generator[object, object, object]:
        """What `await coroutine` does, with a cancellation at one of the suspensions."""
        import asyncio

        suspension, pending = 0, None
        while True:
            try:
                awaited = self._coroutine.throw(pending) if pending else self._coroutine.send(None)
            except StopIteration as stop:
                return stop.value
            finally:
                pending = None  # its traceback holds this frame
            if suspension == len(self._sites):
                self._sites.append(_site(self._coroutine))
            if suspension == self._at:
                self.struck = True
                task = asyncio.current_task()
                assert task is not None
                asyncio.get_running_loop().call_soon(task.cancel)
            suspension += 1
            try:
                yield awaited
            except BaseException as error:  # what the event loop throws in goes on to the request
                pending = error


def _site(coroutine: object) -> str:
    """Where the innermost coroutine of the user's waits, from outside in until code without a frame."""
    frame: types.FrameType | None = None
    while isinstance(coroutine, (types.CoroutineType, types.GeneratorType)):
        inner = coroutine.cr_frame if isinstance(coroutine, types.CoroutineType) else coroutine.gi_frame
        waits = coroutine.cr_await if isinstance(coroutine, types.CoroutineType) else coroutine.gi_yieldfrom
        if inner is None or (frame is not None and f"{os.sep}asyncio{os.sep}" in inner.f_code.co_filename):
            break
        frame, coroutine = inner, waits
    if frame is None:
        return "unknown"
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"

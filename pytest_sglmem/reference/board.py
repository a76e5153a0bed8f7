"""How the ranks of one host agree before they depend on each other: a page of shared memory, a row a rank.

Each rank writes which call it is in and what it is about to do (its plan), and reads the others' rows. So ranks that
disagree find out from the page, and nobody enters a collective that the others do not enter. A rank that does not come
is named after a limit. It moves no tensor, it knows no device, and it is for ranks of one host only, as CUDA IPC is.

The page is a file that is unlinked as soon as every rank has mapped it: a killed run leaves nothing behind.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

_KINDS = ("exchange", "attention", "share", "release", "drop")
_DTYPES = tuple(sorted((d for d in vars(torch).values() if isinstance(d, torch.dtype)), key=str))
# A rank's host may be this many calls ahead of the slowest; a row remembers twice as many plans, so that none is
# overwritten before everybody has compared it.
_AHEAD = 32
_RING = 2 * _AHEAD
_POSTED, _DONE, _PID, _LEFT, _PLANS = range(5)
_ROW = _PLANS + _RING
_YIELDS = 100
_SHORTEST_NAP_S, _LONGEST_NAP_S = 2e-5, 1e-3  # in between, a small part of what has been waited already


class PlanMismatch(RuntimeError):
    """The ranks of a group do not call alike: they ask for different things in the same call."""


class PeerSilent(RuntimeError):
    """A rank did not come to a call within the limit, or left by an error and will not come."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What one call is about to do: its kind, the elements of its buffer, their dtype, and how they are cut.

    `cut`: a number below 4096 made from whatever else must be alike.
    """

    kind: str
    elements: int
    dtype: torch.dtype
    cut: int = 0

    def code(self) -> int:
        """The plan as one positive 64-bit number, the same in every rank."""
        return self.elements << 24 | self.cut << 12 | _DTYPES.index(self.dtype) << 4 | _KINDS.index(self.kind)

    def __str__(self) -> str:
        size = f" of {self.elements} {str(self.dtype)[6:]} elements" if self.elements else ""
        return self.kind + size + (f", cut {self.cut:03x}" if self.cut else "")

    @classmethod
    def decode(cls, code: int) -> Plan:
        """The plan that `code` stands for."""
        return cls(_KINDS[code & 0xF], code >> 24, _DTYPES[code >> 4 & 0xFF], code >> 12 & 0xFFF)


class Board:
    """A row of the shared page for each rank of `group`. Making one is collective.

    `limit`: seconds to wait for another rank. Where the ranks cannot map one file (they are not on one host), every
    rank raises RuntimeError.
    """

    def __init__(self, group: dist.ProcessGroup | None, limit: float) -> None:
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.limit = limit
        self.calls = 0
        self._others = tuple(rank for rank in range(self.world) if rank != self.rank)
        self._compared = [0] * self.world
        self._map = _shared_page(group, 8 * _ROW * self.world)
        self._words = memoryview(self._map).cast("q")
        self._mine = self.rank * _ROW
        self._words[self._mine + _PID] = os.getpid()

    def post(self, code: int) -> None:
        """Say what this rank's next call does, and compare with what the others have said so far.

        It does not wait for them, except where one is far behind. Raises PlanMismatch, PeerSilent.
        """
        if self._post(code) < self.calls - _AHEAD:
            self._wait(_POSTED, self.calls - _AHEAD)

    def agree(self, code: int) -> None:
        """Say what this rank's next call does, and wait until every rank has come to it with the same plan.

        Raises PlanMismatch, PeerSilent.
        """
        if self._post(code) < self.calls:
            self._wait(_POSTED, self.calls)

    def leave(self) -> None:
        """Say that this rank comes to no further call: who waits for it need not wait for the limit."""
        self._words[self._mine + _LEFT] = 1

    def compare(self) -> int:
        """Compare every plan that is known of another rank with this rank's own.

        Returns the call that the slowest rank is in. Raises PlanMismatch.
        """
        words, mine, least = self._words, self._mine + _PLANS, self.calls
        for rank in self._others:
            row = rank * _ROW
            posted = words[row + _POSTED]
            least = min(least, posted)
            for call in range(self._compared[rank] + 1, min(posted, self.calls) + 1):
                if words[row + _PLANS + call % _RING] != words[mine + call % _RING]:
                    raise PlanMismatch(self._differ(rank, call))
                self._compared[rank] = call
        return least

    def behind(self) -> list[int]:
        """The ranks that have not come to this rank's latest call."""
        return [rank for rank in self._others if self._words[rank * _ROW + _POSTED] < self.calls]

    def done(self, message: int) -> None:
        """Say that everything up to this rank's `message` has arrived at the others."""
        self._words[self._mine + _DONE] = message

    def wait_done(self, message: int) -> None:
        """Wait until every rank has said that `message` has arrived. Raises PlanMismatch, PeerSilent."""
        self._wait(_DONE, message)

    def silent(self, ranks: list[int]) -> PeerSilent:
        """The error that names `ranks`: where this rank is, and where they were last seen."""
        where = self._said(self.rank)
        last = "; ".join(f"rank {rank}{self._gone(rank)} is in {self._said(rank)}" for rank in ranks)
        return PeerSilent(f"rank {self.rank} waited {self.limit:g} s in {where} for {len(ranks)} of its peers: {last}")

    def _post(self, code: int) -> int:
        words, mine = self._words, self._mine
        if words[mine + _LEFT]:
            raise PeerSilent(f"rank {self.rank} left by an error in {self._said(self.rank)}; make a new one")
        self.calls += 1
        words[mine + _PLANS + self.calls % _RING] = code
        words[mine + _POSTED] = self.calls  # after the plan: who sees the call sees its plan
        return self.compare()

    def _wait(self, column: int, number: int) -> None:
        words, rows = self._words, [rank * _ROW + column for rank in self._others]
        self._patiently(lambda: all(words[row] >= number for row in rows), column, number)
        self.compare()

    def _patiently(self, arrived: Callable[[], bool], column: int, number: int) -> None:
        since, turns = time.monotonic(), 0
        while not arrived():
            turns += 1
            if turns < _YIELDS:
                os.sched_yield()
                continue
            self.compare()
            left = [r for r in self._others if self._words[r * _ROW + _LEFT]]  # before: who leaves has said all
            late = [r for r in self._others if self._words[r * _ROW + column] < number]
            if gone := [r for r in left if r in late]:
                raise self._without(gone)
            waited = time.monotonic() - since
            if late and waited > self.limit:
                raise self.silent(late)
            time.sleep(min(max(_SHORTEST_NAP_S, waited / 32), _LONGEST_NAP_S))

    def _differ(self, rank: int, call: int) -> str:
        said = self._words
        mine = Plan.decode(said[self._mine + _PLANS + call % _RING])
        theirs = Plan.decode(said[rank * _ROW + _PLANS + call % _RING])
        return f"in call {call} rank {self.rank} is about to do {mine}, rank {rank} {theirs}; all ranks must call alike"

    def _without(self, ranks: list[int]) -> PeerSilent:
        left = "; ".join(f"rank {rank} left by an error in {self._said(rank)}" for rank in ranks)
        return PeerSilent(f"rank {self.rank} waits in {self._said(self.rank)}, but {left}")

    def _said(self, rank: int) -> str:
        row = rank * _ROW
        call = self._words[row + _POSTED]
        return f"call {call} ({Plan.decode(self._words[row + _PLANS + call % _RING])})" if call else "no call yet"

    def _gone(self, rank: int) -> str:
        pid = self._words[rank * _ROW + _PID]
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return f" (process {pid} is gone)"
        except PermissionError:
            pass
        return ""


def _shared_page(group: dist.ProcessGroup | None, size: int) -> mmap.mmap:
    path = ""
    if dist.get_rank(group) == 0:
        file, path = tempfile.mkstemp(prefix="sglmem-board-")
        os.ftruncate(file, size)
        os.close(file)
    paths: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(paths, path, group=group)
    try:
        page, failed = _mapped(paths[0], size), ""
    except OSError as error:
        page, failed = mmap.mmap(-1, size), f"rank {dist.get_rank(group)}: {error}"
    dist.all_gather_object(paths, failed, group=group)  # every rank has mapped it, or says why not
    if path:
        os.unlink(path)
    if any(paths):
        raise RuntimeError("all ranks must be on one host: " + "; ".join(filter(None, paths)))
    return page


def _mapped(path: str, size: int) -> mmap.mmap:
    with open(path, "r+b") as file:
        return mmap.mmap(file.fileno(), size)

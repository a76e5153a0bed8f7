"""The lifetime contract of CUDA IPC as a state machine, and the counters it goes by.

torch keeps one counter for each exported handle. It is 1 from the export on; every release by a consumer subtracts 1;
the exporter gives a block back only when the counter of each of its handles reads "released". So one export pairs with
one open and one release: an open too many takes the counter below zero, an open too few leaves it at 1, and either way
the block is lost. The transitions (measured on an H200: fixtures/truth/README.md):

    held --export--> exported, with one wrapper more
    exported --drop--> freed, where every wrapper comes off: the newest first, each when its counter reads released
    exported --drop--> limbo, where a wrapper stays on
    limbo --collect (`ipc_collect`, a miss in the allocator, the drop of any exported block)--> freed, as for a drop

Nothing here touches torch's state; only `reads_unsigned` imports torch.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Hashable, Iterable
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

SLOTS_A_FILE = 10_000
EVENTS = 1_000
FILE_HEADER = 64
COUNTER = struct.Struct("=q")

S = TypeVar("S", bound=Hashable)


class Slot(NamedTuple):
    """The place of one handle's counter: the exporter's counter file (numbered from 0) and the slot in it."""

    file: int
    offset: int


def read_counter(counter_file: str, slot: int) -> int | None:
    """The counter in `slot` of `counter_file`: 1 outstanding, 0 released (or never used), below 0 released too often.

    None where the file is gone: each of its handles was given back, or its exporter ended.
    """
    file = open_counters(counter_file)
    if file is None:
        return None
    try:
        word = os.pread(file, COUNTER.size, FILE_HEADER + COUNTER.size * slot)
    finally:
        os.close(file)
    return COUNTER.unpack(word)[0] if len(word) == COUNTER.size else None


def open_counters(counter_file: str, flags: int = os.O_RDONLY) -> int | None:
    """A file descriptor of a counter file; None where it is gone.

    `counter_file` is the name that torch hands over ("/torch_123_456_0", a file in /dev/shm), or an emulated device's
    ("/proc/123/fd/7#4711": an open file of process 123 that has no name, and its inode, because the number 7 is used
    again for other files).
    """
    path, _, inode = counter_file.partition("#")
    try:
        file = os.open(path if path.startswith("/proc/") else "/dev/shm/" + path.lstrip("/"), flags | os.O_CLOEXEC)
    except OSError:
        return None
    if inode and os.fstat(file).st_ino != int(inode):
        os.close(file)
        return None
    return file


def is_released(counter: int, *, unsigned: bool) -> bool:
    """Whether torch takes this counter as given back. Below zero: never, where torch reads it as unsigned."""
    return counter == 0 or (counter < 0 and not unsigned)


@lru_cache(maxsize=1)
def reads_unsigned() -> bool:
    """Whether the torch at hand reads the counter as unsigned, so that a block below zero is lost and not freed.

    It is asked, not assumed: the header that torch installs says which; where there is none, its version does (signed
    up to 2.1, unsigned from 2.2).
    """
    import torch

    header = Path(torch.__file__).parent / "include" / "torch" / "csrc" / "CudaIPCTypes.h"
    try:
        text = header.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    return counter_is_unsigned(text, torch.__version__)


def counter_is_unsigned(header: str, version: str) -> bool:
    """What `reads_unsigned` answers for the text of torch's CudaIPCTypes.h and torch's version."""
    found = re.search(r"\b(u?)int64_t\s+counter_value\s*\(", header)
    if found:
        return found.group(1) == "u"
    numbers = [int(part) for part in re.findall(r"\d+", version)[:2]]
    return numbers >= [2, 2]


class Custody(Generic[S]):
    """Which blocks of a process are held, in limbo or free, by the counters of their handles. Pure.

    A block is any number; a slot is any name of a counter; `read(slot)` is its value now. A block exported n times is
    wrapped n times: the newest wrapper is looked at first, an older one only when the newer is released.
    """

    def __init__(self, read: Callable[[S], int], *, unsigned: bool = True, glance: int | None = None) -> None:
        """`glance`: how many of the newest in limbo a drop looks at; None is what torch does: all of them."""
        self._read = read
        self._unsigned = unsigned
        self._glance = glance
        self._wrappers: dict[int, list[S]] = {}
        self._limbo: dict[int, list[S]] = {}
        # Below zero nothing brings a counter back but a hand that writes it: a drop need not look there again.
        self._below: set[int] = set()
        self.live_exports = 0

    def wrap(self, block: int, slot: S) -> None:
        """`block` was exported once more; `slot` counts the new handle. Raises ValueError for one that was dropped."""
        if block in self._limbo:
            raise ValueError(f"block {block} was dropped: it cannot be exported again")
        self._wrappers.setdefault(block, []).append(slot)
        self.live_exports += 1

    def drop(self, block: int) -> list[int]:
        """The exporter's last use of `block` ended. Returns the blocks that are free now, in the order torch frees.

        A block never exported is free at once; the drop of an exported one also sweeps the limbo.
        """
        slots = self._wrappers.pop(block, None)
        if slots is None:
            return [block]
        self._limbo[block] = slots
        return self.look(self._glance)

    def look(self, newest: int | None = None) -> list[int]:
        """Sweep what a drop sweeps: all of the limbo, or its `newest`, but for counters that were below zero."""
        blocks = reversed(self._limbo) if newest else iter(self._limbo)
        return self._sweep(list(islice((block for block in blocks if block not in self._below), newest)))

    def forget(self, block: int) -> None:
        """`block` was freed by a sweep that nobody saw: take it out of the limbo."""
        for slot in self._limbo.pop(block):
            self._returned(slot)
            self.live_exports -= 1
        self._below.discard(block)

    def collect(self) -> list[int]:
        """Sweep the limbo, as `ipc_collect` and a miss in the allocator do. Returns the blocks that are free now."""
        return self._sweep(list(self._limbo))

    def _sweep(self, blocks: Iterable[int]) -> list[int]:
        return [block for block in blocks if self._unwrap(block)]

    def _unwrap(self, block: int) -> bool:
        """Take the released wrappers off; True when none is left."""
        slots = self._limbo[block]
        while slots:
            counter = self._read(slots[-1])
            if not is_released(counter, unsigned=self._unsigned):
                if counter < 0:
                    self._below.add(block)
                return False
            self._returned(slots.pop())
            self.live_exports -= 1
        del self._limbo[block]
        self._below.discard(block)
        return True

    def _returned(self, slot: S) -> None:
        """A handle was given back for good. For those who count slots."""

    @property
    def limbo(self) -> tuple[int, ...]:
        """The blocks that were dropped and are not free yet, oldest first."""
        return tuple(self._limbo)

    @property
    def exported(self) -> tuple[int, ...]:
        """The blocks that were exported and are still held."""
        return tuple(self._wrappers)

    def slots(self, block: int) -> tuple[S, ...]:
        """The wrappers of `block` that are still on, oldest first; empty for one that is free or was never exported."""
        return tuple(self._wrappers.get(block) or self._limbo.get(block) or ())


class Producer(Custody[Slot]):
    """The exports of one process: `Custody`, and which counter each export gets.

    Slots are never used twice; a file holds 10,000 and goes when all of them were given back: at once where it is full,
    else at the next `collect` that leaves the limbo empty. The caller writes the 1 into the slot that `export` returns,
    in a file whose name no other file of the process ever has.
    """

    def __init__(self, read: Callable[[Slot], int], *, unsigned: bool = True) -> None:
        super().__init__(read, unsigned=unsigned)
        self._next = Slot(0, 0)
        self._used: dict[int, int] = {}
        self.gone: list[int] = []

    def export(self, block: int) -> Slot:
        """One more handle for `block`: the slot of its counter."""
        slot = self._next
        self.wrap(block, slot)
        self._used[slot.file] = self._used.get(slot.file, 0) + 1
        full = slot.offset + 1 == SLOTS_A_FILE
        self._next = Slot(slot.file + 1, 0) if full else Slot(slot.file, slot.offset + 1)
        return slot

    @property
    def export_waits(self) -> bool:
        """Whether the next export synchronizes a stream, because 1,000 events are in use: exports have become slow."""
        return self.live_exports >= EVENTS

    @property
    def files(self) -> tuple[int, ...]:
        """The numbers of the counter files that exist."""
        return tuple(self._used)

    def collect(self) -> list[int]:
        """As `Custody.collect`; and the current counter file goes when nothing needs it (a drop never does)."""
        freed = super().collect()
        current = self._next.file
        if not self._limbo and self._used.get(current) == 0:
            self._forget(current)
            self._next = Slot(current + 1, 0)
        return freed

    def _returned(self, slot: Slot) -> None:
        self._used[slot.file] -= 1
        if self._used[slot.file] == 0 and slot.file != self._next.file:
            self._forget(slot.file)

    def _forget(self, file: int) -> None:
        del self._used[file]
        self.gone.append(file)


class Mapped(Generic[S]):
    """A block that a consumer has mapped: `slot` is given back when the last of its `views` ends."""

    __slots__ = ("memory", "slot", "views")

    def __init__(self, memory: Hashable, slot: S) -> None:
        self.memory = memory
        self.slot = slot
        self.views = 1


class Consumer(Generic[S]):
    """The opens of one process, as torch counts them. Pure.

    `release(slot)` subtracts 1 from a counter. `memory` names what a handle points to (torch: the handle of the segment
    and the offset), the same for all handles of one block.
    """

    def __init__(self, release: Callable[[S], None]) -> None:
        self._release = release
        self._cache: dict[Hashable, Mapped[S]] = {}
        self._mappings: set[Mapped[S]] = set()

    def open(self, memory: Hashable, slot: S) -> Mapped[S]:
        """Rebuild the tensor (`rebuild_cuda_tensor`). Where the process maps that memory already, the handle is given
        back at once and the mapping shared; so the same handle opened twice is given back while it is still in use.
        """
        known = self._cache.get(memory)
        if known is not None:
            known.views += 1
            self._release(slot)
            return known
        opened = self._cache[memory] = self.open_by_hand(memory, slot)
        return opened

    def open_by_hand(self, memory: Hashable, slot: S) -> Mapped[S]:
        """Map it past the cache (`_new_shared_cuda`)."""
        opened = Mapped(memory, slot)
        self._mappings.add(opened)
        return opened

    def close(self, opened: Mapped[S]) -> None:
        """One view of the mapping ended; with the last one its handle is given back."""
        opened.views -= 1
        if opened.views or opened not in self._mappings:
            return
        self._mappings.discard(opened)
        if self._cache.get(opened.memory) is opened:
            del self._cache[opened.memory]
        self._release(opened.slot)

    def die(self) -> None:
        """The process was killed: nothing that it maps is ever given back."""
        self._cache.clear()
        self._mappings.clear()

    @property
    def mapped(self) -> frozenset[Hashable]:
        """What the process maps now."""
        return frozenset(opened.memory for opened in self._mappings)

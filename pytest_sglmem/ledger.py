"""The ledger: what one process exports, opens and releases over CUDA IPC, with the stacks and the counters.

It watches where every way to share a CUDA tensor meets (`reduce_tensor`, `ForkingPickler`, the queues of
multiprocessing, code that calls `_share_cuda_` and rebuilds by hand), on the real device and the emulated one alike,
and knows what became of each block from the counters in shared memory, by the state machine of `contract.py`.

It holds no tensor and judges nothing: `audit.py` pairs the records of all ranks. What an export or open costs is a
line in a log; the log is read at the next drop, collection, step or reading, before any counter is.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from .contract import COUNTER, FILE_HEADER, Custody, open_counters, reads_unsigned
from .records import Export, Open
from .revivals import Revivals, are_possible
from .sites import RawStack, Stacks, format_frames, words

if TYPE_CHECKING:
    import torch

_ROUND = 512
# A drop makes torch look at its whole limbo. The ledger looks at the newest of it (Python is slower than C++ by so
# much) and at all of it at a collection; what it overlooked meanwhile shows in the addresses that are live.
_GLANCE = 64
_MAPPED_FILES = 64
_ABSENT = object()
# What `_share_cuda_` returns: device, memory handle, bytes, offset, counter file, slot, event handle, event needed.
_Shared = tuple[int, bytes, int, int, "bytes | str", int, bytes, bool]
# An export as it is logged: block, counter file, slot, stack, step. An open: the storage in place of the block, None
# where the handle was given back at once.
_LoggedExport = tuple["_Block", "bytes | str", int, RawStack, int]
_LoggedOpen = tuple["weakref.ref[torch.UntypedStorage] | None", "bytes | str", int, RawStack, int]
_Stacks = Mapping[int, tuple[str, ...]]


class _CounterFile:
    """One counter file, mapped read-only on first use: torch may remove its name before the last release is seen."""

    __slots__ = ("_gone", "_map", "handles", "name", "unreturned")

    def __init__(self, name: str) -> None:
        self.name = name
        self.handles: list[_Handle] = []
        self.unreturned = 0
        self._map: mmap.mmap | None = None
        self._gone = False

    def read(self, slot: int) -> int | None:
        """The counter in `slot`; None where the file went before anybody looked."""
        if self._map is None and not self._gone:
            self._open()
        at = FILE_HEADER + COUNTER.size * slot
        if self._map is None or at + COUNTER.size > len(self._map):
            return None
        return COUNTER.unpack_from(self._map, at)[0]

    def _open(self) -> None:
        file = open_counters(self.name)
        if file is None:
            self._gone = True  # names are not used twice: it will not come back
            return
        try:
            self._map = mmap.mmap(file, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(file)

    def close(self) -> None:
        """Note the last value of each counter and let the mapping go."""
        for handle in self.handles:
            handle.last = self.read(handle.slot)
            handle.file = None
        self.handles.clear()
        if self._map is not None:
            self._map.close()
            self._map = None


class _Handle:
    """One export, as the ledger keeps it: no tensor, no frame."""

    __slots__ = ("block", "file", "freed_at", "last", "name", "slot", "stack", "step")

    def __init__(self, file: _CounterFile, slot: int, block: _Block, stack: RawStack, step: int) -> None:
        self.file: _CounterFile | None = file
        self.name = file.name
        self.slot = slot
        self.block = block
        self.stack = stack
        self.step = step
        self.last: int | None = None
        self.freed_at: int | None = None

    def counter(self) -> int | None:
        """The counter now, or its last value where the file was let go; None where nobody ever saw it."""
        return self.last if self.file is None else self.file.read(self.slot)


class _Block(weakref.ref["torch.UntypedStorage"]):
    """The storage that was exported, held weakly: the callback runs when its last owner is gone.

    `serial` is -1 until its first export is read from the log; what stands below it is there from then on.
    """

    __slots__ = ("address", "cdata", "dropped", "freed", "handles", "serial", "size")

    cdata: int
    address: int
    size: int
    serial: int
    handles: list[_Handle]
    dropped: bool
    freed: bool


class _Opened(weakref.ref["torch.UntypedStorage"]):
    """A storage that was opened, where its weak reference may end before it does: the `index`-th open."""

    __slots__ = ("cdata", "index")

    cdata: int
    index: int


class _Wording:
    """Words each stack once. By the identity of its code objects: equal ones may come from different files."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], tuple[str, ...]] = {}

    def __call__(self, raw: RawStack) -> tuple[str, ...]:
        key = (*map(id, raw[::2]), *raw[1::2])
        said = self._known.get(key)
        if said is None:
            said = self._known[key] = words(raw)
        return said


class _LedgerCustody(Custody[_Handle]):
    """`Custody` by the counters in shared memory, told as they are read."""

    def __init__(self, *, unsigned: bool) -> None:
        super().__init__(self._read_handle, unsigned=unsigned, glance=_GLANCE)

    @staticmethod
    def _read_handle(handle: _Handle) -> int:
        counter = handle.counter()
        return 0 if counter is None else counter  # a file goes when each of its handles was given back

    def _returned(self, slot: _Handle) -> None:
        if slot.file is not None:
            slot.file.unreturned -= 1


class Ledger:
    """Watches one process export, open and release CUDA IPC handles, on whatever device torch has there.

    Enter it after the emulated device (if any): it patches `UntypedStorage._share_cuda_`, `_new_shared_cuda`,
    `_release_ipc_counter_cuda` and the collection of the limbo, where every way to share a CUDA tensor meets, and puts
    them back on exit. It holds no tensor. Code that shares nothing pays nothing.

    Known limit: a collection that torch's allocator runs by itself is seen only afterwards, from the addresses that are
    live; where the address was handed out again to memory that no Python tensor shows, the block reads as not freed.
    """

    def __init__(self, rank: int = 0, *, unsigned: bool | None = None) -> None:
        self.rank = rank
        self._unsigned = reads_unsigned() if unsigned is None else unsigned
        self._custody = _LedgerCustody(unsigned=self._unsigned)
        self._files: dict[bytes | str, _CounterFile] = {}
        self._blocks: list[_Block] = []
        self._held: dict[int, _Block] = {}
        self._handles: list[_Handle] = []
        self._log: deque[_LoggedExport] = deque()
        self._opened: list[_LoggedOpen] = []
        self._stacks = Stacks()
        self._step = -1
        self._fallen: list[_Block] = []
        self._busy = False
        self._revivals: Revivals[_Block | _Opened] = Revivals(self._settle_doubted)
        self._patches: list[tuple[object, str, object]] = []

    def __enter__(self) -> Ledger:
        if self._patches:
            raise RuntimeError("this ledger is already watching")
        import torch

        storage = torch.UntypedStorage
        share, open_, release = storage._share_cuda_, storage._new_shared_cuda, storage._release_ipc_counter_cuda

        revived = are_possible()
        take, held, log, opened = self._stacks.take, self._held, self._log.append, self._opened.append

        @functools.wraps(share)
        def _share_cuda_(self_: torch.UntypedStorage, *args: object, **kwargs: object) -> _Shared:
            shared: _Shared = share(self_, *args, **kwargs)
            if shared[4] is not None:  # an empty storage has no block, and no counter
                block = held.get(self_._cdata)
                if block is None or block() is not self_:
                    block = self._new_block(self_, shared[2])
                log((block, shared[4], shared[5], take(1) or self._plumbing(), self._step))
            return shared

        def _new_shared_cuda(*args: Any, **kwargs: object) -> torch.UntypedStorage:
            storage = open_(*args, **kwargs)
            watch = self._watch_open(storage) if revived else weakref.ref(storage)
            opened((watch, args[4], args[5], take(1) or self._plumbing(), self._step))
            return storage

        def _release_ipc_counter_cuda(*args: Any, **kwargs: object) -> object:
            result = release(*args, **kwargs)
            opened((None, args[0], args[1], take(1) or self._plumbing(), self._step))
            return result

        self._patch(storage, "_share_cuda_", _share_cuda_)
        self._patch(storage, "_new_shared_cuda", staticmethod(_new_shared_cuda))
        self._patch(storage, "_release_ipc_counter_cuda", staticmethod(_release_ipc_counter_cuda))
        self._watch_collection()
        self._revivals.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._revivals.stop()
        while self._patches:
            owner, name, before = self._patches.pop()
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

    def mark(self, step: int) -> None:
        """From now on, exports and opens belong to `step`."""
        self._step = step
        self._swept(None)
        if len(self._files) > _MAPPED_FILES:
            self._unmap()

    def reading(self) -> tuple[tuple[Export, ...], tuple[Open, ...]]:
        """Everything exported and opened since the ledger was entered, counters as they are now."""
        self._find_emptied()
        self._swept(None)
        kept = frozenset(block.address for block in self._blocks if not block.freed)
        live = _live_blocks(kept) if kept else {}
        if live is not None:
            self._find_freed_by_allocator(live)
        worded = _Wording()
        exports = tuple([self._export(handle, worded, live or {}) for handle in self._handles])
        opens = tuple([self._open(opened, order, worded) for order, opened in enumerate(self._opened)])
        return exports, opens

    def _patch(self, owner: object, name: str, new: object) -> None:
        self._patches.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, new)

    def _watch_collection(self) -> None:
        import torch

        where = torch._C, "_cuda_ipc_collect"
        owner, name = where if hasattr(*where) else (torch.cuda, "ipc_collect")
        collect = getattr(owner, name)

        @functools.wraps(collect)
        def collect_and_look(*args: object, **kwargs: object) -> object:
            result = collect(*args, **kwargs)
            if self._handles or self._log:
                self._swept(self._custody.collect)
            return result

        self._patch(owner, name, collect_and_look)

    def _new_block(self, storage: torch.UntypedStorage, size: int) -> _Block:
        block = _Block(storage, self._fell)
        block.cdata = storage._cdata
        block.address = storage.data_ptr()
        block.size = size
        block.serial = -1
        self._held[block.cdata] = block
        return block

    def _plumbing(self) -> RawStack:
        return self._stacks.take_any(2)

    def _read_log(self) -> None:
        """Give each export in the log its handle, in the order in which torch made them."""
        while self._log:
            block, name, slot, stack, step = self._log.popleft()
            file = self._files.get(name)
            if file is None:
                file = self._files[name] = _CounterFile(os.fsdecode(name))
            if block.serial < 0:
                block.serial = len(self._blocks)
                block.handles = []
                block.dropped = block.freed = False
                self._blocks.append(block)
            handle = _Handle(file, slot, block, stack, step)
            file.handles.append(handle)
            file.unreturned += 1
            block.handles.append(handle)
            self._handles.append(handle)
            self._custody.wrap(block.serial, handle)

    def _fell(self, block: weakref.ref[torch.UntypedStorage]) -> None:
        """The last owner of an exported storage is gone; torch looks at its counter next."""
        assert isinstance(block, _Block)
        if not self._revivals.doubts(block):
            self._fallen.append(block)
            self._swept(None)

    def _watch_open(self, storage: torch.UntypedStorage) -> _Opened:
        watch = _Opened(storage, self._closed)
        watch.cdata, watch.index = storage._cdata, len(self._opened)
        return watch

    def _closed(self, watch: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(watch, _Opened)
        self._revivals.doubts(watch)

    def _settle_doubted(self, doubted: list[_Block | _Opened], living: Mapping[int, torch.UntypedStorage]) -> None:
        """A collection is over: what lives all the same is watched anew."""
        self._read_log()
        for end in doubted:
            storage = living.get(end.cdata)
            if isinstance(end, _Opened):
                if storage is not None:
                    self._opened[end.index] = (self._watch_again(end, storage), *self._opened[end.index][1:])
            elif storage is None or self._held.get(end.cdata) is not end or storage.data_ptr() != end.address:
                self._fallen.append(end)
            else:
                self._hold_again(end, storage)
        self._swept(None)

    def _watch_again(self, end: _Opened, storage: torch.UntypedStorage) -> _Opened:
        watch = _Opened(storage, self._closed)
        watch.cdata, watch.index = end.cdata, end.index
        return watch

    def _hold_again(self, end: _Block, storage: torch.UntypedStorage) -> None:
        block = self._new_block(storage, end.size)
        block.serial, block.handles, block.dropped, block.freed = end.serial, end.handles, end.dropped, end.freed
        self._blocks[block.serial] = block
        for handle in block.handles:
            handle.block = block

    def _swept(self, sweep: Callable[[], list[int]] | None) -> None:
        """Follow torch: read the log, `sweep` as torch just did, then the drops. A storage may die in the middle of it
        (the collector runs when it likes), so drops are queued, and whoever is at it takes them. Never sweep when torch
        did not: what is released and not collected is still in limbo.
        """
        if self._busy:
            return
        self._busy = True
        try:
            self._read_log()
            if sweep is not None:
                self._set_free(sweep())
            while self._fallen:
                block = self._fallen.pop()
                self._read_log()  # its own exports among them
                if block.dropped:
                    continue
                block.dropped = True
                if self._held.get(block.cdata) is block:
                    del self._held[block.cdata]
                self._set_free(self._custody.drop(block.serial))
        finally:
            self._busy = False

    def _set_free(self, serials: Iterable[int]) -> None:
        for serial in serials:
            block = self._blocks[serial]
            block.freed = True
            for handle in block.handles:
                handle.freed_at = handle.counter()

    def _unmap(self) -> None:
        """Let the oldest counter files go whose handles were all given back."""
        done = [name for name, file in self._files.items() if not file.unreturned]
        for name in done[: max(0, len(self._files) - _MAPPED_FILES)]:
            self._files.pop(name).close()

    def _find_emptied(self) -> None:
        """A storage that was resized to nothing gave its block back without dying."""
        for block in list(self._held.values()):
            storage = block()
            if storage is not None and storage.nbytes() == 0:
                self._fallen.append(block)

    def _find_freed_by_allocator(self, live: Mapping[int, object]) -> None:
        """The allocator collects by itself on a miss, and nobody is told. What is in limbo has no storage any more: so
        where its address is not handed out, or belongs to a later block, it was freed.
        """
        if any(block.address not in live for block in self._held.values()):
            return  # this device's list does not go by the addresses that its storages show
        latest = {block.address: block.serial for block in self._blocks}
        doubtful: list[_Block] = []
        for block in [self._blocks[serial] for serial in self._custody.limbo]:
            if block.address not in live or latest[block.address] != block.serial:
                self._was_freed(block)
            elif all((handle.counter() or 0) < 1 for handle in self._custody.slots(block.serial)):
                doubtful.append(block)
        if doubtful:
            taken = _addresses_of_tensors(frozenset(block.address for block in doubtful))
            for block in doubtful:
                if block.address in taken:
                    self._was_freed(block)

    def _was_freed(self, block: _Block) -> None:
        wrapped = self._custody.slots(block.serial)
        self._custody.forget(block.serial)
        self._set_free([block.serial])
        if self._unsigned:  # whatever the counter reads by now, it was 0 when the block went
            for handle in wrapped:
                handle.freed_at = 0

    def _export(self, handle: _Handle, worded: _Wording, live: _Stacks) -> Export:
        block = handle.block
        return Export(
            rank=self.rank,
            counter_file=handle.name,
            slot=handle.slot,
            bytes=-(-block.size // _ROUND) * _ROUND,
            stack=worded(handle.stack),
            step=handle.step,
            counter=handle.counter(),
            dropped=block.dropped,
            freed=block.freed,
            allocated=() if block.freed else live.get(block.address, ()),
            block=block.serial,
            freed_at=handle.freed_at,
        )

    def _open(self, opened: _LoggedOpen, order: int, worded: _Wording) -> Open:
        storage, name, slot, stack, step = opened
        return Open(
            rank=self.rank,
            counter_file=os.fsdecode(name),
            slot=slot,
            stack=worded(stack),
            step=step,
            released=int(storage is None or storage() is None),
            order=order,
        )


def _live_blocks(wanted: frozenset[int]) -> _Stacks | None:
    """Which of the `wanted` addresses torch's allocator has handed out now, and the stacks that allocated them (empty
    where nobody recorded them). None where the device has no such list.
    """
    import torch

    try:
        segments = _snapshot(torch._C._cuda_memorySnapshot)["segments"]
    except (AttributeError, RuntimeError, KeyError):
        return None
    live: dict[int, tuple[str, ...]] = {}
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            address = block.get("address", address)
            if address in wanted and block["state"].startswith("active"):
                live[address] = format_frames(block.get("frames", ()))
            address += block["size"]
    return live


def _snapshot(read: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    try:
        return read(None)
    except TypeError:  # up to torch 2.6 it takes no memory pool
        return read()


def _addresses_of_tensors(wanted: frozenset[int]) -> set[int]:
    """Which of the `wanted` addresses are the beginning of the storage of a tensor that is alive in this process."""
    import torch

    found: set[int] = set()
    with torch._C.DisableTorchFunction():
        for thing in gc.get_objects():
            if issubclass(type(thing), torch.Tensor):
                with contextlib.suppress(RuntimeError, NotImplementedError):  # no storage: sparse, meta, fake
                    found.add(torch._C.TensorBase.untyped_storage(thing).data_ptr())
    return found & wanted

"""CUDA IPC between processes that emulate: handles, counters in shared memory, and blocks that outlive their tensor.

The lifetime rules are `ipc.Producer`'s; this module gives them real memory. An exported storage moves, in place, onto a
memory file, which a peer maps through /proc/PID/fd/N: real writes arrive. The file stays open until the contract says
that the block is free. Counters lie in another memory file of the exporter, laid out as torch's (the 64-bit word at
byte 64 + 8 x slot), and are changed under a lock. No file has a name, so a SIGKILL leaves nothing behind.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import struct
from typing import TYPE_CHECKING, Any

import torch

from ..contract import Producer, Slot, open_counters, reads_unsigned
from . import weakrefs
from .allocator import Block
from .memory import Foreign, Memory, Owned
from .patches import Patches

if TYPE_CHECKING:
    from . import Emulation

HEADER = 64
WORD = struct.Struct("=q")
COUNTERS_SIZE = HEADER + 10_000 * WORD.size
HANDLE = struct.Struct("=2sQQQQ32s")
MAGIC = b"\x02c"


class Shared:
    """An exported block: the memory file that holds it, and its identity."""

    __slots__ = ("block", "fd", "handle")

    def __init__(self, block: Block, fd: int, handle: bytes) -> None:
        self.block = block
        self.fd = fd
        self.handle = handle


class Sharing:
    """The exports and opens of one process."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._shared: dict[int, Shared] = {}
        self._counters: dict[int, int] = {}
        self.producer = Producer(self._read, unsigned=reads_unsigned())
        memory.collect_limbo = self._collect
        memory.drop_exported = self._drop

    # -- exporter --------------------------------------------------------------------------------------------------

    def export(self, storage: torch.UntypedStorage) -> tuple[Any, ...]:
        """What `_share_cuda_` answers: device, handle, bytes, offset, counter file, slot, event, whether it counts."""
        owned = self._memory.where.get(storage._cdata)
        if owned is None:
            raise RuntimeError("_share_cuda_: only available on CUDA")
        if owned.foreign is not None:
            raise RuntimeError(
                "Attempted to send CUDA tensor received from another process; this is not currently supported. "
                "Consider cloning before sending."
            )
        if owned.block is None:
            return (owned.index, None, 0, 0, None, 0, None, False)
        with self._memory.reading():
            shared = self._shared.get(owned.block.address) or self._move(storage, owned, owned.block)
            waits = not self.producer.export_waits
            slot = self.producer.export(owned.block.address)
            owned.exported = True
            fd = self._counter_file(slot)
            os.pwrite(fd, WORD.pack(1), HEADER + WORD.size * slot.offset)
        counter = f"/proc/{os.getpid()}/fd/{fd}#{os.fstat(fd).st_ino}".encode()
        event = WORD.pack(slot.offset).ljust(64, b"\0")
        return (owned.index, shared.handle, owned.nbytes, 0, counter, slot.offset, event, waits)

    def _move(self, storage: torch.UntypedStorage, owned: Owned, block: Block) -> Shared:
        fd = _onto_memory_file(storage)
        facts = os.fstat(fd)
        handle = HANDLE.pack(MAGIC, os.getpid(), fd, facts.st_ino, facts.st_dev, b"")
        shared = self._shared[block.address] = Shared(block, fd, handle)
        return shared

    def _counter_file(self, slot: Slot) -> int:
        fd = self._counters.get(slot.file)
        if fd is None:
            fd = self._counters[slot.file] = os.memfd_create("sglmem-counters", os.MFD_CLOEXEC)
            os.ftruncate(fd, COUNTERS_SIZE)
        return fd

    def _read(self, slot: Slot) -> int:
        return int(WORD.unpack(os.pread(self._counters[slot.file], WORD.size, HEADER + WORD.size * slot.offset))[0])

    def _drop(self, block: Block) -> None:
        self._free(self.producer.drop(block.address))

    def _collect(self) -> None:
        self._free(self.producer.collect())

    def _free(self, addresses: list[int]) -> None:
        for address in addresses:
            shared = self._shared.pop(address)
            os.close(shared.fd)
            self._memory.release(shared.block)
        while self.producer.gone:
            fd = self._counters.pop(self.producer.gone.pop(), None)
            if fd is not None:
                os.close(fd)

    def close(self) -> None:
        """Give back every file. In a process that was forked from the one that exported, only its own copies."""
        for shared in self._shared.values():
            os.close(shared.fd)
        for fd in self._counters.values():
            os.close(fd)
        self._shared.clear()
        self._counters.clear()

    # -- consumer --------------------------------------------------------------------------------------------------

    def open(
        self, index: int, handle: bytes, size: int, offset: int, counter: bytes, slot: int
    ) -> torch.UntypedStorage:
        """Map a peer's block as a storage of device `index`. Its last use subtracts 1 from the counter."""
        magic, pid, fd, inode, device, _ = HANDLE.unpack(handle)
        if magic != MAGIC:
            raise RuntimeError("CUDA error: invalid argument (not a handle of an emulated device)")
        if pid == os.getpid():
            raise RuntimeError(
                "CUDA error: invalid device context (a handle cannot be opened by the process that made it)"
            )
        path = f"/proc/{pid}/fd/{fd}"
        try:
            facts = os.stat(path)
        except OSError as error:
            raise RuntimeError(_GONE.format(pid)) from error
        if (facts.st_ino, facts.st_dev) != (inode, device):
            raise RuntimeError(_GONE.format(pid))
        storage = _mapped(path, size)
        address = self._memory.allocators[index].address(size)
        here = os.getpid()

        def released() -> None:
            if os.getpid() == here:  # not in a process forked from this one, which never opened it
                subtract(counter.decode(), slot)

        foreign = Foreign(address, released)
        self._memory.own_foreign(storage, index, foreign)
        return storage


_GONE = (
    "CUDA error: invalid resource handle (the block that this handle names is gone: process {} freed it or has ended)"
)


def subtract(counter_file: str, slot: int) -> None:
    """One release: the counter goes down by 1. Where the exporter is gone, nothing happens, as in torch."""
    fd = open_counters(counter_file, os.O_RDWR)
    if fd is None:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        at = HEADER + WORD.size * slot
        os.pwrite(fd, WORD.pack(WORD.unpack(os.pread(fd, WORD.size, at))[0] - 1), at)
    finally:
        os.close(fd)


def _mapped(path: str, size: int) -> torch.UntypedStorage:
    """The file as a storage: the Python object that lives as long as the memory, which up to torch 2.6 is another than
    `from_file` gives.
    """
    with torch._C._DisableTorchDispatch():
        storage: Any = torch.UntypedStorage.from_file(path, shared=True, nbytes=size)
        return torch.empty(0, dtype=torch.uint8).set_(storage).untyped_storage()


def _onto_memory_file(storage: torch.UntypedStorage) -> int:
    """Move a storage onto shared memory without changing the storage's identity; a file descriptor of it."""
    if not hasattr(storage, "_swap_data_ptr_"):
        fd, _ = storage._share_fd_cpu_()
        return os.dup(fd)
    size = storage.nbytes()
    fd = os.memfd_create("sglmem-block", os.MFD_CLOEXEC)
    _write_all(fd, storage, size)
    with torch._C._DisableTorchDispatch():
        storage._swap_data_ptr_(_mapped(f"/proc/self/fd/{fd}", size))
    return fd


def _write_all(fd: int, storage: torch.UntypedStorage, size: int) -> None:
    """Write a storage's bytes to a file: less than copying through a mapping, which faults in page by page."""
    address = torch._C.StorageBase.data_ptr(storage)  # type: ignore[attr-defined]
    view = memoryview((ctypes.c_char * size).from_address(address))
    done = 0
    while done < size:
        done += os.pwrite(fd, view[done:], done)


def raise_file_limit() -> None:
    """Every exported block is an open file: allow as many as the system lets this process have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def install(patches: Patches, emulation: Emulation) -> None:
    """Let storages export and open emulated handles until `patches` are undone."""
    weakrefs.install(patches, emulation.memory)
    sharing = emulation.sharing
    cls = torch.UntypedStorage

    def _share_cuda_(self: torch.UntypedStorage, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return sharing.export(self)

    def _new_shared_cuda(
        kind: Any,
        device: int,
        handle: bytes,
        size: int,
        offset: int,
        counter: bytes,
        slot: int,
        event: bytes,
        waits: bool,
    ) -> torch.UntypedStorage:
        index = emulation.index(torch.device("cuda", device))
        return sharing.open(index, handle, size, offset, counter, slot)

    def _release_ipc_counter_cuda(kind: Any, counter: bytes, slot: int, *, device: Any = None) -> None:
        subtract(counter.decode(), slot)

    patches.set(cls, "_share_cuda_", _share_cuda_)
    patches.set(cls, "_new_shared_cuda", classmethod(_new_shared_cuda))
    patches.set(cls, "_release_ipc_counter_cuda", classmethod(_release_ipc_counter_cuda))


__all__ = ["Shared", "Sharing", "install", "raise_file_limit", "subtract"]

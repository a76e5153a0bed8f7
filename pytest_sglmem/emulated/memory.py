"""Which storage lives on which emulated device, from its first sight to its last use, and what it counts there.

An emulated block's bytes are an ordinary CPU storage; this module says that the storage belongs to a device, counts it
there by the rules of `allocator.py`, and hears of its end through a weak reference to the `UntypedStorage`, which dies
exactly when the last view, autograd node or C++ owner is gone.

A death is noted without a lock, because it can happen inside any allocation (the cyclic collector runs there); whoever
holds the lock, or takes it next, counts it. Deaths are counted in the order in which they happened.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from ..sites import raw_stack
from .allocator import Allocator, Block, OutOfDeviceMemory

CPU = -1


class Death(weakref.ref):  # type: ignore[type-arg]
    """A weak reference to a storage that knows the key of what it watches."""

    __slots__ = ("key",)
    key: int


class Owned:
    """A storage on a device: `block` is what it counts there; None for none of ours (empty, or opened over IPC)."""

    __slots__ = ("block", "device", "exported", "foreign", "index", "nbytes", "watch")

    def __init__(self, index: int, device: torch.device, nbytes: int, block: Block | None) -> None:
        self.index = index
        self.device = device
        self.nbytes = nbytes
        self.block = block
        self.exported = False
        self.foreign: Foreign | None = None
        self.watch: Death | None = None


class Foreign:
    """A block of another process, opened here: its address in this process, and what to do when its last use ends."""

    __slots__ = ("address", "released")

    def __init__(self, address: int, released: Callable[[], None]) -> None:
        self.address = address
        self.released = released


class Memory:
    """All emulated devices' memory in this process."""

    def __init__(self, devices: int, total: int) -> None:
        self.allocators = [Allocator(index, total, self._miss) for index in range(devices)]
        self.devices = [torch.device("cuda", index) for index in range(devices)]
        self.where: dict[int, Owned] = {}
        self.recording = False
        self.before_allocation: list[Callable[[int, int], None]] = []
        self.collect_limbo: Callable[[], None] = lambda: None
        self.drop_exported: Callable[[Block], None] = self.release
        self._lock = threading.Lock()
        self._dead: deque[int] = deque()

    # -- storages --------------------------------------------------------------------------------------------------

    def own(self, storage: torch.UntypedStorage, index: int, stream: int) -> Owned:
        """From now on `storage` lives on device `index`. Raises torch.OutOfMemoryError."""
        nbytes = storage.nbytes()
        block = self.allocate(index, nbytes, stream) if nbytes else None
        owned = Owned(index, self.devices[index], nbytes, block)
        self._watch(storage, owned)
        return owned

    def adopt_foreign(self, storage: torch.UntypedStorage, index: int, foreign: Foreign) -> None:
        """`storage` maps another process's block: on device `index`, counted there by that process and not here."""
        owned = Owned(index, self.devices[index], storage.nbytes(), None)
        owned.foreign = foreign
        self._watch(storage, owned)

    def resized(self, storage: torch.UntypedStorage, owned: Owned, stream: int) -> None:
        """The storage changed its size in place: a new block, then the old one goes, as on hardware."""
        nbytes = storage.nbytes()
        if nbytes == owned.nbytes:
            return
        old, owned.nbytes = owned.block, nbytes
        owned.block = self.allocate(owned.index, nbytes, stream) if nbytes else None
        if old is not None:
            with self._locked():
                self._end(owned, old)
        owned.exported = False

    def _watch(self, storage: torch.UntypedStorage, owned: Owned) -> None:
        key = storage._cdata
        watch = Death(storage, self._died)
        watch.key = key
        owned.watch = watch
        self.where[key] = owned

    def _died(self, watch: Death) -> None:
        self._dead.append(watch.key)
        self.settle()

    def settle(self) -> None:
        """Count the deaths that nobody counted yet, unless somebody is at it."""
        while self._dead and self._lock.acquire(blocking=False):
            try:
                self._count_deaths()
            finally:
                self._lock.release()

    def _count_deaths(self) -> None:
        while self._dead:
            owned = self.where.pop(self._dead.popleft(), None)
            if owned is None:
                continue
            if owned.foreign is not None:
                owned.foreign.released()
            elif owned.block is not None:
                self._end(owned, owned.block)

    def _end(self, owned: Owned, block: Block) -> None:
        if owned.exported:
            self.drop_exported(block)
        else:
            self.release(block)

    # -- blocks ----------------------------------------------------------------------------------------------------

    def allocate(self, index: int, nbytes: int, stream: int) -> Block:
        """A block on device `index`. Raises torch.OutOfMemoryError, worded as torch's."""
        for hook in self.before_allocation:
            hook(index, nbytes)
        frames = raw_stack(1, 64) if self.recording else ()
        allocator = self.allocators[index]
        with self._locked():
            try:
                return allocator.allocate(nbytes, stream, frames)
            except OutOfDeviceMemory as error:
                message = out_of_memory(allocator, error)
        raise torch.OutOfMemoryError(message)

    def release(self, block: Block) -> None:
        """The block goes back to its device's allocator. The lock is held."""
        self.allocators[self.index_of(block)].free(block)

    def index_of(self, block: Block) -> int:
        """The device that a block is on."""
        return block.segment.device

    def _miss(self) -> None:
        self.collect_limbo()

    def _locked(self) -> _Locked:
        return _Locked(self)

    def collect(self) -> None:
        """What `torch.cuda.ipc_collect` does."""
        with self._locked():
            self.collect_limbo()

    def reading(self) -> _Locked:
        """Hold this while reading numbers: every death so far is counted in them."""
        return _Locked(self)

    # -- of tensors ------------------------------------------------------------------------------------------------

    def find(self, tensor: torch.Tensor) -> Owned | None:
        """Where a tensor lives; None for one that is not emulated."""
        try:
            return self.where.get(_storage(tensor)._cdata)
        except (NotImplementedError, RuntimeError):
            return self._find_sparse(tensor)

    def _find_sparse(self, tensor: torch.Tensor) -> Owned | None:
        for part in sparse_parts(tensor):
            return self.where.get(_storage(part)._cdata)
        return None


class _Locked:
    """The memory's lock; the deaths that came meanwhile are counted before it is given back."""

    __slots__ = ("_memory",)

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def __enter__(self) -> None:
        self._memory._lock.acquire()
        self._memory._count_deaths()

    def __exit__(self, *_: Any) -> None:
        self._memory._count_deaths()
        self._memory._lock.release()
        self._memory.settle()


def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The dense tensors that a sparse one is made of; none for what has no memory at all."""
    layout = tensor.layout
    if layout is torch.sparse_coo:
        return (tensor._values(), tensor._indices())
    if layout in (torch.sparse_csr, torch.sparse_bsr):
        return (tensor.values(), tensor.crow_indices(), tensor.col_indices())
    if layout in (torch.sparse_csc, torch.sparse_bsc):
        return (tensor.values(), tensor.ccol_indices(), tensor.row_indices())
    return ()


def out_of_memory(allocator: Allocator, error: OutOfDeviceMemory) -> str:
    """The message, in the form of torch's."""
    reserved, allocated = allocator.reserved, allocator.allocated
    return (
        f"CUDA out of memory. Tried to allocate {_size(error.wanted)}. GPU {allocator.index} has a total capacity of "
        f"{_size(allocator.total)} of which {_size(max(0, allocator.total - reserved))} is free. "
        f"{'' if allocator.fraction == 1 else f'{_size(allocator.limit)} allowed; '}"
        f"Including non-PyTorch memory, this process has {_size(reserved)} memory in use. Of the allocated memory "
        f"{_size(allocated)} is allocated by PyTorch, and {_size(reserved - allocated)} is reserved by PyTorch but "
        "unallocated. (This device is emulated: emulated_cuda(memory=) says how much it has.)"
    )


def _size(size: int) -> str:
    """Bytes as torch writes them."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size} bytes"


_storage = torch._C.TensorBase.untyped_storage  # type: ignore[attr-defined]

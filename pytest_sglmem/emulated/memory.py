"""Which storage lives on which emulated device, from its first sight to its last use, and what it counts there.

An emulated block's bytes are an ordinary CPU storage; this module says that the storage belongs to a device, counts it
there by the rules of `allocator.py`, and hears of its end through a weak reference to the `UntypedStorage`, which dies
exactly when the last view, autograd node or C++ owner is gone.

A death is noted without a lock, because it can happen inside any allocation (the cyclic collector runs there); whoever
holds the lock, or takes it next, counts it. Deaths are counted in the order in which they happened. An allocation that
a finalizer asks for while its own thread holds the lock is counted as soon as the lock is given back.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping

import torch

from ..revivals import Revivals
from .allocator import Allocator, Block, OutOfDeviceMemory, Stack
from .history import History, stack

CPU = -1


class Death(weakref.ref):  # type: ignore[type-arg]
    """A weak reference to a storage that knows the key of what it watches."""

    __slots__ = ("key",)
    key: int


class Owned:
    """A storage on a device: `block` is what it counts there; None for none of ours (empty, or opened over IPC)."""

    __slots__ = ("block", "device", "exported", "foreign", "index", "nbytes", "over", "watch")

    def __init__(self, index: int, device: torch.device, nbytes: int) -> None:
        self.index = index
        self.device = device
        self.nbytes = nbytes
        self.block: Block | None = None
        self.exported = False
        self.foreign: Foreign | None = None
        self.over = False
        self.watch: Death | None = None

    @property
    def address(self) -> int:
        """Where it is, on the device; 0 for an empty storage."""
        if self.foreign is not None:
            return self.foreign.address
        return 0 if self.block is None else self.block.address


class Foreign:
    """A block of another process, opened here: its address in this process, and what to do when its last use ends."""

    __slots__ = ("address", "released")

    def __init__(self, address: int, released: Callable[[], None]) -> None:
        self.address = address
        self.released = released


class Memory:
    """All emulated devices' memory in this process."""

    def __init__(self, devices: int, total: int) -> None:
        self.history = History(devices)
        self.allocators = [Allocator(index, total, self._miss) for index in range(devices)]
        self.devices = [torch.device("cuda", index) for index in range(devices)]
        self.where: dict[int, Owned] = {}
        self.open = True
        self.collect_limbo: Callable[[], None] = lambda: None
        self.drop_exported: Callable[[Block], None] = self.release
        self.before_reading: Callable[[], None] = lambda: None
        self._pinned: dict[int, Death] = {}
        self._lock = threading.Lock()
        self._holder = 0
        self._dead: deque[Owned] = deque()
        self._late: deque[tuple[Owned, int, Stack]] = deque()
        self.revivals = Revivals(self._settle_doubted)

    # -- storages --------------------------------------------------------------------------------------------------

    def own(self, storage: torch.UntypedStorage, index: int, stream: int) -> Owned:
        """From now on `storage` lives on device `index`. Raises torch.OutOfMemoryError."""
        owned = Owned(index, self.devices[index], storage.nbytes())
        if owned.nbytes:
            self._obtain(owned, stream)
        self._watch(storage, owned)
        return owned

    def own_foreign(self, storage: torch.UntypedStorage, index: int, foreign: Foreign) -> None:
        """`storage` maps another process's block: on device `index`, counted there by that process and not here."""
        self.own_elsewhere(storage, index).foreign = foreign

    def own_elsewhere(self, storage: torch.UntypedStorage, index: int) -> Owned:
        """`storage` is on device `index`, and what it counts there is counted elsewhere (a wrapper: by its parts)."""
        owned = Owned(index, self.devices[index], storage.nbytes())
        self._watch(storage, owned)
        return owned

    def resized(self, storage: torch.UntypedStorage, owned: Owned, stream: int) -> None:
        """The storage may have changed its size in place: if so a new block, then the old one goes, as on hardware."""
        nbytes = storage.nbytes()
        if nbytes == owned.nbytes:
            return
        old, owned.block, owned.nbytes = owned.block, None, nbytes
        exported, owned.exported = owned.exported, False
        if nbytes:
            self._obtain(owned, stream)
        if old is not None:
            with self.locked():
                (self.drop_exported if exported else self.release)(old)

    def pin(self, storage: torch.UntypedStorage) -> None:
        """The storage is pinned host memory."""
        key = storage._cdata
        watch = Death(storage, lambda watch: self._pinned.pop(watch.key, None))
        watch.key = key
        self._pinned[key] = watch

    def is_pinned(self, storage: torch.UntypedStorage) -> bool:
        """Whether the storage is pinned host memory."""
        return storage._cdata in self._pinned

    def _watch(self, storage: torch.UntypedStorage, owned: Owned) -> None:
        key = storage._cdata
        watch = Death(storage, self._died)
        watch.key = key
        owned.watch = watch
        before = self.where.get(key)
        if before is not None:  # doubted so far: where its place is used again, it has ended
            self._dead.append(before)
        self.where[key] = owned

    # -- blocks ----------------------------------------------------------------------------------------------------

    def _obtain(self, owned: Owned, stream: int) -> None:
        frames = stack() if self.history.on else ()
        if self._holder == threading.get_ident():
            self._late.append((owned, stream, frames))
            return
        allocator = self.allocators[owned.index]
        self._lock.acquire()  # as `with self.locked()`, which would cost 1 us an operator here
        self._holder = threading.get_ident()
        try:
            if self._dead:
                self.count()
            owned.block = allocator.allocate(owned.nbytes, stream, frames)
        except OutOfDeviceMemory as error:
            raise torch.OutOfMemoryError(out_of_memory(allocator, error)) from None
        finally:
            self._holder = 0
            self._lock.release()
        if self._dead or self._late:
            self.settle()

    def expect(self, index: int, nbytes: int, stream: int) -> None:
        """Raise torch.OutOfMemoryError where a block of `nbytes` would not fit."""
        allocator = self.allocators[index]
        with self.locked():
            if allocator.fits(nbytes, stream):
                return
            try:
                allocator.free(allocator.allocate(nbytes, stream))
            except OutOfDeviceMemory as error:
                raise torch.OutOfMemoryError(out_of_memory(allocator, error)) from None

    def release(self, block: Block) -> None:
        """The block goes back to its device's allocator. The lock is held."""
        self.allocators[block.segment.device].free(block)

    def collect(self) -> None:
        """What `torch.cuda.ipc_collect` does."""
        with self.locked():
            self.collect_limbo()

    def reading(self) -> Locked:
        """Hold this while reading numbers: every death so far is counted in them."""
        self.before_reading()
        return Locked(self)

    def locked(self) -> Locked:
        """Hold this while changing what the allocators know."""
        return Locked(self)

    def record(self, enabled: str | None, context: str | None, most: int, clear: bool) -> None:
        """Start or stop recording, see `History.record`."""
        with self.locked():
            self.history.record(enabled, context, most, clear)
            for allocator in self.allocators:
                allocator.note = self.history.note if self.history.events else None

    def _miss(self) -> None:
        self.collect_limbo()

    # -- deaths ----------------------------------------------------------------------------------------------------

    def _died(self, watch: Death) -> None:
        if not self.revivals.doubts(watch):
            self._end(watch)
            self.settle()

    def _end(self, watch: Death) -> None:
        owned = self.where.get(watch.key)
        if owned is not None and owned.watch is watch:
            del self.where[watch.key]
            self._dead.append(owned)

    def _settle_doubted(self, doubted: list[Death], living: Mapping[int, torch.UntypedStorage]) -> None:
        for watch in doubted:
            owned, storage = self.where.get(watch.key), living.get(watch.key)
            if owned is not None and owned.watch is watch and storage is not None:
                owned.watch = Death(storage, self._died)
                owned.watch.key = watch.key
            else:
                self._end(watch)
        self.settle()

    def settle(self) -> None:
        """Count what nobody counted yet, unless somebody is at it."""
        while (self._dead or self._late) and self._lock.acquire(blocking=False):
            self._holder = threading.get_ident()
            try:
                self.count()
            finally:
                self._holder = 0
                self._lock.release()

    def count(self) -> None:
        """Count the deaths and the late allocations. The lock is held."""
        while self._dead:
            self._ended(self._dead.popleft())
        while self._late:
            owned, stream, frames = self._late.popleft()
            if not owned.over:
                try:
                    owned.block = self.allocators[owned.index].allocate(owned.nbytes, stream, frames)
                except OutOfDeviceMemory:
                    continue  # a finalizer's tensor: nobody is there to be told

    def _ended(self, owned: Owned) -> None:
        owned.over = True
        if owned.foreign is not None:
            owned.foreign.released()
        elif owned.block is not None and self.open:
            (self.drop_exported if owned.exported else self.release)(owned.block)

    # -- of tensors ------------------------------------------------------------------------------------------------

    def find(self, tensor: torch.Tensor) -> Owned | None:
        """Where a tensor lives; None for one that is not emulated. A wrapper lives where its first part does."""
        try:
            owned = self.where.get(storage_of(tensor)._cdata)
        except (NotImplementedError, RuntimeError):
            return next((self.find(part) for part in parts_of(tensor)), None)
        except ValueError:  # a parameter that was not given its shape yet answers next to nothing
            with torch._C.DisableTorchFunctionSubclass():
                return self.where.get(storage_of(tensor)._cdata)
        if owned is None and type(tensor).__torch_dispatch__ is not PLAIN:
            return next((self.find(part) for part in wrapped_in(tensor)), None)
        return owned


class Locked:
    """The memory's lock; the deaths that came meanwhile are counted before it is given back."""

    __slots__ = ("_memory",)

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def __enter__(self) -> None:
        memory = self._memory
        memory._lock.acquire()
        memory._holder = threading.get_ident()
        if memory._dead:
            memory.count()

    def __exit__(self, *_: object) -> None:
        memory = self._memory
        if memory._dead or memory._late:
            memory.count()
        memory._holder = 0
        memory._lock.release()
        if memory._dead or memory._late:
            memory.settle()


def parts_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors that one without a storage is made of: a sparse one, or one inside vmap; none for any other."""
    layout = tensor.layout
    if layout is torch.strided:
        wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        return (torch._C._functorch.get_unwrapped(tensor),) if wrapped else ()
    if layout is torch.sparse_coo:
        return (tensor._values(), tensor._indices())
    if layout in (torch.sparse_csr, torch.sparse_bsr):
        return (tensor.values(), tensor.crow_indices(), tensor.col_indices())
    if layout in (torch.sparse_csc, torch.sparse_bsc):
        return (tensor.values(), tensor.ccol_indices(), tensor.row_indices())
    return ()


def wrapped_in(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that a wrapper (DTensor and the like) says it is made of."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    for name in () if flatten is None else flatten()[0]:
        part = getattr(tensor, name)
        if isinstance(part, torch.Tensor):
            yield part


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


PLAIN = torch._C._disabled_torch_dispatch_impl  # the `__torch_dispatch__` of a class that has none of its own
storage_of = torch._C.TensorBase.untyped_storage  # type: ignore[attr-defined]

"""CUDA on a CPU: ordinary code written for a GPU runs unchanged, and its memory is counted as the GPU's would be.

An emulated tensor is a CPU tensor whose storage is known to live on an emulated device. `allocator.py` counts as
torch's caching allocator counts, `memory.py` knows which storage lives where, `dispatch.py` sees every operator,
`tensors.py` is what tensors say of themselves and how they move, `sharing.py` is CUDA IPC by the contract of
`pytest_sglmem.contract`, `driver.py` answers for torch's C layer, `surface.py` lists what is emulated.

It computes with CPU kernels: numbers are the CPU's, time says nothing about a GPU, and memory that kernels take for
themselves (workspaces, NCCL buffers) is not there. What is not emulated raises NotImplementedError with its name.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.multiprocessing
from torch.utils._device import _device_constructors as device_constructors

from . import (
    autocast,
    collectives,
    compiled,
    composites,
    driver,
    legacy,
    parallel,
    scripted,
    sharded,
    sharing,
    standins,
    streams,
    surface,
    tensors,
)
from .dispatch import Accounting, Plan
from .memory import CPU, Memory
from .patches import Patches
from .surface import refused, supported
from .threads import PerThread

__all__ = ["Emulation", "current", "emulated_cuda", "refused", "supported"]

_MARK = "_sglmem_emulation"


class Emulation:
    """The emulated devices of this process, from `emulated_cuda`'s entry to its exit."""

    def __init__(self, devices: int, memory: int) -> None:
        self.devices, self.total = devices, memory
        self.thread = PerThread()
        self.memory = Memory(devices, memory)
        self.sharing = sharing.Sharing(self.memory)
        self.generators = standins.Generators(devices)
        self.stream_types = streams.stream_types(self)
        self.collectives = collectives.Collectives(self)
        self._modes: list[Accounting] = []
        self._plans: dict[Any, Plan] = {}
        self._pid = os.getpid()
        self.memory.before_reading = self.collectives.sweep
        self.open = True

    def is_elsewhere(self) -> bool:
        """Whether this is a process forked from the one that emulates: as with CUDA, the device is not there."""
        return os.getpid() != self._pid

    def index(self, device: torch.device) -> int:
        """The index of a device, the current one where it says none. Raises RuntimeError for one that is not there, and
        in a process forked from the one that emulates.
        """
        if os.getpid() != self._pid:
            raise RuntimeError(
                "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the "
                "'spawn' start method"
            )
        index = self.thread.device if device.index is None else device.index
        if not 0 <= index < self.devices:
            raise RuntimeError(
                f"CUDA error: invalid device ordinal {index} (the emulated machine has {self.devices}: "
                "emulated_cuda(devices=) says how many)"
            )
        return index

    def index_of(self, device: Any) -> int | None:
        """The index of an emulated device, -1 for the CPU, None for any other; raises for one that is not there."""
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if device.type == "cuda":
            return self.index(device)
        return CPU if device.type == "cpu" else None

    def index_or_current(self, device: Any) -> int:
        """As `index`, for whatever torch takes as a device: None, an int, text, a torch.device."""
        if device is None or (isinstance(device, int) and device < 0):
            return self.thread.device
        return self.index(torch.device("cuda", device) if isinstance(device, int) else torch.device(device))

    def stream_number(self, index: int) -> int:
        """The current stream of a device in this thread."""
        return self.thread.streams.get(index, 0)

    def own(self, storage: torch.UntypedStorage, index: int) -> None:
        """The storage belongs to device `index` from now on."""
        self.memory.own(storage, index, self.stream_number(index))

    def aimed(self, target: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `function`; what it makes belongs to `target`, whatever its operators say."""
        self.cover_thread()
        thread = self.thread
        before, thread.target = thread.target, target
        try:
            return function(*args, **kwargs)
        finally:
            thread.target = before

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        """`Tensor.record_stream`: the block waits for that stream when it is freed."""
        owned = self.memory.find(tensor)
        if owned is None:
            raise RuntimeError("record_stream: only available on CUDA tensors")
        block = owned.block
        if block is not None and stream.stream_id != block.segment.stream:
            block.streams = (block.streams or set()) | {stream.stream_id}

    def cover_thread(self) -> None:
        """See the operators of the calling thread from now on."""
        thread = self.thread
        if thread.mode is None and self.open:
            thread.mode = Accounting(self, self._plans)
            self._modes.append(thread.mode)
            thread.mode.__enter__()

    def uncover_thread(self) -> None:
        """No longer see the operators of the calling thread."""
        mode, self.thread.mode = self.thread.mode, None
        if mode is not None:
            mode.__exit__(None, None, None)

    def close(self) -> None:
        """End the emulation: modes that are still on in other threads let everything pass from now on."""
        self.open = self.memory.open = False
        self.memory.revivals.stop()
        for mode in self._modes:
            mode.open = False
        self.sharing.close()


def current() -> Emulation | None:
    """The emulation that is on in this process, if any."""
    return getattr(torch.cuda, _MARK, None)


@contextmanager
def emulated_cuda(devices: int = 1, *, memory: int = 80 * 2**30) -> Iterator[Emulation]:
    """Let torch have `devices` emulated CUDA devices of `memory` bytes each, in this process, until the exit.

    Entered again inside, it gives the emulation that is on (ValueError where that has fewer devices). Threads that
    start meanwhile are covered. On exit everything replaced in torch is put back; tensors that are left are the CPU's.
    """
    if devices < 1:
        raise ValueError(f"devices must be >= 1 (got {devices})")
    if memory < 1:
        raise ValueError(f"memory must be >= 1 byte (got {memory})")
    on = current()
    if on is not None:
        if on.devices < devices:
            raise ValueError(f"an emulation of {on.devices} devices is on already (asked for {devices})")
        yield on
        return
    emulation = Emulation(devices, memory)
    emulation.memory.revivals.start()
    with compiled.eager(), Patches() as patches:
        _install(patches, emulation)
        emulation.cover_thread()
        try:
            yield emulation
        finally:
            emulation.uncover_thread()
            emulation.close()


def prepare() -> None:
    """Look up what an emulation replaces, for the processes forked from this one: to look at each of torch's functions
    and modules is to write to its page, and a forked process no longer shares a page that it wrote to (8 MB of them).
    """
    surface.public()
    driver.cuda_functions()
    scripted.known_builtins()
    device_constructors()
    if torch.distributed.is_available():
        collectives.importers(len(sys.modules))


def _install(patches: Patches, emulation: Emulation) -> None:
    if hasattr(torch._C, "_ensureCUDADeviceGuardSet"):  # a CUDA build on a machine without a GPU: its guards do nothing
        torch._C._ensureCUDADeviceGuardSet()
    known = scripted.known_builtins()
    device_constructors()  # remembers the factories as they are: they are replaced below
    sharing.raise_file_limit()
    patches.set(torch.cuda, _MARK, emulation)
    surface.install(patches, emulation)
    driver.install(patches, emulation)
    standins.install(patches, emulation)
    parallel.install(patches)
    legacy.install(patches)
    compiled.install(patches, emulation)
    scripted.install(patches, emulation)
    composites.install(patches, emulation)
    autocast.install(patches, emulation)
    tensors.install(patches, emulation)
    sharing.install(patches, emulation)
    collectives.install(patches, emulation)
    sharded.install(patches, emulation)
    scripted.tell_compiler(patches, known)
    _install_threads(patches, emulation)


def _install_threads(patches: Patches, emulation: Emulation) -> None:
    run = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def _bootstrap_inner(self: threading.Thread) -> None:
        emulation.cover_thread()
        try:
            run(self)
        finally:
            emulation.uncover_thread()

    patches.set(threading.Thread, "_bootstrap_inner", _bootstrap_inner)

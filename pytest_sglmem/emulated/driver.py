"""What torch's Python layer asks of its C layer about devices, streams and memory: `torch._C._cuda_*`, answered here.

Emulating at this level keeps torch's own `torch.cuda` and `torch.accelerator` above it: argument checks, shapes and
names are those of the torch at hand.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from .history import segment
from .patches import Patches
from .streams import CUDA_TYPE, pointer
from .surface import refuser

if TYPE_CHECKING:
    from . import Emulation

COMPUTE = (9, 0)
_IDENTITY = ("name", "uuid")


@dataclass(frozen=True)
class Properties:
    """What `torch.cuda.get_device_properties` says: a Hopper-like device that calls itself emulated."""

    index: int
    total_memory: int
    name: str = "emulated CUDA device"
    major: int = COMPUTE[0]
    minor: int = COMPUTE[1]
    multi_processor_count: int = 132
    warp_size: int = 32
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    regs_per_multiprocessor: int = 65536
    shared_memory_per_block: int = 48 << 10
    shared_memory_per_block_optin: int = 227 << 10
    shared_memory_per_multiprocessor: int = 228 << 10
    L2_cache_size: int = 50 << 20
    is_integrated: int = 0
    is_multi_gpu_board: int = 0
    gcnArchName: str = ""
    pci_device_id: int = 0
    pci_domain_id: int = 0

    @property
    def uuid(self) -> str:
        """The device's own."""
        return f"00000000-0000-0000-0000-{self.index:012d}"

    @property
    def pci_bus_id(self) -> int:
        """One a device."""
        return self.index + 1


class Devices:
    """Devices and streams."""

    def __init__(self, emulation: Emulation) -> None:
        self._emulation = emulation
        self._thread = emulation.thread
        self.properties = [Properties(index, emulation.total) for index in range(emulation.devices)]

    def count(self) -> int:
        """How many there are."""
        return len(self.properties)

    def current(self) -> int:
        """The thread's current one."""
        return self._thread.device

    def use(self, index: int) -> None:
        """Make it the thread's current one."""
        self._thread.device = self._emulation.index(torch.device("cuda", index))
        self._emulation.cover_thread()

    def exchange(self, index: int) -> int:
        """Make it the current one, and say which was; a negative index changes nothing."""
        before = self._thread.device
        if index < 0:
            return -1
        self.use(index)
        return before

    def synchronize(self, *_: Any) -> None:
        """Wait for everything: all is done, but not everything may be counted."""
        self._emulation.memory.before_reading()
        self._emulation.memory.settle()

    def can_access_peer(self, device: int, peer: int) -> bool:
        """Every other device, as NVLink would."""
        return device != peer

    def current_stream(self, index: int) -> tuple[int, int, int]:
        """As torch unpacks a stream: id, device, kind of device."""
        return (self._emulation.stream_number(index), index, CUDA_TYPE)

    def current_raw_stream(self, index: int) -> int:
        """The number that stands for the cudaStream_t."""
        return pointer(self._emulation.stream_number(index))

    def default_stream(self, index: int) -> tuple[int, int, int]:
        """As `current_stream`."""
        return (0, index, CUDA_TYPE)

    def external_stream(self, number: int, index: int) -> tuple[int, int, int]:
        """A stream that other code made."""
        stream = self._emulation.stream_types[1](number, device=index)
        return (stream.stream_id, index, CUDA_TYPE)

    def set_stream(self, stream_id: int, device_index: int, device_type: int = CUDA_TYPE) -> None:
        """Make it the current stream of its device, and its device the current one."""
        self.use(device_index)
        self._thread.streams[device_index] = stream_id

    def functions(self) -> dict[str, Callable[..., Any]]:
        """By the names of torch's C layer."""
        return {
            "_cuda_getDeviceCount": self.count,
            "_cuda_getDevice": self.current,
            "_cuda_setDevice": self.use,
            "_cuda_exchangeDevice": self.exchange,
            "_cuda_maybeExchangeDevice": self.exchange,
            "_cuda_synchronize": self.synchronize,
            "_cuda_canDeviceAccessPeer": self.can_access_peer,
            "_cuda_getCurrentStream": self.current_stream,
            "_cuda_getCurrentRawStream": self.current_raw_stream,
            "_cuda_getDefaultStream": self.default_stream,
            "_cuda_getStreamFromExternal": self.external_stream,
            "_cuda_setStream": self.set_stream,
            "_cuda_isCurrentStreamCapturing": lambda: False,
            "_cuda_getArchFlags": lambda: f"sm_{COMPUTE[0]}{COMPUTE[1]}",
            "_cuda_get_sync_debug_mode": lambda: 0,
            "_cuda_sleep": lambda cycles: None,
            "_cuda_init": lambda: None,
            "_get_accelerator": lambda: torch.device("cuda"),
            "_accelerator_getAccelerator": lambda: torch.device("cuda"),
            "_accelerator_deviceCount": self.count,
            "_accelerator_getDeviceIndex": self.current,
            "_accelerator_setDeviceIndex": self.use,
            "_accelerator_exchangeDevice": self.exchange,
            "_accelerator_maybeExchangeDevice": self.exchange,
            "_accelerator_synchronizeDevice": self.synchronize,
            "_accelerator_getStream": lambda index: torch.cuda.current_stream(index),
            "_accelerator_setStream": lambda stream: self.set_stream(stream.stream_id, stream.device_index),
        }


class Numbers:
    """What the allocators say."""

    def __init__(self, emulation: Emulation) -> None:
        self._emulation = emulation
        self._memory = emulation.memory

    def statistics(self, index: int) -> dict[str, Any]:
        """Nested, as torch flattens them."""
        with self._memory.reading():
            return self._memory.allocators[index].statistics()

    def free_and_total(self, device: Any = None) -> tuple[int, int]:
        """Bytes of the device that this process has not reserved, and all: other processes are not seen."""
        allocator = self._memory.allocators[self._emulation.index_or_current(device)]
        with self._memory.reading():
            return (allocator.total - allocator.reserved, allocator.total)

    def empty_cache(self, *_: Any) -> None:
        """Give what is cached back to the driver."""
        with self._memory.reading():
            self._memory.collect_limbo()
            for allocator in self._memory.allocators:
                allocator.empty()

    def reset_peaks(self, index: int) -> None:
        """The peaks are what is there now."""
        with self._memory.reading():
            self._memory.allocators[index].reset_peaks()

    def reset_accumulated(self, index: int) -> None:
        """What was allocated and freed so far is forgotten."""
        with self._memory.reading():
            self._memory.allocators[index].reset_accumulated()

    def set_fraction(self, fraction: float, index: int) -> None:
        """How much of the device the process may reserve."""
        self._memory.allocators[index].fraction = fraction

    def record(
        self,
        enabled: str | None = "all",
        context: str | None = "all",
        stacks: str = "all",
        max_entries: int = sys.maxsize,
        clear_history: bool = False,
        *_: Any,
        **__: Any,
    ) -> None:
        """Start or stop recording."""
        self._memory.record(enabled, context, max_entries, clear_history)

    def record_legacy(
        self, enabled: bool, context: bool = True, max_entries: int = 1, events: bool = False, *_: Any, **__: Any
    ) -> None:
        """Start or stop recording, as torch up to 2.0 was asked."""
        kind = ("all" if events or max_entries > 1 else "state") if enabled else None
        self._memory.record(kind, "alloc" if context else None, max_entries, False)

    def snapshot(self, pool: Any = None) -> dict[str, Any]:
        """Segments, blocks, stacks, events."""
        with self._memory.reading():
            segments = [
                segment(known, blocks)
                for allocator in self._memory.allocators
                for known, blocks in allocator.segments()
            ]
            traces = self._memory.history.traces()
        if isinstance(pool, tuple) and len(pool) > 2 and not pool[2]:
            traces = [[] for _ in traces]
        return {
            "segments": segments,
            "device_traces": traces,
            "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "expandable_segments": False},
            "external_annotations": [],
        }

    def functions(self) -> dict[str, Callable[..., Any]]:
        """By the names of torch's C layer."""
        return {
            "_cuda_memoryStats": self.statistics,
            "_cuda_emptyCache": self.empty_cache,
            "_cuda_ipc_collect": self._memory.collect,
            "_cuda_resetPeakMemoryStats": self.reset_peaks,
            "_cuda_resetAccumulatedMemoryStats": self.reset_accumulated,
            "_cuda_setMemoryFraction": self.set_fraction,
            "_cuda_getMemoryFraction": lambda index: self._memory.allocators[index].fraction,
            "_cuda_getAllocatorBackend": lambda: "native",
            "_cuda_record_memory_history": self.record,
            "_cuda_record_memory_history_legacy": self.record_legacy,
            "_cuda_isHistoryEnabled": lambda: self._memory.history.on,
            "_cuda_memorySnapshot": self.snapshot,
            "_accelerator_isAllocatorInitialized": lambda: True,
            "_accelerator_emptyCache": self.empty_cache,
            "_accelerator_getDeviceStats": self.statistics,
            "_accelerator_resetPeakStats": self.reset_peaks,
            "_accelerator_resetAccumulatedStats": self.reset_accumulated,
            "_accelerator_getMemoryInfo": self.free_and_total,
        }


@functools.cache
def cuda_functions() -> tuple[str, ...]:
    """The names of the C layer's functions about CUDA, in this build of torch."""
    return tuple(
        name
        for name, value in vars(torch._C).items()
        if name.startswith("_cuda_") and isinstance(value, types.BuiltinFunctionType)
    )


def _refuse_the_rest(patches: Patches, functions: Iterable[str]) -> None:
    """A function of the C layer that is not answered raises with its name, whether this build has it or not."""

    def refused(name: str) -> Callable[..., Any]:
        return refuser(f"torch._C.{name}", cast("Callable[..., Any]", lambda: None))

    for name in cuda_functions():
        if name not in functions:
            patches.set(torch._C, name, refused(name))

    def __getattr__(name: str) -> Any:
        if name.startswith("_cuda_"):
            return refused(name)
        raise AttributeError(f"module 'torch._C' has no attribute {name!r}")

    patches.set(torch._C, "__getattr__", __getattr__)


def install(patches: Patches, emulation: Emulation) -> None:
    """Answer for the C layer until `patches` are undone."""
    cuda_functions()  # as they are: what is put in their place below is no function of C
    devices, numbers = Devices(emulation), Numbers(emulation)
    functions = devices.functions() | numbers.functions()
    for name, function in functions.items():
        patches.set(torch._C, name, function)
    _refuse_the_rest(patches, functions)
    cuda = torch.cuda
    for owner in (cuda, cuda.streams):
        for kind in emulation.stream_types:
            patches.set(owner, kind.__name__, kind)
    for name, value in {
        "_initialized": True,
        "_cached_device_count": emulation.devices,
        "_is_in_bad_fork": emulation.is_elsewhere,
        "_exchange_device": devices.exchange,
        "_maybe_exchange_device": devices.exchange,
        "_get_device_properties": lambda index: devices.properties[index],
        "is_available": lambda: not emulation.is_elsewhere(),
        "device_count": devices.count,
        "default_generators": emulation.generators.defaults,
    }.items():
        patches.set(cuda, name, value)
    for owner in (cuda, cuda.memory):
        patches.set(owner, "mem_get_info", numbers.free_and_total)
    patches.set(cuda.graphs, "_cuda_isCurrentStreamCapturing", functions["_cuda_isCurrentStreamCapturing"])
    patches.set(torch.backends.cuda, "is_built", lambda: True)
    patches.set(torch.backends.cudnn, "is_acceptable", lambda tensor: False)  # torch's would warn that it is not there

"""What torch's Python layer asks of its C layer about devices, streams and memory: `torch._C._cuda_*`, answered here.

Emulating at this level keeps torch's own `torch.cuda` above it: argument checks, shapes and names are those of the torch
at hand.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from .allocator import Block, Segment
from .patches import Patches
from .streams import CUDA_TYPE, pointer

if TYPE_CHECKING:
    from . import Emulation

KEEPS = ("state", "all")


class Driver:
    """The functions of `torch._C` that begin with `_cuda_`, without that beginning."""

    def __init__(self, emulation: Emulation) -> None:
        self._emulation = emulation
        self._memory = emulation.memory
        self._thread = emulation.thread

    # -- devices ---------------------------------------------------------------------------------------------------

    def getDeviceCount(self) -> int:
        return len(self._memory.devices)

    def getDevice(self) -> int:
        return self._thread.device

    def setDevice(self, index: int) -> None:
        self._thread.device = self._emulation.index(torch.device("cuda", index))
        self._emulation.cover_thread()

    def exchangeDevice(self, index: int) -> int:
        before = self._thread.device
        if index < 0:
            return -1
        self.setDevice(index)
        return before

    def maybeExchangeDevice(self, index: int) -> int:
        return self.exchangeDevice(index)

    def synchronize(self) -> None:
        self._memory.settle()

    def canDeviceAccessPeer(self, device: int, peer: int) -> bool:
        return device != peer

    def getDeviceProperties(self, index: int) -> Any:
        total = self._memory.allocators[index].total
        return SimpleNamespace(
            name="emulated CUDA device",
            major=9,
            minor=0,
            total_memory=total,
            multi_processor_count=132,
            warp_size=32,
            max_threads_per_multi_processor=2048,
            regs_per_multiprocessor=65536,
            shared_memory_per_block=49152,
            shared_memory_per_block_optin=232448,
            shared_memory_per_multiprocessor=233472,
            L2_cache_size=50 << 20,
            is_integrated=0,
            is_multi_gpu_board=0,
            gcnArchName="",
            uuid=f"00000000-0000-0000-0000-{index:012d}",
            pci_bus_id=index,
            pci_device_id=0,
            pci_domain_id=0,
        )

    # -- streams ---------------------------------------------------------------------------------------------------

    def getCurrentStream(self, index: int) -> tuple[int, int, int]:
        return (self._thread.streams.get(index, 0), index, CUDA_TYPE)

    def getCurrentRawStream(self, index: int) -> int:
        return pointer(self._thread.streams.get(index, 0))

    def getDefaultStream(self, index: int) -> tuple[int, int, int]:
        return (0, index, CUDA_TYPE)

    def setStream(self, stream_id: int, device_index: int, device_type: int) -> None:
        self._thread.device = device_index
        self._thread.streams[device_index] = stream_id
        self._emulation.cover_thread()

    def isCurrentStreamCapturing(self) -> bool:
        return False

    # -- memory ----------------------------------------------------------------------------------------------------

    def memoryStats(self, index: int) -> dict[str, Any]:
        with self._memory.reading():
            return self._memory.allocators[index].statistics()

    def emptyCache(self) -> None:
        with self._memory.reading():
            self._memory.collect_limbo()
            for allocator in self._memory.allocators:
                allocator.empty()

    def ipc_collect(self) -> None:
        self._memory.collect()

    def resetPeakMemoryStats(self, index: int) -> None:
        with self._memory.reading():
            self._memory.allocators[index].reset_peaks()

    def resetAccumulatedMemoryStats(self, index: int) -> None:
        with self._memory.reading():
            self._memory.allocators[index].reset_accumulated()

    def setMemoryFraction(self, fraction: float, index: int) -> None:
        self._memory.allocators[index].fraction = fraction

    def getMemoryFraction(self, index: int) -> float:
        return self._memory.allocators[index].fraction

    def getAllocatorBackend(self) -> str:
        return "native"

    def record_memory_history(self, enabled: Any = "all", context: Any = "all", *_: Any, **__: Any) -> None:
        self._memory.recording = enabled is not None and context is not None

    def memorySnapshot(self, pool: Any = None) -> dict[str, Any]:
        with self._memory.reading():
            segments = [
                _segment(segment, blocks)
                for allocator in self._memory.allocators
                for segment, blocks in allocator.segments()
            ]
        return {
            "segments": segments,
            "device_traces": [[] for _ in self._memory.allocators],
            "allocator_settings": {},
            "external_annotations": [],
        }


def _segment(segment: Segment, blocks: list[Block]) -> dict[str, Any]:
    live = [block for block in blocks if block.state != "inactive"]
    return {
        "device": segment.device,
        "address": segment.address,
        "total_size": segment.size,
        "allocated_size": sum(block.size for block in live if block.state == "active_allocated"),
        "active_size": sum(block.size for block in live),
        "requested_size": sum(block.requested for block in live),
        "stream": pointer(segment.stream),
        "segment_type": "small" if segment.small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": _frames(segment.frames),
        "blocks": [_block(block) for block in blocks],
    }


def _block(block: Block) -> dict[str, Any]:
    return {
        "address": block.address or block.segment.address + block.offset,
        "size": block.size,
        "requested_size": block.requested,
        "state": block.state,
        "frames": _frames(block.frames),
    }


def _frames(frames: Any) -> list[dict[str, Any]]:
    return [{"filename": code.co_filename, "line": line, "name": code.co_name} for code, line in frames]


def install(patches: Patches, emulation: Emulation) -> None:
    """Answer for the C layer until `patches` are undone."""
    driver = Driver(emulation)
    for name in dir(driver):
        if not name.startswith("_"):
            patches.set(torch._C, f"_cuda_{name}", getattr(driver, name))
    cuda = torch.cuda
    Stream, ExternalStream, Event = emulation.stream_types
    for owner in (cuda, cuda.streams):
        for kind in (Stream, ExternalStream, Event):
            patches.set(owner, kind.__name__, kind)
    patches.set(cuda, "_initialized", True)
    patches.set(cuda, "_cached_device_count", driver.getDeviceCount())
    patches.set(cuda, "_is_in_bad_fork", lambda: False)
    patches.set(cuda, "_exchange_device", driver.exchangeDevice)
    patches.set(cuda, "_maybe_exchange_device", driver.maybeExchangeDevice)
    patches.set(cuda, "_get_device_properties", driver.getDeviceProperties)
    patches.set(cuda, "is_available", lambda: True)
    patches.set(cuda, "device_count", driver.getDeviceCount)
    patches.set(cuda.graphs, "_cuda_isCurrentStreamCapturing", driver.isCurrentStreamCapturing)
    patches.set(cuda, "default_generators", emulation.generators)

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        allocator = emulation.memory.allocators[emulation.index_or_current(device)]
        with emulation.memory.reading():
            return (allocator.total - allocator.reserved, allocator.total)

    for owner in (cuda, cuda.memory):
        patches.set(owner, "mem_get_info", mem_get_info)
    patches.set(torch.backends.cuda, "is_built", lambda: True)

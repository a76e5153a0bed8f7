"""What a live process says about its device: bytes now, and which lines own the live blocks.

One code path for the real and the emulated device: both answer through `torch._C._cuda_memoryStats` and
`torch._C._cuda_memorySnapshot`. The raw snapshot is used because `torch.cuda.memory._snapshot()` takes 5 to 6.5 s for
10,000 blocks and the call under it 0.02 s.

A block is dated by the frame that the tracer leaves in its allocation stack (see `stamped`), because a real allocator
hands out the same address again; where there is no such frame (another thread, setup), by the census that first saw
its address. It keeps no tensor and allocates nothing on the device.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter
from pathlib import Path
from types import FunctionType, TracebackType
from typing import Any, TypeVar

import torch

from . import sites
from .records import LiveBlocks, Reading

_STAMP = "sglmem_cycle_"
_LIVE = "active_allocated"  # what waits for a stream to let go of it is no longer allocated
_ROUND = 512  # the allocator's smallest unit, bytes
_dumps = pickle.dumps  # as it is before any fault is armed
_frame_key = itemgetter("filename", "line", "name")
Stack = tuple[str, ...]
G = TypeVar("G")
R = TypeVar("R")


def reading(device: int, *, outside: bool = False) -> Reading:
    """Bytes of `device` that this process has now. `outside`: also ask the driver's NVML for what is not torch's
    (about a millisecond; None where nothing can tell).
    """
    stats = torch._C._cuda_memoryStats(device)
    live = stats["allocated_bytes"]["all"]["current"]
    blocks = stats["allocation"]["all"]["current"]
    reserved = stats["reserved_bytes"]["all"]["current"]
    return Reading(live, blocks, reserved, outside_bytes(device, reserved) if outside else None)


def outside_bytes(device: int, reserved: int) -> int | None:
    """Device bytes of this process that torch's allocator did not reserve: contexts, NCCL, raw cudaMalloc.

    None where there is no NVML, or where it cannot see this process (a container with its own process numbers).
    """
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID("GPU-" + str(torch.cuda.get_device_properties(device).uuid))
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except Exception:  # NVML raises a class of its own a failure; none of them is the user's
        return None
    used = {process.pid: process.usedGpuMemory for process in processes}.get(os.getpid())
    return None if used is None else max(0, used - reserved)


class Recording:
    """Allocation stacks are recorded inside `with Recording():`, Python frames only, and as before afterwards."""

    def __enter__(self) -> Recording:
        torch.cuda.current_device()  # there must be a context before there is an allocator to ask
        self._was_on = bool(getattr(torch._C, "_cuda_isHistoryEnabled", lambda: False)())
        if not self._was_on:
            torch.cuda.memory._record_memory_history(enabled="state", context="state", stacks="python")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if not self._was_on:
            torch.cuda.memory._record_memory_history(enabled=None)


def stamped(cycle: int) -> Callable[[Callable[[G], R], G], R]:
    """A function that calls `step(g)` and whose name in a recorded stack says which cycle it was."""
    name = f"{_STAMP}{cycle}"
    names = {"co_name": name, **({"co_qualname": name} if sys.version_info >= (3, 11) else {})}
    code = _call.__code__.replace(**names)  # type: ignore[arg-type]
    return FunctionType(code, _call.__globals__, name)


def _call(step: Callable[[G], R], geometry: G) -> R:
    return step(geometry)


class Census:
    """The live blocks of one device, by allocation stack and birth. One instance a trace: it dates by what it saw."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._seen: dict[int, tuple[int, int]] = {}  # address -> size, birth
        self._known: dict[tuple[object, ...], tuple[Stack, int | None]] = {}
        self._last: dict[tuple[Stack, int], list[int]] = {}

    def take(self, cycle: int) -> tuple[LiveBlocks, ...]:
        """The live blocks at the end of `cycle` (-1: before the first)."""
        added: dict[tuple[Stack, int], list[int]] = {}
        held: dict[tuple[Stack, int], list[int]] = {}
        seen: dict[int, tuple[int, int]] = {}
        for address, size, frames in _live_blocks(self._device):
            stack, born = self._stack_and_stamp(frames)
            if born is None:
                before = self._seen.get(address)
                born = before[1] if before is not None and before[0] == size else cycle
            seen[address] = size, born
            total = added.setdefault((stack, born), [0, 0])
            total[0] += size
            total[1] += 1
            held.setdefault((stack, born), []).append(address)
        self._seen, self._last = seen, held
        return tuple([LiveBlocks(stack, born, total[0], total[1]) for (stack, born), total in added.items()])

    def addresses(self, stack: Stack, *, since: int = -1) -> list[int]:
        """Addresses of the blocks of `stack` in the last census, born in cycle `since` or later, oldest first."""
        births = sorted((born, where) for (one, born), where in self._last.items() if one == stack and born >= since)
        return [address for _, where in births for address in where]

    def _stack_and_stamp(self, frames: list[Mapping[str, object]]) -> tuple[Stack, int | None]:
        key = tuple(map(_frame_key, frames))
        found = self._known.get(key)
        if found is None:
            frames, stamp = _below_the_harness(key)  # type: ignore[arg-type, assignment]
            stack = sites.format_frames(frames) or _innermost(frames)  # type: ignore[arg-type]
            found = self._known[key] = stack, stamp
        return found


def _below_the_harness(frames: tuple[tuple[object, ...], ...]) -> tuple[tuple[tuple[object, ...], ...], int | None]:
    """The frames up to the one that called into the code under test, and the cycle of that call; None in setup."""
    for at, (filename, _, name) in enumerate(frames):
        if filename == __file__ and str(name).startswith(_STAMP):
            return frames[:at], int(str(name)[len(_STAMP) :])
    return frames, None


def _innermost(frames: tuple[tuple[object, ...], ...]) -> Stack:
    """Where no frame is the user's (a fault, a thread of torch): the line that allocated, whoever's it is."""
    for filename, line, name in frames[:1]:
        return (f"{os.sep.join(str(filename).split(os.sep)[-2:])}:{line} in {name}",)
    return ()


def _live_blocks(device: int) -> Iterator[tuple[int, int, list[Mapping[str, object]]]]:
    """Address, bytes as asked for (rounded to 512) and recorded frames of every live block.

    The bytes are those asked for because a block's own size also depends on which cached block happened to be reused.
    """
    for segment in raw_snapshot()["segments"]:
        if segment["device"] != device:
            continue
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == _LIVE:
                asked = block.get("requested_size", block["size"])
                yield block.get("address", address), -(-asked // _ROUND) * _ROUND or _ROUND, block.get("frames", ())
            address += block["size"]


def raw_snapshot() -> dict[str, Any]:
    """Torch's own snapshot of all devices, without the seconds that its wrapper adds."""
    try:
        return torch._C._cuda_memorySnapshot(None)
    except TypeError:  # before there were private pools to ask for, it took no argument
        return torch._C._cuda_memorySnapshot()  # type: ignore[call-arg]


def save_snapshot(path: str | Path) -> None:
    """Write torch's own snapshot, as `torch.cuda.memory._dump_snapshot` does: it opens in torch's memory viewer."""
    with io.BufferedWriter(io.FileIO(path, "w")) as file:
        file.write(_dumps(raw_snapshot()))

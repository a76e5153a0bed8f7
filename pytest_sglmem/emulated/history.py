"""What `torch.cuda.memory._record_memory_history` records: the stack of each live block, and, where asked, every event.

A stack is taken as code objects and instruction offsets, innermost first, and turned into lines only when a snapshot is
asked for: about 2 us an allocation, and nothing at all while recording is off. Frames of the emulation are left out, as
they are not there on hardware; C++ frames are not recorded.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from .allocator import Block, Segment, Stack
from .streams import pointer

LONGEST = 256  # frames of one stack
_OURS = frozenset(str(path) for path in Path(__file__).parent.glob("*.py"))


class History:
    """Whether allocations are recorded, and the events recorded so far, by device."""

    def __init__(self, devices: int) -> None:
        self.stacks = False
        self.events = False
        self._free_stacks = False
        self._entries: list[deque[dict[str, Any]]] = [deque() for _ in range(devices)]

    @property
    def on(self) -> bool:
        """Whether anything is recorded."""
        return self.stacks or self.events

    def record(self, enabled: str | None, context: str | None, most: int, clear: bool) -> None:
        """Start or stop: `enabled` None, "state", "all"; `context` None, "state", "alloc", "all", as torch means them.

        Raises RuntimeError for any other word.
        """
        if enabled not in (None, "state", "all"):
            raise RuntimeError("Expected memory history enabled to be 'state' or 'all'")
        if context not in (None, "state", "alloc", "all"):
            raise RuntimeError("Expected memory history context to be 'state', 'alloc' or 'all'")
        self.stacks = enabled is not None and context is not None
        self.events = enabled == "all"
        self._free_stacks = context == "all"
        if enabled is None or clear:
            most_kept: list[deque[dict[str, Any]]] = [deque() for _ in self._entries]
        else:
            most_kept = [deque(old, maxlen=min(most, sys.maxsize)) for old in self._entries]
        self._entries = most_kept

    def note(self, device: int, action: str, address: int, size: int, stream: int, frames: Stack = ()) -> None:
        """One event of the allocator."""
        if action.startswith("free") and self._free_stacks:
            frames = stack()
        self._entries[device].append(
            {
                "action": action,
                "addr": address,
                "size": size,
                "stream": pointer(stream),
                "time_us": time.time_ns() // 1000,
                "compile_context": "N/A",
                "frames": frames,
            }
        )

    def traces(self) -> list[list[dict[str, Any]]]:
        """The events of each device, oldest first."""
        return [[{**entry, "frames": lines(entry["frames"])} for entry in entries] for entries in self._entries]


def stack() -> Stack:
    """The Python stack of the caller without the emulation's own frames, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    found: list[tuple[CodeType, int]] = []
    while frame is not None and len(found) < LONGEST:
        code = frame.f_code
        if code.co_filename not in _OURS:
            found.append((code, frame.f_lasti))
        frame = frame.f_back
    return tuple(found)


def lines(frames: Stack, worded: dict[tuple[int, int], dict[str, Any]] | None = None) -> list[dict[str, Any]]:
    """The frames in the form torch gives them. `worded`: frames that this snapshot has already, by code and offset."""
    worded = {} if worded is None else worded
    found: list[dict[str, Any]] = []
    for code, offset in frames:
        key = id(code), offset  # hashing the code itself takes longer than all the rest
        frame = worded.get(key)
        if frame is None:
            frame = {"filename": code.co_filename, "line": _line(code, offset), "name": code.co_name}
            worded[key] = frame
        found.append(frame)
    return found


@lru_cache(maxsize=16384)
def _line(code: CodeType, offset: int) -> int:
    for start, end, line in code.co_lines():
        if start <= offset < end:
            return code.co_firstlineno if line is None else line
    return code.co_firstlineno


def segment(known: Segment, blocks: list[Block]) -> dict[str, Any]:
    """A segment in the form torch's snapshot has."""
    live = [block for block in blocks if block.state != "inactive"]
    worded: dict[tuple[int, int], dict[str, Any]] = {}
    return {
        "device": known.device,
        "address": known.address,
        "total_size": known.size,
        "allocated_size": sum(block.size for block in live if block.state == "active_allocated"),
        "active_size": sum(block.size for block in live),
        "requested_size": sum(block.requested for block in live),
        "stream": pointer(known.stream),
        "segment_type": "small" if known.small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": lines(known.frames),
        "blocks": [_block(block, worded) for block in blocks],
    }


def _block(block: Block, worded: dict[tuple[int, int], dict[str, Any]]) -> dict[str, Any]:
    return {
        "address": block.address or block.segment.address + block.offset,
        "size": block.size,
        "requested_size": block.requested,
        "state": block.state,
        "frames": lines(block.frames, worded),
    }

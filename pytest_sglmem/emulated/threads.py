"""What each thread has of its own: its current device, its current stream on each device, and the dispatch mode.

A `TorchDispatchMode` covers one thread. Threads that start while the device is emulated get theirs in
`threading.Thread`'s bootstrap; a thread that ran before gets it at its first call of something in `torch.cuda` or of a
factory or transfer that is asked for an emulated device, and keeps it.
"""

from __future__ import annotations

import threading
from typing import Any


class PerThread(threading.local):
    """One thread's state. `target`: where the next new storage belongs whatever its operator says (-1: to the CPU)."""

    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, int] = {}
        self.entered: list[tuple[int, int, int]] = []
        self.target: int | None = None
        self.mode: Any = None
        self.last = 0

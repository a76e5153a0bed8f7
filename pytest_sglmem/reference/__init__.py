"""Reference implementations of two fixes, and beside them the shapes they replaced.

`UlyssesAllToAll` (a CUDA IPC handle for every peer) and `CrashDumpHistory` (a history kept as pickled bytes) are what
a project's own code can be checked against. They are loaded on first use: `CrashDumpHistory` needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .crash_history import CrashDumpHistory as CrashDumpHistory
    from .ulysses import UlyssesAllToAll as UlyssesAllToAll

_HOME = {"UlyssesAllToAll": "ulysses", "CrashDumpHistory": "crash_history"}
__all__ = list(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)

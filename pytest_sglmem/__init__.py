"""pytest-sglmem: memory that goes missing in multi-GPU PyTorch servers, found before it is merged.

The public names are loaded on first use, so that importing the package (or loading its pytest plugin) imports
neither torch nor numpy.
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version

# The one public name that is also a module's. Taken here, it is the function for good; taken on first use, the import
# system would put the module in its place as soon as anything imports it.
from .judge import judge

_HOME = {
    "Trace": "records",
    "Verdict": "records",
    "Growth": "records",
    "trace": "tracing",
    "LeakError": "judge",
    "CyclicMemoryWarning": "judge",
    "LateReleaseWarning": "judge",
    "IpcContractWarning": "judge",
    "GrowthError": "objects",
    "RankError": "world",
    "RankRaised": "world",
    "RankDied": "world",
    "RankSilent": "world",
    "World": "world",
    "emulated_cuda": "emulated",
    "ipc_audit": "ipc",
    "Geometry": "geometry",
    "geometries": "geometry",
}
__all__ = [*_HOME, "judge", "reference"]

try:
    __version__ = version("pytest-sglmem")
except PackageNotFoundError:  # running from a source tree that nobody installed
    __version__ = "0"


def __getattr__(name: str) -> object:
    if name == "reference":
        return importlib.import_module(".reference", __name__)
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

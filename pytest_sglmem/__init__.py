"""pytest-sglmem: memory that goes missing in multi-GPU PyTorch servers, found before it is merged.

The public names are loaded on first use, so that importing the package (or loading its pytest plugin) imports
neither torch nor numpy.
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

# The one public name that is also a module's. Taken here, it is the function for good; taken on first use, the import
# system would put the module in its place as soon as anything imports it.
from .judge import judge

if TYPE_CHECKING:  # what `__getattr__` finds, for type checkers: the package is typed
    from . import reference as reference
    from .emulated import emulated_cuda as emulated_cuda
    from .geometry import Geometry as Geometry
    from .geometry import geometries as geometries
    from .ipc import ipc_audit as ipc_audit
    from .judge import CyclicMemoryWarning as CyclicMemoryWarning
    from .judge import IpcContractWarning as IpcContractWarning
    from .judge import LateReleaseWarning as LateReleaseWarning
    from .judge import LeakError as LeakError
    from .objects import GrowthError as GrowthError
    from .records import Growth as Growth
    from .records import Trace as Trace
    from .records import Verdict as Verdict
    from .tracing import trace as trace
    from .world import RankDied as RankDied
    from .world import RankError as RankError
    from .world import RankRaised as RankRaised
    from .world import RankSilent as RankSilent
    from .world import World as World

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
    "RankWarning": "world",
    "OutputsDiffer": "live_bytes",
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

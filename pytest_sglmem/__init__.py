"""pytest-sglmem: memory that goes missing in multi-GPU PyTorch servers, found before it is merged.

The public names are loaded on first use, so that importing the package (or loading its pytest plugin) imports
neither torch nor numpy.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

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
    from .judge import UnjudgedTraceWarning as UnjudgedTraceWarning
    from .judge import judge as judge
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

    __version__: str

_HOME = {
    "Trace": "records",
    "Verdict": "records",
    "Growth": "records",
    "trace": "tracing",
    "judge": "judge",
    "LeakError": "judge",
    "CyclicMemoryWarning": "judge",
    "LateReleaseWarning": "judge",
    "IpcContractWarning": "judge",
    "UnjudgedTraceWarning": "judge",
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
__all__ = [*_HOME, "reference"]


class _Package(ModuleType):
    """This package. `judge` is a public function and a module's name: the import system, which puts a module into its
    package once it is loaded, puts the function there instead.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if name == "judge" and isinstance(value, ModuleType):
            value = value.judge
        super().__setattr__(name, value)

    def __reduce__(self) -> tuple[object, tuple[str]]:
        """By name, as any module crosses to the ranks; pickles know that of the plain type only."""
        return importlib.import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> object:
    if name == "__version__":
        return _version()
    if name == "reference":
        return importlib.import_module(".reference", __name__)
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("pytest-sglmem")
    except PackageNotFoundError:  # running from a source tree that nobody installed
        return "0"


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, "__version__"])

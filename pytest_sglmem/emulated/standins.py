"""Classes that stand in for torch's own where a C++ constructor knows no CUDA: device, Generator, Stream, Event.

A stand-in makes what the emulated device needs and passes everything else to torch's class. It equals torch's class,
has its attributes, and its instances are those of torch's class, so checks written either way hold.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .memory import CPU
from .patches import Patches

if TYPE_CHECKING:
    from . import Emulation


class _StandIn(type):
    """The type of a class that stands in for `real`."""

    real: type
    make: Callable[..., Any]
    also: tuple[type, ...]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.make(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, (cls.real, *cls.also))

    def __subclasscheck__(cls, other: Any) -> bool:
        return issubclass(other, (cls.real, *cls.also))

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.real, name)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.real

    def __hash__(cls) -> int:
        return hash(cls.real)

    def __repr__(cls) -> str:
        return repr(cls.real)


def stand_in(real: type, make: Callable[..., Any], also: tuple[type, ...] = ()) -> type:
    """A class for which `make` makes the instances; those of `also` count as its instances too."""
    names = {"real": real, "make": staticmethod(make), "also": also, "__doc__": real.__doc__}
    return _StandIn(real.__name__, (), {**names, "__module__": real.__module__, "__qualname__": real.__qualname__})


class DeviceGenerator(torch._C.Generator):
    """A random number generator of an emulated device: the CPU's, with a device of its own."""

    index: int

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The emulated device."""
        return torch.device("cuda", self.index)


class Generators:
    """The generators of the emulated devices. C++ hands them on as other Python objects, so they go by their number."""

    def __init__(self, devices: int) -> None:
        self._known: weakref.WeakValueDictionary[int, DeviceGenerator] = weakref.WeakValueDictionary()
        self.defaults = tuple(self.make(index) for index in range(devices))

    def make(self, index: int) -> DeviceGenerator:
        """A new generator of device `index`."""
        generator = DeviceGenerator()
        generator.index = index
        self._known[generator._cdata] = generator  # type: ignore[attr-defined]
        return generator

    def device(self, generator: torch.Generator) -> torch.device:
        """Where a generator that came from C++ belongs."""
        known = self._known.get(generator._cdata)  # type: ignore[attr-defined]
        return torch.device("cpu") if known is None else known.device

    def check(self, generator: torch.Generator, kind: str) -> None:
        """Raise RuntimeError, worded as torch's, for a generator of another kind of device."""
        found = self.device(generator).type
        if found != kind:
            raise RuntimeError(f"Expected a '{kind}' device type for generator but found '{found}'")


def install(patches: Patches, emulation: Emulation) -> None:
    """Let the stand-ins be torch's classes until `patches` are undone."""
    real_device, real_generator, real_stream, real_event = torch.device, torch.Generator, torch.Stream, torch.Event
    Stream, _, Event = emulation.stream_types

    def device(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and type(args[0]) is int:
            return real_device("cuda", args[0])
        return real_device(*args, **kwargs)

    def generator(device: Any = None) -> Any:
        index = CPU if device is None else emulation.index_of(device)
        if index is None or index == CPU:
            return real_generator() if device is None else real_generator(device)
        return emulation.generators.make(index)

    def stream(device: Any = None, *args: Any, **kwargs: Any) -> Any:
        kind = kwargs.get("device_type")
        if kind is None and (device is None or emulation.index_of(device) not in (None, CPU)):
            return Stream(device, **kwargs)
        return real_stream(*args, **kwargs) if device is None else real_stream(device, *args, **kwargs)

    def event(device: Any = None, **kwargs: Any) -> Any:
        if device is None or emulation.index_of(device) not in (None, CPU):
            return Event(**kwargs)
        return real_event(device, **kwargs)

    patches.set(torch, "device", stand_in(real_device, device))
    patches.set(torch, "Generator", stand_in(real_generator, generator))
    patches.set(torch, "Stream", stand_in(real_stream, stream))
    patches.set(torch, "Event", stand_in(real_event, event, also=(Event,)))

"""TorchScript while the device is emulated: code for the CPU compiles and runs as ever, code for CUDA is refused.

Scripted code asks C++ which device a tensor is on, and C++ takes an emulated tensor for a CPU tensor: it would answer
wrongly. So a scripted or traced function raises NotImplementedError where it meets an emulated tensor or asks for one.
The compiler finds torch's functions by their identity, so it is told of those that replace them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.jit import _builtins
from torch.utils._python_dispatch import TorchDispatchMode

from .memory import Memory
from .patches import Patches

if TYPE_CHECKING:
    from . import Emulation


class _Watch(TorchDispatchMode):
    """Sees the operators of one call of scripted code."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self._memory = memory
        self.refused: NotImplementedError | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`, unless it is about an emulated device."""
        kwargs = kwargs or {}
        if any(map(_is_cuda, (*args, *kwargs.values()))) or on_device(self._memory, (args, kwargs)):
            self.refused = _refusal(str(func))
            raise self.refused
        return func(*args, **kwargs)


def _refusal(what: str) -> NotImplementedError:
    return NotImplementedError(
        f"{what} on CUDA in code of torch.jit (script, trace) is not emulated: scripted code would take the tensor for "
        "a CPU tensor; leave the function unscripted"
    )


def _is_cuda(value: object) -> bool:
    return isinstance(value, torch.device) and value.type == "cuda"


def on_device(memory: Memory, values: Any) -> bool:
    """Whether there is an emulated tensor in `values`."""
    return any(memory.find(tensor) is not None for tensor in _tensors(values))


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))


def install(patches: Patches, emulation: Emulation) -> None:
    """Let scripted code refuse emulated tensors until `patches` are undone."""
    memory = emulation.memory
    for kind in (torch._C.ScriptFunction, torch._C.ScriptMethod):
        patches.set(kind, "__call__", _refusing(kind.__call__, memory))
    for name in ("trace", "trace_module"):
        patches.set(torch.jit, name, _untraced(getattr(torch.jit, name), memory))
    load = torch.jit.load

    @functools.wraps(load)
    def load_here(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if map_location is not None and torch.device(map_location).type == "cuda":
            raise NotImplementedError("torch.jit.load(map_location='cuda') is not emulated: scripted code is the CPU's")
        return load(f, map_location, *args, **kwargs)

    patches.set(torch.jit, "load", load_here)


def _untraced(trace: Callable[..., Any], memory: Memory) -> Callable[..., Any]:
    @functools.wraps(trace)
    def trace_here(*args: Any, **kwargs: Any) -> Any:
        if on_device(memory, (args, kwargs)):
            raise _refusal(f"torch.jit.{trace.__name__}")
        return trace(*args, **kwargs)

    return trace_here


def _refusing(call: Callable[..., Any], memory: Memory) -> Callable[..., Any]:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if on_device(memory, (args, kwargs)) or any(map(_is_cuda, (*args, *kwargs.values()))):
            raise _refusal(f"a call of {getattr(self, 'name', 'forward')!r}")
        with _Watch(memory) as watch:
            try:
                return call(self, *args, **kwargs)
            except Exception as error:
                if watch.refused is not None:
                    raise watch.refused from error
                raise

    return __call__


def known_builtins() -> dict[int, str]:
    """The compiler's table of torch's functions, by identity, to be asked for before any of them is replaced."""
    return _builtins._get_builtin_table()


def tell_compiler(patches: Patches, known: dict[int, str]) -> None:
    """The functions that `patches` replaced compile to what they replace, until `patches` are undone."""
    for before, now in _functions(patches.replaced()):
        operator = known.get(id(before))
        if operator is not None:
            patches.put(known, id(now), operator)


def _functions(replaced: Iterable[tuple[object, object]]) -> Iterator[tuple[object, object]]:
    return ((before, now) for before, now in list(replaced) if callable(before) and callable(now))

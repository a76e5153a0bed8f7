"""What of `torch.cuda` and `torch.accelerator` is emulated, name by name; every other public name raises.

`SUPPORTED` is the published list (the README's table is made from it): each name with what to know of it. A public
callable that is not in it is replaced by one that raises NotImplementedError with its name: it never answers wrongly.
"""

from __future__ import annotations

import functools
import inspect
import types
from typing import TYPE_CHECKING, Any

import torch
import torch.cuda.comm
import torch.cuda.jiterator
import torch.cuda.nccl
import torch.cuda.profiler
import torch.cuda.tunable

from .patches import Patches
from .standins import stand_in

if TYPE_CHECKING:
    from . import Emulation

_AS_TORCH = "as torch"
_DONE = "returns at once: every operator has finished when its call returns"
_RANDOM = "each device has a generator of its own; the numbers are those of the CPU's algorithm"
_COUNTED = "counted by torch's own rules (512-byte blocks, segments, splitting, reuse)"
_OBJECTS = "identity, current stream of each thread and device, the allocator's streams; the work itself is synchronous"

SUPPORTED: dict[str, str] = {
    **dict.fromkeys(
        (
            *("torch.cuda.current_device", "torch.cuda.device", "torch.cuda.device_count", "torch.cuda.device_of"),
            *("torch.cuda.init", "torch.cuda.is_available", "torch.cuda.is_initialized", "torch.cuda.set_device"),
            *("torch.cuda.memory_snapshot", "torch.cuda.memory_summary", "torch.cuda.get_allocator_backend"),
            *("torch.cuda.get_per_process_memory_fraction", "torch.cuda.set_per_process_memory_fraction"),
            *("torch.cuda.memory_stats", "torch.cuda.memory_stats_as_nested_dict", "torch.cuda.ipc_collect"),
            *("torch.cuda.reset_accumulated_memory_stats", "torch.cuda.reset_peak_memory_stats"),
            *("torch.cuda.reset_max_memory_allocated", "torch.cuda.reset_max_memory_cached"),
            *("torch.cuda.comm.broadcast", "torch.cuda.comm.broadcast_coalesced", "torch.cuda.comm.gather"),
            *("torch.cuda.comm.reduce_add", "torch.cuda.comm.reduce_add_coalesced", "torch.cuda.comm.scatter"),
            *("torch.accelerator.current_accelerator", "torch.accelerator.current_device_idx"),
            *("torch.accelerator.current_device_index", "torch.accelerator.device_count"),
            *("torch.accelerator.device_index", "torch.accelerator.is_available"),
            *("torch.accelerator.set_device_idx", "torch.accelerator.set_device_index"),
            *("torch.accelerator.memory_stats", "torch.accelerator.reset_accumulated_memory_stats"),
            *("torch.accelerator.reset_peak_memory_stats", "torch.cuda.CudaError", "torch.cuda.DeferredCudaCallError"),
            *("torch.cuda.cudaStatus", "torch.cuda.AcceleratorError", "torch.cuda.OutOfMemoryError"),
        ),
        _AS_TORCH,
    ),
    **dict.fromkeys(
        (
            *("torch.cuda.memory_allocated", "torch.cuda.max_memory_allocated", "torch.cuda.memory_reserved"),
            *("torch.cuda.max_memory_reserved", "torch.cuda.memory_cached", "torch.cuda.max_memory_cached"),
            *("torch.cuda.empty_cache", "torch.accelerator.empty_cache", "torch.accelerator.memory_allocated"),
            *("torch.accelerator.max_memory_allocated", "torch.accelerator.memory_reserved"),
            "torch.accelerator.max_memory_reserved",
        ),
        _COUNTED,
    ),
    **dict.fromkeys(
        (*("torch.cuda.mem_get_info", "torch.accelerator.get_memory_info"),),
        "total: emulated_cuda(memory=); free: less what this process reserved (other processes are not seen)",
    ),
    **dict.fromkeys(("torch.cuda.synchronize", "torch.accelerator.synchronize"), _DONE),
    **dict.fromkeys(
        (
            *("torch.cuda.Stream", "torch.cuda.ExternalStream", "torch.cuda.StreamContext", "torch.cuda.stream"),
            *("torch.cuda.current_stream", "torch.cuda.default_stream", "torch.cuda.set_stream"),
            *("torch.cuda.get_stream_from_external", "torch.accelerator.current_stream"),
            "torch.accelerator.set_stream",
        ),
        _OBJECTS,
    ),
    "torch.cuda.Event": "elapsed_time is this process's clock; a handle opened elsewhere is done",
    "torch.cuda.is_current_stream_capturing": "False: graphs are not emulated",
    **dict.fromkeys(
        (
            *("torch.cuda.get_rng_state", "torch.cuda.get_rng_state_all", "torch.cuda.set_rng_state"),
            *("torch.cuda.set_rng_state_all", "torch.cuda.manual_seed", "torch.cuda.manual_seed_all"),
            *("torch.cuda.seed", "torch.cuda.seed_all", "torch.cuda.initial_seed"),
        ),
        _RANDOM,
    ),
    **dict.fromkeys(
        (
            *("torch.cuda.get_device_properties", "torch.cuda.get_device_name", "torch.cuda.get_device_capability"),
            *("torch.cuda.get_arch_list", "torch.cuda.get_gencode_flags", "torch.cuda.is_bf16_supported"),
            "torch.cuda.is_tf32_supported",
        ),
        "a Hopper-like device (9.0) that calls itself emulated",
    ),
    "torch.cuda.can_device_access_peer": "True between any two devices",
    "torch.cuda.get_sync_debug_mode": "0: waiting is not watched",
    **dict.fromkeys(
        (
            *("torch.cuda.nvtx.range_push", "torch.cuda.nvtx.range_pop", "torch.cuda.nvtx.range_start"),
            *("torch.cuda.nvtx.range_end", "torch.cuda.nvtx.mark", "torch.cuda.nvtx.range"),
        ),
        "taken, and recorded nowhere",
    ),
}

_MODULES = (
    *("torch.cuda", "torch.cuda.memory", "torch.cuda.random", "torch.cuda.graphs", "torch.cuda.nccl"),
    *("torch.cuda.comm", "torch.cuda.nvtx", "torch.cuda.profiler", "torch.cuda.tunable", "torch.cuda.gds"),
    *("torch.cuda.green_contexts", "torch.accelerator", "torch.accelerator.memory"),
)
_ALIASES = {
    "torch.cuda.memory": "torch.cuda",
    "torch.cuda.random": "torch.cuda",
    "torch.cuda.graphs": "torch.cuda",
    "torch.accelerator.memory": "torch.accelerator",
}


def supported() -> dict[str, str]:
    """What is emulated of the torch at hand: each public name, and what to know of it."""
    here = {name for _, name, _ in public()}
    return {name: note for name, note in sorted(SUPPORTED.items()) if name in here}


def refused() -> tuple[str, ...]:
    """The public names of the torch at hand that raise NotImplementedError while the device is emulated."""
    return tuple(sorted({name for _, name, _ in public() if name not in SUPPORTED}))


@functools.cache
def public() -> tuple[tuple[types.ModuleType, str, str], ...]:
    """Every public callable: the module that has it, its published name, its name there."""
    found = []
    for path in _MODULES:
        module = _module(path)
        for name in [] if module is None else _names(module):
            value = getattr(module, name, None)
            if callable(value) and not isinstance(value, types.ModuleType) and not _is_legacy(name):
                short = _ALIASES.get(path, path)
                published = short if hasattr(_module(short), name) else path
                found.append((module, f"{published}.{name}", name))
    return tuple(found)  # type: ignore[arg-type]


def _module(path: str) -> types.ModuleType | None:
    value: Any = torch
    for part in path.split(".")[1:]:
        value = getattr(value, part, None)
    return value


def _names(module: types.ModuleType) -> list[str]:
    declared = getattr(module, "__all__", None)
    return list(declared) if declared else [name for name in vars(module) if not name.startswith("_")]


def _is_legacy(name: str) -> bool:
    """torch.cuda.FloatTensor and the like, which raise on a CPU by themselves; the deprecated torch.cuda.amp."""
    return name.endswith(("Tensor", "Storage")) or name == "check_error"


def install(patches: Patches, emulation: Emulation) -> None:
    """Replace what is not emulated by what raises, until `patches` are undone."""
    for module, name, attribute in public():
        real = getattr(module, attribute, None)  # gone where the code under test took it away
        if name not in SUPPORTED and real is not None:
            patches.set(module, attribute, refuser(name, real))
    patches.set(torch.cuda.nvtx, "_nvtx", _Ranges())
    jiterator = torch.cuda.jiterator
    for name in ("_create_jit_fn", "_create_multi_output_jit_fn"):
        patches.set(jiterator, name, refuser(f"torch.cuda.jiterator.{name}", getattr(jiterator, name)))
    patches.set(torch.autograd.profiler.profile, "__init__", _without_device_times(torch.autograd.profiler.profile))


def refuser(name: str, real: Any) -> Any:
    """What stands in for `real`, a function or a class, and raises NotImplementedError with `name` when called."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(
            f"{name} is not emulated: on a GPU it would work (emulated.supported() says what does)"
        )

    if inspect.isclass(real):
        kind = stand_in(real, refuse)
        for attribute, value in vars(real).items():
            if isinstance(value, (staticmethod, classmethod)) and not attribute.startswith("_"):
                setattr(kind, attribute, staticmethod(refuse))
        return kind
    refuse.__name__ = refuse.__qualname__ = name.rpartition(".")[2]
    refuse.__doc__ = real.__doc__
    if hasattr(real, "__wrapped__"):  # torch's compiler looks for it when it is imported
        refuse.__wrapped__ = real.__wrapped__  # type: ignore[attr-defined]
    return refuse


def _without_device_times(cls: Any) -> Any:
    real = cls.__init__

    @functools.wraps(real)
    def __init__(self: Any, *args: Any, use_cuda: bool = False, use_device: str | None = None, **kwargs: Any) -> None:
        real(self, *args, use_device=None if use_device == "cuda" else use_device, **kwargs)

    return __init__


class _Ranges:
    """NVTX without a profiler."""

    def __init__(self) -> None:
        self._depth = 0

    def rangePushA(self, message: str) -> int:
        self._depth += 1
        return self._depth - 1

    def rangePop(self) -> int:
        self._depth = max(0, self._depth - 1)
        return self._depth

    def rangeStartA(self, message: str) -> int:
        return 1

    def rangeEnd(self, number: int) -> None:
        pass

    def markA(self, message: str) -> None:
        pass

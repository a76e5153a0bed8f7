"""What makes tensors from nothing, from data, or from parts: which of torch's factories need help to know the device.

Most say `device=` down to the dispatcher, where `dispatch.py` reads it; here an int becomes a device on the way. What
C++ builds above the dispatcher (`torch.tensor` and the like, the sparse ones) is built on the CPU first: what is new
there is handed to the device as it is, without another copy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from .compiled import no_fake_gradient
from .memory import CPU
from .patches import Patches

if TYPE_CHECKING:
    from . import Emulation
    from .tensors import Moves

FACTORIES = (
    *(
        "empty",
        "empty_permuted",
        "empty_strided",
        "ones",
        "zeros",
        "full",
        "eye",
        "arange",
        "range",
        "linspace",
        "logspace",
    ),
    *("rand", "randn", "randint", "randperm", "normal", "scalar_tensor", "tril_indices", "triu_indices"),
    *("empty_like", "ones_like", "zeros_like", "full_like", "rand_like", "randn_like", "randint_like"),
    *("bartlett_window", "blackman_window", "hamming_window", "hann_window", "kaiser_window", "empty_quantized"),
)


SPARSE = {  # which arguments are tensors
    "sparse_coo_tensor": ("indices", "values"),
    "sparse_csr_tensor": ("crow_indices", "col_indices", "values"),
    "sparse_csc_tensor": ("ccol_indices", "row_indices", "values"),
    "sparse_bsr_tensor": ("crow_indices", "col_indices", "values"),
    "sparse_bsc_tensor": ("ccol_indices", "row_indices", "values"),
    "sparse_compressed_tensor": ("compressed_indices", "plain_indices", "values"),
}


def install(patches: Patches, emulation: Emulation, moves: Moves) -> None:
    """Let factories make emulated tensors until `patches` are undone."""
    for name in FACTORIES:
        if hasattr(torch, name):
            patches.set(torch, name, factory(getattr(torch, name), emulation))
    for name, parts in SPARSE.items():
        patches.set(torch, name, _sparse(getattr(torch, name), emulation, parts))
    for name in ("tensor", "as_tensor", "asarray"):
        patches.set(torch, name, _from_data(getattr(torch, name), emulation, moves, copies=name == "tensor"))


def factory(real: Callable[..., Any], emulation: Emulation) -> Callable[..., Any]:
    """`real`, for which an int is an emulated device."""

    @functools.wraps(real)
    def make(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None:
            if type(device) is int:
                kwargs["device"] = torch.device("cuda", device)
            emulation.cover_thread()
            if kwargs.get("requires_grad") and is_faking() and torch.device(device).type == "cuda":
                raise no_fake_gradient()
        return real(*args, **kwargs)

    return make


def is_faking() -> bool:
    """Whether operators make fake tensors now."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def _from_data(real: Callable[..., Any], emulation: Emulation, moves: Moves, copies: bool) -> Callable[..., Any]:
    """`torch.tensor` and the like: made on the CPU; what is new there is handed to the device without another copy."""

    @functools.wraps(real)
    def from_data(data: Any, *args: Any, **kwargs: Any) -> Any:
        device = kwargs.pop("device", None)
        if kwargs.pop("pin_memory", False):
            return from_data(data, *args, device=device, **kwargs).pin_memory()
        if args:  # as_tensor(data, dtype, device)
            kwargs["dtype"] = args[0]
            device = args[1] if len(args) > 1 else device
        if device is None:
            device = data.device if isinstance(data, torch.Tensor) else _default_device()
        index = emulation.index_of(device)
        if index is None:
            return real(data, device=device, **kwargs)
        if index != CPU and not isinstance(data, torch.Tensor) and hasattr(data, "__cuda_array_interface__"):
            raise NotImplementedError(f"torch.{real.__name__} of foreign CUDA memory is not emulated")
        if isinstance(data, torch.Tensor):
            return _from_tensor(real, moves, data, index, copies, kwargs)
        made = real(data, device="cpu", **kwargs)
        if index == CPU:
            return made
        wants = made.requires_grad
        if wants and is_faking():
            raise no_fake_gradient()
        adopts = copies and not is_faking()
        made = moves.adopt(made, index) if adopts else moves.copy(made.detach(), index, made.dtype)
        return made.requires_grad_(wants)

    return from_data


def _sparse(real: Callable[..., Any], emulation: Emulation, parts: tuple[str, ...]) -> Callable[..., Any]:
    """`real`, made of parts that are moved to the device first."""

    @functools.wraps(real)
    def sparse(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        index = CPU if device is None else emulation.index_of(device)
        if index is None or index == CPU:
            return real(*args, **kwargs)
        del kwargs["device"]
        where = emulation.memory.devices[index]
        moved = [torch.as_tensor(value, device=where) for value in args[: len(parts)]]
        kwargs = {
            name: torch.as_tensor(kwargs[name], device=where) if name in parts else kwargs[name] for name in kwargs
        }
        return real(*moved, *args[len(parts) :], **kwargs)

    return sparse


def _default_device() -> torch.device:
    """What `torch.set_default_device` or `with torch.device(...)` says in this thread."""
    for mode in reversed(_get_current_function_mode_stack() if torch._C._len_torch_function_stack() else []):
        if isinstance(mode, DeviceContext):
            return mode.device
    return torch.device("cpu")


def _from_tensor(real: Any, moves: Moves, data: torch.Tensor, index: int, copies: bool, kwargs: dict[str, Any]) -> Any:
    dtype = kwargs.get("dtype") or data.dtype
    if not copies and not kwargs.get("copy"):
        return moves.to(data, torch.device("cpu") if index == CPU else torch.device("cuda", index), dtype)
    return moves.copy(data.detach(), index, dtype).requires_grad_(kwargs.get("requires_grad") or False)

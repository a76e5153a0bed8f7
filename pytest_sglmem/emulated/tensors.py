"""What tensors and storages say of themselves, and how they move between devices.

C++ takes an emulated tensor for a CPU tensor, so whatever Python asks a tensor or a storage about its device is answered
here, at class level: it holds in every thread, hook and mode. A move between devices is a copy, and differentiable.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from .memory import CPU, Memory, Owned, storage_of
from .patches import Patches
from .threads import PerThread

if TYPE_CHECKING:
    from . import Emulation

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


def install(patches: Patches, emulation: Emulation) -> None:
    """Let tensors and storages answer for the emulated device until `patches` are undone."""
    moves = Moves(emulation)
    _install_tensor(patches, emulation, moves)
    _install_storage(patches, emulation, moves)
    _install_factories(patches, emulation, moves)


class Moves:
    """Transfers between devices."""

    def __init__(self, emulation: Emulation) -> None:
        self._memory: Memory = emulation.memory
        self._emulation = emulation
        self._thread: PerThread = emulation.thread
        self._to = torch.Tensor.to

    def to(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """`Tensor.to` in all its spellings."""
        device, dtype, rest = spelled(args, kwargs)
        if isinstance(device, torch.Tensor):
            device, dtype = device.device, device.dtype
        target = None if device is None else self._emulation.index_of(device)
        if device is not None and target is None:
            return self._to(tensor, device, dtype or tensor.dtype, **rest)
        owned = self._memory.find(tensor)
        here = CPU if owned is None else owned.index
        dtype = dtype or tensor.dtype
        if target is None or target == here:
            return self._to(tensor, dtype, **rest)
        rest.pop("copy", None)
        if tensor.requires_grad and torch.is_grad_enabled():
            return _Moved.apply(tensor, self, target, here, dtype, rest.get("memory_format", torch.preserve_format))
        return self.copy(tensor, target, dtype, **rest)

    def copy(self, tensor: torch.Tensor, target: int, dtype: torch.dtype, **rest: Any) -> torch.Tensor:
        """A copy on `target`."""
        return self.aimed(target, self._to, tensor, dtype, copy=True, **rest)

    def aimed(self, target: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `function`; what it makes belongs to `target`, whatever its operators say."""
        self._emulation.cover_thread()
        thread = self._thread
        before, thread.target = thread.target, target
        try:
            return function(*args, **kwargs)
        finally:
            thread.target = before

    def adopt(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        """A tensor that nobody has seen yet belongs to `index`: no copy."""
        self._emulation.own(tensor.untyped_storage(), index)
        return tensor


class _Moved(torch.autograd.Function):
    """A move whose gradient moves back."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: Any, moves: Moves, target: int, here: int, dtype: Any, memory_format: Any) -> Any:
        return moves.copy(tensor, target, dtype, memory_format=memory_format)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        tensor, ctx.moves, _, ctx.here, _, _ = inputs
        ctx.dtype = tensor.dtype

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        where = torch.device("cpu") if ctx.here == CPU else torch.device("cuda", ctx.here)
        return ctx.moves.to(grad, where, ctx.dtype), None, None, None, None, None


def spelled(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """`Tensor.to`'s arguments as (device or other tensor, dtype, the rest)."""
    device, dtype = kwargs.get("device"), kwargs.get("dtype")
    rest = {name: value for name, value in kwargs.items() if name not in ("device", "dtype", "other")}
    device = kwargs.get("other", device)
    flags = []
    for value in args:
        if isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, bool):
            flags.append(value)
        elif isinstance(value, (torch.device, str, int, torch.Tensor)):
            device = value
        elif value is not None:
            raise TypeError(f"to() received an invalid argument: {value!r}")
    for name, flag in zip(("non_blocking", "copy"), flags, strict=False):
        rest[name] = flag
    return device, dtype, rest


# -- tensors -----------------------------------------------------------------------------------------------------------


def _install_tensor(patches: Patches, emulation: Emulation, moves: Moves) -> None:
    cls, where = torch.Tensor, emulation.memory.where
    find = emulation.memory.find
    real_device = cls.device.__get__  # type: ignore[attr-defined]
    real_is_cuda = cls.is_cuda.__get__  # type: ignore[attr-defined]
    real_is_cpu = cls.is_cpu.__get__  # type: ignore[attr-defined]
    real_numpy, real_pointer, real_cpu = cls.numpy, cls.data_ptr, cls.cpu
    real_type = cls.type

    def owned_by(tensor: torch.Tensor) -> Owned | None:
        try:
            return where.get(storage_of(tensor)._cdata)
        except (NotImplementedError, RuntimeError):
            return find(tensor)

    def device(self: torch.Tensor) -> torch.device:
        owned = owned_by(self)
        return real_device(self) if owned is None else owned.device

    def is_cuda(self: torch.Tensor) -> bool:
        return real_is_cuda(self) if owned_by(self) is None else True

    def is_cpu(self: torch.Tensor) -> bool:
        return real_is_cpu(self) if owned_by(self) is None else False

    def get_device(self: torch.Tensor) -> int:
        owned = owned_by(self)
        if owned is not None:
            return owned.index
        return -1 if real_is_cpu(self) else int(real_device(self).index)

    def cuda(self: torch.Tensor, device: Any = None, non_blocking: bool = False, memory_format: Any = None) -> Any:
        format_ = torch.preserve_format if memory_format is None else memory_format
        return moves.to(self, "cuda" if device is None else device, memory_format=format_)

    def cpu(self: torch.Tensor, memory_format: Any = None) -> Any:
        if owned_by(self) is None:
            return real_cpu(self) if memory_format is None else real_cpu(self, memory_format=memory_format)
        return moves.to(self, "cpu", memory_format=memory_format or torch.preserve_format)

    def numpy(self: torch.Tensor, *, force: bool = False) -> Any:
        if owned_by(self) is None:
            return real_numpy(self, force=force)
        if force:
            return real_numpy(self.detach().cpu().resolve_conj().resolve_neg())
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. "
            "Use Tensor.cpu() to copy the tensor to host memory first."
        )

    def data_ptr(self: torch.Tensor) -> int:
        owned = owned_by(self)
        address = real_pointer(self)
        if owned is None or not address:
            return address
        return address - storage_pointer(storage_of(self)) + owned.address

    def type_(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if owned_by(self) is not None and dtype is None:
            return real_type(self).replace("torch.", "torch.cuda.", 1)
        if (isinstance(dtype, str) and dtype.startswith("torch.cuda.")) or "torch.cuda." in str(dtype):
            raise NotImplementedError(f"Tensor.type({dtype!r}) is not emulated: use Tensor.to")
        return real_type(self, dtype, non_blocking, **kwargs)

    storage_pointer = torch._C.StorageBase.data_ptr
    for name, getter in (("device", device), ("is_cuda", is_cuda), ("is_cpu", is_cpu)):
        patches.set(cls, name, property(getter))
    for function in (get_device, cuda, cpu, numpy, data_ptr):
        patches.set(cls, function.__name__, _named(function, getattr(cls, function.__name__)))
    for name in ("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"):
        patches.set(cls, name, _factory(getattr(cls, name), emulation))
    real_new = cls.new

    def new_tensor(self: torch.Tensor, data: Any, *, dtype: Any = None, device: Any = None, **kwargs: Any) -> Any:
        return torch.tensor(data, dtype=dtype or self.dtype, device=device or self.device, **kwargs)

    def new(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        owned = owned_by(self)
        return (
            real_new(self, *args, **kwargs)
            if owned is None
            else moves.aimed(owned.index, real_new, self, *args, **kwargs)
        )

    patches.set(cls, "new_tensor", _named(new_tensor, cls.new_tensor))
    patches.set(cls, "new", _named(new, real_new))
    patches.set(cls, "type", _named(type_, real_type))
    patches.set(cls, "to", _named(lambda self, *args, **kwargs: moves.to(self, *args, **kwargs), cls.to))
    patches.set(
        cls, "record_stream", _named(lambda self, stream: emulation.record_stream(self, stream), cls.record_stream)
    )
    patches.set(torch, "get_device", lambda tensor: tensor.get_device())
    real_parse = torch._C._nn._parse_to

    def _parse_to(*args: Any, **kwargs: Any) -> Any:
        if args and type(args[0]) is int:
            args = (torch.device(args[0]), *args[1:])
        if type(kwargs.get("device")) is int:
            kwargs["device"] = torch.device(kwargs["device"])
        return real_parse(*args, **kwargs)

    patches.set(torch._C._nn, "_parse_to", _parse_to)
    _install_pinning(patches, emulation)


def _install_pinning(patches: Patches, emulation: Emulation) -> None:
    cls, memory = torch.Tensor, emulation.memory

    def pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
        if memory.find(self) is not None:
            raise RuntimeError(f"cannot pin '{self.type()}' only dense CPU tensors can be pinned")
        if memory.is_pinned(storage_of(self)):
            return self
        with torch.no_grad():
            pinned = torch.empty_like(self, pin_memory=False).copy_(self)
        memory.pin(storage_of(pinned))
        return pinned

    def pin_storage(self: torch.UntypedStorage, device: Any = None) -> torch.UntypedStorage:
        if memory.is_pinned(self):
            return self
        pinned = torch.UntypedStorage(self.size()).copy_(self, False)
        memory.pin(pinned)
        return pinned

    patches.set(cls, "pin_memory", _named(pin_memory, cls.pin_memory))
    patches.set(cls, "is_pinned", lambda self, device=None: memory.is_pinned(storage_of(self)))
    patches.set(torch.UntypedStorage, "pin_memory", pin_storage)
    patches.set(torch.UntypedStorage, "is_pinned", lambda self, device="cuda": memory.is_pinned(self))


def _named(function: Callable[..., Any], like: Any) -> Callable[..., Any]:
    for name in ("__name__", "__qualname__", "__doc__"):
        value = getattr(like, name, None)
        if value is not None:
            setattr(function, name, value)
    return function


# -- storages ----------------------------------------------------------------------------------------------------------


def _install_storage(patches: Patches, emulation: Emulation, moves: Moves) -> None:
    cls, where = torch.UntypedStorage, emulation.memory.where
    real_device = cls.device.__get__  # type: ignore[attr-defined]
    real_pointer, real_resize = cls.data_ptr, cls.resize_
    real_new = cls.__new__

    def device(self: torch.UntypedStorage) -> torch.device:
        owned = where.get(self._cdata)
        return real_device(self) if owned is None else owned.device

    def data_ptr(self: torch.UntypedStorage) -> int:
        owned = where.get(self._cdata)
        return real_pointer(self) if owned is None else owned.address

    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        answer = real_resize(self, size)
        owned = where.get(self._cdata)
        if owned is not None:
            emulation.memory.resized(self, owned, emulation.stream_number(owned.index))
        return answer

    def get_device(self: torch.UntypedStorage) -> int:
        owned = where.get(self._cdata)
        return -1 if owned is None else owned.index

    def new(kind: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        index = None if device is None else emulation.index_of(device)
        if index is None or index == CPU:
            return real_new(kind, *args, **kwargs) if device is None else real_new(kind, *args, device=device, **kwargs)
        storage = real_new(kind, *args, **kwargs)
        emulation.own(storage, index)
        return storage

    patches.set(cls, "device", property(device))
    for function in (data_ptr, resize_, get_device):
        patches.set(cls, function.__name__, _named(function, getattr(cls, function.__name__)))
    patches.set(cls, "__new__", new)


# -- factories ---------------------------------------------------------------------------------------------------------


def _install_factories(patches: Patches, emulation: Emulation, moves: Moves) -> None:
    for name in FACTORIES:
        if hasattr(torch, name):
            patches.set(torch, name, _factory(getattr(torch, name), emulation))
    for name, parts in SPARSE.items():
        patches.set(torch, name, _sparse(getattr(torch, name), emulation, parts))
    for name in ("tensor", "as_tensor", "asarray"):
        patches.set(torch, name, _from_data(getattr(torch, name), emulation, moves, copies=name == "tensor"))


def _factory(real: Callable[..., Any], emulation: Emulation) -> Callable[..., Any]:
    """`real`, for which an int is an emulated device."""

    @functools.wraps(real)
    def factory(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None:
            if type(device) is int:
                kwargs["device"] = torch.device("cuda", device)
            emulation.cover_thread()
        return real(*args, **kwargs)

    return factory


def _from_data(real: Callable[..., Any], emulation: Emulation, moves: Moves, copies: bool) -> Callable[..., Any]:
    """`torch.tensor` and the like: made on the CPU; what is new there is handed to the device without another copy."""

    @functools.wraps(real)
    def from_data(data: Any, *args: Any, **kwargs: Any) -> Any:
        device = kwargs.pop("device", None)
        if args:  # as_tensor(data, dtype, device)
            kwargs["dtype"] = args[0]
            device = args[1] if len(args) > 1 else device
        if device is None:
            device = data.device if isinstance(data, torch.Tensor) else _default_device()
        index = emulation.index_of(device)
        if index is None:
            return real(data, device=device, **kwargs)
        if isinstance(data, torch.Tensor):
            return _from_tensor(real, moves, data, index, copies, kwargs)
        made = real(data, device="cpu", **kwargs)
        if index == CPU:
            return made
        wants = made.requires_grad
        made = moves.copy(made.detach(), index, made.dtype) if not copies else moves.adopt(made, index)
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

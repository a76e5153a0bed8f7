"""What tensors and storages say of themselves, and how they move between devices.

C++ takes an emulated tensor for a CPU tensor, so whatever Python asks a tensor or a storage about its device is
answered at class level: it holds in every thread, hook and mode. A move between devices is a copy, and differentiable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses import FakeTensor
from torch.nn.parameter import is_lazy

from . import factories, legacy, storages
from .compiled import no_fake_gradient
from .memory import CPU, PLAIN, Memory, Owned, storage_of
from .patches import Patches, named

if TYPE_CHECKING:
    from . import Emulation

WRAPPER_DEVICE = 5  # its place among `_make_wrapper_subclass`'s arguments after the class and the size


def install(patches: Patches, emulation: Emulation) -> None:
    """Let tensors and storages answer for the emulated device until `patches` are undone."""
    moves = Moves(emulation)
    _install_tensor(patches, emulation, moves)
    storages.install(patches, emulation)
    factories.install(patches, emulation, moves)


class Moves:
    """Transfers between devices."""

    def __init__(self, emulation: Emulation) -> None:
        self._memory: Memory = emulation.memory
        self._emulation = emulation
        self._to = torch.Tensor.to

    def to(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """`Tensor.to` in all its spellings."""
        if type(tensor).__torch_dispatch__ is PLAIN and is_lazy(tensor):
            with torch._C.DisableTorchFunctionSubclass():  # it lets torch's own pass, and knows them by identity
                return self._move(tensor, *args, **kwargs)
        return self._move(tensor, *args, **kwargs)

    def _move(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        device, dtype, rest = spelled(args, kwargs)
        target = None if device is None else self._emulation.index_of(device)
        dtype = dtype or tensor.dtype
        if device is not None and target is None:
            return self._to(tensor, device, dtype, **rest)
        here = self._here(tensor)
        if target is None or target == here:
            return self._to(tensor, dtype, **rest)
        rest.pop("copy", None)
        if here is not None and tensor.requires_grad and torch.is_grad_enabled():
            if isinstance(tensor, FakeTensor):
                raise no_fake_gradient()
            return _Moved.apply(tensor, self, target, here, dtype, rest.get("memory_format", torch.preserve_format))
        return self.copy(tensor, target, dtype, **rest)

    def _here(self, tensor: torch.Tensor) -> int | None:
        """The device a tensor is moved from; of a class that sees operators itself, the one it names."""
        owned = self._memory.find(tensor)
        if owned is not None:
            return owned.index
        return CPU if type(tensor).__torch_dispatch__ is PLAIN else self._emulation.index_of(tensor.device)

    def copy(self, tensor: torch.Tensor, target: int, dtype: torch.dtype, **rest: Any) -> torch.Tensor:
        """A copy on `target`."""
        if type(tensor).__torch_dispatch__ is PLAIN:
            return self._emulation.aimed(target, self._to, tensor, dtype, copy=True, **rest)
        # it must see the move, and C++ knows of none between what it takes for one device
        given = {} if rest.get("memory_format") in (None, torch.preserve_format) else rest
        return self._emulation.aimed(
            target, torch.ops.aten._to_copy.default, tensor, dtype=dtype, device=self.device_of(target), **given
        )

    def device_of(self, index: int) -> torch.device:
        """The device of an index, as a tensor names it."""
        return torch.device("cpu") if index == CPU else self._memory.devices[index]

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
        return ctx.moves.to(grad, ctx.moves.device_of(ctx.here), ctx.dtype), None, None, None, None, None


def spelled(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """`Tensor.to`'s arguments as (device, dtype, the rest), in all three spellings."""
    device: Any = kwargs.get("device")
    dtype: Any = kwargs.get("dtype")
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
    if isinstance(device, torch.Tensor):
        dtype, device = device.dtype, device.device
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
            owned = where.get(storage_of(tensor)._cdata)
        except (NotImplementedError, RuntimeError, ValueError):
            return find(tensor)
        return find(tensor) if owned is None and type(tensor).__torch_dispatch__ is not PLAIN else owned

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
        old = legacy.dtype_of(dtype)
        if old is not None:
            return moves.to(self, "cuda" if owned_by(self) is None else self.device, old)
        if "torch.cuda." in str(dtype):
            raise NotImplementedError(f"Tensor.type({dtype!r}) is not emulated: use Tensor.to")
        if owned_by(self) is not None and not isinstance(dtype, torch.dtype):
            return moves.to(self, "cpu").type(dtype, non_blocking)  # a type of the CPU, by itself or by its name
        return real_type(self, dtype, non_blocking, **kwargs)

    def __dlpack__(self: torch.Tensor, **kwargs: Any) -> Any:
        if owned_by(self) is not None:
            raise NotImplementedError("Tensor.__dlpack__ is not emulated: there is no device memory to hand over")
        return real_dlpack(self, **kwargs)

    def __cuda_array_interface__(self: torch.Tensor) -> Any:
        if owned_by(self) is not None:
            raise NotImplementedError(
                "__cuda_array_interface__ is not emulated: there is no device memory to hand over"
            )
        return real_interface(self)

    real_dlpack, real_interface = cls.__dlpack__, cls.__cuda_array_interface__.fget  # type: ignore[attr-defined]
    real_capsule = torch._C._to_dlpack  # type: ignore[attr-defined]

    def to_dlpack(tensor: torch.Tensor) -> Any:
        if owned_by(tensor) is not None:
            raise NotImplementedError("torch.utils.dlpack.to_dlpack is not emulated: there is no device memory to give")
        return real_capsule(tensor)

    for owner, name in ((torch._C, "_to_dlpack"), (torch.utils.dlpack, "to_dlpack"), (torch, "to_dlpack")):
        if hasattr(owner, name):
            patches.set(owner, name, named(to_dlpack, real_capsule))
    patches.set(cls, "__dlpack__", named(__dlpack__, real_dlpack))
    patches.set(cls, "__cuda_array_interface__", property(__cuda_array_interface__))
    storage_pointer = torch._C.StorageBase.data_ptr  # type: ignore[attr-defined]
    real_grad: Any = cls.grad

    def set_grad(self: torch.Tensor, value: torch.Tensor | None) -> None:
        if isinstance(value, torch.Tensor) and value.device != self.device:
            raise RuntimeError(_elsewhere(value.device, self.device))
        real_grad.__set__(self, value)

    patches.set(cls, "grad", property(real_grad.__get__, set_grad, real_grad.__delete__))
    for name, getter in (("device", device), ("is_cuda", is_cuda), ("is_cpu", is_cpu)):
        patches.set(cls, name, property(getter))
    for function in (get_device, cuda, cpu, numpy, data_ptr):
        patches.set(cls, function.__name__, named(function, getattr(cls, function.__name__)))
    for name in ("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"):
        patches.set(cls, name, factories.factory(getattr(cls, name), emulation))
    real_new, construct = cls.new, cls.__new__

    def __new__(kind: Any, *args: Any, **kwargs: Any) -> Any:
        if kind is cls:
            return construct(kind, *args, **kwargs)
        with torch._C._DisableTorchDispatch():  # else a mode sees the tensor before it is of its class, and C++ balks
            return construct(kind, *args, **kwargs)

    patches.set(cls, "__new__", __new__)

    def new_tensor(self: torch.Tensor, data: Any, *, dtype: Any = None, device: Any = None, **kwargs: Any) -> Any:
        return torch.tensor(data, dtype=dtype or self.dtype, device=device or self.device, **kwargs)

    def new(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        owned = owned_by(self)
        return (
            real_new(self, *args, **kwargs)
            if owned is None
            else emulation.aimed(owned.index, real_new, self, *args, **kwargs)
        )

    patches.set(cls, "new_tensor", named(new_tensor, cls.new_tensor))
    patches.set(cls, "new", named(new, real_new))
    patches.set(cls, "type", named(type_, real_type))
    patches.set(cls, "to", named(lambda self, *args, **kwargs: moves.to(self, *args, **kwargs), cls.to))
    patches.set(
        cls, "record_stream", named(lambda self, stream: emulation.record_stream(self, stream), cls.record_stream)
    )
    patches.set(torch, "get_device", lambda tensor: tensor.get_device())
    real_wrapper = cls._make_wrapper_subclass  # type: ignore[attr-defined]

    def _make_wrapper_subclass(kind: Any, size: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        by_place = len(args) > WRAPPER_DEVICE
        device = args[WRAPPER_DEVICE] if by_place else kwargs.get("device")
        index = CPU if device is None else emulation.index_of(device)
        if index is None or index == CPU:
            return real_wrapper(kind, size, *args, **kwargs)
        host = torch.device("cpu")  # of a CUDA device that is not there, autograd's C++ ends the process
        if by_place:
            args = (*args[:WRAPPER_DEVICE], host, *args[WRAPPER_DEVICE + 1 :])
        else:
            kwargs["device"] = host
        wrapper = real_wrapper(kind, size, *args, **kwargs)
        emulation.memory.own_elsewhere(storage_of(wrapper), index)
        return wrapper

    patches.set(cls, "_make_wrapper_subclass", staticmethod(_make_wrapper_subclass))
    real_parse = torch._C._nn._parse_to

    def _parse_to(*args: Any, **kwargs: Any) -> Any:
        if args and type(args[0]) is int:
            args = (torch.device(args[0]), *args[1:])
        if type(kwargs.get("device")) is int:
            kwargs["device"] = torch.device(kwargs["device"])
        return real_parse(*args, **kwargs)

    patches.set(torch._C._nn, "_parse_to", _parse_to)
    _install_pinning(patches, emulation)


def _elsewhere(gradient: torch.device, tensor: torch.device) -> str:
    """What torch says of a gradient that is assigned from another device."""
    if gradient.type == tensor.type:
        one, other = (
            f"located on device with index '{gradient.index}'",
            f"located on device with index '{tensor.index}'",
        )
    else:
        one, other = f"with device type '{gradient.type}'", f"with device type '{tensor.type}'"
    return (
        f"attempting to assign a gradient {one} to a tensor {other}. "
        "Please ensure that the gradient and the tensor are on the same device"
    )


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

    patches.set(cls, "pin_memory", named(pin_memory, cls.pin_memory))
    patches.set(cls, "is_pinned", lambda self, device=None: memory.is_pinned(storage_of(self)))
    patches.set(torch.UntypedStorage, "pin_memory", pin_storage)
    patches.set(torch.UntypedStorage, "is_pinned", lambda self, device="cuda": memory.is_pinned(self))

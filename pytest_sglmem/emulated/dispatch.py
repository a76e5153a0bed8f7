"""Every operator, seen below autograd: which device it runs on, and the storages it makes.

The operator itself runs as it is, on the CPU: an emulated tensor is a CPU tensor whose storage `memory.py` knows. The
device of an output whose storage is new is the one that was asked for, else that of the inputs. Tensors of different
devices in one operator are refused as torch refuses them (0-dim CPU tensors mix with everything).

A factory call made by C++ inside a composite operator asks for the CPU, since C++ sees CPU tensors there. It can be told
from one made in Python, which always says `pin_memory`; what it makes joins the device of the first tensors that the
same call mixes it with. What an operator allocates and frees within itself is not seen: no workspaces, no temporaries.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .memory import CPU, Memory, sparse_parts, storage_of
from .threads import PerThread

if TYPE_CHECKING:
    from . import Emulation

Call = tuple[int, int]

# Inputs of these may live on the CPU although the rest does not: torch takes indices, lengths and steps from there.
MIXING = frozenset(
    {
        *("copy_", "_copy_from", "_copy_from_and_resize", "copy", "_to_copy", "set_", "set", "record_stream"),
        *("index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"),
        *("_pack_padded_sequence", "_nested_view_from_buffer", "_nested_view_from_buffer_copy", "is_same_size"),
        *("_nested_view_from_jagged", "resize_as_", "resize_as", "_has_compatible_shallow_copy_type", "is_set_to"),
        *("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_", "set_data"),
    }
)
RESIZING = frozenset({"resize_", "resize_as_", "set_", "set_data", "_resize_output_", "resize_as_sparse_"})


class Plan:
    """What is known of an operator beforehand."""

    __slots__ = (
        "alias",
        "collective",
        "elementwise",
        "generator",
        "inplace",
        "mixing",
        "name",
        "resizes",
        "seeded",
        "with_generator",
    )

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.name = schema.name
        library, _, base = schema.name.partition("::")
        self.collective = base if library == "c10d" else None
        returns, arguments = schema.returns, schema.arguments
        writes = [a for a in arguments if a.alias_info is not None and a.alias_info.is_write]
        self.alias = bool(returns) and not writes and all(r.alias_info is not None for r in returns)
        self.inplace = bool(writes)
        self.mixing = base in MIXING
        self.resizes = base in RESIZING or any(a.kwarg_only for a in writes)
        self.elementwise = base.startswith("_foreach_")
        self.generator = any(a.name == "generator" for a in arguments)
        self.seeded = not self.generator and torch.Tag.nondeterministic_seeded in func.tags
        self.with_generator = _with_generator(func) if self.seeded else None


def _with_generator(func: Any) -> Any:
    """The overload of `func` that takes a generator beside the same arguments; None where there is none."""
    names = [argument.name for argument in func._schema.arguments]
    packet = func.overloadpacket
    for overload in packet.overloads():
        other = getattr(packet, overload)
        known = [argument for argument in other._schema.arguments if argument.name != "generator"]
        wants = next((a for a in other._schema.arguments if a.name == "generator"), None)
        if wants is not None and wants.kwarg_only and [argument.name for argument in known] == names:
            return other
    return None


class Accounting(TorchDispatchMode):
    """The mode that places and counts. One instance a thread; silent once the emulation it belongs to has ended."""

    def __init__(self, emulation: Emulation, plans: dict[Any, Plan]) -> None:
        super().__init__()
        self._emulation = emulation
        self._memory: Memory = emulation.memory
        self._thread: PerThread = emulation.thread
        self._where = emulation.memory.where
        self._plans = plans
        self._floating: dict[int, tuple[Call, Any]] = {}
        self.open = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch wraps every call of this mode, at 2 us each

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` on the CPU, and place what is new."""
        if types and any(kind.__torch_dispatch__ is not _PLAIN for kind in types):
            return NotImplemented
        plan = self._plans.get(func)
        if plan is None:
            plan = self._plans[func] = Plan(func)
        if not self.open or (plan.alias and not kwargs):
            return func(*args, **(kwargs or {}))
        if plan.collective is not None:
            return self._emulation.collectives.run(plan.collective, func, args, kwargs or {})
        return self._run(plan, func, args, kwargs or {})

    def _run(self, plan: Plan, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        here = self._common(plan, args, kwargs)
        asked = self._thread.target
        if "device" in kwargs:
            device = kwargs["device"]
            if device is not None and device.type == "cuda":
                asked = self._emulation.index(device)
                kwargs = {**kwargs, "device": _CPU_DEVICE}
            elif device is not None and device.type != "cpu":
                return func(*args, **kwargs)
            elif asked is None and device is not None and (here == CPU or "pin_memory" in kwargs):
                asked = CPU
        index = here if asked is None else asked
        if index == CPU:
            if kwargs.get("pin_memory"):
                return self._pinned(func, args, kwargs)
            if plan.generator and kwargs.get("generator") is not None:
                self._emulation.generators.check(kwargs["generator"], "cpu")
            answer = func(*args, **kwargs)
            if here == CPU and asked == CPU and "pin_memory" not in kwargs:
                self._float(answer)
            return answer
        self._thread.last = index
        if plan.generator:
            kwargs = self._with_generator(kwargs, index)
        answer = self._seeded(plan, func, args, kwargs, index) if plan.seeded else func(*args, **kwargs)
        self._place(plan, answer, index)
        return answer

    # -- inputs ----------------------------------------------------------------------------------------------------

    def _common(self, plan: Plan, args: Any, kwargs: dict[str, Any]) -> int:
        """The device of the inputs: that of the first which is no 0-dim CPU tensor. Raises where they are mixed."""
        where, here, alone = self._where, None, True
        for tensor in _tensors(args, kwargs) if kwargs or not all(map(_is_plain, args)) else args:
            if not isinstance(tensor, _Tensor):
                continue
            try:
                owned = where.get(storage_of(tensor)._cdata)
            except (NotImplementedError, RuntimeError):
                owned = self._memory.find(tensor)
            index = CPU if owned is None else owned.index
            if index != here:
                if here is not None:
                    alone = False
                    break
                if index != CPU or tensor.dim():
                    here = index
        if alone:
            return CPU if here is None else here
        return self._common_of_mixed(plan, args, kwargs)

    def _common_of_mixed(self, plan: Plan, args: Any, kwargs: dict[str, Any]) -> int:
        """As `_common`, where the inputs are known to be of several devices."""
        here: int | None = None
        for tensor in _tensors(args, kwargs):
            owned = self._memory.find(tensor)
            index = CPU if owned is None else owned.index
            if index == CPU and not tensor.dim():
                continue
            if here is None or here == index:
                here = index
            elif plan.mixing or plan.elementwise:
                here = index if here == CPU and not plan.inplace else here
            elif index == CPU and self._joins(tensor, here):
                continue
            elif here == CPU and self._all_join(args, kwargs, index):
                here = index
            else:
                raise RuntimeError(_mixed(plan, here, index))
        return CPU if here is None else here

    def _index(self, device: torch.device) -> int:
        index = self._thread.device if device.index is None else device.index
        if index >= len(self._memory.devices):
            raise (
                torch.AcceleratorError(INVALID_DEVICE)
                if hasattr(torch, "AcceleratorError")
                else RuntimeError(INVALID_DEVICE)
            )
        return index

    # -- outputs ---------------------------------------------------------------------------------------------------

    def _place(self, plan: Plan, answer: Any, index: int) -> None:
        where = self._where
        for tensor in (answer,) if isinstance(answer, torch.Tensor) else _flat(answer):
            try:
                storage = storage_of(tensor)
            except (NotImplementedError, RuntimeError):
                self._place_sparse(plan, tensor, index)
                continue
            owned = where.get(storage._cdata)
            if owned is None:
                if not plan.inplace or plan.resizes:
                    self._memory.own(storage, index, self._stream(index))
            elif plan.resizes:
                self._memory.resized(storage, owned, self._stream(owned.index))

    def _place_sparse(self, plan: Plan, tensor: torch.Tensor, index: int) -> None:
        for part in sparse_parts(tensor):
            self._place(plan, part, index)

    def _stream(self, index: int) -> int:
        return self._thread.streams.get(index, 0)

    def _pinned(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        answer = func(*args, **{**kwargs, "pin_memory": False})
        self._memory.pin(storage_of(answer))
        return answer

    def _with_generator(self, kwargs: dict[str, Any], index: int) -> dict[str, Any]:
        given = kwargs.get("generator")
        if given is None:
            return {**kwargs, "generator": self._emulation.generators.defaults[index]}
        self._emulation.generators.check(given, "cuda")
        return kwargs

    def _seeded(self, plan: Plan, func: Any, args: Any, kwargs: dict[str, Any], index: int) -> Any:
        """An operator that takes its random numbers from the default generator: here, from that of its device."""
        generator = self._emulation.generators.defaults[index]
        if plan.with_generator is not None:
            return plan.with_generator(*args, **kwargs, generator=generator)
        default = torch.default_generator
        before = default.get_state()
        default.set_state(generator.get_state())
        try:
            return func(*args, **kwargs)
        finally:
            generator.set_state(default.get_state())
            default.set_state(before)

    # -- what composite operators make -----------------------------------------------------------------------------

    def _float(self, answer: Any) -> None:
        """C++ made this for the CPU, as far as it knows: whether it was right shows when the same call uses it."""
        if not isinstance(answer, torch.Tensor):
            return
        storage = storage_of(answer)
        node = torch._C._current_autograd_node()
        if node is not None and isinstance(node, torch._C._FunctionBase):
            return
        if len(self._floating) > 64:
            self._floating.clear()
        self._floating[storage._cdata] = (_call(), storage)

    def _joins(self, tensor: torch.Tensor, index: int) -> bool:
        """Whether a CPU tensor was made by this very call, and so belongs to the device that the call runs on."""
        storage = storage_of(tensor)
        known = self._floating.get(storage._cdata)
        if known is None or known[0] != _call():
            return False
        del self._floating[storage._cdata]
        self._memory.own(storage, index, self._stream(index))
        return True

    def _all_join(self, args: Any, kwargs: dict[str, Any], index: int) -> bool:
        """Whether all CPU tensors among the inputs were made by this very call."""
        found = [t for t in _tensors(args, kwargs) if self._memory.find(t) is None and t.dim()]
        return all([self._joins(tensor, index) for tensor in found])


def _mixed(plan: Plan, one: int, other: int) -> str:
    names = ["cpu" if index == CPU else f"cuda:{index}" for index in (one, other)]
    return (
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"{names[0]} and {names[1]}! (in {plan.name})"
    )


def _is_plain(value: Any) -> bool:
    return type(value) not in _LISTS


def _tensors(args: Any, kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    for value in args:
        if isinstance(value, torch.Tensor):
            yield value
        elif type(value) in _LISTS:
            yield from _flat(value)
    for value in kwargs.values():
        if isinstance(value, torch.Tensor):
            yield value
        elif type(value) in _LISTS:
            yield from _flat(value)


def _flat(values: Any) -> Iterator[torch.Tensor]:
    if not isinstance(values, (list, tuple)):
        return
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif type(value) in _LISTS:
            yield from _flat(value)


def _call() -> Call:
    """The Python instruction that is being carried out: C++ has no frames."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in _OURS:
        frame = frame.f_back
    return (0, 0) if frame is None else (id(frame), frame.f_lasti)


INVALID_DEVICE = "CUDA error: invalid device ordinal\n(the emulated machine has fewer devices: emulated_cuda(devices=) says how many)"
_LISTS = (list, tuple)
_Tensor = torch.Tensor
_PLAIN = torch._C._disabled_torch_dispatch_impl
_CPU_DEVICE = torch.device("cpu")
_OURS = frozenset({__file__, torch._ops.__file__})

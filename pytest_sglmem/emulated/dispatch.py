"""Every operator, seen below autograd: which device it runs on, and the storages it makes.

The operator itself runs as it is, on the CPU: an emulated tensor is a CPU tensor whose storage `memory.py` knows. The
device of an output whose storage is new is the one that was asked for, else that of the inputs. Tensors of different
devices in one operator are refused as torch refuses them (0-dim CPU tensors mix with everything).

What C++ makes inside a composite operator is placed by `composites.py`. What an operator allocates and frees within
itself is not seen: no workspaces, no temporaries.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from .composites import Composites
from .memory import CPU, PLAIN, Memory, Owned, parts_of, storage_of
from .threads import PerThread

if TYPE_CHECKING:
    from . import Emulation

# Inputs of these may live on the CPU although the rest does not: torch takes indices, lengths and steps from there.
MIXING = frozenset(
    {
        *("copy_", "_copy_from", "_copy_from_and_resize", "copy", "_to_copy", "set_", "set", "record_stream"),
        *("_pack_padded_sequence", "_nested_view_from_buffer", "_nested_view_from_buffer_copy", "is_same_size"),
        *("_nested_view_from_jagged", "resize_as_", "resize_as", "_has_compatible_shallow_copy_type", "is_set_to"),
        *("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_", "set_data", "_pad_packed_sequence"),
        "tensor_split",
    }
)
# Libraries whose operators are C++ and see CPU tensors; in others a kernel may be Python that asks for "cuda".
BUILT_IN = frozenset(
    {
        *("aten", "prim", "prims", "c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional"),
        *(
            "quantized",
            "quantized_decomposed",
            "_quantized",
            "mkldnn",
            "onednn",
            "mkl",
            "sparse",
            "profiler",
            "inductor",
        ),
        *("torchvision", "torchaudio", "rngprims", "debugprims", "debug_mode_ops", "symm_mem", "xnnpack", "_nnapi"),
    }
)
# The lengths of a packed sequence are on the CPU: in what makes one, and in the overload "data" of what takes one.
PACKING = "_pack_padded_sequence"
RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
INDEXED = frozenset({"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"})
LARGE = 1 << 24  # elements
SETTING = frozenset({"set_", "set_data"})
RESIZING = SETTING | frozenset({"resize_", "resize_as_", "_resize_output_", "resize_as_sparse_"})


class Plan:
    """What is known of an operator beforehand."""

    __slots__ = (
        "_written",
        "alias",
        "collective",
        "elementwise",
        "foreign",
        "generator",
        "indexed",
        "inplace",
        "kernels",
        "mixing",
        "name",
        "packing",
        "resizes",
        "seeded",
        "sets",
        "with_generator",
    )

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.name = schema.name
        library, _, base = schema.name.partition("::")
        self.collective = base if library == "c10d" else None
        returns, arguments = schema.returns, schema.arguments
        writes = [a for a in arguments if a.alias_info is not None and a.alias_info.is_write]
        self.foreign = library not in BUILT_IN
        self.kernels = _kernels(library, schema.name, schema.overload_name)
        self._written = [(at, a.name) for at, a in enumerate(arguments) if a in writes]
        self.alias = bool(returns) and not writes and all(r.alias_info is not None for r in returns)
        self.inplace = bool(writes)
        self.mixing = base in MIXING or (base in RECURRENT and schema.overload_name == "data")
        self.packing = base == PACKING
        self.indexed = base in INDEXED
        self.sets = base in SETTING
        self.resizes = base in RESIZING or any(a.kwarg_only for a in writes)
        self.elementwise = base.startswith("_foreach_")
        self.generator = any(a.name == "generator" for a in arguments)
        self.seeded = not self.generator and torch.Tag.nondeterministic_seeded in func.tags
        self.with_generator = _with_generator(func) if self.seeded else None

    def written(self, args: Any, kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments that the operator writes to."""
        return (
            [args[at] for at, _ in self._written if at < len(args)],
            {name: kwargs[name] for _, name in self._written if name in kwargs},
        )


def _kernels(library: str, name: str, overload: str) -> tuple[Any, Any] | None:
    """Where the kernels are for CPU tensors and for emulated ones, of an operator that must be looked into; else None.

    That is one made of other operators (seen whole only below autograd and in inference mode), and one of a library
    whose kernel may be Python and make tensors itself: for an emulated tensor its CUDA kernel, where it has one.
    """
    full = f"{name}.{overload}" if overload else name
    if library in BUILT_IN and not torch._C._dispatch_has_kernel_for_dispatch_key(full, "CompositeImplicitAutograd"):
        return None
    known = [key for key in ("CPU", "CUDA") if torch._C._dispatch_has_computed_kernel_for_dispatch_key(full, key)]
    keys = {key: torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key)) for key in known}
    if not keys:
        return None
    here = keys.get("CPU", keys.get("CUDA"))
    return here, here if library in BUILT_IN else keys.get("CUDA", here)


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

    supports_higher_order_operators = True

    def __init__(self, emulation: Emulation, plans: dict[Any, Plan]) -> None:
        super().__init__()
        self._emulation = emulation
        self._memory: Memory = emulation.memory
        self._thread: PerThread = emulation.thread
        self._where = emulation.memory.where
        self._plans = plans
        self.composites = Composites()
        self.open = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch wraps every call of this mode, at 2 us each

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` on the CPU, and place what is new."""
        if _active_mode(_FAKE) is not None:
            return func(*args, **(kwargs or {}))
        if types and any(kind.__torch_dispatch__ is not PLAIN for kind in types):
            return NotImplemented
        plan = self._plans.get(func)
        if plan is None:
            if isinstance(func, HigherOrderOperator):
                return self._run_higher(func, args, kwargs or {})
            plan = self._plans[func] = Plan(func)
        if not self.open:
            return func(*args, **(kwargs or {}))
        if plan.alias and not kwargs and plan.kernels is None:
            return func(*args)
        if plan.collective is not None:
            return self._emulation.collectives.run(plan.collective, func, args, kwargs or {})
        try:
            if plan.kernels is not None:
                return self._run_open(plan, plan.kernels, func, args, kwargs or {})
            return self._run(plan, func, args, kwargs or {})
        except RuntimeError as error:
            refuse(error, plan.name)
            raise

    def _run(self, plan: Plan, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        here = self._common(plan, args, kwargs)
        asked = self._thread.target
        if "device" in kwargs:
            device = kwargs["device"]
            if device is not None and device.type == "cuda":
                if _active_mode(_PROXY) is not None:
                    raise NotImplementedError(
                        f"make_fx(tracing_mode='real') of {plan.name} on a CUDA device is not emulated: "
                        "the graph would say cpu; tracing_mode='fake' does it"
                    )
                asked = self._emulation.index(device)
                kwargs = {**kwargs, "device": _CPU_DEVICE}
            elif device is not None and device.type != "cpu":
                return func(*args, **kwargs)
            elif asked is None and device is not None and (here is None or here == CPU or "pin_memory" in kwargs):
                asked = CPU
        index = here if asked is None else asked
        if index is None or index == CPU:
            if kwargs.get("pin_memory"):
                return self._pinned(func, args, kwargs)
            if plan.generator and kwargs.get("generator") is not None:
                self._emulation.generators.check(kwargs["generator"], "cpu")
            answer = func(*args, **kwargs)
            if here is None and "pin_memory" not in kwargs:
                self.composites.remember(answer)
            elif self.composites.open:
                self.composites.derive(_tensors(args, kwargs), answer)
            return answer
        if plan.generator:
            kwargs = self._with_generator(kwargs, index)
        if here is None:
            self._foresee(args, kwargs, index)
        try:
            answer = self._seeded(plan, func, args, kwargs, index) if plan.seeded else func(*args, **kwargs)
        except RuntimeError as error:
            self._explain(error, index)
            raise
        if plan.elementwise and isinstance(answer, (list, tuple)):
            self._place_each(plan, answer, next(value for value in args if type(value) in _LISTS))
        else:
            self._place(plan, answer[0] if plan.packing else answer, index)
        return answer

    def _foresee(self, args: Any, kwargs: dict[str, Any], index: int) -> None:
        """Refuse a large block that does not fit before the host is asked for it."""
        if args and type(args[0]) is list and (size := math.prod(args[0])) > LARGE:
            dtype = kwargs.get("dtype") or torch.get_default_dtype()
            self._memory.expect(index, size * dtype.itemsize, self._stream(index))

    def _explain(self, error: RuntimeError, index: int) -> None:
        """Where the host has no room for a block, the device may have none either: then that is the error."""
        wanted = re.search(r"can't allocate memory: you tried to allocate (\d+) bytes", str(error))
        if wanted:
            self._memory.expect(index, int(wanted[1]), self._stream(index))

    def _run_open(self, plan: Plan, kernels: tuple[Any, Any], func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An operator that is made of others, with this mode on inside."""
        here = self._common(plan, args, kwargs)
        keys = kernels[0] if here is None or here == CPU else kernels[1]
        _push_mode(self)
        try:
            answer = func.redispatch(keys, *args, **kwargs)
        finally:
            _pop_mode()
        if plan.foreign and here is not None and here != CPU:
            self._place(plan, answer, here)
        return answer

    def _run_higher(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An operator that calls functions (cond, flex_attention), with this mode on inside."""
        keys = (torch._C.DispatchKey.CompositeExplicitAutograd, torch._C.DispatchKey.CPU)
        kernel = next((func.py_kernels[key] for key in keys if key in func.py_kernels), None)
        if kernel is None or not self.open:
            raise NotImplementedError(f"{func.name()} is not emulated: it has no kernel in Python")
        _push_mode(self)
        try:
            return kernel(*args, **kwargs)
        finally:
            _pop_mode()

    # -- inputs ----------------------------------------------------------------------------------------------------

    def _common(self, plan: Plan, args: Any, kwargs: dict[str, Any]) -> int | None:
        """The device of the inputs, None where there are none: that of the first which is no 0-dim CPU tensor.

        Raises RuntimeError where they are mixed.
        """
        where, here, scalars = self._where, None, False
        for tensor in _tensors(args, kwargs) if kwargs or not all(map(_is_plain, args)) else args:
            if not isinstance(tensor, _Tensor):
                continue
            try:
                owned = where.get(storage_of(tensor)._cdata)
            except (NotImplementedError, RuntimeError):
                owned = self._memory.find(tensor)
            index = CPU if owned is None else owned.index
            if index == here:
                continue
            if index == CPU and not tensor.dim():
                scalars = True
            elif here is None:
                here = index
            else:
                return self._common_of_mixed(plan, args, kwargs)
        if scalars:
            if here is None:
                return CPU
            if plan.inplace and here != CPU:
                return self._common_of_mixed(plan, args, kwargs)
        return here

    def _common_of_mixed(self, plan: Plan, args: Any, kwargs: dict[str, Any]) -> int:
        """As `_common`, where the inputs are known to be of several devices, or one that is written may be."""
        if plan.indexed and args:
            return self._common_of_indexed(plan, *args[:3])
        found = [(tensor, CPU if owned is None else owned.index) for tensor, owned in self._found(args, kwargs)]
        here = next((index for tensor, index in found if index != CPU), CPU)
        if plan.mixing or plan.elementwise:
            target, first = found[0]
            if plan.inplace and first == CPU and self.composites.take(target):
                self._memory.own(storage_of(target), here, self._stream(here))
                return here
            return first if plan.inplace else here
        written = {id(tensor) for tensor in _tensors(*plan.written(args, kwargs))}
        for tensor, index in found:
            if index == here or (index == CPU and not tensor.dim() and id(tensor) not in written):
                continue
            if index == CPU and self.composites.take(tensor):
                self._memory.own(storage_of(tensor), here, self._stream(here))
                continue
            raise RuntimeError(_mixed(plan, index, here))
        return here

    def _common_of_indexed(self, plan: Plan, given: torch.Tensor, indices: Any, values: Any = None) -> int:
        """The device of the tensor that is indexed: its indices are there or on the CPU, its new values are there."""
        here = self._index_of(given)
        others = {self._index_of(index) for index in _flat(indices)} - {CPU, here}
        if others and here == CPU and self.composites.take(given):
            here = others.pop()
            self._memory.own(storage_of(given), here, self._stream(here))
        if others:
            raise RuntimeError(
                "indices should be either on cpu or on the same device as the indexed tensor "
                f"({'cpu' if here == CPU else f'cuda:{here}'})"
            )
        if values is not None and (other := self._index_of(values)) != here:
            if other == CPU and self.composites.take(values):
                self._memory.own(storage_of(values), here, self._stream(here))
            elif other != CPU or values.numel() != 1:
                raise RuntimeError(_mixed(plan, here, other))
        return here

    def _index_of(self, tensor: torch.Tensor) -> int:
        owned = self._memory.find(tensor)
        return CPU if owned is None else owned.index

    def _found(self, args: Any, kwargs: dict[str, Any]) -> Iterator[tuple[torch.Tensor, Owned | None]]:
        for tensor in _tensors(args, kwargs):
            yield tensor, self._memory.find(tensor)

    # -- outputs ---------------------------------------------------------------------------------------------------

    def _place(self, plan: Plan, answer: Any, index: int) -> None:
        where = self._where
        for tensor in (answer,) if isinstance(answer, torch.Tensor) else _flat(answer):
            try:
                storage = storage_of(tensor)
            except (NotImplementedError, RuntimeError):
                self._place_parts(plan, tensor, index)
                continue
            owned = where.get(storage._cdata)
            if owned is None:
                if not plan.sets:
                    self._memory.own(storage, index, self._stream(index))
            elif plan.resizes:
                self._memory.resized(storage, owned, self._stream(owned.index))

    def _place_each(self, plan: Plan, answers: Any, sources: Any) -> None:
        """Each result of a `_foreach_` operator belongs to the device of its first input: they may be several."""
        for tensor, source in zip(answers, sources, strict=False):
            owned = self._memory.find(source)
            if owned is not None:
                self._place(plan, tensor, owned.index)

    def _place_parts(self, plan: Plan, tensor: torch.Tensor, index: int) -> None:
        for part in parts_of(tensor):
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


def refuse(error: RuntimeError, name: str) -> None:
    """Raise NotImplementedError with the name of what raised `error`, where C++ said in it that it knows no CUDA."""
    if not isinstance(error, NotImplementedError) and _NO_CUDA.search(str(error)):
        raise NotImplementedError(f"{name} is not emulated: it asks C++ for a CUDA device") from error


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


_LISTS = (list, tuple)
_Tensor = torch.Tensor
# What C++ says where a device that is only emulated is asked of it: a build without CUDA, one with it and no GPU.
_NO_CUDA = re.compile("not linked with support for cuda|NVIDIA driver|No CUDA GPUs|CUDA driver|no CUDA-capable device")
_FAKE = torch._C._TorchDispatchModeKey.FAKE
_PROXY = torch._C._TorchDispatchModeKey.PROXY
_active_mode = torch._C._get_dispatch_mode
_CPU_DEVICE = torch.device("cpu")

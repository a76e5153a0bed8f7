"""torch.distributed on emulated tensors: the nccl backend served by gloo, and tensors that gloo's threads never own.

A group made with "nccl" is a gloo group that says "nccl" when asked, and takes emulated tensors only, as NCCL does.
gloo finishes an operation in a thread of its own, which may hold its tensors a moment longer than the call: so that no
byte comes back late, it is given tensors over the same memory that own nothing, and the originals are held until the
operation is done or was waited for. Those that own nothing are held longer: freeing one takes the interpreter's lock,
which a group's destructor holds while it waits for gloo's threads, so these must never be the last to let go of one.
Buffers of NCCL itself are not there; `ProcessGroupNCCL.Options` are taken and not looked at.
"""

from __future__ import annotations

import collections
import functools
import inspect
import sys
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from .patches import Patches

if TYPE_CHECKING:
    from . import Emulation

NCCL = "nccl"
NCCL_VERSION = (2 << 32) | (27 << 16)  # as NCCL packs 2.27.0, for code that asks whether it is new enough
MANY = 256  # lent tensors that are held: of one that so many others followed no thread is still putting away its work
SYMMETRIC = ("empty_strided_p2p", "get_mempool_allocator", "rendezvous", "set_backend", "set_group_info")
REDUCE_SCATTER = ("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "_reduce_scatter_base")
OBJECT_DEVICES = {"_get_object_coll_device": str, "_get_pg_default_device": torch.device}
GROUPS = ("init_process_group", "new_group", "get_backend", "is_nccl_available")
REPLACED = (*REDUCE_SCATTER, *OBJECT_DEVICES, *GROUPS)
NOT_ALIASED = ("send", "recv_", "recv_any_source_", "barrier", "monitored_barrier_")


class Collectives:
    """The collectives of one process: what is under way, and which groups were made with nccl."""

    def __init__(self, emulation: Emulation) -> None:
        self._emulation = emulation
        self._memory = emulation.memory
        self._under_way: list[tuple[Any, list[torch.Tensor]]] = []
        self._lent: collections.deque[torch.Tensor] = collections.deque(maxlen=MANY)
        self._waited: weakref.WeakSet[Any] = weakref.WeakSet()
        self.nccl: set[str] = set()

    def run(self, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """One operator of torch's `c10d` library; `name` without its namespace."""
        if self.nccl:
            self._refuse_cpu(name, args)
        if name in NOT_ALIASED:
            return func(*args, **kwargs)
        self.sweep()
        held: list[torch.Tensor] = []
        answer = func(*[self._alias(value, held) for value in args], **kwargs)
        if held:
            self._hold(answer, held)
        return answer

    def wait(self, real: Callable[..., bool], work: Any, *args: Any, **kwargs: Any) -> bool:
        """`work.wait(...)`, after which its tensors are let go of.

        gloo's reduce_scatter never says that it is completed, and copies its result out in each wait: a second one
        would write to memory that may be another's by then.
        """
        if work in self._waited:
            return True
        answer = real(work, *args, **kwargs)
        kept = [one for one in self._under_way if one[0] is not work]
        if len(kept) < len(self._under_way) and not work.is_completed():
            self._waited.add(work)
        self._under_way = kept
        return answer

    def sweep(self) -> None:
        """Let go of the tensors of what is done."""
        if self._under_way:
            self._under_way = [(work, held) for work, held in self._under_way if not work.is_completed()]

    def _made_by_torch(self, tensor: torch.Tensor) -> bool:
        """Whether torch's C++ made it in the call that is under way: there it would be on the device."""
        mode = self._emulation.thread.mode
        return mode is not None and mode.composites.knows(tensor)

    def _hold(self, answer: Any, held: list[torch.Tensor]) -> None:
        work = torch.distributed.Work.unbox(answer[-1] if isinstance(answer, tuple) else answer)
        if not work.is_completed():
            self._under_way.append((work, held))

    def _alias(self, value: Any, held: list[torch.Tensor]) -> Any:
        if isinstance(value, torch.Tensor):
            if not value.numel() or value.layout is not torch.strided or value.device.type not in ("cpu", "cuda"):
                return value
            held.append(value)
            alias = without_owning(value)
            self._lent.append(alias)
            return alias
        if isinstance(value, (list, tuple)):
            return [self._alias(one, held) for one in value]
        return value

    def _refuse_cpu(self, name: str, args: Any) -> None:
        if name.endswith("barrier") or name.endswith("barrier_"):
            return
        group = next((value for value in args if isinstance(value, torch.ScriptObject) and _is_group(value)), None)
        if group is None or torch.distributed.ProcessGroup.unbox(group).group_name not in self.nccl:
            return
        if any(self._memory.find(one) is None and not self._made_by_torch(one) for one in _tensors(args)):
            raise RuntimeError("No backend type associated with device type cpu")


def _install_reducer(patches: Patches, emulation: Emulation) -> None:
    """The buckets that DistributedDataParallel makes in C++ belong to the device of its parameters."""
    cls = getattr(torch.distributed, "Reducer", None)
    if cls is None:
        return
    begin, rebuild = cls.__init__, cls._rebuild_buckets

    def __init__(self: Any, parameters: Any, *args: Any, **kwargs: Any) -> None:
        owned = emulation.memory.find(parameters[0]) if parameters else None
        if owned is None:
            begin(self, parameters, *args, **kwargs)
        else:
            emulation.aimed(owned.index, begin, self, parameters, *args, **kwargs)

    def _rebuild_buckets(self: Any) -> Any:
        return emulation.aimed(emulation.thread.device, rebuild, self)

    patches.set(cls, "__init__", __init__)
    patches.set(cls, "_rebuild_buckets", _rebuild_buckets)


def _install_wait(patches: Patches, collectives: Collectives) -> None:
    real = torch.distributed.Work.wait

    @functools.wraps(real)
    def wait(self: Any, *args: Any, **kwargs: Any) -> bool:
        return collectives.wait(real, self, *args, **kwargs)

    patches.set(torch.distributed.Work, "wait", wait)


def _shares(given: Any, size: int) -> Any:
    return given / size if isinstance(given, torch.Tensor) else [one / size for one in given]


def _is_group(value: Any) -> bool:
    return str(value._type()).endswith("ProcessGroup")


def _tensors(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    return [tensor for value in values for tensor in _tensors(value)] if isinstance(values, (list, tuple)) else []


def without_owning(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the same memory, which does not keep it alive."""
    storage = tensor.untyped_storage()
    address = torch._C.StorageBase.data_ptr(storage)  # type: ignore[attr-defined]
    bare = torch._C._construct_storage_from_data_pointer(address, torch.device("cpu"), storage.nbytes())
    alias = torch.empty(0, dtype=tensor.dtype)
    return alias.set_(bare, tensor.storage_offset(), tensor.size(), tensor.stride())


@functools.lru_cache(maxsize=1)
def importers(loaded: int) -> dict[str, tuple[ModuleType, ...]]:
    """For each name in REPLACED, the modules of torch.distributed that have it, of `loaded` modules in all."""
    modules = [m for key, m in sys.modules.items() if key.startswith("torch.distributed") and m is not None]
    return {name: tuple(m for m in modules if name in vars(m)) for name in REPLACED}


def install(patches: Patches, emulation: Emulation) -> None:
    """Let process groups be asked for with nccl until `patches` are undone."""
    if not torch.distributed.is_available():
        return
    c10d = torch.distributed.distributed_c10d
    nccl, SUM = emulation.collectives.nccl, torch.distributed.ReduceOp.SUM
    having = importers(len(sys.modules))

    def replace(name: str, make: Callable[[Any], Any]) -> None:
        real = getattr(c10d, name)
        fake = functools.wraps(real)(make(real))
        for module in having[name]:
            if vars(module)[name] is real:
                patches.set(module, name, fake)

    def init_process_group(real: Any) -> Any:
        def init(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
            kwargs.pop("device_id", None)
            asked, served = _served(backend)
            answer = real(served, *args, **_without_nccl_options(kwargs))
            (nccl.add if asked == NCCL else nccl.discard)(c10d._get_default_group().group_name)
            return answer

        return init

    def new_group(real: Any) -> Any:
        def new(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
            kwargs.pop("device_id", None)
            asked, served = _served(backend)
            if backend is None and c10d._get_default_group().group_name in nccl:
                asked = NCCL
            group = real(ranks, timeout, served, *args, **_without_nccl_options(kwargs))
            if isinstance(group, torch.distributed.ProcessGroup):
                (nccl.add if asked == NCCL else nccl.discard)(group.group_name)
            return group

        return new

    def get_backend(real: Any) -> Any:
        def backend(group: Any = None) -> Any:
            known = group or c10d._get_default_group()
            return c10d.Backend(NCCL) if known.group_name in nccl else real(group)

        return backend

    def object_device(wrap: Callable[[str], Any]) -> Callable[[Any], Any]:
        def make(real: Any) -> Any:
            def device(group: Any = None) -> Any:
                known = group or c10d._get_default_group()
                return wrap("cuda") if getattr(known, "group_name", None) in nccl else real(group)

            return device

        return make

    def averaging(real: Any) -> Any:
        """Older gloo sums where a reduce_scatter shall average: here it always sums, and the average is made of it."""

        signature = inspect.signature(real)

        def reduce_scatter(*args: Any, **kwargs: Any) -> Any:
            asked = signature.bind(*args, **kwargs).arguments
            known = asked.get("group") or c10d._get_default_group()
            if asked.get("op", SUM) != torch.distributed.ReduceOp.AVG or known.group_name not in nccl:
                return real(*args, **kwargs)
            asked["op"] = SUM
            if asked.get("async_op"):
                name = "input_list" if "input_list" in asked else "input"
                asked[name] = _shares(asked[name], known.size())
                return real(**asked)
            real(**asked)
            asked["output"].div_(known.size())
            return None

        return reduce_scatter

    for name in REDUCE_SCATTER:
        if hasattr(c10d, name):
            replace(name, averaging)
    replace("init_process_group", init_process_group)
    replace("new_group", new_group)
    replace("get_backend", get_backend)
    replace("is_nccl_available", lambda real: lambda: True)
    for name, wrap in OBJECT_DEVICES.items():
        if hasattr(c10d, name):
            replace(name, object_device(wrap))
    _install_reducer(patches, emulation)
    _install_wait(patches, emulation.collectives)
    patches.set(torch._C, "_nccl_version", lambda: NCCL_VERSION)
    patches.set(torch._C, "_nccl_version_suffix", lambda: b"")
    symmetric = getattr(torch._C._distributed_c10d, "_SymmetricMemory", None)
    for name in () if symmetric is None else SYMMETRIC:
        if hasattr(symmetric, name):
            patches.set(symmetric, name, staticmethod(_no_symmetric_memory))
    for module in (torch.distributed, c10d):
        patches.set(module, "ProcessGroupNCCL", ProcessGroupNCCL)


def _no_symmetric_memory(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("torch.distributed._symmetric_memory is not emulated")


class ProcessGroupNCCL:
    """Stands for torch's class where code makes its options."""

    class Options:
        """Options of an NCCL group: taken, and not looked at."""

        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream


def _served(backend: Any) -> tuple[str | None, str | None]:
    """The backend that was asked for, where it is one, and what serves it."""
    if backend is None:
        return None, None
    asked = str(backend).lower()
    if ":" not in asked:
        return asked, "gloo" if asked == NCCL else backend
    served = dict(pair.split(":", 1) for pair in asked.split(","))
    if NCCL in served.values() and set(served.values()) <= {NCCL, "gloo"}:
        return None if len(served) > 1 else NCCL, "gloo"
    return None, backend


def _without_nccl_options(kwargs: dict[str, Any]) -> dict[str, Any]:
    if isinstance(kwargs.get("pg_options"), ProcessGroupNCCL.Options):
        return {**kwargs, "pg_options": None}
    return kwargs

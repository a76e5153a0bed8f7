"""Faults in force: what is patched, what a strike does, and how all of it is put back.

A fault strikes below the code under test, at the functions which that code cannot avoid: torch's own, pickle's, the
allocator, files, clocks. A gate stands at each point that is armed: it counts reaches, decides which faults are due,
and lets every other call through (under 1 us; `cuda.alloc` on a real device costs more: see `_allocations`). The
harness's own calls pass without being counted: calls made from pytest and its plugins, and from this package except
reference/ and checks/.

A name that a module imported for itself (`from torch.distributed import barrier`) is struck as well, where it is a
module's global. Not struck: a reference kept in a local, a default argument or an attribute before arming; torch's C++
paths (`torch.save` to a path, custom kernels that allocate, functional collectives); `datetime.now()`.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import functools
import hashlib
import importlib
import io
import itertools
import os
import signal
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType, MappingProxyType, ModuleType
from typing import Any

from .faults import PYTEST_RANK, Fault

_sleep = time.sleep  # the harness's own clock: faults never strike it
_HARNESS = frozenset(
    (
        *("pytest_sglmem", "_pytest", "pytest", "pluggy", "xdist", "execnet", "pytest_timeout", "coverage"),
        *("cloudpickle", "multiprocessing", "importlib"),
    )
)
_CODE_UNDER_TEST = ("pytest_sglmem.reference", "pytest_sglmem.checks")
_C10D = "torch.distributed.distributed_c10d"
_COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast", "broadcast_object_list"),
    *("reduce", "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single"),
    *("gather", "gather_object", "scatter", "scatter_object_list"),
)
_STEP_BYTES = 1 << 20  # what step=retain keeps a step where the fault does not say
_STEP_OBJECTS = 64  # what step=keep-live keeps a step: more than a program's caches may give back meanwhile

_NEVER = sys.maxsize

Real = Callable[..., object]
Call = Callable[[], object]


class Strike:
    """One fault in force in one process: when it is due, and how often it fired."""

    def __init__(self, fault: Fault, rank: int, seed: int) -> None:
        self.fault = fault
        self.fired = 0
        self._chance = (
            None if fault.p is None else hashlib.blake2b(f"{seed}:{rank}:{fault.text}".encode(), digest_size=8)
        )
        self._once = fault.action == "jump" and fault.nth is fault.every is fault.p is None

    def due(self, reach: int) -> bool:
        """Whether the fault strikes at this reach of its point (from 1): the same answer in every run of one seed."""
        fault = self.fault
        if fault.nth is not None:
            return reach == fault.nth
        if fault.every is not None and reach % fault.every:
            return False
        if self._chance is not None:
            drawn = self._chance.copy()
            drawn.update(reach.to_bytes(8, "big"))
            return int.from_bytes(drawn.digest(), "big") < fault.p * 2**64  # type: ignore[operator]
        return not (self._once and reach > 1)

    def next(self, reach: int) -> int:
        """The first reach after this one at which it can be due."""
        fault = self.fault
        only = fault.nth if fault.nth is not None else 1 if self._once else None
        if only is not None:
            return only if reach < only else _NEVER
        return reach + 1 if fault.every is None else (reach // fault.every + 1) * fault.every


class Blow:
    """One strike at one call: what an action gets to work with."""

    def __init__(self, armed: Armed, strike: Strike, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.armed, self.strike, self.args, self.kwargs = armed, strike, args, kwargs
        self.fault = strike.fault

    def fire(self) -> None:
        """Count it: an action calls this only where it really changes what happens."""
        self.strike.fired += 1

    def announce(self) -> None:
        """Count it and say so on stderr, because the process will not live to be asked."""
        self.fire()
        os.write(2, f"[sglmem] rank {self.armed.rank}: injected {self.fault.text}\n".encode())


class Gate:
    """The place of one point in this process: counts reaches, and carries out the strikes that are due."""

    def __init__(self, point: str, armed: Armed, strikes: Sequence[Strike]) -> None:
        self.point, self.armed, self.strikes = point, armed, strikes
        self.off = False
        self.reached = 0
        self._numbers = itertools.count(1)
        self._next = min((strike.next(0) for strike in strikes), default=_NEVER)

    @property
    def spent(self) -> bool:
        """Whether no strike can be due any more."""
        return self._next == _NEVER

    def reach(self) -> Sequence[Strike]:
        """Count one reach; the strikes that are due at it."""
        number = self.reached = next(self._numbers)
        return self._due(number) if number >= self._next else ()

    def _due(self, number: int) -> list[Strike]:
        self._next = min(strike.next(number) for strike in self.strikes)
        return [strike for strike in self.strikes if strike.due(number)]

    def carry_out(self, due: Sequence[Strike], real: Real, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
        """Call `real`, with each of the strikes around it."""
        call: Call = functools.partial(real, *args, **kwargs)
        for strike in due:
            action = _AT[self.point].get(strike.fault.action) or _ANYWHERE[strike.fault.action]
            call = functools.partial(action, Blow(self.armed, strike, args, kwargs), call)
        return call()

    def wrap(self, real: Real) -> Real:
        """`real` behind this gate. After disarming, the wrapper only passes calls on: somebody may have kept it.

        Silent, it costs well under 1 us, which is why it counts and compares here and calls nothing of ours.
        """
        numbers, callers, frame = self._numbers, _Callers(), sys._getframe

        @functools.wraps(real)
        def gated(*args: object, **kwargs: object) -> object:
            if self.off or (callers[frame(1).f_globals.get("__name__")] and by_harness(frame(1))):
                return real(*args, **kwargs)
            number = self.reached = next(numbers)
            due = self._due(number) if number >= self._next else ()
            return self.carry_out(due, real, args, kwargs) if due else real(*args, **kwargs)

        return gated


class _Callers(dict[object, bool]):
    """Module name -> whether a call from it needs a second look, because it may be the harness's."""

    def __missing__(self, module: object) -> bool:
        self[module] = found = module == __name__ or _is_harness(str(module))
        return found


class Armed:
    """The faults in force in this process, and what they did. Its counts stay readable after disarming."""

    def __init__(self, faults: Sequence[Fault], *, rank: int, seed: int) -> None:
        self.rank = rank
        self._strikes = [Strike(fault, rank, seed) for fault in faults]
        self.gates = {point: self._gate(point) for point in dict.fromkeys(fault.point for fault in faults)}
        self._step = self.gates.get("step")
        self.kept: list[object] = []
        self.pending: list[Callable[[], None]] = []
        self.between_steps: list[Callable[[], None]] = []
        self.clock_offset = 0.0

    def _gate(self, point: str) -> Gate:
        return Gate(point, self, [strike for strike in self._strikes if strike.fault.point == point])

    @property
    def fired(self) -> dict[str, int]:
        """Fault -> how often it changed what happened, in this process."""
        return {strike.fault.text: strike.fired for strike in self._strikes}

    @property
    def reached(self) -> dict[str, int]:
        """Point -> how often it was reached while armed, whether or not a fault was due."""
        return {point: gate.reached for point, gate in self.gates.items()}

    def before_step(self) -> None:
        """The `step` point: the harness calls this before each step of a trace (and each append)."""
        for call in self.between_steps:
            call()
        gate = self._step
        if gate is not None and not gate.off and (due := gate.reach()):
            gate.carry_out(due, _nothing, (), {})

    def flush(self) -> None:
        """Carry out what waits for the next point of synchronisation."""
        while self.pending:
            self.pending.pop()()

    def disarm(self) -> None:
        """Let everything go: calls pass, and what the faults kept alive is given back."""
        for gate in self.gates.values():
            gate.off = True
        self.pending.clear()
        self.kept.clear()


@contextlib.contextmanager
def arming(faults: Sequence[Fault], *, rank: int, seed: int) -> Iterator[Armed]:
    """`faults.armed` for the faults that strike in `rank`."""
    armed = Armed(faults, rank=rank, seed=seed)
    with contextlib.ExitStack() as stack:
        stack.callback(armed.disarm)
        patches = Patches()
        stack.callback(patches.undo)
        for point, gate in armed.gates.items():
            _INSTALL[point](gate, patches, stack)
        if any(fault.point == "ipc.open" and fault.action == "corrupt" for fault in faults):
            _flush_at_synchronisation(armed, patches)
        patches.spread()
        yield armed


class Patches:
    """Attributes replaced for a while. `undo` puts back each that still is what this put there."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, object, object]] = []
        self._wrappers: dict[int, tuple[object, object]] = {}

    def replace(self, owner: Any, name: str, new: object) -> None:
        """Make `owner.name` be `new`; a name that `owner` only inherits is taken away again at the end."""
        self._undo.append((owner, name, vars(owner).get(name, _ABSENT), new))
        setattr(owner, name, new)

    def function(self, name: str, owners: Sequence[Any], wrap: Callable[[Real], Real]) -> None:
        """Wrap the function `name` where `owners` have it, and remember it for `spread`."""
        for owner in owners:
            real = getattr(owner, name, None)
            if real is None:
                continue
            known = self._wrappers.get(id(real))
            wrapper = known[1] if known else wrap(real)
            self._wrappers[id(real)] = (real, wrapper)
            self.replace(owner, name, wrapper)

    def spread(self) -> None:
        """Replace the wrapped functions in the modules that imported them by name, libraries below aside."""
        if not self._wrappers:
            return
        for module in list(sys.modules.values()):
            if isinstance(module, ModuleType) and _may_import(module.__name__):
                for name, value in list(vars(module).items()):
                    known = self._wrappers.get(id(value))
                    if known is not None and known[0] is value:
                        self.replace(module, name, known[1])

    def undo(self) -> None:
        """Put everything back, the newest first. What somebody else replaced since is left as it is."""
        while self._undo:
            owner, name, old, new = self._undo.pop()
            if vars(owner).get(name) is not new:
                continue
            if old is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, old)


_ABSENT = object()


def _may_import(module: str) -> bool:
    root = module.partition(".")[0]
    if root in ("torch", "numpy") or root in sys.stdlib_module_names:
        return False
    return root not in _HARNESS or module.startswith(_CODE_UNDER_TEST)


def by_harness(frame: FrameType | None) -> bool:
    """Whether the harness itself (or torch's c10d, from inside one of its own collectives) makes this call."""
    while frame is not None and frame.f_globals.get("__name__") == __name__:  # a gate around a gate
        frame = frame.f_back
    return frame is not None and _is_harness(frame.f_globals.get("__name__") or "")


@functools.lru_cache(maxsize=4096)
def _is_harness(module: str) -> bool:
    if module.partition(".")[0] in _HARNESS:
        return not module.startswith(_CODE_UNDER_TEST)
    return module == _C10D


def _nothing(*args: object, **kwargs: object) -> None:
    return None


class _Done:
    """The work of a collective that was skipped: done at once."""

    def wait(self, *args: object) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


# What the actions do: (blow, call) -> result


def _watch(blow: Blow, call: Call) -> object:
    blow.fire()
    return call()


def _skip(blow: Blow, call: Call) -> object:
    blow.fire()
    return None


def _raise(blow: Blow, call: Call) -> object:
    kind = exception(str(blow.fault.argument))
    words = f"injected by {blow.fault.text}"
    blow.fire()
    raise kind(errno.EIO, words) if kind is OSError else kind(words)


def exception(dotted: str) -> type[BaseException]:
    """The exception class of that dotted name. Raises LookupError where there is none."""
    module, _, name = dotted.rpartition(".")
    try:
        kind = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise LookupError(f"no exception {dotted!r}: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, BaseException)):
        raise LookupError(f"{dotted!r} is no exception")
    return kind


def _kill(blow: Blow, call: Call) -> object:
    blow.announce()
    os.kill(os.getpid(), signal.SIGKILL)
    return call()


def _exit(blow: Blow, call: Call) -> object:
    blow.announce()
    os._exit(int(blow.fault.argument or 0))


def _hang(blow: Blow, call: Call) -> object:
    blow.announce()
    while True:
        _sleep(3600)


def _delay(blow: Blow, call: Call) -> object:
    blow.fire()
    _sleep(float(blow.fault.argument or 0) / 1000)
    return call()


def _retain(blow: Blow, call: Call) -> object:
    result = call()
    if not blow.fault.argument:
        blow.fire()
        blow.armed.kept.append(result)
    elif _has_device(blow.armed):
        blow.fire()
        blow.armed.kept.append(_device_bytes(int(blow.fault.argument)))
    return result


def _has_device(armed: Armed) -> bool:
    """Whether there is device memory to keep: the pytest process often uses none, and is not made to."""
    if armed.rank != PYTEST_RANK:
        return True
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    from .emulated import current

    return current() is not None or torch.cuda.is_initialized()


def _device_bytes(count: int) -> object:
    import torch

    from .emulated import current

    emulation = current()
    if emulation is None:
        return torch.empty(count, dtype=torch.uint8, device="cuda")
    # Within an operator the emulation does not see the operators that we call: the storage is given to it by name.
    made = torch.empty(count, dtype=torch.uint8, device="cpu")
    emulation.own(made.untyped_storage(), emulation.index(torch.device("cuda")))
    return made


def _retain_exported(blow: Blow, call: Call) -> object:
    if not blow.fault.argument:
        blow.armed.kept.append(blow.args[0])
    return _retain(blow, call)


def _retain_step(blow: Blow, call: Call) -> object:
    if _has_device(blow.armed):
        blow.fire()
        blow.armed.kept.append(_device_bytes(int(blow.fault.argument or _STEP_BYTES)))
    return call()


def _keep_object(blow: Blow, call: Call) -> object:
    blow.fire()
    blow.armed.kept.append([[] for _ in range(_STEP_OBJECTS)])
    return call()


def _keep_argument(blow: Blow, call: Call) -> object:
    blow.fire()
    blow.armed.kept.append(blow.args[0] if blow.args else blow.kwargs)
    return call()


def _one_handle(blow: Blow, call: Call) -> object:
    storage = blow.args[0]
    first = next((handle for alive, handle in _handles(blow.armed) if alive() is storage), None)
    if first is not None:
        blow.fire()
        return first
    handle = call()
    _handles(blow.armed).append((weakref.ref(storage), handle))
    return handle


def _handles(armed: Armed) -> list[tuple[weakref.ref[object], object]]:
    found = [kept for kept in armed.kept if isinstance(kept, _Handles)]
    if not found:
        found = [_Handles()]
        armed.kept.append(found[0])
    found[0][:] = [pair for pair in found[0] if pair[0]() is not None]
    return found[0]


class _Handles(list[tuple["weakref.ref[object]", object]]):
    """First handles of the blocks that are still alive."""


def _export_twice(blow: Blow, call: Call) -> object:
    blow.fire()
    call()
    return call()


def _open_private(blow: Blow, call: Call) -> object:
    import torch

    blow.fire()
    device, _handle, size = blow.args[:3]
    return torch.zeros(size, dtype=torch.uint8, device=torch.device("cuda", device)).untyped_storage()


def _open_twice(blow: Blow, call: Call) -> object:
    """Open it once more and let go of both together: were the second count given back at once, as torch's own cache of
    opened storages does, a block dropped meanwhile would be freed and not lost, and what happens would hang on timing.
    """
    first, second = call(), call()
    blow.fire()
    held = [second]
    weakref.finalize(first, held.clear).atexit = False
    return first


def _release(opened: tuple[Any, ...]) -> None:
    """What torch does at a second open of one handle in one process: give the handle's count back at once."""
    import torch

    torch.UntypedStorage._release_ipc_counter_cuda(opened[4], opened[5])


def _open_corrupt(blow: Blow, call: Call) -> object:
    """Change a byte now, for who reads; and again before the next synchronisation, for who writes first."""
    storage = call()
    blow.fire()
    bit = 1 << max(blow.armed.rank, 0) % 4
    flip_byte(storage, bit)
    blow.armed.pending.append(functools.partial(flip_byte, storage, bit << 4))
    return storage


def flip_byte(storage: Any, bit: int = 1) -> None:
    """Change the first byte of a storage, on whatever device it is."""
    import torch

    with torch.no_grad():
        view = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        if view.numel():
            view[:1].bitwise_xor_(bit)


def _corrupt_collective(blow: Blow, call: Call) -> object:
    import torch

    work = call()
    if work is not None and hasattr(work, "wait"):
        work.wait()
    outputs = blow.args[0] if blow.args else next(iter(blow.kwargs.values()), None)
    while isinstance(outputs, (list, tuple)) and outputs:
        outputs = outputs[0]
    if isinstance(outputs, torch.Tensor):
        blow.fire()
        flip_byte(outputs.untyped_storage())
    return work


def _skip_collective(blow: Blow, call: Call) -> object:
    blow.fire()
    return _Done() if blow.kwargs.get("async_op") else None


def _corrupt_bytes(blow: Blow, call: Call) -> object:
    blow.fire()
    return flipped(call())  # type: ignore[arg-type]


def flipped(data: bytes | memoryview) -> bytes:
    """The bytes with one of them changed: the middle one, so that no header hides it."""
    changed = bytearray(data)
    if changed:
        changed[len(changed) // 2] ^= 1
    return bytes(changed)


def _load_corrupt(blow: Blow, call: Call) -> object:
    blow.fire()
    return call.func(flipped(blow.args[0]), *blow.args[1:], **blow.kwargs)  # type: ignore[attr-defined]


def _keep_result(blow: Blow, call: Call) -> object:
    result = call()
    blow.fire()
    blow.armed.kept.append(result)
    return result


def _oom(blow: Blow, call: Call) -> object:
    import torch

    blow.fire()
    raise torch.cuda.OutOfMemoryError(f"CUDA out of memory. (injected by {blow.fault.text})")


def _enospc(blow: Blow, call: Call) -> object:
    blow.fire()
    raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (injected by {blow.fault.text})")


def _jump(blow: Blow, call: Call) -> object:
    blow.fire()
    blow.armed.clock_offset += float(blow.fault.argument or 0)
    return call()


def _lose_write(blow: Blow, call: Call) -> object:
    blow.fire()
    return memoryview(blow.args[0]).nbytes


def _write_corrupt(blow: Blow, call: Call) -> object:
    blow.fire()
    return call.func(flipped(blow.args[0]))  # type: ignore[attr-defined]


Act = Callable[[Blow, Call], object]
_ANYWHERE: Mapping[str, Act] = MappingProxyType(
    {
        "watch": _watch,
        "skip": _skip,
        "raise": _raise,
        "kill": _kill,
        "exit": _exit,
        "hang": _hang,
        "delay": _delay,
        "retain": _retain,
        "oom": _oom,
        "enospc": _enospc,
        "jump": _jump,
    }
)
_AT: Mapping[str, Mapping[str, Act]] = MappingProxyType(
    {
        "ipc.export": {"one-handle": _one_handle, "duplicate": _export_twice, "retain": _retain_exported},
        "ipc.open": {"skip": _open_private, "duplicate": _open_twice, "corrupt": _open_corrupt},
        "ipc.release": {},
        "ipc.collect": {},
        "cuda.alloc": {},
        "cuda.synchronize": {},
        "dist.barrier": {"skip": _skip_collective},
        "dist.collective": {"skip": _skip_collective, "corrupt": _corrupt_collective},
        "step": {"retain": _retain_step, "keep-live": _keep_object},
        "gc.enable": {},
        "pickle.dumps": {"keep-live": _keep_argument, "corrupt": _corrupt_bytes},
        "pickle.loads": {"keep-live": _keep_result, "corrupt": _load_corrupt},
        "clock.time": {},
        "file.write": {"skip": _lose_write, "corrupt": _write_corrupt},
        "file.fsync": {},
    }
)


# Where the points are: (gate, patches, stack)


def _at_step(gate: Gate, patches: Patches, stack: contextlib.ExitStack) -> None:
    """In a rank the harness calls `before_step`. In the pytest process a step is an append, or a counted block."""
    if gate.armed.rank != PYTEST_RANK or all(strike.fault.action == "watch" for strike in gate.strikes):
        return
    from .appends import Caller
    from .objects import GcTracked

    enter, growth = Caller.__enter__, GcTracked.growth

    def stepping(self: Caller) -> Callable[[int], object]:
        append = enter(self)

        def step(number: int) -> object:
            gate.armed.before_step()
            return append(number)

        return step

    @contextlib.contextmanager
    def counted(self: GcTracked) -> Iterator[object]:
        with growth(self) as grown:
            yield grown
            gate.armed.before_step()

    patches.replace(Caller, "__enter__", stepping)
    patches.replace(GcTracked, "growth", counted)


def _torch(gate: Gate) -> ModuleType | None:
    """torch where this process may be struck in it: a rank has it; in the pytest process only if somebody loaded it."""
    if gate.armed.rank == PYTEST_RANK and "torch" not in sys.modules:
        return None
    return importlib.import_module("torch")


def _distributed(gate: Gate) -> list[ModuleType]:
    """torch.distributed and the module that defines it, where there is a group (in the pytest process) or will be."""
    torch = _torch(gate)
    if torch is None or not torch.distributed.is_available():
        return []
    if gate.armed.rank == PYTEST_RANK and not torch.distributed.is_initialized():
        return []
    return [torch.distributed, importlib.import_module(_C10D)]


def _at_export(gate: Gate, patches: Patches, stack: contextlib.ExitStack) -> None:
    torch = _torch(gate)
    if torch is not None:
        patches.replace(torch.UntypedStorage, "_share_cuda_", gate.wrap(torch.UntypedStorage._share_cuda_))


def _at_open(gate: Gate, patches: Patches, stack: contextlib.ExitStack) -> None:
    torch = _torch(gate)
    if torch is not None:
        wrapper = gate.wrap(torch.UntypedStorage._new_shared_cuda)
        patches.replace(torch.UntypedStorage, "_new_shared_cuda", staticmethod(wrapper))


def _at_release(gate: Gate, patches: Patches, stack: contextlib.ExitStack) -> None:
    """The count goes back in C++ when an opened storage ends, so what can be struck is the storage's end.

    Up to torch 2.9 the Python object of a storage that torch caches outlives its memory: on a real device the end that
    is struck there comes after the count went back, which `skip` and `duplicate` do not mind.
    """
    torch = _torch(gate)
    if torch is None:
        return
    real = torch.UntypedStorage._new_shared_cuda

    def opens(*args: Any, **kwargs: Any) -> object:
        storage = real(*args, **kwargs)
        if gate.off:
            return storage
        due = gate.reach()
        kept = [strike for strike in due if strike.fault.action == "skip"]
        for strike in kept:
            strike.fired += 1
            gate.armed.kept.append(storage)
        if due and not kept:
            weakref.finalize(storage, _at_end, gate, due, args).atexit = False
        return storage

    patches.replace(torch.UntypedStorage, "_new_shared_cuda", staticmethod(opens))


def _at_end(gate: Gate, due: Sequence[Strike], args: tuple[Any, ...]) -> None:
    if gate.off:
        return
    for strike in due:
        if strike.fault.action == "duplicate":
            strike.fired += 1
            _release(args)
        else:
            gate.carry_out([strike], _nothing, (), {})


def _function(name: str, *owners: str) -> Callable[[Gate, Patches, contextlib.ExitStack], None]:
    """A point at the function `name` of the modules `owners` (those of torch only where torch may be struck)."""

    def install(gate: Gate, patches: Patches, stack: contextlib.ExitStack) -> None:
        if owners[0].startswith("torch") and _torch(gate) is None:
            return
        patches.function(name, [importlib.import_module(owner) for owner in owners], gate.wrap)

    return install


def _at_barrier(gate: Gate, patches: Patches, stack: contextlib.ExitStack) -> None:
    patches.function("barrier", _distributed(gate), gate.wrap)


def _at_collective(gate: Gate, patches: Patches, stack: contextlib.ExitStack) -> None:
    for name in _COLLECTIVES:
        patches.function(name, _distributed(gate), gate.wrap)


def _flush_at_synchronisation(armed: Armed, patches: Patches) -> None:
    gate = Gate("ipc.open", armed, ())

    def wrap(real: Real) -> Real:
        @functools.wraps(real)
        def flushed(*args: object, **kwargs: object) -> object:
            armed.flush()
            return real(*args, **kwargs)

        return flushed

    torch = _torch(gate)
    if torch is not None:
        patches.function("synchronize", [torch.cuda], wrap)
    for name in ("barrier", *_COLLECTIVES):
        patches.function(name, _distributed(gate), wrap)


def _at_clock(gate: Gate, patches: Patches, stack: contextlib.ExitStack) -> None:
    armed = gate.armed

    def wrap(real: Real) -> Real:
        in_ns = real.__name__ == "time_ns"

        def shifted() -> object:
            now: Any = real()
            return now + (round(armed.clock_offset * 1e9) if in_ns else armed.clock_offset)

        functools.update_wrapper(shifted, real)
        gated = gate.wrap(shifted)
        gated.__wrapped__ = real  # type: ignore[attr-defined]
        return gated

    for name in ("time", "time_ns"):
        patches.function(name, [time], wrap)


def _at_fsync(gate: Gate, patches: Patches, stack: contextlib.ExitStack) -> None:
    for name in ("fsync", "fdatasync"):
        patches.function(name, [os, importlib.import_module("posix")], gate.wrap)


def _at_write(gate: Gate, patches: Patches, stack: contextlib.ExitStack) -> None:
    real_open = io.open

    @functools.wraps(real_open)
    def opens(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> object:
        writes = isinstance(mode, str) and not set("wax+").isdisjoint(mode)
        if gate.off or not writes or _opened_by_harness(sys._getframe(1)):
            return real_open(file, mode, *args, **kwargs)
        return _open_gated(gate, real_open, file, mode, *args, **kwargs)

    patches.function("open", [io, importlib.import_module("_io"), builtins], lambda real: opens)
    accessor = getattr(importlib.import_module("pathlib"), "_NormalAccessor", None)  # CPython 3.10 keeps `open` there
    if accessor is not None:
        patches.replace(accessor, "open", staticmethod(opens))


def _opened_by_harness(frame: FrameType | None) -> bool:
    """As `by_harness`, for a file that somebody opens through pathlib or tempfile."""
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("pathlib", "tempfile"):
        frame = frame.f_back
    return by_harness(frame)


class _GatedFile(io.FileIO):
    """The lowest layer of a file that `open` made: what is written here is what would go to the kernel."""

    gate: Gate

    def write(self, data: Any) -> int:
        gate = self.gate
        due = [] if gate.off else gate.reach()
        if due:
            return gate.carry_out(due, super().write, (data,), {})  # type: ignore[return-value]
        return super().write(data)


def _open_gated(
    gate: Gate,
    real: Real,
    file: Any,
    mode: str,
    buffering: int = -1,
    encoding: str | None = None,
    errors: str | None = None,
    newline: str | None = None,
    closefd: bool = True,
    opener: Any = None,
) -> object:
    """`open` for writing, on a raw layer of ours. Wrong arguments are `open`'s own errors."""
    binary = "b" in mode
    sound = len(set(mode)) == len(mode) and sum(map(mode.count, "rwax")) == 1 and set(mode) <= set("rwax+bt")
    refused = (encoding or errors or newline or "t" in mode) if binary else buffering == 0
    if refused or not sound:
        return real(file, mode, buffering, encoding, errors, newline, closefd, opener)
    raw = _GatedFile(file, mode.replace("b", "").replace("t", ""), closefd=closefd, opener=opener)
    raw.gate = gate
    try:
        lines = buffering == 1 or (buffering < 0 and raw.isatty())
        if buffering == 0:
            return raw
        size = buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE
        buffer: Any = io.BufferedRandom(raw, size) if "+" in mode else io.BufferedWriter(raw, size)
        if binary:
            return buffer
        text = io.TextIOWrapper(buffer, encoding, errors, newline, lines)
        text.mode = mode  # type: ignore[misc]
        return text
    except BaseException:
        raw.close()
        raise


def _at_alloc(gate: Gate, patches: Patches, stack: contextlib.ExitStack) -> None:
    """The emulated device's allocator, where it is (any thread); else a dispatch mode on this thread."""
    torch = _torch(gate)
    if torch is None:
        return
    from .emulated import current
    from .emulated.memory import Memory

    real, askers, frame = Memory.own, _Askers(), sys._getframe

    @functools.wraps(real)
    def own(memory: Any, storage: Any, index: int, stream: int) -> object:
        if gate.off or not storage.nbytes() or askers.harness(frame(1)) or not (due := gate.reach()):
            return real(memory, storage, index, stream)
        owned = gate.carry_out(due, real, (memory, storage, index, stream), {})
        gate.armed.kept.extend(storage for one in due if one.fault.action == "retain" and not one.fault.argument)
        return owned

    patches.replace(Memory, "own", own)
    if current() is None and torch.version.cuda is not None:
        inner = stack.enter_context(contextlib.ExitStack())
        mode = inner.enter_context(_allocations(gate))
        gate.armed.between_steps.append(lambda: _leave_if_spent(gate, mode, inner))


def _leave_if_spent(gate: Gate, mode: object, inner: contextlib.ExitStack) -> None:
    """A mode that has nothing left to do costs nothing more; unless somebody else's has been entered on top of it."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    if gate.spent and _get_current_dispatch_mode() is mode:
        inner.close()


def _allocations(gate: Gate) -> contextlib.AbstractContextManager[object]:
    """A dispatch mode that sees every operator that makes a device storage, on this thread.

    It is what torch has: no other way to Python tells of each allocation before it is made, and can be taken back. A
    mode that does nothing costs an operator several us already (benchmarks/faults.py), so it is left once spent.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    askers, frame = _Askers(), sys._getframe

    class Allocations(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:
            kwargs = kwargs or {}
            if gate.off or not _makes_tensor(func) or not _on_device(args, kwargs) or askers.harness(frame(1)):
                return func(*args, **kwargs)
            due = gate.reach()
            return gate.carry_out(due, func, args, kwargs) if due else func(*args, **kwargs)

    return Allocations()


@functools.lru_cache(maxsize=4096)
def _makes_tensor(func: Any) -> bool:
    return any(out.alias_info is None and "Tensor" in str(out.type) for out in func._schema.returns)


def _on_device(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    asked = kwargs.get("device")
    if asked is not None:
        return asked.type == "cuda"  # a dispatch mode is given a torch.device, however it was spelled
    return any(_is_cuda(value) for value in itertools.chain(args, kwargs.values()))


def _is_cuda(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_is_cuda, value))
    return bool(getattr(value, "is_cuda", False))


class _Askers(dict[object, "bool | None"]):
    """Module name -> whether it is the harness; None: it stands between an operator and whoever asked for it."""

    def __missing__(self, module: object) -> bool | None:
        name = str(module)
        between = name.partition(".")[0] in ("torch", "contextlib") or name.startswith("pytest_sglmem.emulated")
        self[module] = found = None if between else _is_harness(name)
        return found

    def harness(self, frame: FrameType | None) -> bool:
        """Whether the harness asked for the operator that is being carried out above `frame`."""
        while frame is not None:
            found = self[frame.f_globals.get("__name__")]
            if found is not None:
                return found
            frame = frame.f_back
        return False


_INSTALL: Mapping[str, Callable[[Gate, Patches, contextlib.ExitStack], None]] = MappingProxyType(
    {
        "ipc.export": _at_export,
        "ipc.open": _at_open,
        "ipc.release": _at_release,
        "ipc.collect": _function("ipc_collect", "torch.cuda"),
        "cuda.alloc": _at_alloc,
        "cuda.synchronize": _function("synchronize", "torch.cuda"),
        "dist.barrier": _at_barrier,
        "dist.collective": _at_collective,
        "step": _at_step,
        "gc.enable": _function("enable", "gc"),
        "pickle.dumps": _function("dumps", "pickle", "_pickle"),
        "pickle.loads": _function("loads", "pickle", "_pickle"),
        "clock.time": _at_clock,
        "file.write": _at_write,
        "file.fsync": _at_fsync,
    }
)

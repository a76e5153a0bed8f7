"""The far side, in one file: what a rank does from its fork to its end. Come up, then call and answer, then go.

It stands alone: nothing here knows pytest's process, only a pipe, a folder and a number. A call is a message (number,
kind, body); an answer carries the same number, so a late one never answers the next question. Errors cross as text: a
held exception is held memory. What the rank is doing is always readable from outside, whatever holds the interpreter:
stacks through faulthandler's own signal handler, collectives through `Notes`.

The device (real or emulated), the IPC ledger, the faults and the tracing are other modules', entered here in this order
and left in the reverse one.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import ctypes
import datetime
import errno
import faulthandler
import gc
import importlib
import inspect
import io
import marshal
import os
import pickle
import random
import signal
import socket
import struct
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import cloudpickle
import pytest

from .records import Progress, RaisedText, Searching, WarningText

if TYPE_CHECKING:
    from .faults import Fault
    from .launch import Setting, Spec
    from .strikes import Armed

STACKS_SIGNAL = signal.SIGRTMIN + 5  # not SIGUSR1: servers use that one themselves
PR_SET_PDEATHSIG = 1
GROUP_LIMIT = datetime.timedelta(days=1)  # of a collective; the limit of a call is what ends a hang, and says more
PROGRESS_EVERY = 0.1  # seconds between two reports of a trace's progress


def main(end: socket.socket, folder: Path, rank: int) -> int:
    """A rank's whole life, in the freshly forked process. Returns its exit status."""
    die_with_parent()
    os.setpgid(0, 0)  # its own group: what it starts ends with it
    _redirect(folder, rank)
    with open(folder / f"stacks.{rank}", "w") as stacks, open(folder / "spec", "rb") as first:
        faulthandler.enable(stacks, all_threads=True)
        faulthandler.register(STACKS_SIGNAL, stacks, all_threads=True)
        setting: Setting = pickle.load(first)
        take_over(setting)
        spec: Spec = pickle.load(first)
        status = Rank(end, folder, rank, spec, setting).live()
        _run_exit_functions()
        faulthandler.disable()
    return status


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that forked it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _redirect(folder: Path, rank: int) -> None:
    """Standard output and error into the rank's file, at the level of file descriptors, unbuffered by Python."""
    out = os.open(folder / f"out.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (out, 1), (out, 2)):
        os.dup2(source, target)
    os.close(out)
    os.close(null)
    # write_through: what a rank printed before it was killed is in the file
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stdout = sys.__stdout__ = _text(1)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _text(2)  # type: ignore[misc]
    sys.breakpointhook = _no_terminal


def _text(fd: int) -> io.TextIOWrapper:
    raw = io.FileIO(fd, "w", closefd=False)  # without a buffer, as under python -u
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)


def _no_terminal(*_: object, **__: object) -> NoReturn:
    raise RuntimeError("breakpoint() in a rank: ranks have no terminal. Print, or call the function outside a world")


def take_over(setting: Setting) -> None:
    """Import path, environment and working directory as pytest has them, and the variables that torchrun sets."""
    sys.path[:] = setting.sys_path
    os.environ.clear()
    os.environ.update(setting.environ)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with contextlib.suppress(FileNotFoundError):
        os.chdir(setting.cwd)


def _run_exit_functions() -> None:
    """What the code under test registered with atexit, and nothing that the fork server's imports did."""
    atexit._run_exitfuncs()
    _flush()


class Rank:
    """One rank: its pipe, its process group, the call it is in."""

    def __init__(self, end: socket.socket, folder: Path, rank: int, spec: Spec, setting: Setting) -> None:
        self.rank = rank
        self._pid = os.getpid()
        self.spec = spec
        self._setting = setting
        self._folder = folder
        self._end = end
        self._reader = end.makefile("rb")
        self._stack = contextlib.ExitStack()
        self._armed: list[tuple[Armed, contextlib.ExitStack]] = []
        self._filters: list[Any] | None = None
        self._showlocals = spec.showlocals
        self._call = 0
        self.notes = Notes.create(folder / f"notes.{rank}")

    def live(self) -> int:
        """Come up, answer calls until told to finish (or until pytest is gone)."""
        self._answer(0, self._come_up)
        kinds: dict[str, Callable[..., object]] = {
            "run": self._run,
            "trace": self._trace,
            "settings": self._settings,
            "arm": self._arm,
            "disarm": self._disarm,
            "fired": self._fired,
            "reached": self._reached,
            "ledger": self._read_ledger,
            "renew": self._renew,
            "finish": self._finish,
        }
        while True:
            message = self._read()
            if message is None:
                return 0
            number, kind, body = pickle.loads(message)
            self._call = number
            if kind == "settings":
                self._settings(*body)
                continue
            self._answer(number, kinds[kind], *body)
            if kind == "finish":
                return 0

    # ------------------------------------------------------------------------------------------ coming up

    def _come_up(self) -> dict[str, object]:
        spec, setting = self.spec, self._setting
        atexit._clear()
        local = self.rank if setting.local_rank is None else setting.local_rank
        os.environ.update(
            RANK=str(self.rank),
            LOCAL_RANK=str(local),
            WORLD_SIZE=str(spec.size),
            LOCAL_WORLD_SIZE=str(setting.local_size or spec.size),
            MASTER_ADDR=setting.master_addr,
            MASTER_PORT=str(setting.master_port),
        )
        gc.enable()
        import torch

        device = self._enter_device(torch, local)
        random.seed(spec.seed)
        # Not torch.manual_seed: it asks every kind of device there might be, and notes who asked, for 2 MB a rank.
        torch.default_generator.manual_seed(spec.seed)
        torch.cuda.manual_seed_all(spec.seed)
        from .faults import armed
        from .ipc import Ledger
        from .tracing import Hands

        self._ledger = self._stack.enter_context(Ledger(self.rank))
        self._hands = Hands.take()  # before faults are armed: they strike the code under test, not the harness
        self._stack.enter_context(self.notes.watching())
        faults = self._stack.enter_context(contextlib.ExitStack())
        self._armed.append((faults.enter_context(armed(spec.faults, rank=self.rank, seed=spec.seed)), faults))
        if spec.init:
            self._make_group("store-0")
        return {**self._group(), **device, "pid": os.getpid()}

    def _enter_device(self, torch: Any, local: int) -> dict[str, object]:
        if self.spec.device == "cuda":
            gpus = self._setting.gpus or tuple(range(torch.cuda.device_count()))
            if not gpus:
                raise RuntimeError("no CUDA device in this rank")
            torch.cuda.set_device(gpus[local % len(gpus)])
            self._prepare_flight_recorder()
            return {"device": torch.cuda.get_device_name(), "ordinal": torch.cuda.current_device()}
        from .emulated import emulated_cuda

        self._stack.enter_context(emulated_cuda(devices=self.spec.size))
        torch.cuda.set_device(local)
        return {"device": "emulated", "ordinal": local}

    def _prepare_flight_recorder(self) -> None:
        """NCCL reads these when a group is made; torch 2.11 and newer warn of the names that older ones know."""
        import torch

        dump = str(Path(self.spec.artifacts) / "nccl-flight-rank-")
        newer = torch.__version__ >= "2.11"
        for name, value in (
            ("TORCH_FR_BUFFER_SIZE" if newer else "TORCH_NCCL_TRACE_BUFFER_SIZE", "2000"),
            ("TORCH_FR_DUMP_TEMP_FILE" if newer else "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", dump),
            ("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", str(self._folder / "flight-")),
        ):
            os.environ.setdefault(name, value)

    def _make_group(self, name: str) -> None:
        import torch.distributed as dist

        if self._setting.store == "file":
            store: Any = dist.FileStore(str(self._folder / name), self.spec.size)
        else:
            address, prefix = self._setting.store.split("/", 1)
            host, port = address.rsplit(":", 1)
            store = dist.PrefixStore(f"{prefix}/{name}", dist.TCPStore(host, int(port), is_master=False))
        dist.init_process_group(
            self._backend(dist), store=store, rank=self.rank, world_size=self.spec.size, timeout=GROUP_LIMIT
        )

    def _backend(self, dist: Any) -> str:
        """The one asked for; else what suits: NCCL where each rank has a GPU of its own, gloo everywhere else."""
        import torch

        asked = self.spec.backend
        cuda = self.spec.device == "cuda"
        gpus = len(self._setting.gpus) or (torch.cuda.device_count() if cuda else 0)
        own = cuda and (self._setting.local_size or self.spec.size) <= gpus
        if asked is None:
            return "cpu:gloo,cuda:nccl" if own and dist.is_nccl_available() else "gloo"
        names = {part.rpartition(":")[2] for part in asked.split(",")}
        for name in sorted(names):
            served = name == "nccl" and not cuda  # the emulated device's nccl is gloo
            if not served and not dist.is_backend_available(name):
                pytest.skip(f"this torch has no backend {name!r}")
        if cuda and "nccl" in names and not own:
            pytest.skip(f"NCCL needs a GPU a rank: {self.spec.size} ranks, {gpus} GPUs")
        return asked

    def _group(self) -> dict[str, object]:
        """What the process group says of itself: part of every hello, so that a smaller world cannot pass."""
        import torch.distributed as dist

        if not dist.is_initialized():
            return {"size": None, "backend": None}
        return {"size": dist.get_world_size(), "backend": _of_device(dist.get_backend()), "group_rank": dist.get_rank()}

    # -------------------------------------------------------------------------------------- call and answer

    def _read(self) -> bytes | None:
        header = self._reader.read(8)
        if len(header) < 8:
            return None
        (size,) = struct.unpack("!Q", header)
        return self._reader.read(size)

    def _send(self, record: object) -> None:
        message = pickle.dumps(record)
        try:
            self._end.sendall(struct.pack("!Q", len(message)) + message)
        except OSError as error:
            if error.errno != errno.EBADF:
                raise
            print(f"[sglmem] the code under test has closed rank {self.rank}'s pipe to pytest", file=sys.stderr)
            os._exit(os.EX_SOFTWARE)

    def _answer(self, number: int, call: Callable[..., object], *body: object) -> None:
        """Run one call and send its answer. Only a call that ran to its end and whose result crossed has a value."""
        value: bytes | None = None
        raised: RaisedText | None = None
        with warnings.catch_warnings(record=True) as given:
            if self._filters is not None:
                warnings.resetwarnings()  # also forgets which warnings were said already
                warnings.filters.extend(self._filters)  # type: ignore[attr-defined]
            try:
                value = dump_result(call(*body))
            except BaseException as error:
                raised = text_of(error, showlocals=self._showlocals)
                forget(error)
            recorded = tuple(map(_warning_text, given or ()))
        if os.getpid() != self._pid:
            self._end_fork(raised)
        _flush()
        self._send((number, self.rank, value, raised, recorded))  # an Answer, field by field: quicker to read

    def _end_fork(self, raised: RaisedText | None) -> NoReturn:
        """The code under test forked, and this child came back from the call: it must not answer for the rank."""
        status = "0"
        if raised is not None and raised.type == "SystemExit":
            status = raised.message
        elif raised is not None:
            status = "1"
            print(f"a fork of rank {self.rank} raised\n{raised.traceback}", file=sys.stderr)
        _flush()
        os._exit(int(status) if status.isdecimal() else int(status not in ("", "None")))

    def _settings(self, path: list[str] | None, filters: bytes | None, showlocals: bool) -> None:
        """What changed in pytest's process since the last call: import path, warning filters."""
        if path is not None:
            sys.path[:] = path
            importlib.invalidate_caches()
        if filters is not None:
            self._filters = pickle.loads(filters)
        self._showlocals = showlocals

    def _run(self, body: bytes) -> object:
        fn, args, kwargs = pickle.loads(body)
        result = fn(*args, **kwargs)
        if not inspect.iscoroutine(result):
            return result
        import asyncio

        return asyncio.run(result)

    def _trace(self, body: bytes) -> object:
        from .tracing import trace_rank

        setup, args, over, options = pickle.loads(body)
        due = 0.0

        def progress(cycle: int, at: int, live: int) -> None:
            nonlocal due
            if time.monotonic() >= due:
                due = time.monotonic() + PROGRESS_EVERY
                self._send(Progress(self._call, self.rank, cycle, at, live))

        return trace_rank(
            setup,
            over,
            args=args,
            rank=self.rank,
            ledger=self._ledger,
            before_step=self._before_step,
            progress=progress if options.pop("progress") else None,
            hands=self._hands,
            artifacts=self.spec.artifacts,
            searching=lambda seconds: self._send(Searching(self._call, self.rank, seconds)),
            **options,
        )

    def _before_step(self) -> None:
        for armed, _ in self._armed:
            armed.before_step()

    # -------------------------------------------------------------------------------- faults and ledger

    def _arm(self, faults: Sequence[Fault]) -> None:
        from .faults import armed

        stack = self._stack.enter_context(contextlib.ExitStack())
        self._armed.append((stack.enter_context(armed(faults, rank=self.rank, seed=self.spec.seed)), stack))

    def _disarm(self) -> dict[str, int]:
        if len(self._armed) < 2:
            raise RuntimeError("nothing was armed since the world started")
        armed, stack = self._armed.pop()
        stack.close()
        return dict(armed.fired)

    def _fired(self) -> dict[str, int]:
        return _added(armed.fired for armed, _ in self._armed)

    def _reached(self) -> dict[str, int]:
        return _added(armed.reached for armed, _ in self._armed)

    def _read_ledger(self) -> object:
        return self._ledger.reading()

    # ------------------------------------------------------------------------------------- renew and end

    def _renew(self, name: str, faults: Sequence[Fault]) -> dict[str, object]:
        """A new process group in place of whatever the last test left. The device keeps what it holds."""
        self._leave_group()
        self.notes.clear()
        if self.spec.init:
            self._make_group(name)
        return {**self._group(), "pid": os.getpid()}

    def _leave_group(self) -> None:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()

    def _finish(self) -> None:
        """Everything in the reverse order of coming up. The parent calls it on all ranks at once."""
        self._leave_group()
        self._stack.close()
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.ipc_collect()  # drops the file of counters where every count came back


def _added(counts: Any) -> dict[str, int]:
    total: dict[str, int] = {}
    for one in counts:
        for key, count in one.items():
            total[key] = total.get(key, 0) + count
    return total


# ------------------------------------------------------------------------------------------------- results


class ResultError(TypeError):
    """A result that cannot leave its rank; the text names the type and where in the result it is."""


def dump_result(value: object) -> bytes:
    """The result, pickled; tensors arrive on the CPU. Raises ResultError naming what cannot cross and where it is."""
    if value is None:
        return _NONE
    try:
        buffer = io.BytesIO()
        _ResultPickler(buffer).dump(value)
        return buffer.getvalue()
    except Exception as error:
        where, kind = find_unpicklable(value)
        advice = " It was never awaited: call asyncio.run in the rank." if kind == "coroutine" else ""
        raise ResultError(
            f"the call returned what cannot leave the rank: {where} is a {kind} ({error}).{advice} "
            "Return plain values or tensors"
        ) from None


_NONE = pickle.dumps(None)


def _reduce_code(code: CodeType) -> tuple[Callable[[bytes], object], tuple[bytes]]:
    return marshal.loads, (marshal.dumps(code),)


class CallPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Functions keep the name of their file, which cloudpickle (from 3.1) drops: tracebacks and sites need it.

    Both sides run the same interpreter, so a code object crosses as marshal writes it.
    """

    dispatch_table = collections.ChainMap({CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table)

    def reducer_override(self, obj: Any) -> Any:
        """A module by value is its globals, without its loader (pytest's, and through it the whole session)."""
        if isinstance(obj, ModuleType) and obj.__name__ in cloudpickle.list_registry_pickle_by_value():
            kept = {name: value for name, value in vars(obj).items() if not name.startswith(("__", "@"))}
            return ModuleType, (obj.__name__,), {**kept, "__file__": getattr(obj, "__file__", None)}
        return super().reducer_override(obj)


class _ResultPickler(CallPickler):
    """Classes of the test file come back as the test's own; a device tensor comes back as one on the CPU."""

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor) and obj.is_cuda:
            return _as_is, (obj.detach().cpu().requires_grad_(obj.requires_grad),)
        return super().reducer_override(obj)


def _as_is(value: object) -> object:
    return value


def find_unpicklable(value: object, where: str = "the result", depth: int = 6) -> tuple[str, str]:
    """Where in `value` the first thing is that cannot be pickled, and its type's name."""
    for name, part in _parts(value) if depth else ():
        try:
            cloudpickle.dumps(part)
        except Exception:
            return find_unpicklable(part, where + name if where != "the result" else f"result{name}", depth - 1)
    return where, type(value).__name__


def _parts(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield f"[{key!r}]", part
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield f"[{index}]", part
    else:
        for key, part in getattr(value, "__dict__", {}).items():
            yield f".{key}", part


# -------------------------------------------------------------------------------------------------- errors


def text_of(error: BaseException, *, showlocals: bool = False) -> RaisedText:
    """The exception as text: the traceback as pytest prints it, from the user's first frame on."""
    own = _users_part(error.__traceback__)
    try:
        if isinstance(error, ResultError):
            own = None  # the body ran to its end; no line of it is at fault
        error = error.with_traceback(own)
        shown = _as_pytest(error, showlocals) if own is not None else ""
    except Exception as another:  # a __repr__ or a __str__ of the code under test
        shown = "".join(traceback.format_tb(own)) + f"(its text could not be made: {type(another).__name__})"
    try:
        message = str(error)
    except Exception as another:
        message = f"(its __str__ raised {type(another).__name__})"
    kind = type(error)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return RaisedText(name, message, shown, _outcome(error), _place(own), _collective(own))


def _users_part(tb: TracebackType | None) -> TracebackType | None:
    """The traceback from the user's first frame on; the last frame alone where all of it is the harness's."""
    from .sites import is_plumbing

    while tb is not None and tb.tb_next is not None and is_plumbing(tb.tb_frame.f_code.co_filename):
        tb = tb.tb_next
    return tb


def _as_pytest(error: BaseException, showlocals: bool) -> str:
    shown = pytest.ExceptionInfo.from_exception(error)
    return str(shown.getrepr(style="long", showlocals=showlocals, tbfilter=_without_the_harness))


def _without_the_harness(shown: pytest.ExceptionInfo[BaseException]) -> Any:
    """The traceback without the frames of this package between two of the user's."""
    from .sites import is_plumbing

    own = os.path.dirname(os.path.abspath(__file__))
    traceback = shown.traceback
    last = traceback[-1] if traceback else None
    return traceback.filter(
        lambda entry: entry is last or not (str(entry.path).startswith(own) and is_plumbing(str(entry.path)))
    )


def _outcome(error: BaseException) -> Any:
    for kind, word in (
        (pytest.skip.Exception, "skipped"),
        (pytest.xfail.Exception, "xfailed"),
        (pytest.fail.Exception, "failed"),
    ):
        if isinstance(error, kind):
            return word
    return "raised"


def _place(tb: TracebackType | None) -> str:
    """The innermost line of the user's, as "file.py:41 in share"."""
    from .sites import format_frames

    frames = [(f.filename, f.lineno or 0, f.name) for f in traceback.extract_tb(tb)] if tb is not None else []
    return next(iter(format_frames(reversed(frames))), "")


def _collective(tb: TracebackType | None) -> str:
    """The function of torch.distributed that it came out of; empty where the user's own line raised."""
    found = ""
    while tb is not None:
        code = tb.tb_frame.f_code
        if code.co_filename.endswith("distributed_c10d.py"):
            found = found or code.co_name
        elif f"{os.sep}torch{os.sep}" not in code.co_filename:
            found = ""
        tb = tb.tb_next
    return found


def forget(error: BaseException | None, seen: frozenset[int] = frozenset()) -> None:
    """Let go of all that the frames of an exception (and of those it came from) hold: held frames are held tensors."""
    if error is None or id(error) in seen:
        return
    seen = seen | {id(error)}
    forget(error.__cause__, seen)
    forget(error.__context__, seen)
    for inner in getattr(error, "exceptions", ()):
        forget(inner, seen)
    traceback.clear_frames(error.__traceback__)
    tb = error.__traceback__
    while tb is not None:
        if tb.tb_frame.f_code.co_filename != __file__:
            tb.tb_frame.f_locals  # noqa: B018  up to 3.12 a cached dictionary keeps the values until it is read again
        tb = tb.tb_next
    error.__traceback__ = None


def _warning_text(given: warnings.WarningMessage) -> WarningText:
    try:
        category = cloudpickle.dumps(given.category)
    except Exception:
        category = pickle.dumps(UserWarning)
    return WarningText(category, str(given.message), given.filename, given.lineno)


def _name(function: object) -> str:
    code = getattr(function, "__code__", None)
    name = getattr(function, "__qualname__", repr(function))
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code is not None else name


def _flush() -> None:
    """Python's streams, and C's, which buffers because the file is no terminal."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError, AttributeError):
            stream.flush()
    ctypes.pythonapi.fflush(None)


# --------------------------------------------------------------------------------------------------- notes


@dataclass(frozen=True)
class Collective:
    """One collective that a rank went into: which of its group's (from 1), what, of how many elements of which type.

    `elements` is -1 where ranks may rightly differ (uneven splits, point to point).
    """

    group: str
    number: int
    name: str
    elements: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.name}({self.elements} {self.dtype})" if self.elements >= 0 else self.name


ENTRY = struct.Struct("<16sI24sq12s")
KEPT = 128  # the last collectives of a rank, for comparing with its peers'
# The method of a process group, what users call it, and which argument tells a size that all ranks must agree on.
WATCHED: tuple[tuple[str, str, int | None], ...] = (
    ("allreduce", "all_reduce", 0),
    ("allreduce_coalesced", "all_reduce_coalesced", 0),
    ("broadcast", "broadcast", 0),
    ("reduce", "reduce", 0),
    ("allgather", "all_gather", 1),
    ("_allgather_base", "all_gather_into_tensor", 1),
    ("all_gather_single", "all_gather_into_tensor", 1),
    ("gather", "gather", 1),
    ("scatter", "scatter", 0),
    ("reduce_scatter", "reduce_scatter", 0),
    ("_reduce_scatter_base", "reduce_scatter_tensor", 0),
    ("reduce_scatter_single", "reduce_scatter_tensor", 0),
    ("alltoall_base", "all_to_all_single", None),
    ("all_to_all_single", "all_to_all_single", None),
    ("alltoall", "all_to_all", None),
    ("barrier", "barrier", None),
)


class Notes:
    """The collectives this rank went into, in a file that the parent can read whatever became of the rank.

    Fixed-size entries in a ring behind a count; about 3 us a collective. They are taken where every Python caller
    passes, at the methods of the process group; C++ callers (DDP's reducer, functional collectives) are not seen.
    """

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self._count = 0
        self._numbers: dict[str, int] = {}

    @classmethod
    def create(cls, path: Path) -> Notes:
        """Notes in a new file at `path`."""
        import mmap

        size = 8 + KEPT * ENTRY.size
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(fd, size)
            return cls(mmap.mmap(fd, size))
        finally:
            os.close(fd)

    def clear(self) -> None:
        """A new process group counts from one again."""
        self._count = 0
        self._numbers.clear()
        self._memory[:8] = bytes(8)

    def note(self, group: str, name: str, elements: int, dtype: str) -> None:
        """One collective begins."""
        number = self._numbers[group] = self._numbers.get(group, 0) + 1
        entry = (group.encode()[-16:], number, name.encode()[:24], elements, dtype.encode()[:12])
        ENTRY.pack_into(self._memory, 8 + (self._count % KEPT) * ENTRY.size, *entry)
        self._count += 1
        struct.pack_into("<Q", self._memory, 0, self._count)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Note every collective of every process group, until it ends."""
        from torch.distributed import ProcessGroup

        kept = {method: vars(ProcessGroup)[method] for method, _, _ in WATCHED if method in vars(ProcessGroup)}
        for method, name, sized in WATCHED:
            if method in kept:
                setattr(ProcessGroup, method, self._noted(kept[method], name, sized))
        try:
            yield
        finally:
            for method, original in kept.items():
                setattr(ProcessGroup, method, original)

    def _noted(self, original: Callable[..., object], name: str, sized: int | None) -> Callable[..., object]:
        def noted(group: Any, *args: Any, **kwargs: Any) -> object:
            elements, dtype = _size(args[sized]) if sized is not None and len(args) > sized else (-1, "")
            self.note(group.group_name, name, elements, dtype)
            return original(group, *args, **kwargs)

        return noted


def _size(tensors: Any) -> tuple[int, str]:
    """Elements and type of the tensors of one collective; lists of lists are counted through."""
    first = tensors
    while isinstance(first, list | tuple) and first:
        first = first[0]
    if isinstance(first, list | tuple):
        return -1, ""
    flat = [tensors] if first is tensors else tensors
    total = sum(_size(part)[0] if isinstance(part, list | tuple) else part.numel() for part in flat)
    return total, str(first.dtype).removeprefix("torch.")


def read_notes(data: bytes) -> tuple[Collective, ...]:
    """The last collectives of a rank, oldest first, from the bytes of its file."""
    if len(data) < 8:
        return ()
    (count,) = struct.unpack_from("<Q", data)
    found = []
    for index in range(max(0, count - KEPT), count):
        group, number, name, elements, dtype = ENTRY.unpack_from(data, 8 + (index % KEPT) * ENTRY.size)
        words = [word.rstrip(b"\0").decode(errors="replace") for word in (group, name, dtype)]
        found.append(Collective(words[0], number, words[1], elements, words[2]))
    return tuple(found)


def _of_device(backend: str) -> str:
    """The backend that device tensors go by: "nccl" of "cpu:gloo,cuda:nccl"."""
    by_device = dict(part.split(":", 1) for part in backend.split(",") if ":" in part)
    return by_device.get("cuda", backend)

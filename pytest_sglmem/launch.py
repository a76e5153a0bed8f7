"""How ranks come to be: a fork server that has torch imported and its heap frozen, and the processes it makes.

The server is a program of its own, started once a session on first use. It never touches CUDA, has one thread once it
forks, and does four things: fork a rank, pass on a signal (and kill what did not heed it in time), reap a rank (with
everything the rank itself started), and, when pytest is gone however it went, kill all ranks, remove the session's
folder and end. In a worker of xdist it does so as well when the controller is gone, which the worker itself would heed
seconds later, and interrupts the worker.
The parent side (`Launcher`, `RankProcess`) knows nothing of calls and answers: that is `world.py`; what runs in a rank
is `rank.py`.

It imports neither torch nor pytest in pytest's own process. Limits: Linux only; what a rank starts in a session of its
own (setsid) is out of reach.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import importlib
import importlib.util
import json
import os
import pickle
import random
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from .scratch import Scratch

if TYPE_CHECKING:
    from .faults import Fault

PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.multiprocessing.reductions",
    "torch.optim",
    "torch._dynamo",  # the first optimizer step imports it: 1.2 s in every rank, and growth in the first cycle
    "pytest",
    "cloudpickle",
    "objgraph",
    "pytest_sglmem.rank",
    "pytest_sglmem.emulated",
    "pytest_sglmem.tracing",
    "pytest_sglmem.ipc",
    "pytest_sglmem.strikes",
    "pytest_sglmem.autograd",
    "pytest_sglmem.holders",
    "pytest_sglmem.links",
)
BACKENDS = ("gloo", "nccl", "ucc", "mpi", "xccl", "fake")  # torch's own: known, whether or not it is built with them
SERVER_LIMIT = 120.0  # seconds for the server's imports: 3 s on a warm disk, a minute on a cold network one
FORK_LIMIT = 60.0  # seconds for one fork: 5 ms where memory is there
KILL_LIMIT = 5.0  # seconds that a killed process may take: a driver that does not let go must not hang pytest
PART = 1 << 16  # bytes read at once: more, and every small answer costs a mapping of fresh memory
MESSAGE = 1 << 16  # bytes of one message to or from the server; specs travel in files
SERVER = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[4]); import pytest_sglmem.launch as l; l.serve(*sys.argv[1:])"
)


@dataclass(frozen=True)
class Spec:
    """What a world is to be. Frozen and hashable: equal specs may share a world.

    `device`: where ranks allocate; `backend`: of the process group, None for the device's default; `init`: whether the
    harness makes the group or leaves that to the code under test; `timeout`: seconds of one call; `faults`: armed in
    every rank from its start; `artifacts`: where failures leave files; `showlocals`: tracebacks with local variables;
    `live_output`: print what ranks print at once, with a prefix; `whole_gpus`: no other process of this harness on this
    machine uses these GPUs meanwhile.
    """

    size: int = 2
    device: Literal["emulated", "cuda"] = "emulated"
    backend: str | None = None
    init: bool = True
    timeout: float = 120.0
    seed: int = 0
    faults: tuple[Fault, ...] = ()
    artifacts: str = ".sglmem"
    ipc_audit: bool = True
    nodeid: str = ""
    rootdir: str = ""
    showlocals: bool = False
    live_output: bool = False
    whole_gpus: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 1:
            raise ValueError(f"a world has at least one rank (got size={self.size!r})")
        if not self.timeout > 0:
            raise ValueError(f"the limit of a call is more than 0 seconds (got timeout={self.timeout!r})")
        if self.device not in ("emulated", "cuda"):
            raise ValueError(f"device is 'emulated' or 'cuda' (got {self.device!r})")
        if self.backend is not None and (right := wrong_backend(self.backend)):
            raise ValueError(f"the backend is {right} (got {self.backend!r})")


def wrong_backend(asked: str) -> str:
    """Empty where torch may know this backend, alone or by device ("cpu:gloo,cuda:nccl"); else what would be right."""
    torch = sys.modules.get("torch.distributed")
    registered = torch.Backend.backend_list if torch is not None and torch.is_available() else ()
    for part in asked.split(","):
        device, _, name = part.rpartition(":")
        if device not in ("", "cpu", "cuda") or name not in {*BACKENDS, *registered}:
            return f"one of {', '.join(BACKENDS)}, alone or by device as in 'cpu:gloo,cuda:nccl'"
    return ""


class LaunchError(Exception):
    """The harness could not start what it needs: no torch, no memory, no server. Not the test's fault."""


class Unavailable(Exception):
    """This machine cannot have the world that was asked for; the text is the reason to skip with."""


@dataclass
class Setting:
    """What a rank takes over from pytest's process at its start: import path, environment, working directory."""

    sys_path: list[str]
    environ: dict[str, str]
    cwd: str
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    store: str = "file"  # or "HOST:PORT/PREFIX" of a TCPStore, where ranks live on several machines
    local_rank: int | None = None  # None: the rank itself
    local_size: int | None = None
    gpus: tuple[int, ...] = ()  # the devices to use, by ordinal; empty: all

    @classmethod
    def here(cls) -> Setting:
        """This process's own, now."""
        return cls(sys_path=list(sys.path), environ=dict(os.environ), cwd=os.getcwd(), master_port=free_port())


class Pipe:
    """Pytest's end of a pipe to a rank: whole messages, and never a wait without a limit in either direction.

    A message is its length (8 bytes, network order) and its bytes. A rank that stopped in the middle of a message, or
    that reads nothing, cannot hold pytest up.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._socket.setblocking(False)
        self._parts = bytearray()

    def fileno(self) -> int:
        """To wait for messages; `receive` reads them."""
        return self._socket.fileno()

    def send(self, message: bytes, *, limit: float) -> None:
        """Send one message. Raises TimeoutError after `limit` seconds, OSError where the other end is gone."""
        data = struct.pack("!Q", len(message)) + message
        try:
            sent = self._socket.send(data)
        except BlockingIOError:
            sent = 0
        if sent == len(data):
            return
        self._socket.settimeout(limit)
        try:
            self._socket.sendall(memoryview(data)[sent:])
        finally:
            self._socket.setblocking(False)

    def receive(self) -> list[bytes]:
        """The whole messages that are there, without waiting. Raises EOFError where no more can come."""
        ended = False
        while True:
            try:
                part = self._socket.recv(PART)
            except BlockingIOError:
                break
            except ConnectionResetError:
                part = b""
            self._parts += part
            ended = not part
            if len(part) < PART:  # that was all; whether the other end is gone too, the next call sees
                break
        messages = list(self._whole())
        if ended and not messages:
            raise EOFError
        return messages

    def _whole(self) -> Iterable[bytes]:
        while len(self._parts) >= 8:
            (size,) = struct.unpack_from("!Q", self._parts)
            if len(self._parts) < 8 + size:
                return
            yield bytes(self._parts[8 : 8 + size])
            del self._parts[: 8 + size]

    def close(self) -> None:
        """Close it: the rank sees the end and ends too."""
        self._socket.close()

    def leave_open(self) -> None:
        """Close it only when this process ends, so that the other end learns of that."""
        self._socket.detach()


class RankProcess(Protocol):
    """One rank as pytest's side sees it, wherever it runs."""

    rank: int
    pid: int
    where: str
    pipe: Pipe

    def exit_code(self) -> int | None:
        """None while it runs; the status it exited with, or minus the signal that killed it."""

    def signal(self, number: int) -> None:
        """Send it a signal; nothing where it has ended."""

    def end(self, limit: float) -> None:
        """Have it terminated, and killed if it has not ended `limit` seconds later. Nobody waits for that."""

    def output(self) -> bytes:
        """Everything it printed so far, stdout and stderr in order."""

    def stacks(self) -> str:
        """What faulthandler wrote so far."""

    def ledger(self) -> bytes:
        """The file in which the rank notes what it is doing (see `rank.Notes`)."""

    def record_flight(self) -> bool:
        """Have NCCL's flight recorder write its dump into the artifacts; False where it does not run."""


class Starter(Protocol):
    """Whoever starts ranks, as a world sees it: `Launcher` here, `torchrun.Launcher` where torchrun started pytest."""

    @property
    def broken(self) -> str:
        """Why it no longer works; empty while it does."""

    def mine(self) -> bool:
        """Whether this process started it, and it still works."""

    def fileno(self) -> int:
        """To wait for news of ended ranks; `listen` reads them."""

    def listen(self) -> None:
        """Read all news that are there, without waiting."""

    def start(self, spec: Spec) -> list[RankProcess]:
        """Start the ranks of one world; they say hello on their pipes. Raises LaunchError or Unavailable."""

    def forget(self, processes: Iterable[RankProcess]) -> None:
        """The world is over: close its pipes, remove its files."""


# ------------------------------------------------------------------------------------------------ pytest's side


@dataclass
class LocalRank:
    """A rank on this machine. Everything but its pipe is a file in the world's folder."""

    launcher: Launcher
    rank: int
    pid: int
    pipe: Pipe
    folder: Path
    where: str = ""

    def exit_code(self) -> int | None:
        """None while it runs; the status it exited with, or minus the signal that killed it."""
        return self.launcher.exit_code(self.pid)

    def signal(self, number: int) -> None:
        """Send it a signal; nothing where it has ended."""
        self.launcher.ask("signal", self.pid, number)

    def end(self, limit: float) -> None:
        """Have it terminated, and killed if it has not ended `limit` seconds later. Nobody waits for that."""
        self.launcher.ask("end", self.pid, limit)

    def output(self) -> bytes:
        """Everything it printed so far, stdout and stderr in order."""
        return _content(self.folder / f"out.{self.rank}")

    def stacks(self) -> str:
        """What faulthandler wrote so far."""
        return _content(self.folder / f"stacks.{self.rank}").decode(errors="replace")

    def ledger(self) -> bytes:
        """The file in which the rank notes what it is doing."""
        return _content(self.folder / f"notes.{self.rank}")

    def record_flight(self) -> bool:
        """Have NCCL's flight recorder write its dump into the artifacts; False where it does not run."""
        return record_flight(self.folder, self.rank)


def record_flight(folder: Path, rank: int) -> bool:
    """Ask the recorder of one rank through its pipe, which a thread of NCCL's reads whatever the rank is doing."""
    try:
        pipe = os.open(folder / f"flight-{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    with open(pipe, "wb", buffering=0) as asked:
        asked.write(b"1\n")
    return True


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


class Launcher:
    """The session's fork server, seen from pytest. Starting it returns at once; the first fork waits for its imports.

    It serves any number of worlds one after another or side by side. A forked copy of pytest (`--forked`) must not use
    the parent's: ask `mine()`. `controller`: the process that this one works for (xdist's), and without which it ends.
    """

    def __init__(self, *, preload: Sequence[str] = PRELOAD, controller: int | None = None) -> None:
        self.owner = os.getpid()
        self._scratch = Scratch()
        self.folder = self._scratch.path
        self._worlds = 0
        self._ready = False
        self._codes: dict[int, int] = {}
        self._forked: dict[str, int] = {}
        self._broken = ""
        self._locks: dict[str, list[int]] = {}
        self._socket, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environ = {k: v for k, v in os.environ.items() if k != "PYTHONWARNINGS"}
        environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does; and a server with one thread forks safely
        environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # an import that asks whether CUDA is there must not start it
        environ.setdefault(
            "TORCHINDUCTOR_CACHE_DIR", str(self.folder / "inductor")
        )  # an import makes it, and leaves it
        watched = [self.owner] if controller is None else [self.owner, controller]
        with there, open(self.folder / "server.txt", "wb") as errors:
            self._server = subprocess.Popen(
                [
                    *(sys.executable, "-c", SERVER, str(there.fileno()), str(self.folder)),
                    *(json.dumps(watched), json.dumps(sys.path), *preload),
                ],
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                env=environ,
                start_new_session=True,  # Ctrl-C goes to pytest alone, which then ends the ranks itself
            )

    def mine(self) -> bool:
        """Whether this process started it, and it still works."""
        return self.owner == os.getpid() and not self._broken

    def fileno(self) -> int:
        """To wait for news of ended ranks; `listen` reads them."""
        return self._socket.fileno()

    def start(self, spec: Spec) -> list[RankProcess]:
        """Fork the ranks of one world; they say hello on their pipes. Raises LaunchError."""
        if self.owner != os.getpid():
            raise LaunchError("this launcher belongs to another process, of which this one is a fork")
        folder = self.world_folder()
        setting = Setting.here()
        try:
            if spec.device == "cuda" and spec.whole_gpus:
                setting.gpus = self._lock_gpus(str(folder), spec.size)
            self.prepare(folder, setting, spec)
            return self.fork(folder, range(spec.size))
        except BaseException:
            self._clear(folder)
            raise

    def world_folder(self) -> Path:
        """A new folder for one world's files."""
        self._worlds += 1
        folder = self.folder / f"world-{self._worlds}"
        folder.mkdir()
        return folder

    def prepare(self, folder: Path, setting: Setting, spec: Spec) -> None:
        """Write what the ranks of this folder read first."""
        (folder / "spec").write_bytes(pickle.dumps(setting) + pickle.dumps(spec))

    def fork(self, folder: Path, ranks: Iterable[int]) -> list[RankProcess]:
        """Fork these ranks into a prepared folder, each at the end of a new pipe. Raises LaunchError."""
        pipes: dict[int, Pipe] = {}
        self._wait_ready()
        try:
            for rank in ranks:
                here, there = socket.socketpair()
                with there:
                    pipes[rank] = Pipe(here)
                    self.ask("fork", str(folder), rank, fds=[there.fileno()])
            return [LocalRank(self, rank, self._pid(folder, rank), pipe, folder) for rank, pipe in pipes.items()]
        except BaseException:
            for pipe in pipes.values():  # what was forked already sees the end of its pipe, and ends
                pipe.close()
            raise

    def fork_at(self, folder: Path, rank: int, end: socket.socket) -> int:
        """Fork one rank into a prepared folder, its pipe being `end`; returns its process id. Raises LaunchError."""
        self._wait_ready()
        self.ask("fork", str(folder), rank, fds=[end.fileno()])
        return self._pid(folder, rank)

    def _pid(self, folder: Path, rank: int) -> int:
        key = f"{folder}/{rank}"
        self._listen_until(lambda: key in self._forked, time.monotonic() + FORK_LIMIT, "to fork a rank")
        pid = self._forked.pop(key)
        if pid < 0:
            raise LaunchError(f"rank {rank} could not be forked: {os.strerror(-pid)}")
        return pid

    def forget(self, processes: Iterable[RankProcess]) -> None:
        """The world is over: close its pipes, remove its folder, give its GPUs back."""
        for process in processes:
            process.pipe.close()
            if isinstance(process, LocalRank):
                self._codes.pop(process.pid, None)
                self._clear(process.folder)

    def _clear(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        for lock in self._locks.pop(str(folder), ()):
            os.close(lock)

    def exit_code(self, pid: int) -> int | None:
        """None while it runs; the status it exited with, or minus the signal that killed it."""
        return self._codes.get(pid)

    def listen(self) -> None:
        """Read all news from the server that are there, without waiting."""
        while not self._broken:
            try:
                data = self._socket.recv(MESSAGE, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except InterruptedError:
                continue
            if not data:
                self._broken = self._last_words()
                return
            kind, *news = json.loads(data)
            if kind == "ready":
                self._ready = True
            elif kind == "forked":
                self._forked[news[0]] = news[1]
            elif kind == "ended":
                self._codes[news[0]] = news[1]

    @property
    def broken(self) -> str:
        """Why the server no longer works; empty while it does."""
        return self._broken

    def ask(self, *request: object, fds: Sequence[int] = ()) -> None:
        """Send the server one request. Where it is gone, `broken` will say so."""
        try:
            socket.send_fds(self._socket, [json.dumps(request).encode()], fds)
        except (BrokenPipeError, ConnectionResetError, OSError):
            self.listen()
            self._broken = self._broken or self._last_words()

    def close(self, status: int = 0) -> None:
        """End the server and with it every rank. Bounded; safe to call twice and from a fork (which ends nothing).

        `status`: the session's exit status, which no process of this launcher needs to know.
        """
        if self.owner != os.getpid():
            return
        self.listen()
        self._socket.close()
        self._broken = self._broken or "closed"
        if not self._ready:  # still importing: it has no rank, and would see only afterwards that nobody is there
            self._server.kill()
        try:
            self._server.wait(KILL_LIMIT)
        except subprocess.TimeoutExpired:
            self._server.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._server.wait(KILL_LIMIT)
        self._scratch.remove()

    def _wait_ready(self) -> None:
        limit = time.monotonic() + SERVER_LIMIT
        self._listen_until(lambda: self._ready, limit, "to import torch")

    def _listen_until(self, done: Callable[[], bool], limit: float, what: str) -> None:
        while not done():
            if self._broken:
                raise LaunchError(self._broken)
            left = limit - time.monotonic()
            if left <= 0:
                raise LaunchError(f"the fork server took too long {what}:\n{self._server_text()}")
            select.select([self._socket], [], [], left)
            self.listen()

    def _last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._server.wait(KILL_LIMIT)
        return f"the fork server ended (status {self._server.returncode}):\n{self._server_text()}"

    def _server_text(self) -> str:
        return _content(self.folder / "server.txt").decode(errors="replace")[-4000:].strip() or "(it said nothing)"

    def _lock_gpus(self, key: str, count: int) -> tuple[int, ...]:
        gpus, self._locks[key] = lock_gpus(count)
        return gpus


def lock_gpus(count: int, *, limit: float = 600.0) -> tuple[tuple[int, ...], list[int]]:
    """Take `count` GPUs that no other process of this harness on this machine has taken; wait for them up to `limit`
    seconds (one whole-GPU test of a neighbour). Returns their ordinals and the locks, which closing releases.
    """
    total = visible_gpus()
    if count > total:
        raise LaunchError(f"{count} whole GPUs asked for, {total} here")
    end = time.monotonic() + limit
    while True:
        taken: list[tuple[int, int]] = []
        for gpu in range(total):
            with socket.socket(socket.AF_UNIX) as lock, contextlib.suppress(OSError):  # taken: the name is in use
                lock.bind(f"\0sglmem-gpu-{os.getuid()}-{gpu_name(gpu)}")  # a name that is no file, and leaves none
                taken.append((gpu, lock.detach()))
            if len(taken) == count:
                return tuple(gpu for gpu, _ in taken), [fd for _, fd in taken]
        for _, fd in taken:  # never hold some while waiting for more: two neighbours would wait for each other
            os.close(fd)
        if time.monotonic() > end:
            raise LaunchError(f"no {count} free GPUs within {limit:.0f} s: other workers hold them")
        time.sleep(0.05 + random.random() / 10)


def gpu_name(ordinal: int) -> str:
    """What tells one GPU of this machine from another, also under CUDA_VISIBLE_DEVICES."""
    names = [n.strip() for n in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if n.strip()]
    return re.sub(r"\W", "-", names[ordinal]) if ordinal < len(names) else str(ordinal)


def free_port() -> int:
    """A TCP port that nothing listens on now, below the range from which clients get theirs.

    Nobody holds it until the code under test does, so a neighbour could take it first; the start is random to make that
    unlikely. The harness itself uses no port.
    """
    chance = random.Random(os.urandom(8))
    for _ in range(100):
        port = chance.randrange(20000, 32000)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port
    raise LaunchError("100 ports between 20000 and 32000 were tried, all are taken")


# ---------------------------------------------------------------------------------------------------- the device


def resolve_device(asked: str) -> Literal["cuda", "emulated"]:
    """ "auto" is cuda where torch is built for it and a GPU is visible, else emulated. Starts no CUDA context and does
    not import torch. Raises ValueError with the reason where "cuda" cannot be had, and for any other word.
    """
    if asked == "emulated":
        return "emulated"
    if asked not in ("auto", "cuda"):
        raise ValueError(f"the device is 'auto', 'cuda' or 'emulated' (got {asked!r})")
    reason = no_cuda()
    if not reason:
        return "cuda"
    if asked == "cuda":
        raise ValueError(f"no CUDA device to run on: {reason}")
    return "emulated"


def no_cuda() -> str:
    """Why CUDA cannot be used here; empty where it can."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "torch is not installed"
    built = Path(spec.origin).with_name("version.py")
    if not re.search(r"^cuda\b[^=\n]*= *['\"]", built.read_text(encoding="utf-8"), re.MULTILINE):
        return "this torch is built without CUDA"
    return "" if visible_gpus() else "torch is built with CUDA, but no GPU is visible"


def visible_gpus() -> int:
    """GPUs that a rank will see, by NVML (which starts no context) and CUDA_VISIBLE_DEVICES."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    if nvml.nvmlInit_v2() != 0:
        return 0
    count = ctypes.c_uint(0)
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    nvml.nvmlShutdown()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return count.value
    named = [name.strip() for name in visible.split(",") if name.strip()]
    return min(count.value, len(named)) if "-1" not in named else named.index("-1")


# --------------------------------------------------------------------------------------------------- the server


def serve(fd: str, folder: str, watched: str, path: str, *preload: str) -> None:
    """The server's whole life: import, freeze, then fork ranks until pytest is gone."""
    del path  # the program's first line has taken it
    gc.disable()  # nothing of the imports is garbage, and every collection would touch every page
    server = _Server(socket.socket(fileno=int(fd)), Path(folder), _Watch(*json.loads(watched)))
    # torch.distributed.nn makes a folder as it is imported, for the life of the process: in here it goes with the rest.
    tempfile.tempdir = folder
    with server.importing():
        for name in preload:
            try:
                importlib.import_module(name)
            except ImportError as error:
                raise SystemExit(f"a world needs {name}: {error}") from error
        if "pytest_sglmem.emulated" in preload:
            from .emulated import prepare

            prepare()
    tempfile.tempdir = None
    # Ranks share these pages: a collection in a rank neither walks nor copies them. No collection before: it would
    # leave holes in them, which ranks then fill, a copied page for each (6 MB a rank more).
    gc.freeze()
    server.run()


class _Watch:
    """The processes without which the server ends: pytest, its parent, and in a worker of xdist the controller."""

    def __init__(self, parent: int, controller: int | None = None) -> None:
        self.parent, self.controller = _pidfd(parent), None if controller is None else _pidfd(controller)
        self.files = [fd for fd in (self.parent, self.controller) if fd is not None]

    def over(self, ready: Iterable[int]) -> bool:
        """Whether one of them is gone. Pytest is interrupted where its controller is: nobody waits for it any more."""
        gone = set(ready).intersection(self.files)
        if self.controller in gone and self.parent is not None:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self.parent, signal.SIGINT)
        return bool(gone)


@dataclass
class _Server:
    """State of the fork server: the socket to pytest, the folder of the session, the ranks that run."""

    socket: socket.socket
    folder: Path
    watch: _Watch
    ranks: set[int] = field(default_factory=set)
    files: list[int] = field(default_factory=list)
    doomed: dict[int, float] = field(default_factory=dict)  # rank's process: when it is killed

    @contextlib.contextmanager
    def importing(self) -> Iterator[None]:
        """A thread looks after pytest meanwhile: imports take seconds, and there is no rank yet to fork beside it."""
        done, told = os.pipe()
        thread = threading.Thread(target=self._wait_for_the_end, args=(done,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            os.write(told, b"1")
            thread.join()
            os.close(done)
            os.close(told)

    def _wait_for_the_end(self, done: int) -> None:
        poll = select.poll()
        for fd in (done, *self.watch.files):
            poll.register(fd, select.POLLIN)
        poll.register(self.socket, 0)  # its end alone
        ready = [fd for fd, _ in poll.poll()]
        if done not in ready:
            self.watch.over(ready)
            self._end()

    def run(self) -> None:
        wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(woken)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        poll = select.poll()
        for fd in (self.socket.fileno(), wake, *self.watch.files):
            poll.register(fd, select.POLLIN)
        self.files = [wake, woken, *self.watch.files]
        self._tell("ready")
        while True:
            ready = {fd for fd, _ in poll.poll(self._pause())}
            self._kill_doomed()
            if wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake, 4096)
                self._reap()
            if self.watch.over(ready) or (self.socket.fileno() in ready and not self._obey()):
                self._end()

    def _obey(self) -> bool:
        """One request; False when pytest's end is closed."""
        try:
            data, fds, _, _ = socket.recv_fds(self.socket, MESSAGE, 1)
        except ConnectionResetError:
            return False
        if not data:
            return False
        kind, *args = json.loads(data)
        if kind == "fork":
            self._fork(*args, fd=fds[0])
        elif kind == "signal":
            self._signal(*args)
        elif kind == "end":
            self._signal(args[0], signal.SIGTERM)
            self.doomed[args[0]] = time.monotonic() + args[1]
        return True

    def _signal(self, pid: int, number: int) -> None:
        if pid in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _pause(self) -> float | None:
        """Milliseconds until the next rank is killed; None where none is to be."""
        return max(0.0, 1000 * (min(self.doomed.values()) - time.monotonic())) if self.doomed else None

    def _kill_doomed(self) -> None:
        for pid, when in list(self.doomed.items()):
            if time.monotonic() >= when:
                self._signal(pid, signal.SIGKILL)
            if time.monotonic() >= when or pid not in self.ranks:
                del self.doomed[pid]

    def _fork(self, folder: str, rank: int, *, fd: int) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            pid = -(error.errno or errno.EAGAIN)
        if pid == 0:
            self._become(folder, rank, fd)
        os.close(fd)
        if pid > 0:
            self.ranks.add(pid)
        self._tell("forked", f"{folder}/{rank}", pid)

    def _become(self, folder: str, rank: int, fd: int) -> None:
        """In the child: let go of all that is the server's, then be a rank. Never returns."""
        status = os.EX_SOFTWARE  # a fault of ours, before the rank's own code ran
        try:
            from . import rank as far_side

            signal.set_wakeup_fd(-1)
            for mine in self.files:
                os.close(mine)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            self.socket.close()
            status = far_side.main(socket.socket(fileno=fd), Path(folder), rank)
        except SystemExit as end:  # of an exit function of the code under test
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def _reap(self) -> None:
        for pid in list(self.ranks):
            # WNOWAIT: while the dead rank still holds its id, what it started can be killed and nobody else hit
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                continue
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            for left in Path("/dev/shm").glob(f"torch_{pid}_*"):  # counters of CUDA handles outlive a killed producer
                left.unlink(missing_ok=True)
            _, status = os.waitpid(pid, 0)
            self.ranks.discard(pid)
            self._tell("ended", pid, os.waitstatus_to_exitcode(status))

    def _tell(self, *news: object) -> None:
        with contextlib.suppress(OSError):  # pytest is gone: the next poll says so
            self.socket.send(json.dumps(news).encode())

    def _end(self) -> None:
        """Pytest is gone: take everything along."""
        for pid in self.ranks:
            for send in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    send(pid, signal.SIGKILL)
        limit = time.monotonic() + KILL_LIMIT
        while self.ranks and time.monotonic() < limit:
            self._reap()
            time.sleep(0.002)
        shutil.rmtree(self.folder, ignore_errors=True)
        os._exit(0)


def _pidfd(pid: int) -> int | None:
    """A file that becomes readable when the process ends; None where the kernel or a sandbox has none."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:  # gone already: the end of a pipe that nobody writes to is readable too
        ended, nobody = os.pipe()
        os.close(nobody)
        return ended
    except OSError:
        return None

"""Ranks on several machines, started by torchrun (or Slurm, or anything that sets the same variables).

Every process that torchrun starts runs `pytest --sglmem-launcher torchrun ...`. The one with RANK 0 runs the session;
the others `serve` and never collect a test. Each has a fork server of its own from the first world on that needs it,
and a world's ranks are forks of these: rank 0 beside the session, rank R beside the process with RANK R. So worlds are
fresh, and a rank that dies is a failed test, as on one machine; torchrun never sees it.

The processes meet through the store at MASTER_ADDR:MASTER_PORT (torchrun's agent holds it; without an agent, RANK 0
does). RANK 0 listens on one more TCP port, which the store tells the others: a control connection from each, and one
more from each rank, its pipe. MASTER_PORT in a rank is a port of its world's own, from 20000 to 31999. Whoever can read
the store can talk to the session; it is no protection against a hostile network.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import secrets
import select
import shutil
import socket
import struct
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from . import launch
from .launch import FORK_LIMIT, SERVER_LIMIT, LaunchError, Pipe, RankProcess, Setting, Spec, Unavailable, free_port

JOIN_LIMIT = 300.0  # seconds for all processes to meet: nodes of one job start minutes apart where images are pulled
REPLY_LIMIT = 10.0  # seconds for a server to send a file of a rank's: output, stacks, notes
QUIT_LIMIT = 60.0  # seconds from the session's goodbye to the end of its process: reports are written meanwhile
KEY = "pytest-sglmem"
LOST = 1  # exit status of a server whose session is gone without a word


def rank() -> int:
    """RANK of this process. Raises ValueError where torchrun did not start it."""
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(f"launcher 'torchrun': torchrun did not start this process ({', '.join(missing)} not set)")
    return int(os.environ["RANK"])


def world_size() -> int:
    """How many processes torchrun started: the largest world there can be."""
    return int(os.environ["WORLD_SIZE"])


def _store() -> tuple[Any, Any]:
    """The store at which all processes meet, bare and with a prefix. Without an agent of torchrun's RANK 0 holds it."""
    import torch.distributed as dist

    holds = rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=holds,
        wait_for_workers=False,
        timeout=timedelta(seconds=JOIN_LIMIT),
    )
    # A restarted job finds the keys of its last attempt in the agent's store
    return store, dist.PrefixStore(f"{KEY}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _setting(size: int, world: str, port: int) -> Setting:
    """What the ranks beside this process take over. The harness's own group meets in the store of the job, under a name
    of the world's; a group that the code under test makes meets at `port`, where no earlier world's keys are.
    """
    setting = Setting.here()
    setting.master_addr = os.environ["MASTER_ADDR"]
    setting.master_port = port
    setting.store = f"{setting.master_addr}:{os.environ['MASTER_PORT']}/{KEY}/{world}"
    setting.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    setting.local_size = max(1, min(here, size - (rank() - setting.local_rank)))
    setting.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # at `port` rank 0 holds the store, no agent
    return setting


# --------------------------------------------------------------------------------------------- the session's side


@dataclass
class RemoteRank:
    """A rank beside another process of the job. Its pipe is its own connection; the rest is asked of that process."""

    server: _Server
    world: str
    rank: int
    pid: int
    pipe: Pipe
    where: str

    def exit_code(self) -> int | None:
        """None while it runs; the status it exited with, or minus the signal that killed it."""
        return self.server.codes.get(self.pid, LOST if self.server.gone else None)

    def signal(self, number: int) -> None:
        """Send it a signal; nothing where it has ended."""
        self.server.tell("signal", self.pid, number)

    def end(self, limit: float) -> None:
        """Have it terminated, and killed if it has not ended `limit` seconds later. Nobody waits for that."""
        self.server.tell("end", self.pid, limit)

    def output(self) -> bytes:
        """Everything it printed so far, stdout and stderr in order."""
        return self.server.read(self.world, f"out.{self.rank}")

    def stacks(self) -> str:
        """What faulthandler wrote so far."""
        return self.server.read(self.world, f"stacks.{self.rank}").decode(errors="replace")

    def ledger(self) -> bytes:
        """The file in which the rank notes what it is doing."""
        return self.server.read(self.world, f"notes.{self.rank}")

    def record_flight(self) -> bool:
        """Have NCCL's flight recorder write its dump into the artifacts on its machine; nobody waits for it."""
        self.server.tell("flight", self.world)
        return False


@dataclass
class _Server:
    """One serving process, as the session sees it."""

    rank: int
    where: str
    pipe: Pipe
    codes: dict[int, int] = field(default_factory=dict)
    started: dict[str, int | str] = field(default_factory=dict)
    replies: dict[int, bytes] = field(default_factory=dict)
    gone: bool = False
    _asked: int = 0

    def tell(self, *request: object) -> None:
        """Send it a request. Where it is gone, `gone` will say so."""
        try:
            self.pipe.send(pickle.dumps(request), limit=REPLY_LIMIT)
        except OSError:
            self.gone = True

    def listen(self) -> None:
        """Read what it sent, without waiting."""
        try:
            messages = [] if self.gone else self.pipe.receive()
        except (EOFError, OSError):
            self.gone = True
            return
        for message in messages:
            kind, key, value = pickle.loads(message)
            answers: dict[str, dict[Any, Any]] = {
                "ended": self.codes,
                "started": self.started,
                "content": self.replies,
            }
            answers[kind][key] = value

    def read(self, world: str, name: str) -> bytes:
        """A file of one of its ranks; empty where it is gone or does not answer in time."""
        self._asked += 1
        self.tell("read", self._asked, world, name)
        end = time.monotonic() + REPLY_LIMIT
        while self._asked not in self.replies and not self.gone and (left := end - time.monotonic()) > 0:
            select.select([self.pipe], [], [], left)
            self.listen()
        return self.replies.pop(self._asked, b"")


class Launcher:
    """In the process with RANK 0: starts worlds whose ranks live beside all processes of the job. See `launch.Starter`.

    Make it when the session starts, whether or not a test wants a world, and close it with the session's exit status:
    the other processes wait for that.
    """

    def __init__(self, *, join_limit: float = JOIN_LIMIT) -> None:
        self._owner = os.getpid()
        self._local: launch.Launcher | None = None
        self._token = secrets.token_bytes(16)
        self._run = secrets.token_hex(4)
        self._worlds = 0
        self._servers: dict[int, _Server] = {}
        self._broken = ""
        self._epoll = select.epoll()
        self._environ = dict(os.environ)
        self._listener = _listen()
        self._holder, store = _store()
        port = self._listener.getsockname()[1]
        store.set("session", pickle.dumps((os.environ["MASTER_ADDR"], port, self._token)))
        self._welcome(time.monotonic() + join_limit)

    def _welcome(self, end: float) -> None:
        while len(self._servers) < world_size() - 1:
            try:
                connection, (number, where) = self._accept(end, "control")
            except TimeoutError:
                absent = sorted(set(range(1, world_size())) - set(self._servers))
                self.close(LOST)
                raise LaunchError(f"processes with RANK {absent} did not join within the limit") from None
            self._servers[number] = _Server(number, where, Pipe(connection))
            self._epoll.register(connection, select.EPOLLIN)

    def _accept(self, end: float, wanted: str) -> tuple[socket.socket, tuple[Any, ...]]:
        """The next connection that knows the token, and what it says it is."""
        while True:
            self._listener.settimeout(max(0.0, end - time.monotonic()) or 1e-3)
            connection, _ = self._listener.accept()
            connection.settimeout(REPLY_LIMIT)
            with contextlib.suppress(OSError, struct.error, pickle.UnpicklingError):
                if secrets.compare_digest(_exactly(connection, len(self._token)), self._token):
                    kind, *news = pickle.loads(_message(connection))
                    if kind == wanted:
                        connection.setblocking(False)
                        return connection, tuple(news)
            connection.close()

    @property
    def broken(self) -> str:
        """Why it no longer works; empty while it does."""
        lost = [server.rank for server in self._servers.values() if server.gone]
        told = f"the processes with RANK {lost} are gone" if lost else ""
        return self._broken or (self._local.broken if self._local is not None else "") or told

    def mine(self) -> bool:
        """Whether this process started it, and it still works."""
        return self._owner == os.getpid() and not self.broken

    def fileno(self) -> int:
        """To wait for news of ended ranks; `listen` reads them."""
        return self._epoll.fileno()

    def listen(self) -> None:
        """Read all news that are there, without waiting."""
        if self._local is not None:
            self._local.listen()
        for server in self._servers.values():
            server.listen()
            if server.gone:
                with contextlib.suppress(FileNotFoundError, ValueError, OSError):
                    self._epoll.unregister(server.pipe)

    def start(self, spec: Spec) -> list[RankProcess]:
        """Start rank 0 here and rank R beside the process with RANK R. Raises LaunchError or Unavailable."""
        if spec.size > world_size():
            raise Unavailable(f"{spec.size} ranks asked for, torchrun started {world_size()} processes")
        if self.broken:
            raise LaunchError(self.broken)
        self._worlds += 1
        world = f"{self._run}-{self._worlds}"
        changed = {k: v for k, v in os.environ.items() if self._environ.get(k) != v}
        dropped = [name for name in self._environ if name not in os.environ]
        port = free_port()
        common = (list(sys.path), changed, dropped, os.getcwd(), port)
        others = [self._servers[number] for number in range(1, spec.size)]
        for server in others:
            server.tell("start", world, common, pickle.dumps(spec))
        local = self._started()
        folder = local.world_folder()
        local.prepare(folder, _setting(spec.size, world, port), spec)
        return [*local.fork(folder, [0]), *self._arrivals(world, others)]

    def _started(self) -> launch.Launcher:
        if self._local is None:
            self._local = launch.Launcher()
            self._epoll.register(self._local, select.EPOLLIN)
        return self._local

    def _arrivals(self, world: str, servers: list[_Server]) -> list[RankProcess]:
        """Pair each rank's pipe with what its server says of it."""
        limit = SERVER_LIMIT + FORK_LIMIT
        end = time.monotonic() + limit
        pipes: dict[int, Pipe] = {}
        while len(pipes) < len(servers):
            for server in servers:
                server.listen()
                told = server.started.get(world)
                if server.gone or isinstance(told, str):
                    raise LaunchError(f"rank {server.rank} on {server.where}: {told or 'its process is gone'}")
            if time.monotonic() > end:
                absent = sorted({server.rank for server in servers} - set(pipes))
                raise LaunchError(f"ranks {absent} did not start within {limit:.0f} s")
            with contextlib.suppress(TimeoutError):
                connection, (of, number) = self._accept(min(end, time.monotonic() + 0.2), "rank")
                if of == world:
                    pipes[number] = Pipe(connection)
                else:
                    connection.close()
        ranks: list[RankProcess] = []
        for server in servers:
            while world not in server.started and not server.gone and (left := end - time.monotonic()) > 0:
                select.select([server.pipe], [], [], left)
                server.listen()
            pid = server.started.pop(world, "its process is gone")
            if isinstance(pid, str):
                raise LaunchError(f"rank {server.rank} on {server.where}: {pid}")
            ranks.append(RemoteRank(server, world, server.rank, pid, pipes[server.rank], server.where))
        return ranks

    def forget(self, processes: Iterable[RankProcess]) -> None:
        """The world is over: close its pipes, remove its files everywhere."""
        mine = [process for process in processes if not isinstance(process, RemoteRank)]
        for process in processes:
            if isinstance(process, RemoteRank):
                process.pipe.close()
                process.server.tell("forget", process.world)
                process.server.codes.pop(process.pid, None)
        if self._local is not None:
            self._local.forget(mine)

    def close(self, status: int = 0) -> None:
        """End the ranks here, and have the other processes end with the session's exit status, once this one has ended.

        Not before: torchrun ends all processes as soon as one fails, and this one has a report to write.
        """
        if self._owner != os.getpid() or self._broken:
            return
        self._broken = "closed"
        for server in self._servers.values():
            server.tell("quit", status)
            server.pipe.leave_open()
        if self._local is not None:
            self._local.close()
        self._listener.close()
        self._epoll.close()


# --------------------------------------------------------------------------------------------- the others' side


def serve() -> int:
    """In a process with another RANK than 0: fork ranks for the session until it ends. Returns the exit status."""
    try:
        return _Serving().run()
    except KeyboardInterrupt:
        return 2  # as pytest's own


class _Serving:
    """A serving process: its control connection, its fork server, the folders of the worlds that run."""

    def __init__(self) -> None:
        self._local: launch.Launcher | None = None
        self._pids: dict[int, str] = {}
        self._folders: dict[str, Path] = {}
        _, store = _store()
        host, port, self._token = pickle.loads(store.get("session"))
        self._address = (host, port)
        self._control = self._connect("control", rank(), f"{socket.gethostname()} (RANK {rank()})")
        self._pipe = Pipe(self._control)

    def _connect(self, *hello: object) -> socket.socket:
        connection = socket.create_connection(self._address, timeout=JOIN_LIMIT)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        message = pickle.dumps(hello)
        connection.sendall(self._token + struct.pack("!Q", len(message)) + message)
        connection.settimeout(None)
        return connection

    def run(self) -> int:
        """Obey until told to quit (that status), or the session is gone (status LOST)."""
        try:
            while True:
                select.select([end.fileno() for end in self._ends()], [], [])
                self._tell_ends()
                for message in self._pipe.receive():
                    kind, *args = pickle.loads(message)
                    if kind == "quit":
                        self._close()
                        select.select([self._pipe], [], [], QUIT_LIMIT)
                        return int(args[0])
                    getattr(self, f"_{kind}")(*args)
        except (EOFError, OSError):
            return LOST
        finally:
            self._close()

    def _close(self) -> None:
        if self._local is not None:
            self._local.close()

    def _ends(self) -> list[Pipe | launch.Launcher]:
        return [self._pipe] if self._local is None else [self._pipe, self._local]

    def _tell(self, *news: object) -> None:
        self._pipe.send(pickle.dumps(news), limit=REPLY_LIMIT)

    def _tell_ends(self) -> None:
        if self._local is None:
            return
        self._local.listen()
        for pid in list(self._pids):
            code = self._local.exit_code(pid)
            if code is not None:
                del self._pids[pid]
                self._tell("ended", pid, code)
        if self._local.broken:
            raise EOFError(self._local.broken)

    def _start(self, world: str, common: tuple[list[str], dict[str, str], list[str], str, int], spec: bytes) -> None:
        """Fork this process's rank of a world; its pipe is a new connection to the session."""
        path, changed, dropped, cwd, port = common
        asked: Spec = pickle.loads(spec)
        setting = _setting(asked.size, world, port)
        environ = {k: v for k, v in {**setting.environ, **_portable(changed)}.items() if k not in dropped}
        setting = dataclasses.replace(setting, sys_path=path, environ=environ, cwd=cwd)
        if self._local is None:
            self._local = launch.Launcher()
        folder = self._folders[world] = self._local.world_folder()
        self._local.prepare(folder, setting, asked)
        try:
            with self._connect("rank", world, rank()) as end:
                pid = self._local.fork_at(folder, rank(), end)
        except LaunchError as error:
            self._tell("started", world, str(error))
            return
        self._pids[pid] = world
        self._tell("started", world, pid)

    def _signal(self, pid: int, number: int) -> None:
        if self._local is not None:
            self._local.ask("signal", pid, number)

    def _end(self, pid: int, limit: float) -> None:
        if self._local is not None:
            self._local.ask("end", pid, limit)

    def _read(self, number: int, world: str, name: str) -> None:
        folder = self._folders.get(world)
        try:
            content = (folder / name).read_bytes() if folder is not None else b""
        except FileNotFoundError:
            content = b""
        self._tell("content", number, content)

    def _flight(self, world: str) -> None:
        if world in self._folders:
            launch.record_flight(self._folders[world], rank())

    def _forget(self, world: str) -> None:
        folder = self._folders.pop(world, None)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _portable(changed: dict[str, str]) -> dict[str, str]:
    """What tests changed in the session's environment, without what names a process of the job."""
    return {k: v for k, v in changed.items() if k not in ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK")}


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionResetError
        data += part
    return data


def _message(connection: socket.socket) -> bytes:
    (size,) = struct.unpack("!Q", _exactly(connection, 8))
    return _exactly(connection, size)

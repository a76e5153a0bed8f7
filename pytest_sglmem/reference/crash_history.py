"""A history of finished requests for the crash dump, kept as pickled bytes: nothing for the cyclic collector to walk.

A record is pickled when it finishes, so it is a snapshot, and fifty thousand of them are fifty thousand `bytes`. A dump
copies those bytes into one outer pickle in which a record stands as the call `pickle.loads(bytes)`: nothing is restored
in order to be written, a plain `pickle.load` reads everything back, and a bad part costs that part, not the file.

It does not make loading a dump safe (see `restore`). Classes must be importable where a dump is read.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import pickle
import re
import struct
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

Unfinished = Iterable[tuple[object, object, float]]
Redact = Callable[[object, object], "tuple[object, object] | None"]

_PROTOCOL = 4  # every Python that may read a dump understands it


class HistoryWarning(UserWarning):
    """Something is missing from a history or a dump. Each kind of record is warned of once."""


class CrashDumpHistory:
    """The requests that finished in the last `max_age` seconds; of those the latest `max_bytes` of pickled bytes.

    Threads may share it, and a signal handler may use it whatever it interrupted. `elapsed` is the clock of ages, in
    seconds; the default does not jump. `left_out` counts the records that are missing, by kind.
    """

    def __init__(
        self, *, max_age: float = 300.0, max_bytes: int = 2**30, elapsed: Callable[[], float] = time.monotonic
    ) -> None:
        if not (max_age > 0 and max_bytes > 0):
            raise ValueError(f"max_age and max_bytes must be > 0 (got {max_age!r} s and {max_bytes!r} bytes)")
        self.max_age, self.max_bytes = max_age, max_bytes
        self.left_out: Counter[str] = Counter()
        self._elapsed = elapsed
        self._kept: deque[tuple[float, bytes]] = deque()  # (when by `elapsed`, pickle)
        self._arrived: deque[tuple[float, bytes]] = deque()  # on their way into `_kept`
        self._bytes = 0
        self._busy = False
        self._lock = threading.RLock()  # threads wait at it; a signal handler passes, and then finds `_busy`

    def __len__(self) -> int:
        return len(self._kept) + len(self._arrived)

    def record(self, request: object, output: object, created: float) -> None:
        """Keep a finished request as it is now. `created`: as `time.time()` gives it.

        A record that does not pickle, or is larger than `max_bytes`, is counted in `left_out` instead.
        """
        try:
            data = pickle.dumps((request, output, created, time.time()), _PROTOCOL)
        except Exception as error:
            return self._leave_out(_why(error), error)
        if len(data) > self.max_bytes:
            return self._leave_out("too large", f"{len(data)} bytes of at most {self.max_bytes}")
        with self._lock:
            now = self._elapsed()
            self._arrived.append((now, data))
            if not self._busy:
                self._settle(now)

    def dump(
        self,
        path: str | os.PathLike[str],
        unfinished: Unfinished = (),
        redact: Redact | None = None,
        extra: Mapping[str, object] | None = None,
    ) -> bool:
        """Write what `pickle.load` reads as {"requests": [(request, output, created, finished), ...], ...}.

        `unfinished`: (request, output, created) of what still runs; it comes last, with `finished` None.
        `redact(request, output)` gets copies and gives the pair to write, or None to write none. `extra`: further
        entries. Parts that do not pickle, or that `redact` fails on, are left out and named under "left_out".

        The file is there whole, or as it was; what a writer that was killed has left beside it is removed. Raises
        OSError where it cannot be written; but while an exception is being handled nothing is raised over it: then
        `dump` warns and returns False.
        """
        handling = sys.exc_info()[0] is not None
        try:
            with self._still(), _replacing(Path(path)) as file:
                self._write(file, unfinished, redact, extra or {})
        except Exception as error:
            if not handling:
                raise
            _warn(f"no crash dump: {error}")
            return False
        return True

    @staticmethod
    def restore(path: str | os.PathLike[str]) -> dict[str, object]:
        """What `dump` wrote, once its shape is checked; ValueError says what is wrong.

        This makes nothing safe: a pickle runs what it says before anything can be checked, so restore only files that
        you would run as programs. Nor can it be seen that a byte inside a text or a number has changed.
        """
        with open(path, "rb") as file, _collector_paused():
            try:
                dumped, rest = pickle.load(file), file.read(1)
            except Exception as error:
                raise ValueError(f"{path} does not load: {type(error).__name__}: {error}") from error
        if fault := "bytes follow its end" if rest else _fault(dumped):
            raise ValueError(f"{path} is not a whole crash dump: {fault}")
        return dumped

    def _settle(self, now: float) -> None:
        """Take in what arrived; let go of what is too old or too much."""
        self._busy = True
        try:
            kept, arrived = self._kept, self._arrived
            while arrived:
                self._bytes += len(arrived[0][1])
                kept.append(arrived.popleft())
            while kept and (now - kept[0][0] > self.max_age or self._bytes > self.max_bytes):
                self._bytes -= len(kept.popleft()[1])
        finally:
            self._busy = False

    @contextlib.contextmanager
    def _still(self) -> Iterator[None]:
        """`_kept` stays as it is: other threads wait, and what a signal handler records waits in `_arrived`."""
        with self._lock:
            if not self._busy:
                self._settle(self._elapsed())
            before, self._busy = self._busy, True
            try:
                yield
            finally:
                self._busy = before

    def _leave_out(self, kind: str, why: object) -> None:
        self.left_out[kind] += 1
        if self.left_out[kind] == 1:
            warnings.warn(f"a record is {kind} and not in the history: {why}", HistoryWarning, stacklevel=3)

    def _write(
        self, file: BinaryIO, unfinished: Unfinished, redact: Redact | None, extra: Mapping[str, object]
    ) -> None:
        missing: dict[str, int | str] = dict(self.left_out)
        outer = _OuterPickle(file)
        outer.begin_requests()
        for record in self._redacted(unfinished, redact, missing) if redact else self._records(unfinished, missing):
            outer.append(record)
        outer.end_requests()
        for key, value in extra.items():
            if key in ("requests", "left_out"):
                missing[f"extra[{key!r}]"] = "the dump has an entry of this name"
            elif (data := _pickled(value, f"extra[{key!r}]", missing)) is not None:
                outer.entry(str(key), data)
        outer.entry("left_out", pickle.dumps(missing, _PROTOCOL))
        outer.end()

    def _records(self, unfinished: Unfinished, missing: dict[str, int | str]) -> Iterator[bytes]:
        for records in (self._kept, tuple(self._arrived)):
            for _, record in records:
                yield record
        index = 0
        try:
            for index, (request, output, created) in enumerate(unfinished):
                data = _pickled((request, output, created, None), f"unfinished[{index}]", missing)
                if data is not None:
                    yield data
        except Exception as error:  # an item that is no such triple, say; what stands before it is written
            missing[f"unfinished[{index}:]"] = type(error).__name__

    def _redacted(self, unfinished: Unfinished, redact: Redact, missing: dict[str, int | str]) -> Iterator[bytes]:
        """The records restored, redacted and pickled, one at a time."""
        with _collector_paused():
            for record in self._records(unfinished, missing):
                try:
                    request, output, created, finished = pickle.loads(record)
                    pair = redact(request, output)
                    data = pair and pickle.dumps((*pair, created, finished), _PROTOCOL)
                except Exception as error:
                    reason = f"not redacted ({type(error).__name__})"
                    missing[reason] = int(missing.get(reason, 0)) + 1
                else:
                    if data:
                        yield data


class _OuterPickle:
    """Writes {"requests": [...], key: ...} opcode by opcode; each value is the call `pickle.loads(its bytes)`.

    Memo 0 is `pickle.loads`. The bytes of a value are not memoized, so a reader lets go of them one by one.
    """

    _CALL = pickle.BINGET + b"\0" + pickle.BINBYTES8
    _RETURN = pickle.TUPLE1 + pickle.REDUCE

    def __init__(self, file: BinaryIO) -> None:
        self._write = file.write

    def begin_requests(self) -> None:
        self._write(pickle.PROTO + bytes([_PROTOCOL]))
        self._write(pickle.GLOBAL + b"pickle\nloads\n" + pickle.BINPUT + b"\0" + pickle.POP)
        self._write(pickle.EMPTY_DICT)
        self._key("requests")
        self._write(pickle.EMPTY_LIST)

    def append(self, data: bytes) -> None:
        self._value(data)
        self._write(pickle.APPEND)

    def end_requests(self) -> None:
        self._write(pickle.SETITEM)

    def entry(self, key: str, data: bytes) -> None:
        self._key(key)
        self._value(data)
        self._write(pickle.SETITEM)

    def end(self) -> None:
        self._write(pickle.STOP)

    def _key(self, key: str) -> None:
        text = key.encode("utf-8", "surrogatepass")
        self._write(pickle.BINUNICODE + struct.pack("<I", len(text)) + text)

    def _value(self, data: bytes) -> None:
        self._write(self._CALL + struct.pack("<Q", len(data)))
        self._write(data)
        self._write(self._RETURN)


def _pickled(value: object, name: str, missing: dict[str, int | str]) -> bytes | None:
    """The value's pickle; None where it has none, and then the reason, which quotes nothing: it may be a secret."""
    try:
        return pickle.dumps(value, _PROTOCOL)
    except Exception as error:
        missing[name] = f"{_why(error)} ({type(error).__name__})"
        return None


def _why(error: Exception) -> str:
    """The kind of reason for which something was not pickled."""
    if isinstance(error, RecursionError):
        return "too deep"
    return "out of memory" if isinstance(error, MemoryError) else "not picklable"


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` once all of it is on the disk. Readable by its owner only."""
    temporary = None
    try:
        _remove_abandoned(path)
        descriptor, temporary = _temporary(path)
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_directory(path.parent)
    except BaseException as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        if isinstance(error, OSError):
            reason = f"{error.strerror or error}: no crash dump written, {path} is as it was"
            raise OSError(error.errno, reason, str(path)) from error
        raise


def _temporary(path: Path) -> tuple[int, str]:
    """A new file beside `path`, locked as long as it is open: the lock of a process that is killed is gone with it."""
    while True:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
        with contextlib.suppress(OSError):  # not every file system has locks; nothing is taken for abandoned there
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.path.exists(name):
            return descriptor, name
        os.close(descriptor)  # somebody took it for abandoned in the moment before it was locked


def _remove_abandoned(path: Path) -> None:
    """Remove what writers of `path` left that were killed. Whatever goes wrong here must not cost the dump."""
    ours = re.compile(rf"\.{re.escape(path.name)}\.[a-z0-9_]{{8}}\.partial")
    with contextlib.suppress(Exception):
        for name in filter(ours.fullmatch, os.listdir(path.parent)):
            with contextlib.suppress(OSError):
                _remove_unlocked(path.parent / name)


def _remove_unlocked(path: Path) -> None:
    """Remove the file, or raise OSError where it is locked, as it is while its writer lives."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
    finally:
        os.close(descriptor)


def _sync_directory(directory: Path) -> None:
    """The new name survives a power cut, too. Not every file system can be asked for that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Restored records are many and acyclic: walking them while they are made is wasted."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _fault(dumped: object) -> str:
    """What of the shape that `dump` writes is missing; empty where nothing is."""
    if not isinstance(dumped, dict) or not isinstance(dumped.get("requests"), list) or "left_out" not in dumped:
        return "no dictionary with the entries 'requests' and 'left_out'"
    for index, record in enumerate(dumped["requests"]):
        if not isinstance(record, tuple) or len(record) != 4:
            return f"requests[{index}] is no (request, output, created, finished)"
        if not isinstance(record[3], (float, type(None))):
            return f"requests[{index}] finished at {record[3]!r}, which is no time"
    return ""


def _warn(text: str) -> None:
    """Warn, but where warnings are errors raise none."""
    with contextlib.suppress(HistoryWarning):
        warnings.warn(text, HistoryWarning, stacklevel=3)

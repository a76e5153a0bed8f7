"""When may a rank read what its peers wrote: the two ways to say so, on the device and through the host.

`StreamOrder` puts a write of a flag behind the copies on this rank's stream and a wait for the peers' flags before the
readers: the host never waits, and the flags lie in memory that the ranks share by CUDA IPC. It needs NVIDIA's
`cuda-bindings` and a device a rank. `HostOrder` drains the stream and tells the peers through the board: right
everywhere, on one shared GPU and on a device without streams too, and slower.

Messages are numbered from 1 in one sequence for all copies of a rank; a peer that has message n has all before it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import NamedTuple, Protocol

import torch

from .board import Board, PeerSilent

_FLAG = 4  # bytes
_MASK = 0xFFFFFFFF
_FAR = 1 << 30  # a flag so far ahead has come for every message that is still to be waited for
_LOOKS_IN_LIMIT = 8


class Route(NamedTuple):
    """Where the chunks of a send buffer go.

    `rows`: a row of each rank's staging buffer, in rank order; `ways`: rank and address of each row, in the order of
    copying, this rank's own last; `chunk_bytes`: how long a row is.
    """

    rows: tuple[torch.Tensor, ...]
    ways: tuple[tuple[int, int], ...]
    chunk_bytes: int


class HostOrder:
    """Order through the host: `post` returns when the copies have arrived, `wait` when all peers have said so."""

    name = "host"

    def __init__(self, board: Board) -> None:
        self._board = board

    def announce(self, plan: int) -> None:
        """Say what this rank's next call does. Whether the others do the same is known at the latest after `wait`."""
        self._board.post(plan)

    def exchange(self, route: Route, send: torch.Tensor, message: int) -> None:
        """Copy chunk r of the contiguous `send` to row r of `route`, post `message` and wait for the peers'."""
        chunks = send.detach().view(len(route.rows), -1)
        for rank, _ in route.ways:
            route.rows[rank].copy_(chunks[rank])
        self.post(message)
        self.wait(message)

    def aside(self) -> AbstractContextManager[object]:
        """Where copies that run beside the computation go: here, into the stream itself."""
        return contextlib.nullcontext()

    def rejoin(self) -> None:
        """Let the current stream go on only after what ran aside: nothing did."""

    def post(self, message: int) -> None:
        """Tell the peers that everything up to `message` has arrived."""
        torch.cuda.synchronize()
        self._board.done(message)

    def wait(self, message: int) -> None:
        """Return when every peer's `message` has arrived here. Raises PeerSilent, PlanMismatch."""
        self._board.wait_done(message)

    def leave(self) -> None:
        """Let the peers go on without this rank: they look at the board."""

    def close(self) -> None:
        """Nothing to let go of."""


class StreamOrder:
    """Order on the device, by stream memory operations on flags that the ranks share.

    `flags`: this rank's int32 flags, one a rank; `peers`: everybody's, opened here, in rank order; `driver`: the module
    `cuda.bindings.driver`. Ranks that do not call alike find out on the host, before any stream waits. After that a
    rank that fails inside its call lets the peers' streams go (`leave`); for one that is gone there is a watch on a
    thread of its own, which looks now and then whether messages still come, and where none came for the board's limit
    lets this rank's streams go. Either way nobody hangs, what such a call returned is worth nothing, and the next call
    says why.
    """

    name = "stream"
    # Bytes of a chunk from which the copy to this rank's own buffer runs beside those to the peers, on a second stream.
    # That saves the local copy's time on the device and costs the host four driver calls, 3 to 8 us. Where the host is
    # ahead of the stream its time is free, and on two H200s the device needs 12.9 us in place of 21.3 at the smallest
    # chunk measured, 512 KiB; where the stream waits for the host it is even at 4 MiB and better from 8 MiB on. (One
    # kernel that writes all chunks was tried instead of the copy engines: slower at every size from 1 to 256 MiB.)
    aside_from = 1 << 23
    aside_if_ahead_from = 1 << 19

    def __init__(self, driver: ModuleType, board: Board, flags: torch.Tensor, peers: Sequence[torch.Tensor]) -> None:
        self._driver, self._board, self._flags, self._peers = driver, board, flags, tuple(peers)
        self._others = [rank for rank in range(board.world) if rank != board.rank]
        self._signals = _Signals(
            driver,
            out=[peers[rank].data_ptr() + _FLAG * board.rank for rank in self._others],
            into=[flags.data_ptr() + _FLAG * rank for rank in self._others],
        )
        self._device = torch.cuda.current_device()
        self._fork, self._join = _event(), _event()
        self._ends = (_event(), _event())  # of the last exchanges, by turns
        self._comm, self._beside = torch.cuda.Stream(), torch.cuda.Stream()
        self._look = _stream_of_its_own(driver)
        self._watch = Watch(self._arrived, self._let_go, board.limit)

    def announce(self, plan: int) -> None:
        """Say what this rank's next call does, and return when every rank has come to it with the same plan.

        The devices could not go on without the slowest rank either; so this costs a look at the board.
        """
        self._board.agree(plan)

    def exchange(self, route: Route, send: torch.Tensor, message: int) -> None:
        """Copy chunk r of the contiguous `send` to row r of `route`, post `message` and wait for the peers'.

        All of it goes to the current stream; the host does not wait.
        """
        self._expect(message)
        stream = self._stream()
        if route.chunk_bytes >= self.aside_from:
            self._exchange_aside(route, send.data_ptr(), stream, message)
        elif route.chunk_bytes < self.aside_if_ahead_from:
            self._exchange_in_line(route, send.data_ptr(), stream, message)
        else:
            end = self._ends[message % 2].cuda_event
            ahead = self._driver.cuEventQuery(end)[0]  # not ready: of the exchange before the last
            exchange = self._exchange_aside if ahead else self._exchange_in_line
            exchange(route, send.data_ptr(), stream, message)
            _ok(self._driver.cuEventRecord(end, stream))

    def aside(self) -> AbstractContextManager[object]:
        """The stream for copies that run beside the computation, behind what the current stream holds now."""
        self._comm.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._comm)

    def rejoin(self) -> None:
        """Let the current stream go on only after what ran aside: tensors used there may be let go of from then on."""
        torch.cuda.current_stream().wait_stream(self._comm)

    def post(self, message: int) -> None:
        """Behind the copies of the current stream, write `message` to this rank's flag at every peer."""
        self._signals.post(self._stream(), message)

    def wait(self, message: int) -> None:
        """Let the current stream go on only when every peer's `message` is here. Raises PeerSilent."""
        self._expect(message)
        self._signals.wait(self._stream(), message)

    def leave(self) -> None:
        """Let the peers' streams go on without this rank from now on, behind what its own streams still hold."""
        self.rejoin()
        self._signals.post(self._stream(), self._watch.expected + _FAR)

    def close(self) -> None:
        """End the watch and let go of the flags."""
        self._watch.close()
        del self._flags, self._peers

    def _stream(self) -> int:
        return torch._C._cuda_getCurrentRawStream(self._device)  # a tenth of what `torch.cuda.current_stream` takes

    def _expect(self, message: int) -> None:
        if self._watch.failed:
            raise PeerSilent(self._watch.failed)
        self._watch.expect(message)

    def _copy(self, ways: Iterable[tuple[int, int]], chunk_bytes: int, send: int, stream: int) -> None:
        copy = self._driver.cuMemcpyDtoDAsync
        for rank, address in ways:
            _ok(copy(address, send + rank * chunk_bytes, chunk_bytes, stream))

    def _exchange_in_line(self, route: Route, send: int, stream: int, message: int) -> None:
        self._copy(route.ways, route.chunk_bytes, send, stream)
        self._signals.post_and_wait(stream, message)

    def _exchange_aside(self, route: Route, send: int, stream: int, message: int) -> None:
        beside = self._beside.cuda_stream
        self._behind(self._fork, stream, beside)
        self._copy(route.ways[:-1], route.chunk_bytes, send, stream)
        self._copy(route.ways[-1:], route.chunk_bytes, send, beside)
        self._signals.post_and_wait(stream, message)
        self._behind(self._join, beside, stream)

    def _behind(self, event: torch.cuda.Event, first: int, then: int) -> None:
        """Let stream `then` go on only after what `first` holds now."""
        _ok(self._driver.cuEventRecord(event.cuda_event, first))
        _ok(self._driver.cuStreamWaitEvent(then, event.cuda_event, 0))

    def _arrived(self) -> list[int]:
        # On a stream of its own: every other may be waiting for these very flags.
        with torch.cuda.device(self._flags.device), torch.cuda.stream(self._look):
            flags = self._flags.cpu().tolist()
        return [flags[rank] for rank in self._others]

    def _let_go(self, message: int) -> str:
        late = [rank for rank, flag in zip(self._others, self._arrived(), strict=True) if not has_come(flag, message)]
        self._signals.post_to_self(self._look.cuda_stream, message + _FAR)
        return str(self._board.silent(late))


class _Signals:
    """The stream memory operations: writes of this rank's flag at every peer (`out`), waits for theirs here (`into`).

    One driver call does a batch. Its operations are made once; a call changes their values only.
    """

    def __init__(self, driver: ModuleType, out: Sequence[int], into: Sequence[int]) -> None:
        self._call = driver.cuStreamBatchMemOp
        kinds = driver.CUstreamBatchMemOpType
        write, wait = kinds.CU_STREAM_MEM_OP_WRITE_VALUE_32, kinds.CU_STREAM_MEM_OP_WAIT_VALUE_32
        geq = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
        writes = [_operation(driver, "writeValue", write, address, 0) for address in out]
        waits = [_operation(driver, "waitValue", wait, address, geq) for address in into]
        own = [_operation(driver, "writeValue", write, address, 0) for address in into]
        self._writes, self._waits, self._own, self._both = map(_Batch.of, (writes, waits, own, writes + waits))

    def post(self, stream: int, message: int) -> None:
        """Write `message` at every peer, behind what `stream` holds."""
        self._run(stream, message, self._writes)

    def wait(self, stream: int, message: int) -> None:
        """Hold `stream` until every peer's flag has come to `message`."""
        self._run(stream, message, self._waits)

    def post_and_wait(self, stream: int, message: int) -> None:
        """Both, in this order."""
        self._run(stream, message, self._both)

    def post_to_self(self, stream: int, message: int) -> None:
        """Write here what the peers have not written, so that waiting streams go on."""
        self._run(stream, message, self._own)

    def _run(self, stream: int, message: int, batch: _Batch) -> None:
        wholes, parts = batch
        if wholes:
            value = message & _MASK
            for part in parts:
                part.value = value
            _ok(self._call(stream, len(wholes), wholes, 0))


class _Batch(NamedTuple):
    """The parameters of one driver call, and the part of each that holds its value."""

    wholes: list[object]
    parts: list[_Valued]

    @classmethod
    def of(cls, operations: Iterable[tuple[object, _Valued]]) -> _Batch:
        """The batch of these operations, in this order."""
        pairs = list(operations)
        return cls([whole for whole, _ in pairs], [part for _, part in pairs])


class _Valued(Protocol):
    """A write or a wait: what differs from call to call is its value."""

    value: int


def _operation(driver: ModuleType, name: str, kind: object, address: int, flags: int) -> tuple[object, _Valued]:
    whole = driver.CUstreamBatchMemOpParams()
    part = getattr(whole, name)
    part.operation, part.address, part.flags = kind, address, flags
    return whole, part


class Watch:
    """Looks from a thread whether expected messages come, and gives up where none came for `limit` seconds.

    `arrived()` says what has come from each peer; `give_up(message)` is called once, and the text that it returns is
    `failed` from then on (text, because a held exception holds the memory of its frames).
    """

    def __init__(self, arrived: Callable[[], list[int]], give_up: Callable[[int], str], limit: float) -> None:
        self.failed = ""
        self.expected = 0
        self._arrived, self._give_up, self._limit = arrived, give_up, limit
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sglmem-watch", daemon=True)
        self._thread.start()

    def expect(self, message: int) -> None:
        """From now on `message` should come."""
        self.expected = message

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        seen: list[int] = []
        since, settled = time.monotonic(), 0
        while not self._ended.wait(self._limit / _LOOKS_IN_LIMIT):
            expected = self.expected
            if expected == settled:
                since = time.monotonic()
                continue
            arrived = self._arrived()
            if all(has_come(flag, expected) for flag in arrived):
                settled = expected
            if arrived != seen or settled == expected:
                seen, since = arrived, time.monotonic()
            elif time.monotonic() - since > self._limit:
                self.failed = self._give_up(expected)
                return


def has_come(flag: int, message: int) -> bool:
    """Whether a 32-bit `flag` says that `message` has come. Both go round after 2**32, as the driver compares them."""
    return (flag - message) & _MASK < 1 << 31


def _event() -> torch.cuda.Event:
    """An event that the driver knows: torch makes it when it first records. The driver's calls cost the host less."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream())
    return event


def _stream_of_its_own(driver: ModuleType) -> torch.cuda.Stream:
    # torch's streams come from a pool and repeat, so that one of them may be the very stream that waits.
    result, stream = driver.cuStreamCreate(int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
    _ok((result,))
    return torch.cuda.ExternalStream(int(stream))


def _ok(result: tuple[object, ...]) -> None:
    if result[0]:
        raise RuntimeError(f"the CUDA driver says {result[0]}")


def can_order_on_device(flags: torch.Tensor) -> ModuleType | None:
    """`cuda.bindings.driver` where it is installed and knows the memory of `flags`, else None."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return None
    kind = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    try:
        result, memory = driver.cuPointerGetAttribute(kind, flags.data_ptr())
    except RuntimeError:  # there is the package, and no driver
        return None
    known = int(result) == 0 and int(memory) == int(driver.CUmemorytype.CU_MEMORYTYPE_DEVICE)
    return driver if known else None

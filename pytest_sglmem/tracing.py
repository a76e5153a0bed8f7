"""The step loop inside a rank: quiet points, readings, cycles, in the process under test.

`trace_rank` is one rank's part and `trace` the same for an existing job (collective over a process group, or alone).
After every step the result is digested and dropped, then synchronize, barrier, and the bytes are read as they are; at
the end of a cycle they are read three times: as they are, after `ipc_collect` on every rank, after `gc.collect()`.
The automatic collector rests meanwhile. What the harness does itself it does with functions taken before any fault is
armed (`Hands`) and over a group of its own, so that a fault strikes the code under test and nothing else.

A rank that raises says so to the others, which raise `PeerFailed` at once rather than wait for it. It judges nothing;
it only asks `judge.settled` whether another cycle could change the verdict.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
import torch.distributed as dist

from . import words
from .capture import log_capture_resting
from .digests import digest
from .holders import LIMIT, Deadline, chains_for_blocks
from .judge import leaking_stacks, settled
from .records import CycleEnd, RankTrace, Reading, Trace
from .sources import Census, Recording, reading, save_snapshot, stamped

if TYPE_CHECKING:
    from .ipc import Ledger

__all__ = ["Hands", "Meeting", "PeerFailed", "bounds", "trace", "trace_rank"]

G = TypeVar("G")
T = TypeVar("T")
PATIENCE = 600.0  # seconds for the ranks of a job to meet: as long as torch's own limit for a collective of NCCL
_WORLDS_PATIENCE = 86_400.0  # in a world the limit of the call is what ends a wait, and says more
_ROLL_CALL = timedelta(seconds=1)  # for those who wait to say so, once one of them has waited in vain
_perf_counter, _monotonic = time.perf_counter, time.monotonic
_dumps, _loads = pickle.dumps, pickle.loads  # as they are before any fault is armed
_SITES, _BLOCKS = 5, 64  # growing sites that are explained, and blocks of each that are looked at
_SNAPSHOT = 30.0  # seconds for the files that a leak leaves: torch's snapshot of very many blocks
_COLLECTIONS = 3  # a collection can free what keeps the next garbage alive; more than three is a program of its own


@dataclass(frozen=True, slots=True)
class Hands:
    """The functions the harness itself calls. Take them in the rank before faults are armed, after `emulated_cuda`."""

    synchronize: Callable[[], None]
    ipc_collect: Callable[[], None]
    collect: Callable[[], int]
    enable: Callable[[], None]
    disable: Callable[[], None]
    is_enabled: Callable[[], bool]

    @classmethod
    def take(cls) -> Hands:
        """The functions as they are now."""
        return cls(torch.cuda.synchronize, torch.cuda.ipc_collect, gc.collect, gc.enable, gc.disable, gc.isenabled)


class PeerFailed(RuntimeError):
    """A trace cannot go on, because another rank raised, ended, or does not come. `rank`: which; None: nobody can tell.

    What that rank raised is raised there; here is only its first line.
    """

    def __init__(self, rank: int | None, how: str) -> None:
        super().__init__(rank, how)
        self.rank = rank
        self.how = how

    def __str__(self) -> str:
        return f"{'another rank' if self.rank is None else f'rank {self.rank}'} of this trace {self.how}"


def _first_line(error: BaseException, limit: int = 300) -> str:
    """The error as one short line. Whatever its own `__str__` does."""
    try:
        text = str(error)
    except Exception as another:
        text = f"(its __str__ raised {type(another).__name__})"
    line = next(iter(text.strip().splitlines()), "")
    return f"{type(error).__name__}: {line}"[:limit] if line else type(error).__name__


class Meeting:
    """Where the ranks of `group` wait for each other; alone where there is no process group.

    It is a gloo group over the default group's store that torch.distributed does not know of: no fault on
    `dist.barrier` strikes it, and it outlives a `destroy_process_group` of the code under test.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout: float = _WORLDS_PATIENCE) -> None:
        """Meet the other ranks of `group`. `timeout`: seconds that a rank waits for the others, each time.

        Raises PeerFailed where some do not come, ValueError where `timeout` is no number above 0.
        """
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
            raise ValueError(f"timeout is a number of seconds, more than 0 (got {timeout!r})")
        self._group: Any = None  # torch declares none of its methods
        self._store: dist.Store | None = None
        self._timeout = timeout
        self.rank = 0
        self.members: tuple[int, ...] = (0,)
        self._flag = torch.zeros(1, dtype=torch.int64, device="cpu")
        if not (dist.is_available() and dist.is_initialized()):
            return
        self.members = tuple(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))
        self.rank = dist.get_rank()
        store = dist.distributed_c10d._get_default_store()
        name = "sglmem/" + ",".join(map(str, self.members))
        # Each rank counts its own meetings with these members, so they agree on the number and none is used twice.
        number = store.add(f"{name}/{self.rank}", 1)
        self._store = dist.PrefixStore(f"{name}/{number}", store)
        with self._waiting():
            self._group = dist.ProcessGroupGloo(
                self._store, self.members.index(self.rank), self.size, timeout=timedelta(seconds=timeout)
            )

    @property
    def size(self) -> int:
        """How many ranks meet."""
        return len(self.members)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """What the body raises is told to the other ranks, so that none of them waits for this one."""
        try:
            yield
        except BaseException as error:
            key = "gave-up" if isinstance(error, PeerFailed) else "failed"
            self._write(f"{key}/{self.rank}", str(error) if key == "gave-up" else _first_line(error))
            raise

    def barrier(self) -> None:
        """Return when every rank is here. Raises PeerFailed where that cannot be, as all that waits here does."""
        if self._group is not None:
            with self._waiting():
                self._group.barrier().wait()

    def all_agree(self, flag: bool) -> bool:
        """Whether every rank says True."""
        if self._group is None:
            return flag
        self._flag.fill_(int(flag))
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN  # type: ignore[assignment]
        with self._waiting():
            self._group.allreduce([self._flag], options).wait()
        return bool(self._flag.item())

    def gather(self, record: T) -> list[T]:
        """Every rank's record, in rank order, in every rank."""
        if self._group is None:
            return [record]
        sent = torch.frombuffer(bytearray(_dumps(record)), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.size)]
        with self._waiting():
            self._group.allgather([sizes], [torch.full((1,), len(sent), dtype=torch.int64, device="cpu")]).wait()
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8, device="cpu")
        padded[: len(sent)] = sent
        got = [torch.zeros(longest, dtype=torch.uint8, device="cpu") for _ in sizes]
        with self._waiting():
            self._group.allgather([got], [padded]).wait()
        return [_loads(ctypes.string_at(one.data_ptr(), int(size))) for one, size in zip(got, sizes, strict=True)]

    def close(self) -> None:
        """Leave the group. Who still waits in it raises."""
        self._group = None

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        begun = _monotonic()
        try:
            yield
        except RuntimeError as error:  # gloo's: its message names a port, not a rank
            raise self._why(error, _monotonic() - begun) from None

    def _why(self, error: RuntimeError, waited: float) -> PeerFailed:
        """Who is the reason that the others were waited for in vain, as far as the store and they can tell."""
        raised = self._first("failed")
        if raised is not None:
            return PeerFailed(raised[0], f"raised {raised[1]}")
        absent = self._absent()
        gave_up = None if absent else self._first("gave-up")
        if gave_up is not None:
            return PeerFailed(gave_up[0], f"gave up: {gave_up[1]}")
        how = f"did not come within {self._timeout:g} s" if waited >= self._timeout else "ended without a word"
        if len(absent) == 1:
            return PeerFailed(absent[0], how)
        which = words.ranks(absent) if absent else "nobody can tell which"
        return PeerFailed(None, f"{how} ({which}): {_first_line(error)}")

    def _absent(self) -> list[int]:
        """The ranks that do not say that they wait, or did, too."""
        self._write(f"waits/{self.rank}", "yes")
        if self._store is not None:
            with suppress(RuntimeError):
                self._store.wait([f"waits/{rank}" for rank in self.members], _ROLL_CALL)
        return [rank for rank in self.members if not self._read(f"waits/{rank}")]

    def _first(self, key: str) -> tuple[int, str] | None:
        """The first rank that wrote something under this key, and what."""
        return next(((rank, text) for rank in self.members if (text := self._read(f"{key}/{rank}"))), None)

    def _read(self, key: str) -> str:
        try:
            return self._store.get(key).decode() if self._store is not None and self._store.check([key]) else ""
        except RuntimeError:  # the store went with the process that kept it
            return ""

    def _write(self, key: str, text: str) -> None:
        if self._store is not None:
            with suppress(RuntimeError):  # as above
                self._store.set(key, text)


def bounds(cycles: int | tuple[int, int], warmup: int = 0) -> tuple[int, int]:
    """`cycles` as (least, most). Raises ValueError or TypeError, which echo the value."""
    pair = cycles if isinstance(cycles, (tuple, list)) else (cycles, cycles)
    if len(pair) != 2 or not all(isinstance(n, int) and not isinstance(n, bool) for n in pair):
        raise TypeError(f"cycles is a whole number or (least, most), not {cycles!r}")
    least, most = pair
    if not 1 <= least <= most:
        raise ValueError(f"cycles must be at least 1, and least no more than most (got {cycles!r})")
    if not isinstance(warmup, int) or isinstance(warmup, bool) or warmup < 0:
        raise ValueError(f"warmup is a number of cycles, 0 or more (got {warmup!r})")
    return least, most


def trace_rank(
    setup: Callable[..., Callable[[G], object]],
    over: Iterable[G],
    *,
    args: Sequence[object] = (),
    rank: int,
    cycles: int | tuple[int, int] = (3, 12),
    warmup: int = 1,
    group: dist.ProcessGroup | None = None,
    ledger: Ledger | None = None,
    before_step: Callable[[], None] | None = None,
    progress: Callable[[int, int, int], None] | None = None,
    hands: Hands | None = None,
    artifacts: str | Path | None = None,
    meeting: Meeting | None = None,
    search: float = LIMIT,
    searching: Callable[[float], None] | None = None,
) -> RankTrace:
    """One rank's part of a trace: `setup(*args)` once, then `step(g)` for each `g` of `over`, the list once a cycle.

    Collective over `group` (None: the default group, or this process alone where there is none). `cycles`: how many
    are judged, after `warmup` more; (least, most) stops as soon as no rank's verdict can change, which a fixed small
    number cannot wait for: a cache that fills through all of it looks like a leak. `before_step` is
    called before each step; `progress(cycle, step, live)` after it. `artifacts`: the folder where a rank that leaks
    leaves torch's snapshot and a reference graph; `meeting`: the caller's own, in place of one over `group`. Who holds
    what leaks is looked for during at most `search` seconds, and `searching(seconds)` is called before. Raises
    TypeError where `setup` returns no callable, ValueError where `over` is empty, whatever the step raises, and
    PeerFailed where another rank's step raised or another rank ended.
    """
    least, most = bounds(cycles, warmup)
    geometries = list(over)
    if not geometries:
        raise ValueError(f"over is empty: a trace needs at least one geometry (got {over!r})")
    hands = hands or Hands.take()
    with ExitStack() as stack:
        stack.enter_context(Recording())
        step = _checked_step(setup, setup(*args))
        if meeting is None:
            meeting = Meeting(group)  # after setup: it may be the one that makes the process group
            stack.callback(meeting.close)
        stack.enter_context(meeting.telling())
        stack.enter_context(_collector_at_rest(hands))
        run = Run(step, geometries, rank, meeting, hands, ledger, before_step, progress)
        run.cycles(least, most, warmup)
        return run.finish(warmup, artifacts, search, searching)


def _checked_step(setup: object, step: Any) -> Callable[[Any], object]:
    if inspect.iscoroutine(step):
        step.close()  # else it warns besides that nobody awaited it
        raise TypeError(f"{setup!r} is async, and nobody awaits it: make it a plain function that returns the step")
    if not callable(step):
        raise TypeError(f"setup must return the step, a callable of one geometry; {setup!r} returned {step!r}")
    if inspect.isgeneratorfunction(step) or inspect.isasyncgenfunction(step):
        raise TypeError(f"the step {step!r} is a generator function: calling it runs nothing of it")
    return step  # type: ignore[no-any-return]


def trace(
    step: Callable[[G], object],
    over: Iterable[G],
    *,
    cycles: int | tuple[int, int] = (3, 12),
    warmup: int = 1,
    group: dist.ProcessGroup | None = None,
    timeout: float = PATIENCE,
) -> Trace:
    """Trace `step` over the geometries `over` in an existing job: collective over `group`, every rank gets the `Trace`.

    Without a process group it traces this process alone. `timeout`: seconds that ranks wait for each other at a quiet
    point, so longer than a step may take in one rank more than in another. `cycles`, `warmup` and errors as in
    `trace_rank`: where a rank raises, the others raise PeerFailed, which names it, unless they hang in the step itself.
    In a pytest process, what the steps log is not in `caplog`, which would keep each record and the tensors in it.
    """
    from .ipc import Ledger

    meeting = Meeting(group, timeout=timeout)
    try:
        with meeting.telling(), log_capture_resting(), Ledger(meeting.rank) as ledger:
            geometries = list(over)
            mine = trace_rank(
                lambda: step,
                geometries,
                rank=meeting.rank,
                cycles=cycles,
                warmup=warmup,
                ledger=ledger,
                meeting=meeting,
                search=min(LIMIT, timeout / 2),  # the other ranks wait for this one's record
            )
            return assemble(meeting.gather(mine), geometries, warmup=warmup)
    finally:
        meeting.close()


def assemble(
    ranks: Iterable[RankTrace], geometries: Iterable[object], *, warmup: int = 1, dead: Iterable[int] = ()
) -> Trace:
    """The ranks' records as one `Trace`, with this process's device and versions."""
    return Trace(
        tuple(ranks),
        tuple(_short(g) for g in geometries),
        warmup,
        device=str(torch.cuda.get_device_name()),
        backend=dist.get_backend() if dist.is_available() and dist.is_initialized() else None,
        versions={"torch": str(torch.__version__)},
        dead=tuple(dead),
    )


def _short(geometry: object, limit: int = 60) -> str:
    text = " ".join(str(geometry).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


@contextmanager
def _collector_at_rest(hands: Hands) -> Iterator[None]:
    was_on = hands.is_enabled()
    hands.disable()
    try:
        yield
    finally:
        (hands.enable if was_on else hands.disable)()


class Run(Generic[G]):
    """One rank's loop over cycles and steps, and what it has read so far."""

    def __init__(
        self,
        step: Callable[[G], object],
        geometries: Sequence[G],
        rank: int,
        meeting: Meeting,
        hands: Hands,
        ledger: Ledger | None,
        before_step: Callable[[], None] | None,
        progress: Callable[[int, int, int], None] | None,
    ) -> None:
        self._step, self._geometries, self._rank = step, geometries, rank
        self._meeting, self._hands, self._ledger = meeting, hands, ledger
        self._before_step, self._progress = before_step, progress
        self._device = torch.cuda.current_device()
        self._census = Census(self._device)
        self._series: list[int] = []
        self._digests: list[str] = []
        self._seconds: list[float] = []
        self._ends: list[CycleEnd] = []
        self._before: tuple[int, ...] = (0, 0)

    def cycles(self, least: int, most: int, warmup: int) -> None:
        """Run the warm-up and then `least` to `most` cycles, until every rank's verdict is settled."""
        self.begin()
        for cycle in range(warmup + most):
            self.one_cycle(cycle)
            if least <= cycle + 1 - warmup < most and self._meeting.all_agree(self.is_settled(warmup, least)):
                break

    def begin(self) -> None:
        """Note what is there before the first cycle."""
        if self._ledger is not None:
            self._before = tuple(len(records) for records in self._ledger.reading())
        self._collect()
        self._quiet()
        self._census.take(-1)

    def one_cycle(self, cycle: int) -> None:
        """Every geometry once, and the readings at the end."""
        call = stamped(cycle)
        for index in range(len(self._geometries)):
            self._one_step(call, cycle, index)
        self._ends.append(self._cycle_end(cycle))

    def is_settled(self, warmup: int, least: int) -> bool:
        """Whether this rank needs no further cycle."""
        return settled(self.record(), warmup, least)

    def _one_step(self, call: Callable[[Callable[[G], object], G], object], cycle: int, index: int) -> None:
        if self._ledger is not None:
            self._ledger.mark(len(self._series))
        self._hands.disable()  # a step may have switched the collector on
        begun = _perf_counter()
        result = call(self._guarded_step, self._geometries[index])
        self._hands.synchronize()
        self._seconds.append(_perf_counter() - begun)
        self._digests.append(digest(result))
        del result
        self._quiet()
        live = reading(self._device).live
        self._series.append(live)
        if self._progress is not None:
            self._progress(cycle, index, live)

    def _guarded_step(self, geometry: G) -> object:
        if self._before_step is not None:
            self._before_step()
        result = self._step(geometry)
        if isinstance(result, CoroutineType):
            result.close()
            raise TypeError(f"the step {self._step!r} is async, and nobody awaits it: call asyncio.run in the step")
        return result

    def _quiet(self) -> None:
        self._hands.synchronize()
        self._meeting.barrier()

    def _cycle_end(self, cycle: int) -> CycleEnd:
        self._quiet()
        as_is = self._read()
        self._meeting.barrier()
        self._ipc_collect()
        after_ipc = self._read()
        self._collect()
        self._quiet()
        self._ipc_collect()
        return CycleEnd(as_is, after_ipc, self._read(outside=True), self._census.take(cycle))

    def _read(self, outside: bool = False) -> Reading:
        return reading(self._device, outside=outside)

    def _ipc_collect(self) -> None:
        self._hands.ipc_collect()
        self._meeting.barrier()

    def _collect(self) -> None:
        before = self._read().live
        for _ in range(_COLLECTIONS):
            found = self._hands.collect()
            live = self._read().live
            if not found or live == before:
                break
            before = live

    def record(self) -> RankTrace:
        """What was read so far, without who holds what."""
        return RankTrace(self._rank, tuple(self._series), tuple(self._ends))

    def finish(
        self,
        warmup: int,
        artifacts: str | Path | None = None,
        search: float = LIMIT,
        searching: Callable[[float], None] | None = None,
    ) -> RankTrace:
        """The whole record; where this rank leaks, with who holds the blocks, and with files in `artifacts`.

        `search`, `searching`: as for `trace_rank`.
        """
        exports, opens = self._ledger.reading() if self._ledger is not None else ((), ())
        exports, opens = exports[self._before[0] :], opens[self._before[1] :]  # an earlier trace's are not this one's
        leaking = leaking_stacks(replace(self.record(), exports=tuple(exports)), warmup)
        if leaking and searching is not None:
            searching(search + _SNAPSHOT)
        return RankTrace(
            self._rank,
            tuple(self._series),
            tuple(self._ends),
            tuple(self._digests),
            tuple(exports),
            tuple(opens),
            self._held_by(leaking, warmup, self._folder(artifacts) if leaking else None, search),
            tuple(self._seconds),
        )

    def _folder(self, artifacts: str | Path | None) -> Path | None:
        """Where this rank's files go, with torch's snapshot already in it."""
        if artifacts is None:
            return None
        folder = Path(artifacts)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            save_snapshot(folder / f"snapshot-rank{self._rank}.pickle")
        except OSError:  # a full or read-only disk must not hide the leak
            return None
        return folder

    def _held_by(
        self, stacks: Sequence[tuple[str, ...]], warmup: int, folder: Path | None, search: float
    ) -> dict[str, tuple[str, ...]]:
        """Who holds the leaking blocks, by the line that allocated them. Looked for once, after the last reading."""
        found: dict[str, tuple[str, ...]] = {}
        deadline, roots = Deadline(search), {id(self._step): "step"}
        for number, stack in enumerate(stacks[:_SITES]):
            blocks = self._census.addresses(stack, since=warmup)[:_BLOCKS]
            graph = folder / f"graph-rank{self._rank}.png" if folder is not None and number == 0 else None
            held = chains_for_blocks(blocks, roots=roots, graph_to=graph, deadline=deadline) if blocks else ()
            site = stack[0] if stack else "unknown"
            found[site] = tuple(dict.fromkeys((*found.get(site, ()), *held)))
        return {site: held for site, held in found.items() if held}

"""The parent side: hand one call to all ranks, wait for all at once, judge every answer and every exit, bury the dead.

A call ends in one of four ways, each with its own words: every rank answered; a rank raised (`RankRaised`); a rank
died (`RankDied`); a rank was silent when the limit was over (`RankSilent`). Where ranks differ, an ExceptionGroup holds
one exception for each kind. No rank is believed without a receipt: an answer to this very call, sent after the body had
run to its end. A world in which a rank ended or was put away is `broken`: the survivors can still be asked for their
ledgers, but no call goes to all ranks any more.

pytest's own endings cross: a rank that calls `pytest.fail`, `pytest.xfail` or `pytest.skip` makes the call end that
way, in this order of weight, after errors. So the test is skipped as soon as one rank skips and none fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import io
import pickle
import re
import select
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from . import stacks
from .launch import KILL_LIMIT, LaunchError, RankProcess, Spec, Unavailable, resolve_device
from .rank import CallPickler, find_unpicklable
from .records import Answer, IpcSummary, Progress, RaisedText, Searching, Trace
from .words import ranks as ranks_text

if sys.version_info < (3, 11):
    from exceptiongroup import ExceptionGroup

if TYPE_CHECKING:
    from .faults import Fault
    from .launch import Starter

T = TypeVar("T")
START_LIMIT = 60.0  # seconds for ranks to come up, at least: 0.2 s for 8 on a quiet machine
RAISED_GRACE = 1.0  # seconds that peers get to answer too, once a rank has raised: most raise the same
DIED_GRACE = 0.03  # seconds, once a rank has died: its peers' collectives fail at once where they can
TERM_LIMIT = 0.3  # seconds from SIGTERM to SIGKILL
FINISH_LIMIT = 10.0  # seconds to leave the process group and run exit functions
SEND_LIMIT = 10.0  # seconds for an idle rank to take a call in
STALL_LOOK = 1.0  # seconds between two looks whether ranks wait for what cannot come
LAST_LINES = 10  # lines of a dead rank's output that its failure quotes; the report section has all
ENDED = "the test had ended"
_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b")
PEER_FAILED = f"{__package__}.tracing.PeerFailed"
LIVE_EVERY = 0.1  # seconds between two looks at what ranks printed, under -s


class RankError(Exception):
    """Something went wrong in ranks, not in pytest's process. `ranks`: in which; `rank`: the first of them."""

    def __init__(self, message: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(sorted(ranks))

    @property
    def rank(self) -> int | None:
        """The first rank it is about; None where it is about the world."""
        return self.ranks[0] if self.ranks else None


class RankRaised(RankError):
    """The call raised in these ranks, alike in each. `type`, `text`: the exception's, as text."""

    def __init__(self, message: str, ranks: Iterable[int], raised: RaisedText) -> None:
        super().__init__(message, ranks)
        self.type = raised.type
        self.text = raised.message


class RankDied(RankError):
    """These ranks ended without an answer. `exit_code`: their status, or minus the signal that killed them."""

    def __init__(self, message: str, ranks: Iterable[int], exit_code: int | None) -> None:
        super().__init__(message, ranks)
        self.exit_code = exit_code


class RankSilent(RankError):
    """These ranks gave no answer within the limit; the message says where each of them was."""


class RankWarning(UserWarning):
    """A process that did not end although it was killed, or ended otherwise than it should."""


@dataclass
class _Round:
    """One call on its way: who still owes an answer, what came, who ended."""

    number: int
    what: str
    limit: float
    waiting: set[int]
    answers: dict[int, Answer] = field(default_factory=dict)
    died: dict[int, int | None] = field(default_factory=dict)
    stuck: bool = False
    search: float = 0.0  # seconds that do not count: ranks look for who holds what leaks
    look: stacks.Look | None = None  # the peers' stacks, asked for as soon as a rank is going
    going: float = 0.0  # when that was

    @property
    def raised(self) -> dict[int, RaisedText]:
        return {rank: a.raised for rank, a in sorted(self.answers.items()) if a.raised is not None}

    @property
    def trouble(self) -> float | None:
        """How long the peers of a rank in trouble still get; None while there is none."""
        if self.died:
            return DIED_GRACE
        return RAISED_GRACE if self.raised else None


class _Stall:
    """Whether a call can be over before its limit: ranks wait in a collective that can never end."""

    def __init__(self, processes: dict[int, RankProcess]) -> None:
        self._processes = processes
        self._next = time.monotonic() + STALL_LOOK
        self._counts: dict[int, bytes] = {}

    def proven(self, current: _Round) -> bool:
        """Looks no more often than every STALL_LOOK seconds, and at stacks only once two looks saw no movement."""
        if time.monotonic() < self._next or len(self._processes) == 1:
            return False
        self._next = time.monotonic() + STALL_LOOK
        ledgers = {rank: self._processes[rank].ledger() for rank in (*current.waiting, *current.answers)}
        still = ledgers == self._counts
        self._counts = ledgers
        if still and stacks.hopeless(current.waiting, current.answers, ledgers):
            seen = stacks.look(self._processes, ledgers)
            current.stuck = stacks.deadlocked(seen, tuple(current.answers), ledgers)
        return current.stuck


class World:
    """Some ranks with a process group. Made by `World.start`; a test gets one as the fixture `world`."""

    def __init__(self, launcher: Starter, spec: Spec) -> None:
        self._launcher = launcher
        self._spec = spec
        self._processes: dict[int, RankProcess] = {}
        self._ended: dict[int, str] = {}
        self._number = 0
        self._groups = 0
        self._outputs: list[str] | None = None
        self._printed: dict[int, int] = {}
        self._skipped: dict[int, int] = {}
        self._sent: tuple[object, ...] = ((), (), None)
        self._armed: list[tuple[Fault, ...]] = []
        self._last_fired: dict[int, dict[str, int]] = {}
        self._why_broken = ""
        self.backend: str | None = None
        self.device_name = ""
        self._tracing: dict[str, Any] = {}
        self._pickling = _Pickling()
        self.on_progress: Callable[[Progress], None] | None = None
        self.on_trace: Callable[[Trace], Trace] | None = None
        self._turn = threading.RLock()  # of the thread that talks to the ranks

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("a World stays in the test; in a rank, torch.distributed.get_world_size() is its size")

    # ------------------------------------------------------------------------------------ the public face

    @classmethod
    def start(cls, launcher: Starter, spec: Spec) -> World:
        """Fork the ranks and wait until all are up. Raises LaunchError, or RankError where a rank fails to come up."""
        __tracebackhide__ = True
        spec = dataclasses.replace(spec, device=resolve_device(spec.device))
        world = cls(launcher, spec)
        try:
            world._processes = {process.rank: process for process in launcher.start(spec)}
            world._welcome(world._collect(_Round(0, "coming up", world._start_limit(), set(world._processes))))
        except BaseException:
            world._abandon("it did not come up")
            world.close()
            raise
        return world

    @property
    def size(self) -> int:
        """Ranks of the world, the dead ones included."""
        return self._spec.size

    @property
    def device(self) -> str:
        """Where ranks allocate: "cuda" or "emulated"."""
        return self._spec.device

    @property
    def broken(self) -> bool:
        """Whether a rank has ended or been put away."""
        return bool(self._why_broken)

    @property
    def outputs(self) -> list[str]:
        """What each rank printed so far, stdout and stderr in order."""
        if self._outputs is not None:
            return self._outputs
        return [self._output(rank) for rank in range(self.size)]

    def run(self, fn: Callable[..., T], *args: object, timeout: float | None = None, **kwargs: object) -> list[T]:
        """Call `fn(*args, **kwargs)` once in every rank; one result a rank, in order.

        `timeout`: seconds until a rank without an answer counts as silent (default: `--sglmem-timeout`). An async `fn`
        is run to its end there. Functions, closures and classes of test files cross by value, with the globals that
        they use: each call has a fresh copy of these, so what one call appends to a list of the test module the next
        does not see, nor does the test. What shall stay in a rank is kept in a module that ranks import, or made in
        this call. Results come back pickled, tensors on the CPU. Calls of several threads take turns. Raises
        RankRaised, RankDied, RankSilent, or an ExceptionGroup of them; a rank's skip, xfail or fail is this call's.
        """
        __tracebackhide__ = True
        return self._run(range(self.size), fn, args, kwargs, timeout)

    def run_on(
        self,
        ranks: int | Iterable[int],
        fn: Callable[..., T],
        *args: object,
        timeout: float | None = None,
        **kwargs: object,
    ) -> list[T]:
        """Like `run`, in these ranks only; one result a rank, in the order given."""
        __tracebackhide__ = True
        chosen = [ranks] if isinstance(ranks, int) else list(ranks)
        if not chosen:
            raise ValueError("run_on needs at least one rank (got none)")
        for rank in chosen:
            if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.size:
                raise ValueError(f"this world has the ranks 0 to {self.size - 1} (got {rank!r})")
        return self._run(chosen, fn, args, kwargs, timeout)

    def trace(
        self,
        setup: Callable[..., Callable[..., object]],
        over: Iterable[object],
        *,
        cycles: int | tuple[int, int] = (3, 12),
        warmup: int = 1,
        timeout: float | None = None,
        args: tuple[object, ...] = (),
    ) -> Trace:
        """Trace a program: `setup(*args)` runs once in each rank and returns `step`; `step(g)` runs for each `g` of
        `over`, the whole list once a cycle.

        `cycles`: how many are judged, or (least, most): stop as soon as the verdict is settled; `warmup`: cycles before
        those; `timeout`: seconds for all of them (the search for who holds what leaks has a limit of its own). A fixed
        small number cannot tell a leak from a cache that fills through all of it: (3, 12) can. Raises ValueError or
        TypeError for wrong arguments, or as `run`.
        """
        __tracebackhide__ = True
        geometries = _checked_trace(setup, over, cycles, warmup, args)
        options = {"cycles": cycles, "warmup": warmup, "progress": self.on_progress is not None}
        with self._turn:
            ranks = self._sound(range(self.size) if self._spec.init else self._alive())
            body = self._pickling.dumps((setup, args, geometries, options), setup, _given(args, {"over": geometries}))
            extent = (cycles, cycles) if isinstance(cycles, int) else cycles
            self._tracing = {"steps": len(geometries), "warmup": warmup, "cycles": extent}
            done = self._call(ranks, "trace", (body,), f"trace of {_name(setup)}", timeout)
            self._raise_for(done)
        trace = Trace(
            ranks=tuple(self._value(done.answers[rank]) for rank in ranks),  # type: ignore[misc]
            geometries=tuple(map(_short, geometries)),
            warmup=warmup,
            device=self.device_name,
            backend=self.backend,
            versions=_versions(),
            dead=tuple(sorted(set(range(self.size)) - set(ranks))),
        )
        return trace if self.on_trace is None else self.on_trace(trace)

    def arm(self, faults: Sequence[Fault]) -> None:
        """Put faults in force in every rank, until `disarm`."""
        self._ask("arm", tuple(faults))
        self._armed.append(tuple(faults))

    def disarm(self) -> dict[str, tuple[int, ...]]:
        """Take back what was armed last; how often each fault fired, one entry a rank."""
        faults = self._armed.pop() if self._armed else ()
        return self._by_rank(self._ask("disarm"), [fault.text for fault in faults])

    def fired(self) -> dict[str, tuple[int, ...]]:
        """How often each fault fired so far, one entry a rank, those of dead ranks included."""
        asked = [fault.text for faults in (self._spec.faults, *self._armed) for fault in faults]
        if not asked:
            return {}
        return self._by_rank(self._ask("fired"), asked)

    def reached(self) -> dict[str, tuple[int, ...]]:
        """How often each armed point was reached so far, one entry a rank."""
        return self._by_rank(self._ask("reached"), [])

    def audit(self) -> IpcSummary:
        """What the IPC ledgers of all ranks say together, now."""
        from . import ipc

        readings = self._ask("ledger")
        exports = [export for reading in readings.values() for export in reading[0]]  # type: ignore[index]
        opens = [opened for reading in readings.values() for opened in reading[1]]  # type: ignore[index]
        return ipc.summary(exports, opens, sorted(self._ended))

    def renew(self) -> None:
        """Make the world sound for the next test: a new process group, and new ranks in place of a broken world's."""
        __tracebackhide__ = True
        with self._turn:
            self._renew()

    def _renew(self) -> None:
        __tracebackhide__ = True
        if self.broken or not self._launcher.mine():
            self._restart()
            return
        self._groups += 1
        self._skipped = {
            rank: len(process.output().decode(errors="replace")) for rank, process in self._processes.items()
        }
        self._printed.clear()
        try:
            done = self._call(
                range(self.size), "renew", (f"store-{self._groups}", ()), "renewal of the group", self._start_limit()
            )
            self._welcome(done)
        except (RankError, ExceptionGroup):
            self._restart()

    def close(self) -> None:
        """End the ranks. Bounded. Raises RankDied where a rank that should end well does not, RankError where a thread
        of the test is still in a call.
        """
        __tracebackhide__ = True
        if self._outputs is not None:
            return
        trouble = self._interrupted()
        with self._turn:
            if not self.broken:
                trouble = self._finish()
            self._put_away(self._processes)
            self._outputs = [self._output(rank) for rank in range(self.size)]
            self._why_broken = self._why_broken or "closed"
            self._launcher.forget(self._processes.values())
        if trouble is not None:
            raise trouble

    def end_calls(self) -> None:
        """The test is over: have a call end that another thread of it is in. Raises RankError where there is one."""
        __tracebackhide__ = True
        trouble = self._interrupted()
        if trouble is not None:
            raise trouble

    def _interrupted(self) -> RankError | None:
        """Where another thread is in a call: its ranks are killed. Returns what is to be said of that, once."""
        if self._why_broken == ENDED:
            return None
        if self._turn.acquire(blocking=False):
            self._turn.release()
            return None
        self._why_broken = ENDED
        for process in self._processes.values():
            process.signal(signal.SIGKILL)
        return RankError("the test ended while a thread of it was in a call into the ranks: join it first")

    # --------------------------------------------------------------------------------------------- calls

    def _run(
        self,
        ranks: Iterable[int],
        fn: Callable[..., T],
        args: tuple[object, ...],
        kwargs: dict[str, object],
        timeout: float | None,
    ) -> list[T]:
        __tracebackhide__ = True
        if not callable(fn):
            raise TypeError(f"a world runs a callable (got {fn!r})")
        with self._turn:
            chosen = self._sound(ranks)
            body = self._pickling.dumps((fn, args, kwargs), fn, _given(args, kwargs))
            done = self._call(chosen, "run", (body,), _name(fn), timeout)
            self._raise_for(done)
        return [self._value(done.answers[rank]) for rank in chosen]  # type: ignore[misc]

    def _ask(self, kind: str, *body: object) -> dict[int, object]:
        """Ask the ranks that still run something of the harness's own."""
        with self._turn:
            done = self._call(self._alive(), kind, body, kind, None)
            self._raise_for(done)
        return {rank: self._value(answer) for rank, answer in done.answers.items()}

    def _call(
        self, ranks: Iterable[int], kind: str, body: tuple[object, ...], what: str, timeout: float | None
    ) -> _Round:
        limit = self._spec.timeout if timeout is None else timeout
        if not limit > 0:
            raise ValueError(f"the limit of a call is more than 0 seconds (got timeout={timeout!r})")
        self._number += 1
        current = _Round(self._number, what, limit, set(ranks))
        messages = [*self._news(), pickle.dumps((self._number, kind, body))]
        try:
            for rank in sorted(current.waiting):
                with contextlib.suppress(OSError):  # it is dead or stopped: the wait below says which
                    for message in messages:
                        self._processes[rank].pipe.send(message, limit=SEND_LIMIT)
            return self._collect(current)
        except BaseException:  # Ctrl-C, pytest-timeout: nobody will read these answers
            self._abandon("the call was interrupted", quick=True)
            raise

    def _news(self) -> list[bytes]:
        """What changed in this process since the last call and matters in a rank."""
        now = (list(sys.path), list(warnings.filters), self._spec.showlocals)
        path = now[0] if now[0] != self._sent[0] else None
        filters = _pickled_filters() if now[1] != self._sent[1] else None
        if path is None and filters is None:
            return []
        self._sent = now
        return [pickle.dumps((0, "settings", (path, filters, self._spec.showlocals)))]

    def _collect(self, current: _Round) -> _Round:
        """Wait for all at once, until all answered or ended, the time is over, or no more can come."""
        poll = select.poll()
        pipes = {self._processes[rank].pipe.fileno(): rank for rank in current.waiting}
        for fd in (*pipes, self._launcher.fileno()):
            poll.register(fd, select.POLLIN)
        pause = LIVE_EVERY if self._spec.live_output else STALL_LOOK
        end, shortened = time.monotonic() + current.limit, False
        stall = _Stall(self._processes)
        self._bury(current)
        while current.waiting:
            if not shortened and current.trouble is not None:
                end, shortened = min(end, (current.going or time.monotonic()) + current.trouble), True
            left = end - time.monotonic() + (0 if shortened else current.search)
            if left <= 0 or stall.proven(current):
                break
            for fd, _ in poll.poll(max(1, 1000 * min(left, pause))):
                if fd in pipes and not self._take(current, pipes[fd]):
                    poll.unregister(fd)
                    self._look_at_peers(current, pipes[fd])
                elif fd not in pipes:
                    self._news_of_ends(current)
            self._print_live()
        self._print_live()
        return current

    def _look_at_peers(self, current: _Round, gone: int) -> None:
        """A rank that owes an answer is ending: have its peers write their stacks while it is waited for."""
        if gone in current.waiting and current.look is None:
            peers = current.waiting - {gone}
            current.look, current.going = stacks.Look(self._processes, peers), time.monotonic()

    def _news_of_ends(self, current: _Round) -> None:
        self._launcher.listen()
        self._bury(current)
        if self._launcher.broken:
            raise LaunchError(self._launcher.broken)

    def _take(self, current: _Round, rank: int) -> bool:
        """Read what this rank sent. False where nothing more can come."""
        try:
            messages = self._processes[rank].pipe.receive()
        except EOFError:
            return False
        for message in messages:
            record = pickle.loads(message)
            if isinstance(record, Progress):
                if self.on_progress is not None:
                    self.on_progress(dataclasses.replace(record, **self._tracing))
            elif isinstance(record, Searching):
                current.search = record.seconds if record.call == current.number else current.search
            elif record[:2] == (current.number, rank):
                current.answers[rank] = Answer(*record)
                current.waiting.discard(rank)
        return True

    def _bury(self, current: _Round) -> None:
        """Move the ranks that have ended from `waiting` to `died`; their last answer may still lie in the pipe."""
        for rank in list(current.waiting):
            code = self._processes[rank].exit_code()
            if code is None:
                continue
            self._take(current, rank)
            if rank in current.waiting:
                current.waiting.discard(rank)
                current.died[rank] = code
            self._ended[rank] = _ending(code)
            self._why_broken = self._why_broken or f"rank {rank} ended in {current.what}: {_ending(code)}"

    # ------------------------------------------------------------------------------------ judging a round

    def _raise_for(self, current: _Round) -> None:
        """Nothing where every rank has handed in its receipt; else what happened, as one exception."""
        __tracebackhide__ = True
        if not (current.waiting or current.died or current.raised):
            self._repeat_warnings(current)
            return
        with contextlib.suppress(Warning):  # one that is an error here must not hide what happened
            self._repeat_warnings(current)
        problems = self._problems(current)
        if current.waiting or current.died:
            self._break(current)
        if not problems:
            _end_as_ranks_did(current)
        if len(problems) == 1:
            raise problems[0]
        raise ExceptionGroup(f"{len(problems)} different failures in ranks, in {current.what}", problems)

    def _problems(self, current: _Round) -> list[RankError]:
        """What is to be said of a round, most telling first. Must run before the waiting ranks are put away."""
        look = current.look if current.died else None
        seen = (look or stacks.Look(self._processes, current.waiting)).read(current.waiting)
        ledgers = {rank: process.ledger() for rank, process in self._processes.items()}
        peers = _Peers(seen, ledgers, tuple(current.answers))
        raised = {rank: text for rank, text in current.raised.items() if text.outcome == "raised"}
        if current.died:  # a peer that is gone shows in the others' collectives: told, but not as failures of their own
            peers.shaken = {rank: text for rank, text in raised.items() if text.collective}
            raised = {rank: text for rank, text in raised.items() if rank not in peers.shaken}
        first = {rank for rank, text in current.raised.items() if text.type != PEER_FAILED}
        if first or current.died:  # the others of a trace say only that they know of it
            raised = {rank: text for rank, text in raised.items() if rank in first}
        problems: list[RankError] = []
        for code in dict.fromkeys(current.died.values()):
            ranks = tuple(rank for rank, its in sorted(current.died.items()) if its == code)
            problems.append(RankDied(self._died_message(current, ranks, code, peers), ranks, code))
        for ranks in _alike(raised):
            text = raised[ranks[0]]
            problems.append(RankRaised(_raised_message(current, ranks, text, peers, self.size), ranks, text))
        if current.waiting and not problems and not current.raised:
            stacks.keep(Path(self._spec.artifacts), seen, self._processes)
            head = f"{ranks_text(tuple(current.waiting))} of {self.size} "
            waiting = "wait" if len(current.waiting) > 1 else "waits"
            head += f"{waiting} for what cannot come" if current.stuck else f"gave no answer within {current.limit:g} s"
            told = stacks.silent_message(f"{head}, in {current.what}", seen, current.answers, ledgers)
            problems.append(RankSilent(told, current.waiting))
        return problems

    def _died_message(self, current: _Round, ranks: tuple[int, ...], code: int | None, peers: _Peers) -> str:
        lines = [f"{ranks_text(ranks)} of {self.size} died: {_ending(code)}", f"in {current.what}"]
        lines += stacks.compare(peers.ledgers)
        for rank in ranks:
            last = stacks.last(peers.ledgers[rank])
            if last is not None:
                lines.append(f"rank {rank} went into its last collective with {last}, number {last.number}")
            crash = stacks.where(self._processes[rank].stacks())
            if crash.frames:
                lines += stacks.stack_lines({rank: crash})
            output = self._output(rank).strip().splitlines()
            if output:
                lines += [f"last output of rank {rank}:", *(f"    {line}" for line in output[-LAST_LINES:])]
        return "\n".join([*lines, *peers.words(current)])

    def _repeat_warnings(self, current: _Round) -> None:
        """What ranks were warned of is said here again, once for each distinct text, with the ranks."""
        given: dict[tuple[bytes, str, str, int], list[int]] = {}
        for rank, answer in sorted(current.answers.items()):
            for warning in answer.warnings:
                key = (warning.category, warning.message, warning.filename, warning.lineno)
                if rank not in given.setdefault(key, []):
                    given[key].append(rank)
        for (category, message, filename, lineno), ranks in given.items():
            text = f"{ranks_text(tuple(ranks))}: {message}"
            warnings.warn_explicit(text, pickle.loads(category), filename, lineno)

    def _value(self, answer: Answer) -> object:
        if answer.value is None:
            raise RankError(f"rank {answer.rank} answered without a receipt", [answer.rank])
        try:
            return pickle.loads(answer.value)
        except Exception as error:
            told = f"the result of rank {answer.rank} cannot be read here: {type(error).__name__}: {error}"
            raise RankError(told, [answer.rank]) from error

    def _welcome(self, current: _Round) -> None:
        """Every rank is up, and its process group is as large as the world was asked to be."""
        reasons = [text.message for text in current.raised.values() if text.outcome == "skipped"]
        if reasons:
            raise Unavailable(reasons[0])
        self._raise_for(current)
        hellos = [self._value(current.answers[rank]) for rank in range(self.size)]
        for rank, hello in enumerate(hellos):
            assert isinstance(hello, dict)
            if self._spec.init and (hello["size"], hello["group_rank"]) != (self.size, rank):
                raise RankError(
                    f"rank {rank} came up as rank {hello['group_rank']} of {hello['size']}, "
                    f"not as rank {rank} of {self.size}",
                    [rank],
                )
            self.device_name = str(hello.get("device", self.device_name))
            self.backend = hello["backend"]

    # --------------------------------------------------------------------------------------------- ending

    def _alive(self) -> set[int]:
        return set(self._processes) - set(self._ended)

    def _sound(self, ranks: Iterable[int]) -> list[int]:
        chosen = list(ranks)
        self._launcher.listen()
        for rank in self._alive():
            code = self._processes[rank].exit_code()
            if code is not None:
                self._ended[rank] = _ending(code)
                self._why_broken = self._why_broken or f"rank {rank} ended between two calls: {_ending(code)}"
        gone = [rank for rank in chosen if rank in self._ended or rank not in self._processes]
        if gone:
            raise RankDied(f"no call can go to {ranks_text(tuple(gone))}: {self._why_broken}", gone, None)
        return chosen

    def _break(self, current: _Round) -> None:
        ended = [f"rank {rank} {_ending(code)}" for rank, code in current.died.items()]
        put_away = f"{ranks_text(tuple(sorted(current.waiting)))} put away" if current.waiting else ""
        self._why_broken = f"in {current.what}: " + ", ".join([*ended, *([put_away] if put_away else [])])
        for rank in current.waiting:  # told to end now, waited for at the end of the world: no test waits
            self._processes[rank].end(TERM_LIMIT)
            self._ended[rank] = "put away"

    def _abandon(self, why: str, *, quick: bool = False) -> None:
        """Nobody waits for these ranks any more."""
        self._why_broken = self._why_broken or why
        self._put_away(self._processes, term_limit=0.0 if quick else TERM_LIMIT)

    def _put_away(self, ranks: Iterable[int], *, term_limit: float = TERM_LIMIT) -> None:
        """Terminate, wait, kill, wait; then a warning that names who is left."""
        left = {rank for rank in ranks if rank in self._processes}
        for number, limit in ((signal.SIGTERM, term_limit), (signal.SIGKILL, KILL_LIMIT)):
            left = self._still_there(left, 0.0)
            for rank in left:
                if limit:
                    self._processes[rank].signal(number)
            left = self._still_there(left, limit)
        if left:
            names = ", ".join(f"rank {rank} (process {self._processes[rank].pid})" for rank in sorted(left))
            warnings.warn(
                RankWarning(f"{names} did not end within {KILL_LIMIT:.0f} s after SIGKILL: stuck in a driver?"),
                stacklevel=2,
            )
            self._ended.update(dict.fromkeys(left, "put away, but did not end"))

    def _still_there(self, ranks: set[int], limit: float) -> set[int]:
        """Those of `ranks` that have not ended when all have, or `limit` seconds are over."""
        end = time.monotonic() + limit
        left = set(ranks)
        while True:
            self._launcher.listen()
            for rank in list(left):
                code = self._processes[rank].exit_code()
                if code is not None or self._launcher.broken:
                    left.discard(rank)
                    self._ended.setdefault(rank, _ending(code))
            wait = end - time.monotonic()
            if not left or wait <= 0:
                return left
            select.select([self._launcher], [], [], wait)

    def _finish(self) -> RankError | None:
        """The orderly end: all ranks leave the group together and exit with status 0. Returns what went wrong."""
        ranks = self._alive()
        try:
            done = self._call(ranks, "finish", (), "the end of the world", FINISH_LIMIT)
            self._raise_for(done)
        except (RankError, ExceptionGroup) as error:
            return error if isinstance(error, RankError) else error.exceptions[0]
        left = self._still_there(ranks, FINISH_LIMIT)
        if left:
            seen, ledgers = stacks.look(self._processes, left), {rank: self._processes[rank].ledger() for rank in left}
            head = (
                f"{ranks_text(tuple(sorted(left)))} of {self.size} did not end within {FINISH_LIMIT:g} s, while ending"
            )
            return RankSilent(stacks.silent_message(head, seen, (), ledgers), left)
        bad = {rank: code for rank in ranks if (code := self._processes[rank].exit_code()) not in (0, None)}
        if not bad:
            return None
        code = next(iter(bad.values()))
        return RankDied(f"{ranks_text(tuple(sorted(bad)))} died: {_ending(code)}, while ending", bad, code)

    def _restart(self) -> None:
        self._abandon("replaced", quick=True)
        fresh = World.start(self._launcher, self._spec)
        old = self._processes
        kept = {"on_progress": self.on_progress, "on_trace": self.on_trace, "_turn": self._turn}
        self.__dict__.update({**fresh.__dict__, **kept})
        self._launcher.forget(old.values())

    def _start_limit(self) -> float:
        return max(START_LIMIT, self._spec.timeout)

    # --------------------------------------------------------------------------------------------- output

    def _output(self, rank: int) -> str:
        if rank not in self._processes:
            return ""
        return self._processes[rank].output().decode(errors="replace")[self._skipped.get(rank, 0) :]

    def _print_live(self) -> None:
        if not self._spec.live_output:
            return
        for rank in sorted(self._processes):
            text = self._output(rank)[self._printed.get(rank, 0) :]
            whole = text[: text.rfind("\n") + 1]
            self._printed[rank] = self._printed.get(rank, 0) + len(whole)
            for line in whole.splitlines():
                print(f"[rank {rank}] {line}", flush=True)

    def _by_rank(self, answers: dict[int, object], asked: Iterable[str]) -> dict[str, tuple[int, ...]]:
        for rank, counts in answers.items():
            assert isinstance(counts, dict)
            self._last_fired[rank] = counts
        keys = dict.fromkeys([*asked, *(key for counts in answers.values() for key in counts)])  # type: ignore[attr-defined]
        return {key: tuple(self._count(rank, key, answers) for rank in range(self.size)) for key in keys}

    def _count(self, rank: int, key: str, answers: dict[int, object]) -> int:
        if rank in answers:
            return answers[rank].get(key, 0)  # type: ignore[attr-defined]
        # A dead rank cannot be asked; a fault that ends a rank says so on stderr before it does
        announced = self._output(rank).count(f"[sglmem] rank {rank}: injected {key}\n")
        return max(announced, self._last_fired.get(rank, {}).get(key, 0))


# ----------------------------------------------------------------------------------------------------- words


PDB_NOTE = (
    "sglmem: this debugger is in pytest's process, at the call into the ranks, which have no terminal. "
    "With -l the failure shows their local variables; a function called outside a world can be stepped through."
)


def is_of_ranks(error: BaseException) -> bool:
    """Whether an exception, or one in its group, says what happened in ranks."""
    return isinstance(error, RankError) or any(map(is_of_ranks, getattr(error, "exceptions", ())))


def _ending(code: int | None) -> str:
    if code is None:
        return "its pipe closed"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def _alike(raised: dict[int, RaisedText]) -> list[tuple[int, ...]]:
    """Ranks grouped by what they raised and where."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for rank, text in raised.items():
        message = _ADDRESS.sub("0x...", text.message)  # of an object's repr: every rank has its own
        groups.setdefault((text.type, message, text.place), []).append(rank)
    return [tuple(ranks) for ranks in groups.values()]


def _raised_message(current: _Round, ranks: tuple[int, ...], raised: RaisedText, peers: _Peers, size: int) -> str:
    first = raised.message.strip().splitlines()
    lines = [f"{ranks_text(ranks)} of {size} raised {raised.type}: {first[0] if first else ''}", f"in {current.what}"]
    if raised.collective:
        lines += stacks.compare(peers.ledgers)
    return "\n".join([*lines, *peers.words(current), "", raised.traceback])


@dataclass
class _Peers:
    """What the other ranks were doing while one was in trouble."""

    seen: dict[int, stacks.Where]
    ledgers: dict[int, bytes]
    answered: tuple[int, ...]
    shaken: dict[int, RaisedText] = field(default_factory=dict)

    def words(self, current: _Round) -> list[str]:
        """Who waited, where, and who failed because a peer was gone."""
        lines = []
        if self.seen:
            lines.append(f"meanwhile {stacks.waits(self.seen, (), {})} (put away)")
        for ranks in _alike(self.shaken):
            text = self.shaken[ranks[0]]
            lines.append(
                f"{ranks_text(ranks)} then failed in {text.collective} ({text.place}): {text.message.strip()[:200]}"
            )
        return lines


def _end_as_ranks_did(current: _Round) -> None:
    """A rank failed, xfailed or skipped by pytest's own words: so does this call."""
    __tracebackhide__ = True
    import pytest

    ends: tuple[tuple[str, Callable[[str], object]], ...] = (
        ("failed", lambda reason: pytest.fail(reason, pytrace=False)),
        ("xfailed", pytest.xfail),
        ("skipped", pytest.skip),
    )
    for word, end in ends:
        those = {rank: text for rank, text in current.raised.items() if text.outcome == word}
        if those:
            reasons = [f"{ranks_text(ranks)}: {those[ranks[0]].message}" for ranks in _alike(those)]
            end("; ".join(reasons))


def _name(fn: object) -> str:
    """`name (file:line)` of what a call runs."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    code = getattr(fn, "__code__", None) or getattr(getattr(fn, "__func__", None), "__code__", None)
    name = getattr(fn, "__name__", None) or type(fn).__name__
    if code is None:
        return name
    from .sites import format_frames

    place = next(iter(format_frames([(code.co_filename, code.co_firstlineno, name)])), "")
    return f"{name} ({place.split(' in ')[0]})" if place else name


def _short(geometry: object, limit: int = 80) -> str:
    text = " ".join(str(geometry).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _versions() -> dict[str, str]:
    import platform
    from importlib.metadata import version

    from . import __version__

    return {"pytest_sglmem": __version__, "torch": version("torch"), "python": platform.python_version()}


def _checked_trace(setup: object, over: Iterable[object], cycles: object, warmup: object, args: object) -> list[object]:
    """The geometries as a list; ValueError or TypeError for what cannot be."""
    if not callable(setup):
        raise TypeError(f"trace(setup, ...): setup is a callable that returns the step (got {setup!r})")
    if isinstance(over, str | bytes) or not isinstance(over, Iterable):
        raise TypeError(f"trace(..., over): over is a list of geometries, one for each step of a cycle (got {over!r})")
    geometries = list(over)
    if not geometries:
        raise ValueError(f"trace(..., over): over is empty (got {over!r}): a cycle has at least one step")
    pair = cycles if isinstance(cycles, tuple) else (cycles, cycles)
    if len(pair) != 2 or not all(_whole(c) for c in pair) or not 1 <= pair[0] <= pair[1]:
        raise ValueError(f"trace(cycles=...): a number from 1, or (least, most) with least <= most (got {cycles!r})")
    if not _whole(warmup) or warmup < 0:  # type: ignore[operator]
        raise ValueError(f"trace(warmup=...): a number of cycles from 0 (got {warmup!r})")
    if not isinstance(args, tuple):
        raise TypeError(f"trace(args=...): a tuple, as for a thread (got {args!r})")
    return geometries


def _whole(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)


# --------------------------------------------------------------------------------------------------- pickling


class _Pickling:
    """Pickles calls. It remembers which modules pytest has rewritten, until something is imported."""

    def __init__(self) -> None:
        self._newest: tuple[object, ...] = ()
        self._rewritten: dict[str, ModuleType] = {}

    def dumps(self, call: tuple[object, ...], fn: object, given: dict[str, object]) -> bytes:
        """The call, pickled once for all ranks, the test's modules by value. Raises TypeError where it cannot cross,
        which names what of `given` (or of what `fn` uses) cannot.
        """
        __tracebackhide__ = True
        import cloudpickle

        try:
            with self._by_value(fn, cloudpickle):
                buffer = io.BytesIO()
                CallPickler(buffer).dump(call)
                return buffer.getvalue()
        except Exception as error:
            told = _culprits({**given, **_used(fn)}) if "cannot pickle" in str(error) else ()
            where = "".join(f"{where} is a {kind}: " for where, kind in told)
            raise TypeError(f"{_name(fn)} cannot be sent to the ranks: {where}{error}") from None

    @contextlib.contextmanager
    def _by_value(self, fn: object, cloudpickle: ModuleType) -> Iterator[None]:
        """Pickle by value, meanwhile, what ranks cannot (or should not) import: the test's own module, test modules and
        conftests that pytest has rewritten, and modules that no import path leads to.
        """
        known = cloudpickle.list_registry_pickle_by_value()
        chosen = [module for module in self._test_modules(fn) if module.__name__ not in known]
        for module in chosen:
            cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            for module in chosen:
                cloudpickle.unregister_pickle_by_value(module)

    def _test_modules(self, fn: object) -> list[ModuleType]:
        while isinstance(fn, functools.partial):
            fn = fn.func
        own = getattr(fn, "__module__", None) or type(fn).__module__
        return [
            module
            for name, module in self._all_rewritten().items()
            if name == own or re.match(r"(test_.*|.*_test|conftest)$", name.rpartition(".")[2])
        ]

    def _all_rewritten(self) -> dict[str, ModuleType]:
        last = next(reversed(sys.modules))  # an import puts its module last
        newest = (len(sys.modules), last, sys.modules[last])
        if newest != self._newest:
            self._newest = newest
            self._rewritten = {
                name: module
                for name, module in list(sys.modules.items())
                if type(getattr(module, "__loader__", None)).__name__ == "AssertionRewritingHook"
                if name != "__main__" and module.__name__ == name
            }
        return self._rewritten


def _given(args: Sequence[object], kwargs: dict[str, object]) -> dict[str, object]:
    """What a call passes on, by the name that an error gives it."""
    return {**{f"argument {at}": arg for at, arg in enumerate(args)}, **{f"{key}=": arg for key, arg in kwargs.items()}}


def _used(fn: object) -> dict[str, object]:
    """The variables around a function that it uses."""
    try:
        around = inspect.getclosurevars(fn)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # no function of Python's; a variable that has no value yet
        return {}
    return {f"its {name!r}": value for name, value in {**around.globals, **around.nonlocals}.items()}


def _culprits(values: dict[str, object]) -> list[tuple[str, str]]:
    """Where the first thing is that cannot be pickled, and its type's name; empty where everything can."""
    import cloudpickle

    for name, value in values.items():
        try:
            cloudpickle.dumps(value)
        except Exception:
            return [find_unpicklable(value, name)]
    return []


def _pickled_filters() -> bytes:
    import cloudpickle

    sendable = []
    for one in warnings.filters:
        with contextlib.suppress(Exception):
            cloudpickle.dumps(one)
            sendable.append(one)
    return cloudpickle.dumps(sendable)

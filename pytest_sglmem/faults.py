"""Faults as data: where one strikes, when, and what it does there.

A fault is written `point[@rank=R,nth=N,every=K,p=0.1]=action[(argument)]`, in the terms of fail(9). `parse` turns the
text into a frozen `Fault`, or says what is wrong with it, where the text came from and what was probably meant;
`POINTS` is the one table of points and of the actions that each takes; `armed` puts faults in force in this process
(the patching itself is in strikes.py, loaded only then, so that parsing imports no torch).

Two actions are not for users: `watch`, taken by every point, does nothing and is counted, which is how the proof
learns what a clean run reaches.
"""

from __future__ import annotations

import builtins
import contextlib
import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .strikes import Armed

PYTEST_RANK = -1  # the pytest process itself
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}
# Exceptions that a name without a dot may mean, beside the builtins: torch is not imported to look them up.
_KNOWN_EXCEPTIONS = MappingProxyType(
    {
        "PicklingError": "pickle.PicklingError",
        "UnpicklingError": "pickle.UnpicklingError",
        "PickleError": "pickle.PickleError",
        "OutOfMemoryError": "torch.OutOfMemoryError",
        "DistError": "torch.distributed.DistError",
        "DistBackendError": "torch.distributed.DistBackendError",
        "DistNetworkError": "torch.distributed.DistNetworkError",
        "DistStoreError": "torch.distributed.DistStoreError",
    }
)


class FaultError(ValueError):
    """A fault that cannot be: its words name what is wrong, the near names, and where the text came from."""


@dataclass(frozen=True)
class Action:
    """What a fault can do. `argument`: "" (takes none), "(x)" (must have one) or "[(x)]" (may have one)."""

    name: str
    does: str
    argument: str = ""


@dataclass(frozen=True)
class Point:
    """Where a fault can strike. `place`: the function below the code under test whose calls are struck."""

    name: str
    place: str
    actions: tuple[str, ...]


@dataclass(frozen=True)
class Fault:
    """One fault. Picklable, comparable; `text` is its name everywhere (counts, reports, command lines).

    `ranks`: where it strikes (None: everywhere; -1 is the pytest process). At most one of `nth` (that reach of the
    point only, from 1) and `every` (each K-th reach); `p`: the chance of each reach that is left, decided by the
    session's seed. `argument`: bytes, milliseconds, seconds, an exit code or the dotted name of an exception.
    """

    point: str
    action: str
    argument: int | float | str | None = None
    ranks: tuple[int, ...] | None = None
    nth: int | None = None
    every: int | None = None
    p: float | None = None
    text: str = ""
    origin: str = ""

    def strikes(self, rank: int) -> bool:
        """Whether this fault can strike in `rank` at all. What ends a process never strikes the pytest process."""
        if rank == PYTEST_RANK and self.action in ("kill", "exit", "hang"):
            return False
        return self.ranks is None or rank in self.ranks


ACTIONS: Mapping[str, Action] = MappingProxyType(
    {
        action.name: action
        for action in (
            Action("skip", "the call does nothing"),
            Action("raise", "the call raises this exception", "(Exc)"),
            Action("kill", "the rank kills itself (SIGKILL)"),
            Action("exit", "the rank ends at once with this code", "[(code)]"),
            Action("hang", "the call never returns"),
            Action("delay", "the call comes that many milliseconds later", "(ms)"),
            Action(
                "retain", "what the call made stays alive; with an argument, that many device bytes more", "[(bytes)]"
            ),
            Action("duplicate", "the call is counted twice"),
            Action("one-handle", "every export of a block gives out its first handle again"),
            Action("oom", "the allocation fails: out of memory"),
            Action("corrupt", "one byte is changed"),
            Action("enospc", "the call fails: no space left on device"),
            Action("jump", "the clock jumps by that many seconds and stays there", "(seconds)"),
            Action("keep-live", "the object stays alive"),
        )
    }
)
_ANY = ("raise", "kill", "exit", "hang", "delay")
POINTS: Mapping[str, Point] = MappingProxyType(
    {
        point.name: point
        for point in (
            Point("ipc.export", "UntypedStorage._share_cuda_", (*_ANY, "one-handle", "duplicate", "retain")),
            Point("ipc.open", "UntypedStorage._new_shared_cuda", (*_ANY, "skip", "retain", "duplicate", "corrupt")),
            Point("ipc.release", "the end of an opened storage", ("skip", "duplicate", "delay", "kill")),
            Point("ipc.collect", "torch.cuda.ipc_collect", (*_ANY, "skip")),
            Point("cuda.alloc", "operators that make a device storage", (*_ANY, "retain", "oom")),
            Point("cuda.synchronize", "torch.cuda.synchronize", (*_ANY, "skip")),
            Point("dist.barrier", "torch.distributed.barrier", (*_ANY, "skip")),
            Point("dist.collective", "torch.distributed.all_reduce and its like", (*_ANY, "skip", "corrupt")),
            Point("step", "before each step of a trace or append", (*_ANY, "retain", "keep-live")),
            Point("gc.enable", "gc.enable", (*_ANY, "skip")),
            Point("pickle.dumps", "pickle.dumps", (*_ANY, "keep-live", "corrupt")),
            Point("pickle.loads", "pickle.loads", (*_ANY, "keep-live", "corrupt")),
            Point("clock.time", "time.time, time.time_ns", (*_ANY, "jump")),
            Point("file.write", "writes of files opened by open()", (*_ANY, "skip", "enospc", "corrupt")),
            Point("file.fsync", "os.fsync, os.fdatasync", (*_ANY, "skip", "enospc")),
        )
    }
)


def armed(faults: Iterable[Fault], *, rank: int, seed: int = 0) -> contextlib.AbstractContextManager[Armed]:
    """Put `faults` in force in this process for the body; everything patched is put back, also when it raises.

    `rank`: who this process is (-1: the pytest process). `seed`: decides where `p` strikes. The body gets an `Armed`
    that counts reaches and firings. With no fault that strikes in `rank`, nothing is patched.
    """
    from .strikes import arming

    return arming(tuple(fault for fault in faults if fault.strikes(rank)), rank=rank, seed=seed)


def watch(points: Iterable[str] = tuple(POINTS)) -> tuple[Fault, ...]:
    """Faults that do nothing but be counted, one for each of `points`: arm them to learn what a run reaches."""
    return tuple(Fault(point, "watch", text=f"{point}=watch", origin="the proof's clean run") for point in points)


def check_ranks(faults: Iterable[Fault], size: int) -> None:
    """Raise FaultError where a fault names a rank that a world of `size` does not have."""
    for fault in faults:
        absent = [rank for rank in fault.ranks or () if rank >= size]
        if absent:
            raise FaultError(
                f"{fault.origin}: fault {fault.text!r} names rank {absent[0]}, "
                f"but this world has {size} ranks (0 to {size - 1})"
            )


def faults_table() -> list[str]:
    """The lines of `--sglmem-faults`: every point with where it strikes and what it takes, then every action."""
    wide = max(map(len, POINTS)) + 2
    lines = ["point[@rank=R,nth=N,every=K,p=0.1]=action[(argument)]", "", "points:"]
    for point in POINTS.values():
        lines.append(f"  {point.name:<{wide}}{point.place}")
        lines.append(f"  {'':<{wide}}  takes: {' '.join(point.actions)}")
    lines += ["", "actions:"]
    lines += [f"  {action.name + action.argument:<{wide}}{action.does}" for action in ACTIONS.values()]
    return [
        *lines,
        "",
        "options: rank=R (a number, 0+2 for several, pytest for the pytest process), nth=N (that reach only),",
        "         every=K (each K-th reach), p=0.1 (the chance of a reach, decided by --sglmem-seed)",
    ]


def parse(text: str, *, origin: str) -> Fault:
    """The fault that `text` means. Raises FaultError, which names `origin` (command line, ini, marker at file:line)."""
    try:
        return _parse(text, origin)
    except FaultError as error:
        raise FaultError(f"{origin}: fault {text!r}: {error}") from None


def _parse(text: str, origin: str) -> Fault:
    compact = re.sub(r"\s+", "", text) if isinstance(text, str) else ""
    head, bracket, tail = compact.partition("(")
    where, equals, action = head.rpartition("=")
    if not (equals and where and action) or (bracket and not tail.endswith(")")):
        raise FaultError("is not of the form point[@rank=R,nth=N,every=K,p=0.1]=action[(argument)]")
    point, at, options = where.partition("@")
    _known("point", point, POINTS)
    _known("action", action, ACTIONS)
    takes = POINTS[point].actions
    if action not in takes:
        raise FaultError(f"{point} takes no {action!r}; it takes {', '.join(takes)}{_points_with(action)}")
    argument = _argument(ACTIONS[action], tail[:-1] if bracket else None)
    chosen = _options(options) if at else {}
    if chosen.get("ranks") == (PYTEST_RANK,) and action in ("kill", "exit", "hang"):
        raise FaultError(f"{action!r} would end the pytest process itself; it strikes ranks only")
    return Fault(point, action, argument, text=compact, origin=origin, **chosen)  # type: ignore[arg-type]


def _points_with(action: str) -> str:
    names = [point.name for point in POINTS.values() if action in point.actions]
    return f" ({action!r} goes with {', '.join(names)})"


def _known(what: str, name: str, table: Iterable[str]) -> None:
    names = list(table)
    if name in names:
        return
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5) or [
        known for known in names if name and name in known
    ]
    meant = f"did you mean {' or '.join(near)}?" if near else f"{what}s are {', '.join(names)}"
    raise FaultError(f"unknown {what} {name!r}; {meant}")


def _options(text: str) -> dict[str, object]:
    chosen: dict[str, object] = {}
    for option in text.split(","):
        name, _, value = option.partition("=")
        _known("option", name, _OPTIONS)
        field, read = _OPTIONS[name]
        if field in chosen:
            raise FaultError(f"{name!r} is given twice")
        chosen[field] = read(name, value)
    if "nth" in chosen and ("every" in chosen or "p" in chosen):
        raise FaultError("'nth' already says which reach; it cannot be combined with 'every' or 'p'")
    return chosen


def _count(name: str, value: str) -> int:
    if not re.fullmatch(r"[0-9]+", value) or int(value) < 1:
        raise FaultError(f"{name} must be a whole number from 1 (got {value!r})")
    return int(value)


def _rank(value: str) -> int:
    if value == "pytest":
        return PYTEST_RANK
    if not re.fullmatch(r"[0-9]+", value):
        raise FaultError(f"rank must be a number from 0, several joined by '+', or 'pytest' (got {value!r})")
    return int(value)


def _ranks(name: str, value: str) -> tuple[int, ...]:
    return tuple(sorted({_rank(one) for one in value.split("+")}))


def _chance(name: str, value: str) -> float:
    chance = _number(value)
    if chance is None or not 0 < chance <= 1:
        raise FaultError(f"{name} must be above 0 and at most 1 (got {value!r})")
    return chance


_OPTIONS: Mapping[str, tuple[str, Callable[[str, str], object]]] = MappingProxyType(
    {"rank": ("ranks", _ranks), "nth": ("nth", _count), "every": ("every", _count), "p": ("p", _chance)}
)


def _number(value: str) -> float | None:
    return float(value) if re.fullmatch(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)", value) else None


def _argument(action: Action, value: str | None) -> int | float | str | None:
    if not value:
        if action.argument.startswith("("):
            raise FaultError(f"{action.name} needs an argument: {action.name}{action.argument}")
        return 1 if action.name == "exit" else None
    if not action.argument:
        raise FaultError(f"{action.name} takes no argument (got {value!r})")
    return _READERS[action.name](value)


def _exception(value: str) -> str:
    if value in _KNOWN_EXCEPTIONS:
        return _KNOWN_EXCEPTIONS[value]
    if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", value):
        return value
    named = getattr(builtins, value, None)
    if isinstance(named, type) and issubclass(named, BaseException):
        return f"builtins.{value}"
    names = [
        name for name, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, BaseException)
    ]
    near = difflib.get_close_matches(value, [*names, *_KNOWN_EXCEPTIONS], n=3)
    hint = f"; did you mean {' or '.join(near)}?" if near else "; name it with its module, as in package.module.Error"
    raise FaultError(f"raise knows no exception {value!r}{hint}")


def _bytes(value: str) -> int:
    match = re.fullmatch(r"([0-9]+)(?:([KMG]?)(?:iB)?)", value, flags=re.IGNORECASE)
    if match is None or int(match[1]) < 1:
        raise FaultError(f"retain takes a number of bytes, as in 4096 or 1MiB (got {value!r})")
    return int(match[1]) * _UNITS[(match[2] or "").lower()]


def _code(value: str) -> int:
    if not re.fullmatch(r"[0-9]+", value) or int(value) > 255:
        raise FaultError(f"exit takes a code from 0 to 255 (got {value!r})")
    return int(value)


def _milliseconds(value: str) -> float:
    number = _number(value)
    if number is None or number < 0:
        raise FaultError(f"delay takes milliseconds, 0 or more (got {value!r})")
    return number


def _seconds(value: str) -> float:
    number = _number(value)
    if not number:
        raise FaultError(f"jump takes seconds, forwards or backwards, not 0 (got {value!r})")
    return number


_READERS: Mapping[str, Callable[[str], int | float | str]] = MappingProxyType(
    {"raise": _exception, "retain": _bytes, "exit": _code, "delay": _milliseconds, "jump": _seconds}
)

"""The `live_bytes` fixture: judge a trace, fail where it leaks, warn where it only comes back with help.

The rule is `judge.py`'s and the words are `words.py`'s; this file decides what becomes of a verdict: an exception, a
warning, an entry in the report, files in the artifacts folder. It also knows the traces that nobody looks at.
"""

from __future__ import annotations

import gc
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields
from pathlib import Path

from .digests import digest
from .judge import CyclicMemoryWarning, LateReleaseWarning, LeakError, UnjudgedTraceWarning, judge
from .records import Trace, Verdict
from .sites import user_line
from .words import verdict_line


class OutputsDiffer(AssertionError):
    """Two traces of the same geometries returned different bytes; the text says in which rank, cycle and step first."""


class Unseen:
    """The traces of a test that nobody has looked at yet. To look is to judge one, or to read or save what it holds."""

    def __init__(self) -> None:
        self._traces: dict[int, tuple[str, int, weakref.ref[_Watched]]] = {}  # by number: where it was made, and it
        self._count = 0

    def watch(self, trace: Trace) -> Trace:
        """The same trace, which counts as not looked at until somebody reads its ranks. Called where it is made."""
        number, self._count = self._count, self._count + 1
        watched = _Watched.of(trace, lambda: self._traces.pop(number, None))
        self._traces[number] = (*user_line(1), weakref.ref(watched))
        return watched

    def warn(self, own: Collection[object] = ()) -> None:
        """An `UnjudgedTraceWarning` at the line of each trace that nobody has looked at, nor can any more.

        Who keeps one may look at it later, say a test after this one; `own`: what keeps but will not look.
        """
        if any(_kept(trace, own) for _, _, trace in self._traces.values()):
            gc.collect()  # an exception that the test caught may keep its frames, until somebody collects
        for file, line, trace in list(self._traces.values()):
            if _kept(trace, own):
                continue
            told = UnjudgedTraceWarning(
                f"nobody looked at this trace, so the test passes whatever leaks in it: made at {_from_here(file)}:"
                f"{line}; live_bytes.assert_flat(world.trace(...)) judges it"
            )
            warnings.warn_explicit(told, None, file or "<unknown>", line)  # type: ignore[call-overload]
        self._traces.clear()


def _kept(trace: weakref.ref[_Watched], own: Collection[object]) -> bool:
    """Whether somebody beside `own` holds the trace."""
    one, nobody = trace(), object()
    return sys.getrefcount(one) - sys.getrefcount(nobody) > sum(it is one for it in own) if one is not None else False


def _from_here(file: str) -> str:
    here = os.path.join(os.getcwd(), "")
    return file.removeprefix(here)


class _Watched(Trace):
    """A trace that tells when its ranks are read. To everybody else it is a plain `Trace`, a copy included."""

    __slots__ = ("__weakref__", "_tell")

    @classmethod
    def of(cls, trace: Trace, tell: Callable[[], object]) -> _Watched:
        made = cls(*[getattr(trace, one.name) for one in fields(Trace)])
        object.__setattr__(made, "_tell", tell)
        return made

    def __getattribute__(self, name: str) -> object:
        if name == "ranks":
            object.__getattribute__(self, "_tell")()
        return Trace if name == "__class__" else object.__getattribute__(self, name)

    def __reduce__(self) -> tuple[type[Trace], tuple[object, ...]]:
        return Trace, tuple(getattr(self, one.name) for one in fields(Trace))


class LiveBytes:
    """What `live_bytes` gives a test. `record` learns of every verdict once, however often its trace is judged."""

    def __init__(
        self,
        record: Callable[[Trace, Verdict], None],
        *,
        ignore_sites: Sequence[str] = (),
        artifacts: Path | None = None,
    ) -> None:
        self.compared = False  # whether anybody asked for equal outputs
        self._record = record
        self._ignore_sites = tuple(ignore_sites)
        self._artifacts = artifacts

    def judge(self, trace: Trace, *, tolerance: int = 0) -> Verdict:
        """The verdict on `trace`, whatever it is. `tolerance`: bytes a cycle and rank that may stay."""
        if not isinstance(trace, Trace):
            raise TypeError(f"live_bytes judges a Trace (what world.trace returns), not {trace!r}")
        verdict = judge(trace, tolerance=tolerance, ignore_sites=self._ignore_sites)
        self._record(trace, verdict)
        return verdict

    def assert_flat(self, trace: Trace, *, tolerance: int = 0) -> Verdict:
        """Fail where live bytes stay behind, cycle after cycle.

        `tolerance`: bytes a cycle and rank that may stay; exactly as many pass, one more fails. Raises LeakError, whose
        `.verdict` has everything that the message says. Memory that comes back only through the cyclic collector is a
        CyclicMemoryWarning, only through somebody's `ipc_collect` a LateReleaseWarning. Raises ValueError where the
        trace has fewer than two judged cycles: nothing could be seen to stay.
        """
        __tracebackhide__ = True
        if isinstance(trace, Trace) and trace.cycles < 2:
            raise ValueError(
                f"what stays shows between two cycles, and this trace has cycles={trace.cycles}; try (3, 12)"
            )
        verdict = self.judge(trace, tolerance=tolerance)
        if verdict.verdict == "leak":
            self._keep(trace)
            raise LeakError(verdict)
        if any(verdict.cyclic_bytes):
            warnings.warn(CyclicMemoryWarning(verdict_line(verdict)), stacklevel=2)
        if any(verdict.late_bytes):
            warnings.warn(LateReleaseWarning(verdict_line(verdict)), stacklevel=2)
        return verdict

    def assert_same_outputs(self, a: Trace, b: Trace) -> None:
        """Fail where a step of `a` and the same step of `b` returned different bytes in the same rank.

        Compares digests over the cycles that both have. Raises OutputsDiffer at the first difference, ValueError where
        the two cannot be compared (other geometries, other worlds, a step that returns nothing to compare).
        """
        __tracebackhide__ = True
        self.compared = True
        if a.geometries != b.geometries:
            raise ValueError(f"the traces ran over different geometries: {a.geometries!r} and {b.geometries!r}")
        if a.size != b.size:
            raise ValueError(f"the traces come from worlds of {a.size} and {b.size} ranks")
        if all(one == digest(None) for trace in (a, b) for rank in trace.ranks for one in rank.digests):
            raise ValueError("no step of either trace returned anything: let the steps return what is to be compared")
        for left, right in zip(a.ranks, b.ranks, strict=True):
            for step, (one, other) in enumerate(zip(left.digests, right.digests, strict=False)):
                if one != other:
                    cycle, at = divmod(step, len(a.geometries))
                    raise OutputsDiffer(
                        f"rank {left.rank}: outputs differ first in cycle {cycle}, step {at} ({a.geometries[at]}): "
                        f"digest {one} and {other}"
                    )

    def _keep(self, trace: Trace) -> None:
        if self._artifacts is None:
            return
        try:
            self._artifacts.mkdir(parents=True, exist_ok=True)
            taken = len(list(self._artifacts.glob("trace*.json")))
            trace.save(self._artifacts / (f"trace-{taken}.json" if taken else "trace.json"))
        except OSError as error:  # the leak must be said all the same, also where warnings are errors
            print(f"sglmem: the trace could not be kept in {self._artifacts}: {error}", file=sys.stderr)

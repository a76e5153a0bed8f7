"""What a proof is, without running one: which faults to try in a test, what its failure means, and the table.

Everything here is plain data and pure functions; `prove.py` runs the tests. A `Run` is one test under one fault (or
under none: the healing run). Its result, by examples: the fault `ipc.open=retain` and a `LeakError`: caught. The same
and an `IndexError`: error, an unrelated crash proves nothing. The same and only the time limit: timeout. The fault
fired and the test passed: survived; it never fired: not triggered. A memory test that passes under the forced leak is
blind. A fault is caught when one test caught it, the forced leak when every memory test did; it survived when it fired
somewhere and no test noticed. Who fails without a fault too has caught none: a test is run again clean before its
faults and after them, and what it says counts only where it passes both times.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType

from .faults import Fault, parse

FORCED = MappingProxyType({"live_bytes": "step=retain", "gc_tracked": "step@rank=pytest=keep-live"})
AGAIN = "(no fault: again)"
HEALED = "(no fault: healed)"
CLEAN = frozenset({AGAIN, HEALED})
CANNOT = "cannot be run again"
BROKEN = frozenset({"not healed", CANNOT})  # of a test that fails without a fault, too
# A fault has the first of these that any of its runs has.
RESULTS = ("blind", "caught", "survived", "timeout", "error", "exempt", "not triggered")
LETTERS = MappingProxyType(
    {
        "caught": ".",
        "survived": "s",
        "blind": "B",
        "timeout": "T",
        "error": "E",
        "exempt": "x",
        "not triggered": "-",
        "healed": "+",
        "not healed": "!",
        CANNOT: "!",
    }
)
_LOST = frozenset({"leak", "growth", "contract", "outputs", "assertion"})
_GONE = frozenset({"injected", "assertion"})
# What a failure must say, for an action, to count as having noticed it.
_NOTICES: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        **dict.fromkeys(("retain", "one-handle", "duplicate", "skip", "keep-live", "jump", "delay"), _LOST),
        **dict.fromkeys(("raise", "oom", "enospc"), _GONE),
        **dict.fromkeys(("kill", "exit"), frozenset({"died", "assertion"})),
        "hang": frozenset({"silent", "assertion"}),
        "corrupt": frozenset({"outputs", "assertion"}),
    }
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A fault worth trying where its point was reached at least `least` times, in a world of at least `size` ranks.

    `only`: the one device it shows on. `beside`: delays, in force with it, without which it would show by chance only.
    Faults that correct code may shrug off (a delay, a clock that jumps) are not among the candidates: surviving them
    says nothing about a test.
    """

    point: str
    text: str
    least: int = 1
    only: str = ""
    size: int = 0
    beside: tuple[str, ...] = ()


# A barrier left out changes nothing as long as the ranks happen to come together. So one rank comes late wherever
# others may count on it: with what it does in a step, with what it opens, and with what it closes.
RANK_0_LATE = tuple(f"{point}@rank=0=delay(10)" for point in ("step", "ipc.open", "ipc.release", "cuda.synchronize"))


CANDIDATES = (
    Candidate("ipc.export", "ipc.export=one-handle", least=2),
    Candidate("ipc.export", "ipc.export=duplicate"),
    Candidate("ipc.open", "ipc.open=retain"),
    Candidate("ipc.open", "ipc.open=duplicate"),
    Candidate("ipc.open", "ipc.open=corrupt"),
    Candidate("ipc.release", "ipc.release=duplicate"),
    Candidate("ipc.collect", "ipc.collect=skip"),
    Candidate("cuda.alloc", "cuda.alloc@every=3=retain", least=3),
    Candidate("cuda.alloc", "cuda.alloc@nth=1=oom"),
    Candidate("cuda.synchronize", "cuda.synchronize=skip", only="cuda"),
    Candidate("dist.barrier", "dist.barrier=skip", size=2, beside=RANK_0_LATE),
    Candidate("dist.collective", "dist.collective=corrupt"),
    Candidate("dist.collective", "dist.collective@rank={last},nth=1=kill"),
    Candidate("step", "step@rank={last},nth=2=kill", least=2),
    Candidate("gc.enable", "gc.enable=skip"),
    Candidate("pickle.dumps", "pickle.dumps=keep-live"),
    Candidate("pickle.dumps", "pickle.dumps@nth=1=raise(PicklingError)"),
    Candidate("file.write", "file.write@nth=1=enospc"),
    Candidate("file.fsync", "file.fsync=raise(OSError)"),
)


@dataclass(frozen=True, slots=True)
class Clean:
    """One test that passed without faults. `reached`: point -> reaches, of the busiest process.

    `forced`: the leaks it must catch because of the fixtures it uses; `size`: ranks of its world, 0 for none.
    """

    nodeid: str
    reached: Mapping[str, int]
    forced: tuple[str, ...] = ()
    size: int = 0
    device: str = ""
    seconds: float = 0.0
    exempt: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failure:
    """A test's failure as the proof sees it. `kinds`: leak, growth, contract, outputs, assertion, injected, died,
    silent, timeout, skipped or crash, several where several ranks differ; empty: it passed.
    """

    kinds: frozenset[str] = frozenset()
    text: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """One test under one fault, and what came of it. `why`: one line."""

    nodeid: str
    fault: str
    result: str
    fired: int = 0
    why: str = ""


def plan(clean: Clean) -> list[Fault]:
    """The faults to try in a test: the forced leaks first, then each candidate that can fire in it."""
    texts = list(clean.forced)
    for candidate in CANDIDATES:
        ranked = "rank=" in candidate.text or candidate.text.endswith("=kill")
        least = max(candidate.size, int(ranked))
        possible = clean.reached.get(candidate.point, 0) >= candidate.least and clean.size >= least
        if possible and candidate.only in ("", clean.device):
            texts.append(candidate.text.format(last=clean.size - 1))
    return [parse(text, origin="the proof") for text in texts]


def beside(fault: str) -> tuple[Fault, ...]:
    """The delays that are in force with this fault of the proof, so that it shows for certain."""
    texts = next((candidate.beside for candidate in CANDIDATES if candidate.text == fault), ())
    return tuple(parse(text, origin="the proof") for text in texts)


def tried(key: str) -> list[str]:
    """The faults of the proof that `key` may mean: a point, a `point=action` or a whole fault, of any last rank."""
    texts = dict.fromkeys([*FORCED.values(), *(candidate.text for candidate in CANDIDATES)])
    return [text.format(last="LAST") for text in texts if _means(key, text)]


def _means(key: str, text: str) -> bool:
    fault = parse(text.format(last=0), origin="the proof")
    whole = re.escape(text).replace(re.escape("{last}"), "[0-9]+")
    return key in (fault.point, f"{fault.point}={fault.action}") or re.fullmatch(whole, key) is not None


def exemption(clean: Clean, fault: Fault) -> str | None:
    """The reason by which the test need not notice `fault`; None where it must."""
    plain = f"{fault.point}={fault.action}"
    return next((clean.exempt[key] for key in (fault.text, plain, fault.point, "") if key in clean.exempt), None)


def judge_run(fault: Fault, fired: int, failure: Failure, *, forced: bool = False) -> tuple[str, str]:
    """The result of one run and one line that says why.

    `fired`: how often the fault fired, in all processes, as far as they lived to tell; a failure that carries the
    fault's own words is evidence too.
    """
    notices = failure.kinds & _NOTICES[fault.action]
    evident = f"injected by {fault.text}" in failure.text or f"injected {fault.text}" in failure.text
    if not failure.kinds:
        if forced:
            return "blind", "passes while every step loses memory" if fired else "traces and appends nothing"
        return ("survived", f"fired {fired} times, passed") if fired else ("not triggered", "")
    if fired and failure.kinds == {"skipped"}:
        return "survived", f"fired {fired} times, and the test {_first_line(failure.text)}"
    if not (fired or evident or notices & {"died", "silent"}):
        return "error", f"failed although the fault never fired: {_first_line(failure.text)}"
    if notices:
        return "caught", ", ".join(sorted(notices))
    if failure.kinds <= {"timeout", "silent"}:
        return "timeout", _first_line(failure.text)
    return "error", _first_line(failure.text)


def failure_of(error: BaseException) -> Failure:
    """What kind of failure an exception is; a test that skips itself, or says xfail, is none that a CI would show.

    Known by name: this file imports none of the modules that raise.
    """
    inner = getattr(error, "exceptions", None)
    if isinstance(inner, tuple):
        parts = [failure_of(one) for one in inner]
        return Failure(frozenset().union(*(part.kinds for part in parts)), "\n".join(part.text for part in parts))
    text = f"{type(error).__name__}: {error}"
    kind = _kind({base.__name__ for base in type(error).__mro__}, error, text)
    kinds = {kind, "injected"} if "injected by " in text and kind != "skipped" else {kind}
    return Failure(frozenset(kinds), text)


_BY_NAME = MappingProxyType(
    {
        "LeakError": "leak",
        "LateReleaseWarning": "leak",
        "CyclicMemoryWarning": "leak",
        "GrowthError": "growth",
        "IpcContractWarning": "contract",
        "OutputsDiffer": "outputs",
        "RankDied": "died",
        "RankSilent": "silent",
        "AssertionError": "assertion",
        "Skipped": "skipped",
        "XFailed": "skipped",
    }
)


def _kind(bases: set[str], error: BaseException, text: str) -> str:
    for name, kind in _BY_NAME.items():
        if name in bases:
            return kind
    if "RankRaised" in bases:
        remote = str(getattr(error, "type", "")).rpartition(".")[2]
        return _BY_NAME.get(remote, "crash")
    if "Failed" in bases:  # pytest.fail: the test's own word, the IPC audit's, or pytest-timeout's
        if "CUDA IPC contract broken" in text:
            return "contract"
        return "timeout" if text.startswith("Failed: Timeout") else "assertion"
    return "crash"


def _first_line(text: str) -> str:
    line = next((line for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= 160 else line[:159] + "…"


def fold(runs: Sequence[Run], *, left_out: int = 0) -> dict[str, object]:
    """The report's `proof`. The score is caught faults out of those that fired and are not exempt; None: none fired."""
    by_fault: dict[str, list[Run]] = {}
    for run in trusted(runs):
        if run.fault not in CLEAN:
            by_fault.setdefault(run.fault, []).append(run)
    faults = [_folded(fault, its) for fault, its in by_fault.items()]
    verdicts = [fault["verdict"] for fault in faults]
    counted = [verdict for verdict in verdicts if verdict not in ("exempt", "not triggered")]
    return {
        "score": round(counted.count("caught") / len(counted), 4) if counted else None,
        "faults": faults,
        "blind": [run.nodeid for run in runs if run.result == "blind"],
        "not_healed": [run.nodeid for run in runs if run.result in BROKEN],
        "runs": len(runs),
        "left_out": left_out,
    }


def _folded(fault: str, runs: Sequence[Run]) -> dict[str, object]:
    results = {run.result for run in runs}
    return {
        "fault": fault,
        "fired_in": [run.nodeid for run in runs if run.fired or run.result == "caught"],
        "caught_by": [run.nodeid for run in runs if run.result == "caught"],
        "verdict": next(word for word in RESULTS if word in results),
    }


def trusted(runs: Iterable[Run]) -> list[Run]:
    """The runs, but that a test which fails without a fault too has caught none."""
    runs = list(runs)
    broken = _broken(runs)
    said = "the test fails without the fault too"
    return [
        replace(run, result="error", why=said) if run.result == "caught" and run.nodeid in broken else run
        for run in runs
    ]


def _broken(runs: Iterable[Run]) -> set[str]:
    return {run.nodeid for run in runs if run.result in BROKEN}


def unproven(runs: Iterable[Run]) -> list[Run]:
    """The runs that make the session fail: faults that no test noticed, blind tests, tests that did not heal."""
    runs = trusted(runs)
    caught = {run.fault for run in runs if run.result == "caught"}
    survived = [run for run in runs if run.result == "survived" and run.fault not in caught]
    return [*survived, *(run for run in runs if run.result in {"blind", *BROKEN})]


def repeat_command(runs: Sequence[Run], options: Sequence[str] = ()) -> str:
    """The one line that repeats these runs, all under one fault."""
    fault = runs[0].fault
    texts = [] if fault in CLEAN else [fault, *(one.text for one in beside(fault))]
    injected = [word for text in texts for word in ("--sglmem-inject", text)] or ["--sglmem-prove"]
    return shlex.join(["pytest", *dict.fromkeys(run.nodeid for run in runs), *injected, *options])


def table(runs: Sequence[Run], *, left_out: int = 0, options: Sequence[str] = ()) -> list[str]:
    """The proof in the terminal: a line a fault, then each hole with the command that repeats it."""
    proof = fold(runs, left_out=left_out)
    faults: list[dict[str, object]] = proof["faults"]  # type: ignore[assignment]
    wide = max((len(str(fault["fault"])) for fault in faults), default=5)
    lines = [f"{'fault':<{wide}}  {'fired in':>8}  {'caught by':>9}  verdict"] if faults else ["no fault could fire"]
    for fault in faults:
        fired, caught = fault["fired_in"], fault["caught_by"]
        assert isinstance(fired, list)
        assert isinstance(caught, list)
        named = proof["blind"] if fault["verdict"] == "blind" else caught if fault["verdict"] == "caught" else []
        assert isinstance(named, list)
        by = f": {_short(named[0])}" + (f" and {len(named) - 1} more" if named[1:] else "") if named else ""
        lines.append(f"{fault['fault']:<{wide}}  {len(fired):>8}  {len(caught):>9}  {fault['verdict']}{by}")
    for group in _holes(runs):
        first, where = group[0], ", ".join(_short(run.nodeid) for run in group)
        lines += ["", f"{first.result.upper()}: {first.fault} in {where}: {first.why}"]
        lines.append(f"  {repeat_command(group, options)}")
    lines += [f"exempt: {run.fault} in {run.nodeid}: {run.why}" for run in runs if run.result == "exempt"]
    if left_out:
        lines += ["", f"{left_out} runs left out by the limit or an interruption; the same command goes on from here"]
    return lines


def _holes(runs: Sequence[Run]) -> list[list[Run]]:
    """What is wrong, and what proves nothing: grouped by result and fault, the gravest first."""
    caught = {run.fault for run in trusted(runs) if run.result == "caught"}
    broken = _broken(runs)
    unclear = [
        run
        for run in runs
        if run.result in ("timeout", "error") and run.fault not in caught and run.nodeid not in broken
    ]
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in [*unproven(runs), *unclear]:
        groups.setdefault((run.result, run.fault), []).append(run)
    return list(groups.values())


def _short(nodeid: str) -> str:
    """The test's own name; what stands in its brackets may be anything."""
    where, bracket, parameters = nodeid.partition("[")
    return where.rpartition("::")[2] + bracket + parameters


def to_plain(run: Run) -> dict[str, object]:
    """The run as JSON-able data."""
    return asdict(run)

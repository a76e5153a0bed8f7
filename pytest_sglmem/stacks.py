"""Where ranks are: faulthandler's dumps read into frames, collectives compared, and the words for a silent world.

The dumps come from a signal handler in C, so a rank that holds the interpreter lock in native code has one too. All of
it is read from files and judged in pytest's process; nothing is asked of the ranks.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .launch import RankProcess
from .rank import STACKS_SIGNAL, Collective, read_notes
from .sites import format_frames
from .words import ranks as ranks_text

Frame = tuple[str, int, str]
_FAR_SIDE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "rank.py")
_TRACING = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tracing.py")
_EMULATED = os.path.join(os.path.dirname(os.path.abspath(__file__)), "emulated") + os.sep  # C++ on a real device
_DISTRIBUTED = f"{os.sep}torch{os.sep}distributed{os.sep}"
_ASYNCIO = f"{os.sep}asyncio{os.sep}"
_WRAPPERS = frozenset(("wrapper", "inner", "noted", "gated", "carry_out", "_fn", "decorate_context"))
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
_PROGRAM = '  File "<string>", line 1'
SETTLE = 0.005  # seconds without a new byte after which a dump is taken as whole: its lines are microseconds apart
FLIGHT_LIMIT = 5.0  # seconds for NCCL's flight recorder: its thread looks at the pipe once a second


@dataclass(frozen=True)
class Where:
    """Where one rank is: the frames of the thread that runs the call, innermost first.

    `collective`: the function of torch.distributed it waits in, empty where it is elsewhere.
    """

    frames: tuple[Frame, ...]
    text: str = ""
    threads: int = 0

    @property
    def collective(self) -> str:
        """The function of torch.distributed that the user's line called and that has not come back."""
        found = ""
        for file, _, name in self.frames:
            if _DISTRIBUTED in file:
                found = found if name in _WRAPPERS or name.startswith("<") else name
            elif name not in _WRAPPERS and not file.startswith(_EMULATED):
                break
        return found

    @property
    def lines(self) -> tuple[str, ...]:
        """The user's lines, innermost first, as "file.py:41 in share"."""
        return tuple(format_frames(self.frames))

    @property
    def place(self) -> str:
        """In a word: "wanders_off (file.py:41)"."""
        if not self.lines:
            return self._of_nobody()
        place, _, name = self.lines[0].rpartition(" in ")
        return f"{name} ({place})"

    def _of_nobody(self) -> str:
        """The place where no line on the stack is the test's."""
        if any(file == _TRACING for file, _, _ in self.frames):
            return "a quiet point of the trace"
        if any(_ASYNCIO in file for file, _, _ in self.frames):
            return "an event loop that waits"
        if not self.frames:
            return "no Python code"
        file, _, name = self.frames[0]
        return "native code" if (file, name) == (_FAR_SIDE, "_run") else "the harness, answering"


class Look:
    """Ranks asked, all at once, for their stacks; the answers are read later, or at once (`look`)."""

    def __init__(self, processes: Mapping[int, RankProcess], ranks: Iterable[int]) -> None:
        self._processes = processes
        self._before = {rank: len(processes[rank].stacks()) for rank in ranks}
        for rank in self._before:
            processes[rank].signal(STACKS_SIGNAL)

    def read(
        self,
        ranks: Iterable[int] | None = None,
        *,
        limit: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> dict[int, Where]:
        """Where each is (only those of `ranks`). A stopped rank has no dump within `limit` seconds."""
        asked = [rank for rank in self._before if ranks is None or rank in set(ranks)]
        end = clock() + limit
        dumps: dict[int, str] = {}
        while True:
            last, dumps = dumps, {rank: self._processes[rank].stacks()[self._before[rank] :] for rank in asked}
            settled = dumps == last and all(dumps.values())
            if settled or all(map(_whole, dumps.values())) or clock() >= end:
                return {rank: where(dump) for rank, dump in dumps.items()}
            time.sleep(SETTLE)


def _whole(dump: str) -> bool:
    """Whether this dump has ended: the thread that runs the call is its last, and begins in the server's program."""
    return dump.endswith(f"{_PROGRAM} in <module>\n")


def look(processes: Mapping[int, RankProcess], ranks: Iterable[int]) -> dict[int, Where]:
    """Have these ranks write their stacks, all at once, and read them."""
    return Look(processes, ranks).read()


def where(dump: str) -> Where:
    """The thread that runs the call, out of one of faulthandler's dumps of all threads."""
    threads: list[list[Frame]] = []
    for line in dump.splitlines():
        if "(most recent call first)" in line:
            threads.append([])
        elif (match := _FRAME.match(line)) and threads:
            file, number, name = match.groups()
            threads[-1].append((file, int(number) if number.isdigit() else 0, name))
    for frames in threads:
        if any(file == _FAR_SIDE for file, _, _ in frames):
            first = next(index for index, (file, _, _) in enumerate(frames) if file == _FAR_SIDE and index)
            return Where(tuple(frames[:first]), dump, len(threads))
    return Where(tuple(threads[-1]) if threads else (), dump, len(threads))


def compare(ledgers: Mapping[int, bytes]) -> list[str]:
    """The first collective of each group in which ranks went into different ones, as text; empty where all agree.

    Other sizes of the same collective count only where a rank got no further: some may rightly differ.
    """
    found: dict[str, dict[int, dict[int, Collective]]] = {}
    for rank, data in ledgers.items():
        for note in read_notes(data):
            found.setdefault(note.group, {}).setdefault(note.number, {})[rank] = note
    return [text for group, numbers in found.items() if (text := _first_mismatch(group, numbers))]


def _first_mismatch(group: str, numbers: Mapping[int, Mapping[int, Collective]]) -> str:
    for number, notes in sorted(numbers.items()):
        names, kinds = {note.name for note in notes.values()}, {str(note) for note in notes.values()}
        further = numbers.get(number + 1, {})
        if len(names) > 1 or (len(kinds) > 1 and not further.keys() >= notes.keys()):
            ranks: dict[str, list[int]] = {}
            for rank, note in sorted(notes.items()):
                ranks.setdefault(str(note), []).append(rank)
            told = ", ".join(f"{kind} on {ranks_text(those)}" for kind, those in ranks.items())
            return f"mismatched collectives: number {number} of group {group!r} is {told}"
    return ""


def last(ledger: bytes) -> Collective | None:
    """The collective that a rank went into last."""
    notes = read_notes(ledger)
    return notes[-1] if notes else None


def waits(seen: Mapping[int, Where], answered: Iterable[int], ledgers: Mapping[int, bytes]) -> str:
    """ "ranks 0, 1, 3 wait in barrier (...); rank 2 is in wanders_off (...), never came"."""
    said: dict[str, list[int]] = {}
    front = _front(seen, ledgers)
    for rank, at in sorted(seen.items()):
        if at.collective:
            words = f"{{wait}} in {at.collective} ({at.lines[0] if at.lines else 'of the harness'})"
        else:
            words = f"{{is}} in {at.place}" + (", never came" if _behind(ledgers.get(rank, b""), front) else "")
        said.setdefault(words, []).append(rank)
    for rank in answered:
        if _behind(ledgers.get(rank, b""), front):
            said.setdefault("returned without it", []).append(rank)
    return "; ".join(
        f"{ranks_text(tuple(ranks))} "
        + words.format(wait="waits" if len(ranks) == 1 else "wait", **{"is": "is" if len(ranks) == 1 else "are"})
        for words, ranks in said.items()
    )


def _front(seen: Mapping[int, Where], ledgers: Mapping[int, bytes]) -> dict[str, int]:
    """For each group, how far the ranks that wait in a collective are."""
    front: dict[str, int] = {}
    for rank, at in seen.items():
        note = last(ledgers.get(rank, b"")) if at.collective else None
        if note is not None:
            front[note.group] = max(front.get(note.group, 0), note.number)
    return front


def _behind(ledger: bytes, front: Mapping[str, int]) -> bool:
    """Whether a rank has not yet gone into a collective in which others wait."""
    reached: dict[str, int] = {}
    for note in read_notes(ledger):
        reached[note.group] = note.number
    default = "0"  # every rank is in the default group, also before its first collective; in others only who used it
    return any(reached.get(group, 0 if group == default else number) < number for group, number in front.items())


def silent_message(head: str, seen: Mapping[int, Where], answered: Iterable[int], ledgers: Mapping[int, bytes]) -> str:
    """All that is to be said of ranks that gave no answer: `head`, where each is, where their collectives differ."""
    return "\n".join([head, waits(seen, answered, ledgers), *compare(ledgers), "", *stack_lines(seen)])


def hopeless(waiting: Iterable[int], answered: Iterable[int], ledgers: Mapping[int, bytes]) -> bool:
    """Whether, by their notes, a waiting rank is in a collective of all its group that cannot end: one that answered
    never joined it, or another waiting rank went into a different one instead.
    """
    fronts = [note for rank in waiting if (note := last(ledgers[rank])) is not None and needs_all(note)]
    missed = any(_behind(ledgers[rank], {note.group: note.number}) for note in fronts for rank in answered)
    names: dict[tuple[str, int], set[str]] = {}
    for note in fronts:
        names.setdefault((note.group, note.number), set()).add(note.name)
    return missed or any(len(differing) > 1 for differing in names.values())


def deadlocked(seen: Mapping[int, Where], answered: Iterable[int], ledgers: Mapping[int, bytes]) -> bool:
    """Whether it is proven that a rank waits for ever: `hopeless` by the notes of ranks that are in their collectives
    now, and of ranks that have returned and have no thread left that could still join.
    """
    idle = [rank for rank in answered if seen[rank].threads == 1]
    stuck = [rank for rank, at in seen.items() if at.collective and rank not in set(answered)]
    return hopeless(stuck, idle, ledgers)


def needs_all(note: Collective) -> bool:
    """Whether no rank comes out of it before all went in. A broadcast, say, may leave its source at once."""
    return note.name.startswith(("all_", "barrier", "reduce_scatter"))


def stack_lines(seen: Mapping[int, Where], limit: int = 12) -> list[str]:
    """The stacks of all ranks, equal ones once, the user's lines first."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank, at in sorted(seen.items()):
        inner = (f"(in {at.collective} of torch.distributed)",) if at.collective else ()
        groups.setdefault((*inner, *(at.lines or ("(no line of the test's)",))), []).append(rank)
    lines = []
    for stack, ranks in groups.items():
        lines.append(f"stack of {ranks_text(tuple(ranks))}, innermost first:")
        lines += [f"    {line}" for line in stack[:limit]]
    return lines


def keep(folder: Path, seen: Mapping[int, Where], processes: Mapping[int, RankProcess]) -> None:
    """Leave the whole dumps, all threads, in the artifacts, and NCCL's flight recorder's where it runs. A folder that
    cannot be written to is no failure.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for rank, at in seen.items():
            (folder / f"stacks-rank-{rank}.txt").write_text(at.text)
    except OSError:
        return
    dumps = [folder / f"nccl-flight-rank-{rank}" for rank, process in processes.items() if process.record_flight()]
    end = time.monotonic() + FLIGHT_LIMIT
    while time.monotonic() < end and not all(dump.exists() and dump.stat().st_size for dump in dumps):
        time.sleep(SETTLE)

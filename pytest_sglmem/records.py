"""What crosses a process, and nothing else: frozen records of plain numbers and text.

Ranks send them, the parent judges them, the report prints them. A record never holds a tensor, an exception or a
frame (a held exception is held memory), so an error crosses as text. Every record is JSON-able: `to_json` and
`from_json` are the one way to and from a file, and a field's name here is its name in the report (`schema: 1`).

It imports neither torch nor pytest. Units: bytes are bytes, times are seconds, cycles and steps count from 0.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

VerdictWord = Literal["flat", "filling", "cyclic", "late", "leak"]
Mechanism = Literal[
    "retained",
    "ipc-over-released",
    "ipc-never-opened",
    "ipc-held-by-peer",
    "ipc-dead-peer",
    "outside-torch",
    "unknown",
]
FaultKind = Literal["over-released", "never-opened", "still-open", "freed-while-open", "dead-peer"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Reading:
    """Bytes of one rank's device at one quiet point.

    `live`: what torch's allocator has handed out (rounded to 512, `memory_allocated()`); `blocks`: in how many
    blocks; `reserved`: what it holds from the driver, live or not; `outside`: device bytes of this process that
    are not torch's (contexts, NCCL, raw cudaMalloc), None where nothing can tell.
    """

    live: int
    blocks: int = 0
    reserved: int = 0
    outside: int | None = None


@dataclass(frozen=True, slots=True)
class LiveBlocks:
    """The live blocks that one stack allocated in one cycle, added up.

    `stack`: "file.py:41 in share", the user's line first, then its callers; empty where nobody recorded it.
    `born`: the cycle of the allocation; -1 for what was there before the first cycle.
    """

    stack: tuple[str, ...]
    born: int
    bytes: int
    blocks: int

    @property
    def site(self) -> str:
        """The line that allocated: the first of the stack."""
        return self.stack[0] if self.stack else "unknown"


@dataclass(frozen=True, slots=True)
class CycleEnd:
    """The three readings at the end of a cycle, and the census after the last of them.

    `as_is`: nobody helped; `after_ipc`: after `ipc_collect` on every rank; `after_gc`: after `gc.collect()` (and one
    more
    `ipc_collect`) on every rank. What is still there in `after_gc` is settled.
    """

    as_is: Reading
    after_ipc: Reading
    after_gc: Reading
    census: tuple[LiveBlocks, ...] = ()


@dataclass(frozen=True, slots=True)
class Export:
    """One CUDA IPC handle that a rank gave out.

    `counter_file` and `slot` name the handle's counter, on the real device and the emulated one alike; `counter` is its
    value when the ledger was read (None: the file is gone, which it is when every count in it came back to zero);
    `dropped`: the exporter no longer holds the tensor; `freed`: its block went back to the allocator, when the counter
    was `freed_at`; `block`: the exporter's number for the block (-1: unknown), the same in all handles of one.
    """

    rank: int
    counter_file: str
    slot: int
    bytes: int
    stack: tuple[str, ...]
    step: int = -1
    counter: int | None = None
    dropped: bool = False
    freed: bool = False
    allocated: tuple[str, ...] = ()
    block: int = -1
    freed_at: int | None = None


@dataclass(frozen=True, slots=True)
class Open:
    """One open of a handle in a rank: `released` counts are what this open gave back so far (0: it still maps the
    block).
    """

    rank: int
    counter_file: str
    slot: int
    stack: tuple[str, ...]
    step: int = -1
    released: int = 0
    order: int = 0


@dataclass(frozen=True, slots=True)
class IpcFault:
    """One broken contract, folded over all handles exported and opened alike.

    `opens` and `counter` are those of one handle; `handles` how many handles broke it this way; `bytes` all their
    blocks';
    `by_ranks` who broke it: the ranks that opened too often, never, or still hold; `exporters` whose blocks they are.
    """

    kind: FaultKind
    site: str
    opens: int
    counter: int | None
    handles: int
    bytes: int
    by_ranks: tuple[int, ...]
    exporters: tuple[int, ...] = ()
    stack: tuple[str, ...] = ()
    open_sites: tuple[str, ...] = ()
    advice: str = ""


@dataclass(frozen=True, slots=True)
class IpcPair:
    """One rank's traffic with another: handles of `exporter` that `opener` opened `opens` times; `still_open` of these
    opens gave nothing back yet.
    """

    exporter: int
    opener: int
    opens: int
    still_open: int = 0


@dataclass(frozen=True, slots=True)
class IpcSummary:
    """What the ledgers of all ranks say together. `pairs`: who exported to whom, only pairs that met; `note`: what is
    no fault but should be known, such as exports that have become slow.
    """

    exports: int = 0
    opens: int = 0
    faults: tuple[IpcFault, ...] = ()
    pairs: tuple[IpcPair, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True)
class RankTrace:
    """What one rank saw while a step ran over all geometries, cycle by cycle, warm-up cycles included.

    `series`: live bytes after each step, as they were; `ends`: one a cycle; `digests`: one a step of what it returned;
    `held_by`: site -> chains of who keeps its blocks ("module.NAME -> .staging -> [key] -> Tensor"), read once, at
    the end; `seconds`: how long each step took, its synchronize included.
    """

    rank: int
    series: tuple[int, ...]
    ends: tuple[CycleEnd, ...]
    digests: tuple[str, ...] = ()
    exports: tuple[Export, ...] = ()
    opens: tuple[Open, ...] = ()
    held_by: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    seconds: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """One traced program: every rank's `RankTrace`, in rank order, and what they have in common.

    `geometries`: one short text for each step of a cycle; `warmup`: how many of the first cycles are not judged;
    `dead`: ranks that ended before the trace did.
    """

    ranks: tuple[RankTrace, ...]
    geometries: tuple[str, ...]
    warmup: int = 1
    device: str = ""
    backend: str | None = None
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    dead: tuple[int, ...] = ()

    def __repr__(self) -> str:
        """What was traced, without the numbers: those fill screens."""
        return f"<Trace: {self.size} ranks, {self.cycles} cycles, warm-up {self.warmup}, steps {self.geometries!r}>"

    @property
    def size(self) -> int:
        """Ranks of the world."""
        return len(self.ranks)

    @property
    def cycles(self) -> int:
        """Cycles that are judged: all but the warm-up."""
        return len(self.ranks[0].ends) - self.warmup

    def save(self, path: str | Path) -> None:
        """Write the trace as JSON; `load` reads it back equal, on any machine, torch or not."""
        Path(path).write_text(json.dumps(to_json(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read what `save` wrote. Raises ValueError where the file is no trace."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            if not isinstance(data, dict):
                raise ValueError("a JSON object is expected")
            return from_json(cls, data)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a trace that pytest-sglmem saved: {error}") from error


@dataclass(frozen=True, slots=True)
class SiteVerdict:
    """A line whose blocks grow, on which ranks, by how much a cycle, who holds them and by which mechanism they
    stay.
    """

    site: str
    stack: tuple[str, ...]
    bytes_per_cycle: int
    blocks_per_cycle: float
    ranks: tuple[int, ...]
    held_by: tuple[str, ...] = ()
    mechanism: Mechanism = "unknown"


@dataclass(frozen=True, slots=True)
class SlowStep:
    """The step that took longest of all ranks: `step` counts through the whole trace, warm-up included."""

    rank: int
    step: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is said of a trace. The fields are those of the report; `words.py` turns them into text.

    `bytes_per_cycle`, `settled`, `series`, `cyclic_bytes`, `late_bytes`, `outputs_digest`: one entry a rank, by its
    number; 0 or empty for a rank that was not traced (it was dead, or is of another group).
    """

    verdict: VerdictWord
    bytes_per_cycle: tuple[int, ...]
    settled: tuple[tuple[int, ...], ...]
    series: tuple[tuple[int, ...], ...]
    cyclic_bytes: tuple[int, ...]
    late_bytes: tuple[int, ...]
    tolerance: int
    cycles: int
    warmup: int
    outputs_digest: tuple[str, ...] = ()
    sites: tuple[SiteVerdict, ...] = ()
    ipc: IpcSummary = IpcSummary()
    geometries: tuple[str, ...] = ()
    outside_bytes: tuple[int | None, ...] = ()
    reserved_bytes: tuple[int, ...] = ()
    note: str = ""
    slowest: SlowStep | None = None


@dataclass(frozen=True, slots=True)
class Growth:
    """What appends left behind in the cyclic collector's care.

    `objects_per_append`: tracked objects that stay, an append, in the lesser of two windows; `by_type`: the same by
    type;
    `held_by`: chains from a root to what grows; `bytes_per_append`: shallow bytes that stay, tracked or not (None:
    not asked);
    `pause_ms`: a full collection before and after.
    """

    verdict: Literal["flat", "growing"]
    objects_per_append: float
    by_type: dict[str, float]
    held_by: tuple[str, ...] = ()
    pause_ms: dict[str, float] = dataclasses.field(default_factory=dict)
    times: int = 0
    windows: tuple[int, ...] = ()
    bytes_per_append: float | None = None
    per_append: float = 0
    note: str = ""


@dataclass(frozen=True, slots=True)
class RaisedText:
    """An exception as text: its type's qualified name, its message, the traceback as pytest would print it.

    `outcome`: whether it was an error, or one of pytest's own ways to end a test; `place`: "file.py:41 in share", where
    it was raised; `collective`: the collective it came out of, empty where it came from elsewhere (a peer that is gone
    shows in the others' collectives).
    """

    type: str
    message: str
    traceback: str
    outcome: Literal["raised", "failed", "skipped", "xfailed"] = "raised"
    place: str = ""
    collective: str = ""


@dataclass(frozen=True, slots=True)
class WarningText:
    """A warning that a rank recorded: the pickled category, the text, and where it was given."""

    category: bytes
    message: str
    filename: str
    lineno: int


@dataclass(frozen=True, slots=True)
class Answer:
    """One rank's answer to one call. `call` is the call's number: a late answer never answers the next question.

    Exactly one of `value` (pickled bytes of the result; the receipt that the body ran to its end) and `raised` is
    there.
    """

    call: int
    rank: int
    value: bytes | None = None
    raised: RaisedText | None = None
    warnings: tuple[WarningText, ...] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a rank's trace is: it has ended this step of this cycle with `live` bytes.

    `steps` a cycle, `warmup` cycles and then from the least to the most of `cycles`: what it was asked for, which the
    parent fills in.
    """

    call: int
    rank: int
    cycle: int
    step: int
    live: int
    steps: int = 0
    warmup: int = 0
    cycles: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Searching:
    """A rank's steps are over: it looks for who holds what leaks, at most `seconds`, which the call is not charged."""

    call: int
    rank: int
    seconds: float


def to_json(record: object) -> dict[str, object]:
    """The record as JSON-able dictionaries and lists, field names as they are."""
    return dataclasses.asdict(record)  # type: ignore[call-overload]


def from_json(kind: type[T], data: object) -> T:
    """The record of type `kind` that `to_json` turned into `data`. Unknown or missing fields raise ValueError."""
    import cattrs

    try:
        return cattrs.Converter(forbid_extra_keys=True).structure(data, kind)
    except Exception as error:
        raise ValueError("; ".join(cattrs.transform_error(error))) from error

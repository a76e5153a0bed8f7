"""The report file's shape as types: what `report.schema.json` says to a validator, this says to a type checker.

Field names are those of the records they come from (`records.py`), which are those of DESIGN.md. Only shapes: nothing
here reads, writes or judges. Units: bytes are bytes, `seconds` are seconds, `pause_ms` milliseconds; lists "a rank"
are in rank order.
"""

from __future__ import annotations

from typing import TypedDict

from . import records

ORDER = ("leak", "growing", "late", "cyclic", "filling", "flat")  # verdict words, worst first
ALARMS = ORDER[:4]
FAILING = ORDER[:2]  # these fail a test that asserts flat


class WorldShape(TypedDict):
    """The world a test ran in."""

    size: int
    device: str
    backend: str | None


class Site(TypedDict):
    """One line that allocated what grows."""

    site: str
    stack: list[str]
    bytes_per_cycle: int
    blocks_per_cycle: float
    ranks: list[int]
    held_by: list[str]
    mechanism: records.Mechanism


class IpcFault(TypedDict):
    """One broken IPC contract, folded over the handles that broke it alike."""

    kind: records.FaultKind
    site: str
    opens: int
    counter: int | None
    handles: int
    bytes: int
    by_ranks: list[int]
    exporters: list[int]
    stack: list[str]
    open_sites: list[str]
    advice: str


class IpcPair(TypedDict):
    """One rank's traffic with another."""

    exporter: int
    opener: int
    opens: int
    still_open: int


class Ipc(TypedDict):
    """The IPC ledger, added up."""

    exports: int
    opens: int
    faults: list[IpcFault]
    pairs: list[IpcPair]
    note: str


class SlowStep(TypedDict):
    """The step that took longest of all ranks."""

    rank: int
    step: int
    seconds: float


class LiveBytes(TypedDict):
    """One verdict on live bytes: a `records.Verdict`."""

    verdict: records.VerdictWord
    bytes_per_cycle: list[int]
    settled: list[list[int]]
    series: list[list[int]]
    cyclic_bytes: list[int]
    late_bytes: list[int]
    tolerance: int
    cycles: int
    warmup: int
    outputs_digest: list[str]
    sites: list[Site]
    ipc: Ipc
    geometries: list[str]
    outside_bytes: list[int | None]
    reserved_bytes: list[int]
    note: str
    slowest: SlowStep | None


class Gc(TypedDict):
    """One verdict on tracked objects: a `records.Growth`."""

    verdict: str
    objects_per_append: float
    by_type: dict[str, float]
    held_by: list[str]
    pause_ms: dict[str, float]
    times: int
    windows: list[int]
    bytes_per_append: float | None
    per_append: float
    note: str


class Fired(TypedDict):
    """How often a fault fired, rank by rank."""

    fault: str
    fired: list[int]


class Test(TypedDict):
    """One test and all it checked."""

    nodeid: str
    outcome: str
    seconds: float
    world: WorldShape | None
    live_bytes: list[LiveBytes]
    gc: list[Gc]
    faults: list[Fired]


class ProofFault(TypedDict):
    """One fault of the proof: where it fired, which tests failed for the leak's reason."""

    fault: str
    fired_in: list[str]
    caught_by: list[str]
    verdict: str


class Proof(TypedDict):
    """What the proof runs showed. `score`: caught faults out of those that fired; None where none did.

    `blind`: tests that pass while every step loses memory; `not_healed`: tests that fail when they run again without a
    fault, so that what they caught does not count; `left_out`: runs that were not made, of `runs` that were.
    """

    score: float | None
    faults: list[ProofFault]
    blind: list[str]
    not_healed: list[str]
    runs: int
    left_out: int


class Document(TypedDict):
    """The whole report, `schema: 1`."""

    schema: int
    versions: dict[str, str | None]
    machine: dict[str, str | int | float | bool | None]
    seed: int
    tests: list[Test]
    proof: Proof | None

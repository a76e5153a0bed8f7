"""The audit: who broke the contract of CUDA IPC, from the records of all ranks' ledgers. Pure.

One export pairs with one open and one release. A handle in order is never named; what is broken is named with the line
that exported, the lines that opened, the ranks, the counter, the bytes, and what to do.

It reads no device and no counter: the records carry the values of the moment they were read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from .contract import EVENTS
from .records import Export, FaultKind, IpcFault, IpcPair, IpcSummary, Open

_KINDS: tuple[FaultKind, ...] = ("over-released", "never-opened", "still-open", "freed-while-open", "dead-peer")
_ADVICE: Mapping[FaultKind, str] = {
    "over-released": (
        "Each open takes 1 off the handle's counter and torch frees the block only at exactly 0. Export the tensor "
        "once for each open (call reduce_tensor once a peer), or open the handle once and keep the mapping."
    ),
    "never-opened": (
        "Nobody opened this handle, so its counter stays at 1 and the block is kept for good once its tensor goes. "
        "Do not export (or pickle) a CUDA tensor that nobody will rebuild, or let the receiver rebuild it and drop it."
    ),
    "still-open": (
        "The exporter dropped the tensor while a peer still maps it; the block stays until the peer drops its view and "
        "the exporter collects. Drop the peer's views (and synchronize, then barrier) before the exporter's tensor."
    ),
    "freed-while-open": (
        "Memory corruption, not a leak: the first release took the counter to 0, so the block went back to the "
        "allocator while another peer could still read and write it. Export the tensor once for each peer."
    ),
    "dead-peer": (
        "A peer died with the handle open and nothing will release it for the dead. The block comes back once a live "
        "process rebuilds the same handle and drops it, or when the exporter ends."
    ),
}
_SLOW = "{who} {live:,} live exports: past {limit:,} torch synchronizes a stream at every further export."


def audit(exports: Iterable[Export], opens: Iterable[Open], dead: Iterable[int] = ()) -> tuple[IpcFault, ...]:
    """Who broke the contract, by the records of all ranks' ledgers, read when nothing was in flight. Pure.

    A handle whose exporter still holds the tensor is in order whether it was opened yet or not, until its counter goes
    below zero. `dead`: ranks that ended early, whose opens nobody recorded. Faults are folded over handles exported at
    one line with the same opens and counter, and ordered by kind, then by bytes, largest first.
    """
    exports, gone = tuple(exports), frozenset(dead)
    by_handle = _by_handle(opens)
    present = {export.rank for export in exports} | {one.rank for found in by_handle.values() for one in found} | gone
    siblings = _openers_by_block(exports, by_handle)
    slow = _slow_ranks(exports)
    folds: dict[tuple[FaultKind, str, int, int | None], _Fold] = {}
    for export in exports:
        found = by_handle.get((export.counter_file, export.slot), ())
        kind = broken(export, found, gone)
        if kind is None:
            continue
        opened, counter = _opens_and_counter(export, found)
        fold = folds.setdefault((kind, _site(export), opened, counter), _Fold())
        others = present - {export.rank} - siblings.get((export.rank, export.block), frozenset())
        fold.add(export, found, _breakers(kind, found, gone, others))
    faults = [fold.fault(*key, slow) for key, fold in folds.items()]
    return tuple(sorted(faults, key=lambda fault: (_KINDS.index(fault.kind), -fault.bytes, -fault.handles, fault.site)))


def broken(export: Export, opens: Sequence[Open], dead: frozenset[int] = frozenset()) -> FaultKind | None:
    """How the contract of one handle was broken; None where it was kept, or still may be.

    `opens`: those of this handle, in any rank. `dead`: ranks whose opens nobody recorded.
    """
    opened, counter = _opens_and_counter(export, opens)
    if export.freed or counter is None:
        # The block went when the counter was `freed_at`: one release more than that left 0, each further one less.
        freed_at = export.freed_at or 0
        if opened > 1 - freed_at:
            return "freed-while-open"
        return "over-released" if freed_at < 0 else None
    if counter < 0:
        return "over-released"
    if not export.dropped:
        return None
    open_still = [one for one in opens if not one.released]
    if counter == 0:
        return "still-open" if open_still else None
    if dead and (any(one.rank in dead for one in open_still) or not opens):
        return "dead-peer"
    if len(opens) > 1 and not open_still:
        return "over-released"  # two releases at once: the subtraction is not atomic, and one of them was lost
    return "still-open" if opens else "never-opened"


def summary(exports: Iterable[Export], opens: Iterable[Open], dead: Iterable[int] = ()) -> IpcSummary:
    """The audit with how much was watched, who exported to whom, and a note where exports have become slow."""
    exports, opens = tuple(exports), tuple(opens)
    return IpcSummary(
        exports=len(exports),
        opens=len(opens),
        faults=audit(exports, opens, dead=dead),
        pairs=_pairs(exports, opens),
        note=" ".join(_slow_ranks(exports).values()),
    )


class _Fold:
    """Handles that broke the contract in the same way at the same line."""

    def __init__(self) -> None:
        self.first: Export | None = None
        self.handles = 0
        self.blocks: dict[tuple[int, int], int] = {}
        self.exporters: set[int] = set()
        self.by_ranks: set[int] = set()
        self.open_sites: dict[str, None] = {}

    def add(self, export: Export, opens: Sequence[Open], by_ranks: Iterable[int]) -> None:
        self.first = self.first or export
        self.handles += 1
        # A record without a block's number stands for a block of its own.
        block = export.block if export.block >= 0 else -self.handles
        self.blocks[export.rank, block] = export.bytes
        self.exporters.add(export.rank)
        self.by_ranks.update(by_ranks)
        self.open_sites.update((one.stack[0], None) for one in opens if one.stack)

    def fault(self, kind: FaultKind, site: str, opens: int, counter: int | None, slow: Mapping[int, str]) -> IpcFault:
        assert self.first is not None
        notes = [slow[rank] for rank in sorted(self.exporters) if rank in slow]
        return IpcFault(
            kind=kind,
            site=site,
            opens=opens,
            counter=counter,
            handles=self.handles,
            bytes=sum(self.blocks.values()),
            by_ranks=tuple(sorted(self.by_ranks)),
            exporters=tuple(sorted(self.exporters)),
            stack=self.first.stack,
            open_sites=tuple(self.open_sites),
            advice=" ".join([_ADVICE[kind], *notes]),
        )


def _by_handle(opens: Iterable[Open]) -> dict[tuple[str, int], list[Open]]:
    found: dict[tuple[str, int], list[Open]] = defaultdict(list)
    for one in opens:
        found[one.counter_file, one.slot].append(one)
    return dict(found)


def _openers_by_block(
    exports: Iterable[Export], by_handle: Mapping[tuple[str, int], Sequence[Open]]
) -> dict[tuple[int, int], frozenset[int]]:
    """Which ranks opened any handle of a block."""
    openers: dict[tuple[int, int], set[int]] = defaultdict(set)
    for export in exports:
        found = by_handle.get((export.counter_file, export.slot), ())
        openers[export.rank, export.block].update(one.rank for one in found)
    return {block: frozenset(ranks) for block, ranks in openers.items()}


def _opens_and_counter(export: Export, opens: Sequence[Open]) -> tuple[int, int | None]:
    """How often the handle was opened (a counter far below tells of opens that no ledger saw) and its counter."""
    counter = export.counter
    return max(len(opens), 0 if counter is None else -counter + 1 if counter < 1 else 0), counter


def _breakers(kind: FaultKind, opens: Sequence[Open], dead: frozenset[int], others: Iterable[int]) -> Iterable[int]:
    """The ranks to name: who opened too often, who holds, who died; for a handle never opened, who opened no other
    handle of its block.
    """
    if kind == "never-opened":
        return others
    if kind == "dead-peer":
        return dead
    holding = [one.rank for one in opens if not one.released]
    if kind == "over-released" or not holding:
        return [one.rank for one in opens]
    return holding


def _site(export: Export) -> str:
    return export.stack[0] if export.stack else "unknown"


def _slow_ranks(exports: Iterable[Export]) -> dict[int, str]:
    """A sentence for each rank that has so many live exports that torch gives them no event."""
    live: dict[int, int] = defaultdict(int)
    for export in exports:
        live[export.rank] += not export.freed
    return {
        rank: _SLOW.format(who=f"Rank {rank} has", live=count, limit=EVENTS)
        for rank, count in sorted(live.items())
        if count > EVENTS
    }


def _pairs(exports: Iterable[Export], opens: Iterable[Open]) -> tuple[IpcPair, ...]:
    exporter = {(export.counter_file, export.slot): export.rank for export in exports}
    met: dict[tuple[int, int], list[int]] = defaultdict(lambda: [0, 0])
    for one in opens:
        rank = exporter.get((one.counter_file, one.slot))
        if rank is not None:
            counts = met[rank, one.rank]
            counts[0] += 1
            counts[1] += not one.released
    return tuple(IpcPair(*ranks, *counts) for ranks, counts in sorted(met.items()))

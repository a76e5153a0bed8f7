"""CUDA IPC in one place: the contract (`contract.py`), the ledger (`ledger.py`), the audit (`audit.py`), and
`ipc_audit()`, which puts the three around any stretch of code in any job.

It needs no pytest. torch is imported when a ledger is entered, not before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .audit import audit, broken, summary
from .contract import Consumer, Custody, Producer, Slot, is_released, read_counter, reads_unsigned
from .ledger import Ledger
from .records import IpcFault, IpcSummary

if TYPE_CHECKING:
    import torch.distributed

__all__ = [
    "Consumer",
    "Custody",
    "IpcAudit",
    "Ledger",
    "Producer",
    "Slot",
    "audit",
    "broken",
    "ipc_audit",
    "is_released",
    "read_counter",
    "reads_unsigned",
    "summary",
]


class IpcAudit:
    """What `ipc_audit` found. Empty until its body has ended."""

    def __init__(self) -> None:
        self.summary = IpcSummary()

    @property
    def faults(self) -> tuple[IpcFault, ...]:
        """The broken contracts; empty where every one was kept."""
        return self.summary.faults

    def __str__(self) -> str:
        """A line a fault, and how much was watched."""
        lines = [f"{self.summary.exports} exports, {self.summary.opens} opens, {len(self.faults)} faults"]
        lines += [
            f"{fault.kind}: exported at {fault.site} by ranks {list(fault.exporters)}, opened {fault.opens} times "
            f"(counter {fault.counter}) by ranks {list(fault.by_ranks)}: {fault.handles} handles, {fault.bytes} bytes. "
            f"{fault.advice}"
            for fault in self.faults
        ]
        return "\n".join(lines + ([self.summary.note] if self.summary.note else []))


@contextmanager
def ipc_audit(group: torch.distributed.ProcessGroup | None = None) -> Iterator[IpcAudit]:
    """Audit the CUDA IPC contract in the body: every handle exported in it, by the opens of all ranks of `group`.

    Collective: every rank of `group` (default: the default group) enters and leaves it together. Without a process
    group it audits this process alone, and opens elsewhere show only in the counters. The result is the same on every
    rank, there when the body has ended; it stays empty where the body raises. It raises nothing itself.
    """
    import torch.distributed as dist

    together = dist.is_available() and dist.is_initialized()
    found = IpcAudit()
    with Ledger(dist.get_rank() if together else 0) as ledger:
        yield found
        if not together:
            found.summary = summary(*ledger.reading())
            return
        gathered: list[object] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, None, group=group)  # everybody has left the body: nothing is in flight
        dist.all_gather_object(gathered, ledger.reading(), group=group)
    readings = [one for one in gathered if isinstance(one, tuple)]
    found.summary = summary(
        [export for exports, _ in readings for export in exports], [one for _, opens in readings for one in opens]
    )

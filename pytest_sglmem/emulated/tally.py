"""The numbers of `torch.cuda.memory_stats`, kept as blocks come and go. Pure.

It is told what happened and keeps current, peak and total; what was freed follows from these.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Tally:
    """The numbers torch keeps for a pool, or for both together. What was freed follows from the totals.

    A block that waits for another stream is no longer allocated and still active; since an allocation first ends every
    such wait, the peak of what is active is that of what is allocated.
    """

    count: int = 0
    count_peak: int = 0
    count_total: int = 0
    bytes: int = 0
    bytes_peak: int = 0
    bytes_total: int = 0
    requested: int = 0
    requested_peak: int = 0
    requested_total: int = 0
    segments: int = 0
    segments_peak: int = 0
    segments_total: int = 0
    reserved: int = 0
    reserved_peak: int = 0
    reserved_total: int = 0
    split: int = 0
    split_peak: int = 0
    split_total: int = 0
    split_bytes: int = 0
    split_bytes_peak: int = 0
    split_bytes_total: int = 0
    waiting: int = 0
    waiting_bytes: int = 0
    active_floor: int = 0
    active_bytes_floor: int = 0
    forgotten: dict[str, tuple[int, int]] = field(default_factory=dict)

    def up(self, size: int, requested: int) -> None:
        """A block of `size` bytes, `requested` of them asked for, was handed out."""
        self.count_total += 1
        self.bytes_total += size
        self.requested_total += requested
        self.count = count = self.count + 1
        self.bytes = live = self.bytes + size
        self.requested = asked = self.requested + requested
        if count > self.count_peak:
            self.count_peak = count
        if live > self.bytes_peak:
            self.bytes_peak = live
        if asked > self.requested_peak:
            self.requested_peak = asked

    def down(self, size: int, requested: int) -> None:
        """It came back."""
        self.count -= 1
        self.bytes -= size
        self.requested -= requested

    def reserve(self, size: int) -> None:
        """A segment was taken from the driver."""
        self.segments += 1
        self.segments_total += 1
        self.segments_peak = max(self.segments_peak, self.segments)
        self.reserved += size
        self.reserved_total += size
        self.reserved_peak = max(self.reserved_peak, self.reserved)

    def unreserve(self, size: int) -> None:
        """A segment went back to the driver."""
        self.segments -= 1
        self.reserved -= size

    def splits(self, pieces: int, size: int) -> None:
        """Free room beside live blocks, which cannot go back to the driver, changed by so many pieces and bytes."""
        self.split += pieces
        self.split_bytes += size
        if pieces > 0:
            self.split_total += pieces
            self.split_peak = max(self.split_peak, self.split)
        if size > 0:
            self.split_bytes_total += size
            self.split_bytes_peak = max(self.split_bytes_peak, self.split_bytes)

    def reset_peaks(self) -> None:
        """Every peak is what is there now."""
        for name in ("count", "bytes", "requested", "reserved", "segments", "split", "split_bytes"):
            setattr(self, f"{name}_peak", getattr(self, name))
        self.active_floor = self.count + self.waiting
        self.active_bytes_floor = self.bytes + self.waiting_bytes

    def reset_accumulated(self) -> None:
        """What was allocated and freed so far is forgotten."""
        self.forgotten = {name: (told["allocated"], told["freed"]) for name, told in self._all_time().items()}

    def read(self) -> dict[str, dict[str, int]]:
        """The numbers by torch's names."""
        told = self._all_time()
        for name, (allocated, freed) in self.forgotten.items():
            told[name]["allocated"] -= allocated
            told[name]["freed"] -= freed
        return told

    def _all_time(self) -> dict[str, dict[str, int]]:
        active, active_bytes = self.count + self.waiting, self.bytes + self.waiting_bytes
        return {
            "allocation": number(self.count, self.count_peak, self.count_total),
            "segment": number(self.segments, self.segments_peak, self.segments_total),
            "active": number(active, max(self.count_peak, self.active_floor), self.count_total),
            "inactive_split": number(self.split, self.split_peak, self.split_total),
            "allocated_bytes": number(self.bytes, self.bytes_peak, self.bytes_total),
            "reserved_bytes": number(self.reserved, self.reserved_peak, self.reserved_total),
            "active_bytes": number(active_bytes, max(self.bytes_peak, self.active_bytes_floor), self.bytes_total),
            "inactive_split_bytes": number(self.split_bytes, self.split_bytes_peak, self.split_bytes_total),
            "requested_bytes": number(self.requested, self.requested_peak, self.requested_total),
        }


def number(current: int, peak: int, total: int) -> dict[str, int]:
    """One number as torch gives it."""
    return {"current": current, "peak": peak, "allocated": total, "freed": total - current}

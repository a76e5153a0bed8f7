"""How verdicts, growth and numbers read: the one place where a record becomes text.

Lines stay under 80 columns where the user's own paths allow it, use no colour, and name rank, number, limit, cause and
next move. It judges nothing and imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .records import Growth, IpcFault, SiteVerdict, Verdict

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 80
_MECHANISMS = {
    "retained": "retained: a Python object keeps the tensor",
    "ipc-over-released": "over-released: one IPC handle, opened more than once",
    "ipc-never-opened": "never opened: the IPC handle was given out and nobody took it",
    "ipc-held-by-peer": "held by a peer that still maps it",
    "ipc-dead-peer": "held by a peer that died with it open",
    "outside-torch": "outside torch's allocator (context, NCCL, raw cudaMalloc)",
    "unknown": "unknown: no Python object holds it, no IPC handle was made of it",
}
_NEXT = {
    "retained": "Drop the tensor where the step ends, or give what keeps it a bound.",
    "ipc-over-released": "Export one handle for each peer that opens it (reduce_tensor once a peer).",
    "ipc-never-opened": "Export only what a peer will open, or open and drop it in the peer.",
    "ipc-held-by-peer": "Drop the peer's mapping before the step ends.",
    "ipc-dead-peer": "Restart the exporter when a peer dies: torch never takes this memory back.",
    "outside-torch": "Look at communicators, contexts and allocations made without torch.",
    "unknown": "Look for what C++ keeps: autograd graphs, caches of extensions, other streams.",
}


def size(count: float) -> str:
    """`count` bytes in the unit that keeps it under 1024: "512 B", "1.5 MiB"."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"


def ranks(numbers: Sequence[int]) -> str:
    """Ranks as runs of three or more: "rank 3", "ranks 0, 1, 3", "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    text = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
    return f"{'rank' if len(set(numbers)) == 1 else 'ranks'} {text}"


def sparkline(values: Sequence[float], width: int = 8) -> str:
    """The series in at most `width` characters, lowest to highest."""
    if len(values) > width:
        values = [values[round(i * (len(values) - 1) / (width - 1))] for i in range(width)]
    low, high = min(values, default=0), max(values, default=0)
    return "".join(_BARS[0 if high == low else round((v - low) / (high - low) * 7)] for v in values)


def verdict_line(verdict: Verdict) -> str:
    """The verdict in one line."""
    return " ".join(_headline(verdict))


def verdict_message(verdict: Verdict) -> str:
    """Everything a failure says, several lines; for the other verdicts the same shape with less in it."""
    return "\n".join([verdict_line(verdict), *_settled_lines(verdict), *_site_lines(verdict), *_ipc_lines(verdict)])


def _headline(verdict: Verdict) -> Iterator[str]:
    yield f"{verdict.verdict}:"
    if verdict.verdict == "leak":
        leaking = [rank for rank, rate in enumerate(verdict.bytes_per_cycle) if rate > verdict.tolerance]
        most = max(verdict.bytes_per_cycle)
        yield f"{ranks(leaking)}: {size(most)} a cycle, allowed {size(verdict.tolerance)}"
    elif any(verdict.cyclic_bytes):
        yield f"{size(max(verdict.cyclic_bytes))} a cycle"
    elif any(verdict.late_bytes):
        yield f"{size(max(verdict.late_bytes))} a cycle"
    yield f"({verdict.cycles} cycles after {verdict.warmup} of warm-up)"


def _settled_lines(verdict: Verdict) -> Iterator[str]:
    for rank, values in enumerate(verdict.settled):
        yield f"  rank {rank}: " + " | ".join(size(value) for value in values)


def _site_lines(verdict: Verdict) -> Iterator[str]:
    for site in verdict.sites:
        yield f"  {site.site}: +{size(site.bytes_per_cycle)} a cycle, {ranks(site.ranks)}"
        yield from (f"    {line}" for line in site.stack[1:])
        yield f"    mechanism: {_MECHANISMS[site.mechanism]}"
        yield from (f"    held by: {chain}" for chain in site.held_by)
        yield f"    next: {_NEXT[site.mechanism]}"


def _ipc_lines(verdict: Verdict) -> Iterator[str]:
    for fault in verdict.ipc.faults:
        yield f"  ipc: {fault_line(fault)}"


def fault_line(fault: IpcFault) -> str:
    """One broken IPC contract in one line."""
    return f"{fault.kind}: {fault.site}: opened {fault.opens} times, counter {fault.counter}, {size(fault.bytes)}"


def growth_message(growth: Growth) -> str:
    """What a failed `gc_tracked` assertion says."""
    return f"{growth.verdict}: {growth.objects_per_append:g} tracked objects an append"


def _advice(site: SiteVerdict) -> str:
    return _NEXT[site.mechanism]

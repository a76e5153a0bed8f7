"""`UlyssesAllToAll.exchange` against the group's own `all_to_all_single`, side by side in one run.

    python benchmarks/exchange.py [--ranks N] [--mib 1 8 64 256] [--json FILE]

A rank a GPU, NCCL (where ranks share a GPU, which NCCL may not: only our side). Times are CUDA events around a run of
calls, so they hold the copies and all synchronisation; the median of the repeats, of the slowest rank. "ahead" is the
ratio where the host has put the calls behind a device that still works on something else, so that host time is free,
as in a busy server. GB/s count what leaves a rank; the next column compares with `--link` (a H200's NVLink: 450 GB/s
each way). "host" is the time that the calling process itself is busy. Outputs are compared byte by byte before
anything is timed, and the allocator is asked whether steady calls allocated.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

from ranks import on_ranks, timed, timed_ahead

_TIMES = ("ours_ms", "host_ms", "nccl_ms", "nccl_host_ms", "ours_ahead_ms", "nccl_ahead_ms")


def measure(rank: int, sizes: list[int], repeats: int, order: str, tuning: dict[str, int]) -> dict:
    """All sizes on this rank: milliseconds a call of ours and of the group's, and what allocated meanwhile."""
    import torch
    import torch.distributed as dist

    from pytest_sglmem.reference import UlyssesAllToAll
    from pytest_sglmem.reference.order import StreamOrder

    for name, value in tuning.items():
        setattr(StreamOrder, name, value)
    rows = []
    nccl = dist.get_backend() == "nccl"
    with UlyssesAllToAll(order=order) as ulysses:
        for mib in sizes:
            send = torch.randint(-(2**15), 2**15, (dist.get_world_size(), mib * 2**19 // dist.get_world_size()))
            send = send.to(torch.int16).view(torch.bfloat16).cuda()
            received = torch.empty_like(send)
            ours = ulysses.exchange(send).clone()
            row: dict[str, object] = {"mib": mib}
            if nccl:
                dist.all_to_all_single(received, send)
                row["same"] = torch.equal(ours.view(torch.int16), received.view(torch.int16))
            del ours
            calls = max(10, min(200, 2048 // mib))
            row["allocations"] = allocations(lambda send=send: ulysses.exchange(send))
            row["ours_ms"], row["host_ms"] = timed(lambda send=send: ulysses.exchange(send), calls, repeats)
            if nccl:
                call = lambda send=send, received=received: dist.all_to_all_single(received, send)  # noqa: E731
                row["nccl_ms"], row["nccl_host_ms"] = timed(call, calls, repeats)
                again, _ = timed(lambda send=send: ulysses.exchange(send), calls, repeats)
                row["ours_ms"] = statistics.median([row["ours_ms"], again])
                calls = min(calls, 100)
                row["ours_ahead_ms"] = timed_ahead(lambda send=send: ulysses.exchange(send), calls, repeats)
                row["nccl_ahead_ms"] = timed_ahead(call, calls, repeats)
            rows.append(row)
        return {
            "order": ulysses.order,
            "device": torch.cuda.get_device_name(),
            "rows": rows,
            "torch": torch.__version__,
        }


def allocations(call: Callable[[], object]) -> int:
    """How many blocks the allocator handed out in 20 calls."""
    import torch

    before = torch.cuda.memory_stats().get("allocation.all.allocated", 0)
    for _ in range(20):
        call()
    torch.cuda.synchronize()
    return torch.cuda.memory_stats().get("allocation.all.allocated", 0) - before


def table(ranks: list[dict], link: float) -> list[dict]:
    """One row a size: the slowest rank's times, their ratio, what went over the link."""
    rows = []
    for columns in zip(*(rank["rows"] for rank in ranks), strict=True):
        row = dict(columns[0])
        for name in (*_TIMES, "allocations"):
            if name in row:
                row[name] = max(column[name] for column in columns)
        if "same" in row:
            row["same"] = all(column["same"] for column in columns)
        row["gb_s"] = row["mib"] * 2**20 * (len(ranks) - 1) / len(ranks) / row["ours_ms"] / 1e6
        row["of_link"] = row["gb_s"] / link
        row["ratio"] = row["nccl_ms"] / row["ours_ms"] if "nccl_ms" in row else None
        row["ratio_ahead"] = row["nccl_ahead_ms"] / row["ours_ahead_ms"] if "nccl_ms" in row else None
        rows.append(row)
    return rows


def main() -> None:
    """Parse, run, print."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=max(2, torch.cuda.device_count()))
    parser.add_argument("--mib", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--order", default="auto", choices=["auto", "stream", "host"])
    parser.add_argument("--link", type=float, default=450.0, help="GB/s one way")
    parser.add_argument("--aside-from", type=int, help="try another StreamOrder.aside_from, in bytes")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    tuning = {} if args.aside_from is None else {"aside_from": args.aside_from}
    ranks = on_ranks(measure, args.ranks, args.mib, args.repeats, args.order, tuning, device="cuda")
    rows = table(ranks, args.link)
    first = ranks[0]
    print(f"{args.ranks} ranks, {first['device']}, torch {first['torch']}, order {first['order']} {tuning or ''}")
    print("  MiB   ours ms   NCCL ms  ratio  ahead   GB/s  of link  host ms  alloc same")
    for row in rows:
        nccl, ratio, ahead = f"{'-':>9}", f"{'-':>6}", f"{'-':>6}"
        if row["ratio"]:
            nccl, ratio, ahead = f"{row['nccl_ms']:9.4f}", f"{row['ratio']:6.2f}", f"{row['ratio_ahead']:6.2f}"
        print(
            f"{row['mib']:5} {row['ours_ms']:9.4f} {nccl} {ratio} {ahead} {row['gb_s']:6.0f} {row['of_link']:8.0%} "
            f"{row['host_ms']:8.4f} {row['allocations']:6} {row.get('same', '-')}"
        )
    if args.json:
        record = {"ranks": args.ranks, "tuning": tuning, "rows": rows} | {
            k: first[k] for k in ("device", "torch", "order")
        }
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

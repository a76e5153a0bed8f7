"""What tracing costs: a census of 10,000 live blocks, and recording with quiet points beside the bare step.

    python benchmarks/tracing.py [--device emulated|cuda] [--ranks 8] [--blocks 10000] [--step-ms 100]

On CUDA the ranks share the devices there are; a step is matrix products that take about `--step-ms`. The last lines are
the table. On the emulated device the census is measured and the step is not: its products run on the CPU.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from pytest_sglmem.emulated import emulated_cuda
from pytest_sglmem.sources import Census, Recording, reading
from pytest_sglmem.tracing import trace_rank

LIMITS = {"census": 0.1, "share": 1.0}


def census_seconds(blocks: int, deep: int = 20) -> tuple[float, float]:
    """Median seconds of a census over `blocks` live blocks whose stacks are `deep` calls deep, and of a reading."""

    def fill(count: int, depth: int) -> list[torch.Tensor]:
        if depth:
            return fill(count, depth - 1)
        return [torch.empty(512, dtype=torch.uint8, device="cuda") for _ in range(count)]

    with Recording():
        kept = fill(blocks, deep)
        census = Census(torch.cuda.current_device())
        taken = [_timed(lambda: census.take(0)) for _ in range(5)]
        read = [_timed(lambda: reading(torch.cuda.current_device())) for _ in range(50)]
        assert sum(entry.blocks for entry in census.take(0)) >= len(kept)
    return statistics.median(taken), statistics.median(read)


def _timed(call) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def _rank(rank: int, size: int, store: str, step_ms: float, side: int, out) -> None:
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    matrix = torch.randn(side, side, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        matrix @ matrix
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(20):
        matrix @ matrix
    torch.cuda.synchronize()
    one = (time.perf_counter() - begun) / 20
    counts = torch.tensor([max(1, round(step_ms / 1000 / one))])
    dist.broadcast(counts, 0)
    products = int(counts)

    def step(_: int) -> None:
        for at in range(products):
            made = matrix @ matrix
            if at % 8 == 0:
                made = made.add(1)
        torch.cuda.synchronize()

    bare: list[float] = []
    traced: list[float] = []
    for _ in range(4):
        dist.barrier()
        begun = time.perf_counter()
        for at in range(12):
            step(at)
            dist.barrier()
        bare.append((time.perf_counter() - begun) / 12)
        dist.barrier()
        marks: list[float] = []
        trace_rank(
            lambda: step,
            range(12),
            rank=rank,
            cycles=1,
            warmup=0,
            progress=lambda cycle, at, live, marks=marks: marks.append(time.perf_counter()),
        )
        traced.append((marks[-1] - marks[0]) / (len(marks) - 1))
    out.put((rank, statistics.median(bare), statistics.median(traced)))
    dist.barrier()
    dist.destroy_process_group()


def step_share(ranks: int, step_ms: float, side: int = 4096) -> list[tuple[int, float, float]]:
    """For each rank the seconds of a bare step (with the barrier that a step of several ranks has) and a traced one."""
    context = mp.get_context("spawn")
    out = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        started = [context.Process(target=_rank, args=(r, ranks, store, step_ms, side, out)) for r in range(ranks)]
        for process in started:
            process.start()
        found = [out.get(timeout=150) for _ in started]
        for process in started:
            process.join(30)
    return sorted(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["emulated", "cuda"], default="emulated")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=10_000)
    parser.add_argument("--step-ms", type=float, default=100)
    asked = parser.parse_args()
    rows: list[tuple[str, str, str]] = []
    if asked.device == "cuda":
        shares = step_share(asked.ranks, asked.step_ms)
        bare = statistics.median(one[1] for one in shares)
        share = statistics.median((one[2] - one[1]) / one[1] * 100 for one in shares)
        rows.append(("bare step, ms", f"{bare * 1000:.2f}", ""))
        rows.append((f"traced step, {asked.ranks} ranks, % more", f"{share:+.2f}", f"at most {LIMITS['share']:g}"))
        census, read = census_seconds(asked.blocks)
    else:
        with emulated_cuda():
            census, read = census_seconds(asked.blocks)
    rows.append((f"census of {asked.blocks} blocks, s", f"{census:.4f}", f"at most {LIMITS['census']:g}"))
    rows.append(("reading, us", f"{read * 1e6:.0f}", ""))
    name = torch.cuda.get_device_name() if asked.device == "cuda" else "emulated"
    print(f"{name}, torch {torch.__version__}")
    for what, number, limit in rows:
        print(f"{what:<40}{number:>12}  {limit}")
    return int(census > LIMITS["census"])


if __name__ == "__main__":
    raise SystemExit(main())

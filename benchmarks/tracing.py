"""What tracing costs: a census of 10,000 live blocks, and recording with quiet points beside the bare step.

    python benchmarks/tracing.py [--device emulated|cuda] [--ranks 8] [--blocks 10000] [--step-ms 100] [--pairs 24]

The ranks share the devices there are. A step is so many matrix products that it lasts `--step-ms` while all ranks run
it at once. Bare and traced steps alternate in one run, 8 of each a pair, the order changing from pair to pair; the
table shows the median of all pairs of all ranks, and their quartiles. Exit status 1 on CUDA where a limit is not kept.
On the emulated device a product runs on the CPU, where ranks beyond its cores wait for each other: the number says
that the command works, and nothing of the cost.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from pytest_sglmem.emulated import emulated_cuda
from pytest_sglmem.sources import Census, Recording, reading
from pytest_sglmem.tracing import trace_rank

LIMITS = {"census": 0.1, "share": 1.0}
LIMIT = 160  # seconds for all ranks: 40 to start 8 of them on one GPU, 40 for 24 pairs of 100 ms steps


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


@dataclass(frozen=True)
class Setting:
    """What each rank needs to know. `side`: of the square matrices that a step multiplies."""

    device: str
    size: int
    store: str
    step_ms: float
    pairs: int
    side: int


def _rank(rank: int, setting: Setting, out) -> None:
    emulated = emulated_cuda() if setting.device == "emulated" else contextlib.nullcontext()
    with emulated:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        torch.cuda.set_device(rank % torch.cuda.device_count())
        dist.init_process_group("gloo", init_method=f"file://{setting.store}", rank=rank, world_size=setting.size)
        out.put((rank, *_pairs(_calibrated(setting), rank, setting.pairs)))
        dist.barrier()
        dist.destroy_process_group()


def _calibrated(setting: Setting) -> Callable[[int], None]:
    """A step that lasts `step_ms` while all ranks run it at once: those that share a GPU take turns on it."""
    kind = torch.float32 if setting.device == "emulated" else torch.bfloat16
    matrix = torch.randn(setting.side, setting.side, device="cuda", dtype=kind)
    products = 1

    def step(_: int) -> None:
        for at in range(products):
            made = matrix @ matrix
            if at % 8 == 0:
                made = made.add(1)
        torch.cuda.synchronize()

    step(0)
    for _ in range(12):  # the step grows or shrinks to its length, as the slowest rank sees it
        took = torch.tensor([statistics.median(_bare(step, 7))], dtype=torch.float64, device="cpu")
        dist.all_reduce(took, dist.ReduceOp.MAX)
        factor = setting.step_ms / 1000 / float(took)
        if abs(factor - 1) < 0.05:
            break
        products = max(1, round(products * min(8.0, max(0.5, factor))))
    return step


def _bare(step: Callable[[int], None], steps: int) -> list[float]:
    """Seconds of each step with the barrier that a step of several ranks has, and with nothing else."""
    took = []
    dist.barrier()
    for at in range(steps):
        begun = time.perf_counter()
        step(at)
        dist.barrier()
        took.append(time.perf_counter() - begun)
    return took


def _traced(step: Callable[[int], None], rank: int, steps: int) -> list[float]:
    """Seconds from one step's reading to the next one's, in a trace of one cycle."""
    marks: list[float] = []
    dist.barrier()
    trace_rank(
        lambda: step,
        range(steps + 1),
        rank=rank,
        cycles=1,
        warmup=0,
        progress=lambda cycle, at, live: marks.append(time.perf_counter()),
    )
    return [after - before for before, after in pairwise(marks)]


def _pairs(step: Callable[[int], None], rank: int, pairs: int, steps: int = 8) -> tuple[float, list[float]]:
    """The median bare step in seconds, and for each pair how much longer the traced step was (1: as long)."""
    bare, ratios = [], []
    for number in range(pairs):
        if number % 2:
            traced, plain = _traced(step, rank, steps), _bare(step, steps)
        else:
            plain, traced = _bare(step, steps), _traced(step, rank, steps)
        bare += plain
        ratios.append(statistics.median(traced) / statistics.median(plain))
    return statistics.median(bare), ratios


def step_share(setting: Setting) -> list[tuple[int, float, list[float]]]:
    """For each rank the seconds of a bare step, and the ratio of each pair."""
    context = mp.get_context("spawn")
    out = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        setting = replace(setting, store=os.path.join(folder, "store"))
        started = [context.Process(target=_rank, args=(rank, setting, out)) for rank in range(setting.size)]
        for process in started:
            process.start()
        try:
            found = [out.get(timeout=LIMIT) for _ in started]
        finally:
            for process in started:
                process.join(10)
                process.kill()
    return sorted(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["emulated", "cuda"], default="emulated")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=10_000)
    parser.add_argument("--step-ms", type=float, default=100)
    parser.add_argument("--pairs", type=int, default=24)
    asked = parser.parse_args()
    side = 4096 if asked.device == "cuda" else 256
    shares = step_share(Setting(asked.device, asked.ranks, "", asked.step_ms, asked.pairs, side))
    bare = statistics.median(one[1] for one in shares)
    ratios = [(ratio - 1) * 100 for one in shares for ratio in one[2]]
    low, share, high = statistics.quantiles(ratios, n=4)
    with emulated_cuda() if asked.device == "emulated" else contextlib.nullcontext():
        census, read = census_seconds(asked.blocks)
        name = torch.cuda.get_device_name()
    rows = [
        (f"bare step, {asked.ranks} ranks, ms", f"{bare * 1000:.2f}", f"asked for {asked.step_ms:g}"),
        ("traced step, % more, median", f"{share:+.2f}", f"at most {LIMITS['share']:g}"),
        (f"  quartiles of {asked.pairs} pairs a rank", f"{low:+.2f} {high:+.2f}", ""),
        (f"census of {asked.blocks} blocks, s", f"{census:.4f}", f"at most {LIMITS['census']:g}"),
        ("reading, us", f"{read * 1e6:.0f}", ""),
    ]
    print(f"{name}, torch {torch.__version__}")
    for what, number, limit in rows:
        print(f"{what:<40}{number:>16}  {limit}")
    return int(asked.device == "cuda" and (census > LIMITS["census"] or share > LIMITS["share"]))


if __name__ == "__main__":
    raise SystemExit(main())

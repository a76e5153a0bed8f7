"""How exact the verdict is: random clean programs, and random programs with one planted leak, on the emulated device.

    python benchmarks/exactness.py [--programs 1000] [--seed 0] [--show]

Each program (programs.py) runs with `cycles=(3, 12)` in a world of 1 to 4 ranks. The ranks live in this process, each
on an emulated device of its own, and take turns cycle by cycle: the verdict needs no communication between them. Clean
is a program that grows in its first 9 cycles at most, of the 13 that there are (programs.py says it exactly); what
still fills in all of them, by however little, is called a leak: the trace cannot tell it from one. Wrong is a clean
program that is called a leak; a leak that is not; one whose ranks differ from the planted ones; one whose first site is
not the planted line. Exit status 1 where anything was wrong; `--show` prints each such program.
"""

from __future__ import annotations

import argparse
import functools
import gc
import time
from collections import Counter

import torch
from programs import Program, planted_line, program

from pytest_sglmem.emulated import emulated_cuda
from pytest_sglmem.judge import judge
from pytest_sglmem.records import Trace, Verdict
from pytest_sglmem.sources import Recording
from pytest_sglmem.tracing import Hands, Meeting, Run, bounds

CYCLES, WARMUP = (3, 12), 1


def trace(made: Program) -> Trace:
    """The trace of a program, its ranks one after the other on devices of their own. Enter `emulated_cuda` first."""
    least, most = bounds(CYCLES)
    runs = []
    empty = functools.partial(torch.empty, dtype=torch.uint8, device="cuda")
    with Recording():
        for rank in range(made.size):
            torch.cuda.set_device(rank)
            step = made.setup(rank, empty)
            runs.append(Run(step, made.over, rank, Meeting(), Hands.take(), None, None, None))
            runs[-1].begin()
        for cycle in range(WARMUP + most):
            for rank, run in enumerate(runs):
                torch.cuda.set_device(rank)
                run.one_cycle(cycle)
            if cycle + 1 - WARMUP >= least and all(run.is_settled(WARMUP, least) for run in runs):
                break
        return Trace(tuple(run.record() for run in runs), tuple(map(str, made.over)), WARMUP, device="emulated")


def wrong(made: Program, verdict: Verdict, line: int) -> str:
    """What is wrong with the verdict; empty where it is right."""
    if made.plant is None:
        return f"accused: {verdict.sites[0].site}" if verdict.verdict == "leak" else ""
    if verdict.verdict != "leak":
        return "missed"
    if f"programs.py:{line} " not in verdict.sites[0].site:
        return f"named {verdict.sites[0].site} first"
    ranks = tuple(rank for rank, rate in enumerate(verdict.bytes_per_cycle) if rate)
    return "" if ranks == made.plant.ranks else f"named ranks {ranks}"


def measure(
    programs: int, seed: int, *, leak: bool, show: bool = False
) -> tuple[Counter[str], Counter[int], list[str]]:
    """Verdict words, cycles taken and what was wrong, over `programs` programs from `seed` on."""
    words: Counter[str] = Counter()
    cycles: Counter[int] = Counter()
    faults = []
    line = planted_line()
    for number in range(seed, seed + programs):
        made = program(number, leak=leak)
        with emulated_cuda(devices=made.size):
            verdict = judge(trace(made))
        words[verdict.verdict] += 1
        cycles[verdict.cycles] += 1
        fault = wrong(made, verdict, line)
        if fault:
            faults.append(f"seed {number}: {fault}: {made}")
            if show:
                print(faults[-1], verdict.settled)
    return words, cycles, faults


def settle() -> None:
    """As in a rank: a collection walks the program's objects and not torch's, what a first program imports included."""
    measure(1, 0, leak=True)
    gc.collect()
    gc.freeze()
    gc.disable()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", action="store_true")
    asked = parser.parse_args()
    settle()
    bad = 0
    print(f"{'programs':<10}{'count':>6}{'wrong':>7}{'seconds':>9}  cycles taken, verdicts")
    for leak in (False, True):
        begun = time.perf_counter()
        words, cycles, faults = measure(asked.programs, asked.seed, leak=leak, show=asked.show)
        took = time.perf_counter() - begun
        spread = ", ".join(f"{n}: {count}" for n, count in sorted(cycles.items()))
        name = "leaking" if leak else "clean"
        print(f"{name:<10}{asked.programs:>6}{len(faults):>7}{took:>9.0f}  {spread}; {dict(words)}")
        bad += len(faults)
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main())

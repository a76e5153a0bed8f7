"""What gc_tracked costs beside the interpreter's own calls, and how exact it is.

    python benchmarks/gc_tracked.py [--objects 1000000] [--json FILE]

Prints count, by_type and assert_flat against their goals, and what 10,000 finished requests cost the collector as live
objects and as bytes. Needs no torch; where it is installed, assert_flat is measured beside it too, last, because its
import leaves 150,000 objects in the heap. Exit status 1 where a goal is missed.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import pickle
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "fixtures"))

import request_records

from pytest_sglmem import heap
from pytest_sglmem.objects import GcTracked, GrowthError

ROUNDS = 15


def quickest(*calls):
    """Milliseconds of processor time of each call, the quickest of interleaved rounds: other work does not count."""
    best = [float("inf")] * len(calls)
    for _ in range(ROUNDS):
        for which, call in enumerate(calls):
            begun = time.process_time()
            call()
            best[which] = min(best[which], (time.process_time() - begun) * 1e3)
    return best


def against(name, ours, theirs, limit, unit="ms"):
    """One line of the table, and whether it holds."""
    print(f"{name:<44}{ours:9.2f} {unit}  {theirs:9.2f} {unit} {ours / theirs:6.2f} x   (goal: at most {limit})")
    return ours <= limit * theirs


def counting(tracked, objects):
    """Counts and types of a heap with this many more objects."""
    kept = [[] for _ in range(objects)]
    gc.collect()
    count, plain = quickest(tracked.count, lambda: len(gc.get_objects()))
    types, counter = quickest(heap.by_type, lambda: Counter(map(type, gc.get_objects())))
    del kept
    right = against(f"count of {objects:,} / len(gc.get_objects())", count, plain, 1.3)
    return against("by_type / Counter(map(type, gc.get_objects()))", types, counter, 1.3) and right


def flat(tracked, heap_name, goal=0.2):
    """Whether assert_flat of 1,000 appends takes less than the goal in seconds, beyond the appends."""
    numbers = []
    took, appends = quickest(
        lambda: tracked.assert_flat(lambda i: None, times=1000),
        lambda: [numbers.append(i) for i in range(1100)],
    )
    beyond = (took - appends) / 1e3
    name = f"assert_flat of 1,000 appends, {heap_name}"
    said = f"goal: under {goal}" if goal else "no goal"
    print(f"{name:<44}{beyond:9.3f} s   ({said})   a full collection {collection(gc.collect) * 1e3:.1f} ms")
    return goal is None or beyond < goal


def collection(collect):
    """Seconds of a full collection."""
    return quickest(collect)[0] / 1e3


def with_torch(tracked):
    """The same in a process that has imported torch, where it is installed. Two full collections are much of it."""
    if importlib.util.find_spec("torch") is None:
        print("torch is not installed: assert_flat beside it not measured")
        return
    importlib.import_module("torch")
    gc.collect()
    flat(tracked, "torch imported", goal=None)


def histories(tracked, count):
    """What finished requests cost: objects an append, and the full collection after."""
    samples = [pickle.dumps(request_records.record(number)) for number in range(50)]
    live, kept = [], []
    shapes = {
        "live requests": lambda i: live.append(pickle.loads(samples[i % 50])),
        "pickled bytes": lambda i: kept.append((float(i), samples[i % 50][:])),
    }
    for name, append in shapes.items():
        try:
            growth = tracked.assert_flat(append, times=count)
        except GrowthError as error:
            growth = error.growth
        before, after = growth.pause_ms["before"], growth.pause_ms["after"]
        print(f"{count:,} {name:<15}{growth.objects_per_append:6g} objects an append, {before:.1f} -> {after:.1f} ms")


def main():
    """Print the table; 1 where a goal is missed."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--objects", type=int, default=1_000_000)
    options.add_argument("--records", type=int, default=10_000)
    options.add_argument("--json")
    chosen = options.parse_args()
    tracked = GcTracked(lambda growth: None)
    print(f"Python {sys.version.split()[0]}, a heap of {tracked.count():,}")
    right = [counting(tracked, chosen.objects), flat(tracked, "empty heap")]
    histories(tracked, chosen.records)
    with_torch(tracked)
    if chosen.json:
        Path(chosen.json).write_text(json.dumps({"goals_met": all(right)}))
    return int(not all(right))


if __name__ == "__main__":
    sys.exit(main())

"""CrashDumpHistory beside what it replaced: the cost of a record, of a dump, of a full collection.

    python benchmarks/crash_history.py [--records 50000] [--directory /dev/shm] [--json FILE]

Records are those of `fixtures/request_records.py`. The directory is where dumps go: in memory by default, so that the
table compares the work and not the disk; every dump is fsynced. Exit status 1 where a goal is missed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pickle
import sys
import tempfile
import time
from collections import deque
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "fixtures"))

import request_records

from pytest_sglmem.reference import CrashDumpHistory
from pytest_sglmem.reference.replaced_history import LiveHistory, TupleHistory

ROUNDS, BLOCK = 80, 100


def quickest(*calls):
    """Microseconds a call of each, the quickest of interleaved blocks."""
    best = [float("inf")] * len(calls)
    for _ in range(ROUNDS):
        for which, call in enumerate(calls):
            begun = time.perf_counter()
            for i in range(BLOCK):
                call(i)
            best[which] = min(best[which], (time.perf_counter() - begun) / BLOCK * 1e6)
    return best


def record_costs(samples):
    """pickle.dumps, dumps with the bytes kept, and record: microseconds over the same records."""
    total = sum(len(pickle.dumps(sample, 4)) for sample in samples)
    kept = deque(maxlen=len(samples))
    history = CrashDumpHistory(max_bytes=total)
    return quickest(
        lambda i: pickle.dumps((*samples[i % len(samples)], 1.0), 4),
        lambda i: kept.append((1.0, pickle.dumps((*samples[i % len(samples)], 1.0), 4))),
        lambda i: history.record(*samples[i % len(samples)]),
    )


def seconds(call):
    """Seconds of one call, the collector as it is."""
    begun = time.perf_counter()
    result = call()
    return time.perf_counter() - begun, result


def restore_all_and_pickle_all(records, path):
    """What a dump would be without the outer pickle of calls, written and synced the same way."""
    restored = [pickle.loads(data) for _, data in records]
    with open(path, "wb") as file:
        pickle.dump({"requests": restored}, file, 4)
        file.flush()
        os.fsync(file.fileno())


def full_collection(history):
    """Seconds of a full collection while the history lives."""
    gc.collect()
    return min(seconds(gc.collect)[0] for _ in range(3))


def dump_costs(history, directory):
    """Seconds of a dump and of restoring and pickling all, interleaved; the quickest of three."""
    found = [float("inf")] * 2
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        for _ in range(3):
            found[0] = min(found[0], seconds(lambda: history.dump(Path(folder, "a")))[0])
            found[1] = min(found[1], seconds(lambda: restore_all_and_pickle_all(history._kept, Path(folder, "b")))[0])
        size = Path(folder, "a").stat().st_size
    return found, size


def pauses(count, samples):
    """Full collections with `count` records alive: name -> seconds."""
    found = {"none": full_collection(None)}
    for name, shape in (("live requests", LiveHistory), ("token tuples", TupleHistory), ("pickled", CrashDumpHistory)):
        history = shape(max_age=1e9)
        for i in range(count):
            request, output, created = pickle.loads(pickle.dumps(samples[i % len(samples)]))
            history.record(request, output, created)
        found[name] = full_collection(history)
        del history
    return found


def main():
    """Print the table; 1 where a goal is missed."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--records", type=int, default=50_000)
    options.add_argument("--directory", default="/dev/shm" if os.path.isdir("/dev/shm") else None)
    options.add_argument("--json")
    chosen = options.parse_args()
    samples = [request_records.record(number) for number in range(50)]
    plain, keeping, record = record_costs(samples)
    history = CrashDumpHistory(max_age=1e9, max_bytes=2**40)
    for i in range(chosen.records):
        history.record(*samples[i % len(samples)])
    (dump, restored), size = dump_costs(history, chosen.directory)
    del history
    collections = pauses(chosen.records, [(*sample,) for sample in samples])
    print(f"Python {sys.version.split()[0]}, {chosen.records:,} records of {size // chosen.records:,} bytes on average")
    print(f"{'pickle.dumps':<34}{plain:9.1f} us")
    print(f"{'pickle.dumps, the bytes kept':<34}{keeping:9.1f} us {keeping / plain:6.2f} x")
    print(f"{'record':<34}{record:9.1f} us {record / plain:6.2f} x   (goal: at most 1.1)")
    print(f"{'dump':<34}{dump * 1e3:9.0f} ms   {size / dump / 2**30:.1f} GiB/s")
    print(f"{'restore all, pickle all':<34}{restored * 1e3:9.0f} ms {restored / dump:6.1f} x   (goal: at least 10)")
    for name, took in collections.items():
        print(f"full collection, {name:<17}{took * 1e3:9.1f} ms")
    if chosen.json:
        numbers = {"record_ratio": record / plain, "dump_ratio": restored / dump, "pauses": collections}
        Path(chosen.json).write_text(json.dumps(numbers, indent=1))
    return int(record > 1.1 * plain or restored < 10 * dump)


if __name__ == "__main__":
    sys.exit(main())

"""What the IPC ledger costs: an export and an open with it and without it, and the audit of 10,000 handles.

    python benchmarks/ledger.py [--device cuda|emulated] [--count 300] [--rounds 7]

Exports are `_share_cuda_` here, the first of each block; opens are `_new_shared_cuda` in a process of its own; "log" is
what reading an export's line in the ledger's log costs later, at the next drop, collection, step or reading.
Microseconds of the thread's CPU time, the best round of each; the heap is frozen first, as it is in a rank. Claims: at
most 5 us an export, its line included, or open on the real device; the audit under 0.1 s.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import multiprocessing
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from pytest_sglmem.audit import audit
from pytest_sglmem.ledger import Ledger
from pytest_sglmem.records import Export, Open

BYTES = 2 << 20
LIMIT_US, LIMIT_AUDIT_S = 5.0, 0.1
CLAIMS = {"export": "claim, with log: <= 5", "open": "claim: <= 5", "log": "paid later"}


def on_device(device: str) -> contextlib.AbstractContextManager[object]:
    """CUDA as it is, or emulated."""
    if device == "cuda":
        return contextlib.nullcontext()
    from pytest_sglmem import emulated_cuda

    return emulated_cuda()


def per_call(body: Callable[[], int]) -> float:
    """Microseconds of CPU a call of one run of `body`, which says how many calls it made. Other processes that run
    meanwhile do not count.
    """
    begun = time.thread_time()
    count = body()
    return (time.thread_time() - begun) / count * 1e6


def both(body: Callable[[], int], rounds: int) -> tuple[float, float]:
    """The best round without and with a ledger, taken in turns: what is above it is other work on this machine."""
    bare, watched = [], []
    for _ in range(rounds):
        bare.append(per_call(body))
        with Ledger():
            watched.append(per_call(body))
    return min(bare), min(watched)


def opener(pipe: Connection, device: str, rounds: int) -> None:
    """The other process: open what comes, answer with what it cost."""
    import torch

    with on_device(device):
        torch.cuda.synchronize()
        handles = pipe.recv()
        held = []

        def open_all() -> int:
            held.extend([torch.UntypedStorage._new_shared_cuda(*handle) for handle in handles])
            return len(handles)

        open_all()
        gc.freeze()
        pipe.send(both(open_all, rounds))


def export_and_open(device: str, count: int, rounds: int) -> dict[str, tuple[float, float]]:
    """Microseconds of each, bare and watched."""
    import torch

    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    other = context.Process(target=opener, args=(theirs, device, rounds), daemon=True)
    other.start()
    with on_device(device):
        blocks = [torch.empty(BYTES, dtype=torch.uint8, device="cuda").untyped_storage() for _ in range(count)]
        handles = [block._share_cuda_() for block in blocks]

        def export_all() -> int:
            for block in blocks:
                block._share_cuda_()
            return count

        gc.freeze()
        exports = both(export_all, rounds)
        pipe.send(handles)
        opens = pipe.recv()
        other.join(30)
        logs = []
        for _ in range(rounds):
            with Ledger() as ledger:
                export_all()
                logs.append(per_call(lambda: (ledger.mark(0), count)[1]))
    return {"export": exports, "open": opens, "log": (0.0, min(logs))}


def audit_seconds(handles: int = 10_000) -> float:
    """The audit of so many handles of which every tenth was opened twice."""
    stack = ("app.py:41 in share",)
    exports = [
        Export(0, "/f", slot, 512, stack, counter=-(slot % 10 == 0), dropped=True, freed=bool(slot % 10), freed_at=0)
        for slot in range(handles)
    ]
    opens = [Open(1, "/f", slot, stack, released=1) for slot in range(handles) for _ in range(1 + (slot % 10 == 0))]
    begun = time.perf_counter()
    (fault,) = audit(exports, opens)
    assert fault.handles == handles // 10
    return time.perf_counter() - begun


def main() -> int:
    """Print the table; the exit status says whether the claims hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "emulated"], default="cuda")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    costs = export_and_open(options.device, options.count, options.rounds)
    seconds = audit_seconds()
    print(f"{'':<28}{'bare':>10}{'watched':>10}{'ledger':>10}")
    for name, (bare, watched) in costs.items():
        print(f"{name + ', us':<28}{bare:>10.2f}{watched:>10.2f}{watched - bare:>10.2f}   ({CLAIMS[name]})")
    print(f"{'audit of 10,000 handles, s':<28}{'':>10}{seconds:>10.3f}{'':>10}   (claim: < {LIMIT_AUDIT_S:g})")
    ours = {name: watched - bare for name, (bare, watched) in costs.items()}
    return max(ours["export"] + ours["log"], ours["open"]) > LIMIT_US or seconds >= LIMIT_AUDIT_S


if __name__ == "__main__":
    sys.exit(main())

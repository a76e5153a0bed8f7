"""A benchmark's ranks (one process each, a process group over a FileStore, one result a rank), and calls timed there.

Without pytest, so that what is measured is the code and not the harness. It is no launcher for tests (no limits, no
stacks of hung ranks): that is `pytest_sglmem.launch`.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path


def on_ranks(work: Callable[..., object], size: int, *args: object, device: str, backend: str | None = None) -> list:
    """`work(rank, *args)` in `size` fresh processes; what each returned, in rank order.

    `device`: "cuda" (ranks share GPUs where there are fewer; then the backend is gloo, else nccl) or "emulated".
    """
    import torch
    import torch.multiprocessing as mp

    gpus = torch.cuda.device_count() if device == "cuda" else 0
    backend = backend or ("nccl" if gpus >= size else "gloo")
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, (size, work, args, device, backend, folder), size, start_method="spawn")
        return [pickle.loads(Path(folder, f"{rank}.pickle").read_bytes()) for rank in range(size)]


def timed(call: Callable[[], object], calls: int, repeats: int) -> tuple[float, float]:
    """Milliseconds a call on the device and on the host: medians of `repeats` runs of `calls`."""
    import torch
    import torch.distributed as dist

    device, host = [], []
    for repeat in range(repeats + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        dist.barrier()
        begin.record()
        started = time.perf_counter()
        for _ in range(calls):
            call()
        host_s = time.perf_counter() - started
        end.record()
        torch.cuda.synchronize()
        if repeat >= 2:
            device.append(begin.elapsed_time(end) / calls)
            host.append(host_s * 1e3 / calls)
    return statistics.median(device), statistics.median(host)


def timed_ahead(call: Callable[[], object], calls: int, repeats: int) -> float:
    """Milliseconds a call on the device where the host is ahead of it, as in a server whose GPU is busy.

    The device sleeps while the host puts `calls` (at most 100: the device's queue has room for some 1,000 operations)
    behind; the median of `repeats` runs.
    """
    import torch
    import torch.distributed as dist

    device = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        torch.cuda._sleep(12_000_000)  # cycles: 6 ms at 1.98 GHz, longer than the host needs for 100 calls
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        torch.cuda.synchronize()
        device.append(begin.elapsed_time(end) / calls)
    return statistics.median(device)


def _rank(
    rank: int, size: int, work: Callable[..., object], args: tuple, device: str, backend: str, folder: str
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        if device == "emulated":
            from pytest_sglmem import emulated_cuda

            stack.enter_context(emulated_cuda(devices=size))
        torch.cuda.set_device(rank % torch.cuda.device_count())
        store = dist.FileStore(str(Path(folder, "store")), size)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=120))
        try:
            result = work(rank, *args)
            dist.barrier()
        finally:
            dist.destroy_process_group()
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(result))
    # Without torch's own end: with counters below zero, as the faulty shapes leave them, it frees some memory twice.
    os._exit(0)

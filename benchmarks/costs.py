"""What the calls under an exchange cost the host, microseconds each, on two GPUs: where its time goes.

    python benchmarks/costs.py

Each call is made 300 times in a row, after a warm-up, without waiting for the device; the median of 5 such runs. What
the device needs for it is in the second column (events around the run).
"""

from __future__ import annotations

from ranks import on_ranks, timed

CALLS = 300


def costs(rank: int, mib: float) -> list[tuple[str, float, float]]:
    """Every call's host and device time on this rank."""
    import torch
    import torch.distributed as dist
    from cuda.bindings import driver

    from pytest_sglmem.reference import UlyssesAllToAll
    from pytest_sglmem.reference.board import Plan

    ulysses = UlyssesAllToAll()
    send = torch.ones(2, int(mib * 2**18), dtype=torch.bfloat16, device="cuda")
    received = torch.empty_like(send)
    ulysses.exchange(send)
    order, staging = ulysses._order, next(iter(ulysses._staging.values()))
    route, stream, device = staging.routes[0], torch.cuda.current_stream().cuda_stream, torch.cuda.current_device()
    (peer, away), (own, here) = route.ways
    source, size = send.data_ptr(), route.chunk_bytes
    flags = torch.zeros(64, dtype=torch.int32, device="cuda")
    signals = order._signals
    event, other = torch.cuda.Event(), torch.cuda.Stream()
    code = Plan("exchange", send.numel(), send.dtype).code()
    rows, chunks = route.rows, send.unbind(0)

    def post():
        ulysses._board.post(code)

    def agree():
        ulysses._board.agree(code)

    def wait_here():
        driver.cuStreamWaitValue32(stream, flags.data_ptr(), 0, 0)

    def write_here():
        driver.cuStreamWriteValue32(stream, flags.data_ptr(), 0, 0)

    def events():
        event.record()
        other.wait_event(event)

    calls = {
        "current_stream": torch.cuda.current_stream,
        "raw stream": lambda: torch._C._cuda_getCurrentRawStream(device),
        "capturing": torch.cuda.is_current_stream_capturing,
        "key": lambda: ulysses._key(send),
        "board.post": post,
        "board.agree": agree,
        "view of the result": lambda: staging.mine[0].view_as(send),
        "chunks": lambda: send.view(2, -1).unbind(0),
        "memcpy here": lambda: driver.cuMemcpyDtoDAsync(here, source, size, stream),
        "memcpy to the peer": lambda: driver.cuMemcpyDtoDAsync(away, source, size, stream),
        "copy_ here": lambda: rows[own].copy_(chunks[own]),
        "copy_ to the peer": lambda: rows[peer].copy_(chunks[peer]),
        "foreach_copy_ of both": lambda: torch._foreach_copy_(rows, chunks),
        "write value here": write_here,
        "wait value here": wait_here,
        "batch: write at the peer": lambda: signals.post(stream, 1),
        "batch: write and wait": lambda: signals.post_and_wait(stream, 1),
        "event record and wait": events,
        "exchange": lambda: ulysses.exchange(send),
        "NCCL": lambda: dist.all_to_all_single(received, send),
    }
    timings = []
    for name, call in calls.items():
        on_device, on_host = timed(call, CALLS, repeats=5)
        timings.append((name, on_host * 1e3, on_device * 1e3))  # microseconds
    ulysses._forget()
    return timings


if __name__ == "__main__":
    sizes = (1, 8)
    results = [on_ranks(costs, 2, size, device="cuda") for size in sizes]
    print(f"{'microseconds: host, device of':26}" + "".join(f"{size:>13} MiB" for size in sizes))
    for lines in zip(*(ranks[0] for ranks in results), strict=True):
        print(f"{lines[0][0]:26}" + "".join(f"{host:9.1f}{device:8.1f}" for _, host, device in lines))

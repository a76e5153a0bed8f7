"""What emulation costs an operator: plain CPU dispatch beside the emulated device, in microseconds.

    python benchmarks/emulation.py

Small tensors, so that what is measured is dispatch and not arithmetic; time of the thread, so that other work on the
machine disturbs little. The claim: at most 15 us over plain dispatch.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import torch

from pytest_sglmem.emulated import emulated_cuda

LIMIT = 15.0
ROUNDS, CALLS = 9, 1000


def cases(device: str) -> dict[str, Callable[[], object]]:
    a, b = torch.ones(4, 4, device=device), torch.ones(4, 4, device=device)
    many = [torch.ones(4, device=device) for _ in range(8)]
    linear = torch.nn.Linear(4, 4).to(device)

    def backward() -> None:
        linear(a).sum().backward()

    return {
        "add (new storage)": lambda: a + b,
        "add_ (in place)": lambda: a.add_(b),
        "mul out=": lambda: torch.mul(a, 1.0, out=b),
        "view": lambda: a.view(16),
        "matmul": lambda: a @ b,
        "empty": lambda: torch.empty(4, device=device),
        "zeros": lambda: torch.zeros(4, device=device),
        "tensor([..])": lambda: torch.tensor([1.0, 2.0], device=device),
        "cat of 8": lambda: torch.cat(many),
        "copy_": lambda: a.copy_(b),
        "to (dtype)": lambda: a.to(torch.float64),
        "rand": lambda: torch.rand(4, device=device),
        "item": lambda: a[0, 0].item(),
        "device": lambda: a.device,
        "linear + backward": backward,
    }


def measure(device: str, best: dict[str, float]) -> None:
    """Microseconds of one call of each case, where that beats what is in `best`."""
    for name, call in cases(device).items():
        start = time.thread_time()
        for _ in range(CALLS):
            call()
        best[name] = min(best.get(name, float("inf")), (time.thread_time() - start) / CALLS * 1e6)


def main() -> None:
    torch.set_num_threads(1)
    gc.disable()
    plain: dict[str, float] = {}
    emulated: dict[str, float] = {}
    bystander: dict[str, float] = {}
    for _ in range(ROUNDS):  # side by side, so that a busy moment of the machine meets all three
        measure("cpu", plain)
        with emulated_cuda():
            measure("cuda", emulated)
            measure("cpu", bystander)
    print(f"torch {torch.__version__}, best of {ROUNDS} x {CALLS} calls, us a call (limit: {LIMIT:g} over plain)")
    print(f"{'':20}{'plain CPU':>10}{'emulated':>10}{'over':>8}{'CPU tensors meanwhile':>24}")
    for name, before in plain.items():
        print(f"{name:20}{before:10.2f}{emulated[name]:10.2f}{emulated[name] - before:8.2f}{bystander[name]:24.2f}")


if __name__ == "__main__":
    main()

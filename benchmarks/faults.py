"""What an armed but silent fault point costs a call, and what none armed costs: python benchmarks/faults.py

Each line is the least of 40 turns in this process's own time, with the bare function's beside it. The claim: under 1 us
armed, nothing otherwise.
The points at torch's functions have the same gate as `gc.enable`, the cheapest function of all, and so the same cost.
Outside the claim, and shown below it: `cuda.alloc` on a real device, where a dispatch mode sees every operator until
the fault is spent. Below each what a mode costs that does nothing: torch's part, which nothing in Python can save.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import pickle
import sys
import time
import timeit
from collections.abc import Callable, Iterator

from pytest_sglmem.emulated import emulated_cuda
from pytest_sglmem.faults import armed, parse
from pytest_sglmem.strikes import Armed

LIMIT_NS = 1000


def main() -> int:
    null = os.open(os.devnull, os.O_WRONLY)
    files = [open(os.devnull, "wb", buffering=0)]  # noqa: SIM115
    calls: dict[str, Callable[[], object]] = {
        "pickle.dumps@nth=1000000000=corrupt": lambda: pickle.dumps(None),
        "pickle.loads@nth=1000000000=corrupt": lambda: pickle.loads(b"N."),
        "gc.enable@nth=1000000000=skip": lambda: gc.enable(),
        "clock.time@nth=1000000000=jump(1)": lambda: time.time(),
        "file.fsync@every=1000000000=skip": lambda: _ignore(os.fsync, null),
        "file.write@nth=1000000000=enospc": lambda: files[-1].write(b"x"),
    }

    @contextlib.contextmanager
    def arm(text: str) -> Iterator[Armed]:
        # A file is struck that was opened while the fault was armed.
        with armed([parse(text, origin="benchmark")], rank=0, seed=0) as here, open(os.devnull, "wb", 0) as file:
            files.append(file)
            yield here
            files.pop()

    worst, lines = 0.0, [f"{'fault, armed but silent':<42}{'bare':>9}{'armed':>9}{'cost':>9}  (ns a call)"]
    for text, call in calls.items():
        bare, cost = _with_and_without(call, functools.partial(arm, text))
        lines.append(_line(text, bare, cost))
        worst = max(worst, cost - bare)
    with arm("step@nth=1000000000=keep-live") as here:
        lines.append(f"{'step@nth=1000000000=keep-live':<42}{'':>9}{_cpu_ns(here.before_step):>9.0f}")
    with armed((), rank=0, seed=0) as here:
        lines.append(f"{'nothing armed: before_step':<42}{'':>9}{_cpu_ns(here.before_step):>9.0f}")
    lines += _on_the_device()
    print(f"Python {sys.version.split()[0]}, {os.cpu_count()} cores")
    print("\n".join(lines))
    print(f"worst {worst:.0f} ns, limit {LIMIT_NS} ns: {'within' if worst < LIMIT_NS else 'OVER'}")
    return int(worst >= LIMIT_NS)


def _on_the_device() -> list[str]:
    """`cuda.alloc`, silent, on the device there is, for an operator that allocates and for one that does not."""
    import torch

    real = _has_gpu()
    fault = parse("cuda.alloc@nth=1000000000=oom", origin="benchmark")
    lines = []
    with contextlib.nullcontext() if real else emulated_cuda():
        ones = torch.ones(64, device="cuda")
        operators = {"torch.empty": lambda: torch.empty(64, device="cuda"), "Tensor.add_": lambda: ones.add_(1)}
        for name, call in operators.items():
            bare, cost = _with_and_without(call, lambda: armed([fault], rank=0, seed=0))
            lines.append(_line(f"cuda.alloc, {'real' if real else 'emulated'} device: {name}", bare, cost))
            lines.append(
                _line("  a dispatch mode that does nothing", *_with_and_without(call, _mode_that_does_nothing))
            )
    return lines


def _with_and_without(
    call: Callable[[], object], context: Callable[[], contextlib.AbstractContextManager[object]]
) -> tuple[float, float]:
    """Nanoseconds of this process's time a call, without and within `context`, turn by turn: the least of each."""
    bare, within = [], []
    for _ in range(40):
        bare.append(_cpu_ns(call))
        with context():
            within.append(_cpu_ns(call))
    return min(bare), min(within)


def _cpu_ns(call: Callable[[], object], calls: int = 500) -> float:
    return timeit.timeit(call, number=calls, timer=time.process_time) / calls * 1e9


def _line(what: str, bare: float, cost: float) -> str:
    return f"{what:<42}{bare:>9.0f}{cost:>9.0f}{cost - bare:>9.0f}"


def _mode_that_does_nothing() -> contextlib.AbstractContextManager[object]:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Nothing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return func(*args, **(kwargs or {}))

    return Nothing()


def _has_gpu() -> bool:
    import torch

    return torch.version.cuda is not None and torch.cuda.is_available()


def _ignore(call: Callable[[int], object], number: int) -> None:
    try:
        call(number)
    except OSError:
        pass


if __name__ == "__main__":
    sys.exit(main())

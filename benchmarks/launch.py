"""What the claims about speed of worlds rest on: ours and `torch.multiprocessing.spawn` side by side in one run.

    python benchmarks/launch.py [--size 8] [--device emulated|cuda] [--quick]

It prints a table of medians, the ratio where there is one, and the goal. Cores, versions and load are in its first
line. What is compared, row by row, "other" in brackets:

- a fresh world: fork ranks, make the group, call `int` in each, end them, with the server running (spawn with a
  function that makes the same group and leaves it: imports of torch, group, end)
- the first world of a session: the server's imports too (the same spawn)
- an empty call: `world.run(int)`, from the call to the list of results (one `dist.barrier()` of the same world over
  gloo, as the median rank sees it); both in turns, five times a hundred
- idle memory: proportional set size of all ranks once up, nothing called (spawn's, after its group is made). With
  --device cuda also that of emulated ranks, where nothing is CUDA's
- a killed rank: from just before it kills itself, its peers in a barrier, to the exception in pytest's process
- a silent rank: how much later than its limit of 1 s it was reported
- loading the plugin: processor time (user and system) of a session with one test that does nothing, compiled files in
  place (the same with `-p no:sglmem`); in turns, medians of 30
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from pytest_sglmem.launch import Launcher, Spec
from pytest_sglmem.world import RankDied, RankSilent, World


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=8)
    parser.add_argument("--device", default="emulated", choices=("emulated", "cuda"))
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    asked = parser.parse_args()
    repeats = 3 if asked.quick else 7
    rows = list(measured(asked.size, asked.device, repeats))
    import torch

    print(f"\n{os.cpu_count()} cores (load {os.getloadavg()[0]:.1f}), Python {platform.python_version()}, ", end="")
    print(f"torch {torch.__version__}, ", end="")
    print(f"{asked.size} ranks, device {asked.device}, median of {repeats} (spawn: of 2)")
    print(f"{'':46} {'ours':>10} {'other':>10} {'ratio':>8}  goal")
    for name, ours, other, goal in rows:
        ratio = f"{other / ours:8.1f}" if other is not None else f"{'':8}"
        theirs = f"{other:10.4f}" if other is not None else f"{'':10}"
        print(f"{name:46} {ours:10.4f} {theirs} {ratio}  {goal}")


def measured(size: int, device: str, repeats: int):
    """Rows of (what, ours, other or None, goal), in seconds or MB."""
    launcher = Launcher()
    try:
        spec = Spec(size=size, device=device)  # type: ignore[arg-type]
        first = seconds(lambda: World.start(launcher, spec).close())
        fresh = median(lambda: fresh_world(launcher, spec), repeats)
        spawned = median(lambda: spawn(size, device), 2)
        yield "first world of a session, s", first, spawned, ""
        goal = "ratio >= 20" if device == "emulated" else "ratio >= 3"
        yield "fresh world, an empty call, its end, s", fresh, spawned, goal
        world = World.start(launcher, spec)
        ours = idle_memory([process.pid for process in world._processes.values()])
        call, barrier = interleaved(world)
        yield "empty call in shared ranks, s", call, barrier, "ratio >= 1 (one gloo barrier)"
        yield "shared ranks, a new process group, s", median(world.renew, repeats), spawned, ""
        world.close()
        yield "idle memory of all ranks (PSS), MB", ours, spawned_memory(size, device), "ratio >= 4 (CPU)"
        if device == "cuda":
            world = World.start(launcher, Spec(size=size))
            ours = idle_memory([process.pid for process in world._processes.values()])
            world.close()
            yield "the same without CUDA, MB", ours, spawned_memory(size, "emulated"), "ratio >= 4"
        yield "a killed rank is reported after, s", median(lambda: killed(launcher, spec), repeats), None, "<= 0.1"
        yield "a silent rank, after its limit, s", median(lambda: silent(launcher, spec), 2), None, "<= 1"
        with_it, without = plugin_load(10 if repeats < 5 else 30)
        yield "a session with the plugin, s", with_it, without, f"difference < 0.02 (is {with_it - without:.4f})"
    finally:
        launcher.close()


def seconds(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def median(call: Callable[[], object], repeats: int) -> float:
    """The median time of a call; what returns a number is taken at its word."""
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        own = call()
        times.append(own if isinstance(own, float) else time.perf_counter() - begun)
    return statistics.median(times)


def fresh_world(launcher: Launcher, spec: Spec) -> None:
    world = World.start(launcher, spec)
    world.run(int)
    world.close()


def interleaved(world: World) -> tuple[float, float]:
    """An empty call to all ranks, and a barrier among them, taken in turns."""

    def barriers(count: int) -> float:
        import time

        import torch.distributed as dist

        dist.barrier()
        begun = time.perf_counter()
        for _ in range(count):
            dist.barrier()
        return (time.perf_counter() - begun) / count

    calls, waits = [], []
    for _ in range(5):
        waits.append(statistics.median(world.run(barriers, 100)))
        calls.append(statistics.median(seconds(lambda: world.run(int)) for _ in range(100)))
    return statistics.median(calls), statistics.median(waits)


def killed(launcher: Launcher, spec: Spec) -> float:
    """From a rank's last act to the exception in pytest's process."""

    def die(path: str) -> None:
        import torch.distributed as dist

        if dist.get_rank() == 1:
            Path(path).write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    world = World.start(launcher, spec)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "when")
        try:
            world.run(die, str(path))
        except RankDied:
            return time.monotonic() - float(path.read_text())
        finally:
            world.close()
    raise AssertionError("nobody died")


def silent(launcher: Launcher, spec: Spec) -> float:
    world = World.start(launcher, spec)
    begun = time.perf_counter()
    try:
        world.run(time.sleep, 3600, timeout=1.0)
    except RankSilent:
        return time.perf_counter() - begun - 1.0
    finally:
        world.close()
    raise AssertionError("nobody was silent")


def spawned_rank(rank: int, store: str, size: int, device: str, wait: str) -> None:
    import torch
    import torch.distributed as dist

    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        torch.ones(1, device="cuda")
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    dist.barrier()  # a rank that leaves while another still connects to it breaks that one's group
    if wait:
        Path(wait, str(rank)).write_text(str(os.getpid()))
        while Path(wait).exists():
            time.sleep(0.02)
    dist.destroy_process_group()


def spawn(size: int, device: str, wait: str = "") -> None:
    import torch.multiprocessing

    with tempfile.TemporaryDirectory() as folder:
        args = (str(Path(folder, "store")), size, device, wait)
        torch.multiprocessing.spawn(spawned_rank, args=args, nprocs=size)


def spawned_memory(size: int, device: str) -> float:
    import threading

    folder = tempfile.mkdtemp()
    thread = threading.Thread(target=spawn, args=(size, device, folder))
    thread.start()
    while len(os.listdir(folder)) < size:
        time.sleep(0.05)
    time.sleep(0.5)
    memory = idle_memory([int(path.read_text()) for path in Path(folder).iterdir()])
    shutil.rmtree(folder)
    thread.join()
    return memory


def idle_memory(pids: list[int]) -> float:
    """Proportional set size in MB: shared pages count a part in each process that shares them."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1])
    return total / 1024


def plugin_load(repeats: int) -> tuple[float, float]:
    """Processor time of a session without any test of ours, with the plugin and without it."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "test_nothing.py").write_text("def test_nothing():\n    pass\n")
        environ = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        environ["PYTHONPYCACHEPREFIX"] = str(Path(folder, "compiled"))

        def session(*args: str) -> float:
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *args, folder]
            process = subprocess.Popen(command, env=environ, cwd=folder, stdout=subprocess.DEVNULL)
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            assert process.returncode == 0, "the session failed"
            return used.ru_utime + used.ru_stime

        session()
        pairs = [(session(), session("-p", "no:sglmem")) for _ in range(repeats)]
    with_it, without = zip(*pairs, strict=True)
    return statistics.median(with_it), statistics.median(without)


if __name__ == "__main__":
    main()

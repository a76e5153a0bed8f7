"""Faults in ranks: every point with every action that it takes is seen to strike; by which tests says `docs/faults.md`.

`TestAnywhere` has the actions that any point takes, the rest those of single points with what must notice them; the
page is made from what fires in these tests, and a test at the end holds it against `POINTS`.
"""

from __future__ import annotations

import contextlib

import pytest
from fault_table import as_the_table_says  # noqa: F401 (every test here holds its line of the table)

from pytest_sglmem.faults import POINTS, FaultError, armed, parse
from pytest_sglmem.judge import LeakError
from pytest_sglmem.live_bytes import OutputsDiffer
from pytest_sglmem.proof import beside
from pytest_sglmem.world import RankDied, RankRaised, RankSilent

SIZES = [1 << 10, 1 << 12, 1 << 11]


def reach(point):
    """Make the calls that reach `point` once."""
    import gc
    import os
    import pickle
    import tempfile
    import time

    import torch
    import torch.distributed as dist
    from torch.multiprocessing.reductions import reduce_tensor

    def open_neighbours():
        mine = torch.ones(64, device="cuda")
        handles = [None] * dist.get_world_size()
        dist.all_gather_object(handles, reduce_tensor(mine))
        rebuild, args = handles[(dist.get_rank() + 1) % dist.get_world_size()]
        for turn in range(dist.get_world_size()):  # the last rank, which is struck, must not take its block from others
            if turn == dist.get_rank():
                theirs = rebuild(*args)
            dist.barrier()
        del theirs
        dist.barrier()

    def write():
        with tempfile.TemporaryFile(buffering=0) as file:
            file.write(b"x")

    def sync_file():
        with tempfile.TemporaryFile() as file:
            os.fsync(file.fileno())

    {
        "ipc.export": lambda: reduce_tensor(torch.ones(64, device="cuda")),
        "ipc.open": open_neighbours,
        "ipc.release": open_neighbours,
        "ipc.collect": torch.cuda.ipc_collect,
        "cuda.alloc": lambda: torch.ones(64, device="cuda"),
        "cuda.synchronize": torch.cuda.synchronize,
        "dist.barrier": dist.barrier,
        "dist.collective": lambda: dist.all_reduce(torch.ones(4, device="cuda")),
        "gc.enable": gc.enable,
        "pickle.dumps": lambda: pickle.dumps(1),
        "pickle.loads": lambda: pickle.loads(b"N."),
        "clock.time": time.time,
        "file.write": write,
        "file.fsync": sync_file,
    }[point]()


def one_step():
    return lambda _: None


def reach_in(world, point, **limits):
    if point == "step":
        return world.trace(one_step, [0], cycles=1, warmup=0, **limits).cycles
    return world.run(reach, point, **limits)


def points(action):
    return [pytest.param(name, id=name) for name, point in POINTS.items() if action in point.actions]


@pytest.mark.filterwarnings("ignore::pytest_sglmem.IpcContractWarning")  # an export that nobody opens reaches the point
class TestAnywhere:
    """The actions that any point takes. An `ipc.open` takes two ranks; the rest is shown in a world of one."""

    @pytest.fixture
    def place(self, request, point):
        size = 2 if point in ("ipc.open", "ipc.release") else 1
        request.applymarker(pytest.mark.world(size=size))
        return request.getfixturevalue("world"), size - 1

    @pytest.mark.parametrize("point", points("raise"))
    def test_raise(self, place, inject, point):
        world, rank = place
        with inject(f"{point}@rank={rank}=raise(KeyError)") as fault, pytest.raises(RankRaised) as caught:
            reach_in(world, point, timeout=5)
        assert (caught.value.type, caught.value.ranks) == ("KeyError", (rank,))
        assert "injected by" in caught.value.text
        assert fault.fired[rank] == 1

    @pytest.mark.parametrize("point", points("delay"))
    def test_delay(self, place, inject, point):
        world, rank = place
        with inject(f"{point}@rank={rank}=delay(1)") as fault:
            reach_in(world, point)
        assert fault.fired[rank] >= 1

    @pytest.mark.parametrize("point", points("kill"))
    def test_kill(self, place, inject, point):
        world, rank = place
        with inject(f"{point}@rank={rank}=kill"), pytest.raises(RankDied) as caught:
            reach_in(world, point)
        assert (caught.value.exit_code, caught.value.ranks) == (-9, (rank,))
        assert f"injected {point}@rank={rank}=kill" in world.outputs[rank]

    @pytest.mark.parametrize("point", points("exit"))
    def test_exit(self, place, inject, point):
        world, rank = place
        with inject(f"{point}@rank={rank}=exit(3)"), pytest.raises(RankDied) as caught:
            reach_in(world, point)
        assert (caught.value.exit_code, caught.value.ranks) == (3, (rank,))

    @pytest.mark.parametrize("point", points("hang"))
    def test_hang(self, place, inject, point):
        world, rank = place
        with inject(f"{point}@rank={rank}=hang"), pytest.raises(RankSilent) as caught:
            reach_in(world, point, timeout=0.5)
        assert rank in caught.value.ranks


def exchange():
    """A correct exchange by a handle a peer: what a fault makes of it is the fault's doing."""
    import torch
    import torch.distributed as dist
    from torch.multiprocessing.reductions import reduce_tensor

    rank, size = dist.get_rank(), dist.get_world_size()
    peers = [peer for peer in range(size) if peer != rank]

    def step(width):
        staging = torch.zeros(size, width, device="cuda")
        handles = [None] * size
        dist.all_gather_object(handles, {peer: reduce_tensor(staging) for peer in peers})
        opened = {}
        for peer in peers:
            rebuild, args = handles[peer][rank]
            opened[peer] = rebuild(*args)
        for target in (staging, *opened.values()):
            target[rank].fill_(rank + 1)
        torch.cuda.synchronize()
        dist.barrier()
        received = staging.clone()
        torch.cuda.synchronize()
        dist.barrier()
        del staging, target  # before the peers close it: it waits in the limbo for somebody to collect
        opened.clear()
        dist.barrier()
        torch.cuda.ipc_collect()
        return received

    return step


def verdict_under(world, live_bytes, fault, inject):
    with inject(fault) as struck:
        trace = world.trace(exchange, SIZES, cycles=3, timeout=30)
    assert sum(struck.fired) > 0
    return trace, live_bytes.judge(trace)


# fault -> the IPC faults that must be named; None: any leak
LEAKS = {
    "ipc.export=one-handle": {"over-released"},
    "ipc.export=duplicate": {"never-opened"},
    "ipc.export=retain": None,
    "ipc.open=retain": {"still-open"},
    "ipc.open=duplicate": {"over-released"},
    "ipc.open=skip": {"never-opened"},
    "ipc.release=skip": {"still-open"},
    "ipc.release=duplicate": {"over-released"},
    "cuda.alloc@every=2=retain": None,
    "step=retain": None,
}


@pytest.mark.world(size=3)
class TestLeaks:
    def test_the_exchange_is_flat(self, world, live_bytes):
        verdict = live_bytes.assert_flat(world.trace(exchange, SIZES, cycles=3))
        assert (verdict.verdict, verdict.late_bytes, verdict.ipc.faults) == ("flat", (0, 0, 0), ())

    @pytest.mark.parametrize(("fault", "kinds"), LEAKS.items(), ids=LEAKS)
    @pytest.mark.filterwarnings("ignore::pytest_sglmem.IpcContractWarning")
    def test_is_a_leak(self, world, live_bytes, inject, fault, kinds):
        trace, verdict = verdict_under(world, live_bytes, fault, inject)
        assert verdict.verdict == "leak"
        assert kinds is None or kinds <= {broken.kind for broken in verdict.ipc.faults}
        with pytest.raises(LeakError):
            live_bytes.assert_flat(trace)

    @pytest.mark.filterwarnings("ignore::pytest_sglmem.IpcContractWarning")
    def test_so_many_bytes_on_one_rank(self, world, live_bytes, inject):
        _, verdict = verdict_under(world, live_bytes, "ipc.open@rank=2=retain(4096)", inject)
        assert verdict.bytes_per_cycle == (0, 0, 2 * len(SIZES) * 4096)

    def test_so_many_bytes_with_each_allocation(self, world, live_bytes, inject):
        with inject("cuda.alloc@rank=1=retain(4096)") as struck:
            trace = world.trace(allocating, [64, 128], cycles=3, warmup=1)
        assert struck.fired == [0, 4 * 2, 0]
        assert live_bytes.judge(trace).bytes_per_cycle == (0, 2 * 4096, 0)

    def test_a_collect_left_out_is_late(self, world, live_bytes, inject):
        _, verdict = verdict_under(world, live_bytes, "ipc.collect=skip", inject)
        assert any(verdict.late_bytes)

    def test_a_barrier_left_out_is_late_where_a_rank_is(self, world, live_bytes, inject):
        with contextlib.ExitStack() as late:
            for delay in beside("dist.barrier=skip"):
                late.enter_context(inject(delay.text))
            assert not any(live_bytes.judge(world.trace(exchange, SIZES, cycles=3)).late_bytes)
            _, verdict = verdict_under(world, live_bytes, "dist.barrier=skip", inject)
        assert verdict.late_bytes[0] == 0
        assert min(verdict.late_bytes[1:]) > 0

    def test_one_byte_of_an_opened_block(self, world, live_bytes, inject):
        trace, verdict = verdict_under(world, live_bytes, "ipc.open=corrupt", inject)
        assert verdict.verdict == "flat"
        with pytest.raises(OutputsDiffer):
            live_bytes.assert_same_outputs(trace, world.trace(exchange, SIZES, cycles=3))


def allocating():
    import torch

    return lambda n: torch.empty(n, device="cuda")


def allocated():
    import torch

    torch.ones(64, device="cuda")
    torch.ones(64, device="cpu")
    return torch.ones(64, device="cuda") + 1


def synchronize_no_device():
    import torch

    torch.cuda.synchronize(99)


def summed():
    import torch
    import torch.distributed as dist

    ones = torch.ones(4, device="cuda")
    dist.all_reduce(ones)
    return ones.cpu().tolist()


def gathered():
    import torch.distributed as dist

    found = [None, None]
    dist.all_gather_object(found, dist.get_rank())
    return found


@pytest.mark.world(size=2)
class TestOthers:
    def test_out_of_memory(self, world, inject):
        with inject("cuda.alloc@rank=1,nth=3=oom") as fault, pytest.raises(RankRaised) as caught:
            world.run(allocated)
        assert caught.value.ranks == (1,)
        assert caught.value.type.endswith("OutOfMemoryError")
        assert fault.fired == [0, 1]

    def test_synchronize_left_out(self, world, inject):
        with inject("cuda.synchronize@rank=0=skip") as fault, pytest.raises(RankRaised) as caught:
            world.run(synchronize_no_device)
        assert caught.value.ranks == (1,)
        assert fault.fired == [1, 0]

    def test_one_rank_leaves_a_barrier_out(self, world, inject):
        with inject("dist.barrier@rank=1=skip"), pytest.raises(RankSilent) as caught:
            world.run(reach, "dist.barrier", timeout=1)
        assert caught.value.ranks == (0,)

    def test_all_ranks_leave_it_out(self, world, inject):
        with inject("dist.barrier=skip") as fault:
            world.run(reach, "dist.barrier")
        assert fault.fired == [1, 1]

    def test_a_collective_left_out(self, world, inject):
        with inject("dist.collective=skip"):
            assert world.run(summed) == [[1.0] * 4] * 2
        assert world.run(summed) == [[2.0] * 4] * 2

    def test_one_byte_of_a_collective(self, world, inject):
        with inject("dist.collective@rank=1=corrupt") as fault:
            right, wrong = world.run(summed)
        assert right == [2.0] * 4
        assert wrong[0] != 2.0
        assert wrong[1:] == [2.0] * 3
        assert fault.fired == [0, 1]

    def test_objects_have_no_byte_to_change(self, world, inject):
        with inject("dist.collective=corrupt") as fault:
            assert world.run(gathered) == [[0, 1]] * 2
        assert fault.fired == [0, 0]

    def test_no_space_in_a_rank(self, world, inject):
        with inject("file.fsync@rank=1=enospc"), pytest.raises(RankRaised, match="No space left on device") as caught:
            world.run(reach, "file.fsync")
        assert caught.value.ranks == (1,)

    def test_a_rank_that_is_not_there(self, world, inject):
        with pytest.raises(FaultError, match="names rank 2"), inject("dist.barrier@rank=2=skip"):
            pass

    def test_the_harness_itself_is_not_struck(self, world, live_bytes, inject):
        faults = ("dist.barrier", "dist.collective", "cuda.synchronize", "ipc.collect", "gc.enable", "clock.time")
        with inject(f"{faults[0]}=raise(KeyError)") as barrier:
            live_bytes.assert_flat(world.trace(one_step, [0, 1], cycles=2))
        assert barrier.fired == [0, 0]
        for point in faults[1:]:
            with inject(f"{point}=raise(KeyError)"):
                live_bytes.assert_flat(world.trace(one_step, [0, 1], cycles=2))

    @pytest.mark.inject("dist.barrier@nth=2=raise(KeyError)")
    def test_by_marker(self, world):
        world.run(reach, "dist.barrier")
        with pytest.raises(RankRaised):
            world.run(reach, "dist.barrier")
        assert world.fired() == {"dist.barrier@nth=2=raise(KeyError)": (1, 1)}

    def test_everything_is_put_back(self, world, inject):
        before = world.run(names)
        for point in POINTS:
            with inject(f"{point}@nth=99=delay(1)"):
                pass
        assert world.run(names) == before


def names():
    import builtins
    import gc
    import os
    import pickle
    import time

    import torch
    import torch.distributed as dist

    places = [pickle.dumps, pickle.loads, time.time, gc.enable, os.fsync, builtins.open, dist.barrier, dist.all_reduce]
    places += [torch.cuda.synchronize, torch.cuda.ipc_collect, torch.UntypedStorage._share_cuda_]
    places += [torch.UntypedStorage._new_shared_cuda]
    return [getattr(place, "__module__", "") + getattr(place, "__code__", place).__repr__()[:30] for place in places]


def test_arming_without_torch_in_the_pytest_process_needs_no_world():
    with armed([parse("ipc.export=one-handle", origin="here")], rank=-1, seed=0) as here:
        assert here.fired == {"ipc.export=one-handle": 0}

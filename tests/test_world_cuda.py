"""Worlds on real GPUs. Everything here is skipped where there is none; NCCL's tests need two."""

from __future__ import annotations

import os
import time

import pytest

from pytest_sglmem.launch import Spec, Unavailable, no_cuda, visible_gpus
from pytest_sglmem.world import RankDied, RankSilent, World

pytestmark = pytest.mark.skipif(bool(no_cuda()), reason=no_cuda() or "CUDA is here")
two_gpus = pytest.mark.skipif(visible_gpus() < 2, reason="needs two GPUs")


@pytest.fixture
def start(launcher, tmp_path):
    worlds = []

    def start(size, **spec):
        worlds.append(World.start(launcher, Spec(size=size, device="cuda", artifacts=str(tmp_path), **spec)))
        return worlds[-1]

    yield start
    for world in worlds:
        world.close()


def total():
    import torch
    import torch.distributed as dist

    value = torch.tensor([dist.get_rank() + 1], device="cuda")
    dist.all_reduce(value)
    torch.cuda.synchronize()
    return int(value), str(dist.get_backend()), torch.cuda.current_device()


def test_the_server_has_not_touched_cuda(start):
    assert start(2).run(lambda: __import__("torch").cuda._is_in_bad_fork()) == [False, False]


def test_ranks_share_a_gpu_with_gloo_where_there_are_too_few(start):
    size = visible_gpus() + 1
    world = start(size)
    assert world.backend == "gloo"
    expected = size * (size + 1) // 2
    assert [answer[:2] for answer in world.run(total)] == [(expected, "gloo")] * size
    assert world.run(total)[-1][2] == (size - 1) % visible_gpus()


def test_nccl_without_a_gpu_a_rank_is_a_reason_to_skip(start):
    with pytest.raises(Unavailable, match="NCCL needs a GPU a rank"):
        start(visible_gpus() + 1, backend="nccl")


def test_device_tensors_arrive_on_the_cpu(start):
    (value,) = start(1).run(lambda: __import__("torch").ones(3, device="cuda"))
    assert str(value.device) == "cpu"


def test_a_rank_killed_with_memory_on_the_gpu(start):
    def die():
        import torch

        kept = torch.ones(1 << 28, device="cuda")
        torch.cuda.synchronize()
        os.kill(os.getpid(), 9)
        return kept

    with pytest.raises(RankDied, match="killed by SIGKILL"):
        start(1).run(die)


def test_a_kernel_that_does_not_end_is_silence_and_the_world_goes(start):
    def never_returns():
        import torch

        torch.cuda._sleep(1 << 40)
        torch.cuda.synchronize()

    with pytest.raises(RankSilent, match="never_returns"):
        start(1, timeout=2.0).run(never_returns)


@two_gpus
def test_nccl_with_a_gpu_a_rank(start):
    world = start(2)
    assert world.backend == "nccl"
    both = "cpu:gloo,cuda:nccl"  # as torch itself says it: host tensors have a group too
    assert world.run(total) == [(3, both, 0), (3, both, 1)]
    world.renew()
    assert world.run(total) == [(3, both, 0), (3, both, 1)]


@two_gpus
def test_a_hang_in_nccl_leaves_the_flight_recorders_dump(start, tmp_path):
    def wanders_off():
        import torch
        import torch.distributed as dist

        total()
        if dist.get_rank() == 1:
            time.sleep(3600)
        dist.all_reduce(torch.ones(1, device="cuda"))
        torch.cuda.synchronize()

    with pytest.raises(RankSilent, match="rank 1 is in wanders_off"):
        start(2, timeout=10.0).run(wanders_off)
    assert sorted(path.name for path in tmp_path.glob("nccl-flight*")) == ["nccl-flight-rank-0", "nccl-flight-rank-1"]
    assert all(path.stat().st_size for path in tmp_path.glob("nccl-flight*"))


@two_gpus
def test_whole_gpus_are_taken_and_given_back(start):
    world = start(2, whole_gpus=True)
    assert [answer[2] for answer in world.run(total)] == [0, 1]
    world.close()
    assert start(2, whole_gpus=True).run(total)[0][0] == 3

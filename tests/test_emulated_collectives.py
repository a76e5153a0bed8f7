"""torch.distributed on emulated tensors: nccl served by gloo, results as NCCL gives them, no byte that comes back late.

With `--sglmem-device cuda` on a machine of two GPUs the same functions run over NCCL itself.
"""

from __future__ import annotations

import re

import pytest

from pytest_sglmem import RankRaised

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.world(size=2, init=False)
MIB = 1 << 20


def begin(**how):
    import warnings

    import torch.distributed as dist

    warnings.simplefilter("ignore", FutureWarning)  # names that torch 2.13 renames, and 2.6 has only so
    dist.init_process_group("nccl", **how)
    return dist, dist.get_rank()


def or_skip(run, *args, **kwargs):
    try:
        return run(*args, **kwargs)
    except RankRaised as error:
        if re.search("(?i)with gloo|gloo does not support", str(error)):
            pytest.skip("the gloo of this torch lacks an operation that NCCL has")
        raise


def results():
    dist, rank = begin(device_id=torch.device("cuda", torch.cuda.current_device()))

    def mine(n=4):
        return torch.arange(n, device="cuda", dtype=torch.float32) + 10 * rank

    out = {}
    given = mine()
    dist.all_reduce(given)
    out["all_reduce"] = given
    given = mine()
    dist.all_reduce(given, op=dist.ReduceOp.AVG)
    out["average"] = given
    given = mine().bfloat16()
    dist.all_reduce(given, op=dist.ReduceOp.MAX)
    out["bfloat16"] = given.float()
    given = mine()
    dist.broadcast(given, src=1)
    out["broadcast"] = given
    parts = [torch.empty(4, device="cuda") for _ in range(2)]
    dist.all_gather(parts, mine())
    out["all_gather"] = torch.cat(parts)
    whole = torch.empty(8, device="cuda")
    dist.all_gather_into_tensor(whole, mine())
    out["all_gather_into_tensor"] = whole
    half = torch.empty(2, device="cuda")
    dist.reduce_scatter_tensor(half, mine())
    out["reduce_scatter_tensor"] = half
    half = torch.empty(2, device="cuda")
    dist.reduce_scatter(half, list(mine().chunk(2)))
    out["reduce_scatter"] = half
    whole = torch.empty(4, device="cuda")
    dist.all_to_all_single(whole, mine())
    out["all_to_all_single"] = whole
    uneven = torch.empty(3 if rank == 0 else 5, device="cuda")
    splits = ([1, 2], [1, 3]) if rank == 0 else ([3, 2], [2, 2])
    dist.all_to_all_single(uneven, mine(), *splits)
    out["all_to_all_single uneven"] = uneven
    parts = [torch.empty(2, device="cuda") for _ in range(2)]
    dist.all_to_all(parts, list(mine().chunk(2)))
    out["all_to_all"] = torch.cat(parts)
    other = torch.empty(4, device="cuda")
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, mine(), 1 - rank), dist.P2POp(dist.irecv, other, 1 - rank)])
    for work in works:
        work.wait()
    out["batch_isend_irecv"] = other
    objects = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    dist.barrier(device_ids=[torch.cuda.current_device()])
    assert objects == [{"rank": 0}, {"rank": 1}]
    assert all(made.is_cuda for made in out.values())
    dist.destroy_process_group()
    return {name: made.tolist() for name, made in out.items()}


def test_results(world):
    """torch 2.6's gloo has no average and no reduce_scatter, and says so; torch 2.13's has both."""
    first, second = or_skip(world.run, results)
    assert first["all_reduce"] == second["all_reduce"] == [10, 12, 14, 16]
    assert first["average"] == [5, 6, 7, 8]
    assert first["bfloat16"] == first["broadcast"] == [10, 11, 12, 13]
    assert first["all_gather"] == first["all_gather_into_tensor"] == [0, 1, 2, 3, 10, 11, 12, 13]
    assert (first["reduce_scatter_tensor"], second["reduce_scatter_tensor"]) == ([10, 12], [14, 16])
    assert (first["reduce_scatter"], second["reduce_scatter"]) == ([10, 12], [14, 16])
    assert (first["all_to_all_single"], second["all_to_all_single"]) == ([0, 1, 10, 11], [2, 3, 12, 13])
    assert first["all_to_all_single uneven"] == [0, 10, 11]
    assert second["all_to_all_single uneven"] == [1, 2, 3, 12, 13]
    assert (first["all_to_all"], second["all_to_all"]) == ([0, 1, 10, 11], [2, 3, 12, 13])
    assert (first["batch_isend_irecv"], second["batch_isend_irecv"]) == ([10, 11, 12, 13], [0, 1, 2, 3])


def averages():
    dist, rank = begin()
    out = []
    for asynchronously in (False, True):
        half, given = torch.empty(2, device="cuda"), torch.arange(4, device="cuda", dtype=torch.float32) + 10 * rank
        work = dist.reduce_scatter_tensor(half, given, op=dist.ReduceOp.AVG, async_op=asynchronously)
        if asynchronously:
            work.wait()
        out.append(half.tolist())
    dist.destroy_process_group()
    return out


def test_a_reduce_scatter_averages(world):
    """gloo up to some torch sums instead, and says nothing."""
    assert or_skip(world.run, averages) == [[[5, 6]] * 2, [[7, 8]] * 2]


def names():
    dist, _ = begin()
    second = dist.new_group([0, 1], backend="gloo")
    third = dist.new_group([0, 1])
    said = [str(dist.get_backend(group)) for group in (None, second, third)]
    refused = []
    for group in (None, third):
        try:
            dist.all_reduce(torch.ones(2), group=group)
        except RuntimeError as error:
            refused.append(str(error))
    dist.all_reduce(torch.ones(2), group=second)
    assert dist.is_nccl_available()
    assert torch.cuda.nccl.version() >= (2, 0)
    dist.destroy_process_group()
    return said, refused


def test_a_group_is_what_it_was_asked_to_be(world):
    for said, refused in world.run(names):
        assert said == ["nccl", "gloo", "nccl"]
        assert len(refused) == 2
        assert all("No backend type associated with device type cpu" in error for error in refused)


def bytes_after():
    dist, _ = begin()
    other = torch.empty(2 * MIB, dtype=torch.uint8, device="cuda")
    given = torch.ones(MIB, dtype=torch.uint8, device="cuda")
    dist.all_gather_into_tensor(other, given)
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    late = []
    for _ in range(200):
        given = torch.ones(MIB, dtype=torch.uint8, device="cuda")
        dist.all_reduce(given)
        dist.all_gather_into_tensor(other, given)
        del given
        late.append(torch.cuda.memory_allocated() - base)
    dist.destroy_process_group()
    return late


def test_no_byte_comes_back_late(world):
    """The given tensor replaces the first one: each time one MiB less than at the base, at once."""
    for late in world.run(bytes_after):
        assert set(late) == {-MIB}


def asynchronous():
    dist, rank = begin()
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    given = torch.full((MIB,), rank + 1, dtype=torch.uint8, device="cuda")
    kept = given[:4]
    work = dist.all_reduce(given, async_op=True)
    del given
    work.wait()
    torch.cuda.synchronize()
    first = kept.tolist()
    del kept, work
    left = torch.cuda.memory_allocated() - base
    dist.destroy_process_group()
    return first, left


def test_an_operation_under_way_keeps_its_tensors(world):
    for first, left in world.run(asynchronous):
        assert first == [3, 3, 3, 3]
        assert left == 0


REDUCE_SCATTERS = ("reduce_scatter_tensor", "reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base")


def scattering(name, asynchronously):
    import warnings

    import torch.distributed as dist

    warnings.simplefilter("ignore", FutureWarning)

    def step(n):
        given = torch.ones(2 * n, device="cuda")
        got = torch.empty(n, device="cuda")
        parts = list(given.chunk(2)) if name == "reduce_scatter" else given
        work = getattr(dist, name)(got, parts, async_op=asynchronously)
        if asynchronously:
            work.wait()
        assert got[:2].tolist() == [2, 2]
        return got

    return step


@pytest.mark.world(size=2)
@pytest.mark.parametrize("asynchronously", [False, True])
@pytest.mark.parametrize("name", REDUCE_SCATTERS)
def test_a_reduce_scatter_that_was_waited_for_keeps_nothing(world, live_bytes, name, asynchronously):
    """gloo's never says that it is completed."""
    if not hasattr(torch.distributed, name):
        pytest.skip(f"this torch has no {name}")
    live_bytes.assert_flat(or_skip(world.trace, scattering, [1000], cycles=3, args=(name, asynchronously)))


def waited_twice():
    dist, _ = begin()
    given = torch.ones(2 * MIB, dtype=torch.uint8, device="cuda")
    got = torch.empty(MIB, dtype=torch.uint8, device="cuda")
    work = dist.reduce_scatter_tensor(got, given, async_op=True)
    base = torch.cuda.memory_allocated()
    del given
    held = torch.cuda.memory_allocated() - base
    work.wait()
    left = torch.cuda.memory_allocated() - base
    first = got[:2].tolist()
    got.fill_(9)
    work.wait()
    second = got[:2].tolist()
    del work
    dist.destroy_process_group()
    return held, left, first, second


def test_a_reduce_scatter_holds_its_tensors_until_it_was_waited_for(world):
    """And a second wait writes nothing: the result may be another's memory by then."""
    if world.device == "cuda":
        pytest.skip("NCCL is done when its stream is")
    for held, left, first, second in or_skip(world.run, waited_twice):
        assert (held, left) == (0, -2 * MIB)
        assert (first, second) == ([2, 2], [9, 9])


def parallel_training():
    dist, rank = begin()
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Linear(4, 4).cuda(), device_ids=[torch.cuda.current_device()]
    )
    for _ in range(3):
        model.zero_grad()
        model(torch.full((2, 4), float(rank), device="cuda")).sum().backward()
    gradient = model.module.weight.grad
    assert gradient.is_cuda
    dist.destroy_process_group()
    return gradient[0].tolist()


def test_distributed_data_parallel(world):
    assert world.run(parallel_training) == [[1.0] * 4] * 2


def lent_to_gloo():
    """How many of the tensors that gloo was lent are there once the operations are done and their group has ended."""
    import weakref

    from pytest_sglmem.emulated import collectives

    lent = []
    real = collectives.without_owning

    def watched(tensor):
        lent.append(weakref.ref(alias := real(tensor)))
        return alias

    collectives.without_owning = watched
    try:
        dist, _ = begin()
        for _ in range(collectives.MANY + 3):
            dist.all_reduce(torch.ones(4, device="cuda"))
        dist.destroy_process_group()
    finally:
        collectives.without_owning = real
    return [one() is not None for one in lent]


def test_gloos_threads_are_never_the_last_to_let_go(world):
    """What they free takes the interpreter's lock, which a group's destructor holds while it waits for them."""
    if world.device == "cuda":
        pytest.skip("gloo under the emulated device")
    for held in world.run(lent_to_gloo):
        assert held == [False] * 3 + [True] * (len(held) - 3)


def end_with_work_held():
    """Which of the sleeps of this process there were while a group ended, and a Work and a model's buckets lived on."""
    import time

    slept = []
    real = time.sleep
    dist, _ = begin()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4).cuda())
    model(torch.ones(2, 4, device="cuda")).sum().backward()
    held = dist.all_reduce(torch.ones(4, device="cuda"), async_op=True)
    held.wait()
    time.sleep = lambda seconds: slept.append(seconds) or real(seconds)
    try:
        dist.destroy_process_group()
    finally:
        time.sleep = real
    return slept


def test_the_end_of_a_group_does_not_wait_for_what_somebody_still_holds(world):
    """A Work, and the buckets of DistributedDataParallel, hold tensors that gloo was lent as long as they live."""
    if world.device == "cuda":
        pytest.skip("gloo under the emulated device")
    assert world.run(end_with_work_held) == [[], []]

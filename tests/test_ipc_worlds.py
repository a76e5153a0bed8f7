"""Every kind of broken contract, broken on purpose between real processes, and programs that keep it.

On this machine's device: the emulated one, or a GPU with `--sglmem-device cuda`.
"""

import pytest

from pytest_sglmem import RankDied
from pytest_sglmem.ipc import ipc_audit

pytestmark = [pytest.mark.gpu_memory, pytest.mark.filterwarnings("ignore::pytest_sglmem.IpcContractWarning")]
MIB = 1 << 20


def audited(body):
    """The audit of `body(rank, size)`, which runs in every rank between two barriers; what each rank found."""

    def run():
        import torch
        import torch.distributed as dist

        with ipc_audit() as found:
            body(dist.get_rank(), dist.get_world_size())
            torch.cuda.synchronize()
        return found.summary

    return run


def send(thing):
    """What rank 0 has, in every rank."""
    import torch.distributed as dist

    box = [thing]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def exchange(handles):
    """`handles[peer]` of every rank, to that peer: the handles meant for this rank, by who gave them."""
    import torch.distributed as dist

    everybodys = [None] * dist.get_world_size()
    dist.all_gather_object(everybodys, handles)
    me = dist.get_rank()
    return {rank: theirs[me] for rank, theirs in enumerate(everybodys) if rank != me}


def block():
    import torch

    return torch.zeros(MIB, dtype=torch.uint8, device="cuda")


def reduce(tensor):
    from torch.multiprocessing.reductions import reduce_tensor

    return reduce_tensor(tensor)


def rebuild(reduced):
    function, args = reduced
    return function(*args)


def barrier():
    import torch
    import torch.distributed as dist

    torch.cuda.synchronize()
    dist.barrier()


def fault_of(world, body):
    """The one fault that every rank says alike."""
    summaries = world.run(audited(body))
    assert all(summary == summaries[0] for summary in summaries)
    (fault,) = summaries[0].faults
    return fault


def told(fault):
    return fault.kind, fault.opens, fault.counter, fault.handles, fault.bytes, fault.by_ranks, fault.exporters


def one_handle_for_all(rank, size):
    staging = block()
    handles = exchange([reduce(staging)] * size)  # <- one handle, exported once
    views = [rebuild(handle) for handle in handles.values()]
    barrier()
    del views
    barrier()


@pytest.mark.world(size=8)
def test_one_handle_for_seven_peers(world):
    fault = fault_of(world, one_handle_for_all)
    everybody = tuple(range(8))
    assert told(fault) == ("over-released", 7, -6, 8, 8 * MIB, everybody, everybody)
    assert "test_ipc_worlds.py" in fault.site
    assert "one_handle_for_all" in fault.stack[1]
    assert "rebuild" in fault.open_sites[0]


def a_handle_a_peer(rank, size):
    staging = block()
    handles = exchange([None if peer == rank else reduce(staging) for peer in range(size)])
    views = [rebuild(handle) for handle in handles.values()]
    barrier()
    del views
    barrier()


@pytest.mark.world(size=8)
def test_a_handle_a_peer_is_clean(world):
    summary = world.run(audited(a_handle_a_peer))[0]
    assert (summary.exports, summary.opens, summary.faults) == (56, 56, ())
    assert len(summary.pairs) == 56
    assert all((pair.opens, pair.still_open) == (1, 0) for pair in summary.pairs)


@pytest.mark.world(size=2)
def test_opened_twice_by_one_process(world):
    def body(rank, size):
        reduced = send(reduce(block()) if rank == 0 else None)
        if rank == 1:
            views = [rebuild(reduced), rebuild(reduced)]
            del views
        barrier()

    assert told(fault_of(world, body)) == ("over-released", 2, -1, 1, MIB, (1,), (0,))


@pytest.mark.world(size=2)
def test_found_before_any_byte_has_leaked(world):
    kept = {}

    def body(rank, size):
        if rank == 0:
            kept["block"] = block()
        reduced = send(reduce(kept["block"]) if rank == 0 else None)
        for _ in range(4 * rank):
            rebuild(reduced)
        barrier()

    assert told(fault_of(world, body)) == ("over-released", 4, -3, 1, MIB, (1,), (0,))


@pytest.mark.world(size=3)
def test_never_opened_by_one_of_two_peers(world):
    def body(rank, size):
        staging = block() if rank == 0 else None
        handles = send([reduce(staging), reduce(staging)] if rank == 0 else None)
        if rank == 1:
            rebuild(handles[0])
        barrier()

    fault = fault_of(world, body)
    assert fault.kind == "never-opened"
    assert (fault.opens, fault.counter, fault.handles, fault.bytes, fault.exporters) == (0, 1, 1, MIB, (0,))


@pytest.mark.world(size=2)
def test_serialized_and_thrown_away(world):
    def body(rank, size):
        from multiprocessing.reduction import ForkingPickler

        if rank == 0:
            ForkingPickler.dumps({"weights": block()})
        barrier()

    fault = fault_of(world, body)
    assert (fault.kind, fault.counter) == ("never-opened", 1)
    assert "test_ipc_worlds.py" in fault.site


@pytest.mark.world(size=2)
def test_still_open_after_the_exporter_dropped(world):
    kept = []

    def body(rank, size):
        reduced = send(reduce(block()) if rank == 0 else None)
        if rank == 1:
            kept.append(rebuild(reduced))
        barrier()

    assert told(fault_of(world, body)) == ("still-open", 1, 1, 1, MIB, (1,), (0,))
    assert fault_of(world, body).advice.startswith("The exporter dropped the tensor while a peer still maps it")


@pytest.mark.world(size=3)
def test_freed_under_the_second_peers_feet(world):
    kept = []

    def body(rank, size):
        staging = block() if rank == 0 else None
        reduced = send(reduce(staging) if rank == 0 else None)
        if rank:
            kept.append(rebuild(reduced))
        barrier()
        if rank == 1:
            kept.clear()
        barrier()
        del staging  # the counter reads 0, and rank 2 still maps the block

    assert told(fault_of(world, body)) == ("freed-while-open", 2, 0, 1, MIB, (2,), (0,))


@pytest.mark.world(size=2)
def test_a_release_that_a_fault_skips_is_seen(world, inject):
    with inject("ipc.release=skip"):
        summary = world.run(audited(a_handle_a_peer))[0]
    assert {fault.kind for fault in summary.faults} == {"still-open"}


# ---- programs of public code, in their own words: clean ----


@pytest.mark.world(size=3)
def test_weight_sync_by_bucket(world):
    """The trainer packs parameters into a bucket, serializes it once for each engine, and waits before the next."""

    def body(rank, size):
        import io
        import pickle
        from multiprocessing.reduction import ForkingPickler

        for step in range(3):
            if rank == 0:
                bucket = block().fill_(step + 1)
                blobs = [None] + [bytes(ForkingPickler.dumps([("w", bucket)])) for _ in range(size - 1)]
            else:
                blobs = None
            mine = send(blobs)[rank]
            if mine is not None:
                ((name, weights),) = pickle.load(io.BytesIO(mine))
                loaded = weights.clone()
                assert (name, int(loaded.sum())) == ("w", MIB * (step + 1))
                del weights
            barrier()

    assert world.run(audited(body))[0].faults == ()


@pytest.mark.world(size=3)
def test_kv_cache_registration(world):
    """Every rank registers its cache with every peer once; all stay mapped, and writes go through them."""
    kept = {}

    def body(rank, size):
        kept["cache"] = cache = block()
        handles = exchange([None if peer == rank else reduce(cache) for peer in range(size)])
        kept["peers"] = peers = {peer: rebuild(handle) for peer, handle in handles.items()}
        barrier()
        peers[(rank + 1) % size][rank] = rank + 1
        barrier()
        assert int(cache[(rank - 1) % size]) == (rank - 1) % size + 1

    summary = world.run(audited(body))[0]
    assert summary.faults == ()
    assert all(pair.still_open == 1 for pair in summary.pairs)


@pytest.mark.world(size=3)
def test_handles_rebuilt_by_hand_past_torchs_cache(world):
    """Wrappers that keep the eight-tuple of `_share_cuda_` and open it themselves."""

    def body(rank, size):
        import torch

        staging = block()
        handles = exchange([None if peer == rank else staging.untyped_storage()._share_cuda_() for peer in range(size)])
        for peer, handle in handles.items():
            opened = torch.UntypedStorage._new_shared_cuda(*handle)
            view = torch.tensor([], dtype=torch.uint8, device="cuda").set_(opened)
            view[rank] = peer
            del opened, view
        barrier()

    assert world.run(audited(body))[0].faults == ()


@pytest.mark.world(size=2)
def test_a_body_of_some_ranks_of_the_group(world):
    def run():
        import torch.distributed as dist

        alone = dist.new_group([0])
        if dist.get_rank() == 1:
            return None
        with ipc_audit(alone) as found:
            reduce(block())
        return [fault.kind for fault in found.faults]

    assert world.run(run) == [["never-opened"], None]


@pytest.mark.world(size=3)
def test_a_peer_that_died_with_the_handle_open(world):
    def body():
        import os
        import signal

        import torch.distributed as dist

        staging = block() if dist.get_rank() == 0 else None
        reduced = send(reduce(staging) if dist.get_rank() == 0 else None)
        view = rebuild(reduced) if dist.get_rank() == 2 else None
        barrier()
        if view is not None:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankDied):
        world.run(body)
    (fault,) = world.audit().faults
    assert told(fault) == ("dead-peer", 0, 1, 1, MIB, (2,), (0,))

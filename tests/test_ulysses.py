"""`UlyssesAllToAll` on the emulated device: right outputs, flat bytes, and every way that ranks can fail each other."""

import collections
import contextlib
import ctypes
import functools
import os
import signal
import tempfile
import time
import types
import weakref

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

from pytest_sglmem.reference import UlyssesAllToAll  # noqa: E402
from pytest_sglmem.reference.board import _AHEAD, _PID, _RING, _ROW, Board, PeerSilent, Plan, PlanMismatch  # noqa: E402
from pytest_sglmem.reference.order import HostOrder, StreamOrder, Watch, has_come  # noqa: E402
from pytest_sglmem.reference.replaced_ulysses import EvictWithoutRelease, OneHandleForAll  # noqa: E402

BF16 = torch.bfloat16


def live():
    return torch._C._cuda_memoryStats(torch.cuda.current_device())["allocated_bytes"]["all"]["current"]


def handed_out():
    return torch._C._cuda_memoryStats(torch.cuda.current_device())["allocation"]["all"]["allocated"]


def flags(ulysses):
    """Bytes that the order itself holds: a flag a rank, in the allocator's smallest block."""
    return 512 if ulysses.order == "stream" else 0


def sending(elements, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    return torch.randint(-100, 100, (elements,), generator=generator).to(dtype).cuda()


def expected(send):
    received = torch.empty_like(send.cpu())
    dist.all_to_all_single(received, send.cpu())
    return received


def gathered(tensor):
    everyones = [torch.empty_like(tensor.cpu()) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, tensor.cpu())
    return everyones


# --- exchange -----------------------------------------------------------------------------------------------------


@pytest.mark.world(sizes=[1, 2, 3, 4])
def test_exchange_is_all_to_all_single(world):
    def check():
        with UlyssesAllToAll() as ulysses:
            for dtype in (torch.float32, BF16, torch.int8, torch.float64):
                for shape in ((ulysses.world,), (ulysses.world, 5, 3), (4 * ulysses.world, 2)):
                    send = sending(torch.Size(shape).numel(), dtype).view(shape)
                    received = ulysses.exchange(send)
                    assert received.shape == send.shape
                    assert received.is_cuda
                    assert torch.equal(received.cpu(), expected(send))

    world.run(check)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32, torch.float64])
def test_no_bit_changes_not_even_of_what_is_not_a_number(world, dtype):
    settings = (lambda: None, on_the_device) if world.device == "emulated" else (lambda: None,)

    def check():
        bits = torch.int16 if dtype.itemsize == 2 else torch.int32
        generator = torch.Generator().manual_seed(dist.get_rank())
        words = torch.randint(torch.iinfo(bits).min, torch.iinfo(bits).max, (4096,), generator=generator, dtype=bits)
        words[:8] = -1  # a NaN of every dtype, and not the one that arithmetic makes
        for setting in settings:
            setting()
            with UlyssesAllToAll() as ulysses:
                received = ulysses.exchange(words.view(dtype).cuda())
                assert torch.equal(received.cpu().view(torch.uint8), expected(words.view(torch.uint8)))
        assert words.view(dtype).isnan().any()

    world.run(check)


def test_a_result_outlives_the_next_exchange_of_its_size_and_not_the_one_after(world):
    def check():
        ulysses = UlyssesAllToAll()
        sends = [sending(64, seed=seed) for seed in range(3)]
        first = ulysses.exchange(sends[0])
        ulysses.exchange(sends[1])
        assert torch.equal(first.cpu(), expected(sends[0]))
        ulysses.exchange(sends[2])
        assert torch.equal(first.cpu(), expected(sends[2]))

    world.run(check)


def test_a_received_tensor_may_be_sent_on(world):
    def check():
        ulysses = UlyssesAllToAll()
        send = sending(64)
        for _ in range(4):
            want = expected(send)
            send = ulysses.exchange(send)
            assert torch.equal(send.cpu(), want)

    world.run(check)


def test_steady_state_allocates_nothing(world):
    def check():
        ulysses = UlyssesAllToAll()
        send = sending(256)
        ulysses.exchange(send)
        before = handed_out()
        for _ in range(10):
            ulysses.exchange(send)
        return handed_out() - before

    assert world.run(check) == [0, 0]


def test_staging_is_bounded_and_the_least_recently_used_goes(world):
    def check():
        ulysses = UlyssesAllToAll(max_staging=2)
        buffers = {n: sending(1024 * n) for n in (1, 2, 3)}
        empty = live()
        two = 2 * 4 * 1024
        ulysses.exchange(buffers[1])
        ulysses.exchange(buffers[2])
        assert live() - empty - flags(ulysses) == two * (1 + 2)  # exactly the cap: nobody goes
        ulysses.exchange(buffers[1])
        ulysses.exchange(buffers[3])
        assert live() - empty - flags(ulysses) == two * (1 + 3)  # one more: 2 was used longest ago
        before = handed_out()
        ulysses.exchange(buffers[1])
        assert handed_out() == before

    world.run(check)


def test_making_room_comes_before_taking_it(world):
    def check():
        ulysses = UlyssesAllToAll(max_staging=1)
        sends = [sending(1024 * n) for n in (1, 2)]
        held = live()
        torch.cuda.reset_peak_memory_stats()
        for send in (*sends, *sends):
            ulysses.exchange(send)
        return torch.cuda.max_memory_allocated() - held - flags(ulysses)

    assert world.run(check) == [2 * 4 * 2048] * 2


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: torch.ones(4), "on cpu"),
        (lambda: torch.ones(5, device="cuda"), "divide among 2 ranks"),
        (lambda: torch.ones(0, device="cuda"), "divide among 2 ranks"),
        (lambda: torch.ones(4, 4, device="cuda").t()[:2], "not contiguous"),
    ],
)
def test_a_tensor_that_cannot_be_sent_is_named(world, wrong, said):
    def check():
        ulysses = UlyssesAllToAll()
        with pytest.raises(ValueError, match=said):
            ulysses.exchange(wrong())
        assert torch.equal(ulysses.exchange(sending(4)).cpu(), expected(sending(4)))  # and it still works

    world.run(check)


@pytest.mark.parametrize("wrong", [{"max_staging": 0}, {"order": "gpu"}])
def test_a_wrong_argument_is_echoed(world, wrong):
    def check():
        ((name, value),) = wrong.items()
        with pytest.raises(ValueError, match=rf"{name} must be .*got '?{value}"):
            UlyssesAllToAll(**wrong)

    world.run(check)


def test_in_a_subgroup_ranks_are_the_groups_own(world_of_three):
    def check():
        group = dist.new_group([0, 2])
        if dist.get_rank() == 1:
            return None
        with UlyssesAllToAll(group) as ulysses:
            send = torch.full((2,), float(dist.get_rank()), device="cuda")
            return ulysses.exchange(send).tolist()

    assert world_of_three.run(check) == [[0.0, 2.0], None, [0.0, 2.0]]


@pytest.fixture
def world_of_three(request):
    request.node.add_marker(pytest.mark.world(size=3))
    return request.getfixturevalue("world")


def test_under_graph_capture_it_declines(world):
    if (world.device, world.backend) == ("cuda", "gloo"):
        pytest.skip("gloo's all-to-all takes no CUDA tensor")

    def check():
        ulysses = UlyssesAllToAll()
        torch.cuda.is_current_stream_capturing = lambda: True
        send = sending(8)
        received = ulysses.exchange(send)
        assert torch.equal(received.cpu(), expected(send))
        assert (ulysses.declined, ulysses.order) == (1, "")
        q, k, v = qkv(2, 3, 8, 2, 8, BF16)
        result = ulysses.attention(q, k, v, attend, 2)
        assert (ulysses.declined, ulysses.order) == (2, "")
        torch.cuda.is_current_stream_capturing = lambda: False
        assert torch.equal(ulysses.attention(q, k, v, attend, 2), result)
        assert ulysses.declined == 2

    world.run(check)


# --- sharing ------------------------------------------------------------------------------------------------------


@pytest.mark.world(size=3)
def test_every_peer_opens_a_handle_of_its_own_in_this_device(world, live_bytes):
    def setup():
        ulysses = UlyssesAllToAll()

        def step(_):
            mine = torch.full((4,), float(ulysses.rank), device="cuda")
            everyones = ulysses.share(mine)
            assert everyones[ulysses.rank] is mine
            assert {tensor.device for tensor in everyones} == {mine.device}
            dist.barrier()
            everyones[(ulysses.rank + 1) % 3][ulysses.rank] = 7.0  # a write arrives
            torch.cuda.synchronize()
            dist.barrier()
            assert mine[(ulysses.rank - 1) % 3] == 7.0
            del everyones, mine
            ulysses.release_shared()

        return step

    verdict = live_bytes.assert_flat(world.trace(setup, [0, 1]))
    assert verdict.ipc.exports == verdict.ipc.opens == 3 * 2 * 2 * (verdict.cycles + verdict.warmup)
    assert verdict.ipc.faults == ()


@pytest.mark.world(size=3)
@pytest.mark.filterwarnings("ignore::pytest_sglmem.IpcContractWarning", "ignore::pytest_sglmem.LateReleaseWarning")
@pytest.mark.parametrize(
    ("fault", "word", "kind"),
    [("ipc.export=one-handle", "leak", "over-released"), ("ipc.export=duplicate", "leak", "never-opened")],
)
def test_a_broken_share_would_be_seen(world, live_bytes, inject, fault, word, kind):
    with inject(fault) as armed:
        verdict = live_bytes.judge(world.trace(rebuilding, [1, 2, 3], cycles=3))
    assert all(armed.fired)
    assert verdict.verdict == word
    assert kind in {fault.kind for fault in verdict.ipc.faults}


@pytest.mark.world(size=3)
@pytest.mark.filterwarnings("ignore::pytest_sglmem.IpcContractWarning", "ignore::pytest_sglmem.LateReleaseWarning")
@pytest.mark.parametrize("fault", ["ipc.collect=skip", "dist.barrier=skip"])
def test_a_release_without_barrier_or_collect_would_be_seen(world, live_bytes, inject, fault):
    if world.device == "cuda" and fault == "dist.barrier=skip":
        pytest.skip("how late a real device drops is not the test's to say")
    # Rank 1 gives back later than the others drop, every time and not by chance.
    with inject(fault) as armed, inject("ipc.release@rank=1=delay(20)"):
        verdict = live_bytes.judge(world.trace(rebuilding, [1, 2, 3], cycles=3))
    assert all(armed.fired)
    assert verdict.verdict == "late"
    assert verdict.late_bytes[0] > 0 < verdict.late_bytes[2]


def test_without_the_wait_outputs_would_differ(world):
    def check():
        HostOrder.wait = lambda self, message: None
        ulysses, send = UlyssesAllToAll(order="host"), sending(64)
        ulysses.exchange(send)
        want = expected(-send)
        if ulysses.rank == 1:
            dist.barrier()
        received = ulysses.exchange(-send).cpu()
        if ulysses.rank == 0:
            dist.barrier()
        return torch.equal(received, want)

    assert world.run(check)[0] is False


def rebuilding():
    """Every step evicts and builds."""
    ulysses = UlyssesAllToAll(max_staging=1)

    def step(n):
        return ulysses.exchange(sending(3 * 256 * n)).clone()

    return step


@pytest.mark.world(size=3)
def test_rebuilding_is_flat_at_every_step_as_it_is(world, live_bytes):
    verdict = live_bytes.assert_flat(world.trace(rebuilding, [1, 2, 3]))
    assert not any(verdict.late_bytes)
    for series in verdict.series:
        assert len(set(series[3::3])) == len(set(series[4::3])) == len(set(series[5::3])) == 1


@pytest.mark.world(size=3)
@pytest.mark.filterwarnings("ignore::pytest_sglmem.IpcContractWarning")
def test_the_replaced_shapes_return_the_right_outputs(world):
    def check():
        for kind in (OneHandleForAll, EvictWithoutRelease):
            faulty = kind(max_staging=1)
            for n in (1, 2, 1):
                send = sending(3 * 64 * n)
                assert torch.equal(faulty.exchange(send).cpu(), expected(send))

    world.run(check)


@pytest.mark.world(size=3)
@pytest.mark.filterwarnings("ignore::pytest_sglmem.IpcContractWarning")
def test_eviction_without_release_is_late_and_loses_nothing(world, live_bytes):
    def setup():
        faulty = EvictWithoutRelease(max_staging=1)
        return lambda n: faulty.exchange(sending(3 * 256 * n))

    verdict = live_bytes.judge(world.trace(setup, [1, 2, 3]))
    assert verdict.verdict in ("flat", "late")
    assert "over-released" not in {fault.kind for fault in verdict.ipc.faults}


def set_allocator():
    """Where torch keeps the function that sets the allocator up: (module, name)."""
    newer = "_accelerator_setAllocatorSettings"
    return (torch._C, newer) if hasattr(torch._C, newer) else (torch.cuda.memory, "_set_allocator_settings")


def test_expandable_segments_are_left_for_the_allocation_only_and_all_other_settings_stay(world):
    def check():
        conf = "max_split_size_mb:128,expandable_segments:True,garbage_collection_threshold:0.5"
        settings = {"expandable_segments": True, "PYTORCH_CUDA_ALLOC_CONF": conf}
        changes = []
        snapshot, empty = torch._C._cuda_memorySnapshot, torch.empty
        torch._C._cuda_memorySnapshot = lambda *a: snapshot(*a) | {"allocator_settings": settings}
        setattr(*set_allocator(), changes.append)
        ulysses = UlyssesAllToAll()
        torch.empty = lambda *a, **k: (changes.append("empty"), empty(*a, **k))[1]
        ulysses.exchange(sending(8))
        torch.empty = empty
        torch._C._cuda_memorySnapshot = snapshot
        return conf, changes

    for conf, changes in world.run(check):
        plain = "max_split_size_mb:128,garbage_collection_threshold:0.5,expandable_segments:False"
        # torch's own collectives allocate too, in segments of the user's choice.
        threes = [changes[at : at + 3] for at in range(len(changes))]
        assert [plain, "empty", conf] in threes


def expandable(tensor):
    """Whether the segment in which `tensor` lies is an expandable one."""
    (segment,) = (
        segment
        for segment in torch.cuda.memory._snapshot()["segments"]
        if segment["address"] <= tensor.data_ptr() < segment["address"] + segment["total_size"]
    )
    return segment["is_expandable"]


def test_under_real_expandable_segments_buffers_are_plain_and_bytes_flat(world, live_bytes):
    if world.device == "emulated":
        pytest.skip("the emulated device has no expandable segments")

    def setup():
        getattr(*set_allocator())("expandable_segments:True")
        ulysses = UlyssesAllToAll(max_staging=2)
        assert expandable(sending(1 << 20))

        def step(n):
            send = sending(ulysses.world * (1 << 18) * n)
            received = ulysses.exchange(send)
            assert not expandable(received)
            assert torch.equal(received.cpu(), expected(send))
            q = sending(2 * 4 * 2 * 8).view(2, 4, 2, 8)
            assert torch.equal(ulysses.attention(q, q, q, lambda q, k, v: q), q)

        return step

    live_bytes.assert_flat(world.trace(setup, [1, 2, 3, 4]))


def test_a_tensor_in_a_real_expandable_segment_is_shared_and_given_back(world, live_bytes):
    if world.device == "emulated":
        pytest.skip("the emulated device has no expandable segments")

    def setup():
        getattr(*set_allocator())("expandable_segments:True")
        ulysses = UlyssesAllToAll()

        def step(n):
            mine = sending((1 << 18) * n)
            assert expandable(mine)
            everyones = ulysses.share(mine)
            assert all(torch.equal(each.cpu(), other) for each, other in zip(everyones, gathered(mine), strict=True))
            del everyones, mine
            ulysses.release_shared()

        return step

    live_bytes.assert_flat(world.trace(setup, [1, 2, 3, 4]))


# --- drop ---------------------------------------------------------------------------------------------------------


def test_drop_gives_everything_back_and_it_can_be_used_again(world):
    def check():
        ulysses = UlyssesAllToAll()
        send, q = sending(8), sending(2 * 4 * 2 * 8).view(2, 4, 2, 8)
        before = live()
        for _ in range(2):
            assert torch.equal(ulysses.exchange(send).cpu(), expected(send))
            ulysses.attention(q, q, q, lambda q, k, v: q)
            assert live() > before
            ulysses.drop()
            assert live() == before

    world.run(check)


def test_leaving_the_context_drops(world):
    def check():
        before = live()
        with UlyssesAllToAll() as ulysses:
            ulysses.exchange(sending(8))
        return live() - before

    assert world.run(check) == [0, 0]


def test_leaving_by_an_error_waits_for_nobody(world):
    def check():
        def fail():
            with UlyssesAllToAll(limit=60) as ulysses:
                ulysses.exchange(sending(8))
                if ulysses.rank == 1:
                    dist.barrier()  # rank 1 leaves only when rank 0 has left
                raise KeyError

        with pytest.raises(KeyError):
            fail()
        if dist.get_rank() == 0:
            dist.barrier()

    world.run(check, timeout=30)


# --- ranks that fail each other -----------------------------------------------------------------------------------


def caught(error, call):
    try:
        call()
    except error as caught:
        return str(caught)
    return "nothing raised"


@pytest.mark.world(size=3)
@pytest.mark.parametrize("known", [False, True], ids=["new sizes", "known sizes"])
def test_ranks_that_send_different_sizes_find_out(world, known):
    def check():
        ulysses = UlyssesAllToAll(limit=20)
        sizes = [sending(12), sending(24)]
        if known:
            for send in sizes:
                ulysses.exchange(send)
        return caught(PlanMismatch, lambda: ulysses.exchange(sizes[ulysses.rank == 1]))

    for rank, said in enumerate(world.run(check, timeout=60)):
        assert "exchange of 24 float32 elements" in said
        assert "exchange of 12 float32 elements" in said
        assert f"in call {3 if known else 1} rank {rank} " in said


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_ranks_that_send_different_dtypes_find_out(world, dtype):
    def check():
        ulysses = UlyssesAllToAll(limit=20)
        return caught(PlanMismatch, lambda: ulysses.exchange(sending(8, dtype if ulysses.rank else torch.int16)))

    assert all("int16" in said and str(dtype)[6:] in said for said in world.run(check))


@pytest.mark.parametrize("known", [False, True], ids=["new pool", "known pool"])
def test_ranks_that_cut_heads_differently_find_out(world, known):
    def check():
        ulysses = UlyssesAllToAll(limit=20)
        q, k, v = qkv(1, 2, 8, 8, 8, BF16)
        if known:
            ulysses.attention(q, k, v, attend)
        return caught(PlanMismatch, lambda: ulysses.attention(q, k, v, attend, 1 + ulysses.rank))

    assert all("is about to do attention of 512 bfloat16 elements, cut" in said for said in world.run(check))


def test_what_requires_grad_is_sent_without_it(world):
    def check():
        send = sending(8).requires_grad_()
        received = UlyssesAllToAll().exchange(send)
        assert not received.requires_grad
        assert torch.equal(received.cpu(), expected(send.detach()))

    world.run(check)


def test_ranks_that_are_made_differently_find_out(world):
    def check():
        return caught(PlanMismatch, lambda: UlyssesAllToAll(max_staging=4 + dist.get_rank(), order="host"))

    said = "all ranks must make it alike: rank 0 max_staging=4, order='host'; rank 1 max_staging=5, order='host'"
    assert world.run(check) == [said, said]


def test_ranks_in_different_calls_find_out(world):
    def check():
        ulysses = UlyssesAllToAll(limit=20)
        ulysses.exchange(sending(8))
        call = ulysses.drop if ulysses.rank else lambda: ulysses.exchange(sending(8))
        return caught(PlanMismatch, call)

    said = world.run(check)
    assert "is about to do exchange of 8 float32 elements, rank 1 drop" in said[0]
    assert "is about to do drop, rank 0 exchange of 8 float32 elements" in said[1]


@pytest.mark.parametrize("call", ["exchange", "attention"])
def test_a_rank_without_room_is_named_and_nobody_hangs(world, call):
    def check():
        ulysses = UlyssesAllToAll(limit=60)
        q, k, v = qkv(1, 2, 8, 8, 8, BF16)
        does = {"exchange": lambda: ulysses.exchange(q), "attention": lambda: ulysses.attention(q, k, v, attend)}[call]
        empty = torch.empty

        def no_room(*args, device=None, **kwargs):
            if device == "cuda":  # and not what the group's own collectives use
                raise torch.OutOfMemoryError("no room")
            return empty(*args, device=device, **kwargs)

        if ulysses.rank == 1:
            torch.empty = no_room
        first = caught((PeerSilent, torch.OutOfMemoryError), does)
        torch.empty = empty
        does()  # all ranks stand where they stood before
        return first

    assert world.run(check, timeout=30) == ["rank 1 has no buffer to share: no room", "no room"]


@pytest.mark.world(size=3)
def test_a_silent_rank_is_named_after_the_limit(world):
    def check():
        ulysses = UlyssesAllToAll(limit=0.2, order="host")
        ulysses.exchange(sending(12))
        if ulysses.rank == 2:
            dist.barrier()
            return "silent"
        said = caught(PeerSilent, lambda: ulysses.exchange(sending(12)))
        dist.barrier()
        return said

    first, second, third = world.run(check)
    assert third == "silent"
    for rank, said in enumerate((first, second)):
        assert said == (
            f"rank {rank} waited 0.2 s in call 2 (exchange of 12 float32 elements) for 1 of its peers: "
            "rank 2 is in call 1 (exchange of 12 float32 elements)"
        )


def test_a_rank_that_is_gone_is_called_gone(world):
    def check():
        board = Board(None, 0.2)
        dist.barrier()
        board._words[(1 - board.rank) * _ROW + _PID] = 2**22 + 1  # more than any process number
        dist.barrier()
        return caught(PeerSilent, lambda: board._wait(0, 1))

    for rank, said in enumerate(world.run(check)):
        assert f"rank {1 - rank} (process 4194305 is gone) is in no call yet" in said


def test_a_killed_rank_does_not_hang_the_other(world):
    def check():
        ulysses = UlyssesAllToAll(limit=0.3)
        ulysses.exchange(sending(8))
        if ulysses.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerSilent, match="rank 1"):
            ulysses.exchange(sending(16))

    with pytest.raises(Exception, match="rank 1"):
        world.run(check, timeout=30)


def test_the_stream_order_is_refused_where_it_cannot_be(emulated):
    def check():
        ulysses = UlyssesAllToAll(order="stream")
        with pytest.raises(RuntimeError, match="cuda-bindings"):
            ulysses.exchange(sending(8))

    emulated.run(check)


# --- the board ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["exchange", "attention", "share", "release", "drop"])
@pytest.mark.parametrize("dtype", [torch.uint8, BF16, torch.complex128])
def test_a_plan_and_its_code(kind, dtype):
    plan = Plan(kind, 2**38 + 3, dtype, 0xABC)
    assert Plan.decode(plan.code()) == plan
    assert 0 < plan.code() < 2**63


def test_a_rank_may_be_so_many_calls_ahead_and_not_one_more(world):
    def check():
        board, code = Board(None, 0.1), Plan("exchange", 8, BF16).code()
        if board.rank == 0:
            for _ in range(_AHEAD):
                board.post(code)
            said = caught(PeerSilent, lambda: board.post(code))
        dist.barrier()
        return said if board.rank == 0 else None

    assert "rank 1 is in no call yet" in world.run(check)[0]


def test_a_different_plan_is_found_however_long_the_ring_has_turned(world):
    def check():
        board, code = Board(None, 20), Plan("exchange", 8, BF16).code()
        for _ in range(3 * _RING + 5):
            board.agree(code)
        return caught(PlanMismatch, lambda: board.agree(code + board.rank * 2**24))

    assert all(f"in call {3 * _RING + 6} " in said for said in world.run(check))


def test_no_file_is_left(world, tmp_path):
    def check():
        tempfile.tempdir = str(tmp_path)
        board = Board(None, 20)
        dist.barrier()
        board.agree(1)  # and it works without its name
        return os.listdir(tmp_path)

    assert world.run(check) == [[], []]


# --- attention ----------------------------------------------------------------------------------------------------


def attend(q, k, v):
    """Head by head: sums do not depend on how many heads come together."""
    ratio = q.shape[2] // k.shape[2]
    heads = []
    for head in range(q.shape[2]):
        scores = q[:, :, head].double() @ k[:, :, head // ratio].double().mT
        heads.append(torch.softmax(scores / q.shape[-1] ** 0.5, -1) @ v[:, :, head // ratio].double())
    return torch.stack(heads, dim=2).to(q.dtype)


def everybodys(tensor):
    parts = [torch.empty_like(tensor.cpu()) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.cpu().contiguous())
    return torch.cat(parts, dim=1)


def qkv(batch, tokens, heads, kv_heads, size, dtype):
    shapes = [(batch, tokens, heads, size), (batch, tokens, kv_heads, size), (batch, tokens, kv_heads, size)]
    return [
        (sending(torch.Size(shape).numel(), torch.float32, seed) / 100).to(dtype).view(shape)
        for seed, shape in enumerate(shapes)
    ]


@pytest.mark.world(sizes=[2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize(
    ("batch", "kv_ratio", "groups"), [(1, 1, 1), (2, 1, 2), (1, 2, 1), (2, 2, 2), (3, 4, 4), (1, 4, 1), (2, 4, 2)]
)
def test_attention_over_the_whole_sequence(world, batch, kv_ratio, groups, dtype):
    def check():
        size = dist.get_world_size()
        q, k, v = qkv(batch, 3, 4 * size, 4 * size // kv_ratio, 8, dtype)
        whole = attend(*(everybodys(tensor) for tensor in (q, k, v)))
        mine = slice(3 * dist.get_rank(), 3 * dist.get_rank() + 3)
        ulysses = UlyssesAllToAll()
        for _ in range(2):
            result = ulysses.attention(q, k, v, attend, groups)
            assert result.shape == q.shape
            assert torch.equal(result.cpu(), whole[:, mine])

    world.run(check)


def test_every_number_of_groups_gives_the_same_bits(world):
    def check():
        q, k, v = qkv(2, 5, 24, 12, 16, BF16)
        ulysses = UlyssesAllToAll()
        results = [ulysses.attention(q, k, v, attend, groups) for groups in (1, 2, 3, 6, 12)]
        assert all(torch.equal(result.view(torch.int16), results[0].view(torch.int16)) for result in results)

    world.run(check)


def test_calls_of_different_shapes_do_not_meet_in_the_pool(world):
    def check():
        ulysses = UlyssesAllToAll()
        inputs = [qkv(1, 16, 4, 4, 8, BF16), qkv(1, 2, 8, 2, 8, BF16), qkv(2, 3, 2, 2, 8, BF16)]
        alone = [UlyssesAllToAll().attention(*each, attend) for each in inputs]
        for _ in range(3):
            for each, want in zip(inputs, alone, strict=True):
                assert torch.equal(ulysses.attention(*each, attend).view(torch.int16), want.view(torch.int16))

    world.run(check)


def test_the_pool_grows_to_the_largest_call_and_old_and_new_never_coexist(world):
    def check():
        ulysses = UlyssesAllToAll()
        inputs = [qkv(1, tokens, 4, 4, 32, BF16) for tokens in (64, 32, 128, 64)]
        sizes, pool = [], lambda tokens: 4 * 2 * tokens * 2 * 32 * 2
        before = live()
        for each in inputs:
            torch.cuda.reset_peak_memory_stats()
            ulysses.attention(*each, lambda q, k, v: q)
            sizes.append([now - before - flags(ulysses) for now in (live(), torch.cuda.max_memory_allocated())])
        assert [now for now, _ in sizes] == [pool(64), pool(64), pool(128), pool(128)]
        assert sizes[2][1] == pool(128) + inputs[2][0].numel() * 2  # the new pool and the result: not the old pool

    world.run(check)


def test_a_pool_a_dtype(world):
    def check():
        ulysses = UlyssesAllToAll()
        before = live()
        for dtype, times in ((torch.float32, 1), (BF16, 1), (torch.float32, 2)):
            for _ in range(times):
                ulysses.attention(*qkv(1, 64, 4, 4, 32, dtype), lambda q, k, v: q)
        return live() - before - flags(ulysses)

    assert world.run(check) == [4 * 2 * 64 * 2 * 32 * (2 + 4)] * 2


@pytest.mark.parametrize(
    ("shapes", "groups", "said"),
    [
        (((1, 4, 6, 8), (1, 4, 6, 8), (1, 4, 6, 8)), 2, "6 heads do not divide among 2 ranks in 2 groups"),
        (((1, 4, 6, 8), (1, 4, 6, 8), (1, 4, 6, 8)), 0, "in 0 groups"),
        (((1, 4, 6, 8), (1, 4, 4, 8), (1, 4, 4, 8)), 1, "4 key/value heads do not serve 6"),
        (((1, 4, 12, 8), (1, 4, 3, 8), (1, 4, 3, 8)), 1, "3 key/value heads do not serve 12 in parts of 6"),
        (((1, 4, 6, 8), (1, 5, 6, 8), (1, 5, 6, 8)), 1, "do not fit"),
        (((1, 4, 6, 8), (1, 4, 6, 8), (1, 4, 3, 8)), 1, "do not fit"),
    ],
)
def test_shapes_that_do_not_fit_are_named(world, shapes, groups, said):
    def check():
        ulysses = UlyssesAllToAll()
        with pytest.raises(ValueError, match=said):
            ulysses.attention(*(torch.ones(shape, device="cuda") for shape in shapes), attend, groups)

    world.run(check)


# --- order on the device, with a driver that acts at once ---------------------------------------------------------


class ActsAtOnce:
    """The driver's calls that `StreamOrder` makes, done at once, on memory that the emulated ranks really share."""

    class CUstreamWaitValue_flags:
        CU_STREAM_WAIT_VALUE_GEQ = 0

    class CUstream_flags:
        CU_STREAM_NON_BLOCKING = 1

    @staticmethod
    def cuStreamCreate(flags):
        return 0, 0

    @staticmethod
    def cuMemcpyDtoDAsync(to, source, size, stream):
        ctypes.memmove(to, source, size)
        return (0,)

    busy = 0

    @classmethod
    def cuEventQuery(cls, event):
        return (cls.busy,)

    @staticmethod
    def cuEventRecord(event, stream):
        return (0,)

    @staticmethod
    def cuStreamWaitEvent(stream, event, flags):
        return (0,)

    class CUstreamBatchMemOpType:
        CU_STREAM_MEM_OP_WRITE_VALUE_32 = 2
        CU_STREAM_MEM_OP_WAIT_VALUE_32 = 1

    class CUstreamBatchMemOpParams:
        def __init__(self):
            self.writeValue = self.waitValue = types.SimpleNamespace()

    @staticmethod
    def cuStreamBatchMemOp(stream, count, operations, flags):
        for each in (whole.writeValue for whole in operations):
            flag = ctypes.c_uint32.from_address(each.address)
            if each.operation == ActsAtOnce.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WRITE_VALUE_32:
                flag.value = each.value
            while not has_come(flag.value, each.value):
                time.sleep(1e-4)
        return (0,)


class Streams:
    """Streams that lag: what is put on them runs as late as a device may run it.

    `inline`: the streams whose operations the host runs itself, one by one, waiting where they wait (there the test's
    own arithmetic comes in its place); everything else runs while such a stream has been waiting for long, or in
    `synchronize`, which returns when nothing is left: never, where a flag never comes.
    """

    long = 200  # looks

    def __init__(self, inline=(0,)):
        self.inline, self.current, self.made = inline, 0, 0
        self.queues, self.done = {0: collections.deque()}, {0: 0}
        self.copy_ = torch.Tensor.copy_

    def install(self):
        on_the_device(self)
        torch.cuda.Stream = self.stream_of
        torch.cuda.ExternalStream = lambda handle: Stream(self, -1)  # what looks at flags, and acts at once
        torch.cuda.Event = lambda: Event(self)
        torch.cuda.current_stream = lambda *_: Stream(self, self.current)
        torch.cuda.stream = self.on
        torch.cuda.synchronize = lambda *_: self.drain()
        torch._C._cuda_getCurrentRawStream = lambda device: self.current
        torch.Tensor.copy_ = lambda to, source: self.put(self.current, lambda: self.copy_(to, source) is not None)
        return self

    def stream_of(self):
        self.made += 1
        self.queues[self.made], self.done[self.made] = collections.deque(), 0
        return Stream(self, self.made)

    @contextlib.contextmanager
    def on(self, stream):
        before, self.current = self.current, stream.cuda_stream
        yield
        self.current = before

    def put(self, stream, operation):
        """Put `operation` on `stream`: it returns whether it is done, and is asked again until it is."""
        if stream < 0:
            assert operation()
            return
        self.queues[stream].append(operation)
        looks = 0
        while stream in self.inline and self.queues[stream]:
            looks += 1
            for each in self.queues if looks > self.long else [stream]:
                self.advance(each)
            time.sleep(1e-5)

    def advance(self, stream):
        queue = self.queues[stream]
        while queue and queue[0]():
            queue.popleft()
            self.done[stream] += 1

    def drain(self):
        while self.waiting():
            for each in self.queues:
                self.advance(each)
            time.sleep(1e-4)

    def waiting(self):
        return sum(map(len, self.queues.values()))

    def behind(self, stream):
        """An operation that is done when what `stream` holds now is."""
        mark = self.done[stream] + len(self.queues[stream])
        return lambda: self.done[stream] >= mark

    CUstreamWaitValue_flags = ActsAtOnce.CUstreamWaitValue_flags
    CUstream_flags = ActsAtOnce.CUstream_flags
    CUstreamBatchMemOpType = ActsAtOnce.CUstreamBatchMemOpType
    CUstreamBatchMemOpParams = ActsAtOnce.CUstreamBatchMemOpParams
    cuStreamCreate = staticmethod(ActsAtOnce.cuStreamCreate)

    def cuMemcpyDtoDAsync(self, to, source, size, stream):
        self.put(stream, lambda: ctypes.memmove(to, source, size) is not None)
        return (0,)

    @staticmethod
    def cuEventQuery(event):
        return (0 if event.reached() else 600,)

    def cuEventRecord(self, event, stream):
        event.reached = self.behind(stream)
        return (0,)

    def cuStreamWaitEvent(self, stream, event, flags):
        self.put(stream, event.reached)
        return (0,)

    def cuStreamBatchMemOp(self, stream, count, operations, flags):
        for whole in operations:
            part = whole.writeValue
            write = part.operation == self.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WRITE_VALUE_32
            flag, value = ctypes.c_uint32.from_address(part.address), part.value
            self.put(stream, functools.partial(self.written if write else self.come, flag, value))
        return (0,)

    @staticmethod
    def written(flag, value):
        flag.value = value
        return True

    @staticmethod
    def come(flag, value):
        return has_come(flag.value, value)


class Stream:
    def __init__(self, streams, handle):
        self.streams, self.cuda_stream = streams, handle

    def wait_stream(self, other):
        self.streams.put(self.cuda_stream, self.streams.behind(other.cuda_stream))


class Event:
    def __init__(self, streams):
        self.streams, self.cuda_event = streams, self

    def record(self, stream):
        self.reached = self.streams.behind(stream.cuda_stream)


@pytest.fixture
def emulated(world):
    if world.device != "emulated":
        pytest.skip("a driver that acts at once needs memory that the host can write")
    return world


def on_the_device(driver=ActsAtOnce):
    """Let `UlyssesAllToAll` find a driver on this device."""
    from pytest_sglmem.reference import ulysses

    ulysses.can_order_on_device = lambda flags: driver
    ulysses._device_name = lambda: f"device {dist.get_rank()}"
    torch.cuda.ExternalStream = lambda stream: torch.cuda.Stream()
    torch.Tensor.data_ptr = torch._C.TensorBase.data_ptr  # where the bytes really are
    torch._C._cuda_getCurrentRawStream = lambda device: 0


@pytest.mark.world(sizes=[2, 3])
@pytest.mark.parametrize("aside_from", [StreamOrder.aside_from, 0], ids=["one stream", "two"])
def test_the_stream_order_moves_the_same_bytes(emulated, aside_from):
    def check():
        on_the_device()
        StreamOrder.aside_from, StreamOrder.aside_if_ahead_from = aside_from, 0
        with UlyssesAllToAll(max_staging=2) as ulysses:
            for n in (1, 2, 3, 1, 1, 1, 2):
                send = sending(ulysses.world * 16 * n, BF16, seed=n)
                assert torch.equal(ulysses.exchange(send).cpu(), expected(send))
            q, k, v = qkv(2, 3, 4 * ulysses.world, 2 * ulysses.world, 8, BF16)
            want = UlyssesAllToAll(order="host").attention(q, k, v, attend)
            assert torch.equal(ulysses.attention(q, k, v, attend, 2), want)
            assert ulysses.order == "stream"

    emulated.run(check)


def test_ranks_that_share_a_device_order_through_the_host(emulated):
    def check():
        on_the_device()
        from pytest_sglmem.reference import ulysses as module

        module._device_name = lambda: "one device"
        ulysses = UlyssesAllToAll()
        ulysses.exchange(sending(8))
        return ulysses.order

    assert emulated.run(check) == ["host", "host"]


def test_one_rank_without_a_driver_is_enough_for_the_host(emulated):
    def check():
        on_the_device(ActsAtOnce if dist.get_rank() else None)
        ulysses = UlyssesAllToAll()
        ulysses.exchange(sending(8))
        return ulysses.order

    assert emulated.run(check) == ["host", "host"]


def test_on_the_device_a_silent_rank_is_named_before_the_stream_waits_for_it(emulated):
    def check():
        on_the_device()
        ulysses = UlyssesAllToAll(limit=0.2)
        send = sending(8)
        ulysses.exchange(send)
        said = caught(PeerSilent, lambda: ulysses.exchange(send)) if ulysses.rank == 0 else ""
        dist.barrier()
        return said

    assert "rank 1 is in call 1 (exchange of 8 float32 elements)" in emulated.run(check)[0]


def test_on_the_device_a_rank_that_came_and_sent_nothing_lets_the_stream_go_and_is_named(emulated):
    def check():
        on_the_device()
        ulysses = UlyssesAllToAll(limit=0.2)
        send = sending(8)
        ulysses.exchange(send)
        if ulysses.rank == 1:
            ulysses._order.announce(Plan("exchange", 8, torch.float32).code())  # as one that is killed after this line
            dist.barrier()
            return ""
        ulysses.exchange(send)  # waits for rank 1's flag until the watch writes it
        said = caught(
            PeerSilent, lambda: ulysses._order.exchange(ulysses._staging[8, torch.float32].routes[0], send, 3)
        )
        dist.barrier()
        return said

    assert "rank 1 is in call 2 (exchange of 8 float32 elements)" in emulated.run(check)[0]


@pytest.mark.parametrize("lagging", [0, 1])
def test_a_second_stream_that_lags_changes_no_bit(emulated, lagging):
    def check():
        q, k, v = qkv(2, 3, 8, 4, 8, BF16)
        want = UlyssesAllToAll(order="host").attention(q, k, v, attend)
        streams = Streams().install()
        streams.long = 2000 if dist.get_rank() == lagging else 1
        ulysses = UlyssesAllToAll()
        for _ in range(2):
            assert torch.equal(ulysses.attention(q, k, v, attend, 2), want)
            for pool in ulysses._pools.values():
                streams.drain()
                dist.barrier()
                pool.everyones[ulysses.rank].fill_(7)  # what is not sent again is seen
                dist.barrier()
        assert ulysses.order == "stream"

    emulated.run(check)


@pytest.mark.parametrize("aside_from", [StreamOrder.aside_from, 0], ids=["one stream", "two"])
@pytest.mark.parametrize("if_ahead_from", [StreamOrder.aside_if_ahead_from, 0], ids=["", "two if ahead"])
def test_exchange_on_streams_that_lag(emulated, aside_from, if_ahead_from):
    def check():
        Streams(inline=()).install()
        StreamOrder.aside_from, StreamOrder.aside_if_ahead_from = aside_from, if_ahead_from
        ulysses = UlyssesAllToAll()
        sends = [sending(64, seed=seed) for seed in range(5)]
        received = [ulysses.exchange(send) for send in sends][-2:]
        torch.cuda.synchronize()
        for got, send in zip(received, sends[-2:], strict=True):
            assert torch.equal(got.cpu(), expected(send))

    emulated.run(check)


def test_the_own_copy_goes_aside_from_a_size_on_and_from_a_smaller_one_where_the_host_is_ahead(emulated):
    def check():
        on, copy = [], ActsAtOnce.cuMemcpyDtoDAsync
        ActsAtOnce.cuMemcpyDtoDAsync = staticmethod(lambda *args: (on.append(args[-1]), copy(*args))[1])
        on_the_device()
        StreamOrder.aside_from, StreamOrder.aside_if_ahead_from = 64, 32  # bytes
        seen = []
        with UlyssesAllToAll() as ulysses:
            for ActsAtOnce.busy, chunk in ((0, 32), (600, 31), (600, 32), (0, 63), (0, 64)):
                on.clear()
                ulysses.exchange(sending(ulysses.world * chunk, torch.int8))
                seen.append(len(set(on)))
        return seen

    assert emulated.run(check) == [[1, 1, 2, 1, 2]] * 2


def differing_exchange(ulysses):
    return lambda: ulysses.exchange(sending(8 * (1 + ulysses.rank)))


def differing_cut(ulysses):
    return lambda: ulysses.attention(*qkv(1, 2, 8, 8, 8, BF16), attend, 1 + ulysses.rank)


def differing_call(ulysses):
    return ulysses.drop if ulysses.rank else lambda: ulysses.exchange(sending(8))


@pytest.mark.parametrize("differing", [differing_exchange, differing_cut, differing_call])
def test_after_a_mismatch_no_stream_waits(emulated, differing):
    def check():
        streams = Streams(inline=()).install()
        ulysses = UlyssesAllToAll(limit=60)
        for size in (8, 16):
            ulysses.exchange(sending(size))
        ulysses.attention(*qkv(1, 2, 8, 8, 8, BF16), attend)
        streams.drain()
        dist.barrier()
        said = caught(PlanMismatch, differing(ulysses))
        return said, streams.waiting()

    for said, waiting in emulated.run(check, timeout=30):
        assert "in call 4 rank" in said
        assert waiting == 0


def test_a_peers_tensor_is_let_go_of_only_when_no_stream_waits(emulated):
    # torch drains the stream there and holds the interpreter's lock meanwhile: no watch could end the wait.
    def check():
        streams = Streams(inline=()).install()
        ulysses = UlyssesAllToAll(limit=0.2)
        send = sending(8)
        ulysses.exchange(send)
        streams.drain()
        if ulysses.rank == 1:
            ulysses._order.announce(Plan("exchange", 8, torch.float32).code())  # as one that is killed after this line
            dist.barrier()
            return [], 0
        ulysses.exchange(send)
        assert streams.waiting()
        waiting = []
        peers = ulysses._staging[8, torch.float32].routes[0].rows[1]
        weakref.finalize(peers.untyped_storage(), lambda: waiting.append(streams.waiting()))
        watch = ulysses._order._watch
        del peers, ulysses
        dist.barrier()
        return waiting, watch._thread.is_alive()

    assert emulated.run(check)[0] == ([0], False)


@pytest.mark.parametrize("order", ["stream", "host"])
def test_a_rank_that_fails_inside_a_call_lets_the_others_go(emulated, order):
    def check():
        def fail(q, k, v):
            raise KeyError("attend")

        on_the_device()
        ulysses = UlyssesAllToAll(limit=60, order=order)
        q, k, v = qkv(1, 2, 8, 8, 8, BF16)
        ulysses.attention(q, k, v, attend, 2)
        first = caught((KeyError, PeerSilent), lambda: ulysses.attention(q, k, v, fail if ulysses.rank else attend, 2))
        dist.barrier()
        return first, caught(PeerSilent, lambda: ulysses.exchange(sending(8)))

    (early, late), (own, after) = emulated.run(check, timeout=30)
    left = "rank 1 left by an error in call 2 (attention of 512 bfloat16 elements, cut "
    assert own == "'attend'"
    assert left in (late if order == "stream" else early)
    assert after.startswith(left)
    assert after.endswith("make a new one")


@pytest.mark.parametrize(
    ("flag", "message", "come"),
    [(0, 1, False), (1, 1, True), (2, 1, True), (-1, 2**32 - 1, True), (0, 2**32 - 1, True), (-2, 2**32 - 1, False)],
)
def test_flags_go_round(flag, message, come):
    assert has_come(flag, message) is come


def test_the_watch_gives_up_once_and_only_where_nothing_comes():
    come, given_up = [1], []
    watch = Watch(lambda: list(come), lambda message: given_up.append(message) or "gone", limit=0.05)
    try:
        watch.expect(1)
        watch._ended.wait(0.2)
        assert not watch.failed  # it had come
        watch.expect(2)
        watch._thread.join(5)
        assert watch.failed == "gone"
        assert given_up == [2]
    finally:
        watch.close()

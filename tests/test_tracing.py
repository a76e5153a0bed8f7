"""The step loop, in this process on the emulated device, and over a process group in a world."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import time

import pytest

torch = pytest.importorskip("torch")

import pytest_sglmem  # noqa: E402
from pytest_sglmem.emulated import emulated_cuda  # noqa: E402
from pytest_sglmem.judge import judge  # noqa: E402
from pytest_sglmem.tracing import Hands, bounds, trace, trace_rank  # noqa: E402
from pytest_sglmem.world import RankDied, RankRaised  # noqa: E402

KIB = 1024


@pytest.fixture(scope="module", autouse=True)
def frozen_heap():
    """As in a rank: a collection walks what the test made and not all of torch."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def device():
    with emulated_cuda():
        yield


def block(size=KIB):
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def rank_trace(setup, over=(1, 2), **options):
    return trace_rank(setup, over, rank=0, **{"cycles": 3, **options})


def flat(_):
    block()


# Cycles and steps.


def test_every_geometry_once_a_cycle_and_one_reading_each(device):
    seen = []
    found = rank_trace(lambda: seen.append, "ab", cycles=3, warmup=2)
    assert seen == ["a", "b"] * 5
    assert (len(found.series), len(found.ends), len(found.digests), len(found.seconds)) == (10, 5, 10, 10)


@pytest.mark.parametrize(("cycles", "taken"), [((3, 12), 3), ((5, 12), 5), (4, 4)])
def test_a_clean_step_ends_as_soon_as_it_is_settled(device, cycles, taken):
    assert trace(flat, [1, 2], cycles=cycles).cycles == taken


def test_a_leak_is_traced_to_the_last_cycle(device):
    kept = []
    assert trace(lambda _: kept.append(block()), [1], cycles=(3, 6)).cycles == 6


@pytest.mark.parametrize(
    ("cycles", "error"),
    [(0, ValueError), ((4, 3), ValueError), ((0, 3), ValueError), ("3", TypeError), ((1, 2, 3), TypeError)],
)
def test_wrong_cycles_are_refused_and_echoed(cycles, error):
    with pytest.raises(error, match="cycles"):
        bounds(cycles)


@pytest.mark.parametrize("warmup", [-1, True, 1.0])
def test_a_wrong_warmup_is_refused(device, warmup):
    with pytest.raises(ValueError, match=f"got {warmup!r}"):
        rank_trace(lambda: flat, warmup=warmup)


def test_setup_must_return_a_step(device):
    with pytest.raises(TypeError, match="returned None"):
        rank_trace(lambda: None)


def test_setup_must_not_be_async(device):
    async def prepare():
        return flat

    with pytest.raises(TypeError, match=r"prepare.* is async, and nobody awaits it"):
        rank_trace(prepare)


def test_over_must_not_be_empty(device):
    with pytest.raises(ValueError, match=r"got \[\]"):
        rank_trace(lambda: flat, [])


def test_setup_gets_its_arguments(device):
    assert rank_trace(lambda a, b: flat, args=(1, 2)).rank == 0


def test_before_step_and_progress(device):
    order = []

    def step(geometry):
        order.append(("step", geometry))

    rank_trace(
        lambda: step,
        "a",
        cycles=1,
        warmup=1,
        before_step=lambda: order.append("before"),
        progress=lambda *at: order.append(at),
    )
    assert order == ["before", ("step", "a"), (0, 0, 0), "before", ("step", "a"), (1, 0, 0)]


# Quiet points.


def test_the_result_is_dropped_before_the_bytes_are_read(device):
    found = rank_trace(lambda: lambda _: {"out": [block(), block()]})
    assert set(found.series) == {0}


def test_results_are_digested(device):
    found = rank_trace(lambda: lambda n: {"out": (torch.full((4,), n, device="cuda"),)}, (1, 2))
    assert found.digests[0] != found.digests[1]
    assert found.digests[:2] == found.digests[2:4]


def test_a_step_that_keeps_a_reference_cycle_is_read_three_times(device):
    class Request:
        def __init__(self):
            self.pixels, self.me = block(), self

    found = rank_trace(lambda: lambda _: Request() and None)
    for end in found.ends:
        assert (end.as_is.live, end.after_ipc.live, end.after_gc.live) == (2 * KIB, 2 * KIB, 0)


@pytest.mark.parametrize("was_on", [True, False])
def test_the_collector_rests_and_is_put_back(device, was_on):
    states = []

    def step(_):
        states.append(gc.isenabled())
        gc.enable()  # what a step does to it is undone before the next

    before = gc.isenabled()
    (gc.enable if was_on else gc.disable)()
    try:
        rank_trace(lambda: step)
        after = gc.isenabled()
    finally:
        (gc.enable if before else gc.disable)()
    assert not any(states)
    assert after is was_on


def test_the_collector_is_put_back_when_a_step_raises(device):
    def fails(_):
        raise RuntimeError("broken step")

    before = gc.isenabled()
    with pytest.raises(RuntimeError, match="broken step"):
        rank_trace(lambda: fails)
    assert gc.isenabled() is before


def test_faults_strike_the_step_and_not_the_harness(device, monkeypatch):
    hands = Hands.take()

    def fault(*_):
        raise AssertionError("the harness called a patched function")

    for owner, name in ((torch.cuda, "synchronize"), (torch.cuda, "ipc_collect"), (gc, "collect"), (gc, "enable")):
        monkeypatch.setattr(owner, name, fault)
    found = rank_trace(lambda: flat, hands=hands)
    monkeypatch.undo()
    assert len(found.ends) == 4


# Sites and holders.


def test_the_site_is_the_users_line_and_the_stack_ends_in_the_step(device):
    kept = []

    def step(_):
        kept.append(block())

    found = rank_trace(lambda: step)
    (entry, *_) = found.ends[-1].census
    assert [line.rpartition(" in ")[2] for line in entry.stack] == ["block", "step"]
    assert "test_tracing.py:" in entry.site


def test_blocks_are_dated(device):
    early = block()
    kept = []
    found = rank_trace(lambda: lambda _: kept.append(block()), [1], cycles=2, warmup=1)
    assert {entry.born: entry.blocks for entry in found.ends[-1].census} == {-1: 1, 0: 1, 1: 1, 2: 1}
    assert early is not None


def test_a_leaking_rank_says_who_holds_and_leaves_its_snapshot(device, tmp_path):
    class Engine:
        store = {}

    engine = Engine()

    def step(n):
        engine.store[len(engine.store)] = block()

    found = rank_trace(lambda: step, artifacts=tmp_path / "deep" / "folder")
    (chains,) = found.held_by.values()
    assert any("store" in chain and chain.endswith("-> Tensor") for chain in chains)
    snapshot = pickle.loads((tmp_path / "deep" / "folder" / "snapshot-rank0.pickle").read_bytes())
    assert {"segments", "device_traces"} <= set(snapshot)


def test_the_search_has_a_bound_that_is_said_before_and_when_it_is_hit(device):
    kept, said = [], []
    found = rank_trace(lambda: lambda _: kept.append(block()), search=0, searching=said.append)
    assert list(found.held_by.values()) == [("the search for holders stopped after 0 s",)]
    assert len(said) == 1
    rank_trace(lambda: flat, searching=said.append)
    assert len(said) == 1


class Clock:
    """The time, which jumps beyond the limit of the call once the rank says that it searches."""

    def __init__(self, folder, limit):
        self._folder, self._limit, self._late = folder, limit, 0

    def monotonic(self):
        if (self._folder / "searches").exists():
            self._late += 1
        if self._late == 4:  # the limit was looked at, and nobody gave up
            (self._folder / "go").write_text("on")
        return time.monotonic() + (self._limit + 1 if self._late else 0)

    def __getattr__(self, name):
        return getattr(time, name)


def searches_long(folder):
    import pytest_sglmem.tracing as tracing

    kept = []

    def search(*_, **__):
        (folder / "searches").touch()
        return ((folder / "go").read_text(),)

    tracing.chains_for_blocks = search
    return lambda _: kept.append(torch.empty(512, device="cuda"))


@pytest.mark.world(size=1)
def test_the_search_is_not_counted_against_the_limit_of_the_call(world, tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "go")
    monkeypatch.setattr("pytest_sglmem.world.time", Clock(tmp_path, 60))
    found = world.trace(searches_long, [1], cycles=3, args=(tmp_path,), timeout=60)
    assert list(found.ranks[0].held_by.values()) == [("on",)]


def test_a_clean_rank_leaves_nothing(device, tmp_path):
    found = rank_trace(lambda: flat, artifacts=tmp_path / "folder")
    assert found.held_by == {}
    assert list(tmp_path.iterdir()) == []


def test_recording_is_as_before_afterwards(device):
    rank_trace(lambda: flat)
    assert not torch._C._cuda_isHistoryEnabled()
    later = block()
    frames = [b["frames"] for s in torch._C._cuda_memorySnapshot(None)["segments"] for b in s["blocks"]]
    assert not any(frames)
    assert later is not None


# The library function.


def test_trace_without_a_process_group(device):
    found = pytest_sglmem.trace(flat, [64, {"heads": 8}])
    assert (found.size, found.geometries, found.warmup) == (1, ("64", "{'heads': 8}"), 1)
    assert judge(found).verdict == "flat"


def test_a_step_that_logs_a_tensor_is_flat(device, caplog):
    log = logging.getLogger(__name__)
    found = trace(lambda _: log.warning("got %s", block()), [1, 2], cycles=3)
    assert judge(found).verdict == "flat"
    assert caplog.records == []
    log.warning("got %s", block())
    assert len(caplog.records) == 1


def test_a_trace_is_saved_and_loaded_equal(device, tmp_path):
    kept = []
    found = trace(lambda _: kept.append(block()), [1], cycles=3)
    found.save(tmp_path / "trace.json")
    assert type(found).load(tmp_path / "trace.json") == found


def _library_trace(leaking_rank):
    import torch.distributed as dist

    kept = []

    def step(_):
        made = torch.empty(KIB, dtype=torch.uint8, device="cuda")
        if dist.get_rank() == leaking_rank:
            kept.append(made)

    found = pytest_sglmem.trace(step, [1, 2], cycles=3)
    again = pytest_sglmem.trace(step, [1], cycles=3)
    pair = dist.new_group([0, 1])
    some = pytest_sglmem.trace(step, [1], cycles=3, group=pair) if dist.get_rank() < 2 else None
    return found, again, some


@pytest.mark.world(size=3)
def test_trace_over_a_group_is_the_same_in_every_rank(world):
    whole = world.run(_library_trace, 2)
    assert whole[0][0] == whole[1][0] == whole[2][0]
    for found, again, _ in whole:
        assert judge(found).bytes_per_cycle == (0, 0, 2 * KIB)
        assert judge(again).bytes_per_cycle == (0, 0, KIB)
    assert whole[0][2].size == whole[1][2].size == 2
    assert whole[2][2] is None


def _step_that_raises_on(rank, at=3):
    import torch.distributed as dist

    steps = []

    def step(_):
        steps.append(1)
        if dist.get_rank() == rank and len(steps) == at:
            raise KeyError("no such request\nwith details")

    return step


def _failure(body):
    """What tracing raised here: its type's name, its text, the rank that it names."""
    try:
        body()
    except Exception as error:
        return type(error).__name__, str(error), getattr(error, "rank", None)
    return None


@pytest.mark.world(size=3)
@pytest.mark.parametrize("at", [1, 3, 8])
def test_a_rank_that_raises_in_an_existing_job_is_named_by_the_others(world, at):
    def job():
        return _failure(lambda: trace(_step_that_raises_on(1, at), [1, 2], cycles=3))

    told = ("PeerFailed", "rank 1 of this trace raised KeyError: 'no such request\\nwith details'", 1)
    assert world.run(job) == [told, ("KeyError", "'no such request\\nwith details'", None), told]


@pytest.mark.world(size=2)
def test_what_is_wrong_on_one_rank_only_is_told_too(world):
    def job():
        import torch.distributed as dist

        step, over = (flat, [1]) if dist.get_rank() else (None, [1])
        empty = _failure(lambda: trace(flat, over if dist.get_rank() else [], cycles=3))
        return empty, _failure(lambda: trace(step, over, cycles=3))

    (mine, _), (theirs, other) = world.run(job)
    assert mine[0] == "ValueError"
    assert theirs == ("PeerFailed", f"rank 0 of this trace raised ValueError: {mine[1]}", 0)
    assert other[1].startswith("rank 0 of this trace raised TypeError: setup must return the step")


@pytest.mark.world(size=3)
def test_the_others_of_a_group_are_named_by_their_rank_in_the_job(world):
    def job():
        import torch.distributed as dist

        pair = dist.new_group([1, 2])
        if dist.get_rank() == 0:
            return None
        found = trace(flat, [1], cycles=3, group=pair)
        failed = _failure(lambda: trace(_step_that_raises_on(2), [1], cycles=3, group=pair))
        return [rank.rank for rank in found.ranks], failed[2]

    assert world.run(job)[1:] == [([1, 2], 2), ([1, 2], None)]


@pytest.mark.world(size=2)
def test_a_rank_that_leaves_without_a_word_is_named(world):
    def job():
        import contextlib

        import torch.distributed as dist

        from pytest_sglmem.tracing import Meeting

        if dist.get_rank() == 1:
            Meeting.telling = lambda self: contextlib.nullcontext()  # as a process does that is killed
        return _failure(lambda: trace(_step_that_raises_on(1), [1], cycles=3))

    assert world.run(job)[0] == ("PeerFailed", "rank 1 of this trace ended without a word", 1)


@pytest.mark.world(size=2)
def test_a_rank_that_does_not_come_is_waited_for_until_the_limit(world):
    def job():
        import torch.distributed as dist

        failed = None
        if dist.get_rank() == 0:
            failed = _failure(lambda: trace(flat, [1], timeout=0.5))
        dist.barrier()
        return failed

    assert world.run(job)[0] == ("PeerFailed", "rank 1 of this trace did not come within 0.5 s", 1)


@pytest.mark.world(size=2)
def test_a_step_that_outlasts_the_limit_is_named_and_its_rank_learns_of_it(world):
    def job():
        import torch.distributed as dist

        steps = []

        def step(_):
            steps.append(1)
            if dist.get_rank() == 1 and len(steps) == 3:
                dist.recv(torch.zeros(1, device="cpu"), src=0)  # until rank 0 has given up

        failed = _failure(lambda: trace(step, [1], timeout=0.5))
        if dist.get_rank() == 0:
            dist.send(torch.zeros(1, device="cpu"), dst=1)
        return failed

    gave_up = "rank 1 of this trace did not come within 0.5 s"
    assert world.run(job) == [
        ("PeerFailed", gave_up, 1),
        ("PeerFailed", f"rank 0 of this trace gave up: {gave_up}", 0),
    ]


@pytest.mark.parametrize("wrong", [0, -1, True, "5", None])
def test_a_wrong_timeout_is_refused(device, wrong):
    with pytest.raises(ValueError, match=f"got {wrong!r}"):
        trace(flat, [1], timeout=wrong)


@pytest.mark.world(size=3)
def test_a_step_that_raises_in_one_rank_of_a_world_is_one_failure(world):
    with pytest.raises(RankRaised, match="rank 1 of 3 raised KeyError") as caught:
        world.trace(_step_that_raises_on, [1, 2], cycles=3, args=(1,))
    assert "PeerFailed" not in str(caught.value)
    assert world.run(lambda: 1) == [1, 1, 1]  # nobody was put away


@pytest.mark.world(size=2)
def test_a_step_that_skips_in_one_rank_skips(world):
    def setup():
        import torch.distributed as dist

        def step(_):
            if dist.get_rank() == 1:
                pytest.skip("not on this one")

        return step

    with pytest.raises(pytest.skip.Exception, match="not on this one"):
        world.trace(setup, [1], cycles=3)


def _leaks_on_rank_2():
    import os

    kept = []
    return lambda _: kept.append(block(KIB * (os.environ["RANK"] == "2")))


@pytest.mark.world(size=3, init=False)
def test_the_ranks_that_are_left_keep_their_numbers(world, live_bytes):
    def dies():
        import os

        os._exit(3)

    with pytest.raises(RankDied, match="rank 1"):
        world.run_on([1], dies)
    verdict = live_bytes.judge(world.trace(_leaks_on_rank_2, [1], cycles=3))
    assert verdict.bytes_per_cycle == (0, 0, KIB)
    assert verdict.settled == ((0, 0, 0), (), (2 * KIB, 3 * KIB, 4 * KIB))
    assert verdict.sites[0].ranks == (2,)


def late_setup():
    import torch.distributed as dist
    from torch.multiprocessing.reductions import reduce_tensor

    def step(_):
        box = [None]
        if dist.get_rank() == 0:
            made = torch.zeros(KIB, dtype=torch.uint8, device="cuda")
            box = [reduce_tensor(made)]
            del made  # before the peer gave it back: it waits for somebody's ipc_collect
        dist.broadcast_object_list(box, src=0)
        if dist.get_rank() == 1:
            rebuild, args = box[0]
            rebuild(*args)
        dist.barrier()

    return step


@pytest.mark.world(size=2)
def test_memory_that_only_ipc_collect_brings_back_is_late(world, live_bytes):
    verdict = live_bytes.judge(world.trace(late_setup, [1], cycles=3))
    assert (verdict.verdict, verdict.late_bytes) == ("late", (KIB, 0))


def ring_setup():
    ranks = []

    def step(_):
        import torch.distributed as dist

        ranks.append(torch.empty(KIB if dist.get_rank() else 2 * KIB, dtype=torch.uint8, device="cuda"))
        if dist.get_rank() == 0 and len(ranks) > 5:
            ranks.pop(0)
        elif dist.get_rank() == 1:
            ranks.clear()

    return step


@pytest.mark.world(size=2)
def test_all_ranks_take_as_many_cycles(world, live_bytes):
    # Rank 1 is settled after three cycles, rank 0 fills until the sixth.
    trace = world.trace(ring_setup, [1])
    assert [len(rank.ends) for rank in trace.ranks] == [len(trace.ranks[0].ends)] * 2
    verdict = live_bytes.judge(trace)
    assert verdict.verdict == "filling"
    assert 5 <= verdict.cycles < 12


def destroys_its_group():
    def step(_):
        import torch.distributed as dist

        torch.empty(KIB, dtype=torch.uint8, device="cuda")
        if dist.is_initialized():
            dist.destroy_process_group()

    return step


@pytest.mark.world(size=2)
def test_the_code_under_test_may_destroy_its_group(world, live_bytes):
    assert live_bytes.judge(world.trace(destroys_its_group, [1], cycles=3)).verdict == "flat"


@pytest.mark.world(size=2)
@pytest.mark.inject("dist.barrier=raise(RuntimeError)", "cuda.synchronize=raise(RuntimeError)", "gc.enable=skip")
def test_injected_faults_do_not_strike_the_harness(world, live_bytes):
    assert live_bytes.judge(world.trace(lambda: flat, [1], cycles=3)).verdict == "flat"
    assert world.run(gc.isenabled) == [True, True]


def shared_setup(handles):
    import torch.distributed as dist
    from torch.multiprocessing.reductions import reduce_tensor

    def step(_):
        box = [None]
        if dist.get_rank() == 0:
            made = torch.zeros(KIB, dtype=torch.uint8, device="cuda")
            box = [[reduce_tensor(made) for _ in range(handles)]]
        dist.broadcast_object_list(box, src=0)
        if dist.get_rank() == 1:
            for at in range(2):
                rebuild, args = box[0][at % handles]
                rebuild(*args)
        dist.barrier()

    return step


@pytest.mark.world(size=2)
def test_a_trace_is_not_charged_with_the_one_before(world, live_bytes):
    broken = live_bytes.judge(world.trace(shared_setup, [1], cycles=3, args=(1,)))
    mended = live_bytes.judge(world.trace(shared_setup, [1], cycles=3, args=(2,)))
    assert (broken.verdict, broken.ipc.faults[0].kind) == ("leak", "over-released")
    assert (mended.verdict, mended.ipc.faults, mended.ipc.exports) == ("flat", (), 8)

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import os
import re
import select
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest

from pytest_sglmem import stacks
from pytest_sglmem.faults import parse
from pytest_sglmem.launch import BACKENDS, Spec, Unavailable
from pytest_sglmem.records import Answer
from pytest_sglmem.world import RankDied, RankError, RankRaised, RankSilent, World

if sys.version_info < (3, 11):
    from exceptiongroup import ExceptionGroup

pytestmark = pytest.mark.filterwarnings("default::pytest_sglmem.world.RankWarning")


@pytest.fixture
def start(launcher, tmp_path):
    """Worlds of this test; each is closed at its end, and nothing of it may be left."""
    worlds = []

    def start(size=2, **spec):
        spec = {"timeout": 30.0, "artifacts": str(tmp_path), **spec}
        worlds.append(World.start(launcher, Spec(size=size, **spec)))
        return worlds[-1]

    yield start
    for world in worlds:
        world.close()
    assert not list(launcher.folder.glob("world-*"))


def rank():
    import torch.distributed as dist

    return dist.get_rank()


class Point:
    def __init__(self, x):
        self.x = x


# ---------------------------------------------------------------------------------------- what works


def test_one_result_a_rank_in_order(start):
    world = start(3)
    assert world.run(rank) == [0, 1, 2]
    assert (world.size, world.device, world.backend, world.device_name) == (3, "emulated", "gloo", "emulated")


def test_run_on_keeps_the_order_asked_for(start):
    world = start(3)
    assert world.run_on([2, 0], rank) == [2, 0]
    assert world.run_on(1, rank) == [1]


@pytest.mark.parametrize("ranks", [[], [3], [-1], [True], ["0"]])
def test_run_on_refuses_ranks_that_are_not_there(start, ranks):
    world = start(1)
    with pytest.raises(ValueError, match=r"got"):
        world.run_on(ranks, rank)


def test_closures_partials_methods_and_classes_cross(start):
    world = start()
    offset = 10
    assert world.run(lambda x, *, y: x + y + offset, 1, y=2) == [13, 13]
    assert world.run(functools.partial(pow, 2), 3) == [8, 8]
    back = world.run(lambda: Point(rank()))
    assert [type(point) for point in back] == [Point, Point]
    assert [point.x for point in back] == [0, 1]
    assert world.run(Point(5).__class__.__name__.lower) == ["point", "point"]


def test_tensors_of_the_device_arrive_on_the_cpu(start):
    import torch

    def ones():
        import torch

        return {"t": torch.ones(3, device="cuda") * (rank() + 1)}

    first, second = start().run(ones)
    assert first["t"].device == torch.device("cpu")
    assert torch.equal(second["t"], torch.full((3,), 2.0))


def test_a_collective_works_and_the_device_is_current(start):
    def total():
        import torch
        import torch.distributed as dist

        t = torch.tensor([dist.get_rank() + 1], device="cuda")
        dist.all_reduce(t)
        return int(t), t.device.index, torch.cuda.current_device()

    assert start(3).run(total) == [(6, 0, 0), (6, 1, 1), (6, 2, 2)]


def test_the_environment_is_torchruns_and_the_tests(start, monkeypatch, tmp_path):
    monkeypatch.setenv("SGLMEM_TEST", "seen")
    monkeypatch.chdir(tmp_path)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "SGLMEM_TEST")

    def environment():
        import os

        assert int(os.environ["MASTER_PORT"]) > 0
        return [os.environ[name] for name in names], os.getcwd()

    first, second = start().run(environment)
    assert first == (["0", "0", "2", "2", "127.0.0.1", "seen"], str(tmp_path))
    assert second[0][:2] == ["1", "1"]


def test_the_seed_decides_every_source_of_chance(start):
    def drawn():
        import random

        import torch

        return random.random(), torch.rand(4).tolist(), torch.rand(4, device="cuda").tolist(), torch.cuda.initial_seed()

    first, again, other = (start(size=2, seed=seed).run(drawn) for seed in (3, 3, 4))
    assert first == again
    assert first[0] == first[1]
    assert all(one != two for one, two in zip(first[0], other[0], strict=True))


def test_import_path_changes_reach_running_ranks(start, monkeypatch, tmp_path):
    world = start(1)
    (tmp_path / "only_here.py").write_text("VALUE = 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert world.run(lambda: __import__("only_here").VALUE) == [7]


SEEN = []


def test_a_module_that_ranks_import_keeps_its_state_and_a_test_module_does_not(start, monkeypatch, tmp_path):
    (tmp_path / "kept_in_ranks.py").write_text("SEEN = []\n")
    monkeypatch.syspath_prepend(tmp_path)

    def append():
        import kept_in_ranks

        SEEN.append(1)
        kept_in_ranks.SEEN.append(1)
        return len(SEEN), len(kept_in_ranks.SEEN)

    world = start(1)
    assert [world.run(append), world.run(append)] == [[(1, 1)], [(1, 2)]]
    assert SEEN == []


def test_a_world_without_a_group_leaves_it_to_the_code_under_test(start):
    world = start(2, init=False)
    assert world.backend is None

    def own():
        import torch.distributed as dist

        assert not dist.is_initialized()
        dist.init_process_group("gloo")
        dist.barrier()
        return dist.get_world_size()

    assert world.run(own) == [2, 2]


def test_frozen_imports_are_not_seen_by_the_collector(start):
    assert max(start().run(lambda: len(__import__("gc").get_objects()))) < 10_000


# --------------------------------------------------------------------------------- raised


def test_raised_says_rank_type_place_and_shows_the_assert(start):
    def less():
        me = rank()
        assert me < 1

    with pytest.raises(RankRaised) as caught:
        start(2).run(less)
    text = str(caught.value)
    assert text.startswith("rank 1 of 2 raised AssertionError: assert 1 < 1\nin less (")
    assert "E       assert 1 < 1" in text
    assert "test_world.py" in text
    assert (caught.value.rank, caught.value.ranks, caught.value.type) == (1, (1,), "AssertionError")
    assert "rank.py" not in text


def test_equal_exceptions_fold(start):
    def fail():
        raise ValueError("the same")

    with pytest.raises(RankRaised, match=r"^ranks 0-2 of 3 raised ValueError: the same") as caught:
        start(3).run(fail)
    assert caught.value.ranks == (0, 1, 2)


def test_different_exceptions_are_a_group(start):
    def differ():
        raise (KeyError if rank() else ValueError)(f"from rank {rank()}")

    with pytest.raises(ExceptionGroup, match="2 different failures in ranks, in differ") as caught:
        start(2).run(differ)
    assert [type(one) for one in caught.value.exceptions] == [RankRaised, RankRaised]
    assert [one.ranks for one in caught.value.exceptions] == [(0,), (1,)]


@pytest.mark.parametrize("shown", [True, False])
def test_locals_of_the_failing_frame(start, shown):
    def fail():
        tell_tale = 4321
        assert not tell_tale

    with pytest.raises(RankRaised) as caught:
        start(1, showlocals=shown).run(fail)
    assert ("tell_tale  = 4321" in str(caught.value)) is shown


def test_a_function_that_takes_the_world_along_is_told_what_to_use(start):
    world = start(2)
    with pytest.raises(TypeError, match=r"get_world_size\(\) is its size"):
        world.run(lambda: world.size)
    assert world.run(lambda: 1) == [1, 1]


def test_an_exception_that_does_not_pickle_or_print_crosses_as_text(start):
    class Locked(Exception):
        def __init__(self):
            import threading

            self.lock = threading.Lock()

        def __str__(self):
            raise RuntimeError("no text")

    def fail():
        raise Locked

    with pytest.raises(RankRaised, match=r"Locked: \(its __str__ raised RuntimeError\)"):
        start(1).run(fail)


def test_the_cause_of_an_exception_is_shown(start):
    def fail():
        try:
            raise KeyError("first")
        except KeyError as error:
            raise ValueError("second") from error

    with pytest.raises(RankRaised) as caught:
        start(1).run(fail)
    assert "KeyError: 'first'" in str(caught.value)
    assert "direct cause" in str(caught.value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: (n for n in range(3)), "the result is a generator"),
        (lambda: {"a": [1, (n for n in range(3))]}, r"result\['a'\]\[1\] is a generator"),
        (lambda: Point(__import__("threading").Lock()), r"result\.x is a lock"),
        (lambda: [answers()], r"result\[0\] is a coroutine .*never awaited: call asyncio.run in the rank"),
    ],
)
def test_a_result_that_cannot_cross_says_what_and_where(start, make, words):
    with pytest.raises(RankRaised, match=f"ranks 0, 1 of 2 raised .*ResultError: .*{words}"):
        start(2).run(make)


async def answers(number=0):
    await asyncio.sleep(0)
    return number + rank()


def test_an_async_function_runs_to_its_end(start):
    async def fails():
        await asyncio.sleep(0)
        assert rank() == 2

    world = start(2)
    assert world.run(answers, 4) == [4, 5]
    assert world.run(lambda: answers(number=6)) == [6, 7]
    with pytest.raises(RankRaised, match=r"rank 0 of 2 raised AssertionError: assert 0 == 2\nin fails \("):
        world.run_on(0, fails)


def test_an_async_function_that_hangs_waits_in_its_event_loop(start):
    world = start(1)
    with pytest.raises(RankSilent, match=r"in sleep\nrank 0 is in an event loop that waits"):
        world.run(asyncio.sleep, 3600, timeout=0.5)


def yields(number):
    yield number


@pytest.mark.parametrize(
    ("step", "words"),
    [(answers, "is async"), (lambda n: answers(n), "is async"), (yields, "is a generator function")],
    ids=["async", "gives-a-coroutine", "generator"],
)
def test_a_step_of_which_nothing_would_run_does_not_pass(start, step, words):
    with pytest.raises(RankRaised, match=f"TypeError: the step .* {words}"):
        start(1).trace(lambda: step, [1])


def test_a_function_that_cannot_be_sent_is_said_before_anything_is(start):
    lock = __import__("threading").Lock()
    world = start(1)
    with pytest.raises(TypeError, match=r"<lambda> .* cannot be sent to the ranks: .*lock"):
        world.run(lambda: lock)
    with pytest.raises(TypeError, match=r"^<lambda> \(.*\) cannot be sent to the ranks: its 'lock' is a lock: "):
        world.run(lambda: lock)
    with pytest.raises(TypeError, match=r"^rank .* cannot be sent to the ranks: argument 1\['a'\] is a lock: "):
        world.run(rank, 1, {"a": lock})
    with pytest.raises(TypeError, match=r"^rank .* cannot be sent to the ranks: key= is a lock: "):
        world.run(rank, key=lock)
    assert world.run(rank) == [0]


def test_sys_exit_and_breakpoint_are_told(start):
    world = start(1)
    with pytest.raises(RankRaised, match="SystemExit: 3"):
        world.run(lambda: sys.exit(3))
    with pytest.raises(RankRaised, match=r"breakpoint\(\) in a rank: ranks have no terminal"):
        world.run(lambda: breakpoint())
    assert world.run(rank) == [0]


def test_after_an_exception_in_every_rank_the_world_goes_on(start):
    world = start(2)
    with pytest.raises(RankRaised):
        world.run(lambda: 1 / 0)
    assert not world.broken
    assert world.run(rank) == [0, 1]


def test_an_exception_leaves_no_tensor_behind(start):
    def fail():
        import torch

        kept = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
        raise ValueError(kept.shape)

    world = start(1)
    with pytest.raises(RankRaised):
        world.run(fail)
    assert world.run(lambda: __import__("torch").cuda.memory_allocated()) == [0]


def test_a_rank_that_raises_while_others_wait_is_reported_at_once(start):
    def fail():
        import torch.distributed as dist

        if rank() == 1:
            raise ValueError("instead of coming")
        dist.barrier()

    world = start(3, timeout=60.0)
    with pytest.raises(RankRaised, match="rank 1 of 3 raised ValueError") as caught:
        world.run(fail)
    assert "meanwhile ranks 0, 2 wait in barrier (" in str(caught.value)
    assert world.broken


# ------------------------------------------------------------------------------------- died


def test_killed_says_signal_call_output_and_peers(start):
    def die():
        import torch.distributed as dist

        dist.barrier()
        print("last words", end="")
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    world = start(2)
    with pytest.raises(RankDied) as caught:
        world.run(die)
    text = str(caught.value)
    assert text.startswith("rank 1 of 2 died: killed by SIGKILL\nin die (")
    assert "last words" in text
    assert "rank 1 went into its last collective with barrier, number 1" in text
    assert (caught.value.ranks, caught.value.exit_code) == ((1,), -signal.SIGKILL)
    assert world.broken


def test_a_crash_shows_where(start):
    def crash():
        import ctypes

        ctypes.string_at(0)

    with pytest.raises(RankDied, match="killed by SIGSEGV") as caught:
        start(1).run(crash)
    assert "in crash" in str(caught.value).split("innermost first:")[1]


@pytest.mark.parametrize("code", [0, 3])
def test_exit_codes_are_told_and_zero_is_no_success(start, code):
    with pytest.raises(RankDied, match=f"rank 0 of 2 died: exit code {code}") as caught:
        start(2).run(lambda: os._exit(code) if rank() == 0 else None)
    assert caught.value.exit_code == code


def test_a_broken_world_says_why_and_its_survivors_still_answer(start):
    world = start(2)
    with pytest.raises(RankDied):
        world.run_on(0, lambda: os._exit(3))
    with pytest.raises(RankDied, match=r"no call can go to rank 0: .*exit code 3"):
        world.run(rank)
    assert world.run_on(1, rank) == [1]
    assert world.audit().faults == ()


def test_a_rank_that_ends_between_two_calls_is_judged(start, tmp_path):
    def later():
        import threading

        threading.Thread(target=lambda: os._exit(int(told.read_text()))).start()
        return os.getpid()

    told = tmp_path / "told"
    os.mkfifo(told)
    world = start(1)
    ended = os.pidfd_open(*world.run(later))
    told.write_text("5")
    assert select.select([ended], [], [], 20)[0]
    os.close(ended)
    world._launcher._listen_until(lambda: world._processes[0].exit_code() is not None, time.monotonic() + 20, "to reap")
    with pytest.raises(RankDied, match="ended between two calls: exit code 5"):
        world.run(rank)


def test_a_bad_end_is_judged_at_close(launcher):
    def leave_badly():
        import atexit

        if rank() == 1:
            atexit.register(os._exit, 9)

    world = World.start(launcher, Spec(size=2))
    world.run(leave_badly)
    with pytest.raises(RankDied, match="rank 1 died: exit code 9, while ending"):
        world.close()
    world.close()


def test_exit_functions_of_the_code_under_test_run(start, tmp_path):
    path = tmp_path / "ran"

    def leave_well():
        import atexit

        atexit.register(path.write_text, "yes")

    world = start(1)
    world.run(leave_well)
    world.close()
    assert path.read_text() == "yes"


def test_a_fork_that_comes_back_from_the_call_answers_nothing(start):
    def forks(end):
        child = os.fork()
        if not child:
            return end()
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    world = start(1)
    assert world.run(forks, int) == [0]
    assert world.run(forks, sys.exit) == [0]
    assert world.run(forks, lambda: sys.exit(3)) == [3]
    assert world.run(forks, lambda: 1 / 0) == [1]
    assert "a fork of rank 0 raised" in world.outputs[0]
    assert "ZeroDivisionError" in world.outputs[0]
    assert world.run(rank) == [0]


def test_a_rank_whose_pipe_the_code_closed_says_so(start):
    with pytest.raises(RankDied, match="the code under test has closed rank 0's pipe to pytest") as caught:
        start(1, init=False).run(lambda: os.closerange(3, 4096))  # gloo's threads would abort the rank
    assert caught.value.exit_code == os.EX_SOFTWARE


def test_exceptions_that_differ_in_an_address_alone_are_equal(start):
    def differ():
        kept = [object() for _ in range(1 + rank())]
        raise ValueError(f"<object at {id(kept[-1]):#x}>")

    with pytest.raises(RankRaised, match=r"^ranks 0, 1 of 2 raised ValueError: <object at 0x"):
        start(2).run(differ)


def test_a_result_that_can_only_be_read_in_a_rank_is_named(start):
    def remove():
        return os.remove, ("/no/such/file",)

    class Gone:
        __reduce__ = staticmethod(remove)

    with pytest.raises(RankError, match="the result of rank 0 cannot be read here: FileNotFoundError"):
        start(1).run(Gone)


def test_an_exit_function_that_hangs_is_no_good_end(launcher, monkeypatch):
    from pytest_sglmem import world as module

    def leave_badly():
        import atexit

        atexit.register(time.sleep, 3600)

    monkeypatch.setattr(module, "FINISH_LIMIT", 0.5)
    world = World.start(launcher, Spec(size=1))
    world.run(leave_badly)
    with pytest.raises(RankSilent, match=r"rank 0 of 1 did not end within 0\.5 s, while ending"):
        world.close()


# ----------------------------------------------------------------------------------- threads of the test


def test_calls_of_threads_take_turns_and_each_gets_its_own_answers(start):
    world, got = start(2), {}

    def call(number):
        got[number] = world.run(lambda: (number, rank()))

    threads = [threading.Thread(target=call, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {number: [(number, 0), (number, 1)] for number in range(16)}


def test_a_call_that_a_thread_is_still_in_ends_with_the_test(start, tmp_path):
    os.mkfifo(tmp_path / "up")
    world, raised = start(1), []

    def call():
        try:
            world.run(lambda: (tmp_path / "up").write_text("up") and time.sleep(3600))
        except RankDied as error:
            raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    assert (tmp_path / "up").read_text() == "up"
    with pytest.raises(RankError, match="the test ended while a thread of it was in a call into the ranks: join it"):
        world.close()
    thread.join()
    assert [error.exit_code for error in raised] == [-signal.SIGKILL]


# ----------------------------------------------------------------------------------- silent


def test_silent_says_who_waits_and_who_never_came(start, tmp_path):
    def wanders_off():
        import time

        import torch.distributed as dist

        if rank() == 2:
            time.sleep(3600)
        dist.barrier()

    world = start(4, timeout=1.0)
    with pytest.raises(RankSilent) as caught:
        world.run(wanders_off)
    head, where, *_ = str(caught.value).splitlines()
    assert head.startswith("ranks 0-3 of 4 gave no answer within 1 s, in wanders_off (")
    assert where.startswith("ranks 0, 1, 3 wait in barrier (")
    assert "; rank 2 is in wanders_off (" in where
    assert where.endswith("never came")
    assert caught.value.ranks == (0, 1, 2, 3)
    assert "in wanders_off" in (tmp_path / "stacks-rank-2.txt").read_text()


def test_a_rank_that_holds_the_interpreter_lock_has_a_stack_too(start):
    def never_returns():
        import ctypes

        ctypes.PyDLL(None).sleep(3600)

    with pytest.raises(RankSilent, match=r"is in never_returns \(.*test_world.py:\d+\)"):
        start(1, timeout=0.5).run(never_returns)


def traces_on_its_own(wrong):
    import pytest_sglmem

    def step(n):
        wrong()

    return pytest_sglmem.trace(step, [1], cycles=2)


def test_a_trace_by_the_library_is_within_the_limit_too(start):
    def waits_alone():
        import torch.distributed as dist

        if rank() == 0:
            dist.barrier()

    with pytest.raises(
        RankSilent, match=r"rank 0 waits in barrier \(.*; rank 1 is in a quiet point of the trace, never"
    ):
        start(2, timeout=1.0).run(traces_on_its_own, waits_alone)


def test_frames_of_the_harness_between_two_of_the_tests_are_not_shown(start):
    with pytest.raises(RankRaised, match="ZeroDivisionError") as caught:
        start(1).run(traces_on_its_own, lambda: 1 / 0)
    assert "tracing.py" not in str(caught.value)
    assert re.findall(r"test_world.py:\d+: ?(\w*)", str(caught.value)) == ["", "", "ZeroDivisionError"]


def test_a_limit_of_one_call(start):
    world = start(1)
    with pytest.raises(RankSilent, match=r"within 0.2 s"):
        world.run(__import__("time").sleep, 3600, timeout=0.2)
    assert world.broken


def test_a_function_of_c_that_does_not_return_is_no_line_of_the_tests(start):
    with pytest.raises(RankSilent, match="rank 0 is in native code"):
        start(1).run(time.sleep, 3600, timeout=0.5)


@pytest.mark.parametrize("timeout", [0, -1])
def test_a_limit_that_cannot_be(start, timeout):
    world = start(1)
    with pytest.raises(ValueError, match=f"got timeout={timeout}"):
        world.run(rank, timeout=timeout)


def test_a_rank_that_returns_without_the_others_is_found_before_the_limit(start):
    def skips():
        import torch.distributed as dist

        dist.barrier()
        if rank() != 1:
            dist.barrier()

    with pytest.raises(RankSilent) as caught:
        start(3, timeout=600.0).run(skips)
    head, where, *_ = str(caught.value).splitlines()
    assert head.startswith("ranks 0, 2 of 3 wait for what cannot come, in skips")
    assert where.endswith("; rank 1 returned without it")


def test_a_rank_with_a_thread_that_may_still_come_is_not_accused(start, monkeypatch, tmp_path):
    looked = tmp_path / "looked"
    os.mkfifo(looked)
    proven = stacks.deadlocked

    def judged(*args):
        """The thread comes only once the ranks have been looked at, and twice at that."""
        found = proven(*args)
        looks.append(found)
        if len(looks) == 2:
            looked.write_text("come")
        return found

    looks = []
    monkeypatch.setattr(stacks, "deadlocked", judged)
    monkeypatch.setattr("pytest_sglmem.world.STALL_LOOK", 0.05)

    def late():
        import threading

        import torch.distributed as dist

        def come():
            looked.read_text()
            dist.barrier()

        if rank() == 1:
            threading.Thread(target=come).start()
        else:
            dist.barrier()
        return True

    assert start(2, timeout=60.0).run(late) == [True, True]
    assert looks == [False, False]


def test_a_late_answer_does_not_answer_the_next_call(start):
    world = start(2)
    current = world._number
    world._processes[0].pipe.send(__import__("pickle").dumps((current - 5, "run", (_body(rank),))), limit=1)
    assert world.run(lambda: "mine") == ["mine", "mine"]


def _body(fn):
    import io

    from pytest_sglmem.rank import CallPickler

    buffer = io.BytesIO()
    CallPickler(buffer).dump((fn, (), {}))
    return buffer.getvalue()


def test_different_collectives_are_named(start):
    def mismatch():
        import torch
        import torch.distributed as dist

        t = torch.ones(4, device="cuda")
        dist.all_reduce(t)
        dist.all_reduce(t) if rank() else dist.barrier()

    with pytest.raises(RankSilent, match="ranks 0, 1 of 2 wait for what cannot come") as caught:
        start(2, timeout=600.0).run(mismatch)
    text = str(caught.value)
    assert "mismatched collectives: number 2 of group '0' is barrier on rank 0, all_reduce(4 float32) on rank 1" in text


def test_different_sizes_are_named(start):
    def mismatch():
        import torch
        import torch.distributed as dist

        dist.all_reduce(torch.ones(4 + 60 * rank()))

    with pytest.raises((RankSilent, RankRaised, RankDied, ExceptionGroup)) as caught:
        start(2, timeout=2.0).run(mismatch)
    assert "all_reduce(4 float32) on rank 0, all_reduce(64 float32) on rank 1" in _whole_text(caught.value)


def _whole_text(error):
    return str(error) + "".join(map(_whole_text, getattr(error, "exceptions", ())))


# ------------------------------------------------------------------- pytest's own words in a rank


def test_skip_in_a_rank_skips_the_call(start):
    with pytest.raises(pytest.skip.Exception, match="ranks 0, 1: not here"):
        start(2).run(lambda: pytest.skip("not here"))


def test_skip_in_one_rank_is_enough_where_none_fails(start):
    world = start(2)
    with pytest.raises(pytest.skip.Exception, match="rank 1: could not import 'no_such_module'"):
        world.run(lambda: pytest.importorskip("no_such_module") if rank() else None)
    assert world.run(rank) == [0, 1]


def test_an_error_outweighs_a_skip(start):
    def both():
        if rank():
            pytest.skip("not here")
        raise ValueError("but this")

    with pytest.raises(RankRaised, match="rank 0 of 2 raised ValueError: but this"):
        start(2).run(both)


def test_fail_outweighs_xfail_outweighs_skip(start):
    world = start(3)
    words = [pytest.skip, pytest.xfail, pytest.fail]
    with pytest.raises(pytest.fail.Exception, match="rank 2: said"):
        world.run(lambda: words[rank()]("said"))
    with pytest.raises(pytest.xfail.Exception, match="ranks 1, 2: said"):
        world.run(lambda: words[min(rank(), 1)]("said"))


def test_raises_and_monkeypatch_inside_a_rank(start):
    def body():
        with pytest.raises(ZeroDivisionError):
            1 / 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RANK", "99")
            return os.environ["RANK"]

    world = start(1)
    assert world.run(body) == ["99"]
    assert world.run(lambda: os.environ["RANK"]) == ["0"]


def test_warnings_are_repeated_here_once_with_their_ranks(start):
    def warn():
        warnings.warn("twice the same", DeprecationWarning, stacklevel=1)
        warnings.warn(f"of rank {rank()}", UserWarning, stacklevel=1)

    world = start(2)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        world.run(warn)
    assert [(one.category.__name__, str(one.message)) for one in given] == [
        ("DeprecationWarning", "ranks 0, 1: twice the same"),
        ("UserWarning", "rank 0: of rank 0"),
        ("UserWarning", "rank 1: of rank 1"),
    ]
    assert given[0].filename == __file__


def test_filters_hold_in_ranks(start):
    def warn():
        warnings.warn("mind this", RuntimeWarning, stacklevel=1)
        return "went on"

    world = start(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with pytest.raises(RankRaised, match="RuntimeWarning: mind this"):
            world.run(warn)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        assert world.run(warn) == ["went on"]


# --------------------------------------------------------------------------------------- output


def test_output_of_each_rank_from_python_and_from_c(start):
    def chatty():
        import ctypes

        print("hello from", rank())
        print("to stderr", file=sys.stderr)
        os.write(1, b"by descriptor\n")
        ctypes.CDLL(None).puts(b"from C")

    world = start(2)
    world.run(chatty)
    expected = "hello from {}\nto stderr\nby descriptor\nfrom C\n"
    assert world.outputs == [expected.format(0), expected.format(1)]
    world.close()
    assert world.outputs == [expected.format(0), expected.format(1)]


def test_live_output_has_a_prefix_and_comes_while_the_rank_runs(start, capsys):
    def chatty():
        print("one\ntwo")

    start(2, live_output=True).run(chatty)
    assert sorted(capsys.readouterr().out.splitlines()) == [
        "[rank 0] one",
        "[rank 0] two",
        "[rank 1] one",
        "[rank 1] two",
    ]


# ---------------------------------------------------------------------------------- shared worlds


def test_renew_makes_a_new_group_in_the_same_ranks(start):
    world = start(2)
    before = world.run(os.getpid)
    world.run(lambda: print("old"))
    world.renew()
    assert world.run(os.getpid) == before
    assert world.outputs == ["", ""]

    def collective():
        import torch
        import torch.distributed as dist

        t = torch.ones(1)
        dist.all_reduce(t)
        return int(t)

    assert world.run(collective) == [2, 2]


def test_renew_replaces_a_broken_world(start):
    world = start(2)
    before = world.run(os.getpid)
    with pytest.raises(RankDied):
        world.run(lambda: os._exit(1) if rank() else None)
    world.renew()
    assert not world.broken
    assert not set(world.run(os.getpid)) & set(before)


def test_renew_mends_what_the_last_test_did_to_the_group(start):
    world = start(2)

    def destroy():
        import torch.distributed as dist

        dist.destroy_process_group()

    world.run(destroy)
    world.renew()
    assert world.run(rank) == [0, 1]


# --------------------------------------------------------------------------------- coming up, ending


def test_a_backend_that_is_not_there_is_a_reason_to_skip(start):
    with pytest.raises(Unavailable, match="no backend 'mpi'"):
        start(1, backend="mpi")


def test_nccl_on_the_emulated_device_is_served(start):
    assert start(2, backend="nccl").run(rank) == [0, 1]


def test_a_world_that_came_up_smaller_does_not_pass(start, monkeypatch):
    from pytest_sglmem import rank as far_side

    world = start(2)
    hello = {"size": 1, "backend": "gloo", "group_rank": 0, "pid": 1}
    answers = {
        number: Answer(0, number, far_side.dump_result({**hello, "group_rank": 0, "size": 1})) for number in range(2)
    }
    from pytest_sglmem.world import _Round

    with pytest.raises(RankError, match="rank 0 came up as rank 0 of 1, not as rank 0 of 2"):
        world._welcome(_Round(0, "coming up", 1.0, set(), answers))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"size": 0}, "size=0"),
        ({"size": True}, "size=True"),
        ({"size": 2.0}, r"size=2\.0"),
        ({"timeout": 0}, "timeout=0"),
        ({"device": "tpu"}, "'tpu'"),
        ({"backend": "typo"}, "the backend is one of gloo, nccl, .* \\(got 'typo'\\)"),
        ({"backend": "cpu:gloo,cuda:typo"}, "got 'cpu:gloo,cuda:typo'"),
        ({"backend": "gpu:nccl"}, "got 'gpu:nccl'"),
        ({"backend": ""}, "got ''"),
    ],
)
def test_a_world_that_cannot_be(spec, words):
    with pytest.raises(ValueError, match=words):
        Spec(**spec)


@pytest.mark.parametrize("backend", [*BACKENDS, "cpu:gloo,cuda:nccl", "cuda:gloo", None])
def test_a_world_that_torch_may_have(backend):
    assert Spec(backend=backend).backend == backend


def test_a_backend_that_is_registered_here_is_none_that_cannot_be(start, monkeypatch):
    import torch.distributed as dist

    monkeypatch.setattr(dist.Backend, "backend_list", [*dist.Backend.backend_list, "ours"])
    with pytest.raises(Unavailable, match="no backend 'ours'"):
        start(1, backend="ours")


def test_specs_can_be_keys():
    assert len({Spec(), Spec(), dataclasses.replace(Spec(), size=3)}) == 2


def test_what_a_rank_started_ends_with_it(start):
    def child():
        import subprocess

        return subprocess.Popen(["sleep", "3600"]).pid

    world = start(1)
    (pid,) = world.run(child)
    world.close()
    with contextlib.suppress(ProcessLookupError):
        assert select.select([os.pidfd_open(pid)], [], [], 20)[0]


def test_an_interrupted_call_leaves_no_rank(start, monkeypatch):
    world = start(2)
    pids = world.run(os.getpid)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(world, "_collect", interrupted)
    with pytest.raises(KeyboardInterrupt):
        world.run(__import__("time").sleep, 3600)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert world.broken


def test_a_rank_that_ignores_sigterm_is_killed_although_nothing_more_is_asked_of_its_world(start):
    def stubborn():
        import signal
        import time

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(3600)

    world = start(1, timeout=0.5)
    (pid,) = world.run(os.getpid)
    ended = os.pidfd_open(pid)
    with pytest.raises(RankSilent):
        world.run(stubborn)
    assert not select.select([ended], [], [], 0)[0]  # the report did not wait for it
    assert select.select([ended], [], [], 20)[0]
    os.close(ended)
    world._put_away({0})
    assert world._processes[0].exit_code() == -signal.SIGKILL


def test_a_process_that_does_not_end_is_named_and_waited_for_no_longer(start, monkeypatch):
    from pytest_sglmem import world as module

    world = start(1)
    monkeypatch.setattr(module, "KILL_LIMIT", 0.0)
    monkeypatch.setattr(type(world._processes[0]), "signal", lambda *_: None)
    with pytest.warns(module.RankWarning, match=r"rank 0 \(process \d+\) did not end .* after SIGKILL"):
        world._abandon("for the test")
    monkeypatch.undo()
    world._put_away({0})


# ------------------------------------------------------------------------------- faults and traces


def test_faults_armed_while_ranks_run_count_and_are_taken_back(start):
    world = start(2)
    fault = parse("dist.barrier@rank=1=skip", origin="test")

    def barrier():
        import torch.distributed as dist

        dist.barrier()

    world.arm((fault,))
    world.run_on(1, barrier)
    assert world.fired() == {fault.text: (0, 1)}
    assert world.disarm() == {fault.text: (0, 1)}
    assert world.fired() == {}
    world.run(barrier)


def test_a_fault_that_ends_a_rank_is_counted_all_the_same(start):
    fault = parse("dist.barrier@rank=1=kill", origin="test")
    world = start(2, faults=(fault,))

    def barrier():
        import torch.distributed as dist

        dist.barrier()

    with pytest.raises(RankDied, match="rank 1 of 2 died: killed by SIGKILL"):
        world.run(barrier)
    assert world.fired() == {fault.text: (0, 1)}


def leaks_on_rank_1():
    import torch

    kept = []

    def step(size):
        block = torch.empty(size, dtype=torch.uint8, device="cuda")
        if rank() == 1:
            kept.append(block)
        return block

    return step


def test_trace_has_every_rank_and_what_they_share(start):
    world = start(2)
    seen = []
    world.on_progress = seen.append
    trace = world.trace(leaks_on_rank_1, [512, 1024], cycles=2, warmup=1)
    assert [one.rank for one in trace.ranks] == [0, 1]
    assert trace.ranks[0].series == (0,) * 6
    assert trace.ranks[1].series == (512, 1536, 2048, 3072, 3584, 4608)
    assert (trace.geometries, trace.warmup, trace.backend, trace.device) == (("512", "1024"), 1, "gloo", "emulated")
    assert set(trace.versions) >= {"torch", "python", "pytest_sglmem"}
    assert {one.rank for one in seen} == {0, 1}
    assert (seen[0].cycle, seen[0].step) == (0, 0)
    assert {(one.steps, one.warmup, one.cycles) for one in seen} == {(2, 1, (2, 2))}


def test_trace_passes_args_and_says_where_a_step_raised(start):
    def setup(limit):
        def step(n):
            assert n < limit

        return step

    with pytest.raises(RankRaised, match=r"ranks 0, 1 of 2 raised AssertionError: assert 3 < 3\nin trace of setup \("):
        start(2).trace(setup, [1, 3], args=(3,))


def test_setup_that_returns_no_step(start):
    with pytest.raises(RankRaised, match="TypeError: setup must return the step"):
        start(1).trace(lambda: None, [1])


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"setup": 3}, TypeError, "got 3"),
        ({"over": []}, ValueError, r"over is empty \(got \[\]\)"),
        ({"over": "abc"}, TypeError, "got 'abc'"),
        ({"over": 7}, TypeError, "got 7"),
        ({"cycles": 0}, ValueError, "got 0"),
        ({"cycles": (3, 2)}, ValueError, r"got \(3, 2\)"),
        ({"cycles": "many"}, ValueError, "got 'many'"),
        ({"cycles": True}, ValueError, "got True"),
        ({"warmup": -1}, ValueError, "got -1"),
        ({"args": 5}, TypeError, "got 5"),
    ],
)
def test_traces_that_cannot_be_are_refused_before_any_rank_is_asked(launcher, change, error, words):
    world = World(launcher, Spec())
    asked = {"setup": leaks_on_rank_1, "over": [1], **change}
    with pytest.raises(error, match=words):
        world.trace(asked.pop("setup"), asked.pop("over"), **asked)

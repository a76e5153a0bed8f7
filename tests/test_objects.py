"""gc_tracked: counts, growth planted in every shape, holders by name, settings as they were."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import functools
import gc
import logging
import subprocess
import sys
import threading
import tracemalloc
import weakref
from collections import deque

import pytest

from pytest_sglmem import heap, pauses, roots
from pytest_sglmem.objects import GcTracked, GrowthError

HISTORY: list = []  # a module's own list: what chains from modules are tested with


@pytest.fixture
def judged():
    return []


@pytest.fixture
def tracked(judged):
    return GcTracked(judged.append)


def grows(tracked, append, **options):
    with pytest.raises(GrowthError) as caught:
        tracked.assert_flat(append, **{"times": 100, **options})
    return caught.value.growth


class Request:
    def __init__(self, number):
        self.rid = f"request-{number}"
        self.input_ids = [number, number + 1]


class Engine:
    def __init__(self):
        self.history = []
        self.by_id = {}


# Counts


def test_count_is_live_plus_frozen(tracked):
    heap.settle()
    live = tracked.count()
    kept = [[] for _ in range(1000)]
    assert tracked.count() - live >= 990  # the interpreter may free some of its own meanwhile
    with heap.set_aside():
        assert len(gc.get_objects()) < 1000
        assert tracked.count() - live >= 990
    del kept


def test_growth_block_counts_exactly_and_by_type(tracked):
    kept = []
    with tracked.growth() as grown:
        kept.extend(Request(i) for i in range(30))
        kept.append((1, (2, (3, "deep"))))  # untracked by the collections that see it
    assert grown.objects == 60
    assert grown.by_type == {"Request": 30, "list": 30}


def test_growth_block_sees_what_goes(tracked):
    kept = [[i] for i in range(20)]
    with tracked.growth() as grown:
        kept.clear()
    assert grown.objects == -20
    assert grown.by_type == {"list": -20}


def test_an_empty_growth_block_counts_nothing_of_its_own(tracked):
    with tracked.growth() as grown:
        pass
    assert (grown.objects, grown.by_type) == (0, {})


def test_types_of_one_short_name_are_told_apart(tracked):
    first = type("Same", (), {"__module__": "one"})
    second = type("Same", (), {"__module__": "two"})
    kept = []
    with tracked.growth() as grown:
        kept.extend([first(), second(), second()])
    assert grown.by_type == {"one.Same": 1, "two.Same": 2}


def test_measuring_adds_no_object(tracked):
    for i in (1, 2):
        before = tracked.count() if i == 2 else 0
        tracked.assert_flat(lambda i: None, times=100)
        with tracked.growth():
            pass
        heap.settle()
    assert tracked.count() - before <= 40  # verdicts in `judged`, and pytest's own; not the 200 appends


# Verdicts


def test_a_live_history_grows_by_its_objects(tracked, judged):
    history = []
    growth = grows(tracked, lambda i: history.append((Request(i), {"meta": {"id": [i]}})), times=200)
    assert growth.objects_per_append == 6
    assert growth.by_type == {"dict": 2, "list": 2, "Request": 1, "tuple": 1}
    assert growth.windows == (600, 600)
    assert judged == [growth]


def test_a_flat_verdict_is_recorded_and_returned(tracked, judged):
    growth = tracked.assert_flat(lambda i: None, times=50)
    assert (growth.verdict, growth.objects_per_append, growth.by_type, growth.held_by) == ("flat", 0.0, {}, ())
    assert judged == [growth]


def test_append_is_called_with_consecutive_numbers_after_a_warm_up_of_a_tenth(tracked):
    numbers = []
    tracked.assert_flat(numbers.append, times=1000)
    assert numbers == list(range(1100))


@pytest.mark.parametrize("each", [1, 3])
def test_slack_passes_and_slack_plus_one_fails(tracked, each):
    kept = []

    def append(i):
        kept.extend([] for _ in range(each))

    assert tracked.assert_flat(append, times=200, per_append=each).objects_per_append == each
    grown = grows(tracked, append, times=200, per_append=each - 1).objects_per_append
    assert round(grown) == each  # a thread of an xdist worker may let go of an object or two of its own meanwhile


def test_a_slow_leak_is_caught(tracked):
    kept = []
    growth = grows(tracked, lambda i: kept.append([]) if i % 7 == 0 else None, times=1000)
    assert growth.objects_per_append == pytest.approx(1 / 7, rel=0.05)


def test_a_leak_under_a_backlog_is_caught(tracked):
    backlog, kept = [], []

    def append(i):
        backlog.append({"i": [i]})
        kept.append([]) if i % 10 == 0 else None
        if i % 50 == 49:
            backlog.clear()

    assert grows(tracked, append, times=1000).objects_per_append == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize("period", [3, 15, 16, 31, 50, 64, 97, 333, 450])
def test_backlogs_that_drain_are_flat(tracked, period):
    backlog = []

    def append(i):
        backlog.append({"i": [i]})
        if i % period == period - 1:
            backlog.clear()

    tracked.assert_flat(append, times=1000)


def test_a_backlog_that_drains_one_by_one_is_flat(tracked):
    backlog = deque()

    def append(i):
        if i // 40 % 2:
            backlog.pop()
        else:
            backlog.append([i])

    tracked.assert_flat(append, times=1000)


@pytest.mark.parametrize("size", [60, 300, 700, 900])
def test_rings_that_fill_are_flat(tracked, size):
    ring = deque(maxlen=size)
    growth = tracked.assert_flat(lambda i: ring.append([i]), times=1000)
    assert (growth.note == "filled, then flat") == (size > 600)


def test_a_ring_that_turns_over_objects_from_before_is_flat(tracked):
    ring = deque(([i] for i in range(200)), maxlen=200)
    tracked.assert_flat(lambda i: ring.append([i]), times=300)


def test_a_ring_of_cycles_from_before_is_flat(tracked):
    def cycle():
        loop = []
        loop.append(loop)
        return loop

    ring = deque((cycle() for _ in range(500)), maxlen=500)
    tracked.assert_flat(lambda i: ring.append(cycle()), times=300)


def test_first_uses_in_both_windows_are_flat(tracked):
    kept = {}

    def append(i):
        if i in (200, 800):
            kept[i] = [[] for _ in range(5000)]

    assert "first uses" in tracked.assert_flat(append, times=1000).note


@pytest.mark.parametrize("times", [2, 3, 10, 11])
def test_small_windows_judge_too(tracked, times):
    kept = []
    assert grows(tracked, lambda i: kept.append([]), times=times).objects_per_append == 1
    tracked.assert_flat(lambda i: [], times=times)


def test_ignored_types_do_not_count_and_are_said():
    kept = []
    tracked = GcTracked(lambda growth: None, ignore_types=["Reque*"])
    growth = grows(tracked, lambda i: kept.append(Request(i)))
    assert (growth.objects_per_append, growth.by_type) == (1, {"list": 1})
    assert "1 objects an append of ignored types" in growth.note
    tracked = GcTracked(lambda growth: None, ignore_types=["*.Request", "list"])
    tracked.assert_flat(lambda i: kept.append(Request(i)), times=100)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"times": 1}, "times must be a whole number >= 2, for two windows (got 1)"),
        ({"times": 10.5}, "(got 10.5)"),
        ({"times": True}, "(got True)"),
        ({"per_append": -1}, "per_append must be >= 0 tracked objects (got -1)"),
        ({"per_append": float("nan")}, "(got nan)"),
        ({"max_bytes_per_append": -2}, "max_bytes_per_append must be >= 0 bytes, or None for no bound (got -2)"),
    ],
)
def test_numbers_that_say_nothing_are_refused(tracked, options, says):
    with pytest.raises(ValueError) as caught:
        tracked.assert_flat(lambda i: None, **options)
    assert says in str(caught.value)


# Containers with a bound that the run does not reach


class Ring(deque):
    """A subclass that answers with code of its own."""

    def __len__(self):
        raise AssertionError("asked")


def rings(size):
    """Functions that keep an object, each in another container that holds at most `size`."""
    ring, own, cached = deque(maxlen=size), Ring(maxlen=size), functools.lru_cache(maxsize=size)(lambda key: [key])
    engine = Engine()
    engine.history = deque(maxlen=size)
    return {
        "deque": lambda i: ring.append(Request(i)),
        "subclass": lambda i: own.append([i]),
        "attribute": lambda i: engine.history.append({"output": [i]}),
        "cache": lambda i: cached(i),
        "cache by object": lambda i: cached((i, lambda: i)),
        "appended left": lambda i: ring.appendleft([i]),
        "not each": lambda i: ring.append([i]) if i % 3 else None,
    }


@pytest.mark.parametrize("kind", rings(1))
def test_what_a_bound_will_stop_is_flat(tracked, kind):
    growth = tracked.assert_flat(rings(600)[kind], times=400)
    assert (growth.objects_per_append, growth.by_type, growth.held_by) == (0, {}, ())
    assert growth.note.startswith("grew within a bound: ")
    assert growth.note.endswith(" of at most 600 held; raise times to see it full")


def indexed(size):
    """Functions that keep a request in a ring of at most `size`, and another way to it that does not keep it."""
    ring, by_id = deque(maxlen=size), weakref.WeakValueDictionary()
    known, flags = weakref.WeakSet(), weakref.WeakKeyDictionary()

    def keep(i):
        ring.append(Request(i))
        return ring[-1]

    return {
        "values": lambda i: by_id.update({i: keep(i)}),
        "set": lambda i: known.add(keep(i)),
        "keys": lambda i: flags.update({keep(i): i}),
    }


@pytest.mark.parametrize("kind", indexed(1))
def test_a_weak_index_of_what_a_bound_will_stop_is_flat(tracked, kind):
    growth = tracked.assert_flat(indexed(600)[kind], times=400)
    assert growth.note.endswith(" of at most 600 held; raise times to see it full")


@pytest.mark.parametrize("callback", [None, print])
def test_weak_references_that_outlive_what_a_bound_stops_are_a_leak(tracked, callback):
    ring, kept = deque(maxlen=600), []

    def append(i):
        ring.append(Request(i))
        kept.append(weakref.ref(ring[-1], callback))

    growth = grows(tracked, append, times=400)
    assert "kept" in growth.held_by[0]


def test_a_weak_index_of_a_leak_beside_what_a_bound_will_stop_is_counted_too(tracked):
    ring, kept, by_id = deque(maxlen=600), [], weakref.WeakValueDictionary()

    def append(i):
        ring.append([i])
        kept.append(Request(i))
        by_id[i] = kept[-1]

    assert grows(tracked, append, times=400).by_type == {"KeyedRef": 1, "Request": 1, "list": 1}


@pytest.mark.parametrize("size", [430, 438, 441, 10**9])  # full at 97 % of the run, just so, one later, never
def test_whenever_a_ring_fills_it_is_flat(tracked, size):
    tracked.assert_flat(rings(size)["deque"], times=400)


def test_a_ring_that_the_last_append_fills_is_flat(tracked):
    ring = deque(maxlen=440)
    assert "440 of at most 440 held" in tracked.assert_flat(lambda i: ring.append([i]), times=400).note


@pytest.mark.parametrize(("kind", "every"), [("deque", 1), ("cache", 10)])
def test_a_leak_beside_what_a_bound_will_stop_is_caught(tracked, kind, every):
    ring, kept = rings(1000)[kind], []

    def append(i):
        ring(i)
        kept.append([i]) if i % every == 0 else None

    growth = grows(tracked, append, times=400)
    assert (round(growth.objects_per_append, 2), growth.by_type) == (1 / every, {"list": 1 / every})
    assert len(growth.held_by) == 1
    assert "kept" in growth.held_by[0]
    assert growth.note.startswith("not counted: within a bound: ")


def old_entries():
    """Functions whose container fills, while one of its older entries grows."""
    session, ring, numbers = functools.lru_cache(maxsize=10**6)(lambda user: []), deque([[]], maxlen=10**6), deque([[]])

    def cache(i):
        session(i)
        for _ in range(50):
            session(0).append([i])

    def deque_(i):
        ring.append([i])
        ring[0].append([i])

    def untracked(i):
        numbers.append(i)
        numbers[0].append([i])

    return {"cache": (cache, 50), "deque": (deque_, 1), "untracked": (untracked, 1)}


@pytest.mark.parametrize("kind", old_entries())
def test_an_old_entry_that_grows_is_a_leak_however_large_its_container_may_get(tracked, kind):
    append, each = old_entries()[kind]
    growth = grows(tracked, append, times=200)
    assert (growth.objects_per_append, growth.by_type) == (each, {"list": each})
    assert len(growth.held_by) == 1


def shared(size):
    """Functions that keep an object in two containers that hold at most `size`."""
    one, other = deque(maxlen=size), deque(maxlen=size)
    cached = functools.lru_cache(maxsize=size)(lambda key: {"x": [key]})
    by_user = [deque(maxlen=size) for _ in range(4)]

    def wrapped(i):
        item = {"x": [i]}
        one.append((item, i))
        other.append([i, item])

    def both(i):
        item = [i]
        one.append(item)
        other.append(item)

    return {
        "both": both,
        "wrapped": wrapped,
        "cached": lambda i: one.append(cached(i)),
        "by user": lambda i: by_user[i % 4].append([i]),
        "cache of rings": lambda i: cached(i % 8)["x"].append(0) or by_user[i % 3].append(cached(i)),
    }


@pytest.mark.parametrize("kind", shared(1))
def test_what_two_bounded_containers_hold_is_flat(tracked, kind):
    assert "within a bound: " in tracked.assert_flat(shared(1000)[kind], times=200).note


def test_entries_that_hold_the_ones_before_them_are_a_leak_once_the_ring_is_full(tracked):
    ring = deque([None], maxlen=200)
    assert grows(tracked, lambda i: ring.append([ring[-1], i]), times=220).objects_per_append > 0


@pytest.mark.parametrize(("each", "flat"), [(8, True), (9, False)])
def test_a_few_objects_a_window_beside_a_container_that_fills_are_no_leak(tracked, each, flat):
    ring, kept = deque(maxlen=1000), []

    def append(i):
        ring.append([i])
        kept.append([i]) if i >= 20 and (i - 20) % 100 < each else None

    if flat:
        assert tracked.assert_flat(append, times=200).objects_per_append == 0
    else:
        assert grows(tracked, append, times=200).objects_per_append == each / 100


def test_one_jump_in_a_window_beside_a_container_that_fills_is_flat(tracked):
    ring, kept = deque(maxlen=1000), []

    def append(i):
        ring.append([i])
        kept.extend([i] for _ in range(1000)) if i == 170 else None

    tracked.assert_flat(append, times=200)


def test_what_a_ring_and_a_list_hold_is_a_leak(tracked):
    ring, kept = deque(maxlen=1000), []

    def append(i):
        item = [i]
        ring.append(item)
        kept.append(item)

    assert "kept in " in grows(tracked, append, times=400).held_by[0]


@pytest.mark.parametrize("size", [50, 5000])
def test_a_ring_that_is_no_longer_than_before_excuses_nothing(tracked, size):
    """One is full, the other is emptied as fast as it fills: what is new in them took the place of something."""
    ring, kept = deque(([i] for i in range(50)), maxlen=size), []

    def append(i):
        ring.append([[], [], [], i])
        if len(ring) > 50:
            ring.popleft()
        kept.append([]) if i % 10 == 0 else None

    assert grows(tracked, append, times=400).objects_per_append == pytest.approx(0.1, rel=0.2)


def test_deques_that_are_kept_are_a_leak_whatever_their_bound(tracked):
    kept = []
    assert grows(tracked, lambda i: kept.append(deque([[i]], maxlen=1000))).by_type["deque"] == 1


def test_slack_and_a_ring_that_fills_add_up(tracked):
    ring, kept = deque(maxlen=1000), []

    def append(i):
        ring.append([i])
        kept.append([i])

    tracked.assert_flat(append, times=400, per_append=1)


# A large heap: how many of the frozen objects are alive is asked for seldom


@pytest.fixture(params=[0, 10**9], ids=["large heap", "small heap"])
def heap_size(request, monkeypatch):
    """Both ways to count, whatever the size of this process's heap."""
    monkeypatch.setattr(heap, "_FEW", request.param)
    return request.param


def counted(monkeypatch):
    """The answers to how many frozen objects are alive, as they are given."""
    answers, frozen = [], heap._frozen

    def ask():
        answers.append(frozen())
        return answers[-1]

    monkeypatch.setattr(heap, "_frozen", ask)
    return answers


def test_a_flat_run_in_a_large_heap_asks_for_the_frozen_a_few_times_only(tracked, monkeypatch):
    monkeypatch.setattr(heap, "_FEW", 0)
    answers = counted(monkeypatch)
    tracked.assert_flat(lambda i: None, times=1000)
    assert sum(answer > 2000 for answer in answers) <= 6  # of 64 samples; each costs 20 ms where torch is loaded


def test_a_flat_run_makes_few_full_collections(tracked, monkeypatch):
    made, collect = [], heap._collect

    def counting(generation=2):
        made.append(len(gc.get_objects()) if generation == 2 else 0)
        return collect(generation)

    monkeypatch.setattr(heap, "_collect", counting)
    tracked.assert_flat(lambda i: None, times=1000)
    assert 2 <= sum(walked > 2000 for walked in made) <= 4  # beside the pauses before and after: where they changed it


def test_a_leak_beside_a_ring_that_turns_over_old_objects_is_counted(tracked, heap_size):
    ring, kept = deque(([i] for i in range(2000)), maxlen=2000), []

    def append(i):
        ring.append([i])
        kept.append([i])

    growth = grows(tracked, append, times=600)
    assert round(growth.objects_per_append, 1) == 1
    assert round(growth.by_type["list"], 1) == 1


def test_a_leak_beside_a_backlog_from_before_is_caught(tracked, heap_size):
    backlog, kept = [[i] for i in range(50)], []

    def append(i):
        kept.append([i]) if i % 5 == 0 else None
        if i == 300:
            backlog.clear()

    growth = grows(tracked, append, times=1000)
    assert growth.objects_per_append == pytest.approx(0.1, rel=0.1)  # 100 in the second window, 50 in the first
    assert [round(rise, -1) for rise in growth.windows] == [50, 100]


@pytest.mark.parametrize("size", [500, 700, 900])
def test_a_ring_that_was_half_full_and_fills_is_flat(tracked, heap_size, size):
    ring = deque(([i] for i in range(size // 2)), maxlen=size)
    tracked.assert_flat(lambda i: ring.append([i]), times=600)


@pytest.mark.parametrize("action", [gc.freeze, gc.unfreeze])
@pytest.mark.parametrize("at", [61, 400])  # the first append of a window, in the midst of the other
def test_appends_that_freeze_or_thaw_are_counted(tracked, heap_size, action, at):
    kept = []

    def append(i):
        kept.append([i])
        if i == at:
            action()

    before = gc.get_freeze_count()
    assert round(grows(tracked, append, times=600).objects_per_append, 1) == 1
    kept.clear()

    def flat(i):
        if i == at:
            action()

    tracked.assert_flat(flat, times=600)
    heap.collect()
    assert abs(gc.get_freeze_count() - before) < 50


# Bytes


def test_bytes_are_said_where_objects_are_flat(tracked):
    kept = []
    growth = tracked.assert_flat(lambda i: kept.append(bytes(1000)), times=1000)
    assert growth.objects_per_append == 0
    assert 1033 <= growth.bytes_per_append <= 1060


def test_bytes_can_be_bounded(tracked):
    kept = []
    with pytest.raises(GrowthError, match=r"bytes an append, 1,000 allowed"):
        tracked.assert_flat(lambda i: kept.append(bytes(1000)), times=1000, max_bytes_per_append=1000)
    tracked.assert_flat(lambda i: kept.append(bytes(1000)), times=1000, max_bytes_per_append=1100)
    tracked.assert_flat(lambda i: bytes(1000), times=1000, max_bytes_per_append=0)


def test_tracemalloc_is_left_as_it_was(tracked):
    tracked.assert_flat(lambda i: None, times=10)
    assert not tracemalloc.is_tracing()
    tracemalloc.start(2)
    try:
        tracked.assert_flat(lambda i: None, times=10)
        assert tracemalloc.get_traceback_limit() == 2
    finally:
        tracemalloc.stop()


# Settings


def settings():
    return gc.isenabled(), gc.get_threshold(), gc.get_debug(), gc.callbacks[:], gc.get_freeze_count()


def heard(phase, info):
    pass


@contextlib.contextmanager
def server_settings():
    before = settings()
    gc.collect()
    gc.disable()
    gc.set_threshold(50_000, 20, 30)
    gc.callbacks.append(heard)
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.callbacks[:] = before[3]
        gc.set_threshold(*before[1])
        gc.enable()


def spoil(i=0):
    gc.enable()
    gc.set_threshold(1, 1, 1)
    gc.callbacks.clear()


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("server", [False, True])
def test_settings_are_afterwards_as_they_were(tracked, server, fails):
    def append(i):
        spoil()
        if fails and i == 7:
            raise KeyError(i)

    with server_settings() if server else contextlib.nullcontext():
        before = settings()
        with pytest.raises(KeyError) if fails else contextlib.nullcontext():
            tracked.assert_flat(append, times=20)
        assert settings() == before
        with pytest.raises(KeyError) if fails else contextlib.nullcontext(), tracked.growth():
            append(7)
        assert settings() == before


def test_a_body_that_freezes_is_thawed(tracked):
    before = gc.get_freeze_count()
    with tracked.growth():
        gc.freeze()
    heap.collect()
    assert abs(gc.get_freeze_count() - before) < 50


def test_growth_is_seen_under_a_frozen_heap_and_its_holder_named(tracked):
    history = []
    with server_settings():
        growth = grows(tracked, lambda i: history.append([i]), times=200)
    assert growth.objects_per_append == 1
    assert "history in test_growth_is_seen_under_a_frozen_heap" in growth.held_by[0]


def test_the_applications_callbacks_do_not_hear_the_measuring(tracked):
    calls = []

    def hear(phase, info):
        calls.append(info["generation"])

    gc.callbacks.append(hear)
    try:
        tracked.assert_flat(lambda i: None, times=20)
        assert 2 not in calls
    finally:
        gc.callbacks.remove(hear)


# Holders: each kind of growth is planted, and the chain names the planted holder


def test_a_module_list_is_named(tracked):
    try:
        growth = grows(tracked, lambda i: HISTORY.append([i]))
    finally:
        HISTORY.clear()
    assert growth.held_by[0].startswith(f"{__name__}.HISTORY -> [")
    assert growth.held_by[0].partition(" (made at")[0].endswith("-> list")


def test_an_attribute_is_named(tracked):
    engine = Engine()
    growth = grows(tracked, lambda i: engine.history.append([i]))
    assert growth.held_by[0].startswith("engine in test_an_attribute_is_named()")
    assert ".history -> [" in growth.held_by[0]


def test_a_dictionary_and_its_key_are_named(tracked):
    engine = Engine()
    growth = grows(tracked, lambda i: engine.by_id.__setitem__(f"r{i}", [i]))
    assert ".by_id -> ['r" in growth.held_by[0]


def keeper():
    kept = []

    def keep(i):
        kept.append([i])

    return keep


def test_a_closure_cell_is_named(tracked):
    growth = grows(tracked, keeper())
    assert growth.held_by[0].startswith("append in grows() (test_objects.py:")
    assert ") -> closure cell kept -> [" in growth.held_by[0]


def test_a_cache_keyed_by_closures_is_named(tracked):
    @functools.cache
    def nearest(bucket):
        return bucket(3)

    growth = grows(tracked, lambda i: nearest(lambda n: n))
    assert growth.by_type["function"] == 1
    assert growth.held_by[0].startswith("nearest in ")
    assert "-> key" in growth.held_by[0]


def test_a_parked_task_is_named_with_where_it_was_made(tracked):
    loop = asyncio.new_event_loop()
    shutdown = asyncio.Event()

    async def request(i):
        task = asyncio.ensure_future(shutdown.wait())  # made here
        await asyncio.wait({task}, timeout=0)

    growth = grows(tracked, lambda i: loop.run_until_complete(request(i)))
    assert growth.by_type["Task"] == 1
    assert "shutdown" in growth.held_by[0]
    assert "._waiters" in growth.held_by[0]
    made = line_of("task = asyncio.ensure_future(shutdown.wait())  # made here")
    assert any(f"test_objects.py:{made}" in chain for chain in growth.held_by)
    close(loop)


def close(loop):
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
    loop.close()


def line_of(text):
    with open(__file__, encoding="utf-8") as file:
        return next(i for i, line in enumerate(file, 1) if text in line)


def test_a_chain_of_futures_is_named(tracked):
    loop = asyncio.new_event_loop()
    last = [loop.create_future()]

    def append(i):
        following = loop.create_future()
        last[0].add_done_callback(following.set_result)
        last[0] = following

    first = last[0]
    growth = grows(tracked, append)
    assert growth.by_type["Future"] == 1
    assert any("first in test_a_chain_of_futures" in chain for chain in growth.held_by)
    assert "more ..." in growth.held_by[0]
    del first
    loop.close()


def test_an_exception_with_its_traceback_is_named(tracked):
    errors = []

    def fails(payload):
        raise ValueError(payload)

    def append(i):
        try:
            fails([i])
        except ValueError as error:
            errors.append(error)

    growth = grows(tracked, append)
    assert growth.by_type["ValueError"] == 1
    assert growth.by_type["traceback"] >= 1
    assert "errors in test_an_exception" in growth.held_by[0]


def test_weakref_callbacks_are_named(tracked):
    watched, watchers = Engine(), []
    growth = grows(tracked, lambda i: watchers.append(weakref.ref(watched, lambda _: i)))
    assert growth.by_type["function"] == 1
    assert "watchers in test_weakref_callbacks" in growth.held_by[0]


def test_slots_are_named(tracked):
    class Slotted:
        __slots__ = ("items",)

    slotted = Slotted()
    slotted.items = []
    growth = grows(tracked, lambda i: slotted.items.append([i]))
    assert ".items -> [" in growth.held_by[0]


VARIABLE: contextvars.ContextVar = contextvars.ContextVar("recent")
LOCAL = threading.local()


def test_a_context_variable_is_named(tracked):
    token = VARIABLE.set([])
    growth = grows(tracked, lambda i: VARIABLE.get().append([i]))
    assert [chain.partition(" (made")[0] for chain in growth.held_by] == ["ContextVar recent -> [60] -> list"]
    VARIABLE.reset(token)


def test_a_threads_local_is_named(tracked):
    LOCAL.recent = []
    growth = grows(tracked, lambda i: LOCAL.recent.append([i]))
    del LOCAL.recent
    assert [chain.partition(" (made")[0] for chain in growth.held_by] == [
        f"{__name__}.LOCAL -> (a thread's) .recent -> [60] -> list"
    ]


class Two:
    def __init__(self):
        self.first, self.second, self.users = [], [], {0: [], 1: []}


class SlottedTwo:
    __slots__ = ("first", "second", "users")
    __init__ = Two.__init__


class Nested:
    def __init__(self):
        self.two = Two()
        self.first, self.second, self.users = self.two.first, [], self.two.users


@dataclasses.dataclass
class Fields:
    first: list = dataclasses.field(default_factory=list)
    second: list = dataclasses.field(default_factory=list)
    users: dict = dataclasses.field(default_factory=lambda: {0: [], 1: []})


@pytest.mark.parametrize("kind", [Two, SlottedTwo, Nested, Fields])
@pytest.mark.parametrize("materialised", [False, True])
def test_several_attributes_of_one_instance_are_all_named(tracked, kind, materialised):
    """Naming one makes the instance's attribute dictionary: the next one is two references away, not one."""
    held = kind()
    if materialised:
        getattr(held, "__dict__", None)

    def append(i):
        held.first.append([i])
        held.second.append([i])
        held.users[i % 2].append([i])

    chains = grows(tracked, append).held_by
    assert all(chain.startswith("held in ") for chain in chains)
    named = {name for name in (".first -> [", ".second -> [", ".users -> [") if any(name in text for text in chains)}
    assert len(chains) == 3
    assert len(named) >= 2  # four growers, of which three are named


def test_an_error_while_holders_are_looked_for_does_not_hide_the_verdict(tracked, monkeypatch):
    def fails(*_):
        raise StopIteration

    monkeypatch.setattr(roots, "search", fails)
    assert grows(tracked, lambda i: HISTORY.append([i])).held_by == ("what is not found: StopIteration()",)
    HISTORY.clear()


def test_what_hangs_from_c_alone_has_its_nearest_holder_named(tracked):
    import atexit

    class Kept(list):
        pass

    kept = Kept()
    atexit.register(kept.append)
    try:
        reach = weakref.ref(kept)
        del kept
        growth = grows(tracked, lambda i: reach().append([i]))
        assert [chain.partition(" (")[0] for chain in growth.held_by] == [
            "a Kept that no module and no frame names -> list"
        ]
    finally:
        atexit.unregister(reach().append)


# asyncio


def test_a_coroutine_function_is_awaited(tracked):
    kept = []

    async def append(i):
        await asyncio.sleep(0)
        kept.append([i])

    assert grows(tracked, append).objects_per_append == 1
    assert len(kept) == 110


def test_tasks_that_appends_leave_are_seen_and_then_cancelled(tracked):
    tasks = []

    async def append(i):
        tasks.append(asyncio.ensure_future(asyncio.sleep(3600)))
        await asyncio.sleep(0)

    assert grows(tracked, append).by_type["Task"] == 1
    assert all(task.cancelled() for task in tasks)


def test_a_task_that_only_its_loop_knows_is_named_with_where_it_was_made(tracked):
    async def parked(event):
        await event.wait()

    async def append(i):
        event = asyncio.Event()
        asyncio.get_running_loop().call_later(3600, event.set)  # keeps it
        asyncio.ensure_future(parked(event))  # noqa: RUF006 - forgotten: what is tested
        await asyncio.sleep(0)

    growth = grows(tracked, append)
    assert growth.held_by[0].startswith("its event loop._scheduled -> [")
    line = line_of("ensure_future(parked(event))  # noqa")
    assert f"Task made at test_objects.py:{line}" in growth.note


def test_inside_a_running_loop_it_says_what_to_do(tracked):
    async def append(i):
        pass

    async def test():
        tracked.assert_flat(append, times=10)

    with pytest.raises(RuntimeError, match="plain test function"):
        asyncio.run(test())


class Registry:
    """Registers a request, awaits twice, removes it: unless it is cancelled at the second await."""

    def __init__(self, careful):
        self.states = {}
        self.careful = careful

    async def generate(self, i):
        self.states[i] = {"ids": [i]}
        try:
            await asyncio.sleep(0)  # first await
        except asyncio.CancelledError:
            self.states.pop(i)
            raise
        try:
            await asyncio.sleep(0.0001)  # second await
        except asyncio.CancelledError:
            if self.careful:
                self.states.pop(i)
            raise
        self.states.pop(i)


def test_cancellation_at_each_await_finds_the_one_that_leaks(tracked):
    registry = Registry(careful=False)
    growth = grows(tracked, tracked.cancel_at_each_await(registry.generate), times=300)
    assert growth.objects_per_append == pytest.approx(2 / 3, rel=0.05)
    line = line_of("await asyncio.sleep(0.0001)  # second await")
    assert growth.note == f"leaks when cancelled at test_objects.py:{line} in generate"


def test_the_await_that_leaks_is_found_where_only_new_numbers_grow_a_registry(tracked):
    states = {}

    async def generate(i):
        states[i] = [i]
        await asyncio.sleep(0)  # leaks here
        states.pop(i)

    growth = grows(tracked, tracked.cancel_at_each_await(generate))
    assert growth.note == f"leaks when cancelled at test_objects.py:{line_of('sleep(0)  # leaks here')} in generate"


def test_cancellation_at_each_await_passes_what_cleans_up(tracked):
    registry = Registry(careful=True)
    append = tracked.cancel_at_each_await(registry.generate)
    tracked.assert_flat(append, times=100)
    assert len(append.sites) == 2
    assert registry.states == {}


def test_a_request_that_swallows_its_cancellation_is_still_cancelled_at_later_awaits(tracked):
    ended = []

    async def stubborn(i):
        for _ in range(3):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
        ended.append(i)

    append = tracked.cancel_at_each_await(stubborn)
    tracked.assert_flat(append, times=40)
    assert len(append.sites) == 3
    assert len(ended) == 44


def test_what_a_cancelled_request_raises_instead_is_raised(tracked):
    async def translates(i):
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            raise KeyError("aborted") from None

    with pytest.raises(KeyError, match="aborted"):
        tracked.assert_flat(tracked.cancel_at_each_await(translates), times=10)


# Pauses


class Clock:
    """Seconds that pass only while objects are walked: one a tracked object and reading."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += len(gc.get_objects()) * 1e-7
        return self.now


def test_pauses_hears_real_collections_and_adds_no_object(tracked):
    with tracked.growth() as grown, tracked.pauses() as heard:
        gc.collect()
        gc.collect(0)
    assert [pause.generation for pause in heard.collections] == [2, 0]
    assert all(pause.seconds > 0 for pause in heard.collections)
    assert heard.worst == max(pause.seconds for pause in heard.collections)
    assert heard.total == pytest.approx(sum(pause.seconds for pause in heard.collections))
    assert heard.collections[0].tracked > 1000
    assert grown.objects <= 10
    assert not any(getattr(call, "__self__", None) is heard for call in gc.callbacks)


def test_pauses_hears_automatic_collections(tracked):
    threshold = gc.get_threshold()
    gc.set_threshold(10, 10, 10)
    try:
        with tracked.pauses() as heard:
            kept = [[] for _ in range(1000)]
    finally:
        gc.set_threshold(*threshold)
    assert len(heard.collections) > 10
    del kept


def test_pauses_counts_what_was_freed(tracked):
    gc.collect()
    with tracked.pauses() as heard:
        for _ in range(25):
            loop = []
            loop.append(loop)
        del loop
        gc.collect()
    assert sum(pause.collected for pause in heard.collections) >= 25


def test_assert_pause_by_growth(judged):
    tracked = GcTracked(judged.append, clock=Clock())
    kept = [[] for _ in range(len(gc.get_objects()))]
    assert tracked.assert_pause(max_growth=2.2).verdict == "flat"
    with pytest.raises(GrowthError, match=r"is more than max_growth=1\.8"):
        tracked.assert_pause(max_growth=1.8)
    assert [growth.verdict for growth in judged] == ["flat", "growing"]
    assert judged[0].pause_ms["after"] == pytest.approx(2 * judged[0].pause_ms["before"], rel=0.1)
    del kept


def test_assert_pause_by_milliseconds(judged):
    tracked = GcTracked(judged.append, clock=lambda: 0.0)
    tracked.assert_pause(0)
    readings = iter([0.0, 0.05] * 20)
    tracked = GcTracked(judged.append, clock=lambda: next(readings))
    tracked.assert_pause(max_ms=50)
    readings = iter([0.0, 0.0501] * 20)
    with pytest.raises(GrowthError, match=r"50\.1 ms is more than max_ms=50"):
        tracked.assert_pause(max_ms=50)
    with pytest.raises(ValueError, match="needs max_ms"):
        tracked.assert_pause()


def test_event_loop_stall_says_what_the_loop_sees(judged):
    history = []
    stall = GcTracked(judged.append, clock=Clock()).event_loop_stall(
        lambda i: history.append([i]), rate=100, retention=20, turns=100
    )
    assert len(history) == 2100
    assert 0 < stall.p50_ms <= stall.p99_ms <= stall.worst_ms
    assert stall.full_ms < stall.worst_ms
    assert stall.tracked > 2100
    assert stall.turns == 100


def test_event_loop_stall_refuses_nothing_to_do(tracked):
    with pytest.raises(ValueError, match="must be >= 1"):
        tracked.event_loop_stall(lambda i: None, rate=0)


# Code that logs: pytest keeps the records of a test in handlers of its own


class Keeps(logging.Handler):
    """A handler of the code under test that keeps what it is given."""

    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record)


@pytest.fixture
def log():
    logger = logging.getLogger(f"{__name__}.log")
    yield logger
    for handler in logger.handlers[:]:
        logger.removeHandler(handler)
    logger.propagate = True


def handlers():
    return [(handler, handler.level, handler.filters[:]) for handler in logging.root.handlers]


def test_pytest_keeps_what_is_logged(caplog, log):
    """What the tests below would see, were the handlers not at rest."""
    log.warning("slow")
    assert len(caplog.records) == 1
    assert any(type(handler).__module__.startswith("_pytest.") for handler, *_ in handlers())


def test_appends_that_log_are_flat(tracked, caplog, log):
    before = handlers()
    growth = tracked.assert_flat(lambda i: log.warning("slow %d", i), times=400, max_bytes_per_append=16)
    assert growth.verdict == "flat"
    assert caplog.records == []
    assert handlers() == before
    log.warning("again")
    assert caplog.messages == ["again"]


def test_blocks_and_comparisons_that_log_are_flat(tracked, caplog, log):
    log.warning("before")
    with tracked.growth() as grown:
        for i in range(100):
            log.warning("slow %d", i)
    assert not any(grown.by_type.get(name) for name in ("LogRecord", "logging.LogRecord")), grown.by_type
    tracked.assert_no_worse(lambda i: log.warning("slow %d", i), lambda i: None, times=20, within=1e9)
    tracked.event_loop_stall(lambda i: log.warning("slow %d", i), rate=10, retention=1, turns=5)
    assert caplog.messages == ["before"]


def test_a_logger_that_does_not_propagate_is_flat_too(tracked, caplog, log):
    log.propagate = False
    log.addHandler(caplog.handler)
    tracked.assert_flat(lambda i: log.warning("slow %d", i), times=100)
    assert caplog.records == []


def test_a_handler_of_the_code_under_test_that_keeps_records_is_found(tracked, log):
    log.addHandler(Keeps())
    assert grows(tracked, lambda i: log.warning("slow %d", i)).by_type["LogRecord"] == 1


@pytest.mark.parametrize("nested", [False, True])
def test_the_handlers_are_as_before_where_an_append_raises(tracked, caplog, log, nested):
    def fails(i):
        raise KeyError(i)

    before = handlers()
    with pytest.raises(KeyError), tracked.growth() if nested else contextlib.nullcontext():
        tracked.assert_flat(fails, times=10)
    assert handlers() == before
    log.warning("again")
    assert caplog.messages == ["again"]


def test_a_stretch_within_another_leaves_the_outer_one_at_rest(tracked, caplog, log):
    with tracked.growth():
        with tracked.growth():
            log.warning("inner")
        log.warning("outer")
    log.warning("again")
    assert caplog.messages == ["again"]


# Against a reference


def test_the_same_is_no_worse(judged):
    tracked = GcTracked(judged.append, clock=lambda: 0.0)
    ours, theirs = [], []
    growth, reference = tracked.assert_no_worse(
        lambda i: ours.append(bytes(100)), lambda i: theirs.append(bytes(100)), times=200
    )
    assert (growth.verdict, reference.verdict) == ("flat", "flat")
    assert judged == [growth]


@pytest.mark.parametrize(
    ("candidate", "says"),
    [
        (lambda kept, i: kept.append([i]), "objects an append: 1, the reference 0"),
        (lambda kept, i: kept.append(bytes(1000)), "bytes an append: 1,0"),
    ],
)
def test_worse_is_said(tracked, candidate, says):
    ours, theirs = [], []
    with pytest.raises(GrowthError, match=says):
        tracked.assert_no_worse(lambda i: candidate(ours, i), lambda i: theirs.append(bytes(100)), times=200, within=5)


def test_slower_is_said(judged):
    spent = [0.0]

    def slow(i):
        spent[0] += 2e-6

    def quick(i):
        spent[0] += 1e-6

    tracked = GcTracked(judged.append, clock=lambda: spent[0])
    with pytest.raises(GrowthError, match=r"an append takes 2\.0 us, the reference's 1\.0 us"):
        tracked.assert_no_worse(slow, quick, times=100)
    tracked.assert_no_worse(slow, quick, times=100, within=2.1)


# The message


def test_the_message_says_what_production_would_see(tracked):
    kept = []

    def append(i):
        kept.append([[], [], [], [], [], [], []])

    with pytest.raises(GrowthError) as caught:
        tracked.assert_flat(append, times=100)
    text = str(caught.value)
    assert text.startswith("+8 tracked objects an append, 0 allowed (windows of 50: +400, +400 objects)")
    assert "at 1,000 requests/s kept for 300 s: 2.4 M tracked objects, full collections of about" in text
    assert "on this machine" in text
    assert "heaps of real servers cost 360 to 550: 0.86 to 1.3 s" in text
    assert "held by kept in test_the_message_says" in text


def test_it_needs_neither_torch_nor_pytest():
    code = (
        "import sys; from pytest_sglmem.objects import GcTracked\n"
        "GcTracked(print).assert_flat(lambda i: None, times=20)\n"
        "print([name for name in ('torch', 'numpy', 'pytest', 'asyncio') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_full_pause_counts_what_it_walked():
    kept = [[] for _ in range(10_000)]
    pause = pauses.full_pause(Clock())
    assert pause.walked > 10_000
    assert pause.ns_per_object == pytest.approx(100, rel=0.1)
    del kept


def test_many_appends_are_traced_only_where_bytes_are_bounded(tracked):
    seen = set()
    assert tracked.assert_flat(lambda i: seen.add(tracemalloc.is_tracing()), times=2001).bytes_per_append is None
    assert seen == {False}
    tracked.assert_flat(lambda i: seen.add(tracemalloc.is_tracing()), times=2001, max_bytes_per_append=10)
    assert seen == {False, True}


class Proxy:
    """Answers for its class itself, as lazily deprecated objects do, and so must not be asked."""

    @property
    def __class__(self):
        raise AssertionError("asked")


def test_looking_for_holders_runs_no_code_of_the_objects(tracked):
    proxy, history = Proxy(), []
    growth = grows(tracked, lambda i: history.append([i, proxy]))
    assert "history in test_looking_for_holders" in growth.held_by[0]

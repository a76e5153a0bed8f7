"""More kinds of growth, and of what only looks like it, than the cases from public reports: each says what is right."""

import asyncio
import collections
import contextlib
import weakref

EXPECT = {
    "test_slow_leak": {"outcome": "failed", "report": {"gc.0.verdict": "growing", "gc.0.by_type": {"list": 71 / 500}}},
    "test_leak_under_a_backlog": {"outcome": "failed", "report": {"gc.0.verdict": "growing"}, "says": ["registry"]},
    "test_chain_of_futures": {"outcome": "failed", "report": {"gc.0.verdict": "growing"}, "says": ["Future", "head"]},
    "test_exceptions_with_tracebacks": {"outcome": "failed", "report": {"gc.0.verdict": "growing"}, "says": ["errors"]},
    "test_weakref_callbacks": {"outcome": "failed", "report": {"gc.0.verdict": "growing"}, "says": ["watchers"]},
    "test_cancelled_at_its_second_await": {
        "outcome": "failed",
        "report": {"gc.0.verdict": "growing"},
        "says": ["leaks when cancelled at case_gc_kinds.py:", "in generate"],
    },
    "test_bytes_that_grow_where_objects_do_not": {"outcome": "failed", "says": ["bytes an append, 100 allowed"]},
    "test_slack_plus_one": {"outcome": "failed", "report": {"gc.0.objects_per_append": 3.0}},
    "test_slack": {"outcome": "passed", "report": {"gc.0.verdict": "flat", "gc.0.objects_per_append": 2.0}},
    "test_ring_that_fills_late": {"outcome": "passed", "report": {"gc.0.verdict": "flat"}},
    "test_first_uses_in_both_windows": {"outcome": "passed", "report": {"gc.0.verdict": "flat"}},
    "test_backlog_of_an_awkward_period": {"outcome": "passed", "report": {"gc.0.verdict": "flat"}},
    "test_requests_that_clean_up": {"outcome": "passed", "report": {"gc.0.verdict": "flat"}},
}


def test_slow_leak(gc_tracked):
    kept = []
    gc_tracked.assert_flat(lambda i: kept.append([]) if i % 7 == 0 else None, times=1000)


def test_leak_under_a_backlog(gc_tracked):
    backlog, registry = [], {}

    def append(i):
        backlog.append({"i": [i]})
        if i % 5 == 0:
            registry[i] = [i]
        if i % 40 == 39:
            backlog.clear()

    gc_tracked.assert_flat(append, times=1000)


def test_chain_of_futures(gc_tracked):
    loop = asyncio.new_event_loop()
    head = loop.create_future()
    last = [head]

    def append(i):
        following = loop.create_future()
        last[0].add_done_callback(following.set_result)
        last[0] = following

    gc_tracked.assert_flat(append, times=100)


def test_exceptions_with_tracebacks(gc_tracked):
    errors = []

    def append(i):
        try:
            raise ValueError(i)
        except ValueError as error:
            errors.append(error)

    gc_tracked.assert_flat(append, times=200)


def test_weakref_callbacks(gc_tracked):
    class Engine:
        pass

    engine, watchers = Engine(), []
    gc_tracked.assert_flat(lambda i: watchers.append(weakref.ref(engine, lambda _: i)), times=200)


class Registry:
    def __init__(self, careful):
        self.states = {}
        self.careful = careful

    async def generate(self, i):
        self.states[i] = [i]
        with contextlib.ExitStack() as stack:
            stack.callback(self.states.pop, i, None)
            await asyncio.sleep(0)
            if not self.careful:
                stack.pop_all()
            await asyncio.sleep(0)
            stack.callback(self.states.pop, i, None)


def test_cancelled_at_its_second_await(gc_tracked):
    registry = Registry(careful=False)
    gc_tracked.assert_flat(gc_tracked.cancel_at_each_await(registry.generate), times=300)


def test_requests_that_clean_up(gc_tracked):
    registry = Registry(careful=True)
    gc_tracked.assert_flat(gc_tracked.cancel_at_each_await(registry.generate), times=300)


def test_bytes_that_grow_where_objects_do_not(gc_tracked):
    history = []
    gc_tracked.assert_flat(lambda i: history.append(bytes(1000)), times=500, max_bytes_per_append=100)


def test_slack_plus_one(gc_tracked):
    kept = []
    gc_tracked.assert_flat(lambda i: kept.extend([[], [], []]), times=100, per_append=2)


def test_slack(gc_tracked):
    kept = []
    gc_tracked.assert_flat(lambda i: kept.extend([[], []]), times=100, per_append=2)


def test_ring_that_fills_late(gc_tracked):
    ring = collections.deque(maxlen=800)
    gc_tracked.assert_flat(lambda i: ring.append([i]), times=1000)


def test_first_uses_in_both_windows(gc_tracked):
    kept = {}

    def append(i):
        if i in (250, 900):
            kept[i] = [[] for _ in range(3000)]

    gc_tracked.assert_flat(append, times=1000)


def test_backlog_of_an_awkward_period(gc_tracked):
    backlog = []

    def append(i):
        backlog.append([i])
        if i % 450 == 449:
            backlog.clear()

    gc_tracked.assert_flat(append, times=1000)

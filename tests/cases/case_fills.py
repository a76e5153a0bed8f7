"""What grows and is no leak: first uses, caches by key, by count, by budget and by chance, pools, backlogs, workspaces
that grow to the largest call, a sequence within a cycle, buffers that double; and two lines that share one full cache.
"""

FLAT = {"outcome": "passed", "report": {"live_bytes.0.verdict": "flat"}}
FILLING = {"outcome": "passed", "report": {"live_bytes.0.verdict": "filling"}}
EXPECT = {
    "test_first_use": FLAT,
    "test_first_use_cycles_later": FILLING,
    "test_by_shape": FLAT,
    "test_by_count": FILLING,
    "test_by_budget": FILLING,
    "test_by_chance": FILLING,
    "test_two_lines_share_a_full_cache": FLAT,
    "test_free_list": FLAT,
    "test_largest_seen": FLAT,
    "test_sawtooth_out_of_step": FLAT,
    "test_grows_within_a_cycle": FLAT,
    "test_doubles_until_it_holds_all": FILLING,
    "test_last_result": FLAT,
}
ARGS = ["--sglmem-world", "2"]
SHAPES = [64, 256, 128, 512]


def cuda(n):
    import torch

    return torch.empty(n * 1024, dtype=torch.uint8, device="cuda")


def first_use():
    state = {}

    def step(n):
        if "workspace" not in state:
            state["workspace"] = cuda(8320)
        cuda(n)

    return step


def first_use_later():
    calls, kept = iter(range(10**9)), []

    def step(n):
        if next(calls) == 9:
            kept.append(cuda(n))

    return step


def by_shape():
    cache = {}

    def step(n):
        if n not in cache:
            cache[n] = cuda(n)

    return step


def by_count():
    kept = []

    def step(n):
        kept.append(cuda(64))
        if len(kept) > 14:
            kept.pop(0)

    return step


def by_budget():
    kept = []

    def step(n):
        kept.append((n, cuda(n)))
        while sum(size for size, _ in kept) > 2500:
            kept.pop(0)

    return step


def by_chance():
    import random

    cache, rng = {}, random.Random(1)

    def step(n):
        key = rng.randrange(12)
        if key not in cache:
            cache[key] = cuda(64)

    return step


def two_lines():
    import random

    kept, rng = [cuda(64) for _ in range(12)], random.Random(2)

    def step(n):
        if rng.random() < 0.5:
            kept.append(cuda(64))
        else:
            kept.append(cuda(64))
        kept.pop(0)

    return step


def free_list():
    pool = []

    def step(n):
        pool.extend([pool.pop() if pool else cuda(32) for _ in range(n // 64)])

    return step


def largest_seen():
    state = {"pool": None}

    def step(n):
        if state["pool"] is None or state["pool"].numel() < n * 1024:
            state["pool"] = None
            state["pool"] = cuda(n)

    return step


def sawtooth():
    backlog = []

    def step(n):
        backlog.append(cuda(32))
        if len(backlog) == 7:
            backlog.clear()

    return step


def within_a_cycle():
    kept = []

    def step(n):
        if n == SHAPES[0]:
            kept.clear()
        kept.append(cuda(n))

    return step


def doubles():
    state = {"need": 0, "has": 1}

    def step(n):
        state["need"] = min(20, state["need"] + 1)
        if "block" not in state or state["need"] > state["has"]:
            state["has"] *= 2
            state["block"] = cuda(state["has"])

    return step


def last_result():
    state = {}

    def step(n):
        state["last"] = cuda(n)

    return step


def test_first_use(world, live_bytes):
    live_bytes.assert_flat(world.trace(first_use, SHAPES))


def test_first_use_cycles_later(world, live_bytes):
    live_bytes.assert_flat(world.trace(first_use_later, SHAPES))


def test_by_shape(world, live_bytes):
    live_bytes.assert_flat(world.trace(by_shape, SHAPES))


def test_by_count(world, live_bytes):
    live_bytes.assert_flat(world.trace(by_count, SHAPES))


def test_by_budget(world, live_bytes):
    live_bytes.assert_flat(world.trace(by_budget, SHAPES))


def test_by_chance(world, live_bytes):
    live_bytes.assert_flat(world.trace(by_chance, SHAPES))


def test_two_lines_share_a_full_cache(world, live_bytes):
    live_bytes.assert_flat(world.trace(two_lines, SHAPES))


def test_free_list(world, live_bytes):
    live_bytes.assert_flat(world.trace(free_list, SHAPES))


def test_largest_seen(world, live_bytes):
    live_bytes.assert_flat(world.trace(largest_seen, SHAPES))


def test_sawtooth_out_of_step(world, live_bytes):
    live_bytes.assert_flat(world.trace(sawtooth, SHAPES))


def test_grows_within_a_cycle(world, live_bytes):
    live_bytes.assert_flat(world.trace(within_a_cycle, SHAPES))


def test_doubles_until_it_holds_all(world, live_bytes):
    live_bytes.assert_flat(world.trace(doubles, SHAPES))


def test_last_result(world, live_bytes):
    live_bytes.assert_flat(world.trace(last_result, SHAPES))

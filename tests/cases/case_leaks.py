"""Leaks a naive detector misses: one every eighth step, or every second cycle; growth that shrinking elsewhere hides; a
view of 16 bytes that pins a megabyte; 512 bytes a cycle; one block replaced by a larger one; growth only above a cap;
one rank only; two callers of one line; a leak below a sawtooth at the same line; the tolerance to the byte.
"""

import pytest

EXPECT = {
    "test_every_eighth": {
        "outcome": "failed",
        "report": {
            "live_bytes.0.verdict": "leak",
            "live_bytes.0.bytes_per_cycle": [4096, 4096],
            "live_bytes.0.sites.0.site": "<- eighth",
            "live_bytes.0.sites.0.blocks_per_cycle": 1.0,
        },
    },
    "test_every_second_cycle": {
        "outcome": "failed",
        "report": {
            "live_bytes.0.verdict": "leak",
            "live_bytes.0.bytes_per_cycle": [2048, 2048],
            "live_bytes.0.sites.0.site": "<- second",
            "live_bytes.0.sites.0.blocks_per_cycle": 0.5,
        },
    },
    "test_compensated": {
        "outcome": "failed",
        "report": {
            "live_bytes.0.verdict": "leak",
            "live_bytes.0.sites.0.site": "<- grows",
            "live_bytes.0.sites.0.bytes_per_cycle": 65536,
        },
        "says": ["compensated"],
    },
    "test_view_pins": {
        "outcome": "failed",
        "report": {
            "live_bytes.0.verdict": "leak",
            "live_bytes.0.bytes_per_cycle": [1048576, 1048576],
            "live_bytes.0.sites.0.site": "<- pinned",
        },
        "says": ["heads -> [", "a view of 16 of 1048576 B"],
    },
    "test_smallest": {
        "outcome": "failed",
        "report": {"live_bytes.0.bytes_per_cycle": [512, 512], "live_bytes.0.sites.0.site": "<- smallest"},
    },
    "test_replaced_by_a_larger_one": {
        "outcome": "failed",
        "report": {"live_bytes.0.bytes_per_cycle": [8192, 8192], "live_bytes.0.sites.0.site": "<- larger"},
    },
    "test_below_the_cap": {"outcome": "passed", "report": {"live_bytes.0.verdict": "flat"}},
    "test_above_the_cap": {
        "outcome": "failed",
        "report": {"live_bytes.0.bytes_per_cycle": [131072, 131072], "live_bytes.0.sites.0.site": "<- pooled"},
    },
    "test_one_rank": {
        "outcome": "failed",
        "report": {
            "live_bytes.0.bytes_per_cycle": [0, 0, 1024, 0],
            "live_bytes.0.sites.0.ranks": [2],
            "live_bytes.0.sites.0.mechanism": "retained",
        },
        "says": ["rank 2 of 4"],
    },
    "test_two_callers": {
        "outcome": "failed",
        "report": {"live_bytes.0.bytes_per_cycle": [1024, 1024], "live_bytes.0.sites.0.site": "<- called"},
    },
    "test_below_a_sawtooth": {
        "outcome": "failed",
        "report": {"live_bytes.0.verdict": "leak", "live_bytes.0.sites.0.site": "<- backlog"},
    },
    "test_exactly_the_tolerance": {
        "outcome": "passed",
        "report": {"live_bytes.0.verdict": "filling", "live_bytes.0.tolerance": 512},
    },
    "test_a_byte_less_than_it_leaks": {
        "outcome": "failed",
        "report": {"live_bytes.0.verdict": "leak", "live_bytes.0.bytes_per_cycle": [512, 512]},
    },
}
ARGS = ["--sglmem-world", "2"]


def every_eighth():
    import torch

    kept, calls = [], iter(range(10**9))

    def step(_):
        block = torch.empty(4096, dtype=torch.uint8, device="cuda")  # <- eighth
        if next(calls) % 8 == 7:
            kept.append(block)

    return step


def every_second_cycle():
    import torch

    kept, calls = [], iter(range(10**9))

    def step(_):
        block = torch.empty(4096, dtype=torch.uint8, device="cuda")  # <- second
        if next(calls) % 4 == 3:
            kept.append(block)

    return step


def compensated():
    import torch

    shrinking = [torch.empty(65536, dtype=torch.uint8, device="cuda") for _ in range(64)]
    growing = []

    def step(_):
        growing.append(torch.empty(65536, dtype=torch.uint8, device="cuda"))  # <- grows
        shrinking.pop()

    return step


def view_pins():
    import torch

    heads = []

    def step(_):
        whole = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")  # <- pinned
        heads.append(whole[:16])

    return step


def smallest():
    import torch

    kept = []

    def step(_):
        kept.append(torch.empty(1, device="cuda"))  # <- smallest

    return step


def replaced():
    import torch

    state = {"history": torch.empty(0, dtype=torch.uint8, device="cuda")}

    def step(_):
        row = torch.empty(4096, dtype=torch.uint8, device="cuda")
        state["history"] = torch.cat([state["history"], row])  # <- larger

    return step


def capped():
    import torch

    pool, registered, cap = [], {}, 4

    def take():
        if pool:
            return pool.pop()
        block = torch.empty(65536, dtype=torch.uint8, device="cuda")  # <- pooled
        registered[id(block)] = block
        return block

    def step(count):
        for block in [take() for _ in range(count)]:
            if len(pool) < cap:
                pool.append(block)

    return step


def one_rank():
    import torch
    import torch.distributed as dist

    kept = []

    def step(_):
        block = torch.empty(1024, dtype=torch.uint8, device="cuda")
        if dist.get_rank() == 2:
            kept.append(block)

    return step


def two_callers():
    import torch

    kept, calls = [], iter(range(10**9))

    def share():
        kept.append(torch.empty(1024, dtype=torch.uint8, device="cuda"))  # <- called

    def even():
        share()

    def odd():
        share()

    def step(_):
        (odd if next(calls) % 2 else even)()

    return step


def below_a_sawtooth():
    import torch

    backlog, lost = [], []

    def step(_):
        backlog.append(torch.empty(4096, dtype=torch.uint8, device="cuda"))  # <- backlog
        if len(backlog) == 3:
            lost.append(backlog[0])
            backlog.clear()

    return step


def test_every_eighth(world, live_bytes):
    live_bytes.assert_flat(world.trace(every_eighth, range(8), cycles=4))


def test_every_second_cycle(world, live_bytes):
    live_bytes.assert_flat(world.trace(every_second_cycle, range(2)))


def test_compensated(world, live_bytes):
    live_bytes.assert_flat(world.trace(compensated, [0], cycles=5))


def test_view_pins(world, live_bytes):
    live_bytes.assert_flat(world.trace(view_pins, [0], cycles=4))


def test_smallest(world, live_bytes):
    live_bytes.assert_flat(world.trace(smallest, [0], cycles=4))


def test_replaced_by_a_larger_one(world, live_bytes):
    live_bytes.assert_flat(world.trace(replaced, [0, 1], cycles=4))


def test_below_the_cap(world, live_bytes):
    live_bytes.assert_flat(world.trace(capped, [2, 4], cycles=4))


def test_above_the_cap(world, live_bytes):
    live_bytes.assert_flat(world.trace(capped, [2, 6], cycles=4))


@pytest.mark.world(size=4)
def test_one_rank(world, live_bytes):
    live_bytes.assert_flat(world.trace(one_rank, [0], cycles=4))


def test_two_callers(world, live_bytes):
    live_bytes.assert_flat(world.trace(two_callers, [0], cycles=4))


def test_below_a_sawtooth(world, live_bytes):
    live_bytes.assert_flat(world.trace(below_a_sawtooth, range(4)))


def test_exactly_the_tolerance(world, live_bytes):
    live_bytes.assert_flat(world.trace(smallest, [0], cycles=4), tolerance=512)


def test_a_byte_less_than_it_leaks(world, live_bytes):
    live_bytes.assert_flat(world.trace(smallest, [0], cycles=4), tolerance=511)

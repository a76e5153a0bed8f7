"""The emulated device's allocator: torch's rules on the exact boundaries, and invariants under random schedules."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from pytest_sglmem.emulated.allocator import (  # noqa: E402
    Allocator,
    OutOfDeviceMemory,
    rounded,
    segment_size,
)

MIB = 1 << 20


def current(allocator, kind, pool="all"):
    return allocator.statistics()[kind][pool]["current"]


@pytest.mark.parametrize(
    ("asked", "size"), [(1, 512), (511, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512)]
)
def test_rounding(asked, size):
    assert rounded(asked) == size


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
        (64 * MIB, 64 * MIB),
    ],
)
def test_segments(size, segment):
    assert segment_size(size) == segment


@pytest.mark.parametrize(("left", "counted"), [(MIB + 512, 0), (MIB, MIB)])
def test_a_large_block_is_split_where_more_than_a_mebibyte_is_left(left, counted):
    allocator = Allocator(0, 1 << 40)
    allocator.free(allocator.allocate(64 * MIB, 0))
    block = allocator.allocate(64 * MIB - left, 0)
    assert block.size == 64 * MIB - left + counted


def test_a_small_block_is_split_to_the_last_512_bytes():
    allocator = Allocator(0, 1 << 40)
    sizes = [allocator.allocate(MIB, 0).size, allocator.allocate(MIB - 512, 0).size, allocator.allocate(512, 0).size]
    assert sizes == [MIB, MIB - 512, 512]
    assert allocator.reserved == 2 * MIB


def test_the_smallest_block_that_fits_is_taken():
    allocator = Allocator(0, 1 << 40)
    blocks = [allocator.allocate(size * MIB, 0) for size in (60, 20, 40)]
    for block in blocks:
        allocator.free(block)
    assert allocator.allocate(30 * MIB, 0).segment is blocks[2].segment


def test_neighbours_that_are_free_become_one():
    allocator = Allocator(0, 1 << 40)
    first, second, third = (allocator.allocate(6 * MIB, 0) for _ in range(3))
    for block in (first, third, second):
        allocator.free(block)
    assert allocator.allocate(20 * MIB, 0).segment is first.segment


def test_an_address_is_never_handed_out_again():
    allocator = Allocator(0, 1 << 40)
    seen = set()
    for _ in range(100):
        block = allocator.allocate(700, 0)
        seen.add(block.address)
        allocator.free(block)
    assert len(seen) == 100


def test_a_miss_asks_once_and_takes_what_it_freed():
    held = []
    allocator = Allocator(0, 1 << 40, on_miss=lambda: held and allocator.free(held.pop()))
    held.append(allocator.allocate(64 * MIB, 0))
    block = allocator.allocate(64 * MIB, 0)
    assert not held
    assert allocator.reserved == block.size


def test_a_hit_does_not_ask():
    asked = []
    allocator = Allocator(0, 1 << 40, on_miss=lambda: asked.append(1))
    allocator.free(allocator.allocate(64 * MIB, 0))
    asked.clear()
    allocator.allocate(32 * MIB, 0)
    assert not asked


def test_the_last_byte_fits_and_one_more_does_not():
    allocator = Allocator(0, 64 * MIB)
    kept = allocator.allocate(44 * MIB, 0)
    assert allocator.fits(20 * MIB, 0)
    allocator.free(allocator.allocate(20 * MIB, 0))
    assert not allocator.fits(20 * MIB + 1, 0)
    with pytest.raises(OutOfDeviceMemory):
        allocator.allocate(20 * MIB + 1, 0)
    assert allocator.counts["num_ooms"] == 1
    assert current(allocator, "allocated_bytes") == kept.size


def test_the_cache_is_given_back_before_memory_is_out():
    allocator = Allocator(0, 64 * MIB)
    allocator.free(allocator.allocate(40 * MIB, 0))
    assert allocator.fits(60 * MIB, 0)
    assert allocator.allocate(60 * MIB, 0).size == 60 * MIB
    assert allocator.counts["num_alloc_retries"] == 1
    assert allocator.counts["num_device_free"] == 1


def test_a_block_that_another_stream_uses_waits_for_the_next_allocation():
    allocator = Allocator(0, 1 << 40)
    block = allocator.allocate(MIB, 0)
    block.streams = {7}
    allocator.free(block)
    assert current(allocator, "allocated_bytes") == 0
    assert current(allocator, "active_bytes") == MIB
    assert block.state == "active_pending_free"
    allocator.allocate(512, 0)
    assert current(allocator, "active_bytes") == 512


def test_peaks_and_totals_and_their_resets():
    allocator = Allocator(0, 1 << 40)
    blocks = [allocator.allocate(MIB, 0) for _ in range(3)]
    for block in blocks[1:]:
        allocator.free(block)
    told = allocator.statistics()["allocated_bytes"]["all"]
    assert told == {"current": MIB, "peak": 3 * MIB, "allocated": 3 * MIB, "freed": 2 * MIB}
    allocator.reset_peaks()
    allocator.reset_accumulated()
    told = allocator.statistics()["allocated_bytes"]["all"]
    assert told == {"current": MIB, "peak": MIB, "allocated": 0, "freed": 0}


def test_free_room_beside_live_blocks_is_told_apart():
    allocator = Allocator(0, 1 << 40)
    block = allocator.allocate(MIB, 0)
    assert current(allocator, "inactive_split_bytes") == MIB
    assert current(allocator, "inactive_split") == 1
    allocator.free(block)
    assert current(allocator, "inactive_split_bytes") == 0
    assert current(allocator, "inactive_split") == 0


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), st.integers(1, 40 * MIB) | st.integers(1, 4096), st.integers(0, 1)),
        st.tuples(st.just("free"), st.integers(0, 30), st.booleans()),
        st.tuples(st.just("empty"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=150)
@given(STEPS)
def test_the_books_balance_after_every_step(steps):
    allocator = Allocator(0, 1 << 40)
    live = []
    for action, number, other in steps:
        if action == "allocate":
            live.append(allocator.allocate(number, other))
        elif action == "free" and live:
            block = live.pop(number % len(live))
            if other:
                block.streams = {9}
            allocator.free(block)
        elif action == "empty":
            allocator.empty()
        check(allocator, live)


def check(allocator, live):
    told = allocator.statistics()
    assert told["allocated_bytes"]["all"]["current"] == sum(block.size for block in live)
    assert told["requested_bytes"]["all"]["current"] == sum(block.requested for block in live)
    assert told["allocation"]["all"]["current"] == len(live)
    laid = list(allocator.segments())
    pieces = [block for _, blocks in laid for block in blocks]
    assert told["reserved_bytes"]["all"]["current"] == sum(segment.size for segment, _ in laid)
    assert told["active_bytes"]["all"]["current"] == sum(block.size for block in pieces if block.state != "inactive")
    split = [
        block
        for segment, blocks in laid
        for block in blocks
        if block.state == "inactive" and block.size != segment.size
    ]
    assert told["inactive_split_bytes"]["all"]["current"] == sum(block.size for block in split)
    assert told["inactive_split"]["all"]["current"] == len(split)
    for segment, blocks in laid:
        assert sum(block.size for block in blocks) == segment.size
        assert [block.offset for block in blocks] == sorted(block.offset for block in blocks)
        states = [block.state for block in blocks]
        assert ("inactive", "inactive") not in itertools.pairwise(states)
    for numbers in told.values():
        if isinstance(numbers, dict) and "all" in numbers:
            assert numbers["all"]["allocated"] - numbers["all"]["freed"] == numbers["all"]["current"]
            assert numbers["all"]["peak"] >= numbers["all"]["current"]

"""The rule of growth, by literal series: two windows of counts, a sample an append."""

from __future__ import annotations

import pytest

from pytest_sglmem.windows import rate


def windows(*counts):
    """Samples of two equal windows; the middle one ends the first and begins the second."""
    samples = list(enumerate(counts))
    middle = len(samples) // 2
    return samples[: middle + 1], samples[middle:]


GROWING = {
    "one an append": ([0, 1, 2, 3, 4, 5, 6, 7, 8], 1),
    "six an append": (range(0, 54, 6), 6),
    "one every third append": ([i // 3 for i in range(61)], 1 / 3),
    "under a backlog that drains every fifth": ([i + i % 5 * 10 for i in range(41)], 1),
    "one every 200 of 1,000": ([i // 200 for i in range(1001)], 2 / 500),
    "a leak beside one first use": ([i + 100 * (i > 3) for i in range(41)], 1),
}
FLAT = {
    "nothing": [5] * 9,
    "one jump": [0, 0, 0, 0, 4, 4, 4, 4, 4],
    "a first use in each window": [0, 5, 5, 5, 5, 5, 9, 9, 9],
    "drains every third": [0, 1, 2, 0, 1, 2, 0, 1, 2],
    "drains once in a window, both ends higher": [i % 45 for i in range(10, 111)],
    "fills in the first window": [min(i, 30) for i in range(101)],
    "fills in the second window": [min(i, 75) for i in range(101)],
    "shrinks": list(range(20, 3, -1)),
    "a warm cache that is dropped": [9, 9, 9, 9, 2, 2, 2, 2, 2],
}


@pytest.mark.parametrize("name", GROWING)
def test_growth_is_seen_and_counted(name):
    counts, per_append = GROWING[name]
    said = rate(*windows(*counts))
    assert said.growing, said
    assert said.per_append == pytest.approx(per_append, rel=0.1)


@pytest.mark.parametrize("name", FLAT)
def test_what_only_looks_like_growth_is_flat(name):
    assert rate(*windows(*FLAT[name])) == (0.0, False, rate(*windows(*FLAT[name])).note)


@pytest.mark.parametrize("period", range(2, 60))
@pytest.mark.parametrize("phase", [0, 1, 7, 30])
def test_no_period_and_no_phase_of_a_backlog_is_growth(period, phase):
    assert not rate(*windows(*((i + phase) % period for i in range(121)))).growing


@pytest.mark.parametrize("size", range(1, 116))
def test_a_ring_that_fills_before_the_last_tenth_is_no_growth(size):
    if size <= 96:
        assert not rate(*windows(*(min(i, size) for i in range(101)))).growing


@pytest.mark.parametrize("each", [1, 2, 7])
def test_slack_passes_and_slack_plus_one_fails(each):
    counts = [i * each for i in range(41)]
    assert rate(*windows(*counts), slack=each) == (each, False, "")
    assert rate(*windows(*counts), slack=each - 1) == (each, True, "")


def test_slack_may_be_a_fraction():
    counts = [i // 7 for i in range(141)]
    assert not rate(*windows(*counts), slack=1 / 7).growing
    assert rate(*windows(*counts), slack=1 / 8).growing


def test_the_smallest_windows():
    assert rate(*windows(0, 1, 2)) == (1.0, True, "")
    assert rate(*windows(0, 1, 1)) == (0.0, False, "")

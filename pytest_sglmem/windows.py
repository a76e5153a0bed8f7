"""The rule that tells growth from what only looks like it. Pure: two windows of samples in, a number out.

A sample is (appends so far, count). What stays must stay in both windows, in their ends and in their floors, spread
over each window, and until the end. By examples, with windows of four appends:
`0 1 2 3 4 | 4 5 6 7 8` grows by 1 an append. `0 0 0 0 4 | 4 4 4 4 4`: one jump, flat. `0 5 5 5 5 | 5 9 9 9 9`: a first
use in each window, flat. `0 1 2 0 1 | 1 2 0 1 2`: a backlog that drains, flat (its floor stays).
`0 1 2 3 4 | 4 5 5 5 5` (in longer windows): a ring that fills, flat, and said to be filled.
Known limit: what has not filled or drained by the end of the last window cannot be told from a leak.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

Sample = tuple[int, int]
_NOISE = 1e-9  # slack may be a fraction: 1/7 an append over 70 appends is not less than 10


class Rate(NamedTuple):
    """`per_append`: what stays an append, at least; `growing`: whether it is more than the slack; `note`: why not."""

    per_append: float
    growing: bool
    note: str = ""


def rate(first: Sequence[Sample], second: Sequence[Sample], slack: float = 0) -> Rate:
    """What stays an append over both windows. `second` begins with the sample that ends `first`."""
    least = min(_rise(first), _rise(second), _floor_rise(first, second))
    if least <= slack + _NOISE:
        return Rate(max(least, 0.0), False)
    if not (_spread(first, slack) and _spread(second, slack)):
        return Rate(0.0, False, "grew in one jump a window, as first uses do")
    if filled([*first, *second[1:]], slack):
        return Rate(0.0, False, "filled, then flat")
    return Rate(least, True)


def filled(samples: Sequence[Sample], slack: float = 0) -> bool:
    """Whether what rose at first has stopped: no rise for more than twice the longest pause between earlier rises."""
    floors = [count - slack * at for at, count in samples]
    for index in range(len(floors) - 2, -1, -1):
        floors[index] = min(floors[index], floors[index + 1])
    rises = [samples[i][0] for i in range(1, len(samples)) if floors[i] > floors[i - 1] + _NOISE]
    if len(rises) < 3:
        return False
    longest = max(b - a for a, b in zip([samples[0][0], *rises], rises, strict=False))
    return samples[-1][0] - rises[-1] > 2 * longest


def _rise(window: Sequence[Sample]) -> float:
    return (window[-1][1] - window[0][1]) / (window[-1][0] - window[0][0])


def _floor_rise(first: Sequence[Sample], second: Sequence[Sample]) -> float:
    floors = [min(count for _, count in window[1:]) for window in (first, second)]
    return (floors[1] - floors[0]) / (second[-1][0] - first[-1][0])


def _spread(window: Sequence[Sample], slack: float) -> bool:
    """Whether the window still grows by more than the slack without its largest step."""
    steps = [(b[1] - a[1] - slack * (b[0] - a[0])) for a, b in pairwise(window)]
    return len(steps) == 1 or sum(steps) - max(steps) > _NOISE

"""Words: what is told of a verdict reads alike for two ranks and for many."""

from dataclasses import replace

import pytest
import sessions

from pytest_sglmem import words

KIB = 2**10


def rows(settled):
    """The block of settled sizes in a verdict's message."""
    verdict = replace(sessions.verdict(size=len(settled)), settled=settled)
    blocks = words.verdict_message(verdict).split("\n\n")
    return next(block for block in blocks if "settled" in block).splitlines()[1:]


@pytest.mark.parametrize(
    ("settled", "shown"),
    [
        ([(KIB, 2 * KIB)] * 8, ["  ranks 0-7  1  2"]),
        ([(KIB, 2 * KIB)] * 2, ["  ranks 0, 1  1  2"]),
        ([(KIB, 2 * KIB)], ["  rank 0  1  2"]),
        ([(KIB, KIB), (KIB, KIB), (KIB, 2 * KIB), (KIB, KIB)], ["  ranks 0, 1, 3  1  1", "  rank 2         1  2"]),
        ([(KIB, KIB), (), (KIB, KIB)], ["  ranks 0, 2  1  1"]),
    ],
    ids=["eight alike", "two alike", "one", "one that differs", "one that died"],
)
def test_ranks_that_settle_alike_share_a_row(settled, shown):
    assert rows(settled) == shown


def test_ranks_that_differ_have_a_row_each():
    assert rows([(KIB * rank, KIB * rank) for rank in range(1, 21)])[0::19] == [
        "  rank 0    1   1",
        "  rank 19  20  20",
    ]

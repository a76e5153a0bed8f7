"""What the messages say, and that they fit: 80 columns, eight ranks, no colour."""

from __future__ import annotations

from dataclasses import replace

import pytest
import sessions

from pytest_sglmem import words
from pytest_sglmem.holders import NOBODY, STOPPED
from pytest_sglmem.judge import judge
from pytest_sglmem.records import (
    CycleEnd,
    Growth,
    IpcFault,
    IpcSummary,
    LiveBlocks,
    RankTrace,
    Reading,
    SiteVerdict,
    Trace,
    Verdict,
)
from pytest_sglmem.words import fault_line, growth_message, ranks, size, sparkline, verdict_line, verdict_message

KIB, MIB = 1 << 10, 1 << 20
CHAIN = "step -> closure engine -> .store -> ['9f3ab2c4d5e6f708192…'] -> .staging -> ['k'] -> Tensor"


def verdict(word="leak", settled=((0, 0, 0), (0, MIB, 2 * MIB)), **more):
    world = len(settled)
    rates = tuple(max(0, (v[-1] - v[0]) // (len(v) - 1)) if word == "leak" else 0 for v in settled)
    fields = {"cyclic_bytes": (0,) * world, "late_bytes": (0,) * world, "tolerance": 0, "cycles": len(settled[0])}
    return Verdict(word, rates, settled, settled, warmup=1, **{**fields, **more})


def site(**more):
    stack = ("server/engine.py:41 in share", "server/engine.py:90 in step")
    return SiteVerdict(
        stack[0], stack, MIB, 1.0, **{"ranks": (1,), "held_by": (CHAIN,), "mechanism": "retained", **more}
    )


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (512, "512 B"), (1536, "1.5 KiB"), (MIB, "1 MiB"), (5 << 40, "5 TiB"), (-512, "-512 B")],
)
def test_sizes(count, text):
    assert size(count) == text


@pytest.mark.parametrize(
    ("numbers", "text"), [((3,), "rank 3"), ((0, 1, 2, 5), "ranks 0-2, 5"), ((1, 0), "ranks 0, 1"), ((2, 2), "rank 2")]
)
def test_ranks(numbers, text):
    assert ranks(numbers) == text


def test_sparklines_show_the_ends():
    assert sparkline([0, 7]) == "▁█"
    assert sparkline([5, 5, 5]) == "▁▁▁"
    assert sparkline(range(100), 4) == "▁▃▆█"
    assert sparkline([]) == ""


def test_a_leak_says_rank_bytes_limit_site_holder_mechanism_and_what_next():
    text = verdict_message(verdict(sites=(site(),)))
    assert text.splitlines()[0] == "leak: 1 MiB a cycle on rank 1 of 2, allowed 0 B (3 cycles + 1 warm-up)"
    assert "  rank 0  0  0  0\n  rank 1  0  1  2" in text
    assert "  +1 MiB a cycle, rank 1: server/engine.py:41 in share\n      from  server/engine.py:90 in step" in text
    assert "held by  step -> closure engine -> .store" in text
    assert "a Python object keeps the tensor (retained)" in text
    assert text.splitlines()[-1].startswith("  next: drop the tensor")


def test_where_nobody_is_named_the_reason_says_so_once():
    text = verdict_message(verdict(sites=(site(mechanism="unknown", held_by=(NOBODY,)),)))
    assert "held by" not in text
    assert "    because  only C++ keeps it: no Python object leads to it" in text


def test_a_search_that_did_not_end_is_the_reason():
    stopped = f"{STOPPED} 30 s"
    text = verdict_message(verdict(sites=(site(mechanism="unknown", held_by=(stopped,)),)))
    assert f"    because  {stopped} (unknown)" in text
    assert "only C++" not in text
    found = verdict_message(verdict(sites=(site(held_by=(CHAIN, stopped)),)))
    assert "a Python object keeps the tensor (retained)" in found


@pytest.mark.parametrize("mechanism", ["ipc-over-released", "ipc-never-opened", "ipc-held-by-peer", "ipc-dead-peer"])
def test_every_mechanism_has_a_reason_and_a_next_move(mechanism):
    text = verdict_message(verdict(sites=(site(mechanism=mechanism, held_by=()),)))
    assert f"({mechanism})" in text
    assert "next: " in text


def test_an_ipc_fault_is_one_line_with_opens_and_counter():
    fault = IpcFault("over-released", "a.py:41 in share", 7, -6, 14, 14 * MIB, tuple(range(1, 8)))
    assert fault_line(fault) == (
        "ipc over-released: exported at a.py:41 in share: 14 handles, each opened 7 times by ranks 1-7, "
        "counter -6, 14 MiB in all"
    )
    never = IpcFault("never-opened", "a.py:41 in share", 0, 1, 1, MIB, (1,))
    assert "1 handle never opened by rank 1, counter 1" in fault_line(never)
    gone = IpcFault("freed-while-open", "a.py:41 in share", 1, None, 1, MIB, ())
    assert "opened once, counter gone" in fault_line(gone)


def test_eight_ranks_and_twelve_cycles_fit_80_columns():
    settled = tuple(tuple(12 * 1024 * MIB + rank * 512 + at * 3 * MIB for at in range(12)) for rank in range(8))
    fault = IpcFault("over-released", "server/engine.py:41 in share", 7, -6, 14, MIB, tuple(range(1, 8)))
    text = verdict_message(
        verdict(
            settled=settled,
            sites=(site(ranks=tuple(range(8))),),
            ipc=IpcSummary(1, 7, (fault,)),
            cyclic_bytes=(512,) * 8,
            late_bytes=(0, MIB) * 4,
            outside_bytes=(512 * MIB,) * 8,
            reserved_bytes=(20 * MIB,) * 8,
            note="compensated: on ranks 0, 1 other sites lose what this one gains, the total does not show it",
        )
    )
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    rows = [line for line in text.splitlines() if line.startswith("  rank ")]
    assert len(rows) == 8
    assert len({len(row) for row in rows}) == 1


def test_values_that_differ_look_different():
    settled = ((8 << 30, (8 << 30) + 512, (8 << 30) + 1024),)
    (row,) = [line for line in verdict_message(verdict(settled=settled)).splitlines() if line.startswith("  rank 0")]
    assert len(set(row.split()[2:])) == 3


def test_a_large_world_shares_rows():
    settled = ((0, 0, 0),) * 31 + ((0, MIB, 2 * MIB),)
    text = verdict_message(verdict(settled=settled))
    assert "  ranks 0-30  0  0  0\n  rank 31     0  1  2" in text


@pytest.mark.parametrize(
    ("word", "more", "text"),
    [
        ("flat", {}, "flat: 2 MiB (3 cycles + 1 warm-up)"),
        ("filling", {}, "filling: grew by 2 MiB over the cycles, not in the way of a leak (3 cycles + 1 warm-up)"),
        (
            "cyclic",
            {"cyclic_bytes": (0, MIB)},
            "cyclic: device memory lies in reference cycles (3 cycles + 1 warm-up); "
            "1 MiB a cycle came back only through the cyclic collector on rank 1",
        ),
        (
            "late",
            {"late_bytes": (MIB, MIB)},
            "late: device memory waits for somebody's ipc_collect (3 cycles + 1 warm-up); "
            "1 MiB a cycle came back only after torch.cuda.ipc_collect() on ranks 0, 1",
        ),
    ],
)
def test_the_other_verdicts_in_a_line(word, more, text):
    assert verdict_line(verdict(word, **more)) == text


def test_the_line_of_a_leak_names_the_site():
    assert verdict_line(verdict(sites=(site(),))).endswith("; server/engine.py:41 in share (retained)")


def test_what_the_judge_says_reads_the_same():
    census = [tuple(LiveBlocks(("a.py:1 in f",), born, 512, 1) for born in range(at + 1)) for at in range(4)]
    ends = tuple(CycleEnd(*[Reading(512 * (at + 1), at + 1)] * 3, census[at]) for at in range(4))
    text = verdict_message(judge(Trace((RankTrace(0, (), ends),), ("g",), 1)))
    assert text.startswith("leak: 512 B a cycle on 1 rank, allowed 0 B (3 cycles + 1 warm-up)")
    assert "  +512 B a cycle: a.py:1 in f" in text


def test_growth():
    text = growth_message(Growth("growing", 8.0, {"list": 2.0, "dict": 3.0}, ("a -> b",), {}, 1000, (4000, 4000)))
    assert text.splitlines() == [
        "growing: 8 tracked objects stay with every append, allowed 0 (1000 appends)",
        "  objects more in each window: +4000, +4000",
        "         3 an append  dict",
        "         2 an append  list",
        "  held by  a -> b",
    ]


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
        ([(KIB, KIB), (KIB, 2 * KIB), (KIB, KIB)], ["  rank 0  1  1", "  rank 1  1  2", "  rank 2  1  1"]),
        ([(KIB, KIB)] * 8 + [(KIB, 2 * KIB)], ["  ranks 0-7  1  1", "  rank 8     1  2"]),
        ([(KIB, KIB), (), (KIB, KIB)], ["  ranks 0, 2  1  1"]),
    ],
    ids=["eight alike", "two alike", "one", "one that differs", "in a large world", "one that died"],
)
def test_ranks_that_settle_alike_share_a_row(settled, shown):
    assert rows(settled) == shown


def test_ranks_that_differ_have_a_row_each():
    assert rows([(KIB * rank, KIB * rank) for rank in range(1, 21)])[0::19] == [
        "  rank 0    1   1",
        "  rank 19  20  20",
    ]

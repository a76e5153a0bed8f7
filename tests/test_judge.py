"""The rule, by literal series: settled bytes at cycle ends in, verdict out. No device, no torch."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from pytest_sglmem.judge import LeakError, judge, leaking_stacks, settled
from pytest_sglmem.records import CycleEnd, Export, LiveBlocks, Open, RankTrace, Reading, Trace

GROWS, SHRINKS = ("a.py:1 in grows", "a.py:9 in step"), ("a.py:2 in shrinks", "a.py:9 in step")


def rank_of(values, rank=0, *, late=0, cyclic=0, outside=None, **more):
    """A rank whose `after_gc` bytes are `values`, without a census."""
    outside = outside or [None] * len(values)
    ends = tuple(
        CycleEnd(Reading(v + late + cyclic), Reading(v + cyclic), Reading(v, outside=o))
        for v, o in zip(values, outside, strict=True)
    )
    return RankTrace(rank, tuple(values), ends, **more)


def trace_of(*series, warmup=0, **more):
    ranks = tuple(rank_of(values, rank, **more) for rank, values in enumerate(series))
    return Trace(ranks, ("g",), warmup)


def counted(*cycles, rank=0, **more):
    """A rank by its census: for each cycle {stack: {born: blocks}} or {stack: {born: (blocks, bytes)}}."""
    ends = []
    for cycle in cycles:
        census = tuple(
            LiveBlocks(stack, born, *((size[1], size[0]) if isinstance(size, tuple) else (size * 512, size)))
            for stack, births in cycle.items()
            for born, size in births.items()
        )
        reading = Reading(sum(entry.bytes for entry in census), sum(entry.blocks for entry in census))
        ends.append(CycleEnd(reading, reading, reading, census))
    return RankTrace(rank, tuple(end.after_gc.live for end in ends), tuple(ends), **more)


def said(*ranks, warmup=0, **options):
    return judge(Trace(tuple(ranks), ("g",), warmup), **options)


@pytest.mark.parametrize(
    ("values", "warmup", "word", "rate"),
    [
        ([8, 8, 8], 0, "flat", 0),
        ([4, 8, 8, 8], 1, "flat", 0),
        ([4, 8, 8, 8], 0, "filling", 0),
        ([4, 8, 9, 10, 10, 10], 0, "filling", 0),
        ([4, 8, 9, 10, 10, 10], 1, "filling", 0),
        ([8, 9, 10, 11], 0, "leak", 1),
        ([8, 9, 10], 0, "leak", 1),
        ([8, 10, 11, 13], 0, "leak", 2),  # 5/3 a cycle, said as whole bytes upwards
        ([8, 8, 9], 0, "filling", 0),
        ([8, 9, 9], 0, "filling", 0),
        ([8, 9, 7, 8], 0, "flat", 0),
        ([9, 8, 7], 0, "flat", 0),
        ([0, 1, 2, 0, 1, 2, 0], 0, "flat", 0),
        ([8, 9, 9, 10, 10], 0, "leak", 1),  # one every second cycle, two periods
        ([8, 9, 9, 10], 0, "filling", 0),  # not yet two periods
        ([8, 8, 8, 9, 9, 9, 10], 0, "leak", 1),  # one every third cycle
        ([8, 12, 14, 15, 15, 16], 0, "filling", 0),  # ever more slowly
        ([7], 0, "flat", 0),
        ([7, 8], 0, "filling", 0),  # one rise is a first use as well
        ([7, 8, 9], 1, "leak", 1),
        ([8, 8, 9], 1, "filling", 0),
    ],
)
def test_the_rule_by_series(values, warmup, word, rate):
    verdict = judge(trace_of(values, warmup=warmup))
    assert (verdict.verdict, verdict.bytes_per_cycle) == (word, (rate,))
    assert verdict.settled == (tuple(values[warmup:]),)
    assert (verdict.cycles, verdict.warmup) == (len(values) - warmup, warmup)


def test_one_rank_of_four_is_enough():
    verdict = judge(trace_of([8, 8, 8], [8, 8, 8], [8, 8, 8], [8, 9, 10]))
    assert (verdict.verdict, verdict.bytes_per_cycle) == ("leak", (0, 0, 0, 1))


def test_ranks_are_named_by_their_numbers_where_one_is_dead():
    ranks = rank_of([8, 8, 8], 0), rank_of([8, 9, 10], 2)
    verdict = judge(Trace(ranks, ("g",), 0, dead=(1, 3)))
    assert verdict.bytes_per_cycle == (0, 0, 1, 0)
    assert verdict.settled == ((8, 8, 8), (), (8, 9, 10), ())
    assert len(verdict.late_bytes) == len(verdict.cyclic_bytes) == len(verdict.outputs_digest) == 4
    assert verdict.sites[0].ranks == (2,)
    assert str(LeakError(verdict)).startswith("leak: 1 B a cycle on rank 2 of 2 traced, allowed 0 B")
    assert "rank 1" not in str(LeakError(verdict))


def test_all_that_are_left_leak():
    verdict = judge(Trace((rank_of([8, 9, 10], 1), rank_of([8, 9, 10], 2)), ("g",), 0, dead=(0,)))
    assert str(LeakError(verdict)).startswith("leak: 1 B a cycle on all 2 ranks, allowed 0 B")
    assert "  ranks 1, 2" in str(LeakError(verdict))


def test_a_trace_of_other_ranks_than_the_first():
    verdict = judge(Trace((rank_of([8, 8, 8], 2, late=1), rank_of([8, 8, 8], 3)), ("g",), 0))
    assert (verdict.verdict, verdict.late_bytes) == ("late", (0, 0, 1, 0))


@pytest.mark.parametrize("slack", [512, 513])
def test_the_tolerance_is_exact(slack):
    leak = judge(trace_of([0, 513, 1026, 1539]), tolerance=slack)
    assert leak.verdict == ("leak" if slack == 512 else "filling")
    assert leak.bytes_per_cycle == (513 if slack == 512 else 0,)
    if slack == 513:
        assert "within the tolerance" in leak.note


def test_a_fraction_above_the_tolerance_is_above():
    assert judge(trace_of([0, 1, 3, 4, 6]), tolerance=1).verdict == "leak"
    assert judge(trace_of([0, 1, 3, 4, 6]), tolerance=2).verdict == "filling"


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "8"])
def test_a_wrong_tolerance_is_refused(wrong):
    with pytest.raises(ValueError, match=f"got {wrong!r}"):
        judge(trace_of([8, 8, 8]), tolerance=wrong)


# Sites.


def leaking(cycles, each=1, stack=GROWS, since=0):
    """What a leak's census is: the blocks of every cycle, all still there."""
    return [{stack: dict.fromkeys(range(since, at + 1), each)} for at in range(cycles)]


def test_a_leak_keeps_blocks_of_every_cycle():
    verdict = said(counted(*leaking(4)))
    (site,) = verdict.sites
    assert verdict.verdict == "leak"
    assert (site.site, site.stack, site.bytes_per_cycle, site.blocks_per_cycle, site.ranks) == (
        *(GROWS[0], GROWS, 512, 1.0, (0,)),
    )


def test_compensated_growth_is_a_leak():
    cycles = [{**grown, SHRINKS: {-1: 10 - at}} for at, grown in enumerate(leaking(4))]
    verdict = said(counted(*cycles))
    assert (verdict.verdict, verdict.bytes_per_cycle) == ("leak", (512,))
    assert [site.site for site in verdict.sites] == [GROWS[0]]
    assert len(set(verdict.settled[0])) == 1
    assert "compensated" in verdict.note


def test_turnover_in_a_full_cache_is_not():
    # One line gains what the other loses, and what it keeps is only the newest: nothing is left of cycle 0.
    cycles = [
        {GROWS: {0: 1}, SHRINKS: {-1: 6}},
        {GROWS: {0: 1, 1: 1}, SHRINKS: {-1: 5}},
        {GROWS: {1: 1, 2: 2}, SHRINKS: {-1: 4}},
        {GROWS: {2: 2, 3: 2}, SHRINKS: {-1: 3}},
    ]
    assert said(counted(*cycles)).verdict == "flat"


def test_growth_above_the_newest_only_is_filling():
    # [8, 9, 10, 11] by total, but nothing of cycle 0 is left: a cache that took ever larger entries.
    cycles = [{GROWS: {0: 8}}, {GROWS: {1: 9}}, {GROWS: {2: 10}}, {GROWS: {3: 11}}]
    assert said(counted(*cycles)).verdict == "filling"


def test_one_block_replaced_by_a_larger_one_is_a_leak():
    cycles = [{GROWS: {at: (1, 4096 * (at + 1))}} for at in range(4)]
    verdict = said(counted(*cycles))
    assert (verdict.verdict, verdict.bytes_per_cycle) == ("leak", (4096,))


def test_one_block_that_doubles_is_no_leak():
    assert said(counted(*[{GROWS: {at: (1, 4096 * 2**at)}} for at in range(4)])).verdict == "filling"


def test_every_second_cycle_over_two_periods():
    cycles = [{GROWS: dict.fromkeys(range(0, at + 1, 2), 1)} for at in range(5)]
    verdict = said(counted(*cycles))
    assert (verdict.verdict, verdict.sites[0].blocks_per_cycle) == ("leak", 0.5)
    assert said(counted(*cycles[:4])).verdict == "filling"


def test_a_cache_that_fills_ever_more_slowly_began_faster():
    # The same series after a warm-up that left three: no leak of every second cycle.
    cycles = [{GROWS: {0: 3, **dict.fromkeys(range(2, at + 1, 2), 1)}} for at in range(7)]
    assert said(counted(*cycles), warmup=1).verdict == "filling"


def test_stacks_of_one_line_are_one_site():
    other = (GROWS[0], "b.py:7 in other")
    cycles = [{**a, **b} for a, b in zip(leaking(4), leaking(4, stack=other, each=2), strict=True)]
    verdict = said(counted(*cycles))
    (site,) = verdict.sites
    assert (site.site, site.stack, site.bytes_per_cycle) == (GROWS[0], other, 3 * 512)


def test_a_line_that_leaks_through_two_callers_in_turn():
    other = (GROWS[0], "b.py:7 in other")
    cycles = []
    for at in range(4):
        cycles.append({GROWS: dict.fromkeys(range(0, at + 1, 2), 1), other: dict.fromkeys(range(1, at + 1, 2), 1)})
    verdict = said(counted(*cycles))
    assert (verdict.verdict, verdict.sites[0].site, verdict.bytes_per_cycle) == ("leak", GROWS[0], (512,))


def test_a_leak_scattered_over_lines_names_the_lines():
    cycles = [{(f"a.py:{b} in made",): {b: 1} for b in range(at + 1)} for at in range(4)]
    verdict = said(counted(*cycles))
    assert (verdict.verdict, verdict.bytes_per_cycle) == ("leak", (512,))
    assert {site.site for site in verdict.sites} == {f"a.py:{b} in made" for b in (1, 2, 3)}


def test_sites_are_merged_over_ranks_and_the_worst_is_first():
    both = [{**a, **b} for a, b in zip(leaking(4, each=3), leaking(4, stack=SHRINKS), strict=True)]
    verdict = said(counted(*leaking(4)), counted(*both, rank=1))
    assert [(site.site, site.ranks, site.bytes_per_cycle) for site in verdict.sites] == [
        (GROWS[0], (0, 1), 3 * 512),
        (SHRINKS[0], (1,), 512),
    ]


@pytest.mark.parametrize("pattern", ["a.py:1 in grows", "in grows", "a.py:*", "*in step"])
def test_ignored_sites_do_not_count_and_the_note_says_so(pattern):
    verdict = said(counted(*leaking(4)), ignore_sites=[pattern])
    assert (verdict.verdict, verdict.sites) == ("flat", ())
    assert "hidden by ignored sites: 512 B" in verdict.note


def test_an_ignored_site_hides_no_other():
    cycles = [{**a, **b} for a, b in zip(leaking(4), leaking(4, stack=("b.py:1 in f",)), strict=True)]
    verdict = said(counted(*cycles), ignore_sites=["b.py"])
    assert [site.site for site in verdict.sites] == [GROWS[0]]


def test_growth_that_no_census_saw_is_still_a_leak():
    ends = tuple(CycleEnd(*[Reading(4096 * at, at + 2)] * 3, (LiveBlocks(SHRINKS, -1, 512, 1),)) for at in range(4))
    verdict = said(RankTrace(0, (), ends))
    assert (verdict.verdict, verdict.bytes_per_cycle, verdict.sites[0].site) == ("leak", (4096,), "unknown")


# Cyclic, late, outside, reserved.


def test_cyclic_bytes_are_those_of_a_cycle():
    verdict = judge(trace_of([8, 8, 8], cyclic=2))
    assert (verdict.verdict, verdict.cyclic_bytes, verdict.late_bytes) == ("cyclic", (2,), (0,))


def test_late_bytes_are_those_of_a_cycle():
    verdict = judge(trace_of([8, 8, 8], late=2))
    assert (verdict.verdict, verdict.cyclic_bytes, verdict.late_bytes) == ("late", (0,), (2,))


def test_cyclic_garbage_in_one_cycle_only_is_not_said():
    once = [CycleEnd(Reading(8 + extra), Reading(8 + extra), Reading(8)) for extra in (0, 5, 0)]
    assert said(RankTrace(0, (), tuple(once))).verdict == "flat"
    twice = [CycleEnd(Reading(8 + extra), Reading(8 + extra), Reading(8)) for extra in (0, 5, 5)]
    assert said(RankTrace(0, (), tuple(twice))).verdict == "cyclic"


@pytest.mark.parametrize(
    ("values", "late", "cyclic", "word"),
    [
        ([8, 9, 10], 1, 1, "leak"),
        ([8, 9, 9, 9], 1, 1, "filling"),
        ([8, 8, 8], 1, 1, "cyclic"),
        ([8, 8, 8], 1, 0, "late"),
    ],
)
def test_the_gravest_word_is_the_verdict(values, late, cyclic, word):
    verdict = judge(trace_of(values, late=late, cyclic=cyclic))
    assert (verdict.verdict, verdict.late_bytes, verdict.cyclic_bytes) == (word, (late,), (cyclic,))


def test_what_grows_outside_torch_is_said_and_is_no_leak():
    verdict = judge(trace_of([8, 8, 8], outside=[100, 200, 300]))
    assert (verdict.verdict, verdict.bytes_per_cycle, verdict.outside_bytes) == ("flat", (0,), (300,))
    (site,) = verdict.sites
    assert (site.mechanism, site.bytes_per_cycle, site.ranks) == ("outside-torch", 100, (0,))


@pytest.mark.parametrize("outside", [[100, 200, 200], [100, 100, 100], [100, None, 300]])
def test_what_does_not_grow_in_every_cycle_outside_torch_is_not(outside):
    assert judge(trace_of([8, 8, 8], outside=outside)).sites == ()


def test_reserved_and_not_live_is_a_number_of_its_own():
    ends = (CycleEnd(*[Reading(8, 1, 20)] * 3),) * 3
    assert said(RankTrace(0, (), ends)).reserved_bytes == (12,)


# Mechanisms.


def with_exports(counter, *, opens=(), held=(), dead=(), dropped=True, freed=False, allocated=GROWS):
    export = Export(0, "f", 0, 512, ("e.py:1 in share",), 0, counter, dropped, freed, allocated)
    exporter = counted(*leaking(4), exports=(export,), held_by={GROWS[0]: held} if held else {})
    peers = [
        counted(*[{}] * 4, rank=rank, opens=tuple(Open(rank, "f", 0, ("o.py:1 in take",), released=r) for r in each))
        for rank, each in enumerate(opens, 1)
    ]
    trace = Trace((exporter, *peers), ("g",), 0, dead=dead)
    return judge(trace).sites[0].mechanism


@pytest.mark.parametrize(
    ("mechanism", "case"),
    [
        ("ipc-over-released", {"counter": -3, "opens": [(1, 1, 1, 1)]}),
        ("ipc-never-opened", {"counter": 1}),
        ("ipc-held-by-peer", {"counter": 1, "opens": [(0,)]}),
        ("ipc-dead-peer", {"counter": 1, "dead": (1,)}),
        ("retained", {"counter": 1, "dropped": False, "held": ("m.STORE -> [0] -> Tensor",)}),
        ("retained", {"counter": 0, "freed": True, "held": ("m.STORE -> [0] -> Tensor",)}),
        ("unknown", {"counter": 0, "freed": True, "held": ("no Python object: only C++ holds it",)}),
        ("unknown", {"counter": 0, "freed": True}),
        ("unknown", {"counter": -3, "opens": [(1, 1, 1, 1)], "allocated": SHRINKS}),
    ],
)
def test_mechanisms(mechanism, case):
    assert with_exports(**case) == mechanism


@pytest.mark.parametrize(("cycles", "few"), [(3, True), (5, True), (6, False)])
def test_a_leak_out_of_few_cycles_says_that_a_cache_looks_the_same(cycles, few):
    verdict = said(counted(*leaking(cycles)))
    assert verdict.verdict == "leak"
    assert (f"only {cycles} cycles were run, and a cache" in verdict.note) is few
    assert "only 3 cycles" not in said(counted(*[{GROWS: {0: 1}}] * 3)).note


def test_what_ipc_lost_is_no_cache_however_few_the_cycles():
    export = Export(0, "f", 0, 512, ("e.py:1 in share",), 0, -3, True, False, GROWS)
    assert said(counted(*leaking(4), exports=(export,))).note == ""
    assert "only 4 cycles" in said(counted(*leaking(4))).note


def test_the_ledgers_of_all_ranks_are_summed_up():
    export = Export(0, "f", 0, 512, ("e.py:1 in share",), 0, -1, True)
    opens = tuple(Open(1, "f", 0, (), released=1, order=n) for n in range(2))
    verdict = said(rank_of([8, 8, 8], exports=(export,)), rank_of([8, 8, 8], 1, opens=opens))
    assert (verdict.ipc.exports, verdict.ipc.opens) == (1, 2)
    assert [fault.kind for fault in verdict.ipc.faults] == ["over-released"]


def test_holders_that_differ_in_a_key_are_said_once():
    ranks = [
        counted(*leaking(4), rank=rank, held_by={GROWS[0]: (f"m.STORE -> ['k{rank}'] -> Tensor",)}) for rank in (0, 1)
    ]
    assert said(*ranks).sites[0].held_by == ("m.STORE -> ['k0'] -> Tensor",)


# Settled: when to stop.


def test_a_clean_test_ends_after_three_cycles():
    flat = rank_of([4, 8, 8, 8])
    assert settled(flat, 1, 3)
    assert not settled(flat, 1, 4)
    assert not settled(rank_of([8, 8]), 0, 1)  # two cycles settle nothing, whatever was asked for


def test_a_leak_is_looked_at_to_the_last_cycle():
    assert not settled(counted(*leaking(4)), 0, 3)
    assert not settled(rank_of([8, 9, 10, 11]), 0, 3)


@pytest.mark.parametrize(
    ("values", "done"),
    [
        ([8, 9, 9], False),
        ([8, 9, 9, 9], False),
        ([8, 9, 9, 9, 9], True),
        ([8, 9, 9, 10, 10], False),
        ([8, 7, 8], True),
    ],
)
def test_what_grew_is_watched_for_three_more_cycles(values, done):
    assert settled(rank_of(values), 0, 3) is done


def test_a_cache_that_is_full_is_settled_as_soon_as_a_cycle_has_no_survivor():
    cycles = [{GROWS: {0: 4, 1: 4}}, {GROWS: {0: 2, 1: 4, 2: 4}}, {GROWS: {1: 2, 2: 4, 3: 4}}]
    assert not settled(counted(*cycles), 1, 3)
    cycles.append({GROWS: {2: 2, 3: 4, 4: 4}})
    assert settled(counted(*cycles), 1, 3)


def test_compensated_growth_is_not_settled():
    cycles = [{**grown, SHRINKS: {-1: 10 - at}} for at, grown in enumerate(leaking(4))]
    assert not settled(counted(*cycles), 0, 3)


def test_leaking_stacks_are_the_worst_first():
    cycles = [{**a, **b} for a, b in zip(leaking(4), leaking(4, stack=SHRINKS, each=2), strict=True)]
    assert leaking_stacks(counted(*cycles), 0) == (SHRINKS, GROWS)
    assert leaking_stacks(rank_of([8, 9, 10]), 0) == ((),)
    assert leaking_stacks(rank_of([8, 8, 8]), 0) == ()


# The rest.


def test_the_error_carries_its_verdict_and_can_be_pickled():
    verdict = judge(trace_of([8, 9, 10, 11]))
    error = pickle.loads(pickle.dumps(LeakError(verdict)))
    assert error.verdict == verdict
    assert str(error).startswith("leak: 1 B a cycle on 1 rank, allowed 0 B (4 cycles + 0 warm-up)")


def test_outputs_and_the_slowest_step():
    ranks = [rank_of([8] * 3, r, digests=("a", "b", "a"), seconds=(0.1, 0.1, 0.1 + r)) for r in (0, 1)]
    verdict = said(*ranks)
    assert verdict.outputs_digest[0] == verdict.outputs_digest[1] != ""
    assert (verdict.slowest.rank, verdict.slowest.step) == (1, 2)


def test_judging_needs_no_torch():
    code = "import sys, pytest_sglmem.judge; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def raced(cycles, **more):
    """A rank whose handles were over-released in these cycles, over four cycles of two steps that hardly grow."""
    ends = tuple(CycleEnd(*[Reading(512 * at, at)] * 3) for at in (1, 2, 2, 3))
    exports = tuple(
        Export(0, "f", at, 512, ("e.py:1 in share",), 2 * at, -1, True, False, GROWS, block=at, **more) for at in cycles
    )
    return RankTrace(0, (512,) * 8, ends, exports=exports)


def test_blocks_that_ipc_lost_in_two_cycles_are_a_leak_however_unevenly():
    verdict = said(raced([1, 3]))
    assert (verdict.verdict, verdict.bytes_per_cycle) == ("leak", (256,))
    assert (verdict.sites[0].site, verdict.sites[0].mechanism) == (GROWS[0], "ipc-over-released")


@pytest.mark.parametrize("cycles", [[], [3]])
def test_one_cycle_in_which_ipc_lost_a_block_is_not_yet(cycles):
    assert said(raced(cycles)).verdict == "filling"


def test_what_ipc_lost_in_the_warm_up_does_not_count():
    assert said(raced([0, 3]), warmup=1).verdict != "leak"
    assert said(raced([1, 3]), warmup=1).verdict == "leak"


def test_what_ipc_lost_at_an_ignored_site_does_not_count():
    assert said(raced([1, 3]), ignore_sites=["in grows"]).verdict == "filling"


@pytest.mark.parametrize(("cycles", "word"), [(8, "leak"), (7, "filling")])
def test_blocks_replaced_in_turn_need_a_long_look(cycles, word):
    ends = [{GROWS: {at: (1, 512 * (2 * at + 2)), at - 1: (1, 512 * (2 * at + 1))}} for at in range(cycles)]
    assert said(counted(*ends)).verdict == word
    assert not settled(counted(*ends), 0, 3)

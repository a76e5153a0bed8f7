"""The live_bytes fixture over traces made by hand: what is refused, what is kept, also where nothing can be."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("torch")

from pytest_sglmem.digests import digest
from pytest_sglmem.judge import LeakError
from pytest_sglmem.live_bytes import LiveBytes, OutputsDiffer
from pytest_sglmem.records import CycleEnd, LiveBlocks, RankTrace, Reading, Trace


def trace(*settled, digests=()):
    """One rank, one geometry, one warm-up cycle; all bytes come from one line, one block a step of growth."""
    ends = []
    for cycle, live in enumerate(settled):
        census = tuple(LiveBlocks(("a.py:1 in f",), born, 512, 1) for born in range(live // 512) if born <= cycle)
        ends.append(CycleEnd(Reading(live), Reading(live), Reading(live), census))
    return Trace((RankTrace(0, tuple(settled), tuple(ends), tuple(digests)),), ("g",))


LEAK = trace(512, 1024, 1536, 2048)


@pytest.fixture
def live_bytes(tmp_path):
    return LiveBytes(lambda *_: None, artifacts=tmp_path / "kept")


def test_a_leak_is_raised_and_its_trace_kept(live_bytes, tmp_path):
    with pytest.raises(LeakError):
        live_bytes.assert_flat(LEAK)
    assert Trace.load(tmp_path / "kept" / "trace.json") == LEAK


def test_a_leak_is_raised_where_nothing_can_be_kept(tmp_path, capsys):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(LeakError):
        LiveBytes(lambda *_: None, artifacts=tmp_path / "file" / "kept").assert_flat(LEAK)
    assert "could not be kept" in capsys.readouterr().err


def test_the_tolerance_is_on_its_boundary(live_bytes):
    assert live_bytes.assert_flat(LEAK, tolerance=512).verdict != "leak"
    with pytest.raises(LeakError):
        live_bytes.assert_flat(LEAK, tolerance=511)


def test_one_cycle_shows_nothing_that_stays(live_bytes):
    with pytest.raises(ValueError, match="cycles=1"):
        live_bytes.assert_flat(trace(512, 1024))
    assert live_bytes.assert_flat(trace(512, 512, 512)).verdict == "flat"


def test_what_is_no_trace_is_refused(live_bytes):
    with pytest.raises(TypeError, match="not 3"):
        live_bytes.assert_flat(3)


def test_outputs_that_differ_say_where(live_bytes):
    one = trace(0, 0, digests=("aa", "bb"))
    live_bytes.assert_same_outputs(one, one)
    with pytest.raises(OutputsDiffer, match=r"rank 0: outputs differ first in cycle 1, step 0 \(g\)"):
        live_bytes.assert_same_outputs(one, trace(0, 0, digests=("aa", "bc")))


def test_steps_that_return_nothing_compare_nothing(live_bytes):
    nothing = trace(0, 0, digests=(digest(None), digest(None)))
    with pytest.raises(ValueError, match="no step of either trace returned anything"):
        live_bytes.assert_same_outputs(nothing, nothing)


def test_traces_that_cannot_be_compared_are_refused(live_bytes):
    one = trace(0, 0, digests=("aa", "bb"))
    with pytest.raises(ValueError, match="different geometries"):
        live_bytes.assert_same_outputs(one, dataclasses.replace(one, geometries=("h",)))
    with pytest.raises(ValueError, match="worlds of 1 and 2 ranks"):
        live_bytes.assert_same_outputs(one, dataclasses.replace(one, ranks=one.ranks * 2))

"""The live_bytes fixture over traces made by hand: what is refused, what is kept, also where nothing can be."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import subprocess
import sys

import pytest

pytest.importorskip("torch")

import pytest_sglmem
from pytest_sglmem.digests import digest
from pytest_sglmem.judge import LeakError, UnjudgedTraceWarning
from pytest_sglmem.live_bytes import LiveBytes, OutputsDiffer, Unseen
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


# Traces that nobody looks at.


@pytest.fixture
def unseen():
    return Unseen()


def made_at():
    return sys._getframe(1).f_lineno


def test_a_trace_that_nobody_looks_at_is_warned_of_at_its_line(unseen):
    unseen.watch(LEAK)
    line = made_at() - 1
    with pytest.warns(UnjudgedTraceWarning, match=rf"nobody looked .* made at .*test_live_bytes.py:{line};") as given:
        unseen.warn()
    assert [(one.filename, one.lineno) for one in given] == [(__file__, line)]
    unseen.warn()  # said once


@pytest.mark.survives("pickle.dumps=keep-live", reason="a trace is sent to see that this is a look: nothing is counted")
@pytest.mark.parametrize(
    "look",
    [
        lambda live_bytes, watched: live_bytes.judge(watched),
        lambda live_bytes, watched: live_bytes.assert_same_outputs(watched, dataclasses.replace(LEAK)),
        lambda live_bytes, watched: pytest_sglmem.judge(watched),
        lambda live_bytes, watched: watched.ranks[0].series,
        lambda live_bytes, watched: watched.cycles,
        lambda live_bytes, watched: watched == LEAK,
        lambda live_bytes, watched: pickle.dumps(watched),
    ],
    ids=["judge", "outputs", "library", "series", "cycles", "equal", "sent"],
)
def test_a_trace_that_somebody_looks_at_is_not(unseen, live_bytes, look):
    watched = unseen.watch(trace(512, 1024, 1536, 2048, digests=("a", "b", "c", "d")))
    with contextlib.suppress(ValueError):  # what cannot be compared was looked at all the same
        look(live_bytes, watched)
    unseen.warn()


def test_what_lies_beside_the_numbers_is_no_look(unseen):
    watched = unseen.watch(LEAK)
    assert (watched.geometries, watched.warmup, watched.device) == (("g",), 1, "")
    del watched
    with pytest.warns(UnjudgedTraceWarning):
        unseen.warn()


def test_a_trace_that_somebody_keeps_may_be_looked_at_later(unseen):
    kept = {"trace": unseen.watch(LEAK)}
    unseen.warn()
    assert kept["trace"] == LEAK


def test_a_trace_that_only_its_own_test_keeps_is_warned_of(unseen):
    funcargs = {"made": unseen.watch(LEAK), "world": object()}
    with pytest.warns(UnjudgedTraceWarning):
        unseen.warn(funcargs.values())


def test_a_trace_that_only_a_cycle_keeps_is_warned_of(unseen):
    cycle = [unseen.watch(LEAK)]
    cycle.append(cycle)
    del cycle
    with pytest.warns(UnjudgedTraceWarning):
        unseen.warn()


def test_a_trace_is_shown_in_short():
    assert repr(LEAK) == "<Trace: 1 ranks, 3 cycles, warm-up 1, steps ('g',)>"


def test_a_watched_trace_is_a_trace_to_everybody(unseen):
    watched = unseen.watch(LEAK)
    assert watched == LEAK
    assert LEAK.__eq__(watched)
    assert repr(watched) == repr(LEAK)
    assert isinstance(watched, Trace)
    assert {type(one) for one in (pickle.loads(pickle.dumps(watched)), dataclasses.replace(watched))} == {Trace}


SESSION = """
import pytest

pytestmark = pytest.mark.world(size=1)


def setup():
    return lambda n: None


def test_thrown_away(world):
    world.trace(setup, [1], cycles=3)


def test_judged(world, live_bytes):
    live_bytes.assert_flat(world.trace(setup, [1], cycles=3))


def test_failed(world):
    world.trace(setup, [1], cycles=3)
    raise AssertionError


@pytest.mark.filterwarnings("error::pytest_sglmem.UnjudgedTraceWarning")
def test_error(world):
    world.trace(setup, [1], cycles=3)
"""


def test_a_session_says_which_trace_nobody_judged(tmp_path):
    (tmp_path / "test_unseen.py").write_text(SESSION)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--sglmem-device", "emulated"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert "1 failed, 3 passed, 1 warning, 1 error" in done.stdout
    line = 1 + next(n for n, text in enumerate(SESSION.splitlines()) if "world.trace" in text)
    assert f"test_unseen.py:{line}: UnjudgedTraceWarning: nobody looked at this trace" in done.stdout
    assert "ERROR test_unseen.py::test_error - pytest_sglmem.judge.UnjudgedTraceWarning" in done.stdout

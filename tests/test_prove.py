"""The proof: what is tried, what a failure means, the table; then whole proofs of small suites, and of downstream."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pytest_sglmem.faults import POINTS, parse
from pytest_sglmem.proof import (
    CANDIDATES,
    CANNOT,
    HEALED,
    Clean,
    Failure,
    Run,
    beside,
    exemption,
    failure_of,
    fold,
    judge_run,
    plan,
    repeat_command,
    table,
    tried,
    unproven,
)
from pytest_sglmem.scratch import Scratch

if sys.version_info < (3, 11):
    from exceptiongroup import ExceptionGroup

DOWNSTREAM = Path(__file__).parent.parent / "fixtures" / "downstream"


def fault(text):
    return parse(text, origin="here")


def failed(*kinds, text="it failed"):
    return Failure(frozenset(kinds), text)


class TestPlan:
    def test_every_candidate_is_a_fault_and_every_point_but_the_clock_has_one(self):
        for candidate in CANDIDATES:
            assert fault(candidate.text.format(last=1)).point == candidate.point
        assert {candidate.point for candidate in CANDIDATES} == set(POINTS) - {"clock.time", "pickle.loads"}

    def test_only_what_was_reached_often_enough(self):
        assert [one.text for one in plan(Clean("t", {"cuda.alloc": 2}))] == ["cuda.alloc@nth=1=oom"]
        assert [one.text for one in plan(Clean("t", {"cuda.alloc": 3}))] == [
            "cuda.alloc@every=3=retain",
            "cuda.alloc@nth=1=oom",
        ]
        assert plan(Clean("t", {})) == []

    def test_forced_leaks_come_first_even_where_nothing_was_reached(self):
        clean = Clean("t", {"gc.enable": 1}, forced=("step=retain",))
        assert [one.text for one in plan(clean)] == ["step=retain", "gc.enable=skip"]

    def test_the_last_rank_is_killed_where_there_are_ranks(self):
        reached = {"step": 2}
        assert [one.text for one in plan(Clean("t", reached, size=4))] == ["step@rank=3,nth=2=kill"]
        assert plan(Clean("t", reached)) == []

    def test_what_the_emulated_device_cannot_show_is_not_tried_on_it(self):
        reached = {"cuda.synchronize": 1}
        assert plan(Clean("t", reached, device="emulated")) == []
        assert [one.text for one in plan(Clean("t", reached, device="cuda"))] == ["cuda.synchronize=skip"]

    def test_a_barrier_left_out_is_tried_where_there_is_somebody_to_wait_for(self):
        reached = {"dist.barrier": 1}
        assert plan(Clean("t", reached)) == plan(Clean("t", reached, size=1)) == []
        assert [one.text for one in plan(Clean("t", reached, size=2))] == ["dist.barrier=skip"]

    def test_what_stands_beside_a_fault_is_a_delay_of_one_rank(self):
        late = beside("dist.barrier=skip")
        assert {one.point for one in late} == {"step", "ipc.open", "ipc.release", "cuda.synchronize"}
        assert {(one.action, one.ranks) for one in late} == {("delay", (0,))}
        assert beside("ipc.open=retain") == ()

    def test_what_an_exemption_may_name(self):
        assert tried("gc.enable") == tried("gc.enable=skip") == ["gc.enable=skip"]
        assert tried("step=kill") == tried("step@rank=7,nth=2=kill") == ["step@rank=LAST,nth=2=kill"]
        assert tried("step") == ["step=retain", "step@rank=pytest=keep-live", "step@rank=LAST,nth=2=kill"]
        assert tried("clock.time") == tried("step@rank=1=kill") == tried("ipc.open=hang") == []

    @pytest.mark.parametrize("key", ["ipc.open@nth=1=retain", "ipc.open=retain", "ipc.open", ""])
    def test_exemptions_from_the_exact_to_all(self, key):
        assert exemption(Clean("t", {}, exempt={key: "why"}), fault("ipc.open@nth=1=retain")) == "why"
        assert exemption(Clean("t", {}, exempt={"ipc.open=corrupt": "why"}), fault("ipc.open=retain")) is None


class TestJudgeRun:
    @pytest.mark.parametrize(
        ("text", "fired", "failure", "result"),
        [
            ("ipc.open=retain", 3, failed("leak"), "caught"),
            ("ipc.open=retain", 3, failed("contract"), "caught"),
            ("ipc.open=retain", 3, failed("assertion"), "caught"),
            ("ipc.open=retain", 3, failed("crash"), "error"),
            ("ipc.open=retain", 3, failed("silent"), "timeout"),
            ("ipc.open=retain", 3, failed("timeout"), "timeout"),
            ("ipc.open=retain", 3, failed("crash", "leak"), "caught"),
            ("ipc.open=retain", 3, failed("died"), "error"),
            ("ipc.open=retain", 3, Failure(), "survived"),
            ("ipc.open=retain", 0, Failure(), "not triggered"),
            ("ipc.open=retain", 0, failed("leak"), "error"),
            ("ipc.open=corrupt", 1, failed("outputs"), "caught"),
            ("ipc.open=corrupt", 1, failed("leak"), "error"),
            ("step=kill", 0, failed("died"), "caught"),
            ("step=kill", 0, failed("crash"), "error"),
            ("step=hang", 0, failed("silent"), "caught"),
            ("step=hang", 0, failed("timeout", text="rank 1: injected step=hang"), "timeout"),
            ("step=raise(KeyError)", 1, failed("crash", "injected"), "caught"),
            ("step=raise(KeyError)", 1, failed("crash"), "error"),
            ("cuda.alloc=oom", 0, failed("crash", "injected", text="injected by cuda.alloc=oom"), "caught"),
            ("pickle.dumps=keep-live", 9, failed("growth"), "caught"),
            ("cuda.alloc=oom", 1, failed("skipped"), "survived"),
            ("cuda.alloc=oom", 0, failed("skipped"), "error"),
        ],
    )
    def test_by_examples(self, text, fired, failure, result):
        assert judge_run(fault(text), fired, failure)[0] == result

    def test_a_forced_leak_that_passes_is_blind(self):
        assert judge_run(fault("step=retain"), 9, Failure(), forced=True) == (
            "blind",
            "passes while every step loses memory",
        )
        assert judge_run(fault("step=retain"), 0, Failure(), forced=True) == ("blind", "traces and appends nothing")
        assert judge_run(fault("step=retain"), 9, failed("leak"), forced=True) == ("caught", "leak")


class RankRaised(Exception):
    type = "builtins.AssertionError"


class LeakError(AssertionError):
    pass


class RankDied(Exception):
    pass


class TestFailureOf:
    @pytest.mark.parametrize(
        ("error", "kinds"),
        [
            (AssertionError("x"), {"assertion"}),
            (LeakError("x"), {"leak"}),
            (RankRaised("x"), {"assertion"}),
            (RankDied("x"), {"died"}),
            (IndexError("x"), {"crash"}),
            (OSError("injected by file.fsync=raise(OSError)"), {"crash", "injected"}),
            (pytest.fail.Exception("CUDA IPC contract broken (--sglmem-ipc-audit error)"), {"contract"}),
            (pytest.fail.Exception("Timeout >1.0s"), {"timeout"}),
            (pytest.fail.Exception("no"), {"assertion"}),
            (pytest.skip.Exception("no memory: injected by cuda.alloc=oom"), {"skipped"}),
            (pytest.xfail.Exception("known"), {"skipped"}),
            (ExceptionGroup("several", [RankDied("x"), IndexError("y")]), {"died", "crash"}),
        ],
    )
    def test_by_name(self, error, kinds):
        assert failure_of(error).kinds == kinds


class TestFold:
    RUNS = (
        Run("a::t1", "step=retain", "caught", 3, "leak"),
        Run("a::t2", "step=retain", "blind", 3, "passes"),
        Run("a::t1", "ipc.open=retain", "caught", 3, "leak"),
        Run("a::t2", "ipc.open=retain", "survived", 2, "fired 2 times, passed"),
        Run("a::t1", "ipc.open=corrupt", "survived", 1, "fired 1 times, passed"),
        Run("a::t2", "ipc.open=corrupt", "error", 1, "IndexError: x"),
        Run("a::t1", "gc.enable=skip", "exempt", 0, "because"),
        Run("a::t1", "file.fsync=raise(OSError)", "not triggered"),
        Run("a::t1", "dist.barrier=skip", "timeout", 1, "slow"),
        Run("a::t1", HEALED, "healed"),
    )

    def test_one_verdict_a_fault(self):
        proof = fold(self.RUNS, left_out=4)
        assert {one["fault"]: one["verdict"] for one in proof["faults"]} == {
            "step=retain": "blind",
            "ipc.open=retain": "caught",
            "ipc.open=corrupt": "survived",
            "gc.enable=skip": "exempt",
            "file.fsync=raise(OSError)": "not triggered",
            "dist.barrier=skip": "timeout",
        }
        assert proof["score"] == 0.25
        assert (proof["blind"], proof["runs"], proof["left_out"]) == (["a::t2"], 10, 4)
        assert proof["faults"][1] == {
            "fault": "ipc.open=retain",
            "fired_in": ["a::t1", "a::t2"],
            "caught_by": ["a::t1"],
            "verdict": "caught",
        }

    def test_nothing_fired_has_no_score(self):
        assert fold([])["score"] is None
        assert table([]) == ["no fault could fire"]

    def test_what_fails_the_session(self):
        assert [(run.nodeid, run.fault) for run in unproven(self.RUNS)] == [
            ("a::t1", "ipc.open=corrupt"),
            ("a::t2", "step=retain"),
        ]
        broken = Run("a::t1", HEALED, "not healed", 0, "LeakError: x")
        assert unproven([broken]) == [broken]
        assert unproven([run for run in self.RUNS if run.result in ("timeout", "error", "exempt")]) == []

    @pytest.mark.parametrize("said", ["not healed", CANNOT])
    def test_who_fails_without_a_fault_too_has_caught_none(self, said):
        runs = [
            Run("a::t1", "ipc.open=retain", "caught", 3, "leak"),
            Run("a::t2", "ipc.open=retain", "survived", 2, "fired 2 times, passed"),
            Run("a::t1", HEALED, said),
        ]
        proof = fold(runs)
        assert (proof["score"], proof["not_healed"], proof["faults"][0]["verdict"]) == (0.0, ["a::t1"], "survived")
        assert [run.result for run in unproven(runs)] == ["survived", said]

    def test_the_table_says_how_to_repeat_each_hole(self):
        lines = "\n".join(table(self.RUNS, left_out=2, options=["--sglmem-seed=3"]))
        assert "SURVIVED: ipc.open=corrupt in t1: fired 1 times, passed" in lines
        assert "  pytest a::t1 --sglmem-inject ipc.open=corrupt --sglmem-seed=3" in lines
        assert "BLIND: step=retain in t2: passes" in lines
        assert "exempt: gc.enable=skip in a::t1: because" in lines
        assert "2 runs left out" in lines
        assert "TIMEOUT: dist.barrier=skip in t1: slow" in lines

    def test_what_stands_in_brackets_may_be_anything(self):
        runs = [Run("a.py::TestIt::t[x::y]", "step=retain", "survived")]
        assert "SURVIVED: step=retain in t[x::y]: " in table(runs)

    def test_commands_are_quoted_for_a_shell(self):
        command = repeat_command([Run("a.py::t[x y]", "step=raise(KeyError)", "survived")])
        assert command == "pytest 'a.py::t[x y]' --sglmem-inject 'step=raise(KeyError)'"

    def test_the_command_repeats_what_stood_beside_the_fault_too(self):
        command = repeat_command([Run("a.py::t", "dist.barrier=skip", "survived")])
        assert command.startswith(
            "pytest a.py::t --sglmem-inject dist.barrier=skip --sglmem-inject 'step@rank=0=delay("
        )
        assert command.count("--sglmem-inject") == 1 + len(beside("dist.barrier=skip"))


HISTORY = """
    import pickle, pytest

    def test_keeps_bytes(gc_tracked):
        kept = []
        gc_tracked.assert_flat(lambda i: kept.append(pickle.dumps({"id": [i]})), times=20)

    def test_plain():
        pickle.dumps(1)
"""
EYELESS = """
    import pickle, pytest

    @pytest.mark.survives("pickle.dumps", reason="counts nothing, on purpose")
    def test_keeps_bytes(gc_tracked):
        pickle.dumps({"id": 1})
"""


def outline(result):
    words = ("proof", "SURVIVED", "BLIND", "ERROR", "exempt")
    return [line for line in result.outlines if line.startswith(words) and "faults caught" not in line]


class TestSmallSuites:
    """Without worlds: in the pytest process alone, so that they take no time."""

    def prove(self, pytester, text, *args):
        pytester.makepyfile(test_it=text)
        return pytester.runpytest_subprocess("--sglmem-prove", "--sglmem-report=report.json", *args)

    def report(self, pytester):
        return json.loads((pytester.path / "report.json").read_text())

    def test_a_good_one(self, pytester):
        result = self.prove(pytester, HISTORY)
        assert result.ret == 0
        result.assert_outcomes(passed=2)
        assert outline(result) == [
            "proof: 3 runs, 1 tests under 3 faults",
            "proof [3/3] test_it.py::test_keeps_bytes ...+",
        ]
        assert self.report(pytester)["proof"]["score"] == 1.0
        assert not (pytester.path / ".sglmem").exists() or not list((pytester.path / ".sglmem").rglob("*"))

    def test_a_blind_one_and_an_exemption(self, pytester):
        result = self.prove(pytester, EYELESS)
        assert result.ret == 1
        result.assert_outcomes(passed=1)
        said = outline(result)
        assert "BLIND: step@rank=pytest=keep-live in test_keeps_bytes: traces and appends nothing" in said
        assert "exempt: pickle.dumps=keep-live in test_it.py::test_keeps_bytes: counts nothing, on purpose" in said
        proof = self.report(pytester)["proof"]
        assert proof["blind"] == ["test_it.py::test_keeps_bytes"]
        assert {one["verdict"] for one in proof["faults"]} == {"blind", "exempt"}

    def test_exempt_from_everything(self, pytester):
        result = self.prove(pytester, EYELESS.replace('"pickle.dumps", ', ""))
        assert result.ret == 0
        assert self.report(pytester)["proof"]["score"] is None

    def test_limit_then_on_from_there(self, pytester):
        first = self.prove(pytester, HISTORY, "--sglmem-prove-limit=1")
        assert outline(first) == [
            "proof: 3 runs, 1 tests under 3 faults, at most 1 now",
            "proof [1/3] test_it.py::test_keeps_bytes .+",
        ]
        assert self.report(pytester)["proof"]["left_out"] == 2
        (pytester.path / ".sglmem" / "proof" / "gw0.said").touch()  # of a worker of xdist that was killed
        second = pytester.runpytest_subprocess("--sglmem-prove", "--sglmem-report=report.json")
        assert not list((pytester.path / ".sglmem").glob("proof"))
        assert outline(second)[0] == "proof: 3 runs, 1 tests under 3 faults, 1 known from the last time"
        assert self.report(pytester)["proof"]["score"] == 1.0
        assert self.report(pytester)["proof"]["left_out"] == 0
        third = pytester.runpytest_subprocess("--sglmem-prove")
        assert outline(third)[0] == "proof: 3 runs, 1 tests under 3 faults"

    def test_a_changed_file_is_proven_anew(self, pytester):
        self.prove(pytester, HISTORY, "--sglmem-prove-limit=1")
        second = self.prove(pytester, HISTORY + "\n    # changed\n")
        assert outline(second)[0] == "proof: 3 runs, 1 tests under 3 faults"

    def test_tests_that_failed_or_inject_are_left_out(self, pytester):
        result = self.prove(
            pytester,
            """
            import pickle, pytest

            def test_fails(gc_tracked):
                assert False

            @pytest.mark.inject("pickle.dumps=keep-live")
            def test_marked(gc_tracked):
                pickle.dumps(1)

            def test_injects(gc_tracked, inject):
                with inject("pickle.dumps=keep-live"):
                    pickle.dumps(1)
            """,
        )
        assert result.ret == 1
        assert outline(result) == ["proof: 0 runs, 0 tests under 0 faults"]

    def test_what_may_fail_or_skips_itself_has_not_noticed(self, pytester):
        result = self.prove(
            pytester,
            """
            import pickle, pytest

            @pytest.mark.xfail(strict=False)
            def test_may_fail(gc_tracked):
                pickle.dumps(1)

            def test_skips_itself(gc_tracked):
                kept = []
                try:
                    gc_tracked.assert_flat(lambda i: kept.append(pickle.dumps([i])), times=10)
                except pickle.PicklingError as error:
                    pytest.skip(f"cannot pickle: {error}")
            """,
        )
        assert result.ret == 1
        assert outline(result)[1] == "proof [3/3] test_it.py::test_skips_itself ..s+"
        assert any("fired 1 times, and the test Skipped: cannot pickle" in line for line in result.outlines)

    @pytest.mark.parametrize("option", ["--setup-plan", "--setup-only", "--collect-only"])
    def test_not_where_no_test_is_run(self, pytester, option):
        result = self.prove(pytester, HISTORY, option)
        assert result.ret == 0
        assert outline(result) == []

    def test_no_debugger_at_the_failures_that_are_wanted(self, pytester):
        result = self.prove(pytester, HISTORY, "--pdb")
        assert result.ret == 0
        assert outline(result)[-1] == "proof [3/3] test_it.py::test_keeps_bytes ...+"
        assert "(Pdb)" not in result.stdout.str()

    def test_not_after_stopping_early(self, pytester):
        result = self.prove(pytester, HISTORY + "\n    def test_fails(): assert False\n", "-x")
        assert outline(result) == []

    def test_a_trace_in_the_pytest_process_is_not_called_blind(self, pytester):
        result = self.prove(
            pytester,
            """
            import pytest_sglmem
            import torch._dynamo  # in older torch this import writes a file, which a fault could strike

            def test_traces_here(live_bytes):
                with pytest_sglmem.emulated_cuda():
                    live_bytes.assert_flat(pytest_sglmem.trace(lambda n: None, [1, 2], cycles=2))
            """,
        )
        assert result.ret == 0
        assert outline(result) == ["proof: 0 runs, 1 tests under 0 faults"]

    def test_selection_limits_it(self, pytester):
        result = self.prove(pytester, HISTORY, "-k", "plain")
        assert outline(result) == ["proof: 0 runs, 0 tests under 0 faults"]

    def test_fixtures_are_made_anew_for_each_run(self, pytester):
        pytester.makeconftest(
            """
            import pytest

            @pytest.fixture(scope="session")
            def made():
                with open("made", "a") as file:
                    file.write("x")
            """
        )
        self.prove(pytester, HISTORY.replace("(gc_tracked)", "(gc_tracked, made)"))
        assert (pytester.path / "made").read_text() == "x" * 6  # the clean run, again, 3 faults, the healing

    def test_not_healed_fails_the_session(self, pytester):
        result = self.prove(
            pytester,
            """
            runs = []

            def test_poisoned(gc_tracked):
                runs.append(1)
                gc_tracked.assert_flat(lambda i: None, times=10)
                assert len(runs) < 4  # clean, again, the one fault
            """,
        )
        assert result.ret == 1
        assert outline(result)[1] == "proof [1/1] test_it.py::test_poisoned .!"
        assert any(line.startswith("NOT HEALED: (no fault: healed)") for line in result.outlines)
        proof = self.report(pytester)["proof"]
        assert (proof["score"], proof["not_healed"]) == (0.0, ["test_it.py::test_poisoned"])

    def test_one_that_cannot_be_run_again_catches_nothing(self, pytester):
        result = self.prove(
            pytester,
            """
            import pickle

            runs = []

            def test_once(gc_tracked):
                runs.append(1)
                kept = []
                gc_tracked.assert_flat(lambda i: kept.append(pickle.dumps([i])), times=10)
                assert len(runs) == 1
            """,
        )
        assert result.ret == 1
        assert outline(result)[1] == "proof [3/3] test_it.py::test_once !EEE"
        assert "CANNOT BE RUN AGAIN: (no fault: again) in test_once: AssertionError: assert 2 == 1" in result.outlines
        assert "  pytest test_it.py::test_once --sglmem-prove" in result.outlines
        assert not outline(result)[2:]
        proof = self.report(pytester)["proof"]
        assert (proof["score"], proof["not_healed"]) == (0.0, ["test_it.py::test_once"])
        assert {(one["verdict"], *one["caught_by"]) for one in proof["faults"]} == {("error",)}

    def test_warnings_of_struck_runs_are_not_shown(self, pytester):
        result = self.prove(
            pytester,
            """
            import warnings

            def test_warns(gc_tracked):
                warnings.warn("careful")
                gc_tracked.assert_flat(lambda i: None, times=10)
            """,
        )
        assert result.parseoutcomes().get("warnings") == 1

    def test_in_xdist(self, pytester):
        pytester.makepyfile(test_it=HISTORY, test_other=EYELESS)
        result = pytester.runpytest_subprocess("--sglmem-prove", "--sglmem-report=report.json", "-n2")
        assert result.ret == 1
        proof = self.report(pytester)["proof"]
        assert proof["blind"] == ["test_other.py::test_keeps_bytes"]
        assert any("test_it.py::test_keeps_bytes ...+" in line for line in result.outlines)
        assert not list(pytester.path.rglob("*.said")) + list(pytester.path.rglob("*.jsonl"))


@pytest.mark.parametrize("workers", [[], ["-n1"]], ids=["alone", "xdist"])
def test_interrupted_it_leaves_nothing_but_what_it_goes_on_from(pytester, workers):
    pytester.makepyfile(
        test_it="""
        import pathlib, pickle, time

        def test_first(gc_tracked):
            kept = []
            gc_tracked.assert_flat(lambda i: kept.append(pickle.dumps([i])), times=20)

        def test_slow(gc_tracked):
            if pathlib.Path("seen").exists():
                open("proving", "w").close()
                while True:  # one long wait would never see a signal that comes just before it
                    time.sleep(0.01)
            pathlib.Path("seen").touch()
            gc_tracked.assert_flat(lambda i: None, times=10)
        """
    )
    os.mkfifo("proving")
    proving = os.open("proving", os.O_RDONLY | os.O_NONBLOCK)
    command = [sys.executable, "-m", "pytest", "--sglmem-prove", "--sglmem-report=report.json", *workers]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        poll = select.poll()
        poll.register(proving, select.POLLHUP)
        reached = poll.poll(60_000)
        process.send_signal(signal.SIGINT)
        try:
            out, _ = process.communicate(timeout=30)
        finally:
            process.kill()
    os.close(proving)
    assert reached
    assert process.returncode == pytest.ExitCode.INTERRUPTED
    assert "test_first ...+" in out
    said = json.loads(Path("report.json").read_text())["proof"]
    assert (said["score"], said["left_out"]) == (1.0, 1)
    left = [path for path in Path(".sglmem").rglob("[!.]*") if path.is_file() and path.suffix != ".said"]
    assert left == [Path(".sglmem/proof", f"{'gw0' if workers else 'main'}.jsonl")]
    assert len(left[0].read_text().splitlines()) == 1 + 4


def test_what_a_killed_proof_leaves_goes_with_the_next(pytester, monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    pytester.makepyfile(
        """
        import os, pathlib, signal

        def test_once(gc_tracked):
            if pathlib.Path("seen").exists():
                os.kill(os.getpid(), signal.SIGKILL)
            pathlib.Path("seen").touch()
            gc_tracked.assert_flat(lambda i: None, times=10)
        """
    )
    assert pytester.runpytest_subprocess("--sglmem-prove").ret == -signal.SIGKILL
    assert [path.name[:13] for path in tmp_path.glob("sglmem-*")] == ["sglmem-proof-"]
    Scratch("proof-").remove()
    assert not list(tmp_path.glob("sglmem-*"))


def test_who_only_compares_outputs_is_not_blind(pytester):
    pytester.makepyfile(
        test_it="""
        import pytest

        pytestmark = [pytest.mark.world(size=1), pytest.mark.survives("step=kill", reason="not of interest")]

        def setup():
            return lambda n: n

        def test_flat(world, live_bytes):
            live_bytes.assert_flat(world.trace(setup, [1], cycles=3))

        def test_same(world, live_bytes):
            live_bytes.assert_same_outputs(world.trace(setup, [1], cycles=3), world.trace(setup, [1], cycles=3))

        def test_neither(world, live_bytes):
            assert world.trace(setup, [1], cycles=3).cycles
        """
    )
    result = pytester.runpytest_subprocess("--sglmem-prove", "--sglmem-device=emulated", "--sglmem-report=report.json")
    assert result.ret == 1
    proof = json.loads(Path("report.json").read_text())["proof"]
    assert proof["blind"] == ["test_it.py::test_neither"]
    assert proof["faults"][0] == {
        "fault": "step=retain",
        "fired_in": ["test_it.py::test_flat", "test_it.py::test_neither"],
        "caught_by": ["test_it.py::test_flat"],
        "verdict": "blind",
    }
    result.stdout.fnmatch_lines(["step=retain * 2 * 1  blind: test_neither", "proof: 0 of 2 faults caught*1 BLIND!"])


class TestDownstream:
    """fixtures/downstream: the good suite is proven, the weak one is told what it misses."""

    def prove(self, pytester, suite):
        shutil.copytree(DOWNSTREAM, pytester.path / "downstream", ignore=shutil.ignore_patterns(".*", "__pycache__"))
        os.chdir(pytester.path / "downstream" / suite)
        result = pytester.runpytest_subprocess(
            "--sglmem-prove", "--sglmem-device=emulated", "--sglmem-report=report.json", "-c", "pytest.ini"
        )
        return result, json.loads(Path("report.json").read_text())["proof"]

    def test_good(self, pytester):
        result, proof = self.prove(pytester, "good")
        assert (result.ret, proof["score"], proof["blind"]) == (0, 1.0, [])
        assert {one["verdict"] for one in proof["faults"]} == {"caught"}
        assert len(proof["faults"]) >= 20

    def test_weak(self, pytester):
        result, proof = self.prove(pytester, "weak")
        assert result.ret == 1
        assert proof["blind"] == ["test_exchange.py::test_it_runs", "test_history.py::test_history_keeps_requests"]
        survived = {one["fault"] for one in proof["faults"] if one["verdict"] == "survived"}
        assert proof["faults"][0]["verdict"] == "blind"
        assert survived >= {
            *("ipc.export=one-handle", "ipc.open=retain", "ipc.open=duplicate", "ipc.open=corrupt", "ipc.collect=skip"),
            *("cuda.alloc@every=3=retain", "dist.barrier=skip", "pickle.dumps=keep-live"),
        }
        said = "\n".join(result.outlines)
        assert "SURVIVED: ipc.export=one-handle in test_memory_is_flat, test_it_runs: fired 3 times, passed" in said
        assert "--sglmem-inject ipc.export=one-handle --sglmem-device=emulated" in said

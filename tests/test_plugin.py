"""The pytest surface, by whole sessions: fixtures, markers, the report, xdist, neighbours, and that nothing is left."""

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

WORLD_TESTS = """
import pytest


def leaking():
    import torch

    kept = []

    def step(n):
        kept.append(torch.empty(n, dtype=torch.uint8, device="cuda"))
        print("kept", len(kept))

    return step


def clean():
    import torch

    return lambda n: torch.arange(n, device="cuda").sum()


def rank():
    import torch.distributed as dist

    return dist.get_rank(), dist.get_world_size()


def test_clean(world, live_bytes):
    live_bytes.assert_flat(world.trace(clean, [512, 1024]))


def test_leak(world, live_bytes):
    live_bytes.assert_flat(world.trace(leaking, [512], cycles=3))


def test_expected_leak(world, live_bytes):
    import pytest_sglmem

    with pytest.raises(pytest_sglmem.LeakError) as caught:
        live_bytes.assert_flat(world.trace(leaking, [512], cycles=3))
    assert caught.value.verdict.bytes_per_cycle == (512,) * world.size


@pytest.mark.world(sizes=[1, 3])
def test_sizes(world):
    assert world.run(rank) == [(r, world.size) for r in range(world.size)]


@pytest.mark.world(min_size=4)
def test_needs_four(world):
    raise AssertionError("never runs in a world of 2")
"""


def run_session(run, *args):
    """A session, and the report it wrote."""
    result = run("--sglmem-device", "emulated", "--sglmem-report", "r.json", *args)
    return result, json.loads(Path("r.json").read_text())


def by_name(report):
    return {test["nodeid"].split("::")[-1]: test for test in report["tests"]}


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """One session of WORLD_TESTS that several tests look at."""
    folder = tmp_path_factory.mktemp("session")
    (folder / "test_worlds.py").write_text(WORLD_TESTS)
    command = [sys.executable, "-m", "pytest", "-rs", "--sglmem-report", "r.json", "--junitxml", "j.xml"]
    done = subprocess.run(
        [*command, "-o", "junit_family=xunit1"], cwd=folder, capture_output=True, text=True, timeout=120
    )
    return folder, done.stdout, by_name(json.loads((folder / "r.json").read_text()))


def test_each_test_has_its_outcome_world_and_verdict(session):
    _, _, tests = session
    assert {name: test["outcome"] for name, test in tests.items()} == {
        "test_clean": "passed",
        "test_leak": "failed",
        "test_expected_leak": "passed",
        "test_sizes[world1]": "passed",
        "test_sizes[world3]": "passed",
        "test_needs_four": "skipped",
    }
    assert tests["test_clean"]["live_bytes"][0]["verdict"] == "flat"
    assert tests["test_clean"]["live_bytes"][0]["cycles"] == 3
    assert tests["test_leak"]["live_bytes"][0]["verdict"] == "leak"
    assert tests["test_leak"]["live_bytes"][0]["bytes_per_cycle"] == [512, 512]
    assert tests["test_leak"]["world"]["size"] == 2
    assert tests["test_sizes[world3]"]["world"]["size"] == 3


def test_a_failure_says_line_and_leaves_the_trace(session):
    folder, text, tests = session
    assert "test_worlds.py:11 in step" in tests["test_leak"]["live_bytes"][0]["sites"][0]["site"]
    assert "test_worlds.py:11 in step" in text
    kept = [path for path in (folder / ".sglmem").rglob("trace.json") if "test_leak" in str(path)]
    assert len(kept) == 1
    assert not list((folder / ".sglmem").rglob("*test_clean*"))
    assert (folder / ".sglmem" / ".gitignore").read_text().splitlines()[-1] == "*"


def test_a_skip_says_why(session):
    _, text, _ = session
    assert "needs a world of at least 4: 2 ranks by the default" in text


def test_the_summary_has_a_line_a_check(session):
    _, text, _ = session
    section = text.split(" sglmem ")[-1]
    assert "LEAK!" in section
    assert "test_clean" in section


def test_junit_carries_the_verdict(session):
    folder, _, _ = session
    assert "leak" in (folder / "j.xml").read_text()


def test_markers_are_added_by_themselves(pytester):
    pytester.makepyfile(
        """
        def test_counts(gc_tracked):
            gc_tracked.assert_flat(lambda i: None, times=10)

        def test_judges(live_bytes): pass

        def test_neither(): pass
        """
    )
    pytester.runpytest_subprocess("-m", "gc_tracking", "--strict-markers").assert_outcomes(passed=1, deselected=2)
    pytester.runpytest("-m", "gpu_memory", "--collect-only", "-q").stdout.fnmatch_lines(["*::test_judges"])


def test_counting_never_imports_torch(pytester):
    pytester.makepyfile(
        """
        import sys

        def test_counts(gc_tracked):
            kept = []
            gc_tracked.assert_flat(lambda i: kept.append(i), times=10)
            assert "torch" not in sys.modules
            assert "numpy" not in sys.modules
        """
    )
    pytester.runpytest_subprocess("-m", "gc_tracking").assert_outcomes(passed=1)


def test_growth_fails_and_is_reported(pytester):
    pytester.makepyfile(
        """
        def test_grows(gc_tracked):
            history = []
            gc_tracked.assert_flat(lambda i: history.append([i]), times=100)
        """
    )
    result, report = run_session(pytester.runpytest_subprocess)
    result.assert_outcomes(failed=1)
    growth = by_name(report)["test_grows"]["gc"][0]
    assert (growth["verdict"], growth["objects_per_append"], growth["by_type"]) == ("growing", 1.0, {"list": 1.0})


def test_a_session_without_us_says_one_line_and_loads_four_modules(pytester):
    pytester.makepyfile("def test_nothing(): pass")
    pytester.makeconftest(
        """
        import sys

        def pytest_unconfigure():
            print("loaded", *sorted(name for name in sys.modules if name.startswith("pytest_sglmem.")))
        """
    )
    result = pytester.runpytest_subprocess("-W", "error", "--strict-markers", "--strict-config")
    result.assert_outcomes(passed=1)
    assert [line for line in result.stdout.lines if "sglmem" in line and not line.startswith("plugins:")] == [
        "sglmem: world 2, device auto, launcher local, seed 0",
        "loaded pytest_sglmem.collector pytest_sglmem.markers pytest_sglmem.options pytest_sglmem.plugin",
    ]
    assert not (pytester.path / ".sglmem").exists()


def test_it_can_be_switched_off(pytester):
    pytester.makepyfile("def test_nothing(world): pass")
    pytester.runpytest("-p", "no:sglmem").stdout.fnmatch_lines(["*fixture 'world' not found*"])


CYCLIC = """
def cyclic():
    import torch

    class Request:
        def __init__(self):
            self.pixels = torch.empty(512, dtype=torch.uint8, device="cuda")
            self.me = self

    def step(_):
        Request()

    return step


def test_cycle(world, live_bytes):
    live_bytes.assert_flat(world.trace(cyclic, [0], cycles=3))
"""


def test_memory_in_cycles_is_a_warning_and_with_an_option_a_failure(pytester, within):
    pytester.makepyfile(CYCLIC)
    result, report = run_session(within)
    result.assert_outcomes(passed=1, warnings=1)
    assert by_name(report)["test_cycle"]["live_bytes"][0]["cyclic_bytes"] == [512, 512]
    result = within("-W", "error::pytest_sglmem.CyclicMemoryWarning")
    result.assert_outcomes(failed=1)


AUDIT = """
import torch.distributed as dist


def exports_and_drops_unopened():
    import torch
    from torch.multiprocessing.reductions import reduce_tensor

    reduce_tensor(torch.zeros(512, dtype=torch.uint8, device="cuda"))


def test_no_trace_at_all(world):
    world.run(exports_and_drops_unopened)
"""


@pytest.mark.parametrize(
    ("mode", "outcome"),
    [("off", {"passed": 1}), ("warn", {"passed": 1, "warnings": 1}), ("error", {"passed": 1, "errors": 1})],
)
def test_the_audit_covers_tests_that_never_judge(pytester, within, mode, outcome):
    pytester.makepyfile(AUDIT)
    result = within("--sglmem-ipc-audit", mode)
    result.assert_outcomes(**outcome)
    assert ("never-opened" in result.stdout.str()) == (mode != "off")


SHARED = """
import os

import pytest

pids = {}


@pytest.mark.world(scope="module")
def test_first(world):
    pids["first"] = world.run(os.getpid)


@pytest.mark.world(scope="module")
def test_breaks_a_rank(world):
    assert world.run(os.getpid) == pids["first"]
    world.run_on([1], os._exit, 3)


@pytest.mark.world(scope="module")
def test_sound_again(world):
    import torch.distributed as dist

    assert world.run(dist.get_world_size) == [2, 2]
    assert world.run(os.getpid)[1] != pids["first"][1]


def test_own_ranks(world):
    assert not set(world.run(os.getpid)) & set(pids["first"])
"""


def test_shared_worlds_are_sound_for_the_next_test(pytester, within):
    pytester.makepyfile(SHARED)
    within().assert_outcomes(passed=3, failed=1)


INJECTED = """
import pytest


def collects():
    import torch

    torch.cuda.ipc_collect()
    torch.cuda.synchronize()


@pytest.mark.inject("cuda.synchronize@rank=1=raise(ValueError)")
def test_marked(world):
    from pytest_sglmem import RankRaised

    with pytest.raises(RankRaised, match="rank 1"):
        world.run(collects)


def test_stretch(world, inject):
    world.run(collects)
    with inject("ipc.collect=skip") as fault:
        world.run(collects)
        world.run(collects)
    world.run(collects)
    assert fault.fired == [2, 2]


def test_here(inject):
    import pickle

    with inject("pickle.dumps@nth=2=raise(PicklingError)") as fault:
        assert pickle.loads(pickle.dumps(1)) == 1
        with pytest.raises(pickle.PicklingError):
            pickle.dumps(2)
    assert fault.fired == [1]
    assert pickle.loads(pickle.dumps(3)) == 3
"""


def test_faults_by_marker_and_by_fixture_are_counted_by_rank(pytester, within):
    pytester.makepyfile(INJECTED)
    result, report = run_session(within)
    result.assert_outcomes(passed=3)
    tests = by_name(report)
    assert tests["test_marked"]["faults"] == [{"fault": "cuda.synchronize@rank=1=raise(ValueError)", "fired": [0, 1]}]
    assert tests["test_stretch"]["faults"] == [{"fault": "ipc.collect=skip", "fired": [2, 2]}]


def test_a_fault_for_a_rank_that_is_not_there_says_so(pytester, within):
    pytester.makepyfile("def test_it(world): pass")
    result = within("--sglmem-inject", "step@rank=2=delay(1)")
    assert result.ret != 0
    assert "rank" in result.stdout.str()
    assert "2" in result.stdout.str()


@pytest.mark.parametrize("dist", ["load", "loadfile"])
def test_under_xdist_the_controller_has_the_whole_report(pytester, dist):
    pytester.makepyfile(test_worlds=WORLD_TESTS)
    result, report = run_session(pytester.runpytest_subprocess, "-n", "2", "--dist", dist, "--junitxml", "j.xml")
    result.assert_outcomes(passed=4, failed=1, skipped=1)
    assert len(report["tests"]) == 6
    assert by_name(report)["test_leak"]["live_bytes"][0]["verdict"] == "leak"
    assert report["machine"]["device"] == "emulated"
    assert " sglmem " in result.stdout.str()
    result.stdout.fnmatch_lines(["*rank 0 output*", "kept 4", "*rank 1 output*", "kept 4"])
    cases = ElementTree.parse(pytester.path / "j.xml").iter("testcase")
    said = {case.get("name"): {p.get("name"): p.get("value") for p in case.iter("property")} for case in cases}
    assert said["test_leak"]["sglmem_bytes_per_cycle"] == "512"
    assert {name: of.get("sglmem_live_bytes") for name, of in said.items() if of} == {
        "test_leak": "leak",
        "test_expected_leak": "leak",
        "test_clean": "flat",
    }


def test_what_each_worker_found_is_in_the_report(pytester):
    """With `--dist each` all workers run all tests."""
    pytester.makepyfile(
        """
        import os

        def test_history(gc_tracked):
            kept = []
            gc_tracked.assert_flat(lambda i: kept.append([i]) if os.environ["PYTEST_XDIST_WORKER"] == "gw1" else None)
        """
    )
    result, report = run_session(pytester.runpytest_subprocess, "-n", "2", "--dist", "each")
    result.assert_outcomes(passed=1, failed=1)
    (test,) = report["tests"]
    assert test["outcome"] == "failed"
    assert sorted(growth["verdict"] for growth in test["gc"]) == ["flat", "growing"]


def test_a_baseline_that_grew_fails_the_session(pytester, within):
    pytester.makepyfile(test_worlds=WORLD_TESTS.replace("kept = []", "kept = [None]"))
    result, report = run_session(within, "-k", "test_clean")
    assert result.ret == 0
    settled = report["tests"][0]["live_bytes"][0]["settled"]
    report["tests"][0]["live_bytes"][0]["settled"] = [[value - 512 for value in rank] for rank in settled]
    (pytester.path / "old.json").write_text(json.dumps(report))
    grew = within("-k", "test_clean", "--sglmem-baseline", "r.json")
    assert grew.ret == 0
    grew = within("-k", "test_clean", "--sglmem-baseline", "old.json")
    assert grew.ret == pytest.ExitCode.TESTS_FAILED
    assert "baseline:" in grew.stdout.str()
    (pytester.path / "old.json").write_text(json.dumps({**report, "tests": []}))
    new = within("-k", "test_clean", "--sglmem-baseline", "old.json")
    assert new.ret == 0
    new.stdout.fnmatch_lines(["baseline: *::test_clean: not compared, it is not in the baseline"])


def test_loading_the_plugin_imports_neither_torch_nor_numpy():
    code = "import sys, pytest_sglmem.plugin; assert not {'torch', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_github_summary_is_written_only_when_asked(pytester, monkeypatch):
    path = Path(pytester.path, "summary.md")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", os.fspath(path))
    pytester.makepyfile("def test_counts(gc_tracked): gc_tracked.assert_flat(lambda i: None, times=10)")
    pytester.runpytest_subprocess().assert_outcomes(passed=1)
    assert not path.exists()
    pytester.runpytest_subprocess("--sglmem-github-summary").assert_outcomes(passed=1)
    assert "test_counts" in path.read_text()


def test_a_report_that_cannot_be_written_is_said_and_fails(pytester):
    pytester.makepyfile("def test_nothing(): pass")
    pytester.makefile(".txt", file="not a folder")
    result = pytester.runpytest("--sglmem-report", "file.txt/r.json")
    result.assert_outcomes(passed=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["sglmem: the report file.txt/r.json could not be written: *"])


def test_a_fault_of_the_session_that_never_fired_is_said(pytester):
    pytester.makepyfile(
        """
        import pickle

        def test_dumps():
            pickle.dumps(1)
        """
    )
    never, did = "gc.enable=skip", "pickle.dumps=delay(0)"
    result = pytester.runpytest("--sglmem-inject", never, "--sglmem-inject", did)
    result.stdout.fnmatch_lines([f"sglmem: fault {never} (--sglmem-inject): not triggered in any test"])
    assert f"fault {did}" not in result.stdout.str()

"""The bundled suite as a newcomer runs it, what its report says, and that it notices what is broken on purpose."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("torch")


def bundled(tmp_path, *options, world=3):
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "pytest", "--pyargs", "pytest_sglmem.checks", "-p", "no:cacheprovider", "-rA"]
    command += ["--sglmem-world", str(world), "--sglmem-device", "emulated", "--sglmem-report", str(report)]
    done = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    tests = json.loads(report.read_text(encoding="utf-8"))["tests"] if report.exists() else []
    return done, {test["nodeid"].split("::")[-1]: test for test in tests}


def test_both_fixes_and_both_faults(tmp_path):
    done, tests = bundled(tmp_path)
    assert done.returncode == 0, done.stdout
    assert {test["outcome"] for test in tests.values()} == {"passed"}
    verdicts = {name: test["live_bytes"][0]["verdict"] for name, test in tests.items() if test["live_bytes"]}
    assert verdicts == {
        "test_a_handle_a_peer_is_flat": "flat",
        "test_one_handle_for_all_leaks": "leak",
        "test_with_one_geometry_it_is_flat_too": "flat",
        "test_with_one_request_above_the_cap_it_leaks_slowly": "leak",
        "test_a_handle_a_peer_is_flat_above_the_cap_too": "flat",
        "test_attention_in_groups_is_flat_and_the_same": "flat",
    }
    leak = tests["test_one_handle_for_all_leaks"]["live_bytes"][0]
    assert len(leak["bytes_per_cycle"]) == 3
    assert min(leak["bytes_per_cycle"]) > 0
    assert "replaced_ulysses.py:" in leak["sites"][0]["site"]
    fault = next(fault for fault in leak["ipc"]["faults"] if fault["kind"] == "over-released")
    assert (fault["opens"], fault["counter"], fault["by_ranks"]) == (2, -1, [0, 1, 2])
    slow = tests["test_with_one_request_above_the_cap_it_leaks_slowly"]["live_bytes"][0]
    assert 0 < max(slow["bytes_per_cycle"]) < min(leak["bytes_per_cycle"])
    grown = {name: test["gc"][0]["objects_per_append"] for name, test in tests.items() if test["gc"]}
    assert grown.pop("test_pickled_bytes_are_not") == 0
    assert grown.pop("test_live_requests_are_walked_by_every_collection") > 5
    assert grown == {}


@pytest.mark.parametrize(
    "fault", ["ipc.export=one-handle", "ipc.export=duplicate", "ipc.release=skip", "ipc.collect=skip"]
)
def test_the_flat_check_would_say_leak(tmp_path, fault):
    done, tests = bundled(tmp_path, "-k", "test_a_handle_a_peer_is_flat and not above", "--sglmem-inject", fault)
    assert done.returncode == 1, done.stdout
    (test,) = tests.values()
    assert test["outcome"] == "failed"
    assert min(test["faults"][0]["fired"]) > 0


def test_wrong_outputs_would_be_seen(tmp_path):
    fault = "dist.collective=corrupt"
    done, tests = bundled(tmp_path, "-k", "test_a_handle_a_peer_is_flat and not above", "--sglmem-inject", fault)
    assert done.returncode == 1, done.stdout
    assert tests["test_a_handle_a_peer_is_flat"]["outcome"] == "failed"


def test_with_two_ranks_the_faulty_shape_is_skipped_with_its_reason(tmp_path):
    done, tests = bundled(tmp_path, "-k", "one_geometry or one_handle or slowly", world=2)
    assert done.returncode == 0, done.stdout
    assert {test["outcome"] for test in tests.values()} == {"skipped"}
    assert "needs a world of at least 3: 2 ranks" in done.stdout

"""Worlds among what else lives in a session: time limits, import modes, forks of pytest, strict options, signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ARGS = ("--sglmem-device", "emulated", "-p", "no:cacheprovider", "-p", "no:randomly")
LIMIT = 120.0  # seconds for a session: its server imports torch, on 2 busy cores

WORLD = """
import helpers

def test_world(world):
    def total():
        import torch
        import torch.distributed as dist

        value = torch.tensor([helpers.one() + dist.get_rank()], device="cuda")
        dist.all_reduce(value)
        assert int(value) == 3
        return int(value)

    assert world.run(total) == [3, 3]
"""
HANGS = """
import os
import time

def test_hangs(world):
    print("\\npids", *world.run(os.getpid), flush=True)
    world.run(time.sleep, 3600)

def test_next(world):
    assert world.run(int) == [0, 0]
"""


def processes_in(folder):
    """What runs with its working directory in `folder`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and entry.name != str(os.getpid()):
            try:
                if Path(os.readlink(entry / "cwd")).is_relative_to(folder):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


@pytest.fixture
def run(pytester, monkeypatch, tmp_path_factory):
    """Run pytest in a process of its own; nothing of it may be left afterwards, no process and no temporary file."""
    temporary = tmp_path_factory.mktemp("temporary")
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # so that torch's own folder would show

    def run(*args):
        return pytester.runpytest_subprocess(*ARGS, *args, timeout=LIMIT)

    yield run
    wait_for_ends(processes_in(pytester.path))
    assert processes_in(pytester.path) == []
    assert [path for path in temporary.iterdir() if not path.name.startswith("pytest-of-")] == []
    assert not list(Path("/dev/shm").glob("sglmem*"))


@pytest.fixture
def inside(within, pytester):
    """Run a session in this process; no rank of it may be left afterwards."""
    yield lambda *args: within(*ARGS, *args)
    assert processes_in(pytester.path) == []


@pytest.mark.parametrize("mode", ["prepend", "append", "importlib"])
@pytest.mark.parametrize("package", [True, False], ids=["package", "no-package"])
def test_import_modes_in_packages_and_not(pytester, inside, mode, package):
    (pytester.path / "helpers.py").write_text("def one():\n    return 1\n")
    folder = pytester.path / "tests"
    folder.mkdir()
    (folder / "test_it.py").write_text(WORLD)
    if package:
        (folder / "__init__.py").touch()
    strict = ("-W", "error", "--strict-markers", "--strict-config")
    pytester.makeini("[pytest]\npythonpath = .\n")
    result = inside("--import-mode", mode, *strict)
    result.assert_outcomes(passed=1)


def test_helpers_that_only_pytest_can_import(pytester, inside):
    (pytester.path / "tests").mkdir()
    (pytester.path / "tests" / "conftest.py").write_text("def one():\n    return 1\n")
    (pytester.path / "tests" / "test_it.py").write_text(WORLD.replace("import helpers", "import conftest as helpers"))
    inside().assert_outcomes(passed=1)


@pytest.mark.parametrize("method", ["signal", "thread"])
def test_pytest_timeout(pytester, run, method):
    pytest.importorskip("pytest_timeout")
    mark = f"@pytest.mark.timeout(2, method={method!r}, func_only=True)\n"
    pytester.makepyfile("import pytest\n" + HANGS.replace("def test_hangs", mark + "def test_hangs"))
    result = run("-s")
    if method == "signal":
        result.assert_outcomes(failed=1, passed=1)
    else:
        assert result.ret == 1
    wait_for_ends(next(pids_in(line) for line in result.outlines if line.startswith("pids ")))


def pids_in(line):
    return [int(word) for word in line.split()[1:]]


def wait_for_ends(pids):
    import select

    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        ready, _, _ = select.select([fd], [], [], LIMIT)
        os.close(fd)
        assert ready


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM])
def test_a_signal_to_pytest_ends_everything(pytester, run, number):
    path = pytester.makepyfile(HANGS)
    command = [sys.executable, "-m", "pytest", *ARGS, "-s", str(path)]
    with subprocess.Popen(command, cwd=pytester.path, stdout=subprocess.PIPE, text=True) as session:
        pids = next(pids_in(line) for line in session.stdout if line.startswith("pids "))
        session.send_signal(number)
        rest = session.stdout.read()
        session.wait(LIMIT)
    wait_for_ends(pids)
    if number == signal.SIGINT:
        assert "KeyboardInterrupt" in rest
        assert session.returncode == 2


UNDER_XDIST = """
import os
import time

def test_hangs(world):
    pids = world.run(os.getpid)
    with open("up", "w") as up:
        print(os.getpid(), *pids, file=up)
    world.run(time.sleep, 3600)
"""
PATIENT = """
from execnet.gateway_base import WorkerGateway

# 5 seconds after its controller has gone xdist interrupts a worker: here it never does.
WorkerGateway._terminate_execution = lambda self: self._execpool.trigger_shutdown()
"""


@pytest.mark.parametrize(
    ("number", "to"),
    [(signal.SIGKILL, "controller"), (signal.SIGKILL, "worker"), (signal.SIGINT, "both")],
    ids=["controller-killed", "worker-killed", "ctrl-c"],
)
def test_a_signal_to_processes_of_xdist_ends_everything(pytester, run, number, to):
    pytest.importorskip("xdist")
    pytester.makeconftest(PATIENT)
    path = pytester.makepyfile(UNDER_XDIST)
    os.mkfifo(pytester.path / "up")
    command = [sys.executable, "-m", "pytest", *ARGS, "-n", "1", "--max-worker-restart", "0", str(path)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=pytester.path, start_new_session=True, **quiet) as controller:
        worker, *ranks = map(int, (pytester.path / "up").read_text().split())
        if to == "both":
            os.killpg(controller.pid, number)
        else:
            os.kill(worker if to == "worker" else controller.pid, number)
        wait_for_ends([controller.pid, worker, *ranks])


def test_a_test_run_in_a_fork_of_pytest(pytester, run):
    pytester.makeconftest(
        """
        import os
        import pytest

        class Fork:
            failed = False

            def pytest_runtest_logreport(self, report):
                self.failed |= report.failed

            @pytest.hookimpl(trylast=True)
            def pytest_runtest_logfinish(self):
                os._exit(self.failed)

        @pytest.hookimpl(tryfirst=True)
        def pytest_runtest_protocol(item):
            pid = os.fork()
            if not pid:
                item.config.pluginmanager.register(Fork())
                return None  # pytest's own goes on, in the fork
            print("fork ended with", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            return True
        """
    )
    pytester.makepyfile(
        """
        def test_one(world): assert world.run(int) == [0, 0]
        def test_two(world): assert world.run(int) == [0, 0]
        """
    )
    result = run("-s")
    assert str(result.stdout).count("fork ended with 0") == 2


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_tests_that_share_ranks_and_do_not(pytester, inside, seed):
    """As plugins of random order leave it: modules interleaved, and `random` seeded alike for each test."""
    pytester.makeconftest(
        f"""
        import random

        def pytest_collection_modifyitems(items):
            random.Random({seed}).shuffle(items)

        def pytest_runtest_setup():
            random.seed(1)
        """
    )
    module = """
        import os
        import pytest
        from pytest_sglmem import RankDied

        pytestmark = pytest.mark.world(size=2, scope="module")

        @pytest.mark.parametrize("number", range(2))
        def test_shared(world, number):
            assert len(set(world.run(os.getpid))) == 2

        def test_dies(world):
            with pytest.raises(RankDied):
                world.run(lambda: os._exit(3))

        @pytest.mark.world(size=3, scope="function")
        def test_own(world):
            assert len(set(world.run(os.getpid))) == 3
        """
    pytester.makepyfile(test_one=module, test_other=module)
    inside().assert_outcomes(passed=8)


def test_a_rootdir_that_cannot_be_written_to(pytester, inside):
    pytester.makepyfile(
        """
        import time

        def test_passes(world): assert world.run(int) == [0, 0]
        def test_is_silent(world): world.run(time.sleep, 3600, timeout=0.5)
        """
    )
    (pytester.path / ".sglmem").write_text("a file where the artifacts should go")
    pytester.path.chmod(0o555)
    try:
        result = inside()
    finally:
        pytester.path.chmod(0o755)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*RankSilent*"])


def test_a_failure_shows_locals_asserts_and_a_section_a_rank_and_x_stops(pytester, inside):
    pytester.makepyfile(
        """
        def test_fails(world):
            def chatty():
                import os
                print("said by", os.environ["RANK"])
                tell_tale = [4, 3, 2, 1]
                assert sum(tell_tale) == 11
            world.run(chatty)

        def test_never(world): pass
        """
    )
    result = inside("-x", "-l")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*ranks 0, 1 of 2 raised AssertionError*", "*assert 10 == 11*", "*tell_tale*4, 3, 2, 1*"]
    )
    result.stdout.fnmatch_lines(["*rank 0 output*", "said by 0", "*rank 1 output*", "said by 1"])


def test_live_output_under_s_and_a_breakpoint_without_a_terminal(pytester, inside):
    pytester.makepyfile(
        """
        def test_prints(world): world.run(print, "live")
        def test_stops(world): world.run(lambda: breakpoint())
        """
    )
    result = inside("-s")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines_random(["*[[]rank 0[]] live", "*[[]rank 1[]] live"])
    result.stdout.fnmatch_lines(["*breakpoint() in a rank: ranks have no terminal*"])


def test_pdb_says_which_process_it_is_in_where_ranks_failed(pytester, run):
    pytester.makepyfile(
        """
        def test_ranks(world): world.run(lambda: 1 / 0)
        def test_here(world): raise ValueError
        """
    )
    result = pytester.run(sys.executable, "-m", "pytest", *ARGS, "--pdb", stdin=b"where\nc\nc\n", timeout=LIMIT)
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        ["sglmem: this debugger is in pytest's process*", "*(Pdb)*", "*-> def test_ranks(world): *"]
    )
    assert result.stdout.str().count("this debugger is in") == 1


def test_skips_and_warnings_of_ranks_are_the_tests(pytester, inside):
    pytester.makepyfile(
        """
        import warnings
        import pytest

        def test_skips(world): world.run(lambda: pytest.skip("not on this one"))
        def test_xfails(world): world.run(lambda: pytest.xfail("known"))
        def test_warns(world): world.run(lambda: warnings.warn("mind this", DeprecationWarning))
        """
    )
    result = inside("-rsx")
    result.assert_outcomes(skipped=1, xfailed=1, passed=1, warnings=1)
    result.stdout.fnmatch_lines(["*ranks 0, 1: mind this*", "*not on this one*", "*known*"])
    inside("-W", "error::DeprecationWarning").assert_outcomes(skipped=1, xfailed=1, failed=1)


@pytest.mark.parametrize("dist", ["load", "loadscope", "loadfile", "loadgroup", "worksteal"])
def test_two_workers_with_worlds_of_four(pytester, run, dist):
    pytest.importorskip("xdist")
    pytester.makepyfile(
        """
        import os
        import pytest

        @pytest.mark.parametrize("number", [1, 2])
        def test_world(world, number):
            def sum_up():
                import torch
                import torch.distributed as dist

                value = torch.tensor([number])
                dist.all_reduce(value)
                return int(value)

            assert world.run(sum_up) == [4 * number] * 4

        def test_dies(world): world.run(lambda: os._exit(3))
        """
    )
    run("-n", "2", "--dist", dist, "--sglmem-world", "4").assert_outcomes(passed=2, failed=1)

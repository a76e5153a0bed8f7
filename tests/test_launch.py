from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pytest_sglmem import launch
from pytest_sglmem.launch import Launcher, LaunchError, Pipe, Spec
from pytest_sglmem.world import World

LIMIT = 20.0  # seconds that anything here may take before a test says so


def wait_for_ends(pids, limit=LIMIT):
    """Return when all of these processes have ended; AssertionError where one lives on after `limit` seconds."""
    end = time.monotonic() + limit
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        ready, _, _ = select.select([fd], [], [], max(0.0, end - time.monotonic()))
        os.close(fd)
        assert ready, f"process {pid} lives on"


# ------------------------------------------------------------------------------------ nothing is left behind

HOST = """
import os, sys
from pytest_sglmem.launch import Launcher, Spec
from pytest_sglmem.world import World
launcher = Launcher()
world = World.start(launcher, Spec(size={size}))
pids = world.run(os.getpid)
print(launcher._server.pid, *pids, launcher.folder, flush=True)
{then}
"""


def host(then, size=2, **popen):
    """A process with a world; returns it, its server's and ranks' ids, and its folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOST.format(then=then, size=size)], stdout=subprocess.PIPE, text=True, **popen
    )
    *pids, folder = process.stdout.readline().split()
    return process, [int(pid) for pid in pids], Path(folder)


def test_a_server_that_still_imports_goes_with_pytest(tmp_path):
    (tmp_path / "never.py").write_text("import time; time.sleep(3600)\n")
    program = f"""
import sys, time
sys.path.insert(0, {str(tmp_path)!r})
from pytest_sglmem.launch import Launcher
launcher = Launcher(preload=["never"])
print(launcher._server.pid, launcher.folder, flush=True)
time.sleep(3600)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        server, folder = process.stdout.readline().split()
        process.kill()
    wait_for_ends([int(server)])
    assert not Path(folder).exists()


@pytest.mark.parametrize("gone", ["before", "while ranks run"])
def test_a_worker_whose_controller_is_gone_is_interrupted_and_its_ranks_go(gone):
    with subprocess.Popen(["sleep", "3600"]) as controller:
        if gone == "before":
            controller.kill()
            controller.wait()
        program = HOST.replace("Launcher()", f"Launcher(controller={controller.pid})")
        if gone == "before":
            program = program.replace("world = ", "print(launcher.folder, flush=True); world = ")
        command = [sys.executable, "-c", program.format(size=1, then="world.run(__import__('time').sleep, 3600)")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as worker:
            *pids, folder = worker.stdout.readline().split()
            controller.kill()
            assert worker.wait(LIMIT) == -signal.SIGINT
            assert "KeyboardInterrupt" in worker.stderr.read()
    wait_for_ends(map(int, pids))
    assert not Path(folder).exists()


@contextlib.contextmanager
def watched(process):
    """Wait for its end; where the test fails, kill it instead."""
    with process:
        try:
            yield
        except BaseException:
            process.kill()
            raise


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_ranks_server_and_folder_go_with_pytest_however_it_ends(number):
    process, pids, folder = host("world.run(__import__('time').sleep, 3600)")
    with watched(process):
        process.send_signal(number)
        process.wait(LIMIT)
    wait_for_ends(pids)
    assert not folder.exists()


def test_a_copy_of_pytest_that_lives_on_keeps_no_rank_alive():
    process, pids, folder = host("copy = os.fork()\nif copy: print(copy, flush=True)\n__import__('time').sleep(3600)")
    with watched(process):
        copy = int(process.stdout.readline())
        process.kill()
        process.wait(LIMIT)
        wait_for_ends(pids)
        os.kill(copy, signal.SIGKILL)
    assert not folder.exists()


def test_what_a_session_killed_together_with_its_server_leaves_goes_with_the_next():
    process, (server, *ranks), folder = host("__import__('time').sleep(3600)")
    with watched(process):
        os.kill(server, signal.SIGSTOP)  # so that it cannot clear up between the two
        process.kill()
        process.wait(LIMIT)
        os.kill(server, signal.SIGKILL)
        wait_for_ends([server, *ranks])
    assert folder.exists()
    Launcher().close()
    assert not folder.exists()


def test_ranks_go_with_the_server():
    process, (server, *ranks), folder = host("sys.stdin.read(); launcher.close()", stdin=subprocess.PIPE)
    with watched(process):
        os.kill(server, signal.SIGKILL)
        wait_for_ends(ranks)
        process.stdin.close()
        assert process.wait(LIMIT) == 0
    assert not folder.exists()


def test_ctrl_c_ends_eight_ranks_within_two_seconds():
    process, pids, folder = host("world.run(__import__('time').sleep, 3600)", size=8, stderr=subprocess.PIPE)
    assert len(pids) == 9
    with watched(process):
        process.send_signal(signal.SIGINT)
        wait_for_ends([*pids, process.pid], limit=2.0)
        assert "KeyboardInterrupt" in process.stderr.read()
    assert not folder.exists()


def test_counters_of_cuda_handles_of_a_killed_rank_are_removed():
    launcher = Launcher()
    try:
        world = World.start(launcher, Spec(size=1))
        (pid,) = world.run(os.getpid)
        left = Path(f"/dev/shm/torch_{pid}_1_1")
        left.write_bytes(b"")
        world._abandon("for the test", quick=True)
        assert not left.exists()
        world.close()
    finally:
        launcher.close()


# ----------------------------------------------------------------------------------------------- the server


def test_a_server_that_cannot_start_says_why():
    launcher = Launcher(preload=["torch", "no_such_module"])
    try:
        with pytest.raises(LaunchError, match="no_such_module"):
            World.start(launcher, Spec())
        assert not launcher.mine()
    finally:
        launcher.close()
    assert not launcher.folder.exists()


def test_a_server_that_dies_is_told_and_a_call_does_not_wait_for_it():
    launcher = Launcher()
    try:
        world = World.start(launcher, Spec(size=1, timeout=60.0))
        launcher._server.kill()
        with pytest.raises(LaunchError, match=r"the fork server ended \(status -9\)"):
            world.run(__import__("time").sleep, 3600)
        assert not launcher.mine()
        with pytest.raises(LaunchError, match="the fork server ended"):
            World.start(launcher, Spec(size=1))
        world.close()
    finally:
        launcher.close()


def test_a_fork_of_pytest_does_not_use_its_launcher():
    launcher = Launcher()
    try:
        assert launcher.mine()
        pid = os.fork()
        if pid == 0:
            refused = 0
            try:
                launcher.start(Spec())
            except LaunchError:
                refused = 7
            launcher.close()
            os._exit(refused + launcher.mine())
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        world = World.start(launcher, Spec(size=1))
        assert world.run(int) == [0]
        world.close()
    finally:
        launcher.close()


def test_closing_twice_is_closing():
    launcher = Launcher(preload=[])
    launcher.close()
    launcher.close()
    assert launcher._server.returncode is not None
    assert not launcher.folder.exists()


def test_two_worlds_side_by_side():
    launcher = Launcher()
    try:
        one, other = World.start(launcher, Spec(size=2)), World.start(launcher, Spec(size=1))
        assert (one.run(int), other.run(int)) == ([0, 0], [0])
        one.close()
        assert other.run(int) == [0]
        other.close()
    finally:
        launcher.close()


# -------------------------------------------------------------------------------------------------- pipes


@pytest.fixture
def ends():
    here, there = socket.socketpair()
    pipe = Pipe(here)
    yield pipe, there
    pipe.close()
    there.close()


def framed(message):
    return struct.pack("!Q", len(message)) + message


def test_messages_come_whole_whatever_the_pieces(ends):
    pipe, there = ends
    data = framed(b"one") + framed(b"") + framed(b"three")
    there.sendall(data[:-1])
    assert pipe.receive() == [b"one", b""]
    assert pipe.receive() == []
    there.sendall(data[-1:])
    assert pipe.receive() == [b"three"]


def test_a_message_that_stops_in_the_middle_is_no_wait_and_no_message(ends):
    pipe, there = ends
    there.sendall(framed(b"whole") + framed(b"cut")[:-1])
    there.close()
    assert pipe.receive() == [b"whole"]
    with pytest.raises(EOFError):
        pipe.receive()


def test_sending_to_one_that_does_not_read_ends_at_the_limit(ends):
    pipe, _ = ends
    with pytest.raises(TimeoutError):
        pipe.send(bytes(1 << 24), limit=0.05)


# ------------------------------------------------------------------------------------------ device, GPUs, ports


def fake_gpus(monkeypatch, count):
    class Nvml:
        def nvmlInit_v2(self):
            return 0

        def nvmlShutdown(self):
            return 0

        def nvmlDeviceGetCount_v2(self, by_reference):
            by_reference._obj.value = count
            return 0

    monkeypatch.setattr(launch.ctypes, "CDLL", lambda _: Nvml())


@pytest.mark.parametrize(
    ("visible", "count"),
    [(None, 4), ("", 0), ("0", 1), ("2,3", 2), ("GPU-aa,GPU-bb", 2), ("0,-1,2", 1), ("-1", 0), ("0,1,2,3,4,5", 4)],
)
def test_gpus_that_a_rank_will_see(monkeypatch, visible, count):
    fake_gpus(monkeypatch, 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert launch.visible_gpus() == count


def test_the_device_by_what_is_there(monkeypatch):
    assert launch.resolve_device("emulated") == "emulated"
    monkeypatch.setattr(launch, "no_cuda", lambda: "")
    assert launch.resolve_device("auto") == launch.resolve_device("cuda") == "cuda"
    monkeypatch.setattr(launch, "no_cuda", lambda: "no GPU is visible")
    assert launch.resolve_device("auto") == "emulated"
    with pytest.raises(ValueError, match="no CUDA device to run on: no GPU is visible"):
        launch.resolve_device("cuda")
    with pytest.raises(ValueError, match="got 'tpu'"):
        launch.resolve_device("tpu")


def test_asking_for_the_device_does_not_import_torch():
    program = (
        "import sys; from pytest_sglmem import launch; launch.resolve_device('auto'); print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "False\n"


def test_two_workers_take_different_gpus_and_give_them_back(monkeypatch):
    fake_gpus(monkeypatch, 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(launch, "gpu_name", lambda ordinal: f"of-test-{os.getpid()}-{ordinal}")
    first, locks = launch.lock_gpus(2)
    assert first == (0, 1)
    with pytest.raises(LaunchError, match="no 2 free GPUs within 0 s"):
        launch.lock_gpus(2, limit=0)
    second, more = launch.lock_gpus(1)
    assert second == (2,)
    for lock in locks:
        os.close(lock)
    again, last = launch.lock_gpus(2)
    assert again == (0, 1)
    with pytest.raises(LaunchError, match="4 whole GPUs asked for, 3 here"):
        launch.lock_gpus(4)
    for lock in (*more, *last):
        os.close(lock)


def test_a_free_port_can_be_listened_on():
    port = launch.free_port()
    assert 20000 <= port < 32000
    with socket.socket() as server:
        server.bind(("127.0.0.1", port))

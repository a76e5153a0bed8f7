from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pytest_sglmem import torchrun
from pytest_sglmem.launch import free_port

LIMIT = 180.0  # seconds for a whole job: 4 interpreters that import torch, and 4 fork servers, on 2 busy cores
PYTEST = ["-m", "pytest", "-p", "no:cacheprovider", "--sglmem-launcher", "torchrun", "--sglmem-device", "emulated"]

COLLECTIVE = """
import os
import pytest

def total():
    import torch
    import torch.distributed as dist

    t = torch.tensor([dist.get_rank()], device="cuda")
    dist.all_reduce(t)
    return int(t)
"""


CONFTEST = """
# A fork server leaves a file of its rank
import os
import pathlib
from pytest_sglmem import launch

start = launch.Launcher.__init__

def noted(self, **how):
    pathlib.Path(f"servers.{os.environ['RANK']}").touch()
    start(self, **how)

launch.Launcher.__init__ = noted
"""


class Job:
    """Processes with the variables that torchrun sets, each running pytest."""

    def __init__(self, folder, size, *args):
        port = str(free_port())
        self.processes = []
        for rank in range(size):
            variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
            environ = {**os.environ, **{name: str(value) for name, value in variables.items()}}
            environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
            with open(folder / f"out.{rank}", "w") as file:
                out = file if rank else subprocess.PIPE
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, *PYTEST, *args],
                        cwd=folder,
                        env=environ,
                        stdout=out,
                        stderr=subprocess.STDOUT,
                        text=True,
                    )
                )
        self.text = ""
        self._more = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        for line in self.processes[0].stdout:
            with self._more:
                self.text += line
                self._more.notify()

    def wait(self):
        """The exit status of each process."""
        try:
            return [process.wait(LIMIT) for process in self.processes]
        finally:
            self.end()

    def end(self):
        """Nothing of it runs any more, and all that the session said is in `text`."""
        for process in self.processes:
            process.kill()
            process.wait()
        self._reader.join()
        self.processes[0].stdout.close()

    def line(self, words):
        """Return when the session has said these words."""
        with self._more:
            assert self._more.wait_for(lambda: words in self.text, LIMIT), self.text


@pytest.fixture
def job(tmp_path):
    jobs = []

    def start(program, *args, size=2):
        (tmp_path / "conftest.py").write_text(CONFTEST)
        (tmp_path / "test_it.py").write_text(COLLECTIVE + program)
        jobs.append(Job(tmp_path, size, *args))
        return jobs[-1]

    yield start
    for one in jobs:
        one.end()


def left_over(folder):
    """Processes of a job that still run, by their working directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.readlink(entry / "cwd") == str(folder):
                    found.append((entry / "cmdline").read_bytes())
            except OSError:
                continue
    return found


def test_two_agents_of_two_processes(tmp_path):
    (tmp_path / "test_it.py").write_text(
        COLLECTIVE
        + """
def test_all(world, monkeypatch):
    assert world.size == 4
    assert world.run(total) == [6] * 4
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    seen = world.run(lambda: [os.environ[name] for name in names])
    assert seen == [["0", "0", "4", "2"], ["1", "1", "4", "2"], ["2", "0", "4", "2"], ["3", "1", "4", "2"]]

def test_dies(world):
    world.run(lambda: os._exit(7) if os.environ["RANK"] == "2" else total())

def test_is_silent(world):
    def wanders_off():
        import time
        import torch.distributed as dist

        if dist.get_rank() == 3:
            time.sleep(3600)
        dist.barrier()

    world.run(wanders_off, timeout=2)

@pytest.mark.world(size=3)
def test_smaller(world):
    assert world.run(total) == [3] * 3

@pytest.mark.world(size=5)
def test_larger(world):
    raise AssertionError

@pytest.mark.world(init=False)
@pytest.mark.parametrize("again", [1, 2])
def test_own_group(world, again):
    def own():
        import torch.distributed as dist

        dist.init_process_group("gloo")
        return dist.get_world_size(), total()

    assert world.run(own) == [(4, 6)] * 4

def test_trace(world, live_bytes):
    def setup():
        import torch

        return lambda n: torch.ones(n, device="cuda")

    assert live_bytes.assert_flat(world.trace(setup, [8, 16], cycles=2)).settled == ((0, 0),) * 4
"""
    )
    port = str(free_port())
    agents = []
    for node in range(2):
        nodes = ["--nnodes=2", f"--node-rank={node}", "--nproc-per-node=2"]
        where = ["--master-addr=127.0.0.1", f"--master-port={port}"]
        with open(tmp_path / f"out.{node}", "w") as out:
            command = [sys.executable, "-m", "torch.distributed.run", *nodes, *where, *PYTEST, "-rfs"]
            environ = {**os.environ, "TMPDIR": str(tmp_path)}  # agents leave a folder of logs there
            agents.append(subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=out, stderr=subprocess.STDOUT))
    try:
        statuses = [agent.wait(LIMIT) for agent in agents]
    finally:
        for agent in agents:
            agent.terminate()
            agent.wait()
    text = (tmp_path / "out.0").read_text()
    assert "2 failed, 5 passed, 1 skipped" in text
    assert "RankDied: rank 2 of 4 died: exit code 7" in text
    assert "ranks 0-2 wait in barrier" in text
    assert re.search(r"rank 3 is in wanders_off \(.*\), never came", text)
    assert "5 ranks asked for, torchrun started 4 processes" in text
    assert statuses == [1, 1]
    assert "test session starts" not in (tmp_path / "out.1").read_text()
    assert not left_over(tmp_path)


@pytest.mark.parametrize(
    ("program", "args", "status"),
    [
        ("def test_it(world): assert world.run(total) == [1, 1]", [], 0),
        ("def test_it(): pass", [], 0),
        ("def test_it(): raise AssertionError", [], 1),
        ("import no_such_module", [], 2),
        ("def test_it(): pass", ["-k", "nothing_of_the_kind"], 5),
        ("def test_it(): pass", ["--sglmem-world", "none"], 4),
    ],
    ids=["world", "no-world", "failed", "collection-error", "nothing-selected", "usage-error"],
)
def test_all_processes_end_with_the_sessions_status(job, tmp_path, program, args, status):
    running = job(program, *args)
    assert running.wait() == [status, status], running.text
    assert not left_over(tmp_path)
    served = "def test_it(world)" in program
    assert (tmp_path / "servers.0").exists() == (tmp_path / "servers.1").exists() == served


def test_a_killed_session_takes_the_others_along(job, tmp_path):
    running = job("def test_it(world): world.run(lambda: print('up') or __import__('time').sleep(3600))", "-s")
    running.line("[rank 1] up")
    running.processes[0].send_signal(signal.SIGKILL)
    assert running.wait() == [-signal.SIGKILL, torchrun.LOST]
    assert not left_over(tmp_path)


def test_a_killed_server_fails_what_runs_and_the_session_ends(job, tmp_path):
    running = job(
        """
def test_it(world):
    world.run(lambda: print("up") or __import__("time").sleep(3600))

def test_next(world):
    raise AssertionError("no world, no test")
""",
        "-s",
    )
    running.line("[rank 1] up")
    running.processes[1].send_signal(signal.SIGKILL)
    assert running.wait() == [1, -signal.SIGKILL]
    assert "the processes with RANK [1] are gone" in running.text
    assert not left_over(tmp_path)


STUBS = {
    "scontrol": "echo 127.0.0.1\n",
    "srun": """
while [[ $1 == --* ]]; do shift; done
for task in 0 1; do SLURM_PROCID=$task SLURM_LOCALID=0 SLURM_NTASKS=2 "$@" & pids+=($!); done
for pid in "${pids[@]}"; do wait "$pid" || exit; done
""",
}


@pytest.mark.parametrize("program", ["torchrun", "bash"])
def test_the_documented_commands_for_slurm(tmp_path, program):
    """Two nodes of one process each, by a srun that starts both here: what is tested are the variables."""
    page = (Path(__file__).parents[1] / "docs" / "worlds.md").read_text()
    (command,) = re.findall(rf"^srun [^\n]* {program} .*?tests/'?$", page, re.MULTILINE | re.DOTALL)
    for documented, here in (("=8", "=1"), ("29500", str(free_port())), ("tests/", "test_it.py")):
        assert documented in command
        command = command.replace(documented, here)
    (tmp_path / "test_it.py").write_text(COLLECTIVE + "def test_it(world): assert world.run(total) == [1, 1]\n")
    for name, text in STUBS.items():
        (tmp_path / name).write_text("#!/usr/bin/env bash\n" + text)
        (tmp_path / name).chmod(0o700)
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = {"SLURM_JOB_ID": "7", "PYTEST_ADDOPTS": "-p no:cacheprovider --sglmem-device emulated"}
    environ = {**os.environ, "PATH": path, "TMPDIR": str(tmp_path), **variables}
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("1 passed") == 1
    assert not left_over(tmp_path)


def test_without_torchrun_it_says_so(tmp_path):
    environ = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    done = subprocess.run(
        [sys.executable, *PYTEST], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 4
    assert "torchrun did not start this process (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set)" in done.stderr


def test_processes_that_do_not_join_are_named(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with pytest.raises(torchrun.LaunchError, match=r"processes with RANK \[1, 2\] did not join"):
        torchrun.Launcher(join_limit=0.1)

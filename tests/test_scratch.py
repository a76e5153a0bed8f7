"""Temporary folders: gone with their process, and those of killed processes with the next one that wants one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile

import pytest

from pytest_sglmem.scratch import Scratch

LIVES = "import time; from pytest_sglmem.scratch import Scratch; print(Scratch().path, flush=True); time.sleep(600)"


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


@pytest.fixture
def other():
    with subprocess.Popen([sys.executable, "-c", LIVES], stdout=subprocess.PIPE, text=True) as process:
        process.folder = process.stdout.readline().strip()
        yield process
        process.kill()


def test_a_folder_goes_with_all_in_it(place):
    scratch = Scratch("proof-")
    (scratch.path / "run").mkdir()
    (scratch.path / "run" / "log").write_text("text")
    assert scratch.path.name.startswith("sglmem-proof-")
    scratch.remove()
    scratch.remove()
    assert list(place.iterdir()) == []


def test_the_folder_of_a_living_process_stays(place, other):
    with Scratch() as own:
        assert {str(path) for path in place.iterdir()} == {own, other.folder}


def test_the_folder_of_a_killed_process_goes_when_the_next_comes(place, other):
    os.kill(other.pid, signal.SIGKILL)
    other.wait()
    assert os.listdir(place) == [os.path.basename(other.folder)]
    with Scratch() as own:
        assert [str(path) for path in place.iterdir()] == [own]


def test_a_process_started_meanwhile_leaves_it_alone(place):
    with Scratch() as own:
        subprocess.run(
            [sys.executable, "-c", "from pytest_sglmem.scratch import Scratch; Scratch().remove()"], check=True
        )
        assert [str(path) for path in place.iterdir()] == [own]


@pytest.mark.parametrize("name", ["sglmem-new", "sglmem", "other-1"])
def test_what_is_not_known_to_be_an_orphan_stays(place, name):
    (place / name).mkdir()
    (place / name / "file").write_text("text")
    Scratch().remove()
    assert os.listdir(place) == [name]


def test_a_link_is_not_followed(place):
    (place / "precious").mkdir()
    (place / "precious" / "owner").write_text("")
    (place / "sglmem-link").symlink_to(place / "precious")
    Scratch().remove()
    assert (place / "precious" / "owner").exists()


def test_another_users_folder_stays(place, monkeypatch):
    (place / "sglmem-theirs").mkdir()
    (place / "sglmem-theirs" / "owner").write_text("")
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    Scratch().remove()
    assert os.listdir(place) == ["sglmem-theirs"]

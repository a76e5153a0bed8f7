import contextlib
import inspect
import queue
import sys
import threading
import types
from pathlib import Path

import pytest

from pytest_sglmem import sites

HERE = Path(__file__)


def line_here(offset=0):
    return inspect.currentframe().f_back.f_lineno + offset


def named(line, name, path=HERE):
    return f"{path.parent.name}/{path.name}:{line} in {name}"


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def share():
    return sites.user_stack()


def test_the_users_line_comes_first_then_its_callers(elsewhere):
    stack = share()
    assert stack[0] == named(share.__code__.co_firstlineno + 1, "share")
    assert stack[1] == named(line_here(-2), test_the_users_line_comes_first_then_its_callers.__name__)


def test_pytest_and_pluggy_are_left_out():
    assert len(share()) == 2


def test_paths_below_the_current_directory_are_relative(monkeypatch):
    monkeypatch.chdir(HERE.parent)
    assert share()[0].startswith("test_sites.py:")
    monkeypatch.chdir(HERE.parents[1])
    assert share()[0].startswith("tests/test_sites.py:")


def test_a_removed_current_directory_is_no_error(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert share()[0].startswith("tests/test_sites.py:")


@pytest.mark.parametrize(("depth", "limit"), [(3, 2), (3, 4), (30, 12)])
def test_the_limit_counts_user_lines(depth, limit):
    def deeper(left):
        return deeper(left - 1) if left else sites.user_stack(limit=limit)

    assert len(deeper(depth)) == limit


def test_skip_passes_over_the_callers_own_frames():
    def inner():
        return sites.user_stack(skip=1)

    assert inner() == (named(line_here(), "test_skip_passes_over_the_callers_own_frames", Path("tests/test_sites.py")),)


def test_skipping_more_frames_than_there_are_is_empty():
    assert sites.user_stack(skip=10_000) == ()


@pytest.mark.parametrize(
    ("module", "left_out"),
    [
        ("torch", True),
        ("torch.multiprocessing.reductions", True),
        ("pytest_sglmem.ipc", True),
        ("pytest_sglmem.emulated.sharing", True),
        ("pytest_sglmem.reference", False),
        ("pytest_sglmem.checks", False),
        ("multiprocessing.queues", True),
        ("threading", True),
        ("cloudpickle", True),
        ("pytest", True),
        ("pluggy", True),
        ("numpy", False),
    ],
)
def test_whose_lines_are_left_out(module, left_out):
    path = pytest.importorskip(module).__file__
    assert sites.is_plumbing(path) is left_out


@pytest.mark.parametrize(
    ("filename", "left_out"),
    [
        ("<string>", False),
        ("<stdin>", False),
        ("<frozen importlib._bootstrap>", True),
        ("<eval_with_key>.3", True),
        ("??", True),
        ("", True),
        ("/opt/venv/bin/pytest", True),
        ("/srv/venv/lib/python3.12/site-packages/torch/nn/modules/module.py", True),
        ("/srv/venv/lib/python3.12/site-packages/torch_memory_saver/hooks.py", False),
        ("/srv/venv/lib/python3.12/site-packages/sglang/srt/server.py", False),
        ("/srv/app/torch/train.py", False),
    ],
)
def test_names_that_no_module_here_has(filename, left_out):
    assert sites.is_plumbing(filename) is left_out


def test_a_stack_without_a_users_line_shows_the_plumbings_own():
    answers = queue.Queue()

    def take():
        answers.put((sites.Stacks().take(1), sites.Stacks().take_any(1)))

    feeder = threading.Thread()
    feeder.run = eval(compile("lambda: take()", threading.__file__, "eval"), {"take": take})
    feeder.start()
    feeder.join()
    users, anybodys = answers.get()
    assert users == ()
    assert sites.words(anybodys)[0].startswith(f"{Path(threading.__file__).parent.name}/threading.py:")


def test_recorded_frames_read_as_the_live_stack_does(elsewhere):
    import torch

    frames = [
        {"filename": "??", "line": 0, "name": "cuMalloc"},
        {"filename": torch.__file__, "line": 3, "name": "empty"},
        {"filename": "/srv/app/server.py", "line": 41, "name": "share"},
        {"filename": str(elsewhere / "main.py"), "line": 7, "name": "main"},
    ]
    want = ("app/server.py:41 in share", "main.py:7 in main")
    assert sites.format_frames(frames) == want
    assert sites.format_frames([(f["filename"], f["line"], f["name"]) for f in frames]) == want
    assert sites.format_frames(frames, limit=1) == want[:1]


def test_a_stack_that_was_taken_holds_no_frame():
    assert {type(part) for part in sites.Stacks().take()} == {types.CodeType, int}


def test_lines_are_those_of_the_frames_whatever_the_function_is_like():
    """In a loop, in calls over several lines, in handlers, with a line that comes before the one above it."""
    stacks, seen = sites.Stacks(), []

    def note(*_):
        lines = []
        frame = sys._getframe(1)
        while frame is not None and not frame.f_code.co_filename.endswith("_pytest/main.py"):
            if not sites.is_plumbing(frame.f_code.co_filename):
                lines.append((frame.f_lineno, frame.f_code.co_name))
            frame = frame.f_back
        seen.append((stacks.take(1), lines))

    def winding():
        for _ in range(2):
            try:
                note(
                    1,
                    note(2),
                )
                raise ValueError
            except ValueError:
                note()
            finally:
                [note() for _ in (lambda: [note()])()]
        with contextlib.ExitStack() as stack:
            stack.callback(note)
            note() if seen else None

    winding()
    assert len(seen) == 12
    for raw, lines in seen:
        assert [line.split(":")[1] for line in sites.words(raw)] == [f"{line} in {name}" for line, name in lines]

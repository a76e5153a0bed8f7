"""Progress of long traces: when a line is due, what it says, and that pytest's own output stays whole around it."""

import os
import pty
import re
import subprocess
import sys

import pytest

from pytest_sglmem import progress
from pytest_sglmem.records import Progress


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Screen:
    first, every = 2.0, 0.5

    def __init__(self):
        self.seen = []

    def show(self, text):
        self.seen.append(text)

    def end(self):
        self.seen.append("end")


@pytest.fixture
def told():
    """A narrator with a clock of ours, and what it showed."""
    screen, clock = Screen(), Clock()
    narrator = progress.Narrator("test_x", screen, clock)

    def tell(at, call=1, rank=0, cycle=1, step=0, live=0):
        clock.now = 100.0 + at
        narrator(Progress(call, rank, cycle, step, live, steps=14, warmup=1, cycles=(3, 12)))
        return len(screen.seen)

    tell.narrator, tell.seen = narrator, screen.seen
    return tell


def test_a_short_trace_shows_nothing(told):
    assert [told(0), told(1), told(1.999)] == [0, 0, 0]
    told.narrator.end()
    assert told.seen == ["end"]


def test_it_shows_after_two_seconds_and_then_at_most_so_often(told):
    assert [told(at) for at in (0, 2, 2.25, 2.499, 2.5, 2.75, 7, 7.25)] == [0, 1, 1, 1, 2, 2, 3, 3]


def test_the_next_trace_begins_anew(told):
    told(0)
    told(2)
    assert [told(3, call=2), told(4.9, call=2), told(5, call=2)] == [2, 2, 3]
    assert told.seen[1] == "end"


def test_it_ends_once(told):
    told(0)
    told.narrator.end()
    told.narrator.end()
    assert told.seen == ["end"]


def test_it_tells_of_the_slowest_rank_and_the_fullest(told):
    told(0, rank=0, cycle=2, step=6, live=1258291)
    told(1, rank=1, cycle=2, step=9, live=512)
    told(2, rank=2, cycle=3, step=0, live=0)
    assert told.seen == ["test_x: cycle 2 of at most 12, geometry 7 of 14, live 1.2 MiB"]


@pytest.mark.parametrize(
    ("cycle", "warmup", "cycles", "said"),
    [
        (0, 1, (3, 12), "warm-up"),
        (1, 2, (3, 12), "warm-up 2 of 2"),
        (1, 1, (3, 12), "cycle 1 of at most 12"),
        (12, 1, (3, 12), "cycle 12 of at most 12"),
        (0, 0, (4, 4), "cycle 1 of 4"),
    ],
)
def test_cycles_are_counted_from_after_the_warm_up(cycle, warmup, cycles, said):
    record = Progress(1, 0, cycle, 0, 0, steps=2, warmup=warmup, cycles=cycles)
    assert progress.line("t", [record]) == f"t: {said}, geometry 1 of 2, live 0 B"


# Shows lines as a trace would, from within tests, in the middle of what pytest itself prints.
SHOWS = """
import pytest

from pytest_sglmem import progress


def test_before(): pass


def test_long(request):
    print("captured")
    screen = progress.screen(request.config, request.node.nodeid)
    for number in (1, 2, 3):
        if screen is not None:
            screen.show(f"progress {number} " + "x" * 100)
    print("captured")
    if screen is not None:
        screen.end()


def test_captures(request, capfd):
    print("mine")
    screen = progress.screen(request.config, request.node.nodeid)
    if screen is not None:
        screen.show("progress 4")
        screen.end()
    assert capfd.readouterr().out == "mine\\n"


def test_after(): pass
"""


def printed(pytester, *args):
    """What of it is about our file or is progress, where no terminal is."""
    pytester.makepyfile(test_a=SHOWS)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", *args)
    result.assert_outcomes(passed=4)
    return [line for line in result.outlines if line.startswith(("progress", "test_a", "captured"))]


def test_a_log_has_lines_of_its_own(pytester):
    numbers = [f"progress {number} " + "x" * 100 for number in (1, 2, 3)]
    lines = [re.sub(r" +\[100%\]", "", line) for line in printed(pytester)]
    assert lines == ["test_a.py .", *numbers, "test_a.py .", "progress 4", "test_a.py .."]


def test_a_log_with_a_line_a_test(pytester):
    said = [line.split("  ")[0].split("[")[0].strip() for line in printed(pytester, "-v")]
    assert said[0] == "test_a.py::test_before PASSED"
    assert said[1] == "test_a.py::test_long"
    assert said[5:7] == ["test_a.py::test_long PASSED", "test_a.py::test_captures"]
    assert said[7:] == ["progress 4", "test_a.py::test_captures PASSED", "test_a.py::test_after PASSED"]


@pytest.mark.parametrize("args", [("-q",), ("-n", "1")], ids=" ".join)
def test_quiet_sessions_and_workers_show_nothing(pytester, args):
    if "-n" in args:
        pytest.importorskip("xdist")
    assert not [line for line in printed(pytester, *args) if "progress" in line]


@pytest.mark.parametrize(
    ("args", "end"),
    [
        ((), ["test_a.py .", "test_a.py .", "test_a.py .."]),
        (("-v",), [f"test_a.py::test_{name} PASSED" for name in ("before", "long", "captures", "after")]),
    ],
    ids=["a line a file", "a line a test"],
)
def test_on_a_terminal_the_line_is_rewritten_and_goes(pytester, args, end):
    pytester.makepyfile(test_a=SHOWS)
    states = list(terminal_states([sys.executable, "-m", "pytest", "--color=no", *args], pytester.path))
    shown = [state for state in states if any("progress 3" in line for line in state)]
    assert any(sum("progress" in line for line in state) == 1 for state in shown)
    assert not any("progress 2" in line for state in shown for line in state)
    assert {len(line) for state in shown for line in state if "progress" in line} == {79}
    last = [re.sub(r" +\[ *\d+%\]", "", line).strip() for line in states[-1]]
    about = [line for line in last if line.startswith("test_a") and line != "test_a.py::test_long"]
    assert [line for line in about if not line.endswith("test_captures")] == end
    assert not [line for line in last if "progress" in line or "captured" in line]


def terminal_states(command, cwd):
    """What a terminal shows after each piece of output of `command`: lines, by what little of its language we use."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    process = subprocess.Popen(command, cwd=cwd, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    text = ""
    while piece := _read(ours):
        text += piece
    os.close(ours)
    assert process.wait(timeout=60) == 0, text
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[\d*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", text):
        if token == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif token == "\r":
            column = 0
        elif token == "\x1b[2K":
            lines[row] = ""
        elif token == "\x1b[1A":
            row -= 1
        else:
            lines[row] = lines[row][:column].ljust(column) + token + lines[row][column + len(token) :]
            column += len(token)
        yield list(lines)


def _read(descriptor):
    try:
        return os.read(descriptor, 65536).decode()
    except OSError:  # how a pseudo-terminal says that the other side is closed
        return ""

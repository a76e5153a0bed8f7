"""What a long trace shows of itself while its ranks work: one line, rewritten on a terminal, now and then in a CI log.

`Narrator` hears what ranks report, decides when a line is due and what it says; `Line` and `Log` put it between
pytest's own output, by the terminal reporter's public methods, with capturing off for that moment. A trace that is over
within 2 seconds shows nothing, nor does a session with `-q` or a worker of xdist. Nothing is measured here.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from . import words
from .records import Progress

if TYPE_CHECKING:
    import pytest

QUIET = 2.0  # seconds of a trace that pass before a terminal shows it
REDRAW = 0.2  # seconds between two states of the line on a terminal
LOGGED = 30.0  # seconds between two lines of a log


class Screen(Protocol):
    """Where lines go. `first`, `every`: seconds until a trace's first line, and between two."""

    first: float
    every: float

    def show(self, text: str) -> None:
        """The line as it is now."""

    def end(self) -> None:
        """Nothing more comes: pytest's own output goes on where it was."""


class Narrator:
    """The progress of one test's traces. Called with what each rank reports; `end` takes the line away."""

    def __init__(self, name: str, screen: Screen, clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._screen, self._clock = name, screen, clock
        self._call = -1
        self._due = 0.0
        self._ranks: dict[int, Progress] = {}

    def __call__(self, record: Progress) -> None:
        """A rank has come this far."""
        now = self._clock()
        if record.call != self._call:
            self.end()
            self._call, self._due = record.call, now + self._screen.first
        self._ranks[record.rank] = record
        if now >= self._due:
            self._due = now + self._screen.every
            self._screen.show(line(self._name, list(self._ranks.values())))

    def end(self) -> None:
        """The trace is over."""
        if self._ranks:
            self._screen.end()
        self._ranks.clear()
        self._call = -1


def line(name: str, ranks: list[Progress]) -> str:
    """One line on where the ranks are: the place of the slowest, the bytes of the fullest."""
    slowest = min(ranks, key=lambda one: (one.cycle, one.step))
    live = words.size(max(one.live for one in ranks))
    return f"{name}: {_cycle(slowest)}, geometry {slowest.step + 1} of {slowest.steps}, live {live}"


def _cycle(record: Progress) -> str:
    if record.cycle < record.warmup:
        return "warm-up" if record.warmup == 1 else f"warm-up {record.cycle + 1} of {record.warmup}"
    least, most = record.cycles
    return f"cycle {record.cycle - record.warmup + 1} of {'at most ' if least < most else ''}{most}"


class Line:
    """A line of its own under pytest's on a terminal, rewritten in place and gone at the end."""

    first, every = QUIET, REDRAW

    def __init__(self, config: pytest.Config, terminal: pytest.TerminalReporter, nodeid: str) -> None:
        self._config, self._terminal, self._nodeid = config, terminal, nodeid
        self._shown = False

    def show(self, text: str) -> None:
        """Put `text` in the line's place, cut where the terminal ends."""
        writer = self._config.get_terminal_writer()
        with _uncaptured(self._config):
            if not self._shown:
                self._terminal.ensure_newline()
            writer.write(f"\r\x1b[2K{text[: writer.fullwidth - 1]}", flush=True)
        self._shown = True

    def end(self) -> None:
        """Erase the line; pytest begins its own in that place."""
        if not self._shown:
            return
        self._shown = False
        with _uncaptured(self._config):
            # pytest ends the line that the cursor is in before it names the file again: so the one above.
            self._config.get_terminal_writer().write("\r\x1b[2K\x1b[1A", flush=True)
            _name_again(self._config, self._terminal, self._nodeid)


class Log:
    """Lines that stay, for output that nobody can rewrite."""

    first = every = LOGGED

    def __init__(self, config: pytest.Config, terminal: pytest.TerminalReporter, nodeid: str) -> None:
        self._config, self._terminal, self._nodeid = config, terminal, nodeid
        self._within = False

    def show(self, text: str) -> None:
        """Write `text` as a line."""
        writer = self._config.get_terminal_writer()
        with _uncaptured(self._config):
            if self._within:
                writer.line()
            self._terminal.ensure_newline()
            writer.write(text, flush=True)
        self._within = True

    def end(self) -> None:
        """pytest begins a line of its own."""
        if self._within:
            with _uncaptured(self._config):
                _name_again(self._config, self._terminal, self._nodeid)
        self._within = False


def screen(config: pytest.Config, nodeid: str) -> Screen | None:
    """Where the progress of a test is to be seen in this process; None where it is not."""
    terminal = config.pluginmanager.getplugin("terminalreporter")
    if terminal is None or hasattr(config, "workerinput") or config.get_verbosity() < 0:
        return None
    rewritable = bool(terminal.isatty) and os.environ.get("TERM") != "dumb"
    return (Line if rewritable else Log)(config, terminal, nodeid)


def _name_again(config: pytest.Config, terminal: pytest.TerminalReporter, nodeid: str) -> None:
    """With a line a file the reporter names the file only as a test starts; with a line a test it does so by itself."""
    if not terminal.showlongtestinfo:
        terminal.write_fspath_result(nodeid, "")


def _uncaptured(config: pytest.Config) -> contextlib.AbstractContextManager[None]:
    capturing = config.pluginmanager.getplugin("capturemanager")
    return contextlib.nullcontext() if capturing is None else capturing.global_and_fixture_disabled()

"""Where in the user's code something happened: a stack as short texts, "file.py:41 in share", the user's line first.

A line of torch, of this package, of pytest or of the standard library's plumbing says nothing to the reader of a
report, so those frames are left out; `pytest_sglmem.reference` and `pytest_sglmem.checks` are programs under test and
stay in. A stack is taken as code objects and instructions (about 1 us), and worded only when somebody reads it.

It holds no frame (a held frame is held memory) and reads no source file.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from functools import lru_cache
from types import CodeType, FrameType
from typing import cast

__all__ = ["RawStack", "Stacks", "format_frames", "is_plumbing", "user_line", "user_stack", "words"]

RawStack = tuple["CodeType | int", ...]  # a code object, the instruction in it, the next code object, ...
Frame = tuple[str, int, str]

_HERE = os.path.dirname(os.path.abspath(__file__))
_USERS_OF_OURS = tuple(os.path.join(_HERE, name) + os.sep for name in ("reference", "checks"))
_PLUMBING_PACKAGES = (
    *("torch", "torchgen", "functorch"),
    *("pytest", "_pytest", "pluggy", "xdist", "execnet", "pytest_timeout"),
    *("cloudpickle", "multiprocess", "hypothesis"),
)
_SITE_DIRS = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)
_STDLIB = tuple({os.path.realpath(sysconfig.get_path(key)) + os.sep for key in ("stdlib", "platstdlib")})
# What called the code under test is the harness, and who called that says nothing.
_CALLERS = frozenset(os.path.join(_HERE, name) for name in ("rank.py", "tracing.py"))
_RUNNERS = frozenset({"pytest", "py.test", "torchrun"})
# Who runs a whole session: what called it (a script, xdist's worker) says nothing of a test's line.
_SESSION = (os.path.join("_pytest", "main.py"), os.path.join("xdist", "remote.py"))


def user_stack(skip: int = 0, limit: int = 12) -> tuple[str, ...]:
    """The stack of the caller as "file.py:41 in share", innermost user line first, at most `limit` lines.

    `skip`: how many of the innermost Python frames to pass over first, the caller's own being the first.
    """
    return words(Stacks().take(skip + 1, limit))


def user_line(skip: int = 0) -> tuple[str, int]:
    """File and line of the innermost user frame of the caller, `skip` frames passed over; ("", 0) where none is."""
    frame: FrameType | None = sys._getframe(skip + 1)
    while frame is not None and is_plumbing(frame.f_code.co_filename):
        frame = frame.f_back
    return (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("", 0)


class Stacks:
    """Takes stacks that are worded later, if ever: what `user_stack` words, as code objects and where in each.

    It learns which files are whose, so keep one and ask it often: a stack of twelve lines costs about 1 us. The line is
    left to be found from the instruction, because `frame.f_lineno` walks a table as long as the function.
    """

    __slots__ = ("_ends", "_plumbing", "_users")

    def __init__(self) -> None:
        self._users: set[str] = set()
        self._plumbing: set[str] = set()
        self._ends: set[str] = set()

    def take(self, skip: int = 0, limit: int = 12) -> RawStack:
        """The caller's stack, innermost user line first. It holds no frame. `skip` as for `user_stack`."""
        try:
            frame: FrameType | None = sys._getframe(skip + 1)
        except ValueError:  # fewer frames than were to be skipped
            return ()
        users, plumbing = self._users, self._plumbing
        found: list[CodeType | int] = []
        while frame is not None:
            code = frame.f_code
            name = code.co_filename
            if name in users:
                found.append(code)
                found.append(frame.f_lasti)
                limit -= 1
                if not limit:
                    break
            elif name in self._ends:
                break
            elif name not in plumbing:
                self._learn(name)
                continue
            frame = frame.f_back
        return tuple(found)

    def _learn(self, name: str) -> None:
        if not is_plumbing(name):
            self._users.add(name)
        elif name.endswith(_SESSION):
            self._ends.add(name)
        else:
            self._plumbing.add(name)

    def take_any(self, skip: int = 0, limit: int = 12) -> RawStack:
        """As `take`; where no line is the user's (the thread that feeds a queue), the plumbing's own lines."""
        return self.take(skip + 1, limit) or _whole_stack(skip + 1, limit)


def _whole_stack(skip: int, limit: int) -> RawStack:
    frame: FrameType | None = sys._getframe(skip + 1)
    found: list[CodeType | int] = []
    while frame is not None and len(found) < 2 * limit:
        found += (frame.f_code, frame.f_lasti)
        frame = frame.f_back
    return tuple(found)


def words(raw: RawStack) -> tuple[str, ...]:
    """The text of each line of a stack that `Stacks` took, paths as seen from the current directory."""
    cwd = _cwd()
    parts = iter(raw)
    pairs = cast("Iterable[tuple[CodeType, int]]", zip(parts, parts, strict=True))
    return tuple([_text(code.co_filename, _line(code, at), code.co_name, cwd) for code, at in pairs])


def _line(code: CodeType, instruction: int) -> int:
    """The line of the instruction at this offset, as `frame.f_lineno` says it."""
    lines = (line for start, end, line in code.co_lines() if start <= instruction < end)
    return next(lines, None) or code.co_firstlineno


def format_frames(frames: Iterable[Mapping[str, object] | Frame], limit: int = 12) -> tuple[str, ...]:
    """The same text for frames that torch's allocator recorded (mappings with `filename`, `line`, `name`) or for plain
    `(filename, line, name)`, innermost first; at most `limit` lines.
    """
    cwd = _cwd()
    lines: list[str] = []
    for frame in frames:
        if isinstance(frame, tuple):
            filename, line, name = frame
        else:
            filename, line, name = str(frame["filename"]), frame["line"], frame["name"]  # type: ignore[assignment]
        if filename in _CALLERS:
            break
        if not is_plumbing(filename):
            lines.append(_text(filename, line, name, cwd))
            if len(lines) == limit:
                break
    return tuple(lines)


@lru_cache(maxsize=8192)
def is_plumbing(filename: str) -> bool:
    """Whether code of this file is left out of a stack: torch, this package, pytest, the standard library."""
    if filename.startswith(("<frozen ", "<eval_with_key>")) or not filename or filename == "??":
        return True
    if filename.startswith("<"):  # python -c, exec, a notebook's cell: the user's
        return False
    path = os.path.abspath(filename)
    if path.startswith(_HERE + os.sep):
        return not path.startswith(_USERS_OF_OURS)
    if path.startswith(_plumbing_roots()) or _installed_package(path) in _PLUMBING_PACKAGES:
        return True
    return _of_standard_library(path) or os.path.basename(path) in _RUNNERS


def _plumbing_roots() -> tuple[str, ...]:
    """The folders (with a separator at the end) or single files of the packages that count as plumbing."""
    roots = []
    for name in _PLUMBING_PACKAGES:
        file = getattr(sys.modules.get(name), "__file__", None)
        if not file:
            continue
        is_package = os.path.basename(file).startswith("__init__.")
        roots.append(os.path.dirname(file) + os.sep if is_package else file)
    return tuple(roots)


def _installed_package(path: str) -> str | None:
    """The first part of the path below site-packages; None for what is not installed there."""
    for site in _SITE_DIRS:
        if site in path:
            return path.rpartition(site)[2].split(os.sep)[0]
    return None


def _of_standard_library(path: str) -> bool:
    return _installed_package(path) is None and os.path.realpath(path).startswith(_STDLIB)


def _cwd() -> str:
    try:
        return os.getcwd() + os.sep
    except FileNotFoundError:  # the current directory was removed
        return os.sep


@lru_cache(maxsize=8192)
def _text(filename: str, line: int, name: str, cwd: str) -> str:
    return f"{_shown(filename, cwd)}:{line} in {name}"


def _shown(filename: str, cwd: str) -> str:
    """The path as a reader wants it: relative to the current directory where below it, else its last two parts."""
    if filename.startswith("<"):
        return filename
    path = os.path.abspath(filename)
    if path.startswith(cwd) and cwd != os.sep:
        return path[len(cwd) :]
    return os.sep.join(path.split(os.sep)[-2:])

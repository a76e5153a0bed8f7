"""What a test asks for by a marker, read and checked before anything runs.

`@pytest.mark.world(size=8, backend="gloo")` becomes a `WorldAsked`, `@pytest.mark.inject(FAULT, ...)` some faults,
`@pytest.mark.survives(FAULT, ..., reason="...")` the reason for each. An unknown keyword or an impossible value is a
`pytest.UsageError` that echoes it and names the test's file and line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

import pytest

if TYPE_CHECKING:
    from .faults import Fault

Scope = Literal["function", "module", "session"]
SCOPES: tuple[Scope, ...] = ("function", "module", "session")
MARKERS = (
    "gc_tracking: counts GC-tracked objects (added by itself to every test that uses gc_tracked)",
    "gpu_memory: judges live bytes (added by itself to every test that uses live_bytes)",
    "world(size=, sizes=[...], min_size=, backend=, scope='function', init=True): the ranks that a test's world has",
    "inject(FAULT, ...): run the test under these faults (pytest --sglmem-faults lists them)",
    "survives(FAULT, ..., reason=): --sglmem-prove need not find these faults (without any: all) noticed by this test",
)


class WorldAsked(NamedTuple):
    """A `world` marker. `size` None: what `--sglmem-world` says; `backend` None: what suits the device."""

    size: int | None = None
    sizes: tuple[int, ...] = ()
    min_size: int = 1
    backend: str | None = None
    scope: Scope = "function"
    init: bool = True


def place(node: pytest.Item | pytest.Function) -> str:
    """Where a test stands, as in "marker of test_x at tests/test_a.py:12"."""
    path, line, name = node.location
    return f"marker of {name} at {path}:{(line or 0) + 1}"


def world_asked(mark: pytest.Mark | None, origin: str) -> WorldAsked:
    """What the marker says, checked. No marker asks for nothing in particular. Raises pytest.UsageError."""
    if mark is None:
        return WorldAsked()
    if mark.args:
        raise pytest.UsageError(
            f"world{mark.args!r} ({origin}): should be keywords, such as world(size={mark.args[0]!r})"
        )
    known = WorldAsked._fields
    for keyword in mark.kwargs:
        if keyword not in known:
            raise pytest.UsageError(
                f"world({keyword}=...) ({origin}): unknown keyword, should be one of {', '.join(known)}"
            )
    asked = dict(mark.kwargs)
    for keyword in ("size", "min_size"):
        if asked.get(keyword) is not None:
            _whole(keyword, asked[keyword], origin)
    if "sizes" in asked:
        asked["sizes"] = _sizes(asked["sizes"], origin)
        if asked.get("size") is not None:
            raise pytest.UsageError(f"world(size={asked['size']!r}, sizes=...) ({origin}): should be one of the two")
    if asked.get("scope", "function") not in SCOPES:
        raise pytest.UsageError(f"world(scope={asked['scope']!r}) ({origin}): should be one of {', '.join(SCOPES)}")
    if not isinstance(asked.get("init", True), bool):
        raise pytest.UsageError(f"world(init={asked['init']!r}) ({origin}): should be True or False")
    if not isinstance(asked.get("backend", ""), str | None):
        raise pytest.UsageError(f"world(backend={asked['backend']!r}) ({origin}): should be a name such as 'gloo'")
    if asked.get("backend") is not None:
        from .launch import wrong_backend

        if right := wrong_backend(asked["backend"]):
            raise pytest.UsageError(f"world(backend={asked['backend']!r}) ({origin}): should be {right}")
    return WorldAsked(**asked)


def faults_asked(marks: Sequence[pytest.Mark], origin: str) -> tuple[Fault, ...]:
    """The faults of a test's `inject` markers, the nearest first. Raises pytest.UsageError."""
    texts = [text for mark in marks for text in mark.args]
    if any(mark.kwargs or not mark.args for mark in marks):
        raise pytest.UsageError(f"inject ({origin}): should be one or more faults, such as inject('ipc.collect=skip')")
    return parse_faults(texts, origin)


def exemptions(marks: Iterable[pytest.Mark], origin: str) -> Mapping[str, str]:
    """Fault or point -> reason, of a test's `survives` markers; "" stands for every fault. Raises pytest.UsageError."""
    found: dict[str, str] = {}
    for mark in marks:
        reason = mark.kwargs.get("reason")
        if set(mark.kwargs) != {"reason"} or not isinstance(reason, str) or not reason.strip():
            raise pytest.UsageError(
                f"survives ({origin}): should be faults and a reason, survives(FAULT, ..., reason='...')"
            )
        for text in mark.args or ("",):
            found.setdefault(_fault_or_point(text, origin) if mark.args else "", reason)
    return MappingProxyType(found)


def _fault_or_point(text: object, origin: str) -> str:
    """What an exemption is for, as the proof names it. One for what no proof ever tries would be without effect."""
    from .faults import POINTS
    from .proof import tried

    named = text if isinstance(text, str) and text in POINTS else parse_faults([text], origin)[0].text
    if not tried(named):
        point = re.split("[@=]", named)[0]
        does = f"of {point} it tries {', '.join(tried(point))}" if tried(point) else f"it tries nothing at {point}"
        raise pytest.UsageError(f"survives({text!r}) ({origin}): --sglmem-prove never tries this; {does}")
    return named


def parse_faults(texts: Sequence[object], origin: str) -> tuple[Fault, ...]:
    """Texts as faults. Raises pytest.UsageError, with what `faults.parse` says is wrong."""
    if not texts:
        return ()
    from .faults import FaultError, parse

    try:
        return tuple(parse(cast(str, text), origin=origin) for text in texts)
    except FaultError as error:
        raise pytest.UsageError(str(error)) from None


def _whole(keyword: str, value: object, origin: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise pytest.UsageError(f"world({keyword}={value!r}) ({origin}): should be a whole number of at least 1")
    return value


def _sizes(values: object, origin: str) -> tuple[int, ...]:
    if not isinstance(values, list | tuple) or not values:
        raise pytest.UsageError(
            f"world(sizes={values!r}) ({origin}): should be a list of whole numbers, such as [2, 4, 8]"
        )
    return tuple(_whole("sizes", value, origin) for value in values)

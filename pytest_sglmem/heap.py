"""The cyclic collector's heap of this process: counts, types, and leaving its settings as they were.

Counts are live plus frozen objects, because servers freeze their heap (`gc.freeze()`) and `gc.get_objects()` is then
empty. What is compared is counted after `settle()`: garbage cycles are gone, and tuples and dictionaries that the
interpreter stops tracking at a collection have had that collection.

Up to CPython 3.10 an instance's attributes are a tracked dictionary beside it; later interpreters keep them in the
instance. Growth counts both as one (`surplus`), so that it reads the same on every interpreter; `tracked` does not.
It uses what it captured from `gc` at import, so that a fault injected into `gc` strikes the code under test only.
"""

from __future__ import annotations

import gc
import sys
import time
import types
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from itertools import compress

_collect, _enable, _disable, _objects, _frozen = gc.collect, gc.enable, gc.disable, gc.get_objects, gc.get_freeze_count
_freeze, unfreeze = gc.freeze, gc.unfreeze
_SEPARATE_ATTRIBUTES = sys.version_info < (3, 11)
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class made by a class statement
_BARE = 2000  # fewer frozen objects are CPython's own: 3.12 sets immortal ones aside in every collection, whereas
# gc.freeze() freezes all there is, and that is 5,000 objects in an interpreter that has imported nothing
_PASSES = 8  # a tuple in a tuple is untracked one pass after its content; deeper nests than this are rare


def tracked() -> int:
    """Objects in the collector's care: live plus frozen."""
    return len(_objects()) + _frozen()


def walked() -> int:
    """Objects that a full collection walks: the live ones."""
    return len(_objects())


def newest(old: int) -> array[int]:
    """Ids of the live objects after the first `old`: what was tracked since there were `old` of them."""
    return array("Q", map(id, _objects()[old:]))


def comparable(ignored: Sequence[str] = ()) -> int:
    """What growth compares: `tracked`, attributes and instance as one, without the types that `ignored` fits."""
    objects = _objects()
    hidden = sum(n for kind, n in _kinds(objects).items() if matches(full_name(kind), ignored)) if ignored else 0
    return len(objects) + _frozen() - surplus(objects) - hidden


def bound_to(owner: object) -> int:
    """Bound methods of `owner` that are alive, as those of a context manager are while it is entered and left."""
    return sum(type(item) is types.MethodType and item.__self__ is owner for item in _objects())


def by_type() -> dict[str, int]:
    """Live objects by the full name of their type, attributes and instance as one.

    Keeps neither objects nor types alive. No interpreter lists frozen objects, so they show no type.
    """
    objects = _objects()
    counts: dict[str, int] = {}
    kinds = _kinds(objects)
    for kind, count in kinds.items():
        name = full_name(kind)
        counts[name] = counts.get(name, 0) + count
    if _SEPARATE_ATTRIBUTES:
        counts["builtins.dict"] -= surplus(objects, kinds)
    return counts


def _kinds(objects: Iterable[object]) -> Counter[type]:
    return Counter(map(type, objects))


def collect() -> None:
    """A full collection that the application's callbacks and debug flags do not notice."""
    callbacks, debug = gc.callbacks[:], gc.get_debug()
    gc.callbacks.clear()
    gc.set_debug(0)
    try:
        _collect()
    finally:
        gc.set_debug(debug)
        gc.callbacks[:] = callbacks


def settle(clock: Callable[[], float] = time.perf_counter) -> float:
    """Collect until the count stays; returns the seconds that the quickest of the passes took."""
    count, quickest = -1, float("inf")
    for _ in range(_PASSES):
        begun = clock()
        collect()
        quickest = min(quickest, clock() - begun)
        before, count = count, len(_objects())
        if count == before:
            break
    return quickest


@contextmanager
def settings_kept() -> Iterator[None]:
    """Thresholds, enabled state, debug flags, callbacks and freeze state are afterwards as they were."""
    enabled, thresholds, debug, callbacks = gc.isenabled(), gc.get_threshold(), gc.get_debug(), gc.callbacks[:]
    froze, aside = application_froze(), _frozen()
    try:
        yield
    finally:
        if not froze and application_froze():
            unfreeze()
        if aside and not _frozen():
            collect()  # puts what the interpreter itself had set aside there again
        gc.callbacks[:] = callbacks
        gc.set_debug(debug)
        gc.set_threshold(*thresholds)
        (_enable if enabled else _disable)()


@contextmanager
def set_aside() -> Iterator[None]:
    """Freeze what is there, so that collecting and counting cost what is new; thaw it afterwards.

    Does nothing where the application froze its heap (thawing would thaw that too), nor where an interpreter lists
    frozen objects as live, which is seen by its doing so.
    """
    if application_froze():
        yield
        return
    before = tracked()
    _freeze()
    try:
        if tracked() > before + before // 2:
            unfreeze()
        yield
    finally:
        unfreeze()


def application_froze() -> bool:
    """Whether somebody called `gc.freeze()`, and has not thawed since."""
    return _frozen() >= _BARE


def surplus(objects: Sequence[object], kinds: Iterable[type] | None = None) -> int:
    """How many of `objects` keep their attributes in a tracked dictionary beside them (CPython 3.10; later: 0).

    `kinds`: their types, where the caller knows them.
    """
    if not _SEPARATE_ATTRIBUTES:
        return 0
    wanted = {kind for kind in kinds or set(map(type, objects)) if _has_attributes(kind)}
    instances = compress(objects, map(wanted.__contains__, map(type, objects)))
    return sum(attribute_dict(item) is not None for item in instances)


def _has_attributes(kind: type) -> bool:
    if not kind.__flags__ & _HEAP_TYPE or not kind.__dictoffset__:
        return False
    return not issubclass(kind, (type, BaseException))  # those keep a dictionary in every version


def attribute_dict(item: object) -> dict[str, object] | None:
    """The tracked attribute dictionary of an instance, None where there is none yet. Makes none."""
    for part in gc.get_referents(item):
        if type(part) is dict and gc.is_tracked(part) and object.__getattribute__(item, "__dict__") is part:
            return part
    return None


def full_name(kind: type) -> str:
    """Module and qualified name: what tells two types of one short name apart."""
    return f"{kind.__module__}.{kind.__qualname__}"


def short_name(name: str) -> str:
    """The last part of a full name."""
    return name.rpartition(".")[2]


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns (fnmatch) fits the type's full name or its last part."""
    return any(fnmatchcase(name, pattern) or fnmatchcase(short_name(name), pattern) for pattern in patterns)

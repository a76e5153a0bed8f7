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
import itertools
import struct
import sys
import time
import types
import weakref
from array import array
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import compress, repeat
from operator import is_
from typing import NamedTuple, cast

_collect, _enable, _disable, _objects, _frozen = gc.collect, gc.enable, gc.disable, gc.get_objects, gc.get_freeze_count
_freeze, unfreeze = gc.freeze, gc.unfreeze
_SEPARATE_ATTRIBUTES = sys.version_info < (3, 11)
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class made by a class statement
_BARE = 2000  # fewer frozen objects are CPython's own: 3.12 sets immortal ones aside in every collection, whereas
# gc.freeze() freezes all there is, and that is 5,000 objects in an interpreter that has imported nothing
_PASSES = 8  # a tuple in a tuple is untracked one pass after its content; deeper nests than this are rare
_CHUNK = 1024  # objects that are looked at twice while they are in the processor's cache
_FEW = 30_000  # frozen objects that are asked for every time: 0.1 us each, once they have left the processor's cache
_LRU = type(lru_cache(lambda: None))
_POINTER = struct.calcsize("P")


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
    return _comparable(_objects(), ignored) + _frozen()


def _comparable(objects: Sequence[object], ignored: Sequence[str]) -> int:
    if not (ignored or _SEPARATE_ATTRIBUTES):
        return len(objects)
    kinds, surplus = _census(objects)
    hidden = sum(n for kind, n in kinds.items() if matches(full_name(kind), ignored)) if ignored else 0
    return len(objects) - surplus - hidden


def comparable_of(ids: Collection[int], ignored: Sequence[str] = ()) -> int:
    """The same of the live objects with these ids."""
    return _comparable(_of(ids), ignored)


def _of(ids: Collection[int]) -> list[object]:
    return [item for item in _objects() if id(item) in ids]


class Room(NamedTuple):
    """A container that stops growing by itself: entries held, and at most."""

    held: int
    most: int


def room(item: object) -> Room | None:
    """Of a deque with a maxlen and of a functools.lru_cache with a maxsize. None for all else: where the code around a
    container keeps the bound, it cannot be known.
    """
    if issubclass(type(item), deque):
        ring = cast("deque[object]", item)
        most = deque.maxlen.__get__(ring)  # of the base: a subclass may answer by code of its own
        return None if most is None else Room(deque.__len__(ring), most)
    if type(item) is _LRU:
        info = item.cache_info()
        return None if info.maxsize is None else Room(info.currsize, info.maxsize)
    return None


def bounded() -> dict[int, tuple[object, Room]]:
    """The live containers that have `room`, by id, and that."""
    items = (item for item in _objects() if issubclass(type(item), (deque, _LRU)))
    return {id(item): (item, known) for item in items if (known := room(item)) is not None}


def lengths() -> dict[int, int]:
    """Entries of each live container that has `room`, by its id."""
    return {which: known.held for which, (_, known) in bounded().items()}


def entries_of(item: object, ids: Collection[int]) -> int:
    """Of a container that has `room`: how many entries refer to an object with one of these ids."""
    parts = gc.get_referents(item)
    if type(item) is not _LRU:
        return sum(id(part) in ids for part in parts)
    found, hit = 0, False
    for part in parts:  # a cache refers to the key, the result and the type of each link in turn
        if type(part) is type and part.__name__ == "_lru_list_elem":
            found, hit = found + hit, False
        hit = hit or id(part) in ids
    return found


def index_of(item: object) -> int:
    """The id of the dictionary in which a functools.lru_cache looks its entries up; 0 for all else."""
    if type(item) is not _LRU:
        return 0
    return next((id(part) for part in gc.get_referents(item) if type(part) is dict and _is_index(part)), 0)


def weak_entries(ids: Collection[int], of: Collection[int]) -> set[int]:
    """Of the live objects with these `ids`: the references that a WeakValueDictionary, WeakSet or WeakKeyDictionary
    keeps to objects with ids in `of`. They go when those go, by the container's own callback.
    """
    kept = (item for item in _of(ids) if issubclass(type(item), weakref.ref))  # isinstance would ask the object
    return {id(item) for item in kept if _is_entry(cast("weakref.ref[object]", item), of)}


def _is_entry(reference: weakref.ref[object], of: Collection[int]) -> bool:
    by = getattr(reference.__callback__, "__module__", None)
    return by in ("weakref", "_weakrefset") and id(weakref.ref.__call__(reference)) in of


def _is_index(found: dict[object, object]) -> bool:
    return any(type(value).__name__ == "_lru_list_elem" for value in itertools.islice(dict.values(found), 1))


def bound_to(owner: object) -> int:
    """Bound methods of `owner` that are alive, as those of a context manager are while it is entered and left."""
    return sum(type(item) is types.MethodType and item.__self__ is owner for item in _objects())


def by_type(ids: Collection[int] | None = None) -> dict[str, int]:
    """Live objects by the full name of their type, attributes and instance as one. `ids`: of these only.

    Keeps neither objects nor types alive. No interpreter lists frozen objects, so they show no type.
    """
    counts: dict[str, int] = {}
    kinds, surplus = _census(_objects() if ids is None else _of(ids))
    for kind, count in kinds.items():
        name = full_name(kind)
        counts[name] = counts.get(name, 0) + count
    if surplus:
        counts["builtins.dict"] -= surplus
    return counts


def collect(generation: int = 2) -> None:
    """A collection, by default a full one, that the application's callbacks and debug flags do not notice."""
    callbacks, debug = gc.callbacks[:], gc.get_debug()
    gc.callbacks.clear()
    gc.set_debug(0)
    try:
        _collect(generation)
    finally:
        gc.set_debug(debug)
        gc.callbacks[:] = callbacks


def settle(clock: Callable[[], float] = time.perf_counter, *, passes: int = 1) -> float:
    """Collect until the count stays, at least `passes` times; returns the seconds of the quickest pass."""
    collect(1)  # what is young goes now, so that mostly the first full pass finds nothing to change
    count, quickest = len(_objects()), float("inf")
    for done in range(1, _PASSES + 1):
        begun = clock()
        collect()
        quickest = min(quickest, clock() - begun)
        before, count = count, len(_objects())
        if count == before and done >= passes:
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
def set_aside(ignored: Sequence[str] = ()) -> Iterator[SetAside]:
    """Freeze what is there, so that collecting and counting cost what is new; thaw it afterwards.

    Does nothing where the application froze its heap (thawing would thaw that too), nor where an interpreter lists
    frozen objects as live, which is seen by its doing so.
    """
    aside = SetAside(ignored)
    if application_froze():
        yield aside
        return
    _freeze()
    try:
        if aside.listed():
            unfreeze()
        yield aside
    finally:
        unfreeze()


class SetAside:
    """What there is more than when it was set aside. `disturbed`: whether somebody else has frozen or thawed since.

    Counting needs how many of the frozen are still alive. Asking that walks them all, so it is asked for seldom where
    they are many: while no answer differs from the one before, the last one stands, and the count is never too low.
    """

    def __init__(self, ignored: Sequence[str] = ()) -> None:
        self._ignored = ignored
        self._mark: list[object] = []
        self._alive = self._begun = self._listed = 0
        self._changing = self.disturbed = False

    def begin(self) -> None:
        """Count from here: not from within `set_aside`, because the entering of a block leaves objects behind."""
        self._set_mark()
        self._begun = self._count(True)  # no keyword: before 3.11 such a call makes an object
        self._changing = True  # until an answer is like the one before

    def listed(self) -> bool:
        """Whether this object, which was frozen, is listed as live."""
        return bool(self._list(_objects()) & 1)

    def rise(self, ask: bool = True) -> int:
        """How many more. `ask`: whether this must be exact, also where that costs."""
        return self._count(ask) - self._begun

    def _count(self, ask: bool) -> int:
        objects = _objects()
        if self._list(objects) != self._listed:
            self.disturbed = ask = True
            if not self._listed & 1:  # frozen here, so it stays frozen: what is counted then stays the same
                _freeze()
            self._set_mark()
            objects = _objects()
        if ask or self._changing or self._alive < _FEW:
            before, self._alive = self._alive, _frozen()
            self._changing = self._alive != before
        return _comparable(objects, self._ignored) + self._alive

    def _set_mark(self) -> None:
        self._mark = []  # made after the freezing, as this object was before
        self._listed = self._list(_objects())

    def _list(self, objects: Sequence[object]) -> int:
        """Which of the two are live: thawing changes it for this object, freezing for its mark."""
        return any(map(is_, objects, repeat(self))) + 2 * any(map(is_, objects, repeat(self._mark)))


def application_froze() -> bool:
    """Whether somebody called `gc.freeze()`, and has not thawed since."""
    return _frozen() >= _BARE


def _census(objects: Sequence[object]) -> tuple[Counter[type], int]:
    """How many of each type, and how many keep their attributes in a tracked dictionary beside them (CPython 3.10)."""
    if not _SEPARATE_ATTRIBUTES:
        return Counter(map(type, objects)), 0
    kinds: Counter[type] = Counter()
    plain: dict[type, bool] = {}
    others: dict[type, bool] = {}
    surplus = 0
    for start in range(0, len(objects), _CHUNK):
        chunk = objects[start : start + _CHUNK]
        here = Counter(map(type, chunk))
        for kind, count in here.items():
            if kind not in plain:
                apart = _has_attributes(kind)
                plain[kind] = apart and _is_plain(next(item for item in chunk if type(item) is kind))
                others[kind] = apart and not plain[kind]
            kinds[kind] += count
        if any(map(plain.__getitem__, here)):
            surplus += _tracked_attributes(list(compress(chunk, map(plain.__getitem__, map(type, chunk)))))
        if any(map(others.__getitem__, here)):
            instances = compress(chunk, map(others.__getitem__, map(type, chunk)))
            surplus += sum(attribute_dict(item) is not None for item in instances)
    return kinds, surplus


def _tracked_attributes(instances: list[object]) -> int:
    """How many of these plain instances have a tracked dictionary: all they refer to but their tracked types."""
    return list(map(gc.is_tracked, gc.get_referents(*instances))).count(True) - len(instances)


def _has_attributes(kind: type) -> bool:
    if not kind.__flags__ & _HEAP_TYPE or not kind.__dictoffset__:
        return False
    return not issubclass(kind, (type, BaseException))  # those keep a dictionary in every version


def _is_plain(instance: object) -> bool:
    """Whether it refers to its type and has room for a dictionary besides: no slots, no items, no parts in C."""
    kind = type(instance)
    if kind.__itemsize__ or kind.__dictoffset__ != object.__basicsize__:
        return False
    if kind.__basicsize__ > kind.__dictoffset__ + 2 * _POINTER:  # the dictionary and the weak references
        return False
    return sum(part is kind for part in gc.get_referents(instance)) == 1


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

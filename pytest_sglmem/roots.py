"""Who grows: from the roots of the process (modules, running frames) down to the holders of what is new.

The search goes forward, level by level, because `gc.get_referrers` sees no frozen container, and a server's history
often hangs from one. An old object that holds new ones is a grower; the new ones behind it are counted, so that the
largest grower is named first, with the chain that leads to it: `app.SERVER -> .history -> [599] -> tuple`.

It looks when a verdict has fallen: it makes attribute dictionaries of the instances on a chain, and holds nothing
afterwards. What hangs from C alone (an exit handler, another thread's context) has no chain; its nearest holder is
named.
"""

from __future__ import annotations

import contextvars
import gc
import itertools
import os
import reprlib
import sys
import sysconfig
import threading
import tracemalloc
import types
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeGuard, TypeVar

from . import heap

T = TypeVar("T")

_HERE = os.path.dirname(__file__) + os.sep
_STDLIB = sysconfig.get_path("stdlib") + os.sep
_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType)
_MACHINERY = ("_pytest", "pluggy")  # frames between the interpreter and the test
_CHUNK = 512  # objects whose referents are asked for in one call
_LONGEST = 10  # links of a chain that are shown
_MOST = 3  # growers that are named
_SHARE = 0.1  # of the new objects: a grower with less is not worth a line


@dataclass(frozen=True, eq=False)
class _Grower:
    level: int
    holder: object
    child: object
    objects: int


class _Root(NamedTuple):
    label: str
    value: object


def search(new: Collection[int], append: object = None, loop: object = None) -> Search:
    """Look for what holds the objects whose ids are in `new`.

    `append` is one more root, the function under test and what it closes over; `loop` another, in which it runs.
    """
    given = _Root("append", append), _Root("its event loop", loop)
    found = Search(frozenset(new), [*_frames(), *given, *_context(), *_modules()])
    found.run()
    return found


def growers(search: Search, behind: frozenset[int] = frozenset()) -> tuple[str, ...]:
    """Chains from a root to what holds the new objects, the largest grower first. `behind`: ids of those that do not
    count.
    """
    new = search.new - behind
    best = sorted(search.found, key=lambda grower: -grower.objects)[:_MOST]
    lines = [search.chain(grower) for grower in best if grower.objects >= _SHARE * len(new)]
    return tuple(lines or list(_unrooted(new)))  # not tuple(generator): get_referrers would see it unfinished


def futures(new: Collection[int]) -> str:
    """Where the tasks and futures whose ids are in `new` were made, the most frequent places; empty where untold."""
    asyncio = sys.modules.get("asyncio")
    if asyncio is None:
        return ""
    wanted = frozenset(new)
    left = (item for item in gc.get_objects() if _is(item, asyncio.Future) and id(item) in wanted)
    places = Counter((type(item).__name__, place) for item in left if (place := _made(item)))
    return ", ".join(f"{kind} made at {place}" for (kind, place), _ in places.most_common(_MOST))


class Filling(NamedTuple):
    """`holders`: chains to containers that a bound will stop; `behind`: ids of what only their new entries hold;
    `share`: how much of that made them longer, where the rest took the place of something; `beside`: what is found
    besides; `cut`: ids of the containers, `shut`: of the dictionaries in which they look their entries up.
    """

    holders: tuple[str, ...]
    behind: frozenset[int]
    share: float
    beside: Search
    cut: frozenset[int] = frozenset()
    shut: frozenset[int] = frozenset()


def filling(every: Search, lengths: Mapping[int, int]) -> Filling:
    """What of the new objects hangs from nothing but new entries of containers that will stop growing by themselves
    (`heap.room`). What is new in an older entry is not behind them, nor what else holds, too. `lengths`: their lengths
    by id before the new objects came.
    """
    longer: dict[int, float] = {}
    shut: set[int] = set()
    beside, candidates = every, [item for item, _ in heap.bounded().values()]
    while True:  # who holds what another bounded container holds as well is found when that one is cut
        found = [*candidates, *(grower.holder for grower in beside.found)]
        fresh = {
            id(item): share for item in found if id(item) not in longer and (share := _longer(item, every, lengths))
        }
        if not fresh:
            break
        shut.update(heap.index_of(item) for item in found if id(item) in fresh)
        longer.update(fresh)
        beside, candidates = Search(every.new, every.roots, frozenset(longer), frozenset(shut)), []
        beside.run()
    named = sorted((grower for grower in every.found if id(grower.holder) in longer), key=lambda one: -one.objects)
    behind = _and_weak_entries(every, beside)
    if not named or not behind:
        return Filling((), frozenset(), 0.0, every)
    chains = tuple(f"{every.chain(grower)}, {_fullness(grower.holder)}" for grower in named[:_MOST])
    share = sum(grower.objects * longer[id(grower.holder)] for grower in named) / sum(one.objects for one in named)
    return Filling(chains, behind, share, beside, frozenset(longer), frozenset(shut))


def behind(new: Collection[int], found: Filling) -> frozenset[int]:
    """Ids of what, of the objects with ids in `new`, hangs from nothing but the containers that are `found` to fill."""
    wanted, roots = frozenset(new), found.beside.roots
    every, beside = Search(wanted, roots), Search(wanted, roots, found.cut, found.shut)
    every.run()
    beside.run()
    return _and_weak_entries(every, beside)


def _and_weak_entries(every: Search, beside: Search) -> frozenset[int]:
    """Ids of what only `every` reached, and of what weak containers hold for it alone."""
    behind = every.reached - beside.reached
    return frozenset(behind | heap.weak_entries(every.new - behind, behind)) if behind else frozenset()


def _longer(holder: object, every: Search, lengths: Mapping[int, int]) -> float:
    """Which share of a bounded container's new entries made it longer; 0 where it has no bound or is no longer, and
    where it is itself new.
    """
    room = heap.room(holder)
    if room is None or id(holder) in every.new:
        return 0.0
    entries = heap.entries_of(holder, every.new)
    grown = room.held - lengths[id(holder)] if id(holder) in lengths else entries * (room.held < room.most)
    return min(grown / entries, 1.0) if grown > 0 and entries else 0.0


def _fullness(holder: object) -> str:
    room = heap.room(holder)
    return f"{room.held:,} of at most {room.most:,} held" if room else ""


class Search:
    """Breadth first over what is tracked. `levels[k]`: the old objects k references away from a root; `reached`: ids of
    the new ones; `cut`: ids of containers whose new entries do not count; `shut`: ids of what is not looked into.
    """

    def __init__(
        self,
        new: frozenset[int],
        roots: list[_Root],
        cut: frozenset[int] = frozenset(),
        shut: frozenset[int] = frozenset(),
    ) -> None:
        self.new = new
        self.cut = cut
        self.roots = roots
        self.levels: list[list[object]] = [[root.value for root in roots]]
        self.found: list[_Grower] = []
        self.reached: set[int] = set()
        self._seen = {id(item) for item in (self, self.roots, self.levels, self.found, *self.levels[0])} | shut

    def run(self) -> None:
        """Go down until all that is new is reached, or nothing is left to look into."""
        while self.levels[-1] and len(self.reached) < len(self.new):
            below: list[object] = []
            self._seen.add(id(below))
            level = self.levels[-1]
            for start in range(0, len(level), _CHUNK):
                self._look(level[start : start + _CHUNK], below)
            self.levels.append(below)

    def _look(self, holders: list[object], below: list[object]) -> None:
        hit = False
        for item in _parts(*holders):
            if id(item) in self._seen:
                continue
            if id(item) in self.new:
                hit = True
            elif gc.is_tracked(item):
                self._seen.add(id(item))
                below.append(item)
        if hit:
            for holder in holders:
                if id(holder) not in self.cut:
                    self._count(holder)

    def _count(self, holder: object) -> None:
        """Add up the new objects behind this holder that nobody before it reached."""
        child, count = None, 0
        for item in _parts(holder):
            if id(item) in self.new and id(item) not in self.reached:
                child, count = item, count + self._flood(item)
        if count:
            self.found.append(_Grower(len(self.levels) - 1, holder, child, count))

    def _flood(self, item: object) -> int:
        before, waiting = len(self.reached), [item]
        self.reached.add(id(item))
        while waiting:
            for part in _parts(waiting.pop()):
                if id(part) in self.new and id(part) not in self.reached:
                    self.reached.add(id(part))
                    waiting.append(part)
        return len(self.reached) - before

    def chain(self, grower: _Grower) -> str:
        """The way from a root to what the grower holds, as text."""
        path = self._path(grower)
        label = next((root.label for root in self.roots if root.value is path[0]), "...")
        links = list(_links([*path, grower.child]))
        if len(links) > _LONGEST:
            links[_LONGEST // 2 : -_LONGEST // 2] = [f"... {len(links) - _LONGEST} more ..."]
        kind = type(grower.child).__name__
        first, rest = (label + links[0], links[1:]) if links and links[0].startswith(".") else (label, links)
        made = _made(grower.child)
        return " -> ".join([first, *rest, kind]) + (f" (made at {made})" if made else "")

    def _path(self, grower: _Grower) -> list[object]:
        """From a root down to the grower; from where it is known on, if something has let go of it meanwhile."""
        path = [grower.holder]
        for level in range(grower.level - 1, -1, -1):
            above = _above(self.levels[level], path[-1])
            if not above:
                break
            path += above
        path.reverse()
        return path


def _above(level: list[object], item: object) -> list[object]:
    """What of a level holds the item, nearest first: also through a dictionary of attributes, which an instance may
    have been given since the search.
    """
    for holder in level:
        parts = _parts(holder)
        if _among(item, parts):
            return [holder]
        for part in parts:
            if type(part) is dict and _own_dict(holder) is part and _among(item, _parts(part)):
                return [part, holder]
    return []


def _among(item: object, parts: list[object]) -> bool:
    return any(part is item for part in parts)


def _is(item: object, kind: type[T] | tuple[type[T], ...]) -> TypeGuard[T]:
    """isinstance by the real type: an object that answers for `__class__` itself would run its own code."""
    return issubclass(type(item), kind)


def _parts(*holders: object) -> list[object]:
    """What the holders refer to. Modules are asked for nothing: their dictionaries are roots, and what else an
    extension module shows may be dead (CPython 3.12.0-1: `_asyncio` hands out iterators from its free list).
    """
    return gc.get_referents(*(item for item in holders if not issubclass(type(item), types.ModuleType)))


def _modules() -> Iterator[_Root]:
    for name, module in list(sys.modules.items()):
        if _is(module, types.ModuleType):
            yield _Root(name, _own_dict(module))


def _context() -> Iterator[_Root]:
    """The context variables that are set here: the current context hangs from C alone."""
    for variable, value in contextvars.copy_context().items():
        yield _Root(f"ContextVar {variable.name}", value)


def _frames() -> Iterator[_Root]:
    """The local variables of every running frame that is neither ours nor pytest's machinery."""
    for top in sys._current_frames().values():
        frame: types.FrameType | None = top
        while frame is not None:
            code = frame.f_code
            machinery = str(frame.f_globals.get("__name__", "")).partition(".")[0] in _MACHINERY
            if not machinery and not code.co_filename.startswith(_HERE) and frame.f_locals is not frame.f_globals:
                where = f"{code.co_name}() ({os.path.basename(code.co_filename)}:{frame.f_lineno})"
                for name, value in dict(frame.f_locals).items():
                    yield _Root(f"{name} in {where}", value)
            frame = frame.f_back


def _links(path: list[object]) -> Iterator[str]:
    """How each object of the path refers to the next: `.name`, `[key]`, `closure cell name`."""
    for index, (item, part) in enumerate(itertools.pairwise(path)):
        before = path[index - 1] if index else None
        if _is(item, dict) and index > 1 and _is(path[index - 2], threading.local):
            yield f"(a thread's) {next(_key(item, part, plain=True))}"
            continue
        if _is(part, dict) and (_is(item, threading.local) or _is(before, threading.local)):
            continue  # a local has a table of the threads' dictionaries
        if _is(item, types.CellType) or (_is(item, types.FunctionType) and part is item.__closure__):
            continue
        if _is(before, types.FunctionType) and _is(item, tuple) and item is before.__closure__:
            yield f"closure cell {before.__code__.co_freevars[_position(item, part)]}"
        elif _is(item, dict):
            yield from _key(item, part, plain=index == 0 or _own_dict(before) is item)
        elif _own_dict(item) is not part:
            yield _link(item, part)


def _link(item: object, part: object) -> str:
    if _is(item, (list, tuple, deque)):
        return f"[{_position(item, part)}]"
    if _is(item, (set, frozenset)):
        return "{...}"
    name = _attribute(item, part)
    return f".{name}" if name else f"({type(item).__name__})"


def _key(mapping: dict[object, object], part: object, *, plain: bool) -> Iterator[str]:
    for key, value in dict.items(mapping):
        if value is part:
            yield f".{key}" if plain and _is(key, str) else f"[{reprlib.repr(key)}]"
            return
    yield "key"


def _position(items: Iterable[object], part: object) -> int:
    return next((i for i, item in enumerate(items) if item is part), -1)


def _own_dict(item: object) -> object:
    """The attribute dictionary of an instance or module; None where it has none."""
    try:
        return object.__getattribute__(item, "__dict__")
    except AttributeError:
        return None


def _attribute(item: object, part: object) -> str:
    """The attribute of `item` that is `part`, asked of C's own descriptors and the instance: no code of its class."""
    own = _own_dict(item)
    if _is(own, dict):
        for name, value in own.items():
            if value is part:
                return str(name)
    for kind in type(item).__mro__:
        for name, descriptor in list(vars(kind).items()):
            if isinstance(descriptor, _DESCRIPTORS) and _get(descriptor, item) is part:
                return name
    frame = item.cr_frame if _is(item, types.CoroutineType) else item
    frame = item.gi_frame if _is(item, types.GeneratorType) else frame
    if _is(frame, types.FrameType):
        return next((f"local {name}" for name, value in dict(frame.f_locals).items() if value is part), "")
    return ""


def _get(descriptor: types.MemberDescriptorType | types.GetSetDescriptorType, item: object) -> object:
    try:
        return descriptor.__get__(item, type(item))
    except Exception:  # a slot that is not set, an attribute that this object lacks
        return None


def _made(item: object) -> str:
    """Where the object was allocated, by tracemalloc where it traces: the last line outside the standard library."""
    traceback = tracemalloc.get_object_traceback(item) if tracemalloc.is_tracing() else None
    for frame in reversed(traceback or ()):
        if not frame.filename.startswith((_STDLIB, _HERE, "<")):
            return f"{os.path.basename(frame.filename)}:{frame.lineno}"
    return ""


def _unrooted(new: frozenset[int]) -> Iterator[str]:
    """For what no module and no frame leads to: the nearest holder."""
    objects = gc.get_objects()
    for item in objects:
        if id(item) in new:
            for holder in gc.get_referrers(item):
                if holder is not objects and id(holder) not in new and not _is(holder, types.FrameType):
                    yield f"a {type(holder).__name__} that no module and no frame names -> {type(item).__name__}"
                    return

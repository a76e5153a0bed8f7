"""Who keeps a tensor alive: chains from a root, "step -> closure engine -> .store -> ['k'] -> Tensor".

A root is a module's attribute, a class's attribute, a local variable of a running function, or what the caller names as
one (the step of a trace). A tensor that no root leads to may still be another's `.grad` or kept by an autograd graph
(`autograd.py`), or be the value of a context variable; else the furthest object that refers to it is named, and where
no Python object does the answer is `NOBODY`.

The search is our own breadth-first walk backwards, from all tensors at once and a level at a time: objgraph's asks for
each object alone, which takes seconds in a process with many. objgraph draws the picture. Nothing is allocated on the
device, and nothing is held after the call. It ends after `LIMIT` seconds and then says so. It sees what the cyclic
collector tracks; where a heap was frozen and no root was found, it looks again with the heap thawed, and freezes it
after that (`_thawed`).
"""

from __future__ import annotations

import contextvars
import gc
import inspect
import io
import os
import re
import shutil
import subprocess
import sys
import time
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import sites
from .autograd import kept_by
from .heap import application_froze
from .links import FAULTS, is_a, is_module_dict, joined, last, links, locals_of, place, worded

if TYPE_CHECKING:
    import torch

NOBODY = "no Python object: only C++ holds it"
LIMIT = 30.0  # seconds for one search: with 0.75 million objects it takes 1 to 5 (benchmarks/holders.py)
STOPPED = "the search for holders stopped after"
FAILED = "the search for holders failed"
_DEPTH = 16  # objects between a root and a tensor; longer chains say nothing to a reader
_WIDE = 400  # objects looked at a level
_FEW = 8  # objects for which the collector is asked; it compares each reference with each of them
_CHUNK = 512  # objects whose referents are asked for in one call
_WAYS = 100  # from one object to targets, of which those that differ in more than keys are shown
_ALIKE = 3  # of the things that one object refers to: how many are followed to a target
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_run, _monotonic = subprocess.run, time.monotonic
_get_objects, _get_referents, _get_referrers = gc.get_objects, gc.get_referents, gc.get_referrers
_collect, _freeze, _unfreeze = gc.collect, gc.freeze, gc.unfreeze


class _OutOfTimeError(Exception):
    """The search has used up its seconds."""


class Deadline:
    """When a search must have ended: `seconds` from now. One may be shared by several searches."""

    def __init__(self, seconds: float = LIMIT) -> None:
        self.seconds = seconds
        self._end = _monotonic() + seconds

    def left(self) -> float:
        """Seconds. Raises where none is."""
        left = self._end - _monotonic()
        if left <= 0:
            raise _OutOfTimeError
        return left


def is_holder(chain: str) -> bool:
    """Whether a line that a search returned names who holds the tensor; else it says why it names nobody."""
    return chain != NOBODY and not chain.startswith((STOPPED, FAILED))


def chains(target: object, *, roots: Mapping[int, str] | None = None, skip: Collection[int] = ()) -> tuple[str, ...]:
    """The shortest chain from a root to `target`, as at most one line; empty where no root leads to it.

    `roots`: names by `id` of objects that count as roots beside modules, classes and local variables of running
    functions. `skip`: ids of objects that are not followed (the caller's own containers). Raises nothing where the time
    is over: what it has then is the answer.
    """
    walk = _Walk([target], {**_running_locals(), **(roots or {})}, {*skip}, Deadline())
    try:
        return tuple(walk.chains(1))
    except _OutOfTimeError:
        return ()


def chains_for_blocks(
    addresses: Iterable[int],
    *,
    roots: Mapping[int, str] | None = None,
    limit: int = 3,
    graph_to: Path | None = None,
    deadline: Deadline | None = None,
) -> tuple[str, ...]:
    """Who holds the device blocks at these addresses: up to `limit` different chains.

    Chains that differ only in a key or index count as one. Empty where no tensor lies over any of the blocks. What was
    found when the time was over (`deadline`, by itself `LIMIT` seconds) is followed by a line that says so; a search
    that fails says how, because it must not hide the leak. `graph_to`: an image of the reference graph of the first
    tensor goes there, where graphviz is installed.
    """
    deadline = deadline or Deadline()
    search = _Search(frozenset(addresses), dict(roots or {}), limit, deadline)
    try:
        search.run(graph_to)
    except _OutOfTimeError:
        return (*search.found, f"{STOPPED} {deadline.seconds:g} s")
    except Exception as error:
        return (*search.found, f"{FAILED}: {type(error).__name__}: {error}"[:200])
    return tuple(search.found)


@dataclass(slots=True)
class _Search:
    """Who holds these blocks. `found`: what is known so far, at most `limit` chains."""

    wanted: frozenset[int]
    roots: dict[int, str]
    limit: int
    deadline: Deadline
    found: list[str] = field(default_factory=list)

    def run(self, graph_to: Path | None) -> None:
        frozen = application_froze()
        rooted = self._look(graph_to, last_try=not frozen)
        if not rooted and frozen:
            with _thawed():
                self._look(graph_to, last_try=True)

    def _look(self, graph_to: Path | None, *, last_try: bool) -> bool:
        """Whether a root leads to any of the blocks. `last_try`: without one, name what is known of them."""
        owners, others = _owners(self.wanted, self.deadline)
        named = {**_running_locals(), **self.roots}
        walk = _Walk(owners, named, {id(owners), id(others), id(named), id(self)}, self.deadline)
        self.found += walk.chains(self.limit)
        held = [one for one in owners if not walk.is_open(one)]
        left = self.wanted.difference(map(_address, held))
        if left and len(self.found) < self.limit:
            self._look_in_graphs(walk, [*others, *[one for one in held if _address(one)]], left)
        rooted = bool(self.found)
        if not rooted and last_try and owners:
            self.found.append(walk.furthest() or NOBODY)
        if owners and graph_to is not None and (rooted or last_try):
            draw(owners[0], graph_to, hidden=[owners, others], deadline=self.deadline)
        return rooted

    def _look_in_graphs(self, walk: _Walk, tensors: Sequence[Any], left: Collection[int]) -> None:
        """Chains to the tensors whose gradients or graphs keep the blocks that are `left`, or what the walk came to
        on its way from them.
        """

        def wanted(one: object) -> bool:
            return walk.is_open(one) or _address(one) in left

        tails: set[str] = set()
        seen: dict[int, object] = {}
        for tensor in tensors:
            self.deadline.left()
            mine: dict[int, object] = {}
            for how, kept in kept_by(tensor, wanted, seen, mine):
                tail = joined([how, *walk.onwards(kept)])
                if tail in tails:
                    continue
                chain = self._chain_to(tensor, walk)
                if chain is None:
                    mine.clear()  # another tensor, that a root leads to, may keep the same graph
                    break
                tails.add(tail)
                self.found.append(f"{chain}{tail}")
            seen.update(mine)
            if len(self.found) >= self.limit:
                return

    def _chain_to(self, tensor: object, walk: _Walk) -> str | None:
        up = _Walk([tensor], walk.named, walk.skip, self.deadline)
        return next(iter(up.chains(1)), None)


@contextmanager
def _thawed() -> Iterator[None]:
    """A frozen heap, unfrozen for the body and frozen again.

    The collector cannot freeze one object and not another: what else is alive is frozen with it from then on. Garbage
    is not: it is collected before, as long as the collector can tell it from what was frozen.
    """
    _collect()
    _unfreeze()
    try:
        yield
    finally:
        _freeze()


def pattern(chain: str) -> str:
    """The chain without its keys and indices: two blocks in one dictionary are held the same way."""
    return re.sub(r"\[[^]]*\]", "[]", chain)


def draw(target: object, path: Path, *, hidden: Sequence[object] = (), deadline: Deadline | None = None) -> bool:
    """Draw what refers to `target` into `path` (.png or .svg). False where graphviz is not there or fails, or where the
    time is over.
    """
    deadline = deadline or Deadline()
    dot = shutil.which("dot")
    if dot is None:
        return False
    import objgraph

    own = {id(one) for one in hidden}

    def shown(referrer: object) -> bool:
        deadline.left()
        return id(referrer) not in own and not _is_ours(referrer)

    source = io.StringIO()
    command = [dot, f"-T{path.suffix[1:]}", "-o", str(path)]
    try:
        objgraph.show_backrefs([target], max_depth=8, too_many=8, filter=shown, output=source)
        _run(command, input=source.getvalue(), text=True, timeout=deadline.left(), check=True, capture_output=True)
    except (OSError, subprocess.SubprocessError, _OutOfTimeError):  # a picture that fails must not hide the leak
        return False
    return True


def _owners(wanted: Collection[int], deadline: Deadline) -> tuple[list[object], list[torch.Tensor]]:
    """The Python tensors and storages over these blocks, and all other tensors."""
    import torch

    over: list[object] = []
    others: list[torch.Tensor] = []
    storages = (torch.UntypedStorage, torch.TypedStorage)
    deadline.left()
    everything = _get_objects()
    kinds = {kind for kind in set(map(type, everything)) if issubclass(kind, (torch.Tensor, *storages))}
    for one in [one for one in everything if type(one) in kinds]:
        if is_a(one, torch.Tensor):
            (over if _address(one) in wanted else others).append(one)
        elif _storage_address(one) in wanted:
            over.append(one)
    return over, others


def _address(one: object) -> int:
    """The address of a tensor's block; 0 for what has none."""
    import torch

    try:
        return one.untyped_storage().data_ptr() if is_a(one, torch.Tensor) else 0
    except Exception:  # sparse, fake, functional tensors and half-made ones have no address
        return 0


def _storage_address(storage: Any) -> int:
    try:
        untyped = getattr(storage, "_untyped_storage", storage)
        return untyped.data_ptr()
    except Exception:  # as above
        return 0


# The walk from objects up to a root.


def _running_locals() -> dict[int, str]:
    """What the local variables of running functions refer to, by `id`. The collector does not see into their frames."""
    found: dict[int, str] = {}
    for top in sys._current_frames().values():
        frame: types.FrameType | None = top
        while frame is not None:
            if not _is_ours(frame) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
                where = place(frame)
                for name, value in locals_of(frame).items():
                    if gc.is_tracked(value) and not is_a(value, (types.ModuleType, type)):
                        found.setdefault(id(value), f"{where} -> local {name}")
            frame = frame.f_back
    return found


class _Walk:
    """From `targets` to what refers to them, a level at a time.

    Objects are known by their place in `kept`, so that nothing but that list refers to them: `came` is the place by
    `id`, `_children` the places of what an object refers to, `_parents` of what refers to it, `_masks` the targets
    behind it, a bit each, `_above` the way to a root of what one leads to. Targets come first and have no children.
    `named`: roots by `id`; `skip`: ids of what is not followed.
    """

    def __init__(
        self, targets: Sequence[object], named: Mapping[int, str], skip: Collection[int], deadline: Deadline
    ) -> None:
        self.named, self.deadline = named, deadline
        self.came: dict[int, int] = {}
        self._kept: list[object] = []
        self._children: list[list[int]] = []
        self._parents: list[list[int]] = []
        self._masks: list[int] = []
        self._above: dict[int, int | None] = {}
        self._explained = 0
        self._frontier: list[int] = []
        self._found: dict[str, str] = {}
        self.skip = {*skip, id(self._kept), id(targets), id(named)}
        for number, target in enumerate(targets):
            self._frontier.append(self._add(target, (), 1 << number))
        self._targets = len(self._kept)

    def chains(self, limit: int) -> list[str]:
        """At most `limit` chains that differ in more than keys, the shortest first, until each target has one, itself
        or together with another.
        """
        for target in self._frontier:
            if id(self._kept[target]) in self.named:
                self._reached(target, limit)
        for _ in range(_DEPTH):
            self._frontier = [one for one in self._frontier if self._masks[one] & ~self._explained][:_WIDE]
            if not self._frontier or len(self._found) >= limit:
                break
            self._one_level(limit)
        return list(self._found.values())[:limit]

    def is_open(self, one: object) -> bool:
        """Whether the walk came to this object from a target that no root leads to, so far."""
        at = self.came.get(id(one))
        return at is not None and bool(self._masks[at] & ~self._explained)

    def furthest(self) -> str | None:
        """The chain from a context, or from the furthest object that was found; None where nothing refers to any."""
        contexts = [at for at, one in enumerate(self._kept) if is_a(one, contextvars.Context)]
        at = contexts[0] if contexts else len(self._kept) - 1
        if not self._children[at]:
            return None
        path = next(self._paths(at))
        return worded(path, {id(path[0]): "..."} if self._frontier and not contexts else {})

    def onwards(self, one: object) -> list[str]:
        """The links from an object that the walk came to, to the target behind it; none for a target itself."""
        if id(one) not in self.came or not self._children[self.came[id(one)]]:
            return []
        path = next(self._paths(self.came[id(one)]))
        return [*links(path), last(path[-1])]

    def _one_level(self, limit: int) -> None:
        level: list[int] = []
        for referrer, children in self._referrers():
            mask = 0
            for child in children:
                mask |= self._masks[child]
            known = self.came.get(id(referrer))
            if known is not None:
                level += self._linked(known, children, mask, limit)
                continue
            at = self._add(referrer, children, mask)
            if _is_root(referrer, self.named):
                self._reached(at, limit)
            else:
                level.append(at)
        self._frontier = level

    def _add(self, one: object, children: tuple[int, ...], mask: int) -> int:
        at = self.came[id(one)] = len(self._kept)
        self._kept.append(one)
        self._children.append([])
        self._parents.append([])
        self._masks.append(mask)
        self._link(at, children)
        return at

    def _link(self, at: int, children: Sequence[int]) -> None:
        fresh = [child for child in children if child not in self._children[at]]
        self._children[at] += fresh
        for child in fresh:
            self._parents[child].append(at)

    def _linked(self, known: int, children: tuple[int, ...], mask: int, limit: int) -> list[int]:
        """Further ways down from a place that the walk has been at; gives the places from which it goes on for them."""
        if known in self._above:
            self._name([child for child in children if self._masks[child] & ~self._explained], known, limit)
        if known >= self._targets:
            self._link(known, [child for child in children if self._masks[child] & ~self._masks[known]])
        tops, gaining = [], [known]
        while gaining:
            at = gaining.pop()
            if mask & ~self._masks[at]:
                self._masks[at] |= mask
                gaining += self._parents[at]
                if not self._parents[at] and at not in self._above:
                    tops.append(at)
        return tops

    def _reached(self, root: int, limit: int) -> None:
        if not self._masks[root] & ~self._explained:
            return
        self._above[root] = None
        below = [root]
        while below:
            at = below.pop()
            fresh = [child for child in self._children[at] if child not in self._above]
            self._above.update(dict.fromkeys(fresh, at))
            below += fresh
        self._name([root], None, limit)

    def _name(self, places: Sequence[int], above: int | None, limit: int) -> None:
        """Word the chains through these places, below a place that a root leads to."""
        upper: list[object] = []
        while above is not None:
            upper.insert(0, self._kept[above])
            above = self._above[above]
        for at in places:
            self._explained |= self._masks[at]
            for path in islice(self._paths(at), _WAYS):
                if len(self._found) >= limit:
                    return
                chain = worded([*upper, *path], self.named)
                self._found.setdefault(pattern(chain), chain)

    def _paths(self, at: int, above: tuple[int, ...] = ()) -> Iterator[list[object]]:
        """Ways from an object to targets: of targets that it refers to itself a few, since they differ in keys."""
        if not self._children[at]:
            yield [self._kept[at]]
        targets = [child for child in self._children[at] if not self._children[child]]
        others = [child for child in self._children[at] if self._children[child] and child not in above]
        for child in [*targets[:_ALIKE], *others[:_ALIKE]]:
            for path in self._paths(child, (*above, at)):
                yield [self._kept[at], *path]

    def _referrers(self) -> list[tuple[object, tuple[int, ...]]]:
        """What refers to the frontier, each with the places in it that it refers to."""
        self.deadline.left()
        wanted = {id(self._kept[one]): one for one in self._frontier}
        found = []
        for holder in self._holders(wanted):
            if id(holder) in self.skip or _is_ours(holder):
                continue
            children = tuple(sorted({wanted[id(one)] for one in _parts(holder) if id(one) in wanted}))
            if children:
                found.append((holder, children))
        self.skip.add(id(found))
        return found

    def _holders(self, wanted: Mapping[int, int]) -> list[object]:
        if len(wanted) <= _FEW:
            asked = tuple(self._kept[one] for one in wanted.values())  # from 3.13 on it is found among the holders
            self.skip.add(id(asked))
            holders = _get_referrers(*asked)
        else:
            holders = self._scan(wanted)
        self.skip.add(id(holders))
        return holders

    def _scan(self, wanted: Mapping[int, int]) -> list[object]:
        """The same for many: one look at every reference of the process, however many objects are asked for."""
        ids = wanted.keys()
        everything = _get_objects()
        holders: list[object] = []
        for start in range(0, len(everything), _CHUNK):
            if not start % (_CHUNK * 128):
                self.deadline.left()
            chunk = everything[start : start + _CHUNK]
            if not ids.isdisjoint(map(id, _parts(*chunk))):
                holders += [one for one in chunk if not ids.isdisjoint(map(id, _parts(one)))]
        return holders


def _parts(*holders: object) -> list[object]:
    """What the holders refer to; of a module only its namespace, because what else an extension module shows may be
    dead (CPython 3.12.0-1: `_asyncio` hands out iterators from its free list).
    """
    plain = [one for one in holders if not is_a(one, types.ModuleType)]
    spaces = [object.__getattribute__(one, "__dict__") for one in holders if is_a(one, types.ModuleType)]
    return [*_get_referents(*plain), *spaces]


def _is_root(one: object, roots: Mapping[int, str]) -> bool:
    if id(one) in roots or is_a(one, (types.ModuleType, type)) or is_module_dict(one):
        return True
    return type(one).__module__ == FAULTS


def _is_ours(one: object) -> bool:
    """Frames of the harness, which pass through whatever they measure, and its generators."""
    if is_a(one, types.GeneratorType):
        return one.gi_code.co_filename.startswith(_HERE) and sites.is_plumbing(one.gi_code.co_filename)
    return is_a(one, types.FrameType) and sites.is_plumbing(one.f_code.co_filename)

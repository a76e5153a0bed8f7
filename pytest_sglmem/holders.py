"""Who keeps a tensor alive: chains from a root, "step -> closure engine -> .store -> ['k'] -> Tensor".

A root is a module's attribute, a class's attribute, a local variable of a running function, or what the caller names as
one (the step of a trace). A tensor that no Python object refers to may still be another's `.grad` or saved in an
autograd graph; that is looked up, and where it is neither the answer is `NOBODY`.

The search is our own breadth-first walk over `gc.get_referrers`, one call a level for all objects of that level:
objgraph's asks for each object alone, which takes seconds in a process with many. objgraph draws the picture. Nothing
is allocated on the device, and nothing is held after the call. It sees what the cyclic collector tracks; where a heap
was frozen and no root was found, it looks again with the heap thawed, and freezes it after that (`_thawed`).
"""

from __future__ import annotations

import gc
import inspect
import io
import re
import shutil
import subprocess
import sys
import types
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import sites

if TYPE_CHECKING:
    import torch

NOBODY = "no Python object: only C++ holds it"
_DEPTH = 16  # objects between a root and a tensor; longer chains say nothing to a reader
_WIDE = 400  # objects looked at a level
_KEY = 24  # characters of a key that are shown
_FAULTS = f"{__package__}.strikes"
_DRAWING = 30  # seconds for graphviz: a graph of 8 levels takes one
_run = subprocess.run
_get_objects, _get_referents, _get_referrers = gc.get_objects, gc.get_referents, gc.get_referrers
_collect, _freeze, _unfreeze = gc.collect, gc.freeze, gc.unfreeze


def chains(target: object, *, roots: Mapping[int, str] | None = None, skip: Collection[int] = ()) -> tuple[str, ...]:
    """The shortest chain from a root to `target`, as at most one line; empty where no root leads to it.

    `roots`: names by `id` of objects that count as roots beside modules, classes and local variables of running
    functions. `skip`: ids of objects that are not followed (the caller's own containers).
    """
    named = {**_running_locals(), **(roots or {})}
    path = _path(target, named, set(skip))
    return (_worded(path, named),) if path else ()


def chains_for_blocks(
    addresses: Iterable[int], *, roots: Mapping[int, str] | None = None, limit: int = 3, graph_to: Path | None = None
) -> tuple[str, ...]:
    """Who holds the device blocks at these addresses: up to `limit` different chains.

    Chains that differ only in a key or index count as one. Empty where no tensor lies over any of the blocks.
    `graph_to`: an image of the reference graph of the first tensor goes there, where graphviz is installed.
    """
    wanted = set(addresses)
    found, anybody = _look(wanted, roots or {}, limit, graph_to)
    if not found and gc.get_freeze_count():
        with _thawed():
            found, anybody = _look(wanted, roots or {}, limit, graph_to)
    return (NOBODY,) if anybody and not found else tuple(found)


def _look(
    wanted: Collection[int], roots: Mapping[int, str], limit: int, graph_to: Path | None
) -> tuple[list[str], bool]:
    """The chains, and whether any Python object lies over the blocks."""
    owners, others = _owners(wanted)
    found = _chains_of(owners, others, wanted, roots, limit)
    if owners and graph_to is not None and (found or not gc.get_freeze_count()):
        draw(owners[0], graph_to, hidden=[owners, others])
    return found, bool(owners)


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


def draw(target: object, path: Path, *, hidden: Sequence[object] = ()) -> bool:
    """Draw what refers to `target` into `path` (.png or .svg). False where graphviz is not there or fails."""
    dot = shutil.which("dot")
    if dot is None:
        return False
    import objgraph

    own = {id(one) for one in hidden}

    def shown(referrer: object) -> bool:
        return id(referrer) not in own and not _is_ours(referrer)

    source = io.StringIO()
    objgraph.show_backrefs([target], max_depth=8, too_many=8, filter=shown, output=source)
    command = [dot, f"-T{path.suffix[1:]}", "-o", str(path)]
    try:
        _run(command, input=source.getvalue(), text=True, timeout=_DRAWING, check=True, capture_output=True)
    except (OSError, subprocess.SubprocessError):  # a picture that fails must not hide the leak
        return False
    return True


def _chains_of(
    owners: Sequence[object],
    others: Sequence[torch.Tensor],
    wanted: Collection[int],
    roots: Mapping[int, str],
    limit: int,
) -> list[str]:
    found: dict[str, str] = {}
    skip = (id(owners), id(others))
    for owner in owners:
        for chain in chains(owner, roots=roots, skip=skip):
            found.setdefault(pattern(chain), chain)
        if len(found) >= limit:
            break
    if not found:
        for tensor, tail in _held_by_autograd(others, wanted):
            for chain in chains(tensor, roots=roots, skip=skip):
                found.setdefault(tail, f"{chain}{tail}")
            if len(found) >= limit:
                break
    return list(found.values())[:limit]


def _owners(wanted: Collection[int]) -> tuple[list[object], list[torch.Tensor]]:
    """The Python tensors and storages over these blocks, and all other tensors."""
    import torch

    over: list[object] = []
    others: list[torch.Tensor] = []
    for one in _get_objects():
        kind = type(one)
        if issubclass(kind, torch.Tensor):
            (over if _address(one) in wanted else others).append(one)
        elif issubclass(kind, (torch.UntypedStorage, torch.TypedStorage)) and _storage_address(one) in wanted:
            over.append(one)
    return over, others


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except Exception:  # sparse, fake, functional tensors and half-made ones have no address
        return 0


def _storage_address(storage: torch.UntypedStorage | torch.TypedStorage) -> int:
    try:
        untyped = getattr(storage, "_untyped_storage", storage)
        return untyped.data_ptr()
    except Exception:  # as above
        return 0


def _held_by_autograd(tensors: Iterable[torch.Tensor], wanted: Collection[int]) -> Iterator[tuple[torch.Tensor, str]]:
    """Tensors whose `.grad`, or whose graph's saved tensors, lie over these blocks, and how."""
    seen: set[int] = set()
    for tensor in tensors:
        try:
            if tensor.is_leaf:
                grad = tensor.grad
                if grad is not None and _address(grad) in wanted:
                    yield tensor, ".grad"
                continue
            node = tensor.grad_fn
        except Exception:  # a half-made or functional tensor: not ours to mend
            continue
        for name in _saved_in_graph(node, wanted, seen):
            yield tensor, f".grad_fn -> {name}"


def _saved_in_graph(start: object, wanted: Collection[int], seen: set[int]) -> Iterator[str]:
    """Names of the saved tensors over these blocks in the graph behind `start`, as "MulBackward0._saved_other"."""
    nodes, kept = deque([start]), []
    while nodes:
        node = nodes.popleft()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        kept.append(node)  # an id stays one node's as long as the node lives
        for name in [n for n in dir(node) if n.startswith("_saved_") or n == "saved_tensors"]:
            if any(_address(saved) in wanted for saved in _saved(node, name)):
                yield f"{type(node).__name__}.{name}"
        nodes.extend(following for following, _ in getattr(node, "next_functions", ()))


def _saved(node: object, name: str) -> list[torch.Tensor]:
    import torch

    try:
        value = getattr(node, name)
    except Exception:  # saved tensors are gone once the graph was walked
        return []
    values = value if isinstance(value, (tuple, list)) else (value,)
    return [one for one in values if isinstance(one, torch.Tensor)]


# The walk from an object up to a root.


def _running_locals() -> dict[int, str]:
    """What the local variables of running functions refer to, by `id`. The collector does not see into their frames."""
    found: dict[int, str] = {}
    for top in sys._current_frames().values():
        frame: types.FrameType | None = top
        while frame is not None:
            if not _is_ours(frame) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
                place = _place(frame)
                for name, value in _locals(frame).items():
                    if gc.is_tracked(value) and not isinstance(value, (types.ModuleType, type)):
                        found.setdefault(id(value), f"{place} -> local {name}")
            frame = frame.f_back
    return found


def _locals(frame: types.FrameType) -> dict[str, object]:
    """The frame's variables. Up to CPython 3.12 asking for them leaves a dictionary of them behind in the frame, which
    would keep them alive: it is emptied.
    """
    seen = frame.f_locals
    values = dict(seen)
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        seen.clear()
    return values


def _path(target: object, roots: Mapping[int, str], skip: set[int]) -> list[object] | None:
    """The objects from a root (first) to `target` (last)."""
    came: dict[int, object | None] = {id(target): None}
    kept: list[object] = [target]  # ids stay true as long as their objects live
    frontier: list[object] = [target]
    if id(target) in roots:
        return [target]
    skip |= {id(came), id(kept), id(roots)}
    for _ in range(_DEPTH):
        level: list[object] = []
        skip |= {id(frontier), id(level)}
        wanted = {id(one): one for one in frontier}
        skip.add(id(wanted))
        referrers = _get_referrers(*frontier)
        skip.add(id(referrers))
        for referrer in referrers:
            if id(referrer) in came or id(referrer) in skip or _is_ours(referrer):
                continue
            child = next((wanted[id(one)] for one in _get_referents(referrer) if id(one) in wanted), None)
            if child is None:
                continue
            came[id(referrer)] = child
            kept.append(referrer)
            if _is_root(referrer, roots):
                return _back(referrer, came)
            level.append(referrer)
        frontier = level[:_WIDE]
        if not frontier:
            return None
    return None


def _back(root: object, came: Mapping[int, object | None]) -> list[object]:
    path: list[object] = []
    at: object | None = root
    while at is not None:
        path.append(at)
        at = came[id(at)]
    return path


def _is_root(one: object, roots: Mapping[int, str]) -> bool:
    if id(one) in roots or isinstance(one, (types.ModuleType, type)):
        return True
    if type(one).__module__ == _FAULTS:
        return True
    return type(one) is dict and "__builtins__" in one and "__name__" in one


def _is_ours(one: object) -> bool:
    """Frames of the harness: they pass through whatever they measure."""
    return isinstance(one, types.FrameType) and sites.is_plumbing(one.f_code.co_filename)


# Wording.


def _worded(path: Sequence[object], roots: Mapping[int, str]) -> str:
    """The chain as text. An instance and its attribute dictionary, a function and its closure, are one step."""
    parts = [_root_name(path[0], roots)]
    at = 0
    while at < len(path) - 1:
        text, at = _step(path, at)
        parts.append(text)
    parts.append(_last(path[-1]))
    return " -> ".join(part for part in parts if part).replace("(module) -> .", ".")


def _last(target: object) -> str:
    """The type of what is held; of a view that keeps more alive than it shows, how much of it."""
    name = type(target).__name__
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(target, torch.Tensor):
        return name
    try:
        shown, kept = target.numel() * target.element_size(), target.untyped_storage().nbytes()
    except Exception:  # sparse, fake and half-made tensors have no such numbers
        return name
    return name if shown >= kept else f"{name} (a view of {shown} of {kept} B)"


def _root_name(root: object, roots: Mapping[int, str]) -> str:
    if id(root) in roots:
        return roots[id(root)]
    if isinstance(root, types.ModuleType):
        return f"{root.__name__}(module)"
    if isinstance(root, type):
        return f"{root.__module__}.{root.__qualname__}"
    if type(root).__module__ == _FAULTS:
        return "an injected fault"
    return f"{root.get('__name__')}(module)" if isinstance(root, dict) else type(root).__name__


def _step(path: Sequence[object], at: int) -> tuple[str, int]:
    """How `path[at]` refers to what follows, and where the walk goes on."""
    holder, held = path[at], path[at + 1]
    after = path[at + 2] if at + 2 < len(path) else None
    if isinstance(holder, dict):
        if at == 0 and "__builtins__" in holder:  # a module's
            return f".{_key_of(holder, held)}", at + 1
        return f"[{_short(_key_of(holder, held))}]", at + 1
    if after is not None and type(held) is dict and _attributes(holder) is held:
        return f".{_key_of(held, after)}", at + 2
    if after is not None and isinstance(holder, type) and type(held) is dict:
        return f".{_key_of(held, after)}", at + 2
    if after is not None and isinstance(held, types.FrameType) and _frame_of(holder) is held:  # up to CPython 3.10
        return f"suspended {_place(held)} -> local {_key_of(_locals(held), after)}", at + 2
    if isinstance(holder, types.FunctionType):
        return _of_function(holder, path, at)
    if isinstance(holder, (list, tuple, deque)):
        return f"[{next((i for i, one in enumerate(holder) if one is held), '?')}]", at + 1
    if isinstance(holder, (set, frozenset)):
        return "{...}", at + 1
    if isinstance(holder, types.CellType):
        return "cell", at + 1
    if isinstance(holder, types.FrameType):
        return f"local {_key_of(_locals(holder), held)}" + ("" if at == 0 else f" of {_place(holder)}"), at + 1
    if isinstance(holder, types.TracebackType):
        return "", at + 1
    if isinstance(holder, BaseException) and isinstance(held, types.TracebackType):
        return f"traceback of {_short(holder, 40)}", at + 1
    return _of_object(holder, held), at + 1


def _of_function(function: types.FunctionType, path: Sequence[object], at: int) -> tuple[str, int]:
    held = path[at + 1]
    cells = function.__closure__ or ()
    if held is function.__closure__ and at + 2 < len(path):
        cell = path[at + 2]
        names = [n for n, one in zip(function.__code__.co_freevars, cells, strict=False) if one is cell]
        own = "" if at == 0 else f"{function.__qualname__} "
        return f"{own}closure {names[0] if names else '?'}", at + 3
    if held is function.__defaults__ and at + 2 < len(path):
        return f"{function.__qualname__} default", at + 2
    if held is function.__globals__ and at + 2 < len(path):
        return f"globals -> {_key_of(function.__globals__, path[at + 2])}", at + 2
    return function.__qualname__, at + 1


def _of_object(holder: object, held: object) -> str:
    """An attribute that is kept in the instance itself, or the holder's type where the attribute has no name."""
    frame = _frame_of(holder)
    if frame is not None:
        return f"suspended {_place(frame)} -> local {_key_of(_locals(frame), held)}"
    for name in _attribute_names(holder):
        try:
            if getattr(holder, name) is held:
                return f".{name}"
        except Exception:  # a property of the user's that raises
            continue
    return f"{type(holder).__module__}.{type(holder).__qualname__}".removeprefix("builtins.")


def _frame_of(holder: object) -> types.FrameType | None:
    """The frame of a generator or coroutine that waits to go on."""
    if isinstance(holder, types.GeneratorType):
        return holder.gi_frame
    if isinstance(holder, types.CoroutineType):
        return holder.cr_frame
    return holder.ag_frame if isinstance(holder, types.AsyncGeneratorType) else None


def _attribute_names(holder: object) -> Iterator[str]:
    attributes = _attributes(holder)
    yield from () if attributes is None else [key for key in attributes if isinstance(key, str)]
    for kind in type(holder).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        yield from (slots,) if isinstance(slots, str) else slots
        yield from [n for n, v in vars(kind).items() if isinstance(v, types.MemberDescriptorType)]


def _attributes(holder: object) -> dict[str, object] | None:
    try:
        found = object.__getattribute__(holder, "__dict__")
    except AttributeError:
        return None
    return found if type(found) is dict else None


def _key_of(mapping: Mapping[Any, object], held: object) -> object:
    for key, value in list(mapping.items()):
        if value is held:
            return key
    return next(("key " + _short(key) for key in list(mapping) if key is held), "?")


def _short(value: object, limit: int = _KEY) -> str:
    text = value if isinstance(value, str) and value.startswith("key ") else repr(value)
    return text if len(text) <= limit else text[: limit - 2] + "…" + text[-1]


def _place(frame: types.FrameType) -> str:
    line = sites.format_frames([(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)])
    return line[0] if line else frame.f_code.co_name

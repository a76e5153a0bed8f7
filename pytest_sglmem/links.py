"""How an object refers to the next one, as text: objects become "step -> closure engine -> .store -> ['k']".

What the interpreter puts between two objects that a reader knows (an attribute dictionary, a cell, the tree inside a
context, the table of a thread's locals) is folded into one link. No code of the objects' classes runs, except `repr`
of a key, and what that raises harms nobody; of a tensor that is a key only the shape is shown, since its repr computes
on the device.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard, TypeVar

from . import sites

T = TypeVar("T")
FAULTS = f"{__package__}.strikes"
_KEY = 24  # characters of a key that are shown
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")  # a tensor keeps them in C, under these names
_Cache = type(functools.lru_cache(lambda: None))


def is_a(one: object, kind: type[T] | tuple[type[T], ...]) -> TypeGuard[T]:
    """isinstance by the real type: an object that answers for `__class__` itself would run its own code."""
    return issubclass(type(one), kind)


def worded(path: Sequence[object], roots: Mapping[int, str]) -> str:
    """The chain from the root `path[0]` to `path[-1]` as text. `roots`: names by `id`."""
    return joined([_root_name(path[0], roots), *links(path), last(path[-1])])


def joined(parts: Sequence[str]) -> str:
    """The parts of a chain, a module's attribute behind its name."""
    return " -> ".join(part for part in parts if part).replace("(module) -> .", ".")


def links(path: Sequence[object]) -> Iterator[str]:
    """How each object of the path refers to a later one. An instance and its attribute dictionary, a function and its
    closure, are one link.
    """
    at = 0
    while at < len(path) - 1:
        text, at = _step(path, at)
        yield text


def last(target: object) -> str:
    """The type of what is held; of a view that keeps more alive than it shows, how much of it."""
    name = type(target).__name__
    torch = sys.modules.get("torch")
    if torch is None or not is_a(target, torch.Tensor):
        return name
    try:
        shown, kept = target.numel() * target.element_size(), target.untyped_storage().nbytes()
    except Exception:  # sparse, fake and half-made tensors have no such numbers
        return name
    return name if shown >= kept else f"{name} (a view of {shown} of {kept} B)"


def place(frame: types.FrameType) -> str:
    """Where a frame is: "file.py:41 in share"."""
    line = sites.format_frames([(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)])
    return line[0] if line else frame.f_code.co_name


def locals_of(frame: types.FrameType) -> dict[str, object]:
    """The frame's variables. Up to CPython 3.12 asking for them leaves a dictionary of them behind in the frame, which
    would keep them alive: it is emptied.
    """
    seen = frame.f_locals
    values = dict(seen)
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        seen.clear()
    return values


def is_module_dict(one: object) -> TypeGuard[dict[str, object]]:
    """Whether this is a module's namespace."""
    return type(one) is dict and "__builtins__" in one and "__name__" in one


def _root_name(root: object, roots: Mapping[int, str]) -> str:
    if id(root) in roots:
        return roots[id(root)]
    if is_a(root, types.ModuleType):
        return f"{object.__getattribute__(root, '__dict__').get('__name__')}(module)"
    if is_a(root, type):
        return f"{root.__module__}.{root.__qualname__}"
    if type(root).__module__ == FAULTS:
        return "an injected fault"
    if is_module_dict(root):
        return f"{root['__name__']}(module)"
    if is_a(root, contextvars.Context):
        return ""
    kind = type(root).__name__
    return f"a{'n' * (kind[:1] in 'AEIOUaeiou')} {kind} that no module and no frame names"


def _step(path: Sequence[object], at: int) -> tuple[str, int]:
    """How `path[at]` refers to what follows, and where the walk goes on."""
    holder, held = path[at], path[at + 1]
    after = path[at + 2] if at + 2 < len(path) else None
    if is_a(holder, contextvars.Context):
        return _of_context(holder, path, at)
    if is_a(holder, dict):
        if at == 0 and "__builtins__" in holder:  # a module's
            return f".{_key_of(holder, held)}", at + 1
        return f"[{_short(_key_of(holder, held))}]", at + 1
    if after is not None and type(held) is dict and (is_a(holder, type) or _attributes(holder) is held):
        return f".{_key_of(held, after)}", at + 2
    if is_a(holder, threading.local) and at + 3 < len(path) and is_a(after, dict):
        return f"(a thread's) .{_key_of(after, path[at + 3])}", at + 3
    if after is not None and is_a(held, types.FrameType) and _frame_of(holder) is held:  # up to CPython 3.10
        return f"suspended {place(held)} -> local {_key_of(locals_of(held), after)}", at + 2
    if is_a(holder, types.FunctionType):
        return _of_function(holder, path, at)
    return _of_one(holder, held, first=at == 0), at + 1


def _of_one(holder: object, held: object, *, first: bool) -> str:
    if is_a(holder, (list, tuple, deque)):
        return f"[{next((i for i, one in enumerate(holder) if one is held), '?')}]"
    if is_a(holder, (set, frozenset)):
        return "{...}"
    if is_a(holder, types.CellType):
        return "cell"
    if is_a(holder, types.FrameType):
        return f"local {_key_of(locals_of(holder), held)}" + ("" if first else f" of {place(holder)}")
    if is_a(holder, types.TracebackType):
        return ""
    if is_a(holder, BaseException) and is_a(held, types.TracebackType):
        return f"traceback of {_short(holder, 40)}"
    if is_a(holder, _Cache):
        return f"cache of {getattr(holder.__wrapped__, '__qualname__', '?')}"  # type: ignore[attr-defined]
    if is_a(holder, types.BuiltinMethodType):
        return ".__self__"
    torch = sys.modules.get("torch")
    if torch is not None and is_a(held, torch._C._FunctionBase) and is_a(holder, torch.Tensor):
        return f".grad_fn -> {type(held).__name__}"
    return _of_object(holder, held)


def _of_context(context: contextvars.Context, path: Sequence[object], at: int) -> tuple[str, int]:
    """The variable of the context whose value is on the path; what lies between is the context's own tree."""
    values = {id(value): variable.name for variable, value in context.items()}
    for index in range(at + 1, len(path)):
        if id(path[index]) in values:
            return f"ContextVar {values[id(path[index])]}", index
    return "Context", at + 1


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
        return f"suspended {place(frame)} -> local {_key_of(locals_of(frame), held)}"
    for name, value in _own_values(holder):
        if value is held:
            return f".{name}"
    return f"{type(holder).__module__}.{type(holder).__qualname__}".removeprefix("builtins.")


def _frame_of(holder: object) -> types.FrameType | None:
    """The frame of a generator or coroutine that waits to go on."""
    if is_a(holder, types.GeneratorType):
        return holder.gi_frame
    if is_a(holder, types.CoroutineType):
        return holder.cr_frame
    return holder.ag_frame if is_a(holder, types.AsyncGeneratorType) else None


def _own_values(holder: object) -> Iterator[tuple[str, object]]:
    """What the instance keeps under a name: in its dictionary, in slots, and a tensor's hooks."""
    yield from [(key, value) for key, value in (_attributes(holder) or {}).items() if type(key) is str]
    hooks = _HOOKS if hasattr(type(holder), "_backward_hooks") else ()
    for kind in type(holder).__mro__:
        for name, descriptor in list(vars(kind).items()):
            if is_a(descriptor, types.MemberDescriptorType) or name in hooks:
                try:
                    yield name, descriptor.__get__(holder, type(holder))
                except Exception:  # a slot that is not set
                    continue


def _attributes(holder: object) -> dict[str, object] | None:
    try:
        found = object.__getattribute__(holder, "__dict__")
    except AttributeError:
        return None
    return found if type(found) is dict else None


def _key_of(mapping: Mapping[Any, object], held: object) -> object:
    items = list(dict.items(mapping) if is_a(mapping, dict) else mapping.items())
    for key, value in items:
        if value is held:
            return key
    return next(("key " + _short(key) for key, _ in items if key is held), "?")


def _short(value: object, limit: int = _KEY) -> str:
    if type(value) is str and value.startswith("key "):
        return value
    torch = sys.modules.get("torch")
    if torch is not None and is_a(value, torch.Tensor):
        return f"<{type(value).__name__} {tuple(value.shape)}>"
    if is_a(value, weakref.ref):
        return "weakref"
    try:
        text = repr(value)
    except Exception:  # the user's own
        text = f"<{type(value).__name__}>"
    return text if len(text) <= limit else text[: limit - 2] + "…" + text[-1]

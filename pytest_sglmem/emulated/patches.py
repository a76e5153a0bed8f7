"""Attributes replaced for a while, and put back exactly as they were: a missing one is missing again.

Used for everything the emulated device replaces in torch. It knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any


class Patches:
    """A stack of replaced attributes; `undo` (or leaving the `with`) restores them, the last replaced first."""

    def __init__(self) -> None:
        self._undone: list[tuple[object, str, bool, object]] = []
        self._put: list[tuple[dict[Any, Any], object]] = []

    def set(self, owner: object, name: str, value: object) -> object:
        """Let `owner.name` be `value`. Returns what it was; None where the attribute was not there."""
        own = vars(owner)
        was_there, before = name in own, own.get(name)
        inherited = getattr(owner, name, None)
        setattr(owner, name, value)
        self._undone.append((owner, name, was_there, before))
        return before if was_there else inherited

    def put(self, owner: dict[Any, Any], key: object, value: object) -> None:
        """Let `owner[key]`, which is not there yet, be `value`."""
        owner[key] = value
        self._put.append((owner, key))

    def replaced(self) -> Iterator[tuple[object, object]]:
        """What is replaced, and by what; the first replaced first."""
        for owner, name, was_there, before in self._undone:
            if was_there:
                yield before, vars(owner)[name]

    def undo(self) -> None:
        """Restore everything."""
        while self._put:
            entries, key = self._put.pop()
            del entries[key]
        while self._undone:
            owner, name, was_there, before = self._undone.pop()
            if was_there:
                setattr(owner, name, before)
            else:
                delattr(owner, name)

    def __enter__(self) -> Patches:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def named(function: Callable[..., Any], like: Any) -> Callable[..., Any]:
    """`function`, with the name and the docstring of what it replaces."""
    for name in ("__name__", "__qualname__", "__doc__"):
        value = getattr(like, name, None)
        if value is not None:
            setattr(function, name, value)
    return function

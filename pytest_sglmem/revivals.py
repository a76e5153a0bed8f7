"""Storages whose end seems to come and does not: torch revives the Python object that a collection took for garbage.

In older torch (2.6 is one) Python alone owns a storage's object as long as Python refers to it, though a tensor owns
the storage. Where only garbage refers to it (a pickler's memo is such a cycle), a collection ends its weak references,
and torch keeps the object all the same. So there an end that is heard in a collection is believed when the collection
is over and the object is not found among the living.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    import torch

E = TypeVar("E")


class Revivals(Generic[E]):
    """Holds ends of storages back while a collection runs, and gives them to `settle` with the storages that live, by
    their `_cdata`, when it is over. It does nothing where torch does not need it.
    """

    def __init__(self, settle: Callable[[list[E], Mapping[int, torch.UntypedStorage]], None]) -> None:
        self._settle = settle
        self._collecting = False
        self._doubted: list[E] = []

    def start(self) -> None:
        """Listen to the collector from now on."""
        if are_possible():
            gc.callbacks.append(self._heard)

    def stop(self) -> None:
        """Listen no more."""
        if self._heard in gc.callbacks:
            gc.callbacks.remove(self._heard)

    def doubts(self, end: E) -> bool:
        """Whether `end` is held back: it comes in a collection."""
        if self._collecting:
            self._doubted.append(end)
        return self._collecting

    def _heard(self, phase: str, info: dict[str, int]) -> None:
        self._collecting = phase == "start"
        if self._doubted and not self._collecting:
            doubted, self._doubted = self._doubted, []
            self._settle(doubted, _living())


def _living() -> dict[int, torch.UntypedStorage]:
    import torch

    return {thing._cdata: thing for thing in gc.get_objects() if type(thing) is torch.UntypedStorage}


@lru_cache(maxsize=1)
def are_possible() -> bool:
    """Whether a weak reference to a storage can end before the storage does, in the torch at hand."""
    import torch

    tensor = torch.empty(1)
    garbage: list[object] = [tensor.untyped_storage()]
    garbage.append(garbage)
    watch = weakref.ref(tensor.untyped_storage())
    del garbage
    gc.collect(0)
    return watch() is None

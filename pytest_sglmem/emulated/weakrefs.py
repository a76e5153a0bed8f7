"""torch's weak references to storages, where they keep the Python object alive that tells of a storage's end.

`reduce_tensor` and `rebuild_cuda_tensor` remember storages by `UntypedStorage._weak_ref`. In older torch (2.6 is one)
that reference frees the bytes in time but holds the Python object until it is freed itself, and a death would be heard
of late. There, an emulated storage gives out the weak reference of a stand-in, and a Python weak reference answers for
it. A stand-in is a real (and dead) storage, so one that is left over after the emulation is harmless.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from .memory import Memory
from .patches import Patches


def install(patches: Patches, memory: Memory) -> None:
    """Answer for weak references of emulated storages until `patches` are undone, where that is needed."""
    if not holds_the_object():
        return
    cls = torch.UntypedStorage
    give: Callable[..., Any] = cls._weak_ref
    free: Callable[..., Any] = cls._free_weak_ref
    expired: Callable[..., Any] = cls._expired
    revive: Callable[..., Any] = cls._new_with_weak_ptr
    known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def _weak_ref(self: torch.UntypedStorage) -> int:
        if self._cdata not in memory.where:
            return int(give(self))
        token = int(give(cls(0)))
        known[token] = weakref.ref(self)
        return token

    def _free_weak_ref(kind: Any, token: int) -> None:
        known.pop(token, None)
        free(token)

    def _expired(kind: Any, token: int) -> bool:
        return known[token]() is None if token in known else bool(expired(token))

    def _new_with_weak_ptr(kind: Any, token: int) -> Any:
        return known[token]() if token in known else revive(token)

    patches.set(cls, "_weak_ref", _weak_ref)
    for function in (_free_weak_ref, _expired, _new_with_weak_ptr):
        patches.set(cls, function.__name__, classmethod(function))


def holds_the_object() -> bool:
    """Whether in the torch at hand a weak reference to a storage keeps its Python object alive."""
    tensor = torch.empty(1)
    token: Any = tensor.untyped_storage()._weak_ref()
    watch = weakref.ref(tensor.untyped_storage())
    del tensor
    held = watch() is not None
    torch.UntypedStorage._free_weak_ref(token)
    return held

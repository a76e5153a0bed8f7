"""What an `UntypedStorage` says of itself where it lives on an emulated device, and how one is made there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .memory import CPU
from .patches import Patches, named

if TYPE_CHECKING:
    from . import Emulation


def install(patches: Patches, emulation: Emulation) -> None:
    """Let storages answer for the emulated device until `patches` are undone."""
    cls, where = torch.UntypedStorage, emulation.memory.where
    real_device = cls.device.__get__  # type: ignore[attr-defined]
    real_pointer, real_resize = cls.data_ptr, cls.resize_
    real_is_shared = cls.is_shared
    real_new: Callable[..., Any] = cls.__new__

    def device(self: torch.UntypedStorage) -> torch.device:
        owned = where.get(self._cdata)
        return real_device(self) if owned is None else owned.device

    def data_ptr(self: torch.UntypedStorage) -> int:
        owned = where.get(self._cdata)
        return real_pointer(self) if owned is None else owned.address

    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        answer = real_resize(self, size)
        owned = where.get(self._cdata)
        if owned is not None:
            emulation.memory.resized(self, owned, emulation.stream_number(owned.index))
        return answer

    def is_shared(self: torch.UntypedStorage) -> bool:
        return self._cdata in where or real_is_shared(self)

    def get_device(self: torch.UntypedStorage) -> int:
        owned = where.get(self._cdata)
        return -1 if owned is None else owned.index

    def new(kind: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        index = None if device is None else emulation.index_of(device)
        if index is None or index == CPU:
            return real_new(kind, *args, **kwargs) if device is None else real_new(kind, *args, device=device, **kwargs)
        storage = real_new(kind, *args, **kwargs)
        emulation.own(storage, index)
        return storage

    patches.set(cls, "device", property(device))
    for function in (data_ptr, resize_, get_device, is_shared):
        patches.set(cls, function.__name__, named(function, getattr(cls, function.__name__)))
    patches.set(cls, "__new__", new)

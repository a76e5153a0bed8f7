"""Tensors that C++ makes for itself inside a composite operator: which device they belong to.

C++ sees CPU tensors, so inside a composite operator it asks for CPU tensors too. Its factory calls can be told from
Python's, which always say `pin_memory`. What such a call makes (and what is computed from it alone) is remembered with
the Python instruction that is being carried out, and joins the device of the first tensors that the same instruction
mixes it with or copies into it. Never mixed, it stays on the CPU. The lengths of `ctc_loss`, which C++ moves to the
device without an operator that could be seen, are moved before.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterable
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch

from .memory import storage_of
from .patches import Patches

if TYPE_CHECKING:
    from . import Emulation

Call = tuple[int, int]
REMEMBERED = 64


class Composites:
    """The tensors of one thread that may yet join a device."""

    def __init__(self) -> None:
        self._made: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._call: Call = (0, 0)

    @property
    def open(self) -> bool:
        """Whether there are any."""
        return bool(self._made)

    def remember(self, tensor: object) -> None:
        """The current instruction's C++ made `tensor`, on the CPU as far as it knows."""
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            return
        call = _call()
        if call != self._call or len(self._made) >= REMEMBERED:
            self._made.clear()
            self._call = call
        storage = storage_of(tensor)
        self._made[storage._cdata] = weakref.ref(storage)

    def derive(self, inputs: Iterable[torch.Tensor], answer: object) -> None:
        """`answer` was computed from CPU tensors: where one of them may join a device, so may it."""
        if self._made and any(self.knows(tensor) for tensor in inputs) and self._call == _call():
            for tensor in answer if isinstance(answer, (list, tuple)) else (answer,):
                self.remember(tensor)

    def take(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` may join a device now. It is asked once."""
        if not self.knows(tensor) or self._call != _call():
            return False
        del self._made[storage_of(tensor)._cdata]
        return True

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` may join a device, as far as its storage tells."""
        if tensor.layout is not torch.strided:
            return False
        storage = storage_of(tensor)
        known = self._made.get(storage._cdata)
        return known is not None and known() is storage


def install(patches: Patches, emulation: Emulation) -> None:
    """Move what C++ moves unseen, until `patches` are undone."""
    real = torch.ctc_loss

    @functools.wraps(real)
    def ctc_loss(log_probs: torch.Tensor, targets: torch.Tensor, *lengths: Any, **kwargs: Any) -> torch.Tensor:
        if emulation.memory.find(log_probs) is not None:
            lengths = tuple(one.to(log_probs.device) if isinstance(one, torch.Tensor) else one for one in lengths)
        return real(log_probs, targets, *lengths, **kwargs)

    patches.set(torch, "ctc_loss", ctc_loss)


def _call() -> Call:
    """The Python instruction that is being carried out: C++ has no frames, and dispatch modes are no caller."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_between(frame.f_code):
        frame = frame.f_back
    return (0, 0) if frame is None else (id(frame), frame.f_lasti)


def _is_between(code: CodeType) -> bool:
    return code.co_name == "__torch_dispatch__" or code.co_filename.startswith(_BETWEEN)


_BETWEEN = (
    __file__.rpartition("/")[0] + "/",
    *(f"{torch.__path__[0]}/{name}" for name in ("_ops.py", "_compile.py", "_dynamo/")),
)

"""torch.compile while the device is emulated: what is compiled runs as it is written.

A compiled graph would allocate below every hook of the emulation, so its memory would not be counted and its tensors
would be the CPU's. Run eagerly, it computes the same and is counted operator by operator.

Fake tensors (make_fx, DTensor's rules) are left to torch. But autograd of a fake CUDA tensor asks C++ for a device that
is not there, which ends the process: that, and torch.export with it, raises NotImplementedError.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses import FakeTensorMode

from .patches import Patches, named

if TYPE_CHECKING:
    from . import Emulation


def install(patches: Patches, emulation: Emulation) -> None:
    """Let `torch.compile` give back what it is given, and fake no gradient on CUDA, until `patches` are undone."""

    def compile(model: Any = None, **_: Any) -> Any:
        """As torch.compile with `disable=True`."""
        return (lambda function: function) if model is None else model

    real_fake = FakeTensorMode.from_tensor

    def from_tensor(self: FakeTensorMode, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.requires_grad and emulation.memory.find(tensor) is not None:
            raise NotImplementedError(
                "a fake tensor (torch.export, make_fx) of a CUDA tensor that requires grad is not emulated: "
                "requires_grad_(False) first"
            )
        return real_fake(self, tensor, *args, **kwargs)

    patches.set(torch, "compile", compile)
    patches.set(FakeTensorMode, "from_tensor", named(from_tensor, real_fake))


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """What was compiled before runs eagerly inside (where nothing was, torch's compiler is not loaded for it)."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield

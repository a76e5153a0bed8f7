"""torch.compile while the device is emulated: what is compiled runs as it is written.

A compiled graph would allocate below every hook of the emulation, so its memory would not be counted and its tensors
would be the CPU's. Run eagerly, it computes the same and is counted operator by operator.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

from .patches import Patches


def install(patches: Patches) -> None:
    """Let `torch.compile` give back what it is given, until `patches` are undone."""

    def compile(model: Any = None, **_: Any) -> Any:
        """As torch.compile with `disable=True`."""
        return (lambda function: function) if model is None else model

    patches.set(torch, "compile", compile)


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """What was compiled before runs eagerly inside (where nothing was, torch's compiler is not loaded for it)."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield

"""torch.compile while the device is emulated: what is compiled runs as it is written.

A compiled graph would allocate below every hook of the emulation, so its memory would not be counted and its tensors
would be the CPU's. Run eagerly, it computes the same and is counted operator by operator.

Fake tensors (make_fx, DTensor's rules) are left to torch. But autograd of a fake CUDA tensor asks C++ for a device that
is not there, which ends the process: that, and torch.export with it, raises NotImplementedError.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses import FakeTensor, FakeTensorMode, fake_tensor

from .dispatch import refuse
from .patches import Patches, named

if TYPE_CHECKING:
    from . import Emulation

GUARDED = ("__getitem__", "__setitem__", "__invert__", "__float__", "__int__", "__complex__", "nonzero", "new")


def install(patches: Patches, emulation: Emulation) -> None:
    """Let `torch.compile` give back what it is given, and fake no gradient on CUDA, until `patches` are undone."""

    def compile(model: Any = None, **_: Any) -> Any:
        """As torch.compile with `disable=True`."""
        return (lambda function: function) if model is None else model

    patches.set(torch, "compile", compile)
    _install_fakes(patches, emulation)


def _install_fakes(patches: Patches, emulation: Emulation) -> None:
    cls = FakeTensor
    real_fake, real_require = FakeTensorMode.from_tensor, cls.requires_grad_
    required: Any = cls.requires_grad

    def from_tensor(self: FakeTensorMode, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.requires_grad and emulation.memory.find(tensor) is not None:
            raise no_fake_gradient()
        return real_fake(self, tensor, *args, **kwargs)

    def requires_grad_(self: FakeTensor, requires_grad: bool = True) -> Any:
        if requires_grad and self.device.type == "cuda":
            raise no_fake_gradient()
        return real_require(self, requires_grad)

    def set_requires_grad(self: FakeTensor, value: bool) -> None:
        requires_grad_(self, value)

    patches.set(fake_tensor, "init_gpu_context", lambda device: None)  # it makes a tensor on the real device
    patches.set(FakeTensorMode, "from_tensor", named(from_tensor, real_fake))
    patches.set(cls, "requires_grad_", named(requires_grad_, real_require))
    patches.set(cls, "requires_grad", property(required.__get__, set_requires_grad))
    _install_guards(patches)


def _install_guards(patches: Patches) -> None:
    """Some of a tensor's methods make C++ select the tensor's device before anything else: a fake's is not there."""
    real_copy, real_dispatch = FakeTensor.copy_, FakeTensorMode.dispatch

    def copy_(self: FakeTensor, source: Any, non_blocking: bool = False) -> Any:
        if not isinstance(source, torch.Tensor):
            return real_copy(self, source, non_blocking)
        return torch.ops.aten.copy_.default(self, source, non_blocking)

    def refusing(real: Any, name: str) -> Any:
        def method(self: FakeTensor, *args: Any) -> Any:
            try:
                return real(self, *args)
            except RuntimeError as error:
                refuse(error, f"{name} of a fake CUDA tensor")
                raise

        return named(method, real)

    def dispatch(self: FakeTensorMode, func: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return real_dispatch(self, func, *args, **kwargs)
        except RuntimeError as error:
            refuse(error, f"{func} of fake tensors")
            raise

    # Else it computes with constants there.
    patches.set(FakeTensorMode, "avoid_device_init", property(lambda self: True))
    patches.set(FakeTensor, "copy_", named(copy_, real_copy))
    for name in GUARDED:
        patches.set(FakeTensor, name, refusing(getattr(FakeTensor, name), name))
    patches.set(FakeTensorMode, "dispatch", named(dispatch, real_dispatch))


def no_fake_gradient() -> NotImplementedError:
    """What to raise where a fake CUDA tensor shall require a gradient."""
    return NotImplementedError(
        "a gradient of a fake CUDA tensor (torch.export, make_fx, flex_attention) is not emulated: "
        "requires_grad_(False), or torch.no_grad() around it"
    )


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """What was compiled before runs eagerly inside.

    The compiler knows torch's functions by identity, so it is loaded (in 1 s) before any is replaced.
    """
    _load_compiler()
    with torch.compiler.set_stance("force_eager"):
        yield


def _load_compiler() -> None:
    """Its import makes an empty cache folder in the temporary one, which outlives the process, and tells every process
    started later of it, which makes it again: both go.
    """
    if "torch._dynamo" in sys.modules:
        return
    place = "TORCHINDUCTOR_CACHE_DIR"
    named_before, there = place in os.environ, set(Path(tempfile.gettempdir()).glob("torchinductor_*"))
    importlib.import_module("torch._dynamo")

    made = None if named_before else os.environ.pop(place, None)
    if made is not None and Path(made) not in there:
        with contextlib.suppress(OSError):  # somebody has put something there
            Path(made).rmdir()

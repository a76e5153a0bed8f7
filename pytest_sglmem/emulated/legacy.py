"""The types of old: `torch.cuda.FloatTensor` and its like, which C++ gives only to a build with a GPU.

A type makes tensors, is asked with `isinstance`, and is what `Tensor.type` and `Module.type` cast to, by itself or by
its name. As the default type of all tensors (`torch.set_default_tensor_type`) it is refused.
"""

from __future__ import annotations

from typing import Any

import torch

from .patches import Patches

DTYPES = {
    "BFloat16": torch.bfloat16,
    "Bool": torch.bool,
    "Byte": torch.uint8,
    "Char": torch.int8,
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "Int": torch.int32,
    "Long": torch.int64,
    "Short": torch.int16,
}
_PREFIX = "torch.cuda."


class _Legacy(type):
    """The type of a type of old."""

    dtype: torch.dtype
    is_cuda = True

    def __call__(cls, *args: Any, device: Any = "cuda") -> torch.Tensor:
        if all(isinstance(arg, int) for arg in args):
            return torch.empty(args, dtype=cls.dtype, device=device)
        (data,) = args
        if isinstance(data, torch.Size):
            return torch.empty(data, dtype=cls.dtype, device=device)
        return torch.as_tensor(data, dtype=cls.dtype, device=device)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Tensor) and instance.is_cuda and instance.dtype == cls.dtype

    def __str__(cls) -> str:
        return f"{_PREFIX}{cls.__name__}"


def dtype_of(kind: object) -> torch.dtype | None:
    """What a type of old, or its name, makes; None for anything else."""
    if isinstance(kind, _Legacy):
        return kind.dtype
    if isinstance(kind, str) and kind.startswith(_PREFIX) and kind.endswith("Tensor"):
        return DTYPES.get(kind[len(_PREFIX) : -len("Tensor")])
    return None


def install(patches: Patches) -> None:
    """Let `torch.cuda` have them until `patches` are undone."""
    for name, dtype in DTYPES.items():
        kind = _Legacy(f"{name}Tensor", (), {"dtype": dtype, "__module__": "torch.cuda"})
        patches.set(torch.cuda, kind.__name__, kind)
    real = torch.set_default_tensor_type

    def set_default_tensor_type(kind: Any) -> None:
        """As torch's, for a type of the CPU."""
        if dtype_of(kind) is not None:
            raise NotImplementedError(
                "torch.set_default_tensor_type of a CUDA type is not emulated: use torch.set_default_device"
            )
        real(kind)

    patches.set(torch, "set_default_tensor_type", set_default_tensor_type)

"""What a step returned, as a short digest: the same for the same bytes, whatever the device they lie on.

Tensors count by dtype, shape and bytes; containers by their type, keys and items; everything else by its `repr`. No
device memory is left behind, and none is allocated: a tensor that is not contiguous crosses with its whole storage.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import re
from collections.abc import Mapping, Set

import torch

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_CHUNK = 2**28


def digest(result: object) -> str:
    """32 hexadecimal digits for `result`: nested containers of tensors, arrays, numbers and text."""
    hasher = hashlib.blake2b(digest_size=16)
    _feed(hasher, result, 0)
    return hasher.hexdigest()


def _feed(hasher: hashlib.blake2b, value: object, depth: int) -> None:
    if isinstance(value, torch.Tensor):
        _feed_tensor(hasher, value)
    elif depth > 50:
        hasher.update(b"deep;")
    elif isinstance(value, Mapping):
        hasher.update(f"{type(value).__name__}{len(value)}{{".encode())
        for key, item in value.items():
            _feed(hasher, key, depth + 1)
            _feed(hasher, item, depth + 1)
    elif isinstance(value, (list, tuple)):
        hasher.update(f"{type(value).__name__}{len(value)}[".encode())
        for item in value:
            _feed(hasher, item, depth + 1)
    elif isinstance(value, Set):
        hasher.update(f"set{len(value)}".encode() + b"".join(sorted(digest(item).encode() for item in value)))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        hasher.update(f"{type(value).__name__}(".encode())
        for field in dataclasses.fields(value):
            _feed(hasher, getattr(value, field.name), depth + 1)
    elif hasattr(value, "__array_interface__") and hasattr(value, "tobytes"):
        hasher.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())  # type: ignore[attr-defined]
    else:
        hasher.update(f"{type(value).__name__}:{_text(value)};".encode(errors="replace"))


def _text(value: object) -> str:
    try:
        return _ADDRESS.sub("", repr(value))
    except Exception:  # the user's: what cannot say what it is counts by its type
        return ""


def _feed_tensor(hasher: hashlib.blake2b, tensor: torch.Tensor) -> None:
    hasher.update(f"tensor {tensor.dtype} {tuple(tensor.shape)};".encode())
    with torch.no_grad():
        plain = _on_cpu(tensor.detach())
    size = plain.numel() * plain.element_size()
    for begin in range(0, size, _CHUNK):
        length = min(_CHUNK, size - begin)
        hasher.update((ctypes.c_char * length).from_address(plain.data_ptr() + begin))


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements in order on the CPU, without a contiguous copy on its device."""
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    if not tensor.is_contiguous() and tensor.device.type != "cpu":
        flat = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(tensor.untyped_storage().cpu())
        conj, neg = tensor.is_conj(), tensor.is_neg()
        tensor = flat.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
        tensor = tensor.conj() if conj else tensor
        tensor = tensor.neg() if neg else tensor
    return tensor.cpu().resolve_conj().resolve_neg().contiguous()

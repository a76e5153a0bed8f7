"""Copies to and from several emulated devices at once: what `torch.nn.DataParallel` and `torch.cuda.comm` ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .patches import Patches


def scatter(
    tensor: torch.Tensor, devices: Sequence[int], sizes: Any, dim: int, streams: Any = None
) -> list[torch.Tensor]:
    """A piece for each device; the piece for the device that `tensor` is on stays a view."""
    pieces = tensor.chunk(len(devices), dim) if sizes is None else tensor.split(list(sizes), dim)
    return [piece.to(torch.device("cuda", index)) for piece, index in zip(pieces, devices, strict=False)]


def scatter_out(tensor: torch.Tensor, out: Sequence[torch.Tensor], dim: int, streams: Any = None) -> list[torch.Tensor]:
    """As `scatter`, into tensors that are there."""
    pieces = tensor.split([one.size(dim) for one in out], dim)
    return [one.copy_(piece) for one, piece in zip(out, pieces, strict=True)]


def gather(tensors: Sequence[torch.Tensor], dim: int, destination: int | None) -> torch.Tensor:
    """All in one, on `destination` (-1: the CPU; None: the current device)."""
    index = torch.cuda.current_device() if destination is None else destination
    where = torch.device("cpu") if index < 0 else torch.device("cuda", index)
    return torch.cat([tensor.to(where) for tensor in tensors], dim)


def gather_out(tensors: Sequence[torch.Tensor], out: torch.Tensor, dim: int) -> torch.Tensor:
    """As `gather`, into a tensor that is there."""
    return out.copy_(torch.cat([tensor.to(out.device) for tensor in tensors], dim))


def broadcast(tensor: torch.Tensor, devices: Sequence[int]) -> list[torch.Tensor]:
    """A copy for each device; the tensor itself for its own."""
    return [tensor.to(torch.device("cuda", index)) for index in devices]


def broadcast_out(tensor: torch.Tensor, out: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """As `broadcast`, into tensors that are there."""
    return [one.copy_(tensor) for one in out]


def broadcast_coalesced(
    tensors: Sequence[torch.Tensor], devices: Sequence[int], _: int = 0
) -> list[list[torch.Tensor]]:
    """`broadcast` of each tensor, by device."""
    return [[tensor.to(torch.device("cuda", index)) for tensor in tensors] for index in devices]


def install(patches: Patches) -> None:
    """Answer for torch's C layer until `patches` are undone."""
    for function in (scatter, scatter_out, gather, gather_out, broadcast, broadcast_out, broadcast_coalesced):
        patches.set(torch._C, f"_{function.__name__}", function)
    patches.set(torch.cuda.nccl, "is_available", lambda tensors: False)

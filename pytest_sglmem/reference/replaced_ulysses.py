"""The all-to-alls that `UlyssesAllToAll` replaces. They return the right outputs and lose memory; do not copy them.

`OneHandleForAll` gives all peers the same CUDA IPC handle: its count starts at 1 and ends at 2 - world, torch frees a
block only at exactly zero, and every evicted staging buffer is lost. `EvictWithoutRelease` gives a handle a peer and
drops an evicted buffer without synchronize, barrier and collect: nothing is lost, but what the peers still map comes
back late, when something else happens to collect. With one geometry nothing is evicted and both are flat.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.multiprocessing import reductions

_Handle = tuple[Callable[..., torch.Tensor], tuple[object, ...]]  # what reduce_tensor returns


class OneHandleForAll:
    """`exchange` as that of `UlyssesAllToAll`, a host barrier on both sides of the copies, and one handle for all.

    `max_staging`: how many (elements, dtype) keep a staging buffer; the least recently used is dropped for a new one.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, max_staging: int = 8) -> None:
        self.group, self.max_staging = group, max_staging
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.staging: OrderedDict[tuple[int, torch.dtype], list[torch.Tensor]] = OrderedDict()

    def share(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor, in rank order, all opened from the one handle that its rank exported."""
        handles: list[_Handle] = [None] * self.world  # type: ignore[list-item]
        dist.all_gather_object(handles, reductions.reduce_tensor(tensor), group=self.group)
        return [tensor if rank == self.rank else _opened(handle, tensor) for rank, handle in enumerate(handles)]

    def exchange(self, send: torch.Tensor) -> torch.Tensor:
        """Chunk r of `send` goes to rank r; chunk r of the result came from it."""
        key = (send.numel(), send.dtype)
        if key in self.staging:
            self.staging.move_to_end(key)
        else:
            self.stage(key)
        everyones = self.staging[key]
        dist.barrier(group=self.group)
        for peer, chunk in zip(everyones, send.detach().view(self.world, -1), strict=True):
            peer[self.rank].copy_(chunk)
        torch.cuda.synchronize()
        dist.barrier(group=self.group)
        return everyones[self.rank].view(send.shape).clone()

    def stage(self, key: tuple[int, torch.dtype]) -> None:
        """Make room by dropping the least recently used staging buffer, and put a new one there."""
        if len(self.staging) == self.max_staging:
            self.staging.popitem(last=False)
        elements, dtype = key
        mine = torch.empty(self.world, elements // self.world, dtype=dtype, device="cuda")
        self.staging[key] = self.share(mine)


class EvictWithoutRelease(OneHandleForAll):
    """A handle a peer, as it should be, but an evicted buffer is dropped and not released."""

    def share(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor, in rank order, each opened from a handle of its own."""
        mine = [reductions.reduce_tensor(tensor) if rank != self.rank else None for rank in range(self.world)]
        handles: list[list[_Handle]] = [[] for _ in range(self.world)]
        dist.all_gather_object(handles, mine, group=self.group)
        return [
            tensor if rank == self.rank else _opened(theirs[self.rank], tensor) for rank, theirs in enumerate(handles)
        ]


def _opened(handle: _Handle, like: torch.Tensor) -> torch.Tensor:
    rebuild, arguments = handle
    return rebuild(*arguments[:6], like.device.index, *arguments[7:])

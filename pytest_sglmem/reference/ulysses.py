"""Ulysses sequence parallelism over CUDA IPC, without losing memory: a handle a peer, and a collective release.

`exchange` is `all_to_all_single` with equal splits, by copies straight into the peers' staging buffers; `attention`
runs head groups pipelined against it. torch keeps one count a handle and frees a block only when the count is exactly
zero, so that one handle opened by seven peers ends at -6 and its block is lost: here every peer gets a handle of its
own, and a buffer is let go of by all ranks together: synchronize, barrier, collect. `replaced_ulysses.py` beside this
file does neither.

For inference (no gradient flows through it), one process a rank, all ranks on one host; every rank of the group calls
alike, and calls follow one another in stream order.
"""

from __future__ import annotations

import contextlib
import sys
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.multiprocessing import reductions

from .board import Board, PeerSilent, Plan, PlanMismatch
from .order import HostOrder, Route, StreamOrder, can_order_on_device

__all__ = ["PeerSilent", "PlanMismatch", "UlyssesAllToAll"]
_DEVICE_ARGUMENT = 6  # of rebuild_cuda_tensor: the same in every torch from 1.10 to 2.14
_Handle = tuple[Callable[..., torch.Tensor], tuple[object, ...]]  # what reduce_tensor returns
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(slots=True)
class _Staging:
    """Two receive buffers of one size, used in turn, and where this rank's chunks go in those of all ranks."""

    code: int
    mine: tuple[torch.Tensor, ...]
    routes: tuple[Route, ...]
    turn: int = 0


class _Pool(NamedTuple):
    """A flat buffer of each rank, opened here, in rank order; this rank's own is at its own place."""

    everyones: tuple[torch.Tensor, ...]
    elements: int


class UlyssesAllToAll:
    """All-to-all between the ranks of `group` through CUDA IPC. Making one is collective, as is every call.

    `max_staging`: how many sizes of exchange keep a staging buffer (the least recently used is let go of by all ranks
    together); `limit`: seconds after which a rank that does not come is an error; `order`: "stream" lets the devices
    wait for each other (needs `cuda-bindings` and a device a rank), "host" the processes, "auto" takes "stream" where
    every rank can.

    Making one and every call raise PlanMismatch where the ranks ask for different things, PeerSilent where one does not
    come or has failed, and ValueError for a tensor that it cannot take. With order "stream" a rank that fails inside a
    call is known to the others in their next one. `declined` counts the calls under CUDA graph capture: none of
    this can be captured, so those go through the group's own `all_to_all_single`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        max_staging: int = 8,
        limit: float = 300.0,
        order: Literal["auto", "stream", "host"] = "auto",
    ) -> None:
        if max_staging < 1:
            raise ValueError(f"max_staging must be at least 1 (got {max_staging})")
        if order not in ("auto", "stream", "host"):
            raise ValueError(f"order must be auto, stream or host (got {order!r})")
        self.group, self.max_staging = group, max_staging
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        # Each rank begins with its neighbour: were all to begin with rank 0, its link would be full, the others idle.
        self._peers = [(self.rank + step) % self.world for step in range(1, self.world)]
        self.declined = 0
        self._wanted_order = order
        self._made_alike(f"max_staging={max_staging}, order={order!r}")
        self._board = Board(group, limit)
        self._order: HostOrder | StreamOrder | None = None
        self._staging: OrderedDict[tuple[int, torch.dtype], _Staging] = OrderedDict()
        self._pools: dict[torch.dtype, _Pool] = {}
        self._message = 0

    def __enter__(self) -> UlyssesAllToAll:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        # After an error the others may not come any more: let go without them.
        if error is None:
            self.drop()
        else:
            self._leave()
            self._forget()

    def __del__(self) -> None:
        if not sys.is_finalizing() and getattr(self, "_order", None) is not None:
            self._forget()

    @property
    def order(self) -> str:
        """How ranks wait for each other: "stream", "host", or "" before the first call has settled it."""
        return self._order.name if self._order is not None else ""

    def share(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Every rank's `tensor`, in rank order, the peers' opened in this device's context. Collective.

        Each peer gets a handle of its own and opens it once, so that every count returns to exactly zero. What is
        shared is given back by dropping the result and the tensor in every rank, then `release_shared`.
        """
        self._board.agree(Plan("share", tensor.numel(), tensor.dtype).code())
        return self._share(tensor)

    def release_shared(self) -> None:
        """Give what was shared, and is dropped, back to the allocator: synchronize, barrier, collect. Collective."""
        self._board.agree(Plan("release", 0, torch.uint8).code())
        self._release()

    def exchange(self, send: torch.Tensor) -> torch.Tensor:
        """`all_to_all_single` with equal splits: chunk r of `send` goes to rank r, chunk r of the result is from it.

        The result has the shape of `send` and lies in a staging buffer: it is good until the next exchange of the same
        number of elements and dtype, and what reads it must be enqueued by then; `.clone()` keeps it longer.
        """
        if torch.cuda.is_current_stream_capturing():
            self.declined += 1
            return self._groups_own(send)
        key = self._key(send)
        staging = self._staging.get(key)
        if staging is None:
            staging = self._build(key)
            order = self._ordered()
        else:
            order = self._ordered()
            order.announce(staging.code)
            self._staging.move_to_end(key)
        staging.turn = turn = 1 - staging.turn
        self._message += 1
        order.exchange(staging.routes[turn], send, self._message)
        return staging.mine[turn].view_as(send)  # a third of what `view` takes

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attend: Attend, groups: int = 1
    ) -> torch.Tensor:
        """Attention over the whole sequence, of which each rank holds a stretch.

        `q`: (batch, tokens of this rank, heads, size), `k` and `v` the same with as many heads or fewer, of which each
        serves a run of query heads (grouped-query attention). `attend(q, k, v)` sees all tokens of a part of the
        heads, (batch, all tokens, some heads, size), must treat each head alone, and returns the shape of its `q`.
        The heads of a rank are done in `groups` parts: while one is attended, the next is on its way. The result has
        the shape of `q` and is the same, to the bit, for every number of groups.
        """
        if torch.cuda.is_current_stream_capturing():
            self.declined += 1
            return self._sequential(_Split.of(q, k, v, self.world, 1), q, k, v, attend)
        split = _Split.of(q, k, v, self.world, groups)
        pool = self._pool(split, q.dtype)
        try:
            return self._pipelined(split, pool, q, k, v, attend)
        except BaseException:
            self._leave()  # the peers' streams wait for what will not come
            raise

    def drop(self) -> None:
        """Let go of every buffer, in all ranks together. Collective. A later call starts again."""
        self._board.agree(Plan("drop", 0, torch.uint8).code())
        self._forget()
        self._release()

    def _pipelined(
        self, split: _Split, pool: _Pool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        order, mine, groups = self._ordered(), pool.everyones[self.rank], split.groups
        first = self._message + 1
        with order.aside():
            order.wait(self._message)  # of the call before: all have read the pool
            for group in range(groups):
                self._send_in(split, group, pool, self._peers, q, k, v)
                order.post(first + group)
        outs = []  # held until `rejoin`
        for group in range(groups):
            # This rank's own part has no flag to wait for: it is copied where it is read, in the current stream.
            self._send_in(split, group, pool, [self.rank], q, k, v)
            order.wait(first + group)
            out = attend(*(split.whole(mine, part, group) for part in "qkv"))
            outs.append(out)
            with order.aside():
                self._send_out(split, group, pool, out)
                order.post(first + groups + group)
        order.wait(first + 2 * groups - 1)
        order.rejoin()
        result = split.together(mine, torch.empty_like(q))
        self._message = first + 2 * groups
        order.post(self._message)
        return result

    def _made_alike(self, settings: str) -> None:
        everyones = [""] * self.world
        dist.all_gather_object(everyones, settings, group=self.group)
        if len(set(everyones)) > 1:
            said = "; ".join(f"rank {rank} {each}" for rank, each in enumerate(everyones))
            raise PlanMismatch(f"all ranks must make it alike: {said}")

    def _leave(self) -> None:
        """Tell the peers that this rank will not come any more, on the board and on their streams."""
        self._board.leave()
        if self._order is not None:
            with contextlib.suppress(RuntimeError):  # of a device that is broken: the error at hand says more
                self._order.leave()

    def _forget(self) -> None:
        # To let go of a peer's tensor drains the stream and holds the interpreter's lock meanwhile: were a flag still
        # to come, the watch could not write it. So drain before, without the lock.
        with contextlib.suppress(RuntimeError, AssertionError):  # a broken device; none any more
            torch.cuda.synchronize()
        self._staging.clear()
        self._pools.clear()
        if self._order is not None:
            self._order.close()
            self._order = None

    def _groups_own(self, send: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(send)
        dist.all_to_all_single(received, send, group=self.group)
        return received

    def _sequential(
        self, split: _Split, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        whole = []
        for part, tensor in zip("qkv", (q, k, v), strict=True):
            chunks = [tensor[:, :, split.heads(part, rank, 0)] for rank in range(self.world)]
            whole.append(self._groups_own(torch.stack(chunks)).transpose(0, 1).flatten(1, 2))
        out = attend(*whole).unflatten(1, (self.world, split.tokens)).transpose(0, 1).contiguous()
        return self._groups_own(out).permute(1, 2, 0, 3, 4).flatten(2, 3)

    def _key(self, send: torch.Tensor) -> tuple[int, torch.dtype]:
        elements = send.numel()
        if not send.is_cuda or not send.is_contiguous() or elements % self.world or not elements:
            raise ValueError(
                f"exchange takes a contiguous CUDA tensor whose elements divide among {self.world} ranks (got "
                f"{tuple(send.shape)} on {send.device}{'' if send.is_contiguous() else ', not contiguous'})"
            )
        return elements, send.dtype

    def _build(self, key: tuple[int, torch.dtype]) -> _Staging:
        """A staging buffer of a new size; room for it is made first, so that old and new never stand side by side."""
        elements, dtype = key
        code = Plan("exchange", elements, dtype).code()
        self._board.agree(code)
        while len(self._staging) >= self.max_staging:
            torch.cuda.synchronize()
            self._staging.popitem(last=False)
            self._release()
        self._ordered()
        everyones = self._allocate(dtype, 2, self.world, elements // self.world)
        mine = everyones[self.rank]
        routes = tuple(self._route([each[turn, self.rank] for each in everyones]) for turn in (0, 1))
        self._staging[key] = _Staging(code, mine.unbind(0), routes)
        return self._staging[key]

    def _route(self, rows: list[torch.Tensor]) -> Route:
        ways = tuple((rank, rows[rank].data_ptr()) for rank in (*self._peers, self.rank))
        return Route(tuple(rows), ways, rows[0].numel() * rows[0].itemsize)

    def _pool(self, split: _Split, dtype: torch.dtype) -> _Pool:
        elements, pool = split.elements, self._pools.get(dtype)
        code = Plan("attention", elements, dtype, zlib.crc32(repr(split).encode()) & 0xFFF).code()
        if pool is not None and pool.elements >= elements:
            self._ordered().announce(code)
            return pool
        self._board.agree(code)
        if pool is not None:
            torch.cuda.synchronize()
            del pool, self._pools[dtype]
            self._release()
        self._ordered()
        self._pools[dtype] = _Pool(self._allocate(dtype, elements), elements)
        return self._pools[dtype]

    def _send_in(
        self,
        split: _Split,
        group: int,
        pool: _Pool,
        peers: list[int],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> None:
        for peer in peers:
            for part, tensor in zip("qkv", (q, k, v), strict=True):
                place = split.inward(pool.everyones[peer], part)[group, :, self.rank]
                place.copy_(tensor.detach()[:, :, split.heads(part, peer, group)])

    def _send_out(self, split: _Split, group: int, pool: _Pool, out: torch.Tensor) -> None:
        tokens = out.detach().unflatten(1, (self.world, split.tokens))
        for peer in (*self._peers, self.rank):
            split.outward(pool.everyones[peer])[group, self.rank].copy_(tokens[:, peer])

    def _allocate(self, dtype: torch.dtype, *shape: int) -> tuple[torch.Tensor, ...]:
        """A new buffer of this shape in every rank, shared; or no rank gets one, where one has no room."""
        try:
            with _plain_segments():
                mine = torch.empty(shape, dtype=dtype, device="cuda")
        except torch.OutOfMemoryError as error:
            with contextlib.suppress(PeerSilent):
                self._swapped(str(error), torch.device("cuda", torch.cuda.current_device()))
            raise
        return self._share(mine)

    def _share(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # The block may have been another tensor's a moment ago: what still works on it must end before peers write.
        torch.cuda.synchronize()
        handles = [reductions.reduce_tensor(tensor) if rank != self.rank else None for rank in range(self.world)]
        peers = self._swapped(handles, tensor.device)
        return tuple(tensor if rank == self.rank else peers[rank] for rank in range(self.world))

    def _swapped(self, mine: list[_Handle | None] | str, device: torch.device) -> dict[int, torch.Tensor]:
        """The peers' tensors by rank, for this rank's handles. Raises PeerSilent where a peer said why it has none.

        Even then whatever is there for this rank is opened, and let go of: a handle that nobody opens is lost.
        """
        everyones: list[list[_Handle] | str] = [""] * self.world
        dist.all_gather_object(everyones, mine, group=self.group)
        theirs = {rank: each for rank, each in enumerate(everyones) if rank != self.rank}
        opened = {r: _opened(each[self.rank], device) for r, each in theirs.items() if not isinstance(each, str)}
        if failed := [
            f"rank {r} has no buffer to share: {each}" for r, each in theirs.items() if isinstance(each, str)
        ]:
            opened.clear()
            raise PeerSilent("; ".join(failed))
        return opened

    def _release(self) -> None:
        torch.cuda.synchronize()
        dist.barrier(group=self.group)
        torch.cuda.ipc_collect()

    def _ordered(self) -> HostOrder | StreamOrder:
        if self._order is None:
            self._order = self._settle_order()
        return self._order

    def _settle_order(self) -> HostOrder | StreamOrder:
        if self._wanted_order == "host":
            return HostOrder(self._board)
        with _plain_segments():
            flags = torch.zeros(self.world, dtype=torch.int32, device="cuda")
        driver = can_order_on_device(flags)
        devices: list[str] = [""] * self.world
        dist.all_gather_object(devices, _device_name() if driver else "", group=self.group)
        alone = len(set(devices)) == self.world
        if driver and all(devices) and (alone or self._wanted_order == "stream"):
            self._message = 0  # as the flags
            return StreamOrder(driver, self._board, flags, self._share(flags))
        if self._wanted_order == "stream":
            raise RuntimeError(f"order='stream' needs cuda-bindings and a CUDA device in every rank (have {devices})")
        return HostOrder(self._board)


class _Split(NamedTuple):
    """How one call of `attention` cuts heads into ranks and groups, and lays the parts out in a pool's buffer."""

    batch: int
    tokens: int
    size: int
    world: int
    groups: int
    q_heads: int
    kv_heads: int
    ratio: int

    @classmethod
    def of(cls, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, world: int, groups: int) -> _Split:
        """The split of these tensors. Raises ValueError where they do not fit each other, the ranks or the groups."""
        batch, tokens, heads, size = q.shape
        if k.shape != v.shape or k.shape != (batch, tokens, k.shape[2], size) or not q.dtype == k.dtype == v.dtype:
            raise ValueError(f"q, k and v do not fit: {[tuple(t.shape) for t in (q, k, v)]}")
        if groups < 1 or heads % (world * groups):
            raise ValueError(f"{heads} heads do not divide among {world} ranks in {groups} groups")
        ratio, rest = divmod(heads, k.shape[2])
        q_heads = heads // (world * groups)
        if rest or (q_heads % ratio and ratio % q_heads):
            raise ValueError(f"{k.shape[2]} key/value heads do not serve {heads} in parts of {q_heads}")
        return cls(batch, tokens, size, world, groups, q_heads, max(q_heads // ratio, 1), ratio)

    @property
    def elements(self) -> int:
        """Elements of the buffer: query, key, value and result of this rank's heads over all tokens."""
        return self._of("q") * 2 + self._of("k") * 2

    def heads(self, part: str, rank: int, group: int) -> slice:
        """The heads of q, k or v that `rank` attends in `group`."""
        first = (rank * self.groups + group) * self.q_heads
        if part != "q":
            first //= self.ratio
        return slice(first, first + self._count(part))

    def inward(self, buffer: torch.Tensor, part: str) -> torch.Tensor:
        """Where q, k or v lie: (groups, batch, from rank, tokens, heads, size)."""
        start = {"q": 0, "k": self._of("q"), "v": self._of("q") + self._of("k")}[part]
        shape = (self.groups, self.batch, self.world, self.tokens, self._count(part), self.size)
        return buffer[start : start + self._of(part)].view(shape)

    def whole(self, buffer: torch.Tensor, part: str, group: int) -> torch.Tensor:
        """A group's q, k or v over all tokens: (batch, all tokens, heads, size), a view."""
        return self.inward(buffer, part)[group].flatten(1, 2)

    def outward(self, buffer: torch.Tensor) -> torch.Tensor:
        """Where results lie: (groups, from rank, batch, tokens, heads, size)."""
        shape = (self.groups, self.world, self.batch, self.tokens, self.q_heads, self.size)
        return buffer[self.elements - self._of("q") : self.elements].view(shape)

    def together(self, buffer: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """Write the results of all ranks and groups into `result`, heads in their own order."""
        heads = result.unflatten(2, (self.world, self.groups, self.q_heads))
        heads.copy_(self.outward(buffer).permute(2, 3, 1, 0, 4, 5))
        return result

    def _count(self, part: str) -> int:
        return self.q_heads if part == "q" else self.kv_heads

    def _of(self, part: str) -> int:
        return self.groups * self.batch * self.world * self.tokens * self._count(part) * self.size


def _opened(handle: _Handle, device: torch.device) -> torch.Tensor:
    rebuild, arguments = handle
    here = (*arguments[:_DEVICE_ARGUMENT], device.index, *arguments[_DEVICE_ARGUMENT + 1 :])
    return rebuild(*here)


def _device_name() -> str:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return str(getattr(properties, "uuid", properties.name))


@contextlib.contextmanager
def _plain_segments() -> Iterator[None]:
    """Allocate outside expandable segments, which not every driver and container can share by IPC."""
    settings = torch._C._cuda_memorySnapshot(None).get("allocator_settings", {})
    if not settings.get("expandable_segments", False):
        yield
        return
    # Each setting puts those that it does not name back to their defaults: so all are named, both times.
    all_of_them = settings.get("PYTORCH_CUDA_ALLOC_CONF", "") or "expandable_segments:True"
    others = [each for each in all_of_them.split(",") if not each.strip().startswith("expandable_segments")]
    _set_allocator(",".join([*others, "expandable_segments:False"]))
    try:
        yield
    finally:
        _set_allocator(all_of_them)


def _set_allocator(settings: str) -> None:
    newer = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # the other warns where this one is
    (newer or torch.cuda.memory._set_allocator_settings)(settings)

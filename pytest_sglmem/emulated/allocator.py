"""The caching allocator of one emulated device, as torch's works: sizes, splitting, reuse, misses, out of memory. Pure.

Sizes are rounded to 512 bytes; blocks up to 1 MiB come from segments of 2 MiB, larger ones from segments of 20 MiB or,
from 10 MiB on, of their own size rounded to 2 MiB. The smallest free block of the same stream that is large enough is
taken and split where enough is left over (512 bytes in small segments, more than 1 MiB in large ones; what is not split
off counts as allocated, as on hardware). A miss first calls `on_miss` (torch collects its IPC limbo there), then takes
a new segment.

It holds no memory and knows no tensor. An address is never handed out twice, so an address names one block for ever;
for that the addresses of one segment's blocks do not follow each other as they would on hardware. Not modelled:
private pools, expandable segments, PYTORCH_CUDA_ALLOC_CONF.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from types import CodeType

from .tally import Tally, number

Stack = tuple[tuple[CodeType, int], ...]  # code and instruction, innermost first

ROUND = 512
SMALL = 1 << 20
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20
LARGE_FROM = 10 << 20
ROUND_SEGMENT = 2 << 20
ADDRESSES_A_DEVICE = 1 << 48
FIRST_ADDRESS = 1 << 52

COUNTS = ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free")


class OutOfDeviceMemory(Exception):
    """A segment of `wanted` bytes did not fit. The numbers are those that torch's message gives."""

    def __init__(self, requested: int, wanted: int) -> None:
        super().__init__(f"{wanted} bytes for a block of {requested}")
        self.requested = requested
        self.wanted = wanted


# Free room, in the order in which it is taken: the smallest first, then the oldest segment, then the lowest.
Room = list[tuple[int, int, int, "Block"]]


class Segment:
    """What one cudaMalloc gave. Its blocks are a chain without a gap, from `first` on."""

    __slots__ = ("address", "device", "first", "frames", "number", "size", "small", "stream")

    def __init__(
        self, device: int, number: int, address: int, size: int, small: bool, stream: int, frames: Stack
    ) -> None:
        self.device = device
        self.number = number
        self.address = address
        self.size = size
        self.small = small
        self.stream = stream
        self.frames = frames
        self.first = Block(self, 0, size)


class Block:
    """A piece of a segment. `state`: "inactive" (free), "active_allocated", "active_pending_free"."""

    __slots__ = ("address", "frames", "next", "offset", "previous", "requested", "segment", "size", "state", "streams")

    def __init__(self, segment: Segment, offset: int, size: int) -> None:
        self.segment = segment
        self.offset = offset
        self.size = size
        self.requested = 0
        self.address = 0
        self.state = "inactive"
        self.frames: Stack = ()
        self.streams: set[int] | None = None
        self.previous: Block | None = None
        self.next: Block | None = None


class Pool:
    """Small or large segments: the free room of each stream, and the pool's numbers."""

    __slots__ = ("free", "keeps", "pieces", "tally", "whole", "whole_bytes")

    def __init__(self, keeps: int) -> None:
        self.free: dict[int, Room] = {}
        self.keeps = keeps  # what is left of a block is split off from this size on
        self.tally = Tally()
        self.pieces = 0  # free blocks; `whole` of them are whole segments
        self.whole = self.whole_bytes = 0


def rounded(size: int) -> int:
    """`size` as the allocator rounds it: to multiples of 512 bytes."""
    return ROUND if size < ROUND else (size + ROUND - 1) // ROUND * ROUND


def segment_size(size: int) -> int:
    """How large a segment is taken for a block of `size` rounded bytes."""
    if size <= SMALL:
        return SMALL_SEGMENT
    if size < LARGE_FROM:
        return LARGE_SEGMENT
    return (size + ROUND_SEGMENT - 1) // ROUND_SEGMENT * ROUND_SEGMENT


class Allocator:
    """The caching allocator of device `index`, whose memory is `total` bytes.

    `on_miss` is called when no free block fits, before a new segment is taken; it may free blocks. `note` is told of
    every event: device, action (as torch names it), address, size, stream, and where there is one a stack.
    """

    def __init__(self, index: int, total: int, on_miss: Callable[[], None] = lambda: None) -> None:
        self.index = index
        self.total = total
        self.fraction = 1.0
        self._on_miss = on_miss
        self.note: Callable[..., None] | None = None
        self._small, self._large = Pool(ROUND), Pool(SMALL + 1)
        self._all = Tally()
        self._segments: dict[int, Segment] = {}
        self._next_segment = 0
        self._next_address = FIRST_ADDRESS + index * ADDRESSES_A_DEVICE
        self._waiting: list[Block] = []
        self.counts = dict.fromkeys(COUNTS, 0)

    # -- allocation ------------------------------------------------------------------------------------------------

    def allocate(self, requested: int, stream: int, frames: Stack = ()) -> Block:
        """A block of at least `requested` bytes (more than none). Raises OutOfDeviceMemory."""
        if self._waiting:
            self.finish_waiting()
        size = rounded(requested)
        pool = self._small if size <= SMALL else self._large
        block = self._take(pool, size, stream)
        if block is None:
            self._on_miss()
            block = self._take(pool, size, stream) or self._take_new(pool, requested, size, stream, frames)
        if block.size - size >= pool.keeps:
            self._split(pool, block, size)
        block.requested = requested
        block.frames = frames
        block.state = "active_allocated"
        block.address = self._next_address
        self._next_address += block.size
        pool.tally.up(block.size, requested)
        self._all.up(block.size, requested)
        self._count_splits(pool)
        if self.note is not None:
            self.note(self.index, "alloc", block.address, block.size, stream, frames)
        return block

    def free(self, block: Block) -> None:
        """The block's last use ended. Where other streams used it, it waits for the next allocation, as torch does."""
        pool = self._small if block.segment.small else self._large
        pool.tally.down(block.size, block.requested)
        self._all.down(block.size, block.requested)
        if self.note is not None:
            self.note(self.index, "free_requested", block.address, block.size, block.segment.stream)
        if not block.streams:
            self._give_back(pool, block)
            return
        block.state = "active_pending_free"
        self._waiting.append(block)
        for tally in (pool.tally, self._all):
            tally.waiting += 1
            tally.waiting_bytes += block.size

    def fits(self, requested: int, stream: int) -> bool:
        """Whether a block of so many bytes can be had, be it after the cache is given back. Changes nothing."""
        size = rounded(requested)
        pool = self._small if size <= SMALL else self._large
        room = pool.free.get(stream)
        if room and room[-1][0] >= size:
            return True
        cached = self._small.whole_bytes + self._large.whole_bytes
        return self.reserved - cached + segment_size(size) <= self.limit

    def finish_waiting(self) -> None:
        """Give back the blocks whose other streams are done, which on the emulated device they are at once."""
        waiting, self._waiting = self._waiting, []
        for block in waiting:
            pool = self._small if block.segment.small else self._large
            for tally in (pool.tally, self._all):
                tally.waiting -= 1
                tally.waiting_bytes -= block.size
            block.streams = None
            self._give_back(pool, block)

    def empty(self) -> None:
        """Give segments without a live block back to the driver."""
        self.finish_waiting()
        for segment in [known for known in self._segments.values() if _is_whole_free(known)]:
            self._drop_segment(segment)

    def _take(self, pool: Pool, size: int, stream: int) -> Block | None:
        room = pool.free.get(stream)
        if not room:
            return None
        at = bisect_left(room, (size,))  # type: ignore[arg-type]
        if at == len(room):
            return None
        block = room.pop(at)[3]
        pool.pieces -= 1
        if block.size == block.segment.size:
            pool.whole -= 1
            pool.whole_bytes -= block.size
        return block

    def _take_new(self, pool: Pool, requested: int, size: int, stream: int, frames: Stack) -> Block:
        wanted = segment_size(size)
        if not self._fits(wanted):
            self.counts["num_alloc_retries"] += 1
            self.empty()
            if not self._fits(wanted):
                self.counts["num_ooms"] += 1
                self._tell("oom", 0, wanted, stream, frames)
                raise OutOfDeviceMemory(requested, wanted)
        number = self._next_segment
        self._next_segment += 1
        segment = Segment(self.index, number, self.address(wanted), wanted, pool is self._small, stream, frames)
        self._segments[number] = segment
        self._tell("segment_alloc", segment.address, wanted, stream, frames)
        self.counts["num_device_alloc"] += 1
        pool.tally.reserve(wanted)
        self._all.reserve(wanted)
        return segment.first

    def _fits(self, wanted: int) -> bool:
        return self.reserved + wanted <= self.limit

    def _split(self, pool: Pool, block: Block, size: int) -> None:
        segment, follower = block.segment, block.next
        rest = Block(segment, block.offset + size, block.size - size)
        block.size = size
        rest.previous, rest.next = block, follower
        if follower is not None:
            follower.previous = rest
        block.next = rest
        self._put(pool, rest)

    def _put(self, pool: Pool, block: Block) -> None:
        segment = block.segment
        room = pool.free.get(segment.stream)
        if room is None:
            room = pool.free[segment.stream] = []
        insort(room, (block.size, segment.number, block.offset, block))
        pool.pieces += 1

    def _remove(self, pool: Pool, block: Block) -> None:
        room = pool.free[block.segment.stream]
        del room[bisect_left(room, (block.size, block.segment.number, block.offset))]  # type: ignore[arg-type]
        pool.pieces -= 1

    def _give_back(self, pool: Pool, block: Block) -> None:
        if self.note is not None:
            self.note(self.index, "free_completed", block.address, block.size, block.segment.stream)
        block.state = "inactive"
        block.frames = ()
        block.address = block.requested = 0
        follower, previous = block.next, block.previous
        if follower is not None and follower.state == "inactive":
            self._remove(pool, follower)
            _swallow(block, follower)
        if previous is not None and previous.state == "inactive":
            self._remove(pool, previous)
            _swallow(previous, block)
            block = previous
        self._put(pool, block)
        if block.size == block.segment.size:
            pool.whole += 1
            pool.whole_bytes += block.size
        self._count_splits(pool)

    def _drop_segment(self, segment: Segment) -> None:
        pool = self._small if segment.small else self._large
        self._remove(pool, segment.first)
        pool.whole -= 1
        pool.whole_bytes -= segment.size
        del self._segments[segment.number]
        self._tell("segment_free", segment.address, segment.size, segment.stream)
        self.counts["num_device_free"] += 1
        pool.tally.unreserve(segment.size)
        self._all.unreserve(segment.size)

    def address(self, size: int) -> int:
        """A range of `size` bytes that nobody had before and nobody gets again."""
        address = self._next_address
        self._next_address += size
        return address

    def _tell(self, action: str, address: int, size: int, stream: int, frames: Stack = ()) -> None:
        if self.note is not None:
            self.note(self.index, action, address, size, stream, frames)

    # -- numbers ---------------------------------------------------------------------------------------------------

    def _count_splits(self, pool: Pool) -> None:
        tally = pool.tally
        pieces = pool.pieces - pool.whole - tally.split
        size = tally.reserved - tally.bytes - tally.waiting_bytes - pool.whole_bytes - tally.split_bytes
        if pieces or size:
            tally.splits(pieces, size)
            self._all.splits(pieces, size)

    @property
    def limit(self) -> int:
        """Bytes that may be reserved: all, or the fraction that the process may take."""
        return int(self.total * self.fraction)

    @property
    def allocated(self) -> int:
        """Bytes in live blocks."""
        return self._all.bytes

    @property
    def reserved(self) -> int:
        """Bytes in segments, live or cached."""
        return self._all.reserved

    def statistics(self) -> dict[str, object]:
        """Nested, as `torch._C._cuda_memoryStats` gives them."""
        everything, small, large = self._all.read(), self._small.tally.read(), self._large.tally.read()
        pools: dict[str, object] = {
            name: {"all": told, "small_pool": small[name], "large_pool": large[name]}
            for name, told in everything.items()
        }
        oversize = {name: number(0, 0, 0) for name in ("oversize_allocations", "oversize_segments")}
        return {**pools, **oversize, **self.counts, "max_split_size": -1}

    def reset_peaks(self) -> None:
        """Every peak is what is there now."""
        for tally in (self._all, self._small.tally, self._large.tally):
            tally.reset_peaks()

    def reset_accumulated(self) -> None:
        """What was allocated and freed so far is forgotten, and so are the counts of events."""
        for tally in (self._all, self._small.tally, self._large.tally):
            tally.reset_accumulated()
        self.counts = dict.fromkeys(COUNTS, 0)

    def segments(self) -> Iterator[tuple[Segment, list[Block]]]:
        """Every segment with its blocks, live and free, in order of their place."""
        for segment in list(self._segments.values()):
            blocks: list[Block] = []
            block: Block | None = segment.first
            while block is not None:
                blocks.append(block)
                block = block.next
            yield segment, blocks


def _is_whole_free(segment: Segment) -> bool:
    return segment.first.state == "inactive" and segment.first.size == segment.size


def _swallow(block: Block, follower: Block) -> None:
    """`block` takes the room of the free one behind it."""
    block.size += follower.size
    block.next = follower.next
    if follower.next is not None:
        follower.next.previous = block
    follower.previous = follower.next = None

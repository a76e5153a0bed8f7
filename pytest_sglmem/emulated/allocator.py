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
from typing import NamedTuple


Stack = tuple[tuple[CodeType, int], ...]  # code and instruction, innermost first

ROUND = 512
SMALL = 1 << 20
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20
LARGE_FROM = 10 << 20
ROUND_SEGMENT = 2 << 20
ADDRESSES_A_DEVICE = 1 << 48
FIRST_ADDRESS = 1 << 52
STATISTICS = (
    "allocation",
    "segment",
    "active",
    "inactive_split",
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
)


class OutOfDeviceMemory(Exception):
    """A segment of `wanted` bytes did not fit. The numbers are those that torch's message gives."""

    def __init__(self, requested: int, wanted: int) -> None:
        super().__init__(f"{wanted} bytes for a block of {requested}")
        self.requested = requested
        self.wanted = wanted


class Place(NamedTuple):
    """Where free room is, and the order in which it is taken: the smallest first, then the oldest segment."""

    size: int
    segment: int
    offset: int


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

    @property
    def place(self) -> Place:
        """Where it is, in the order in which free room is taken."""
        return Place(self.size, self.segment.number, self.offset)


class Statistic:
    """One number over time, as torch keeps it."""

    __slots__ = ("allocated", "current", "freed", "peak")

    def __init__(self) -> None:
        self.current = self.peak = self.allocated = self.freed = 0

    def up(self, by: int) -> None:
        """It grew."""
        self.allocated += by
        self.current = now = self.current + by
        if now > self.peak:
            self.peak = now

    def down(self, by: int) -> None:
        """It shrank."""
        self.freed += by
        self.current -= by

    def move_to(self, value: int) -> None:
        """It is `value` now."""
        if value > self.current:
            self.up(value - self.current)
        elif value < self.current:
            self.down(self.current - value)

    def reset_peak(self) -> None:
        """The peak is forgotten: it is what is there now."""
        self.peak = self.current

    def reset_accumulated(self) -> None:
        """What was allocated and freed so far is forgotten."""
        self.allocated = self.freed = 0

    def read(self) -> dict[str, int]:
        """As torch names the four."""
        return {"current": self.current, "peak": self.peak, "allocated": self.allocated, "freed": self.freed}


class Pool:
    """Small or large segments: the free room of each stream, and the statistics torch keeps for the pool."""

    def __init__(self) -> None:
        self.free: dict[int, list[tuple[Place, Block]]] = {}
        self.numbers = {name: Statistic() for name in STATISTICS}
        self.whole_free = 0
        self.whole_free_segments = 0

    def room(self, stream: int) -> list[tuple[Place, Block]]:
        """The free blocks of a stream, smallest first."""
        found = self.free.get(stream)
        if found is None:
            found = self.free[stream] = []
        return found


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
        self._small, self._large = Pool(), Pool()
        self._all = {name: Statistic() for name in STATISTICS}
        self._segments: dict[int, Segment] = {}
        self._next_segment = 0
        self._next_address = FIRST_ADDRESS + index * ADDRESSES_A_DEVICE
        self._pending: list[Block] = []
        self.counts = dict.fromkeys(
            (
                "num_alloc_retries",
                "num_ooms",
                "num_sync_all_streams",
                "num_device_alloc",
                "num_device_free",
            ),
            0,
        )

    # -- allocation ------------------------------------------------------------------------------------------------

    def allocate(self, requested: int, stream: int, frames: Stack = ()) -> Block:
        """A block of at least `requested` bytes (more than none). Raises OutOfDeviceMemory."""
        if self._pending:
            self.finish_pending()
        size = rounded(requested)
        pool = self._small if size <= SMALL else self._large
        block = self._take(pool, size, stream)
        if block is None:
            self._on_miss()
            block = self._take(pool, size, stream) or self._take_new(pool, requested, size, stream, frames)
        self._split(pool, block, size)
        block.requested = requested
        block.frames = frames
        block.state = "active_allocated"
        block.address = self.address(block.size)
        self._count_up(pool, block)
        self._tell("alloc", block.address, block.size, stream, frames)
        return block

    def free(self, block: Block) -> None:
        """The block's last use ended. Where other streams used it, it waits for the next allocation, as torch does."""
        pool = self._small if block.segment.small else self._large
        self._count_down(pool, block)
        self._tell("free_requested", block.address, block.size, block.segment.stream)
        if block.streams:
            block.state = "active_pending_free"
            self._pending.append(block)
        else:
            self._give_back(pool, block)

    def finish_pending(self) -> None:
        """Give back the blocks whose other streams are done, which on the emulated device they are at once."""
        pending, self._pending = self._pending, []
        for block in pending:
            block.streams = None
            self._give_back(self._small if block.segment.small else self._large, block)

    def empty(self) -> None:
        """Give segments without a live block back to the driver."""
        self.finish_pending()
        for segment in [known for known in self._segments.values() if self._is_whole_free(known)]:
            self._drop_segment(segment)

    def _take(self, pool: Pool, size: int, stream: int) -> Block | None:
        room = pool.free.get(stream)
        if not room:
            return None
        at = bisect_left(room, ((size, -1, -1),))
        if at == len(room):
            return None
        block = room.pop(at)[1]
        if block.size == block.segment.size:
            pool.whole_free -= block.size
            pool.whole_free_segments -= 1
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
        for numbers in (self._all, pool.numbers):
            numbers["segment"].up(1)
            numbers["reserved_bytes"].up(wanted)
        return segment.first

    def _fits(self, wanted: int) -> bool:
        return self.reserved + wanted <= self.limit

    def _split(self, pool: Pool, block: Block, size: int) -> None:
        left = block.size - size
        if left < ROUND or (pool is self._large and left <= SMALL):
            return
        rest = Block(block.segment, block.offset + size, left)
        block.size = size
        rest.previous, rest.next = block, block.next
        if block.next is not None:
            block.next.previous = rest
        block.next = rest
        insort(pool.room(block.segment.stream), (rest.place, rest), key=_place)

    def _give_back(self, pool: Pool, block: Block) -> None:
        self._tell("free_completed", block.address, block.size, block.segment.stream)
        block.state = "inactive"
        block.frames = ()
        block.address = block.requested = 0
        room = pool.room(block.segment.stream)
        for numbers in (self._all, pool.numbers):
            numbers["active"].down(1)
            numbers["active_bytes"].down(block.size)
        follower, previous = block.next, block.previous
        if follower is not None and follower.state == "inactive":
            self._remove(room, follower)
            self._swallow(block, follower)
        if previous is not None and previous.state == "inactive":
            self._remove(room, previous)
            self._swallow(previous, block)
            block = previous
        insort(room, (block.place, block), key=_place)
        if block.size == block.segment.size:
            pool.whole_free += block.size
            pool.whole_free_segments += 1
        self._count_splits(pool)

    @staticmethod
    def _swallow(block: Block, follower: Block) -> None:
        block.size += follower.size
        block.next = follower.next
        if follower.next is not None:
            follower.next.previous = block
        follower.previous = follower.next = None

    @staticmethod
    def _remove(room: list[tuple[Place, Block]], block: Block) -> None:
        del room[bisect_left(room, block.place, key=_place)]

    def _is_whole_free(self, segment: Segment) -> bool:
        first = segment.first
        return first.state == "inactive" and first.size == segment.size

    def _drop_segment(self, segment: Segment) -> None:
        pool = self._small if segment.small else self._large
        self._remove(pool.room(segment.stream), segment.first)
        pool.whole_free -= segment.size
        pool.whole_free_segments -= 1
        del self._segments[segment.number]
        self._tell("segment_free", segment.address, segment.size, segment.stream)
        self.counts["num_device_free"] += 1
        for numbers in (self._all, pool.numbers):
            numbers["segment"].down(1)
            numbers["reserved_bytes"].down(segment.size)

    def address(self, size: int) -> int:
        """A range of `size` bytes that nobody had before and nobody gets again."""
        address = self._next_address
        self._next_address += size
        return address

    def _tell(self, action: str, address: int, size: int, stream: int, frames: Stack = ()) -> None:
        if self.note is not None:
            self.note(self.index, action, address, size, stream, frames)

    # -- numbers ---------------------------------------------------------------------------------------------------

    def _count_up(self, pool: Pool, block: Block) -> None:
        size, requested = block.size, block.requested
        for numbers in (self._all, pool.numbers):
            numbers["allocation"].up(1)
            numbers["active"].up(1)
            numbers["allocated_bytes"].up(size)
            numbers["active_bytes"].up(size)
            numbers["requested_bytes"].up(requested)
        self._count_splits(pool)

    def _count_down(self, pool: Pool, block: Block) -> None:
        size, requested = block.size, block.requested
        for numbers in (self._all, pool.numbers):
            numbers["allocation"].down(1)
            numbers["allocated_bytes"].down(size)
            numbers["requested_bytes"].down(requested)

    def _count_splits(self, pool: Pool) -> None:
        """Free room in segments that also hold live blocks: it cannot be given back to the driver."""
        numbers = pool.numbers
        split = numbers["reserved_bytes"].current - numbers["active_bytes"].current - pool.whole_free
        pieces = sum(map(len, pool.free.values())) - pool.whole_free_segments
        everything = self._all
        everything["inactive_split_bytes"].move_to(
            everything["inactive_split_bytes"].current + split - numbers["inactive_split_bytes"].current
        )
        everything["inactive_split"].move_to(
            everything["inactive_split"].current + pieces - numbers["inactive_split"].current
        )
        numbers["inactive_split_bytes"].move_to(split)
        numbers["inactive_split"].move_to(pieces)

    @property
    def limit(self) -> int:
        """Bytes that may be reserved: all, or the fraction that the process may take."""
        return int(self.total * self.fraction)

    @property
    def allocated(self) -> int:
        """Bytes in live blocks."""
        return self._all["allocated_bytes"].current

    @property
    def reserved(self) -> int:
        """Bytes in segments, live or cached."""
        return self._all["reserved_bytes"].current

    def statistics(self) -> dict[str, object]:
        """Nested, as `torch._C._cuda_memoryStats` gives them."""
        answer: dict[str, object] = {
            name: {
                "all": self._all[name].read(),
                "small_pool": self._small.numbers[name].read(),
                "large_pool": self._large.numbers[name].read(),
            }
            for name in STATISTICS
        }
        nothing = {"current": 0, "peak": 0, "allocated": 0, "freed": 0}
        return (
            answer
            | self.counts
            | {"max_split_size": -1}
            | {name: dict(nothing) for name in ("oversize_allocations", "oversize_segments")}
        )

    def reset_peaks(self) -> None:
        """Every peak is what is there now."""
        for number in self._each_number():
            number.reset_peak()

    def reset_accumulated(self) -> None:
        """What was allocated and freed so far is forgotten, and so are the counts of events."""
        for number in self._each_number():
            number.reset_accumulated()
        self.counts = dict.fromkeys(self.counts, 0)

    def _each_number(self) -> Iterator[Statistic]:
        for numbers in (self._all, self._small.numbers, self._large.numbers):
            yield from numbers.values()

    def segments(self) -> Iterator[tuple[Segment, list[Block]]]:
        """Every segment with its blocks, live and free, in order of their place."""
        for segment in list(self._segments.values()):
            blocks: list[Block] = []
            block: Block | None = segment.first
            while block is not None:
                blocks.append(block)
                block = block.next
            yield segment, blocks


def _place(entry: tuple[Place, Block]) -> Place:
    return entry[0]

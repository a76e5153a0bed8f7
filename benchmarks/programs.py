"""Random programs for the exactness benchmark: clean ones, and the same with one leak planted.

A program is a list of parts, each a small thing that servers do with device memory (a cache, a pool, a backlog); a step
hands one geometry to each part. Everything comes from the seed. `empty(n)` allocates n bytes; a part's own line calls
it, so that every part has a site of its own. The planted line carries the comment "# <- planted".

What is called clean: each part ends to grow within `SETTLES` cycles, counted from the first of the warm-up, at every
point of the cycle; from then on it may turn over, come and go, but not become more. A cache that needs longer than the
cycles there are is not told from a leak by anything in the trace. (The default runs 13: one of warm-up and up to 12.)
"""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Empty = Callable[[int], object]
Step = Callable[[int], object]
KIB = 1024
SETTLES = 9


@dataclass(frozen=True)
class Plant:
    """The leak: `size` bytes at every `every`-th step, on `ranks`; `compensated`: as much is given back elsewhere."""

    size: int
    every: int
    ranks: tuple[int, ...]
    compensated: bool
    way: str


@dataclass(frozen=True)
class Program:
    """A seeded program for a world of `size` ranks, its `over` in sizes of KiB."""

    seed: int
    size: int
    over: tuple[int, ...]
    parts: tuple[str, ...]
    plant: Plant | None

    def setup(self, rank: int, empty: Empty) -> Step:
        """The step of `rank`."""
        parts = [
            PARTS[name](random.Random(f"{self.seed}/{at}/{rank}"), len(self.over), empty)
            for at, name in enumerate(self.parts)
        ]
        if self.plant is not None and rank in self.plant.ranks:
            rng = random.Random(f"{self.seed}/plant")
            parts.insert(rng.randint(0, len(parts)), WAYS[self.plant.way](self.plant, empty))

        def step(geometry: int) -> None:
            for part in parts:
                part(geometry)

        return step


def program(seed: int, *, leak: bool) -> Program:
    """The program of this seed, with or without a planted leak."""
    rng = random.Random(f"{seed}/{leak}")
    size = rng.randint(1, 4)
    steps = rng.choice([1, 2, 3, 4, 5, 6, 8, 8, 10, 14])
    over = tuple(rng.choice([1, 4, 16, 64, 96, 100, 256, 333, 512]) for _ in range(steps))
    parts = tuple(rng.choice(sorted(PARTS)) for _ in range(rng.randint(1, 4)))
    plant = None
    if leak:
        every = rng.randint(1, min(8, steps))
        ranks = tuple(rank for rank in range(size) if rng.random() < 0.5) or (rng.randrange(size),)
        bytes_ = 512 * 2 ** rng.randint(0, 11) if rng.random() < 0.7 else 512 * rng.randint(1, 2048)
        plant = Plant(bytes_, every, ranks, rng.random() < 0.4, rng.choice(sorted(WAYS)))
    return Program(seed, size, over, parts, plant)


def planted_line() -> int:
    """The number of the line in this file that the planted leak allocates at."""
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith("# <- planted"))


# Clean parts: part(rng, steps a cycle, empty) -> step.


def transient(rng: random.Random, steps: int, empty: Empty) -> Step:
    def step(geometry: int) -> None:
        empty(geometry * KIB)

    return step


def lazy(rng: random.Random, steps: int, empty: Empty) -> Step:
    """A workspace at the first use, which may come cycles later."""
    first, calls, kept = rng.randrange(SETTLES * steps), iter(range(10**9)), []

    def step(geometry: int) -> None:
        if next(calls) == first:
            kept.append(empty(8320 * KIB))

    return step


def by_shape(rng: random.Random, steps: int, empty: Empty) -> Step:
    cache: dict[int, object] = {}

    def step(geometry: int) -> None:
        if geometry not in cache:
            cache[geometry] = empty(geometry * KIB)

    return step


def by_chance(rng: random.Random, steps: int, empty: Empty) -> Step:
    """A cache whose keys come at random: it fills ever more slowly. No key is new after `SETTLES` cycles."""
    cache: dict[int, object] = {}
    keys, calls = rng.randint(2, 16), iter(range(10**9))

    def step(geometry: int) -> None:
        key = rng.randrange(keys) if next(calls) < SETTLES * steps else next(iter(cache))
        if key not in cache:
            cache[key] = empty(64 * KIB)

    return step


def lru(rng: random.Random, steps: int, empty: Empty) -> Step:
    """Fresh keys, evicted by count: fills within `SETTLES` cycles, then turns over."""
    kept: OrderedDict[int, object] = OrderedDict()
    cap, calls = rng.randint(1, SETTLES * steps), iter(range(10**9))

    def step(geometry: int) -> None:
        kept[next(calls)] = empty(geometry * KIB)
        if len(kept) > cap:
            kept.popitem(last=False)

    return step


def lru_of_two(rng: random.Random, steps: int, empty: Empty) -> Step:
    """Two lines share one full cache: what one gains the other loses."""
    kept: OrderedDict[int, object] = OrderedDict()
    cap, calls = rng.randint(2, max(2, SETTLES * steps)), iter(range(10**9))

    def step(geometry: int) -> None:
        if rng.random() < 0.5:
            kept[next(calls)] = empty(64 * KIB)
        else:
            kept[next(calls)] = empty(64 * KIB)
        if len(kept) > cap:
            kept.popitem(last=False)

    return step


def lru_hits(rng: random.Random, steps: int, empty: Empty) -> Step:
    """A cache with hits: an entry that is used stays, whatever its age."""
    kept: OrderedDict[int, object] = OrderedDict()
    keys = rng.randint(3, 30)
    cap = rng.randint(2, min(keys, max(2, 2 * steps)))

    def step(geometry: int) -> None:
        key = min(rng.randrange(keys), rng.randrange(keys))
        if key in kept:
            kept.move_to_end(key)
        else:
            kept[key] = empty((key % 7 + 1) * 16 * KIB)
            if len(kept) > cap:
                kept.popitem(last=False)

    return step


def by_budget(rng: random.Random, steps: int, empty: Empty) -> Step:
    """A cache with a budget of bytes and entries of all sizes: full within `SETTLES` cycles.

    Sizes come at random where it is full within six; beyond that they repeat, so that full is full. With random ones
    what it holds creeps on towards the budget, now and then through all 13 cycles (1 of 1,000 programs was accused).
    """
    entries = rng.randint(1, SETTLES * steps)
    sizes = [rng.choice([1, 3, 17, 64, 100]) * KIB for _ in range(200 if entries <= 6 * steps else entries)]
    budget, used = sum(sizes[:entries]), 0
    kept: deque[tuple[int, object]] = deque()
    calls = iter(range(10**9))

    def step(geometry: int) -> None:
        nonlocal used
        size = sizes[next(calls) % len(sizes)]
        kept.append((size, empty(size)))
        used += size
        while used > budget:
            used -= kept.popleft()[0]

    return step


def largest(rng: random.Random, steps: int, empty: Empty) -> Step:
    """A workspace that grows to the largest call seen."""
    state: dict[str, object] = {"size": 0}

    def step(geometry: int) -> None:
        if state["size"] < geometry:  # type: ignore[operator]
            state["block"] = None
            state["block"], state["size"] = empty(geometry * KIB), geometry

    return step


def free_list(rng: random.Random, steps: int, empty: Empty) -> Step:
    """A pool that takes its blocks back."""
    pool: list[object] = []
    most = rng.randint(1, 6)

    def step(geometry: int) -> None:
        count = 1 + geometry % most
        pool.extend([pool.pop() if pool else empty(32 * KIB) for _ in range(count)])

    return step


def sawtooth(rng: random.Random, steps: int, empty: Empty) -> Step:
    """A backlog that drains every `full` steps, in step with the cycle or not."""
    backlog: list[object] = []
    full = rng.randint(2, max(3, 2 * steps))

    def step(geometry: int) -> None:
        backlog.append(empty(geometry * KIB))
        if len(backlog) == full:
            backlog.clear()

    return step


def last_one(rng: random.Random, steps: int, empty: Empty) -> Step:
    state: dict[str, object] = {}

    def step(geometry: int) -> None:
        state["last"] = empty(geometry * KIB)

    return step


def ring(rng: random.Random, steps: int, empty: Empty) -> Step:
    kept: deque[object] = deque(maxlen=rng.randint(2, SETTLES * steps + 1))

    def step(geometry: int) -> None:
        kept.append(empty(48 * KIB))

    return step


def growing(rng: random.Random, steps: int, empty: Empty) -> Step:
    """A sequence that grows within a cycle and starts anew with the next."""
    kept: list[object] = []
    calls = iter(range(10**9))

    def step(geometry: int) -> None:
        at = next(calls) % steps
        if at == 0:
            kept.clear()
        kept.append(empty((at + 1) * 16 * KIB))

    return step


def doubling(rng: random.Random, steps: int, empty: Empty) -> Step:
    """A buffer that doubles until it holds what it must, then stays."""
    state: dict[str, object] = {"size": 1, "need": 0}
    stop = rng.randint(2, SETTLES * steps)

    def step(geometry: int) -> None:
        state["need"] = min(stop, state["need"] + 1)  # type: ignore[operator, call-overload]
        if state["need"] > state["size"] or "block" not in state:  # type: ignore[operator]
            state["size"] = 2 * state["size"]  # type: ignore[operator]
            state["block"] = empty(state["size"] * KIB)  # type: ignore[operator]

    return step


PARTS: dict[str, Callable[[random.Random, int, Empty], Step]] = {
    part.__name__: part
    for part in (transient, lazy, by_shape, by_chance, lru, lru_of_two, lru_hits, by_budget, largest, free_list)
} | {part.__name__: part for part in (sawtooth, last_one, ring, growing, doubling)}


# Leaks: way(plant, empty) -> step. All allocate at the one planted line.


def _planted(plant: Plant, empty: Empty, keep: Callable[[object], None]) -> Step:
    spare = [empty(plant.size) for _ in range(14 * 16)] if plant.compensated else []
    calls = iter(range(10**9))

    def step(geometry: int) -> None:
        block = empty(plant.size)  # <- planted
        if next(calls) % plant.every == plant.every - 1:
            keep(block)
            if spare:
                spare.pop()

    return step


def appended(plant: Plant, empty: Empty) -> Step:
    kept: list[object] = []
    return _planted(plant, empty, kept.append)


def keyed(plant: Plant, empty: Empty) -> Step:
    kept: dict[int, object] = {}
    return _planted(plant, empty, lambda block: kept.__setitem__(len(kept), block))


def chained(plant: Plant, empty: Empty) -> Step:
    """Each block hangs on the next, as the results of a graph that nobody cuts do."""
    state: list[object] = [None]

    def keep(block: object) -> None:
        state[0] = (block, state[0])

    return _planted(plant, empty, keep)


WAYS: dict[str, Callable[[Plant, Empty], Step]] = {way.__name__: way for way in (appended, keyed, chained)}

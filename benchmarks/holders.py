"""How long the search for holders takes in a process with many objects.

    python benchmarks/holders.py [--objects 1000000] [--blocks 64]

A CPU tensor's storage stands for a device block: the search is the same. Each row is one search: for blocks that a
module holds behind four links, for blocks behind a chain that is too long to be told, and for blocks that no Python
object leads to, which is the longest way, because everything is looked at and then once more with the heap thawed.
Exit status 1 where a search took longer than its own limit.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import types
from collections.abc import Callable

import torch

from pytest_sglmem.holders import LIMIT, chains_for_blocks


class Request:
    """One of a server's many objects: an instance, its dictionary, a list and a tuple."""

    def __init__(self, number: int, before: Request | None) -> None:
        self.tokens = [number, (number, before)]


def heap(objects: int) -> list[Request]:
    """About as many tracked objects, which refer to each other in runs of 100."""
    made: list[Request] = []
    for number in range(objects // 4):
        made.append(Request(number, made[-1] if number % 100 else None))
    return made


def in_a_store(app: types.ModuleType, blocks: list[torch.Tensor]) -> None:
    app.ENGINE = types.SimpleNamespace(store={f"request-{at}": [block] for at, block in enumerate(blocks)})


def behind_a_long_chain(app: types.ModuleType, blocks: list[torch.Tensor]) -> None:
    app.CHAIN = blocks
    for _ in range(40):
        app.CHAIN = [app.CHAIN]


def by_nobody(app: types.ModuleType, blocks: list[torch.Tensor]) -> None:
    app.FUTURES = [torch.futures.Future() for _ in blocks]
    for future, block in zip(app.FUTURES, blocks, strict=True):
        future.set_result(block)


def held(app: types.ModuleType, hold: Callable[[types.ModuleType, list[torch.Tensor]], None], blocks: int) -> list[int]:
    """Hold so many blocks in this way; their addresses."""
    made = [torch.zeros(8) for _ in range(blocks)]
    hold(app, made)
    return [one.untyped_storage().data_ptr() for one in made]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objects", type=int, default=1_000_000)
    parser.add_argument("--blocks", type=int, default=64)
    asked = parser.parse_args()
    app = sys.modules["app"] = types.ModuleType("app")
    gc.freeze()  # as in a rank: what was imported is frozen
    app.REQUESTS = heap(asked.objects)
    slowest = 0.0
    print(f"{len(gc.get_objects()):,} tracked objects, {gc.get_freeze_count():,} frozen, {asked.blocks} blocks")
    for hold in (in_a_store, behind_a_long_chain, by_nobody):
        where = held(app, hold, asked.blocks)
        begun = time.perf_counter()
        found = chains_for_blocks(where)
        took = time.perf_counter() - begun
        slowest = max(slowest, took)
        print(f"{hold.__name__:<22}{took:>7.2f} s  {found[0] if found else 'nothing'}"[:120])
    return int(slowest > LIMIT)


if __name__ == "__main__":
    raise SystemExit(main())

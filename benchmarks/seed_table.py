"""The table of the two public reports, redone: requests of varied and of fixed video geometry, before and after.

    python benchmarks/seed_table.py [--ranks 8] [--device cuda|emulated] [--json FILE]

Before is `OneHandleForAll`, after is `UlyssesAllToAll`; both run the same requests on the same inputs: a few denoising
steps of attention over video and prompt tokens, then the exchange of a tiled decoder, which is one size more than the
staging cap holds. After each request: live bytes of every rank, as they are, the time, a digest of the output; at the
end: which lines allocated what grew. With 8 ranks on one GPU the backend is gloo.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from ranks import on_ranks

from pytest_sglmem.geometry import Geometry, geometries

STEPS = 4
PROMPT_TOKENS = 256
CAP = 4  # staging buffers: the four sizes of a denoising step; the decoder's exchange is the fifth
SETTLED = 3  # requests after which growth by line is counted


def series(rank: int, code: str, requests: list[Geometry], scale: int) -> dict:
    """All requests through one all-to-all on this rank: bytes, milliseconds and a digest a request, growth by line."""
    import torch

    from pytest_sglmem.digests import digest
    from pytest_sglmem.reference import UlyssesAllToAll
    from pytest_sglmem.reference.replaced_ulysses import OneHandleForAll
    from pytest_sglmem.sources import Recording, reading

    bank = noise(rank, max(largest(geometry, scale) for geometry in requests))
    all_to_all = {"before": OneHandleForAll, "after": UlyssesAllToAll}[code](max_staging=CAP)
    live, milliseconds, digests, settled = [], [], [], {}
    with Recording():
        for number, geometry in enumerate(requests):
            begin = time.perf_counter()
            output = request(all_to_all.exchange, geometry, bank, scale)
            torch.cuda.synchronize()
            milliseconds.append((time.perf_counter() - begin) * 1e3)
            digests.append(digest(output))
            del output
            torch.distributed.barrier()
            live.append(reading(torch.cuda.current_device()).live)
            if number + 1 == SETTLED:
                settled = by_site()
        grown = {site: size - settled.get(site, 0) for site, size in by_site().items()}
    return {
        "live": live,
        "ms": milliseconds,
        "digests": digests,
        "grown": {site: size for site, size in grown.items() if size},
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }


def request(exchange: Callable, geometry: Geometry, bank: object, scale: int) -> object:
    """One request: denoising steps of joint attention, then the decoder's exchange. Returns this rank's tokens."""
    import torch
    import torch.distributed as dist

    world = dist.get_world_size()
    video = [part(bank, geometry.query_shape(world), 0)]
    video += [part(bank, geometry.key_shape(world), offset) for offset in (512, 1024)]
    tokens = prompt_tokens(world, scale)
    prompt = [part(bank, (shape[0], tokens, *shape[2:]), 2048) for shape in (tensor.shape for tensor in video)]
    for _ in range(STEPS):
        whole = [gathered(exchange, tensors, world) for tensors in (video, prompt)]
        q, k, v = (torch.cat(parts, dim=2) for parts in zip(*whole, strict=True))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])
        cut = whole[0][0].shape[2]
        video[0] = scattered(exchange, out[:, :, :cut], world)
        prompt[0] = scattered(exchange, out[:, :, cut:], world)
    tiles = exchange(video[0].flatten()[: video[0].numel() // (4 * world) * world].contiguous())
    return [video[0], prompt[0], tiles.clone()]


def gathered(exchange: Callable, tensors: list, world: int) -> list:
    """q, k and v of this rank's heads over all tokens, (batch, heads, tokens, size), in one exchange."""
    import torch

    cut = [tensor.unflatten(2, (world, -1)).permute(2, 0, 1, 3, 4) for tensor in tensors]
    received = exchange(torch.cat([chunk.reshape(world, -1) for chunk in cut], dim=1))
    parts = received.split([chunk[0].numel() for chunk in cut], dim=1)
    # (from rank, batch, tokens, heads, size) -> (batch, heads, all tokens, size)
    return [
        each.reshape(chunk.shape).permute(1, 3, 0, 2, 4).flatten(2, 3) for each, chunk in zip(parts, cut, strict=True)
    ]


def scattered(exchange: Callable, out: object, world: int) -> object:
    """The way back: (batch, heads of this rank, all tokens, size) -> (batch, tokens of this rank, all heads, size)."""
    chunks = out.unflatten(2, (world, -1)).permute(2, 0, 3, 1, 4).contiguous()
    return exchange(chunks).permute(1, 2, 0, 3, 4).flatten(2, 3)


def by_site() -> dict[str, int]:
    """Live bytes of this rank by the line that allocated them."""
    import torch

    from pytest_sglmem.sources import Census

    sizes: dict[str, int] = {}
    for blocks in Census(torch.cuda.current_device()).take(0):
        sizes[blocks.site] = sizes.get(blocks.site, 0) + blocks.bytes
    return sizes


def noise(rank: int, elements: int) -> object:
    """The same random numbers in every run, different on every rank."""
    import torch

    generator = torch.Generator().manual_seed(rank)
    return torch.randn(elements, generator=generator).to(torch.bfloat16).cuda()


def part(bank: object, shape: tuple[int, ...], offset: int) -> object:
    """A tensor of `shape` from the bank, from `offset` on."""
    elements = shape[0] * shape[1] * shape[2] * shape[3]
    return bank[offset : offset + elements].view(shape)


def largest(geometry: Geometry, scale: int) -> int:
    """Elements of the bank that a request needs."""
    batch, tokens, heads, size = geometry.query_shape(1)
    return batch * max(tokens, PROMPT_TOKENS) * heads * size + 4096


def prompt_tokens(world: int, scale: int) -> int:
    """Prompt tokens of one rank."""
    return max(1, PROMPT_TOKENS // scale // world)


def compare(kind: str, requests: list[Geometry], ranks: int, scale: int, device: str) -> dict:
    """Both codes on the same requests: what the table and the JSON say."""
    row: dict = {"kind": kind, "requests": len(requests), "geometries": [str(geometry) for geometry in requests]}
    digests = {}
    for code in ("before", "after"):
        results = on_ranks(series, ranks, code, requests, scale, device=device)
        digests[code] = [result["digests"] for result in results]
        live = [sum(column) for column in zip(*(result["live"] for result in results), strict=True)]
        grown: dict[str, int] = {}
        for result in results:
            for site, size in result["grown"].items():
                grown[site] = grown.get(site, 0) + size
        total = sum(size for size in grown.values() if size > 0)
        row[code] = {
            "live_bytes": live,
            "live_bytes_by_rank": [result["live"] for result in results],
            "grown_by_site": grown,
            "share": {site: size / total for site, size in grown.items() if size > 0},
            "ms": [max(column) for column in zip(*(result["ms"] for result in results), strict=True)],
        }
        row |= {key: results[0][key] for key in ("device", "torch")}
    pairs = zip(zip(*digests["before"], strict=True), zip(*digests["after"], strict=True), strict=True)
    row["same_outputs"] = sum(before == after for before, after in pairs)
    return row


def line(row: dict, code: str) -> str:
    """One line of the table."""
    said = row[code]
    live, half = said["live_bytes"], row["requests"] // 2  # the second half repeats the first
    top = max(said["share"].items(), key=lambda item: item[1], default=("-", 0.0))
    return (
        f"{row['kind']:7}{code:7}{live[half - 1] / 2**20:10.1f}{live[-1] / 2**20:10.1f}"
        f"{(live[-1] - live[half - 1]) / 2**20 / half:10.3f}"
        f"{statistics.median(said['ms'][half:]):10.1f}   {row['same_outputs']}/{row['requests']}   "
        f"{top[1]:.0%} {top[0]}"
    )


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--device", default="cuda", choices=["cuda", "emulated"])
    parser.add_argument("--scale", type=int, help="divides the published sequence lengths (8 on cuda, 512 emulated)")
    parser.add_argument("--varied", type=int, default=40)
    parser.add_argument("--fixed", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    scale = args.scale or (8 if args.device == "cuda" else 512)
    table = geometries(args.ranks, count=20, scale=scale, seed=args.seed)
    middle = sorted(table, key=lambda geometry: geometry.query_bytes(args.ranks))[len(table) // 2]
    rows = [
        compare("varied", [table[i % len(table)] for i in range(args.varied)], args.ranks, scale, args.device),
        compare("fixed", [middle] * args.fixed, args.ranks, scale, args.device),
    ]
    print(f"{args.ranks} ranks, {rows[0]['device']}, torch {rows[0]['torch']}, sequence lengths 1/{scale}")
    print("live MiB of all ranks: after half of the requests, at the end, growth a request; median ms a request;")
    print("outputs the same before and after; which line's blocks grew")
    for row in rows:
        for code in ("before", "after"):
            print(line(row, code))
    if args.json:
        args.json.write_text(json.dumps({"ranks": args.ranks, "scale": scale, "rows": rows}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

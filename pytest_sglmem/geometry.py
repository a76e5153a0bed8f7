"""Varied tensor geometries, computed from the shapes of published video models.

A memory fault of a cache shows only where geometry varies: with one geometry nothing is rebuilt, and even a faulty
shape is flat. `geometries` gives what a server of several models sees: heads and head sizes as published, sequence
lengths from real resolutions and frame counts through the VAE's strides and the patch sizes, scaled down to fit a
small machine and padded, as sequence parallelism pads them, to divide among the ranks.

It knows numbers only: no tensor is made here and torch is not imported. `fixtures/geometries` holds the same table
with the source of every number.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

_ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
_SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
_DIFFUSERS = "diffusers 0.42.1, "


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shape of one attention call of one video model, over all ranks of a world.

    `sequence`: tokens of all ranks together (scaled, padded to divide by the ranks); `heads` and `kv_heads`: query and
    key/value heads (padded alike); `dtype`: a torch dtype's name; `video`: width x height x frames it came from;
    `source`: where the model's numbers are published.
    """

    model: str
    batch: int
    sequence: int
    heads: int
    kv_heads: int
    head_size: int
    dtype: str
    source: str
    video: str = ""

    def query_shape(self, world: int) -> tuple[int, int, int, int]:
        """(batch, tokens of one rank, heads, head size): a rank's query before the exchange."""
        return (self.batch, self.sequence // world, self.heads, self.head_size)

    def key_shape(self, world: int) -> tuple[int, int, int, int]:
        """(batch, tokens of one rank, key/value heads, head size): a rank's key or value before the exchange."""
        return (self.batch, self.sequence // world, self.kv_heads, self.head_size)

    def query_bytes(self, world: int) -> int:
        """Bytes of one rank's query."""
        batch, tokens, heads, size = self.query_shape(world)
        return batch * tokens * heads * size * _ELEMENT_BYTES[self.dtype]

    def __str__(self) -> str:
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        video = f" {self.video}f" * bool(self.video)
        dtype = _SHORT.get(self.dtype, self.dtype)
        return f"{self.model}{video} b{self.batch} s{self.sequence} h{heads} d{self.head_size} {dtype}"


@dataclass(frozen=True, slots=True)
class Model:
    """What a model's publication says: attention shape, VAE strides (frames, pixels), patch (frames, pixels), videos.

    `text`: tokens of the prompt that join the video's in one attention (0 where they are attended across);
    `videos`: (width, height, frames) that its authors or its pipeline name.
    """

    name: str
    heads: int
    kv_heads: int
    head_size: int
    stride: tuple[int, int]
    patch: tuple[int, int]
    text: int
    videos: tuple[tuple[int, int, int], ...]
    source: str

    def tokens(self, width: int, height: int, frames: int) -> int:
        """Tokens of one video, text included: the VAE keeps the first frame and one in every `stride[0]` after it."""
        latent_frames = (frames - 1) // self.stride[0] + 1
        side = self.stride[1] * self.patch[1]
        return (latent_frames // self.patch[0]) * (height // side) * (width // side) + self.text


MODELS = (
    Model(
        *("Wan 2.1 1.3B", 12, 12, 128, (4, 8), (1, 2), 0),
        ((832, 480, 81), (832, 480, 49), (480, 832, 81)),
        "arXiv:2503.20314, table of model configurations; strides and video sizes: " + _DIFFUSERS + "WanPipeline",
    ),
    Model(
        *("Wan 2.1 14B", 40, 40, 128, (4, 8), (1, 2), 0),
        ((1280, 720, 81), (832, 480, 81), (720, 1280, 49)),
        _DIFFUSERS + "WanTransformer3DModel, AutoencoderKLWan, WanPipeline",
    ),
    Model(
        *("HunyuanVideo", 24, 24, 128, (4, 8), (1, 2), 256),
        ((1280, 720, 129), (960, 544, 97), (512, 320, 61)),
        _DIFFUSERS + "HunyuanVideoTransformer3DModel, AutoencoderKLHunyuanVideo, HunyuanVideoPipeline",
    ),
    Model(
        *("HunyuanVideo 1.5", 16, 16, 128, (4, 16), (1, 1), 0),
        ((1280, 720, 121), (848, 480, 121)),
        _DIFFUSERS + "HunyuanVideo15Transformer3DModel, AutoencoderKLHunyuanVideo15, HunyuanVideo15Pipeline",
    ),
    Model(
        *("Mochi 1", 24, 24, 128, (6, 8), (1, 2), 256),
        ((848, 480, 163), (848, 480, 19)),
        _DIFFUSERS + "MochiTransformer3DModel, AutoencoderKLMochi, MochiPipeline",
    ),
    Model(
        *("CogVideoX 2B", 30, 30, 64, (4, 8), (1, 2), 226),
        ((720, 480, 49),),
        _DIFFUSERS + "CogVideoXTransformer3DModel, AutoencoderKLCogVideoX",
    ),
    Model(
        *("LTX-Video", 32, 32, 64, (8, 32), (1, 1), 0),
        ((704, 512, 161), (704, 480, 161)),
        _DIFFUSERS + "LTXVideoTransformer3DModel, AutoencoderKLLTXVideo, LTXPipeline",
    ),
    Model(
        *("Cosmos 1 7B", 32, 32, 128, (8, 8), (1, 2), 0),
        ((1280, 704, 121),),
        _DIFFUSERS + "CosmosTransformer3DModel, AutoencoderKLCosmos, CosmosTextToWorldPipeline",
    ),
    Model(
        *("Lumina-Image 2.0", 24, 8, 96, (1, 8), (1, 2), 0),
        ((1024, 1024, 1),),
        _DIFFUSERS + "Lumina2Transformer2DModel (grouped-query attention), Lumina2Pipeline",
    ),
)


def geometries(
    world: int = 2, *, count: int = 14, scale: int = 64, seed: int = 0, dtype: str = "bfloat16"
) -> tuple[Geometry, ...]:
    """`count` different geometries of published models, in an order drawn from `seed`.

    `world`: ranks the sequence and the heads must divide among (both are padded up, and nothing else is changed);
    `scale`: what the published sequence length is divided by; 1 is the real size. No two have the same number of
    query bytes, so that a cache keyed by size must hold `count` entries. Batches are 1, and 2 for guidance.
    Raises ValueError for a number below 1, an unknown dtype, or more geometries than the table can tell apart.
    """
    _check(world=world, count=count, scale=scale)
    if dtype not in _ELEMENT_BYTES:
        raise ValueError(f"dtype must be one of {', '.join(_ELEMENT_BYTES)} (got {dtype!r})")
    sized: dict[int, Geometry] = {}
    for geometry in _all(world, scale, dtype):
        sized.setdefault(geometry.query_bytes(world), geometry)
    if count > len(sized):
        raise ValueError(f"count must be at most {len(sized)} at scale {scale} and {world} ranks (got {count})")
    return tuple(random.Random(seed).sample(list(sized.values()), count))


def _all(world: int, scale: int, dtype: str) -> list[Geometry]:
    return [
        _fit(model, video, batch, world, scale, dtype) for batch in (1, 2) for model in MODELS for video in model.videos
    ]


def _fit(model: Model, video: tuple[int, int, int], batch: int, world: int, scale: int, dtype: str) -> Geometry:
    # Query heads follow the key/value heads, so that the ratio between them stays the model's own.
    kv_heads = _up(model.kv_heads, world)
    return Geometry(
        model=model.name,
        batch=batch,
        sequence=_up(-(-model.tokens(*video) // scale), world),
        heads=kv_heads * (model.heads // model.kv_heads),
        kv_heads=kv_heads,
        head_size=model.head_size,
        dtype=dtype,
        source=model.source,
        video="x".join(map(str, video)),
    )


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _check(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name} must be at least 1 (got {number})")

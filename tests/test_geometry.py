"""Geometries: the published numbers, what is padded, what is drawn from the seed, and what is refused."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_sglmem.geometry import MODELS, geometries

PUBLISHED = json.loads((Path(__file__).parent.parent / "fixtures/geometries/models.json").read_text(encoding="utf-8"))


def test_computed_tokens_are_those_spelled_out_by_hand():
    computed = {
        (m.name, *video): (m.heads, m.kv_heads, m.head_size, m.text, m.tokens(*video))
        for m in MODELS
        for video in m.videos
    }
    by_hand = {
        (p["model"], p["width"], p["height"], p["frames"]): tuple(
            p[name] for name in ("heads", "kv_heads", "head_size", "text", "tokens")
        )
        for p in PUBLISHED
    }
    assert computed == by_hand


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_sequence_and_heads_divide_among_the_ranks(world):
    for geometry in geometries(world):
        assert geometry.sequence % world == 0
        assert geometry.kv_heads % world == 0
        assert geometry.heads % geometry.kv_heads == 0
        assert geometry.query_bytes(world) == 2 * geometry.batch * geometry.sequence // world * geometry.heads * (
            geometry.head_size
        )


def test_padding_adds_no_more_than_it_must():
    published = {model.name: model for model in MODELS}
    for geometry in geometries(8, scale=1):
        model = published[geometry.model]
        tokens = model.tokens(*map(int, geometry.video.split("x")))
        assert tokens <= geometry.sequence < tokens + 8
        assert model.kv_heads <= geometry.kv_heads < model.kv_heads + 8
        assert geometry.heads * model.kv_heads == geometry.kv_heads * model.heads


@pytest.mark.parametrize("world", [2, 8])
@pytest.mark.parametrize("scale", [1, 64, 512])
def test_no_two_have_the_same_bytes(world, scale):
    sizes = [geometry.query_bytes(world) for geometry in geometries(world, count=14, scale=scale)]
    assert len(sizes) == len(set(sizes)) == 14


def test_the_seed_decides_and_nothing_else():
    assert geometries(2, seed=3) == geometries(2, seed=3)
    assert geometries(2, seed=3) != geometries(2, seed=4)


def test_key_and_query_shapes():
    lumina = next(g for g in geometries(2, count=20) if g.kv_heads != g.heads)
    assert lumina.query_shape(2) == (lumina.batch, lumina.sequence // 2, 24, 96)
    assert lumina.key_shape(2) == (lumina.batch, lumina.sequence // 2, 8, 96)
    assert "24/8" in str(lumina)


def test_it_reads_short_in_a_report():
    texts = [str(geometry) for geometry in geometries(8, count=30, scale=1)]
    assert "Lumina-Image 2.0 1024x1024x1f b1 s4096 h24/8 d96 bf16" in texts
    assert len(set(texts)) == len(texts)
    assert max(map(len, texts)) <= 60


@pytest.mark.parametrize("wrong", [{"world": 0}, {"count": 0}, {"scale": 0}, {"count": 1000}, {"dtype": "int4"}])
def test_a_wrong_number_is_echoed(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=rf"{name} .*got '?{value}'?\)"):
        geometries(**{"world": 2, **wrong})


def test_the_largest_count_is_granted_and_one_more_is_not():
    with pytest.raises(ValueError) as caught:
        geometries(2, count=1000)
    most = int(str(caught.value).split("at most ")[1].split()[0])
    assert len(geometries(2, count=most)) == most
    with pytest.raises(ValueError):
        geometries(2, count=most + 1)


def test_it_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None; import pytest_sglmem.geometry as g; print(len(g.geometries()))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "14\n"

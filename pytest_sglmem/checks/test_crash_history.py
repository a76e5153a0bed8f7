"""A history of live requests is work for the cyclic collector with every append; one of pickled bytes is none.

50,000 finished requests, with the fields that a language model server really keeps, through both. The pauses of a full
collection are in the report: with live requests every collection walks them all, on the thread that serves.
"""

from __future__ import annotations

import pytest

from pytest_sglmem import GrowthError
from pytest_sglmem.reference import CrashDumpHistory
from pytest_sglmem.reference.replaced_history import LiveHistory

RECORDS = 50_000


class Request:
    """A request as a server keeps it: identity, text, token ids, sampling parameters."""

    def __init__(self, number: int) -> None:
        self.rid = f"request-{number}"
        self.text = "Why is the sky blue?"
        self.input_ids = list(range(number, number + 24))
        self.sampling_params = {"temperature": 0.7, "max_new_tokens": 128, "stop": ["</s>", "\n\n"]}
        self.stream = True


def finished(number: int) -> tuple[Request, dict[str, object], float]:
    """A request, its output with nested meta information, and when it came."""
    meta = {"id": f"request-{number}", "finish_reason": {"type": "stop", "matched": 2}, "prompt_tokens": 24}
    output: dict[str, object] = {
        "text": "Because of Rayleigh scattering.",
        "output_ids": [number, number + 1],
        "meta_info": meta,
    }
    return Request(number), output, float(number)


def test_live_requests_are_walked_by_every_collection(gc_tracked):
    """Every append leaves its request, its dictionaries and its lists with the collector."""
    history = LiveHistory(max_age=1e9)
    with pytest.raises(GrowthError) as caught:
        gc_tracked.assert_flat(lambda number: history.record(*finished(number)), times=RECORDS)
    growth = caught.value.growth
    assert growth.verdict == "growing"
    assert growth.objects_per_append == sum(growth.by_type.values()) > 5
    assert {"list", "dict", "tuple"} <= {name.rpartition(".")[2] for name in growth.by_type}
    assert growth.pause_ms["after"] > growth.pause_ms["before"]


def test_pickled_bytes_are_not(gc_tracked):
    """The same requests, and not one object more with an append."""
    history = CrashDumpHistory(max_age=1e9)
    growth = gc_tracked.assert_flat(lambda number: history.record(*finished(number)), times=RECORDS)
    assert (growth.verdict, growth.objects_per_append, growth.by_type) == ("flat", 0, {})
    assert len(history) >= RECORDS
    assert not history.left_out  # flat because all of them are kept as bytes, not because some are not kept at all

"""The device a test runs on: the emulated one always, and a real GPU where this machine has one.

A test that takes `cuda_device` is an ordinary CUDA program whose expectations are what a GPU gives; so the emulated
device is held to them. `python -m pytest tests/test_emulated.py -k real` on a GPU machine shows that they are true.
"""

from __future__ import annotations

import gc

import pytest
import torch

from pytest_sglmem.emulated import emulated_cuda

DEVICES = 2


@pytest.fixture(params=["emulated", "real"])
def cuda_device(request):
    """The number of devices, at least one."""
    if request.param == "emulated":
        with emulated_cuda(devices=DEVICES):
            yield DEVICES
        return
    if not torch.cuda.is_available():
        pytest.skip("no GPU on this machine")
    torch.cuda.init()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.current_device()
    yield torch.cuda.device_count()
    torch.cuda.set_device(before)


@pytest.fixture
def two_devices(cuda_device):
    """As `cuda_device`, where there are two."""
    if cuda_device < 2:
        pytest.skip("one GPU on this machine")
    return cuda_device


class Grown:
    """Bytes and blocks that the current device gained since this was made."""

    def __init__(self) -> None:
        gc.collect()
        self._before = self._now()

    def _now(self) -> tuple[int, int]:
        stats = torch.cuda.memory_stats()
        return stats["allocated_bytes.all.current"], stats["allocation.all.current"]

    @property
    def bytes(self) -> int:
        return self._now()[0] - self._before[0]

    @property
    def blocks(self) -> int:
        return self._now()[1] - self._before[1]

"""Random numbers of DTensors: the shards of a tensor differ, its replicas agree, and so do the ranks afterwards.

torch does it by the counter of CUDA's generator. The CPU's has none, so each shard's numbers start from a seed that the
ranks draw alike, and the place of the shard. They are not the numbers that one device would draw for the whole tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from .patches import Patches, named

if TYPE_CHECKING:
    from . import Emulation

SYNCHRONIZED = "parallel-rng"  # under which torch 2.6 keeps the state that the ranks share


def install(patches: Patches, emulation: Emulation) -> None:
    """Draw so until `patches` are undone."""
    if not torch.distributed.is_available():
        return
    from torch.distributed.tensor import _random

    tracker = _random.OffsetBasedRNGTracker

    @contextlib.contextmanager
    def _distribute_region(self: Any, spec: Any, generator: Any = None) -> Iterator[None]:
        if not self.distribute_region_enabled:
            yield
            return
        device = emulation.generators.defaults[emulation.thread.device]
        with _apart(device, _seed(self, generator or device), _place(spec)):
            yield

    def run(start: int, end: int, operator: Any, *args: Any, **kwargs: Any) -> Any:
        device = emulation.generators.defaults[emulation.index(args[0].device)]
        with _apart(device, _draw(device), start):
            return operator(*args, **kwargs)

    patches.set(tracker, "_distribute_region", named(_distribute_region, tracker._distribute_region))
    with contextlib.suppress(ImportError):  # torch < 2.12
        from torch._prims.rng_prims import run_dtensor_rng_op

        patches.put(run_dtensor_rng_op.py_kernels, torch._C.DispatchKey.CPU, run)


@contextlib.contextmanager
def _apart(device: torch.Generator, seed: int, place: int) -> Iterator[None]:
    """Inside, the generator of the device draws what belongs to `place`; afterwards it goes on where it was."""
    before = device.get_state()
    device.manual_seed(seed + place)
    try:
        yield
    finally:
        device.set_state(before)


def _seed(tracker: Any, generator: torch.Generator) -> int:
    states = getattr(tracker, "rng_states", {})
    if SYNCHRONIZED not in states:
        return _draw(generator)
    shared = torch.Generator()
    if states[SYNCHRONIZED].numel() == shared.get_state().numel():
        shared.set_state(states[SYNCHRONIZED])
    else:
        shared.manual_seed(tracker.get_seed(SYNCHRONIZED))
    seed = _draw(shared)
    states[SYNCHRONIZED] = shared.get_state()
    return seed


def _draw(generator: torch.Generator) -> int:
    with torch._C._DisableTorchDispatch():  # the number is the host's, whatever the generator's device
        return int(torch.randint(1 << 62, (1,), generator=generator, device=torch.device("cpu")))


def _place(spec: Any) -> int:
    """Which of its tensor's shards a rank has."""
    place = 0
    for size, mine, placement in zip(spec.mesh.shape, spec.mesh.get_coordinate(), spec.placements, strict=True):
        if not placement.is_replicate() and not placement.is_partial():
            place = place * size + mine
    return place

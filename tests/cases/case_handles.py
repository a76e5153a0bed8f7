"""Leaks through CUDA IPC, one mechanism each: a handle that every peer opens; a handle that nobody opens;
a view that a peer keeps; and the same traffic done right, a handle a peer.
"""

import pytest

MIB = 1 << 20
EXPECT = {
    "test_one_handle_for_all": {
        "outcome": "failed",
        "report": {
            "live_bytes.0.verdict": "leak",
            "live_bytes.0.bytes_per_cycle": [MIB, 0, 0],
            "live_bytes.0.sites.0.site": "<- staging",
            "live_bytes.0.sites.0.mechanism": "ipc-over-released",
            "live_bytes.0.ipc.faults.0.kind": "over-released",
            "live_bytes.0.ipc.faults.0.opens": 2,
            "live_bytes.0.ipc.faults.0.counter": -1,
            "live_bytes.0.ipc.faults.0.by_ranks": [1, 2],
        },
        "says": ["opened 2 times by ranks 1, 2, counter -1"],
    },
    "test_a_handle_a_peer": {
        "outcome": "passed",
        "report": {"live_bytes.0.verdict": "flat", "live_bytes.0.ipc.faults": []},
    },
    "test_nobody_opens": {
        "outcome": "failed",
        "report": {
            "live_bytes.0.bytes_per_cycle": [MIB, 0, 0],
            "live_bytes.0.sites.0.mechanism": "ipc-never-opened",
            "live_bytes.0.sites.0.site": "<- staging",
        },
    },
    "test_a_peer_keeps_its_view": {
        "outcome": "failed",
        "report": {
            "live_bytes.0.bytes_per_cycle": [MIB, 0, 0],
            "live_bytes.0.sites.0.mechanism": "ipc-held-by-peer",
            "live_bytes.0.sites.0.site": "<- staging",
        },
    },
}
ARGS = ["--sglmem-ipc-audit", "off"]


def setup(handles, opens, keep):
    import torch
    import torch.distributed as dist
    from torch.multiprocessing.reductions import reduce_tensor

    kept = []

    def step(_):
        box = [None]
        if dist.get_rank() == 0:
            staging = torch.zeros(MIB, dtype=torch.uint8, device="cuda")  # <- staging
            box = [[reduce_tensor(staging) for _ in range(handles)]]
        dist.broadcast_object_list(box, src=0)
        if dist.get_rank() in opens:
            rebuild, args = box[0][opens.index(dist.get_rank()) % handles]
            view = rebuild(*args)
            view[:16].clone()
            if keep:
                kept.append(view)
            del view
            torch.cuda.synchronize()
        dist.barrier()

    return step


@pytest.mark.world(size=3)
def test_one_handle_for_all(world, live_bytes):
    live_bytes.assert_flat(world.trace(setup, [0], cycles=4, args=(1, (1, 2), False)))


@pytest.mark.world(size=3)
def test_a_handle_a_peer(world, live_bytes):
    live_bytes.assert_flat(world.trace(setup, [0], cycles=4, args=(2, (1, 2), False)))


@pytest.mark.world(size=3)
def test_nobody_opens(world, live_bytes):
    live_bytes.assert_flat(world.trace(setup, [0], cycles=4, args=(1, (), False)))


@pytest.mark.world(size=3)
def test_a_peer_keeps_its_view(world, live_bytes):
    live_bytes.assert_flat(world.trace(setup, [0], cycles=4, args=(1, (1,), True)))

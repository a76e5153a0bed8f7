"""What comes back only with help is no leak, and is said: tensors in reference cycles (the cyclic collector brings them
back), exported blocks that wait for an `ipc_collect`. A warning each, an error under -W error; neither blurs a leak.
"""

EXPECT = {
    "test_cycle": {
        "outcome": "passed",
        "report": {"live_bytes.0.verdict": "cyclic", "live_bytes.0.cyclic_bytes": [1048576, 1048576]},
        "says": ["CyclicMemoryWarning"],
    },
    "test_cycle_once": {"outcome": "passed", "report": {"live_bytes.0.cyclic_bytes": [0, 0]}},
    "test_cycle_and_leak": {
        "outcome": "failed",
        "report": {
            "live_bytes.0.verdict": "leak",
            "live_bytes.0.bytes_per_cycle": [512, 512],
            "live_bytes.0.cyclic_bytes": [1048576, 1048576],
            "live_bytes.0.sites.0.site": "<- leaked",
        },
    },
    "test_late": {
        "outcome": "passed",
        "report": {"live_bytes.0.verdict": "late", "live_bytes.0.late_bytes": [1048576, 0]},
        "says": ["LateReleaseWarning"],
    },
    "test_collected": {"outcome": "passed", "report": {"live_bytes.0.verdict": "flat"}},
}
ARGS = ["--sglmem-world", "2", "-W", "default"]


def make_cycle(size):
    import torch

    class Request:
        def __init__(self):
            self.pixels, self.me = torch.zeros(size, dtype=torch.uint8, device="cuda"), self

    Request()


def cycles(times=10**9):
    calls = iter(range(10**9))

    def step(_):
        if next(calls) < times:
            make_cycle(1 << 20)

    return step


def cycles_and_leak():
    import torch

    kept = []

    def step(_):
        make_cycle(1 << 20)
        kept.append(torch.zeros(1, device="cuda"))  # <- leaked

    return step


def late(collect):
    import torch
    import torch.distributed as dist
    from torch.multiprocessing.reductions import reduce_tensor

    def step(_):
        box = [None]
        if dist.get_rank() == 0:
            staging = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
            box = [reduce_tensor(staging)]
            del staging  # while the peer has not even opened it
        dist.broadcast_object_list(box, src=0)
        if dist.get_rank() == 1:
            rebuild, args = box[0]
            rebuild(*args)
            torch.cuda.synchronize()
        dist.barrier()
        if collect:
            torch.cuda.ipc_collect()

    return step


def test_cycle(world, live_bytes):
    live_bytes.assert_flat(world.trace(cycles, [0], cycles=4))


def test_cycle_once(world, live_bytes):
    live_bytes.assert_flat(world.trace(cycles, [0], cycles=4, args=(2,)))


def test_cycle_and_leak(world, live_bytes):
    live_bytes.assert_flat(world.trace(cycles_and_leak, [0], cycles=4))


def test_late(world, live_bytes):
    live_bytes.assert_flat(world.trace(late, [0], cycles=4, args=(False,)))


def test_collected(world, live_bytes):
    live_bytes.assert_flat(world.trace(late, [0], cycles=4, args=(True,)))

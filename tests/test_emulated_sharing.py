"""CUDA IPC between processes that emulate: real memory behind the contract, and nothing left behind."""

from __future__ import annotations

import base64
import os
import pickle
import signal
from multiprocessing.reduction import ForkingPickler

import pytest

torch = pytest.importorskip("torch")

from torch import multiprocessing  # noqa: E402
from torch.multiprocessing.reductions import reduce_tensor  # noqa: E402

from pytest_sglmem.emulated import emulated_cuda  # noqa: E402

MIB = 1 << 20
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["torch", "torch._dynamo"])


def peer(pipe):
    """Does what it is told with handles, on an emulated device of its own."""
    held = {}
    with emulated_cuda(2):
        while True:
            match pipe.recv():
                case ("open", name, (rebuild, args)):
                    try:
                        held[name] = rebuild(*args)
                    except Exception as error:
                        pipe.send(repr(error))
                        continue
                    pipe.send(held[name].tolist()[:4])
                case ("load", name, text):
                    held[name], layout = pickle.loads(base64.b64decode(text))
                    pipe.send([held[name][start:end].view(shape).tolist() for start, end, shape in layout])
                case ("register", name, (device, handle, shape)):
                    torch.cuda.set_device(device)
                    storage = torch.UntypedStorage._new_shared_cuda(device, *handle[1:])
                    held[name] = torch.tensor([], device=storage.device).set_(storage, 0, shape)
                    del storage
                    held[name][0].fill_(9)
                    pipe.send(str(held[name].device))
                case ("write", name, value):
                    held[name].fill_(value)
                    pipe.send(torch.cuda.memory_allocated())
                case ("where", name, _):
                    pipe.send((str(held[name].device), held[name].data_ptr()))
                case ("export", name, _):
                    try:
                        reduce_tensor(held[name])
                        pipe.send("exported")
                    except RuntimeError as error:
                        pipe.send(str(error))
                case ("close", name, _):
                    del held[name]
                    pipe.send("closed")
                case ("end", _, _):
                    return


@pytest.fixture
def emulation():
    with emulated_cuda(2) as on:
        yield on


@pytest.fixture
def ask(emulation):
    """Ask a second process; it ends with the test."""
    ours, theirs = processes.Pipe()
    process = processes.Process(target=peer, args=(theirs,))
    process.start()
    theirs.close()

    def ask(action, name="x", value=None):
        ours.send((action, name, value))
        assert ours.poll(60), "the peer does not answer"
        return ours.recv()

    ask.process = process
    yield ask
    if process.is_alive():
        ours.send(("end", "", None))
    process.join(60)
    assert not process.is_alive()


def test_writes_arrive_both_ways(ask):
    made = torch.arange(8.0, device="cuda")
    assert ask("open", value=reduce_tensor(made)) == [0, 1, 2, 3]
    assert ask("write", value=7.0) == 0  # imported bytes are the exporter's
    assert made.tolist() == [7.0] * 8
    made.zero_()
    assert ask("open", "y", reduce_tensor(made)) == [0, 0, 0, 0]
    ask("close")
    ask("close", "y")


def test_views_taken_before_the_export_share_too(ask):
    made = torch.zeros(8, device="cuda")
    view = made[4:]
    ask("open", value=reduce_tensor(made))
    ask("write", value=3.0)
    assert view.tolist() == [3.0] * 4
    ask("close")


def test_the_same_block_has_the_same_handle_and_a_new_counter():
    with emulated_cuda():
        made = torch.zeros(8, device="cuda")
        first, second = reduce_tensor(made)[1], reduce_tensor(made[2:])[1]
        assert first[7] == second[7]
        assert first[11] == second[11]
        assert (first[12], second[12]) == (0, 1)
        assert first[8] == 32
        assert second[3] == 2  # the offset of the view


def test_the_device_of_the_handle_is_where_it_opens(ask):
    made = torch.zeros(8, device="cuda:1")
    ask("open", value=reduce_tensor(made))
    where, address = ask("where")
    assert where == "cuda:1"
    assert address % 512 == 0
    ask("close")


def test_what_was_received_cannot_be_sent_on(ask):
    made = torch.zeros(8, device="cuda")
    ask("open", value=reduce_tensor(made))
    assert "Attempted to send CUDA tensor received from another process" in ask("export")
    ask("close")


def test_the_exporter_cannot_open_its_own():
    with emulated_cuda():
        rebuild, args = reduce_tensor(torch.zeros(8, device="cuda"))
        with pytest.raises(RuntimeError, match="invalid device context"):
            rebuild(*args)


def test_a_handle_of_a_block_that_is_gone(ask, emulation):
    made = torch.zeros(8, device="cuda")
    handle = reduce_tensor(made)
    ask("open", value=handle)
    ask("close")
    del made
    assert torch.cuda.memory_allocated() == 0
    assert "invalid resource handle" in ask("open", "y", handle)


def test_a_cpu_storage_has_no_handle(emulation):
    with pytest.raises(RuntimeError, match="only available on CUDA"):
        torch.zeros(8).untyped_storage()._share_cuda_()


def test_an_empty_tensor_crosses_without_a_block(ask):
    assert ask("open", value=reduce_tensor(torch.zeros(0, device="cuda"))) == []
    ask("close")
    assert torch.cuda.memory_allocated() == 0


def test_a_parameter_crosses_as_one(ask):
    made = torch.full((4,), 5.0, device="cuda")
    assert ask("open", value=reduce_tensor(torch.nn.Parameter(made))) == [5, 5, 5, 5]
    ask("close")


def test_weights_synchronized_by_bucket(ask):
    """As RL trainers push weights to an engine: one flat buffer a bucket, pickled with its layout, as text."""
    weights = [torch.full((2, 2), 1.0, device="cuda"), torch.arange(3.0, device="cuda")]
    bucket = torch.cat([weight.flatten() for weight in weights])
    layout = [(0, 4, (2, 2)), (4, 7, (3,))]
    before = torch.cuda.memory_allocated()
    text = base64.b64encode(bytes(ForkingPickler.dumps((bucket, layout)))).decode()
    assert ask("load", value=text) == [[[1.0, 1.0], [1.0, 1.0]], [0.0, 1.0, 2.0]]
    ask("close")
    del bucket
    assert torch.cuda.memory_allocated() == before - 512


def test_a_cache_registered_by_its_storage(ask):
    """As KV connectors do it: the storage's handle, opened by hand on the same device there."""
    cache = torch.zeros(4, 8, device="cuda")
    handle = cache.untyped_storage()._share_cuda_()
    assert ask("register", value=(handle[0], handle, (4, 8))) == "cuda:0"
    assert cache[0].tolist() == [9.0] * 8
    assert cache[1].tolist() == [0.0] * 8
    ask("close")
    del cache
    assert torch.cuda.memory_allocated() == 0


def test_a_dropped_block_stays_until_its_peer_has_closed(ask):
    made = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
    handle = reduce_tensor(made)
    del made
    assert torch.cuda.memory_allocated() == MIB
    assert ask("open", value=handle) == [0, 0, 0, 0]
    ask("close")
    assert torch.cuda.memory_allocated() == MIB
    torch.cuda.ipc_collect()
    assert torch.cuda.memory_allocated() == 0


def test_a_miss_collects(ask):
    made = torch.zeros(24 * MIB, dtype=torch.uint8, device="cuda")
    ask("open", value=reduce_tensor(made))
    del made
    ask("close")
    assert torch.cuda.memory_allocated() == 24 * MIB
    again = torch.empty(24 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() == again.numel()
    assert torch.cuda.memory_reserved() == 24 * MIB


def test_past_a_thousand_exports_no_event_is_left():
    with emulated_cuda():
        made = torch.zeros(8, device="cuda")
        waits = [reduce_tensor(made)[1][14] for _ in range(1001)]
        assert waits == [True] * 1000 + [False]


def test_a_killed_peer_leaves_its_count_and_no_file(ask):
    ours = tuple(f"torch_{pid}_" for pid in (os.getpid(), ask.process.pid))  # other tests have files of their own
    before = {name for name in os.listdir("/dev/shm") if name.startswith(ours)}
    made = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
    ask("open", value=reduce_tensor(made))
    os.kill(ask.process.pid, signal.SIGKILL)
    ask.process.join(60)
    del made
    torch.cuda.ipc_collect()
    assert torch.cuda.memory_allocated() == MIB
    assert {name for name in os.listdir("/dev/shm") if name.startswith(ours)} <= before


def test_every_file_is_closed_on_exit():
    def open_files():
        return len(os.listdir("/proc/self/fd"))

    with emulated_cuda():
        pass
    before = open_files()
    with emulated_cuda():
        kept = [torch.zeros(8, device="cuda") for _ in range(5)]
        for made in kept:
            reduce_tensor(made)
        assert open_files() > before
        del kept, made
    assert open_files() == before


def test_more_blocks_than_the_usual_limit_of_open_files():
    with emulated_cuda():
        kept = [torch.zeros(8, device="cuda") for _ in range(1500)]
        for made in kept:
            reduce_tensor(made)
        kept.clear()
        assert torch.cuda.memory_allocated() == 1500 * 512

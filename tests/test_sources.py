"""What is read of a device, on the emulated one and on snapshots written by hand in torch's shape."""

from __future__ import annotations

import pickle
import sys
import types

import pytest

torch = pytest.importorskip("torch")

from pytest_sglmem import sources  # noqa: E402
from pytest_sglmem.emulated import emulated_cuda  # noqa: E402
from pytest_sglmem.sources import Census, Recording, outside_bytes, reading, save_snapshot, stamped  # noqa: E402


@pytest.fixture
def device():
    with emulated_cuda(devices=2):
        yield


def made(size=1):
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def test_a_reading_counts_in_units_of_512(device):
    kept = [made(1), made(513)]
    found = reading(0)
    assert (found.live, found.blocks, found.outside) == (512 + 1024, 2, None)
    assert found.reserved >= found.live
    assert reading(1).live == 0
    assert len(kept) == 2


def test_a_census_counts_blocks_by_stack_and_birth(device):
    census = Census(0)
    kept = []
    with Recording():
        kept += [made(), made()]
        assert [(entry.born, entry.blocks, entry.bytes) for entry in census.take(-1)] == [(-1, 2, 1024)]
        stamped(3)(lambda size: kept.append(made(size)), 513)
        found = {entry.born: entry for entry in census.take(4)}
    assert (found[3].bytes, found[3].blocks) == (1024, 1)
    assert [line.rpartition(" in ")[2] for line in found[3].stack] == ["made", "<lambda>"]
    assert found[3].site.startswith("tests/test_sources.py:")
    assert census.addresses(found[3].stack) == [kept[2].data_ptr()]
    assert census.addresses(found[3].stack, since=4) == []


def test_other_devices_are_not_counted(device):
    kept = torch.empty(1, device="cuda:1")
    assert Census(0).take(0) == ()
    assert len(Census(1).take(0)) == 1
    assert kept is not None


# Snapshots written by hand: a real allocator hands out the same address again.


def frame(name, line=1, filename="/user/model.py"):
    return {"filename": filename, "line": line, "name": name}


def from_cycle(number):
    return [
        frame("share", 7),
        frame("_guarded_step", 1, sources.__file__.replace("sources", "tracing")),
        *harness(number),
        frame("main"),
    ]


def harness(number):
    return [frame(f"sglmem_cycle_{number}", 1, sources.__file__)]


@pytest.fixture
def snapshot(monkeypatch):
    blocks = []
    whole = {"segments": [{"device": 0, "address": 4096, "blocks": blocks}], "device_traces": []}
    monkeypatch.setattr(torch._C, "_cuda_memorySnapshot", lambda _: whole, raising=False)
    return blocks


def live(address, frames, size=512, asked=512, state="active_allocated"):
    return {"address": address, "size": size, "requested_size": asked, "state": state, "frames": frames}


def test_a_block_at_a_used_address_is_dated_by_its_own_cycle(snapshot):
    census = Census(0)
    for cycle in range(3):
        snapshot[:] = [live(4096, from_cycle(cycle))]  # freed and allocated again by the same line, every cycle
        (entry,) = census.take(cycle)
        assert entry.born == cycle


def test_without_a_stamp_the_first_sight_of_the_address_counts(snapshot):
    census = Census(0)
    snapshot[:] = [live(4096, [frame("backward")])]
    census.take(0)
    snapshot.append(live(4608, [frame("backward")]))
    assert sorted(entry.born for entry in census.take(1)) == [0, 1]
    snapshot[0] = live(4096, [frame("backward")], size=1024, asked=1024)  # another size: another block
    assert sorted(entry.born for entry in census.take(2)) == [1, 2]


def test_frames_above_the_step_are_the_harness(snapshot):
    snapshot[:] = [live(4096, from_cycle(0))]
    (entry,) = Census(0).take(0)
    assert entry.stack == ("user/model.py:7 in share",)


def test_bytes_are_those_asked_for(snapshot):
    # A cached block that is handed out whole, although less was asked for: the rest is no part of the program's memory.
    snapshot[:] = [live(4096, [frame("f")], size=2 << 20, asked=(1 << 20) + 1), live(8192, [frame("f")], 512, 0)]
    (entry,) = Census(0).take(0)
    assert entry.bytes == (1 << 20) + 512 + 512


@pytest.mark.parametrize("state", ["inactive", "active_pending_free", "active_awaiting_free"])
def test_what_is_freed_is_not_live(snapshot, state):
    snapshot[:] = [live(4096, [frame("f")], state=state)]
    assert Census(0).take(0) == ()


def test_blocks_without_address_or_frames_are_counted(snapshot):
    snapshot[:] = [{"size": 512, "state": "active_allocated"}, {"size": 1024, "state": "active_allocated"}]
    census = Census(0)
    (entry,) = census.take(0)
    assert (entry.stack, entry.bytes, entry.blocks) == ((), 1536, 2)
    assert census.addresses(()) == [4096, 4608]


# Recording and the rest.


def test_recording_that_was_on_stays_on(device):
    torch.cuda.memory._record_memory_history(enabled="state")
    with Recording():
        pass
    assert torch._C._cuda_isHistoryEnabled()
    torch.cuda.memory._record_memory_history(enabled=None)


def test_recording_ends_when_the_body_raises(device):
    with pytest.raises(KeyError), Recording():
        raise KeyError
    assert not torch._C._cuda_isHistoryEnabled()


def test_a_saved_snapshot_is_torchs_own(device, tmp_path):
    with Recording():
        kept = made()
        save_snapshot(tmp_path / "snapshot.pickle")
    found = pickle.loads((tmp_path / "snapshot.pickle").read_bytes())
    assert found["segments"][0]["blocks"][0]["frames"][0]["name"] == "made"
    assert kept is not None


def nvml(monkeypatch, used):
    fake = types.ModuleType("pynvml")
    fake.nvmlInit = lambda: None
    fake.nvmlDeviceGetHandleByUUID = lambda uuid: uuid
    process = types.SimpleNamespace
    fake.nvmlDeviceGetComputeRunningProcesses = lambda handle: [process(pid=pid, usedGpuMemory=n) for pid, n in used]
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="1-2"))


def test_outside_bytes_are_the_process_less_what_torch_reserved(monkeypatch):
    import os

    nvml(monkeypatch, [(1, 5000), (os.getpid(), 3000)])
    assert outside_bytes(0, 1000) == 2000


@pytest.mark.parametrize("used", [[], [(1, 5000)]])
def test_outside_bytes_are_unknown_where_nvml_does_not_see_the_process(monkeypatch, used):
    nvml(monkeypatch, used)
    assert outside_bytes(0, 1000) is None


def test_outside_bytes_are_unknown_without_nvml(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert outside_bytes(0, 1000) is None


def test_a_line_that_is_nobodys_is_better_than_none(snapshot):
    fault = frame("_retain_step", 350, sources.__file__.replace("sources", "strikes"))
    snapshot[:] = [live(4096, [fault, *from_cycle(0)[1:]])]
    (entry,) = Census(0).take(0)
    assert entry.stack == ("pytest_sglmem/strikes.py:350 in _retain_step",)

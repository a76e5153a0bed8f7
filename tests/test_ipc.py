import gc
import itertools
import os
import struct
import threading
import weakref
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from pytest_sglmem.audit import audit, broken, summary
from pytest_sglmem.contract import (
    EVENTS,
    SLOTS_A_FILE,
    Consumer,
    Custody,
    Producer,
    Slot,
    counter_is_unsigned,
    is_released,
    open_counters,
    read_counter,
    reads_unsigned,
)
from pytest_sglmem.ipc import Ledger, ipc_audit
from pytest_sglmem.records import Export, IpcPair, Open

KINDS = ("over-released", "never-opened", "still-open", "freed-while-open", "dead-peer")


# ---- the contract, transition by transition ----


class Process:
    """An exporter with counters that a test can set."""

    def __init__(self, unsigned=True):
        self.counters = {}
        self.producer = Producer(self.counters.__getitem__, unsigned=unsigned)

    def export(self, block):
        slot = self.producer.export(block)
        self.counters[slot] = 1
        return slot

    def release(self, slot, times=1):
        self.counters[slot] -= times


@pytest.fixture
def exporter():
    return Process()


def test_a_block_never_exported_is_free_at_once(exporter):
    assert exporter.producer.drop(7) == [7]


def test_released_then_dropped_is_free_at_once(exporter):
    exporter.release(exporter.export(7))
    assert exporter.producer.drop(7) == [7]
    assert exporter.producer.limbo == ()


def test_dropped_then_released_stays_until_a_collection(exporter):
    slot = exporter.export(7)
    assert exporter.producer.drop(7) == []
    exporter.release(slot)
    assert exporter.producer.limbo == (7,)
    assert exporter.producer.collect() == [7]


def test_the_drop_of_another_exported_block_collects(exporter):
    slot = exporter.export(7)
    exporter.producer.drop(7)
    exporter.release(slot)
    exporter.export(8)
    assert exporter.producer.drop(8) == [7]
    assert exporter.producer.limbo == (8,)


def test_the_drop_of_a_block_never_exported_does_not_collect(exporter):
    slot = exporter.export(7)
    exporter.producer.drop(7)
    exporter.release(slot)
    assert exporter.producer.drop(8) == [8]
    assert exporter.producer.limbo == (7,)


@pytest.mark.parametrize("releases", [0, 2, 7])
def test_anything_but_zero_is_kept_for_good_where_read_as_unsigned(exporter, releases):
    exporter.release(exporter.export(7), releases)
    assert exporter.producer.drop(7) == []
    assert exporter.producer.collect() == []


def test_a_counter_below_zero_frees_where_read_as_signed():
    exporter = Process(unsigned=False)
    exporter.release(exporter.export(7), 2)
    assert exporter.producer.drop(7) == [7]


def test_the_newest_wrapper_is_looked_at_first(exporter):
    older, newer = exporter.export(7), exporter.export(7)
    exporter.release(older)
    assert exporter.producer.drop(7) == []
    assert exporter.producer.slots(7) == (older, newer)
    exporter.release(newer)
    assert exporter.producer.collect() == [7]


def test_a_released_newer_wrapper_comes_off_alone(exporter):
    older, newer = exporter.export(7), exporter.export(7)
    exporter.release(newer)
    assert exporter.producer.drop(7) == []
    assert exporter.producer.slots(7) == (older,)
    assert exporter.producer.live_exports == 1


def test_a_dropped_block_cannot_be_exported_again(exporter):
    exporter.export(7)
    exporter.producer.drop(7)
    with pytest.raises(ValueError, match="block 7 was dropped"):
        exporter.producer.export(7)


def test_a_counter_mended_by_hand_frees_at_the_next_collection(exporter):
    slot = exporter.export(7)
    exporter.release(slot, 3)
    exporter.producer.drop(7)
    exporter.counters[slot] = 0
    exporter.export(8)
    assert exporter.producer.drop(8) == []
    assert exporter.producer.collect() == [7]


def test_a_glance_looks_at_the_newest_of_the_limbo_only():
    counters = dict.fromkeys("abcd", 1)
    custody = Custody(counters.__getitem__, glance=2)
    for block, name in enumerate("abc"):
        custody.wrap(block, name)
        custody.drop(block)
    counters.update(a=0, b=0, c=0)
    custody.wrap(3, "d")
    assert custody.drop(3) == [2]
    assert custody.collect() == [0, 1]


def test_the_counter_file_goes_at_a_collection_that_finds_nothing_in_use(exporter):
    slot = exporter.export(7)
    assert exporter.producer.files == (0,)
    exporter.release(slot)
    exporter.producer.drop(7)
    assert exporter.producer.files == (0,)
    exporter.producer.collect()
    assert exporter.producer.files == ()
    assert exporter.producer.gone == [0]
    assert exporter.export(8) == Slot(1, 0)


def test_a_held_export_keeps_the_counter_file(exporter):
    exporter.release(exporter.export(7))
    exporter.producer.collect()
    assert exporter.producer.files == (0,)


def test_a_full_counter_file_goes_with_its_last_handle(exporter):
    slots = [exporter.export(block) for block in range(SLOTS_A_FILE + 1)]
    assert slots[-2:] == [Slot(0, SLOTS_A_FILE - 1), Slot(1, 0)]
    for block in range(SLOTS_A_FILE):
        assert exporter.producer.files == (0, 1)
        exporter.release(slots[block])
        exporter.producer.drop(block)
    assert exporter.producer.files == (1,)


def test_exports_wait_from_the_event_limit_on(exporter):
    for block in range(EVENTS - 1):
        exporter.export(block)
    assert not exporter.producer.export_waits
    exporter.export(EVENTS)
    assert exporter.producer.export_waits


class Peers:
    """Consumers of one exporter."""

    def __init__(self, exporter, count=1):
        self.each = [Consumer(exporter.release) for _ in range(count)]


def test_the_same_handle_opened_twice_is_given_back_at_the_second_open(exporter):
    slot = exporter.export(7)
    (peer,) = Peers(exporter).each
    first, second = peer.open("m", slot), peer.open("m", slot)
    assert exporter.counters[slot] == 0
    peer.close(first)
    assert exporter.counters[slot] == 0
    peer.close(second)
    assert exporter.counters[slot] == -1


def test_two_handles_of_one_block_in_one_process_are_each_given_back_once(exporter):
    one, two = exporter.export(7), exporter.export(7)
    (peer,) = Peers(exporter).each
    views = [peer.open("m", one), peer.open("m", two)]
    assert (exporter.counters[one], exporter.counters[two]) == (1, 0)
    for view in views:
        peer.close(view)
    assert (exporter.counters[one], exporter.counters[two]) == (0, 0)


def test_an_open_past_the_cache_is_given_back_on_its_own(exporter):
    slot = exporter.export(7)
    (peer,) = Peers(exporter).each
    for view in [peer.open("m", slot), peer.open_by_hand("m", slot)]:
        peer.close(view)
    assert exporter.counters[slot] == -1


def test_a_mapping_that_ended_is_no_longer_shared(exporter):
    slot = exporter.export(7)
    (peer,) = Peers(exporter).each
    peer.close(peer.open("m", slot))
    assert peer.mapped == frozenset()
    peer.open("m", slot)
    assert exporter.counters[slot] == 0


def test_a_killed_consumer_gives_nothing_back(exporter):
    slot = exporter.export(7)
    (peer,) = Peers(exporter).each
    view = peer.open("m", slot)
    peer.die()
    peer.close(view)
    assert exporter.counters[slot] == 1
    assert exporter.producer.drop(7) == []


# ---- the sign, asked of the torch at hand ----


@pytest.mark.parametrize(
    ("header", "version", "unsigned"),
    [
        ("struct X {\n  uint64_t counter_value();\n", "2.1.0", True),
        ("struct X {\n  int64_t counter_value();\n", "2.13.0", False),
        ("", "1.13.1+cu117", False),
        ("", "2.1.2", False),
        ("", "2.2.0", True),
        ("", "2.13.0+cpu", True),
        ("", "3.0.0a0+git1", True),
    ],
)
def test_the_header_decides_and_the_version_where_there_is_none(header, version, unsigned):
    assert counter_is_unsigned(header, version) is unsigned


def test_the_torch_at_hand_answers():
    assert reads_unsigned() is (tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 2))


@pytest.mark.parametrize(
    ("counter", "unsigned", "released"),
    [(1, True, False), (1, False, False), (0, True, True), (0, False, True), (-1, True, False), (-1, False, True)],
)
def test_what_each_sign_takes_as_released(counter, unsigned, released):
    assert is_released(counter, unsigned=unsigned) is released


# ---- counters in files ----


@pytest.fixture
def counter_file():
    file = os.memfd_create("counters")
    os.ftruncate(file, 64 + 8 * 10)
    yield file, f"/proc/{os.getpid()}/fd/{file}#{os.fstat(file).st_ino}"
    os.close(file)


def test_a_counter_is_the_signed_word_at_its_slot(counter_file):
    file, name = counter_file
    os.pwrite(file, struct.pack("=qq", -6, 1), 64 + 8 * 3)
    assert [read_counter(name, slot) for slot in (2, 3, 4)] == [0, -6, 1]


def test_a_slot_past_the_end_has_no_counter(counter_file):
    assert read_counter(counter_file[1], 10) is None


def test_another_file_under_the_same_number_is_not_read(counter_file):
    _, name = counter_file
    assert open_counters(name.partition("#")[0] + "#1") is None
    assert read_counter(name.partition("#")[0] + "#1", 0) is None


@pytest.mark.parametrize("name", ["/torch_1_2_3", "/proc/1/fd/999999", f"/proc/{2**30}/fd/3#5"])
def test_a_file_that_is_gone_has_no_counter(name):
    assert read_counter(name, 0) is None


def test_torchs_own_names_are_in_shared_memory():
    name = f"torch_{os.getpid()}_sglmem_test"
    with open(f"/dev/shm/{name}", "wb") as file:
        file.write(bytes(64) + struct.pack("=q", 1))
    try:
        assert read_counter("/" + name, 0) == 1
    finally:
        os.unlink(f"/dev/shm/{name}")


# ---- random schedules ----


class Machine(RuleBasedStateMachine):
    """One exporter and one to seven consumers in any order of steps, beside a second bookkeeping of every byte."""

    blocks, handles, opens = Bundle("blocks"), Bundle("handles"), Bundle("opens")
    unsigned = True

    @initialize(ranks=st.integers(2, 8))
    def begin(self, ranks):
        self.counters = {}
        self.producer = Producer(self.counters.__getitem__, unsigned=self.unsigned)
        self.peers = [Consumer(self.release) for _ in range(ranks - 1)]
        self.size = {}
        self.state = {}
        self.exported = {}
        self.opened = Counter()

    def release(self, slot):
        self.counters[slot] -= 1

    def free(self, blocks):
        for block in blocks:
            assert self.state[block] == "dropped", "freed while it was held, or freed twice"
            assert all(is_released(self.counters[s], unsigned=self.unsigned) for s in self.exported[block][:1])
            self.state[block] = "freed"

    @rule(target=blocks, size=st.integers(1, 1 << 20))
    def allocate(self, size):
        block = len(self.size)
        self.size[block], self.state[block], self.exported[block] = -(-size // 512) * 512, "held", []
        return block

    @rule(target=handles, block=blocks)
    def export(self, block):
        if self.state[block] != "held":
            return None
        slot = self.producer.export(block)
        assert slot not in self.counters, "a slot was given out twice"
        self.counters[slot] = 1
        self.exported[block].append(slot)
        return block, slot

    @rule(target=opens, handle=handles, peer=st.integers(0, 6), by_hand=st.booleans())
    def open(self, handle, peer, by_hand):
        if handle is None:
            return None
        consumer = self.peers[peer % len(self.peers)]
        self.opened[handle[1]] += 1
        return consumer, (consumer.open_by_hand if by_hand else consumer.open)(*handle)

    @rule(opened=consumes(opens))
    def close(self, opened):
        if opened is not None:
            opened[0].close(opened[1])

    @rule(block=consumes(blocks))
    def drop(self, block):
        self.state[block] = "dropped"
        self.free(self.producer.drop(block))

    @rule()
    def collect(self):
        self.free(self.producer.collect())

    @rule(peer=st.integers(0, 6))
    def die(self, peer):
        self.peers[peer % len(self.peers)].die()

    @precondition(lambda self: hasattr(self, "producer"))
    @invariant()
    def live_bytes_are_those_held_and_those_in_limbo(self):
        live = sum(size for block, size in self.size.items() if self.state[block] != "freed")
        held = sum(size for block, size in self.size.items() if self.state[block] == "held")
        limbo = sum(self.size[block] for block in self.producer.limbo)
        assert live == held + limbo

    @precondition(lambda self: hasattr(self, "producer"))
    @invariant()
    def counters_count_releases(self):
        assert all(self.counters[slot] >= 1 - self.opened[slot] for slot in self.counters)

    @precondition(lambda self: hasattr(self, "producer"))
    @invariant()
    def files_are_there_for_every_handle_in_use(self):
        in_use = [s for block in (*self.producer.exported, *self.producer.limbo) for s in self.producer.slots(block)]
        assert self.producer.live_exports == len(in_use)
        assert {slot.file for slot in in_use} <= set(self.producer.files)

    def teardown(self):
        """Whatever happened: a block whose every handle was opened and given back once comes back, and under the
        unsigned reading one that was given back too often never does, unless it went at the moment it read 0.
        """
        if not hasattr(self, "producer"):
            return
        for block in [block for block, state in self.state.items() if state == "held"]:
            self.drop(block)
        self.collect()
        for block, slots in self.exported.items():
            counters = [self.counters[slot] for slot in slots]
            if all(is_released(counter, unsigned=self.unsigned) for counter in counters):
                assert self.state[block] == "freed"
            elif self.state[block] == "freed":
                assert self.unsigned
                assert max(counters) <= 0


class SignedMachine(Machine):
    """The same where the counter is read as signed."""

    unsigned = False


_settings = settings(max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
TestUnsignedSchedules = Machine.TestCase
TestSignedSchedules = SignedMachine.TestCase
TestUnsignedSchedules.settings = TestSignedSchedules.settings = _settings


# ---- the ledger ----


class Device:
    """A device whose handles the same process may open: torch's IPC functions over `Producer` and a memory file."""

    def __init__(self):
        self.file = os.memfd_create("counters")
        os.ftruncate(self.file, 64 + 8 * 100_000)
        self.name = f"/proc/{os.getpid()}/fd/{self.file}#{os.fstat(self.file).st_ino}".encode()
        self.producer = Producer(lambda slot: read_counter(self.name.decode(), slot.offset))
        self.freed = []
        self.serials = {}
        self.numbers = itertools.count()
        self.closed = False

    def write(self, slot, value):
        os.pwrite(self.file, struct.pack("=q", value), 64 + 8 * slot)

    def share(self, storage):
        key = storage._cdata
        if key not in self.serials:
            self.serials[key] = next(self.numbers)
            weakref.finalize(storage, self.died, key)
        slot = self.producer.export(self.serials[key]).offset
        self.write(slot, 1)
        return (0, b"handle", storage.nbytes(), 0, self.name, slot, b"event", True)

    def died(self, key):
        if not self.closed:
            self.freed += self.producer.drop(self.serials.pop(key))

    def open(self, device, handle, size, offset, counter_file, slot, event, waits):
        storage = torch.UntypedStorage(size)
        weakref.finalize(storage, self.release, counter_file, slot)
        return storage

    def release(self, counter_file, slot, **kwargs):
        if not self.closed:
            self.write(slot, read_counter(self.name.decode(), slot) - 1)

    def collect(self):
        self.freed += self.producer.collect()

    def snapshot(self, live):
        """What torch's allocator would list, were just these storages live."""
        blocks = [{"address": s.data_ptr(), "size": 512, "state": "active_allocated", "frames": FRAMES} for s in live]
        return {"segments": [{"address": 0, "blocks": blocks}]}


FRAMES = [{"filename": "/srv/app/pool.py", "line": 12, "name": "grow"}]
SHARING = ("_share_cuda_", "_new_shared_cuda", "_release_ipc_counter_cuda")


@pytest.fixture
def device(monkeypatch):
    device = Device()
    storage = torch.UntypedStorage
    monkeypatch.setattr(storage, "_share_cuda_", lambda self: device.share(self), raising=False)
    monkeypatch.setattr(storage, "_new_shared_cuda", staticmethod(device.open))
    monkeypatch.setattr(storage, "_release_ipc_counter_cuda", staticmethod(device.release))
    monkeypatch.setattr(torch._C, "_cuda_ipc_collect", device.collect, raising=False)
    monkeypatch.delattr(torch._C, "_cuda_memorySnapshot", raising=False)  # a CUDA build without a GPU has an empty one
    yield device
    device.closed = True
    os.close(device.file)


def storage(size=100):
    return torch.empty(size, dtype=torch.uint8).untyped_storage()


def share(block):
    return block._share_cuda_()  # <- exported


def open_(shared):
    return torch.UntypedStorage._new_shared_cuda(*shared)  # <- opened


def one(records):
    (record,) = records
    return record


def test_an_export_is_noted_with_its_line_bytes_step_and_counter(device):
    with Ledger(rank=3) as ledger:
        ledger.mark(17)
        block = storage(513)
        shared = share(block)
        export = one(ledger.reading()[0])
    assert (export.rank, export.step, export.bytes, export.counter) == (3, 17, 1024, 1)
    assert (export.dropped, export.freed) == (False, False)
    assert (export.counter_file, export.slot) == (shared[4].decode(), shared[5])
    assert export.stack[0] == f"tests/test_ipc.py:{share.__code__.co_firstlineno + 1} in share"


def test_an_open_is_noted_until_it_is_released(device):
    block = storage()
    shared = share(block)
    with Ledger(rank=1) as ledger:
        view = open_(shared)
        opened = one(ledger.reading()[1])
        assert (opened.rank, opened.released, opened.slot) == (1, 0, shared[5])
        assert opened.stack[0].endswith(" in open_")
        del view
        assert one(ledger.reading()[1]).released == 1


def test_a_release_by_hand_is_an_open_given_back_at_once(device):
    block = storage()
    shared = share(block)
    with Ledger() as ledger:
        torch.UntypedStorage._release_ipc_counter_cuda(shared[4], shared[5])
        assert one(ledger.reading()[1]).released == 1


def test_typed_storages_and_legacy_spellings_pass_through(device):
    with Ledger() as ledger:
        tensor = torch.empty(4)
        shared = tensor._typed_storage()._share_cuda_()
        torch.storage.TypedStorage._release_ipc_counter(shared[4], shared[5])
        release = getattr(torch.UntypedStorage, "_release_ipc_counter", torch.storage.TypedStorage._release_ipc_counter)
        release(shared[4], shared[5])  # up to torch 2.6 a typed storage alone has that spelling
        exports, opens = ledger.reading()
    assert one(exports).counter == -1
    assert len(opens) == 2


def test_dropped_and_freed_where_the_counter_is_zero(device):
    with Ledger() as ledger:
        block = storage()
        view = open_(share(block))
        del view
        assert one(ledger.reading()[0]).dropped is False
        del block
        export = one(ledger.reading()[0])
    assert (export.dropped, export.freed, export.freed_at, export.counter) == (True, True, 0, 0)
    assert device.freed == [0]


def test_dropped_and_kept_while_the_counter_is_one(device):
    with Ledger() as ledger:
        share(storage())
        export = one(ledger.reading()[0])
        assert (export.dropped, export.freed, export.counter) == (True, False, 1)
        device.release(None, export.slot)
        torch._C._cuda_ipc_collect()
        export = one(ledger.reading()[0])
        assert (export.freed, export.freed_at) == (True, 0)


def test_freed_is_known_from_the_moment_even_when_the_counter_goes_on(device):
    with Ledger() as ledger:
        block = storage()
        shared = share(block)
        first, second = open_(shared), open_(shared)
        del first, block
        del second
        export = one(ledger.reading()[0])
    assert (export.freed, export.freed_at, export.counter) == (True, 0, -1)


def test_a_tensor_whose_storage_lay_in_garbage_is_not_dropped_and_not_released(device):
    """As a pickler's memo leaves it: in older torch that ends the storage's weak references, and not the storage."""
    with Ledger() as ledger:
        exported = torch.empty(100, dtype=torch.uint8)
        opened = torch.empty(0, dtype=torch.uint8).set_(open_(share(exported.untyped_storage())))
        garbage = [exported.untyped_storage(), opened.untyped_storage()]
        garbage.append(garbage)
        del garbage
        gc.collect()
        exports, opens = ledger.reading()
        assert (one(exports).dropped, one(opens).released) == (False, 0)
        del opened
        assert one(ledger.reading()[1]).released == 1
        del exported
        assert one(ledger.reading()[0]).dropped is True


def test_lost_is_known_where_both_releases_come_before_the_drop(device):
    with Ledger() as ledger:
        block = storage()
        shared = share(block)
        views = [open_(shared), open_(shared)]
        del views, block
        export = one(ledger.reading()[0])
    assert (export.dropped, export.freed, export.counter) == (True, False, -1)
    assert device.freed == []


def test_handles_of_one_block_say_so(device):
    with Ledger() as ledger:
        first, second = storage(), storage()
        share(first), share(second), share(first)
        exports, _ = ledger.reading()
    assert [export.block for export in exports] == [0, 1, 0]


def test_a_storage_resized_to_nothing_is_dropped(device):
    with Ledger() as ledger:
        block = storage()
        share(block)
        block.resize_(0)
        assert one(ledger.reading()[0]).dropped
        assert one(ledger.reading()[0]).dropped
        del block
        assert not one(ledger.reading()[0]).freed


def test_an_empty_storage_has_no_handle(device, monkeypatch):
    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", lambda self: (0, None, 0, 0, None, 0, None, False))
    with Ledger() as ledger:
        share(storage(0))
        assert ledger.reading() == ((), ())


def test_a_failing_export_leaves_no_record(device, monkeypatch):
    def refuse(self):
        raise RuntimeError("only available on CUDA")

    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", refuse)
    with Ledger() as ledger, pytest.raises(RuntimeError, match="only available"):
        share(storage())
    assert ledger.reading() == ((), ())


def test_the_ledger_holds_no_storage(device):
    with Ledger() as ledger:
        block = storage()
        gone = weakref.ref(block)
        view = open_(share(block))
        away = weakref.ref(view)
        del block, view
        assert gone() is None
        assert away() is None
        assert len(ledger.reading()[0]) == 1


def test_everything_is_put_back(device):
    before = [vars(torch.UntypedStorage).get(name) for name in SHARING] + [torch._C._cuda_ipc_collect]
    with pytest.raises(KeyError), Ledger():
        raise KeyError
    assert [vars(torch.UntypedStorage).get(name) for name in SHARING] + [torch._C._cuda_ipc_collect] == before


def test_on_a_torch_without_cuda_everything_is_put_back_too():
    before = [name in vars(torch.UntypedStorage) for name in SHARING]
    with Ledger():
        assert all(name in vars(torch.UntypedStorage) for name in SHARING)
    assert [name in vars(torch.UntypedStorage) for name in SHARING] == before


def test_a_ledger_watches_once_at_a_time():
    with Ledger() as ledger, pytest.raises(RuntimeError, match="already watching"):
        ledger.__enter__()


def test_ledgers_nest(device):
    with Ledger(0) as outer, Ledger(1) as inner:
        block = storage()
        share(block)
        assert len(outer.reading()[0]) == len(inner.reading()[0]) == 1


def test_a_storage_that_dies_in_the_middle_of_a_sweep_is_counted(device):
    with Ledger() as ledger:
        ring = [storage()]
        ring.append(ring)
        view = open_(share(ring[0]))
        del view
        ledger._busy = True  # as if the collector ran inside a sweep
        del ring
        gc.collect()
        assert device.freed == [0]
        ledger._busy = False
        assert one(ledger.reading()[0]).freed


def test_an_export_in_the_middle_of_a_sweep_is_read_after_it(device):
    with Ledger() as ledger:
        first = storage()
        open_(share(first))
        ledger._busy = True  # as if a finalizer exported while the ledger follows a drop
        second = storage()
        open_(share(second))
        del first, second
        ledger._busy = False
        assert [export.freed for export in ledger.reading()[0]] == [True, True]


def test_a_storage_in_the_place_of_one_whose_drop_was_not_followed_yet_is_a_block_of_its_own(device):
    with Ledger() as ledger:
        share(storage())
        ledger._busy = True
        share(storage())  # nothing lives between the two: it lies where the first did
        ledger._busy = False
        assert [export.block for export in ledger.reading()[0]] == [0, 1]


def test_the_log_is_read_at_every_step(device):
    with Ledger() as ledger:
        block = storage()
        share(block), share(block)
        assert len(ledger._log) == 2
        ledger.mark(1)
        assert not ledger._log
        assert [export.step for export in ledger.reading()[0]] == [-1, -1]


def test_equal_functions_of_different_files_are_told_apart(device):
    with Ledger() as ledger:
        for name in ("/srv/one/app.py", "/srv/two/app.py"):
            made = {"share": share, "storage": storage}
            exec(compile("def take():\n    share(storage())", name, "exec"), made)
            made["take"]()
        found = [export.stack[1:2] for export in ledger.reading()[0]]
    assert found == [("one/app.py:2 in take",), ("two/app.py:2 in take",)]


def test_exports_of_many_threads_are_all_noted(device):
    blocks = [storage() for _ in range(64)]
    with Ledger() as ledger:
        threads = [threading.Thread(target=lambda part=blocks[i::4]: [share(b) for b in part]) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(ledger.reading()[0]) == 64


def test_a_collection_by_the_allocator_shows_in_the_addresses(device, monkeypatch):
    with Ledger() as ledger:
        held, lost = storage(), storage()
        share(held)
        shared = share(lost)
        view, other = open_(shared), open_(shared)
        del lost
        del view
        device.collect()  # by itself, on a miss: nobody was told
        del other
        monkeypatch.setattr(torch._C, "_cuda_memorySnapshot", lambda _: device.snapshot([held]), raising=False)
        exports, opens = ledger.reading()
    assert (exports[1].dropped, exports[1].freed, exports[1].counter, exports[1].freed_at) == (True, True, -1, 0)
    assert one(audit(exports, opens)).kind == "freed-while-open"


def test_a_later_block_at_the_address_tells_that_the_older_one_was_freed(device, monkeypatch):
    monkeypatch.setattr(torch.UntypedStorage, "data_ptr", lambda self: 4096)
    live = {"address": 4096, "size": 512, "state": "active_allocated"}
    monkeypatch.setattr(
        torch._C, "_cuda_memorySnapshot", lambda _: {"segments": [{"address": 0, "blocks": [live]}]}, raising=False
    )
    with Ledger() as ledger:
        older = storage()
        share(older)
        del older
        newer = storage()
        share(newer)
        assert [export.freed for export in ledger.reading()[0]] == [True, False]


@pytest.mark.parametrize("reused", [False, True])
def test_a_tensor_that_was_never_exported_at_the_address_tells_it_too(device, monkeypatch, reused):
    address = torch.UntypedStorage.data_ptr
    places = {}
    monkeypatch.setattr(torch.UntypedStorage, "data_ptr", lambda self: places.get(self._cdata, address(self)))
    live = {"address": 4096, "size": 512, "state": "active_allocated"}
    listed = {"segments": [{"address": 0, "blocks": [live]}]}
    monkeypatch.setattr(torch._C, "_cuda_memorySnapshot", lambda _: listed, raising=False)
    with Ledger() as ledger:
        older = storage()
        places[older._cdata] = 4096
        shared = share(older)
        views = [open_(shared), open_(shared)]
        places.pop(older._cdata)
        del older
        views.pop()
        if reused:
            device.collect()  # by itself, on a miss; then another tensor comes to lie there
        later = torch.empty(100)
        places[later.untyped_storage()._cdata] = 4096 if reused else 8192
        views.pop()
        assert one(ledger.reading()[0]).freed is reused
    assert device.freed == ([0] if reused else [])


def test_a_torch_whose_snapshot_takes_no_pool_is_asked_without(device, monkeypatch):
    with Ledger() as ledger:
        block = storage()
        share(block)
        monkeypatch.setattr(torch._C, "_cuda_memorySnapshot", lambda: device.snapshot([block]), raising=False)
        assert one(ledger.reading()[0]).allocated == ("app/pool.py:12 in grow",)


def test_counter_files_whose_handles_all_came_back_are_let_go(device):
    with Ledger() as ledger:
        files = [Device() for _ in range(70)]
        for step, each in enumerate(files):
            device.name, device.file, device.producer = each.name, each.file, each.producer
            ledger.mark(step)
            block = storage()
            view = open_(share(block))
            del view, block
        lost = storage()
        share(lost)
        ledger.mark(70)
        assert len(ledger._files) == 64
        for each in files[:-1]:
            os.close(each.file)
        assert [export.counter for export in ledger.reading()[0]] == [0] * 70 + [1]


def test_the_allocating_lines_of_kept_blocks_are_told(device, monkeypatch):
    with Ledger() as ledger:
        block = storage()
        share(block)
        monkeypatch.setattr(torch._C, "_cuda_memorySnapshot", lambda _: device.snapshot([block]), raising=False)
        assert one(ledger.reading()[0]).allocated == ("app/pool.py:12 in grow",)


def test_addresses_that_mean_nothing_are_not_believed(device, monkeypatch):
    with Ledger() as ledger:
        block = storage()
        share(block), share(storage())
        monkeypatch.setattr(torch._C, "_cuda_memorySnapshot", lambda _: device.snapshot([storage()]), raising=False)
        assert [export.freed for export in ledger.reading()[0]] == [False, False]


# ---- the audit, by literal records ----

SITE = ("app.py:41 in share", "app.py:7 in main")


def export(slot=0, rank=0, counter=1, **more):
    return Export(rank=rank, counter_file=f"/f{rank}", slot=slot, bytes=512, stack=SITE, counter=counter, **more)


def opened(rank, slot=0, exporter=0, released=1):
    return Open(rank=rank, counter_file=f"/f{exporter}", slot=slot, stack=("peer.py:9 in take",), released=released)


LOST = {"dropped": True}
FREED = {"dropped": True, "freed": True, "freed_at": 0}


@pytest.mark.parametrize(
    ("record", "opens"),
    [
        pytest.param(export(counter=0, **FREED), [opened(1)], id="opened once, closed, dropped, freed"),
        pytest.param(export(counter=0, **LOST), [opened(1)], id="the same, waiting for a collection"),
        pytest.param(export(counter=1), [], id="not opened yet, held"),
        pytest.param(export(counter=1), [opened(1, released=0)], id="open, held"),
        pytest.param(export(counter=1), [opened(r, released=0) for r in (1, 2)], id="open by two, held"),
        pytest.param(export(counter=0), [opened(1)], id="closed, held"),
        pytest.param(export(counter=None, **LOST), [opened(1)], id="the counter file is gone"),
        pytest.param(export(counter=None, **FREED), [], id="released by a process without a ledger"),
    ],
)
def test_what_is_in_order_is_not_named(record, opens):
    assert broken(record, opens) is None
    assert audit([record], opens) == ()


@pytest.mark.parametrize(
    ("record", "opens", "dead", "kind"),
    [
        pytest.param(export(counter=-1), [opened(1)] * 2, (), "over-released", id="held, before a byte has leaked"),
        pytest.param(export(counter=-6, **LOST), [opened(r) for r in range(1, 8)], (), "over-released", id="lost"),
        pytest.param(export(counter=1, **LOST), [], (), "never-opened", id="dropped, never opened"),
        pytest.param(export(counter=1, **LOST), [opened(1, released=0)], (), "still-open", id="dropped, open"),
        pytest.param(
            export(counter=0, **LOST), [opened(1), opened(2, released=0)], (), "still-open", id="at zero, open"
        ),
        pytest.param(
            export(counter=0, **FREED), [opened(1), opened(2, released=0)], (), "freed-while-open", id="still"
        ),
        pytest.param(export(counter=-1, **FREED), [opened(1), opened(2)], (), "freed-while-open", id="closed since"),
        pytest.param(
            export(counter=0, **FREED), [opened(1), opened(2)], (), "freed-while-open", id="the file went first"
        ),
        pytest.param(export(counter=-1, **FREED), [], (), "freed-while-open", id="by processes without a ledger"),
        pytest.param(export(counter=1, **LOST), [], (2,), "dead-peer", id="its opens died with it"),
        pytest.param(export(counter=1, **LOST), [opened(2, released=0)], (2,), "dead-peer", id="its open is known"),
        pytest.param(export(counter=1, **LOST), [opened(1, released=0)], (2,), "still-open", id="another one holds it"),
        pytest.param(export(counter=1, **LOST), [opened(1), opened(2)], (), "over-released", id="one release was lost"),
    ],
)
def test_each_broken_contract_has_its_kind(record, opens, dead, kind):
    assert broken(record, opens, frozenset(dead)) == kind
    assert one(audit([record], opens, dead=dead)).kind == kind


def test_under_the_signed_reading_a_late_drop_is_over_released_and_not_freed_while_open():
    at_minus_one = {"dropped": True, "freed": True, "freed_at": -1}
    assert broken(export(counter=-1, **at_minus_one), [opened(1), opened(2)]) == "over-released"
    assert broken(export(counter=-2, **at_minus_one), [opened(1), opened(2), opened(3)]) == "freed-while-open"


def test_one_handle_for_seven_peers():
    """Eight ranks: seven opens, counter -6, from every rank, and every rank has a hand in it."""
    exports = [export(rank=rank, counter=-6, block=0, **LOST) for rank in range(8)]
    opens = [opened(peer, exporter=rank) for rank in range(8) for peer in range(8) if peer != rank]
    fault = one(audit(exports, opens))
    assert (fault.kind, fault.opens, fault.counter, fault.handles, fault.bytes) == ("over-released", 7, -6, 8, 8 * 512)
    assert fault.site == SITE[0]
    assert fault.stack == SITE
    assert fault.exporters == fault.by_ranks == tuple(range(8))
    assert fault.open_sites == ("peer.py:9 in take",)
    assert "once for each open" in fault.advice


def test_a_handle_for_each_of_seven_peers_is_clean():
    exports = [export(rank=r, slot=s, counter=0, block=0, **FREED) for r in range(8) for s in range(7)]
    opens = [opened(peer, slot=s, exporter=r) for r in range(8) for s, peer in enumerate(p for p in range(8) if p != r)]
    assert audit(exports, opens) == ()


def test_faults_fold_over_a_line_with_the_same_opens_and_counter():
    exports = [
        export(slot=0, counter=-1, **LOST),
        export(slot=1, counter=-1, **LOST),
        export(slot=2, counter=-2, **LOST),
        Export(rank=0, counter_file="/f0", slot=3, bytes=512, stack=("b.py:1 in f",), counter=-1, dropped=True),
    ]
    opens = [opened(1, slot=slot) for slot, count in enumerate((2, 2, 3, 2)) for _ in range(count)]
    faults = audit(exports, opens)
    assert [(fault.site, fault.opens, fault.counter, fault.handles) for fault in faults] == [
        (SITE[0], 2, -1, 2),
        (SITE[0], 3, -2, 1),
        ("b.py:1 in f", 2, -1, 1),
    ]


def test_a_block_counts_its_bytes_once_however_many_handles_broke():
    exports = [export(slot=slot, counter=1, block=5, **LOST) for slot in range(3)]
    assert one(audit(exports, [])).bytes == 512
    assert one(audit(exports, [])).handles == 3


def test_who_never_opened_is_who_opened_no_other_handle_of_the_block():
    exports = [export(slot=slot, counter=counter, block=0, **LOST) for slot, counter in enumerate((0, 1, 0))]
    exports.append(export(rank=2, counter=0, block=0, **FREED))
    opens = [opened(1, slot=0), opened(3, slot=2), opened(1, exporter=2)]
    fault = one(audit(exports, opens))
    assert (fault.kind, fault.by_ranks) == ("never-opened", (2,))


def test_who_holds_is_named_and_who_gave_back_is_not():
    record = export(counter=0, **FREED)
    assert one(audit([record], [opened(1), opened(2, released=0)])).by_ranks == (2,)


def test_the_dead_are_named():
    assert one(audit([export(counter=1, **LOST)], [], dead=[2, 5])).by_ranks == (2, 5)


def test_opens_that_no_ledger_saw_are_told_from_the_counter():
    assert one(audit([export(counter=-3, **LOST)], [])).opens == 4


def test_an_export_without_a_stack_is_of_unknown_site():
    record = Export(rank=0, counter_file="/f0", slot=0, bytes=512, stack=(), counter=1, dropped=True)
    assert one(audit([record], [])).site == "unknown"


def test_faults_are_ordered_by_kind_then_bytes():
    exports = [
        Export(0, "/f", slot, size, (f"{kind}{size}.py:1 in f",), counter=counter, dropped=True, freed=freed)
        for slot, (kind, size, counter, freed) in enumerate(
            [("f", 512, -1, True), ("n", 512, 1, False), ("o", 512, -1, False), ("o", 1024, -1, False)]
        )
    ]
    assert [(fault.kind, fault.bytes) for fault in audit(exports, [])] == [
        ("over-released", 1024),
        ("over-released", 512),
        ("never-opened", 512),
        ("freed-while-open", 512),
    ]


def test_every_kind_has_advice():
    assert all(len(fault.advice) > 40 for fault in audit([export(counter=-1), export(slot=1, counter=1, **LOST)], []))


def test_the_summary_counts_and_pairs():
    exports = [export(slot=0, counter=1), export(slot=1, counter=0), export(rank=1, counter=0)]
    opens = [opened(1, slot=0, released=0), opened(1, slot=1), opened(2, exporter=1), opened(2, exporter=7)]
    found = summary(exports, opens)
    assert (found.exports, found.opens, found.faults, found.note) == (3, 4, (), "")
    assert found.pairs == (IpcPair(0, 1, 2, 1), IpcPair(1, 2, 1, 0))


@pytest.mark.parametrize(("live", "said"), [(EVENTS, ""), (EVENTS + 1, "Rank 2 has 1,001 live exports: past 1,000")])
def test_many_live_exports_are_said_to_be_slow(live, said):
    exports = [export(rank=2, slot=slot) for slot in range(live)] + [export(rank=2, slot=live, counter=0, **FREED)]
    found = summary(exports, [])
    assert found.faults == ()
    assert found.note.startswith(said)
    assert bool(found.note) is bool(said)


def test_a_leak_that_makes_exports_slow_says_so_in_its_advice():
    exports = [export(slot=slot, counter=1, **LOST) for slot in range(EVENTS + 1)]
    assert "synchronizes a stream" in one(audit(exports, [])).advice


# ---- ipc_audit around any code ----


def test_the_audit_of_one_process_alone(device):
    with ipc_audit() as found:
        block = storage()
        view = open_(share(block))
        del view
        kept = storage()
        share(kept)
        share(storage())
        assert found.faults == ()
    (fault,) = found.faults
    assert (fault.kind, fault.counter, found.summary.exports) == ("never-opened", 1, 3)
    assert "never-opened: exported at tests/test_ipc.py:" in str(found)


def test_what_was_exported_before_is_not_audited(device):
    share(storage())
    with ipc_audit() as found:
        pass
    assert found.summary.exports == 0


def test_a_body_that_raises_is_not_audited(device):
    def body():
        share(storage())
        raise KeyError

    with pytest.raises(KeyError), ipc_audit() as found:
        body()
    assert found.summary.exports == 0

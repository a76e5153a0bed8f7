import gzip
import json
import multiprocessing
from pathlib import Path

import pytest
from truth import record
from truth.schedules import Contract, Schedule, generate, play

from pytest_sglmem import emulated_cuda
from pytest_sglmem.audit import audit
from pytest_sglmem.contract import reads_unsigned
from pytest_sglmem.emulated.allocator import Allocator
from pytest_sglmem.ledger import Ledger

TRUTH = Path(__file__).parents[1] / "fixtures" / "truth"
TABLE = json.loads((TRUTH / "table.json").read_text())["rows"]
RECORDINGS = sorted(TRUTH.glob("*.json.gz"))
MIB = 1 << 20
PART = 550  # schedules that one test plays, so that workers of xdist share a recording


def load(path):
    return json.loads(gzip.decompress(path.read_bytes()))


@pytest.fixture(scope="module")
def processes():
    """Real processes on the emulated device: seven consumers, two devices."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch", "torch._dynamo"])
    with emulated_cuda(devices=2):
        stage = record.Processes("emulated", 2, consumers=7)
        yield stage
        stage.close_all()


@pytest.fixture
def stage(processes):
    """The processes, for schedules of one device (a test may set `devices`), with every block back afterwards."""
    processes.devices = 1
    yield processes
    processes.reset()


def check_row(row, stage):
    for step, (live, counters) in enumerate(play(Schedule(row["consumers"], 1, row["steps"]), stage)):
        if str(step) in row["live_mib"]:
            assert live == [row["live_mib"][str(step)] * MIB], f"live bytes after step {step} {row['steps'][step]}"
        if str(step) in row["counters"]:
            assert counters == row["counters"][str(step)], f"counters after step {step} {row['steps'][step]}"


rows = pytest.mark.parametrize("row", TABLE, ids=[row["name"] for row in TABLE])
recordings = pytest.mark.parametrize("path", RECORDINGS, ids=[path.name for path in RECORDINGS])


@rows
def test_the_measured_table_on_the_contract(row):
    check_row(row, Contract(row["consumers"]))


@rows
def test_the_measured_table_on_the_emulated_device(row, stage):
    check_row(row, stage)


@recordings
def test_a_recording_is_large_enough_and_says_where_it_comes_from(path):
    recording = load(path)
    assert len(recording["schedules"]) == 4 * PART >= 2000
    assert sum(len(one["steps"]) for one in recording["schedules"]) >= 10_000
    assert all(recording[key] for key in ("device", "driver", "torch", "cuda", "python", "date"))
    assert path.stat().st_size < 2 * MIB


@recordings
def test_the_contract_agrees_with_every_step_of_a_recording(path):
    assert record.disagreements(load(path)) == []


def replayed(recording, stage, numbers):
    """Where the stage differs from these schedules of the recording, and how many steps it played."""
    stage.devices = recording["devices"]
    wrong, steps = [], 0
    for number in numbers:
        played = recording["schedules"][number]
        schedule = Schedule(played["consumers"], recording["devices"], played["steps"])
        wrong += record.differing(number, schedule.steps, play(schedule, stage), played)
        stage.reset()
        steps += len(schedule.steps)
    return wrong, steps


def same_sign_or_skip(recording):
    if recording["unsigned"] != reads_unsigned():
        pytest.skip("the torch at hand reads the counter with the other sign than the recording's")


@recordings
@pytest.mark.parametrize("part", range(4))
def test_the_emulated_device_agrees_with_every_step_of_a_recording(path, part, stage):
    recording = load(path)
    same_sign_or_skip(recording)
    numbers = range(len(recording["schedules"]))[part * PART : (part + 1) * PART]
    wrong, steps = replayed(recording, stage, numbers)
    assert wrong == []
    assert steps == sum(len(recording["schedules"][number]["steps"]) for number in numbers) > 10_000


@recordings
def test_an_emulated_device_that_frees_below_zero_disagrees(path, stage, monkeypatch):
    recording = load(path)
    same_sign_or_skip(recording)
    monkeypatch.setattr("pytest_sglmem.contract.is_released", lambda counter, *, unsigned: counter <= 0)
    wrong, _ = replayed(recording, stage, range(20))
    assert 0 < len(wrong) < 20


@pytest.mark.parametrize("devices", [1, 2])
def test_the_contract_agrees_with_the_emulated_device(devices, stage):
    stage.devices = devices
    schedules = [generate(seed, devices=devices, kills=seed == 0) for seed in range(30)]
    played, mistaken = record.record(stage, schedules, seconds=60)
    assert mistaken == []
    assert len(played) == len(schedules)
    assert sum(schedule.kills for schedule in schedules) >= 1
    recording = {"devices": devices, "unsigned": reads_unsigned(), "schedules": played}
    assert record.disagreements(recording) == []


def test_the_emulated_device_reads_the_counter_as_its_torch_does(stage):
    assert stage.frees_below_zero() is not reads_unsigned()


def watched(stage, *steps):
    """The fault that the audit names after these steps, consumer `c` being rank `c + 1`; the last one is killed."""
    with Ledger(0) as ledger:
        list(play(Schedule(2, 1, [["a", 512, 0], ["x", 0], *steps]), stage))
        exports, opens = ledger.reading()
        faults = audit(exports, opens, dead=[1])
    return faults


def test_a_peer_that_was_killed_is_named(stage):
    (fault,) = watched(stage, ["o", 0, 0], ["k", 0], ["d", 0], ["i"])
    assert (fault.kind, fault.counter, fault.by_ranks, fault.bytes) == ("dead-peer", 1, (1,), 512)
    assert "fixtures/truth/record.py:" in fault.site


def test_a_live_process_releases_for_the_dead_as_the_advice_says(stage):
    assert watched(stage, ["o", 0, 0], ["k", 0], ["d", 0], ["o", 0, 1], ["c", 1], ["i"]) == ()


def test_the_ledger_is_right_where_addresses_are_handed_out_again(stage, monkeypatch):
    """As on hardware, and unlike the emulated device. On an H200 this very schedule showed the ledger mistaken."""
    allocate = Allocator.allocate

    def allocate_at_its_place(self, *args):
        block = allocate(self, *args)
        block.address = block.segment.address + block.offset
        return block

    monkeypatch.setattr(Allocator, "allocate", allocate_at_its_place)
    played, mistaken = record.record(stage, [generate(1735)], seconds=60)
    assert mistaken == []
    monkeypatch.setattr("pytest_sglmem.ledger._addresses_of_tensors", lambda wanted: set())
    _, mistaken = record.record(stage, [generate(1735)], seconds=60)
    assert mistaken == ["schedule 0, handle 2: the ledger says limbo, the contract freed"]
    assert len(played) == 1


# What follows breaks the truth on purpose: a replay that could not fail would show nothing.


def made_up(unsigned=True, **changes):
    """A recording that the contract itself made, with `changes` to one schedule."""
    schedule = Schedule(2, 1, [["a", 512, 0], ["x", 0], ["o", 0, 0], ["o", 0, 1], ["c", 0], ["c", 1], ["d", 0], ["i"]])
    readings = list(play(schedule, Contract(2, unsigned=True)))
    played = {
        "consumers": 2,
        "steps": schedule.steps,
        "live": [live for live, _ in readings],
        "counters": [counters for _, counters in readings],
    }
    return {"devices": 1, "unsigned": unsigned, "schedules": [played | changes]}


def test_a_made_up_recording_agrees():
    assert record.disagreements(made_up()) == []


def test_a_wrong_counter_is_a_disagreement():
    counters = made_up()["schedules"][0]["counters"]
    counters[5] = [0]
    assert record.disagreements(made_up(counters=counters)) == [
        "schedule 0, step 5 ['c', 1]: ([512], [-1]) here, ([512], [0]) recorded"
    ]


def test_a_wrong_byte_is_a_disagreement():
    live = made_up()["schedules"][0]["live"]
    live[6] = [0]
    assert len(record.disagreements(made_up(live=live))) == 1


def test_the_other_sign_is_a_disagreement():
    (wrong,) = record.disagreements(made_up(unsigned=False))
    assert wrong.startswith("schedule 0, step 6 ['d', 0]: ([0], ")


def test_an_unknown_step_is_an_error():
    with pytest.raises(ValueError, match=r"no step begins with 'z': \['z', 1\]"):
        list(play(Schedule(1, 1, [["z", 1]]), Contract(1)))


def test_schedules_are_the_same_for_the_same_seed():
    assert generate(7, kills=True) == generate(7, kills=True)
    assert generate(7) != generate(8)


def test_the_readme_counts_what_was_recorded():
    readme = " ".join((TRUTH.parents[1] / "README.md").read_text(encoding="utf-8").split())
    schedules = [played for path in RECORDINGS for played in load(path)["schedules"]]
    steps = sum(len(played["steps"]) for played in schedules)
    assert f"({len(schedules):,} random schedules, {steps:,} steps" in readme
    assert "all of them on the contract, and all on the emulated device between real processes" in readme

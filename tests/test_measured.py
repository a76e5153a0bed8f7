"""What was measured is what the README and `fixtures/measured` say of it; the drawing is that of its record."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MEASURED = ROOT / "fixtures" / "measured"
MIB = 1 << 20

# What may differ between the report from a GPU and the emulated one, and why: the table in fixtures/measured/README.md.
EVERYWHERE = {"seconds", "world.device", "live_bytes.slowest", "live_bytes.outside_bytes", "gc.pause_ms"}
RACE = {
    "live_bytes.bytes_per_cycle",
    "live_bytes.settled",
    "live_bytes.series",
    "live_bytes.reserved_bytes",
    "live_bytes.sites.bytes_per_cycle",
    "live_bytes.sites.blocks_per_cycle",
    "live_bytes.ipc.faults",
}
CUBLAS = {"live_bytes.settled", "live_bytes.series", "live_bytes.outputs_digest"}
ALLOWED = {
    "test_one_handle_for_all_leaks": RACE,
    "test_with_one_request_above_the_cap_it_leaks_slowly": RACE,
    "test_attention_in_groups_is_flat_and_the_same": CUBLAS,
}


def load(name):
    return json.loads((MEASURED / name).read_text(encoding="utf-8"))


def leaves(value, path=""):
    """(place with its indices, value) of everything in a document."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield from leaves(each, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from leaves(each, f"{path}[{number}]")
    else:
        yield path, value


def differing(one, other):
    """The fields in which two entries differ, without indices."""
    one, other = dict(leaves(one)), dict(leaves(other))
    return {re.sub(r"\[\d+\]", "", path) for path in one.keys() | other.keys() if one.get(path) != other.get(path)}


def within(field, allowed):
    return any(field == name or field.startswith(name + ".") for name in allowed)


GPU, EMULATED = (
    {test["nodeid"].rpartition("::")[2]: test for test in load(name)["tests"]}
    for name in ("checks-8-ranks-1xh200.json", "checks-8-ranks-emulated.json")
)


def test_both_reports_hold_the_same_checks():
    assert GPU.keys() == EMULATED.keys()
    assert len(GPU) == 8
    assert {test["world"]["size"] for test in (*GPU.values(), *EMULATED.values()) if test["world"]} == {8}


@pytest.mark.parametrize("name", GPU)
def test_a_gpu_and_the_emulated_device_differ_only_where_it_is_explained(name):
    fields = differing(GPU[name], EMULATED[name])
    allowed = EVERYWHERE | ALLOWED.get(name, set())
    assert {field for field in fields if not within(field, allowed)} == set()


@pytest.mark.parametrize("name", [name for name, allowed in ALLOWED.items() if allowed is RACE])
def test_the_race_splits_the_same_buffers(name):
    (gpu,), (emulated,) = GPU[name]["live_bytes"], EMULATED[name]["live_bytes"]
    totals = [
        [sum(fault[what] for fault in check["ipc"]["faults"]) for what in ("handles", "bytes")]
        for check in (gpu, emulated)
    ]
    assert totals[0] == totals[1]
    for check in (gpu, emulated):
        assert {fault["kind"] for fault in check["ipc"]["faults"]} == {"over-released", "freed-while-open"}
        assert {fault["opens"] for fault in check["ipc"]["faults"]} == {7}
        assert sum(fault["handles"] for fault in check["ipc"]["faults"] if fault["counter"] != 1 - 7) <= 1


def test_cublas_keeps_32_mib_in_attention():
    name = "test_attention_in_groups_is_flat_and_the_same"
    (gpu,), (emulated,) = GPU[name]["live_bytes"], EMULATED[name]["live_bytes"]
    for field in ("series", "settled"):
        pairs = zip(gpu[field], emulated[field], strict=True)
        assert {one - other for ours, theirs in pairs for one, other in zip(ours, theirs, strict=True)} == {32 * MIB}


def test_the_seeds_growth_is_one_line_and_the_fix_does_not_grow():
    for row in load("seed-1xh200.json")["rows"]:
        (site,) = row["before"]["share"]
        assert re.fullmatch(r"pytest_sglmem/reference/replaced_ulysses\.py:\d+ in stage", site)
        assert row["same_outputs"] == row["requests"]
        assert row["after"]["share"] == {}
        half = row["requests"] // 2
        assert row["geometries"][:half] == row["geometries"][half:]
        assert row["after"]["live_bytes"][half - 1] == row["after"]["live_bytes"][-1]


def test_the_exchange_keeps_what_was_asked_of_it():
    for row in load("exchange-2xh200.json")["rows"]:
        assert row["same"] is True
        assert row["allocations"] == 0
        assert row["ratio"] >= (1.1 if row["mib"] > 1 else 1.0)
        assert row["ratio_ahead"] >= (1.1 if row["mib"] > 1 else 1.0)
    (ahead,) = (row["ratio_ahead"] for row in load("exchange-2xh200.json")["rows"] if row["mib"] == 8)
    assert round(ahead, 1) == 1.4  # as the CHANGELOG says


def test_the_own_part_of_an_armed_allocation_is_under_a_microsecond():
    """The README's sentence on `cuda.alloc`: what it costs beyond a dispatch mode that does nothing, in ns."""
    text = (MEASURED / "faults-h200.txt").read_text(encoding="utf-8")
    pairs = re.findall(
        r"^cuda\.alloc, real device.* (\d+) +\d+\n  a dispatch mode that does nothing .* (\d+) +\d+$", text, re.M
    )
    assert len(pairs) == 2
    assert all(int(armed) - int(nothing) < 1000 for armed, nothing in pairs)


def test_the_drawing_is_that_of_the_record():
    spec = importlib.util.spec_from_file_location("plot_seed", ROOT / "benchmarks" / "plot_seed.py")
    plot = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plot)
    drawn = plot.DRAWING.read_text(encoding="utf-8")
    assert plot.drawing(json.loads(plot.RECORD.read_text(encoding="utf-8"))) == drawn


def test_every_file_stands_in_the_table():
    text = (MEASURED / "README.md").read_text(encoding="utf-8")
    said = set(re.findall(r"^\| `([\w-]+\.(?:json|txt))` \|", text, re.MULTILINE))
    assert said == {path.name for path in MEASURED.iterdir()} - {"README.md"}

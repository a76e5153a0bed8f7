"""`docs/faults.md` is what its recordings say, and they leave no point, action or fault of the proof uncaught."""

from __future__ import annotations

import json

import fault_table

from pytest_sglmem.faults import POINTS
from pytest_sglmem.proof import CANDIDATES, FORCED


def test_every_point_and_every_action_is_caught_by_a_test():
    found = fault_table.by_point_and_action(fault_table.struck())
    assert set(found) == {(point, action) for point, taken in POINTS.items() for action in taken.actions}
    assert [fault for fault, tests in found.items() if not tests] == []


def test_every_test_that_is_named_is_there():
    for nodeid in fault_table.struck():
        path, *_, name = nodeid.split("::")
        assert f"def {name.partition('[')[0]}(" in (fault_table.ROOT / path).read_text(encoding="utf-8")


def test_the_bundled_checks_catch_every_fault_that_can_fire_in_them():
    faults = json.loads(fault_table.PROOF.read_text(encoding="utf-8"))["faults"]
    assert {fault["verdict"] for fault in faults} == {"caught"}
    # They write no file and leave the collector alone: those faults are caught in fixtures/downstream.
    never = {one.text for one in CANDIDATES if one.point in ("file.write", "file.fsync", "gc.enable") or one.only}
    tried = {*FORCED.values(), *(one.text.format(last=2) for one in CANDIDATES)} - never
    assert {fault["fault"] for fault in faults} == tried


def test_the_page_is_up_to_date():
    assert fault_table.PAGE.read_text(encoding="utf-8") == fault_table.page(), fault_table.AGAIN

"""`docs/faults.md` is what its recordings say, and they leave no point, action or fault of the proof uncaught."""

from __future__ import annotations

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


def test_the_proofs_have_no_survivor_and_between_them_try_all_that_the_emulated_device_can_show():
    checks, downstream = fault_table.verdicts(fault_table.CHECKS), fault_table.verdicts(fault_table.DOWNSTREAM)
    assert {said["verdict"] for said in [*checks.values(), *downstream.values()]} == {"caught"}
    tried = {*FORCED.values(), *(one.text.format(last=2) for one in CANDIDATES if not one.only)}
    assert {*checks, *downstream} == set(downstream) == tried


def test_what_our_own_tests_let_pass_has_its_reason_beside_it():
    own = fault_table.verdicts(fault_table.OWN)
    assert {said["verdict"] for said in own.values()} <= {"caught", "exempt"}
    assert [name for name, said in own.items() if said["verdict"] == "exempt"] == ["pickle.dumps=keep-live"]
    text = (fault_table.ROOT / "tests" / "test_live_bytes.py").read_text(encoding="utf-8")
    assert '@pytest.mark.survives("pickle.dumps=keep-live", reason="' in text


def test_the_page_is_up_to_date():
    assert fault_table.PAGE.read_text(encoding="utf-8") == fault_table.page(), fault_table.AGAIN

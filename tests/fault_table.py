"""Which test catches which fault, from runs and not from hand: `docs/faults.md`, and what it is made from.

`python tests/fault_table.py --record` runs the tests of the strikes and writes down what fired in each that passed
(`fixtures/faults/strikes.json`); `--write` makes the page of that and of the report of a proof. From then on each of
these tests holds its own line: `as_the_table_says` fails it where anything else fires in it than is written down.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from readme_tables import code, table

from pytest_sglmem import plugin, strikes
from pytest_sglmem.faults import POINTS, Fault, parse

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "faults.md"
STRUCK = ROOT / "fixtures" / "faults" / "strikes.json"
CHECKS = ROOT / "fixtures" / "faults" / "proof-checks.json"
OWN = ROOT / "fixtures" / "faults" / "proof-tests.json"
DOWNSTREAM = ROOT / "fixtures" / "faults" / "proof-downstream.json"
TESTS = ("tests/test_faults.py", "tests/test_strikes.py")
RECORDER = "fault-recorder"
AGAIN = "python tests/fault_table.py --record --write"


class Recorder:
    """A plugin: what fired in each test that passed."""

    def __init__(self) -> None:
        self.struck: dict[str, list[str]] = {}
        self._fired: dict[str, list[str]] = {}

    def add(self, nodeid: str, fired: list[str]) -> None:
        """Called at a test's end, before it is known whether it passed."""
        self._fired[nodeid] = fired

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take over what fired where the test passed."""
        if report.when == "teardown" and report.passed and self._fired.get(report.nodeid):
            self.struck[report.nodeid] = self._fired[report.nodeid]
        if report.failed:
            self._fired.pop(report.nodeid, None)


def noting(here: list[strikes.Armed]) -> Callable[..., AbstractContextManager[strikes.Armed]]:
    """`strikes.arming`, which puts whatever is armed into `here`."""
    arming = strikes.arming

    @contextmanager
    def noted(faults: Sequence[Fault], *, rank: int, seed: int) -> Iterator[strikes.Armed]:
        with arming(faults, rank=rank, seed=seed) as armed:
            here.append(armed)
            yield armed

    return noted


@pytest.fixture(autouse=True)
def as_the_table_says(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail the test where other faults fire in it, here or in its ranks, than those written down for it."""
    here: list[strikes.Armed] = []

    monkeypatch.setattr(strikes, "arming", noting(here))
    yield
    counts: dict[str, int] = {fault: sum(fired) for fault, fired in request.node.stash[plugin.TEST].fired.items()}
    for armed in here:
        for fault, fired in armed.fired.items():
            counts[fault] = counts.get(fault, 0) + fired
    fired = sorted(fault for fault, count in counts.items() if count and not fault.endswith("=watch"))
    if request.node.stash[plugin.TEST].outcome != "passed":
        return
    recorder = request.config.pluginmanager.get_plugin(RECORDER)
    if recorder is not None:
        recorder.add(request.node.nodeid, fired)
    else:
        assert fired == struck().get(request.node.nodeid, []), f"other than written down: {AGAIN}"


def struck() -> dict[str, list[str]]:
    """Test -> the faults that fired in it, as written down."""
    return json.loads(STRUCK.read_text(encoding="utf-8"))


def by_point_and_action(tests: Mapping[str, Sequence[str]]) -> dict[tuple[str, str], list[str]]:
    """(point, action) -> the tests in which such a fault fired, in the order of `POINTS`."""
    found: dict[tuple[str, str], list[str]] = {
        (point.name, action): [] for point in POINTS.values() for action in point.actions
    }
    for nodeid, texts in tests.items():
        fired = [parse(text, origin=nodeid) for text in texts]
        for key in dict.fromkeys((fault.point, fault.action) for fault in fired):
            found[key].append(nodeid)
    return found


def strikes_table() -> Iterator[str]:
    """A row for each point and action."""
    found = by_point_and_action(struck())
    rows = [(code(f"{point}={action}"), names(tests)) for (point, action), tests in found.items()]
    yield from table(("fault", "caught by"), rows)


def verdicts(proof: Path) -> dict[str, dict]:
    """Fault -> what a recorded proof says of it."""
    return {fault["fault"]: fault for fault in json.loads(proof.read_text(encoding="utf-8"))["faults"]}


def proof_table(proof: Path) -> Iterator[str]:
    """A row for each fault of a proof."""
    rows = [(code(name), said["verdict"], names(said["caught_by"])) for name, said in verdicts(proof).items()]
    yield from table(("fault", "verdict", "by"), rows)


def names(tests: Sequence[str]) -> str:
    """Tests, without their files' folders and their classes."""
    parts = [nodeid.split("::") for nodeid in tests]
    return ", ".join(code(f"{Path(path).stem}::{name}") for path, *_, name in parts)


TEXT = """# Which test catches which fault

Made by `{again}` from runs; do not edit.
The README's "Faults and proof" says what each point and action is.

## Every point and every action

What fired in each of these tests, here or in its ranks. Each fails where its fault does not do what it is for, or
where other faults fire in it than stand here.

{strikes}

## The proof of the bundled checks

`--sglmem-prove` over the checks that promise flat memory, 3 ranks, on the emulated device, as `.ci/run` runs it.

{checks}

## The proof of this project's own tests

Those that trace worlds and count objects themselves; most others start sessions of their own, in which nothing of the
outer one can fire. What is exempt has its reason beside it, in the test.

{own}

## The proof of the good downstream suite

The same in `fixtures/downstream/good`, as `tests/test_prove.py` runs it.

{downstream}
"""


def page() -> str:
    """The whole page."""
    return TEXT.format(
        again=AGAIN,
        strikes="\n".join(strikes_table()),
        checks="\n".join(proof_table(CHECKS)),
        own="\n".join(proof_table(OWN)),
        downstream="\n".join(proof_table(DOWNSTREAM)),
    )


def record() -> int:
    """Run the tests, and write down what fired."""
    recorder = Recorder()

    class Plugin:
        def pytest_configure(self, config: pytest.Config) -> None:
            config.pluginmanager.register(recorder, RECORDER)

    # What this file imports, pytest's rewriter comes too late for.
    options = ["-q", "-W", "ignore::pytest.PytestAssertRewriteWarning", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
    status = pytest.main([*options, *TESTS], plugins=[Plugin()])
    if status == 0:
        STRUCK.write_text(json.dumps(recorder.struck, indent=0, sort_keys=True) + "\n", encoding="utf-8")
    return int(status)


def main(arguments: Sequence[str]) -> int:
    """Record, write, or compare."""
    if "--record" in arguments and (status := record()):
        return status
    if "--write" in arguments:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    return int(PAGE.read_text(encoding="utf-8") != page())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

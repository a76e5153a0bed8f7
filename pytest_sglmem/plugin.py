"""The pytest surface: options, markers, fixtures, summary. Thin: it places what others measure and word.

Inert unless used: loading it imports neither torch nor numpy, no fixture is autouse, and a session that asks for
nothing of it gets nothing but one header line. State lives under two stash keys: `SESSION` on the config (settings,
launcher, shared worlds) and `TEST` on an item (its world, its verdicts, what fired in it). Under xdist each worker
measures; what it learned of a test rides on that test's report, and the controller alone writes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import sys
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

from . import options
from .collector import Collector
from .markers import MARKERS, WorldAsked, exemptions, faults_asked, parse_faults, place, world_asked

if TYPE_CHECKING:
    from . import torchrun
    from .document import Test
    from .faults import Fault
    from .launch import Launcher, Spec
    from .live_bytes import LiveBytes
    from .objects import GcTracked
    from .progress import Narrator
    from .prove import Proof
    from .records import Growth, Trace, Verdict
    from .world import World


class SessionState:
    """One a pytest process: settings, the launcher (started by the first world), shared worlds, finished tests."""

    def __init__(self, config: pytest.Config) -> None:
        self.settings = options.settings(config)
        self._controller = os.getppid() if hasattr(config, "workerinput") else None
        self.faults = parse_faults(self.settings.inject, self.settings.origins["inject"])
        self.proof: Proof | None = None
        self._launcher: Launcher | torchrun.Launcher | None = None
        self.exit_status = 0
        self._device: Literal["cuda", "emulated"] | None = None
        self._shared: dict[tuple[object, Spec], World] = {}

    def launcher(self) -> Launcher | torchrun.Launcher:
        """The launcher, started on first use; a new one where the last is no use: a dead server, a fork of pytest."""
        if self.settings.launcher == "torchrun":
            return self.join()
        if self._launcher is None or not self._launcher.mine():
            from .launch import Launcher

            if self._launcher is not None:
                self._launcher.close()
            self._launcher = Launcher(controller=self._controller)
        return self._launcher

    def join(self) -> torchrun.Launcher:
        """Meet the other processes that torchrun started; they serve this session until it ends."""
        from . import torchrun

        if not isinstance(self._launcher, torchrun.Launcher):
            self._launcher = torchrun.Launcher()
        return self._launcher

    def world_size(self) -> int:
        """Ranks of a world where the test does not say: all that torchrun started, unless an option says otherwise."""
        if self.settings.launcher == "torchrun" and self.settings.origins["world"] == "the default":
            from . import torchrun

            return torchrun.world_size()
        return self.settings.world

    def device(self) -> Literal["cuda", "emulated"]:
        """Where ranks allocate. `auto` is asked of the machine once, when the first world starts."""
        if self._device is None:
            from .launch import resolve_device

            self._device = resolve_device(self.settings.device)
        return self._device

    def shared(self, node: pytest.Item, scope: str, spec: Spec) -> World:
        """The world that all tests of `scope` with the same `spec` share, sound and with a fresh process group."""
        owner = node.session if scope == "session" else node.getparent(pytest.Module)
        assert owner is not None
        key = (owner.nodeid, spec)
        if key not in self._shared:
            from .world import World

            self._shared[key] = World.start(self.launcher(), spec)
            owner.addfinalizer(lambda: self._shared.pop(key).close())
        else:
            self._shared[key].renew()
        return self._shared[key]

    def close(self) -> None:
        """End whatever still runs."""
        for world in self._shared.values():
            world.close()
        self._shared.clear()
        if self._launcher is not None:
            self._launcher.close(self.exit_status)
            self._launcher = None


class TestState:
    """What is known of one test while it runs, and what its entry in the report will say."""

    __test__ = False

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.faults = tuple(faults)
        self.world: World | None = None
        self.world_entry: dict[str, object] | None = None
        self.machine: dict[str, object] = {}
        self.outputs: list[str] = []
        self.verdicts: dict[int, tuple[Trace, Verdict]] = {}
        self.growths: list[Growth] = []
        self.judges: LiveBytes | None = None
        self.fired: dict[str, list[int]] = {}
        self.fired_here: dict[str, int] = {}
        self.outcome = "passed"
        self.seconds = 0.0
        self.progress: Narrator | None = None

    def entry(self, nodeid: str) -> Test:
        """The test's entry in the report, as it stands. A test that used nothing of ours loads nothing for it."""
        used = self.world_entry or self.verdicts or self.growths or self.fired
        if not used:
            return {
                "nodeid": nodeid,
                "outcome": self.outcome,
                "seconds": round(self.seconds, 6),
                "world": None,
                "live_bytes": [],
                "gc": [],
                "faults": [],
            }
        from . import report

        return report.entry(
            nodeid=nodeid,
            outcome=self.outcome,
            seconds=self.seconds,
            world=self.world_entry,
            live_bytes=[verdict for _, verdict in self.verdicts.values()],
            gc=self.growths,
            faults=[
                {"fault": fault, "fired": fired} for fault, fired in self.fired.items() if not fault.endswith("=watch")
            ],
        )


SESSION: pytest.StashKey[SessionState] = pytest.StashKey()
TEST: pytest.StashKey[TestState] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options and ini names."""
    options.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Check every setting, register the markers."""
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    config.stash[SESSION] = state = SessionState(config)
    config.pluginmanager.register(Collector(config, state.settings), "sglmem-collector")
    if state.settings.prove:
        from .prove import Proof

        state.proof = Proof(config, state, TEST)
        config.pluginmanager.register(state.proof, "sglmem-proof")
    if state.settings.device == "cuda":
        from .launch import resolve_device

        try:
            resolve_device("cuda")
        except ValueError as error:
            raise pytest.UsageError(f"{state.settings.origins['device']} is 'cuda': {error}") from None
    if _by_torchrun(config, state.settings):
        from .launch import LaunchError

        try:
            state.join()
        except LaunchError as error:
            raise pytest.UsageError(str(error)) from None


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Under torchrun all processes end with the session's exit status."""
    session.config.stash[SESSION].exit_status = int(exitstatus)


def _by_torchrun(config: pytest.Config, settings: options.Settings) -> bool:
    """Whether this session is to meet other processes. Raises UsageError where it cannot."""
    if settings.launcher != "torchrun" or config.option.help or config.option.version:
        return False
    from . import torchrun

    if hasattr(config, "workerinput") or getattr(config.option, "numprocesses", None):
        raise pytest.UsageError("launcher 'torchrun' and xdist (-n) both start processes: use one of them")
    try:
        torchrun.rank()
    except ValueError as error:
        raise pytest.UsageError(f"{settings.origins['launcher']}: {error}") from None
    return True


def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave no process behind."""
    if SESSION in config.stash:
        config.stash[SESSION].close()


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """`--sglmem-faults` lists and ends; under torchrun every process but the one with RANK 0 serves until that ends."""
    if config.getoption("sglmem_faults"):
        from .faults import faults_table

        print("\n".join(faults_table()))
        return 0
    settings = options.settings(config)
    if _by_torchrun(config, settings):
        from . import torchrun

        if torchrun.rank() != 0:
            return torchrun.serve()
    return None


def pytest_report_header(config: pytest.Config) -> str:
    """One line: what chance and worlds this session uses."""
    s = config.stash[SESSION].settings
    injected = f", inject {' '.join(s.inject)}" if s.inject else ""
    return f"sglmem: world {s.world}, device {s.device}, launcher {s.launcher}, seed {s.seed}{injected}"


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what uses the fixtures, so that `-m gc_tracking` and `-m gpu_memory` select exactly that."""
    names = getattr(item, "fixturenames", ())
    for fixture, marker in (("gc_tracked", "gc_tracking"), ("live_bytes", "gpu_memory")):
        if fixture in names:
            item.add_marker(marker)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`world(sizes=[...])` runs the test once for each size."""
    if "world" not in metafunc.fixturenames:
        return
    mark = next(iter(metafunc.definition.iter_markers("world")), None)
    asked = world_asked(mark, place(metafunc.definition))
    if asked.sizes:
        metafunc.parametrize("world", asked.sizes, indirect=True, ids=[f"world{size}" for size in asked.sizes])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A marker that cannot be is an error before any test runs."""
    for item in items:
        _asked(item)
        _faults(item)
        exemptions(item.iter_markers("survives"), place(item))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A fresh record of the test."""
    session = item.config.stash[SESSION]
    proving = session.proof.faults if session.proof is not None else ()
    item.stash[TEST] = TestState([*session.faults, *_faults(item), *proving])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Run the test under the faults asked for; its world's ranks have theirs already."""
    state = item.stash[TEST]
    if not state.faults:
        return (yield)
    from .faults import armed

    with armed(state.faults, rank=-1, seed=item.config.stash[SESSION].settings.seed) as here:
        try:
            return (yield)
        finally:
            state.fired_here.update(here.fired)
            for fault, count in here.fired.items():
                state.fired.setdefault(fault, [count] if state.world is None else [])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Put on the report what was learned of the test: ranks' output where it failed, its entry, junit properties."""
    report = yield
    state = item.stash.get(TEST, None)
    if state is None:
        return report
    if state.progress is not None:
        state.progress.end()
    state.seconds += report.duration
    if report.failed or (report.skipped and state.outcome == "passed"):
        state.outcome = report.outcome
    if report.failed and state.world is not None:
        report.sections.extend(
            (f"rank {rank} output", text) for rank, text in enumerate(state.world.outputs) if text.strip()
        )
    if report.when == "teardown" or report.outcome != "passed":
        _attach(item, state, report)
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector, call: pytest.CallInfo[object]) -> None:
    """Before `--pdb` begins where ranks have failed: say which process it is in."""
    if not node.config.getoption("usepdb", False) or f"{__package__}.world" not in sys.modules:
        return
    from .world import PDB_NOTE, is_of_ranks

    terminal = node.config.pluginmanager.getplugin("terminalreporter")
    if terminal is not None and call.excinfo is not None and is_of_ranks(call.excinfo.value):
        terminal.ensure_newline()
        terminal.write_line(PDB_NOTE, yellow=True)


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """A `torch.distributed` world: fresh ranks for this test, or shared ones by `@pytest.mark.world(scope=...)`."""
    from .live_bytes import Unseen

    item = _item(request)
    session, state = request.config.stash[SESSION], item.stash[TEST]
    asked = _asked(item)
    spec = _spec(session, state, asked, getattr(request, "param", None) or asked.size, item)
    with _lent(session, state, asked, spec, item) as lent:
        state.world = lent
        state.machine = {"device": lent.device_name}
        state.world_entry = {"size": lent.size, "device": lent.device, "backend": lent.backend}
        state.progress = lent.on_progress = _narrator(item)
        unseen = Unseen()
        lent.on_trace = unseen.watch
        yield lent
        lent.on_trace = None
        lent.end_calls()
        for fault, fired in lent.fired().items():
            state.fired[fault] = list(fired)
        _audit(session, state, lent)
        arguments = getattr(item, "funcargs", None)  # None where the session was interrupted
        if state.outcome == "passed" and arguments is not None:
            unseen.warn(arguments.values())


@pytest.fixture
def live_bytes(request: pytest.FixtureRequest) -> LiveBytes:
    """Judges traces: `live_bytes.assert_flat(world.trace(setup, over=geometries))`."""
    _needs_torch()
    from .live_bytes import LiveBytes

    item = _item(request)
    state = item.stash[TEST]

    def record(trace: Trace, verdict: Verdict) -> None:
        state.verdicts[id(trace)] = (trace, verdict)

    settings = request.config.stash[SESSION].settings
    state.judges = LiveBytes(record, ignore_sites=settings.ignore_sites, artifacts=_artifacts(settings, item))
    return state.judges


@pytest.fixture
def gc_tracked(request: pytest.FixtureRequest) -> GcTracked:
    """Counts GC-tracked objects: `gc_tracked.assert_flat(lambda i: history.append(record(i)))`."""
    from .objects import GcTracked

    settings = request.config.stash[SESSION].settings
    return GcTracked(_item(request).stash[TEST].growths.append, ignore_types=settings.ignore_types)


@pytest.fixture
def inject(request: pytest.FixtureRequest) -> Injector:
    """A fault in a stretch of a test: `with inject("ipc.collect=skip") as fault: ...; fault.fired`."""
    item = _item(request)
    return Injector(item.stash[TEST], request.config.stash[SESSION].settings.seed, f"inject(...) in {item.nodeid}")


class Injector:
    """What `inject` gives a test: call it with a fault, enter what it returns."""

    def __init__(self, state: TestState, seed: int, origin: str) -> None:
        self._state, self._seed, self._origin = state, seed, origin

    @contextlib.contextmanager
    def __call__(self, fault: str) -> Iterator[Injected]:
        """Arm `fault` here and in every rank of the test's world, and take it back. Raises FaultError."""
        from .faults import armed, check_ranks, parse

        parsed, world = parse(fault, origin=self._origin), self._state.world
        if world is not None:
            check_ranks((parsed,), world.size)
        with armed((parsed,), rank=-1, seed=self._seed) as here:
            if world is not None:
                world.arm((parsed,))
            injected = Injected(lambda: _counts(fault, here.fired, world.fired() if world is not None else None))
            try:
                yield injected
            finally:
                injected.settle()
                if world is not None and not world.broken:
                    world.disarm()
        self._state.fired[fault] = injected.fired


class Injected:
    """A fault that is armed: `.fired` counts how often it struck, one entry a rank (without a world: one entry)."""

    def __init__(self, count: Callable[[], list[int]]) -> None:
        self._count: Callable[[], list[int]] | None = count
        self._last: list[int] = []

    @property
    def fired(self) -> list[int]:
        """Firings so far."""
        return self._last if self._count is None else self._count()

    def settle(self) -> None:
        """The stretch is over: keep the last count."""
        self._last, self._count = self.fired, None


def _counts(fault: str, here: dict[str, int], ranks: dict[str, tuple[int, ...]] | None) -> list[int]:
    if ranks is None:
        return [here.get(fault, 0)]
    return list(ranks.get(fault, ()))


def _item(request: pytest.FixtureRequest) -> pytest.Item:
    node = request.node
    assert isinstance(node, pytest.Item)
    return node


def _asked(item: pytest.Item) -> WorldAsked:
    return world_asked(item.get_closest_marker("world"), place(item))


def _faults(item: pytest.Item) -> tuple[Fault, ...]:
    return faults_asked(list(item.iter_markers("inject")), place(item))


def _needs_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch: pip install 'pytest-sglmem[torch]'")


def _artifacts(settings: options.Settings, node: pytest.Item | pytest.Session) -> Path:
    name = re.sub(r"[^\w.-]+", "-", node.nodeid) if isinstance(node, pytest.Item) else "shared-worlds"
    return Path(settings.artifacts, name)


def _spec(session: SessionState, state: TestState, asked: WorldAsked, size: int | None, item: pytest.Item) -> Spec:
    _needs_torch()
    from .faults import check_ranks
    from .launch import Spec

    settings, config = session.settings, item.config
    size = size or session.world_size()
    if size < asked.min_size:
        pytest.skip(f"needs a world of at least {asked.min_size}: {size} ranks by {settings.origins['world']}")
    check_ranks(state.faults, size)
    return Spec(
        size=size,
        device=session.device(),
        backend=asked.backend,
        init=asked.init,
        timeout=settings.timeout,
        seed=settings.seed,
        faults=state.faults if asked.scope == "function" else (),
        artifacts=str(_artifacts(settings, item if asked.scope == "function" else item.session)),
        ipc_audit=settings.ipc_audit != "off",
        nodeid=item.nodeid if asked.scope == "function" else "",
        rootdir=str(config.rootpath),
        showlocals=config.getoption("showlocals"),
        live_output=config.getoption("capture") == "no",
        whole_gpus=asked.backend == "nccl",
    )


def _narrator(item: pytest.Item) -> Narrator | None:
    from .progress import Narrator, screen

    shown = screen(item.config, item.nodeid)
    return None if shown is None else Narrator(item.name, shown)


@contextlib.contextmanager
def _lent(session: SessionState, state: TestState, asked: WorldAsked, spec: Spec, item: pytest.Item) -> Iterator[World]:
    """A world for one test, and what becomes of it afterwards. A world that this machine cannot have skips the test."""
    from .launch import Unavailable
    from .world import World

    try:
        if asked.scope == "function":
            lent = World.start(session.launcher(), spec)
        else:
            lent = session.shared(item, asked.scope, spec)
    except Unavailable as reason:
        pytest.skip(str(reason))
    shared = asked.scope != "function"
    if shared and state.faults:
        lent.arm(state.faults)
    try:
        yield lent
    finally:
        if not shared:
            lent.close()
        elif state.faults and not lent.broken:
            lent.disarm()


def _audit(session: SessionState, state: TestState, world: World) -> None:
    """Say what the ranks' IPC ledgers found, where no verdict of this test has said it already."""
    mode = session.settings.ipc_audit
    if mode == "off" or world.broken:
        return
    said = {(fault.kind, fault.site) for _, verdict in state.verdicts.values() for fault in verdict.ipc.faults}
    fresh = [fault for fault in world.audit().faults if (fault.kind, fault.site) not in said]
    if not fresh:
        return
    from .judge import IpcContractWarning
    from .words import fault_line

    text = "\n".join(fault_line(fault) for fault in fresh)
    if mode == "error":
        pytest.fail(f"CUDA IPC contract broken (--sglmem-ipc-audit error)\n{text}", pytrace=False)
    warnings.warn(IpcContractWarning(text), stacklevel=2)


def _attach(item: pytest.Item, state: TestState, report: pytest.TestReport) -> None:
    entry = state.entry(item.nodeid)
    # A plain attribute of plain data crosses xdist's wire with the report.
    report.sglmem = {"entry": entry, "machine": state.machine}  # type: ignore[attr-defined]
    if report.when == "teardown" and (state.verdicts or state.growths):
        from .report import junit_properties

        report.user_properties.extend(junit_properties(entry))

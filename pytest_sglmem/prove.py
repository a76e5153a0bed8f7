"""`--sglmem-prove`: after the session, each test that passed again under every fault that can fire in it.

What the plugin does for it, and no more: it registers one `Proof` where the option is given, and adds `Proof.faults` to
the faults of every test: in the clean run those that do nothing but count, then the one being tried. Everything else
hangs on pytest's hooks: reports tell which tests passed, the end of the run loop starts the proof, each run goes
through the item's own protocol (so all fixtures and ranks are made anew) and is never logged. Only tests that use
`world`, `live_bytes` or `gc_tracked` are run again, and none that injects faults itself.

Under xdist each worker proves the tests it ran; the controller merges. Finished runs are kept in the artifacts folder
until the proof is complete, so that one that was interrupted or limited goes on where it stopped, as long as no loaded
source file of the project has changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest

from . import proof
from .faults import Fault, watch
from .markers import exemptions, place
from .options import Settings
from .proof import AGAIN, CANNOT, CLEAN, HEALED, Clean, Failure, Run
from .scratch import Scratch

if TYPE_CHECKING:
    from .collector import Collector
    from .live_bytes import LiveBytes
    from .records import Trace, Verdict
    from .world import World

_FIXTURES = frozenset({"world", "live_bytes", "gc_tracked"})
_LEAST_LIMIT = 10.0  # seconds of a call into ranks under a fault, at least
_PROGRESS_EVERY = 0.5  # seconds between two looks at what workers said
_TIMES_CLEAN = 10  # and at least that many times what the whole clean test took


class Observed(Protocol):
    """What the plugin knows of a test when it is over: `plugin.TestState`."""

    fired: dict[str, list[int]]
    fired_here: dict[str, int]
    world: World | None
    world_entry: dict[str, object] | None
    verdicts: dict[int, tuple[Trace, Verdict]]
    judges: LiveBytes | None


class Session(Protocol):
    """What the proof asks of the plugin's session: `plugin.SessionState`."""

    settings: Settings


class Proof:
    """A plugin object: collects the clean run, proves, merges, reports. `observed`: where an item's state is."""

    def __init__(self, config: pytest.Config, session: Session, observed: pytest.StashKey) -> None:
        self._config, self._session, self._observed = config, session, observed
        self._worker = str(getattr(config, "workerinput", {}).get("workerid", ""))
        self._cleans: dict[str, tuple[pytest.Item, Clean]] = {}
        self._failed: set[str] = set()
        self._seconds: dict[str, float] = {}
        self._running = False
        self._failure = Failure()
        self._relay = Relay(_folder(session.settings))
        self._allowed: int | None = None
        self._left_out = 0
        self._artifacts = ""
        self._merged = False
        self._begun = 0.0
        self._awaited: set[str] = set()
        self.proved = False
        self.runs: list[Run] = []
        self._watching = watch()
        self.faults: tuple[Fault, ...] = self._watching

    # The clean run

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """See what each phase came to: of the clean run whether it passed, of a proof run how it failed."""
        report = yield
        if self._running:
            if call.excinfo is not None and not self._failure.kinds:
                self._failure = proof.failure_of(call.excinfo.value)
            return report
        self._seconds[item.nodeid] = self._seconds.get(item.nodeid, 0.0) + call.duration
        if call.excinfo is not None or hasattr(report, "wasxfail"):  # one that may fail notices nothing by failing
            self._failed.add(item.nodeid)
        if call.when == "teardown" and item.nodeid not in self._failed and _can_be_proven(item):
            self._cleans[item.nodeid] = (item, self._clean(item))
        return report

    def _clean(self, item: pytest.Item) -> Clean:
        state: Observed = item.stash[self._observed]
        world = state.world_entry or {}
        names = set(getattr(item, "fixturenames", ()))
        compares_only = state.judges is not None and state.judges.compared and not state.verdicts
        if not world or compares_only:  # it traces here, where no fault reaches the steps, or looks at no memory
            names.discard("live_bytes")
        size = world.get("size", 0)
        assert isinstance(size, int)
        return Clean(
            nodeid=item.nodeid,
            reached=reached(state, [fault.text for fault in self._watching]),
            forced=tuple(text for fixture, text in proof.FORCED.items() if fixture in names),
            size=size,
            device=str(world.get("device", "")),
            seconds=self._seconds[item.nodeid],
            exempt=exemptions(item.iter_markers("survives"), place(item)),
        )

    # The proof

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        """When all tests have run: prove those that passed. A session that stopped early proves nothing."""
        result = yield
        distributes, option = self._config.pluginmanager.has_plugin("dsession"), self._config.option
        only_looks = any(getattr(option, name, False) for name in ("collectonly", "setuponly", "setupplan"))
        if not (distributes or only_looks or session.shouldstop or session.shouldfail):
            with _no_debugger(self._config):
                self._prove()
        return result

    def _prove(self) -> None:
        plans = [(item, clean, proof.plan(clean)) for item, clean in self._cleans.values()]
        total = sum(len(faults) for _, _, faults in plans)
        journal = Journal.open(self._config, self._session.settings, self._worker, total)
        self._allowed = _share(self._session.settings.prove_limit, self._config)
        self.proved = True
        if not self._worker:
            _print(self._config, "")  # the line of dots ends here
        known = sum((clean.nodeid, fault.text) in journal.done for _, clean, faults in plans for fault in faults)
        self._say(_announcement(plans, total, self._allowed, known))
        try:
            with contextlib.closing(journal), Scratch("proof-") as self._artifacts:
                for item, clean, faults in plans:
                    begun = len(self.runs)
                    self._prove_one(item, clean, faults, journal)
                    letters = "".join(proof.LETTERS[run.result] for run in self.runs[begun:])
                    if faults:
                        self._say(f"proof [{self._done()}/{total}] {clean.nodeid} {letters}")
        finally:
            self._left_out = total - self._done()  # by the limit, or by whoever interrupts
        if not self._left_out and not self._worker:
            Journal.remove(_folder(self._session.settings))

    def _done(self) -> int:
        return sum(run.fault not in CLEAN for run in self.runs)

    def _prove_one(self, item: pytest.Item, clean: Clean, faults: Sequence[Fault], journal: Journal) -> None:
        """All runs of one test: known ones are taken over, the limit leaves the rest, the last one is clean."""
        failed, struck = journal.done.get((clean.nodeid, AGAIN)), False
        if failed is not None:
            self.runs.append(failed)
        for fault in faults:
            known = journal.done.get((clean.nodeid, fault.text))
            reason = proof.exemption(clean, fault)
            if known is not None:
                self.runs.append(known)
            elif reason is not None:
                self.runs.append(Run(clean.nodeid, fault.text, "exempt", 0, reason))
            elif failed is None and self._allowed == 0:
                continue
            else:
                if failed is None and not struck:
                    failed, struck = self._clean_again(item, clean, journal), True
                self._keep(self._struck(item, clean, fault) if failed is None else _not_struck(clean, fault), journal)
                if failed is None and self._allowed is not None:
                    self._allowed -= 1
        healed = journal.done.get((clean.nodeid, HEALED))
        if failed is not None:
            return
        if struck:
            self._keep(self._healed(item, clean), journal)
        elif healed is not None:
            self.runs.append(healed)

    def _clean_again(self, item: pytest.Item, clean: Clean, journal: Journal) -> Run | None:
        """The test once more before its faults: the run where it fails, for then no failure under a fault counts."""
        failure, _, _ = self._again(item, clean, None)
        if not failure.kinds:
            return None
        run = Run(clean.nodeid, AGAIN, CANNOT, 0, failure.text.partition("\n")[0])
        self._keep(run, journal)
        return run

    def _keep(self, run: Run, journal: Journal) -> None:
        self.runs.append(run)
        journal.write(run)

    def _struck(self, item: pytest.Item, clean: Clean, fault: Fault) -> Run:
        failure, fired, told = self._again(item, clean, fault)
        if failure.kinds:
            failure = dataclasses.replace(failure, text=f"{failure.text}\n{told}")
        result, why = proof.judge_run(fault, fired, failure, forced=fault.text in clean.forced)
        return Run(clean.nodeid, fault.text, result, fired, why)

    def _healed(self, item: pytest.Item, clean: Clean) -> Run:
        failure, _, _ = self._again(item, clean, None)
        why = failure.text.partition("\n")[0]
        return Run(clean.nodeid, HEALED, "not healed" if failure.kinds else "healed", 0, why)

    def _again(self, item: pytest.Item, clean: Clean, fault: Fault | None) -> tuple[Failure, int, str]:
        """The test once more, under `fault`: its failure, how often the fault fired, what ranks printed."""
        settings = self._session.settings
        limit = min(settings.timeout, max(_LEAST_LIMIT, _TIMES_CLEAN * clean.seconds))
        self._running, self._failure = True, Failure()
        self.faults = () if fault is None else (fault, *proof.beside(fault.text))
        # What a failing run would leave behind is of no use to anyone: it failed because it was to fail.
        self._session.settings = settings._replace(timeout=limit, artifacts=self._artifacts)
        try:
            item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
            state: Observed = item.stash[self._observed]
            text = fault.text if fault is not None else ""
            fired = sum(state.fired.get(text, ())) + (state.fired_here.get(text, 0) if state.world is not None else 0)
            return self._failure, fired, "\n".join(state.world.outputs if state.world is not None else ())
        finally:
            self._running, self.faults = False, self._watching
            self._session.settings = settings

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """A proof run: the item's protocol as ever, but no report of it is logged and no warning of it is shown."""
        if not self._running:
            return None
        runner: Any = self._config.pluginmanager.get_plugin("runner")
        with warnings.catch_warnings(record=True):
            runner.runtestprotocol(item, log=False, nextitem=None)
        return True

    def _say(self, line: str) -> None:
        if self._worker:
            self._relay.say(self._worker, line)
        else:
            _print(self._config, line)

    # The end

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_setupnodes(self) -> None:
        """The controller begins to print what its workers will say."""
        self._begun = time.time()
        self._relay.start(lambda line: _print(self._config, line))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodeready(self, node: Any) -> None:
        """A worker of xdist that will say what it proved, unless it is interrupted."""
        self._awaited.add(node.workerinput["workerid"])

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """A worker of xdist is done: take over what it proved."""
        sent = getattr(node, "workeroutput", {}).get("sglmem_proof")
        if sent is not None:
            self.runs += [Run(**run) for run in sent["runs"]]
            self._left_out += sent["left_out"]
            self.proved = self._merged = True
            self._awaited.discard(node.workerinput["workerid"])

    def _take_over(self, worker: str) -> None:
        """Of a worker that was interrupted: what it wrote down in this session, and how much is left of its plan."""
        done, total = Journal.of(_folder(self._session.settings), worker, since=self._begun)
        said = {(run.nodeid, run.fault) for run in self.runs}
        fresh = [run for run in done if (run.nodeid, run.fault) not in said]
        self.runs += fresh
        self._left_out = max(0, self._left_out + total - sum(run.fault not in CLEAN for run in fresh))
        self.proved = self.proved or total > 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Hand the result on: a worker to its controller, else to the report; holes make the session fail."""
        self._relay.stop()
        for worker in sorted(self._awaited):
            self._take_over(worker)
        if self._worker:
            runs = [proof.to_plain(run) for run in self.runs]
            self._config.workeroutput["sglmem_proof"] = {  # type: ignore[attr-defined]
                "runs": runs,
                "left_out": self._left_out,
            }
            return
        if self._merged and not self._left_out and session.exitstatus != pytest.ExitCode.INTERRUPTED:
            Journal.remove(_folder(self._session.settings))
        collector: Collector | None = self._config.pluginmanager.get_plugin("sglmem-collector")
        if collector is not None and self.proved:
            collector.proof = proof.fold(self.runs, left_out=self._left_out)
        if proof.unproven(self.runs) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """The table, and every hole with the command that repeats it."""
        if self._worker or not self.proved:
            return
        terminalreporter.section("sglmem proof")
        for line in proof.table(self.runs, left_out=self._left_out, options=_options(self._session.settings)):
            terminalreporter.write_line(line)


def reached(state: Observed, watched: Sequence[str]) -> dict[str, int]:
    """Point -> reaches in the busiest process; takes the watching faults out of the test's record."""
    found: dict[str, int] = {}
    for text in watched:
        counts = [*state.fired.pop(text, ()), state.fired_here.pop(text, 0)]
        if max(counts, default=0):
            found[text.partition("=")[0]] = max(counts)
    return found


@contextlib.contextmanager
def _no_debugger(config: pytest.Config) -> Iterator[None]:
    """`--pdb` waits for whoever wants to see a failure; those of the proof are wanted."""
    manager = config.pluginmanager
    resting = {name: plugin for name in ("pdbinvoke", "pdbtrace") if (plugin := manager.get_plugin(name)) is not None}
    for name in resting:
        manager.unregister(name=name)
    asked, config.option.usepdb = getattr(config.option, "usepdb", False), False
    try:
        yield
    finally:
        config.option.usepdb = asked
        for name, plugin in resting.items():
            manager.register(plugin, name)


def _not_struck(clean: Clean, fault: Fault) -> Run:
    return Run(clean.nodeid, fault.text, "error", 0, "the test cannot be run again")


def _can_be_proven(item: pytest.Item) -> bool:
    names = set(getattr(item, "fixturenames", ()))
    return bool(names & _FIXTURES) and "inject" not in names and item.get_closest_marker("inject") is None


def _share(limit: int | None, config: pytest.Config) -> int | None:
    workers = int(getattr(config, "workerinput", {}).get("workercount", 1))
    return None if limit is None else max(1, limit // workers)


def _announcement(
    plans: Sequence[tuple[pytest.Item, Clean, list[Fault]]], total: int, limit: int | None, known: int
) -> str:
    faults = {fault.text for _, _, its in plans for fault in its}
    limited = f", at most {limit} now" if limit is not None else ""
    resumed = f", {known} known from the last time" if known else ""
    return f"proof: {total} runs, {len(plans)} tests under {len(faults)} faults{limited}{resumed}"


def _options(settings: Settings) -> list[str]:
    """What somebody else must say so that a run repeats: each option that is not at its default."""
    chosen = {"device": settings.device, "world": settings.world, "seed": settings.seed}
    return [f"--sglmem-{name}={value}" for name, value in chosen.items() if settings.origins[name] != "the default"]


def _folder(settings: Settings) -> Path:
    return Path(settings.artifacts, "proof")


def _print(config: pytest.Config, line: str) -> None:
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None:
        terminal.ensure_newline()
        writer = config.get_terminal_writer()
        if writer.width_of_current_line:  # xdist's dots, which pytest's reporter does not know of
            writer.line()
        terminal.write_line(line)


class Relay:
    """Lines of progress from xdist's workers to their controller, by files: a worker's own streams lead nowhere.

    Where the folder cannot be written to, there is no progress to see; the results take another way.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def say(self, worker: str, line: str) -> None:
        """In a worker: one line."""
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            with open(self._folder / f"{worker}.said", "a", encoding="utf-8") as file:
                file.write(f"[{worker}] {line}\n")

    def start(self, show: Callable[[str], None]) -> None:
        """In the controller: show each line once it is there, until `stop`."""
        self._remove()
        self._thread = threading.Thread(target=self._follow, args=(show,), name="sglmem-proof-progress", daemon=True)
        self._thread.start()

    def _follow(self, show: Callable[[str], None]) -> None:
        shown: dict[Path, int] = {}
        while True:
            over = self._over.wait(_PROGRESS_EVERY)
            for path in sorted(self._folder.glob("*.said")):
                whole = path.read_text(encoding="utf-8").rpartition("\n")[0]
                lines = whole.splitlines()[shown.get(path, 0) :]
                shown[path] = shown.get(path, 0) + len(lines)
                for line in lines:
                    show(line)
            if over:
                return

    def stop(self) -> None:
        """In the controller: show the rest, leave no file."""
        if self._thread is not None:
            self._over.set()
            self._thread.join()
            self._thread = None
            self._remove()

    def _remove(self) -> None:
        for path in self._folder.glob("*.said"):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._folder.rmdir()


class Journal:
    """The runs that are done, in a file of this process's own; those of others are read and left alone.

    A folder that cannot be written to is no error: then nothing is kept, and a later proof starts from the beginning.
    """

    def __init__(self, folder: Path, worker: str, fingerprint: str, total: int) -> None:
        self._folder, self._path = folder, folder / f"{worker or 'main'}.jsonl"
        self._fingerprint = fingerprint
        self.done: dict[tuple[str, str], Run] = {}
        for path in sorted(folder.glob("*.jsonl")):
            self._read(path)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("w", encoding="utf-8")
            self._write({"fingerprint": fingerprint, "total": total})
            for run in self.done.values():
                self.write(run)
        except OSError:
            self._file = open(os.devnull, "w")  # noqa: SIM115

    @classmethod
    def open(cls, config: pytest.Config, settings: Settings, worker: str, total: int) -> Journal:
        """The journal of this process, under the session's artifacts folder. `total`: the runs that are planned."""
        return cls(_folder(settings), worker, _fingerprint(config.rootpath, settings), total)

    @staticmethod
    def of(folder: Path, worker: str, *, since: float) -> tuple[list[Run], int]:
        """What a worker wrote since then: its runs, those it knew among them, and how many it had planned."""
        path = folder / f"{worker}.jsonl"
        runs: list[Run] = []
        total = 0
        with contextlib.suppress(OSError, ValueError, TypeError):
            if path.stat().st_mtime >= since:
                head, *lines = path.read_text(encoding="utf-8").splitlines()
                total = json.loads(head)["total"]
                runs.extend(Run(**json.loads(line)) for line in lines)
        return runs, total

    def _read(self, path: Path) -> None:
        # A last line that was cut off by a kill is no run; another fingerprint is another program.
        with contextlib.suppress(OSError, ValueError, TypeError):
            lines = path.read_text(encoding="utf-8").splitlines()
            if json.loads(lines[0]).get("fingerprint") == self._fingerprint:
                for line in lines[1:]:
                    run = Run(**json.loads(line))
                    self.done[run.nodeid, run.fault] = run

    def write(self, run: Run) -> None:
        """Keep a run, at once."""
        self._write(proof.to_plain(run))

    def _write(self, record: Mapping[str, object]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        """No more runs."""
        self._file.close()

    @staticmethod
    def remove(folder: Path) -> None:
        """The proof is complete: nothing to go on from, nothing of those that were killed before it."""
        for path in (*folder.glob("*.jsonl"), *folder.glob("*.said")):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            folder.rmdir()


def _fingerprint(root: Path, settings: Settings) -> str:
    """Changes with every source file of the project that is loaded, and with what a run depends on."""
    known = hashlib.blake2b(digest_size=16)
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    here = [file for file in files if file and Path(file).is_relative_to(root) and "site-packages" not in file]
    for file in sorted(here):
        with contextlib.suppress(OSError):
            stat = os.stat(file)
            known.update(f"{file} {stat.st_mtime_ns} {stat.st_size}\n".encode())
    known.update(repr((settings.world, settings.device, settings.launcher, settings.timeout, settings.seed)).encode())
    return known.hexdigest()

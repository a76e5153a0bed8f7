"""The end of a session, in the one process that writes: take what rides on the tests' reports, print it, write it.

Under xdist this is the controller; a worker's `Collector` takes the same reports and writes nothing. Where no test used
anything of ours and no file is asked for, `report.py` is not even loaded.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .document import Document, Test
    from .options import Settings


class Collector:
    """A plugin object of its own: the entries of all tests, the machine they ran on, the proof; and where they go."""

    def __init__(self, config: pytest.Config, settings: Settings) -> None:
        self._settings = settings
        self._writes = not hasattr(config, "workerinput")
        self._typed_in = config.invocation_params.dir
        self._entries: dict[tuple[str, str], Test] = {}  # by test and worker: with --dist each all workers run a test
        self._machine: dict[str, str] = {}
        self._grown: list[str] = []
        self._unwritten: list[str] = []
        self._left_out: list[str] = []
        self.proof: dict[str, object] | None = None
        self._baseline = self._load_baseline() if self._writes else None
        if self._writes and settings.report:
            self._check_paths()

    def _check_paths(self) -> None:
        from . import report

        for path in self._settings.report:
            try:
                report.check_path(path)
            except ValueError as error:
                raise pytest.UsageError(f"{self._settings.origins['report']}: {error}") from None

    def _typed(self, path: str) -> str:
        """A path as short as the user would have typed it."""
        return str(Path(path).relative_to(self._typed_in)) if Path(path).is_relative_to(self._typed_in) else path

    def _load_baseline(self) -> Document | None:
        path = self._settings.baseline
        if path is None:
            return None
        from . import report

        try:
            return report.load(path)
        except (OSError, ValueError) as error:
            raise pytest.UsageError(
                f"{self._settings.origins['baseline']} is {self._typed(path)!r}, not a report: {error}"
            ) from None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep each worker's last word on each test."""
        carried = getattr(report, "sglmem", None)
        if carried is not None:
            self._entries[report.nodeid, getattr(report, "worker_id", "")] = carried["entry"]
            self._machine.update(carried["machine"])

    def document(self) -> Document:
        """The session so far."""
        from . import report

        return report.session(
            self._entries.values(),
            versions=_versions(),
            machine={"device": None, **self._machine, "platform": platform.platform(), "cpus": os.cpu_count()},
            seed=self._settings.seed,
            proof=self.proof,
        )

    def _something_to_say(self) -> bool:
        return self.proof is not None or any(entry["live_bytes"] or entry["gc"] for entry in self._entries.values())

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Compare with the baseline, write the reports."""
        self._keep_artifacts_out_of_git()
        asked = self._settings.report or self._baseline is not None
        if not self._writes or not (asked or self._something_to_say()):
            return
        from . import report

        document = self.document()
        if self._baseline is not None:
            self._grown = report.compare(document, self._baseline, self._settings.baseline_tolerance)
            self._left_out = report.not_compared(document, self._baseline)
            if self._grown and session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
        for path in self._settings.report:
            try:
                report.write(document, path)
            except OSError as error:
                self._unwritten.append(f"the report {self._typed(path)} could not be written: {error}")
                if session.exitstatus == pytest.ExitCode.OK:
                    session.exitstatus = pytest.ExitCode.TESTS_FAILED
        summary = os.environ.get("GITHUB_STEP_SUMMARY")
        if summary and self._settings.github_summary:
            with Path(summary).open("a", encoding="utf-8") as file:
                file.write(report.github_summary(document))

    def _keep_artifacts_out_of_git(self) -> None:
        """As pytest's cache does; a folder that the user named is the user's."""
        folder = Path(self._settings.artifacts)
        if self._settings.origins["artifacts"] == "the default" and folder.is_dir() and any(folder.iterdir()):
            with contextlib.suppress(OSError):
                (folder / ".gitignore").write_text("# made by pytest-sglmem\n*\n", encoding="utf-8")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        """One section, only where there is something to say."""
        if not self._writes:
            return
        self._summary(terminalreporter, config)
        for fault in self._not_triggered():
            terminalreporter.write_line(
                f"sglmem: fault {fault} (--sglmem-inject): not triggered in any test", yellow=True
            )
        for line in self._unwritten:
            terminalreporter.write_line(f"sglmem: {line}", red=True)
        for line in self._grown:
            terminalreporter.write_line(f"baseline: {line}", red=True)
        for line in self._left_out:
            terminalreporter.write_line(f"baseline: {line}")

    def _not_triggered(self) -> list[str]:
        """The session's faults that struck nowhere: a green session says nothing about them."""
        fired = {entry["fault"] for test in self._entries.values() for entry in test["faults"] if any(entry["fired"])}
        return [fault for fault in self._settings.inject if fault not in fired]

    def _summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        if not self._something_to_say():
            return
        from . import report

        width = config.get_terminal_writer().fullwidth
        lines = report.terminal_lines(self.document(), width, config.get_verbosity())
        if lines:
            terminalreporter.write_sep("=", "sglmem")
            for line in lines:
                terminalreporter.write_line(line)


def _versions() -> dict[str, str | None]:
    from importlib.metadata import PackageNotFoundError, version

    # torch's version by its metadata: a session that never imported torch must not import it to say so.
    known = {"python": platform.python_version(), "implementation": sys.implementation.name}
    for package in ("pytest-sglmem", "torch", "pytest"):
        try:
            known[package.replace("-", "_")] = version(package)
        except PackageNotFoundError:
            pass
    return dict(known)

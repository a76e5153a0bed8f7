"""What holds for every test: whatever report it leaves behind is one by the published schema, and a session within the
session is one of its own, which knows nothing of this one's workers and options.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import signal
import warnings

import pytest

import pytest_sglmem
from pytest_sglmem import plugin, report
from pytest_sglmem.launch import Launcher


@pytest.fixture(autouse=True)
def every_report_left_behind_is_valid(request):
    """Validate each `.json` report in the test's own folders against `report.schema.json`, once the test is over."""
    folders = []
    if "tmp_path" in request.fixturenames:
        folders.append(request.getfixturevalue("tmp_path"))
    if "pytester" in request.fixturenames:
        folders.append(request.getfixturevalue("pytester").path)
    yield
    paths = [path for folder in folders for path in folder.rglob("*.json")]
    for path in paths:
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            continue
        if isinstance(document, dict) and document.get("schema") == report.SCHEMA:
            jsonschema = pytest.importorskip("jsonschema")
            jsonschema.Draft202012Validator(report.json_schema()).validate(document)


@pytest.fixture(scope="session", autouse=True)
def sessions_within_are_their_own():
    """No session that a test starts takes itself for a worker of this one, or takes over this one's options."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("WORKER", "WORKER_COUNT", "TESTRUNUID"):
            patch.delenv(f"PYTEST_XDIST_{name}", raising=False)
        patch.delenv("PYTEST_ADDOPTS", raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def torchs_compiler_leaves_nothing(tmp_path_factory):
    """Its import makes a folder among the temporary files and leaves it there, in whatever process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


@pytest.fixture(scope="session", autouse=True)
def sessions_within_heed_ctrl_c():
    """A suite that a script has started in the background ignores SIGINT, and so would every session that it starts."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class ServerOf:
    """A plugin for a session within this process: its worlds come from the fork server of the session around it."""

    def __init__(self, launcher):
        self._launcher = launcher

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config):
        config.stash[plugin.SESSION]._launcher = self._launcher

    @pytest.hookimpl(tryfirst=True)
    def pytest_unconfigure(self, config):
        if plugin.SESSION in config.stash:
            config.stash[plugin.SESSION]._launcher = None


@pytest.fixture(scope="session")
def server(request):
    """This session's own fork server, started where this session was; and all that a session may import, imported:
    pytester has the interpreter forget what came after it, and torch cannot be imported twice.
    """
    pytest.importorskip("torch")
    for module in pkgutil.walk_packages(pytest_sglmem.__path__, "pytest_sglmem."):
        if not module.name.startswith(("pytest_sglmem.checks", "pytest_sglmem.__main__")):
            importlib.import_module(module.name)
    for module in ("attr", "cattrs", "cloudpickle", "numpy", "objgraph", "torch.distributed"):
        pytest.importorskip(module)
    return request.config.stash[plugin.SESSION].launcher()


@pytest.fixture(scope="module")
def launcher():
    """A fork server of the module's own."""
    launcher = Launcher()
    yield launcher
    launcher.close()


@pytest.fixture
def within(server, pytester):
    """Run a session in this process, with this one's fork server: for all that is not about how processes end. It costs
    a tenth of one in a process of its own; not with gc_tracked, which collects this whole process's heap.
    """

    def run(*args):
        with warnings.catch_warnings():
            warnings.resetwarnings()  # an error here is a warning there
            return pytester.runpytest_inprocess("-p", "no:cacheprovider", *args, plugins=[ServerOf(server)])

    return run

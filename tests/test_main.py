"""`python -m pytest_sglmem`: judge, show, compare, on files alone."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import sessions
from sessions import MIB

from pytest_sglmem import records, report
from pytest_sglmem.__main__ import main


def _trace(settled):
    """A trace of one rank that settles at these bytes; what each cycle adds is a block of its own."""
    added = [settled[0], *(after - before for before, after in itertools.pairwise(settled))]
    ends = []
    for cycle, live in enumerate(settled):
        here = records.Reading(live=live, blocks=cycle + 1)
        census = tuple(
            records.LiveBlocks(("app.py:7 in keep",), born if born else -1, size, 1)
            for born, size in enumerate(added[: cycle + 1])
            if size
        )
        ends.append(records.CycleEnd(here, here, here, census))
    rank = records.RankTrace(rank=0, series=tuple(settled), ends=tuple(ends))
    return records.Trace(ranks=(rank,), geometries=("1x2",), warmup=1, device="emulated")


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _trace([8 * MIB] * 5).save("flat.json")
    _trace([8 * MIB, 9 * MIB, 10 * MIB, 11 * MIB, 12 * MIB]).save("leak.json")
    report.write(sessions.rich(), "old.json")
    report.write(sessions.rich(rate=65 * MIB), "new.json")
    return tmp_path


class TestJudge:
    def test_flat_is_status_0(self, files, capsys):
        assert main(["judge", "flat.json"]) == 0
        assert "flat" in capsys.readouterr().out.lower()

    def test_leak_is_status_1_and_says_where(self, files, capsys):
        assert main(["judge", "leak.json"]) == 1
        said = capsys.readouterr().out
        assert "leak" in said.lower()
        assert "1 MiB" in said
        assert "app.py:7 in keep" in said

    @pytest.mark.parametrize(("tolerance", "status"), [(MIB, 0), (MIB - 1, 1)])
    def test_tolerance_on_the_exact_boundary(self, files, tolerance, status):
        assert main(["judge", "leak.json", "--tolerance", str(tolerance)]) == status

    def test_ignored_site(self, files):
        assert main(["judge", "leak.json", "--ignore-site", "app.py:7*"]) == 0

    @pytest.mark.parametrize("name", ["old.json", "missing.json"])
    def test_no_trace_is_status_2(self, files, capsys, name):
        assert main(["judge", name]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("error: ")
        assert name in err
        assert err.count("\n") == 1

    def test_what_is_no_object_is_said(self, files, capsys):
        (files / "list.json").write_text("[1]")
        assert main(["judge", "list.json"]) == 2
        assert capsys.readouterr().err.endswith(
            "list.json is not a trace that pytest-sglmem saved: a JSON object is expected\n"
        )


class TestShow:
    def test_full(self, files, capsys):
        assert main(["show", "old.json"]) == 0
        assert capsys.readouterr().out.splitlines() == report.terminal_lines(sessions.rich(), 80, 1)

    def test_brief(self, files, capsys, monkeypatch):
        monkeypatch.setenv("COLUMNS", "100")
        assert main(["show", "old.json", "--brief"]) == 0
        assert capsys.readouterr().out.splitlines() == report.terminal_lines(sessions.rich(), 100, 0)

    def test_html(self, files, capsys):
        pytest.importorskip("jinja2")
        assert main(["show", "old.json", "--html", "page.html"]) == 0
        assert "<!doctype html>" in (files / "page.html").read_text(encoding="utf-8")
        assert capsys.readouterr().out == ""

    def test_html_must_be_html(self, files, capsys):
        assert main(["show", "old.json", "--html", "page.json"]) == 2
        assert "'page.json'" in capsys.readouterr().err

    @pytest.mark.parametrize("name", ["leak.json", "missing.json"])
    def test_no_report_is_status_2(self, files, capsys, name):
        assert main(["show", name]) == 2
        assert name in capsys.readouterr().err


class TestCompare:
    def test_same(self, files, capsys):
        assert main(["compare", "old.json", "old.json"]) == 0
        assert capsys.readouterr().out == "nothing grew by more than 0%\n"

    def test_grown_is_status_1_with_a_line_each(self, files, capsys):
        assert main(["compare", "new.json", "old.json"]) == 1
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 8
        assert all("settled" in line and "wan-14b-0" in line for line in lines)

    def test_tolerance(self, files):
        assert main(["compare", "new.json", "old.json", "--tolerance", "1.5"]) == 0

    def test_what_is_not_compared_is_said(self, files, capsys):
        report.write(sessions.rich(size=2), "small.json")
        assert main(["compare", "small.json", "old.json"]) == 0
        assert "not compared, its world is 2 ranks" in capsys.readouterr().out

    def test_nothing_in_common_is_status_1(self, files, capsys):
        report.write(sessions.document(sessions.entry("t.py::other", sessions.verdict())), "other.json")
        assert main(["compare", "other.json", "old.json"]) == 1
        assert capsys.readouterr().out.splitlines() == [
            "t.py::other: not compared, it is not in the baseline",
            "nothing was compared: no test that checks something is in both reports, in the same world",
        ]

    def test_negative_tolerance_is_status_2(self, files, capsys):
        assert main(["compare", "new.json", "old.json", "--tolerance=-1"]) == 2
        assert "-1" in capsys.readouterr().err


def test_unknown_command_is_status_2(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["jugde", "x"])
    assert caught.value.code == 2
    assert "jugde" in capsys.readouterr().err


def test_needs_no_torch(files):
    code = """
import sys
sys.modules.update(torch=None, numpy=None)
from pytest_sglmem.__main__ import main
assert main(["judge", "leak.json"]) == 1
assert main(["show", "old.json"]) == 0
assert main(["compare", "new.json", "old.json"]) == 1
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_runs_as_a_module(files):
    done = subprocess.run([sys.executable, "-m", "pytest_sglmem", "judge", "flat.json"], timeout=60, check=False)
    assert done.returncode == 0

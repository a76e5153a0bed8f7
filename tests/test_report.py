"""The report as a document and as lines: its schema, folding, files, comparison, terminal, junit, GitHub."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import pickle
import sys

import jsonschema
import pytest
import sessions
from sessions import MIB

from pytest_sglmem import records, report, summary, words


def validate(document):
    schema = report.json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(document)


class TestDocument:
    def test_rich_session_is_valid(self):
        validate(sessions.rich())

    def test_empty_session_is_valid(self):
        document = report.session([], versions={"pytest_sglmem": "0", "python": "3"}, machine={"device": None})
        validate(document)
        assert document["tests"] == []
        assert document["proof"] is None

    @pytest.mark.parametrize(
        "broken",
        [
            lambda document: document.update(schema=2),
            lambda document: document.pop("seed"),
            lambda document: document.update(extra=1),
            lambda document: document["tests"][0].update(outcome="xfailed"),
            lambda document: document["tests"][0]["live_bytes"][0].update(verdict="fine"),
            lambda document: document["tests"][0]["live_bytes"][0]["sites"][0].update(mechanism="magic"),
            lambda document: document["tests"][0]["live_bytes"][0]["sites"][0].update(ranks=[-1]),
            lambda document: document["proof"]["faults"][0].update(verdict="maybe"),
        ],
    )
    def test_schema_refuses(self, broken):
        document = sessions.rich()
        broken(document)
        with pytest.raises(jsonschema.ValidationError):
            validate(document)

    @pytest.mark.parametrize(
        ("name", "record"),
        [
            ("live_bytes", records.Verdict),
            ("site", records.SiteVerdict),
            ("ipc", records.IpcSummary),
            ("ipc_fault", records.IpcFault),
            ("ipc_pair", records.IpcPair),
            ("slow_step", records.SlowStep),
            ("gc", records.Growth),
        ],
    )
    def test_schema_has_exactly_the_records_fields(self, name, record):
        published = report.json_schema()["$defs"][name]["properties"]
        assert set(published) == {field.name for field in dataclasses.fields(record)}

    def test_entry_is_plain_json(self):
        one = sessions.entry("t.py::a", sessions.verdict("leak"), sessions.growth())
        assert json.loads(json.dumps(one)) == one
        assert pickle.loads(pickle.dumps(one)) == one
        assert one["live_bytes"][0]["settled"][0] == [150 * MIB + MIB * n for n in (0, 64, 128, 192)]

    def test_entry_refuses_another_outcome(self):
        with pytest.raises(ValueError, match=r"passed, skipped, failed .*'xfailed'"):
            report.entry("t.py::a", "xfailed", 0.0)

    def test_entry_refuses_what_is_not_json(self):
        with pytest.raises(TypeError):
            report.entry("t.py::a", "passed", 0.0, faults=[{"fault": object()}])


class TestFolding:
    def test_phases_of_a_test_become_one(self):
        setup = report.entry("t.py::a", "passed", 0.5, {"size": 2, "device": "emulated", "backend": "gloo"})
        call = report.entry("t.py::a", "passed", 1.0, None, [sessions.verdict(size=2)], [sessions.growth("flat")])
        teardown = report.entry("t.py::a", "failed", 0.25, faults=[{"fault": "step=skip", "fired": [1, 0]}])
        other = report.entry("t.py::b", "passed", 1.0)
        document = sessions.document(setup, other, call, teardown)
        assert [test["nodeid"] for test in document["tests"]] == ["t.py::a", "t.py::b"]
        one = document["tests"][0]
        assert (one["outcome"], one["seconds"], one["world"]["size"]) == ("failed", 1.75, 2)
        assert (len(one["live_bytes"]), len(one["gc"]), len(one["faults"])) == (1, 1, 1)
        validate(document)

    @pytest.mark.parametrize(
        ("outcomes", "worst"),
        [("passed passed", "passed"), ("passed skipped", "skipped"), ("failed skipped", "failed")],
    )
    def test_worst_outcome_wins(self, outcomes, worst):
        entries = [report.entry("t.py::a", outcome, 0.0) for outcome in outcomes.split()]
        assert sessions.document(*entries)["tests"][0]["outcome"] == worst
        assert sessions.document(*reversed(entries))["tests"][0]["outcome"] == worst

    def test_entries_are_left_as_they_were(self):
        one = sessions.entry("t.py::a", sessions.growth())
        before = copy.deepcopy(one)
        sessions.document(one, one)
        assert one == before


class TestFiles:
    def test_json_comes_back(self, tmp_path):
        document = sessions.rich()
        report.write(document, tmp_path / "deep" / "er" / "r.json")
        assert report.load(tmp_path / "deep" / "er" / "r.json") == document
        assert os.listdir(tmp_path / "deep" / "er") == ["r.json"]

    def test_numbers_of_a_series_share_a_line(self, tmp_path):
        one = sessions.entry("t.py::a[\\n[1,\n 2]]", sessions.verdict(size=2, steps=3, cycles=1), size=2)
        report.write(sessions.document(one), tmp_path / "r.json")
        text = (tmp_path / "r.json").read_text()
        assert f"[ {', '.join(map(str, one['live_bytes'][0]['series'][0]))} ]" in text
        assert report.load(tmp_path / "r.json")["tests"][0] == one

    def test_another_ending_is_refused(self, tmp_path):
        with pytest.raises(ValueError, match=r"\.json or \.html.*r\.xml"):
            report.write(sessions.document(), tmp_path / "r.xml")
        assert os.listdir(tmp_path) == []

    def test_failed_write_keeps_the_old_file(self, tmp_path):
        report.write(sessions.document(), tmp_path / "r.json")
        broken = {**sessions.document(), "seed": object()}
        with pytest.raises(TypeError):
            report.write(broken, tmp_path / "r.json")
        assert report.load(tmp_path / "r.json") == sessions.document()
        assert os.listdir(tmp_path) == ["r.json"]

    @pytest.mark.parametrize(
        ("text", "said"),
        [("{", "not JSON"), ("[]", "schema 1"), ('{"schema": 2, "tests": []}', "its schema: 2"), ('{"a": 1}', "None")],
    )
    def test_load_refuses(self, tmp_path, text, said):
        (tmp_path / "r.json").write_text(text)
        with pytest.raises(ValueError, match=said) as caught:
            report.load(tmp_path / "r.json")
        assert "r.json" in str(caught.value)

    def test_fields_that_the_schema_leaves_optional_may_be_missing(self, tmp_path):
        document = sessions.rich()
        definitions = report.json_schema()["$defs"]
        for test in document["tests"]:
            for check in test["live_bytes"]:
                for fault in check["ipc"]["faults"]:
                    _only(fault, definitions["ipc_fault"]["required"])
                _only(check["ipc"], definitions["ipc"]["required"])
                _only(check, definitions["live_bytes"]["required"])
            for growth in test["gc"]:
                _only(growth, definitions["gc"]["required"])
        _only(document["proof"], definitions["proof"]["required"])
        validate(document)
        (tmp_path / "r.json").write_text(json.dumps(document))
        loaded = report.load(tmp_path / "r.json")
        assert len(report.terminal_lines(loaded, 80, 1)) > 20
        assert "LEAK" in report.github_summary(loaded)


def _only(fields, names):
    for name in set(fields) - set(names):
        del fields[name]


def _sized(settled, *, nodeid="t.py::a", size=None):
    made = dataclasses.replace(sessions.verdict(size=len(settled)), settled=settled)
    return sessions.document(sessions.entry(nodeid, made, size=size or len(settled)))


def _counted(objects, nodeid="t.py::a"):
    return sessions.document(sessions.entry(nodeid, dataclasses.replace(sessions.growth(), objects_per_append=objects)))


class TestCompare:
    @pytest.mark.parametrize(
        ("old", "new", "percent", "grown"),
        [
            (1000, 1000, 0, False),
            (1000, 1001, 0, True),
            (1000, 999, 0, False),
            (1000, 1100, 10, False),
            (1000, 1101, 10, True),
            (1001, 1101, 10, False),  # 1101.1 is the limit
            (1001, 1102, 10, True),
            (3 * 10**17, 3 * 10**17 + 3 * 10**14, 0.1, False),  # exact where a float is not
            (3 * 10**17, 3 * 10**17 + 3 * 10**14 + 1, 0.1, True),
            (0, 0, 50, False),
            (0, 1, 50, True),
        ],
    )
    def test_settled_size_on_the_exact_boundary(self, old, new, percent, grown):
        lines = report.compare(_sized(((7, new),)), _sized(((9, old),)), percent)
        assert bool(lines) is grown

    @pytest.mark.parametrize(
        ("old", "new", "percent", "grown"),
        [(8, 8, 0, False), (8, 8.001, 0, True), (8, 8.8, 10, False), (8, 8.81, 10, True), (0, 0.001, 99, True)],
    )
    def test_object_count_on_the_exact_boundary(self, old, new, percent, grown):
        assert bool(report.compare(_counted(new), _counted(old), percent)) is grown

    def test_line_says_test_rank_and_sizes(self):
        lines = report.compare(_sized(((MIB,), (3 * MIB,))), _sized(((MIB,), (2 * MIB,))), 0)
        assert lines == ["t.py::a: live_bytes 0, rank 1: settled 2 MiB -> 3 MiB (+50%)"]
        assert report.compare(_counted(8.0), _counted(0.0), 0) == ["t.py::a: gc 0: objects an append 0 -> 8"]

    def test_what_has_no_counterpart_is_said_not_failed(self):
        new, old = _sized(((2,),), nodeid="t.py::new"), _sized(((1,),), nodeid="t.py::old")
        assert report.compare(new, old) == []
        assert report.not_compared(new, old) == ["t.py::new: not compared, it is not in the baseline"]

    def test_another_world_is_not_compared(self):
        new, old = _sized(((2,),)), _sized(((1,),), size=4)
        assert report.compare(new, old) == []
        (line,) = report.not_compared(new, old)
        assert "1 ranks on emulated (gloo), the baseline's 4" in line

    def test_same_report_neither_grew_nor_is_left_out(self):
        document = sessions.rich()
        assert report.compare(document, document) == []
        assert report.not_compared(document, document) == []

    def test_negative_tolerance_is_refused(self):
        with pytest.raises(ValueError, match="-1"):
            report.compare(sessions.document(), sessions.document(), -1)


class TestTerminal:
    def test_twenty_tests_fit_a_screen_of_80_columns(self):
        lines = report.terminal_lines(sessions.rich(), 80)
        assert len(lines) + 1 <= 24
        assert max(map(len, lines)) <= 80

    @pytest.mark.parametrize("leaks", [0, 5, 10, 11, 12, 20, 22, 23, 60])
    def test_any_mixture_fits_a_screen(self, leaks):
        entries = [sessions.entry(f"t.py::bad{n}", sessions.verdict("leak", size=2)) for n in range(leaks)]
        entries += [sessions.entry(f"t.py::good{n}", sessions.verdict(size=2)) for n in range(20)]
        lines = report.terminal_lines(sessions.document(*entries), 80)
        assert len(lines) + 1 <= 24
        assert max(map(len, lines)) <= 80
        shown = sum("t.py::" in line and not line.startswith("slowest") for line in lines)
        left = [line for line in lines if "more (-v" in line]
        assert shown + sum(int(line.split()[2]) for line in left) == leaks + 20

    def test_a_leak_says_everything(self):
        document = sessions.document(sessions.entry("t.py::a", sessions.verdict("leak", guilty=(0, 1, 2, 5))))
        first, cause, slowest, counted = report.terminal_lines(document, 80)
        assert first == "LEAK! +64 MiB a cycle ranks 0-2, 5 ▁▃▆█ t.py::a"
        assert cause.strip() == "ulysses.py:41 in share  ipc-over-released  7 opens, counter -6  +1 more"
        assert slowest == "slowest step: 1.250 s, rank 7, cycle 0, step 2, t.py::a"
        assert counted == "sglmem: 1 LEAK"

    def test_columns_are_aligned(self):
        checks = [sessions.verdict("leak", guilty=(1,)), sessions.verdict(), sessions.growth()]
        lines = report.terminal_lines(sessions.document(sessions.entry("t.py::name", *checks)), 80)
        assert (
            len({line.index("t.py::name") for line in lines if line.endswith("t.py::name") and "slow" not in line}) == 1
        )

    def test_many_ranks_are_counted(self):
        document = sessions.document(sessions.entry("t.py::a", sessions.verdict("leak", guilty=(0, 2, 4, 6, 7))))
        assert report.terminal_lines(document)[0] == "LEAK! +64 MiB a cycle 5 of 8 ▁▃▆█ t.py::a"

    def test_clean_is_small_letters_and_has_no_cause(self):
        first, *_ = report.terminal_lines(sessions.document(sessions.entry("t.py::a", sessions.verdict())), 80)
        assert first.split() == ["flat", "29", "MiB", "all", "8", "▁▁▁▁", "t.py::a"]

    def test_alarms_come_first(self):
        told = [line.split()[0] for line in report.terminal_lines(sessions.rich(), 80) if line[0] != " "]
        assert told[:4] == ["LEAK!", "GROWING!", "LATE!", "CYCLIC!"]

    def test_growing_objects_say_their_types(self):
        first, cause, counted = report.terminal_lines(sessions.document(sessions.entry("t.py::a", sessions.growth())))
        assert first.split() == ["GROWING!", "+8", "an", "append", "t.py::a"]
        assert cause.strip() == "dict +4, list +2, Request +1, tuple +1"
        assert counted == "sglmem: 1 GROWING"

    @pytest.mark.parametrize(("word", "help"), [("late", "torch.cuda.ipc_collect()"), ("cyclic", "cyclic collector")])
    def test_what_comes_back_says_with_whose_help(self, word, help):
        document = sessions.document(sessions.entry("t.py::a", sessions.verdict(word)))
        assert help in report.terminal_lines(document)[1]

    def test_late_names_its_rank(self):
        document = sessions.document(sessions.entry("t.py::a", sessions.verdict("late")))
        assert report.terminal_lines(document)[0].startswith("LATE! +3 MiB late rank 7 ")

    def test_a_leak_in_a_test_that_passed_was_expected(self):
        leak, flat = sessions.verdict("leak", size=2), sessions.verdict(size=2)
        document = sessions.document(
            sessions.entry("t.py::flat", flat),
            sessions.entry("t.py::asserts_a_leak", leak, flat, outcome="passed"),
            sessions.entry("t.py::asserts_growth", sessions.growth(), outcome="passed"),
            sessions.entry("t.py::late", sessions.verdict("late", size=2)),
        )
        lines = report.terminal_lines(document, 80)
        assert [line.rpartition("::")[2] for line in lines if "t.py" in line and "slowest" not in line] == [
            *("late", "asserts_a_leak", "asserts_growth", "flat", "asserts_a_leak")
        ]
        (leaks,) = (line for line in lines if line.startswith("leak"))
        assert leaks.startswith("leak (expected) ")
        assert lines[-1] == "sglmem: 1 LATE, 1 leak expected, 1 growing expected, 2 flat"
        assert "expected: the test passed" in "\n".join(report.terminal_lines(document, 80, 1))
        assert "| leak (expected) | +64 MiB a cycle |" in report.github_summary(document)

    @pytest.mark.parametrize("outcome", ["failed", "skipped"])
    def test_a_leak_in_a_test_that_did_not_pass_was_not(self, outcome):
        document = sessions.document(sessions.entry("t.py::a", sessions.verdict("leak"), outcome=outcome))
        assert report.terminal_lines(document, 80, -1) == ["sglmem: 1 LEAK"]

    def test_quiet_is_quiet_about_what_was_expected(self):
        document = sessions.document(sessions.entry("t.py::a", sessions.verdict("leak"), outcome="passed"))
        assert report.terminal_lines(document, 80, -1) == []

    def test_quiet(self):
        clean = sessions.document(sessions.entry("t.py::a", sessions.verdict("filling")))
        assert report.terminal_lines(clean, 80, -1) == []
        counted = report.terminal_lines(sessions.rich(), 80, -1)
        assert counted == ["sglmem: 1 LEAK, 1 GROWING, 1 LATE, 1 CYCLIC, 1 filling, 15 flat"]

    def test_nothing_checked_says_nothing(self):
        document = sessions.document(report.entry("t.py::a", "passed", 0.1))
        assert [report.terminal_lines(document, 80, level) for level in (-1, 0, 1)] == [[], [], []]

    def test_verbose_is_full(self):
        text = "\n".join(report.terminal_lines(sessions.rich(), 80, 1))
        for test in sessions.rich()["tests"]:
            assert test["nodeid"] in text
        for frame in sessions.STACK:
            assert frame in text
        assert "held by engine.POOL -> .staging -> [(torch.bfloat16, 8)] -> Tensor" in text
        assert "ipc over-released: 448 handles of ulysses.py:41 in share, 7 opens each, counter -6" in text
        assert "Export one handle for each peer" in text
        assert "full collection before 41.2 ms, after 388.9 ms" in text
        assert "fault ipc.export@rank=1=one-handle fired (rank 1: 14)" in text
        assert "rank 7: " in text
        assert "slowest step: 1.250 s, rank 7, cycle 0, step 2 (1x3072x24x128)" in text

    def test_ranks_alike_share_a_line(self):
        made = sessions.verdict("flat", size=4)
        made = dataclasses.replace(made, series=(made.series[0],) * 4, settled=(made.settled[0],) * 4)
        text = "\n".join(report.terminal_lines(sessions.document(sessions.entry("t.py::a", made)), 80, 1))
        assert "ranks 0-3: " in text

    def test_proof_is_a_line_and_the_list_is_for_verbose(self):
        said = "proof: 2 of 6 faults caught, score 75%, 1 BLIND!"
        assert said in report.terminal_lines(sessions.rich(), 80)
        full = report.terminal_lines(sessions.rich(), 80, 1)
        start = full.index(said)
        assert [line.split()[0] for line in full[start + 1 : -1]] == [
            *("SURVIVED!", "caught", "caught", "not", "timeout", "error")
        ]

    def test_proof_that_never_struck(self):
        nothing = {"score": None, "faults": [], "blind": [], "not_healed": ["t"], "runs": 0, "left_out": 3}
        assert list(summary.proof_lines(nothing)) == [
            "proof: 0 of 0 faults caught, none fired, 1 NOT HEALED!, 3 runs left out"
        ]
        assert list(summary.proof_lines(None)) == []

    def test_long_name_keeps_its_end(self):
        document = sessions.document(sessions.entry("t.py::" + "x" * 200 + "[end]", sessions.verdict()))
        line = report.terminal_lines(document, 80)[0]
        assert len(line) == 80
        assert line.endswith("x[end]")

    def test_ipc_fault_that_nobody_is_known_to_break(self):
        made = sessions.verdict("leak", size=2)
        fault = dataclasses.replace(made.ipc.faults[0], by_ranks=(), counter=None)
        made = dataclasses.replace(made, ipc=dataclasses.replace(made.ipc, faults=(fault,)))
        text = "\n".join(report.terminal_lines(sessions.document(sessions.entry("t.py::a", made, size=2)), 80, 1))
        assert "1 opens each, 512 MiB, by nobody known" in text


class TestJunit:
    def test_one_check_of_each_kind(self):
        one = sessions.entry("t.py::a", sessions.verdict("leak"), sessions.growth())
        assert report.junit_properties(one) == [
            ("sglmem_live_bytes", "leak"),
            ("sglmem_bytes_per_cycle", str(64 * MIB)),
            ("sglmem_settled_bytes", str(349 * MIB)),
            ("sglmem_site", "ulysses.py:41 in share (ipc-over-released)"),
            ("sglmem_gc", "growing"),
            ("sglmem_objects_per_append", "8"),
        ]

    def test_several_are_numbered(self):
        one = sessions.entry("t.py::a", sessions.verdict(), sessions.verdict("filling"))
        names = [name for name, _ in report.junit_properties(one)]
        assert names[:3] == ["sglmem_live_bytes_0", "sglmem_bytes_per_cycle_0", "sglmem_settled_bytes_0"]
        assert names[3] == "sglmem_live_bytes_1"

    def test_none(self):
        assert report.junit_properties(report.entry("t.py::a", "passed", 0.0)) == []


class TestGithub:
    def test_table_has_a_row_a_check(self):
        text = report.github_summary(sessions.rich())
        rows = [line for line in text.splitlines() if line.startswith("| ")]
        assert len(rows) == 1 + 20
        assert {row.count("|") - row.count("\\|") for row in rows} == {7}
        assert rows[1].startswith("| **LEAK!** | +64 MiB a cycle | all 8 | ")
        assert "SURVIVED!" in text

    def test_text_cannot_break_the_table(self):
        nodeid = "t.py::a[x|y`z]"
        made = dataclasses.replace(sessions.growth(), by_type={"<b>|*T*": 1.0})
        text = report.github_summary(sessions.document(sessions.entry(nodeid, made)))
        row = next(line for line in text.splitlines() if "GROWING" in line and line.startswith("|"))
        assert row.replace("\\|", "").count("|") == 7
        assert "`t.py::a[x\\|y'z]`" in row
        assert "\\<b\\>" in row

    def test_rows_have_a_limit(self):
        entries = [sessions.entry(f"t.py::t{n}", sessions.growth("flat")) for n in range(101)]
        text = report.github_summary(sessions.document(*entries))
        assert text.count("\n| ") == 1 + 100
        assert "… and 1 more" in text

    def test_nothing_checked_is_empty(self):
        assert report.github_summary(sessions.document()) == ""


def test_report_needs_neither_torch_nor_pytest_nor_the_extra(pytester):
    pytester.makepyfile(
        probe="""
        import sys
        for name in ("torch", "numpy", "pytest", "jinja2", "pygal"):
            sys.modules[name] = None
        from pytest_sglmem import report
        document = report.session([], versions={"pytest_sglmem": "0", "python": "3"}, machine={"device": None})
        report.write(document, "r.json")
        report.terminal_lines(report.load("r.json"))
        """
    )
    result = pytester.run(sys.executable, "probe.py")
    assert result.ret == 0


def test_sparkline_and_size_read_as_the_summary_expects():
    assert words.sparkline([0, 1, 2, 3]) == "▁▃▆█"
    assert words.size(64 * MIB) == "64 MiB"

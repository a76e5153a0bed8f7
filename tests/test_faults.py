"""Faults: what a text means, what each action does in this process, and that nothing stays patched."""

from __future__ import annotations

import builtins
import contextlib
import gc
import io
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from pickle import dumps as dumps_by_name

import pytest
from fault_table import as_the_table_says  # noqa: F401 (every test here holds its line of the table)

from pytest_sglmem import strikes
from pytest_sglmem.faults import ACTIONS, POINTS, Fault, FaultError, armed, check_ranks, faults_table, parse, watch
from pytest_sglmem.records import Trace
from pytest_sglmem.strikes import exception, flipped


def fault(text: str) -> Fault:
    return parse(text, origin="here")


def arm(*texts: str, rank: int = -1, seed: int = 0):
    return armed([fault(text) for text in texts], rank=rank, seed=seed)


class Record:
    """An object that can be seen to die."""


class TestParse:
    def test_all_of_the_grammar(self):
        assert fault("dist.barrier@rank=2=skip") == Fault(
            "dist.barrier", "skip", ranks=(2,), text="dist.barrier@rank=2=skip", origin="here"
        )
        assert fault("cuda.alloc@every=3=retain(1MiB)").argument == 2**20
        assert fault("cuda.alloc@nth=5=oom").nth == 5
        assert fault("dist.collective@rank=1,nth=4=exit(3)").argument == 3
        assert fault("step@p=0.25=delay(1.5)").p == 0.25
        assert fault("clock.time=jump(-3600)").argument == -3600.0
        assert fault("step@rank=2+0=kill").ranks == (0, 2)
        assert fault("gc.enable@rank=pytest=skip").ranks == (-1,)

    def test_spaces_do_not_matter(self):
        assert fault(" dist.barrier @ rank = 2 , nth = 1 = skip ") == fault("dist.barrier@rank=2,nth=1=skip")

    @pytest.mark.parametrize(("name", "kind"), [("PicklingError", pickle.PicklingError), ("OSError", OSError)])
    def test_exceptions_by_name(self, name, kind):
        assert exception(fault(f"step=raise({name})").argument) is kind

    def test_an_exception_by_its_module(self):
        assert exception(fault("step=raise(subprocess.TimeoutExpired)").argument) is subprocess.TimeoutExpired

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("ipc.exprt=one-handle", "unknown point 'ipc.exprt'; did you mean ipc.export"),
            ("export=one-handle", "did you mean ipc.export"),
            ("ipc.export=one-handel", "unknown action 'one-handel'; did you mean one-handle?"),
            ("ipc.export=skip", "ipc.export takes no 'skip'; it takes raise"),
            ("ipc.export@rnk=1=one-handle", "unknown option 'rnk'; did you mean rank?"),
            ("dist.barrier@rank=-1=skip", "got '-1'"),
            ("dist.barrier@rank=two=skip", "got 'two'"),
            ("dist.barrier@rank=1,rank=2=skip", "'rank' is given twice"),
            ("dist.barrier@nth=0=skip", "nth must be a whole number from 1 (got '0')"),
            ("dist.barrier@every=x=skip", "every must be a whole number from 1 (got 'x')"),
            ("dist.barrier@p=0=skip", "p must be above 0 and at most 1 (got '0')"),
            ("dist.barrier@p=1.01=skip", "got '1.01'"),
            ("dist.barrier@nth=1,every=2=skip", "cannot be combined"),
            ("dist.barrier@=skip", "unknown option ''"),
            ("step=raise", "raise needs an argument: raise(Exc)"),
            ("step=raise(ValueErorr)", "did you mean ValueError"),
            ("step=raise(NoSuchThing)", "name it with its module"),
            ("step=delay(-1)", "got '-1'"),
            ("step=retain(0)", "got '0'"),
            ("step=exit(256)", "got '256'"),
            ("clock.time=jump(0)", "got '0'"),
            ("ipc.collect=skip(3)", "skip takes no argument (got '3')"),
            ("step@rank=pytest=kill", "would end the pytest process itself"),
            ("step", "is not of the form"),
            ("=kill", "is not of the form"),
            ("step=", "is not of the form"),
            ("step=raise(ValueError", "is not of the form"),
            ("", "is not of the form"),
        ],
    )
    def test_what_cannot_be_says_so_and_where_it_came_from(self, text, says):
        with pytest.raises(FaultError) as caught:
            parse(text, origin="marker of test_x at tests/test_a.py:12")
        assert says in str(caught.value)
        assert str(caught.value).startswith(f"marker of test_x at tests/test_a.py:12: fault {text!r}: ")

    @pytest.mark.parametrize("text", [None, 3, ("step=kill",)])
    def test_what_is_no_text(self, text):
        with pytest.raises(FaultError, match="is not of the form"):
            parse(text, origin="here")

    def test_a_rank_that_the_world_lacks(self):
        check_ranks([fault("step@rank=1=kill")], 2)
        with pytest.raises(FaultError, match=r"here: .*names rank 2, but this world has 2 ranks \(0 to 1\)"):
            check_ranks([fault("step@rank=2=kill")], 2)

    def test_every_point_and_action_is_in_the_table(self):
        lines = "\n".join(faults_table())
        assert all(name in lines for name in [*POINTS, *ACTIONS])
        assert {action for point in POINTS.values() for action in point.actions} == set(ACTIONS)

    def test_faults_cross_a_process(self):
        one = fault("dist.collective@rank=1,nth=4=raise(ValueError)")
        assert pickle.loads(pickle.dumps(one)) == one


class TestWhen:
    def reaches(self, text: str, times: int = 12, **kwargs: int) -> list[int]:
        struck = []
        with arm(text, **kwargs) as here:
            for reach in range(1, times + 1):
                before = sum(here.fired.values())
                here.before_step()
                if sum(here.fired.values()) > before:
                    struck.append(reach)
        return struck

    def test_nth_every_and_all(self):
        assert self.reaches("step@nth=5=keep-live") == [5]
        assert self.reaches("step@every=4=keep-live") == [4, 8, 12]
        assert self.reaches("step=keep-live") == list(range(1, 13))

    def test_chance_is_the_seeds_alone(self):
        first = self.reaches("step@p=0.5=keep-live", 200, seed=3)
        assert first == self.reaches("step@p=0.5=keep-live", 200, seed=3)
        assert first != self.reaches("step@p=0.5=keep-live", 200, seed=4)
        assert first != self.reaches("step@p=0.5=keep-live", 200, seed=3, rank=1)
        assert 60 < len(first) < 140
        assert self.reaches("step@p=1=keep-live") == list(range(1, 13))

    def test_another_rank_is_not_struck_and_not_patched(self):
        with arm("pickle.dumps@rank=1=raise(PicklingError)", rank=0) as here:
            assert pickle.dumps is dumps_by_name
            pickle.dumps(1)
        assert here.fired == {}

    @pytest.mark.parametrize("action", ["kill", "exit", "hang"])
    def test_what_ends_a_process_never_strikes_pytest(self, action):
        with arm(f"gc.enable={action}") as here:
            gc.enable()
        assert here.fired == {}

    def test_several_at_once_are_counted_apart(self):
        with arm("step@every=2=keep-live", "step@nth=3=raise(KeyError)", "pickle.dumps=corrupt") as here:
            here.before_step()
            here.before_step()
            with pytest.raises(KeyError):
                here.before_step()
            pickle.dumps(1)
        assert here.fired == {"step@every=2=keep-live": 1, "step@nth=3=raise(KeyError)": 1, "pickle.dumps=corrupt": 1}
        assert here.reached == {"step": 3, "pickle.dumps": 1}

    def test_watching_changes_nothing_and_counts(self, tmp_path):
        with armed(watch(), rank=-1, seed=0) as here:
            assert pickle.loads(pickle.dumps([1])) == [1]
            (tmp_path / "x").write_text("x")
            now = time.time()
        assert here.reached["pickle.dumps"] == here.reached["pickle.loads"] == here.reached["file.write"] == 1
        assert here.reached["clock.time"] == 1
        assert abs(time.time() - now) < 3600


class TestDelay:
    def test_it_waits_so_many_milliseconds_and_then_calls(self, monkeypatch):
        waited = []
        monkeypatch.setattr(strikes, "_sleep", lambda seconds: waited.append((seconds, gc.isenabled())))
        gc.disable()
        try:
            with arm("gc.enable=delay(20)"):
                gc.enable()
        finally:
            was_on = gc.isenabled()
            gc.enable()
        assert (waited, was_on) == ([(0.02, False)], True)


class TestPickle:
    def test_keep_live(self):
        with arm("pickle.dumps=keep-live", "pickle.loads=keep-live") as here:
            kept = Record()
            pickle.dumps(kept)
            pickle.loads(pickle.dumps([1]))
            assert any(one is kept for one in here.kept)
        assert here.kept == []

    def test_raise_every_second(self):
        with arm("pickle.dumps@every=2=raise(PicklingError)"):
            pickle.dumps(1)
            with pytest.raises(pickle.PicklingError, match=r"injected by pickle.dumps@every=2"):
                pickle.dumps(1)

    def test_corrupt(self):
        with arm("pickle.dumps=corrupt"):
            wrong = pickle.dumps(b"abcdefgh" * 4)
        assert wrong != dumps_by_name(b"abcdefgh" * 4)
        right = pickle.dumps(b"abcdefgh" * 4)
        with arm("pickle.loads=corrupt"):
            assert pickle.loads(right) != b"abcdefgh" * 4

    def test_a_name_imported_from_the_module_is_struck(self):
        with arm("pickle.dumps=raise(PicklingError)"), pytest.raises(pickle.PicklingError):
            dumps_by_name(1)
        assert dumps_by_name is pickle.dumps

    def test_flipped_changes_one_byte(self):
        assert [a ^ b for a, b in zip(flipped(b"abc"), b"abc", strict=True)] == [0, 1, 0]
        assert flipped(b"") == b""


class TestDeviceMemory:
    """In the pytest process, which often has no device: then there is nothing to retain, and nothing fired."""

    @pytest.fixture(autouse=True)
    def no_device(self, monkeypatch):
        torch = pytest.importorskip("torch")
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)

    def test_a_step_retains_nothing_without_a_device(self):
        with arm("step=retain", "step@every=2=retain(64)") as here:
            for _ in range(4):
                here.before_step()
            assert here.kept == []
        assert here.reached == {"step": 4}
        assert here.fired == {"step=retain": 0, "step@every=2=retain(64)": 0}

    def test_nor_where_nobody_loaded_torch(self, monkeypatch):
        monkeypatch.delitem(sys.modules, "torch")
        with arm("step=retain") as here:
            here.before_step()
            assert "torch" not in sys.modules
        assert here.fired == {"step=retain": 0}

    def test_on_the_emulated_device_it_does(self):
        from pytest_sglmem.emulated import emulated_cuda

        with emulated_cuda(), arm("step=retain(64)") as here:
            here.before_step()
            assert [one.numel() for one in here.kept] == [64]
        assert here.fired == {"step=retain(64)": 1}

    def test_a_session_that_only_counts_objects_passes(self, pytester):
        pytester.makepyfile("""
            import pytest
            torch = pytest.importorskip("torch")

            def test_counts(gc_tracked):
                gc_tracked.assert_flat(lambda i: None, times=10)
                with gc_tracked.growth() as grown:
                    pass
        """)
        result = pytester.runpytest_subprocess("--sglmem-inject", "step=retain", "--sglmem-report", "r.json")
        result.assert_outcomes(passed=1)
        faults = json.loads((pytester.path / "r.json").read_text())["tests"][0]["faults"]
        assert faults == [{"fault": "step=retain", "fired": [0]}]


class TestRealDeviceAllocations:
    """The dispatch mode of a real device, shown without one: here any tensor counts as the device's."""

    @pytest.fixture(autouse=True)
    def as_if_there_were_one(self, monkeypatch):
        torch = pytest.importorskip("torch")
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(strikes, "_on_device", lambda args, kwargs: True)

    def modes(self):
        from torch.utils._python_dispatch import _get_current_dispatch_mode

        return _get_current_dispatch_mode()

    def test_it_strikes_the_allocation_that_it_names_and_leaves_when_it_is_spent(self):
        import torch

        before = self.modes()
        with arm("cuda.alloc@nth=3=oom") as here:
            made = torch.zeros(2)
            made.add_(1)  # makes none
            made + 1
            here.before_step()
            assert self.modes() is not before
            with pytest.raises(torch.OutOfMemoryError, match=r"injected by cuda.alloc@nth=3=oom"):
                made * 2
            assert self.modes() is not before
            here.before_step()
            assert self.modes() is before
            made * 2
        assert self.modes() is before
        assert here.fired == {"cuda.alloc@nth=3=oom": 1}
        assert here.reached == {"cuda.alloc": 3}

    def test_it_stays_under_somebody_elses_mode_and_where_it_may_strike_again(self):
        import torch
        from torch.utils._python_dispatch import TorchDispatchMode

        class Other(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                return func(*args, **(kwargs or {}))

        before = self.modes()
        with arm("cuda.alloc@nth=1=delay(0)") as here, Other() as other:
            torch.zeros(2)
            here.before_step()
            assert self.modes() is other
        with arm("cuda.alloc@every=2=delay(0)") as here:
            torch.zeros(2)
            torch.zeros(2)
            here.before_step()
            assert self.modes() is not before
        assert self.modes() is before


class TestClock:
    def test_jump_stays_and_ends(self):
        before = time.time()
        with arm("clock.time@nth=2=jump(7200)"):
            assert time.time() - before < 3600
            assert 7200 <= time.time() - before < 7300
            assert 7200 <= time.time_ns() / 1e9 - before < 7300
        assert time.time() - before < 3600

    def test_without_a_choice_it_jumps_once(self):
        before = time.time()
        with arm("clock.time=jump(-3600)") as here:
            assert [round((time.time() - before) / 3600) for _ in range(3)] == [-1, -1, -1]
        assert here.fired == {"clock.time=jump(-3600)": 1}


class TestFiles:
    def test_enospc_at_the_third_write(self, tmp_path):
        with arm("file.write@nth=3=enospc") as here, open(tmp_path / "x", "wb", buffering=0) as file:
            file.write(b"1")
            file.write(b"2")
            with pytest.raises(OSError, match="No space left on device"):
                file.write(b"3")
            file.write(b"4")
        assert (tmp_path / "x").read_bytes() == b"124"
        assert here.fired == {"file.write@nth=3=enospc": 1}

    def test_a_buffered_write_fails_where_it_is_flushed(self, tmp_path):
        with arm("file.write@nth=1=enospc"):
            file = open(tmp_path / "x", "w")  # noqa: SIM115
            file.write("text")
            with pytest.raises(OSError, match="injected by"):
                file.flush()
            file.close()

    def test_pathlib_and_tempfile_are_struck(self, tmp_path):
        with arm("file.write=enospc"):
            with pytest.raises(OSError, match="injected by"):
                (tmp_path / "x").write_text("x")
            with tempfile.TemporaryFile(dir=tmp_path, buffering=0) as file, pytest.raises(OSError, match="injected by"):
                file.write(b"x")

    def test_lost_and_corrupt(self, tmp_path):
        with arm("file.write@nth=1=skip", "file.write@nth=2=corrupt"):
            (tmp_path / "a").write_bytes(b"abc")
            (tmp_path / "b").write_bytes(b"abc")
        assert (tmp_path / "a").read_bytes() == b""
        assert (tmp_path / "b").read_bytes() == b"acc"

    @pytest.mark.parametrize(
        ("mode", "kwargs"),
        [("w", {}), ("wb", {}), ("ab", {}), ("x", {}), ("w+", {}), ("r+b", {}), ("wb", {"buffering": 0})],
    )
    def test_files_are_what_open_gives(self, tmp_path, mode, kwargs):
        for name in "ab" if "x" not in mode else "":
            (tmp_path / name).write_bytes(b"0123")
        data = b"xy" if "b" in mode else "xy"
        real = open(tmp_path / "a", mode, **kwargs)  # noqa: SIM115
        with arm("file.write@nth=99=enospc"):
            gated = open(tmp_path / "b", mode, **kwargs)  # noqa: SIM115
        with real, gated:
            assert isinstance(gated, type(real))
            assert real.mode == gated.mode
            real.write(data)
            gated.write(data)
        assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()

    @pytest.mark.parametrize(
        ("mode", "kwargs"),
        [
            ("wq", {}),
            ("ww", {}),
            ("wb", {"encoding": "utf-8"}),
            ("w", {"buffering": 0}),
            ("wb", {"newline": "x"}),
            ("wbt", {}),
            ("wa", {}),
        ],
    )
    def test_wrong_arguments_are_opens_own_errors(self, tmp_path, mode, kwargs):
        with pytest.raises(ValueError) as right:
            open(tmp_path / "x", mode, **kwargs)  # noqa: SIM115
        with arm("file.write=enospc"), pytest.raises(ValueError) as wrong:
            open(tmp_path / "x", mode, **kwargs)  # noqa: SIM115
        assert str(wrong.value) == str(right.value)

    def test_reading_is_left_alone(self, tmp_path):
        (tmp_path / "x").write_text("x")
        with arm("file.write=enospc") as here:
            assert (tmp_path / "x").read_text() == "x"
        assert here.reached == {"file.write": 0}

    def test_what_the_harness_writes_is_not_struck(self, tmp_path):
        trace = Trace((), ())
        with arm("file.write=enospc") as here:
            trace.save(tmp_path / "trace.json")
        assert here.reached == {"file.write": 0}
        assert Trace.load(tmp_path / "trace.json") == trace

    def test_fsync(self, tmp_path):
        with open(tmp_path / "x", "w") as file:
            with arm("file.fsync=raise(OSError)"), pytest.raises(OSError, match=r"injected by") as caught:
                os.fsync(file.fileno())
            assert caught.value.errno == 5
            with arm("file.fsync=skip") as here:
                os.fsync(file.fileno())
                os.fdatasync(file.fileno())
            assert here.fired == {"file.fsync=skip": 2}


class TestCollector:
    def test_enable_is_skipped(self):
        gc.disable()
        try:
            with arm("gc.enable=skip") as here:
                gc.enable()
                assert not gc.isenabled()
            assert here.fired == {"gc.enable=skip": 1}
        finally:
            gc.enable()


class TestPutBack:
    def names(self) -> list[object]:
        return [
            *(pickle.dumps, pickle.loads, sys.modules["_pickle"].dumps, dumps_by_name, time.time, time.time_ns),
            *(gc.enable, os.fsync, os.fdatasync, builtins.open, io.open, sys.modules["_io"].open),
        ]

    def test_after_the_body_and_when_it_raises(self):
        before = self.names()
        with contextlib.suppress(ZeroDivisionError), armed(watch(), rank=-1, seed=0):
            assert all(now is not then for now, then in zip(self.names(), before, strict=True))
            1 / 0
        assert all(now is then for now, then in zip(self.names(), before, strict=True))

    def test_inner_and_outer(self):
        before = self.names()
        with arm("pickle.dumps@nth=2=raise(KeyError)") as outer:
            with arm("pickle.dumps=keep-live") as inner:
                pickle.dumps(1)
            assert inner.fired == {"pickle.dumps=keep-live": 1}
            assert outer.reached == {"pickle.dumps": 1}
            with pytest.raises(KeyError):
                pickle.dumps(1)
        assert all(now is then for now, then in zip(self.names(), before, strict=True))

    def test_what_a_test_patched_over_it_stays(self, monkeypatch):
        with arm("gc.enable=skip"):
            monkeypatch.setattr(gc, "enable", own := lambda: None)
        assert gc.enable is own

    def test_a_kept_wrapper_only_passes_on(self):
        with arm("pickle.dumps=raise(KeyError)") as here:
            kept = pickle.dumps
        assert kept([1]) == pickle.dumps([1])
        assert here.reached == {"pickle.dumps": 0}

    def test_an_unknown_exception_is_said_when_armed_and_nothing_stays(self):
        before = self.names()
        with pytest.raises(LookupError, match=r"no exception 'os.NoSuch'"), arm("gc.enable=raise(os.NoSuch)"):
            gc.enable()
        assert all(now is then for now, then in zip(self.names(), before, strict=True))

    def test_none_armed_patches_nothing(self):
        before = self.names()
        with armed((), rank=-1, seed=0) as here:
            assert all(now is then for now, then in zip(self.names(), before, strict=True))
            here.before_step()
        assert (here.fired, here.reached) == ({}, {})


def test_parsing_imports_no_torch():
    code = (
        "import sys, pytest_sglmem.faults as f\n"
        "f.parse('ipc.export=one-handle', origin='x')\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=Path(__file__).parent).returncode == 0


def test_arming_in_a_process_without_torch_imports_none():
    code = (
        "import sys, pytest_sglmem.faults as f\n"
        "with f.armed(f.watch(), rank=-1, seed=0): pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=Path(__file__).parent).returncode == 0

"""CrashDumpHistory: each sentence of what it promises, with the fault injected that would break it."""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import os
import pickle
import pickletools
import signal
import subprocess
import sys
import textwrap
import threading
import time
import tracemalloc
import warnings

import pytest
import request_records

from pytest_sglmem import heap
from pytest_sglmem.objects import GcTracked, GrowthError
from pytest_sglmem.reference import CrashDumpHistory, crash_history
from pytest_sglmem.reference.crash_history import HistoryWarning
from pytest_sglmem.reference.replaced_history import LiveHistory, TupleHistory


class Clock:
    """Elapsed seconds that a test sets."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "crash.pkl"


@pytest.fixture
def history():
    return CrashDumpHistory()


def load(path):
    with open(path, "rb") as file:
        return pickle.load(file)


def kept(history, path):
    """The requests of a history, as a dump shows them."""
    history.dump(path)
    return [request for request, *_ in load(path)["requests"]]


# record


def test_a_record_is_what_was_given_and_when_it_finished(history, path):
    request, output, created = request_records.record(1)
    before = time.time()
    history.record(request, output, created)
    history.dump(path)
    ((*given, finished),) = load(path)["requests"]
    assert given == [request, output, created]
    assert before <= finished <= time.time()


def test_a_record_is_a_snapshot(history, path):
    request, output, created = request_records.record(1)
    history.record(request, output, created)
    output["meta_info"]["finish_reason"]["type"] = "abort"
    request.input_ids.clear()
    history.dump(path)
    assert load(path)["requests"][0][:3] == request_records.record(1)


def test_a_record_lives_for_max_age_and_not_longer(clock, path):
    history = CrashDumpHistory(max_age=300, elapsed=clock)
    history.record("old", None, 0.0)
    clock.now += 300
    history.record("new", None, 0.0)
    assert kept(history, path) == ["old", "new"]
    clock.now += 0.001
    assert kept(history, path) == ["new"]


@pytest.mark.parametrize("jump", [-86_400.0, 86_400.0])
def test_a_wall_clock_that_jumps_loses_nothing_and_keeps_nothing_for_ever(monkeypatch, clock, path, jump):
    history = CrashDumpHistory(max_age=300, elapsed=clock)
    history.record("before", None, 0.0)
    wall = time.time() + jump
    monkeypatch.setattr(time, "time", lambda: wall)
    clock.now += 100
    history.record("after", None, 0.0)
    assert kept(history, path) == ["before", "after"]
    clock.now += 201
    assert kept(history, path) == ["after"]
    clock.now += 100
    assert kept(history, path) == []


def test_the_default_clock_cannot_jump(monkeypatch, path):
    history = CrashDumpHistory(max_age=300)
    history.record("before", None, 0.0)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    history.record("after", None, 0.0)
    assert kept(history, path) == ["before", "after"]


def test_bytes_are_bounded_exactly(path):
    size = len(pickle.dumps((b"x" * 100, None, 0.0, time.time()), 4))
    history = CrashDumpHistory(max_bytes=3 * size)
    for number in range(5):
        history.record(bytes([number]) * 100, None, 0.0)
    assert [request[0] for request in kept(history, path)] == [2, 3, 4]
    history = CrashDumpHistory(max_bytes=3 * size - 1)
    for number in range(5):
        history.record(bytes([number]) * 100, None, 0.0)
    assert [request[0] for request in kept(history, path)] == [3, 4]


def test_a_record_larger_than_the_bound_is_left_out_and_costs_no_other(path):
    history = CrashDumpHistory(max_bytes=1000)
    history.record("small", None, 0.0)
    with pytest.warns(HistoryWarning, match=r"too large and not in the history: \d+ bytes of at most 1000"):
        history.record("x" * 1000, None, 0.0)
    assert kept(history, path) == ["small"]
    assert history.left_out == {"too large": 1}


def deep():
    nest = []
    for _ in range(200_000):
        nest = [nest]
    return nest


class Refuses:
    """Pickling it raises what it was made with."""

    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        raise self.error


@pytest.mark.parametrize(
    ("bad", "kind"),
    [
        (threading.Lock(), "not picklable"),
        (lambda: None, "not picklable"),
        (Refuses(OSError(28, "no space")), "not picklable"),
        (Refuses(MemoryError()), "out of memory"),
        (Refuses(RecursionError()), "too deep"),
    ],
)
def test_what_does_not_pickle_is_left_out_with_one_warning_a_kind_and_counted(history, path, bad, kind):
    with pytest.warns(HistoryWarning, match=f"a record is {kind} and not in the history") as warned:
        history.record("good", {"bad": bad}, 0.0)
    assert len(warned) == 1
    history.record("good", {"bad": bad}, 0.0)  # warnings are errors here: a second one would fail
    history.record("good", {"bad": bad}, 0.0)
    history.record("good", None, 0.0)
    assert kept(history, path) == ["good"]
    assert load(path)["left_out"] == {kind: 3} == history.left_out


def test_too_deep_a_record_is_left_out(history):
    nest = deep()
    with pytest.warns(HistoryWarning, match="too deep"):
        history.record(nest, None, 0.0)
    while nest:
        nest = nest.pop()


@pytest.mark.parametrize("options", [{"max_age": 0}, {"max_bytes": 0}, {"max_age": float("nan")}])
def test_bounds_that_keep_nothing_are_refused(options):
    with pytest.raises(ValueError, match="must be > 0"):
        CrashDumpHistory(**options)


# dump


def test_a_dump_is_read_by_pickle_load_and_restores_nothing(history, path, monkeypatch):
    for number in range(20):
        history.record(*request_records.record(number))
    with monkeypatch.context() as patch:
        patch.setattr(pickle, "loads", None)  # a dump that restored would fail here
        assert history.dump(path)
    assert [record[:3] for record in load(path)["requests"]] == [request_records.record(i) for i in range(20)]
    assert load(path)["left_out"] == {}


def test_a_dump_is_a_well_formed_pickle(history, path):
    history.record("a", "b", 0.0)
    history.dump(path, extra={"k": 1})
    pickletools.dis(path.read_bytes(), out=io.StringIO())


def test_an_empty_history_dumps(history, path):
    assert history.dump(path)
    assert load(path) == {"requests": [], "left_out": {}}


def test_unfinished_requests_come_last_without_a_finish(history, path):
    history.record("done", "output", 1.0)
    history.dump(path, unfinished=[("running", "so far", 2.0)])
    assert load(path)["requests"][1] == ("running", "so far", 2.0, None)
    assert len(history) == 1


def test_extra_entries_stand_beside_the_requests(history, path):
    history.dump(path, extra={"server_args": {"tp_size": 8}, "launch": "python -m server"})
    assert load(path) == {
        "requests": [],
        "server_args": {"tp_size": 8},
        "launch": "python -m server",
        "left_out": {},
    }


def test_parts_that_do_not_pickle_are_left_out_and_named(history, path):
    history.dump(
        path,
        unfinished=[("a", None, 0.0), (threading.Lock(), None, 0.0), ("b", None, 0.0)],
        extra={"good": 1, "bad": threading.Lock()},
    )
    dumped = load(path)
    assert [record[0] for record in dumped["requests"]] == ["a", "b"]
    assert dumped["good"] == 1
    assert set(dumped["left_out"]) == {"unfinished[1]", "extra['bad']"}
    assert dumped["left_out"]["extra['bad']"] == "not picklable (TypeError)"


def test_unfinished_requests_of_another_shape_are_left_out_and_named(history, path):
    history.dump(path, unfinished=[("a", None, 0.0), "nonsense", ("b", None, 0.0)])
    dumped = load(path)
    assert [record[0] for record in dumped["requests"]] == ["a"]
    assert "unfinished[1:]" in dumped["left_out"]


def test_entries_of_the_dump_are_not_replaced_by_extra_ones(history, path):
    history.record("a", None, 0.0)
    history.dump(path, extra={"requests": "mine", "left_out": "mine"})
    dumped = load(path)
    assert [record[0] for record in dumped["requests"]] == ["a"]
    assert set(dumped["left_out"]) == {"extra['requests']", "extra['left_out']"}


def test_unfinished_requests_that_cannot_be_listed_cost_no_others(history, path):
    def listing():
        yield "a", None, 0.0
        raise LookupError("changed meanwhile")

    history.dump(path, unfinished=listing())
    assert [record[0] for record in load(path)["requests"]] == ["a"]
    assert load(path)["left_out"] == {"unfinished[0:]": "LookupError"}


def test_an_interrupted_dump_leaves_no_partial_file(history, path):
    history.record("a", None, 0.0)

    def interrupt(request, output):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        history.dump(path, redact=interrupt)
    assert os.listdir(path.parent) == []


# redact


def blacken(request, output):
    request.text = "***"
    request.input_ids.clear()
    return request, None


def test_redaction_works_on_copies(history, path):
    request, output, created = request_records.record(1)
    history.record(request, output, created)
    history.dump(path, unfinished=[(request, output, created)], redact=blacken)
    for written, out, *_ in load(path)["requests"]:
        assert (written.text, written.input_ids, out) == ("***", [], None)
    assert request == request_records.record(1)[0]
    history.dump(path)
    assert load(path)["requests"][0][0] == request


def test_what_cannot_be_redacted_is_not_written_and_its_reason_shows_no_value(history, path):
    for secret in ("hunter2", "hunter3"):
        history.record({"password": secret}, None, 0.0)

    def fails(request, output):
        raise KeyError(request["password"])

    history.dump(path, redact=fails)
    assert load(path) == {"requests": [], "left_out": {"not redacted (KeyError)": 2}}
    assert b"hunter" not in path.read_bytes()


def test_redacting_to_none_writes_none(history, path):
    history.record("secret", None, 0.0)
    history.record("open", None, 0.0)
    history.dump(path, redact=lambda request, output: None if request == "secret" else (request, output))
    assert [record[0] for record in load(path)["requests"]] == ["open"]


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_the_collector_is_paused_where_records_are_restored_and_put_back(history, path, enabled, fails):
    history.record("a", None, 0.0)
    seen = []

    def look(request, output):
        seen.append(gc.isenabled())
        if fails:
            raise KeyboardInterrupt
        return request, output

    if not enabled:
        gc.disable()
    try:
        with pytest.raises(KeyboardInterrupt) if fails else contextlib.nullcontext():
            history.dump(path, redact=look)
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
    assert seen == [False]


# the file: whole, or as it was


class Failing(io.FileIO):
    """A file whose disk is full after `room` bytes."""

    def __init__(self, descriptor, mode, room):
        super().__init__(descriptor, mode)
        self.room = room

    def write(self, data):
        if self.room < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= len(data)
        return super().write(data)


@pytest.mark.parametrize("room", [0, 1, 100, 5000])
def test_a_full_disk_is_a_clear_error_and_leaves_no_partial_file(history, path, monkeypatch, room):
    path.write_text("old")
    for number in range(5):
        history.record(*request_records.record(number))
    monkeypatch.setattr(crash_history, "open", lambda fd, mode: Failing(fd, mode, room), raising=False)
    with pytest.raises(OSError, match=r"No space left on device: no crash dump written, .* is as it was") as caught:
        history.dump(path)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
    assert path.read_text() == "old"
    assert os.listdir(path.parent) == [path.name]


def test_a_failing_fsync_leaves_the_old_file(history, path, monkeypatch):
    path.write_text("old")
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(errno.EIO, "I/O error")))
    with pytest.raises(OSError, match="I/O error: no crash dump written"):
        history.dump(path)
    assert path.read_text() == "old"
    assert os.listdir(path.parent) == [path.name]


def test_a_missing_directory_is_a_clear_error(history, tmp_path):
    with pytest.raises(FileNotFoundError, match="no crash dump written"):
        history.dump(tmp_path / "none" / "crash.pkl")


def test_the_file_is_on_the_disk_before_it_takes_its_name(history, path, monkeypatch):
    events = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append("fsync"), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (events.append("replace"), replace(a, b)))
    history.dump(path)
    assert events == ["fsync", "replace", "fsync"]  # the file, its name, the directory
    assert path.stat().st_mode & 0o077 == 0  # prompts are nobody else's


KILLS = """
import os, pickle, signal, sys
from pytest_sglmem.reference import CrashDumpHistory, crash_history
path = sys.argv[1]
history = CrashDumpHistory()
for i in range(3):
    history.record("new", bytes(20_000), 0.0)
history.dump(path)
size = os.path.getsize(path)

class Killed:
    def __init__(self, descriptor, mode, room):
        self.file, self.room = os.fdopen(descriptor, mode, buffering=0), room
    def __enter__(self): return self
    def __exit__(self, *_): self.file.close()
    def fileno(self): return self.file.fileno()
    def flush(self): pass
    def write(self, data):
        if len(data) > self.room:
            self.file.write(data[:self.room])
            os.kill(os.getpid(), signal.SIGKILL)
        self.room -= len(data)
        self.file.write(data)

def dies(*_): os.kill(os.getpid(), signal.SIGKILL)

def run(strike):
    with open(path, "wb") as file:
        pickle.dump("old", file)
    child = os.fork()
    if not child:
        strike()
        history.dump(path)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), status
    assert len(os.listdir(os.path.dirname(path))) <= 2, "partial files of the killed pile up"
    with open(path, "rb") as file:
        return pickle.load(file)

for room in sorted({*range(40), *range(0, size, 977), *range(size - 40, size)}):
    assert run(lambda: setattr(crash_history, "open", lambda fd, mode: Killed(fd, mode, room))) == "old", room
assert run(lambda: setattr(os, "fsync", dies)) == "old"
assert run(lambda: setattr(os, "replace", dies)) == "old"
replace = os.replace
assert len(run(lambda: setattr(os, "replace", lambda a, b: (replace(a, b), dies())))["requests"]) == 3
history.dump(path)
print("whole", os.listdir(os.path.dirname(path)))
"""


def test_a_kill_at_any_byte_leaves_the_old_file_or_the_new_one(path):
    done = subprocess.run([sys.executable, "-c", KILLS, str(path)], capture_output=True, text=True)
    assert done.stdout == "whole ['crash.pkl']\n", done.stderr


@pytest.mark.parametrize(
    "name", [".crash.pkl.old.abcdefgh.partial", ".crash.pkl.abcdefgh.part", "crash.pkl.abcdefgh.partial", ".crash.pkl"]
)
def test_a_dump_removes_only_what_killed_writers_of_its_file_left(history, path, name):
    path.with_name(name).write_text("not ours")
    path.with_name(".crash.pkl.abcdefgh.partial").write_text("left behind")
    history.dump(path)
    assert sorted(os.listdir(path.parent)) == sorted([path.name, name])


def test_a_partial_file_whose_writer_lives_is_left_alone(history, path):
    """Two dumps of one file in each other: the inner one finds the outer one's partial file, and must leave it."""
    history.record("a", None, 0.0)
    listed = []

    def dumps_too(request, output):
        history.dump(path)
        listed.append(sorted(os.listdir(path.parent)))
        return request, output

    assert history.dump(path, redact=dumps_too)
    assert [len(names) for names in listed] == [2]
    assert os.listdir(path.parent) == [path.name]


def test_a_partial_file_that_was_taken_for_abandoned_before_it_was_locked_is_made_again(history, path, monkeypatch):
    made, mkstemp = [], crash_history.tempfile.mkstemp

    def swept(**options):
        made.append(mkstemp(**options))
        if len(made) == 1:
            os.unlink(made[0][1])
        return made[-1]

    monkeypatch.setattr(crash_history.tempfile, "mkstemp", swept)
    history.record("a", None, 0.0)
    assert kept(history, path) == ["a"]
    assert len(made) == 2
    with pytest.raises(OSError):
        os.fstat(made[0][0])  # closed


@pytest.mark.parametrize("error", [OSError(errno.ENOLCK, "no locks"), MemoryError(), PermissionError()])
def test_sweeping_that_fails_costs_no_dump(history, path, monkeypatch, error):
    path.with_name(".crash.pkl.abcdefgh.partial").write_text("left behind")

    def fails(*_):
        raise error

    monkeypatch.setattr(crash_history.os, "listdir", fails)
    if isinstance(error, OSError):
        monkeypatch.setattr(crash_history.fcntl, "flock", fails)
    history.record("a", None, 0.0)
    assert kept(history, path) == ["a"]


# dumping in bad moments


def test_twice_is_as_good_as_once(history, path):
    history.record("a", None, 0.0)
    assert history.dump(path)
    assert history.dump(path)
    assert kept(history, path) == ["a"]


def test_an_error_is_not_raised_over_the_original_one(history, tmp_path):
    def crash():
        try:
            raise MemoryError("the original")
        except MemoryError:
            with pytest.warns(HistoryWarning, match="no crash dump"):
                assert history.dump(tmp_path / "none" / "crash.pkl") is False
            raise

    with pytest.raises(MemoryError, match="the original") as caught:
        crash()
    assert caught.value.__context__ is None


def test_nor_where_warnings_are_errors(history, tmp_path):
    def crash():
        try:
            raise KeyError("original")
        finally:
            history.dump(tmp_path / "none" / "crash.pkl")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(KeyError, match="original"):
            crash()


def test_out_of_memory_costs_the_parts_that_need_it_and_no_others(history, path, monkeypatch):
    history.record("a", None, 0.0)
    dumps = pickle.dumps

    def starved(value, protocol):
        if isinstance(value, dict) and "large" not in value:
            return dumps(value, protocol)
        raise MemoryError

    monkeypatch.setattr(pickle, "dumps", starved)
    assert history.dump(path, unfinished=[("b", None, 0.0)], extra={"args": {"large": 1}})
    dumped = load(path)
    assert [record[0] for record in dumped["requests"]] == ["a"]
    starved_too = "out of memory (MemoryError)"
    assert dumped["left_out"] == {"unfinished[0]": starved_too, "extra['args']": starved_too}


@contextlib.contextmanager
def interrupting(handler):
    """A signal whose handler runs at once: `raise_signal` returns when it has."""
    before = signal.signal(signal.SIGUSR1, lambda *_: handler())
    try:
        yield lambda: signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_signal_handler_may_dump_and_record_in_the_middle_of_a_dump(history, path):
    for number in range(3):
        history.record(number, None, 0.0)
    inner = path.with_name("inner.pkl")

    def handler():
        history.record("from the handler", None, 0.0)
        history.dump(inner)

    with interrupting(handler) as strike:
        history.dump(path, redact=lambda request, output: (strike() if request == 1 else None, (request, output))[1])
    assert [record[0] for record in load(inner)["requests"]] == [0, 1, 2, "from the handler"]
    assert [record[0] for record in load(path)["requests"]][:3] == [0, 1, 2]
    assert kept(history, path) == [0, 1, 2, "from the handler"]


def test_a_signal_handler_may_dump_to_the_same_file_in_the_middle_of_a_dump(history, path):
    for number in range(3):
        history.record(number, None, 0.0)
    with interrupting(lambda: history.dump(path)) as strike:
        history.dump(path, redact=lambda request, output: (strike(), (request, output))[1])
    assert [record[0] for record in load(path)["requests"]] == [0, 1, 2]
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("line", range(30))
def test_a_signal_handler_may_come_at_any_line_of_record(clock, path, line):
    """A trace function strikes at the given line of `record` and what it calls: the handler records and dumps there."""
    history = CrashDumpHistory(max_age=10, elapsed=clock)
    history.record("old", None, 0.0)
    clock.now += 11
    inner = path.with_name("inner.pkl")
    seen = []

    def handler():
        sys.settrace(None)
        history.record("from the handler", None, 0.0)
        history.dump(inner)

    def strikes(frame, event, argument):
        if frame.f_code.co_filename != crash_history.__file__:
            return None
        if event == "line":
            seen.append(frame.f_lineno)
            if len(seen) == line + 1:
                handler()
        return strikes

    before = sys.gettrace()
    sys.settrace(strikes)
    try:
        history.record("new", None, 0.0)
    finally:
        sys.settrace(before)
    if len(seen) > line:
        assert "from the handler" in [record[0] for record in load(inner)["requests"]]
        assert sorted(kept(history, path)) == ["from the handler", "new"]
    else:
        assert kept(history, path) == ["new"]
    assert history._bytes == sum(len(data) for _, data in history._kept)


def test_threads_may_record_while_another_dumps(path):
    history = CrashDumpHistory(max_bytes=5000)
    begun, stop = threading.Event(), threading.Event()

    def work():
        while not stop.is_set():
            history.record("x", None, 0.0)
            begun.set()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        begun.wait()
        for _ in range(20):
            assert history.dump(path)
            CrashDumpHistory.restore(path)
    finally:
        stop.set()
        thread.join()


# restore


class Looks:
    """Is restored as whether the collector was enabled then."""

    def __reduce__(self):
        return gc.isenabled, ()


def test_restore_gives_what_was_dumped_and_pauses_the_collector(history, path):
    for number in range(5):
        history.record(*request_records.record(number))
    history.dump(path, extra={"k": "v"})
    assert CrashDumpHistory.restore(path) == load(path)
    assert gc.isenabled()
    history.record(Looks(), None, 0.0)
    history.dump(path)
    assert load(path)["requests"][-1][0] is True
    assert CrashDumpHistory.restore(path)["requests"][-1][0] is False  # the collector, as it was while this was loaded
    assert gc.isenabled()


def damaged(data):
    yield "cut in the middle", data[: len(data) // 2], "does not load"
    yield "empty", b"", "does not load"
    yield "text", b"hello", "does not load"
    yield "something behind", data + b"x", "bytes follow its end"
    yield "another pickle", pickle.dumps([1]), "no dictionary with the entries"
    yield "no list", pickle.dumps({"requests": 3, "left_out": {}}), "no dictionary with the entries"
    yield "pairs", pickle.dumps({"requests": [(1, 2)], "left_out": {}}), r"requests\[0\] is no \(request, output"
    yield "no time", pickle.dumps({"requests": [(1, 2, 3.0, "x")], "left_out": {}}), "finished at 'x', which is no time"


def test_restore_checks_what_a_pickle_lets_it_check(history, path):
    history.record("a", None, 0.0)
    history.dump(path)
    for what, data, says in damaged(path.read_bytes()):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=says) as caught:
            CrashDumpHistory.restore(path)
        assert str(path) in str(caught.value), what
        assert gc.isenabled()


def test_restore_of_no_file_is_an_os_error(path):
    with pytest.raises(FileNotFoundError):
        CrashDumpHistory.restore(path)


# what it is for


def test_it_leaves_nothing_to_the_collector_where_what_it_replaced_does():
    tracked = GcTracked(lambda growth: None)
    records = [request_records.record(number) for number in range(20)]
    assert tracked.assert_flat(lambda i: CrashDumpHistory().record(*records[i % 20]), times=100).verdict == "flat"
    history = CrashDumpHistory(max_age=1e9)
    assert tracked.assert_flat(lambda i: history.record(*records[i % 20]), times=200).objects_per_append == 0

    live, tuples = LiveHistory(max_age=1e9), TupleHistory(max_age=1e9)
    objects = []
    for shape in (live, tuples):
        with pytest.raises(GrowthError) as caught:
            tracked.assert_flat(lambda i, shape=shape: shape.record(*request_records.record(i)), times=60)
        objects.append(caught.value.growth.objects_per_append)
    assert objects[0] == 9  # the tuple, the request, its list, parameters and their two lists, the output's three
    assert 0 < objects[1] < 9


def test_a_dump_keeps_not_one_tracked_object_more_alive_at_any_time(history, path, monkeypatch):
    for number in range(200):
        history.record(*request_records.record(number % 20))
    counts = []
    write = crash_history._OuterPickle.append

    def counting(outer, data):
        counts.append(len(gc.get_objects()))
        write(outer, data)

    monkeypatch.setattr(crash_history._OuterPickle, "append", counting)
    heap.settle()
    history.dump(path)
    assert len(counts) == 200
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("redact", [None, lambda request, output: (request, output)])
def test_the_peak_of_a_dump_does_not_depend_on_the_number_of_records(path, redact):
    peaks = []
    for count in (20, 2000):
        history = CrashDumpHistory()
        for _ in range(count):
            history.record("x" * 5000, list(range(300, 400)), 0.0)
        tracemalloc.start()
        history.dump(path, redact=redact)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 4096


def test_it_needs_no_torch():
    code = textwrap.dedent("""
        import sys
        from pytest_sglmem.reference import CrashDumpHistory
        CrashDumpHistory().record(1, 2, 3.0)
        print("torch" in sys.modules, "numpy" in sys.modules)
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"

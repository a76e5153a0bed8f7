"""Every option and ini name: who wins, what is refused, and that a refusal says value, origin and what is right."""

import pytest

from pytest_sglmem.options import OPTIONS

pytestmark = pytest.mark.usefixtures("quiet_project")


@pytest.fixture
def quiet_project(pytester):
    pytester.makepyfile("def test_nothing(): pass")
    return pytester


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--sglmem-world", "0"], "--sglmem-world on the command line is '0', should be a whole number of at least 1"),
        (["--sglmem-world", "two"], "--sglmem-world on the command line is 'two', should be a whole number"),
        (["--sglmem-device", "tpu"], "--sglmem-device on the command line is 'tpu', should be one of auto, cuda, emul"),
        (["--sglmem-launcher", "mpi"], "is 'mpi', should be one of local, torchrun"),
        (
            ["--sglmem-timeout", "0"],
            "--sglmem-timeout on the command line is '0', should be a number of seconds above 0",
        ),
        (["--sglmem-timeout", "inf"], "is 'inf', should be a number of seconds above 0"),
        (["--sglmem-ipc-audit", "loud"], "is 'loud', should be one of off, warn, error"),
        (["--sglmem-seed", "-1"], "--sglmem-seed on the command line is '-1', should be a whole number of at least 0"),
        (["--sglmem-report", "a.txt"], "is 'a.txt', should be a file name that ends in .json or .html"),
        (["--sglmem-baseline-tolerance=-1%"], "is '-1%', should be a percentage of at least 0"),
        (["--sglmem-artifacts", " "], "--sglmem-artifacts on the command line is ' ', should be not empty"),
        (["--sglmem-baseline", "absent.json"], "--sglmem-baseline on the command line is 'absent.json', not a report"),
        (["--sglmem-inject", "ipc.exprot=skip"], "ipc.export"),
        (
            ["--sglmem-prove-limit", "3"],
            "--sglmem-prove-limit on the command line has no effect without",
        ),
        (
            ["--sglmem-baseline-tolerance", "2%"],
            "--sglmem-baseline-tolerance on the command line has no effect without --sglmem-baseline",
        ),
        (["--sglmem-prove", "--sglmem-inject", "step=retain"], "would strike the clean run too"),
    ],
)
def test_a_wrong_value_is_refused_before_any_test(pytester, args, says):
    result = pytester.runpytest(*args)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert says in result.stderr.str() + result.stdout.str()
    assert "passed" not in result.stdout.str()


def test_a_wrong_ini_value_names_the_file(pytester):
    path = pytester.makeini("[pytest]\nsglmem_world = none\n")
    result = pytester.runpytest()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert f"sglmem_world in {path} is 'none'" in result.stderr.str()


def test_the_ini_speaks_and_the_option_wins(pytester):
    pytester.makeini("[pytest]\nsglmem_world = 3\nsglmem_seed = 7\n")
    pytester.runpytest().stdout.fnmatch_lines(["sglmem: world 3, *seed 7*"])
    pytester.runpytest("--sglmem-world", "5").stdout.fnmatch_lines(["sglmem: world 5, *seed 7*"])


def test_an_ini_file_may_have_ready_what_only_another_option_uses(pytester):
    pytester.makeini("[pytest]\nsglmem_prove_limit = 3\nsglmem_baseline_tolerance = 2%\n")
    assert pytester.runpytest().ret == pytest.ExitCode.OK


@pytest.mark.parametrize("value", ["1", "8"])
def test_the_least_world_passes(pytester, value):
    assert pytester.runpytest("--sglmem-world", value).ret == pytest.ExitCode.OK


def test_a_pattern_that_is_none_is_refused(pytester):
    pytester.makeini("[pytest]\nsglmem_ignore_sites =\n    vendor/.*\n    (\n")
    result = pytester.runpytest()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "sglmem_ignore_sites" in result.stderr.str()
    assert "'('" in result.stderr.str()


def test_every_option_is_in_the_help(pytester):
    text = pytester.runpytest("--help").stdout.str()
    for option in OPTIONS:
        assert option.flag in text
        assert option.dest in text


def test_the_faults_are_listed_without_running_anything(pytester):
    result = pytester.runpytest("--sglmem-faults")
    assert result.ret == 0
    assert "ipc.export" in result.stdout.str()
    assert "one-handle" in result.stdout.str()
    assert "passed" not in result.stdout.str()


@pytest.mark.parametrize(
    ("marker", "says"),
    [
        ("world(ranks=2)", "world(ranks=...) (marker of test_it at test_marked.py:3): unknown keyword"),
        ("world(2)", "should be keywords, such as world(size=2)"),
        (
            "world(size=0)",
            "world(size=0) (marker of test_it at test_marked.py:3): should be a whole number of at least 1",
        ),
        ("world(size='two')", "world(size='two')"),
        ("world(size=True)", "world(size=True)"),
        ("world(sizes=[])", "world(sizes=[])"),
        ("world(sizes=[2, 0])", "world(sizes=0)"),
        ("world(size=2, sizes=[2])", "should be one of the two"),
        (
            "world(backend='typo')",
            "(marker of test_it at test_marked.py:3): should be one of gloo, nccl",
        ),
        ("world(backend=3)", "world(backend=3) (marker of test_it at test_marked.py:3): should be a name"),
        ("world(scope='class')", "world(scope='class')"),
        ("world(init=1)", "world(init=1)"),
        ("world(backend=3)", "world(backend=3)"),
        ("inject()", "should be one or more faults"),
        ("inject('step=fly')", "step"),
        ("survives", "survives (marker of test_it at test_marked.py:3): should be faults and a reason"),
        ("survives('ipc.open=retain')", "should be faults and a reason"),
        ("survives('ipc.open=retain', reason=' ')", "should be faults and a reason"),
        ("survives(reason='x', since=3)", "should be faults and a reason"),
        (
            "survives('typo=skip', reason='x')",
            "test_it at test_marked.py:3: fault 'typo=skip': unknown point",
        ),
        ("survives('ipc.opn=retain', reason='x')", "did you mean ipc.open"),
        ("survives(3, reason='x')", "fault 3: is not of the form"),
        ("survives('clock.time', reason='x')", "--sglmem-prove never tries this; it tries nothing at clock.time"),
        (
            "survives('gc.enable=hang', reason='x')",
            "survives('gc.enable=hang') (marker of test_it at test_marked.py:3): --sglmem-prove never tries this; "
            "of gc.enable it tries gc.enable=skip",
        ),
    ],
)
def test_a_marker_that_cannot_be_is_refused_before_any_test(pytester, marker, says):
    pytester.makepyfile(test_marked=f"import pytest\n\n@pytest.mark.{marker}\ndef test_it(world): pass\n")
    result = pytester.runpytest()
    assert result.ret != pytest.ExitCode.OK
    assert says in result.stderr.str() + result.stdout.str()
    assert "1 passed" not in result.stdout.str().replace("test_nothing", "")


def test_paths_are_where_they_are_typed_and_those_of_the_ini_file_in_its_folder(pytester, monkeypatch):
    pytester.makeini("[pytest]\nsglmem_report = base.json\n")
    moves = pytester.makepyfile("def test_moves(tmp_path, monkeypatch):\n    __import__('os').chdir(tmp_path)\n")
    monkeypatch.chdir(pytester.mkdir("below"))
    pytester.runpytest_subprocess("-p", "no:cacheprovider", str(moves)).assert_outcomes(passed=1)
    assert (pytester.path / "base.json").exists()
    pytester.makeini("[pytest]\nsglmem_baseline = base.json\n")
    compared = pytester.runpytest_subprocess("-p", "no:cacheprovider", str(moves), "--sglmem-report", "typed.json")
    compared.assert_outcomes(passed=1)
    assert [path.name for path in pytester.path.rglob("*.json")] == ["base.json", "typed.json"]
    assert (pytester.path / "below" / "typed.json").exists()

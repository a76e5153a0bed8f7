"""The exactness benchmark on a small number of programs, and that it would notice."""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path

import pytest

pytest.importorskip("torch")


@pytest.fixture(scope="module")
def benchmark():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
        import exactness

        exactness.measure(1, 0, leak=True)  # imports what a device imports when it is first used
        gc.collect()
        gc.freeze()
        yield exactness
        gc.unfreeze()


@pytest.mark.parametrize("leak", [False, True], ids=["clean", "leaking"])
def test_no_program_is_judged_wrongly(benchmark, leak):
    words, cycles, wrong = benchmark.measure(25, 7000, leak=leak)
    assert wrong == []
    assert sum(words.values()) == sum(cycles.values()) == 25


def test_the_benchmark_notices_what_is_wrong(benchmark):
    import programs

    made = programs.program(0, leak=True)
    with benchmark.emulated_cuda(devices=made.size):
        verdict = benchmark.judge(benchmark.trace(made))
    line = programs.planted_line()
    assert benchmark.wrong(made, verdict, line) == ""
    assert "accused" in benchmark.wrong(dataclasses.replace(made, plant=None), verdict, line)
    assert "first" in benchmark.wrong(made, verdict, line + 1)
    assert benchmark.wrong(made, dataclasses.replace(verdict, verdict="flat"), line) == "missed"
    elsewhere = dataclasses.replace(made.plant, ranks=(9,))
    assert "ranks" in benchmark.wrong(dataclasses.replace(made, plant=elsewhere), verdict, line)

"""Digests of what steps return: same bytes, same digest, whatever the device and the layout."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

torch = pytest.importorskip("torch")

from pytest_sglmem.digests import digest  # noqa: E402
from pytest_sglmem.emulated import emulated_cuda  # noqa: E402


@dataclass
class Output:
    hidden: torch.Tensor
    name: str = "out"


def tensors():
    return torch.arange(12, dtype=torch.float32).reshape(3, 4)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: tensors(), lambda: tensors() + 1),
        (lambda: tensors(), lambda: tensors().reshape(4, 3)),
        (lambda: tensors(), lambda: tensors().int()),
        (lambda: [tensors()], lambda: (tensors(),)),
        (lambda: [tensors()], lambda: [tensors(), tensors()]),
        (lambda: {"a": tensors()}, lambda: {"b": tensors()}),
        (lambda: Output(tensors()), lambda: Output(tensors(), "other")),
        (lambda: 1, lambda: 2),
        (lambda: None, lambda: 0),
        (lambda: "1", lambda: 1),
    ],
)
def test_what_differs_has_another_digest(one, other):
    assert digest(one()) == digest(one())
    assert digest(one()) != digest(other())


@pytest.mark.parametrize("view", [lambda t: t.t(), lambda t: t[:, 1:3], lambda t: t[1], lambda t: t.expand(2, 3, 4)])
def test_a_view_is_its_elements_in_order(view):
    assert digest(view(tensors())) == digest(view(tensors()).contiguous())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.bool, torch.int64, torch.complex64])
@pytest.mark.parametrize("view", [lambda t: t, lambda t: t.t(), lambda t: t[:, 1:]])
def test_the_device_makes_no_difference_and_keeps_nothing(dtype, view):
    there = digest(view(tensors().to(dtype)))
    with emulated_cuda():
        result = view(tensors().to(dtype).cuda())
        before, peak = torch.cuda.memory_allocated(), torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        assert digest(result) == there
        assert torch.cuda.memory_allocated() == before
        assert torch.cuda.max_memory_allocated() == peak


def test_conjugates_and_negatives():
    values = torch.tensor([1 + 2j, 3 - 4j])
    assert digest(values.conj()) == digest(values.conj().resolve_conj()) != digest(values)
    assert digest(values.conj().imag) == digest(values.conj().imag.resolve_neg())


def test_tensors_that_need_gradients_sparse_ones_and_empty_ones():
    weight = tensors().requires_grad_()
    assert digest(weight) == digest(tensors())
    assert digest(tensors().to_sparse()) != digest(tensors().to_sparse() * 2)
    assert digest(torch.empty(0)) != digest(torch.empty(0, 1))


def test_sets_and_addresses_do_not_depend_on_the_process():
    class Opaque:
        pass

    assert digest({"a", "b", "c"}) == digest({"c", "b", "a"})
    assert digest(Opaque()) == digest(Opaque())


def test_deep_nests_and_cycles_end():
    nest = []
    nest.append(nest)
    assert digest(nest) == digest(nest)


def test_an_object_that_cannot_say_what_it_is():
    class Broken:
        def __repr__(self):
            raise RuntimeError("half made")

    assert digest(Broken()) == digest(Broken())

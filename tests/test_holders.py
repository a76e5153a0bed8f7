"""Who holds a tensor: each kind of holder made on purpose, and the chain that must name it."""

from __future__ import annotations

import gc
import sys
import threading
import types
import weakref
from collections import deque

import pytest

torch = pytest.importorskip("torch")

from pytest_sglmem.holders import NOBODY, chains, chains_for_blocks, draw  # noqa: E402


@pytest.fixture
def module(monkeypatch):
    made = types.ModuleType("engine")
    monkeypatch.setitem(sys.modules, "engine", made)
    return made


class Engine:
    def __init__(self):
        self.store = {}


class Slotted:
    __slots__ = ("staging",)


def held_by(block):
    """The chains, by the block's address alone: this function's own reference must not show."""
    address = block.untyped_storage().data_ptr()
    del block
    return chains_for_blocks([address])


def address_of(build):
    """The address of the tensor that `build` stores somewhere and returns."""
    return build().untyped_storage().data_ptr()


def test_a_module_attribute_an_instance_attribute_and_a_key(module):
    module.ENGINE = Engine()
    module.ENGINE.store["request-1"] = torch.zeros(8)
    where = address_of(lambda: module.ENGINE.store["request-1"])
    assert chains_for_blocks([where]) == ("engine.ENGINE -> .store -> ['request-1'] -> Tensor",)


def test_a_class_attribute():
    Engine.shared = [torch.zeros(8)]
    try:
        (chain,) = chains_for_blocks([address_of(lambda: Engine.shared[0])])
    finally:
        del Engine.shared
    assert chain == f"{__name__}.Engine -> .shared -> [0] -> Tensor"


def test_slots_and_deques(module):
    module.POOL = deque([Slotted()])
    module.POOL[0].staging = torch.zeros(8)
    assert chains_for_blocks([address_of(lambda: module.POOL[0].staging)]) == (
        "engine.POOL -> [0] -> .staging -> Tensor",
    )


def test_a_closure_of_the_step():
    def setup():
        engine = Engine()

        def step(_):
            engine.store[1] = torch.zeros(8)
            return engine.store[1]

        return step

    step = setup()
    where = step(0).untyped_storage().data_ptr()
    assert chains_for_blocks([where], roots={id(step): "step"}) == (
        "step -> closure engine -> .store -> [1] -> Tensor",
    )


def test_chains_that_differ_in_a_key_only_are_said_once(module):
    module.STORE = {f"k{i}": torch.zeros(8) for i in range(5)}
    where = [address_of(lambda i=i: module.STORE[f"k{i}"]) for i in range(5)]
    assert len(chains_for_blocks(where)) == 1


def test_a_view_names_the_view(module):
    module.HEADS = [torch.zeros(1 << 10)[:16]]
    assert chains_for_blocks([address_of(lambda: module.HEADS[0])]) == (
        "engine.HEADS -> [0] -> Tensor (a view of 64 of 4096 B)",
    )


def test_a_storage_without_a_tensor(module):
    module.RAW = torch.zeros(8).untyped_storage()
    assert chains_for_blocks([module.RAW.data_ptr()]) == ("engine.RAW -> UntypedStorage",)


def test_the_traceback_of_a_held_exception(module):
    def fails():
        block = torch.zeros(8)
        module.where = block.untyped_storage().data_ptr()
        raise ValueError("no room")

    try:
        fails()
    except ValueError as error:
        module.ERROR = error.with_traceback(error.__traceback__.tb_next)
    (chain,) = chains_for_blocks([module.where])
    assert chain.startswith("engine.ERROR -> traceback of ValueError('no room') -> local block of ")
    assert "in fails" in chain


def test_a_suspended_generator(module):
    def blocks():
        block = torch.zeros(8)
        yield block.untyped_storage().data_ptr()
        del block

    module.STREAM = blocks()
    where = next(module.STREAM)
    (chain,) = chains_for_blocks([where])
    assert chain.startswith("engine.STREAM -> suspended ")
    assert chain.endswith("in blocks -> local block -> Tensor")


def test_a_local_of_a_thread_that_runs():
    ready, done, found = threading.Event(), threading.Event(), []

    def worker():
        block = torch.zeros(8)
        found.append(block.untyped_storage().data_ptr())
        ready.set()
        done.wait()

    thread = threading.Thread(target=worker)
    thread.start()
    ready.wait()
    try:
        (chain,) = chains_for_blocks(found)
    finally:
        done.set()
        thread.join()
    assert chain.endswith("in worker -> local block -> Tensor")


def test_a_gradient(module):
    module.WEIGHT = torch.zeros(8, requires_grad=True)
    (module.WEIGHT * 2).sum().backward()
    assert chains_for_blocks([module.WEIGHT.grad.untyped_storage().data_ptr()]) == ("engine.WEIGHT -> Tensor.grad",)


def test_the_autograd_graph(module):
    weight = torch.ones(8, requires_grad=True)
    hidden = torch.full((8,), 3.0)
    where = hidden.untyped_storage().data_ptr()
    module.LOSSES = [(weight * hidden).sum()]
    del hidden
    assert chains_for_blocks([where]) == ("engine.LOSSES -> [0] -> Tensor.grad_fn -> MulBackward0._saved_other",)


def test_what_only_cpp_holds():
    weight = torch.ones(8, requires_grad=True)
    hidden = torch.full((8,), 3.0)
    where = hidden.untyped_storage().data_ptr()
    node = (weight * hidden).grad_fn.next_functions  # noqa: F841
    del hidden
    gc.collect()
    assert chains_for_blocks([where]) in ((), (NOBODY,))


@pytest.fixture
def freezing():
    """The test may freeze the heap, which is as it was afterwards."""
    assert not gc.get_freeze_count()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("early", [True, False], ids=["tensor frozen too", "tensor after the freeze"])
def test_a_holder_that_the_code_under_test_froze(module, freezing, early):
    module.ENGINE = Engine()
    if early:
        module.ENGINE.store["k"] = torch.zeros(8)
    gc.collect()
    gc.freeze()
    if not early:
        module.ENGINE.store["k"] = torch.zeros(8)
    where = address_of(lambda: module.ENGINE.store["k"])
    frozen = gc.get_freeze_count()
    assert chains_for_blocks([where]) == ("engine.ENGINE -> .store -> ['k'] -> Tensor",)
    assert gc.get_freeze_count() >= frozen > 0


def test_a_heap_that_was_not_frozen_stays_so(module, freezing):
    module.STORE = {"k": torch.zeros(8)}
    assert chains_for_blocks([address_of(lambda: module.STORE["k"])])
    assert chains_for_blocks([1]) == ()
    assert gc.get_freeze_count() == 0


def test_the_search_of_a_frozen_heap_freezes_no_garbage_and_frees_none_that_was_frozen(freezing):
    def garbage():
        made = Engine()
        made.me = made
        return weakref.ref(made)

    was_on = gc.isenabled()
    gc.disable()
    try:
        frozen = garbage()
        gc.freeze()
        fresh = garbage()
        assert chains_for_blocks([1]) == ()
        assert (fresh() is None, frozen() is None) == (True, False)
        assert gc.get_freeze_count() > 0
    finally:
        (gc.enable if was_on else gc.disable)()


def test_the_heap_is_frozen_again_when_the_search_fails(module, freezing, monkeypatch):
    from pytest_sglmem import holders

    looked = []

    def fails(*_):
        looked.append(gc.get_freeze_count())
        if len(looked) == 2:
            raise MemoryError
        return [], []

    monkeypatch.setattr(holders, "_owners", fails)
    gc.freeze()
    with pytest.raises(MemoryError):
        chains_for_blocks([1])
    assert looked[0] > looked[1] == 0
    assert gc.get_freeze_count() > 0


def test_nothing_over_the_block():
    assert chains_for_blocks([1]) == ()


def test_an_object_without_torch(module):
    module.HISTORY = [Engine()]
    (chain,) = chains(module.HISTORY[0])
    assert chain == "engine.HISTORY -> [0] -> Engine"


def test_the_search_keeps_nothing(module):
    module.STORE = {"k": torch.zeros(8)}
    where = address_of(lambda: module.STORE["k"])
    chains_for_blocks([where])
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(3):
        chains_for_blocks([where])
    gc.collect()
    assert len(gc.get_objects()) <= before + 1


def fake_graphviz(folder, monkeypatch, script):
    dot = folder / "dot"
    dot.write_text(f"#!{sys.executable}\n{script}")
    dot.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_an_image_of_the_reference_graph(module, tmp_path, monkeypatch):
    fake_graphviz(tmp_path, monkeypatch, "import sys; open(sys.argv[3], 'w').write(sys.argv[1] + sys.stdin.read())")
    module.STORE = {"k": torch.zeros(8)}
    where = address_of(lambda: module.STORE["k"])
    chains_for_blocks([where], graph_to=tmp_path / "graph.png")
    drawn = (tmp_path / "graph.png").read_text()
    assert drawn.startswith("-Tpngdigraph")
    assert "Tensor" in drawn
    assert "module" in drawn


def test_graphviz_that_fails_fails_nothing(module, tmp_path, monkeypatch):
    fake_graphviz(tmp_path, monkeypatch, "raise SystemExit(1)")
    module.BLOCK = torch.zeros(8)
    assert not draw(module.BLOCK, tmp_path / "graph.png")


def test_an_image_only_where_graphviz_is(module, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    module.BLOCK = torch.zeros(8)
    assert not draw(module.BLOCK, tmp_path / "graph.png")
    assert list(tmp_path.iterdir()) == []


def test_an_injected_fault_is_named_as_one():
    from pytest_sglmem.faults import armed, parse

    fault = parse("step=retain(4096)", origin="here")
    with armed([fault], rank=0) as arming:
        arming.kept.append(torch.zeros(8))
        (chain,) = chains_for_blocks([address_of(lambda: arming.kept[-1])], roots={id(arming): "an injected fault"})
    assert chain.startswith("an injected fault -> .kept -> [")

"""Who holds a tensor: each kind of holder made on purpose, and the chain that must name it."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextvars
import functools
import gc
import queue
import sys
import threading
import types
import weakref
from collections import deque

import pytest

torch = pytest.importorskip("torch")

from pytest_sglmem.holders import NOBODY, Deadline, chains, chains_for_blocks, draw, is_holder, pattern  # noqa: E402


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


def test_a_graph_whose_nodes_have_no_lasting_objects(module):
    """Up to torch 2.11 the object of a node is made when asked for: two may have one `id`, one after another."""

    class Node:
        def __init__(self, graph):
            self.graph = graph

    class Mul(Node):
        next_functions = ()
        _saved_other = property(lambda self: self.graph.value())

    class Sum(Node):
        next_functions = property(lambda self: ((Mul(self.graph), 0),))

    class Loss(torch.Tensor):
        is_leaf = False
        retains_grad = False
        grad_fn = property(lambda self: Sum(self.graph))

    where = []
    module.LOSSES = [torch.zeros(1).as_subclass(Loss) for _ in range(6)]
    for loss in module.LOSSES:
        block, loss.graph = torch.zeros(8), torch.futures.Future()
        where.append(block.untyped_storage().data_ptr())
        loss.graph.set_result(block)  # kept by C++, as in a graph
        del block, loss
    assert [chains_for_blocks([one]) for one in where] == [
        (f"engine.LOSSES -> [{at}] -> Loss.grad_fn -> Mul._saved_other",) for at in range(6)
    ]


VAR = contextvars.ContextVar("request_block")


class Cached:
    @functools.cached_property
    def block(self):
        return torch.zeros(8)


class Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, block):
        ctx.save_for_backward(block)
        return weight * 2


class Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, block):
        ctx.cache = {"k": block}
        return weight * 2


class RaisingKey:
    def __repr__(self):
        raise RuntimeError("outside of a request")


class Proxy:
    def __init__(self, block):
        self.block = block

    @property
    def __class__(self):
        raise RuntimeError("outside of a request")


class PerThread(threading.local):
    def __init__(self):
        self.cache = {}


def of_a_thread(module, block):
    module.LOCAL = PerThread()
    module.LOCAL.cache["k"] = block


def of_a_kept_context(module, block):
    module.CONTEXT = contextvars.Context()
    module.CONTEXT.run(VAR.set, block)


def of_a_task(module, block):
    async def works():
        VAR.set([module.__dict__.pop("block")])
        await asyncio.sleep(100)

    async def starts():
        module.TASK = asyncio.get_running_loop().create_task(works())
        await asyncio.sleep(0)

    module.block = block
    module.LOOP = asyncio.new_event_loop()
    module.LOOP.run_until_complete(starts())


def of_a_coroutine(module, block):
    async def works(kept):
        await asyncio.sleep(100)
        del kept

    async def starts():
        module.TASK = asyncio.get_running_loop().create_task(works(block))
        await asyncio.sleep(0)

    module.LOOP = asyncio.new_event_loop()
    module.LOOP.run_until_complete(starts())


def of_a_partial(module, block):
    module.CALL = functools.partial(print, block)


def of_a_cache_key(module, block):
    module.CACHE = functools.lru_cache(lambda one: None)
    module.CACHE(block)


def of_a_finalizer(module, block):
    module.OWNER = Engine()
    weakref.finalize(module.OWNER, id, block).atexit = False


def exit_handler(block):
    """Registered with what it is to be called with."""


def of_an_exit_handler(module, block):
    atexit.register(exit_handler, block)


def of_a_queue(module, block):
    module.QUEUE = queue.Queue()
    module.QUEUE.put(block)


def of_a_simple_queue(module, block):
    module.QUEUE = queue.SimpleQueue()
    module.QUEUE.put(block)


def of_a_future(module, block):
    module.FUTURE = concurrent.futures.Future()
    module.FUTURE.set_result(block)


def of_a_default(module, block):
    def f(one=block):
        return one

    module.F = f


def of_a_hook(module, block):
    module.MODEL = torch.nn.Linear(1, 1)
    module.MODEL.register_forward_hook(lambda *_, one=block: None)


def of_a_tensor_hook(module, block):
    module.WEIGHT = torch.ones(8, requires_grad=True)
    module.WEIGHT.register_hook(functools.partial(lambda one, grad: None, block))


def of_a_node_hook(module, block):
    module.OUT = torch.ones(8, requires_grad=True) * 2
    module.OUT.grad_fn.register_hook(functools.partial(lambda *_: None, block))


def of_an_optimizer(module, block):
    module.WEIGHT = torch.ones(8, requires_grad=True)
    module.ADAM = torch.optim.SGD([module.WEIGHT], lr=0.1)
    module.ADAM.state[module.WEIGHT]["momentum_buffer"] = block


def of_a_saved_tensor(module, block):
    module.OUT = Saves.apply(torch.ones(8, requires_grad=True), block).sum()


def of_a_function_context(module, block):
    module.OUT = Keeps.apply(torch.ones(8, requires_grad=True), block).sum()


def of_the_context_behind_a_tensor(module, block):
    module.OUT = Keeps.apply(torch.ones(8, requires_grad=True), block)


def of_a_packed_tensor(module, block):
    with torch.autograd.graph.saved_tensors_hooks(lambda one: {"packed": one}, lambda kept: kept["packed"]):
        module.OUT = torch.ones(8, requires_grad=True) * block


def of_a_saved_tensor_that_changed(module, block):
    module.OUT = (torch.ones(8, requires_grad=True) * block).sum()
    block.add_(1)


def of_a_leaf_of_a_graph(module, block):
    module.OUT = (block.requires_grad_() * 2).sum()


def of_a_key_that_cannot_be_shown(module, block):
    module.STORE = {RaisingKey(): block}


def of_an_object_that_lies_about_its_class(module, block):
    module.PROXY = Proxy(block)


def of_a_dlpack_capsule(module, block):
    module.CAPSULE = torch.utils.dlpack.to_dlpack(block)


HELD = {
    of_a_thread: "engine.LOCAL -> (a thread's) .cache -> ['k'] -> Tensor",
    of_a_kept_context: "engine.CONTEXT -> ContextVar request_block -> Tensor",
    of_a_task: "ContextVar request_block -> [0] -> Tensor",
    of_a_coroutine: "in works -> local kept -> Tensor",
    of_a_partial: "engine.CALL -> .args -> [0] -> Tensor",
    of_a_cache_key: "engine.CACHE -> cache of of_a_cache_key.<locals>.<lambda> -> [0] -> Tensor",
    of_a_finalizer: "weakref.finalize -> ._registry -> [",
    of_an_exit_handler: "that no module and no frame names -> [0] -> Tensor",
    of_a_queue: "engine.QUEUE -> .queue -> [0] -> Tensor",
    of_a_simple_queue: "engine.QUEUE -> _queue.SimpleQueue -> ",  # up to 3.12 there is a list in it
    of_a_future: "engine.FUTURE -> ._result -> Tensor",
    of_a_default: "engine.F -> of_a_default.<locals>.f default -> Tensor",
    of_a_hook: "engine.MODEL -> ._forward_hooks -> [",
    of_a_tensor_hook: "engine.WEIGHT -> ._backward_hooks -> [",
    of_a_node_hook: "] -> .args -> [0] -> Tensor",
    of_an_optimizer: "engine.ADAM -> .state -> [<Tensor (8,)>] -> ['momentum_buffer'] -> Tensor",
    of_a_saved_tensor: "engine.OUT -> Tensor.grad_fn -> SavesBackward.saved_tensors",
    of_a_function_context: "engine.OUT -> Tensor.grad_fn -> KeepsBackward -> .cache -> ['k'] -> Tensor",
    of_the_context_behind_a_tensor: "engine.OUT -> .grad_fn -> KeepsBackward -> .cache -> ['k'] -> Tensor",
    of_a_packed_tensor: "engine.OUT -> Tensor.grad_fn -> MulBackward0._saved_other",
    of_a_saved_tensor_that_changed: (
        "engine.OUT -> Tensor.grad_fn -> MulBackward0._saved_other"
        if hasattr(torch._C._autograd.SavedTensor, "data")
        else NOBODY  # older torch shows what it saved only unpacked, and refuses what has changed
    ),
    of_a_leaf_of_a_graph: "engine.OUT -> Tensor.grad_fn -> AccumulateGrad.variable",
    of_a_key_that_cannot_be_shown: "engine.STORE -> [<RaisingKey>] -> Tensor",
    of_an_object_that_lies_about_its_class: "engine.PROXY -> .block -> Tensor",
    of_a_dlpack_capsule: NOBODY,
}


@pytest.fixture
def leaving_nothing(module):
    """What a case registered with the interpreter goes with the test."""
    yield
    atexit.unregister(exit_handler)
    task, loop = getattr(module, "TASK", None), getattr(module, "LOOP", None)
    if task is not None:
        task.cancel()
        loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
    if loop is not None:
        loop.close()


@pytest.mark.usefixtures("leaving_nothing")
@pytest.mark.parametrize("hold", HELD, ids=lambda hold: hold.__name__)
def test_kinds_of_holders(module, hold):
    def held():
        block = torch.zeros(8)
        hold(module, block)
        return block.untyped_storage().data_ptr()

    (chain,) = contextvars.Context().run(chains_for_blocks, [held()])
    assert HELD[hold] in chain
    assert is_holder(chain) == (chain != NOBODY)


def test_a_context_variable():
    VAR.set({"k": [torch.zeros(8)]})
    try:
        where = address_of(lambda: VAR.get()["k"][0])
        assert chains_for_blocks([where]) == ("ContextVar request_block -> ['k'] -> [0] -> Tensor",)
    finally:
        VAR.set(None)


@pytest.mark.parametrize("log_first", [True, False])
def test_several_holders_of_several_blocks(module, log_first):
    """The dictionary of the module is come to on the way from one before it is known to hold the other too."""
    if log_first:
        module.LOG, module.STORE = [torch.zeros(8) for _ in range(40)], {"k": [torch.zeros(8) for _ in range(40)]}
    else:
        module.STORE, module.LOG = {"k": [torch.zeros(8) for _ in range(40)]}, [torch.zeros(8) for _ in range(40)]
    where = [one.untyped_storage().data_ptr() for one in (*module.LOG, *module.STORE["k"])]
    found = chains_for_blocks(where)
    assert sorted(map(pattern, found)) == ["engine.LOG -> [] -> Tensor", "engine.STORE -> [] -> [] -> Tensor"]
    assert [pattern(one) for one in chains_for_blocks(where, limit=1)] == [pattern(found[0])]


def test_a_graph_is_named_beside_what_a_root_leads_to(module):
    module.WEIGHT = torch.ones(8, requires_grad=True)
    module.SUM = 0
    where = []
    for _ in range(3):
        hidden = torch.ones(8)
        where.append(hidden.untyped_storage().data_ptr())
        module.SUM = module.SUM + (module.WEIGHT * hidden).sum()
        del hidden
    assert chains_for_blocks([*where, address_of(lambda: module.SUM)]) == (
        "engine.SUM -> Tensor",
        "engine.SUM -> Tensor.grad_fn -> MulBackward0._saved_other",
    )


def test_a_search_that_is_out_of_time_says_so(module):
    module.STORE = {"k": torch.zeros(8)}
    where = address_of(lambda: module.STORE["k"])
    assert chains_for_blocks([where], deadline=Deadline(0)) == ("the search for holders stopped after 0 s",)
    assert not is_holder("the search for holders stopped after 0 s")


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
    """The test may freeze the heap, which is thawed afterwards. Gives what is not frozen yet: 3.12 starts with 375."""
    gc.unfreeze()
    yield gc.get_freeze_count() + 1000
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
    assert gc.get_freeze_count() >= frozen > freezing


def test_a_heap_that_was_not_frozen_stays_so(module, freezing):
    module.STORE = {"k": torch.zeros(8)}
    assert chains_for_blocks([address_of(lambda: module.STORE["k"])])
    assert chains_for_blocks([1]) == ()
    assert gc.get_freeze_count() < freezing


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
        assert gc.get_freeze_count() > freezing
    finally:
        (gc.enable if was_on else gc.disable)()


def test_the_heap_is_frozen_again_when_the_search_fails(module, freezing, monkeypatch):
    from pytest_sglmem import holders

    looked = []

    def fails(*_):
        looked.append(gc.get_freeze_count())
        if len(looked) == 2:
            raise MemoryError("no room")
        return [], []

    monkeypatch.setattr(holders, "_owners", fails)
    gc.freeze()
    (said,) = chains_for_blocks([1])
    assert said == "the search for holders failed: MemoryError: no room"
    assert not is_holder(said)
    assert looked[0] > freezing > looked[1]
    assert gc.get_freeze_count() > freezing


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

"""What only the emulated device has: entry and exit, refusals, threads, finalizers, forks, and its published list."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import types

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.jit._builtins import _get_builtin_table  # noqa: E402

from pytest_sglmem.emulated import current, emulated_cuda, refused, supported  # noqa: E402

MIB = 1 << 20
CLASSES = (
    *(torch.Tensor, torch.UntypedStorage, torch.TypedStorage, threading.Thread, torch.autocast),
    *(torch._C.ScriptFunction, torch._C.ScriptMethod, FakeTensorMode),
)


def everything():
    """Each attribute of each loaded torch module and of the classes that are patched."""
    modules = [module for name, module in sys.modules.items() if name.split(".")[0] == "torch" and module is not None]
    owners = [*modules, torch._C, torch._C._nn, *CLASSES]
    found = {(id(owner), name): value for owner in owners for name, value in list(vars(owner).items())}
    return found | {("torch.jit", str(key)): name for key, name in _get_builtin_table().items()}


def test_exit_puts_everything_back():
    with emulated_cuda():  # what torch loads on first use is loaded now
        torch.nn.Linear(2, 2).cuda()(torch.ones(2, device="cuda")).sum().backward()
    before = everything()
    with emulated_cuda(2), torch.autocast("cuda", dtype=torch.bfloat16):
        torch.ones(2, 2, device="cuda").softmax(-1)
        assert torch.cuda.is_available()
    after = everything()
    # Not ours: the dispatch modes' own bookkeeping, a new value of an equal kind.
    changed = {name for key, value in before.items() if after.get(key, None) is not value for name in [key[1]]}
    assert changed <= {"_is_in_torch_dispatch_mode", "_stance"}
    assert after.keys() == before.keys()
    assert not hasattr(torch._C, "_cuda_memoryStats") or torch.version.cuda


def test_exit_after_an_error_puts_everything_back():
    before = everything()
    with pytest.raises(ZeroDivisionError), emulated_cuda():
        torch.ones(1 // int(torch.zeros(1, device="cuda").item()))
    after = everything()
    assert {key for key in before if after.get(key) is not before[key]} == set()
    assert current() is None


def test_what_is_left_after_exit_is_the_cpus():
    with emulated_cuda():
        left = torch.ones(3, device="cuda")
    assert left.device.type == "cpu"
    assert (left + torch.ones(3)).tolist() == [2, 2, 2]
    del left


def test_entered_again_it_is_the_same_one():
    with emulated_cuda(2) as outer:
        with emulated_cuda(1) as inner:
            assert inner is outer
            assert torch.cuda.device_count() == 2
        assert current() is outer
        with (
            pytest.raises(ValueError, match=r"an emulation of 2 devices is on already \(asked for 3\)"),
            emulated_cuda(3),
        ):
            pass


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"devices": 0}, r"devices must be >= 1 \(got 0\)"), ({"memory": 0}, r"memory must be .* \(got 0\)")],
)
def test_wrong_arguments(wrong, said):
    with pytest.raises(ValueError, match=said), emulated_cuda(**wrong):
        pass


def test_the_memory_is_as_large_as_asked():
    with emulated_cuda(memory=64 * MIB):
        kept = torch.empty(44 * MIB, dtype=torch.uint8, device="cuda")
        torch.empty(20 * MIB, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.empty(20 * MIB + 1, dtype=torch.uint8, device="cuda")
        assert str(caught.value).startswith(
            "CUDA out of memory. Tried to allocate 22.00 MiB. "
            "GPU 0 has a total capacity of 64.00 MiB of which 20.00 MiB is free."
        )
        with pytest.raises(torch.OutOfMemoryError):
            kept.repeat(2)
        assert torch.cuda.memory_allocated() == 44 * MIB


# -- never a wrong answer ----------------------------------------------------------------------------------------------


def test_every_public_name_is_emulated_or_raises_with_its_name():
    names = refused()
    assert {"torch.cuda.CUDAGraph", "torch.cuda.MemPool", "torch.cuda.utilization", "torch.cuda.cudart"} <= set(names)
    with emulated_cuda():
        for name in names:
            owner: object = torch
            for part in name.split(".")[1:]:
                owner = getattr(owner, part)
            with pytest.raises(NotImplementedError, match=name):
                owner()


def test_the_published_list_names_what_is_there():
    listed = supported()
    assert listed["torch.cuda.memory_allocated"]
    assert not set(listed) & set(refused())
    for name in listed:
        owner: object = torch
        for part in name.split(".")[1:]:
            owner = getattr(owner, part)
        assert not isinstance(owner, types.ModuleType)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_every_listed_name_that_needs_no_argument_answers():
    arguments = {
        *("set_device", "set_stream", "can_device_access_peer", "set_rng_state", "set_rng_state_all", "manual_seed"),
        *("manual_seed_all", "device", "device_of", "ExternalStream", "StreamContext", "stream", "device_index"),
        *("get_stream_from_external", "set_per_process_memory_fraction", "set_device_idx", "set_device_index"),
        *("CudaError", "range_push", "range_start", "range_end", "mark", "range"),
    }
    with emulated_cuda():
        for name in supported():
            *path, last = name.split(".")[1:]
            if last in arguments or "comm" in path:
                continue
            owner: object = torch
            for part in [*path, last]:
                owner = getattr(owner, part)
            owner()


def test_a_refused_class_is_still_a_class():
    with emulated_cuda():
        assert not isinstance(3, torch.cuda.CUDAGraph)


def test_device_memory_is_not_handed_out():
    with emulated_cuda():
        made = torch.ones(2, device="cuda")
        with pytest.raises(NotImplementedError, match="__dlpack__"):
            torch.from_dlpack(made)
        with pytest.raises(NotImplementedError, match="__cuda_array_interface__"):
            made.__cuda_array_interface__
        assert torch.from_dlpack(torch.ones(2)).tolist() == [1, 1]


def test_autocast_casts_as_cuda_does():
    functional = torch.nn.functional
    with emulated_cuda():
        linear, given = torch.nn.Linear(4, 4).cuda(), torch.randn(2, 4, device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = linear(given)
            found = [out, given @ given.T, out.softmax(-1), torch.exp(out), functional.layer_norm(out, (4,)), out.sum()]
            found += [out + given, torch.cat([out, given]), torch.relu(out), out.pow(2)]
            with torch.autocast("cuda", enabled=False):
                found.append(given @ given.T)
        half, full = torch.bfloat16, torch.float32
        assert [one.dtype for one in found] == [half, half, full, full, full, full, full, full, half, full, full]
        assert not torch.is_autocast_enabled("cpu")
        out.float().sum().backward()
        assert linear.weight.grad.dtype == full
        assert torch.exp(out).dtype == half


def test_compiled_code_runs_as_it_is_written():
    with emulated_cuda():
        doubled = torch.compile(lambda x: x * 2 + torch.ones(3, device="cuda"))
        out = doubled(torch.ones(3, device="cuda"))
        assert out.is_cuda
        assert out.tolist() == [3, 3, 3]
        assert torch.cuda.memory_allocated() == 512


# -- code for another machine: scripts, graphs, fakes ----------------------------------------------------------------


def plain(x: torch.Tensor, where: torch.device) -> torch.Tensor:
    return torch.softmax(x, 0).to(where) + torch.arange(3, device=where) + x.new_zeros(3)


def anywhere(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(3, device=x.device)


def on_cuda(n: int) -> torch.Tensor:
    return torch.empty(n, device="cuda").fill_(1)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(self.linear(x), (3,)) + torch.ones(3)


@pytest.mark.filterwarnings("ignore:.*torch.jit")  # torch calls it old
def test_scripted_code_for_the_cpu_is_left_alone(tmp_path):
    given, host = torch.ones(2, 3), torch.device("cpu")
    layer = Layer()
    expected = layer(given)
    with emulated_cuda():
        assert torch.equal(torch.jit.script(plain)(given[0], host), plain(given[0], host))
        assert torch.equal(torch.jit.script(layer)(given), expected)
        assert torch.equal(torch.jit.trace(layer, (given,))(given), expected)
        torch.jit.script(layer).save(tmp_path / "layer.pt")
        assert torch.equal(torch.jit.load(tmp_path / "layer.pt")(given), expected)
        assert torch.jit.script(on_cuda).name == "on_cuda"  # to compile needs no device
    assert torch.equal(torch.jit.script(plain)(given[0], host), plain(given[0], host))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: torch.jit.script(anywhere)(torch.ones(3, device="cuda")), "a call of 'anywhere' on CUDA"),
        (lambda: torch.jit.script(plain)(torch.ones(3), torch.device("cuda")), "a call of 'plain' on CUDA"),
        (lambda: torch.jit.script(on_cuda)(3), "aten.empty.memory_format on CUDA"),
        (lambda: torch.jit.script(Layer()).cuda()(torch.ones(3, device="cuda")), "a call of 'forward' on CUDA"),
        (lambda: torch.jit.script(Layer()).cuda()(torch.ones(3)), "on CUDA in code of torch.jit"),
        (lambda: torch.jit.trace(anywhere, torch.ones(3, device="cuda")), "torch.jit.trace on CUDA"),
        (lambda: torch.jit.load("nowhere", map_location="cuda"), "torch.jit.load"),
    ],
)
def test_scripted_code_never_takes_an_emulated_tensor_for_the_cpus(call, said):
    with emulated_cuda(), pytest.raises(NotImplementedError, match=said):
        call()


def test_fake_tensors_are_torchs_own_and_count_nothing():
    with emulated_cuda():
        given = torch.ones(3, device="cuda")
        base = torch.cuda.memory_allocated()
        with FakeTensorMode() as mode:
            made = torch.empty(1 << 40, device="cuda") * 2
            faked = mode.from_tensor(given) + 1
        assert (made.device, faked.device) == (torch.device("cuda", 0),) * 2
        assert torch.cuda.memory_allocated() == base


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.empty(3).to("cuda"),
        lambda: torch.empty(3, device="cuda:1").to(device="cuda"),
        lambda: torch.empty(3).cuda(),
        lambda: torch.empty(3, device="cuda").copy_(torch.empty(3)),
        lambda: torch.empty(3, device="cuda").uniform_(0, 1),
        lambda: torch.tensor([1.0], device="cuda"),
        lambda: torch.as_tensor([1.0], device="cuda"),
        lambda: torch.tensor([1.0]).to("cuda"),
    ],
)
def test_fake_tensors_move_to_the_device_and_are_made_there(call):
    with emulated_cuda(2), FakeTensorMode():
        assert call().device == torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda fake: fake[0], "__getitem__ of a fake CUDA tensor"),
        (lambda fake: fake.__setitem__(0, 1.0), "__setitem__ of a fake CUDA tensor"),
        (lambda fake: ~fake.long(), "__invert__ of a fake CUDA tensor"),
        (lambda fake: fake.nonzero(), "nonzero of a fake CUDA tensor"),
    ],
)
@pytest.mark.skipif(torch.version.cuda is not None, reason="a CUDA build may do it")
def test_what_of_a_fake_tensor_cpp_cannot_do_says_its_name(call, said):
    with emulated_cuda(), FakeTensorMode():
        fake = torch.empty(3, device="cuda")
        with pytest.raises(NotImplementedError, match=said):
            call(fake)


def test_an_error_that_has_its_own_reason_is_left_as_it_is():
    with emulated_cuda(memory=1 << 30), pytest.raises(torch.cuda.OutOfMemoryError) as caught:
        torch.empty(1 << 31, device="cuda")
    assert caught.value.__cause__ is None


def test_a_graph_made_of_fakes_says_cuda_and_one_of_real_tensors_is_refused():
    def doubled(x):
        return x * 2 + torch.ones(3, device="cuda")

    with emulated_cuda():
        given = torch.ones(3, device="cuda")
        graph = make_fx(doubled, tracing_mode="fake")(given)
        assert "device(type='cuda'" in graph.code
        assert graph(given).is_cuda
        with pytest.raises(NotImplementedError, match=r"make_fx.* of aten::ones on a CUDA device"):
            make_fx(doubled)(given)


def test_a_gradient_of_a_fake_is_refused_where_cpp_would_end_the_process():
    with emulated_cuda():
        linear = torch.nn.Linear(3, 3).cuda()
        given = torch.ones(2, 3, device="cuda")
        with pytest.raises(NotImplementedError, match="a gradient of a fake CUDA tensor"):
            make_fx(linear, tracing_mode="fake")(given.requires_grad_())
        with FakeTensorMode(), pytest.raises(NotImplementedError, match="a gradient of a fake CUDA tensor"):
            torch.tensor([1.0], device="cuda", requires_grad=True)
        with FakeTensorMode(), pytest.raises(NotImplementedError, match="a gradient of a fake CUDA tensor"):
            torch.ones(3, requires_grad=True).to("cuda")
        with FakeTensorMode() as mode:
            assert mode.from_tensor(torch.ones(2, requires_grad=True)).requires_grad


class ForeignMemory:
    __cuda_array_interface__ = {"shape": (1,), "typestr": "<f4", "data": (4096, False), "version": 2}


def symmetric_memory():
    from torch.distributed import _symmetric_memory

    return _symmetric_memory.empty(4, device=torch.device("cuda:0"))


def flexible_attention_with_gradient():
    from torch.nn.attention.flex_attention import flex_attention

    given = torch.ones(1, 1, 16, 16, device="cuda", requires_grad=True)
    return flex_attention(given, given, given)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: torch.nested.nested_tensor([torch.ones(2)], device="cuda"), "aten::_nested_tensor_from_tensor_list"),
        (lambda: torch.utils.dlpack.to_dlpack(torch.ones(2, device="cuda")), "to_dlpack"),
        (lambda: torch.as_tensor(ForeignMemory(), device="cuda"), "torch.as_tensor of foreign CUDA memory"),
        (lambda: torch.set_default_tensor_type(torch.cuda.FloatTensor), "torch.set_default_tensor_type"),
        (lambda: torch.cuda.memory._get_current_allocator(), "torch._C._cuda_getAllocator"),
        (lambda: torch._C._cuda_getCurrentBlasHandle(), "torch._C._cuda_getCurrentBlasHandle"),
        (lambda: torch.cuda.jiterator._create_jit_fn("T f(T x) { return x; }"), "torch.cuda.jiterator._create_jit_fn"),
        (symmetric_memory, "torch.distributed._symmetric_memory"),
        (flexible_attention_with_gradient, "a gradient of a fake CUDA tensor"),
        (lambda: torch.cuda.CUDAGraph(), "torch.cuda.CUDAGraph"),
        (lambda: torch.cuda.MemPool(), "torch.cuda.MemPool"),
        (lambda: torch.cuda.CUDAPluggableAllocator("a.so", "b", "c"), "torch.cuda.CUDAPluggableAllocator"),
    ],
)
def test_what_is_not_emulated_says_its_name(call, said):
    with emulated_cuda(), pytest.raises(NotImplementedError, match=said):
        call()


def test_the_c_layer_still_lacks_what_it_lacks():
    with emulated_cuda():
        assert not hasattr(torch._C, "no_such_name")
        assert callable(torch._C._cuda_no_such_name)
    assert not hasattr(torch._C, "_cuda_no_such_name")


COMPILED_AFTERWARDS = """
import torch
from pytest_sglmem import emulated_cuda

with emulated_cuda():
    torch.optim.SGD(torch.nn.Linear(2, 2).cuda().parameters(), lr=1)  # loads torch's compiler

def double(x):
    return x * 2 + torch.ones(2) + torch.tensor([0.0, 1.0])

print(torch.compile(double, backend="eager", fullgraph=True)(torch.ones(2)).tolist())
"""


def test_nothing_is_left_in_the_temporary_folder(tmp_path):
    """torch's compiler, which an emulation loads, makes a cache folder there as it is imported, and names it in the
    environment, so that processes started later make it, too.
    """
    code = (
        "import os\nfrom pytest_sglmem import emulated_cuda\nbefore = dict(os.environ)\n"
        "with emulated_cuda():\n    pass\nprint(set(os.environ.items()) ^ set(before.items()))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    environment["TMPDIR"] = str(tmp_path)
    ran = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    assert (ran.stdout, list(tmp_path.iterdir())) == ("set()\n", [])


def test_code_compiles_after_an_emulation_as_before():
    """What torch's compiler remembers by identity must be torch's own."""
    ran = subprocess.run([sys.executable, "-c", COMPILED_AFTERWARDS], capture_output=True, text=True, check=False)
    assert ran.stdout == "[3.0, 4.0]\n", ran.stderr


# -- deaths, finalizers, threads ---------------------------------------------------------------------------------------


def test_a_finalizer_may_allocate_while_an_allocation_is_counted():
    """The cyclic collector can run inside the allocator, and a finalizer there can do anything, with the lock held."""
    with emulated_cuda() as emulation:
        kept = []

        class Reluctant:
            def __del__(self):
                kept.append(torch.ones(128, device="cuda"))

        victim = [Reluctant()]
        with emulation.memory.locked():
            victim.clear()
            assert len(kept) == 1
        assert torch.cuda.memory_allocated() == 512
        kept.clear()
        assert torch.cuda.memory_allocated() == 0


def test_a_death_while_numbers_are_read_is_counted_after():
    with emulated_cuda() as emulation:
        made = [torch.ones(128, device="cuda")]
        with emulation.memory.locked():
            made.clear()
        assert torch.cuda.memory_allocated() == 0


def test_a_thread_that_ran_before_is_covered_from_its_first_cuda_call():
    asked, answer = threading.Event(), []

    def work():
        asked.wait()
        torch.cuda.set_device(0)
        given = torch.ones(128, device="cuda")
        answer.append(given + 1)

    thread = threading.Thread(target=work)
    thread.start()
    with emulated_cuda():
        asked.set()
        thread.join()
        assert answer[0].is_cuda
        assert torch.cuda.memory_allocated() == 512
        answer.clear()
        assert torch.cuda.memory_allocated() == 0


def test_a_thread_that_outlives_the_emulation_is_left_alone():
    begun, over, answer = threading.Event(), threading.Event(), []

    def work():
        torch.ones(2, device="cuda")
        begun.set()
        over.wait()
        answer.append(torch.ones(2) + 1)

    with emulated_cuda():
        thread = threading.Thread(target=work)
        thread.start()
        begun.wait()
    over.set()
    thread.join()
    assert answer[0].tolist() == [2, 2]


def test_many_threads_leave_the_books_balanced():
    with emulated_cuda():

        def work():
            for size in range(1, 200):
                (torch.empty(size * 100, device="cuda") + 1).sum()

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        gc.collect()
        stats = torch.cuda.memory_stats()
        assert stats["allocated_bytes.all.current"] == 0
        assert stats["allocation.all.current"] == 0
        assert stats["allocation.all.allocated"] == stats["allocation.all.freed"] > 0


@pytest.mark.parametrize(
    "use",
    [
        torch.cuda.synchronize,
        lambda: torch.ones(2, device="cuda"),
        lambda: torch.ones(2).cuda(),
        lambda: torch.tensor([1], device="cuda:0"),
    ],
)
def test_a_forked_process_has_no_device(use):
    with emulated_cuda():
        kept = torch.ones(2, device="cuda")
        child = os.fork()
        if child == 0:
            try:
                use()
            except RuntimeError as error:
                os._exit(7 if "Cannot re-initialize CUDA in forked subprocess" in str(error) else 8)
            os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert kept.is_cuda


def test_the_cpu_is_left_alone():
    with emulated_cuda():
        (torch.ones(1000) + 1).sum()
        torch.nn.Linear(10, 10)(torch.ones(10)).sum().backward()
        assert torch.cuda.memory_allocated() == 0
        assert torch.cuda.max_memory_allocated() == 0

"""Ordinary CUDA programs, on the emulated device and on a real one: what a GPU gives is what is expected."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading

import pytest

torch = pytest.importorskip("torch")

import cuda_device as devices  # noqa: E402
from cuda_device import Grown  # noqa: E402

cuda_device, two_devices = devices.cuda_device, devices.two_devices
KIB, MIB = 1 << 10, 1 << 20
pytestmark = pytest.mark.usefixtures("cuda_device")


# -- where tensors live ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(3, device="cuda"),
        lambda: torch.zeros(3, device=torch.device("cuda")),
        lambda: torch.ones(3, device=0),
        lambda: torch.full((3,), 2.0, device="cuda:0"),
        lambda: torch.arange(3, device="cuda"),
        lambda: torch.eye(3, device="cuda"),
        lambda: torch.rand(3, device="cuda"),
        lambda: torch.randperm(3, device="cuda"),
        lambda: torch.tensor([1.0, 2.0], device="cuda"),
        lambda: torch.as_tensor([1.0, 2.0], device="cuda"),
        lambda: torch.asarray([1.0, 2.0], device="cuda"),
        lambda: torch.ones(3).cuda(),
        lambda: torch.ones(3).to("cuda"),
        lambda: torch.ones(3).to(0),
        lambda: torch.ones(3).to(device="cuda", dtype=torch.float64),
        lambda: torch.ones(3).to(torch.ones(1, device="cuda")),
        lambda: torch.zeros_like(torch.ones(3), device="cuda"),
        lambda: torch.ones(3, device="cuda").new_tensor([1, 2]),
        lambda: torch.ones(3, device="cuda").new_zeros(2),
        lambda: torch.ones(3, device="cuda").clone()[1:].t(),
        lambda: torch.ones(3, device="cuda").to(torch.float16),
        lambda: torch.cat([torch.ones(3, device="cuda")] * 2),
        lambda: torch.nn.functional.one_hot(torch.tensor([0, 2], device="cuda")),
        lambda: torch.quantile(torch.rand(5, device="cuda"), 0.4),
        lambda: torch.nn.Linear(2, 2, device="cuda").weight,
        lambda: torch.nn.Linear(2, 2).to("cuda").weight,
        lambda: torch.nn.Linear(2, 2).cuda().bias,
        lambda: torch.nn.Linear(2, 2).to(0).bias,
        lambda: torch.sparse_coo_tensor([[0, 1], [1, 0]], [1.0, 2.0], (2, 2), device="cuda").coalesce(),
        lambda: torch.ones(2, 2, device="cuda").to_sparse_csr(),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_tensor_says_that_it_is_on_the_device(make):
    made = make()
    assert made.device == torch.device("cuda", 0)
    assert made.is_cuda
    assert not made.is_cpu
    assert made.get_device() == 0


def test_a_cpu_tensor_stays_one():
    made = torch.ones(3) + torch.arange(3)
    assert made.device == torch.device("cpu")
    assert not made.is_cuda
    assert made.get_device() == -1
    assert torch.tensor([1.0]).numpy().tolist() == [1.0]


def test_the_default_device():
    with torch.device("cuda"):
        assert torch.ones(2).is_cuda
        assert torch.tensor([1]).is_cuda
        assert not torch.ones(2, device="cpu").is_cuda
    torch.set_default_device("cuda")
    try:
        assert torch.zeros(2).is_cuda
        assert torch.get_default_device() == torch.device("cuda", 0)
    finally:
        torch.set_default_device(None)
    assert not torch.ones(2).is_cuda


def test_a_device_that_is_not_there(cuda_device):
    with pytest.raises((RuntimeError, AssertionError), match=r"invalid device ordinal|Invalid device"):
        torch.empty(1, device=f"cuda:{cuda_device}")
    with pytest.raises((RuntimeError, AssertionError), match=r"invalid device ordinal|Invalid device"):
        torch.cuda.set_device(cuda_device)


def test_several_devices(two_devices):
    first, second = torch.ones(2, device="cuda:0"), torch.ones(2, device=1)
    assert second.device == torch.device("cuda:1")
    assert (second + 1).device == torch.device("cuda:1")
    with torch.cuda.device(1):
        assert torch.cuda.current_device() == 1
        assert torch.ones(2, device="cuda").device.index == 1
        assert torch.ones(2).cuda().device.index == 1
    assert torch.cuda.current_device() == 0
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        first + second
    assert torch.equal(first.cpu(), second.cpu())


def test_a_move_between_devices_is_a_copy(two_devices):
    here = torch.zeros(4, device="cuda:0")
    there = here.to("cuda:1")
    there.fill_(1)
    assert here.tolist() == [0] * 4
    here.copy_(there)
    assert here.tolist() == [1] * 4
    assert torch.cuda.memory_allocated(1) >= 512


def test_lists_over_several_devices(two_devices):
    made = [torch.ones(2, device="cuda:0"), torch.ones(2, device="cuda:1")]
    assert [one.device.index for one in torch._foreach_add(made, 1.0)] == [0, 1]
    weights = [torch.nn.Parameter(one) for one in made]
    for weight in weights:
        weight.grad = torch.ones_like(weight) * 3
    assert torch.nn.utils.clip_grad_norm_(weights, 1.0).device.index == 0
    torch.optim.AdamW(weights).step()
    assert [weight.device.index for weight in weights] == [0, 1]


# -- moves -------------------------------------------------------------------------------------------------------------


def test_to_the_same_device_is_the_tensor_itself():
    made = torch.ones(3, device="cuda")
    assert made.to("cuda") is made
    assert made.cuda() is made
    assert made.to(torch.float32) is made
    assert made.to("cuda", copy=True) is not made


def test_cpu_is_a_copy():
    made = torch.ones(3, device="cuda")
    there = made.cpu()
    there.fill_(5)
    assert made.tolist() == [1, 1, 1]
    assert there.cpu() is there


def test_numpy_wants_the_cpu():
    made = torch.ones(3, device="cuda")
    with pytest.raises(TypeError, match=r"can't convert cuda:0 device type tensor to numpy\. Use Tensor\.cpu\(\)"):
        made.numpy()
    with pytest.raises(TypeError, match="can't convert cuda:0"):
        made.__array__()
    assert made.numpy(force=True).tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "mix",
    [
        lambda device, host: device + host,
        lambda device, host: host + device,
        lambda device, host: device @ host,
        lambda device, host: torch.cat([device, host]),
        lambda device, host: device.add_(host),
        lambda device, host: torch.add(device, device, out=host),
        lambda device, host: torch.nn.functional.linear(device, host),
        lambda device, host: torch.where(device > 0, device, host),
    ],
)
def test_devices_do_not_mix(mix):
    with pytest.raises(RuntimeError, match=r"same device|out device|on the same|Expected.*device"):
        mix(torch.ones(2, 2, device="cuda"), torch.ones(2, 2))


def test_a_scalar_from_the_cpu_mixes_and_an_index_does():
    made = torch.arange(4.0, device="cuda")
    assert (made * torch.tensor(2.0)).is_cuda
    assert (torch.tensor(2.0) * made).tolist() == [0, 2, 4, 6]
    assert made[torch.tensor([1, 2])].tolist() == [1, 2]
    made[torch.tensor([0])] = 9.0
    made.copy_(made.cpu() + 1)
    assert made.tolist() == [10, 2, 3, 4]


def test_an_in_place_operator_on_a_cpu_scalar_does_not_mix():
    with pytest.raises(RuntimeError):
        torch.tensor(2.0).add_(torch.tensor(1.0, device="cuda"))


# -- what is counted ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nbytes", "counted"),
    [(0, 0), (1, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512), (64 * MIB, 64 * MIB)],
)
def test_sizes_are_counted_as_the_allocator_rounds_them(nbytes, counted):
    grown = Grown()
    made = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    assert grown.bytes == counted
    assert grown.blocks == (1 if nbytes else 0)
    del made
    assert grown.bytes == 0


def test_a_large_block_keeps_what_is_not_worth_splitting_off():
    """A block from 10 MiB on has a segment of its own; up to 1 MiB of it is not split off, and counts."""
    torch.cuda.empty_cache()
    grown = Grown()
    made = torch.empty(11 * MIB + MIB // 2, dtype=torch.uint8, device="cuda")
    assert grown.bytes == 12 * MIB
    del made


def test_a_view_keeps_the_whole():
    grown = Grown()
    made = torch.empty(MIB, dtype=torch.uint8, device="cuda")
    view = made[:16]
    del made
    assert grown.bytes == MIB
    del view
    assert grown.bytes == 0


def test_in_place_takes_nothing():
    made = torch.ones(256, device="cuda")
    grown = Grown()
    made.add_(1).mul_(2).clamp_(max=3)
    made.view(16, 16).t()[1:].unsqueeze(0)
    assert grown.bytes == 0


def test_autograd_keeps_what_it_needs_until_it_is_done():
    weight = torch.ones(256, 256, device="cuda", requires_grad=True)
    given = torch.ones(256, 256, device="cuda")
    grown = Grown()
    out = (given * weight).exp()
    assert grown.bytes == 256 * KIB  # exp keeps its result, and mul its inputs, which were there
    loss = out.sum()
    del out
    assert grown.bytes == 256 * KIB + 512
    loss.backward()
    del loss
    assert grown.bytes == 256 * KIB  # the gradient
    weight.grad = None
    assert grown.bytes == 0


def test_a_cycle_keeps_until_it_is_collected():
    grown = Grown()

    class Node:
        def __init__(self):
            self.me, self.made = self, torch.ones(4, device="cuda")

    gc.disable()
    try:
        Node()
        assert grown.bytes == 512
    finally:
        gc.enable()
    gc.collect()
    assert grown.bytes == 0


def test_a_storage_that_lay_in_garbage_is_still_there():
    """As a pickler's memo leaves it: in older torch that ends the storage's weak references, and not the storage."""
    grown = Grown()
    made = torch.ones(256, device="cuda")
    garbage = [made.untyped_storage()]
    garbage.append(garbage)
    del garbage
    gc.collect()
    assert made.is_cuda
    assert grown.bytes == 1024
    del made
    assert grown.bytes == 0


def test_resizing_takes_a_new_block():
    made = torch.empty(128, device="cuda")
    grown = Grown()
    made.resize_(1024)
    assert grown.bytes == 4096 - 512
    made.untyped_storage().resize_(0)
    assert grown.bytes == -512
    made.untyped_storage().resize_(4096)
    assert grown.bytes == 4096 - 512


def test_out_of_a_wrong_size_is_resized():
    grown = Grown()
    out = torch.empty(0, device="cuda")
    torch.add(torch.ones(256, device="cuda"), 1, out=out)
    assert grown.bytes == 1024


def test_peaks_and_their_reset():
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    made = torch.empty(4 * MIB, dtype=torch.uint8, device="cuda")
    del made
    assert torch.cuda.max_memory_allocated() == before + 4 * MIB
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == before


def test_freed_memory_stays_reserved_until_the_cache_is_emptied():
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    made = torch.empty(24 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_reserved() == before + 24 * MIB
    del made
    assert torch.cuda.memory_reserved() == before + 24 * MIB
    again = torch.empty(20 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_reserved() == before + 24 * MIB
    del again
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == before


@pytest.mark.parametrize(
    ("nbytes", "segment"), [(512, 2 * MIB), (MIB, 2 * MIB), (MIB + 1, 20 * MIB), (21 * MIB, 22 * MIB)]
)
def test_segments(nbytes, segment):
    torch.cuda.empty_cache()
    held = Grown()
    before = torch.cuda.memory_reserved()
    if nbytes <= MIB and before:
        pytest.skip("small blocks of this process share a segment")
    made = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_reserved() - before == segment
    assert held.blocks == 1
    del made


def test_the_numbers_of_memory_stats_fit_together():
    made = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in (100, 3 * MIB, 700 * KIB)]
    del made[1]
    stats = torch.cuda.memory_stats()
    for kind in (
        "allocation",
        "segment",
        "active",
        "allocated_bytes",
        "reserved_bytes",
        "active_bytes",
        "requested_bytes",
    ):
        parts = [stats[f"{kind}.{pool}.current"] for pool in ("all", "small_pool", "large_pool")]
        assert parts[0] == parts[1] + parts[2]
        assert stats[f"{kind}.all.allocated"] - stats[f"{kind}.all.freed"] == parts[0]
        assert stats[f"{kind}.all.peak"] >= parts[0]
    assert stats["inactive_split_bytes.all.current"] <= stats["reserved_bytes.all.current"]
    assert {"num_ooms", "num_alloc_retries", "num_device_alloc"} <= set(stats)


def test_the_summary_is_torchs_own():
    assert "Allocated memory" in torch.cuda.memory_summary()


def test_a_block_used_by_another_stream_waits_for_the_next_allocation():
    side = torch.cuda.Stream()
    made = torch.empty(MIB, dtype=torch.uint8, device="cuda")
    made.record_stream(side)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()
    del made
    after = torch.cuda.memory_stats()
    assert after["allocated_bytes.all.current"] == before["allocated_bytes.all.current"] - MIB
    assert after["active_bytes.all.current"] == before["active_bytes.all.current"]
    torch.cuda.synchronize()
    torch.empty(1, device="cuda")
    assert torch.cuda.memory_stats()["active_bytes.all.current"] == before["active_bytes.all.current"] - MIB


# -- the history of allocations ----------------------------------------------------------------------------------------


def _allocate_here():
    return torch.empty(MIB, dtype=torch.uint8, device="cuda")


def _live_blocks():
    snapshot = torch.cuda.memory._snapshot()
    return [
        block for segment in snapshot["segments"] for block in segment["blocks"] if block["state"] == "active_allocated"
    ]


@pytest.fixture
def recording():
    torch.cuda.memory._record_memory_history(enabled="state", context="state", stacks="python")
    yield
    torch.cuda.memory._record_memory_history(enabled=None)


def test_a_live_block_knows_who_allocated_it(recording):
    made = _allocate_here()
    named = [block for block in _live_blocks() if any(frame["name"] == "_allocate_here" for frame in block["frames"])]
    assert [block["size"] for block in named] == [MIB]
    assert named[0]["requested_size"] == MIB
    first = named[0]["frames"][0]
    assert first["filename"] == __file__
    assert first["name"] == "_allocate_here"
    assert first["line"] == _allocate_here.__code__.co_firstlineno + 1
    assert made.data_ptr() == named[0]["address"]


def test_without_recording_a_block_has_no_frames():
    made = _allocate_here()
    block = next(block for block in _live_blocks() if block["address"] == made.data_ptr())
    assert block["frames"] == []


def test_a_snapshot_adds_up():
    made = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in (10, 3 * MIB, 40 * MIB)]
    del made[1]
    for segment in torch.cuda.memory._snapshot()["segments"]:
        live = [block["size"] for block in segment["blocks"] if block["state"] == "active_allocated"]
        assert segment["allocated_size"] == sum(live)
        assert segment["total_size"] == sum(block["size"] for block in segment["blocks"])
        assert segment["segment_type"] in ("small", "large")
        assert {"device", "address", "stream", "active_size", "requested_size", "segment_pool_id"} <= set(segment)
    assert [segment["total_size"] for segment in torch.cuda.memory_snapshot()]


def test_events_are_recorded_in_order():
    torch.cuda.memory._record_memory_history(enabled="all", stacks="python", max_entries=100)
    try:
        made = _allocate_here()
        address = made.data_ptr()
        del made
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    ours = [entry for entry in trace if entry["addr"] == address]
    assert [entry["action"] for entry in ours][-3:] == ["alloc", "free_requested", "free_completed"]
    assert ours[-1]["size"] == MIB
    assert torch.cuda.memory._snapshot()["device_traces"][0] == []


def test_the_ring_of_events_is_bounded():
    torch.cuda.memory._record_memory_history(enabled="all", stacks="python", max_entries=4)
    try:
        for _ in range(10):
            _allocate_here()
        assert len(torch.cuda.memory._snapshot()["device_traces"][0]) == 4
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def test_a_snapshot_can_be_dumped(tmp_path):
    made = _allocate_here()
    torch.cuda.memory._dump_snapshot(str(tmp_path / "snapshot.pickle"))
    read = pickle.loads((tmp_path / "snapshot.pickle").read_bytes())
    assert any(block["address"] == made.data_ptr() for segment in read["segments"] for block in segment["blocks"])


# -- out of memory -----------------------------------------------------------------------------------------------------


def test_out_of_memory_is_torchs_error_and_leaves_things_as_they_were():
    grown = Grown()
    too_much = torch.cuda.mem_get_info()[1] + 1
    with pytest.raises(
        torch.cuda.OutOfMemoryError, match=r"CUDA out of memory\. Tried to allocate .* GiB\. GPU 0 has a total"
    ):
        torch.empty(too_much, dtype=torch.uint8, device="cuda")
    assert grown.bytes == 0
    assert torch.ones(1, device="cuda").item() == 1


def test_a_fraction_of_the_memory():
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.5)
    try:
        with pytest.raises(torch.cuda.OutOfMemoryError):
            torch.empty(total // 2 + 4 * MIB, dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


# -- streams and events ------------------------------------------------------------------------------------------------


def test_the_current_stream():
    side = torch.cuda.Stream()
    default = torch.cuda.default_stream()
    assert torch.cuda.current_stream() == default
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() == side
        made = torch.ones(3, device="cuda") * 2
    assert torch.cuda.current_stream() == default
    default.wait_stream(side)
    assert made.tolist() == [2, 2, 2]
    assert side != default
    assert hash(side) == hash(torch.cuda.Stream(stream_id=side.stream_id, device_index=0, device_type=side.device_type))
    side.synchronize()
    assert side.query()


def test_a_stream_is_a_threads_own():
    side, seen = torch.cuda.Stream(), []
    torch.cuda.set_stream(side)
    try:
        thread = threading.Thread(target=lambda: seen.append(torch.cuda.current_stream()))
        thread.start()
        thread.join()
    finally:
        torch.cuda.set_stream(torch.cuda.default_stream())
    assert seen == [torch.cuda.default_stream()]


def test_a_block_of_one_stream_is_not_reused_by_another():
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    made = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    del made
    with torch.cuda.stream(torch.cuda.Stream()):
        made = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_reserved() - before == 60 * MIB
    del made
    torch.cuda.empty_cache()


def test_events():
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    torch.ones(10, device="cuda").sum()
    end.record()
    end.synchronize()
    assert end.query()
    assert start.elapsed_time(end) >= 0
    with pytest.raises((RuntimeError, ValueError), match="recorded"):
        start.elapsed_time(torch.cuda.Event(enable_timing=True))
    with pytest.raises((RuntimeError, ValueError)):
        start.elapsed_time(torch.cuda.Event())
    side = torch.cuda.Stream()
    side.wait_event(end)
    assert isinstance(side.record_event(), torch.cuda.Event)
    assert torch.cuda.is_current_stream_capturing() is False


# -- random numbers ----------------------------------------------------------------------------------------------------


def test_a_seed_repeats_the_numbers_and_the_cpu_has_its_own():
    torch.manual_seed(1)
    on_cpu = torch.rand(4)
    torch.cuda.manual_seed(5)
    first = torch.rand(4, device="cuda")
    torch.manual_seed(1)
    torch.cuda.manual_seed(5)
    assert torch.equal(torch.rand(4, device="cuda"), first)
    assert torch.equal(torch.rand(4), on_cpu)
    state = torch.cuda.get_rng_state()
    drawn = torch.randn(4, device="cuda"), torch.nn.functional.dropout(torch.ones(8, device="cuda"))
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.randn(4, device="cuda"), drawn[0])
    assert torch.equal(torch.nn.functional.dropout(torch.ones(8, device="cuda")), drawn[1])


def test_a_generator_belongs_to_its_device():
    generator = torch.Generator(device="cuda").manual_seed(3)
    assert generator.device.type == "cuda"
    assert isinstance(generator, torch.Generator)
    first = torch.rand(4, device="cuda", generator=generator)
    assert torch.equal(torch.rand(4, device="cuda", generator=generator.manual_seed(3)), first)
    with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator but found 'cpu'"):
        torch.rand(4, device="cuda", generator=torch.Generator())
    with pytest.raises(RuntimeError, match="Expected a 'cpu' device type for generator but found 'cuda'"):
        torch.rand(4, generator=generator)


# -- modules, gradients, files -----------------------------------------------------------------------------------------


def test_training_steps():
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.ReLU(), torch.nn.Linear(8, 1)
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    given = torch.randn(16, 8, device="cuda")
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = (model(given) - 1).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(parameter.grad.is_cuda for parameter in model.parameters())


def test_a_gradient_goes_back_to_where_its_leaf_lives():
    leaf = torch.ones(3, requires_grad=True)
    (leaf.to("cuda") * 2).sum().backward()
    assert leaf.grad.device.type == "cpu"
    assert leaf.grad.tolist() == [2, 2, 2]
    there = torch.ones(3, device="cuda", requires_grad=True)
    (there.cpu() * 3).sum().backward()
    assert there.grad.is_cuda


def test_a_gradient_from_elsewhere_is_refused():
    leaf = torch.ones(2, device="cuda", requires_grad=True)
    leaf.grad = torch.ones(2, device="cuda")
    with pytest.raises(RuntimeError, match="device type 'cpu' to a tensor with device type 'cuda'"):
        leaf.grad = torch.ones(2)
    assert leaf.grad.is_cuda
    leaf.grad = None
    assert leaf.grad is None


def test_gradients_are_counted():
    weight = torch.ones(128, 128, device="cuda", requires_grad=True)
    grown = Grown()
    (weight[3:9].index_select(0, torch.tensor([0, 2], device="cuda")) * 2).sum().backward()
    assert weight.grad.is_cuda
    assert grown.bytes == 64 * KIB


def test_inference_mode():
    grown = Grown()
    with torch.inference_mode():
        made = torch.ones(4, 4, device="cuda", dtype=torch.float16)
        assert made.to(torch.float32).is_cuda
        assert made.t().reshape(16).is_cuda
        assert torch.nn.functional.linear(made, made).is_cuda
        assert made.cpu().device.type == "cpu"
    assert grown.bytes == 512


def test_functional_transforms():
    given = torch.randn(3, 4, device="cuda")
    rows = torch.vmap(lambda row: row * torch.ones(4, device=row.device))(given)
    assert rows.is_cuda
    assert torch.equal(rows, given)
    assert torch.func.grad(lambda x: (x * torch.ones(3, 4, device="cuda")).sum())(given).is_cuda


class Wrapper(torch.Tensor):
    """A tensor around another that sees every operator, as quantized and sharded ones are made."""

    @staticmethod
    def __new__(cls, part):
        return torch.Tensor._make_wrapper_subclass(
            cls, part.shape, dtype=part.dtype, device=part.device, requires_grad=part.requires_grad
        )

    def __init__(self, part):
        self.part = part

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = torch.utils._pytree.tree_map_only(cls, lambda one: one.part, (args, kwargs or {}))
        return torch.utils._pytree.tree_map_only(torch.Tensor, cls, func(*args, **kwargs))


def test_a_tensor_around_another_is_where_that_one_is(two_devices):
    grown = Grown()
    made = Wrapper(torch.ones(3, device="cuda:1")).requires_grad_()
    doubled = made * 2
    assert [one.device.index for one in (made, doubled, doubled.part)] == [1, 1, 1]
    assert made.is_cuda
    doubled.sum().backward()
    assert made.grad.device == torch.device("cuda", 1)
    assert made.grad.part.tolist() == [2, 2, 2]
    for target in ("cpu", "cuda:0"):
        moved = made.detach().to(target)
        assert moved.device == moved.part.device == torch.device(target)
    assert made.detach().cpu().part.device.type == "cpu"
    del moved
    assert grown.bytes == 0  # all of it is the other device's


def test_a_jagged_tensor():
    parts = [torch.ones(2, device="cuda"), torch.ones(3, device="cuda")]
    made = torch.nested.nested_tensor(parts, layout=torch.jagged, device="cuda")
    assert made.is_cuda
    assert (made * 2).values().is_cuda
    assert (made * 2).sum().item() == 10


def test_copies_and_pickles():
    made = torch.arange(4.0, device="cuda")
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made)), copy.deepcopy(torch.nn.Parameter(made))):
        assert other.is_cuda
        assert torch.equal(other, made)
        assert other.data_ptr() != made.data_ptr()


def test_files():
    file = io.BytesIO()
    torch.save({"x": torch.arange(4.0, device="cuda")}, file)

    def load(**how):
        file.seek(0)
        return torch.load(file, **how)["x"]

    assert load().device == torch.device("cuda", 0)
    assert load(map_location="cpu").device.type == "cpu"
    assert load(map_location=lambda storage, where: storage).device.type == "cpu"
    assert load(map_location={"cuda:0": "cpu"}).device.type == "cpu"
    assert load(map_location="cuda").tolist() == [0, 1, 2, 3]


def test_loading_onto_the_device_is_counted():
    file = io.BytesIO()
    torch.save(torch.zeros(256), file)
    file.seek(0)
    grown = Grown()
    loaded = torch.load(file, map_location="cuda")
    assert loaded.is_cuda
    assert grown.bytes == 1024


def test_storages():
    grown = Grown()
    storage = torch.UntypedStorage(600, device="cuda")
    assert storage.device.type == "cuda"
    assert storage.is_cuda
    assert grown.bytes == 1024
    assert storage.cpu().device.type == "cpu"
    made = torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage)
    assert made.is_cuda
    assert made.data_ptr() == storage.data_ptr()
    del storage
    assert grown.bytes == 1024


def test_addresses_follow_views():
    made = torch.zeros(8, device="cuda")
    assert made[2:].data_ptr() == made.data_ptr() + 8
    assert made.view(2, 4).data_ptr() == made.untyped_storage().data_ptr()
    assert made.clone().data_ptr() != made.data_ptr()
    assert made.data_ptr() % 512 == 0


def test_pinned_memory():
    pinned = torch.empty(4, pin_memory=True)
    assert pinned.is_pinned()
    assert pinned.device.type == "cpu"
    assert torch.ones(3).pin_memory().is_pinned()
    assert not torch.ones(3).is_pinned()
    assert pinned.pin_memory() is pinned
    assert pinned.to("cuda", non_blocking=True).is_cuda
    with pytest.raises(RuntimeError, match="cannot pin"):
        torch.ones(2, device="cuda").pin_memory()


def test_data_loaders_pin():
    loader = torch.utils.data.DataLoader([torch.ones(2)] * 3, pin_memory=True)
    assert all(batch.is_pinned() for batch in loader)


def test_custom_operators_run_with_their_own_allocations_counted():
    @torch.library.custom_op("sglmem_test::doubled", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return torch.full_like(x, 2.0, device=x.device) * x

    made = torch.ones(128, device="cuda")
    grown = Grown()
    out = doubled(made)
    assert out.tolist() == [2.0] * 128
    assert out.is_cuda
    assert grown.bytes == 512


@pytest.mark.filterwarnings("ignore:.*Attempting to run cuBLAS")  # torch's own threads have no context yet
def test_data_parallel(two_devices):
    model = torch.nn.DataParallel(torch.nn.Linear(4, 4).cuda(), device_ids=[0, 1])
    out = model(torch.ones(6, 4, device="cuda"))
    out.sum().backward()
    assert out.shape == (6, 4)
    assert out.device.index == 0
    assert model.module.weight.grad.is_cuda


# -- facts about the machine -------------------------------------------------------------------------------------------


def test_what_the_machine_says_of_itself(cuda_device):
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == cuda_device
    properties = torch.cuda.get_device_properties(0)
    assert properties.total_memory == torch.cuda.mem_get_info()[1]
    assert torch.cuda.get_device_name() == properties.name
    assert torch.cuda.get_device_capability() == (properties.major, properties.minor)
    assert torch.cuda.get_allocator_backend() == "native"
    torch.cuda.synchronize()
    torch.cuda.ipc_collect()


def test_the_accelerator_is_the_device():
    made = torch.empty(MIB, dtype=torch.uint8, device="cuda")
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    assert torch.accelerator.is_available()
    assert torch.accelerator.device_count() == torch.cuda.device_count()
    assert torch.accelerator.current_device_index() == 0
    torch.accelerator.synchronize()
    if hasattr(torch.accelerator, "memory_allocated"):
        assert torch.accelerator.memory_allocated() == torch.cuda.memory_allocated()
    assert torch.accelerator.current_stream().stream_id == torch.cuda.current_stream().stream_id
    del made


def test_device_objects():
    assert torch.device(0) == torch.device("cuda", 0)
    assert isinstance(torch.device(0), torch.device)
    assert pickle.loads(pickle.dumps(torch.device("cuda", 0))) == torch.device("cuda", 0)


def test_printing_names_the_device():
    assert "device='cuda:0'" in repr(torch.ones(2, device="cuda"))
    assert torch.ones(2, device="cuda").type() == "torch.cuda.FloatTensor"


def test_threads_count_too():
    grown, kept = Grown(), []

    def work():
        given = torch.ones(256, device="cuda")
        kept.append(given + 1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(made.is_cuda for made in kept)
    assert grown.bytes == 4 * KIB
    kept.clear()
    assert grown.bytes == 0

"""What servers and trainers do on a GPU, in small: on the emulated device and on a real one, with one expectation."""

from __future__ import annotations

import asyncio
import io
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

import cuda_device as devices  # noqa: E402
from cuda_device import Grown  # noqa: E402

cuda_device, two_devices = devices.cuda_device, devices.two_devices
pytestmark = pytest.mark.usefixtures("cuda_device")
functional = torch.nn.functional


def ours(*tensors):
    """All of them are on the device."""
    return all(tensor.is_cuda and tensor.device.type == "cuda" for tensor in tensors)


# -- a server's memory -------------------------------------------------------------------------------------------------


def test_a_pool_of_a_kv_cache():
    pool = torch.zeros(2, 64, 2, 8, device="cuda", dtype=torch.float16)
    slots = torch.tensor([3, 5, 7], device="cuda")
    keys = torch.ones(3, 2, 8, device="cuda", dtype=torch.float16)
    grown = Grown()
    pool[0].index_copy_(0, slots, keys)
    pool[1][slots] = keys
    assert grown.bytes == 0
    found = pool[0].index_select(0, slots)
    assert ours(found)
    assert torch.equal(found, keys)
    assert grown.bytes == 512
    free = torch.ones(64, dtype=torch.bool, device="cuda")
    free[slots] = False
    left = free.nonzero().squeeze(-1)
    assert ours(left)
    assert len(left) == 61
    with pytest.raises(RuntimeError, match="same device"):
        pool[0].index_select(0, slots.cpu())


def test_attention_over_pages():
    blocks = torch.randn(8, 16, 2, 8, device="cuda")
    table = torch.tensor([[1, 2], [3, 4]], device="cuda")
    keys = blocks[table].flatten(1, 2).transpose(1, 2)
    query = torch.randn(2, 2, 1, 8, device="cuda", requires_grad=True)
    out = functional.scaled_dot_product_attention(query, keys, keys)
    out.sum().backward()
    assert ours(keys, out, query.grad)
    assert out.shape == (2, 2, 1, 8)
    plain = (query @ keys.transpose(-1, -2) / 8**0.5).softmax(-1) @ keys
    assert torch.allclose(out, plain, atol=1e-3)


def test_weights_come_in_one_bucket():
    source = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)).cuda()
    target = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)).cuda()
    bucket = torch.cat([weight.detach().flatten() for weight in source.parameters()])
    assert ours(bucket)
    at = 0
    for weight in target.parameters():
        weight.data.copy_(bucket[at : at + weight.numel()].view_as(weight))
        at += weight.numel()
    assert all(torch.equal(*pair) for pair in zip(source.parameters(), target.parameters(), strict=True))
    host = {name: value.cpu() for name, value in source.state_dict().items()}
    assert not any(value.is_cuda for value in host.values())
    target.load_state_dict(host)
    assert ours(*target.parameters())
    target.load_state_dict(host, assign=True)
    assert not any(weight.is_cuda for weight in target.parameters())


def test_staging_through_pinned_memory():
    host = torch.arange(1024.0).pin_memory()
    stream, start, done = torch.cuda.Stream(), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        start.record()
        there = host.to("cuda", non_blocking=True)
        done.record(stream)
    torch.cuda.current_stream().wait_event(done)
    there.record_stream(torch.cuda.current_stream())
    back = torch.empty(1024, pin_memory=True)
    back.copy_(there, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(back, host)
    assert start.elapsed_time(done) >= 0
    made = [torch.tensor([1.0], pin_memory=True), torch.full((2,), 1.0, pin_memory=True)]
    made += [torch.zeros_like(host, pin_memory=True), there.new_empty(2, device="cpu", pin_memory=True), host[3:9]]
    assert all(one.is_pinned() and one.device.type == "cpu" for one in made)


def test_work_in_other_threads_and_tasks():
    with ThreadPoolExecutor(2) as pool:
        assert ours(*pool.map(lambda n: torch.ones(n, device="cuda"), [1, 2, 3]))
    seen = []
    given = torch.ones(2, device="cuda")
    thread = threading.Thread(target=lambda: seen.append(given * 2))
    thread.start()
    thread.join()
    assert ours(*seen)

    async def step():
        made = await asyncio.to_thread(lambda: torch.ones(2, device="cuda"))
        done = torch.cuda.Event()
        done.record()
        while not done.query():
            await asyncio.sleep(0)
        return made

    assert ours(asyncio.run(step()))


def test_the_device_of_a_context(two_devices):
    with torch.cuda.device(1):
        assert torch.ones(1, device="cuda").device.index == 1
    with torch.device("cuda:1"):
        assert torch.nn.Linear(2, 2).weight.device.index == 1
    torch.set_default_device("cuda:1")
    try:
        assert [one.device.index for one in (torch.ones(2), torch.tensor([1]), torch.nn.Linear(2, 2).bias)] == [1] * 3
    finally:
        torch.set_default_device(None)


def test_what_lies_in_a_storage():
    made = torch.arange(4.0, device="cuda")
    assert made.is_shared()  # as torch says of every CUDA tensor
    assert not made.cpu().is_shared()
    assert bytes(made.cpu().untyped_storage()) == pickle.loads(pickle.dumps(made)).cpu().numpy().tobytes()
    made.untyped_storage().copy_(torch.zeros(4).untyped_storage())
    assert made.tolist() == [0] * 4
    other = torch.empty(0, device="cuda").set_(made.untyped_storage().clone())
    assert ours(other)
    part = torch.empty(1024, device="cuda", dtype=torch.uint8)
    assert part[512:].view(torch.float32).data_ptr() - part.data_ptr() == 512


# -- where operators take the CPU and where they do not ----------------------------------------------------------------


def test_an_index_is_there_or_on_the_cpu(two_devices):
    made, there = torch.zeros(3, device="cuda:0"), torch.tensor([0], device="cuda:0")
    assert made[torch.tensor([0])].is_cuda
    made[torch.tensor([0])] = torch.tensor(2.0)
    made[there] += 1
    assert made.tolist() == [3, 0, 0]
    for wrong in (lambda: torch.ones(3)[there], lambda: torch.ones(3, device="cuda:1")[there]):
        with pytest.raises(RuntimeError, match="indices should be either on"):
            wrong()
    with pytest.raises(RuntimeError, match="same device"):
        made[torch.tensor([0, 1])] = torch.ones(2)


@pytest.mark.parametrize(
    "mix",
    [
        lambda made: functional.embedding(torch.tensor([0]), made.view(1, 3)),
        lambda made: functional.cross_entropy(made.view(1, 3), torch.tensor([1])),
        lambda made: torch.where(torch.ones(3, dtype=torch.bool), made, made),
        lambda made: torch.scatter(made, 0, torch.tensor([0]), 1.0),
        lambda made: torch.add(made, 1, out=torch.empty(3)),
        lambda made: torch.ones(3) * made[0],  # a number on the device does not come to a CPU tensor
    ],
)
def test_other_operators_take_nothing_from_elsewhere(mix):
    with pytest.raises(RuntimeError, match=r"same device|same GPU|on cuda|is on cpu|on device"):
        mix(torch.ones(3, device="cuda"))


def test_lengths_stay_on_the_cpu():
    lstm = torch.nn.LSTM(3, 4, batch_first=True).cuda()
    packed = torch.nn.utils.rnn.pack_padded_sequence(
        torch.randn(2, 5, 3, device="cuda"), torch.tensor([5, 3]), batch_first=True
    )
    out, state = lstm(packed)
    padded, lengths = torch.nn.utils.rnn.pad_packed_sequence(out, batch_first=True)
    assert ours(packed.data, out.data, *state, padded)
    assert (packed.batch_sizes.device.type, lengths.device.type) == ("cpu", "cpu")
    assert lengths.tolist() == [5, 3]
    scores = torch.randn(5, 1, 3, device="cuda").log_softmax(-1)
    targets = torch.ones(1, 2, dtype=torch.long, device="cuda")
    assert ours(functional.ctc_loss(scores, targets, torch.tensor([5]), torch.tensor([2])))
    assert ours(*torch.tensor_split(scores, torch.tensor([1, 2])))


# -- a trainer ---------------------------------------------------------------------------------------------------------


def test_mixed_precision_with_checkpoints_and_a_scaler():
    from torch.utils.checkpoint import checkpoint

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)).cuda()
    optimizer, scaler = torch.optim.AdamW(model.parameters(), fused=True), torch.amp.GradScaler("cuda")
    for reentrant in (False, True):
        given = torch.randn(2, 8, device="cuda", requires_grad=True)
        with torch.autocast("cuda", dtype=torch.float16):
            out = checkpoint(model, given, use_reentrant=reentrant)
            loss = functional.cross_entropy(out, torch.tensor([1, 2], device="cuda"))
        assert (out.dtype, loss.dtype) == (torch.float16, torch.float32)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert ours(given.grad)


@pytest.mark.parametrize("how", [{"capturable": True}, {"foreach": True}, {"fused": True}, {}])
def test_an_optimizer_keeps_its_state_there(how):
    weight = torch.nn.Parameter(torch.ones(4, device="cuda"))
    optimizer = torch.optim.Adam([weight], **how)
    weight.square().sum().backward()
    optimizer.step()
    state = optimizer.state[weight]
    assert ours(state["exp_avg"], state["exp_avg_sq"])
    assert weight[0].item() < 1


def test_layers_that_learn_their_size():
    for move in (lambda layer: layer.cuda(), lambda layer: layer.to("cuda")):
        layer = move(torch.nn.LazyLinear(3))
        assert ours(layer(torch.ones(2, 5, device="cuda")), layer.weight)


class Marked(torch.Tensor):
    """A class of tensors that adds nothing."""


def test_classes_of_tensors():
    assert type(Marked([1.0, 2.0])) is Marked
    assert Marked(3).shape == (3,)
    made = Marked(torch.ones(3)).cuda()
    assert ours(made, made + 1)
    assert type(made + 1) is Marked


@pytest.mark.filterwarnings("ignore:The torch.cuda")  # torch recommends other ways, once a process
def test_types_of_old():
    made = torch.cuda.FloatTensor([1, 2])
    assert ours(made, torch.cuda.LongTensor(3), torch.ones(2).type(torch.cuda.HalfTensor))
    assert isinstance(made, torch.cuda.FloatTensor)
    assert not isinstance(made, torch.cuda.HalfTensor)
    assert not isinstance(made.cpu(), torch.cuda.FloatTensor)
    assert made.type() == "torch.cuda.FloatTensor"
    assert made.type("torch.cuda.HalfTensor").dtype == torch.float16
    assert made.type(torch.FloatTensor).device.type == "cpu"


@pytest.mark.filterwarnings("ignore")  # of kinds of tensors that torch calls young
def test_other_kinds_of_tensors():
    ones = torch.ones(2, 2, device="cuda")
    sparse = torch.sparse_coo_tensor([[0, 1], [1, 0]], [1.0, 2.0], (2, 2)).cuda()
    assert ours(sparse, sparse @ ones, sparse.cpu().cuda(), ones.to_sparse_csr() @ ones)
    number = torch.complex(ones, ones)
    assert ours(number.real, number.conj(), torch.fft.fft(number), number.conj().cpu().cuda())
    eighth = torch.randn(16, 16, device="cuda").to(torch.float8_e4m3fn)
    assert (eighth.element_size(), ours(eighth, eighth.float())) == (1, True)
    quantized = torch.quantize_per_tensor(ones, 0.1, 0, torch.qint8)
    assert ours(quantized, quantized.dequantize(), quantized.int_repr())


@pytest.mark.filterwarnings("ignore:.*torch.jit")  # torch's own, on its way to jvp
def test_transforms_of_functions():
    weight, given = torch.randn(3, 3, device="cuda"), torch.randn(5, 3, device="cuda")

    def loss(weight, row):
        return (row @ weight).square().sum() + torch.zeros(1, device="cuda")[0]

    each = torch.vmap(torch.func.grad(loss), (None, 0))(weight, given)
    assert each.shape == (5, 3, 3)
    assert ours(each, torch.func.jacrev(lambda w: w.sin())(weight), torch.func.hessian(lambda w: (w**3).sum())(weight))
    assert ours(*torch.func.jvp(lambda w: w * 2, (weight,), (weight,)))
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        leaf = weight.clone().requires_grad_()
        leaf.pow(2).sum().backward()
    assert ours(leaf.grad)


def test_what_leaves_and_comes_back(two_devices):
    np = pytest.importorskip("numpy")
    made = torch.arange(3.0, device="cuda")
    for wrong in (lambda: made.numpy(), lambda: np.asarray(made)):
        with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
            wrong()
    assert ours(torch.from_numpy(np.ones(3)).cuda(), torch.as_tensor(np.ones(3), device="cuda"))
    file = io.BytesIO()
    torch.save({"whole": made, "part": made[1:]}, file)
    for where, index in (("cuda:1", 1), ({"cuda:0": "cuda:1"}, 1), (torch.device("cuda", 1), 1), (None, 0)):
        file.seek(0)
        loaded = torch.load(file, map_location=where)
        assert [loaded[name].device.index for name in ("whole", "part")] == [index] * 2
        assert loaded["part"].untyped_storage().data_ptr() == loaded["whole"].untyped_storage().data_ptr()


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_a_profile_of_device_code():
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], profile_memory=True) as seen:
        torch.ones(3, device="cuda") * 2
    assert "aten::mul" in seen.key_averages().table()

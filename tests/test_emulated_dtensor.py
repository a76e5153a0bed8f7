"""DTensor, FSDP and tensor parallelism on emulated tensors: the numbers of plain training, and a shard's memory.

With `--sglmem-device cuda` on a machine of two GPUs the same functions run over NCCL itself.
"""

from __future__ import annotations

import re

import pytest

from pytest_sglmem import RankRaised

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.world(size=2, init=False)
MIB = 1 << 20
WIDE = 512  # a layer of WIDE x WIDE float32 is 1 MiB


def begin():
    import warnings

    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    warnings.simplefilter("ignore")  # what torch says of its own young parts
    dist.init_process_group("nccl")
    return dist, dist.get_rank(), init_device_mesh("cuda", (2,))


def live_bytes():
    """What the program holds: without what cuBLAS keeps in torch's allocator on a GPU, 32 MiB a stream."""
    from pytest_sglmem.emulated import current

    torch.cuda.synchronize()
    if current() is None:
        torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


def or_skip(run, *args):
    try:
        return run(*args)
    except RankRaised as error:
        if re.search("gloo does not support", str(error)):
            pytest.skip("the gloo of this torch lacks an operation that NCCL has")
        raise


def distributed_tensors():
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    dist, _, mesh = begin()
    base = live_bytes()
    whole = torch.arange(8.0, device="cuda").reshape(4, 2)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    out = {
        "devices": [one.device.type for one in (sharded, sharded.to_local(), sharded + 1, sharded.full_tensor())],
        "is_cuda": sharded.is_cuda,
        "local": sharded.to_local().tolist(),
        "product": (sharded @ sharded.t()).full_tensor().tolist(),
        "sum": sharded.sum().full_tensor().item(),
        "replicated": sharded.redistribute(placements=[Replicate()]).to_local().tolist(),
        "columns": sharded.redistribute(placements=[Shard(1)]).to_local().tolist(),
    }
    host = sharded.cpu()
    out["host"] = (type(host) is DTensor, host.device.type, host.to_local().device.type, host.to_local().tolist())
    leaf = DTensor.from_local(torch.ones(2, 2, device="cuda"), mesh, [Shard(0)]).requires_grad_()
    (leaf * 3).sum().full_tensor().backward()
    out["gradient"] = (leaf.grad.device.type, leaf.grad.full_tensor().tolist())
    del whole, sharded, host, leaf
    out["left"] = live_bytes() - base
    dist.destroy_process_group()
    return out


def test_distributed_tensors(world):
    whole = torch.arange(8.0).reshape(4, 2)
    for rank, out in enumerate(or_skip(world.run, distributed_tensors)):
        mine = whole[2 * rank : 2 * rank + 2].tolist()
        assert out == {
            "devices": ["cuda"] * 4,
            "is_cuda": True,
            "local": mine,
            "product": (whole @ whole.t()).tolist(),
            "sum": 28.0,
            "replicated": whole.tolist(),
            "columns": whole[:, rank : rank + 1].tolist(),
            "host": (True, "cpu", "cpu", mine),
            "gradient": ("cuda", [[3.0] * 2] * 4),
            "left": 0,
        }


def moved_about():
    from torch.distributed.tensor import Shard, distribute_tensor

    dist, _, mesh = begin()
    sharded = distribute_tensor(torch.arange(8.0, device="cuda").reshape(4, 2), mesh, [Shard(0)])
    host = sharded.to("cpu")
    out = {
        "itself": [one is sharded for one in (sharded.to("cuda"), sharded.to(device="cuda"), sharded.cuda())],
        "copied": sharded.to("cuda", copy=True) is sharded,
        "half": sharded.to("cuda", torch.float16),
        "back": host.to("cuda"),
        "cuda()": host.cuda(),
        "like": host.to(sharded.to_local()),
    }
    for name in ("half", "back", "cuda()", "like"):
        out[name] = (out[name].device.type, out[name].to_local().device.type, out[name].to_local().tolist())
    for name, leaf, there in (("host", host, "cuda"), ("device", sharded, "cpu")):
        leaf = leaf.detach().requires_grad_()
        (leaf.to(there) * 3).sum().backward()
        out[f"{name} gradient"] = (leaf.grad.device.type, leaf.grad.full_tensor().tolist())
    dist.destroy_process_group()
    return out


def test_distributed_tensors_move_as_plain_ones_do_and_their_gradients_move_back(world):
    for rank, out in enumerate(world.run(moved_about)):
        mine = torch.arange(8.0).reshape(4, 2)[2 * rank : 2 * rank + 2].tolist()
        assert out == {
            "itself": [True] * 3,
            "copied": False,
            **dict.fromkeys(("half", "back", "cuda()", "like"), ("cuda", "cuda", mine)),
            "host gradient": ("cpu", [[3.0] * 2] * 4),
            "device gradient": ("cuda", [[3.0] * 2] * 4),
        }


def layers(wide):
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(wide, wide) for _ in range(2)]).cuda()


def trained(model, rank, wide, steps=3):
    """The loss of each step; both ranks' data is what one process would see in one batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        data = torch.full((1, wide), float(2 * step + rank), device="cuda")
        loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def fully_sharded():
    from torch.distributed.fsdp import fully_shard

    dist, rank, mesh = begin()
    plain = torch.nn.parallel.DistributedDataParallel(layers(8))
    expected = trained(plain, rank, 8)
    model = layers(8)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    losses = trained(model, rank, 8)
    weight = model[0].weight
    out = {
        "same losses": torch.allclose(torch.tensor(losses), torch.tensor(expected)),
        "same weights": torch.allclose(weight.full_tensor(), plain.module[0].weight),
        "device": (weight.device.type, weight.to_local().device.type),
        "shard": tuple(weight.to_local().shape),
        "state": {name: value.device.type for name, value in model.state_dict().items()},
    }
    dist.destroy_process_group()
    return out


def test_fully_shard_trains_as_plain_training_does(world):
    for out in world.run(fully_sharded):
        assert out == {
            "same losses": True,
            "same weights": True,
            "device": ("cuda", "cuda"),
            "shard": (4, 8),
            "state": dict.fromkeys(("0.weight", "0.bias", "1.weight", "1.bias"), "cuda"),
        }


def sharded_and_kept():
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    dist, _, mesh = begin()
    model = layers(8)
    before = model[0].weight.detach().clone()
    fully_shard(model, mesh=mesh)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    devices = [model.to(there)[0].weight.device.type for there in ("cuda", "cpu", "cuda")]
    same = torch.equal(model[0].weight.full_tensor(), before)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    out = torch.equal(whole["0.weight"], before), whole["0.weight"].device.type, devices, same, norm.item()
    dist.destroy_process_group()
    return out


def test_a_sharded_model_moves_and_gives_its_whole_state(world):
    assert world.run(sharded_and_kept) == [(True, "cuda", ["cuda", "cpu", "cuda"], True, 0.0)] * 2


def drawn():
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, rand

    dist, _, mesh = begin()
    torch.manual_seed(5)
    with torch.device("meta"):
        model = torch.nn.Linear(8, 8)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cuda").reset_parameters()
    model(torch.ones(2, 8, device="cuda")).sum().backward()
    copies = distribute_tensor(torch.zeros(8, device="cuda"), mesh, [Replicate()])
    out = {
        "shards": [model.weight.to_local(), rand(4, 8, device_mesh=mesh, placements=[Shard(0)]).to_local()],
        "replicas": [copies.normal_().to_local().clone(), copies.uniform_().to_local(), torch.rand(2, device="cuda")],
    }
    out = {kind: [one.detach().tolist() for one in values] for kind, values in out.items()}
    out["bound"] = model.weight.full_tensor().abs().max().item() <= 8**-0.5
    dist.destroy_process_group()
    return out


def test_shards_draw_apart_and_replicas_alike(world):
    first, second = world.run(drawn)
    assert first["replicas"] == second["replicas"]
    assert all(one != other for one, other in zip(first["shards"], second["shards"], strict=True))
    assert first["replicas"][0] != first["replicas"][1]
    assert (first["bound"], second["bound"]) == (True, True)


def sharded_memory():
    from torch.distributed.fsdp import fully_shard

    dist, _, mesh = begin()
    base = live_bytes()
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDE, WIDE, bias=False, device="cuda") for _ in range(4)])
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    sharded = live_bytes() - base
    model(torch.ones(1, WIDE, device="cuda")).sum().backward()
    with_gradients = live_bytes() - base
    model.zero_grad()
    without = live_bytes() - base
    del model
    dist.destroy_process_group()
    return sharded, with_gradients, without


def test_a_rank_holds_its_shards_and_no_more(world):
    for sharded, with_gradients, without in world.run(sharded_memory):
        assert sharded == 2 * MIB
        assert 4 * MIB <= with_gradients < 4 * MIB + MIB // 2
        assert 2 * MIB <= without < 2 * MIB + MIB // 2


def tensor_parallel():
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    dist, _, mesh = begin()
    model = layers(8)
    data = torch.linspace(0, 1, 16, device="cuda").reshape(2, 8)
    expected = model(data)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    answer = model(data)
    answer.sum().backward()
    out = (
        answer.device.type,
        torch.allclose(answer, expected, atol=1e-6),
        tuple(model[0].weight.to_local().shape),
        model[1].weight.grad.device.type,
    )
    dist.destroy_process_group()
    return out


def test_tensor_parallel_layers(world):
    assert world.run(tensor_parallel) == [("cuda", True, (4, 8), "cuda")] * 2


def sharding_steps():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = layers(64)
    fully_shard(model, mesh=init_device_mesh("cuda", (2,)))

    def step(n):
        model(torch.ones(n, 64, device="cuda")).sum().backward()
        model.zero_grad()

    return step


@pytest.mark.world(size=2)
def test_steps_of_a_sharded_model_are_flat(world, live_bytes):
    live_bytes.assert_flat(world.trace(sharding_steps, [2, 3], cycles=3))

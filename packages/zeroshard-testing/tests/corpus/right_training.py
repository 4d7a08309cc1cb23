"""Training in parallel, as torch offers it."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn, ones
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from zeroshard_testing import assert_replicas_equal, rank_fixture

pytestmark = pytest.mark.ranks(2)


def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def batch(rank):
    torch.manual_seed(10 + rank)
    return torch.randn(5, 3)


@rank_fixture
def model(rank):
    return DistributedDataParallel(network())


@pytest.fixture
def optimizer(model):
    return torch.optim.SGD(model.parameters(), 0.1)


def test_replicas_stay_equal(rank, model, optimizer):
    for _ in range(3):
        optimizer.zero_grad()
        model(batch(rank)).square().mean().backward()
        optimizer.step()
    assert_replicas_equal(model.state_dict())


def test_gradients_are_averaged(rank, model):
    model(batch(rank)).square().mean().backward()
    alone = network()
    (sum(alone(batch(other)).square().mean() for other in range(2)) / 2).backward()
    for here, there in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(here.grad, there.grad)


def test_accumulation(rank, model, optimizer):
    with model.no_sync():
        model(batch(rank)).sum().backward()
    model(batch(rank)).sum().backward()
    assert_replicas_equal([parameter.grad for parameter in model.parameters()])


@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {"static_graph": True}, {"bucket_cap_mb": 1e-5}])
def test_options(rank, options):
    model = DistributedDataParallel(network(), **options)
    for _ in range(3):
        model(batch(rank)).sum().backward()
    assert_replicas_equal([parameter.grad for parameter in model.parameters()])


def test_an_unused_parameter(rank):
    layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    layers.forward = lambda x: layers[0](x) if rank else layers[1](layers[0](x))
    model = DistributedDataParallel(layers, find_unused_parameters=True)
    for _ in range(2):
        model(ones(2, 3)).sum().backward()


def test_buffers(rank):
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    for _ in range(2):
        model(batch(rank)).sum().backward()


def test_a_hook_of_communication(rank, model):
    def average(_, bucket):
        work = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    model.register_comm_hook(None, average)
    model(batch(rank)).sum().backward()
    assert_replicas_equal([parameter.grad for parameter in model.parameters()])


def test_clipping(rank, model):
    model(batch(rank)).sum().backward()
    assert nn.utils.clip_grad_norm_(model.parameters(), 0.1) > 0


def test_automatic_mixed_precision(rank, model):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(batch(rank)).sum()
    loss.backward()


def test_activation_checkpointing(rank):
    model = DistributedDataParallel(network())
    out = torch.utils.checkpoint.checkpoint(model, batch(rank), use_reentrant=False)
    out.sum().backward()


def test_a_sharded_optimizer(rank, model):
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    model(batch(rank)).sum().backward()
    optimizer.step()
    assert_replicas_equal(model.state_dict())


def test_fully_sharded(rank):
    model = network()
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    alone = copy.deepcopy(network())
    for _ in range(2):
        optimizer.zero_grad()
        model(batch(0)).square().mean().backward()
        optimizer.step()
        alone.zero_grad()
        alone(batch(0)).square().mean().backward()
        for parameter in alone.parameters():
            parameter.data -= 0.1 * parameter.grad
    for here, there in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(here.full_tensor(), there)


@pytest.mark.ranks(4)
def test_hybrid_sharded(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(network(), mesh=mesh)
    model(batch(rank)).sum().backward()
    for parameter in model.parameters():
        assert parameter.grad.placements == (Replicate(), Shard(0))


def test_fully_sharded_by_a_wrapper(rank):
    model = FullyShardedDataParallel(network(), device_id=torch.device("cpu"))
    model(batch(rank)).sum().backward()


def test_a_mesh_and_distributed_tensors(rank):
    mesh = init_device_mesh("cpu", (2,))
    cut = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)])
    assert cut.redistribute(mesh, [Replicate()]).to_local().sum() == 28


def test_a_product_of_distributed_tensors(rank):
    mesh = init_device_mesh("cpu", (2,))
    left = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)])
    right = distribute_tensor(torch.arange(6.0).view(2, 3), mesh, [Replicate()])
    expected = torch.arange(8.0).view(4, 2) @ torch.arange(6.0).view(2, 3)
    torch.testing.assert_close((left @ right).full_tensor(), expected)


def test_distributed_tensors_of_uneven_parts(rank):
    mesh = init_device_mesh("cpu", (2,))
    cut = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])
    assert isinstance(cut, DTensor)
    assert cut.to_local().shape == (3 - rank,)
    assert cut.sum().full_tensor() == 10


def test_tensor_parallel(rank):
    mesh = init_device_mesh("cpu", (2,))
    expected = network()(batch(0))
    model = parallelize_module(network(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    torch.testing.assert_close(model(batch(0)), expected)


@pytest.mark.may_skip("checkpoints need numpy")
def test_a_checkpoint(rank, tmp_path):
    pytest.importorskip("numpy", reason="checkpoints need numpy")
    mesh = init_device_mesh("cpu", (2,))
    saved = {"weight": distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])}
    checkpoint.save(saved, checkpoint_id=tmp_path / "checkpoint")
    loaded = {"weight": distribute_tensor(torch.zeros(8), mesh, [Replicate()])}
    checkpoint.load(loaded, checkpoint_id=tmp_path / "checkpoint")
    assert loaded["weight"].to_local().sum() == 28


def test_a_file_that_one_rank_writes(rank, tmp_path):
    path = tmp_path / "model.pt"
    if rank == 0:
        torch.save(network().state_dict(), path)
    dist.barrier()
    assert_replicas_equal(torch.load(path, weights_only=True))


@pytest.mark.ranks(3)
def test_equal_replicas(rank):
    same = {"weight": torch.arange(6.0).reshape(2, 3), "step": torch.tensor(1), "nan": torch.tensor([torch.nan])}
    same |= {"complex": ones(2) * 1j, "bf16": ones(2).bfloat16(), "empty": ones(0)}
    assert_replicas_equal(same)
    if rank == 2:
        same["weight"][1, 0] = 7
    with pytest.raises(AssertionError, match=r"rank 2 has 7\.0, rank 0 has 3\.0"):
        assert_replicas_equal(same)


@pytest.mark.ranks(3)
def test_a_parameter_server(rank, world_size):
    weight = torch.zeros(2)
    for _ in range(2):
        if rank == 0:
            for other in range(1, world_size):
                grad = torch.empty(2)
                dist.recv(grad, other)
                weight += grad
            for other in range(1, world_size):
                dist.send(weight, other)
        else:
            dist.send(ones(2), 0)
            dist.recv(weight, 0)
    assert weight.sum() == 8


def test_the_same_seed_on_all_ranks(rank):
    x = torch.randn(3)
    found = [torch.empty(3), torch.empty(3)]
    dist.all_gather(found, x)
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)

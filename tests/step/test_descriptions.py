"""What an optimizer says of itself: as a value, and when it is printed, on one rank alone and at any time."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import torch
import torch.distributed as dist
from support.debugged_training import Training
from support.training import cutting, set_gradients, small_model
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from zeroshard import OptimizerDescription, ZeroRedundancyOptimizer, shard_gradients
from zeroshard.byte_units import format_bytes
from zeroshard_integrations.ddp import register_reduce_to_owner

BOTH = pytest.mark.parametrize("hook", ["none", "reduce_to_owner_hook"])


@pytest.mark.by_default("1-whole-none | 2-split-reduce_to_owner_hook")
@pytest.mark.ranks(1, 2, backend="gloo")
@BOTH
@pytest.mark.parametrize("partition", ["whole", "split"])
def test_a_description_has_the_plan_the_state_and_the_traffic(
    rank: int, world_size: int, hook: str, partition: str
) -> None:
    training = Training(hook, "OFF", partition)
    assert training.optimizer.describe().state_bytes_here == 0
    training.iterate(4)
    before = training.optimizer.describe()
    training.iterate()
    said = training.optimizer.describe()
    plan, nbytes = training.optimizer.plan, sum(param.nbytes for param in training.params)
    assert isinstance(said, OptimizerDescription)
    assert (said.optimizer, said.rank, said.world_size) == ("Adam", rank, world_size)
    assert [tensor.owners for tensor in said.tensors] == list(plan.owners)
    assert [tensor.name for tensor in said.tensors] == [spec.name for spec in plan.tensors]
    assert sum(tensor.nbytes for tensor in said.tensors) == nbytes
    # Two numbers per element, and the step.
    assert [t.state_bytes for t in said.tensors] == [2 * t.nbytes + 4 for t in said.tensors]
    assert sum(t.state_bytes_here for t in said.tensors) == said.state_bytes_here
    assert said.state_bytes_here == 2 * said.owned_bytes + 4 * len(plan.of_rank(rank))
    sent = {kind: said.traffic[kind].bytes_sent - before.traffic[kind].bytes_sent for kind in said.traffic}
    assert said.step_bytes == sent["broadcast"]
    assert not said.shards_gradients
    if hook == "reduce_to_owner_hook":
        assert said.gradient_bytes_here == nbytes
        assert sorted(index for bucket in said.buckets for index in bucket.tensors) == [*range(len(plan.tensors))]
        assert sum(bucket.nbytes for bucket in said.buckets) == nbytes
        assert said.backward_bytes == sent["reduce"]
    else:
        assert said.buckets == ()
    read = json.loads(json.dumps(dataclasses.asdict(said)))
    assert read["tensors"][0]["shape"] == list(training.params[0].shape)
    assert read["traffic"]["broadcast"]["bytes_sent"] == said.traffic["broadcast"].bytes_sent
    assert str(training.optimizer) == f"ZeroRedundancyOptimizer of {said.to_text()}"


@pytest.mark.by_default("2-whole | 3-split")
@pytest.mark.ranks(2, 3, backend="gloo")
@pytest.mark.parametrize("partition", ["whole", "split"])
def test_a_description_of_sharded_gradients_has_their_buckets(rank: int, world_size: int, partition: str) -> None:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    # The optimizer has them in another order than they run.
    last, *others = [(name, param) for name, param in model.named_parameters() if name.endswith("weight")]
    named, nbytes = [*others, last], 4 * 64 * 64
    for layer in model:
        layer.bias.requires_grad_(False)
    optimizer = ZeroRedundancyOptimizer(named, optim.SGD, lr=0.1, partition=cutting(partition))
    assert not optimizer.describe().shards_gradients
    shard_gradients(model, optimizer, bucket_mb=2.5 * nbytes / 2**20)
    for _ in range(2):
        before = optimizer.describe()
        model(torch.ones(1, 64)).sum().backward()
    said, plan = optimizer.describe(), optimizer.plan
    # Buckets are in the order in which backward makes gradients: the first tensor of the optimizer is that of layer 1.
    assert [bucket.tensors for bucket in said.buckets] == [(2, 1), (0, 3)]
    assert [bucket.nbytes for bucket in said.buckets] == [2 * nbytes, 2 * nbytes]
    for bucket in said.buckets:
        parts = dict(zip(bucket.owners, bucket.parts, strict=True))
        shards = [shard for tensor in bucket.tensors for shard in plan.of_tensor(tensor)]
        assert parts == {owner: 4 * sum(s.numel for s in shards if s.rank == owner) for owner in bucket.owners}
        assert sum(bucket.parts) == bucket.nbytes
    assert said.shards_gradients
    assert said.gradient_bytes_here == said.owned_bytes
    assert said.transient_bytes == 4 * nbytes
    assert said.backward_bytes == said.traffic["reduce"].bytes_sent - before.traffic["reduce"].bytes_sent
    assert "gradients are sharded: " in said.to_text()
    assert f"and at most {format_bytes(4 * nbytes)} in flight" in str(optimizer)


@pytest.mark.ranks(2, backend="gloo")
def test_each_of_two_optimizers_describes_its_own_traffic() -> None:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    model = small_model()
    ours = [ZeroRedundancyOptimizer(list(model.parameters())[n::2], optim.SGD, lr=0.1) for n in range(2)]
    for optimizer in ours:
        set_gradients(model.parameters(), 0)
        optimizer.step()
    numbers = [len(optimizer.describe().tensors) for optimizer in ours]
    assert sum(numbers) == len(list(model.parameters()))
    assert [optimizer.describe().traffic["broadcast"].bytes_sent for optimizer in ours] == [
        optimizer.describe().step_bytes for optimizer in ours
    ]


SIZE = r"([\d.]+) (bytes|kB|MB)"


def sizes_in(line: str) -> list[float]:
    """All sizes of a line, in bytes."""
    return [float(number) * {"bytes": 1, "kB": 1e3, "MB": 1e6}[unit] for number, unit in re.findall(SIZE, line)]


def lines_of(optimizer: optim.Optimizer) -> dict[str, str]:
    return dict(line.strip().split(": ", 1) for line in repr(optimizer).splitlines()[1:])


def state_bytes(optimizer: optim.Optimizer) -> int:
    return sum(tensor.nbytes for entries in optimizer.state.values() for tensor in entries.values())


@pytest.mark.by_default("2-whole | 3-split")
@pytest.mark.ranks(2, 3, backend="gloo")
@pytest.mark.parametrize("partition", ["whole", "split"])
def test_repr_has_the_bytes_of_state_here_and_of_all_ranks(rank: int, world_size: int, partition: str) -> None:
    model, twin = nn.Linear(1000, 600), nn.Linear(1000, 600)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, partition=partition)
    plain = optim.AdamW(twin.parameters())
    for module in (model, twin):
        set_gradients(module.parameters(), 0)
    optimizer.step()
    plain.step()
    if rank == 0:
        # On one rank alone.
        first, *_ = repr(optimizer).splitlines()
        assert first == f"ZeroRedundancyOptimizer of AdamW, rank 0 of {world_size}, partition {partition!r}"
        said = lines_of(optimizer)
        assert said["group 0"] == "2 tensors, lr 0.001"
        here, total = sizes_in(said["state here"])
        assert here == pytest.approx(state_bytes(optimizer.optim), rel=0.01)
        assert total == pytest.approx(state_bytes(plain), rel=0.01)
        owned, of = sizes_in(said["parameters here"])
        assert (owned, of) == pytest.approx((here / 2, total / 2), rel=0.01)


@pytest.mark.ranks(3, backend="gloo")
def test_repr_says_that_there_is_no_state_yet(rank: int) -> None:
    model = nn.Linear(3, 2)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.1, momentum=0.9)
    assert lines_of(optimizer)["state"] == "none yet"
    set_gradients(model.parameters(), 0)
    optimizer.step()
    said = lines_of(optimizer)
    # There are two tensors.
    assert said["parameters here"].startswith("0 of 2" if rank == 2 else "1 of 2")
    if rank == 2:
        assert said["state here"] == "0 bytes of 32 bytes"
    plain = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.1)
    plain.step()
    assert lines_of(plain)["state"] == "none yet"


@pytest.mark.ranks(1, backend="gloo")
def test_repr_of_one_rank_alone_has_its_state() -> None:
    embedding = nn.Embedding(10, 4, sparse=True)
    optimizer = ZeroRedundancyOptimizer(embedding.parameters(), optim.SparseAdam)
    embedding(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    said = lines_of(optimizer)
    assert sizes_in(said["state here"]) == pytest.approx([2 * 40 * 4] * 2, abs=8)


@pytest.mark.ranks(2, backend="gloo")
def test_repr_counts_only_the_state_of_trained_groups(rank: int) -> None:
    model = small_model()
    model[0].requires_grad_(False)
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[2:].parameters()), "lr": 0.5}]
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    groups.append({"params": list(model[1].parameters())})
    optimizer = ZeroRedundancyOptimizer(groups, optim.Adam)
    register_reduce_to_owner(ddp, optimizer)
    ddp(torch.ones(2, 40)).sum().backward()
    optimizer.step()
    said = lines_of(optimizer)
    assert said["group 1"] == "5 tensors, lr 0.5"
    here, total = sizes_in(said["state here"])
    trained = sum(param.nbytes for param in model.parameters() if param.requires_grad)
    assert total == pytest.approx(2 * trained, rel=0.01)
    assert here == pytest.approx(state_bytes(optimizer.optim), rel=0.01)


def test_one_that_was_not_built_can_be_printed() -> None:
    assert "ZeroRedundancyOptimizer" in repr(object.__new__(ZeroRedundancyOptimizer))

"""What PyTorch's documentation and ours show of Join runs as it stands, with the import changed."""

# No `from __future__ import annotations`: examples are executed as they are.
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.example_scripts import page_script
from torch.distributed.algorithms.join import Joinable as TorchJoinable
from zeroshard_testing import assert_replicas_equal

MODULES = ("torch.distributed.algorithms.join", "zeroshard_integrations.join")
EVERY_MODULE = pytest.mark.parametrize("module", MODULES)

WITH_DDP = """
import torch
import torch.distributed as dist
from {module} import Join
from torch.nn.parallel import DistributedDataParallel as DDP

rank = dist.get_rank()
model = DDP(torch.nn.Linear(1, 1))
# Rank 1 gets one more input than rank 0
inputs = [torch.tensor([1]).float() for _ in range(5 + rank)]
num_inputs = 0
with Join([model]):
    for input in inputs:
        num_inputs += 1
        loss = model(input).sum()
        loss.backward()
"""

WITH_ZERO = """
import torch
import torch.distributed as dist
from {module} import Join
from {zero} import ZeroRedundancyOptimizer as ZeRO
from torch.nn.parallel import DistributedDataParallel as DDP

rank = dist.get_rank()
model = DDP(torch.nn.Linear(1, 1))
optim = ZeRO(model.parameters(), torch.optim.Adam, lr=0.01)
# Rank 1 gets one more input than rank 0
inputs = [torch.tensor([1]).float() for _ in range(5 + rank)]
num_inputs = 0
# The keyword goes to the join hooks
with Join([model, optim], divide_by_initial_world_size=False):
    for input in inputs:
        num_inputs += 1
        loss = model(input).sum()
        loss.backward()
        optim.step()
"""

COUNTER = """
import torch
import torch.distributed as dist
from {module} import Join, Joinable, JoinHook

class CounterJoinHook(JoinHook):
    def __init__(self, counter, sync_max_count):
        self.counter = counter
        self.sync_max_count = sync_max_count

    def main_hook(self):
        t = torch.zeros(1)
        dist.all_reduce(t)

    def post_hook(self, is_last_joiner):
        if not self.sync_max_count:
            return
        common_rank = self.counter.find_common_rank(self.counter.rank, is_last_joiner)
        if self.counter.rank == common_rank:
            self.counter.max_count = self.counter.count.detach().clone()
        dist.broadcast(self.counter.max_count, src=common_rank)

class Counter(Joinable):
    def __init__(self):
        super().__init__()
        self.rank = dist.get_rank()
        self.count = torch.zeros(1)
        self.max_count = torch.zeros(1)

    def __call__(self):
        Join.notify_join_context(self)
        t = torch.ones(1)
        dist.all_reduce(t)
        self.count += t

    def join_hook(self, **kwargs):
        return CounterJoinHook(self, kwargs.get("sync_max_count", False))

    @property
    def join_device(self):
        return torch.device("cpu")

    @property
    def join_process_group(self):
        return dist.group.WORLD

    def find_common_rank(self, rank, to_consider):
        common_rank = torch.tensor([rank if to_consider else -1])
        dist.all_reduce(common_rank, op=dist.ReduceOp.MAX)
        return int(common_rank)

rank = dist.get_rank()
inputs = [torch.tensor([1.0]) for _ in range(5 + rank)]
counter = Counter()
with Join([counter], sync_max_count=True):
    for input in inputs:
        counter()
"""


def run(source: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(source, names)
    return names


@pytest.mark.ranks(2, backend="gloo")
@EVERY_MODULE
def test_the_example_with_ddp_alone_runs(rank: int, module: str) -> None:
    names = run(WITH_DDP.format(module=module))
    assert names["num_inputs"] == 5 + rank
    assert_replicas_equal(names["model"].parameters())


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize(("zero", "module"), [*zip(("torch.distributed.optim", "zeroshard"), MODULES, strict=True)])
def test_the_example_with_an_optimizer_runs(rank: int, module: str, zero: str) -> None:
    torch.manual_seed(0)
    names = run(WITH_ZERO.format(module=module, zero=zero))
    assert names["num_inputs"] == 5 + rank
    assert_replicas_equal(names["model"].parameters())
    if zero != "zeroshard":
        return
    # Every batch adds 1 to each gradient, and nothing sets them to zero.
    torch.manual_seed(0)
    plain = torch.nn.Linear(1, 1)
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    for number in range(6):
        for param in plain.parameters():
            param.grad = torch.full_like(param, number + 1)
        optimizer.step()
    torch.testing.assert_close(list(names["model"].module.parameters()), list(plain.parameters()))


@pytest.mark.exhaustive_at(3)
@pytest.mark.ranks(2, 3, backend="gloo")
@EVERY_MODULE
def test_the_example_that_counts_runs(rank: int, world_size: int, module: str) -> None:
    names = run(COUNTER.format(module=module))
    expected = sum(5 + other for other in range(world_size))
    assert names["counter"].max_count.item() == expected
    assert names["counter"].count.item() == sum(min(5 + rank, 5 + other) for other in range(world_size))


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("announced_by", MODULES)
def test_a_joinable_of_torchs_runs_in_a_block_of_ours_beside_a_model(rank: int, announced_by: str) -> None:
    counting = run(COUNTER.format(module=announced_by))
    assert issubclass(counting["Counter"], TorchJoinable)
    training = run(WITH_ZERO.format(module=MODULES[1], zero="zeroshard").replace("5 + rank", "2"))
    counter = counting["Counter"]()
    with training["Join"]([counter, training["model"], training["optim"]]):
        for _ in range(2 + 3 * rank):
            counter()
            training["optim"].zero_grad()
            training["model"](torch.ones(1)).sum().backward()
            training["optim"].step()
    assert counter.count.item() == (4 if rank == 0 else 7)
    assert_replicas_equal(training["model"].parameters())


@pytest.mark.ranks(2, backend="gloo")
def test_the_page_on_join_runs(rank: int) -> None:
    names = run(page_script("join"))
    counts = [torch.zeros(1) for _ in range(2)]
    dist.all_gather(counts, torch.tensor([float(len(names["batches"]))]))
    assert counts[0] != counts[1]
    assert_replicas_equal(names["model"].parameters())
    assert 0 < names["sums"][0] / names["sums"][1] < 5.6

"""What is written for torch's class runs with the import line changed, and gives the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.combinations import FLAG, each_of
from support.training import assert_bitwise_equal, cutting, set_gradients, small_model, twins
from torch import nn, optim
from torch.distributed.algorithms.join import Joinable
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel
from zeroshard import ZeroRedundancyOptimizer

TUTORIAL = """
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.optim as optim
from {module} import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

torch.manual_seed(0)
rank = dist.get_rank()
model = nn.Sequential(*[nn.Linear(200, 200) for _ in range(5)])
ddp_model = DDP(model)
loss_fn = nn.MSELoss()
optimizer = ZeroRedundancyOptimizer(
    ddp_model.parameters(), optimizer_class=torch.optim.Adam, parameters_as_bucket_view={view}, lr=0.01
)
scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=2)
losses = []
for iteration in range(5):
    torch.manual_seed(100 * iteration + rank)
    optimizer.zero_grad()
    loss = loss_fn(ddp_model(torch.randn(20, 200)), torch.randn(20, 200))
    loss.backward()
    optimizer.step()
    scheduler.step()
    losses.append(loss.item())
optimizer.consolidate_state_dict(to=0)
saved = optimizer.state_dict() if rank == 0 else None
weights = [parameter.detach() for parameter in ddp_model.parameters()]
"""


@pytest.mark.ranks(3, backend="gloo")
@pytest.mark.parametrize("view", FLAG, ids=["params", "views"])
def test_a_tutorial_script_runs_with_the_import_line_changed(rank: int, view: bool) -> None:
    results: list[dict[str, Any]] = []
    for module in ("torch.distributed.optim", "zeroshard"):
        names: dict[str, Any] = {}
        exec(TUTORIAL.format(module=module, view=view), names)
        results.append(names)
    theirs, ours = results
    assert ours["losses"] == theirs["losses"]
    assert all(torch.equal(a, b) for a, b in zip(ours["weights"], theirs["weights"], strict=True))
    if rank == 0:
        assert ours["saved"]["param_groups"] == theirs["saved"]["param_groups"]
        for index, entries in theirs["saved"]["state"].items():
            assert all(torch.equal(ours["saved"]["state"][index][key], value) for key, value in entries.items())


@pytest.mark.ranks(2, 3, backend="gloo")
def test_attributes_and_default_partition_are_torchs(rank: int, world_size: int) -> None:
    def groups() -> list[dict[str, Any]]:
        params = list(small_model().parameters())
        return [{"params": params[:4], "lr": 0.1}, {"params": params[4:]}]

    ours, theirs = ZeroRedundancyOptimizer(groups(), optim.Adam), TorchZero(groups(), optim.Adam)
    assert isinstance(ours, optim.Optimizer)
    assert isinstance(ours, Joinable)
    for name in ("world_size", "rank", "global_rank", "parameters_as_bucket_view", "initialized", "_overlap_with_ddp"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.process_group is theirs.process_group
    assert type(ours.optim) is optim.Adam
    assert (ours.join_device, ours.join_process_group) == (theirs.join_device, theirs.join_process_group)
    assert list(ours._param_to_rank.values()) == [
        theirs._param_to_rank[p] for g in theirs.param_groups for p in g["params"]
    ]
    shapes = [
        [
            [sorted(tuple(p.shape) for p in group["params"]) for group in of_rank]
            for of_rank in o._partition_parameters()
        ]
        for o in (ours, theirs)
    ]
    assert shapes[0] == shapes[1]
    assert [g["lr"] for g in ours.param_groups] == [g["lr"] for g in theirs.param_groups]
    ours._sync_param_groups(ours.param_groups, ours.optim.param_groups)
    ours._clear_cache()


@pytest.mark.ranks(2, backend="gloo")
@each_of("option", ["gradient_as_bucket_view", "find_unused_parameters", "static_graph"], partition=["whole", "split"])
def test_it_trains_under_every_kind_of_ddp(rank: int, option: str, partition: str) -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.used, self.unused = nn.Linear(40, 300), nn.Linear(40, 300)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.used(inputs)
            return output if option == "find_unused_parameters" else output + self.unused(inputs)

    models = [DistributedDataParallel(Branches(), **{option: True}) for _ in range(2)]
    optimizers = [
        ZeroRedundancyOptimizer(models[0].parameters(), optim.AdamW, partition=cutting(partition), lr=0.01),
        optim.AdamW(models[1].parameters(), lr=0.01),
    ]
    for step in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            torch.manual_seed(10 * step + rank)
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            # DDP itself cannot accumulate under a static graph.
            if option != "static_graph":
                with model.no_sync():
                    model(torch.randn(4, 40)).square().mean().backward()
            model(torch.randn(4, 40)).square().mean().backward()
            optimizer.step()
        for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.ranks(2, backend="gloo")
def test_models_can_be_averaged_and_the_group_destroyed(rank: int) -> None:
    pair = twins()
    group = dist.new_group()
    sharded = ZeroRedundancyOptimizer(pair[0].parameters(), optim.Adam, process_group=group)
    plain = optim.Adam(pair[1].parameters())
    averages = [optim.swa_utils.AveragedModel(module) for module in pair]
    for step in range(2):
        for module, optimizer, average in zip(pair, (sharded, plain), averages, strict=True):
            set_gradients(module.parameters(), step)
            optimizer.step()
            average.update_parameters(module)
    assert_bitwise_equal(*averages, "in the averages")
    dist.destroy_process_group(group)
    assert "Adam" in repr(sharded.optim)

"""Training in subgroups whose models are averaged, on ranks, and the same algorithm in a single process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from training import cutting
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_integrations.averaging import HierarchicalModelAverager, PeriodicModelAverager, PostLocalSGDOptimizer
from zeroshard_integrations.ddp import hook_with_zero_step, register_reduce_to_owner

Levels = dict[int, int]
"""Period to number of subgroups that average, as for HierarchicalModelAverager; an int is one period for all."""


class Branching(nn.Module):
    """Has two branches, of which each rank takes one in each step; the other gets no gradients there."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(20, 30)
        self.branches = nn.ModuleList([nn.Linear(30, 9), nn.Linear(30, 9)])
        self.frozen = nn.Linear(9, 3).requires_grad_(False)

    def forward(self, inputs: torch.Tensor, branch: int) -> torch.Tensor:
        return self.frozen(self.branches[branch](self.first(inputs).tanh()))


def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Of a rank's batch. Ranks of a subgroup take different branches, the same one, and not that of the other one."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(8, 20, generator=generator, dtype=torch.float64)
    return model(inputs, [rank, rank // 2, 0, step][step % 4] % 2).square().mean()


OPTIMIZERS: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (optim.AdamW, {"lr": 1e-2}),
    "SGD": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
}


class Simulation:
    """The algorithm in one process, with plain optimizers: one model for each subgroup.

    Args:
        ranks: in all.
        subgroup: ranks in a subgroup; they follow each other.
        schedule: how many subgroups average after how many steps.
        warmup: steps without averages.
        over_all: gradients are reduced over all ranks during the warm-up, and a parameter without gradients in one
            subgroup alone has a gradient of zero, as in one DistributedDataParallel with torch's post_localSGD_hook.
    """

    def __init__(
        self, ranks: int, subgroup: int, schedule: Levels | int, warmup: int, optimizer: str, *, over_all: bool = False
    ) -> None:
        kind, settings = OPTIMIZERS[optimizer]
        self.subgroups = [range(start, start + subgroup) for start in range(0, ranks, subgroup)]
        self.models = [Branching().double() for _ in self.subgroups]
        self.optimizers = [kind(model.parameters(), **settings) for model in self.models]
        self.levels = {schedule: len(self.models)} if isinstance(schedule, int) else schedule
        self.warmup, self.over_all, self.steps = warmup, over_all, 0

    def step(self) -> None:
        grads = [
            {rank: self.gradients(model, rank) for rank in ranks}
            for model, ranks in zip(self.models, self.subgroups, strict=True)
        ]
        everywhere = {rank: grad for found in grads for rank, grad in found.items()}
        for model, optimizer, found in zip(self.models, self.optimizers, grads, strict=True):
            used = everywhere if self.over_all and self.steps < self.warmup else found
            for name, param in model.named_parameters():
                there = [grad[name] for grad in used.values() if grad[name] is not None]
                has = there or (self.over_all and any(grad[name] is not None for grad in everywhere.values()))
                param.grad = sum(there, torch.zeros_like(param)) / len(used) if has else None
            optimizer.step()
        since = self.steps - self.warmup
        self.steps += 1
        due = [size for period, size in sorted(self.levels.items()) if since >= 0 and since % period == 0]
        for start in range(0, len(self.models), due[-1]) if due else ():
            self.average(self.models[start : start + due[-1]])

    def gradients(self, model: nn.Module, rank: int) -> dict[str, torch.Tensor | None]:
        twin = copy.deepcopy(model)
        twin.zero_grad()
        loss(twin, rank, self.steps).backward()
        return {name: param.grad for name, param in twin.named_parameters()}

    @torch.no_grad()
    def average(self, models: Sequence[nn.Module]) -> None:
        for params in zip(*[model.parameters() for model in models], strict=True):
            mean = torch.stack(params).mean(0)
            for param in params if params[0].requires_grad else ():
                param.copy_(mean)


@dataclass
class Training:
    """The training of one rank.

    Attributes:
        ddp: "within": each subgroup has a model; "owner" and "stepping": with a hook of ours; "all": one model for all
            ranks, with torch's post_localSGD_hook.
    """

    subgroup: int
    schedule: Levels | int
    warmup: int = 0
    optimizer: str = "AdamW"
    ddp: str = "within"
    partition: str = "whole"
    views: bool = False
    model: Callable[[], nn.Module] = Branching
    steps: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        shape = (dist.get_world_size() // self.subgroup, self.subgroup)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("between", "within"))
        self.between, self.within = mesh.get_group("between"), mesh.get_group("within")
        kind, settings = OPTIMIZERS[self.optimizer]
        self.module = self.model().double()
        self.wrapped = DistributedDataParallel(
            self.module,
            process_group=None if self.ddp == "all" else self.within,
            find_unused_parameters=True,
            gradient_as_bucket_view=True,
        )
        self.zero = ZeroRedundancyOptimizer(
            self.module.parameters(),
            kind,
            process_group=self.within,
            parameters_as_bucket_view=self.views,
            partition=cutting(self.partition),
            overlap_with_ddp=self.ddp == "stepping",
            **settings,
        )
        make: Any = PeriodicModelAverager if isinstance(self.schedule, int) else HierarchicalModelAverager
        self.averager = make(self.schedule, self.warmup, self.between)
        self.local_sgd = PostLocalSGDOptimizer(self.zero, self.averager)
        self.hook_state = PostLocalSGDState(None, self.within, self.warmup)
        if self.ddp == "all":
            self.wrapped.register_comm_hook(self.hook_state, post_localSGD_hook)
        elif self.ddp == "owner":
            register_reduce_to_owner(self.wrapped, self.local_sgd)
        elif self.ddp == "stepping":
            self.wrapped.register_comm_hook(None, hook_with_zero_step(allreduce_hook, self.wrapped, self.zero))

    def step(self) -> None:
        self.local_sgd.zero_grad()
        loss(self.wrapped, dist.get_rank(), self.steps).backward()
        self.local_sgd.step()
        self.steps += 1

    def simulation(self) -> Simulation:
        over_all = self.ddp == "all"
        world = dist.get_world_size()
        return Simulation(world, self.subgroup, self.schedule, self.warmup, self.optimizer, over_all=over_all)

"""What the scripts about checkpoints train, in one of three ways."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_integrations.ddp import register_reduce_to_owner


def build(kind: str) -> tuple[nn.Module, Optimizer]:
    """Return a small model, the same on every rank, and its optimizer."""
    torch.manual_seed(0)
    # float64: another number of ranks then changes results by some 1e-16.
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).double()
    if kind == "sharded":
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
        optimizer = ZeroRedundancyOptimizer(model.named_parameters(), AdamW, lr=1e-3, partition="split")
        register_reduce_to_owner(ddp, optimizer)
        return ddp, optimizer
    if kind == "plain":
        ddp = DistributedDataParallel(model)
        return ddp, AdamW(model.named_parameters(), lr=1e-3)
    if kind == "fsdp":
        fully_shard(model)
        return model, AdamW(model.named_parameters(), lr=1e-3)
    raise ValueError(f"{kind!r} is none of 'sharded', 'plain', 'fsdp'")


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    """Train for these steps. All ranks draw the same rows, and each takes its share; the learning rate falls."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in steps:
        drawing = torch.Generator().manual_seed(step)
        rows = torch.randn(12, 16, generator=drawing, dtype=torch.float64)[rank::ranks]
        optimizer.zero_grad()
        loss = (model(rows) - rows.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
    if rank == 0:
        print(f"steps {steps.start + 1} to {steps.stop} on {ranks} ranks")

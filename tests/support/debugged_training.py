"""Training at a level of TORCH_DISTRIBUTED_DEBUG."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from support.ddp_training import MANY_BUCKETS, batch, register, steps_in_backward
from support.training import cutting, set_gradients, small_model
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from zeroshard import ZeroRedundancyOptimizer


class Training:
    """A model, named tensors, and its optimizer, built at a level; each iteration has the same gradients on all ranks.

    Without a hook gradients are set by hand; with one, DDP computes them.
    """

    def __init__(self, hook: str, level: str = "DETAIL", partition: str = "whole", **settings: Any) -> None:
        dist.set_debug_level(getattr(dist.DebugLevel, level))
        self.hook, self.model, self.number = hook, small_model().double(), 0
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=MANY_BUCKETS) if hook != "none" else None
        self.optimizer = ZeroRedundancyOptimizer(
            list(self.model.named_parameters()),
            optim.Adam,
            partition=cutting(partition),
            overlap_with_ddp=steps_in_backward(hook),
            **settings,
        )
        if self.ddp is not None:
            register(hook, self.ddp, self.optimizer)

    @property
    def params(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def backward(self) -> None:
        self.number += 1
        self.optimizer.zero_grad()
        if self.ddp is None:
            set_gradients(self.params, self.number)
        else:
            self.ddp(batch(self.number)).square().mean().backward()

    def iterate(self, times: int = 1) -> None:
        for _ in range(times):
            self.backward()
            self.optimizer.step()

    def owned_by(self, rank: int) -> int:
        """The first tensor that a rank owns."""
        return int(self.optimizer.plan.of_rank(rank)[0].tensor)

    def state_of(self, index: int) -> dict[str, Any]:
        """The entries of a tensor that this rank owns."""
        entries: dict[str, Any] = self.optimizer.state[self.params[index]]
        return entries

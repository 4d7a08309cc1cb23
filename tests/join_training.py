"""Uneven inputs: every rank its own number of batches, and one process that sees all of them, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from ddp_training import MANY_BUCKETS, register
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from training import cutting, small_model
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_testing import assert_replicas_equal

HOOKS = ("none", "owner", "behind", "interleaved")
"""No communication hook, and those of zeroshard_integrations.ddp."""

OPTIMIZERS: Mapping[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "Adam": (optim.Adam, {"lr": 1e-2, "weight_decay": 0.01}),
    "SGD": (optim.SGD, {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.01}),
    "SGD without decay": (optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
}


def inputs(number: int, rank: int) -> torch.Tensor:
    """Batch ``number`` of a rank, float64, (8, 40)."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randn(8, 40, generator=generator, dtype=torch.float64)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = model(batch)
    return output.square().mean()


class Branches(nn.Module):
    """Uses one branch or both, as a batch says; has buffers that count."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.sometimes, self.never = nn.Linear(40, 30), nn.Linear(30, 30), nn.Linear(30, 30)
        self.norm = nn.BatchNorm1d(30)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.always(batch)
        if bool(batch[0, 0] > 0):
            hidden = hidden + self.sometimes(hidden)
        return hidden


class Normed(nn.Module):
    """With running statistics, which DDP sends around from a rank that has data."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.out = nn.BatchNorm1d(40, affine=False), nn.Linear(40, 5)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        result: torch.Tensor = self.out(self.norm(batch))
        return result


class Uneven:
    """A sharded training on uneven inputs, and its single-process reference.

    Args:
        lengths: how many batches each rank has.
        hook: one of ``HOOKS``.
        divide_by_initial: average gradients over all ranks, or over those that still have data.
        window: how many backwards make a step.
        always_reduces: whether all of them reduce gradients, and not only the last.
        last_incomplete: whether a window that is incomplete when the last rank runs out is stepped.
        clip: the largest norm of gradients, if they are clipped.
        schedule: whether the learning rate falls in every step.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        hook: str,
        *,
        optimizer: str = "Adam",
        partition: str = "whole",
        divide_by_initial: bool = True,
        window: int = 1,
        always_reduces: bool = False,
        last_incomplete: bool = False,
        clip: float | None = None,
        schedule: bool = False,
        model: Callable[[], nn.Module] = small_model,
        loss: Callable[[nn.Module, torch.Tensor], torch.Tensor] = loss_of,
        group: dist.ProcessGroup | None = None,
        ddp: Mapping[str, Any] | None = None,
    ) -> None:
        self.lengths, self.hook, self.group = list(lengths), hook, group
        self.divide_by_initial, self.window, self.clip, self.loss = divide_by_initial, window, clip, loss
        self.always_reduces, self.last_incomplete = always_reduces, last_incomplete
        kind, settings = OPTIMIZERS[optimizer]
        made = model().double()
        self.plain_model = copy.deepcopy(made)
        self.plain = kind(self.plain_model.parameters(), **settings)
        arguments = {"gradient_as_bucket_view": True, "bucket_cap_mb": MANY_BUCKETS, **(ddp or {})}
        self.ddp = DistributedDataParallel(made, process_group=group, **arguments)
        early = hook in ("behind", "interleaved")
        self.optimizer = ZeroRedundancyOptimizer(
            made.parameters(),
            kind,
            process_group=group,
            partition=cutting(partition),
            overlap_with_ddp=early,
            **settings,
        )
        if hook != "none":
            register(hook, self.ddp, self.optimizer)
        self.scheduled = schedule
        self.rank = dist.get_rank(group)

    def train(self, join: Callable[..., Any]) -> Any:
        """Train with a context manager: torch's Join, or ours."""
        scheduler = optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9) if self.scheduled else None
        context = join([self.ddp, self.optimizer], divide_by_initial_world_size=self.divide_by_initial)
        with context:
            self.optimizer.zero_grad()
            for number in range(self.lengths[self.rank]):
                ends = self.ends(number)
                with nullcontext() if ends or self.always_reduces else self.ddp.no_sync():
                    self.loss(self.ddp, inputs(number, self.rank)).backward()
                if not ends:
                    continue
                if self.clip is not None:
                    self.clipped()
                self.optimizer.step()
                if scheduler is not None:
                    scheduler.step()
                self.optimizer.zero_grad()
        return context

    def ends(self, number: int) -> bool:
        """Whether a window of accumulation ends with this batch."""
        is_last = self.last_incomplete and number + 1 == max(self.lengths)
        return is_last or (number + 1) % self.window == 0

    def clipped(self) -> None:
        assert self.clip is not None
        self.optimizer.clip_grad_norm_(self.clip)

    def reference(self) -> None:
        """Train in this process what all ranks train together."""
        scheduler = optim.lr_scheduler.ExponentialLR(self.plain, 0.9) if self.scheduled else None
        self.plain.zero_grad()
        for number in range(max(self.lengths)):
            running = [rank for rank, length in enumerate(self.lengths) if number < length]
            for rank in running:
                self.loss(self.plain_model, inputs(number, rank)).backward()
            if not self.ends(number):
                continue
            share = len(self.lengths) if self.divide_by_initial else len(running)
            for param in self.plain_model.parameters():
                if param.grad is not None:
                    param.grad /= share
            if self.clip is not None:
                nn.utils.clip_grad_norm_(self.plain_model.parameters(), self.clip)
            self.plain.step()
            if scheduler is not None:
                scheduler.step()
            self.plain.zero_grad()

    def distance(self) -> float:
        """The norm of the difference over the norm."""
        pairs = list(zip(self.ddp.module.parameters(), self.plain_model.parameters(), strict=True))
        off = torch.stack([(ours - theirs).detach().norm() for ours, theirs in pairs]).norm()
        return float(off / torch.stack([theirs.detach().norm() for _, theirs in pairs]).norm())

    def check(self, join: Callable[..., Any], bound: float = 1e-12) -> Any:
        """Train both, and compare."""
        context = self.train(join)
        self.reference()
        distance = self.distance()
        assert distance <= bound, f"parameters are {distance:.3g} off: {self.lengths}, {self.hook}"
        assert_replicas_equal(self.ddp.module.parameters(), group=self.group)
        return context

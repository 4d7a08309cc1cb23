"""The model that sharded gradients are tested with, and one iteration of it on a rank.

A model says what happens before an iteration, and which backwards are in it. The sharded training runs this on every
rank with that rank's data. The reference runs it in one process, once for each rank, and averages the gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Named = list[tuple[str, nn.Parameter]]

Add = Callable[[Named], None]
"""Adds a group to the optimizer."""


@dataclass
class Rank:
    """One iteration on one rank.

    Attributes:
        model, call: the model, and what is called in its place, as the compiled one.
        rank, number: the rank, and the number of the iteration.
        no_sync: a context in which backwards are not reduced.
    """

    model: Any
    call: Callable[..., Any]
    rank: int
    number: int
    no_sync: Callable[[], AbstractContextManager[None]] = nullcontext

    def batch(self, micro: int = 0) -> torch.Tensor:
        """Return the batch of this rank, iteration and micro-batch; no two batches are equal."""
        generator = torch.Generator().manual_seed(1000 * self.number + 100 * micro + self.rank)
        return torch.randn(6, 12, dtype=torch.float64, generator=generator)

    def output(self, micro: int = 0) -> Any:
        return self.call(self.batch(micro))

    def loss(self, micro: int = 0) -> torch.Tensor:
        loss: torch.Tensor = self.output(micro).square().mean()
        return loss


class Plain(nn.Module):
    """Three layers, one forward and one backward in each iteration.

    Attributes:
        rank, number: those of the iteration that runs; the training sets them.
        is_exact: whether gradients are added in the order of the reference, so that two ranks are bitwise equal to it.
        bound: the largest relative difference where they are not.
        zeroes: whether gradients are set to zero after a step, and not to None.
        ends_itself: whether a backward ends before it returns. If not, only the optimizer can clip.
        optimizes_all: whether the optimizer has frozen parameters too.
    """

    is_exact = ends_itself = optimizes_all = True
    zeroes = False
    bound = 1e-12
    rank = number = 0

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(12, 64), nn.Linear(64, 64), nn.Linear(64, 12)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.b(torch.tanh(self.a(x))))

    def forward(self, x: torch.Tensor) -> Any:
        return self.c(self.hidden(x))

    def begin(self) -> None:
        """Prepare the model before the optimizer is built."""

    def called(self) -> Callable[..., Any]:
        """Return what the loop calls."""
        return self

    def prepare(self, number: int, add: Add) -> None:
        """Change the model before an iteration; ``add`` adds a group to the optimizer."""

    def backward(self, on: Rank) -> None:
        """Make the backwards of an iteration."""
        on.loss().backward()


def twice(on: Rank) -> None:
    """Make two synchronized backwards: the owner adds the second mean, where the reference adds sums of ranks."""
    on.loss(0).backward()
    on.loss(1).backward()


def local_first(on: Rank) -> None:
    """Accumulate under no_sync() twice, and reduce the sum."""
    with on.no_sync():
        on.loss(0).backward()
        on.loss(1).backward()
    on.loss(2).backward()


def in_turn(on: Rank) -> None:
    """Accumulate and reduce in turn: a backward under no_sync() adds to what is reduced already."""
    for micro in range(4):
        with on.no_sync() if micro % 2 == 0 and micro else nullcontext():
            on.loss(micro).backward()

"""Training loops of every form, written once and run twice: on ranks with uneven inputs, and in one process for all.

What one process has to do where ranks would reduce: gradients that were reduced are the same on all ranks, and stay;
those that each rank has accumulated by itself are added to them, divided by the number of ranks that share.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from join_training import Uneven, inputs
from torch import nn


class Loop(Protocol):
    """What an iteration may do."""

    def backward(self, number: int, *, reduces: bool = True, forwards: int = 1) -> None:
        """Compute gradients of a batch; the sum of the losses of several forwards, if there are more."""

    def forward(self, number: int) -> None:
        """Compute a loss that is not used."""

    def step(self) -> None:
        """Step."""

    def zero(self, *, to_none: bool = True, some: bool = False) -> None:
        """Set gradients to None or zero: all of them, or only those of every second parameter."""

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""

    def clip(self) -> None:
        """Clip the norm of all gradients, by the optimizer."""

    def change(self, act: Callable[[nn.Module], None]) -> None:
        """Do something with the model."""


Script = Callable[[Loop, int], None]
"""One iteration, by its number."""

NORM = 0.05


class OnRanks:
    """A loop on a rank, with DDP and the sharded optimizer."""

    def __init__(self, uneven: Uneven) -> None:
        self._uneven, self._ddp, self._optimizer = uneven, uneven.ddp, uneven.optimizer

    def backward(self, number: int, *, reduces: bool = True, forwards: int = 1) -> None:
        with nullcontext() if reduces else self._ddp.no_sync():
            losses = [
                self._uneven.loss(self._ddp, inputs(number + 100 * each, self._uneven.rank)) for each in range(forwards)
            ]
            torch.stack(losses).sum().backward()

    def forward(self, number: int) -> None:
        self._uneven.loss(self._ddp, inputs(number, self._uneven.rank))

    def step(self) -> None:
        self._optimizer.step()

    def zero(self, *, to_none: bool = True, some: bool = False) -> None:
        if not some:
            self._optimizer.zero_grad(set_to_none=to_none)
            return
        for param in list(self._ddp.parameters())[::2]:
            if to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()

    def scale(self, factor: float) -> None:
        for param in self._ddp.parameters():
            if param.grad is not None:
                param.grad.mul_(factor)

    def clip(self) -> None:
        self._optimizer.clip_grad_norm_(NORM)

    def change(self, act: Callable[[nn.Module], None]) -> None:
        act(self._ddp.module)


class InOneProcess:
    """A loop for all ranks together."""

    def __init__(self, uneven: Uneven) -> None:
        self._uneven, self._model, self._optimizer = uneven, uneven.plain_model, uneven.plain
        self._params = list(self._model.parameters())
        self._local: list[torch.Tensor | None] = [None] * len(self._params)

    def backward(self, number: int, *, reduces: bool = True, forwards: int = 1) -> None:
        running = [rank for rank, length in enumerate(self._uneven.lengths) if self.iteration < length]
        for rank in running:
            losses = [self._uneven.loss(self._model, inputs(number + 100 * each, rank)) for each in range(forwards)]
            grads = self._gradients(torch.stack(losses).sum())
            self._local = [
                local if grad is None else grad if local is None else local + grad
                for local, grad in zip(self._local, grads, strict=True)
            ]
        if reduces:
            share = len(self._uneven.lengths) if self._uneven.divide_by_initial else len(running)
            for param, local in zip(self._params, self._local, strict=True):
                if local is not None:
                    param.grad = local / share if param.grad is None else param.grad + local / share
            self._local = [None] * len(self._params)

    iteration = 0

    def _gradients(self, loss: torch.Tensor) -> list[torch.Tensor | None]:
        trained = [param for param in self._params if param.requires_grad]
        found = dict(zip(trained, torch.autograd.grad(loss, trained, allow_unused=True), strict=True))
        return [found.get(param) for param in self._params]

    def forward(self, number: int) -> None:
        pass

    def step(self) -> None:
        self._optimizer.step()

    def zero(self, *, to_none: bool = True, some: bool = False) -> None:
        for index in range(0, len(self._params), 2 if some else 1):
            self._local[index] = None
            if to_none:
                self._params[index].grad = None
            elif (grad := self._params[index].grad) is not None:
                grad.zero_()

    def scale(self, factor: float) -> None:
        for param in self._params:
            if param.grad is not None:
                param.grad.mul_(factor)

    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self._params, NORM)

    def change(self, act: Callable[[nn.Module], None]) -> None:
        act(self._model)


REFUSED = r"whose part of them nobody knows"


def compare(uneven: Uneven, script: Script, join: Any, *, bound: float = 1e-12, may_refuse: bool = False) -> bool:
    """Run a script on ranks and in one process, and compare parameters; return whether it was not refused."""
    on_ranks, refusal = OnRanks(uneven), ""
    try:
        with join([uneven.ddp, uneven.optimizer], divide_by_initial_world_size=uneven.divide_by_initial):
            for number in range(uneven.lengths[uneven.rank]):
                script(on_ranks, number)
    except RuntimeError as error:
        refusal = str(error)
    refused: list[str] = [""] * dist.get_world_size(uneven.group)
    dist.all_gather_object(refused, refusal, group=uneven.group)
    if any(refused):
        assert may_refuse and all(re.search(REFUSED, each) for each in refused), refused
        return False
    refer(uneven, script)
    distance = uneven.distance()
    assert distance <= bound, f"parameters are {distance:.3g} off: {uneven.lengths}, {uneven.hook}"
    return True


def refer(uneven: Uneven, script: Script) -> None:
    """Run a script in one process."""
    loop = InOneProcess(uneven)
    for number in range(max(uneven.lengths)):
        loop.iteration = number
        script(loop, number)


def lengths_of(world_size: int) -> Sequence[list[int]]:
    """Some numbers of batches: the first rank runs out first, the last one does, one has none."""
    middle = [5] * (world_size - 2)
    return [2, *middle, 7], [7, *middle, 3], [0, *middle, 6]

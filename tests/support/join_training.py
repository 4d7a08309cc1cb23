"""Training loops on uneven inputs, written once and run twice: on ranks, and in one process, in float64.

Where ranks would reduce, one process adds the gradients of all, divided by the number of ranks that share.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ddp_training import MANY_BUCKETS
from support.groups import group_of
from support.training import cutting, small_model
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_integrations.join import Join
from zeroshard_testing import assert_replicas_equal

PARTITIONS = ("whole", "split")
NORM = 0.05
BOUND = 1e-12

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


def lengths_of(world_size: int) -> Sequence[list[int]]:
    """Some numbers of batches, as ``ENDINGS`` names them."""
    middle = [5] * (world_size - 2)
    return [2, *middle, 7], [7, *middle, 3], [0, *middle, 6]


ENDINGS = ("the first runs out first", "the last does", "one has none")
EVERY_ENDING = pytest.mark.parametrize("ending", range(3), ids=ENDINGS)
EVERY_MEAN = pytest.mark.parametrize("divide", [True, False], ids=["of all", "of those that run"])
MEANS_AND_ENDINGS = pytest.mark.parametrize(
    ("divide", "ending"),
    [(True, 0), (False, 1), (True, 2)],
    ids=[f"{mean}, {ending}" for mean, ending in zip(("of all", "of those that run", "of all"), ENDINGS, strict=True)],
)
EVERY_PARTITION = pytest.mark.parametrize("partition", PARTITIONS)
NOTHING_STEPPED, UNCHECKED = 0, -1
"""Values of ``until`` of `Uneven.refuse`: errors before the first step, and errors after which nothing is compared."""


class Branches(nn.Module):
    """Uses one branch or both, as a batch says; has buffers that count."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.sometimes, self.never = nn.Linear(40, 30), nn.Linear(30, 30), nn.Linear(30, 30)
        self.norm = nn.BatchNorm1d(30)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.always(batch)
        return hidden + self.sometimes(hidden) if bool(batch[0, 0] > 0) else hidden


class Uneven:
    """A sharded training on uneven inputs, and its single-process reference.

    Args:
        lengths: how many batches each rank has.
        calls: after how many calls of the loop each rank leaves it, whatever it has left.
        divide: average gradients over all ranks, or over those that still have data.
        schedule: whether the learning rate falls in every step.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        calls: Sequence[int] | None = None,
        optimizer: str | tuple[type[optim.Optimizer], dict[str, Any]] = "Adam",
        partition: str = "whole",
        divide: bool = True,
        schedule: bool = False,
        model: Callable[[], nn.Module] = small_model,
        loss: Callable[[nn.Module, torch.Tensor], torch.Tensor] = loss_of,
        group: dist.ProcessGroup | None = None,
        ddp: Mapping[str, Any] | None = None,
    ) -> None:
        self.lengths, self.group, self.rank = list(lengths), group, dist.get_rank(group)
        self.calls, self.divide, self.loss, self.arguments = calls, divide, loss, dict[str, Any]()
        kind, settings = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
        made = model().double()
        self.plain_model = copy.deepcopy(made)
        self.plain = kind(self.plain_model.parameters(), **settings)
        arguments = {"gradient_as_bucket_view": True, "bucket_cap_mb": MANY_BUCKETS, **(ddp or {})}
        self.ddp = DistributedDataParallel(made, process_group=group, **arguments)
        self.optimizer = ZeroRedundancyOptimizer(
            made.parameters(), kind, process_group=group, partition=cutting(partition), **settings
        )
        both = (self.optimizer, self.plain) if schedule else ()
        self.schedulers = [optim.lr_scheduler.ExponentialLR(each, 0.9) for each in both] or [None, None]

    def train(self, script: Script, join: Any = Join) -> Any:
        """Run a script on ranks, in a context, and return it."""
        loop = OnRanks(self)
        context = join([self.ddp, self.optimizer], **{"divide_by_initial_world_size": self.divide, **self.arguments})
        with context, suppress(LeftError):
            for number in range(self.lengths[self.rank]):
                script(loop, number)
        return context

    def refer(self, script: Script, until: int | None = None) -> None:
        """Run a script in one process, up to a number of iterations."""
        loop = InOneProcess(self)
        with suppress(LeftError):
            for number in range(max(self.lengths) if until is None else until):
                loop.number = number
                script(loop, number)

    def distance(self) -> float:
        """The norm of the difference over the norm."""
        pairs = list(zip(self.ddp.module.parameters(), self.plain_model.parameters(), strict=True))
        off = torch.stack([(ours - theirs).detach().norm() for ours, theirs in pairs]).norm()
        return float(off / torch.stack([theirs.detach().norm() for _, theirs in pairs]).norm())

    def check(self, script: Script, join: Any = Join) -> Any:
        """Train both, and compare."""
        context = self.train(script, join)
        self.refer(script)
        self.compare()
        return context

    def compare(self) -> None:
        distance = self.distance()
        assert distance <= BOUND, f"parameters are {distance:.3g} off: {self.lengths}, {self.calls}"
        assert_replicas_equal(self.ddp.module.parameters(), group=self.group)

    def refuse(
        self,
        script: Script,
        match: str,
        *,
        error: type[Exception] | tuple[type[Exception], ...] = RuntimeError,
        join: Any = Join,
        until: int | None = None,
    ) -> BaseException:
        """Train until there is an error on this rank, as on every other; and go on from where the last step was.

        Args:
            script: run on ranks.
            match: what the error says.
            error: what it is.
            join: the context.
            until: how many iterations were stepped before; by default, those in which all ranks had data.
        """
        with pytest.raises(error, match=match) as caught:
            self.train(script, join)
        if join is Join:
            assert not self.ddp._join_config.enable
            assert not self.optimizer._join_config.enable
        if until is None or until >= 0:
            self.refer(script, min(self.lengths) if until is None else until)
            self.optimizer.zero_grad()
            self.plain.zero_grad()
            self.lengths, self.arguments = [2, *[3] * (len(self.lengths) - 1)], {}
            self.check(usual)
        return caught.value


def short(numbers: list[int], seconds: float = 4, **options: Any) -> Uneven:
    """Return a training in a group with a timeout that ends what hangs."""
    return Uneven(numbers, group=group_of(seconds=seconds), **options)


class LeftError(Exception):
    """A rank leaves its loop."""


class OnRanks:
    """A loop on a rank, with DDP and the sharded optimizer."""

    def __init__(self, uneven: Uneven) -> None:
        self._uneven, self._ddp, self._optimizer, self._made = uneven, uneven.ddp, uneven.optimizer, 0

    def _call(self) -> None:
        if self._uneven.calls is not None and self._made >= self._uneven.calls[self._uneven.rank]:
            raise LeftError
        self._made += 1

    def backward(self, number: int, *, forwards: int = 1) -> None:
        """Compute gradients of a batch; the sum of the losses of several forwards, if there are more."""
        self._call()
        losses = [
            self._uneven.loss(self._ddp, inputs(number + 100 * each, self._uneven.rank)) for each in range(forwards)
        ]
        loss = torch.stack(losses).sum()
        self._call()
        loss.backward()

    def forward(self, number: int, *, with_grad: bool = True) -> None:
        """Compute a loss that is not used."""
        self._call()
        with torch.set_grad_enabled(with_grad):
            self._uneven.loss(self._ddp, inputs(number, self._uneven.rank))

    def step(self, **arguments: Any) -> None:
        """Step, the scheduler too."""
        self._call()
        self._optimizer.step(**arguments)
        if (scheduler := self._uneven.schedulers[0]) is not None:
            scheduler.step()

    def zero(self, *, to_none: bool = True, some: bool = False) -> None:
        """Set gradients to None or zero: all of them, or only those of every second parameter."""
        self._call()
        if not some:
            self._optimizer.zero_grad(set_to_none=to_none)
            return
        for param in list(self._ddp.parameters())[::2]:
            if to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""
        self._call()
        for param in self._ddp.parameters():
            if param.grad is not None:
                param.grad.mul_(factor)

    def clip(self) -> None:
        """Clip the norm of all gradients."""
        self._call()
        nn.utils.clip_grad_norm_(self._ddp.parameters(), NORM)

    def change(self, act: Callable[[nn.Module], None]) -> None:
        """Do something with the model."""
        self._call()
        act(self._ddp.module)

    def use(self, act: Callable[[ZeroRedundancyOptimizer], object]) -> None:
        """Do something with the sharded optimizer."""
        self._call()
        act(self._optimizer)


class InOneProcess:
    """A loop for all ranks together, with the same methods."""

    number = 0

    def __init__(self, uneven: Uneven) -> None:
        self._uneven, self._model, self._optimizer, self._made = uneven, uneven.plain_model, uneven.plain, 0
        self._params = list(self._model.parameters())

    def _call(self) -> list[int]:
        """Count a call, and return which ranks make it."""
        calls = self._uneven.calls
        running = [
            rank
            for rank, length in enumerate(self._uneven.lengths)
            if self.number < length and (calls is None or self._made < calls[rank])
        ]
        if not running:
            raise LeftError
        self._made += 1
        return running

    def backward(self, number: int, *, forwards: int = 1) -> None:
        self._call()
        running = self._call()
        share = len(self._uneven.lengths) if self._uneven.divide else len(running)
        for rank in running:
            losses = [self._uneven.loss(self._model, inputs(number + 100 * each, rank)) for each in range(forwards)]
            (torch.stack(losses).sum() / share).backward()

    def forward(self, number: int, *, with_grad: bool = True) -> None:
        self._call()

    def step(self, **arguments: Any) -> None:
        self._call()
        self._optimizer.step(**arguments)
        if (scheduler := self._uneven.schedulers[1]) is not None:
            scheduler.step()

    def zero(self, *, to_none: bool = True, some: bool = False) -> None:
        self._call()
        for index in range(0, len(self._params), 2 if some else 1):
            if to_none:
                self._params[index].grad = None
            elif (grad := self._params[index].grad) is not None:
                grad.zero_()

    def scale(self, factor: float) -> None:
        self._call()
        for param in self._params:
            if param.grad is not None:
                param.grad.mul_(factor)

    def clip(self) -> None:
        self._call()
        nn.utils.clip_grad_norm_(self._params, NORM)

    def change(self, act: Callable[[nn.Module], None]) -> None:
        self._call()
        act(self._model)

    def use(self, act: Callable[[ZeroRedundancyOptimizer], object]) -> None:
        self._call()


Loop = OnRanks | InOneProcess
Script = Callable[[Loop, int], None]
"""One iteration, by its number."""


def usual(loop: Loop, number: int) -> None:
    loop.zero()
    loop.backward(number)
    loop.step()


def never_zero(loop: Loop, number: int) -> None:
    loop.backward(number)
    loop.clip()
    loop.step()


def windows(size: int, *, to_none: bool = True) -> Script:
    """Add up the gradients of some backwards before each step; the last iterations may not fill a window."""

    def script(loop: Loop, number: int) -> None:
        loop.backward(number)
        if (number + 1) % size == 0:
            loop.step()
            loop.zero(to_none=to_none)

    return script

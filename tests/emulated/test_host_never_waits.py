"""The host never waits for the emulated device in twenty iterations: with each hook, partition and training loop.

No stream of these trainings races another one either, which the checker says at the end of each test.

A ``GradScaler`` is the exception: its ``step()`` reads on the host, once, whether all gradients are finite.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from support.ddp_training import HOOKS, MANY_BUCKETS, PARTITIONS, batch, register
from support.training import cutting, small_model
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from zeroshard import ZeroRedundancyOptimizer, shard_gradients
from zeroshard_testing import assert_replicas_equal

ITERATIONS = 20
WARM_UP = 3
"""Iterations before these, in which the host may wait: DDP rebuilds its buckets after the first one."""

pytestmark = pytest.mark.ranks(2, backend="emulated")
SHARDED = "sharded gradients"
"""In place of the name of a hook: the model is not in DDP."""


class Training:
    """A model, its sharded optimizer, and a scaler that is used by the loops that name it."""

    def __init__(self, hook: str, partition: str, device: torch.device) -> None:
        self.model: nn.Module = small_model().to(device)
        if hook != SHARDED:
            self.model = DistributedDataParallel(
                self.model, bucket_cap_mb=MANY_BUCKETS / 2, gradient_as_bucket_view=True
            )
        self.optimizer = ZeroRedundancyOptimizer(
            self.model.named_parameters(),
            optim.AdamW,
            lr=1e-2,
            partition=cutting(partition),
            overlap_with_ddp=hook in HOOKS[1:],
        )
        if isinstance(self.model, DistributedDataParallel):
            self.no_sync = self.model.no_sync
            if hook != "none":
                register(hook, self.model, self.optimizer)
        else:
            self.no_sync = shard_gradients(self.model, self.optimizer, bucket_mb=MANY_BUCKETS / 2).no_sync
        self.scaler = torch.amp.GradScaler(device.type, init_scale=8.0, growth_interval=5)
        self.batches = [batch(number).to(device, torch.float32) for number in range(WARM_UP + ITERATIONS)]

    def loss(self, inputs: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(inputs).square().mean()
        return loss

    def params(self) -> list[nn.Parameter]:
        return list(self.model.parameters())


def plain(training: Training, inputs: torch.Tensor) -> None:
    training.loss(inputs).backward()
    training.optimizer.step()


def accumulated_under_no_sync(training: Training, inputs: torch.Tensor) -> None:
    with training.no_sync():
        training.loss(inputs).backward()
    plain(training, inputs)


def clipped_by_torch(training: Training, inputs: torch.Tensor) -> None:
    training.loss(inputs).backward()
    nn.utils.clip_grad_norm_(training.params(), 0.01)
    training.optimizer.step()


def clipped_by_the_optimizer(training: Training, inputs: torch.Tensor) -> None:
    training.loss(inputs).backward()
    training.optimizer.clip_grad_norm_(0.01)
    training.optimizer.step()


def added_at_the_owners(training: Training, inputs: torch.Tensor) -> None:
    training.loss(inputs).backward()
    training.loss(inputs * 0.5).backward()
    clipped_by_torch(training, inputs)


def zeroed(training: Training, inputs: torch.Tensor) -> None:
    plain(training, inputs)
    training.optimizer.zero_grad(set_to_none=False)
    accumulated_under_no_sync(training, inputs)


def of_some_params(training: Training, inputs: torch.Tensor) -> None:
    training.loss(inputs).backward(inputs=training.params()[-3:])
    training.optimizer.step()


def scaled(training: Training, inputs: torch.Tensor) -> None:
    training.scaler.scale(training.loss(inputs)).backward()
    training.scaler.step(training.optimizer)
    training.scaler.update()


def scaled_and_clipped(training: Training, inputs: torch.Tensor) -> None:
    training.scaler.scale(training.loss(inputs)).backward()
    training.scaler.unscale_(training.optimizer)
    nn.utils.clip_grad_norm_(training.params(), 0.01)
    training.scaler.step(training.optimizer)
    training.scaler.update()


def scaled_and_accumulated(training: Training, inputs: torch.Tensor) -> None:
    with training.no_sync():
        training.scaler.scale(training.loss(inputs)).backward()
    scaled(training, inputs)


Loop = Callable[[Training, torch.Tensor], None]
# The hooks that step during backward refuse clipping and scalers.
IN_ANY_MODE: list[Loop] = [plain, accumulated_under_no_sync]
IN_STEP: list[Loop] = [*IN_ANY_MODE, clipped_by_torch, clipped_by_the_optimizer]
ON_SHARDED: list[Loop] = [*IN_STEP, added_at_the_owners, zeroed, of_some_params]
SCALED: list[Loop] = [scaled, scaled_and_clipped, scaled_and_accumulated]


def of_each_hook(loops: list[Loop], hooks: tuple[str, ...]) -> list[Any]:
    return [pytest.param(hook, loop, id=f"{hook}-{loop.__name__}") for hook in hooks for loop in loops]


def train(training: Training, loop: Loop, batches: list[torch.Tensor]) -> None:
    for inputs in batches:
        training.optimizer.zero_grad()
        loop(training, inputs)


@PARTITIONS
@pytest.mark.parametrize(
    ("hook", "loop"), of_each_hook(IN_STEP, ("none", "reduce_to_owner_hook")) + of_each_hook(IN_ANY_MODE, HOOKS[1:])
)
def test_the_host_never_waits(
    device: torch.device,
    host_never_waits: Callable[[], AbstractContextManager[None]],
    hook: str,
    partition: str,
    loop: Loop,
) -> None:
    training = Training(hook, partition, device)
    train(training, loop, training.batches[:WARM_UP])
    with host_never_waits():
        train(training, loop, training.batches[WARM_UP:])
    assert_replicas_equal(training.params())


@pytest.mark.parametrize("partition", ["whole", "split", "level"])
@pytest.mark.parametrize("loop", [pytest.param(loop, id=loop.__name__) for loop in ON_SHARDED])
def test_the_host_never_waits_for_sharded_gradients(
    device: torch.device,
    host_never_waits: Callable[[], AbstractContextManager[None]],
    partition: str,
    loop: Loop,
) -> None:
    training = Training(SHARDED, partition, device)
    train(training, loop, training.batches[:WARM_UP])
    with host_never_waits():
        train(training, loop, training.batches[WARM_UP:])
    assert_replicas_equal(training.params())


@PARTITIONS
@pytest.mark.parametrize(("hook", "loop"), of_each_hook(SCALED, ("none", "reduce_to_owner_hook", SHARDED)))
def test_the_host_waits_once_an_iteration_with_a_scaler(
    device: torch.device,
    device_costs: Callable[[], AbstractContextManager[Any]],
    hook: str,
    partition: str,
    loop: Loop,
) -> None:
    training = Training(hook, partition, device)
    train(training, loop, training.batches[:WARM_UP])
    with device_costs() as costs:
        train(training, loop, training.batches[WARM_UP:])
    waits = [(wait.title, wait.frames[0][0], wait.frames[0][2]) for wait in costs.host_waits]
    its_own = ("aten::_local_scalar_dense", torch.amp.grad_scaler.__file__, "<genexpr>")
    assert waits == [its_own] * ITERATIONS, "\n".join(map(str, costs.host_waits))
    assert_replicas_equal(training.params())

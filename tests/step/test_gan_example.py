"""The loop of a generator and a discriminator, of which each has an optimizer: the example, and what the FAQ says."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from support.combinations import FLAG, each_of
from support.training import assert_bitwise_equal, cutting
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_integrations.ddp import register_reduce_to_owner
from zeroshard_testing import assert_replicas_equal

pytestmark = pytest.mark.ranks(2)
EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def example() -> ModuleType:
    with mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]):
        return importlib.import_module("gan")


class Gan:
    """A generator and a discriminator in DDP, and their optimizers; plain ones if there is no partition."""

    def __init__(self, partition: str | None, **ddp: Any) -> None:
        torch.manual_seed(0)
        models = [nn.Sequential(nn.Linear(n, 64), nn.Tanh(), nn.Linear(64, m)).double() for n, m in ((8, 4), (4, 1))]
        self.ddps = [DistributedDataParallel(model, gradient_as_bucket_view=True, **ddp) for model in models]
        self.optimizers: list[Any] = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
        if partition is not None:
            self.optimizers = [
                ZeroRedundancyOptimizer(
                    model.named_parameters(), torch.optim.AdamW, partition=cutting(partition), lr=1e-2
                )
                for model in models
            ]
            for each, optimizer in zip(self.ddps, self.optimizers, strict=True):
                register_reduce_to_owner(each, optimizer)

    def iterate(self, batch: tuple[torch.Tensor, torch.Tensor], *, clears: bool) -> None:
        """An iteration in which the generator's backward also leaves gradients of the discriminator."""
        (generator, discriminator), (first, second) = self.ddps, self.optimizers
        real, noise = batch
        fake = generator(noise)
        second.zero_grad()
        (discriminator(fake.detach()).mean() - discriminator(real).mean()).backward()
        second.step()
        first.zero_grad()
        if clears:
            second.zero_grad()
        (-discriminator(fake).mean()).backward()
        first.step()


def batch(rank: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawing = torch.Generator().manual_seed(100 * rank + number)
    real, noise = (torch.randn(6, width, generator=drawing, dtype=torch.float64) for width in (4, 8))
    return real + 2, noise


def assert_same(sharded: Gan, plain: Gan, when: str) -> None:
    for ours, theirs in zip(sharded.ddps, plain.ddps, strict=True):
        assert_bitwise_equal(ours.module, theirs.module, when)
        assert_replicas_equal(ours.parameters())


@each_of("partition", ["whole", "split"], unused=FLAG)
def test_the_example_trains_as_without_sharding(rank: int, partition: str, unused: bool) -> None:
    sharded, plain = (Gan(kind, find_unused_parameters=unused) for kind in (partition, None))
    for number in range(5):
        losses = [example().iterate(*gan.ddps, *gan.optimizers, *batch(rank, number)) for gan in (sharded, plain)]
        assert losses[0] == losses[1]
        assert_same(sharded, plain, f"after iteration {number}")


def test_gradients_that_the_generators_loss_adds_to_stepped_ones_are_refused(rank: int) -> None:
    gan = Gan("whole")
    # DDP rebuilds its buckets after its first backward.
    gan.iterate(batch(rank, 0), clears=True)
    with pytest.raises(RuntimeError, match=r"still has the gradient of the last step: call optimizer.zero_grad\(\)"):
        gan.iterate(batch(rank, 1), clears=False)


def test_clearing_them_before_and_after_trains_as_without_sharding(rank: int) -> None:
    sharded, plain = Gan("whole"), Gan(None)
    for number in range(5):
        for gan in (sharded, plain):
            gan.iterate(batch(rank, number), clears=True)
        assert_same(sharded, plain, f"after iteration {number}")

"""The memory of sharded gradients on the emulated accelerator, where each allocation is counted.

The peak is that of the parameters, 1/N of the gradients and of the state, two buckets in flight, and what autograd has
made of the next one; and nothing of gradients is left between ``zero_grad()`` and the first bucket of a backward.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import zeroshard.plan.predict
from support.training import cutting
from torch import nn, optim
from zeroshard import ZeroRedundancyOptimizer, predict, shard_gradients
from zeroshard_comm import collectives

WIDTH, LAYERS = 128, 24
LAYER = WIDTH * WIDTH * 4
"""The bytes of a layer."""
PARAMS = LAYERS * LAYER
STAGING = LAYER // 4
"""The bytes of each of two buffers of collectives, which are as small beside a large model."""
BUCKETS = {"alone": LAYER, "packed": int(2.1 * LAYER)}
"""The bytes of a bucket: of one layer, which is sent from where autograd has made its gradient, or of two."""
ITERATIONS = 3
"""In the second one, buckets have the order in which gradients arrive, and there is state."""

Costs = Callable[[], AbstractContextManager[Any]]

pytestmark = pytest.mark.ranks(2, 4, backend="emulated")
EACH_PARTITION = pytest.mark.parametrize("partition", ["whole", "split"])
EACH_BUCKET = pytest.mark.parametrize("bucket", BUCKETS)


@pytest.fixture(autouse=True)
def small_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (collectives, zeroshard.plan.predict):
        monkeypatch.setattr(module, "STAGING_BYTES", STAGING)


class Layers(nn.Module):
    """Equal layers that run in order of their numbers, in whatever order they are registered."""

    def __init__(self, registered: Sequence[int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        for number in registered:
            self.register_module(str(number), nn.Linear(WIDTH, WIDTH, bias=False))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for number in range(LAYERS):
            inputs = self.get_submodule(str(number))(inputs)
        return inputs


class Training:
    def __init__(self, device: torch.device, partition: str, bucket: str, registered: Sequence[int]) -> None:
        gc.collect()
        self.before = torch.accelerator.memory_allocated()
        self.model = Layers(registered).to(device)
        self.inputs = torch.ones(1, WIDTH, device=device)
        named = self.model.named_parameters()
        self.optimizer = ZeroRedundancyOptimizer(named, optim.AdamW, fused=True, partition=cutting(partition))
        self.at_first = 0
        """What is allocated when the first gradient of a backward has arrived."""
        self.model.get_submodule(str(LAYERS - 1)).weight.register_post_accumulate_grad_hook(self._arrived)
        shard_gradients(self.model, self.optimizer, bucket_mb=BUCKETS[bucket] / 2**20)

    @property
    def allocated(self) -> int:
        gc.collect()
        return torch.accelerator.memory_allocated() - self.before

    @property
    def kept(self) -> int:
        """The bytes of parameters and state."""
        state = self.optimizer.optim.state.values()
        return PARAMS + sum(value.nbytes for entries in state for value in entries.values())

    def _arrived(self, _: torch.Tensor) -> None:
        self.at_first = torch.accelerator.memory_allocated() - self.before

    def iterate(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.inputs).sum().backward()
        self.optimizer.step()

    def peak(self, costs: Costs) -> int:
        """The peak of an iteration, after those that make the state and the order of buckets."""
        for _ in range(ITERATIONS - 1):
            self.iterate()
        with costs() as cost:
            self.iterate()
        return int(cost.peak_bytes) - self.before


@EACH_PARTITION
@EACH_BUCKET
def test_the_peak_is_that_of_two_buckets_and_predicted(
    rank: int, world_size: int, device: torch.device, device_costs: Costs, partition: str, bucket: str
) -> None:
    training = Training(device, partition, bucket, range(LAYERS))
    peak = training.peak(device_costs)
    in_flight = (1 if bucket == "alone" else 2) * LAYER
    staging, rows = (2 * STAGING, in_flight / world_size) if partition == "split" else (0, 0)
    two_buckets = training.kept + PARAMS / world_size + 2 * (in_flight + rows) + staging
    # Autograd makes the gradients of the next bucket before memory is free for it.
    assert two_buckets <= peak <= 1.005 * (two_buckets + in_flight)
    predicted = predict(
        training.model,
        optim.AdamW,
        ranks=world_size,
        partition=cutting(partition),
        shards_gradients=True,
        bucket_mb=BUCKETS[bucket] / 2**20,
        backend="nccl",
        fused=True,
    )
    assert peak == pytest.approx(predicted.ranks[rank].total, rel=0.01)


@EACH_PARTITION
@EACH_BUCKET
@pytest.mark.parametrize("set_to_none", [True, False])
def test_nothing_of_gradients_is_left_until_the_first_bucket(
    device: torch.device, partition: str, bucket: str, set_to_none: bool
) -> None:
    training = Training(device, partition, bucket, range(LAYERS))
    for _ in range(ITERATIONS):
        training.iterate()
        training.optimizer.zero_grad(set_to_none=set_to_none)
        # Norms, activations and numbers of steps are small.
        kept = training.kept + (2 * STAGING if partition == "split" else 0) + LAYER / 4
        assert training.allocated <= kept
        loss = training.model(training.inputs).sum()
        assert training.allocated <= kept
        loss.backward()
        assert training.at_first <= kept + LAYER
        training.optimizer.step()


@EACH_PARTITION
@EACH_BUCKET
def test_the_peak_does_not_depend_on_the_order_of_registration(
    device: torch.device, device_costs: Costs, partition: str, bucket: str
) -> None:
    torch.manual_seed(1)
    shuffled = torch.randperm(LAYERS, device="cpu").tolist()
    peaks = [Training(device, partition, bucket, order).peak(device_costs) for order in (range(LAYERS), shuffled)]
    assert peaks[1] == pytest.approx(peaks[0], rel=0.05)

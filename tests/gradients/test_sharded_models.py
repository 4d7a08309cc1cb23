"""Training with sharded gradients is training in one process, whatever autograd does."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from support.sharded_forwards import CompiledBlocks, CompiledLoss
from support.sharded_model import Plain
from support.sharded_models import MODELS
from support.sharded_parameters import BatchNorm, Unused
from support.sharded_training import SMALL_MB, Training
from support.sharded_transports import TRANSPORTS, use_transport
from torch import nn
from zeroshard import shard_gradients
from zeroshard_testing import assert_replicas_equal, rank_fixture


@rank_fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let gradients travel in one of several ways."""
    yield from use_transport(request.param, monkeypatch)


OPTIONS: dict[str, dict[str, Any]] = {
    "small": {"bucket_mb": SMALL_MB},
    "large": {"bucket_mb": 25},
    "views": {"bucket_mb": SMALL_MB, "views": True, "backwards": "twice"},
    "clipped": {"bucket_mb": SMALL_MB, "clip": "torch", "backwards": "local first"},
    "clipped views": {"bucket_mb": 0.003, "clip": "optimizer", "views": True, "backwards": "in turn"},
}
PARTITIONS = ("split", "whole", "level")
WAYS = list(product(PARTITIONS, OPTIONS))
"""All combinations. Their number has no divisor in common with the steps by which tests walk through them."""


def train(kind: type[Plain], partition: str, options: str, iterations: int = 4) -> Training:
    training = Training(kind, partition, **OPTIONS[options])
    for _ in range(iterations):
        training.iterate()
    assert_replicas_equal(training.model.parameters())
    assert len(training.optimizer.describe().buckets) >= (3 if options != "large" else 1)
    return training


@pytest.mark.by_default("2-messages-0 | 2-reads-2 | 3-messages in turn-1 | 3-collectives-3")
@pytest.mark.ranks(2, 3, backend="gloo")
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("transport", TRANSPORTS, indirect=True)
def test_models_are_trained_as_in_one_process(part: int, transport: None) -> None:
    """Each part has a fourth of all models, each of them with another partition and other options."""
    quick = [kind for kind in MODELS if kind not in (CompiledBlocks, CompiledLoss)]
    for number, kind in enumerate(quick[part::4]):
        train(kind, *WAYS[(7 * number + 4 * part) % len(WAYS)])


@pytest.mark.exhaustive
@pytest.mark.ranks(2, 3, 4, backend="gloo", timeout=600)
@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("transport", TRANSPORTS, indirect=True)
def test_every_model_is_trained_in_every_way_as_in_one_process(kind: type[Plain], transport: None) -> None:
    for partition, options in WAYS:
        train(kind, partition, options)


@pytest.mark.ranks(2, backend="gloo", checks="no:messages")
def test_compiled_autograd_is_refused() -> None:
    training = Training(Plain)
    torch._dynamo.reset()
    loss = training.on_this_rank().loss()
    enabled = torch._dynamo.compiled_autograd._enable(lambda graph: graph)
    with pytest.raises(RuntimeError, match="compiled autograd is not supported with sharded gradients"), enabled:
        loss.backward()
    training.optimizer.zero_grad()
    training.iterate()


class SyncBatchNorm(BatchNorm):
    """Statistics of the batches of all ranks."""

    def begin(self) -> None:
        self.norm = nn.SyncBatchNorm.convert_sync_batchnorm(self.norm)


@pytest.mark.ranks(2, backend="gloo")
def test_statistics_over_all_ranks_keep_replicas_equal() -> None:
    training = Training(SyncBatchNorm)
    try:
        for _ in range(3):
            training.iterate_sharded()
    except ValueError as error:
        pytest.skip(str(error))
    assert_replicas_equal(training.model.parameters())


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_copies_are_models_without_hooks(way: str) -> None:
    training = Training(BatchNorm)
    training.iterate()
    copied: Any = copy.deepcopy(training.model)
    if way == "pickle":
        copied = pickle.loads(pickle.dumps(training.model))
    elif way == "torch.save":
        file = io.BytesIO()
        torch.save(training.model, file)
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    del training.optimizer, training.sharding
    loss = copied(torch.ones(6, 12, dtype=torch.float64)).square().mean()
    loss.backward()
    assert all(type(param.grad) is torch.Tensor for param in copied.a.parameters())


@pytest.mark.ranks(2, backend="gloo")
def test_remove_leaves_a_plain_model() -> None:
    training = Training(Unused)
    hooks = _hooks(training.plain)
    training.iterate()
    training.on_this_rank().loss().backward()
    with pytest.raises(RuntimeError, match="waited for step\\(\\), and remove\\(\\) has dropped it"):
        training.sharding.remove()
    assert _hooks(training.model) == hooks
    assert all(param.grad is None for param in training.model.parameters())
    before = training.optimizer.traffic.total()
    training.model(torch.ones(6, 12, dtype=torch.float64)).sum().backward()
    assert all(param.grad is None or type(param.grad) is torch.Tensor for param in training.model.parameters())
    assert training.optimizer.traffic.total() == before
    # The optimizer steps gradients that the loop averages.
    for param in training.model.parameters():
        param.grad = torch.ones_like(param)
    training.optimizer.step()
    assert_replicas_equal(training.model.parameters())
    training.optimizer.zero_grad()
    # It can be sharded again, from the values that it has.
    training.sharding = shard_gradients(training.model, training.optimizer, bucket_mb=SMALL_MB)
    training.on_this_rank().loss().backward()
    training.optimizer.step()
    assert_replicas_equal(training.model.parameters())


def _hooks(model: nn.Module) -> list[int]:
    of_modules = [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()]
    return of_modules + [len(param._post_accumulate_grad_hooks or {}) for param in model.parameters()]

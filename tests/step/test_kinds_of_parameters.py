"""Parameters of every dtype and memory format, with names and in groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.combinations import LAYOUTS, PARTITIONS
from support.training import EVERYWHERE, convolutions, cutting, train_equally, twin_optimizers, twins
from torch import nn, optim
from zeroshard import ZeroRedundancyOptimizer

pytestmark = pytest.mark.usefixtures("tensors_on_the_device")


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    """Two groups: matrices with decay, given as a generator, and everything else."""
    return [
        {"params": (p for p in module.parameters() if p.dim() > 1), "weight_decay": 0.1},
        {"params": [p for p in module.parameters() if p.dim() <= 1], "weight_decay": 0.0, "lr": 0.01},
    ]


@pytest.mark.ranks(3, backend=EVERYWHERE)
@LAYOUTS
def test_param_groups_may_be_given_as_generators(partition: str, as_bucket_view: bool) -> None:
    pair = twins()
    sharded = ZeroRedundancyOptimizer(
        groups_of(pair[0]), optim.AdamW, partition=cutting(partition), parameters_as_bucket_view=as_bucket_view
    )
    plain = optim.AdamW(groups_of(pair[1]))
    assert [len(group["params"]) for group in sharded.param_groups] == [4, 5]
    train_equally(pair, (sharded, plain), range(3))


@pytest.mark.ranks(2, backend=EVERYWHERE)
@PARTITIONS
def test_named_parameters_keep_their_names(partition: str) -> None:
    pair = twins()
    sharded = ZeroRedundancyOptimizer(pair[0].named_parameters(), optim.AdamW, partition=cutting(partition))
    plain = optim.AdamW(pair[1].named_parameters())
    assert sharded.param_groups[0]["param_names"] == plain.param_groups[0]["param_names"]
    assert [spec.name for spec in sharded.plan.tensors] == plain.param_groups[0]["param_names"]
    train_equally(pair, (sharded, plain), range(3))


def one_pixel() -> nn.Module:
    """Convolutions for which many strides are right, of which torch itself gives some to images."""
    return nn.Sequential(nn.Conv2d(8, 16, 1), nn.Conv2d(16, 8, 3), nn.Conv2d(8, 1, 3), nn.Conv2d(1, 8, 3))


KINDS: dict[str, Callable[[], nn.Module]] = {
    "mixed dtypes": lambda: nn.ModuleList(
        [nn.Linear(64, 40, dtype=each) for each in (torch.float32, torch.float64, torch.bfloat16)]
    ),
    "complex": lambda: nn.ParameterList([nn.Parameter(torch.randn(130, dtype=torch.complex64)) for _ in range(3)]),
    "channels last": lambda: convolutions().to(memory_format=torch.channels_last),
    "channels last of one pixel": lambda: one_pixel().to(memory_format=torch.channels_last),
}


@pytest.mark.ranks(2, backend=EVERYWHERE)
@LAYOUTS
@pytest.mark.parametrize("kind", KINDS)
def test_dtypes_and_memory_formats_are_kept(kind: str, partition: str, as_bucket_view: bool) -> None:
    torch.manual_seed(0)
    pair = twins(KINDS[kind])
    strides = [param.stride() for param in pair[1].parameters()]
    assert kind != "channels last of one pixel" or strides[0] == (8, 1, 8, 8)
    optimizers = twin_optimizers(pair, optim.Adam, partition, as_bucket_view)
    assert [param.stride() for param in pair[0].parameters()] == strides
    train_equally(pair, optimizers, range(3))
    assert [param.stride() for param in pair[0].parameters()] == strides


@pytest.mark.ranks(4, backend=EVERYWHERE)
def test_a_rank_may_own_nothing_of_a_named_group() -> None:
    def groups(module: nn.Module) -> list[dict[str, Any]]:
        named = list(module.named_parameters())
        return [{"params": named[:1], "lr": 0.1}, {"params": named[1:]}]

    pair = twins(lambda: nn.Linear(5, 3))
    sharded = ZeroRedundancyOptimizer(groups(pair[0]), optim.AdamW)
    plain = optim.AdamW(groups(pair[1]))
    assert [group["param_names"] for group in sharded.param_groups] == [["weight"], ["bias"]]
    train_equally(pair, (sharded, plain), range(3))

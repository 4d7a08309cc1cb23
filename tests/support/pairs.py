"""A model with the sharded optimizer, and an equal one with the plain optimizer."""

from __future__ import annotations

from support.training import assert_bitwise_equal, set_gradients, twins
from torch import nn, optim
from zeroshard import ZeroRedundancyOptimizer

Pair = tuple[nn.Module, nn.Module]
Optimizers = tuple[ZeroRedundancyOptimizer, optim.Optimizer]


def trained(*, as_bucket_view: bool = False) -> tuple[Pair, Optimizers]:
    """Return a pair of models and their optimizers after two steps."""
    pair = twins()
    sharded = ZeroRedundancyOptimizer(pair[0].parameters(), optim.Adam, parameters_as_bucket_view=as_bucket_view)
    optimizers = (sharded, optim.Adam(pair[1].parameters()))
    go_on(pair, optimizers, range(2))
    return pair, optimizers


def go_on(pair: Pair, optimizers: Optimizers, steps: range) -> None:
    """Train both, and check that the sharded run is where the plain one is."""
    for step in steps:
        for module, optimizer in zip(pair, optimizers, strict=True):
            set_gradients(module.parameters(), step)
            optimizer.step()
    assert_bitwise_equal(*pair, "after going on")

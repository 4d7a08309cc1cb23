"""Optimizers whose state dicts torch's functions get and set, beside plain ones."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection
from typing import Any

import torch
from support.training import assert_bitwise_equal, cutting, set_gradients, small_model
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel
from zeroshard import ZeroRedundancyOptimizer

Build = Callable[[nn.Module, Callable[..., optim.Optimizer]], list[optim.Optimizer]]
"""Builds the optimizers of a model; the function takes parameters, a class and its settings, and gives a sharded one
or a plain one."""


def one(kind: Any = optim.AdamW, params: Any = nn.Module.parameters, **settings: Any) -> Build:
    return lambda model, make: [make(params(model), kind, **settings)]


def unwrapped(model: nn.Module) -> nn.Module:
    return model


class Pair:
    """Sharded optimizers beside a wrapped model, and plain ones beside an equal model."""

    def __init__(
        self,
        partition: str,
        build: Build = one(),  # noqa: B008 - a function
        *,
        wrap: Any = DistributedDataParallel,
        model: Callable[[], nn.Module] = small_model,
    ) -> None:
        def shard(params: Any, kind: Any, **settings: Any) -> optim.Optimizer:
            return ZeroRedundancyOptimizer(params, kind, partition=cutting(partition), **settings)

        def plain(params: Any, kind: Any, **settings: Any) -> optim.Optimizer:
            return kind(params, **settings)

        self.another = functools.partial(Pair, partition, build, wrap=wrap, model=model)
        self.module, self.reference = model(), model()
        self.sharded, self.plain = build(self.module, shard), build(self.reference, plain)
        self.model = wrap(self.module)

    def train(self, steps: range, *, unused: Collection[int] = ()) -> None:
        for step in steps:
            for model, optimizers in ((self.module, self.sharded), (self.reference, self.plain)):
                set_gradients(model.parameters(), step, none=unused)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        assert_bitwise_equal(self.module, self.reference, f"after {steps}")

    def values(self) -> dict[str, torch.Tensor]:
        return copy.deepcopy(self.reference.state_dict())

    def go_on_from(self, values: dict[str, torch.Tensor]) -> None:
        self.module.load_state_dict(values, strict=False)
        self.reference.load_state_dict(values, strict=False)

    def get(self, **options: Any) -> tuple[Any, Any]:
        """What ours list on this rank, and what the plain ones have."""
        chosen = StateDictOptions(**options)
        ours = get_optimizer_state_dict(self.model, self.sharded, options=chosen)
        return ours, get_optimizer_state_dict(self.reference, self.plain, options=chosen)

    def set(self, ours: Any, theirs: Any, **options: Any) -> None:
        chosen = StateDictOptions(**options)
        set_optimizer_state_dict(self.model, self.sharded, ours, options=chosen)
        set_optimizer_state_dict(self.reference, self.plain, theirs, options=chosen)

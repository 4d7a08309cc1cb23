"""Calls that are refused: the same error on every rank, and an optimizer that goes on as if nothing was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from support.training import assert_bitwise_equal, assert_same_state, set_gradients, small_model, twins
from torch import nn, optim
from zeroshard import ZeroRedundancyOptimizer


class Run:
    """A sharded and an unsharded run that have taken two equal steps, and the checkpoint of both."""

    def __init__(
        self,
        optimizer_class: type[optim.Optimizer] = optim.Adam,
        settings: dict[str, Any] | None = None,
        *,
        make: Callable[[], nn.Module] = small_model,
        **how: Any,
    ) -> None:
        self.model, self.reference = twins(make)
        self.sharded = ZeroRedundancyOptimizer(self.model.parameters(), optimizer_class, **how, **(settings or {}))
        self.plain = optimizer_class(self.reference.parameters(), **(settings or {}))
        self.step(2)

    def step(self, steps: int, first: int = 0) -> None:
        for step in range(first, first + steps):
            for module, optimizer in ((self.model, self.sharded), (self.reference, self.plain)):
                set_gradients(module.parameters(), step)
                optimizer.step()

    def local_state(self) -> dict[str, Any]:
        return copy.deepcopy(self.sharded.optim.state_dict())

    def assert_goes_on(self) -> None:
        """Two more steps, and the whole state, are those of the run that was never handed anything bad."""
        self.step(2, first=10)
        assert_bitwise_equal(self.model, self.reference, "after the refused call")
        self.sharded.consolidate_state_dict(to=0)
        if self.sharded.rank == 0:
            assert_same_state(self.sharded.state_dict(), self.plain.state_dict())


def is_mine(where: str, rank: int) -> bool:
    return where == "on all ranks" or rank == 1


def assert_blames(error: BaseException, where: str) -> None:
    """A rank alone is named; what all ranks did is nobody's in particular."""
    assert ("rank 1: " in str(error)) == (where == "on rank 1"), str(error)

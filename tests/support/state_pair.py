"""A sharded and a plain optimizer whose state is listed beside each other."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from support.training import assert_same_state, cutting, set_gradients, small_model
from torch import optim
from zeroshard import ZeroRedundancyOptimizer

REFUSED = r"that file is now incomplete.*consolidate_state_dict\(to=RANK\)"


class Pair:
    """A sharded optimizer and the plain one, of equal models."""

    def __init__(self, partition: str = "whole", kind: Any = optim.AdamW, **settings: Any) -> None:
        self.model, self.reference = small_model(), small_model()
        self.sharded = ZeroRedundancyOptimizer(self.model.parameters(), kind, partition=cutting(partition), **settings)
        self.plain = kind(self.reference.parameters(), **settings)
        self.steps = 0

    def step(self, *, none: tuple[int, ...] = ()) -> None:
        for model, optimizer in ((self.model, self.sharded), (self.reference, self.plain)):
            set_gradients(model.parameters(), self.steps, none=none)
            optimizer.step()
        self.steps += 1

    def check_listed(self) -> None:
        """Everything is listed as the plain optimizer lists it: parameters, entries, shapes, dtypes and devices."""
        assert described(self.sharded.state_dict()["state"]) == described(self.plain.state_dict()["state"])
        params = dict(zip(self.model.parameters(), range(9), strict=False))
        assert {params[param] for param in self.sharded.state} == set(self.plain.state_dict()["state"])
        assert {params[param]: set(entries) for param, entries in self.sharded.state.items()} == {
            key: set(entries) for key, entries in self.plain.state_dict()["state"].items()
        }

    def check_equal(self) -> None:
        for ours, theirs in zip(self.model.parameters(), self.reference.parameters(), strict=True):
            assert torch.equal(ours, theirs)
        self.sharded.consolidate_state_dict()
        if self.sharded.rank == 0:
            assert_same_state(self.sharded.state_dict(), self.plain.state_dict())


def described(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: described(value) for key, value in state.items()}
    return (state.shape, state.dtype, state.device) if isinstance(state, torch.Tensor) else type(state)


def values_missing(state_dict: dict[str, Any]) -> int:
    """How many tensors of a state dict cannot be pickled."""
    missing = 0
    for entries in state_dict["state"].values():
        for value in entries.values():
            try:
                pickle.dumps(value)
            except RuntimeError:
                missing += 1
    return missing


def moved(value: Any, device: str, dtype: torch.dtype | None = None) -> Any:
    """Move a state dict to a device, as Accelerate does: mappings are rebuilt by their own class."""
    if isinstance(value, (list, tuple)):
        return type(value)(moved(item, device, dtype) for item in value)
    if isinstance(value, dict):
        return type(value)({key: moved(item, device, dtype) for key, item in value.items()})
    return value.to(device, dtype) if isinstance(value, torch.Tensor) else value

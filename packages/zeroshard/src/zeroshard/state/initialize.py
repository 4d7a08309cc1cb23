"""Makes the state before the first step, by a step with zero gradients and a learning rate of 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zeroshard.local.optimizer import LocalOptimizer, unwrapped_step
from zeroshard.plan.groups import hyperparameters_of
from zeroshard.state.placeholder import TensorWithoutValues


def has_state(local: LocalOptimizer) -> bool:
    """Return True if this rank has any state."""
    return any(any(state.values()) for state in local.states) or any(map(local.state_of, local.shards.values()))


def make_state(local: LocalOptimizer) -> None:
    """Make the state of this rank's trainable shards."""
    local.replace_state(_state_after_a_step(local))
    local.extra.list_entries(shard for shard in local.shards.values() if shard.param.requires_grad)


def is_torchs_own_step(params: Sequence[torch.Tensor], groups: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if torch.distributed.checkpoint makes state by this step: learning rates and gradients are all 0."""
    grads = [param.grad for param in params if param.requires_grad]
    if any(grad is None or isinstance(grad, TensorWithoutValues) for grad in grads):
        return False
    # Checked last, because reading these may wait for the device.
    rates = (group.get("lr", 1) for group in groups)
    return not any(rates) and not any(grad is not None and grad.any() for grad in grads)


def _state_after_a_step(local: LocalOptimizer) -> dict[torch.Tensor, Any]:
    """Return the state after one step of a new optimizer on copies of this rank's shards; see ``_init_optim_state``."""
    copies: dict[torch.Tensor, torch.Tensor] = {}
    for shard in local.shards.values():
        if shard.param.requires_grad:
            copied = copies[shard.tensor] = torch.nn.Parameter(shard.tensor.detach().clone())
            copied.grad = torch.zeros_like(copied)
    groups = [
        {**hyperparameters_of(group), "params": [copies[tensor] for tensor in own["params"] if tensor in copies]}
        for group, own in zip(local.groups, local.local_groups, strict=True)
    ]

    state: dict[Any, Any] = {}
    with torch.no_grad():
        for built in local.build(groups, local.classes):
            for group in built.param_groups:
                if "lr" in group:
                    group["lr"] = torch.tensor(0.0) if isinstance(group["lr"], torch.Tensor) else 0.0
            unwrapped_step(type(built))(built)
            state.update(built.state)
    return {tensor: state[copied] for tensor, copied in copies.items() if copied in state}

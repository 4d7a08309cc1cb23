"""State before the first step: that of a step with zero gradients and learning rate 0."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from zeroshard_comm import agreed

from zeroshard.local_optimizer import NOT_SYNCED, LocalOptimizer, unwrapped_step
from zeroshard.sharding import Sharding
from zeroshard.state.load import take_over
from zeroshard.state.metadata import StateMetadata


def init_state(sharding: Sharding, metadata: StateMetadata) -> None:
    """Make the state of trainable parameters if no rank has any state. Collective.

    Args:
        sharding: whose local optimizer gets the state; follows the model first.
        metadata: brought up to date.

    Raises:
        DisagreementError: if the ranks' models differ.
        Exception: an error of any rank, on every rank, which leaves everything unchanged.
    """
    control, layout, local = sharding.control, sharding.layout, sharding.local
    with agreed(control, "init_state()") as declared:
        layout = sharding.update_layout(sharding.groups)
        declared.set(layout.declaration)
        declared.flag = any(local.optim.state.values())
    if control.flagged:
        return

    def install() -> None:
        local.optim.state = defaultdict(dict, _state_after_a_step(local))
        local.masters.list_in(local.optim.state)

    take_over(sharding, layout, metadata, "init_state()", install)
    metadata.drop_consolidated()
    metadata.keeps_none = metadata.is_empty and any(param.requires_grad for param in sharding.params)


def _state_after_a_step(local: LocalOptimizer) -> dict[torch.Tensor, Any]:
    """Step another optimizer of the class over copies of this rank's shards, as torch does in ``_init_optim_state``."""
    copies: dict[torch.Tensor, torch.Tensor] = {}
    for shard in local.shards.values():
        if shard.param.requires_grad:
            copied = copies[shard.tensor] = torch.nn.Parameter(shard.tensor.detach().clone())
            copied.grad = torch.zeros_like(copied)
    groups = [
        {
            **{key: value for key, value in group.items() if key not in NOT_SYNCED},
            "params": [copies[tensor] for tensor in group["params"] if tensor in copies],
        }
        for group in local.optim.param_groups
    ]
    built = local.build(groups)
    for group in built.param_groups:
        if "lr" in group:
            group["lr"] = torch.tensor(0.0) if isinstance(group["lr"], torch.Tensor) else 0.0
    with torch.no_grad():
        unwrapped_step(type(built))(built)
    return {tensor: built.state[copied] for tensor, copied in copies.items() if copied in built.state}

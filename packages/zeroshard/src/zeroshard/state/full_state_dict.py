"""The whole optimizer state by the names of the model, for files that other programs read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from zeroshard.optimizer import ZeroRedundancyOptimizer


def full_optimizer_state_dict(
    model: torch.nn.Module, optimizer: ZeroRedundancyOptimizer, *, to: int = 0
) -> dict[str, Any]:
    """Return what ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`` returns without sharding.

    Collective. State that does not exist yet is made, as torch's function does; see
    :meth:`ZeroRedundancyOptimizer.init_state`. The state stays consolidated until the next step, as after
    :meth:`ZeroRedundancyOptimizer.consolidate_state_dict`.

    Args:
        model: has the optimizer's parameters; names of DistributedDataParallel and torch.compile are left out.
        optimizer: whose state to bring together.
        to: the group rank that receives it.

    Returns:
        On rank ``to``, ``{"state": {name: entries}, "param_groups": [...]}`` with tensors on the CPU, which
        ``set_optimizer_state_dict`` with ``full_state_dict=True`` loads; an empty dict on other ranks.

    Raises:
        Exception: as ``consolidate_state_dict()``, on every rank; or as torch's function, for a model that does not
            have the optimizer's parameters.
    """
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    optimizer.init_state()
    optimizer.consolidate_state_dict(to=to)
    found: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
    # What was never stepped, or is frozen, is not listed without sharding.
    found["state"] = {name: entries for name, entries in found["state"].items() if entries}
    return found if optimizer.rank == to else {}

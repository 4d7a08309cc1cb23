"""What a Join block takes: joinables of one process group, none in another block, models before their optimizers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel
from zeroshard import ZeroRedundancyOptimizer
from zeroshard._torch_private import join_config
from zeroshard.joining.partners import refuse_before_model

from zeroshard_integrations.ddp import optimizers_of_hooks
from zeroshard_integrations.join.config import BlockConfig


def common_group(joinables: Sequence[Joinable]) -> dist.ProcessGroup:
    """Check the joinables of a block, and return the process group that all of them have.

    Raises:
        ValueError: if there are none, their groups differ, an optimizer comes before its model, the optimizer of a
            model's communication hook or its model is missing, one is there twice, or is torch's sharded optimizer.
        TypeError: if one is no joinable.
        RuntimeError: if one is in a block already.
    """
    if not joinables:
        raise ValueError("Join needs at least one joinable, such as a model in DistributedDataParallel")
    if len({id(joinable) for joinable in joinables}) < len(joinables):
        raise ValueError("a joinable is twice in the list that Join was given")
    for joinable in joinables:
        if not isinstance(joinable, Joinable):
            raise TypeError(f"Join takes joinables, and {type(joinable).__name__} is none")
        if isinstance(joinable, TorchZero):
            raise ValueError(
                "torch's ZeroRedundancyOptimizer steps with old gradients where a rank has run out of data: use "
                "zeroshard.ZeroRedundancyOptimizer"
            )
        refuse_nested(joinable)
    groups = [joinable.join_process_group for joinable in joinables]
    for joinable, group in zip(joinables, groups, strict=True):
        if group != groups[0]:
            ranks = [dist.get_process_group_ranks(each) for each in (groups[0], group)]
            raise ValueError(
                f"{type(joinables[0]).__name__} works on the ranks {ranks[0]} in one process group, and "
                f"{type(joinable).__name__} on {ranks[1]} in another: give all joinables of a Join block the same "
                f"process group, or enter a block for each group"
            )
    for joinable in joinables:
        if isinstance(joinable, ZeroRedundancyOptimizer):
            refuse_before_model(joinables, joinable)
            refuse_without_model(joinables, joinable)
        if isinstance(joinable, DistributedDataParallel):
            for optimizer in optimizers_of_hooks(joinable):
                if all(optimizer is not other for other in joinables):
                    raise ValueError(
                        "a communication hook of this model hands gradients to an optimizer that is not in the Join "
                        "block: write Join([ddp, optimizer])"
                    )
    found: dist.ProcessGroup = groups[0]
    return found


def refuse_without_model(joinables: Sequence[Joinable], optimizer: object) -> None:
    """Raise if an optimizer is handed gradients of a model that is not in the block. Passes over other joinables.

    A hook that was registered before the first backward shows only then.

    Raises:
        ValueError: saying so.
    """
    if not isinstance(optimizer, ZeroRedundancyOptimizer) or not optimizer.takes_buckets:
        return
    models = [other for other in joinables if isinstance(other, DistributedDataParallel)]
    if all(optimizer is not other for model in models for other in optimizers_of_hooks(model)):
        raise ValueError(
            "a communication hook hands gradients to this optimizer of a model that is not in the Join block: write "
            "Join([ddp, optimizer])"
        )


def refuse_nested(joinable: Joinable) -> None:
    """Raise if a joinable is in a block of ours already.

    Raises:
        RuntimeError: saying so.
    """
    if isinstance(join_config(joinable), BlockConfig):
        raise RuntimeError(
            f"this {type(joinable).__name__} is in a Join block already, and blocks cannot be nested: leave the outer "
            f"one first, or put all joinables in one block"
        )


def params_of(joinable: object) -> list[torch.Tensor]:
    """Return the parameters of a sharded optimizer; none of anything else."""
    groups = joinable.param_groups if isinstance(joinable, ZeroRedundancyOptimizer) else []
    return [param for group in groups for param in group["params"]]

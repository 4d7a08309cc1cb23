"""Supports ``train()`` and ``eval()`` of schedule-free optimizers, which exchange averages for parameters there.

Each rank calls its local optimizer's method, and sends the parameters and groups that it changes to all ranks.
"""

from __future__ import annotations

from collections import defaultdict

from zeroshard_comm import Coordinator

from zeroshard._torch_private import version_of
from zeroshard.local.optimizer import LocalOptimizer
from zeroshard.plan.groups import hyperparameters_of
from zeroshard.plan.hyperparameters import settings_of
from zeroshard.state.serialization import PLAIN, receive_value, send_value


def versions_of(local: LocalOptimizer) -> object:
    """Return a value that differs if a shard or a param group was changed. It misses writes to ``.data``."""
    versions = [version_of(shard.tensor) for shard in local.shards.values()]
    return versions, settings_of(local.optim.param_groups, {}, in_step=True)


def send_groups(coordinator: Coordinator, local: LocalOptimizer) -> None:
    """Send entries that an owner's optimizer wrote to a group, such as train_mode, to ranks without its parameters.

    Collective.
    """
    plan, rank, owners = local.plan, coordinator.ranks.rank, defaultdict[int, set[int]](set)
    for spec, ranks in zip(plan.tensors, plan.owners, strict=True):
        owners[spec.group].update(ranks)
    for number, owning in sorted(owners.items()):
        group = local.optim.param_groups[number]
        if rank == min(owning):
            written = {key: value for key, value in hyperparameters_of(group).items() if isinstance(value, PLAIN)}
            for peer in set(coordinator.ranks.peers) - owning:
                send_value(coordinator, peer, written)
        elif rank not in owning:
            group.update(receive_value(coordinator, min(owning)))

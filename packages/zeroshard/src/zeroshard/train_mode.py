"""Supports ``train()`` and ``eval()`` of schedule-free optimizers, which exchange averages for parameters there.

Each rank calls its inner optimizers' method, and sends the parameters and groups that it changes to all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from zeroshard_comm import Coordinator, agreed

from zeroshard._torch_private import version_of
from zeroshard.changes import Changes
from zeroshard.layouts import Layouts
from zeroshard.local.optimizer import LocalOptimizer
from zeroshard.param_buffers import broadcast_params
from zeroshard.plan.groups import hyperparameters_of
from zeroshard.plan.hyperparameters import settings_of
from zeroshard.state.metadata import StateMetadata
from zeroshard.state.serialization import PLAIN, receive_value, send_value


class TrainMode:
    """Calls ``train()`` and ``eval()`` of the inner optimizers on all ranks.

    Args:
        coordinator: the channel of the ranks' agreements.
        local: the local optimizer.
        layouts: finds and adopts the layout.
        changes: records the values that the methods write to param groups.
        metadata: knows which parameters were ever trained.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        local: LocalOptimizer,
        layouts: Layouts,
        changes: Changes,
        metadata: StateMetadata,
    ) -> None:
        self._coordinator, self._local, self._layouts = coordinator, local, layouts
        self._changes, self._metadata = changes, metadata
        self._last = ""
        """The last of the two methods that was called on all ranks without an error."""

    def call(self, name: str) -> Any:  # noqa: ANN401 - what the inner optimizer's returns
        """Call ``train`` or ``eval`` of the inner optimizers; replicas are equal even after an error. Collective."""
        coordinator, local = self._coordinator, self._local
        with agreed(coordinator, f"{name}()") as proposal:
            layout = self._layouts.update()
            proposal.set(layout.config)
        self._layouts.adopt(layout)
        self._changes.read_hyperparameters()
        last, self._last, before = self._last, "", self._versions()
        with agreed(coordinator, f"the end of {name}()"):
            try:
                with local.exchanged():
                    results = [getattr(member, name)() for member in local.members if hasattr(member, name)]
                self._last = name
            finally:
                local.masters.round()
                # Frameworks call train() before every batch.
                is_alike = last == name == self._last and before == self._versions()
                has_changed = coordinator.agree(f"what {name}() has changed", flag=not is_alike)
                if has_changed and not coordinator.is_single_rank:
                    broadcast_params(coordinator, local.params, local.plan, self._metadata.ever_trained())
                    self._send_groups()
                self._changes.record_step()
        return results[0] if len(local.members) == 1 else None

    def _versions(self) -> object:
        """Return a value that differs if a shard or a param group was changed. It misses writes to ``.data``."""
        versions = [version_of(shard.tensor) for shard in self._local.shards.values()]
        return versions, settings_of(self._local.groups, in_step=True)

    def _send_groups(self) -> None:
        """Send entries that an owner's class wrote to a group, such as train_mode, to ranks without its parameters."""
        plan, rank, owners = self._local.plan, self._coordinator.ranks.rank, defaultdict[int, set[int]](set)
        for spec, ranks in zip(plan.tensors, plan.owners, strict=True):
            owners[spec.group].update(ranks)
        for number, owning in sorted(owners.items()):
            group = self._local.groups[number]
            if rank == min(owning):
                written = {key: value for key, value in hyperparameters_of(group).items() if isinstance(value, PLAIN)}
                for peer in set(self._coordinator.ranks.peers) - owning:
                    send_value(self._coordinator, peer, written)
            elif rank not in owning:
                group.update(receive_value(self._coordinator, min(owning)))

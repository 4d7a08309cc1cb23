"""Supports ``train()`` and ``eval()`` of schedule-free optimizers, which swap parameters and their averages.

Each rank calls the method of its inner optimizers, and sends the parameters and groups that it changes to all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
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


@dataclass(eq=False)
class TrainMode:
    """Calls ``train()`` and ``eval()`` of the inner optimizers on all ranks."""

    coordinator: Coordinator
    local: LocalOptimizer
    layouts: Layouts
    changes: Changes
    metadata: StateMetadata
    last: str = ""
    """The last of the two methods that was called on all ranks without an error."""

    def call(self, name: str) -> Any:  # noqa: ANN401 - what the inner optimizer's returns
        """Call ``train`` or ``eval`` of the inner optimizers; replicas are equal even after an error. Collective."""
        coordinator, local = self.coordinator, self.local
        with agreed(coordinator, f"{name}()") as proposal:
            layout = self.layouts.update()
            proposal.set(layout.config)
        self.layouts.adopt(layout)
        self.changes.read_hyperparameters()
        last, self.last, before = self.last, "", self._versions()
        with agreed(coordinator, f"the end of {name}()"):
            try:
                with local.exchanged():
                    results = [getattr(member, name)() for member in local.members if hasattr(member, name)]
                self.last = name
            finally:
                local.masters.round()
                # Frameworks call train() before every batch.
                is_alike = last == name == self.last and before == self._versions()
                has_changed = coordinator.agree(f"the comparison after {name}()", flag=not is_alike)
                if has_changed and not coordinator.is_single_rank:
                    broadcast_params(coordinator, local.params, local.plan, self.metadata.ever_trained())
                    self._send_groups()
                self.changes.record_hyperparameters()
        return results[0] if len(local.members) == 1 else None

    def _versions(self) -> object:
        """Return a value that differs after a shard or a param group was changed. It misses writes to ``.data``."""
        versions = [version_of(shard.tensor) for shard in self.local.shards.values()]
        return versions, settings_of(self.local.groups, in_step=True)

    def _send_groups(self) -> None:
        """Send entries that a class wrote to a group, such as train_mode, to ranks that own none of its parameters."""
        plan, rank, owners = self.local.plan, self.coordinator.ranks.rank, defaultdict[int, set[int]](set)
        for spec, ranks in zip(plan.tensors, plan.owners, strict=True):
            owners[spec.group].update(ranks)
        for number, owning in sorted(owners.items()):
            group = self.local.groups[number]
            if rank == min(owning):
                written = {key: value for key, value in hyperparameters_of(group).items() if isinstance(value, PLAIN)}
                for peer in set(self.coordinator.ranks.peers) - owning:
                    send_value(self.coordinator, peer, written)
            elif rank not in owning:
                group.update(receive_value(self.coordinator, min(owning)))

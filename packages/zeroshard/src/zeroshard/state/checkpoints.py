"""Saves, loads and makes the state of one optimizer. Each call is collective, and takes effect on all ranks or none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from zeroshard_comm import Coordinator, agreed

from zeroshard.changes import Changes
from zeroshard.layouts import Layouts
from zeroshard.local.optimizer import LocalOptimizer
from zeroshard.plan.layout import Layout, with_settings
from zeroshard.state.check import StateSchema
from zeroshard.state.consolidate import describe_state, gather_state
from zeroshard.state.initialize import has_state, make_state
from zeroshard.state.load import check_load, install, receive_part
from zeroshard.state.metadata import StateMetadata


@dataclass(eq=False)
class Checkpoints:
    """Consolidates, makes and loads the state of the local optimizer outside of steps."""

    coordinator: Coordinator
    local: LocalOptimizer
    metadata: StateMetadata
    changes: Changes
    layouts: Layouts
    schema: StateSchema = field(default_factory=StateSchema)

    def consolidate(self, target: int, to: object) -> None:
        """Gather the state of all ranks on rank ``target``, which is -1 if ``to`` is not an integer. Collective."""
        coordinator, metadata, plan = self.coordinator, self.metadata, self.local.plan
        with agreed(coordinator, f"consolidate_state_dict(to={target})") as proposal:
            proposal.set(self.layouts.layout.config)
            if not 0 <= target < plan.world_size:
                raise ValueError(
                    f"consolidate_state_dict(to={to!r}): `to` must be a group rank from 0 to {plan.world_size - 1}"
                )
            manifest = describe_state(self.local, self.changes)
        metadata.drop_consolidated()
        metadata.consolidated = gather_state(coordinator, plan, manifest, target)
        metadata.consolidated_to = target

    def init_state(self) -> None:
        """Make the state of all ranks if no rank has any. Collective."""
        local, metadata = self.local, self.metadata
        with agreed(self.coordinator, "init_state()") as proposal:
            layout = self.layouts.update()
            proposal.set(layout.config)
            proposal.flag = has_state(local)
        if not self.coordinator.flagged:
            self._replace_state(layout, "init_state()", lambda: make_state(local))
            metadata.keeps_none = not metadata.described and any(param.requires_grad for param in local.params)

    def load(self, read: Callable[[], Mapping[str, Any]], from_rank: int | None, group: int | None) -> bool:
        """Load what ``read`` returns, on all ranks or on none. Return False if it is empty on all ranks. Collective."""
        coordinator, local, metadata = self.coordinator, self.local, self.metadata
        # Do not raise an error that a rank has told earlier: its advice may be to make this call.
        coordinator.defers = True
        try:
            with agreed(coordinator, "load_state_dict()") as proposal:
                given, layout = read(), self.layouts.update()
                rank = coordinator.ranks.rank
                found = check_load(given, layout.plan, local, metadata, self.schema, rank, from_rank, group)
                proposal.set(with_settings(layout, found.settings))
                proposal.flag = found.is_given
        finally:
            coordinator.defers, coordinator.told = False, None
        if not coordinator.flagged:
            return False
        part = receive_part(coordinator, found, metadata.consolidated_to)
        self._replace_state(layout, "load_state_dict()", lambda: install(local, part))
        local.extra.end_load()
        local.publish_groups()
        return True

    def _replace_state(self, layout: Layout, operation: str, install: Callable[[], None]) -> None:
        """Adopt a layout on which ranks agree, and install state on all ranks, or on none. Collective.

        ``install`` replaces the state and the param groups of inner optimizers. It must not change the old ones,
        because an error restores them.
        """
        before = [(member, member.state, member.param_groups) for member in self.local.members]
        try:
            with agreed(self.coordinator, f"the end of {operation}"):
                self.layouts.adopt(layout)
                install()
            self.metadata.exchange(f"the state after {operation}")
            self.metadata.drop_consolidated()
        except BaseException:
            for member, state, groups in before:
                member.state, member.param_groups = state, groups
            self.local.extra.end_load(failed=True)
            raise

"""Holds the layout of one optimizer, and replaces it after the user has changed the model or added a group."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from zeroshard_comm import Coordinator, agreed
from zeroshard_core import Plan

from zeroshard.changes import Changes
from zeroshard.grads.source import GradSource
from zeroshard.guard import Guard
from zeroshard.local.optimizer import LocalOptimizer
from zeroshard.param_buffers import ParamBuffers
from zeroshard.plan.costs import with_classes
from zeroshard.plan.group_classes import GroupClass
from zeroshard.plan.groups import active_mask, check_members, check_memory, check_values, parameters_of, same_place
from zeroshard.plan.hyperparameters import settings_of
from zeroshard.plan.layout import Layout, Policy, label_in, next_layout, renamed, same_shards, with_settings

_logger = logging.getLogger(__name__)


class Layouts:
    """Holds the layout in use, and the policy that computes it. All ranks must agree on a new one before :meth:`adopt`.

    ``source`` reduces gradients during backward, and adopts each new layout; None if there is no source.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        guard: Guard,
        policy: Policy,
        layout: Layout,
        local: LocalOptimizer,
        buffers: ParamBuffers,
        changes: Changes,
    ) -> None:
        self._coordinator, self._guard, self.policy, self.layout = coordinator, guard, policy, layout
        self._local, self._buffers, self._changes = local, buffers, changes
        self.source: GradSource | None = None
        self._lay_out()

    def update(self) -> Layout:
        """Return the layout that fits the user's changes since the last step, or raise an error on this rank only."""
        self._guard.check_allowed()
        self._guard.check_capture(self._local.params, self.layout.plan)
        check_members(self._local.groups, self._local.params)
        self._local.use_groups()
        return self.follow_params()

    def follow_params(self) -> Layout:
        """Do the same as :meth:`update`, but only for changes of the parameters.

        Data that was rebound but not converted is copied into its flat buffer. If it has none, all parameters are laid
        out again at once, because that affects no other rank.
        """
        layout, params, groups = self.layout, self._local.params, self._local.groups
        moved = self._changes.moved()
        if moved and self._buffers.buffers:
            # Check before values are copied: parameters that share memory now would no longer share it.
            check_memory(groups, active_mask(params))
            if self._buffers.restore(layout.plan, moved):
                self._local.rebind()
                moved = self._changes.moved()
        if moved or active_mask(params) != layout.active:
            layout = next_layout(self.policy, layout, groups)
            if self.source is not None:
                self.source.check_layout(params, layout)
            if moved and all(map(same_place, self.layout.plan.tensors, layout.plan.tensors)):
                # Even before ranks agree, because values must arrive where parameters are now.
                self._lay_out()
            if layout.config.digest == self.layout.config.digest:
                layout = self.layout
            else:
                self._check_not_converted(layout.plan)
        self._local.masters.refresh()
        return layout

    def _check_not_converted(self, plan: Plan) -> None:
        """Raise a ValueError if a parameter with state on this rank was converted after the layout was adopted."""
        for index, shard in self._local.shards.items():
            has_state = shard.is_master or bool(self._local.own_state(shard))
            if has_state and not same_place(self.layout.plan.tensors[index], plan.tensors[index]):
                raise ValueError(
                    f"{label_in(plan, index)} has optimizer state, and has changed its dtype, device or memory format: "
                    f"convert the model before the optimizer is built, or convert it back before step() and "
                    f"load_state_dict()"
                )

    def adopt(self, layout: Layout) -> None:
        """Adopt a layout on which all ranks agree. No-op if it is in use."""
        local = self._local
        if layout is self.layout:
            return
        _logger.debug("rank %d adopts another layout", self._coordinator.ranks.rank)
        if same_shards(layout.plan, self.layout.plan) and len(local.groups) == len(local.assignment):
            local.use(local.groups, layout.plan)
        else:
            local.rebuild(local.groups, layout.plan, self.policy.classes)
        self.layout = layout
        self._lay_out()

    def _lay_out(self) -> None:
        self._buffers.lay_out(self._local.params, self.layout.plan, self.layout.active)
        self._changes.record_layout(self.layout.active)
        self._local.rebind()
        self._local.masters.refresh()
        if self.source is not None:
            self.source.lay_out(self.layout)

    def use_names(self, names: Mapping[torch.Tensor, str]) -> None:
        """Use the model's names for parameters that the user passed without names. They are equal on all ranks."""
        self.policy = replace(self.policy, names={p: names[p] for p in self._local.params if p in names})
        self.layout = renamed(self.policy, self.layout, self._local.groups)
        self._local.use(self._local.groups, self.layout.plan)

    def add_group(self, append: Callable[[], GroupClass]) -> None:
        """Add a param group, which ``append`` checks and appends, on all ranks or on none. Collective."""
        local, layout, policy = self._local, self.layout, self.policy
        before = len(local.groups)
        try:
            with agreed(self._coordinator, "add_param_group()") as proposal:
                proposal.set(layout.config)
                self._guard.check_allowed()
                self.follow_params()
                classes = [*policy.classes, append()]
                if not self._coordinator.is_single_rank:
                    check_values(local.groups)
                policy = with_classes(policy, classes, local.groups)
                layout = next_layout(policy, layout, local.groups)
                self._check_not_converted(layout.plan)
                defaults = local.dry_run(layout.plan, policy.classes)
                added = [{**defaults, **group} for group in local.groups[before:]]
                settings: dict[str, Any] = {**settings_of(added, first=before)}
                if self.source is not None:
                    params = parameters_of(local.groups)
                    self.source.check_layout(params, layout)
                    settings |= self.source.settings(params, layout, len(local.params))
                proposal.set(with_settings(layout, settings))
        except BaseException:
            del local.groups[before:]
            raise
        self.policy = policy
        self.adopt(layout)

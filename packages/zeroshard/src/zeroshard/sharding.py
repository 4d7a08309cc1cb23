"""The plan at work: it follows the model, and alone replaces layout, shards and buffers, when all ranks agree."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from zeroshard_comm import Control, Position, RankGroup, ShardingConfig, Traffic, agreed, connect

from zeroshard.elementwise import name_of
from zeroshard.layout import Layout, Policy, first_layout, next_layout, renamed, same_place, same_shards
from zeroshard.local_optimizer import LocalOptimizer, sync_groups
from zeroshard.param_groups import Hyperparameters, ParamGroup, active_mask, check_members, parameters_of, settings_of
from zeroshard.param_order import check_order, read_order
from zeroshard.parameter_sync import ParameterSync

_logger = logging.getLogger(__name__)


class _Buckets(Protocol):
    """Buckets of gradients, laid out by the plan; it is a :class:`zeroshard.overlap.buckets.Buckets`."""

    def check(self, params: Sequence[torch.Tensor], layout: Layout) -> None: ...
    def follow(self, params: Sequence[torch.Tensor], layout: Layout) -> None: ...


class Sharding:
    """Holds the layout, the local optimizer and the parameters' buffers of one sharded optimizer.

    Args:
        ranks: the group.
        traffic: where bytes and waiting are counted.
        policy: how tensors are dealt out.
        defaults: the user's keyword arguments for the optimizer class.
        read_groups: reads and checks what the user handed in; returns the public param groups.

    Attributes:
        groups: the public param groups.
        control: the channel of the ranks' agreements.
        policy: as given; also with the names of parameters.
        layout: who owns what, and what takes part.
        params: all parameters, by tensor index.
        local: the local optimizer.
        sync: where parameters lie, and how they are shared.
        hyperparameters: what the ranks should agree upon.
        begins_with_state: whether the optimizer class has made state when it was built, on any rank.
        buckets: the buckets of a communication hook, which follow every layout; None without one.

    Raises:
        Exception: what any rank met while it read or planned, on every rank.
        DisagreementError: if ranks differ in their plans or settings, on every rank.
    """

    def __init__(
        self,
        ranks: RankGroup,
        traffic: Traffic,
        policy: Policy,
        defaults: Mapping[str, Any],
        read_groups: Callable[[], list[ParamGroup]],
    ) -> None:
        self.control, self.policy = Control(ranks, traffic), policy
        self.buckets: _Buckets | None = None
        name = name_of(policy.factory)
        order: Mapping[str, int] = {}
        with agreed(self.control, "ZeroRedundancyOptimizer()") as declared:
            groups = self.groups = read_groups()
            self.layout = first_layout(policy, groups, name)
            plan, coupled = self.layout.plan, policy.coupled
            self.local = LocalOptimizer(policy.factory, groups, plan, ranks.rank, defaults, coupled)
            declared.set(with_hyperparameters(self.layout, settings_of(groups, self.local.optim.defaults)))
            order = read_order(self.control, self.layout.plan.tensors, parameters_of(groups))
            declared.flag = bool(self.local.optim.state)
        self.begins_with_state = self.control.flagged
        check_order(self.control, order, "ZeroRedundancyOptimizer()")
        self.control.position = Position(ranks.context.number_optimizer(), name, 0)
        connect(self.control)
        self.sync = ParameterSync(self.control, as_bucket_view=policy.as_bucket_view)
        self.params = parameters_of(groups)
        self.hyperparameters = Hyperparameters()
        self.hyperparameters.follow(groups)
        self._lay_out()
        owned = sum(shard.shard.numel for shard in self.local.shards.values())
        _logger.info(
            "rank %d of %d owns %d of %d elements in %d of %d tensors (%s)",
            ranks.rank,
            ranks.world_size,
            owned,
            sum(param.numel() for param in self.params),
            len(self.local.shards),
            len(self.params),
            policy.name,
        )

    def grow(self, groups: list[ParamGroup], append: Callable[[], None]) -> None:
        """Take in a new param group on all ranks, or on none. Collective.

        Args:
            groups: the public param groups.
            append: checks the new group and appends it to ``groups``.

        Raises:
            DisagreementError: if ranks add different groups.
            PeerLostError: if a rank is gone.
            Exception: what any rank met, on every rank. ``groups`` is as before in every case.
        """
        before = len(groups)
        layout, order = self.layout, dict[str, int]()
        try:
            with agreed(self.control, "add_param_group()") as declared:
                declared.set(layout.declaration)
                append()
                layout = next_layout(self.policy, layout, groups)
                self.local.check_cut_dims(self.layout.plan, layout.plan)
                self.local.dry_run(groups, layout.plan)
                if self.buckets is not None:
                    self.buckets.check(parameters_of(groups), layout)
                hyperparameters = settings_of(groups[before:], self.local.optim.defaults, first=before)
                declared.set(with_hyperparameters(layout, hyperparameters))
                order = read_order(self.control, layout.plan.tensors, parameters_of(groups))
            check_order(self.control, order, "add_param_group()")
        except BaseException:
            del groups[before:]
            raise
        self.adopt(layout, groups)
        # The new group alone: what was edited in the others since the last step is not in the local optimizer yet.
        sync_groups(self.local.optim.param_groups[before:], groups[before:])

    def pin(self, tensors: frozenset[int], groups: Sequence[ParamGroup]) -> None:
        """Let tensors that were given state stay with their owners, also if they are frozen and unfrozen later.

        They weigh something from now on, which is a part of the plan: all ranks are to do this at the same time, with a
        layout that they agree upon.

        Args:
            tensors: indices.
            groups: the public param groups.
        """
        settled = self.layout.settled | tensors
        if settled != self.layout.settled:
            self.layout = next_layout(self.policy, replace(self.layout, settled=settled), groups)

    def name(self, names: Mapping[torch.Tensor, str]) -> None:
        """Call parameters that were handed in without names by these. To be done on all ranks."""
        self.policy = replace(self.policy, names=names)
        self.layout = renamed(self.policy, self.layout, self.groups)

    def update_layout(self, groups: Sequence[ParamGroup]) -> Layout:
        """Follow what the user did since the last step, and return the layout that fits it.

        If parameters' data was rebound but not converted, that is taken in at once: it concerns no other rank. Another
        layout is to be agreed upon with all ranks, and then adopted.

        Args:
            groups: the public param groups; their hyperparameters are handed to the local optimizer.

        Raises:
            Exception: what is wrong with the parameters or groups; the other ranks must hear of it.
        """
        check_members(groups, self.params)
        layout = self.current_layout(groups)
        sync_groups(groups, self.local.optim.param_groups)
        return layout

    def current_layout(self, groups: Sequence[ParamGroup]) -> Layout:
        """As :meth:`update_layout`, of the parameters alone."""
        layout = self.layout
        moved = self.sync.moved()
        if moved or active_mask(self.params) != layout.active:
            layout = next_layout(self.policy, layout, groups)
            if self.buckets is not None:
                self.buckets.check(self.params, layout)
            if moved and all(map(same_place, self.layout.plan.tensors, layout.plan.tensors)):
                # Also where ranks have to talk first: until then, shares must arrive where parameters are now.
                self._lay_out()
            if layout.declaration.digest == self.layout.declaration.digest:
                layout = self.layout
            else:
                self.local.check_cut_dims(self.layout.plan, layout.plan)
        return layout

    def adopt(self, layout: Layout, groups: Sequence[ParamGroup]) -> None:
        """Take over a layout that all ranks have agreed upon."""
        _logger.debug("rank %d takes over another layout", self.control.ranks.rank)
        if not same_shards(layout.plan, self.layout.plan) or len(groups) != len(self.local.optim.param_groups):
            self.local.follow(groups, layout.plan)
        self.layout = layout
        self.params = parameters_of(groups)
        self._lay_out()

    def in_words(self) -> str:
        """Return what ranks compare at the end of a step as JSON: layout and hyperparameters."""
        return with_hyperparameters(self.layout, self.hyperparameters.agreed).to_json()

    def _lay_out(self) -> None:
        self.sync.follow(self.params, self.layout.plan, self.layout.active)
        self.local.rebind()
        if self.buckets is not None:
            self.buckets.follow(self.params, self.layout)


def with_hyperparameters(layout: Layout, hyperparameters: Mapping[str, str]) -> ShardingConfig:
    """Declare hyperparameters beside a layout: once, as they may change with every step."""
    return replace(layout.declaration, settings={**layout.declaration.settings, **hyperparameters})

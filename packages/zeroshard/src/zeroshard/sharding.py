"""The plan in use: follows the model; nothing else replaces layout, shards and buffers, once all ranks agree."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from zeroshard_comm import Control, Position, RankGroup, ShardingConfig, Traffic, agreed

from zeroshard.elementwise import name_of
from zeroshard.implementations import check_capture
from zeroshard.layout import Layout, Policy, first_layout, next_layout, renamed, same_place, same_shards
from zeroshard.local_optimizer import LocalOptimizer, sync_groups
from zeroshard.param_groups import Hyperparameters, ParamGroup, active_mask, check_members, parameters_of, settings_of
from zeroshard.parameter_sync import ParameterSync

_logger = logging.getLogger(__name__)


class _Bucket(Protocol):
    """Gradients that are reduced together; it is a :class:`zeroshard.overlap.bucket.BucketState`."""

    @property
    def tensors(self) -> tuple[int, ...]: ...


class _Buckets(Protocol):
    """Buckets of gradients, laid out by the plan; it is a :class:`zeroshard.overlap.buckets.Buckets`."""

    @property
    def by_index(self) -> Mapping[int, _Bucket]: ...
    def check(self, params: Sequence[torch.Tensor], layout: Layout) -> None: ...
    def follow(self, params: Sequence[torch.Tensor], layout: Layout) -> None: ...


class Sharding:
    """Holds the layout, the local optimizer and the parameters' buffers of one sharded optimizer.

    Args:
        ranks: the group.
        traffic: where bytes and waiting are counted.
        policy: how tensors are dealt out.
        defaults: the user's keyword arguments for the optimizer class.
        read_groups: reads and checks the user's arguments; returns the public param groups.

    Attributes:
        groups: the public param groups.
        control: the channel of the ranks' agreements.
        policy: as given; also with the names of parameters.
        layout: who owns what, and which tensors are active.
        params: all parameters, by tensor index.
        local: the local optimizer.
        sync: where parameters lie, and how they are shared.
        refusal: why parameters may not be stepped or loaded now, if they may not.
        hyperparameters: those that must be equal on all ranks.
        begins_with_state: whether the optimizer class created state in its constructor, on any rank.
        buckets: the buckets of a communication hook, which follow every layout; None without one.

    Raises:
        Exception: an error of any rank in reading or planning, on every rank.
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
        self.refusal = ""
        name = name_of(policy.factory)
        with agreed(self.control, "ZeroRedundancyOptimizer()") as declared:
            groups = self.groups = read_groups()
            self.layout = first_layout(policy, groups, name)
            plan, coupled = self.layout.plan, policy.coupled
            masters = policy.master_weights
            self.local = LocalOptimizer(
                policy.factory, groups, plan, ranks.rank, defaults, coupled, with_masters=masters
            )
            declared.set(with_hyperparameters(self.layout, settings_of(groups, self.local.optim.defaults)))
            declared.flag = bool(self.local.optim.state)
        self.begins_with_state = self.control.flagged
        self.control.position = Position(ranks.context.number_optimizer(), name, 0)
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
        """Add a param group on all ranks, or on none. Collective.

        Args:
            groups: the public param groups.
            append: checks the new group and appends it to ``groups``.

        Raises:
            DisagreementError: if ranks add different groups.
            PeerLostError: if a rank is gone.
            Exception: an error of any rank, on every rank. ``groups`` is unchanged in every case.
        """
        before = len(groups)
        layout = self.layout
        try:
            with agreed(self.control, "add_param_group()") as declared:
                declared.set(layout.declaration)
                self.check_allowed()
                append()
                layout = next_layout(self.policy, layout, groups)
                self.local.check_not_converted(self.layout.plan, layout.plan)
                self.local.dry_run(groups, layout.plan)
                if self.buckets is not None:
                    self.buckets.check(parameters_of(groups), layout)
                hyperparameters = settings_of(groups[before:], self.local.optim.defaults, first=before)
                declared.set(with_hyperparameters(layout, hyperparameters))
        except BaseException:
            del groups[before:]
            raise
        self.adopt(layout, groups)
        # Only the new group: edits of the others since the last step are not in the local optimizer yet.
        sync_groups(self.local.optim.param_groups[before:], groups[before:])

    def pin(self, tensors: frozenset[int], groups: Sequence[ParamGroup]) -> None:
        """Let tensors with loaded state keep their owners, even if they are frozen and unfrozen later.

        They count in the loads from now on, which changes the plan: all ranks must call it at the same time, with a
        layout that they agree on.

        Args:
            tensors: indices.
            groups: the public param groups.
        """
        settled = self.layout.settled | tensors
        if settled != self.layout.settled:
            self.layout = next_layout(self.policy, replace(self.layout, settled=settled), groups)

    def name(self, names: Mapping[torch.Tensor, str]) -> None:
        """Give names to parameters that were passed without. All ranks must call it."""
        self.policy = replace(self.policy, names={param: names[param] for param in self.params if param in names})
        self.layout = renamed(self.policy, self.layout, self.groups)

    def update_layout(self, groups: Sequence[ParamGroup]) -> Layout:
        """Return the layout that fits the user's changes since the last step.

        If parameters' data was rebound but not converted, buffers are laid out again at once: it concerns no other
        rank. All ranks must agree on another layout before it is adopted.

        Args:
            groups: the public param groups; their hyperparameters are copied to the local optimizer.

        Raises:
            Exception: an error in the parameters or groups; the other ranks must be told.
        """
        self.check_allowed()
        check_capture(self.control.ranks, self.params)
        check_members(groups, self.params)
        layout = self.current_layout(groups)
        sync_groups(groups, self.local.optim.param_groups)
        self.local.masters.refresh()
        return layout

    def current_layout(self, groups: Sequence[ParamGroup]) -> Layout:
        """Like :meth:`update_layout`, but only for the parameters."""
        layout = self.layout
        moved = self.sync.moved()
        if moved or active_mask(self.params) != layout.active:
            layout = next_layout(self.policy, layout, groups)
            if self.buckets is not None:
                self.buckets.check(self.params, layout)
            if moved and all(map(same_place, self.layout.plan.tensors, layout.plan.tensors)):
                # Even if ranks must agree first: until then, shares must arrive where parameters are now.
                self._lay_out()
            if layout.declaration.digest == self.layout.declaration.digest:
                layout = self.layout
            else:
                self.local.check_not_converted(self.layout.plan, layout.plan)
        return layout

    def adopt(self, layout: Layout, groups: Sequence[ParamGroup]) -> None:
        """Take over a layout that all ranks have agreed on."""
        _logger.debug("rank %d takes over another layout", self.control.ranks.rank)
        if not same_shards(layout.plan, self.layout.plan) or len(groups) != len(self.local.optim.param_groups):
            self.local.follow(groups, layout.plan)
        self.layout = layout
        self.params = parameters_of(groups)
        self._lay_out()

    def check_allowed(self) -> None:
        """Raise a RuntimeError if parameters may not be stepped, loaded or added now."""
        if self.refusal:
            raise RuntimeError(self.refusal)

    def share_now(self) -> None:
        """Send the owners' values to all ranks outside of a step, also of parameters that are frozen now. Collective.

        Ranks must agree on something afterwards, as others may still be reading.

        Raises:
            PeerLostError: if a rank is gone.
        """
        sync = ParameterSync(self.control, as_bucket_view=False)
        sync.follow(self.params, self.layout.plan, [index in self.layout.settled for index in range(len(self.params))])
        sync.send()
        sync.wait()

    def in_words(self) -> str:
        """Return layout and hyperparameters as JSON, which ranks compare at the end of a step."""
        return with_hyperparameters(self.layout, self.hyperparameters.agreed).to_json()

    def _lay_out(self) -> None:
        self.sync.follow(self.params, self.layout.plan, self.layout.active)
        self.local.rebind()
        self.local.masters.refresh()
        if self.buckets is not None:
            self.buckets.follow(self.params, self.layout)


def with_hyperparameters(layout: Layout, hyperparameters: Mapping[str, str]) -> ShardingConfig:
    """Declare hyperparameters beside a layout: once, as they may change with every step."""
    return replace(layout.declaration, settings={**layout.declaration.settings, **hyperparameters})

"""Computes the first plan of an optimizer, and the next one after changes of the model, without changing anything.

The plan depends on the parameters' shapes, dtypes and memory formats, on which of them are trainable when the optimizer
is built or their group is added, and on the order in which groups were added. A tensor keeps its owner. Every rank
computes the plan by itself; the next agreement checks that all ranks have the same plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from zeroshard_comm import ShardingConfig
from zeroshard_core import (
    SMALLEST_PART,
    Cost,
    GroupCost,
    Level,
    Plan,
    Strategy,
    TensorSpec,
    numel,
    partition,
    repartition,
)

from zeroshard.plan.eligibility import Coupled, name_of, not_elementwise
from zeroshard.plan.group_classes import GroupClass, assign, names_of
from zeroshard.plan.groups import ParamGroup, active_mask, check_memory, parameters_of, specs_of
from zeroshard.plan.hyperparameters import to_text

Partition = str | Strategy | Level


@dataclass(frozen=True)
class Policy:
    """The settings that decide how to partition an optimizer, fixed at construction except for names and new groups.

    Attributes:
        strategy: ``"whole"``, ``"split"``, ``"level"``, a :class:`zeroshard_core.Level` or a callable.
        cost: the cost of a tensor, as a function or a dict by name; None for the default.
        classes: the optimizer class of each param group, which decides whether its tensors may be cut.
        costs: the costs of the tensors of each param group.
        as_bucket_view: whether parameters become views of flat buffers, which changes the messages.
        world_size: number of ranks.
        coupled: whether the class may couple tensors.
        master_weights: whether the owners of parameters in half precision step float32 copies of them.
        names: the names of parameters that the user passed without names.
        debug_level: the level of ``TORCH_DISTRIBUTED_DEBUG`` when the optimizer was built: OFF, INFO or DETAIL.
        by_messages: the types of devices whose tensors ranks send by messages, and not by collectives.
    """

    strategy: Partition
    cost: Cost | Mapping[str, float] | None
    as_bucket_view: bool
    world_size: int
    coupled: Coupled = "refuse"
    master_weights: bool = False
    classes: Sequence[GroupClass] = ()
    costs: Sequence[GroupCost] = ()
    names: Mapping[torch.Tensor, str] = field(default_factory=dict)
    # torch documents this function, but does not list it.
    debug_level: str = field(default_factory=lambda: dist.get_debug_level().name)  # type: ignore[attr-defined]
    by_messages: Sequence[str] = ("cpu",)

    @property
    def name(self) -> str:
        """The strategy's name, for messages."""
        if isinstance(self.strategy, Level):
            return "level"
        return self.strategy if isinstance(self.strategy, str) else name_of(self.strategy)

    @property
    def has_several(self) -> bool:
        """True if there are several local optimizers."""
        return len(set(assign(self.classes))) > 1

    @property
    def class_names(self) -> str:
        """The name of the class, or the classes of all groups."""
        return ", ".join(each.name for each in self.classes) if self.has_several else names_of(self.classes)

    def arguments(self, specs: Sequence[TensorSpec]) -> dict[str, Any]:
        """Return the arguments of :func:`zeroshard_core.partition` for these tensors."""
        how: dict[str, Any] = {"strategy": self.strategy, "smallest_part": self._smallest_part(specs)}
        if self.strategy == "level" or isinstance(self.strategy, Level):
            return {**how, "groups": self.costs}
        if any(each.cost is not None for each in self.classes) or (self.has_several and self.cost is None):
            return {**how, "cost": lambda spec: self.costs[spec.group].work(spec)}
        return {**how, "cost": numel if self.cost is None else self.cost}

    def _smallest_part(self, specs: Sequence[TensorSpec]) -> int:
        """Return the least number of elements of a part of a cut tensor.

        Each part costs a message, but nothing in a collective. In a collective of many ranks, large parts cost padding:
        at 512 ranks, they make the buckets of GPT-2 1.75 times as large, and small parts make them 1.15 times as large.
        """
        sends = all(spec.device.partition(":")[0] in self.by_messages for spec in specs)
        return SMALLEST_PART if sends or self.world_size < 64 else 1024


@dataclass(frozen=True)
class Layout:
    """A plan, and the other values that decide which messages a step sends.

    Attributes:
        plan: who owns what.
        active: whether a step may change the tensor, for each tensor.
        config: this rank's contribution to agreements on the layout.
    """

    plan: Plan
    active: tuple[bool, ...]
    config: ShardingConfig


def first_layout(policy: Policy, groups: Sequence[ParamGroup]) -> Layout:
    """Return the first layout of an optimizer."""
    return next_layout(policy, None, groups)


def next_layout(policy: Policy, layout: Layout | None, groups: Sequence[ParamGroup]) -> Layout:
    """Return the layout after a change of the parameters. Tensors keep their owners; tensors of new groups get one."""
    active = active_mask(parameters_of(groups))
    before = [spec.trainable for spec in layout.plan.tensors] if layout is not None else []
    # A tensor that was trainable once keeps its weight, because its owner still holds its state.
    weighs = [now or was for now, was in zip_longest(active, before, fillvalue=False)]
    specs = specs_of(groups, weighs, policy.names)
    check_memory(groups, active)
    if layout is None:
        plan = first_plan(policy, specs)
    else:
        for index, (old, new) in enumerate(zip(layout.plan.tensors, specs, strict=False)):
            if old.shape != new.shape:
                raise ValueError(
                    f"tensor {index} {new.name!r} has changed its shape from {old.shape} to {new.shape}; its "
                    f"optimizer state no longer fits, so build a new optimizer"
                )
        plan = repartition(layout.plan, specs, **policy.arguments(specs))
        _check_cuts(policy, plan)
    settings: dict[str, str | bool] = {
        "optimizer": policy.class_names,
        **({"optimizer_defaults": to_text([each.arguments for each in policy.classes])} if policy.has_several else {}),
        "parameters_as_bucket_view": policy.as_bucket_view,
        "coupled": policy.coupled,
        "master_weights": policy.master_weights,
        "TORCH_DISTRIBUTED_DEBUG=DETAIL": policy.debug_level == "DETAIL",
    }
    return Layout(plan, active, ShardingConfig(plan, settings, active))


def first_plan(policy: Policy, specs: Sequence[TensorSpec]) -> Plan:
    """Return a plan that places all tensors."""
    plan = partition(specs, policy.world_size, **policy.arguments(specs))
    _check_cuts(policy, plan)
    return plan


def with_work(policy: Policy, plan: Plan) -> Plan:
    """Return the plan with the work of updates as loads, in place of the costs by which its tensors were placed."""
    return repartition(plan, plan.tensors, groups=policy.costs)


def _check_cuts(policy: Policy, plan: Plan) -> None:
    """Raise a ValueError if a plan cuts a tensor of a class that may not be elementwise, or would cut a larger one."""
    cut = {plan.tensors[index].group for index, ranks in enumerate(plan.owners) if len(ranks) > 1}
    cuts_any = policy.has_several and policy.strategy == "split"
    for number, each in enumerate(policy.classes):
        if not each.may_be_cut and (cuts_any or number in cut):
            raise not_elementwise(each.name, policy.name, number if policy.has_several else None)


def renamed(policy: Policy, layout: Layout, groups: Sequence[ParamGroup]) -> Layout:
    """Return the layout with the policy's names for parameters that the user passed without names."""
    specs = specs_of(groups, layout.active, policy.names)
    tensors = tuple(replace(old, name=new.name) for old, new in zip(layout.plan.tensors, specs, strict=True))
    plan = replace(layout.plan, tensors=tensors)
    return replace(layout, plan=plan, config=replace(layout.config, plan=plan))


def same_shards(one: Plan, other: Plan) -> bool:
    """Return True if the same ranks own the same rows of the same tensors."""
    here, there = ([(spec.shape, spec.cut_dim) for spec in plan.tensors] for plan in (one, other))
    return (one.owners, one.starts) == (other.owners, other.starts) and here == there


def label_in(plan: Plan, index: int) -> str:
    """Return the index and the name of a tensor for messages, e.g. ``"tensor 3 'bias'"``."""
    return f"tensor {index} {plan.tensors[index].name!r}"


def with_settings(layout: Layout, settings: Mapping[str, Any]) -> ShardingConfig:
    """Return a rank's contribution to one agreement with more settings, e.g. hyperparameters, which may change."""
    return replace(layout.config, settings={**layout.config.settings, **settings})

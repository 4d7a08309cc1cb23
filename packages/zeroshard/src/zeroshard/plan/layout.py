"""Computes the first plan of an optimizer, and the next one after changes of the model, without changing anything.

The plan depends on the parameters' shapes, dtypes and memory formats, on which of them are trainable when the optimizer
is built or their group is added, and on the order of the groups. Each rank computes it alone; agreements compare it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, NoReturn

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

from zeroshard.plan.eligibility import Coupled, name_of
from zeroshard.plan.group_classes import GroupClass, assign
from zeroshard.plan.groups import ParamGroup, active_mask, check_memory, parameters_of, specs_of
from zeroshard.plan.hyperparameters import to_text

Partition = str | Strategy | Level


@dataclass(frozen=True)
class Policy:
    """The settings that decide how to partition an optimizer, fixed at construction except for names and new groups.

    ``classes`` and ``costs`` have an entry for each param group, and ``names`` has the parameters that the user passed
    without names. Ranks send tensors on the device types ``by_messages`` by messages, and others by collectives.
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
    # The level of TORCH_DISTRIBUTED_DEBUG: OFF, INFO or DETAIL. torch documents this function, but does not list it.
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

    def arguments(self, specs: Sequence[TensorSpec]) -> dict[str, Any]:
        """Return the arguments of :func:`zeroshard_core.partition` for these tensors."""
        # A part costs a message, but nothing in a collective. In collectives of many ranks, large parts need padding:
        # at 512 ranks, the buckets of GPT-2 become 1.75 times as large, and 1.15 times as large with small parts.
        sends = all(spec.device.partition(":")[0] in self.by_messages for spec in specs)
        smallest = SMALLEST_PART if sends or self.world_size < 64 else 1024
        how: dict[str, Any] = {"strategy": self.strategy, "smallest_part": smallest}
        if self.strategy == "level" or isinstance(self.strategy, Level):
            return {**how, "groups": self.costs}
        if any(each.cost is not None for each in self.classes) or (self.has_several and self.cost is None):
            return {**how, "cost": lambda spec: self.costs[spec.group].work(spec)}
        return {**how, "cost": numel if self.cost is None else self.cost}


@dataclass(frozen=True)
class Layout:
    """A plan, whether a step may change each tensor, and this rank's contribution to agreements on both."""

    plan: Plan
    active: tuple[bool, ...]
    config: ShardingConfig


def first_layout(policy: Policy, groups: Sequence[ParamGroup]) -> Layout:
    """Return the first layout of an optimizer."""
    return next_layout(policy, None, groups)


def next_layout(policy: Policy, layout: Layout | None, groups: Sequence[ParamGroup]) -> Layout:
    """Return the layout after a change of the parameters. Tensors keep their owners; tensors of new groups get one."""
    active = active_mask(parameters_of(groups))
    known = layout.plan.tensors if layout is not None else ()
    # A tensor that was trainable once keeps its weight, because its owner still holds its state.
    weighs = [now or was for now, was in zip_longest(active, [spec.trainable for spec in known], fillvalue=False)]
    specs = specs_of(groups, weighs, policy.names)
    check_memory(groups, active)
    for index, (old, new) in enumerate(zip(known, specs, strict=False)):
        if old.shape != new.shape:
            raise ValueError(
                f"tensor {index} {new.name!r} has changed its shape from {old.shape} to {new.shape}; its optimizer "
                f"state no longer fits, so build a new optimizer"
            )
    plan = place(policy, specs, layout.plan if layout is not None else None)
    return Layout(plan, active, ShardingConfig(plan, _settings_of(policy), active))


def _settings_of(policy: Policy) -> dict[str, str | bool]:
    """Return the settings that must be equal on all ranks."""
    settings = {"optimizer": policy.classes[0].name}
    if policy.has_several:
        settings["optimizer"] = ", ".join(each.name for each in policy.classes)
        settings["optimizer_defaults"] = to_text([each.arguments for each in policy.classes])
    return {
        **settings,
        "parameters_as_bucket_view": policy.as_bucket_view,
        "coupled": policy.coupled,
        "master_weights": policy.master_weights,
        "TORCH_DISTRIBUTED_DEBUG=DETAIL": policy.debug_level == "DETAIL",
    }


def place(policy: Policy, specs: Sequence[TensorSpec], before: Plan | None = None) -> Plan:
    """Return a plan in which tensors of an earlier plan keep their owners.

    Raises a ValueError if the plan cuts a tensor of a class that may not be elementwise, or would cut a larger one.
    """
    arguments = policy.arguments(specs)
    if before is None:
        plan = partition(specs, policy.world_size, **arguments)
    else:
        plan = repartition(before, specs, **arguments)
    cut = {plan.tensors[index].group for index, ranks in enumerate(plan.owners) if len(ranks) > 1}
    cuts_any = policy.has_several and policy.strategy == "split"
    for number, each in enumerate(policy.classes):
        if not each.may_be_cut and (cuts_any or number in cut):
            which = f"{each.name}, the class of param group {number}," if policy.has_several else each.name
            raise ValueError(
                f"partition={policy.name!r} cuts tensors, but {which} is not known to be elementwise: it may look at a "
                f"whole tensor to update one element. Use partition={'level' if policy.has_several else 'whole'!r}, or "
                f"pass elementwise=True if it is"
            )
    return plan


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


def owners_of_groups(plan: Plan) -> dict[int, set[int]]:
    """Return for each param group with tensors the ranks that own one, or a part of one."""
    owners: dict[int, set[int]] = {}
    for spec, ranks in zip(plan.tensors, plan.owners, strict=True):
        owners.setdefault(spec.group, set()).update(ranks)
    return owners


def explain_index_error(error: IndexError, plan: Plan, rank: int) -> NoReturn:
    """Raise an error that names a param group of which this rank owns no tensor, or ``error`` if there is none."""
    empty = [number for number, ranks in owners_of_groups(plan).items() if rank not in ranks]
    if not empty:
        raise error
    raise IndexError(
        f"{error}: perhaps because param group {empty[0]} is empty on rank {rank}: other ranks own its tensors. A "
        f"class that indexes the tensors of each group must skip empty groups. If it does not, put more tensors into "
        f"each group, or use fewer ranks"
    ) from error


def with_settings(layout: Layout, settings: Mapping[str, Any]) -> ShardingConfig:
    """Return a rank's contribution to one agreement with more settings, e.g. hyperparameters, which may change."""
    return replace(layout.config, settings={**layout.config.settings, **settings})

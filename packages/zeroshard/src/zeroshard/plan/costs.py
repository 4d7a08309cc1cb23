"""Determines the cost of the tensors of each param group. For an unknown class, it is their number of elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import optim
from zeroshard_core import Cost, GroupCost, TensorSpec, adam, cost_function, newton_schulz, numel, state_bytes

from zeroshard.plan.eligibility import ELEMENTWISE, class_of
from zeroshard.plan.group_classes import GroupClass
from zeroshard.plan.groups import ParamGroup, hyperparameters_of
from zeroshard.plan.layout import Policy


def with_classes(
    policy: Policy, classes: Sequence[GroupClass], groups: Sequence[ParamGroup], *, strict: bool = False
) -> Policy:
    """Return a policy for these groups, as the user wrote them, and their classes. It keeps the known costs.

    If a class cannot step a tensor, the tensor's state is assumed to be as large as the tensor. With ``strict``, this
    raises a ValueError if that tensor is trainable.
    """
    added = zip(classes[len(policy.costs) :], groups[len(policy.costs) :], strict=True)
    costs = [*policy.costs, *[_cost_of(policy, *each, strict=strict) for each in added]]
    return replace(policy, classes=[*classes], costs=costs)


def builder(chosen: GroupClass, group: ParamGroup) -> Callable[[list[torch.Tensor]], optim.Optimizer]:
    """Return a function that builds an optimizer over parameters, with the current hyperparameters of a group."""
    written = hyperparameters_of(group)

    def build(params: list[torch.Tensor]) -> optim.Optimizer:
        return chosen.build([{**written, "params": params}])

    # Errors show this name.
    build.__name__ = chosen.name
    return build


def stepped_spec(spec: TensorSpec, *, master_weights: bool) -> TensorSpec:
    """Describe the tensor that is stepped: the master weights of ``spec`` in float32, if it has any, or itself."""
    has_master = master_weights and spec.dtype in (torch.float16, torch.bfloat16)
    return replace(spec, dtype=torch.float32) if has_master else spec


def _cost_of(policy: Policy, chosen: GroupClass, group: ParamGroup, *, strict: bool) -> GroupCost:
    given = policy.cost if chosen.cost is None else chosen.cost
    known = _known_work(class_of(chosen.factory), {**chosen.arguments, **hyperparameters_of(group)})
    measured = state_bytes(builder(chosen, group))

    def state(spec: TensorSpec) -> float:
        stepped = stepped_spec(spec, master_weights=policy.master_weights)
        try:
            own = measured(stepped)
        except ValueError:
            if strict and spec.trainable:
                raise
            own = stepped.nbytes
        return own + stepped.nbytes * (stepped is not spec)

    work = cost_function(given) if given is not None else known or numel
    return GroupCost(chosen.name, work, state, chosen.may_be_cut, is_assumed=given is None and known is None)


def _known_work(kind: object, settings: ParamGroup) -> Cost | None:
    if kind is optim.Muon:
        return newton_schulz(settings.get("ns_steps", 5))
    return adam(120.0 if settings.get("fused") else 800.0) if kind in ELEMENTWISE else None

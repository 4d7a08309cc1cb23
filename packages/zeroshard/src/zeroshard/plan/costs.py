"""What the tensors of each param group cost, where the class is known; else their number of elements is assumed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import optim
from zeroshard_core import Cost, GroupCost, TensorSpec, adam, newton_schulz, numel, state_bytes

from zeroshard.plan.eligibility import ELEMENTWISE, class_of
from zeroshard.plan.group_classes import GroupClass
from zeroshard.plan.groups import ParamGroup, hyperparameters_of
from zeroshard.plan.layout import Policy


def with_classes(policy: Policy, classes: Sequence[GroupClass], groups: Sequence[ParamGroup]) -> Policy:
    """Return a policy for these groups, as the user has written them, and their classes; it knows those before."""
    known = len(policy.costs)
    new = [_cost_of(policy, each, group) for each, group in zip(classes[known:], groups[known:], strict=True)]
    return replace(policy, classes=[*classes], costs=[*policy.costs, *new])


def _cost_of(policy: Policy, chosen: GroupClass, group: ParamGroup) -> GroupCost:
    settings = {**chosen.arguments, **hyperparameters_of(group)}
    given = chosen.cost or policy.cost
    known = _known_work(class_of(chosen.factory), settings)
    # A copy: steps and schedulers write to the group.
    written = hyperparameters_of(group)
    measured = state_bytes(lambda params: chosen.build([{**written, "params": params}]))

    def state(spec: TensorSpec) -> float:
        has_master = policy.master_weights and spec.dtype in (torch.float16, torch.bfloat16)
        stepped = replace(spec, dtype=torch.float32) if has_master else spec
        try:
            return measured(stepped) + has_master * stepped.nbytes
        except ValueError:
            # It could not be stepped: as much as the tensor.
            return (1 + has_master) * stepped.nbytes

    return GroupCost(
        chosen.name, given or known or numel, state, chosen.may_be_cut, is_assumed=given is None and known is None
    )


def _known_work(kind: object, settings: ParamGroup) -> Cost | None:
    if kind is optim.Muon:
        return newton_schulz(settings.get("ns_steps", 5))
    return adam(120.0 if settings.get("fused") else 800.0) if kind in ELEMENTWISE else None

"""Builds the optimizers of the user's classes, and refuses those that cannot be sharded."""

from __future__ import annotations

from collections.abc import Sequence

from torch import optim

from zeroshard.plan.eligibility import (
    Coupled,
    check_class_uncoupled,
    check_differentiable,
    check_uncoupled,
    warn_of_own_state,
)
from zeroshard.plan.group_classes import GroupClass, assign
from zeroshard.plan.groups import ParamGroup
from zeroshard.plan.optimizer_check import refuse_coupling


def build_optimizers(
    groups: Sequence[ParamGroup], classes: Sequence[GroupClass], coupled: Coupled
) -> list[optim.Optimizer]:
    """Build an optimizer for each class, over its groups, with the user's arguments."""
    built = []
    assignment = assign(classes)
    for number in range(max(assignment) + 1):
        own = [group for group, of_group in zip(groups, assignment, strict=True) if of_group == number]
        chosen = classes[assignment.index(number)]
        # The constructor of a coupled class may raise an error that does not say why.
        check_class_uncoupled(chosen.factory, coupled)
        try:
            made = chosen.build(own)
        except (AssertionError, TypeError, ValueError) as error:
            if chosen.name in str(error) or type(error) not in (AssertionError, TypeError, ValueError):
                raise
            raise type(error)(f"{chosen.name}: {error}") from error
        check_uncoupled(made, chosen.arguments, coupled)
        check_differentiable(made)
        if coupled == "refuse":
            refuse_coupling(made, chosen, own)
        warn_of_own_state(made)
        built.append(made)
    return built

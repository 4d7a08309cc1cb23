"""Finds the optimizer class of each param group: the constructor's, or the class that the group names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from torch import optim
from zeroshard_core import Cost

from zeroshard.plan.eligibility import ELEMENTWISE, OptimizerFactory, check_shardable, class_of, name_of
from zeroshard.plan.groups import ParamGroup

OPTIONS = ("optimizer_class", "optimizer_defaults", "cost", "elementwise")
"""Keys of a param group that say how to step and partition it. ``param_groups`` and state dicts do not have them."""

_ADDED = frozenset({"param_names", "name", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"})
"""Keys that users and torch's schedulers add to param groups."""


@dataclass(frozen=True, eq=False)
class GroupClass:
    """The optimizer class of a param group, and the cost of its tensors; None means the optimizer's cost.

    ``factory`` is a class or a ``functools.partial`` of one; ``defaults`` extend and override the partial's arguments.
    ``elementwise`` is True if the user has declared that the class is elementwise.
    """

    factory: OptimizerFactory
    defaults: Mapping[str, Any]
    elementwise: bool = False
    cost: Cost | Mapping[str, float] | None = None

    @property
    def name(self) -> str:
        """The name of the class."""
        return name_of(self.factory)

    @property
    def arguments(self) -> dict[str, Any]:
        """All keyword arguments of the constructor."""
        keywords: dict[str, Any] = {}
        factory = self.factory
        while isinstance(factory, functools.partial):
            keywords, factory = {**factory.keywords, **keywords}, factory.func
        return {**keywords, **self.defaults}

    @property
    def may_be_cut(self) -> bool:
        """True if tensors may be cut: the class is torch's, is declared elementwise, or has ``elementwise = True``."""
        found = class_of(self.factory)
        return self.elementwise or found in ELEMENTWISE or getattr(found, "elementwise", False) is True

    def is_stepped_with(self, other: GroupClass) -> bool:
        """Return True if one local optimizer steps the groups of both, because class and arguments are equal."""
        mine, others = self.arguments, other.arguments
        if class_of(self.factory) is not class_of(other.factory) or mine.keys() != others.keys():
            return False
        return all(_are_equal(mine[key], others[key]) for key in mine)

    def build(self, groups: Iterable[ParamGroup]) -> optim.Optimizer:
        """Build an optimizer over param groups of this class, which keeps these dicts unless the class copies them."""
        given = list(groups)
        try:
            return self.factory(given, **self.defaults)
        except Exception:
            # Some classes accept only their own keys.
            own = [{key: group[key] for key in group if key not in _ADDED} for group in given]
            with suppress(Exception):
                built = self.factory(own, **self.defaults)
                for inside, group in zip(built.param_groups, given, strict=True):
                    inside.update({key: value for key, value in group.items() if key in _ADDED})
                return built
            raise


def take_class(group: ParamGroup, constructors: GroupClass) -> tuple[ParamGroup, GroupClass]:
    """Return a param group without its :data:`OPTIONS`, and the class that they describe.

    Raises a TypeError if an option has a wrong type, and a ValueError if the class cannot be sharded.
    """
    options = {key: group[key] for key in OPTIONS if key in group}
    if not options:
        return group, constructors
    factory, given = options.get("optimizer_class", constructors.factory), options.get("optimizer_defaults", {})
    check_shardable(factory)
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise TypeError(f"`optimizer_defaults` of a param group must be a dict of keyword arguments, but is {given!r}")
    cost, elementwise = options.get("cost"), options.get("elementwise", False)
    if not (cost is None or callable(cost) or isinstance(cost, Mapping)):
        raise TypeError(f"`cost` of a param group must be a function or a dict by name, but is {cost!r}")
    if not isinstance(elementwise, bool):
        raise TypeError(f"`elementwise` of a param group must be True or False, but is {elementwise!r}")
    found = GroupClass(factory, given, elementwise, cost)
    if class_of(factory) is class_of(constructors.factory):
        # The group's own arguments take precedence.
        own = found.arguments if "optimizer_class" in options else given
        inherited = {key: value for key, value in constructors.defaults.items() if key not in own}
        found = replace(found, defaults={**inherited, **given}, elementwise=elementwise or constructors.elementwise)
    return {key: value for key, value in group.items() if key not in OPTIONS}, found


@contextmanager
def adopting_dicts() -> Iterator[Callable[[object, ParamGroup], ParamGroup]]:
    """Yield a function that makes the caller's dict the param group, as torch does; if the block raises, restore it.

    A dict with :data:`OPTIONS` is unchanged, because the caller may use it for another optimizer; a copy without them
    becomes the group.
    """
    adopted: list[tuple[ParamGroup, ParamGroup]] = []

    def adopt(given: object, group: ParamGroup) -> ParamGroup:
        if type(given) is not dict or not given.keys().isdisjoint(OPTIONS):
            return group
        adopted.append((given, dict(given)))
        given.update(group)
        return given

    try:
        yield adopt
    except BaseException:
        for given, before in adopted:
            given.clear()
            given.update(before)
        raise


def assign(classes: Iterable[GroupClass]) -> tuple[int, ...]:
    """Return the number of each group's local optimizer, in the order of first appearance."""
    firsts: list[GroupClass] = []
    numbers = []
    for each in classes:
        number = next((n for n, first in enumerate(firsts) if each.is_stepped_with(first)), len(firsts))
        if number == len(firsts):
            firsts.append(each)
        numbers.append(number)
    return tuple(numbers)


def names_of(classes: Sequence[GroupClass]) -> str:
    """Return the names of the classes, each once, e.g. ``"Muon + AdamW"``."""
    return " + ".join(dict.fromkeys(each.name for each in classes))


def check_hyperparameters(
    what: str, group: Mapping[str, Any], optimizers: Sequence[optim.Optimizer], own: optim.Optimizer
) -> None:
    """Raise a ValueError if a group, as written or saved, has a hyperparameter that only another class takes."""
    for other in optimizers:
        foreign = sorted((group.keys() & other.defaults.keys()) - own.defaults.keys())
        # Some classes list no defaults.
        if own.defaults and foreign:
            raise ValueError(
                f"{what} has {foreign[0]!r}, which {type(own).__name__} does not take, but {type(other).__name__} "
                f"does: a group may have only hyperparameters of its own class"
            )


def _are_equal(one: object, other: object) -> bool:
    if one is other:
        return True
    plain = (bool, int, float, str, tuple, list, dict)
    # Containers may have values that cannot be compared, such as tensors.
    with suppress(Exception):
        return isinstance(one, plain) and isinstance(other, plain) and bool(one == other)
    return False

"""Splits the state dict of several classes into state dicts of plain optimizers, one for each class, and joins them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zeroshard.plan.groups import pack_groups

StateDict = dict[str, Any]


def split_state_dict(state_dict: Mapping[str, Any], assignment: Sequence[int]) -> tuple[StateDict, ...]:
    """Split the state dict of an optimizer of several classes into a state dict for a plain optimizer of each class.

    >>> groups = [{"lr": 0.1, "params": [0]}, {"lr": 0.2, "params": [1]}]
    >>> split_state_dict({"state": {1: {"step": 1}}, "param_groups": groups}, [0, 1])[1]
    {'state': {0: {'step': 1}}, 'param_groups': [{'lr': 0.2, 'params': [0]}]}

    Args:
        state_dict: the state dict, with all values and with integers as keys.
        assignment: the number of each group's optimizer, as in ``optimizer.group_assignment``.

    Returns:
        The state dicts by number. They share tensors with ``state_dict``.

    Raises:
        ValueError: if the number of groups differs from ``assignment``, or state belongs to no parameter.
    """
    groups, state = _checked(state_dict, assignment), state_dict["state"]
    parts: list[StateDict] = []
    for number in range(len({*assignment})):
        own = [group for group, owner in zip(groups, assignment, strict=True) if owner == number]
        keys = [key for group in own for key in group["params"]]
        position = {key: place for place, key in enumerate(keys)}
        of_part = {position[key]: entries for key, entries in state.items() if key in position}
        parts.append({"state": of_part, "param_groups": pack_groups(own)})
    return tuple(parts)


def join_state_dicts(state_dicts: Sequence[Mapping[str, Any]], assignment: Sequence[int]) -> StateDict:
    """Return the state dict of one optimizer of several classes. This is the inverse of :func:`split_state_dict`.

    Args:
        state_dicts: the state dicts of the plain optimizers, by number.
        assignment: the number of the plain optimizer of each group; each plain optimizer's groups are in this order.

    Raises:
        ValueError: if a state dict has more or fewer groups than in ``assignment``, or state belongs to no parameter.
    """
    _check_assignment(assignment)
    if len(state_dicts) != len({*assignment}):
        raise ValueError(f"there are {len(state_dicts)} state dicts for {len({*assignment})} optimizers")
    rest = [iter(_checked(part, [0] * assignment.count(number))) for number, part in enumerate(state_dicts)]
    groups = [next(rest[number]) for number in assignment]
    packed = pack_groups(groups)
    joined: dict[int, Any] = {}
    for number, group, renumbered in zip(assignment, groups, packed, strict=True):
        state = state_dicts[number]["state"]
        keys = zip(group["params"], renumbered["params"], strict=True)
        joined.update({new: state[old] for old, new in keys if old in state})
    return {"state": joined, "param_groups": packed}


def with_part(whole: Mapping[str, Any], assignment: Sequence[int], group: int, part: Mapping[str, Any]) -> StateDict:
    """Return a state dict with ``part`` in place of the state of the plain optimizer of a group."""
    if type(group) is not int or not 0 <= group < len(assignment):
        raise ValueError(f"load_state_dict(group={group!r}): expected a group from 0 to {len(assignment) - 1}")
    parts: list[Mapping[str, Any]] = [*split_state_dict(whole, assignment)]
    parts[assignment[group]] = part
    return join_state_dicts(parts, assignment)


def _checked(state_dict: Mapping[str, Any], assignment: Sequence[int]) -> Sequence[Mapping[str, Any]]:
    """Return the groups of a state dict; raise if their number is wrong, or state belongs to no parameter."""
    _check_assignment(assignment)
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise TypeError("expected a state dict with 'state' and 'param_groups', as a plain optimizer returns")
    groups: Sequence[Mapping[str, Any]] = state_dict["param_groups"]
    if len(groups) != len(assignment):
        raise ValueError(f"a state dict has {len(groups)} param groups, but the assignment has {len(assignment)}")
    unknown = state_dict["state"].keys() - {key for group in groups for key in group["params"]}
    if unknown:
        raise ValueError(f"the state has {min(map(str, unknown))!r}, which is not a parameter of its groups")
    return groups


def _check_assignment(assignment: Sequence[int]) -> None:
    if {*assignment} != {*range(len({*assignment}))}:
        raise ValueError(f"an assignment should number optimizers from 0 without gaps, but is {[*assignment]}")

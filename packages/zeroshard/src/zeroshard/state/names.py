"""State dicts whose keys are the names of parameters, as fully sharded data parallel saves them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from zeroshard_core import to_indices, to_names

from zeroshard.plan.groups import ParamGroup
from zeroshard.state.listing import PartialState

Keys = Literal["indices", "names"]


def check_keys(keys: Keys) -> Keys:
    """Return it, or raise a ValueError."""
    if keys not in get_args(Keys):
        raise ValueError(f"`keys` must be one of {get_args(Keys)}, but got {keys!r}")
    return keys


def names_of(groups: Sequence[ParamGroup]) -> list[str]:
    """Return the names of all parameters, in their order.

    Raises:
        ValueError: if a group has none.
    """
    for number, group in enumerate(groups):
        if "param_names" not in group:
            raise ValueError(
                f"keys='names': the parameters of group {number} have no names; build the optimizer from "
                f"model.named_parameters()"
            )
    return [str(name) for group in groups for name in group["param_names"]]


def key_by_name(state_dict: Mapping[str, Any], groups: Sequence[ParamGroup]) -> dict[str, Any]:
    """Key a state dict by names instead of indices; it is of class :class:`PartialState` if the given one is.

    Raises:
        ValueError: as :func:`names_of`.
        StateMapError: if two parameters have one name, or some state belongs to no parameter.
    """
    named = to_names(state_dict, names_of(groups))
    return PartialState(named, state=PartialState(named["state"])) if isinstance(state_dict, PartialState) else named


def key_by_index(state_dict: Mapping[str, Any], groups: Sequence[ParamGroup]) -> dict[str, Any]:
    """Key a state dict by indices instead of names; parameters and groups may be in another order.

    Args:
        state_dict: with the names that ``groups`` has.
        groups: the param groups of the optimizer.

    Raises:
        ValueError: if it has other names, or one twice, or no group of the same parameters as one of ``groups``.
    """
    names = names_of(groups)
    given = [name for group in state_dict["param_groups"] for name in group["params"]]
    if set(given) != set(names):
        extra, missing = sorted({*given} - {*names}, key=str), sorted({*names} - {*given})
        raise ValueError(
            f"loaded state dict: its names are not those that the optimizer was built with: only the state dict has "
            f"{extra[:8]}, only the optimizer {missing[:8]}"
        )
    indexed = to_indices(state_dict, names)
    saved = {frozenset(group["params"]): group for group in indexed["param_groups"]}
    ordered, first = [], 0
    for number, group in enumerate(groups):
        params = list(range(first, first + len(group["params"])))
        first += len(params)
        found = saved.get(frozenset(params))
        if found is None:
            raise ValueError(
                f"loaded state dict: no group has exactly the parameters of group {number}, which are "
                f"{list(group['param_names'])}"
            )
        ordered.append({**found, "params": params})
    return {**indexed, "param_groups": ordered}

"""Keys state by the names of parameters, the form that FSDP saves and other programs read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from zeroshard_core import to_indices, to_names

from zeroshard.plan.groups import ParamGroup, pack_groups
from zeroshard.state.listing import PartialState

if TYPE_CHECKING:
    from zeroshard.optimizer import ZeroRedundancyOptimizer

Keys = Literal["indices", "names"]


def check_keys(keys: Keys) -> Keys:
    """Return ``keys``; raise a ValueError if it is not one of :data:`Keys`."""
    if keys not in get_args(Keys):
        raise ValueError(f"`keys` must be one of {get_args(Keys)}, but got {keys!r}")
    return keys


def _names_of(groups: Sequence[ParamGroup]) -> list[str]:
    for number, group in enumerate(groups):
        if "param_names" not in group:
            raise ValueError(
                f"keys='names': the parameters of group {number} have no names; build the optimizer from "
                f"model.named_parameters()"
            )
    return [str(name) for group in groups for name in group["param_names"]]


def key_by_name(state_dict: Mapping[str, Any], groups: Sequence[ParamGroup]) -> dict[str, Any]:
    """Key a state dict by names instead of indices. The result is a :class:`PartialState` if ``state_dict`` is one."""
    named = to_names(state_dict, _names_of(groups))
    return PartialState(named, state=PartialState(named["state"])) if isinstance(state_dict, PartialState) else named


def key_by_index(state_dict: Mapping[str, Any], groups: Sequence[ParamGroup]) -> dict[str, Any]:
    """Key a state dict by indices instead of names. Parameters and groups may be in any order."""
    names = _names_of(groups)
    given = [name for group in state_dict["param_groups"] for name in group["params"]]
    if set(given) != set(names):
        extra, missing = sorted({*given} - {*names}, key=str), sorted({*names} - {*given})
        raise ValueError(
            f"loaded state dict: its names differ from those that the optimizer was built with: only the state dict "
            f"has {extra[:8]}, and only the optimizer has {missing[:8]}"
        )
    indexed = to_indices(state_dict, names)
    saved = {frozenset(group["params"]): group for group in indexed["param_groups"]}
    ordered = []
    for number, group in enumerate(pack_groups(groups)):
        found = saved.get(frozenset(group["params"]))
        if found is None:
            raise ValueError(
                f"loaded state dict: no group has exactly the parameters of group {number}, which are "
                f"{list(group['param_names'])}"
            )
        ordered.append({**found, "params": group["params"]})
    return {**indexed, "param_groups": ordered}


def full_optimizer_state_dict(
    model: torch.nn.Module, optimizer: ZeroRedundancyOptimizer, *, to: int = 0
) -> dict[str, Any]:
    """Return what ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`` returns without sharding.

    Collective. If there is no state yet, this makes it, as torch's function does; see
    :meth:`ZeroRedundancyOptimizer.init_state`. The state stays consolidated until the next step, as after
    :meth:`ZeroRedundancyOptimizer.consolidate_state_dict`.

    Args:
        model: the optimizer's model. Prefixes of DistributedDataParallel and torch.compile are removed from names.
        optimizer: the optimizer whose state to gather.
        to: the group rank that receives it.

    Returns:
        On rank ``to``, ``{"state": {name: entries}, "param_groups": [...]}`` with tensors on the CPU, which
        ``set_optimizer_state_dict`` with ``full_state_dict=True`` loads; an empty dict on other ranks.

    Raises:
        Exception: the error of ``consolidate_state_dict()``, on every rank; or the error of torch's function, if the
            model does not have the optimizer's parameters.
    """
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    optimizer.init_state()
    optimizer.consolidate_state_dict(to=to)
    found: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
    # Without sharding, torch does not list parameters that are frozen or were never stepped.
    found["state"] = {name: entries for name, entries in found["state"].items() if entries}
    return found if optimizer.rank == to else {}

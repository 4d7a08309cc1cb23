"""Loading: a whole state dict is checked on every rank, then each rank takes what it owns, or all stay as before."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from zeroshard_comm import agreed, explain_configs
from zeroshard_core import Plan, whole_to_local

from zeroshard.local_optimizer import NOT_SYNCED, LocalOptimizer, sync_groups
from zeroshard.param_groups import ParamGroup, in_words, parameters_of
from zeroshard.sharding import Sharding
from zeroshard.state.schema import StateSchema
from zeroshard.state.serialization import copy_value


def load(
    sharding: Sharding, groups: Sequence[ParamGroup], schema: StateSchema, read: Callable[[], Mapping[str, Any]]
) -> None:
    """Load a whole state dict on all ranks, or on none. Collective.

    Args:
        sharding: whose local optimizer takes the state of what it owns; follows the model first.
        groups: the public param groups, which take the hyperparameters.
        schema: what state the optimizer class keeps.
        read: returns the state dict, from the plain optimizer, torch's ZeroRedundancyOptimizer, or this one at any
            world size. It is not modified, and its tensors are not kept.

    Raises:
        TypeError: if it is no state dict of an optimizer.
        ValueError: for another number of groups or parameters, or entries that are missing, extra or misshapen.
        DisagreementError: if the ranks' state dicts differ in structure or hyperparameters, or their models differ.
        Exception: whatever else a rank meets. All raise on every rank, and leave local optimizer and groups as before.
    """
    control, layout = sharding.control, sharding.layout
    state_dict: Mapping[str, Any] = {}
    by_tensor, mine = dict[int, Any](), dict[Any, Any]()
    with agreed(control, "load_state_dict()", _explain) as declared:
        state_dict = read()
        layout = sharding.update_layout(groups)
        by_tensor, others = _checked(state_dict, groups, layout.plan, schema)
        declared.set(layout.declaration)
        declared.digest ^= _digest(state_dict)
        # Tensors stay where they were, but nothing is shared with the state dict.
        mine = copy_value({**whole_to_local(layout.plan, control.ranks.rank, by_tensor), **others})
    inner = sharding.local.optim
    before = (inner.state, inner.param_groups)
    try:
        with agreed(control, "the end of load_state_dict()"):
            if layout is not sharding.layout:
                sharding.adopt(layout, groups)
            _install(sharding.local, mine, state_dict["param_groups"])
    except BaseException:
        inner.state, inner.param_groups = before
        raise
    sync_groups(inner.param_groups, groups)
    # Frozen tensors that now have state stay with the rank that holds it when they are unfrozen.
    sharding.pin(frozenset(by_tensor), groups)


def _explain(here: str, there: str, rank: int, other: int) -> str:
    return explain_configs(here, there, rank, other) or "they were handed different checkpoints"


def _checked(
    state_dict: Mapping[str, Any], groups: Sequence[ParamGroup], plan: Plan, schema: StateSchema
) -> tuple[dict[int, Mapping[str, Any]], dict[Any, Any]]:
    """Check a state dict against the optimizer. Nothing is modified, and nothing is copied.

    Returns:
        The entries of tensors that have state, by index; and state that belongs to no tensor, under its own keys.
    """
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        raise TypeError(
            "load_state_dict() expects a dict with 'state' and 'param_groups', as an optimizer's state_dict(); "
            f"got {sorted(map(str, state_dict)) if isinstance(state_dict, Mapping) else torch.typename(state_dict)}"
        )
    state, saved_groups = state_dict["state"], state_dict["param_groups"]
    _check_type(state, dict, "'state'")
    _check_type(saved_groups, list, "'param_groups'")
    if len(saved_groups) != len(groups):
        raise ValueError(
            f"loaded state dict has a different number of parameter groups: {len(saved_groups)}, but this optimizer "
            f"has {len(groups)}"
        )
    index_of: dict[Any, int] = {}
    for number, (saved, group) in enumerate(zip(saved_groups, groups, strict=True)):
        _check_type(saved, dict, f"group {number}")
        if "params" not in saved:
            raise ValueError(f"loaded state dict: group {number} lacks 'params', the keys of its parameters")
        _check_type(saved["params"], list, f"'params' of group {number}")
        if len(saved["params"]) != len(group["params"]):
            raise ValueError(
                f"loaded state dict contains a parameter group that doesn't match the size of optimizer's group: "
                f"group {number} has {len(saved['params'])} parameters there and {len(group['params'])} here"
            )
        for key in saved["params"]:
            if key in index_of:
                raise ValueError(f"loaded state dict names parameter {key!r} twice in its param_groups")
            index_of[key] = len(index_of)
    by_tensor = {index_of[key]: entries for key, entries in state.items() if key in index_of}
    others = {key: value for key, value in state.items() if key not in index_of}
    _check_other_keys(others, (int, *{type(key) for key in index_of}))
    stateful_groups = {plan.tensors[index].group for index, entries in by_tensor.items() if entries}
    for index, (spec, param) in enumerate(zip(plan.tensors, parameters_of(groups), strict=True)):
        where = f"loaded state dict, parameter {index} {spec.name!r}"
        if index in by_tensor:
            _check_entries(by_tensor[index], param, where)
            if by_tensor[index]:
                schema.check(by_tensor[index], spec, param.layout, saved_groups[spec.group], where)
        elif spec.trainable and spec.group in stateful_groups:
            raise ValueError(
                f"{where}: missing entry, there is no state for it, though other parameters of its group have state. "
                f"If it was never stepped before the checkpoint was made, say so: state_dict['state'][{index}] = {{}}"
            )
    return {index: entries for index, entries in by_tensor.items() if entries}, others


def _check_type(value: object, expected: type, what: str) -> None:
    if not isinstance(value, Mapping if expected is dict else (list, tuple)):
        raise TypeError(f"loaded state dict: {what} must be a {expected.__name__}, but is a {type(value).__name__}")


def _check_other_keys(keys: Iterable[object], kinds_of_params: tuple[type, ...]) -> None:
    for key in keys:
        if isinstance(key, kinds_of_params):
            raise ValueError(
                f"loaded state dict has an extra entry: state for parameter {key!r}, which no param_group names"
            )
    as_text = [key for key in keys if isinstance(key, str) and key.isdecimal()]
    if as_text:
        raise ValueError(
            f"loaded state dict: the keys of 'state' are text where param_groups has numbers: "
            f"{', '.join(map(repr, as_text[:8]))}, as JSON makes of integers. Turn them back with int()"
        )


def _check_entries(entries: object, param: torch.Tensor, where: str) -> None:
    if entries is None:
        raise ValueError(
            f"{where}: its state is None. torch's ZeroRedundancyOptimizer empties the dict that it loads; read the "
            f"checkpoint from its file again"
        )
    if not isinstance(entries, Mapping):
        raise ValueError(f"{where}: state is a {type(entries).__name__}, not a dict")
    for key, value in entries.items():
        # The rank that owns the parameter would be the only one to notice.
        if isinstance(value, torch.Tensor) and value.is_meta and not param.is_meta:
            raise ValueError(f"{where}: entry {key!r} is on the meta device: it has no values")


def _digest(state_dict: Mapping[str, Any]) -> int:
    """A 63-bit number of structure and hyperparameters, by which ranks notice that their state dicts differ."""
    state = state_dict["state"]
    dtypes = {
        key: {name: value.dtype for name, value in entries.items() if isinstance(value, torch.Tensor)}
        for key, entries in state.items()
        if isinstance(entries, Mapping)
    }
    text = in_words([state, state_dict["param_groups"], dtypes])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def _install(local: LocalOptimizer, state: Mapping[Any, Any], saved_groups: Sequence[Mapping[str, Any]]) -> None:
    """Hand state to the inner optimizer through its own ``load_state_dict``, which casts and places it as it wants."""
    inner = local.optim
    position = {tensor: number for number, tensor in enumerate(parameters_of(inner.param_groups))}
    packed = [
        {
            **{key: value for key, value in saved.items() if key not in NOT_SYNCED},
            "params": [position[tensor] for tensor in group["params"]],
        }
        for saved, group in zip(saved_groups, inner.param_groups, strict=True)
    ]
    by_position = {
        position[local.shards[key].tensor] if isinstance(key, int) else key: entries for key, entries in state.items()
    }
    inner.load_state_dict({"state": by_position, "param_groups": packed})

"""Checks the argument of ``load_state_dict()`` against the state that the class keeps, and cuts it into shards."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import optim
from zeroshard_core import Plan, Shard, StateEntry, TensorSpec, cut_state, probe

from zeroshard.local.extra_state import ADVICE
from zeroshard.local.optimizer import LocalOptimizer
from zeroshard.plan.eligibility import class_of
from zeroshard.plan.group_classes import OPTIONS, GroupClass, assign, check_hyperparameters
from zeroshard.plan.groups import hyperparameters_of, parameters_of
from zeroshard.plan.hyperparameters import to_text
from zeroshard.state.metadata import StateMetadata
from zeroshard.state.placeholder import StatePlaceholder, has_placeholder, inner_tensors, leaves, map_leaves

_STATEFUL: dict[str, Any] = {"momentum": 0.9, "amsgrad": True, "centered": True}
"""Hyperparameters that can turn off state of torch's optimizers, with values for which an optimizer keeps it."""
_MAY_BE_SPARSE = frozenset({"momentum_buffer"})
"""Entries with the layout of the gradient, which may be sparse."""


class StateSchema:
    """Compares the state entries of a tensor with those that an optimizer class keeps for it.

    It checks elementwise classes and the classes of torch.optim, except classes that :func:`probe` cannot step.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], Mapping[str, StateEntry] | None] = {}

    def check(
        self, entries: Mapping[str, Any], spec: TensorSpec, group: Mapping[str, Any], chosen: GroupClass, where: str
    ) -> None:
        """Raise a ValueError if an entry of a tensor is missing, extra or misshapen; the error names it."""
        required = self._entries(group, chosen, spec)
        if required is None:
            return
        # Some state outlives the setting that it belongs to: SGD keeps its buffers when momentum becomes 0.
        switched_on = {key: value for key, value in _STATEFUL.items() if key in group}
        allowed = {**(self._entries({**group, **switched_on}, chosen, spec) or {}), **required}
        present = {key: value for key, value in entries.items() if value is not None or key in required}
        missing, extra = sorted(required.keys() - present.keys()), sorted(present.keys() - allowed.keys(), key=str)
        if missing:
            raise ValueError(f"{where}: missing entry {missing[0]!r}; expected the entries {sorted(required)}")
        if extra:
            advice = f"; to load it, {ADVICE[extra[0]]}" if extra[0] in ADVICE else ""
            raise ValueError(f"{where}: extra entry {extra[0]!r}; expected the entries {sorted(required)}{advice}")
        for key, value in present.items():
            problem = _misfit(key, value, allowed[key].shape, spec)
            if problem:
                raise ValueError(f"{where}: entry {key!r} {problem}")

    def _entries(
        self, group: Mapping[str, Any], chosen: GroupClass, spec: TensorSpec
    ) -> Mapping[str, StateEntry] | None:
        """Return the entries for a tensor; None if they are unknown."""
        if not (chosen.may_be_cut or class_of(chosen.factory) in vars(optim).values()):
            return None
        settings = hyperparameters_of(group)
        key = (chosen, to_text(settings), spec.shape, spec.dtype)
        if key not in self._known:

            def build(params: Any, **group: Any) -> optim.Optimizer:  # noqa: ANN401 - of any class
                return chosen.build([{**group, "params": params}])

            try:
                self._known[key] = probe(build, settings, [spec])[spec.shape, spec.dtype]
            except Exception:  # noqa: BLE001 - an unsupported class may raise any exception
                self._known[key] = None
        return self._known[key]


def _misfit(key: str, value: object, shape: tuple[int, ...] | None, spec: TensorSpec) -> str:
    """Return why an entry does not have the shape that the class keeps, or cannot be cut; "" if it fits."""
    if shape is None:
        return ""
    if not isinstance(value, torch.Tensor):
        fits = not shape and isinstance(value, (int, float))
        return "" if fits else f"is a {type(value).__name__}, expected {'a tensor' if shape else 'a single number'}"
    if not shape:
        return "" if value.numel() == 1 else f"has shape {tuple(value.shape)}, expected a single number"
    if value.shape != shape:
        return f"has shape {tuple(value.shape)}, expected {shape}"
    if shape == spec.shape and value.layout != torch.strided and key not in _MAY_BE_SPARSE:
        return f"is a {value.layout} tensor, expected torch.strided"
    return ""


@dataclass(frozen=True)
class LoadedState:
    """A state dict that fits the optimizer, or the part of it that one rank loads."""

    state: Mapping[Any, Any]
    """The entries of tensors by tensor index, and state that belongs to no tensor under its own keys."""
    groups: Sequence[Mapping[str, Any]]
    """The hyperparameters of each param group."""

    @property
    def others(self) -> dict[Any, Any]:
        """The state that belongs to no tensor."""
        return {key: value for key, value in self.state.items() if not isinstance(key, int)}

    @property
    def is_whole(self) -> bool:
        """True if this rank has all of its values."""
        return not has_placeholder(self.state)

    def checksums(self, plan: Plan) -> list[int]:
        """Return checksums of each tensor's state, of other state, and of the groups; 0 where values are missing."""
        of_tensors = [_checksum(self.state.get(index, {})) for index in range(len(plan.tensors))]
        return [*of_tensors, _checksum(self.others) if self.is_whole else 0, _checksum(self.groups)]

    def part_of(self, rank: int, plan: Plan) -> LoadedState:
        """Return the part for ``rank``; raise a ValueError if an entry cannot be cut, or its values are missing."""
        part = self.others
        for shard in plan.of_rank(rank):
            if shard.tensor in self.state:
                part[shard.tensor] = _owned(self.state[shard.tensor], plan.tensors[shard.tensor], shard)
        return LoadedState(part, self.groups)


def _lacks_values(value: object) -> bool:
    """Return True if an entry, or a container of entries, has a placeholder without a shard."""
    return any(isinstance(leaf, StatePlaceholder) and leaf.shard is None for leaf in leaves(value))


def _checksum(value: object) -> int:
    """Return a nonzero checksum of an entry, or of a container of entries; 0 if any of its values are missing."""
    return 0 if _lacks_values(value) else zlib.crc32(to_text(map_leaves(value, _summary)).encode()) or 1


def _summary(value: object) -> object:
    """Return what ranks compare: for a tensor its dtype, its shape and, if it is plain, its first element."""
    inner = inner_tensors(value)
    if inner:
        return map_leaves(inner, _summary)
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    is_plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
    element = value[(0,) * value.dim()].item() if is_plain and value.numel() > 0 else None
    return str(value.dtype), tuple(value.shape), element


def _owned(entries: Mapping[Any, Any], spec: TensorSpec, shard: Shard) -> dict[Any, Any]:
    """Return the entries of a shard: cut from whole entries, or the parts that placeholders hold."""
    if not has_placeholder(entries):
        return cut_state(entries, spec, shard)
    for key, value in entries.items():
        if has_placeholder(value) and (not isinstance(value, StatePlaceholder) or value.shard != shard):
            raise ValueError(
                f"loaded state dict: entry {key!r} of {spec.name!r} lacks the values that rank {shard.rank} owns. A "
                f"state_dict() that is not consolidated can be loaded only on the rank that returned it, with the same "
                f"plan. Pass a consolidated state dict: on every rank, or on one rank, with from_rank"
            )
    return {key: value.part if isinstance(value, StatePlaceholder) else value for key, value in entries.items()}


def check_state_dict(
    state_dict: Mapping[str, Any], plan: Plan, local: LocalOptimizer, metadata: StateMetadata, schema: StateSchema
) -> LoadedState:
    """Check a state dict, whole or with placeholders, against the optimizer, without modifying or copying it.

    Raises a TypeError or a ValueError that names the group, the parameter and the entry that do not fit.
    """
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        raise TypeError(
            "load_state_dict() expects a dict with 'state' and 'param_groups', as an optimizer's state_dict(); "
            f"got {sorted(map(str, state_dict)) if isinstance(state_dict, Mapping) else torch.typename(state_dict)}"
        )
    state, saved_groups = state_dict["state"], state_dict["param_groups"]
    _check_type(state, dict, "'state'")
    index_of = _indices_of_keys(saved_groups, local)
    by_tensor = {index_of[key]: entries for key, entries in state.items() if key in index_of}
    others = {key: value for key, value in state.items() if key not in index_of}
    _check_others(others, index_of, local)
    is_partial = has_placeholder(state)
    stateful_groups = {plan.tensors[index].group for index, entries in by_tensor.items() if entries}
    for (key, index), spec, param in zip(index_of.items(), plan.tensors, parameters_of(local.groups), strict=True):
        by_name = isinstance(key, str)
        where = f"loaded state dict, parameter {index} {key if by_name else spec.name!r}"
        is_unstepped = bool(metadata.described) and index not in metadata.described
        if index in by_tensor:
            _check_entries(by_tensor[index], param, where)
            if by_tensor[index]:
                entries = local.extra.checked(by_tensor[index], spec.shape, where)
                schema.check(entries, spec, saved_groups[spec.group], local.classes[spec.group], where)
        elif spec.trainable and spec.group in stateful_groups and not (is_partial or by_name or is_unstepped):
            # State dicts by name come from torch.distributed.checkpoint, which refuses this unless `strict` is False.
            raise ValueError(
                f"{where}: missing entry: it has no state, but other parameters of its group do. If it had never been "
                f"stepped when the checkpoint was saved, set state_dict['state'][{index}] = {{}}"
            )
    stateful = {index: entries for index, entries in by_tensor.items() if entries}
    return LoadedState({**stateful, **others}, [*map(hyperparameters_of, saved_groups)])


def _check_type(value: object, expected: type, what: str) -> None:
    if not isinstance(value, Mapping if expected is dict else (list, tuple)):
        raise TypeError(f"loaded state dict: {what} must be a {expected.__name__}, but is a {type(value).__name__}")


def _indices_of_keys(saved_groups: Sequence[Mapping[str, Any]], local: LocalOptimizer) -> dict[Any, int]:
    """Return the tensor index of each key of a parameter; raise if a group does not fit the optimizer."""
    _check_type(saved_groups, list, "'param_groups'")
    groups, index_of = local.groups, dict[Any, int]()
    if len(saved_groups) != len(groups):
        raise ValueError(
            f"loaded state dict has a different number of parameter groups: {len(saved_groups)}, not {len(groups)}"
        )
    for number, (saved, group, own) in enumerate(zip(saved_groups, groups, assign(local.classes), strict=True)):
        _check_type(saved, dict, f"group {number}")
        if "params" not in saved:
            raise ValueError(f"loaded state dict: group {number} lacks 'params', the keys of its parameters")
        _check_type(saved["params"], list, f"'params' of group {number}")
        for key in saved.keys() & OPTIONS[:2]:
            raise ValueError(f"loaded state dict: group {number} has {key!r}, which no state dict has: remove it")
        if len(saved["params"]) != len(group["params"]):
            raise ValueError(
                f"loaded state dict contains a parameter group that doesn't match the size of optimizer's group: "
                f"group {number} has {len(saved['params'])} parameters there and {len(group['params'])} here"
            )
        for key in saved["params"]:
            if key in index_of:
                raise ValueError(f"loaded state dict names parameter {key!r} twice in its param_groups")
            index_of[key] = len(index_of)
        # A key that the group already has belongs to it, even if a class that was added later has the same key.
        new = {key: value for key, value in saved.items() if key not in group}
        check_hyperparameters(f"loaded state dict: group {number}", new, local.members, local.members[own])
    return index_of


def _check_others(others: Mapping[Any, Any], params: Collection[Any], local: LocalOptimizer) -> None:
    """Check the keys of state that belongs to no parameter."""
    kinds_of_params = (int, *{type(key) for key in params})
    for key in others:
        if isinstance(key, kinds_of_params):
            raise ValueError(
                f"loaded state dict has an extra entry: state for parameter {key!r}, which no param_group names"
            )
    as_text = [repr(key) for key in others if isinstance(key, str) and key.isdecimal()]
    if as_text:
        raise ValueError(
            f"loaded state dict: the keys of 'state' are strings, but param_groups has integers: "
            f"{', '.join(as_text[:8])}. JSON turns integer keys into strings: convert them back with int()"
        )
    if others and len(local.members) > 1:
        raise ValueError(
            f"loaded state dict has state under {min(map(str, others))!r}, which belongs to no parameter: this is not "
            f"supported with several optimizer classes"
        )


def _check_entries(entries: object, param: torch.Tensor, where: str) -> None:
    if entries is None:
        raise ValueError(
            f"{where}: its state is None: torch's ZeroRedundancyOptimizer clears the dict that it loads; read it again"
        )
    if not isinstance(entries, Mapping):
        raise ValueError(f"{where}: state is a {type(entries).__name__}, not a dict")
    for key, value in entries.items():
        # Without this check, only the rank that owns the parameter would raise.
        if isinstance(value, torch.Tensor) and value.is_meta and not param.is_meta:
            raise ValueError(f"{where}: entry {key!r} is on the meta device: it has no values")

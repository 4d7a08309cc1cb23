"""Checks the argument of ``load_state_dict()`` against what the optimizer class keeps, and cuts it to shards."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
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
from zeroshard.state.placeholder import StatePlaceholder, has_placeholder, inner_tensors, leaves

_STATEFUL: dict[str, Any] = {"momentum": 0.9, "amsgrad": True, "centered": True}
"""Hyperparameters of torch's optimizers that may be off, with values that make an optimizer keep all its state."""
_MAY_BE_SPARSE = frozenset({"momentum_buffer"})
"""Entries that have the layout of the gradient."""


class StateSchema:
    """Knows the state that an optimizer class keeps, by its hyperparameters and the shape and dtype of a tensor.

    It checks elementwise classes and the classes of torch.optim. It checks no class that cannot be probed.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[object, str, tuple[int, ...], torch.dtype], Mapping[str, StateEntry] | None] = {}

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
        missing = sorted(required.keys() - entries.keys())
        extra = sorted(str(key) for key, value in entries.items() if key not in allowed and value is not None)
        if missing or extra:
            what = f"missing entry {missing[0]!r}" if missing else f"extra entry {extra[0]!r}"
            advice = f"; to take it, {ADVICE[extra[0]]}" if extra and extra[0] in ADVICE and not missing else ""
            raise ValueError(f"{where}: {what}; expected the entries {sorted(required)}{advice}")
        for key, entry in allowed.items():
            value: Any = entries.get(key)
            if entry.shape is None or (value is None and key not in required):
                continue
            is_tensor = isinstance(value, torch.Tensor)
            found = f"has shape {tuple(value.shape)}" if is_tensor else f"is a {type(value).__name__}"
            if not entry.shape:
                fits = value.numel() == 1 if is_tensor else isinstance(value, (int, float))
                wanted = "a single number"
            else:
                fits, wanted = is_tensor and value.shape == entry.shape, f"{entry.shape}" if is_tensor else "a tensor"
            is_known = key in _MAY_BE_SPARSE or isinstance(value, StatePlaceholder)
            if fits and spec.shape and entry.shape == spec.shape and value.layout != torch.strided and not is_known:
                fits, found, wanted = False, f"is a {value.layout} tensor", "torch.strided"
            if not fits:
                raise ValueError(f"{where}: entry {key!r} {found}, expected {wanted}")

    def _entries(
        self, group: Mapping[str, Any], chosen: GroupClass, spec: TensorSpec
    ) -> Mapping[str, StateEntry] | None:
        """Return the entries for a tensor; None if they are unknown."""
        if not (chosen.may_be_cut or class_of(chosen.factory) in vars(optim).values()):
            return None
        settings = hyperparameters_of(group)
        key = (chosen, repr(sorted((name, repr(value)) for name, value in settings.items())), spec.shape, spec.dtype)
        if key not in self._known:

            def build(params: Any, **group: Any) -> optim.Optimizer:  # noqa: ANN401 - of any class
                return chosen.build([{**group, "params": params}])

            try:
                self._known[key] = probe(build, settings, [spec])[spec.shape, spec.dtype]
            except Exception:  # noqa: BLE001 - an unsupported class may raise any exception
                self._known[key] = None
        return self._known[key]


@dataclass(frozen=True)
class ShardState:
    """The part of a state dict that one rank loads."""

    state: dict[Any, Any]
    """The state of its shards by tensor index, and state that belongs to no tensor under its own keys."""
    groups: list[dict[str, Any]]


@dataclass(frozen=True)
class ValidatedStateDict:
    """A state dict that fits the optimizer. The check neither modifies nor copies it."""

    by_tensor: Mapping[int, Mapping[Any, Any]]
    """The entries of tensors that have state."""
    others: Mapping[Any, Any]
    """State that belongs to no tensor, under its own keys."""
    groups: Sequence[Mapping[str, Any]]
    structure: str
    """A text of everything except the values of the state. Ranks compare it."""

    @property
    def is_whole(self) -> bool:
        """True if it has all values."""
        return not has_placeholder(self.by_tensor)

    def lacks_owned(self, rank: int, plan: Plan) -> bool:
        """Return True if it lacks values that a rank owns, as it does while another has the consolidated state."""
        return any(_lacks(self.by_tensor.get(shard.tensor, {})) for shard in plan.of_rank(rank))

    def checksums(self, plan: Plan) -> list[int]:
        """Return a checksum of each tensor's state, and one of all other state; 0 if values of it are missing."""
        # They cover numbers, and one element of each entry that is here whole: two checkpoints differ in these.
        counted = [self.by_tensor.get(index, {}) for index in range(len(plan.tensors))]
        others = self.others if self.is_whole else {}
        return [
            0 if _lacks(entries) else zlib.crc32(f"{to_text(entries)} {_samples(entries)}".encode()) or 1
            for entries in (*counted, others)
        ]

    def part_of(self, rank: int, plan: Plan) -> ShardState:
        """Return what a rank loads; raise a ValueError if an entry cannot be cut, or its values are missing."""
        owned = {
            shard.tensor: _owned(self.by_tensor[shard.tensor], plan, shard)
            for shard in plan.of_rank(rank)
            if shard.tensor in self.by_tensor
        }
        return ShardState({**owned, **self.others}, [*map(hyperparameters_of, self.groups)])


def _lacks(value: object) -> bool:
    """Return True if an entry, or a container of entries, has a placeholder without a shard."""
    return any(isinstance(leaf, StatePlaceholder) and leaf.shard is None for leaf in leaves(value))


def _samples(entries: Mapping[Any, Any]) -> list[Any]:
    """Return the first element of each strided tensor that has one."""
    return [
        value[(0,) * value.dim()].item()
        for value in entries.values()
        if type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided and value.numel() > 0
    ]


def _owned(entries: Mapping[Any, Any], plan: Plan, shard: Shard) -> dict[Any, Any]:
    spec = plan.tensors[shard.tensor]
    if not has_placeholder(entries):
        return cut_state(entries, spec, shard)
    found = {}
    for key, value in entries.items():
        if has_placeholder(value) and (not isinstance(value, StatePlaceholder) or value.shard != shard):
            raise ValueError(
                f"loaded state dict: the values of entry {key!r} of {spec.name!r}, which rank {shard.rank} owns, are "
                f"not there. What state_dict() lists on a rank only fits the same rank of an optimizer with the same "
                f"plan, and what it lists while another rank has the consolidated state, only until the next step. "
                f"Hand in a consolidated state dict: on every rank, or on one, with from_rank"
            )
        found[key] = value.part if isinstance(value, StatePlaceholder) else value
    return found


def check_state_dict(
    state_dict: Mapping[str, Any], plan: Plan, local: LocalOptimizer, metadata: StateMetadata, schema: StateSchema
) -> ValidatedStateDict:
    """Check a state dict, with all values or with placeholders, against the optimizer.

    Args:
        state_dict: the argument of ``load_state_dict()``.
        plan: the plan that the load uses.
        local: has the public param groups, their classes, and the names of the extra entries.
        metadata: knows which tensors have state.
        schema: knows which entries the classes keep.

    Raises:
        TypeError, ValueError: if the state dict does not fit. The error names the group, the parameter and the entry.
    """
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        raise TypeError(
            "load_state_dict() expects a dict with 'state' and 'param_groups', as an optimizer's state_dict(); "
            f"got {sorted(map(str, state_dict)) if isinstance(state_dict, Mapping) else torch.typename(state_dict)}"
        )
    state, saved_groups, groups = state_dict["state"], state_dict["param_groups"], local.groups
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
        for key in saved.keys() & OPTIONS[:2]:
            raise ValueError(
                f"loaded state dict: group {number} has {key!r}, which no state dict holds: take it out; classes "
                f"are named when the optimizer is built"
            )
        if len(saved["params"]) != len(group["params"]):
            raise ValueError(
                f"loaded state dict contains a parameter group that doesn't match the size of optimizer's group: "
                f"group {number} has {len(saved['params'])} parameters there and {len(group['params'])} here"
            )
        for key in saved["params"]:
            if key in index_of:
                raise ValueError(f"loaded state dict names parameter {key!r} twice in its param_groups")
            index_of[key] = len(index_of)
    members = local.members
    for number, own in enumerate(assign(local.classes)):
        # Keys that this group has are its own, even if a class that was added later has the same key.
        new = {key: value for key, value in saved_groups[number].items() if key not in groups[number]}
        check_hyperparameters(f"loaded state dict: group {number}", new, members, members[own])
    by_tensor = {index_of[key]: entries for key, entries in state.items() if key in index_of}
    others = {key: value for key, value in state.items() if key not in index_of}
    _check_other_keys(others, (int, *{type(key) for key in index_of}))
    if others and len(members) > 1:
        raise ValueError(
            f"loaded state dict has state under {min(map(str, others))!r}, which belongs to no parameter: that is not "
            f"supported with several optimizer classes"
        )
    is_partial = has_placeholder(state)
    stateful_groups = {plan.tensors[index].group for index, entries in by_tensor.items() if entries}
    for (key, index), spec, param in zip(index_of.items(), plan.tensors, parameters_of(groups), strict=True):
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
                f"{where}: missing entry, there is no state for it, though other parameters of its group have state. "
                f"If it was never stepped before the checkpoint was made, say so: state_dict['state'][{index}] = {{}}"
            )
    stateful = {index: entries for index, entries in by_tensor.items() if entries}
    kinds = sorted((str(index), _structure(entries)) for index, entries in (stateful | others).items())
    return ValidatedStateDict(stateful, others, list(saved_groups), f"{kinds} {to_text(saved_groups)}")


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
            f"{', '.join(map(repr, as_text[:8]))}, which JSON has made of integers. Convert them back with int()"
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
        # Without this check, only the rank that owns the parameter would raise.
        if isinstance(value, torch.Tensor) and value.is_meta and not param.is_meta:
            raise ValueError(f"{where}: entry {key!r} is on the meta device: it has no values")


def _structure(value: object) -> str:
    """Describe names, shapes and dtypes; values and their placeholders give the same text."""
    value = inner_tensors(value) or value
    if isinstance(value, Mapping):
        return str(sorted((str(key), _structure(item)) for key, item in value.items()))
    if isinstance(value, (list, tuple)):
        return str([_structure(item) for item in value])
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        return f"{value.dtype} {tuple(value.shape)}"
    return "None" if value is None else "a value"

"""Loading: a whole checkpoint is checked on every rank, then each rank takes what it owns, or nobody takes anything."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import optim
from zeroshard_comm import explain_configs
from zeroshard_core import Plan, StateMapError, cut_state

from zeroshard.elementwise import OptimizerFactory, class_of, is_elementwise
from zeroshard.local import NOT_SYNCED, LocalOptimizer
from zeroshard.param_groups import ParamGroup, in_words, parameters_of
from zeroshard.statevalues import copy_value

StateDict = dict[str, Any]

_Form = str | tuple[int | None, ...]
"""What a state entry is: one of the words below, or per axis the parameter's axis of its size, None for size 1."""
_NUMBER, _PER_ELEMENT, _ANYTHING = "number", "per element", "anything"
_STATEFUL: dict[str, Any] = {"momentum": 0.9, "amsgrad": True, "centered": True}
"""Hyperparameters of torch's optimizers that may be off, at values with which the optimizer keeps all its state."""
_MOST_AXES = 6
"""A probe with more axes, of 2, 3, 4 ... elements each, would no longer be small."""


def checked(
    state_dict: Mapping[str, Any], groups: Sequence[ParamGroup], plan: Plan, expectations: Expectations
) -> dict[Any, Any]:
    """Check a checkpoint against the optimizer and return its state by tensor index.

    Nothing is modified, and nothing is copied.

    Args:
        state_dict: from the plain optimizer, torch's ZeroRedundancyOptimizer, or this one at any world size.
        groups: the public param groups.
        plan: describes the parameters.
        expectations: what state the optimizer class keeps.

    Returns:
        State entries by tensor index; state that belongs to no tensor under its own key.

    Raises:
        TypeError: if it is no state_dict.
        ValueError: for another number of groups or parameters, or entries that are missing, extra or of a wrong shape.
    """
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        raise TypeError(
            "load_state_dict() expects a dict with 'state' and 'param_groups', as an optimizer's state_dict(); "
            f"got {sorted(map(str, state_dict)) if isinstance(state_dict, Mapping) else torch.typename(state_dict)}"
        )
    saved_groups = state_dict["param_groups"]
    _check_containers(state_dict["state"], saved_groups)
    if len(saved_groups) != len(groups):
        raise ValueError(
            f"loaded state dict has a different number of parameter groups: {len(saved_groups)}, but this optimizer "
            f"has {len(groups)}"
        )
    index_of: dict[Any, int] = {}
    for number, (saved, group) in enumerate(zip(saved_groups, groups, strict=True)):
        if len(saved["params"]) != len(group["params"]):
            raise ValueError(
                f"loaded state dict contains a parameter group that doesn't match the size of optimizer's group: "
                f"group {number} has {len(saved['params'])} parameters there and {len(group['params'])} here"
            )
        for key in saved["params"]:
            if key in index_of:
                raise ValueError(f"loaded state dict names parameter {key!r} twice in its param_groups")
            index_of[key] = len(index_of)
    key_types = {type(key) for key in index_of}
    by_index: dict[Any, Any] = {}
    for key, entries in state_dict["state"].items():
        if key in index_of:
            by_index[index_of[key]] = _entries(entries, key, plan.tensors[index_of[key]].name)
        elif type(key) in key_types or isinstance(key, int):
            raise ValueError(
                f"loaded state dict has an extra entry: state for parameter {key!r}, which no param_group names"
            )
        elif isinstance(key, str) and key.isdecimal():
            alike = [other for other in state_dict["state"] if isinstance(other, str) and other.isdecimal()]
            raise ValueError(
                f"loaded state dict: the keys of 'state' are text where param_groups has numbers: "
                f"{', '.join(map(repr, alike[:8]))}{', ...' if len(alike) > 8 else ''}, as JSON makes of integers. "
                f"Turn them back with int()"
            )
        else:
            by_index[key] = entries
    _check_presence(by_index, plan)
    params = parameters_of(groups)
    for index, entries in by_index.items():
        if isinstance(index, int) and entries:
            expectations.check(entries, index, saved_groups[plan.tensors[index].group], plan, params[index].layout)
            if params[index].device.type != "meta":
                _check_values(entries, index, plan.tensors[index].name)
    return by_index


class Expectations:
    """What state an optimizer class keeps per tensor, found out by stepping it on a few elements.

    Elementwise classes are probed with one vector, for their state has one form for every tensor; the other classes of
    torch.optim with a tensor of as many axes, for theirs depends on these. Of any other class nothing is expected.

    Args:
        factory: the optimizer class.
        defaults: the user's keyword arguments for it.
        elementwise: the user's word that it is elementwise.
    """

    def __init__(self, factory: OptimizerFactory, defaults: Mapping[str, Any], *, elementwise: bool) -> None:
        self._factory, self._defaults = factory, dict(defaults)
        self._elementwise = is_elementwise(factory, declared=elementwise)
        self._applies = self._elementwise or class_of(factory) in vars(optim).values()
        self._known: dict[tuple[str, int], dict[str, _Form] | None] = {}

    def check(
        self,
        entries: Mapping[str, Any],
        index: int,
        saved_group: Mapping[str, Any],
        plan: Plan,
        layout: torch.layout,
    ) -> None:
        """Check the state of one tensor.

        Args:
            entries: its state in the checkpoint.
            index: which tensor.
            saved_group: the hyperparameters of its group in the checkpoint.
            plan: describes the tensor.
            layout: layout of the parameter, which per-element entries share.

        Raises:
            ValueError: naming the tensor and the entry that is missing, extra or misshapen.
        """
        spec = plan.tensors[index]
        where = f"loaded state dict, parameter {index} {spec.name!r}"
        if not self._applies or (not self._elementwise and len(spec.shape) > _MOST_AXES):
            return
        axes = 1 if self._elementwise else max(1, len(spec.shape))
        expected = self._of(saved_group, axes)
        if expected is None:
            return
        missing = sorted(set(expected) - set(entries))
        if not missing and not set(entries) <= set(expected):
            # Some state outlives the setting that it belongs to: SGD keeps its buffers when momentum becomes 0.
            switched_on = {key: value for key, value in _STATEFUL.items() if key in saved_group}
            outlived = self._of({**saved_group, **switched_on}, axes) or {}
            expected = {**{key: form for key, form in outlived.items() if entries.get(key) is not None}, **expected}
        extra = sorted(str(key) for key, value in entries.items() if key not in expected and value is not None)
        if missing or extra:
            what = f"missing entry {missing[0]!r}" if missing else f"extra entry {extra[0]!r}"
            raise ValueError(f"{where}: {what}; expected the entries {sorted(expected)}")
        for key, form in expected.items():
            value = entries[key]
            if form == _ANYTHING:
                continue
            if not isinstance(value, torch.Tensor):
                if form != _NUMBER:
                    raise ValueError(f"{where}: entry {key!r} is a {type(value).__name__}, expected a tensor")
                if not isinstance(value, (int, float)):
                    raise ValueError(f"{where}: entry {key!r} is a {type(value).__name__}, expected a single number")
                continue
            shape = tuple(value.shape)
            if form == _NUMBER:
                if value.numel() != 1:
                    raise ValueError(f"{where}: entry {key!r} has shape {shape}, expected a single number")
                continue
            wanted = spec.shape if isinstance(form, str) else tuple(1 if a is None else spec.shape[a] for a in form)
            if shape != wanted:
                raise ValueError(f"{where}: entry {key!r} has shape {shape}, expected {wanted}")
            if form == _PER_ELEMENT and value.layout != layout:
                raise ValueError(f"{where}: entry {key!r} is a {value.layout} tensor, expected {layout}")

    def _of(self, saved_group: Mapping[str, Any], axes: int) -> dict[str, _Form] | None:
        """Per entry, its form for a tensor of that many axes; None if the class cannot be probed like this."""
        attributes = {
            key: False if key in ("foreach", "fused", "capturable", "differentiable") else value
            for key, value in saved_group.items()
            if key not in NOT_SYNCED
        }
        known_by = (repr(sorted((key, repr(value)) for key, value in attributes.items())), axes)
        if known_by not in self._known:
            self._known[known_by] = self._probe(attributes, axes)
        return self._known[known_by]

    def _probe(self, attributes: Mapping[str, Any], axes: int) -> dict[str, _Form] | None:
        # Sizes that differ and are not 1, so that an entry's axes can be told from its shape.
        probe = torch.zeros(tuple(range(2, 2 + axes)), requires_grad=True, device="cpu")
        probe.grad = torch.ones_like(probe)
        group = {key: copy_value(value) for key, value in attributes.items()}
        quiet = {k: v for k, v in self._defaults.items() if k not in ("foreach", "fused", "capturable")}
        try:
            built = self._factory([{**group, "params": [probe]}], **quiet)
            step = type(built).step
            (getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step)(built)
        except Exception:  # noqa: BLE001 - a class that cannot work on the probe may say so as it likes
            return None
        return {key: _form_of(value, probe) for key, value in built.state[probe].items()}


def digest_of(state_dict: Mapping[str, Any]) -> int:
    """A 63-bit number of structure and hyperparameters, by which ranks notice that their checkpoints differ."""
    state = [
        [str(key), sorted((str(name), _outline(value)) for name, value in entries.items())]
        for key, entries in state_dict["state"].items()
        if isinstance(entries, Mapping)
    ]
    groups = [
        sorted((str(key), _outline(value)) for key, value in group.items()) for group in state_dict["param_groups"]
    ]
    text = json.dumps([sorted(state), groups])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def local_state(by_index: Mapping[Any, Any], plan: Plan, rank: int) -> dict[Any, Any]:
    """Copy what a rank owns, cut to its shards; tensors stay where they were, and share nothing with the checkpoint.

    Args:
        by_index: state entries by tensor index; state that belongs to no tensor under its own key.
        plan: who owns what.
        rank: group rank.

    Returns:
        As ``by_index``.

    Raises:
        StateMapError: if an entry cannot be cut, naming it.
    """
    mine: dict[Any, Any] = {key: copy_value(value) for key, value in by_index.items() if not isinstance(key, int)}
    for shard in plan.of_rank(rank):
        entries = by_index.get(shard.tensor)
        if entries:
            shard_entries = cut_state(entries, plan.tensors[shard.tensor], shard)
            mine[shard.tensor] = {key: copy_value(value) for key, value in shard_entries.items()}
    return mine


def what_differs(here: str, there: str, here_rank: int, there_rank: int) -> str:
    """Say how two ranks differ at a load, given the JSON of their declarations: in these, or in their checkpoints."""
    return explain_configs(here, there, here_rank, there_rank) or "they were handed different checkpoints"


def install(local: LocalOptimizer, state: Mapping[Any, Any], saved_groups: Sequence[Mapping[str, Any]]) -> None:
    """Hand state to the inner optimizer through its own ``load_state_dict``, which casts and places it as it wants.

    Args:
        local: holds the inner optimizer.
        state: by tensor index, cut to this rank's shards; state under other keys is passed on.
        saved_groups: hyperparameters, one mapping per group.

    Raises:
        Exception: whatever the class raises; the inner optimizer is then as before, if its own method leaves it so.
    """
    inner = local.optim
    position = {
        tensor: number for number, tensor in enumerate(t for group in inner.param_groups for t in group["params"])
    }
    numbers = iter(range(len(position)))
    packed = [
        {
            **{key: copy_value(value) for key, value in saved.items() if key not in NOT_SYNCED},
            "params": [next(numbers) for _ in group["params"]],
        }
        for saved, group in zip(saved_groups, inner.param_groups, strict=True)
    ]
    inner.load_state_dict(
        {
            "state": {
                position[local.pieces[key].tensor] if isinstance(key, int) else key: entries
                for key, entries in state.items()
            },
            "param_groups": packed,
        }
    )


def _check_containers(state: object, saved_groups: object) -> None:
    if not isinstance(state, Mapping):
        raise TypeError(f"loaded state dict: 'state' must be a dict, but is a {type(state).__name__}")
    if not isinstance(saved_groups, (list, tuple)):
        raise TypeError(f"loaded state dict: 'param_groups' must be a list, but is a {type(saved_groups).__name__}")
    for number, saved in enumerate(saved_groups):
        if not isinstance(saved, Mapping):
            raise TypeError(f"loaded state dict: group {number} must be a dict, but is a {type(saved).__name__}")
        if "params" not in saved:
            raise ValueError(f"loaded state dict: group {number} lacks 'params', the keys of its parameters")
        if not isinstance(saved["params"], (list, tuple)) or not all(isinstance(k, Hashable) for k in saved["params"]):
            raise TypeError(f"loaded state dict: 'params' of group {number} must be a list of integers or names")


def _entries(entries: object, key: object, name: str) -> Mapping[str, Any]:
    if entries is None:
        raise ValueError(
            f"loaded state dict, parameter {key!r} {name!r}: its state is None. torch's ZeroRedundancyOptimizer "
            f"empties the dict that it loads; read the checkpoint from its file again"
        )
    if not isinstance(entries, Mapping):
        raise ValueError(
            f"loaded state dict, parameter {key!r} {name!r}: state is a {type(entries).__name__}, not a dict"
        )
    return entries


def _form_of(value: object, probe: torch.Tensor) -> _Form:
    if isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        return _NUMBER
    if not isinstance(value, torch.Tensor):
        return _ANYTHING
    if value.shape == probe.shape:
        return _PER_ELEMENT
    sizes = list(probe.shape)
    if not all(size == 1 or size in sizes for size in value.shape):
        return _ANYTHING
    return tuple(None if size == 1 else sizes.index(size) for size in value.shape)


def _check_presence(by_index: Mapping[Any, Any], plan: Plan) -> None:
    stateful_groups = {plan.tensors[key].group for key, entries in by_index.items() if isinstance(key, int) and entries}
    for index, spec in enumerate(plan.tensors):
        if spec.trainable and spec.group in stateful_groups and index not in by_index:
            raise ValueError(
                f"loaded state dict, parameter {index} {spec.name!r}: missing entry, there is no state for it, though "
                f"other parameters of its group have state. If it was never stepped before the checkpoint was made, "
                f"say so: state_dict['state'][{index}] = {{}}"
            )


def _check_values(entries: Mapping[str, Any], index: int, name: str) -> None:
    """Raise if an entry has no values to load: the rank that owns the parameter would be the only one to notice."""
    for key, value in entries.items():
        if _is_meta(value):
            raise ValueError(
                f"loaded state dict, parameter {index} {name!r}: entry {key!r} is on the meta device: it has no values"
            )


def _is_meta(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.device.type == "meta"
    if isinstance(value, Mapping):
        return any(map(_is_meta, value.values()))
    return isinstance(value, (list, tuple)) and any(map(_is_meta, value))


def _outline(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)}{value.dtype}" + (
            f"={value.item()!r}" if value.numel() == 1 and value.device.type == "cpu" else ""
        )
    return in_words(value)


__all__ = ["Expectations", "StateMapError", "checked", "digest_of", "install", "local_state", "what_differs"]

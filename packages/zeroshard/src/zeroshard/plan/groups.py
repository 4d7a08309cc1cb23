"""Reads and checks the parameters of an optimizer: their groups, names and memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import count, pairwise
from operator import is_
from typing import Any

import torch
from zeroshard_core import TensorSpec, is_dense

ParamGroup = dict[str, Any]

MEMBERS = frozenset({"params", "param_names"})
"""Keys of a param group that say which parameters it has; they differ between the public and the local groups."""


def read_groups(params: Any) -> list[ParamGroup]:  # noqa: ANN401 - anything may be passed; this function checks it
    """Check the argument ``params`` of an optimizer, and return it as groups, each as :func:`read_group` does."""
    if isinstance(params, torch.Tensor):
        raise TypeError(f"`params` must be an iterable of tensors or dicts, but got a single {torch.typename(params)}")
    items = _listed(params, "`params`")
    if not items:
        raise ValueError("ZeroRedundancyOptimizer got an empty parameter list")
    are_groups = all(isinstance(item, Mapping) for item in items)
    return [read_group(group) for group in (items if are_groups else [{"params": items}])]


def read_group(group: Mapping[str, Any]) -> ParamGroup:
    """Check one group, and return a fresh dict with lists of tensors (``"params"``) and names (``"param_names"``)."""
    if not isinstance(group, Mapping):
        raise TypeError(f"a parameter group must be a dict, but got {torch.typename(group)}")
    if "params" not in group:
        raise ValueError(
            f"a parameter group must have the key 'params' with its parameters; this one has {sorted(map(str, group))}"
        )
    given = group["params"]
    items = [given] if isinstance(given, torch.Tensor) else _listed(given, "the 'params' of a group")
    fresh = {**group, "params": items}
    if items and all(isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) for item in items):
        fresh |= {"params": [tensor for _, tensor in items], "param_names": [name for name, _ in items]}
    if not all(isinstance(tensor, torch.Tensor) for tensor in fresh["params"]):
        kinds = sorted({torch.typename(item) for item in items})
        raise TypeError(f"`params` must hold tensors, or (name, tensor) pairs, or dicts, all of one kind; got {kinds}")
    names = fresh.get("param_names", [f"#{position}" for position in range(len(items))])
    seen: dict[int, str] = {}
    for name, tensor in zip(names, fresh["params"], strict=True):
        if id(tensor) in seen:
            raise ValueError(f"a parameter group holds the same parameter twice: as {seen[id(tensor)]} and as {name}")
        seen[id(tensor)] = name
    return fresh


def parameters_of(groups: Iterable[Mapping[str, Any]]) -> list[torch.Tensor]:
    """Return all parameters in the order of the groups; their positions are the tensor indices of the plan."""
    return [param for group in groups for param in group["params"]]


def hyperparameters_of(group: Mapping[str, Any]) -> ParamGroup:
    """Return a group without its members."""
    return {key: value for key, value in group.items() if key not in MEMBERS}


def set_hyperparameter(group: ParamGroup, key: str, value: object) -> None:
    """Set a hyperparameter; a tensor is written in place, because the loop may hold it."""
    present = group.get(key)
    if isinstance(value, torch.Tensor) and isinstance(present, torch.Tensor) and present.shape == value.shape:
        value = present.copy_(value)
    group[key] = value


def pack_groups(groups: Sequence[Mapping[str, Any]]) -> list[ParamGroup]:
    """Return param groups with integer indices in place of parameters."""
    numbers = count()
    return [{**group, "params": [next(numbers) for _ in group["params"]]} for group in groups]


def label_of(groups: Sequence[Mapping[str, Any]], index: int) -> str:
    """Return the name of a parameter for errors, e.g. ``"parameter 0 of group 1 ('bias')"``."""
    number = 0
    while index >= len(groups[number]["params"]):
        index -= len(groups[number]["params"])
        number += 1
    names = groups[number].get("param_names")
    return f"parameter {index} of group {number}" + (f" ({names[index]!r})" if names is not None else "")


def active_mask(params: Iterable[torch.Tensor]) -> tuple[bool, ...]:
    """Return for each parameter whether an optimizer may change it: it is trainable, or still has a gradient."""
    return tuple([param.requires_grad or param.grad is not None for param in params])


def check_members(groups: Sequence[ParamGroup], params: Sequence[torch.Tensor]) -> None:
    """Raise a RuntimeError if the public param groups do not hold ``params``, because the user replaced members."""
    members = parameters_of(groups)
    if len(members) != len(params) or not all(map(is_, members, params)):
        raise RuntimeError(
            "the members of param_groups are not those that the optimizer was built with; "
            "add parameters with add_param_group(), and build a new optimizer to replace or remove them"
        )


def specs_of(
    groups: Sequence[Mapping[str, Any]], active: Sequence[bool], names_of: Mapping[torch.Tensor, str] | None = None
) -> tuple[TensorSpec, ...]:
    """Describe all parameters. ``active`` says which are trainable; ``names_of`` is for parameters without names."""
    specs: list[TensorSpec] = []
    logical: dict[torch.device, str] = {}
    for number, group in enumerate(groups):
        names = group.get("param_names")
        for position, param in enumerate(group["params"]):
            index = len(specs)
            if param.layout is not torch.strided:
                raise ValueError(
                    f"{label_of(groups, index)}, of shape {tuple(param.shape)}, is a {param.layout} tensor: sparse "
                    f"parameters are not supported, only sparse gradients of dense ones"
                )
            if active[index] and hasattr(param, "device_mesh"):
                raise TypeError(
                    f"{label_of(groups, index)}, of shape {tuple(param.shape)}, is a DTensor, which is sharded "
                    f"already; pass it to an optimizer that does not shard"
                )
            # Devices are numbered as they appear, so that ranks on different GPUs describe the same device.
            kind = param.device.type
            alike = sum(known.type == kind for known in logical)
            device = logical.setdefault(param.device, "cpu" if kind == "cpu" else f"{kind}:{alike}")
            name = (names_of or {}).get(param, f"param.{index}") if names is None else str(names[position])
            stride = None if not is_dense(param) or param.is_contiguous() else tuple(param.stride())
            specs.append(TensorSpec(name, tuple(param.shape), param.dtype, device, active[index], number, stride))
    return tuple(specs)


def check_memory(groups: Sequence[Mapping[str, Any]], active: Sequence[bool]) -> None:
    """Raise a ValueError if a parameter that a step may change has gaps in memory, or shares memory with another."""
    by_device: dict[torch.device, list[tuple[int, int, int]]] = {}
    for index, param in enumerate(parameters_of(groups)):
        if not active[index]:
            continue
        if not is_dense(param):
            raise ValueError(
                f"{label_of(groups, index)}, of shape {tuple(param.shape)} and strides {param.stride()}, has gaps in "
                f"memory, or elements that share memory: call p.data = p.data.contiguous() first"
            )
        if param.is_conj() or param.is_neg():
            raise ValueError(
                f"{label_of(groups, index)}, of shape {tuple(param.shape)}, is a conjugate or negative view: call "
                f"p.data = p.data.resolve_conj().resolve_neg() first"
            )
        if param.device.type != "meta" and param.numel() > 0:
            start = param.data_ptr()
            by_device.setdefault(param.device, []).append((start, start + param.nbytes, index))
    for ranges in by_device.values():
        ranges.sort()
        # If any two ranges overlap, two neighbours in the order of their starts overlap.
        for (_, stop, one), (start, _, two) in pairwise(ranges):
            if start < stop:
                one, two = sorted((one, two))
                raise ValueError(
                    f"{label_of(groups, one)} and {label_of(groups, two)} share memory: use one Parameter in both "
                    f"places of the model, which then has one owner, or give one of them memory of its own"
                )


def check_values(groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise a ValueError if a parameter that a step may change is on the meta device."""
    params = parameters_of(groups)
    for index, (param, active) in enumerate(zip(params, active_mask(params), strict=True)):
        if active and param.is_meta:
            raise ValueError(
                f"{label_of(groups, index)}, of shape {tuple(param.shape)}, is on the meta device and has no values: "
                f"call model.to_empty(device=...) and initialize the model before you build the optimizer"
            )


def same_place(old: TensorSpec, new: TensorSpec) -> bool:
    """Return True if a tensor described by ``new`` fits into the memory of ``old``."""
    return (old.shape, old.dtype, old.device, old.stride) == (new.shape, new.dtype, new.device, new.stride)


def _listed(given: Any, what: str) -> list[Any]:  # noqa: ANN401 - checked by trying
    if isinstance(given, (set, frozenset)):
        raise TypeError(f"{what} must have an order that is the same on every rank; a set has none, use a list")
    try:
        items = iter(given)
    except TypeError as error:
        raise TypeError(f"{what} must be an iterable of tensors or dicts, but got {torch.typename(given)}") from error
    return list(items)

"""State maps: pure functions that cut the optimizer state of whole tensors along shards, and key it by names.

Results may alias the arguments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from zeroshard_core.spec import Shard, TensorSpec


class StateMapError(ValueError):
    """Raised if optimizer state cannot be cut or renamed. The message names the tensor and the entry."""


def cut_state(state: Mapping[str, Any], spec: TensorSpec, shard: Shard) -> dict[str, Any]:
    """Cut the state of a whole tensor to the state of one of its shards.

    Args:
        state: entries by name. An entry of the tensor's shape holds one value per element.
        spec: describes the whole tensor.
        shard: the elements to keep.

    Returns:
        The entries. Those with one value per element are cut to the rows of the shard, with the strides of the spec;
        0-dim tensors and plain Python values are unchanged. If the shard is the whole tensor, all are unchanged.

    Raises:
        StateMapError: if an entry has another shape, is not strided, or is a container that holds tensors.
    """
    if shard.stop - shard.start == spec.rows:
        return dict(state)
    cut: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and value.shape == spec.shape:
            cut[key] = shard.narrow(_laid_out(value.detach(), spec))
        elif _travels(value):
            cut[key] = value
        else:
            named = f"tensor {spec.name!r} of shape {spec.shape}"
            raise StateMapError(f"{named} cannot be cut; keep it whole: its state {key!r} has {_shape_to_text(value)}")
    return cut


def to_names(state_dict: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Key an optimizer's state dict by fully qualified names instead of integers.

    >>> to_names({"state": {0: {}}, "param_groups": [{"lr": 0.1, "params": [0]}]}, ["head.bias"])
    {'state': {'head.bias': {}}, 'param_groups': [{'lr': 0.1, 'params': ['head.bias']}]}

    Args:
        state_dict: the result of ``torch.optim.Optimizer.state_dict()``.
        names: the name of each index.

    Returns:
        New dicts and lists around the same values.

    Raises:
        StateMapError: if two indices have the same name, or an index has no name or is listed twice.
    """
    indices = {index: name for name, index in _positions(names).items()}
    return _rekeyed(state_dict, indices, f"an index from 0 to {len(names) - 1}")


def to_indices(state_dict: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Key a state dict by integers instead of names: the inverse of :func:`to_names`, with its arguments and errors."""
    return _rekeyed(state_dict, _positions(names), f"one of the {len(names)} names given")


def _travels(value: object) -> bool:
    """Return True if every shard gets an entry unchanged."""
    if isinstance(value, torch.Tensor):
        return value.dim() == 0
    inside: Iterable[object] = value if isinstance(value, (list, tuple, set, frozenset)) else ()
    inside = value.values() if isinstance(value, Mapping) else inside
    return not any(isinstance(each, torch.Tensor) or not _travels(each) for each in inside)


def _shape_to_text(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__} that holds tensors"
    kind = "" if value.layout is torch.strided else f" and layout {value.layout}"
    return f"shape {tuple(value.shape)}{kind}"


def _laid_out(value: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Return the same values with the strides of the spec, which fused kernels require."""
    if spec.stride is None:
        return value.contiguous()
    if value.stride() == spec.stride:
        return value
    return torch.empty_strided(spec.shape, spec.stride, dtype=value.dtype, device=value.device).copy_(value)


def _positions(names: Sequence[str]) -> dict[str, int]:
    positions: dict[str, int] = {}
    for index, name in enumerate(names):
        if name in positions:
            raise StateMapError(f"the name {name!r} is the name of index {positions[name]} and of index {index}")
        positions[name] = index
    return positions


def _rekeyed(state_dict: Mapping[str, Any], renamed: Mapping[Any, Any], expected: str) -> dict[str, Any]:
    for section in ("state", "param_groups"):
        if section not in state_dict:
            raise StateMapError(f"this is not a state dict of an optimizer: it lacks {section!r}")
    listed = [key for group in state_dict["param_groups"] for key in group["params"]]
    for where, keys in (("state", state_dict["state"]), ("param_groups", listed)):
        for key in keys:
            if not isinstance(key, (int, str)) or key not in renamed:
                raise StateMapError(f"{where!r} has the key {key!r}, which is not {expected}")
    if repeated := [key for key, count in Counter(listed).items() if count > 1]:
        raise StateMapError(f"'param_groups' lists {repeated[0]!r} twice")
    state = {renamed[key]: entries for key, entries in state_dict["state"].items()}
    groups = [{**group, "params": [renamed[key] for key in group["params"]]} for group in state_dict["param_groups"]]
    return {**state_dict, "state": state, "param_groups": groups}

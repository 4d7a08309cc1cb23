"""State maps: the optimizer state of whole tensors cut along shards, and joined again.

Pure functions over dicts of tensors. Arguments are not changed; results may alias them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch

from zeroshard_core.plan import Plan
from zeroshard_core.spec import Shard, TensorSpec, contiguous_strides


class StateMapError(ValueError):
    """Optimizer state that cannot be cut, joined or renamed; the message names the tensor and the entry."""


def cut_state(state: Mapping[str, Any], spec: TensorSpec, shard: Shard) -> dict[str, Any]:
    """Cut the state of a whole tensor to that of one of its shards.

    Args:
        state: entries by name. Those of the tensor's shape hold one value per element.
        spec: the tensor.
        shard: the elements to keep.

    Returns:
        Entries with one value per element cut to the shard's rows, in the spec's strides; 0-dim tensors and plain
        Python values unchanged. All entries unchanged if the shard is the whole tensor.

    Raises:
        StateMapError: if an entry has another shape, is not strided, or is a container that holds tensors.
    """
    if _is_whole(shard, spec):
        return dict(state)
    cut: dict[str, Any] = {}
    for key, value in state.items():
        if _is_per_element(value, spec):
            cut[key] = shard.box(_laid_out(value.detach(), spec))
        elif _travels(value):
            cut[key] = value
        else:
            raise StateMapError(
                f"tensor {spec.name!r} of shape {spec.shape} cannot be cut: its state {key!r} has "
                f"{_shape_in_words(value)}, which does not follow the tensor's elements; keep this tensor whole"
            )
    return cut


def join_state(pieces: Sequence[tuple[Shard, Mapping[str, Any]]], spec: TensorSpec) -> dict[str, Any]:
    """Join the states of all shards of a tensor; the inverse of :func:`cut_state`.

    Args:
        pieces: shards that cover the tensor, in any order, and the state of each.
        spec: the tensor.

    Returns:
        Entries with one value per element in new tensors of the spec's shape and strides, on the device of the first
        piece; other entries from the first piece. If one shard is the whole tensor, its entries unchanged.

    Raises:
        StateMapError: if the shards do not cover the tensor exactly once, or pieces differ in their entries, or in an
            entry's dtype or kind, or an entry does not have the shape of its shard's rows.
    """
    ordered = sorted(pieces, key=lambda piece: piece[0].start)
    _check_cover([shard for shard, _ in ordered], spec)
    first_shard, first = ordered[0]
    for shard, state in ordered[1:]:
        if state.keys() != first.keys():
            raise StateMapError(
                f"the state of tensor {spec.name!r} has the entries {sorted(first)} on rank {first_shard.rank}, but "
                f"{sorted(state)} on rank {shard.rank}"
            )
    if len(ordered) == 1:
        return dict(first)
    return {key: _joined(key, [(shard, state[key]) for shard, state in ordered], spec) for key in first}


def local_to_whole(plan: Plan, states: Sequence[Mapping[int, Mapping[str, Any]]]) -> dict[int, dict[str, Any]]:
    """Join the states of all ranks.

    Args:
        plan: who owns what.
        states: per rank, the state of its shards by tensor index.

    Returns:
        The state of whole tensors by tensor index, ascending; tensors for which no rank has state are left out.

    Raises:
        StateMapError: if there is not one state per rank, a rank has state of what it does not own, only some owners
            of a tensor have state, or the pieces do not fit together (see :func:`join_state`).
    """
    if len(states) != plan.world_size:
        raise StateMapError(f"the plan is for {plan.world_size} ranks, but the state of {len(states)} is given")
    pieces: dict[int, list[tuple[Shard, Mapping[str, Any]]]] = {}
    for rank, state in enumerate(states):
        owned = {shard.tensor: shard for shard in plan.of_rank(rank)}
        for index, entries in state.items():
            if index not in owned:
                raise StateMapError(f"rank {rank} has state of {_named(plan, index)}, which it does not own")
            pieces.setdefault(index, []).append((owned[index], entries))
    joined: dict[int, dict[str, Any]] = {}
    for index in sorted(pieces):
        having = {shard.rank for shard, _ in pieces[index]}
        lacking = [shard.rank for shard in plan.of_tensor(index) if shard.rank not in having]
        if lacking:
            raise StateMapError(
                f"{_named(plan, index)} has state on rank {min(having)}, but none on rank {lacking[0]}, which owns "
                f"a part of it"
            )
        joined[index] = join_state(pieces[index], plan.tensors[index])
    return joined


def whole_to_local(plan: Plan, rank: int, state: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Cut the state of whole tensors to what one rank owns; the inverse of :func:`local_to_whole`.

    Args:
        plan: who owns what.
        rank: whose part to take.
        state: the state of whole tensors by tensor index; tensors without state may be left out.

    Returns:
        The state of the rank's shards by tensor index.

    Raises:
        StateMapError: if there is no such tensor, or a tensor's state cannot be cut (see :func:`cut_state`).
        IndexError: if there is no such rank.
    """
    for index in state:
        if index not in range(len(plan.tensors)):
            raise StateMapError(f"there is state of {_named(plan, index)}; the plan is for {len(plan.tensors)} tensors")
    return {
        shard.tensor: cut_state(state[shard.tensor], plan.tensors[shard.tensor], shard)
        for shard in plan.of_rank(rank)
        if shard.tensor in state
    }


def to_names(state_dict: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Key an optimizer's state dict by fully qualified names instead of integers.

    >>> to_names({"state": {0: {}}, "param_groups": [{"lr": 0.1, "params": [0]}]}, ["head.bias"])
    {'state': {'head.bias': {}}, 'param_groups': [{'lr': 0.1, 'params': ['head.bias']}]}

    Args:
        state_dict: as from ``torch.optim.Optimizer.state_dict()``: ``"state"`` by index, ``"param_groups"`` with lists
            of indices under ``"params"``.
        names: the name of each index.

    Returns:
        New dicts and lists around the same values.

    Raises:
        StateMapError: if two indices have one name, or an index has no name or is in two places.
    """
    _positions(names)
    known = range(len(names))
    return _rekeyed(
        state_dict,
        lambda key: isinstance(key, int) and key in known,
        lambda key: names[key],
        f"an index from 0 to {len(names) - 1}",
    )


def to_indices(state_dict: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Key a state dict by integers instead of names; the inverse of :func:`to_names`.

    Args:
        state_dict: as from :func:`to_names`.
        names: the name of each index.

    Returns:
        New dicts and lists around the same values.

    Raises:
        StateMapError: if two indices have one name, or the state dict has an unknown name or one in two places.
    """
    positions = _positions(names)
    return _rekeyed(
        state_dict, lambda key: key in positions, lambda key: positions[key], f"one of the {len(names)} names given"
    )


def _is_whole(shard: Shard, spec: TensorSpec) -> bool:
    return shard.stop - shard.start == spec.rows


def _is_per_element(value: object, spec: TensorSpec) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and tuple(value.shape) == spec.shape
        and value.dim() > 0
    )


def _travels(value: object) -> bool:
    """Whether an entry goes with every shard as it is."""
    if isinstance(value, torch.Tensor):
        return value.dim() == 0
    if isinstance(value, Mapping):
        return not _holds_tensor(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return not _holds_tensor(value)
    return True


def _holds_tensor(values: Iterable[object]) -> bool:
    return any(isinstance(value, torch.Tensor) or not _travels(value) for value in values)


def _shape_in_words(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__} that holds tensors"
    kind = "" if value.layout is torch.strided else f" and layout {value.layout}"
    return f"shape {tuple(value.shape)}{kind}"


def _laid_out(value: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The same values in the spec's strides, which fused kernels take for granted."""
    stride = contiguous_strides(spec.shape) if spec.stride is None else spec.stride
    # The stride of a dimension of size 1 does not matter.
    if all(size == 1 or a == b for size, a, b in zip(spec.shape, value.stride(), stride, strict=True)):
        return value
    return torch.empty_strided(spec.shape, stride, dtype=value.dtype, device=value.device).copy_(value)


def _check_cover(shards: Sequence[Shard], spec: TensorSpec) -> None:
    reached = 0
    for shard in shards:
        if shard.start != reached or shard.tensor != shards[0].tensor:
            raise StateMapError(
                f"the pieces of tensor {spec.name!r} should go on at row {reached}, but the next has rows "
                f"{shard.start} to {shard.stop} of tensor {shard.tensor}, from rank {shard.rank}"
            )
        reached = shard.stop
    if reached != spec.rows or not shards:
        raise StateMapError(f"tensor {spec.name!r} has {spec.rows} rows, but its {len(shards)} pieces end at {reached}")


def _joined(key: str, pieces: Sequence[tuple[Shard, Any]], spec: TensorSpec) -> Any:  # noqa: ANN401 - state holds anything
    (first_shard, first), *others = pieces
    if _travels(first):
        for shard, value in others:
            if not _travels(value):
                raise StateMapError(
                    f"the state {key!r} of tensor {spec.name!r} is one value on rank {first_shard.rank}, but has "
                    f"{_shape_in_words(value)} on rank {shard.rank}"
                )
        return first
    for shard, value in pieces:
        shape = (*spec.shape[: shard.dim], shard.stop - shard.start, *spec.shape[shard.dim + 1 :])
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != shape:
            found = _shape_in_words(value) if not _travels(value) else "one value"
            raise StateMapError(
                f"the state {key!r} of tensor {spec.name!r} has {found} on rank {shard.rank}, but its shard has shape "
                f"{shape}"
            )
        if value.dtype != first.dtype:
            raise StateMapError(
                f"the state {key!r} of tensor {spec.name!r} is {first.dtype} on rank {first_shard.rank}, but "
                f"{value.dtype} on rank {shard.rank}"
            )
    stride = contiguous_strides(spec.shape) if spec.stride is None else spec.stride
    joined = torch.empty_strided(spec.shape, stride, dtype=first.dtype, device=first.device)
    for shard, value in pieces:
        shard.box(joined).copy_(value.detach())
    return joined


def _named(plan: Plan, index: object) -> str:
    if isinstance(index, int) and 0 <= index < len(plan.tensors):
        return f"tensor {index} {plan.tensors[index].name!r}"
    return f"tensor {index!r}"


def _positions(names: Sequence[str]) -> dict[Hashable, int]:
    positions: dict[Hashable, int] = {}
    for index, name in enumerate(names):
        if name in positions:
            raise StateMapError(f"the name {name!r} stands for index {positions[name]} and for index {index}")
        positions[name] = index
    return positions


def _rekeyed(
    state_dict: Mapping[str, Any], knows: Callable[[Any], bool], rename: Callable[[Any], Any], expected: str
) -> dict[str, Any]:
    for section in ("state", "param_groups"):
        if section not in state_dict:
            raise StateMapError(f"this is no state dict of an optimizer: it lacks {section!r}")
    listed = [key for group in state_dict["param_groups"] for key in group["params"]]
    for where, keys in (("state", state_dict["state"]), ("param_groups", listed)):
        for key in keys:
            if not knows(key):
                raise StateMapError(f"{where!r} has the key {key!r}, which is not {expected}")
    seen: set[Hashable] = set()
    for key in listed:
        if key in seen:
            raise StateMapError(f"'param_groups' lists {key!r} twice")
        seen.add(key)
    return {
        **state_dict,
        "state": {rename(key): entries for key, entries in state_dict["state"].items()},
        "param_groups": [
            {**group, "params": [rename(key) for key in group["params"]]} for group in state_dict["param_groups"]
        ],
    }

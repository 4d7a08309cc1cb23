"""Gathers the state of all shards on one rank's CPU, in the form that an optimizer without sharding has."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from zeroshard_comm import Coordinator, Manifest, gather
from zeroshard_core import Plan, Shard, StateMapError, storage_view

from zeroshard.changes import Changes
from zeroshard.local.optimizer import LocalOptimizer
from zeroshard.plan.groups import ParamGroup, pack_groups
from zeroshard.plan.layout import label_in
from zeroshard.state.serialization import PLAIN, Described, Key, describe_entries, part_dtype, read_value, write_value

_SENT = (*PLAIN, torch.Tensor, list, tuple, dict)


@dataclass(frozen=True)
class Consolidated:
    """The state of all ranks, on the rank that has received it.

    Attributes:
        state: the entries by tensor index, and state that belongs to no tensor under its own keys.
        written: the values that steps wrote to each param group, from the lowest rank that owns a tensor of the group.
    """

    state: Mapping[Any, Any]
    written: Mapping[int, Mapping[str, Any]]


def describe_state(local: LocalOptimizer, changes: Changes, rank: int) -> Manifest:
    """Describe all state of this rank: state of its shards and of no parameter, and values that steps wrote to groups.

    Raises:
        StateMapError: if an entry of the state can be neither joined nor sent.
        Exception: if a value of a param group cannot be copied, as ``state_dict()`` copies it on the receiving rank.
    """
    groups = local.groups
    local.use_groups()
    tensors, owned = list[torch.Tensor](), []
    for index, shard in local.shards.items():
        entries, name = local.state_of(shard) or {}, local.plan.tensors[index].name
        owned.append(describe_entries(shard, entries, name, tensors))
    others = {
        key: write_value(value, tensors, f"state entry {key!r}")
        for key, value in local.other_state().items()
        if isinstance(key, str)
    }
    plan, lowest = local.plan, dict[int, int]()
    for spec, owners in zip(plan.tensors, plan.owners, strict=True):
        lowest[spec.group] = min(lowest.get(spec.group, plan.world_size), *owners)
    written = []
    for number in [number for number, owner in lowest.items() if owner == rank]:
        for key, value in changes.unchanged(number, groups[number]).items():
            # The receiver keeps its own value if this one cannot be sent, or would arrive as another type.
            found = list[torch.Tensor]()
            with suppress(StateMapError):
                if type(value) in _SENT:
                    written.append((number, key, write_value(value, found, key)))
                    tensors += found
    copy_groups(pack_groups(groups))
    return Manifest([owned, others, written], tensors)


def gather_state(coordinator: Coordinator, plan: Plan, manifest: Manifest, target: int) -> Consolidated | None:
    """Send this rank's state to rank ``target``, and return the state of all ranks there; None elsewhere. Collective.

    Ranks must have agreed on the plan and the target.
    """
    assembler = _Assembler(plan)
    gather(coordinator, manifest, target, assembler.receive_buffers, operation=f"consolidate_state_dict(to={target})")
    return assembler.consolidated() if coordinator.ranks.rank == target else None


def copy_groups(groups: Sequence[Mapping[str, Any]]) -> list[ParamGroup]:
    """Copy packed param groups, and the tensors in them to the CPU."""
    return [{key: _on_cpu(value) for key, value in group.items()} for group in groups]


def _on_cpu(value: object) -> object:
    return value.detach().clone().cpu() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


class _Assembler:
    """Makes the buffers that receive the shards of all ranks, and builds the whole state from them."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._state: defaultdict[int, dict[Key, Any]] = defaultdict(dict)
        self._others: dict[str, Any] = {}
        self._written: defaultdict[int, dict[str, Any]] = defaultdict(dict)
        self._first: dict[int, tuple[int, set[tuple[Key, str]]]] = {}
        """The first rank that owns a part of each cut tensor, and the keys of its entries with the parts' dtypes."""

    def receive_buffers(self, rank: int, description: Any) -> Sequence[torch.Tensor]:  # noqa: ANN401 - JSON
        """Make buffers for the values that one rank sends; see :func:`zeroshard_comm.gather`."""
        buffers: list[torch.Tensor] = []

        def make(dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int] | None, device: str) -> torch.Tensor:
            made = _empty(dtype, shape, stride, device)
            buffers.append(storage_view(made))
            return made

        owned, others, of_groups = description
        for shard, written in zip(self._plan.of_rank(rank), owned, strict=True):
            spec = self._plan.tensors[shard.tensor]
            if self._plan.is_cut(shard.tensor):
                self._check_alike(shard, written)
            for key, entry in written:
                entries, dtype = self._state[shard.tensor], part_dtype(entry)
                if not dtype:
                    # A value of the whole tensor, such as a step count, is the same for every part.
                    entries.setdefault(key, read_value(entry, make))
                    continue
                if key not in entries:
                    entries[key] = read_value({"tensor": [dtype, spec.shape, spec.stride, "cpu"]}, _empty)
                buffers.append(storage_view(entries[key])[shard.flat])
        for key, entry in others.items():
            self._others.setdefault(key, read_value(entry, make))
        for number, key, entry in of_groups:
            self._written[number][key] = read_value(entry, make)
        return buffers

    def _check_alike(self, shard: Shard, written: Described) -> None:
        entries = {(key, part_dtype(entry)) for key, entry in written}
        first_rank, first = self._first.setdefault(shard.tensor, (shard.rank, entries))
        if entries != first:
            key, dtype = min(entries ^ first, key=str)
            ranks = (first_rank, shard.rank) if (key, dtype) in first else (shard.rank, first_rank)
            raise StateMapError(
                f"{label_in(self._plan, shard.tensor)} has the state entry {key!r} on rank {ranks[0]}, but not on rank "
                f"{ranks[1]}, which owns a part of it, or not of the same dtype. If a step has failed there, make one "
                f"that succeeds, or load a checkpoint, before you consolidate"
            )

    def consolidated(self) -> Consolidated:
        """Return the received state, which is complete only after the transfer."""
        tensors = self._plan.tensors
        # Include tensors that were never stepped, so that a load can tell them from missing ones.
        stateful_groups = {tensors[index].group for index in self._state}
        by_tensor = {i: self._state.get(i, {}) for i, spec in enumerate(tensors) if spec.group in stateful_groups}
        return Consolidated({**by_tensor, **self._others}, self._written)


def _empty(dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int] | None, _: str) -> torch.Tensor:
    like = torch.empty(tuple(shape), dtype=dtype, device="meta")
    return torch.empty_strided(tuple(shape), stride or like.stride(), dtype=dtype, device="cpu")

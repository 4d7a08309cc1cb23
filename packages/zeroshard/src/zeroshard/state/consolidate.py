"""Gathers the state of all shards on one rank's CPU, in the form of an optimizer without sharding."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from zeroshard_comm import Coordinator, Manifest, gather
from zeroshard_core import Plan, Shard, StateMapError, storage_view

from zeroshard.changes import Changes
from zeroshard.local.optimizer import LocalOptimizer
from zeroshard.plan.groups import ParamGroup, pack_groups
from zeroshard.plan.layout import label_in
from zeroshard.state.serialization import PLAIN, Described, describe_entries, part_dtype, read_to_buffers, write_value

_SENT = (*PLAIN, torch.Tensor, list, tuple, dict)


def describe_state(local: LocalOptimizer, changes: Changes) -> Manifest:
    """Describe this rank's state and the values that steps wrote to groups; raise if one cannot be joined or sent."""
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
    written, unchanged = [], changes.unchanged()
    for number in sorted({local.plan.tensors[index].group for index in local.shards}):
        for key, value in unchanged[number].items():
            # The receiver keeps its own value if this one cannot be sent, or would arrive as another type.
            found = list[torch.Tensor]()
            with suppress(StateMapError):
                if type(value) in _SENT:
                    written.append((number, key, write_value(value, found, key)))
                    tensors += found
    # Raise now if a value cannot be copied, because state_dict() copies it on the receiving rank.
    copy_groups(pack_groups(groups))
    return Manifest([owned, others, written], tensors)


def gather_state(coordinator: Coordinator, plan: Plan, manifest: Manifest, target: int) -> Consolidated | None:
    """Send this rank's state to rank ``target``, and return the state of all ranks there; None elsewhere. Collective.

    Ranks must have agreed on the plan and the target.
    """
    whole = Consolidated(plan)
    gather(coordinator, manifest, target, whole.receive_buffers, operation=f"consolidate_state_dict(to={target})")
    if coordinator.ranks.rank != target:
        return None
    stateful_groups = {spec.group for index, spec in enumerate(plan.tensors) if whole.state[index]}
    for index, spec in enumerate(plan.tensors):
        # Tensors that were never stepped stay, so that a load can tell them from missing ones.
        if spec.group not in stateful_groups:
            del whole.state[index]
    return whole


def copy_groups(groups: Sequence[Mapping[str, Any]]) -> list[ParamGroup]:
    """Return a copy of packed param groups, with their tensors on the CPU."""
    return [{key: _on_cpu(value) for key, value in group.items()} for group in groups]


def _on_cpu(value: object) -> object:
    return value.detach().clone().cpu() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


class Consolidated:
    """The state of all ranks, on the rank that receives it."""

    def __init__(self, plan: Plan) -> None:
        self.state: dict[Any, Any] = {index: {} for index in range(len(plan.tensors))}
        """The entries by tensor index, and state that belongs to no tensor under its own keys."""
        self.written = defaultdict[int, dict[str, Any]](dict)
        """The values that steps wrote to each param group, from the lowest rank that owns a tensor of the group."""
        self._plan = plan
        self._first: dict[int, tuple[int, set[Any]]] = {}
        """The first rank that owns a part of each cut tensor, and the keys of its entries with the parts' dtypes."""

    def receive_buffers(self, rank: int, description: Any) -> Sequence[torch.Tensor]:  # noqa: ANN401 - JSON
        """Make buffers for the values that one rank sends; see :func:`zeroshard_comm.gather`."""
        buffers: list[torch.Tensor] = []
        owned, others, of_groups = description
        for shard, written in zip(self._plan.of_rank(rank), owned, strict=True):
            spec, entries = self._plan.tensors[shard.tensor], self.state[shard.tensor]
            if self._plan.is_cut(shard.tensor):
                self._check_alike(shard, written)
            for key, entry in written:
                dtype = part_dtype(entry)
                if dtype and key not in entries:
                    entries[key] = read_to_buffers({"tensor": [dtype, spec.shape, spec.stride, "cpu"]}, [])
                if dtype:
                    buffers.append(storage_view(entries[key])[shard.flat])
                else:
                    # A value of the whole tensor, such as a step count, is the same for every part.
                    entries.setdefault(key, read_to_buffers(entry, buffers))
        for key, entry in others.items():
            self.state.setdefault(key, read_to_buffers(entry, buffers))
        for number, key, entry in of_groups:
            self.written[number].setdefault(key, read_to_buffers(entry, buffers))
        return buffers

    def _check_alike(self, shard: Shard, written: Described) -> None:
        entries = {(key, part_dtype(entry)) for key, entry in written}
        first_rank, first = self._first.setdefault(shard.tensor, (shard.rank, entries))
        if entries != first:
            key, dtype = min(entries ^ first, key=str)
            here, there = (first_rank, shard.rank) if (key, dtype) in first else (shard.rank, first_rank)
            raise StateMapError(
                f"{label_in(self._plan, shard.tensor)} has the state entry {key!r} on rank {here}, but rank {there}, "
                f"which owns a part of it, lacks this entry or has it in another dtype. If a step failed there, run a "
                f"step that succeeds, or load a checkpoint, before you consolidate"
            )

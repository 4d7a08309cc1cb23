"""Loads a state dict: every rank checks it, then all ranks install their parts, or no rank changes anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zeroshard_comm import Coordinator, DisagreementError, agreed
from zeroshard_core import Plan

from zeroshard.local.optimizer import LocalOptimizer
from zeroshard.plan.groups import pack_groups, parameters_of
from zeroshard.state.check import LoadedState, StateSchema, check_state_dict
from zeroshard.state.metadata import StateMetadata
from zeroshard.state.serialization import copy_value, receive_value, send_value, write_value


@dataclass(frozen=True)
class CheckedLoad:
    """The checked arguments of ``load_state_dict()`` on one rank."""

    is_given: bool
    """Whether this rank was passed a state dict that is not empty."""
    parts: Mapping[int, LoadedState]
    """The parts that ranks load, by rank: the part of this rank, and parts that it may send."""
    from_rank: int | None
    settings: Mapping[str, Any]
    """Must be equal on all ranks."""
    numbers: Sequence[int]
    """Whether the state dict is whole, whether it lacks state of this rank, and its checksums; ranks compare these."""


def check_load(
    given: Mapping[str, Any],
    plan: Plan,
    local: LocalOptimizer,
    metadata: StateMetadata,
    schema: StateSchema,
    rank: int,
    from_rank: int | None,
    group: int | None,
) -> CheckedLoad:
    """Check the arguments of ``load_state_dict()`` on this rank; ``plan`` is the plan after the load."""
    ranks = range(plan.world_size)
    if isinstance(from_rank, bool) or from_rank not in (None, *ranks):
        raise ValueError(f"load_state_dict(from_rank={from_rank}): expected a rank from 0 to {ranks[-1]}")
    if from_rank not in (None, rank) and given:
        raise ValueError(f"load_state_dict(from_rank={from_rank}): pass an empty dict on rank {rank}, not its state")
    is_empty = isinstance(given, Mapping) and not given and from_rank != rank
    checked = None if is_empty else check_state_dict(given, plan, local, metadata, schema)
    parts, numbers = dict[int, LoadedState](), list[int]()
    if checked is not None:
        checksums, holder = checked.checksums(plan), metadata.consolidated_to
        lacks_owned = not all(checksums[shard.tensor] for shard in plan.of_rank(rank))
        numbers = [checked.is_whole, lacks_owned, *checksums]
        receivers: Sequence[int] = [rank]
        if rank == from_rank or (rank == holder and checked.is_whole):
            receivers = ranks
        elif lacks_owned and holder is not None:
            receivers = []
        parts = {receiver: checked.part_of(receiver, plan) for receiver in receivers}
        if rank in parts:
            # Tensors stay on their devices, but share no memory with the state dict.
            parts[rank] = LoadedState(**copy_value(vars(parts[rank])))
    settings = {
        "from_rank of load_state_dict()": from_rank,
        "its state dict": "given" if numbers and from_rank is None else "empty",
        "group of load_state_dict()": group,
        "added state": ", ".join(sorted(local.extra.names)),
    }
    return CheckedLoad(not is_empty, parts, from_rank, settings, numbers)


def receive_part(coordinator: Coordinator, mine: CheckedLoad, holder: int | None) -> LoadedState:
    """Return the part that this rank loads, from its own state dict or from the rank that sends parts.

    Collective, after an agreement on the arguments. Raises a DisagreementError if ranks pass different checkpoints, or
    values are missing.
    """
    rank, source = coordinator.ranks.rank, mine.from_rank
    if source is None:
        source = _source(coordinator, mine.numbers, holder)
    if source is None or coordinator.is_single_rank:
        return mine.parts[rank]
    with agreed(coordinator, "load_state_dict()"):
        for part in mine.parts.values() if rank == source else ():
            for number, group in enumerate(part.groups):
                for key, value in group.items():
                    write_value(value, [], f"load_state_dict(): {key!r} of param group {number}")
            for index, entries in part.state.items():
                write_value(entries, [], f"load_state_dict(): an entry of the state of tensor {index}")
            write_value(vars(part), [], "the part that load_state_dict() sends to other ranks")
    if rank != source:
        return LoadedState(**receive_value(coordinator, source))
    for peer in coordinator.ranks.peers:
        send_value(coordinator, peer, vars(mine.parts[peer]))
    return mine.parts[rank]


def _source(coordinator: Coordinator, mine: Sequence[int], holder: int | None) -> int | None:
    """Compare the state dicts of all ranks, and return the rank that sends values; None if each rank has its own."""
    is_whole, lacks_owned, *checksums = zip(*coordinator.gather_ints(mine, "load_state_dict()"), strict=True)
    for of_tensor in checksums:
        having = [rank for rank, checksum in enumerate(of_tensor) if checksum]
        different = [rank for rank in having if of_tensor[rank] != of_tensor[having[0]]]
        if different:
            ranks = f"rank {different[0]} differs from rank {having[0]}"
            raise DisagreementError(f"load_state_dict(): {ranks}: they were passed different checkpoints")
    if not any(lacks_owned):
        return None
    if holder is None or not is_whole[holder]:
        raise DisagreementError(
            f"load_state_dict(): rank {lacks_owned.index(True)} was passed placeholders for state that it owns, and no "
            f"rank was passed the consolidated state. Pass what state_dict() returns now on every rank, or pass all "
            f"values on one rank, with from_rank"
        )
    return holder


def install(local: LocalOptimizer, part: LoadedState) -> None:
    """Pass state to the inner optimizers' own ``load_state_dict()``, which casts and moves it.

    Their groups may then differ from the public ones until :meth:`LocalOptimizer.publish_groups` is called.
    """
    loaded = local.extra.begin_load(part.state)
    for number, member in enumerate(local.members):
        own = [group for group, owner in enumerate(local.assignment) if owner == number]
        tensors = parameters_of([local.local_groups[group] for group in own])
        position = {tensor: place for place, tensor in enumerate(tensors)}
        state = {key: entries for key, entries in loaded.items() if not isinstance(key, int)}
        for key, entries in loaded.items():
            tensor = local.shards[key].tensor if isinstance(key, int) else None
            if tensor in position:
                state[position[tensor]] = entries
        saved = [{**part.groups[group], "params": local.local_groups[group]["params"]} for group in own]
        with local.exchanged():
            member.load_state_dict({"state": state, "param_groups": pack_groups(saved)})

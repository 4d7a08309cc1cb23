"""Loads a state dict: every rank checks it, then each rank installs what it owns, or no rank changes anything."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zeroshard_comm import Coordinator, DisagreementError, agreed, explain_configs
from zeroshard_core import Plan

from zeroshard.local.optimizer import LocalOptimizer
from zeroshard.plan.groups import pack_groups, parameters_of
from zeroshard.state.check import ShardState, StateSchema, ValidatedStateDict, check_state_dict
from zeroshard.state.metadata import StateMetadata
from zeroshard.state.serialization import copy_value, receive_value, send_value, write_value

_DIFFERENT = "they were handed different checkpoints"


@dataclass(frozen=True)
class CheckedLoad:
    """The checked arguments of ``load_state_dict()`` on one rank. Each rank makes one, and ranks compare them.

    Attributes:
        checked: the state dict; None if it is empty.
        parts: the parts that this rank loads or sends, by rank.
        from_rank: the rank whose state dict all ranks load; None if each loads its own.
        settings: the values that must be equal on all ranks.
        digest: a checksum of the structure of the state dict.
        numbers: integers about the state dict that ranks exchange; see :func:`_source`.
    """

    checked: ValidatedStateDict | None
    parts: Mapping[int, ShardState]
    from_rank: int | None
    settings: Mapping[str, Any]
    digest: int
    numbers: Sequence[int]


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
    """Check the arguments of ``load_state_dict()`` on this rank; see :func:`check_state_dict`.

    Args:
        given: the state dict.
        plan: the plan that the load uses.
        local: has the public param groups, their classes, and the names of the extra entries.
        metadata: knows which tensors have state, and which rank has the consolidated state.
        schema: knows which entries the classes keep.
        rank: this rank.
        from_rank: the rank whose state dict all ranks load; None if each loads its own.
        group: the argument ``group``, which ranks compare.

    Raises:
        TypeError, ValueError: if the state dict or ``from_rank`` does not fit.
    """
    ranks, holder = range(plan.world_size), metadata.consolidated_to
    if isinstance(from_rank, bool) or from_rank not in (None, *ranks):
        raise ValueError(f"load_state_dict(from_rank={from_rank}): there are ranks 0 to {ranks[-1]}")
    if from_rank not in (None, rank) and given:
        raise ValueError(f"load_state_dict(from_rank={from_rank}): hand rank {rank} an empty dict, and not its own")
    is_empty = isinstance(given, Mapping) and not given and from_rank != rank
    checked = None if is_empty else check_state_dict(given, plan, local, metadata, schema)
    is_whole, lacks_owned, checksums = False, False, [0] * (1 + len(plan.tensors))
    parts = dict[int, ShardState]()
    if checked is not None:
        is_whole, lacks_owned = checked.is_whole, checked.lacks_owned(rank, plan)
        checksums = checked.checksums(plan)
        hands_out = rank == (holder if from_rank is None else from_rank) and is_whole
        receivers = ranks if hands_out else [] if lacks_owned and holder is not None else [rank]
        parts = {receiver: checked.part_of(receiver, plan) for receiver in receivers}
        if rank in parts:
            # Tensors stay on their devices, but share no memory with the state dict.
            parts[rank] = ShardState(**copy_value(vars(parts[rank])))
    structure = checked.structure if checked is not None and from_rank is None else ""
    settings = {
        "from_rank of load_state_dict()": from_rank,
        "its state dict": "given" if structure else "empty",
        "group of load_state_dict()": group,
        "added state": ", ".join(sorted(local.extra.names)),
    }
    digest = int.from_bytes(hashlib.sha256(structure.encode()).digest()[:8], "big") >> 1
    return CheckedLoad(checked, parts, from_rank, settings, digest, [is_whole, lacks_owned, *checksums])


def receive_part(coordinator: Coordinator, mine: CheckedLoad, holder: int | None) -> ShardState:
    """Return what this rank loads, which another rank may send. Collective; ranks must agree on the arguments before.

    Args:
        coordinator: agrees on the process group.
        mine: the checked arguments of this rank.
        holder: the rank that has the consolidated state; None if no rank has it.

    Raises:
        DisagreementError: if ranks pass different checkpoints, or values are missing.
    """
    from_rank = mine.from_rank
    if from_rank is None:
        from_rank = _source(coordinator, mine.numbers, holder)
    return _handed_out(coordinator, mine.parts, from_rank)


def _source(coordinator: Coordinator, mine: Sequence[int], holder: int | None) -> int | None:
    """Compare the state dicts of all ranks, and return the rank that sends values; None if each rank has its own."""
    is_whole, lacks_owned, *checksums = zip(*coordinator.gather_ints(mine, "load_state_dict()"), strict=True)
    for of_tensor in checksums:
        having = [rank for rank, checksum in enumerate(of_tensor) if checksum]
        different = [rank for rank in having if of_tensor[rank] != of_tensor[having[0]]]
        if different:
            raise DisagreementError(
                f"load_state_dict(): rank {different[0]} differs from rank {having[0]}: {_DIFFERENT}"
            )
    if not any(lacks_owned):
        return None
    if holder is None or not is_whole[holder]:
        raise DisagreementError(
            f"load_state_dict(): rank {lacks_owned.index(True)} was handed placeholders for what it owns, as "
            f"state_dict() lists while another rank has the consolidated state, and no rank was handed that state. "
            f"Hand in what state_dict() lists now on every rank, or all values on one rank, with from_rank"
        )
    return holder


def _handed_out(coordinator: Coordinator, parts: Mapping[int, ShardState], from_rank: int | None) -> ShardState:
    """Return the part of this rank, which another rank may send. Collective."""
    rank = coordinator.ranks.rank
    if from_rank is None or coordinator.is_single_rank:
        return parts[rank]
    with agreed(coordinator, "load_state_dict()"):
        if rank == from_rank:
            write_value([vars(part) for part in parts.values()], [], "what load_state_dict() hands to other ranks")
    if rank != from_rank:
        return ShardState(**receive_value(coordinator, from_rank))
    for peer in coordinator.ranks.peers:
        send_value(coordinator, peer, vars(parts[peer]))
    return parts[rank]


def explain_load(here: str, there: str, rank: int, other: int) -> str:
    """Name the difference between what two ranks passed to ``load_state_dict()``."""
    return explain_configs(here, there, rank, other) or _DIFFERENT


def install(local: LocalOptimizer, part: ShardState) -> None:
    """Pass state to the inner optimizers' own ``load_state_dict()``, which casts and moves it.

    Afterwards they may have other groups than the public ones, until :meth:`LocalOptimizer.publish_groups`.
    """
    loaded = local.extra.begin_load(part.state)
    for number, member in enumerate(local.members):
        own = [group for group, owner in enumerate(local.assignment) if owner == number]
        tensors = parameters_of([local.local_groups[group] for group in own])
        position = {tensor: place for place, tensor in enumerate(tensors)}
        state = {key: entries for key, entries in loaded.items() if not isinstance(key, int)}
        for key in loaded.keys() - state.keys():
            tensor = local.shards[key].tensor
            if tensor in position:
                state[position[tensor]] = loaded[key]
        saved = [{**part.groups[group], "params": local.local_groups[group]["params"]} for group in own]
        with local.exchanged():
            member.load_state_dict({"state": state, "param_groups": pack_groups(saved)})

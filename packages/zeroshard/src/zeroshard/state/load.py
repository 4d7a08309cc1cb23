"""Loading: a state dict is checked on every rank, then each rank takes what it owns, or all stay unchanged."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from zeroshard_comm import Coordinator, DisagreementError, agreed, explain_configs

from zeroshard.local.optimizer import LocalOptimizer, sync_groups
from zeroshard.plan.groups import pack_groups, parameters_of
from zeroshard.plan.layout import with_settings
from zeroshard.state.check import ShardState, StateSchema, check_state_dict
from zeroshard.state.serialization import copy_value, receive_value, send_value, write_value

if TYPE_CHECKING:
    from zeroshard.engine import Engine

_DIFFERENT = "they were handed different checkpoints"


def load(
    engine: Engine,
    schema: StateSchema,
    read: Callable[[], Mapping[str, Any]],
    from_rank: int | None,
    group: int | None = None,
) -> bool:
    """Load what ``read`` returns on all ranks, or on none; False if every rank was handed an empty dict. Collective.

    ``from_rank`` and ``group`` are the arguments of ``load_state_dict()``, which ranks compare.
    """
    coordinator, groups, metadata, extra = engine.coordinator, engine.groups, engine.metadata, engine.local.extra
    rank, parts, holder = coordinator.ranks.rank, dict[int, ShardState](), metadata.consolidated_to
    is_whole, lacks_owned, checksums = False, False, [0] * (1 + len(engine.params))
    with agreed(coordinator, "load_state_dict()", _explain) as proposal:
        given = read()
        layout = engine.update_layout()
        ranks = range(layout.plan.world_size)
        if isinstance(from_rank, bool) or from_rank not in (None, *ranks):
            raise ValueError(f"load_state_dict(from_rank={from_rank}): there are ranks 0 to {ranks[-1]}")
        if from_rank not in (None, rank) and given:
            raise ValueError(f"load_state_dict(from_rank={from_rank}): hand rank {rank} an empty dict, and not its own")
        is_empty = isinstance(given, Mapping) and not given and from_rank != rank
        checked = None if is_empty else check_state_dict(given, engine, layout.plan, schema)
        if checked is not None:
            is_whole, lacks_owned = checked.is_whole, checked.lacks_owned(rank, layout.plan)
            checksums = checked.checksums(layout.plan)
            hands_out = rank == (holder if from_rank is None else from_rank) and is_whole
            receivers = ranks if hands_out else [] if lacks_owned and holder is not None else [rank]
            parts = {receiver: checked.part_of(receiver, layout.plan) for receiver in receivers}
            if rank in parts:
                # Tensors stay on their devices, but share no memory with the state dict.
                parts[rank] = ShardState(**copy_value(vars(parts[rank])))
        structure = checked.structure if checked is not None and from_rank is None else ""
        kind = {"from_rank of load_state_dict()": from_rank, "its state dict": "given" if structure else "empty"}
        kind["group of load_state_dict()"] = group
        kind["added state"] = ", ".join(sorted(extra.names))
        proposal.set(with_settings(layout, kind))
        proposal.digest ^= int.from_bytes(hashlib.sha256(structure.encode()).digest()[:8], "big") >> 1
        proposal.flag = checked is not None
    if not coordinator.flagged:
        return False
    if from_rank is None:
        from_rank = _source(coordinator, [is_whole, lacks_owned, *checksums], holder)
    part = _handed_out(coordinator, parts, from_rank)
    engine.take_over_state(layout, "load_state_dict()", lambda: _install(engine.local, part))
    extra.end_load()
    sync_groups(engine.local.optim.param_groups, groups)
    return True


def _source(coordinator: Coordinator, mine: Sequence[int], holder: int | None) -> int | None:
    """Compare what ranks were handed, and return the rank that hands out the values; None if each has its own."""
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
    """Return the part of this rank, which may come from another one. Collective."""
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


def _explain(here: str, there: str, rank: int, other: int) -> str:
    return explain_configs(here, there, rank, other) or _DIFFERENT


def _install(local: LocalOptimizer, part: ShardState) -> None:
    """Hand state to the inner optimizer through its own ``load_state_dict``, which casts and moves it."""
    inner = local.optim
    position = {tensor: number for number, tensor in enumerate(parameters_of(inner.param_groups))}
    pairs = zip(part.groups, inner.param_groups, strict=True)
    packed = pack_groups([{**saved, "params": group["params"]} for saved, group in pairs])
    by_position = {
        position[local.shards[key].tensor] if isinstance(key, int) else key: entries
        for key, entries in local.extra.begin_load(part.state).items()
    }
    inner.load_state_dict({"state": by_position, "param_groups": packed})

"""Loading: a state dict is checked on every rank, then each rank takes what it owns, or all stay unchanged."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from zeroshard_comm import Control, DisagreementError, agreed, explain_configs

from zeroshard.layout import Layout
from zeroshard.local_optimizer import LocalOptimizer, sync_groups
from zeroshard.param_groups import ParamGroup, parameters_of
from zeroshard.sharding import Sharding
from zeroshard.state.check import Given, LoadedPart, check_state_dict
from zeroshard.state.metadata import StateMetadata
from zeroshard.state.schema import StateSchema
from zeroshard.state.serialization import copy_value, receive_value, send_value, write_value

_DIFFERENT = "they were handed different checkpoints"


def load(
    sharding: Sharding,
    groups: Sequence[ParamGroup],
    schema: StateSchema,
    metadata: StateMetadata,
    read: Callable[[], Mapping[str, Any]],
    from_rank: int | None = None,
) -> bool:
    """Load a state dict on all ranks, or on none. Collective.

    Args:
        sharding: whose local optimizer takes the state of what it owns; follows the model first.
        groups: the public param groups, which take the hyperparameters.
        schema: what state the optimizer class keeps.
        metadata: what state there is on all ranks; brought up to date.
        read: returns the state dict, from the plain optimizer, torch's ZeroRedundancyOptimizer, or this one at any
            world size, or what this one has listed on the same rank with the same plan; or an empty one. It is not
            modified, and its tensors are not kept.
        from_rank: the only rank with a state dict, which hands each rank its part.

    Returns:
        Whether anything was loaded: not if all ranks were handed an empty dict.

    Raises:
        TypeError: if it is no state dict of an optimizer.
        ValueError: for another number of groups or parameters, or entries that are missing, extra or misshapen.
        DisagreementError: if the ranks' state dicts differ in structure or hyperparameters, or their models differ.
        Exception: whatever else a rank meets. All raise on every rank, and leave local optimizer and groups as before.
    """
    control, layout = sharding.control, sharding.layout
    rank, parts, holder = control.ranks.rank, dict[int, LoadedPart](), metadata.consolidated_to
    given: Mapping[str, Any] = {}
    form, checksums = Given.NOTHING_OWNED, [0] * (1 + len(sharding.params))
    with agreed(control, "load_state_dict()", _explain) as declared:
        given = read()
        layout = sharding.update_layout(groups)
        ranks = range(layout.plan.world_size)
        if isinstance(from_rank, bool) or from_rank not in (None, *ranks):
            raise ValueError(f"load_state_dict(from_rank={from_rank}): there are ranks 0 to {ranks[-1]}")
        if from_rank not in (None, rank) and given:
            raise ValueError(f"load_state_dict(from_rank={from_rank}): hand rank {rank} an empty dict, and not its own")
        is_empty = isinstance(given, Mapping) and not given and from_rank != rank
        added = sharding.local.added
        checked = None if is_empty else check_state_dict(given, groups, layout.plan, schema, metadata, added)
        if checked is not None:
            form, checksums = checked.form(rank, layout.plan), checked.checksums(layout.plan)
            hands_out = rank == (holder if from_rank is None else from_rank) and form is Given.WHOLE
            receivers = ranks if hands_out else [] if form is Given.LACKING and holder is not None else [rank]
            parts = {receiver: checked.part_of(receiver, layout.plan) for receiver in receivers}
            if rank in parts:
                # Tensors stay on their devices, but share no memory with the state dict.
                parts[rank] = LoadedPart(**copy_value(vars(parts[rank])))
        structure = checked.structure if checked is not None and from_rank is None else ""
        kind = {"from_rank of load_state_dict()": from_rank, "its state dict": "given" if structure else "empty"}
        kind["added state"] = ", ".join(sorted(added.names))
        declared.set(replace(layout.declaration, settings={**layout.declaration.settings, **kind}))
        declared.digest ^= int.from_bytes(hashlib.sha256(structure.encode()).digest()[:8], "big") >> 1
        declared.flag = checked is not None
    if not control.flagged:
        return False
    if from_rank is None:
        from_rank = _source(control, form, checksums, holder)
    part = _handed_out(control, parts, from_rank)
    take_over(sharding, layout, metadata, "load_state_dict()", lambda: _install(sharding.local, part))
    sharding.local.added.load(sharding.local.optim.state)
    sync_groups(sharding.local.optim.param_groups, groups)
    # Frozen tensors that now have state stay with the rank that holds it when they are unfrozen.
    sharding.pin(frozenset(part.stateful), groups)
    return True


def take_over(
    sharding: Sharding, layout: Layout, metadata: StateMetadata, operation: str, install: Callable[[], None]
) -> None:
    """Adopt a layout that ranks have agreed on, and install state on all ranks, or on none. Collective.

    Args:
        sharding: whose local optimizer takes the state.
        layout: the new layout.
        metadata: brought up to date.
        operation: for errors.
        install: replaces the state and the param groups of the local optimizer; it does not change the old ones.

    Raises:
        Exception: an error of any rank, on every rank. Local optimizers are unchanged then.
    """
    inner = sharding.local.optim
    before = (inner.state, inner.param_groups)
    try:
        with agreed(sharding.control, f"the end of {operation}"):
            if layout is not sharding.layout:
                sharding.adopt(layout, sharding.groups)
            install()
        metadata.exchange(f"the state after {operation}")
    except BaseException:
        inner.state, inner.param_groups = before
        raise


def _source(control: Control, form: Given, checksums: Sequence[int], holder: int | None) -> int | None:
    """Compare what ranks were handed. Collective.

    Returns:
        The rank that hands out the values: the one that has the consolidated state, if the others' state dicts lack
        theirs; None if each rank has its own.

    Raises:
        DisagreementError: if ranks were handed different values, or only placeholders.
    """
    told = control.gather_ints([form, *checksums], "load_state_dict()")
    forms = [Given(each) for each, *_ in told]
    for of_tensor in zip(*[of_rank[1:] for of_rank in told], strict=True):
        having = [rank for rank, checksum in enumerate(of_tensor) if checksum]
        different = [rank for rank in having if of_tensor[rank] != of_tensor[having[0]]]
        if different:
            raise DisagreementError(
                f"load_state_dict(): rank {different[0]} differs from rank {having[0]}: {_DIFFERENT}"
            )
    if Given.LACKING not in forms:
        return None
    if holder is None or forms[holder] is not Given.WHOLE:
        raise DisagreementError(
            f"load_state_dict(): rank {forms.index(Given.LACKING)} was handed placeholders for what it owns, as "
            f"state_dict() lists while another rank has the consolidated state, and no rank was handed that state. "
            f"Hand in what state_dict() lists now on every rank, or all values on one rank, with from_rank"
        )
    return holder


def _handed_out(control: Control, parts: Mapping[int, LoadedPart], from_rank: int | None) -> LoadedPart:
    """Return the part of this rank, which may come from another one. Collective."""
    rank = control.ranks.rank
    if from_rank is None or control.is_single_rank:
        return parts[rank]
    with agreed(control, "load_state_dict()"):
        if rank == from_rank:
            write_value([vars(part) for part in parts.values()], [], "what load_state_dict() hands to other ranks")
    if rank != from_rank:
        return LoadedPart(**receive_value(control, from_rank))
    for peer in control.ranks.peers:
        send_value(control, peer, vars(parts[peer]))
    return parts[rank]


def _explain(here: str, there: str, rank: int, other: int) -> str:
    return explain_configs(here, there, rank, other) or _DIFFERENT


def _install(local: LocalOptimizer, part: LoadedPart) -> None:
    """Hand state to the inner optimizer through its own ``load_state_dict``, which casts and moves it."""
    inner = local.optim
    position = {tensor: number for number, tensor in enumerate(parameters_of(inner.param_groups))}
    packed = [
        {**saved, "params": [position[tensor] for tensor in group["params"]]}
        for saved, group in zip(part.groups, inner.param_groups, strict=True)
    ]
    by_position = {
        position[local.shards[key].tensor] if isinstance(key, int) else key: entries
        for key, entries in local.added.set_apart(part.state).items()
    }
    inner.load_state_dict({"state": by_position, "param_groups": packed})
    local.added.list_loaded(inner.state)

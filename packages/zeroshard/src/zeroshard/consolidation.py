"""Saving: the state of all shards, as one optimizer without sharding would have it, on one rank's CPU."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from zeroshard_comm import Control, Manifest, gather
from zeroshard_core import Plan, Shard, StateMapError, storage_view

from zeroshard.local import LocalOptimizer, sync_groups
from zeroshard.param_groups import ParamGroup
from zeroshard.statevalues import read_value, write_value

StateDict = dict[str, Any]


def describe_local(local: LocalOptimizer, plan: Plan) -> Manifest:
    """Describe all state that this rank holds.

    Returns:
        A manifest; its description is a list of ``[tensor, start, stop, {key: entry}]``, one per owned shard with
        state, and a last item with the state that belongs to no parameter.

    Raises:
        StateMapError: if an entry cannot be moved, naming it.
    """
    tensors: list[torch.Tensor] = []
    shards = []
    owned = {piece.tensor: index for index, piece in local.pieces.items()}
    for index, piece in local.pieces.items():
        entries = local.optim.state.get(piece.tensor)
        if not entries:
            continue
        name = plan.tensors[index].name
        written = {}
        for key, value in entries.items():
            if not isinstance(key, str):
                raise StateMapError(f"the state of {name!r} has the key {key!r}; only strings can be saved")
            if piece.is_cut:
                value = _part_of_state(name, key, value, piece.tensor)
            written[key] = write_value(value, tensors, f"state entry {key!r} of {name!r}")
        shards.append([index, piece.shard.start, piece.shard.stop, written])
    loose = {
        key: write_value(value, tensors, f"state entry {key!r}")
        for key, value in local.optim.state.items()
        if isinstance(key, str) and key not in owned
    }
    return Manifest([shards, loose], tensors)


class Assembly:
    """Makes room for the shards of all ranks and holds the whole state once they have arrived.

    Args:
        plan: who owns what.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.state: dict[Any, dict[str, Any]] = {}
        """State by tensor index, tensors on the CPU; complete only after the transfer."""
        self._givers: dict[tuple[int, str], set[int]] = {}
        """Per entry of a cut tensor, the ranks that have sent a part of it."""

    def place(self, rank: int, description: Any) -> Sequence[torch.Tensor]:  # noqa: ANN401 - JSON
        """Make room for what one rank sends; see :func:`zeroshard_comm.gather`.

        Raises:
            StateMapError: if the description names shards that the plan does not give to that rank, parts of an entry
                differ in kind, or the last rank has been placed and a part of a cut tensor's state has not come.
        """
        rooms: list[torch.Tensor] = []
        shards, loose = description
        owned = {shard.tensor: shard for shard in self._plan.of_rank(rank)}
        for index, start, stop, written in shards:
            shard = owned.get(index)
            if shard is None or (shard.start, shard.stop) != (start, stop):
                raise StateMapError(
                    f"rank {rank} sends state of rows {start} to {stop} of tensor {index}, which it does not own"
                )
            whole = not self._plan.is_cut(index)
            entries = self.state.setdefault(index, {})
            for key, entry in written.items():
                if whole:
                    entries[key] = read_value(entry, _room_maker(rooms))
                else:
                    self._place_part(entries, key, entry, shard, rooms)
                    self._givers.setdefault((index, key), set()).add(rank)
        for key, entry in loose.items():
            value = read_value(entry, _room_maker(rooms))
            self.state.setdefault(key, value)
        if rank == self._plan.world_size - 1:
            self._check_complete()
        return rooms

    def finished(self) -> dict[Any, Any]:
        """Return the state with tensor indices ascending, and what belongs to no tensor behind them."""
        indices = sorted(key for key in self.state if isinstance(key, int))
        return {key: self.state[key] for key in (*indices, *(k for k in self.state if not isinstance(k, int)))}

    def _check_complete(self) -> None:
        for (index, key), givers in self._givers.items():
            lacking = [shard.rank for shard in self._plan.of_tensor(index) if shard.rank not in givers]
            if lacking:
                raise StateMapError(
                    f"tensor {index} {self._plan.tensors[index].name!r} has the state entry {key!r} on rank "
                    f"{min(givers)}, but not on rank {lacking[0]}, which owns a part of it. If a step has failed "
                    f"there, take one that succeeds, or load a checkpoint, before you consolidate"
                )

    def _place_part(
        self,
        entries: dict[str, Any],
        key: str,
        entry: Any,  # noqa: ANN401 - JSON
        shard: Shard,
        rooms: list[torch.Tensor],
    ) -> None:
        spec = self._plan.tensors[shard.tensor]
        shape = [*spec.shape[: shard.dim], shard.stop - shard.start, *spec.shape[shard.dim + 1 :]]
        per_element = isinstance(entry, dict) and "tensor" in entry and entry["tensor"][1] == shape
        known = entries.get(key)
        dtype = read_value(entry, lambda dtype, _s, _t: torch.empty(0, dtype=dtype)).dtype if per_element else None
        if key in entries and dtype != (known.dtype if isinstance(known, torch.Tensor) and known.dim() > 0 else None):
            raise StateMapError(
                f"the state entry {key!r} of tensor {shard.tensor} {spec.name!r} is of another dtype or kind in rows "
                f"{shard.start} to {shard.stop}, on rank {shard.rank}, than in those before"
            )
        if per_element:
            if key not in entries:
                entries[key] = (
                    torch.empty(spec.shape, dtype=dtype, device="cpu")
                    if spec.stride is None
                    else torch.empty_strided(spec.shape, spec.stride, dtype=dtype, device="cpu")
                )
            rooms.append(storage_view(entries[key])[shard.flat])
            return
        # Numbers of the whole tensor, such as a step count, are the same with every part.
        value = read_value(entry, _room_maker(rooms))
        entries.setdefault(key, value)


def consolidate(
    control: Control,
    local: LocalOptimizer,
    plan: Plan,
    groups: Sequence[ParamGroup],
    target: int,
    operation: str,
) -> StateDict | None:
    """Bring the state of all ranks to the CPU of ``target``. Collective.

    Each rank sends its tensors one by one; a rank that is not the target allocates at most one chunk.

    Args:
        control: the channel of the group.
        local: this rank's local optimizer.
        plan: who owns what.
        groups: the public param groups, whose hyperparameters are saved, and copied to the local optimizer.
        target: group rank.
        operation: named in errors.

    Returns:
        On ``target`` a state_dict as the unsharded optimizer would give it; None elsewhere.

    Raises:
        StateMapError: if an entry cannot be moved, or only some owners of a cut tensor have it, on every rank.
        Exception: if a hyperparameter cannot be copied, or the groups are not those of the local optimizer, on every
            rank.
        PeerLostError: if a rank is gone.
    """
    manifest, packed = Manifest([[], {}], []), list[dict[str, Any]]()
    failure: Exception | None = None
    try:
        sync_groups(groups, local.optim.param_groups)
        manifest = describe_local(local, plan)
        packed = pack_groups(groups)
    except Exception as error:  # noqa: BLE001 - every rank must hear of it, whatever it is
        failure = error
    try:
        control.check_consistent(f"{operation}: describing state", error=failure)
    finally:
        # A frame that keeps an error which passes through it keeps itself alive, and the model.
        del failure
    assembly = Assembly(plan)
    gather(control, manifest, target, assembly.place, operation=operation)
    if control.ranks.rank != target:
        return None
    state = assembly.finished()
    return {"state": _mark_unstepped(state, plan), "param_groups": packed}


def pack_groups(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copy param groups with integer indices in place of parameters, tensors in them brought to the CPU."""
    packed = []
    first = 0
    for group in groups:
        attributes = {key: _on_cpu(value) for key, value in group.items() if key != "params"}
        packed.append({**attributes, "params": list(range(first, first + len(group["params"])))})
        first += len(group["params"])
    return packed


def _mark_unstepped(state: dict[Any, Any], plan: Plan) -> dict[Any, Any]:
    """Say of tensors that were never stepped that they have no state, so that a load can tell them from lost ones.

    Of frozen ones too: whoever loads the state may have unfrozen them.
    """
    stateful_groups = {plan.tensors[key].group for key in state if isinstance(key, int)}
    unstepped: dict[int, dict[str, Any]] = {
        index: {} for index, spec in enumerate(plan.tensors) if spec.group in stateful_groups and index not in state
    }
    indices = sorted({*unstepped, *(key for key in state if isinstance(key, int))})
    rest = {key: value for key, value in state.items() if not isinstance(key, int)}
    return {**{index: state.get(index, {}) for index in indices}, **rest}


def _part_of_state(name: str, key: str, value: object, part: torch.Tensor) -> object:
    """A state entry of a part of a tensor, laid out in memory as the part is: so its bytes are sent."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    if value.shape != part.shape:
        raise StateMapError(
            f"state entry {key!r} of {name!r} has shape {tuple(value.shape)} for a part of shape {tuple(part.shape)}, "
            f"so it is not elementwise and cannot be joined; use partition='whole' for this optimizer"
        )
    return value if value.stride() == part.stride() else torch.empty_like(part, dtype=value.dtype).copy_(value)


def _room_maker(rooms: list[torch.Tensor]) -> Any:  # noqa: ANN401 - a callback of read_value
    def make(dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int] | None) -> torch.Tensor:
        made = (
            torch.empty(tuple(shape), dtype=dtype, device="cpu")
            if stride is None
            else torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device="cpu")
        )
        rooms.append(storage_view(made))
        return made

    return make


def _on_cpu(value: object) -> object:
    return value.detach().clone().cpu() if isinstance(value, torch.Tensor) else copy.deepcopy(value)

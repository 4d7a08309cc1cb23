"""Makes the ``state_dict()`` of one rank: its own values, and placeholders for the values of other ranks."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from zeroshard_core import TensorSpec

from zeroshard.changes import Changes
from zeroshard.local.optimizer import LocalOptimizer
from zeroshard.local.shard import LocalShard
from zeroshard.plan.groups import pack_groups
from zeroshard.state.consolidate import copy_groups
from zeroshard.state.metadata import StateMetadata, label_of
from zeroshard.state.placeholder import INCOMPLETE, StatePlaceholder, TensorWithoutValues

StateDict = dict[Any, Any]


class PartialState(dict[Any, Any]):
    """A state dict, or its ``"state"``, that lacks the values of other ranks. It can be copied, but not pickled.

    Copies, deep copies and mappings built by its class are of this class too.
    """

    def copy(self) -> PartialState:
        """Return a copy with the same values."""
        return PartialState(self)

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> PartialState:
        """Return a copy with copies of the values."""
        copied = memo[id(self)] = PartialState()
        copied.update({copy.deepcopy(key, memo): copy.deepcopy(value, memo) for key, value in self.items()})
        return copied

    def __reduce_ex__(self, protocol: Any) -> NoReturn:  # noqa: ANN401 - as in object
        """Raise a RuntimeError, because a pickle would lack the values of other ranks."""
        raise RuntimeError(
            f"this state_dict() has only the values of one rank; saving it would lose the state of the other ranks. "
            f"{INCOMPLETE}. Call consolidate_state_dict(to=RANK) on all ranks first, and save that rank's state_dict() "
            f"to a new file; or save it on all ranks with torch.distributed.checkpoint, in a thread and not in another "
            f"process"
        )


def check_whole(checkpoint: object) -> None:
    """Raise if a checkpoint lacks values of other ranks. Call this before you open a file. Not collective.

    ``torch.save`` empties its file before it raises, so a checkpoint with the same name would be lost.

    Args:
        checkpoint: the object to save. The search enters dicts, lists and tuples at any depth.

    Raises:
        RuntimeError: if it has a :meth:`~zeroshard.ZeroRedundancyOptimizer.state_dict` with placeholders, or a sharded
            gradient.
    """
    if isinstance(checkpoint, PartialState | TensorWithoutValues):
        checkpoint.__reduce_ex__(2)
    if isinstance(checkpoint, Mapping):
        checkpoint = checkpoint.values()
    elif not isinstance(checkpoint, list | tuple):
        return
    for item in checkpoint:
        check_whole(item)


def list_state(local: LocalOptimizer, metadata: StateMetadata, changes: Changes) -> StateDict:
    """List the whole state in the form of the unsharded optimizer's state dict, without communication."""
    plan = local.plan
    # List the groups as they are now, as the unsharded optimizer and the other ranks do.
    packed = pack_groups(local.groups)
    if metadata.consolidated is not None:
        whole = metadata.consolidated
        state = {key: dict(value) if isinstance(value, dict) else value for key, value in whole.state.items()}
        # A value that was written on this rank since the step, even after the consolidation, takes precedence.
        for number, unchanged in enumerate(changes.unchanged()):
            written = whole.written.get(number, {}).items()
            packed[number].update({key: value for key, value in written if key in unchanged})
        return {"state": state, "param_groups": copy_groups(packed)}
    lists_own = metadata.consolidated_to is None
    state = {}
    # The rank with the consolidated state lists tensors that were never stepped as empty; the others list them too.
    stateful = {spec.group for index, spec in enumerate(plan.tensors) if not lists_own and metadata.placeholders(index)}
    for index, spec in enumerate(plan.tensors):
        shard = local.shards.get(index) if lists_own else None
        own = local.state_of(shard) if shard is not None else None
        if shard is not None and own is not None:
            state[index] = _own_entries(shard, spec, own)
        elif (shard is None and index in metadata.described) or spec.group in stateful:
            state[index] = metadata.placeholders(index)
    state |= local.other_state()
    if plan.world_size == 1 or not (state or metadata.has_changed()):
        return {"state": state, "param_groups": packed}
    return PartialState({"state": PartialState(state), "param_groups": packed})


def _own_entries(shard: LocalShard, spec: TensorSpec, entries: object) -> object:
    """Return the entries of a shard of this rank. Entries of a cut tensor become placeholders that hold its part."""
    if not isinstance(entries, Mapping):
        return entries
    if not shard.is_cut:
        return dict(entries)
    return {
        key: StatePlaceholder(spec.shape, value.dtype, value.device, label_of(key, spec), value, shard.shard)
        if isinstance(value, torch.Tensor) and value.dim() > 0
        else value
        for key, value in entries.items()
    }

"""``state_dict()`` of one rank: its own values, and placeholders for the values of other ranks."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from zeroshard_core import TensorSpec

from zeroshard.local.optimizer import LocalOptimizer
from zeroshard.local.shard import LocalShard
from zeroshard.plan.groups import pack_groups
from zeroshard.plan.hyperparameters import Hyperparameters
from zeroshard.state.consolidate import copy_groups
from zeroshard.state.metadata import StateMetadata, label_of
from zeroshard.state.placeholder import StatePlaceholder, TensorWithoutValues

StateDict = dict[Any, Any]


class PartialState(dict[Any, Any]):
    """A state dict, or the ``"state"`` of one, that lacks values of other ranks: it can be copied, but not pickled.

    Copies, deep copies and mappings built by its class are of this class too.
    """

    def copy(self) -> PartialState:
        """Return another with the same values."""
        return PartialState(self)

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> PartialState:
        """Return another with copies of the values."""
        copied = memo[id(self)] = PartialState()
        copied.update({copy.deepcopy(key, memo): copy.deepcopy(value, memo) for key, value in self.items()})
        return copied

    def __reduce_ex__(self, protocol: Any) -> NoReturn:  # noqa: ANN401 - as in object
        """Refuse to be pickled."""
        raise RuntimeError(
            "this state_dict() has only the values of one rank, and a file of it would lack the others'. Call "
            "consolidate_state_dict(to=RANK) on all ranks beforehand, and save state_dict() of that rank; or save it "
            "on all ranks with torch.distributed.checkpoint, in a thread and not in another process"
        )


def check_whole(checkpoint: object) -> None:
    """Raise the error of saving what lacks values of other ranks, before a file is opened. Not collective.

    ``torch.save`` empties its file before it finds out, so that a checkpoint under the same name is lost.

    Args:
        checkpoint: what is going to be pickled: dicts, lists and tuples are searched, however deep.

    Raises:
        RuntimeError: if it has a :meth:`~zeroshard.ZeroRedundancyOptimizer.state_dict` with placeholders, or a gradient
            that is sharded.
    """
    if isinstance(checkpoint, PartialState | TensorWithoutValues):
        checkpoint.__reduce_ex__(2)
    if isinstance(checkpoint, Mapping):
        checkpoint = checkpoint.values()
    elif not isinstance(checkpoint, list | tuple):
        return
    for item in checkpoint:
        check_whole(item)


def list_state(local: LocalOptimizer, metadata: StateMetadata, hyperparameters: Hyperparameters) -> StateDict:
    """List the whole state in the form of the unsharded optimizer's state dict, without communication."""
    plan, inner = local.plan, local.optim.state
    # As they are now: as without sharding, and as the other ranks list them.
    packed = pack_groups(local.groups)
    if metadata.consolidated is not None:
        whole = metadata.consolidated
        state = {key: dict(value) if isinstance(value, dict) else value for key, value in whole.state.items()}
        listed = []
        for number, group in enumerate(packed):
            # What was written here since the step, also after the consolidation, is listed as it is.
            unchanged = hyperparameters.unchanged(number, group)
            written = whole.written.get(number, {}).items()
            listed.append({**group, **{key: value for key, value in written if key in unchanged}})
        return {"state": state, "param_groups": copy_groups(listed)}
    lists_own = metadata.consolidated_to is None
    state = {}
    # A rank with the consolidated state lists what was never stepped as empty: the others list the same keys.
    stateful = {spec.group for index, spec in enumerate(plan.tensors) if not lists_own and metadata.placeholders(index)}
    for index, spec in enumerate(plan.tensors):
        shard = local.shards.get(index) if lists_own else None
        own = local.state_of(shard) if shard is not None else None
        if shard is not None and own is not None:
            state[index] = _own_entries(shard, spec, own)
        elif (shard is None and index in metadata) or spec.group in stateful:
            state[index] = metadata.placeholders(index)
    state |= {key: value for key, value in inner.items() if not isinstance(key, torch.Tensor)}
    if plan.world_size == 1 or not (state or metadata.has_changed()):
        return {"state": state, "param_groups": packed}
    return PartialState({"state": PartialState(state), "param_groups": packed})


def _own_entries(shard: LocalShard, spec: TensorSpec, entries: object) -> object:
    """Return the entries of a shard of this rank; of a cut tensor as placeholders that hold this rank's part."""
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

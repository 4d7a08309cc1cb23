"""Records which entries the state of each parameter has. Ranks exchange them when the entries of an owner change."""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from zeroshard_comm import Coordinator, agreed, all_gather_text
from zeroshard_core import TensorSpec

from zeroshard.changes import Changes
from zeroshard.local.optimizer import LocalOptimizer
from zeroshard.state.placeholder import StatePlaceholder, inner_tensors, map_leaves
from zeroshard.state.serialization import Described, Key, describe_entries, part_dtype, read_value

if TYPE_CHECKING:
    from zeroshard.state.consolidate import Consolidated


class StateMetadata:
    """The names, shapes and dtypes of the state on all ranks, as of the last :meth:`exchange`; the consolidated state.

    Attributes:
        described: the entries of each parameter that has state on any rank, by tensor index.
        consolidated_to: the rank that has the consolidated state; None if no rank has consolidated since the last step.
        consolidated: the whole state, and the values that steps wrote to param groups, on that rank; None elsewhere.
        keeps_none: whether init_state() has found that the optimizer keeps no state.
        tell: reports an error of this rank to the other ranks; see :meth:`Coordinator.tell`.
    """

    def __init__(self, coordinator: Coordinator, local: LocalOptimizer, changes: Changes) -> None:
        self._coordinator, self._local, self._changes = coordinator, local, changes
        self.tell = coordinator.tell
        self.described: dict[int, Described] = {}
        self._told = "{}"
        self.keeps_none = False
        self.drop_consolidated()

    def drop_consolidated(self) -> None:
        """Drop the consolidated state, which is stale after a change."""
        self.consolidated_to: int | None = None
        self.consolidated: Consolidated | None = None

    def forget(self, index: int | None = None) -> None:
        """Forget the entries of one or all parameters. All ranks call it; the next step exchanges the other entries."""
        self._told = ""
        if index is None:
            self.described.clear()
        else:
            self.described.pop(index, None)

    def ever_trained(self) -> tuple[bool, ...]:
        """Return for each tensor whether it was trainable in a step or has state on any rank; equal on all ranks."""
        tensors = self._local.plan.tensors
        return tuple([spec.trainable or index in self.described for index, spec in enumerate(tensors)])

    def has_changed(self) -> bool:
        """Return True if the entries of this rank's state, or their kinds, differ from the last exchange."""
        if not self._changes.in_entries():
            return False
        try:
            is_new = self._mine() != self._told
        except Exception:  # noqa: BLE001 - the exchange raises any error on every rank
            return True
        if not is_new:
            self._changes.record_entries()
        return is_new

    def exchange(self, operation: str) -> None:
        """Exchange which entries each rank has; raise a ValueError if an entry cannot be sent. Collective."""
        coordinator = self._coordinator
        with agreed(coordinator, operation):
            mine = self._mine()
        described: dict[int, Described] = {}
        for of_rank in map(json.loads, all_gather_text(coordinator, mine, operation)):
            for index, entries in of_rank.items():
                # Owners of parts of one tensor have the same entries.
                described.setdefault(int(index), entries)
        self.described, self._told = described, mine
        self._changes.record_entries()

    def placeholders(self, index: int) -> dict[Key, Any]:
        """Return placeholders for the state of a parameter on other ranks, by its tensor index."""
        spec, param = self._local.plan.tensors[index], self._local.params[index]
        entries: dict[Key, Any] = {}
        for key, described in self.described.get(index, ()):
            dtype = part_dtype(described)
            written = {"tensor": [dtype, spec.shape, None, param.device.type]} if dtype else described
            entries[key] = read_value(written, partial(self._placeholder, label_of(key, spec), param.device))
        return entries

    def _placeholder(
        self, title: str, device: torch.device, dtype: torch.dtype, shape: Sequence[int], _: object, kind: str
    ) -> StatePlaceholder:
        made = StatePlaceholder(shape, dtype, device if kind == device.type else torch.device(kind), title)
        made.coordinator = weakref.ref(self._coordinator)
        return made

    def _mine(self) -> str:
        """Return the description of this rank's state: the kind of each entry."""
        local, tensors = self._local, self._local.plan.tensors
        described = {}
        for index, shard in local.shards.items():
            entries = local.state_of(shard)
            if entries is not None:
                kinds = map_leaves(entries, self._kind)
                described[index] = describe_entries(shard, kinds, tensors[index].name, [])
        return json.dumps(described)

    @staticmethod
    def _kind(value: Any) -> Any:  # noqa: ANN401 - a state entry
        """Return the value, or a tensor in place of a number or a string, because ranks do not exchange values."""
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            return torch.empty((), dtype=value.dtype, device=value.device).expand(value.shape)
        if value is None or isinstance(value, torch.Tensor):
            return inner_tensors(value) or value
        if isinstance(value, (bool, int, float)):
            return torch.tensor(value, device="cpu")
        return torch.empty((), dtype=torch.uint8, device="cpu") if isinstance(value, str) else value


def label_of(key: object, spec: TensorSpec) -> str:
    """Return the name of an entry, for errors."""
    return f"state entry {key!r} of {spec.name!r}"

"""Knows which entries the state of each parameter has. Ranks exchange this when the entries of an owner change."""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from zeroshard_comm import Coordinator, agreed, all_gather_text
from zeroshard_core import TensorSpec

from zeroshard.local.optimizer import LocalOptimizer
from zeroshard.state.placeholder import StatePlaceholder, inner_tensors, map_leaves
from zeroshard.state.serialization import Described, Key, describe_entries, part_dtype, read_value

if TYPE_CHECKING:
    from zeroshard.state.consolidate import Consolidated


class StateMetadata:
    """Names, shapes and dtypes of the state on all ranks, which only :meth:`exchange` changes; the consolidated state.

    Args:
        coordinator: agrees on the process group.
        local: has the state of this rank.

    Attributes:
        consolidated_to: the rank that has the consolidated state; None if no rank has consolidated since the last step.
        consolidated: the whole state, and the values that steps wrote to param groups, on that rank; None elsewhere.
        keeps_none: whether init_state() has found that the optimizer keeps no state.
    """

    def __init__(self, coordinator: Coordinator, local: LocalOptimizer) -> None:
        self._coordinator, self._local = coordinator, local
        self._described: dict[int, Described] = {}
        self._told = "{}"
        self._seen: list[Any] = []
        self.keeps_none = False
        self.drop_consolidated()

    def drop_consolidated(self) -> None:
        """Drop the consolidated state, which is stale after a change."""
        self.consolidated_to: int | None = None
        self.consolidated: Consolidated | None = None

    def forget(self, index: int | None = None) -> None:
        """Forget the entries of a parameter, or of all, which all ranks drop; the next step exchanges the rest."""
        self._told = ""
        if index is None:
            self._described.clear()
        else:
            self._described.pop(index, None)

    @property
    def is_empty(self) -> bool:
        """True if no rank has any state."""
        return not self._described

    def __contains__(self, index: int) -> bool:
        """Return True if the parameter with this tensor index has state on any rank."""
        return index in self._described

    def has_changed(self) -> bool:
        """Return True if the entries of this rank's state, or their kinds, differ from the last exchange."""
        values = self._values()
        if len(values) == len(self._seen) and all(map(_is_same, self._seen, values)):
            return False
        try:
            is_new = self._mine() != self._told
        except Exception:  # noqa: BLE001 - the exchange raises any error on every rank
            return True
        self._seen = self._seen if is_new else list(map(_seen, values))
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
        self._described, self._told, self._seen = described, mine, list(map(_seen, self._values()))

    def placeholders(self, index: int) -> dict[Key, Any]:
        """Return placeholders for the state of a parameter on other ranks, by its tensor index."""
        spec, param = self._local.plan.tensors[index], self._local.params[index]
        entries: dict[Key, Any] = {}
        for key, described in self._described.get(index, ()):
            dtype = part_dtype(described)
            written = {"tensor": [dtype, spec.shape, None, param.device.type]} if dtype else described
            entries[key] = read_value(written, partial(_placeholder, label_of(key, spec), param.device))
        return entries

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
        """Return the value, or a tensor in place of a number or text, because ranks exchange no values."""
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            return torch.empty((), dtype=value.dtype, device=value.device).expand(value.shape)
        if value is None or isinstance(value, torch.Tensor):
            return inner_tensors(value) or value
        if isinstance(value, (bool, int, float)):
            return torch.tensor(value, device="cpu")
        return torch.empty((), dtype=torch.uint8, device="cpu") if isinstance(value, str) else value

    def _values(self) -> list[Any]:
        """Return the entries of this rank's state."""
        # This reads neither shapes nor dtypes of tensors, because that costs too much in a step.
        found: list[Any] = []
        local = self._local
        for shard in local.shards.values() if local.extra.kinds else ():
            found += local.extra.entries(shard).values()
        for entries in local.optim.state.values():
            found += entries.values() if isinstance(entries, dict) else (entries,)
        return found


def label_of(key: object, spec: TensorSpec) -> str:
    """Return the name of an entry, for errors."""
    return f"state entry {key!r} of {spec.name!r}"


def _seen(value: object) -> object:
    """Return a weak reference to a tensor, and the type of any other entry, for `_is_same`; None for a container."""
    if isinstance(value, (Mapping, list, tuple)):
        return None
    # The reference is weak, so that a tensor is freed when another one replaces it.
    return weakref.ref(value) if isinstance(value, torch.Tensor) else type(value)


def _is_same(seen: Any, value: object) -> bool:  # noqa: ANN401 - what `_seen` returns
    return value is not None and value is seen() if type(seen) is weakref.ref else seen is type(value)


def _placeholder(
    title: str, device: torch.device, dtype: torch.dtype, shape: Sequence[int], _: object, kind: str
) -> StatePlaceholder:
    return StatePlaceholder(shape, dtype, device if kind == device.type else torch.device(kind), title)

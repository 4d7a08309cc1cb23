"""``optimizer.state``: the state of all parameters. This rank's shards have the local optimizer's own dicts."""

from __future__ import annotations

from collections import ChainMap, defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, NoReturn

import torch

from zeroshard.local.optimizer import LocalOptimizer
from zeroshard.local.shard import LocalShard
from zeroshard.plan.layout import label_in
from zeroshard.state.listing import PartialState
from zeroshard.state.metadata import StateMetadata
from zeroshard.state.placeholder import TensorWithoutValues


class StateView(MutableMapping[Any, Any]):
    """The state of this rank's shards, which can be written, and placeholders for other ranks' shards.

    To assign or remove all entries of a parameter, make the same call on all ranks: only the owner's values change.
    Reads include extra entries (master weights, averages); writes go to the optimizer class's own dict. As
    in the ``state`` of a plain optimizer, looking up a parameter without entries adds an empty dict, if this rank owns
    the parameter. A copy of the view is a separate dict.
    """

    def __init__(self, local: LocalOptimizer, metadata: StateMetadata) -> None:
        self._local, self._metadata = local, metadata
        self._shards: dict[int, LocalShard] = {}
        self._places: dict[torch.Tensor, LocalShard | int] = {}

    def __getitem__(self, key: Any) -> Any:  # noqa: ANN401 - state holds anything
        place = self._place(key)
        if isinstance(place, int):
            entries = _OthersEntries(self._metadata.placeholders(place))
            entries.title, entries.tell = label_in(self._local.plan, place), self._metadata.tell
            return entries
        own, extra = self._state_with(key)[self._local_key(key)], self._extra(key)
        return ChainMap(own, extra) if extra else own

    def __setitem__(self, key: Any, value: Any) -> None:  # noqa: ANN401 - state holds anything
        if isinstance(self._place(key), int):
            return
        names = self._local.extra.names
        if names and isinstance(value, Mapping):
            value = {name: entry for name, entry in value.items() if name not in names}
        self._state_with(key)[self._local_key(key)] = value

    def __delitem__(self, key: Any) -> None:  # noqa: ANN401 - state holds anything
        place = self._place(key)
        if key not in self:
            raise KeyError(key)
        if place is not None:
            self._metadata.forget(place if isinstance(place, int) else place.index)
        if isinstance(place, LocalShard):
            self._local.extra.drop_entries(place)
        if not isinstance(place, int):
            self._state_with(key).pop(self._local_key(key), None)

    def __iter__(self) -> Iterator[Any]:
        # Iterate over a list of the current keys, because the caller may replace entries meanwhile.
        params = [param for param in self._local.params if param in self]
        known = {self._local_key(param) for param in params}
        return iter([*params, *[key for state in self._local.states for key in state if key not in known]])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __bool__(self) -> bool:
        # torch.distributed.checkpoint steps if this is False.
        return self._metadata.keeps_none or len(self) > 0

    def __contains__(self, key: object) -> bool:
        place = self._place(key)
        if isinstance(place, int):
            return place in self._metadata.described
        local_key = self._local_key(key)
        return any(local_key in state for state in self._local.states) or bool(self._extra(key))

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (dict, dict(self))

    def get(self, key: Any, default: Any = None) -> Any:  # noqa: ANN401 - state holds anything
        """Return the entries of ``key``, or ``default``. Adds nothing."""
        if key not in self:
            return default
        return self[key]

    def clear(self) -> None:
        """Drop all state that this rank owns."""
        for state in self._local.states:
            state.clear()
        self._metadata.forget()
        for shard in self._local.shards.values():
            self._local.extra.drop_entries(shard)

    def popitem(self) -> NoReturn:
        """Raise a RuntimeError, because repeated calls would return the same item of another rank."""
        raise RuntimeError("optimizer.state.popitem() is not supported: call pop(param) on all ranks, or clear()")

    def pop(self, key: Any, *default: Any) -> Any:  # noqa: ANN401 - state holds anything
        """Remove and return the entries of ``key``. If there are none, return ``default``, or raise a KeyError."""
        if key not in self:
            return self._state_with(key).pop(self._local_key(key), *default)
        value = self[key]
        del self[key]
        return value

    def setdefault(self, key: Any, default: Any = None) -> Any:  # noqa: ANN401 - state holds anything
        """Return the entries of ``key``; set them to ``default`` first if there are none."""
        if key not in self:
            self[key] = default
        return self[key]

    def replace(self, value: Mapping[Any, Any]) -> None:
        """Replace all state that this rank owns."""
        given = [*value.items()]
        self.clear()
        self.update(given)

    def _state_with(self, key: object) -> Any:  # noqa: ANN401 - a defaultdict, keyed by tensors for torch and by anything for optimizers
        """Return the state of the inner optimizer that has a key, or would have it."""
        place, members = self._place(key), self._local.members
        if isinstance(place, LocalShard):
            return self._local.member_of(place.index).state
        if len(members) > 1:
            # A key that belongs to no parameter belongs to no class.
            raise KeyError(key)
        return members[0].state

    def _place(self, key: object) -> LocalShard | int | None:
        """Return this rank's shard of a parameter, or the index of another rank's parameter; None for other keys."""
        if self._shards is not self._local.shards:
            # A change of the shards always makes another dict.
            self._shards = shards = self._local.shards
            self._places = {param: shards.get(index, index) for index, param in enumerate(self._local.params)}
        return self._places.get(key) if isinstance(key, torch.Tensor) else None

    def _local_key(self, key: Any) -> Any:  # noqa: ANN401 - state has keys of any kind
        place = self._place(key)
        return place.tensor if isinstance(place, LocalShard) else key

    def _extra(self, key: object) -> dict[str, torch.Tensor]:
        """Return the entries that are not the optimizer class's own."""
        place = self._place(key)
        return self._local.extra.entries(place) if isinstance(place, LocalShard) else {}


class _OthersEntries(PartialState):
    """Placeholders for the state of another rank's parameter, which this rank cannot change."""

    title = "this parameter"
    tell: Callable[[Exception], None]

    def __setitem__(self, key: Any, value: Any) -> None:  # noqa: ANN401 - state holds anything
        # Frameworks move the tensors of a state to a device, and write them back.
        if not isinstance(value, TensorWithoutValues):
            self._refuse()

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        error = RuntimeError(
            f"the optimizer state of {self.title} belongs to other ranks, and its entries cannot be changed on this "
            f"rank. Assign optimizer.state[param] = {{...}} on all ranks, and only its owner uses it; or change "
            f"optimizer.optim.state on every rank, which has the rank's own entries"
        )
        self.tell(error)
        raise error

    __delitem__ = __ior__ = pop = popitem = clear = setdefault = update = _refuse

"""``optimizer.state``: the state of all parameters; this rank's shards are the local optimizer's own dicts."""

from __future__ import annotations

from collections import ChainMap, defaultdict
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, NoReturn

import torch

from zeroshard.local.optimizer import LocalOptimizer
from zeroshard.local.shard import LocalShard
from zeroshard.plan.layout import label_in
from zeroshard.state.listing import PartialState
from zeroshard.state.metadata import StateMetadata


class StateView(MutableMapping[Any, Any]):
    """The state of this rank's shards, which can be written, and placeholders for other ranks' shards.

    A parameter's entries are assigned and removed as a whole by the same call on all ranks: its owner does it, and the
    others do nothing. Extra entries (master weights, averages) are merged into what is read; writes go to the
    optimizer class's own dict. As with an optimizer's own ``state``, looking up what is not there puts an empty dict
    there, where this rank owns the parameter. A copy of the view is a dict of its own.
    """

    def __init__(self, local: LocalOptimizer, metadata: StateMetadata) -> None:
        self._local, self._metadata = local, metadata
        self._shards: dict[int, LocalShard] = {}
        self._places: dict[torch.Tensor, LocalShard | int] = {}

    def __getitem__(self, key: Any) -> Any:  # noqa: ANN401 - state holds anything
        place = self._place(key)
        if isinstance(place, int):
            entries = _OthersEntries(self._metadata.placeholders(place))
            entries.title = label_in(self._local.plan, place)
            return entries
        own, extra = self._state[self._local_key(key)], self._extra(key)
        return ChainMap(own, extra) if extra else own

    def __setitem__(self, key: Any, value: Any) -> None:  # noqa: ANN401 - state holds anything
        if isinstance(self._place(key), int):
            return
        names = self._local.extra.names
        if names and isinstance(value, Mapping):
            value = {name: entry for name, entry in value.items() if name not in names}
        self._state[self._local_key(key)] = value

    def __delitem__(self, key: Any) -> None:  # noqa: ANN401 - state holds anything
        place = self._place(key)
        if key not in self:
            raise KeyError(key)
        if isinstance(place, int):
            return
        if isinstance(place, LocalShard):
            self._local.extra.drop_entries(place)
        self._state.pop(self._local_key(key), None)

    def __iter__(self) -> Iterator[Any]:
        # Over the keys there are now: entries may be replaced meanwhile.
        params = [param for param in self._local.params if param in self]
        known = {self._local_key(param) for param in params}
        return iter([*params, *[key for key in self._state if key not in known]])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __bool__(self) -> bool:
        # torch.distributed.checkpoint makes a step where this is False.
        return self._metadata.keeps_none or len(self) > 0

    def __contains__(self, key: object) -> bool:
        place = self._place(key)
        if isinstance(place, int):
            return place in self._metadata
        return self._local_key(key) in self._state or bool(self._extra(key))

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (dict, dict(self))

    def get(self, key: Any, default: Any = None) -> Any:  # noqa: ANN401 - state holds anything
        """Return the entries of ``key``, or ``default``; adds nothing."""
        if key not in self:
            return default
        return self[key]

    def clear(self) -> None:
        """Drop the state of what this rank owns."""
        self._state.clear()
        for shard in self._local.shards.values():
            self._local.extra.drop_entries(shard)

    def popitem(self) -> NoReturn:
        """Refuse: what other ranks own would be returned again and again."""
        raise RuntimeError("optimizer.state.popitem() is not supported: call pop(param) on all ranks, or clear()")

    def pop(self, key: Any, *default: Any) -> Any:  # noqa: ANN401 - state holds anything
        """Remove and return the entries of ``key``, or return ``default``; a KeyError if neither is there."""
        if key not in self:
            return self._state.pop(self._local_key(key), *default)
        value = self[key]
        del self[key]
        return value

    def setdefault(self, key: Any, default: Any = None) -> Any:  # noqa: ANN401 - state holds anything
        """Return the entries of ``key``, which become ``default`` if it has none."""
        if key not in self:
            self[key] = default
        return self[key]

    def replace(self, value: Mapping[Any, Any]) -> None:
        """Replace the state of what this rank owns."""
        given = [*value.items()]
        self._local.optim.state = defaultdict(dict)
        self.update(given)

    @property
    def _state(self) -> Any:  # noqa: ANN401 - a defaultdict, keyed by tensors for torch and by anything for optimizers
        return self._local.optim.state

    def _place(self, key: object) -> LocalShard | int | None:
        """This rank's shard of a parameter, or the index of one that belongs to other ranks; None for other keys."""
        if self._shards is not self._local.shards:
            # Shards come and go only in another dict of them.
            self._shards = shards = self._local.shards
            self._places = {param: shards.get(index, index) for index, param in enumerate(self._local.params)}
        return self._places.get(key) if isinstance(key, torch.Tensor) else None

    def _local_key(self, key: Any) -> Any:  # noqa: ANN401 - state has keys of any kind
        place = self._place(key)
        return place.tensor if isinstance(place, LocalShard) else key

    def _extra(self, key: object) -> dict[str, torch.Tensor]:
        """The entries that are not of the class."""
        place = self._place(key)
        return self._local.extra.entries(place) if isinstance(place, LocalShard) else {}


class _OthersEntries(PartialState):
    """Placeholders for the state of a parameter of other ranks, which this rank cannot write to."""

    title = "this parameter"

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise RuntimeError(
            f"the optimizer state of {self.title} belongs to other ranks, and its entries cannot be changed on this "
            f"one: assign optimizer.state[param] = {{...}} as a whole on all ranks, of which its owner takes it; or "
            f"change optimizer.optim.state on every rank, which has this rank's own entries"
        )

    __setitem__ = __delitem__ = __ior__ = pop = popitem = clear = setdefault = update = _refuse

"""``optimizer.state``: the state of all parameters; this rank's shards are the local optimizer's own dicts."""

from __future__ import annotations

from collections import ChainMap, defaultdict
from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from zeroshard.local.optimizer import LocalOptimizer
from zeroshard.local.shard import LocalShard
from zeroshard.state.listing import PartialState
from zeroshard.state.placeholder import StatePlaceholder, map_leaves

if TYPE_CHECKING:
    from zeroshard.engine import Engine


class StateView(MutableMapping[Any, Any]):
    """The state of this rank's shards, which can be written, and placeholders for other ranks' shards.

    Extra entries (master weights, averages) are merged into what is read; writes go to the optimizer class's own dict.
    As with an optimizer's own ``state``, looking up what is not there puts an empty dict there, where this rank owns
    the parameter. A copy of the view is a dict of its own.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._shards: dict[int, LocalShard] = {}
        self._places: dict[torch.Tensor, LocalShard | int] = {}

    def __getitem__(self, key: Any) -> Any:  # noqa: ANN401 - state holds anything
        others = self._others(key)
        if others is not None:
            return others
        own, extra = self._state[self._local_key(key)], self._extra(key)
        return ChainMap(own, extra) if extra else own

    def __setitem__(self, key: Any, value: Any) -> None:  # noqa: ANN401 - state holds anything
        others = self._others(key)
        if others is None:
            names = self._local.extra.names
            if names and isinstance(value, Mapping):
                value = {name: entry for name, entry in value.items() if name not in names}
            self._state[self._local_key(key)] = value
            return
        if not isinstance(value, Mapping):
            others.refuse()
        for each, written in value.items():
            others[each] = written

    def __delitem__(self, key: Any) -> None:  # noqa: ANN401 - state holds anything
        others, place = self._others(key), self._place(key)
        if others is not None:
            others.refuse()
        if isinstance(place, LocalShard) and self._extra(key):
            self._local.extra.drop_entries(place)
            self._state.pop(place.tensor, None)
        else:
            del self._state[self._local_key(key)]

    def __iter__(self) -> Iterator[Any]:
        # Over the keys there are now: entries may be replaced meanwhile.
        params = [param for param in self._engine.params if param in self]
        known = {self._local_key(param) for param in params}
        return iter([*params, *[key for key in self._state if key not in known]])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __bool__(self) -> bool:
        # torch.distributed.checkpoint makes a step where this is False.
        return self._engine.metadata.keeps_none or len(self) > 0

    def __contains__(self, key: object) -> bool:
        place = self._place(key)
        if isinstance(place, int):
            return place in self._engine.metadata
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
        """Drop the state of what this rank owns; other ranks drop their own."""
        self._state.clear()
        for shard in self._local.shards.values():
            self._local.extra.drop_entries(shard)

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
        """Take over another state of what this rank owns; entries of other ranks are left out."""
        replaced: defaultdict[Any, Any] = defaultdict(dict)
        for key, entries in value.items():
            if not isinstance(self._place(key), int):
                replaced[self._local_key(key)] = entries
        self._local.optim.state = replaced

    @property
    def _local(self) -> LocalOptimizer:
        return self._engine.local

    @property
    def _state(self) -> Any:  # noqa: ANN401 - a defaultdict, keyed by tensors for torch and by anything for optimizers
        return self._local.optim.state

    def _place(self, key: object) -> LocalShard | int | None:
        """This rank's shard of a parameter, or the index of one that belongs to other ranks; None for other keys."""
        if self._shards is not self._local.shards:
            # Shards come and go only in another dict of them.
            self._shards = shards = self._local.shards
            self._places = {param: shards.get(index, index) for index, param in enumerate(self._engine.params)}
        return self._places.get(key) if isinstance(key, torch.Tensor) else None

    def _local_key(self, key: Any) -> Any:  # noqa: ANN401 - state has keys of any kind
        place = self._place(key)
        return place.tensor if isinstance(place, LocalShard) else key

    def _extra(self, key: object) -> dict[str, torch.Tensor]:
        """The entries that are not of the class."""
        place = self._place(key)
        return self._local.extra.entries(place) if isinstance(place, LocalShard) else {}

    def _others(self, key: object) -> _OthersEntries | None:
        """The entries of a parameter that belongs to other ranks."""
        place = self._place(key)
        return _OthersEntries(self._engine.metadata.placeholders(place)) if isinstance(place, int) else None


class _OthersEntries(PartialState):
    """Placeholders for the state of a parameter of other ranks; one for the same entry may be written back."""

    def __setitem__(self, key: Any, value: Any) -> None:  # noqa: ANN401 - state holds anything
        held = self.get(key, self)
        if held is self or _shapes(value) != _shapes(held):
            self.refuse()
        super().__setitem__(key, value)

    def refuse(self, *_: object, **__: object) -> NoReturn:
        """Raise the error for what cannot be written here."""
        raise RuntimeError(
            "the optimizer state of this parameter belongs to other ranks, and cannot be changed on this one: load a "
            "changed state dict with load_state_dict()"
        )

    __delitem__ = __ior__ = pop = popitem = clear = setdefault = update = refuse


def _shapes(value: object) -> object:
    """What a placeholder must have to be written back: the shapes of the one that is there, in the same containers."""
    return map_leaves(value, lambda leaf: leaf.shape if isinstance(leaf, StatePlaceholder) else leaf is None)

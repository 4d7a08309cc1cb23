"""``optimizer.state``: the state of all parameters; this rank's shards are the local optimizer's own dicts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, NoReturn

import torch

from zeroshard.local.optimizer import LocalOptimizer
from zeroshard.local.shard import LocalShard
from zeroshard.sharding import Sharding
from zeroshard.state.listing import PartialState
from zeroshard.state.metadata import StateMetadata
from zeroshard.state.placeholder import StatePlaceholder


class StateView(MutableMapping[Any, Any]):
    """The state of this rank's shards, which can be written, and placeholders for other ranks' shards.

    As with an optimizer's own ``state``, looking up what is not there puts an empty dict there, where this rank owns
    the parameter. A copy of the view is a dict of its own.

    Args:
        sharding: has this rank's state, under a cut parameter's local tensor.
        metadata: describes the state of other ranks.
    """

    def __init__(self, sharding: Sharding, metadata: StateMetadata) -> None:
        self._sharding, self._metadata = sharding, metadata
        self._shards: dict[int, LocalShard] = {}
        self._tensors: dict[Any, torch.Tensor] = {}
        self._others: dict[Any, int] = {}

    def __getitem__(self, key: Any) -> Any:  # noqa: ANN401 - state holds anything
        index = self._other(key)
        return self._state[self._local_key(key)] if index is None else self._entries(index)

    def __setitem__(self, key: Any, value: Any) -> None:  # noqa: ANN401 - state holds anything
        index = self._other(key)
        if index is None:
            self._state[self._local_key(key)] = value
            return
        if not isinstance(value, Mapping):
            raise self._entries(index).refusal()
        for each, written in value.items():
            self._entries(index)[each] = written

    def __delitem__(self, key: Any) -> None:  # noqa: ANN401 - state holds anything
        if (index := self._other(key)) is not None:
            raise self._entries(index).refusal()
        del self._state[self._local_key(key)]

    def __iter__(self) -> Iterator[Any]:
        # Over the keys there are now: entries may be replaced meanwhile.
        params = [param for param in self._sharding.params if param in self]
        known = {self._local_key(param) for param in params}
        return iter([*params, *[key for key in self._state if key not in known]])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __bool__(self) -> bool:
        # torch.distributed.checkpoint makes a step where this is False.
        return self._metadata.keeps_none or len(self) > 0

    def __contains__(self, key: object) -> bool:
        index = self._other(key)
        return self._local_key(key) in self._state if index is None else index in self._metadata

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
        """Drop the state of what this rank owns; that of other ranks is theirs to drop."""
        self._state.clear()

    def pop(self, key: Any, *default: Any) -> Any:  # noqa: ANN401 - state holds anything
        """Remove and return the entries of ``key``, or return ``default``; a KeyError if neither is there."""
        if key not in self and default:
            return default[0]
        value = self[key] if key in self else self._state.pop(self._local_key(key))
        del self[key]
        return value

    def setdefault(self, key: Any, default: Any = None) -> Any:  # noqa: ANN401 - state holds anything
        """Return the entries of ``key``, which become ``default`` if it has none."""
        if key not in self:
            self[key] = default
        return self[key]

    @property
    def _local(self) -> LocalOptimizer:
        return self._sharding.local

    @property
    def _state(self) -> Any:  # noqa: ANN401 - a defaultdict, keyed by tensors for torch and by anything for optimizers
        return self._local.optim.state

    def _entries(self, index: int) -> _OthersEntries:
        return _OthersEntries(self._metadata.placeholders(index))

    def _other(self, key: object) -> int | None:
        """The tensor index of a parameter that this rank owns nothing of."""
        self._look_up()
        return self._others.get(key) if isinstance(key, torch.Tensor) else None

    def _local_key(self, key: Any) -> Any:  # noqa: ANN401 - state has keys of any kind
        self._look_up()
        return self._tensors.get(key, key)

    def _look_up(self) -> None:
        """Follow the plan. The dict of shards is replaced, and never changed."""
        if self._shards is not self._local.shards:
            self._shards = self._local.shards
            self._tensors = {shard.param: shard.tensor for shard in self._shards.values()}
            params = enumerate(self._sharding.params)
            self._others = {param: index for index, param in params if index not in self._shards}


class _OthersEntries(PartialState):
    """Placeholders for the state of a parameter of other ranks; one for the same entry may be written back."""

    def __setitem__(self, key: Any, value: Any) -> None:  # noqa: ANN401 - state holds anything
        held = self.get(key, self)
        if held is self or _shapes(value) != _shapes(held):
            raise self.refusal()
        super().__setitem__(key, value)

    def refusal(self, *_: object, **__: object) -> RuntimeError:
        """Return the error for what cannot be written here."""
        return RuntimeError(
            "the optimizer state of this parameter belongs to other ranks, and cannot be changed on this one: load a "
            "changed state dict with load_state_dict()"
        )

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise self.refusal()

    __delitem__ = __ior__ = pop = popitem = clear = setdefault = update = _refuse


def _shapes(value: object) -> object:
    """What a placeholder must have to be written back: the shapes of the one that is there, in the same containers."""
    if isinstance(value, Mapping):
        return {key: _shapes(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_shapes(item) for item in value]
    return value.shape if isinstance(value, StatePlaceholder) else value is None

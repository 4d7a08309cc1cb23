"""The state of the local optimizer under the public parameters: what is written there is written to that state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch

from zeroshard.local_optimizer import LocalOptimizer, LocalShard


class StateView(MutableMapping[Any, Any]):
    """Shows state that is kept under a cut parameter's local tensor under the parameter itself, and writes through.

    As with an optimizer's own ``state``, looking up what is not there puts an empty dict there. A copy of the view, or
    what is pickled, is a dict of its own.

    Args:
        local: holds the state.
        placeholder: the key that is shown, with an empty dict, while there is no state; none if None.
    """

    def __init__(self, local: LocalOptimizer, placeholder: torch.Tensor | None) -> None:
        self._local, self._placeholder = local, placeholder
        self._shards: dict[int, LocalShard] = {}
        self._tensors: dict[Any, torch.Tensor] = {}

    def __getitem__(self, key: Any) -> Any:  # noqa: ANN401 - state holds anything
        if self._is_placeholder(key) and key not in self._tensor_of():
            # Another rank's parameter: nothing may be kept for it here.
            return {}
        return self._state[self._local_key(key)]

    def __setitem__(self, key: Any, value: Any) -> None:  # noqa: ANN401 - state holds anything
        self._state[self._local_key(key)] = value

    def __delitem__(self, key: Any) -> None:  # noqa: ANN401 - state holds anything
        del self._state[self._local_key(key)]

    def __iter__(self) -> Iterator[Any]:
        # Over the keys there are now: entries may be replaced meanwhile.
        param_of = {tensor: param for param, tensor in self._tensor_of().items()}
        shown = [param_of.get(key, key) for key in self._state]
        return iter(shown or ([self._placeholder] if self._placeholder is not None else []))

    def __len__(self) -> int:
        return len(self._state) or int(self._placeholder is not None)

    def __contains__(self, key: object) -> bool:
        return self._local_key(key) in self._state or self._is_placeholder(key)

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (dict, dict(self))

    def get(self, key: Any, default: Any = None) -> Any:  # noqa: ANN401 - state holds anything
        """Return the entries of ``key``, or ``default``; puts nothing there."""
        if key not in self:
            return default
        return self[key]

    def pop(self, key: Any, *default: Any) -> Any:  # noqa: ANN401 - state holds anything
        """Remove and return the entries of ``key``, or return ``default``; a KeyError if neither is there."""
        return self._state.pop(self._local_key(key), *default)

    def setdefault(self, key: Any, default: Any = None) -> Any:  # noqa: ANN401 - state holds anything
        """Return the entries of ``key``, which become ``default`` if it has none."""
        return self._state.setdefault(self._local_key(key), default)

    @property
    def _state(self) -> Any:  # noqa: ANN401 - a defaultdict, keyed by tensors for torch and by anything for optimizers
        return self._local.optim.state

    def _is_placeholder(self, key: object) -> bool:
        return not self._state and key is not None and key is self._placeholder

    def _local_key(self, key: Any) -> Any:  # noqa: ANN401 - state has keys of any kind
        return self._tensor_of().get(key, key)

    def _tensor_of(self) -> dict[Any, torch.Tensor]:
        """The tensor of the local optimizer by parameter. The dict of pieces is replaced, and never changed."""
        if self._shards is not self._local.shards:
            self._shards = self._local.shards
            self._tensors = {shard.param: shard.tensor for shard in self._shards.values()}
        return self._tensors

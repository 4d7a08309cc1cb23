"""The state of an inner optimizer, which scripts for torch's class read by parameter."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch


class ShardState(defaultdict[Any, Any]):
    """The state of an inner optimizer, by the tensors that it steps.

    If this rank steps another tensor in place of a parameter, the parameter finds the entries of that tensor. A
    parameter that other ranks own raises a KeyError, where a ``defaultdict`` would make an empty entry.

    Args:
        entries: the state so far.
        stepped: returns the tensor that is stepped for a parameter or is stepped itself; None if this rank owns none.
            It must be a method, to which this object keeps a weak reference.
    """

    def __init__(self, entries: Mapping[Any, Any], stepped: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        super().__init__(dict, entries)
        self._stepped = weakref.WeakMethod(stepped)

    def _key(self, key: Any) -> Any:  # noqa: ANN401 - state has keys of any kind
        """Return the tensor that is stepped for ``key``; raise a KeyError if other ranks own all of it."""
        stepped = self._stepped()
        if stepped is None or not isinstance(key, torch.Tensor):
            return key
        tensor = stepped(key)
        if tensor is None:
            raise KeyError(
                f"a parameter of shape {tuple(key.shape)} that this rank does not own: optimizer.state has the entries "
                f"of all parameters, and placeholders for other ranks' entries"
            )
        return tensor

    def __missing__(self, key: Any) -> Any:  # noqa: ANN401 - state holds anything
        """Return the entries of the tensor that is stepped for ``key``, as in a plain optimizer."""
        tensor = self._key(key)
        return super().__missing__(key) if tensor is key else self[tensor]

    def __setitem__(self, key: Any, value: Any) -> None:  # noqa: ANN401 - state holds anything
        super().__setitem__(self._key(key), value)

    def __delitem__(self, key: Any) -> None:  # noqa: ANN401 - state holds anything
        super().__delitem__(self._key(key))

    def __contains__(self, key: object) -> bool:
        stepped = self._stepped()
        tensor = stepped(key) if stepped is not None and isinstance(key, torch.Tensor) else key
        return super().__contains__(tensor)

    def get(self, key: Any, default: Any = None) -> Any:  # noqa: ANN401 - state holds anything
        """Return the entries of ``key``, or ``default``; adds nothing."""
        if key in self:
            return self[key]
        return default

    def pop(self, key: Any, *default: Any) -> Any:  # noqa: ANN401 - state holds anything
        """Remove and return the entries of ``key``."""
        if default and key not in self:
            return default[0]
        return super().pop(self._key(key), *default)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as a ``defaultdict``."""
        return defaultdict, (dict, dict(self))

"""The state of the local optimizer under the public parameters: what is written there is written to that state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch

from zeroshard.local import LocalOptimizer, Piece


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
        self._pieces: dict[int, Piece] = {}
        self._by_param: dict[Any, torch.Tensor] = {}

    def __getitem__(self, key: Any) -> Any:  # noqa: ANN401 - state holds anything
        """Return the entries of ``key``, a new empty dict where there were none."""
        if self._is_placeholder(key) and key not in self._inwards():
            # Another rank's: nothing may be kept for it here.
            return {}
        return self._state[self._inward(key)]

    def __setitem__(self, key: Any, value: Any) -> None:  # noqa: ANN401 - state holds anything
        """Replace the entries of ``key``."""
        self._state[self._inward(key)] = value

    def __delitem__(self, key: Any) -> None:  # noqa: ANN401 - state holds anything
        """Remove the entries of ``key``.

        Raises:
            KeyError: if it has none.
        """
        del self._state[self._inward(key)]

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the keys there are now; entries may be replaced meanwhile."""
        outward = {tensor: param for param, tensor in self._inwards().items()}
        shown = [outward.get(key, key) for key in self._state]
        return iter(shown or ([self._placeholder] if self._placeholder is not None else []))

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self._state) or int(self._placeholder is not None)

    def __contains__(self, key: object) -> bool:
        """Tell whether ``key`` has entries; puts nothing there."""
        return self._inward(key) in self._state or self._is_placeholder(key)

    def __repr__(self) -> str:
        """Show the keys and entries as a dict."""
        return repr({key: self._state.get(self._inward(key), {}) for key in self})

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as a ``defaultdict`` with the same keys and entries."""
        return defaultdict, (dict, {key: self._state.get(self._inward(key), {}) for key in self})

    def get(self, key: Any, default: Any = None) -> Any:  # noqa: ANN401 - state holds anything
        """Return the entries of ``key``, or ``default``; puts nothing there."""
        if key not in self:
            return default
        return self[key]

    def pop(self, key: Any, *default: Any) -> Any:  # noqa: ANN401 - state holds anything
        """Remove and return the entries of ``key``, or return ``default``.

        Raises:
            KeyError: if it has none, and no default is given.
        """
        return self._state.pop(self._inward(key), *default)

    def setdefault(self, key: Any, default: Any = None) -> Any:  # noqa: ANN401 - state holds anything
        """Return the entries of ``key``, which become ``default`` if it has none."""
        return self._state.setdefault(self._inward(key), default)

    @property
    def _state(self) -> Any:  # noqa: ANN401 - a defaultdict, keyed by tensors for torch and by anything for optimizers
        return self._local.optim.state

    def _is_placeholder(self, key: object) -> bool:
        return not self._state and key is not None and key is self._placeholder

    def _inwards(self) -> dict[Any, torch.Tensor]:
        # Pieces are never changed in place.
        if self._pieces is not self._local.pieces:
            self._pieces = self._local.pieces
            self._by_param = {piece.param: piece.tensor for piece in self._pieces.values()}
        return self._by_param

    def _inward(self, key: Any) -> Any:  # noqa: ANN401 - state holds anything
        return self._inwards().get(key, key)

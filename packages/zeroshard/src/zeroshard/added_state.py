"""State that is not of the optimizer class but of this package: master weights, and averages of parameters.

It lies beside the entries of the class, and so is saved and loaded with them. A step hides it from the class, which
makes its own entries where there are none, and lists it for every tensor that was stepped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from zeroshard.local_shard import LocalShard

State = MutableMapping[Any, Any]
MASTER, AVERAGE, COUNT = "master_param", "average_param", "average_count"
_ADVICE = {
    MASTER: "build the optimizer with master_weights=True",
    AVERAGE: "make zeroshard.AveragedParameters(optimizer) before you load",
    COUNT: "make zeroshard.AveragedParameters(optimizer) before you load",
}


class Keeper(Protocol):
    """Adds entries to the state of each shard."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of its entries."""

    def follow(self, shards: Sequence[LocalShard]) -> None:
        """Take over this rank's shards, which may be new or lie elsewhere."""

    def entries(self, shard: LocalShard) -> Mapping[str, torch.Tensor]:
        """Return its entries for a shard: always the same tensors, until it follows others."""

    def load(self, state: State) -> None:
        """Take over the values of entries that were loaded on all ranks, or of what a checkpoint lacks."""


class AddedState:
    """Knows all keepers of one local optimizer.

    Attributes:
        keepers: each adds entries of other names.
    """

    def __init__(self) -> None:
        self.keepers: list[Keeper] = []
        self._shards: Sequence[LocalShard] = ()

    @property
    def names(self) -> frozenset[str]:
        """Names of all entries."""
        return frozenset(name for keeper in self.keepers for name in keeper.names)

    def add(self, keeper: Keeper) -> None:
        """Let another one keep entries; those of tensors that have state already are listed by their next step."""
        self.keepers.append(keeper)
        keeper.follow(self._shards)

    def follow(self, shards: Sequence[LocalShard]) -> None:
        """Take over this rank's shards."""
        self._shards = shards
        for keeper in self.keepers:
            keeper.follow(shards)

    @contextmanager
    def hidden(self, state: State, shards: Sequence[LocalShard]) -> Iterator[None]:
        """Around a step of the local optimizer.

        Args:
            state: of the local optimizer.
            shards: those that are stepped.
        """
        if not self.keepers:
            yield
            return
        names = self.names
        had = [_without(names, state[each.tensor]) if each.tensor in state else False for each in shards]
        try:
            yield
        finally:
            stepped = [each.tensor.grad is not None for each in shards]
            self.list_in(state, [each for each, *listed in zip(shards, had, stepped, strict=True) if any(listed)])

    def list_in(self, state: State, shards: Sequence[LocalShard]) -> None:
        """Add the entries of some shards to the state of the local optimizer."""
        for keeper in self.keepers:
            for shard in shards:
                state[shard.tensor].update(keeper.entries(shard))

    def checked(self, entries: Mapping[Any, Any], shape: Sequence[int], where: str) -> Mapping[Any, Any]:
        """Check the added entries of a loaded state, and return the others.

        Args:
            entries: of one tensor.
            shape: of the tensor.
            where: names it in errors.

        Raises:
            ValueError: if nothing keeps such entries, or one has another shape.
        """
        for name in sorted(_ADVICE.keys() & entries.keys()):
            if name not in self.names:
                raise ValueError(
                    f"{where}: extra entry {name!r}: {_ADVICE[name]}, or delete these entries to go on without"
                )
            value, expected = entries[name], () if name == COUNT else tuple(shape)
            found = f"has shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"is {value!r}"
            if found != f"has shape {expected}":
                raise ValueError(f"{where}: entry {name!r} {found}, expected shape {expected}")
        return {key: value for key, value in entries.items() if key not in _ADVICE}

    def load(self, state: State) -> None:
        """Take over what was loaded, once all ranks have it."""
        for keeper in self.keepers:
            keeper.load(state)
        self.list_in(state, [each for each in self._shards if self.names & (state.get(each.tensor) or {}).keys()])


def _without(names: frozenset[str], entries: dict[Any, Any]) -> bool:
    """Remove entries; return whether there were some."""
    before = len(entries)
    for name in names:
        entries.pop(name, None)
    return len(entries) < before

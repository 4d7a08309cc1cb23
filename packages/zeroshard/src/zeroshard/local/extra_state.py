"""State that is not of the optimizer class but of this package: master weights, and averages of parameters.

It lies beside the entries of the class, and so is saved and loaded with them. A step hides it from the class, which
makes its own entries where there are none, and lists it for every tensor that was stepped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from zeroshard.local.shard import LocalShard

State = MutableMapping[Any, Any]
MASTER, AVERAGE, COUNT = "master_param", "average_param", "average_count"
ADVICE = {
    MASTER: "build the optimizer with master_weights=True",
    AVERAGE: "make zeroshard.AveragedParameters(optimizer) before you load",
    COUNT: "make zeroshard.AveragedParameters(optimizer) before you load",
}
"""What to do about an entry that nothing keeps."""


class Keeper(Protocol):
    """Adds entries to the state of each shard."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of its entries."""

    def follow(self, shards: Sequence[LocalShard]) -> None:
        """Take over this rank's shards, which may be new or lie elsewhere."""

    def entries(self, shard: LocalShard) -> Mapping[str, torch.Tensor]:
        """Return its entries for a shard: the same tensors each time, until it follows others or loads."""

    def load(self, loaded: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
        """Take over entries that were loaded on all ranks, by tensor; a checkpoint may lack some, or all."""


class AddedState:
    """Knows all keepers of one local optimizer.

    Attributes:
        keepers: each adds entries of other names.
    """

    def __init__(self) -> None:
        self.keepers: list[Keeper] = []
        self._shards: Sequence[LocalShard] = ()
        self._loaded: dict[int, dict[str, torch.Tensor]] = {}

    @property
    def names(self) -> frozenset[str]:
        """Names of all entries."""
        return frozenset(name for keeper in self.keepers for name in keeper.names)

    def add(self, keeper: Keeper) -> None:
        """Let another one keep entries; a step, or :meth:`list_in`, lists them."""
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

        Raises:
            RuntimeError: if the class keeps an entry of the same name itself.
        """
        if not self.keepers:
            yield
            return
        had = [_without(self.names, state[each.tensor]) if each.tensor in state else False for each in shards]
        had_gradient = [each.tensor.grad is not None for each in shards]
        listed = [each for each, is_listed in zip(shards, had, strict=True) if is_listed]
        try:
            yield
            for shard in shards:
                for name in self.names & state.get(shard.tensor, {}).keys():
                    raise RuntimeError(
                        f"{name!r} is an entry of the optimizer class too: leave out master_weights=True or "
                        f"AveragedParameters, which keep theirs under that name"
                    )
            # A closure makes gradients in the step, and a class may drop them there.
            stepped = zip(shards, had, had_gradient, strict=True)
            listed = [each for each, *known in stepped if any(known) or each.tensor.grad is not None]
        finally:
            self.list_in(state, listed)

    def list_in(self, state: State, shards: Sequence[LocalShard]) -> None:
        """Add the entries of some shards to the state of the local optimizer."""
        for keeper in self.keepers:
            for shard in shards:
                if entries := keeper.entries(shard):
                    state[shard.tensor].update(entries)

    # ------------------------------------------------------------------ a load

    def checked(self, entries: Mapping[Any, Any], shape: Sequence[int], where: str) -> Mapping[Any, Any]:
        """Check the added entries of a loaded state, and return the others.

        Args:
            entries: of one tensor.
            shape: of the tensor.
            where: names it in errors.

        Raises:
            ValueError: if one has another shape.
        """
        for name in sorted(self.names & entries.keys()):
            value, expected = entries[name], () if name == COUNT else tuple(shape)
            found = f"has shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"is {value!r}"
            if found != f"has shape {expected}":
                raise ValueError(f"{where}: entry {name!r} {found}, expected shape {expected}")
        return {key: value for key, value in entries.items() if key not in self.names}

    def set_apart(self, loaded: Mapping[Any, Any]) -> dict[Any, Any]:
        """Keep added entries for :meth:`load`, and return the others: the class would cast these, or miss its own.

        Args:
            loaded: the state of this rank's shards by tensor, and what belongs to no tensor.
        """
        names, of_tensors = self.names, [key for key in loaded if isinstance(key, int)]
        self._loaded = {key: {name: loaded[key][name] for name in names & loaded[key].keys()} for key in of_tensors}
        others = {key: {k: v for k, v in loaded[key].items() if k not in names} for key in of_tensors}
        # Some classes look up entries wherever there is a dict.
        empty = {key for key in of_tensors if self._loaded[key] and not others[key]}
        return {key: others.get(key, value) for key, value in loaded.items() if key not in empty}

    def list_loaded(self, state: State) -> None:
        """Add the entries that were set apart to the state of the local optimizer, for all ranks to learn of them."""
        for shard in self._shards:
            present = {name: value for keeper in self.keepers for name, value in keeper.entries(shard).items()}
            loaded = self._loaded.get(shard.index, {})
            loaded.update({name: value.to(present.get(name, value)) for name, value in loaded.items()})
            if loaded:
                state[shard.tensor].update(loaded)

    def load(self, state: State) -> None:
        """Take over what was set apart, once all ranks have loaded it."""
        loaded, self._loaded = self._loaded, {}
        for keeper in self.keepers:
            keeper.load(loaded)
        self.list_in(state, [shard for shard in self._shards if loaded.get(shard.index)])


def _without(names: frozenset[str], entries: dict[Any, Any]) -> bool:
    """Remove entries; return whether there were some."""
    before = len(entries)
    for name in names:
        entries.pop(name, None)
    return len(entries) < before

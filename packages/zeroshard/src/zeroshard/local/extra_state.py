"""Holds the state that this package adds to the optimizer class's: master weights, and averages of parameters.

This state has its own dicts, which the class never sees. Listing, describing and loading state merge it with the
entries of the class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from zeroshard.local.shard import LocalShard

MASTER, AVERAGE, COUNT = "master_param", "average_param", "average_count"
ADVICE = {
    MASTER: "build the optimizer with master_weights=True",
    AVERAGE: "construct zeroshard.AveragedParameters(optimizer) before you load",
    COUNT: "construct zeroshard.AveragedParameters(optimizer) before you load",
}
"""Advice about an entry of a checkpoint that this optimizer does not keep, by name."""

Loaded = Mapping[int, Mapping[str, torch.Tensor]]
"""Extra entries of a checkpoint, by tensor; a checkpoint may lack some, or all."""


class ExtraEntries(ABC):
    """Holds the extra entries of one kind, for all shards."""

    names: tuple[str, ...]

    @abstractmethod
    def rebuild(self, shards: Sequence[LocalShard]) -> None:
        """Adopt this rank's shards, which may be new or have moved in memory."""

    @abstractmethod
    def entries(self, shard: LocalShard) -> Mapping[str, torch.Tensor]:
        """Return the entries of a shard: the same tensors each time, until it is rebuilt or loads."""

    def end_step(self, shards: Collection[LocalShard]) -> None:  # noqa: B027 - some kinds have nothing to do
        """Finish a step of some shards, even if it has failed."""

    @abstractmethod
    def load(self, loaded: Loaded) -> None:
        """Adopt entries that all ranks have loaded."""


class ExtraState:
    """Holds the extra entries of one local optimizer. A shard's entries are listed after it was stepped or loaded."""

    def __init__(self) -> None:
        self.kinds: list[ExtraEntries] = []
        self._shards: Sequence[LocalShard] = ()
        self._listed: set[int] = set()
        self._loading: dict[int, dict[str, torch.Tensor]] | None = None

    @property
    def names(self) -> frozenset[str]:
        """The names of all entries."""
        return frozenset(name for kind in self.kinds for name in kind.names)

    def add(self, kind: ExtraEntries) -> None:
        """Add another kind of entries."""
        self.kinds.append(kind)
        kind.rebuild(self._shards)

    def rebuild(self, shards: Sequence[LocalShard]) -> None:
        """Adopt this rank's shards."""
        self._shards = shards
        self._listed &= {shard.index for shard in shards}
        for kind in self.kinds:
            kind.rebuild(shards)

    @contextmanager
    def stepped(self, own_state: Callable[[LocalShard], Any], shards: Collection[LocalShard]) -> Iterator[None]:
        """Wrap a step of the local optimizer, and list shards with a gradient. Raise if the class uses these names."""
        had_gradient = {shard.index for shard in shards if shard.tensor.grad is not None}
        try:
            yield
        finally:
            for kind in self.kinds:
                kind.end_step(shards)
        for shard in shards:
            for name in self.names & (own_state(shard) or {}).keys():
                raise RuntimeError(
                    f"the optimizer class has an entry {name!r} of its own: leave out master_weights=True or "
                    f"AveragedParameters, which keep their entries under that name"
                )
        # A class may drop gradients in its step.
        self._listed |= had_gradient

    def list_entries(self, shards: Iterable[LocalShard]) -> None:
        """List the entries of some shards from now on."""
        self._listed.update(shard.index for shard in shards)

    def drop_entries(self, shard: LocalShard) -> None:
        """Stop listing the entries of a shard, until it is stepped again."""
        self._listed.discard(shard.index)

    def entries(self, shard: LocalShard) -> dict[str, torch.Tensor]:
        """Return the listed entries of a shard; during a load, the entries of the checkpoint."""
        if self._loading is not None:
            return self._loading.get(shard.index, {})
        return self._present(shard) if shard.index in self._listed else {}

    # ------------------------------------------------------------------ a load

    def checked(self, entries: Mapping[Any, Any], shape: Sequence[int], where: str) -> Mapping[Any, Any]:
        """Return the class's entries of a loaded tensor; ValueError if an extra entry has another shape."""
        for name in sorted(self.names & entries.keys()):
            value, expected = entries[name], () if name == COUNT else tuple(shape)
            found = f"has shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"is {value!r}"
            if found != f"has shape {expected}":
                raise ValueError(f"{where}: entry {name!r} {found}, expected shape {expected}")
        return {key: value for key, value in entries.items() if key not in self.names}

    def begin_load(self, loaded: Mapping[Any, Any]) -> dict[Any, Any]:
        """Show the extra entries of a checkpoint until :meth:`end_load`, and return the class's entries."""
        names, of_tensors = self.names, [key for key in loaded if isinstance(key, int)]
        self._loading = {}
        for shard in self._shards:
            present, entries = self._present(shard), loaded.get(shard.index, {})
            found = {name: entries[name].to(present.get(name, entries[name])) for name in names & entries.keys()}
            if found:
                self._loading[shard.index] = found
        others = {key: {k: v for k, v in loaded[key].items() if k not in names} for key in of_tensors}
        # Some classes look up entries in every dict, even in an empty one.
        empty = {key for key in of_tensors if key in self._loading and not others[key]}
        return {key: others.get(key, value) for key, value in loaded.items() if key not in empty}

    def end_load(self, *, failed: bool = False) -> None:
        """Adopt the entries of :meth:`begin_load` after all ranks have loaded them; drop them if that failed."""
        loaded, self._loading = self._loading, None
        if loaded is not None and not failed:
            self._listed = set(loaded)
            for kind in self.kinds:
                kind.load(loaded)

    def _present(self, shard: LocalShard) -> dict[str, torch.Tensor]:
        return {name: value for kind in self.kinds for name, value in kind.entries(shard).items()}

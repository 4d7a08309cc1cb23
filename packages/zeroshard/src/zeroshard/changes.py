"""Detects what a training loop has changed since the last collective call, by comparison with a snapshot.

A step begins with the comparison, and if nothing has changed, it skips all work that depends on the model. It ends by
taking the next snapshot. Everything here is local to one rank; nothing communicates.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from operator import is_, methodcaller
from typing import Any

import torch

from zeroshard._torch_private import version_of
from zeroshard.local.optimizer import LocalOptimizer
from zeroshard.plan.groups import MEMBERS, hyperparameters_of
from zeroshard.plan.hyperparameters import to_text
from zeroshard.plan.layout import Layout

_Places = tuple[list[int], list[torch.Size], list[tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Seen:
    """The layout that fits the model on this rank before a step, or the error that this rank has found.

    ``is_new`` is True if the layout differs from the one in use, or must be computed after the backward. ``is_agreed``
    is True if all ranks have agreed, during backward, to step with the layout in use.
    """

    layout: Layout
    is_new: bool = False
    error: Exception | None = None
    is_agreed: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The values that a training loop can change, as this rank last saw them.

    Attributes:
        places: addresses, sizes and strides of the parameters when they were last laid out.
        active: which parameters a step could change then.
        hyperparameters: for each group, the values after the last step, see :func:`_frozen`.
        kept: the values that may be changed in place, or whose id is in ``hyperparameters``.
        fixed: the keys and values of all groups, for a fast comparison; empty if ``kept`` has any.
        entries: for each entry of this rank's state, the result of :func:`_entry` at the last exchange.
    """

    places: _Places = ([], [], [])
    active: Sequence[bool] = ()
    hyperparameters: Sequence[Mapping[str, object]] = ()
    kept: Sequence[object] = ()
    fixed: Sequence[object] = ()
    entries: Sequence[object] = ()


class Changes:
    """Holds the snapshot of one optimizer, and the hyperparameters that must be equal on all ranks.

    Only the methods ``record_...`` and :meth:`read_hyperparameters` change it, in the thread that calls the optimizer.

    Attributes:
        agreed: the hyperparameters that must be equal on all ranks, as text. These are the values that the user wrote,
            not a step, because a step may write other values on a rank that owns no tensor of a group.
        checksum: the CRC-32 of ``agreed``.
    """

    def __init__(self, local: LocalOptimizer) -> None:
        self._local = local
        self._last = Snapshot()
        self.agreed: dict[str, str] = {}
        self.checksum = 0

    # ------------------------------------------------------------------ the model

    def in_model(self) -> bool:
        """Return True if parameters were replaced, moved, frozen or unfrozen."""
        local, last, inner = self._local, self._last, self._local.inner_groups()
        params = [param for group in local.groups for param in group["params"]]
        return (
            len(params) != len(local.params)
            or not all(map(is_, params, local.params))
            or len(local.groups) != len(inner)
            or not all(map(is_, local.groups, inner))
            or [param.requires_grad or param.grad is not None for param in params] != last.active
            or _places(local.params) != last.places
        )

    def moved(self) -> list[int]:
        """Return the indices of parameters whose ``.data`` was rebound to other memory, sizes or strides."""
        now, last = _places(self._local.params), self._last.places
        if now == last:
            return []
        pairs = enumerate(zip(zip(*now, strict=True), zip(*last, strict=True), strict=True))
        return [index for index, (here, there) in pairs if here != there]

    def record_layout(self, active: Sequence[bool]) -> None:
        """Record where parameters are, and which of them are active, after they were laid out."""
        self._last = replace(self._last, places=_places(self._local.params), active=[*active])

    # ------------------------------------------------------------------ hyperparameters

    def in_hyperparameters(self) -> list[tuple[int, str]]:
        """Return the group and key of each hyperparameter that was set, added or removed since the last snapshot."""
        if self._is_fixed():
            return []
        changed: list[tuple[int, str]] = []
        nothing: Mapping[str, object] = {}
        of_groups = zip_longest(self._last.hyperparameters, self._hyperparameters([]), fillvalue=nothing)
        for number, (last, now) in enumerate(of_groups):
            if last != now:
                keys = {**last, **now}
                changed += [(number, key) for key in keys if last.get(key, _MISSING) != now.get(key, _MISSING)]
        return changed

    def read_hyperparameters(self) -> int:
        """Add the user's changes to :attr:`agreed`, and return its checksum."""
        changed, groups = self.in_hyperparameters(), self._local.groups
        for number, key in changed:
            name = f"{key} of group {number}"
            if number < len(groups) and key in groups[number]:
                self.agreed[name] = to_text(groups[number][key], in_step=True)
            else:
                self.agreed.pop(name, None)
        if changed:
            self.set_agreed(self.agreed)
            self.record_hyperparameters()
        return self.checksum

    def set_agreed(self, agreed: Mapping[str, str]) -> None:
        """Replace :attr:`agreed`. It is kept sorted, because sorting a sorted list is fast."""
        self.agreed = dict(sorted(agreed.items()))
        self.checksum = zlib.crc32("\0".join([*self.agreed, *self.agreed.values()]).encode())

    def record_hyperparameters(self) -> None:
        """Record the values that a step has written to the param groups, which need not be equal on all ranks."""
        if self._is_fixed():
            return
        kept: list[object] = []
        found = self._hyperparameters(kept)
        fixed = () if kept else self._entries_of_groups()
        self._last = replace(self._last, hyperparameters=found, kept=kept, fixed=fixed)

    def unchanged(self) -> list[dict[str, Any]]:
        """Return for each param group the values that are unchanged since the last step, which may have set them."""
        found = [hyperparameters_of(group) for group in self._local.groups]
        for number, key in self.in_hyperparameters():
            if number < len(found):
                found[number].pop(key, None)
        return found

    def written_in(self, numbers: Collection[int]) -> list[tuple[int, str]]:
        """Return the group and key of each value in these groups that differs from the last snapshot."""
        return [(number, key) for number, key in self.in_hyperparameters() if number in numbers]

    def _is_fixed(self) -> bool:
        """Return True if all groups have the same immutable objects as after the last step."""
        last = self._last.fixed
        now = self._entries_of_groups() if last else []
        return bool(last) and len(now) == len(last) and all(map(is_, now, last))

    def _entries_of_groups(self) -> list[object]:
        """Return the keys and values of all groups. Every step reads them, so this has no loop in Python."""
        groups = self._local.groups
        return [*chain.from_iterable(groups), *chain.from_iterable(map(_values, groups))]

    def _hyperparameters(self, kept: list[object]) -> list[dict[str, object]]:
        """Return all values by group and key, frozen by :func:`_frozen` unless they are plain."""
        return [
            {
                key: value if type(value) in _PLAIN else _frozen(value, kept)
                for key, value in group.items()
                if key not in MEMBERS
            }
            for group in self._local.groups
        ]

    # ------------------------------------------------------------------ the state

    def in_entries(self) -> bool:
        """Return True if this rank's state has other tensors, or other kinds of values, than at the last exchange."""
        values = self._entries()
        return len(values) != len(self._last.entries) or not all(map(_is_same, self._last.entries, values))

    def record_entries(self) -> None:
        """Record the entries of this rank's state, whose kinds the other ranks know now."""
        self._last = replace(self._last, entries=[*map(_entry, self._entries())])

    def _entries(self) -> list[Any]:
        # This reads neither shapes nor dtypes of tensors, because that costs too much in a step.
        found: list[Any] = []
        local = self._local
        for shard in local.shards.values() if local.extra.kinds else ():
            found += local.extra.entries(shard).values()
        for state in local.states:
            for entries in state.values():
                found += entries.values() if isinstance(entries, dict) else (entries,)
        return found


def _places(tensors: Sequence[torch.Tensor]) -> _Places:
    """Return addresses, sizes and strides. Every step reads them, so this has no loop in Python."""
    return (
        list(map(torch.Tensor.data_ptr, tensors)),
        list(map(torch.Tensor.size, tensors)),
        list(map(torch.Tensor.stride, tensors)),
    )


_MISSING, _values = object(), methodcaller("values")
_PLAIN = frozenset({bool, int, float, complex, str, type(None), torch.dtype})


def _frozen(value: Any, kept: list[object]) -> object:  # noqa: ANN401 - a hyperparameter
    """Return a form to compare later values with: a plain value itself, a tensor's id and version, or an object's id.

    Objects that may be changed in place, or whose id is returned, are appended to ``kept``.
    """
    if type(value) in _PLAIN:
        return value
    if not isinstance(value, tuple):
        kept.append(value)
    if isinstance(value, (list, tuple)):
        return [_frozen(part, kept) for part in value]
    if isinstance(value, Mapping):
        return {key: _frozen(part, kept) for key, part in value.items()}
    if isinstance(value, torch.Tensor):
        return id(value), version_of(value)
    # Compare NumPy's scalars and arrays as numbers and lists.
    return value.tolist() if hasattr(value, "tolist") and not isinstance(value, type) else id(value)


def _entry(value: object) -> object:
    """Return a weak reference to a tensor, or the type of any other entry, for `_is_same`; None for a container."""
    if isinstance(value, (Mapping, list, tuple)):
        return None
    # The reference is weak, so that a tensor is freed when another one replaces it.
    return weakref.ref(value) if isinstance(value, torch.Tensor) else type(value)


def _is_same(seen: Any, value: object) -> bool:  # noqa: ANN401 - what `_entry` returns
    return value is not None and value is seen() if type(seen) is weakref.ref else seen is type(value)

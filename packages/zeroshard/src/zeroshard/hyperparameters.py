"""Hyperparameters that differ between ranks would step each shard by its owner's: how ranks find out, at no cost.

What the user writes to the param groups counts, and what was there when they were built. What the inner optimizer
writes to them in a step does not: a rank without a tensor of a group may rightly count otherwise.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

from zeroshard.parameters import hyperparameters_of, without_numpy

_PLAIN = (int, float, str, type(None))
_MEMBERS = ("params", "param_names")


class Hyperparameters:
    """What the ranks should agree upon, and a number for it, made anew only when the user has changed something.

    What is no number, string or list, tuple or dict of these is left out: reading a tensor would wait for its device,
    and other objects need not look alike on two ranks. Only the engine that owns it calls it.
    """

    def __init__(self) -> None:
        self._agreed: list[dict[str, object]] = []
        self._seen: list[list[object]] = []
        self._digest = 0

    def follow(self, groups: Sequence[Mapping[str, Any]]) -> int:
        """Take in what the user has changed since the last call.

        Args:
            groups: the public param groups, before a step.

        Returns:
            A number of 32 bits, not 0, that is the same on ranks with the same hyperparameters.
        """
        values = _values(groups)
        if values != self._seen:
            for number, group in enumerate(groups):
                if number == len(self._agreed):
                    self._agreed.append({})
                    self._seen.append([])
                before = dict(zip(self._agreed[number], self._seen[number], strict=False))
                now = dict(zip(group, values[number], strict=True))
                kept = self._agreed[number]
                self._agreed[number] = {
                    key: value if key not in before or before[key] != value else kept[key] for key, value in now.items()
                }
            self._seen = values
            self._digest = zlib.crc32(repr(sorted(self.in_words().items())).encode()) or 1
        return self._digest

    def written(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Take note of what the inner optimizer has written.

        Args:
            groups: the public param groups, after a step.
        """
        self._seen = _values(groups)
        for number, group in enumerate(groups):
            kept = self._agreed[number]
            if len(kept) != len(group):
                self._agreed[number] = {key: kept.get(key, _LEFT_OUT) for key in group}

    def agreed(self) -> list[dict[str, object]]:
        """Return what is compared, by group: for a rank that has not seen its user change it."""
        return [{key: value for key, value in group.items() if value is not _LEFT_OUT} for group in self._agreed]

    def adopt(self, agreed: Sequence[Mapping[str, object]], groups: Sequence[Mapping[str, Any]]) -> None:
        """Take over what another rank compares.

        Args:
            agreed: as :meth:`agreed` returns it there.
            groups: the public param groups, with that rank's values.
        """
        self._agreed = [
            {key: known.get(key, _LEFT_OUT) for key in group} for known, group in zip(agreed, groups, strict=True)
        ]
        self._seen = _values(groups)
        self._digest = zlib.crc32(repr(sorted(self.in_words().items())).encode()) or 1

    def in_words(self) -> dict[str, str]:
        """Return what is compared, by name and group, so that a difference can be named."""
        return hyperparameters_of(self.agreed(), {})


_LEFT_OUT = object()


def _values(groups: Sequence[Mapping[str, Any]]) -> list[list[object]]:
    # Members are compared with the plan; there are many of them.
    return [[_LEFT_OUT if key in _MEMBERS else _plain(value) for key, value in group.items()] for group in groups]


def _plain(value: object) -> object:
    """Python's own values as they are, lists and dicts of them copied, and one same object for everything else."""
    if isinstance(value, _PLAIN):
        return value
    value = without_numpy(value)
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Number):
        return repr(value)
    if isinstance(value, (list, tuple)):
        parts = tuple(map(_plain, value))
        return _LEFT_OUT if _LEFT_OUT in parts else parts
    if isinstance(value, Mapping) and all(isinstance(key, _PLAIN) for key in value):
        entries = {key: _plain(part) for key, part in value.items()}
        return _LEFT_OUT if _LEFT_OUT in entries.values() else entries
    return _LEFT_OUT

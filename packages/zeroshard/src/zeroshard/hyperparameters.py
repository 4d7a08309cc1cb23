"""Hyperparameters that differ between ranks would step each shard by its owner's: how ranks find out, at no cost."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from zeroshard.parameters import hyperparameters_of

_PLAIN = (int, float, str, type(None))


class Hyperparameters:
    """A number for the hyperparameters of all groups, made anew only when one has changed.

    What is no number, string or tuple of these is left out: reading a tensor would wait for its device, and other
    objects need not look alike on two ranks. Only the engine that owns it calls it.
    """

    def __init__(self) -> None:
        self._values: list[tuple[object, ...]] = []
        self._digest = 0

    def digest(self, groups: Sequence[Mapping[str, Any]]) -> int:
        """Return a number of 32 bits, not 0, that is the same on ranks with the same hyperparameters.

        Args:
            groups: param groups.
        """
        values = [
            tuple([value if isinstance(value, _PLAIN) else _plain(value) for value in g.values()]) for g in groups
        ]
        if values != self._values:
            self._values = values
            self._digest = zlib.crc32(repr(sorted(plain_hyperparameters(groups).items())).encode()) or 1
        return self._digest


def plain_hyperparameters(groups: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Write down what `Hyperparameters` compares, by name and group, so that a difference can be named."""
    plain = [
        {key: value for key, value in group.items() if isinstance(value, _PLAIN) or _plain(value) is not None}
        for group in groups
    ]
    return hyperparameters_of(plain, {})


def _plain(value: object) -> object:
    """A tuple of plain values as it is, None for everything else."""
    if isinstance(value, tuple) and all(isinstance(part, _PLAIN) for part in value):
        return value
    return None

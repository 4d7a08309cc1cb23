"""Counts bytes sent and received, calls and time spent waiting, per kind of transfer."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from operator import sub
from threading import Lock
from typing import Any

KINDS = ("broadcast", "reduce", "state", "control")


@dataclass(frozen=True, slots=True)
class Volume:
    """An amount of traffic.

    Attributes:
        bytes_sent: payload bytes this rank sent, counted once per receiver.
        bytes_received: payload bytes this rank received.
        calls: messages or collectives issued.
        seconds_waited: wall time this rank's host spent blocked on them, in seconds.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    calls: int = 0
    seconds_waited: float = 0.0

    def __sub__(self, other: Volume) -> Volume:
        """Return the traffic since ``other`` was read."""
        return Volume(*map(sub, astuple(self), astuple(other)))


_adding = Lock()
"""The thread that runs backward and the worker thread add to the same totals."""


class Traffic:
    """Counts the communication of one object. Exchanges and the control channel add to it.

    Kinds are ``"broadcast"`` (parameters from owners), ``"reduce"`` (gradients to owners), ``"state"`` (of optimizers)
    and ``"control"`` (agreements, and norms of gradients). Bytes are counted as the plan predicts them: an owner that
    sends ``b`` bytes to ``n`` ranks, itself included, counts ``b * (n - 1)`` bytes, even if a backend forwards them
    along a tree or a ring.
    """

    def __init__(self) -> None:
        self.reset()

    def add(self, kind: str, *, sent: int = 0, received: int = 0, calls: int = 0, waited: float = 0.0) -> None:
        """Add to the totals of ``kind``. ``sent`` and ``received`` are in bytes, ``waited`` is in seconds."""
        with _adding:
            counts = self._counts[kind]
            counts[0] += sent
            counts[1] += received
            counts[2] += calls
            counts[3] += waited

    def of(self, kind: str) -> Volume:
        """Return the totals of one kind. Raises KeyError if there is no such kind."""
        with _adding:
            return Volume(*self._counts[kind])

    def total(self) -> Volume:
        """Return the totals over all kinds."""
        with _adding:
            return Volume(*map(sum, zip(*self._counts.values(), strict=True)))

    def reset(self) -> None:
        """Set every total back to zero."""
        with _adding:
            # Lists of the fields of a Volume, because constructing a Volume for each call takes too long.
            self._counts: dict[str, list[Any]] = {kind: [0, 0, 0, 0.0] for kind in KINDS}

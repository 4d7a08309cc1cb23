"""Who still has data: a roll call among the ranks of an optimizer, inside a Join context.

A rank that still has data says what it is about to do; one that has run out, and shadows it, says that. It is one small
message to and from every peer, over the control channel, and no rank goes on before all have answered.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from zeroshard_comm import Control, DisagreementError


class Call(IntEnum):
    """What a rank is about to do."""

    JOINED = 0
    """It has run out of data, and does whatever the others do."""
    STEP = 1
    CLIP = 2
    BACKWARD = 3
    REFUSED = 4
    """It has run out of data, and cannot do what the others do; it has an error to report."""
    CONSOLIDATE = 5
    OTHER = 6
    """What ranks without data cannot take part in."""


@dataclass(frozen=True)
class Attendance:
    """The answers to a roll call.

    Attributes:
        call: what the ranks that still have data are about to do.
        running: those ranks, ascending.
        joined: the others, ascending.
    """

    call: Call
    running: tuple[int, ...]
    joined: tuple[int, ...]

    @property
    def giver(self) -> int:
        """The rank that tells the others what they cannot know: the first that still has data."""
        return self.running[0]


_CANNOT_TELL = 8
"""Added to a call by a rank that could not tell those that have run out what they need."""


def call_roll(
    control: Control, mine: Call, error: Exception | None = None, *, untold: Exception | None = None
) -> Attendance:
    """Tell all ranks what this one is about to do, and hear it from them. Collective.

    Args:
        control: the channel.
        mine: what this rank is about to do.
        error: with ``Call.REFUSED``, why.
        untold: why this rank could not tell others what they need, if it could not: an error only if somebody has run
            out of data.

    Raises:
        DisagreementError: if ranks that still have data are about to do different things.
        PeerLostError: if a rank is gone.
        Exception: the error of a rank that refused, or could not tell others, on every rank.
    """
    operation = "Join"
    try:
        word = int(mine) if untold is None else mine | _CANNOT_TELL
        words = [answer for [answer] in control.all_gather_ints([word], operation)]
        answers = [Call(word & ~_CANNOT_TELL) for word in words]
        if Call.REFUSED in answers:
            control.check_consistent(operation, error=error)
        if Call.JOINED in answers and any(word & _CANNOT_TELL for word in words):
            control.check_consistent(operation, error=untold)
    finally:
        del error, untold
    running = tuple([rank for rank, answer in enumerate(answers) if answer is not Call.JOINED])
    calls = {answers[rank] for rank in running}
    if len(calls) > 1:
        told = ", ".join(f"rank {rank} in {answers[rank].name.lower()}" for rank in running)
        raise DisagreementError(
            f"the ranks that still have data are at different places: {told}. Every rank must make the same calls in "
            f"the same order inside Join"
        )
    joined = tuple([rank for rank, answer in enumerate(answers) if answer is Call.JOINED])
    return Attendance(answers[running[0]] if running else Call.JOINED, running, joined)

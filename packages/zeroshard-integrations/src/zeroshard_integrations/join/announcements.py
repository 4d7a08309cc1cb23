"""What every rank tells every other in a Join block: whether it still has data, and which call it is about to make.

They never meet a collective that DistributedDataParallel has issued on the same group, also after an error. They are
posted in one place and waited for in another, which lets a forward lie in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache

from zeroshard_comm import Control, Words

TAG_ANNOUNCEMENT = 0x5A530060


class Status(IntEnum):
    """How a rank is."""

    RUNNING = 0
    JOINED = 1
    """It has run out of data."""
    FAILED = 2
    """It leaves the block with an error."""


class Kind(IntEnum):
    """What a rank is about to do."""

    CALL = 0
    """A joinable that is no model communicates."""
    FORWARD = 1
    BACKWARD = 2
    """The first gradient of a model is there."""
    END = 3
    """All gradients of a backward have been reduced, and a communication hook steps."""


class Held(IntEnum):
    """What has become of a model's gradients since its last backward, or since the block was entered."""

    KEPT = 0
    NONE = 1
    ZERO = 2
    """All of them are None or zero, and some zero."""
    CHANGED = 3
    """Some are None or zero and others not, or have other values."""


@dataclass(frozen=True)
class Announcement:
    """What a rank says.

    Attributes:
        status: how it is.
        kind: what it is about to do.
        joinable: the place in the block's list of what does it.
        reduces: of a model, whether gradients will be reduced in this backward, or that of this forward.
        with_grad: of a forward, whether gradients are enabled.
        held: of a backward, the gradients to which it adds; not compared.
    """

    status: Status
    kind: Kind = Kind.CALL
    joinable: int = 0
    reduces: bool = False
    with_grad: bool = False
    held: Held = field(default=Held.KEPT, compare=False)


class Announcements:
    """Sends announcements and receives those of the peers, one at a time. It belongs to the thread that trains.

    Args:
        control: the channel.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        self._posted: Words | None = None

    @property
    def is_posted(self) -> bool:
        """Whether an announcement has been posted whose answers were not waited for."""
        return self._posted is not None

    def post(self, announcement: Announcement) -> None:
        """Tell the others, and expect their announcements, without waiting.

        Raises:
            PeerLostError: if a rank is gone.
        """
        assert self._posted is None
        self._posted = Words(self._control, [_written(announcement)], TAG_ANNOUNCEMENT, "an iteration inside Join")

    def answers(self) -> Sequence[Announcement]:
        """Wait for the announcements of all ranks, and return them in rank order.

        Raises:
            PeerLostError: if a rank is gone, or announces nothing within the timeout.
        """
        assert self._posted is not None
        posted, self._posted = self._posted, None
        return [_read(word) for [word] in posted.wait()]


def _written(announcement: Announcement) -> int:
    flags = announcement.status | announcement.kind << 2 | announcement.held << 4
    return flags | announcement.reduces << 6 | announcement.with_grad << 7 | announcement.joinable << 8


# The few that there are come again and again.
@cache
def _read(word: int) -> Announcement:
    return Announcement(
        Status(word & 3), Kind(word >> 2 & 3), word >> 8, bool(word >> 6 & 1), bool(word >> 7 & 1), Held(word >> 4 & 3)
    )


_IN_WORDS = {
    Kind.CALL: "call",
    Kind.FORWARD: "call",
    Kind.BACKWARD: "compute gradients of",
    Kind.END: "step during the backward of",
}


def difference(answers: Sequence[Announcement], one: int, other: int, names: Sequence[str]) -> str:
    """Say in words what two ranks that still have data are about to do, and what to do about it.

    Args:
        answers: of all ranks.
        one: the one rank.
        other: the other, which has announced something else.
        names: of the joinables, by place.
    """
    here, there = answers[one], answers[other]
    if (here.kind, here.joinable) != (there.kind, there.joinable):
        told = [
            f"rank {rank} is about to {_IN_WORDS[answer.kind]} joinable {answer.joinable} ({names[answer.joinable]})"
            for rank, answer in ((one, here), (other, there))
        ]
        return f"{' and '.join(told)} of the Join block: ranks that still have data must make the same calls"
    if here.with_grad != there.with_grad:
        yes, no = (one, other) if here.with_grad else (other, one)
        return f"rank {yes} calls the model with gradients enabled, and rank {no} without: do the same on all ranks"
    yes, no = (one, other) if here.reduces else (other, one)
    return (
        f"rank {no} is in no_sync() and rank {yes} is not: backward would wait for ever. Decide by the number of "
        f"the batch, alike on all ranks that still have data; what a rank has accumulated when it runs out counts, "
        f"without a synchronized backward of its own"
    )


def agreed(answers: Sequence[Announcement], among: Sequence[int] | None = None) -> tuple[Held, int]:
    """Return what has become of the gradients on some ranks, and the first of them that says so.

    Args:
        answers: of all ranks.
        among: the ranks; without, those that still have data.
    """
    if among is None:
        among = [rank for rank, answer in enumerate(answers) if answer.status is Status.RUNNING]
    held, rank = max((answers[rank].held, -rank) for rank in among)
    return held, -rank

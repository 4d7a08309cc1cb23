"""In which order a training loop calls the joinables of a Join block, and so which call the other ranks make next.

While all ranks have data, only forwards are announced. A rank that fails between two of them cannot ask where the
others are; but they run the same loop, and go on as this rank did the last time that it was here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from zeroshard.joining.attendance import Call

from zeroshard_integrations.join.announcements import Kind

_REMEMBERED = 256
_LONGEST = 32


class Made(NamedTuple):
    """A call.

    Attributes:
        kind: what it does.
        joinable: the place of the joinable that is called.
        call: of a sharded optimizer, what is called.
        reduces: of a backward, whether it reduces gradients.
    """

    kind: Kind
    joinable: int
    call: Call | None = None
    reduces: bool = False


class CallOrder:
    """Remembers the calls of one rank."""

    def __init__(self) -> None:
        self._made: deque[Made] = deque(maxlen=_REMEMBERED)

    def add(self, made: Made) -> None:
        """Remember a call."""
        self._made.append(made)

    @property
    def last(self) -> Made | None:
        """The last call."""
        return self._made[-1] if self._made else None

    @property
    def places(self) -> frozenset[int]:
        """The places of the joinables that were called."""
        return frozenset([made.joinable for made in self._made])

    def expected(self) -> Sequence[Made]:
        """Return the calls that follow, as far as they are known: those that followed where the same ones had preceded.

        Returns:
            In order; empty if nothing like the last call was called before.
        """
        made = list(self._made)
        end = len(made)
        best, length = 0, 0
        for here in range(end - 1, 0, -1):
            alike = 0
            while alike < min(here, _LONGEST) and made[here - 1 - alike] == made[end - 1 - alike]:
                alike += 1
            if alike > length:
                best, length = here, alike
        return made[best:] if length else []

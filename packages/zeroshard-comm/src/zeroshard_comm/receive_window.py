"""Receiving with little memory: receives wait for their turn until there is room for their messages."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from zeroshard_comm import messages
from zeroshard_comm.messages import Message
from zeroshard_comm.process_group import RankGroup


@dataclass(eq=False)
class Receive:
    """One message to be received.

    Attributes:
        peer: group rank that sends it.
        nbytes: its length.
        tag: of the message.
        scratch: where it lies, ``nbytes`` bytes; None before it was posted and after it was released.
    """

    peer: int
    nbytes: int
    tag: int
    scratch: torch.Tensor | None = None
    message: Message | None = field(default=None, repr=False)


class ReceiveWindow:
    """Posts receives in order, as far ahead as a limit of memory allows, and keeps the memory for the next ones.

    A sender starts when its receive is posted, so a window that is as large as what is on its way keeps the wire busy.
    Two receives are posted whatever their size: a sum holds one while it waits for the next. Any thread may call any
    method.

    Args:
        ranks: the group; its backend matches messages by tag.
        limit: bytes that may be posted, or kept, at a time.
    """

    def __init__(self, ranks: RankGroup, limit: int) -> None:
        self._ranks, self._limit = ranks, limit
        self._lock = threading.Lock()
        self._waiting: deque[Receive] = deque()
        self._free: dict[int, list[torch.Tensor]] = {}
        self._held = self._count = self._made = 0

    def extend(self, receives: Sequence[Receive]) -> None:
        """Append receives, and post those for which there is room.

        Raises:
            PeerLostError: if a rank is gone.
        """
        with self._lock:
            self._waiting.extend(receives)
            self._post()

    def wait(self, receive: Receive, operation: str) -> torch.Tensor:
        """Return the message of a receive as 1-D bytes; wait for receives in the order in which they were added.

        Raises:
            PeerLostError: if a rank is gone.
        """
        assert receive.message is not None
        assert receive.scratch is not None
        receive.message.wait(operation)
        return receive.scratch

    def release(self, receive: Receive) -> None:
        """Give the memory of a receive back, and post receives for which there is room now.

        Raises:
            PeerLostError: if a rank is gone.
        """
        with self._lock:
            assert receive.scratch is not None
            self._free.setdefault(receive.nbytes, []).append(receive.scratch)
            receive.scratch = receive.message = None
            self._held -= receive.nbytes
            self._count -= 1
            self._post()

    def _post(self) -> None:
        while self._waiting and (self._count < 2 or self._held + self._waiting[0].nbytes <= self._limit):
            receive = self._waiting.popleft()
            if not self._free.get(receive.nbytes):
                if self._made + receive.nbytes > self._limit:
                    # It has another length; few buckets have equal ones.
                    self._free, self._made = {}, self._held
                self._free[receive.nbytes] = [torch.empty(receive.nbytes, dtype=torch.uint8, device="cpu")]
                self._made += receive.nbytes
            receive.scratch = self._free[receive.nbytes].pop()
            self._count += 1
            self._held += receive.nbytes
            receive.message = messages.receive(self._ranks, receive.peer, receive.scratch, receive.tag, "backward()")

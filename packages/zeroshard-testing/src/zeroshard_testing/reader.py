"""What the controller sends to a rank: tests for the main thread, questions for a thread that answers at any time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from zeroshard_testing.ipc import Channel, ClosedError, Message
from zeroshard_testing.stacks import OWN_THREADS


class Reader:
    """Reads the control channel in a thread of its own, so that a rank can be asked what it does while it does it.

    From now on only this object receives from the channel. Replies to messages whose ``op`` is ``"look"`` are what
    ``answer`` returns, which is called in the reading thread.
    """

    def __init__(self, channel: Channel, answer: Callable[[Message], Message]) -> None:
        self._channel = channel
        self._answer = answer
        self._messages: queue.SimpleQueue[tuple[Message, bytes] | ClosedError] = queue.SimpleQueue()
        threading.Thread(target=self._read, name=f"{OWN_THREADS}reader", daemon=True).start()

    def take(self) -> tuple[Message, bytes]:
        """Wait for the next message that is no question, with its payload, or raise ClosedError."""
        found = self._messages.get()
        if isinstance(found, ClosedError):
            raise found
        return found

    def _read(self) -> None:
        try:
            while True:
                message, payload = self._channel.receive()
                if message["op"] == "look":
                    self._channel.send(self._answer(message))
                else:
                    self._messages.put((message, payload))
        except ClosedError as error:
            self._messages.put(error)

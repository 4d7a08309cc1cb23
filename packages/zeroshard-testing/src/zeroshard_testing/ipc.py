"""Messages between the controller and its processes: framed JSON, with bytes and file descriptors."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from json import dumps, loads
from typing import Any

_FRAME = struct.Struct("!II")
_MAX_DESCRIPTORS = 8

Message = dict[str, Any]


class ClosedError(Exception):
    """Raised if the other end has closed the channel, or its process is gone."""


class Channel:
    """One end of a stream socket that carries messages.

    A frame is two 32-bit big-endian lengths in bytes, a JSON object of the first length and an opaque payload of the
    second. This module interprets only JSON; the caller decides which payloads are pickled and unpickled.
    The channel owns its socket. All methods raise ClosedError if the other end is gone.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sending = threading.Lock()
        self._buffer = bytearray()
        self._descriptors: list[int] = []

    def fileno(self) -> int:
        """Return the descriptor for `select`; -1 if the channel is closed."""
        return self._sock.fileno()

    def send(self, message: Message, payload: bytes = b"", descriptors: Sequence[int] = ()) -> None:
        """Send one message, from any thread. The receiver gets duplicates of the descriptors."""
        body = dumps(message).encode()
        frame = _FRAME.pack(len(body), len(payload)) + body + payload
        try:
            with self._sending:
                sent = socket.send_fds(self._sock, [frame], descriptors) if descriptors else 0
                self._sock.sendall(frame[sent:])
        except OSError as error:
            raise ClosedError(str(error)) from error

    def receive(self) -> tuple[Message, bytes]:
        """Wait for a whole message, and return it with its payload."""
        while (message := next(self._parsed(), None)) is None:
            self._fill()
        return message

    def receive_ready(self) -> Iterator[tuple[Message, bytes]]:
        """Read once, after a selector reported data, and yield every complete message."""
        yield from self._parsed()
        self._fill()
        yield from self._parsed()

    def take_descriptors(self, count: int) -> list[int]:
        """Return the next ``count`` descriptors in the order in which they were sent. The caller must close them."""
        taken, self._descriptors = self._descriptors[:count], self._descriptors[count:]
        return taken

    def shut_down(self) -> None:
        """End the connection, even if other processes hold copies of this end."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end. Safe to call repeatedly."""
        self._sock.close()
        for descriptor in self.take_descriptors(len(self._descriptors)):
            socket.close(descriptor)

    def _fill(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._sock, 1 << 16, _MAX_DESCRIPTORS)
        except OSError as error:
            raise ClosedError(str(error)) from error
        if not data:
            raise ClosedError("end of stream")
        self._descriptors += descriptors
        self._buffer += data

    def _parsed(self) -> Iterator[tuple[Message, bytes]]:
        while len(self._buffer) >= _FRAME.size:
            body_size, payload_size = _FRAME.unpack_from(self._buffer)
            middle = _FRAME.size + body_size
            end = middle + payload_size
            if len(self._buffer) < end:
                return
            body = self._buffer[_FRAME.size : middle]
            payload = bytes(self._buffer[middle:end])
            del self._buffer[:end]
            yield loads(body), payload

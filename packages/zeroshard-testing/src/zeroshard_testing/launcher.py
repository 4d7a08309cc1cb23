"""Worker processes as the controller holds them, and what every way of launching them has in common."""

from __future__ import annotations

import os
import selectors
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import IO

from zeroshard_testing.ipc import Channel, ClosedError, Message

BOOT_TIMEOUT = 120.0
"""Seconds until a process that is not ready is an error; the first one loads torch, perhaps from a cold disk."""

SEND_TIMEOUT = 60.0
"""Seconds until a worker that does not take its message counts as gone."""


class LaunchError(RuntimeError):
    """The worker processes cannot be started; the text shows what the failing process wrote."""


@dataclass
class Child:
    """A worker process. Only its launcher changes the handle.

    Attributes:
        identity: Number of the child, never used twice by a launcher.
        channel: Control channel to it.
        stdout: File that its standard output goes to, None when that is the controller's own.
        stderr: Likewise for standard error.
        stacks: File that it writes Python stacks to.
        journal: File that it writes its latest collectives to; see `zeroshard_testing.journal`.
        pid: Process id, None until it is known.
        status: Exit status, negative for a signal, None while it runs.
        ready: What it reported when it was ready, None before.
    """

    identity: int
    channel: Channel
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None
    stacks: IO[bytes]
    journal: IO[bytes]
    pid: int | None = None
    status: int | None = None
    ready: Message | None = None

    @property
    def files(self) -> list[IO[bytes]]:
        """The files that it writes to."""
        return [file for file in (self.stdout, self.stderr, self.stacks) if file is not None]

    def forget_output(self) -> None:
        """Empty its files, before a test."""
        for file in self.files:
            if size_of(file):
                os.ftruncate(file.fileno(), 0)

    def close(self) -> None:
        """Close the controller's end of everything. Safe to call repeatedly."""
        self.channel.close()
        for file in (*self.files, self.journal):
            file.close()


class Launcher(ABC):
    """Starts and ends worker processes. Only the controller's main thread may call it."""

    channel: Channel | None = None
    """Becomes readable when there is news of the processes; None where news have to be asked for."""

    @abstractmethod
    def start(self, request: Message) -> Child:
        """Start a process; it comes up in the background.

        Args:
            request: What `zeroshard_testing.worker_main.run_child` is to do.

        Raises:
            LaunchError: If it cannot be started.
        """

    @abstractmethod
    def kill(self, child: Child) -> None:
        """End a process and all that it has started, now. Its handle must not be used any more."""

    @abstractmethod
    def take_news(self) -> None:
        """Bring process ids and exit statuses up to date, without waiting.

        Raises:
            LaunchError: If no process can be started any more.
        """

    @abstractmethod
    def close(self) -> None:
        """End everything that was started, and wait until it is gone. Safe to call repeatedly."""

    def await_ready(self, children: Sequence[Child], timeout: float = BOOT_TIMEOUT) -> None:
        """Wait until every child has reported that it is ready.

        Args:
            children: Children that have been started.
            timeout: Seconds.

        Raises:
            LaunchError: If one ends or stays silent instead.
        """
        deadline = time.monotonic() + timeout
        while waiting := [child for child in children if child.ready is None]:
            left = deadline - time.monotonic()
            if left <= 0:
                raise LaunchError(f"worker processes are not ready after {timeout:.0f} s")
            news = [] if self.channel is None else [self.channel]
            readable = readable_channels([*news, *(child.channel for child in waiting)], min(left, 1.0))
            self.take_news()
            for child in waiting:
                if child.channel in readable:
                    _take_readiness(child)


def readable_channels(channels: Iterable[Channel], timeout: float) -> list[Channel]:
    """Wait until one of several channels can be read.

    Args:
        channels: Open channels.
        timeout: Seconds; 0 to look once.

    Returns:
        Those that can be read, none when the time is up.
    """
    with selectors.DefaultSelector() as selector:
        for channel in channels:
            selector.register(channel, selectors.EVENT_READ, channel)
        return [key.data for key, _ in selector.select(timeout)]


def size_of(file: IO[bytes]) -> int:
    """Return how many bytes a child has written to one of its files so far."""
    return os.fstat(file.fileno()).st_size


def text_of(file: IO[bytes] | None) -> str:
    """Return what a child has written to one of its files so far."""
    if file is None or not size_of(file):
        return ""
    file.seek(0)
    return file.read().decode(errors="replace")


def _take_readiness(child: Child) -> None:
    try:
        for message, _ in child.channel.receive_ready():
            child.ready = message
    except ClosedError as error:
        written = "".join(text_of(file) for file in child.files)
        raise LaunchError(f"a worker process ended while it started. It wrote:\n{written or '(nothing)'}") from error

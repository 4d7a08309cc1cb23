"""Worker processes as the controller holds them, and what every way of launching them has in common."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO

from zeroshard_testing.ipc import Channel, ClosedError, Message
from zeroshard_testing.journal import SIZE as JOURNAL_SIZE

# Seconds until a process that is not ready is an error; the first one loads torch, perhaps from a cold disk.
_BOOT_TIMEOUT = 120.0
# Seconds until a worker that does not take its message counts as gone.
_SEND_TIMEOUT = 60.0


class LaunchError(RuntimeError):
    """The worker processes cannot be started; the text shows what the failing process wrote."""


@dataclass
class Child:
    """A worker process and the files that it writes to. Only its launcher changes the handle.

    A launcher never uses an ``identity`` twice. ``status``, negative for a signal, is None while the process runs;
    ``ready`` is what it reported when it was ready, empty before.
    """

    identity: int
    channel: Channel
    stdout: IO[bytes]
    stderr: IO[bytes]
    stacks: IO[bytes]
    journal: IO[bytes]
    pid: int | None = None
    status: int | None = None
    ready: Message = field(default_factory=dict)

    def output(self) -> list[tuple[str, str]]:
        """Return what it has written since `forget_output`, by stream, without streams that it has not used."""
        written = {"stdout": text_of(self.stdout), "stderr": text_of(self.stderr)}
        return [(stream, text) for stream, text in written.items() if text]

    def forget_output(self) -> None:
        """Empty its files, before a test."""
        for file in (self.stdout, self.stderr, self.stacks):
            os.ftruncate(file.fileno(), 0)

    def close(self) -> None:
        """Close the controller's end of everything. Safe to call repeatedly."""
        for end in (self.channel, self.stdout, self.stderr, self.stacks, self.journal):
            end.close()


class Launcher(ABC):
    """Starts and ends worker processes. Only the controller's main thread may call it."""

    news: Sequence[Channel] = ()
    """Becomes readable when there is news of the processes; empty where news have to be asked for."""

    def __init__(self) -> None:
        self._children: dict[int, Child] = {}
        self._started = 0

    def start(self, request: Message) -> Child:
        """Start a process, which comes up in the background; ``request`` is for `worker_main.run_child`."""
        channel, theirs = new_channel()
        names = [f"{self._started}-{name}" for name in ("stdout", "stderr", "stacks", "journal")]
        stdout, stderr, stacks, journal = map(self._open, names)
        journal.truncate(JOURNAL_SIZE)
        child = Child(self._started, channel, stdout, stderr, stacks, journal)
        self._started += 1
        with theirs:
            self._launch(child, request, theirs)
        self._children[child.identity] = child
        return child

    def kill(self, child: Child) -> None:
        """End a process and all that it has started, now. Its handle must not be used any more."""
        child.close()
        if self._children.pop(child.identity, None) is not None:
            self._end(child)

    def close(self) -> None:
        """End everything that was started, and wait until it is gone. Safe to call repeatedly."""
        for child in list(self._children.values()):
            self.kill(child)

    def await_ready(self, children: Sequence[Child]) -> None:
        """Wait until every child has reported that it is ready. Raises LaunchError if one ends or stays silent."""
        deadline = time.monotonic() + _BOOT_TIMEOUT
        while waiting := {child.channel: child for child in children if not child.ready}:
            left = deadline - time.monotonic()
            if left <= 0:
                raise LaunchError(f"worker processes are not ready after {_BOOT_TIMEOUT:.0f} s")
            readable = readable_channels([*self.news, *waiting], min(left, 1.0))
            self.take_news()
            for channel in waiting.keys() & readable:
                _take_readiness(waiting[channel])

    @abstractmethod
    def take_news(self) -> None:
        """Update process ids and exit statuses, at once. Raises LaunchError if no process can be started."""

    @abstractmethod
    def _open(self, name: str) -> IO[bytes]:
        """Open an unbuffered file that one child writes to: at its end, so that it can be emptied meanwhile."""

    @abstractmethod
    def _launch(self, child: Child, request: Message, theirs: socket.socket) -> None:
        """Start the process, with ``theirs`` as its end of the control channel."""

    @abstractmethod
    def _end(self, child: Child) -> None:
        """End the process of a child whose handle is closed."""


def command(module: str, *arguments: object) -> list[str]:
    """Return what starts an interpreter that finds modules as this one does, and calls ``main`` of one of them."""
    program = (
        "import importlib, json, sys; sys.path[:], module, arguments = json.loads(sys.argv[1]); "
        "importlib.import_module(module).main(*arguments)"
    )
    return [sys.executable, "-c", program, json.dumps([sys.path, module, arguments])]


def new_channel() -> tuple[Channel, socket.socket]:
    """Return the controller's end of a new control channel, and the other one."""
    ours, theirs = socket.socketpair()
    ours.settimeout(_SEND_TIMEOUT)
    return Channel(ours), theirs


def ask(
    children: Mapping[int, Child], question: Message, is_answer: Callable[[Message], bool], timeout: float
) -> dict[int, Message]:
    """Return by key what children that are ready answer within ``timeout`` seconds; drop what else they send."""
    waiting = {}
    for key, child in children.items():
        with suppress(ClosedError):
            child.channel.send(question)
            waiting[child.channel] = key
    answers: dict[int, Message] = {}
    deadline = time.monotonic() + timeout
    while waiting and time.monotonic() < deadline:
        for channel in readable_channels(waiting, deadline - time.monotonic()):
            try:
                found = [message for message, _ in channel.receive_ready() if is_answer(message)]
            except ClosedError:
                del waiting[channel]
            else:
                if found:
                    answers[waiting.pop(channel)] = found[-1]
    return answers


def readable_channels(channels: Iterable[Channel], timeout: float) -> list[Channel]:
    """Wait up to ``timeout`` seconds until some of several channels can be read, and return those."""
    with selectors.DefaultSelector() as selector:
        for channel in channels:
            selector.register(channel, selectors.EVENT_READ, channel)
        return [key.data for key, _ in selector.select(timeout)]


def text_of(file: IO[bytes]) -> str:
    """Return what a child has written to one of its files so far."""
    file.seek(0)
    return file.read().decode(errors="replace")


def kill_group(pid: int) -> None:
    """End a process that leads its group, and the processes that it has started and not ended."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _take_readiness(child: Child) -> None:
    try:
        for message, _ in child.channel.receive_ready():
            child.ready = message
    except ClosedError as error:
        written = "".join(text_of(file) for file in (child.stdout, child.stderr, child.stacks)) or "(nothing)"
        raise LaunchError(f"a worker process ended while it started. It wrote:\n{written}") from error

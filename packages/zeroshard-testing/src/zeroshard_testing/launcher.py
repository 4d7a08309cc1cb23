"""The controller's handles of worker processes, and of the process that starts them."""

from __future__ import annotations

import fcntl
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO

from zeroshard_testing.ipc import Channel, ClosedError, Message

# Seconds within which a process must be ready; the first one loads torch, perhaps from a cold disk.
_BOOT_TIMEOUT = 120.0
# Seconds until a worker that does not read its message counts as gone.
_SEND_TIMEOUT = 60.0
_EXIT_TIMEOUT = 10.0


class LaunchError(RuntimeError):
    """Raised if the worker processes cannot be started. The message shows the output of the failing process."""


@dataclass
class Child:
    """A worker process and the files to which it writes. Only its launcher changes the handle.

    A launcher never uses an ``identity`` twice. ``status`` is None while the process runs, and negative for a signal;
    ``ready`` is the report of the process when it became ready, and empty before.
    """

    identity: int
    channel: Channel
    stdout: IO[bytes]
    stderr: IO[bytes]
    stacks: IO[bytes]
    pid: int | None = None
    status: int | None = None
    ready: Message = field(default_factory=dict)

    def output(self) -> list[tuple[str, str]]:
        """Return the output since `forget_output` as pairs of stream and text, without unused streams."""
        written = {"stdout": text_of(self.stdout), "stderr": text_of(self.stderr)}
        return [(stream, text) for stream, text in written.items() if text]

    def forget_output(self) -> None:
        """Empty the files of the process. Called before a test."""
        for file in (self.stdout, self.stderr, self.stacks):
            os.ftruncate(file.fileno(), 0)

    def close(self) -> None:
        """Close the controller's end of the channel and the files. Safe to call repeatedly."""
        for end in (self.channel, self.stdout, self.stderr, self.stacks):
            end.close()


class Launcher:
    """Starts and ends worker processes, through a server that boots in the background. For the main thread only.

    `zeroshard_testing.rank_pytest` makes ``description``. With ``forks`` the server loads torch once and forks workers;
    without it each worker loads torch itself. With ``inherit_output`` workers write to the controller's
    own standard output and error, uncaptured.
    """

    def __init__(self, description: Message, environment: dict[str, str], *, forks: bool, inherit_output: bool) -> None:
        self._children: dict[int, Child] = {}
        self._started = 0
        self._inherit_output = inherit_output
        self._up = False
        self._log = _new_file()
        self._channel, theirs = _new_channel()
        self.news: Sequence[Channel] = [self._channel]
        """The channel, which becomes readable when a process changes its status."""
        with theirs:
            self._process = subprocess.Popen(
                command("zeroshard_testing.forkserver", theirs.fileno(), description, forks),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=environment,
                # Only the controller handles Ctrl-C, and then ends its processes.
                start_new_session=True,
            )

    def start(self, request: Message) -> Child:
        """Start a process in the background; ``request`` is the argument of `worker.run_child`."""
        channel, theirs = _new_channel()
        child = Child(self._started, channel, _new_file(), _new_file(), _new_file())
        self._started += 1
        outputs = [1, 2] if self._inherit_output else [child.stdout.fileno(), child.stderr.fileno()]
        with theirs:
            descriptors = [theirs.fileno(), *outputs, child.stacks.fileno()]
            try:
                self._channel.send({**request, "op": "start", "id": child.identity}, descriptors=descriptors)
            except ClosedError as error:
                raise self._failure() from error
        self._children[child.identity] = child
        return child

    def kill(self, child: Child) -> None:
        """End a process and its children immediately. The handle must not be used afterwards."""
        child.close()
        if self._children.pop(child.identity, None) is not None and child.status is None:
            with suppress(ClosedError):
                self._channel.send({"op": "kill", "id": child.identity})

    def close(self) -> None:
        """End all processes that were started, and wait until they are gone. Safe to call repeatedly."""
        if self._log.closed:
            return
        for child in list(self._children.values()):
            self.kill(child)
        # Processes that a test forked from this one may hold copies of the socket.
        self._channel.shut_down()
        self._channel.close()
        try:
            # A server that is still importing has no children to end.
            self._process.wait(_EXIT_TIMEOUT if self._up else 0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def await_ready(self, children: Sequence[Child]) -> None:
        """Wait until every child has reported that it is ready. Raises LaunchError if one ends or does not report."""
        deadline = time.monotonic() + _BOOT_TIMEOUT
        while waiting := {child.channel: child for child in children if not child.ready}:
            left = deadline - time.monotonic()
            if left <= 0:
                raise LaunchError(f"worker processes are not ready after {_BOOT_TIMEOUT:.0f} s")
            readable = readable_channels([*self.news, *waiting], min(left, 1.0))
            self.take_news()
            for channel in waiting.keys() & readable:
                _take_readiness(waiting[channel])

    def take_news(self) -> None:
        """Update process ids and exit statuses without waiting. Raises LaunchError if no process can be started."""
        if not readable_channels(self.news, 0):
            return
        try:
            for message, _ in self._channel.receive_ready():
                self._up = True
                child = self._children.get(message.get("id", -1))
                if child is not None:
                    child.pid, child.status = message["pid"], message["status"]
        except ClosedError as error:
            raise self._failure() from error

    def _failure(self) -> LaunchError:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        written = text_of(self._log) or "(nothing)"
        return LaunchError(f"the forkserver has ended (exit status {self._process.poll()}). It wrote:\n{written}")


def command(module: str, *arguments: object) -> list[str]:
    """Return the command of an interpreter with this one's import path that calls ``main`` of a module."""
    program = (
        "import importlib, json, sys; sys.path[:], module, arguments = json.loads(sys.argv[1]); "
        "importlib.import_module(module).main(*arguments)"
    )
    return [sys.executable, "-c", program, json.dumps([sys.path, module, arguments])]


def _new_file() -> IO[bytes]:
    """Open an unbuffered file in append mode, so that it can be emptied while a process writes to it.

    It has no name, so that nothing is left if this process is killed.
    """
    file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - lives as long as the process
    fcntl.fcntl(file.fileno(), fcntl.F_SETFL, fcntl.fcntl(file.fileno(), fcntl.F_GETFL) | os.O_APPEND)
    return file


def _new_channel() -> tuple[Channel, socket.socket]:
    """Return the controller's end of a new control channel, and the worker's end."""
    ours, theirs = socket.socketpair()
    ours.settimeout(_SEND_TIMEOUT)
    return Channel(ours), theirs


def ask(
    children: Mapping[int, Child], question: Message, is_answer: Callable[[Message], bool], timeout: float
) -> dict[int, Message]:
    """Return the answers of ready children within ``timeout`` seconds, by key. Other messages are dropped."""
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
    """Wait up to ``timeout`` seconds until channels can be read, and return these channels."""
    with selectors.DefaultSelector() as selector:
        for channel in channels:
            selector.register(channel, selectors.EVENT_READ, channel)
        return [key.data for key, _ in selector.select(timeout)]


def text_of(file: IO[bytes]) -> str:
    """Return the content of one of a child's files."""
    file.seek(0)
    return file.read().decode(errors="replace")


def kill_group(pid: int) -> None:
    """End a process that leads its group, and its children that still run."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _take_readiness(child: Child) -> None:
    try:
        for message, _ in child.channel.receive_ready():
            child.ready = message
    except ClosedError as error:
        written = "".join(text_of(file) for file in (child.stdout, child.stderr, child.stacks)) or "(nothing)"
        raise LaunchError(f"a worker process ended while it started. It wrote:\n{written}") from error

"""Starts and ends worker processes through the forkserver, from the controller's side."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO

from zeroshard_testing.wire import Channel, Closed, Message

_BOOT_TIMEOUT = 120.0
_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from zeroshard_testing.forkserver import main; main(int(sys.argv[1]), json.loads(sys.argv[3]))"
)


class LaunchError(RuntimeError):
    """The worker processes cannot be started; the text shows what the failing process wrote."""


@dataclass
class Child:
    """A forked process, as the controller knows it. Only the launcher changes it, but for ``channel``'s traffic.

    Attributes:
        identity: Number of the child, never used twice.
        channel: Control channel to it.
        stdout: File that its standard output goes to, None when that is the controller's own.
        stderr: Likewise for standard error.
        stacks: File that it writes Python stacks to.
        pid: Process id, None until the forkserver has told it.
        status: Exit status, negative for a signal, None while it runs.
        ready: What it reported when it was ready, None before.
    """

    identity: int
    channel: Channel
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None
    stacks: IO[bytes]
    pid: int | None = None
    status: int | None = None
    ready: Message | None = None
    output_files: list[IO[bytes]] = field(init=False)

    def __post_init__(self) -> None:
        self.output_files = [file for file in (self.stdout, self.stderr, self.stacks) if file is not None]

    def forget_output(self) -> None:
        """Empty the files of output and stacks, before a test."""
        for file in self.output_files:
            if os.fstat(file.fileno()).st_size:
                os.ftruncate(file.fileno(), 0)


def text_of(file: IO[bytes] | None) -> str:
    """Return what a child has written to one of its files so far."""
    if file is None:
        return ""
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), size, 0).decode(errors="replace") if size else ""


class ForkServer:
    """The controller's handle on the forkserver. Boots in the background; only the controller's main thread calls it.

    Args:
        pytest_args: Command line of the pytest that is configured in the forkserver.
        inherit_output: Whether children write to the controller's own standard output and error, uncaptured.
    """

    def __init__(self, pytest_args: Sequence[str], *, inherit_output: bool) -> None:
        self._inherit_output = inherit_output
        self._log = _append_only_file()
        self._children: dict[int, Child] = {}
        self._next_identity = 0
        self._up = False
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOTSTRAP, str(theirs.fileno()), json.dumps(sys.path), json.dumps(pytest_args)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=_forkserver_environment(),
                # Ctrl-C is the controller's; what it starts ends when it says so.
                start_new_session=True,
            )
        self.channel = Channel(ours)

    def fork(self, request: Message) -> Child:
        """Ask for a child; it comes into being in the background.

        Args:
            request: What `zeroshard_testing.child.run_child` is to do.

        Raises:
            LaunchError: If the forkserver is gone.
        """
        ours, theirs = socket.socketpair()
        files = [None, None] if self._inherit_output else [_append_only_file(), _append_only_file()]
        child = Child(self._next_identity, Channel(ours), files[0], files[1], _append_only_file())
        self._next_identity += 1
        self._children[child.identity] = child
        outputs = [1, 2] if self._inherit_output else [file.fileno() for file in files if file is not None]
        with theirs:
            descriptors = [theirs.fileno(), *outputs, child.stacks.fileno()]
            message = {**request, "op": "fork", "id": child.identity, "descriptors": len(descriptors)}
            try:
                self.channel.send(message, descriptors=descriptors)
            except Closed as error:
                raise LaunchError(self._why()) from error
        return child

    def kill(self, child: Child) -> None:
        """End a child and all that it has started, now. Its handle must not be used any more."""
        child.channel.close()
        for file in child.output_files:
            file.close()
        self._children.pop(child.identity, None)
        if child.status is None:
            with contextlib.suppress(Closed):
                self.channel.send({"op": "kill", "id": child.identity})

    def take_news(self) -> None:
        """Read what the forkserver has to say: process ids and exit statuses. Call when ``channel`` is readable.

        Raises:
            LaunchError: If the forkserver is gone.
        """
        try:
            for message, _ in self.channel.receive_ready():
                self._up = True
                child = self._children.get(message.get("id", -1))
                if child is not None and message["op"] == "forked":
                    child.pid = message["pid"]
                elif child is not None:
                    child.status = message["status"]
        except Closed as error:
            raise LaunchError(self._why()) from error

    def await_ready(self, children: Sequence[Child], timeout: float = _BOOT_TIMEOUT) -> None:
        """Wait until every child has reported that it is ready.

        Args:
            children: Children that have been asked for.
            timeout: Seconds.

        Raises:
            LaunchError: If one ends or stays silent instead.
        """
        deadline = time.monotonic() + timeout
        while waiting := [child for child in children if child.ready is None]:
            left = deadline - time.monotonic()
            readable, _, _ = select.select([self.channel, *(child.channel for child in waiting)], [], [], max(left, 0))
            if self.channel in readable:
                self.take_news()
            for child in waiting:
                if child.channel in readable:
                    self._take_readiness(child)
            if left <= 0:
                raise LaunchError(f"worker processes not ready after {timeout:.0f} s. {self._why()}")

    def close(self) -> None:
        """End everything that was started here, and wait until it is gone. Safe to call repeatedly."""
        for child in list(self._children.values()):
            self.kill(child)
        self.channel.close()
        try:
            self._process.wait(timeout=10 if self._up else 1)
        except subprocess.TimeoutExpired:
            # Still importing, say: it has no children then, or is past helping.
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _take_readiness(self, child: Child) -> None:
        try:
            for message, _ in child.channel.receive_ready():
                child.ready = message
        except Closed as error:
            raise LaunchError(
                f"a worker process ended while it started:\n{text_of(child.stdout)}{text_of(child.stderr)}"
                f"{text_of(child.stacks)}"
            ) from error

    def _why(self) -> str:
        return f"The forkserver wrote:\n{text_of(self._log) or '(nothing)'}"


def _append_only_file() -> IO[bytes]:
    """Open a nameless temporary file that can be emptied while another process writes to it."""
    import fcntl

    file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - lives as long as the child
    flags = fcntl.fcntl(file.fileno(), fcntl.F_GETFL)
    fcntl.fcntl(file.fileno(), fcntl.F_SETFL, flags | os.O_APPEND)
    return file


def _forkserver_environment() -> dict[str, str]:
    environment = dict(os.environ)
    # One thread a rank: the ranks share the machine. Read once, when torch is loaded.
    environment.setdefault("OMP_NUM_THREADS", "1")
    # Only what is needed to rewrite assertions is loaded there; plugins and options act in the controller.
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    environment.pop("PYTEST_ADDOPTS", None)
    environment.pop("PYTEST_PLUGINS", None)
    return environment

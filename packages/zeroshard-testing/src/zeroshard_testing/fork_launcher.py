"""Launches workers by forking them from a process that has torch loaded: milliseconds each."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import subprocess
import tempfile
from typing import IO

from zeroshard_testing.ipc import ClosedError, Message
from zeroshard_testing.launcher import Child, Launcher, LaunchError, command, new_channel, readable_channels, text_of

_EXIT_TIMEOUT = 10.0


class ForkLauncher(Launcher):
    """Starts the forkserver, which boots in the background, and hands requests to it.

    ``description`` is made by `zeroshard_testing.rank_pytest`. With ``inherit_output`` workers write to the
    controller's own standard output and error, uncaptured.
    """

    def __init__(self, description: Message, environment: dict[str, str], *, inherit_output: bool) -> None:
        super().__init__()
        self._inherit_output = inherit_output
        self._up = False
        self._log = self._open("log")
        self._channel, theirs = new_channel()
        self.news = [self._channel]
        with theirs:
            self._process = subprocess.Popen(
                command("zeroshard_testing.forkserver", theirs.fileno(), description),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=environment,
                # Ctrl-C is the controller's; what it starts ends when it says so.
                start_new_session=True,
            )

    def take_news(self) -> None:
        """See `Launcher.take_news`."""
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

    def close(self) -> None:
        """See `Launcher.close`."""
        if self._log.closed:
            return
        super().close()
        # What a test has forked from this process may hold a copy of the socket.
        self._channel.shut_down()
        self._channel.close()
        try:
            # A server that is still importing has no children, and nothing to say goodbye to.
            self._process.wait(_EXIT_TIMEOUT if self._up else 0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _open(self, name: str) -> IO[bytes]:  # noqa: ARG002 - nameless: nothing is left if the controller is killed
        file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - lives as long as the child
        flags = fcntl.fcntl(file.fileno(), fcntl.F_GETFL)
        fcntl.fcntl(file.fileno(), fcntl.F_SETFL, flags | os.O_APPEND)
        return file

    def _launch(self, child: Child, request: Message, theirs: socket.socket) -> None:
        outputs = [1, 2] if self._inherit_output else [child.stdout.fileno(), child.stderr.fileno()]
        descriptors = [theirs.fileno(), *outputs, child.stacks.fileno(), child.journal.fileno()]
        try:
            self._channel.send({**request, "op": "fork", "id": child.identity}, descriptors=descriptors)
        except ClosedError as error:
            raise self._failure() from error

    def _end(self, child: Child) -> None:
        if child.status is None:
            with contextlib.suppress(ClosedError):
                self._channel.send({"op": "kill", "id": child.identity})

    def _failure(self) -> LaunchError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        written = text_of(self._log) or "(nothing)"
        return LaunchError(f"the forkserver is gone (exit status {self._process.poll()}). It wrote:\n{written}")

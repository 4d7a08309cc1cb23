"""Launches workers by forking them from a process that has torch loaded: milliseconds each."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import subprocess
import sys
import tempfile
from typing import IO

from zeroshard_testing.ipc import Channel, ClosedError, Message
from zeroshard_testing.journal import SIZE as JOURNAL_SIZE
from zeroshard_testing.launcher import SEND_TIMEOUT, Child, Launcher, LaunchError, readable_channels, text_of

_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from zeroshard_testing.forkserver import main; main(int(sys.argv[1]), json.loads(sys.argv[3]))"
)
_EXIT_TIMEOUT = 10.0


class ForkLauncher(Launcher):
    """Starts the forkserver, which boots in the background, and hands requests to it.

    Args:
        description: Of the pytest of each worker; see `zeroshard_testing.rank_pytest`.
        environment: Environment of the forkserver.
        inherit_output: Whether workers write to the controller's own standard output and error, uncaptured.
    """

    channel: Channel

    def __init__(self, description: Message, environment: dict[str, str], *, inherit_output: bool) -> None:
        self._inherit_output = inherit_output
        self._children: dict[int, Child] = {}
        self._started = 0
        self._up = False
        self._log = _append_only_file()
        ours, theirs = socket.socketpair()
        ours.settimeout(SEND_TIMEOUT)
        self.channel = Channel(ours)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOTSTRAP, str(theirs.fileno()), json.dumps(sys.path), json.dumps(description)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=environment,
                # Ctrl-C is the controller's; what it starts ends when it says so.
                start_new_session=True,
            )

    def start(self, request: Message) -> Child:
        """See `Launcher.start`."""
        ours, theirs = socket.socketpair()
        ours.settimeout(SEND_TIMEOUT)
        stdout, stderr = (None, None) if self._inherit_output else (_append_only_file(), _append_only_file())
        journal = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - lives as long as the child
        journal.truncate(JOURNAL_SIZE)
        child = Child(self._started, Channel(ours), stdout, stderr, _append_only_file(), journal)
        self._started += 1
        self._children[child.identity] = child
        outputs = [1 if stdout is None else stdout.fileno(), 2 if stderr is None else stderr.fileno()]
        descriptors = [theirs.fileno(), *outputs, child.stacks.fileno(), journal.fileno()]
        message = {**request, "op": "fork", "id": child.identity, "descriptors": len(descriptors)}
        with theirs:
            try:
                self.channel.send(message, descriptors=descriptors)
            except ClosedError as error:
                raise self._failure() from error
        return child

    def kill(self, child: Child) -> None:
        """See `Launcher.kill`."""
        child.close()
        if self._children.pop(child.identity, None) is not None and child.status is None:
            with contextlib.suppress(ClosedError):
                self.channel.send({"op": "kill", "id": child.identity})

    def take_news(self) -> None:
        """See `Launcher.take_news`."""
        if not readable_channels([self.channel], 0):
            return
        try:
            for message, _ in self.channel.receive_ready():
                self._up = True
                child = self._children.get(message.get("id", -1))
                if child is not None and message["op"] == "forked":
                    child.pid = message["pid"]
                elif child is not None:
                    child.status = message["status"]
        except ClosedError as error:
            raise self._failure() from error

    def close(self) -> None:
        """See `Launcher.close`."""
        if self._log.closed:
            return
        for child in list(self._children.values()):
            self.kill(child)
        self.channel.close()
        try:
            # A server that is still importing has no children, and nothing to say goodbye to.
            self._process.wait(_EXIT_TIMEOUT if self._up else 0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _failure(self) -> LaunchError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        written = text_of(self._log) or "(nothing)"
        return LaunchError(f"the forkserver is gone (exit status {self._process.poll()}). It wrote:\n{written}")


def _append_only_file() -> IO[bytes]:
    """Open a nameless temporary file that can be emptied while another process writes to it."""
    file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - lives as long as the child
    flags = fcntl.fcntl(file.fileno(), fcntl.F_GETFL)
    fcntl.fcntl(file.fileno(), fcntl.F_SETFL, flags | os.O_APPEND)
    return file

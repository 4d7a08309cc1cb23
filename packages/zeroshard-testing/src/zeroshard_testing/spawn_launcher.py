"""Launches each worker as a process of its own that loads torch for itself: for systems without a forkserver."""

from __future__ import annotations

import socket
import subprocess

from zeroshard_testing.ipc import Message
from zeroshard_testing.launcher import Child, Launcher, command, kill_group


class SpawnLauncher(Launcher):
    """Starts every worker with a fresh interpreter; it takes the arguments of a `ForkLauncher`."""

    def __init__(self, description: Message, environment: dict[str, str], *, inherit_output: bool) -> None:
        super().__init__()
        self._description = description
        self._environment = environment
        self._inherit_output = inherit_output
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def take_news(self) -> None:
        """See `Launcher.take_news`."""
        for identity, process in self._processes.items():
            self._children[identity].status = process.poll()

    def _launch(self, child: Child, request: Message, theirs: socket.socket) -> None:
        passed = theirs.fileno(), child.stacks.fileno()
        process = subprocess.Popen(
            command("zeroshard_testing.worker", self._description, request, *passed),
            stdin=subprocess.DEVNULL,
            stdout=None if self._inherit_output else child.stdout,
            stderr=None if self._inherit_output else child.stderr,
            env=self._environment,
            start_new_session=True,
            pass_fds=passed,
        )
        self._processes[child.identity] = process
        child.pid = process.pid

    def _end(self, child: Child) -> None:
        process = self._processes.pop(child.identity)
        kill_group(process.pid)
        process.wait()

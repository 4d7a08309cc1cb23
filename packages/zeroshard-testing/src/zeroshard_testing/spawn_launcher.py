"""Launches each worker as a process of its own that loads torch for itself: for systems without a forkserver."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from zeroshard_testing.ipc import Channel, Message
from zeroshard_testing.journal import SIZE as JOURNAL_SIZE
from zeroshard_testing.launcher import SEND_TIMEOUT, Child, Launcher

_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from zeroshard_testing.worker_main import main; "
    "main(json.loads(sys.argv[2]), json.loads(sys.argv[3]), *sys.argv[4:])"
)
_FILES = ("stdout", "stderr", "stacks", "journal")
_WINDOWS = sys.platform == "win32"


class SpawnLauncher(Launcher):
    """Starts every worker with a fresh interpreter.

    Args:
        description: Of the pytest of each worker; see `zeroshard_testing.rank_pytest`.
        environment: Environment of the workers until their first test.
        inherit_output: Whether workers write to the controller's own standard output and error, uncaptured.
    """

    def __init__(self, description: Message, environment: dict[str, str], *, inherit_output: bool) -> None:
        self._description = description
        self._environment = environment
        self._inherit_output = inherit_output
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True)
        self._started = 0
        self._processes: dict[int, tuple[Child, subprocess.Popen[bytes]]] = {}

    def start(self, request: Message) -> Child:
        """See `Launcher.start`."""
        ours, theirs = socket.socketpair()
        ours.settimeout(SEND_TIMEOUT)
        paths = [Path(self._folder.name, f"{self._started}-{name}") for name in _FILES]
        stdout, stderr, stacks, journal = (path.open("ab+", buffering=0) for path in paths)
        journal.truncate(JOURNAL_SIZE)
        arguments = [json.dumps(sys.path), json.dumps(self._description), json.dumps(request), *map(str, paths[2:])]
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", _BOOTSTRAP, *arguments],
                stdin=subprocess.PIPE,
                stdout=None if self._inherit_output else stdout,
                stderr=None if self._inherit_output else stderr,
                env=self._environment,
                start_new_session=not _WINDOWS,
                pass_fds=[] if _WINDOWS else [theirs.fileno()],
            )
            # Windows shares a socket with a process that exists already; elsewhere its number is enough.
            if sys.platform == "win32":
                shared = theirs.share(process.pid).hex()
            else:
                shared = str(theirs.fileno())
            with contextlib.suppress(OSError), process.stdin as stdin:  # type: ignore[union-attr]
                stdin.write(shared.encode() + b"\n")
        child = Child(self._started, Channel(ours), stdout, stderr, stacks, journal, pid=process.pid)
        self._started += 1
        self._processes[child.identity] = child, process
        return child

    def kill(self, child: Child) -> None:
        """See `Launcher.kill`."""
        child.close()
        _, process = self._processes.pop(child.identity, (None, None))
        if process is not None:
            _kill_group(process)
            process.wait()
            for name in _FILES:
                Path(self._folder.name, f"{child.identity}-{name}").unlink(missing_ok=True)

    def take_news(self) -> None:
        """See `Launcher.take_news`."""
        for child, process in self._processes.values():
            if child.status is None and process.poll() is not None:
                child.status = process.returncode

    def close(self) -> None:
        """See `Launcher.close`."""
        for child, _ in list(self._processes.values()):
            self.kill(child)
        self._folder.cleanup()


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    if sys.platform == "win32":
        process.kill()
        return
    # What a test started and left behind ends with the rank that started it.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)

"""The entry of a worker that was not forked: configures pytest, loads torch, and becomes what it was started for."""

from __future__ import annotations

import os
import socket
import sys

from zeroshard_testing.child import run_child
from zeroshard_testing.idle_pytest import with_idle_pytest
from zeroshard_testing.wire import Channel, Message


def main(pytest_args: list[str], request: Message, stacks: str, journal: str) -> None:
    """Become a child. Does not return.

    Args:
        pytest_args: Command line for the pytest that is configured here.
        request: What to become; see `zeroshard_testing.child.run_child`.
        stacks: Path of the file for Python stacks.
        journal: Path of the file for the latest collectives.
    """
    shared = sys.stdin.readline().strip()
    if sys.platform == "win32":
        control = socket.fromshare(bytes.fromhex(shared))
    else:
        control = socket.socket(fileno=int(shared))
    descriptor = os.open(stacks, os.O_WRONLY | os.O_APPEND)
    kept = os.open(journal, os.O_RDWR)
    with_idle_pytest(pytest_args, lambda session: run_child(Channel(control), request, descriptor, kept, session))
    os._exit(0)

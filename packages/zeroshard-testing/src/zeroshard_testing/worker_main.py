"""What a process of the pool becomes: a rank, or the host of the store, which also looks what the machine has."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from typing import TYPE_CHECKING

from zeroshard_testing import worker
from zeroshard_testing.backends import machine
from zeroshard_testing.ipc import Channel, ClosedError, Message
from zeroshard_testing.rank_pytest import run_idle_pytest

if TYPE_CHECKING:
    import pytest


def run_child(channel: Channel, request: Message, stacks: int, session: pytest.Session) -> None:
    """Become what ``kind`` in the request says, and return when the controller no longer needs this process.

    ``stacks`` is the descriptor of the file for Python stacks.
    """
    _open_streams()
    with contextlib.suppress(ClosedError):
        if request["kind"] == "rank":
            worker.serve(channel, request, stacks, session)
        else:
            _host_store(channel)


def _open_streams() -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - a descriptor, open for good
    # Whole lines, at once: what a rank wrote just before it was killed is often what explains it, and ranks that share
    # a terminal do not cut each other's lines.
    sys.stdout = open(1, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115


def _host_store(channel: Channel) -> None:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch exports it unseen

    # An IPv4 socket of our own: for peers on the dual-stack socket that TCPStore opens by itself it resolves an
    # IPv4-mapped address to a name, and now and then that lookup stalls for seconds.
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    port = listener.getsockname()[1]
    _store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    from zeroshard_testing._torch_private import probe

    channel.send({"op": "ready", "port": port, "checks_off": probe()})
    while True:
        message, _ = channel.receive()
        if message["op"] == "emulated":
            channel.send({"op": "emulated", **_emulated(builds=message["builds"])})
        else:
            channel.send({"op": "machine", **machine()})


def _emulated(*, builds: bool) -> Message:
    from zeroshard_testing.emulated import build

    error, reason = "", build.why_unavailable()
    if builds:
        try:
            build.build()
        except build.BuildError as failure:
            error = str(failure)
    return {"error": error, "reason": reason, "is_built": build.library().exists()}


def main(description: Message, request: Message, channel: int, stacks: int) -> None:
    """Become a child of a launcher that does not fork, with the descriptors of a socket and a file. Does not return."""
    control = socket.socket(fileno=channel)
    run_idle_pytest(description, lambda session: run_child(Channel(control), request, stacks, session))
    os._exit(0)

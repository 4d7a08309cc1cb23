"""What a process of the pool becomes: a rank, the host of the store, or a probe of the machine's accelerators."""

from __future__ import annotations

import os
import socket
import sys
from typing import TYPE_CHECKING

from zeroshard_testing import worker
from zeroshard_testing.ipc import Channel, ClosedError, Message
from zeroshard_testing.rank_pytest import run_idle_pytest

if TYPE_CHECKING:
    import pytest


def run_child(channel: Channel, request: Message, stacks: int, journal: int, session: pytest.Session) -> None:
    """Do what the controller asked this process for, and return when it is done.

    Args:
        channel: The control channel.
        request: ``kind`` says what to become; a rank's request also carries the store's ``port``.
        stacks: Descriptor of the file for Python stacks.
        journal: Descriptor of the file for the latest collectives.
        session: The idle pytest session of this process.
    """
    _open_streams()
    try:
        if request["kind"] == "rank":
            worker.serve(channel, request, stacks, journal, session)
        elif request["kind"] == "store":
            _host_store(channel)
        else:
            _probe_accelerators(channel)
    except ClosedError:
        # The controller wants no more of this process.
        return


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
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    from zeroshard_testing._torch_private import probe

    channel.send({"op": "ready", "port": port, "checks_off": probe()})
    try:
        channel.receive()
    finally:
        del store


def _probe_accelerators(channel: Channel) -> None:
    import torch
    import torch.distributed as dist

    available = torch.cuda.is_available()
    channel.send(
        {
            "op": "ready",
            "devices": torch.cuda.device_count() if available else 0,
            "torch": torch.__version__,
            "gloo": dist.is_available() and dist.is_gloo_available(),
            "nccl": dist.is_available() and dist.is_nccl_available(),
            "backends": list(dist.Backend.backend_list) if dist.is_available() else [],
            "available": [name for name in dist.Backend.backend_list if dist.is_backend_available(name)]
            if dist.is_available()
            else [],
            "nccl_version": list(torch.cuda.nccl.version()) if available and dist.is_nccl_available() else [],
        }
    )


def main(description: Message, request: Message, stacks: str, journal: str) -> None:
    """Become a child of a launcher that does not fork. Does not return.

    Args:
        description: Of the pytest that is configured here; see `zeroshard_testing.rank_pytest`.
        request: What to become; see `run_child`.
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
    run_idle_pytest(description, lambda session: run_child(Channel(control), request, descriptor, kept, session))
    os._exit(0)

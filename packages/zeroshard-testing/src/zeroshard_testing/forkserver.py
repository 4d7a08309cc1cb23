"""The process from which every worker is forked. It loads torch and pytest once, and does nothing else.

It runs pytest up to the point where collection would start, so that assertion rewriting and the rest of pytest's
machinery are in place in each worker, and then forks on request. It never touches CUDA, since a context does not
survive a fork, and starts no thread. It ends when the controller does, and ends every worker. If each worker must load
torch and pytest itself, this process runs no pytest, and workers are new interpreters.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial

import pytest

from zeroshard_testing.ipc import Channel, ClosedError, Message
from zeroshard_testing.launcher import command, kill_group
from zeroshard_testing.rank_pytest import run_idle_pytest
from zeroshard_testing.worker import run_child


def main(descriptor: int, description: Message, forks: bool) -> None:
    """Serve requests until the controller closes its end of the Unix socket with this descriptor."""
    channel = Channel(socket.socket(fileno=descriptor))
    if forks:
        run_idle_pytest(description, lambda session: _Server(channel, partial(_run, session), preloads=True).serve())
    else:
        _Server(channel, partial(_execute, description), preloads=False).serve()


def _run(session: pytest.Session, request: Message, control: int, stacks: int) -> None:
    run_child(Channel(socket.socket(fileno=control)), request, stacks, session)


def _execute(description: Message, request: Message, control: int, stacks: int) -> None:
    for descriptor in (control, stacks):
        os.set_inheritable(descriptor, True)
    arguments = command("zeroshard_testing.worker", description, request, control, stacks)
    os.execv(sys.executable, arguments)  # noqa: S606 - this interpreter


class _Server:
    """Forks children, reaps them, and reports to the controller how each of them ended."""

    def __init__(self, channel: Channel, become: Callable[[Message, int, int], None], *, preloads: bool) -> None:
        self._channel, self._become, self._preloads = channel, become, preloads
        self._children: dict[int, int] = {}

    def serve(self) -> None:
        """Serve until the controller is gone, then end the children and this process."""
        gc.collect()
        wakeup, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        sources: list[Channel | socket.socket] = [self._channel, wakeup]
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        try:
            self._channel.send({})
            while True:
                readable, _, _ = select.select(sources, [], [])
                if wakeup in readable:
                    wakeup.recv(4096)
                    self._reap()
                if self._channel in readable:
                    for message, _ in self._channel.receive_ready():
                        self._handle(message)
        except ClosedError:
            pass
        finally:
            self._kill_all()
            os._exit(0)

    def _handle(self, message: Message) -> None:
        if message["op"] == "kill":
            if message["id"] in self._children:
                kill_group(self._children[message["id"]])
            return
        for name in message.get("preload", ()) if self._preloads else ():
            # Load the modules that a worker loaded before its test failed, so that later workers need not.
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        # Pages stay shared with the workers as long as the garbage collector does not write to them.
        gc.freeze()
        descriptors = self._channel.take_descriptors(4)
        pid = os.fork()
        if pid == 0:
            self._become_child(message, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        self._children[message["id"]] = pid
        self._channel.send({"id": message["id"], "pid": pid, "status": None})

    def _become_child(self, message: Message, descriptors: list[int]) -> None:
        status = 1
        try:
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._wakeup.close()
            self._channel.close()
            control, stdout, stderr, stacks = descriptors
            for source, target in ((stdout, 1), (stderr, 2)):
                os.dup2(source, target)
                os.close(source)
            self._become(message, control, stacks)
            status = 0
        except BaseException:  # noqa: BLE001 - this process must not return into the server's code
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(status)

    def _reap(self) -> None:
        for identity, child in list(self._children.items()):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                # Processes that a test started end with the rank that started them.
                kill_group(pid)
                del self._children[identity]
                self._channel.send({"id": identity, "pid": pid, "status": os.waitstatus_to_exitcode(status)})

    def _kill_all(self) -> None:
        for pid in self._children.values():
            kill_group(pid)
        for pid in self._children.values():
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
            kill_group(pid)

"""What a process of the pool becomes: a rank, or the host of the store, which also looks what the machine has.

A rank takes tests from the controller, in a loop, and reports how each of them ended.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import queue
import signal
import socket
import sys
import threading
import time
from dataclasses import replace

import pytest

from zeroshard_testing.aborts import call_before_abort
from zeroshard_testing.backends import machine
from zeroshard_testing.calls import refuse_on_this_process
from zeroshard_testing.coverage_on_ranks import measure_coverage
from zeroshard_testing.execution import Rank
from zeroshard_testing.ipc import Channel, ClosedError, Message
from zeroshard_testing.rank_inspector import RankInspector, has_children
from zeroshard_testing.rank_pytest import run_idle_pytest
from zeroshard_testing.rank_state import RankState
from zeroshard_testing.rank_values import set_rank_values
from zeroshard_testing.stacks import OWN_THREADS

_Messages = queue.SimpleQueue[tuple[Message, bytes] | ClosedError]


def run_child(channel: Channel, request: Message, stacks: int, session: pytest.Session) -> None:
    """Become what ``kind`` in the request says, and return when the controller no longer needs this process.

    ``stacks`` is the descriptor of the file for Python stacks.
    """
    _open_streams()
    with contextlib.suppress(ClosedError):
        if request["kind"] == "rank":
            _serve(channel, request, stacks, session)
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
            from zeroshard_testing.emulated.build import availability

            channel.send({"op": "emulated", **availability(builds=message["builds"])})
        else:
            channel.send({"op": "machine", **machine()})


def _serve(channel: Channel, request: Message, stacks: int, session: pytest.Session) -> None:
    """Run tests until the controller closes the channel, or says that there are no more.

    The request has the ``port`` of the shared store, a ``temporary`` folder of this worker's own, and ``coverage`` as
    `zeroshard_testing.coverage_on_ranks` needs it. ``stacks`` is the descriptor of a file for Python stacks.
    """
    refuse_on_this_process()
    rank = Rank(channel, request, session)
    call_before_abort(lambda: channel.send(_answer("aborted", rank.inspector, rank.inspector.run)))
    # Of one thread: to walk those that are just beginning or ending crashes Python 3.11.
    faulthandler.enable(stacks, all_threads=False)
    # The controller's way to ask a rank that does not answer.
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=False, chain=False)
    save_coverage = measure_coverage(request["coverage"])
    messages: _Messages = queue.SimpleQueue()
    reading = threading.Thread(
        target=_read, args=(channel, messages, rank.inspector), name=f"{OWN_THREADS}reader", daemon=True
    )
    reading.start()
    channel.send({"op": "ready"})
    pid = os.getpid()
    while True:
        found = messages.get()
        if isinstance(found, ClosedError):
            raise found
        message, payload = found
        if message["op"] == "run":
            outcome, result = rank.run(message, payload)
            if os.getpid() != pid:
                # A copy of this process that the test has forked speaks for no rank.
                os._exit(1)
            rank.inspector.end()
            rank.groups.end(message)
            for stream in (sys.stdout, sys.stderr):
                # A test may have put anything in their place.
                with contextlib.suppress(Exception):
                    stream.flush()
            if not outcome.is_clean:
                # This process will be replaced.
                save_coverage()
            # A reference left here would close the group's connections on the next test's time.
            set_rank_values()
            ended = _look(rank.inspector, message["run"], details=False)
            report = {**outcome.to_message(), "state": ended.to_message(), "held": rank.held()}
            report["loaded"] = [] if outcome.is_clean else rank.loaded()
            channel.send({"op": "outcome", "run": message["run"], **report}, result)
        elif message["op"] == "retire":
            rank.groups.retire()
        elif message["op"] == "tear down":
            channel.send({"op": "torn down", "error": rank.tear_down(message["keep"])})
        else:
            save_coverage()
            # As Python waits at its end, but not for ever: an executor's thread may be idle.
            deadline = time.monotonic() + 0.2
            for thread in {*threading.enumerate()} - {threading.main_thread()}:
                if not thread.daemon:
                    thread.join(max(deadline - time.monotonic(), 0))
            channel.send({"op": "bye"})
            return


def _read(channel: Channel, messages: _Messages, inspector: RankInspector) -> None:
    """Keep tests for the main thread, and answer questions from this one, so that a rank tells what it does meanwhile.

    From now on only this thread receives from the channel.
    """
    try:
        while True:
            message, payload = channel.receive()
            if message["op"] == "look":
                channel.send(_answer("state", inspector, message["run"], message["round"], details=message["details"]))
            else:
                messages.put((message, payload))
    except ClosedError as error:
        messages.put(error)


def _answer(op: str, inspector: RankInspector, run: int, question: int = 0, *, details: bool = True) -> Message:
    state = replace(_look(inspector, run, details=details), has_children=has_children())
    return {"op": op, "run": run, "round": question, **state.to_message()}


def _look(inspector: RankInspector, run: int, *, details: bool) -> RankState:
    try:
        return inspector.look(run, details=details)
    except Exception as error:  # noqa: BLE001 - what cannot be observed is unknown, and the process must live on
        return RankState(stacks=f"(this rank could not be observed: {error!r})")


def main(description: Message, request: Message, channel: int, stacks: int) -> None:
    """Become a child of a launcher that does not fork, with the descriptors of a socket and a file. Does not return."""
    control = socket.socket(fileno=channel)
    run_idle_pytest(description, lambda session: run_child(Channel(control), request, stacks, session))
    os._exit(0)

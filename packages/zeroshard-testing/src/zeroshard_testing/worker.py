"""The main loops of the pool's processes: a rank, or the host of the store, which also describes the machine.

A rank receives tests from the controller in a loop, and reports the outcome of each.
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
    """Run as the ``kind`` in the request, and return when the controller no longer needs this process.

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
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - a descriptor that stays open
    # Write whole lines at once: the last output of a killed rank often explains its end, and ranks that share
    # a terminal do not cut each other's lines.
    sys.stdout = open(1, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115


def _host_store(channel: Channel) -> None:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not an explicit export

    # Pass an IPv4 socket: for peers on the dual-stack socket that TCPStore opens by itself, it resolves an
    # IPv4-mapped address to a name, and that lookup sometimes stalls for seconds.
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
    """Run tests until the controller closes the channel, or ends the run.

    The request has the ``port`` of the shared store, a ``temporary`` folder of this worker's own, and ``coverage`` as
    `zeroshard_testing.coverage_on_ranks` needs it. ``stacks`` is the descriptor of a file for Python stacks.
    """
    refuse_on_this_process()
    rank = Rank(channel, request, session)
    call_before_abort(lambda: channel.send(_answer("aborted", rank.inspector, rank.inspector.run)))
    # One thread only: walking threads that start or end crashes Python 3.11.
    faulthandler.enable(stacks, all_threads=False)
    # The controller sends it to a rank that does not answer.
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
                # A process that the test forked from this one does not report for the rank.
                os._exit(1)
            rank.inspector.end()
            rank.groups.end(message)
            for stream in (sys.stdout, sys.stderr):
                # A test may have replaced them.
                with contextlib.suppress(Exception):
                    stream.flush()
            if not outcome.is_clean:
                # The controller replaces this process.
                save_coverage()
            # A reference here would delay closing the group's connections into the next test.
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
            # Python waits for them at exit. Wait no longer than this: a thread of an executor may be idle.
            deadline = time.monotonic() + 0.2
            for thread in {*threading.enumerate()} - {threading.main_thread()}:
                if not thread.daemon:
                    thread.join(max(deadline - time.monotonic(), 0))
            channel.send({"op": "bye"})
            return


def _read(channel: Channel, messages: _Messages, inspector: RankInspector) -> None:
    """Pass tests to the main thread, and answer questions in this one, so that a rank reports its state during a test.

    Only this thread receives from the channel from now on.
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
    except Exception as error:  # noqa: BLE001 - the state is unknown then, and the process must continue
        return RankState(stacks=f"(this rank could not be observed: {error!r})")


def main(description: Message, request: Message, channel: int, stacks: int) -> None:
    """Run as a child of a launcher that does not fork, given the descriptors of a socket and a file. Never returns."""
    control = socket.socket(fileno=channel)
    run_idle_pytest(description, lambda session: run_child(Channel(control), request, stacks, session))
    os._exit(0)

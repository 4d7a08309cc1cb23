"""What runs in a rank's process: a loop that takes tests from the controller and reports how each of them ended."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from dataclasses import replace

import pytest

from zeroshard_testing.calls import refuse_on_this_process
from zeroshard_testing.coverage_on_ranks import Coverage
from zeroshard_testing.execution import Rank
from zeroshard_testing.ipc import Channel, Message
from zeroshard_testing.rank_inspector import RankInspector, has_children
from zeroshard_testing.rank_state import RankState
from zeroshard_testing.rank_values import set_rank_values
from zeroshard_testing.reader import Reader


def serve(channel: Channel, request: Message, stacks: int, journal: int, session: pytest.Session) -> None:
    """Run tests until the controller closes the channel, or says that there are no more.

    The request has the ``port`` of the shared store, a ``temporary`` folder of this worker's own, and ``coverage`` as
    `zeroshard_testing.coverage_on_ranks` needs it. Stacks and latest collectives go to files, by descriptor.
    """
    refuse_on_this_process()
    faulthandler.enable(stacks, all_threads=True)
    # The controller's way to ask a rank that does not answer.
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True, chain=False)
    rank = Rank(channel, request, journal, session)
    coverage = Coverage(request["coverage"])
    reader = Reader(channel, lambda question: _answer(rank.inspector, question))
    channel.send({"op": "ready"})
    pid = os.getpid()
    while True:
        message, payload = reader.take()
        if message["op"] == "run":
            outcome, result = rank.run(message, payload)
            if os.getpid() != pid:
                # A copy of this process that the test has forked speaks for no rank.
                os._exit(1)
            rank.inspector.end()
            for stream in (sys.stdout, sys.stderr):
                # A test may have put anything in their place.
                with contextlib.suppress(Exception):
                    stream.flush()
            if not outcome.is_clean:
                # This process will be replaced.
                coverage.save()
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
            coverage.save()
            # As Python waits at its end, but not for ever: an executor's thread may be idle.
            deadline = time.monotonic() + 0.2
            for thread in {*threading.enumerate()} - {threading.main_thread()}:
                if not thread.daemon:
                    thread.join(max(deadline - time.monotonic(), 0))
            channel.send({"op": "bye"})
            return


def _answer(inspector: RankInspector, question: Message) -> Message:
    state = replace(_look(inspector, question["run"], details=question["details"]), has_children=has_children())
    return {"op": "state", "run": question["run"], "round": question["round"], **state.to_message()}


def _look(inspector: RankInspector, run: int, *, details: bool) -> RankState:
    try:
        return inspector.look(run, details=details)
    except Exception as error:  # noqa: BLE001 - what cannot be observed is unknown, and the process must live on
        return RankState(stacks=f"(this rank could not be observed: {error!r})")

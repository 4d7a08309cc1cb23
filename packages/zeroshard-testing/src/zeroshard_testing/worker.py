"""What runs in a rank's process: a loop that takes tests from the controller and reports how each of them ended."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from zeroshard_testing import outcome as kinds
from zeroshard_testing.execution import Rank, RankTest
from zeroshard_testing.faults import Faults
from zeroshard_testing.inbox import Inbox
from zeroshard_testing.process_state import ProcessState
from zeroshard_testing.rank_state import RankState
from zeroshard_testing.rank_values import set_rank_values
from zeroshard_testing.wire import Channel, Message

if TYPE_CHECKING:
    from zeroshard_testing.observer import Observer

STACK_SIGNAL = getattr(signal, "SIGUSR1", None)
"""On this signal a worker writes the Python stacks of all its threads; None where there is no such signal."""


def serve(channel: Channel, request: Message, stacks: int, journal: int, session: pytest.Session) -> None:
    """Run tests until the controller closes the channel.

    Args:
        channel: The control channel of this rank.
        request: ``port`` is where the shared store listens.
        stacks: Descriptor of the file for Python stacks.
        journal: Descriptor of the file for the latest collectives.
        session: The idle pytest session of this process.
    """
    from zeroshard_testing.collectives import watch_collectives
    from zeroshard_testing.journal import JournalWriter
    from zeroshard_testing.leftovers import Leftovers
    from zeroshard_testing.observer import Observer
    from zeroshard_testing.process_group import GroupKeeper, worker_environment
    from zeroshard_testing.waits import watch_waits

    faulthandler.enable(stacks, all_threads=True)
    if STACK_SIGNAL is not None:
        faulthandler.register(STACK_SIGNAL, stacks, all_threads=True, chain=False)
    state = ProcessState(worker_environment())
    groups = GroupKeeper(request["port"])
    faults = Faults(channel)
    waits, writer = watch_waits(faults), JournalWriter(journal)
    observer = Observer(waits, watch_collectives(writer, waits, faults), writer)
    observer.keep_destroyed_groups()
    rank = Rank(channel, groups, session, observer, faults)
    inbox = Inbox(channel, lambda question: _answer(observer, question))
    channel.send({"op": "ready"})
    pid = os.getpid()
    while True:
        message, payload = inbox.take()
        if message["op"] == "run":
            state.restore(message)
            threads = Leftovers(waits)
            outcome = RankTest(rank, message, payload).outcome()
            if os.getpid() != pid:
                # A copy of this process that the test has forked speaks for nobody.
                os._exit(1)
            observer.end()
            left = threads.describe() if outcome.is_clean else None
            if left is not None:
                outcome = replace(outcome, kind=kinds.FAILED, summary=left[0], detail=left[1], moment=time.monotonic())
            for stream in (sys.stdout, sys.stderr):
                # A test may have put anything in their place.
                with contextlib.suppress(Exception):
                    stream.flush()
            # A reference left here would close the group's connections on the next test's time.
            set_rank_values({})
            ended = _look(observer, message["run"], details=False)
            channel.send({"op": "outcome", "run": message["run"], **outcome.to_message(), "state": ended.to_message()})
        else:
            groups.retire()


def _answer(observer: Observer, question: Message) -> Message:
    state = _look(observer, question["run"], details=question["details"])
    return {"op": "state", "run": question["run"], "round": question["round"], **state.to_message()}


def _look(observer: Observer, run: int, *, details: bool) -> RankState:
    try:
        return observer.look(run, details=details)
    except Exception as error:  # noqa: BLE001 - what cannot be observed is unknown, and the process must live on
        return RankState(stacks=f"(this rank could not be observed: {error!r})")

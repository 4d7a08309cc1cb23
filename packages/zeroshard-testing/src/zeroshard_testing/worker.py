"""What runs in a rank's process: a loop that takes tests from the controller and reports how each of them ended."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from zeroshard_testing.calls import refuse_on_this_process
from zeroshard_testing.coverage_on_ranks import Coverage
from zeroshard_testing.execution import Rank, outcome_of_test
from zeroshard_testing.faults import Faults
from zeroshard_testing.ipc import Channel, Message
from zeroshard_testing.outcome import printable
from zeroshard_testing.rank_plugin import RankPlugin
from zeroshard_testing.rank_pytest import Collector
from zeroshard_testing.rank_state import RankState
from zeroshard_testing.rank_values import RankValues, set_rank_values
from zeroshard_testing.reader import Reader

if TYPE_CHECKING:
    from zeroshard_testing.rank_inspector import RankInspector

STACK_SIGNAL = getattr(signal, "SIGUSR1", None)
"""On this signal a worker writes the Python stacks of all its threads; None where there is no such signal."""


def serve(channel: Channel, request: Message, stacks: int, journal: int, session: pytest.Session) -> None:
    """Run tests until the controller closes the channel, or says that it wants no more.

    Args:
        channel: The control channel of this rank.
        request: ``port`` is where the shared store listens, ``temporary`` a folder of this worker's own, ``coverage``
            what `zeroshard_testing.coverage_on_ranks` needs, None without.
        stacks: Descriptor of the file for Python stacks.
        journal: Descriptor of the file for the latest collectives.
        session: The idle pytest session of this process.
    """
    from zeroshard_testing.collectives import record_collectives
    from zeroshard_testing.journal import JournalWriter
    from zeroshard_testing.process_group import GroupKeeper, worker_environment
    from zeroshard_testing.process_state import ProcessState
    from zeroshard_testing.rank_inspector import RankInspector
    from zeroshard_testing.wait_recorder import record_waits

    refuse_on_this_process()
    faulthandler.enable(stacks, all_threads=True)
    if STACK_SIGNAL is not None:
        faulthandler.register(STACK_SIGNAL, stacks, all_threads=True, chain=False)
    faults = Faults(channel)
    waits, writer = record_waits(faults), JournalWriter(journal)
    inspector = RankInspector(waits, record_collectives(writer, waits, faults), writer)
    inspector.keep_destroyed_groups()
    plugin = session.config.pluginmanager.get_plugin(RankPlugin.name)
    assert isinstance(plugin, RankPlugin)
    rank = Rank(
        channel,
        GroupKeeper(request["port"]),
        ProcessState(worker_environment()),
        session,
        Collector(session, Path(request["temporary"])),
        plugin,
        inspector,
        faults,
    )
    coverage = Coverage(request["coverage"])
    reader = Reader(channel, lambda question: _answer(inspector, question))
    channel.send({"op": "ready"})
    pid = os.getpid()
    while True:
        message, payload = reader.take()
        if message["op"] == "run":
            outcome, result = outcome_of_test(rank, message, payload)
            if os.getpid() != pid:
                # A copy of this process that the test has forked speaks for no rank.
                os._exit(1)
            inspector.end()
            for stream in (sys.stdout, sys.stderr):
                # A test may have put anything in their place.
                with contextlib.suppress(Exception):
                    stream.flush()
            if not outcome.is_clean:
                # This process will be replaced.
                coverage.save()
            # A reference left here would close the group's connections on the next test's time.
            set_rank_values(RankValues())
            ended = _look(inspector, message["run"], details=False)
            report = {**outcome.to_message(), "state": ended.to_message(), "held": rank.held()}
            channel.send({"op": "outcome", "run": message["run"], **report}, result)
        elif message["op"] == "retire":
            rank.groups.retire()
        elif message["op"] == "tear down":
            channel.send({"op": "torn down", "error": _torn_down(rank, message["keep"])})
        else:
            coverage.save()
            channel.send({"op": "bye"})
            return


def _torn_down(rank: Rank, keep: list[str]) -> str:
    """Tear down fixtures between tests, and return what went wrong in words, empty if nothing did."""
    try:
        rank.tear_down(keep)
    except BaseException as error:  # noqa: BLE001 - whatever a fixture raises is reported
        return printable(str(pytest.ExceptionInfo.from_exception(error).getrepr(style="short")))
    return ""


def _answer(inspector: RankInspector, question: Message) -> Message:
    state = _look(inspector, question["run"], details=question["details"])
    return {"op": "state", "run": question["run"], "round": question["round"], **state.to_message()}


def _look(inspector: RankInspector, run: int, *, details: bool) -> RankState:
    try:
        return inspector.look(run, details=details)
    except Exception as error:  # noqa: BLE001 - what cannot be observed is unknown, and the process must live on
        return RankState(stacks=f"(this rank could not be observed: {error!r})")

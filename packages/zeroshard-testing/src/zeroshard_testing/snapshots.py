"""Asks all ranks of a test what they are doing, in rounds, and concludes from two rounds that agree.

A round by itself is no snapshot: ranks answer one after the other. But a rank that answers alike in two rounds has not
moved in between, and between the first round's last answer and the second round's first question all of them were in
those states at once.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

from zeroshard_testing.deadlock import Deadlock, find_deadlock
from zeroshard_testing.ipc import ClosedError, Message
from zeroshard_testing.issued import (
    collectives_to_compare,
    find_left_out,
    find_mismatch,
    find_unmatched_messages,
)
from zeroshard_testing.journal import read_journal
from zeroshard_testing.launcher import Child, readable_channels, size_of, text_of
from zeroshard_testing.rank_state import RankState
from zeroshard_testing.stacks import readable_stacks

# Seconds between rounds, and until the first one after news.
_INTERVAL = 0.1
_SOON = 0.01
# How long ranks may take to tell their stacks, in seconds: those with Python's global lock free, and then the others.
_DETAILS_TIMEOUT = 0.3
_STACKS_TIMEOUT = 1.0
_STACK_SIGNAL = getattr(signal, "SIGUSR1", None)


class Snapshots:
    """The rounds of questions of one test.

    Args:
        workers: The test's workers, by slot.
        run: Number of the run.
    """

    def __init__(self, workers: Sequence[Child], run: int) -> None:
        self._workers = workers
        self._run = run
        self._round = 0
        self._answers: dict[int, RankState] = {}
        self._before: Mapping[int, RankState] = {}
        self._finished: dict[int, RankState] = {}
        self._gone: set[int] = set()
        self._asking = False
        self._proof: Deadlock | None = None
        self.due = time.monotonic() + _INTERVAL
        """When the next round begins, on the monotonic clock."""

    def ask_when_due(self, now: float) -> None:
        """Begin a round if it is time and the last one has ended."""
        if now < self.due:
            return
        self.due = now + _INTERVAL
        if not self._asking:
            self._ask(details=False)

    def take(self, slot: int, message: Message) -> None:
        """Take a rank's answer."""
        if message["round"] != self._round or slot in self._gone:
            return
        self._answers[slot] = RankState.from_message(message)
        if self._asking and self._answers.keys() | self._gone == set(range(len(self._workers))):
            self._conclude()

    def finish(self, slot: int, state: RankState) -> None:
        """Take what a rank has issued when its test has ended there; the others may wait for it now."""
        self._finished[slot] = state
        self.due = min(self.due, time.monotonic() + _SOON)

    def leave(self, slot: int) -> None:
        """Ask a rank no more, since its process is gone."""
        self._gone.add(slot)

    def deadlock(self) -> Deadlock | None:
        """Return the proof that all ranks which still run wait for ever, if there is one."""
        return self._proof

    def mismatch(self) -> str | None:
        """Return which collective the ranks have issued differently, in words, of those that died too."""
        written = {
            slot: read_journal(child.journal, self._run, len(self._workers)) for slot, child in enumerate(self._workers)
        }
        return find_mismatch(self._answers) or find_mismatch(written)

    def unmatched(self, checks_off: Collection[str]) -> Mapping[int, str]:
        """Return, by slot, what ranks that have all passed issued otherwise than the others, in words.

        Args:
            checks_off: Names of checks that are off.
        """
        if len(self._finished) < len(self._workers):
            return {}
        found: Mapping[int, str] = {}
        if "collectives" not in checks_off and collectives_to_compare(self._finished):
            self._collect(range(len(self._workers)), details=True)
            found = find_left_out({**self._finished, **self._answers})
        if not found and "messages" not in checks_off:
            found = find_unmatched_messages(self._finished)
        return found

    def details(self, slots: Sequence[int]) -> Mapping[int, str]:
        """Return Python stacks and last collective of ranks that still run, by slot."""
        self._collect(slots, details=True)
        texts = {slot: _described(self._answers[slot]) for slot in slots if slot in self._answers}
        silent = [slot for slot in slots if slot not in texts]
        return {**texts, **self._dumped_stacks(silent)} if silent else texts

    def _ask(self, *, details: bool, slots: Sequence[int] | None = None) -> None:
        self._round += 1
        self._before, self._answers = self._answers, {}
        self._asking = not details
        question = {"op": "look", "run": self._run, "round": self._round, "details": details}
        for slot, child in enumerate(self._workers):
            if slot not in self._gone and (slots is None or slot in slots):
                with suppress(ClosedError):
                    child.channel.send(question)

    def _conclude(self) -> None:
        self._asking = False
        proof = None if self._gone else find_deadlock(self._answers)
        if proof is None:
            return
        if _unmoved(self._before, self._answers):
            self._proof = proof
        else:
            self.due = time.monotonic()

    def _collect(self, slots: Sequence[int], *, details: bool) -> None:
        """Make a round at once, and wait for it."""
        self._ask(details=details, slots=slots)
        self._asking = False
        deadline = time.monotonic() + _DETAILS_TIMEOUT
        awaited = {slot for slot in slots if slot not in self._gone}
        while awaited - self._answers.keys() and time.monotonic() < deadline:
            channels = {self._workers[slot].channel: slot for slot in awaited - self._answers.keys()}
            for channel in readable_channels(channels, deadline - time.monotonic()):
                try:
                    for message, _ in channel.receive_ready():
                        if message.get("run") == self._run and message["op"] == "state":
                            self.take(channels[channel], message)
                except ClosedError:
                    awaited.discard(channels[channel])

    def _dumped_stacks(self, slots: Sequence[int]) -> dict[int, str]:
        """Have workers that do not answer write their Python stacks from a signal handler, and wait a moment."""
        asked = [self._workers[slot] for slot in slots if _signal_for_stacks(self._workers[slot])]
        deadline = time.monotonic() + _STACKS_TIMEOUT
        sizes: list[int] | None = None
        while asked and time.monotonic() < deadline:
            time.sleep(0.02)
            before, sizes = sizes, [size_of(child.stacks) for child in asked]
            if sizes == before and all(sizes):
                break
        return {
            slot: readable_stacks(text_of(self._workers[slot].stacks))
            or "(it did not answer when asked for its Python stack)"
            for slot in slots
        }


def _unmoved(before: Mapping[int, RankState], after: Mapping[int, RankState]) -> bool:
    return before.keys() == after.keys() and all(
        (state.finished, state.fingerprint) == (after[slot].finished, after[slot].fingerprint)
        for slot, state in before.items()
    )


def _described(state: RankState) -> str:
    latest = [
        f"Last collective: {operation.name} (#{number} of {group.label}"
        f"{', ' + operation.tensors if operation.tensors else ''}){', unfinished' if operation.pending else ''}"
        for group in state.groups.values()
        for number, operation in [max(group.operations.items(), default=(0, None))]
        if operation is not None
    ]
    return "\n".join([*latest, state.stacks])


def _signal_for_stacks(child: Child) -> bool:
    if _STACK_SIGNAL is None or child.pid is None or child.status is not None:
        return False
    with suppress(ProcessLookupError):
        os.kill(child.pid, _STACK_SIGNAL)
        return True
    return False

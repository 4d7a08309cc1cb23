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

from zeroshard_testing.deadlock import find_deadlock
from zeroshard_testing.ipc import ClosedError, Message
from zeroshard_testing.issued import (
    collectives_to_compare,
    find_crossed,
    find_left_out,
    find_mismatch,
    find_other_tensors,
    find_unequal_groups,
    find_unmatched_messages,
    find_worlds_of_one,
    name_of,
)
from zeroshard_testing.launcher import Child, ask, text_of
from zeroshard_testing.rank_state import RankState
from zeroshard_testing.stacks import dumped_stack

# Seconds between rounds, and until the first one after news.
_INTERVAL = 0.1
_SOON = 0.01
# How long ranks may take to tell their stacks, in seconds: those with Python's global lock free, and then the others.
_DETAILS_TIMEOUT = 0.3
# And how long those between tests may take to tell what they have issued, on which a verdict depends.
_COMPARISON_TIMEOUT = 60.0
_STACKS_TIMEOUT = 1.0


class Snapshots:
    """The rounds of questions to the workers of one test, which is run number ``run``."""

    def __init__(self, workers: Sequence[Child], run: int) -> None:
        self._workers = workers
        self._run = run
        self._round = 0
        self._answers: dict[int, RankState] = {}
        self._before: Mapping[int, RankState] = {}
        self._finished: dict[int, RankState] = {}
        self.aborted: dict[int, RankState] = {}
        """What ranks were doing when C++ aborted them, by slot."""
        self._there = dict(enumerate(workers))
        self._asking = False
        self.deadlock: Mapping[int, str] = {}
        """The proof that all ranks which still run wait for ever, if there is one: why, as text by slot."""
        self.due = time.monotonic() + _INTERVAL
        """When the next round begins, on the monotonic clock."""

    def ask_when_due(self, now: float) -> None:
        """Begin a round if it is time and the last one has ended."""
        if now < self.due:
            return
        self.due = now + _INTERVAL
        if self._asking:
            return
        self._asking = True
        self._before, self._answers = self._answers, {}
        question = self._next_question(details=False)
        for child in self._there.values():
            with suppress(ClosedError):
                child.channel.send(question)

    def take(self, slot: int, message: Message) -> None:
        """Take a rank's answer."""
        if message["round"] == self._round:
            self._answers[slot] = RankState.from_message(message)
            if self._asking and self._answers.keys() >= self._there.keys():
                self._conclude()

    def finish(self, slot: int, state: RankState) -> None:
        """Take what a rank has issued when its test has ended there; the others may wait for it now."""
        self._finished[slot] = state
        self.due = min(self.due, time.monotonic() + _SOON)

    def leave(self, slot: int) -> None:
        """Ask a rank no more, since its process is gone."""
        self._there.pop(slot, None)

    def mismatch(self) -> str | None:
        """Return, as text, which group or collective differs between ranks, as far as the latest round tells."""
        return find_unequal_groups(self._answers) or find_mismatch(self._answers)

    def why_failed(self) -> str | None:
        """Return, as text, in what a rank that has failed had met other tensors, or another group or collective."""
        self._collect(self._there.keys() - self.aborted.keys())
        states = {**self._answers, **self.aborted}
        # What fails on the others follows from the abort.
        differs = find_unequal_groups(states) or find_mismatch(states, excuses_failures=False)
        return differs or find_other_tensors(states)

    def left_out(self) -> Mapping[int, str]:
        """Return, as text by slot, what ranks have left out, as far as the latest round tells, failed or not."""
        return find_left_out(self._answers, excuses_failures=False)

    def unmatched(self, checks_off: Collection[str]) -> Mapping[int, str]:
        """Return, as text by slot, the operations that ranks which all passed have issued differently."""
        if len(self._finished) < len(self._workers):
            return {}
        states, is_compared, is_ordered = self._finished, "collectives" not in checks_off, "order" not in checks_off
        if is_compared and (text := find_worlds_of_one(states) or find_unequal_groups(states)):
            return dict.fromkeys(states, f"passed, but {text}")
        found: Mapping[int, str] = {}
        if is_ordered or (is_compared and collectives_to_compare(states)):
            self._collect(states, _COMPARISON_TIMEOUT)
            if gone := states.keys() - self._answers.keys():
                # Perhaps ended by gloo just after it had passed.
                what = f": {text}" if (text := self.why_failed()) else ""
                return dict.fromkeys(gone, f"left before what it has issued could be compared{what}")
            found = find_left_out(self._answers) if is_compared else {}
            differs = find_mismatch(self._answers) if is_compared else None
            if not found and (text := differs or (find_crossed(self._answers) if is_ordered else None)):
                found = dict.fromkeys(states, f"passed, but {text}")
        return found or ({} if "messages" in checks_off else find_unmatched_messages(states))

    def details(self, slots: Sequence[int]) -> Mapping[int, str]:
        """Return Python stacks and last collective of ranks that still run, by slot."""
        self._collect(self._there)
        states = {slot: self._answers.get(slot, RankState()) for slot in slots}
        # A thread that may be running writes its own stack: no other one reads its frames.
        dumped = self._dumped_stacks([slot for slot, state in states.items() if not state.stacks])
        return {slot: _described(state, state.stacks or dumped[slot]) for slot, state in states.items()}

    def _next_question(self, *, details: bool) -> Message:
        self._round += 1
        return {"op": "look", "run": self._run, "round": self._round, "details": details}

    def _conclude(self) -> None:
        self._asking = False
        proof = find_deadlock(self._answers) if len(self._there) == len(self._workers) else {}
        if proof and _positions(self._before) == _positions(self._answers):
            self.deadlock = proof
        elif proof:
            self.due = time.monotonic()

    def _collect(self, slots: Collection[int], timeout: float = _DETAILS_TIMEOUT) -> None:
        """Make a round at once, with stacks, and wait for it."""
        self._asking = False
        question = self._next_question(details=True)
        asked = {slot: child for slot, child in self._there.items() if slot in slots}
        answers = ask(asked, question, self._is_last_word, timeout)
        self._answers = {slot: RankState.from_message(one) for slot, one in answers.items() if one["op"] == "state"}
        self.aborted |= {slot: RankState.from_message(one) for slot, one in answers.items() if one["op"] == "aborted"}

    def _is_last_word(self, message: Message) -> bool:
        """Whether a rank says what it is doing: now, when it is asked, or when it was aborted."""
        return message.get("run") == self._run and (message["op"] == "aborted" or message.get("round") == self._round)

    def _dumped_stacks(self, slots: Sequence[int]) -> dict[int, str]:
        """Have workers write the stack of their main thread from a signal handler, and wait a moment."""
        asked: list[tuple[Child, int]] = []
        for child in map(self._workers.__getitem__, slots):
            if child.pid is not None and child.status is None:
                with suppress(ProcessLookupError):
                    asked.append((child, _written(child)))
                    os.kill(child.pid, signal.SIGUSR1)
        deadline = time.monotonic() + _STACKS_TIMEOUT
        sizes: list[int] = []
        while asked and time.monotonic() < deadline:
            time.sleep(0.02)
            before, sizes = sizes, [_written(child) - first for child, first in asked]
            if sizes == before and min(sizes) > 0:
                break
        nothing = "(it did not answer when asked for its Python stack)"
        return {slot: dumped_stack(text_of(self._workers[slot].stacks)) or nothing for slot in slots}


def _written(child: Child) -> int:
    """Return how many bytes of stacks a worker has written."""
    return os.fstat(child.stacks.fileno()).st_size


def _positions(states: Mapping[int, RankState]) -> dict[int, tuple[bool, str]]:
    return {slot: (state.finished, state.fingerprint) for slot, state in states.items()}


def _described(state: RankState, stacks: str) -> str:
    latest = [
        f"Last collective: {name_of(group, number)}{', unfinished' if group.operations[number].pending else ''}"
        for group in state.groups.values()
        if (number := max(group.operations, default=0))
    ]
    return "\n".join([*latest, stacks])

"""Asks all ranks of a test for their states, in rounds, and decides by two rounds with equal answers.

One round is no snapshot, because ranks answer one after the other. But a rank with equal answers in two rounds did not
move in between. So between the last answer of the first round and the first question of the second, all of them were in
these states at the same time.
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

# Seconds between rounds, and from a report to the next round.
_INTERVAL = 0.1
_SOON = 0.01
# Seconds within which ranks must report stacks: ranks whose global interpreter lock is free, then the others.
_DETAILS_TIMEOUT = 0.3
# Seconds within which ranks between tests must report their operations, on which a verdict depends.
_COMPARISON_TIMEOUT = 60.0
_STACKS_TIMEOUT = 1.0


class Snapshots:
    """Asks the workers of the test with number ``run`` in rounds."""

    def __init__(self, workers: Sequence[Child], run: int) -> None:
        self._workers = workers
        self._run = run
        self._round = 0
        self._answers: dict[int, RankState] = {}
        self._before: Mapping[int, RankState] = {}
        self._finished: dict[int, RankState] = {}
        self.aborted: dict[int, RankState] = {}
        """The states of ranks when C++ aborted them, by slot."""
        self._there = dict(enumerate(workers))
        self._asking = False
        self.deadlock: Mapping[int, str] = {}
        """The reasons why all ranks that still run wait forever, as text by slot; empty without a proof."""
        self.due = time.monotonic() + _INTERVAL
        """The time of the next round, on the monotonic clock."""

    def ask_when_due(self, now: float) -> None:
        """Begin a round if it is due and the previous round has ended."""
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
        """Handle the answer of a rank."""
        if message["round"] == self._round:
            self._answers[slot] = RankState.from_message(message)
            if self._asking and self._answers.keys() >= self._there.keys():
                self._conclude()

    def finish(self, slot: int, state: RankState) -> None:
        """Record the operations of a rank whose test has ended; other ranks may wait for it now."""
        self._finished[slot] = state
        self.due = min(self.due, time.monotonic() + _SOON)

    def leave(self, slot: int) -> None:
        """Stop asking a rank whose process is gone."""
        self._there.pop(slot, None)

    def mismatch(self) -> str | None:
        """Return the group or collective that differs between ranks in the latest round, as text."""
        return find_unequal_groups(self._answers) or find_mismatch(self._answers)

    def why_failed(self) -> str | None:
        """Return how the operation of a failed rank differs from the operations of other ranks, as text."""
        self._collect(self._there.keys() - self.aborted.keys())
        states = {**self._answers, **self.aborted}
        # Errors of the other ranks follow from the abort.
        differs = find_unequal_groups(states) or find_mismatch(states, excuses_failures=False)
        return differs or find_other_tensors(states)

    def left_out(self) -> Mapping[int, str]:
        """Return the operations that ranks left out in the latest round, as text by slot, for failed ranks too."""
        return find_left_out(self._answers, excuses_failures=False)

    def unmatched(self, checks_off: Collection[str]) -> Mapping[int, str]:
        """Return the operations in which ranks differ although all passed, as text by slot."""
        if len(self._finished) < len(self._workers):
            return {}
        states, is_compared, is_ordered = self._finished, "collectives" not in checks_off, "order" not in checks_off
        if is_compared and (text := find_worlds_of_one(states) or find_unequal_groups(states)):
            return dict.fromkeys(states, f"passed, but {text}")
        found: Mapping[int, str] = {}
        if is_ordered or (is_compared and collectives_to_compare(states)):
            self._collect(states, _COMPARISON_TIMEOUT)
            if gone := states.keys() - self._answers.keys():
                # gloo may have ended the rank just after it passed.
                what = f": {text}" if (text := self.why_failed()) else ""
                return dict.fromkeys(gone, f"left before what it has issued could be compared{what}")
            found = find_left_out(self._answers) if is_compared else {}
            differs = find_mismatch(self._answers) if is_compared else None
            if not found and (text := differs or (find_crossed(self._answers) if is_ordered else None)):
                found = dict.fromkeys(states, f"passed, but {text}")
        return found or ({} if "messages" in checks_off else find_unmatched_messages(states))

    def details(self, slots: Sequence[int]) -> Mapping[int, str]:
        """Return the Python stacks and the last collective of ranks that still run, by slot."""
        self._collect(self._there)
        states = {slot: self._answers.get(slot, RankState()) for slot in slots}
        # A thread that may be running writes its own stack, because no other thread may read its frames.
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
        """Run a round with stacks now, and wait for it."""
        self._asking = False
        question = self._next_question(details=True)
        asked = {slot: child for slot, child in self._there.items() if slot in slots}
        answers = ask(asked, question, self._is_last_word, timeout)
        self._answers = {slot: RankState.from_message(one) for slot, one in answers.items() if one["op"] == "state"}
        self.aborted |= {slot: RankState.from_message(one) for slot, one in answers.items() if one["op"] == "aborted"}

    def _is_last_word(self, message: Message) -> bool:
        """Return True if the state of a rank is known: by its answer, or from its abort."""
        return message.get("run") == self._run and (message["op"] == "aborted" or message.get("round") == self._round)

    def _dumped_stacks(self, slots: Sequence[int]) -> dict[int, str]:
        """Make workers write the stack of their main thread in a signal handler, and wait briefly."""
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
    """Return the number of bytes of stacks that a worker has written."""
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

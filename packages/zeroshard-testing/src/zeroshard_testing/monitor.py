"""Watches one test on its workers until there is an outcome for every rank, whatever the ranks do."""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from zeroshard_testing import outcome as kinds
from zeroshard_testing.ipc import ClosedError, Message
from zeroshard_testing.launcher import Child, Launcher, readable_channels, text_of
from zeroshard_testing.outcome import Outcome
from zeroshard_testing.rank_state import RankState
from zeroshard_testing.snapshots import Snapshots
from zeroshard_testing.stacks import readable_stacks

# After the first failure the others have this long, in seconds, to come to an outcome of their own.
_GRACE = 0.5
# After a death less: whatever the others have to say, it is not the cause.
_GRACE_AFTER_DEATH = 0.04
_IMPORT_TIMEOUT = 300.0
# How long the forkserver may take to tell the status of a worker whose channel has ended, in seconds.
_STATUS_TIMEOUT = 2.0
_NEWS_INTERVAL = 0.02


class Monitor:
    """The life of one test, from when it is sent to the last outcome.

    Args:
        launcher: Tells how processes ended.
        workers: The test's workers, by slot.
        run: Number of the run; reports of other runs are ignored.
        timeout: Seconds that the test may take, imports not counted.
        checks_off: Names of checks that are off.
    """

    def __init__(
        self, launcher: Launcher, workers: Sequence[Child], run: int, timeout: float, checks_off: frozenset[str]
    ) -> None:
        self.returned: dict[int, bytes] = {}
        """What a call has returned, by slot."""
        self.held: set[str] = set()
        """Ids of the nodes whose fixtures are set up on some rank after the test."""
        self._checks_off = checks_off
        self._launcher = launcher
        self._workers = workers
        self._run = run
        self._timeout = timeout
        self._outcomes: dict[int, Outcome] = {}
        self._faulted: dict[int, str] = {}
        self._ended: dict[int, float] = {}
        self._importing: set[int] = set()
        self._deadline = time.monotonic() + timeout
        self._grace_ends: float | None = None
        self._snapshots = Snapshots(workers, run)

    def outcomes(self) -> Mapping[int, Outcome]:
        """Wait until every rank has reported, died, or been given up; the caller replaces workers afterwards.

        Returns:
            An outcome for every slot.

        Raises:
            LaunchError: If no process can be started any more.
        """
        with selectors.DefaultSelector() as selector:
            if self._launcher.channel is not None:
                selector.register(self._launcher.channel, selectors.EVENT_READ, None)
            for slot, child in enumerate(self._workers):
                selector.register(child.channel, selectors.EVENT_READ, slot)
            while not self._is_over():
                now = time.monotonic()
                if now >= self._end():
                    self._give_up()
                    break
                self._snapshots.ask_when_due(now)
                patience = min(self._end(), self._snapshots.due) - time.monotonic()
                if self._must_ask():
                    patience = min(patience, _NEWS_INTERVAL)
                for key, _ in selector.select(max(patience, 0)):
                    if key.data is None:
                        self._launcher.take_news()
                    elif not self._read(key.data):
                        selector.unregister(key.fileobj)
                if self._must_ask():
                    self._launcher.take_news()
                self._notice_deaths()
                self._notice_stops()
                self._notice_deadlock()
        self._notice_unmatched()
        self._explain_aborts()
        return dict(sorted(self._outcomes.items()))

    def _is_over(self) -> bool:
        # A rank whose channel has ended is accounted for when its status is known.
        return len(self._outcomes) == len(self._workers) and not self._ended

    def _end(self) -> float:
        """The moment at which the ranks that are still out are given up, or the loop must look again."""
        deadline = self._deadline
        if self._grace_ends is not None:
            deadline = min(deadline, self._grace_ends)
        if self._ended:
            # The status of a dead rank is worth a wait of its own.
            deadline = max(deadline, max(self._ended.values()) + _STATUS_TIMEOUT)
        return deadline

    def _must_ask(self) -> bool:
        """Whether a status is awaited of which no news will come unasked."""
        return bool(self._ended) and self._launcher.channel is None

    def _read(self, slot: int) -> bool:
        """Take what a worker has sent; False when its channel has ended."""
        try:
            for message, payload in self._workers[slot].channel.receive_ready():
                if message.get("run") == self._run:
                    self._take(slot, message, payload)
        except ClosedError:
            self._ended[slot] = time.monotonic()
            self._snapshots.leave(slot)
            return False
        return True

    def _take(self, slot: int, message: Message, payload: bytes) -> None:
        if message["op"] == "state":
            self._snapshots.take(slot, message)
        elif message["op"] == "fault":
            self._faulted[slot] = message["kind"]
        elif message["op"] == "importing":
            self._importing.add(slot)
            self._deadline = max(self._deadline, time.monotonic() + _IMPORT_TIMEOUT)
        elif message["op"] == "imported":
            self._importing.discard(slot)
            if not self._importing:
                self._deadline = time.monotonic() + self._timeout
        else:
            self._importing.discard(slot)
            self.held.update(message["held"])
            if payload:
                self.returned[slot] = payload
            self._settle(slot, Outcome.from_message(message))
            self._snapshots.finish(slot, RankState.from_message(message["state"]))

    def _settle(self, slot: int, outcome: Outcome) -> None:
        self._outcomes[slot] = outcome
        if not outcome.is_clean:
            grace = _GRACE_AFTER_DEATH if outcome.kind == kinds.DIED else _GRACE
            ends = time.monotonic() + grace
            self._grace_ends = ends if self._grace_ends is None else min(self._grace_ends, ends)

    def _notice_deaths(self) -> None:
        for slot, child in enumerate(self._workers):
            if child.status is None:
                continue
            if slot not in self._outcomes and slot not in self._ended:
                # What it sent before it ended is still in the channel. A process that the test has left behind may
                # hold the other end open, so the channel's end is not waited for.
                self._drain(slot)
            self._ended.pop(slot, None)
            self._snapshots.leave(slot)
            self._die(slot, describe_exit(child.status))

    def _drain(self, slot: int) -> None:
        channel = self._workers[slot].channel
        while readable_channels([channel], 0) and self._read(slot):
            pass

    def _die(self, slot: int, summary: str) -> None:
        known = self._outcomes.get(slot)
        if known is not None and (not known.is_clean or known.kind == kinds.FAULTED):
            return
        if slot in self._faulted:
            self._outcomes[slot] = Outcome(kinds.FAULTED, summary, moment=time.monotonic())
            return
        if known is not None:
            summary += f" after it had reported {known.kind!r}, while other ranks were still running"
        else:
            summary += " before it reported an outcome"
        detail = readable_stacks(text_of(self._workers[slot].stacks))
        self._settle(slot, Outcome(kinds.DIED, summary, detail, time.monotonic()))

    def _notice_stops(self) -> None:
        """Settle the ranks that the test has stopped for good, when all others have an outcome."""
        out = {slot for slot in range(len(self._workers)) if slot not in self._outcomes}
        if out and not self._ended and all(self._faulted.get(slot) == "stop" for slot in out):
            for slot in out:
                self._outcomes[slot] = Outcome(kinds.FAULTED, "was stopped by its own fault", moment=time.monotonic())

    def _notice_deadlock(self) -> None:
        """Settle the ranks that are still out if it is proven that they wait for ever."""
        deadlock = self._snapshots.deadlock()
        if deadlock is None or self._ended or "deadlock" in self._checks_off:
            return
        mismatch = self._snapshots.mismatch()
        now = time.monotonic()
        seen = self._snapshots.details([slot for slot in deadlock.reasons if slot not in self._outcomes])
        for slot, reason in deadlock.reasons.items():
            if slot not in self._outcomes:
                summary = f"stuck: {mismatch}" if mismatch else reason
                detail = "\n".join(part for part in (f"This rank is {reason}.", seen.get(slot, "")) if part)
                self._outcomes[slot] = Outcome(kinds.DEADLOCKED, summary, detail, now)

    def _notice_unmatched(self) -> None:
        """Turn a pass into a failure where a rank has left a collective or a message to the others."""
        if any(outcome.kind not in (kinds.PASSED, kinds.XPASSED) for outcome in self._outcomes.values()):
            return
        for slot, text in self._snapshots.unmatched(self._checks_off).items():
            self._outcomes[slot] = Outcome(kinds.FAILED, text, moment=time.monotonic(), found_by_controller=True)

    def _explain_aborts(self) -> None:
        """Say of ranks that a signal has ended, and of nobody else, in which collective they met another one."""
        for slot, outcome in list(self._outcomes.items()):
            status = self._workers[slot].status
            if outcome.kind == kinds.DIED and status == -signal.SIGABRT:
                mismatch = self._snapshots.mismatch()
                if mismatch is not None:
                    self._outcomes[slot] = replace(outcome, summary=f"{describe_exit(status)}: {mismatch}")

    def _give_up(self) -> None:
        """Settle the ranks that are still out, with their Python stacks."""
        for slot in list(self._ended):
            self._ended.pop(slot)
            self._die(slot, "closed its control channel; its process did not end")
        timed_out = all(outcome.is_clean for outcome in self._outcomes.values())
        out = [slot for slot in range(len(self._workers)) if slot not in self._outcomes]
        seen = self._snapshots.details(out)
        now = time.monotonic()
        for slot in out:
            if slot in self._importing:
                summary = "was still importing the test's module"
            elif timed_out:
                summary = f"timed out: no outcome after {self._timeout:g} s"
            else:
                summary = "was stopped: still running when another rank had failed"
            kind = kinds.TIMED_OUT if timed_out else kinds.STOPPED
            self._outcomes[slot] = Outcome(kind, summary, seen.get(slot, ""), now)


def describe_exit(status: int) -> str:
    """Say how a process ended.

    Args:
        status: Exit status, negative for a signal.

    Example:
        >>> describe_exit(-9)
        'was killed by SIGKILL'
        >>> describe_exit(0)
        'exited with status 0'
    """
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"

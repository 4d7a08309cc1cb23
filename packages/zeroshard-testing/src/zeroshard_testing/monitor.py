"""Watches one test on its workers until every rank has an outcome, whatever the ranks do."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from zeroshard_testing import outcome as kinds
from zeroshard_testing.ipc import ClosedError, Message
from zeroshard_testing.launcher import Child, Launcher, readable_channels, text_of
from zeroshard_testing.outcome import Outcome
from zeroshard_testing.rank_state import RankState
from zeroshard_testing.snapshots import Snapshots
from zeroshard_testing.stacks import readable_stacks

# Seconds that the other ranks have to reach an outcome of their own after the first failure: in processor time while
# they compute, because they may share processors with other programs; and the limit in total.
_GRACE = 0.5
_LONGEST_GRACE = 10.0
# Interval between checks whether ranks compute, in seconds.
_LOOK = 0.1
# Shorter after a death, because the outcomes of other ranks are not the cause.
_GRACE_AFTER_DEATH = 0.04
_IMPORT_TIMEOUT = 300.0
# Seconds within which the status of a worker must be known after its channel has ended.
_STATUS_TIMEOUT = 2.0


class Monitor:
    """Watches one test from its start on ``workers``, by slot, to the last outcome.

    Ignores reports of runs other than ``run``. The time of imports does not count towards ``timeout``.
    """

    def __init__(
        self, launcher: Launcher, workers: Sequence[Child], run: int, timeout: float, checks_off: frozenset[str]
    ) -> None:
        self.returned: dict[int, bytes] = {}
        """The results of a call, by slot."""
        self.held: set[str] = set()
        """Ids of the nodes whose fixtures are set up on a rank after the test."""
        self.loaded: dict[str, None] = {}
        """Modules that a failed test loaded on a rank."""
        self._checks_off = checks_off
        self._launcher = launcher
        self._workers = workers
        self._run = run
        self._timeout = timeout
        self._outcomes: dict[int, Outcome] = {}
        self._faulted: dict[int, str] = {}
        self._open = {child.channel: slot for slot, child in enumerate(workers)}
        self._ended: dict[int, float] = {}
        self._importing: set[int] = set()
        self._imports_began = 0.0
        self._deadline = time.monotonic() + timeout
        self._failed_at = self._grace_ends = math.inf
        self._ran: set[int] = set()
        self._used: dict[int, float] = {}
        """The processor time at the first failure of each rank without an outcome then."""
        self._snapshots = Snapshots(workers, run)

    def outcomes(self) -> list[Outcome]:
        """Wait until every rank has reported, died, or been given up, and return an outcome for every slot."""
        # A rank whose channel has ended gets its outcome when its status is known. A rank that its own fault has
        # stopped for good gets it when all others have an outcome.
        while self._ended or any(self._faulted.get(slot) != "stop" for slot in self._out()):
            now = time.monotonic()
            if now >= self._end():
                if self._computes(now):
                    self._grace_ends = now + _LOOK
                    continue
                self._give_up()
                break
            self._snapshots.ask_when_due(now)
            patience = min(self._end(), self._snapshots.due) - time.monotonic()
            for channel in readable_channels([*self._launcher.news, *self._open], max(patience, 0)):
                if channel in self._open:
                    self._read(self._open[channel])
            self._launcher.take_news()
            self._notice_deaths()
            self._notice_deadlock()
        for slot in self._out():
            self._outcomes[slot] = Outcome(kinds.FAULTED, "was stopped by its own fault")
        self._explain_failures()
        self._notice_unmatched()
        return [outcome for _, outcome in sorted(self._outcomes.items())]

    def _out(self) -> list[int]:
        """Return the ranks without an outcome."""
        return [slot for slot in range(len(self._workers)) if slot not in self._outcomes]

    def _end(self) -> float:
        """Return when the ranks without an outcome are given up, or the loop must look again."""
        # Wait separately for the status of a dead rank.
        statuses = max(self._ended.values(), default=-math.inf) + _STATUS_TIMEOUT
        deadline = self._imports_began + _IMPORT_TIMEOUT if self._importing else self._deadline
        return max(min(deadline, self._grace_ends), statuses)

    def _read(self, slot: int) -> None:
        """Handle a message of a worker."""
        channel = self._workers[slot].channel
        try:
            for message, payload in channel.receive_ready():
                if message.get("run") == self._run:
                    self._take(slot, message, payload)
        except ClosedError:
            del self._open[channel]
            self._ended[slot] = time.monotonic()
            self._snapshots.leave(slot)
            self._note_import(slot, is_importing=False)

    def _drain(self, slot: int) -> None:
        """Handle the messages of a worker so far. The channel may stay open in a process that the test started."""
        channel = self._workers[slot].channel
        while channel in self._open and readable_channels([channel], 0):
            self._read(slot)

    def _take(self, slot: int, message: Message, payload: bytes) -> None:
        if (is_importing := message.get("importing")) is not None:
            self._note_import(slot, is_importing=is_importing)
        if message["op"] == "state":
            self._snapshots.take(slot, message)
        elif message["op"] == "aborted":
            self._snapshots.aborted[slot] = RankState.from_message(message)
        elif message["op"] == "fault":
            self._faulted[slot] = message["kind"]
        elif message["op"] == "outcome":
            self._note_import(slot, is_importing=False)
            self.held.update(message["held"])
            self.loaded |= dict.fromkeys(message["loaded"])
            if payload:
                self.returned[slot] = payload
            self._settle(slot, Outcome.from_message(message))
            self._snapshots.finish(slot, RankState.from_message(message["state"]))

    def _note_import(self, slot: int, *, is_importing: bool) -> None:
        """Stop the test's clock while any rank imports."""
        stood, now = bool(self._importing), time.monotonic()
        self._importing = self._importing | {slot} if is_importing else self._importing - {slot}
        if stood and not self._importing:
            self._deadline += now - self._imports_began
        elif not stood:
            self._imports_began = now

    def _settle(self, slot: int, outcome: Outcome) -> None:
        self._outcomes[slot] = outcome
        # Whether a failure is the expected one is known only after all ranks have ended.
        if not outcome.is_clean and outcome.kind != kinds.XFAILED:
            is_death, now = outcome.kind == kinds.DIED, time.monotonic()
            self._grace_ends = min(self._grace_ends, now + (_GRACE_AFTER_DEATH if is_death else _GRACE))
            if is_death:
                self._failed_at = -math.inf
            elif self._failed_at == math.inf:
                self._failed_at = now
                times = {other: processor_time(self._workers[other].pid) for other in self._out()}
                self._used = {other: used for other, used in times.items() if used is not None}
                self._ran = {other for other in self._used if is_running(self._workers[other].pid)}

    def _computes(self, now: float) -> bool:
        """Return True if a rank without an outcome computes, and has used less than ``_GRACE`` of processor time."""
        if self._ended or now >= min(self._deadline, self._failed_at + _LONGEST_GRACE):
            return False
        used = {slot: processor_time(self._workers[slot].pid) for slot in self._out() if slot in self._used}
        left = [slot for slot, seconds in used.items() if seconds is not None and seconds - self._used[slot] < _GRACE]
        ran, self._ran = self._ran, {slot for slot in left if is_running(self._workers[slot].pid)}
        # A single check may fall between two computations.
        return not self._ran.union(ran).isdisjoint(left)

    def _notice_deaths(self) -> None:
        for slot, child in enumerate(self._workers):
            if child.status is None:
                continue
            self._drain(slot)
            self._ended.pop(slot, None)
            self._snapshots.leave(slot)
            self._die(slot, describe_exit(child.status))

    def _die(self, slot: int, summary: str) -> None:
        known = self._outcomes.get(slot)
        if known is not None and (not known.is_clean or known.kind == kinds.FAULTED):
            return
        if slot in self._faulted:
            self._outcomes[slot] = Outcome(kinds.FAULTED, summary)
            return
        if known is not None:
            summary += f" after it had reported {known.kind!r}, while other ranks were still running"
        else:
            summary += " before it reported an outcome"
        stacks = [readable_stacks(text_of(self._workers[slot].stacks))]
        stacks += [self._snapshots.aborted[slot].stacks] if slot in self._snapshots.aborted else []
        self._settle(slot, Outcome(kinds.DIED, summary, "\n\n".join(filter(None, stacks))))

    def _notice_deadlock(self) -> None:
        """Set the outcomes of the remaining ranks if it is proven that they wait forever."""
        reasons = self._snapshots.deadlock
        if not reasons or self._ended or "deadlock" in self._checks_off:
            return
        mismatch = self._snapshots.mismatch()
        stuck = [slot for slot in self._out() if slot in reasons]
        seen = self._snapshots.details(stuck)
        for slot in stuck:
            summary = f"stuck: {mismatch}" if mismatch else reasons[slot]
            detail = "\n".join(part for part in (f"This rank is {reasons[slot]}.", seen.get(slot, "")) if part)
            self._outcomes[slot] = Outcome(kinds.DEADLOCKED, summary, detail)

    def _notice_unmatched(self) -> None:
        """Replace a pass with a failure on ranks that left out a collective or a message."""
        if any(outcome.kind not in (kinds.PASSED, kinds.XPASSED) for outcome in self._outcomes.values()):
            return
        for slot, text in self._snapshots.unmatched(self._checks_off).items():
            self._outcomes[slot] = Outcome(kinds.FAILED, text)

    def _explain_failures(self) -> None:
        """Add the operation in which ranks differed to the outcomes of aborted and failed ranks."""
        aborted = [slot for slot, child in enumerate(self._workers) if child.status == -signal.SIGABRT]
        failed = [slot for slot, outcome in self._outcomes.items() if outcome.kind == kinds.FAILED]
        raised = [] if "collectives" in self._checks_off else failed
        if not aborted and not raised:
            return
        why = self._snapshots.why_failed()
        if all(outcome.is_clean or kinds.is_echo(outcome.summary) for outcome in self._outcomes.values()):
            for slot, text in self._snapshots.left_out().items():
                if self._outcomes[slot].kind in (kinds.PASSED, kinds.XPASSED):
                    self._outcomes[slot] = Outcome(kinds.FAILED, text)
        for slot, outcome in list(self._outcomes.items()) if why else []:
            if slot in aborted and outcome.kind == kinds.DIED:
                self._outcomes[slot] = replace(outcome, summary=f"{describe_exit(-signal.SIGABRT)}: {why}")
            elif slot in raised:
                self._outcomes[slot] = replace(
                    outcome, detail=f"{outcome.detail}\n\nThe ranks also differ: {why}".lstrip()
                )

    def _give_up(self) -> None:
        """Set the outcomes of the remaining ranks, with their Python stacks."""
        for slot in list(self._ended):
            self._ended.pop(slot)
            self._die(slot, "closed its control channel; its process did not end")
        timed_out = all(outcome.is_clean or outcome.kind == kinds.XFAILED for outcome in self._outcomes.values())
        out = self._out()
        seen = self._snapshots.details(out)
        mismatch = self._snapshots.mismatch()
        if not timed_out:
            self._notice_ends(out)
        for slot in self._out():
            if slot in self._importing:
                summary = "was still importing"
            elif timed_out:
                summary = f"timed out: no outcome after {self._timeout:g} s{f'; {mismatch}' if mismatch else ''}"
            else:
                summary = "was stopped: still running after another rank had failed"
            kind = kinds.TIMED_OUT if timed_out else kinds.STOPPED
            self._outcomes[slot] = Outcome(kind, summary, seen.get(slot, ""))

    def _notice_ends(self, slots: Sequence[int]) -> None:
        """Handle reports that arrived while ranks were asked for stacks: a rank that ended was not stopped."""
        for slot in slots:
            self._drain(slot)
        deadline = time.monotonic() + _STATUS_TIMEOUT
        self._launcher.take_news()
        self._notice_deaths()
        while self._ended and time.monotonic() < deadline:
            readable_channels(self._launcher.news, deadline - time.monotonic())
            self._launcher.take_news()
            self._notice_deaths()


def processor_time(pid: int | None) -> float | None:
    """Return the processor time of a process in seconds; None if it is unknown."""
    fields = _status_fields(pid)
    return None if fields is None else (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def is_running(pid: int | None) -> bool:
    """Return True if the main thread of a process computes, waits for a processor, or reads a file."""
    fields = _status_fields(pid)
    return fields is not None and fields[0] in "RD"


def _status_fields(pid: int | None) -> list[str] | None:
    """Return the fields of /proc/<pid>/stat from the state on; None if there is no such file."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None


def describe_exit(status: int) -> str:
    """Describe how a process ended, given its exit status, which is negative for a signal."""
    if status >= 0:
        return f"exited with status {status}"
    names = {number.value: number.name for number in signal.Signals}
    return f"was killed by {names.get(-status, f'signal {-status}')}"

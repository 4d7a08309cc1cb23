"""Faults that a test requests at named operations: a rank is killed, delayed or stopped, raises, or skips one."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from zeroshard_testing import _torch_private as private
from zeroshard_testing.ipc import Channel

_PLACE = re.compile(r"(\w+)(?:#(\d+|\*))?")


@dataclass
class _Fault:
    """One fault of this rank, and the number of its operations that were issued since the test requested it."""

    kind: str
    operation: str
    number: int | None
    act: Callable[[], object | None]
    count: int = 0
    struck: bool = False

    def __str__(self) -> str:
        return f"{self.kind} at {self.operation}#{'*' if self.number is None else self.number}"


class Faults:
    """The faults of one test on this rank. Every rank calls the same methods, and the named rank acts.

    All methods take a ``rank`` of the default group, and a place: ``at`` is an operation and its number, counted from 1
    since the call. ``"all_reduce#3"`` is the third ``all_reduce`` of the rank, in any group and thread, ``"send"`` the
    first ``send``, and ``"recv#*"`` every ``recv``. A place that names no operation raises ValueError.

    The fault strikes before the operation is issued. Only operations that Python issues count, so not the reductions
    that DistributedDataParallel issues without a communication hook. A rank that its own fault ends or stops counts as
    passed. A fault whose place is never reached fails the test.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._begin(-1, -1, 0)

    def kill(self, rank: int, at: str) -> None:
        """End a rank by SIGKILL."""
        self._add("kill", rank, at, self._kill)

    def stop(self, rank: int, at: str, seconds: float | None = None) -> None:
        """Stop a rank by SIGSTOP, as a debugger or a frozen machine would: none of its threads runs.

        It continues after ``seconds``; without them the test ends when all other ranks have.
        """
        self._add("stop", rank, at, lambda: self._stop(seconds))

    def delay(self, rank: int, at: str, seconds: float | tuple[float, float], seed: int = 0) -> None:
        """Delay a rank by ``seconds``. From a pair, the bounds of a range, each delay is drawn with ``seed``."""
        low, high = seconds if isinstance(seconds, tuple) else (seconds, seconds)
        draw = random.Random(seed)  # noqa: S311 - repeatable, not secret
        self._add("delay", rank, at, lambda: time.sleep(draw.uniform(low, high)))

    def drop(self, rank: int, at: str) -> None:
        """Skip an operation: the rank does not issue it, and gets a work that has completed."""
        self._add("drop", rank, at, private.completed_work)

    def raise_(self, rank: int, at: str, error: BaseException) -> None:
        """Raise an exception instead of issuing an operation."""
        self._add("raise_", rank, at, partial(_raise, error))

    def _add(self, kind: str, rank: int, at: str, act: Callable[[], object | None]) -> None:
        place = _PLACE.fullmatch(at)
        operations = {"send", "recv", *(title for title, _ in private.GROUP_METHODS.values())}
        if place is None or place[1] not in operations or place[2] == "0":
            raise ValueError(
                f"{at!r} names no operation: write, for example, 'all_reduce', 'all_reduce#3' or 'send#*', with one of "
                f"{', '.join(sorted(operations))}"
            )
        if rank not in range(self._world_size):
            raise ValueError(f"{kind}: rank {rank!r} is not one of the {self._world_size} ranks")
        self.were_asked_for = True
        if rank == self._rank:
            number = None if place[2] == "*" else int(place[2] or 1)
            with self._lock:
                self._faults.append(_Fault(kind, place[1], number, act))
                self.armed = True

    def _begin(self, run: int, rank: int, world_size: int) -> None:
        """Forget the faults of the last test. The worker's main thread calls it with the next test's run and rank."""
        self._run = run
        self._world_size = world_size
        self._rank = rank
        self._faults: list[_Fault] = []
        # Checked on every rank, because all of them make the same calls.
        self.were_asked_for = False
        # Read in the hot path: False if no operation can have a fault.
        self.armed = False

    def _unreached(self) -> list[str]:
        """Return the faults whose places the test has not reached, as text."""
        return [str(fault) for fault in self._faults if not fault.struck]

    def _reach(self, operation: str) -> object | None:
        """Run the faults that are due before an operation. Return a work if one replaces the operation."""
        __tracebackhide__ = True
        due = []
        with self._lock:
            for fault in self._faults:
                if fault.operation == operation:
                    fault.count += 1
                    if fault.number in (None, fault.count):
                        fault.struck = True
                        due.append(fault)
        for fault in due:
            instead = fault.act()
            if instead is not None:
                return instead
        return None

    def _kill(self) -> None:
        self._channel.send({"op": "fault", "run": self._run, "kind": "kill"})
        os.kill(os.getpid(), signal.SIGKILL)

    def _stop(self, seconds: float | None) -> None:
        if seconds is None:
            self._channel.send({"op": "fault", "run": self._run, "kind": "stop"})
        else:
            # A stopped process cannot wake itself.
            subprocess.Popen(["/bin/sh", "-c", f"sleep {float(seconds)}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)


def _raise(error: BaseException) -> None:
    __tracebackhide__ = True
    raise error

"""Faults that a test asks for, at operations it names: a rank that dies, lags, stops, raises, or leaves one out."""

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
    """One fault of this rank, and how often its operation has been issued since it was asked for."""

    kind: str
    operation: str
    number: int | None
    act: Callable[[], object | None]
    count: int = 0
    struck: bool = False

    def __str__(self) -> str:
        return f"{self.kind} at {self.operation}#{'*' if self.number is None else self.number}"


class Faults:
    """The faults of one test on this rank; every rank calls the same methods, and the one that is named acts.

    All methods first take a ``rank`` of the default group, and a place: ``at`` is an operation and its number, counted
    from 1 and from the call on. ``"all_reduce#3"`` is that rank's third ``all_reduce``, in whatever group and thread,
    ``"send"`` its first ``send`` and ``"recv#*"`` every ``recv``. A place that names no operation is a ValueError.

    The fault strikes before the operation is issued. Only what is issued from Python is seen: the reductions that
    DistributedDataParallel makes without a communication hook are not. A rank that its own fault ends or stops counts
    as passed. A fault whose place is never reached fails the test.
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
        """Let a rank be late by ``seconds``; a pair is a range that each delay is drawn from, with ``seed``."""
        low, high = seconds if isinstance(seconds, tuple) else (seconds, seconds)
        draw = random.Random(seed)  # noqa: S311 - repeatable, not secret
        self._add("delay", rank, at, lambda: time.sleep(draw.uniform(low, high)))

    def drop(self, rank: int, at: str) -> None:
        """Leave an operation out: on this rank it is not issued, and seems to have completed."""
        self._add("drop", rank, at, private.completed_work)

    def raise_(self, rank: int, at: str, error: BaseException) -> None:
        """Raise an exception in place of an operation."""
        self._add("raise_", rank, at, partial(_raise, error))

    def _add(self, kind: str, rank: int, at: str, act: Callable[[], object | None]) -> None:
        place = _PLACE.fullmatch(at)
        operations = {"send", "recv", *(title for title, _ in private.GROUP_METHODS.values())}
        if place is None or place[1] not in operations or place[2] == "0":
            raise ValueError(
                f"{at!r} names no operation: write such as 'all_reduce', 'all_reduce#3' or 'send#*', with one of "
                f"{', '.join(sorted(operations))}"
            )
        if rank not in range(self._world_size):
            raise ValueError(f"{kind}: there is no rank {rank!r} among {self._world_size}")
        self.were_asked_for = True
        if rank == self._rank:
            number = None if place[2] == "*" else int(place[2] or 1)
            with self._lock:
                self._faults.append(_Fault(kind, place[1], number, act))
                self.armed = True

    def _begin(self, run: int, rank: int, world_size: int) -> None:
        """Forget the last test's faults; the worker's main thread says which test and which of its ranks comes now."""
        self._run = run
        self._world_size = world_size
        self._rank = rank
        self._faults: list[_Fault] = []
        # On any rank: all of them make the same calls.
        self.were_asked_for = False
        # Whether any operation has to be looked at; read in the hot path.
        self.armed = False

    def _unreached(self) -> list[str]:
        """Return, as text, the faults whose places the test has not reached."""
        return [str(fault) for fault in self._faults if not fault.struck]

    def _reach(self, operation: str) -> object | None:
        """Let the faults act that are due before an operation; what one returns is a work in the operation's place."""
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

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

from zeroshard_testing.ipc import Channel

_PLACE = re.compile(r"(\w+)(?:#(\d+|\*))?")
_OPERATIONS = frozenset(
    {
        "all_reduce",
        "all_reduce_coalesced",
        "all_gather",
        "all_gather_coalesced",
        "all_gather_into_tensor",
        "all_gather_into_tensor_coalesced",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "broadcast",
        "gather",
        "recv",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "reduce_scatter_tensor_coalesced",
        "scatter",
        "send",
    }
)


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

    A place ``at`` is an operation and its number, counted from 1 and from the call on: ``"all_reduce#3"`` is this
    rank's third ``all_reduce``, in whatever group and thread, ``"send"`` its first ``send`` and ``"recv#*"`` every
    ``recv``. The fault strikes before the operation is issued. Only what is issued from Python is seen: the reductions
    that DistributedDataParallel makes without a communication hook are not.

    A rank that its own fault ends or stops counts as passed. A fault whose place is never reached fails the test.

    Args:
        channel: Where the controller is told before this process ends or stops.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._faults: list[_Fault] = []
        self._run = -1
        self._rank = -1
        self.armed = False
        """Whether any operation has to be looked at; read in the hot path."""

    def kill(self, rank: int, at: str) -> None:
        """End a rank by SIGKILL.

        Args:
            rank: The rank in the default group.
            at: The place; see the class.

        Raises:
            ValueError: If the place names no operation.
        """
        self._add("kill", rank, at, self._kill)

    def stop(self, rank: int, at: str, seconds: float | None = None) -> None:
        """Stop a rank by SIGSTOP, as a debugger or a frozen machine would: none of its threads runs.

        Args:
            rank: The rank in the default group.
            at: The place; see the class.
            seconds: When it continues; None for never, then the test ends when all other ranks have.

        Raises:
            ValueError: If the place names no operation.
        """
        self._add("stop", rank, at, lambda: self._stop(seconds))

    def delay(self, rank: int, at: str, seconds: float | tuple[float, float], seed: int = 0) -> None:
        """Let a rank be late.

        Args:
            rank: The rank in the default group.
            at: The place; see the class.
            seconds: How late; a pair is a range that each delay is drawn from.
            seed: Of the drawing.

        Raises:
            ValueError: If the place names no operation.
        """
        low, high = seconds if isinstance(seconds, tuple) else (seconds, seconds)
        draw = random.Random(seed)  # noqa: S311 - repeatable, not secret
        self._add("delay", rank, at, lambda: time.sleep(draw.uniform(low, high)))

    def drop(self, rank: int, at: str) -> None:
        """Leave an operation out: on this rank it is not issued, and seems to have completed.

        Args:
            rank: The rank in the default group.
            at: The place; see the class.

        Raises:
            ValueError: If the place names no operation.
        """
        from zeroshard_testing._torch_private import completed_work

        self._add("drop", rank, at, completed_work)

    def raise_(self, rank: int, at: str, error: BaseException) -> None:
        """Raise an exception in place of an operation.

        Args:
            rank: The rank in the default group.
            at: The place; see the class.
            error: The exception.

        Raises:
            ValueError: If the place names no operation.
        """
        self._add("raise_", rank, at, partial(_raise, error))

    def _add(self, kind: str, rank: int, at: str, act: Callable[[], object | None]) -> None:
        place = _PLACE.fullmatch(at)
        if place is None or place[1] not in _OPERATIONS or place[2] == "0":
            raise ValueError(
                f"{at!r} names no operation: write such as 'all_reduce', 'all_reduce#3' or 'send#*', with one of "
                f"{', '.join(sorted(_OPERATIONS))}"
            )
        if rank != self._rank:
            return
        number = None if place[2] == "*" else int(place[2] or 1)
        with self._lock:
            self._faults.append(_Fault(kind, place[1], number, act))
            self.armed = True

    def _begin(self, run: int, rank: int) -> None:
        self._run, self._rank = run, rank
        self._faults, self.armed = [], False

    def _unreached(self) -> list[str]:
        return [str(fault) for fault in self._faults if not fault.struck]

    def _reach(self, operation: str) -> object | None:
        """Let the faults act that are due before an operation; what they return takes the operation's place."""
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


def begin_faults(faults: Faults, run: int, rank: int) -> None:
    """Forget the last test's faults.

    Args:
        faults: The faults of this process.
        run: Number of the test that begins.
        rank: This process's rank in it.
    """
    faults._begin(run, rank)


def unreached_faults(faults: Faults) -> list[str]:
    """Return, in words, the faults whose places the test has not reached."""
    return faults._unreached()


def reach(faults: Faults, operation: str) -> object | None:
    """Let the faults strike that are due before an operation.

    Args:
        faults: The faults of this process.
        operation: What is about to be issued.

    Returns:
        The work to return instead of issuing it, None to go on.
    """
    __tracebackhide__ = True
    return faults._reach(operation)


def _raise(error: BaseException) -> None:
    __tracebackhide__ = True
    raise error

"""Moves the data of collectives between ranks, by gloo and in threads, after ranks have compared their operations.

Each process group of the emulated accelerator has one `Mover`. The C++ part of the group calls it to issue operations,
and is called back when they have completed. Until then the C++ part decides what streams may do.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # not an explicit export

from zeroshard_testing.emulated._torch_private import gloo_group
from zeroshard_testing.emulated.errors import DifferentCollectivesError
from zeroshard_testing.emulated.order import (
    Call,
    Entry,
    Message,
    describe,
    end_of,
    find_difference,
    find_message_difference,
    located,
    message_text,
)
from zeroshard_testing.emulated.progress import DESTROYED, Progress
from zeroshard_testing.emulated.report import PASSING_ON
from zeroshard_testing.emulated.transfer import Transfer, write
from zeroshard_testing.rank_state import group_key, group_label
from zeroshard_testing.stacks import OWN_CODE, OWN_THREADS, is_below_the_test
from zeroshard_testing.wait_recorder import described

_MESSAGES = ("send", "recv")
# Longest text in a message, in characters.
_WORDS_SIZE = 300
_FRAMES = 3
# Number of collectives whose text a group keeps for errors.
_REMEMBERED = 1000
_ABOVE_THE_CALL = (str(Path(torch.__file__).parent), OWN_CODE, threading.__file__, "<")

# Reentrant, because the garbage collector may close a mover in the middle of a method.
_lock = threading.RLock()
# The movers by the key of their group; if groups have the same key, the latest.
_movers: dict[str, Mover] = {}
_delays: tuple[float, random.Random] | None = None


def delay_up_to(seconds: float, seed: int) -> None:
    """Delay the start of each later operation by a random time of at most this many seconds; 0 for no delay."""
    global _delays
    _delays = (seconds, random.Random(seed)) if seconds else None  # noqa: S311 - no secret


def live_movers() -> list[Mover]:
    """Return the movers of this process that are not closed, in the order in which they were made."""
    return list(_movers.copy().values())


class Mover:
    """Runs the collectives of one process group in the order of issue, in a thread of its own.

    The constructor blocks until every rank of the group has called it. A constructor of torch's own groups blocks there
    too, so a missing rank is found in the same way, and the caller gets the error.

    Methods may be called from any thread. After an error, the rank completes no more operations.

    Args:
        store: The store through which the ranks connect.
        group_rank: This process's rank in the group.
        ranks: The ranks of the group in the default group.
        name: The unique name of the group, equal on all its ranks.
        timeout: The timeout of waits for other ranks in a collective.
        complete: Called once for each ticket, with the error as text, or an empty text, from a thread of the mover
            that no longer holds tensors of the ticket.
    """

    def __init__(
        self,
        store: Any,  # noqa: ANN401 - torch's stubs have no stores
        group_rank: int,
        ranks: Sequence[int],
        name: str,
        timeout: timedelta,
        complete: Callable[[int, str], None],
    ) -> None:
        self._rank = group_rank
        self._ranks = tuple(ranks)
        self._key = group_key(name, ranks)
        self._label = group_label(self._key, len(ranks))
        self._complete = complete
        self._issued = 0
        self._latest: dict[int, str] = {}
        # The text of the error after which this rank completes no more operations.
        self._error = ""
        self._is_closed = False
        self._lanes: dict[tuple[str, int], SimpleQueue[_Job | None]] = {}
        self._new_threads: list[threading.Thread] = []
        self._transfer: Transfer | None = None
        gloo = latest = None
        if len(ranks) > 1:
            # A separate connection, because the store's is locked while another thread waits for a key.
            connection = store.clone()
            latest = PrefixStore(f"emulated-latest/{name}", connection)
            gloo = gloo_group(PrefixStore(f"emulated/{name}", connection), group_rank, len(ranks), timeout)
        self._transfer = Transfer(gloo, group_rank, len(ranks))
        self._progress = Progress(latest, group_rank, ranks)
        with _lock:
            self._collectives = self._lane("collectives")
            _movers[self._key] = self
        self._start_threads()

    def issue(
        self,
        ticket: int,
        calls: list[tuple[str, list[Any], list[Any], int, str, list[int]]],
        stack: Sequence[tuple[str, int, str]],
    ) -> None:
        """Issue a collective or message, or several that were coalesced, without waiting.

        Args:
            ticket: The ticket to complete when all are done.
            calls: At least one: name, inputs, outputs, root or peer, reduce operation and sizes, as `Call` has them.
            stack: File, line and function of the Python frames that issue it, innermost first.
        """
        call_site = _call_site(stack)
        batch = [Call(*call) for call in calls]
        done = partial(self._complete, ticket)
        if all(call.name in _MESSAGES for call in batch):
            self._issue_messages(batch, call_site, done)
            return
        records = tuple(describe(call, self._rank, self._ranks) for call in batch)
        with _lock:
            self._check_open()
            self._issued += 1
            entry = Entry(self._ranks[self._rank], self._issued, records, call_site, self._issued_elsewhere())
            self._latest[self._issued] = located(entry.text, call_site)
            self._latest.pop(self._issued - _REMEMBERED, None)
            self._collectives.put(_Job(partial(self._run, entry, batch), done))

    def end(self, what: str = "the end of the test") -> Future[str]:
        """Compare the end of this rank's test with the other ranks, so that a collective in which they wait raises.

        Returns:
            A future of the error as text, empty if there is none. It completes after all earlier operations.
        """
        future: Future[str] = Future()
        with _lock:
            if self._is_closed:
                future.set_result(self._error)
            else:
                entry = Entry(self._ranks[self._rank], self._issued + 1, (end_of(what),), "")
                self._collectives.put(_Job(partial(self._run, entry, []), future.set_result))
        return future

    def close(self) -> None:
        """Release the group when all operations have completed. Does not block. Safe to call repeatedly."""
        with _lock:
            if self._is_closed:
                return
            self._is_closed = True
            if _movers.get(self._key) is self:
                del _movers[self._key]
            for lane in self._lanes.values():
                lane.put(None)

    @property
    def _data(self) -> Transfer:
        assert self._transfer is not None, "its threads have ended"
        return self._transfer

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError(f"{self._label} is destroyed")

    def _issued_elsewhere(self) -> dict[str, int]:
        """Return the number of collectives of this process in each other group that shares ranks with this one."""
        return {
            key: other._issued
            for key, other in _movers.copy().items()
            if other is not self and len(set(self._ranks).intersection(other._ranks)) > 1
        }

    def _recall(self, group: str, number: int) -> list[str]:
        """Return a collective of another group as text, from every rank of this group; empty if it was not issued."""
        other = _movers.get(group)
        text = other._latest.get(number, "") if other is not None else ""
        try:
            return [found.decode() for found in self._data.gather_texts(text.encode())]
        except RuntimeError:
            return [""] * len(self._ranks)

    def _issue_messages(self, calls: list[Call], call_site: str, done: Callable[[str], None]) -> None:
        done = _after_all(len(calls), done)
        with _lock:
            self._check_open()
            for call in calls:
                # Each peer and direction has a lane, so that none waits for another, as in a batch of NCCL.
                move = self._send if call.name == "send" else self._receive
                self._lane(call.name, call.root).put(_Job(partial(move, call, call_site), done))
        self._start_threads()

    def _lane(self, kind: str, peer: int = -1) -> SimpleQueue[_Job | None]:
        """Return the queue of a thread that runs its jobs in order. `_start_threads` starts the thread."""
        lane = self._lanes.get((kind, peer))
        if lane is None:
            lane = self._lanes[kind, peer] = SimpleQueue()
            name = f"{OWN_THREADS}emulated-{kind}" + (f"-{peer}" if peer >= 0 else "")
            thread = threading.Thread(target=self._work, args=(lane, (kind, peer)), name=name, daemon=True)
            self._new_threads.append(thread)
        return lane

    def _start_threads(self) -> None:
        """Start the threads of new lanes, without the lock: starting one may collect another mover, which closes it."""
        with contextlib.suppress(IndexError):
            while True:
                self._new_threads.pop().start()

    def _work(self, lane: SimpleQueue[_Job | None], key: tuple[str, int]) -> None:
        while (job := lane.get()) is not None:
            if _delays is not None:
                time.sleep(_delays[1].uniform(0, _delays[0]))
            run, done = job.run, job.done
            # Drop tensors before `done`: their memory may be freed then, and there may be no next job.
            del job
            error = self._error
            if not error:
                try:
                    with torch.no_grad():
                        run()
                except Exception as failure:  # noqa: BLE001 - the ticket has to complete after any error
                    error = self._break(failure)
            del run
            done(error)
            del done
        with _lock:
            del self._lanes[key]
            is_last = not self._lanes
        if is_last:
            if not self._error:
                self._progress.note(DESTROYED)
            self._transfer = None

    def _break(self, failure: Exception) -> str:
        """Complete no more operations, and return the error. Other ranks that wait for this one fail too."""
        with _lock:
            if self._error:
                return self._error
            # Every rank finds a difference by itself, except a rank that waits for a message.
            known = isinstance(failure, _KnownToAllError) and len(self._lanes) == 1
            self._error = str(failure) if known else f"rank {self._ranks[self._rank]}: {failure}"
        if len(self._ranks) > 1 and not known:
            self._progress.note(f"has stopped: {self._error}")
            self._data.close_connections()
        return self._error

    def _run(self, entry: Entry, calls: list[Call]) -> None:
        what = f"{located(entry.text, entry.call_site)}, collective number {entry.number} of {self._label},"
        entries = [entry]
        if len(self._ranks) > 1:
            self._progress.begin(what)
            own = json.dumps(entry.to_message()).encode()
            try:
                entries = [Entry.from_message(json.loads(text)) for text in self._data.gather_texts(own)]
            except RuntimeError as failure:
                if entry.is_end and self._progress.others_are_gone():
                    return
                why = self._progress.explain(failure, compares=True)
                raise DifferentCollectivesError(f"{what} lacks a rank: {why}") from None
        difference = find_difference(self._key, entries, self._recall)
        if difference is not None:
            raise _KnownToAllError(difference)
        try:
            for call in calls:
                self._data.move(call)
        except RuntimeError as failure:
            raise RuntimeError(f"{what} has failed: {self._progress.explain(failure)}") from None

    def _send(self, call: Call, call_site: str) -> None:
        announcement = self._message(call, call_site)
        with self._message_errors(call, call_site):
            self._data.send(call, announcement)

    def _receive(self, call: Call, call_site: str) -> None:
        expected = self._message(call, call_site)
        with self._message_errors(call, call_site):
            sent, data = self._data.receive(call.root)
        difference = find_message_difference(self._key, sent, expected)
        if difference is not None:
            raise DifferentCollectivesError(difference)
        write(data, call.outputs)

    def _message(self, call: Call, call_site: str) -> Message:
        """Return the description of a message; ValueError if its peer is this rank."""
        if call.root == self._rank:
            raise ValueError(f"{located(message_text(call, self._ranks), call_site)} in {self._label} is to this rank")
        tensor = (*call.inputs, *call.outputs)[0]
        dtype = str(tensor.dtype).removeprefix("torch.")
        text = described(tensor)[:_WORDS_SIZE]
        return Message(self._ranks[self._rank], text, dtype, tensor.numel(), call.sizes[0], call_site[:_WORDS_SIZE])

    @contextlib.contextmanager
    def _message_errors(self, call: Call, call_site: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as failure:
            what = located(message_text(call, self._ranks), call_site)
            raise RuntimeError(f"{what} in {self._label} has failed: {self._progress.explain(failure)}") from None


@dataclass(frozen=True)
class _Job:
    """A function to run in a thread of a mover, and a function that gets its error."""

    run: Callable[[], None]
    done: Callable[[str], None]


class _KnownToAllError(DifferentCollectivesError):
    """Raised by all ranks of the group at the same place."""


def _after_all(count: int, done: Callable[[str], None]) -> Callable[[str], None]:
    """Return a function to call ``count`` times with an error or none. It then calls ``done`` with the first error."""
    lock = threading.Lock()
    errors: list[str] = []

    def one_is_done(error: str) -> None:
        with lock:
            errors.append(error)
            is_last = len(errors) >= count
        if is_last:
            done(next(filter(None, errors), ""))

    return one_is_done


def _call_site(stack: Sequence[tuple[str, int, str]]) -> str:
    """Return the Python frames that called torch, the innermost first, without torch's, this package's and pytest's."""
    above = itertools.takewhile(lambda frame: not is_below_the_test(frame[0]), stack)
    users = (frame for frame in above if not frame[0].startswith(_ABOVE_THE_CALL) and not frame[0].endswith(PASSING_ON))
    return " < ".join(f"{Path(path).name}:{line} in {name}" for path, line, name in itertools.islice(users, _FRAMES))

"""Moves the data of collectives between ranks, by gloo and in threads, after ranks have compared what they issue.

One `Mover` for each process group of the emulated accelerator. The group's C++ part calls it to issue something, and
is called back when that has completed; what streams may do meanwhile is decided there.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import _pytest
import pluggy
import torch
from torch.distributed import PrefixStore, ReduceOp  # type: ignore[attr-defined]  # torch exports them unseen

import zeroshard_testing
from zeroshard_testing.emulated._torch_private import gloo_group
from zeroshard_testing.emulated.errors import DifferentCollectivesError
from zeroshard_testing.emulated.order import (
    REDUCTIONS,
    Call,
    Entry,
    Message,
    amounts,
    describe,
    end_of,
    find_difference,
    find_message_difference,
    located,
    message_text,
    ranks_text,
)
from zeroshard_testing.rank_state import group_key, group_label
from zeroshard_testing.stacks import OWN_THREADS
from zeroshard_testing.wait_recorder import described

_MESSAGES = ("send", "recv")
# Tags of gloo's messages. NCCL has no tags: the messages between two ranks match in the order in which they are issued.
_ANNOUNCEMENT, _DATA, _NEVER_SENT = range(3)
# Bytes. What does not fit into an entry takes a second round; a message has few words, whose length is limited.
_ENTRY_SIZE = 2048
_MESSAGE_SIZE = 4096
_WORDS_SIZE = 300
_LENGTH_SIZE = 4
_FRAMES = 3
_DESTROYED = "has destroyed the group"


def _folder(module: Any) -> str:  # noqa: ANN401 - a module
    return str(Path(module.__file__).parent) + os.sep


_ABOVE_THE_CALL = (_folder(torch), _folder(zeroshard_testing), threading.__file__, "<")
_BELOW_THE_TEST = (_folder(_pytest), _folder(pluggy))

# Taken again by the same thread where the garbage collector closes a mover in the middle of a method.
_lock = threading.RLock()
# By the group's key; of groups with the same key, the latest.
_movers: dict[str, Mover] = {}
_delays: tuple[float, random.Random] | None = None


def delay_up_to(seconds: float, seed: int) -> None:
    """From now on, let whatever is issued start after a random time of at most so many seconds; 0 for no delay."""
    global _delays
    _delays = (seconds, random.Random(seed)) if seconds else None  # noqa: S311 - no secret


def live_movers() -> list[Mover]:
    """Return the movers of this process that are not closed, in the order in which they were made."""
    return list(_movers.copy().values())


class Mover:
    """Runs the collectives of one process group in the order of issue, in a thread of its own.

    Making one blocks until every rank of the group makes its own: that is where a constructor of torch's own groups
    blocks too, so a rank that never comes is found there by the same means, and an error belongs to the caller.

    Methods may be called from any thread. A rank on which something has failed completes nothing any more.

    Args:
        store: Where the ranks meet.
        group_rank: This process's rank in the group.
        ranks: The group's ranks, as the default group numbers them.
        name: The group's name, which its ranks share and no other group has.
        timeout: How long to wait for the other ranks in a collective.
        complete: Called once for each ticket, with the error as text, empty if there is none, from a thread of the
            mover that holds no tensor of the ticket any more.
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
        # What other ranks read if they wait for this one in vain: how often ranks have compared, and the latest entry.
        self._at = (0, "")
        self._error = ""
        self._is_closed = False
        self._lanes: dict[tuple[str, int], SimpleQueue[_Job | None]] = {}
        self._latest: Any = None
        self._gloo: Any = None
        if len(ranks) > 1:
            # A connection of its own: that of the store is locked while another thread waits for a key.
            connection = store.clone()
            self._latest = PrefixStore(f"emulated-latest/{name}", connection)
            self._gloo = gloo_group(PrefixStore(f"emulated/{name}", connection), group_rank, len(ranks), timeout)
        with _lock:
            self._collectives = self._lane("collectives")
            _movers[self._key] = self

    def issue(self, ticket: int, calls: list[tuple[str, list[Any], list[Any], int, str, list[int]]]) -> None:
        """Issue a collective or message, or several that were coalesced, without waiting for anything.

        Args:
            ticket: What to complete when all are done.
            calls: Name, inputs, outputs, root or peer, reduce operation and sizes, as `Call` has them.
        """
        call_site = _call_site()
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
            self._collectives.put(_Job(partial(self._run, entry, batch), done))

    def end(self, what: str = "the end of the test") -> Future[str]:
        """Meet the other ranks in what is no collective, so that one which they are still in is an error at once.

        Returns:
            A future of the error as text, empty if there is none. It comes after all that was issued before.
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
        """Let go of the group when all that was issued has completed. May be called again, and does not block."""
        with _lock:
            if self._is_closed:
                return
            self._is_closed = True
            if _movers.get(self._key) is self:
                del _movers[self._key]
            for lane in self._lanes.values():
                lane.put(None)

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError(f"{self._label} is destroyed, and issues nothing any more")

    def _issued_elsewhere(self) -> dict[str, int]:
        """Return how many collectives this process has issued in each other group that shares ranks with this one."""
        return {
            key: other._issued
            for key, other in _movers.copy().items()
            if other is not self and len(set(self._ranks).intersection(other._ranks)) > 1
        }

    def _issue_messages(self, calls: list[Call], call_site: str, done: Callable[[str], None]) -> None:
        done = _after_all(len(calls), done)
        with _lock:
            self._check_open()
            if not calls:
                # Nothing was coalesced, which takes its turn all the same.
                self._collectives.put(_Job(_nothing, done))
            for call in calls:
                # A lane for each peer and direction: none of them waits for another, as in a batch of NCCL's.
                move = self._send if call.name == "send" else self._receive
                self._lane(call.name, call.root).put(_Job(partial(move, call, call_site), done))

    def _lane(self, kind: str, peer: int = -1) -> SimpleQueue[_Job | None]:
        """Return the queue of a thread that runs what is put there in order, from its first use on."""
        lane = self._lanes.get((kind, peer))
        if lane is None:
            lane = self._lanes[kind, peer] = SimpleQueue()
            name = f"{OWN_THREADS}emulated-{kind}" + (f"-{peer}" if peer >= 0 else "")
            threading.Thread(target=self._work, args=(lane, (kind, peer)), name=name, daemon=True).start()
        return lane

    def _work(self, lane: SimpleQueue[_Job | None], key: tuple[str, int]) -> None:
        while (job := lane.get()) is not None:
            if _delays is not None:
                time.sleep(_delays[1].uniform(0, _delays[0]))
            run, done = job.run, job.done
            # Whoever is told that it is done may count on the memory being free: no tensor is kept until the next job.
            del job
            error = self._error
            if not error:
                try:
                    with torch.no_grad():
                        run()
                except Exception as failure:  # noqa: BLE001 - whatever it is, the ticket has to complete
                    error = self._break(failure)
            del run
            done(error)
            del done
        with _lock:
            del self._lanes[key]
            is_last = not self._lanes
        if is_last and self._gloo is not None:
            if not self._error:
                self._note(_DESTROYED)
            self._gloo = self._latest = None

    def _break(self, failure: Exception) -> str:
        """Complete nothing from now on, and return with which error; other ranks that wait for this one fail too."""
        with _lock:
            if self._error:
                return self._error
            self._error = f"rank {self._ranks[self._rank]}: {failure}"
            # A difference is known to every rank; who only waits for a message does not compare.
            known = isinstance(failure, _KnownToAllError) and len(self._lanes) == 1
        if self._gloo is not None and not known:
            self._note(f"has stopped: {self._error}")
            # Gloo closes the group's connections when a wait is over without success, and offers no other way to.
            with contextlib.suppress(RuntimeError):
                peer = (self._rank + 1) % len(self._ranks)
                work = self._gloo.recv([torch.empty(1, dtype=torch.uint8)], peer, _NEVER_SENT)
                work.wait(timedelta(milliseconds=1))
        return self._error

    def _run(self, entry: Entry, calls: list[Call]) -> None:
        what = f"{located(entry.text, entry.call_site)}, collective number {entry.number} of {self._label},"
        entries = [entry]
        if self._gloo is not None:
            self._at = (self._at[0] + 1, what)
            self._note()
            try:
                entries = [Entry.from_message(json.loads(text)) for text in self._exchange(entry)]
            except RuntimeError as failure:
                if entry.is_end and self._others_are_gone():
                    return
                why = self._why(failure, compares=True)
                raise DifferentCollectivesError(f"{what} lacks a rank: {why}") from None
        difference = find_difference(self._key, entries)
        if difference is not None:
            raise _KnownToAllError(difference)
        try:
            for call in calls:
                self._move(call)
        except RuntimeError as failure:
            raise RuntimeError(f"{what} has failed: {self._why(failure)}") from None

    def _exchange(self, entry: Entry) -> list[bytes]:
        """Return the entry of each rank as JSON, in the order of the group's ranks."""
        text = json.dumps(entry.to_message()).encode()
        found = self._gathered(_filled(text, _ENTRY_SIZE))
        longest = max(_length(buffer) for buffer in found)
        if longest > _ENTRY_SIZE - _LENGTH_SIZE:
            # All ranks see that, and take another round.
            found = self._gathered(_filled(text, longest + _LENGTH_SIZE))
        return [_text(buffer) for buffer in found]

    def _gathered(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        found = [torch.empty_like(buffer) for _ in self._ranks]
        self._gloo.allgather(found, buffer).wait()
        return found

    def _move(self, call: Call) -> None:
        if call.name in REDUCTIONS:
            self._reduce(call)
        elif call.name == "broadcast":
            self._broadcast(call)
        elif call.name != "barrier":
            # Ranks that have compared their barriers have met.
            self._exchange_parts(call)

    def _reduce(self, call: Call) -> None:
        """Reduce by gloo, each tensor as it is: sums are in gloo's order, which depends on the size."""
        if call.name == "all_reduce":
            # In the order of the output's memory, in which gloo would reduce it.
            total = torch.empty_like(call.outputs[0]).copy_(call.inputs[0])
            self._reduce_by_gloo(total, call.reduce_op)
            call.outputs[0].copy_(total)
            return
        root = call.root if call.name == "reduce" else None
        for tensor in call.inputs:
            self._reduce_by_gloo(tensor, call.reduce_op, root)
        for output in call.outputs:
            if call.name == "reduce_scatter":
                output.copy_(call.inputs[self._rank].view(output.shape))
            else:
                place = self._rank * output.numel() if call.name == "reduce_scatter_tensor" else 0
                output.copy_(call.inputs[0].view(-1)[place : place + output.numel()].view(output.shape))

    def _reduce_by_gloo(self, tensor: torch.Tensor, name: str, root: int | None = None) -> None:
        if self._gloo is None:
            return
        reduce_op = getattr(ReduceOp, "SUM" if name == "AVG" else name)
        if root is None:
            self._gloo.allreduce([tensor], reduce_op).wait()
        else:
            self._gloo.reduce(tensor, root, reduce_op).wait()
        if name == "AVG":
            tensor.div_(len(self._ranks))

    def _broadcast(self, call: Call) -> None:
        if self._gloo is None:
            return
        data = _bytes(call.inputs[0]) if call.inputs else _room_for(call.outputs)
        self._gloo.broadcast(data, call.root).wait()
        _write(data, call.outputs)

    def _exchange_parts(self, call: Call) -> None:
        """Give each rank what it takes from this one, as bytes: that works for every dtype, and for uneven sizes."""
        size = len(self._ranks)
        given = torch.cat([_room_for([]), *map(_bytes, call.inputs)])
        if call.name in ("all_gather", "all_gather_into_tensor"):
            given = given.repeat(size)
        taken = given
        if self._gloo is not None:
            taken = _room_for(call.outputs)
            width = (*call.inputs, *call.outputs)[0].element_size()
            gives, takes = ([number * width for number in numbers] for numbers in amounts(call, self._rank, size))
            self._gloo.alltoall_base(taken, given, takes, gives).wait()
        _write(taken, call.outputs)

    def _send(self, call: Call, call_site: str) -> None:
        announcement = self._message(call, call_site)
        data = _bytes(call.inputs[0])
        with self._message_errors(call, call_site):
            # Both are on their way before either is waited for.
            text = _filled(json.dumps(asdict(announcement)).encode(), _MESSAGE_SIZE)
            works = [self._gloo.send([text], call.root, _ANNOUNCEMENT)]
            if data.numel():
                works.append(self._gloo.send([data], call.root, _DATA))
            for work in works:
                work.wait()

    def _receive(self, call: Call, call_site: str) -> None:
        expected = self._message(call, call_site)
        with self._message_errors(call, call_site):
            text = torch.empty(_MESSAGE_SIZE, dtype=torch.uint8)
            self._gloo.recv([text], call.root, _ANNOUNCEMENT).wait()
            sent = Message(**json.loads(_text(text)))
            width = getattr(torch, sent.dtype).itemsize
            # Of the sender's size, whatever is expected here: gloo ends the process where sizes differ.
            data = torch.empty(sent.elements * width, dtype=torch.uint8)
            if data.numel():
                self._gloo.recv([data], call.root, _DATA).wait()
        difference = find_message_difference(self._key, sent, expected)
        if difference is not None:
            raise DifferentCollectivesError(difference)
        _write(data, call.outputs)

    def _message(self, call: Call, call_site: str) -> Message:
        """Return a message as this rank knows it; ValueError if it is for this rank itself."""
        if call.root == self._rank:
            raise ValueError(f"{located(message_text(call, self._ranks), call_site)} in {self._label} is to itself")
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
            raise RuntimeError(f"{what} in {self._label} has failed: {self._why(failure)}") from None

    def _note(self, fate: str = "") -> None:
        """Let other ranks know where this one is, and why it comes no further."""
        # Without the store, their error says less.
        with contextlib.suppress(RuntimeError):
            self._latest.set(str(self._rank), json.dumps([*self._at, fate]))

    def _notes(self) -> dict[int, tuple[int, str, str]]:
        """Return how often each other rank has compared, its latest entry and its fate, by rank of the default group."""
        found = {}
        for place, rank in enumerate(self._ranks):
            if place != self._rank:
                found[rank] = (0, "", "")
                with contextlib.suppress(RuntimeError):
                    if self._latest.check([str(place)]):
                        found[rank] = tuple(json.loads(self._latest.get(str(place))))
        return found

    def _others_are_gone(self) -> bool:
        """Whether each other rank is at its end too, or has destroyed the group after as many collectives."""
        here = self._at[0]
        return all(
            number == here if not fate else fate == _DESTROYED and here - number in (0, 1)
            for number, _, fate in self._notes().values()
        )

    def _why(self, failure: Exception, *, compares: bool = False) -> str:
        """Return why gloo has failed: which ranks have not come to compare, or have stopped, and gloo's own words."""
        notes = self._notes()
        behind = {rank for rank, (number, _, _) in notes.items() if compares and number < self._at[0]}
        told = []
        for rank, (number, text, fate) in notes.items():
            if rank in behind:
                latest = f"its latest is {text.rstrip(',')}" if number else "it has issued none"
                told.append(f"rank {rank} {fate or 'has not come'} ({latest})")
            elif fate and not behind:
                told.append(f"rank {rank} {fate}")
        if behind:
            come = [rank for rank in self._ranks if rank not in behind]
            told.append(f"{ranks_text(come)} {'has' if len(come) == 1 else 'have'} come")
        return "; ".join([*told, f"gloo: {_first_line(failure)}"])


@dataclass(frozen=True)
class _Job:
    """Something to run in a thread of a mover, and what to tell its error to."""

    run: Callable[[], None]
    done: Callable[[str], None]


class _KnownToAllError(DifferentCollectivesError):
    """All ranks of the group raise it at the same place, so none of them has to be told."""


def _nothing() -> None:
    pass


def _after_all(count: int, done: Callable[[str], None]) -> Callable[[str], None]:
    """Return what is to be called ``count`` times with an error or none, and calls ``done`` with the first error."""
    lock = threading.Lock()
    errors: list[str] = []

    def one_is_done(error: str) -> None:
        with lock:
            errors.append(error)
            is_last = len(errors) >= count
        if is_last:
            done(next(filter(None, errors), ""))

    return one_is_done


def _call_site() -> str:
    """Return where Python has called torch: the innermost frames, without torch's, this package's and pytest's."""
    found: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(found) < _FRAMES:
        path = frame.f_code.co_filename
        if path.startswith(_BELOW_THE_TEST):
            break
        if not path.startswith(_ABOVE_THE_CALL):
            found.append(f"{Path(path).name}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    # DistributedDataParallel issues from a thread of autograd that has no Python frames.
    return " < ".join(found) or "no Python frame"


def _first_line(failure: Exception) -> str:
    """Return the first line of an error, without the place in gloo's source that it begins with."""
    line = str(failure).partition("\n")[0]
    return line.partition("] ")[2] if line.startswith("[/") else line


def _filled(text: bytes, size: int) -> torch.Tensor:
    """Return a buffer of so many bytes that begins with the text's length, and has as much of the text as fits."""
    content = len(text).to_bytes(_LENGTH_SIZE, "big") + text
    return torch.frombuffer(bytearray(content[:size].ljust(size, b"\0")), dtype=torch.uint8)


def _length(buffer: torch.Tensor) -> int:
    return int.from_bytes(bytes(buffer[:_LENGTH_SIZE].tolist()), "big")


def _text(buffer: torch.Tensor) -> bytes:
    return bytes(buffer[_LENGTH_SIZE : _LENGTH_SIZE + _length(buffer)].tolist())


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _room_for(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return torch.empty(size, dtype=torch.uint8, device="cpu")


def _write(data: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
    """Copy bytes into tensors that follow one another."""
    place = 0
    for output in outputs:
        size = output.numel() * output.element_size()
        # A copy, for a view of another dtype has to begin at a multiple of its width.
        output.copy_(data[place : place + size].clone().view(output.dtype).view(output.shape))
        place += size

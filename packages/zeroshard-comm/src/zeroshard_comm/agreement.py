"""How ranks make sure that they are about to do the same thing, before anything is sent.

A rank that finds its input bad must not simply raise: its peers would wait for it. So every collective method of an
object begins with an *agreement*. The ranks combine one 64-bit word: 31 bits of a digest of what each is about to do,
the complement of these bits, and one bit that says "failed". After a bitwise OR no bit of the digest stands beside the
same bit of the complement exactly if all digests are equal. The OR travels in rounds of doubling distance: in round k
each rank sends what it has to the rank 2^k further on, so after log2 N rounds, of one message sent and one received,
every rank has the words of all (the dissemination barrier: D. Hensgen, R. Finkel, U. Manber, Two algorithms for barrier
synchronization, 1988). Only after a difference texts follow: to rank 0, which decides, and back.

A rank that is lost is noticed by those that wait for its words. They go on with a word that says so, and since that is
done in every round, all ranks learn of one that has sent none in the same agreement. Of one that is lost between two
rounds some may learn later: its word is out, and they have agreed with it.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from zeroshard_comm.errors import DifferentCallsError, DisagreementError, PeerLostError, builtin_name, rebuild_exception
from zeroshard_comm.process_group import RankGroup
from zeroshard_comm.rounds import Rounds
from zeroshard_comm.traffic import Traffic
from zeroshard_comm.verdict import OWN, Explain, Reason, verdict

TAG_WORD = 0x5A530001
TAG_INTS = 0x5A530004

_DIGEST_BITS = 31
_DIGEST = (1 << _DIGEST_BITS) - 1
_FAILED = 1 << 62
_LOST = 1 << 63
"""With it, a word says only which rank was lost."""


_SOMEBODY = _DIGEST
"""In place of the rank that was lost, where it is not known."""


def word_of(digest: int | None, *, failed: bool) -> int:
    """Return what a rank puts into an agreement, 64 bits.

    Args:
        digest: any number, of which 31 bits count; None agrees with every digest.
        failed: whether the rank has an error to report.
    """
    bits = 0 if digest is None else digest & _DIGEST | (digest & _DIGEST ^ _DIGEST) << _DIGEST_BITS
    return bits | (_FAILED if failed else 0)


def is_unanimous(combined: int) -> bool:
    """Tell from the OR of all words whether their digests are equal.

    >>> is_unanimous(word_of(5, failed=False) | word_of(5, failed=True))
    True
    >>> is_unanimous(word_of(5, failed=False) | word_of(4, failed=False))
    False
    """
    return combined & _DIGEST & combined >> _DIGEST_BITS == 0


@dataclass(frozen=True, slots=True)
class Position:
    """Where a rank is. Two optimizers that look alike must not pass for each other, nor two steps of one of them.

    Attributes:
        optimizer: its number among those built on the process group, from 1.
        name: of its class.
        steps: how many steps all ranks have begun with it.
    """

    optimizer: int
    name: str
    steps: int

    def __str__(self) -> str:
        """Return such as ``"after 4 steps of optimizer 2 (AdamW)"``."""
        return f"after {self.steps} steps of optimizer {self.optimizer} ({self.name})"


class Control:
    """Agreements of the ranks of one process group.

    Messages travel over gloo and CPU memory: over the group itself where it has gloo for CPU tensors, else over a gloo
    group of the same ranks, with the same timeout, that is made once per process group (its construction is a
    collective among those ranks alone). So no agreement ever waits for an accelerator. With torch's ``fake`` backend
    nothing travels, and an agreement raises only what this rank itself found.

    One thread at a time may call methods of all objects of this class on one process group.

    Args:
        ranks: the group whose ranks agree.
        traffic: where bytes and waiting are counted, as kind ``"control"``.

    Attributes:
        position: what ranks must be alike in, whatever they are about to do; None if that does not matter. Its owner
            changes it, at the same time on all ranks.
    """

    def __init__(self, ranks: RankGroup, traffic: Traffic | None = None) -> None:
        self.ranks = ranks
        self.traffic = traffic if traffic is not None else Traffic()
        self.channel = _channel_of(ranks)
        self.position: Position | None = None
        self._rounds = Rounds(self.channel or ranks, self.traffic)

    @property
    def alone(self) -> bool:
        """Whether there is nobody to agree with: one rank, or a backend that moves no data."""
        return self.channel is None or self.ranks.world_size == 1

    def check_consistent(
        self,
        operation: str,
        digest: int = 0,
        *,
        error: Exception | None = None,
        detail: Callable[[], str] = str,
        explain: Explain | None = None,
    ) -> None:
        """Raise on every rank if any rank failed or differs. Collective.

        Args:
            operation: what this rank is about to do, e.g. ``"step()"``.
            digest: a 63-bit number that is equal on ranks that hold the same.
            error: what went wrong on this rank, if something did.
            detail: called only after a difference: the text behind the digest.
            explain: called only after a difference, on rank 0, with the details of two ranks and the two ranks; names
                the first difference in words.

        Raises:
            DisagreementError: if ranks are in different operations, or their digests differ.
            PeerLostError: if a rank is gone.
            RuntimeError: if another thread is in an agreement of this process group.
            Exception: if a rank reported an error: that error on the rank itself, one of the same built-in type and
                the same message on the others.
        """
        failure = self.inconsistency(operation, digest, error=error, detail=detail, explain=explain)
        if failure is not None:
            try:
                raise failure from (error if failure is not error else None)
            finally:
                # A frame that keeps an error which passes through it keeps itself alive, and all that it refers to.
                del failure, error

    def inconsistency(
        self,
        operation: str,
        digest: int | None = 0,
        *,
        error: Exception | None = None,
        detail: Callable[[], str] = str,
        explain: Explain | None = None,
    ) -> Exception | None:
        """As :meth:`check_consistent`, but return the error instead of raising it (a lost peer still raises).

        A rank whose digest is None agrees with every digest, and with every operation.
        """
        if self.alone:
            return error
        with self.ranks.context.one_at_a_time(operation):
            if isinstance(error, PeerLostError):
                # The others are to know of it, too, though this rank has nothing to hear.
                self._combine(operation, digest, failed=True, lost=_SOMEBODY if error.peer is None else error.peer)
                return error
            combined = self._combine(operation, digest, failed=error is not None)
            if is_unanimous(combined) and not combined & _FAILED:
                return None
            kind, text = (builtin_name(error), str(error)) if error is not None else ("", "")
            held = "" if is_unanimous(combined) else detail()
            return self._exchange_errors(operation, digest, held, kind, text, error, explain)

    def any_raised(self, raised: bool, operation: str) -> bool:
        """Tell every rank whether any rank raised its hand. Collective.

        Args:
            raised: whether this rank does.
            operation: what this rank is about to do, as for :meth:`check_consistent`; not one that it is called with.

        Raises:
            DisagreementError: if a rank is in a different operation.
            PeerLostError: if a rank is gone.
            Exception: if a rank that is in a different operation reported an error there.
        """
        if self.alone:
            return raised
        with self.ranks.context.one_at_a_time(operation):
            combined = self._combine(operation, 0, failed=raised)
            if not is_unanimous(combined):
                raise self._exchange_errors(operation)
            return bool(combined & _FAILED)

    def all_gather_ints(self, numbers: Sequence[int], operation: str) -> list[list[int]]:
        """Bring as many 64-bit integers of every rank to every rank, in rank order, in log2 N rounds. Collective.

        There is at least one. Agree on the same operation first.

        Raises:
            PeerLostError: if a rank is gone.
        """
        gathered = self._all_gather(torch.tensor(numbers, dtype=torch.int64, device="cpu"), operation)
        return [row.tolist() for row in gathered]

    def all_gather_float(self, number: float, operation: str) -> list[float]:
        """Bring a number of every rank to every rank, as :meth:`all_gather_ints`.

        Raises:
            PeerLostError: if a rank is gone.
        """
        (bits,) = struct.unpack("<q", struct.pack("<d", number))
        gathered = self.all_gather_ints([bits], operation)
        return [struct.unpack("<d", struct.pack("<q", row[0]))[0] for row in gathered]

    def _combine(self, operation: str, digest: int | None, *, failed: bool, lost: int | None = None) -> int:
        """The OR of the words of all ranks; if this one has lost another one, that is passed on."""
        code = zlib.crc32(f"{operation} {self.position} {digest}".encode())
        word = word_of(None if digest is None else code, failed=failed) if lost is None else _LOST | lost

        def message(_: int) -> torch.Tensor:
            return torch.tensor([word - (1 << 64) if word & _LOST else word], dtype=torch.int64, device="cpu")

        def is_lost() -> bool:
            return word >= _LOST

        for received in self._rounds.run(message, is_lost, TAG_WORD, operation, forward=True):
            theirs = int(received) & (1 << 64) - 1 if isinstance(received, torch.Tensor) else _LOST | received
            word = theirs if theirs & _LOST else word if word & _LOST else word | theirs
        if word & _LOST and lost is None:
            peer = word & ~_LOST
            raise self._rounds.error_for(None if peer == _SOMEBODY else peer, operation)
        return word

    def _all_gather(self, mine: torch.Tensor, operation: str) -> list[torch.Tensor]:
        """Rows of all ranks: in round k each rank passes on those of the 2^k ranks from itself on (Bruck's way)."""
        if self.alone:
            return [mine]
        size = self.ranks.world_size
        # The first number of each message is the rank that was lost, counted from 1, if one was.
        rows, gone = [mine], 0

        def message(distance: int) -> torch.Tensor:
            count = min(distance, size - distance)
            passed = [*rows, *[torch.zeros_like(mine)] * (count - len(rows))][:count]
            return torch.cat([torch.tensor([gone], dtype=torch.int64, device="cpu"), *passed])

        def is_lost() -> bool:
            return gone > 0

        with self.ranks.context.one_at_a_time(operation):
            for received in self._rounds.run(message, is_lost, TAG_INTS, operation, forward=False):
                if isinstance(received, int):
                    gone = received + 1
                else:
                    gone = gone or int(received[0])
                    rows += received[1:].split(mine.numel())
        if gone:
            raise self._rounds.error_for(gone - 1, operation)
        rank = self.ranks.rank
        return [rows[(other - rank) % size] for other in range(size)]

    def _exchange_errors(
        self,
        operation: str,
        digest: int | None = 0,
        detail: str = "",
        error_type: str = "",
        message: str = "",
        error: Exception | None = None,
        explain: Explain | None = None,
    ) -> Exception:
        """Tell rank 0 what this rank has to say; it decides what every rank raises."""
        mine = Reason(self.ranks.rank, operation, str(self.position or ""), digest, detail, error_type, message)
        if mine.rank:
            self._rounds.send_text(
                0, json.dumps([operation, mine.position, digest, detail, error_type, message]), operation
            )
            kind, message = json.loads(self._rounds.receive_text(0, operation))
        else:
            kind, message = self._decide(mine, operation, explain)
            for peer in self.ranks.peers:
                # The others are to hear of it all the same.
                with suppress(PeerLostError):
                    self._rounds.send_text(peer, json.dumps([kind, message]), operation)
        if kind == OWN:
            assert error is not None
            return error
        known = {own.__name__: own for own in (PeerLostError, DisagreementError, DifferentCallsError)}
        return known[kind](message) if kind in known else rebuild_exception(kind, message)

    def _decide(self, mine: Reason, operation: str, explain: Explain | None) -> tuple[str, str]:
        """Rank 0: the name of the error, and its message, for all ranks."""
        reasons, gone = [mine], ""
        for peer in range(1, self.ranks.world_size):
            try:
                reasons.append(Reason(peer, *json.loads(self._rounds.receive_text(peer, operation))))
            except PeerLostError as error:
                gone = gone or str(error)
        return ("PeerLostError", gone) if gone else verdict(reasons, explain)


def _channel_of(ranks: RankGroup) -> RankGroup | None:
    """Find, or make, the gloo group that carries the messages of agreements."""
    if not ranks.moves_data() or ranks.world_size == 1:
        return None
    return ranks if ranks.sends_tagged(torch.device("cpu")) else ranks.private_group("gloo", "control")

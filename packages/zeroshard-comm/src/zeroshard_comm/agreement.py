"""How ranks make sure that they do the same thing, before anything is sent.

A rank that finds its input bad must not simply raise: its peers would wait for it. So every collective method of an
object begins with an *agreement*. The ranks combine one 64-bit word: 31 bits of a digest of what each is about to do,
the complement of these bits, one bit that says "failed", and one for a yes-or-no question of the caller. After a
bitwise OR no bit is set in the digest and at the same bit of the complement exactly if all digests are equal. Few ranks
combine their words by one collective, see :mod:`zeroshard_comm.word_ring`; the first agreement, those of many ranks,
and more than 1,024 words travel in rounds, see :mod:`zeroshard_comm.rounds`. Only after a difference texts follow: to
rank 0, which decides, and back.

A rank that is lost is noticed by those that wait for its words, and they tell the others in the same agreement. Of one
that is lost between two rounds some may learn later: its word is out, and they have agreed with it.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass

import torch

from zeroshard_comm import word_ring
from zeroshard_comm.errors import DifferentCallsError, DisagreementError, PeerLostError, builtin_name, rebuild_exception
from zeroshard_comm.messages import receive_text, send_text
from zeroshard_comm.process_group import RankGroup
from zeroshard_comm.rounds import combine_in_rounds
from zeroshard_comm.traffic import Traffic
from zeroshard_comm.word_ring import WordRing

TAG_WORD = 0x5A530001
TAG_INTS = 0x5A530004

_MOST_NUMBERS = 1024
"""More numbers than that travel in rounds, which send them to fewer ranks."""

_DIGEST_BITS = 31
_DIGEST = (1 << _DIGEST_BITS) - 1
_FAILED = 1 << 62
_FLAG = -1 << 63
"""The highest bit of a signed integer."""

Explain = Callable[[str, str, int, int], "str | None"]
"""From two ranks' details, and the two ranks, to a text that names the first difference; None if it finds none."""

_OWN = "own"
"""In place of the name of an error: every rank has the same one, and raises its own."""


def word_of(digest: int | None, *, failed: bool, flag: bool = False) -> int:
    """Return what a rank puts into an agreement, 64 bits.

    Args:
        digest: any number, of which 31 bits count; None agrees with every digest.
        failed: whether the rank has an error to report.
        flag: whether to tell all ranks so.
    """
    bits = 0 if digest is None else digest & _DIGEST | (digest & _DIGEST ^ _DIGEST) << _DIGEST_BITS
    return bits | (_FAILED if failed else 0) | (_FLAG if flag else 0)


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
    """Where a rank is. Two similar optimizers, or two steps of one, must not be mistaken for each other.

    Attributes:
        optimizer: its number among those built on the process group, from 1.
        name: of its class.
        steps: how many steps all ranks have begun with it.
    """

    optimizer: int
    name: str
    steps: int

    def __str__(self) -> str:
        """Return text such as ``"after 4 steps of optimizer 2 (AdamW)"``."""
        return f"after {self.steps} steps of optimizer {self.optimizer} ({self.name})"


class Control:
    """Agreements of the ranks of one process group.

    Messages travel over gloo and CPU memory, on connections of our own that are made once per process group, see
    :class:`~zeroshard_comm.word_ring.WordRing`: so no agreement ever waits for an accelerator, and closing them closes
    none of the user's. The first agreement comes before, since connecting waits for a rank that is gone: on the group
    itself where it has gloo for CPU tensors, else on a gloo group that is made for it. With torch's ``fake`` backend
    nothing travels, and an agreement raises only what this rank itself found.

    One thread at a time may call methods of all objects of this class on one process group.

    Args:
        ranks: the group whose ranks agree.
        traffic: where bytes and waiting are counted, as kind ``"control"``.

    Attributes:
        position: must be equal on all ranks in every operation; None if that does not matter. Its owner
            changes it, at the same time on all ranks.
        flagged: whether any rank has set ``flag`` in the last :meth:`agree`, also if that has raised.
    """

    def __init__(self, ranks: RankGroup, traffic: Traffic | None = None) -> None:
        self.ranks = ranks
        self.traffic = traffic if traffic is not None else Traffic()
        self._first = _first_channel_of(ranks)
        self.position: Position | None = None
        self.flagged = False

    @property
    def is_single_rank(self) -> bool:
        """True if no other rank can answer: there is one rank, or the backend moves no data."""
        return self._first is None

    @property
    def channel(self) -> RankGroup:
        """The group that messages travel on now; nothing may be sent on it if :attr:`is_single_rank`."""
        ring = self.ranks.context.ring
        return ring.ranks if ring is not None else self._first or self.ranks

    def agree(
        self,
        operation: str,
        digest: int | None = 0,
        *,
        error: Exception | None = None,
        detail: Callable[[], str] = str,
        explain: Explain | None = None,
        flag: bool = False,
    ) -> bool:
        """Raise on every rank if any rank failed or differs. Collective.

        Args:
            operation: what this rank is about to do, e.g. ``"step()"``.
            digest: a 63-bit number that is equal on ranks that hold the same; None agrees with every digest, and with
                every operation.
            error: what went wrong on this rank, if something did.
            detail: called only after a difference: the text behind the digest.
            explain: called only after a difference, on rank 0, with the details of two ranks and the two ranks; names
                the first difference.
            flag: the answer of this rank to a yes-or-no question.

        Returns:
            Whether any rank has set ``flag``.

        Raises:
            DisagreementError: if ranks are in different operations, or their digests differ.
            PeerLostError: if a rank is gone.
            RuntimeError: if another thread is in an agreement of this process group.
            Exception: if a rank reported an error: that error on the rank itself, one of the same built-in type and
                the same message on the others.
        """
        self.flagged, failure = flag, error
        if not self.is_single_rank:
            with self.ranks.context.one_at_a_time(operation):
                if isinstance(error, PeerLostError):
                    # The others learn of it by their connections.
                    self.ranks.context.close(error)
                else:
                    combined = self._combine(operation, digest, failed=error is not None, flag=flag)
                    self.flagged, failure = bool(combined & _FLAG), None
                    if not is_unanimous(combined) or combined & _FAILED:
                        held = "" if is_unanimous(combined) else detail()
                        failure = self._exchange_errors(operation, digest, held, error, explain)
        if failure is None:
            return self.flagged
        try:
            raise failure from (error if failure is not error else None)
        finally:
            # Else the traceback of the error refers to the error, and what its frames hold is not freed at once.
            del failure, error

    def gather_ints(self, numbers: Sequence[int], operation: str, *, often_equal: bool = False) -> list[list[int]]:
        """Return the 64-bit integers of every rank, in rank order. Collective. Agree on the same operation first.

        Args:
            numbers: as many on every rank, at least one.
            operation: what this rank is about to do, as for :meth:`agree`.
            often_equal: whether to ask first, by one word, if all ranks have the same numbers (up to 31 bits of a
                digest), which are not sent then.

        Raises:
            PeerLostError: if a rank is gone.
        """
        if self.is_single_rank:
            return [list(numbers)]
        world_size = self.ranks.world_size
        if often_equal:
            with self.ranks.context.one_at_a_time(operation):
                digest = zlib.crc32(repr(list(numbers)).encode())
                if is_unanimous(self._combine(operation, digest)):
                    return [list(numbers)] * world_size
        rows = torch.zeros((world_size, len(numbers)), dtype=torch.int64, device="cpu")
        rows[self.ranks.rank] = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        combined: list[list[int]] = self.combine_or(rows.view(-1), operation).view_as(rows).tolist()
        return combined

    def combine_or(self, words: torch.Tensor, operation: str) -> torch.Tensor:
        """Return the bitwise OR of the words of all ranks, of which :meth:`gather_ints` is made. Collective.

        Args:
            words: 64-bit integers on the CPU, 1-D, as many on every rank; may be overwritten.
            operation: as for :meth:`gather_ints`.

        Raises:
            PeerLostError: if a rank is gone.
        """
        if self.is_single_rank:
            return words
        with self.ranks.context.one_at_a_time(operation):
            return self._or(words, TAG_INTS, operation)

    def _combine(self, operation: str, digest: int | None, *, failed: bool = False, flag: bool = False) -> int:
        """The OR of the words of all ranks. If they agree, this rank uses connections of our own from now on."""
        code = zlib.crc32(f"{operation} {self.position} {digest}".encode())
        word = word_of(None if digest is None else code, failed=failed, flag=flag)
        combined = int(self._or(torch.tensor([word], dtype=torch.int64, device="cpu"), TAG_WORD, operation))
        if is_unanimous(combined) and not combined & _FAILED and self.ranks.context.ring is None:
            assert self._first is not None
            self.ranks.context.ring = WordRing(self._first)
        return combined

    def _or(self, numbers: torch.Tensor, tag: int, operation: str) -> torch.Tensor:
        ring = self.ranks.context.ring
        started = time.perf_counter()
        is_small = self.ranks.world_size <= word_ring.MOST_RANKS and len(numbers) <= _MOST_NUMBERS
        # To send all numbers to every rank pays off while they are few.
        if ring is None or not is_small:
            return combine_in_rounds(self.channel, numbers, tag, operation, self.traffic)
        ring.combine(numbers, operation)
        nbytes, waited = numbers.nbytes, time.perf_counter() - started
        nbytes *= len(self.ranks.peers) if len(numbers) > 1 else 1
        self.traffic.add("control", sent=nbytes, received=nbytes, calls=1, waited=waited)
        return numbers

    def _exchange_errors(
        self, operation: str, digest: int | None, detail: str, error: Exception | None, explain: Explain | None
    ) -> Exception:
        """Send this rank's report to rank 0, which decides what every rank raises."""
        kind, text = (builtin_name(error), str(error)) if error is not None else ("", "")
        mine = _RankReport(self.ranks.rank, operation, str(self.position or ""), digest, detail, kind, text)
        channel = self.channel
        if mine.rank:
            sent = send_text(channel, 0, json.dumps(astuple(mine)), operation)
            self.traffic.add("control", sent=sent, calls=2)
            kind, message = json.loads(receive_text(channel, 0, operation))
        else:
            kind, message = _decide(channel, mine, explain)
            for peer in self.ranks.peers:
                # The others must still hear of it.
                with suppress(PeerLostError):
                    sent = send_text(channel, peer, json.dumps([kind, message]), operation)
                    self.traffic.add("control", sent=sent, calls=2)
        if kind == _OWN:
            assert error is not None
            return error
        known = {own.__name__: own for own in (PeerLostError, DisagreementError, DifferentCallsError)}
        return known[kind](message) if kind in known else rebuild_exception(kind, message)


def _first_channel_of(ranks: RankGroup) -> RankGroup | None:
    """Find, or make, the gloo group that carries the messages of the first agreement."""
    if not ranks.moves_data() or ranks.world_size == 1:
        return None
    return ranks if ranks.sends_tagged(torch.device("cpu")) else ranks.private_group("gloo", "control")


@dataclass(frozen=True, slots=True)
class _RankReport:
    """A rank's report after a difference: its operation, its position, and its details."""

    rank: int
    operation: str
    position: str
    digest: int | None
    detail: str
    error_type: str
    error: str

    @property
    def call(self) -> str:
        """The operation and the position."""
        return f"{self.operation} {self.position}".rstrip()


def _decide(channel: RankGroup, mine: _RankReport, explain: Explain | None) -> tuple[str, str]:
    """Rank 0: the type of the error that all ranks raise, or :data:`_OWN`, and its message."""
    reports, gone = [mine], ""
    for peer in range(1, channel.world_size):
        try:
            reports.append(_RankReport(*json.loads(receive_text(channel, peer, mine.operation))))
        except PeerLostError as error:
            gone = gone or str(error)
    return ("PeerLostError", gone) if gone else _resolve_errors(reports, explain)


def _resolve_errors(reports: Sequence[_RankReport], explain: Explain | None) -> tuple[str, str]:
    """The one error that every rank raises, by the reports of all ranks: its type, or :data:`_OWN`, and its message."""
    calls = dict.fromkeys(report.call for report in reports)
    failed = [report for report in reports if report.error_type]
    if failed:
        first = failed[0]
        alike = [
            report.rank for report in failed if (report.error_type, report.error) == (first.error_type, first.error)
        ]
        if len(alike) == len(reports):
            return _OWN, ""
        return first.error_type, f"{_ranks(alike)}: {first.error}"
    if len(calls) > 1:
        told = "; ".join(f"{_ranks([r.rank for r in reports if r.call == call])} called {call}" for call in calls)
        return "DifferentCallsError", f"{told}. Every rank of the group must make the same calls in the same order."
    telling = [report for report in reports if report.digest is not None]
    reference = telling[0]
    others = [report for report in telling if report.digest != reference.digest]
    words = None
    if explain is not None:
        words = explain(reference.detail, others[0].detail, reference.rank, others[0].rank)
    return "DisagreementError", (
        f"{reference.operation}: {_ranks([report.rank for report in others])} "
        f"{'differs' if len(others) == 1 else 'differ'} from rank {reference.rank}: "
        f"{words or 'what they hold is not the same'}. "
        f"Build the same model and optimizer on every rank, and change them alike."
    )


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown}{f' and {len(ranks) - 8} more' if len(ranks) > 8 else ''}"

"""The control channel: small fixed-size messages by which ranks make sure that they are about to do the same thing.

A rank that finds its input bad must not simply raise: its peers would wait for it. So every collective method of an
object begins with a *meeting*. Each rank sends every other rank one header (which operation, a digest of what it holds,
whether it failed). Headers have one length whatever they say, for gloo aborts the process when a message is not as long
as its receiver expects. If all headers agree nothing else is sent. If they do not, every rank knows it, every rank
sends its reasons, and every rank raises the same error.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from zeroshard_comm.failures import DisagreementError, PeerLostError, builtin_name, revive
from zeroshard_comm.own_groups import own_group
from zeroshard_comm.ranks import RankGroup
from zeroshard_comm.traffic import Traffic

TAG_HEADER = 0x5A530001
TAG_LENGTH = 0x5A530002
TAG_REASON = 0x5A530003
TAG_NUMBER = 0x5A530004

Explain = Callable[[str, str, int, int], "str | None"]

_HEADER_FIELDS = 3  # operation, digest, failed


@dataclass(frozen=True, slots=True)
class Reason:
    """What a rank says of itself when a meeting finds a difference."""

    rank: int
    operation: str
    digest: int
    detail: str
    error_type: str = ""
    error: str = ""


class Control:
    """Meetings of the ranks of one process group.

    Messages travel over gloo and CPU memory: over the group itself where it has gloo for CPU tensors, else over a gloo
    group of the same ranks, with the same timeout, that is made once per process group (its construction is a
    collective among those ranks alone). So no meeting ever waits for an accelerator. With torch's ``fake`` backend
    nothing travels, and a meeting raises only what this rank itself found.

    The object holds two small buffers that only its own methods write; it belongs to the thread that calls it.

    Args:
        ranks: the group whose ranks meet.
        traffic: where bytes and waiting are counted, as kind ``"control"``.
    """

    def __init__(self, ranks: RankGroup, traffic: Traffic | None = None) -> None:
        self.ranks = ranks
        self.traffic = traffic if traffic is not None else Traffic()
        self.channel = _companion(ranks)
        self._mine = torch.zeros(_HEADER_FIELDS, dtype=torch.int64, device="cpu")
        self._all = torch.zeros(ranks.world_size, _HEADER_FIELDS, dtype=torch.int64, device="cpu")
        self._rows = list(self._all.unbind(0))

    @property
    def alone(self) -> bool:
        """Whether there is nobody to meet: one rank, or a backend that moves no data."""
        return self.channel is None or self.ranks.world_size == 1

    def meet(
        self,
        operation: str,
        digest: int = 0,
        *,
        error: Exception | None = None,
        detail: Callable[[], str] = str,
        explain: Explain | None = None,
    ) -> None:
        """Meet, and raise on every rank if any rank failed or differs. Collective.

        Args:
            operation: what this rank is about to do, e.g. ``"step()"``.
            digest: a 63-bit number that is equal on ranks that hold the same.
            error: what went wrong on this rank, if something did.
            detail: called only after a difference: the text behind the digest.
            explain: called only after a difference, with the details of two ranks and the two ranks; names the first
                difference in words.

        Raises:
            DisagreementError: if ranks are in different operations, or their digests differ.
            PeerLostError: if a rank is gone.
            Exception: if a rank reported an error: that error on the rank itself, one of the same built-in type and
                the same message on the others.
        """
        failure = self.compare(operation, digest, error=error, detail=detail, explain=explain)
        if failure is not None:
            try:
                raise failure from (error if failure is not error else None)
            finally:
                # A frame that keeps an error which passes through it keeps itself alive, and all that it refers to.
                del failure, error

    def compare(
        self,
        operation: str,
        digest: int = 0,
        *,
        error: Exception | None = None,
        detail: Callable[[], str] = str,
        explain: Explain | None = None,
    ) -> Exception | None:
        """As :meth:`meet`, but hand back the error instead of raising it (a lost peer still raises)."""
        if self.alone:
            return error
        code = zlib.crc32(operation.encode())
        mine = [code, digest, int(error is not None)]
        self._mine.copy_(torch.tensor(mine, device="cpu"))
        self._exchange(self._mine, self._rows, operation)
        self._rows[self.ranks.rank].copy_(self._mine)
        headers = self._all.tolist()
        if all(header == mine for header in headers) and error is None:
            return None
        reason = Reason(
            self.ranks.rank,
            operation,
            digest,
            detail() if any(header[1] != digest for header in headers) else "",
            builtin_name(error) if error is not None else "",
            str(error) if error is not None else "",
        )
        return _verdict(self._confer(reason), error, explain)

    def any_raised(self, raised: bool, operation: str) -> bool:
        """Tell every rank whether any rank raised its hand. Collective.

        Args:
            raised: whether this rank does.
            operation: what this rank is about to do, as for :meth:`meet`.

        Raises:
            DisagreementError: if a rank is in a different operation.
            PeerLostError: if a rank is gone.
            Exception: if a rank that is in a different operation reported an error there.
        """
        if self.alone:
            return raised
        code = zlib.crc32(operation.encode())
        self._mine.copy_(torch.tensor([code, 0, int(raised)], device="cpu"))
        self._exchange(self._mine, self._rows, operation)
        self._rows[self.ranks.rank].copy_(self._mine)
        headers = self._all.tolist()
        if any(header[0] != code for header in headers):
            # Whoever met for something else sees the difference too, and goes on to the reasons.
            raise _verdict(self._confer(Reason(self.ranks.rank, operation, 0, "")), None, None)
        return any(header[2] for header in headers)

    def collect(self, number: float, operation: str) -> list[float]:
        """Bring a number of every rank to every rank, in rank order. Collective; meet for the same operation first.

        Raises:
            PeerLostError: if a rank is gone.
        """
        collected = self._collect(torch.tensor([number], dtype=torch.float64, device="cpu"), operation)
        return [float(row) for row in collected]

    def collect_words(self, words: Sequence[int], operation: str) -> list[list[int]]:
        """Bring as many 64-bit integers of every rank to every rank, in rank order. Collective, as :meth:`collect`.

        Raises:
            PeerLostError: if a rank is gone.
        """
        collected = self._collect(torch.tensor(words, dtype=torch.int64, device="cpu"), operation)
        return [row.tolist() for row in collected]

    def _collect(self, mine: torch.Tensor, operation: str) -> list[torch.Tensor]:
        if self.alone:
            return [mine]
        rows = [torch.empty_like(mine) for _ in range(self.ranks.world_size)]
        self._exchange(mine, rows, operation, TAG_NUMBER)
        rows[self.ranks.rank] = mine
        return rows

    def _exchange(
        self, mine: torch.Tensor, rows: Sequence[torch.Tensor], operation: str, tag: int = TAG_HEADER
    ) -> None:
        """Send ``mine`` to every peer and receive ``rows[r]`` from each peer ``r``; all of known, equal lengths."""
        assert self.channel is not None
        group = self.channel.group
        started = time.perf_counter()
        # gloo starts a send only once its receive is posted, so receives come first.
        works = [(peer, dist.irecv(rows[peer], group=group, group_src=peer, tag=tag)) for peer in self.ranks.peers]
        works += [(peer, dist.isend(mine, group=group, group_dst=peer, tag=tag)) for peer in self.ranks.peers]
        for peer, work in works:
            wait_for(work, peer, self.ranks.rank, operation)
        peers = len(self.ranks.peers)
        self.traffic.add(
            "control",
            sent=mine.nbytes * peers,
            received=sum(rows[peer].nbytes for peer in self.ranks.peers),
            calls=2 * peers,
            waited=time.perf_counter() - started,
        )

    def _confer(self, reason: Reason) -> list[Reason]:
        """Exchange reasons; every rank gets all of them, in rank order."""
        text = json.dumps([reason.operation, reason.digest, reason.detail, reason.error_type, reason.error]).encode()
        lengths = torch.zeros(self.ranks.world_size, 1, dtype=torch.int64, device="cpu")
        own = torch.tensor([len(text)], device="cpu")
        self._exchange(own, list(lengths.unbind(0)), reason.operation, TAG_LENGTH)
        lengths[self.ranks.rank] = own
        blobs = [torch.zeros(int(length), dtype=torch.uint8, device="cpu") for length in lengths]
        blobs[self.ranks.rank] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._exchange(blobs[self.ranks.rank], blobs, reason.operation, TAG_REASON)
        return [Reason(rank, *json.loads(bytes(blob.tolist()))) for rank, blob in enumerate(blobs)]


def wait_for(work: dist.Work | None, peer: int, rank: int, operation: str) -> None:
    """Wait for one send or receive; turn the backend's error into one that names the peer.

    Args:
        work: what torch returned for the send or receive.
        peer: group rank at the other end.
        rank: group rank at this end.
        operation: what the ranks were doing, for the message.

    Raises:
        PeerLostError: if the backend reports a closed connection, a timeout or any other failure.
    """
    if work is None:
        return
    try:
        work.wait()
    except RuntimeError as failure:
        raise lost(failure, peer, rank, operation) from failure


def lost(failure: RuntimeError, peer: int, rank: int, operation: str) -> PeerLostError:
    """Make the error that names the peer out of the backend's own.

    Args:
        failure: what the backend raised.
        peer: group rank at the other end.
        rank: group rank at this end.
        operation: what the ranks were doing.
    """
    first_line = str(failure).splitlines()[0] if str(failure) else type(failure).__name__
    return PeerLostError(
        f"rank {rank} lost rank {peer} during {operation}: that process has ended, was cut off, or did not call "
        f"{operation} within the process group's timeout. Look at rank {peer}'s own output first. "
        f"(The backend said: {first_line})"
    )


def _companion(ranks: RankGroup) -> RankGroup | None:
    """Find, or make, the gloo group that carries the control messages of ``ranks``."""
    if not ranks.moves_data() or ranks.world_size == 1:
        return None
    if ranks.sends_tagged(torch.device("cpu")):
        return ranks
    return own_group(ranks, "gloo", "control")


def _verdict(reasons: Sequence[Reason], error: Exception | None, explain: Explain | None) -> Exception:
    """Turn the reasons of all ranks into the one error that every rank raises."""
    operations = dict.fromkeys(reason.operation for reason in reasons)
    failed = [reason for reason in reasons if reason.error_type]
    if failed:
        first = failed[0]
        alike = [
            reason.rank for reason in failed if (reason.error_type, reason.error) == (first.error_type, first.error)
        ]
        message = first.error if len(alike) == len(reasons) else f"{_ranks(alike)}: {first.error}"
        if len(alike) == len(reasons) and error is not None:
            return error
        return revive(first.error_type, message)
    if len(operations) > 1:
        calls = "; ".join(
            f"{_ranks([r.rank for r in reasons if r.operation == operation])} called {operation}"
            for operation in operations
        )
        return DisagreementError(f"{calls}. Every rank of the group must make the same calls in the same order.")
    reference = reasons[0]
    others = [reason.rank for reason in reasons if reason.digest != reference.digest]
    first_other = reasons[others[0]]
    words = explain(reference.detail, first_other.detail, 0, first_other.rank) if explain is not None else None
    return DisagreementError(
        f"{reference.operation}: {_ranks(others)} {'differs' if len(others) == 1 else 'differ'} from rank 0: "
        f"{words or 'what they hold is not the same'}. "
        f"Build the same model and optimizer on every rank, and change them alike."
    )


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown}{f' and {len(ranks) - 8} more' if len(ranks) > 8 else ''}"

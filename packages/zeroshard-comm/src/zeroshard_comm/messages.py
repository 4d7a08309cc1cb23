"""Tagged messages from one rank to another; those with one tag are matched in order."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from zeroshard_comm.errors import lost
from zeroshard_comm.process_group import RankGroup

TAG_LENGTH = 0x5A530002
TAG_TEXT = 0x5A530003


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """A send or a receive under way. It may use its buffer until :meth:`wait` has returned.

    Attributes:
        ranks: the group.
        peer: group rank at the other end.
        work: what torch returned.
    """

    ranks: RankGroup
    peer: int
    work: dist.Work | None

    def wait(self, operation: str, timeout: timedelta | None = None) -> None:
        """Return when the buffer has been filled, or may be changed.

        Args:
            operation: what the ranks are doing, for the message of an error.
            timeout: after which it is given up, in place of the group's. gloo closes all connections of the group then.

        Raises:
            PeerLostError: if the backend reports a closed connection, a timeout or any other failure.
        """
        limit = timeout or self.ranks.timeout
        try:
            if self.work is not None:
                self.work.wait() if limit is None else self.work.wait(limit)
        except RuntimeError as failure:
            raise lost(failure, self.peer, self.ranks.rank, operation) from failure


def send(ranks: RankGroup, peer: int, buffer: torch.Tensor, tag: int, operation: str) -> Message:
    """Send a tensor.

    Args:
        ranks: the group; its backend matches messages by tag.
        peer: group rank.
        buffer: contiguous.
        tag: of the message.
        operation: what the ranks are doing, for the message of an error.

    Raises:
        PeerLostError: if the peer is gone.
    """
    try:
        return Message(ranks, peer, dist.isend(buffer, group=ranks.group, group_dst=peer, tag=tag))
    except RuntimeError as failure:
        raise lost(failure, peer, ranks.rank, operation) from failure


def receive(ranks: RankGroup, peer: int, buffer: torch.Tensor, tag: int, operation: str) -> Message:
    """Receive a tensor, of the length that the peer sends; as :func:`send`.

    gloo starts a send only once its receive is posted, so receives come first.

    Raises:
        PeerLostError: if the peer is gone.
    """
    try:
        return Message(ranks, peer, dist.irecv(buffer, group=ranks.group, group_src=peer, tag=tag))
    except RuntimeError as failure:
        raise lost(failure, peer, ranks.rank, operation) from failure


def send_text(ranks: RankGroup, peer: int, text: str, operation: str) -> int:
    """Send a text to a rank that calls :func:`receive_text`, and return its size in bytes.

    Raises:
        PeerLostError: if the peer is gone.
    """
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    send(ranks, peer, torch.tensor([data.numel()], device="cpu"), TAG_LENGTH, operation).wait(operation)
    send(ranks, peer, data, TAG_TEXT, operation).wait(operation)
    return data.numel()


def receive_text(ranks: RankGroup, peer: int, operation: str) -> str:
    """Receive a text from a rank that calls :func:`send_text`.

    Raises:
        PeerLostError: if the peer is gone.
    """
    length = torch.zeros(1, dtype=torch.int64, device="cpu")
    receive(ranks, peer, length, TAG_LENGTH, operation).wait(operation)
    data = torch.zeros(int(length), dtype=torch.uint8, device="cpu")
    receive(ranks, peer, data, TAG_TEXT, operation).wait(operation)
    return bytes(data.tolist()).decode()

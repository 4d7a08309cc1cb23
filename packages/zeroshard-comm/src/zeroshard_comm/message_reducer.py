"""Bringing a bucket of gradients to its owners: what is sent to whom, made once per bucket and used in every backward.

Every rank sends each owner its values of what that rank owns, straight from the bucket where they lie together, packed
where they are small; owners add up what arrives, in ascending rank order, so that sums do not depend on the plan.
Ahead goes a *header* from every rank to every other: a few numbers, and one byte per tensor of the bucket.

Messages are tagged, and of one tag and pair of ranks they are matched in order. Headers and gradients have a tag each,
and both are posted bucket by bucket in the order of :meth:`MessageReducer.begin`, which must be the same on all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from zeroshard_core import Run

from zeroshard_comm.interfaces import HEADER_WORDS, BucketHeader, BucketReduceWork, GradientReducer
from zeroshard_comm.messages import Message, receive, send
from zeroshard_comm.packing import CHUNK_BYTES, BucketMessage, bucket_messages
from zeroshard_comm.process_group import RankGroup
from zeroshard_comm.rank_order import mean_in_rank_order
from zeroshard_comm.receive_window import Receive, ReceiveWindow
from zeroshard_comm.traffic import Traffic

TAG_HEADER = 0x5A530030
TAG_GRADIENTS = 0x5A530031


class MessageReducer(GradientReducer):
    """The messages of one bucket.

    Args:
        ranks: the group; its backend matches messages by tag.
        runs: ranges of elements of the bucket and who owns them, in bucket order; what lies between belongs to nobody.
        dtype: of the bucket, which is on the CPU.
        tensors: number of tensors in the bucket.
        window: posts the receives of gradients.
        traffic: where bytes are counted, as kinds ``"reduce"`` and ``"control"``.
        tags: offset to the tags, see :meth:`zeroshard_comm.GroupContext.allocate_tags`; the same on all ranks.
    """

    def __init__(
        self,
        ranks: RankGroup,
        runs: Sequence[Run],
        dtype: torch.dtype,
        tensors: int,
        window: ReceiveWindow,
        traffic: Traffic,
        *,
        tags: int = 0,
    ) -> None:
        self.ranks, self.traffic, self.tensors, self.tags = ranks, traffic, tensors, tags
        self.window = window
        self._messages: dict[int, list[BucketMessage]] = {owner: [] for owner in range(ranks.world_size)}
        for owner, messages in self._messages.items():
            messages += bucket_messages([run for run in runs if run.rank == owner], dtype.itemsize)
        self._views: tuple[torch.Tensor, dict[BucketMessage, tuple[torch.Tensor, ...]]] | None = None

    def expect(self, *, gradients: bool = True) -> MessageReduceWork:
        """Post the receives of headers, and those of gradients as the window allows.

        The sooner the better, also before there is anything to send: that a receive has been posted is told to the
        sender behind all that this rank is sending already.

        Args:
            gradients: False to exchange headers alone, which all ranks must do then.

        Raises:
            PeerLostError: if a rank is gone.
        """
        return MessageReduceWork(self, gradients=gradients)

    def begin(self, buffer: torch.Tensor, header: BucketHeader, *, gradients: bool = True) -> MessageReduceWork:
        """Expect and send at once."""
        work = self.expect(gradients=gradients)
        work.send(buffer, header)
        return work

    def messages_of(self, owner: int) -> Sequence[BucketMessage]:
        """Return what every other rank sends to ``owner``."""
        return self._messages[owner]

    def pieces(self, buffer: torch.Tensor, message: BucketMessage) -> tuple[torch.Tensor, ...]:
        """Return the views of ``buffer`` that travel in a message."""
        if self._views is None or self._views[0].data_ptr() != buffer.data_ptr():
            self._views = (buffer, {})
        views = self._views[1]
        if message not in views:
            views[message] = tuple([buffer[start:stop] for start, stop in message.ranges])
        return views[message]


class MessageReduceWork(BucketReduceWork):
    """One bucket on its way; see :meth:`MessageReducer.expect`. Sent once, then finished once, and closed."""

    def __init__(self, reducer: MessageReducer, *, gradients: bool) -> None:
        self._reducer, self._window, self._gradients = reducer, reducer.window, gradients
        self._buffer: torch.Tensor | None = None
        self._own_header = BucketHeader((0,) * HEADER_WORDS, (False,) * reducer.tensors)
        ranks = reducer.ranks
        words = len(self._own_header.to_words())
        self._headers = {peer: torch.empty(words, dtype=torch.int64, device="cpu") for peer in ranks.peers}
        self._arriving_headers = [
            receive(ranks, peer, arriving, TAG_HEADER + reducer.tags, "backward()")
            for peer, arriving in self._headers.items()
        ]
        self._sends: list[Message] = []
        # What is sent must live as long as the sends.
        self._staged: list[torch.Tensor] = []
        self._arrivals: list[tuple[BucketMessage, list[Receive]]] = []
        if gradients:
            ascending = [rank for rank in range(ranks.world_size) if rank != ranks.rank]
            self._arrivals = [
                (message, [Receive(peer, message.nbytes, TAG_GRADIENTS + reducer.tags) for peer in ascending])
                for message in reducer.messages_of(ranks.rank)
            ]
            self._window.extend([receive for _, receives in self._arrivals for receive in receives])

    def send(self, buffer: torch.Tensor, header: BucketHeader) -> None:
        """Send this rank's header, and its values of what others own.

        Args:
            buffer: the bucket, 1-D; it belongs to the reduction until :meth:`close` has returned.
            header: what this rank has to say.

        Raises:
            PeerLostError: if a rank is gone.
        """
        reducer, ranks = self._reducer, self._reducer.ranks
        self._buffer, self._own_header = buffer, header
        own = torch.tensor(header.to_words(), dtype=torch.int64, device="cpu")
        self._staged.append(own)
        for peer in ranks.peers:
            self._send(peer, own, TAG_HEADER)
        peers = len(ranks.peers)
        reducer.traffic.add("control", sent=own.nbytes * peers, received=own.nbytes * peers, calls=2 * peers)
        if not self._gradients:
            return
        sent = 0
        for peer in ranks.peers:
            for message in reducer.messages_of(peer):
                pieces = reducer.pieces(buffer, message)
                if len(pieces) > 1:
                    self._staged.append(torch.cat(pieces))
                self._send(peer, (self._staged[-1] if len(pieces) > 1 else pieces[0]).view(torch.uint8), TAG_GRADIENTS)
                sent += message.nbytes
        reducer.traffic.add(
            "reduce",
            sent=sent,
            received=sum(receive.nbytes for _, receives in self._arrivals for receive in receives),
            calls=len(self._sends) - peers + sum(len(receives) for _, receives in self._arrivals),
        )

    def _send(self, peer: int, payload: torch.Tensor, tag: int) -> None:
        self._sends.append(send(self._reducer.ranks, peer, payload, tag + self._reducer.tags, "backward()"))

    def headers(self) -> list[BucketHeader]:
        """Wait for the headers of all ranks, and return them in rank order.

        Raises:
            PeerLostError: if a rank is gone.
        """
        ranks, tensors = self._reducer.ranks, self._reducer.tensors
        for message in self._arriving_headers:
            message.wait("backward()")
        self._arriving_headers = []
        found = {ranks.rank: self._own_header}
        for peer, words in self._headers.items():
            found[peer] = BucketHeader.from_words(words.tolist(), tensors)
        return [found[rank] for rank in range(ranks.world_size)]

    def finish(self) -> None:
        """Wait for what this rank owns; the bucket then holds there the mean over all ranks, elsewhere what it held.

        The bucket belongs to the reduction until :meth:`close` has returned.

        Raises:
            PeerLostError: if a rank is gone.
        """
        waited = 0.0
        if self._buffer is not None:
            for message, receives in self._arrivals:
                waited += self._add_up(self._reducer.pieces(self._buffer, message), receives)
        self._arrivals = []
        self._reducer.traffic.add("reduce", waited=waited)

    def close(self) -> None:
        """Wait until this rank's values have been sent.

        Raises:
            PeerLostError: if a rank is gone.
        """
        started = time.perf_counter()
        for message in self._sends:
            message.wait("backward()")
        self._sends, self._staged = [], []
        self._reducer.traffic.add("reduce", waited=time.perf_counter() - started)

    def _add_up(self, own: tuple[torch.Tensor, ...], receives: Sequence[Receive]) -> float:
        """Make the mean; return the seconds that were spent waiting."""
        by_peer, waited = {receive.peer: receive for receive in receives}, 0.0

        def take(peer: int) -> torch.Tensor:
            nonlocal waited
            started = time.perf_counter()
            values = self._window.wait(by_peer[peer], "backward()")
            waited += time.perf_counter() - started
            return values

        mean_in_rank_order(self._reducer.ranks, own, take, lambda peer: self._window.release(by_peer[peer]))
        return waited


def window_bytes(bucket_bytes: Sequence[int]) -> int:
    """Return how many bytes of receives to allow for buckets of these sizes: somewhat less than two of the largest.

    Room for one bucket is too little on a slow wire: that a receive has been posted is told to the sender behind all
    that is on its way to it already. Never less than two messages, since sums over three ranks and more hold one while
    they wait for the next; and never more than sixteen: the first bucket of DDP is the whole model.
    """
    largest = max(bucket_bytes, default=0)
    return max(2 * CHUNK_BYTES, min(16 * CHUNK_BYTES, 2 * largest - CHUNK_BYTES))

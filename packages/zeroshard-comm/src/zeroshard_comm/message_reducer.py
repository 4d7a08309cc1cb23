"""Sends a bucket of gradients to its owners, by a plan of messages made once per bucket and used in every backward.

Every rank sends each owner its values of that owner's ranges: large ones directly from the bucket, small ones packed.
Owners add up the values that arrive, in ascending rank order, so that sums do not depend on the plan.
A *header* travels with the first message to each owner: a few numbers, and one bit per tensor of the bucket.

Messages are tagged. Those with one tag between two ranks are matched in order: bucket by bucket in the order of
:meth:`MessageReducer.begin`, which must be the same on all ranks.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise

import torch
from zeroshard_core import Run

from zeroshard_comm import messages
from zeroshard_comm._torch_private import foreach_add_, foreach_div_
from zeroshard_comm.headers import BucketHeader
from zeroshard_comm.interfaces import BucketReduceWork, GradientReducer
from zeroshard_comm.messages import BucketMessage, Message, bucket_messages, send
from zeroshard_comm.process_group import RankGroup
from zeroshard_comm.traffic import Traffic

TAG_GRADIENTS = 0x5A530031

Pieces = tuple[torch.Tensor, ...]

WINDOW_BYTES = 16 * 1024 * 1024
"""Memory for receives. Room for one message is too little on a slow wire: that a receive has been posted is told to the
sender after all that is on its way to it already."""


class MessageReducer(GradientReducer):
    """The messages of one bucket.

    Args:
        ranks: the group; its backend matches messages by tag.
        runs: ranges of elements of the bucket and who owns them, in bucket order; elements between them have no owner.
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
        self._expected: MessageReduceWork | None = None
        self._messages = {
            owner: bucket_messages([run for run in runs if run.rank == owner], dtype.itemsize)
            for owner in range(ranks.world_size)
        }
        # Its length lets elements of every dtype follow, aligned.
        self.header_words = len(BucketHeader(0, 0, (False,) * tensors).to_words())
        self.header_words += self.header_words % 2
        # Where each begins and ends, and the gaps between them.
        ranges = [part for messages in self._messages.values() for message in messages for part in message.ranges]
        self._edges = sorted({0, *chain.from_iterable(ranges)})
        self._place = {start: place for place, start in enumerate(self._edges)}
        self._sizes = [stop - start for start, stop in pairwise(self._edges)]

    def expect(self, *, gradients: bool = True) -> None:
        """Post the receives as the window allows.

        The sooner the better, also before there is anything to send: that a receive has been posted is told to the
        sender after all that this rank is sending already.
        """
        self._expected = MessageReduceWork(self, gradients=gradients)

    def begin(self, buffer: torch.Tensor, header: BucketHeader, *, gradients: bool = True) -> MessageReduceWork:
        """Expect, if that was not done yet, and send."""
        work, self._expected = self._expected or MessageReduceWork(self, gradients=gradients), None
        work.send(buffer, header)
        return work

    def messages_of(self, owner: int) -> Sequence[BucketMessage]:
        """Return the messages that every other rank sends to ``owner``."""
        return self._messages[owner]

    def cut(self, buffer: torch.Tensor) -> Callable[[BucketMessage], Pieces]:
        """Return a function that gives the views of ``buffer`` in a message.

        They are not kept: DDP replaces its buckets once, and then frees the memory of the first ones.
        """
        views = buffer[: self._edges[-1]].split(self._sizes) if self._sizes else ()
        return lambda message: tuple([views[self._place[start]] for start, _ in message.ranges])


class MessageReduceWork(BucketReduceWork):
    """One reduction of a bucket. Its receives are posted first. Then it is sent once, finished once, and closed."""

    def __init__(self, reducer: MessageReducer, *, gradients: bool) -> None:
        self._reducer, self._window = reducer, reducer.window
        self._cut: Callable[[BucketMessage], Pieces] | None = None
        self._headers: dict[int, BucketHeader] = {}
        self._sends: list[Message] = []
        # What is sent must live as long as the sends.
        self._staged: list[torch.Tensor] = []
        # If a communication hook reduces, ranks exchange only headers.
        self._of = reducer.messages_of if gradients else lambda _: (_NOTHING,)
        ranks, tag = reducer.ranks, TAG_GRADIENTS + reducer.tags
        ascending = [rank for rank in range(ranks.world_size) if rank != ranks.rank]
        self._arrivals: list[tuple[BucketMessage, list[Receive]]] = []
        for message in self._of(ranks.rank):
            nbytes = message.nbytes + (0 if self._arrivals else 8 * reducer.header_words)
            self._arrivals.append((message, [Receive(peer, nbytes, tag) for peer in ascending]))
        self._window.extend([receive for _, receives in self._arrivals for receive in receives])

    def send(self, buffer: torch.Tensor, header: BucketHeader) -> None:
        """Send this rank's header, and its values of the others' ranges.

        Args:
            buffer: the bucket, 1-D; it belongs to the reduction until :meth:`close` has returned.
            header: what this rank has to say.

        Raises:
            PeerLostError: if a rank is gone.
        """
        reducer, ranks = self._reducer, self._reducer.ranks
        self._cut, self._headers[ranks.rank] = reducer.cut(buffer), header
        words = header.to_words()
        words += [0] * (reducer.header_words - len(words))
        own = torch.tensor(words, dtype=torch.int64, device="cpu").view(buffer.dtype)
        sent = told = 0
        for peer in ranks.peers:
            first = True
            for message in self._of(peer):
                pieces = self._cut(message)
                if first or len(pieces) > 1:
                    self._staged.append(torch.cat((own, *pieces) if first else pieces))
                    pieces = (self._staged[-1],)
                payload, tag = pieces[0].view(torch.uint8), TAG_GRADIENTS + reducer.tags
                self._sends.append(send(ranks, peer, payload, tag, "backward()"))
                sent, told, first = sent + message.nbytes, told + first * own.nbytes, False
        arriving = [receive.nbytes for _, receives in self._arrivals for receive in receives]
        heard = own.nbytes * len(ranks.peers) if arriving else 0
        reducer.traffic.add("control", sent=told, received=heard)
        calls = len(self._sends) + len(arriving)
        reducer.traffic.add("reduce", sent=sent, received=sum(arriving) - heard, calls=calls)

    def finish(self) -> list[BucketHeader]:
        """Wait for what this rank owns; the bucket then holds there the mean over all ranks, elsewhere what it held.

        The bucket belongs to the reduction until :meth:`close` has returned.

        Raises:
            PeerLostError: if a rank is gone.
        """
        assert self._cut is not None
        waited = 0.0
        for number, (message, receives) in enumerate(self._arrivals):
            waited += self._add_up(self._cut(message), receives, with_header=number == 0)
        self._arrivals = []
        self._reducer.traffic.add("reduce", waited=waited)
        return [self._headers[rank] for rank in sorted(self._headers)]

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

    def _add_up(self, own: Pieces, receives: Sequence[Receive], *, with_header: bool) -> float:
        """Make the mean; return the seconds that were spent waiting."""
        by_peer, waited = {receive.peer: receive for receive in receives}, 0.0
        ahead = 8 * self._reducer.header_words if with_header else 0

        def take(peer: int) -> torch.Tensor:
            nonlocal waited
            started = time.perf_counter()
            values = self._window.wait(by_peer[peer], "backward()")
            waited += time.perf_counter() - started
            if with_header:
                words = values[:ahead].view(torch.int64).tolist()
                self._headers[peer] = BucketHeader.from_words(words, self._reducer.tensors)
            return values[ahead:]

        def release(peer: int) -> None:
            self._window.release(by_peer[peer])

        if own:
            mean_in_rank_order(self._reducer.ranks, own, take, release)
        else:
            for peer in by_peer:
                take(peer)
                release(peer)
        return waited


_NOTHING = BucketMessage((), 0)


@dataclass(eq=False)
class Receive:
    """One message to be received.

    Attributes:
        peer: group rank that sends it.
        nbytes: its length.
        tag: of the message.
        scratch: where it lies, ``nbytes`` bytes; None before it was posted and after it was released.
    """

    peer: int
    nbytes: int
    tag: int
    scratch: torch.Tensor | None = None
    message: Message | None = field(default=None, repr=False)


class ReceiveWindow:
    """Posts receives in order, as far ahead as a limit of memory allows, and keeps the memory for the next ones.

    A sender starts when its receive is posted, so a window that is as large as what is on its way keeps the wire busy.
    Two receives are posted whatever their size: a sum holds one while it waits for the next. Any thread may call any
    method.

    Args:
        ranks: the group; its backend matches messages by tag.
        limit: bytes that may be posted, or kept, at a time.
    """

    def __init__(self, ranks: RankGroup, limit: int) -> None:
        self._ranks, self._limit = ranks, limit
        self._lock = threading.Lock()
        self._waiting: deque[Receive] = deque()
        self._free: dict[int, list[torch.Tensor]] = {}
        self._held = self._count = self._made = 0

    def extend(self, receives: Sequence[Receive]) -> None:
        """Append receives, and post those for which there is room.

        Raises:
            PeerLostError: if a rank is gone.
        """
        with self._lock:
            self._waiting.extend(receives)
            self._post()

    def wait(self, receive: Receive, operation: str) -> torch.Tensor:
        """Return the message of a receive as 1-D bytes; wait for receives in the order in which they were added.

        Raises:
            PeerLostError: if a rank is gone.
        """
        assert receive.message is not None
        assert receive.scratch is not None
        receive.message.wait(operation)
        return receive.scratch

    def release(self, receive: Receive) -> None:
        """Give the memory of a receive back, and post receives for which there is room now.

        Raises:
            PeerLostError: if a rank is gone.
        """
        with self._lock:
            assert receive.scratch is not None
            self._free.setdefault(receive.nbytes, []).append(receive.scratch)
            receive.scratch = receive.message = None
            self._held -= receive.nbytes
            self._count -= 1
            self._post()

    def _post(self) -> None:
        while self._waiting and (self._count < 2 or self._held + self._waiting[0].nbytes <= self._limit):
            receive = self._waiting.popleft()
            if not self._free.get(receive.nbytes):
                if self._made + receive.nbytes > self._limit:
                    # It has another length; few buckets have equal ones.
                    self._free, self._made = {}, self._held
                self._free[receive.nbytes] = [torch.empty(receive.nbytes, dtype=torch.uint8, device="cpu")]
                self._made += receive.nbytes
            receive.scratch = self._free[receive.nbytes].pop()
            self._count += 1
            self._held += receive.nbytes
            receive.message = messages.receive(self._ranks, receive.peer, receive.scratch, receive.tag, "backward()")


def mean_in_rank_order(
    ranks: RankGroup, own: Pieces, take: Callable[[int], torch.Tensor], release: Callable[[int], None]
) -> None:
    """Replace this rank's values by the mean over all ranks.

    Args:
        ranks: the group.
        own: this rank's values, 1-D tensors.
        take: returns the values of a peer, as many bytes in one tensor. Peers come in ascending order, and at most two
            are taken at a time.
        release: gives the memory of a peer's values back.
    """
    rank, world_size = ranks.rank, ranks.world_size
    # Scaling by a power of two is exact, so it can be done while adding.
    exact = world_size & (world_size - 1) == 0
    # Two terms can be added in either order: only from rank 2 on does their sum need memory of its own.
    total: Pieces | None = None
    _divide(own, world_size)
    for peer in range(world_size):
        if peer == rank:
            continue
        term = _cut(take(peer), own)
        if rank > 1 and peer < rank:
            _divide(term, world_size)
            if total is None:
                total = term
                continue
            foreach_add_(total, term)
            if peer == rank - 1:
                foreach_add_(own, total)
                release(0)
        elif exact:
            foreach_add_(own, term, alpha=1 / world_size)
        else:
            _divide(term, world_size)
            foreach_add_(own, term)
        release(peer)


def _divide(tensors: Pieces, world_size: int) -> None:
    # In bfloat16 a factor would be rounded before it is used, but the number of ranks is not.
    foreach_div_(tensors, world_size)


def _cut(values: torch.Tensor, like: Pieces) -> Pieces:
    flat = values.view(like[0].dtype)
    return (flat,) if len(like) == 1 else flat.split([piece.numel() for piece in like])

"""Reducers and broadcasters by tagged messages, for CPU tensors on gloo.

Every rank sends each owner the values of that owner's ranges: large ranges directly from the bucket, small ones packed.
Owners add the values in ascending rank order, so that sums do not depend on the plan. Messages with one tag between two
ranks are matched in order, so all ranks begin buckets in the same order.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from zeroshard_core import Run

from zeroshard_comm._torch_private import foreach_add_, foreach_div_
from zeroshard_comm.interfaces import BucketReduceWork, GradientReducer, ParameterBroadcaster, Segment
from zeroshard_comm.messages import BucketMessage, Message, PackedMessage, bucket_messages, pack_pieces, receive, send
from zeroshard_comm.process_group import RankGroup
from zeroshard_comm.traffic import Traffic

TAG_BROADCAST = 0x5A530010
TAG_GRADIENTS = 0x5A530031

_SHARING = "the broadcast of step()"

Pieces = tuple[torch.Tensor, ...]

WINDOW_BYTES = 16 * 1024 * 1024
"""Memory for receives, in bytes. One message is not enough on a slow link, because gloo notifies a sender of a posted
receive only after all data that this rank is sending to it."""


class MessageReducer(GradientReducer):
    """Reduces one bucket by messages.

    Args:
        ranks: the group; its backend matches messages by tag (gloo, CPU tensors).
        runs: ranges of elements of the bucket with their owners, in order; equal on all ranks. Gaps have no owner.
        dtype: the dtype of the bucket, which is on the CPU.
        window: posts the receives of gradients, and has their tag, which is equal on all ranks.
        traffic: counts bytes and time spent waiting, as kind ``"reduce"``.
    """

    def __init__(
        self, ranks: RankGroup, runs: Sequence[Run], dtype: torch.dtype, window: ReceiveWindow, traffic: Traffic
    ) -> None:
        self.ranks, self.traffic, self.window = ranks, traffic, window
        self._expected: Sequence[_Receives] | None = None
        # For each owner, the messages that every other rank sends to it.
        self._messages = {
            owner: bucket_messages([run for run in runs if run.rank == owner], dtype.itemsize)
            for owner in range(ranks.world_size)
        }

    def expect(self) -> None:
        """Post the receives for which the window has memory.

        Call it early: gloo notifies the sender of a posted receive only after all data that this rank is sending to it.
        """
        # In the order in which they are waited for, because the window may have room for only some of them.
        self._expected = [
            {peer: Receive(peer, message.nbytes) for peer in sorted(self.ranks.peers)}
            for message in self._messages[self.ranks.rank]
        ]
        self.window.extend([receive for receives in self._expected for receive in receives.values()])

    def begin(self, buffer: torch.Tensor) -> MessageReduceWork:
        """Post the receives, unless :meth:`expect` has, and send."""
        if self._expected is None:
            self.expect()
        arriving, self._expected = self._expected or (), None
        own = self._messages[self.ranks.rank]
        sends: list[Message] = []
        for peer in self.ranks.peers:
            for message in self._messages[peer]:
                pieces = _pieces(buffer, message)
                payload = (torch.cat(pieces) if len(pieces) > 1 else pieces[0]).view(torch.uint8)
                sends.append(send(self.ranks, peer, payload, self.window.tag, "backward()"))
        sent = sum([message.buffer.nbytes for message in sends])
        received = sum([message.nbytes for message in own]) * len(self.ranks.peers)
        self.traffic.add("reduce", sent=sent, received=received, calls=len(sends) + len(own) * len(self.ranks.peers))
        arrivals = [(_pieces(buffer, message), receives) for message, receives in zip(own, arriving, strict=True)]
        return MessageReduceWork(self, arrivals, sends)


class MessageReduceWork(BucketReduceWork):
    """One reduction of a bucket, which :meth:`MessageReducer.begin` returns. Call each method once."""

    def __init__(
        self, reducer: MessageReducer, arrivals: Sequence[tuple[Pieces, _Receives]], sends: Sequence[Message]
    ) -> None:
        self._reducer, self._arrivals, self._sends = reducer, arrivals, sends

    def finish(self) -> None:
        """Wait until this rank's ranges of the bucket hold the mean over all ranks; the rest is unchanged."""
        waited = sum([self._add_up(own, receives) for own, receives in self._arrivals])
        self._arrivals = ()
        self._reducer.traffic.add("reduce", waited=waited)

    def close(self) -> None:
        """Wait until this rank's values have been sent."""
        started = time.perf_counter()
        for message in self._sends:
            message.wait("backward()")
        self._sends = ()
        self._reducer.traffic.add("reduce", waited=time.perf_counter() - started)

    def _add_up(self, own: Pieces, receives: _Receives) -> float:
        window = self._reducer.window
        return mean_in_rank_order(
            self._reducer.ranks, own, lambda peer: receives[peer].wait(), lambda peer: window.release(receives[peer])
        )


def _pieces(buffer: torch.Tensor, message: BucketMessage) -> Pieces:
    # Not cached: DDP replaces its buckets once, and then frees the memory of the first ones.
    return tuple([buffer[start:stop] for start, stop in message.ranges])


@dataclass(eq=False)
class Receive:
    """A message to receive from a rank. ``message`` is set from the time it is posted until its release."""

    peer: int
    nbytes: int
    message: Message = field(init=False, repr=False)

    def wait(self) -> torch.Tensor:
        """Wait for the message and return its bytes, 1-D. Call it in the order in which receives were added."""
        self.message.wait("backward()")
        return self.message.buffer


_Receives = Mapping[int, Receive]
"""One message from each peer."""


class ReceiveWindow:
    """Posts receives in order, as far ahead as a memory limit allows, and reuses the memory.

    A sender starts when its receive is posted, so the link is busy if the window is as large as the data in flight.
    Two receives are always posted, whatever their size, because a sum holds one while it waits for the next. Otherwise
    at most ``limit`` bytes are posted or kept. Any thread may call any method.
    """

    def __init__(self, ranks: RankGroup, limit: int, tags: int = 0) -> None:
        self._ranks, self._limit, self.tag = ranks, limit, TAG_GRADIENTS + tags
        self._lock = threading.Lock()
        self._waiting: deque[Receive] = deque()
        self._free: dict[int, list[torch.Tensor]] = {}
        self._held = self._count = self._made = 0

    def extend(self, receives: Sequence[Receive]) -> None:
        """Append receives, and post those for which there is memory."""
        with self._lock:
            self._waiting.extend(receives)
            self._post()

    def release(self, receive: Receive) -> None:
        """Free the memory of a receive for reuse, and post the receives for which there is memory now."""
        with self._lock:
            self._free.setdefault(receive.nbytes, []).append(receive.message.buffer)
            del receive.message
            self._held -= receive.nbytes
            self._count -= 1
            self._post()

    def _post(self) -> None:
        while self._waiting and (self._count < 2 or self._held + self._waiting[0].nbytes <= self._limit):
            posted = self._waiting.popleft()
            if not self._free.get(posted.nbytes):
                if self._made + posted.nbytes > self._limit:
                    # Drop free memory of other lengths: few buckets have messages of equal lengths.
                    self._free, self._made = {}, self._held
                self._free[posted.nbytes] = [torch.empty(posted.nbytes, dtype=torch.uint8, device="cpu")]
                self._made += posted.nbytes
            scratch = self._free[posted.nbytes].pop()
            self._count += 1
            self._held += posted.nbytes
            posted.message = receive(self._ranks, posted.peer, scratch, self.tag, "backward()")


def mean_in_rank_order(
    ranks: RankGroup, own: Pieces, fetch: Callable[[int], torch.Tensor], release: Callable[[int], object]
) -> float:
    """Replace this rank's values, 1-D tensors, with the mean over all ranks; return the seconds spent waiting.

    ``fetch`` returns the values of a peer, as one tensor with the same number of bytes. It is called for peers in
    ascending order. At most two tensors are held at a time; ``release`` is called for a peer when its tensor is free.
    """
    rank, world_size = ranks.rank, ranks.world_size
    # Scaling by a power of two is exact, so it can be done while adding.
    exact = world_size & (world_size - 1) == 0
    # Two terms can be added in either order, so only ranks from 2 on need memory for the sum of earlier ranks.
    total: Pieces | None = None
    waited = 0.0
    # Divide: in bfloat16 the factor 1 / world_size would be rounded, but world_size is exact.
    foreach_div_(own, world_size)
    for peer in sorted(ranks.peers):
        started = time.perf_counter()
        values = fetch(peer).view(own[0].dtype)
        waited += time.perf_counter() - started
        term = (values,) if len(own) == 1 else values.split([piece.numel() for piece in own])
        if rank < 2 or peer > rank:
            if not exact:
                foreach_div_(term, world_size)
            foreach_add_(own, term, alpha=1 / world_size if exact else 1)
        else:
            foreach_div_(term, world_size)
            if total is None:
                total = term
                continue
            foreach_add_(total, term)
            if peer == rank - 1:
                foreach_add_(own, total)
                release(0)
        release(peer)
    return waited


class MessageBroadcaster(ParameterBroadcaster):
    """Sends each segment to every peer, small ones packed.

    Args:
        ranks: the group; its backend matches messages by tag (gloo, CPU tensors).
        segments: as for :class:`ParameterBroadcaster`.
        traffic: as for :class:`ParameterBroadcaster`.
        tags: offset of the tags, equal on all ranks. Broadcasters need different offsets if ranks may use them in
            different orders; see :meth:`GroupContext.allocate_tags`.
    """

    def __init__(self, ranks: RankGroup, segments: Sequence[Segment], traffic: Traffic, tags: int = 0) -> None:
        super().__init__(ranks, segments, traffic)
        # A single rank sends nothing.
        pieces = [(segment.owner, segment.view) for segment in segments] if ranks.world_size > 1 else []
        messages = pack_pieces(pieces)
        self._own = [message for message in messages if message.owner == ranks.rank]
        self._others = [message for message in messages if message.owner != ranks.rank]
        self._tag = TAG_BROADCAST + tags
        self._arriving: list[tuple[PackedMessage, Message]] = []
        self._sends: list[Message] = []

    def begin(self) -> None:
        """Post the receives of all segments that peers own."""
        self._arriving = [
            (message, receive(self.ranks, message.owner, message.data, self._tag, _SHARING)) for message in self._others
        ]

    def send(self) -> None:
        """Send every peer this rank's messages."""
        self._sends = []
        for message in self._own:
            message.pack()
            self._sends += [send(self.ranks, peer, message.data, self._tag, _SHARING) for peer in self.ranks.peers]
        calls = len(self._arriving) + len(self._sends)
        self.traffic.add("broadcast", sent=self.sent, received=self.received, calls=calls)

    def arrive(self) -> None:
        """Wait for messages in their order, and unpack each while the rest arrives."""
        started = time.perf_counter()
        arriving, self._arriving = self._arriving, []
        for message, receiving in arriving:
            receiving.wait(_SHARING)
            message.unpack()
        self.traffic.add("broadcast", waited=time.perf_counter() - started)

    def wait(self) -> None:
        """Wait for the receives and the sends."""
        self.arrive()
        started = time.perf_counter()
        while self._sends:
            # Removed before the wait: if it raises, this rank must not wait for the message again.
            self._sends.pop(0).wait(_SHARING)
        self.traffic.add("broadcast", waited=time.perf_counter() - started)

"""Sends a bucket of gradients to its owners. The messages are laid out once per bucket and sent in every backward.

Every rank sends each owner its values of that owner's ranges: large ones directly from the bucket, small ones packed.
Owners add the values in ascending rank order, so that sums do not depend on the plan.

Messages are tagged. Messages with one tag between two ranks are matched in order: bucket by bucket in the order of
:meth:`MessageReducer.begin`, which must be the same on all ranks.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise

import torch
from zeroshard_core import Run

from zeroshard_comm import messages
from zeroshard_comm._torch_private import foreach_add_, foreach_div_
from zeroshard_comm.interfaces import BucketReduceWork, GradientReducer
from zeroshard_comm.messages import BucketMessage, Message, bucket_messages, send
from zeroshard_comm.process_group import RankGroup
from zeroshard_comm.traffic import Traffic

TAG_GRADIENTS = 0x5A530031

Pieces = tuple[torch.Tensor, ...]

WINDOW_BYTES = 16 * 1024 * 1024
"""Memory for receives, in bytes. On a slow link one message is too little, because gloo tells a sender of a posted
receive only after all data that this rank is sending it."""


class MessageReducer(GradientReducer):
    """Reduces one bucket by messages.

    Args:
        ranks: the group; its backend matches messages by tag.
        runs: ranges of elements of the bucket and their owners, in bucket order. Elements between them have no owner.
        dtype: the dtype of the bucket, which is on the CPU.
        window: posts the receives of gradients.
        traffic: counts bytes, as kind ``"reduce"``.

    Attributes:
        messages: for each owner, the messages that every other rank sends to it.
    """

    def __init__(
        self,
        ranks: RankGroup,
        runs: Sequence[Run],
        dtype: torch.dtype,
        window: ReceiveWindow,
        traffic: Traffic,
    ) -> None:
        self.ranks, self.traffic, self.window = ranks, traffic, window
        self._expected: MessageReduceWork | None = None
        self.messages = {
            owner: bucket_messages([run for run in runs if run.rank == owner], dtype.itemsize)
            for owner in range(ranks.world_size)
        }
        # The first and last elements of all ranges, which also delimit the gaps between them.
        ranges = [part for messages in self.messages.values() for message in messages for part in message.ranges]
        self._edges = sorted({0, *chain.from_iterable(ranges)})
        self._sizes = [stop - start for start, stop in pairwise(self._edges)]

    def expect(self) -> None:
        """Post the receives for which the window has memory.

        Call it early, also before there are values to send: gloo tells the sender of a posted receive only after all
        data that this rank is sending it.
        """
        self._expected = MessageReduceWork(self)

    def begin(self, buffer: torch.Tensor) -> MessageReduceWork:
        """Post the receives, unless :meth:`expect` has, and send."""
        work, self._expected = self._expected or MessageReduceWork(self), None
        work.send(buffer)
        return work

    def cut(self, buffer: torch.Tensor) -> Mapping[int, torch.Tensor]:
        """Return the views of ``buffer`` that messages use, by their first elements.

        They are not cached: DDP replaces its buckets once, and then frees the memory of the first ones.
        """
        return dict(zip(self._edges, buffer[: self._edges[-1]].split(self._sizes), strict=False))


class MessageReduceWork(BucketReduceWork):
    """One reduction of a bucket. Posts its receives; then call ``send``, ``finish`` and ``close``, each once."""

    def __init__(self, reducer: MessageReducer) -> None:
        self._reducer, self._window = reducer, reducer.window
        self._views: Mapping[int, torch.Tensor] = {}
        self._sends: list[Message] = []
        self._arrivals = [
            (message, {peer: Receive(peer, message.nbytes) for peer in reducer.ranks.peers})
            for message in reducer.messages[reducer.ranks.rank]
        ]
        self._window.extend([receive for _, receives in self._arrivals for receive in receives.values()])

    def send(self, buffer: torch.Tensor) -> None:
        """Send this rank's values of the ranges that other ranks own.

        Args:
            buffer: the bucket, 1-D; it belongs to the reduction until :meth:`close` has returned.

        Raises:
            PeerLostError: if a rank is gone.
        """
        reducer, ranks = self._reducer, self._reducer.ranks
        self._views = reducer.cut(buffer)
        for peer in ranks.peers:
            for message in reducer.messages[peer]:
                pieces = self._pieces(message)
                payload = (torch.cat(pieces) if len(pieces) > 1 else pieces[0]).view(torch.uint8)
                self._sends.append(send(ranks, peer, payload, self._window.tag, "backward()"))
        sent = sum([message.buffer.nbytes for message in self._sends])
        received = sum([message.nbytes for message, _ in self._arrivals]) * len(ranks.peers)
        calls = len(self._sends) + len(self._arrivals) * len(ranks.peers)
        reducer.traffic.add("reduce", sent=sent, received=received, calls=calls)

    def finish(self) -> None:
        """Wait until this rank's ranges of the bucket hold the mean over all ranks; the rest is unchanged.

        The bucket belongs to the reduction until :meth:`close` has returned.

        Raises:
            PeerLostError: if a rank is gone.
        """
        waited = 0.0
        for message, receives in self._arrivals:
            take, release = partial(self._take, receives), partial(self._release, receives)
            waited += mean_in_rank_order(self._reducer.ranks, self._pieces(message), take, release)
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
        self._sends, self._views = [], {}
        self._reducer.traffic.add("reduce", waited=time.perf_counter() - started)

    def _take(self, receives: Mapping[int, Receive], peer: int) -> torch.Tensor:
        return receives[peer].wait()

    def _release(self, receives: Mapping[int, Receive], peer: int) -> None:
        self._window.release(receives[peer])

    def _pieces(self, message: BucketMessage) -> Pieces:
        return tuple([self._views[start] for start, _ in message.ranges])


@dataclass(eq=False)
class Receive:
    """A message to receive from a rank. ``message`` is None until the receive is posted, and after its release."""

    peer: int
    nbytes: int
    message: Message | None = field(default=None, repr=False)

    def wait(self) -> torch.Tensor:
        """Wait for the message and return it as 1-D bytes. Call it in the order in which receives were added."""
        assert self.message is not None
        self.message.wait("backward()")
        return self.message.buffer


class ReceiveWindow:
    """Posts receives in order, as far ahead as a limit of memory allows, and reuses the memory.

    A sender starts when its receive is posted, so the link is busy if the window is as large as the data on its way.
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
        """Give the memory of a receive back, and post the receives for which there is memory now."""
        with self._lock:
            assert receive.message is not None
            self._free.setdefault(receive.nbytes, []).append(receive.message.buffer)
            receive.message = None
            self._held -= receive.nbytes
            self._count -= 1
            self._post()

    def _post(self) -> None:
        while self._waiting and (self._count < 2 or self._held + self._waiting[0].nbytes <= self._limit):
            receive = self._waiting.popleft()
            if not self._free.get(receive.nbytes):
                if self._made + receive.nbytes > self._limit:
                    # Drop free memory of other lengths: few buckets have messages of equal lengths.
                    self._free, self._made = {}, self._held
                self._free[receive.nbytes] = [torch.empty(receive.nbytes, dtype=torch.uint8, device="cpu")]
                self._made += receive.nbytes
            scratch = self._free[receive.nbytes].pop()
            self._count += 1
            self._held += receive.nbytes
            receive.message = messages.receive(self._ranks, receive.peer, scratch, self.tag, "backward()")


def mean_in_rank_order(
    ranks: RankGroup, own: Pieces, take: Callable[[int], torch.Tensor], release: Callable[[int], None]
) -> float:
    """Replace this rank's values, 1-D tensors or none, by the mean over all ranks; return the seconds spent waiting.

    ``take`` returns the values of a peer, as one tensor of as many bytes. This calls it for peers in ascending order,
    and holds at most two tensors at a time; ``release`` gives the memory of one back.
    """
    rank, world_size = ranks.rank, ranks.world_size
    # Scaling by a power of two is exact, so it can be done while adding.
    exact = world_size & (world_size - 1) == 0
    # Two terms can be added in either order, so only ranks from 2 on need memory for the sum of earlier ranks.
    total: Pieces | None = None
    waited = 0.0
    # Divide: in bfloat16 the factor 1 / world_size would be rounded, but world_size is exact.
    if own:
        foreach_div_(own, world_size)
    for peer in sorted(ranks.peers):
        started = time.perf_counter()
        values = take(peer)
        waited += time.perf_counter() - started
        if own:
            flat = values.view(own[0].dtype)
            term = (flat,) if len(own) == 1 else flat.split([piece.numel() for piece in own])
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

"""One wire format for JSON and tensors between ranks: a text, then the bytes of each tensor, in bounded chunks.

Nothing is pickled. Everything travels over the control channel, on gloo and CPU memory. The sender describes its
tensors in JSON (the caller's description, and the size of each tensor in bytes) and sends that text. The receiver makes
a buffer for each tensor. Then the bytes of the tensors follow in order, cut in chunks, and are received directly into
the buffers. A sender copies nothing if its tensor is dense and in CPU memory; one of an accelerator passes through two
pinned buffers of a chunk each.

In :func:`gather` every rank sends. All ranks agree between the texts and the bytes, so if the target lacks memory,
every rank raises instead of waiting for it.
"""

from __future__ import annotations

import json
import struct
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from zeroshard_core import is_dense, storage_view

from zeroshard_comm.agreement import Coordinator, agreed
from zeroshard_comm.errors import DisagreementError, PeerLostError
from zeroshard_comm.messages import Message, receive, receive_text, send, send_text

TAG_VALUES = 0x5A530022

CHUNK_BYTES = 16 * 1024 * 1024
"""Largest message, and the most that a sender copies at a time, in bytes."""

_IN_FLIGHT = 4

_NOTHING = "null"
"""From a sender that has failed, and reports it in the agreement."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Manifest:
    """What one rank sends.

    Attributes:
        description: JSON-serialisable; tells the receiver what the tensors are.
        tensors: strided tensors on any device, in the order of the description. Dense ones are sent as their bytes in
            storage order, others as the bytes of a contiguous copy.
    """

    description: Any
    tensors: Sequence[torch.Tensor]

    def to_json(self) -> str:
        """Write what is sent before the tensors: the description, and the sizes of the tensors."""
        return json.dumps([self.description, [tensor.nbytes for tensor in self.tensors]])


Place = Callable[[int, Any], Sequence[torch.Tensor]]


def send_values(coordinator: Coordinator, peer: int, manifest: Manifest, operation: str) -> None:
    """Send JSON and tensors to a rank that calls :func:`receive_values`.

    Args:
        coordinator: the channel of the group, which has another rank, on a backend that moves data.
        peer: group rank of the receiver.
        manifest: what to send.
        operation: named in errors.

    Raises:
        TypeError: if the description is not JSON-serialisable; nothing has been sent then.
        PeerLostError: if the receiver is gone.
    """
    text = manifest.to_json()
    with coordinator.exclusive(operation):
        send_text(coordinator.channel, peer, text, operation, coordinator.traffic, "state")
        _send_tensors(coordinator, peer, manifest.tensors, operation)


def receive_values(coordinator: Coordinator, source: int, place: Place, operation: str) -> None:
    """Receive what :func:`send_values` sends.

    Args:
        coordinator: as for :func:`send_values`.
        source: group rank of the sender.
        place: called with the sender and its description; returns the buffers, as for :func:`gather`.
        operation: named in errors.

    Raises:
        DisagreementError: if the buffers have other sizes than the tensors.
        PeerLostError: if the sender is gone.
    """
    with coordinator.exclusive(operation):
        buffers = _placed(place, source, receive_text(coordinator.channel, source, operation))
        _receive_tensors(coordinator, source, buffers, operation)


def gather(
    coordinator: Coordinator, manifest: Manifest, target: int, place: Place, *, operation: str = "gather()"
) -> None:
    """Send the JSON and the tensors of all ranks to ``target``. Collective.

    Args:
        coordinator: the channel of the group; its gloo group carries the data.
        manifest: what this rank has.
        target: group rank that receives; its own tensors are placed as well, by copying.
        place: called on the target once per rank, in rank order, with the rank and its description; returns one 1-D
            contiguous CPU tensor per tensor of that rank, of the same number of bytes.
        operation: named in errors.

    Raises:
        RuntimeError: on the ``fake`` backend with more than one rank, which moves no data.
        PeerLostError: if a rank is gone.
        Exception: if ``place`` raised on the target, or a manifest cannot be described: that error, on every rank.
    """
    ranks = coordinator.ranks
    if coordinator.is_single_rank and ranks.world_size > 1:
        raise RuntimeError(f"{operation}: torch's 'fake' backend moves no data, so state cannot be gathered over it")
    buffers: dict[int, Sequence[torch.Tensor]] = {}
    with agreed(coordinator, f"{operation}: making room"):
        if ranks.rank == target:
            texts = _from_each(coordinator, lambda peer: receive_text(coordinator.channel, peer, operation))
            texts[target] = manifest.to_json()
            sent = sorted(source for source, text in texts.items() if text != _NOTHING)
            buffers = {source: _placed(place, source, texts[source]) for source in sent}
        else:
            text = _NOTHING
            try:
                text = manifest.to_json()
            finally:
                send_text(coordinator.channel, target, text, operation, coordinator.traffic, "state")
    with coordinator.exclusive(operation):
        if ranks.rank != target:
            _send_tensors(coordinator, target, manifest.tensors, operation)
            return
        on_host = _OnHost()
        for buffer, tensor in zip(buffers[target], manifest.tensors, strict=True):
            for room, chunk in zip(_chunks(buffer.view(torch.uint8)), _chunks(_bytes_of(tensor)), strict=True):
                room.copy_(on_host(chunk))
        _from_each(coordinator, lambda peer: _receive_tensors(coordinator, peer, buffers[peer], operation))


def all_gather_text(coordinator: Coordinator, text: str, operation: str) -> list[str]:
    """Send a text of every rank, packed, to all ranks, and return the texts in rank order. Collective.

    Raises:
        PeerLostError: if a rank is gone.
    """
    packed = zlib.compress(text.encode())
    sizes = [row[0] for row in coordinator.gather_ints([len(packed)], operation)]
    padded = packed.ljust(-(-max(sizes) // 8) * 8, b"\0")
    rows = coordinator.gather_ints(struct.unpack(f"<{len(padded) // 8}q", padded), operation)
    texts = [struct.pack(f"<{len(row)}q", *row)[:size] for row, size in zip(rows, sizes, strict=True)]
    return [zlib.decompress(packed).decode() for packed in texts]


def _from_each(coordinator: Coordinator, take: Callable[[int], _T]) -> dict[int, _T]:
    """What is received from each peer; if one is lost, from the others too, since they wait until they have sent."""
    taken: dict[int, _T] = {}
    lost: list[PeerLostError] = []
    for peer in sorted(coordinator.ranks.peers):
        try:
            taken[peer] = take(peer)
        except PeerLostError as error:
            lost.append(error)
    if lost:
        raise lost.pop(0)
    return taken


def _placed(place: Place, source: int, text: str) -> Sequence[torch.Tensor]:
    description, sizes = json.loads(text)
    buffers = place(source, description)
    given = [buffer.nbytes for buffer in buffers]
    if given != sizes:
        raise DisagreementError(f"rank {source} sends tensors of {sizes} bytes, but there is room for {given}")
    return buffers


def _send_tensors(coordinator: Coordinator, peer: int, tensors: Sequence[torch.Tensor], operation: str) -> None:
    on_host = _OnHost()
    # While one chunk from an accelerator is sent, the next one is copied to the other buffer.
    most = _IN_FLIGHT if all(tensor.device.type == "cpu" for tensor in tensors) else 2
    chunks = (chunk for tensor in tensors for chunk in _chunks(_bytes_of(tensor)))
    sends = (send(coordinator.channel, peer, on_host(chunk), TAG_VALUES, operation) for chunk in chunks)
    waited = _wait_for_each(sends, most, operation)
    coordinator.traffic.add("state", sent=sum(tensor.nbytes for tensor in tensors), calls=1, waited=waited)


def _receive_tensors(coordinator: Coordinator, source: int, buffers: Sequence[torch.Tensor], operation: str) -> None:
    chunks = (chunk for buffer in buffers for chunk in _chunks(buffer.view(torch.uint8)))
    receives = (receive(coordinator.channel, source, chunk, TAG_VALUES, operation) for chunk in chunks)
    waited = _wait_for_each(receives, _IN_FLIGHT, operation)
    coordinator.traffic.add("state", received=sum(buffer.nbytes for buffer in buffers), calls=2, waited=waited)


def _wait_for_each(messages: Iterator[Message], most: int, operation: str) -> float:
    """Issue messages, at most so many at a time, and wait for them; return how many seconds that took."""
    started, under_way = time.perf_counter(), deque[Message]()
    for message in messages:
        under_way.append(message)
        if len(under_way) == most:
            under_way.popleft().wait(operation)
    for message in under_way:
        message.wait(operation)
    return time.perf_counter() - started


class _OnHost:
    """Copies chunks to CPU memory: from an accelerator through two pinned buffers in turn, made when first needed."""

    def __init__(self) -> None:
        self._pinned: list[torch.Tensor] = []

    def __call__(self, chunk: torch.Tensor) -> torch.Tensor:
        if chunk.device.type == "cpu":
            return chunk
        if len(self._pinned) < 2:
            self._pinned.append(torch.empty(CHUNK_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True))
        else:
            self._pinned.reverse()
        return self._pinned[-1][: chunk.numel()].copy_(chunk)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in storage order, without a copy where it has no gaps."""
    values = tensor.detach().resolve_conj().resolve_neg()
    return (storage_view(values) if is_dense(values) else values.contiguous().view(-1)).view(torch.uint8)


def _chunks(flat: torch.Tensor) -> Sequence[torch.Tensor]:
    return flat.split(CHUNK_BYTES) if flat.numel() else ()

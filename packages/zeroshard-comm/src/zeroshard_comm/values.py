"""Sends JSON and tensors between ranks: a text, then the bytes of each tensor, in bounded chunks. Uses no pickle.

All messages use the control channel, on gloo and CPU memory. The sender sends a text: a description of its tensors, and
their sizes in bytes. The receiver makes a buffer for each tensor, and receives the bytes directly into it. Dense
tensors in CPU memory are sent without a copy; others are copied to it in chunks.
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
"""Maximum size of a message, and of the sender's copy of it, in bytes."""

_IN_FLIGHT = 4
"""Maximum number of messages that a rank has issued and not waited for."""

_NOTHING = "null"
"""The text of a rank that failed, which reports its error in the agreement."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Manifest:
    """The description and the tensors that one rank sends.

    Attributes:
        description: a JSON-serialisable value that tells the receiver what the tensors are.
        tensors: strided tensors on any device. Dense ones are sent as their bytes in storage order, others as the bytes
            of a contiguous copy.
    """

    description: Any
    tensors: Sequence[torch.Tensor]

    def to_json(self) -> str:
        """Return the text that is sent before the tensors: the description, and their sizes in bytes."""
        return json.dumps([self.description, [tensor.nbytes for tensor in self.tensors]])


Place = Callable[[int, Any], Sequence[torch.Tensor]]


def send_values(coordinator: Coordinator, peer: int, manifest: Manifest, operation: str) -> None:
    """Send JSON and tensors to a rank that calls :func:`receive_values`.

    Args:
        coordinator: agrees on the process group, which has several ranks and a backend that moves data.
        peer: group rank of the receiver.
        manifest: the description and the tensors to send.
        operation: the operation of the ranks, for errors.

    Raises:
        TypeError: if the description is not JSON-serialisable. Nothing has been sent then.
        PeerLostError: if the receiver is gone.
    """
    text = manifest.to_json()
    with coordinator.exclusive(operation):
        send_text(coordinator.channel, peer, text, operation, coordinator.traffic, "state")
        _send_tensors(coordinator, peer, manifest.tensors, operation)


def receive_values(coordinator: Coordinator, source: int, place: Place, operation: str) -> None:
    """Receive the tensors that :func:`send_values` sends.

    Args:
        coordinator: as for :func:`send_values`.
        source: group rank of the sender.
        place: called with the sender and its description; returns the buffers, as for :func:`gather`.
        operation: the operation of the ranks, for errors.

    Raises:
        DisagreementError: if the buffers and the tensors differ in size.
        PeerLostError: if the sender is gone.
    """
    with coordinator.exclusive(operation):
        buffers = _placed(place, source, receive_text(coordinator.channel, source, operation))
        _receive_tensors(coordinator, source, buffers, operation)


def gather(
    coordinator: Coordinator, manifest: Manifest, target: int, place: Place, *, operation: str = "gather()"
) -> None:
    """Send the JSON and the tensors of all ranks to ``target``, which copies its own tensors. Collective.

    All ranks agree after the texts and before the bytes, so every rank raises if the target lacks memory.

    Args:
        coordinator: agrees on the process group; the data is sent on its channel.
        manifest: the description and the tensors of this rank.
        target: group rank of the receiver, equal on all ranks.
        place: called on the target once per rank, in rank order, with the rank and its description; returns one 1-D
            contiguous CPU tensor per tensor of that rank, with the same number of bytes.
        operation: the operation of the ranks, for errors.

    Raises:
        RuntimeError: with several ranks on the ``fake`` backend, which moves no data.
        PeerLostError: if a rank is gone.
        Exception: the error of ``place`` on the target, or of describing a manifest, on every rank.
    """
    ranks = coordinator.ranks
    if coordinator.is_single_rank and ranks.world_size > 1:
        raise RuntimeError(f"{operation}: torch's 'fake' backend moves no data, so state cannot be gathered over it")
    buffers: dict[int, Sequence[torch.Tensor]] = {}
    with agreed(coordinator, f"the transfer of {operation}"):
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
        for buffer, tensor in zip(buffers[target], manifest.tensors, strict=True):
            buffer.view(torch.uint8).copy_(_bytes_of(tensor))
        _from_each(coordinator, lambda peer: _receive_tensors(coordinator, peer, buffers[peer], operation))


def all_gather_text(coordinator: Coordinator, text: str, operation: str) -> list[str]:
    """Send a compressed text of every rank to all ranks, and return the texts in rank order. Collective.

    Raises:
        PeerLostError: if a rank is gone.
    """
    packed = zlib.compress(text.encode())
    sizes = [row[0] for row in coordinator.gather_ints([len(packed)], operation)]
    padded = packed.ljust(-(-max(sizes) // 8) * 8, b"\0")
    rows = coordinator.gather_ints(struct.unpack(f"<{len(padded) // 8}q", padded), operation)
    texts = [struct.pack(f"<{len(row)}q", *row)[:size] for row, size in zip(rows, sizes, strict=True)]
    return [zlib.decompress(packed).decode() for packed in texts]


def _from_each(coordinator: Coordinator, receive_from: Callable[[int], _T]) -> dict[int, _T]:
    """Call a function for each peer, and return the results. If a peer is lost, raise only after the last call."""
    received: dict[int, _T] = {}
    lost: list[PeerLostError] = []
    for peer in sorted(coordinator.ranks.peers):
        try:
            received[peer] = receive_from(peer)
        except PeerLostError as error:
            lost.append(error)
    if lost:
        raise lost.pop(0)
    return received


def _placed(place: Place, source: int, text: str) -> Sequence[torch.Tensor]:
    description, sizes = json.loads(text)
    buffers = place(source, description)
    given = [buffer.nbytes for buffer in buffers]
    if given != sizes:
        raise DisagreementError(f"rank {source} sends tensors of {sizes} bytes, but the buffers have {given}")
    return buffers


def _send_tensors(coordinator: Coordinator, peer: int, tensors: Sequence[torch.Tensor], operation: str) -> None:
    chunks = (chunk for tensor in tensors for chunk in _chunks(_bytes_of(tensor)))
    # A chunk from an accelerator is copied while those before it are sent.
    sends = (send(coordinator.channel, peer, chunk.cpu(), TAG_VALUES, operation) for chunk in chunks)
    waited = _wait_for_each(sends, operation)
    coordinator.traffic.add("state", sent=sum(tensor.nbytes for tensor in tensors), calls=1, waited=waited)


def _receive_tensors(coordinator: Coordinator, source: int, buffers: Sequence[torch.Tensor], operation: str) -> None:
    chunks = (chunk for buffer in buffers for chunk in _chunks(buffer.view(torch.uint8)))
    receives = (receive(coordinator.channel, source, chunk, TAG_VALUES, operation) for chunk in chunks)
    waited = _wait_for_each(receives, operation)
    coordinator.traffic.add("state", received=sum(buffer.nbytes for buffer in buffers), calls=2, waited=waited)


def _wait_for_each(messages: Iterator[Message], operation: str) -> float:
    """Issue messages, a few at a time, and wait for them; return the seconds that this took."""
    started, under_way = time.perf_counter(), deque[Message]()
    for message in messages:
        under_way.append(message)
        if len(under_way) == _IN_FLIGHT:
            under_way.popleft().wait(operation)
    for message in under_way:
        message.wait(operation)
    return time.perf_counter() - started


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor in storage order, without a copy if it is dense."""
    values = tensor.detach().resolve_conj().resolve_neg()
    return (storage_view(values) if is_dense(values) else values.contiguous().view(-1)).view(torch.uint8)


def _chunks(flat: torch.Tensor) -> Sequence[torch.Tensor]:
    return flat.split(CHUNK_BYTES) if flat.numel() else ()

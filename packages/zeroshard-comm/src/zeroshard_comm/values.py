"""One wire format for JSON and tensors between ranks: a text, then the bytes of each tensor, in bounded chunks.

Nothing is pickled. Everything travels over the control channel, on gloo and CPU memory. The sender describes its
tensors in JSON (the caller's description, and the size of each tensor in bytes) and sends that text. The receiver makes
a buffer for each tensor. Then the bytes of the tensors follow in order, cut in chunks, and are received directly into
the buffers. A sender copies nothing if its tensor is dense and in CPU memory, else one chunk at a time.

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
from typing import Any

import torch
from zeroshard_core import is_dense, storage_view

from zeroshard_comm.agreement import Coordinator
from zeroshard_comm.errors import DisagreementError, PeerLostError
from zeroshard_comm.messages import Message, receive, receive_text, send, send_text

TAG_VALUES = 0x5A530022

CHUNK_BYTES = 16 * 1024 * 1024
"""Largest message, and the most that a sender copies at a time, in bytes."""

_IN_FLIGHT = 4
_NOTHING = "null"


@dataclass(frozen=True)
class Manifest:
    """What one rank sends.

    Attributes:
        description: JSON-serialisable; tells the receiver what the tensors are.
        tensors: dense tensors on any device, in the order of the description; sent as their bytes in storage order.
    """

    description: Any
    tensors: Sequence[torch.Tensor]

    @property
    def content(self) -> dict[str, Any]:
        """What is sent before the tensors, as JSON."""
        return {"description": self.description, "sizes": [tensor.nbytes for tensor in self.tensors]}


Place = Callable[[int, Any], Sequence[torch.Tensor]]
Progress = Callable[[int, int], None]


def send_values(
    coordinator: Coordinator, peer: int, manifest: Manifest, operation: str, *, chunk_bytes: int = CHUNK_BYTES
) -> None:
    """Send JSON and tensors to a rank that calls :func:`receive_values`.

    Args:
        coordinator: the channel of the group, which has another rank, on a backend that moves data.
        peer: group rank of the receiver.
        manifest: what to send.
        operation: named in errors.
        chunk_bytes: size of a chunk, in bytes, the same on both ranks.

    Raises:
        TypeError: if the description is not JSON-serialisable; nothing has been sent then.
        PeerLostError: if the receiver is gone.
    """
    _send_text(coordinator, peer, json.dumps(manifest.content), operation)
    _send_tensors(coordinator, peer, manifest.tensors, operation, chunk_bytes)


def receive_values(
    coordinator: Coordinator, source: int, place: Place, operation: str, *, chunk_bytes: int = CHUNK_BYTES
) -> None:
    """Receive what :func:`send_values` sends.

    Args:
        coordinator: as for :func:`send_values`.
        source: group rank of the sender.
        place: called with the sender and its description; returns the buffers, as for :func:`gather`.
        operation: named in errors.
        chunk_bytes: as for :func:`send_values`.

    Raises:
        DisagreementError: if the buffers have other sizes than the tensors.
        PeerLostError: if the sender is gone.
    """
    sent = json.loads(receive_text(coordinator.channel, source, operation))
    buffers = _checked(place(source, sent["description"]), sent["sizes"], source)
    started = time.perf_counter()
    received = sum(_receive_chunks(coordinator, source, buffers, operation, chunk_bytes))
    coordinator.traffic.add("state", received=received, calls=2, waited=time.perf_counter() - started)


def gather(
    coordinator: Coordinator,
    manifest: Manifest,
    target: int,
    place: Place,
    *,
    operation: str = "gather()",
    progress: Progress | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> None:
    """Send the JSON and the tensors of all ranks to ``target``. Collective.

    Args:
        coordinator: the channel of the group; its gloo group carries the data.
        manifest: what this rank has.
        target: group rank that receives; its own tensors are placed as well, by copying.
        place: called on the target once per rank, in rank order, with the rank and its description; returns one 1-D
            contiguous CPU tensor per tensor of that rank, of the same number of bytes.
        operation: named in errors.
        progress: called on the target as ``progress(bytes_done, bytes_total)`` after every chunk.
        chunk_bytes: size of a chunk, in bytes, the same on all ranks.

    Raises:
        RuntimeError: on the ``fake`` backend with more than one rank, which moves no data.
        PeerLostError: if a rank is gone.
        Exception: if ``place`` raised on the target, or a manifest cannot be described: that error, on every rank.
    """
    ranks = coordinator.ranks
    if coordinator.is_single_rank and ranks.world_size > 1:
        raise RuntimeError(f"{operation}: torch's 'fake' backend moves no data, so state cannot be gathered over it")
    if ranks.rank == target:
        _receive_all(coordinator, manifest, place, operation, progress, chunk_bytes)
        return
    failure, text = None, _NOTHING
    try:
        text = json.dumps(manifest.content)
    except Exception as error:  # noqa: BLE001 - whatever it is, every rank must hear of it before it is raised
        failure = error
    _send_text(coordinator, target, text, operation)
    coordinator.agree(f"{operation}: making room", error=failure)
    _send_tensors(coordinator, target, manifest.tensors, operation, chunk_bytes)


def all_gather_text(coordinator: Coordinator, text: str, operation: str) -> list[str]:
    """Bring a text of every rank to every rank, in rank order, packed. Collective.

    Raises:
        PeerLostError: if a rank is gone.
    """
    packed = zlib.compress(text.encode())
    sizes = [row[0] for row in coordinator.gather_ints([len(packed)], operation)]
    padded = packed.ljust(-(-max(sizes) // 8) * 8, b"\0")
    rows = coordinator.gather_ints(struct.unpack(f"<{len(padded) // 8}q", padded), operation)
    texts = [struct.pack(f"<{len(row)}q", *row)[:size] for row, size in zip(rows, sizes, strict=True)]
    return [zlib.decompress(packed).decode() for packed in texts]


def _receive_all(
    coordinator: Coordinator,
    manifest: Manifest,
    place: Place,
    operation: str,
    progress: Progress | None,
    chunk_bytes: int,
) -> None:
    ranks = coordinator.ranks
    failure: Exception | None = None
    buffers: dict[int, Sequence[torch.Tensor]] = {}
    for source in range(ranks.world_size):
        try:
            sent = (
                manifest.content
                if source == ranks.rank
                else json.loads(receive_text(coordinator.channel, source, operation))
            )
            # A sender without a description has failed, and reports it in the agreement.
            if failure is None and sent is not None:
                buffers[source] = _checked(place(source, sent["description"]), sent["sizes"], source)
        except Exception as error:  # noqa: BLE001 - whatever it is, every rank must hear of it before it is raised
            failure = error if failure is None or isinstance(error, PeerLostError) else failure
    coordinator.agree(f"{operation}: making room", error=failure)
    total = sum(buffer.nbytes for of_rank in buffers.values() for buffer in of_rank)
    done = 0
    for buffer, tensor in zip(buffers[ranks.rank], manifest.tensors, strict=True):
        buffer.view(torch.uint8).copy_(_bytes_of(tensor))
        done += buffer.nbytes
        if progress is not None:
            progress(done, total)
    started = time.perf_counter()
    lost: PeerLostError | None = None
    received = 0
    for source in ranks.peers:
        try:
            for size in _receive_chunks(coordinator, source, buffers[source], operation, chunk_bytes):
                received += size
                if progress is not None:
                    progress(done + received, total)
        except PeerLostError as error:
            # The others wait until what they send is received.
            lost = lost or error
    coordinator.traffic.add(
        "state", received=received, calls=2 * len(ranks.peers), waited=time.perf_counter() - started
    )
    if lost is not None:
        try:
            raise lost
        finally:
            del lost


def _send_text(coordinator: Coordinator, peer: int, text: str, operation: str) -> None:
    coordinator.traffic.add("state", sent=send_text(coordinator.channel, peer, text, operation), calls=1)


def _send_tensors(
    coordinator: Coordinator, peer: int, tensors: Sequence[torch.Tensor], operation: str, chunk_bytes: int
) -> None:
    started = time.perf_counter()
    in_flight: deque[tuple[Message, torch.Tensor]] = deque()
    for tensor in tensors:
        # A tensor that must be copied is sent one chunk at a time; others may have several chunks on their way.
        ready = tensor.device.type == "cpu"
        flat = _bytes_of(tensor)
        for start in range(0, flat.numel(), chunk_bytes):
            chunk = flat[start : start + chunk_bytes]
            while len(in_flight) >= (_IN_FLIGHT if ready else 1):
                in_flight.popleft()[0].wait(operation)
            chunk = chunk if ready else chunk.cpu()
            in_flight.append((send(coordinator.channel, peer, chunk, TAG_VALUES, operation), chunk))
    for message, _ in in_flight:
        message.wait(operation)
    sent = sum(tensor.nbytes for tensor in tensors)
    coordinator.traffic.add("state", sent=sent, calls=1, waited=time.perf_counter() - started)


def _receive_chunks(
    coordinator: Coordinator, source: int, buffers: Sequence[torch.Tensor], operation: str, chunk_bytes: int
) -> Iterator[int]:
    """Receive the tensors of a rank, some chunks at a time, and yield the size of each chunk that has come."""
    chunks = [chunk for buffer in buffers for chunk in buffer.view(torch.uint8).split(chunk_bytes) if chunk.numel() > 0]
    in_flight: deque[tuple[Message, int]] = deque()
    # Trailing Nones drain what is still under way.
    for chunk in (*chunks, *[None] * _IN_FLIGHT):
        if len(in_flight) == _IN_FLIGHT or (chunk is None and in_flight):
            oldest, size = in_flight.popleft()
            oldest.wait(operation)
            yield size
        if chunk is not None:
            in_flight.append((receive(coordinator.channel, source, chunk, TAG_VALUES, operation), chunk.numel()))


def _checked(buffers: Sequence[torch.Tensor], sizes: Sequence[int], source: int) -> Sequence[torch.Tensor]:
    given = [buffer.nbytes for buffer in buffers]
    if given != list(sizes):
        raise DisagreementError(f"rank {source} sends tensors of {list(sizes)} bytes, but there is room for {given}")
    return buffers


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor in storage order, without a copy where it has no gaps."""
    detached = tensor.detach()
    if detached.is_contiguous():
        return detached.reshape(-1).view(torch.uint8)
    if is_dense(detached):
        return storage_view(detached).view(torch.uint8)
    return detached.contiguous().reshape(-1).view(torch.uint8)

"""Moving optimizer state to one rank: tensor by tensor, in bounded chunks, without pickle.

Protocol, over the control channel's gloo group and CPU memory. Every rank but the target describes its tensors in JSON
(the caller's description plus the size of each tensor in bytes) and sends that text; the target makes room for all of
them; all ranks meet, so that a target without memory is an error on every rank instead of a hang; then the bytes of
each tensor follow in order, cut in chunks. The target receives straight into the room it made. A sender copies nothing
when its tensor lies contiguous in CPU memory, else one chunk at a time.
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

from zeroshard_comm.agreement import Control
from zeroshard_comm.errors import DisagreementError, PeerLostError
from zeroshard_comm.messages import Message, receive, receive_text, send, send_text

TAG_STATE_DATA = 0x5A530022

CHUNK_BYTES = 16 * 1024 * 1024
"""Largest message, and the most that a sender copies at a time, in bytes."""

_IN_FLIGHT = 4
_NOTHING_TO_SAY = "null"


@dataclass(frozen=True)
class Manifest:
    """What one rank sends.

    Attributes:
        description: JSON-serialisable; tells the target what the tensors are.
        tensors: dense tensors on any device, in the order of the description; sent as their bytes in storage order.
    """

    description: Any
    tensors: Sequence[torch.Tensor]


Place = Callable[[int, Any], Sequence[torch.Tensor]]
Progress = Callable[[int, int], None]


def gather(
    control: Control,
    manifest: Manifest,
    target: int,
    place: Place,
    *,
    operation: str = "gather()",
    progress: Progress | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> None:
    """Bring the tensors of all ranks to ``target``. Collective.

    Args:
        control: the channel of the group; its gloo group carries the data.
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
    ranks = control.ranks
    if control.channel is None and ranks.world_size > 1:
        raise RuntimeError(f"{operation}: torch's 'fake' backend moves no data, so state cannot be gathered over it")
    if ranks.rank == target:
        _receive_all(control, manifest, place, operation, progress, chunk_bytes)
    else:
        _send_all(control, manifest, target, operation, chunk_bytes)


def all_gather_text(control: Control, text: str, operation: str) -> list[str]:
    """Bring a text of every rank to every rank, in rank order, packed. Collective.

    Raises:
        PeerLostError: if a rank is gone.
    """
    packed = zlib.compress(text.encode())
    sizes = [row[0] for row in control.all_gather_ints([len(packed)], operation)]
    padded = packed.ljust(-(-max(sizes) // 8) * 8, b"\0")
    rows = control.all_gather_ints(struct.unpack(f"<{len(padded) // 8}q", padded), operation)
    texts = [struct.pack(f"<{len(row)}q", *row)[:size] for row, size in zip(rows, sizes, strict=True)]
    return [zlib.decompress(packed).decode() for packed in texts]


def _send_all(control: Control, manifest: Manifest, target: int, operation: str, chunk_bytes: int) -> None:
    assert control.channel is not None
    failure: Exception | None = None
    sizes: list[int] = []
    text = _NOTHING_TO_SAY
    try:
        sizes = [tensor.nbytes for tensor in manifest.tensors]
        text = json.dumps({"description": manifest.description, "sizes": sizes})
    except Exception as error:  # noqa: BLE001 - whatever it is, every rank must hear of it before it is raised
        failure = error
    described = send_text(control.channel, target, text, operation)
    control.check_consistent(f"{operation}: making room", error=failure)
    # Another one, if these ranks had not agreed before.
    channel = control.channel
    started = time.perf_counter()
    in_flight: deque[tuple[Message, torch.Tensor]] = deque()
    for tensor in manifest.tensors:
        # A tensor that must be copied is sent one chunk at a time; others may have several chunks on their way.
        ready = tensor.device.type == "cpu"
        flat = _bytes_of(tensor)
        for start in range(0, flat.numel(), chunk_bytes):
            chunk = flat[start : start + chunk_bytes]
            while len(in_flight) >= (_IN_FLIGHT if ready else 1):
                in_flight.popleft()[0].wait(operation)
            chunk = chunk if ready else chunk.cpu()
            in_flight.append((send(channel, target, chunk, TAG_STATE_DATA, operation), chunk))
    for message, _ in in_flight:
        message.wait(operation)
    control.traffic.add("state", sent=sum(sizes) + described, calls=2, waited=time.perf_counter() - started)


def _receive_all(
    control: Control,
    manifest: Manifest,
    place: Place,
    operation: str,
    progress: Progress | None,
    chunk_bytes: int,
) -> None:
    ranks = control.ranks
    failure: Exception | None = None
    rooms: dict[int, Sequence[torch.Tensor]] = {}
    for source in range(ranks.world_size):
        told: tuple[Any, list[int]] | None = manifest.description, [t.nbytes for t in manifest.tensors]
        try:
            if source != ranks.rank:
                told = _receive_text(control, source, operation)
            if failure is None and told is not None:
                rooms[source] = _checked(place(source, told[0]), told[1], source)
        except Exception as error:  # noqa: BLE001 - whatever it is, every rank must hear of it before it is raised
            failure = error if failure is None or isinstance(error, PeerLostError) else failure
    control.check_consistent(f"{operation}: making room", error=failure)
    total = sum(room.nbytes for of_rank in rooms.values() for room in of_rank)
    done = 0
    for room, tensor in zip(rooms[ranks.rank], manifest.tensors, strict=True):
        room.view(torch.uint8).copy_(_bytes_of(tensor))
        done += room.nbytes
        if progress is not None:
            progress(done, total)
    started = time.perf_counter()
    lost: PeerLostError | None = None
    received = 0
    for source in ranks.peers:
        chunks = [
            chunk for room in rooms[source] for chunk in room.view(torch.uint8).split(chunk_bytes) if chunk.numel() > 0
        ]
        try:
            for size in _chunks_of(control, source, chunks, operation):
                received += size
                if progress is not None:
                    progress(done + received, total)
        except PeerLostError as error:
            # The others wait until what they send is received.
            lost = lost or error
    control.traffic.add("state", received=received, calls=2 * len(ranks.peers), waited=time.perf_counter() - started)
    if lost is not None:
        try:
            raise lost
        finally:
            del lost


def _chunks_of(control: Control, source: int, chunks: Sequence[torch.Tensor], operation: str) -> Iterator[int]:
    """Receive chunks, some at a time, and yield the size of each that has come."""
    assert control.channel is not None
    in_flight: deque[tuple[Message, int]] = deque()
    # Trailing Nones drain what is still under way.
    for chunk in (*chunks, *[None] * _IN_FLIGHT):
        if len(in_flight) == _IN_FLIGHT or (chunk is None and in_flight):
            oldest, size = in_flight.popleft()
            oldest.wait(operation)
            yield size
        if chunk is not None:
            message = receive(control.channel, source, chunk, TAG_STATE_DATA, operation)
            in_flight.append((message, chunk.numel()))


def _receive_text(control: Control, source: int, operation: str) -> tuple[Any, list[int]] | None:
    """A sender's description of its tensors; None if it failed, which it reports in the agreement."""
    assert control.channel is not None
    parts = json.loads(receive_text(control.channel, source, operation))
    return None if parts is None else (parts["description"], parts["sizes"])


def _checked(rooms: Sequence[torch.Tensor], sizes: Sequence[int], source: int) -> Sequence[torch.Tensor]:
    given = [room.nbytes for room in rooms]
    if given != list(sizes):
        raise DisagreementError(f"rank {source} sends tensors of {list(sizes)} bytes, but there is room for {given}")
    return rooms


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor in storage order, without a copy where it has no gaps."""
    detached = tensor.detach()
    if detached.is_contiguous():
        return detached.reshape(-1).view(torch.uint8)
    if is_dense(detached):
        return storage_view(detached).view(torch.uint8)
    return detached.contiguous().reshape(-1).view(torch.uint8)

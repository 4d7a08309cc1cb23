"""Moves the data of collectives and messages by gloo. Results are bitwise gloo's for CPU tensors of the same sizes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ReduceOp

from zeroshard_testing.emulated.order import REDUCTIONS, Call, Message, amounts

# Tags of gloo's messages. NCCL has no tags: the messages between two ranks match in the order in which they are issued.
_ANNOUNCEMENT, _DATA, _NEVER_SENT = range(3)
# In bytes. A longer text takes a second round; the text of a message is short, and its length is limited.
_TEXT_SIZE = 2048
_MESSAGE_SIZE = 4096
_LENGTH_SIZE = 4


class Transfer:
    """The connections of one rank to the others of a group. Every method blocks, and raises RuntimeError if gloo fails.

    Args:
        gloo: The group's process group of gloo, None for a group of one rank.
        rank: This process's rank in the group.
        size: The number of ranks of the group.
    """

    def __init__(self, gloo: Any, rank: int, size: int) -> None:  # noqa: ANN401 - see gloo_group
        self._gloo = gloo
        self._rank = rank
        self._size = size

    def move(self, call: Call) -> None:
        """Run a collective that matches the collectives of the other ranks."""
        if call.name in REDUCTIONS:
            self._reduce(call)
        elif call.name == "broadcast":
            self._broadcast(call)
        elif call.name != "barrier":
            # The comparison of ranks is the barrier.
            self._exchange_parts(call)

    def gather_texts(self, text: bytes) -> list[bytes]:
        """Return the text of each rank, in the order of the group's ranks."""
        found = self._gather(_filled(text, _TEXT_SIZE))
        longest = max(_length(buffer) for buffer in found)
        if longest > _TEXT_SIZE - _LENGTH_SIZE:
            # All ranks see the longer text, so all run another round.
            found = self._gather(_filled(text, longest + _LENGTH_SIZE))
        return [_text(buffer) for buffer in found]

    def send(self, call: Call, announcement: Message) -> None:
        """Send the description of a tensor, then the tensor."""
        data = _bytes(call.inputs[0])
        # Issue both before waiting for either.
        text = _filled(json.dumps(asdict(announcement)).encode(), _MESSAGE_SIZE)
        works = [self._gloo.send([text], call.root, _ANNOUNCEMENT)]
        if data.numel():
            works.append(self._gloo.send([data], call.root, _DATA))
        for work in works:
            work.wait()

    def receive(self, peer: int) -> tuple[Message, torch.Tensor]:
        """Return the next message of a rank: its description, and its bytes."""
        text = torch.empty(_MESSAGE_SIZE, dtype=torch.uint8, device="cpu")
        self._gloo.recv([text], peer, _ANNOUNCEMENT).wait()
        sent = Message(**json.loads(_text(text)))
        # Use the sender's size, because gloo ends the process if sizes differ.
        data = torch.empty(sent.elements * getattr(torch, sent.dtype).itemsize, dtype=torch.uint8, device="cpu")
        if data.numel():
            self._gloo.recv([data], peer, _DATA).wait()
        return sent, data

    def close_connections(self) -> None:
        """Make the waits of other ranks fail. gloo closes connections only if a wait times out."""
        try:
            work = self._gloo.recv([torch.empty(1, dtype=torch.uint8)], (self._rank + 1) % self._size, _NEVER_SENT)
            work.wait(timedelta(milliseconds=1))
        except RuntimeError:
            pass

    def _gather(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        found = [torch.empty_like(buffer) for _ in range(self._size)]
        self._gloo.allgather(found, buffer).wait()
        return found

    def _reduce(self, call: Call) -> None:
        """Reduce each tensor separately by gloo: sums are in gloo's order, which depends on the size."""
        if call.name == "all_reduce":
            # Gloo reduces in the order of the output's memory.
            total = torch.empty_like(call.outputs[0]).copy_(call.inputs[0])
            self._reduce_by_gloo(total, call.reduce_op)
            call.outputs[0].copy_(total)
            return
        root = call.root if call.name == "reduce" else None
        for tensor in call.inputs:
            self._reduce_by_gloo(tensor, call.reduce_op, root)
        for output in call.outputs:
            if call.name == "reduce_scatter":
                output.copy_(call.inputs[self._rank].view(output.shape))
            else:
                place = self._rank * output.numel() if call.name == "reduce_scatter_tensor" else 0
                output.copy_(call.inputs[0].view(-1)[place : place + output.numel()].view(output.shape))

    def _reduce_by_gloo(self, tensor: torch.Tensor, name: str, root: int | None = None) -> None:
        if self._gloo is None:
            return
        reduce_op = getattr(ReduceOp, "SUM" if name == "AVG" else name)
        if name == "AVG":
            # Divide first, as NCCL does, because a sum in half precision may overflow.
            tensor.mul_(1 / self._size)
        if root is None:
            self._gloo.allreduce([tensor], reduce_op).wait()
        else:
            self._gloo.reduce(tensor, root, reduce_op).wait()

    def _broadcast(self, call: Call) -> None:
        if self._gloo is None:
            return
        data = _bytes(call.inputs[0]) if call.inputs else _room_for(call.outputs)
        self._gloo.broadcast(data, call.root).wait()
        write(data, call.outputs)

    def _exchange_parts(self, call: Call) -> None:
        """Send each rank its elements as bytes, which works for every dtype, and for uneven sizes."""
        given = torch.cat([_room_for([]), *map(_bytes, call.inputs)])
        if call.name in ("all_gather", "all_gather_into_tensor"):
            given = given.repeat(self._size)
        taken = given
        if self._gloo is not None:
            taken = _room_for(call.outputs)
            width = (*call.inputs, *call.outputs)[0].element_size()
            gives, takes = ([number * width for number in numbers] for numbers in amounts(call, self._rank, self._size))
            self._gloo.alltoall_base(taken, given, takes, gives).wait()
        write(taken, call.outputs)


def write(data: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
    """Copy bytes into consecutive tensors."""
    place = 0
    for output in outputs:
        size = output.numel() * output.element_size()
        # Copy them, because a view of another dtype has to begin at a multiple of its width.
        output.copy_(data[place : place + size].clone().view(output.dtype).view(output.shape))
        place += size


def _filled(text: bytes, size: int) -> torch.Tensor:
    """Return a buffer of this many bytes, with the length of the text and as much of the text as fits."""
    content = len(text).to_bytes(_LENGTH_SIZE, "big") + text
    return torch.frombuffer(bytearray(content[:size].ljust(size, b"\0")), dtype=torch.uint8)


def _length(buffer: torch.Tensor) -> int:
    return int.from_bytes(bytes(buffer[:_LENGTH_SIZE].tolist()), "big")


def _text(buffer: torch.Tensor) -> bytes:
    return bytes(buffer[_LENGTH_SIZE : _LENGTH_SIZE + _length(buffer)].tolist())


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _room_for(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return torch.empty(size, dtype=torch.uint8, device="cpu")

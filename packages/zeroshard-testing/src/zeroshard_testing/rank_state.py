"""The state of a rank, as a value that is sent: whether it can continue by itself, and its operations so far."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

WORLD_OF_ONE = "0:0"
"""The key of a default group of one rank."""
_TENSOR = re.compile(r"(\w+)\[([^\]]*)\](?: with strides \[([^\]]*)\])?")


@dataclass(frozen=True)
class Operation:
    """A collective that a rank has issued, such as an ``all_reduce`` of ``float32[4, 3]`` by ``SUM``.

    Its tensors are its inputs, or its outputs if it has no input. It is pending until it completes here. The root is a
    rank of the group. The public name, whether a wait for it failed, and the serial number are known only of
    collectives that Python issued. Serial numbers order the collectives of a rank in all groups.
    """

    name: str
    tensors: str = ""
    pending: bool = False
    root: int = -1
    reduce_op: str = ""
    from_python: bool = True
    serial: int = -1

    @property
    def amounts(self) -> list[tuple[str, int]]:
        """Dtype and number of elements of each tensor, which must match on all ranks. Shapes may differ."""
        return [
            (dtype, math.prod(int(size) for size in sizes.split(",") if size.strip()))
            for dtype, sizes, _ in _TENSOR.findall(self.tensors)
        ]

    @property
    def layouts(self) -> list[tuple[str, str]]:
        """Shape and strides of each tensor, as text; empty for contiguous tensors, and for collectives of C++."""
        return [(sizes, strides) for _, sizes, strides in _TENSOR.findall(self.tensors)]

    def __str__(self) -> str:
        tensors = f" of {self.tensors}" if self.tensors else ""
        reduce_op = f" by {self.reduce_op}" if self.reduce_op not in ("", "SUM") else ""
        return f"{self.name}{tensors}{reduce_op}{f' with root {self.root}' if self.root >= 0 else ''}"


@dataclass(frozen=True)
class Messages:
    """The messages between a rank and one peer, of one kind and tag: their number, and the latest as text."""

    count: int = 0
    latest: Sequence[str] = ()

    def text(self, number: int) -> str | None:
        """Return the tensors of message ``number`` (from 0) as text, such as ``"float32[4]"``; None if forgotten."""
        place = number - (self.count - len(self.latest))
        return self.latest[place] if 0 <= place < len(self.latest) else None


@dataclass(frozen=True)
class GroupState:
    """The operations of a rank in one process group: its number of collectives, and the latest by number, from 1.

    Members are ranks of the default group. Messages have keys such as ``"send 3 0"``: kind, peer in the default group
    (-1 for any), tag. The checksum is equal on ranks that issued the same collectives; None if it is unknown. After the
    first collective that may have failed here (0 for none), ranks may issue different ones.
    """

    label: str
    members: Sequence[int]
    issued: int
    operations: Mapping[int, Operation] = field(default_factory=dict)
    messages: Mapping[str, Messages] = field(default_factory=dict)
    checksum: int | None = None
    failed: int = 0
    messages_failed: bool = False


@dataclass(frozen=True)
class Awaited:
    """The wait of one thread of a rank.

    The kind is ``"collective"`` (all those pending), ``"store"``, ``"group"`` (its creation), ``"send"`` or ``"recv"``.
    A message has the key of its group, a peer in the default group (-1 for any), and the number of earlier messages of
    its kind. A group has its key, and the number of times that this rank made it before.
    """

    kind: str
    group: str = ""
    peer: int = -1
    tag: int = 0
    number: int = 0


@dataclass(frozen=True)
class RankState:
    """The state of a rank at one moment, and its operations in each process group, by a key that all members share.

    It has finished if it will issue no more operations. It waits for nothing if a thread may continue, or if its state
    is unknown. Fingerprints of two moments are equal only if no thread ran in between. Its children are processes that
    it started and that still run. ``begun`` counts how often it entered the constructor of a group, by key and place
    among the members, such as ``"0:0,1 1"``. The test's clock is stopped while it imports, which is reported only once
    its test has begun.
    """

    finished: bool = False
    awaited: tuple[Awaited, ...] = ()
    fingerprint: str = ""
    groups: Mapping[str, GroupState] = field(default_factory=dict)
    stacks: str = ""
    has_children: bool = False
    begun: Mapping[str, int] = field(default_factory=dict)
    importing: bool | None = False

    def to_message(self) -> dict[str, Any]:
        """Return the state as a JSON object."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> RankState:
        """Make a state from the result of `to_message`, ignoring other keys."""
        awaited = tuple(Awaited(**one) for one in message["awaited"])
        groups = {key: _group(**one) for key, one in message["groups"].items()}
        plain = {
            name: message[name] for name in ("finished", "fingerprint", "stacks", "has_children", "begun", "importing")
        }
        return cls(awaited=awaited, groups=groups, **plain)


def _group(*, operations: Mapping[str, Any], messages: Mapping[str, Any], **others: Any) -> GroupState:  # noqa: ANN401
    return GroupState(
        operations={int(number): Operation(**one) for number, one in operations.items()},
        messages={key: Messages(**one) for key, one in messages.items()},
        **others,
    )


def group_key(name: str, members: Iterable[int]) -> str:
    """Return the key of a process group, from its name and its ranks as numbered in the default group."""
    return f"{name}:{','.join(map(str, members))}"


def group_members(key: str) -> tuple[int, ...]:
    """Return the ranks in a key that `group_key` returned."""
    return tuple(int(text) for text in key.rpartition(":")[2].split(",") if text)


def group_label(key: str, world_size: int) -> str:
    """Return the name of a group for reports, given the size of the default group, whose name is ``"0"``."""
    members = group_members(key)
    if key.startswith("0:") and len(members) == world_size:
        return "the default group"
    return f"the group of rank{'s' * (len(members) > 1)} {', '.join(map(str, members))}"

"""What a rank is doing, as a value that travels: whether it can move on by itself, and what it has issued so far."""

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

    Its tensors are its input, or its output where it takes none. It is pending until it completes here. The root
    is a rank of the group. Only of what Python issued is the public name known, whether waiting for it failed, and the
    serial number, by which a rank's collectives in all groups are in order.
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
        """Dtype and number of elements of each tensor: what has to match, whatever the shapes."""
        return [
            (dtype, math.prod(int(size) for size in sizes.split(",") if size.strip()))
            for dtype, sizes, _ in _TENSOR.findall(self.tensors)
        ]

    @property
    def layouts(self) -> list[tuple[str, str]]:
        """Shape and strides of each tensor, as text: none of what is contiguous, and of what C++ has issued."""
        return [(sizes, strides) for _, sizes, strides in _TENSOR.findall(self.tensors)]

    def __str__(self) -> str:
        tensors = f" of {self.tensors}" if self.tensors else ""
        reduce_op = f" by {self.reduce_op}" if self.reduce_op not in ("", "SUM") else ""
        return f"{self.name}{tensors}{reduce_op}{f' with root {self.root}' if self.root >= 0 else ''}"


@dataclass(frozen=True)
class Messages:
    """The messages between a rank and one peer, of one kind and tag: how many, and the latest, as ``"float32[4]"``."""

    count: int = 0
    latest: Sequence[str] = ()

    def text(self, number: int) -> str | None:
        """Return what message ``number`` (from 0) carries, None if that is not known any more."""
        place = number - (self.count - len(self.latest))
        return self.latest[place] if 0 <= place < len(self.latest) else None


@dataclass(frozen=True)
class GroupState:
    """What a rank has done in one process group: how many collectives it has issued, and the latest by number, from 1.

    Members are ranks of the default group. Messages have keys such as ``"send 3 0"``: kind, peer in the default group
    (-1 for any), tag. The checksum is the same on ranks that have issued the same collectives, None if it is not known.
    From the first collective on that may have failed here (0 for none), ranks may rightly have issued different ones.
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
    """What one thread of a rank waits for.

    The kind is ``"collective"`` (all those pending), ``"store"``, ``"group"`` (its creation), ``"send"`` or ``"recv"``.
    A message has the key of its group, a peer in the default group (-1 for any), and how many alike came before it; a
    group that is being made has its key, and how often this rank had made it before.
    """

    kind: str
    group: str = ""
    peer: int = -1
    tag: int = 0
    number: int = 0


@dataclass(frozen=True)
class RankState:
    """What a rank was doing at one moment, and what it did in each process group, by a key that all members share.

    It has finished if it issues nothing any more. Nothing is awaited when a thread may continue, or when nothing
    is known. Fingerprints of two moments are equal only if no thread has moved in between. Its children are processes
    that it has started and that still run. What it has begun are groups: how often it has entered their constructor, by
    key and its place among the members, such as ``"0:0,1 1"``. While it imports, which is not told
    of it before its test begins, the test's clock stands still.
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
        """Read what `to_message` made, ignoring other keys."""
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
    """Return the ranks that a key of `group_key` names."""
    return tuple(int(text) for text in key.rpartition(":")[2].split(",") if text)


def group_label(key: str, world_size: int) -> str:
    """Return what to call a group, given the number of ranks of the default group, whose name is ``"0"``."""
    members = group_members(key)
    if key.startswith("0:") and len(members) == world_size:
        return "the default group"
    return f"the group of rank{'s' * (len(members) > 1)} {', '.join(map(str, members))}"

"""What a rank is doing, as a value that travels: whether it can move on by itself, and what it has issued so far."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

_TENSOR = re.compile(r"(\w+)\[([^\]]*)\]")


@dataclass(frozen=True)
class Operation:
    """A collective that a rank has issued.

    Attributes:
        name: Such as ``"all_reduce"``.
        tensors: Its input, such as ``"float32[4, 3]"``, or its output where it takes none; empty without tensors.
        pending: Whether it is still to complete on this rank.
        root: The root's rank in the group, -1 where there is none or it is not known.
        reduce_op: Such as ``"SUM"``, empty where there is none or it is not known.
        from_python: Whether Python issued it, so that its public name is known, and whether waiting for it failed.
    """

    name: str
    tensors: str = ""
    pending: bool = False
    root: int = -1
    reduce_op: str = ""
    from_python: bool = True

    @property
    def amounts(self) -> list[tuple[str, int]]:
        """Dtype and number of elements of each tensor: what has to match, whatever the shapes.

        >>> Operation("all_reduce", "float32[4, 3], int64[]").amounts
        [('float32', 12), ('int64', 1)]
        """
        return [
            (dtype, math.prod(int(size) for size in sizes.split(",") if size.strip()))
            for dtype, sizes in _TENSOR.findall(self.tensors)
        ]

    def __str__(self) -> str:
        tensors = f" of {self.tensors}" if self.tensors else ""
        reduce_op = f" by {self.reduce_op}" if self.reduce_op not in ("", "SUM") else ""
        return f"{self.name}{tensors}{reduce_op}{f' with root {self.root}' if self.root >= 0 else ''}"


@dataclass(frozen=True)
class Messages:
    """The messages between a rank and one peer, of one kind and tag.

    Attributes:
        count: How many were issued.
        latest: The latest of them, such as ``"float32[4]"``.
    """

    count: int = 0
    latest: tuple[str, ...] = ()

    def text(self, number: int) -> str | None:
        """Return what message ``number`` (from 0) carries, None if that is not known any more."""
        place = number - (self.count - len(self.latest))
        return self.latest[place] if 0 <= place < len(self.latest) else None


@dataclass(frozen=True)
class GroupState:
    """What a rank has done in one process group.

    Attributes:
        label: The group's name for people.
        members: Its ranks, as numbered in the default group.
        issued: Number of collectives issued there.
        operations: The latest of them by sequence number, which starts at 1.
        messages: Point-to-point messages by ``"send 3 0"``: kind, peer in the default group (-1 for any), tag.
        checksum: The same number on ranks that have issued the same collectives; None if it is not known.
        failed: Number of the first collective that may have ended with an exception here, 0 for none: from there on
            ranks may rightly have issued different ones.
        messages_failed: Whether waiting for a message has ended with an exception.
    """

    label: str
    members: tuple[int, ...]
    issued: int
    operations: Mapping[int, Operation] = field(default_factory=dict)
    messages: Mapping[str, Messages] = field(default_factory=dict)
    checksum: int | None = None
    failed: int = 0
    messages_failed: bool = False


@dataclass(frozen=True)
class Awaited:
    """What one thread of a rank waits for.

    Attributes:
        kind: ``"collective"`` (all those pending), ``"send"``, ``"recv"``, ``"store"`` or ``"group"`` (its creation).
        group: Key of the message's group, empty for other kinds.
        peer: The message's other end in the default group, -1 for any.
        tag: The message's tag.
        number: How many alike were issued before it.
    """

    kind: str
    group: str = ""
    peer: int = -1
    tag: int = 0
    number: int = 0


@dataclass(frozen=True)
class RankState:
    """What a rank was doing at one moment.

    Attributes:
        finished: Whether its test has ended, so that it issues nothing any more.
        awaited: What its threads wait for, when all of them wait for other ranks; empty when one of them may go on by
            itself, or when nothing is known.
        fingerprint: Equal at two moments only if no thread has moved in between.
        groups: What it did in each process group, by a key that all members share.
        stacks: The Python stacks of its threads, if they were asked for.
    """

    finished: bool = False
    awaited: tuple[Awaited, ...] = ()
    fingerprint: str = ""
    groups: Mapping[str, GroupState] = field(default_factory=dict)
    stacks: str = ""

    def to_message(self) -> dict[str, Any]:
        """Return the state as a JSON object."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> RankState:
        """Read what `to_message` made, ignoring other keys."""
        values = {part.name: message[part.name] for part in fields(cls)}
        values["awaited"] = tuple(Awaited(**one) for one in values["awaited"])
        values["groups"] = {key: _group(one) for key, one in values["groups"].items()}
        return cls(**values)


def _group(values: Mapping[str, Any]) -> GroupState:
    operations = {int(number): Operation(**one) for number, one in values["operations"].items()}
    messages = {key: Messages(one["count"], tuple(one["latest"])) for key, one in values["messages"].items()}
    return GroupState(**{**values, "members": tuple(values["members"]), "operations": operations, "messages": messages})


def group_key(name: str, members: Iterable[int]) -> str:
    """Return the key of a process group, from its name and its ranks as numbered in the default group."""
    return f"{name}:{','.join(map(str, members))}"


def group_members(key: str) -> tuple[int, ...]:
    """Return the ranks that a key of `group_key` names.

    >>> group_members(group_key("7", [0, 2]))
    (0, 2)
    """
    return tuple(int(text) for text in key.rpartition(":")[2].split(",") if text)


def group_label(key: str, world_size: int) -> str:
    """Return what to call a group, given the number of ranks of the default group, whose name is ``"0"``."""
    members = group_members(key)
    if key.startswith("0:") and len(members) == world_size:
        return "the default group"
    return f"the group of ranks {', '.join(map(str, members))}"

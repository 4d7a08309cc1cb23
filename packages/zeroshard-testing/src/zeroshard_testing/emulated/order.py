"""Describes the operations that the ranks of a group are about to run, and finds differences between ranks.

The functions are pure: each rank calls `describe`, and then `find_difference` with the descriptions of all ranks, so
all ranks compute the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from typing import Any

import torch

from zeroshard_testing.rank_state import group_label, group_members
from zeroshard_testing.wait_recorder import described

REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
EXCHANGES = ("all_gather", "all_gather_into_tensor", "gather", "scatter", "all_to_all", "all_to_all_single")
_OTHERS = ("broadcast", "barrier")
_REDUCE_OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
_INTEGERS = (torch.bool, torch.int8, torch.uint8, torch.int32, torch.int64)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
_SAME_ELEMENTS = ("all_reduce", "reduce", "broadcast", "gather", "all_gather_into_tensor")
_SAME_ELEMENTS_OUT = ("scatter", "reduce_scatter_tensor")
_END = "end"
Recall = Callable[[str, int], Sequence[str]]
_CALLS_SHOWN = 3


@dataclass(frozen=True)
class Call:
    """A collective or message of a rank. The root is a rank of the group; for a message it is the peer.

    Inputs are private copies. Sizes are the splits of an ``all_to_all_single``, output first, or a message's tag.
    """

    name: str
    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]
    root: int = -1
    reduce_op: str = ""
    sizes: Sequence[int] = ()


@dataclass(frozen=True)
class CallRecord:
    """The description of a collective for other ranks: a text, and the values that must match.

    ``common`` must be equal on all ranks. ``gives`` and ``takes`` are numbers of elements by rank of the group: a rank
    must take as many as the other one gives. A problem says why the collective cannot run, whatever others issue.
    """

    text: str
    common: str
    gives: tuple[int, ...] = ()
    takes: tuple[int, ...] = ()
    problem: str = ""


@dataclass(frozen=True)
class Entry:
    """One step of a rank in a group: a collective, several that were coalesced, or the end of its test.

    The rank is a rank of the default group. The number counts the collectives of the group from 1. ``issued_before``
    counts the earlier collectives of the rank in other groups, by the key of the group.
    """

    rank: int
    number: int
    calls: tuple[CallRecord, ...]
    call_site: str
    issued_before: Mapping[str, int] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The collective as text."""
        if len(self.calls) == 1:
            return self.calls[0].text
        shown = "; ".join(call.text for call in self.calls[:_CALLS_SHOWN])
        more = f"; and {len(self.calls) - _CALLS_SHOWN} more" if len(self.calls) > _CALLS_SHOWN else ""
        return f"a batch of {len(self.calls)} ({shown}{more})"

    @property
    def is_end(self) -> bool:
        """True if the rank has ended its test, and issues nothing."""
        return self.calls[0].common == _END

    def to_message(self) -> dict[str, Any]:
        """Return the entry as a JSON object."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Entry:
        """Make an entry from the result of `to_message`."""
        calls = [
            CallRecord(**{**call, "gives": tuple(call["gives"]), "takes": tuple(call["takes"])})
            for call in message["calls"]
        ]
        return cls(**{**message, "calls": tuple(calls)})


@dataclass(frozen=True)
class Message:
    """A tensor that one rank sends to another, as its sender or its receiver describes it."""

    rank: int
    tensor: str
    dtype: str
    elements: int
    tag: int
    call_site: str


def describe(call: Call, group_rank: int, ranks: Sequence[int]) -> CallRecord:
    """Return the description of a collective that a rank issues in a group of these ranks."""
    text = _text_of(call, ranks)
    tensors = [*call.inputs, *call.outputs]
    problem = _problem_of(call)
    gives: Sequence[int] = ()
    takes: Sequence[int] = ()
    if not problem:
        try:
            gives, takes = amounts(call, group_rank, len(ranks))
        except ValueError as error:
            problem = str(error)
    common = [call.name, call.reduce_op, str(call.root), *sorted({str(tensor.dtype) for tensor in tensors})]
    if call.name in _SAME_ELEMENTS:
        common.append(str(tensors[0].numel()))
    elif call.name in _SAME_ELEMENTS_OUT:
        common.append(str(tensors[-1].numel()))
    return CallRecord(text, " ".join(common), tuple(gives), tuple(takes), problem)


def end_of(what: str) -> CallRecord:
    """Return the entry of a rank that issues no more collectives, such as ``"the end of the test"``."""
    return CallRecord(what, _END)


def amounts(call: Call, group_rank: int, size: int) -> tuple[Sequence[int], Sequence[int]]:
    """Return the number of elements that a collective sends from this rank to each rank, and from each to this one.

    Both are empty if every rank must have the same number of elements.

    Raises:
        ValueError: If the tensors do not have the numbers or sizes that the collective needs.
    """
    given = [tensor.numel() for tensor in call.inputs]
    taken = [tensor.numel() for tensor in call.outputs]
    if call.name == "all_to_all_single":
        return _splits(call.inputs[0], call.sizes[size:], size), _splits(call.outputs[0], call.sizes[:size], size)
    if call.name in ("all_gather", "all_gather_into_tensor"):
        given *= size
    elif call.name in ("reduce_scatter", "reduce_scatter_tensor"):
        taken *= size
    elif call.name == "gather":
        given = [given[0] if rank == call.root else 0 for rank in range(size)]
        taken = taken if group_rank == call.root else [0] * size
    elif call.name == "scatter":
        given = given if group_rank == call.root else [0] * size
        taken = [taken[0] if rank == call.root else 0 for rank in range(size)]
    elif call.name != "all_to_all":
        return (), ()
    if call.name == "all_gather_into_tensor":
        taken = _equal_parts(taken[0], size)
    elif call.name == "reduce_scatter_tensor":
        given = _equal_parts(given[0], size)
    if len(given) != size or len(taken) != size:
        raise ValueError(f"it needs one tensor for each of {size} ranks")
    return given, taken


def find_difference(key: str, entries: Sequence[Entry], recall: Recall | None = None) -> str | None:
    """Return how the next operations of the ranks of a group differ, as text; None if they match.

    Args:
        key: The key of the group, from `group_key`.
        entries: The next operation of each rank, in the order of the group's ranks.
        recall: Called with another group and a number, equal on all ranks. Returns the text of that collective with its
            call site on each rank of this group, empty for a rank that has not issued it.
    """
    which = f"collective number {entries[0].number} of {_label(key)}"
    if len({(entry.is_end, len(entry.calls)) for entry in entries}) > 1:
        return f"ranks differ in {which}: {_each(entries, lambda entry: entry.text)}"
    for place, calls in enumerate(zip(*(entry.calls for entry in entries), strict=True)):
        batch = f", call {place + 1} of a batch of {len(entries[0].calls)}" if len(entries[0].calls) > 1 else ""
        # Names the call of each rank; ranks with the same text and call site are named together.
        told = _each(entries, lambda entry, place=place: entry.calls[place].text)  # type: ignore[misc]
        for entry, call in zip(entries, calls, strict=True):
            if call.problem:
                return f"{which}{batch} cannot run on rank {entry.rank} ({call.problem}): {told}"
        if len({call.common for call in calls}) > 1:
            return f"ranks differ in {which}{batch}: {told}"
        if misfit := _find_misfit(entries, calls):
            return f"ranks differ in {which}{batch}: {misfit}: {told}"
    return _find_other_order(key, entries, recall)


def find_message_difference(key: str, sent: Message, received: Message) -> str | None:
    """Return how a message differs from what its receiver expects, as text; None if it does not."""
    how = "as"
    if (sent.dtype, sent.elements) == (received.dtype, received.elements):
        if sent.tag == received.tag:
            return None
        # NCCL ignores tags, so another order of tags is another order of messages.
        how = f"with tag {sent.tag}, which NCCL ignores, and with tag {received.tag} as"
    return (
        f"rank {sent.rank} sends {sent.tensor} ({sent.call_site}), and rank {received.rank} receives it {how}"
        f" {received.tensor} ({received.call_site}), in {_label(key)}"
    )


def message_text(call: Call, ranks: Sequence[int]) -> str:
    """Return a message as text."""
    direction = "to" if call.name == "send" else "from"
    return f"{call.name} of {described([*call.inputs, *call.outputs])} {direction} rank {ranks[call.root]}"


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks as text, such as ``"rank 1"`` and ``"ranks 0, 2"``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def located(text: str, call_site: str) -> str:
    """Return text with its call site, if that is known."""
    return f"{text} ({call_site})" if call_site else text


def _label(key: str) -> str:
    # Only the default group has the name "0", and it has all ranks.
    return group_label(key, len(group_members(key)))


def _text_of(call: Call, ranks: Sequence[int]) -> str:
    text = call.name
    if call.inputs or call.outputs:
        text += f" of {described(list(call.inputs or call.outputs))}"
    if call.inputs and call.outputs and call.name not in ("all_reduce", "reduce"):
        text += f" into {described(list(call.outputs))}"
    if call.name == "all_to_all_single" and call.sizes:
        half = len(call.sizes) // 2
        text += f", split into {list(call.sizes[half:])} and from {list(call.sizes[:half])}"
    if call.reduce_op:
        text += f" by {call.reduce_op}"
    if 0 <= call.root < len(ranks):
        text += f" {'to' if call.name in ('reduce', 'gather') else 'from'} rank {ranks[call.root]}"
    return text


def _problem_of(call: Call) -> str:
    """Return why a collective cannot run, judged by this rank's arguments only; empty if it can."""
    dtypes = {tensor.dtype for tensor in (*call.inputs, *call.outputs)}
    if call.name not in (*REDUCTIONS, *EXCHANGES, *_OTHERS):
        return f"the emulated accelerator does not support the collective {call.name!r}"
    if len(dtypes) > 1:
        return "its tensors have different dtypes"
    if call.name in REDUCTIONS:
        (dtype,) = dtypes
        if call.reduce_op not in _REDUCE_OPS:
            return f"the emulated accelerator does not support reduce operation {call.reduce_op or 'none'!r}"
        if dtype not in (*_INTEGERS, *_FLOATS):
            return f"gloo does not reduce {str(dtype).removeprefix('torch.')}"
        if call.reduce_op == "AVG" and dtype in _INTEGERS:
            return "AVG does not support integers"
        if call.reduce_op.startswith("B") and dtype in _FLOATS:
            return f"{call.reduce_op} supports only integers"
    return ""


def _splits(tensor: torch.Tensor, sizes: Sequence[int], size: int) -> list[int]:
    if not sizes:
        return _equal_parts(tensor.numel(), size)
    rows = tensor.shape[0] if tensor.dim() else 1
    if len(sizes) != size or sum(sizes) != rows:
        raise ValueError(f"splits must be {size} numbers that add up to {rows}, not {list(sizes)}")
    return [number * tensor.numel() // max(rows, 1) for number in sizes]


def _equal_parts(elements: int, size: int) -> list[int]:
    if elements % size:
        raise ValueError(f"{elements} elements cannot be divided into {size} equal parts")
    return [elements // size] * size


def _find_misfit(entries: Sequence[Entry], calls: Sequence[CallRecord]) -> str | None:
    for giver, given in enumerate(calls):
        for taker, taken in enumerate(calls):
            if given.gives and given.gives[taker] != taken.takes[giver]:
                one, other = entries[giver].rank, entries[taker].rank
                number = given.gives[taker]
                return (
                    f"rank {one} has {number} element{'' if number == 1 else 's'} for rank {other},"
                    f" which takes {taken.takes[giver]}"
                )
    return None


def _find_other_order(key: str, entries: Sequence[Entry], recall: Recall | None) -> str | None:
    """Describe two collectives, of this group and another, that two ranks issue in different orders.

    Both groups find the same two collectives by their own entries, and compute the same text.
    """
    for one, other in combinations(entries, 2):
        for group in sorted(one.issued_before.keys() & other.issued_before.keys()):
            early, late = sorted((other, one), key=lambda entry: -entry.issued_before[group])
            number = late.issued_before[group] + 1
            if early.issued_before[group] >= number and {one.rank, other.rank} <= set(group_members(group)):
                recalled = recall(group, number)[entries.index(early)] if recall else ""
                first = {
                    early.rank: f"{recalled or 'a collective'}, number {number} of {_label(group)}",
                    late.rank: f"{located(late.text, late.call_site)}, number {late.number} of {_label(key)}",
                }
                told = " and ".join(f"rank {rank} first issues {first[rank]}" for rank in sorted(first))
                return (
                    f"ranks {one.rank} and {other.rank} issue collectives of two groups in different orders:"
                    f" {told}; NCCL may hang"
                )
    return None


def _each(entries: Iterable[Entry], text_of: Callable[[Entry], str]) -> str:
    """Return the next operation of each rank as text. Ranks with the same text and call site are named together."""
    groups: dict[tuple[bool, str], list[int]] = {}
    for entry in entries:
        groups.setdefault((entry.is_end, located(text_of(entry), entry.call_site)), []).append(entry.rank)
    parts = []
    for (is_end, text), ranks in groups.items():
        one = len(ranks) == 1
        verb = ("is at" if one else "are at") if is_end else ("issues" if one else "issue")
        parts.append(f"{ranks_text(ranks)} {verb} {text}")
    return ", ".join(parts)

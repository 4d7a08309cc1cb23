"""Whether ranks wait for one another for ever: pure functions over what each of them was doing at one moment.

The proof: at one moment every rank that still runs waits, and what each of them waits for has not been issued by those
who would have to. They all wait or have ended, so none of them ever will. Where it is not known what a rank waits for,
or what another has issued, there is no proof.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from zeroshard_testing.rank_state import Awaited, GroupState, Operation, RankState, comparable


@dataclass(frozen=True)
class Deadlock:
    """A proof that ranks wait for ever.

    Attributes:
        reasons: Why each stuck rank can never go on, in words, by rank.
    """

    reasons: Mapping[int, str]


def find_deadlock(states: Mapping[int, RankState]) -> Deadlock | None:
    """Prove that no rank which still runs can ever go on, or return None.

    Args:
        states: What each rank was doing, at a moment when all that wait did so at once.
    """
    running = {rank for rank, state in states.items() if not state.finished}
    if not running or not all(states[rank].awaited for rank in running):
        return None
    reasons: dict[int, str] = {}
    for rank in running:
        found = [_never_comes(awaited, rank, states) for awaited in states[rank].awaited]
        for text in found:
            if text is None:
                return None
            reasons.setdefault(rank, text)
    return Deadlock(reasons)


def find_mismatch(states: Mapping[int, RankState]) -> str | None:
    """Return, in words, the first collective that ranks of a group have issued differently, None if there is none.

    Args:
        states: What each rank has issued.
    """
    for key, members in _groups(states):
        for number in sorted({number for rank in members for number in states[rank].groups[key].operations}):
            issued = {
                rank: operation
                for rank in members
                if (operation := states[rank].groups[key].operations.get(number)) is not None
            }
            first = min(issued)
            for rank, operation in sorted(issued.items()):
                if _differ(operation, issued[first]):
                    label = states[rank].groups[key].label
                    return (
                        f"rank {first} is in {issued[first]}, rank {rank} in {operation}, as collective #{number} of "
                        f"{label}"
                    )
    return None


def find_unmatched(states: Mapping[int, RankState]) -> dict[int, str]:
    """Return, in words and by rank, where ranks that have all finished issued fewer or other collectives than a member.

    Args:
        states: What each rank has issued.
    """
    found: dict[int, str] = {}
    if any(state.disturbed for state in states.values()):
        return found
    for key, members in _groups(states):
        most = max(members, key=lambda rank: (states[rank].groups[key].issued, -rank))
        group = states[most].groups[key]
        if len(members) < len(group.members) or not all(states[rank].groups[key].lasting for rank in members):
            continue
        for rank in members:
            there = states[rank].groups[key]
            if there.issued < group.issued:
                found[rank] = f"returned without {_name(group, there.issued + 1)}, which rank {most} has issued"
            elif there.digest != group.digest and comparable(there.digest, group.digest):
                what = find_mismatch(states) or f"the ranks have issued different collectives in {group.label}"
                found[rank] = f"passed, but {what}"
    return found


def _groups(states: Mapping[int, RankState]) -> Iterator[tuple[str, list[int]]]:
    keys = dict.fromkeys(key for _, state in sorted(states.items()) for key in state.groups)
    for key in keys:
        yield key, [rank for rank, state in sorted(states.items()) if key in state.groups]


def _differ(one: Operation, other: Operation) -> bool:
    if one.name != other.name or (one.root != other.root and min(one.root, other.root) >= 0):
        return True
    # Of other collectives the ranks' own tensors may differ, or the recorder shows the root's only.
    return one.name in ("all_reduce", "broadcast") and one.amounts != other.amounts


def _never_comes(awaited: Awaited, rank: int, states: Mapping[int, RankState]) -> str | None:
    """Say why what a rank waits for never comes if nobody issues anything more; None if it may come."""
    if awaited.kind == "collective":
        return _collectives_never_complete(rank, states)
    if awaited.kind in ("send", "recv"):
        return _message_never_comes(awaited, rank, states)
    others = [other for other in states if other != rank]
    if any(one.kind in ("store", "group") for other in others for one in states[other].awaited):
        # Two ranks that meet over a store may be about to find each other.
        return None
    what = "a key of a store" if awaited.kind == "store" else "the other ranks of a new process group"
    return f"stuck waiting for {what}: {_fates(others, states)}"


def _collectives_never_complete(rank: int, states: Mapping[int, RankState]) -> str | None:
    """Whether every pending collective of a rank lacks a member, or meets another collective there."""
    reasons = []
    for key, group in states[rank].groups.items():
        for number, operation in sorted(group.operations.items()):
            if operation.pending:
                reason = _lacks(key, number, operation, rank, states)
                if reason is None:
                    return None
                reasons.append(reason)
    return reasons[0] if reasons else None


def _lacks(key: str, number: int, operation: Operation, rank: int, states: Mapping[int, RankState]) -> str | None:
    here = states[rank].groups[key]
    what = _name(here, number)
    for member in here.members:
        there = states[member].groups.get(key) if member in states else None
        if member == rank or there is None:
            continue
        other = there.operations.get(number)
        if other is not None and _differ(operation, other):
            return f"stuck in {what}: rank {member} is in {other} there"
        if there.issued < number:
            return f"stuck in {what}: rank {member} never joins, it {_fate(member, states)}"
    return None


def _message_never_comes(awaited: Awaited, rank: int, states: Mapping[int, RankState]) -> str | None:
    answer = "send" if awaited.kind == "recv" else "recv"
    senders = [other for other in states if other != rank] if awaited.peer < 0 else [awaited.peer]
    issued = 0
    for peer in senders:
        there = states[peer].groups.get(awaited.group) if peer in states else None
        if there is None:
            return None
        # A receive from anyone may take the message as well.
        issued += there.messages.get(f"{answer} {rank} {awaited.tag}", 0)
        issued += there.messages.get(f"{answer} -1 {awaited.tag}", 0)
    here = states[rank].groups.get(awaited.group)
    if here is None or issued > awaited.number:
        return None
    tag = f" with tag {awaited.tag}" if awaited.tag else ""
    if awaited.kind == "send":
        what = f"stuck waiting for rank {awaited.peer} to receive message {awaited.number + 1}{tag} in {here.label}"
    else:
        source = "anyone" if awaited.peer < 0 else f"rank {awaited.peer}"
        what = f"stuck waiting for message {awaited.number + 1} from {source}{tag} in {here.label}"
    return f"{what}: {_fates(senders, states)}"


def _name(group: GroupState, number: int) -> str:
    operation = group.operations.get(number)
    if operation is None:
        return f"collective #{number} of {group.label}"
    return f"{operation.name} (collective #{number} of {group.label}{_tensors(operation)})"


def _tensors(operation: Operation) -> str:
    return f", {operation.tensors}" if operation.tensors else ""


def _fate(rank: int, states: Mapping[int, RankState]) -> str:
    return "has ended" if states[rank].finished else "waits for something else"


def _fates(ranks: list[int], states: Mapping[int, RankState]) -> str:
    return ", ".join(f"rank {rank} {_fate(rank, states)}" for rank in ranks) or "there is nobody else"

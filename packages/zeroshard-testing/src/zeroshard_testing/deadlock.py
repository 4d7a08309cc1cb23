"""Decides whether ranks wait for each other forever: pure functions over the states of all ranks at one moment.

The proof: at one moment every rank that still runs waits, and the ranks that would have to issue the awaited operations
have not issued them. They wait or have ended, so they never will. If it is unknown what a rank waits for, or what
another rank has issued, there is no proof.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from zeroshard_testing.issued import differ, name_of
from zeroshard_testing.rank_state import Awaited, Operation, RankState, group_members


def find_deadlock(states: Mapping[int, RankState]) -> dict[int, str]:
    """Prove from the states at one moment that no rank that still runs can ever continue.

    Return the reason for each of these ranks, as text by rank; an empty mapping if there is no proof.
    """
    running = {rank: state.awaited for rank, state in states.items() if not state.finished}
    if not all(running.values()):
        return {}
    reasons: dict[int, str] = {}
    for rank, waits in running.items():
        for awaited in waits:
            text = _never_comes(awaited, rank, states)
            if text is None:
                return {}
            reasons.setdefault(rank, text)
    return reasons


def _never_comes(awaited: Awaited, rank: int, states: Mapping[int, RankState]) -> str | None:
    """Return why a rank's wait never ends if no rank issues anything more; None if it may end."""
    if awaited.kind == "collective":
        return _collectives_never_complete(rank, states)
    if awaited.kind in ("send", "recv"):
        return _message_never_comes(awaited, rank, states)
    if any(state.has_children for state in states.values()):
        # A process that a rank has started may set the key, or be a member of the group.
        return None
    if awaited.kind == "group":
        return _group_is_never_made(awaited, states)
    others = [other for other in states if other != rank]
    if any(one.kind in ("store", "group") for other in others for one in states[other].awaited):
        # Two ranks that both wait for the store may be about to find each other.
        return None
    return f"stuck waiting for a key of a store: {_fates(others, states)}"


def _group_is_never_made(awaited: Awaited, states: Mapping[int, RankState]) -> str | None:
    """Return why the group that a rank is making is never made: a member has not begun; None if it may be made."""
    # Each time that the group is made, every member takes its place.
    begun = sum((Counter(state.begun) for state in states.values()), Counter[str]())
    members = enumerate(group_members(awaited.group))
    absent = [member for place, member in members if begun[f"{awaited.group} {place}"] <= awaited.number]
    if not absent:
        return None
    known = [member for member in absent if member in states]
    return f"stuck waiting for the other ranks of a new process group: {_fates(known, states)}"


def _collectives_never_complete(rank: int, states: Mapping[int, RankState]) -> str | None:
    """Return why no pending collective of a rank completes: each lacks a member, or differs there; None if one may."""
    reasons = [
        _lacks(key, number, operation, rank, states)
        for key, group in states[rank].groups.items()
        for number, operation in sorted(group.operations.items())
        if operation.pending
    ]
    return reasons[0] if reasons and None not in reasons else None


def _lacks(key: str, number: int, operation: Operation, rank: int, states: Mapping[int, RankState]) -> str | None:
    here = states[rank].groups[key]
    what = name_of(here, number)
    for member in here.members:
        there = states[member].groups.get(key) if member in states else None
        if member == rank or there is None:
            continue
        other = there.operations.get(number)
        if other is not None and differ(operation, other):
            return f"stuck in {what}: rank {member} is in {other} there"
        # A rank may already be in a call that torch has not numbered yet.
        if other is None and there.issued < number:
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
        # A receive from any source may take the message as well.
        keys = (f"{answer} {rank} {awaited.tag}", f"{answer} -1 {awaited.tag}")
        issued += sum(there.messages[key].count for key in keys if key in there.messages)
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


def _fate(rank: int, states: Mapping[int, RankState]) -> str:
    return "has ended" if states[rank].finished else "waits for something else"


def _fates(ranks: list[int], states: Mapping[int, RankState]) -> str:
    return ", ".join(f"rank {rank} {_fate(rank, states)}" for rank in ranks) or "there is no other rank"

"""What ranks have issued, compared: pure functions over what each of them did in a test that passed on all of them.

A collective that a member of its group leaves out, or issues otherwise, completes by luck or on some ranks only; a
message that nobody receives is a hang with larger tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from zeroshard_testing.rank_state import GroupState, Messages, Operation, RankState

_SAME_SIZES = ("all_reduce", "broadcast", "reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
"""Collectives for which all ranks bring as many elements; for others only the dtype must be the same."""


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
            if _may_have_failed(key, number, members, states):
                break
            for rank, operation in sorted(issued.items()):
                if differ(operation, issued[first]):
                    label = states[rank].groups[key].label
                    return (
                        f"rank {first} is in {issued[first]}, rank {rank} in {operation}, as collective #{number} of "
                        f"{label}"
                    )
    return None


def collectives_to_compare(states: Mapping[int, RankState]) -> bool:
    """Whether ranks that have finished have issued different numbers of collectives, or perhaps different ones.

    Args:
        states: What each rank has issued, without operations.
    """
    for key, members in _groups(states):
        found = {(states[rank].groups[key].issued, states[rank].groups[key].checksum) for rank in members}
        if len(members) == len(states[members[0]].groups[key].members) and (len(found) > 1 or found.pop()[1] is None):
            return True
    return False


def find_left_out(states: Mapping[int, RankState]) -> dict[int, str]:
    """Return, in words and by rank, where ranks that have all finished issued fewer or other collectives than a member.

    Args:
        states: What each rank has issued.
    """
    found: dict[int, str] = {}
    for key, members in _groups(states):
        most = max(members, key=lambda rank: (states[rank].groups[key].issued, -rank))
        group = states[most].groups[key]
        if len(members) < len(group.members):
            continue
        for rank in members:
            issued = states[rank].groups[key].issued
            if issued < group.issued and not _may_have_failed(key, issued + 1, members, states):
                found[rank] = f"returned without {name_of(group, issued + 1)}, which rank {most} has issued"
    if not found and (mismatch := find_mismatch(states)) is not None:
        found = dict.fromkeys(states, f"passed, but {mismatch}")
    return found


def find_unmatched_messages(states: Mapping[int, RankState]) -> dict[int, str]:
    """Return, in words and by rank, which messages were sent and not received, or the other way round.

    Args:
        states: What each rank has issued; all have finished.
    """
    found: dict[int, str] = {}
    for key, members in _groups(states):
        groups = {rank: states[rank].groups[key] for rank in members}
        if len(members) < len(groups[members[0]].members) or any(group.messages_failed for group in groups.values()):
            continue
        for rank, text in _unmatched_in(groups):
            found.setdefault(rank, f"passed, but {text} in {groups[rank].label}")
    return found


def differ(one: Operation, other: Operation) -> bool:
    """Whether two ranks have issued collectives that do not belong together."""
    if one.from_python == other.from_python and one.name != other.name:
        return True
    if one.from_python != other.from_python and not _same_kind(one.name, other.name):
        return True
    if one.root != other.root and min(one.root, other.root) >= 0:
        return True
    if one.reduce_op != other.reduce_op and one.reduce_op and other.reduce_op:
        return True
    if not one.amounts or not other.amounts:
        return False
    if one.name == other.name and one.name in _SAME_SIZES:
        return one.amounts != other.amounts
    # Of other collectives the ranks' own tensors may differ in size and number.
    return {dtype for dtype, _ in one.amounts} != {dtype for dtype, _ in other.amounts}


def name_of(group: GroupState, number: int) -> str:
    """Return what to call a collective of a group."""
    operation = group.operations.get(number)
    if operation is None:
        return f"collective #{number} of {group.label}"
    tensors = f", {operation.tensors}" if operation.tensors else ""
    return f"{operation.name} (collective #{number} of {group.label}{tensors})"


def _same_kind(one: str, other: str) -> bool:
    """Whether one may be what gloo runs for the other: its recorder knows an all_gather_into_tensor as all_gather."""
    shorter, longer = sorted((one.lstrip("_"), other.lstrip("_")), key=len)
    return longer.startswith(shorter) or (shorter == "all_reduce" and longer.startswith("reduce_scatter"))


def _groups(states: Mapping[int, RankState]) -> Iterator[tuple[str, list[int]]]:
    keys = dict.fromkeys(key for _, state in sorted(states.items()) for key in state.groups)
    for key in keys:
        yield key, [rank for rank, state in sorted(states.items()) if key in state.groups]


def _may_have_failed(key: str, number: int, members: list[int], states: Mapping[int, RankState]) -> bool:
    """Whether a collective, or one before it, has ended with an exception on some rank, as a test may expect."""
    return any(0 < states[rank].groups[key].failed <= number for rank in members)


def _unmatched_in(groups: Mapping[int, GroupState]) -> Iterator[tuple[int, str]]:
    """Yield ranks of a group, and what of their messages has no other end."""
    for receiver, group in groups.items():
        tags = {
            key.split()[2]
            for rank, other in groups.items()
            for key in other.messages
            if (rank == receiver and key.startswith("recv")) or key.startswith(f"send {receiver} ")
        }
        for tag in sorted(tags):
            spare = group.messages.get(f"recv -1 {tag}", Messages()).count
            for sender in groups:
                sent = groups[sender].messages.get(f"send {receiver} {tag}", Messages())
                received = group.messages.get(f"recv {sender} {tag}", Messages())
                surplus = sent.count - received.count
                if surplus < 0:
                    yield (
                        receiver,
                        f"awaits {_count(-surplus)} from rank {sender} with tag {tag}, which were never sent",
                    )
                elif surplus > spare:
                    text = f"has sent {_count(surplus - spare)} to rank {receiver} with tag {tag}"
                    yield sender, f"{text}, which were never received"
                elif not group.messages.get(f"recv -1 {tag}"):
                    difference = _other_tensors(sender, sent, receiver, received)
                    if difference is not None:
                        yield receiver, difference
                spare -= min(max(surplus, 0), spare)
            if spare:
                yield receiver, f"awaits {_count(spare)} from any rank with tag {tag}, which were never sent"


def _count(number: int) -> str:
    return "1 message" if number == 1 else f"{number} messages"


def _other_tensors(sender: int, sent: Messages, receiver: int, received: Messages) -> str | None:
    for number in range(received.count):
        one, other = sent.text(number), received.text(number)
        if one is not None and other is not None and Operation("", one).amounts != Operation("", other).amounts:
            return f"rank {sender} sends {one}, and rank {receiver} receives it as {other}, message {number + 1},"
    return None

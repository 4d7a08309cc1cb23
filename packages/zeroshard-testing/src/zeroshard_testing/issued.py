"""Compares the operations of all ranks: pure functions over the records of a test that passed on all of them.

A collective that a member of its group leaves out, or issues differently, completes by luck or on some ranks only. A
message that is never received hangs if its tensor is larger.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations, permutations

from zeroshard_testing.rank_state import (
    WORLD_OF_ONE,
    GroupState,
    Messages,
    Operation,
    RankState,
    group_key,
    group_label,
    group_members,
)

_SINGLE = ("all_reduce", "broadcast", "reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
_LISTS = ("all_gather", "reduce_scatter")
"""Collectives for which Python records the tensors of all ranks, and the flight recorder only this rank's."""
_SAME_SIZES = (*_SINGLE, *(f"{name}_coalesced" for name in _SINGLE), *_LISTS, "gather", "scatter")
"""Collectives in which all ranks must pass the same number of elements; in others only the dtype must be equal."""


def find_mismatch(states: Mapping[int, RankState], *, excuses_failures: bool = True) -> str | None:
    """Return the first collective that ranks of a group issued differently, as text; None if there is none.

    After a collective that failed, ranks may issue different ones, unless failures are no excuse.
    """
    for groups in _groups(states):
        for number in sorted({number for group in groups.values() for number in group.operations}):
            if excuses_failures and _may_have_failed(groups, number):
                break
            issued = {rank: group.operations[number] for rank, group in groups.items() if number in group.operations}
            first = min(issued)
            for rank, operation in issued.items():
                if differ(operation, issued[first]):
                    where = f"as collective #{number} of {groups[rank].label}"
                    return f"rank {first} is in {issued[first]}, rank {rank} in {operation}, {where}"
    return None


def find_unequal_groups(states: Mapping[int, RankState]) -> str | None:
    """Return a group for which ranks of one default group name different members, as text; None if there is none.

    `torch.distributed.new_group` numbers its calls, and ranks find each other by that number.
    """
    made = {rank: _numbered_groups(state) for rank, state in sorted(states.items())}
    world = {group_key("0", made)}
    if any(groups.get("0", world) != world for groups in made.values()):
        return None
    for (one, here), (other, there) in combinations(made.items(), 2):
        for number in sorted(here.keys() & there.keys(), key=int):
            ours, theirs = here[number] - there[number], there[number] - here[number]
            # A group of one rank communicates with no other, so each rank may make one of this name.
            if ours and theirs and any(len(group_members(key)) > 1 for key in ours | theirs):
                here_is, there_is = (group_label(min(keys), 0) for keys in (ours, theirs))
                text = f"group {number!r} is {here_is} on rank {one}, and {there_is} on rank {other}"
                return f"{text}: every rank must make the same calls of new_group, in the same order"
    return None


def _numbered_groups(state: RankState) -> dict[str, set[str]]:
    """Return the keys of the groups that a rank has begun to make, by name, except for names that torch hashed."""
    found: dict[str, set[str]] = {}
    for key in (begun.rpartition(" ")[0] for begun in state.begun):
        found.setdefault(key.rpartition(":")[0], set()).add(key)
    return {name: keys for name, keys in found.items() if name.isdecimal()}


def collectives_to_compare(states: Mapping[int, RankState]) -> bool:
    """Return True if finished ranks issued different numbers of collectives, or may have issued different ones."""
    for groups in _whole_groups(states):
        found = {(group.issued, group.checksum) for group in groups.values()}
        if len(found) > 1 or found.pop()[1] is None:
            return True
    return False


def find_left_out(states: Mapping[int, RankState], *, excuses_failures: bool = True) -> dict[int, str]:
    """Return the collectives that ranks left out, as text by rank, after all have ended. Failures may be an excuse."""
    found: dict[int, str] = {}
    for groups in _whole_groups(states):
        most, group = max(groups.items(), key=lambda item: item[1].issued)
        for rank, other in groups.items():
            number = other.issued + 1
            if number <= group.issued and not (excuses_failures and _may_have_failed(groups, number)):
                found[rank] = f"returned without {name_of(group, number)}, which rank {most} has issued"
    return found


def find_worlds_of_one(states: Mapping[int, RankState]) -> str | None:
    """Return a text if each of several finished ranks made a default group of only itself; None otherwise."""
    alone = [state.begun.keys() == {f"{WORLD_OF_ONE} 0"} and not state.groups for state in states.values()]
    is_found = len(alone) > 1 and all(alone)
    return f"each of {len(states)} ranks made a default group of only itself" if is_found else None


def find_crossed(states: Mapping[int, RankState]) -> str | None:
    """Return where two ranks issue collectives of shared groups in different orders, as text."""
    for one, other in combinations(sorted(states), 2):
        here, there = _serials(states[one]), _serials(states[other])
        known = here.keys() & there.keys()
        orders = sorted(known, key=here.__getitem__), sorted(known, key=there.__getitem__)
        for crossed in zip(*orders, strict=True):
            if crossed[0] != crossed[1]:
                first, second = (
                    f"{states[one].groups[key].operations[number].name} #{number} of group {key.rpartition(':')[0]!r}"
                    for key, number in crossed
                )
                return f"rank {one} issues {first} before {second}, and rank {other} after it"
    return None


def _serials(state: RankState) -> dict[tuple[str, int], int]:
    """Return the order of the collectives that Python has issued, by group and number."""
    found = (
        (key, number, one.serial) for key, group in state.groups.items() for number, one in group.operations.items()
    )
    return {(key, number): serial for key, number, serial in found if serial >= 0}


def find_unmatched_messages(states: Mapping[int, RankState]) -> dict[int, str]:
    """Return the messages of finished ranks that have no other end, as text by rank."""
    found: dict[int, str] = {}
    for groups in _whole_groups(states):
        if not any(group.messages_failed for group in groups.values()):
            for rank, text in (*_unmatched_in(groups), *_unlike_in(groups)):
                found.setdefault(rank, f"passed, but {text} in {groups[rank].label}")
    return found


def find_other_tensors(states: Mapping[int, RankState]) -> str | None:
    """Return the first message that is received with another dtype or size, as text; None if there is none."""
    found = (f"{text} in {groups[rank].label}" for groups in _groups(states) for rank, text in _unlike_in(groups))
    return next(found, None)


def differ(one: Operation, other: Operation) -> bool:
    """Return True if two ranks issued collectives that do not match."""
    same_kind = one.name == other.name or (one.from_python != other.from_python and _alike(one.name, other.name))
    other_root = one.root != other.root and min(one.root, other.root) >= 0
    other_reduce_op = one.reduce_op != other.reduce_op and one.reduce_op and other.reduce_op
    if not same_kind or other_root or other_reduce_op:
        return True
    if one.from_python != other.from_python and "complex" in one.tensors + other.tensors:
        # C++ records complex numbers as pairs of real numbers.
        return False
    if not one.amounts or not other.amounts:
        return False
    are_alike = one.from_python == other.from_python or one.name not in _LISTS
    if one.name == other.name and one.name in _SAME_SIZES and are_alike:
        return one.amounts != other.amounts or _other_strides(one, other)
    # In other collectives the ranks' own tensors may differ in size and number.
    return {dtype for dtype, _ in one.amounts} != {dtype for dtype, _ in other.amounts}


def _other_strides(one: Operation, other: Operation) -> bool:
    """Return True if tensors of one shape differ in layout and torch sends their memory unchanged; it copies lists."""
    if one.name in _LISTS or not (one.from_python and other.from_python):
        return False
    pairs = zip(one.layouts, other.layouts, strict=False)
    return any(here[0] == there[0] and here != there for here, there in pairs)


def name_of(group: GroupState, number: int) -> str:
    """Return the name of a collective of a group for reports."""
    operation = group.operations.get(number)
    if operation is None:
        return f"collective #{number} of {group.label}"
    tensors = f", {operation.tensors}" if operation.tensors else ""
    return f"{operation.name} (collective #{number} of {group.label}{tensors})"


def _alike(one: str, other: str) -> bool:
    """Return True if gloo may run one for the other: it records an all_gather_into_tensor as all_gather."""
    shorter, longer = sorted((one.lstrip("_"), other.lstrip("_")), key=len)
    return longer.startswith(shorter) or (shorter == "all_reduce" and longer.startswith("reduce_scatter"))


def _groups(states: Mapping[int, RankState]) -> Iterator[dict[int, GroupState]]:
    """Yield, for each group, the records of its members, in the order of the ranks."""
    for key in dict.fromkeys(key for _, state in sorted(states.items()) for key in state.groups):
        yield {rank: state.groups[key] for rank, state in sorted(states.items()) if key in state.groups}


def _whole_groups(states: Mapping[int, RankState]) -> Iterator[dict[int, GroupState]]:
    """Yield the groups with records of all members."""
    return (groups for groups in _groups(states) if len(groups) == len(groups[min(groups)].members))


def _may_have_failed(groups: Mapping[int, GroupState], number: int) -> bool:
    """Return True if a collective, or an earlier one, raised on a rank, which a test may expect."""
    return any(0 < group.failed <= number for group in groups.values())


def _unmatched_in(groups: Mapping[int, GroupState]) -> Iterator[tuple[int, str]]:
    """Yield ranks of a group, and their messages that have no other end."""
    for receiver, group in groups.items():
        sent_here = {key for other in groups.values() for key in other.messages if key.startswith(f"send {receiver} ")}
        received_here = {key for key in group.messages if key.startswith("recv")}
        for tag in sorted({key.split()[2] for key in sent_here | received_here}):
            from_anyone = group.messages.get(f"recv -1 {tag}", Messages())
            spare = from_anyone.count
            for sender, other in groups.items():
                sent = other.messages.get(f"send {receiver} {tag}", Messages())
                received = group.messages.get(f"recv {sender} {tag}", Messages())
                surplus = sent.count - received.count
                if surplus < 0:
                    what = f"{_count(-surplus)} from rank {sender} with tag {tag}"
                    yield receiver, f"awaits {what}, which were never sent"
                elif surplus > spare:
                    what = f"{_count(surplus - spare)} to rank {receiver} with tag {tag}"
                    yield sender, f"has sent {what}, which were never received"
                spare -= min(max(surplus, 0), spare)
            if spare:
                yield receiver, f"awaits {_count(spare)} from any rank with tag {tag}, which were never sent"


def _count(number: int) -> str:
    return "1 message" if number == 1 else f"{number} messages"


def _unlike_in(groups: Mapping[int, GroupState]) -> Iterator[tuple[int, str]]:
    """Yield ranks of a group, and the messages that they receive with another dtype or size than was sent."""
    for (receiver, group), (sender, peer) in permutations(groups.items(), 2):
        for key, received in group.messages.items():
            tag = key.split()[2]
            if key != f"recv {sender} {tag}" or f"recv -1 {tag}" in group.messages:
                continue
            sent = peer.messages.get(f"send {receiver} {tag}", Messages())
            for number in range(received.count):
                one, other = sent.text(number), received.text(number)
                if one and other and Operation("", one).amounts != Operation("", other).amounts:
                    text = f"rank {sender} sends {one}, and rank {receiver} receives it as {other}"
                    yield receiver, f"{text}, message {number + 1},"
